/* Cache update: what a step attends to, without writing the cache first.
 *
 * requires  attention as one operator (attention_fusion before); only for targets with an NPU
 * keeps     results up to the order in which the keys are added up, for finite keys and values in the rows of the cache
 *           that are overwritten
 * breaks    nothing; the sums of layers that share their positions are for cse
 *
 * A cache of a fixed size is written by index_copy, a scattered write that an NPU does badly, and attention reads what
 * was written: the program would leave and enter the NPU in every layer. So attention reads the old cache with the new
 * rows behind it instead:
 *
 *     K = index_copy(cache, at, k)                    K = index_copy(cache, at, k)         for the caller alone
 *     attention(q, K, V, mask)                   ->   attention(q, cat(cache, k), cat(.., v), mask')
 *
 * In mask' the columns `at` hide their rows, and what they were stands behind, for the new rows. Nothing of the NPU
 * waits for index_copy any more, which writes S rows in place at the end. The positions must differ; where that is not
 * certain (two rows at one place: the last one wins) nothing is done. */
#include <math.h>
#include <string.h>

#include "passes/match.h"

/* --- positions ---------------------------------------------------------------------------------------------------- */
static int64_t count_of(const Value *v) {
    int64_t count = 1;
    for (int d = 0; d < v->rank; d++) count *= v->shape[d];
    return count;
}

static bool increasing(const Constant *c) {
    if (!c->data || c->rank != 1 || (c->dtype != DTYPE_I64 && c->dtype != DTYPE_I32)) return false;
    for (int64_t i = 1; i < c->shape[0]; i++) {
        const char *at = (const char *)c->data + i * c->strides[0] * (int64_t)dtype_size(c->dtype);
        const char *before = at - c->strides[0] * (int64_t)dtype_size(c->dtype);
        int64_t a = c->dtype == DTYPE_I64 ? *(const int64_t *)before : *(const int32_t *)before;
        int64_t b = c->dtype == DTYPE_I64 ? *(const int64_t *)at : *(const int32_t *)at;
        if (b <= a) return false;
    }
    return true;
}

/* One number, or a row of them plus at most one number that all share. */
static bool all_differ(const Match *m, ValueId at) {
    const Graph *g = m->g;
    for (int depth = 0; depth < 8; depth++) {
        const Node *node = value_node(g, at);
        if (count_of(graph_value(g, at)) == 1) return true;
        switch (node->op) {
        case OP_arange: return scalar_f64(node_attr(node, ATTR_delta)->s) != 0;
        case OP_constant: return increasing(&g->constants[node_int(node, ATTR_index)]);
        case OP_reshape: at = node->operands[0]; break;
        case OP_add: {
            uint32_t row = 0;
            if (node->n_operands == 2) {
                row = count_of(graph_value(g, node->operands[0])) == 1;
                if (!row && count_of(graph_value(g, node->operands[1])) != 1) return false;
            }
            at = node->operands[row];
            break;
        }
        default: return false;
        }
    }
    return false;
}

/* --- rewriting ---------------------------------------------------------------------------------------------------- */
typedef struct Update {
    NodeId attention;
    ValueId at, mask;
    ValueId cache[2], rows[2]; /* of keys and values */
    int64_t n_rows, size;
} Update;

/* The index_copy that makes operand k, along the rows of [B, G, T, D]. */
static const Node *writer(const Match *m, const Node *attention, uint32_t k) {
    NodeId id = match_def(m, attention->operands[k], OP_index_copy);
    const Node *node = id == NODE_NONE ? NULL : graph_node(m->g, id);
    return node && node_int(node, ATTR_dim) == 2 ? node : NULL;
}

/* NULL, or why attention that reads what index_copy wrote stays as it is. */
static const char *read_update(const Match *m, NodeId id, Update *u) {
    const Node *attention = graph_node(m->g, id);
    *u = (Update){.attention = id};
    for (uint32_t k = 0; k < 2; k++) {
        const Node *node = writer(m, attention, k + 1);
        if (!node) return "keys or values are no written cache";
        if (k && node->operands[1] != u->at) return "keys and values are written at different positions";
        u->cache[k] = node->operands[0];
        u->at = node->operands[1];
        u->rows[k] = node->operands[2];
    }
    u->n_rows = count_of(graph_value(m->g, u->at));
    u->size = graph_value(m->g, u->cache[0])->shape[2];
    if (graph_value(m->g, u->cache[1])->shape[2] != u->size) return "keys and values differ in number";
    if (u->n_rows == 0 || u->n_rows >= u->size) return "no row of the cache is left";
    if (node_int(attention, ATTR_causal)) return "the mask is the causal triangle";
    if (attention->n_operands < 4 || attention->operands[3] == VALUE_NONE) return "there is no mask";
    u->mask = attention->operands[3];
    const Value *mask = graph_value(m->g, u->mask);
    if (mask->rank == 0 || mask->shape[mask->rank - 1] != u->size) return "the mask is the same for all keys";
    if (!all_differ(m, u->at)) return "two rows may have the same position";
    return NULL;
}

static Code insert(Match *m, const Update *u, Op op, const ValueId *operands, size_t n, const Type *type, Node **node,
                   ValueId *out) {
    NodeId id;
    int32_t source = graph_node(m->g, u->attention)->source;
    TRY(graph_insert(m->pc->ctx, m->g, u->attention, op, operands, n, type, 1, source, &id));
    *node = graph_node(m->g, id);
    *out = (*node)->first_result;
    return CODE_OK;
}

static Code insert_index_copy(Match *m, const Update *u, ValueId x, ValueId at, ValueId rows, ValueId *out) {
    Node *node;
    Type type = value_type(m->g, x);
    TRY(insert(m, u, OP_index_copy, (ValueId[]){x, at, rows}, 3, &type, &node, out));
    node_attr_mut(node, ATTR_dim)->i = type.rank - 1;
    return CODE_OK;
}

/* The mask for cache and new rows. All of it is made by what runs on the host, so that one tensor a layer enters the
 * NPU: padded for all layers together, then the columns of the written rows change places with the padding. */
static Code insert_mask(Match *m, const Update *u, ValueId *out) {
    Type type = value_type(m->g, u->mask);
    int64_t shape[MAX_RANK], padding[2 * MAX_RANK] = {0};
    Scalar hidden = type.dtype == DTYPE_BOOL ? (Scalar){.kind = SCALAR_INT, .i = 0}
                                             : (Scalar){.kind = SCALAR_FLOAT, .f = -INFINITY};
    Node *node;
    ValueId padded, columns, seen, behind, closed;
    memcpy(shape, type.shape, type.rank * sizeof *shape);
    int64_t *last = &shape[type.rank - 1];
    type.shape = shape;

    *last = u->size + u->n_rows;
    padding[2 * type.rank - 1] = u->n_rows;
    TRY(insert(m, u, OP_pad, &u->mask, 1, &type, &node, &padded));
    TRY(attr_set_ints(m->pc->ctx, m->g, node_attr_mut(node, ATTR_padding), padding, 2 * type.rank));
    node_attr_mut(node, ATTR_value)->s = hidden;

    *last = u->n_rows;
    TRY(insert(m, u, OP_index_select, (ValueId[]){u->mask, u->at}, 2, &type, &node, &seen));
    node_attr_mut(node, ATTR_dim)->i = type.rank - 1;
    TRY(insert(m, u, OP_full, NULL, 0, &type, &node, &columns));
    node_attr_mut(node, ATTR_value)->s = hidden;
    Type places = {DTYPE_I64, 1, &u->n_rows};
    TRY(insert(m, u, OP_arange, NULL, 0, &places, &node, &behind));
    node_attr_mut(node, ATTR_first)->s = (Scalar){.kind = SCALAR_INT, .i = u->size};
    node_attr_mut(node, ATTR_delta)->s = (Scalar){.kind = SCALAR_INT, .i = 1};

    TRY(insert_index_copy(m, u, padded, u->at, columns, &closed));
    return insert_index_copy(m, u, closed, behind, seen, out);
}

static Code apply(Match *m, const Update *u) {
    ValueId operands[4], mask;
    TRY(insert_mask(m, u, &mask));
    for (uint32_t k = 0; k < 2; k++) {
        Type type = value_type(m->g, u->cache[k]);
        int64_t shape[4];
        Node *node;
        memcpy(shape, type.shape, sizeof shape);
        shape[2] += u->n_rows;
        type.shape = shape;
        TRY(insert(m, u, OP_cat, (ValueId[]){u->cache[k], u->rows[k]}, 2, &type, &node, &operands[k + 1]));
        node_attr_mut(node, ATTR_dim)->i = 2;
    }
    operands[0] = graph_node(m->g, u->attention)->operands[0];
    operands[3] = mask;
    return node_set_operands(m->pc->ctx, m->g, u->attention, operands, 4);
}

static Code rewrite(Match *m) {
    GRAPH_EACH(m->g, id) {
        const Node *node = graph_node(m->g, id);
        Update u;
        if (node->op != OP_attention || (!writer(m, node, 1) && !writer(m, node, 2))) continue;
        const char *reason = read_update(m, id, &u);
        if (!reason) TRY(apply(m, &u));
        TRY(remark_add(m->pc, "cache_update", graph_node(m->g, id)->source, reason ? "declined: %s%s" : "matched: %s%s",
                       reason ? reason : "attention to a cache and the rows that are written into it", ""));
    }
    return CODE_OK;
}

Code pass_cache_update(PassContext *pc, Graph *g) { return pc->options.npu ? match_run(pc, g, rewrite) : CODE_OK; }
