/* Inside of the executor: what exec.c (runs), build.c (makes the tasks), pack.c (weights), emulate.c (an NPU's numbers
 * on the host), frame.c (memory of one call) and pages.c (weights' pages) share. */
#ifndef FORGE_EXEC_FRAME_H
#define FORGE_EXEC_FRAME_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "exec/exec.h"

typedef enum TaskKind { TASK_KERNEL, TASK_HOST, TASK_SEGMENT } TaskKind;

/* One instruction or one segment, in execution order. Its tensors are args[first_arg ..]: operands, then results. */
typedef struct Task {
    TaskKind kind;
    const Instr *instr; /* of a segment: its first */
    const RegId *in, *out;
    uint32_t n_in, n_out;
    const Node *node;     /* attributes for the kernel */
    const Kernel *kernel; /* KERNEL */
    const void *prepared; /* packed weights or NULL */
    int64_t scratch;      /* offset in the arena of the instruction's device, -1: none */
    const bool *enters;   /* emulated: which operands come from outside of the NPU; NULL: not emulated */
    uint32_t first_arg;
    uint32_t number;              /* HOST: of the call, which is where its hold is kept; SEGMENT: of the segment */
    uint32_t first_drop, n_drops; /* holds that nothing uses after this task */
    uint32_t together;            /* tasks from here on that run together; of the first of a group, else 1 */
    uint32_t head; /* in a group: the member whose parts this one's follow, part by part; its own place if none */
} Task;

/* args[arg].data is `bytes` after the start of the buffer that the patch belongs to. */
typedef struct Patch {
    uint32_t arg;
    int64_t bytes;
} Patch;

/* What one call in flight needs; kept on the executor's free list between calls. */
typedef struct Frame {
    struct Frame *next;
    char *arena[DEVICE_COUNT]; /* the NPU's too: values that cross its border; pages that nobody touches cost nothing */
    char *shadow;              /* emulation: rounded operands of the task that runs */
    Tensor *args;
    void **holds;  /* what host calls left with us: one a call, then one an object; NULL = nothing to release */
    void *backend; /* the backend's frame */
} Frame;

/* Weights whose pages a thread moves together: pages.c. */
typedef struct PageSpan {
    uintptr_t begin, end;
} PageSpan;
typedef struct Pages {
    PageSpan *spans;
    uint32_t n_spans;
    pthread_t thread;
    pid_t process; /* whose thread it is; 0: none */
    atomic_bool stop;
} Pages;

struct Executor {
    Arena memory;
    const Npuir *ir;
    ExecutorOptions options;
    Emulation emulation; /* what options.emulation points at, if anything */
    Pool *pool;          /* NULL: one thread */
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
    Pages pages;
    Pack **packs; /* referenced */
    uint32_t n_packs;
    int64_t packed_bytes; /* of those that were made for it */
    int64_t shadow_bytes;

    atomic_int lock; /* of the free list */
    Frame *free;
};

static inline bool allocation_fails(Context *ctx) { return ctx->fail_allocation && --ctx->fail_allocation == 0; }

/* "file.py:12 in forward" of a node, or "unknown source". */
const char *where_of(const Npuir *ir, const Node *node);
/* Address of a tensor without elements, since NULL means absent. */
static inline void *address_or_nothing(const void *address, const void *nothing) {
    return (void *)(uintptr_t)(address ? address : nothing);
}

enum { HUGE_PAGE = 2 << 20, HUGE_LEAST_BYTES = 2 * HUGE_PAGE };
/* Asks for huge pages where whole ones fit, in memory of at least HUGE_LEAST_BYTES that nobody has touched yet. A hint:
 * without it all works, slower. */
void memory_huge(void *memory, size_t bytes);
PageSpan huge_pages_within(const void *memory, size_t bytes); /* whole ones; none: begin >= end */

/* Points every argument that is a view of buffer `b` at it. */
void bind_buffer(const Executor *e, Tensor *args, BufferId b, void *base);

/* Makes tasks, arguments and patches of e->ir. */
MUST_USE Code executor_build(Context *ctx, Executor *e);
/* Rounds what the tasks of an emulated NPU have fixed: constants and scalars. Before packing. */
MUST_USE Code emulate_build(Context *ctx, Executor *e);
/* Runs a task of an emulated NPU; `shadow` has e->shadow_bytes. */
MUST_USE Code emulate_run(const Task *task, KernelCall *call, char *shadow);
/* Fills in `prepared` of the tasks whose kernels want their weights in another layout. */
MUST_USE Code executor_pack(Context *ctx, Executor *e);

/* Begins to put huge pages under weights that are read where they lie; `e` must not move until pages_stop. */
MUST_USE Code pages_start(Context *ctx, Executor *e);
void pages_stop(Executor *e);

MUST_USE Code frame_take(Context *ctx, Executor *e, Frame **out);
void frame_give(Executor *e, Frame *frame);
void frame_destroy(const Executor *e, Frame *frame);

#endif
