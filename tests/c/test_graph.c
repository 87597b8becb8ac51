/* Base and graph core: half floats, arena, error text, editing of graphs. */
#include "graph/graph.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "check.h"

/* Every f16 is read as it is and written back; between neighbours the nearer one wins, the even one of a tie. */
static void test_half(void) {
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        float value = f16_to_f32((uint16_t)bits);
        if (isnan(value)) {
            CHECK((bits & 0x7c00) == 0x7c00 && (bits & 0x3ff));
            continue;
        }
        CHECK_EQUAL(f32_to_f16(value), bits);
        if ((bits & 0x7fff) >= 0x7bff) continue; /* no finite neighbour above */
        float next = f16_to_f32((uint16_t)(bits + 1)), middle = (value + next) / 2;
        CHECK_EQUAL(f32_to_f16(middle), bits & 1 ? bits + 1 : bits);
        CHECK_EQUAL(f32_to_f16(nextafterf(middle, value)), bits);
        CHECK_EQUAL(f32_to_f16(nextafterf(middle, next)), bits + 1);
    }
    CHECK_EQUAL(f32_to_f16(65519.0f), 0x7bff);
    CHECK_EQUAL(f32_to_f16(65520.0f), 0x7c00);
    CHECK_EQUAL(f32_to_f16(0x1p-25f), 0);
    CHECK_EQUAL(f32_to_bf16(1.00390625f), 0x3f80); /* a tie goes to the even one */
    CHECK_EQUAL(f32_to_bf16(NAN) & 0x7fff, 0x7fc0);
}

static void test_arena(Context *ctx) {
    Arena arena;
    void *memory;
    arena_init(&arena);
    for (size_t size = 0; size < 200000; size = size * 2 + 1) {
        CHECK_OK(ctx, arena_alloc(ctx, &arena, size, &memory));
        CHECK(memory && (uintptr_t)memory % (size >= 64 ? 64 : 16) == 0);
        for (size_t k = 0; k < size; k++) CHECK(((char *)memory)[k] == 0);
        if (size) memset(memory, 1, size);
    }
    CHECK_CODE(ctx, CODE_NO_MEMORY, arena_array(ctx, &arena, SIZE_MAX / 2, 4, &memory));
    CHECK(memory == NULL);
    ctx->fail_allocation = 2;
    CHECK_OK(ctx, arena_alloc(ctx, &arena, 1, &memory));
    CHECK_CODE(ctx, CODE_NO_MEMORY, arena_alloc(ctx, &arena, 1, &memory));
    CHECK_OK(ctx, arena_alloc(ctx, &arena, 1, &memory));
    arena_destroy(&arena);
}

static void test_errors(Context *ctx) {
    CHECK_EQUAL(fail(ctx, CODE_TYPE, "number %d", 3), CODE_TYPE);
    CHECK_EQUAL(fail(ctx, CODE_INVALID, "later"), CODE_INVALID); /* the first one stays */
    fail_prefix(ctx, "node %d", 4);
    CHECK_EQUAL(ctx->code, CODE_TYPE);
    CHECK(strcmp(ctx->text, "node 4: number 3") == 0);
    for (int k = 0; k < 300; k++) fail_prefix(ctx, "at level %d", k);
    CHECK(strlen(ctx->text) < ERROR_TEXT_MAX);
    context_init(ctx);
}

static void test_tables(void) {
    for (int k = 0; k < OP_COUNT; k++) {
        Op op;
        const OpInfo *info = op_info((Op)k);
        CHECK(op_from_name(info->name, strlen(info->name), &op) && op == (Op)k);
        for (int a = 0; a < info->n_attrs; a++) CHECK(info->attrs[a] > ATTR_END && info->attrs[a] < ATTR_COUNT);
    }
    for (int k = 0; k < DTYPE_COUNT; k++) {
        DType dtype;
        CHECK(dtype_from_name(dtype_name((DType)k), strlen(dtype_name((DType)k)), &dtype) && dtype == (DType)k);
    }
}

static ValueId insert_neg(Context *ctx, Graph *g, NodeId before, ValueId x) {
    NodeId id;
    Type type = value_type(g, x);
    CHECK_OK(ctx, graph_insert(ctx, g, before, OP_neg, &x, 1, &type, 1, -1, &id));
    return graph_node(g, id)->first_result;
}

/* A long chain of which every other node is replaced by its operand; chains of replacements; insertion in front. */
static void test_editing(Context *ctx) {
    enum { LENGTH = 20000 };
    Arena arena;
    Graph *g, *clone;
    NodeId id;
    Uses uses;
    const int64_t shape[2] = {2, 3};
    Type type = {DTYPE_F32, 2, shape};
    arena_init(&arena);
    CHECK_OK(ctx, graph_create(ctx, &arena, &g));
    CHECK_OK(ctx, graph_insert(ctx, g, NODE_NONE, OP_input, NULL, 0, &type, 1, -1, &id));
    ValueId input = graph_node(g, id)->first_result, v = input;
    for (int k = 0; k < LENGTH; k++) v = insert_neg(ctx, g, NODE_NONE, v);
    g->inputs = &input;
    g->n_inputs = 1;
    g->outputs = &v;
    g->n_outputs = 1;
    for (NodeId n = LENGTH; n >= 1; n--) { /* from the end: the forwards make chains */
        if (n % 2 == 0) continue;
        graph_replace(g, graph_node(g, n)->first_result, graph_node(g, n)->operands[0]);
        graph_kill(g, n);
    }
    graph_replace(g, v, v);
    CHECK_EQUAL(graph_count(g), LENGTH / 2);
    CHECK_OK(ctx, graph_compact(ctx, g));
    CHECK_EQUAL(g->n_nodes, LENGTH / 2 + 1);
    CHECK_EQUAL(g->n_values, g->n_nodes);
    CHECK_EQUAL(g->outputs[0], g->n_values - 1);
    CHECK_OK(ctx, graph_verify(ctx, g));

    ValueId first = insert_neg(ctx, g, g->first, input); /* before its operand: the verifier must see it */
    CHECK_CODE(ctx, CODE_INVALID, graph_verify(ctx, g));
    context_init(ctx);
    graph_kill(g, graph_value(g, first)->def);
    insert_neg(ctx, g, g->last, input);
    CHECK_OK(ctx, graph_compact(ctx, g));
    CHECK_OK(ctx, graph_verify(ctx, g));
    CHECK_OK(ctx, graph_uses(ctx, g, &arena, &uses));
    CHECK_EQUAL(use_count(&uses, g->inputs[0]), 2);
    CHECK_EQUAL(use_count(&uses, g->outputs[0]), 1);
    CHECK_EQUAL(uses.output_uses[g->outputs[0]], 1);

    CHECK_OK(ctx, graph_clone(ctx, g, &arena, &clone));
    CHECK_OK(ctx, graph_verify(ctx, clone));
    graph_kill(g, g->last); /* its result is an output */
    CHECK_CODE(ctx, CODE_INTERNAL, graph_compact(ctx, g));
    context_init(ctx);
    CHECK_OK(ctx, graph_verify(ctx, clone));
    CHECK_CODE(ctx, CODE_INTERNAL, graph_insert(ctx, clone, clone->n_nodes, OP_neg, &input, 1, &type, 1, -1, &id));
    arena_destroy(&arena);
}

int main(void) {
    Context ctx;
    context_init(&ctx);
    test_half();
    test_arena(&ctx);
    test_errors(&ctx);
    test_tables();
    test_editing(&ctx);
    return check_done();
}
