/* From the flat node table to a graph. Nothing in the table is believed: each index, count, range and type is checked
 * here or by graph_verify at the end, so that a malformed table is an error and never a crash. */
#include <string.h>

#include "graph/graph.h"

/* A range of a pool. */
static bool in_pool(uint64_t first, uint64_t count, size_t size) { return first <= size && count <= size - first; }

typedef struct Reader {
    Context *ctx;
    const Table *table;
    Graph *graph;
    const int64_t *dims; /* the arena's copy of the shape pool */
} Reader;

static Code read_type(const Reader *r, const TableValue *row, size_t index, Type *type) {
    if (row->dtype >= DTYPE_COUNT || row->rank > MAX_RANK)
        return fail(r->ctx, CODE_INVALID, "value row %zu: dtype or rank", index);
    if (!in_pool(row->first_dim, row->rank, r->table->n_dims))
        return fail(r->ctx, CODE_INVALID, "value row %zu: shape out of range", index);
    *type = (Type){(DType)row->dtype, row->rank, r->dims + row->first_dim};
    return CODE_OK;
}

static Code read_attr(const Reader *r, AttrName name, const int64_t **at, const int64_t *end, Attr *attr) {
    const int64_t *words = *at;
    ptrdiff_t left = end - words;
    switch (attr_kind(name)) {
    case KIND_INT:
    case KIND_BOOL:
        if (left < 1) break;
        attr->i = words[0];
        *at += 1;
        return CODE_OK;
    case KIND_FLOAT:
        if (left < 1) break;
        memcpy(&attr->f, words, sizeof attr->f);
        *at += 1;
        return CODE_OK;
    case KIND_SCALAR:
        if (left < 2 || words[0] < SCALAR_NONE || words[0] > SCALAR_FLOAT) break;
        attr->s.kind = (ScalarKind)words[0];
        if (attr->s.kind == SCALAR_FLOAT)
            memcpy(&attr->s.f, words + 1, sizeof attr->s.f);
        else
            attr->s.i = words[1];
        *at += 2;
        return CODE_OK;
    case KIND_INTS:
        if (left < 1 || words[0] < 0 || words[0] > left - 1) break;
        *at += 1 + words[0];
        return attr_set_ints(r->ctx, r->graph, attr, words + 1, (size_t)words[0]);
    }
    return fail(r->ctx, CODE_INVALID, "attribute `%s` is malformed", attr_name(name));
}

static Code read_node(const Reader *r, size_t row, size_t *next_value, Type *types) {
    const TableNode *in = &r->table->nodes[row];
    Context *ctx = r->ctx;
    if (in->op >= OP_COUNT) return fail(ctx, CODE_INVALID, "operator %u", in->op);
    const OpInfo *info = op_info((Op)in->op);
    if (info->flags & FUSED) return fail(ctx, CODE_INVALID, "`%s` is made by passes only", info->name);
    if (!in_pool(in->first_operand, in->n_operands, r->table->n_operands))
        return fail(ctx, CODE_INVALID, "operands out of range");
    if (!in_pool(in->first_attr, in->n_attr_words, r->table->n_attrs))
        return fail(ctx, CODE_INVALID, "attributes out of range");
    if (in->n_results > r->table->n_values - *next_value)
        return fail(ctx, CODE_INVALID, "%u results, too few value rows", in->n_results);
    if (in->source < -1 || in->source >= (int64_t)r->graph->n_sources)
        return fail(ctx, CODE_INVALID, "source %d", in->source);
    const ValueId *operands = r->table->operands + in->first_operand;
    for (uint32_t k = 0; k < in->n_operands; k++)
        if (operands[k] != VALUE_NONE && operands[k] >= *next_value)
            return fail(ctx, CODE_INVALID, "operand %u is not defined before it", k);
    for (uint32_t k = 0; k < in->n_results; k++)
        TRY(read_type(r, &r->table->values[*next_value + k], *next_value + k, &types[k]));
    NodeId id;
    TRY(graph_insert(ctx, r->graph, NODE_NONE, (Op)in->op, operands, in->n_operands, types, in->n_results, in->source,
                     &id));
    Node *node = graph_node(r->graph, id);
    /* value ids of the table are value ids of the graph: rows are in order and nothing else makes values here */
    if (node->n_results && node->first_result != *next_value) return fail(ctx, CODE_INTERNAL, "value numbering");
    *next_value += in->n_results;
    const int64_t *at = r->table->attrs + in->first_attr, *end = at + in->n_attr_words;
    for (unsigned k = 0; k < info->n_attrs; k++) TRY(read_attr(r, (AttrName)info->attrs[k], &at, end, &node->attrs[k]));
    if (at != end) return fail(ctx, CODE_INVALID, "%td attribute words too many", end - at);
    return CODE_OK;
}

static Code read_constants(const Reader *r) {
    for (size_t k = 0; k < r->table->n_constants; k++) {
        const TableConstant *in = &r->table->constants[k];
        if (in->dtype >= DTYPE_OBJECT || in->rank > MAX_RANK || in->kind > CONSTANT_LITERAL || in->name < 0 ||
            (size_t)in->name >= r->table->n_strings || !in_pool(in->first_dim, 2u * in->rank, r->table->n_dims))
            return fail(r->ctx, CODE_INVALID, "constant row %zu is malformed", k);
        Constant c = {.kind = (ConstantKind)in->kind,
                      .name = r->graph->strings[in->name],
                      .data = (void *)(uintptr_t)in->data,
                      .dtype = (DType)in->dtype,
                      .rank = in->rank,
                      .shape = r->dims + in->first_dim,
                      .strides = r->dims + in->first_dim + in->rank};
        int64_t span = 1; /* elements from the first to the last */
        bool empty = false, bad = false;
        for (unsigned d = 0; d < c.rank; d++) {
            int64_t reach;
            bad |= c.shape[d] < 0 || c.strides[d] < 0 ||
                   __builtin_mul_overflow(c.shape[d] > 0 ? c.shape[d] - 1 : 0, c.strides[d], &reach) ||
                   __builtin_add_overflow(span, reach, &span);
            empty |= c.shape[d] == 0;
            if (bad) break;
        }
        if (bad || __builtin_mul_overflow(empty ? 0 : span, (int64_t)dtype_size(c.dtype), &c.bytes))
            return fail(r->ctx, CODE_INVALID, "constant row %zu: shape or strides", k);
        uint32_t index;
        TRY(graph_add_constant(r->ctx, r->graph, &c, &index));
    }
    return CODE_OK;
}

/* Inputs are numbered by their `index` attributes, each number once. */
static Code collect_inputs(const Reader *r, Arena *arena) {
    Graph *g = r->graph;
    uint32_t count = 0;
    GRAPH_EACH(g, id) count += graph_node(g, id)->op == OP_input;
    TRY(ARENA_NEW(r->ctx, arena, count, &g->inputs));
    for (uint32_t k = 0; k < count; k++) g->inputs[k] = VALUE_NONE;
    g->n_inputs = count;
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        if (node->op != OP_input) continue;
        int64_t index = node_int(node, ATTR_index);
        if (node->n_results != 1 || index < 0 || index >= count || g->inputs[index] != VALUE_NONE)
            return fail(r->ctx, CODE_INVALID, "node row %u: input number %lld", id, (long long)index);
        g->inputs[index] = node->first_result;
    }
    return CODE_OK;
}

static Code copy_texts(Context *ctx, Arena *arena, const char *const *from, size_t count, const char ***out) {
    TRY(ARENA_NEW(ctx, arena, count, out));
    for (size_t k = 0; k < count; k++) {
        char *text;
        TRY(arena_string(ctx, arena, from[k], &text));
        (*out)[k] = text;
    }
    return CODE_OK;
}

Code graph_from_table(Context *ctx, Arena *arena, const Table *table, Graph **out) {
    *out = NULL;
    /* ids are 32-bit and VALUE_NONE is taken */
    if (table->n_nodes >= UINT32_MAX / 2 || table->n_values >= UINT32_MAX / 2 || table->n_constants >= UINT32_MAX / 2 ||
        table->n_strings >= UINT32_MAX / 2 || table->n_sources >= INT32_MAX || table->n_outputs >= UINT32_MAX / 2)
        return fail(ctx, CODE_INVALID, "the table is too large");
    Graph *g;
    TRY(graph_create(ctx, arena, &g));
    void *dims;
    TRY(arena_copy(ctx, arena, table->dims, table->n_dims * sizeof *table->dims, &dims));
    Reader r = {ctx, table, g, dims};
    TRY(copy_texts(ctx, arena, table->strings, table->n_strings, &g->strings));
    g->n_strings = (uint32_t)table->n_strings;
    TRY(copy_texts(ctx, arena, table->sources, table->n_sources, &g->sources));
    g->n_sources = (uint32_t)table->n_sources;
    TRY(read_constants(&r));

    size_t most = 1, next_value = 0;
    for (size_t row = 0; row < table->n_nodes; row++)
        if (table->nodes[row].n_results > most) most = table->nodes[row].n_results;
    Type *types;
    TRY(ARENA_NEW(ctx, arena, most, &types));
    TRY(graph_reserve(ctx, g, table->n_nodes, table->n_values));
    for (size_t row = 0; row < table->n_nodes; row++) {
        Code code = read_node(&r, row, &next_value, types);
        if (code == CODE_OK) continue;
        fail_prefix(ctx, "node row %zu", row);
        return code;
    }
    if (next_value != table->n_values)
        return fail(ctx, CODE_INVALID, "%zu value rows for %zu results", table->n_values, next_value);
    void *outputs;
    TRY(arena_copy(ctx, arena, table->outputs, table->n_outputs * sizeof *table->outputs, &outputs));
    g->outputs = outputs;
    g->n_outputs = (uint32_t)table->n_outputs;
    for (uint32_t k = 0; k < g->n_outputs; k++)
        if (g->outputs[k] >= next_value) return fail(ctx, CODE_INVALID, "output %u is not defined", k);
    TRY(collect_inputs(&r, arena));
    TRY(graph_verify(ctx, g));
    *out = g;
    return CODE_OK;
}
