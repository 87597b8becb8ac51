/* Reductions. */
#include "npu/emit.h"

/* The two steps of a variance: mean of squared differences, then n / (n - correction). Means, since a sum of squares
 * leaves the range of f16 soon. */
static Code variance(Emitter *e, Wire x, const Attr *dims, bool keep, Wire *out) {
    const WireType type = *wire_type(e, x);
    double n = 1, correction = node_float(e->instr->node, ATTR_correction);
    Wire mean, difference;
    for (uint32_t k = 0; k < dims->ints.count && type.rank; k++) n *= (double)type.shape[dims->ints.items[k]];
    TRY(emit_reduce_dims(e, "ReduceMean", x, dims->ints.items, dims->ints.count, true, &mean));
    TRY(emit_binary(e, "Subtract", 1, x, mean, &difference));
    TRY(emit_binary(e, "Multiply", 1, difference, difference, &difference));
    TRY(emit_reduce_dims(e, "ReduceMean", difference, dims->ints.items, dims->ints.count, keep, out));
    double divisor = n - correction > 0 ? n - correction : 0;
    return n == divisor ? CODE_OK : emit_binary_number(e, "Multiply", *out, n / divisor, out);
}

static Code truth(Emitter *e, Wire x, Wire *out) {
    Wire zero;
    *out = x;
    if (wire_type(e, x)->element == ELEMENT_BOOL) return CODE_OK;
    TRY(emit_number(e, 0, &zero));
    return emit_compare(e, "NotEqual", x, zero, out);
}

Code emit_reduction(Emitter *e) {
    const Node *node = e->instr->node;
    const Attr *dims = node_attr(node, ATTR_dims);
    bool keep = node_int(node, ATTR_keepdim) != 0;
    Wire x, out;
    TRY(emit_operand(e, 0, &x));
    bool boolean = wire_type(e, x)->element == ELEMENT_BOOL;
    const char *type;
    switch (node->op) {
    case OP_var: TRY(variance(e, x, dims, keep, &out)); return emit_result(e, 0, out);
    case OP_any:
    case OP_all:
        TRY(truth(e, x, &x));
        type = node->op == OP_any ? "ReduceLogicalOr" : "ReduceLogicalAnd";
        break;
    case OP_sum: type = boolean ? "ReduceLogicalOr" : "ReduceSum"; break;
    case OP_prod: type = boolean ? "ReduceLogicalAnd" : "ReduceProd"; break;
    case OP_amax: type = boolean ? "ReduceLogicalOr" : "ReduceMax"; break;
    case OP_amin: type = boolean ? "ReduceLogicalAnd" : "ReduceMin"; break;
    default: type = "ReduceMean"; break;
    }
    TRY(emit_reduce_dims(e, type, x, dims->ints.items, dims->ints.count, keep, &out));
    return emit_result(e, 0, out);
}
