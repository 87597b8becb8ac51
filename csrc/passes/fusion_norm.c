/* Hand-written norms, and the residual sum before a norm. */
#include "passes/fusion.h"

/* --- x * rsqrt(mean(x * x) + eps) [* w], and the same of x - mean(x) [+ b] ---------------------------------------- */
static bool is_square(const Match *m, ValueId v, ValueId x) {
    double two;
    NodeId id = match_only(m, v, OP_pow);
    if (id != NODE_NONE) {
        const Node *node = graph_node(m->g, id);
        return match_scalar(node, OP_pow, &two) && two == 2 && node->operands[0] == x;
    }
    id = match_only(m, v, OP_mul);
    if (id == NODE_NONE || !match_two(graph_node(m->g, id), OP_mul)) return false;
    return graph_node(m->g, id)->operands[0] == x && graph_node(m->g, id)->operands[1] == x;
}

/* `root` as x * 1 / sqrt(variance + eps). */
static bool is_normalised(const Match *m, const Node *root, ValueId *x, ValueId *variance, double *eps) {
    NodeId id = NODE_NONE;
    if (match_two(root, OP_div)) {
        *x = root->operands[0];
        id = match_only(m, root->operands[1], OP_sqrt);
    }
    for (int side = 0; side < 2 && match_two(root, OP_mul) && id == NODE_NONE; side++) {
        *x = root->operands[side];
        id = match_only(m, root->operands[1 - side], OP_rsqrt);
    }
    if (id == NODE_NONE) return false;
    id = match_only(m, graph_node(m->g, id)->operands[0], OP_add);
    if (id == NODE_NONE || !match_scalar(graph_node(m->g, id), OP_add, eps)) return false;
    *variance = graph_node(m->g, id)->operands[0];
    return true;
}

static bool is_mean_square(const Match *m, ValueId v, ValueId x) {
    NodeId id = match_only(m, v, OP_mean);
    return id != NODE_NONE && match_last_dim(m, graph_node(m->g, id), x) &&
           is_square(m, graph_node(m->g, id)->operands[0], x);
}

/* `v` as x - mean(x). */
static bool is_centred(const Match *m, ValueId v, ValueId *x) {
    NodeId id = match_def(m, v, OP_sub);
    if (id == NODE_NONE || !match_two(graph_node(m->g, id), OP_sub)) return false;
    *x = graph_node(m->g, id)->operands[0];
    id = match_def(m, graph_node(m->g, id)->operands[1], OP_mean);
    return id != NODE_NONE && match_last_dim(m, graph_node(m->g, id), *x) && graph_node(m->g, id)->operands[0] == *x;
}

/* `v` as var(x) without Bessel's correction. */
static bool is_variance(const Match *m, ValueId v, ValueId x) {
    NodeId id = match_only(m, v, OP_var);
    if (id == NODE_NONE) return false;
    const Node *node = graph_node(m->g, id);
    return node->operands[0] == x && match_last_dim(m, node, x) && node_float(node, ATTR_correction) == 0;
}

/* The only use of `v` if it is op(v, vector) with a vector of the last size. */
static NodeId vector_use(const Match *m, ValueId v, Op op, ValueId *vector) {
    if (!match_one_use(m, v)) return NODE_NONE;
    NodeId id = m->uses.users[m->uses.start[v]];
    const Node *node = graph_node(m->g, id);
    if (!match_two(node, op)) return NODE_NONE;
    *vector = node->operands[0] == v ? node->operands[1] : node->operands[0];
    const Value *w = graph_value(m->g, *vector), *x = graph_value(m->g, v);
    return w->rank == 1 && w->shape[0] == x->shape[x->rank - 1] ? id : NODE_NONE;
}

Code fuse_norms(Match *m) {
    GRAPH_EACH(m->g, id) {
        const Node *root = graph_node(m->g, id);
        ValueId operands[3] = {VALUE_NONE, VALUE_NONE, VALUE_NONE}, x = VALUE_NONE, centred, variance;
        double eps;
        if ((root->op != OP_mul && root->op != OP_div) || graph_value(m->g, root->first_result)->dtype != DTYPE_F32)
            continue;
        if (!is_normalised(m, root, &x, &variance, &eps) || !match_same_type(m, x, root->first_result)) continue;
        bool squares = is_mean_square(m, variance, x), layer = is_centred(m, x, &centred);
        if (layer && (squares || is_variance(m, variance, centred)))
            x = centred;
        else if (squares)
            layer = false;
        else
            continue;

        Op op = layer ? OP_layer_norm : OP_rms_norm;
        NodeId last = id, next, fused;
        if ((next = vector_use(m, root->first_result, OP_mul, &operands[1])) != NODE_NONE)
            last = next;
        else
            operands[1] = VALUE_NONE;
        next = layer ? vector_use(m, graph_node(m->g, last)->first_result, OP_add, &operands[2]) : NODE_NONE;
        if (next != NODE_NONE)
            last = next;
        else
            operands[2] = VALUE_NONE;
        operands[0] = x;
        uint32_t count = operands[2] != VALUE_NONE ? 3 : operands[1] != VALUE_NONE ? 2 : 1;
        TRY(match_replace(m, last, op, operands, count, &fused)); /* what computed it has no use left */
        Node *node = graph_node(m->g, fused);
        node_attr_mut(node, ATTR_axes)->i = 1;
        node_attr_mut(node, ATTR_eps)->f = eps;
        TRY(remark_add(m->pc, "operator_fusion", node->source, "matched: %s", op_info(op)->name));
    }
    return CODE_OK;
}

/* --- norm(a + b) -------------------------------------------------------------------------------------------------- */
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
