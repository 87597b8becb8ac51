/* Constant folding and exact simplification.
 * Requires: nothing; values are computed only where the context has an evaluator. Keeps: host nodes and inputs (random
 * numbers, mutated state). Breaks: nothing.
 * View operators on constants become constants over the same memory. What depends on the program alone is computed up
 * to a size limit. What depends on state must not copy weights: see `may_fold`. */
#include "passes/evaluate.h"

enum {
    STATE_BYTES = 64 << 10, /* largest result made from state */
    MAX_ROUNDS = 4,         /* simplification makes constants and constants make simplification possible */
};

static bool may_fold(const PassContext *pc, const Sources *sources, int64_t bytes) {
    if (bytes > pc->options.fold_limit_bytes) return false;
    if (sources->narrow) return false; /* packed int4 / int8 weights are unpacked by the run, not by us */
    if (!sources->state) return true;
    return bytes <= SMALL_BYTES || (bytes <= sources->bytes && bytes <= STATE_BYTES);
}

static bool may_keep(PassContext *pc, const Sources *sources, int64_t bytes, bool weight_only, void *user) {
    (void)pc, (void)sources, (void)bytes, (void)weight_only, (void)user;
    return true;
}

Code pass_fold(PassContext *pc, Graph *g) {
    static const FoldPolicy policy = {.pass = "fold", .may_fold = may_fold, .may_keep = may_keep};
    bool changed = true;
    for (int round = 0; changed && round < MAX_ROUNDS; round++) {
        bool folded = false, simplified = false;
        TRY(fold_graph(pc, g, &policy, &folded));
        TRY(simplify_graph(pc, g, &simplified));
        changed = simplified;
    }
    return CODE_OK;
}
