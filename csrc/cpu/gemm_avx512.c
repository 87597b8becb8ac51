/* Tiles of f32 with AVX-512. */
#include "cpu/gemm_kernels.h"

#if defined(__AVX512F__)
#define PAIR_SUM(sum, x, b) _mm512_fmadd_ps(x, b, sum)
#include "cpu/gemm_pair_avx512.h"

static void pair_copy(int64_t k, const float *a, int64_t a_row, const float *b, int64_t b_row, float *c, int64_t c_row,
                      bool add, float *copy) {
    pair_body(12, k, a, a_row, 1, b, b_row, GEMM_COLS, c, c_row, add, copy);
}

GemmPair *gemm_pair_avx512(void) { return pair; }
GemmPairCopy *gemm_pair_copy_avx512(void) { return pair_copy; }
GemmPairRows *gemm_pair_rows_avx512(void) { return pair_rows; }
#else
GemmPair *gemm_pair_avx512(void) { return NULL; }
GemmPairCopy *gemm_pair_copy_avx512(void) { return NULL; }
GemmPairRows *gemm_pair_rows_avx512(void) { return NULL; }
#endif
