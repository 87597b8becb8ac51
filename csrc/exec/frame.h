/* Inside of the executor: what exec.c (runs), build.c (makes the tasks), pack.c (weights) and
 * frame.c (memory of one call) share. */
#ifndef FORGE_EXEC_FRAME_H
#define FORGE_EXEC_FRAME_H

#include <stdatomic.h>

#include "exec/exec.h"

/* One instruction, in execution order. Its tensors are args[first_arg ..]: operands, then results. */
typedef struct Task {
    const Instr *instr;
    const Kernel *kernel; /* NULL: a host call */
    const void *prepared; /* packed weights or NULL */
    int64_t scratch;      /* offset in the arena, -1: none */
    uint32_t first_arg;
    uint32_t call;                /* host calls: number of the call, which is where its hold is kept */
    uint32_t first_drop, n_drops; /* holds that nothing uses after this task */
} Task;

/* args[arg].data is `bytes` after the start of the buffer that the patch belongs to. */
typedef struct Patch {
    uint32_t arg;
    int64_t bytes;
} Patch;

/* What one call in flight needs; kept on the executor's free list between calls. */
typedef struct Frame {
    struct Frame *next;
    char *arena;
    Tensor *args;
    void **holds; /* what host calls left with us: one a call, then one an object; NULL = nothing to release */
} Frame;

struct Executor {
    Arena memory;
    const Npuir *ir;
    Pool *pool; /* NULL: one thread */
    Task *tasks;
    uint32_t n_tasks, n_calls;
    Tensor *args; /* model of a frame's: types and strides, constants bound */
    uint32_t n_args;
    uint32_t *patch_start; /* patches of buffer b: patches[patch_start[b] .. patch_start[b + 1]) */
    Patch *patches;
    BufferId *borders; /* buffers of inputs and outputs: bound at the start of each call */
    uint32_t n_borders;
    uint32_t *drops;
    uint32_t *object_input; /* object -> graph input that brings it, UINT32_MAX: a host call makes it */
    char *packed;
    int64_t packed_bytes;

    /* Free list. The lock word is 0 or the process id of the holder: a child of fork() that finds its parent's id there
     * knows that the holder does not exist in it, and takes the lock over. */
    atomic_int lock;
    Frame *free;
};

/* "file.py:12 in forward" of a node, or "unknown source". */
const char *where_of(const Npuir *ir, const Node *node);
/* Address of a tensor without elements, since NULL means absent. */
static inline void *address_or_nothing(const void *address, const void *nothing) {
    return (void *)(uintptr_t)(address ? address : nothing);
}

/* Bytes aligned to 64 (large ones to huge pages), not zeroed; free() frees them. */
MUST_USE Code memory_aligned(Context *ctx, size_t bytes, char **out);
/* Points every argument that is a view of buffer `b` at it. */
void bind_buffer(const Executor *e, Tensor *args, BufferId b, void *base);

/* Makes tasks, arguments and patches of e->ir. */
MUST_USE Code executor_build(Context *ctx, Executor *e, KernelFn kernels);
/* Fills in `prepared` of the tasks whose kernels want their weights in another layout. */
MUST_USE Code executor_pack(Context *ctx, Executor *e);

MUST_USE Code frame_take(Context *ctx, Executor *e, Frame **out);
void frame_give(Executor *e, Frame *frame);
void frame_destroy(Frame *frame);

#endif
