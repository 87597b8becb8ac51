/* 12 x 32 register tile over two panels of b: 24 accumulators, 2 registers of b, a broadcast. One panel of 16 would
 * have 6 chains of sums, too few for two units of four cycles; 6 rows would load more than they compute. */
#include "cpu/gemm_kernels.h"

#if defined(__AVX512F__)
#include <immintrin.h>

/* Inlined with constant `rows` into each case of the switch below. */
static inline __attribute__((always_inline)) void pair_body(const int rows, int64_t k, const float *restrict a,
                                                            int64_t a_row, int64_t a_k, const float *restrict b,
                                                            int64_t b_row, int64_t b_panel, float *restrict c,
                                                            int64_t c_row, bool add, float *restrict copy) {
    __m512 r[2 * GEMM_ROWS][2];
    const float *restrict second = b + b_panel, *restrict lower = a + GEMM_ROWS * a_row;
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) r[i][0] = r[i][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p++) {
        __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(second);
        _mm_prefetch((const char *)(b + 16 * b_row), _MM_HINT_T0);
        _mm_prefetch((const char *)(second + 16 * b_row), _MM_HINT_T0);
        if (a_k == 1) _mm_prefetch((const char *)(a + p % 16 * a_row + 32), _MM_HINT_T0);
        if (copy) {
            _mm512_store_ps(copy + p * GEMM_COLS, b0);
            _mm512_store_ps(copy + (k + p) * GEMM_COLS, b1);
        }
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            __m512 x = _mm512_set1_ps(i < GEMM_ROWS ? a[i * a_row] : lower[(i - GEMM_ROWS) * a_row]);
            r[i][0] = _mm512_fmadd_ps(x, b0, r[i][0]);
            r[i][1] = _mm512_fmadd_ps(x, b1, r[i][1]);
        }
        a += a_k;
        lower += a_k;
        b += b_row;
        second += b_row;
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        float *to = c + i * c_row;
        _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), r[i][0]) : r[i][0]);
        _mm512_storeu_ps(to + 16, add ? _mm512_add_ps(_mm512_loadu_ps(to + 16), r[i][1]) : r[i][1]);
    }
}

static void pair(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                 int64_t b_panel, float *c, int64_t c_row, bool add) {
#define CASE(n)                                                                                                        \
    case n: pair_body(n, k, a, a_row, a_k, b, b_row, b_panel, c, c_row, add, NULL); break
    switch (rows) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
        CASE(9);
        CASE(10);
        CASE(11);
    default:
        if (a_k == 1 && b_row == GEMM_COLS) /* as both matrices lie */
            pair_body(12, k, a, a_row, 1, b, GEMM_COLS, b_panel, c, c_row, add, NULL);
        else
            pair_body(12, k, a, a_row, a_k, b, b_row, b_panel, c, c_row, add, NULL);
    }
#undef CASE
}

static void pair_copy(int64_t k, const float *a, int64_t a_row, const float *b, int64_t b_row, float *c, int64_t c_row,
                      bool add, float *copy) {
    pair_body(12, k, a, a_row, 1, b, b_row, GEMM_COLS, c, c_row, add, copy);
}

GemmPair *gemm_pair_avx512(void) { return pair; }
GemmPairCopy *gemm_pair_copy_avx512(void) { return pair_copy; }
#else
GemmPairCopy *gemm_pair_copy_avx512(void) { return NULL; }
GemmPair *gemm_pair_avx512(void) { return NULL; }
#endif
