/* A list of jobs on a few threads that live as long as it takes. */
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "npu/session.h"

enum { MAX_JOB_THREADS = 32 };

typedef struct Jobs {
    JobFn fn;
    void *user;
    uint32_t n;
    atomic_uint next;
    atomic_bool failed;
} Jobs;

typedef struct Worker {
    Jobs *jobs;
    pthread_t thread;
    Context ctx;
} Worker;

double session_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static Code work(Jobs *jobs, Context *ctx) {
    Code code = CODE_OK;
    for (uint32_t job; code == CODE_OK && !atomic_load(&jobs->failed);) {
        job = atomic_fetch_add(&jobs->next, 1);
        if (job >= jobs->n) break;
        code = check_cancelled(ctx);
        if (code == CODE_OK) code = jobs->fn(ctx, jobs->user, job);
    }
    if (code != CODE_OK) atomic_store(&jobs->failed, true);
    return code;
}

static void *worker_main(void *arg) {
    Worker *self = arg;
    Code code = work(self->jobs, &self->ctx);
    (void)code; /* is in the context */
    return NULL;
}

Code jobs_run(Context *ctx, int threads, uint32_t n, JobFn fn, void *user) {
    Jobs jobs = {.fn = fn, .user = user, .n = n};
    Worker workers[MAX_JOB_THREADS];
    int started = 0;
    sigset_t all, old; /* signals are for the caller's threads */
    if (threads > MAX_JOB_THREADS) threads = MAX_JOB_THREADS;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (; started + 1 < threads && (uint32_t)started + 1 < n; started++) { /* fewer than asked is fine */
        workers[started].jobs = &jobs;
        context_init(&workers[started].ctx);
        if (pthread_create(&workers[started].thread, NULL, worker_main, &workers[started])) break;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    Code code = work(&jobs, ctx);
    for (int i = 0; i < started; i++) {
        const Context *theirs = &workers[i].ctx;
        pthread_join(workers[i].thread, NULL);
        if (code != CODE_OK || theirs->code == CODE_OK) continue;
        code = ctx->code = theirs->code;
        ctx->reason = theirs->reason;
        memcpy(ctx->text, theirs->text, sizeof ctx->text);
    }
    return code;
}
