/* Reshapes around linear layers: torch's addmm wants matrices, so models flatten before it and unflatten after.
 * `linear` takes any rank; without the reshapes its neighbours can join it. */
#include "passes/fusion.h"

#include <string.h>

/* The memory of `v` is row major whatever the layout pass does: reshapes of what a kernel writes. */
static bool is_row_major(const Graph *g, ValueId v) {
    const Node *node = value_node(g, v);
    while (node->op == OP_reshape) node = value_node(g, graph_resolve(g, node->operands[0]));
    bool ordered = node_has_attr(node, ATTR_order) && node_attr(node, ATTR_order)->ints.count;
    return !op_is(node->op, VIEW) && !ordered && node->op != OP_input && node->op != OP_constant && node->op != OP_host;
}

/* `x` with this shape: what it was reshaped from, or a new reshape. */
static Code reshaped(Match *m, NodeId before, ValueId x, const int64_t *shape, unsigned rank, ValueId *out) {
    Graph *g = m->g;
    const Node *made = value_node(g, x);
    if (made->op == OP_reshape) x = graph_resolve(g, made->operands[0]);
    const Value *value = graph_value(g, x);
    *out = x;
    if (value->rank == rank && memcmp(value->shape, shape, rank * sizeof *shape) == 0) return CODE_OK;
    NodeId node;
    Type type = {value->dtype, (uint8_t)rank, shape};
    TRY(graph_insert(m->pc->ctx, g, before, OP_reshape, &x, 1, &type, 1, graph_node(g, before)->source, &node));
    TRY(attr_set_ints(m->pc->ctx, g, node_attr_mut(graph_node(g, node), ATTR_shape), shape, rank));
    *out = graph_node(g, node)->first_result;
    return CODE_OK;
}

/* reshape(linear(x)), if only the leading dimensions change: linear(reshape(x)). */
static Code lift_reshape(Match *m, NodeId id) {
    Graph *g = m->g;
    NodeId linear = match_only(m, graph_node(g, id)->operands[0], OP_linear), lifted;
    if (linear == NODE_NONE || node_attr(graph_node(g, linear), ATTR_program)->ints.count) return CODE_OK;
    const Node *node = graph_node(g, linear);
    const Value *out = graph_value(g, graph_node(g, id)->first_result), *flat = graph_value(g, node->first_result);
    if (!out->rank || out->shape[out->rank - 1] != flat->shape[flat->rank - 1]) return CODE_OK;
    uint32_t count = node->n_operands;
    ValueId operands[3] = {graph_resolve(g, node->operands[0]), node->operands[1],
                           count > 2 ? node->operands[2] : VALUE_NONE};
    int64_t shape[MAX_RANK], rows = 1;
    unsigned rank = out->rank;
    for (unsigned d = 0; d + 1 < rank; d++) rows *= shape[d] = out->shape[d];
    const Value *x = graph_value(g, operands[0]);
    shape[rank - 1] = x->shape[x->rank - 1];
    for (unsigned d = 0; d + 1 < x->rank; d++)
        rows = x->shape[d] ? rows / x->shape[d] : 0; /* 1, unless something is empty */
    if (rows != 1) return CODE_OK;
    TRY(reshaped(m, id, operands[0], shape, rank, &operands[0]));
    TRY(match_replace(m, id, OP_linear, operands, count, &lifted));
    graph_kill(g, linear);
    return CODE_OK;
}

Code fuse_reshapes(Match *m) {
    Graph *g = m->g;
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        if (node->op == OP_reshape) {
            TRY(lift_reshape(m, id));
        } else if (node->op == OP_contiguous && !m->effects && !node_attr(node, ATTR_order)->ints.count) {
            ValueId x = graph_resolve(g, node->operands[0]);
            if (!is_row_major(g, x)) continue;
            graph_replace(g, node->first_result, x);
            graph_kill(g, id);
        }
    }
    return CODE_OK;
}
