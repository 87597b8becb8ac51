/* quantised_linear against sums in double of the weights that it stands for: sizes that are no multiple of anything,
 * groups, zero points, types, epilogues; each run alone and on three threads must give the same bits. */
#include <math.h>

#include "check.h"
#include "cpu/cpu.h"
#include "cpu/quantised.h"
#include "graph/program.h"
#include "random_numbers.h"

enum { THREADS = 3 };
static Context ctx;
static Pool *pool;

static Tensor tensor(DType dtype, int rank, const int64_t *shape) {
    Tensor t = {.dtype = dtype, .rank = (uint8_t)rank};
    int64_t count = 1;
    for (int d = rank - 1; d >= 0; d--) {
        t.shape[d] = shape[d];
        t.strides[d] = count;
        count *= shape[d];
    }
    t.data = get(count * (int64_t)dtype_size(dtype));
    for (int64_t i = 0; i < count; i++) {
        if (dtype_is_float(dtype))
            store_f32(t.data, dtype, i, unit());
        else
            ((uint8_t *)t.data)[i] = (uint8_t)next_random();
    }
    return t;
}
#define TENSOR(dtype, ...)                                                                                             \
    tensor(dtype, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]){__VA_ARGS__})

typedef struct Case {
    Arena arena;
    Graph *graph;
    NodeId node;
    Tensor in[6], out;
    int64_t m, n, k, group;
    int bits;
} Case;

static double weight(const Case *c, int64_t n, int64_t k) {
    Quantised w = {.q = c->in[1].data,
                   .bits = c->bits,
                   .row_bytes = c->bits == 8 ? c->k : quantised_blocks(c->k) * (QUANTISED_BLOCK / 2)};
    int64_t groups = quantised_groups(c->k, c->group), at = n * groups + (c->group ? k / c->group : 0);
    double zero = c->in[3].data ? (double)((float *)c->in[3].data)[at] : 0;
    return (quantised_value(&w, n, k) - zero) * (double)((float *)c->in[2].data)[at];
}

static void make(Case *c, DType dtype, bool zeros, bool bias, bool epilogue) {
    ValueId operands[6];
    int64_t groups = quantised_groups(c->k, c->group);
    uint32_t n_in = epilogue ? 6 : 5;
    arena_init(&c->arena);
    c->in[0] = TENSOR(dtype, c->m, c->k);
    c->in[1] = c->bits == 8 ? TENSOR(DTYPE_I8, c->n, c->k)
                            : TENSOR(DTYPE_U8, c->n, quantised_blocks(c->k), QUANTISED_BLOCK / 2);
    c->in[2] = TENSOR(DTYPE_F32, c->n, groups);
    c->in[3] = zeros ? TENSOR(DTYPE_F32, c->n, groups) : (Tensor){0};
    for (int64_t i = 0; zeros && i < c->n * groups; i++) ((float *)c->in[3].data)[i] *= below(2) ? 8.0f : 0.5f;
    c->in[4] = bias ? TENSOR(dtype, c->n) : (Tensor){0};
    c->in[5] = epilogue ? TENSOR(dtype, c->m, c->n) : (Tensor){0};
    c->out = TENSOR(dtype, c->m, c->n);
    CHECK_OK(&ctx, graph_create(&ctx, &c->arena, &c->graph));
    for (uint32_t k = 0; k < n_in; k++) {
        Type type = {c->in[k].dtype, c->in[k].rank, c->in[k].shape};
        NodeId id;
        operands[k] = VALUE_NONE;
        if (!c->in[k].data) continue;
        CHECK_OK(&ctx, graph_insert(&ctx, c->graph, NODE_NONE, OP_input, NULL, 0, &type, 1, -1, &id));
        operands[k] = graph_node(c->graph, id)->first_result;
    }
    Type type = {dtype, 2, c->out.shape};
    CHECK_OK(&ctx,
             graph_insert(&ctx, c->graph, NODE_NONE, OP_quantised_linear, operands, n_in, &type, 1, -1, &c->node));
    Node *node = graph_node(c->graph, c->node);
    node_attr_mut(node, ATTR_bits)->i = c->bits;
    node_attr_mut(node, ATTR_group)->i = c->group;
    int64_t words[STEP_WORDS];
    step_encode(&(Step){.op = OP_sub, .dtype = dtype, .src = {0, 1, STEP_NONE}}, words);
    if (epilogue) CHECK_OK(&ctx, attr_set_ints(&ctx, c->graph, node_attr_mut(node, ATTR_program), words, STEP_WORDS));
    Type inferred;
    CHECK_OK(&ctx, graph_infer(&ctx, c->graph, c->node, &inferred));
    CHECK(inferred.dtype == dtype && inferred.rank == 2 && inferred.shape[1] == c->n);
}

static void run(Case *c) {
    int64_t bytes = quantised_linear_scratch(c->graph, graph_node(c->graph, c->node), THREADS);
    int64_t size = c->m * c->n * (int64_t)dtype_size(c->out.dtype);
    KernelCall call = {.ctx = &ctx,
                       .node = graph_node(c->graph, c->node),
                       .in = c->in,
                       .out = &c->out,
                       .n_in = c->in[5].data ? 6 : 5,
                       .n_out = 1,
                       .scratch = get(bytes)};
    CHECK_OK(&ctx, quantised_linear_run(&call));
    Tensor again = c->out;
    again.data = get(size);
    call.out = &again;
    call.pool = pool;
    CHECK(pool_enter(pool));
    CHECK_OK(&ctx, quantised_linear_run(&call));
    pool_leave(pool);
    CHECK(memcmp(again.data, c->out.data, (size_t)size) == 0);
}

static void compare(const Case *c) {
    DType dtype = c->out.dtype;
    double eps = dtype == DTYPE_F32 ? 4e-7 : dtype == DTYPE_F16 ? 1e-3 : 8e-3;
    int64_t count = c->m * c->n;
    int bad = 0;
    for (int64_t i = 0; i < count; i += 1 + below(count / 300 + 1)) {
        int64_t row = i / c->n, column = i % c->n;
        double sum = c->in[4].data ? (double)load_f32(c->in[4].data, dtype, column) : 0, size = fabs(sum);
        for (int64_t k = 0; k < c->k; k++) {
            double x = (double)load_f32(c->in[0].data, dtype, row * c->k + k), product = x * weight(c, column, k);
            /* the kernel may sum q and zero apart */
            double zero = c->in[3].data || c->bits == 4 ? 8 : 0;
            double scale =
                (double)((float *)c->in[2]
                             .data)[column * quantised_groups(c->k, c->group) + (c->group ? k / c->group : 0)];
            sum += product, size += fabs(product) + fabs(x * zero * scale);
        }
        if (c->in[5].data) {
            double y = (double)load_f32(c->in[5].data, dtype, i);
            sum -= y, size += fabs(y);
        }
        bad += !(fabs((double)load_f32(c->out.data, dtype, i) - sum) <= eps * (size + 0.05));
    }
    CHECK_EQUAL(bad, 0);
    if (bad)
        fprintf(stderr, "  m %d n %d k %d bits %d group %d %s\n", (int)c->m, (int)c->n, (int)c->k, c->bits,
                (int)c->group, dtype_name(dtype));
}

static void end(Case *c) {
    arena_destroy(&c->arena);
    release_all();
}

static void test_random(void) {
    static const int64_t rows[] = {0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 128};
    static const int64_t sizes[] = {0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 193};
    static const int64_t groups[] = {0, 0, 32, 64, 128, 96, 256, 1024};
    static const DType types[] = {DTYPE_F32, DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    for (int i = 0; i < 600; i++) {
        Case c = {.m = rows[below(14)],
                  .n = below(3) ? sizes[below(17)] : between(1, 700),
                  .k = below(3) ? sizes[below(17)] : between(1, 900),
                  .bits = below(2) ? 8 : 4,
                  .group = groups[below(8)]};
        make(&c, types[below(4)], below(2), below(2), below(2));
        run(&c);
        compare(&c);
        end(&c);
    }
}

/* Each instruction set that this machine has, not only the best. */
static void test_instruction_sets(void) {
    const QuantisedDots *all[] = {quantised_dots_portable(), cpu_has_avx2() ? quantised_dots_avx2() : NULL,
                                  cpu_has_avx512() ? quantised_dots_avx512() : NULL};
    static const int64_t groups[] = {0, 0, 32, 64, 96, 128, 256};
    for (int round = 0; round < 200; round++) {
        Case c = {.m = between(1, QUANTISED_ROWS), .n = between(1, 40), .bits = below(2) ? 8 : 4};
        c.k = between(1, 500), c.group = groups[below(7)];
        make(&c, DTYPE_F32, below(2), false, false);
        Quantised w = {.q = c.in[1].data,
                       .scales = c.in[2].data,
                       .zeros = c.in[3].data,
                       .bits = c.bits,
                       .n = c.n,
                       .k = c.k,
                       .row_bytes = c.bits == 8 ? c.k : quantised_blocks(c.k) * (QUANTISED_BLOCK / 2),
                       .group = c.group ? c.group : c.k,
                       .groups = quantised_groups(c.k, c.group)};
        int64_t columns = round_up(c.k, 2 * QUANTISED_BLOCK),
                stride = (c.n + QUANTISED_STREAMS - 1) / QUANTISED_STREAMS;
        int64_t first = below(stride), run = between(1, stride - first), width = QUANTISED_STREAMS * run;
        const float *from = c.in[0].data;
        float *wide = get(c.n * c.k * 4), *again = get(c.n * c.k * 4);
        for (size_t s = 0; s < sizeof all / sizeof *all; s++) {
            if (!all[s]) continue;
            QuantisedInput x = {c.m, columns, get(c.m * columns * 4), get(c.m * w.groups * 4)};
            float *got = get(c.m * width * 4);
            memset(x.x, 0, (size_t)(c.m * columns) * sizeof(float));
            memset(got, 0, (size_t)(c.m * width) * sizeof(float));
            for (int64_t i = 0; i < c.m; i++) {
                memcpy(x.x + i * columns, from + i * c.k, (size_t)c.k * sizeof(float));
                all[s]->arrange(&w, x.x + i * columns, columns, x.sums + i * w.groups);
            }
            all[s]->dots(&w, first, run, stride, &x, got, width);
            for (int64_t i = 0; i < c.m * width; i++) {
                int64_t row = first + i % width / run * stride + i % width % run;
                double sum = 0, size = 0;
                if (row >= c.n) continue;
                for (int64_t k = 0; k < c.k; k++) {
                    double q = weight(&c, row, k), each = (double)from[i / width * c.k + k];
                    double scale = (double)w.scales[row * w.groups + k / w.group];
                    sum += each * q, size += fabs(each * q) + fabs(16 * each * scale);
                }
                CHECK(fabs((double)got[i] - sum) <= 4e-7 * size);
            }
            all[s]->widen(&w, 0, c.n, 0, c.k, s ? again : wide);
            CHECK(!s || memcmp(wide, again, (size_t)(c.n * c.k) * sizeof(float)) == 0);
        }
        end(&c);
    }
}

/* What the shape rule refuses. */
static void test_rule(void) {
    Case c = {.m = 2, .n = 3, .k = 100, .bits = 4, .group = 32};
    make(&c, DTYPE_F32, false, false, false);
    Node *node = graph_node(c.graph, c.node);
    Type type;
    node_attr_mut(node, ATTR_bits)->i = 3;
    CHECK_CODE(&ctx, CODE_INVALID, graph_infer(&ctx, c.graph, c.node, &type));
    node_attr_mut(node, ATTR_bits)->i = 8;
    CHECK_CODE(&ctx, CODE_INVALID, graph_infer(&ctx, c.graph, c.node, &type));
    node_attr_mut(node, ATTR_bits)->i = 4;
    node_attr_mut(node, ATTR_group)->i = 48;
    CHECK_CODE(&ctx, CODE_INVALID, graph_infer(&ctx, c.graph, c.node, &type));
    node_attr_mut(node, ATTR_group)->i = -32;
    CHECK_CODE(&ctx, CODE_INVALID, graph_infer(&ctx, c.graph, c.node, &type));
    node_attr_mut(node, ATTR_group)->i = 64; /* the scales are four a row */
    CHECK_CODE(&ctx, CODE_INVALID, graph_infer(&ctx, c.graph, c.node, &type));
    node_attr_mut(node, ATTR_group)->i = 32;
    CHECK_OK(&ctx, graph_infer(&ctx, c.graph, c.node, &type));
    end(&c);
}

int main(void) {
    context_init(&ctx);
    CHECK_OK(&ctx, pool_create(&ctx, THREADS, &pool));
    test_random();
    test_instruction_sets();
    test_rule();
    pool_destroy(pool);
    return check_done();
}
