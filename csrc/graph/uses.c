#include "graph/graph.h"

Code graph_uses(Context *ctx, const Graph *g, Arena *arena, Uses *out) {
    uint32_t *start, *output_uses, *at;
    NodeId *users;
    uint64_t total = 0;
    /* at[v] starts as the count of v's uses, then walks through its row while rows are filled in list order */
    TRY(ARENA_NEW(ctx, arena, (size_t)g->n_values + 1, &start));
    TRY(ARENA_NEW(ctx, arena, g->n_values, &output_uses));
    TRY(ARENA_NEW(ctx, arena, g->n_values, &at));
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        for (uint32_t k = 0; k < node->n_operands; k++) {
            if (node->operands[k] == VALUE_NONE) continue;
            at[graph_resolve(g, node->operands[k])]++;
            total++;
        }
    }
    if (total >= UINT32_MAX) return fail(ctx, CODE_INVALID, "graph has too many operands");
    for (uint32_t v = 0; v < g->n_values; v++) {
        start[v + 1] = start[v] + at[v];
        at[v] = start[v];
    }
    TRY(ARENA_NEW(ctx, arena, total, &users));
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        for (uint32_t k = 0; k < node->n_operands; k++) {
            if (node->operands[k] != VALUE_NONE) users[at[graph_resolve(g, node->operands[k])]++] = id;
        }
    }
    for (uint32_t k = 0; k < g->n_outputs; k++) output_uses[graph_resolve(g, g->outputs[k])]++;
    out->start = start;
    out->users = users;
    out->output_uses = output_uses;
    return CODE_OK;
}
