/* Attention in one sweep over the keys: blocks of 48 queries against blocks of 96 keys, scores never leave the cache.
 * Scores are kept transposed, [key][query], so that the softmax runs down the lanes, and both products use the GEMM's
 * tiles on k and v as they lie. Few queries (decoding): the heads that share a key head form one block. */
#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/norm_rows.h"

#include <math.h>
#include <string.h>

enum { ROWS = ATTENTION_ROWS, KEYS = ATTENTION_KEYS, FEW_ROWS = 3 };

typedef struct Attention {
    const Tensor *q, *k, *v, *mask, *out;
    int64_t mask_strides[4];
    int64_t batch, heads, groups, queries, keys, depth, width; /* width: of v */
    int64_t padded;                                            /* width, up to whole panels */
    int64_t block_heads, block_queries, blocks;                /* of a part; blocks of queries a head */
    bool causal, safe;
    double scale;
    const GemmKernels *kernels;
    GemmPair *pair; /* or NULL */
    AttentionSoftmax softmax;
    AttentionAverage average;
    char *scratch;
    int64_t scratch_bytes; /* a thread's */
} Attention;

static void softmax_portable(AttentionBlock *b, int64_t rows, int64_t keys, float scale) {
    for (int64_t r = 0; r < rows; r++) {
        float max = b->max[r], sum = 0;
        for (int64_t t = 0; t < keys; t++) {
            float s = b->scores[t][r] * scale;
            if (b->masked) s += b->mask[t][r];
            if (b->causal && t > b->last[r]) s = -INFINITY;
            b->scores[t][r] = s;
            max = s > max ? s : max;
        }
        float shift = max == -INFINITY ? 0 : max;
        for (int64_t t = 0; t < keys; t++) sum += b->scores[t][r] = expf(b->scores[t][r] - shift);
        b->decay[r] = expf(b->max[r] - shift);
        b->max[r] = max;
        b->sum[r] = b->sum[r] * b->decay[r] + sum;
    }
}

/* One part: rows are (head, query) pairs of one key head. */
typedef struct Part {
    const Attention *at;
    int64_t b, group, head, query, rows, row_queries;
    float *q_columns, *keys, *values, *out; /* [depth][48], [96][depth], [96][padded], [48][padded] */
    AttentionBlock *block;
} Part;

static int64_t scratch_floats(int64_t depth, int64_t padded) {
    return (int64_t)(sizeof(AttentionBlock) / sizeof(float)) + (ROWS + KEYS) * (depth + padded) + 64;
}

static int64_t offset4(const Tensor *t, int64_t a, int64_t b, int64_t c) {
    return a * t->strides[0] + b * t->strides[1] + c * t->strides[2];
}

static int64_t head_of(const Part *p, int64_t row) { return p->head + row / p->row_queries; }
static int64_t query_of(const Part *p, int64_t row) { return p->query + row % p->row_queries; }

static void load_queries(Part *p) {
    const Tensor *q = p->at->q;
    int64_t depth = p->at->depth;
    bool one_stride = p->rows == p->row_queries || p->row_queries == 1;
    if (q->dtype == DTYPE_F32 && q->strides[3] == 1 && one_stride) {
        int64_t stride = p->row_queries == 1 ? q->strides[1] : q->strides[2];
        const float *from = (const float *)q->data + offset4(q, p->b, p->head, p->query);
        p->at->kernels->interleave((int)p->rows, ROWS, depth, from, stride, p->q_columns);
        return;
    }
    if (p->rows < ROWS) memset(p->q_columns, 0, (size_t)(depth * ROWS) * sizeof(float));
    for (int64_t r = 0; r < p->rows; r++) {
        int64_t from = offset4(q, p->b, head_of(p, r), query_of(p, r));
        for (int64_t d = 0; d < depth; d++)
            p->q_columns[d * ROWS + r] = load_f32(q->data, q->dtype, from + d * q->strides[3]);
    }
}

/* Rows first.. of k or v as f32 with unit stride and rows padded to `padded`: in place if they lie so, else copied. */
static const float *load_rows(const Tensor *t, const Part *p, int64_t first, int64_t count, int64_t padded, float *copy,
                              int64_t *stride) {
    int64_t from = offset4(t, p->b, p->group, first), size = t->shape[3];
    if (t->dtype == DTYPE_F32 && t->strides[3] == 1 && size == padded) {
        *stride = t->strides[2];
        return (const float *)t->data + from;
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < padded; d++)
            copy[i * padded + d] =
                d < size ? load_f32(t->data, t->dtype, from + i * t->strides[2] + d * t->strides[3]) : 0.0f;
    *stride = padded;
    return copy;
}

static float mask_value(const Tensor *mask, int64_t i) {
    if (mask->dtype == DTYPE_BOOL) return ((const uint8_t *)mask->data)[i] ? 0.0f : -INFINITY;
    return load_f32(mask->data, mask->dtype, i);
}

/* The mask of the block, transposed; block->masked says whether it does anything. Returns false if a bool mask hides
 * all. */
static bool load_mask(Part *p, int64_t first, int64_t count) {
    const Attention *at = p->at;
    const Tensor *mask = at->mask;
    const int64_t *strides = at->mask_strides;
    AttentionBlock *block = p->block;
    bool visible = mask->dtype != DTYPE_BOOL, plain = true;
    bool same = strides[1] == 0 && strides[2] == 0; /* for all rows, as padding masks are */
    for (int64_t r = 0; r < (same ? 1 : p->rows); r++) {
        int64_t from =
            p->b * strides[0] + head_of(p, r) * strides[1] + query_of(p, r) * strides[2] + first * strides[3];
        float *row = block->staged[r];
        if (mask->dtype == DTYPE_F32 && strides[3] == 1) {
            memcpy(row, (const float *)mask->data + from, (size_t)count * sizeof *row);
        } else {
            for (int64_t t = 0; t < count; t++) row[t] = mask_value(mask, from + t * strides[3]);
        }
        int zeros = 0;
        for (int64_t t = 0; t < count; t++) zeros += row[t] == 0;
        visible |= zeros > 0;
        plain &= zeros == count;
    }
    if (!visible) return false;
    block->masked = !plain;
    if (plain) return true;
    if (!same) at->kernels->interleave((int)p->rows, ROWS, count, block->staged[0], KEYS, block->mask[0]);
    for (int64_t t = 0; same && t < count; t++)
        for (int64_t r = 0; r < ROWS; r++) block->mask[t][r] = block->staged[0][t];
    return true;
}

/* Widens `keys` by those that a row of the mask may see; without a mask, or with one that lies otherwise: all. */
static void see_row(const Attention *at, int64_t b, int64_t head, int64_t query, int64_t end, AttentionKeys *keys) {
    const Tensor *mask = at->mask;
    const int64_t *strides = at->mask_strides;
    if (!mask || strides[3] != 1 || (mask->dtype != DTYPE_BOOL && mask->dtype != DTYPE_F32)) {
        *keys = (AttentionKeys){0, end, false};
        return;
    }
    int64_t from = b * strides[0] + head * strides[1] + query * strides[2];
    attention_see(keys, (const char *)mask->data + from * (int64_t)dtype_size(mask->dtype), mask->dtype, end);
}

/* c = a * b, or += with `add`, for panels of 16 columns that lie side by side in b. */
static void product(const Attention *at, int64_t rows, int64_t k, const float *a, int64_t a_row, int64_t a_k,
                    const float *b, int64_t b_row, int64_t panels, float *c, int64_t c_row, bool add) {
    int64_t j = 0;
    for (; at->pair && j + 1 < panels; j += 2)
        for (int64_t i = 0, tall; i < rows; i += tall) {
            const float *from = a + i * a_row;
            tall = gemm_tall(rows - i);
            at->pair((int)tall, k, from, a_row, a_k, b + j * GEMM_COLS, b_row, GEMM_COLS, c + i * c_row + j * GEMM_COLS,
                     c_row, add);
        }
    for (; j < panels; j++)
        for (int64_t i = 0; i < rows; i += GEMM_ROWS)
            at->kernels->tile((int)min_i64(GEMM_ROWS, rows - i), k, a + i * a_row, a_row, a_k, b + j * GEMM_COLS, b_row,
                              c + i * c_row + j * GEMM_COLS, c_row, add);
}

/* Blocks of keys from `first` on, up to `end`. */
static void sweep_blocks(Part *p, int64_t first, int64_t end) {
    const Attention *at = p->at;
    AttentionBlock *block = p->block;
    int64_t panels = (p->rows + GEMM_COLS - 1) / GEMM_COLS, columns = at->padded;
    for (; first < end; first += KEYS) {
        int64_t count = min_i64(KEYS, end - first), k_row, v_row;
        if (at->mask && !load_mask(p, first, count)) continue;
        const float *k = load_rows(at->k, p, first, count, at->depth, p->keys, &k_row);
        product(at, count, at->depth, k, k_row, 1, p->q_columns, ROWS, panels, block->scores[0], ROWS, false);
        block->causal = at->causal && first + count - 1 > p->query;
        for (int64_t r = 0; block->causal && r < ROWS; r++) block->last[r] = (int32_t)(query_of(p, r) - first);
        at->softmax(block, p->rows, count, (float)at->scale);
        for (int64_t r = 0; r < p->rows; r++) {
            float *row = p->out + r * columns;
            if (first > 0 && block->decay[r] != 1.0f) at->kernels->scale(row, row, block->decay[r], columns);
        }
        const float *v = load_rows(at->v, p, first, count, columns, p->values, &v_row);
        product(at, p->rows, count, block->scores[0], 1, ROWS, v, v_row, columns / GEMM_COLS, p->out, columns, true);
    }
}

static void sweep_keys(Part *p) {
    const Attention *at = p->at;
    AttentionBlock *block = p->block;
    int64_t end = at->causal ? min_i64(at->keys, p->query + p->row_queries) : at->keys;
    for (int64_t r = 0; r < ROWS; r++) block->max[r] = -INFINITY, block->sum[r] = 0;
    memset(p->out, 0, (size_t)(p->rows * at->padded) * sizeof(float));
    block->masked = false;
    AttentionKeys keys = {0, 0, false};
    bool same = at->mask_strides[1] == 0 && at->mask_strides[2] == 0;
    for (int64_t r = 0; r < (same ? 1 : p->rows); r++) see_row(at, p->b, head_of(p, r), query_of(p, r), end, &keys);
    int64_t first = keys.first / KEYS * KEYS; /* the same blocks as without a mask */
    sweep_blocks(p, first, keys.end);
    if (!keys.low) return;
    bool seen = true;
    for (int64_t r = 0; r < p->rows; r++) seen &= block->max[r] > ATTENTION_SEEN;
    if (seen) return;
    if (keys.end > first) sweep_blocks(p, keys.end, end);
    sweep_blocks(p, 0, keys.end > first ? first : end);
}

static void store_rows(const Part *p) {
    const Attention *at = p->at;
    const Tensor *out = at->out;
    for (int64_t r = 0; r < p->rows; r++) {
        float sum = p->block->sum[r], factor = 1.0f / sum;
        const float *row = p->out + r * at->padded;
        int64_t to = offset4(out, p->b, head_of(p, r), query_of(p, r)), step = out->strides[3];
        bool zero = sum == 0 && (at->safe || at->keys == 0);
        if (out->dtype == DTYPE_F32 && step == 1 && !zero) {
            at->kernels->scale((float *)out->data + to, row, factor, at->width);
            continue;
        }
        for (int64_t e = 0; e < at->width; e++)
            store_f32(out->data, out->dtype, to + e * step, zero ? 0.0f : row[e] * factor);
    }
}

static void run_part(void *arg, int64_t part, int thread) {
    const Attention *at = arg;
    Part p = {.at = at};
    int64_t share = at->heads / at->groups, head_blocks = (share + at->block_heads - 1) / at->block_heads;
    int64_t block = at->blocks - 1 - part % at->blocks; /* causal: the longest first */
    part /= at->blocks;
    int64_t head = part % head_blocks * at->block_heads;
    part /= head_blocks;
    p.group = part % at->groups;
    p.b = part / at->groups;
    p.head = p.group * share + head;
    p.query = block * at->block_queries;
    p.row_queries = min_i64(at->block_queries, at->queries - p.query);
    p.rows = p.row_queries * min_i64(at->block_heads, share - head);
    float *scratch = (float *)(void *)(at->scratch + at->scratch_bytes * thread);
    p.block = (AttentionBlock *)(void *)scratch;
    p.q_columns = scratch + round_up((int64_t)(sizeof(AttentionBlock) / sizeof(float)), 16);
    p.keys = p.q_columns + ROWS * at->depth;
    p.values = p.keys + KEYS * at->depth;
    p.out = p.values + KEYS * at->padded;
    load_queries(&p);
    sweep_keys(&p);
    store_rows(&p);
}

/* One query against keys [first, end): scores in memory, three passes. For decoding, when few rows share a key head.
 * Returns the largest score. */
static float weigh_keys(const Attention *at, int64_t b, int64_t h, int64_t s, int64_t first, int64_t end,
                        float *weights, float *out, float *sum) {
    const RowKernels *rows = row_kernels();
    int64_t group = h / (at->heads / at->groups), count = end - first;
    at->kernels->fill(weights, 0, count);
    at->kernels->dots(1, (const float *)at->q->data + offset4(at->q, b, h, s), 0, count,
                      (const float *)at->k->data + offset4(at->k, b, group, first), at->k->strides[2], at->depth,
                      weights, 0);
    at->kernels->scale(weights, weights, (float)at->scale, count);
    const int64_t *strides = at->mask_strides;
    int64_t from = b * strides[0] + h * strides[1] + s * strides[2] + first * strides[3];
    for (int64_t t = 0; at->mask && t < count; t++) weights[t] += mask_value(at->mask, from + t * strides[3]);
    float max = rows->max(weights, count);
    *sum = rows->exp_sum(weights, weights, max == -INFINITY ? 0 : max, count);
    at->average(out, weights, (const float *)at->v->data + offset4(at->v, b, group, first), at->v->strides[2], count,
                at->width);
    return max;
}

static void run_row(void *arg, int64_t part, int thread) {
    const Attention *at = arg;
    int64_t s = part % at->queries, h = part / at->queries % at->heads, b = part / at->queries / at->heads;
    int64_t end = at->causal ? min_i64(at->keys, s + 1) : at->keys;
    float *weights = (float *)(void *)(at->scratch + at->scratch_bytes * thread),
          *out = weights + round_up(at->keys, 16), sum = 0, max = -INFINITY;
    AttentionKeys keys = {0, 0, false};
    see_row(at, b, h, s, end, &keys);
    keys.first = keys.first / 8 * 8; /* the same lanes as without a mask */
    if (keys.end > keys.first) max = weigh_keys(at, b, h, s, keys.first, keys.end, weights, out, &sum);
    if (keys.end <= keys.first) at->kernels->fill(out, 0, at->width);
    if (keys.low && !(max > ATTENTION_SEEN)) weigh_keys(at, b, h, s, 0, end, weights, out, &sum);
    bool zero = sum == 0 && (at->safe || at->keys == 0);
    float *to = (float *)at->out->data + offset4(at->out, b, h, s);
    for (int64_t e = 0; e < at->width; e++) to[e * at->out->strides[3]] = zero ? 0.0f : out[e] / sum;
}

/* f64: a row at a time. */
static void run_row_f64(void *arg, int64_t part, int thread) {
    const Attention *at = arg;
    int64_t s = part % at->queries, h = part / at->queries % at->heads, b = part / at->queries / at->heads;
    int64_t group = h / (at->heads / at->groups), end = at->causal ? min_i64(at->keys, s + 1) : at->keys;
    double *weights = (double *)(void *)(at->scratch + at->scratch_bytes * thread), max = -INFINITY, sum = 0;
    const double *q = (const double *)at->q->data + offset4(at->q, b, h, s);
    for (int64_t t = 0; t < end; t++) {
        const double *k = (const double *)at->k->data + offset4(at->k, b, group, t);
        double dot = 0;
        for (int64_t d = 0; d < at->depth; d++) dot += q[d * at->q->strides[3]] * k[d * at->k->strides[3]];
        dot *= at->scale;
        if (at->mask) {
            int64_t i =
                b * at->mask_strides[0] + h * at->mask_strides[1] + s * at->mask_strides[2] + t * at->mask_strides[3];
            dot += at->mask->dtype == DTYPE_F64 ? ((const double *)at->mask->data)[i] : (double)mask_value(at->mask, i);
        }
        weights[t] = dot;
        max = dot > max ? dot : max;
    }
    double shift = max == -INFINITY ? 0 : max;
    for (int64_t t = 0; t < end; t++) sum += weights[t] = exp(weights[t] - shift);
    double *out = (double *)at->out->data + offset4(at->out, b, h, s);
    for (int64_t e = 0; e < at->width; e++) {
        const double *v = (const double *)at->v->data + offset4(at->v, b, group, 0) + e * at->v->strides[3];
        double total = 0;
        for (int64_t t = 0; t < end; t++) total += weights[t] * v[t * at->v->strides[2]];
        out[e * at->out->strides[3]] = sum == 0 && (at->safe || at->keys == 0) ? 0 : total / sum;
    }
}

static bool few_rows(int64_t heads, int64_t groups, int64_t queries) {
    return groups > 0 && heads / groups * queries <= FEW_ROWS;
}

int64_t attention_scratch(const Graph *g, const Node *node, int threads) {
    const Value *q = graph_value(g, node->operands[0]), *k = graph_value(g, node->operands[1]),
                *v = graph_value(g, node->operands[2]);
    if (k->dtype == DTYPE_F64) return round_up(k->shape[2] * (int64_t)sizeof(double), 64) * threads;
    int64_t block = scratch_floats(k->shape[3], round_up(v->shape[3], GEMM_COLS));
    int64_t row = few_rows(q->shape[1], k->shape[1], q->shape[2]) ? round_up(k->shape[2], 16) + v->shape[3] : 0;
    return round_up(max_i64(block, row) * (int64_t)sizeof(float), 64) * threads;
}

Code attention_run(KernelCall *call) {
    const Tensor *q = &call->in[0], *k = &call->in[1], *v = &call->in[2], *out = &call->out[0];
    const Tensor *mask = call->n_in > 3 && call->in[3].data ? &call->in[3] : NULL;
    Attention at = {.q = q,
                    .k = k,
                    .v = v,
                    .mask = mask,
                    .out = out,
                    .kernels = gemm_kernels(),
                    .pair = gemm_pair(),
                    .scratch = call->scratch};
    at.batch = q->shape[0], at.heads = q->shape[1], at.queries = q->shape[2], at.depth = q->shape[3];
    at.groups = k->shape[1], at.keys = k->shape[2], at.width = v->shape[3];
    at.causal = node_int(call->node, ATTR_causal);
    at.safe = node_int(call->node, ATTR_safe);
    at.scale = node_float(call->node, ATTR_scale);
    if (at.batch * at.heads * at.queries * at.width == 0) return CODE_OK;
    for (int d = 0; mask && d < mask->rank; d++)
        at.mask_strides[4 - mask->rank + d] = mask->shape[d] == 1 ? 0 : mask->strides[d];
    if (q->dtype == DTYPE_F64) {
        at.scratch_bytes = round_up(at.keys * (int64_t)sizeof(double), 64);
        pool_run(call->pool, at.batch * at.heads * at.queries, run_row_f64, &at);
        return CODE_OK;
    }
    if (!gemm_in_f32(q->dtype)) return fail(call->ctx, CODE_UNSUPPORTED, "no attention for %s", dtype_name(q->dtype));
    at.average = cpu_has_avx2() ? attention_average_avx2() : NULL;
    bool unit = q->strides[3] == 1 && k->strides[3] == 1 && v->strides[3] == 1;
    if (few_rows(at.heads, at.groups, at.queries) && q->dtype == DTYPE_F32 && unit && at.average) {
        at.scratch_bytes = round_up((round_up(at.keys, 16) + at.width) * (int64_t)sizeof(float), 64);
        pool_run(call->pool, at.batch * at.heads * at.queries, run_row, &at);
        return CODE_OK;
    }
    at.softmax = cpu_has_avx2() ? attention_softmax_avx2() : NULL;
    if (!at.softmax) at.softmax = softmax_portable;
    at.padded = round_up(at.width, GEMM_COLS);
    at.scratch_bytes = round_up(scratch_floats(at.depth, at.padded) * (int64_t)sizeof(float), 64);
    int64_t share = at.heads / at.groups;
    at.block_queries = min_i64(at.queries, ROWS);
    at.block_heads = min_i64(share, ROWS / at.block_queries);
    at.blocks = (at.queries + at.block_queries - 1) / at.block_queries;
    int64_t parts = at.batch * at.groups * ((share + at.block_heads - 1) / at.block_heads) * at.blocks;
    pool_run(call->pool, parts, run_part, &at);
    return CODE_OK;
}
