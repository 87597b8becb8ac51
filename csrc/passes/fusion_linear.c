/* A matmul with a matrix becomes `linear` (whose weights can be packed); a bias that is added to it becomes its
 * operand. */
#include "passes/fusion.h"

/* The matrix [K, N] as [N, K]: for a constant another view of its memory, else a permute before the product. */
static Code transposed(Match *m, ValueId matrix, NodeId before, ValueId *out) {
    Graph *g = m->g;
    Context *ctx = m->pc->ctx;
    const Value *v = graph_value(g, matrix);
    int64_t shape[2] = {v->shape[1], v->shape[0]};
    Type type = {v->dtype, 2, shape};
    int32_t source = graph_node(g, before)->source;
    NodeId node, def = match_def(m, matrix, OP_constant);
    if (def != NODE_NONE) {
        Constant c = g->constants[node_int(graph_node(g, def), ATTR_index)];
        int64_t strides[2] = {c.strides[1], c.strides[0]};
        uint32_t index;
        c.shape = shape;
        c.strides = strides;
        TRY(graph_add_constant(ctx, g, &c, &index));
        TRY(graph_insert(ctx, g, before, OP_constant, NULL, 0, &type, 1, source, &node));
        node_attr_mut(graph_node(g, node), ATTR_index)->i = index;
    } else {
        const int64_t dims[2] = {1, 0};
        TRY(graph_insert(ctx, g, before, OP_permute, &matrix, 1, &type, 1, source, &node));
        TRY(attr_set_ints(ctx, g, node_attr_mut(graph_node(g, node), ATTR_dims), dims, 2));
    }
    *out = graph_node(g, node)->first_result;
    return CODE_OK;
}

/* The right operand of a matmul as a matrix [K, N], seen through an expand over batch dimensions; VALUE_NONE if it is
 * none. */
static ValueId as_matrix(const Match *m, ValueId v) {
    const Value *wide = graph_value(m->g, v);
    int64_t rows = wide->shape[wide->rank - 2], columns = wide->shape[wide->rank - 1];
    NodeId expand = match_def(m, v, OP_expand);
    if (expand != NODE_NONE) v = graph_node(m->g, expand)->operands[0];
    NodeId reshape = match_def(m, v, OP_reshape);
    const Value *value = graph_value(m->g, v);
    if (reshape != NODE_NONE && value->rank > 2) { /* [K, N] -> [1, .., K, N] */
        const Value *inner = graph_value(m->g, graph_node(m->g, reshape)->operands[0]);
        if (inner->rank == 2 && inner->shape[0] == rows && inner->shape[1] == columns)
            return graph_node(m->g, reshape)->operands[0];
    }
    return value->rank == 2 && value->shape[0] == rows && value->shape[1] == columns ? v : VALUE_NONE;
}

static Code to_linear(Match *m, NodeId id) {
    const Node *node = graph_node(m->g, id);
    if (node->n_operands != 2 || node_attr(node, ATTR_program)->ints.count ||
        !dtype_is_float(graph_value(m->g, node->first_result)->dtype))
        return CODE_OK;
    ValueId x = node->operands[0], matrix = as_matrix(m, node->operands[1]), w;
    if (matrix == VALUE_NONE) return CODE_OK;
    const Value *left = graph_value(m->g, x), *out = graph_value(m->g, node->first_result);
    for (unsigned d = 0; d + 1 < out->rank; d++)
        if (left->shape[d] != out->shape[d]) return CODE_OK; /* the batch comes from the right operand */
    /* packing pays for constants; a matrix that is computed anew in each call is as well served by matmul */
    NodeId permute = match_def(m, matrix, OP_permute);
    bool swapped = permute != NODE_NONE && node_attr(graph_node(m->g, permute), ATTR_dims)->ints.items[0] == 1;
    w = swapped ? graph_node(m->g, permute)->operands[0] : matrix;
    if (match_def(m, w, OP_constant) == NODE_NONE) return CODE_OK;
    if (!swapped) TRY(transposed(m, matrix, id, &w));
    ValueId operands[2] = {x, w};
    NodeId linear;
    TRY(match_replace(m, id, OP_linear, operands, 2, &linear));
    return remark_add(m->pc, "operator_fusion", graph_node(m->g, linear)->source,
                      "matched: matmul with weights as linear");
}

/* add(linear(x, w), b) with b one an output. Adding it in registers is the f32 sum that eager's addmm makes. */
static Code take_bias(Match *m, NodeId id) {
    const Node *node = graph_node(m->g, id);
    if (!match_two(node, OP_add) || graph_value(m->g, node->first_result)->dtype != DTYPE_F32) return CODE_OK;
    for (int side = 0; side < 2; side++) {
        NodeId linear = match_only(m, node->operands[side], OP_linear);
        ValueId bias = node->operands[1 - side];
        if (linear == NODE_NONE || !match_same_type(m, node->operands[side], node->first_result)) continue;
        const Node *product = graph_node(m->g, linear);
        const Value *b = graph_value(m->g, bias), *out = graph_value(m->g, node->first_result);
        bool has_bias = product->n_operands > 2 && product->operands[2] != VALUE_NONE;
        if (has_bias || node_attr(product, ATTR_program)->ints.count || b->rank != 1 ||
            b->shape[0] != out->shape[out->rank - 1])
            continue;
        ValueId operands[3] = {product->operands[0], product->operands[1], bias};
        NodeId fused;
        TRY(match_replace(m, id, OP_linear, operands, 3, &fused));
        graph_kill(m->g, linear);
        return remark_add(m->pc, "operator_fusion", graph_node(m->g, fused)->source, "matched: linear + bias");
    }
    return CODE_OK;
}

static Code take_biases(Match *m) {
    GRAPH_EACH(m->g, id) TRY(take_bias(m, id));
    return CODE_OK;
}

Code fuse_linears(Match *m) {
    GRAPH_EACH(m->g, id)
        if (graph_node(m->g, id)->op == OP_matmul) TRY(to_linear(m, id));
    /* the products are new nodes, whose uses are not known yet */
    TRY(graph_compact(m->pc->ctx, m->g));
    return match_run(m->pc, m->g, take_biases);
}
