/* Weight packing: one allocation for all; weights that several instructions use in the same way are packed once. */
#include <string.h>
#include <sys/mman.h>

#include "exec/frame.h"

enum { PACK_ALIGN = 64, POPULATE_BYTES = 4 << 20 };

static bool same_attrs(const Node *a, const Node *b) {
    const OpInfo *info = op_info(a->op);
    for (uint8_t k = 0; k < info->n_attrs; k++) {
        const Attr *x = &a->attrs[k], *y = &b->attrs[k];
        AttrKind kind = attr_kind(info->attrs[k]);
        if (info->attrs[k] == ATTR_program) continue; /* an epilogue does not change how the weight lies */
        if (kind == KIND_INTS) {
            if (x->ints.count != y->ints.count) return false;
            if (x->ints.count && memcmp(x->ints.items, y->ints.items, x->ints.count * sizeof(int64_t)) != 0)
                return false;
        } else if (kind == KIND_SCALAR ? !scalar_equal(x->s, y->s) : x->i != y->i) {
            return false;
        }
    }
    return true;
}

static bool same_tensor(const Tensor *a, const Tensor *b) {
    if (a->data != b->data || a->dtype != b->dtype || a->rank != b->rank) return false;
    size_t bytes = a->rank * sizeof(int64_t);
    return memcmp(a->shape, b->shape, bytes) == 0 && memcmp(a->strides, b->strides, bytes) == 0;
}

/* The packed form depends on operands that are constants and on the types of the others: e->args has just that. */
static bool same_packing(const Executor *e, const Task *a, const Task *b) {
    if (a->node->op != b->node->op || a->n_in != b->n_in) return false;
    for (uint32_t k = 0; k < a->n_in; k++)
        if (!same_tensor(&e->args[a->first_arg + k], &e->args[b->first_arg + k])) return false;
    return same_attrs(a->node, b->node);
}

static size_t packing_hash(const Executor *e, const Task *task) {
    uint64_t hash = (uint64_t)task->node->op;
    for (uint32_t k = 0; k < task->n_in; k++)
        hash = (hash ^ (uint64_t)(uintptr_t)e->args[task->first_arg + k].data) * UINT64_C(0x9e3779b97f4a7c15);
    return (size_t)(hash >> 20);
}

typedef struct Packed {
    Task *task;     /* that it is made for */
    int64_t offset; /* in the allocation */
} Packed;

/* Finds where each task's packed weights lie: `place[t]` is their offset or -1; `list` has each distinct one. */
static Code plan(Context *ctx, Executor *e, int64_t *place, Packed *list, uint32_t *n_list) {
    size_t slots = 16;
    while (slots < 2 * (size_t)e->n_tasks) slots *= 2;
    uint32_t *table; /* 0: free, else list index + 1 */
    TRY(ARENA_NEW(ctx, &e->memory, slots, &table));
    for (uint32_t t = 0; t < e->n_tasks; t++) {
        Task *task = &e->tasks[t];
        place[t] = -1;
        if (!task->kernel || !task->kernel->prepare || !task->kernel->prepared_bytes) continue;
        int64_t bytes = task->kernel->prepared_bytes(e->ir->graph, task->node);
        if (bytes <= 0) continue;
        size_t slot = packing_hash(e, task) & (slots - 1);
        while (table[slot] && !same_packing(e, list[table[slot] - 1].task, task)) slot = (slot + 1) & (slots - 1);
        if (!table[slot]) {
            list[*n_list] = (Packed){task, e->packed_bytes};
            table[slot] = ++*n_list;
            if (bytes > INT64_MAX / 2 - e->packed_bytes)
                return fail(ctx, CODE_NO_MEMORY, "out of memory: packed weights");
            e->packed_bytes += (bytes + PACK_ALIGN - 1) / PACK_ALIGN * PACK_ALIGN;
        }
        place[t] = list[table[slot] - 1].offset;
    }
    return CODE_OK;
}

#ifdef MADV_POPULATE_WRITE
static void populate_part(void *arg, int64_t part, int thread) {
    (void)thread;
    const Executor *e = arg;
    int64_t begin = part * POPULATE_BYTES, bytes = e->packed_bytes - begin;
    if (bytes > POPULATE_BYTES) bytes = POPULATE_BYTES;
    (void)madvise(e->packed + begin, (size_t)bytes, MADV_POPULATE_WRITE); /* a hint: else the first store brings it */
}

/* The system zeroes fresh memory when it is first touched. All threads do that here, and before packing: a store past
 * the caches to a line that was just zeroed in them would be slow. */
static void populate(Executor *e, Pool *pool) {
    if (e->packed_bytes >= POPULATE_BYTES) pool_run(pool, (e->packed_bytes - 1) / POPULATE_BYTES + 1, populate_part, e);
}
#else
static void populate(Executor *e, Pool *pool) { (void)e, (void)pool; }
#endif

Code executor_pack(Context *ctx, Executor *e) {
    int64_t *place;
    Packed *list;
    uint32_t n_list = 0;
    TRY(ARENA_NEW(ctx, &e->memory, e->n_tasks, &place));
    TRY(ARENA_NEW(ctx, &e->memory, e->n_tasks, &list));
    TRY(plan(ctx, e, place, list, &n_list));
    if (n_list == 0) return CODE_OK;
    TRY(memory_aligned(ctx, (size_t)e->packed_bytes, &e->packed));

    bool mine = e->pool && pool_enter(e->pool);
    Code code = CODE_OK;
    progress_begin(ctx->progress, PHASE_PACK, e->packed_bytes);
    populate(e, mine ? e->pool : NULL);
    for (uint32_t i = 0; i < n_list && code == CODE_OK; i++) {
        const Task *task = list[i].task;
        code = check_cancelled(ctx);
        if (code == CODE_OK)
            code = task->kernel->prepare(ctx, task->node, &e->args[task->first_arg], mine ? e->pool : NULL,
                                         e->packed + list[i].offset);
        int64_t end = i + 1 < n_list ? list[i + 1].offset : e->packed_bytes;
        progress_add(ctx->progress, end - list[i].offset);
        if (code != CODE_OK && code != CODE_CANCELLED)
            fail_prefix(ctx, "packing %s (%s)", op_info(task->node->op)->name, where_of(e->ir, task->node));
    }
    if (mine) pool_leave(e->pool);
    TRY(code);
    for (uint32_t t = 0; t < e->n_tasks; t++)
        if (place[t] >= 0) e->tasks[t].prepared = e->packed + place[t];
    return CODE_OK;
}
