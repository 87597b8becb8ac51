/* The thread pool: every part runs once, with thread numbers in range; sleeping and waking; two callers; fork(). */
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

static void run_and_check(Pool *pool, int64_t parts, int threads) {
    for (int i = 0; i < PARTS; i++) atomic_store(&seen[i], 0);
    pool_run(pool, parts, count_part, &threads);
    for (int i = 0; i < PARTS; i++) CHECK_EQUAL(atomic_load(&seen[i]), i < parts);
    CHECK_EQUAL(atomic_load(&wrong), 0);
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
    test_many_short_runs();
    test_callers();
    test_fork();
    return check_done();
}
