/* Finds the segments of a scheduled program. */
#include "npuir/segment.h"

#include <string.h>

Code writers_find(Context *ctx, Arena *arena, const Npuir *ir, Writers *out) {
    TRY(ARENA_NEW(ctx, arena, ir->n_buffers, &out->instr));
    TRY(ARENA_NEW(ctx, arena, ir->n_buffers, &out->reg));
    memset(out->instr, 0xff, ir->n_buffers * sizeof *out->instr);
    memset(out->reg, 0xff, ir->n_buffers * sizeof *out->reg); /* REG_NONE */
    for (RegId r = 0; r < ir->n_regs; r++) {
        const Register *reg = &ir->regs[r];
        if (!reg->view && out->reg[reg->buffer] == REG_NONE) out->reg[reg->buffer] = r;
    }
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        const Instr *instr = &ir->instrs[i];
        for (uint32_t k = 0; k < instr->n_out; k++) {
            if (instr->out[k] == REG_NONE) continue;
            BufferId b = ir->regs[instr->out[k]].buffer;
            out->instr[b] = i;
            out->reg[b] = instr->out[k];
        }
    }
    return CODE_OK;
}

typedef struct Finder {
    const Npuir *ir;
    Writers writers;
    uint32_t *position;  /* of each instruction in the order */
    uint32_t *last_read; /* of each buffer: position of the last instruction that reads it + 1; 0 never */
    uint32_t *listed;    /* of each buffer: segment number + 1 that lists it as an input already */
} Finder;

static bool is_constant(const Npuir *ir, RegId reg) {
    return ir->buffers[ir->regs[reg].buffer].space == SPACE_CONSTANT;
}

static Code list_borders(Context *ctx, Arena *arena, Finder *f, uint32_t number, Segment *s) {
    const Npuir *ir = f->ir;
    uint32_t most_in = 0, most_out = 0;
    for (uint32_t p = s->first; p < s->first + s->count; p++) {
        most_in += ir->instrs[ir->order[p]].n_in;
        most_out += ir->instrs[ir->order[p]].n_out;
    }
    TRY(ARENA_NEW(ctx, arena, most_in, &s->in));
    TRY(ARENA_NEW(ctx, arena, most_out, &s->out));
    for (uint32_t p = s->first; p < s->first + s->count; p++) {
        const Instr *instr = &ir->instrs[ir->order[p]];
        for (uint32_t k = 0; k < instr->n_in; k++) {
            if (instr->in[k] == REG_NONE || is_constant(ir, instr->in[k])) continue;
            BufferId b = ir->regs[instr->in[k]].buffer;
            uint32_t writer = f->writers.instr[b];
            bool inside = writer != UINT32_MAX && f->position[writer] >= s->first;
            if (inside || f->listed[b] == number + 1) continue;
            f->listed[b] = number + 1;
            s->in[s->n_in++] = f->writers.reg[b];
        }
        for (uint32_t k = 0; k < instr->n_out; k++) {
            if (instr->out[k] == REG_NONE) continue;
            BufferId b = ir->regs[instr->out[k]].buffer;
            if (f->last_read[b] > s->first + s->count || ir->buffers[b].space == SPACE_OUTPUT)
                s->out[s->n_out++] = instr->out[k];
        }
    }
    return CODE_OK;
}

Code segments_find(Context *ctx, Arena *arena, const Npuir *ir, Segments *out) {
    Finder f = {.ir = ir};
    *out = (Segments){0};
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        bool npu = ir->instrs[ir->order[p]].device == DEVICE_NPU;
        out->count += npu && (p == 0 || ir->instrs[ir->order[p - 1]].device != DEVICE_NPU);
    }
    if (out->count == 0) return CODE_OK;
    TRY(ARENA_NEW(ctx, arena, out->count, &out->items));
    TRY(writers_find(ctx, arena, ir, &f.writers));
    TRY(ARENA_NEW(ctx, arena, ir->n_instrs, &f.position));
    TRY(ARENA_NEW(ctx, arena, ir->n_buffers, &f.last_read));
    TRY(ARENA_NEW(ctx, arena, ir->n_buffers, &f.listed));
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        const Instr *instr = &ir->instrs[ir->order[p]];
        f.position[ir->order[p]] = p;
        for (uint32_t k = 0; k < instr->n_in; k++) {
            if (instr->in[k] != REG_NONE) f.last_read[ir->regs[instr->in[k]].buffer] = p + 1;
        }
    }
    uint32_t s = 0;
    for (uint32_t p = 0; p < ir->n_instrs; s++) {
        while (p < ir->n_instrs && ir->instrs[ir->order[p]].device != DEVICE_NPU) p++;
        if (p == ir->n_instrs) break;
        Segment *segment = &out->items[s];
        segment->first = p;
        while (p < ir->n_instrs && ir->instrs[ir->order[p]].device == DEVICE_NPU) p++;
        segment->count = p - segment->first;
        TRY(list_borders(ctx, arena, &f, s, segment));
    }
    return CODE_OK;
}
