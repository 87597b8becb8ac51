/* A program as graph text and the memory of its constants: what artefacts keep, and the way back.
 *
 * The text is that of the final graph. Constants that it does not spell out are external; in it they are row major
 * whatever their memory was (a weight that a kernel wanted turned is then stored as it wants it), unless elements share
 * memory, as those of an expanded tensor do. Nothing in a text or in the sizes of the memory is believed. */
#include "forge_internal.h"

static int64_t count_of(const Constant *c) {
    int64_t count = 1;
    for (uint8_t d = 0; d < c->rank; d++) count *= c->shape[d];
    return count;
}

static bool shares_elements(const Constant *c) {
    for (uint8_t d = 0; d < c->rank; d++) {
        if (c->shape[d] > 1 && c->strides[d] == 0) return true;
    }
    return false;
}

bool forge_constant_external(const Constant *c) { return count_of(c) > MAX_PRINTED_ELEMENTS; }

Code forge_portable(Context *ctx, const Program *program, Arena *arena, Graph **out) {
    TRY(graph_clone(ctx, program->graph, arena, out));
    Graph *g = *out;
    for (uint32_t i = 0; i < g->n_constants; i++) {
        Constant *c = &g->constants[i];
        if (!c->data && count_of(c) > 0)
            return fail(ctx, CODE_INVALID, "constant '%s' has no data: a model of meta tensors cannot be saved",
                        c->name ? c->name : "");
        if (!forge_constant_external(c)) continue;
        c->data = NULL;
        if (shares_elements(c)) continue;
        int64_t *strides, step = 1;
        TRY(ARENA_NEW(ctx, arena, c->rank, &strides));
        for (int d = c->rank - 1; d >= 0; d--) {
            strides[d] = step;
            step *= c->shape[d];
        }
        c->strides = strides;
        c->bytes = step * (int64_t)dtype_size(c->dtype);
    }
    return CODE_OK;
}

/* Bytes from the first to the last element; the parser has checked that they fit. */
static Code span_of(Context *ctx, const Constant *c, int64_t *out) {
    int64_t last = 0, part;
    for (uint8_t d = 0; d < c->rank; d++) {
        if (c->strides[d] < 0) return fail(ctx, CODE_INVALID, "a negative stride");
        if (c->shape[d] == 0) return *out = 0, CODE_OK;
        if (__builtin_mul_overflow(c->shape[d] - 1, c->strides[d], &part) || __builtin_add_overflow(last, part, &last))
            return fail(ctx, CODE_INVALID, "a tensor of more than 2^63 bytes");
    }
    if (__builtin_add_overflow(last, 1, &last) || __builtin_mul_overflow(last, (int64_t)dtype_size(c->dtype), out))
        return fail(ctx, CODE_INVALID, "a tensor of more than 2^63 bytes");
    return CODE_OK;
}

static Code bind_constants(Context *ctx, Graph *g, const ConstantData *constants, size_t n) {
    if (n < g->n_constants)
        return fail(ctx, CODE_INVALID, "the graph has %u constants, the artefact %zu", g->n_constants, n);
    for (uint32_t i = 0; i < g->n_constants; i++) {
        Constant *c = &g->constants[i];
        if (c->data) {
            if (constants[i].data) return fail(ctx, CODE_INVALID, "constant %u is in the graph and in the weights", i);
            continue;
        }
        int64_t span = 0;
        Code code = span_of(ctx, c, &span);
        if (code == CODE_OK && constants[i].bytes != span)
            code = fail(ctx, CODE_INVALID, "%lld bytes where the graph wants %lld", (long long)constants[i].bytes,
                        (long long)span);
        if (code == CODE_OK && span > 0 && (uintptr_t)constants[i].data % dtype_size(c->dtype) != 0)
            code = fail(ctx, CODE_INVALID, "memory that is not aligned to its type");
        if (code != CODE_OK) {
            fail_prefix(ctx, "constant %u '%.100s'", i, c->name ? c->name : "");
            return code;
        }
        c->data = (void *)(uintptr_t)constants[i].data;
        c->bytes = span;
    }
    return CODE_OK;
}

/* Objects come from host calls alone: an address that a caller gives is memory, never an object. */
static Code check_objects(Context *ctx, const Graph *g, uint32_t callees) {
    for (uint32_t i = 0; i < g->n_inputs; i++) {
        if (graph_value(g, g->inputs[i])->dtype == DTYPE_OBJECT)
            return fail(ctx, CODE_UNSUPPORTED, "input %u is an object, which a loaded program cannot be given", i);
    }
    for (uint32_t i = 0; i < g->n_constants; i++) {
        if (g->constants[i].dtype == DTYPE_OBJECT) return fail(ctx, CODE_INVALID, "constant %u is an object", i);
    }
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        if (node->op != OP_host) continue;
        int64_t index = node_int(node, ATTR_index);
        if (index < 0 || index >= callees)
            return fail(ctx, CODE_UNSUPPORTED, "the graph calls host function %lld of %u", (long long)index,
                        (unsigned)callees);
    }
    return CODE_OK;
}

static Code load(Context *ctx, const char *text, size_t size, const ConstantData *constants, size_t n, uint32_t callees,
                 const CompileOptions *options, Program *program) {
    Graph *g;
    CompileOptions planned = *options;
    planned.passes = "none";
    /* Into the program's arena: constants that are spelled out lie there. */
    TRY(graph_parse(ctx, &program->arena, text, size, &g));
    TRY(bind_constants(ctx, g, constants, n));
    TRY(graph_verify(ctx, g));
    TRY(check_objects(ctx, g, callees));
    return program_build(ctx, program, g, &planned, true);
}

Code forge_load(Context *ctx, const char *text, size_t size, const ConstantData *constants, size_t n, uint32_t callees,
                const CompileOptions *options, Program **out) {
    Program *program;
    *out = NULL;
    TRY(program_create(ctx, &program));
    Code code = load(ctx, text, size, constants, n, callees, options, program);
    if (code != CODE_OK) {
        forge_destroy(program);
        return code;
    }
    *out = program;
    return CODE_OK;
}
