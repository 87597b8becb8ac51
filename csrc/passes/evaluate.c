/* Compile-time evaluation in four steps: mark what could be known, choose what the program needs of it, compute that,
 * put constants in its place. Choosing before computing keeps big intermediates (a weight that is only reshaped) from
 * being made. */
#include "passes/evaluate.h"

#include <string.h>

/* What is known of one value. */
typedef struct Known {
    Tensor tensor; /* data NULL until computed, or for ever: shape only */
    Sources sources;
    struct Known *base; /* a view: of this; its memory is base's, `offset` elements in */
    int64_t offset;
    int64_t constant; /* >= 0: memory of this constant (also through views) */
    bool is_full;     /* `full`, or a view of one */
    bool shape_only;  /* made from constants without memory */
    bool wanted;      /* needed by something that is computed */
    bool chosen;      /* becomes a constant of the program */
    void *kept;       /* computed memory, copied to where it lives on */
} Known;

typedef struct Folder {
    PassContext *pc;
    Graph *g;
    const FoldPolicy *policy;
    Arena *scratch;
    Known **known; /* by value id */
    Uses uses;
    bool *failed;      /* by node id: the evaluator could not */
    bool *gone;        /* by node id: nothing in the program uses its results any more */
    bool *weight_only; /* by node id: stays in the program because only contractions use it, as their matrix */
    bool any_failed, any_known;
} Folder;

static Known *operand_known(const Folder *f, const Node *node, uint32_t k) {
    ValueId v = k < node->n_operands ? node->operands[k] : VALUE_NONE;
    return v == VALUE_NONE ? NULL : f->known[graph_resolve(f->g, v)];
}

static void row_major(Tensor *t) {
    int64_t stride = 1;
    for (int d = t->rank; d-- > 0;) {
        t->strides[d] = stride;
        stride *= t->shape[d];
    }
}

static Tensor value_tensor(const Value *v) {
    Tensor t = {.dtype = v->dtype, .rank = v->rank};
    if (v->rank) memcpy(t.shape, v->shape, v->rank * sizeof *v->shape);
    row_major(&t);
    return t;
}

static Code new_known(Folder *f, ValueId v, Known **out) {
    TRY(ARENA_NEW(f->pc->ctx, f->scratch, 1, out));
    **out = (Known){.tensor = value_tensor(graph_value(f->g, v)), .constant = -1, .sources.name = ""};
    f->known[v] = *out;
    f->any_known = true;
    return CODE_OK;
}

/* --- mark --------------------------------------------------------------------------------------------------------- */

static Code mark_constant(Folder *f, const Node *node) {
    const Constant *c = &f->g->constants[node_int(node, ATTR_index)];
    Known *k;
    if (c->dtype == DTYPE_OBJECT) return CODE_OK;
    TRY(new_known(f, node->first_result, &k));
    k->tensor = constant_tensor(c);
    k->constant = node_int(node, ATTR_index);
    k->shape_only = !c->data && c->bytes > 0;
    if (c->bytes == 0) k->tensor.data = f; /* no element is read, and NULL would say that it is not known */
    bool narrow = dtype_is_int(c->dtype) && dtype_size(c->dtype) < 4, state = c->kind == CONSTANT_STATE || c->derived;
    if (state) k->sources = (Sources){true, false, c->bytes, c->name};
    k->sources.narrow = narrow && (state || c->bytes > SMALL_BYTES);
    return CODE_OK;
}

static Code mark_full(Folder *f, const Node *node) {
    Known *k;
    Scalar unused;
    void *element;
    const Value *v = graph_value(f->g, node->first_result);
    unsigned char zero[16] = {0};
    if (!scalar_load(v->dtype, zero, &unused)) return CODE_OK;
    TRY(new_known(f, node->first_result, &k));
    TRY(arena_alloc(f->pc->ctx, f->scratch, sizeof zero, &element));
    scalar_store(node_attr(node, ATTR_value)->s, v->dtype, element);
    k->tensor.data = element;
    memset(k->tensor.strides, 0, sizeof k->tensor.strides);
    k->is_full = true;
    return CODE_OK;
}

static Code mark_view(Folder *f, const Node *node, Known *base, bool *done) {
    Tensor t;
    int64_t offset;
    Known *k;
    const Value *result = graph_value(f->g, node->first_result);
    *done = base->is_full || view_tensor(node, result, &base->tensor, &t, &offset);
    if (!*done) return CODE_OK;
    TRY(new_known(f, node->first_result, &k));
    ValueId v = node->first_result;
    *k = *base;
    if (base->is_full) {
        k->tensor = value_tensor(graph_value(f->g, v));
        k->tensor.data = base->tensor.data;
        memset(k->tensor.strides, 0, sizeof k->tensor.strides);
        return CODE_OK;
    }
    k->tensor = t;
    k->base = base;
    k->offset = offset;
    k->wanted = k->chosen = false;
    return CODE_OK;
}

static bool is_source(Op op) { return op == OP_constant || op == OP_full; }

/* Only where a node has no operand but sources and known values: few weights have such users. */
static Code mark_source(Folder *f, const Node *node) {
    return node->op == OP_constant ? mark_constant(f, node) : mark_full(f, node);
}

static Code mark_node(Folder *f, NodeId id) {
    const Graph *g = f->g;
    const Node *node = graph_node(g, id);
    if (is_source(node->op) || node->op == OP_input || node->op == OP_host || f->failed[id]) return CODE_OK;
    for (uint32_t k = 0; k < node->n_operands; k++) {
        if (node->operands[k] == VALUE_NONE || operand_known(f, node, k)) continue;
        if (!is_source(value_node(g, graph_resolve(g, node->operands[k]))->op)) return CODE_OK;
    }

    Sources sources = {.name = ""};
    for (uint32_t k = 0; k < node->n_operands; k++) {
        if (node->operands[k] == VALUE_NONE) continue;
        if (!operand_known(f, node, k)) TRY(mark_source(f, value_node(g, graph_resolve(g, node->operands[k]))));
        const Known *operand = operand_known(f, node, k);
        if (!operand) return CODE_OK;
        sources.narrow |= operand->sources.narrow;
        if (!operand->sources.state) continue;
        if (!sources.state) sources.name = operand->sources.name;
        sources.state = true;
        sources.bytes += operand->sources.bytes;
    }
    if (op_is(node->op, VIEW)) {
        bool done;
        TRY(mark_view(f, node, operand_known(f, node, 0), &done));
        if (done) return CODE_OK;
    }
    int64_t bytes = 0;
    for (uint32_t k = 0; k < node->n_results; k++) {
        Tensor t = value_tensor(graph_value(f->g, node_result(node, k)));
        if (t.dtype == DTYPE_OBJECT) return CODE_OK;
        if (__builtin_add_overflow(bytes, tensor_bytes(&t), &bytes)) return CODE_OK;
    }
    if (!f->pc->eval || !f->policy->may_fold(f->pc, &sources, bytes)) return CODE_OK;
    for (uint32_t k = 0; k < node->n_results; k++) {
        Known *result;
        TRY(new_known(f, node_result(node, k), &result));
        result->sources = sources;
    }
    return CODE_OK;
}

/* --- choose ------------------------------------------------------------------------------------------------------- */

/* Is `v` the matrix, and nothing else, of contractions (maybe through nodes for which that holds)? */
static bool only_weight(const Folder *f, ValueId v) {
    if (f->uses.output_uses[v] || f->uses.start[v] == f->uses.start[v + 1]) return false;
    for (uint32_t u = f->uses.start[v]; u < f->uses.start[v + 1]; u++) {
        const Node *user = graph_node(f->g, f->uses.users[u]);
        if (f->weight_only[f->uses.users[u]]) continue;
        if (!op_is(user->op, CONTRACTION) && user->op != OP_conv) return false;
        for (uint32_t k = 0; k < user->n_operands; k++)
            if (k != 1 && user->operands[k] != VALUE_NONE && graph_resolve(f->g, user->operands[k]) == v) return false;
    }
    return true;
}

/* Is the value's memory there already, so that a constant for it costs nothing? */
static bool is_free(const Known *k) { return k->constant >= 0 || k->is_full; }

static Code choose(Folder *f) {
    bool *needed; /* by value: the program still uses it */
    TRY(ARENA_NEW(f->pc->ctx, f->scratch, f->g->n_values, &needed));
    for (uint32_t i = 0; i < f->g->n_outputs; i++) needed[graph_resolve(f->g, f->g->outputs[i])] = true;

    for (NodeId id = f->g->last; id != NODE_NONE; id = graph_node(f->g, id)->prev) {
        const Node *node = graph_node(f->g, id);
        if (node->n_operands == 0 && node->op != OP_arange) continue;
        bool folded = node->n_results > 0 && f->known[node->first_result];
        bool any_wanted = false;
        for (uint32_t r = 0; folded && r < node->n_results; r++) {
            Known *k = f->known[node_result(node, r)];
            any_wanted |= k->wanted;
            if (!needed[node_result(node, r)]) continue;
            bool weight = only_weight(f, node_result(node, r));
            f->weight_only[id] = weight && !is_free(k);
            folded = is_free(k) ||
                     f->policy->may_keep(f->pc, &k->sources, tensor_bytes(&k->tensor), weight, f->policy->user);
            k->chosen = folded;
            any_wanted |= folded;
        }
        f->gone[id] = folded;
        if (!folded)
            for (uint32_t r = 0; r < node->n_results; r++)
                if (f->known[node_result(node, r)]) f->known[node_result(node, r)]->chosen = false;
        for (uint32_t k = 0; k < node->n_operands; k++) {
            if (node->operands[k] == VALUE_NONE) continue;
            ValueId v = graph_resolve(f->g, node->operands[k]);
            if (!folded) needed[v] = true;
            if (any_wanted && f->known[v]) f->known[v]->wanted = true;
        }
    }
    return CODE_OK;
}

/* --- compute ------------------------------------------------------------------------------------------------------ */

static Code evaluate(Folder *f, NodeId id) {
    PassContext *pc = f->pc;
    const Node *node = graph_node(f->g, id);
    Tensor *in, *out;
    bool shape_only = false;
    TRY(ARENA_NEW(pc->ctx, f->scratch, node->n_operands, &in));
    TRY(ARENA_NEW(pc->ctx, f->scratch, node->n_results, &out));
    for (uint32_t k = 0; k < node->n_operands; k++) {
        const Known *operand = operand_known(f, node, k);
        if (!operand) continue;
        in[k] = operand->tensor;
        shape_only |= operand->shape_only;
        if (!operand->shape_only && !operand->tensor.data) return CODE_OK; /* depends on one that failed */
    }
    if (!shape_only) {
        for (uint32_t k = 0; k < node->n_results; k++) {
            out[k] = f->known[node_result(node, k)]->tensor;
            TRY(arena_alloc(pc->ctx, f->scratch, (size_t)tensor_bytes(&out[k]), &out[k].data));
        }
        Code code = pc->eval(pc->ctx, f->g, id, in, node->n_operands, out, node->n_results, pc->eval_user);
        if (code == CODE_NO_MEMORY || code == CODE_CANCELLED) return code;
        if (code != CODE_OK) {
            /* No kernel, or an error that belongs to the run (an index out of range): the node stays. */
            pc->ctx->code = CODE_OK;
            pc->ctx->text[0] = 0;
            f->failed[id] = f->any_failed = true;
            return CODE_OK;
        }
    }
    for (uint32_t k = 0; k < node->n_results; k++) {
        Known *result = f->known[node_result(node, k)];
        result->tensor.data = out[k].data;
        result->shape_only = shape_only;
    }
    return CODE_OK;
}

static Code compute(Folder *f) {
    GRAPH_EACH(f->g, id) {
        const Node *node = graph_node(f->g, id);
        if (node->n_results == 0) continue;
        Known *first = f->known[node->first_result];
        bool wanted = false;
        for (uint32_t k = 0; first && k < node->n_results; k++) {
            const Known *result = f->known[node_result(node, k)];
            wanted |= result->wanted || result->chosen;
        }
        if (!wanted || node->op == OP_constant || first->is_full) continue;
        if (!first->base) {
            TRY(evaluate(f, id));
            continue;
        }
        first->shape_only = first->base->shape_only;
        if (first->base->tensor.data) {
            size_t skip = (size_t)first->offset * dtype_size(first->tensor.dtype);
            first->tensor.data = (char *)first->base->tensor.data + skip;
        }
    }
    return CODE_OK;
}

/* --- put constants in place --------------------------------------------------------------------------------------- */

static int64_t spanned_bytes(const Tensor *t) {
    int64_t last = 0;
    if (tensor_count(t) == 0) return 0;
    for (int d = 0; d < t->rank; d++) last += (t->shape[d] - 1) * t->strides[d];
    return (last + 1) * (int64_t)dtype_size(t->dtype);
}

/* Memory of a computed value (or of what it is a view of) that outlives the pass. */
static Code keep_memory(Folder *f, Known *k, void **out) {
    int64_t offset = 0;
    for (; k->base; k = k->base) offset += k->offset;
    *out = NULL;
    if (k->shape_only) return CODE_OK;
    if (!k->kept) TRY(arena_copy(f->pc->ctx, f->pc->arena, k->tensor.data, (size_t)tensor_bytes(&k->tensor), &k->kept));
    *out = (char *)k->kept + (size_t)offset * dtype_size(k->tensor.dtype);
    return CODE_OK;
}

/* Only of what was computed from the program alone: state may change its values. */
static bool is_uniform(const Known *k, Scalar *element) {
    if (k->is_full) return scalar_load(k->tensor.dtype, k->tensor.data, element);
    if (k->constant >= 0 || k->sources.state || k->shape_only) return false;
    int64_t count = tensor_count(&k->tensor);
    if (count == 0 || !tensor_is_contiguous(&k->tensor)) return false;
    size_t size = dtype_size(k->tensor.dtype);
    const char *data = k->tensor.data;
    return memcmp(data, data + size, (size_t)(count - 1) * size) == 0 && scalar_load(k->tensor.dtype, data, element);
}

static Code remark_made(Folder *f, const Known *k, int32_t source) {
    Text shape;
    text_init(&shape);
    text_add(&shape, "%s[", dtype_name(k->tensor.dtype));
    for (int d = 0; d < k->tensor.rank; d++) text_add(&shape, d ? ", %lld" : "%lld", (long long)k->tensor.shape[d]);
    const char *name = k->sources.name;
    Code code = text_done(f->pc->ctx, &shape);
    if (code == CODE_OK)
        code = remark_add(f->pc, f->policy->pass, source, "made: %s]%s%s", shape.data, name[0] ? " from " : "", name);
    text_destroy(&shape);
    return code;
}

static Code put(Folder *f, NodeId id, ValueId v, Known *k) {
    Context *ctx = f->pc->ctx;
    Graph *g = f->g;
    int32_t source = graph_node(g, id)->source;
    Type type = value_type(g, v);
    Scalar element;
    NodeId made;
    if (is_uniform(k, &element)) {
        TRY(graph_insert(ctx, g, id, OP_full, NULL, 0, &type, 1, source, &made));
        node_attr_mut(graph_node(g, made), ATTR_value)->s = element;
    } else {
        Constant c = {.kind = CONSTANT_LITERAL, .name = k->sources.name, .derived = k->sources.state};
        if (k->constant >= 0) {
            c = g->constants[k->constant];
            c.data = k->tensor.data;
        } else {
            TRY(keep_memory(f, k, &c.data));
            if (f->policy->remarks) TRY(remark_made(f, k, source));
        }
        c.dtype = k->tensor.dtype;
        c.rank = k->tensor.rank;
        c.shape = k->tensor.shape;
        c.strides = k->tensor.strides;
        c.bytes = spanned_bytes(&k->tensor);
        uint32_t index;
        TRY(graph_add_constant(ctx, g, &c, &index));
        TRY(graph_insert(ctx, g, id, OP_constant, NULL, 0, &type, 1, source, &made));
        node_attr_mut(graph_node(g, made), ATTR_index)->i = index;
    }
    graph_replace(g, v, graph_node(g, made)->first_result);
    return CODE_OK;
}

static Code place(Folder *f, bool *changed) {
    GRAPH_EACH(f->g, id) {
        if (!f->gone[id]) continue;
        uint32_t first = graph_node(f->g, id)->first_result, n = graph_node(f->g, id)->n_results;
        for (uint32_t r = 0; r < n; r++) {
            Known *k = f->known[first + r];
            if (k->chosen) TRY(put(f, id, first + r, k)); /* before the node: this loop does not meet it */
        }
        graph_kill(f->g, id);
        *changed = true;
    }
    return *changed ? graph_compact(f->pc->ctx, f->g) : CODE_OK;
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

static Code fold(Folder *f, bool *changed) {
    Context *ctx = f->pc->ctx;
    Graph *g = f->g;
    TRY(ARENA_NEW(ctx, f->scratch, g->n_nodes, &f->failed));
    /* A node that the evaluator refuses changes what can be chosen. Its users are unknown from then on, so few rounds
     * do. */
    do {
        f->any_failed = false;
        TRY(ARENA_NEW(ctx, f->scratch, g->n_values, &f->known));
        TRY(ARENA_NEW(ctx, f->scratch, g->n_nodes, &f->gone));
        TRY(ARENA_NEW(ctx, f->scratch, g->n_nodes, &f->weight_only));
        f->any_known = false;
        GRAPH_EACH(g, id) TRY(mark_node(f, id));
        if (!f->any_known) return CODE_OK;
        if (!f->uses.start) TRY(graph_uses(ctx, g, f->scratch, &f->uses));
        TRY(choose(f));
        TRY(compute(f));
    } while (f->any_failed);
    return place(f, changed);
}

Code fold_graph(PassContext *pc, Graph *g, const FoldPolicy *policy, bool *changed) {
    Arena scratch;
    arena_init(&scratch);
    Folder folder = {.pc = pc, .g = g, .policy = policy, .scratch = &scratch};
    Code code = fold(&folder, changed);
    arena_destroy(&scratch);
    return code;
}
