/* Layout: transposes folded into what is before them, fills turned into memory.
 * Requires: nothing. Keeps: every value; only where elements lie in memory changes. Breaks: a later pass must not
 * assume that results are row major (`order` says how they lie).
 *
 * A kernel that can write its result in any memory order (STRIDED_OUT) writes it in the order in which a permute after
 * it reads, so that the permuted value is row major and the reshape or contraction behind needs no copy. The case that
 * matters: attention [B, H, S, D] -> permute [B, S, H, D] -> reshape [B, S, H * D] -> linear. */
#include "passes/evaluate.h"

#include <string.h>

enum { MATERIALISE_BYTES = 1 << 20 }; /* larger fills are done by the run */

typedef struct Layout {
    PassContext *pc;
    Graph *g;
    Uses uses;
} Layout;

static const Attr *order_of(const Node *node) {
    static const Attr none = {.ints = {0}};
    return node_has_attr(node, ATTR_order) ? node_attr(node, ATTR_order) : &none;
}

static bool same_ints(const Attr *a, const Attr *b) {
    size_t size = a->ints.count * sizeof(int64_t);
    return a->ints.count == b->ints.count && (size == 0 || memcmp(a->ints.items, b->ints.items, size) == 0);
}

/* Does something that uses the permuted value have to copy it when the operand of the permute is row major? */
static bool permute_costs(const Layout *l, const Node *permute) {
    const Graph *g = l->g;
    const Value *x = graph_value(g, permute->operands[0]);
    Tensor row_major = {.dtype = x->dtype, .rank = x->rank}, permuted, reshaped;
    int64_t stride = 1, offset;
    for (int d = x->rank; d-- > 0;) {
        row_major.shape[d] = x->shape[d];
        row_major.strides[d] = stride;
        stride *= x->shape[d];
    }
    ValueId v = permute->first_result;
    view_tensor(permute, graph_value(g, v), &row_major, &permuted, &offset);
    if (tensor_is_contiguous(&permuted)) return false;
    if (l->uses.output_uses[v]) return true;
    for (uint32_t u = l->uses.start[v]; u < l->uses.start[v + 1]; u++) {
        const Node *user = graph_node(g, l->uses.users[u]);
        if (user->op == OP_reshape) {
            if (!view_tensor(user, graph_value(g, user->first_result), &permuted, &reshaped, &offset)) return true;
        } else if (user->op != OP_host && !op_is(user->op, VIEW) && !op_is(user->op, STRIDED_OUT)) {
            return true; /* kernels that write strided memory read it, too; the others may not */
        }
    }
    return false;
}

/* The memory order in which all users of `node` want its result; NULL: row major. */
static const Attr *wanted_order(const Layout *l, const Node *node) {
    ValueId v = node->first_result;
    const Attr *order = NULL;
    bool pays = false;
    for (uint32_t u = l->uses.start[v]; u < l->uses.start[v + 1]; u++) {
        const Node *user = graph_node(l->g, l->uses.users[u]);
        const Attr *wish;
        if (user->op == OP_permute) {
            wish = node_attr(user, ATTR_dims);
            pays |= permute_costs(l, user);
        } else if (op_is(user->op, ELEMENTWISE) && order_of(user)->ints.count == graph_value(l->g, v)->rank) {
            wish = order_of(user); /* reads and writes in one order */
            pays = true;
        } else {
            return NULL;
        }
        if (order && !same_ints(order, wish)) return NULL;
        order = wish;
    }
    return pays ? order : NULL;
}

static Code choose_orders(Layout *l) {
    Graph *g = l->g;
    for (NodeId id = g->last; id != NODE_NONE; id = graph_node(g, id)->prev) {
        Node *node = graph_node(g, id);
        if (!op_is(node->op, STRIDED_OUT) || order_of(node)->ints.count) continue;
        if (l->uses.output_uses[node->first_result]) continue; /* written into the caller's memory as it is */
        const Attr *order = wanted_order(l, node);
        if (!order || order->ints.count != graph_value(g, node->first_result)->rank) continue;
        TRY(attr_set_ints(l->pc->ctx, g, node_attr_mut(node, ATTR_order), order->ints.items, order->ints.count));
        TRY(remark_add(l->pc, "layout", node->source, "matched: %s writes the order that a permute reads",
                       op_info(node->op)->name));
    }
    return CODE_OK;
}

/* A contiguous() of a permute whose operand lies in that order copies memory onto its like. Where host calls have
 * effects they could tell the copy from the original. */
static void drop_copies(Layout *l) {
    Graph *g = l->g;
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        if (node->op == OP_host && node_int(node, ATTR_effect)) return;
    }
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        if (node->op != OP_contiguous || order_of(node)->ints.count) continue;
        const Node *permute = value_node(g, node->operands[0]);
        if (permute->op != OP_permute) continue;
        const Node *maker = value_node(g, permute->operands[0]);
        if (order_of(maker)->ints.count == 0 || !same_ints(order_of(maker), node_attr(permute, ATTR_dims))) continue;
        graph_replace(g, node->first_result, node->operands[0]);
        graph_kill(g, id);
    }
}

/* `full` becomes a constant: one element seen with strides 0 where only elementwise kernels read it, else real
 * memory. */
static Code place_full(Layout *l, NodeId id) {
    Context *ctx = l->pc->ctx;
    Graph *g = l->g;
    const Node *node = graph_node(g, id);
    ValueId v = node->first_result;
    Type type = value_type(g, v);
    Scalar unused;
    const unsigned char zero[16] = {0};
    if (!scalar_load(type.dtype, zero, &unused) || l->uses.output_uses[v]) return CODE_OK;
    bool splat = true;
    for (uint32_t u = l->uses.start[v]; u < l->uses.start[v + 1]; u++) {
        Op user = graph_node(g, l->uses.users[u])->op;
        if (user == OP_host) return CODE_OK; /* might write it */
        splat &= op_is(user, ELEMENTWISE);
    }
    int64_t strides[MAX_RANK] = {0}, size = (int64_t)dtype_size(type.dtype), count = 1;
    for (int d = type.rank; d-- > 0;) {
        strides[d] = splat ? 0 : count;
        if (__builtin_mul_overflow(count, type.shape[d], &count)) return CODE_OK;
    }
    if (count == 0) splat = false;
    int64_t stored = splat ? 1 : count;
    if (stored > MATERIALISE_BYTES / size) return CODE_OK;
    Constant c = {.kind = CONSTANT_LITERAL, .name = "", .dtype = type.dtype, .rank = type.rank, .shape = type.shape};
    c.strides = strides;
    c.bytes = stored * size;
    TRY(arena_alloc(ctx, l->pc->arena, (size_t)c.bytes, &c.data));
    for (int64_t i = 0; i < stored; i++)
        scalar_store(node_attr(node, ATTR_value)->s, type.dtype, (char *)c.data + i * size);
    uint32_t index;
    NodeId made;
    int32_t source = node->source;
    TRY(graph_add_constant(ctx, g, &c, &index));
    TRY(graph_insert(ctx, g, id, OP_constant, NULL, 0, &type, 1, source, &made));
    node_attr_mut(graph_node(g, made), ATTR_index)->i = index;
    graph_replace(g, v, graph_node(g, made)->first_result);
    graph_kill(g, id);
    return CODE_OK;
}

static Code run(Layout *l, Arena *scratch) {
    TRY(graph_compact(l->pc->ctx, l->g));
    TRY(graph_uses(l->pc->ctx, l->g, scratch, &l->uses));
    if (l->pc->options.fuse_layout) {
        TRY(choose_orders(l));
        drop_copies(l);
    }
    GRAPH_EACH(l->g, id)
        if (graph_node(l->g, id)->op == OP_full) TRY(place_full(l, id));
    return graph_compact(l->pc->ctx, l->g);
}

Code pass_layout(PassContext *pc, Graph *g) {
    Arena scratch;
    arena_init(&scratch);
    Layout layout = {.pc = pc, .g = g};
    Code code = run(&layout, &scratch);
    arena_destroy(&scratch);
    return code;
}
