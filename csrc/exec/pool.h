/* Thread pool of one program. One caller uses it at a time (`pool_enter`); a second concurrent caller runs on its own
 * thread alone. What is computed never depends on the number of threads: work is cut into parts whose results are
 * independent. */
#ifndef FORGE_EXEC_POOL_H
#define FORGE_EXEC_POOL_H

#include "base/status.h"

typedef struct Pool Pool;
/* Workers start at the first use; safe after fork(). */
MUST_USE Code pool_create(Context *ctx, int threads, Pool **out);
void pool_destroy(Pool *pool);
int pool_threads(const Pool *pool); /* NULL: 1 */
bool pool_enter(Pool *pool);        /* false: busy with another caller */
void pool_leave(Pool *pool);
/* Runs body(arg, part, thread) for 0 <= part < parts; returns when all are done. Each thread begins with a range of
 * neighbouring parts, in order, and helps the others when it is through. 0 <= thread < threads. With pool NULL all run
 * here with thread 0. */
typedef void (*PoolBody)(void *arg, int64_t part, int thread);
void pool_run(Pool *pool, int64_t parts, PoolBody body, void *arg);
/* The same for a body that takes `count` parts from `first` on at once: at most `most`, and fewer towards the end, so
 * that no thread waits long for another's last ones. */
typedef void (*PoolRange)(void *arg, int64_t first, int64_t count, int thread);
void pool_run_ranges(Pool *pool, int64_t parts, int64_t most, PoolRange body, void *arg);

#endif
