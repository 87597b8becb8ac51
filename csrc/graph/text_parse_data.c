/* The parts of the text form that carry data: elementwise programs and constants. */
#include "graph/text_parse.h"

#include <string.h>

enum { MAX_CONSTANTS = 1 << 20, MAX_ELEMENTS = 32, MAX_SPAN = 1 << 16 };

/* --- programs ----------------------------------------------------------------------------------------------------- */
static Code parse_bound(Parser *p, Scalar *bound) {
    TRY(parse_expect(p, '='));
    return parse_number(p, bound);
}

static Code parse_arguments(Parser *p, Step *step) {
    int n = 0;
    bool scalar_first = false;
    TRY(parse_expect(p, '('));
    do {
        while (parse_accept(p, ' ')) {
        }
        char c = p->at < p->end ? *p->at : 0;
        bool digit = p->end - p->at > 1 && p->at[1] >= '0' && p->at[1] <= '9'; /* i0, but not inf */
        if ((c == 'i' || c == 's') && digit) {
            int64_t number;
            p->at++;
            TRY(parse_int(p, &number));
            if (number > INT32_MAX - 2 || n == 3) return parse_fail(p, "at most three small operands");
            step->src[n++] = c == 'i' ? (int32_t)number : -(int32_t)number - 1;
        } else if (step->op == OP_clamp && parse_accept_word(p, "low")) {
            TRY(parse_bound(p, &step->scalar));
        } else if (step->op == OP_clamp && parse_accept_word(p, "high")) {
            TRY(parse_bound(p, &step->high));
        } else {
            if (step->op == OP_clamp || step->scalar.kind != SCALAR_NONE) return parse_fail(p, "an operand");
            TRY(parse_number(p, &step->scalar));
            scalar_first = n == 0;
        }
    } while (parse_accept(p, ','));
    step->flag = scalar_first;
    return parse_expect(p, ')');
}

static Code parse_step(Parser *p, size_t number) {
    Step step = {.src = {STEP_NONE, STEP_NONE, STEP_NONE}};
    int64_t named;
    TRY(parse_expect(p, 's'));
    TRY(parse_int(p, &named));
    if (named != (int64_t)number) return parse_fail(p, "steps numbered from 0");
    TRY(parse_expect(p, '='));
    Slice word = parse_word(p);
    if (!op_from_name(word.data, word.size, &step.op) || !op_is(step.op, ELEMENTWISE)) {
        return parse_fail(p, "an elementwise operator");
    }
    TRY(parse_arguments(p, &step));
    if (step.op == OP_gelu) step.flag = parse_accept_word(p, "approximate");
    TRY(parse_expect(p, ':'));
    word = parse_word(p);
    if (!dtype_from_name(word.data, word.size, &step.dtype)) return parse_fail(p, "a dtype");
    step_encode(&step, p->ints + number * STEP_WORDS);
    return CODE_OK;
}

Code parse_program(Parser *p, size_t *count) {
    *count = 0;
    TRY(parse_expect(p, '['));
    if (parse_accept(p, ']')) return CODE_OK;
    while (parse_accept(p, ' ')) {
    }
    if (p->at < p->end && *p->at != 's') { /* not readable as steps: printed as plain integers */
        do {
            if (*count == p->cap_ints) return parse_fail(p, "fewer numbers");
            TRY(parse_int(p, &p->ints[(*count)++]));
        } while (parse_accept(p, ','));
        return parse_expect(p, ']');
    }
    do {
        /* a step takes at least STEP_WORDS characters: "s0=a(i0):" */
        if (*count + STEP_WORDS > p->cap_ints) return parse_fail(p, "fewer steps");
        TRY(parse_step(p, *count / STEP_WORDS));
        *count += STEP_WORDS;
    } while (parse_accept(p, ';'));
    return parse_expect(p, ']');
}

/* --- constants ---------------------------------------------------------------------------------------------------- */
static Code parse_element(Parser *p, DType dtype, void *to) {
    Scalar s = {SCALAR_INT, {0}};
    if (dtype == DTYPE_C64 || dtype == DTYPE_C128) {
        DType part = dtype == DTYPE_C64 ? DTYPE_F32 : DTYPE_F64;
        TRY(parse_expect(p, '('));
        TRY(parse_element(p, part, to));
        TRY(parse_expect(p, ','));
        TRY(parse_element(p, part, (char *)to + dtype_size(part)));
        return parse_expect(p, ')');
    }
    if (dtype == DTYPE_BOOL) {
        s.i = parse_accept_word(p, "true");
        if (!s.i && !parse_accept_word(p, "false")) return parse_fail(p, "true or false");
        *(uint8_t *)to = (uint8_t)s.i;
        return CODE_OK;
    }
    const char *start = p->at;
    TRY(parse_number(p, &s));
    if (!dtype_is_float(dtype)) {
        int64_t bits = (int64_t)(8 * dtype_size(dtype)), low, high;
        low = dtype == DTYPE_U8 ? 0 : bits == 64 ? INT64_MIN : -((int64_t)1 << (bits - 1));
        high = dtype == DTYPE_U8 ? 255 : bits == 64 ? INT64_MAX : ((int64_t)1 << (bits - 1)) - 1;
        if (s.kind != SCALAR_INT || s.i < low || s.i > high) {
            p->at = start;
            return parse_fail(p, "an integer of the type");
        }
    }
    switch (dtype) {
    case DTYPE_U8: *(uint8_t *)to = (uint8_t)s.i; break;
    case DTYPE_I8: *(int8_t *)to = (int8_t)s.i; break;
    case DTYPE_I16: *(int16_t *)to = (int16_t)s.i; break;
    case DTYPE_I32: *(int32_t *)to = (int32_t)s.i; break;
    case DTYPE_I64: *(int64_t *)to = s.i; break;
    case DTYPE_F16: *(uint16_t *)to = f32_to_f16((float)scalar_f64(s)); break;
    case DTYPE_BF16: *(uint16_t *)to = f32_to_bf16((float)scalar_f64(s)); break;
    case DTYPE_F32: *(float *)to = (float)scalar_f64(s); break;
    case DTYPE_F64: *(double *)to = scalar_f64(s); break;
    default: return parse_fail(p, "no elements for this type");
    }
    return CODE_OK;
}

static Code parse_elements(Parser *p, Constant *c) {
    int64_t count = 1, index[MAX_RANK] = {0};
    for (int d = 0; d < c->rank; d++) {
        /* every size is at most MAX_ELEMENTS or the product is 0: no overflow */
        count = c->shape[d] > MAX_ELEMENTS ? (count ? MAX_ELEMENTS + 1 : 0) : count * c->shape[d];
        if (count > MAX_ELEMENTS) count = MAX_ELEMENTS + 1;
    }
    for (int d = 0; d < c->rank; d++) count = c->shape[d] == 0 ? 0 : count;
    if (count > MAX_ELEMENTS || c->bytes > MAX_SPAN) return parse_fail(p, "no elements for so large a constant");
    TRY(arena_alloc(p->ctx, p->g->arena, (size_t)c->bytes, &c->data));
    TRY(parse_expect(p, '['));
    for (int64_t n = 0; n < count; n++) {
        int64_t offset = 0;
        for (int d = 0; d < c->rank; d++) offset += index[d] * c->strides[d];
        if (n) TRY(parse_expect(p, ','));
        TRY(parse_element(p, c->dtype, (char *)c->data + offset * (int64_t)dtype_size(c->dtype)));
        for (int d = c->rank - 1; d >= 0 && ++index[d] == c->shape[d]; d--) index[d] = 0;
    }
    return parse_expect(p, ']');
}

/* Bytes from the first to the last element; fails when they cannot be counted. */
static Code set_span(Parser *p, Constant *c) {
    int64_t last = 0, step;
    bool empty = false;
    for (int d = 0; d < c->rank; d++) {
        empty = empty || c->shape[d] == 0;
        int64_t steps = c->shape[d] > 0 ? c->shape[d] - 1 : 0;
        if (c->strides[d] < 0 || __builtin_mul_overflow(steps, c->strides[d], &step) ||
            __builtin_add_overflow(last, step, &last))
            return parse_fail(p, "sensible strides");
    }
    if (last > INT64_MAX / 32) return parse_fail(p, "sensible strides");
    c->bytes = empty ? 0 : (last + 1) * (int64_t)dtype_size(c->dtype);
    return CODE_OK;
}

static bool same_constant(const Constant *a, const Constant *b) {
    size_t dims = a->rank * sizeof *a->shape;
    return a->kind == b->kind && a->derived == b->derived && a->dtype == b->dtype && a->rank == b->rank &&
           strcmp(a->name, b->name) == 0 && memcmp(a->shape, b->shape, dims) == 0 &&
           memcmp(a->strides, b->strides, dims) == 0;
}

Code parse_constant(Parser *p, NodeId id, const char *name) {
    Graph *g = p->g;
    const Node *node = graph_node(g, id);
    int64_t index = node_int(node, ATTR_index), strides[MAX_RANK], stride = 1;
    if (node->n_results != 1) return parse_fail(p, "one result of a constant");
    const Value *value = graph_value(g, node->first_result);
    Constant c = {.kind = CONSTANT_LITERAL,
                  .name = name,
                  .dtype = value->dtype,
                  .rank = value->rank,
                  .shape = value->shape,
                  .strides = strides};
    if (parse_accept_word(p, "state"))
        c.kind = CONSTANT_STATE;
    else if (!parse_accept_word(p, "literal"))
        return parse_fail(p, "'state' or 'literal'");
    c.derived = parse_accept_word(p, "derived");
    for (int d = c.rank - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= c.shape[d] > 1 ? c.shape[d] : 1; /* parse_type has bounded the product */
    }
    if (parse_accept_word(p, "strides")) {
        TRY(parse_expect(p, '('));
        for (int d = 0; d < c.rank; d++) {
            if (d) TRY(parse_expect(p, ','));
            TRY(parse_int(p, &strides[d]));
        }
        TRY(parse_expect(p, ')'));
    }
    TRY(set_span(p, &c));
    if (parse_accept(p, '=')) TRY(parse_elements(p, &c));

    /* Indices may come in any order and twice; those between that no node uses become empty literals. */
    if (index < 0 || index >= MAX_CONSTANTS) return parse_fail(p, "a constant's index below 2^20");
    const Constant hole = {.kind = CONSTANT_LITERAL,
                           .name = "",
                           .dtype = DTYPE_BOOL,
                           .rank = 1,
                           .shape = (const int64_t[]){0},
                           .strides = (const int64_t[]){1}};
    uint32_t added;
    while ((int64_t)g->n_constants <= index) TRY(graph_add_constant(p->ctx, g, &hole, &added));
    Constant *slot = &g->constants[index];
    if (!same_constant(slot, &hole) && !same_constant(slot, &c)) {
        return fail(p->ctx, CODE_INVALID, "line %u: constant %lld is given twice, differently", p->line,
                    (long long)index);
    }
    if (!same_constant(slot, &hole)) return CODE_OK;
    TRY(graph_add_constant(p->ctx, g, &c, &added)); /* copies name and shape; then it moves to its place */
    g->constants[index] = g->constants[added];
    g->n_constants--;
    return CODE_OK;
}
