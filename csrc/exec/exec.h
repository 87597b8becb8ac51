/* The executor: walks the schedule of a planned Npuir. */
#ifndef FORGE_EXEC_EXEC_H
#define FORGE_EXEC_EXEC_H

#include "exec/backend.h"
#include "exec/kernel.h"
#include "exec/packs.h"

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

/* Emulation of an NPU: its instructions run on host kernels, and what the NPU would hold in f16 is rounded to f16:
 * float results (beyond its range they become infinite), values that enter it, scalars in attributes (finite ones stay
 * finite) and constants. Accumulation inside of an instruction is the kernel's, in f32. Integers and bools are exact.
 *
 * `weight`, called while the executor is made only, writes the values that the NPU would have for a float constant.
 * `out` has the type and shape of `weight` and strides of its own; `linear`: it is the weight of a linear, [N, K],
 * which may be quantised. */
typedef struct Emulation {
    Code (*weight)(Context *ctx, void *user, const Tensor *weight, bool linear, const Tensor *out);
    void *user;
} Emulation;

typedef struct ExecutorOptions {
    KernelFn kernels;
    int threads;
    bool pack;    /* weights into the layouts that kernels like */
    Packs *packs; /* where those of other programs are found; NULL: there are none */
    /* Who runs the instructions on the NPU; with neither one they are an error. */
    const Segments *segments; /* of the backend */
    Backend *backend;
    const Emulation *emulation; /* copied */
} ExecutorOptions;

/* Bytes aligned to 64 (large ones to huge pages), not zeroed; free() frees them. */
MUST_USE Code memory_aligned(Context *ctx, size_t bytes, char **out);

typedef struct Executor Executor;
/* `ir` (scheduled and allocated), its graph, segments and backend are borrowed and must outlive the executor. Checks
 * that all is runnable; packs weights (timed by the caller) that it does not find packed. */
MUST_USE Code executor_create(Context *ctx, const Npuir *ir, const ExecutorOptions *options, Executor **out);
void executor_destroy(Executor *executor);
int64_t executor_packed_bytes(const Executor *executor); /* that were packed for it, not found */
/* inputs[i]: row-major memory of graph input i (for an opaque input: the object). outputs[i]: memory for output i, row
 * major; for opaque outputs and outputs that only the host knows the object is written to objects[i]. Thread-safe: each
 * call takes a frame (arena, registers) from a free list. Each object in objects[] is the caller's to release; all
 * others are released here, after their last use. */
MUST_USE Code executor_run(Context *ctx, Executor *executor, void *const *inputs, void *const *outputs, void **objects,
                           const HostCalls *host);

/* When a task of a call began and ended, by CLOCK_MONOTONIC. A task is one instruction, or what a backend runs in one
 * go: instructions order[first .. first + count). */
typedef struct TaskTime {
    uint32_t first, count;
    int64_t start_ns, end_ns;
} TaskTime;
uint32_t executor_task_count(const Executor *executor);
/* executor_run, members of a group one after the other, that also fills times[0 .. executor_task_count()). */
MUST_USE Code executor_profile(Context *ctx, Executor *executor, void *const *inputs, void *const *outputs,
                               void **objects, const HostCalls *host, TaskTime *times);

#endif
