/* Products with integer weights that are scaled keep the integers: quantised_linear.
 * Requires: views of constants are constants (fold); an evaluator. Keeps: what uses the product, for operator_fusion.
 * Breaks: nothing.
 * The weight may be spelled as any chain of casts, products and sums with constants, transposes, and reshapes into
 * groups and back, that begins with integers; the integers may be computed from others (nibbles that are unpacked), and
 * are stored as 4 bits where these hold them. One rounding to a half type that eager makes of such a weight is left
 * out. */
#include <math.h>
#include <string.h>

#include "passes/dequantise.h"

enum { MAX_DEPTH = 24 };

/* --- the chain ---------------------------------------------------------------------------------------------------- */

/* Roles of a reshape's operand, from those of its result. Sizes of 1 have none. */
static bool before_reshape(Chain *w, const Axes *after, const Value *to, const Value *from, Axes *before) {
    unsigned i = 0;
    *before = (Axes){.rank = from->rank};
    for (unsigned d = 0; d < from->rank; d++) {
        int64_t size = from->shape[d], next = d + 1 < from->rank ? from->shape[d + 1] : 0;
        before->role[d] = ROLE_ONE;
        if (size == 1) continue;
        while (i < to->rank && after->role[i] == ROLE_ONE) i++;
        if (i == to->rank) return false;
        Role role = after->role[i], follows = i + 1 < to->rank ? after->role[i + 1] : ROLE_ONE;
        if (to->shape[i] == size) {
            before->role[d] = role;
        } else if (role == ROLE_COLUMN && next && size * next == w->columns && (!w->group || w->group == next)) {
            w->group = next;
            before->role[d] = ROLE_GROUP;
            before->role[++d] = ROLE_MEMBER;
        } else if (role == ROLE_GROUP && follows == ROLE_MEMBER && size == w->columns) {
            before->role[d] = ROLE_COLUMN;
            i++;
        } else if (role == ROLE_ROW && follows == ROLE_COLUMN && next && w->columns % next == 0 &&
                   size == w->rows * (w->columns / next) && (!w->group || w->group == next)) {
            w->group = next;
            before->role[d] = ROLE_ROW_GROUP;
            before->role[++d] = ROLE_MEMBER;
            i++;
        } else {
            return false;
        }
        i++;
    }
    while (i < to->rank && after->role[i] == ROLE_ONE) i++;
    return i == to->rank;
}

static bool walk(const Finder *f, ValueId v, const Axes *axes, Chain *w, int depth);

/* `node` is u * c, u + c or u - c; c a number or known. */
static bool walk_binary(const Finder *f, const Node *node, const Axes *axes, Chain *w, int depth) {
    const Value *out = graph_value(f->g, node->first_result);
    if (w->n_steps == MAX_STEPS) return false;
    Step *step = &w->steps[w->n_steps];
    *step = (Step){.multiply = node->op == OP_mul, .negate = node->op == OP_sub, .operand = VALUE_NONE, .axes = *axes};
    if (node->n_operands == 1) {
        if (node->op == OP_sub && node_int(node, ATTR_reverse)) return false;
        step->scalar = scalar_f64(node_attr(node, ATTR_scalar)->s);
        w->n_steps++;
        return walk(f, node->operands[0], axes, w, depth);
    }
    Chain before = *w;
    for (unsigned side = 0; side < (node->op == OP_sub ? 1 : 2); side++) {
        const Value *u = graph_value(f->g, graph_resolve(f->g, node->operands[side]));
        if (u->rank != out->rank || memcmp(u->shape, out->shape, u->rank * sizeof *u->shape)) continue;
        *w = before;
        w->steps[w->n_steps++].operand = graph_resolve(f->g, node->operands[1 - side]);
        if (walk(f, node->operands[side], axes, w, depth)) return true;
    }
    return false;
}

static bool walk(const Finder *f, ValueId v, const Axes *axes, Chain *w, int depth) {
    v = graph_resolve(f->g, v);
    const Value *value = graph_value(f->g, v);
    const Node *node = value_node(f->g, v);
    if (!f->known[v] || depth > MAX_DEPTH) return false;
    if (dtype_is_int(value->dtype)) {
        w->q = v;
        w->axes = *axes;
        return true;
    }
    Axes before = {.rank = value->rank};
    switch (node->op) {
    case OP_cast:
    case OP_contiguous: return walk(f, node->operands[0], axes, w, depth + 1);
    case OP_reshape: {
        const Value *from = graph_value(f->g, graph_resolve(f->g, node->operands[0]));
        return before_reshape(w, axes, value, from, &before) && walk(f, node->operands[0], &before, w, depth + 1);
    }
    case OP_permute: {
        const Attr *dims = node_attr(node, ATTR_dims);
        for (unsigned d = 0; d < value->rank; d++) before.role[dims->ints.items[d]] = axes->role[d];
        return walk(f, node->operands[0], &before, w, depth + 1);
    }
    case OP_mul:
    case OP_add:
    case OP_sub: return walk_binary(f, node, axes, w, depth + 1);
    default: return false;
    }
}

/* --- what is known ------------------------------------------------------------------------------------------------ */

static Code find_known(Finder *f) {
    GRAPH_EACH(f->g, id) {
        const Node *node = graph_node(f->g, id);
        bool known = node->op != OP_input && node->op != OP_host && node->n_results > 0;
        if (node->op == OP_constant) {
            const Constant *c = &f->g->constants[node_int(node, ATTR_index)];
            known = c->data && c->dtype != DTYPE_OBJECT;
        }
        for (uint32_t k = 0; known && k < node->n_operands; k++)
            known = node->operands[k] == VALUE_NONE || f->known[graph_resolve(f->g, node->operands[k])];
        for (uint32_t k = 0; k < node->n_results; k++) f->known[node_result(node, k)] = known;
    }
    return CODE_OK;
}

/* Computes a known value; out->data stays NULL if the evaluator cannot. */
static Code value_of(const Finder *f, Arena *scratch, ValueId v, int depth, Tensor *out) {
    const Node *node = value_node(f->g, v);
    const Value *value = graph_value(f->g, v);
    *out = (Tensor){.dtype = value->dtype, .rank = value->rank};
    if (node->op == OP_constant) {
        *out = constant_tensor(&f->g->constants[node_int(node, ATTR_index)]);
        return CODE_OK;
    }
    if (depth > MAX_DEPTH) return CODE_OK;
    Tensor *in, *results;
    TRY(ARENA_NEW(f->pc->ctx, scratch, node->n_operands, &in));
    TRY(ARENA_NEW(f->pc->ctx, scratch, node->n_results, &results));
    for (uint32_t k = 0; k < node->n_operands; k++) {
        if (node->operands[k] == VALUE_NONE) continue;
        TRY(value_of(f, scratch, graph_resolve(f->g, node->operands[k]), depth + 1, &in[k]));
        if (!in[k].data) return CODE_OK;
    }
    int64_t offset;
    if (op_is(node->op, VIEW) && view_tensor(node, value, &in[0], out, &offset)) {
        out->data = (char *)in[0].data + (size_t)offset * dtype_size(out->dtype);
        return CODE_OK;
    }
    for (uint32_t k = 0; k < node->n_results; k++) {
        const Value *r = graph_value(f->g, node_result(node, k));
        results[k] = (Tensor){.dtype = r->dtype, .rank = r->rank};
        int64_t stride = 1;
        for (int d = r->rank; d-- > 0; stride *= r->shape[d]) {
            results[k].shape[d] = r->shape[d];
            results[k].strides[d] = stride;
        }
        TRY(arena_alloc(f->pc->ctx, scratch, (size_t)tensor_bytes(&results[k]) + 1, &results[k].data));
    }
    Context *ctx = f->pc->ctx;
    Code code = f->pc->eval(ctx, f->g, value->def, in, node->n_operands, results, node->n_results, f->pc->eval_user);
    if (code == CODE_NO_MEMORY || code == CODE_CANCELLED) return code;
    if (code == CODE_OK) {
        *out = results[value->result];
    } else {
        ctx->code = CODE_OK;
        ctx->text[0] = 0;
        out->data = NULL;
    }
    return CODE_OK;
}

/* --- scales, zero points and integers ----------------------------------------------------------------------------- */

/* Which element of a tensor that broadcasts to `axes` belongs to row n and the group of column k. */
static int64_t element_of(const Chain *w, const Axes *axes, const Tensor *t, int64_t n, int64_t k) {
    int64_t offset = 0, group = w->group ? w->group : w->columns;
    for (int d = 0; d < t->rank; d++) {
        if (t->shape[d] == 1) continue;
        int64_t index = 0;
        switch (axes->role[axes->rank - t->rank + d]) {
        case ROLE_ROW: index = n; break;
        case ROLE_COLUMN: index = k; break;
        case ROLE_GROUP: index = k / group; break;
        case ROLE_MEMBER: index = k % group; break;
        case ROLE_ROW_GROUP: index = n * (w->columns / group) + k / group; break;
        case ROLE_ONE: break;
        }
        offset += index * t->strides[d];
    }
    return offset;
}

static bool varies_in_group(const Axes *axes, const Tensor *t) {
    for (int d = 0; d < t->rank; d++) {
        Role role = axes->role[axes->rank - t->rank + d];
        if (t->shape[d] != 1 && (role == ROLE_COLUMN || role == ROLE_MEMBER)) return true;
    }
    return false;
}

/* Scales and zero points [rows, groups] of (q - zero) * scale. *ok: they are finite, one a group. */
static Code affine(const Finder *f, Arena *scratch, const Chain *w, float *scales, float *zeros, bool *ok) {
    int64_t group = w->group ? w->group : w->columns, groups = w->columns / group;
    Tensor operands[MAX_STEPS];
    *ok = false;
    for (int s = 0; s < w->n_steps; s++) {
        if (w->steps[s].operand == VALUE_NONE) continue;
        TRY(value_of(f, scratch, w->steps[s].operand, 0, &operands[s]));
        if (!operands[s].data || varies_in_group(&w->steps[s].axes, &operands[s])) return CODE_OK;
    }
    for (int64_t i = 0; i < w->rows * groups; i++) {
        double scale = 1, zero = 0;
        for (int s = w->n_steps; s-- > 0;) { /* the last of the chain is the first to be applied */
            const Step *step = &w->steps[s];
            Scalar number = {.kind = SCALAR_FLOAT, .f = step->scalar};
            if (step->operand != VALUE_NONE) {
                const Tensor *t = &operands[s];
                int64_t at = element_of(w, &step->axes, t, i / groups, i % groups * group);
                if (!scalar_load(t->dtype, (const char *)t->data + (size_t)at * dtype_size(t->dtype), &number))
                    return CODE_OK;
            }
            double c = scalar_f64(number);
            if (step->multiply)
                scale *= c;
            else
                zero -= (step->negate ? -c : c) / scale;
        }
        scales[i] = (float)scale;
        zeros[i] = (float)zero;
        if (!isfinite(scales[i]) || !isfinite(zeros[i])) return CODE_OK;
    }
    *ok = true;
    return CODE_OK;
}

static int64_t load_int(DType dtype, const char *at) {
    Scalar s;
    if (dtype == DTYPE_I8) return *(const int8_t *)at;
    if (dtype == DTYPE_U8) return *(const uint8_t *)at;
    return scalar_load(dtype, at, &s) ? s.i : INT64_MAX;
}

static const char *integer_at(const Chain *w, const Tensor *q, int64_t n, int64_t k) {
    return (const char *)q->data + element_of(w, &w->axes, q, n, k) * (int64_t)dtype_size(q->dtype);
}

/* Whether the integers of a group of columns lie beside one another; then `integer_at` is for the first alone. */
static int64_t run_of(const Chain *w, const Tensor *q) {
    int64_t group = w->group ? w->group : w->columns;
    for (int64_t k = 1; k < 3 && k < group; k++)
        if (element_of(w, &w->axes, q, 0, k) != element_of(w, &w->axes, q, 0, 0) + k) return 1;
    return group;
}

static void range_of(const Chain *w, const Tensor *q, int64_t *low, int64_t *high) {
    int64_t run = run_of(w, q), size = (int64_t)dtype_size(q->dtype);
    *low = INT64_MAX;
    *high = INT64_MIN;
    for (int64_t n = 0; n < w->rows; n++)
        for (int64_t k = 0; k < w->columns; k += run) {
            const char *at = integer_at(w, q, n, k);
            for (int64_t j = 0; j < run; j++) {
                int64_t value = load_int(q->dtype, at + j * size);
                *low = value < *low ? value : *low;
                *high = value > *high ? value : *high;
            }
        }
}

/* The integers, less `shift`, as quantised_linear wants them: a byte each or half of one. */
static void store(const Chain *w, const Tensor *q, int bits, int64_t shift, uint8_t *to) {
    int64_t run = run_of(w, q), size = (int64_t)dtype_size(q->dtype), blocks = quantised_blocks(w->columns);
    int64_t row = bits == 8 ? w->columns : blocks * (QUANTISED_BLOCK / 2);
    if (bits == 4) memset(to, 0x88, (size_t)(w->rows * row)); /* zeros beyond the last column */
    for (int64_t n = 0; n < w->rows; n++)
        for (int64_t first = 0; first < w->columns; first += run) {
            const char *at = integer_at(w, q, n, first);
            for (int64_t k = first; k < first + run; k++, at += size) {
                int64_t value = load_int(q->dtype, at) - shift, c = k % QUANTISED_BLOCK;
                if (bits == 8) {
                    to[n * row + k] = (uint8_t)(int8_t)value;
                    continue;
                }
                uint8_t *byte = &to[n * row + k / QUANTISED_BLOCK * (QUANTISED_BLOCK / 2) + 4 * (c % 8) + c / 16];
                unsigned at_bit = (unsigned)(4 * (c / 8 % 2));
                *byte = (uint8_t)((*byte & ~(15u << at_bit)) | ((unsigned)(value + 8) & 15u) << at_bit);
            }
        }
}

/* --- a product ---------------------------------------------------------------------------------------------------- */

static Code insert_constant(Finder *f, NodeId before, Constant *c, const int64_t *shape, uint8_t rank, ValueId *out) {
    int64_t strides[MAX_RANK], stride = 1;
    for (int d = rank; d-- > 0; stride *= shape[d]) strides[d] = stride;
    c->rank = rank;
    c->shape = shape;
    c->strides = strides;
    c->bytes = stride * (int64_t)dtype_size(c->dtype);
    Type type = {c->dtype, rank, shape};
    uint32_t index;
    NodeId node;
    TRY(graph_add_constant(f->pc->ctx, f->g, c, &index));
    TRY(graph_insert(f->pc->ctx, f->g, before, OP_constant, NULL, 0, &type, 1, -1, &node));
    node_attr_mut(graph_node(f->g, node), ATTR_index)->i = index;
    *out = graph_node(f->g, node)->first_result;
    return CODE_OK;
}

static Code make_integers(Finder *f, NodeId before, const Chain *w, const Tensor *q, int bits, int64_t shift,
                          ValueId *out) {
    const Node *from = value_node(f->g, w->q);
    int64_t group = w->group ? w->group : w->columns;
    int64_t bytes[2] = {w->rows, w->columns}, nibbles[3] = {w->rows, quantised_blocks(w->columns), QUANTISED_BLOCK / 2};
    bool row_major = run_of(w, q) == group && (group == w->columns || element_of(w, &w->axes, q, 0, group) == group) &&
                     element_of(w, &w->axes, q, w->rows - 1, 0) == (w->rows - 1) * w->columns;
    Constant c = {.kind = CONSTANT_LITERAL, .name = "", .derived = true};
    if (from->op == OP_constant) c = f->g->constants[node_int(from, ATTR_index)];
    if (bits == 8 && q->dtype == DTYPE_I8 && row_major && from->op == OP_constant)
        return insert_constant(f, before, &c, bytes, 2, out);
    c.derived |= c.kind == CONSTANT_STATE;
    c.kind = CONSTANT_LITERAL;
    c.dtype = bits == 8 ? DTYPE_I8 : DTYPE_U8;
    size_t size = (size_t)(bits == 8 ? bytes[0] * bytes[1] : nibbles[0] * nibbles[1] * nibbles[2]);
    TRY(arena_alloc(f->pc->ctx, f->pc->arena, size, &c.data));
    store(w, q, bits, shift, c.data);
    return insert_constant(f, before, &c, bits == 8 ? bytes : nibbles, bits == 8 ? 2 : 3, out);
}

static Code declined(Finder *f, NodeId id, const char *why) {
    return remark_add(f->pc, "dequantise", graph_node(f->g, id)->source, "declined: %s", why);
}

static Code rewrite(Finder *f, NodeId id, const Chain *w, Arena *scratch) {
    Context *ctx = f->pc->ctx;
    int64_t group = w->group ? w->group : w->columns, groups = w->columns / group, low, high;
    if (groups > 1 && group % QUANTISED_GROUP) return declined(f, id, "groups of weights that are no multiple of 32");
    float *scales, *zeros;
    bool ok, shifted = false;
    TRY(ARENA_NEW(ctx, f->pc->arena, w->rows * groups, &scales));
    TRY(ARENA_NEW(ctx, f->pc->arena, w->rows * groups, &zeros));
    TRY(affine(f, scratch, w, scales, zeros, &ok));
    if (!ok) return declined(f, id, "scales or zero points of weights that are not finite, or not one a group");
    Tensor q;
    TRY(value_of(f, scratch, w->q, 0, &q));
    if (!q.data) return CODE_OK;
    range_of(w, &q, &low, &high);
    int bits = high - low < 16 && low >= -8 && high < 16 ? 4 : 8;
    int64_t shift = bits == 4 ? (high > 7 ? 8 : 0) : high > 127 ? 128 : 0;
    if (bits == 4 && low < shift - 8) bits = 8, shift = 0;
    if (low - shift < -128 || high - shift > 127) return declined(f, id, "integer weights of more than 8 bits");
    for (int64_t i = 0; i < w->rows * groups; i++) {
        zeros[i] -= (float)shift;
        shifted |= zeros[i] != 0;
    }
    const Node *node = graph_node(f->g, id);
    ValueId operands[5] = {node->operands[0], VALUE_NONE, VALUE_NONE, VALUE_NONE,
                           node->op == OP_linear && node->n_operands > 2 ? node->operands[2] : VALUE_NONE};
    int32_t source = node->source;
    ValueId old = node->first_result;
    int64_t shape[2] = {w->rows, groups};
    Constant c = {.kind = CONSTANT_LITERAL, .name = "scales", .derived = true, .dtype = DTYPE_F32, .data = scales};
    TRY(make_integers(f, id, w, &q, bits, shift, &operands[1]));
    TRY(insert_constant(f, id, &c, shape, 2, &operands[2]));
    c.name = "zeros";
    c.data = zeros;
    if (shifted) TRY(insert_constant(f, id, &c, shape, 2, &operands[3]));
    Type type = value_type(f->g, old);
    NodeId made;
    size_t n_operands = operands[4] != VALUE_NONE ? 5 : shifted ? 4 : 3;
    TRY(graph_insert(ctx, f->g, id, OP_quantised_linear, operands, n_operands, &type, 1, source, &made));
    Node *product = graph_node(f->g, made);
    node_attr_mut(product, ATTR_bits)->i = bits;
    node_attr_mut(product, ATTR_group)->i = groups > 1 ? group : 0;
    graph_replace(f->g, old, product->first_result);
    graph_kill(f->g, id);
    return remark_add(f->pc, "dequantise", source, "matched: weights of %d bits, %s", bits,
                      groups > 1 ? "in groups" : "a scale a row");
}

static Code product(Finder *f, NodeId id) {
    const Node *node = graph_node(f->g, id);
    bool linear = node->op == OP_linear;
    if (node->n_operands > (linear ? 3u : 2u) || node_attr(node, ATTR_program)->ints.count) return CODE_OK;
    ValueId matrix = graph_resolve(f->g, node->operands[1]);
    const Value *m = graph_value(f->g, matrix), *x = graph_value(f->g, graph_resolve(f->g, node->operands[0]));
    if (matrix >= f->n_values || !f->known[matrix] || m->rank != 2 || m->shape[0] < 2 || m->shape[1] < 2)
        return CODE_OK;
    if (!linear && x->rank != 2) return CODE_OK;
    if (x->dtype != DTYPE_F32 && x->dtype != DTYPE_F16 && x->dtype != DTYPE_BF16) return CODE_OK;
    Chain w = {.rows = m->shape[linear ? 0 : 1], .columns = m->shape[linear ? 1 : 0]};
    Axes axes = {.rank = 2};
    axes.role[0] = linear ? ROLE_ROW : ROLE_COLUMN;
    axes.role[1] = linear ? ROLE_COLUMN : ROLE_ROW;
    if (!walk(f, matrix, &axes, &w, 0)) return CODE_OK;
    Arena scratch;
    arena_init(&scratch);
    Code code = rewrite(f, id, &w, &scratch);
    arena_destroy(&scratch);
    return code;
}

static Code all(Finder *f) {
    TRY(find_known(f));
    GRAPH_EACH(f->g, id) {
        Op op = graph_node(f->g, id)->op;
        if (op == OP_linear || op == OP_matmul) TRY(product(f, id));
    }
    return graph_compact(f->pc->ctx, f->g);
}

Code pass_dequantise(PassContext *pc, Graph *g) {
    if (!pc->eval || !pc->options.quantised) return CODE_OK;
    Arena scratch;
    arena_init(&scratch);
    Finder f = {.pc = pc, .g = g, .n_values = g->n_values};
    Code code = ARENA_NEW(pc->ctx, &scratch, g->n_values, &f.known);
    if (code == CODE_OK) code = all(&f);
    arena_destroy(&scratch);
    return code;
}
