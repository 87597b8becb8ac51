/* Products of f64 and of integers (which wrap around): blocks of B copied into [k][8], rows of A against them. */
#include "cpu/gemm.h"

enum { COLS = 8, DEPTH = 192, ROWS = 16, SCRATCH = (DEPTH + ROWS) * COLS * 8 };

int64_t gemm_plain_scratch(int threads) { return (int64_t)SCRATCH * threads; }

typedef struct Job {
    Gemm *g;
    char *scratch;
    int64_t row_blocks, col_blocks;
} Job;

/* T holds an element, U computes (unsigned for integers: they wrap around). */
#define PLAIN(name, T, U)                                                                                              \
    static void name(void *arg, int64_t part, int thread) {                                                            \
        Job *job = arg;                                                                                                \
        const Gemm *g = job->g;                                                                                        \
        T *b = (T *)(void *)(job->scratch + (int64_t)SCRATCH * thread), *c = b + DEPTH * COLS;                         \
        int64_t batch = part / (job->row_blocks * job->col_blocks),                                                    \
                block = part % (job->row_blocks * job->col_blocks);                                                    \
        int64_t row = block % job->row_blocks * ROWS, rows = min_i64(ROWS, g->m - row);                                \
        int64_t col = block / job->row_blocks * COLS, cols = min_i64(COLS, g->n - col);                                \
        const T *ap = (const T *)g->a.data + gemm_offset(g, g->a_batch, batch) + row * g->a.row;                       \
        const T *bp = (const T *)g->b.data + gemm_offset(g, g->b_batch, batch) + col * g->b.col;                       \
        for (int64_t i = 0; i < rows; i++) gemm_start_row(g->finish, batch * g->m + row + i, col, COLS, c + i * COLS); \
        for (int64_t k0 = 0; k0 < g->k; k0 += DEPTH) {                                                                 \
            int64_t depth = min_i64(DEPTH, g->k - k0);                                                                 \
            for (int64_t k = 0; k < depth; k++)                                                                        \
                for (int64_t j = 0; j < COLS; j++)                                                                     \
                    b[k * COLS + j] = j < cols ? bp[(k0 + k) * g->b.row + j * g->b.col] : (T)0;                        \
            for (int64_t i = 0; i < rows; i++) {                                                                       \
                U sum[COLS] = {0};                                                                                     \
                for (int64_t k = 0; k < depth; k++) {                                                                  \
                    U x = (U)ap[i * g->a.row + (k0 + k) * g->a.col];                                                   \
                    for (int j = 0; j < COLS; j++) sum[j] += x * (U)b[k * COLS + j];                                   \
                }                                                                                                      \
                for (int j = 0; j < COLS; j++) c[i * COLS + j] = (T)((U)c[i * COLS + j] + sum[j]);                     \
            }                                                                                                          \
        }                                                                                                              \
        for (int64_t i = 0; i < rows; i++)                                                                             \
            gemm_finish_row(g->finish, batch * g->m + row + i, col, cols, c + i * COLS);                               \
    }
PLAIN(plain_f64, double, double)
PLAIN(plain_u8, uint8_t, uint32_t)
PLAIN(plain_i8, int8_t, uint32_t)
PLAIN(plain_i16, int16_t, uint32_t)
PLAIN(plain_i32, int32_t, uint32_t)
PLAIN(plain_i64, int64_t, uint64_t)
#undef PLAIN

Code gemm_plain_run(Context *ctx, Gemm *gemm, Pool *pool, void *scratch) {
    PoolBody body = NULL;
    switch (gemm->a.dtype) {
    case DTYPE_F64: body = plain_f64; break;
    case DTYPE_U8: body = plain_u8; break;
    case DTYPE_I8: body = plain_i8; break;
    case DTYPE_I16: body = plain_i16; break;
    case DTYPE_I32: body = plain_i32; break;
    case DTYPE_I64: body = plain_i64; break;
    default: return fail(ctx, CODE_UNSUPPORTED, "no matrix product for %s", dtype_name(gemm->a.dtype));
    }
    Job job = {gemm, scratch, (gemm->m + ROWS - 1) / ROWS, (gemm->n + COLS - 1) / COLS};
    pool_run(pool, gemm->batch * job.row_blocks * job.col_blocks, body, &job);
    return CODE_OK;
}
