/* Huge pages under weights that are read where they lie once a token: memory then comes a fifth faster, since fewer
 * addresses have to be looked up; under those that lie in rows of outputs, products of many rows gain 2 % by it. The
 * kernel moves them behind the program's back (MADV_COLLAPSE, Linux 6.1), on a thread of its own while calls run
 * already; values and addresses stay. All of it is a hint: where it cannot be had (files, other kernels, fragmented
 * memory) all works, slower; memory that its owner has given back meanwhile is skipped, and what lies there instead is
 * at most moved too. */
#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "exec/frame.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { LEAST_BYTES = 16 << 20, HUGE_PAGES_AT_ONCE = 4 };

static void *move_pages(void *arg) {
    Pages *pages = arg;
    for (uint32_t s = 0; s < pages->n_spans; s++) {
        uintptr_t end = pages->spans[s].end;
        for (uintptr_t at = pages->spans[s].begin; at < end; at += HUGE_PAGES_AT_ONCE * HUGE_PAGE) {
            if (atomic_load(&pages->stop)) return NULL;
            size_t bytes = end - at < HUGE_PAGES_AT_ONCE * HUGE_PAGE ? end - at : HUGE_PAGES_AT_ONCE * HUGE_PAGE;
            if (madvise((void *)at, bytes, MADV_COLLAPSE) != 0 && errno != EBUSY) break; /* the same further on */
        }
    }
    return NULL;
}

/* The weight of a task that reads it once for a few rows, or a part of each of its rows at a time (transformers'
 * Conv1D), without the ends that fill no huge page. */
static PageSpan span_of(const Executor *e, const Task *task) {
    const Tensor *weight = &e->args[task->first_arg + 1];
    if (task->kind != TASK_KERNEL || !task->kernel->columns || task->n_in < 2 || task->in[1] == REG_NONE ||
        e->ir->buffers[e->ir->regs[task->in[1]].buffer].space != SPACE_CONSTANT || weight->rank == 0)
        return (PageSpan){0, 0};
    /* the dimension that is outermost in memory; packed weights are not read */
    int rows = weight->rank == 2 && weight->strides[0] == 1 && weight->dtype == DTYPE_F32 && !task->prepared ? 1 : 0;
    if (rows == 0 && task->kernel->columns(e->ir->graph, task->node) == 0) return (PageSpan){0, 0};
    return huge_pages_within(weight->data,
                             (size_t)(weight->shape[rows] * weight->strides[rows]) * dtype_size(weight->dtype));
}

Code pages_start(Context *ctx, Executor *e) {
    Pages *pages = &e->pages;
    uintptr_t all = 0;
    TRY(ARENA_NEW(ctx, &e->memory, e->n_tasks, &pages->spans));
    for (uint32_t t = 0; t < e->n_tasks; t++) {
        PageSpan span = span_of(e, &e->tasks[t]);
        if (span.begin >= span.end) continue;
        all += span.end - span.begin;
        pages->spans[pages->n_spans++] = span;
    }
    if (all < LEAST_BYTES) return CODE_OK;
    sigset_t every, old; /* signals are for the caller's threads */
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &old);
    if (pthread_create(&pages->thread, NULL, move_pages, pages) == 0) pages->process = getpid();
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return CODE_OK;
}

void pages_stop(Executor *e) {
    atomic_store(&e->pages.stop, true);
    if (e->pages.process && e->pages.process == getpid())
        pthread_join(e->pages.thread, NULL); /* not in a child of fork */
}
