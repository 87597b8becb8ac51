/* Hand-written RMS norm, and the residual sum before a norm. */
#include "passes/fusion.h"

/* --- x * rsqrt(mean(x * x) + eps) [* w] ---------------------------------------------------------------------------------- */
static bool is_square(const Match *m, ValueId v, ValueId x) {
    double two;
    NodeId id = match_only(m, v, OP_pow);
    if (id != NODE_NONE) {
        const Node *node = graph_node(m->g, id);
        return match_scalar(node, OP_pow, &two) && two == 2 && node->operands[0] == x;
    }
    /* x * x uses x twice, the product once */
    id = match_only(m, v, OP_mul);
    if (id == NODE_NONE || !match_two(graph_node(m->g, id), OP_mul)) return false;
    return graph_node(m->g, id)->operands[0] == x && graph_node(m->g, id)->operands[1] == x;
}

/* `v` as 1 / sqrt(mean(x^2, last, keepdim) + eps). */
static bool is_inverse_rms(const Match *m, ValueId v, ValueId x, double *eps) {
    NodeId id = match_only(m, v, OP_rsqrt);
    if (id == NODE_NONE) return false;
    id = match_only(m, graph_node(m->g, id)->operands[0], OP_add);
    if (id == NODE_NONE || !match_scalar(graph_node(m->g, id), OP_add, eps)) return false;
    id = match_only(m, graph_node(m->g, id)->operands[0], OP_mean);
    if (id == NODE_NONE || !match_last_dim(m, graph_node(m->g, id), x)) return false;
    return is_square(m, graph_node(m->g, id)->operands[0], x);
}

static bool is_normalised(const Match *m, const Node *root, ValueId *x, double *eps) {
    if (!match_two(root, OP_mul)) return false;
    for (int side = 0; side < 2; side++) {
        *x = root->operands[side];
        if (is_inverse_rms(m, root->operands[1 - side], *x, eps)) return true;
    }
    return false;
}

/* The multiplication by a weight of the last size that is the only use of `v`. */
static NodeId weight_use(const Match *m, ValueId v, ValueId *weight) {
    if (!match_one_use(m, v)) return NODE_NONE;
    NodeId id = m->uses.users[m->uses.start[v]];
    const Node *node = graph_node(m->g, id);
    if (!match_two(node, OP_mul)) return NODE_NONE;
    *weight = node->operands[0] == v ? node->operands[1] : node->operands[0];
    const Value *w = graph_value(m->g, *weight), *x = graph_value(m->g, v);
    return w->rank == 1 && w->shape[0] == x->shape[x->rank - 1] ? id : NODE_NONE;
}

Code fuse_norms(Match *m) {
    GRAPH_EACH(m->g, id) {
        const Node *root = graph_node(m->g, id);
        ValueId operands[2];
        double eps;
        if (root->op != OP_mul || graph_value(m->g, root->first_result)->dtype != DTYPE_F32) continue;
        if (!is_normalised(m, root, &operands[0], &eps)) continue;
        NodeId scaled = weight_use(m, root->first_result, &operands[1]), fused;
        TRY(match_replace(m, scaled == NODE_NONE ? id : scaled, OP_rms_norm, operands, scaled == NODE_NONE ? 1 : 2, &fused));
        Node *node = graph_node(m->g, fused);
        node_attr_mut(node, ATTR_axes)->i = 1;
        node_attr_mut(node, ATTR_eps)->f = eps;
        /* what computed it has no use left: DCE takes it */
        TRY(remark_add(m->pc, "operator_fusion", node->source, "matched: rms_norm"));
    }
    return CODE_OK;
}

/* --- norm(a + b) ------------------------------------------------------------------------------------------------------------- */
/* All uses of the sum stand at or after the norm, where its second result can serve them. */
static bool sum_can_wait(const Match *m, ValueId sum, NodeId norm) {
    for (uint32_t u = m->uses.start[sum]; u < m->uses.start[sum + 1]; u++)
        if (m->uses.users[u] < norm) return false;
    return true;
}

Code fuse_residuals(Match *m) {
    GRAPH_EACH(m->g, id) {
        const Node *norm = graph_node(m->g, id);
        bool layer = norm->op == OP_layer_norm;
        uint32_t residual = layer ? 3 : 2;
        if ((!layer && norm->op != OP_rms_norm) || norm->n_operands > residual) continue;
        if (graph_value(m->g, norm->first_result)->dtype != DTYPE_F32) continue;
        NodeId add = match_def(m, norm->operands[0], OP_add);
        if (add == NODE_NONE || !match_two(graph_node(m->g, add), OP_add)) continue;
        const Node *sum = graph_node(m->g, add);
        ValueId total = sum->first_result;
        if (!match_same_type(m, sum->operands[0], total) || !match_same_type(m, sum->operands[1], total)) continue;
        if (!sum_can_wait(m, total, id)) {
            TRY(remark_add(m->pc, "operator_fusion", norm->source, "declined: the sum is used before the norm"));
            continue;
        }
        ValueId operands[4] = {sum->operands[0], VALUE_NONE, VALUE_NONE, VALUE_NONE};
        for (uint32_t k = 1; k < norm->n_operands; k++) operands[k] = norm->operands[k];
        operands[residual] = sum->operands[1];
        TRY(node_set_operands(m->pc->ctx, m->g, id, operands, residual + 1));
        graph_replace(m->g, total, node_result(graph_node(m->g, id), 1));
        graph_kill(m->g, add);
        TRY(remark_add(m->pc, "operator_fusion", graph_node(m->g, id)->source, "matched: residual + norm"));
    }
    return CODE_OK;
}
