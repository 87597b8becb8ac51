/* The cost model.
 *
 *     score [us] = matrix flops / matrix rate + vector flops / vector rate + bytes / bandwidth
 *                + launches * launch cost + transitions * transition cost
 *
 *   flops     a multiply-add counts two; contractions and attention do matrix flops, all others vector flops, where an
 *             exponential or another transcendental function counts TRANSCENDENTAL
 *   bytes     operands read and results written once each. A view is read as what lies in memory (an expanded mask is
 *             small); look-ups read the rows that they return; floats count two bytes on the NPU, which computes in f16
 *   launches  one an instruction; views, inputs and constants cost nothing
 *
 * The rates are those of a small AI PC: two cores with AVX2 (a GEMM that reaches 60 GFLOP/s a core, memory of 20 GB/s),
 * and an NPU4000 as its compiler estimates a GPT-2 block (1.9 GFLOP of matrix products in 197 us, 14.6 MB moved in 438
 * us). They set the proportion between moving, computing and switching; nobody should read the score as a measured
 * time. */
#include "graph/program.h"
#include "npuir/npuir.h"
#include "npuir/place.h"

typedef struct DeviceModel {
    double matrix_rate, vector_rate; /* flops a microsecond */
    double bandwidth;                /* bytes a microsecond */
    double launch;                   /* microseconds */
} DeviceModel;
static const DeviceModel models[DEVICE_COUNT] = {
    [DEVICE_CPU] = {120e3, 16e3, 20e3, 1.5},
    [DEVICE_NPU] = {9000e3, 100e3, 33e3, 3.0},
};
static const double TRANSITION_US = 60.0; /* submit, fence, caches: once for each change of device */
enum { TRANSCENDENTAL = 12, MAX_VIEW_CHAIN = 16 };

double transition_cost(void) { return TRANSITION_US; }

static double count_of(const Value *v) {
    double count = 1;
    for (int d = 0; d < v->rank; d++) count *= (double)v->shape[d];
    return count;
}

static double bytes_of(const Value *v, Device device) {
    double size = (double)dtype_size(v->dtype);
    if (device == DEVICE_NPU && dtype_is_float(v->dtype)) size = 2;
    return v->dtype == DTYPE_OBJECT ? 0 : count_of(v) * size;
}

/* What reading an operand moves: no more than the smallest value on its chain of views. */
static double operand_bytes(const Graph *g, ValueId v, Device device) {
    double bytes = bytes_of(graph_value(g, v), device);
    for (int i = 0; i < MAX_VIEW_CHAIN && op_is(value_node(g, v)->op, VIEW); i++) {
        v = value_node(g, v)->operands[0];
        double base = bytes_of(graph_value(g, v), device);
        if (base < bytes) bytes = base;
    }
    return bytes;
}

static double step_flops(Op op) {
    switch (op) {
    case OP_cast:
    case OP_neg:
    case OP_abs:
    case OP_add:
    case OP_sub:
    case OP_mul:
    case OP_relu:
    case OP_minimum:
    case OP_maximum:
    case OP_where: return 1;
    case OP_clamp:
    case OP_sqrt:
    case OP_div: return 2;
    case OP_gelu:
    case OP_silu:
    case OP_sigmoid: return TRANSCENDENTAL;
    default: return op_is(op, COMPARE) || (op >= OP_bitwise_and && op <= OP_shift_right) ? 1 : TRANSCENDENTAL;
    }
}

static double program_flops(const Node *node) {
    double flops = 0;
    if (!node_has_attr(node, ATTR_program)) return 0;
    const Attr *program = node_attr(node, ATTR_program);
    for (uint32_t s = 0; s + STEP_WORDS <= program->ints.count; s += STEP_WORDS) {
        Step step;
        if (step_decode(program->ints.items + s, &step)) flops += step_flops(step.op);
    }
    return flops;
}

static bool is_matrix(const Node *node) {
    return (op_is(node->op, CONTRACTION) || node->op == OP_conv || node->op == OP_attention) && node->n_operands >= 2;
}

/* A norm without a residual does not write its second result. */
static bool writes_result(const Node *node, uint32_t k) {
    uint32_t residual = node->op == OP_layer_norm ? 3 : node->op == OP_rms_norm ? 2 : 0;
    return k == 0 || !residual || (node->n_operands > residual && node->operands[residual] != VALUE_NONE);
}

static int64_t size_from_end(const Value *v, int back) { return v->rank >= back ? v->shape[v->rank - back] : 1; }

/* How many (query, key) pairs there are in all heads. */
static double attention_pairs(const Value *q, const Value *k) {
    double width = (double)size_from_end(q, 1);
    return width > 0 ? count_of(q) / width * (double)size_from_end(k, 2) : 0;
}

/* Multiply-adds of contractions, times two. */
static double matrix_flops(const Graph *g, const Node *node) {
    const Value *a = graph_value(g, node->operands[0]), *b = graph_value(g, node->operands[1]);
    double results = count_of(graph_value(g, node->first_result));
    switch (node->op) {
    case OP_linear:
    case OP_quantised_linear:
    case OP_matmul:
    case OP_grouped_matmul: return 2 * results * (double)size_from_end(a, 1);
    case OP_conv: return b->shape[0] > 0 ? 2 * results * count_of(b) / (double)b->shape[0] : 0;
    case OP_attention: { /* q.k and p.v */
        const Value *v = graph_value(g, node->operands[2]);
        return 2 * attention_pairs(a, b) * (double)(size_from_end(a, 1) + size_from_end(v, 1));
    }
    default: return 0;
    }
}

static double vector_flops(const Graph *g, const Node *node) {
    const Value *first = node->n_operands && node->operands[0] != VALUE_NONE ? graph_value(g, node->operands[0]) : NULL;
    double in = first ? count_of(first) : 0;
    double out = node->n_results ? count_of(graph_value(g, node->first_result)) : 0;
    if (node->op == OP_conv) return 0;
    if (op_is(node->op, CONTRACTION) || node->op == OP_elementwise) return out * program_flops(node);
    if (op_is(node->op, ELEMENTWISE)) return out * step_flops(node->op);
    switch (node->op) {
    case OP_attention: return TRANSCENDENTAL * attention_pairs(first, graph_value(g, node->operands[1]));
    case OP_softmax:
    case OP_log_softmax: return in * (TRANSCENDENTAL + 3);
    case OP_layer_norm:
    case OP_rms_norm:
    case OP_group_norm: return in * 6;
    case OP_rope: return in * 3;
    case OP_sort:
    case OP_topk: return in * 2 * TRANSCENDENTAL;
    default: return in;
    }
}

static bool is_lookup(Op op) {
    return op == OP_embedding || op == OP_gather || op == OP_index || op == OP_index_select;
}

Cost node_cost(const Graph *g, const Node *node, Device device) {
    Cost cost = {0};
    if (node->op == OP_input || node->op == OP_constant || op_is(node->op, VIEW)) return cost;
    const DeviceModel *m = &models[device];
    double matrix_part = is_matrix(node) ? matrix_flops(g, node) : 0, vector_part = vector_flops(g, node);
    cost.flops = matrix_part + vector_part;
    for (uint32_t k = 0; k < node->n_results; k++) {
        if (writes_result(node, k)) cost.bytes += bytes_of(graph_value(g, node_result(node, k)), device);
    }
    for (uint32_t k = 0; k < node->n_operands; k++) {
        if (node->operands[k] == VALUE_NONE) continue;
        if (is_lookup(node->op) && k == 0)
            cost.bytes += bytes_of(graph_value(g, node->first_result), device);
        else
            cost.bytes += operand_bytes(g, node->operands[k], device);
    }
    cost.launches = 1;
    cost.score = matrix_part / m->matrix_rate + vector_part / m->vector_rate + cost.bytes / m->bandwidth + m->launch;
    return cost;
}

Code graph_cost(Context *ctx, const Graph *g, const Target *target, Cost *out) {
    Cost sum = {0};
    Placement placement;
    Arena arena;
    *out = sum;
    arena_init(&arena);
    Code code = place_nodes(ctx, &arena, g, target, &placement);
    if (code == CODE_OK) {
        GRAPH_EACH(g, id) {
            Cost cost = node_cost(g, graph_node(g, id), (Device)placement.device[id]);
            sum.flops += cost.flops;
            sum.bytes += cost.bytes;
            sum.launches += cost.launches;
            sum.score += cost.score;
        }
        sum.transitions = placement.transitions; /* of the order that scheduling finds for this placement */
        sum.score += sum.transitions * TRANSITION_US;
        *out = sum;
    }
    arena_destroy(&arena);
    return code;
}
