#include "graph/infer.h"

#include <string.h>

#include "graph/program.h"

const Value *rule_operand(const RuleInput *in, uint32_t k) {
    if (k >= in->node->n_operands || in->node->operands[k] == VALUE_NONE) return NULL;
    return graph_value(in->graph, in->node->operands[k]);
}

void inferred_like(Inferred *result, const Value *value) {
    result->dtype = value->dtype;
    result->rank = value->rank;
    for (unsigned d = 0; d < value->rank; d++) result->shape[d] = value->shape[d];
}

bool same_type(const Value *a, const Value *b) {
    return a->dtype == b->dtype && a->rank == b->rank && !memcmp(a->shape, b->shape, a->rank * sizeof *a->shape);
}

Code broadcast_into(const RuleInput *in, Inferred *result, const Value *value) {
    if (value->rank > result->rank) {
        unsigned grow = value->rank - result->rank;
        memmove(result->shape + grow, result->shape, result->rank * sizeof *result->shape);
        for (unsigned d = 0; d < grow; d++) result->shape[d] = 1;
        result->rank = value->rank;
    }
    unsigned lead = result->rank - value->rank;
    for (unsigned d = 0; d < value->rank; d++) {
        int64_t *size = &result->shape[lead + d], other = value->shape[d];
        if (*size == other || other == 1) continue;
        RULE_CHECK(in, *size == 1, "operands do not broadcast: %lld against %lld", (long long)*size, (long long)other);
        *size = other;
    }
    return CODE_OK;
}

bool broadcasts_to(const Value *value, const Inferred *result) {
    if (value->rank > result->rank) return false;
    unsigned lead = result->rank - value->rank;
    for (unsigned d = 0; d < value->rank; d++)
        if (value->shape[d] != 1 && value->shape[d] != result->shape[lead + d]) return false;
    return true;
}

Code check_order(const RuleInput *in, unsigned rank) {
    if (!node_has_attr(in->node, ATTR_order)) return CODE_OK;
    const Attr *order = node_attr(in->node, ATTR_order);
    if (order->ints.count == 0) return CODE_OK;
    RULE_CHECK(in, order->ints.count == rank, "order has %u entries, the result has rank %u", order->ints.count, rank);
    unsigned seen = 0;
    for (unsigned k = 0; k < rank; k++) {
        int64_t d = order->ints.items[k];
        RULE_CHECK(in, d >= 0 && d < rank && !(seen >> d & 1), "order is not a permutation");
        seen |= 1u << d;
    }
    return CODE_OK;
}

Code check_dim(const RuleInput *in, int64_t dim, unsigned rank) {
    /* a rank-0 tensor has one dimension to the operators that take `dim` */
    RULE_CHECK(in, dim >= 0 && dim < (rank ? rank : 1), "dim %lld is outside rank %u", (long long)dim, rank);
    return CODE_OK;
}

Code check_slice(const RuleInput *in, const Value *x, int64_t *length) {
    int64_t dim = node_int(in->node, ATTR_dim), start = node_int(in->node, ATTR_start),
            end = node_int(in->node, ATTR_end);
    int64_t step = node_int(in->node, ATTR_step);
    RULE_CHECK(in, dim >= 0 && dim < x->rank, "dim %lld is outside rank %u", (long long)dim, x->rank);
    RULE_CHECK(in, step > 0 && start >= 0 && start <= end && end <= x->shape[dim], "slice %lld:%lld:%lld of size %lld",
               (long long)start, (long long)end, (long long)step, (long long)x->shape[dim]);
    *length = (end - start) / step + ((end - start) % step != 0);
    return CODE_OK;
}

/* --- ends and creation -------------------------------------------------------------------------------------------- */
static Code rule_declared(const RuleInput *in, Inferred *results) {
    inferred_like(results, in->declared);
    return CODE_OK;
}

static Code rule_full(const RuleInput *in, Inferred *results) {
    RULE_CHECK(in, node_attr(in->node, ATTR_value)->s.kind != SCALAR_NONE, "full without a value");
    return rule_declared(in, results);
}

static Code rule_arange(const RuleInput *in, Inferred *results) {
    RULE_CHECK(in, in->declared->rank == 1, "arange of rank %u", in->declared->rank);
    RULE_CHECK(in, node_attr(in->node, ATTR_first)->s.kind && node_attr(in->node, ATTR_delta)->s.kind,
               "arange without ends");
    return rule_declared(in, results);
}

/* --- views -------------------------------------------------------------------------------------------------------- */
static Code rule_reshape(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    const Attr *shape = node_attr(in->node, ATTR_shape);
    RULE_CHECK(in, shape->ints.count <= MAX_RANK, "rank %u", shape->ints.count);
    results->dtype = x->dtype;
    results->rank = (uint8_t)shape->ints.count;
    int64_t have = 1, want = 1;
    for (unsigned d = 0; d < x->rank; d++) have *= x->shape[d];
    for (unsigned d = 0; d < results->rank; d++) {
        int64_t size = results->shape[d] = shape->ints.items[d];
        RULE_CHECK(in, size >= 0 && !__builtin_mul_overflow(want, size, &want), "size %lld", (long long)size);
    }
    RULE_CHECK(in, have == want, "reshape of %lld elements to %lld", (long long)have, (long long)want);
    return CODE_OK;
}

static Code rule_permute(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    const Attr *dims = node_attr(in->node, ATTR_dims);
    RULE_CHECK(in, dims->ints.count == x->rank, "%u dims for rank %u", dims->ints.count, x->rank);
    results->dtype = x->dtype;
    results->rank = x->rank;
    unsigned seen = 0;
    for (unsigned k = 0; k < x->rank; k++) {
        int64_t d = dims->ints.items[k];
        RULE_CHECK(in, d >= 0 && d < x->rank && !(seen >> d & 1), "dims are not a permutation");
        seen |= 1u << d;
        results->shape[k] = x->shape[d];
    }
    return CODE_OK;
}

static Code rule_expand(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    const Attr *shape = node_attr(in->node, ATTR_shape);
    RULE_CHECK(in, shape->ints.count <= MAX_RANK && shape->ints.count >= x->rank, "rank %u", shape->ints.count);
    results->dtype = x->dtype;
    results->rank = (uint8_t)shape->ints.count;
    int64_t total = 1;
    for (unsigned d = 0; d < results->rank; d++) {
        int64_t size = results->shape[d] = shape->ints.items[d];
        RULE_CHECK(in, size >= 0 && !__builtin_mul_overflow(total, size, &total), "size %lld", (long long)size);
    }
    RULE_CHECK(in, broadcasts_to(x, results), "shape does not expand to the target");
    return CODE_OK;
}

static Code rule_slice(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    inferred_like(results, x);
    int64_t length = 0;
    TRY(check_slice(in, x, &length));
    results->shape[node_int(in->node, ATTR_dim)] = length;
    return CODE_OK;
}

static Code rule_same(const RuleInput *in, Inferred *results) {
    inferred_like(results, rule_operand(in, 0));
    return check_order(in, results->rank);
}

/* --- elementwise -------------------------------------------------------------------------------------------------- */
typedef enum Accepts { ACCEPTS_NUMBER, ACCEPTS_FLOAT, ACCEPTS_BITS } Accepts;

/* clang-format off */
static Accepts accepts(Op op) {
    switch (op) {
    case OP_exp: case OP_exp2: case OP_expm1: case OP_log: case OP_log2: case OP_log10: case OP_log1p: case OP_sqrt:
    case OP_rsqrt: case OP_reciprocal: case OP_sin: case OP_cos: case OP_tan: case OP_asin: case OP_acos: case OP_atan:
    case OP_sinh: case OP_cosh: case OP_tanh: case OP_erf: case OP_sigmoid: case OP_silu: case OP_softplus: case OP_gelu:
    case OP_div: case OP_atan2: case OP_floor: case OP_ceil: case OP_round: case OP_trunc: case OP_isnan: case OP_isinf:
        return ACCEPTS_FLOAT;
    case OP_bitwise_not: case OP_bitwise_and: case OP_bitwise_or: case OP_bitwise_xor: case OP_shift_left:
    case OP_shift_right:
        return ACCEPTS_BITS;
    default: return ACCEPTS_NUMBER;
    }
}
/* clang-format on */

static Code rule_elementwise(const RuleInput *in, Inferred *results) {
    const Node *node = in->node;
    const OpInfo *info = op_info(node->op);
    unsigned count = node->n_operands;
    if (node_has_attr(node, ATTR_scalar)) {
        bool scalar = node_attr(node, ATTR_scalar)->s.kind != SCALAR_NONE;
        RULE_CHECK(in, count == (scalar ? 1u : 2u), "%u operands %s a scalar", count, scalar ? "with" : "without");
    }
    results->rank = 0;
    DType type = DTYPE_F32;
    for (unsigned k = 0; k < count; k++) {
        const Value *x = rule_operand(in, k);
        RULE_CHECK(in, x, "operand %u is absent", k);
        RULE_CHECK(in, x->dtype != DTYPE_OBJECT && dtype_class(x->dtype) != 'c', "operand %u is %s", k,
                   dtype_name(x->dtype));
        TRY(broadcast_into(in, results, x));
        if (node->op == OP_where && k == 0) {
            RULE_CHECK(in, x->dtype == DTYPE_BOOL, "the condition is %s", dtype_name(x->dtype));
        } else if (k == 0 || (node->op == OP_where && k == 1)) {
            type = x->dtype;
        } else {
            RULE_CHECK(in, x->dtype == type, "operand %u is %s, the one before %s", k, dtype_name(x->dtype),
                       dtype_name(type));
        }
    }
    switch (accepts(node->op)) {
    case ACCEPTS_FLOAT: RULE_CHECK(in, dtype_is_float(type), "wants a float, got %s", dtype_name(type)); break;
    case ACCEPTS_BITS: RULE_CHECK(in, !dtype_is_float(type), "wants integers or bool, got %s", dtype_name(type)); break;
    case ACCEPTS_NUMBER: break;
    }
    results->dtype = info->flags & COMPARE ? DTYPE_BOOL : node->op == OP_cast ? in->declared->dtype : type;
    RULE_CHECK(in, results->dtype != DTYPE_OBJECT && dtype_class(results->dtype) != 'c', "result %s",
               dtype_name(results->dtype));
    return check_order(in, results->rank);
}

static Code rule_program(const RuleInput *in, Inferred *results) {
    const Attr *program = node_attr(in->node, ATTR_program);
    DType types[PROGRAM_MAX_INPUTS];
    RULE_CHECK(in, in->node->n_operands <= PROGRAM_MAX_INPUTS, "%u operands", in->node->n_operands);
    results->rank = 0;
    for (unsigned k = 0; k < in->node->n_operands; k++) {
        const Value *x = rule_operand(in, k);
        RULE_CHECK(in, x, "operand %u is absent", k);
        types[k] = x->dtype;
        TRY(broadcast_into(in, results, x));
    }
    TRY(program_check(in->ctx, program->ints.items, program->ints.count, types, in->node->n_operands, &results->dtype));
    return check_order(in, results->rank);
}

/* --- reductions and scans ----------------------------------------------------------------------------------------- */
static Code rule_reduce(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    const Attr *dims = node_attr(in->node, ATTR_dims);
    bool keep = node_int(in->node, ATTR_keepdim) != 0, reduced[MAX_RANK] = {false};
    RULE_CHECK(in, x->dtype != DTYPE_OBJECT && dtype_class(x->dtype) != 'c', "operand is %s", dtype_name(x->dtype));
    RULE_CHECK(in, x->rank == 0 || dims->ints.count, "no dims");
    for (unsigned k = 0; k < dims->ints.count; k++) {
        int64_t d = dims->ints.items[k];
        TRY(check_dim(in, d, x->rank));
        RULE_CHECK(in, !reduced[d], "dim %lld twice", (long long)d);
        reduced[d] = true;
    }
    results->rank = 0;
    for (unsigned d = 0; d < x->rank; d++)
        if (!reduced[d] || keep) results->shape[results->rank++] = reduced[d] ? 1 : x->shape[d];
    results->dtype = x->dtype;
    Op op = in->node->op;
    if (op == OP_any || op == OP_all) results->dtype = DTYPE_BOOL;
    if (op == OP_mean || op == OP_var)
        RULE_CHECK(in, dtype_is_float(x->dtype), "wants a float, got %s", dtype_name(x->dtype));
    if (op == OP_amax || op == OP_amin)
        for (unsigned d = 0; d < x->rank; d++) RULE_CHECK(in, !reduced[d] || x->shape[d] > 0, "dim %u is empty", d);
    return CODE_OK;
}

static Code rule_arg_reduce(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    int64_t dim = node_int(in->node, ATTR_dim);
    TRY(check_dim(in, dim, x->rank));
    RULE_CHECK(in, x->rank == 0 || x->shape[dim] > 0, "dim %lld is empty", (long long)dim);
    results->rank = 0;
    for (unsigned d = 0; d < x->rank; d++)
        if (d != dim || node_int(in->node, ATTR_keepdim)) results->shape[results->rank++] = d == dim ? 1 : x->shape[d];
    results->dtype = DTYPE_I64;
    return CODE_OK;
}

static Code rule_along(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    TRY(check_dim(in, node_int(in->node, ATTR_dim), x->rank));
    Op op = in->node->op;
    if (op == OP_softmax || op == OP_log_softmax) RULE_CHECK(in, dtype_is_float(x->dtype), "wants a float");
    inferred_like(results, x);
    return CODE_OK;
}

static Code rule_topk(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    int64_t dim = node_int(in->node, ATTR_dim);
    TRY(check_dim(in, dim, x->rank));
    inferred_like(results, x);
    if (in->node->op == OP_topk) {
        int64_t k = node_int(in->node, ATTR_k);
        RULE_CHECK(in, k >= 0 && k <= (x->rank ? x->shape[dim] : 1), "k = %lld", (long long)k);
        if (x->rank) results->shape[dim] = k;
    }
    results[1] = results[0];
    results[1].dtype = DTYPE_I64;
    return CODE_OK;
}

static Code rule_triangle(const RuleInput *in, Inferred *results) {
    RULE_CHECK(in, rule_operand(in, 0)->rank >= 2, "wants a matrix");
    return rule_same(in, results);
}

static Code rule_flip(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    const Attr *dims = node_attr(in->node, ATTR_dims);
    for (unsigned k = 0; k < dims->ints.count; k++) TRY(check_dim(in, dims->ints.items[k], x->rank));
    inferred_like(results, x);
    return CODE_OK;
}

/* --- the column --------------------------------------------------------------------------------------------------- */
/* clang-format off */
ShapeRule shape_rule(Op op) {
    switch (op) {
    case OP_host: return NULL;
    case OP_input: case OP_constant: return rule_declared;
    case OP_full: return rule_full;
    case OP_arange: return rule_arange;
    case OP_reshape: return rule_reshape;
    case OP_permute: return rule_permute;
    case OP_expand: return rule_expand;
    case OP_slice: return rule_slice;
    case OP_contiguous: return rule_same;
    case OP_sum: case OP_mean: case OP_amax: case OP_amin: case OP_prod: case OP_any: case OP_all: case OP_var:
        return rule_reduce;
    case OP_argmax: case OP_argmin: return rule_arg_reduce;
    case OP_cumsum: case OP_cumprod: case OP_softmax: case OP_log_softmax: return rule_along;
    case OP_topk: case OP_sort: return rule_topk;
    case OP_layer_norm: case OP_rms_norm: return rule_norm;
    case OP_group_norm: return rule_group_norm;
    case OP_linear: return rule_linear;
    case OP_quantised_linear: return rule_quantised_linear;
    case OP_matmul: return rule_matmul;
    case OP_grouped_matmul: return rule_grouped_matmul;
    case OP_conv: return rule_conv;
    case OP_attention: return rule_attention;
    case OP_rope: return rule_rope;
    case OP_embedding: return rule_embedding;
    case OP_gather: return rule_gather;
    case OP_index_select: return rule_index_select;
    case OP_index: return rule_index;
    case OP_index_put: return rule_index_put;
    case OP_index_copy: case OP_index_add: return rule_index_copy;
    case OP_scatter: return rule_scatter;
    case OP_slice_scatter: return rule_slice_scatter;
    case OP_cat: return rule_cat;
    case OP_pad: return rule_pad;
    case OP_flip: return rule_flip;
    case OP_tril: case OP_triu: return rule_triangle;
    case OP_elementwise: return rule_program;
    default: return rule_elementwise; /* every ELEMENTWISE line of ops.def; graph_verify's test walks the table */
    }
}
/* clang-format on */

Code graph_infer(Context *ctx, const Graph *g, NodeId id, Type *results) {
    const Node *node = graph_node(g, id);
    ShapeRule rule = shape_rule(node->op);
    if (!rule) {
        for (uint32_t k = 0; k < node->n_results; k++) results[k] = value_type(g, node_result(node, k));
        return CODE_OK;
    }
    Inferred inferred[RULE_MAX_RESULTS];
    RuleInput in = {ctx, g, node, node->n_results ? graph_value(g, node->first_result) : NULL};
    TRY(rule(&in, inferred));
    for (uint32_t k = 0; k < node->n_results; k++) {
        void *shape;
        TRY(arena_copy(ctx, g->arena, inferred[k].shape, inferred[k].rank * sizeof(int64_t), &shape));
        results[k] = (Type){inferred[k].dtype, inferred[k].rank, shape};
    }
    return CODE_OK;
}
