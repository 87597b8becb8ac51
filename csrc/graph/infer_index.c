/* Shape rules of indexing and data movement. */
#include "graph/infer.h"

static Code check_index(const RuleInput *in, const Value *index) {
    RULE_CHECK(in, index && (index->dtype == DTYPE_I64 || index->dtype == DTYPE_I32), "the index is %s",
               index ? dtype_name(index->dtype) : "absent");
    return CODE_OK;
}

Code rule_embedding(const RuleInput *in, Inferred *results) {
    const Value *w = rule_operand(in, 0), *ids = rule_operand(in, 1);
    RULE_CHECK(in, w && w->rank == 2, "the table is no matrix");
    TRY(check_index(in, ids));
    RULE_CHECK(in, ids->rank < MAX_RANK, "rank %u", ids->rank);
    inferred_like(results, ids);
    results->dtype = w->dtype;
    results->shape[results->rank++] = w->shape[1];
    return CODE_OK;
}

Code rule_gather(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0), *index = rule_operand(in, 1);
    TRY(check_index(in, index));
    int64_t dim = node_int(in->node, ATTR_dim);
    TRY(check_dim(in, dim, x->rank));
    RULE_CHECK(in, index->rank == x->rank, "ranks %u and %u", x->rank, index->rank);
    for (unsigned d = 0; d < x->rank; d++)
        RULE_CHECK(in, d == dim || index->shape[d] <= x->shape[d], "the index is larger than the operand in dim %u", d);
    inferred_like(results, index);
    results->dtype = x->dtype;
    return CODE_OK;
}

Code rule_index_select(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0), *index = rule_operand(in, 1);
    TRY(check_index(in, index));
    int64_t dim = node_int(in->node, ATTR_dim);
    RULE_CHECK(in, dim >= 0 && dim < x->rank && index->rank <= 1, "dim %lld of rank %u", (long long)dim, x->rank);
    inferred_like(results, x);
    results->shape[dim] = index->rank ? index->shape[0] : 1;
    return CODE_OK;
}

/* The shape of x[indices]: where the indexed dimensions stand next to each other the index shape takes their place,
 * else it comes first. Index operands start at `first`. */
static Code indexed_shape(const RuleInput *in, const Value *x, uint32_t first, Inferred *result) {
    const Attr *mask = node_attr(in->node, ATTR_mask);
    RULE_CHECK(in, mask->ints.count <= x->rank, "mask of %u for rank %u", mask->ints.count, x->rank);
    Inferred index = {.rank = 0};
    uint32_t operand = first;
    int begin = -1, end = -1, used = 0;
    for (unsigned d = 0; d < mask->ints.count; d++) {
        if (!mask->ints.items[d]) continue;
        const Value *v = rule_operand(in, operand++);
        TRY(check_index(in, v));
        TRY(broadcast_into(in, &index, v));
        if (begin < 0) begin = (int)d;
        end = (int)d + 1;
        used++;
    }
    RULE_CHECK(in, used && operand == in->node->n_operands, "%u index operands for %d mask bits",
               in->node->n_operands - first, used);
    RULE_CHECK(in, x->rank - used + index.rank <= MAX_RANK, "rank %d", x->rank - used + index.rank);
    bool adjacent = end - begin == used;
    result->dtype = x->dtype;
    result->rank = 0;
    for (unsigned d = 0; d <= x->rank; d++) {
        if ((int)d == (adjacent ? begin : 0))
            for (unsigned k = 0; k < index.rank; k++) result->shape[result->rank++] = index.shape[k];
        if (d < x->rank && !(d < mask->ints.count && mask->ints.items[d])) result->shape[result->rank++] = x->shape[d];
    }
    return CODE_OK;
}

Code rule_index(const RuleInput *in, Inferred *results) { return indexed_shape(in, rule_operand(in, 0), 1, results); }

Code rule_index_put(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0), *values = rule_operand(in, 1);
    Inferred target;
    TRY(indexed_shape(in, x, 2, &target));
    RULE_CHECK(in, values && values->dtype == x->dtype && broadcasts_to(values, &target),
               "values do not fit x[indices]");
    inferred_like(results, x);
    return CODE_OK;
}

Code rule_index_copy(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0), *index = rule_operand(in, 1), *source = rule_operand(in, 2);
    TRY(check_index(in, index));
    int64_t dim = node_int(in->node, ATTR_dim);
    RULE_CHECK(in, dim >= 0 && dim < x->rank && index->rank <= 1, "dim %lld of rank %u", (long long)dim, x->rank);
    RULE_CHECK(in, source && source->dtype == x->dtype && source->rank == x->rank, "the source's type differs");
    for (unsigned d = 0; d < x->rank; d++)
        RULE_CHECK(in, source->shape[d] == (d == dim ? (index->rank ? index->shape[0] : 1) : x->shape[d]),
                   "the source's size differs in dim %u", d);
    inferred_like(results, x);
    return CODE_OK;
}

Code rule_scatter(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0), *index = rule_operand(in, 1), *source = rule_operand(in, 2);
    TRY(check_index(in, index));
    int64_t dim = node_int(in->node, ATTR_dim), reduce = node_int(in->node, ATTR_reduce);
    TRY(check_dim(in, dim, x->rank));
    RULE_CHECK(in, reduce == 0 || reduce == 1, "reduce %lld", (long long)reduce);
    RULE_CHECK(in, source && source->dtype == x->dtype && source->rank == x->rank && index->rank == x->rank,
               "types differ");
    for (unsigned d = 0; d < x->rank; d++)
        RULE_CHECK(in, index->shape[d] <= source->shape[d] && (d == dim || index->shape[d] <= x->shape[d]),
                   "the index is too large in dim %u", d);
    inferred_like(results, x);
    return CODE_OK;
}

Code rule_slice_scatter(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0), *source = rule_operand(in, 1);
    int64_t length = 0, dim = node_int(in->node, ATTR_dim);
    TRY(check_slice(in, x, &length));
    RULE_CHECK(in, source && source->dtype == x->dtype && source->rank == x->rank, "the source's type differs");
    for (unsigned d = 0; d < x->rank; d++)
        RULE_CHECK(in, source->shape[d] == (d == dim ? length : x->shape[d]), "the source's size differs in dim %u", d);
    inferred_like(results, x);
    return CODE_OK;
}

Code rule_cat(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    int64_t dim = node_int(in->node, ATTR_dim);
    RULE_CHECK(in, dim >= 0 && dim < x->rank, "dim %lld is outside rank %u", (long long)dim, x->rank);
    inferred_like(results, x);
    for (uint32_t k = 1; k < in->node->n_operands; k++) {
        const Value *y = rule_operand(in, k);
        RULE_CHECK(in, y && y->dtype == x->dtype && y->rank == x->rank, "operand %u differs in type", k);
        for (unsigned d = 0; d < x->rank; d++)
            RULE_CHECK(in, d == dim || y->shape[d] == x->shape[d], "operand %u differs in dim %u", k, d);
        RULE_CHECK(in, !__builtin_add_overflow(results->shape[dim], y->shape[dim], &results->shape[dim]), "too large");
    }
    return CODE_OK;
}

Code rule_pad(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    const Attr *padding = node_attr(in->node, ATTR_padding);
    RULE_CHECK(in, padding->ints.count == 2u * x->rank, "%u paddings for rank %u", padding->ints.count, x->rank);
    RULE_CHECK(in, node_attr(in->node, ATTR_value)->s.kind != SCALAR_NONE, "pad without a value");
    inferred_like(results, x);
    for (unsigned d = 0; d < x->rank; d++)
        for (unsigned side = 0; side < 2; side++) {
            int64_t amount = padding->ints.items[2 * d + side];
            RULE_CHECK(in, amount >= 0 && !__builtin_add_overflow(results->shape[d], amount, &results->shape[d]),
                       "padding %lld", (long long)amount);
        }
    return CODE_OK;
}
