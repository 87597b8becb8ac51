/* Rotary position embedding of one row: out = x * cos + rotate(x) * sin, products rounded before they are added, as
 * eager's. */
#ifndef FORGE_CPU_ROPE_H
#define FORGE_CPU_ROPE_H

#include "cpu/cpu.h"

typedef void (*RopeRow)(float *out, const float *x, const float *cos, const float *sin, int64_t n, bool interleaved);
RopeRow rope_row_avx2(void); /* contiguous rows; out is not x. NULL where it was not compiled for AVX2 */

#endif
