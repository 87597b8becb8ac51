#include "cpu/attention.h"

#if defined(__AVX2__) && defined(__FMA__)
#include "cpu/vmath_avx2.h"

#include <math.h>

/* Scores lie [key][row]: 8 rows go through all keys at once, no sum or maximum crosses lanes. */
static void softmax_block(AttentionBlock *b, int64_t rows, int64_t keys, float scale) {
    const __m256 factor = _mm256_set1_ps(scale), none = _mm256_set1_ps(-INFINITY);
    for (int64_t r = 0; r < rows; r += 8) {
        __m256 before = _mm256_loadu_ps(b->max + r), max = before;
        __m256i last = _mm256_loadu_si256((const __m256i *)(const void *)(b->last + r));
        for (int64_t t = 0; t < keys; t++) {
            __m256 s = _mm256_mul_ps(_mm256_loadu_ps(&b->scores[t][r]), factor);
            if (b->masked) s = _mm256_add_ps(s, _mm256_loadu_ps(&b->mask[t][r]));
            if (b->causal) {
                __m256i hidden = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)t), last);
                s = _mm256_blendv_ps(s, none, _mm256_castsi256_ps(hidden));
            }
            _mm256_storeu_ps(&b->scores[t][r], s);
            max = _mm256_max_ps(s, max);
        }
        /* -inf - -inf would be NaN */
        __m256 shift = _mm256_andnot_ps(_mm256_cmp_ps(max, none, _CMP_EQ_OQ), max), sum = _mm256_setzero_ps();
        for (int64_t t = 0; t < keys; t++) {
            __m256 p = v_exp(_mm256_sub_ps(_mm256_loadu_ps(&b->scores[t][r]), shift));
            _mm256_storeu_ps(&b->scores[t][r], p);
            sum = _mm256_add_ps(sum, p);
        }
        __m256 decay = v_exp(_mm256_sub_ps(before, shift));
        _mm256_storeu_ps(b->decay + r, decay);
        _mm256_storeu_ps(b->max + r, max);
        _mm256_storeu_ps(b->sum + r, _mm256_fmadd_ps(_mm256_loadu_ps(b->sum + r), decay, sum));
    }
}

AttentionSoftmax attention_softmax_avx2(void) { return softmax_block; }
#else
AttentionSoftmax attention_softmax_avx2(void) { return NULL; }
#endif
