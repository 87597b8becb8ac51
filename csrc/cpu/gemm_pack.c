/* Constant weights into panels, see gemm.h. A part of the work is a strip of rows and of neighbouring panels: rows are
 * then read in long runs, and the strip's panels are written beside each other. */
#include "cpu/gemm.h"

#include <string.h>

enum {
    STRIP_PANELS = 64, /* 4 KB of each row: a page of the weight is read at once */
    STRIP_ROWS = 192,
};

void gemm_pack_panel(const GemmKernels *kernels, const GemmOperand *b, int64_t n, int64_t k, int64_t panel,
                     float *dst) {
    int cols = (int)min_i64(GEMM_COLS, n - panel * GEMM_COLS);
    int64_t first = panel * GEMM_COLS * b->col;
    if (b->dtype == DTYPE_F32 && b->row == 1) {
        kernels->interleave(cols, GEMM_COLS, k, (const float *)b->data + first, b->col, dst);
        return;
    }
    if (b->row == 1) {
        float wide[GEMM_COLS * GEMM_BLOCK_K];
        for (int64_t p = 0; p < k; p += GEMM_BLOCK_K) {
            int64_t depth = min_i64(GEMM_BLOCK_K, k - p);
            for (int j = 0; j < cols; j++)
                kernels->widen(wide + j * depth, (const uint16_t *)b->data + first + j * b->col + p, b->dtype, depth);
            kernels->interleave(cols, GEMM_COLS, depth, wide, depth, dst + p * GEMM_COLS);
        }
        return;
    }
    if (b->col == 1) {
        for (int64_t p = 0; p < k; p++, dst += GEMM_COLS) {
            int64_t at = first + p * b->row;
            if (b->dtype == DTYPE_F32)
                memcpy(dst, (const float *)b->data + at, (size_t)cols * sizeof(float));
            else
                kernels->widen(dst, (const uint16_t *)b->data + at, b->dtype, cols);
            for (int j = cols; j < GEMM_COLS; j++) dst[j] = 0.0f;
        }
        return;
    }
    for (int j = 0; j < GEMM_COLS; j++)
        for (int64_t p = 0; p < k; p++)
            dst[p * GEMM_COLS + j] = j < cols ? load_f32(b->data, b->dtype, first + j * b->col + p * b->row) : 0.0f;
}

typedef struct Packing {
    const GemmKernels *kernels;
    GemmStrip *strip; /* NULL: panel by panel */
    GemmOperand b;
    int64_t n, k, strips;
    float *panels;
} Packing;

static void pack_panel(void *arg, int64_t part, int thread) {
    (void)thread;
    const Packing *p = arg;
    gemm_pack_panel(p->kernels, &p->b, p->n, p->k, part, p->panels + part * GEMM_COLS * p->k);
}

static void pack_strip(void *arg, int64_t part, int thread) {
    (void)thread;
    const Packing *p = arg;
    int64_t panel = part % p->strips * STRIP_PANELS, row = part / p->strips * STRIP_ROWS;
    int64_t panels = min_i64(STRIP_PANELS, gemm_panels(p->n) - panel), rows = min_i64(STRIP_ROWS, p->k - row);
    int64_t whole = min_i64(panels, p->n / GEMM_COLS - panel);
    const float *from = (const float *)p->b.data + row * p->b.row + panel * GEMM_COLS;
    float *to = p->panels + (panel * p->k + row) * GEMM_COLS;
    p->strip(whole, rows, from, p->b.row, to, p->k * GEMM_COLS);
    if (whole == panels) return;
    GemmOperand last = p->b;
    last.data = from;
    gemm_pack_panel(p->kernels, &last, p->n - panel * GEMM_COLS, rows, whole, to + whole * p->k * GEMM_COLS);
}

void gemm_pack(const GemmOperand *b, int64_t n, int64_t k, Pool *pool, float *panels) {
    Packing p = {gemm_kernels(), NULL, *b, n, k, (gemm_panels(n) + STRIP_PANELS - 1) / STRIP_PANELS, panels};
    if (b->dtype == DTYPE_F32 && b->col == 1 && b->row != 1) p.strip = gemm_strip();
    if (p.strip)
        pool_run(pool, p.strips * ((k + STRIP_ROWS - 1) / STRIP_ROWS), pack_strip, &p);
    else
        pool_run(pool, gemm_panels(n), pack_panel, &p);
}
