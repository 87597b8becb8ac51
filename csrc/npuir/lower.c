/* Lowering: a node becomes an instruction, a view becomes a register that looks into its operand's buffer.
 *
 * Conventions that the executor relies on:
 * - Instr.node is never NULL. A copy that lowering inserts (before a kernel that wants another layout, a reshape that
 *   no strides express, or an output that is a view) is a `contiguous` instruction with a node of its own, which
 * carries the source of the node that asked for it; operand and result of that node are the copied value.
 * - A `contiguous` node whose operand already lies as asked makes no instruction, only another register: the graph is
 *   functional, so nothing can tell the copy from the original. With host calls that have effects it does copy.
 * - Results of host calls are planned row major: the callee must hand over such memory. Unused ones have REG_NONE.
 * - An opaque graph input is a SPACE_OBJECT buffer, found through ir->inputs.
 * - A graph output is written directly by the instruction that makes it if its register is the whole of an arena buffer
 *   in row-major order (a reshape of it counts), else copied into the output's buffer at the end. */
#include <string.h>

#include "npuir/npuir.h"
#include "npuir/place.h"
#include "npuir/view.h"

typedef struct Lower {
    Context *ctx;
    Arena *arena; /* of the result */
    const Graph *g;
    const LowerOptions *options;
    Npuir *ir;
    Placement placement;
    RegId *reg;         /* of each value */
    RegId *copy;        /* of each register: its row-major copy, REG_NONE before */
    BufferId *constant; /* buffer of each graph constant, BUFFER_NONE before */
    uint32_t *uses;     /* of each value, outputs included */
    bool effects;       /* there are host calls with effects */
    uint32_t cap_instrs, cap_regs, cap_buffers;
} Lower;

/* --- growing arrays ----------------------------------------------------------------------------------------------- */
static Code grow(Lower *l, uint32_t count, uint32_t *capacity, size_t size, void **items) {
    if (count < *capacity) return CODE_OK;
    uint32_t larger = *capacity * 2;
    void *moved;
    if (count >= INT32_MAX) return fail(l->ctx, CODE_UNSUPPORTED, "more than 2^31 instructions, registers or buffers");
    TRY(arena_array(l->ctx, l->arena, larger, size, &moved));
    memcpy(moved, *items, count * size);
    *items = moved;
    *capacity = larger;
    return CODE_OK;
}

static Code add_buffer(Lower *l, Space space, Device device, uint32_t index, int64_t bytes, BufferId *out) {
    Npuir *ir = l->ir;
    TRY(grow(l, ir->n_buffers, &l->cap_buffers, sizeof *ir->buffers, (void **)&ir->buffers));
    *out = ir->n_buffers++;
    ir->buffers[*out] = (Buffer){.space = space, .device = device, .index = index, .bytes = bytes, .offset = -1};
    return CODE_OK;
}

static Code add_register(Lower *l, DType dtype, const View *v, BufferId buffer, ValueId value, bool view, RegId *out) {
    Npuir *ir = l->ir;
    uint32_t capacity = l->cap_regs;
    TRY(grow(l, ir->n_regs, &l->cap_regs, sizeof *ir->regs, (void **)&ir->regs));
    TRY(grow(l, ir->n_regs, &capacity, sizeof *l->copy, (void **)&l->copy));
    int64_t *numbers;
    TRY(ARENA_NEW(l->ctx, l->arena, 2 * v->rank, &numbers));
    memcpy(numbers, v->shape, v->rank * sizeof *numbers);
    memcpy(numbers + v->rank, v->strides, v->rank * sizeof *numbers);
    *out = ir->n_regs++;
    l->copy[*out] = REG_NONE;
    ir->regs[*out] = (Register){dtype, v->rank, numbers, numbers + v->rank, v->offset, buffer, value, view};
    return CODE_OK;
}

static View register_view(const Register *r) {
    View v = {.rank = r->rank, .offset = r->offset};
    memcpy(v.shape, r->shape, r->rank * sizeof *v.shape);
    memcpy(v.strides, r->strides, r->rank * sizeof *v.strides);
    return v;
}

static View dense_view(const Value *value, const Attr *order) {
    View v = {.rank = value->rank};
    memcpy(v.shape, value->shape, value->rank * sizeof *v.shape);
    bool ordered = order && order->ints.count == value->rank;
    view_dense_strides(v.rank, v.shape, ordered ? order->ints.items : NULL, v.strides);
    return v;
}

static Code value_bytes(Lower *l, const Value *value, int64_t *out) {
    int64_t count = view_count(value->rank, value->shape);
    *out = 0;
    if (value->dtype == DTYPE_OBJECT) return CODE_OK;
    if (count < 0 || __builtin_mul_overflow(count, (int64_t)dtype_size(value->dtype), out))
        return fail(l->ctx, CODE_UNSUPPORTED, "a tensor of more than 2^63 bytes");
    return CODE_OK;
}

/* The NPU's compiler takes its operands as they are written; its results are row major, since they may cross its
 * border. */
static KernelTraits traits_of(const Lower *l, Op op, Device device) {
    if (device == DEVICE_NPU && !l->options->npu_on_host) return (KernelTraits){0};
    if (l->options->traits) return l->options->traits(op);
    return (KernelTraits){.contiguous = UINT32_MAX}; /* nothing is known: row major everywhere */
}

/* --- instructions ------------------------------------------------------------------------------------------------- */
static Code add_instr(Lower *l, Op op, Device device, const Node *node, uint32_t n_in, uint32_t n_out, Instr **out) {
    Npuir *ir = l->ir;
    TRY(grow(l, ir->n_instrs, &l->cap_instrs, sizeof *ir->instrs, (void **)&ir->instrs));
    Instr *instr = &ir->instrs[ir->n_instrs];
    *instr = (Instr){.op = op, .device = device, .n_in = n_in, .n_out = n_out, .node = node, .scratch = BUFFER_NONE};
    TRY(ARENA_NEW(l->ctx, l->arena, n_in, &instr->in));
    TRY(ARENA_NEW(l->ctx, l->arena, n_out, &instr->out));
    if (l->options->scratch && (device == DEVICE_CPU || l->options->npu_on_host)) {
        instr->scratch_bytes = l->options->scratch(l->g, node, l->options->threads);
        if (instr->scratch_bytes < 0)
            return fail(l->ctx, CODE_INTERNAL, "%s: negative scratch size", op_info(op)->name);
        if (l->options->columns && device == DEVICE_CPU) instr->columns = l->options->columns(l->g, node);
        if (instr->scratch_bytes > 0) TRY(add_buffer(l, SPACE_ARENA, device, 0, instr->scratch_bytes, &instr->scratch));
    }
    ir->n_instrs++;
    *out = instr;
    return CODE_OK;
}

static Code copy_node(Lower *l, ValueId value, int32_t source, const Node **out) {
    Node *node;
    TRY(ARENA_NEW(l->ctx, l->arena, 1, &node));
    *node = (Node){.op = OP_contiguous,
                   .n_operands = 1,
                   .n_results = 1,
                   .first_result = value,
                   .source = source,
                   .prev = NODE_NONE,
                   .next = NODE_NONE};
    TRY(ARENA_NEW(l->ctx, l->arena, 1, &node->operands));
    TRY(ARENA_NEW(l->ctx, l->arena, op_info(OP_contiguous)->n_attrs, &node->attrs));
    node->operands[0] = value;
    *out = node;
    return CODE_OK;
}

/* A row-major copy of a register in new memory. */
static Code add_copy(Lower *l, RegId from, Device device, Space space, uint32_t index, int32_t source, RegId *out) {
    Register r = l->ir->regs[from];
    const Value *value = graph_value(l->g, r.value);
    View v = dense_view(value, NULL);
    int64_t bytes;
    BufferId buffer;
    const Node *node;
    Instr *instr;
    TRY(value_bytes(l, value, &bytes));
    TRY(copy_node(l, r.value, source, &node));
    if (device == DEVICE_NPU && capability(l->options->target, device, l->g, node)) device = DEVICE_CPU;
    TRY(add_buffer(l, space, device, index, bytes, &buffer));
    TRY(add_register(l, r.dtype, &v, buffer, r.value, false, out));
    TRY(add_instr(l, OP_contiguous, device, node, 1, 1, &instr));
    instr->in[0] = from;
    instr->out[0] = *out;
    return CODE_OK;
}

/* `*reg` becomes its row-major copy, which is made once. */
static Code use_copy(Lower *l, Device device, int32_t source, RegId *reg) {
    RegId from = *reg;
    if (l->copy[from] == REG_NONE) {
        RegId made;
        TRY(add_copy(l, from, device, SPACE_ARENA, 0, source, &made));
        l->copy[from] = made;
    }
    *reg = l->copy[from];
    return CODE_OK;
}

/* --- one node ----------------------------------------------------------------------------------------------------- */
static Code lower_input(Lower *l, const Node *node) {
    const Value *value = graph_value(l->g, node->first_result);
    View v = dense_view(value, NULL);
    uint32_t index = (uint32_t)node_int(node, ATTR_index);
    bool object = value->dtype == DTYPE_OBJECT;
    int64_t bytes;
    BufferId buffer;
    TRY(value_bytes(l, value, &bytes));
    TRY(add_buffer(l, object ? SPACE_OBJECT : SPACE_INPUT, DEVICE_CPU, object ? l->ir->n_objects++ : index, bytes,
                   &buffer));
    TRY(add_register(l, value->dtype, &v, buffer, node->first_result, false, &l->reg[node->first_result]));
    l->ir->inputs[index] = l->reg[node->first_result];
    return CODE_OK;
}

static Code lower_constant(Lower *l, const Node *node) {
    uint32_t index = (uint32_t)node_int(node, ATTR_index);
    const Constant *c = &l->g->constants[index];
    View v = {.rank = c->rank};
    memcpy(v.shape, c->shape, c->rank * sizeof *v.shape);
    memcpy(v.strides, c->strides, c->rank * sizeof *v.strides);
    if (l->constant[index] == BUFFER_NONE)
        TRY(add_buffer(l, SPACE_CONSTANT, DEVICE_CPU, index, c->bytes, &l->constant[index]));
    return add_register(l, c->dtype, &v, l->constant[index], node->first_result, false, &l->reg[node->first_result]);
}

static Code lower_view(Lower *l, NodeId id, const Node *node) {
    const Value *value = graph_value(l->g, node->first_result);
    RegId from = l->reg[node->operands[0]];
    View in = register_view(&l->ir->regs[from]), out = {0};
    switch (node->op) {
    case OP_reshape:
        if (!view_reshape(&in, value->rank, value->shape, &out)) {
            TRY(use_copy(l, (Device)l->placement.device[id], node->source, &from));
            in = register_view(&l->ir->regs[from]);
            view_reshape(&in, value->rank, value->shape, &out);
        }
        break;
    case OP_permute: view_permute(&in, node_attr(node, ATTR_dims)->ints.items, &out); break;
    case OP_expand: view_expand(&in, value->rank, value->shape, &out); break;
    case OP_slice:
        view_slice(&in, node_int(node, ATTR_dim), node_int(node, ATTR_start), node_int(node, ATTR_end),
                   node_int(node, ATTR_step), &out);
        break;
    default: return fail(l->ctx, CODE_INTERNAL, "view operator %s is not lowered", op_info(node->op)->name);
    }
    const Register *r = &l->ir->regs[from];
    return add_register(l, r->dtype, &out, r->buffer, node->first_result, true, &l->reg[node->first_result]);
}

/* A `contiguous` node that would copy a register onto its like. */
static Code skip_contiguous(Lower *l, const Node *node, bool *skipped) {
    const Value *value = graph_value(l->g, node->first_result);
    const Register *r = &l->ir->regs[l->reg[node->operands[0]]];
    View have = register_view(r), want = dense_view(value, node_attr(node, ATTR_order));
    *skipped = !l->effects && r->dtype != DTYPE_OBJECT;
    for (int d = 0; d < want.rank; d++) {
        if (want.shape[d] != 1 && have.strides[d] != want.strides[d]) *skipped = false;
    }
    if (!*skipped) return CODE_OK;
    return add_register(l, r->dtype, &have, r->buffer, node->first_result, true, &l->reg[node->first_result]);
}

static Code lower_operands(Lower *l, const Node *node, Device device, const KernelTraits *traits, RegId *in) {
    for (uint32_t k = 0; k < node->n_operands; k++) {
        in[k] = node->operands[k] == VALUE_NONE ? REG_NONE : l->reg[node->operands[k]];
        if (in[k] == REG_NONE || l->ir->regs[in[k]].dtype == DTYPE_OBJECT) continue;
        const Register *r = &l->ir->regs[in[k]];
        bool copy = trait_bit(traits->contiguous, k) && !view_is_row_major(r->rank, r->shape, r->strides);
        copy = copy || (trait_bit(traits->unit_inner, k) && !view_is_unit_inner(r->rank, r->shape, r->strides));
        if (copy) TRY(use_copy(l, device, node->source, &in[k]));
    }
    return CODE_OK;
}

static Code lower_result(Lower *l, const Node *node, Device device, const KernelTraits *traits, uint32_t k,
                         RegId *out) {
    ValueId v = node_result(node, k);
    const Value *value = graph_value(l->g, v);
    bool norm = node->op == OP_layer_norm || node->op == OP_rms_norm;
    *out = REG_NONE;
    if (l->uses[v] == 0 && (node->op == OP_host || (norm && k == 1))) return CODE_OK;
    bool ordered = k == 0 && traits->strided_out && node_has_attr(node, ATTR_order);
    View view = dense_view(value, ordered ? node_attr(node, ATTR_order) : NULL);
    Space space = value->dtype == DTYPE_OBJECT ? SPACE_OBJECT : node->op == OP_host ? SPACE_HOST : SPACE_ARENA;
    uint32_t index = space == SPACE_OBJECT ? l->ir->n_objects++ : space == SPACE_HOST ? l->ir->n_host++ : 0;
    int64_t bytes;
    BufferId buffer;
    TRY(value_bytes(l, value, &bytes));
    TRY(add_buffer(l, space, device, index, bytes, &buffer));
    TRY(add_register(l, value->dtype, &view, buffer, v, false, out));
    l->reg[v] = *out;
    return CODE_OK;
}

static Code lower_node(Lower *l, NodeId id) {
    const Node *node = graph_node(l->g, id);
    if (node->op == OP_input) return lower_input(l, node);
    if (node->op == OP_constant) return lower_constant(l, node);
    if (op_is(node->op, VIEW)) return lower_view(l, id, node);
    if (node->op == OP_contiguous) {
        bool skipped;
        TRY(skip_contiguous(l, node, &skipped));
        if (skipped) return CODE_OK;
    }
    Device device = (Device)l->placement.device[id];
    /* Host calls take any strides; their results are told by the callee. */
    KernelTraits traits = node->op == OP_host ? (KernelTraits){0} : traits_of(l, node->op, device);
    RegId *in, *out;
    Instr *instr;
    TRY(ARENA_NEW(l->ctx, l->arena, node->n_operands, &in));
    TRY(ARENA_NEW(l->ctx, l->arena, node->n_results, &out));
    TRY(lower_operands(l, node, device, &traits, in));
    for (uint32_t k = 0; k < node->n_results; k++) TRY(lower_result(l, node, device, &traits, k, &out[k]));
    TRY(add_instr(l, node->op, device, node, node->n_operands, node->n_results, &instr));
    instr->in = in;
    instr->out = out;
    return CODE_OK;
}

/* --- outputs ------------------------------------------------------------------------------------------------------ */
static Code lower_output(Lower *l, uint32_t index) {
    ValueId v = l->g->outputs[index];
    RegId reg = l->reg[v];
    const Register *r = &l->ir->regs[reg];
    l->ir->outputs[index] = reg;
    if (r->dtype == DTYPE_OBJECT) return CODE_OK;
    Buffer *buffer = &l->ir->buffers[r->buffer];
    int64_t bytes;
    TRY(value_bytes(l, graph_value(l->g, v), &bytes));
    bool whole = r->offset == 0 && bytes == buffer->bytes && view_is_row_major(r->rank, r->shape, r->strides);
    if (whole && buffer->space == SPACE_ARENA) {
        buffer->space = SPACE_OUTPUT;
        buffer->index = index;
        return CODE_OK;
    }
    const Node *def = value_node(l->g, v);
    return add_copy(l, reg, (Device)l->placement.device[l->g->values[v].def], SPACE_OUTPUT, index, def->source,
                    &l->ir->outputs[index]);
}

static Code count_uses(Lower *l) {
    const Graph *g = l->g;
    TRY(ARENA_NEW(l->ctx, l->arena, g->n_values, &l->uses));
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        for (uint32_t k = 0; k < node->n_operands; k++) {
            if (node->operands[k] != VALUE_NONE) l->uses[node->operands[k]]++;
        }
        l->effects = l->effects || (node->op == OP_host && node_int(node, ATTR_effect));
    }
    for (uint32_t i = 0; i < g->n_outputs; i++) l->uses[g->outputs[i]]++;
    return CODE_OK;
}

Code npuir_lower(Context *ctx, Arena *arena, const Graph *g, const LowerOptions *options, Npuir **out) {
    Lower l = {.ctx = ctx, .arena = arena, .g = g, .options = options};
    Npuir *ir;
    *out = NULL;
    TRY(ARENA_NEW(ctx, arena, 1, &ir));
    l.ir = ir;
    ir->arena = arena;
    ir->graph = g;
    ir->n_inputs = g->n_inputs;
    ir->n_outputs = g->n_outputs;
    strncpy(ir->target, options->target->name, sizeof ir->target - 1);
    l.cap_instrs = g->n_nodes + g->n_outputs + 16;
    l.cap_regs = g->n_values + g->n_outputs + 16;
    l.cap_buffers = l.cap_regs;
    TRY(ARENA_NEW(ctx, arena, l.cap_instrs, &ir->instrs));
    TRY(ARENA_NEW(ctx, arena, l.cap_regs, &ir->regs));
    TRY(ARENA_NEW(ctx, arena, l.cap_buffers, &ir->buffers));
    TRY(ARENA_NEW(ctx, arena, g->n_inputs, &ir->inputs));
    TRY(ARENA_NEW(ctx, arena, g->n_outputs, &ir->outputs));
    TRY(ARENA_NEW(ctx, arena, l.cap_regs, &l.copy));
    TRY(ARENA_NEW(ctx, arena, g->n_values, &l.reg));
    TRY(ARENA_NEW(ctx, arena, g->n_constants, &l.constant));
    memset(l.constant, 0xff, g->n_constants * sizeof *l.constant); /* BUFFER_NONE, REG_NONE */
    memset(ir->inputs, 0xff, g->n_inputs * sizeof *ir->inputs);
    TRY(count_uses(&l));
    TRY(place_nodes(ctx, arena, g, options->target, &l.placement));
    GRAPH_EACH(g, id) {
        Code code = lower_node(&l, id);
        if (code == CODE_OK) continue;
        int32_t source = graph_node(g, id)->source;
        if (source >= 0) fail_prefix(ctx, "%s", g->sources[source]);
        return code;
    }
    for (uint32_t i = 0; i < g->n_outputs; i++) TRY(lower_output(&l, i));
    TRY(ARENA_NEW(ctx, arena, ir->n_instrs, &ir->order));
    for (uint32_t i = 0; i < ir->n_instrs; i++) ir->order[i] = i;
    *out = ir;
    return CODE_OK;
}
