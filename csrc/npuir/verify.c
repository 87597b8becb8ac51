/* Everything that must hold of NPUIR, after lowering, parsing, scheduling and allocation. */
#include <string.h>

#include "npuir/npuir.h"
#include "npuir/view.h"

#define BAD(...) return fail(v->ctx, CODE_INVALID, __VA_ARGS__)

typedef struct Verifier {
    Context *ctx;
    const Npuir *ir;
    const Target *target;
    uint32_t *writer; /* of each buffer: the instruction that makes it; FOREIGN: it is there from the start */
    uint32_t *place;  /* of each instruction: its position in the order */
} Verifier;
enum { NOBODY = UINT32_MAX, FOREIGN = UINT32_MAX - 1 };

static Code verify_buffer(Verifier *v, BufferId id) {
    const Npuir *ir = v->ir;
    const Buffer *b = &ir->buffers[id];
    uint32_t limit = 0;
    switch (b->space) {
    case SPACE_ARENA: limit = UINT32_MAX; break;
    case SPACE_CONSTANT: limit = ir->graph->n_constants; break;
    case SPACE_INPUT: limit = ir->n_inputs; break;
    case SPACE_OUTPUT: limit = ir->n_outputs; break;
    case SPACE_HOST: limit = ir->n_host; break;
    case SPACE_OBJECT: limit = ir->n_objects; break;
    }
    if (b->index >= limit) BAD("buffer b%u: no such space or index", id);
    if (b->device >= DEVICE_COUNT || (b->device == DEVICE_NPU && !v->target->npu))
        BAD("buffer b%u: no such device", id);
    if (b->bytes < 0 || b->offset < -1) BAD("buffer b%u: negative size or offset", id);
    if (b->space == SPACE_CONSTANT && b->bytes > ir->graph->constants[b->index].bytes)
        BAD("buffer b%u: larger than constant %u", id, b->index);
    bool there = b->space == SPACE_CONSTANT || b->space == SPACE_INPUT;
    v->writer[id] = there ? FOREIGN : NOBODY;
    return CODE_OK;
}

static Code verify_register(Verifier *v, RegId id) {
    const Npuir *ir = v->ir;
    const Register *r = &ir->regs[id];
    if (r->buffer >= ir->n_buffers) BAD("register %%r%u: no such buffer", id);
    if (r->dtype >= DTYPE_COUNT || r->rank > MAX_RANK) BAD("register %%r%u: no valid type", id);
    const Buffer *b = &ir->buffers[r->buffer];
    if ((r->dtype == DTYPE_OBJECT) != (b->space == SPACE_OBJECT))
        BAD("register %%r%u: objects have a space of their own", id);
    if (r->value != VALUE_NONE) {
        if (r->value >= ir->graph->n_values) BAD("register %%r%u: no such value", id);
        const Value *value = graph_value(ir->graph, r->value);
        if (value->dtype != r->dtype || value->rank != r->rank ||
            memcmp(value->shape, r->shape, r->rank * sizeof *r->shape))
            BAD("register %%r%u: not of the type of value %%%u", id, r->value);
    }
    if (r->dtype == DTYPE_OBJECT) return CODE_OK;
    int64_t extent = view_extent(r->rank, r->shape, r->strides), end;
    if (extent < 0 || r->offset < 0 || view_count(r->rank, r->shape) < 0) BAD("register %%r%u: malformed view", id);
    if (extent == 0) return CODE_OK;
    if (__builtin_add_overflow(r->offset, extent, &end) || end > b->bytes / (int64_t)dtype_size(r->dtype))
        BAD("register %%r%u: reaches beyond its buffer b%u", id, r->buffer);
    return CODE_OK;
}

static Code verify_result(Verifier *v, uint32_t index, RegId reg) {
    const Npuir *ir = v->ir;
    const Register *r = &ir->regs[reg];
    Space space = ir->buffers[r->buffer].space;
    bool host = ir->instrs[index].op == OP_host;
    bool fits = host ? space == SPACE_HOST || space == SPACE_OBJECT : space == SPACE_ARENA || space == SPACE_OUTPUT;
    if (!fits) BAD("instruction %u: writes %%r%u, which lies elsewhere", index, reg);
    if (r->view) BAD("instruction %u: writes view %%r%u", index, reg);
    if (v->writer[r->buffer] != NOBODY) BAD("instruction %u: buffer b%u has a writer already", index, r->buffer);
    v->writer[r->buffer] = index;
    return CODE_OK;
}

static Code verify_instr(Verifier *v, uint32_t index) {
    const Npuir *ir = v->ir;
    const Instr *i = &ir->instrs[index];
    if (i->op >= OP_COUNT || op_is(i->op, VIEW) || i->op == OP_input || i->op == OP_constant)
        BAD("instruction %u: not an operator that runs", index);
    const OpInfo *info = op_info(i->op);
    if (i->n_in < info->min_operands || (info->max_operands != ANY && i->n_in > info->max_operands))
        BAD("instruction %u (%s): %u operands", index, info->name, i->n_in);
    if (info->results != ANY && i->n_out != info->results)
        BAD("instruction %u (%s): %u results", index, info->name, i->n_out);
    if (!i->node || i->node->op != i->op) BAD("instruction %u (%s): not the operator of its node", index, info->name);
    if (i->device >= DEVICE_COUNT) BAD("instruction %u (%s): no such device", index, info->name);
    const char *reason = capability(v->target, i->device, ir->graph, i->node);
    if (reason) BAD("instruction %u (%s): not on the %s: %s", index, info->name, device_name(i->device), reason);
    for (uint32_t k = 0; k < i->n_in; k++) {
        if (i->in[k] == REG_NONE) continue;
        if (i->in[k] >= ir->n_regs) BAD("instruction %u (%s): no such register", index, info->name);
    }
    for (uint32_t k = 0; k < i->n_out; k++) {
        if (i->out[k] == REG_NONE) continue;
        if (i->out[k] >= ir->n_regs) BAD("instruction %u (%s): no such register", index, info->name);
        TRY(verify_result(v, index, i->out[k]));
        if (ir->buffers[ir->regs[i->out[k]].buffer].device != i->device)
            BAD("instruction %u (%s): result in memory of another device", index, info->name);
    }
    if (i->inplace && (i->inplace_operand >= i->n_in || i->in[i->inplace_operand] == REG_NONE || i->n_out == 0 ||
                       i->out[0] == REG_NONE))
        BAD("instruction %u (%s): in place of nothing", index, info->name);
    if (i->scratch == BUFFER_NONE) {
        if (i->scratch_bytes != 0) BAD("instruction %u (%s): scratch without a buffer", index, info->name);
        return CODE_OK;
    }
    if (i->scratch >= ir->n_buffers || ir->buffers[i->scratch].space != SPACE_ARENA ||
        ir->buffers[i->scratch].bytes < i->scratch_bytes || v->writer[i->scratch] != NOBODY)
        BAD("instruction %u (%s): its scratch is no buffer of its own", index, info->name);
    v->writer[i->scratch] = index;
    return CODE_OK;
}

static bool ready(const Verifier *v, RegId reg, uint32_t position) {
    uint32_t writer = v->writer[v->ir->regs[reg].buffer];
    if (writer == FOREIGN) return true;
    return writer != NOBODY && v->place[writer] < position;
}

static Code verify_order(Verifier *v) {
    const Npuir *ir = v->ir;
    uint32_t last_effect = 0;
    memset(v->place, 0xff, ir->n_instrs * sizeof *v->place);
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        if (ir->order[p] >= ir->n_instrs || v->place[ir->order[p]] != UINT32_MAX) BAD("order: not a permutation");
        v->place[ir->order[p]] = p;
    }
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        const Instr *i = &ir->instrs[ir->order[p]];
        for (uint32_t k = 0; k < i->n_in; k++) {
            if (i->in[k] != REG_NONE && !ready(v, i->in[k], p))
                BAD("order: instruction %u (%s) reads %%r%u before it is made", ir->order[p], op_info(i->op)->name,
                    i->in[k]);
        }
        if (i->op != OP_host || !node_int(i->node, ATTR_effect)) continue;
        if (ir->order[p] < last_effect) BAD("order: host calls with effects have changed places");
        last_effect = ir->order[p];
    }
    return CODE_OK;
}

bool npuir_may_follow(const Npuir *ir, const Instr *instr, uint32_t k, const Instr *sibling) {
    if (instr->op != sibling->op || !op_is(instr->op, CONTRACTION) || k < contraction_operands(instr->op)) return false;
    const Register *read = &ir->regs[instr->in[k]], *out = &ir->regs[instr->out[0]];
    const Register *made = &ir->regs[sibling->out[0]];
    if (read->rank != out->rank || made->rank != out->rank || read->offset != made->offset) return false;
    return memcmp(read->shape, out->shape, out->rank * sizeof *out->shape) == 0 &&
           memcmp(made->shape, out->shape, out->rank * sizeof *out->shape) == 0 &&
           memcmp(read->strides, made->strides, out->rank * sizeof *out->strides) == 0;
}

/* Members of a group run in any order, but for one that follows a sibling. */
static Code verify_group(Verifier *v, uint32_t begin, uint32_t end) {
    const Npuir *ir = v->ir;
    if (end - begin > NPUIR_GROUP_MOST) BAD("group %u: too large", ir->instrs[ir->order[begin]].group);
    for (uint32_t p = begin; p < end; p++) {
        const Instr *i = &ir->instrs[ir->order[p]];
        uint32_t followed = UINT32_MAX;
        if (i->device != DEVICE_CPU || !op_is(i->op, CONTRACTION) || i->inplace || i->n_out != 1 ||
            i->out[0] == REG_NONE || ir->buffers[ir->regs[i->out[0]].buffer].space != SPACE_ARENA)
            BAD("group %u: instruction %u (%s) must run alone", i->group, ir->order[p], op_info(i->op)->name);
        for (uint32_t k = 0; k < i->n_in; k++) {
            uint32_t maker = i->in[k] == REG_NONE ? NOBODY : v->writer[ir->regs[i->in[k]].buffer];
            if (maker == NOBODY || maker == FOREIGN || v->place[maker] < begin) continue;
            if (!npuir_may_follow(ir, i, k, &ir->instrs[maker]) || (followed != UINT32_MAX && followed != maker))
                BAD("group %u: instruction %u (%s) needs more of %%r%u than its part", i->group, ir->order[p],
                    op_info(i->op)->name, i->in[k]);
            followed = maker;
        }
    }
    return CODE_OK;
}

static Code verify_groups(Verifier *v) {
    for (uint32_t p = 0, end; p < v->ir->n_instrs; p = end) {
        end = npuir_group_end(v->ir, v->ir->order, p);
        if (end - p > 1) TRY(verify_group(v, p, end));
    }
    return CODE_OK;
}

static Code verify_ends(Verifier *v) {
    const Npuir *ir = v->ir;
    for (uint32_t i = 0; i < ir->n_inputs; i++) {
        if (ir->inputs[i] == REG_NONE) continue;
        if (ir->inputs[i] >= ir->n_regs) BAD("input %u: no such register", i);
        BufferId b = ir->regs[ir->inputs[i]].buffer;
        bool object = ir->buffers[b].space == SPACE_OBJECT;
        if (!object && (ir->buffers[b].space != SPACE_INPUT || ir->buffers[b].index != i))
            BAD("input %u: other memory", i);
        if (object && v->writer[b] != NOBODY) BAD("input %u: its object is used twice", i);
        v->writer[b] = FOREIGN;
    }
    return CODE_OK;
}

static Code verify_outputs(Verifier *v) {
    const Npuir *ir = v->ir;
    for (uint32_t i = 0; i < ir->n_outputs; i++) {
        if (ir->outputs[i] >= ir->n_regs) BAD("output %u: no such register", i);
        const Register *r = &ir->regs[ir->outputs[i]];
        const Buffer *b = &ir->buffers[r->buffer];
        if (v->writer[r->buffer] == NOBODY) BAD("output %u: nobody makes it", i);
        if (b->space == SPACE_OBJECT) continue;
        if (b->space != SPACE_OUTPUT || b->index != i) BAD("output %u: other memory", i);
        if (r->offset != 0 || !view_is_row_major(r->rank, r->shape, r->strides)) BAD("output %u: not row major", i);
    }
    return CODE_OK;
}

static Code verify(Verifier *v, Arena *scratch) {
    const Npuir *ir = v->ir;
    v->target = target_find(ir->target);
    if (!v->target) BAD("unknown target");
    TRY(ARENA_NEW(v->ctx, scratch, ir->n_buffers, &v->writer));
    TRY(ARENA_NEW(v->ctx, scratch, ir->n_instrs, &v->place));
    for (BufferId b = 0; b < ir->n_buffers; b++) TRY(verify_buffer(v, b));
    for (RegId r = 0; r < ir->n_regs; r++) TRY(verify_register(v, r));
    TRY(verify_ends(v));
    for (uint32_t i = 0; i < ir->n_instrs; i++) TRY(verify_instr(v, i));
    TRY(verify_order(v));
    TRY(verify_groups(v));
    return verify_outputs(v);
}

Code npuir_verify(Context *ctx, const Npuir *ir) {
    Verifier v = {.ctx = ctx, .ir = ir};
    Arena scratch;
    arena_init(&scratch);
    Code code = verify(&v, &scratch);
    arena_destroy(&scratch);
    return code;
}
