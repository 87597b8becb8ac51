/* Optimization passes over the graph. A pass is one file with one exported function and one line in passes.def. */
#ifndef FORGE_PASSES_PASSES_H
#define FORGE_PASSES_PASSES_H

#include "graph/graph.h"

/* Evaluates one node on constant operands (folding needs kernels, but no pass may include cpu/). `out[k].data` is
 * memory of the right size, row major. CODE_UNSUPPORTED without text set in ctx means "cannot": the pass leaves the
 * node alone. */
typedef Code (*EvalFn)(Context *ctx, const Graph *g, NodeId node, const Tensor *in, size_t n_in, Tensor *out,
                       size_t n_out, void *user);

/* Why a pass did not fuse, or how often it did: shown in the report. */
typedef struct Remark {
    const char *pass;
    const char
        *text; /* e.g. "matched: attention from softmax", "declined: mask depends on a value that is used elsewhere" */
    int32_t source; /* of the node concerned, -1 none */
    uint32_t count; /* equal remarks are merged */
} Remark;
typedef struct Remarks {
    Remark *items;
    uint32_t count, capacity;
} Remarks;

/* A weight [N, K] that the pass `quantise` has replaced by constants `q` and `scales`, whose values are still to be
 * made of it. */
typedef struct Quantisation {
    Tensor weight; /* data NULL: a shape only */
    bool state;    /* of the caller's memory */
    char *name;
    int bits;
    int64_t group;
    uint32_t q, scales; /* indices of constants; of 16 bits there are no scales */
} Quantisation;
typedef struct Quantisations {
    Quantisation *items;
    uint32_t count, capacity;
} Quantisations;

typedef struct PassOptions {
    double alpha;             /* 0..1: how far operator fusion goes */
    int64_t fusion_limit;     /* most steps of an elementwise program (<= PROGRAM_MAX_STEPS) */
    bool fuse_layout;         /* layout pass may choose memory orders */
    int64_t fold_limit_bytes; /* largest literal that folding makes */
    int weight_bits;          /* quantise: 16 (bf16), 8 or 4; 0: weights stay as they are */
    int64_t weight_group;     /* quantise: columns that share a scale; 0: all */
    bool quantised;           /* the target has products with quantised weights */
    bool npu;                 /* the target has an NPU */
} PassOptions;
void pass_options_default(PassOptions *options);

typedef struct PassContext {
    Context *ctx;
    Arena *arena; /* of the compilation: for results that live on */
    PassOptions options;
    EvalFn eval; /* NULL: nothing is folded by value */
    void *eval_user;
    Remarks remarks;
    Quantisations quantisations;
} PassContext;
MUST_USE Code remark_add(PassContext *pc, const char *pass, int32_t source, const char *format, ...) PRINTF_LIKE(4, 5);

typedef Code (*PassFn)(PassContext *pc, Graph *g);
typedef struct Pass {
    const char *name; /* as in passes= and FORGE_DUMP files */
    PassFn run;
    bool by_default;
} Pass;
/* In default order. */
const Pass *pass_table(size_t *count);
const Pass *pass_find(const char *name, size_t length);

#define PASS(name, function, by_default) Code function(PassContext *pc, Graph *g);
#include "passes/passes.def"
#undef PASS

#endif
