/* Elementwise functions of two operands, and where, in portable C. Bools are uint8_t of 0 or 1. Integers wrap. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") /* vector code for the plain loops */
#endif
#include <math.h>
#include <tgmath.h>

#include "cpu/elementwise_types.h"

/* Each form of strides gets a loop of its own, which compilers turn into vector code. */
#define EACH(i, xs, ys, W, R, ...)                                                                                     \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
        const W x = a[xs], y = b[ys];                                                                                  \
        R r;                                                                                                           \
        __VA_ARGS__;                                                                                                   \
        d[i] = r;                                                                                                      \
    }
#define LOOP(name, W, T, R, ...)                                                                                       \
    static EwFault name(void *dst, const EwSrc *src, int64_t n) {                                                      \
        const T *a = src[0].data, *b = src[1].data;                                                                    \
        const int64_t sa = src[0].stride, sb = src[1].stride;                                                          \
        R *d = dst;                                                                                                    \
        if (sa == 1 && sb == 1)                                                                                        \
            EACH(i, i, i, W, R, __VA_ARGS__)                                                                           \
        else if (sa == 1)                                                                                              \
            EACH(i, i, 0, W, R, __VA_ARGS__)                                                                           \
        else                                                                                                           \
            EACH(i, 0, (i * sb), W, R, __VA_ARGS__)                                                                    \
        return EW_OK;                                                                                                  \
    }

/* Python's floor division of floats, as c10::div_floor_floating; Q rounds to the element type. */
#define DIV_FLOOR(T, Q)                                                                                                \
    if (y == 0) {                                                                                                      \
        r = x / y;                                                                                                     \
    } else {                                                                                                           \
        T mod = fmod(x, y), div = Q(Q(x - mod) / y);                                                                   \
        if (mod != 0 && (y < 0) != (mod < 0)) div = Q(div - 1);                                                        \
        if (div != 0) {                                                                                                \
            r = floor(div);                                                                                            \
            if (Q(div - r) > (T)0.5) r = Q(r + 1);                                                                     \
        } else {                                                                                                       \
            r = copysign((T)0, x / y);                                                                                 \
        }                                                                                                              \
    }
#define KEEP(x) (x)
#define TO_F16(x) f16_to_f32(f32_to_f16(x))
#define TO_BF16(x) bf16_to_f32(f32_to_bf16(x))

/* clang-format off */
#define FLOAT_FUNCTIONS(F, S, T)                                                                                       \
    F(add, S, T, r = x + y)                                                                                            \
    F(sub, S, T, r = x - y)                                                                                            \
    F(mul, S, T, r = x * y)                                                                                            \
    F(div, S, T, r = x / y)                                                                                            \
    F(div_trunc, S, T, r = trunc(x / y))                                                                               \
    F(div_floor, S, T, DIV_FLOOR(T, KEEP))                                                                             \
    F(remainder, S, T, r = fmod(x, y); if (r != 0 && (y < 0) != (r < 0)) r += y)                                       \
    F(fmod, S, T, r = fmod(x, y))                                                                                      \
    F(pow, S, T, r = pow(x, y))                                                                                        \
    F(minimum, S, T, r = x != x || x < y ? x : y)                                                                      \
    F(maximum, S, T, r = x != x || x > y ? x : y)                                                                      \
    F(atan2, S, T, r = atan2(x, y))

/* x / -1 traps for the least integer, so it is written as a negation. */
#define NONZERO                                                                                                        \
    if (y == 0) return EW_DIVIDE_BY_ZERO
#define OUT_OF_BITS(y, T) ((y) < 0 || (y) >= (int64_t)(8 * sizeof(T)))
#define INTEGER_FUNCTIONS(F, S, T)                                                                                     \
    F(add, S, T, r = (T)((uint64_t)x + (uint64_t)y))                                                                   \
    F(sub, S, T, r = (T)((uint64_t)x - (uint64_t)y))                                                                   \
    F(mul, S, T, r = (T)((uint64_t)x * (uint64_t)y))                                                                   \
    F(div_trunc, S, T, NONZERO; r = (T)(y == -1 ? (int64_t)(0 - (uint64_t)x) : x / y))                                 \
    F(div_floor, S, T, NONZERO; r = (T)(y == -1 ? (int64_t)(0 - (uint64_t)x) : x / y - (x % y && (x < 0) != (y < 0)))) \
    F(remainder, S, T, NONZERO; int64_t m = y == -1 ? 0 : x % y; r = (T)(m && (m < 0) != (y < 0) ? m + y : m))         \
    F(fmod, S, T, NONZERO; r = (T)(y == -1 ? 0 : x % y))                                                               \
    F(pow, S, T, r = (T)integer_power(x, y))                                                                           \
    F(minimum, S, T, r = (T)(x < y ? x : y))                                                                           \
    F(maximum, S, T, r = (T)(x > y ? x : y))                                                                           \
    F(bitwise_and, S, T, r = (T)(x & y))                                                                               \
    F(bitwise_or, S, T, r = (T)(x | y))                                                                                \
    F(bitwise_xor, S, T, r = (T)(x ^ y))                                                                               \
    F(shift_left, S, T, r = OUT_OF_BITS(y, T) ? 0 : (T)((uint64_t)x << y))                                             \
    F(shift_right, S, T, r = (T)(x >> (OUT_OF_BITS(y, T) ? 63 : y)))

#define BOOL_FUNCTIONS(F, S, T)                                                                                        \
    F(add, S, T, r = x | y)                                                                                            \
    F(mul, S, T, r = x & y)                                                                                            \
    F(minimum, S, T, r = x & y)                                                                                        \
    F(maximum, S, T, r = x | y)                                                                                        \
    F(bitwise_and, S, T, r = x & y)                                                                                    \
    F(bitwise_or, S, T, r = x | y)                                                                                     \
    F(bitwise_xor, S, T, r = x ^ y)

/* Tests: the result is bool. */
#define TESTS(F, S, T)                                                                                                 \
    F(eq, S, T, r = x == y)                                                                                            \
    F(ne, S, T, r = x != y)                                                                                            \
    F(lt, S, T, r = x < y)                                                                                             \
    F(le, S, T, r = x <= y)                                                                                            \
    F(gt, S, T, r = x > y)                                                                                             \
    F(ge, S, T, r = x >= y)                                                                                            \
    F(logical_and, S, T, r = x != 0 && y != 0)                                                                         \
    F(logical_or, S, T, r = x != 0 || y != 0)                                                                          \
    F(logical_xor, S, T, r = (x != 0) != (y != 0))

/* clang-format on */

static uint64_t integer_power(int64_t base, int64_t exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent % 2 ? UINT64_MAX : 1) : 0;
    uint64_t result = 1, b = (uint64_t)base;
    for (; exponent; exponent /= 2, b *= b)
        if (exponent & 1) result *= b;
    return result;
}

#define FUNCTION(op, S, T, ...) LOOP(op##_##S, WIDE_##S, T, T, __VA_ARGS__)
#define TEST(op, S, T, ...) LOOP(op##_##S, WIDE_##S, T, uint8_t, __VA_ARGS__)
#define ENTRY(op, S, T, ...) [OP_##op][DTYPE_##S] = op##_##S,

FLOAT_FUNCTIONS(FUNCTION, F32, float)
FLOAT_FUNCTIONS(FUNCTION, F64, double)
TESTS(TEST, F32, float)
TESTS(TEST, F64, double)
LOOP(div_floor_F16, float, float, float, DIV_FLOOR(float, TO_F16))
LOOP(div_floor_BF16, float, float, float, DIV_FLOOR(float, TO_BF16))
LOOP(div_trunc_F16, float, float, float, r = trunc(TO_F16(x / y)))
LOOP(div_trunc_BF16, float, float, float, r = trunc(TO_BF16(x / y)))
BOOL_FUNCTIONS(FUNCTION, BOOL, uint8_t)
TESTS(TEST, BOOL, uint8_t)
#define X(S, T) INTEGER_FUNCTIONS(FUNCTION, S, T) TESTS(TEST, S, T)
INTEGER_TYPES(X)
#undef X

/* clang-format off */
static const EwFn TABLE[OP_COUNT][DTYPE_COUNT] = {
#define X(S, T) INTEGER_FUNCTIONS(ENTRY, S, T) TESTS(ENTRY, S, T)
    FLOAT_FUNCTIONS(ENTRY, F32, float)
    FLOAT_FUNCTIONS(ENTRY, F64, double)
    TESTS(ENTRY, F32, float)
    TESTS(ENTRY, F64, double)
    BOOL_FUNCTIONS(ENTRY, BOOL, uint8_t)
    TESTS(ENTRY, BOOL, uint8_t)
    INTEGER_TYPES(X)
#undef X
    [OP_div_floor][DTYPE_F16] = div_floor_F16,
    [OP_div_floor][DTYPE_BF16] = div_floor_BF16,
    [OP_div_trunc][DTYPE_F16] = div_trunc_F16,
    [OP_div_trunc][DTYPE_BF16] = div_trunc_BF16,
};
/* clang-format on */

EwFn ew_binary(Op op, DType operand) { return TABLE[op][operand]; }

#define WHERE(bits)                                                                                                    \
    static EwFault where_##bits(void *dst, const EwSrc *src, int64_t n) {                                              \
        const uint8_t *c = src[0].data;                                                                                \
        const uint##bits##_t *a = src[1].data, *b = src[2].data;                                                       \
        uint##bits##_t *d = dst;                                                                                       \
        for (int64_t i = 0; i < n; i++) d[i] = c[i * src[0].stride] ? a[i * src[1].stride] : b[i * src[2].stride];     \
        return EW_OK;                                                                                                  \
    }
WHERE(8)
WHERE(16)
WHERE(32)
WHERE(64)

EwFn ew_where(size_t element_size) {
    switch (element_size) {
    case 1: return where_8;
    case 2: return where_16;
    case 4: return where_32;
    case 8: return where_64;
    default: return NULL;
    }
}
