/* The contraction, attention, norm, softmax, rope and conv kernels against plain sums in double, over random shapes,
 * strides and types; each run alone and on three threads must give the same bits. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "cpu/cpu.h"
#include "cpu/elementwise.h"
#include "graph/program.h"

static uint64_t seed = 1;
static uint32_t next_random(void) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 33);
}
static int64_t below(int64_t n) { return (int64_t)(next_random() % (uint64_t)n); }
static int64_t between(int64_t a, int64_t b) { return a + below(b - a + 1); }
static double unit(void) { return (double)next_random() / 1073741824.0 - 1.0; }
static DType pick_float(void) {
    static const DType types[] = {DTYPE_F32, DTYPE_F32, DTYPE_F32, DTYPE_F64, DTYPE_BF16, DTYPE_F16};
    return types[below(6)];
}

/* --- tensors
 * ------------------------------------------------------------------------------------------------------------- */
enum { MAX_MEMORY = 256 };
static void *memory[MAX_MEMORY];
static int n_memory;
static void *get(size_t size) {
    void *p = NULL;
    if (n_memory == MAX_MEMORY || posix_memalign(&p, 64, size + 64)) abort();
    memset(p, 0x5a, size + 64);
    return memory[n_memory++] = p;
}
static void free_all(void) {
    while (n_memory) free(memory[--n_memory]);
}

static double value_at(const Tensor *t, int64_t i) {
    switch (t->dtype) {
    case DTYPE_BOOL:
    case DTYPE_U8: return ((uint8_t *)t->data)[i];
    case DTYPE_I8: return ((int8_t *)t->data)[i];
    case DTYPE_I16: return ((int16_t *)t->data)[i];
    case DTYPE_I32: return ((int32_t *)t->data)[i];
    case DTYPE_I64: return (double)((int64_t *)t->data)[i];
    case DTYPE_F64: return ((double *)t->data)[i];
    default: return (double)load_f32(t->data, t->dtype, i);
    }
}
static void set_at(const Tensor *t, int64_t i, double v) {
    switch (t->dtype) {
    case DTYPE_BOOL:
    case DTYPE_U8: ((uint8_t *)t->data)[i] = (uint8_t)v; break;
    case DTYPE_I8: ((int8_t *)t->data)[i] = (int8_t)v; break;
    case DTYPE_I16: ((int16_t *)t->data)[i] = (int16_t)v; break;
    case DTYPE_I32: ((int32_t *)t->data)[i] = (int32_t)v; break;
    case DTYPE_I64: ((int64_t *)t->data)[i] = (int64_t)v; break;
    case DTYPE_F64: ((double *)t->data)[i] = v; break;
    default: store_f32(t->data, t->dtype, i, (float)v);
    }
}

/* Random values; `strided`: dimensions in any memory order, with gaps. */
static Tensor make(DType dtype, int rank, const int64_t *shape, bool strided) {
    Tensor t = {.dtype = dtype, .rank = (uint8_t)rank};
    int order[MAX_RANK];
    int64_t size = 1;
    for (int d = 0; d < rank; d++) order[d] = d;
    for (int d = rank - 1; strided && d > 0; d--) {
        int other = (int)below(d + 1), keep = order[d];
        order[d] = order[other], order[other] = keep;
    }
    for (int k = rank - 1; k >= 0; k--) {
        t.shape[order[k]] = shape[order[k]];
        t.strides[order[k]] = size;
        size *= shape[order[k]];
        if (strided && below(4) == 0) size += between(1, 3);
        if (strided && k == rank - 1 && below(4) == 0) t.strides[order[k]] = 2, size *= 2;
    }
    t.data = get((size_t)size * dtype_size(dtype));
    for (int64_t i = 0; i < size; i++)
        set_at(&t, i, dtype_class(dtype) == 'f' ? unit() : dtype == DTYPE_BOOL ? (double)below(2) : (double)below(7));
    return t;
}
#define MAKE(dtype, strided, ...)                                                                                      \
    make(dtype, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]){__VA_ARGS__}, strided)

static int64_t offset_of(const Tensor *t, const int64_t *index,
                         int rank) { /* index of a result of that rank; broadcasts */
    int64_t offset = 0;
    for (int d = 0; d < t->rank; d++) offset += t->shape[d] == 1 ? 0 : index[d + rank - t->rank] * t->strides[d];
    return offset;
}
static double at4(const Tensor *t, int64_t a, int64_t b, int64_t c, int64_t d) {
    return value_at(t, offset_of(t, (int64_t[]){a, b, c, d}, 4));
}
static void unflatten(int64_t i, const Tensor *t, int64_t *index) {
    for (int d = t->rank - 1; d >= 0; d--) index[d] = i % t->shape[d], i /= t->shape[d];
}
static double tolerance(DType dtype, double magnitude) {
    double eps = dtype == DTYPE_F64 ? 1e-13 : dtype == DTYPE_F32 ? 4e-7 : dtype == DTYPE_F16 ? 1.5e-3 : 1.2e-2;
    return eps * (magnitude + 0.05);
}
static bool close_to(double got, double want, double tolerated) {
    if (isnan(want)) return isnan(got);
    return got == want || fabs(got - want) <= tolerated;
}

/* --- running a kernel
 * ---------------------------------------------------------------------------------------------------- */
static Context ctx;
static Arena arena;
static Graph *graph;
static Pool *pool;
enum { THREADS = 3 };

typedef Code (*RunFn)(KernelCall *call);
typedef int64_t (*ScratchSize)(const Graph *g, const Node *node, int threads);
typedef struct Case {
    Node *node;
    Tensor in[8], out[2];
    uint32_t n_in, n_out;
} Case;

static void begin(Case *c, Op op, uint32_t n_in, const Tensor *in, uint32_t n_out, const Tensor *out) {
    ValueId operands[8];
    memset(c, 0, sizeof *c);
    arena_destroy(&arena);
    arena_init(&arena);
    NodeId id = NODE_NONE;
    Code code = graph_create(&ctx, &arena, &graph);
    for (uint32_t k = 0; k < n_in && code == CODE_OK; k++) {
        Type type = {in[k].dtype, in[k].rank, in[k].shape};
        c->in[k] = in[k];
        operands[k] = VALUE_NONE;
        if (!in[k].data) continue;
        code = graph_insert(&ctx, graph, NODE_NONE, OP_input, NULL, 0, &type, 1, -1, &id);
        if (code == CODE_OK) operands[k] = node_result(graph_node(graph, id), 0);
    }
    Type types[2];
    for (uint32_t k = 0; k < n_out; k++) types[k] = (Type){out[k].dtype, out[k].rank, out[k].shape}, c->out[k] = out[k];
    if (code == CODE_OK) code = graph_insert(&ctx, graph, NODE_NONE, op, operands, n_in, types, n_out, -1, &id);
    if (code != CODE_OK) abort();
    c->node = graph_node(graph, id);
    c->n_in = n_in, c->n_out = n_out;
}
static Attr *attr(Case *c, AttrName name) { return node_attr_mut(c->node, name); }

/* Alone into the result, then on three threads into a copy that must be equal. */
static void run(Case *c, RunFn fn, ScratchSize size, const void *prepared) {
    int64_t bytes = size ? size(graph, c->node, THREADS) : 0;
    char *scratch = get((size_t)bytes);
    KernelCall call = {.ctx = &ctx,
                       .node = c->node,
                       .in = c->in,
                       .out = c->out,
                       .n_in = c->n_in,
                       .n_out = c->n_out,
                       .scratch = scratch,
                       .prepared = prepared};
    CHECK_OK(&ctx, fn(&call));
    for (int64_t i = 0; i < 64; i++) CHECK((unsigned char)scratch[bytes + i] == 0x5a);
    Tensor other[2];
    for (uint32_t k = 0; k < c->n_out; k++) {
        int64_t span = 1;
        other[k] = c->out[k];
        for (int d = 0; d < other[k].rank; d++) span += (other[k].shape[d] - 1) * other[k].strides[d];
        if (tensor_count(&other[k]) == 0 || !other[k].data) continue;
        size_t all = (size_t)span * dtype_size(other[k].dtype);
        other[k].data = memcpy(get(all), c->out[k].data, all); /* gaps stay the same */
    }
    call.out = other;
    call.pool = pool;
    CHECK(pool_enter(pool));
    CHECK_OK(&ctx, fn(&call));
    pool_leave(pool);
    for (uint32_t k = 0; k < c->n_out; k++) {
        int64_t span = 1;
        if (tensor_count(&other[k]) == 0 || !other[k].data) continue;
        for (int d = 0; d < other[k].rank; d++) span += (other[k].shape[d] - 1) * other[k].strides[d];
        CHECK(memcmp(other[k].data, c->out[k].data, (size_t)span * dtype_size(other[k].dtype)) == 0);
    }
}

/* --- linear and matmul
 * ----------------------------------------------------------------------------------------------------- */
static int64_t pick_size(int64_t large) {
    static const int64_t sizes[] = {0, 1, 2, 5, 6, 7, 15, 16, 17, 33};
    return below(6) == 0 ? between(1, large) : sizes[below(10)];
}

static void test_linear(void) {
    DType dtype = below(4) == 0 ? (DType)(DTYPE_U8 + below(5)) : pick_float();
    int64_t m = pick_size(200), n = pick_size(below(4) ? 300 : 1200), k = pick_size(900);
    if (below(20) == 0) m = between(380, 500), n = pick_size(60), k = pick_size(250); /* A is read as it lies */
    bool bias = below(2), epilogue = below(2);
    Op op = (Op[]){OP_sub, OP_add, OP_neg}[below(3)];
    bool alone = epilogue && op == OP_neg;
    Tensor x = below(2)        ? MAKE(dtype, true, 2, m, k)
               : below(8) == 0 ? MAKE(dtype, true, k)
                               : MAKE(dtype, below(2), m, k);
    Tensor w = MAKE(dtype, below(2), n, k), b = bias ? MAKE(dtype, true, n) : (Tensor){0}, y = MAKE(dtype, true, n);
    int64_t shape[MAX_RANK];
    memcpy(shape, x.shape, sizeof shape);
    shape[x.rank - 1] = n;
    Tensor out = make(dtype, x.rank, shape, false);
    if (below(2)) y = make(dtype, x.rank, shape, below(2));
    Case c;
    begin(&c, OP_linear, epilogue && !alone ? 4 : 3, (Tensor[]){x, w, b, y}, 1, &out);
    int64_t words[STEP_WORDS];
    if (epilogue) {
        int turned = op == OP_add && below(2);
        step_encode(&(Step){.op = op, .dtype = dtype, .src = {turned, alone ? STEP_NONE : !turned, STEP_NONE}}, words);
        CHECK_OK(&ctx, attr_set_ints(&ctx, graph, attr(&c, ATTR_program), words, STEP_WORDS));
    }
    void *prepared = NULL;
    if (below(2) && (dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16)) {
        prepared = get((size_t)((n + 15) / 16 * 16 * k * 4 + 64));
        CHECK_OK(&ctx, linear_prepare(&ctx, c.node, c.in, NULL, prepared));
    }
    run(&c, linear_run, linear_scratch, prepared);
    int64_t index[MAX_RANK], count = tensor_count(&out);
    int bad = 0;
    for (int64_t i = 0; i < count; i += 1 + below(count / 200 + 1)) {
        unflatten(i, &out, index);
        double sum = bias ? value_at(&b, index[out.rank - 1] * b.strides[0]) : 0, magnitude = fabs(sum);
        double extra = epilogue && !alone ? value_at(&y, offset_of(&y, index, out.rank)) : 0;
        int64_t column = index[out.rank - 1];
        for (int64_t p = 0; p < k; p++) {
            index[out.rank - 1] = p;
            double product =
                value_at(&x, offset_of(&x, index, x.rank)) * value_at(&w, column * w.strides[0] + p * w.strides[1]);
            sum += product, magnitude += fabs(product);
        }
        index[out.rank - 1] = column;
        sum = alone ? -sum : op == OP_add ? sum + extra : sum - extra;
        if (dtype_is_int(dtype)) { /* wraps around */
            Tensor one = {.data = &(int64_t){0}, .dtype = dtype};
            if (dtype == DTYPE_I64)
                set_at(&one, 0, sum);
            else
                memcpy(one.data, &(int64_t){(int64_t)sum}, 8);
            bad += value_at(&out, i) != value_at(&one, 0);
        } else {
            bad += !close_to(value_at(&out, i), sum, tolerance(dtype, magnitude + fabs(extra)));
        }
    }
    CHECK_EQUAL(bad, 0);
}

/* Panels of a weight, rows of n in memory and, but for few rows of x, rows of k give the same bits. */
static void test_ways_agree(void) {
    int64_t kinds[] = {between(1, 6), between(7, 150), between(380, 460)}, m = kinds[below(3)], n = between(1, 300);
    int64_t k = below(4) ? between(1, 420) : 512 * between(1, 2); /* rows of x in the same sets of the cache */
    Tensor x = MAKE(DTYPE_F32, below(3) == 0, m, k), w = MAKE(DTYPE_F32, false, n, k), b = MAKE(DTYPE_F32, false, n);
    if (below(2)) b = (Tensor){0};
    Tensor out[3] = {MAKE(DTYPE_F32, false, m, n), MAKE(DTYPE_F32, false, m, n), MAKE(DTYPE_F32, false, m, n)};
    Case c;
    begin(&c, OP_linear, 3, (Tensor[]){x, w, b}, 1, &out[0]);
    run(&c, linear_run, linear_scratch, NULL);
    c.out[0] = out[1];
    void *prepared = get((size_t)((n + 15) / 16 * 16 * k * 4 + 64));
    CHECK_OK(&ctx, linear_prepare(&ctx, c.node, c.in, NULL, prepared));
    c.in[1].strides[0] = 1, c.in[1].strides[1] = n; /* not read any more: panels are */
    run(&c, linear_run, linear_scratch, prepared);
    float *rows = get((size_t)(n * k) * sizeof *rows);
    for (int64_t i = 0; i < n * k; i++) rows[i % k * n + i / k] = ((float *)w.data)[i];
    c.out[0] = out[2], c.in[1].data = rows;
    run(&c, linear_run, linear_scratch, NULL);
    CHECK(memcmp(out[1].data, out[2].data, (size_t)(m * n) * sizeof(float)) == 0);
    if (m > 6 && k > 1) CHECK(memcmp(out[0].data, out[1].data, (size_t)(m * n) * sizeof(float)) == 0);
}

static void test_matmul(void) {
    DType dtype = pick_float();
    int64_t m = pick_size(150), n = pick_size(300), k = pick_size(500), b0 = between(1, 3), b1 = between(1, 3);
    Tensor a = MAKE(dtype, below(2), below(3) ? b0 : 1, below(3) ? b1 : 1, m, k),
           b = MAKE(dtype, below(2), b0, below(3) ? b1 : 1, k, n);
    Tensor out = MAKE(dtype, false, b0, a.shape[1] == 1 ? b.shape[1] : a.shape[1], m, n);
    Case c;
    begin(&c, OP_matmul, 2, (Tensor[]){a, b}, 1, &out);
    run(&c, matmul_run, matmul_scratch, NULL);
    int bad = 0;
    int64_t index[4], count = tensor_count(&out);
    for (int64_t i = 0; i < count; i += 1 + below(count / 200 + 1)) {
        unflatten(i, &out, index);
        double sum = 0, magnitude = 0;
        for (int64_t p = 0; p < k; p++) {
            double product = at4(&a, index[0], index[1], index[2], p) * at4(&b, index[0], index[1], p, index[3]);
            sum += product, magnitude += fabs(product);
        }
        bad += !close_to(value_at(&out, i), sum, tolerance(dtype, magnitude));
    }
    CHECK_EQUAL(bad, 0);
}

/* --- attention
 * ---------------------------------------------------------------------------------------------------------------- */
static void test_attention(void) {
    DType dtype = pick_float();
    static const int64_t lengths[] = {0, 1, 2, 16, 47, 48, 49, 97, 130};
    int64_t s = lengths[below(9)], t = lengths[below(9)], groups = between(1, 2), heads = groups * between(1, 3),
            batch = between(1, 2);
    int64_t d = between(1, 20), e = below(2) ? 16 : between(1, 40);
    bool causal = below(2), safe = below(2);
    double scale = below(5) ? 0.7 : 0.0;
    Tensor q = MAKE(dtype, below(2), batch, heads, s, d), k = MAKE(dtype, below(2), batch, groups, t, d);
    Tensor v = MAKE(dtype, below(2), batch, groups, t, e), out = MAKE(dtype, below(2), batch, heads, s, e), mask = {0};
    if (below(2))
        mask = below(2) ? MAKE(below(2) ? DTYPE_BOOL : dtype, true, s, t)
                        : MAKE(below(2) ? DTYPE_BOOL : dtype, true, batch, 1, 1, t);
    for (int64_t i = 0; mask.data && mask.dtype != DTYPE_BOOL && tensor_count(&mask) && i < t;
         i++) /* in its first row */
        if (below(2)) set_at(&mask, i * mask.strides[mask.rank - 1], below(2) ? -INFINITY : -3e4);
    Case c;
    begin(&c, OP_attention, mask.data ? 4 : 3, (Tensor[]){q, k, v, mask}, 1, &out);
    attr(&c, ATTR_causal)->i = causal, attr(&c, ATTR_safe)->i = safe, attr(&c, ATTR_scale)->f = scale;
    run(&c, attention_run, attention_scratch, NULL);
    int bad = 0;
    double weights[256];
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < s; i++) {
                double max = -INFINITY, sum = 0;
                int64_t g = h / (heads / groups);
                for (int64_t j = 0; j < t; j++) {
                    double dot = 0;
                    for (int64_t p = 0; p < d; p++) dot += at4(&q, b, h, i, p) * at4(&k, b, g, j, p);
                    dot *= scale;
                    if (mask.data)
                        dot += mask.dtype == DTYPE_BOOL ? (at4(&mask, b, h, i, j) != 0 ? 0 : -INFINITY)
                                                        : at4(&mask, b, h, i, j);
                    weights[j] = causal && j > i ? -INFINITY : dot;
                    max = fmax(max, weights[j]);
                }
                for (int64_t j = 0; j < t; j++) sum += weights[j] = max == -INFINITY ? 0 : exp(weights[j] - max);
                for (int64_t p = 0; p < e; p++) {
                    double want = 0, magnitude = 0;
                    for (int64_t j = 0; j < t; j++)
                        want += weights[j] / sum * at4(&v, b, g, j, p), magnitude += weights[j] / sum;
                    if (sum == 0) want = safe || t == 0 ? 0 : NAN;
                    bad += !close_to(at4(&out, b, h, i, p), want, tolerance(dtype, 3 + magnitude));
                }
            }
    CHECK_EQUAL(bad, 0);
}

static void test_attention_extremes(void) {
    float lowest = -3.4028234663852886e38f;
    Tensor q = MAKE(DTYPE_F32, false, 1, 1, 2, 8), k = MAKE(DTYPE_F32, false, 1, 1, 100, 8),
           v = MAKE(DTYPE_F32, false, 1, 1, 100, 16);
    Tensor mask = MAKE(DTYPE_F32, false, 2, 100), out = MAKE(DTYPE_F32, false, 1, 1, 2, 16);
    for (int64_t i = 0; i < 200; i++) set_at(&mask, i, i < 100 ? (double)lowest : 0);
    set_at(&k, 8 * 99, INFINITY); /* row 1 gets NaN or is taken over by the last key, row 0 is a plain average */
    Case c;
    begin(&c, OP_attention, 4, (Tensor[]){q, k, v, mask}, 1, &out);
    attr(&c, ATTR_scale)->f = 0.5;
    set_at(&q, 0, -1.0); /* -inf for row 0 */
    set_at(&q, 8, 1.0);  /* +inf for row 1: NaN, as in eager */
    run(&c, attention_run, attention_scratch, NULL);
    for (int64_t e = 0; e < 16; e++) {
        double mean = 0;
        for (int64_t j = 0; j < 99; j++) mean += at4(&v, 0, 0, j, e) / 99;
        CHECK(close_to(at4(&out, 0, 0, 0, e), mean, 1e-6));
        CHECK(isnan(at4(&out, 0, 0, 1, e)));
    }
}

/* --- rows
 * ----------------------------------------------------------------------------------------------------------------------
 */
static void test_norm(void) {
    DType dtype = pick_float();
    bool rms = below(2), weighted = below(2), biased = !rms && below(2), residual = below(2);
    int64_t rows = below(8) ? between(1, 40) : 0, a = between(1, 4), n = pick_size(400) + 1;
    int64_t axes = 1 + below(2), size = axes == 2 ? a * n : n;
    Tensor x = MAKE(dtype, false, rows, a, n), none = {0},
           w = axes == 2 ? MAKE(dtype, false, a, n) : MAKE(dtype, false, n);
    Tensor b = axes == 2 ? MAKE(dtype, false, a, n) : MAKE(dtype, false, n), r = MAKE(dtype, false, rows, a, n);
    Tensor out[2] = {MAKE(dtype, false, rows, a, n), MAKE(dtype, false, rows, a, n)};
    for (int64_t i = 0; i < tensor_count(&x); i++) set_at(&x, i, value_at(&x, i) + 3.0); /* a mean far from 0 */
    if (below(3) == 0) out[1].data = NULL;
    Case c;
    if (rms)
        begin(&c, OP_rms_norm, 3, (Tensor[]){x, weighted ? w : none, residual ? r : none}, 2, out);
    else
        begin(&c, OP_layer_norm, 4, (Tensor[]){x, weighted ? w : none, biased ? b : none, residual ? r : none}, 2, out);
    attr(&c, ATTR_axes)->i = axes, attr(&c, ATTR_eps)->f = 1e-5;
    run(&c, rms ? rms_norm_run : layer_norm_run, norm_scratch, NULL);
    int bad = 0;
    for (int64_t row = 0; row < tensor_count(&x) / size; row++) {
        double sum = 0, squares = 0;
        for (int pass = 0; pass < 3; pass++)
            for (int64_t i = 0; i < size; i++) {
                int64_t at = row * size + i;
                double v = value_at(&x, at) + (residual ? value_at(&r, at) : 0), mean = rms ? 0 : sum / (double)size;
                if (residual && dtype != DTYPE_F64) v = (double)round_f32(dtype, (float)v);
                if (residual && out[1].data) bad += value_at(&out[1], at) != v;
                if (pass == 0)
                    sum += v;
                else if (pass == 1)
                    squares += (v - mean) * (v - mean);
                else {
                    double want = (v - mean) / sqrt(squares / (double)size + 1e-5);
                    if (weighted) want *= value_at(&w, i);
                    if (biased) want += value_at(&b, i);
                    bad += !close_to(value_at(&out[0], at), want, 4 * tolerance(dtype, 3));
                }
            }
    }
    CHECK_EQUAL(bad, 0);
}

static void test_group_norm(void) {
    DType dtype = pick_float();
    int64_t batch = between(1, 3), groups = between(1, 3), channels = groups * between(1, 4), n = between(1, 30);
    bool weighted = below(2), biased = below(2);
    Tensor x = MAKE(dtype, false, batch, channels, n), none = {0}, w = MAKE(dtype, false, channels),
           b = MAKE(dtype, false, channels);
    Tensor out = MAKE(dtype, false, batch, channels, n);
    Case c;
    begin(&c, OP_group_norm, 3, (Tensor[]){x, weighted ? w : none, biased ? b : none}, 1, &out);
    attr(&c, ATTR_groups)->i = groups, attr(&c, ATTR_eps)->f = 1e-5;
    run(&c, group_norm_run, norm_scratch, NULL);
    int64_t size = channels / groups * n;
    int bad = 0;
    for (int64_t row = 0; row < batch * groups; row++) {
        double mean = 0, squares = 0;
        for (int64_t i = 0; i < size; i++) mean += value_at(&x, row * size + i) / (double)size;
        for (int64_t i = 0; i < size; i++) squares += pow(value_at(&x, row * size + i) - mean, 2);
        for (int64_t i = 0; i < size; i++) {
            double want = (value_at(&x, row * size + i) - mean) / sqrt(squares / (double)size + 1e-5);
            int64_t channel = row % groups * (channels / groups) + i / n;
            if (weighted) want *= value_at(&w, channel);
            if (biased) want += value_at(&b, channel);
            bad += !close_to(value_at(&out, row * size + i), want, 4 * tolerance(dtype, 3));
        }
    }
    CHECK_EQUAL(bad, 0);
}

static void test_softmax(void) {
    DType dtype = pick_float();
    bool log_form = below(2);
    int dim = (int)below(3);
    Tensor x = MAKE(dtype, false, pick_size(20), between(1, 40), between(1, 40)), out = make(dtype, 3, x.shape, false);
    for (int64_t i = 0; i < tensor_count(&x); i++) set_at(&x, i, below(10) ? value_at(&x, i) * 20 : -INFINITY);
    Case c;
    begin(&c, log_form ? OP_log_softmax : OP_softmax, 1, &x, 1, &out);
    attr(&c, ATTR_dim)->i = dim;
    run(&c, softmax_run, softmax_scratch, NULL);
    int bad = 0;
    for (int64_t i = 0; i < tensor_count(&x); i++) {
        int64_t index[3], first;
        unflatten(i, &x, index);
        first = i - index[dim] * x.strides[dim];
        double max = -INFINITY, sum = 0;
        for (int64_t j = 0; j < x.shape[dim]; j++) max = fmax(max, value_at(&x, first + j * x.strides[dim]));
        for (int64_t j = 0; j < x.shape[dim]; j++) sum += exp(value_at(&x, first + j * x.strides[dim]) - max);
        double d = value_at(&x, i) - max, want = log_form ? d - log(sum) : exp(d) / sum;
        bad += !close_to(value_at(&out, i), want, tolerance(dtype, log_form ? 40 : want + 0.1));
    }
    CHECK_EQUAL(bad, 0);
}

static double rounded(DType dtype, double v) { return dtype == DTYPE_F64 ? v : (double)round_f32(dtype, (float)v); }

static void test_rope(void) {
    DType dtype = pick_float();
    int64_t batch = between(1, 2), heads = between(1, 4), s = between(1, 70), n = 2 * between(1, 20);
    bool interleaved = below(2), strided = below(2);
    Tensor x = MAKE(dtype, strided, batch, heads, s, n), out = MAKE(dtype, strided, batch, heads, s, n);
    Tensor cosine = below(2) ? MAKE(dtype, strided, s, n) : MAKE(dtype, strided, batch, 1, s, n),
           sine = MAKE(dtype, strided, 1, s, n);
    Case c;
    begin(&c, OP_rope, 3, (Tensor[]){x, cosine, sine}, 1, &out);
    attr(&c, ATTR_interleaved)->i = interleaved;
    run(&c, rope_run, NULL, NULL);
    int bad = 0;
    for (int64_t i = 0; i < batch * heads * s * n; i++) {
        int64_t index[4], d = i % n;
        unflatten(i, &x, index);
        bool first = interleaved ? d % 2 == 0 : d < n / 2;
        index[3] = interleaved ? d ^ 1 : first ? d + n / 2 : d - n / 2;
        double other = value_at(&x, offset_of(&x, index, 4));
        index[3] = d;
        double a =
            rounded(dtype, value_at(&x, offset_of(&x, index, 4)) * value_at(&cosine, offset_of(&cosine, index, 4)));
        double b = rounded(dtype, (first ? -other : other) * value_at(&sine, offset_of(&sine, index, 4)));
        bad += value_at(&out, offset_of(&out, index, 4)) != rounded(dtype, a + b); /* to the bit */
    }
    CHECK_EQUAL(bad, 0);
}

/* --- conv
 * ------------------------------------------------------------------------------------------------------------------------
 */
static void test_conv(void) {
    DType dtype = pick_float();
    bool two = below(2), depthwise = below(3) == 0;
    int64_t groups = depthwise ? between(1, 6) : between(1, 2), in = depthwise ? 1 : between(1, 5),
            o = groups * between(1, 9);
    int64_t batch = between(1, 2), stride[2], padding[2], dilation[2], size[2], kernel[2], out_size[2];
    for (int d = 0; d < 2; d++) {
        kernel[d] = between(1, 3), stride[d] = between(1, 3), padding[d] = below(3), dilation[d] = between(1, 2);
        size[d] = dilation[d] * (kernel[d] - 1) + between(1, 30);
        out_size[d] = (size[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) / stride[d] + 1;
    }
    int rank = two ? 4 : 3;
    Tensor x = make(dtype, rank, (int64_t[]){batch, groups * in, size[0], size[1]}, below(2));
    Tensor w = make(dtype, rank, (int64_t[]){o, in, kernel[0], kernel[1]}, false),
           b = below(2) ? MAKE(dtype, true, o) : (Tensor){0};
    Tensor out = make(dtype, rank, (int64_t[]){batch, o, out_size[0], out_size[1]}, false);
    Case c;
    begin(&c, OP_conv, 3, (Tensor[]){x, w, b}, 1, &out);
    size_t spatial = (size_t)rank - 2;
    CHECK_OK(&ctx, attr_set_ints(&ctx, graph, attr(&c, ATTR_stride), stride, spatial));
    CHECK_OK(&ctx, attr_set_ints(&ctx, graph, attr(&c, ATTR_padding), padding, spatial));
    CHECK_OK(&ctx, attr_set_ints(&ctx, graph, attr(&c, ATTR_dilation), dilation, spatial));
    attr(&c, ATTR_groups)->i = groups;
    run(&c, conv_run, conv_scratch, NULL);
    int bad = 0;
    if (!two)
        size[1] = kernel[1] = stride[1] = dilation[1] = 1, padding[1] = 0, x.shape[3] = w.shape[3] = 1,
        x.rank = w.rank = 4;
    for (int64_t i = 0; i < tensor_count(&out); i++) {
        int64_t index[4] = {0};
        unflatten(i, &out, index);
        double sum = b.data ? value_at(&b, index[1] * b.strides[0]) : 0, magnitude = fabs(sum);
        for (int64_t ch = 0; ch < in; ch++)
            for (int64_t p = 0; p < kernel[0]; p++)
                for (int64_t r = 0; r < kernel[1]; r++) {
                    int64_t h = index[2] * stride[0] - padding[0] + p * dilation[0],
                            v = index[3] * stride[1] - padding[1] + r * dilation[1];
                    if (h < 0 || h >= size[0] || v < 0 || v >= size[1]) continue;
                    double product =
                        at4(&w, index[1], ch, p, r) * at4(&x, index[0], index[1] / (o / groups) * in + ch, h, v);
                    sum += product, magnitude += fabs(product);
                }
        bad += !close_to(value_at(&out, i), sum, tolerance(dtype, magnitude));
    }
    CHECK_EQUAL(bad, 0);
}

int main(void) {
    static void (*const tests[])(void) = {test_linear,  test_matmul, test_attention, test_norm,      test_group_norm,
                                          test_softmax, test_rope,   test_conv,      test_ways_agree};
    context_init(&ctx);
    arena_init(&arena);
    CHECK_OK(&ctx, pool_create(&ctx, THREADS, &pool));
    for (uint64_t round = 0; round < 60; round++)
        for (size_t t = 0; t < sizeof tests / sizeof *tests; t++) {
            seed = round * 100 + t;
            int before = check_failures;
            tests[t]();
            if (check_failures > before) fprintf(stderr, "in test %zu, round %llu\n", t, (unsigned long long)round);
            free_all();
        }
    test_attention_extremes();
    free_all();
    pool_destroy(pool);
    arena_destroy(&arena);
    return check_done();
}
