/* Graph values as wires. A value was made in the block, comes in through a port, is a constant, or is a view of such a
 * value: then the way back through view nodes is walked and the views are written as operators. A value means the same
 * wherever its memory is, so a view of a buffer that holds a copy needs no care: the first value on the way back that
 * has a wire will do. */
#include <string.h>

#include "npu/emit.h"
#include "npuir/view.h"

Element emit_element(const Emitter *e, DType dtype) {
    switch (dtype) {
    case DTYPE_BOOL: return ELEMENT_BOOL;
    case DTYPE_U8: return ELEMENT_U8;
    case DTYPE_I8: return ELEMENT_I8;
    case DTYPE_I32: return ELEMENT_I32;
    case DTYPE_I64: return ELEMENT_I64;
    default: return e->real; /* capability lets nothing else pass */
    }
}

WireType emit_value_type(const Emitter *e, ValueId v) {
    const Value *value = graph_value(e->g, v);
    WireType type = {.element = emit_element(e, value->dtype), .rank = value->rank};
    memcpy(type.shape, value->shape, value->rank * sizeof *value->shape);
    return type;
}

static bool is_view(const Node *node) { return op_is(node->op, VIEW) || node->op == OP_contiguous; }

/* --- views of constants ------------------------------------------------------------------------------------------- */
static View constant_view(const Graph *g, const Node *node) {
    const Constant *c = &g->constants[node_int(node, ATTR_index)];
    View v = {.rank = c->rank};
    memcpy(v.shape, c->shape, c->rank * sizeof *v.shape);
    memcpy(v.strides, c->strides, c->rank * sizeof *v.strides);
    return v;
}

/* False where the strides cannot express the view, or where it would repeat elements in the weights file. */
static bool apply_to_view(const Graph *g, const Node *node, View *view) {
    const Value *value = graph_value(g, node->first_result);
    View in = *view;
    switch (node->op) {
    case OP_contiguous: return true;
    case OP_reshape: return view_reshape(&in, value->rank, value->shape, view);
    case OP_permute: view_permute(&in, node_attr(node, ATTR_dims)->ints.items, view); return true;
    case OP_slice:
        view_slice(&in, node_int(node, ATTR_dim), node_int(node, ATTR_start), node_int(node, ATTR_end),
                   node_int(node, ATTR_step), view);
        return true;
    case OP_expand:
        if (view_count(in.rank, in.shape) != view_count(value->rank, value->shape)) return false;
        view_expand(&in, value->rank, value->shape, view);
        return true;
    default: return false;
    }
}

static WeightSource source_of_view(const Emitter *e, uint32_t constant, const View *view) {
    static const DType dtypes[] = {
        [ELEMENT_BOOL] = DTYPE_BOOL, [ELEMENT_I4] = DTYPE_U8,   [ELEMENT_U8] = DTYPE_U8,   [ELEMENT_I8] = DTYPE_I8,
        [ELEMENT_I32] = DTYPE_I32,   [ELEMENT_I64] = DTYPE_I64, [ELEMENT_F16] = DTYPE_F16, [ELEMENT_F32] = DTYPE_F32};
    WeightSource source = {.part = WEIGHT_VALUES, .constant = constant, .rank = view->rank, .offset = view->offset};
    source.dtype = dtypes[emit_element(e, e->g->constants[constant].dtype)];
    memcpy(source.shape, view->shape, view->rank * sizeof *view->shape);
    memcpy(source.strides, view->strides, view->rank * sizeof *view->strides);
    return source;
}

/* --- the way back and forth --------------------------------------------------------------------------------------- */
/* The nodes from `value` back to the one that has a wire or is a constant: path[0] is nearest to `value`. */
static Code walk_back(const Emitter *e, ValueId value, const Node **path, uint32_t cap, uint32_t *count,
                      ValueId *base) {
    const Graph *g = e->g;
    *count = 0;
    while (e->wires[value] == WIRE_NONE && value_node(g, value)->op != OP_constant) {
        const Node *node = value_node(g, value);
        if (!is_view(node) || *count == cap)
            return fail(e->ctx, CODE_INTERNAL, "a value of %s is read in a segment that does not make it",
                        op_info(node->op)->name);
        path[(*count)++] = node;
        value = node->operands[0];
    }
    *base = value;
    return CODE_OK;
}

bool emit_reaches(const Emitter *e, ValueId value) {
    while (e->wires[value] == WIRE_NONE && value_node(e->g, value)->op != OP_constant) {
        if (!is_view(value_node(e->g, value))) return false;
        value = value_node(e->g, value)->operands[0];
    }
    return true;
}

bool emit_is_constant(const Emitter *e, ValueId value, WeightSource *out) {
    const Node *path[64], *node;
    uint32_t count = 0;
    while ((node = value_node(e->g, value))->op != OP_constant) {
        if (!is_view(node) || count == 64) return false;
        path[count++] = node;
        value = node->operands[0];
    }
    View view = constant_view(e->g, node);
    while (count > 0) {
        if (!apply_to_view(e->g, path[--count], &view)) return false;
    }
    *out = source_of_view(e, (uint32_t)node_int(node, ATTR_index), &view);
    return true;
}

static Code apply_to_wire(Emitter *e, const Node *node, Wire x, Wire *out) {
    const Value *value = graph_value(e->g, node->first_result);
    switch (node->op) {
    case OP_contiguous: *out = x; return CODE_OK;
    case OP_reshape: return emit_reshape(e, x, value->rank, value->shape, out);
    case OP_permute: return emit_transpose(e, x, node_attr(node, ATTR_dims)->ints.items, out);
    case OP_expand: return emit_broadcast(e, x, value->rank, value->shape, out);
    case OP_slice:
        return emit_slice(e, x, node_int(node, ATTR_dim), node_int(node, ATTR_start), node_int(node, ATTR_end),
                          node_int(node, ATTR_step), out);
    default: return fail(e->ctx, CODE_INTERNAL, "%s is no view", op_info(node->op)->name);
    }
}

Code emit_value(Emitter *e, ValueId value, Wire *out) {
    const Graph *g = e->g;
    const Node **path;
    uint32_t count, cap = 64;
    ValueId base = value;
    if ((*out = e->wires[value]) != WIRE_NONE) return CODE_OK;
    for (ValueId v = value; is_view(value_node(g, v)) && e->wires[v] == WIRE_NONE; v = value_node(g, v)->operands[0])
        cap++;
    TRY(ARENA_NEW(e->ctx, e->scratch, cap, &path));
    TRY(walk_back(e, value, path, cap, &count, &base));
    Wire wire = e->wires[base];
    if (wire == WIRE_NONE) { /* a constant: as much of the way as its strides can express */
        const Node *constant = value_node(g, base);
        View view = constant_view(g, constant);
        while (count > 0 && apply_to_view(g, path[count - 1], &view)) base = path[--count]->first_result;
        WeightSource source = source_of_view(e, (uint32_t)node_int(constant, ATTR_index), &view);
        TRY(emit_source(e, &source, &wire));
        e->wires[base] = wire;
    }
    while (count > 0) {
        const Node *node = path[--count];
        TRY(apply_to_wire(e, node, wire, &wire));
        e->wires[node->first_result] = wire;
    }
    *out = e->wires[value] = wire;
    return CODE_OK;
}

Code emit_operand(Emitter *e, uint32_t k, Wire *out) {
    const Node *node = e->instr->node;
    *out = WIRE_NONE;
    if (k >= node->n_operands || node->operands[k] == VALUE_NONE) return CODE_OK;
    return emit_value(e, node->operands[k], out);
}

Code emit_operand_small(Emitter *e, uint32_t k, Wire *out) {
    const Node *node = e->instr->node;
    *out = WIRE_NONE;
    if (k >= node->n_operands || node->operands[k] == VALUE_NONE) return CODE_OK;
    ValueId value = node->operands[k];
    while (e->wires[value] == WIRE_NONE && value_node(e->g, value)->op == OP_expand)
        value = value_node(e->g, value)->operands[0];
    return emit_value(e, value, out);
}

Code emit_result(Emitter *e, uint32_t k, Wire wire) {
    ValueId v = node_result(e->instr->node, k);
    WireType want = emit_value_type(e, v);
    const WireType *have = wire_type(e, wire);
    if (e->block->columns && want.rank) want.shape[want.rank - 1] = e->block->columns;
    if (have->element != want.element || have->rank != want.rank ||
        memcmp(have->shape, want.shape, want.rank * sizeof *want.shape) != 0)
        return fail(e->ctx, CODE_INTERNAL, "%s was written with a wrong shape or type", op_info(e->instr->op)->name);
    e->wires[v] = wire;
    return CODE_OK;
}
