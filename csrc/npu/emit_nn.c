/* The operators of networks: contractions, softmax, gelu. */
#include "npu/emit.h"

Code emit_linear(Emitter *e) {
    Wire x, w, bias, out;
    TRY(emit_operand(e, 0, &x));
    TRY(emit_operand(e, 1, &w));
    TRY(emit_operand(e, 2, &bias));
    WireType type = *wire_type(e, x);
    type.shape[type.rank - 1] = wire_type(e, w)->shape[0];
    TRY(emit_layer(e, "MatMul", 1, (Wire[]){x, w}, 2, &type, 1, &out, "transpose_a=\"false\" transpose_b=\"true\""));
    if (bias != WIRE_NONE) TRY(emit_binary(e, "Add", 1, out, bias, &out));
    TRY(emit_epilogue(e, 3, out, &out));
    return emit_result(e, 0, out);
}

Code emit_matmul(Emitter *e) {
    Wire a, b, out;
    TRY(emit_operand(e, 0, &a));
    TRY(emit_operand(e, 1, &b));
    WireType type = *wire_type(e, a), right = *wire_type(e, b);
    for (int d = 0; d + 2 < type.rank; d++)
        if (type.shape[d] == 1) type.shape[d] = right.shape[d];
    type.shape[type.rank - 1] = right.shape[type.rank - 1];
    TRY(emit_layer(e, "MatMul", 1, (Wire[]){a, b}, 2, &type, 1, &out, "transpose_a=\"false\" transpose_b=\"false\""));
    TRY(emit_epilogue(e, 2, out, &out));
    return emit_result(e, 0, out);
}

static Code unwritten(Emitter *e) { return fail(e->ctx, CODE_UNSUPPORTED, "not written"); }
Code emit_attention(Emitter *e) { return unwritten(e); }
Code emit_conv(Emitter *e) { return unwritten(e); }
Code emit_layer_norm(Emitter *e) { return unwritten(e); }
Code emit_rms_norm(Emitter *e) { return unwritten(e); }
Code emit_group_norm(Emitter *e) { return unwritten(e); }
Code emit_rope(Emitter *e) { return unwritten(e); }
Code emit_softmax(Emitter *e) { return unwritten(e); }

Code emit_gelu(Emitter *e, Wire x, bool approximate, Wire *out) {
    return emit_layer(e, "Gelu", 7, &x, 1, wire_type(e, x), 1, out, "approximation_mode=\"%s\"",
                      approximate ? "TANH" : "ERF");
}
