/* What each device takes. The CPU takes everything: an operator without a kernel is a `host` node. The NPU's column
 * holds what Intel's NPU compiler accepts, less what it accepts and does badly (a look-up moves the whole table through
 * DMA). */
#include <math.h>
#include <string.h>

#include "graph/program.h"
#include "npuir/npuir.h"

const char *device_name(Device device) { return device == DEVICE_NPU ? "npu" : "cpu"; }

const Target *target_find(const char *name) {
    static const Target targets[] = {{"cpu", false}, {"npu3720", true}, {"npu4000", true}, {"npu5010", true}};
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        if (strcmp(targets[i].name, name) == 0) return &targets[i];
    }
    return NULL;
}

/* Of what is computed; copies may have more, as views have (their way across the border is the emitter's). */
enum { NPU_MAX_RANK = 5 };

const char *npu_op_reason(Op op) {
    switch (op) {
    case OP_host: return "a host call";
    case OP_embedding:
    case OP_gather:
    case OP_index:
    case OP_index_select: return "a look-up: the NPU would move the whole table";
    case OP_index_put:
    case OP_index_copy:
    case OP_index_add:
    case OP_scatter: return "a scattered write: slow on the NPU";
    case OP_grouped_matmul: return "sizes that depend on data";
    case OP_topk:
    case OP_sort: return "sorting";
    case OP_cumsum:
    case OP_cumprod: return "a scan";
    case OP_argmax:
    case OP_argmin: return "an index result";
    case OP_shift_left:
    case OP_shift_right: return "bit arithmetic";
    case OP_div_floor:
    case OP_div_trunc:
    case OP_remainder:
    case OP_fmod: return "a whole quotient: one rounding of the NPU's division would change it";
    case OP_quantised_linear: return "a product with the host's quantised weights";
    case OP_atan2: return "an operator that OpenVINO does not have";
    default: return NULL;
    }
}

/* What depends on more than the operator. */
static const char *npu_node_reason(const Graph *g, const Node *node) {
    bool is_bool = node->n_results == 1 && graph_value(g, node->first_result)->dtype == DTYPE_BOOL;
    switch (node->op) {
    case OP_bitwise_and:
    case OP_bitwise_or:
    case OP_bitwise_xor:
    case OP_bitwise_not: return is_bool ? NULL : "bit arithmetic";
    case OP_slice_scatter: return node_int(node, ATTR_step) == 1 ? NULL : "a scattered write: slow on the NPU";
    default: return NULL;
    }
}

static const char *npu_dtype_reason(DType dtype) {
    switch (dtype) {
    case DTYPE_F16:
    case DTYPE_BF16: /* as f16, whose digits are more and whose range is smaller */
    case DTYPE_F32:
    case DTYPE_BOOL: return NULL;
    case DTYPE_F64: return "f64 arithmetic";
    case DTYPE_C64:
    case DTYPE_C128: return "complex numbers";
    case DTYPE_OBJECT: return "a host object";
    default: return "integer arithmetic";
    }
}

double npu_scalar(Op op, double value) {
    bool limit = op == OP_clamp || op == OP_minimum || op == OP_maximum, compared = op_is(op, COMPARE);
    double size = fabs(value);
    if (size > 0 && size <= (double)F16_LEAST / 2) {
        if (limit) return copysign((double)F16_LEAST_NORMAL, value);
        bool guard = compared || op == OP_add || op == OP_sub || op == OP_div;
        return guard ? copysign((double)F16_LEAST, value) : value;
    }
    if (!isfinite(value) || size < (double)F16_OVERFLOW) return value;
    if (compared) return copysign(INFINITY, value);
    if (limit) return copysign((double)F16_LARGEST, value);
    return copysign((double)F16_SUBSTITUTE, value);
}

static const char *npu_value_reason(const Graph *g, ValueId v, bool int8_weight, bool any_rank) {
    const Value *value = graph_value(g, v);
    if (value->rank > NPU_MAX_RANK && !any_rank) return "rank above 5";
    for (int d = 0; d < value->rank; d++) {
        if (value->shape[d] == 0) return "an empty tensor";
    }
    if (int8_weight && (value->dtype == DTYPE_I8 || value->dtype == DTYPE_U8)) return NULL;
    return npu_dtype_reason(value->dtype);
}

const char *capability(const Target *target, Device device, const Graph *g, const Node *node) {
    if (device == DEVICE_CPU) return NULL;
    if (!target->npu) return "the target has no NPU";
    const char *reason = npu_op_reason(node->op);
    if (!reason) reason = npu_node_reason(g, node);
    for (uint32_t k = 0; k < node->n_operands && !reason; k++) {
        if (node->operands[k] == VALUE_NONE) continue;
        bool weight = (node->op == OP_cast && k == 0) || (node->op == OP_linear && k == 1);
        reason = npu_value_reason(g, node->operands[k], weight, node->op == OP_contiguous);
    }
    for (uint32_t k = 0; k < node->n_results && !reason; k++) {
        reason = npu_value_reason(g, node_result(node, k), false, node->op == OP_contiguous);
    }
    if (reason || !node_has_attr(node, ATTR_program)) return reason;
    const Attr *program = node_attr(node, ATTR_program); /* what a fused node computes inside */
    for (uint32_t s = 0; s + STEP_WORDS <= program->ints.count && !reason; s += STEP_WORDS) {
        Step step;
        if (!step_decode(program->ints.items + s, &step)) return "a malformed program";
        reason = npu_op_reason(step.op);
        if (!reason) reason = npu_dtype_reason(step.dtype);
    }
    return reason;
}
