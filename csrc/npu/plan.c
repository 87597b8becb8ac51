/* Blocks and calls: makes a plan of how segments run on the device.
 *
 * plan_search.c cuts the segments into stretches of instructions; equal ones become calls of one block. A constant that
 * is the same in all calls stays in the block's graph, the others are arguments. A wide head is cut into column tiles
 * first, which are equal by themselves. */
#include "npu/plan.h"

#include <string.h>

enum { DEFAULT_HEAD_COLUMNS = 8192, COLUMN_MULTIPLE = 16 };

const char *precision_name(Precision precision) {
    switch (precision) {
    case PRECISION_FP16: return "fp16";
    case PRECISION_W8A16: return "w8a16";
    case PRECISION_W4A16: return "w4a16";
    }
    return "unknown";
}

bool precision_from_name(const char *name, Precision *out) {
    for (Precision p = PRECISION_FP16; p <= PRECISION_W4A16; p++) {
        if (strcmp(precision_name(p), name) != 0) continue;
        *out = p;
        return true;
    }
    return false;
}

typedef struct Planner {
    Context *ctx;
    Arena *arena; /* of the plan */
    Tokens tokens;
    NpuPlan *plan;
    int64_t head_columns;
    Cut cut;
} Planner;

/* --- heads -------------------------------------------------------------------------------------------------------- */
static bool is_whole_constant(const Npuir *ir, RegId reg, uint8_t rank) {
    return reg != REG_NONE && ir->buffers[ir->regs[reg].buffer].space == SPACE_CONSTANT && ir->regs[reg].rank == rank;
}

/* A linear of constant weights, wider than a tile, with nothing added but a bias, whose result only the host reads. */
static bool is_head(const Npuir *ir, const Instr *instr, const bool *read_by_npu, int64_t columns) {
    if (instr->op != OP_linear || instr->n_in < 2 || !is_whole_constant(ir, instr->in[1], 2)) return false;
    if (ir->regs[instr->in[1]].shape[0] <= columns || is_whole_constant(ir, instr->in[0], ir->regs[instr->in[0]].rank))
        return false;
    if (instr->n_in > 2 && instr->in[2] != REG_NONE && !is_whole_constant(ir, instr->in[2], 1)) return false;
    for (uint32_t k = 3; k < instr->n_in; k++) {
        if (instr->in[k] != REG_NONE) return false;
    }
    return instr->out[0] != REG_NONE && !read_by_npu[ir->regs[instr->out[0]].buffer];
}

static Code find_heads(Planner *p, const Segments *segments, bool *heads) {
    const Npuir *ir = p->plan->ir;
    bool *read_by_npu;
    TRY(ARENA_NEW(p->ctx, p->tokens.arena, ir->n_buffers, &read_by_npu));
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        for (uint32_t k = 0; k < ir->instrs[i].n_in; k++) {
            if (ir->instrs[i].device == DEVICE_NPU && ir->instrs[i].in[k] != REG_NONE)
                read_by_npu[ir->regs[ir->instrs[i].in[k]].buffer] = true;
        }
    }
    for (uint32_t s = 0; s < segments->count; s++) {
        const Segment *segment = &segments->items[s];
        for (uint32_t at = segment->first; at < segment->first + segment->count; at++) {
            const Instr *instr = &ir->instrs[ir->order[at]];
            heads[at] = is_head(ir, instr, read_by_npu, p->head_columns) &&
                        tokens_crosses(&p->tokens, ir->regs[instr->out[0]].buffer, at + 1);
        }
    }
    return CODE_OK;
}

/* Equal tiles of a multiple of 16 columns; the last one may begin before the end of the one before. */
static int64_t tile_columns(int64_t n, int64_t most, uint32_t *tiles) {
    int64_t count = (n + most - 1) / most, width = (n + count - 1) / count;
    width = (width + COLUMN_MULTIPLE - 1) / COLUMN_MULTIPLE * COLUMN_MULTIPLE;
    if (width > n) width = n;
    *tiles = (uint32_t)((n + width - 1) / width);
    return width;
}

static int64_t head_width(const Planner *p, const Piece *piece, uint32_t *tiles) {
    const Npuir *ir = p->plan->ir;
    const Instr *instr = &ir->instrs[ir->order[piece->stretch.first]];
    return tile_columns(ir->regs[instr->in[1]].shape[0], p->head_columns, tiles);
}

/* --- constants ---------------------------------------------------------------------------------------------------- */
static bool same_constant(const Graph *g, uint32_t a, uint32_t b) {
    const Constant *x = &g->constants[a], *y = &g->constants[b];
    if (a == b) return true;
    if (!x->data || !y->data || x->dtype != y->dtype || x->rank != y->rank || x->bytes != y->bytes) return false;
    if (memcmp(x->shape, y->shape, x->rank * sizeof *x->shape) != 0) return false;
    if (memcmp(x->strides, y->strides, x->rank * sizeof *x->strides) != 0) return false;
    return x->data == y->data || memcmp(x->data, y->data, (size_t)x->bytes) == 0;
}

/* Which of the n constants that each call has differ between the calls. */
static Code choose_weights(Planner *p, uint32_t block, uint32_t *const *constants, uint32_t n) {
    const NpuPlan *plan = p->plan;
    NpuBlock *b = &plan->blocks[block];
    bool *differs;
    uint32_t first = UINT32_MAX;
    TRY(ARENA_NEW(p->ctx, p->tokens.arena, n, &differs));
    for (uint32_t c = 0; c < plan->n_calls; c++) {
        if (plan->calls[c].block != block) continue;
        if (first == UINT32_MAX) first = c;
        for (uint32_t k = 0; k < n; k++) {
            if (b->columns || !same_constant(plan->ir->graph, constants[first][k], constants[c][k])) differs[k] = true;
        }
    }
    TRY(ARENA_NEW(p->ctx, p->arena, n, &b->weights));
    for (uint32_t k = 0; k < n; k++) {
        if (differs[k]) b->weights[b->n_weights++] = constants[first][k];
    }
    for (uint32_t c = 0; c < plan->n_calls; c++) {
        if (plan->calls[c].block != block) continue;
        uint32_t at = 0;
        TRY(ARENA_NEW(p->ctx, p->arena, b->n_weights, &plan->calls[c].weights));
        for (uint32_t k = 0; k < n; k++) {
            if (differs[k]) plan->calls[c].weights[at++] = constants[c][k];
        }
    }
    return CODE_OK;
}

/* --- calls -------------------------------------------------------------------------------------------------------- */
static Code add_block(Planner *p, const Piece *piece, const NpuCall *call, const Border *border) {
    NpuBlock *b = &p->plan->blocks[piece->kind];
    uint32_t tiles;
    *b = (NpuBlock){.instrs = p->plan->ir->order + piece->stretch.first,
                    .n_instrs = piece->stretch.count,
                    .in = call->in,
                    .out = call->out,
                    .n_in = border->n_in,
                    .n_out = border->n_out};
    if (piece->head) b->columns = head_width(p, piece, &tiles);
    return CODE_OK;
}

static Code registers_of(Planner *p, const BufferId *buffers, uint32_t n, RegId **out) {
    TRY(ARENA_NEW(p->ctx, p->arena, n, out));
    for (uint32_t k = 0; k < n; k++) (*out)[k] = p->tokens.writers.reg[buffers[k]];
    return CODE_OK;
}

static Code add_calls(Planner *p, const Piece *piece, Border *border, uint32_t **constants, uint32_t *n_constants) {
    NpuPlan *plan = p->plan;
    NpuCall call = {.block = piece->kind};
    uint32_t *mine, tiles = 1;
    int64_t width = 0, columns = 0;
    stretch_border(&p->tokens, piece->stretch, border);
    TRY(registers_of(p, border->in, border->n_in, &call.in));
    TRY(registers_of(p, border->out, border->n_out, &call.out));
    TRY(ARENA_NEW(p->ctx, p->tokens.arena, border->n_constants, &mine));
    memcpy(mine, border->constants, border->n_constants * sizeof *mine);
    n_constants[piece->kind] = border->n_constants;
    if (plan->blocks[piece->kind].n_instrs == 0) TRY(add_block(p, piece, &call, border));
    if (piece->head) {
        const Instr *instr = &plan->ir->instrs[plan->ir->order[piece->stretch.first]];
        width = head_width(p, piece, &tiles);
        columns = plan->ir->regs[instr->in[1]].shape[0];
    }
    for (uint32_t i = 0; i < tiles; i++) {
        call.first_column = i * width;
        if (piece->head && call.first_column > columns - width) call.first_column = columns - width;
        constants[plan->n_calls] = mine;
        plan->calls[plan->n_calls++] = call;
        plan->blocks[piece->kind].n_calls++;
    }
    return CODE_OK;
}

static Code count_calls(Planner *p, uint32_t *out) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < p->cut.count; i++) {
        uint32_t tiles = 1;
        if (p->cut.pieces[i].head) head_width(p, &p->cut.pieces[i], &tiles);
        n += tiles;
    }
    if (n > INT32_MAX)
        return fail(p->ctx, CODE_INVALID, "head_columns is too small: %llu tiles", (unsigned long long)n);
    *out = (uint32_t)n;
    return CODE_OK;
}

static Code make_plan(Planner *p, const Segments *segments, const PlanOptions *options) {
    NpuPlan *plan = p->plan;
    const Npuir *ir = plan->ir;
    Border border;
    Stretch all = {0, ir->n_instrs};
    bool *heads;
    uint32_t n_calls = 0, **constants, *n_constants;
    Arena *scratch = p->tokens.arena;
    TRY(tokens_find(p->ctx, scratch, ir, segments, &p->tokens));
    TRY(ARENA_NEW(p->ctx, scratch, ir->n_instrs, &heads));
    if (options->fold == FOLD_ALWAYS) TRY(find_heads(p, segments, heads));
    TRY(cut_find(&p->tokens, segments, heads, options->fold, scratch, &p->cut));
    TRY(count_calls(p, &n_calls));
    TRY(ARENA_NEW(p->ctx, p->arena, n_calls, &plan->calls));
    TRY(ARENA_NEW(p->ctx, p->arena, p->cut.n_kinds, &plan->blocks));
    TRY(ARENA_NEW(p->ctx, p->arena, segments->count + 1, &plan->first_call));
    TRY(ARENA_NEW(p->ctx, scratch, n_calls, &constants)); /* of each call */
    TRY(ARENA_NEW(p->ctx, scratch, p->cut.n_kinds, &n_constants));
    TRY(border_alloc(p->ctx, scratch, ir, all, &border));
    plan->n_blocks = p->cut.n_kinds;
    for (uint32_t s = 0; s < segments->count; s++) {
        plan->first_call[s] = plan->n_calls;
        for (uint32_t i = p->cut.first[s]; i < p->cut.first[s + 1]; i++)
            TRY(add_calls(p, &p->cut.pieces[i], &border, constants, n_constants));
    }
    plan->first_call[segments->count] = plan->n_calls;
    for (uint32_t b = 0; b < plan->n_blocks; b++) TRY(choose_weights(p, b, constants, n_constants[b]));
    return CODE_OK;
}

Code npu_plan(Context *ctx, Arena *arena, const Npuir *ir, const Segments *segments, const PlanOptions *options,
              NpuPlan **out) {
    Planner p = {.ctx = ctx, .arena = arena, .head_columns = options->head_columns};
    Arena scratch;
    *out = NULL;
    if (p.head_columns < 0) return fail(ctx, CODE_INVALID, "head_columns must not be negative");
    if (p.head_columns == 0) p.head_columns = DEFAULT_HEAD_COLUMNS;
    if (p.head_columns < COLUMN_MULTIPLE) p.head_columns = COLUMN_MULTIPLE;
    TRY(ARENA_NEW(ctx, arena, 1, &p.plan));
    p.plan->ir = ir;
    p.plan->segments = *segments;
    arena_init(&scratch);
    p.tokens.arena = &scratch;
    Code code = make_plan(&p, segments, options);
    if (code == CODE_OK) code = plan_check(ctx, p.plan);
    arena_destroy(&scratch);
    if (code == CODE_OK) *out = p.plan;
    return code;
}
