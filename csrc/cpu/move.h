/* Copies between strided views, which most data movement comes down to. */
#ifndef FORGE_CPU_MOVE_H
#define FORGE_CPU_MOVE_H

#include "exec/pool.h"
#include "base/dtype.h"

/* to[...] = from[...]: one shape and element size; `from` may have strides that are 0 or negative, `to` names each
 * element once. Nothing happens where both are the same view. */
void tensor_copy(Pool *pool, const Tensor *to, const Tensor *from);
void tensor_fill(Pool *pool, const Tensor *to, const void *element);

/* Eager's conversion of a scalar to one element of `type`; `value` is taken where the scalar is no integer. */
typedef union Element {
    unsigned char bytes[16];
    uint8_t u8;
    int8_t i8;
    int16_t i16;
    uint16_t u16;
    int32_t i32;
    int64_t i64;
    float f32;
    double f64[2];
} Element;
Element element_from_f64(DType type, double value);
Element element_from_i64(DType type, int64_t value);

static inline char *tensor_byte(const Tensor *t, int64_t element) {
    return (char *)t->data + element * (int64_t)dtype_size(t->dtype);
}

/* n elements, `size` bytes each, between rows of any stride. */
static inline void copy_row(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t n,
                            size_t size) {
    typedef struct Pair {
        uint64_t word[2];
    } Pair;
#define COPY(T)                                                                                                        \
    for (int64_t i = 0; i < n; i++) ((T *)(void *)to)[i * to_stride] = ((const T *)(const void *)from)[i * from_stride]
    if (to_stride == 1 && from_stride == 1 && n > 8)
        __builtin_memcpy(to, from, (size_t)n * size);
    else if (size == 1)
        COPY(uint8_t);
    else if (size == 2)
        COPY(uint16_t);
    else if (size == 4)
        COPY(uint32_t);
    else if (size == 8)
        COPY(uint64_t);
    else
        COPY(Pair);
#undef COPY
}

#endif
