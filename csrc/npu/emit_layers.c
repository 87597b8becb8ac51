/* Layers, wires and constants of the model that is being emitted. */
#include <stdio.h>
#include <string.h>

#include "npu/emit.h"

static Code grow(Emitter *e, uint32_t count, uint32_t *cap, size_t size, void **items) {
    if (count < *cap) return CODE_OK;
    uint32_t larger = *cap ? *cap * 2 : 64;
    void *moved;
    if (count >= INT32_MAX / 2) return fail(e->ctx, CODE_UNSUPPORTED, "a segment of more than 2^30 operators");
    TRY(arena_array(e->ctx, e->scratch, larger, size, &moved));
    if (count) memcpy(moved, *items, count * size);
    *items = moved;
    *cap = larger;
    return CODE_OK;
}

const WireType *wire_type(const Emitter *e, Wire wire) { return &e->layers->wires[wire].type; }

/* The file's own name: blobs are looked up by the xml, which must not depend on the folder that a model lies in. */
static const char *without_folder(const char *source) {
    const char *name = source;
    for (const char *p = source; *p; p++)
        if (*p == '/' || *p == '\\') name = p + 1;
    return name;
}

/* "linear model.py:12 in forward": what the compiler's messages name. */
static Code layer_name(Emitter *e, const char *type, char **out) {
    const Instr *instr = e->instr;
    int32_t source = instr ? instr->node->source : -1;
    char text[512];
    const char *place = source >= 0 ? without_folder(e->g->sources[source]) : "";
    snprintf(text, sizeof text, "%s%s%s", instr ? op_info(instr->op)->name : type, source >= 0 ? " " : "", place);
    return arena_string(e->ctx, e->scratch, text, out);
}

static Code add_layer(Emitter *e, const char *type, int opset, const Wire *in, size_t n_in, const WireType *types,
                      size_t n_out, const char *data, Wire *out) {
    Layers *l = e->layers;
    void *inputs;
    char *name, *text;
    TRY(grow(e, l->count, &l->cap, sizeof *l->items, (void **)&l->items));
    TRY(arena_copy(e->ctx, e->scratch, in, n_in * sizeof *in, &inputs));
    TRY(layer_name(e, type, &name));
    TRY(arena_string(e->ctx, e->scratch, data, &text));
    for (size_t k = 0; k < n_in; k++) {
        if (in[k] >= l->n_wires) return fail(e->ctx, CODE_INTERNAL, "%s: operand %zu is no wire", type, k);
    }
    *out = l->n_wires;
    for (size_t k = 0; k < n_out; k++) {
        TRY(grow(e, l->n_wires, &l->cap_wires, sizeof *l->wires, (void **)&l->wires));
        l->wires[l->n_wires++] = (WireInfo){l->count, (uint32_t)k, types[k]};
    }
    l->items[l->count++] = (Layer){.type = type,
                                   .name = name,
                                   .data = text,
                                   .opset = (uint8_t)opset,
                                   .n_in = (uint32_t)n_in,
                                   .n_out = (uint32_t)n_out,
                                   .in = inputs,
                                   .first_out = *out,
                                   .piece = UINT32_MAX};
    return CODE_OK;
}

Code emit_layer(Emitter *e, const char *type, int opset, const Wire *in, size_t n_in, const WireType *types,
                size_t n_out, Wire *out, const char *format, ...) {
    char data[512];
    va_list args;
    va_start(args, format);
    int size = vsnprintf(data, sizeof data, format, args);
    va_end(args);
    if (size < 0 || (size_t)size >= sizeof data) return fail(e->ctx, CODE_INTERNAL, "%s: long attributes", type);
    WireType copies[4]; /* `types` may point into the wires, which move */
    if (n_out > 4) return fail(e->ctx, CODE_INTERNAL, "%s: %zu results", type, n_out);
    memcpy(copies, types, n_out * sizeof *types);
    return add_layer(e, type, opset, in, n_in, copies, n_out, data, out);
}

/* --- ports of the model ------------------------------------------------------------------------------------------- */
static void shape_text(const WireType *type, char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int d = 0; d < type->rank && used < size; d++)
        used += (size_t)snprintf(text + used, size - used, "%s%lld", d ? "," : "", (long long)type->shape[d]);
}

static Code typed_layer(Emitter *e, const char *layer, const WireType *type, Wire *out) {
    char shape[21 * MAX_RANK];
    shape_text(type, shape, sizeof shape);
    WireType copy = *type;
    return emit_layer(e, layer, 1, NULL, 0, &copy, 1, out, "shape=\"%s\" element_type=\"%s\"", shape,
                      element_xml(type->element, false));
}

Code emit_parameter(Emitter *e, const WireType *type, Wire *out) {
    Layers *l = e->layers;
    if (l->n_inputs == e->block->n_in) return fail(e->ctx, CODE_INTERNAL, "more inputs than the block has");
    TRY(typed_layer(e, "Parameter", type, out));
    l->inputs[l->n_inputs++] = *out;
    return CODE_OK;
}

Code emit_model_result(Emitter *e, Wire wire) {
    Layers *l = e->layers;
    if (l->n_outputs == e->block->n_out) return fail(e->ctx, CODE_INTERNAL, "more outputs than the block has");
    l->outputs[l->n_outputs++] = wire;
    return CODE_OK;
}

/* --- constants ---------------------------------------------------------------------------------------------------- */
static bool same_source(const WeightSource *a, const WeightSource *b) {
    size_t dims = a->rank * sizeof *a->shape;
    if (a->part != b->part || a->i4 != b->i4 || a->dtype != b->dtype || a->rank != b->rank || a->bytes != b->bytes ||
        memcmp(a->shape, b->shape, dims) != 0)
        return false;
    if (a->part == WEIGHT_BYTES) return memcmp(a->literal, b->literal, (size_t)a->bytes) == 0;
    return a->constant == b->constant && a->offset == b->offset && memcmp(a->strides, b->strides, dims) == 0;
}

static Code constant_layer(Emitter *e, const WeightSource *source, const WireType *type, bool argument, Wire *out) {
    Layers *l = e->layers;
    uint32_t *count = argument ? &l->n_args : &l->n_pieces;
    SourceWire **items = argument ? &l->args : &l->pieces;
    for (uint32_t i = 0; i < *count; i++) {
        const SourceWire *known = &(*items)[i];
        if (!same_source(&known->source, source) || wire_type(e, known->wire)->element != type->element) continue;
        *out = known->wire;
        return CODE_OK;
    }
    const Instr *instr = e->instr;
    TRY(grow(e, *count, argument ? &l->cap_args : &l->cap_pieces, sizeof **items, (void **)items));
    e->instr = NULL; /* shared: it belongs to no single operator */
    Code code = typed_layer(e, argument ? "Parameter" : "Const", type, out);
    e->instr = instr;
    TRY(code);
    l->items[l->count - 1].piece = *count;
    (*items)[(*count)++] = (SourceWire){*source, *out};
    return CODE_OK;
}

static const struct {
    const char *text, *port;
    uint8_t bits;
    DType dtype; /* of what weight_fill writes */
} elements[] = {
    [ELEMENT_BOOL] = {"boolean", "BOOL", 8, DTYPE_BOOL},
    [ELEMENT_I4] = {"i4", "I4", 4, DTYPE_U8},
    [ELEMENT_U8] = {"u8", "U8", 8, DTYPE_U8},
    [ELEMENT_I8] = {"i8", "I8", 8, DTYPE_I8},
    [ELEMENT_I32] = {"i32", "I32", 32, DTYPE_I32},
    [ELEMENT_I64] = {"i64", "I64", 64, DTYPE_I64},
    [ELEMENT_F16] = {"f16", "FP16", 16, DTYPE_F16},
    [ELEMENT_F32] = {"f32", "FP32", 32, DTYPE_F32},
};
const char *element_xml(Element element, bool port) { return port ? elements[element].port : elements[element].text; }

static int64_t count_of(const WireType *type) {
    int64_t count = 1;
    for (int d = 0; d < type->rank; d++) count *= type->shape[d];
    return count;
}

static Code literal(Emitter *e, const WireType *type, const void *data, size_t bytes, bool argument, Wire *out) {
    WeightSource source = {
        .part = WEIGHT_BYTES, .dtype = elements[type->element].dtype, .rank = type->rank, .bytes = (int64_t)bytes};
    void *copy;
    if (count_of(type) * elements[type->element].bits / 8 != (int64_t)bytes)
        return fail(e->ctx, CODE_INTERNAL, "a literal of %zu bytes", bytes);
    memcpy(source.shape, type->shape, type->rank * sizeof *type->shape);
    TRY(arena_copy(e->ctx, e->arena, data, bytes, &copy));
    source.literal = copy;
    return constant_layer(e, &source, type, argument, out);
}

Code emit_literal(Emitter *e, const WireType *type, const void *data, size_t bytes, Wire *out) {
    return literal(e, type, data, bytes, false, out);
}

Code emit_ints(Emitter *e, const int64_t *items, size_t count, Wire *out) {
    WireType type = {.element = ELEMENT_I64, .rank = 1, .shape = {(int64_t)count}};
    return emit_literal(e, &type, items, count * sizeof *items, out);
}

/* Finite numbers stay finite in f16. */
static uint16_t half_of(double value) { return f32_to_f16((float)npu_scalar(OP_mul, value)); }

static Code numbers(Emitter *e, const double *values, uint8_t rank, const int64_t *shape, bool argument, Wire *out) {
    WireType type = {.element = e->real, .rank = rank};
    if (rank) memcpy(type.shape, shape, rank * sizeof *shape);
    size_t count = (size_t)count_of(&type), size = e->real == ELEMENT_F32 ? sizeof(float) : sizeof(uint16_t);
    void *data;
    TRY(arena_array(e->ctx, e->scratch, count, size, &data));
    for (size_t i = 0; i < count; i++) {
        if (e->real == ELEMENT_F32)
            ((float *)data)[i] = (float)values[i];
        else
            ((uint16_t *)data)[i] = half_of(values[i]);
    }
    return literal(e, &type, data, count * size, argument, out);
}

Code emit_numbers(Emitter *e, const double *values, uint8_t rank, const int64_t *shape, Wire *out) {
    return numbers(e, values, rank, shape, false, out);
}

Code emit_numbers_argument(Emitter *e, const double *values, uint8_t rank, const int64_t *shape, Wire *out) {
    return numbers(e, values, rank, shape, true, out);
}

Code emit_number(Emitter *e, double value, Wire *out) { return emit_numbers(e, &value, 0, NULL, out); }

Code emit_bool(Emitter *e, bool value, Wire *out) {
    WireType type = {.element = ELEMENT_BOOL};
    uint8_t byte = value;
    return emit_literal(e, &type, &byte, 1, out);
}

static Element source_element(const WeightSource *source) {
    if (source->i4 && source->part == WEIGHT_VALUES) return ELEMENT_I4;
    switch (source->dtype) {
    case DTYPE_BOOL: return ELEMENT_BOOL;
    case DTYPE_U8: return ELEMENT_U8;
    case DTYPE_I8: return ELEMENT_I8;
    case DTYPE_I32: return ELEMENT_I32;
    case DTYPE_I64: return ELEMENT_I64;
    case DTYPE_F16: return ELEMENT_F16;
    default: return ELEMENT_F32;
    }
}

static Code source_wire(Emitter *e, const WeightSource *source, bool argument, Wire *out) {
    WeightSource s = *source;
    WireType type = {.element = source_element(&s), .rank = s.rank};
    memcpy(type.shape, s.shape, s.rank * sizeof *s.shape);
    if (s.part == WEIGHT_BYTES || s.constant >= e->g->n_constants)
        return fail(e->ctx, CODE_INTERNAL, "a weight without a constant");
    if (s.part == WEIGHT_SCALES) type.shape[1] = 1;
    s.bytes = (count_of(&type) * elements[type.element].bits + 7) / 8;
    return constant_layer(e, &s, &type, argument || e->is_argument[s.constant], out);
}

Code emit_source(Emitter *e, const WeightSource *source, Wire *out) { return source_wire(e, source, false, out); }

Code emit_argument(Emitter *e, const WeightSource *source, Wire *out) { return source_wire(e, source, true, out); }

/* --- common operators --------------------------------------------------------------------------------------------- */
Code emit_unary(Emitter *e, const char *type, int opset, Wire x, Wire *out) {
    return emit_layer(e, type, opset, &x, 1, wire_type(e, x), 1, out, "%s", "");
}

static Code broadcast_type(Emitter *e, const char *type, const WireType *a, const WireType *b, WireType *out) {
    const WireType *wide = a->rank >= b->rank ? a : b, *narrow = a->rank >= b->rank ? b : a;
    int lead = wide->rank - narrow->rank;
    *out = *wide;
    out->element = a->element;
    for (int d = 0; d < narrow->rank; d++) {
        int64_t *size = &out->shape[lead + d], other = narrow->shape[d];
        if (*size != other && *size != 1 && other != 1)
            return fail(e->ctx, CODE_INTERNAL, "%s: operands do not broadcast", type);
        if (*size == 1) *size = other;
    }
    return CODE_OK;
}

static Code binary(Emitter *e, const char *type, int opset, Wire a, Wire b, bool compare, Wire *out) {
    WireType result;
    if (wire_type(e, a)->element != wire_type(e, b)->element)
        return fail(e->ctx, CODE_INTERNAL, "%s: operands of two types", type);
    TRY(broadcast_type(e, type, wire_type(e, a), wire_type(e, b), &result));
    if (compare) result.element = ELEMENT_BOOL;
    return emit_layer(e, type, opset, (Wire[]){a, b}, 2, &result, 1, out, "auto_broadcast=\"numpy\"");
}

Code emit_binary(Emitter *e, const char *type, int opset, Wire a, Wire b, Wire *out) {
    return binary(e, type, opset, a, b, false, out);
}

Code emit_binary_number(Emitter *e, const char *type, Wire a, double b, Wire *out) {
    Wire number;
    TRY(emit_number(e, b, &number));
    return emit_binary(e, type, 1, a, number, out);
}

Code emit_compare(Emitter *e, const char *type, Wire a, Wire b, Wire *out) {
    return binary(e, type, 1, a, b, true, out);
}

Code emit_select(Emitter *e, Wire condition, Wire a, Wire b, Wire *out) {
    WireType values, result;
    TRY(broadcast_type(e, "Select", wire_type(e, a), wire_type(e, b), &values));
    TRY(broadcast_type(e, "Select", &values, wire_type(e, condition), &result));
    return emit_layer(e, "Select", 1, (Wire[]){condition, a, b}, 3, &result, 1, out, "auto_broadcast=\"numpy\"");
}

Code emit_convert(Emitter *e, Wire x, Element element, Wire *out) {
    WireType type = *wire_type(e, x);
    *out = x;
    if (type.element == element) return CODE_OK;
    type.element = element;
    return emit_layer(e, "Convert", 1, &x, 1, &type, 1, out, "destination_type=\"%s\"", element_xml(element, false));
}

static bool same_shape(const WireType *type, uint8_t rank, const int64_t *shape) {
    return type->rank == rank && memcmp(type->shape, shape, rank * sizeof *shape) == 0;
}

static WireType with_shape(const Emitter *e, Wire x, uint8_t rank, const int64_t *shape) {
    WireType type = {.element = wire_type(e, x)->element, .rank = rank};
    if (rank) memcpy(type.shape, shape, rank * sizeof *shape);
    return type;
}

Code emit_reshape(Emitter *e, Wire x, uint8_t rank, const int64_t *shape, Wire *out) {
    WireType type = with_shape(e, x, rank, shape);
    Wire target;
    *out = x;
    if (same_shape(wire_type(e, x), rank, shape)) return CODE_OK;
    if (rank == 0) { /* as Squeeze: OpenVINO 2026 crashes on a product that is reshaped to no dimensions */
        int64_t axes[MAX_RANK];
        uint8_t count = wire_type(e, x)->rank;
        for (uint8_t d = 0; d < count; d++) axes[d] = d;
        TRY(emit_ints(e, axes, count, &target));
        return emit_layer(e, "Squeeze", 1, (Wire[]){x, target}, 2, &type, 1, out, "%s", "");
    }
    TRY(emit_ints(e, type.shape, rank, &target));
    return emit_layer(e, "Reshape", 1, (Wire[]){x, target}, 2, &type, 1, out, "special_zero=\"false\"");
}

Code emit_transpose(Emitter *e, Wire x, const int64_t *dims, Wire *out) {
    WireType from = *wire_type(e, x), type = from;
    bool same = true;
    Wire order;
    for (int d = 0; d < from.rank; d++) {
        type.shape[d] = from.shape[dims[d]];
        same = same && dims[d] == d;
    }
    *out = x;
    if (same) return CODE_OK;
    TRY(emit_ints(e, dims, from.rank, &order));
    return emit_layer(e, "Transpose", 1, (Wire[]){x, order}, 2, &type, 1, out, "%s", "");
}

Code emit_broadcast(Emitter *e, Wire x, uint8_t rank, const int64_t *shape, Wire *out) {
    WireType type = with_shape(e, x, rank, shape);
    Wire target;
    *out = x;
    if (same_shape(wire_type(e, x), rank, shape)) return CODE_OK;
    TRY(emit_ints(e, type.shape, rank, &target));
    return emit_layer(e, "Broadcast", 3, (Wire[]){x, target}, 2, &type, 1, out, "mode=\"numpy\"");
}

Code emit_slice(Emitter *e, Wire x, int64_t dim, int64_t start, int64_t end, int64_t step, Wire *out) {
    WireType type = *wire_type(e, x);
    int64_t first[MAX_RANK] = {0}, last[MAX_RANK], by[MAX_RANK];
    Wire in[4] = {x};
    *out = x;
    if (start == 0 && end == type.shape[dim] && step == 1) return CODE_OK;
    for (int d = 0; d < type.rank; d++) {
        last[d] = type.shape[d];
        by[d] = 1;
    }
    first[dim] = start;
    last[dim] = end;
    by[dim] = step;
    type.shape[dim] = (end - start + step - 1) / step;
    TRY(emit_ints(e, first, type.rank, &in[1]));
    TRY(emit_ints(e, last, type.rank, &in[2]));
    TRY(emit_ints(e, by, type.rank, &in[3]));
    return emit_layer(e, "StridedSlice", 1, in, 4, &type, 1, out,
                      "begin_mask=\"\" end_mask=\"\" new_axis_mask=\"\" shrink_axis_mask=\"\" ellipsis_mask=\"\"");
}

Code emit_concat(Emitter *e, const Wire *parts, size_t count, int64_t dim, Wire *out) {
    *out = parts[0];
    if (count == 1) return CODE_OK;
    WireType type = *wire_type(e, parts[0]);
    for (size_t k = 1; k < count; k++) type.shape[dim] += wire_type(e, parts[k])->shape[dim];
    return emit_layer(e, "Concat", 1, parts, count, &type, 1, out, "axis=\"%lld\"", (long long)dim);
}

Code emit_reduce_dims(Emitter *e, const char *type, Wire x, const int64_t *dims, size_t n_dims, bool keep, Wire *out) {
    WireType from = *wire_type(e, x), result = {.element = from.element};
    bool reduced[MAX_RANK] = {false};
    Wire axes;
    *out = x;
    if (from.rank == 0) return CODE_OK;
    for (size_t k = 0; k < n_dims; k++) reduced[dims[k]] = true;
    for (int d = 0; d < from.rank; d++)
        if (!reduced[d] || keep) result.shape[result.rank++] = reduced[d] ? 1 : from.shape[d];
    TRY(emit_ints(e, dims, n_dims, &axes));
    return emit_layer(e, type, 1, (Wire[]){x, axes}, 2, &result, 1, out, "keep_dims=\"%s\"", keep ? "true" : "false");
}
