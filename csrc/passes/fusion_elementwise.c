/* Chains and small DAGs of elementwise operators become one program: each intermediate stays in cache. Every step
 * rounds as its operator alone would, so the result is the same to the bit. */
#include "passes/body.h"
#include "passes/fusion.h"

/* All uses of `v` are by `user`, so that its producer may disappear into it. */
static bool used_by_only(const Match *m, ValueId v, NodeId user) {
    if (m->uses.output_uses[v]) return false;
    for (uint32_t u = m->uses.start[v]; u < m->uses.start[v + 1]; u++)
        if (m->uses.users[u] != user) return false;
    return true;
}

static bool is_candidate(const Node *node) {
    return op_is(node->op, ELEMENTWISE) && node->op != OP_elementwise && node_attr(node, ATTR_order)->ints.count == 0;
}

/* The body of `node` with those producers inlined that fit; `taken` gets their ids. */
static bool build(const Match *m, NodeId id, Body *const *bodies, Body *body, NodeId taken[3], uint32_t *n_taken) {
    const Graph *g = m->g;
    const Node *node = graph_node(g, id);
    uint32_t limit = (uint32_t)m->pc->options.fusion_limit;
    int32_t srcs[3];
    *body = (Body){0};
    *n_taken = 0;
    for (uint32_t k = 0; k < node->n_operands; k++) {
        ValueId v = node->operands[k];
        NodeId def = graph_value(g, v)->def;
        for (uint32_t before = 0; before < k; before++)
            if (node->operands[before] == v) def = NODE_NONE, srcs[k] = srcs[before];
        if (def == NODE_NONE) continue;
        srcs[k] = STEP_NONE;
        const Value *value = graph_value(g, v), *result = graph_value(g, node->first_result);
        bool same_shape = value->rank == result->rank;
        for (unsigned d = 0; same_shape && d < value->rank; d++) same_shape = value->shape[d] == result->shape[d];
        if (bodies[def] && same_shape && used_by_only(m, v, id)) {
            Body trial = *body; /* room for the step itself must remain */
            int32_t source = limit > 1 ? body_append(&trial, bodies[def], limit - 1) : STEP_NONE;
            if (source != STEP_NONE) {
                *body = trial;
                srcs[k] = source;
                taken[(*n_taken)++] = def;
            }
        }
        if (srcs[k] == STEP_NONE) srcs[k] = body_input(body, v);
        if (srcs[k] == STEP_NONE) return false;
    }
    return body_add_node(body, g, node, srcs, limit);
}

Code fuse_elementwise(Match *m) {
    Graph *g = m->g;
    Body **bodies; /* what each candidate computes */
    bool *absorbed;
    TRY(ARENA_NEW(m->pc->ctx, m->scratch, g->n_nodes, &bodies));
    TRY(ARENA_NEW(m->pc->ctx, m->scratch, g->n_nodes, &absorbed));
    GRAPH_EACH(g, id) {
        NodeId taken[3];
        uint32_t n_taken;
        if (!is_candidate(graph_node(g, id))) continue;
        Body body;
        void *kept; /* only the steps that there are: a body is large */
        if (!build(m, id, bodies, &body, taken, &n_taken)) continue; /* no room: stays as it is */
        TRY(arena_copy(m->pc->ctx, m->scratch, &body, offsetof(Body, steps) + body.n_steps * sizeof(Step), &kept));
        bodies[id] = kept;
        for (uint32_t k = 0; k < n_taken; k++) absorbed[taken[k]] = true;
    }
    uint32_t n_nodes = g->n_nodes;
    for (NodeId id = 0; id < n_nodes; id++) { /* the graph is compact: ids are in order */
        if (absorbed[id]) {
            graph_kill(g, id);
        } else if (bodies[id] && bodies[id]->n_steps > 1) {
            NodeId fused;
            TRY(match_replace(m, id, OP_elementwise, bodies[id]->inputs, bodies[id]->n_inputs, &fused));
            TRY(body_store(m, fused, bodies[id]));
            TRY(remark_add(m->pc, "operator_fusion", graph_node(g, fused)->source, "matched: chain of %u elementwise",
                           bodies[id]->n_steps));
        }
    }
    return CODE_OK;
}
