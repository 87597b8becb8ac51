/* Products of bf16: A is rounded to it, sums are f32. Two neighbours in k lie in 32 bits and are treated as one element
 * by all that moves data, so the product is that of gemm_turned.c at half the depth, with other kernels. */
#include "cpu/gemm.h"

#include <math.h>
#include <string.h>

enum { PART_ROWS = 4, TURNED_ROWS = 32 };

/* --- kernels in plain C ------------------------------------------------------------------------------------------- */
static float add_pair(float sum, float a, float b) {
    uint32_t x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    sum = fmaf(bf16_to_f32((uint16_t)(x >> 16)), bf16_to_f32((uint16_t)(y >> 16)), sum);
    return fmaf(bf16_to_f32((uint16_t)x), bf16_to_f32((uint16_t)y), sum);
}

static void tile(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t b_row,
                 float *c, int64_t c_row, bool add) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < GEMM_COLS; j++) {
            float sum = 0;
            for (int64_t p = 0; p < k; p++) sum = add_pair(sum, a[i * a_row + p * a_k], b[p * b_row + j]);
            c[i * c_row + j] = add ? c[i * c_row + j] + sum : sum;
        }
}

static void dots(int m, const float *x, int64_t x_row, int64_t rows, const float *w, int64_t w_row, int64_t k, float *c,
                 int64_t c_row) {
    enum { LANES = 8 };
    for (int i = 0; i < m; i++)
        for (int64_t j = 0; j < rows; j++) {
            float s[LANES] = {0}, total = 0;
            for (int64_t p = 0; p < k; p++) s[p % LANES] = add_pair(s[p % LANES], x[i * x_row + p], w[j * w_row + p]);
            for (int l = 0; l < LANES; l++) total += s[l];
            c[i * c_row + j] += total;
        }
}

static void narrow(uint16_t *dst, const float *src, int64_t n) {
    for (int64_t i = 0; i < n; i++) dst[i] = f32_to_bf16(src[i]);
}

const GemmBf16 *gemm_bf16_portable(void) {
    static const GemmBf16 portable = {tile, NULL, NULL, dots, narrow};
    return &portable;
}

const GemmBf16 *gemm_bf16(void) {
    const GemmBf16 *avx512 = cpu_has_avx512_bf16() ? gemm_bf16_avx512() : NULL;
    const GemmBf16 *avx2 = cpu_has_avx2() ? gemm_bf16_avx2() : NULL;
    return avx512 ? avx512 : avx2 ? avx2 : gemm_bf16_portable();
}

/* --- the product -------------------------------------------------------------------------------------------------- */
static int64_t pairs_of(int64_t k) { return (k + 1) / 2; }

int64_t gemm_bf16_scratch(int64_t m, int64_t n, int64_t k, int threads) {
    return round_up(m * pairs_of(k), 16) * (int64_t)sizeof(float) + gemm_turned_scratch(1, m, n, pairs_of(k), threads);
}

static bool aligned(const void *data) { return (uintptr_t)data % sizeof(float) == 0; }

bool gemm_bf16_serves(const Gemm *g) {
    bool plain = !g->panels && !g->fill && !g->load;
    for (int d = 0; d < g->batch_rank; d++) plain = plain && g->b_batch[d] == 0;
    bool pairs = g->b.row == 1 && g->b.col % 2 == 0 && g->k % 2 == 0 && aligned(g->b.data);
    return plain && g->b.dtype == DTYPE_BF16 && pairs && g->k > 0;
}

typedef struct Turning {
    const GemmOperand *b;
    int64_t n, k;
    uint16_t *to;
} Turning;

static void turn_rows(void *arg, int64_t part, int thread) {
    (void)thread;
    enum { DEPTH = 64 }; /* of a block that both sides of have room in the L1 */
    const Turning *job = arg;
    const uint16_t *from = job->b->data;
    int64_t width = 2 * pairs_of(job->k), first = part * TURNED_ROWS, end = min_i64(first + TURNED_ROWS, job->n);
    for (int64_t k = 0; k < job->k; k += DEPTH)
        for (int64_t p = k; p < min_i64(k + DEPTH, job->k); p++)
            for (int64_t j = first; j < end; j++) job->to[j * width + p] = from[p * job->b->row + j * job->b->col];
    for (int64_t j = first; j < end && job->k % 2; j++) job->to[j * width + job->k] = 0;
}

int64_t gemm_bf16_turned_bytes(int64_t n, int64_t k) { return n * pairs_of(k) * (int64_t)sizeof(float); }

void gemm_bf16_turn(const GemmOperand *b, int64_t n, int64_t k, Pool *pool, void *to) {
    Turning job = {b, n, k, to};
    pool_run(pool, (n + TURNED_ROWS - 1) / TURNED_ROWS, turn_rows, &job);
}

GemmOperand gemm_bf16_turned(const void *data, int64_t k) {
    return (GemmOperand){data, DTYPE_BF16, 1, 2 * pairs_of(k)};
}

typedef struct Rounding {
    const Gemm *g;
    int64_t rows;
    uint16_t *to;
} Rounding;

static void round_rows(void *arg, int64_t part, int thread) {
    (void)thread;
    const Rounding *job = arg;
    const GemmOperand *a = &job->g->a;
    int64_t m = job->g->m, k = job->g->k, width = 2 * pairs_of(k), end = min_i64((part + 1) * PART_ROWS, job->rows);
    for (int64_t i = part * PART_ROWS; i < end; i++) {
        uint16_t *to = job->to + i * width;
        int64_t at = gemm_offset(job->g, job->g->a_batch, i / m) + i % m * a->row;
        if (a->col == 1 && a->dtype == DTYPE_F32)
            gemm_bf16()->narrow(to, (const float *)a->data + at, k);
        else if (a->col == 1 && a->dtype == DTYPE_BF16)
            memcpy(to, (const uint16_t *)a->data + at, (size_t)k * sizeof *to);
        else
            for (int64_t p = 0; p < k; p++) to[p] = f32_to_bf16(load_f32(a->data, a->dtype, at + p * a->col));
        if (k < width) to[k] = 0;
    }
}

void *gemm_bf16_begin(const Gemm *g, Gemm *made, Pool *pool, void *scratch) {
    int64_t pairs = pairs_of(g->k), rows = g->batch * g->m;
    *made = *g;
    made->batch = 1;
    made->batch_rank = 0;
    made->m = rows;
    made->pairs = true;
    made->k = pairs;
    made->b = (GemmOperand){g->b.data, DTYPE_F32, 1, g->b.col / 2};
    made->a = (GemmOperand){g->a.data, DTYPE_F32, g->a.row / 2, 1};
    bool in_place = g->a.dtype == DTYPE_BF16 && g->a.col == 1 && (g->m == 1 || g->a.row % 2 == 0) && g->k % 2 == 0;
    if (!in_place || !aligned(g->a.data) || g->batch != 1) {
        Rounding job = {g, rows, scratch};
        bool small = rows * g->k < 32 << 10;
        pool_run(small ? NULL : pool, (rows + PART_ROWS - 1) / PART_ROWS, round_rows, &job);
        made->a = (GemmOperand){scratch, DTYPE_F32, pairs, 1};
    }
    return (char *)scratch + round_up(rows * pairs, 16) * (int64_t)sizeof(float);
}

void gemm_bf16_run(const Gemm *g, Pool *pool, void *scratch) {
    Gemm made;
    void *rest = gemm_bf16_begin(g, &made, pool, scratch);
    gemm_turned_run(&made, pool, rest);
}
