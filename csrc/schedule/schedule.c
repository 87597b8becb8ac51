/* Scheduling by levels; then what may be written over an input comes last.
 *
 * The caller waits on the CPU, so an order starts and ends there. Give each instruction the smallest level that is not
 * below those it needs and has the parity of its device (even CPU, odd NPU), and run level after level: the device
 * changes as often as the highest level says (made even, to come back to the CPU). That is the least possible: along
 * the operands that force a level, the device changes that often in any order. So the number of transitions is exact,
 * in O(n + e).
 *
 * What is left free is when within its slack an instruction runs: as early as it can, as late as it can, and in which
 * order inside of a level. Six orders are tried, program order first; the one whose largest live set is smallest wins,
 * and program order (memory is touched as the model's author wrote it) wins ties. On a single device that leaves two:
 * program order, and depth first from the results, which computes each value just before it is needed. */
#include "schedule/schedule.h"

#include <string.h>

#include "npuir/live.h"

typedef struct Scheduler {
    Context *ctx;
    Arena scratch;
    const Npuir *ir;
    uint32_t *start, *needs; /* instruction i needs needs[start[i] .. start[i + 1]) */
    uint32_t *early, *late;  /* levels */
    uint32_t top;            /* transitions of the best order */
    uint32_t *best;
    int64_t best_bytes;
} Scheduler;

uint32_t schedule_transitions(const Npuir *ir, const uint32_t *order) {
    uint32_t changes = 0;
    Device device = DEVICE_CPU;
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        changes += ir->instrs[order[p]].device != device;
        device = ir->instrs[order[p]].device;
    }
    return changes + (device != DEVICE_CPU);
}

/* Who makes the operands; for host calls with effects also the one before. */
static Code find_needs(Scheduler *s) {
    const Npuir *ir = s->ir;
    uint32_t *writer, n = 0, last_effect = UINT32_MAX;
    size_t most = ir->n_instrs;
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_buffers, &writer));
    memset(writer, 0xff, ir->n_buffers * sizeof *writer);
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        const Instr *instr = &ir->instrs[i];
        most += instr->n_in;
        for (uint32_t k = 0; k < instr->n_out; k++) {
            if (instr->out[k] != REG_NONE) writer[ir->regs[instr->out[k]].buffer] = i;
        }
    }
    if (most > UINT32_MAX) return fail(s->ctx, CODE_UNSUPPORTED, "more than 2^32 operands");
    TRY(ARENA_NEW(s->ctx, &s->scratch, (size_t)ir->n_instrs + 1, &s->start));
    TRY(ARENA_NEW(s->ctx, &s->scratch, most, &s->needs));
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        const Instr *instr = &ir->instrs[i];
        s->start[i] = n;
        for (uint32_t k = 0; k < instr->n_in; k++) {
            uint32_t maker = instr->in[k] == REG_NONE ? UINT32_MAX : writer[ir->regs[instr->in[k]].buffer];
            if (maker != UINT32_MAX) s->needs[n++] = maker;
        }
        if (instr->op != OP_host || !node_int(instr->node, ATTR_effect)) continue;
        if (last_effect != UINT32_MAX) s->needs[n++] = last_effect;
        last_effect = i;
    }
    s->start[ir->n_instrs] = n;
    return CODE_OK;
}

static Code find_levels(Scheduler *s) {
    const Npuir *ir = s->ir;
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_instrs, &s->early));
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_instrs, &s->late));
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        uint32_t i = ir->order[p], level = 0;
        for (uint32_t e = s->start[i]; e < s->start[i + 1]; e++) {
            if (s->early[s->needs[e]] > level) level = s->early[s->needs[e]];
        }
        level += (level & 1) != (uint32_t)ir->instrs[i].device;
        s->early[i] = level;
        if (level > s->top) s->top = level;
    }
    s->top += s->top & 1;
    for (uint32_t i = 0; i < ir->n_instrs; i++) s->late[i] = s->top;
    for (uint32_t p = ir->n_instrs; p-- > 0;) {
        uint32_t i = ir->order[p];
        s->late[i] -= (s->late[i] & 1) != (uint32_t)ir->instrs[i].device;
        for (uint32_t e = s->start[i]; e < s->start[i + 1]; e++) {
            if (s->late[i] < s->late[s->needs[e]]) s->late[s->needs[e]] = s->late[i];
        }
    }
    return CODE_OK;
}

/* Depth first, operands before their user, from each instruction that none needs. */
static Code depth_first(Scheduler *s, uint32_t **out) {
    const Npuir *ir = s->ir;
    uint32_t *next, *stack, *order, depth = 0, n = 0;
    bool *needed, *seen;
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_instrs, &needed));
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_instrs, &seen));
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_instrs, &next));
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_instrs, &stack));
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_instrs, &order));
    for (uint32_t e = 0; e < s->start[ir->n_instrs]; e++) needed[s->needs[e]] = true;
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        if (needed[ir->order[p]]) continue;
        stack[depth++] = ir->order[p];
        seen[ir->order[p]] = true;
        while (depth > 0) {
            uint32_t i = stack[depth - 1];
            if (s->start[i] + next[i] == s->start[i + 1]) {
                order[n++] = i;
                depth--;
                continue;
            }
            uint32_t need = s->needs[s->start[i] + next[i]++];
            if (seen[need]) continue;
            seen[need] = true;
            stack[depth++] = need;
        }
    }
    *out = order;
    return CODE_OK;
}

static Code offer(Scheduler *s, uint32_t *order) {
    int64_t bytes;
    TRY(npuir_live_bytes(s->ctx, &s->scratch, s->ir, order, NULL, &bytes));
    if (s->best && bytes >= s->best_bytes) return CODE_OK;
    s->best = order;
    s->best_bytes = bytes;
    return CODE_OK;
}

/* Level after level, inside of each in the order of `base`. */
static Code offer_levels(Scheduler *s, const uint32_t *base, const uint32_t *level) {
    const Npuir *ir = s->ir;
    uint32_t *place, *order;
    TRY(ARENA_NEW(s->ctx, &s->scratch, (size_t)s->top + 2, &place));
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_instrs, &order));
    for (uint32_t i = 0; i < ir->n_instrs; i++) place[level[i] + 1]++;
    for (uint32_t l = 0; l <= s->top; l++) place[l + 1] += place[l];
    for (uint32_t p = 0; p < ir->n_instrs; p++) order[place[level[base[p]]]++] = base[p];
    return offer(s, order);
}

static Code offer_base(Scheduler *s, uint32_t *base) {
    if (schedule_transitions(s->ir, base) == s->top) TRY(offer(s, base));
    if (s->top == 0) return CODE_OK; /* one device */
    TRY(offer_levels(s, base, s->early));
    return offer_levels(s, base, s->late);
}

static Code plan(Scheduler *s) {
    uint32_t *deep;
    TRY(find_needs(s));
    TRY(find_levels(s));
    TRY(offer_base(s, s->ir->order));
    TRY(depth_first(s, &deep));
    return offer_base(s, deep);
}

/* --- new values of inputs -----------------------------------------------------------------------------------------
 * An instruction on the CPU that makes an output from nothing but inputs and constants, as counters of caches are made,
 * can run last: nobody reads those inputs any more then, and the output may lie in the memory of one (alloc/). */
static bool makes_new_value(const Npuir *ir, const Instr *instr, const bool *is_read) {
    if (instr->device != DEVICE_CPU || instr->op == OP_host || instr->n_out != 1 || instr->out[0] == REG_NONE)
        return false;
    const Buffer *made = &ir->buffers[ir->regs[instr->out[0]].buffer];
    bool same_size = false;
    if (made->space != SPACE_OUTPUT || is_read[ir->regs[instr->out[0]].buffer]) return false;
    for (uint32_t k = 0; k < instr->n_in; k++) {
        if (instr->in[k] == REG_NONE) continue;
        const Buffer *read = &ir->buffers[ir->regs[instr->in[k]].buffer];
        if (read->space != SPACE_INPUT && read->space != SPACE_CONSTANT) return false;
        same_size = same_size || (read->space == SPACE_INPUT && read->bytes == made->bytes);
    }
    return same_size;
}

static Code new_values_last(Scheduler *s) {
    const Npuir *ir = s->ir;
    bool *is_read;
    uint32_t *order, n = 0;
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_buffers, &is_read));
    TRY(ARENA_NEW(s->ctx, &s->scratch, ir->n_instrs, &order));
    for (uint32_t i = 0; i < ir->n_instrs; i++)
        for (uint32_t k = 0; k < ir->instrs[i].n_in; k++)
            if (ir->instrs[i].in[k] != REG_NONE) is_read[ir->regs[ir->instrs[i].in[k]].buffer] = true;
    for (int last = 0; last < 2; last++)
        for (uint32_t p = 0; p < ir->n_instrs; p++)
            if (makes_new_value(ir, &ir->instrs[s->best[p]], is_read) == (last == 1)) order[n++] = s->best[p];
    s->best = order;
    return CODE_OK;
}

Code schedule_plan(Context *ctx, Npuir *ir, ScheduleReport *report) {
    Scheduler s = {.ctx = ctx, .ir = ir};
    report->transitions_before = schedule_transitions(ir, ir->order);
    arena_init(&s.scratch);
    Code code = plan(&s);
    if (code == CODE_OK) code = new_values_last(&s);
    for (uint32_t i = 0; i < ir->n_instrs; i++) ir->instrs[i].group = 0;
    if (code == CODE_OK) memmove(ir->order, s.best, ir->n_instrs * sizeof *ir->order);
    arena_destroy(&s.scratch);
    report->transitions_after = schedule_transitions(ir, ir->order);
    return code;
}
