/* A job is published in `state` as (generation, open, running). A worker that sees an open job that it has not seen
 * enters by adding one to `running`; the caller works too, closes the job when no part is left, and waits for `running`
 * to fall to 0. So it never waits for a worker that has not woken. Idle workers spin for a moment, within a call for a
 * longer one, then sleep.
 *
 * Each thread has a range of neighbouring parts, which it takes from the front, so that a kernel can fetch what its
 * next part will read and successive kernels find their rows in the same core's cache. Who is done takes the last parts
 * of the longest range that is left. Where several are taken at once, it is at most half of what the range has left. */
#include "exec/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { RUNNING_MASK = 0x3fff, STATE_STOP = 0x4000, STATE_OPEN = 0x8000, GENERATION_SHIFT = 16 };
enum { MAX_THREADS = 256, SPIN_NANOSECONDS = 40000, SPIN_IN_CALL_NANOSECONDS = 1000000, SPINS_BEFORE_YIELD = 4000 };

typedef struct Worker {
    Pool *pool;
    pthread_t thread;
    int id; /* 1.. ; the caller is 0 */
} Worker;

/* Units first .. end - 1 are left: end << 32 | first. A line of its own. */
typedef struct Range {
    _Alignas(64) _Atomic uint64_t left;
} Range;

struct Pool {
    int threads;
    bool yields;            /* more threads than cores: spinning would steal from the others */
    _Atomic uint64_t owner; /* process id << 1 | busy: a child of fork() never believes its parent's lock */
    pid_t process;          /* that `workers` belong to; 0 before the first use */
    int n_workers;
    Worker *workers;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    atomic_int sleepers;
    PoolRange body;
    void *arg;
    int64_t parts, most; /* most: of a call of the body */
    int64_t unit;        /* parts that are taken together, 1 but for numbers beyond 32 bits */
    uint32_t at_once;    /* units that a thread takes at most */
    Range *ranges;       /* of each thread */
    _Alignas(64) _Atomic uint64_t state;
};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

Code pool_create(Context *ctx, int threads, Pool **out) {
    *out = NULL;
    if (threads < 1) return fail(ctx, CODE_INVALID, "num_threads must be at least 1, got %d", threads);
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, sizeof(Pool))) return fail(ctx, CODE_NO_MEMORY, "out of memory for a thread pool");
    Pool *pool = memory;
    *pool = (Pool){.threads = threads};
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    if (!pool->workers || posix_memalign(&memory, 64, (size_t)threads * sizeof(Range))) {
        free(pool->workers);
        free(pool);
        return fail(ctx, CODE_NO_MEMORY, "out of memory for %d threads", threads);
    }
    pool->ranges = memory;
    for (int t = 0; t < threads; t++) atomic_init(&pool->ranges[t].left, 0);
    cpu_set_t cores; /* that we may run on */
    pool->yields = sched_getaffinity(0, sizeof cores, &cores) == 0 && threads > CPU_COUNT(&cores);
    atomic_init(&pool->owner, (uint64_t)getpid() << 1);
    *out = pool;
    return CODE_OK;
}

int pool_threads(const Pool *pool) { return pool ? pool->threads : 1; }

bool pool_enter(Pool *pool) {
    uint64_t idle = (uint64_t)getpid() << 1, seen = atomic_load(&pool->owner);
    if (seen == (idle | 1)) return false;
    return atomic_compare_exchange_strong(&pool->owner, &seen, idle | 1);
}

void pool_leave(Pool *pool) { atomic_store(&pool->owner, (uint64_t)getpid() << 1); }

static uint32_t range_size(uint64_t left) {
    uint32_t first = (uint32_t)left, end = (uint32_t)(left >> 32);
    return first < end ? end - first : 0;
}

typedef struct Units {
    int64_t first, count; /* count 0: none is left */
} Units;

/* Of a range, the first ones or the last. */
static Units take_units(Range *range, uint32_t most, bool last) {
    uint64_t left = atomic_load(&range->left);
    for (uint32_t size; (size = range_size(left)) > 0;) {
        uint64_t count = size / 2 < 1 ? 1 : size / 2 < most ? size / 2 : most;
        uint64_t less = last ? left - (count << 32) : left + count;
        if (atomic_compare_exchange_weak(&range->left, &left, less))
            return (Units){last ? (int64_t)(less >> 32) : (int64_t)(uint32_t)left, (int64_t)count};
    }
    return (Units){0, 0};
}

static Units next_units(Pool *pool, int thread) {
    Units units = take_units(&pool->ranges[thread], pool->at_once, false);
    while (units.count == 0) {
        uint32_t most = 0;
        Range *longest = NULL;
        for (int t = 0; t < pool->threads; t++) {
            uint32_t size = range_size(atomic_load(&pool->ranges[t].left));
            if (size > most) most = size, longest = &pool->ranges[t];
        }
        if (!longest) break;
        units = take_units(longest, pool->at_once, true);
    }
    return units;
}

static void run_parts(int64_t first, int64_t end, int64_t most, PoolRange body, void *arg, int thread) {
    for (int64_t count; first < end; first += count) {
        count = end - first < most ? end - first : most;
        body(arg, first, count, thread);
    }
}

static void take_parts(Pool *pool, int thread) {
    for (Units units; (units = next_units(pool, thread)).count > 0;) {
        int64_t end = (units.first + units.count) * pool->unit;
        run_parts(units.first * pool->unit, end < pool->parts ? end : pool->parts, pool->most, pool->body, pool->arg,
                  thread);
    }
}

static void share_out(Pool *pool, int64_t parts) {
    pool->parts = parts;
    pool->unit = parts / UINT32_MAX + 1;
    int64_t whole = pool->most / pool->unit;
    pool->at_once = whole < 1 ? 1 : whole < UINT32_MAX ? (uint32_t)whole : UINT32_MAX;
    int64_t units = (parts + pool->unit - 1) / pool->unit, threads = pool->n_workers + 1;
    for (int64_t t = 0; t < pool->threads; t++) {
        uint64_t first = t < threads ? (uint64_t)(units * t / threads) : 0;
        uint64_t end = t < threads ? (uint64_t)(units * (t + 1) / threads) : 0;
        atomic_store(&pool->ranges[t].left, end << 32 | first);
    }
}

static bool has_news(const Pool *pool, uint64_t seen) {
    uint64_t state = atomic_load(&pool->state);
    return (state & STATE_STOP) || ((state & STATE_OPEN) && state >> GENERATION_SHIFT != seen);
}

/* The next job of a call follows within a part's time: to sleep and be woken would take longer. */
static int64_t spin_time(Pool *pool) {
    return atomic_load_explicit(&pool->owner, memory_order_relaxed) & 1 ? SPIN_IN_CALL_NANOSECONDS : SPIN_NANOSECONDS;
}

static void wait_for_news(Pool *pool, uint64_t seen) {
    if (!pool->yields) {
        int64_t since = 0;
        for (unsigned i = 1; !has_news(pool, seen); i++) {
            relax();
            if (i % 64) continue;
            int64_t now = nanoseconds();
            if (!since) since = now;
            if (now - since > spin_time(pool)) break;
        }
    }
    if (has_news(pool, seen)) return;
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1); /* before the check: a caller that publishes after it sees a sleeper */
    while (!has_news(pool, seen)) pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *arg) {
    Worker *self = arg;
    Pool *pool = self->pool;
    uint64_t seen = 0;
    for (;;) {
        uint64_t state = atomic_load(&pool->state);
        if (state & STATE_STOP) return NULL;
        if (!(state & STATE_OPEN) || state >> GENERATION_SHIFT == seen) {
            wait_for_news(pool, seen);
        } else if (atomic_compare_exchange_strong(&pool->state, &state, state + 1)) {
            seen = state >> GENERATION_SHIFT;
            take_parts(pool, self->id);
            atomic_fetch_sub(&pool->state, 1);
        }
    }
}

static void wake_sleepers(Pool *pool) {
    if (atomic_load(&pool->sleepers) == 0) return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

/* Workers do not survive fork(): a child starts its own, over fresh locks. Fewer than asked is fine. */
static void start_workers(Pool *pool) {
    pool->process = getpid();
    pool->n_workers = 0;
    atomic_store(&pool->sleepers, 0);
    atomic_store(&pool->state, 0);
    if (pthread_mutex_init(&pool->mutex, NULL) || pthread_cond_init(&pool->wake, NULL)) return;
    sigset_t all, old; /* signals are for the caller's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (int i = 0; i + 1 < pool->threads; i++) {
        Worker *worker = &pool->workers[i];
        *worker = (Worker){.pool = pool, .id = i + 1};
        if (pthread_create(&worker->thread, NULL, worker_main, worker)) break;
        pool->n_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

void pool_run_ranges(Pool *pool, int64_t parts, int64_t most, PoolRange body, void *arg) {
    bool alone = !pool || pool->threads == 1 || parts <= 1;
    if (!alone && pool->process != getpid()) start_workers(pool);
    if (alone || pool->n_workers == 0) {
        run_parts(0, parts, most, body, arg, 0);
        return;
    }
    pool->body = body;
    pool->arg = arg;
    pool->most = most;
    share_out(pool, parts);
    uint64_t generation = (atomic_load(&pool->state) >> GENERATION_SHIFT) + 1;
    atomic_store(&pool->state, generation << GENERATION_SHIFT | STATE_OPEN);
    wake_sleepers(pool);
    take_parts(pool, 0);
    atomic_fetch_and(&pool->state, ~(uint64_t)STATE_OPEN);
    for (int spins = 0; atomic_load(&pool->state) & RUNNING_MASK; spins++) {
        if (pool->yields || spins > SPINS_BEFORE_YIELD)
            sched_yield();
        else
            relax();
    }
}

/* Parts one by one. */
typedef struct Single {
    PoolBody body;
    void *arg;
} Single;

static void run_single(void *arg, int64_t first, int64_t count, int thread) {
    const Single *single = arg;
    for (int64_t part = first; part < first + count; part++) single->body(single->arg, part, thread);
}

void pool_run(Pool *pool, int64_t parts, PoolBody body, void *arg) {
    Single single = {body, arg};
    pool_run_ranges(pool, parts, 1, run_single, &single);
}

void pool_destroy(Pool *pool) {
    if (!pool) return;
    if (pool->process == getpid()) {
        atomic_fetch_or(&pool->state, STATE_STOP);
        wake_sleepers(pool);
        for (int i = 0; i < pool->n_workers; i++) pthread_join(pool->workers[i].thread, NULL);
        pthread_mutex_destroy(&pool->mutex);
        pthread_cond_destroy(&pool->wake);
    }
    free(pool->ranges);
    free(pool->workers);
    free(pool);
}
