/* The scores of hand-written attention: product, scale and masks, in the forms that transformers and its ancestors
 * write. */
#include "passes/attention_fusion.h"

#include <math.h>
#include <string.h>

enum { MAX_ADDS = 4 };

/* The node that makes `v`, if `v` has this one use and the node may be absorbed with it. */
static NodeId only_def(const Match *m, ValueId v) {
    if (!match_one_use(m, v)) return NODE_NONE;
    return match_def(m, v, value_node(m->g, v)->op);
}

/* Operators that leave the numbers as they are: casts to the same type, copies, reshapes of the batch dimensions, the
 * sum with an empty mask (that it makes 0 of -0 is nothing to softmax). */
static bool is_passive(const Match *m, const Node *node) {
    double c;
    if (node->op == OP_add && match_scalar(node, OP_add, &c)) return c == 0;
    const Value *in = graph_value(m->g, node->operands[0]), *out = graph_value(m->g, node->first_result);
    if (node->op == OP_cast || node->op == OP_contiguous) return in->dtype == out->dtype;
    return node->op == OP_reshape && in->rank >= 2 && out->rank >= 2 &&
           in->shape[in->rank - 1] == out->shape[out->rank - 1] && in->shape[in->rank - 2] == out->shape[out->rank - 2];
}

/* Does `v` come from a product by steps that scores_read follows? */
static bool leads_to_product(const Match *m, ValueId v, int adds) {
    for (;;) {
        NodeId id = only_def(m, v);
        if (id == NODE_NONE) return false;
        const Node *node = graph_node(m->g, id);
        double ignored;
        switch (node->op) {
        case OP_matmul: return true;
        case OP_add:
            if (node->n_operands < 2 || adds == 0) return false;
            return leads_to_product(m, node->operands[0], adds - 1) || leads_to_product(m, node->operands[1], adds - 1);
        case OP_where: v = node->operands[mask_scalar(m, node->operands[1], &ignored) ? 2 : 1]; break;
        case OP_mul:
        case OP_div: v = node->operands[node->n_operands == 2 && mask_scalar(m, node->operands[0], &ignored)]; break;
        default:
            if (!is_passive(m, node)) return false;
            v = node->operands[0];
        }
    }
}

static bool note_shape(const Match *m, ValueId v, Scores *s) {
    const Value *value = graph_value(m->g, v);
    if (value->rank != 4) return value->rank == 2 || value->rank == 3;
    Shape4 shape = {value->shape[0], value->shape[1], value->shape[2], value->shape[3]};
    if (s->shape_known) return memcmp(&s->shape, &shape, sizeof shape) == 0;
    s->shape = shape;
    s->shape_known = true;
    return true;
}

/* x * c or x / c with c a number; the operand goes to *x. */
static bool read_scale(const Match *m, const Node *node, double *scale, ValueId *x) {
    double c;
    *x = node->operands[0];
    if (node->n_operands == 1) {
        if (!match_scalar(node, node->op, &c)) return false;
    } else if (!mask_scalar(m, node->operands[1], &c)) {
        if (node->op != OP_mul || !mask_scalar(m, node->operands[0], &c)) return false;
        *x = node->operands[1];
    }
    *scale *= node->op == OP_mul ? c : 1 / c;
    return isfinite(*scale);
}

static bool read_mask(const Match *m, const Node *node, MaskStep *step, ValueId *x) {
    step->rank = graph_value(m->g, node->first_result)->rank;
    if (node->op == OP_add) {
        if (node->n_operands != 2) return false;
        int side = leads_to_product(m, node->operands[0], MAX_ADDS) ? 0 : 1;
        *x = node->operands[side];
        step->value = mask_unexpanded(m, node->operands[1 - side]);
        return true;
    }
    step->is_where = true;
    step->inverted = mask_scalar(m, node->operands[1], &step->fill);
    if (!step->inverted && !mask_scalar(m, node->operands[2], &step->fill)) return false;
    *x = node->operands[step->inverted ? 2 : 1];
    step->value = mask_unexpanded(m, node->operands[0]);
    for (;;) { /* where(not c, ..) */
        NodeId negation = match_def(m, step->value, OP_logical_not);
        if (negation == NODE_NONE) negation = match_def(m, step->value, OP_bitwise_not);
        if (negation == NODE_NONE || graph_value(m->g, graph_node(m->g, negation)->operands[0])->dtype != DTYPE_BOOL)
            return true;
        step->value = mask_unexpanded(m, graph_node(m->g, negation)->operands[0]);
        step->inverted = !step->inverted;
    }
}

static const char *read_step(const Match *m, NodeId id, Scores *s, bool *scaled, ValueId *next) {
    const Node *node = graph_node(m->g, id);
    ValueId v = node->first_result;
    if (is_passive(m, node)) {
        *next = node->operands[0];
        return NULL;
    }
    if (node->op == OP_mul || node->op == OP_div) {
        *scaled = true;
        return read_scale(m, node, &s->scale, next) && match_same_type(m, *next, v)
                   ? NULL
                   : "the scores are scaled by a tensor";
    }
    if ((node->op != OP_add && node->op != OP_where) || !leads_to_product(m, v, MAX_ADDS))
        return "the scores are not a product with scale and mask";
    if (*scaled) return "the mask is scaled with the scores";
    if (s->n_masks == sizeof s->masks / sizeof *s->masks) return "more than two masks";
    s->masks[1] = s->masks[0]; /* walking upwards: the one found last is applied first */
    memset(&s->masks[0], 0, sizeof s->masks[0]);
    s->n_masks++;
    return read_mask(m, node, &s->masks[0], next) && match_same_type(m, *next, v) ? NULL
                                                                                  : "the mask is of an unknown form";
}

const char *scores_read(const Match *m, ValueId v, Scores *s, NodeId *softmax) {
    bool scaled = false;
    *s = (Scores){.scale = 1};
    *softmax = NODE_NONE;
    for (;;) { /* down to the softmax, then down to the product */
        if (v >= m->n_values || graph_value(m->g, v)->forward != VALUE_NONE) return "values made by this pass";
        const Node *made = value_node(m->g, v);
        if (*softmax == NODE_NONE && made->op != OP_softmax && (made->n_operands == 0 || !is_passive(m, made)))
            return "no softmax";
        if (made->op == OP_softmax && *softmax == NODE_NONE) {
            *softmax = graph_value(m->g, v)->def;
            if (node_int(made, ATTR_dim) != graph_value(m->g, v)->rank - 1) return "softmax is not over the keys";
        }
        NodeId id = only_def(m, v);
        if (id == NODE_NONE) return *softmax == NODE_NONE ? "no softmax" : "scores or probabilities are used elsewhere";
        if (!note_shape(m, v, s)) return "scores of rank above 4, or of several shapes";
        if (made->op == OP_matmul) {
            s->product = id;
            return made->n_operands == 2 && !node_attr(made, ATTR_program)->ints.count ? NULL
                                                                                       : "the product has an epilogue";
        }
        if (s->n_absorbed == sizeof s->absorbed / sizeof *s->absorbed) return "too many steps";
        s->absorbed[s->n_absorbed++] = id;
        if (id == *softmax) {
            v = made->operands[0];
        } else if (made->n_operands == 0) {
            return "the scores are not a product with scale and mask";
        } else {
            const char *declined = read_step(m, id, s, &scaled, &v);
            if (declined) return declined;
        }
    }
}

/* --- masks -------------------------------------------------------------------------------------------------------- */
/* A mask for scores [B*H, S, T] as one for [B, H, S, T]. */
static Code mask_to_rank_4(Match *m, NodeId root, const Scores *s, MaskStep *step) {
    const Value *v = graph_value(m->g, step->value);
    if (step->rank != 3 || v->rank != 3 || v->shape[0] == 1 || s->shape.batch == 1) return CODE_OK;
    int64_t shape[4] = {s->shape.batch, s->shape.heads, v->shape[1], v->shape[2]};
    return insert_reshape(m, root, step->value, shape, 4, &step->value);
}

/* op(a, b, [c]) before `root`, broadcast to one shape; its dtype is f32. */
static Code insert_broadcast(Match *m, NodeId root, Op op, const ValueId *operands, size_t n, ValueId *out) {
    int64_t shape[4] = {1, 1, 1, 1};
    unsigned rank = 0;
    NodeId node;
    for (size_t k = 0; k < n; k++) {
        const Value *v = graph_value(m->g, operands[k]);
        if (v->rank > rank) rank = v->rank;
        for (unsigned d = 0; d < v->rank; d++) {
            if (v->shape[d] != 1) shape[4 - v->rank + d] = v->shape[d];
        }
    }
    Type type = {DTYPE_F32, (uint8_t)rank, shape + 4 - rank};
    TRY(graph_insert(m->pc->ctx, m->g, root, op, operands, n, &type, 1, graph_node(m->g, root)->source, &node));
    *out = graph_node(m->g, node)->first_result;
    return CODE_OK;
}

static Code insert_full(Match *m, NodeId root, double value, ValueId *out) {
    Type type = {DTYPE_F32, 0, NULL};
    NodeId node;
    TRY(graph_insert(m->pc->ctx, m->g, root, OP_full, NULL, 0, &type, 1, graph_node(m->g, root)->source, &node));
    node_attr_mut(graph_node(m->g, node), ATTR_value)->s = (Scalar){SCALAR_FLOAT, {.f = value}};
    *out = graph_node(m->g, node)->first_result;
    return CODE_OK;
}

/* where(visible, a, fill), the float mask that stands for a `where` over scores. */
static Code insert_where(Match *m, NodeId root, const MaskStep *step, ValueId a, ValueId hidden, ValueId *out) {
    ValueId operands[3] = {step->value, step->inverted ? hidden : a, step->inverted ? a : hidden};
    return insert_broadcast(m, root, OP_where, operands, 3, out);
}

/* where(c, scores, fill) alone. */
static Code where_mask(Match *m, NodeId root, const MaskStep *step, MaskFacts facts, ValueId *mask, bool *causal) {
    ValueId zero, fill;
    *mask = VALUE_NONE;
    *causal = facts.causal;
    if (facts.causal) return CODE_OK;
    if (facts.rows ||
        step->fill == -(double)INFINITY) { /* -inf hides as a bool mask does; so does less, but not a whole row */
        *mask = step->value;
        if (!step->inverted) return CODE_OK;
        NodeId node;
        Type type = value_type(m->g, step->value);
        TRY(graph_insert(m->pc->ctx, m->g, root, OP_logical_not, &step->value, 1, &type, 1,
                         graph_node(m->g, root)->source, &node));
        *mask = graph_node(m->g, node)->first_result;
        return CODE_OK;
    }
    /* a hidden row: score + fill is fill itself, as f32 has no digits left for |score| < 2^102 */
    TRY(insert_full(m, root, 0, &zero));
    TRY(insert_full(m, root, step->fill, &fill));
    return insert_where(m, root, step, zero, fill, mask);
}

Code scores_mask(Match *m, MaskCache *cache, NodeId root, const Scores *s, ValueId *mask, bool *causal,
                 const char **declined) {
    MaskFacts facts[2] = {{0}, {0}};
    MaskStep steps[2];
    uint32_t n = 0;
    *mask = VALUE_NONE;
    *causal = false;
    *declined = NULL;
    for (uint32_t k = 0; k < s->n_masks; k++) {
        MaskStep step = s->masks[k];
        DType dtype = graph_value(m->g, step.value)->dtype;
        MaskFacts known = mask_facts(m, cache, step.value, step.inverted, s->shape.queries, s->shape.keys);
        if (dtype != (step.is_where ? DTYPE_BOOL : DTYPE_F32)) *declined = "the mask is not f32";
        if (known.visible) continue;
        if (step.is_where && !(step.fill <= HARD_MASK)) *declined = "hidden scores get a value that softmax may see";
        facts[n] = known;
        steps[n++] = step;
    }
    if (n == 2 && !steps[0].is_where && !steps[1].is_where && !facts[0].hard && !facts[1].hard) {
        *declined =
            "two masks are added, whose order rounds"; /* with a hard one, either sum is the other mask or hidden */
    }
    if (*declined || n == 0) return CODE_OK;
    for (uint32_t k = 0; k < n; k++) TRY(mask_to_rank_4(m, root, s, &steps[k]));

    if (n == 1 && steps[0].is_where) return where_mask(m, root, &steps[0], facts[0], mask, causal);
    if (n == 1) {
        *causal = facts[0].causal;
        *mask = *causal ? VALUE_NONE : steps[0].value;
        return CODE_OK;
    }
    ValueId added[2] = {steps[0].value, steps[1].value}, hidden;
    if (steps[0].is_where &&
        steps[1].is_where) { /* where(d, where(c, s, fill), other) = s + where(d, where(c, 0, fill), other) */
        ValueId zero, first;
        TRY(insert_full(m, root, 0, &zero));
        TRY(insert_full(m, root, steps[0].fill, &hidden));
        TRY(insert_where(m, root, &steps[0], zero, hidden, &first));
        TRY(insert_full(m, root, steps[1].fill, &hidden));
        return insert_where(m, root, &steps[1], first, hidden, mask);
    }
    if (steps[0].is_where) { /* where(c, s, fill) + a = s + where(c, a, fill + a) */
        ValueId sum[2] = {added[1]};
        TRY(insert_full(m, root, steps[0].fill, &sum[1]));
        TRY(insert_broadcast(m, root, OP_add, sum, 2, &hidden));
        return insert_where(m, root, &steps[0], added[1], hidden, mask);
    }
    if (steps[1].is_where) { /* where(c, s + a, fill) = s + where(c, a, fill) */
        TRY(insert_full(m, root, steps[1].fill, &hidden));
        return insert_where(m, root, &steps[1], added[0], hidden, mask);
    }
    return insert_broadcast(m, root, OP_add, added, 2, mask);
}
