/* Contractions: linear, matmul, convolutions; weights of linear quantised where the precision says so. */
#include <string.h>

#include "npu/emit.h"

/* --- weights ------------------------------------------------------------------------------------------------------ */
enum { MAX_SOURCES = 2 };

/* `count` weights [N, K], one below the other. */
static Code stacked_sources(Emitter *e, const WeightSource *sources, uint32_t count, Wire *out) {
    Wire parts[MAX_SOURCES];
    for (uint32_t i = 0; i < count; i++) TRY(emit_source(e, &sources[i], &parts[i]));
    return emit_concat(e, parts, count, 0, out);
}

/* Weights of the model as one wire of type e->real. int8 and int4 lie in the file with a scale a row. */
static Code weight_wire(Emitter *e, const WeightSource *weights, uint32_t count, Wire *out) {
    WeightSource sources[MAX_SOURCES];
    Wire scales;
    bool quantise = e->options->precision != PRECISION_FP16, i4 = e->options->precision == PRECISION_W4A16;
    for (uint32_t i = 0; i < count; i++) { /* those that are int8 in the model stay as they are */
        sources[i] = weights[i];
        quantise = quantise && dtype_is_float(e->g->constants[weights[i].constant].dtype);
    }
    for (uint32_t i = 0; i < count && quantise; i++) {
        sources[i].i4 = i4;
        sources[i].dtype = i4 ? DTYPE_U8 : DTYPE_I8;
    }
    TRY(stacked_sources(e, sources, count, out));
    TRY(emit_convert(e, *out, e->real, out));
    if (!quantise) return CODE_OK;
    for (uint32_t i = 0; i < count; i++) {
        sources[i].part = WEIGHT_SCALES;
        sources[i].dtype = e->real == ELEMENT_F32 ? DTYPE_F32 : DTYPE_F16;
    }
    TRY(stacked_sources(e, sources, count, &scales));
    return emit_binary(e, "Multiply", 1, *out, scales, out);
}

/* x [.., K] times w [N, K] transposed. */
static Code product(Emitter *e, Wire x, Wire w, Wire *out) {
    WireType type = *wire_type(e, x), weight = *wire_type(e, w);
    if (type.rank == 1) {
        TRY(emit_reshape(e, x, 2, (int64_t[]){1, type.shape[0]}, &x));
        TRY(product(e, x, w, out));
        return emit_reshape(e, *out, 1, &weight.shape[0], out);
    }
    type.shape[type.rank - 1] = weight.shape[0];
    return emit_layer(e, "MatMul", 1, (Wire[]){x, w}, 2, &type, 1, out, "transpose_a=\"false\" transpose_b=\"true\"");
}

/* A contraction over a long K (the way down of a feed-forward) is two, which the compiler overlaps with the transfer of
 * weights; one over the whole of K it does only for short ones. */
enum { LONG_K = 3072, LONG_K_OF_ARGUMENTS = 4096, PIECES_OF_K = 2 };
static int64_t pieces_of(const Emitter *e, const WeightSource *w) {
    int64_t n = w->shape[0], k = w->shape[1], least = e->is_argument[w->constant] ? LONG_K_OF_ARGUMENTS : LONG_K;
    bool split = (e->options->forms & FORM_SPLIT_K) && k >= least && k >= 2 * n && k % PIECES_OF_K == 0;
    return split ? PIECES_OF_K : 1;
}

static Code weighted(Emitter *e, Wire x, const WeightSource *weight, Wire *out) {
    int64_t pieces = pieces_of(e, weight), k = weight->shape[1] / pieces;
    int last = wire_type(e, x)->rank - 1;
    *out = WIRE_NONE;
    for (int64_t p = 0; p < pieces; p++) {
        WeightSource part = *weight;
        Wire some = x, w, y;
        part.shape[1] = k;
        part.offset += p * k * part.strides[1];
        if (pieces > 1) TRY(emit_slice(e, x, last, p * k, (p + 1) * k, 1, &some));
        TRY(weight_wire(e, &part, 1, &w));
        TRY(product(e, some, w, &y));
        if (*out == WIRE_NONE)
            *out = y;
        else
            TRY(emit_binary(e, "Add", 1, *out, y, out));
    }
    return CODE_OK;
}

/* Adds the bias [N] of the instruction, rows [first, first + n) of it. A constant bias behind a weight that is an
 * argument is given the product's full shape: the compiler makes a matrix of [N] (15 MB for 2304) there. */
static Code add_bias(Emitter *e, bool argument, int64_t first, int64_t n, Wire product, Wire *out) {
    const Node *node = e->instr->node;
    WeightSource source;
    Wire bias;
    *out = product;
    if (node->n_operands < 3 || node->operands[2] == VALUE_NONE) return CODE_OK;
    if (!emit_is_constant(e, node->operands[2], &source) || source.rank != 1) {
        if (first != 0 || e->block->columns) return fail(e->ctx, CODE_UNSUPPORTED, "a computed bias of a tile");
        TRY(emit_operand(e, 2, &bias));
        return emit_binary(e, "Add", 1, product, bias, out);
    }
    source.shape[0] = n;
    source.offset += first * source.strides[0];
    if (argument && !e->is_argument[source.constant]) {
        const WireType type = *wire_type(e, product);
        int64_t stride = source.strides[0];
        source.rank = type.rank;
        memcpy(source.shape, type.shape, type.rank * sizeof *type.shape);
        memset(source.strides, 0, sizeof source.strides);
        source.strides[type.rank - 1] = stride;
    }
    TRY(emit_source(e, &source, &bias));
    return emit_binary(e, "Add", 1, product, bias, out);
}

/* --- linear ------------------------------------------------------------------------------------------------------- */
/* A piece of the result's last dimension that a slice reads. */
typedef struct Cut {
    int64_t start, end;
    ValueId value;
} Cut;
enum { MAX_CUTS = 8 };

static bool add_cut(Cut *cuts, uint32_t *count, const Node *slice) {
    Cut cut = {node_int(slice, ATTR_start), node_int(slice, ATTR_end), slice->first_result};
    uint32_t at = *count;
    if (at == MAX_CUTS || node_int(slice, ATTR_step) != 1) return false;
    for (; at > 0 && cuts[at - 1].start > cut.start; at--) cuts[at] = cuts[at - 1];
    cuts[at] = cut;
    (*count)++;
    return true;
}

/* All readers of `value` are slices of its last dimension, or reshapes that keep it and are read so. */
static bool find_cuts(const Graph *g, ValueId value, int depth, Cut *cuts, uint32_t *count) {
    const Value *v = graph_value(g, value);
    for (uint32_t k = 0; k < g->n_outputs; k++)
        if (g->outputs[k] == value) return false;
    for (NodeId id = g->nodes[v->def].next; id != NODE_NONE; id = g->nodes[id].next) {
        const Node *node = graph_node(g, id);
        for (uint32_t k = 0; k < node->n_operands; k++) {
            if (node->operands[k] != value) continue;
            if (node->op == OP_slice && node_int(node, ATTR_dim) == v->rank - 1) {
                if (!add_cut(cuts, count, node)) return false;
            } else if (node->op == OP_reshape && depth == 0) {
                const Value *seen = graph_value(g, node->first_result);
                if (seen->rank == 0 || seen->shape[seen->rank - 1] != v->shape[v->rank - 1] ||
                    !find_cuts(g, node->first_result, 1, cuts, count))
                    return false;
            } else {
                return false;
            }
        }
    }
    return true;
}

/* 0 unless the cuts are all of [0, n), one after the other. */
static uint32_t cuts_of(const Emitter *e, ValueId value, int64_t n, Cut *cuts) {
    uint32_t count = 0;
    if (!find_cuts(e->g, value, 0, cuts, &count)) return 0;
    int64_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (cuts[i].start != at || cuts[i].end <= at) return 0;
        at = cuts[i].end;
    }
    return at == n ? count : 0;
}

/* q, k and v of one projection as contractions of their own; the whole, should anybody read it, by Concat. */
static Code linear_in_cuts(Emitter *e, Wire x, const WeightSource *weight, const Cut *cuts, uint32_t count) {
    Wire parts[MAX_CUTS], whole;
    for (uint32_t i = 0; i < count; i++) {
        WeightSource part = *weight;
        const Value *cut = graph_value(e->g, cuts[i].value);
        Wire wire;
        part.shape[0] = cuts[i].end - cuts[i].start;
        part.offset += cuts[i].start * part.strides[0];
        TRY(weighted(e, x, &part, &wire));
        TRY(add_bias(e, e->is_argument[part.constant], cuts[i].start, part.shape[0], wire, &parts[i]));
        TRY(emit_reshape(e, parts[i], cut->rank, cut->shape, &wire));
        e->wires[cuts[i].value] = wire;
    }
    TRY(emit_concat(e, parts, count, wire_type(e, parts[0])->rank - 1, &whole));
    return emit_result(e, 0, whole);
}

/* --- gate and up -------------------------------------------------------------------------------------------------- */
enum { WIDE_N = 8192 };

static uint32_t count_readers(const Graph *g, ValueId value) {
    uint32_t count = 0;
    for (uint32_t k = 0; k < g->n_outputs; k++) count += g->outputs[k] == value;
    for (NodeId id = g->nodes[g->values[value].def].next; id != NODE_NONE; id = g->nodes[id].next)
        for (uint32_t k = 0; k < g->nodes[id].n_operands; k++) count += g->nodes[id].operands[k] == value;
    return count;
}

/* (int8 weights apart: joined, the compiler expands them.) Does the epilogue read another linear of the same x, as
 * act(gate) * up does? Where these are wide (in narrow ones it costs), both are one contraction of the two weights.
 * `up` has been written by itself before, for nothing then. */
static bool is_pair(const Emitter *e, const Node *gate, const WeightSource *weight, WeightSource *other) {
    if (!(e->options->forms & FORM_FUSE_PAIR) || e->options->precision != PRECISION_FP16 || gate->n_operands != 4 ||
        gate->operands[2] != VALUE_NONE)
        return false;
    const Node *up = value_node(e->g, gate->operands[3]);
    if (up->op != OP_linear || up->operands[0] != gate->operands[0] || up->n_operands > 2 ||
        node_attr(up, ATTR_program)->ints.count || e->wires[gate->operands[3]] == WIRE_NONE ||
        !emit_is_constant(e, up->operands[1], other))
        return false;
    return weight->shape[0] >= WIDE_N && other->shape[0] == weight->shape[0] && !e->is_argument[weight->constant] &&
           !e->is_argument[other->constant] && count_readers(e->g, gate->operands[3]) == 1 &&
           dtype_is_float(e->g->constants[weight->constant].dtype) ==
               dtype_is_float(e->g->constants[other->constant].dtype);
}

static Code paired(Emitter *e, Wire x, const WeightSource weights[2], ValueId up, Wire *out) {
    int64_t n = weights[0].shape[0];
    Wire w, both;
    TRY(weight_wire(e, weights, 2, &w));
    TRY(product(e, x, w, &both));
    WireType half = *wire_type(e, both), scalar = {.element = ELEMENT_I64};
    int64_t last = half.rank - 1;
    Wire axis, parts;
    half.shape[last] = n;
    TRY(emit_literal(e, &scalar, &last, sizeof last, &axis));
    /* not slices: the compiler would cut the weight with them, and have two contractions again */
    TRY(emit_layer(e, "Split", 1, (Wire[]){both, axis}, 2, (WireType[]){half, half}, 2, &parts, "num_splits=\"2\""));
    *out = parts;
    e->wires[up] = parts + 1;
    return CODE_OK;
}

/* --- the operator --------------------------------------------------------------------------------------------------
 */
/* Operands of the epilogue that have a value a column, of which a tile of a head would need its own. */
static bool has_columns(const Emitter *e, const Node *node, int64_t n) {
    for (uint32_t k = 3; k < node->n_operands; k++) {
        const Value *v = graph_value(e->g, node->operands[k]);
        if (v->rank > 0 && v->shape[v->rank - 1] == n && n > 1) return true;
    }
    return false;
}

Code emit_linear(Emitter *e) {
    const Node *node = e->instr->node;
    WeightSource weight;
    Cut cuts[MAX_CUTS];
    Wire x, w, out;
    TRY(emit_operand(e, 0, &x));
    bool constant = emit_is_constant(e, node->operands[1], &weight);
    int64_t n = graph_value(e->g, node->operands[1])->shape[0];
    if (e->block->columns) {
        if (!constant || has_columns(e, node, n))
            return fail(e->ctx, CODE_UNSUPPORTED, "its columns cannot be cut into tiles");
        n = weight.shape[0] = e->block->columns;
        weight.offset += e->block->first_column * weight.strides[0];
    } else if (constant && (e->options->forms & FORM_SPLIT_N) && node_attr(node, ATTR_program)->ints.count == 0) {
        uint32_t count = cuts_of(e, node->first_result, n, cuts);
        if (count > 1) return linear_in_cuts(e, x, &weight, cuts, count);
    }
    WeightSource pair[2];
    if (constant && is_pair(e, node, &weight, &pair[1])) {
        pair[0] = weight;
        TRY(paired(e, x, pair, node->operands[3], &out));
    } else if (constant) {
        TRY(weighted(e, x, &weight, &out));
    } else {
        TRY(emit_operand(e, 1, &w));
        TRY(emit_convert(e, w, e->real, &w));
        TRY(product(e, x, w, &out));
    }
    TRY(add_bias(e, constant && e->is_argument[weight.constant], e->block->first_column, n, out, &out));
    TRY(emit_epilogue(e, 3, out, &out));
    return emit_result(e, 0, out);
}

/* --- matmul ------------------------------------------------------------------------------------------------------- */
/* The right operand; `*turned`: it is given as [.., N, K]. Constants are laid out so, as the compiler likes them. */
static Code right_operand(Emitter *e, ValueId value, bool *turned, Wire *out) {
    const Node *node = value_node(e->g, value);
    WeightSource s;
    int rank = graph_value(e->g, value)->rank;
    *turned = true;
    if (emit_is_constant(e, value, &s)) {
        int64_t size = s.shape[rank - 1], stride = s.strides[rank - 1];
        s.shape[rank - 1] = s.shape[rank - 2];
        s.strides[rank - 1] = s.strides[rank - 2];
        s.shape[rank - 2] = size;
        s.strides[rank - 2] = stride;
        return emit_source(e, &s, out);
    }
    if (node->op == OP_permute && e->wires[value] == WIRE_NONE) {
        const int64_t *dims = node_attr(node, ATTR_dims)->ints.items;
        bool swap = dims[rank - 1] == rank - 2 && dims[rank - 2] == rank - 1;
        for (int d = 0; d + 2 < rank; d++) swap = swap && dims[d] == d;
        if (swap) return emit_value(e, node->operands[0], out);
    }
    *turned = false;
    return emit_value(e, value, out);
}

Code emit_matmul(Emitter *e) {
    const Node *node = e->instr->node;
    bool turned;
    Wire a, b, out;
    TRY(emit_operand(e, 0, &a));
    TRY(right_operand(e, node->operands[1], &turned, &b));
    WireType type = *wire_type(e, a), right = *wire_type(e, b);
    for (int d = 0; d + 2 < type.rank; d++)
        if (type.shape[d] == 1) type.shape[d] = right.shape[d];
    type.shape[type.rank - 1] = right.shape[turned ? type.rank - 2 : type.rank - 1];
    TRY(emit_layer(e, "MatMul", 1, (Wire[]){a, b}, 2, &type, 1, &out, "transpose_a=\"false\" transpose_b=\"%s\"",
                   turned ? "true" : "false"));
    TRY(emit_epilogue(e, 2, out, &out));
    return emit_result(e, 0, out);
}

/* --- convolutions ------------------------------------------------------------------------------------------------- */
Code emit_conv(Emitter *e) {
    const Node *node = e->instr->node;
    const int64_t *stride = node_attr(node, ATTR_stride)->ints.items, *pad = node_attr(node, ATTR_padding)->ints.items,
                  *dilation = node_attr(node, ATTR_dilation)->ints.items, groups = node_int(node, ATTR_groups);
    const Value *result = graph_value(e->g, node->first_result);
    Wire x, w, bias, out;
    TRY(emit_operand(e, 0, &x));
    TRY(emit_operand(e, 1, &w));
    TRY(emit_operand(e, 2, &bias));
    /* One dimension is written as two, with a height of 1. */
    WireType in = *wire_type(e, x), kernel = *wire_type(e, w);
    bool line = in.rank == 3;
    int64_t height = line ? 1 : in.shape[2], width = in.shape[in.rank - 1];
    int64_t rows = line ? 1 : kernel.shape[2], columns = kernel.shape[kernel.rank - 1];
    int64_t n = in.shape[0], channels = in.shape[1], o = kernel.shape[0], c = kernel.shape[1];
    TRY(emit_reshape(e, x, 4, (int64_t[]){n, channels, height, width}, &x));
    if (groups == 1)
        TRY(emit_reshape(e, w, 4, (int64_t[]){o, c, rows, columns}, &w));
    else
        TRY(emit_reshape(e, w, 5, (int64_t[]){groups, o / groups, c, rows, columns}, &w));
    WireType type = {
        .element = e->real, .rank = 4, .shape = {n, o, line ? 1 : result->shape[2], result->shape[result->rank - 1]}};
    long long s[2] = {line ? 1 : stride[0], stride[line ? 0 : 1]}, p[2] = {line ? 0 : pad[0], pad[line ? 0 : 1]},
              d[2] = {line ? 1 : dilation[0], dilation[line ? 0 : 1]};
    TRY(emit_layer(e, groups == 1 ? "Convolution" : "GroupConvolution", 1, (Wire[]){x, w}, 2, &type, 1, &out,
                   "strides=\"%lld,%lld\" dilations=\"%lld,%lld\" pads_begin=\"%lld,%lld\" pads_end=\"%lld,%lld\" "
                   "auto_pad=\"explicit\"",
                   s[0], s[1], d[0], d[1], p[0], p[1], p[0], p[1]));
    if (bias != WIRE_NONE) {
        TRY(emit_reshape(e, bias, 4, (int64_t[]){1, o, 1, 1}, &bias));
        TRY(emit_binary(e, "Add", 1, out, bias, &out));
    }
    TRY(emit_reshape(e, out, result->rank, result->shape, &out));
    return emit_result(e, 0, out);
}
