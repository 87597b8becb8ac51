/* What norms and softmax do with a row of f32 in memory; one table for each instruction set. Sums run in several
 * chains. */
#ifndef FORGE_CPU_NORM_ROWS_H
#define FORGE_CPU_NORM_ROWS_H

#include "cpu/cpu.h"

typedef struct RowKernels {
    void (*add)(float *out, const float *a, const float *b, int64_t n);
    float (*sum)(const float *x, int64_t n);
    float (*sum_squares)(const float *x, float shift, int64_t n); /* of x - shift */
    /* (x - mean) * factor [* w] [+ b]; out may be x */
    void (*normalize)(float *out, const float *x, float mean, float factor, const float *w, const float *b, int64_t n);
    float (*max)(const float *x, int64_t n); /* of x and -inf; NaN may get lost */
    float (*exp_sum)(float *out, const float *x, float shift,
                     int64_t n); /* out = exp(x - shift), unless NULL; its sum */
    void (*divide)(float *out, const float *x, float by, int64_t n);
} RowKernels;

const RowKernels *row_kernels(void);
const RowKernels *row_kernels_avx2(void); /* norm_rows_avx2.c; NULL where it was not compiled for AVX2 */

#endif
