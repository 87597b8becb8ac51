/* Shape rules of norms, contractions and attention. */
#include "graph/infer.h"
#include "graph/program.h"

static Code check_float(const RuleInput *in, const Value *x) {
    RULE_CHECK(in, dtype_is_float(x->dtype), "wants a float, got %s", dtype_name(x->dtype));
    return CODE_OK;
}

Code rule_norm(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    bool layer = in->node->op == OP_layer_norm;
    int64_t axes = node_int(in->node, ATTR_axes);
    TRY(check_float(in, x));
    RULE_CHECK(in, axes >= 1 && axes <= x->rank, "%lld normalised axes of rank %u", (long long)axes, x->rank);
    for (unsigned k = 1; k <= (layer ? 2u : 1u); k++) { /* weight, then bias */
        const Value *w = rule_operand(in, k);
        if (!w) continue;
        RULE_CHECK(in, w->dtype == x->dtype && w->rank == axes,
                   "operand %u does not have the normalised shape and dtype", k);
        for (unsigned d = 0; d < w->rank; d++)
            RULE_CHECK(in, w->shape[d] == x->shape[x->rank - w->rank + d],
                       "operand %u does not have the normalised shape", k);
    }
    const Value *residual = rule_operand(in, layer ? 3 : 2);
    RULE_CHECK(in, !residual || same_type(residual, x), "residual and operand differ in type");
    inferred_like(&results[0], x);
    inferred_like(&results[1], x);
    return CODE_OK;
}

Code rule_group_norm(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    int64_t groups = node_int(in->node, ATTR_groups);
    TRY(check_float(in, x));
    RULE_CHECK(in, x->rank >= 2 && groups > 0 && x->shape[1] % groups == 0, "%lld groups", (long long)groups);
    for (unsigned k = 1; k <= 2; k++) {
        const Value *w = rule_operand(in, k);
        RULE_CHECK(in, !w || (w->dtype == x->dtype && w->rank == 1 && w->shape[0] == x->shape[1]),
                   "operand %u is not one a channel", k);
    }
    inferred_like(results, x);
    return CODE_OK;
}

/* The epilogue of a contraction: `fixed` operands belong to the contraction, others are inputs 1.. of the program. */
static Code check_epilogue(const RuleInput *in, uint32_t fixed, Inferred *result) {
    const Attr *program = node_attr(in->node, ATTR_program);
    uint32_t count = in->node->n_operands;
    if (program->ints.count == 0) {
        RULE_CHECK(in, count <= fixed, "%u operands but no epilogue", count);
        return CODE_OK;
    }
    DType types[PROGRAM_MAX_INPUTS] = {result->dtype};
    uint32_t n_inputs = 1;
    for (uint32_t k = fixed; k < count; k++) {
        const Value *x = rule_operand(in, k);
        RULE_CHECK(in, x && n_inputs < PROGRAM_MAX_INPUTS, "epilogue operand %u is absent or one too many", k);
        RULE_CHECK(in, broadcasts_to(x, result), "epilogue operand %u does not broadcast to the product", k);
        types[n_inputs++] = x->dtype;
    }
    return program_check(in->ctx, program->ints.items, program->ints.count, types, n_inputs, &result->dtype);
}

Code rule_linear(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0), *w = rule_operand(in, 1), *b = rule_operand(in, 2);
    RULE_CHECK(in, x && w, "operand is absent");
    RULE_CHECK(in, x->dtype == w->dtype && (dtype_is_float(x->dtype) || dtype_is_int(x->dtype)), "operands %s and %s",
               dtype_name(x->dtype), dtype_name(w->dtype));
    RULE_CHECK(in, x->rank >= 1 && w->rank == 2 && x->shape[x->rank - 1] == w->shape[1], "inner sizes differ");
    RULE_CHECK(in, !b || (b->dtype == x->dtype && b->rank == 1 && b->shape[0] == w->shape[0]),
               "bias is not one an output");
    inferred_like(results, x);
    results->shape[x->rank - 1] = w->shape[0];
    return check_epilogue(in, contraction_operands(OP_linear), results);
}

Code rule_quantised_linear(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0), *q = rule_operand(in, 1), *scales = rule_operand(in, 2),
                *b = rule_operand(in, 4);
    int64_t bits = node_int(in->node, ATTR_bits), group = node_int(in->node, ATTR_group);
    RULE_CHECK(in, x && q, "operand is absent");
    RULE_CHECK(in, x->dtype == DTYPE_F32 || x->dtype == DTYPE_F16 || x->dtype == DTYPE_BF16, "wants f32, f16 or bf16");
    RULE_CHECK(in, x->rank >= 1 && x->shape[x->rank - 1] < INT64_MAX - QUANTISED_BLOCK, "wants rows");
    RULE_CHECK(in, bits == 16 || bits == 8 || bits == 4, "weights of %lld bits", (long long)bits);
    RULE_CHECK(in, bits == 16 ? !scales && !rule_operand(in, 3) && group == 0 : scales != NULL, "scales of %lld bits",
               (long long)bits);
    RULE_CHECK(in, group >= 0 && group % QUANTISED_GROUP == 0, "groups of %lld columns", (long long)group);
    int64_t columns = x->shape[x->rank - 1];
    if (bits == 16)
        RULE_CHECK(in, q->dtype == DTYPE_BF16 && q->rank == 2 && q->shape[1] == columns + columns % 2,
                   "the weight is not bf16 [N, %lld]", (long long)(columns + columns % 2));
    else if (bits == 8)
        RULE_CHECK(in, q->dtype == DTYPE_I8 && q->rank == 2 && q->shape[1] == columns, "the weight is not i8 [N, %lld]",
                   (long long)columns);
    else
        RULE_CHECK(in,
                   q->dtype == DTYPE_U8 && q->rank == 3 && q->shape[1] == quantised_blocks(columns) &&
                       q->shape[2] == QUANTISED_BLOCK / 2,
                   "the weight is not u8 [N, %lld, %d]", (long long)quantised_blocks(columns), QUANTISED_BLOCK / 2);
    int64_t groups = quantised_groups(columns, group);
    for (unsigned k = 2; k <= 3; k++) {
        const Value *v = rule_operand(in, k);
        RULE_CHECK(in,
                   !v || (v->dtype == DTYPE_F32 && v->rank == 2 && v->shape[0] == q->shape[0] && v->shape[1] == groups),
                   "the %s are not f32 [N, %lld]", k == 2 ? "scales" : "zero points", (long long)groups);
    }
    RULE_CHECK(in, !b || (b->dtype == x->dtype && b->rank == 1 && b->shape[0] == q->shape[0]),
               "bias is not one an output");
    inferred_like(results, x);
    results->shape[x->rank - 1] = q->shape[0];
    return check_epilogue(in, contraction_operands(OP_quantised_linear), results);
}

Code rule_matmul(const RuleInput *in, Inferred *results) {
    const Value *a = rule_operand(in, 0), *b = rule_operand(in, 1);
    RULE_CHECK(in, a && b, "operand is absent");
    RULE_CHECK(in, a->dtype == b->dtype && (dtype_is_float(a->dtype) || dtype_is_int(a->dtype)), "operands %s and %s",
               dtype_name(a->dtype), dtype_name(b->dtype));
    unsigned rank = a->rank;
    RULE_CHECK(in, rank >= 2 && b->rank == rank, "ranks %u and %u", rank, b->rank);
    RULE_CHECK(in, a->shape[rank - 1] == b->shape[rank - 2], "inner sizes differ: %lld and %lld",
               (long long)a->shape[rank - 1], (long long)b->shape[rank - 2]);
    inferred_like(results, a);
    results->shape[rank - 1] = b->shape[rank - 1];
    for (unsigned d = 0; d + 2 < rank; d++) {
        if (a->shape[d] == b->shape[d] || b->shape[d] == 1) continue;
        RULE_CHECK(in, a->shape[d] == 1, "batch sizes differ: %lld and %lld", (long long)a->shape[d],
                   (long long)b->shape[d]);
        results->shape[d] = b->shape[d];
    }
    return check_epilogue(in, contraction_operands(OP_matmul), results);
}

Code rule_grouped_matmul(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0), *w = rule_operand(in, 1), *ends = rule_operand(in, 2);
    TRY(check_float(in, x));
    RULE_CHECK(in, w && ends && w->dtype == x->dtype && ends->dtype == DTYPE_I32, "operand types differ");
    RULE_CHECK(in, x->rank == 2 && w->rank == 3 && ends->rank == 1, "ranks %u, %u and %u", x->rank, w->rank,
               ends->rank);
    RULE_CHECK(in, x->shape[1] == w->shape[1] && ends->shape[0] == w->shape[0], "inner sizes or groups differ");
    inferred_like(results, x);
    results->shape[1] = w->shape[2];
    return CODE_OK;
}

Code rule_conv(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0), *w = rule_operand(in, 1), *b = rule_operand(in, 2);
    const Attr *stride = node_attr(in->node, ATTR_stride), *padding = node_attr(in->node, ATTR_padding);
    const Attr *dilation = node_attr(in->node, ATTR_dilation);
    int64_t groups = node_int(in->node, ATTR_groups);
    TRY(check_float(in, x));
    RULE_CHECK(in, (x->rank == 3 || x->rank == 4) && w->rank == x->rank && w->dtype == x->dtype,
               "operand ranks or dtypes");
    unsigned spatial = x->rank - 2u;
    RULE_CHECK(in, stride->ints.count == spatial && padding->ints.count == spatial && dilation->ints.count == spatial,
               "one stride, padding and dilation a spatial dimension");
    RULE_CHECK(
        in, groups > 0 && x->shape[1] % groups == 0 && w->shape[0] % groups == 0 && w->shape[1] == x->shape[1] / groups,
        "%lld groups do not divide the channels", (long long)groups);
    RULE_CHECK(in, !b || (b->dtype == x->dtype && b->rank == 1 && b->shape[0] == w->shape[0]),
               "bias is not one an output channel");
    inferred_like(results, x);
    results->shape[1] = w->shape[0];
    for (unsigned d = 0; d < spatial; d++) {
        int64_t s = stride->ints.items[d], p = padding->ints.items[d], step = dilation->ints.items[d],
                k = w->shape[2 + d];
        RULE_CHECK(in, s > 0 && p >= 0 && p < INT32_MAX && step > 0 && step < INT32_MAX && k > 0 && k < INT32_MAX,
                   "stride, padding or dilation");
        int64_t room = x->shape[2 + d] + 2 * p - step * (k - 1) - 1;
        RULE_CHECK(in, room >= 0, "the kernel is larger than the padded input");
        results->shape[2 + d] = room / s + 1;
    }
    return CODE_OK;
}

Code rule_attention(const RuleInput *in, Inferred *results) {
    const Value *q = rule_operand(in, 0), *k = rule_operand(in, 1), *v = rule_operand(in, 2),
                *mask = rule_operand(in, 3);
    RULE_CHECK(in, q && k && v, "operand is absent");
    TRY(check_float(in, q));
    RULE_CHECK(in, q->rank == 4 && k->rank == 4 && v->rank == 4, "wants rank 4");
    RULE_CHECK(in, k->dtype == q->dtype && v->dtype == q->dtype, "dtypes differ");
    RULE_CHECK(in, k->shape[0] == q->shape[0] && v->shape[0] == q->shape[0], "batch sizes differ");
    RULE_CHECK(in, k->shape[1] == v->shape[1] && k->shape[1] > 0 && q->shape[1] % k->shape[1] == 0,
               "%lld heads on %lld", (long long)q->shape[1], (long long)k->shape[1]);
    RULE_CHECK(in, k->shape[2] == v->shape[2] && k->shape[3] == q->shape[3], "key sizes differ");
    if (mask) {
        Inferred scores = {.dtype = q->dtype, .rank = 4, .shape = {q->shape[0], q->shape[1], q->shape[2], k->shape[2]}};
        RULE_CHECK(in, mask->dtype == DTYPE_BOOL || mask->dtype == q->dtype, "mask is %s", dtype_name(mask->dtype));
        RULE_CHECK(in, broadcasts_to(mask, &scores), "mask does not broadcast to the scores");
    }
    inferred_like(results, q);
    results->shape[3] = v->shape[3];
    return check_order(in, 4);
}

Code rule_rope(const RuleInput *in, Inferred *results) {
    const Value *x = rule_operand(in, 0);
    TRY(check_float(in, x));
    inferred_like(results, x);
    RULE_CHECK(in, x->rank >= 2 && x->shape[x->rank - 1] % 2 == 0, "wants an even last size");
    for (unsigned k = 1; k <= 2; k++) {
        const Value *table = rule_operand(in, k);
        RULE_CHECK(in, table && table->dtype == x->dtype && broadcasts_to(table, results),
                   "operand %u does not broadcast to x", k);
    }
    return check_order(in, x->rank);
}
