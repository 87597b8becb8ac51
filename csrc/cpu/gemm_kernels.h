/* The inner kernels of the f32 matrix product: one table for each instruction set. */
#ifndef FORGE_CPU_GEMM_KERNELS_H
#define FORGE_CPU_GEMM_KERNELS_H

#include "cpu/cpu.h"

enum { GEMM_ROWS = 6, GEMM_COLS = 16 }; /* of a register tile */

/* What elements meet while they are turned: rows of f32, `row` apart, are added to them or multiplied with them. */
typedef struct GemmOther {
    const float *data; /* NULL: nothing */
    int64_t row;
    bool product;
} GemmOther;

typedef struct GemmKernels {
    /* c[rows x 16] = a * b, or += with `add`: a(i, k) is a[i * a_row + k * a_k], row k of b is the 16 floats at b + k *
     * b_row. 1 <= rows <= 6. The sum of each element is one chain in the order of k, whatever `rows` is; with `add` it
     * is added to c at the end: callers go in blocks of k to keep chains, and so rounding errors, short. */
    void (*tile)(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                 float *c, int64_t c_row, bool add);
    /* The same for 6 rows with a_k 1, while the one or two panels that begin with b go to copy[panels][k][16]. */
    void (*tile_copy)(int64_t k, const float *a, int64_t a_row, const float *b, int64_t b_row, float *c, int64_t c_row,
                      bool add, float *copy, int panels);
    /* `tile` on `panels` panels of b side by side, b_row 16: as many streams of memory as panels. panels: at most
     * gemm_streams(rows). */
    void (*stream)(int rows, int panels, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b,
                   int64_t b_panel, float *c, int64_t c_row, bool add);
    /* dst[k * width + i] = src[i * row + k] for i < rows; the rest up to `width` is 0. width: a multiple of 8, or at
     * most 6. */
    void (*interleave)(int rows, int width, int64_t k, const float *src, int64_t row, float *dst);
    /* dst[j * dst_row + i] = src[i * row + j] for i < rows, j < cols <= 16; 16 columns of src can be read. It meets
     * element (j, i) of `other`. */
    void (*turn)(int64_t rows, int64_t cols, const float *src, int64_t row, float *dst, int64_t dst_row,
                 GemmOther other);
    /* c[i][j] += x[i] . w[j] for i < m <= 6, j < rows; rows of x, w, c are x_row, w_row, c_row apart. */
    void (*dots)(int m, const float *x, int64_t x_row, int64_t rows, const float *w, int64_t w_row, int64_t k, float *c,
                 int64_t c_row);
    /* Columns 16 j .. 16 j + 15 of the row p at src + p * row go to dst + j * panel + p * 16, for j < panels. */
    void (*strip)(int64_t panels, int64_t rows, const float *src, int64_t row, float *dst, int64_t panel);
    /* c[i][j] += a(i, 0) * b(0, j), then step 1 and so on, for i < rows <= 6, j < n; strides as in `tile`. */
    void (*update)(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                   int64_t n, float *c, int64_t c_row);
    void (*widen)(float *dst, const uint16_t *src, DType dtype, int64_t n); /* f16 or bf16 */
    void (*fill)(float *dst, float value, int64_t n);
    void (*scale)(float *dst, const float *src, float factor, int64_t n); /* dst may be src */
} GemmKernels;

/* So many panels have room in registers. */
static inline int gemm_streams(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }

/* `tile` on two panels of b, b_panel apart, for 32 columns of c: the same sums, in the same order. rows: at most 12. */
typedef void GemmPair(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                      int64_t b_panel, float *c, int64_t c_row, bool add);
/* GemmKernels.tile_copy for 12 rows and two panels; copy is 64-byte aligned. */
typedef void GemmPairCopy(int64_t k, const float *a, int64_t a_row, const float *b, int64_t b_row, float *c,
                          int64_t c_row, bool add, float *copy);
/* Rows, `row` apart, whose lines come into the L2 meanwhile: one of each for every 16 steps of k. */
typedef struct GemmAhead {
    const float *at;
    int64_t row, rows;
} GemmAhead;
/* `pair` for 12 rows of a with a_k 1, b_row 16. With `keep` it leaves the rows at keep + i * keep_row and reads them
 * there, so that it does not matter whether those of a fall into the same set of the cache. keep_row: k rounded up to
 * 16, at least. */
typedef void GemmPairRows(int64_t k, const float *a, int64_t a_row, const float *b, int64_t b_panel, float *c,
                          int64_t c_row, bool add, float *keep, int64_t keep_row, GemmAhead ahead);
GemmPair *gemm_pair(void); /* NULL where two panels at once are no faster */
GemmPairCopy *gemm_pair_copy(void);
GemmPairRows *gemm_pair_rows(void);
GemmPair *gemm_pair_avx512(void); /* gemm_avx512.c; NULL where it was not compiled for AVX-512 */
GemmPairCopy *gemm_pair_copy_avx512(void);
GemmPairRows *gemm_pair_rows_avx512(void);

/* GemmKernels.strip past the caches, for what is not read soon. dst is 32-byte aligned. */
typedef void GemmStrip(int64_t panels, int64_t rows, const float *src, int64_t row, float *dst, int64_t panel);
GemmStrip *gemm_strip(void);      /* NULL: none that is faster than gemm_pack_panel */
GemmStrip *gemm_strip_avx2(void); /* gemm_pack_avx2.c; NULL where it was not compiled for AVX2 */

/* GemmKernels.dots of rows of f16 or bf16. */
typedef void GemmDotsHalf(DType dtype, int m, const float *x, int64_t x_row, int64_t rows, const uint16_t *w,
                          int64_t w_row, int64_t k, float *c, int64_t c_row);
GemmDotsHalf *gemm_dots_half(void);
GemmDotsHalf *gemm_dots_half_avx2(void); /* gemm_half_avx2.c; NULL where it was not compiled for AVX2 */

/* Products of bf16 with sums of f32. An element of a, b, x and w is two neighbours in k, 32 bits wide; a pair of them
 * adds the product of the second ones, then that of the first, each rounded once. Where the processor has an
 * instruction for it, denormal numbers count as 0. */
typedef struct GemmBf16 {
    /* As in GemmKernels; NULL where there is no `pair`. */
    void (*tile)(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                 float *c, int64_t c_row, bool add);
    GemmPair *pair;
    GemmPairRows *rows;
    void (*dots)(int m, const float *x, int64_t x_row, int64_t rows, const float *w, int64_t w_row, int64_t k, float *c,
                 int64_t c_row);
    void (*narrow)(uint16_t *dst, const float *src, int64_t n); /* to nearest even */
} GemmBf16;
const GemmBf16 *gemm_bf16(void); /* the best for this machine */
const GemmBf16 *gemm_bf16_portable(void);
const GemmBf16 *gemm_bf16_avx2(void);   /* gemm_bf16_avx2.c; NULL where it was not compiled for AVX2 */
const GemmBf16 *gemm_bf16_avx512(void); /* gemm_avx512bf16.c; NULL where it was not compiled for AVX512-BF16 */

const GemmKernels *gemm_kernels(void);      /* the best for this machine */
const GemmKernels *gemm_kernels_avx2(void); /* gemm_avx2.c; NULL where it was not compiled for AVX2 */

#endif
