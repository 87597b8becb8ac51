/* Rotary position embedding as transformers write it: x * cos + cat(-x[.., d/2:], x[.., :d/2]) * sin, or by pairs. */
#include <string.h>

#include "passes/fusion.h"

/* Elements first, first + step, .. of the last dimension of `base`: what slices of slices come to. */
typedef struct Part {
    ValueId base;
    int64_t first, step, count;
} Part;

static Part part_of(const Match *m, ValueId v) {
    const Value *value = graph_value(m->g, v);
    int64_t last = value->rank - 1;
    Part part = {v, 0, 1, value->rank ? value->shape[last] : 0};
    for (NodeId id; (id = match_def(m, part.base, OP_slice)) != NODE_NONE;) {
        const Node *node = graph_node(m->g, id);
        if (node_int(node, ATTR_dim) != last) break;
        part.first = node_int(node, ATTR_start) + part.first * node_int(node, ATTR_step);
        part.step *= node_int(node, ATTR_step);
        part.base = node->operands[0];
    }
    return part;
}

/* `v` is every step-th element of x from `first` on, half of them in all. */
static bool is_half(const Match *m, ValueId v, ValueId x, int64_t first, int64_t step) {
    Part half = part_of(m, v), all = part_of(m, x);
    return half.base == all.base && half.first == all.first + first * all.step && half.step == all.step * step &&
           half.count * 2 == all.count;
}

static bool is_negative_half(const Match *m, ValueId v, ValueId x, int64_t first, int64_t step) {
    NodeId neg = match_only(m, v, OP_neg);
    return neg != NODE_NONE && is_half(m, graph_node(m->g, neg)->operands[0], x, first, step);
}

/* `v` as [.., 1] of something that it is a reshape of. */
static ValueId unstacked(const Match *m, ValueId v) {
    NodeId reshape = match_def(m, v, OP_reshape);
    const Value *value = graph_value(m->g, v);
    if (reshape == NODE_NONE || value->rank < 2 || value->shape[value->rank - 1] != 1) return VALUE_NONE;
    ValueId x = graph_node(m->g, reshape)->operands[0];
    const Value *in = graph_value(m->g, x);
    return in->rank + 1 == value->rank && !memcmp(in->shape, value->shape, in->rank * sizeof *in->shape) ? x
                                                                                                         : VALUE_NONE;
}

/* `v` is cat(-second half of x, first half of x), or stack(-odd elements, even elements) flattened. */
static bool is_rotated(const Match *m, ValueId v, ValueId x, bool *interleaved) {
    const Value *value = graph_value(m->g, x);
    int64_t size = value->rank ? value->shape[value->rank - 1] : 0;
    if (size == 0 || size % 2 || !match_same_type(m, v, x)) return false;
    NodeId flat = match_only(m, v, OP_reshape);
    *interleaved = flat != NODE_NONE;
    NodeId cat = match_only(m, *interleaved ? graph_node(m->g, flat)->operands[0] : v, OP_cat);
    if (cat == NODE_NONE || graph_node(m->g, cat)->n_operands != 2) return false;
    const Node *node = graph_node(m->g, cat);
    if (node_int(node, ATTR_dim) != graph_value(m->g, node->first_result)->rank - 1) return false;
    if (!*interleaved) {
        return is_negative_half(m, node->operands[0], x, size / 2, 1) && is_half(m, node->operands[1], x, 0, 1);
    }
    ValueId odd = unstacked(m, node->operands[0]), even = unstacked(m, node->operands[1]);
    if (odd == VALUE_NONE || even == VALUE_NONE) return false;
    return is_negative_half(m, odd, x, 1, 2) && is_half(m, even, x, 0, 2);
}

/* One side of the sum as x * table. */
static bool is_product(const Match *m, ValueId v, ValueId *a, ValueId *b) {
    NodeId id = match_only(m, v, OP_mul);
    if (id == NODE_NONE || !match_two(graph_node(m->g, id), OP_mul)) return false;
    *a = graph_node(m->g, id)->operands[0];
    *b = graph_node(m->g, id)->operands[1];
    return true;
}

static bool is_rope(const Match *m, const Node *root, ValueId operands[3], bool *interleaved) {
    ValueId left[2], right[2];
    if (!match_two(root, OP_add) || !is_product(m, root->operands[0], &left[0], &left[1]) ||
        !is_product(m, root->operands[1], &right[0], &right[1]))
        return false;
    for (int which = 0; which < 8; which++) { /* which sum operand is x * cos; which factor is x; which is rotated */
        const ValueId *plain = which & 1 ? right : left, *turned = which & 1 ? left : right;
        ValueId x = plain[which >> 1 & 1], rotated = turned[which >> 2];
        if (!is_rotated(m, rotated, x, interleaved)) continue;
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
        bool interleaved;
        if (root->op != OP_add || graph_value(m->g, root->first_result)->dtype != DTYPE_F32) continue;
        if (!is_rope(m, root, operands, &interleaved) || !match_same_type(m, operands[0], root->first_result)) continue;
        TRY(match_replace(m, id, OP_rope, operands, 3, &fused));
        node_attr_mut(graph_node(m->g, fused), ATTR_interleaved)->i = interleaved;
        TRY(remark_add(m->pc, "operator_fusion", graph_node(m->g, fused)->source, "matched: rope%s",
                       interleaved ? " of pairs" : ""));
    }
    return CODE_OK;
}
