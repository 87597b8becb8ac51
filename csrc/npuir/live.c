#include "npuir/live.h"

#include <string.h>

/* At positions [first, end). */
static void touch(const Npuir *ir, Lifetimes *l, RegId reg, uint32_t first, uint32_t end) {
    if (reg == REG_NONE) return;
    BufferId b = ir->regs[reg].buffer;
    if (l->first[b] == NEVER) l->first[b] = first;
    l->last[b] = end - 1;
}

Code npuir_lifetimes(Context *ctx, Arena *arena, const Npuir *ir, const uint32_t *order, Lifetimes *out) {
    TRY(ARENA_NEW(ctx, arena, ir->n_buffers, &out->first));
    TRY(ARENA_NEW(ctx, arena, ir->n_buffers, &out->last));
    memset(out->first, 0xff, ir->n_buffers * sizeof *out->first); /* NEVER */
    memset(out->last, 0xff, ir->n_buffers * sizeof *out->last);
    for (uint32_t p = 0, first = 0, end = 0; p < ir->n_instrs; p++) {
        const Instr *instr = &ir->instrs[order[p]];
        if (p == end) first = p, end = npuir_group_end(ir, order, p);
        for (uint32_t k = 0; k < instr->n_in; k++) touch(ir, out, instr->in[k], first, end);
        for (uint32_t k = 0; k < instr->n_out; k++) touch(ir, out, instr->out[k], first, end);
        if (instr->scratch != BUFFER_NONE) out->first[instr->scratch] = first, out->last[instr->scratch] = end - 1;
    }
    return CODE_OK;
}

Code npuir_live_bytes(Context *ctx, Arena *arena, const Npuir *ir, const uint32_t *order, int64_t *live,
                      int64_t *largest) {
    Lifetimes l;
    TRY(npuir_lifetimes(ctx, arena, ir, order, &l));
    int64_t *change; /* of the live bytes between positions */
    TRY(ARENA_NEW(ctx, arena, (size_t)ir->n_instrs + 1, &change));
    for (BufferId b = 0; b < ir->n_buffers; b++) {
        if (ir->buffers[b].space != SPACE_ARENA || l.first[b] == NEVER) continue;
        change[l.first[b]] += arena_round(ir->buffers[b].bytes);
        change[l.last[b] + 1] -= arena_round(ir->buffers[b].bytes);
    }
    int64_t now = 0;
    *largest = 0;
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        now += change[p];
        if (live) live[p] = now;
        if (now > *largest) *largest = now;
    }
    return CODE_OK;
}
