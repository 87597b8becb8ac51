/* Element types. The numbers are the wire format of the node table: append only. */
#ifndef FORGE_BASE_DTYPE_H
#define FORGE_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(enum suffix, text name, bytes, class): class b bool, u unsigned, i signed, f float, c complex, o object */
#define DTYPES(X)                                                                                                      \
    X(BOOL, "bool", 1, 'b')                                                                                            \
    X(U8, "u8", 1, 'u')                                                                                                \
    X(I8, "i8", 1, 'i')                                                                                                \
    X(I16, "i16", 2, 'i')                                                                                              \
    X(I32, "i32", 4, 'i')                                                                                              \
    X(I64, "i64", 8, 'i')                                                                                              \
    X(F16, "f16", 2, 'f')                                                                                              \
    X(BF16, "bf16", 2, 'f')                                                                                            \
    X(F32, "f32", 4, 'f')                                                                                              \
    X(F64, "f64", 8, 'f')                                                                                              \
    X(C64, "c64", 8, 'c')                                                                                              \
    X(C128, "c128", 16, 'c')                                                                                           \
    X(OBJECT, "object", 8, 'o')

typedef enum DType {
#define X(e, n, b, c) DTYPE_##e,
    DTYPES(X)
#undef X
        DTYPE_COUNT
} DType;

/* Tensors of C have at most this rank; Python sends operators on higher ranks to the host, on objects. */
enum { MAX_RANK = 8 };

const char *dtype_name(DType dtype);
size_t dtype_size(DType dtype);
char dtype_class(DType dtype);
bool dtype_from_name(const char *name, size_t length, DType *out);
static inline bool dtype_is_float(DType d) {
    return d == DTYPE_F16 || d == DTYPE_BF16 || d == DTYPE_F32 || d == DTYPE_F64;
}
static inline bool dtype_is_int(DType d) { return d >= DTYPE_U8 && d <= DTYPE_I64; }

/* f16 and bf16 conversions, round to nearest even. */
float f16_to_f32(uint16_t bits);
uint16_t f32_to_f16(float value);

/* A finite number that f16 would round to infinity is F16_SUBSTITUTE on an NPU. Such numbers are masks (finfo.min), to
 * which scores are added: below the largest number there is room for them, or a row that sees nothing would become
 * -inf, NaN after its softmax, and poison the layers behind it. */
#define F16_LARGEST 65504.0f
#define F16_OVERFLOW 65520.0f
#define F16_SUBSTITUTE 57344.0f
#define F16_LEAST 0x1p-24f        /* the least number above 0 */
#define F16_LEAST_NORMAL 0x1p-14f /* and the least with all digits, whose reciprocal is finite */
static inline float f32_within_f16(float value) {
    float size = value < 0 ? -value : value;
    bool beyond = size >= F16_OVERFLOW && size <= 3.40282347e38f;
    return !beyond ? value : value < 0 ? -F16_SUBSTITUTE : F16_SUBSTITUTE;
}
static inline float bf16_to_f32(uint16_t bits) {
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)bits << 16};
    return v.f;
}
static inline uint16_t f32_to_bf16(float value) {
    union {
        float f;
        uint32_t u;
    } v = {value};
    if ((v.u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}

/* A strided view of memory: what kernels and evaluators work on. Strides count elements and may be 0 (broadcast). */
typedef struct Tensor {
    void *data;
    DType dtype;
    uint8_t rank;
    int64_t shape[MAX_RANK];
    int64_t strides[MAX_RANK];
} Tensor;

int64_t tensor_count(const Tensor *t);      /* elements */
bool tensor_is_contiguous(const Tensor *t); /* row major; size-1 dims and empty tensors do not matter */

#endif
