/* What the machine can do: fused multiply-adds and reading memory, one thread at a time. Built by machine.py for one
 * width of vector at a time: -DBYTES=64 with AVX-512, 32 with AVX2. */
#include <stddef.h>
#include <time.h>

typedef float vec __attribute__((vector_size(BYTES), aligned(4)));
enum { LANES = BYTES / 4, CHAINS = 12 }; /* enough independent chains for two units of five cycles */

/* Of this thread on a core: what else the machine does takes none of it. */
static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* GFLOP/s; a multiply-add counts two. */
double fma_rate(long rounds) {
    vec acc[CHAINS], scale, add;
    volatile float sink;
    for (int l = 0; l < LANES; l++) scale[l] = 0.999f, add[l] = 1e-3f;
    for (int c = 0; c < CHAINS; c++) acc[c] = add;
    double start = seconds();
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = acc[c] * scale + add;
    }
    double took = seconds() - start;
    for (int c = 1; c < CHAINS; c++) acc[0] += acc[c];
    sink = acc[0][0];
    (void)sink;
    return 2.0 * LANES * CHAINS * (double)rounds / took * 1e-9;
}

/* GB/s of one pass over `count` floats, a multiple of 256. */
double read_rate(const float *data, size_t count) {
    vec acc[4] = {0};
    volatile float sink;
    double start = seconds();
    for (size_t i = 0; i + 4 * LANES <= count; i += 4 * LANES) {
        for (int c = 0; c < 4; c++) acc[c] += *(const vec *)(data + i + (size_t)c * LANES);
    }
    double took = seconds() - start;
    acc[0] += acc[1] + acc[2] + acc[3];
    sink = acc[0][0];
    (void)sink;
    return 4.0 * (double)count / took * 1e-9;
}

/* Reads `count` floats once, as `streams` runs side by side: what a machine's prefetchers make the most of differs. */
float read_streams(const float *data, size_t count, int streams) {
    vec acc[4] = {0};
    size_t run = count / (size_t)streams;
    for (size_t i = 0; i + 2 * LANES <= run; i += 2 * LANES)
        for (int s = 0; s < streams; s++) {
            const float *at = data + (size_t)s * run + i;
            acc[s % 2] += *(const vec *)at;
            acc[s % 2 + 2] += *(const vec *)(at + LANES);
        }
    acc[0] += acc[1] + acc[2] + acc[3];
    return acc[0][0];
}
