/* Matrix products: C[m, n] = epilogue(A[m, k] * B[k, n] + bias), for linear, matmul and conv.
 *
 * f16 and bf16 are widened to f32. Where B's columns are contiguous, as torch keeps weights, and A has not very many
 * rows: gemm_turned.c. Else gemm.c: a part of the work is a block of at most 144 rows and 8 panels of 16 columns of B.
 * It is summed in blocks of k in a buffer of its thread, while what it reads next comes into the L2, then finished row
 * by row while hot. B is read as it lies where its rows lie in memory: the first tile copies a block of two panels,
 * [panel][k][16], for the other tiles. What lies otherwise is packed: constant weights once, others on the fly.
 * The order of sums is fixed by the shape alone, so results do not depend on the number of threads. f64 and integers:
 * gemm_plain.c. */
#ifndef FORGE_CPU_GEMM_H
#define FORGE_CPU_GEMM_H

#include "cpu/elementwise.h"
#include "cpu/gemm_kernels.h"

#include <stdatomic.h>

/* Element (i, j) is number i * row + j * col. */
typedef struct GemmOperand {
    const void *data;
    DType dtype;
    int64_t row, col;
} GemmOperand;

static inline bool gemm_in_f32(DType d) { return d == DTYPE_F32 || d == DTYPE_F16 || d == DTYPE_BF16; }

/* --- finishing rows: gemm_finish.c -------------------------------------------------------------------------------- */
/* An epilogue operand, broadcast to the result: a row of it for each row of the result. */
typedef struct GemmRows {
    const char *data;
    DType dtype;
    int rank; /* leading dimensions, merged where strides allow */
    int64_t shape[MAX_RANK], strides[MAX_RANK];
    int64_t col;
} GemmRows;

typedef struct GemmFinish {
    const GemmKernels *kernels; /* NULL: the product is not f32 */
    DType product;              /* as it comes: f32 for f16, bf16, f32; else the type itself */
    EwProgram program;
    char *out;   /* row major, rows of n */
    bool direct; /* the result is the sum itself, in f32 */
    int64_t n;
    size_t out_size;
    const char *bias; /* NULL: none */
    DType bias_type;
    int64_t bias_stride;
    int64_t bias_rows;                   /* 0: a bias a column; else one a row, row r takes number r % bias_rows */
    GemmRows inputs[PROGRAM_MAX_INPUTS]; /* 1.. */
    atomic_int fault;                    /* EwFault of any part */
} GemmFinish;

/* `first`: the operand that is input 1 of the node's program. */
MUST_USE Code gemm_finish_init(GemmFinish *f, const KernelCall *call, uint32_t first, const Tensor *bias);
/* Columns [col, col + count) of a row: what the sums are added to (the bias comes first, as in MKL, or 0; 0 past n). */
void gemm_start_row(const GemmFinish *f, int64_t row, int64_t col, int64_t count, void *product);
float gemm_bias(const GemmFinish *f, int64_t col); /* of a column; 0 without one */
/* The same columns of the result from `product`, which is overwritten. */
enum { GEMM_MAX_SEGMENT = 256 }; /* largest count */
void gemm_finish_row(GemmFinish *f, int64_t row, int64_t col, int64_t count, void *product);
/* gemm_finish_row for so many rows of an f32 product, which are `stride` apart. */
void gemm_finish_block(GemmFinish *f, int64_t row, int64_t rows, int64_t col, int64_t count, float *product,
                       int64_t stride);

/* Asks for the lines of the result that these columns of rows will be written to, and of what the program reads with
 * them: another core has mostly had them last. */
static inline void gemm_touch(const GemmFinish *f, int64_t row, int64_t rows, int64_t col, int64_t count) {
    int64_t there = min_i64(count, f->n - col), bytes = there * (int64_t)f->out_size;
    for (int64_t i = row; i < row + rows; i++)
        for (int64_t at = 0; at < bytes; at += 64)
            __builtin_prefetch(f->out + (i * f->n + col) * (int64_t)f->out_size + at, 1);
    for (uint32_t k = 1; k < f->program.n_inputs; k++) {
        const GemmRows *in = &f->inputs[k];
        if (in->rank != 1 || in->col != 1 || in->strides[0] == 0) continue;
        int64_t size = (int64_t)dtype_size(in->dtype);
        for (int64_t i = row; i < row + rows; i++)
            for (int64_t at = 0; at < there * size; at += 64)
                __builtin_prefetch(in->data + (i * in->strides[0] + col) * size + at, 0);
    }
}

/* --- f32: gemm.c -------------------------------------------------------------------------------------------------- */
/* Whether A is rounded to bf16, as B is: no; where that is as good, A being bf16, and the processor has a unit for it;
 * always. There is scratch for it then. */
typedef enum GemmRounding { GEMM_WIDENS, GEMM_ROUNDS_WHERE_FAST, GEMM_ROUNDS } GemmRounding;

typedef struct Gemm {
    int64_t batch, m, n, k;
    GemmOperand a, b;
    int batch_rank; /* the batch as dimensions, outermost first, with their strides in a and b */
    int64_t batch_shape[MAX_RANK], a_batch[MAX_RANK], b_batch[MAX_RANK];
    const float *panels; /* B packed, one for the whole batch; or NULL */
    void (*fill)(const void *user, int64_t batch, int64_t panel,
                 float *dst); /* makes a panel in place of `b`, or NULL */
    /* Makes rows of B^T, columns [k, k + depth), in place of `b`: dst[row * depth + column]. Or NULL. */
    void (*load)(const void *user, int64_t row, int64_t rows, int64_t k, int64_t depth, float *dst);
    const void *user;
    GemmRounding rounding;
    bool pairs;         /* elements of a and b are pairs of bf16, by way of gemm_bf16.c */
    GemmFinish *finish; /* row of the result: batch * m + i */
} Gemm;

/* Adds the next inner dimension to the batch, merged with the one before where strides allow. */
void gemm_add_batch(Gemm *gemm, int64_t size, int64_t a_stride, int64_t b_stride);
/* Turns inner batch dimensions that do not move b into rows. */
void gemm_fold_batch(Gemm *gemm);
int64_t gemm_offset(const Gemm *gemm, const int64_t *strides, int64_t batch);

enum { GEMM_TALL_ROWS = 384 }; /* from here on A is read as it lies, where that serves */
/* Sums are made in blocks of this depth: MKL's have this form, and so the same bits. A multiple of QUANTISED_BLOCK. */
enum { GEMM_BLOCK_K = 192 };
/* Bytes. `packed`: panels will be given. A product that may be turned around needs the larger of the two. */
int64_t gemm_scratch(int64_t batch, int64_t m, int64_t n, int64_t k, bool packed, int threads);
int64_t gemm_turned_scratch(int64_t batch, int64_t m, int64_t n, int64_t k, int threads);
void gemm_run(const Gemm *gemm, Pool *pool, void *scratch);
void gemm_turned_run(const Gemm *gemm, Pool *pool, void *scratch);
/* A turned product of few rows as parts of so many columns each, which gemm_turned_split leaves to the caller; `few`
 * and `scratch` must stay. 0: it is none. */
typedef struct GemmFew GemmFew;
int64_t gemm_turned_columns(int64_t m, int64_t n);
int64_t gemm_turned_few_bytes(void);
void gemm_turned_split(const Gemm *gemm, GemmFew *few, void *scratch, KernelParts *parts);
/* gemm_bf16.c: of bf16, to which A (f32, f16 or bf16) is rounded; all of the batch have the same B, whose
 * columns are contiguous, an even number of elements apart, and followed by a 0 where they are odd. */
int64_t gemm_bf16_scratch(int64_t m, int64_t n, int64_t k, int threads);
void gemm_bf16_run(const Gemm *gemm, Pool *pool, void *scratch);
/* The same product in pairs, which gemm_turned.c takes with the rest of the scratch. */
void *gemm_bf16_begin(const Gemm *gemm, Gemm *pairs, Pool *pool, void *scratch);
bool gemm_bf16_serves(const Gemm *gemm); /* whether such a B is what there is */
/* A copy of another b[k, n] of bf16 that serves. */
int64_t gemm_bf16_turned_bytes(int64_t n, int64_t k);
void gemm_bf16_turn(const GemmOperand *b, int64_t n, int64_t k, Pool *pool, void *to);
GemmOperand gemm_bf16_turned(const void *data, int64_t k);
/* Product number `batch`. */
typedef void GemmOne(const Gemm *gemm, const void *plan, int64_t batch, Pool *pool, float *scratch);
/* All of them, one after the other with the whole pool; or, with `local_floats`, each on one thread with so much of the
 * scratch. */
void gemm_run_batch(const Gemm *gemm, GemmOne *one, const void *plan, int64_t local_floats, Pool *pool, float *scratch);
/* Multiply-adds not worth waking a thread. */
static inline bool gemm_is_small(const Gemm *g, int64_t products) { return products * g->m * g->n * g->k < 32 << 10; }
/* With so many rows, panels of B are made in less time than turning A and C around takes. */
static inline bool gemm_is_tall(int64_t batch, int64_t m, int64_t n, int64_t k) {
    return batch == 1 && m >= GEMM_TALL_ROWS && m * (k + 2 * n) > 2 * n * k && !gemm_pair();
}
static inline bool gemm_turns(const Gemm *g) {
    bool tall = g->b.dtype == DTYPE_F32 && gemm_is_tall(g->batch, g->m, g->n, g->k);
    return gemm_in_f32(g->b.dtype) && g->b.row == 1 && !g->panels && !g->fill && !tall;
}
static inline const void *gemm_element(const GemmOperand *o, int64_t at) {
    return (const char *)o->data + at * (int64_t)dtype_size(o->dtype);
}
/* Rows of the next tile. Tiles of one or two rows would wait for their own sums: the last ones are made of equal height
 * instead. */
static inline int64_t gemm_tile_rows(int64_t left) {
    return left <= GEMM_ROWS ? left : left < GEMM_ROWS + 4 ? (left + 1) / 2 : GEMM_ROWS;
}
/* Rows of the next tile on two panels: none of the tiles is left with so few rows that its sums wait for each other. */
static inline int64_t gemm_tall(int64_t rows) {
    return rows <= 2 * GEMM_ROWS ? rows : rows < 2 * GEMM_ROWS + 4 ? GEMM_ROWS : 2 * GEMM_ROWS;
}
static inline int64_t gemm_panels(int64_t n) { return (n + GEMM_COLS - 1) / GEMM_COLS; }
static inline int64_t gemm_panels_bytes(int64_t n, int64_t k) {
    return (gemm_panels(n) * GEMM_COLS * k + 16) * (int64_t)sizeof(float);
}
/* --- panels: gemm_pack.c ------------------------------------------------------------------------------------------ */
/* All panels of b[k, n]. `panels`: 64-byte aligned. */
void gemm_pack(const GemmOperand *b, int64_t n, int64_t k, Pool *pool, float *panels);
/* Panel number `panel`. */
void gemm_pack_panel(const GemmKernels *kernels, const GemmOperand *b, int64_t n, int64_t k, int64_t panel, float *dst);

/* The product of a kernel's call by whichever way suits it: linear.c. It is written from row `row` of result 0 on;
 * `first`: the operand that is input 1 of the node's program. */
MUST_USE Code gemm_call(KernelCall *call, Gemm *gemm, uint32_t first, const Tensor *bias, int64_t row);
/* The same for few rows and a B that lies turned, as parts of gemm_turned_columns; begins the scratch with so many
 * bytes. */
int64_t gemm_split_bytes(void);
MUST_USE Code gemm_split(KernelCall *call, const Gemm *gemm, uint32_t first, const Tensor *bias, KernelParts *parts);

/* --- f64 and integers: gemm_plain.c ------------------------------------------------------------------------------- */
int64_t gemm_plain_scratch(int threads);
MUST_USE Code gemm_plain_run(Context *ctx, Gemm *gemm, Pool *pool, void *scratch);

#endif
