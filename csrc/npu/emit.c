/* A block of NPU instructions as OpenVINO IR. emit.h tells how it is done. */
#include "npu/emit.h"

#include <string.h>

uint32_t emit_default_forms(const Target *target, Precision precision) {
    (void)precision;
    uint32_t forms = FORM_SDPA | FORM_STACKED_QUERIES | FORM_MVN | FORM_SPLIT_N | FORM_SPLIT_K | FORM_MASK_ARGUMENT |
                     FORM_FUSE_PAIR | FORM_JOINED_SCORES;
    return strcmp(target->name, "npu3720") == 0 ? forms | FORM_SIGNED_SIN : forms;
}

static int64_t bytes_of(DType dtype, const WireType *type) {
    int64_t bytes = (int64_t)dtype_size(dtype);
    for (int d = 0; d < type->rank; d++) bytes *= type->shape[d];
    return bytes;
}

enum { BORDER_MAX_RANK = 5 };

/* The outer dimensions as one where there are more than the border takes. */
static void fold_rank(WireType *type) {
    while (type->rank > BORDER_MAX_RANK) {
        type->shape[0] *= type->shape[1];
        memmove(type->shape + 1, type->shape + 2, (size_t)(type->rank - 2) * sizeof *type->shape);
        type->rank--;
    }
}

static Port port_of(const Emitter *e, ValueId value, const WireType *type) {
    DType dtype = graph_value(e->g, value)->dtype;
    if (dtype_is_float(dtype)) dtype = e->options->f32_border ? DTYPE_F32 : DTYPE_F16;
    Port port = {.value = value, .dtype = dtype, .rank = type->rank, .bytes = bytes_of(dtype, type)};
    memcpy(port.shape, type->shape, type->rank * sizeof *type->shape);
    return port;
}

static Element border_element(const Emitter *e, Element element) {
    if (element != e->real) return element;
    return e->options->f32_border ? ELEMENT_F32 : ELEMENT_F16;
}

static Code emit_inputs(Emitter *e, NpuModel *model) {
    for (uint32_t k = 0; k < e->block->n_in; k++) {
        ValueId value = e->ir->regs[e->block->in[k]].value;
        WireType inside = emit_value_type(e, value), border = inside;
        Wire wire;
        fold_rank(&border);
        border.element = border_element(e, inside.element);
        model->in[model->n_in++] = port_of(e, value, &border);
        TRY(emit_parameter(e, &border, &wire));
        TRY(emit_convert(e, wire, inside.element, &wire));
        TRY(emit_reshape(e, wire, inside.rank, inside.shape, &wire));
        e->wires[value] = wire;
    }
    return CODE_OK;
}

/* Outputs have tensors of their own, whose names are theirs alone: an input that is an output too, or a value that is
 * two outputs, goes through a reshape to its own shape. */
static Code own_tensor(Emitter *e, Wire *wire) {
    const Layers *l = e->layers;
    bool shared = false;
    for (uint32_t k = 0; k < l->n_outputs; k++) shared = shared || l->outputs[k] == *wire;
    for (uint32_t k = 0; k < l->n_inputs; k++) shared = shared || l->inputs[k] == *wire;
    for (uint32_t k = 0; k < l->n_args; k++) shared = shared || l->args[k].wire == *wire;
    if (!shared) return CODE_OK;
    WireType type = *wire_type(e, *wire);
    Wire target;
    TRY(emit_ints(e, type.shape, type.rank, &target));
    return emit_layer(e, "Reshape", 1, (Wire[]){*wire, target}, 2, &type, 1, wire, "special_zero=\"false\"");
}

static Code emit_outputs(Emitter *e, NpuModel *model) {
    for (uint32_t k = 0; k < e->block->n_out; k++) {
        ValueId value = e->ir->regs[e->block->out[k]].value;
        Wire wire;
        TRY(emit_value(e, value, &wire));
        WireType border = *wire_type(e, wire);
        fold_rank(&border);
        TRY(emit_reshape(e, wire, border.rank, border.shape, &wire));
        TRY(emit_convert(e, wire, border_element(e, border.element), &wire));
        model->out[model->n_out++] = port_of(e, value, &border);
        TRY(own_tensor(e, &wire));
        TRY(emit_model_result(e, wire));
    }
    return CODE_OK;
}

static Code emit_instr(Emitter *e, uint32_t index) {
    if (index >= e->ir->n_instrs) return fail(e->ctx, CODE_INVALID, "a block with instruction %u", index);
    e->instr = &e->ir->instrs[index];
    const Node *node = e->instr->node;
    EmitFn fn = emit_fn(node->op);
    Code code = fn ? fn(e) : fail(e->ctx, CODE_UNSUPPORTED, "the NPU does not take it: %s", emit_reason(node->op));
    if (code != CODE_OK) {
        fail_prefix(e->ctx, "%s%s%s", node->source >= 0 ? e->g->sources[node->source] : "",
                    node->source >= 0 ? ": " : "", op_info(node->op)->name);
        return code;
    }
    e->instr = NULL;
    return CODE_OK;
}

static Code emit_model(Emitter *e, NpuModel *model) {
    const NpuBlock *block = e->block;
    Layers layers = {0};
    e->layers = &layers;
    TRY(ARENA_NEW(e->ctx, e->scratch, e->g->n_values, &e->wires));
    memset(e->wires, 0xff, e->g->n_values * sizeof *e->wires); /* WIRE_NONE */
    TRY(ARENA_NEW(e->ctx, e->scratch, e->g->n_constants, &e->is_argument));
    for (uint32_t k = 0; k < block->n_weights; k++) {
        if (block->weights[k] >= e->g->n_constants)
            return fail(e->ctx, CODE_INVALID, "a block with constant %u", block->weights[k]);
        e->is_argument[block->weights[k]] = true;
    }
    TRY(ARENA_NEW(e->ctx, e->scratch, block->n_in, &layers.inputs));
    TRY(ARENA_NEW(e->ctx, e->scratch, block->n_out, &layers.outputs));
    TRY(ARENA_NEW(e->ctx, e->arena, block->n_in, &model->in));
    TRY(ARENA_NEW(e->ctx, e->arena, block->n_out, &model->out));
    TRY(emit_inputs(e, model));
    for (uint32_t i = 0; i < block->n_instrs; i++) TRY(emit_instr(e, block->instrs[i]));
    TRY(emit_outputs(e, model));
    return emit_finish(e, model);
}

Code npu_emit(Context *ctx, Arena *arena, const Npuir *ir, const NpuBlock *block, const EmitOptions *options,
              NpuModel **out) {
    Arena scratch;
    NpuModel *model;
    *out = NULL;
    TRY(ARENA_NEW(ctx, arena, 1, &model));
    text_init(&model->xml);
    arena_init(&scratch);
    Emitter e = {
        .ctx = ctx, .arena = arena, .scratch = &scratch, .ir = ir, .g = ir->graph, .block = block, .options = options};
    e.real = options->f32_weights ? ELEMENT_F32 : ELEMENT_F16;
    Code code = emit_model(&e, model);
    arena_destroy(&scratch);
    if (code == CODE_OK)
        *out = model;
    else
        npu_model_destroy(model);
    return code;
}

void npu_model_destroy(NpuModel *model) {
    if (model) text_destroy(&model->xml);
}
