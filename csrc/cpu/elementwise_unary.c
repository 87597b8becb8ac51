/* Elementwise functions of one operand, clamp, in portable C. Bools are uint8_t of 0 or 1. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") /* vector code for the plain loops */
#endif
#include <math.h>
#include <tgmath.h>

#include "cpu/elementwise_types.h"

#define LOOP(name, W, T, R, expr)                                                                                      \
    static EwFault name(void *dst, const EwSrc *src, int64_t n) {                                                      \
        const T *a = src[0].data;                                                                                      \
        R *d = dst;                                                                                                    \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const W x = a[i * src[0].stride];                                                                          \
            d[i] = (R)(expr);                                                                                          \
        }                                                                                                              \
        return EW_OK;                                                                                                  \
    }

/* clang-format off */
/* F(op, expression of x): names from tgmath.h pick the function of x's type. T is the element type. */
#define FLOAT_FUNCTIONS(F, S, T)                                                                                       \
    F(neg, S, T, -x)                                                                                                   \
    F(abs, S, T, fabs(x))                                                                                              \
    F(sign, S, T, (T)((x > 0) - (x < 0)))                                                                              \
    F(floor, S, T, floor(x))                                                                                           \
    F(ceil, S, T, ceil(x))                                                                                             \
    F(round, S, T, nearbyint(x))                                                                                       \
    F(trunc, S, T, trunc(x))                                                                                           \
    F(exp, S, T, exp(x))                                                                                               \
    F(exp2, S, T, exp2(x))                                                                                             \
    F(expm1, S, T, expm1(x))                                                                                           \
    F(log, S, T, log(x))                                                                                               \
    F(log2, S, T, log2(x))                                                                                             \
    F(log10, S, T, log10(x))                                                                                           \
    F(log1p, S, T, log1p(x))                                                                                           \
    F(sqrt, S, T, sqrt(x))                                                                                             \
    F(rsqrt, S, T, 1 / sqrt(x))                                                                                        \
    F(reciprocal, S, T, 1 / x)                                                                                         \
    F(sin, S, T, sin(x))                                                                                               \
    F(cos, S, T, cos(x))                                                                                               \
    F(tan, S, T, tan(x))                                                                                               \
    F(asin, S, T, asin(x))                                                                                             \
    F(acos, S, T, acos(x))                                                                                             \
    F(atan, S, T, atan(x))                                                                                             \
    F(sinh, S, T, sinh(x))                                                                                             \
    F(cosh, S, T, cosh(x))                                                                                             \
    F(tanh, S, T, tanh(x))                                                                                             \
    F(erf, S, T, erf(x))                                                                                               \
    F(sigmoid, S, T, 1 / (1 + exp(-x)))                                                                                \
    F(silu, S, T, x / (1 + exp(-x)))                                                                                   \
    F(relu, S, T, x < 0 ? 0 : x)                                                                                       \
    F(softplus, S, T, x > 20 ? x : log1p(exp(x)))                                                                      \
    F(gelu, S, T, x * (T)0.5 * (1 + erf(x * (T)0.70710678118654752440)))

#define INTEGER_FUNCTIONS(F, S, T)                                                                                     \
    F(neg, S, T, 0 - (uint64_t)x)                                                                                      \
    F(abs, S, T, x < 0 ? 0 - (uint64_t)x : (uint64_t)x)                                                                \
    F(sign, S, T, (x > 0) - (x < 0))                                                                                   \
    F(floor, S, T, x)                                                                                                  \
    F(ceil, S, T, x)                                                                                                   \
    F(round, S, T, x)                                                                                                  \
    F(trunc, S, T, x)                                                                                                  \
    F(relu, S, T, x < 0 ? 0 : x)                                                                                       \
    F(bitwise_not, S, T, ~(uint64_t)x)

#define BOOL_FUNCTIONS(F, S, T)                                                                                        \
    F(abs, S, T, x)                                                                                                    \
    F(sign, S, T, x)                                                                                                   \
    F(bitwise_not, S, T, !x)

/* Tests: the result is bool. */
#define FLOAT_TESTS(F, S, T)                                                                                           \
    F(logical_not, S, T, x == 0)                                                                                       \
    F(isnan, S, T, x != x)                                                                                             \
    F(isinf, S, T, x == (T)INFINITY || x == -(T)INFINITY)
#define INTEGER_TESTS(F, S, T)                                                                                         \
    F(logical_not, S, T, x == 0)                                                                                       \
    F(isnan, S, T, (void)x, 0)                                                                                         \
    F(isinf, S, T, (void)x, 0)

/* clang-format on */

#define FUNCTION(op, S, T, ...) LOOP(op##_##S, WIDE_##S, T, T, (__VA_ARGS__))
#define TEST(op, S, T, ...) LOOP(op##_##S, WIDE_##S, T, uint8_t, (__VA_ARGS__))

FLOAT_FUNCTIONS(FUNCTION, F32, float)
FLOAT_FUNCTIONS(FUNCTION, F64, double)
FLOAT_TESTS(TEST, F32, float)
FLOAT_TESTS(TEST, F64, double)
BOOL_FUNCTIONS(FUNCTION, BOOL, uint8_t)
INTEGER_TESTS(TEST, BOOL, uint8_t)
#define X(S, T) INTEGER_FUNCTIONS(FUNCTION, S, T) INTEGER_TESTS(TEST, S, T)
INTEGER_TYPES(X)
#undef X

#define GELU_TANH(S, T)                                                                                                \
    FUNCTION(gelu_tanh, S, T, (T)0.5 * x * (1 + tanh((T)0.79788456080286535588 * (x + (T)0.044715 * (x * x * x)))))
GELU_TANH(F32, float)
GELU_TANH(F64, double)

/* clang-format off */
static const EwFn TABLE[OP_COUNT][DTYPE_COUNT] = {
#define ENTRY(op, S, T, ...) [OP_##op][DTYPE_##S] = op##_##S,
#define X(S, T) INTEGER_FUNCTIONS(ENTRY, S, T) INTEGER_TESTS(ENTRY, S, T)
    FLOAT_FUNCTIONS(ENTRY, F32, float)
    FLOAT_FUNCTIONS(ENTRY, F64, double)
    FLOAT_TESTS(ENTRY, F32, float)
    FLOAT_TESTS(ENTRY, F64, double)
    BOOL_FUNCTIONS(ENTRY, BOOL, uint8_t)
    INTEGER_TESTS(ENTRY, BOOL, uint8_t)
    INTEGER_TYPES(X)
#undef X
#undef ENTRY
};
/* clang-format on */

EwFn ew_unary(Op op, DType operand, bool approximate) {
    if (op == OP_gelu && approximate)
        return operand == DTYPE_F32 ? gelu_tanh_F32 : operand == DTYPE_F64 ? gelu_tanh_F64 : NULL;
    return TABLE[op][operand];
}

/* min(max(x, low), high); a NaN in x passes, NaN bounds win. */
#define CLAMP(S, T)                                                                                                    \
    static EwFault clamp_##S(void *dst, const EwSrc *src, int64_t n) {                                                 \
        const T *a = src[0].data, low = *(const T *)src[1].data, high = *(const T *)src[2].data;                       \
        T *d = dst;                                                                                                    \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            T x = a[i * src[0].stride];                                                                                \
            if (x < low || low != low) x = low;                                                                        \
            if (x > high || high != high) x = high;                                                                    \
            d[i] = x;                                                                                                  \
        }                                                                                                              \
        return EW_OK;                                                                                                  \
    }
CLAMP(F32, float)
CLAMP(F64, double)
INTEGER_TYPES(CLAMP)

EwFn ew_clamp(DType type) {
    switch (type) {
    case DTYPE_F32: return clamp_F32;
    case DTYPE_F64: return clamp_F64;
#define X(S, T)                                                                                                        \
    case DTYPE_##S: return clamp_##S;
        INTEGER_TYPES(X)
#undef X
    default: return NULL;
    }
}
