/* Conversions of weights. Internal to npu/. */
#ifndef FORGE_NPU_WEIGHTS_H
#define FORGE_NPU_WEIGHTS_H

#include <stdint.h>

/* f32 to f16, nearest even; finite numbers stay finite. */
typedef void (*NarrowFn)(const float *from, uint16_t *to, int64_t n);
/* f16 to f32. */
typedef void (*WidenFn)(const uint16_t *from, float *to, int64_t n);
/* NULL where they were not compiled for AVX2. They may run only where the processor has it. */
NarrowFn weights_narrow_avx2(void);
WidenFn weights_widen_avx2(void);

#endif
