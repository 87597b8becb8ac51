#include "cpu/rope.h"

#if defined(__AVX2__)
#include <immintrin.h>

/* a * b as a rounded product: the barrier keeps the compiler from fusing it into the sum that follows. */
static inline __m256 product(__m256 a, __m256 b) {
    __m256 p = _mm256_mul_ps(a, b);
    __asm__("" : "+x"(p));
    return p;
}
static inline float product1(float a, float b) {
    float p = a * b;
    __asm__("" : "+x"(p));
    return p;
}

static void halves(float *out, const float *x, const float *cos, const float *sin, int64_t n) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    int64_t h = n / 2, i = 0;
    for (; i + 8 <= h; i += 8) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + h + i);
        __m256 first = _mm256_add_ps(product(a, _mm256_loadu_ps(cos + i)),
                                     product(_mm256_xor_ps(b, sign), _mm256_loadu_ps(sin + i)));
        __m256 second =
            _mm256_add_ps(product(b, _mm256_loadu_ps(cos + h + i)), product(a, _mm256_loadu_ps(sin + h + i)));
        _mm256_storeu_ps(out + i, first);
        _mm256_storeu_ps(out + h + i, second);
    }
    for (; i < h; i++) {
        float a = x[i], b = x[h + i];
        out[i] = product1(a, cos[i]) + product1(-b, sin[i]);
        out[h + i] = product1(b, cos[h + i]) + product1(a, sin[h + i]);
    }
}

static void pairs(float *out, const float *x, const float *cos, const float *sin, int64_t n) {
    const __m256 sign = _mm256_setr_ps(-0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f, 0);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_xor_ps(_mm256_permute_ps(a, 0xb1), sign);
        _mm256_storeu_ps(out + i,
                         _mm256_add_ps(product(a, _mm256_loadu_ps(cos + i)), product(b, _mm256_loadu_ps(sin + i))));
    }
    for (; i < n; i += 2) {
        float a = x[i], b = x[i + 1];
        out[i] = product1(a, cos[i]) + product1(-b, sin[i]);
        out[i + 1] = product1(b, cos[i + 1]) + product1(a, sin[i + 1]);
    }
}

static void rope_row(float *out, const float *x, const float *cos, const float *sin, int64_t n, bool interleaved) {
    (interleaved ? pairs : halves)(out, x, cos, sin, n);
}

RopeRow rope_row_avx2(void) { return rope_row; }
#else
RopeRow rope_row_avx2(void) { return NULL; }
#endif
