/* Row-major weights into panels at the speed of memory. Stores go past the caches: what is written is not read before
 * all is packed, and memory need not be read in order to be written. */
#include "cpu/gemm_kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>

enum { ROWS = 8 }; /* of one panel at once: 512 bytes in a row */

static inline __attribute__((always_inline)) void strip_rows(const int rows, int64_t panels, const float *src,
                                                             int64_t row, float *dst, int64_t panel) {
    for (int64_t j = 0; j < panels; j++, src += GEMM_COLS, dst += panel) {
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            _mm256_stream_ps(dst + i * GEMM_COLS, _mm256_loadu_ps(src + i * row));
            _mm256_stream_ps(dst + i * GEMM_COLS + 8, _mm256_loadu_ps(src + i * row + 8));
        }
    }
}

static void strip(int64_t panels, int64_t rows, const float *src, int64_t row, float *dst, int64_t panel) {
    int64_t p = 0;
    for (; p + ROWS <= rows; p += ROWS) strip_rows(ROWS, panels, src + p * row, row, dst + p * GEMM_COLS, panel);
    for (; p < rows; p++) strip_rows(1, panels, src + p * row, row, dst + p * GEMM_COLS, panel);
    _mm_sfence(); /* the stores are in no order: they are before what this thread says next */
}

GemmStrip *gemm_strip_avx2(void) { return strip; }
#else
GemmStrip *gemm_strip_avx2(void) { return NULL; }
#endif
