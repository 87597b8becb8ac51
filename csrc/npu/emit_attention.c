/* Attention, and what may be seen: the causal triangle, bool masks, masks that are added.
 *
 * Masks are written as a number that is added to the scores: 0, or `mask_floor`. That is far below any score but not
 * the least number: adding a score to the least f16 gives -inf, and a row of these is NaN, which the padded rows of one
 * layer would give to all rows of the next. A row that may see nothing is left unmasked, and multiplied by 0 afterwards
 * (`safe`), or it is NaN as in eager: then -inf stays in what is added. At an f32 border the device makes -inf of
 * finfo.min: a whole row of it counts as "sees nothing", and never as NaN. */
#include <math.h>
#include <string.h>

#include "npu/emit.h"

typedef struct Mask {
    Wire add;  /* [b, h, S or 1, T], WIRE_NONE: all may be seen */
    Wire keep; /* [b, h, S or 1, 1]: 0 where a row sees nothing, else 1; WIRE_NONE: there are no such rows */
} Mask;

typedef struct Sizes {
    int64_t b, h, g, s, t, d, e;
    bool causal, safe;
} Sizes;

static double mask_floor(const Emitter *e) { return e->real == ELEMENT_F16 ? -49152.0 : -1e30; }

/* --- masks known while compiling ---------------------------------------------------------------------------------- */
enum { MAX_KNOWN = 1 << 26 }; /* elements */

/* The operand without what only broadcasts it. */
static ValueId unexpanded(const Graph *g, ValueId value) {
    while (value_node(g, value)->op == OP_expand) value = value_node(g, value)->operands[0];
    return value;
}

/* One row of a known mask, in place: `row` holds what is added (-inf: not seen). Returns what `keep` has for it. */
static double settle_row(const Sizes *z, double *row, double floor) {
    bool sees = false;
    for (int64_t t = 0; t < z->t; t++) sees = sees || row[t] > -INFINITY || isnan(row[t]);
    for (int64_t t = 0; t < z->t; t++) {
        if (sees)
            row[t] = row[t] < floor ? floor : row[t];
        else if (z->safe)
            row[t] = 0;
    }
    return sees || !z->safe ? 1 : 0;
}

/* `data`: the mask's own elements, [b, h, S or 1, T or 1] as `dims` has them; NULL: only the triangle. */
static Code known_mask(Emitter *e, const Sizes *z, const void *data, bool boolean, const int64_t dims[4], Mask *mask) {
    bool alike = dims[2] == 1 && !z->causal, all = true;
    int64_t rows = alike ? 1 : z->s, outer = dims[0] * dims[1];
    double *add, *keep;
    TRY(ARENA_NEW(e->ctx, e->scratch, outer * rows * z->t, &add));
    TRY(ARENA_NEW(e->ctx, e->scratch, outer * rows, &keep));
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t s = 0; s < rows; s++) {
            double *row = add + (o * rows + s) * z->t;
            for (int64_t t = 0; t < z->t; t++) {
                int64_t at = (o * dims[2] + (dims[2] == 1 ? 0 : s)) * dims[3] + (dims[3] == 1 ? 0 : t);
                if (data) row[t] = !boolean ? ((const float *)data)[at] : ((const uint8_t *)data)[at] ? 0 : -INFINITY;
                if (z->causal && t > s) row[t] = -INFINITY;
            }
            keep[o * rows + s] = settle_row(z, row, e->real == ELEMENT_F16 ? mask_floor(e) : -INFINITY);
            all = all && keep[o * rows + s] == 1;
        }
    }
    bool argument = (e->options->forms & FORM_MASK_ARGUMENT) != 0;
    TRY((argument ? emit_numbers_argument : emit_numbers)(e, add, 4, (int64_t[]){dims[0], dims[1], rows, z->t},
                                                          &mask->add));
    if (all) return CODE_OK;
    return emit_numbers(e, keep, 4, (int64_t[]){dims[0], dims[1], rows, 1}, &mask->keep);
}

/* The mask operand's bytes, if it is a constant that is the same in each call of the block; else NULL. */
static Code read_mask(Emitter *e, const Sizes *z, ValueId value, int64_t dims[4], bool *boolean, void **out) {
    const Value *v = graph_value(e->g, value);
    WeightSource source;
    *out = NULL;
    if (!emit_is_constant(e, value, &source) || e->is_argument[source.constant]) return CODE_OK;
    const Constant *c = &e->g->constants[source.constant];
    int64_t count = 1, outer = 1;
    for (int d = 0; d < v->rank; d++) count *= v->shape[d];
    for (int d = 0; d + 2 < v->rank; d++) outer *= v->shape[d];
    *boolean = c->dtype == DTYPE_BOOL;
    if (!c->data || (!*boolean && !dtype_is_float(c->dtype)) || outer > MAX_KNOWN / (z->s * z->t)) return CODE_OK;
    source.dtype = *boolean ? DTYPE_BOOL : DTYPE_F32;
    source.bytes = count * (*boolean ? 1 : (int64_t)sizeof(float));
    void *data;
    TRY(arena_array(e->ctx, e->scratch, (size_t)source.bytes, 1, &data));
    TRY(weight_fill(e->ctx, e->g, &source, UINT32_MAX, 0, data));
    for (int d = 0; d < 4; d++) dims[d] = d + v->rank >= 4 ? v->shape[d + v->rank - 4] : 1;
    *out = data;
    return CODE_OK;
}

/* --- masks that come in ------------------------------------------------------------------------------------------- */
static Code row_is_seen(Emitter *e, Wire seen, Wire *out) { /* `seen`: 0 or 1 */
    return emit_reduce_dims(e, "ReduceMax", seen, (int64_t[]){3}, 1, true, out);
}

static Code computed_bool(Emitter *e, const Sizes *z, Wire mask, Mask *out) {
    double floor = z->safe ? mask_floor(e) : -INFINITY;
    Wire zero, low;
    if (z->safe) {
        Wire seen;
        TRY(emit_convert(e, mask, e->real, &seen));
        TRY(row_is_seen(e, seen, &out->keep));
    }
    TRY(emit_number(e, 0, &zero));
    TRY(emit_number(e, floor, &low));
    return emit_select(e, mask, zero, low, &out->add);
}

static Code computed_float(Emitter *e, const Sizes *z, Wire mask, Wire triangle, Mask *out) {
    Wire seen, low;
    if (triangle != WIRE_NONE) {
        TRY(emit_number(e, -INFINITY, &low));
        TRY(emit_select(e, triangle, mask, low, &mask));
    }
    out->add = mask;
    if (!z->safe && e->real == ELEMENT_F32) return CODE_OK;
    TRY(emit_binary_number(e, "Maximum", mask, mask_floor(e), &out->add));
    if (!z->safe && e->options->f32_border) return CODE_OK;
    TRY(emit_number(e, -INFINITY, &low));
    TRY(emit_compare(e, "Greater", mask, low, &seen));
    if (!z->safe) return emit_select(e, seen, out->add, low, &out->add);
    TRY(emit_convert(e, seen, e->real, &seen));
    return row_is_seen(e, seen, &out->keep);
}

/* [S, T]: true on and below the diagonal. */
static Code causal_triangle(Emitter *e, const Sizes *z, Wire *out) {
    WireType type = {.element = ELEMENT_BOOL, .rank = 4, .shape = {1, 1, z->s, z->t}};
    uint8_t *data;
    TRY(ARENA_NEW(e->ctx, e->scratch, z->s * z->t, &data));
    for (int64_t s = 0; s < z->s; s++)
        for (int64_t t = 0; t < z->t; t++) data[s * z->t + t] = t <= s;
    return emit_literal(e, &type, data, (size_t)(z->s * z->t), out);
}

static Code make_mask(Emitter *e, const Sizes *z, Mask *mask) {
    const Node *node = e->instr->node;
    *mask = (Mask){WIRE_NONE, WIRE_NONE};
    if (node->n_operands < 4 || node->operands[3] == VALUE_NONE) {
        return z->causal ? known_mask(e, z, NULL, false, (int64_t[]){1, 1, 1, 1}, mask) : CODE_OK;
    }
    ValueId value = unexpanded(e->g, node->operands[3]);
    int64_t dims[4];
    bool boolean = false;
    void *data;
    Wire wire, triangle = WIRE_NONE;
    TRY(read_mask(e, z, value, dims, &boolean, &data));
    if (data) return known_mask(e, z, data, boolean, dims, mask);
    TRY(emit_value(e, value, &wire));
    WireType type = *wire_type(e, wire);
    for (int d = 0; d < 4; d++) dims[d] = d + type.rank >= 4 ? type.shape[d + type.rank - 4] : 1;
    TRY(emit_reshape(e, wire, 4, dims, &wire));
    if (z->causal) TRY(causal_triangle(e, z, &triangle));
    if (type.element != ELEMENT_BOOL) return computed_float(e, z, wire, triangle, mask);
    if (z->causal) TRY(emit_binary(e, "LogicalAnd", 1, wire, triangle, &wire));
    return computed_bool(e, z, wire, mask);
}

/* --- grouped queries ---------------------------------------------------------------------------------------------- */
/* k and v repeated, a head of theirs for each head of q. */
static Code repeat_heads(Emitter *e, const Sizes *z, Wire x, int64_t width, Wire *out) {
    int64_t r = z->h / z->g, t = wire_type(e, x)->shape[2];
    *out = x;
    if (r == 1) return CODE_OK;
    TRY(emit_reshape(e, x, 5, (int64_t[]){z->b, z->g, 1, t, width}, out));
    TRY(emit_broadcast(e, *out, 5, (int64_t[]){z->b, z->g, r, t, width}, out));
    return emit_reshape(e, *out, 4, (int64_t[]){z->b, z->h, t, width}, out);
}

/* The mask for queries that are stacked: [b, h, S, T] becomes [b, 1 or G, r * S, T]. */
static Code stack_mask(Emitter *e, const Sizes *z, Wire mask, Wire *out) {
    int64_t r = z->h / z->g;
    WireType type = *wire_type(e, mask);
    *out = mask;
    if (type.shape[1] == 1 && type.shape[2] == 1) return CODE_OK;
    if (type.shape[1] != 1) {
        TRY(emit_broadcast(e, mask, 4, (int64_t[]){type.shape[0], z->h, z->s, type.shape[3]}, out));
        return emit_reshape(e, *out, 4, (int64_t[]){type.shape[0], z->g, r * z->s, type.shape[3]}, out);
    }
    type.shape[2] *= r;
    Wire repeats;
    TRY(emit_ints(e, (int64_t[]){1, 1, r, 1}, 4, &repeats));
    return emit_layer(e, "Tile", 1, (Wire[]){mask, repeats}, 2, &type, 1, out, "%s", "");
}

/* --- the product -------------------------------------------------------------------------------------------------- */
/* All of rank 4; the heads of q and k are equally many. */
static Code attend(Emitter *e, Wire q, Wire k, Wire v, Wire mask, double scale, Wire *out) {
    WireType query = *wire_type(e, q), key = *wire_type(e, k), value = *wire_type(e, v);
    WireType result = query, scores = query;
    result.shape[3] = value.shape[3];
    scores.shape[3] = key.shape[2];
    if (e->options->forms & FORM_SDPA) {
        Wire in[5] = {q, k, v, mask};
        if (mask == WIRE_NONE) { /* the operator takes a scale only after a mask; its own is 1 / sqrt(D) */
            double rest = scale * sqrt((double)query.shape[3]);
            if (fabs(rest - 1) > 1e-12) TRY(emit_binary_number(e, "Multiply", q, rest, &in[0]));
            return emit_layer(e, "ScaledDotProductAttention", 13, in, 3, &result, 1, out, "causal=\"false\"");
        }
        TRY(emit_number(e, scale, &in[4]));
        return emit_layer(e, "ScaledDotProductAttention", 13, in, 5, &result, 1, out, "causal=\"false\"");
    }
    /* q is scaled, not the scores: they may leave the range of f16 before. */
    TRY(emit_binary_number(e, "Multiply", q, scale, &q));
    TRY(emit_layer(e, "MatMul", 1, (Wire[]){q, k}, 2, &scores, 1, out, "transpose_a=\"false\" transpose_b=\"true\""));
    if (mask != WIRE_NONE) TRY(emit_binary(e, "Add", 1, *out, mask, out));
    TRY(emit_layer(e, "SoftMax", 8, (Wire[]){*out}, 1, &scores, 1, out, "axis=\"3\""));
    return emit_layer(e, "MatMul", 1, (Wire[]){*out, v}, 2, &result, 1, out,
                      "transpose_a=\"false\" transpose_b=\"false\"");
}

/* --- keys and values in two pieces -------------------------------------------------------------------------------- */
/* The two values that operand k is a concatenation of, along the keys: a cache and its new rows. */
static bool pieces_of(const Emitter *e, uint32_t k, ValueId pieces[2]) {
    const Node *cat = value_node(e->g, e->instr->node->operands[k]);
    if (cat->op != OP_cat || cat->n_operands != 2 || node_int(cat, ATTR_dim) != 2) return false;
    memcpy(pieces, cat->operands, 2 * sizeof *pieces);
    return emit_reaches(e, pieces[0]) && emit_reaches(e, pieces[1]);
}

static bool in_pieces(const Emitter *e, ValueId keys[2], ValueId values[2]) {
    return (e->options->forms & FORM_JOINED_SCORES) && pieces_of(e, 1, keys) && pieces_of(e, 2, values) &&
           graph_value(e->g, keys[0])->shape[2] == graph_value(e->g, values[0])->shape[2];
}

/* Scores of either piece side by side, one softmax over all, and the sum of both products: nothing as large as the
 * cache is made. */
static Code attend_pieces(Emitter *e, Wire q, const Wire k[2], const Wire v[2], Wire mask, double scale, Wire *out) {
    Wire scores[2], part[2], all;
    int64_t start = 0;
    TRY(emit_binary_number(e, "Multiply", q, scale, &q));
    for (int i = 0; i < 2; i++) {
        WireType type = *wire_type(e, q);
        type.shape[3] = wire_type(e, k[i])->shape[2];
        TRY(emit_layer(e, "MatMul", 1, (Wire[]){q, k[i]}, 2, &type, 1, &scores[i],
                       "transpose_a=\"false\" transpose_b=\"true\""));
    }
    TRY(emit_concat(e, scores, 2, 3, &all));
    if (mask != WIRE_NONE) TRY(emit_binary(e, "Add", 1, all, mask, &all));
    WireType type = *wire_type(e, all);
    TRY(emit_layer(e, "SoftMax", 8, (Wire[]){all}, 1, &type, 1, &all, "axis=\"3\""));
    for (int i = 0; i < 2; i++) {
        int64_t n = wire_type(e, v[i])->shape[2];
        WireType result = *wire_type(e, q);
        result.shape[3] = wire_type(e, v[i])->shape[3];
        TRY(emit_slice(e, all, 3, start, start + n, 1, &part[i]));
        start += n;
        if (n == 1)
            TRY(emit_binary(e, "Multiply", 1, part[i], v[i], &part[i]));
        else
            TRY(emit_layer(e, "MatMul", 1, (Wire[]){part[i], v[i]}, 2, &result, 1, &part[i],
                           "transpose_a=\"false\" transpose_b=\"false\""));
    }
    return emit_binary(e, "Add", 1, part[0], part[1], out);
}

/* --- all ---------------------------------------------------------------------------------------------------------- */
/* q [b, h, S, d] over k and v, whole or in `n` = 2 pieces. */
static Code attend_heads(Emitter *e, const Sizes *z, Wire q, Wire *k, Wire *v, int n, Wire mask, double scale,
                         Wire *out) {
    bool stacked = z->h != z->g && (e->options->forms & FORM_STACKED_QUERIES);
    if (stacked) {
        TRY(emit_reshape(e, q, 4, (int64_t[]){z->b, z->g, z->h / z->g * z->s, z->d}, &q));
        if (mask != WIRE_NONE) TRY(stack_mask(e, z, mask, &mask));
    }
    for (int i = 0; i < n && !stacked; i++) {
        TRY(repeat_heads(e, z, k[i], z->d, &k[i]));
        TRY(repeat_heads(e, z, v[i], z->e, &v[i]));
    }
    if (n == 2)
        TRY(attend_pieces(e, q, k, v, mask, scale, out));
    else
        TRY(attend(e, q, k[0], v[0], mask, scale, out));
    return stacked ? emit_reshape(e, *out, 4, (int64_t[]){z->b, z->h, z->s, z->e}, out) : CODE_OK;
}

Code emit_attention(Emitter *e) {
    const Node *node = e->instr->node;
    Wire q, k[2], v[2], out;
    ValueId keys[2], values[2];
    Mask mask;
    TRY(emit_operand(e, 0, &q));
    int n = in_pieces(e, keys, values) ? 2 : 1;
    for (int i = 0; i < n; i++) {
        TRY(emit_value(e, n == 2 ? keys[i] : node->operands[1], &k[i]));
        TRY(emit_value(e, n == 2 ? values[i] : node->operands[2], &v[i]));
    }
    const int64_t *query = graph_value(e->g, node->operands[0])->shape,
                  *key = graph_value(e->g, node->operands[1])->shape,
                  *value = graph_value(e->g, node->operands[2])->shape;
    Sizes z = {.b = query[0],
               .h = query[1],
               .g = key[1],
               .s = query[2],
               .t = key[2],
               .d = query[3],
               .e = value[3],
               .causal = node_int(node, ATTR_causal) != 0,
               .safe = node_int(node, ATTR_safe) != 0};
    double scale = node_float(node, ATTR_scale);
    TRY(make_mask(e, &z, &mask));
    TRY(attend_heads(e, &z, q, k, v, n, mask.add, scale, &out));
    if (mask.keep != WIRE_NONE) TRY(emit_binary(e, "Multiply", 1, out, mask.keep, &out));
    return emit_result(e, 0, out);
}
