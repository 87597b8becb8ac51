#include <string.h>

#include "graph/infer.h"

static Code verify_value(Context *ctx, const Graph *g, ValueId id, NodeId def, uint32_t result) {
    const Value *v = graph_value(g, id);
    if (v->def != def || v->result != result)
        return fail(ctx, CODE_INVALID, "value %%%u is not result %u of its node", id, result);
    if (v->dtype >= DTYPE_COUNT || v->rank > MAX_RANK)
        return fail(ctx, CODE_INVALID, "value %%%u has no valid type", id);
    if (v->dtype == DTYPE_OBJECT && v->rank) return fail(ctx, CODE_INVALID, "object %%%u has a shape", id);
    int64_t total = (int64_t)dtype_size(v->dtype);
    for (unsigned d = 0; d < v->rank; d++)
        if (v->shape[d] < 0 || __builtin_mul_overflow(total, v->shape[d] ? v->shape[d] : 1, &total))
            return fail(ctx, CODE_INVALID, "value %%%u: size %lld in dim %u", id, (long long)v->shape[d], d);
    return CODE_OK;
}

static Code verify_ends(Context *ctx, const Graph *g, NodeId id) {
    const Node *node = graph_node(g, id);
    int64_t index = node_int(node, ATTR_index);
    const Value *v = graph_value(g, node->first_result);
    if (node->op == OP_input) {
        if (index < 0 || index >= g->n_inputs || g->inputs[index] != node->first_result)
            return fail(ctx, CODE_INVALID, "input %lld of %u", (long long)index, g->n_inputs);
        return CODE_OK;
    }
    if (index < 0 || index >= g->n_constants)
        return fail(ctx, CODE_INVALID, "constant %lld of %u", (long long)index, g->n_constants);
    const Constant *c = &g->constants[index];
    if (c->dtype != v->dtype || c->rank != v->rank || memcmp(c->shape, v->shape, c->rank * sizeof *c->shape))
        return fail(ctx, CODE_INVALID, "constant %lld has another type than its value", (long long)index);
    return CODE_OK;
}

static Code verify_node(Context *ctx, const Graph *g, NodeId id, bool *defined) {
    const Node *node = graph_node(g, id);
    const OpInfo *info = op_info(node->op);
    if (node->n_operands < info->min_operands || (info->max_operands != ANY && node->n_operands > info->max_operands))
        return fail(ctx, CODE_INVALID, "%u operands", node->n_operands);
    if (info->results != ANY && node->n_results != info->results)
        return fail(ctx, CODE_INVALID, "%u results", node->n_results);
    if (node->n_results > g->n_values || node->first_result > g->n_values - node->n_results)
        return fail(ctx, CODE_INVALID, "results out of range");
    for (uint32_t k = 0; k < node->n_operands; k++) {
        ValueId v = node->operands[k];
        if (v == VALUE_NONE) {
            if (k < info->min_operands) return fail(ctx, CODE_INVALID, "operand %u is absent", k);
            continue;
        }
        if (v >= g->n_values || !defined[v]) return fail(ctx, CODE_INVALID, "operand %u is not defined before it", k);
        if (graph_value(g, v)->dtype == DTYPE_OBJECT && !(info->flags & OPAQUE))
            return fail(ctx, CODE_INVALID, "operand %u is an object", k);
    }
    for (uint32_t k = 0; k < node->n_results; k++) {
        TRY(verify_value(ctx, g, node_result(node, k), id, k));
        if (defined[node_result(node, k)])
            return fail(ctx, CODE_INVALID, "value %%%u is defined twice", node_result(node, k));
        defined[node_result(node, k)] = true;
    }
    ShapeRule rule = shape_rule(node->op);
    if (!rule) {
        int64_t name = node_int(node, ATTR_name);
        if (name < 0 || name >= g->n_strings || node_int(node, ATTR_index) < 0)
            return fail(ctx, CODE_INVALID, "name or callee out of range");
        return CODE_OK;
    }
    if (node->op == OP_input || node->op == OP_constant) TRY(verify_ends(ctx, g, id));
    Inferred inferred[RULE_MAX_RESULTS];
    RuleInput in = {ctx, g, node, graph_value(g, node->first_result)};
    TRY(rule(&in, inferred));
    for (uint32_t k = 0; k < node->n_results; k++) {
        const Value *v = graph_value(g, node_result(node, k));
        if (v->dtype != inferred[k].dtype || v->rank != inferred[k].rank ||
            memcmp(v->shape, inferred[k].shape, v->rank * sizeof *v->shape))
            return fail(ctx, CODE_INVALID, "result %u is not of the type that follows from the operands", k);
    }
    return CODE_OK;
}

static Code verify_all(Context *ctx, const Graph *g, bool *defined) {
    NodeId prev = NODE_NONE;
    uint32_t steps = 0;
    GRAPH_EACH(g, id) {
        if (id >= g->n_nodes || steps++ >= g->n_nodes) return fail(ctx, CODE_INVALID, "the node list is broken");
        const Node *node = graph_node(g, id);
        if (node->dead || node->prev != prev || node->op >= OP_COUNT)
            return fail(ctx, CODE_INVALID, "node %u is dead or mislinked", id);
        Code code = verify_node(ctx, g, id, defined);
        if (code != CODE_OK) {
            bool known = node->source >= 0 && (uint32_t)node->source < g->n_sources;
            fail_prefix(ctx, "node %u (%s%s%s)", id, op_info(node->op)->name, known ? ", " : "",
                        known ? g->sources[node->source] : "");
            return code;
        }
        prev = id;
    }
    if (g->last != prev) return fail(ctx, CODE_INVALID, "the node list is broken");
    for (uint32_t k = 0; k < g->n_outputs; k++)
        if (g->outputs[k] >= g->n_values || !defined[g->outputs[k]])
            return fail(ctx, CODE_INVALID, "output %u is not defined", k);
    for (uint32_t k = 0; k < g->n_inputs; k++)
        if (g->inputs[k] >= g->n_values || !defined[g->inputs[k]])
            return fail(ctx, CODE_INVALID, "input %u is not defined", k);
    return CODE_OK;
}

Code graph_verify(Context *ctx, const Graph *g) {
    Arena scratch;
    arena_init(&scratch);
    bool *defined;
    Code code = ARENA_NEW(ctx, &scratch, g->n_values, &defined);
    if (code == CODE_OK) code = verify_all(ctx, g, defined);
    arena_destroy(&scratch);
    return code;
}
