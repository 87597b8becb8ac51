/* The operator quantised_linear: one row, few rows, many rows; of bf16: gemm_bf16.c. */
#include "cpu/quantised.h"

#include <string.h>

#include "cpu/gemm.h"

enum { FIXED = 5, PART_BYTES = 96 << 10 };

static Quantised weight_of(const KernelCall *call) {
    const Tensor *q = &call->in[1];
    int64_t group = node_int(call->node, ATTR_group), k = call->in[0].shape[call->in[0].rank - 1];
    int bits = (int)node_int(call->node, ATTR_bits);
    return (Quantised){.q = q->data,
                       .scales = call->n_in > 2 ? call->in[2].data : NULL,
                       .zeros = call->n_in > 3 ? call->in[3].data : NULL,
                       .bits = bits,
                       .n = q->shape[0],
                       .k = k,
                       .row_bytes = bits == 8 ? k : quantised_blocks(k) * (QUANTISED_BLOCK / 2),
                       .group = group == 0 ? max_i64(k, 1) : group,
                       .groups = quantised_groups(k, group)};
}

static const Tensor *bias_of(const KernelCall *call) { return call->n_in > 4 ? &call->in[4] : NULL; }

static Gemm bf16_product(const KernelCall *call) {
    const Tensor *x = &call->in[0], *q = &call->in[1];
    int64_t k = x->shape[x->rank - 1];
    return (Gemm){.batch = 1,
                  .m = k ? tensor_count(x) / k : tensor_count(&call->out[0]) / max_i64(q->shape[0], 1),
                  .n = q->shape[0],
                  .k = k,
                  .a = {x->data, x->dtype, k, 1},
                  .b = {q->data, DTYPE_BF16, 1, q->shape[1]},
                  .rounding = GEMM_ROUNDS};
}

/* --- few rows ----------------------------------------------------------------------------------------------------- */
static int64_t padded(int64_t k) { return round_up(k, 2 * QUANTISED_BLOCK); }

/* Floats of scratch before the threads' buffers: activations, their sums. */
static int64_t input_floats(int64_t m, int64_t k, int64_t groups) {
    return round_up(m * padded(k), 16) + round_up(m * groups, 16);
}

/* Rows of each stream in a part: neighbouring parts go on where one ends. */
static int64_t part_rows(int64_t n, int64_t row_bytes) {
    int64_t rows = min_i64(PART_BYTES / max_i64(row_bytes, 1), (n + 15) / 16) / QUANTISED_STREAMS;
    return min_i64(max_i64(rows, 2), GEMM_MAX_SEGMENT);
}

static int64_t stream_rows(int64_t n) { return (n + QUANTISED_STREAMS - 1) / QUANTISED_STREAMS; }

static void prepare(const Quantised *w, const QuantisedDots *kernels, const Tensor *x, QuantisedInput *input) {
    for (int64_t i = 0; i < input->rows; i++) {
        float *to = input->x + i * input->row;
        const char *from = (const char *)x->data + i * w->k * (int64_t)dtype_size(x->dtype);
        if (x->dtype == DTYPE_F32)
            memcpy(to, from, (size_t)w->k * sizeof *to);
        else
            gemm_kernels()->widen(to, (const uint16_t *)(const void *)from, x->dtype, w->k);
        memset(to + w->k, 0, (size_t)(input->row - w->k) * sizeof *to);
        kernels->arrange(w, to, input->row, input->sums + i * w->groups);
    }
}

typedef struct Job {
    const Quantised *w;
    const QuantisedDots *kernels;
    QuantisedInput x;
    GemmFinish *finish;
    int64_t rows, stream; /* of the weight in a part of a stream, in a stream */
    float *c;             /* a buffer for each thread */
} Job;

static void compute(void *arg, int64_t part, int thread) {
    const Job *job = arg;
    int64_t first = part * job->rows, run = min_i64(job->rows, job->stream - first), width = QUANTISED_STREAMS * run;
    float *c = job->c + thread * QUANTISED_STREAMS * job->rows * QUANTISED_ROWS;
    for (int64_t i = 0; i < job->x.rows; i++)
        for (int64_t t = 0, row = first; t < QUANTISED_STREAMS; t++, row += job->stream)
            if (row < job->w->n) gemm_start_row(job->finish, i, row, run, c + i * width + t * run);
    job->kernels->dots(job->w, first, run, job->stream, &job->x, c, width);
    for (int64_t i = 0; i < job->x.rows; i++)
        for (int64_t t = 0, row = first; t < QUANTISED_STREAMS && row < job->w->n; t++, row += job->stream)
            gemm_finish_block(job->finish, i, 1, row, min_i64(run, job->w->n - row), c + i * width + t * run, width);
}

static Job make_job(const KernelCall *call, const Quantised *w, GemmFinish *finish, int64_t m, float *scratch) {
    Job job = {.w = w,
               .kernels = quantised_dots(),
               .x = {m, padded(w->k), scratch, scratch + round_up(m * padded(w->k), 16)},
               .finish = finish,
               .rows = part_rows(w->n, w->row_bytes),
               .stream = stream_rows(w->n),
               .c = scratch + input_floats(m, w->k, w->groups)};
    prepare(w, job.kernels, &call->in[0], &job.x);
    return job;
}

static int64_t parts_of(const Job *job) { return (job->stream + job->rows - 1) / job->rows; }

static void run_few(const KernelCall *call, const Quantised *w, GemmFinish *finish, int64_t m) {
    Job job = make_job(call, w, finish, m, call->scratch);
    bool small = w->n * w->row_bytes < 16 << 10;
    pool_run(small ? NULL : call->pool, parts_of(&job), compute, &job);
}

/* --- few rows, beside other products ------------------------------------------------------------------------------ */
/* At the beginning of the scratch. */
typedef struct Split {
    _Alignas(64) Quantised w;
    GemmFinish finish;
    Job job;
} Split;

static int64_t rows_of(const Value *x) {
    int64_t rows = 1;
    for (int d = 0; d + 1 < x->rank; d++) rows *= x->shape[d];
    return rows;
}

static int64_t row_bytes_of(const Value *q, int64_t k) { return q->rank == 2 ? k : q->shape[1] * q->shape[2]; }

int64_t quantised_linear_columns(const Graph *g, const Node *node) {
    const Value *x = graph_value(g, node->operands[0]), *q = graph_value(g, node->operands[1]);
    int64_t m = rows_of(x), k = x->shape[x->rank - 1];
    if (node_int(node, ATTR_bits) == 16) return k >= 1 ? gemm_turned_columns(m, q->shape[0]) : 0;
    bool few = m >= 1 && m <= QUANTISED_ROWS && k >= 1 && q->shape[0] >= 1;
    return few ? QUANTISED_STREAMS * part_rows(q->shape[0], row_bytes_of(q, k)) : 0;
}

Code quantised_linear_split(KernelCall *call, KernelParts *parts) {
    Split *s = call->scratch;
    Quantised w = weight_of(call);
    if (w.bits == 16) {
        Gemm gemm = bf16_product(call);
        return gemm_split(call, &gemm, FIXED, bias_of(call), parts);
    }
    s->w = w;
    TRY(gemm_finish_init(&s->finish, call, FIXED, bias_of(call)));
    s->job = make_job(call, &s->w, &s->finish, tensor_count(&call->in[0]) / s->w.k, (float *)(void *)(s + 1));
    *parts = (KernelParts){.count = parts_of(&s->job),
                           .work = 2 * s->w.n * s->w.row_bytes,
                           .body = compute,
                           .arg = &s->job,
                           .fault = &s->finish.fault};
    return CODE_OK;
}

/* --- many rows ---------------------------------------------------------------------------------------------------- */
static int64_t byte_of(const Quantised *w, int64_t column) { return w->bits == 8 ? column : column / 2; }

/* What is loaded next comes into the L2 while this is multiplied: the same rows' next columns, or the next rows. The
 * pieces are too short for the processor to see it coming. */
static void load(const void *user, int64_t row, int64_t rows, int64_t k, int64_t depth, float *dst) {
    const Quantised *w = user;
    quantised_dots()->widen(w, row, rows, k, depth, dst);
    bool ends = k + depth >= w->k;
    int64_t next = ends ? row + rows : row, begin = ends ? 0 : byte_of(w, k + depth);
    int64_t end = min_i64(begin + byte_of(w, GEMM_BLOCK_K), w->row_bytes);
    for (int64_t i = next; i < min_i64(next + rows, w->n); i++)
        for (const uint8_t *q = w->q + i * w->row_bytes, *at = q + begin; at < q + end; at += 64)
            __builtin_prefetch(at, 0, 2);
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
    if (w.bits == 16) {
        Gemm gemm = bf16_product(call);
        return gemm_call(call, &gemm, FIXED, bias_of(call), 0);
    }
    int64_t m = w.k ? tensor_count(&call->in[0]) / w.k : w.n ? tensor_count(&call->out[0]) / w.n : 0;
    if (m * w.n == 0) return CODE_OK;
    TRY(gemm_finish_init(&finish, call, FIXED, bias_of(call)));
    if (m <= QUANTISED_ROWS)
        run_few(call, &w, &finish, m);
    else
        run_many(call, &w, &finish, m);
    return ew_fail(call->ctx, (EwFault)atomic_load(&finish.fault));
}

int64_t quantised_linear_scratch(const Graph *g, const Node *node, int threads) {
    const Value *x = graph_value(g, node->operands[0]), *q = graph_value(g, node->operands[1]);
    int64_t m = rows_of(x), k = x->shape[x->rank - 1], row_bytes = row_bytes_of(q, k);
    if (node_int(node, ATTR_bits) == 16) return gemm_split_bytes() + gemm_bf16_scratch(m, q->shape[0], k, threads);
    if (m > QUANTISED_ROWS) return gemm_turned_scratch(1, m, q->shape[0], k, threads);
    int64_t groups = quantised_groups(k, node_int(node, ATTR_group));
    return (int64_t)sizeof(Split) + (input_floats(m, k, groups) +
                                     QUANTISED_STREAMS * part_rows(q->shape[0], row_bytes) * QUANTISED_ROWS * threads) *
                                        (int64_t)sizeof(float);
}
