/* Blocks and calls: makes a plan of how segments run on the device.
 *
 * plan_search.c cuts the segments into stretches of instructions; equal ones become calls of one block. A constant that
 * is the same in all calls stays in the block's graph, the others are arguments. A wide head is cut into column tiles
 * first, which are equal by themselves. */
#include "npu/plan.h"

#include <string.h>

enum { DEFAULT_HEAD_COLUMNS = 8192, COLUMN_MULTIPLE = 16 };
/* Constant weights: a graph a segment, or a graph a call of what repeats? By Intel's compiler's estimates (NPU4000) a
 * layer costs in us:
 *                   weights   in a graph of its own   as the second, third of one graph
 *     GPT-2  f16      14 MB         445 .. 461               441,  488
 *     Granite f16     21 MB            681                   626,  611
 *     Qwen2  f16      30 MB           1194                  1071, 1196
 *     Llama-1B int8   61 MB           2908                  2888
 *     Llama-1B f16   122 MB           2979                  3886, 3419
 *     Llama-8B int8  218 MB           9113             two of them: 18263
 * Launching a graph is not in these. The last one gains nothing but what its compiler has to hold at once. */
static const double LARGE_BLOCK = 100e6;

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

bool fold_from_name(const char *name, Fold *out) {
    static const char *const names[] = {"never", "always", "cut", "constant"};
    for (uint32_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i], name) != 0) continue;
        *out = (Fold)i;
        return true;
    }
    return false;
}

typedef struct Planner {
    Context *ctx;
    Arena *arena; /* of the plan */
    Tokens tokens;
    NpuPlan *plan;
    const PlanOptions *options;
    int64_t head_columns;
    Fold fold; /* the way that was chosen; not CONSTANT */
    Cut cut;
    uint32_t **constants;  /* of each call: those it reads, in order of first use */
    uint32_t *n_constants; /* of each block */
    uint32_t *kind;        /* of each block: of the stretches that it is made for */
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

/* Which of the constants that each call has differ between the calls. */
static Code choose_weights(Planner *p, uint32_t block) {
    const NpuPlan *plan = p->plan;
    NpuBlock *b = &plan->blocks[block];
    uint32_t *const *constants = p->constants;
    bool *differs;
    uint32_t first = UINT32_MAX, n = p->n_constants[block];
    TRY(ARENA_NEW(p->ctx, p->tokens.arena, n, &differs));
    for (uint32_t c = 0; c < plan->n_calls; c++) {
        if (plan->calls[c].block != block) continue;
        if (first == UINT32_MAX) first = c;
        for (uint32_t k = 0; k < n; k++) {
            if ((b->columns && p->fold == FOLD_ALWAYS) ||
                !same_constant(plan->ir->graph, constants[first][k], constants[c][k]))
                differs[k] = true;
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

/* What the constants of a stretch take on the device, about: matrices are taken for weights of linear. */
static double constant_bytes(Planner *p, Stretch stretch, Border *border) {
    const Graph *g = p->plan->ir->graph;
    const double matrix = p->options->precision == PRECISION_FP16    ? 2
                          : p->options->precision == PRECISION_W8A16 ? 1
                                                                     : 0.5;
    double bytes = 0;
    stretch_border(&p->tokens, stretch, border);
    for (uint32_t k = 0; k < border->n_constants; k++) {
        const Constant *c = &g->constants[border->constants[k]];
        double count = 1;
        for (uint32_t d = 0; d < c->rank; d++) count *= (double)c->shape[d];
        bytes += count * (!dtype_is_float(c->dtype) ? (double)dtype_size(c->dtype) : c->rank == 2 ? matrix : 2.0);
    }
    return bytes;
}

/* Is a repeated block of the cut so large that graphs of its own are faster? */
static bool has_large_block(Planner *p, const bool *again, Border *border) {
    double least = p->options->cut_bytes ? (double)p->options->cut_bytes : LARGE_BLOCK;
    for (uint32_t i = 0; i < p->cut.count; i++) {
        const Piece *piece = &p->cut.pieces[i];
        if (!piece->head && again[piece->kind] && constant_bytes(p, piece->stretch, border) >= least) return true;
    }
    return false;
}

static Code choose_fold(Planner *p, const Segments *segments, Border *border) {
    bool *there, *again;
    if (p->fold != FOLD_CONSTANT) return CODE_OK;
    TRY(ARENA_NEW(p->ctx, p->tokens.arena, p->cut.n_kinds, &there));
    TRY(ARENA_NEW(p->ctx, p->tokens.arena, p->cut.n_kinds, &again));
    for (uint32_t i = 0; i < p->cut.count; i++) {
        uint32_t kind = p->cut.pieces[i].kind;
        again[kind] = there[kind];
        there[kind] = true;
    }
    p->fold = has_large_block(p, again, border) ? FOLD_CUT : FOLD_NEVER;
    if (p->fold == FOLD_CUT) return CODE_OK;
    return cut_find(&p->tokens, segments, NULL, FOLD_NEVER, p->tokens.arena, &p->cut);
}

/* --- calls -------------------------------------------------------------------------------------------------------- */
static Code registers_of(Planner *p, const BufferId *buffers, uint32_t n, RegId **out) {
    TRY(ARENA_NEW(p->ctx, p->arena, n, out));
    for (uint32_t k = 0; k < n; k++) (*out)[k] = p->tokens.writers.reg[buffers[k]];
    return CODE_OK;
}

/* Can the block serve a call of that kind with these constants? */
static bool serves(const Planner *p, uint32_t block, uint32_t kind, const NpuCall *call, const uint32_t *constants) {
    const NpuPlan *plan = p->plan;
    uint32_t c = 0;
    if (p->kind[block] != kind) return false;
    if (p->fold == FOLD_ALWAYS) return true;
    if (plan->blocks[block].first_column != call->first_column) return false;
    while (plan->calls[c].block != block) c++;
    for (uint32_t k = 0; k < p->n_constants[block]; k++) {
        if (!same_constant(plan->ir->graph, p->constants[c][k], constants[k])) return false;
    }
    return true;
}

static void add_call(Planner *p, const Piece *piece, NpuCall call, const Border *border, uint32_t *constants,
                     int64_t columns) {
    NpuPlan *plan = p->plan;
    while (call.block < plan->n_blocks && !serves(p, call.block, piece->kind, &call, constants)) call.block++;
    NpuBlock *b = &plan->blocks[call.block];
    if (call.block == plan->n_blocks) {
        *b = (NpuBlock){.instrs = plan->ir->order + piece->stretch.first,
                        .n_instrs = piece->stretch.count,
                        .in = call.in,
                        .out = call.out,
                        .n_in = border->n_in,
                        .n_out = border->n_out,
                        .columns = columns,
                        .first_column = p->fold == FOLD_ALWAYS ? 0 : call.first_column};
        p->kind[call.block] = piece->kind;
        p->n_constants[call.block] = border->n_constants;
        plan->n_blocks++;
    }
    b->n_calls++;
    p->constants[plan->n_calls] = constants;
    plan->calls[plan->n_calls++] = call;
}

static Code add_calls(Planner *p, const Piece *piece, Border *border) {
    NpuCall call = {0};
    uint32_t *constants, tiles = 1;
    int64_t width = 0, columns = 0;
    stretch_border(&p->tokens, piece->stretch, border);
    TRY(registers_of(p, border->in, border->n_in, &call.in));
    TRY(registers_of(p, border->out, border->n_out, &call.out));
    TRY(ARENA_NEW(p->ctx, p->tokens.arena, border->n_constants, &constants));
    memcpy(constants, border->constants, border->n_constants * sizeof *constants);
    if (piece->head) {
        const Instr *instr = &p->plan->ir->instrs[p->plan->ir->order[piece->stretch.first]];
        width = head_width(p, piece, &tiles);
        columns = p->plan->ir->regs[instr->in[1]].shape[0];
    }
    for (uint32_t i = 0; i < tiles; i++) {
        call.first_column = i * width;
        if (piece->head && call.first_column > columns - width) call.first_column = columns - width;
        add_call(p, piece, call, border, constants, width);
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

static Code make_plan(Planner *p, const Segments *segments) {
    NpuPlan *plan = p->plan;
    const Npuir *ir = plan->ir;
    Border border;
    Stretch all = {0, ir->n_instrs};
    bool *heads;
    uint32_t n_calls = 0;
    Arena *scratch = p->tokens.arena;
    TRY(tokens_find(p->ctx, scratch, ir, segments, &p->tokens));
    TRY(border_alloc(p->ctx, scratch, ir, all, &border));
    TRY(ARENA_NEW(p->ctx, scratch, ir->n_instrs, &heads));
    if (p->fold != FOLD_NEVER) TRY(find_heads(p, segments, heads));
    TRY(cut_find(&p->tokens, segments, heads, p->fold, scratch, &p->cut));
    TRY(choose_fold(p, segments, &border));
    TRY(count_calls(p, &n_calls));
    TRY(ARENA_NEW(p->ctx, p->arena, n_calls, &plan->calls));
    TRY(ARENA_NEW(p->ctx, p->arena, n_calls, &plan->blocks));
    TRY(ARENA_NEW(p->ctx, p->arena, segments->count + 1, &plan->first_call));
    TRY(ARENA_NEW(p->ctx, scratch, n_calls, &p->constants));
    TRY(ARENA_NEW(p->ctx, scratch, n_calls, &p->n_constants));
    TRY(ARENA_NEW(p->ctx, scratch, n_calls, &p->kind));
    for (uint32_t s = 0; s < segments->count; s++) {
        plan->first_call[s] = plan->n_calls;
        for (uint32_t i = p->cut.first[s]; i < p->cut.first[s + 1]; i++) TRY(add_calls(p, &p->cut.pieces[i], &border));
    }
    plan->first_call[segments->count] = plan->n_calls;
    for (uint32_t b = 0; b < plan->n_blocks; b++) TRY(choose_weights(p, b));
    return CODE_OK;
}

Code npu_plan(Context *ctx, Arena *arena, const Npuir *ir, const Segments *segments, const PlanOptions *options,
              NpuPlan **out) {
    Planner p = {
        .ctx = ctx, .arena = arena, .options = options, .head_columns = options->head_columns, .fold = options->fold};
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
    Code code = make_plan(&p, segments);
    if (code == CODE_OK) code = plan_check(ctx, p.plan);
    arena_destroy(&scratch);
    if (code == CODE_OK) *out = p.plan;
    return code;
}
