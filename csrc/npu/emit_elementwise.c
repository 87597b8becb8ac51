/* Elementwise operators, and programs of them, as OpenVINO operators with the meaning of ATen's. */
#include <math.h>
#include <string.h>

#include "npu/emit.h"

static bool is_bool(const Emitter *e, Wire x) { return wire_type(e, x)->element == ELEMENT_BOOL; }

static Code unknown(Emitter *e, Op op) {
    return fail(e->ctx, CODE_INTERNAL, "%s cannot be written for these types", op_info(op)->name);
}

/* x != 0: NaN is true, as in ATen. */
static Code truth(Emitter *e, Wire x, Wire *out) {
    *out = x;
    if (is_bool(e, x)) return CODE_OK;
    TRY(emit_convert(e, x, e->real, &x)); /* i8, u8 */
    Wire zero;
    TRY(emit_number(e, 0, &zero));
    return emit_compare(e, "NotEqual", x, zero, out);
}

static Code cast(Emitter *e, Wire x, DType to, Wire *out) {
    Element element = emit_element(e, to);
    return element == ELEMENT_BOOL ? truth(e, x, out) : emit_convert(e, x, element, out);
}

static Code logical_not(Emitter *e, Wire x, Wire *out) {
    if (is_bool(e, x)) return emit_unary(e, "LogicalNot", 1, x, out);
    Wire zero;
    TRY(emit_number(e, 0, &zero));
    return emit_compare(e, "Equal", x, zero, out);
}

/* --- one operand -------------------------------------------------------------------------------------------------- */
/* clang-format off */
static const struct {
    Op op;
    const char *type;
    uint8_t opset;
} unaries[] = {
    {OP_neg, "Negative", 1}, {OP_abs, "Abs", 1}, {OP_sign, "Sign", 1}, {OP_floor, "Floor", 1}, {OP_ceil, "Ceiling", 1},
    {OP_exp, "Exp", 1}, {OP_log, "Log", 1}, {OP_sqrt, "Sqrt", 1}, {OP_sin, "Sin", 1}, {OP_cos, "Cos", 1},
    {OP_tan, "Tan", 1}, {OP_asin, "Asin", 1}, {OP_acos, "Acos", 1}, {OP_atan, "Atan", 1}, {OP_sinh, "Sinh", 1},
    {OP_cosh, "Cosh", 1}, {OP_tanh, "Tanh", 1}, {OP_erf, "Erf", 1}, {OP_sigmoid, "Sigmoid", 1}, {OP_relu, "ReLU", 1},
    {OP_silu, "Swish", 4}, {OP_softplus, "SoftPlus", 4},
};
/* clang-format on */

/* sign(x) * floor(|x|) */
static Code trunc_of(Emitter *e, Wire x, Wire *out) {
    Wire sign, size;
    TRY(emit_unary(e, "Sign", 1, x, &sign));
    TRY(emit_unary(e, "Abs", 1, x, &size));
    TRY(emit_unary(e, "Floor", 1, size, &size));
    return emit_binary(e, "Multiply", 1, sign, size, out);
}

/* (e^x + 1) * tanh(x / 2), which keeps the digits of small x. */
static Code expm1_of(Emitter *e, Wire x, Wire *out) {
    Wire power, half;
    TRY(emit_unary(e, "Exp", 1, x, &power));
    TRY(emit_binary_number(e, "Add", power, 1, &power));
    TRY(emit_binary_number(e, "Multiply", x, 0.5, &half));
    TRY(emit_unary(e, "Tanh", 1, half, &half));
    return emit_binary(e, "Multiply", 1, power, half, out);
}

/* log(1 + x), near 0 by its series: x * (1 - x * (1/2 - x * (1/3 - x / 4))). */
static Code log1p_of(Emitter *e, Wire x, Wire *out) {
    Wire plain, series = x, size, limit, small;
    static const double numerators[] = {1.0 / 3, 0.5, 1};
    TRY(emit_binary_number(e, "Add", x, 1, &plain));
    TRY(emit_unary(e, "Log", 1, plain, &plain));
    TRY(emit_binary_number(e, "Multiply", x, 0.25, &series));
    for (int k = 0; k < 3; k++) {
        Wire number;
        TRY(emit_number(e, numerators[k], &number));
        TRY(emit_binary(e, "Subtract", 1, number, series, &series));
        TRY(emit_binary(e, "Multiply", 1, series, x, &series));
    }
    TRY(emit_unary(e, "Abs", 1, x, &size));
    TRY(emit_number(e, 0.0625, &limit));
    TRY(emit_compare(e, "Less", size, limit, &small));
    return emit_select(e, small, series, plain, out);
}

static Code reciprocal_of(Emitter *e, Wire x, Wire *out) {
    Wire one;
    TRY(emit_number(e, 1, &one));
    return emit_binary(e, "Divide", 1, one, x, out);
}

static Code never(Emitter *e, Wire x, Wire *out) {
    TRY(emit_bool(e, false, out));
    WireType type = *wire_type(e, x);
    return emit_broadcast(e, *out, type.rank, type.shape, out);
}

static Code unary(Emitter *e, Op op, Wire x, Wire *out) {
    Wire other;
    if (is_bool(e, x)) {
        switch (op) {
        case OP_bitwise_not:
        case OP_logical_not: return emit_unary(e, "LogicalNot", 1, x, out);
        case OP_isnan:
        case OP_isinf: return never(e, x, out);
        case OP_abs:
        case OP_sign:
        case OP_relu: *out = x; return CODE_OK;
        default: return unknown(e, op);
        }
    }
    for (size_t i = 0; i < sizeof unaries / sizeof *unaries; i++) {
        if (unaries[i].op == op) return emit_unary(e, unaries[i].type, unaries[i].opset, x, out);
    }
    switch (op) {
    case OP_round: return emit_layer(e, "Round", 5, &x, 1, wire_type(e, x), 1, out, "mode=\"half_to_even\"");
    case OP_trunc: return trunc_of(e, x, out);
    case OP_exp2: TRY(emit_number(e, 2, &other)); return emit_binary(e, "Power", 1, other, x, out);
    case OP_expm1: return expm1_of(e, x, out);
    case OP_log2: TRY(emit_unary(e, "Log", 1, x, &x)); return emit_binary_number(e, "Multiply", x, 1 / log(2), out);
    case OP_log10: TRY(emit_unary(e, "Log", 1, x, &x)); return emit_binary_number(e, "Multiply", x, 1 / log(10), out);
    case OP_log1p: return log1p_of(e, x, out);
    case OP_rsqrt: TRY(emit_unary(e, "Sqrt", 1, x, &x)); return reciprocal_of(e, x, out);
    case OP_reciprocal: return reciprocal_of(e, x, out);
    case OP_logical_not: return logical_not(e, x, out);
    case OP_isnan: return emit_compare(e, "NotEqual", x, x, out);
    case OP_isinf:
        TRY(emit_unary(e, "Abs", 1, x, &x));
        TRY(emit_number(e, INFINITY, &other));
        return emit_compare(e, "Equal", x, other, out);
    default: return unknown(e, op);
    }
}

static double scalar_on_npu(const Emitter *e, Op op, Scalar scalar) {
    double value = scalar_f64(scalar);
    return e->real == ELEMENT_F16 ? npu_scalar(op, value) : value;
}

/* min(max(x, low), high) */
static Code clamp(Emitter *e, const Step *step, Wire x, Wire *out) {
    Scalar low = step->scalar, high = step->high;
    *out = x;
    if (is_bool(e, x)) return unknown(e, OP_clamp);
    double least = low.kind ? scalar_on_npu(e, OP_clamp, low) : 0,
           most = high.kind ? scalar_on_npu(e, OP_clamp, high) : 0;
    if (low.kind && high.kind && least <= most)
        return emit_layer(e, "Clamp", 1, &x, 1, wire_type(e, x), 1, out, "min=\"%.17g\" max=\"%.17g\"", least, most);
    if (low.kind) TRY(emit_binary_number(e, "Maximum", *out, least, out));
    if (high.kind) TRY(emit_binary_number(e, "Minimum", *out, most, out));
    return CODE_OK;
}

/* --- two operands ------------------------------------------------------------------------------------------------- */
static Code bool_binary(Emitter *e, Op op, Wire a, Wire b, Wire *out) {
    switch (op) {
    case OP_add:
    case OP_maximum:
    case OP_bitwise_or:
    case OP_logical_or: return emit_binary(e, "LogicalOr", 1, a, b, out);
    case OP_mul:
    case OP_minimum:
    case OP_bitwise_and:
    case OP_logical_and: return emit_binary(e, "LogicalAnd", 1, a, b, out);
    case OP_ne:
    case OP_bitwise_xor:
    case OP_logical_xor: return emit_binary(e, "LogicalXor", 1, a, b, out);
    case OP_eq: TRY(emit_binary(e, "LogicalXor", 1, a, b, out)); return emit_unary(e, "LogicalNot", 1, *out, out);
    case OP_lt: TRY(emit_unary(e, "LogicalNot", 1, a, &a)); return emit_binary(e, "LogicalAnd", 1, a, b, out);
    case OP_gt: TRY(emit_unary(e, "LogicalNot", 1, b, &b)); return emit_binary(e, "LogicalAnd", 1, a, b, out);
    case OP_le: TRY(emit_unary(e, "LogicalNot", 1, a, &a)); return emit_binary(e, "LogicalOr", 1, a, b, out);
    case OP_ge: TRY(emit_unary(e, "LogicalNot", 1, b, &b)); return emit_binary(e, "LogicalOr", 1, a, b, out);
    default: return unknown(e, op);
    }
}

static Code binary(Emitter *e, Op op, Wire a, Wire b, Wire *out) {
    if (op == OP_logical_and || op == OP_logical_or || op == OP_logical_xor) {
        TRY(truth(e, a, &a));
        TRY(truth(e, b, &b));
    }
    if (is_bool(e, a)) return bool_binary(e, op, a, b, out);
    switch (op) {
    case OP_add: return emit_binary(e, "Add", 1, a, b, out);
    case OP_sub: return emit_binary(e, "Subtract", 1, a, b, out);
    case OP_mul: return emit_binary(e, "Multiply", 1, a, b, out);
    case OP_div: return emit_binary(e, "Divide", 1, a, b, out);
    case OP_pow: return emit_binary(e, "Power", 1, a, b, out);
    case OP_minimum: return emit_binary(e, "Minimum", 1, a, b, out);
    case OP_maximum: return emit_binary(e, "Maximum", 1, a, b, out);
    case OP_eq: return emit_compare(e, "Equal", a, b, out);
    case OP_ne: return emit_compare(e, "NotEqual", a, b, out);
    case OP_lt: return emit_compare(e, "Less", a, b, out);
    case OP_le: return emit_compare(e, "LessEqual", a, b, out);
    case OP_gt: return emit_compare(e, "Less", b, a, out); /* openvino's Greater is true for NaN */
    case OP_ge: return emit_compare(e, "LessEqual", b, a, out);
    default: return unknown(e, op);
    }
}

/* Powers without Power, whose negative bases are the compiler's affair. `*done` is false for the others. */
static Code special_power(Emitter *e, Wire x, double exponent, bool *done, Wire *out) {
    *done = true;
    *out = x;
    if (exponent == 1) return CODE_OK;
    if (exponent == 0.5) return emit_unary(e, "Sqrt", 1, x, out);
    if (exponent == 2 || exponent == 3 || exponent == 4 || exponent == -2) {
        TRY(emit_binary(e, "Multiply", 1, x, x, out));
        if (exponent == -2) return reciprocal_of(e, *out, out);
        return exponent == 2 ? CODE_OK : emit_binary(e, "Multiply", 1, *out, exponent == 3 ? x : *out, out);
    }
    if (exponent == -1) return reciprocal_of(e, x, out);
    if (exponent == -0.5) {
        TRY(emit_unary(e, "Sqrt", 1, x, out));
        return reciprocal_of(e, *out, out);
    }
    *done = false;
    return CODE_OK;
}

/* A Python number as an operand. */
static Code scalar_operand(Emitter *e, Op op, Scalar scalar, bool boolean, Wire *out) {
    if (boolean) return emit_bool(e, scalar_f64(scalar) != 0, out);
    return emit_number(e, scalar_on_npu(e, op, scalar), out);
}

Code emit_step(Emitter *e, const Step *step, const Wire *in, Wire *out) {
    const OpInfo *info = op_info(step->op);
    switch (step->op) {
    case OP_cast: return cast(e, in[0], step->dtype, out);
    case OP_gelu: return emit_gelu(e, in[0], step->flag, out);
    case OP_clamp: return clamp(e, step, in[0], out);
    case OP_where: return emit_select(e, in[0], in[1], in[2], out);
    default: break;
    }
    if (info->max_operands == 1) return unary(e, step->op, in[0], out);
    if (step->scalar.kind == SCALAR_NONE) return binary(e, step->op, in[0], in[1], out);
    if (step->op == OP_pow && !step->flag) {
        bool done;
        TRY(special_power(e, in[0], scalar_f64(step->scalar), &done, out));
        if (done) return CODE_OK;
    }
    Wire number;
    TRY(scalar_operand(e, step->op, step->scalar, is_bool(e, in[0]), &number));
    return step->flag ? binary(e, step->op, number, in[0], out) : binary(e, step->op, in[0], number, out);
}

/* --- programs ----------------------------------------------------------------------------------------------------- */
static Code run_program(Emitter *e, const Attr *program, const Wire *inputs, uint32_t n_inputs, Wire *out) {
    Wire steps[PROGRAM_MAX_STEPS];
    uint32_t count = program->ints.count / STEP_WORDS;
    if (count == 0 || count > PROGRAM_MAX_STEPS) return fail(e->ctx, CODE_INTERNAL, "a program of %u steps", count);
    for (uint32_t i = 0; i < count; i++) {
        Step step;
        Wire in[3];
        if (!step_decode(program->ints.items + (size_t)i * STEP_WORDS, &step))
            return fail(e->ctx, CODE_INTERNAL, "a malformed program");
        for (int k = 0; k < 3 && step.src[k] != STEP_NONE; k++) {
            int64_t s = step.src[k];
            if (s >= 0 ? s >= n_inputs : -(s + 1) >= i) return fail(e->ctx, CODE_INTERNAL, "a malformed program");
            in[k] = s >= 0 ? inputs[s] : steps[-(s + 1)];
        }
        TRY(emit_step(e, &step, in, &steps[i]));
    }
    *out = steps[count - 1];
    return CODE_OK;
}

Code emit_epilogue(Emitter *e, uint32_t fixed, Wire product, Wire *out) {
    const Node *node = e->instr->node;
    const Attr *program = node_attr(node, ATTR_program);
    Wire inputs[PROGRAM_MAX_INPUTS] = {product};
    uint32_t count = 1;
    *out = product;
    if (program->ints.count == 0) return CODE_OK;
    for (uint32_t k = fixed; k < node->n_operands; k++) {
        if (count == PROGRAM_MAX_INPUTS) return fail(e->ctx, CODE_INTERNAL, "a program of too many inputs");
        TRY(emit_operand_small(e, k, &inputs[count++]));
    }
    return run_program(e, program, inputs, count, out);
}

Code emit_elementwise_node(Emitter *e) {
    const Node *node = e->instr->node;
    const Value *value = graph_value(e->g, node->first_result);
    Wire inputs[PROGRAM_MAX_INPUTS], out;
    static const int32_t sources[3] = {0, 1, 2};
    if (node->n_operands > PROGRAM_MAX_INPUTS) return fail(e->ctx, CODE_INTERNAL, "a program of too many inputs");
    for (uint32_t k = 0; k < node->n_operands; k++) TRY(emit_operand_small(e, k, &inputs[k]));
    if (node->op == OP_elementwise) {
        TRY(run_program(e, node_attr(node, ATTR_program), inputs, node->n_operands, &out));
    } else {
        Step step;
        step_from_node(node, value->dtype, sources, node->n_operands, &step);
        TRY(emit_step(e, &step, inputs, &out));
    }
    TRY(emit_broadcast(e, out, value->rank, value->shape, &out)); /* where all operands came unexpanded */
    return emit_result(e, 0, out);
}
