/* The executor: walks the schedule of a planned Npuir. */
#ifndef FORGE_EXEC_EXEC_H
#define FORGE_EXEC_EXEC_H

#include "exec/kernel.h"
#include "npuir/npuir.h"

typedef const Kernel *(*KernelFn)(Op op);

/* Host calls (host nodes) go out through this. `in` and `out` are indexed by operand / result. Tensors carry memory;
 * for opaque operands `data` is the object. For a tensor result the callee sets out[k].data and strides to memory that
 * stays valid until `release(hold)`, row major and not memory of an operand; for an opaque result it sets data to the
 * object, which is then ours to release. A call that fails leaves nothing behind. May be called from any thread, one at
 * a time a frame. */
typedef struct HostCalls { /* `call` may be NULL for a program that only passes objects through */
    Code (*call)(Context *ctx, void *user, uint32_t callee, const Tensor *in, uint32_t n_in, Tensor *out,
                 uint32_t n_out, void **hold);
    void (*release)(void *user, void *hold);  /* of a call's hold, or of an object that a call made */
    void (*retain)(void *user, void *object); /* of an object that is handed out in `objects` */
    void *user;
} HostCalls;

typedef struct Executor Executor;
/* `ir` (scheduled and allocated) and its graph are borrowed and must outlive the executor. Checks that all is runnable
 * on the host; packs weights (timed by the caller) into memory of its own. */
MUST_USE Code executor_create(Context *ctx, const Npuir *ir, KernelFn kernels, int threads, bool pack, Executor **out);
void executor_destroy(Executor *executor);
int64_t executor_packed_bytes(const Executor *executor);
/* inputs[i]: row-major memory of graph input i (for an opaque input: the object). outputs[i]: memory for output i, row
 * major; for opaque outputs and outputs that only the host knows the object is written to objects[i]. Thread-safe: each
 * call takes a frame (arena, registers) from a free list. Each object in objects[] is the caller's to release; all
 * others are released here, after their last use. */
MUST_USE Code executor_run(Context *ctx, Executor *executor, void *const *inputs, void *const *outputs, void **objects,
                           const HostCalls *host);

#endif
