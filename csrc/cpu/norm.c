/* layer_norm, rms_norm, group_norm. Means and variances in two passes over the row, in f32 (several chains) or f64. */
#include "cpu/norm_rows.h"

#include <math.h>
#include <string.h>

enum { PART_ELEMENTS = 8192 };

typedef struct Norm {
    const Tensor *x, *w, *b, *residual; /* NULL: absent */
    const Tensor *out, *total;          /* total: x + residual, or NULL */
    bool rms;
    double eps;
    int64_t n, rows, part_rows; /* n: elements of a row */
    int64_t channels, inner;    /* group_norm: of a row, and elements a channel */
    const RowKernels *kernels;
    const float *w32, *b32; /* w and b as f32 */
    char *scratch;          /* the threads' */
} Norm;

static const float *row_of(const Tensor *t, int64_t row, int64_t n, float *buffer) {
    if (t->dtype == DTYPE_F32) return (const float *)t->data + row * n;
    for (int64_t i = 0; i < n; i++) buffer[i] = load_f32(t->data, t->dtype, row * n + i);
    return buffer;
}

/* Mean and 1 / standard deviation of x, or 0 and 1 / root mean square. */
static float moments(const Norm *norm, const float *x, int64_t n, float *factor) {
    float mean = norm->rms ? 0 : norm->kernels->sum(x, n) / (float)n;
    *factor = 1.0f / sqrtf(norm->kernels->sum_squares(x, mean, n) / (float)n + (float)norm->eps);
    return mean;
}

/* x + residual, rounded to the type of x. */
static const float *add_residual(const Norm *norm, const float *x, int64_t row, float *buffer) {
    const Tensor *total = norm->total;
    DType dtype = norm->x->dtype;
    bool direct = total && dtype == DTYPE_F32;
    float *sum = direct ? (float *)total->data + row * norm->n : buffer;
    norm->kernels->add(sum, x, row_of(norm->residual, row, norm->n, buffer + norm->n), norm->n);
    if (dtype == DTYPE_F32) return sum;
    for (int64_t i = 0; i < norm->n; i++) {
        sum[i] = round_f32(dtype, sum[i]);
        if (total) store_f32(total->data, dtype, row * norm->n + i, sum[i]);
    }
    return sum;
}

static void row_f32(const Norm *norm, int64_t row, float *buffer) {
    DType dtype = norm->x->dtype;
    const float *x = row_of(norm->x, row, norm->n, buffer);
    if (norm->residual) x = add_residual(norm, x, row, buffer);
    float factor, mean = moments(norm, x, norm->n, &factor);
    float *out = dtype == DTYPE_F32 ? (float *)norm->out->data + row * norm->n : buffer;
    norm->kernels->normalize(out, x, mean, factor, norm->w32, norm->b32, norm->n);
    for (int64_t i = 0; dtype != DTYPE_F32 && i < norm->n; i++)
        store_f32(norm->out->data, dtype, row * norm->n + i, out[i]);
}

static double moments_f64(const Norm *norm, const double *x, const double *residual, int64_t n, double *factor) {
    double mean = 0, squares = 0;
    for (int64_t i = 0; !norm->rms && i < n; i++) mean += residual ? x[i] + residual[i] : x[i];
    mean /= (double)n;
    for (int64_t i = 0; i < n; i++) {
        double d = (residual ? x[i] + residual[i] : x[i]) - mean;
        squares += d * d;
    }
    *factor = 1 / sqrt(squares / (double)n + norm->eps);
    return mean;
}

static void row_f64(const Norm *norm, int64_t row) {
    int64_t at = row * norm->n;
    const double *x = (const double *)norm->x->data + at, *w = norm->w ? norm->w->data : NULL,
                 *b = norm->b ? norm->b->data : NULL;
    const double *residual = norm->residual ? (const double *)norm->residual->data + at : NULL;
    double *out = (double *)norm->out->data + at, *total = norm->total ? (double *)norm->total->data + at : NULL;
    double factor, mean = moments_f64(norm, x, residual, norm->n, &factor);
    for (int64_t i = 0; i < norm->n; i++) {
        double v = residual ? x[i] + residual[i] : x[i];
        if (total) total[i] = v;
        v = (v - mean) * factor;
        if (w) v *= w[i];
        out[i] = b ? v + b[i] : v;
    }
}

static float *thread_buffer(const Norm *norm, int thread) {
    return (float *)(void *)(norm->scratch + thread * round_up(2 * norm->n * (int64_t)sizeof(float), 64));
}

static void run_rows(void *arg, int64_t part, int thread) {
    const Norm *norm = arg;
    int64_t end = min_i64((part + 1) * norm->part_rows, norm->rows);
    for (int64_t row = part * norm->part_rows; row < end; row++) {
        if (norm->x->dtype == DTYPE_F64)
            row_f64(norm, row);
        else
            row_f32(norm, row, thread_buffer(norm, thread));
    }
}

/* A row is a group; every channel of it has its own w and b. */
static void run_group(void *arg, int64_t row, int thread) {
    const Norm *norm = arg;
    int64_t groups = norm->w || norm->b ? norm->x->shape[1] / norm->channels : 1, first = row % groups * norm->channels;
    if (norm->x->dtype == DTYPE_F64) {
        const double *x = (const double *)norm->x->data + row * norm->n;
        double *out = (double *)norm->out->data + row * norm->n, factor,
               mean = moments_f64(norm, x, NULL, norm->n, &factor);
        for (int64_t i = 0; i < norm->n; i++) {
            int64_t c = first + i / norm->inner;
            double v = (x[i] - mean) * factor;
            if (norm->w) v *= ((const double *)norm->w->data)[c];
            out[i] = norm->b ? v + ((const double *)norm->b->data)[c] : v;
        }
        return;
    }
    DType dtype = norm->x->dtype;
    float *buffer = thread_buffer(norm, thread);
    const float *x = row_of(norm->x, row, norm->n, buffer);
    float factor, mean = moments(norm, x, norm->n, &factor);
    float *out = dtype == DTYPE_F32 ? (float *)norm->out->data + row * norm->n : buffer;
    for (int64_t c = 0; c < norm->channels; c++) {
        float scale = norm->w32 ? factor * norm->w32[first + c] : factor, shift = norm->b32 ? norm->b32[first + c] : 0;
        int64_t at = c * norm->inner;
        norm->kernels->normalize(out + at, x + at, mean, scale, NULL, NULL, norm->inner);
        if (norm->b32)
            for (int64_t i = 0; i < norm->inner; i++) out[at + i] += shift;
    }
    for (int64_t i = 0; dtype != DTYPE_F32 && i < norm->n; i++)
        store_f32(norm->out->data, dtype, row * norm->n + i, out[i]);
}

static int64_t scratch_bytes(int64_t n, int64_t parameters, int threads) {
    int64_t size = (int64_t)sizeof(float);
    return 2 * round_up(parameters * size, 64) + threads * round_up(2 * n * size, 64);
}

int64_t norm_scratch(const Graph *g, const Node *node, int threads) {
    const Value *x = graph_value(g, node->operands[0]);
    if (x->dtype == DTYPE_F64) return 0;
    int64_t n = 1;
    if (node->op == OP_group_norm) {
        if (x->dtype == DTYPE_F32) return 0;
        for (int d = 1; d < x->rank; d++) n *= x->shape[d];
        return scratch_bytes(n / node_int(node, ATTR_groups), x->shape[1], threads);
    }
    for (int64_t d = x->rank - node_int(node, ATTR_axes); d < x->rank; d++) n *= x->shape[d];
    return scratch_bytes(n, n, threads);
}

static const Tensor *present(const KernelCall *call, uint32_t k) {
    return k < call->n_in && call->in[k].data ? &call->in[k] : NULL;
}

static const float *as_f32(const Tensor *t, float *buffer) {
    return t && t->dtype != DTYPE_F64 ? row_of(t, 0, tensor_count(t), buffer) : NULL;
}

static Code run(KernelCall *call, Norm *norm, int64_t parameters, PoolBody body) {
    norm->x = &call->in[0];
    norm->out = &call->out[0];
    norm->eps = node_float(call->node, ATTR_eps);
    norm->kernels = row_kernels();
    if (!dtype_is_float(norm->x->dtype))
        return fail(call->ctx, CODE_UNSUPPORTED, "no norm for %s", dtype_name(norm->x->dtype));
    if (norm->rows * norm->n == 0) return CODE_OK;
    int64_t room = norm->x->dtype == DTYPE_F32 ? 0 : round_up(parameters * (int64_t)sizeof(float), 64);
    char *scratch = call->scratch;
    norm->w32 = as_f32(norm->w, (float *)(void *)scratch);
    norm->b32 = as_f32(norm->b, (float *)(void *)(scratch + room));
    norm->scratch = scratch + 2 * room;
    norm->part_rows = body == run_group ? 1 : max_i64(1, PART_ELEMENTS / norm->n);
    pool_run(call->pool, (norm->rows + norm->part_rows - 1) / norm->part_rows, body, norm);
    return CODE_OK;
}

static Code run_trailing(KernelCall *call, Norm *norm) {
    const Tensor *x = &call->in[0];
    norm->n = norm->rows = 1;
    int64_t split = x->rank - node_int(call->node, ATTR_axes);
    for (int64_t d = 0; d < x->rank; d++) *(d < split ? &norm->rows : &norm->n) *= x->shape[d];
    norm->total = norm->residual && call->n_out > 1 && call->out[1].data ? &call->out[1] : NULL;
    return run(call, norm, norm->n, run_rows);
}

Code layer_norm_run(KernelCall *call) {
    Norm norm = {.w = present(call, 1), .b = present(call, 2), .residual = present(call, 3)};
    return run_trailing(call, &norm);
}

Code rms_norm_run(KernelCall *call) {
    Norm norm = {.rms = true, .w = present(call, 1), .residual = present(call, 2)};
    return run_trailing(call, &norm);
}

Code group_norm_run(KernelCall *call) {
    const Tensor *x = &call->in[0];
    int64_t groups = node_int(call->node, ATTR_groups), spatial = 1;
    Norm norm = {.w = present(call, 1), .b = present(call, 2)};
    for (int d = 2; d < x->rank; d++) spatial *= x->shape[d];
    norm.channels = x->shape[1] / groups;
    norm.inner = spatial;
    norm.n = norm.channels * spatial;
    norm.rows = x->shape[0] * groups;
    return run(call, &norm, x->shape[1], run_group);
}
