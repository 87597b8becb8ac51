/* The operator quantised_linear: one row, few rows, many rows. */
#include "cpu/quantised.h"

#include <string.h>

#include "cpu/gemm.h"

enum { FIXED = 5, PART_BYTES = 96 << 10, LEAST_ROWS = 8 };

static Quantised weight_of(const KernelCall *call) {
    const Tensor *q = &call->in[1], *scales = &call->in[2], *zeros = &call->in[3];
    int64_t group = node_int(call->node, ATTR_group), k = call->in[0].shape[call->in[0].rank - 1];
    int bits = (int)node_int(call->node, ATTR_bits);
    return (Quantised){.q = q->data,
                       .scales = scales->data,
                       .zeros = call->n_in > 3 ? zeros->data : NULL,
                       .bits = bits,
                       .n = q->shape[0],
                       .k = k,
                       .row_bytes = bits == 8 ? k : quantised_blocks(k) * (QUANTISED_BLOCK / 2),
                       .group = group == 0 ? max_i64(k, 1) : group,
                       .groups = quantised_groups(k, group)};
}

/* --- few rows ----------------------------------------------------------------------------------------------------- */
static int64_t padded(int64_t k) { return quantised_blocks(k) * QUANTISED_BLOCK; }

/* Floats of scratch before the threads' buffers: activations, their sums. */
static int64_t input_floats(int64_t m, int64_t k, int64_t groups) {
    return round_up(m * padded(k), 16) + round_up(m * groups * QUANTISED_LANES, 16);
}

static int64_t part_rows(int64_t n, int64_t row_bytes) {
    int64_t rows = min_i64(PART_BYTES / max_i64(row_bytes, 1), (n + 15) / 16);
    return min_i64(round_up(max_i64(rows, 1), LEAST_ROWS), GEMM_MAX_SEGMENT);
}

static void add_sums(const Quantised *w, const float *x, float *sums) {
    memset(sums, 0, (size_t)(w->groups * QUANTISED_LANES) * sizeof *sums);
    for (int64_t g = 0; g < w->groups; g++)
        for (int64_t k = g * w->group, end = min_i64(k + w->group, w->k); k < end; k++)
            sums[g * QUANTISED_LANES + k % QUANTISED_LANES] += x[k];
}

static void prepare(const Quantised *w, const Tensor *x, QuantisedInput *input) {
    const GemmKernels *kernels = gemm_kernels();
    for (int64_t i = 0; i < input->rows; i++) {
        float *to = input->x + i * input->row;
        const char *from = (const char *)x->data + i * w->k * (int64_t)dtype_size(x->dtype);
        if (x->dtype == DTYPE_F32)
            memcpy(to, from, (size_t)w->k * sizeof *to);
        else
            kernels->widen(to, (const uint16_t *)(const void *)from, x->dtype, w->k);
        memset(to + w->k, 0, (size_t)(input->row - w->k) * sizeof *to);
        if (w->bits == 4 || w->zeros) add_sums(w, to, input->sums + i * w->groups * QUANTISED_LANES);
        if (w->bits == 4)
            for (int64_t k = 8; k < input->row; k += 8)
                if (k / 8 % 4) kernels->scale(to + k, to + k, 1.0f / (float)(1 << (4 * (k / 8 % 4))), 8);
    }
}

typedef struct Job {
    const Quantised *w;
    const QuantisedKernels *kernels;
    QuantisedInput x;
    GemmFinish *finish;
    int64_t rows; /* of the weight in a part */
    float *c;     /* a buffer for each thread */
} Job;

static void compute(void *arg, int64_t part, int thread) {
    const Job *job = arg;
    int64_t row = part * job->rows, rows = min_i64(job->rows, job->w->n - row);
    float *c = job->c + thread * job->rows * QUANTISED_ROWS;
    for (int64_t i = 0; i < job->x.rows; i++) gemm_start_row(job->finish, i, row, rows, c + i * rows);
    job->kernels->dots(job->w, row, rows, &job->x, c, rows);
    for (int64_t i = 0; i < job->x.rows; i++) gemm_finish_row(job->finish, i, row, rows, c + i * rows);
}

static void run_few(const KernelCall *call, const Quantised *w, GemmFinish *finish, int64_t m) {
    float *scratch = call->scratch;
    Job job = {.w = w,
               .kernels = quantised_kernels(),
               .x = {m, padded(w->k), scratch, scratch + round_up(m * padded(w->k), 16)},
               .finish = finish,
               .rows = part_rows(w->n, w->row_bytes),
               .c = scratch + input_floats(m, w->k, w->groups)};
    bool small = w->n * w->row_bytes < 16 << 10;
    prepare(w, &call->in[0], &job.x);
    pool_run(small ? NULL : call->pool, (w->n + job.rows - 1) / job.rows, compute, &job);
}

/* --- many rows ---------------------------------------------------------------------------------------------------- */
static void load(const void *user, int64_t row, int64_t rows, int64_t k, int64_t depth, float *dst) {
    quantised_kernels()->widen(user, row, rows, k, depth, dst);
}

static void run_many(const KernelCall *call, const Quantised *w, GemmFinish *finish, int64_t m) {
    Gemm gemm = {.batch = 1,
                 .m = m,
                 .n = w->n,
                 .k = w->k,
                 .a = {call->in[0].data, call->in[0].dtype, w->k, 1},
                 .b = {w->q, DTYPE_I8, 1, w->row_bytes},
                 .load = load,
                 .user = w,
                 .finish = finish};
    gemm_turned_run(&gemm, call->pool, call->scratch);
}

Code quantised_linear_run(KernelCall *call) {
    Quantised w = weight_of(call);
    GemmFinish finish;
    int64_t m = w.k ? tensor_count(&call->in[0]) / w.k : w.n ? tensor_count(&call->out[0]) / w.n : 0;
    if (m * w.n == 0) return CODE_OK;
    TRY(gemm_finish_init(&finish, call, FIXED, call->n_in > 4 ? &call->in[4] : NULL));
    if (m <= QUANTISED_ROWS)
        run_few(call, &w, &finish, m);
    else
        run_many(call, &w, &finish, m);
    return ew_fail(call->ctx, (EwFault)atomic_load(&finish.fault));
}

int64_t quantised_linear_scratch(const Graph *g, const Node *node, int threads) {
    const Value *x = graph_value(g, node->operands[0]), *q = graph_value(g, node->operands[1]);
    const Value *scales = graph_value(g, node->operands[2]);
    int64_t m = 1, k = x->shape[x->rank - 1], row_bytes = q->rank == 2 ? k : q->shape[1] * q->shape[2];
    for (int d = 0; d + 1 < x->rank; d++) m *= x->shape[d];
    if (m > QUANTISED_ROWS) return gemm_turned_scratch(1, m, q->shape[0], k, threads);
    return (input_floats(m, k, scales->shape[1]) + part_rows(q->shape[0], row_bytes) * QUANTISED_ROWS * threads) *
           (int64_t)sizeof(float);
}
