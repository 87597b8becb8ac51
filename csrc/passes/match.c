#include "passes/match.h"

#include <math.h>
#include <string.h>

Code match_run(PassContext *pc, Graph *g, FusionFn fusion) {
    Arena scratch;
    arena_init(&scratch);
    Match m = {.pc = pc, .g = g, .scratch = &scratch, .n_values = g->n_values};
    GRAPH_EACH(g, id)
        m.effects = m.effects || (graph_node(g, id)->op == OP_host && node_int(graph_node(g, id), ATTR_effect));
    Code code = graph_uses(pc->ctx, g, &scratch, &m.uses);
    if (code == CODE_OK) code = fusion(&m);
    if (code == CODE_OK) code = pass_dce(pc, g); /* what lost its uses would still count as a user of others */
    arena_destroy(&scratch);
    return code;
}

NodeId match_def(const Match *m, ValueId v, Op op) {
    if (v >= m->n_values || graph_value(m->g, v)->forward != VALUE_NONE) return NODE_NONE;
    const Value *value = graph_value(m->g, v);
    const Node *node = graph_node(m->g, value->def);
    return value->result == 0 && node->op == op && !node->dead ? value->def : NODE_NONE;
}

bool match_one_use(const Match *m, ValueId v) {
    return v < m->n_values && use_count(&m->uses, v) == 1 && m->uses.output_uses[v] == 0;
}

NodeId match_only(const Match *m, ValueId v, Op op) { return match_one_use(m, v) ? match_def(m, v, op) : NODE_NONE; }

bool match_scalar(const Node *node, Op op, double *scalar) {
    if (node->op != op || node->n_operands != 1) return false;
    Scalar s = node_attr(node, ATTR_scalar)->s;
    if (node_int(node, ATTR_reverse) && op != OP_add && op != OP_mul) return false;
    *scalar = scalar_f64(s);
    return s.kind != SCALAR_NONE;
}

bool match_two(const Node *node, Op op) { return node->op == op && node->n_operands == 2; }

bool match_near(double a, double b) { return fabs(a - b) <= 1e-6 * fabs(b); }

bool match_same_type(const Match *m, ValueId a, ValueId b) {
    const Value *x = graph_value(m->g, a), *y = graph_value(m->g, b);
    return x->dtype == y->dtype && x->rank == y->rank && !memcmp(x->shape, y->shape, x->rank * sizeof *x->shape);
}

bool match_last_dim(const Match *m, const Node *reduce, ValueId x) {
    const Attr *dims = node_attr(reduce, ATTR_dims);
    unsigned rank = graph_value(m->g, x)->rank;
    return rank && dims->ints.count == 1 && dims->ints.items[0] == (int64_t)rank - 1 && node_int(reduce, ATTR_keepdim);
}

Code match_replace(Match *m, NodeId root, Op op, const ValueId *operands, size_t n_operands, NodeId *out) {
    Graph *g = m->g;
    ValueId old = graph_node(g, root)->first_result;
    Type types[2] = {value_type(g, old), value_type(g, old)};
    TRY(graph_insert(m->pc->ctx, g, root, op, operands, n_operands, types, op_info(op)->results,
                     graph_node(g, root)->source, out));
    graph_replace(g, old, graph_node(g, *out)->first_result);
    graph_kill(g, root);
    return CODE_OK;
}
