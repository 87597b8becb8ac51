/* Elementwise functions of f32 in AVX2. The rest of a vector at the end goes through the same instructions under a
 * mask, so an element's result does not depend on its place. */
#include "cpu/elementwise.h"

#if defined(__AVX2__)
#include <math.h>
#include <string.h>

#include "cpu/vmath_avx2.h"

/* Eight elements from i on; past the end lanes are 0. */
static inline __m256 load(EwSrc s, int64_t i) {
    const float *p = s.data;
    return s.stride ? _mm256_loadu_ps(p + i) : _mm256_broadcast_ss(p);
}
static inline __m256 load_tail(EwSrc s, int64_t i, __m256i mask) {
    const float *p = s.data;
    return s.stride ? _mm256_maskload_ps(p + i, mask) : _mm256_broadcast_ss(p);
}

#define UNARY(name, expr)                                                                                              \
    static EwFault name(void *dst, const EwSrc *src, int64_t n) {                                                      \
        float *d = dst;                                                                                                \
        const EwSrc a = src[0];                                                                                        \
        int64_t i = 0;                                                                                                 \
        for (; i + 8 <= n; i += 8) {                                                                                   \
            __m256 x = load(a, i);                                                                                     \
            _mm256_storeu_ps(d + i, expr);                                                                             \
        }                                                                                                              \
        if (i < n) {                                                                                                   \
            __m256i mask = v_tail((int)(n - i));                                                                       \
            __m256 x = load_tail(a, i, mask);                                                                          \
            _mm256_maskstore_ps(d + i, mask, expr);                                                                    \
        }                                                                                                              \
        return EW_OK;                                                                                                  \
    }

#define BINARY(name, expr)                                                                                             \
    static EwFault name(void *dst, const EwSrc *src, int64_t n) {                                                      \
        float *d = dst;                                                                                                \
        const EwSrc a = src[0], b = src[1];                                                                            \
        int64_t i = 0;                                                                                                 \
        for (; i + 8 <= n; i += 8) {                                                                                   \
            __m256 x = load(a, i), y = load(b, i);                                                                     \
            _mm256_storeu_ps(d + i, expr);                                                                             \
        }                                                                                                              \
        if (i < n) {                                                                                                   \
            __m256i mask = v_tail((int)(n - i));                                                                       \
            __m256 x = load_tail(a, i, mask), y = load_tail(b, i, mask);                                               \
            _mm256_maskstore_ps(d + i, mask, expr);                                                                    \
        }                                                                                                              \
        return EW_OK;                                                                                                  \
    }

/* Eight lane masks to eight bools. */
static inline uint64_t to_bools(__m256 mask) {
    __m256i m = _mm256_castps_si256(mask);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    __m128i bytes = _mm_and_si128(_mm_packs_epi16(words, words), _mm_set1_epi8(1));
    return (uint64_t)_mm_cvtsi128_si64(bytes);
}

#define COMPARISON(name, how)                                                                                          \
    static EwFault name(void *dst, const EwSrc *src, int64_t n) {                                                      \
        uint8_t *d = dst;                                                                                              \
        const EwSrc a = src[0], b = src[1];                                                                            \
        int64_t i = 0;                                                                                                 \
        for (; i + 8 <= n; i += 8) {                                                                                   \
            uint64_t r = to_bools(_mm256_cmp_ps(load(a, i), load(b, i), how));                                         \
            memcpy(d + i, &r, 8);                                                                                      \
        }                                                                                                              \
        if (i < n) {                                                                                                   \
            __m256i mask = v_tail((int)(n - i));                                                                       \
            uint64_t r = to_bools(_mm256_cmp_ps(load_tail(a, i, mask), load_tail(b, i, mask), how));                   \
            memcpy(d + i, &r, (size_t)(n - i));                                                                        \
        }                                                                                                              \
        return EW_OK;                                                                                                  \
    }

#define ONE _mm256_set1_ps(1.0f)
static inline __m256 negated(__m256 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }

static inline __m256 trig(__m256 x, int quadrant) {
    __m256 y = v_trig(x, quadrant);
    int far = _mm256_movemask_ps(_mm256_cmp_ps(v_abs(x), _mm256_set1_ps(V_TRIG_MAX), _CMP_NLE_UQ));
    if (far) { /* large, infinite and NaN arguments: the reduction of libm */
        float from[8], to[8];
        _mm256_storeu_ps(from, x);
        _mm256_storeu_ps(to, y);
        for (int k = 0; k < 8; k++)
            if (far >> k & 1) to[k] = quadrant ? cosf(from[k]) : sinf(from[k]);
        y = _mm256_loadu_ps(to);
    }
    return y;
}

/* NaN wins; equal operands give y, as in the portable form. */
static inline __m256 maximum(__m256 x, __m256 y) {
    return _mm256_blendv_ps(_mm256_max_ps(x, y), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
static inline __m256 minimum(__m256 x, __m256 y) {
    return _mm256_blendv_ps(_mm256_min_ps(x, y), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

#define UNARY_FUNCTIONS(F)                                                                                             \
    F(neg, negated(x))                                                                                                 \
    F(abs, v_abs(x))                                                                                                   \
    F(floor, _mm256_floor_ps(x))                                                                                       \
    F(ceil, _mm256_ceil_ps(x))                                                                                         \
    F(round, _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))                                        \
    F(trunc, _mm256_round_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC))                                               \
    F(exp, v_exp(x))                                                                                                   \
    F(log, v_log(x))                                                                                                   \
    F(sqrt, _mm256_sqrt_ps(x))                                                                                         \
    F(rsqrt, _mm256_div_ps(ONE, _mm256_sqrt_ps(x)))                                                                    \
    F(reciprocal, _mm256_div_ps(ONE, x))                                                                               \
    F(sin, trig(x, 0))                                                                                                 \
    F(cos, trig(x, 1))                                                                                                 \
    F(tanh, v_tanh(x))                                                                                                 \
    F(erf, v_erf(x))                                                                                                   \
    F(sigmoid, v_sigmoid(x))                                                                                           \
    F(silu, v_silu(x))                                                                                                 \
    F(relu, _mm256_max_ps(_mm256_setzero_ps(), x))                                                                     \
    F(gelu, v_gelu(x))

#define BINARY_FUNCTIONS(F)                                                                                            \
    F(add, _mm256_add_ps(x, y))                                                                                        \
    F(sub, _mm256_sub_ps(x, y))                                                                                        \
    F(mul, _mm256_mul_ps(x, y))                                                                                        \
    F(div, _mm256_div_ps(x, y))                                                                                        \
    F(minimum, minimum(x, y))                                                                                          \
    F(maximum, maximum(x, y))

#define COMPARISONS(F)                                                                                                 \
    F(eq, _CMP_EQ_OQ) F(ne, _CMP_NEQ_UQ) F(lt, _CMP_LT_OQ) F(le, _CMP_LE_OQ) F(gt, _CMP_GT_OQ) F(ge, _CMP_GE_OQ)

#define DEFINE(op, expr) UNARY(v_##op##_all, expr)
UNARY_FUNCTIONS(DEFINE)
UNARY(v_gelu_tanh_all, v_gelu_tanh(x))
#undef DEFINE
#define DEFINE(op, expr) BINARY(v_##op##_all, expr)
BINARY_FUNCTIONS(DEFINE)
#undef DEFINE
#define DEFINE(op, how) COMPARISON(v_##op##_all, how)
COMPARISONS(DEFINE)
#undef DEFINE
#define ENTRY(op, ...) [OP_##op] = v_##op##_all,
static const EwFn UNARIES[OP_COUNT] = {UNARY_FUNCTIONS(ENTRY)};
static const EwFn BINARIES[OP_COUNT] = {BINARY_FUNCTIONS(ENTRY) COMPARISONS(ENTRY)};

EwFn avx2_unary(Op op, bool approximate) { return op == OP_gelu && approximate ? v_gelu_tanh_all : UNARIES[op]; }
EwFn avx2_binary(Op op) { return BINARIES[op]; }

static inline __m256 bool_mask(const uint8_t *c) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)c));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(wide, _mm256_setzero_si256()));
}

static EwFault where32(void *dst, const EwSrc *src, int64_t n) {
    float *d = dst;
    const uint8_t *c = src[0].data;
    uint8_t spread[8];
    if (!src[0].stride) memset(spread, *c, 8);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 mask = bool_mask(src[0].stride ? c + i : spread);
        _mm256_storeu_ps(d + i, _mm256_blendv_ps(load(src[2], i), load(src[1], i), mask));
    }
    if (i < n) {
        __m256i tail = v_tail((int)(n - i));
        if (src[0].stride) memcpy(spread, c + i, (size_t)(n - i)), memset(spread + (n - i), 0, (size_t)(8 - (n - i)));
        __m256 r = _mm256_blendv_ps(load_tail(src[2], i, tail), load_tail(src[1], i, tail), bool_mask(spread));
        _mm256_maskstore_ps(d + i, tail, r);
    }
    return EW_OK;
}
EwFn avx2_where32(void) { return where32; }

static EwFault clamp(void *dst, const EwSrc *src, int64_t n) {
    float low = *(const float *)src[1].data, high = *(const float *)src[2].data;
    if (low != low || high != high) return ew_clamp(DTYPE_F32)(dst, src, n);
    __m256 l = _mm256_set1_ps(low), h = _mm256_set1_ps(high);
    float *d = dst;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(d + i, _mm256_min_ps(h, _mm256_max_ps(l, load(src[0], i))));
    if (i < n) {
        __m256i mask = v_tail((int)(n - i));
        _mm256_maskstore_ps(d + i, mask, _mm256_min_ps(h, _mm256_max_ps(l, load_tail(src[0], i, mask))));
    }
    return EW_OK;
}
EwFn avx2_clamp(void) { return clamp; }

/* --- casts: eight at a time through loaders and storers of each type ---------------------------------------------- */
static inline __m256 widen_f16(__m128i x) { return _mm256_cvtph_ps(x); }
static inline __m256 widen_bf16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
static inline __m128i narrow_f16(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

/* Bits of x rounded to bf16, in the upper half of each lane. */
static inline __m256i bf16_bits(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc00000), nan);
    return _mm256_and_si256(r, _mm256_set1_epi32((int)0xffff0000));
}
static inline __m128i narrow_bf16(__m256 x) {
    __m256i words = _mm256_srli_epi32(bf16_bits(x), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

#define WIDEN(name, convert)                                                                                           \
    static EwFault name(void *dst, const EwSrc *src, int64_t n) {                                                      \
        const uint16_t *a = src[0].data;                                                                               \
        float *d = dst;                                                                                                \
        uint16_t rest[8] = {0};                                                                                        \
        int64_t i = 0, step = src[0].stride;                                                                           \
        if (!step)                                                                                                     \
            for (int k = 0; k < 8; k++) rest[k] = *a;                                                                  \
        for (; i + 8 <= n; i += 8)                                                                                     \
            _mm256_storeu_ps(d + i, convert(_mm_loadu_si128((const void *)(step ? a + i : rest))));                    \
        if (i < n) {                                                                                                   \
            if (step) memcpy(rest, a + i, (size_t)(n - i) * 2);                                                        \
            _mm256_maskstore_ps(d + i, v_tail((int)(n - i)), convert(_mm_loadu_si128((const void *)rest)));            \
        }                                                                                                              \
        return EW_OK;                                                                                                  \
    }
#define NARROW(name, convert)                                                                                          \
    static EwFault name(void *dst, const EwSrc *src, int64_t n) {                                                      \
        uint16_t *d = dst, rest[8];                                                                                    \
        int64_t i = 0;                                                                                                 \
        for (; i + 8 <= n; i += 8) _mm_storeu_si128((void *)(d + i), convert(load(src[0], i)));                        \
        if (i < n) {                                                                                                   \
            _mm_storeu_si128((void *)rest, convert(load_tail(src[0], i, v_tail((int)(n - i)))));                       \
            memcpy(d + i, rest, (size_t)(n - i) * 2);                                                                  \
        }                                                                                                              \
        return EW_OK;                                                                                                  \
    }
WIDEN(f16_to_f32_all, widen_f16)
WIDEN(bf16_to_f32_all, widen_bf16)
NARROW(f32_to_f16_all, narrow_f16)
NARROW(f32_to_bf16_all, narrow_bf16)
UNARY(round_f16_all, widen_f16(narrow_f16(x)))
UNARY(round_bf16_all, _mm256_castsi256_ps(bf16_bits(x)))
UNARY(copy_all, x)

EwFn avx2_cast(DType from, DType to) {
    if (from == DTYPE_F16 && to == DTYPE_F32) return f16_to_f32_all;
    if (from == DTYPE_BF16 && to == DTYPE_F32) return bf16_to_f32_all;
    if (from == DTYPE_F32 && to == DTYPE_F16) return f32_to_f16_all;
    if (from == DTYPE_F32 && to == DTYPE_BF16) return f32_to_bf16_all;
    if (from == DTYPE_F32 && to == DTYPE_F32) return copy_all;
    return NULL;
}
EwFn avx2_round(DType half) { return half == DTYPE_F16 ? round_f16_all : round_bf16_all; }

#else /* another processor: never called */
EwFn avx2_unary(Op op, bool approximate) { return (void)op, (void)approximate, NULL; }
EwFn avx2_binary(Op op) { return (void)op, NULL; }
EwFn avx2_where32(void) { return NULL; }
EwFn avx2_clamp(void) { return NULL; }
EwFn avx2_cast(DType from, DType to) { return (void)from, (void)to, NULL; }
EwFn avx2_round(DType half) { return (void)half, NULL; }
#endif
