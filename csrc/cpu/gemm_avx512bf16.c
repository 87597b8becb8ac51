/* Products of pairs of bf16 with AVX512-BF16: tiles as in gemm_avx512.c, twice as deep. */
#include "cpu/gemm_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define PAIR_SUM(sum, x, b) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(b))
#include "cpu/gemm_pair_avx512.h"

static inline __m512bh load_pairs(const float *at) { return (__m512bh)_mm512_loadu_ps(at); }

/* Inlined with constant `rows` into each case of the switch below. */
static inline __attribute__((always_inline)) void tile_body(const int rows, int64_t k, const float *restrict a,
                                                            int64_t a_row, int64_t a_k, const float *restrict b,
                                                            int64_t b_row, float *restrict c, int64_t c_row, bool add) {
    __m512 r[GEMM_ROWS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) r[i] = _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p++) {
        __m512 b0 = _mm512_loadu_ps(b);
        _mm_prefetch((const char *)(b + 16 * b_row), _MM_HINT_T0);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) r[i] = PAIR_SUM(r[i], _mm512_set1_ps(a[i * a_row]), b0);
        a += a_k;
        b += b_row;
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        float *to = c + i * c_row;
        _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), r[i]) : r[i]);
    }
}

#define CASE(n)                                                                                                        \
    case n: tile_body(n, k, a, a_row, a_k, b, b_row, c, c_row, add); break
static void tile(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                 float *c, int64_t c_row, bool add) {
    switch (rows) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
    default: tile_body(6, k, a, a_row, a_k, b, b_row, c, c_row, add);
    }
}
#undef CASE

/* `together` rows of w at a time, far apart, as in gemm_avx2.c. */
static inline __attribute__((always_inline)) void dots_body(const int m, const int together, const float *x,
                                                            int64_t x_row, int64_t rows, const float *w, int64_t w_row,
                                                            int64_t k, float *c, int64_t c_row) {
    enum { AHEAD = 64 }; /* 256 bytes of each row */
    const int64_t run = (rows + together - 1) / together;
    const __mmask16 tail = (__mmask16)((1 << (k % 16)) - 1);
    for (int64_t j = 0; j < run; j++) {
        const float *at[4];
        __m512 s[GEMM_ROWS][4];
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) at[t] = w + (j + t * run < rows ? j + t * run : j) * w_row;
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) s[i][t] = _mm512_setzero_ps();
        int64_t p = 0;
        for (; p + 16 <= k; p += 16)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) {
                __m512bh v = load_pairs(at[t] + p);
                _mm_prefetch((const char *)((uintptr_t)(at[t] + p) + 4 * AHEAD), _MM_HINT_T0);
#pragma GCC unroll 6
                for (int i = 0; i < m; i++) s[i][t] = _mm512_dpbf16_ps(s[i][t], load_pairs(x + i * x_row + p), v);
            }
        if (tail)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) {
                __m512bh v = (__m512bh)_mm512_maskz_loadu_ps(tail, at[t] + p);
#pragma GCC unroll 6
                for (int i = 0; i < m; i++)
                    s[i][t] = _mm512_dpbf16_ps(s[i][t], (__m512bh)_mm512_maskz_loadu_ps(tail, x + i * x_row + p), v);
            }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++)
                if (j + t * run < rows) c[i * c_row + j + t * run] += _mm512_reduce_add_ps(s[i][t]);
    }
}

static void dots(int m, const float *x, int64_t x_row, int64_t rows, const float *w, int64_t w_row, int64_t k, float *c,
                 int64_t c_row) {
    switch (m) {
    case 1: dots_body(1, 4, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 2: dots_body(2, 4, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 3: dots_body(3, 4, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 4: dots_body(4, 4, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 5: dots_body(5, 4, x, x_row, rows, w, w_row, k, c, c_row); break;
    default: dots_body(6, 4, x, x_row, rows, w, w_row, k, c, c_row); break;
    }
}

static void narrow(uint16_t *dst, const float *src, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(void *)(dst + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(src + i)));
    if (i < n) {
        __mmask16 tail = (__mmask16)((1 << (n - i)) - 1);
        _mm256_mask_storeu_epi16(dst + i, tail, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(tail, src + i)));
    }
}

const GemmBf16 *gemm_bf16_avx512(void) {
    static const GemmBf16 kernels = {tile, pair, pair_rows, dots, narrow};
    return &kernels;
}
#else
const GemmBf16 *gemm_bf16_avx512(void) { return NULL; }
#endif
