/* Elementwise programs: the body of `elementwise` nodes and the epilogue of contractions.
 *
 * A program is a list of steps over the operands of its node. Each step applies one ELEMENTWISE operator to operands or
 * earlier steps; the last step is the result. Every step's value has its own dtype (a step rounds as the operator alone
 * would: fusing changes no bit but in the f32 contraction that it is attached to).
 *
 * Encoding in the INTS attribute `program`: STEP_WORDS int64 words a step. */
#ifndef FORGE_GRAPH_PROGRAM_H
#define FORGE_GRAPH_PROGRAM_H

#include "graph/graph.h"

enum { STEP_WORDS = 8, PROGRAM_MAX_STEPS = 32, PROGRAM_MAX_INPUTS = 16 };

/* Source of a step operand: >= 0 is program input k (operand k of an `elementwise` node; of a contraction: 0 is the
 * product, k >= 1 the k-th operand after its fixed ones), < 0 is step -(s + 1), STEP_NONE is absent. */
enum { STEP_NONE = INT32_MAX };

typedef struct Step {
    Op op;       /* an ELEMENTWISE operator other than `elementwise` */
    DType dtype; /* of its result */
    int32_t src[3];
    Scalar scalar; /* binary: as attribute `scalar`; clamp: low */
    Scalar high;   /* clamp only */
    bool flag;     /* binary: `reverse`; gelu: `approximate` */
} Step;

/* word 0: op | dtype << 16 | flag << 24 | scalar kind << 25 | high kind << 27; words 1-3: src; 4: scalar bits; 5: high
 * bits; 6, 7: zero */
void step_encode(const Step *step, int64_t words[STEP_WORDS]);
bool step_decode(const int64_t words[STEP_WORDS], Step *step); /* false: malformed */
/* Node attributes of an elementwise operator as a step (src filled in operand order from `srcs`). */
void step_from_node(const Node *node, DType result, const int32_t *srcs, size_t n_srcs, Step *step);
/* Checks a whole program: ops, sources, dtypes (`input_types`: dtype of each program input). */
MUST_USE Code program_check(Context *ctx, const int64_t *words, size_t n_words, const DType *input_types,
                            size_t n_inputs, DType *result);

#endif
