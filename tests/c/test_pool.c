/* The thread pool: every part runs once, alone or several at once, with thread numbers in range; sleeping and waking;
 * two callers; fork(). */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "exec/pool.h"

enum { PARTS = 1000 };
static Context ctx;
static atomic_int seen[PARTS], wrong;

static void count_part(void *arg, int64_t part, int thread) {
    if (thread < 0 || thread >= *(int *)arg) atomic_fetch_add(&wrong, 1);
    atomic_fetch_add(&seen[part], 1);
}

static int64_t most; /* parts at once */

static void count_parts(void *arg, int64_t first, int64_t count, int thread) {
    if (count < 1 || count > most) atomic_fetch_add(&wrong, 1);
    for (int64_t part = first; part < first + count; part++) count_part(arg, part, thread);
}

static void run_and_check(Pool *pool, int64_t parts, int threads) {
    for (most = 0; most < 6; most++) { /* 0: one by one, by pool_run */
        for (int i = 0; i < PARTS; i++) atomic_store(&seen[i], 0);
        if (most == 0)
            pool_run(pool, parts, count_part, &threads);
        else
            pool_run_ranges(pool, parts, most, count_parts, &threads);
        for (int i = 0; i < PARTS; i++) CHECK_EQUAL(atomic_load(&seen[i]), i < parts);
        CHECK_EQUAL(atomic_load(&wrong), 0);
    }
}

/* Whole runs at first, single parts at the end of each range, so that threads end together. */
typedef struct Runs {
    int64_t count[PARTS];
    int n;
} Runs;

static void note_run(void *arg, int64_t first, int64_t count, int thread) {
    Runs *runs = &((Runs *)arg)[thread];
    (void)first;
    runs->count[runs->n++] = count;
}

static void test_runs_become_short(void) {
    Pool *pool;
    Runs *runs = calloc(2, sizeof *runs);
    CHECK_OK(&ctx, pool_create(&ctx, 2, &pool));
    CHECK(runs && pool_enter(pool));
    pool_run_ranges(pool, 40, 4, note_run, runs);
    int64_t longest = 0, parts = 0, singles = 0;
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < runs[t].n; i++) {
            parts += runs[t].count[i];
            singles += runs[t].count[i] == 1;
            if (runs[t].count[i] > longest) longest = runs[t].count[i];
        }
    CHECK_EQUAL(parts, 40);
    CHECK_EQUAL(longest, 4);
    CHECK(singles >= 2 && singles <= 8);
    pool_leave(pool);
    pool_destroy(pool);
    free(runs);
}

static void test_parts(void) {
    for (int threads = 1; threads <= 5; threads++) {
        Pool *pool;
        CHECK_OK(&ctx, pool_create(&ctx, threads, &pool));
        CHECK(pool_enter(pool));
        for (int64_t parts = 0; parts < 40; parts++) run_and_check(pool, parts, threads);
        usleep(2000); /* workers fall asleep */
        run_and_check(pool, PARTS, threads);
        pool_leave(pool);
        pool_destroy(pool);
    }
    run_and_check(NULL, PARTS, 1);
    Pool *pool;
    CHECK_CODE(&ctx, CODE_INVALID, pool_create(&ctx, 0, &pool));
    CHECK(pool == NULL);
    CHECK_OK(&ctx, pool_create(&ctx, 4, &pool)); /* never used */
    pool_destroy(pool);
    pool_destroy(NULL);
}

static void add_one(void *arg, int64_t part, int thread) {
    (void)part, (void)thread;
    atomic_fetch_add((atomic_int *)arg, 1);
}

static void test_many_short_runs(void) {
    Pool *pool;
    atomic_int total = 0;
    CHECK_OK(&ctx, pool_create(&ctx, 3, &pool));
    CHECK(pool_enter(pool));
    for (int i = 0; i < 20000; i++) pool_run(pool, 4, add_one, &total);
    CHECK_EQUAL(atomic_load(&total), 80000);
    pool_leave(pool);
    pool_destroy(pool);
}

static void *second_caller(void *arg) {
    Pool *pool = arg;
    for (int i = 0; i < 500; i++) {
        atomic_int total = 0;
        bool mine = pool_enter(pool);
        pool_run(mine ? pool : NULL, 16, add_one, &total);
        if (mine) pool_leave(pool);
        if (atomic_load(&total) != 16) atomic_fetch_add(&wrong, 1);
    }
    return NULL;
}

static void test_callers(void) {
    Pool *pool;
    pthread_t threads[4];
    CHECK_OK(&ctx, pool_create(&ctx, 3, &pool));
    CHECK(pool_enter(pool));
    CHECK(!pool_enter(pool));
    pool_leave(pool);
    for (int i = 0; i < 4; i++) CHECK_EQUAL(pthread_create(&threads[i], NULL, second_caller, pool), 0);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    CHECK_EQUAL(atomic_load(&wrong), 0);
    pool_destroy(pool);
}

/* The child is made while the pool is held, with workers awake: it must be able to enter, run and destroy. */
static void test_fork(void) {
    Pool *pool;
    CHECK_OK(&ctx, pool_create(&ctx, 3, &pool));
    for (int held = 0; held < 2; held++) {
        CHECK(pool_enter(pool));
        run_and_check(pool, PARTS, 3);
        if (!held) pool_leave(pool);
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            check_failures = 0;
            CHECK(pool_enter(pool));
            run_and_check(pool, PARTS, 3);
            pool_leave(pool);
            pool_destroy(pool);
            _exit(check_failures != 0);
        }
        if (held) pool_leave(pool);
        int status = -1;
        CHECK(child > 0 && waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(pool_enter(pool));
        run_and_check(pool, PARTS, 3);
        pool_leave(pool);
    }
    pid_t child = fork(); /* a child that only destroys */
    if (child == 0) {
        alarm(20);
        pool_destroy(pool);
        _exit(0);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    pool_destroy(pool);
}

int main(void) {
    context_init(&ctx);
    test_parts();
    test_runs_become_short();
    test_many_short_runs();
    test_callers();
    test_fork();
    return check_done();
}
