/* Quantised weights with AVX2: 8 columns at a time, as f32 in a register. */
#include "cpu/quantised_dots.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/vmath_avx2.h"

#include <string.h>

enum {
    HALF = QUANTISED_BLOCK / 2,
    BLOCK_BYTES = QUANTISED_BLOCK / 2,
    AHEAD = 256
}; /* columns; bytes of 4-bit weights; bytes of a stream */

static inline __m256 load8(const uint8_t *at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)at)));
}

static inline __m256 load8_tail(const uint8_t *at, int64_t count) {
    uint8_t bytes[8] = {0};
    memcpy(bytes, at, (size_t)count);
    return load8(bytes);
}

static inline __m256i load_block(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)(const void *)at); }

/* Nibble j < 4 of each word, times 16^j: as f32, which x is divided by. */
static inline __m256 nibble(__m256i words, int j) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(15 << (4 * j))));
}

/* --- activations -------------------------------------------------------------------------------------------------- */
static float sum_of(const float *x, int64_t n) {
    __m256 s = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 8 <= n; k += 8) s = _mm256_add_ps(s, _mm256_loadu_ps(x + k));
    if (k < n) s = _mm256_add_ps(s, _mm256_maskload_ps(x + k, v_tail((int)(n - k))));
    return v_sum(s);
}

/* Of 4 bits: column c is divided by 16^(c / 8 % 4), so that the nibbles of a word need no shift. */
static void arrange(const Quantised *w, float *x, int64_t columns, float *sums) {
    if (w->bits == 4 || w->zeros)
        for (int64_t g = 0; g < w->groups; g++)
            sums[g] = sum_of(x + g * w->group, min_i64(w->group, w->k - g * w->group));
    for (int64_t k = 0; w->bits == 4 && k < columns; k += HALF)
#pragma GCC unroll 4
        for (int j = 1; j < 4; j++) {
            float *chunk = x + k + 8 * j;
            _mm256_storeu_ps(chunk,
                             _mm256_mul_ps(_mm256_loadu_ps(chunk), _mm256_set1_ps(1.0f / (float)(1 << (4 * j)))));
        }
}

/* --- dot products ------------------------------------------------------------------------------------------------- */
/* Asks for 64 bytes of each of `together` rows that lie AHEAD in its stream, maybe behind the weight. */
static inline __attribute__((always_inline)) void fetch(const int together, const uint8_t *const *at, int64_t byte) {
#pragma GCC unroll 4
    for (int t = 0; t < together; t++)
        _mm_prefetch((const char *)((uintptr_t)at[t] + (uintptr_t)byte + AHEAD), _MM_HINT_T0);
}

/* s[i][t] += x[i] . row t, 8 columns from k. One row of x has two sums with each row, s[chain][t]: else they would wait
 * for each other. */
static inline __attribute__((always_inline)) void add8(const int m, const int together, const uint8_t *const *at,
                                                       const QuantisedInput *x, int64_t k, int chain,
                                                       __m256 s[QUANTISED_ROWS][4]) {
#pragma GCC unroll 4
    for (int t = 0; t < together; t++) {
        __m256 v = load8(at[t] + k);
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) {
            __m256 *sum = &s[m == 1 ? chain : i][t];
            *sum = _mm256_fmadd_ps(_mm256_loadu_ps(x->x + i * x->row + k), v, *sum);
        }
    }
}

/* The same for columns [k, end) of a group. */
static inline __attribute__((always_inline)) void add_8bit(const int m, const int together, const uint8_t *const *at,
                                                           const QuantisedInput *x, int64_t k, int64_t end,
                                                           __m256 s[QUANTISED_ROWS][4]) {
    for (; k + 64 <= end; k += 64) {
        fetch(together, at, k);
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) add8(m, together, at, x, k + 8 * c, c % 2, s);
    }
    for (; k + 8 <= end; k += 8) add8(m, together, at, x, k, 0, s);
    if (k < end) /* of the row: x is 0 behind it */
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) {
            __m256 v = load8_tail(at[t] + k, end - k);
#pragma GCC unroll 6
            for (int i = 0; i < m; i++) s[i][t] = _mm256_fmadd_ps(_mm256_loadu_ps(x->x + i * x->row + k), v, s[i][t]);
        }
}

static inline __attribute__((always_inline)) void add_half(const int m, const int together, const __m256i *words,
                                                           const QuantisedInput *x, int64_t k,
                                                           __m256 s[QUANTISED_ROWS][4]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) {
            __m256 v = nibble(words[t], j);
#pragma GCC unroll 6
            for (int i = 0; i < m; i++) {
                s[i][t] = _mm256_fmadd_ps(_mm256_loadu_ps(x->x + i * x->row + k + 8 * j), v, s[i][t]);
            }
        }
}

/* The same for 4 bits; k is a multiple of 32. What lies behind `end` is multiplied by zeros. */
static inline __attribute__((always_inline)) void add_4bit(const int m, const int together, const uint8_t *const *at,
                                                           const QuantisedInput *x, int64_t k, int64_t end,
                                                           __m256 s[QUANTISED_ROWS][4]) {
    __m256i words[4];
    if (k % QUANTISED_BLOCK) {
#pragma GCC unroll 4
        for (int t = 0; t < together; t++)
            words[t] = _mm256_srli_epi32(load_block(at[t] + k / QUANTISED_BLOCK * BLOCK_BYTES), 16);
        add_half(m, together, words, x, k, s);
        k += HALF;
    }
    for (; k < end; k += QUANTISED_BLOCK) {
        if (k % (2 * QUANTISED_BLOCK) == 0) fetch(together, at, k / 2);
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) words[t] = load_block(at[t] + k / 2);
        add_half(m, together, words, x, k, s);
        if (k + HALF >= end) break;
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) words[t] = _mm256_srli_epi32(words[t], 16);
        add_half(m, together, words, x, k + HALF, s);
    }
}

/* total -= what the products are too large by: in each group scale * zero * (sum of x). */
static inline __attribute__((always_inline)) void take_zeros(const int bits, const int m, const int together,
                                                             const Quantised *w, const int64_t *row,
                                                             const QuantisedInput *x, __m256 total[QUANTISED_ROWS][4]) {
    for (int64_t g = 0; g < w->groups; g += 8) {
        __m256i lanes = v_tail((int)min_i64(8, w->groups - g));
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) {
            int64_t at = row[t] * w->groups + g;
            __m256 zero = _mm256_set1_ps(bits == 4 ? 8.0f : 0.0f);
            if (w->zeros) zero = _mm256_add_ps(zero, _mm256_maskload_ps(w->zeros + at, lanes));
            zero = _mm256_mul_ps(zero, _mm256_maskload_ps(w->scales + at, lanes));
#pragma GCC unroll 6
            for (int i = 0; i < m; i++)
                total[i][t] =
                    _mm256_fnmadd_ps(zero, _mm256_maskload_ps(x->sums + i * w->groups + g, lanes), total[i][t]);
        }
    }
}

/* `together` rows of w at a time: they share what is loaded of x, and hide the latency of the sums. */
static inline __attribute__((always_inline)) void dots_body(const int bits, const int m, const int together,
                                                            const Quantised *w, int64_t first, int64_t run,
                                                            int64_t stride, const QuantisedInput *x, float *c,
                                                            int64_t c_row) {
    const int chains = m == 1 && bits == 8 ? 2 : m;
    for (int64_t j = 0; j < QUANTISED_STREAMS * run; j += together) {
        const uint8_t *at[QUANTISED_STREAMS];
        int64_t row[QUANTISED_STREAMS], stream = j % QUANTISED_STREAMS, in_run = j / QUANTISED_STREAMS;
        __m256 total[QUANTISED_ROWS][4], s[QUANTISED_ROWS][4];
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) {
            row[t] = first + in_run + (stream + t) * stride;
            if (row[t] >= w->n) row[t] = first;
            at[t] = w->q + row[t] * w->row_bytes;
        }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) total[i][t] = _mm256_setzero_ps();
        for (int64_t g = 0, k = 0; g < w->groups; g++, k += w->group) {
            int64_t end = min_i64(k + w->group, w->k);
#pragma GCC unroll 6
            for (int i = 0; i < chains; i++)
#pragma GCC unroll 4
                for (int t = 0; t < together; t++) s[i][t] = _mm256_setzero_ps();
            if (bits == 8)
                add_8bit(m, together, at, x, k, end, s);
            else
                add_4bit(m, together, at, x, k, end, s);
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) {
                __m256 scale = _mm256_broadcast_ss(w->scales + row[t] * w->groups + g);
                if (chains > m) s[0][t] = _mm256_add_ps(s[0][t], s[1][t]);
#pragma GCC unroll 6
                for (int i = 0; i < m; i++) total[i][t] = _mm256_fmadd_ps(scale, s[i][t], total[i][t]);
            }
        }
        if (bits == 4 || w->zeros) take_zeros(bits, m, together, w, row, x, total);
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) c[i * c_row + (stream + t) * run + in_run] += v_sum(total[i][t]);
    }
}

QUANTISED_DOTS

/* --- to f32 ------------------------------------------------------------------------------------------------------- */
static void widen_8bit(const uint8_t *q, int64_t n, __m256 zero, __m256 scale, float *to) {
    int64_t c = 0;
    for (; c + 8 <= n; c += 8) _mm256_storeu_ps(to + c, _mm256_mul_ps(_mm256_sub_ps(load8(q + c), zero), scale));
    if (c < n)
        _mm256_maskstore_ps(to + c, v_tail((int)(n - c)),
                            _mm256_mul_ps(_mm256_sub_ps(load8_tail(q + c, n - c), zero), scale));
}

/* n <= 32 columns of the lower half of each word. */
static void widen_half(__m256i words, int64_t n, __m256 zero, __m256 scale, float *to) {
    __m256i mask = _mm256_set1_epi32(15);
    __m256 middle = _mm256_set1_ps(8.0f);
    for (int64_t c = 0; c < n; c += 8, words = _mm256_srli_epi32(words, 4)) {
        __m256 v = _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_and_si256(words, mask)), middle);
        v = _mm256_mul_ps(_mm256_sub_ps(v, zero), scale);
        if (c + 8 <= n)
            _mm256_storeu_ps(to + c, v);
        else
            _mm256_maskstore_ps(to + c, v_tail((int)(n - c)), v);
    }
}

static void widen(const Quantised *w, int64_t row, int64_t rows, int64_t k, int64_t depth, float *dst) {
    for (int64_t j = 0; j < rows; j++) {
        const uint8_t *q = w->q + (row + j) * w->row_bytes;
        float *to = dst + j * depth;
        for (int64_t c = k, n; c < k + depth; c += n) {
            int64_t g = c / w->group, at = (row + j) * w->groups + g;
            n = min_i64((g + 1) * w->group, k + depth) - c;
            __m256 scale = _mm256_broadcast_ss(w->scales + at);
            __m256 zero = w->zeros ? _mm256_broadcast_ss(w->zeros + at) : _mm256_setzero_ps();
            if (w->bits == 8) {
                widen_8bit(q + c, n, zero, scale, to + (c - k));
                continue;
            }
            n = min_i64(n, HALF - c % HALF);
            __m256i words = load_block(q + c / QUANTISED_BLOCK * BLOCK_BYTES);
            widen_half(c % QUANTISED_BLOCK ? _mm256_srli_epi32(words, 16) : words, n, zero, scale, to + (c - k));
        }
    }
}

/* --- from f32 ----------------------------------------------------------------------------------------------------- */
static float largest(const float *from, int64_t n) {
    __m256 most[4];
    int64_t i = 0;
    for (int t = 0; t < 4; t++) most[t] = _mm256_setzero_ps();
    /* as integers, where NaN and infinity are the largest */
    for (; i + 32 <= n; i += 32)
        for (int t = 0; t < 4; t++)
            most[t] = _mm256_castsi256_ps(_mm256_max_epi32(
                _mm256_castps_si256(most[t]), _mm256_castps_si256(v_abs(_mm256_loadu_ps(from + i + 8 * t)))));
    for (; i < n; i += 8) {
        __m256 x = i + 8 <= n ? _mm256_loadu_ps(from + i) : _mm256_maskload_ps(from + i, v_tail((int)(n - i)));
        most[0] = _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(most[0]), _mm256_castps_si256(v_abs(x))));
    }
    int32_t bits[32], best = 0;
    for (int t = 0; t < 4; t++) _mm256_storeu_si256((__m256i *)(void *)(bits + 8 * t), _mm256_castps_si256(most[t]));
    for (int l = 0; l < 32; l++) best = bits[l] > best ? bits[l] : best;
    float result;
    memcpy(&result, &best, sizeof result);
    return result;
}

static inline __m256i rounded(const float *from, __m256 scale, float low, float high) {
    __m256 q = _mm256_div_ps(_mm256_loadu_ps(from), scale);
    return _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(q, _mm256_set1_ps(high)), _mm256_set1_ps(low)));
}

static inline void round_8bit(const float *from, float scale, uint8_t *to, int64_t n) {
    __m256i q = rounded(from, _mm256_set1_ps(scale), -127.0f, 127.0f);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    uint8_t bytes[8];
    _mm_storel_epi64((__m128i *)(void *)bytes, _mm_packs_epi16(words, words));
    memcpy(to, bytes, (size_t)n);
}

static void quantise_8bit(const float *from, int64_t n, float scale, uint8_t *to) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) round_8bit(from + i, scale, to + i, 8);
    if (i < n) {
        float tail[8] = {0};
        memcpy(tail, from + i, (size_t)(n - i) * sizeof *tail);
        round_8bit(tail, scale, to + i, n - i);
    }
}

static void quantise_4bit(const float *from, int64_t n, float scale, int64_t first, uint8_t *to) {
    __m256 s = _mm256_set1_ps(scale);
    float tail[HALF] = {0};
    for (int64_t i = 0; i < n; i += HALF, first += HALF) {
        const float *half = from + i;
        if (n - i < HALF) {
            memset(tail, 0, sizeof tail);
            memcpy(tail, half, (size_t)(n - i) * sizeof *tail);
            half = tail;
        }
        __m256i words = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int j = 3; j >= 0; j--)
            words = _mm256_or_si256(_mm256_slli_epi32(words, 4),
                                    _mm256_add_epi32(rounded(half + 8 * j, s, -8.0f, 7.0f), _mm256_set1_epi32(8)));
        __m256i *block = (__m256i *)(void *)(to + first / QUANTISED_BLOCK * BLOCK_BYTES);
        if (first % QUANTISED_BLOCK) { /* the upper half, over the 8s that the lower one has put there */
            __m256i low = _mm256_and_si256(_mm256_loadu_si256(block), _mm256_set1_epi32(0xffff));
            words = _mm256_or_si256(low, _mm256_slli_epi32(words, 16));
        } else {
            words = _mm256_or_si256(words, _mm256_set1_epi32((int)0x88880000u));
        }
        _mm256_storeu_si256(block, words);
    }
}

const QuantisedDots *quantised_dots_avx2(void) {
    static const QuantisedDots kernels = {arrange, dots, widen};
    return &kernels;
}

const QuantisedMaking *quantised_making_avx2(void) {
    static const QuantisedMaking making = {largest, quantise_8bit, quantise_4bit};
    return &making;
}
#else
const QuantisedDots *quantised_dots_avx2(void) { return NULL; }
const QuantisedMaking *quantised_making_avx2(void) { return NULL; }
#endif
