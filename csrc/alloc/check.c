/* The independent proof of a plan. It shares no code with the planner: lifetimes are worked out again from instructions
 * and order, and every pair of buffers that are live together must lie apart, but for the one overlap that in-place
 * reuse means. */
#include <stdlib.h>
#include <string.h>

#include "alloc/alloc.h"

enum { ALL_PAIRS = 2000, ALIGNMENT = 64 };

typedef struct Span { /* one arena buffer */
    BufferId buffer;
    Device device;
    uint32_t made, used; /* positions; both included */
    int64_t from, to;    /* bytes */
} Span;

typedef struct Checker {
    Context *ctx;
    Arena scratch;
    const Npuir *ir;
    Span *spans;
    uint32_t n;
    uint32_t *span_of; /* buffer -> span */
    BufferId *over;    /* buffer -> the buffer that it is made in place of, or BUFFER_NONE */
} Checker;

/* From position to `end`, both included: an instruction's, or all of its group's. */
static Code see(Checker *c, BufferId id, uint32_t position, uint32_t end, bool made) {
    const Buffer *b = &c->ir->buffers[id];
    if (b->space != SPACE_ARENA) return CODE_OK;
    if (!made) {
        if (c->span_of[id] == UINT32_MAX)
            return fail(c->ctx, CODE_INTERNAL, "plan: buffer b%u is read at %u before it is made", id, position);
        c->spans[c->span_of[id]].used = end;
        return CODE_OK;
    }
    if (c->span_of[id] != UINT32_MAX) return fail(c->ctx, CODE_INTERNAL, "plan: buffer b%u is made twice", id);
    if (b->offset < 0 || b->offset % ALIGNMENT || b->bytes > c->ir->arena_bytes[b->device] - b->offset)
        return fail(c->ctx, CODE_INTERNAL, "plan: buffer b%u at %lld is not in the arena, or not aligned", id,
                    (long long)b->offset);
    c->span_of[id] = c->n;
    c->spans[c->n++] = (Span){id, b->device, position, end, b->offset, b->offset + b->bytes};
    return CODE_OK;
}

static Code find_spans(Checker *c) {
    const Npuir *ir = c->ir;
    for (uint32_t place = 0; place < ir->n_instrs; place++) {
        const Instr *instr = &ir->instrs[ir->order[place]];
        uint32_t position = place, end = place;
        while (instr->group && position > 0 && ir->instrs[ir->order[position - 1]].group == instr->group) position--;
        while (instr->group && end + 1 < ir->n_instrs && ir->instrs[ir->order[end + 1]].group == instr->group) end++;
        for (uint32_t k = 0; k < instr->n_in; k++) {
            if (instr->in[k] != REG_NONE) TRY(see(c, ir->regs[instr->in[k]].buffer, position, end, false));
        }
        for (uint32_t k = 0; k < instr->n_out; k++) {
            if (instr->out[k] != REG_NONE) TRY(see(c, ir->regs[instr->out[k]].buffer, position, end, true));
        }
        if (instr->scratch != BUFFER_NONE) TRY(see(c, instr->scratch, position, end, true));
    }
    return CODE_OK;
}

/* What an in-place instruction claims: same bytes in the same layout, whole, dead after it, and no other view of it
 * read. */
static Code check_inplace(Checker *c, uint32_t position) {
    const Npuir *ir = c->ir;
    const Instr *instr = &ir->instrs[ir->order[position]];
    if (!instr->inplace) return CODE_OK;
    if (instr->group) return fail(c->ctx, CODE_INTERNAL, "plan: instruction %u of a group is in place", position);
    const Register *from = &ir->regs[instr->in[instr->inplace_operand]], *to = &ir->regs[instr->out[0]];
    const Buffer *a = &ir->buffers[from->buffer], *b = &ir->buffers[to->buffer];
    bool good = a->space == SPACE_ARENA && b->space == SPACE_ARENA && a->device == b->device && a->offset == b->offset;
    good = good && a->bytes == b->bytes && c->spans[c->span_of[from->buffer]].used == position;
    for (uint32_t k = 0; good && k < instr->n_in; k++) {
        if (instr->in[k] == REG_NONE) continue;
        const Register *r = &ir->regs[instr->in[k]];
        if (r->buffer != from->buffer) continue;
        good = r->dtype == to->dtype && r->rank == to->rank && r->offset == to->offset;
        for (int d = 0; good && d < r->rank; d++) good = r->shape[d] == to->shape[d] && r->strides[d] == to->strides[d];
    }
    if (!good)
        return fail(c->ctx, CODE_INTERNAL, "plan: %s may not write b%u in place of b%u", op_info(instr->op)->name,
                    to->buffer, from->buffer);
    c->over[to->buffer] = from->buffer;
    return CODE_OK;
}

static Code check_pair(const Checker *c, const Span *a, const Span *b) {
    if (a->from == a->to || b->from == b->to) return CODE_OK;                           /* no bytes */
    if (a->device != b->device || a->from >= b->to || b->from >= a->to) return CODE_OK; /* lie apart */
    if (a->used < b->made || b->used < a->made) return CODE_OK;                         /* live at different times */
    bool reuse = (c->over[b->buffer] == a->buffer && a->used == b->made) ||
                 (c->over[a->buffer] == b->buffer && b->used == a->made);
    if (reuse) return CODE_OK;
    return fail(c->ctx, CODE_INTERNAL,
                "plan: buffers b%u (%u..%u, bytes %lld..%lld) and b%u (%u..%u, bytes %lld..%lld) clash", a->buffer,
                a->made, a->used, (long long)a->from, (long long)a->to, b->buffer, b->made, b->used, (long long)b->from,
                (long long)b->to);
}

static Code check_all_pairs(const Checker *c) {
    for (uint32_t i = 0; i < c->n; i++) {
        for (uint32_t j = i + 1; j < c->n; j++) TRY(check_pair(c, &c->spans[i], &c->spans[j]));
    }
    return CODE_OK;
}

/* For many buffers: along the schedule the live spans of a device are kept sorted by address. As long as none has
 * clashed they do not overlap, so a new one needs to be compared with its neighbours only. A span that was reused in
 * place gives its entry to the span that took it over. */
typedef struct Live {
    uint32_t *items, n;
} Live;

static uint32_t find_live(const Checker *c, const Live *live, int64_t from) {
    uint32_t low = 0, high = live->n; /* the first one at or behind `from` */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (c->spans[live->items[middle]].from < from)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static Code enter(const Checker *c, Live *live, uint32_t span) {
    const Span *s = &c->spans[span];
    uint32_t at = find_live(c, live, s->from);
    if (at > 0) TRY(check_pair(c, &c->spans[live->items[at - 1]], s));
    if (at < live->n) {
        const Span *next = &c->spans[live->items[at]];
        TRY(check_pair(c, next, s));
        if (c->over[s->buffer] == next->buffer) {
            live->items[at] = span;
            return CODE_OK;
        }
    }
    memmove(live->items + at + 1, live->items + at, (live->n - at) * sizeof *live->items);
    live->items[at] = span;
    live->n++;
    return CODE_OK;
}

static void leave(const Checker *c, Live *live, uint32_t span) {
    uint32_t at = find_live(c, live, c->spans[span].from);
    if (at == live->n || live->items[at] != span) return; /* taken over */
    memmove(live->items + at, live->items + at + 1, (live->n - at - 1) * sizeof *live->items);
    live->n--;
}

static Code check_sweep(Checker *c) {
    Live live[DEVICE_COUNT] = {{0}};
    uint32_t *ends, *next, at = 0; /* spans that end at a position, as lists; spans are sorted by `made` */
    TRY(ARENA_NEW(c->ctx, &c->scratch, c->ir->n_instrs, &ends));
    TRY(ARENA_NEW(c->ctx, &c->scratch, c->n, &next));
    for (int d = 0; d < DEVICE_COUNT; d++) TRY(ARENA_NEW(c->ctx, &c->scratch, c->n, &live[d].items));
    memset(ends, 0xff, c->ir->n_instrs * sizeof *ends);
    for (uint32_t position = 0; position < c->ir->n_instrs; position++) {
        for (; at < c->n && c->spans[at].made == position; at++) {
            if (c->spans[at].from == c->spans[at].to) continue;
            TRY(enter(c, &live[c->spans[at].device], at));
            next[at] = ends[c->spans[at].used];
            ends[c->spans[at].used] = at;
        }
        for (uint32_t s = ends[position]; s != UINT32_MAX; s = next[s]) leave(c, &live[c->spans[s].device], s);
    }
    return CODE_OK;
}

static Code check(Checker *c) {
    const Npuir *ir = c->ir;
    bool *listed;
    TRY(ARENA_NEW(c->ctx, &c->scratch, ir->n_buffers, &c->spans));
    TRY(ARENA_NEW(c->ctx, &c->scratch, ir->n_buffers, &c->span_of));
    TRY(ARENA_NEW(c->ctx, &c->scratch, ir->n_buffers, &c->over));
    TRY(ARENA_NEW(c->ctx, &c->scratch, ir->n_instrs, &listed));
    memset(c->span_of, 0xff, ir->n_buffers * sizeof *c->span_of);
    memset(c->over, 0xff, ir->n_buffers * sizeof *c->over);
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        if (ir->order[p] >= ir->n_instrs || listed[ir->order[p]])
            return fail(c->ctx, CODE_INTERNAL, "plan: the order is no permutation");
        listed[ir->order[p]] = true;
    }
    TRY(find_spans(c));
    for (uint32_t p = 0; p < ir->n_instrs; p++) TRY(check_inplace(c, p));
    return c->n <= ALL_PAIRS ? check_all_pairs(c) : check_sweep(c);
}

Code alloc_check(Context *ctx, const Npuir *ir) {
    Checker c = {.ctx = ctx, .ir = ir};
    arena_init(&c.scratch);
    Code code = check(&c);
    arena_destroy(&c.scratch);
    return code;
}

/* --- an input's memory that is an output's too ---------------------------------------------------------------------
 */
static bool same_elements(const Register *a, const Register *b) {
    if (a->dtype != b->dtype || a->rank != b->rank || a->offset != b->offset) return false;
    for (int d = 0; d < a->rank; d++) {
        if (a->shape[d] != b->shape[d] || a->strides[d] != b->strides[d]) return false;
    }
    return true;
}

Code alloc_check_shared(Context *ctx, const Npuir *ir, uint32_t input, uint32_t output) {
    if (input >= ir->n_inputs || output >= ir->n_outputs || ir->inputs[input] == REG_NONE)
        return fail(ctx, CODE_INTERNAL, "shared memory: there is no input %u or output %u", input, output);
    BufferId old = ir->regs[ir->inputs[input]].buffer, new = ir->regs[ir->outputs[output]].buffer;
    bool is_new = false; /* what the memory holds */
    Device made_on = DEVICE_CPU;
    if (old == new || ir->buffers[old].bytes != ir->buffers[new].bytes)
        return fail(ctx, CODE_INTERNAL, "shared memory: input %u and output %u differ in size", input, output);
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        const Instr *instr = &ir->instrs[ir->order[p]];
        const Register *made = NULL;
        if (is_new && instr->device != made_on) made_on = DEVICE_CPU; /* the segment is over */
        if (is_new && instr->device == DEVICE_NPU && made_on != DEVICE_NPU)
            return fail(ctx, CODE_INTERNAL, "shared memory: a segment that can fail follows, and input %u is gone",
                        input);
        for (uint32_t k = 0; k < instr->n_out; k++) {
            if (instr->out[k] == REG_NONE || ir->regs[instr->out[k]].buffer != new) continue;
            if (is_new) return fail(ctx, CODE_INTERNAL, "shared memory: output %u is written twice", output);
            made = &ir->regs[instr->out[k]];
        }
        for (uint32_t k = 0; k < instr->n_in; k++) {
            if (instr->in[k] == REG_NONE) continue;
            const Register *r = &ir->regs[instr->in[k]];
            if (r->buffer != old && r->buffer != new) continue;
            bool wants_new = r->buffer == new;
            bool in_place = !made || (!wants_new && made == &ir->regs[instr->out[0]] && same_elements(r, made));
            if (wants_new != is_new || !in_place || instr->op == OP_host)
                return fail(ctx, CODE_INTERNAL, "shared memory: %s at %u reads %s %u, which output %u is written over",
                            op_info(instr->op)->name, p, wants_new ? "output" : "input", wants_new ? output : input,
                            output);
        }
        if (made) made_on = instr->device;
        is_new = is_new || made;
    }
    return is_new ? CODE_OK : fail(ctx, CODE_INTERNAL, "shared memory: output %u is never written", output);
}
