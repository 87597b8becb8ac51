/* Random graphs for the tests of lowering, allocation and scheduling: elementwise chains, contractions, norms with two
 * results, views, host calls. Seeded: the same number gives the same graph everywhere. */
#ifndef FORGE_TESTS_RANDOM_GRAPH_H
#define FORGE_TESTS_RANDOM_GRAPH_H

#include "graph/graph.h"
#include "npuir/npuir.h"

typedef struct Random {
    uint64_t state;
} Random;
static inline uint32_t random_below(Random *r, uint32_t n) {
    r->state = r->state * 6364136223846793005u + 1442695040888963407u;
    return n ? (uint32_t)(r->state >> 33) % n : 0;
}

typedef struct RandomOptions {
    uint32_t nodes;
    uint32_t reach; /* operands are taken from so many last values */
    bool host, views;
} RandomOptions;

static inline Code random_node(Context *ctx, Graph *g, Random *r, Op op, const ValueId *operands, size_t n, DType dtype,
                               uint8_t rank, const int64_t *shape, size_t n_results, NodeId *out) {
    Type types[2] = {{dtype, rank, shape}, {dtype, rank, shape}};
    return graph_insert(ctx, g, NODE_NONE, op, operands, n, types, n_results, (int32_t)random_below(r, 3) - 1, out);
}

/* f32 values of shape [a, b] from a few sizes; each value can meet those of its own shape. */
static inline Code random_graph(Context *ctx, Arena *arena, Random *r, const RandomOptions *o, Graph **out) {
    static const int64_t sizes[] = {1, 2, 3, 8, 16, 33, 64};
    Graph *g;
    NodeId id;
    TRY(graph_create(ctx, arena, &g));
    static const char *sources[] = {"model.py:1 in forward", "model.py:2 in \"block\" # {odd}"};
    static const char *strings[] = {"aten::odd", "aten::even"};
    g->sources = sources;
    g->n_sources = 2;
    g->strings = strings;
    g->n_strings = 2;
    TRY(ARENA_NEW(ctx, arena, 4, &g->inputs));
    TRY(ARENA_NEW(ctx, arena, 8, &g->outputs));
    for (uint32_t i = 0; i < 4; i++) {
        int64_t shape[2] = {sizes[random_below(r, 7)], sizes[random_below(r, 7)]};
        TRY(random_node(ctx, g, r, OP_input, NULL, 0, DTYPE_F32, 2, shape, 1, &id));
        node_attr_mut(graph_node(g, id), ATTR_index)->i = i;
        g->inputs[g->n_inputs++] = graph_node(g, id)->first_result;
    }
    for (uint32_t i = 0; i < 2; i++) { /* one of them turned */
        int64_t shape[2] = {sizes[random_below(r, 7)], sizes[random_below(r, 7)]};
        int64_t strides[2] = {i ? 1 : shape[1], i ? shape[0] : 1};
        Constant c = {.kind = (ConstantKind)i,
                      .name = i ? "odd \"name\" {#}" : "h.0.weight",
                      .dtype = DTYPE_F32,
                      .rank = 2,
                      .shape = shape,
                      .strides = strides,
                      .bytes = 4 * shape[0] * shape[1]};
        uint32_t index;
        TRY(graph_add_constant(ctx, g, &c, &index));
        TRY(random_node(ctx, g, r, OP_constant, NULL, 0, DTYPE_F32, 2, shape, 1, &id));
        node_attr_mut(graph_node(g, id), ATTR_index)->i = index;
    }
    for (uint32_t i = 0; i < o->nodes; i++) {
        uint32_t reach = o->reach < g->n_values ? o->reach : g->n_values;
        ValueId a = g->n_values - 1 - random_below(r, reach), b = g->n_values - 1 - random_below(r, reach);
        const Value *x = graph_value(g, a), *y = graph_value(g, b);
        int64_t shape[2] = {x->shape[0], x->shape[1]};
        uint32_t kind = random_below(r, 12);
        if (kind < 3 && x->shape[0] == y->shape[0] && x->shape[1] == y->shape[1]) {
            TRY(random_node(ctx, g, r, OP_add, (ValueId[]){a, b}, 2, DTYPE_F32, 2, shape, 1, &id));
        } else if (kind < 5) {
            TRY(random_node(ctx, g, r, OP_relu, &a, 1, DTYPE_F32, 2, shape, 1, &id));
            if (random_below(r, 2))
                TRY(attr_set_ints(ctx, g, node_attr_mut(graph_node(g, id), ATTR_order), (int64_t[]){1, 0}, 2));
        } else if (kind == 5) {
            TRY(random_node(ctx, g, r, OP_softmax, &a, 1, DTYPE_F32, 2, shape, 1, &id));
            node_attr_mut(graph_node(g, id), ATTR_dim)->i = 1;
        } else if (kind == 6 && x->shape[1] == y->shape[1]) { /* x @ y^T, sometimes more than once */
            shape[1] = y->shape[0];
            do {
                TRY(random_node(ctx, g, r, OP_linear, (ValueId[]){a, b, VALUE_NONE}, 3, DTYPE_F32, 2, shape, 1, &id));
            } while (random_below(r, 2));
        } else if (kind == 7) {
            TRY(random_node(ctx, g, r, OP_rms_norm, (ValueId[]){a, VALUE_NONE, a}, 3, DTYPE_F32, 2, shape, 2, &id));
            node_attr_mut(graph_node(g, id), ATTR_axes)->i = 1;
            node_attr_mut(graph_node(g, id), ATTR_eps)->f = 1e-5;
        } else if (kind == 8 && o->host) {
            TRY(random_node(ctx, g, r, OP_host, (ValueId[]){a, b}, 2, DTYPE_F32, 2, shape, 1 + random_below(r, 2),
                            &id));
            node_attr_mut(graph_node(g, id), ATTR_name)->i = random_below(r, 2);
            node_attr_mut(graph_node(g, id), ATTR_effect)->i = random_below(r, 4) == 0;
        } else if (kind == 9 && o->views) {
            int64_t turned[2] = {shape[1], shape[0]};
            TRY(random_node(ctx, g, r, OP_permute, &a, 1, DTYPE_F32, 2, turned, 1, &id));
            TRY(attr_set_ints(ctx, g, node_attr_mut(graph_node(g, id), ATTR_dims), (int64_t[]){1, 0}, 2));
        } else if (kind == 10 && o->views) { /* turns the shape without turning the memory */
            int64_t turned[2] = {shape[1], shape[0]};
            TRY(random_node(ctx, g, r, OP_reshape, &a, 1, DTYPE_F32, 2, turned, 1, &id));
            TRY(attr_set_ints(ctx, g, node_attr_mut(graph_node(g, id), ATTR_shape), turned, 2));
        } else if (kind == 11 && o->views && shape[0] > 1) {
            int64_t start = random_below(r, (uint32_t)shape[0]),
                    end = start + random_below(r, (uint32_t)(shape[0] - start) + 1);
            int64_t cut[2] = {(end - start + 1) / 2, shape[1]};
            if (cut[0] == 0) continue;
            TRY(random_node(ctx, g, r, OP_slice, &a, 1, DTYPE_F32, 2, cut, 1, &id));
            Node *node = graph_node(g, id);
            node_attr_mut(node, ATTR_start)->i = start;
            node_attr_mut(node, ATTR_end)->i = end;
            node_attr_mut(node, ATTR_step)->i = 2;
        } else {
            TRY(random_node(ctx, g, r, OP_neg, &a, 1, DTYPE_F32, 2, shape, 1, &id));
        }
    }
    for (uint32_t i = 0; i < 3; i++)
        g->outputs[g->n_outputs++] = g->n_values - 1 - random_below(r, 8 < g->n_values ? 8 : g->n_values);
    *out = g;
    return CODE_OK;
}

static inline KernelTraits test_traits(Op op) {
    bool elementwise = op_is(op, ELEMENTWISE);
    return (KernelTraits){
        .contiguous = op == OP_softmax || op == OP_rms_norm ? 1 : 0,
        .unit_inner = op == OP_linear ? 3 : 0,
        .inplace = elementwise                             ? 7
                   : op == OP_softmax || op == OP_rms_norm ? 1
                                                           : 0,
        .strided_out = op_is(op, STRIDED_OUT) || op == OP_contiguous,
    };
}
static inline int64_t test_scratch(const Graph *g, const Node *node, int threads) {
    (void)g;
    return node->op == OP_linear ? 640 * threads : 0;
}

static inline Code random_npuir(Context *ctx, Arena *arena, Random *r, const RandomOptions *o, const char *target,
                                Npuir **out) {
    Graph *g;
    LowerOptions options = {
        .target = target_find(target), .traits = test_traits, .scratch = test_scratch, .threads = 2};
    TRY(random_graph(ctx, arena, r, o, &g));
    return npuir_lower(ctx, arena, g, &options, out);
}

#endif
