/* Vectorised f32 functions, within 1-2 units in the last place. Included by *_avx2.c files only. */
#ifndef FORGE_CPU_VMATH_AVX2_H
#define FORGE_CPU_VMATH_AVX2_H

#include <immintrin.h>

/* x * 2^n for -252 <= n <= 254 in two steps, so that denormal results round once and 2^128 overflows to infinity. */
static inline __m256 v_scale(__m256 x, __m256i n) {
    __m256i half = _mm256_srai_epi32(n, 1), rest = _mm256_sub_epi32(n, half), bias = _mm256_set1_epi32(127);
    x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}

/* exp: x = n ln 2 + r, |r| <= ln 2 / 2, polynomial of degree 7 in r. NaN stays, inf and -inf give inf and 0. */
static inline __m256 v_exp(__m256 x) {
    /* min and max return their second operand when one is NaN */
    x = _mm256_min_ps(_mm256_set1_ps(88.8f), _mm256_max_ps(_mm256_set1_ps(-104.0f), x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145751953125f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.428606765330187045e-06f), r);
    __m256 p = _mm256_set1_ps(0.000198527617612853646278381f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.00139304355252534151077271f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.00833336077630519866943359f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.0416664853692054748535156f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.166666671633720397949219f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(r, r), p, r), _mm256_set1_ps(1.0f));
    return v_scale(p, _mm256_cvtps_epi32(n));
}

/* Lanes 0..count-1 set, for maskload and maskstore; 0 <= count <= 8. */
static inline __m256i v_tail(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline float v_sum(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

static inline float v_max(__m256 x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

#endif
