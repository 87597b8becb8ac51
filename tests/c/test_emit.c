/* The emitter without openvino: weights, the table of operators, hard cases of blocks, failing allocations. That the IR
 * means the right thing is tests/test_npu_emit.py's. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "npu/emit.h"
#include "npuir/view.h"
#include "random_graph.h"

/* --- weights ------------------------------------------------------------------------------------------------------ */
typedef struct Memory {
    Graph graph;
    Constant constant;
    int64_t shape[MAX_RANK], strides[MAX_RANK];
    double data[4096];
} Memory;

static void element_set(void *data, DType dtype, int64_t i, double x) {
    switch (dtype) {
    case DTYPE_BOOL: ((uint8_t *)data)[i] = x > 0; break;
    case DTYPE_U8: ((uint8_t *)data)[i] = (uint8_t)fabs(x); break;
    case DTYPE_I8: ((int8_t *)data)[i] = (int8_t)x; break;
    case DTYPE_I16: ((int16_t *)data)[i] = (int16_t)x; break;
    case DTYPE_I32: ((int32_t *)data)[i] = (int32_t)x; break;
    case DTYPE_I64: ((int64_t *)data)[i] = (int64_t)x; break;
    case DTYPE_F16: ((uint16_t *)data)[i] = f32_to_f16((float)x); break;
    case DTYPE_BF16: ((uint16_t *)data)[i] = f32_to_bf16((float)x); break;
    case DTYPE_F32: ((float *)data)[i] = (float)x; break;
    default: ((double *)data)[i] = x;
    }
}

static double element_get(const void *data, DType dtype, int64_t i) {
    switch (dtype) {
    case DTYPE_BOOL:
    case DTYPE_U8: return ((const uint8_t *)data)[i];
    case DTYPE_I8: return ((const int8_t *)data)[i];
    case DTYPE_I16: return ((const int16_t *)data)[i];
    case DTYPE_I32: return ((const int32_t *)data)[i];
    case DTYPE_I64: return (double)((const int64_t *)data)[i];
    case DTYPE_F16: return f16_to_f32(((const uint16_t *)data)[i]);
    case DTYPE_BF16: return bf16_to_f32(((const uint16_t *)data)[i]);
    case DTYPE_F32: return ((const float *)data)[i];
    default: return ((const double *)data)[i];
    }
}

static double some_number(Random *r) {
    static const double odd[] = {0, -0.0, INFINITY, -INFINITY, 65504, 65519, 65520, 1e9, -1e9, 6e-8, 3e-8, 1e-12, 2049};
    if (random_below(r, 8) == 0) return odd[random_below(r, sizeof odd / sizeof *odd)];
    return ((double)random_below(r, 20001) - 10000) / 77;
}

static void make_memory(Memory *m, Random *r, DType dtype, uint8_t rank, const int64_t *shape) {
    for (int64_t i = 0; i < 4096; i++) {
        double x = some_number(r);
        element_set(m->data, dtype, i, dtype_is_float(dtype) ? x : fmod(fabs(x) < 1e6 ? x : 7, 100));
    }
    memcpy(m->shape, shape, rank * sizeof *shape);
    view_dense_strides(rank, shape, NULL, m->strides);
    m->constant = (Constant){.name = "w",
                             .data = m->data,
                             .dtype = dtype,
                             .rank = rank,
                             .shape = m->shape,
                             .strides = m->strides,
                             .bytes = view_count(rank, shape) * (int64_t)dtype_size(dtype)};
    m->graph = (Graph){.constants = &m->constant, .n_constants = 1};
}

static WeightSource make_source(const View *v, DType dtype, WeightPart part) {
    WeightSource s = {.part = part, .dtype = dtype, .rank = v->rank, .offset = v->offset};
    memcpy(s.shape, v->shape, sizeof s.shape);
    memcpy(s.strides, v->strides, sizeof s.strides);
    s.bytes = view_count(v->rank, v->shape) * (int64_t)dtype_size(dtype);
    return s;
}

static int64_t at_index(const View *v, int64_t n) {
    int64_t at = v->offset;
    for (int d = v->rank - 1; d >= 0; n /= v->shape[d--]) at += n % v->shape[d] * v->strides[d];
    return at;
}

/* A random view of random memory, as the emitter makes them. */
static View random_view(Random *r, uint8_t rank, int64_t *shape) {
    View v = {.rank = rank};
    int64_t dims[MAX_RANK];
    for (int d = 0; d < rank; d++) shape[d] = 1 + random_below(r, rank > 3 ? 5 : rank == 3 ? 14 : 50);
    memcpy(v.shape, shape, rank * sizeof *shape);
    view_dense_strides(rank, shape, NULL, v.strides);
    for (int d = 0; d < rank; d++) dims[d] = d;
    for (int d = rank - 1; d > 0; d--) {
        int other = (int)random_below(r, (uint32_t)d + 1);
        int64_t t = dims[d];
        dims[d] = dims[other];
        dims[other] = t;
    }
    if (random_below(r, 2)) view_permute(&v, dims, &v);
    if (rank && random_below(r, 2)) {
        int64_t d = random_below(r, rank), start = random_below(r, (uint32_t)v.shape[d]);
        view_slice(&v, d, start, v.shape[d], 1 + random_below(r, 2), &v);
    }
    return v;
}

static void test_values(Context *ctx) {
    static Memory m;
    static double out[4096];
    Random r = {3};
    for (int round = 0; round < 4000; round++) {
        DType from = (DType)random_below(&r, DTYPE_F64 + 1), to = random_below(&r, 2) ? DTYPE_F16 : DTYPE_F32;
        if (!dtype_is_float(from) && random_below(&r, 2)) to = from;
        int64_t shape[MAX_RANK];
        View v = random_view(&r, (uint8_t)random_below(&r, 6), shape);
        make_memory(&m, &r, from, v.rank, shape);
        WeightSource s = make_source(&v, to, WEIGHT_VALUES);
        if (to == DTYPE_I8 || to == DTYPE_U8 || to == DTYPE_BOOL || to == DTYPE_I16) s.dtype = to;
        memset(out, 0x5a, sizeof out);
        CHECK_OK(ctx, weight_fill(ctx, &m.graph, &s, UINT32_MAX, 0, out));
        int64_t count = view_count(v.rank, v.shape), wrong = 0;
        for (int64_t n = 0; n < count; n++) {
            double want = element_get(m.data, from, at_index(&v, n)), have = element_get(out, to, n);
            if (to == DTYPE_F32) want = (float)want;
            if (to == DTYPE_F16 && from != DTYPE_F16) want = f16_to_f32(f32_to_f16(f32_within_f16((float)want)));
            wrong += memcmp(&want, &have, sizeof want) != 0;
        }
        CHECK_EQUAL(wrong, 0);
        CHECK(((uint8_t *)out)[s.bytes] == 0x5a); /* nothing behind the end */
    }
}

static void test_nan(Context *ctx) {
    static Memory m;
    uint16_t out[19];
    Random r = {5};
    make_memory(&m, &r, DTYPE_F32, 1, (int64_t[]){19});
    for (int i = 0; i < 19; i++) ((float *)m.data)[i] = i % 3 ? NAN : -NAN;
    View v = {.rank = 1, .shape = {19}, .strides = {1}};
    WeightSource s = make_source(&v, DTYPE_F16, WEIGHT_VALUES);
    CHECK_OK(ctx, weight_fill(ctx, &m.graph, &s, UINT32_MAX, 0, out));
    for (int i = 0; i < 19; i++) CHECK(isnan(f16_to_f32(out[i])));
}

/* Symmetric, a scale a row as f16 holds it, to nearest even; compared with the definition. */
static void test_quantised(Context *ctx, bool i4) {
    static Memory m;
    static uint8_t values[4096];
    static uint16_t scales[64];
    double levels = i4 ? 7 : 127;
    Random r = {11};
    for (int round = 0; round < 600; round++) {
        int64_t shape[2] = {1 + random_below(&r, 40), 1 + random_below(&r, 40)};
        make_memory(&m, &r, random_below(&r, 2) ? DTYPE_F32 : DTYPE_F16, 2, shape);
        DType from = m.constant.dtype;
        for (int64_t i = 0; i < 4096; i++) element_set(m.data, from, i, ((double)random_below(&r, 20001) - 10000) / 77);
        View v = {.rank = 2};
        memcpy(v.shape, shape, sizeof shape);
        view_dense_strides(2, shape, NULL, v.strides);
        if (round % 2) view_permute(&v, (int64_t[]){1, 0}, &v); /* a weight that lies transposed */
        for (int64_t k = 0; k < v.shape[1]; k++) {
            element_set(m.data, from, at_index(&v, k), 0); /* row 0: zeros */
            if (v.shape[0] > 1) element_set(m.data, from, at_index(&v, v.shape[1] + k), k % 3 ? 1e-7 : 0); /* tiny */
        }
        int64_t column = random_below(&r, (uint32_t)v.shape[0]), rows = v.shape[0] - column, n = v.shape[1];
        WeightSource s = make_source(&v, i4 ? DTYPE_U8 : DTYPE_I8, WEIGHT_VALUES);
        s.i4 = i4;
        s.shape[0] = rows;
        memset(values, 0x5a, sizeof values);
        CHECK_OK(ctx, weight_fill(ctx, &m.graph, &s, UINT32_MAX, column, values));
        WeightSource sc = s;
        sc.part = WEIGHT_SCALES;
        sc.dtype = DTYPE_F16;
        CHECK_OK(ctx, weight_fill(ctx, &m.graph, &sc, 0, column, scales));
        int64_t wrong = 0;
        for (int64_t row = 0; row < rows; row++) {
            double most = 0, scale = f16_to_f32(scales[row]);
            for (int64_t k = 0; k < n; k++)
                most = fmax(most, fabs(element_get(m.data, from, at_index(&v, (row + column) * n + k))));
            double want_scale = most == 0 ? 1 : f16_to_f32(f32_to_f16((float)most / (float)levels));
            if (want_scale == 0) want_scale = 0x1p-24;
            wrong += scale != want_scale;
            for (int64_t k = 0; k < n; k++) {
                int64_t at = row * n + k;
                float x = (float)element_get(m.data, from, at_index(&v, (row + column) * n + k));
                double want = fmax(-levels, fmin(levels, nearbyint(x / (float)scale)));
                int have = i4 ? (values[at / 2] >> (at % 2 * 4) & 15) : (int8_t)values[at];
                if (i4 && have > 7) have -= 16;
                wrong += have != (int)want;
            }
        }
        CHECK_EQUAL(wrong, 0);
        CHECK(values[i4 ? (rows * n + 1) / 2 : rows * n] == 0x5a);
    }
}

static void test_refused_weights(Context *ctx) {
    static Memory m;
    float out[64];
    Random r = {1};
    make_memory(&m, &r, DTYPE_F32, 2, (int64_t[]){4, 8});
    View v = {.rank = 2, .shape = {4, 8}, .strides = {8, 1}};
    WeightSource s = make_source(&v, DTYPE_F32, WEIGHT_VALUES);
    CHECK_CODE(ctx, CODE_INTERNAL, weight_fill(ctx, &m.graph, &s, UINT32_MAX, 1, out)); /* a column too many */
    CHECK_CODE(ctx, CODE_INTERNAL, weight_fill(ctx, &m.graph, &s, UINT32_MAX, -1, out));
    CHECK_CODE(ctx, CODE_INVALID, weight_fill(ctx, &m.graph, &s, 1, 0, out));
    s.offset = 1;
    CHECK_CODE(ctx, CODE_INTERNAL, weight_fill(ctx, &m.graph, &s, UINT32_MAX, 0, out));
    s.offset = 0;
    s.dtype = DTYPE_I64;
    CHECK_CODE(ctx, CODE_INTERNAL, weight_fill(ctx, &m.graph, &s, UINT32_MAX, 0, out));
    s.dtype = DTYPE_F32;
    Constant two[2] = {m.constant, m.constant};
    int64_t other[2] = {1, 4};
    two[1].strides = other;
    Graph g = {.constants = two, .n_constants = 2};
    CHECK_CODE(ctx, CODE_INTERNAL, weight_fill(ctx, &g, &s, 1, 0, out));
    two[1].strides = two[0].strides;
    CHECK_OK(ctx, weight_fill(ctx, &g, &s, 1, 0, out));
    two[1].data = NULL;
    CHECK_CODE(ctx, CODE_UNSUPPORTED, weight_fill(ctx, &g, &s, 1, 0, out));
}

/* --- the table ---------------------------------------------------------------------------------------------------- */
static void test_table(void) {
    int emitted = 0;
    for (int op = 0; op < OP_COUNT; op++) {
        const char *reason = emit_reason((Op)op);
        bool resident = op == OP_input || op == OP_constant || op_is((Op)op, VIEW);
        CHECK(resident || (reason != NULL) != (emit_fn((Op)op) != NULL));
        CHECK((reason != NULL) == (npu_op_reason((Op)op) != NULL)); /* the capability table says the same */
        if (reason) CHECK(strcmp(reason, npu_op_reason((Op)op)) == 0 && reason[0]);
        emitted += !reason;
    }
    CHECK(emitted > 80);
}

/* --- blocks ------------------------------------------------------------------------------------------------------- */
static KernelTraits no_traits(Op op) {
    (void)op;
    return (KernelTraits){0};
}

static Code emit_text(Context *ctx, Arena *arena, const char *text, bool arguments, NpuModel **out) {
    Graph *g;
    Npuir *ir;
    const Target *target = target_find("npu4000");
    const LowerOptions lower = {.target = target, .traits = no_traits, .threads = 1};
    const EmitOptions options = {.target = target, .forms = emit_default_forms(target, PRECISION_FP16)};
    *out = NULL;
    TRY(graph_parse(ctx, arena, text, strlen(text), &g));
    TRY(graph_verify(ctx, g));
    TRY(npuir_lower(ctx, arena, g, &lower, &ir));
    uint32_t instrs[64], weights[64];
    NpuBlock block = {.instrs = instrs,
                      .n_instrs = ir->n_instrs,
                      .in = ir->inputs,
                      .n_in = ir->n_inputs,
                      .out = ir->outputs,
                      .n_out = ir->n_outputs,
                      .weights = weights,
                      .n_calls = 1};
    for (uint32_t i = 0; i < ir->n_instrs; i++) instrs[i] = i;
    for (uint32_t i = 0; i < g->n_constants && arguments; i++) weights[block.n_weights++] = i;
    return npu_emit(ctx, arena, ir, &block, &options, out);
}

static const char sample[] =
    "graph {\n"
    "  %x = input {index=0} : f32[2, 3]\n"
    "  %w = constant @w {index=0} : f32[3, 3] state = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]\n"
    "  %t = permute %w {dims=[1, 0]} : f32[3, 3]\n"
    "  %y = linear %x, %t : f32[2, 3] loc(\"model.py:7 in <lambda> & \\\"more\\\"\")\n"
    "  %u = linear %x, %w : f32[2, 3]\n"
    "  %z = add %y, %u : f32[2, 3]\n"
    "  %v = permute %z {dims=[1, 0]} : f32[3, 2]\n"
    "  return %z, %v, %z, %x\n"
    "}\n";

static void test_sample(Context *ctx) {
    for (int arguments = 0; arguments < 2; arguments++) {
        Arena arena;
        NpuModel *model;
        arena_init(&arena);
        CHECK_OK(ctx, emit_text(ctx, &arena, sample, arguments, &model));
        if (!model) return;
        CHECK_EQUAL(model->n_in, 1);
        CHECK_EQUAL(model->n_out, 4);
        CHECK_EQUAL(model->n_args, arguments ? 2 : 0); /* the weight as it is, and turned */
        CHECK(model->in[0].dtype == DTYPE_F16 && model->in[0].bytes == 12);
        CHECK(model->out[1].shape[0] == 3 && model->out[1].shape[1] == 2);
        const char *xml = model->xml.data;
        CHECK(strstr(xml, "model.py:7 in &lt;lambda&gt; &amp; &quot;more&quot;") != NULL);
        for (int k = 0; k < 4; k++) { /* a value that is two outputs, an input that is one: a tensor for each */
            char name[32];
            snprintf(name, sizeof name, "names=\"out%d\"", k);
            CHECK(strstr(xml, name) != NULL);
        }
        CHECK(strstr(xml, "names=\"in0\"") != NULL);
        CHECK(strstr(xml, "<use_indices_for_io_metadata value=\"true\"/>") != NULL);
        CHECK(strstr(xml, "<is_new_api value=\"true\"/>") != NULL);
        CHECK((strstr(xml, "name=\"w1\"") != NULL) == arguments);
        for (uint32_t i = 0; i < model->n_pieces; i++) CHECK(model->offsets[i] % 64 == 0);
        void *bin = malloc((size_t)model->bin_bytes + 1);
        Graph g = {0};
        if (!arguments) CHECK_CODE(ctx, CODE_INVALID, npu_model_bin(ctx, &g, model, bin)); /* not its graph */
        free(bin);
        npu_model_destroy(model);
        arena_destroy(&arena);
    }
}

static void test_allocations(Context *ctx) {
    for (uint64_t n = 1; n < 2000; n++) {
        Arena arena;
        NpuModel *model;
        arena_init(&arena);
        ctx->fail_allocation = n;
        Code code = emit_text(ctx, &arena, sample, n % 2, &model);
        bool reached = ctx->fail_allocation == 0;
        CHECK(code == (reached ? CODE_NO_MEMORY : CODE_OK));
        ctx->fail_allocation = 0;
        ctx->code = CODE_OK;
        npu_model_destroy(model);
        arena_destroy(&arena);
        if (!reached) return;
    }
    CHECK(false);
}

static void test_refused_blocks(Context *ctx) {
    static const char wrong[] = "graph {\n  %x = input {index=0} : f32[2, 3]\n  %y = cumsum %x {dim=1} : f32[2, 3] "
                                "loc(\"model.py:9 in f\")\n  return %y\n}\n";
    Arena arena;
    NpuModel *model;
    arena_init(&arena);
    Code code = emit_text(ctx, &arena, wrong, false, &model);
    CHECK(code == CODE_UNSUPPORTED && strstr(ctx->text, "model.py:9 in f") && strstr(ctx->text, "a scan"));
    CHECK(!model);
    ctx->code = CODE_OK;
    arena_destroy(&arena);
}

int main(void) {
    Context ctx;
    context_init(&ctx);
    test_values(&ctx);
    test_nan(&ctx);
    test_quantised(&ctx, false);
    test_quantised(&ctx, true);
    test_refused_weights(&ctx);
    test_table();
    test_sample(&ctx);
    test_allocations(&ctx);
    test_refused_blocks(&ctx);
    return check_done();
}
