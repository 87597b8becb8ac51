/* The independent proof of a plan. It shares no code with the planner: each call is walked beside the program's order,
 * instruction by instruction, and compared with the block's own instructions, on which the graph is made. */
#include <string.h>

#include "npu/plan.h"

#define WRONG(...) return fail(c->ctx, CODE_INTERNAL, "NPU plan: " __VA_ARGS__)

typedef struct Checker {
    Context *ctx;
    Arena scratch;
    const NpuPlan *plan;
    const Npuir *ir;
    Writers writers;
    bool *there;         /* of each buffer: in memory that a call can read */
    uint32_t *made_by;   /* of each buffer: the call that makes it + 1; 0 none yet */
    uint32_t *last_read; /* of each buffer: position + 1 */
    /* Of the block's buffers, with the number of the call that is looked at + 1: what the call has there, and whether
     * it is made inside. */
    BufferId *partner;
    uint32_t *partner_call, *inside;
} Checker;

static BufferId buffer_of(const Checker *c, RegId reg) { return c->ir->regs[reg].buffer; }

static bool is_constant(const Checker *c, RegId reg) {
    return c->ir->buffers[buffer_of(c, reg)].space == SPACE_CONSTANT;
}

static bool same_list(const int64_t *a, const int64_t *b, size_t n) {
    return n == 0 || memcmp(a, b, n * sizeof *a) == 0;
}

static bool same_type(const Register *a, const Register *b) {
    return a->dtype == b->dtype && a->rank == b->rank && same_list(a->shape, b->shape, a->rank);
}

static bool same_attributes(const Node *a, const Node *b) {
    const OpInfo *info = op_info(a->op);
    if (a->op != b->op) return false;
    for (int k = 0; k < info->n_attrs; k++) {
        const Attr *x = &a->attrs[k], *y = &b->attrs[k];
        if (info->attrs[k] == ATTR_order) continue;
        AttrKind kind = attr_kind((AttrName)info->attrs[k]);
        bool same = kind == KIND_INTS
                        ? x->ints.count == y->ints.count && same_list(x->ints.items, y->ints.items, x->ints.count)
                    : kind == KIND_SCALAR ? scalar_equal(x->s, y->s)
                                          : x->i == y->i;
        if (!same) return false;
    }
    return true;
}

/* Both registers' values come by the same views from what lies in their buffers. */
static bool same_views(const Checker *c, const Register *a, const Register *b) {
    const Graph *g = c->ir->graph;
    ValueId x = a->value, y = b->value, x_end = c->ir->regs[c->writers.reg[a->buffer]].value,
            y_end = c->ir->regs[c->writers.reg[b->buffer]].value;
    for (uint32_t steps = 0; steps <= g->n_nodes; steps++) {
        const Node *m = value_node(g, x), *n = value_node(g, y);
        bool x_done = x == x_end || m->op == OP_constant || m->op == OP_input;
        bool y_done = y == y_end || n->op == OP_constant || n->op == OP_input;
        if (x_done || y_done) return x_done && y_done;
        const Value *v = graph_value(g, x), *w = graph_value(g, y);
        if (!same_attributes(m, n) || v->rank != w->rank || !same_list(v->shape, w->shape, v->rank)) return false;
        if (!op_is(m->op, VIEW) && m->op != OP_contiguous) return false;
        x = m->operands[0];
        y = n->operands[0];
    }
    return false;
}

/* `theirs` is what the call has where the block has `ours`; the same ours always means the same theirs. */
static Code pair(Checker *c, uint32_t call, BufferId ours, BufferId theirs) {
    if (c->partner_call[ours] == call + 1 && c->partner[ours] != theirs)
        WRONG("call %u reads b%u and b%u where its block reads b%u", call, c->partner[ours], theirs, ours);
    c->partner[ours] = theirs;
    c->partner_call[ours] = call + 1;
    return CODE_OK;
}

static Code check_constant(Checker *c, uint32_t call, const Register *ours, const Register *theirs) {
    const Graph *g = c->ir->graph;
    const NpuCall *item = &c->plan->calls[call];
    const NpuBlock *block = &c->plan->blocks[item->block];
    uint32_t x = c->ir->buffers[ours->buffer].index, y = c->ir->buffers[theirs->buffer].index;
    if (ours->offset != theirs->offset || !same_list(ours->strides, theirs->strides, ours->rank))
        WRONG("call %u reads constant %u by other strides than its block reads %u", call, y, x);
    for (uint32_t k = 0; k < block->n_weights; k++) {
        if (block->weights[k] != x) continue;
        if (item->weights[k] != y) WRONG("call %u has constant %u for %u, not %u", call, item->weights[k], x, y);
        if (block->first_column) WRONG("call %u: columns of argument %u are counted twice", call, x);
        return CODE_OK;
    }
    const Constant *a = &g->constants[x], *b = &g->constants[y];
    if (block->columns && item->first_column != block->first_column)
        WRONG("call %u: columns from %lld of constant %u, but its block holds those from %lld", call,
              (long long)item->first_column, y, (long long)block->first_column);
    if (x != y && (!a->data || !b->data || a->bytes != b->bytes || memcmp(a->data, b->data, (size_t)a->bytes) != 0))
        WRONG("call %u needs constant %u, but its block holds %u", call, y, x);
    return CODE_OK;
}

static uint32_t find_register(const RegId *list, uint32_t n, RegId reg) {
    for (uint32_t k = 0; k < n; k++) {
        if (list[k] == reg) return k;
    }
    return UINT32_MAX;
}

static Code check_operand(Checker *c, uint32_t call, RegId ours, RegId theirs) {
    const NpuCall *item = &c->plan->calls[call];
    const NpuBlock *block = &c->plan->blocks[item->block];
    if ((ours == REG_NONE) != (theirs == REG_NONE)) WRONG("call %u: an operand is absent", call);
    if (ours == REG_NONE) return CODE_OK;
    const Register *a = &c->ir->regs[ours], *b = &c->ir->regs[theirs];
    if (!same_type(a, b) || is_constant(c, ours) != is_constant(c, theirs) || !same_views(c, a, b))
        WRONG("call %u: %%r%u is not of the type or views of %%r%u", call, theirs, ours);
    if (is_constant(c, ours)) return check_constant(c, call, a, b);
    TRY(pair(c, call, a->buffer, b->buffer));
    const Register *whole_a = &c->ir->regs[c->writers.reg[a->buffer]],
                   *whole_b = &c->ir->regs[c->writers.reg[b->buffer]];
    if (!same_type(whole_a, whole_b)) WRONG("call %u: b%u is not of the type of b%u", call, b->buffer, a->buffer);
    bool inside = c->made_by[b->buffer] == call + 1; /* made by this call, before */
    if (inside != (c->inside[a->buffer] == call + 1)) WRONG("call %u: b%u is not made where it is", call, b->buffer);
    if (inside) return CODE_OK;
    uint32_t k = find_register(item->in, block->n_in, c->writers.reg[b->buffer]);
    if (k == UINT32_MAX) WRONG("call %u reads b%u, which is not among its inputs", call, b->buffer);
    if (block->in[k] != c->writers.reg[a->buffer]) WRONG("call %u: input %u is not that of its block", call, k);
    if (!c->there[b->buffer]) WRONG("call %u reads b%u before it is written", call, b->buffer);
    return CODE_OK;
}

/* The graph gives a result away exactly where a later call or the host wants one. */
static Code check_result(Checker *c, uint32_t call, RegId ours, RegId theirs, uint32_t end, bool again) {
    const NpuCall *item = &c->plan->calls[call];
    const NpuBlock *block = &c->plan->blocks[item->block];
    if ((ours == REG_NONE) != (theirs == REG_NONE)) WRONG("call %u: a result is absent", call);
    if (ours == REG_NONE) return CODE_OK;
    if (!same_type(&c->ir->regs[ours], &c->ir->regs[theirs])) WRONG("call %u: %%r%u is of another type", call, theirs);
    BufferId b = buffer_of(c, theirs);
    TRY(pair(c, call, buffer_of(c, ours), b));
    if (c->made_by[b] && !again) WRONG("b%u is made twice", b);
    c->made_by[b] = call + 1;
    c->inside[buffer_of(c, ours)] = call + 1;
    uint32_t k = find_register(item->out, block->n_out, theirs);
    bool wanted = c->last_read[b] > end || c->ir->buffers[b].space == SPACE_OUTPUT;
    if (wanted != (k != UINT32_MAX)) WRONG("call %u: b%u is %s its outputs", call, b, wanted ? "not among" : "among");
    if (wanted && block->out[k] != ours) WRONG("call %u: output %u is not that of its block", call, k);
    if (wanted) c->there[b] = true;
    return CODE_OK;
}

static Code check_call(Checker *c, uint32_t call, uint32_t position, bool again) {
    const NpuCall *item = &c->plan->calls[call];
    const NpuBlock *block = &c->plan->blocks[item->block];
    for (uint32_t j = 0; j < block->n_instrs; j++) {
        const Instr *ours = &c->ir->instrs[block->instrs[j]], *theirs = &c->ir->instrs[c->ir->order[position + j]];
        if (!same_attributes(ours->node, theirs->node) || ours->n_in != theirs->n_in || ours->n_out != theirs->n_out)
            WRONG("call %u: instruction %u does not compute what its block does", call, c->ir->order[position + j]);
        for (uint32_t k = 0; k < ours->n_in; k++) TRY(check_operand(c, call, ours->in[k], theirs->in[k]));
        for (uint32_t k = 0; k < ours->n_out; k++)
            TRY(check_result(c, call, ours->out[k], theirs->out[k], position + block->n_instrs, again));
    }
    for (uint32_t k = 0; k < block->n_in; k++) {
        if (c->partner_call[buffer_of(c, block->in[k])] != call + 1) WRONG("call %u: input %u is not read", call, k);
    }
    return CODE_OK;
}

/* Tiles of one head: calls from `call` on; in the end `*n` is how many. */
static Code check_tiles(Checker *c, uint32_t call, uint32_t end, uint32_t position, uint32_t *n) {
    const NpuBlock *block = &c->plan->blocks[c->plan->calls[call].block];
    const Instr *instr = &c->ir->instrs[c->ir->order[position]];
    int64_t covered = 0;
    if (block->n_instrs != 1 || instr->op != OP_linear || instr->n_in < 2) WRONG("call %u: tiles of no linear", call);
    int64_t columns = c->ir->regs[instr->in[1]].shape[0];
    for (*n = 0; covered < columns; (*n)++) {
        const NpuCall *item = &c->plan->calls[call + *n];
        if (call + *n >= end) WRONG("a head misses columns");
        const NpuBlock *theirs = &c->plan->blocks[item->block];
        if (theirs->n_instrs != 1 || theirs->columns != block->columns) WRONG("a head misses columns");
        if (item->first_column < 0 || item->first_column > covered || item->first_column + block->columns > columns ||
            item->first_column + block->columns <= covered)
            WRONG("call %u: columns from %lld of %lld", call + *n, (long long)item->first_column, (long long)columns);
        covered = item->first_column + block->columns;
        TRY(check_call(c, call + *n, position, *n > 0));
    }
    return CODE_OK;
}

static Code check_segment(Checker *c, uint32_t s) {
    const NpuPlan *plan = c->plan;
    const Segment *segment = &plan->segments.items[s];
    uint32_t position = segment->first, end = position + segment->count;
    for (uint32_t k = 0; k < segment->n_in; k++) c->there[buffer_of(c, segment->in[k])] = true;
    for (uint32_t call = plan->first_call[s]; call < plan->first_call[s + 1];) {
        const NpuBlock *block = &plan->blocks[plan->calls[call].block];
        uint32_t n = 1;
        if (block->n_instrs == 0 || block->n_instrs > end - position) WRONG("call %u runs over its segment", call);
        if (block->columns)
            TRY(check_tiles(c, call, plan->first_call[s + 1], position, &n));
        else
            TRY(check_call(c, call, position, false));
        call += n;
        position += block->n_instrs;
    }
    if (position != end) WRONG("segment %u is not run to its end", s);
    for (uint32_t k = 0; k < segment->n_out; k++) {
        if (!c->there[buffer_of(c, segment->out[k])]) WRONG("segment %u does not make its output %u", s, k);
    }
    return CODE_OK;
}

static Code check(Checker *c) {
    const NpuPlan *plan = c->plan;
    const Npuir *ir = c->ir;
    uint32_t *calls;
    TRY(writers_find(c->ctx, &c->scratch, ir, &c->writers));
    TRY(ARENA_NEW(c->ctx, &c->scratch, ir->n_buffers, &c->there));
    TRY(ARENA_NEW(c->ctx, &c->scratch, ir->n_buffers, &c->made_by));
    TRY(ARENA_NEW(c->ctx, &c->scratch, ir->n_buffers, &c->last_read));
    TRY(ARENA_NEW(c->ctx, &c->scratch, ir->n_buffers, &c->partner));
    TRY(ARENA_NEW(c->ctx, &c->scratch, ir->n_buffers, &c->partner_call));
    TRY(ARENA_NEW(c->ctx, &c->scratch, ir->n_buffers, &c->inside));
    TRY(ARENA_NEW(c->ctx, &c->scratch, plan->n_blocks, &calls));
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        const Instr *instr = &ir->instrs[ir->order[p]];
        for (uint32_t k = 0; k < instr->n_in; k++) {
            if (instr->in[k] != REG_NONE) c->last_read[buffer_of(c, instr->in[k])] = p + 1;
        }
    }
    for (uint32_t i = 0; i < plan->n_calls; i++) {
        if (plan->calls[i].block >= plan->n_blocks) WRONG("call %u: no such block", i);
        calls[plan->calls[i].block]++;
    }
    for (uint32_t b = 0; b < plan->n_blocks; b++) {
        if (calls[b] == 0 || calls[b] != plan->blocks[b].n_calls) WRONG("block %u has %u calls", b, calls[b]);
    }
    if (plan->first_call[0] != 0 || plan->first_call[plan->segments.count] != plan->n_calls) WRONG("calls are lost");
    for (uint32_t s = 0; s < plan->segments.count; s++) TRY(check_segment(c, s));
    return CODE_OK;
}

Code plan_check(Context *ctx, const NpuPlan *plan) {
    Checker c = {.ctx = ctx, .plan = plan, .ir = plan->ir};
    arena_init(&c.scratch);
    Code code = check(&c);
    arena_destroy(&c.scratch);
    return code;
}
