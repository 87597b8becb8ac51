/* Lookups by known, consecutive indices are slices: position embeddings, and the masks that transformers reads element
 * by element (mask[batch, key] with both from arange), need neither a kernel nor a copy. */
#include "passes/evaluate.h"

#include <string.h>

enum { MOST_INDICES = 1 << 20 };

/* A lookup: `count` adjacent dimensions of x, from `dim` on, are replaced by the dimensions of the broadcast
 * indices. */
typedef struct Lookup {
    int dim, count;
    Tensor indices[MAX_RANK];
    unsigned char elements[MAX_RANK][16]; /* memory of indices that are `full` */
} Lookup;

static bool known_indices(const Graph *g, ValueId v, Tensor *out, unsigned char element[16]) {
    const Node *node = value_node(g, v);
    const Value *value = graph_value(g, v);
    if (value->dtype != DTYPE_I64 && value->dtype != DTYPE_I32) return false;
    if (node->op == OP_constant) {
        *out = constant_tensor(&g->constants[node_int(node, ATTR_index)]);
        return out->data != NULL;
    }
    if (node->op != OP_full) return false;
    *out = (Tensor){.data = element, .dtype = value->dtype, .rank = value->rank};
    if (value->rank) memcpy(out->shape, value->shape, value->rank * sizeof *value->shape);
    scalar_store(node_attr(node, ATTR_value)->s, value->dtype, element);
    return true;
}

static bool read_lookup(const Graph *g, const Node *node, Lookup *l) {
    if (node->op != OP_index) {
        l->dim = node->op == OP_index_select ? (int)node_int(node, ATTR_dim) : 0;
        l->count = 1;
        return graph_value(g, node->operands[0])->rank > 0 &&
               known_indices(g, node->operands[1], l->indices, l->elements[0]);
    }
    const Attr *mask = node_attr(node, ATTR_mask);
    int end = (int)mask->ints.count;
    l->dim = 0;
    while (l->dim < end && !mask->ints.items[l->dim]) l->dim++;
    for (int d = l->dim; d < end; d++)
        if (!mask->ints.items[d]) return false;
    l->count = end - l->dim;
    if (l->count < 1 || l->count != (int)node->n_operands - 1) return false;
    for (int k = 0; k < l->count; k++)
        if (!known_indices(g, node->operands[k + 1], &l->indices[k], l->elements[k])) return false;
    return true;
}

static int64_t index_at(const Tensor *t, const int64_t *position, int rank) {
    int64_t offset = 0;
    for (int d = 0; d < t->rank; d++)
        if (t->shape[d] != 1) offset += position[rank - t->rank + d] * t->strides[d];
    return t->dtype == DTYPE_I64 ? ((const int64_t *)t->data)[offset] : ((const int32_t *)t->data)[offset];
}

/* Do the lookups read rows first, first + 1, ... of the looked-up dimensions taken as one? `shape`: of the broadcast
 * indices. */
static bool is_consecutive(const Lookup *l, const int64_t *sizes, const int64_t *shape, int rank, int64_t *first,
                           int64_t *n) {
    int64_t position[MAX_RANK] = {0};
    *n = 1;
    for (int d = 0; d < rank; d++)
        if (__builtin_mul_overflow(*n, shape[d], n)) return false;
    if (*n == 0 || *n > MOST_INDICES) return false;
    for (int64_t flat = 0; flat < *n; flat++) {
        int64_t row = 0;
        for (int k = 0; k < l->count; k++) {
            int64_t index = index_at(&l->indices[k], position, rank);
            if (index < 0 || index >= sizes[k]) return false; /* an error, or counted from the end: for the run */
            row = row * sizes[k] + index;
        }
        if (flat == 0) *first = row;
        if (row != *first + flat) return false;
        for (int d = rank; d-- > 0 && ++position[d] == shape[d];) position[d] = 0;
    }
    return true;
}

static Code insert_reshape(PassContext *pc, Graph *g, NodeId before, ValueId x, const Type *type, ValueId *out) {
    NodeId id;
    TRY(graph_insert(pc->ctx, g, before, OP_reshape, &x, 1, type, 1, graph_node(g, before)->source, &id));
    *out = graph_node(g, id)->first_result;
    return attr_set_ints(pc->ctx, g, node_attr_mut(graph_node(g, id), ATTR_shape), type->shape, type->rank);
}

Code simplify_lookup(PassContext *pc, Graph *g, NodeId id, ValueId *with) {
    Lookup l = {0};
    const Node *node = graph_node(g, id);
    ValueId x = node->operands[0];
    Type from = value_type(g, x), result = value_type(g, node->first_result);
    int32_t source = node->source;
    if (!read_lookup(g, node, &l)) return CODE_OK;
    int rest = from.rank - l.dim - l.count, rank = result.rank - l.dim - rest; /* rank of the broadcast indices */
    int64_t first = 0, n;
    if (rank < 0 || !is_consecutive(&l, from.shape + l.dim, result.shape + l.dim, rank, &first, &n)) return CODE_OK;

    int64_t shape[MAX_RANK];
    Type rows = {from.dtype, (uint8_t)(l.dim + 1 + rest), shape};
    memcpy(shape, from.shape, (size_t)l.dim * sizeof *shape);
    memcpy(shape + l.dim + 1, from.shape + l.dim + l.count, (size_t)rest * sizeof *shape);
    shape[l.dim] = 1;
    for (int d = 0; d < l.count; d++) shape[l.dim] *= from.shape[l.dim + d];
    if (l.count > 1) TRY(insert_reshape(pc, g, id, x, &rows, &x));
    shape[l.dim] = n;
    NodeId slice;
    TRY(graph_insert(pc->ctx, g, id, OP_slice, &x, 1, &rows, 1, source, &slice));
    Node *made = graph_node(g, slice);
    node_attr_mut(made, ATTR_dim)->i = l.dim;
    node_attr_mut(made, ATTR_start)->i = first;
    node_attr_mut(made, ATTR_end)->i = first + n;
    node_attr_mut(made, ATTR_step)->i = 1;
    return insert_reshape(pc, g, id, made->first_result, &result, with);
}
