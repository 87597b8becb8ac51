/* The GIL: released while C compiles or runs, taken for a moment to look for Ctrl-C. */
#include <time.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "python/core.h"

static bool on_main_thread(void) {
#ifdef __linux__
    return syscall(SYS_gettid) == (long)getpid();
#else
    return true; /* PyErr_CheckSignals finds out by itself; knowing it before only saves taking the GIL */
#endif
}

static int64_t now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void door_reenter(Door *door) { PyEval_RestoreThread(door->thread); }

void door_releave(Door *door) { door->thread = PyEval_SaveThread(); }

static bool door_cancelled(void *user) {
    Door *door = user;
    int64_t time = now();
    if (time < door->next) return false;
    door_reenter(door);
    bool stop = PyErr_CheckSignals() != 0;
    door_releave(door);
    door->next = now() + door->period;
    return stop;
}

void door_leave(Door *door, Context *ctx, int period_ms) {
    door->signals = on_main_thread();
    door->period = (int64_t)period_ms * 1000000;
    if (door->signals) {
        door->next = now() + door->period;
        ctx->cancelled = door_cancelled;
        ctx->user = door;
    }
    door->thread = PyEval_SaveThread();
}

void door_enter(Door *door) { PyEval_RestoreThread(door->thread); }
