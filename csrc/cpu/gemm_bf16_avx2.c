/* Products of pairs of bf16 without the unit for them: the same sums in the same order, each pair as two numbers of
 * f32. */
#include "cpu/gemm_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/vmath_avx2.h"

#include <string.h>

typedef struct Pairs {
    __m256 first, second;
} Pairs;

static inline Pairs split(__m256 pairs) {
    __m256i bits = _mm256_castps_si256(pairs);
    return (Pairs){_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
                   _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000)))};
}

/* The second product comes first, as in vdpbf16ps. */
static inline __m256 add_pairs(__m256 sum, Pairs a, Pairs b) {
    return _mm256_fmadd_ps(a.first, b.first, _mm256_fmadd_ps(a.second, b.second, sum));
}

/* Inlined with constant `rows` into each case of the switch below. */
static inline __attribute__((always_inline)) void tile_body(const int rows, int64_t k, const float *restrict a,
                                                            int64_t a_row, int64_t a_k, const float *restrict b,
                                                            int64_t b_row, float *restrict c, int64_t c_row, bool add) {
    __m256 r[3][2];
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++) r[i][0] = r[i][1] = _mm256_setzero_ps();
    for (int64_t p = 0; p < k; p++, a += a_k, b += b_row) {
        Pairs b0 = split(_mm256_loadu_ps(b)), b1 = split(_mm256_loadu_ps(b + 8));
#pragma GCC unroll 3
        for (int i = 0; i < rows; i++) {
            Pairs x = split(_mm256_broadcast_ss(a + i * a_row));
            r[i][0] = add_pairs(r[i][0], x, b0);
            r[i][1] = add_pairs(r[i][1], x, b1);
        }
    }
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++) {
        float *to = c + i * c_row;
        _mm256_storeu_ps(to, add ? _mm256_add_ps(_mm256_loadu_ps(to), r[i][0]) : r[i][0]);
        _mm256_storeu_ps(to + 8, add ? _mm256_add_ps(_mm256_loadu_ps(to + 8), r[i][1]) : r[i][1]);
    }
}

static void tile(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                 float *c, int64_t c_row, bool add) {
    for (int i = 0; i < rows; i += 3, a += 3 * a_row, c += 3 * c_row) switch (rows - i) {
        case 1: tile_body(1, k, a, a_row, a_k, b, b_row, c, c_row, add); break;
        case 2: tile_body(2, k, a, a_row, a_k, b, b_row, c, c_row, add); break;
        default: tile_body(3, k, a, a_row, a_k, b, b_row, c, c_row, add); break;
        }
}

/* Rows of w one by one against `m` of x; four far apart are read side by side, as in gemm_avx2.c. */
static inline __attribute__((always_inline)) void dots_body(const int m, const int together, const float *x,
                                                            int64_t x_row, int64_t rows, const float *w, int64_t w_row,
                                                            int64_t k, float *c, int64_t c_row) {
    const __m256i tail = v_tail((int)(k % 8));
    const int64_t run = (rows + together - 1) / together;
    for (int64_t j = 0; j < run; j++) {
        const float *at[4];
        __m256 s[GEMM_ROWS][4];
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) at[t] = w + (j + t * run < rows ? j + t * run : j) * w_row;
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) s[i][t] = _mm256_setzero_ps();
        for (int64_t p = 0; p < k; p += 8) {
            bool whole = p + 8 <= k;
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) {
                Pairs v = split(whole ? _mm256_loadu_ps(at[t] + p) : _mm256_maskload_ps(at[t] + p, tail));
#pragma GCC unroll 6
                for (int i = 0; i < m; i++) {
                    const float *from = x + i * x_row + p;
                    s[i][t] =
                        add_pairs(s[i][t], split(whole ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, tail)), v);
                }
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++)
                if (j + t * run < rows) c[i * c_row + j + t * run] += v_sum(s[i][t]);
    }
}

static void dots(int m, const float *x, int64_t x_row, int64_t rows, const float *w, int64_t w_row, int64_t k, float *c,
                 int64_t c_row) {
    switch (m) {
    case 1: dots_body(1, 4, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 2: dots_body(2, 4, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 3: dots_body(3, 2, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 4: dots_body(4, 2, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 5: dots_body(5, 1, x, x_row, rows, w, w_row, k, c, c_row); break;
    default: dots_body(6, 1, x, x_row, rows, w, w_row, k, c, c_row); break;
    }
}

/* To nearest even; NaN becomes a quiet one. */
static void narrow(uint16_t *dst, const float *src, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_loadu_ps(src + i);
        __m256i bits = _mm256_castps_si256(x),
                odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i rounded =
            _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
        __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        rounded = _mm256_blendv_epi8(rounded, quiet, nan);
        __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
        _mm_storeu_si128((__m128i *)(void *)(dst + i), words);
    }
    for (; i < n; i++) dst[i] = f32_to_bf16(src[i]);
}

const GemmBf16 *gemm_bf16_avx2(void) {
    static const GemmBf16 kernels = {tile, NULL, NULL, dots, narrow};
    return &kernels;
}
#else
const GemmBf16 *gemm_bf16_avx2(void) { return NULL; }
#endif
