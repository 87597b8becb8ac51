/* softmax and log_softmax. Rows along the last dimension of f32 are done where they lie; others go through a buffer. */
#include "cpu/norm_rows.h"

#include <math.h>

enum { PART_ELEMENTS = 8192 };

typedef struct Softmax {
    const Tensor *x, *out;
    int64_t n, inner, rows, part_rows;
    bool log;
    const RowKernels *kernels;
    char *scratch;
} Softmax;

static void row_f32(const Softmax *s, float *out, const float *x) {
    float max = s->kernels->max(x, s->n);
    float sum = s->kernels->exp_sum(s->log ? NULL : out, x, max, s->n);
    if (!s->log)
        s->kernels->divide(out, out, sum, s->n);
    else
        s->kernels->normalize(out, x, max, 1.0f, NULL, NULL, s->n),
            s->kernels->normalize(out, out, logf(sum), 1.0f, NULL, NULL, s->n);
}

static void row_f64(const Softmax *s, double *out, const double *x, int64_t step) {
    double max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < s->n; i++) max = x[i * step] > max ? x[i * step] : max;
    for (int64_t i = 0; i < s->n; i++) sum += exp(x[i * step] - max);
    double log_sum = log(sum);
    for (int64_t i = 0; i < s->n; i++) {
        double d = x[i * step] - max;
        out[i * step] = s->log ? d - log_sum : exp(d) / sum;
    }
}

static void row_buffered(const Softmax *s, int64_t at, float *row) {
    const Tensor *x = s->x, *out = s->out;
    for (int64_t i = 0; i < s->n; i++) row[i] = load_f32(x->data, x->dtype, at + i * s->inner);
    row_f32(s, row, row);
    for (int64_t i = 0; i < s->n; i++) store_f32(out->data, out->dtype, at + i * s->inner, row[i]);
}

static void run_part(void *arg, int64_t part, int thread) {
    const Softmax *s = arg;
    float *buffer = (float *)(void *)(s->scratch + thread * round_up(s->n * (int64_t)sizeof(float), 64));
    int64_t end = min_i64((part + 1) * s->part_rows, s->rows);
    for (int64_t row = part * s->part_rows; row < end; row++) {
        int64_t at = row / s->inner * s->inner * s->n + row % s->inner;
        if (s->x->dtype == DTYPE_F64)
            row_f64(s, (double *)s->out->data + at, (const double *)s->x->data + at, s->inner);
        else if (s->x->dtype == DTYPE_F32 && s->inner == 1)
            row_f32(s, (float *)s->out->data + at, (const float *)s->x->data + at);
        else
            row_buffered(s, at, buffer);
    }
}

int64_t softmax_scratch(const Graph *g, const Node *node, int threads) {
    const Value *x = graph_value(g, node->operands[0]);
    int64_t n = x->rank ? x->shape[node_int(node, ATTR_dim)] : 1;
    return round_up(n * (int64_t)sizeof(float), 64) * threads;
}

Code softmax_run(KernelCall *call) {
    const Tensor *x = &call->in[0];
    if (!dtype_is_float(x->dtype)) return fail(call->ctx, CODE_UNSUPPORTED, "no softmax for %s", dtype_name(x->dtype));
    Softmax s = {.x = x, .out = &call->out[0], .n = 1, .inner = 1, .log = call->node->op == OP_log_softmax};
    int dim = (int)node_int(call->node, ATTR_dim);
    if (tensor_count(x) == 0) return CODE_OK;
    if (x->rank) s.n = x->shape[dim];
    for (int d = dim + 1; d < x->rank; d++) s.inner *= x->shape[d];
    s.rows = tensor_count(x) / s.n;
    s.part_rows = max_i64(1, PART_ELEMENTS / s.n);
    s.kernels = row_kernels();
    s.scratch = call->scratch;
    pool_run(call->pool, (s.rows + s.part_rows - 1) / s.part_rows, run_part, &s);
    return CODE_OK;
}
