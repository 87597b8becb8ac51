/* Elementwise operators after a contraction run on its tile while that is in cache: activation, scale, residual,
 * gate. */
#include "passes/body.h"
#include "passes/fusion.h"

#include <string.h>

/* All operands are f32: the epilogue works on the f32 product before it is stored. */
static bool all_f32(const Match *m, const Node *node) {
    for (uint32_t k = 0; k < node->n_operands; k++)
        if (graph_value(m->g, node->operands[k])->dtype != DTYPE_F32) return false;
    return graph_value(m->g, node->first_result)->dtype == DTYPE_F32;
}

/* Adds the elementwise node that uses `value` to the epilogue; false leaves `body` as it was. */
static bool absorb(const Match *m, Body *body, const Node *node, ValueId value, uint32_t max_steps) {
    Body trial = *body;
    int32_t srcs[3];
    for (uint32_t k = 0; k < node->n_operands; k++) {
        ValueId v = node->operands[k];
        srcs[k] = v == value ? (body->n_steps ? -(int32_t)body->n_steps : 0) : body_input(&trial, v);
        if (srcs[k] == STEP_NONE) return false;
    }
    if (!body_add_node(&trial, m->g, node, srcs, max_steps)) return false;
    *body = trial;
    return true;
}

static Code grow_epilogue(Match *m, NodeId contraction) {
    Graph *g = m->g;
    const Node *node = graph_node(g, contraction);
    ValueId product = node->first_result, value = product;
    if (graph_value(g, value)->dtype != DTYPE_F32 || node_attr(node, ATTR_program)->ints.count) return CODE_OK;
    Body body = {.n_inputs = 1, .inputs = {product}};
    uint32_t max_steps = (uint32_t)m->pc->options.fusion_limit;
    NodeId last = NODE_NONE;
    while (match_one_use(m, value)) {
        NodeId user = m->uses.users[m->uses.start[value]];
        const Node *next = graph_node(g, user);
        if (next->dead || !op_is(next->op, ELEMENTWISE) || next->op == OP_elementwise || next->op == OP_cast) break;
        if (!match_same_type(m, next->first_result, product) || !all_f32(m, next)) break;
        if (!absorb(m, &body, next, value, max_steps)) break;
        if (last != NODE_NONE) graph_kill(g, last);
        last = user;
        value = next->first_result;
    }
    if (last == NODE_NONE) return CODE_OK;
    ValueId operands[5 + PROGRAM_MAX_INPUTS];
    uint32_t fixed = contraction_operands(node->op), count = 0;
    Op op = node->op;
    for (; count < fixed; count++) operands[count] = count < node->n_operands ? node->operands[count] : VALUE_NONE;
    for (uint32_t k = 1; k < body.n_inputs; k++) operands[count++] = body.inputs[k];
    NodeId fused;
    TRY(match_replace(m, last, op, operands, count, &fused));
    graph_kill(g, contraction);
    if (op == OP_quantised_linear)
        memcpy(graph_node(g, fused)->attrs, graph_node(g, contraction)->attrs,
               op_info(op)->n_attrs * sizeof(Attr)); /* body_store replaces the program */
    TRY(body_store(m, fused, &body));
    return remark_add(m->pc, "operator_fusion", graph_node(g, fused)->source, "matched: %s + %u elementwise",
                      op_info(op)->name, body.n_steps);
}

Code fuse_epilogues(Match *m) {
    GRAPH_EACH(m->g, id)
        if (op_is(graph_node(m->g, id)->op, CONTRACTION)) TRY(grow_epilogue(m, id));
    return CODE_OK;
}
