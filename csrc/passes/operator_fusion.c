/* Operator fusion: fewer, larger operators.
 *
 * requires  a verified graph
 * keeps     every f32 result but for the rounding of norms, and of a bias that is added while still in registers
 * breaks    nothing; intermediate values that others use stay
 *
 * `alpha` sets how far it goes, by classes. Each level adds to the one below: the node count never rises with it.
 *   > 0    hand-written activations and norms become operators
 *   >= 0.2 matmul with a matrix of weights and its bias become `linear`, of the rank of its neighbours
 *   >= 0.4 rotary embedding becomes `rope`
 *   >= 0.6 elementwise operators after a contraction become its epilogue
 *   >= 0.8 the sum before a norm joins the norm
 *   1      chains of elementwise operators become one
 */
#include "passes/fusion.h"

typedef struct Level {
    double alpha; /* from here on; the first is "more than 0" */
    FusionFn fusion;
} Level;

Code pass_operator_fusion(PassContext *pc, Graph *g) {
    const Level levels[] = {
        {1e-9, fuse_activations}, {1e-9, fuse_norms},    {0.2, fuse_linears},   {0.2, fuse_reshapes},
        {0.4, fuse_rope},         {0.6, fuse_epilogues}, {0.8, fuse_residuals}, {1.0, fuse_elementwise},
    };
    TRY(graph_compact(pc->ctx, g));
    for (size_t k = 0; k < sizeof levels / sizeof *levels; k++) {
        if (pc->options.alpha >= levels[k].alpha) TRY(match_run(pc, g, levels[k].fusion));
        TRY(check_cancelled(pc->ctx));
    }
    return CODE_OK;
}
