/* Who writes which operator. Operators without a function are refused; the capability table has the reason. */
#include "npu/emit.h"
#include "npuir/npuir.h"

/* clang-format off */
EmitFn emit_fn(Op op) {
    if (npu_op_reason(op)) return NULL;
    switch (op) {
    case OP_sum: case OP_mean: case OP_amax: case OP_amin: case OP_prod: case OP_any: case OP_all: case OP_var:
        return emit_reduction;
    case OP_contiguous: return emit_contiguous;
    case OP_cat: return emit_cat;
    case OP_pad: return emit_pad;
    case OP_flip: return emit_flip;
    case OP_tril: case OP_triu: return emit_triangle;
    case OP_full: return emit_full;
    case OP_arange: return emit_arange;
    case OP_slice_scatter: return emit_slice_scatter;
    case OP_linear: return emit_linear;
    case OP_matmul: return emit_matmul;
    case OP_attention: return emit_attention;
    case OP_conv: return emit_conv;
    case OP_layer_norm: return emit_layer_norm;
    case OP_rms_norm: return emit_rms_norm;
    case OP_group_norm: return emit_group_norm;
    case OP_rope: return emit_rope;
    case OP_softmax: case OP_log_softmax: return emit_softmax;
    default: return op_is(op, ELEMENTWISE) ? emit_elementwise_node : NULL;
    }
}
/* clang-format on */

const char *emit_reason(Op op) {
    const char *reason = npu_op_reason(op);
    if (reason) return reason;
    bool resident = op == OP_input || op == OP_constant || op_is(op, VIEW); /* no instruction */
    return resident || emit_fn(op) ? NULL : "an operator that the emitter does not know";
}
