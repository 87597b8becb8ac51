/* 6 x 16 register tile: 12 accumulators, 2 registers of b, 1 broadcast of a. */
#include "cpu/gemm_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/vmath_avx2.h"

/* Inlined with constant `rows` and strides into each case of the switches below. */
static inline __attribute__((always_inline)) void tile_body(const int rows, int64_t k, const float *restrict a,
                                                            int64_t a_row, int64_t a_k, const float *restrict b,
                                                            int64_t b_row, float *restrict c, int64_t c_row, bool add,
                                                            float *restrict copy, const int panels) {
    __m256 r[GEMM_ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) r[i][0] = r[i][1] = _mm256_setzero_ps();
    for (int64_t p = 0; p < k; p++) {
        __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
        _mm_prefetch((const char *)(b + 16 * b_row), _MM_HINT_T0);
#pragma GCC unroll 2
        for (int j = 0; j < panels; j++) {
            float *to = copy + (j * k + p) * GEMM_COLS;
            _mm256_storeu_ps(to, _mm256_loadu_ps(b + j * GEMM_COLS));
            _mm256_storeu_ps(to + 8, _mm256_loadu_ps(b + j * GEMM_COLS + 8));
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            __m256 x = _mm256_broadcast_ss(a + i * a_row);
            r[i][0] = _mm256_fmadd_ps(x, b0, r[i][0]);
            r[i][1] = _mm256_fmadd_ps(x, b1, r[i][1]);
        }
        a += a_k;
        b += b_row;
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        float *to = c + i * c_row;
        _mm256_storeu_ps(to, add ? _mm256_add_ps(_mm256_loadu_ps(to), r[i][0]) : r[i][0]);
        _mm256_storeu_ps(to + 8, add ? _mm256_add_ps(_mm256_loadu_ps(to + 8), r[i][1]) : r[i][1]);
    }
}

static void tile(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                 float *c, int64_t c_row, bool add) {
    switch (rows) {
    case 1: tile_body(1, k, a, a_row, a_k, b, b_row, c, c_row, add, NULL, 0); break;
    case 2: tile_body(2, k, a, a_row, a_k, b, b_row, c, c_row, add, NULL, 0); break;
    case 3: tile_body(3, k, a, a_row, a_k, b, b_row, c, c_row, add, NULL, 0); break;
    case 4: tile_body(4, k, a, a_row, a_k, b, b_row, c, c_row, add, NULL, 0); break;
    case 5: tile_body(5, k, a, a_row, a_k, b, b_row, c, c_row, add, NULL, 0); break;
    default: tile_body(6, k, a, a_row, a_k, b, b_row, c, c_row, add, NULL, 0); break;
    }
}

static void tile_copy(int64_t k, const float *a, int64_t a_row, const float *b, int64_t b_row, float *c, int64_t c_row,
                      bool add, float *copy, int panels) {
    if (panels == 2)
        tile_body(GEMM_ROWS, k, a, a_row, 1, b, b_row, c, c_row, add, copy, 2);
    else
        tile_body(GEMM_ROWS, k, a, a_row, 1, b, b_row, c, c_row, add, copy, 1);
}

static inline __attribute__((always_inline)) void stream_body(const int rows, const int panels, int64_t k,
                                                              const float *restrict a, int64_t a_row, int64_t a_k,
                                                              const float *restrict b, int64_t b_panel,
                                                              float *restrict c, int64_t c_row, bool add) {
    __m256 r[3][4][2];
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < panels; j++) r[i][j][0] = r[i][j][1] = _mm256_setzero_ps();
    for (int64_t p = 0; p < k; p++) {
#pragma GCC unroll 4
        for (int j = 0; j < panels; j++) {
            __m256 b0 = _mm256_loadu_ps(b + j * b_panel), b1 = _mm256_loadu_ps(b + j * b_panel + 8);
#pragma GCC unroll 3
            for (int i = 0; i < rows; i++) {
                __m256 x = _mm256_broadcast_ss(a + i * a_row);
                r[i][j][0] = _mm256_fmadd_ps(x, b0, r[i][j][0]);
                r[i][j][1] = _mm256_fmadd_ps(x, b1, r[i][j][1]);
            }
        }
        a += a_k;
        b += GEMM_COLS;
    }
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < panels; j++) {
            float *to = c + i * c_row + j * GEMM_COLS;
            _mm256_storeu_ps(to, add ? _mm256_add_ps(_mm256_loadu_ps(to), r[i][j][0]) : r[i][j][0]);
            _mm256_storeu_ps(to + 8, add ? _mm256_add_ps(_mm256_loadu_ps(to + 8), r[i][j][1]) : r[i][j][1]);
        }
}

static void stream(int rows, int panels, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b,
                   int64_t b_panel, float *c, int64_t c_row, bool add) {
    if (rows == 1 && panels == 4)
        stream_body(1, 4, k, a, a_row, a_k, b, b_panel, c, c_row, add);
    else if (rows == 2 && panels == 3)
        stream_body(2, 3, k, a, a_row, a_k, b, b_panel, c, c_row, add);
    else if (rows == 3 && panels == 2)
        stream_body(3, 2, k, a, a_row, a_k, b, b_panel, c, c_row, add);
    else
        for (int j = 0; j < panels; j++)
            tile(rows, k, a, a_row, a_k, b + j * b_panel, GEMM_COLS, c + j * GEMM_COLS, c_row, add);
}

static inline __attribute__((always_inline)) void transpose8(__m256 r[8]) {
    __m256 t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

/* 8 columns of 8 rows; those from row `rows` on are 0. */
static inline __attribute__((always_inline)) void load8(__m256 r[8], const float *src, int64_t row, int rows) {
    if (rows >= 8) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(src + i * row);
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = i < rows ? _mm256_loadu_ps(src + i * row) : _mm256_setzero_ps();
}

static void interleave(int rows, int width, int64_t k, const float *src, int64_t row, float *dst) {
    enum { AHEAD = 32 };
    int64_t p = 0;
    for (; (k - p - 7) * width >= 8; p += 8) { /* a store of 8 never leaves dst */
        for (int half = 0; half < width; half += 8) {
            const float *from = src + half * row + p;
            float *to = dst + p * width + half;
            __m256 r[8];
            load8(r, from, row, rows - half);
            if (p % 16 == 0 && rows - half >= 8)
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) _mm_prefetch((const char *)(from + i * row + AHEAD), _MM_HINT_T0);
            transpose8(r);
            /* with a width below 8 it overlaps the next row, which is written after it */
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) _mm256_storeu_ps(to + i * width, r[i]);
        }
    }
    for (; p < k; p++)
        for (int i = 0; i < width; i++) dst[p * width + i] = i < rows ? src[i * row + p] : 0.0f;
}

/* Inlined with constants into `turn`. */
static inline __attribute__((always_inline)) void turn_body(int64_t rows, int64_t cols, const float *src, int64_t row,
                                                            float *dst, int64_t dst_row, GemmOther other,
                                                            const bool meets, const bool product) {
#define MEET(x, y) (product ? _mm256_mul_ps(x, y) : _mm256_add_ps(x, y))
    for (int64_t i = 0; i < rows; i += 8) {
        int there = rows - i < 8 ? (int)(rows - i) : 8;
        const __m256i lanes = v_tail(there);
        for (int64_t half = 0; half < cols; half += 8) {
            float *to = dst + half * dst_row + i;
            const float *y = meets ? other.data + half * other.row + i : NULL;
            bool whole = there == 8 && half + 8 <= cols;
            __m256 r[8];
            load8(r, src + i * row + half, row, there);
            transpose8(r);
            if (whole && meets)
#pragma GCC unroll 8
                for (int t = 0; t < 8; t++) r[t] = MEET(r[t], _mm256_loadu_ps(y + t * other.row));
            if (whole)
#pragma GCC unroll 8
                for (int t = 0; t < 8; t++) _mm256_storeu_ps(to + t * dst_row, r[t]);
            if (whole) continue;
#pragma GCC unroll 8
            for (int t = 0; t < 8; t++) {
                if (half + t >= cols) break;
                if (meets) r[t] = MEET(r[t], _mm256_maskload_ps(y + t * other.row, lanes));
                _mm256_maskstore_ps(to + t * dst_row, lanes, r[t]);
            }
        }
    }
#undef MEET
}

static void turn(int64_t rows, int64_t cols, const float *src, int64_t row, float *dst, int64_t dst_row,
                 GemmOther other) {
    if (!other.data)
        turn_body(rows, cols, src, row, dst, dst_row, other, false, false);
    else if (other.product)
        turn_body(rows, cols, src, row, dst, dst_row, other, true, true);
    else
        turn_body(rows, cols, src, row, dst, dst_row, other, true, false);
}

/* `together` rows of w at a time, to hide the latency of the sums. They lie far apart, each the next of a run of its
 * own: so many streams at once are read faster from memory than one (measured: by a third). */
static inline __attribute__((always_inline)) void dots_body(const int m, const int together, const float *x,
                                                            int64_t x_row, int64_t rows, const float *w, int64_t w_row,
                                                            int64_t k, float *c, int64_t c_row) {
    const __m256i tail = v_tail((int)(k % 8));
    const int64_t run = (rows + together - 1) / together;
    for (int64_t j = 0; j < run; j++) {
        const float *at[4];
        __m256 s[6][4];
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) at[t] = w + (j + t * run < rows ? j + t * run : j) * w_row;
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) s[i][t] = _mm256_setzero_ps();
        int64_t p = 0;
        for (; p + 8 <= k; p += 8)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) {
                __m256 v = _mm256_loadu_ps(at[t] + p);
#pragma GCC unroll 6
                for (int i = 0; i < m; i++) s[i][t] = _mm256_fmadd_ps(_mm256_loadu_ps(x + i * x_row + p), v, s[i][t]);
            }
        if (p < k)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++) {
                __m256 v = _mm256_maskload_ps(at[t] + p, tail);
#pragma GCC unroll 6
                for (int i = 0; i < m; i++)
                    s[i][t] = _mm256_fmadd_ps(_mm256_maskload_ps(x + i * x_row + p, tail), v, s[i][t]);
            }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t++)
                if (j + t * run < rows) c[i * c_row + j + t * run] += v_sum(s[i][t]);
    }
}

static void dots(int m, const float *x, int64_t x_row, int64_t rows, const float *w, int64_t w_row, int64_t k, float *c,
                 int64_t c_row) {
    switch (m) {
    case 1: dots_body(1, 4, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 2: dots_body(2, 4, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 3: dots_body(3, 3, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 4: dots_body(4, 3, x, x_row, rows, w, w_row, k, c, c_row); break;
    case 5: dots_body(5, 2, x, x_row, rows, w, w_row, k, c, c_row); break;
    default: dots_body(6, 2, x, x_row, rows, w, w_row, k, c, c_row); break;
    }
}

static void strip(int64_t panels, int64_t rows, const float *src, int64_t row, float *dst, int64_t panel) {
    for (int64_t p = 0; p < rows; p++)
        for (int64_t j = 0; j < panels; j++) {
            const float *from = src + p * row + j * GEMM_COLS;
            float *to = dst + j * panel + p * GEMM_COLS;
            __m256 low = _mm256_loadu_ps(from), high = _mm256_loadu_ps(from + 8);
            _mm256_storeu_ps(to, low);
            _mm256_storeu_ps(to + 8, high);
        }
}

/* `steps` rows of b at once: so many registers hold elements of a for each row of c. What the next steps read comes
 * into the cache meanwhile. */
static inline __attribute__((always_inline)) void update_body(const int rows, const int steps, const float *a,
                                                              int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                                                              int64_t n, float *c, int64_t c_row) {
    enum { AHEAD = 8 };
    const __m256i tail = v_tail((int)(n % 8));
    __m256 x[6][8];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int t = 0; t < steps; t++) x[i][t] = _mm256_broadcast_ss(a + i * a_row + t * a_k);
    int64_t j = 0;
    for (; j + 8 <= n; j += 8) {
        __m256 w[8];
#pragma GCC unroll 8
        for (int t = 0; t < steps; t++) {
            if (j % 16 == 0) _mm_prefetch((const char *)(b + (t + AHEAD) * b_row + j), _MM_HINT_T1);
            w[t] = _mm256_loadu_ps(b + t * b_row + j);
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            __m256 sum = _mm256_loadu_ps(c + i * c_row + j);
#pragma GCC unroll 8
            for (int t = 0; t < steps; t++) sum = _mm256_fmadd_ps(x[i][t], w[t], sum);
            _mm256_storeu_ps(c + i * c_row + j, sum);
        }
    }
    if (j == n) return;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        __m256 sum = _mm256_maskload_ps(c + i * c_row + j, tail);
#pragma GCC unroll 8
        for (int t = 0; t < steps; t++)
            sum = _mm256_fmadd_ps(x[i][t], _mm256_maskload_ps(b + t * b_row + j, tail), sum);
        _mm256_maskstore_ps(c + i * c_row + j, tail, sum);
    }
}

static void update(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                   int64_t n, float *c, int64_t c_row) {
    const int together = rows == 1 ? 8 : rows == 2 ? 4 : rows <= 4 ? 3 : 2;
    for (int64_t p = 0, steps; p < k; p += steps, a += steps * a_k, b += steps * b_row) {
        steps = k - p >= together ? together : 1;
#define CASE(r, s)                                                                                                     \
    case 10 * r + s: update_body(r, s, a, a_row, a_k, b, b_row, n, c, c_row); break
        switch (10 * rows + (int)steps) {
            CASE(1, 8);
            CASE(1, 1);
            CASE(2, 4);
            CASE(2, 1);
            CASE(3, 3);
            CASE(3, 1);
            CASE(4, 3);
            CASE(4, 1);
            CASE(5, 2);
            CASE(5, 1);
            CASE(6, 2);
        default: update_body(6, 1, a, a_row, a_k, b, b_row, n, c, c_row); break;
        }
#undef CASE
    }
}

static void widen(float *dst, const uint16_t *src, DType dtype, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(src + i));
        __m256 wide = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
        _mm256_storeu_ps(dst + i, dtype == DTYPE_F16 ? _mm256_cvtph_ps(half) : wide);
    }
    for (; i < n; i++) dst[i] = dtype == DTYPE_F16 ? f16_to_f32(src[i]) : bf16_to_f32(src[i]);
}

static void fill_row(float *dst, float value, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_set1_ps(value));
    for (; i < n; i++) dst[i] = value;
}

static void scale_row(float *dst, const float *src, float factor, int64_t n) {
    int64_t i = 0;
    __m256 f = _mm256_set1_ps(factor);
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_mul_ps(_mm256_loadu_ps(src + i), f));
    for (; i < n; i++) dst[i] = src[i] * factor;
}

const GemmKernels *gemm_kernels_avx2(void) {
    static const GemmKernels kernels = {tile,  tile_copy, stream, interleave, turn,     dots,
                                        strip, update,    widen,  fill_row,   scale_row};
    return &kernels;
}
#else
const GemmKernels *gemm_kernels_avx2(void) { return NULL; }
#endif
