#include "cpu/norm_rows.h"

#if defined(__AVX2__) && defined(__FMA__)
#include "cpu/vmath_avx2.h"

#include <math.h>

/* The last, partial vector of a row: lanes outside of it are 0, or `other`. */
static inline __m256 load_tail(const float *x, int64_t left) { return _mm256_maskload_ps(x, v_tail((int)left)); }
static inline __m256 load_tail_or(const float *x, int64_t left, __m256 other) {
    return _mm256_blendv_ps(other, load_tail(x, left), _mm256_castsi256_ps(v_tail((int)left)));
}
static inline void store_tail(float *x, int64_t left, __m256 v) { _mm256_maskstore_ps(x, v_tail((int)left), v); }

static void add(float *out, const float *a, const float *b, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
    for (; i < n; i++) out[i] = a[i] + b[i];
}

static float sum4(const __m256 s[4]) {
    return v_sum(_mm256_add_ps(_mm256_add_ps(s[0], s[1]), _mm256_add_ps(s[2], s[3])));
}

static float sum(const float *x, int64_t n) {
    __m256 s[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) s[j] = _mm256_add_ps(s[j], _mm256_loadu_ps(x + i + 8 * j));
    for (; i + 8 <= n; i += 8) s[0] = _mm256_add_ps(s[0], _mm256_loadu_ps(x + i));
    if (i < n) s[1] = _mm256_add_ps(s[1], load_tail(x + i, n - i));
    return sum4(s);
}

static float sum_squares(const float *x, float shift, int64_t n) {
    __m256 s[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    __m256 mean = _mm256_set1_ps(shift);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m256 d = _mm256_sub_ps(_mm256_loadu_ps(x + i + 8 * j), mean);
            s[j] = _mm256_fmadd_ps(d, d, s[j]);
        }
    for (; i < n; i += 8) {
        __m256 v = n - i >= 8 ? _mm256_loadu_ps(x + i) : load_tail_or(x + i, n - i, mean);
        __m256 d = _mm256_sub_ps(v, mean);
        s[i / 8 % 4] = _mm256_fmadd_ps(d, d, s[i / 8 % 4]);
    }
    return sum4(s);
}

static inline __m256 normalized(__m256 x, __m256 mean, __m256 factor, const __m256 *w, const __m256 *b) {
    x = _mm256_mul_ps(_mm256_sub_ps(x, mean), factor);
    if (w && b) return _mm256_fmadd_ps(x, *w, *b);
    if (w) return _mm256_mul_ps(x, *w);
    return b ? _mm256_add_ps(x, *b) : x;
}

static void normalize(float *out, const float *x, float mean, float factor, const float *w, const float *b, int64_t n) {
    __m256 m = _mm256_set1_ps(mean), f = _mm256_set1_ps(factor), wv, bv;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        if (w) wv = _mm256_loadu_ps(w + i);
        if (b) bv = _mm256_loadu_ps(b + i);
        _mm256_storeu_ps(out + i, normalized(_mm256_loadu_ps(x + i), m, f, w ? &wv : NULL, b ? &bv : NULL));
    }
    if (i == n) return;
    if (w) wv = load_tail(w + i, n - i);
    if (b) bv = load_tail(b + i, n - i);
    store_tail(out + i, n - i, normalized(load_tail(x + i, n - i), m, f, w ? &wv : NULL, b ? &bv : NULL));
}

static float max(const float *x, int64_t n) {
    __m256 none = _mm256_set1_ps(-INFINITY), m[2] = {none, none};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        m[0] = _mm256_max_ps(_mm256_loadu_ps(x + i), m[0]);
        m[1] = _mm256_max_ps(_mm256_loadu_ps(x + i + 8), m[1]);
    }
    for (; i < n; i += 8)
        m[0] = _mm256_max_ps(n - i >= 8 ? _mm256_loadu_ps(x + i) : load_tail_or(x + i, n - i, none), m[0]);
    return v_max(_mm256_max_ps(m[0], m[1]));
}

static float exp_sum(float *out, const float *x, float shift, int64_t n) {
    __m256 s[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, by = _mm256_set1_ps(shift);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m256 e = v_exp(_mm256_sub_ps(_mm256_loadu_ps(x + i + 8 * j), by));
            if (out) _mm256_storeu_ps(out + i + 8 * j, e);
            s[j] = _mm256_add_ps(s[j], e);
        }
    for (; i < n; i += 8) {
        int64_t left = n - i < 8 ? n - i : 8;
        __m256 e = v_exp(_mm256_sub_ps(load_tail(x + i, left), by));
        if (out) store_tail(out + i, left, e);
        s[0] = _mm256_add_ps(s[0], _mm256_and_ps(e, _mm256_castsi256_ps(v_tail((int)left))));
    }
    return v_sum(_mm256_add_ps(s[0], s[1]));
}

static void divide(float *out, const float *x, float by, int64_t n) {
    __m256 d = _mm256_set1_ps(by);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_div_ps(_mm256_loadu_ps(x + i), d));
    for (; i < n; i++) out[i] = x[i] / by;
}

const RowKernels *row_kernels_avx2(void) {
    static const RowKernels kernels = {add, sum, sum_squares, normalize, max, exp_sum, divide};
    return &kernels;
}
#else
const RowKernels *row_kernels_avx2(void) { return NULL; }
#endif
