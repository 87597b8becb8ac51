/* Device constants: position ids, RoPE tables and masks that come from buffers are computed once, at compile time.
 * Requires: an evaluator (without one nothing happens). Keeps: host nodes and inputs. Breaks: nothing.
 * Unlike `fold` it may make a table that is larger than the state behind it, within a budget for the graph. It does not
 * touch what only serves as the matrix of a contraction: that would be a second copy of the weights. */
#include "passes/evaluate.h"

typedef struct Budget {
    int64_t left;
} Budget;

static bool may_fold(const PassContext *pc, const Sources *sources, int64_t bytes) {
    return !sources->narrow && bytes <= pc->options.fold_limit_bytes;
}

static bool may_keep(PassContext *pc, const Sources *sources, int64_t bytes, bool weight_only, void *user) {
    (void)pc, (void)sources;
    Budget *budget = user;
    if (weight_only || bytes > budget->left) return false;
    budget->left -= bytes;
    return true;
}

Code pass_device_constant(PassContext *pc, Graph *g) {
    Budget budget = {pc->options.fold_limit_bytes};
    FoldPolicy policy = {
        .pass = "device_constant", .may_fold = may_fold, .may_keep = may_keep, .remarks = true, .user = &budget};
    bool changed = false;
    return fold_graph(pc, g, &policy, &changed);
}
