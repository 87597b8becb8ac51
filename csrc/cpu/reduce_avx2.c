/* Folds of contiguous f32 in double lanes, by AVX2; see reduce.c. The lane of an element is its place modulo 8. */
#include "cpu/reduce.h"

#if defined(__AVX2__)
#include <immintrin.h>

static inline __m256d widen(const float *x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }

/* NaN wins, as in the portable form. */
static inline __m256d larger(__m256d a, __m256d x) {
    return _mm256_blendv_pd(_mm256_max_pd(a, x), a, _mm256_cmp_pd(a, a, _CMP_UNORD_Q));
}
static inline __m256d smaller(__m256d a, __m256d x) {
    return _mm256_blendv_pd(_mm256_min_pd(a, x), a, _mm256_cmp_pd(a, a, _CMP_UNORD_Q));
}
static inline __m256d add_square(__m256d a, __m256d x, __m256d mean) {
    __m256d d = _mm256_sub_pd(x, mean);
    return _mm256_add_pd(a, _mm256_mul_pd(d, d));
}

/* The accumulators of a row stay in registers, those of columns go through memory. */
#define EACH(expr)                                                                                                     \
    if (columns) {                                                                                                     \
        for (; i + 4 <= n; i += 4) {                                                                                   \
            __m256d a = _mm256_loadu_pd(acc + i), x = widen(from + i), m = mean ? _mm256_loadu_pd(mean + i) : zero;    \
            (void)m;                                                                                                   \
            _mm256_storeu_pd(acc + i, expr);                                                                           \
        }                                                                                                              \
    } else {                                                                                                           \
        __m256d low = _mm256_loadu_pd(acc), high = _mm256_loadu_pd(acc + 4), m = mean ? _mm256_set1_pd(*mean) : zero;  \
        (void)m;                                                                                                       \
        for (; i + 8 <= n; i += 8) {                                                                                   \
            __m256d a = low, x = widen(from + i);                                                                      \
            low = expr;                                                                                                \
            a = high, x = widen(from + i + 4);                                                                         \
            high = expr;                                                                                               \
        }                                                                                                              \
        _mm256_storeu_pd(acc, low);                                                                                    \
        _mm256_storeu_pd(acc + 4, high);                                                                               \
    }                                                                                                                  \
    break

int64_t reduce_avx2(Fold fold, bool columns, double *acc, const float *from, const double *mean, int64_t n) {
    const __m256d zero = _mm256_setzero_pd();
    int64_t i = 0;
    switch (fold) {
    case FOLD_SUM: EACH(_mm256_add_pd(a, x));
    case FOLD_SQUARES: EACH(add_square(a, x, m));
    case FOLD_MAX: EACH(larger(a, x));
    case FOLD_MIN: EACH(smaller(a, x));
    default: break;
    }
    return i;
}
#else
int64_t reduce_avx2(Fold fold, bool columns, double *acc, const float *from, const double *mean, int64_t n) {
    (void)fold, (void)columns, (void)acc, (void)from, (void)mean, (void)n;
    return 0;
}
#endif
