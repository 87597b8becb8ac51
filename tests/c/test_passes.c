/* Random graphs through random sequences of passes: an interpreter gives the same values before and after. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "exec/kernel.h"
#include "graph/graph.h"
#include "passes/passes.h"

enum { GRAPHS = 2500, MAX_POOL = 64, MAX_DIM = 4, OUTPUTS = 12 };

typedef struct Gen {
    Context ctx;
    Arena arena;
    Graph *g;
    uint64_t state;
    ValueId pool[MAX_POOL];
    uint32_t n;
} Gen;

static uint32_t pick(Gen *gen, uint32_t below) {
    gen->state = gen->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(gen->state >> 33) % below;
}

/* Numbers on which rewrites go wrong if they can. */
static double number(Gen *gen) {
    const double numbers[] = {
        0.0, 0.0, -0.0, -0.0, 1.0, 1.0, -1.0, 2.0, 0.5, 3.25, 1e30, (double)NAN, (double)INFINITY};
    return numbers[pick(gen, sizeof numbers / sizeof *numbers)];
}

static Type make_type(DType dtype, uint8_t rank, int64_t *shape) { return (Type){dtype, rank, shape}; }

static NodeId insert(Gen *gen, Op op, const ValueId *operands, size_t n, Type type) {
    NodeId id = NODE_NONE;
    CHECK_OK(&gen->ctx, graph_insert(&gen->ctx, gen->g, NODE_NONE, op, operands, n, &type, 1, -1, &id));
    if (gen->n < MAX_POOL)
        gen->pool[gen->n++] = graph_node(gen->g, id)->first_result;
    else
        gen->pool[pick(gen, MAX_POOL)] = graph_node(gen->g, id)->first_result;
    return id;
}

static Attr *attr(Gen *gen, NodeId id, AttrName name) { return node_attr_mut(graph_node(gen->g, id), name); }

static void set_ints(Gen *gen, NodeId id, AttrName name, const int64_t *items, size_t count) {
    CHECK_OK(&gen->ctx, attr_set_ints(&gen->ctx, gen->g, attr(gen, id, name), items, count));
}

static ValueId any(Gen *gen, DType dtype) {
    for (int tries = 0; tries < 100; tries++) {
        ValueId v = gen->pool[pick(gen, gen->n)];
        if (graph_value(gen->g, v)->dtype == dtype) return v;
    }
    return VALUE_NONE;
}

/* Of the same type as `v`: `v` itself in the worst case. */
static ValueId like(Gen *gen, ValueId v) {
    const Value *want = graph_value(gen->g, v);
    for (int tries = 0; tries < 30; tries++) {
        ValueId w = gen->pool[pick(gen, gen->n)];
        const Value *have = graph_value(gen->g, w);
        if (have->dtype == want->dtype && have->rank == want->rank &&
            memcmp(have->shape, want->shape, want->rank * sizeof(int64_t)) == 0)
            return w;
    }
    return v;
}

static void fill(Gen *gen, DType dtype, int64_t count, void *data) {
    for (int64_t i = 0; i < count; i++) {
        if (dtype == DTYPE_F32) ((float *)data)[i] = (float)number(gen);
        if (dtype == DTYPE_I64) ((int64_t *)data)[i] = pick(gen, 3);
        if (dtype == DTYPE_BOOL) ((uint8_t *)data)[i] = (uint8_t)pick(gen, 2);
    }
}

static void add_leaf(Gen *gen) {
    const DType dtypes[] = {DTYPE_F32, DTYPE_F32, DTYPE_F32, DTYPE_I64, DTYPE_BOOL};
    DType dtype = dtypes[pick(gen, 5)];
    int64_t shape[3], strides[3], count = 1;
    uint8_t rank = (uint8_t)pick(gen, 4);
    for (int d = 0; d < rank; d++) shape[d] = 1 + pick(gen, MAX_DIM - 1);
    for (int d = rank; d-- > 0; count *= shape[d]) strides[d] = count;
    uint32_t kind = pick(gen, 8);
    if (kind < 3) {
        Constant c = {.kind = kind ? CONSTANT_STATE : CONSTANT_LITERAL,
                      .name = "c",
                      .dtype = dtype,
                      .rank = rank,
                      .shape = shape};
        c.strides = strides;
        c.bytes = count * (int64_t)dtype_size(dtype);
        CHECK_OK(&gen->ctx, arena_alloc(&gen->ctx, &gen->arena, (size_t)c.bytes, &c.data));
        fill(gen, dtype, count, c.data);
        uint32_t index;
        CHECK_OK(&gen->ctx, graph_add_constant(&gen->ctx, gen->g, &c, &index));
        attr(gen, insert(gen, OP_constant, NULL, 0, make_type(dtype, rank, shape)), ATTR_index)->i = index;
    } else if (kind == 3) {
        Scalar s = {.kind = SCALAR_INT, .i = pick(gen, 2)};
        if (dtype == DTYPE_F32) s = (Scalar){.kind = SCALAR_FLOAT, .f = number(gen)};
        attr(gen, insert(gen, OP_full, NULL, 0, make_type(dtype, rank, shape)), ATTR_value)->s = s;
    } else if (kind == 4) {
        NodeId id = insert(gen, OP_arange, NULL, 0, make_type(DTYPE_I64, 1, (int64_t[]){3}));
        attr(gen, id, ATTR_first)->s = (Scalar){.kind = SCALAR_INT, .i = pick(gen, 2)};
        attr(gen, id, ATTR_delta)->s = (Scalar){.kind = SCALAR_INT, .i = 1};
    } else {
        ValueId *inputs; /* grows by one: this is a test */
        uint32_t n = gen->g->n_inputs;
        CHECK_OK(&gen->ctx, ARENA_NEW(&gen->ctx, &gen->arena, n + 1, &inputs));
        if (n) memcpy(inputs, gen->g->inputs, n * sizeof *inputs);
        NodeId id = insert(gen, OP_input, NULL, 0, make_type(dtype, rank, shape));
        attr(gen, id, ATTR_index)->i = n;
        inputs[n] = graph_node(gen->g, id)->first_result;
        gen->g->inputs = inputs;
        gen->g->n_inputs = n + 1;
    }
}

static void add_view(Gen *gen) {
    ValueId v = gen->pool[pick(gen, gen->n)];
    Type t = value_type(gen->g, v);
    int64_t shape[6], items[6];
    for (int d = 0; d < t.rank; d++) shape[d] = t.shape[d];
    NodeId id;
    switch (pick(gen, 5)) {
    case 0: { /* reshape: merge all, split off a leading 1, or keep */
        uint8_t rank = 1;
        uint32_t form = pick(gen, 3);
        if (form == 0) {
            int64_t count = 1;
            for (int d = 0; d < t.rank; d++) count *= shape[d];
            shape[0] = count;
        } else {
            rank = t.rank;
            if (form == 1 && rank < 4) {
                memmove(shape + 1, shape, rank * sizeof *shape);
                shape[0] = 1;
                rank++;
            }
        }
        id = insert(gen, OP_reshape, &v, 1, make_type(t.dtype, rank, shape));
        set_ints(gen, id, ATTR_shape, shape, rank);
        return;
    }
    case 1:
        for (int d = 0; d < t.rank; d++) items[d] = d;
        for (int d = 1; d < t.rank; d++) {
            uint32_t other = pick(gen, (uint32_t)d + 1);
            int64_t swap = items[d];
            items[d] = items[other];
            items[other] = swap;
        }
        for (int d = 0; d < t.rank; d++) shape[d] = t.shape[items[d]];
        id = insert(gen, OP_permute, &v, 1, make_type(t.dtype, t.rank, shape));
        set_ints(gen, id, ATTR_dims, items, t.rank);
        return;
    case 2:
        for (int d = 0; d < t.rank; d++)
            if (shape[d] == 1) shape[d] = 1 + pick(gen, MAX_DIM - 1);
        id = insert(gen, OP_expand, &v, 1, make_type(t.dtype, t.rank, shape));
        set_ints(gen, id, ATTR_shape, shape, t.rank);
        return;
    case 3: {
        if (t.rank == 0) return;
        uint32_t dim = pick(gen, t.rank);
        int64_t start = pick(gen, (uint32_t)shape[dim]), step = 1 + pick(gen, 2), end = shape[dim];
        shape[dim] = (end - start + step - 1) / step;
        id = insert(gen, OP_slice, &v, 1, make_type(t.dtype, t.rank, shape));
        attr(gen, id, ATTR_dim)->i = dim;
        attr(gen, id, ATTR_start)->i = start;
        attr(gen, id, ATTR_end)->i = end;
        attr(gen, id, ATTR_step)->i = step;
        return;
    }
    default: insert(gen, OP_contiguous, &v, 1, t);
    }
}

static void add_elementwise(Gen *gen) {
    const Op unary[] = {OP_neg, OP_abs, OP_relu, OP_sin, OP_exp, OP_floor};
    const Op binary[] = {OP_add, OP_sub, OP_mul, OP_div, OP_minimum, OP_maximum};
    const Op tests[] = {OP_eq, OP_lt, OP_ge, OP_ne};
    const Op logic[] = {OP_logical_and, OP_logical_or, OP_bitwise_and, OP_bitwise_or, OP_bitwise_xor};
    ValueId x = any(gen, DTYPE_F32), b = any(gen, DTYPE_BOOL), i = any(gen, DTYPE_I64), operands[3];
    switch (pick(gen, 9)) {
    case 0:
        if (x != VALUE_NONE) insert(gen, unary[pick(gen, 6)], &x, 1, value_type(gen->g, x));
        return;
    case 1:
    case 2: {
        if (x == VALUE_NONE) return;
        NodeId id = insert(gen, binary[pick(gen, 6)], &x, 1, value_type(gen->g, x));
        attr(gen, id, ATTR_scalar)->s = (Scalar){.kind = SCALAR_FLOAT, .f = number(gen)};
        attr(gen, id, ATTR_reverse)->i = pick(gen, 2);
        return;
    }
    case 3:
        if (x == VALUE_NONE) return;
        operands[0] = x, operands[1] = like(gen, x);
        insert(gen, pick(gen, 8) ? binary[pick(gen, 6)] : OP_pow, operands, 2, value_type(gen->g, x));
        return;
    case 4: {
        if (x == VALUE_NONE) return;
        Type t = value_type(gen->g, x);
        operands[0] = x, operands[1] = like(gen, x);
        insert(gen, tests[pick(gen, 4)], operands, 2, make_type(DTYPE_BOOL, t.rank, (int64_t *)(uintptr_t)t.shape));
        return;
    }
    case 5: {
        if (b == VALUE_NONE) return;
        Type t = value_type(gen->g, b);
        for (int tries = 0; tries < 30; tries++) {
            operands[0] = b, operands[1] = any(gen, DTYPE_F32);
            if (operands[1] == VALUE_NONE) return;
            Type other = value_type(gen->g, operands[1]);
            if (other.rank != t.rank || memcmp(other.shape, t.shape, t.rank * sizeof(int64_t)) != 0) continue;
            operands[2] = like(gen, operands[1]);
            insert(gen, OP_where, operands, 3, other);
            return;
        }
        return;
    }
    case 6:
        if (b == VALUE_NONE) return;
        operands[0] = b, operands[1] = like(gen, b);
        insert(gen, logic[pick(gen, 5)], operands, 2, value_type(gen->g, b));
        return;
    case 7: {
        if (i == VALUE_NONE) return;
        const Op whole[] = {OP_add, OP_sub, OP_mul};
        if (pick(gen, 2)) {
            NodeId id = insert(gen, whole[pick(gen, 3)], &i, 1, value_type(gen->g, i));
            attr(gen, id, ATTR_scalar)->s = (Scalar){.kind = SCALAR_INT, .i = pick(gen, 2)};
        } else {
            operands[0] = i, operands[1] = like(gen, i);
            insert(gen, whole[pick(gen, 3)], operands, 2, value_type(gen->g, i));
        }
        return;
    }
    default: {
        ValueId from = gen->pool[pick(gen, gen->n)];
        Type t = value_type(gen->g, from);
        const DType floats[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F64, DTYPE_F16};
        const DType whole[] = {DTYPE_F32, DTYPE_I64, DTYPE_I32, DTYPE_BOOL};
        t.dtype = dtype_is_float(t.dtype) ? floats[pick(gen, 4)] : whole[pick(gen, 4)];
        insert(gen, OP_cast, &from, 1, t);
    }
    }
}

static void add_other(Gen *gen) {
    ValueId x = any(gen, DTYPE_F32), ids = any(gen, DTYPE_I64), operands[3];
    if (x == VALUE_NONE) return;
    Type t = value_type(gen->g, x);
    int64_t shape[8];
    for (int d = 0; d < t.rank; d++) shape[d] = t.shape[d];
    NodeId id;
    uint32_t dim = t.rank ? pick(gen, t.rank) : 0;
    switch (pick(gen, 6)) {
    case 0:
        if (t.rank == 0) return;
        operands[0] = x, operands[1] = like(gen, x);
        uint32_t n = 1 + pick(gen, 2);
        shape[dim] *= n;
        if (shape[dim] > 12) return;
        attr(gen, insert(gen, OP_cat, operands, n, make_type(t.dtype, t.rank, shape)), ATTR_dim)->i = dim;
        return;
    case 1:
        if (t.rank == 0) return;
        attr(gen, insert(gen, OP_softmax, &x, 1, t), ATTR_dim)->i = dim;
        return;
    case 2:
        if (t.rank == 0) return;
        shape[dim] = 1;
        id = insert(gen, OP_sum, &x, 1, make_type(t.dtype, t.rank, shape));
        set_ints(gen, id, ATTR_dims, (int64_t[]){dim}, 1);
        attr(gen, id, ATTR_keepdim)->i = 1;
        return;
    case 3: { /* ids may lie outside: only lookups that cannot fail are made */
        if (ids == VALUE_NONE || t.rank != 2 || shape[0] < 3) return;
        const Node *def = value_node(gen->g, ids);
        if (def->op != OP_arange || node_attr(def, ATTR_first)->s.i + 3 > shape[0]) return;
        operands[0] = x, operands[1] = ids;
        insert(gen, OP_embedding, operands, 2, make_type(t.dtype, 2, (int64_t[]){3, shape[1]}));
        return;
    }
    case 4: {
        ValueId w = any(gen, DTYPE_F32);
        Type m = value_type(gen->g, w);
        if (t.rank < 2 || m.rank != t.rank || m.shape[m.rank - 2] != t.shape[t.rank - 1]) return;
        for (int d = 0; d + 2 < t.rank; d++)
            if (m.shape[d] != t.shape[d]) return;
        operands[0] = x, operands[1] = w;
        shape[t.rank - 1] = m.shape[m.rank - 1];
        insert(gen, OP_matmul, operands, 2, make_type(t.dtype, t.rank, shape));
        return;
    }
    default: {
        ValueId w = any(gen, DTYPE_F32);
        Type m = value_type(gen->g, w);
        if (t.rank < 1 || m.rank != 2 || m.shape[1] != t.shape[t.rank - 1]) return;
        operands[0] = x, operands[1] = w;
        shape[t.rank - 1] = m.shape[0];
        insert(gen, OP_linear, operands, 2, make_type(t.dtype, t.rank, shape));
    }
    }
}

static void generate(Gen *gen) {
    CHECK_OK(&gen->ctx, graph_create(&gen->ctx, &gen->arena, &gen->g));
    for (int i = 0; i < 6; i++) add_leaf(gen);
    uint32_t steps = 5 + pick(gen, 35);
    for (uint32_t i = 0; i < steps; i++) {
        uint32_t kind = pick(gen, 10);
        if (kind < 4)
            add_view(gen);
        else if (kind < 8)
            add_elementwise(gen);
        else if (kind < 9)
            add_other(gen);
        else
            add_leaf(gen);
    }
    CHECK_OK(&gen->ctx, ARENA_NEW(&gen->ctx, &gen->arena, OUTPUTS, &gen->g->outputs));
    gen->g->n_outputs = OUTPUTS;
    for (int i = 0; i < OUTPUTS; i++) gen->g->outputs[i] = gen->pool[pick(gen, gen->n)];
}

/* --- interpreter -------------------------------------------------------------------------------------------------- */

static Tensor row_major(const Graph *g, ValueId v) {
    const Value *value = graph_value(g, v);
    Tensor t = {.dtype = value->dtype, .rank = value->rank};
    int64_t stride = 1;
    for (int d = t.rank; d-- > 0;) {
        t.shape[d] = value->shape[d];
        t.strides[d] = stride;
        stride *= t.shape[d];
    }
    return t;
}

static Code interpret(Gen *gen, const Graph *g, void *const *inputs, Arena *arena, Tensor *outputs) {
    Tensor *values;
    TRY(ARENA_NEW(&gen->ctx, arena, g->n_values, &values));
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        Tensor in[40] = {0}, out[4];
        if (node->op == OP_input || node->op == OP_constant) {
            Tensor *t = &values[node->first_result];
            *t = row_major(g, node->first_result);
            if (node->op == OP_input) {
                t->data = inputs[node_int(node, ATTR_index)];
                continue;
            }
            const Constant *c = &g->constants[node_int(node, ATTR_index)];
            t->data = c->data;
            if (c->rank) memcpy(t->strides, c->strides, c->rank * sizeof *c->strides);
            continue;
        }
        if (node->n_operands > 40 || node->n_results > 4) return fail(&gen->ctx, CODE_INTERNAL, "too many operands");
        for (uint32_t k = 0; k < node->n_operands; k++)
            if (node->operands[k] != VALUE_NONE) in[k] = values[node->operands[k]];
        for (uint32_t k = 0; k < node->n_results; k++) {
            out[k] = row_major(g, node_result(node, k));
            size_t bytes = (size_t)tensor_count(&out[k]) * dtype_size(out[k].dtype);
            TRY(arena_alloc(&gen->ctx, arena, bytes, &out[k].data));
        }
        Code code = cpu_eval(&gen->ctx, g, id, in, node->n_operands, out, node->n_results, NULL);
        if (code != CODE_OK) return fail(&gen->ctx, code, "%s was not evaluated", op_info(node->op)->name);
        for (uint32_t k = 0; k < node->n_results; k++) values[node_result(node, k)] = out[k];
    }
    for (uint32_t i = 0; i < g->n_outputs; i++) outputs[i] = values[g->outputs[i]];
    return CODE_OK;
}

static double element(const Tensor *t, int64_t flat, uint64_t *bits) {
    int64_t offset = 0;
    for (int d = t->rank; d-- > 0; flat /= t->shape[d]) offset += flat % t->shape[d] * t->strides[d];
    const char *at = (const char *)t->data + offset * (int64_t)dtype_size(t->dtype);
    uint16_t half;
    float f;
    double d;
    *bits = 0;
    memcpy(bits, at, dtype_size(t->dtype));
    memcpy(&half, at, dtype_size(t->dtype) < 2 ? 1 : 2);
    switch (t->dtype) {
    case DTYPE_F16: return (double)f16_to_f32(half);
    case DTYPE_BF16: return (double)bf16_to_f32(half);
    case DTYPE_F32: memcpy(&f, at, sizeof f); return (double)f;
    case DTYPE_F64: memcpy(&d, at, sizeof d); return d;
    default: return 0;
    }
}

/* Bit for bit (any NaN is as good as another), or, where sums may have been done in another order, nearly. */
static bool same(const Tensor *a, const Tensor *b, bool exact) {
    if (a->dtype != b->dtype || a->rank != b->rank || tensor_count(a) != tensor_count(b)) return false;
    for (int64_t i = 0; i < tensor_count(a); i++) {
        uint64_t x, y;
        double p = element(a, i, &x), q = element(b, i, &y);
        if (x == y || (isnan(p) && isnan(q))) continue;
        if (exact || !dtype_is_float(a->dtype)) return false;
        if (!(fabs(p - q) <= 1e-3 + 1e-3 * fabs(p)) && isfinite(p)) return false;
    }
    return true;
}

static bool multiplies(const Graph *g) {
    GRAPH_EACH(g, id)
        if (op_is(graph_node(g, id)->op, CONTRACTION)) return true;
    return false;
}

static void run_one(uint64_t seed) {
    Gen gen = {.state = seed * 7919 + 1};
    Arena scratch;
    context_init(&gen.ctx);
    arena_init(&gen.arena);
    arena_init(&scratch);
    generate(&gen);
    CHECK_OK(&gen.ctx, graph_verify(&gen.ctx, gen.g));

    void *inputs[MAX_POOL];
    Tensor before[OUTPUTS], after[OUTPUTS];
    for (uint32_t i = 0; i < gen.g->n_inputs && i < MAX_POOL; i++) {
        Tensor t = row_major(gen.g, gen.g->inputs[i]);
        CHECK_OK(&gen.ctx, arena_alloc(&gen.ctx, &scratch, (size_t)tensor_count(&t) * dtype_size(t.dtype), &inputs[i]));
        fill(&gen, t.dtype, tensor_count(&t), inputs[i]);
    }
    CHECK_OK(&gen.ctx, interpret(&gen, gen.g, inputs, &scratch, before));

    /* Eight passes of any kind in any order. Only contractions may sum in another order once they are linear. */
    PassContext pc = {.ctx = &gen.ctx, .arena = &gen.arena, .eval = cpu_eval};
    pass_options_default(&pc.options);
    pc.options.fuse_layout = pick(&gen, 2);
    pc.options.alpha = pick(&gen, 3) * 0.5;
    bool exact = !multiplies(gen.g);
    char names[256] = "";
    size_t count, used = 0;
    const Pass *table = pass_table(&count);
    for (int i = 0; i < 8; i++) {
        const Pass *pass = &table[pick(&gen, (uint32_t)count)];
        used += (size_t)snprintf(names + used, sizeof names - used, " %s", pass->name);
        CHECK_OK(&gen.ctx, pass->run(&pc, gen.g));
        CHECK_OK(&gen.ctx, graph_verify(&gen.ctx, gen.g));
    }
    CHECK_EQUAL(gen.g->n_outputs, OUTPUTS);
    CHECK_OK(&gen.ctx, interpret(&gen, gen.g, inputs, &scratch, after));
    for (int i = 0; i < OUTPUTS; i++) {
        if (same(&before[i], &after[i], exact)) continue;
        fprintf(stderr, "seed %llu: output %d changed by%s\n", (unsigned long long)seed, i, names);
        check_failures++;
    }
    arena_destroy(&scratch);
    arena_destroy(&gen.arena);
}

/* The Nth allocation fails: every pass reports it and nothing leaks or breaks. */
static void run_out_of_memory(void) {
    for (uint64_t n = 1; n < 400; n++) {
        Gen gen = {.state = 12345};
        context_init(&gen.ctx);
        arena_init(&gen.arena);
        generate(&gen);
        PassContext pc = {.ctx = &gen.ctx, .arena = &gen.arena, .eval = cpu_eval};
        pass_options_default(&pc.options);
        size_t count;
        const Pass *table = pass_table(&count);
        gen.ctx.fail_allocation = n;
        Code code = CODE_OK;
        for (size_t i = 0; i < count && code == CODE_OK; i++) code = table[i].run(&pc, gen.g);
        CHECK(code == CODE_OK || code == CODE_NO_MEMORY);
        CHECK_EQUAL(gen.ctx.code, code);
        arena_destroy(&gen.arena);
    }
}

int main(int argc, char **argv) {
    if (argc > 1) {
        run_one(strtoull(argv[1], NULL, 10));
        return check_done();
    }
    for (uint64_t seed = 0; seed < GRAPHS && check_failures < 20; seed++) run_one(seed);
    run_out_of_memory();
    return check_done();
}
