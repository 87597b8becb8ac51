/* Rotary position embedding as transformers write it: x * cos + cat(-x[.., d/2:], x[.., :d/2]) * sin. */
#include "passes/fusion.h"

/* `v` is x[.., start:end] in the last dimension, every element. */
static bool is_part(const Match *m, ValueId v, ValueId x, int64_t start, int64_t end) {
    NodeId id = match_only(m, v, OP_slice);
    if (id == NODE_NONE) return false;
    const Node *node = graph_node(m->g, id);
    return node->operands[0] == x && node_int(node, ATTR_dim) == graph_value(m->g, x)->rank - 1 && node_int(node, ATTR_step) == 1 &&
           node_int(node, ATTR_start) == start && node_int(node, ATTR_end) == end;
}

/* `v` is cat(-second half of x, first half of x). */
static bool is_rotated(const Match *m, ValueId v, ValueId x) {
    const Value *value = graph_value(m->g, x);
    int64_t size = value->rank ? value->shape[value->rank - 1] : 0;
    NodeId cat = match_only(m, v, OP_cat);
    if (cat == NODE_NONE || size % 2) return false;
    const Node *node = graph_node(m->g, cat);
    if (node->n_operands != 2 || node_int(node, ATTR_dim) != value->rank - 1) return false;
    NodeId neg = match_only(m, node->operands[0], OP_neg);
    return neg != NODE_NONE && is_part(m, graph_node(m->g, neg)->operands[0], x, size / 2, size) &&
           is_part(m, node->operands[1], x, 0, size / 2);
}

/* One side of the sum as x * table. */
static bool is_product(const Match *m, ValueId v, ValueId *a, ValueId *b) {
    NodeId id = match_only(m, v, OP_mul);
    if (id == NODE_NONE || !match_two(graph_node(m->g, id), OP_mul)) return false;
    *a = graph_node(m->g, id)->operands[0];
    *b = graph_node(m->g, id)->operands[1];
    return true;
}

static bool is_rope(const Match *m, const Node *root, ValueId operands[3]) {
    ValueId left[2], right[2];
    if (!match_two(root, OP_add) || !is_product(m, root->operands[0], &left[0], &left[1]) ||
        !is_product(m, root->operands[1], &right[0], &right[1]))
        return false;
    for (int which = 0; which < 8; which++) { /* which sum operand is x * cos; which factor is x; which is rotated */
        const ValueId *plain = which & 1 ? right : left, *turned = which & 1 ? left : right;
        ValueId x = plain[which >> 1 & 1], rotated = turned[which >> 2];
        if (!is_rotated(m, rotated, x)) continue;
        operands[0] = x;
        operands[1] = plain[1 - (which >> 1 & 1)];
        operands[2] = turned[1 - (which >> 2)];
        return true;
    }
    return false;
}

Code fuse_rope(Match *m) {
    GRAPH_EACH(m->g, id) {
        const Node *root = graph_node(m->g, id);
        ValueId operands[3];
        NodeId fused;
        if (root->op != OP_add || graph_value(m->g, root->first_result)->dtype != DTYPE_F32) continue;
        if (!is_rope(m, root, operands) || !match_same_type(m, operands[0], root->first_result)) continue;
        TRY(match_replace(m, id, OP_rope, operands, 3, &fused));
        TRY(remark_add(m->pc, "operator_fusion", graph_node(m->g, fused)->source, "matched: rope"));
    }
    return CODE_OK;
}
