/* The values of the weights that the pass `quantise` has put into the graph. */
#include "cpu/quantised.h"
#include "forge_internal.h"

#include <stdlib.h>

enum { ALIGN = 64 };

static int64_t aligned(int64_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

static Code fill(Context *ctx, Program *program, const Quantisations *list, Pool *pool, int threads) {
    Graph *g = program->graph;
    int64_t total = 0, widest = 0;
    char *scratch;
    for (uint32_t i = 0; i < list->count; i++) {
        const Quantisation *item = &list->items[i];
        total += aligned(g->constants[item->q].bytes);
        if (item->bits != 16) total += aligned(g->constants[item->scales].bytes);
        widest = item->weight.shape[1] > widest ? item->weight.shape[1] : widest;
    }
    TRY(memory_aligned(ctx, (size_t)total, &program->quantised));
    program->quantised_bytes = total;
    TRY(memory_aligned(ctx, (size_t)quantise_scratch(widest, threads), &scratch));
    char *at = program->quantised;
    Code code = CODE_OK;
    for (uint32_t i = 0; i < list->count && code == CODE_OK; i++) {
        const Quantisation *item = &list->items[i];
        Constant *q = &g->constants[item->q], *scales = item->bits == 16 ? NULL : &g->constants[item->scales];
        if (!item->weight.data) continue; /* a shape without values */
        q->data = at;
        at += aligned(q->bytes);
        if (scales) {
            scales->data = at;
            at += aligned(scales->bytes);
        }
        code = check_cancelled(ctx);
        if (code != CODE_OK) break;
        if (!quantise_weight(&item->weight, item->bits, item->group, q->data, scales ? scales->data : NULL, pool,
                             scratch))
            code = fail(ctx, CODE_INVALID,
                        "the weight '%.200s' has infinite values or NaN, which %d bits cannot hold: compile with "
                        "precision=\"fp32\"",
                        item->name, item->bits);
    }
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
