/* Casts between element types, in portable C, with the results that eager gives on x86-64 for values out of range. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") /* vector code for the plain loops */
#endif
#include "cpu/elementwise.h"

#include <math.h>

static int64_t float_to_i64(double x) { return x >= -0x1p63 && x < 0x1p63 ? (int64_t)x : INT64_MIN; }
static int32_t float_to_i32(double x) { return x > -2147483649.0 && x < 2147483648.0 ? (int32_t)x : INT32_MIN; }

#define KEEP(x) (x)
#define TRUTH(x) ((x) != 0)
#define VIA_I32(x) float_to_i32(x)
#define VIA_I64(x) float_to_i64(x)

/* clang-format off */
/* C(from suffix, from type, to suffix, to type, how) */
#define FROM_INTEGER(C, S, T)                                                                                          \
    C(S, T, BOOL, uint8_t, TRUTH) C(S, T, U8, uint8_t, KEEP) C(S, T, I8, int8_t, KEEP) C(S, T, I16, int16_t, KEEP)     \
    C(S, T, I32, int32_t, KEEP) C(S, T, I64, int64_t, KEEP) C(S, T, F32, float, KEEP) C(S, T, F64, double, KEEP)
#define FROM_FLOAT(C, S, T)                                                                                            \
    C(S, T, BOOL, uint8_t, TRUTH) C(S, T, U8, uint8_t, VIA_I64) C(S, T, I8, int8_t, VIA_I32)                           \
    C(S, T, I16, int16_t, VIA_I32) C(S, T, I32, int32_t, VIA_I32) C(S, T, I64, int64_t, VIA_I64)                       \
    C(S, T, F32, float, KEEP) C(S, T, F64, double, KEEP)
#define ALL(C)                                                                                                         \
    FROM_INTEGER(C, BOOL, uint8_t) FROM_INTEGER(C, U8, uint8_t) FROM_INTEGER(C, I8, int8_t)                            \
    FROM_INTEGER(C, I16, int16_t) FROM_INTEGER(C, I32, int32_t) FROM_INTEGER(C, I64, int64_t)                          \
    FROM_FLOAT(C, F32, float) FROM_FLOAT(C, F64, double)                                                               \
    C(F16, uint16_t, F32, float, f16_to_f32) C(BF16, uint16_t, F32, float, bf16_to_f32)                                \
    C(F32, float, F16, uint16_t, f32_to_f16) C(F32, float, BF16, uint16_t, f32_to_bf16)
/* clang-format on */

#define CAST(FS, FT, TS, TT, HOW)                                                                                      \
    static EwFault FS##_to_##TS(void *dst, const EwSrc *src, int64_t n) {                                              \
        const FT *a = src[0].data;                                                                                     \
        TT *d = dst;                                                                                                   \
        if (src[0].stride == 1)                                                                                        \
            for (int64_t i = 0; i < n; i++) d[i] = (TT)HOW(a[i]);                                                      \
        else                                                                                                           \
            for (int64_t i = 0; i < n; i++) d[i] = (TT)HOW(*a);                                                        \
        return EW_OK;                                                                                                  \
    }
ALL(CAST)

static const EwFn TABLE[DTYPE_COUNT][DTYPE_COUNT] = {
#define ENTRY(FS, FT, TS, TT, HOW) [DTYPE_##FS][DTYPE_##TS] = FS##_to_##TS,
    ALL(ENTRY)
#undef ENTRY
};

EwFn ew_cast(DType from, DType to) { return TABLE[from][to]; }

#define ROUND(name, narrow, widen)                                                                                     \
    static EwFault name(void *dst, const EwSrc *src, int64_t n) {                                                      \
        const float *a = src[0].data;                                                                                  \
        float *d = dst;                                                                                                \
        for (int64_t i = 0; i < n; i++) d[i] = widen(narrow(a[i * src[0].stride]));                                    \
        return EW_OK;                                                                                                  \
    }
ROUND(round_f16, f32_to_f16, f16_to_f32)
ROUND(round_bf16, f32_to_bf16, bf16_to_f32)

EwFn ew_round(DType half) { return half == DTYPE_F16 ? round_f16 : round_bf16; }
