/* Halves to f32 and back, eight at a time; quantising. */
#include "npu/weights.h"

#include <stddef.h>

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#include <string.h>

#include "base/dtype.h"

static __m128i narrow8(__m256 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f), size = _mm256_andnot_ps(sign, x);
    const __m256 finite = _mm256_cmp_ps(size, _mm256_set1_ps(__builtin_inff()), _CMP_LT_OQ);
    const __m256 over = _mm256_cmp_ps(size, _mm256_set1_ps(F16_OVERFLOW), _CMP_GE_OQ);
    const __m256 kept = _mm256_blendv_ps(size, _mm256_set1_ps(F16_SUBSTITUTE), _mm256_and_ps(over, finite));
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

/* To nearest even; NaN is 0x7fc0. */
static __m128i narrow_bf16_8(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i top = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i half = _mm256_blendv_epi8(_mm256_srli_epi32(top, 16), _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

static __m256 widen_bf16_8(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

static void narrow_bf16(const float *from, uint16_t *to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(to + i), narrow_bf16_8(_mm256_loadu_ps(from + i)));
    for (; i < n; i++) to[i] = f32_to_bf16(from[i]);
}

static void widen_bf16(const uint16_t *from, float *to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, widen_bf16_8(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < n; i++) to[i] = bf16_to_f32(from[i]);
}

/* Sizes compare as integers, and NaN is above all. */
static float largest(const float *from, int64_t n) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(from + i));
        most = _mm256_max_epu32(most, _mm256_and_si256(x, size));
    }
    uint32_t lanes[8], top = 0, bits;
    _mm256_storeu_si256((__m256i *)lanes, most);
    for (int k = 0; k < 8; k++) top = lanes[k] > top ? lanes[k] : top;
    for (; i < n; i++) {
        memcpy(&bits, from + i, sizeof bits);
        bits &= 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    float result;
    memcpy(&result, &top, sizeof result);
    return result;
}

static __m256i quantise8(const float *from, __m256 scale, __m256 levels, __m256 lowest) {
    __m256 q = _mm256_div_ps(_mm256_loadu_ps(from), scale);
    q = _mm256_min_ps(_mm256_max_ps(q, lowest), levels); /* max gives the second operand for NaN */
    return _mm256_cvtps_epi32(q);                        /* to nearest even */
}

static void quantise(const float *from, int64_t n, float scale, float levels, int8_t *to) {
    const __m256 s = _mm256_set1_ps(scale), l = _mm256_set1_ps(levels), low = _mm256_set1_ps(-levels);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i a = _mm256_packs_epi32(quantise8(from + i, s, l, low), quantise8(from + i + 8, s, l, low));
        __m256i b = _mm256_packs_epi32(quantise8(from + i + 16, s, l, low), quantise8(from + i + 24, s, l, low));
        __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
        _mm256_storeu_si256((__m256i *)(to + i), bytes);
    }
    for (; i < n; i += 8) {
        float rest[8] = {0};
        int32_t whole[8];
        int64_t count = n - i < 8 ? n - i : 8;
        memcpy(rest, from + i, (size_t)count * sizeof *from);
        _mm256_storeu_si256((__m256i *)whole, quantise8(rest, s, l, low));
        for (int64_t k = 0; k < count; k++) to[i + k] = (int8_t)whole[k];
    }
}

static const WeightKernels kernels = {narrow, widen, narrow_bf16, widen_bf16, largest, quantise};
const WeightKernels *weight_kernels_avx2(void) { return &kernels; }
#else
const WeightKernels *weight_kernels_avx2(void) { return NULL; }
#endif
