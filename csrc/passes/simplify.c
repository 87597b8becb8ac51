/* Simplifications of single nodes that change no bit of any result: part of `fold`.
 * (A matmul that becomes a linear layer keeps its products; kernels choose the order of sums.)
 * Float caution: x + 0.0 is not x (-0.0 becomes 0.0), x * 0 is not 0 (NaN), so neither is here. */
#include "passes/evaluate.h"

#include <math.h>
#include <string.h>

typedef struct Simplifier {
    PassContext *pc;
    Graph *g;
    Uses uses;    /* of the graph as it was */
    bool effects; /* there are host calls with effects: they may write memory, so copies are copies */
    bool changed; /* a node was edited or replaced */
} Simplifier;

static bool same_shape(const Value *a, const Value *b) {
    return a->rank == b->rank && (a->rank == 0 || memcmp(a->shape, b->shape, a->rank * sizeof *a->shape) == 0);
}

static bool same_type(const Graph *g, ValueId a, ValueId b) {
    return graph_value(g, a)->dtype == graph_value(g, b)->dtype && same_shape(graph_value(g, a), graph_value(g, b));
}

static Code insert_one(Simplifier *s, NodeId before, Op op, ValueId operand, const Type *type, NodeId *made) {
    int32_t source = graph_node(s->g, before)->source;
    return graph_insert(s->pc->ctx, s->g, before, op, &operand, operand == VALUE_NONE ? 0 : 1, type, 1, source, made);
}

static Code insert_expand(Simplifier *s, NodeId before, ValueId x, const Type *type, ValueId *out) {
    NodeId made;
    TRY(insert_one(s, before, OP_expand, x, type, &made));
    *out = graph_node(s->g, made)->first_result;
    return attr_set_ints(s->pc->ctx, s->g, node_attr_mut(graph_node(s->g, made), ATTR_shape), type->shape, type->rank);
}

/* --- views -------------------------------------------------------------------------------------------------------- */

static Code simplify_reshape(Simplifier *s, NodeId id, ValueId *with) {
    Node *node = graph_node(s->g, id);
    const Node *inner = value_node(s->g, node->operands[0]);
    if (inner->op == OP_reshape) {
        node->operands[0] = inner->operands[0];
        s->changed = true;
    }
    if (same_type(s->g, node->operands[0], node->first_result)) *with = node->operands[0];
    return CODE_OK;
}

static Code simplify_permute(Simplifier *s, NodeId id, ValueId *with) {
    Node *node = graph_node(s->g, id);
    const Node *inner = value_node(s->g, node->operands[0]);
    Attr *dims = node_attr_mut(node, ATTR_dims);
    if (inner->op == OP_permute) {
        int64_t both[MAX_RANK];
        for (uint32_t d = 0; d < dims->ints.count; d++)
            both[d] = node_attr(inner, ATTR_dims)->ints.items[dims->ints.items[d]];
        TRY(attr_set_ints(s->pc->ctx, s->g, dims, both, dims->ints.count));
        node->operands[0] = inner->operands[0];
        s->changed = true;
    }
    for (uint32_t d = 0; d < dims->ints.count; d++)
        if (dims->ints.items[d] != d) return CODE_OK;
    *with = node->operands[0];
    return CODE_OK;
}

static Code simplify_expand(Simplifier *s, NodeId id, ValueId *with) {
    Node *node = graph_node(s->g, id);
    const Node *inner = value_node(s->g, node->operands[0]);
    if (inner->op == OP_expand) {
        node->operands[0] = inner->operands[0];
        s->changed = true;
    }
    if (same_type(s->g, node->operands[0], node->first_result)) *with = node->operands[0];
    return CODE_OK;
}

static Code simplify_slice(Simplifier *s, NodeId id, ValueId *with) {
    Node *node = graph_node(s->g, id);
    int64_t dim = node_int(node, ATTR_dim);
    const Node *inner = value_node(s->g, node->operands[0]);
    if (inner->op == OP_slice && node_int(inner, ATTR_dim) == dim) {
        int64_t length = graph_value(s->g, node->first_result)->shape[dim], step, start = 0, end = 0;
        if (__builtin_mul_overflow(node_int(inner, ATTR_step), node_int(node, ATTR_step), &step)) return CODE_OK;
        if (length > 0) {
            start = node_int(inner, ATTR_start) + node_int(node, ATTR_start) * node_int(inner, ATTR_step);
            end = start + (length - 1) * step + 1;
        }
        node_attr_mut(node, ATTR_start)->i = start;
        node_attr_mut(node, ATTR_end)->i = end;
        node_attr_mut(node, ATTR_step)->i = step;
        node->operands[0] = inner->operands[0];
        s->changed = true;
    }
    if (same_type(s->g, node->operands[0], node->first_result) && node_int(node, ATTR_step) == 1)
        *with = node->operands[0];
    return CODE_OK;
}

/* `contiguous` asks for memory, not for a value: where the memory is row major already, or where a reshape copies
 * anyway if it must, it is nothing. */
static Code simplify_contiguous(Simplifier *s, NodeId id, ValueId *with) {
    const Node *node = graph_node(s->g, id), *inner = value_node(s->g, node->operands[0]);
    if (s->effects || node_attr(node, ATTR_order)->ints.count) return CODE_OK;
    bool drop =
        !op_is(inner->op, VIEW) && !(node_has_attr(inner, ATTR_order) && node_attr(inner, ATTR_order)->ints.count);
    ValueId v = node->first_result;
    if (!drop && s->uses.output_uses[v] == 0) {
        drop = true;
        for (uint32_t u = s->uses.start[v]; u < s->uses.start[v + 1]; u++)
            drop &= graph_node(s->g, s->uses.users[u])->op == OP_reshape;
    }
    if (drop) *with = node->operands[0];
    return CODE_OK;
}

/* --- casts -------------------------------------------------------------------------------------------------------- */

/* Does every value of `from` have itself in `to`? */
static bool is_widening(DType from, DType to) {
    if (from == DTYPE_BOOL) return to != DTYPE_OBJECT && dtype_class(to) != 'c';
    if (from == DTYPE_F16 || from == DTYPE_BF16) return to == DTYPE_F32 || to == DTYPE_F64;
    if (from == DTYPE_F32) return to == DTYPE_F64;
    if (!dtype_is_int(from)) return false;
    if (dtype_class(to) == 'i') return dtype_size(to) > dtype_size(from);
    return to == DTYPE_F64 ? dtype_size(from) <= 4 : to == DTYPE_F32 && dtype_size(from) <= 2;
}

static Code simplify_cast(Simplifier *s, NodeId id, ValueId *with) {
    Node *node = graph_node(s->g, id);
    const Node *inner = value_node(s->g, node->operands[0]);
    if (inner->op == OP_cast) {
        DType from = graph_value(s->g, inner->operands[0])->dtype;
        if (is_widening(from, graph_value(s->g, node->operands[0])->dtype)) {
            node->operands[0] = inner->operands[0];
            s->changed = true;
        }
    }
    if (same_type(s->g, node->operands[0], node->first_result)) *with = node->operands[0];
    return CODE_OK;
}

/* --- elementwise -------------------------------------------------------------------------------------------------- */

/* A uniform literal operand becomes the scalar attribute. Not for pow: eager has other formulas for scalar exponents.
 * Where the literal only gives the result its shape, `with` is an expand of the operator on the other operand's
 * shape. */
static Code take_scalar(Simplifier *s, NodeId id, ValueId *with) {
    Graph *g = s->g;
    const Node *node = graph_node(g, id);
    if (node->n_operands != 2 || node->op == OP_pow) return CODE_OK;
    for (uint32_t k = 2; k-- > 0;) {
        Scalar scalar;
        ValueId other = node->operands[1 - k];
        if (!literal_uniform(g, node->operands[k], &scalar)) continue;
        Type result = value_type(g, node->first_result), type = value_type(g, other);
        bool commutes =
            node->op == OP_add || node->op == OP_mul || node->op == OP_bitwise_and || node->op == OP_bitwise_or;
        bool broadcasts = !same_shape(graph_value(g, other), graph_value(g, node->first_result));
        NodeId at = id;
        if (broadcasts) {
            type.dtype = result.dtype;
            TRY(insert_one(s, id, node->op, other, &type, &at));
            TRY(insert_expand(s, id, graph_node(g, at)->first_result, &result, with));
        }
        node_attr_mut(graph_node(g, at), ATTR_scalar)->s = scalar;
        node_attr_mut(graph_node(g, at), ATTR_reverse)->i = k == 0 && !commutes;
        s->changed = true;
        return broadcasts ? CODE_OK : node_set_operands(s->pc->ctx, g, id, &other, 1);
    }
    return CODE_OK;
}

/* Is `x op scalar` x itself? */
static bool is_identity(Op op, DType dtype, Scalar s, bool reverse) {
    bool is_float = dtype_is_float(dtype), is_bool = dtype == DTYPE_BOOL;
    if (!is_float && s.kind != SCALAR_INT) return false;
    double f = scalar_f64(s);
    bool one = is_float ? f == 1.0 : s.i == 1, zero = is_float ? f == 0.0 : s.i == 0;
    switch (op) {
    case OP_add: return zero && (!is_float || signbit(f));
    case OP_sub: return zero && !reverse && (!is_float || !signbit(f));
    case OP_mul: return one;
    case OP_div:
    case OP_pow: return one && !reverse;
    case OP_div_floor:
    case OP_div_trunc: return one && !reverse && !is_float;
    case OP_bitwise_and:
    case OP_logical_and: return is_bool && !zero;
    case OP_logical_or: return is_bool && zero;
    case OP_bitwise_or:
    case OP_bitwise_xor: return zero;
    default: return false;
    }
}

/* Is `x op scalar` the scalar, whatever x is? */
static bool is_absorbing(Op op, DType dtype, Scalar s) {
    if (dtype != DTYPE_BOOL || s.kind != SCALAR_INT) return false;
    return s.i ? op == OP_logical_or || op == OP_bitwise_or : op == OP_logical_and || op == OP_bitwise_and;
}

static Code simplify_binary(Simplifier *s, NodeId id, ValueId *with) {
    TRY(take_scalar(s, id, with));
    if (*with != VALUE_NONE) return CODE_OK;
    const Node *node = graph_node(s->g, id);
    Scalar scalar = node_attr(node, ATTR_scalar)->s;
    if (node->n_operands != 1 || scalar.kind == SCALAR_NONE) return CODE_OK;
    ValueId x = node->operands[0], result = node->first_result;
    if (!same_type(s->g, x, result)) return CODE_OK;
    DType dtype = graph_value(s->g, x)->dtype;
    if (dtype_class(dtype) == 'c' || dtype == DTYPE_OBJECT) return CODE_OK;
    if (is_identity(node->op, dtype, scalar, node_int(node, ATTR_reverse) != 0)) {
        *with = x;
    } else if (is_absorbing(node->op, dtype, scalar)) {
        NodeId made;
        Type type = value_type(s->g, result);
        TRY(insert_one(s, id, OP_full, VALUE_NONE, &type, &made));
        node_attr_mut(graph_node(s->g, made), ATTR_value)->s = (Scalar){.kind = SCALAR_INT, .i = scalar.i != 0};
        *with = graph_node(s->g, made)->first_result;
    }
    return CODE_OK;
}

static Code simplify_where(Simplifier *s, NodeId id, ValueId *with) {
    const Node *node = graph_node(s->g, id);
    Scalar condition;
    ValueId branch = node->operands[1];
    if (literal_uniform(s->g, node->operands[0], &condition))
        branch = node->operands[condition.i ? 1 : 2];
    else if (node->operands[1] != node->operands[2])
        return CODE_OK;
    if (same_type(s->g, branch, node->first_result)) {
        *with = branch;
        return CODE_OK;
    }
    Type type = value_type(s->g, node->first_result);
    return insert_expand(s, id, branch, &type, with);
}

/* --- others ------------------------------------------------------------------------------------------------------- */

/* matmul by a constant matrix is a linear layer, whose weight is packed once and not at each call. */
static Code simplify_matmul(Simplifier *s, NodeId id, ValueId *with) {
    Context *ctx = s->pc->ctx;
    Graph *g = s->g;
    const Node *node = graph_node(g, id), *def = value_node(g, node->operands[1]);
    Type result = value_type(g, node->first_result);
    ValueId a = node->operands[0];
    int32_t source = node->source;
    if (node->n_operands != 2 || node_attr(node, ATTR_program)->ints.count || def->op != OP_constant) return CODE_OK;
    Constant c = g->constants[node_int(def, ATTR_index)];
    if (!dtype_is_float(c.dtype)) return CODE_OK;
    int k = c.rank - 2, n = c.rank - 1;
    for (int d = 0; d < k; d++) {
        if (c.shape[d] != 1 && c.strides[d] != 0) return CODE_OK; /* a matrix for each batch item */
        if (graph_value(g, a)->shape[d] != result.shape[d]) return CODE_OK;
    }
    const int64_t shape[2] = {c.shape[n], c.shape[k]}, strides[2] = {c.strides[n], c.strides[k]};
    c.rank = 2;
    c.shape = shape;
    c.strides = strides;
    uint32_t index;
    NodeId weight, linear;
    TRY(graph_add_constant(ctx, g, &c, &index));
    Type type = {c.dtype, 2, shape};
    TRY(insert_one(s, id, OP_constant, VALUE_NONE, &type, &weight));
    node_attr_mut(graph_node(g, weight), ATTR_index)->i = index;
    const ValueId operands[2] = {a, graph_node(g, weight)->first_result};
    TRY(graph_insert(ctx, g, id, OP_linear, operands, 2, &result, 1, source, &linear));
    *with = graph_node(g, linear)->first_result;
    return CODE_OK;
}

static Code simplify_node(Simplifier *s, NodeId id, ValueId *with) {
    const Node *node = graph_node(s->g, id);
    switch (node->op) {
    case OP_reshape: return simplify_reshape(s, id, with);
    case OP_permute: return simplify_permute(s, id, with);
    case OP_expand: return simplify_expand(s, id, with);
    case OP_slice: return simplify_slice(s, id, with);
    case OP_contiguous: return simplify_contiguous(s, id, with);
    case OP_cast: return simplify_cast(s, id, with);
    case OP_where: return simplify_where(s, id, with);
    case OP_matmul: return simplify_matmul(s, id, with);
    case OP_embedding:
    case OP_index_select:
    case OP_index: return simplify_lookup(s->pc, s->g, id, with);
    case OP_cat:
        if (node->n_operands == 1) *with = node->operands[0];
        return CODE_OK;
    default: return node_has_attr(node, ATTR_scalar) ? simplify_binary(s, id, with) : CODE_OK;
    }
}

static Code simplify(Simplifier *s, Arena *scratch) {
    Graph *g = s->g;
    TRY(graph_uses(s->pc->ctx, g, scratch, &s->uses));
    GRAPH_EACH(g, id) s->effects |= graph_node(g, id)->op == OP_host && node_int(graph_node(g, id), ATTR_effect);
    for (NodeId id = g->first, next; id != NODE_NONE; id = next) {
        Node *node = graph_node(g, id);
        next = node->next;
        for (uint32_t k = 0; k < node->n_operands; k++)
            if (node->operands[k] != VALUE_NONE) node->operands[k] = graph_resolve(g, node->operands[k]);
        ValueId with = VALUE_NONE;
        TRY(simplify_node(s, id, &with));
        if (with == VALUE_NONE) continue;
        graph_replace(g, graph_node(g, id)->first_result, with);
        graph_kill(g, id);
        s->changed = true;
    }
    return s->changed ? graph_compact(s->pc->ctx, g) : CODE_OK;
}

Code simplify_graph(PassContext *pc, Graph *g, bool *changed) {
    Arena scratch;
    arena_init(&scratch);
    Simplifier s = {.pc = pc, .g = g};
    Code code = simplify(&s, &scratch);
    arena_destroy(&scratch);
    *changed |= s.changed;
    return code;
}
