#include "graph/program.h"

#include <string.h>

static int64_t scalar_bits(Scalar s) {
    int64_t bits = 0;
    if (s.kind == SCALAR_INT) bits = s.i;
    if (s.kind == SCALAR_FLOAT) memcpy(&bits, &s.f, sizeof bits);
    return bits;
}

static Scalar scalar_from_bits(unsigned kind, int64_t bits) {
    Scalar s = {.kind = (ScalarKind)kind};
    if (s.kind == SCALAR_FLOAT)
        memcpy(&s.f, &bits, sizeof bits);
    else
        s.i = bits;
    return s;
}

void step_encode(const Step *step, int64_t words[STEP_WORDS]) {
    memset(words, 0, STEP_WORDS * sizeof *words);
    words[0] = (int64_t)step->op | (int64_t)step->dtype << 16 | (int64_t)step->flag << 24 |
               (int64_t)step->scalar.kind << 25 | (int64_t)step->high.kind << 27;
    for (int k = 0; k < 3; k++) words[1 + k] = step->src[k];
    words[4] = scalar_bits(step->scalar);
    words[5] = scalar_bits(step->high);
}

bool step_decode(const int64_t words[STEP_WORDS], Step *step) {
    uint64_t head = (uint64_t)words[0];
    unsigned op = head & 0xffff, dtype = (head >> 16) & 0xff, kind = (head >> 25) & 3, high = (head >> 27) & 3;
    if (op >= OP_COUNT || dtype >= DTYPE_COUNT || kind > SCALAR_FLOAT || high > SCALAR_FLOAT || head >> 29)
        return false;
    if (!op_is((Op)op, ELEMENTWISE) || (Op)op == OP_elementwise) return false;
    *step = (Step){.op = (Op)op,
                   .dtype = (DType)dtype,
                   .flag = (head >> 24) & 1,
                   .scalar = scalar_from_bits(kind, words[4]),
                   .high = scalar_from_bits(high, words[5])};
    for (int k = 0; k < 3; k++) {
        if (words[1 + k] < INT32_MIN || words[1 + k] > INT32_MAX) return false;
        step->src[k] = (int32_t)words[1 + k];
    }
    return words[6] == 0 && words[7] == 0;
}

void step_from_node(const Node *node, DType result, const int32_t *srcs, size_t n_srcs, Step *step) {
    *step = (Step){.op = node->op, .dtype = result, .src = {STEP_NONE, STEP_NONE, STEP_NONE}};
    for (size_t k = 0; k < n_srcs && k < 3; k++) step->src[k] = srcs[k];
    if (node->op == OP_clamp) {
        step->scalar = node_attr(node, ATTR_low)->s;
        step->high = node_attr(node, ATTR_high)->s;
    } else if (node->op == OP_gelu) {
        step->flag = node_int(node, ATTR_approximate) != 0;
    } else if (node_has_attr(node, ATTR_scalar)) {
        step->scalar = node_attr(node, ATTR_scalar)->s;
        step->flag = node_int(node, ATTR_reverse) != 0;
    }
}

Code program_check(Context *ctx, const int64_t *words, size_t n_words, const DType *input_types, size_t n_inputs,
                   DType *result) {
    if (n_words == 0 || n_words % STEP_WORDS || n_words / STEP_WORDS > PROGRAM_MAX_STEPS)
        return fail(ctx, CODE_INVALID, "program of %zu words: want 1 to %d steps of %d", n_words, PROGRAM_MAX_STEPS,
                    STEP_WORDS);
    if (n_inputs > PROGRAM_MAX_INPUTS) return fail(ctx, CODE_INVALID, "program with %zu inputs", n_inputs);
    DType types[PROGRAM_MAX_STEPS];
    size_t n_steps = n_words / STEP_WORDS;
    for (size_t i = 0; i < n_steps; i++) {
        Step step;
        if (!step_decode(words + i * STEP_WORDS, &step))
            return fail(ctx, CODE_INVALID, "program step %zu is malformed", i);
        const OpInfo *info = op_info(step.op);
        unsigned n_src = 0;
        DType src[3] = {DTYPE_F32, DTYPE_F32, DTYPE_F32};
        for (int k = 0; k < 3; k++) {
            int32_t s = step.src[k];
            if (s == STEP_NONE) continue;
            if (n_src != (unsigned)k) return fail(ctx, CODE_INVALID, "program step %zu: operand %d after a gap", i, k);
            if (s >= 0 ? (size_t)s >= n_inputs : (size_t)(-(int64_t)s - 1) >= i)
                return fail(ctx, CODE_INVALID, "program step %zu: source %d out of range", i, s);
            src[n_src++] = s >= 0 ? input_types[s] : types[-(s + 1)];
        }
        bool has_scalar = step.op != OP_clamp && step.scalar.kind != SCALAR_NONE;
        unsigned want = has_scalar ? 1 : info->max_operands;
        if (n_src != want || (has_scalar && info->max_operands != 2))
            return fail(ctx, CODE_INVALID, "program step %zu (%s): %u operands", i, info->name, n_src);
        DType type = src[0];
        if (step.op == OP_where) {
            if (src[0] != DTYPE_BOOL || src[1] != src[2])
                return fail(ctx, CODE_INVALID, "program step %zu: where types", i);
            type = src[1];
        } else if (n_src == 2 && src[0] != src[1]) {
            return fail(ctx, CODE_INVALID, "program step %zu (%s): operands %s and %s", i, info->name,
                        dtype_name(src[0]), dtype_name(src[1]));
        }
        if (info->flags & COMPARE) type = DTYPE_BOOL;
        if (step.op != OP_cast && type != step.dtype)
            return fail(ctx, CODE_INVALID, "program step %zu (%s): result %s, want %s", i, info->name,
                        dtype_name(step.dtype), dtype_name(type));
        types[i] = step.dtype;
    }
    *result = types[n_steps - 1];
    return CODE_OK;
}
