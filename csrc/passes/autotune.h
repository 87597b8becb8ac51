/* Search for pass options by a cost model. Driven by forge.c when `autotune` is asked for; not a pass itself. */
#ifndef FORGE_PASSES_AUTOTUNE_H
#define FORGE_PASSES_AUTOTUNE_H

#include "passes/passes.h"

typedef Code (*CostFn)(Context *ctx, const Graph *g, void *user, double *score);

/* Sets alpha, fusion_limit and fuse_layout of pc->options to the best found: each candidate runs `passes` on a clone of
 * `g`, which is left as it is. Takes no longer than `budget_ms` (the first candidate, the options as given, always
 * runs). */
MUST_USE Code autotune(PassContext *pc, const Graph *g, const Pass *const *passes, size_t n_passes, CostFn cost,
                       void *user, double budget_ms);

#endif
