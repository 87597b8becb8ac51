#include "cpu/attention.h"

#if defined(__AVX2__) && defined(__FMA__)
#include "cpu/vmath_avx2.h"

#include <math.h>

/* Scores lie [key][row]: 8 rows go through all keys at once, no sum or maximum crosses lanes. Scaled and masked scores
 * are made twice, which is faster than to store them. Inlined with constants. */
static inline __attribute__((always_inline)) __m256 score(const AttentionBlock *b, int64_t t, int64_t r, __m256 factor,
                                                          const bool masked, const bool causal) {
    /* adding 0 keeps the product from being merged with what follows: a mask of 0 gives the same bits */
    __m256 s = _mm256_fmadd_ps(_mm256_loadu_ps(&b->scores[t][r]), factor,
                               masked ? _mm256_loadu_ps(&b->mask[t][r]) : _mm256_setzero_ps());
    if (!causal) return s;
    __m256i last = _mm256_loadu_si256((const __m256i *)(const void *)(b->last + r));
    __m256i hidden = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)t), last);
    return _mm256_blendv_ps(s, _mm256_set1_ps(-INFINITY), _mm256_castsi256_ps(hidden));
}

static inline __attribute__((always_inline)) void softmax_rows(AttentionBlock *b, int64_t rows, int64_t keys,
                                                               float scale, const bool masked, const bool causal) {
    const __m256 factor = _mm256_set1_ps(scale), none = _mm256_set1_ps(-INFINITY);
    for (int64_t r = 0; r < rows; r += 8) {
        __m256 before = _mm256_loadu_ps(b->max + r), max = before;
        for (int64_t t = 0; t < keys; t++) max = _mm256_max_ps(score(b, t, r, factor, masked, causal), max);
        /* -inf - -inf would be NaN */
        __m256 shift = _mm256_andnot_ps(_mm256_cmp_ps(max, none, _CMP_EQ_OQ), max), sum = _mm256_setzero_ps();
        for (int64_t t = 0; t < keys; t++) {
            __m256 p = v_exp_weight(_mm256_sub_ps(score(b, t, r, factor, masked, causal), shift));
            _mm256_storeu_ps(&b->scores[t][r], p);
            sum = _mm256_add_ps(sum, p);
        }
        __m256 decay = v_exp_weight(_mm256_sub_ps(before, shift));
        _mm256_storeu_ps(b->decay + r, decay);
        _mm256_storeu_ps(b->max + r, max);
        _mm256_storeu_ps(b->sum + r, _mm256_fmadd_ps(_mm256_loadu_ps(b->sum + r), decay, sum));
    }
}

static void softmax_block(AttentionBlock *b, int64_t rows, int64_t keys, float scale) {
    if (b->masked && b->causal)
        softmax_rows(b, rows, keys, scale, true, true);
    else if (b->masked)
        softmax_rows(b, rows, keys, scale, true, false);
    else if (b->causal)
        softmax_rows(b, rows, keys, scale, false, true);
    else
        softmax_rows(b, rows, keys, scale, false, false);
}

static inline __attribute__((always_inline)) void average_columns(const int vectors, float *out, const float *weights,
                                                                  const float *v, int64_t row, int64_t keys) {
    __m256 s[8];
#pragma GCC unroll 8
    for (int j = 0; j < vectors; j++) s[j] = _mm256_setzero_ps();
    for (int64_t t = 0; t < keys; t++, v += row) {
        __m256 w = _mm256_broadcast_ss(weights + t);
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) s[j] = _mm256_fmadd_ps(w, _mm256_loadu_ps(v + 8 * j), s[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < vectors; j++) _mm256_storeu_ps(out + 8 * j, s[j]);
}

static void average(float *out, const float *weights, const float *v, int64_t row, int64_t keys, int64_t width) {
    int64_t e = 0;
    for (; e + 64 <= width; e += 64) average_columns(8, out + e, weights, v + e, row, keys);
    for (; e + 32 <= width; e += 32) average_columns(4, out + e, weights, v + e, row, keys);
    for (; e < width; e += 8) {
        __m256i lanes = v_tail(width - e < 8 ? (int)(width - e) : 8);
        __m256 s = _mm256_setzero_ps();
        for (int64_t t = 0; t < keys; t++)
            s = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + t), _mm256_maskload_ps(v + t * row + e, lanes), s);
        _mm256_maskstore_ps(out + e, lanes, s);
    }
}

AttentionSoftmax attention_softmax_avx2(void) { return softmax_block; }
AttentionAverage attention_average_avx2(void) { return average; }
#else
AttentionAverage attention_average_avx2(void) { return NULL; }
AttentionSoftmax attention_softmax_avx2(void) { return NULL; }
#endif
