/* Shape rules, internal to the graph room: one function an operator, found through `shape_rule`. */
#ifndef FORGE_GRAPH_INFER_H
#define FORGE_GRAPH_INFER_H

#include "graph/graph.h"

/* A type with room for its shape, so that checking a graph allocates nothing. */
typedef struct Inferred {
    DType dtype;
    uint8_t rank;
    int64_t shape[MAX_RANK];
} Inferred;

enum { RULE_MAX_RESULTS = 2 };

/* What a rule sees: its node and the operands' values (NULL for an absent one). `declared` is the node's own first
 * result, for operators whose result does not follow from the operands. */
typedef struct RuleInput {
    Context *ctx;
    const Graph *graph;
    const Node *node;
    const Value *declared;
} RuleInput;

typedef Code (*ShapeRule)(const RuleInput *in, Inferred *results);
ShapeRule shape_rule(Op op); /* NULL: `host`, whose results are what they are declared to be */

/* Operand k as a value; NULL if it is absent or beyond the last one. */
const Value *rule_operand(const RuleInput *in, uint32_t k);
/* Fails with CODE_INVALID; the caller's frame adds which node it was. */
#define RULE_CHECK(in, condition, ...)                                                                                 \
    do {                                                                                                               \
        if (!(condition)) return fail((in)->ctx, CODE_INVALID, __VA_ARGS__);                                           \
    } while (0)

void inferred_like(Inferred *result, const Value *value);
bool same_type(const Value *a, const Value *b);
MUST_USE Code broadcast_into(const RuleInput *in, Inferred *result, const Value *value);
bool broadcasts_to(const Value *value, const Inferred *result);
MUST_USE Code check_order(const RuleInput *in, unsigned rank);
MUST_USE Code check_dim(const RuleInput *in, int64_t dim, unsigned rank);
MUST_USE Code check_slice(const RuleInput *in, const Value *x, int64_t *length);

/* infer_nn.c */
Code rule_norm(const RuleInput *in, Inferred *results);
Code rule_group_norm(const RuleInput *in, Inferred *results);
Code rule_linear(const RuleInput *in, Inferred *results);
Code rule_quantised_linear(const RuleInput *in, Inferred *results);
Code rule_matmul(const RuleInput *in, Inferred *results);
Code rule_grouped_matmul(const RuleInput *in, Inferred *results);
Code rule_conv(const RuleInput *in, Inferred *results);
Code rule_attention(const RuleInput *in, Inferred *results);
Code rule_rope(const RuleInput *in, Inferred *results);
/* infer_index.c */
Code rule_embedding(const RuleInput *in, Inferred *results);
Code rule_gather(const RuleInput *in, Inferred *results);
Code rule_index_select(const RuleInput *in, Inferred *results);
Code rule_index(const RuleInput *in, Inferred *results);
Code rule_index_put(const RuleInput *in, Inferred *results);
Code rule_index_copy(const RuleInput *in, Inferred *results);
Code rule_scatter(const RuleInput *in, Inferred *results);
Code rule_slice_scatter(const RuleInput *in, Inferred *results);
Code rule_cat(const RuleInput *in, Inferred *results);
Code rule_pad(const RuleInput *in, Inferred *results);

#endif
