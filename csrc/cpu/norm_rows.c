#include "cpu/norm_rows.h"

#include <math.h>

static void add(float *out, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

static float sum(const float *x, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++) s += (double)x[i];
    return (float)s;
}

static float sum_squares(const float *x, float shift, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++) s += ((double)x[i] - (double)shift) * ((double)x[i] - (double)shift);
    return (float)s;
}

static void normalize(float *out, const float *x, float mean, float factor, const float *w, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float v = (x[i] - mean) * factor;
        if (w) v *= w[i];
        out[i] = b ? v + b[i] : v;
    }
}

static float max(const float *x, int64_t n) {
    float m = -INFINITY;
    for (int64_t i = 0; i < n; i++) m = x[i] > m ? x[i] : m;
    return m;
}

static float exp_sum(float *out, const float *x, float shift, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++) {
        float e = expf(x[i] - shift);
        if (out) out[i] = e;
        s += (double)e;
    }
    return (float)s;
}

static void divide(float *out, const float *x, float by, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = x[i] / by;
}

const RowKernels *row_kernels(void) {
    static const RowKernels portable = {add, sum, sum_squares, normalize, max, exp_sum, divide};
    const RowKernels *avx2 = cpu_has_avx2() ? row_kernels_avx2() : NULL;
    return avx2 ? avx2 : &portable;
}
