/* Random numbers, the same everywhere, and memory of exactly the size that is asked for, so that the sanitizer sees a
 * byte too many. */
#ifndef FORGE_TESTS_RANDOM_NUMBERS_H
#define FORGE_TESTS_RANDOM_NUMBERS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static uint64_t seed = 1;
static inline uint32_t next_random(void) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 33);
}
static inline int64_t below(int64_t n) { return (int64_t)(next_random() % (uint64_t)n); }
static inline int64_t between(int64_t a, int64_t b) { return a + below(b - a + 1); }
static inline float unit(void) { return (float)((double)next_random() / 1073741824.0 - 1.0); }

enum { MAX_MEMORY = 64 };
static void *memory[MAX_MEMORY];
static int n_memory;

static inline void *keep_memory(void *p, int64_t size) {
    if (n_memory == MAX_MEMORY || !p) abort();
    memset(p, 0x5a, (size_t)size);
    return memory[n_memory++] = p;
}
static inline void *get(int64_t size) { return keep_memory(malloc((size_t)size ? (size_t)size : 1), size); }
static inline void *get_aligned(int64_t size) { /* to a line of the cache, as scratch is */
    void *p = NULL;
    return keep_memory(posix_memalign(&p, 64, (size_t)size ? (size_t)size : 1) ? NULL : p, size);
}
static inline void release_all(void) {
    while (n_memory) free(memory[--n_memory]);
}

#endif
