/* The interface between the executor and the host kernels of cpu/. */
#ifndef FORGE_EXEC_KERNEL_H
#define FORGE_EXEC_KERNEL_H

#include "exec/pool.h"
#include "npuir/npuir.h"

/* Arguments of one kernel run. Tensors are views with data set; absent operands and skipped results have data NULL. */
typedef struct KernelCall {
    Context *ctx;
    const Node *node; /* attributes */
    const Tensor *in;
    Tensor *out;
    uint32_t n_in, n_out;
    void *scratch;        /* `scratch` bytes as asked, 64-byte aligned */
    const void *prepared; /* what `prepare` made, or NULL: then the kernel packs on the fly */
    Pool *pool;           /* may be NULL: run on this thread */
} KernelCall;

typedef struct Kernel {
    Code (*run)(KernelCall *call);
    KernelTraits traits;
    int64_t (*scratch)(const Graph *g, const Node *node, int threads); /* NULL: none */
    /* Weight packing at compile time. `prepared_bytes` is 0 where nothing is to be packed (operand not constant, no
     * data). in[k].data NULL: not constant. */
    int64_t (*prepared_bytes)(const Graph *g, const Node *node);
    Code (*prepare)(Context *ctx, const Node *node, const Tensor *in, Pool *pool, void *prepared);
} Kernel;

/* NULL: no kernel for this operator. Implemented by cpu/kernels.c. */
const Kernel *cpu_kernel(Op op);
/* Folding: runs a node on the calling thread with malloc'd scratch. Matches EvalFn. */
Code cpu_eval(Context *ctx, const Graph *g, NodeId node, const Tensor *in, size_t n_in, Tensor *out, size_t n_out,
              void *user);

#endif
