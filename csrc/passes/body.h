/* An elementwise program under construction: what a node computes from its operands, with producers inlined. */
#ifndef FORGE_PASSES_BODY_H
#define FORGE_PASSES_BODY_H

#include "graph/program.h"
#include "passes/match.h"

typedef struct Body {
    uint32_t n_steps, n_inputs;
    ValueId inputs[PROGRAM_MAX_INPUTS];
    Step steps[PROGRAM_MAX_STEPS];
} Body;

/* Source number of value `v` as an input, added if need be; STEP_NONE if there is no room. */
int32_t body_input(Body *body, ValueId v);
/* Appends the steps of `other`, whose inputs may already be in `body`. Returns the source of its result; STEP_NONE: no
 * room. */
int32_t body_append(Body *body, const Body *other, uint32_t max_steps);
/* Appends the step of an elementwise node over the given sources. */
bool body_add_node(Body *body, const Graph *g, const Node *node, const int32_t *srcs, uint32_t max_steps);
/* Writes the program as attribute `program` of `node`. */
MUST_USE Code body_store(Match *m, NodeId node, const Body *body);

#endif
