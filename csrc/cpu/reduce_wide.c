#include "cpu/reduce.h"

#include <stddef.h>

#define KEEP(x) (x)
#define TRUTH(x) ((x) != 0)
#define F16_OF(x) f32_to_f16((float)(x))
#define BF16_OF(x) f32_to_bf16((float)(x))

/* T(type suffix, C type, member, read, write) */
#define TYPES(T)                                                                                                       \
    T(BOOL, uint8_t, i, KEEP, TRUTH)                                                                                   \
    T(U8, uint8_t, i, KEEP, KEEP)                                                                                      \
    T(I8, int8_t, i, KEEP, KEEP)                                                                                       \
    T(I16, int16_t, i, KEEP, KEEP)                                                                                     \
    T(I32, int32_t, i, KEEP, KEEP)                                                                                     \
    T(I64, int64_t, i, KEEP, KEEP)                                                                                     \
    T(F16, uint16_t, f, f16_to_f32, F16_OF)                                                                            \
    T(BF16, uint16_t, f, bf16_to_f32, BF16_OF)                                                                         \
    T(F32, float, f, KEEP, KEEP)                                                                                       \
    T(F64, double, f, KEEP, KEEP)

#define DEFINE(S, T, member, read, write)                                                                              \
    static void load_##S(Wide *to, const void *from, int64_t stride, int64_t n) {                                      \
        const T *a = from;                                                                                             \
        for (int64_t i = 0; i < n; i++) to[i].member = read(a[i * stride]);                                            \
    }                                                                                                                  \
    static void store_##S(void *to, const Wide *from, int64_t n) {                                                     \
        T *d = to;                                                                                                     \
        for (int64_t i = 0; i < n; i++) d[i] = (T)write(from[i].member);                                               \
    }
TYPES(DEFINE)

WideLoad wide_load(DType type) {
    switch (type) {
#define CASE(S, ...)                                                                                                   \
    case DTYPE_##S: return load_##S;
        TYPES(CASE)
#undef CASE
    default: return NULL;
    }
}

WideStore wide_store(DType type) {
    switch (type) {
#define CASE(S, ...)                                                                                                   \
    case DTYPE_##S: return store_##S;
        TYPES(CASE)
#undef CASE
    default: return NULL;
    }
}
