/* The elementwise engine, reductions, scans, sorting, indexing and data movement against naive loops over random shapes
 * and strides. Everything runs on one thread and on three and must give the same bits. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "cpu/cpu.h"
#include "cpu/elementwise.h"
#include "cpu/move.h"
#include "cpu/reduce.h"

static uint64_t seed = 7;
static int64_t below(int64_t n) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int64_t)((seed >> 33) % (uint64_t)n);
}

/* --- tensors with memory
 * ------------------------------------------------------------------------------------------- */
enum { MAX_MEMORY = 512 };
static void *memory[MAX_MEMORY];
static int n_memory;
static void *get(int64_t bytes) {
    if (n_memory == MAX_MEMORY) abort();
    void *p = memory[n_memory++] = calloc(1, (size_t)bytes + 1);
    if (!p) abort();
    return p;
}
static void free_all(void) {
    while (n_memory) free(memory[--n_memory]);
}

static Tensor tensor(DType dtype, int rank, const int64_t *shape) {
    Tensor t = {.dtype = dtype, .rank = (uint8_t)rank};
    int64_t stride = 1;
    for (int d = rank; d-- > 0;) {
        t.shape[d] = shape[d];
        t.strides[d] = stride;
        stride *= shape[d];
    }
    t.data = get(stride * (int64_t)dtype_size(dtype));
    return t;
}

/* The same shape over other memory: dimensions in a random order, each with room between its elements. */
static Tensor scattered(DType dtype, int rank, const int64_t *shape) {
    Tensor t = tensor(dtype, rank, shape);
    int order[MAX_RANK];
    int64_t stride = 1;
    for (int d = 0; d < rank; d++) order[d] = d;
    for (int d = rank - 1; d > 0; d--) {
        int other = (int)below(d + 1), swap = order[d];
        order[d] = order[other];
        order[other] = swap;
    }
    for (int d = 0; d < rank; d++) {
        stride *= 1 + (below(3) == 0);
        t.strides[order[d]] = stride;
        stride *= shape[order[d]];
    }
    t.data = get(stride * (int64_t)dtype_size(dtype) * 2);
    return t;
}

static int64_t offset_of(const Tensor *t, int64_t index) {
    int64_t offset = 0;
    for (int d = t->rank; d-- > 0;) {
        offset += index % t->shape[d] * t->strides[d];
        index /= t->shape[d];
    }
    return offset;
}
static double get_at(const Tensor *t, int64_t index) {
    Wide w;
    wide_load(t->dtype)(&w, tensor_byte(t, offset_of(t, index)), 1, 1);
    return dtype_is_float(t->dtype) ? w.f : (double)w.i;
}
static void set_at(const Tensor *t, int64_t index, double value) {
    Element e = element_from_f64(t->dtype, value);
    memcpy(tensor_byte(t, offset_of(t, index)), &e, dtype_size(t->dtype));
}
static Tensor filled(DType dtype, int rank, const int64_t *shape, int64_t low, int64_t high) {
    Tensor t = below(2) ? tensor(dtype, rank, shape) : scattered(dtype, rank, shape);
    double unit = dtype_is_float(dtype) ? 0.25 : 1;
    for (int64_t i = 0; i < tensor_count(&t); i++) set_at(&t, i, (double)(low + below(high - low + 1)) * unit);
    return t;
}
static int random_shape(int64_t *shape, int least) {
    int rank = least + (int)below(5 - least);
    for (int d = 0; d < rank; d++) shape[d] = below(12) == 0 ? 70 : 1 + below(7);
    return rank;
}
static DType random_type(void) { return (DType)(DTYPE_U8 + below(DTYPE_F64 - DTYPE_U8 + 1)); }

/* --- running ------------------------------------------------------------------------------------------------------ */
typedef struct Set {
    AttrName name;
    Attr value;
} Set;
#define INTEGER(n, v) ((Set){ATTR_##n, {.i = (v)}})
#define LIST(n, v, c) ((Set){ATTR_##n, {.ints = {(v), (uint32_t)(c)}}})

static Pool *pool;
static Context context;

/* Runs with one thread, then with three into a second memory. All inputs are given as they lie. */
static Code run(Op op, const Tensor *in, uint32_t n_in, Tensor *out, uint32_t n_out, const Set *sets, int n_sets) {
    const OpInfo *info = op_info(op);
    Attr attrs[OP_MAX_ATTRS] = {{.i = 0}};
    Value values[8];
    ValueId operands[8];
    for (int k = 0; k < info->n_attrs; k++)
        for (int s = 0; s < n_sets; s++)
            if (info->attrs[k] == sets[s].name) attrs[k] = sets[s].value;
    for (uint32_t k = 0; k < n_in; k++) {
        values[k] = (Value){.dtype = in[k].dtype, .rank = in[k].rank, .shape = in[k].shape};
        operands[k] = k;
    }
    Node node = {
        .op = op, .n_operands = n_in, .n_results = n_out, .operands = operands, .first_result = n_in, .attrs = attrs};
    Graph graph = {.values = values, .n_values = n_in};
    const Kernel *kernel = cpu_kernel(op);
    Code code = CODE_OK;
    for (int threads = 1; threads <= 3 && code == CODE_OK; threads += 2) {
        Tensor made[2];
        for (uint32_t k = 0; k < n_out; k++) {
            made[k] = out[k];
            if (threads > 1) made[k].data = get(tensor_count(&out[k]) * (int64_t)dtype_size(out[k].dtype));
        }
        void *scratch = get((kernel->scratch ? kernel->scratch(&graph, &node, threads) : 0) + 64);
        scratch = (char *)scratch + (64 - (uintptr_t)scratch % 64) % 64;
        KernelCall call = {.ctx = &context,
                           .node = &node,
                           .in = in,
                           .out = made,
                           .n_in = n_in,
                           .n_out = n_out,
                           .scratch = scratch,
                           .pool = threads > 1 ? pool : NULL};
        code = kernel->run(&call);
        for (uint32_t k = 0; k < n_out && code == CODE_OK && threads > 1; k++)
            CHECK(!memcmp(made[k].data, out[k].data, (size_t)tensor_count(&out[k]) * dtype_size(out[k].dtype)));
    }
    return code;
}

/* --- elementwise -------------------------------------------------------------------------------------------------- */
static Tensor broadcast(const Tensor *t, const Tensor *to) {
    Tensor b = *to;
    b.data = t->data;
    b.dtype = t->dtype;
    for (int d = 0; d < to->rank; d++) {
        int own = d - (to->rank - t->rank);
        b.strides[d] = own < 0 || t->shape[own] == 1 ? 0 : t->strides[own];
    }
    return b;
}

/* A random program over broadcast operands; each element must be what the program gives for it alone. */
static void test_programs(DType type) {
    static const Op float_unary[] = {OP_neg, OP_exp,  OP_tanh, OP_erf,  OP_sin,
                                     OP_log, OP_gelu, OP_silu, OP_relu, OP_rsqrt};
    static const Op int_unary[] = {OP_neg, OP_abs, OP_sign, OP_bitwise_not};
    static const Op binary[] = {OP_add, OP_sub, OP_mul, OP_minimum, OP_maximum, OP_pow};
    bool is_float = dtype_is_float(type);
    int64_t shape[MAX_RANK], words[PROGRAM_MAX_STEPS * STEP_WORDS];
    int rank = random_shape(shape, 0), n_in = 1 + (int)below(4), n_steps = 1 + (int)below(8);
    if (rank && below(3) == 0) shape[rank - 1] = 1000 + below(3000);
    Tensor in[4], out = below(2) ? tensor(type, rank, shape) : scattered(type, rank, shape);
    DType types[4];
    for (int k = 0; k < n_in; k++) {
        int64_t own[MAX_RANK];
        for (int d = 0; d < rank; d++) own[d] = below(4) ? shape[d] : 1;
        int drop = k == 0 || rank == 0 ? 0 : (int)below(rank + 1);
        in[k] = filled(type, rank - drop, own + drop, -9, 9);
        types[k] = type;
    }
    for (int i = 0; i < n_steps; i++) {
        Step step = {.dtype = type, .src = {STEP_NONE, STEP_NONE, STEP_NONE}};
        int32_t a = i && below(2) ? -1 - (int32_t)below(i) : (int32_t)below(n_in),
                b = i && below(2) ? -i : (int32_t)below(n_in);
        step.src[0] = a;
        if (below(3) == 0) {
            step.op = is_float ? float_unary[below(10)] : int_unary[below(4)];
            step.flag = step.op == OP_gelu && below(2);
        } else {
            step.op = binary[below(6)];
            if (below(2))
                step.src[1] = b;
            else
                step.scalar = (Scalar){.kind = SCALAR_INT, .i = 1 + below(3)};
        }
        step_encode(&step, words + i * STEP_WORDS);
    }
    EwProgram p;
    CHECK_OK(&context, ew_prepare(&context, &p, words, (size_t)n_steps * STEP_WORDS, types, (size_t)n_in, false));
    CHECK_OK(&context, ew_run(&context, below(2) ? pool : NULL, &p, in, (size_t)n_in, &out));
    for (int64_t i = 0; i < tensor_count(&out); i++) {
        EwSrc src[4];
        Element want = {{0}};
        for (int k = 0; k < n_in; k++) {
            Tensor b = broadcast(&in[k], &out);
            src[k] = (EwSrc){tensor_byte(&b, offset_of(&b, i)), below(2)};
        }
        CHECK(ew_row(&p, &want, src, 1) == EW_OK);
        if (memcmp(&want, tensor_byte(&out, offset_of(&out, i)), dtype_size(type))) {
            CHECK(!"an element depends on its place");
            return;
        }
    }
}

/* Vector and portable functions agree within a few units in the last place, ends of the range included. */
static void test_vector_functions(void) {
    if (!cpu_has_avx2()) return;
    static const Op ops[] = {OP_neg, OP_abs, OP_floor, OP_round, OP_exp,     OP_log,  OP_sqrt, OP_rsqrt, OP_reciprocal,
                             OP_sin, OP_cos, OP_tanh,  OP_erf,   OP_sigmoid, OP_silu, OP_relu, OP_gelu};
    const size_t n_ops = sizeof ops / sizeof *ops;
    float x[1000], vector[1000], plain[1000];
    for (size_t o = 0; o <= n_ops; o++) { /* the last is gelu's tanh form */
        bool approximate = o == n_ops;
        Op op = approximate ? OP_gelu : ops[o];
        double tiny = op == OP_silu ? 89 / FLT_MAX : 1e-38; /* exp(88.9) is infinite, but not half of it */
        for (int i = 0; i < 1000; i++) {
            static const float ends[] = {0,       -0.0f, INFINITY, -INFINITY, NAN,  1e-42f,
                                         -1e-42f, 1e30f, -1e30f,   0.5f,      2.5f, -88.9f};
            x[i] = i < 12
                       ? ends[i]
                       : (float)(ldexp((double)(1 + below(1 << 20)), -20 + (int)below(10) - 5) * (below(2) ? 1 : -1));
        }
        EwSrc src = {x, 1};
        CHECK(avx2_unary(op, approximate)(vector, &src, 999) == EW_OK);
        CHECK(ew_unary(op, DTYPE_F32, approximate)(plain, &src, 999) == EW_OK);
        for (int i = 0; i < 999; i++) {
            /* gelu cancels for x < 0, as eager's */
            double unit = op == OP_gelu ? fabs((double)x[i]) : fabs((double)plain[i]);
            bool close = fabs((double)vector[i] - (double)plain[i]) <= 4 * 1.2e-7 * unit + tiny;
            bool same = vector[i] == plain[i] || (isnan(vector[i]) && isnan(plain[i]));
            if (!same && !close)
                fprintf(stderr, "%s(%a) = %a, %a\n", op_info(op)->name, (double)x[i], (double)vector[i],
                        (double)plain[i]);
            CHECK(same || close);
            if (plain[i] == 0 && vector[i] == 0) CHECK(signbit(plain[i]) == signbit(vector[i]));
        }
    }
}

static Tensor vector_of(DType type, int64_t n, const double *values) {
    Tensor t = tensor(type, 1, &n);
    for (int64_t i = 0; i < n; i++) set_at(&t, i, values[i]);
    return t;
}

static void expect_binary(Op op, DType type, double x, double y, double want) {
    Tensor in[2] = {vector_of(type, 1, &x), vector_of(type, 1, &y)}, out = tensor(type, 1, (int64_t[]){1});
    CHECK_OK(&context, run(op, in, 2, &out, 1, NULL, 0));
    double got = get_at(&out, 0);
    CHECK((isnan(got) && isnan(want)) || (got == want && signbit(got) == signbit(want)));
}

static void test_semantics(void) {
    expect_binary(OP_div_floor, DTYPE_I32, -7, 2, -4);
    expect_binary(OP_div_trunc, DTYPE_I32, -7, 2, -3);
    expect_binary(OP_div_floor, DTYPE_I64, 7, -1, -7);
    expect_binary(OP_remainder, DTYPE_I8, -7, 3, 2);
    expect_binary(OP_fmod, DTYPE_I8, -7, 3, -1);
    expect_binary(OP_remainder, DTYPE_F32, -1, INFINITY, INFINITY);
    expect_binary(OP_remainder, DTYPE_F64, 5.5, -2, -0.5);
    expect_binary(OP_div_floor, DTYPE_F32, 1, 0, INFINITY);
    expect_binary(OP_pow, DTYPE_I16, 2, -1, 0);
    expect_binary(OP_pow, DTYPE_I16, -1, -3, -1);
    expect_binary(OP_pow, DTYPE_U8, 3, 6, 729 % 256);
    expect_binary(OP_shift_left, DTYPE_I32, 1, 40, 0);
    expect_binary(OP_shift_right, DTYPE_I32, -8, 99, -1);
    expect_binary(OP_maximum, DTYPE_F32, NAN, 1, NAN);
    expect_binary(OP_minimum, DTYPE_F64, 1, NAN, NAN);
    expect_binary(OP_add, DTYPE_I8, 127, 1, -128);
    expect_binary(OP_add, DTYPE_F16, 2048, 1, 2048); /* rounds to even */
    expect_binary(OP_mul, DTYPE_BF16, 255, 255, 65024);
    double one = 1, zero = 0;
    Tensor in[2] = {vector_of(DTYPE_I32, 1, &one), vector_of(DTYPE_I32, 1, &zero)},
           out = tensor(DTYPE_I32, 1, (int64_t[]){1});
    CHECK_CODE(&context, CODE_INTERNAL, run(OP_div_floor, in, 2, &out, 1, NULL, 0));
    CHECK(!strcmp(context.text, "ZeroDivisionError"));
    context_init(&context);
}

/* --- reductions, scans, sorting ----------------------------------------------------------------------------------- */
static void test_reduce(void) {
    static const Op ops[] = {OP_sum, OP_mean, OP_amax, OP_amin, OP_any, OP_all, OP_var};
    int64_t shape[MAX_RANK], dims[MAX_RANK], kept[MAX_RANK];
    int rank = random_shape(shape, 1), n_dims = 0, n_kept = 0;
    Op op = ops[below(7)];
    DType type = op == OP_mean || op == OP_var ? (below(2) ? DTYPE_F32 : DTYPE_F64) : random_type();
    if (type == DTYPE_F16 || type == DTYPE_BF16) type = DTYPE_F32; /* sums of halves round: compared by torch's tests */
    for (int d = 0; d < rank; d++) {
        if (below(2))
            dims[n_dims++] = d;
        else
            kept[n_kept++] = d;
    }
    if (n_dims == 0) return;
    int64_t out_shape[MAX_RANK], items = 1;
    for (int k = 0; k < n_kept; k++) out_shape[k] = shape[kept[k]];
    for (int k = 0; k < n_dims; k++) items *= shape[dims[k]];
    Tensor x = filled(type, rank, shape, 0, 3),
           out = tensor(op == OP_any || op == OP_all ? DTYPE_BOOL : type, n_kept, out_shape);
    Set sets[] = {LIST(dims, dims, n_dims), {ATTR_correction, {.f = 1}}};
    CHECK_OK(&context, run(op, &x, 1, &out, 1, sets, 2));
    int64_t outputs = tensor_count(&out);
    double *sum = get(outputs * 8), *squares = get(outputs * 8), *most = get(outputs * 8), *least = get(outputs * 8);
    for (int64_t o = 0; o < outputs; o++) most[o] = -1e9, least[o] = 1e9;
    for (int64_t i = 0; i < tensor_count(&x); i++) {
        int64_t at[MAX_RANK], rest = i, o = 0;
        for (int d = rank; d-- > 0; rest /= shape[d]) at[d] = rest % shape[d];
        for (int k = 0; k < n_kept; k++) o = o * shape[kept[k]] + at[kept[k]];
        double v = get_at(&x, i);
        sum[o] += v;
        squares[o] += v * v;
        most[o] = v > most[o] ? v : most[o];
        least[o] = v < least[o] ? v : least[o];
    }
    for (int64_t o = 0; o < outputs; o++) {
        double n = (double)items, got = get_at(&out, o), want = sum[o];
        if (op == OP_mean) want = sum[o] / n;
        if (op == OP_amax) want = most[o];
        if (op == OP_amin) want = least[o];
        if (op == OP_any) want = most[o] != 0;
        if (op == OP_all) want = least[o] != 0;
        if (op == OP_var) want = (squares[o] - sum[o] * sum[o] / n) / (n > 1 ? n - 1 : 0);
        if (op == OP_sum && (type == DTYPE_U8 || type == DTYPE_I8)) want = fmod(want, 256), got = fmod(got + 256, 256);
        CHECK((isnan(got) && isnan(want)) || fabs(got - want) <= 1e-6 * (1 + fabs(want)));
    }
}

static void test_scan_and_sort(void) {
    int64_t shape[MAX_RANK];
    int rank = random_shape(shape, 1);
    int64_t dim = below(rank), inner = 1, size = shape[dim];
    for (int d = (int)dim + 1; d < rank; d++) inner *= shape[d];
    DType type = below(2) ? DTYPE_F32 : DTYPE_I32;
    Tensor x = filled(type, rank, shape, -4, 4), sums = tensor(type, rank, shape);
    Tensor sorted[2] = {tensor(type, rank, shape), tensor(DTYPE_I64, rank, shape)}, best[2];
    bool descending = below(2);
    int64_t k = 1 + below(size), top_shape[MAX_RANK];
    memcpy(top_shape, shape, sizeof shape);
    top_shape[dim] = k;
    best[0] = tensor(type, rank, top_shape);
    best[1] = tensor(DTYPE_I64, rank, top_shape);
    CHECK_OK(&context, run(OP_cumsum, &x, 1, &sums, 1, (Set[]){INTEGER(dim, dim)}, 1));
    CHECK_OK(&context, run(OP_sort, &x, 1, sorted, 2, (Set[]){INTEGER(dim, dim), INTEGER(descending, descending)}, 2));
    CHECK_OK(&context,
             run(OP_topk, &x, 1, best, 2, (Set[]){INTEGER(dim, dim), INTEGER(k, k), INTEGER(largest, descending)}, 3));
    for (int64_t line = 0; line < tensor_count(&x) / size; line++) {
        int64_t first = line / inner * size * inner + line % inner, top = line / inner * k * inner + line % inner;
        double sum = 0;
        for (int64_t t = 0; t < size; t++) {
            int64_t i = first + t * inner;
            CHECK(get_at(&sums, i) == (sum += get_at(&x, i)));
            CHECK(get_at(&sorted[0], i) == get_at(&x, first + (int64_t)get_at(&sorted[1], i) * inner));
            if (t == 0) continue;
            double before = get_at(&sorted[0], i - inner), after = get_at(&sorted[0], i);
            CHECK(descending ? before >= after : before <= after);
            if (before == after) CHECK(get_at(&sorted[1], i - inner) < get_at(&sorted[1], i));
        }
        for (int64_t t = 0; t < k; t++)
            for (int r = 0; r < 2; r++)
                CHECK(get_at(&best[r], top + t * inner) == get_at(&sorted[r], first + t * inner));
    }
}

/* --- moving and indexing ------------------------------------------------------------------------------------------ */
static void test_copy(void) {
    int64_t shape[MAX_RANK];
    int rank = random_shape(shape, 0);
    DType type = random_type();
    Tensor x = filled(type, rank, shape, 0, 99),
           to = below(2) ? tensor(type, rank, shape) : scattered(type, rank, shape);
    for (int d = 0; d < rank; d++) {
        if (below(4)) continue;
        x.data = tensor_byte(&x, (shape[d] - 1) * x.strides[d]); /* backwards */
        x.strides[d] = -x.strides[d];
    }
    tensor_copy(below(2) ? pool : NULL, &to, &x);
    for (int64_t i = 0; i < tensor_count(&x); i++) CHECK(get_at(&to, i) == get_at(&x, i));
}

static void test_index(void) {
    int64_t shape[MAX_RANK], mask[MAX_RANK] = {0}, index_shape[2] = {1 + below(5), 1 + below(5)}, dims[2];
    int rank = random_shape(shape, 2);
    dims[0] = below(rank - 1);
    dims[1] = dims[0] + 1 + below(rank - 1 - dims[0]);
    mask[dims[0]] = mask[dims[1]] = 1;
    Tensor in[4], out;
    in[0] = filled(DTYPE_F32, rank, shape, -99, 99);
    in[1] = filled(DTYPE_I64, 2, index_shape, -shape[dims[0]], shape[dims[0]] - 1);
    in[2] = filled(DTYPE_I32, 1, index_shape + 1, -shape[dims[1]], shape[dims[1]] - 1);
    int64_t out_shape[MAX_RANK], place = dims[1] == dims[0] + 1 ? dims[0] : 0;
    int n = 0, block = 0;
    for (int d = 0; d <= rank; d++) {
        if (d == place) out_shape[n++] = index_shape[0], out_shape[n++] = index_shape[1];
        if (d < rank && !mask[d]) out_shape[n++] = shape[d];
    }
    out = tensor(DTYPE_F32, n, out_shape);
    CHECK_OK(&context, run(OP_index, in, 3, &out, 1, (Set[]){LIST(mask, mask, rank)}, 1));
    for (int64_t i = 0; i < tensor_count(&out); i++) {
        int64_t at[MAX_RANK], rest = i, offset = 0;
        for (int d = n; d-- > 0; rest /= out_shape[d]) at[d] = rest % out_shape[d];
        for (int k = 0; k < 2; k++) {
            int64_t j = (int64_t)get_at(&in[1 + k], k ? at[place + 1] : at[place] * index_shape[1] + at[place + 1]);
            offset += (j < 0 ? j + shape[dims[k]] : j) * in[0].strides[dims[k]];
        }
        block = 0;
        for (int d = 0; d < rank; d++) {
            if (mask[d]) continue;
            if (block == place) block += 2;
            offset += at[block++] * in[0].strides[d];
        }
        CHECK(get_at(&out, i) == (double)((float *)in[0].data)[offset]);
    }
    set_at(&in[1], below(tensor_count(&in[1])), (double)shape[dims[0]]);
    CHECK_CODE(&context, CODE_INDEX, run(OP_index, in, 3, &out, 1, (Set[]){LIST(mask, mask, rank)}, 1));
    context_init(&context);
}

static void test_gather_scatter(void) {
    int64_t shape[MAX_RANK], index_shape[MAX_RANK];
    int rank = random_shape(shape, 1), dim = (int)below(rank);
    for (int d = 0; d < rank; d++) index_shape[d] = d == dim ? 1 + below(9) : 1 + below(shape[d]);
    Tensor in[3] = {filled(DTYPE_I32, rank, shape, -50, 50), filled(DTYPE_I64, rank, index_shape, 0, shape[dim] - 1),
                    filled(DTYPE_I32, rank, index_shape, -50, 50)};
    Tensor got = tensor(DTYPE_I32, rank, index_shape), sum = tensor(DTYPE_I32, rank, shape),
           want = tensor(DTYPE_I32, rank, shape);
    CHECK_OK(&context, run(OP_gather, in, 2, &got, 1, (Set[]){INTEGER(dim, dim)}, 1));
    CHECK_OK(&context, run(OP_scatter, in, 3, &sum, 1, (Set[]){INTEGER(dim, dim), INTEGER(reduce, 1)}, 2));
    tensor_copy(NULL, &want, &in[0]);
    for (int64_t i = 0; i < tensor_count(&got); i++) {
        int64_t at[MAX_RANK], rest = i, linear = 0;
        for (int d = rank; d-- > 0; rest /= index_shape[d]) at[d] = rest % index_shape[d];
        at[dim] = (int64_t)get_at(&in[1], i);
        for (int d = 0; d < rank; d++) linear = linear * shape[d] + at[d];
        CHECK(get_at(&got, i) == get_at(&in[0], linear));
        set_at(&want, linear, get_at(&want, linear) + get_at(&in[2], i));
    }
    CHECK(!memcmp(want.data, sum.data, (size_t)tensor_count(&sum) * 4));
    set_at(&in[1], below(tensor_count(&in[1])), -1);
    CHECK_CODE(&context, CODE_INDEX, run(OP_gather, in, 2, &got, 1, (Set[]){INTEGER(dim, dim)}, 1));
    context_init(&context);
}

/* Every operator has a kernel, but views and what the executor does itself. */
static void test_table(void) {
    for (Op op = 0; op < OP_COUNT; op++) {
        bool executor = op == OP_input || op == OP_constant || op == OP_host;
        CHECK((cpu_kernel(op) != NULL) == !(executor || op_is(op, VIEW)));
    }
}

int main(void) {
    context_init(&context);
    CHECK_OK(&context, pool_create(&context, 3, &pool));
    test_table();
    test_vector_functions();
    test_semantics();
    for (int i = 0; i < 150; i++) {
        test_programs(i % 3 == 0 ? DTYPE_F32 : random_type());
        test_reduce();
        test_scan_and_sort();
        test_copy();
        test_index();
        test_gather_scatter();
        free_all();
    }
    pool_destroy(pool);
    return check_done();
}
