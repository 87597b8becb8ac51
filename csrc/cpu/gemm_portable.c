/* The inner kernels in plain C, and the choice between them and the vectorised ones. */
#include "cpu/gemm_kernels.h"

#include <string.h>

static void tile(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                 float *c, int64_t c_row, bool add) {
    for (int i = 0; i < rows; i++) {
        float acc[GEMM_COLS] = {0};
        for (int64_t p = 0; p < k; p++) {
            float x = a[i * a_row + p * a_k];
            for (int j = 0; j < GEMM_COLS; j++) acc[j] += x * b[p * b_row + j];
        }
        for (int j = 0; j < GEMM_COLS; j++) c[i * c_row + j] = add ? c[i * c_row + j] + acc[j] : acc[j];
    }
}

static void stream(int rows, int panels, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b,
                   int64_t b_panel, float *c, int64_t c_row, bool add) {
    for (int j = 0; j < panels; j++)
        tile(rows, k, a, a_row, a_k, b + j * b_panel, GEMM_COLS, c + j * GEMM_COLS, c_row, add);
}

static void interleave(int rows, int width, int64_t k, const float *src, int64_t row, float *dst) {
    for (int64_t p = 0; p < k; p++)
        for (int i = 0; i < width; i++) dst[p * width + i] = i < rows ? src[i * row + p] : 0.0f;
}

static void turn(int64_t rows, int64_t cols, const float *src, int64_t row, float *dst, int64_t dst_row,
                 GemmOther other) {
    for (int64_t j = 0; j < cols; j++)
        for (int64_t i = 0; i < rows; i++) {
            float x = src[i * row + j], y = other.data ? other.data[j * other.row + i] : 0;
            dst[j * dst_row + i] = !other.data ? x : other.product ? x * y : x + y;
        }
}

static void dots(int m, const float *x, int64_t x_row, int64_t rows, const float *w, int64_t w_row, int64_t k, float *c,
                 int64_t c_row) {
    enum { LANES = 8 };
    for (int i = 0; i < m; i++)
        for (int64_t j = 0; j < rows; j++) {
            float s[LANES] = {0}, total = 0;
            for (int64_t p = 0; p < k; p++) s[p % LANES] += x[i * x_row + p] * w[j * w_row + p];
            for (int l = 0; l < LANES; l++) total += s[l];
            c[i * c_row + j] += total;
        }
}

static void strip(int64_t panels, int64_t rows, const float *src, int64_t row, float *dst, int64_t panel) {
    for (int64_t p = 0; p < rows; p++)
        for (int64_t j = 0; j < panels; j++)
            memcpy(dst + j * panel + p * GEMM_COLS, src + p * row + j * GEMM_COLS, GEMM_COLS * sizeof *dst);
}

static void tile_copy(int64_t k, const float *a, int64_t a_row, const float *b, int64_t b_row, float *c, int64_t c_row,
                      bool add, float *copy, int panels) {
    strip(panels, k, b, b_row, copy, k * GEMM_COLS);
    tile(GEMM_ROWS, k, a, a_row, 1, copy, GEMM_COLS, c, c_row, add);
}

static void update(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                   int64_t n, float *c, int64_t c_row) {
    for (int64_t p = 0; p < k; p++)
        for (int i = 0; i < rows; i++) {
            float x = a[i * a_row + p * a_k];
            for (int64_t j = 0; j < n; j++) c[i * c_row + j] += x * b[p * b_row + j];
        }
}

static void widen(float *dst, const uint16_t *src, DType dtype, int64_t n) {
    for (int64_t i = 0; i < n; i++) dst[i] = dtype == DTYPE_F16 ? f16_to_f32(src[i]) : bf16_to_f32(src[i]);
}

static void fill_row(float *dst, float value, int64_t n) {
    for (int64_t i = 0; i < n; i++) dst[i] = value;
}

static void scale_row(float *dst, const float *src, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) dst[i] = src[i] * factor;
}

static void dots_half(DType dtype, int m, const float *x, int64_t x_row, int64_t rows, const uint16_t *w, int64_t w_row,
                      int64_t k, float *c, int64_t c_row) {
    enum { LANES = 8 };
    for (int i = 0; i < m; i++)
        for (int64_t j = 0; j < rows; j++) {
            float s[LANES] = {0}, total = 0;
            for (int64_t p = 0; p < k; p++) s[p % LANES] += x[i * x_row + p] * load_f32(w, dtype, j * w_row + p);
            for (int l = 0; l < LANES; l++) total += s[l];
            c[i * c_row + j] += total;
        }
}

GemmDotsHalf *gemm_dots_half(void) {
    GemmDotsHalf *avx2 = cpu_has_avx2() ? gemm_dots_half_avx2() : NULL;
    return avx2 ? avx2 : dots_half;
}

GemmPair *gemm_pair(void) { return cpu_has_avx512() ? gemm_pair_avx512() : NULL; }

GemmPairCopy *gemm_pair_copy(void) { return cpu_has_avx512() ? gemm_pair_copy_avx512() : NULL; }

GemmPairRows *gemm_pair_rows(void) { return cpu_has_avx512() ? gemm_pair_rows_avx512() : NULL; }

GemmStrip *gemm_strip(void) { return cpu_has_avx2() ? gemm_strip_avx2() : NULL; }

const GemmKernels *gemm_kernels(void) {
    static const GemmKernels portable = {tile,  tile_copy, stream, interleave, turn,     dots,
                                         strip, update,    widen,  fill_row,   scale_row};
    const GemmKernels *avx2 = cpu_has_avx2() ? gemm_kernels_avx2() : NULL;
    return avx2 ? avx2 : &portable;
}
