/* Few rows against weights of f16 or bf16, which are read once and become f32 in a register. */
#include "cpu/gemm_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/vmath_avx2.h"

#include <string.h>

enum { MOST_ROWS = 6, AHEAD = 128 };

static inline __attribute__((always_inline)) __m256 load8(const bool brief, const uint16_t *at) {
    __m128i half = _mm_loadu_si128((const __m128i *)(const void *)at);
    return brief ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)) : _mm256_cvtph_ps(half);
}

/* `together` rows of w at a time, far apart, each the next of a run of its own, as in gemm_avx2.c. While 64 bytes of
 * each are read, as many that lie AHEAD are asked for. */
static inline __attribute__((always_inline)) void dots_body(const bool brief, const int m, const int together,
                                                            const float *x, int64_t x_row, int64_t rows,
                                                            const uint16_t *w, int64_t w_row, int64_t k, float *c,
                                                            int64_t c_row) {
    const int64_t run = (rows + together - 1) / together;
    for (int64_t j = 0; j < run; j++) {
        const uint16_t *at[4];
        __m256 s[MOST_ROWS][4];
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) at[t] = w + (j + t * run < rows ? j + t * run : j) * w_row;
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) s[i][t] = _mm256_setzero_ps();
        int64_t p = 0;
        for (; p + 8 <= k; p += 8) {
            if (p % 32 == 0)
#pragma GCC unroll 4
                for (int t = 0; t < together; t++)
                    _mm_prefetch((const char *)((uintptr_t)(at[t] + p) + 2 * AHEAD), _MM_HINT_T0); /* maybe behind it */
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) {
                __m256 v = load8(brief, at[t] + p);
#pragma GCC unroll 6
                for (int i = 0; i < m; i++) s[i][t] = _mm256_fmadd_ps(_mm256_loadu_ps(x + i * x_row + p), v, s[i][t]);
            }
        }
        if (p < k) {
            __m256i tail = v_tail((int)(k - p));
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) {
                uint16_t few[8] = {0};
                memcpy(few, at[t] + p, (size_t)(k - p) * sizeof *few);
                __m256 v = load8(brief, few);
#pragma GCC unroll 6
                for (int i = 0; i < m; i++)
                    s[i][t] = _mm256_fmadd_ps(_mm256_maskload_ps(x + i * x_row + p, tail), v, s[i][t]);
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++)
                if (j + t * run < rows) c[i * c_row + j + t * run] += v_sum(s[i][t]);
    }
}

#define CASE(name, m, together)                                                                                        \
    case m:                                                                                                            \
        dots_body(name, m, together, x, x_row, rows, w, w_row, k, c, c_row);                                           \
        break
#define CASES(name)                                                                                                    \
    switch (m) {                                                                                                       \
        CASE(name, 1, 4);                                                                                              \
        CASE(name, 2, 4);                                                                                              \
        CASE(name, 3, 3);                                                                                              \
        CASE(name, 4, 3);                                                                                              \
        CASE(name, 5, 2);                                                                                              \
    default: dots_body(name, 6, 2, x, x_row, rows, w, w_row, k, c, c_row);                                             \
    }

static void dots_half(DType dtype, int m, const float *x, int64_t x_row, int64_t rows, const uint16_t *w, int64_t w_row,
                      int64_t k, float *c, int64_t c_row) {
    if (dtype == DTYPE_BF16)
        CASES(true)
    else
        CASES(false)
}

GemmDotsHalf *gemm_dots_half_avx2(void) { return dots_half; }
#else
GemmDotsHalf *gemm_dots_half_avx2(void) { return NULL; }
#endif
