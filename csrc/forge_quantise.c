/* The values of the weights that the pass `quantise` has put into the graph. */
#include "cpu/quantised.h"
#include "forge_internal.h"

#include <stdlib.h>

enum { ALIGN = 64 };

static int64_t aligned(int64_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

static Code make(Context *ctx, Program *program, const Quantisation *item, Pool *pool, char *scratch) {
    Constant *q = &program->graph->constants[item->q];
    Constant *scales = item->bits == 16 ? NULL : &program->graph->constants[item->scales];
    const PackKey key = {.op = OP_quantised_linear, .bits = item->bits, .group = item->group, .weight = item->weight};
    int64_t count = item->weight.shape[0] * item->weight.shape[1];
    int64_t bytes = aligned(q->bytes) + (scales ? aligned(scales->bytes) : 0);
    bool made, shared = item->state && pack_shared(CONSTANT_STATE, count * (int64_t)dtype_size(item->weight.dtype));
    Pack *pack;
    TRY(packs_take(ctx, program->packs, &key, shared, bytes, &pack, &made));
    program->quantised[program->n_quantised++] = pack;
    q->data = pack->data;
    if (scales) scales->data = pack->data + aligned(q->bytes);
    if (!made) return CODE_OK;
    program->quantised_bytes += pack->bytes;
    TRY(check_cancelled(ctx));
    if (!quantise_weight(&item->weight, item->bits, item->group, q->data, scales ? scales->data : NULL, pool, scratch))
        return fail(ctx, CODE_INVALID,
                    "the weight '%.200s' has infinite values or NaN, which %d bits cannot hold: compile with "
                    "precision=\"fp32\"",
                    item->name, item->bits);
    if (shared) pack_publish(pack);
    return CODE_OK;
}

static Code fill(Context *ctx, Program *program, const Quantisations *list, Pool *pool, int threads) {
    int64_t widest = 0;
    char *scratch;
    for (uint32_t i = 0; i < list->count; i++)
        widest = list->items[i].weight.shape[1] > widest ? list->items[i].weight.shape[1] : widest;
    TRY(ARENA_NEW(ctx, &program->arena, list->count, &program->quantised));
    TRY(memory_aligned(ctx, (size_t)quantise_scratch(widest, threads), &scratch));
    Code code = CODE_OK;
    for (uint32_t i = 0; i < list->count && code == CODE_OK; i++) /* without data: a shape without values */
        if (list->items[i].weight.data) code = make(ctx, program, &list->items[i], pool, scratch);
    free(scratch);
    return code;
}

Code program_quantise(Context *ctx, Program *program, const Quantisations *list, int threads) {
    Pool *pool = NULL;
    if (list->count == 0) return CODE_OK;
    double start = forge_now_ms();
    if (threads > 1) TRY(pool_create(ctx, threads, &pool));
    bool mine = pool && pool_enter(pool);
    Code code = fill(ctx, program, list, mine ? pool : NULL, threads);
    if (mine) pool_leave(pool);
    pool_destroy(pool);
    program->pack_ms += forge_now_ms() - start;
    return code;
}
