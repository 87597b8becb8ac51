/* Products that read the same activations and do not wait for each other (q, k and v; gate and up) become neighbours in
 * the order and run together: one fork and join for all, no thread waits while another finishes one of them.
 *
 * Requires an order. A member is moved up to where the first of its group stands, which its operands must allow. One
 * may read a sibling's result in its epilogue, element by element (silu(gate) * up): then a part of it follows the same
 * part of the sibling on the same thread, and finds those columns in the cache. The memory of a group is live through
 * all of it, so results lie in the arena, and none in place of another's operand. What each computes stays the same. */
#include <string.h>

#include "npuir/view.h"
#include "schedule/schedule.h"

enum { NONE = UINT32_MAX };

typedef struct Grouper {
    Context *ctx;
    Arena scratch;
    Npuir *ir;
    uint32_t *place;  /* of an instruction in the order */
    uint32_t *writer; /* of a buffer */
    uint32_t *first;  /* of the group of an instruction: itself, if it is alone */
    uint32_t *size;   /* of the group that an instruction is first of */
    uint32_t *opener; /* register -> first of the newest group that reads it */
} Grouper;

static bool may_join(const Npuir *ir, const Instr *i) {
    if (i->columns == 0 || i->device != DEVICE_CPU || i->n_out != 1 || i->out[0] == REG_NONE) return false;
    const Register *x = &ir->regs[i->in[0]];
    return ir->buffers[ir->regs[i->out[0]].buffer].space == SPACE_ARENA &&
           view_is_row_major(x->rank, x->shape, x->strides);
}

static bool fits(const Grouper *g, const Instr *instr, uint32_t first) {
    const Npuir *ir = g->ir;
    uint32_t followed = NONE;
    if (g->size[first] == NPUIR_GROUP_MOST) return false;
    for (uint32_t k = 0; k < instr->n_in; k++) {
        uint32_t maker = instr->in[k] == REG_NONE ? NONE : g->writer[ir->regs[instr->in[k]].buffer];
        if (maker == NONE) continue;
        if (g->first[maker] != first) {
            if (g->place[maker] > g->place[first]) return false;
            continue;
        }
        if (!npuir_may_follow(ir, instr, k, &ir->instrs[maker]) || (followed != NONE && followed != maker))
            return false;
        if (instr->columns != ir->instrs[maker].columns) return false;
        followed = maker;
    }
    return true;
}

static Code find(Grouper *g) {
    Npuir *ir = g->ir;
    TRY(ARENA_NEW(g->ctx, &g->scratch, ir->n_instrs, &g->place));
    TRY(ARENA_NEW(g->ctx, &g->scratch, ir->n_instrs, &g->first));
    TRY(ARENA_NEW(g->ctx, &g->scratch, ir->n_instrs, &g->size));
    TRY(ARENA_NEW(g->ctx, &g->scratch, ir->n_buffers, &g->writer));
    TRY(ARENA_NEW(g->ctx, &g->scratch, ir->n_regs, &g->opener));
    memset(g->writer, 0xff, ir->n_buffers * sizeof *g->writer);
    memset(g->opener, 0xff, ir->n_regs * sizeof *g->opener);
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        uint32_t i = ir->order[p];
        const Instr *instr = &ir->instrs[i];
        g->place[i] = p;
        g->first[i] = i;
        g->size[i] = 1;
        for (uint32_t k = 0; k < instr->n_out; k++)
            if (instr->out[k] != REG_NONE) g->writer[ir->regs[instr->out[k]].buffer] = i;
        if (!may_join(ir, instr)) continue;
        uint32_t *opener = &g->opener[instr->in[0]];
        if (*opener != NONE && fits(g, instr, *opener)) {
            g->first[i] = *opener;
            g->size[*opener]++;
        } else {
            *opener = i;
        }
    }
    return CODE_OK;
}

/* Members behind the first of their group, in the order that they had. */
static Code gather(Grouper *g, ScheduleReport *report) {
    Npuir *ir = g->ir;
    uint32_t *start, *order, n = 0;
    TRY(ARENA_NEW(g->ctx, &g->scratch, ir->n_instrs, &start));
    TRY(ARENA_NEW(g->ctx, &g->scratch, ir->n_instrs, &order));
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        uint32_t i = ir->order[p], first = g->first[i];
        if (first == i) {
            start[i] = n;
            n += g->size[i];
            if (g->size[i] > 1) report->groups++;
        }
        if (g->size[first] > 1) {
            ir->instrs[i].group = first == i ? report->groups : ir->instrs[first].group;
            report->grouped++;
        }
        order[start[first]++] = i;
    }
    memcpy(ir->order, order, ir->n_instrs * sizeof *order);
    return CODE_OK;
}

Code group_plan(Context *ctx, Npuir *ir, ScheduleReport *report) {
    Grouper g = {.ctx = ctx, .ir = ir};
    report->groups = report->grouped = 0;
    arena_init(&g.scratch);
    Code code = find(&g);
    if (code == CODE_OK) code = gather(&g, report);
    arena_destroy(&g.scratch);
    return code;
}
