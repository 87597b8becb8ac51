/* Dead code elimination.
 * Requires: nothing. Keeps: inputs (their indices are the calling convention), host calls with effects, constant slots.
 * Breaks: nothing. */
#include "passes/passes.h"

static bool is_root(const Node *node) {
    return node->op == OP_input || (node->op == OP_host && node_int(node, ATTR_effect));
}

static Code sweep(PassContext *pc, Graph *g, Arena *scratch) {
    bool *used;
    TRY(ARENA_NEW(pc->ctx, scratch, g->n_values, &used));
    for (uint32_t i = 0; i < g->n_outputs; i++) used[graph_resolve(g, g->outputs[i])] = true;

    /* Users come after what they use, so one walk backwards sees every use before the definition. */
    for (NodeId id = g->last, prev; id != NODE_NONE; id = prev) {
        const Node *node = graph_node(g, id);
        prev = node->prev;
        bool live = is_root(node);
        for (uint32_t k = 0; k < node->n_results && !live; k++) live = used[node_result(node, k)];
        if (!live) {
            graph_kill(g, id);
            continue;
        }
        for (uint32_t k = 0; k < node->n_operands; k++)
            if (node->operands[k] != VALUE_NONE) used[graph_resolve(g, node->operands[k])] = true;
    }
    return graph_compact(pc->ctx, g);
}

Code pass_dce(PassContext *pc, Graph *g) {
    Arena scratch;
    arena_init(&scratch);
    Code code = sweep(pc, g, &scratch);
    arena_destroy(&scratch);
    return code;
}
