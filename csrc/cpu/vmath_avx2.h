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

#define V_LOG2E 1.44269504088896341f
#define V_LN2_HIGH 0.693145751953125f /* a whole number times it is exact */
#define V_LN2_LOW 1.428606765330187045e-06f

/* x - n ln 2 */
static inline __m256 v_less_ln2(__m256 n, __m256 x) {
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(V_LN2_HIGH), x);
    return _mm256_fnmadd_ps(n, _mm256_set1_ps(V_LN2_LOW), x);
}

/* exp(r) for |r| <= ln 2 / 2: polynomial of degree 7. */
static inline __m256 v_exp_fraction(__m256 r) {
    __m256 p = _mm256_set1_ps(0.000198527617612853646278381f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.00139304355252534151077271f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.00833336077630519866943359f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.0416664853692054748535156f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.166666671633720397949219f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    return _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(r, r), p, r), _mm256_set1_ps(1.0f));
}

/* exp: x = n ln 2 + r. NaN stays, inf and -inf give inf and 0. */
static inline __m256 v_exp(__m256 x) {
    /* min and max return their second operand when one is NaN */
    x = _mm256_min_ps(_mm256_set1_ps(88.8f), _mm256_max_ps(_mm256_set1_ps(-104.0f), x));
    __m256 n =
        _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(V_LOG2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = v_less_ln2(n, x);
    return v_scale(v_exp_fraction(r), _mm256_cvtps_epi32(n));
}

/* Adding V_MAGIC to -127 <= y <= 128 rounds it to a whole number n, which is returned, and leaves n + 127 in the low
 * bits: *power becomes 2^n, at the ends 0 and infinity. With V_MAGIC - 1 it becomes 2^(n - 1). NaN gives NaN and 0. */
#define V_MAGIC (0x1.8p23f + 127)
static inline __m256 v_split(__m256 rounded, float magic, __m256 *power) {
    *power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(rounded), 23));
    return _mm256_sub_ps(rounded, _mm256_set1_ps(magic));
}

/* 2^f for |f| <= 1/2: within 2e-9 before rounding. */
static inline __m256 v_exp2_fraction(__m256 f) {
    __m256 p = _mm256_set1_ps(1.53533619595691561699e-4f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.33988750167191028595e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.61843691766262054443e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.55033236742019653320e-2f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.40226477384567260742e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.93147182464599609375e-1f));
    return _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
}

/* exp of x <= 0, or NaN, for sums that have a 1 among their terms: below 2^-126 it is 0. */
static inline __m256 v_exp_weight(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-88.0f), x); /* NaN stays */
    const __m256 high = _mm256_set1_ps(1.44269502162933349609f), low = _mm256_set1_ps(1.92596299112661746888e-8f);
    __m256 power, n = v_split(_mm256_fmadd_ps(x, high, _mm256_set1_ps(V_MAGIC)), V_MAGIC, &power);
    __m256 f = _mm256_fmadd_ps(x, low, _mm256_fmsub_ps(x, high, n));
    return _mm256_mul_ps(v_exp2_fraction(f), power);
}

/* (1 + exp(-x)) / 2, infinite only where exp(-x) is 2^128.5 or more. */
static inline __m256 v_logistic_divisor(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(87.3f), _mm256_max_ps(_mm256_set1_ps(-89.4f), x)); /* NaN stays */
    const float magic = V_MAGIC - 1;
    __m256 power, n = v_split(_mm256_fnmadd_ps(x, _mm256_set1_ps(V_LOG2E), _mm256_set1_ps(magic)), magic, &power);
    __m256 r = _mm256_fnmsub_ps(n, _mm256_set1_ps(V_LN2_HIGH), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(V_LN2_LOW), r);
    return _mm256_fmadd_ps(v_exp_fraction(r), power, _mm256_set1_ps(0.5f));
}
static inline __m256 v_sigmoid(__m256 x) { return _mm256_div_ps(_mm256_set1_ps(0.5f), v_logistic_divisor(x)); }
static inline __m256 v_silu(__m256 x) {
    return _mm256_div_ps(_mm256_mul_ps(_mm256_set1_ps(0.5f), x), v_logistic_divisor(x));
}

static inline __m256 v_abs(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
static inline __m256 v_copysign(__m256 x, __m256 sign) {
    __m256 bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, x), _mm256_and_ps(bit, sign));
}

/* log: x = 2^e (1 + m), -1/3 <= m <= 1/3, polynomial in m. 0 gives -inf, negative numbers NaN. */
static inline __m256 v_log(__m256 x) {
    __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(0x1p-126f), _CMP_LT_OQ);
    __m256 a = _mm256_blendv_ps(x, _mm256_mul_ps(x, _mm256_set1_ps(0x1p23f)), tiny);
    __m256i bits = _mm256_castps_si256(a);
    __m256i e =
        _mm256_and_si256(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f2aaaab)), _mm256_set1_epi32((int)0xff800000));
    __m256 m = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_sub_epi32(bits, e)), _mm256_set1_ps(1.0f));
    __m256 i =
        _mm256_fmadd_ps(_mm256_cvtepi32_ps(e), _mm256_set1_ps(0x1p-23f), _mm256_and_ps(tiny, _mm256_set1_ps(-23.0f)));
    __m256 s = _mm256_mul_ps(m, m);
    __m256 r = _mm256_fmadd_ps(_mm256_set1_ps(-0.130310059f), s, _mm256_set1_ps(-0.121483512f));
    __m256 t = _mm256_fmadd_ps(_mm256_set1_ps(0.140869141f), s, _mm256_set1_ps(0.139814854f));
    r = _mm256_fmadd_ps(r, s, _mm256_set1_ps(-0.166846126f));
    t = _mm256_fmadd_ps(t, s, _mm256_set1_ps(0.200120345f));
    r = _mm256_fmadd_ps(r, s, _mm256_set1_ps(-0.249996200f));
    r = _mm256_fmadd_ps(t, m, r);
    r = _mm256_fmadd_ps(r, m, _mm256_set1_ps(0.333331972f));
    r = _mm256_fmadd_ps(r, m, _mm256_set1_ps(-0.5f));
    r = _mm256_fmadd_ps(r, s, m);
    r = _mm256_fmadd_ps(i, _mm256_set1_ps(0.693147182f), r);
    __m256 inf = _mm256_set1_ps(__builtin_inff()), zero = _mm256_setzero_ps();
    r = _mm256_blendv_ps(r, x, _mm256_cmp_ps(x, inf, _CMP_EQ_OQ));
    r = _mm256_blendv_ps(r, _mm256_sub_ps(zero, inf), _mm256_cmp_ps(x, zero, _CMP_EQ_OQ));
    return _mm256_blendv_ps(r, _mm256_set1_ps(__builtin_nanf("")), _mm256_cmp_ps(x, zero, _CMP_NGE_UQ));
}

/* tanh: an odd polynomial below 0.625, 1 - 2 / (exp(2 |x|) + 1) above. */
static inline __m256 v_tanh(__m256 x) {
    __m256 z = _mm256_mul_ps(x, x), a = v_abs(x), one = _mm256_set1_ps(1.0f), two = _mm256_set1_ps(2.0f);
    __m256 p = _mm256_set1_ps(-5.70498872745e-3f);
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(2.06390887954e-2f));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(-5.37397155531e-2f));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(1.33314422036e-1f));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(-3.33332819422e-1f));
    p = _mm256_fmadd_ps(_mm256_mul_ps(p, z), x, x);
    __m256 c = _mm256_min_ps(_mm256_set1_ps(20.0f), _mm256_add_ps(a, a)); /* NaN stays */
    __m256 power, n = v_split(_mm256_fmadd_ps(c, _mm256_set1_ps(V_LOG2E), _mm256_set1_ps(V_MAGIC)), V_MAGIC, &power);
    __m256 r = v_less_ln2(n, c);
    __m256 q = _mm256_sub_ps(one, _mm256_div_ps(two, _mm256_fmadd_ps(v_exp_fraction(r), power, one)));
    return v_copysign(_mm256_blendv_ps(p, q, _mm256_cmp_ps(a, _mm256_set1_ps(0.625f), _CMP_GE_OQ)), x); /* -0 too */
}

/* erf: an odd polynomial in the middle, 1 - exp(polynomial of |x|) outside; from |x| = 4 on it is 1. Pairs of terms are
 * evaluated side by side, for latency is what counts here; exp is v_exp without the ends. */
static inline __m256 v_erf(__m256 x) {
    __m256 t = v_abs(x), s = _mm256_mul_ps(x, x);
    __m256 p = _mm256_set1_ps(-5.96761703e-4f);
    p = _mm256_fmadd_ps(p, s, _mm256_set1_ps(4.99119423e-3f));
    p = _mm256_fmadd_ps(p, s, _mm256_set1_ps(-2.67681349e-2f));
    p = _mm256_fmadd_ps(p, s, _mm256_set1_ps(1.12819925e-1f));
    p = _mm256_fmadd_ps(p, s, _mm256_set1_ps(-3.76125336e-1f));
    p = _mm256_fmadd_ps(p, s, _mm256_set1_ps(1.28379166e-1f));
    p = _mm256_fmadd_ps(p, x, x);
    __m256 c = _mm256_min_ps(_mm256_set1_ps(4.0f), t); /* NaN stays */
    __m256 c2 = _mm256_mul_ps(c, c);
    __m256 r = _mm256_fmadd_ps(_mm256_set1_ps(-1.72853470e-5f), c, _mm256_set1_ps(3.83197126e-4f));
    __m256 u = _mm256_fmadd_ps(_mm256_set1_ps(-3.88396438e-3f), c, _mm256_set1_ps(2.42546219e-2f));
    r = _mm256_fmadd_ps(r, c2, u);
    r = _mm256_fmadd_ps(r, c, _mm256_set1_ps(-1.06777877e-1f));
    r = _mm256_fmadd_ps(r, c, _mm256_set1_ps(-6.34846687e-1f));
    r = _mm256_fmadd_ps(r, c, _mm256_set1_ps(-1.28717512e-1f));
    r = _mm256_fmsub_ps(r, c, c);
    __m256 n =
        _mm256_round_ps(_mm256_mul_ps(r, _mm256_set1_ps(V_LOG2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = v_less_ln2(n, r);
    __m256 f2 = _mm256_mul_ps(f, f);
    __m256 q = _mm256_fmadd_ps(_mm256_set1_ps(0.00139304355252534151077271f), f,
                               _mm256_set1_ps(0.00833336077630519866943359f));
    __m256 v =
        _mm256_fmadd_ps(_mm256_set1_ps(0.0416664853692054748535156f), f, _mm256_set1_ps(0.166666671633720397949219f));
    q = _mm256_fmadd_ps(q, f2, v);
    q = _mm256_fmadd_ps(q, f, _mm256_set1_ps(0.5f));
    q = _mm256_add_ps(_mm256_fmadd_ps(q, f2, f), _mm256_set1_ps(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    r = v_copysign(_mm256_fnmadd_ps(q, _mm256_castsi256_ps(power), _mm256_set1_ps(1.0f)), x);
    return _mm256_blendv_ps(p, r, _mm256_cmp_ps(t, _mm256_set1_ps(0.927734375f), _CMP_GT_OQ));
}

/* gelu: x times the normal distribution, whose tail is 2 to the power of -1 and a polynomial in |x|: within 2e-9
 * times its square root before rounding. 1 + erf would cancel where x is negative. */
static inline __m256 v_gelu(__m256 x) {
    __m256 t = _mm256_min_ps(_mm256_set1_ps(10.91f), v_abs(x)); /* there the power is 0; NaN stays */
    __m256 s = _mm256_mul_ps(t, t);
    __m256 odd = _mm256_set1_ps(-3.559276962050717e-8f), even = _mm256_set1_ps(9.976754427043488e-7f);
    odd = _mm256_fmadd_ps(odd, s, _mm256_set1_ps(-1.2109348972444423e-5f));
    even = _mm256_fmadd_ps(even, s, _mm256_set1_ps(8.124277519527823e-5f));
    odd = _mm256_fmadd_ps(odd, s, _mm256_set1_ps(-2.903239510487765e-4f));
    even = _mm256_fmadd_ps(even, s, _mm256_set1_ps(1.1549920600373298e-5f));
    odd = _mm256_fmadd_ps(odd, s, _mm256_set1_ps(6.943569518625736e-3f));
    even = _mm256_fmadd_ps(even, s, _mm256_set1_ps(-5.2444782108068466e-2f));
    odd = _mm256_fmadd_ps(odd, s, _mm256_set1_ps(-4.592183232307434e-1f));
    even = _mm256_fmadd_ps(even, s, _mm256_set1_ps(-1.1511045694351196f));
    __m256 p = _mm256_fmadd_ps(odd, t, even);
    const float magic = V_MAGIC - 1;
    __m256 power, n = v_split(_mm256_fmadd_ps(p, t, _mm256_set1_ps(magic)), magic, &power);
    __m256 tail = _mm256_mul_ps(v_exp2_fraction(_mm256_fmsub_ps(p, t, n)), power);
    return _mm256_mul_ps(x, _mm256_blendv_ps(_mm256_sub_ps(_mm256_set1_ps(1.0f), tail), tail, x));
}

/* gelu's tanh form, which is x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3), with exp as a power of 2. */
static inline __m256 v_gelu_tanh(__m256 x) {
    /* at the ends the power is 0 and infinite; NaN stays */
    __m256 c = _mm256_min_ps(_mm256_set1_ps(10.03f), _mm256_max_ps(_mm256_set1_ps(-10.07f), x));
    __m256 y = _mm256_set1_ps(-0.10294323958f);                                  /* 0.044715 times the next */
    y = _mm256_fmadd_ps(_mm256_mul_ps(c, c), y, _mm256_set1_ps(-2.3022081981f)); /* -2 sqrt(2 / pi) / ln 2 */
    __m256 power, n = v_split(_mm256_fmadd_ps(c, y, _mm256_set1_ps(V_MAGIC)), V_MAGIC, &power);
    __m256 p = v_exp2_fraction(_mm256_fmsub_ps(c, y, n));
    return _mm256_div_ps(x, _mm256_fmadd_ps(p, power, _mm256_set1_ps(1.0f)));
}

/* sin (quadrant 0) and cos (quadrant 1) for |x| <= V_TRIG_MAX: x = n pi/2 + r with pi/2 in three parts. */
#define V_TRIG_MAX 48000.0f
static inline __m256 v_trig(__m256 x, int quadrant) {
    __m256 n =
        _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(0.636619747f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i q = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(quadrant));
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.57079601e+00f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(3.13916473e-07f), r);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(5.39030253e-15f), r);
    __m256 s = _mm256_mul_ps(r, r);
    __m256 sine = _mm256_fmadd_ps(_mm256_set1_ps(2.86567956e-6f), s, _mm256_set1_ps(-1.98559923e-4f));
    sine = _mm256_fmadd_ps(sine, s, _mm256_set1_ps(8.33338592e-3f));
    sine = _mm256_fmadd_ps(sine, s, _mm256_set1_ps(-1.66666672e-1f));
    sine = _mm256_fmadd_ps(sine, _mm256_mul_ps(r, s), r);
    __m256 cosine = _mm256_fmadd_ps(_mm256_set1_ps(2.44677067e-5f), s, _mm256_set1_ps(-1.38877297e-3f));
    cosine = _mm256_fmadd_ps(cosine, s, _mm256_set1_ps(4.16666567e-2f));
    cosine = _mm256_fmadd_ps(cosine, s, _mm256_set1_ps(-0.5f));
    cosine = _mm256_fmadd_ps(cosine, s, _mm256_set1_ps(1.0f));
    __m256 y = _mm256_blendv_ps(sine, cosine, _mm256_castsi256_ps(_mm256_slli_epi32(q, 31)));
    y = _mm256_xor_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(q, 1), 31)));
    if (quadrant == 0) y = _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ)); /* keeps -0 */
    return y;
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
