/* Placement by levels.
 *
 * With two devices an order of fewest transitions is easy: give each node the smallest level that is not below that of
 * its operands and has the parity of its device (even CPU, odd NPU); run level after level. No order has fewer changes,
 * since along the path that forces the highest level the device changes that often. A node that may run on both takes
 * the level of its operands as it is: it never adds a change.
 *
 * So: contractions, attention and convolutions that the NPU takes are anchored there; what only the CPU takes is
 * anchored on the CPU; all other nodes are free. Earliest and latest levels follow from the anchors, and a free node
 * runs on the NPU if any NPU level lies between its operands' level and its own latest one. Data stays on the NPU
 * between its anchors, index arithmetic that only feeds look-ups stays on the CPU, and the number of transitions is the
 * least for these anchors.
 *
 * Last, islands: an NPU level whose nodes save less time than entering and leaving the NPU costs loses its anchors, and
 * the levels are made again. The level that saves most is kept whatever it saves: who names an NPU wants it used. */
#include "npuir/place.h"

#include <string.h>

enum Anchor {
    ANCHOR_CPU = DEVICE_CPU,
    ANCHOR_NPU = DEVICE_NPU,
    FREE,
    RESIDENT /* inputs, constants: no instruction */
};

typedef struct Placer {
    const Graph *g;
    uint8_t *anchor;
    uint32_t *level, *latest;
    uint32_t top; /* highest level, even: the caller waits on the CPU */
} Placer;

static bool is_heavy(Op op) { return op_is(op, CONTRACTION) || op == OP_conv || op == OP_attention; }

static uint32_t operand_level(const Placer *p, const Node *node) {
    uint32_t level = 0;
    for (uint32_t k = 0; k < node->n_operands; k++) {
        if (node->operands[k] == VALUE_NONE) continue;
        uint32_t l = p->level[graph_value(p->g, node->operands[k])->def];
        if (l > level) level = l;
    }
    return level;
}

static void make_levels(Placer *p) {
    const Graph *g = p->g;
    p->top = 0;
    GRAPH_EACH(g, id) { /* earliest */
        uint32_t level = p->anchor[id] == RESIDENT ? 0 : operand_level(p, graph_node(g, id));
        if (p->anchor[id] <= ANCHOR_NPU && (level & 1) != p->anchor[id]) level++;
        p->level[id] = level;
        if (level > p->top) p->top = level;
    }
    p->top += p->top & 1;
    GRAPH_EACH(g, id) p->latest[id] = p->top;
    for (NodeId id = g->last; id != NODE_NONE; id = graph_node(g, id)->prev) {
        const Node *node = graph_node(g, id);
        if (p->anchor[id] <= ANCHOR_NPU && (p->latest[id] & 1) != p->anchor[id]) p->latest[id]--;
        for (uint32_t k = 0; k < node->n_operands; k++) {
            if (node->operands[k] == VALUE_NONE) continue;
            NodeId def = graph_value(g, node->operands[k])->def;
            if (p->latest[id] < p->latest[def]) p->latest[def] = p->latest[id];
        }
    }
    GRAPH_EACH(g, id) { /* chosen */
        if (p->anchor[id] == RESIDENT) continue;
        uint32_t level = operand_level(p, graph_node(g, id));
        uint32_t want = p->anchor[id] == FREE ? DEVICE_NPU : p->anchor[id];
        if ((level & 1) != want && level < p->latest[id]) level++;
        p->level[id] = level;
    }
}

/* Frees the anchors of NPU levels that do not pay; true if there were any. */
static bool drop_islands(Placer *p, double *saving) {
    const Graph *g = p->g;
    memset(saving, 0, (p->top + 1) * sizeof *saving);
    GRAPH_EACH(g, id) {
        if (p->anchor[id] == RESIDENT || !(p->level[id] & 1)) continue;
        const Node *node = graph_node(g, id);
        saving[p->level[id]] += node_cost(g, node, DEVICE_CPU).score - node_cost(g, node, DEVICE_NPU).score;
    }
    uint32_t best = 1;
    for (uint32_t l = 3; l <= p->top; l += 2) {
        if (saving[l] > saving[best]) best = l;
    }
    bool changed = false;
    GRAPH_EACH(g, id) {
        if (p->anchor[id] != ANCHOR_NPU || p->level[id] == best) continue;
        if (saving[p->level[id]] >= 2 * transition_cost()) continue;
        p->anchor[id] = FREE;
        changed = true;
    }
    return changed;
}

Code place_nodes(Context *ctx, Arena *arena, const Graph *g, const Target *target, Placement *out) {
    Placer p = {.g = g};
    *out = (Placement){0};
    TRY(ARENA_NEW(ctx, arena, g->n_nodes, &out->device)); /* zero: all on the CPU */
    if (!target->npu) return CODE_OK;
    TRY(ARENA_NEW(ctx, arena, g->n_nodes, &p.anchor));
    TRY(ARENA_NEW(ctx, arena, g->n_nodes, &p.level));
    TRY(ARENA_NEW(ctx, arena, g->n_nodes, &p.latest));
    GRAPH_EACH(g, id) {
        const Node *node = graph_node(g, id);
        if (node->op == OP_input || node->op == OP_constant)
            p.anchor[id] = RESIDENT;
        else if (op_is(node->op, VIEW))
            p.anchor[id] = FREE; /* no instruction, or a copy that both can do */
        else if (capability(target, DEVICE_NPU, g, node))
            p.anchor[id] = ANCHOR_CPU;
        else
            p.anchor[id] = is_heavy(node->op) ? ANCHOR_NPU : FREE;
    }
    make_levels(&p);
    double *saving;
    TRY(ARENA_NEW(ctx, arena, p.top + 1, &saving));
    for (int round = 0; round < 3 && drop_islands(&p, saving); round++) make_levels(&p); /* levels only become fewer */
    GRAPH_EACH(g, id) out->device[id] = p.level[id] & 1 ? DEVICE_NPU : DEVICE_CPU;
    out->transitions = p.top;
    return CODE_OK;
}
