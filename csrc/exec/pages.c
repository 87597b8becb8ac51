/* Huge pages under weights that are read where they lie once a token: memory then comes a fifth faster, since fewer
 * addresses have to be looked up; under those that lie in rows of outputs, products of many rows gain 2 % by it. The
 * kernel moves them behind the program's back (MADV_COLLAPSE, Linux 6.1), on a thread of its own while calls run
 * already; values and addresses stay. All of it is a hint: where it cannot be had (files, other kernels, fragmented
 * memory) all works, slower; memory that its owner has given back meanwhile is skipped, and what lies there instead is
 * at most moved too. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "exec/frame.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { LEAST_BYTES = 16 << 20, HUGE_PAGES_AT_ONCE = 4, JOINED_GAP = 64 << 10 };

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
 * Conv1D). */
static PageSpan span_of(const Executor *e, const Task *task) {
    const Tensor *weight = &e->args[task->first_arg + 1];
    if (task->kind != TASK_KERNEL || !task->kernel->columns || task->n_in < 2 || task->in[1] == REG_NONE ||
        e->ir->buffers[e->ir->regs[task->in[1]].buffer].space != SPACE_CONSTANT || weight->rank == 0)
        return (PageSpan){0, 0};
    /* the dimension that is outermost in memory; packed weights are not read */
    int rows = weight->rank == 2 && weight->strides[0] == 1 && weight->dtype == DTYPE_F32 && !task->prepared ? 1 : 0;
    if (rows == 0 && task->kernel->columns(e->ir->graph, task->node) == 0) return (PageSpan){0, 0};
    uintptr_t at = (uintptr_t)weight->data;
    return (PageSpan){at, at + (size_t)(weight->shape[rows] * weight->strides[rows]) * dtype_size(weight->dtype)};
}

static int compare_spans(const void *a, const void *b) {
    uintptr_t x = ((const PageSpan *)a)->begin, y = ((const PageSpan *)b)->begin;
    return (x > y) - (x < y);
}

/* Joins weights that lie beside each other, as an allocator lays them: a huge page may hold the end of one and the
 * beginning of the next. What remains are whole huge pages; returns their bytes. */
static size_t join_spans(Pages *pages) {
    uint32_t joined = 0;
    size_t all = 0;
    qsort(pages->spans, pages->n_spans, sizeof *pages->spans, compare_spans);
    for (uint32_t s = 0; s < pages->n_spans; s++) {
        const PageSpan next = pages->spans[s];
        PageSpan *last = joined ? &pages->spans[joined - 1] : NULL;
        if (!last || next.begin > last->end + JOINED_GAP)
            pages->spans[joined++] = next;
        else if (next.end > last->end)
            last->end = next.end;
    }
    pages->n_spans = 0;
    for (uint32_t s = 0; s < joined; s++) {
        const PageSpan whole =
            huge_pages_within((void *)pages->spans[s].begin, pages->spans[s].end - pages->spans[s].begin);
        if (whole.begin >= whole.end) continue;
        all += whole.end - whole.begin;
        pages->spans[pages->n_spans++] = whole;
    }
    return all;
}

Code pages_start(Context *ctx, Executor *e) {
    Pages *pages = &e->pages;
    TRY(ARENA_NEW(ctx, &e->memory, e->n_tasks, &pages->spans));
    for (uint32_t t = 0; t < e->n_tasks; t++) {
        PageSpan span = span_of(e, &e->tasks[t]);
        if (span.begin >= span.end) continue;
        pages->spans[pages->n_spans++] = span;
    }
    if (join_spans(pages) < LEAST_BYTES) return CODE_OK;
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
