/* Building and editing of graphs. */
#include "graph/graph.h"

#include <string.h>

enum { FIRST_CAPACITY = 64 };

static const int64_t no_items[1];

Code graph_create(Context *ctx, Arena *arena, Graph **out) {
    Graph *g;
    *out = NULL;
    TRY(ARENA_NEW(ctx, arena, 1, &g));
    g->arena = arena;
    g->first = g->last = NODE_NONE;
    *out = g;
    return CODE_OK;
}

/* Room for `extra` more items of `size` bytes: doubles the array; the old one stays behind in the arena. */
static Code grow(Context *ctx, Arena *arena, void **items, uint32_t count, uint32_t *capacity, size_t extra,
                 size_t size) {
    if (extra > UINT32_MAX - 1 - (uint64_t)count) return fail(ctx, CODE_INVALID, "graph is too large");
    uint64_t need = (uint64_t)count + extra, room = *capacity ? *capacity : FIRST_CAPACITY;
    if (need <= *capacity) return CODE_OK;
    while (room < need) room *= 2;
    if (room > UINT32_MAX) room = UINT32_MAX;
    void *bigger;
    TRY(arena_array(ctx, arena, (size_t)room, size, &bigger));
    if (count) memcpy(bigger, *items, count * size);
    *items = bigger;
    *capacity = (uint32_t)room;
    return CODE_OK;
}

static Code copy_ints(Context *ctx, Arena *arena, const int64_t *items, size_t count, const int64_t **out) {
    void *copy;
    *out = no_items;
    if (count == 0) return CODE_OK;
    if (count > UINT32_MAX) return fail(ctx, CODE_INVALID, "list is too long");
    TRY(arena_copy(ctx, arena, items, count * sizeof *items, &copy));
    *out = copy;
    return CODE_OK;
}

Code graph_reserve(Context *ctx, Graph *g, size_t n_nodes, size_t n_values) {
    void *nodes = g->nodes, *values = g->values;
    TRY(grow(ctx, g->arena, &nodes, g->n_nodes, &g->cap_nodes, n_nodes, sizeof *g->nodes));
    g->nodes = nodes;
    TRY(grow(ctx, g->arena, &values, g->n_values, &g->cap_values, n_values, sizeof *g->values));
    g->values = values;
    return CODE_OK;
}

Code graph_insert(Context *ctx, Graph *g, NodeId before, Op op, const ValueId *operands, size_t n_operands,
                  const Type *results, size_t n_results, int32_t source, NodeId *out) {
    *out = NODE_NONE;
    if (before != NODE_NONE && (before >= g->n_nodes || g->nodes[before].dead)) {
        return fail(ctx, CODE_INTERNAL, "insertion before a node that is not in the graph");
    }
    TRY(graph_reserve(ctx, g, 1, n_results));
    NodeId id = g->n_nodes;
    Node *node = &g->nodes[id];
    memset(node, 0, sizeof *node);
    node->op = op;
    node->n_results = (uint32_t)n_results;
    node->first_result = g->n_values;
    node->source = source;
    TRY(ARENA_NEW(ctx, g->arena, op_info(op)->n_attrs, &node->attrs));
    TRY(node_set_operands(ctx, g, id, operands, n_operands));
    for (size_t k = 0; k < n_results; k++) {
        Value *value = &g->values[g->n_values + k];
        *value = (Value){results[k].dtype, results[k].rank, no_items, id, (uint32_t)k, VALUE_NONE};
        TRY(copy_ints(ctx, g->arena, results[k].shape, results[k].rank, &value->shape));
    }
    node->next = before;
    node->prev = before == NODE_NONE ? g->last : g->nodes[before].prev;
    if (node->prev == NODE_NONE)
        g->first = id;
    else
        g->nodes[node->prev].next = id;
    if (before == NODE_NONE)
        g->last = id;
    else
        g->nodes[before].prev = id;
    g->n_nodes++;
    g->n_values += (uint32_t)n_results;
    g->edited = true;
    *out = id;
    return CODE_OK;
}

Code graph_add_constant(Context *ctx, Graph *g, const Constant *constant, uint32_t *index) {
    void *items = g->constants;
    TRY(grow(ctx, g->arena, &items, g->n_constants, &g->cap_constants, 1, sizeof *g->constants));
    g->constants = items;
    Constant copy = *constant;
    char *name;
    TRY(arena_string(ctx, g->arena, constant->name ? constant->name : "", &name));
    copy.name = name;
    TRY(copy_ints(ctx, g->arena, constant->shape, constant->rank, &copy.shape));
    TRY(copy_ints(ctx, g->arena, constant->strides, constant->rank, &copy.strides));
    *index = g->n_constants;
    g->constants[g->n_constants++] = copy;
    return CODE_OK;
}

Code attr_set_ints(Context *ctx, Graph *g, Attr *attr, const int64_t *items, size_t count) {
    const int64_t *copy;
    TRY(copy_ints(ctx, g->arena, items, count, &copy));
    attr->ints.items = copy;
    attr->ints.count = (uint32_t)count;
    return CODE_OK;
}

Code node_set_operands(Context *ctx, Graph *g, NodeId node, const ValueId *operands, size_t count) {
    void *copy;
    if (count > UINT32_MAX) return fail(ctx, CODE_INVALID, "too many operands");
    TRY(arena_copy(ctx, g->arena, operands, count * sizeof *operands, &copy));
    g->nodes[node].operands = copy;
    g->nodes[node].n_operands = (uint32_t)count;
    return CODE_OK;
}

ValueId graph_resolve(const Graph *g, ValueId v) {
    while (v != VALUE_NONE && g->values[v].forward != VALUE_NONE) v = g->values[v].forward;
    return v;
}

void graph_replace(Graph *g, ValueId old, ValueId with) {
    old = graph_resolve(g, old);
    with = graph_resolve(g, with);
    if (old == with) return;
    g->values[old].forward = with;
    g->edited = true;
}

void graph_kill(Graph *g, NodeId id) {
    Node *node = &g->nodes[id];
    if (node->dead) return;
    if (node->prev == NODE_NONE)
        g->first = node->next;
    else
        g->nodes[node->prev].next = node->next;
    if (node->next == NODE_NONE)
        g->last = node->prev;
    else
        g->nodes[node->next].prev = node->prev;
    node->dead = true; /* its `next` stays, so that a walk that stands on it goes on */
    g->edited = true;
}

/* The value that `v` stands for, in new numbers; shortens the chains on the way, so that compaction is linear. */
static Code renumber(Context *ctx, Graph *g, const ValueId *new_ids, ValueId *v) {
    if (*v == VALUE_NONE) return CODE_OK;
    ValueId end = graph_resolve(g, *v);
    for (ValueId at = *v; at != end;) {
        ValueId next = g->values[at].forward;
        g->values[at].forward = end;
        at = next;
    }
    if (new_ids[end] == VALUE_NONE) {
        const char *op = op_info(value_node(g, end)->op)->name;
        return fail(ctx, CODE_INTERNAL, "value %%%u is used but its node (%s) is dead", end, op);
    }
    *v = new_ids[end];
    return CODE_OK;
}

static Code compact(Context *ctx, Graph *g, Arena *scratch) {
    ValueId *new_ids;
    uint32_t n_nodes = 0, n_values = 0;
    bool down = true; /* no node or value gets a higher number: then they can move one by one where they are */
    TRY(ARENA_NEW(ctx, scratch, g->n_values, &new_ids));
    for (uint32_t v = 0; v < g->n_values; v++) new_ids[v] = VALUE_NONE;
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        down = down && n_nodes <= id && n_values <= node->first_result;
        for (uint32_t k = 0; k < node->n_results; k++) new_ids[node_result(node, k)] = n_values++;
        n_nodes++;
    }
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        for (uint32_t k = 0; k < node->n_operands; k++) TRY(renumber(ctx, g, new_ids, &node->operands[k]));
    }
    for (uint32_t k = 0; k < g->n_inputs; k++) {
        /* an input keeps its own node whatever its uses were redirected to */
        if (g->inputs[k] != VALUE_NONE) g->inputs[k] = new_ids[g->inputs[k]];
    }
    for (uint32_t k = 0; k < g->n_outputs; k++) TRY(renumber(ctx, g, new_ids, &g->outputs[k]));

    Node *nodes = g->nodes;
    Value *values = g->values;
    if (!down) {
        TRY(ARENA_NEW(ctx, scratch, n_nodes, &nodes));
        TRY(ARENA_NEW(ctx, scratch, n_values, &values));
    }
    n_nodes = n_values = 0;
    for (NodeId id = g->first, next; id != NODE_NONE; id = next) {
        Node node = *graph_node(g, id);
        next = node.next;
        for (uint32_t k = 0; k < node.n_results; k++) {
            Value value = *graph_value(g, node_result(&node, k));
            value.def = n_nodes;
            value.forward = VALUE_NONE;
            values[n_values + k] = value;
        }
        node.first_result = n_values;
        node.prev = n_nodes ? n_nodes - 1 : NODE_NONE;
        node.next = next == NODE_NONE ? NODE_NONE : n_nodes + 1;
        n_values += node.n_results;
        nodes[n_nodes++] = node;
    }
    if (!down) {
        memcpy(g->nodes, nodes, n_nodes * sizeof *nodes);
        if (n_values) memcpy(g->values, values, n_values * sizeof *values);
    }
    g->n_nodes = n_nodes;
    g->n_values = n_values;
    g->first = n_nodes ? 0 : NODE_NONE;
    g->last = n_nodes ? n_nodes - 1 : NODE_NONE;
    g->edited = false;
    return CODE_OK;
}

Code graph_compact(Context *ctx, Graph *g) {
    if (!g->edited) return CODE_OK;
    Arena scratch;
    arena_init(&scratch);
    Code code = compact(ctx, g, &scratch);
    arena_destroy(&scratch);
    return code;
}

static Code clone_node(Context *ctx, Graph *g, Node *node) {
    void *copy;
    const OpInfo *info = op_info(node->op);
    TRY(arena_copy(ctx, g->arena, node->operands, node->n_operands * sizeof *node->operands, &copy));
    node->operands = copy;
    TRY(arena_copy(ctx, g->arena, node->attrs, info->n_attrs * sizeof *node->attrs, &copy));
    node->attrs = copy;
    for (int k = 0; k < info->n_attrs; k++) {
        Attr *attr = &node->attrs[k];
        if (attr_kind(info->attrs[k]) == KIND_INTS)
            TRY(attr_set_ints(ctx, g, attr, attr->ints.items, attr->ints.count));
    }
    return CODE_OK;
}

static Code clone_strings(Context *ctx, Arena *arena, const char *const *from, uint32_t count, const char ***out) {
    TRY(ARENA_NEW(ctx, arena, count, out));
    for (uint32_t k = 0; k < count; k++) {
        char *text;
        TRY(arena_string(ctx, arena, from[k], &text));
        (*out)[k] = text;
    }
    return CODE_OK;
}

Code graph_clone(Context *ctx, const Graph *from, Arena *arena, Graph **out) {
    Graph *g;
    void *copy;
    *out = NULL;
    TRY(graph_create(ctx, arena, &g));
    g->first = from->first;
    g->last = from->last;
    g->edited = from->edited;
    TRY(arena_copy(ctx, arena, from->nodes, from->n_nodes * sizeof *from->nodes, &copy));
    g->nodes = copy;
    g->n_nodes = g->cap_nodes = from->n_nodes;
    TRY(arena_copy(ctx, arena, from->values, from->n_values * sizeof *from->values, &copy));
    g->values = copy;
    g->n_values = g->cap_values = from->n_values;
    for (uint32_t n = 0; n < g->n_nodes; n++) TRY(clone_node(ctx, g, &g->nodes[n]));
    for (uint32_t v = 0; v < g->n_values; v++) {
        TRY(copy_ints(ctx, arena, g->values[v].shape, g->values[v].rank, &g->values[v].shape));
    }
    for (uint32_t c = 0; c < from->n_constants; c++) {
        uint32_t index;
        TRY(graph_add_constant(ctx, g, &from->constants[c], &index));
    }
    TRY(arena_copy(ctx, arena, from->inputs, from->n_inputs * sizeof *from->inputs, &copy));
    g->inputs = copy;
    g->n_inputs = from->n_inputs;
    TRY(arena_copy(ctx, arena, from->outputs, from->n_outputs * sizeof *from->outputs, &copy));
    g->outputs = copy;
    g->n_outputs = from->n_outputs;
    TRY(clone_strings(ctx, arena, from->sources, from->n_sources, &g->sources));
    g->n_sources = from->n_sources;
    TRY(clone_strings(ctx, arena, from->strings, from->n_strings, &g->strings));
    g->n_strings = from->n_strings;
    *out = g;
    return CODE_OK;
}

size_t graph_count(const Graph *g) {
    size_t count = 0;
    GRAPH_EACH(g, id) {
        Op op = graph_node(g, id)->op;
        count += op != OP_input && op != OP_constant;
    }
    return count;
}
