/* Rotary position embedding over strided tensors. */
#include "cpu/rope.h"

#include <string.h>

enum { PART_ROWS = 64 };
enum { X, COS, SIN, OUT, VIEWS };

typedef struct Rope {
    const char *data[VIEWS];
    DType dtype;
    int rank;                                                       /* of the rows: dimensions but the last */
    int64_t shape[MAX_RANK], strides[VIEWS][MAX_RANK], step[VIEWS]; /* elements; step: along the row */
    int64_t rows, n;
    bool interleaved;
    RopeRow fast; /* NULL: rows are not contiguous f32 */
} Rope;

static double load(const Rope *r, const char *data, int64_t i) {
    return r->dtype == DTYPE_F64 ? ((const double *)(const void *)data)[i] : (double)load_f32(data, r->dtype, i);
}

/* A result of eager: rounded to the type. Exact operands of f32 or less make the double product and sum round only
 * here. */
static double rounded(DType dtype, double value) {
    return dtype == DTYPE_F64 ? value : (double)round_f32(dtype, (float)value);
}

static void row_any(const Rope *r, const char *const at[VIEWS]) {
    int64_t h = r->n / 2;
    char *out = (char *)(uintptr_t)at[OUT];
    for (int64_t i = 0; i < r->n; i++) {
        bool first = r->interleaved ? i % 2 == 0 : i < h;
        int64_t partner = r->interleaved ? (first ? i + 1 : i - 1) : (first ? i + h : i - h);
        double x = load(r, at[X], i * r->step[X]), y = load(r, at[X], partner * r->step[X]);
        double a = rounded(r->dtype, x * load(r, at[COS], i * r->step[COS]));
        double b = rounded(r->dtype, (first ? -y : y) * load(r, at[SIN], i * r->step[SIN]));
        if (r->dtype == DTYPE_F64)
            ((double *)(void *)out)[i * r->step[OUT]] = a + b;
        else
            store_f32(out, r->dtype, i * r->step[OUT], (float)(a + b));
    }
}

static void run_part(void *arg, int64_t part, int thread) {
    (void)thread;
    const Rope *r = arg;
    int64_t size = (int64_t)dtype_size(r->dtype), index[MAX_RANK], rest = part * PART_ROWS;
    const char *at[VIEWS];
    memcpy(at, r->data, sizeof at);
    for (int d = r->rank - 1; d >= 0; d--) {
        index[d] = rest % r->shape[d];
        rest /= r->shape[d];
        for (int v = 0; v < VIEWS; v++) at[v] += index[d] * r->strides[v][d] * size;
    }
    int64_t end = min_i64((part + 1) * PART_ROWS, r->rows);
    for (int64_t row = part * PART_ROWS; row < end; row++) {
        if (r->fast)
            r->fast((float *)(uintptr_t)at[OUT], (const float *)(const void *)at[X],
                    (const float *)(const void *)at[COS], (const float *)(const void *)at[SIN], r->n, r->interleaved);
        else
            row_any(r, at);
        for (int d = r->rank - 1; d >= 0; d--) { /* to the next row */
            bool carry = ++index[d] == r->shape[d];
            for (int v = 0; v < VIEWS; v++) at[v] += r->strides[v][d] * (carry ? 1 - r->shape[d] : 1) * size;
            if (!carry) break;
            index[d] = 0;
        }
    }
}

Code rope_run(KernelCall *call) {
    const Tensor *out = &call->out[0];
    Rope r = {.dtype = out->dtype, .rank = out->rank - 1, .rows = 1, .n = out->shape[out->rank - 1]};
    if (!dtype_is_float(r.dtype)) return fail(call->ctx, CODE_UNSUPPORTED, "no rope for %s", dtype_name(r.dtype));
    bool unit = true;
    for (int v = 0; v < VIEWS; v++) {
        const Tensor *t = v == OUT ? out : &call->in[v];
        int shift = out->rank - t->rank;
        r.data[v] = t->data;
        for (int d = 0; d < t->rank; d++) {
            int64_t stride = t->shape[d] == 1 ? 0 : t->strides[d];
            if (d + shift < r.rank)
                r.strides[v][d + shift] = stride;
            else
                r.step[v] = stride;
        }
        unit = unit && r.step[v] == 1;
    }
    for (int d = 0; d < r.rank; d++) r.rows *= r.shape[d] = out->shape[d];
    if (r.rows * r.n == 0) return CODE_OK;
    r.interleaved = node_int(call->node, ATTR_interleaved);
    r.fast = r.dtype == DTYPE_F32 && unit && cpu_has_avx2() ? rope_row_avx2() : NULL;
    pool_run(call->pool, (r.rows + PART_ROWS - 1) / PART_ROWS, run_part, &r);
    return CODE_OK;
}
