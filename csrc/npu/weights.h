/* Conversions of weights. Internal to npu/. */
#ifndef FORGE_NPU_WEIGHTS_H
#define FORGE_NPU_WEIGHTS_H

#include <stdint.h>

/* f32 to f16, nearest even; finite numbers stay finite (f32_within_f16). */
typedef void (*NarrowFn)(const float *from, uint16_t *to, int64_t n);
/* f16 to f32. */
typedef void (*WidenFn)(const uint16_t *from, float *to, int64_t n);
/* The same of bf16, which has the range of f32. */
typedef void (*NarrowBf16Fn)(const float *from, uint16_t *to, int64_t n);
typedef void (*WidenBf16Fn)(const uint16_t *from, float *to, int64_t n);
/* max |from[i]|; NaN if there is one. */
typedef float (*LargestFn)(const float *from, int64_t n);
/* from[i] / scale to nearest even, within -levels .. levels; NaN gives -levels. */
typedef void (*QuantiseFn)(const float *from, int64_t n, float scale, float levels, int8_t *to);

typedef struct WeightKernels {
    NarrowFn narrow;
    WidenFn widen;
    NarrowBf16Fn narrow_bf16;
    WidenBf16Fn widen_bf16;
    LargestFn largest;
    QuantiseFn quantise;
} WeightKernels;
const WeightKernels *weight_kernels(void); /* the best for this processor */
/* NULL where they were not compiled for AVX2. They may run only where the processor has AVX2 and F16C. */
const WeightKernels *weight_kernels_avx2(void);

#endif
