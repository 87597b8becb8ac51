/* Buffer allocation: which buffers share memory by in-place reuse, then where each block of memory lies (offsets.c). */
#include "alloc/alloc.h"

#include <stdlib.h>
#include <string.h>

#include "alloc/offsets.h"
#include "npuir/live.h"

enum { NO_BLOCK = UINT32_MAX };

typedef struct Planner {
    Context *ctx;
    Arena scratch;
    Npuir *ir;
    TraitsFn traits;
    Lifetimes life;
    Block *blocks;   /* in order of their first position; one or more buffers each, by in-place reuse */
    uint8_t *device; /* of each block */
    uint32_t n_blocks;
    uint32_t *block; /* of each buffer */
} Planner;

static bool same_layout(const Register *a, const Register *b) {
    if (a->dtype != b->dtype || a->rank != b->rank || a->offset != b->offset) return false;
    return memcmp(a->shape, b->shape, a->rank * sizeof *a->shape) == 0 &&
           memcmp(a->strides, b->strides, a->rank * sizeof *a->strides) == 0;
}

/* Result 0 may be written over operand k when that is all of its buffer, in the same layout, used here for the last
 * time; where the buffer is an operand twice, the kernel must take both, and both in that layout. */
static bool can_reuse(const Planner *p, const Instr *instr, uint32_t position, uint32_t bits, uint32_t k) {
    const Npuir *ir = p->ir;
    if (!trait_bit(bits, k) || instr->in[k] == REG_NONE) return false;
    const Register *from = &ir->regs[instr->in[k]], *to = &ir->regs[instr->out[0]];
    const Buffer *source = &ir->buffers[from->buffer], *target = &ir->buffers[to->buffer];
    if (source->space != SPACE_ARENA || target->space != SPACE_ARENA || source->device != target->device) return false;
    if (source->bytes != target->bytes || source->bytes == 0 || !same_layout(from, to)) return false;
    if (p->life.last[from->buffer] != position || p->block[from->buffer] == NO_BLOCK) return false;
    for (uint32_t j = 0; j < instr->n_in; j++) {
        if (j == k || instr->in[j] == REG_NONE) continue;
        const Register *other = &ir->regs[instr->in[j]];
        if (other->buffer == from->buffer && (!trait_bit(bits, j) || !same_layout(other, to))) return false;
    }
    return true;
}

/* Whether an instruction that writes result 0 over `buffer`, which is not in the arena, reads it as its kernel allows.
 */
static bool reads_in_place(const Npuir *ir, TraitsFn traits, const Instr *instr, BufferId buffer) {
    uint32_t bits = traits(instr->op).inplace;
    for (uint32_t k = 0; k < instr->n_in; k++) {
        if (instr->in[k] == REG_NONE || ir->regs[instr->in[k]].buffer != buffer) continue;
        if (!trait_bit(bits, k) || !same_layout(&ir->regs[instr->in[k]], &ir->regs[instr->out[0]])) return false;
    }
    return true;
}

static bool looks_into(const Npuir *ir, const RegId *regs, uint32_t n, BufferId buffer, uint32_t *first) {
    for (*first = 0; *first < n; ++*first) {
        if (regs[*first] != REG_NONE && ir->regs[regs[*first]].buffer == buffer) return true;
    }
    return false;
}

bool alloc_may_share(const Npuir *ir, TraitsFn traits, uint32_t input, uint32_t output) {
    if (input >= ir->n_inputs || output >= ir->n_outputs || ir->inputs[input] == REG_NONE) return false;
    BufferId from = ir->regs[ir->inputs[input]].buffer, to = ir->regs[ir->outputs[output]].buffer;
    const Buffer *source = &ir->buffers[from], *target = &ir->buffers[to];
    if (source->space != SPACE_INPUT || target->space != SPACE_OUTPUT || target->index != output) return false;
    if (source->bytes != target->bytes) return false;
    bool written = false, settled = false; /* settled: what the segment that wrote it comes to an end with is there */
    for (uint32_t position = 0; position < ir->n_instrs; position++) {
        const Instr *instr = &ir->instrs[ir->order[position]];
        bool on_npu = instr->device == DEVICE_NPU;
        if (settled && on_npu) return false; /* a device can be lost, and the call made again */
        uint32_t operand, result, again;
        bool reads = looks_into(ir, instr->in, instr->n_in, from, &operand);
        bool writes = looks_into(ir, instr->out, instr->n_out, to, &result);
        if (instr->op == OP_host && (reads || writes || looks_into(ir, instr->in, instr->n_in, to, &again)))
            return false;
        if (reads && written) return false;
        if (reads && writes && (result != 0 || !reads_in_place(ir, traits, instr, from))) return false;
        written = written || writes;
        settled = written && (settled || !on_npu);
    }
    return written;
}

static void choose_inplace(Planner *p, Instr *instr, uint32_t position) {
    instr->inplace = false;
    instr->inplace_operand = 0;
    if (!p->traits || instr->group || instr->n_out == 0 || instr->out[0] == REG_NONE) return;
    uint32_t bits = p->traits(instr->op).inplace;
    for (uint32_t k = 0; k < instr->n_in && bits; k++) {
        if (!can_reuse(p, instr, position, bits, k)) continue;
        instr->inplace = true;
        instr->inplace_operand = k;
        return;
    }
}

static void add_block(Planner *p, BufferId id) {
    const Buffer *b = &p->ir->buffers[id];
    if (b->space != SPACE_ARENA || b->bytes == 0) return;
    p->device[p->n_blocks] = (uint8_t)b->device;
    p->blocks[p->n_blocks] = (Block){p->life.first[id], p->life.last[id], arena_round(b->bytes), -1};
    p->block[id] = p->n_blocks++;
}

static Code make_blocks(Planner *p) {
    Npuir *ir = p->ir;
    TRY(npuir_lifetimes(p->ctx, &p->scratch, ir, ir->order, &p->life));
    TRY(ARENA_NEW(p->ctx, &p->scratch, ir->n_buffers, &p->blocks));
    TRY(ARENA_NEW(p->ctx, &p->scratch, ir->n_buffers, &p->device));
    TRY(ARENA_NEW(p->ctx, &p->scratch, ir->n_buffers, &p->block));
    memset(p->block, 0xff, ir->n_buffers * sizeof *p->block); /* NO_BLOCK */
    for (uint32_t position = 0; position < ir->n_instrs; position++) {
        Instr *instr = &ir->instrs[ir->order[position]];
        choose_inplace(p, instr, position);
        for (uint32_t k = 0; k < instr->n_out; k++) {
            if (instr->out[k] == REG_NONE) continue;
            BufferId id = ir->regs[instr->out[k]].buffer;
            if (k == 0 && instr->inplace) {
                p->block[id] = p->block[ir->regs[instr->in[instr->inplace_operand]].buffer];
                p->blocks[p->block[id]].last = p->life.last[id];
            } else {
                add_block(p, id);
            }
        }
        if (instr->scratch != BUFFER_NONE) add_block(p, instr->scratch);
    }
    return CODE_OK;
}

static Code place_device(Planner *p, Device device, AllocReport *report) {
    Block *mine;
    uint32_t n = 0;
    int64_t bound;
    TRY(ARENA_NEW(p->ctx, &p->scratch, p->n_blocks, &mine));
    for (uint32_t b = 0; b < p->n_blocks; b++) {
        if (p->device[b] == device) mine[n++] = p->blocks[b];
    }
    TRY(assign_offsets(p->ctx, &p->scratch, mine, n, p->ir->n_instrs, &p->ir->arena_bytes[device], &bound));
    report->arena_bytes += p->ir->arena_bytes[device];
    report->lower_bound_bytes += bound;
    n = 0;
    for (uint32_t b = 0; b < p->n_blocks; b++) {
        if (p->device[b] == device) p->blocks[b].offset = mine[n++].offset;
    }
    return CODE_OK;
}

typedef struct Place {
    int64_t offset;
    BufferId buffer;
    uint8_t device;
    bool scratch;
} Place;

static int compare_places(const void *a, const void *b) {
    const Place *x = a, *y = b;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->buffer < y->buffer ? -1 : x->buffer > y->buffer;
}

/* Buffers at the same place share a slot. A buffer of no bytes lies at 0 and counts as what is there. */
static Code number_slots(Planner *p, AllocReport *report) {
    Npuir *ir = p->ir;
    Place *places;
    uint32_t n = 0, slot = 0, counted = UINT32_MAX;
    bool *scratch;
    TRY(ARENA_NEW(p->ctx, &p->scratch, ir->n_buffers, &places));
    TRY(ARENA_NEW(p->ctx, &p->scratch, ir->n_buffers, &scratch));
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        if (ir->instrs[i].scratch != BUFFER_NONE) scratch[ir->instrs[i].scratch] = true;
    }
    for (BufferId id = 0; id < ir->n_buffers; id++) {
        Buffer *b = &ir->buffers[id];
        b->offset = -1;
        b->slot = 0;
        if (b->space != SPACE_ARENA) continue;
        b->offset = p->block[id] == NO_BLOCK ? 0 : p->blocks[p->block[id]].offset;
        places[n++] = (Place){b->offset, id, (uint8_t)b->device, scratch[id]};
    }
    qsort(places, n, sizeof *places, compare_places);
    for (uint32_t k = 0; k < n; k++) {
        if (k > 0 && (places[k].device != places[k - 1].device || places[k].offset != places[k - 1].offset)) slot++;
        ir->buffers[places[k].buffer].slot = slot;
        if (places[k].scratch) continue;
        report->virtual_buffers++;
        if (slot != counted) report->physical_buffers++;
        counted = slot;
    }
    if (report->virtual_buffers) report->rho = 1.0 - (double)report->physical_buffers / (double)report->virtual_buffers;
    return CODE_OK;
}

static Code plan(Planner *p, AllocReport *report) {
    TRY(make_blocks(p));
    for (int d = 0; d < DEVICE_COUNT; d++) TRY(place_device(p, (Device)d, report));
    return number_slots(p, report);
}

Code alloc_plan(Context *ctx, Npuir *ir, TraitsFn traits, AllocReport *report) {
    Planner p = {.ctx = ctx, .ir = ir, .traits = traits};
    *report = (AllocReport){0};
    arena_init(&p.scratch);
    Code code = plan(&p, report);
    arena_destroy(&p.scratch);
    return code;
}
