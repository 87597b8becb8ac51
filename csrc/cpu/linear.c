/* linear and matmul: both are a batched product A * B with an epilogue; linear's B is its weight turned around. */
#include "cpu/gemm.h"

enum { LINEAR_FIXED = 3, MATMUL_FIXED = 2 }; /* operands before those of the epilogue */

static GemmOperand transposed(GemmOperand o) { return (GemmOperand){o.data, o.dtype, o.col, o.row}; }

static GemmOperand last_two(const Tensor *t) {
    bool matrix = t->rank >= 2;
    return (GemmOperand){t->data, t->dtype, matrix ? t->strides[t->rank - 2] : 0,
                         t->rank ? t->strides[t->rank - 1] : 0};
}

static int64_t size_of(const Tensor *t, int from_end) { return t->rank >= from_end ? t->shape[t->rank - from_end] : 1; }

Code gemm_failed(Context *ctx, const KernelParts *parts) { return ew_fail(ctx, (EwFault)atomic_load(parts->fault)); }

/* What is prepared of a weight is a copy that lies as nn.Linear's, not panels of f32. */
static bool turns_bf16(DType dtype) { return dtype == DTYPE_BF16 && cpu_has_avx512_bf16(); }

static bool rounds(const Gemm *g) {
    if (g->rounding == GEMM_ROUNDS_WHERE_FAST) return cpu_has_avx512_bf16() && gemm_bf16_serves(g);
    return g->rounding == GEMM_ROUNDS;
}

Code gemm_call(KernelCall *call, Gemm *gemm, uint32_t first, const Tensor *bias, int64_t row) {
    GemmFinish finish;
    if (gemm->batch * gemm->m * gemm->n == 0) return CODE_OK;
    TRY(gemm_finish_init(&finish, call, first, bias));
    finish.out += row * finish.n * (int64_t)finish.out_size;
    gemm->finish = &finish;
    if (call->prepared && turns_bf16(gemm->b.dtype)) {
        gemm->b = gemm_bf16_turned(call->prepared, gemm->k);
        gemm->rounding = GEMM_ROUNDS;
    } else {
        gemm->panels = call->prepared;
    }
    gemm_fold_batch(gemm);
    if (rounds(gemm))
        gemm_bf16_run(gemm, call->pool, call->scratch);
    else if (gemm_turns(gemm))
        gemm_turned_run(gemm, call->pool, call->scratch);
    else if (gemm_in_f32(gemm->a.dtype))
        gemm_run(gemm, call->pool, call->scratch);
    else
        TRY(gemm_plain_run(call->ctx, gemm, call->pool, call->scratch));
    return ew_fail(call->ctx, (EwFault)atomic_load(&finish.fault));
}

static Gemm linear_product(const KernelCall *call) {
    const Tensor *x = &call->in[0], *w = &call->in[1];
    Gemm gemm = {.batch = 1,
                 .m = size_of(x, 2),
                 .n = w->shape[0],
                 .k = w->shape[1],
                 .a = last_two(x),
                 .b = transposed(last_two(w)),
                 .rounding = GEMM_ROUNDS_WHERE_FAST};
    for (int d = 0; d + 2 < x->rank; d++) gemm_add_batch(&gemm, x->shape[d], x->strides[d], 0);
    return gemm;
}

Code linear_run(KernelCall *call) {
    Gemm gemm = linear_product(call);
    return gemm_call(call, &gemm, LINEAR_FIXED, call->n_in > 2 ? &call->in[2] : NULL, 0);
}

Code matmul_run(KernelCall *call) {
    const Tensor *a = &call->in[0], *b = &call->in[1];
    Gemm gemm = {.batch = 1,
                 .m = size_of(a, 2),
                 .n = size_of(b, 1),
                 .k = size_of(a, 1),
                 .a = last_two(a),
                 .b = last_two(b),
                 .rounding = GEMM_ROUNDS_WHERE_FAST};
    for (int d = 0; d + 2 < a->rank; d++)
        gemm_add_batch(&gemm, a->shape[d] == 1 ? b->shape[d] : a->shape[d], a->shape[d] == 1 ? 0 : a->strides[d],
                       b->shape[d] == 1 ? 0 : b->strides[d]);
    return gemm_call(call, &gemm, MATMUL_FIXED, NULL, 0);
}

/* --- constant weights --------------------------------------------------------------------------------------------- */
/* The constant behind the value, seen through views that never need a copy; NULL: none with data. `*stride`: its step
 * along the value's dimension `dim`. */
static const Constant *find_constant(const Graph *g, ValueId v, int64_t dim, int64_t *stride) {
    const Node *node = value_node(g, v);
    int64_t step = 1;
    while (node->op == OP_permute || node->op == OP_slice) {
        if (node->op == OP_permute)
            dim = node_attr(node, ATTR_dims)->ints.items[dim];
        else if (node_int(node, ATTR_dim) == dim)
            step *= node_int(node, ATTR_step);
        node = value_node(g, node->operands[0]);
    }
    if (node->op != OP_constant) return NULL;
    const Constant *constant = &g->constants[node_int(node, ATTR_index)];
    *stride = constant->data ? constant->strides[dim] * step : 0;
    return constant->data ? constant : NULL;
}

static int64_t rows_of(const Value *x) {
    int64_t rows = 1;
    for (int d = 0; d + 1 < x->rank; d++) rows *= x->shape[d];
    return rows;
}

/* Bytes of panels; 0 where the weight is used as it lies. `k_dim`, `n_dim`: its dimensions of sizes k and n. */
static int64_t prepared_bytes(const Graph *g, const Node *node, int64_t k_dim, int64_t n_dim, int64_t n, int64_t k) {
    ValueId weight = node->operands[1];
    int64_t stride, n_stride;
    if (!gemm_in_f32(graph_value(g, weight)->dtype) || n == 0 || k == 0 || !find_constant(g, weight, k_dim, &stride) ||
        !find_constant(g, weight, n_dim, &n_stride))
        return 0;
    if (stride == 1) return 0;
    if (turns_bf16(graph_value(g, weight)->dtype)) return gemm_bf16_turned_bytes(n, k);
    /* rows of n in memory serve as well, but for few rows of x, which wait for memory: panels are read in long runs */
    return n_stride == 1 && rows_of(graph_value(g, node->operands[0])) > GEMM_ROWS ? 0 : gemm_panels_bytes(n, k);
}

/* --- beside other products ---------------------------------------------------------------------------------------- */
/* At the beginning of the scratch of a product that can run beside others; then what gemm_turned.c keeps. */
typedef struct Split {
    _Alignas(64) Gemm gemm;
    GemmFinish finish;
} Split;

int64_t gemm_split_bytes(void) { return (int64_t)sizeof(Split) + gemm_turned_few_bytes(); }

Code gemm_split(KernelCall *call, const Gemm *gemm, uint32_t first, const Tensor *bias, KernelParts *parts) {
    Split *split = call->scratch;
    GemmFew *few = (GemmFew *)(void *)(split + 1);
    void *rest = (char *)call->scratch + gemm_split_bytes();
    Gemm product = *gemm;
    TRY(gemm_finish_init(&split->finish, call, first, bias));
    product.finish = &split->finish;
    gemm_fold_batch(&product);
    split->gemm = product;
    if (rounds(&product))
        rest = gemm_bf16_begin(&product, &split->gemm, NULL, rest);
    else if (product.batch != 1 || !gemm_turns(&product))
        return fail(call->ctx, CODE_INTERNAL, "a product that cannot run beside others");
    gemm_turned_split(&split->gemm, few, rest, parts);
    return CODE_OK;
}

/* Weights whose rows are used as they lie. */
static bool lies_turned(const Graph *g, const Node *node) {
    const Node *source = value_node(g, node->operands[1]);
    return source->op == OP_constant && g->constants[node_int(source, ATTR_index)].strides[1] == 1;
}

int64_t linear_columns(const Graph *g, const Node *node) {
    const Value *x = graph_value(g, node->operands[0]), *w = graph_value(g, node->operands[1]);
    bool taken = gemm_in_f32(x->dtype) && lies_turned(g, node) && w->shape[1] > 1 &&
                 prepared_bytes(g, node, 1, 0, w->shape[0], w->shape[1]) == 0;
    return taken ? gemm_turned_columns(rows_of(x), w->shape[0]) : 0;
}

Code linear_split(KernelCall *call, KernelParts *parts) {
    Gemm gemm = linear_product(call);
    return gemm_split(call, &gemm, LINEAR_FIXED, call->n_in > 2 ? &call->in[2] : NULL, parts);
}

/* --- scratch ------------------------------------------------------------------------------------------------------ */
/* Which batch dimensions become rows depends on strides, not known here: room for the worst case. `turned`: surely
 * so, unless it is tall. */
static int64_t worst_scratch(DType dtype, const int64_t *batch, int rank, int64_t m, int64_t n, int64_t k, bool turned,
                             int threads) {
    if (!gemm_in_f32(dtype)) return gemm_plain_scratch(threads);
    int64_t outer = 1, worst = 0;
    for (int d = 0; d < rank; d++) outer *= batch[d];
    if (dtype == DTYPE_BF16) worst = gemm_bf16_scratch(outer * m, n, k, threads);
    for (int d = rank; d >= 0; d--) {
        worst = max_i64(worst, gemm_turned_scratch(outer, m, n, k, threads));
        if (!turned || gemm_is_tall(outer, m, n, k))
            worst = max_i64(worst, gemm_scratch(outer, m, n, k, false, threads));
        if (d == 0 || batch[d - 1] == 0) break;
        outer /= batch[d - 1];
        m *= batch[d - 1];
    }
    return worst;
}

int64_t linear_scratch(const Graph *g, const Node *node, int threads) {
    const Value *x = graph_value(g, node->operands[0]), *w = graph_value(g, node->operands[1]);
    int rank = x->rank > 2 ? x->rank - 2 : 0;
    int64_t beside = linear_columns(g, node) ? gemm_split_bytes() : 0;
    return beside + worst_scratch(x->dtype, x->shape, rank, x->rank >= 2 ? x->shape[x->rank - 2] : 1, w->shape[0],
                                  w->shape[1], lies_turned(g, node), threads);
}

int64_t matmul_scratch(const Graph *g, const Node *node, int threads) {
    const Value *a = graph_value(g, node->operands[0]), *b = graph_value(g, node->operands[1]);
    int64_t batch[MAX_RANK];
    for (int d = 0; d + 2 < a->rank; d++) batch[d] = a->shape[d] == 1 ? b->shape[d] : a->shape[d];
    return worst_scratch(a->dtype, batch, a->rank - 2, a->shape[a->rank - 2], b->shape[b->rank - 1],
                         a->shape[a->rank - 1], false, threads);
}

/* --- packing ------------------------------------------------------------------------------------------------------ */
static Code prepare(Context *ctx, GemmOperand b, int64_t n, int64_t k, Pool *pool, void *prepared) {
    if (!b.data) return fail(ctx, CODE_INTERNAL, "the weight to be packed has no data");
    if (turns_bf16(b.dtype))
        gemm_bf16_turn(&b, n, k, pool, prepared);
    else
        gemm_pack(&b, n, k, pool, prepared);
    return CODE_OK;
}

int64_t linear_prepared_bytes(const Graph *g, const Node *node) {
    const Value *w = graph_value(g, node->operands[1]);
    return prepared_bytes(g, node, 1, 0, w->shape[0], w->shape[1]);
}

Code linear_prepare(Context *ctx, const Node *node, const Tensor *in, Pool *pool, void *prepared) {
    (void)node;
    return prepare(ctx, transposed(last_two(&in[1])), in[1].shape[0], in[1].shape[1], pool, prepared);
}

int64_t matmul_prepared_bytes(const Graph *g, const Node *node) {
    const Value *b = graph_value(g, node->operands[1]);
    for (int d = 0; d + 2 < b->rank; d++)
        if (b->shape[d] != 1) return 0;
    return prepared_bytes(g, node, b->rank - 2, b->rank - 1, b->shape[b->rank - 1], b->shape[b->rank - 2]);
}

Code matmul_prepare(Context *ctx, const Node *node, const Tensor *in, Pool *pool, void *prepared) {
    (void)node;
    return prepare(ctx, last_two(&in[1]), size_of(&in[1], 1), size_of(&in[1], 2), pool, prepared);
}
