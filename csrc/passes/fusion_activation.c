/* Hand-written activations: gelu in both forms, silu. */
#include <math.h>

#include "passes/fusion.h"

/* `v` as x * scalar or x / (1 / scalar); the operand goes to *x. */
static bool scaled(const Match *m, ValueId v, double scalar, ValueId *x) {
    NodeId id = match_def(m, v, OP_mul);
    double s;
    if (id != NODE_NONE && match_scalar(graph_node(m->g, id), OP_mul, &s) && match_near(s, scalar)) {
        *x = graph_node(m->g, id)->operands[0];
        return true;
    }
    id = match_def(m, v, OP_div);
    if (id != NODE_NONE && match_scalar(graph_node(m->g, id), OP_div, &s) && match_near(1 / s, scalar)) {
        *x = graph_node(m->g, id)->operands[0];
        return true;
    }
    return false;
}

/* `v` as other + inner, other known. */
static bool sum_with(const Match *m, ValueId v, ValueId other, ValueId *inner) {
    NodeId id = match_only(m, v, OP_add);
    if (id == NODE_NONE || !match_two(graph_node(m->g, id), OP_add)) return false;
    const ValueId *ops = graph_node(m->g, id)->operands;
    if (ops[0] != other && ops[1] != other) return false;
    *inner = ops[0] == other ? ops[1] : ops[0];
    return true;
}

/* x^3 as pow(x, 3), x * x * x. */
static bool is_cube(const Match *m, ValueId v, ValueId x) {
    double s;
    NodeId id = match_only(m, v, OP_pow);
    if (id != NODE_NONE) {
        const Node *node = graph_node(m->g, id);
        return node->operands[0] == x && match_scalar(node, OP_pow, &s) && s == 3;
    }
    id = match_only(m, v, OP_mul);
    if (id == NODE_NONE || !match_two(graph_node(m->g, id), OP_mul)) return false;
    const ValueId *ops = graph_node(m->g, id)->operands;
    if (ops[0] != x && ops[1] != x) return false;
    NodeId square = match_only(m, ops[0] == x ? ops[1] : ops[0], OP_mul);
    return square != NODE_NONE && match_two(graph_node(m->g, square), OP_mul) &&
           graph_node(m->g, square)->operands[0] == x && graph_node(m->g, square)->operands[1] == x;
}

/* sqrt(2 / pi) * x * (1 + 0.044715 * x * x), as Bloom has it */
static bool is_tanh_product(const Match *m, ValueId inner, ValueId x) {
    NodeId id = match_only(m, inner, OP_mul);
    if (id == NODE_NONE || !match_two(graph_node(m->g, id), OP_mul)) return false;
    for (int side = 0; side < 2; side++) {
        ValueId a = graph_node(m->g, id)->operands[side], b = graph_node(m->g, id)->operands[1 - side], base, term;
        double one;
        NodeId sum = match_only(m, b, OP_add);
        if (sum == NODE_NONE || !scaled(m, a, 0.7978845608028654, &base) || base != x) continue;
        if (!match_scalar(graph_node(m->g, sum), OP_add, &one) || one != 1) continue;
        NodeId product = match_only(m, graph_node(m->g, sum)->operands[0], OP_mul);
        if (product == NODE_NONE || !match_two(graph_node(m->g, product), OP_mul)) continue;
        const ValueId *ops = graph_node(m->g, product)->operands;
        if (ops[0] == x && scaled(m, ops[1], 0.044715, &term) && term == x) return true;
        if (ops[1] == x && scaled(m, ops[0], 0.044715, &term) && term == x) return true;
    }
    return false;
}

/* inner = sqrt(2 / pi) * (x + 0.044715 * x^3) */
static bool is_tanh_argument(const Match *m, ValueId inner, ValueId x) {
    ValueId sum, term, cube;
    if (is_tanh_product(m, inner, x)) return true;
    return scaled(m, inner, 0.7978845608028654, &sum) && sum_with(m, sum, x, &term) &&
           scaled(m, term, 0.044715, &cube) && is_cube(m, cube, x);
}

/* `v` as 1 + tanh(..) or 1 + erf(..) of x. */
static bool is_gate(const Match *m, ValueId v, ValueId x, bool *tanh_form) {
    double one;
    NodeId id = match_only(m, v, OP_add);
    if (id == NODE_NONE || !match_scalar(graph_node(m->g, id), OP_add, &one) || one != 1) return false;
    ValueId curve = graph_node(m->g, id)->operands[0], argument;
    if ((id = match_only(m, curve, OP_tanh)) != NODE_NONE) {
        *tanh_form = true;
        return is_tanh_argument(m, graph_node(m->g, id)->operands[0], x);
    }
    if ((id = match_only(m, curve, OP_erf)) == NODE_NONE) return false;
    *tanh_form = false;
    return scaled(m, graph_node(m->g, id)->operands[0], sqrt(0.5), &argument) && argument == x;
}

/* root = (0.5 * x) * gate, x * (0.5 * gate) or 0.5 * (x * gate) */
static bool is_gelu(const Match *m, const Node *root, ValueId *x, bool *tanh_form) {
    double half;
    ValueId product[2];
    if (match_scalar(root, OP_mul, &half) && half == 0.5) {
        NodeId inner = match_only(m, root->operands[0], OP_mul);
        if (inner == NODE_NONE || !match_two(graph_node(m->g, inner), OP_mul)) return false;
        product[0] = graph_node(m->g, inner)->operands[0];
        product[1] = graph_node(m->g, inner)->operands[1];
        for (int side = 0; side < 2; side++) {
            *x = product[side];
            if (is_gate(m, product[1 - side], *x, tanh_form)) return true;
        }
        return false;
    }
    if (!match_two(root, OP_mul)) return false;
    for (int side = 0; side < 2; side++) {
        ValueId a = root->operands[side], b = root->operands[1 - side], gate;
        if (scaled(m, a, 0.5, x) && is_gate(m, b, *x, tanh_form)) return true;
        *x = a;
        if (match_one_use(m, b) && scaled(m, b, 0.5, &gate) && is_gate(m, gate, *x, tanh_form)) return true;
    }
    return false;
}

static bool is_silu(const Match *m, const Node *root, ValueId *x) {
    if (!match_two(root, OP_mul)) return false;
    for (int side = 0; side < 2; side++) {
        NodeId sigmoid = match_only(m, root->operands[side], OP_sigmoid);
        *x = root->operands[1 - side];
        if (sigmoid != NODE_NONE && graph_node(m->g, sigmoid)->operands[0] == *x) return true;
    }
    return false;
}

Code fuse_activations(Match *m) {
    GRAPH_EACH(m->g, id) {
        const Node *root = graph_node(m->g, id);
        /* half types round after each operator in eager, which one operator does not */
        if (root->op != OP_mul || graph_value(m->g, root->first_result)->dtype != DTYPE_F32) continue;
        ValueId x;
        bool tanh_form = false;
        NodeId fused;
        if (is_gelu(m, root, &x, &tanh_form) && match_same_type(m, x, root->first_result)) {
            TRY(match_replace(m, id, OP_gelu, &x, 1, &fused));
            node_attr_mut(graph_node(m->g, fused), ATTR_approximate)->i = tanh_form;
            TRY(remark_add(m->pc, "operator_fusion", graph_node(m->g, fused)->source, "matched: gelu (%s)",
                           tanh_form ? "tanh" : "erf"));
        } else if (is_silu(m, root, &x) && match_same_type(m, x, root->first_result)) {
            TRY(match_replace(m, id, OP_silu, &x, 1, &fused));
            TRY(remark_add(m->pc, "operator_fusion", graph_node(m->g, fused)->source, "matched: silu"));
        }
    }
    return CODE_OK;
}
