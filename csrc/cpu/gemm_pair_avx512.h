/* The 12 x 32 register tile over two panels of b: 24 accumulators, 2 registers of b, a broadcast. One panel of 16 would
 * have 6 chains of sums, too few for two units of four cycles; 6 rows would load more than they compute.
 * Who includes this defines PAIR_SUM(sum, x, b): the sum plus the product of registers of elements. */
#ifndef FORGE_CPU_GEMM_PAIR_AVX512_H
#define FORGE_CPU_GEMM_PAIR_AVX512_H

#include "cpu/gemm_kernels.h"

#include <immintrin.h>

enum { PAIR_ROWS = 2 * GEMM_ROWS, PAIR_LINE = 16 };

static inline __attribute__((always_inline)) void pair_step(const int rows, const float *a, const float *lower,
                                                            int64_t a_row, __m512 b0, __m512 b1,
                                                            __m512 r[PAIR_ROWS][2]) {
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        __m512 x = _mm512_set1_ps(i < GEMM_ROWS ? a[i * a_row] : lower[(i - GEMM_ROWS) * a_row]);
        r[i][0] = PAIR_SUM(r[i][0], x, b0);
        r[i][1] = PAIR_SUM(r[i][1], x, b1);
    }
}

static inline __attribute__((always_inline)) void pair_store(const int rows, float *c, int64_t c_row, bool add,
                                                             __m512 r[PAIR_ROWS][2]) {
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        float *to = c + i * c_row;
        _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), r[i][0]) : r[i][0]);
        _mm512_storeu_ps(to + 16, add ? _mm512_add_ps(_mm512_loadu_ps(to + 16), r[i][1]) : r[i][1]);
    }
}

/* Inlined with constant `rows` into each case of the switch below. */
static inline __attribute__((always_inline)) void pair_body(const int rows, int64_t k, const float *restrict a,
                                                            int64_t a_row, int64_t a_k, const float *restrict b,
                                                            int64_t b_row, int64_t b_panel, float *restrict c,
                                                            int64_t c_row, bool add, float *restrict copy) {
    __m512 r[PAIR_ROWS][2];
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
        pair_step(rows, a, lower, a_row, b0, b1, r);
        a += a_k;
        lower += a_k;
        b += b_row;
        second += b_row;
    }
    pair_store(rows, c, c_row, add, r);
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

/* Elements [k, k + 16) of a row, which ends at `end`. */
static inline __m512 pair_line(const float *row, int64_t k, int64_t end) {
    __mmask16 there = k + PAIR_LINE <= end ? 0xffff : (__mmask16)((1 << (end - k)) - 1);
    return _mm512_maskz_loadu_ps(there, row + k);
}

/* Inlined with constant `keeps`. A line of each row is copied while the line before it is multiplied: what it waits
 * for, the sums do not. What comes ahead is asked for little by little: many lines at once would hold up the tile's own
 * reads. */
static inline __attribute__((always_inline)) void rows_body(const bool keeps, int64_t k, const float *restrict a,
                                                            int64_t a_row, const float *restrict b, int64_t b_panel,
                                                            float *restrict c, int64_t c_row, bool add,
                                                            float *restrict keep, int64_t keep_row, GemmAhead ahead) {
    __m512 r[PAIR_ROWS][2];
    const int64_t at_row = keeps ? keep_row : a_row;
    const float *restrict second = b + b_panel, *at = keeps ? keep : a, *lower = at + GEMM_ROWS * at_row;
#pragma GCC unroll 12
    for (int i = 0; i < PAIR_ROWS; i++) r[i][0] = r[i][1] = _mm512_setzero_ps();
    for (int i = 0; keeps && k > 0 && i < PAIR_ROWS; i++)
        _mm512_storeu_ps(keep + i * keep_row, pair_line(a + i * a_row, 0, k));
    for (int64_t line = 0; line < k; line += PAIR_LINE) {
        int64_t next = line + PAIR_LINE, steps = next <= k ? PAIR_LINE : k - line;
        for (int64_t i = 0; i < ahead.rows; i++)
            _mm_prefetch((const char *)(ahead.at + i * ahead.row + line), _MM_HINT_T1);
        for (int64_t p = 0; p < steps; p++) {
            if (keeps && next < k && p < PAIR_ROWS)
                _mm512_storeu_ps(keep + p * keep_row + next, pair_line(a + p * a_row, next, k));
            if (!keeps && p < PAIR_ROWS) _mm_prefetch((const char *)(a + p * a_row + next + PAIR_LINE), _MM_HINT_T0);
            __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(second);
            _mm_prefetch((const char *)(b + 16 * GEMM_COLS), _MM_HINT_T0);
            _mm_prefetch((const char *)(second + 16 * GEMM_COLS), _MM_HINT_T0);
            pair_step(PAIR_ROWS, at, lower, at_row, b0, b1, r);
            at++;
            lower++;
            b += GEMM_COLS;
            second += GEMM_COLS;
        }
    }
    pair_store(PAIR_ROWS, c, c_row, add, r);
}

static void pair_rows(int64_t k, const float *a, int64_t a_row, const float *b, int64_t b_panel, float *c,
                      int64_t c_row, bool add, float *keep, int64_t keep_row, GemmAhead ahead) {
    if (keep)
        rows_body(true, k, a, a_row, b, b_panel, c, c_row, add, keep, keep_row, ahead);
    else
        rows_body(false, k, a, a_row, b, b_panel, c, c_row, add, NULL, 0, ahead);
}

#endif
