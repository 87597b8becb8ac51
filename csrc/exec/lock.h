/* A lock that survives fork(): the word is 0 or the process id of the holder. A child that finds its parent's id there
 * knows that the holder does not exist in it, and takes the lock over. What it guards must be whole at any time. */
#ifndef FORGE_EXEC_LOCK_H
#define FORGE_EXEC_LOCK_H

#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

static inline void process_lock(atomic_int *word) {
    int me = (int)getpid();
    for (;;) {
        int holder = 0;
        if (atomic_compare_exchange_weak(word, &holder, me)) return;
        if (holder != 0 && holder != me && atomic_compare_exchange_strong(word, &holder, me)) return;
        sched_yield();
    }
}

static inline void process_unlock(atomic_int *word) { atomic_store(word, 0); }

#endif
