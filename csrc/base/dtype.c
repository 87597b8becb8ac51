#include "base/dtype.h"

#include <string.h>

static const struct {
    const char *name;
    uint8_t size;
    char class;
} dtypes[DTYPE_COUNT] = {
#define X(e, n, b, c) [DTYPE_##e] = {n, b, c},
    DTYPES(X)
#undef X
};

const char *dtype_name(DType dtype) { return (unsigned)dtype < DTYPE_COUNT ? dtypes[dtype].name : "?"; }

size_t dtype_size(DType dtype) { return (unsigned)dtype < DTYPE_COUNT ? dtypes[dtype].size : 0; }

char dtype_class(DType dtype) { return (unsigned)dtype < DTYPE_COUNT ? dtypes[dtype].class : '?'; }

bool dtype_from_name(const char *name, size_t length, DType *out) {
    for (int d = 0; d < DTYPE_COUNT; d++) {
        if (strlen(dtypes[d].name) == length && memcmp(dtypes[d].name, name, length) == 0) {
            *out = (DType)d;
            return true;
        }
    }
    return false;
}

float f16_to_f32(uint16_t bits) {
    union {
        uint32_t u;
        float f;
    } v;
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, mantissa = bits & 0x3ffu;
    if (exponent == 31) {
        v.u = sign | 0x7f800000u | mantissa << 13;
    } else if (exponent) {
        v.u = sign | (exponent + 112) << 23 | mantissa << 13;
    } else { /* zero or subnormal: mantissa * 2^-24, exact in f32 */
        v.f = (float)mantissa * 0x1p-24f;
        v.u |= sign;
    }
    return v.f;
}

uint16_t f32_to_f16(float value) {
    union {
        float f;
        uint32_t u;
    } v = {value};
    uint16_t sign = (uint16_t)((v.u >> 16) & 0x8000u);
    uint32_t a = v.u & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7e00u;  /* NaN */
    if (a >= 0x477ff000u) return sign | 0x7c00u; /* rounds to or above 65520: infinity */
    if (a < 0x38800000u) {                       /* below 2^-14: subnormal. Adding 0.5 leaves the bits of a * 2^24, */
        union {                                  /* rounded to nearest even by the FPU, in the low mantissa. */
            float f;
            uint32_t u;
        } s = {.u = a};
        s.f += 0.5f;
        return sign | (uint16_t)(s.u - 0x3f000000u);
    }
    a += 0xfffu + ((a >> 13) & 1u);
    return sign | (uint16_t)((a - 0x38000000u) >> 13);
}

int64_t tensor_count(const Tensor *t) {
    int64_t n = 1;
    for (int d = 0; d < t->rank; d++) n *= t->shape[d];
    return n;
}

bool tensor_is_contiguous(const Tensor *t) {
    int64_t expect = 1;
    if (tensor_count(t) == 0) return true;
    for (int d = t->rank - 1; d >= 0; d--) {
        if (t->shape[d] == 1) continue;
        if (t->strides[d] != expect) return false;
        expect *= t->shape[d];
    }
    return true;
}
