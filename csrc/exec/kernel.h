/* The interface between the executor and the host kernels of cpu/. */
#ifndef FORGE_EXEC_KERNEL_H
#define FORGE_EXEC_KERNEL_H

#include <stdatomic.h>

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

/* The work of a call as parts that may run beside those of other calls: body(arg, part, thread) for 0 <= part < count,
 * in any order, on any thread. What they need lies in the call's scratch. */
typedef struct KernelParts {
    int64_t count, work; /* work: multiply-adds of all, by which it is judged whether threads are worth waking */
    PoolBody body;
    void *arg;
    const atomic_int *fault; /* EwFault of any part, for `failed` */
} KernelParts;

typedef struct Kernel {
    Code (*run)(KernelCall *call);
    KernelTraits traits;
    int64_t (*scratch)(const Graph *g, const Node *node, int threads); /* NULL: none */
    /* For instructions that run together (Instr.group). `columns`: how many columns of the result each part makes, of
     * all rows, or 0: such a node runs alone; operand 0 must be row major, and so must the operands of its epilogue.
     * `split` begins, instead of `run`, and leaves the parts to the caller; `failed` says what they met with. */
    int64_t (*columns)(const Graph *g, const Node *node);
    Code (*split)(KernelCall *call, KernelParts *parts);
    Code (*failed)(Context *ctx, const KernelParts *parts);
    /* Packing of operand 1, the weight, at compile time: what `prepare` makes depends on the operator and on it alone.
     * `prepared_bytes` is 0 where nothing is to be packed (operand not constant, no data). in[k].data NULL: not
     * constant. */
    int64_t (*prepared_bytes)(const Graph *g, const Node *node);
    Code (*prepare)(Context *ctx, const Node *node, const Tensor *in, Pool *pool, void *prepared);
} Kernel;

/* NULL: no kernel for this operator. Implemented by cpu/kernels.c. */
const Kernel *cpu_kernel(Op op);
/* Folding: runs a node on the calling thread with malloc'd scratch. Matches EvalFn. */
Code cpu_eval(Context *ctx, const Graph *g, NodeId node, const Tensor *in, size_t n_in, Tensor *out, size_t n_out,
              void *user);

#endif
