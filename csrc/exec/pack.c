/* Weight packing: weights that several instructions, or programs of one store, use in the same way are packed once. */
#include <string.h>
#include <sys/mman.h>

#include "exec/frame.h"

enum { PACK_ALIGN = 64, POPULATE_BYTES = 4 << 20 };

/* The constant behind operand 1, if programs may share what is made of it. */
static bool is_shared(const Executor *e, const Task *task) {
    if (e->options.emulation || task->in[1] == REG_NONE) return false; /* emulated: rounded copies */
    const Buffer *buffer = &e->ir->buffers[e->ir->regs[task->in[1]].buffer];
    if (buffer->space != SPACE_CONSTANT) return false;
    const Constant *constant = &e->ir->graph->constants[buffer->index];
    return pack_shared(constant->kind, constant->bytes);
}

static size_t hash_of(const PackKey *key) {
    uint64_t hash = (uint64_t)key->op ^ (uint64_t)(uintptr_t)key->weight.data;
    return (size_t)(hash * UINT64_C(0x9e3779b97f4a7c15) >> 20);
}

typedef struct Made { /* to be filled: of this program's packs */
    const Task *task; /* that it is made for */
    uint32_t pack;
    bool shared;
} Made;

/* Finds or makes room for each task's packed weights: `which[t]` is the pack's number + 1, or 0; `list` has those to be
 * filled. */
static Code plan(Context *ctx, Executor *e, uint32_t *which, Made *list, uint32_t *n_list) {
    size_t slots = 16;
    while (slots < 2 * (size_t)e->n_tasks) slots *= 2;
    uint32_t *table; /* 0: free, else number + 1 */
    TRY(ARENA_NEW(ctx, &e->memory, slots, &table));
    TRY(ARENA_NEW(ctx, &e->memory, e->n_tasks, &e->packs));
    for (uint32_t t = 0; t < e->n_tasks; t++) {
        const Task *task = &e->tasks[t];
        if (!task->kernel || !task->kernel->prepare || !task->kernel->prepared_bytes) continue;
        int64_t bytes = task->kernel->prepared_bytes(e->ir->graph, task->node);
        if (bytes <= 0) continue;
        bytes = (bytes + PACK_ALIGN - 1) / PACK_ALIGN * PACK_ALIGN;
        PackKey key = {.op = task->node->op, .weight = e->args[task->first_arg + 1]};
        size_t slot = hash_of(&key) & (slots - 1);
        while (table[slot] && !pack_key_equal(&e->packs[table[slot] - 1]->key, &key)) slot = (slot + 1) & (slots - 1);
        if (!table[slot]) {
            bool made, shared = is_shared(e, task);
            TRY(packs_take(ctx, e->options.packs, &key, shared, bytes, &e->packs[e->n_packs], &made));
            table[slot] = ++e->n_packs;
            if (made) {
                list[(*n_list)++] = (Made){task, e->n_packs - 1, shared};
                e->packed_bytes += bytes;
            }
        }
        which[t] = table[slot];
    }
    return CODE_OK;
}

#ifdef MADV_POPULATE_WRITE
typedef struct Part {
    char *begin;
    int64_t bytes;
} Part;

static void populate_part(void *arg, int64_t part, int thread) {
    (void)thread;
    const Part *p = (const Part *)arg + part;
    (void)madvise(p->begin, (size_t)p->bytes, MADV_POPULATE_WRITE); /* a hint: else the first store brings it */
}

/* The system zeroes fresh memory when it is first touched. All threads do that here, and before packing: a store past
 * the caches to a line that was just zeroed in them would be slow. */
static Code populate(Context *ctx, Executor *e, const Made *list, uint32_t n_list, Pool *pool) {
    Part *parts;
    int64_t n = 0;
    TRY(ARENA_NEW(ctx, &e->memory, (size_t)(e->packed_bytes / POPULATE_BYTES) + n_list, &parts));
    for (uint32_t i = 0; i < n_list; i++) {
        const Pack *pack = e->packs[list[i].pack];
        if (pack->bytes < POPULATE_BYTES) continue; /* not pages of its own */
        for (int64_t at = 0; at < pack->bytes; at += POPULATE_BYTES, n++)
            parts[n] =
                (Part){pack->data + at, pack->bytes - at < POPULATE_BYTES ? pack->bytes - at : (int64_t)POPULATE_BYTES};
    }
    pool_run(pool, n, populate_part, parts);
    return CODE_OK;
}
#else
static Code populate(Context *ctx, Executor *e, const Made *list, uint32_t n_list, Pool *pool) {
    (void)ctx, (void)e, (void)list, (void)n_list, (void)pool;
    return CODE_OK;
}
#endif

static Code fill(Context *ctx, Executor *e, const Made *list, uint32_t n_list, Pool *pool) {
    TRY(populate(ctx, e, list, n_list, pool));
    for (uint32_t i = 0; i < n_list; i++) {
        const Task *task = list[i].task;
        Pack *pack = e->packs[list[i].pack];
        TRY(check_cancelled(ctx));
        Code code = task->kernel->prepare(ctx, task->node, &e->args[task->first_arg], pool, pack->data);
        progress_add(ctx->progress, pack->bytes);
        if (code != CODE_OK && code != CODE_CANCELLED)
            fail_prefix(ctx, "packing %s (%s)", op_info(task->node->op)->name, where_of(e->ir, task->node));
        TRY(code);
        if (list[i].shared) pack_publish(pack);
    }
    return CODE_OK;
}

Code executor_pack(Context *ctx, Executor *e) {
    uint32_t *which, n_list = 0;
    Made *list;
    TRY(ARENA_NEW(ctx, &e->memory, e->n_tasks, &which));
    TRY(ARENA_NEW(ctx, &e->memory, e->n_tasks, &list));
    TRY(plan(ctx, e, which, list, &n_list));
    if (n_list > 0) {
        bool mine = e->pool && pool_enter(e->pool);
        progress_begin(ctx->progress, PHASE_PACK, e->packed_bytes);
        Code code = fill(ctx, e, list, n_list, mine ? e->pool : NULL);
        if (mine) pool_leave(e->pool);
        TRY(code);
    }
    for (uint32_t t = 0; t < e->n_tasks; t++)
        if (which[t]) e->tasks[t].prepared = e->packs[which[t] - 1]->data;
    return CODE_OK;
}
