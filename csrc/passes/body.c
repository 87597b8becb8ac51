#include "passes/body.h"

int32_t body_input(Body *body, ValueId v) {
    for (uint32_t k = 0; k < body->n_inputs; k++)
        if (body->inputs[k] == v) return (int32_t)k;
    if (body->n_inputs == PROGRAM_MAX_INPUTS) return STEP_NONE;
    body->inputs[body->n_inputs] = v;
    return (int32_t)body->n_inputs++;
}

int32_t body_append(Body *body, const Body *other, uint32_t max_steps) {
    uint32_t base = body->n_steps;
    if (max_steps > PROGRAM_MAX_STEPS) max_steps = PROGRAM_MAX_STEPS;
    if (base + other->n_steps > max_steps) return STEP_NONE;
    for (uint32_t k = 0; k < other->n_steps; k++) {
        Step step = other->steps[k];
        for (int s = 0; s < 3; s++) {
            if (step.src[s] == STEP_NONE) continue;
            if (step.src[s] < 0) {
                step.src[s] -= (int32_t)base;
            } else {
                step.src[s] = body_input(body, other->inputs[step.src[s]]);
                if (step.src[s] == STEP_NONE) return STEP_NONE;
            }
        }
        body->steps[base + k] = step;
    }
    body->n_steps = base + other->n_steps;
    return -(int32_t)body->n_steps;
}

bool body_add_node(Body *body, const Graph *g, const Node *node, const int32_t *srcs, uint32_t max_steps) {
    if (body->n_steps >= max_steps || body->n_steps >= PROGRAM_MAX_STEPS) return false;
    step_from_node(node, graph_value(g, node->first_result)->dtype, srcs, node->n_operands,
                   &body->steps[body->n_steps++]);
    return true;
}

Code body_store(Match *m, NodeId node, const Body *body) {
    int64_t words[PROGRAM_MAX_STEPS * STEP_WORDS];
    for (uint32_t k = 0; k < body->n_steps; k++) step_encode(&body->steps[k], words + k * STEP_WORDS);
    return attr_set_ints(m->pc->ctx, m->g, node_attr_mut(graph_node(m->g, node), ATTR_program), words,
                         body->n_steps * STEP_WORDS);
}
