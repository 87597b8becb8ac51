/* Frames: the memory of one call, and the list of those that wait for the next. */
#include "exec/frame.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "exec/lock.h"

PageSpan huge_pages_within(const void *memory, size_t bytes) {
    uintptr_t begin = (uintptr_t)memory;
    return (PageSpan){(begin + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE, (begin + bytes) / HUGE_PAGE * HUGE_PAGE};
}

void memory_huge(void *memory, size_t bytes) {
    PageSpan span = huge_pages_within(memory, bytes);
    if (span.begin < span.end) (void)madvise((void *)span.begin, span.end - span.begin, MADV_HUGEPAGE);
}

static Code make_memory(Context *ctx, size_t bytes, bool huge, char **out) {
    void *memory = NULL;
    *out = NULL;
    if (allocation_fails(ctx) || posix_memalign(&memory, huge ? HUGE_PAGE : 64, bytes ? bytes : 64) != 0)
        return fail(ctx, CODE_NO_MEMORY, "out of memory: %zu bytes for the executor", bytes);
    if (huge) memory_huge(memory, bytes);
    *out = memory;
    return CODE_OK;
}

Code memory_aligned(Context *ctx, size_t bytes, char **out) {
    return make_memory(ctx, bytes, bytes >= HUGE_LEAST_BYTES, out);
}

/* Huge pages to its end: pages of 4 KB come from anywhere, and a product takes up to 5 % longer where those of its
 * scratch fall into the same sets of the L2. */
static Code arena_memory(Context *ctx, int64_t bytes, char **out) {
    bool huge = bytes >= HUGE_PAGE / 4;
    return make_memory(ctx, (size_t)(huge ? (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE : bytes), huge, out);
}

void bind_buffer(const Executor *e, Tensor *args, BufferId b, void *base) {
    for (uint32_t p = e->patch_start[b]; p < e->patch_start[b + 1]; p++)
        args[e->patches[p].arg].data = (char *)base + e->patches[p].bytes;
}

static Code frame_create(Context *ctx, const Executor *e, Frame **out) {
    const Npuir *ir = e->ir;
    *out = NULL;
    Frame *frame = allocation_fails(ctx) ? NULL : calloc(1, sizeof *frame);
    if (!frame) return fail(ctx, CODE_NO_MEMORY, "out of memory: frame of a call");
    char *args = NULL;
    Code code = CODE_OK;
    for (int d = 0; d < DEVICE_COUNT && code == CODE_OK; d++)
        code = arena_memory(ctx, ir->arena_bytes[d], &frame->arena[d]);
    if (code == CODE_OK && e->shadow_bytes) code = memory_aligned(ctx, (size_t)e->shadow_bytes, &frame->shadow);
    if (code == CODE_OK) code = memory_aligned(ctx, e->n_args * sizeof(Tensor), &args);
    frame->args = (Tensor *)(void *)args;
    if (code == CODE_OK) {
        size_t n_holds = (size_t)e->n_calls + ir->n_objects;
        frame->holds = allocation_fails(ctx) ? NULL : calloc(n_holds + 1, sizeof(void *));
        if (!frame->holds) code = fail(ctx, CODE_NO_MEMORY, "out of memory: frame of a call");
    }
    Backend *backend = e->options.backend;
    if (code == CODE_OK && backend) code = backend->frame_create(ctx, backend, &frame->backend);
    if (code != CODE_OK) {
        frame_destroy(e, frame);
        return code;
    }
    memcpy(frame->args, e->args, e->n_args * sizeof(Tensor));
    for (BufferId b = 0; b < ir->n_buffers; b++) {
        const Buffer *buffer = &ir->buffers[b];
        if (buffer->space == SPACE_ARENA) bind_buffer(e, frame->args, b, frame->arena[buffer->device] + buffer->offset);
    }
    *out = frame;
    return CODE_OK;
}

void frame_destroy(const Executor *e, Frame *frame) {
    if (frame->backend) e->options.backend->frame_destroy(e->options.backend, frame->backend);
    for (int d = 0; d < DEVICE_COUNT; d++) free(frame->arena[d]);
    free(frame->shadow);
    free(frame->args);
    free(frame->holds);
    free(frame);
}

/* Both critical sections change the list by one store, so a fork() in the middle leaves a list that is whole. */
Code frame_take(Context *ctx, Executor *e, Frame **out) {
    process_lock(&e->lock);
    *out = e->free;
    if (*out) e->free = (*out)->next;
    process_unlock(&e->lock);
    return *out ? CODE_OK : frame_create(ctx, e, out);
}

void frame_give(Executor *e, Frame *frame) {
    process_lock(&e->lock);
    frame->next = e->free;
    e->free = frame;
    process_unlock(&e->lock);
}
