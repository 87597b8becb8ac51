/* Attention fusion: attention in its simplest form, however the model wrote it.
 *
 * requires  a verified graph; masks that do not depend on inputs are constants (run fold and device_constant before)
 * keeps     results up to the rounding of the product's order and of a division by a scale, for scores below 2^102
 *           and finite keys and values at hidden positions (as SDPA's own kernels do)
 * breaks    nothing; what it leaves unused (permuted keys, masks) is for dce
 *
 * - matmul, [scale], [masks], softmax, matmul become `attention` (safe=false: softmax decides what no key gives);
 * - keys and values that were repeated for groups of heads are taken as they were before;
 * - a mask that hides nothing is dropped, one that is causal becomes the attribute. */
#include "passes/attention_fusion.h"

#include <string.h>

static const char pass_name[] = "attention_fusion";

/* --- views -------------------------------------------------------------------------------------------------------- */
Code insert_reshape(Match *m, NodeId before, ValueId x, const int64_t *shape, unsigned rank, ValueId *out) {
    NodeId node;
    Type type = {graph_value(m->g, x)->dtype, (uint8_t)rank, shape};
    TRY(graph_insert(m->pc->ctx, m->g, before, OP_reshape, &x, 1, &type, 1, graph_node(m->g, before)->source, &node));
    TRY(attr_set_ints(m->pc->ctx, m->g, node_attr_mut(graph_node(m->g, node), ATTR_shape), shape, rank));
    *out = graph_node(m->g, node)->first_result;
    return CODE_OK;
}

static bool has_shape(const Match *m, ValueId v, const int64_t *shape, unsigned rank) {
    const Value *value = graph_value(m->g, v);
    return value->rank == rank && memcmp(value->shape, shape, rank * sizeof *shape) == 0;
}

/* `x` as [batch, heads, rows, columns] of this shape; through a reshape that made it from there. */
static Code as_rank_4(Match *m, NodeId before, ValueId x, const int64_t shape[4], ValueId *out) {
    *out = x;
    if (has_shape(m, x, shape, 4)) return CODE_OK;
    NodeId reshape = match_def(m, x, OP_reshape);
    if (reshape != NODE_NONE && has_shape(m, graph_node(m->g, reshape)->operands[0], shape, 4)) {
        *out = graph_node(m->g, reshape)->operands[0];
        return CODE_OK;
    }
    return insert_reshape(m, before, x, shape, 4, out);
}

/* The last two dimensions swapped; a permute that did it is undone. */
static Code transpose_last(Match *m, NodeId before, ValueId x, ValueId *out) {
    int64_t dims[MAX_RANK], shape[MAX_RANK];
    NodeId permute = match_def(m, x, OP_permute), node;
    unsigned rank = graph_value(m->g, x)->rank;
    bool identity = true;
    for (unsigned d = 0; d < rank; d++) {
        unsigned from = d + 2 < rank ? d : 2 * rank - 3 - d;
        dims[d] = permute == NODE_NONE ? from : node_attr(graph_node(m->g, permute), ATTR_dims)->ints.items[from];
        identity = identity && dims[d] == d;
    }
    if (permute != NODE_NONE) x = graph_node(m->g, permute)->operands[0];
    *out = x;
    if (identity) return CODE_OK;
    const Value *value = graph_value(m->g, x);
    for (unsigned d = 0; d < rank; d++) shape[d] = value->shape[dims[d]];
    Type type = {value->dtype, (uint8_t)rank, shape};
    TRY(graph_insert(m->pc->ctx, m->g, before, OP_permute, &x, 1, &type, 1, graph_node(m->g, before)->source, &node));
    TRY(attr_set_ints(m->pc->ctx, m->g, node_attr_mut(graph_node(m->g, node), ATTR_dims), dims, rank));
    *out = graph_node(m->g, node)->first_result;
    return CODE_OK;
}

/* [B, G, T, D] of which `x` = reshape(expand(reshape(.., [B, G, 1, T, D]), [B, G, R, T, D]), [B, G * R, T, D]) repeats
 * each head R times; `x` itself if it isn't that. */
static ValueId unrepeated(const Match *m, ValueId x) {
    NodeId merge = match_def(m, x, OP_reshape);
    if (merge == NODE_NONE) return x;
    ValueId wide = graph_node(m->g, merge)->operands[0];
    NodeId copy = match_def(m, wide, OP_contiguous);
    NodeId expand = match_def(m, copy == NODE_NONE ? wide : graph_node(m->g, copy)->operands[0], OP_expand);
    if (expand == NODE_NONE) return x;
    NodeId split = match_def(m, graph_node(m->g, expand)->operands[0], OP_reshape);
    if (split == NODE_NONE) return x;
    ValueId heads = graph_node(m->g, split)->operands[0];
    const Value *v = graph_value(m->g, heads), *e = graph_value(m->g, graph_node(m->g, expand)->first_result);
    if (v->rank != 4 || e->rank != 5) return x;
    const int64_t *s = v->shape, narrow[5] = {s[0], s[1], 1, s[2], s[3]},
                  repeated[5] = {s[0], s[1], e->shape[2], s[2], s[3]};
    const int64_t merged[4] = {s[0], s[1] * e->shape[2], s[2], s[3]};
    bool matches = has_shape(m, graph_node(m->g, split)->first_result, narrow, 5) &&
                   has_shape(m, graph_node(m->g, expand)->first_result, repeated, 5) && has_shape(m, x, merged, 4);
    return matches ? heads : x;
}

/* Takes both keys and values as they were before they were repeated. */
static bool unrepeat(const Match *m, ValueId *k, ValueId *v) {
    ValueId keys = unrepeated(m, *k), values = unrepeated(m, *v);
    if (keys == *k || values == *v || graph_value(m->g, keys)->shape[1] != graph_value(m->g, values)->shape[1])
        return false;
    *k = keys;
    *v = values;
    return true;
}

/* Attention reads its operands through their strides: a copy of them is for nothing. */
static ValueId uncopied(const Match *m, ValueId x) {
    NodeId copy = match_def(m, x, OP_contiguous);
    return copy == NODE_NONE || m->effects ? x : graph_node(m->g, copy)->operands[0];
}

/* --- attention that is there -------------------------------------------------------------------------------------- */
static Code simplify_attention(Match *m, MaskCache *cache, NodeId id) {
    Graph *g = m->g;
    Node *node = graph_node(g, id);
    ValueId operands[4] = {node->operands[0], node->operands[1], node->operands[2], VALUE_NONE};
    if (node->n_operands > 3) operands[3] = node->operands[3];
    const char *groups = "", *mask_text = "";
    for (int k = 0; k < 3; k++) operands[k] = uncopied(m, operands[k]);
    if (unrepeat(m, &operands[1], &operands[2])) groups = ", repeated heads";
    if (operands[3] != VALUE_NONE) {
        operands[3] = mask_unexpanded(m, operands[3]);
        int64_t queries = graph_value(g, operands[0])->shape[2], keys = graph_value(g, operands[1])->shape[2];
        MaskFacts facts = mask_facts(m, cache, operands[3], false, queries, keys);
        if (facts.causal) node_attr_mut(node, ATTR_causal)->i = 1;
        if (facts.causal || facts.visible) operands[3] = VALUE_NONE;
        if (facts.causal || facts.visible) mask_text = facts.causal ? ", causal mask" : ", empty mask";
    }
    int32_t source = node->source;
    TRY(node_set_operands(m->pc->ctx, g, id, operands, operands[3] == VALUE_NONE ? 3 : 4));
    return remark_add(m->pc, pass_name, source, "matched: attention%s%s", groups, mask_text);
}

/* --- attention by hand -------------------------------------------------------------------------------------------- */
/* Shape of the scores when they never had rank 4: one batch, whose heads are the matrices of the product. */
static void shape_from_product(const Match *m, Scores *s) {
    const Value *v = graph_value(m->g, graph_node(m->g, s->product)->first_result);
    if (s->shape_known) return;
    s->shape = (Shape4){1, v->rank == 3 ? v->shape[0] : 1, v->shape[v->rank - 2], v->shape[v->rank - 1]};
    s->shape_known = true;
}

/* How many heads the operand [.., rows, columns] has on its own for these scores; 0: its batch does not fit. */
static int64_t own_heads(const Value *v, const Scores *s) {
    int64_t batch = v->rank == 4 ? v->shape[0] : s->shape.batch, heads = 1;
    if (v->rank == 4) heads = v->shape[1];
    if (v->rank == 3) heads = v->shape[0] % s->shape.batch ? 0 : v->shape[0] / s->shape.batch;
    if (v->rank == 2 && s->shape.batch != 1) heads = 0;
    return batch == s->shape.batch && heads && s->shape.heads % heads == 0 ? heads : 0;
}

/* Why the operands of the two products are not what `attention` takes, or NULL. */
static const char *check_operands(const Match *m, const Node *root, const Scores *s) {
    const Node *product = graph_node(m->g, s->product);
    const Value *q = graph_value(m->g, product->operands[0]), *k = graph_value(m->g, product->operands[1]);
    const Value *v = graph_value(m->g, root->operands[1]), *out = graph_value(m->g, root->first_result);
    if (q->dtype != DTYPE_F32 || v->dtype != DTYPE_F32) return "not f32: eager rounds between the steps";
    if (s->shape.batch <= 0 || s->shape.heads <= 0) return "empty";
    if (own_heads(q, s) != s->shape.heads) return "queries are broadcast";
    int64_t groups = own_heads(k, s);
    if (groups == 0 || own_heads(v, s) != groups) return "keys or values are broadcast";
    if (q->shape[q->rank - 2] != s->shape.queries || k->shape[k->rank - 1] != s->shape.keys) return "sizes differ";
    if (v->shape[v->rank - 2] != s->shape.keys) return "sizes differ";
    if (out->rank == 4 && (out->shape[0] != s->shape.batch || out->shape[1] != s->shape.heads))
        return "values are broadcast";
    return NULL;
}

static Code insert_operands(Match *m, NodeId root, const Scores *s, ValueId operands[3]) {
    const Node *product = graph_node(m->g, s->product);
    ValueId q = product->operands[0], kt = product->operands[1], v = graph_node(m->g, root)->operands[1];
    const Value *value = graph_value(m->g, q);
    int64_t depth = value->shape[value->rank - 1];
    const int64_t queries[4] = {s->shape.batch, s->shape.heads, s->shape.queries, depth};
    TRY(as_rank_4(m, root, q, queries, &operands[0]));
    value = graph_value(m->g, kt);
    int64_t groups = own_heads(value, s);
    const int64_t keys[4] = {s->shape.batch, groups, s->shape.keys, depth};
    const int64_t turned[4] = {s->shape.batch, groups, depth, s->shape.keys};
    if (match_def(m, kt, OP_permute) != NODE_NONE) { /* [B * H, T, D] may have come from rank 4: see through that too */
        TRY(transpose_last(m, root, kt, &operands[1]));
        TRY(as_rank_4(m, root, operands[1], keys, &operands[1]));
    } else {
        TRY(as_rank_4(m, root, kt, turned, &operands[1]));
        TRY(transpose_last(m, root, operands[1], &operands[1]));
    }
    value = graph_value(m->g, v);
    const int64_t values[4] = {s->shape.batch, groups, s->shape.keys, value->shape[value->rank - 1]};
    return as_rank_4(m, root, v, values, &operands[2]);
}

static Code build_attention(Match *m, NodeId root, const Scores *s, ValueId mask, bool causal) {
    Graph *g = m->g;
    ValueId operands[4] = {VALUE_NONE, VALUE_NONE, VALUE_NONE, mask}, old = graph_node(g, root)->first_result, result;
    int32_t source = graph_node(g, root)->source;
    NodeId id;
    TRY(insert_operands(m, root, s, operands));
    for (int k = 0; k < 3; k++) operands[k] = uncopied(m, operands[k]);
    bool grouped = unrepeat(m, &operands[1], &operands[2]);
    const Value *v = graph_value(g, operands[2]);
    const int64_t shape[4] = {s->shape.batch, s->shape.heads, s->shape.queries, v->shape[3]};
    Type type = {DTYPE_F32, 4, shape};
    TRY(graph_insert(m->pc->ctx, g, root, OP_attention, operands, mask == VALUE_NONE ? 3 : 4, &type, 1, source, &id));
    Node *node = graph_node(g, id);
    node_attr_mut(node, ATTR_scale)->f = s->scale;
    node_attr_mut(node, ATTR_causal)->i = causal;
    result = node->first_result;
    if (graph_value(g, old)->rank != 4) {
        const Value *o = graph_value(g, old);
        TRY(insert_reshape(m, root, result, o->shape, o->rank, &result));
    }
    graph_replace(g, old, result);
    graph_kill(g, root);
    for (uint32_t k = 0; k < s->n_absorbed; k++) graph_kill(g, s->absorbed[k]);
    graph_kill(g, s->product);
    return remark_add(m->pc, pass_name, source, "matched: attention by hand%s%s", grouped ? ", repeated heads" : "",
                      causal ? ", causal mask" : "");
}

static Code fuse_by_hand(Match *m, MaskCache *cache, NodeId root) {
    const Node *node = graph_node(m->g, root);
    Scores s;
    NodeId softmax;
    ValueId mask = VALUE_NONE;
    bool causal = false;
    const char *declined = scores_read(m, node->operands[0], &s, &softmax);
    if (softmax == NODE_NONE) return CODE_OK;
    if (!declined && (node->n_operands != 2 || node_attr(node, ATTR_program)->ints.count))
        declined = "the second product has an epilogue";
    if (!declined) shape_from_product(m, &s);
    if (!declined) declined = check_operands(m, node, &s);
    if (!declined) TRY(scores_mask(m, cache, root, &s, &mask, &causal, &declined));
    if (declined) return remark_add(m->pc, pass_name, graph_node(m->g, softmax)->source, "declined: %s", declined);
    return build_attention(m, root, &s, mask, causal);
}

static Code fuse_attention(Match *m) {
    MaskCache cache = {.mask = VALUE_NONE};
    GRAPH_EACH(m->g, id) {
        Op op = graph_node(m->g, id)->op;
        if (op == OP_matmul)
            TRY(fuse_by_hand(m, &cache, id));
        else if (op == OP_attention)
            TRY(simplify_attention(m, &cache, id));
    }
    return CODE_OK;
}

Code pass_attention_fusion(PassContext *pc, Graph *g) {
    TRY(graph_compact(pc->ctx, g));
    return match_run(pc, g, fuse_attention);
}
