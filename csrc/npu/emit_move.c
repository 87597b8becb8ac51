/* Operators that move data or make it from nothing. */
#include <stdio.h>
#include <string.h>

#include "npu/emit.h"

/* A copy: memory has no meaning inside of a model. */
Code emit_contiguous(Emitter *e) {
    Wire x;
    TRY(emit_operand(e, 0, &x));
    return emit_result(e, 0, x);
}

Code emit_cat(Emitter *e) {
    const Node *node = e->instr->node;
    Wire *parts, out;
    TRY(ARENA_NEW(e->ctx, e->scratch, node->n_operands, &parts));
    for (uint32_t k = 0; k < node->n_operands; k++) TRY(emit_operand(e, k, &parts[k]));
    TRY(emit_concat(e, parts, node->n_operands, node_int(node, ATTR_dim), &out));
    return emit_result(e, 0, out);
}

/* Runs `write` on an operand as numbers: for operators that know no boolean. */
static Code begin_numbers(Emitter *e, uint32_t k, bool *boolean, Wire *x) {
    TRY(emit_operand(e, k, x));
    *boolean = wire_type(e, *x)->element == ELEMENT_BOOL;
    return *boolean ? emit_convert(e, *x, e->real, x) : CODE_OK;
}

static Code end_numbers(Emitter *e, bool boolean, Wire x) {
    Wire half;
    if (boolean) {
        TRY(emit_number(e, 0.5, &half));
        TRY(emit_compare(e, "Greater", x, half, &x));
    }
    return emit_result(e, 0, x);
}

Code emit_pad(Emitter *e) {
    const Node *node = e->instr->node;
    const Attr *padding = node_attr(node, ATTR_padding);
    int64_t before[MAX_RANK], after[MAX_RANK];
    bool boolean;
    Wire in[4];
    TRY(begin_numbers(e, 0, &boolean, &in[0]));
    WireType type = *wire_type(e, in[0]);
    for (int d = 0; d < type.rank; d++) {
        before[d] = padding->ints.items[2 * d];
        after[d] = padding->ints.items[2 * d + 1];
        type.shape[d] += before[d] + after[d];
    }
    double value = scalar_f64(node_attr(node, ATTR_value)->s);
    TRY(emit_ints(e, before, type.rank, &in[1]));
    TRY(emit_ints(e, after, type.rank, &in[2]));
    TRY(emit_number(e, boolean ? value != 0 : value, &in[3]));
    TRY(emit_layer(e, "Pad", 1, in, 4, &type, 1, &in[0], "pad_mode=\"constant\""));
    return end_numbers(e, boolean, in[0]);
}

/* By look-ups with constant indices: every compiler takes them. */
Code emit_flip(Emitter *e) {
    const Attr *dims = node_attr(e->instr->node, ATTR_dims);
    bool boolean;
    Wire in[3];
    TRY(begin_numbers(e, 0, &boolean, &in[0]));
    WireType type = *wire_type(e, in[0]);
    for (uint32_t k = 0; k < dims->ints.count && type.rank; k++) {
        int64_t d = dims->ints.items[k], *indices;
        if (type.shape[d] == 1) continue;
        TRY(ARENA_NEW(e->ctx, e->scratch, type.shape[d], &indices));
        for (int64_t i = 0; i < type.shape[d]; i++) indices[i] = type.shape[d] - 1 - i;
        TRY(emit_ints(e, indices, (size_t)type.shape[d], &in[1]));
        WireType scalar = {.element = ELEMENT_I64};
        TRY(emit_literal(e, &scalar, &d, sizeof d, &in[2]));
        TRY(emit_layer(e, "Gather", 8, in, 3, &type, 1, &in[0], "batch_dims=\"0\""));
    }
    return end_numbers(e, boolean, in[0]);
}

/* A constant mask chooses, since 0 * inf would be NaN. */
Code emit_triangle(Emitter *e) {
    const Node *node = e->instr->node;
    bool lower = node->op == OP_tril;
    int64_t diagonal = node_int(node, ATTR_diagonal);
    Wire x, mask, zero, out;
    TRY(emit_operand(e, 0, &x));
    const WireType type = *wire_type(e, x);
    int64_t rows = type.shape[type.rank - 2], columns = type.shape[type.rank - 1];
    WireType shape = {.element = ELEMENT_BOOL, .rank = 2, .shape = {rows, columns}};
    uint8_t *kept;
    diagonal = diagonal < -rows ? -rows : diagonal > columns ? columns : diagonal;
    TRY(arena_array(e->ctx, e->scratch, (size_t)rows, (size_t)columns, (void **)&kept));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) kept[i * columns + j] = lower ? j <= i + diagonal : j >= i + diagonal;
    TRY(emit_literal(e, &shape, kept, (size_t)(rows * columns), &mask));
    if (type.element == ELEMENT_BOOL) {
        TRY(emit_binary(e, "LogicalAnd", 1, x, mask, &out));
    } else {
        TRY(emit_number(e, 0, &zero));
        TRY(emit_select(e, mask, x, zero, &out));
    }
    return emit_result(e, 0, out);
}

Code emit_full(Emitter *e) {
    const Node *node = e->instr->node;
    WireType type = emit_value_type(e, node->first_result);
    double value = scalar_f64(node_attr(node, ATTR_value)->s);
    Wire out;
    if (type.element == ELEMENT_BOOL)
        TRY(emit_bool(e, value != 0, &out));
    else
        TRY(emit_number(e, value, &out));
    TRY(emit_broadcast(e, out, type.rank, type.shape, &out));
    return emit_result(e, 0, out);
}

Code emit_arange(Emitter *e) {
    const Node *node = e->instr->node;
    int64_t count = graph_value(e->g, node->first_result)->shape[0];
    double first = scalar_f64(node_attr(node, ATTR_first)->s), delta = scalar_f64(node_attr(node, ATTR_delta)->s);
    double *values;
    Wire out;
    TRY(ARENA_NEW(e->ctx, e->scratch, count, &values));
    for (int64_t i = 0; i < count; i++) values[i] = first + delta * (double)i;
    TRY(emit_numbers(e, values, 1, &count, &out));
    return emit_result(e, 0, out);
}

/* What is before, the source, what is behind; the capability table lets only step 1 pass. */
Code emit_slice_scatter(Emitter *e) {
    const Node *node = e->instr->node;
    int64_t dim = node_int(node, ATTR_dim), start = node_int(node, ATTR_start), end = node_int(node, ATTR_end);
    Wire x, source, parts[3], out;
    size_t count = 0;
    TRY(emit_operand(e, 0, &x));
    TRY(emit_operand(e, 1, &source));
    int64_t size = wire_type(e, x)->shape[dim];
    if (start > 0) TRY(emit_slice(e, x, dim, 0, start, 1, &parts[count++]));
    if (end > start) parts[count++] = source;
    if (end < size) TRY(emit_slice(e, x, dim, end, size, 1, &parts[count++]));
    TRY(emit_concat(e, parts, count, dim, &out));
    return emit_result(e, 0, out);
}
