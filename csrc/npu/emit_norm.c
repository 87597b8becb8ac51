/* Norms, rotary embedding, softmax, gelu. */
#include <string.h>

#include "npu/emit.h"

/* --- norms -------------------------------------------------------------------------------------------------------- */
/* The last `count` dimensions of x, as axes. */
static uint32_t last_dims(const WireType *type, int64_t count, int64_t *dims) {
    for (int64_t k = 0; k < count; k++) dims[k] = type->rank - count + k;
    return (uint32_t)count;
}

/* x + eps, which stays above 0 in f16: a row of zeros gives zeros. */
static Code plus_eps(Emitter *e, Wire x, double eps, Wire *out) {
    return emit_binary_number(e, "Add", x, e->real == ELEMENT_F16 ? npu_scalar(OP_add, eps) : eps, out);
}

/* (x - mean) / sqrt(variance + eps) over `dims`. */
static Code standardise(Emitter *e, Wire x, const int64_t *dims, uint32_t n_dims, double eps, Wire *out) {
    if (e->options->forms & FORM_MVN) {
        Wire axes;
        TRY(emit_ints(e, dims, n_dims, &axes));
        return emit_layer(e, "MVN", 6, (Wire[]){x, axes}, 2, wire_type(e, x), 1, out,
                          "eps=\"%.9g\" normalize_variance=\"true\" eps_mode=\"INSIDE_SQRT\"", eps);
    }
    Wire mean, square;
    TRY(emit_reduce_dims(e, "ReduceMean", x, dims, n_dims, true, &mean));
    TRY(emit_binary(e, "Subtract", 1, x, mean, &x));
    TRY(emit_binary(e, "Multiply", 1, x, x, &square));
    TRY(emit_reduce_dims(e, "ReduceMean", square, dims, n_dims, true, &square));
    TRY(plus_eps(e, square, eps, &square));
    TRY(emit_unary(e, "Sqrt", 1, square, &square));
    return emit_binary(e, "Divide", 1, x, square, out);
}

/* x * (mean of squares + eps)^-1/2. The compiler makes one operator of exactly these layers, which adds up in f32: as
 * single operators the squares of what is above 255 would leave the range of f16. */
static Code root_mean_square(Emitter *e, Wire x, const int64_t *dims, uint32_t n_dims, double eps, Wire *out) {
    Wire square, exponent;
    TRY(emit_number(e, 2, &exponent));
    TRY(emit_binary(e, "Power", 1, x, exponent, &square));
    TRY(emit_reduce_dims(e, "ReduceMean", square, dims, n_dims, true, &square));
    TRY(plus_eps(e, square, eps, &square));
    TRY(emit_number(e, -0.5, &exponent));
    TRY(emit_binary(e, "Power", 1, square, exponent, &square));
    return emit_binary(e, "Multiply", 1, x, square, out);
}

/* x, with the residual (operand k) added first: that sum is result 1. */
static Code with_residual(Emitter *e, uint32_t k, Wire *x) {
    Wire residual;
    TRY(emit_operand(e, k, &residual));
    if (residual == WIRE_NONE) return CODE_OK;
    TRY(emit_binary(e, "Add", 1, *x, residual, x));
    return emit_result(e, 1, *x);
}

Code emit_layer_norm(Emitter *e) {
    const Node *node = e->instr->node;
    int64_t dims[MAX_RANK];
    Wire x, w, b;
    TRY(emit_operand(e, 0, &x));
    TRY(emit_operand(e, 1, &w));
    TRY(emit_operand(e, 2, &b));
    TRY(with_residual(e, 3, &x));
    uint32_t n = last_dims(wire_type(e, x), node_int(node, ATTR_axes), dims);
    TRY(standardise(e, x, dims, n, node_float(node, ATTR_eps), &x));
    if (w != WIRE_NONE) TRY(emit_binary(e, "Multiply", 1, x, w, &x));
    if (b != WIRE_NONE) TRY(emit_binary(e, "Add", 1, x, b, &x));
    return emit_result(e, 0, x);
}

Code emit_rms_norm(Emitter *e) {
    const Node *node = e->instr->node;
    int64_t dims[MAX_RANK];
    Wire x, w;
    TRY(emit_operand(e, 0, &x));
    TRY(emit_operand(e, 1, &w));
    TRY(with_residual(e, 2, &x));
    uint32_t n = last_dims(wire_type(e, x), node_int(node, ATTR_axes), dims);
    TRY(root_mean_square(e, x, dims, n, node_float(node, ATTR_eps), &x));
    if (w != WIRE_NONE) TRY(emit_binary(e, "Multiply", 1, x, w, &x));
    return emit_result(e, 0, x);
}

/* x [N, C, *] as [N, groups, all else], each row standardised. */
Code emit_group_norm(Emitter *e) {
    const Node *node = e->instr->node;
    int64_t groups = node_int(node, ATTR_groups), rest = 1, per_channel[MAX_RANK];
    Wire x, w, b;
    TRY(emit_operand(e, 0, &x));
    TRY(emit_operand(e, 1, &w));
    TRY(emit_operand(e, 2, &b));
    WireType type = *wire_type(e, x);
    for (int d = 1; d < type.rank; d++) {
        rest *= type.shape[d];
        per_channel[d] = 1;
    }
    per_channel[0] = 1;
    per_channel[1] = type.shape[1];
    TRY(emit_reshape(e, x, 3, (int64_t[]){type.shape[0], groups, rest / groups}, &x));
    TRY(standardise(e, x, (int64_t[]){2}, 1, node_float(node, ATTR_eps), &x));
    TRY(emit_reshape(e, x, type.rank, type.shape, &x));
    if (w != WIRE_NONE) {
        TRY(emit_reshape(e, w, type.rank, per_channel, &w));
        TRY(emit_binary(e, "Multiply", 1, x, w, &x));
    }
    if (b != WIRE_NONE) {
        TRY(emit_reshape(e, b, type.rank, per_channel, &b));
        TRY(emit_binary(e, "Add", 1, x, b, &x));
    }
    return emit_result(e, 0, x);
}

/* --- rotary embedding --------------------------------------------------------------------------------------------- */
/* (-x2, x1): of the halves of the last dimension; `sign` false: (x2, x1). */
static Code rotate_halves(Emitter *e, Wire x, bool sign, Wire *out) {
    const WireType type = *wire_type(e, x);
    int64_t last = type.rank - 1, size = type.shape[last];
    Wire parts[2];
    TRY(emit_slice(e, x, last, size / 2, size, 1, &parts[0]));
    if (sign) TRY(emit_unary(e, "Negative", 1, parts[0], &parts[0]));
    TRY(emit_slice(e, x, last, 0, size / 2, 1, &parts[1]));
    return emit_concat(e, parts, 2, last, out);
}

/* sin with its first half negative. */
static Code signed_sin(Emitter *e, Wire sin, int64_t size, Wire *out) {
    double *signs;
    Wire sign;
    TRY(ARENA_NEW(e->ctx, e->scratch, size, &signs));
    for (int64_t i = 0; i < size; i++) signs[i] = i < size / 2 ? -1 : 1;
    TRY(emit_numbers(e, signs, 1, &size, &sign));
    return emit_binary(e, "Multiply", 1, sin, sign, out);
}

/* The same of pairs: (-x[1], x[0], -x[3], x[2], ..). */
static Code rotate_pairs(Emitter *e, Wire x, Wire *out) {
    const WireType type = *wire_type(e, x);
    int64_t pairs = 1;
    for (int d = 0; d < type.rank; d++) pairs *= type.shape[d];
    Wire parts[2];
    TRY(emit_reshape(e, x, 2, (int64_t[]){pairs / 2, 2}, &x));
    TRY(emit_slice(e, x, 1, 1, 2, 1, &parts[0]));
    TRY(emit_unary(e, "Negative", 1, parts[0], &parts[0]));
    TRY(emit_slice(e, x, 1, 0, 1, 1, &parts[1]));
    TRY(emit_concat(e, parts, 2, 1, &x));
    return emit_reshape(e, x, type.rank, type.shape, out);
}

Code emit_rope(Emitter *e) {
    const Node *node = e->instr->node;
    Wire x, cos, sin, turned;
    TRY(emit_operand(e, 0, &x));
    TRY(emit_operand_small(e, 1, &cos));
    TRY(emit_operand_small(e, 2, &sin));
    if (node_int(node, ATTR_interleaved)) {
        TRY(rotate_pairs(e, x, &turned));
    } else {
        bool in_sin = (e->options->forms & FORM_SIGNED_SIN) != 0;
        TRY(rotate_halves(e, x, !in_sin, &turned));
        WireType type = *wire_type(e, x);
        if (in_sin) TRY(signed_sin(e, sin, type.shape[type.rank - 1], &sin));
    }
    TRY(emit_binary(e, "Multiply", 1, x, cos, &x));
    TRY(emit_binary(e, "Multiply", 1, turned, sin, &turned));
    TRY(emit_binary(e, "Add", 1, x, turned, &x));
    return emit_result(e, 0, x);
}

/* --- softmax, gelu ------------------------------------------------------------------------------------------------ */
Code emit_softmax(Emitter *e) {
    const Node *node = e->instr->node;
    Wire x, out;
    TRY(emit_operand(e, 0, &x));
    WireType type = *wire_type(e, x);
    long long dim = type.rank ? node_int(node, ATTR_dim) : 0;
    if (type.rank == 0) TRY(emit_reshape(e, x, 1, (int64_t[]){1}, &x));
    bool logarithm = node->op == OP_log_softmax;
    TRY(emit_layer(e, logarithm ? "LogSoftmax" : "SoftMax", logarithm ? 5 : 8, &x, 1, wire_type(e, x), 1, &out,
                   "axis=\"%lld\"", dim));
    TRY(emit_reshape(e, out, type.rank, type.shape, &out));
    return emit_result(e, 0, out);
}

Code emit_gelu(Emitter *e, Wire x, bool approximate, Wire *out) {
    return emit_layer(e, "Gelu", 7, &x, 1, wire_type(e, x), 1, out, "approximation_mode=\"%s\"",
                      approximate ? "TANH" : "ERF");
}
