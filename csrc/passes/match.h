/* Small helpers to recognise patterns in a graph, shared by the fusions. */
#ifndef FORGE_PASSES_MATCH_H
#define FORGE_PASSES_MATCH_H

#include "passes/passes.h"

/* A compacted graph (node ids are positions) with its uses. Values and nodes made since have no uses recorded: they
 * match nothing. */
typedef struct Match {
    PassContext *pc;
    Graph *g;
    Arena *scratch; /* dropped when the fusion is done */
    Uses uses;
    uint32_t n_values;
    bool effects; /* there are host calls that may write memory: then a copy is a copy */
} Match;

/* Runs `fusion` on the compacted graph, drops what it left unused and compacts again. */
typedef Code (*FusionFn)(Match *m);
MUST_USE Code match_run(PassContext *pc, Graph *g, FusionFn fusion);

/* The live node that makes `v` as its first result if its operator is `op`, else NODE_NONE. */
NodeId match_def(const Match *m, ValueId v, Op op);
/* The same, if `v` has just one use and is no output: then the node may be absorbed by that use. */
NodeId match_only(const Match *m, ValueId v, Op op);
bool match_one_use(const Match *m, ValueId v);
/* The node is op(x, scalar) with the scalar on the right, or on either side of a commutative operator. */
bool match_scalar(const Node *node, Op op, double *scalar);
/* op(a, b) with two operands. */
bool match_two(const Node *node, Op op);
bool match_near(double a, double b); /* equal to about f32 precision */
bool match_same_type(const Match *m, ValueId a, ValueId b);
bool match_last_dim(const Match *m, const Node *reduce, ValueId x); /* reduces the last dimension of x, keeping it */

/* Inserts a one-result node of the type of `like` before `before`, gives its uses to it and kills `before`. */
MUST_USE Code match_replace(Match *m, NodeId root, Op op, const ValueId *operands, size_t n_operands, NodeId *out);

#endif
