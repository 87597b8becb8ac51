/* f32 to f16 and back, eight at a time. */
#include "npu/weights.h"

#include <stddef.h>

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#include <string.h>

static __m128i narrow8(__m256 x) {
    const __m256 most = _mm256_set1_ps(65504.0f), sign = _mm256_set1_ps(-0.0f);
    const __m256 size = _mm256_andnot_ps(sign, x);
    const __m256 infinite = _mm256_cmp_ps(size, _mm256_set1_ps(__builtin_inff()), _CMP_EQ_OQ);
    const __m256 bounded = _mm256_min_ps(most, size); /* the second operand where it is NaN */
    const __m256 kept = _mm256_blendv_ps(bounded, size, infinite);
    return _mm256_cvtps_ph(_mm256_or_ps(kept, _mm256_and_ps(sign, x)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static void narrow(const float *from, uint16_t *to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(to + i), narrow8(_mm256_loadu_ps(from + i)));
    if (i == n) return;
    float rest[8] = {0};
    uint16_t half[8];
    memcpy(rest, from + i, (size_t)(n - i) * sizeof *from);
    _mm_storeu_si128((__m128i *)half, narrow8(_mm256_loadu_ps(rest)));
    memcpy(to + i, half, (size_t)(n - i) * sizeof *to);
}

static void widen(const uint16_t *from, float *to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    if (i == n) return;
    uint16_t half[8] = {0};
    float rest[8];
    memcpy(half, from + i, (size_t)(n - i) * sizeof *from);
    _mm256_storeu_ps(rest, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half)));
    memcpy(to + i, rest, (size_t)(n - i) * sizeof *to);
}

NarrowFn weights_narrow_avx2(void) { return narrow; }
WidenFn weights_widen_avx2(void) { return widen; }
#else
NarrowFn weights_narrow_avx2(void) { return NULL; }
WidenFn weights_widen_avx2(void) { return NULL; }
#endif
