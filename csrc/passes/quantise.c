/* Quantise: products with constant weights get weights of 8 or 4 bits, or of bf16 (precision="w8", "w4", "bf16"; what:
 * PassOptions).
 * Requires: runs last, so that biases and epilogues have joined their products. Keeps: the weights themselves, and
 * everything else that reads them (a tied embedding). Breaks: nothing; linear and matmul become quantised_linear, the
 * values of whose constants are made later, if the program is to be run: the pass leaves a list of them.
 *
 * Products of f64 and of weights that are computed stay as they are, and those of bf16 whose weights are that and lie
 * so that they can be used. */
#include "passes/match.h"

#include <stdio.h>
#include <string.h>

typedef struct Quantiser {
    Match *m;
    uint32_t *made; /* by constant and whether it lies turned: number of its entry in the list + 1 */
    uint32_t n_constants;
} Quantiser;

static Code add_constant(Match *m, const char *name, const char *what, DType dtype, int rank, const int64_t *shape,
                         uint32_t *index) {
    int64_t strides[MAX_RANK], count = 1;
    char full[256];
    for (int d = rank - 1; d >= 0; d--) {
        strides[d] = count;
        count *= shape[d];
    }
    snprintf(full, sizeof full, "%.200s.%s", name && name[0] ? name : "weight", what);
    Constant c = {.kind = CONSTANT_LITERAL,
                  .name = full,
                  .derived = true,
                  .dtype = dtype,
                  .rank = (uint8_t)rank,
                  .shape = shape,
                  .strides = strides,
                  .bytes = count * (int64_t)dtype_size(dtype)};
    return graph_add_constant(m->pc->ctx, m->g, &c, index);
}

/* The entry for the weight [N, K] that constant `source` is, or is when its dimensions are exchanged. */
static Code entry_of(Quantiser *q, uint32_t source, bool turned, uint32_t *out) {
    Match *m = q->m;
    PassContext *pc = m->pc;
    uint32_t *made = &q->made[2 * source + turned];
    *out = *made - 1;
    if (*made) return CODE_OK;
    Quantisations *list = &pc->quantisations;
    if (list->count == list->capacity) {
        Quantisation *items;
        uint32_t capacity = list->capacity ? 2 * list->capacity : 64;
        TRY(ARENA_NEW(pc->ctx, pc->arena, capacity, &items));
        if (list->count) memcpy(items, list->items, list->count * sizeof *items);
        list->items = items;
        list->capacity = capacity;
    }
    Constant c = m->g->constants[source]; /* a copy: the array moves */
    int n = turned ? 1 : 0, bits = pc->options.weight_bits;
    Quantisation *item = &list->items[list->count];
    *item = (Quantisation){.weight = {.data = c.data,
                                      .dtype = c.dtype,
                                      .rank = 2,
                                      .shape = {c.shape[n], c.shape[1 - n]},
                                      .strides = {c.strides[n], c.strides[1 - n]}},
                           .state = c.kind == CONSTANT_STATE,
                           .bits = bits,
                           .group = pc->options.weight_group};
    const int64_t *size = item->weight.shape;
    int64_t shape[3] = {size[0], bits == 4 ? quantised_blocks(size[1]) : size[1], QUANTISED_BLOCK / 2};
    if (bits == 16) shape[1] += shape[1] % 2;
    int64_t scales[2] = {size[0], quantised_groups(size[1], item->group)};
    TRY(arena_string(pc->ctx, pc->arena, c.name ? c.name : "", &item->name));
    DType dtype = bits == 16 ? DTYPE_BF16 : bits == 8 ? DTYPE_I8 : DTYPE_U8;
    const char *what = bits == 16 ? "bf16" : bits == 8 ? "int8" : "int4";
    TRY(add_constant(m, c.name, what, dtype, bits == 4 ? 3 : 2, shape, &item->q));
    if (bits != 16) TRY(add_constant(m, c.name, "scales", DTYPE_F32, 2, scales, &item->scales));
    *made = ++list->count;
    *out = *made - 1;
    return CODE_OK;
}

static Code value_of(Match *m, NodeId before, uint32_t constant, ValueId *out) {
    const Constant *c = &m->g->constants[constant];
    Type type = {c->dtype, c->rank, c->shape};
    NodeId node;
    TRY(graph_insert(m->pc->ctx, m->g, before, OP_constant, NULL, 0, &type, 1, -1, &node));
    node_attr_mut(graph_node(m->g, node), ATTR_index)->i = constant;
    *out = graph_node(m->g, node)->first_result;
    return CODE_OK;
}

/* The constant of rank 2 behind the weight, maybe seen through a transposition. */
static bool find_weight(const Match *m, ValueId v, uint32_t *constant, bool *turned) {
    const Node *node = value_node(m->g, graph_resolve(m->g, v));
    if (node->op == OP_permute) {
        if (node_attr(node, ATTR_dims)->ints.count != 2) return false;
        if (node_attr(node, ATTR_dims)->ints.items[0] == 1) *turned = !*turned;
        node = value_node(m->g, graph_resolve(m->g, node->operands[0]));
    }
    if (node->op != OP_constant) return false;
    *constant = (uint32_t)node_int(node, ATTR_index);
    const Constant *c = &m->g->constants[*constant];
    if (c->rank != 2 || c->shape[0] == 0 || c->shape[1] == 0) return false;
    return c->dtype == DTYPE_F32 || c->dtype == DTYPE_F16 || c->dtype == DTYPE_BF16;
}

/* Whether linear and matmul read it as pairs of bf16 where it lies. */
static bool is_ready(const Constant *c, bool turned) {
    return c->dtype == DTYPE_BF16 && c->strides[!turned] == 1 && c->strides[turned] % 2 == 0 &&
           c->shape[!turned] % 2 == 0;
}

static Code quantise_node(Quantiser *q, NodeId id) {
    Match *m = q->m;
    Graph *g = m->g;
    const Node *node = graph_node(g, id);
    Op op = node->op;
    uint32_t constant, entry, fixed = contraction_operands(op), count = 0;
    bool turned = op == OP_matmul;
    if (!find_weight(m, node->operands[1], &constant, &turned)) return CODE_OK;
    if (m->pc->options.weight_bits == 16 && is_ready(&g->constants[constant], turned)) return CODE_OK;
    TRY(entry_of(q, constant, turned, &entry));
    ValueId operands[64];
    uint32_t wanted = contraction_operands(OP_quantised_linear);
    if (node->n_operands > sizeof operands / sizeof *operands - wanted) return CODE_OK;
    operands[count++] = graph_resolve(g, node->operands[0]);
    Quantisation item = m->pc->quantisations.items[entry];
    TRY(value_of(m, id, item.q, &operands[count++]));
    operands[count] = VALUE_NONE;
    if (item.bits != 16) TRY(value_of(m, id, item.scales, &operands[count]));
    count++;
    operands[count++] = VALUE_NONE;
    node = graph_node(g, id); /* nodes have moved */
    operands[count++] = op == OP_linear && node->n_operands > 2 ? node->operands[2] : VALUE_NONE;
    for (uint32_t k = fixed; k < node->n_operands; k++) operands[count++] = node->operands[k];
    Attr program = *node_attr(node, ATTR_program);
    NodeId made;
    TRY(match_replace(m, id, OP_quantised_linear, operands, count, &made));
    Node *product = graph_node(g, made);
    node_attr_mut(product, ATTR_bits)->i = item.bits;
    node_attr_mut(product, ATTR_group)->i = item.group;
    TRY(attr_set_ints(m->pc->ctx, g, node_attr_mut(product, ATTR_program), program.ints.items, program.ints.count));
    return remark_add(m->pc, "quantise", graph_node(g, made)->source, "matched: %s with weights of %d bits",
                      op_info(op)->name, item.bits);
}

static Code run(Match *m) {
    Quantiser q = {.m = m, .n_constants = m->g->n_constants};
    TRY(ARENA_NEW(m->pc->ctx, m->scratch, 2 * (size_t)q.n_constants, &q.made));
    GRAPH_EACH(m->g, id) {
        Op op = graph_node(m->g, id)->op;
        if (op == OP_linear || op == OP_matmul) TRY(quantise_node(&q, id));
    }
    return CODE_OK;
}

Code pass_quantise(PassContext *pc, Graph *g) { return pc->options.weight_bits ? match_run(pc, g, run) : CODE_OK; }
