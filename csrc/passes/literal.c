/* Elements of literals, and views over known memory. */
#include "passes/evaluate.h"

#include <string.h>

typedef union Element {
    uint8_t u8;
    int8_t i8;
    int16_t i16;
    uint16_t u16;
    int32_t i32;
    uint32_t u32;
    int64_t i64;
    float f32;
    double f64;
} Element;

bool scalar_load(DType dtype, const void *data, Scalar *out) {
    Element e;
    memcpy(&e, data, dtype_size(dtype) <= sizeof e ? dtype_size(dtype) : sizeof e);
    out->kind = dtype_is_float(dtype) ? SCALAR_FLOAT : SCALAR_INT;
    switch (dtype) {
    case DTYPE_BOOL: out->i = e.u8 != 0; return true;
    case DTYPE_U8: out->i = e.u8; return true;
    case DTYPE_I8: out->i = e.i8; return true;
    case DTYPE_I16: out->i = e.i16; return true;
    case DTYPE_I32: out->i = e.i32; return true;
    case DTYPE_I64: out->i = e.i64; return true;
    case DTYPE_F16: out->f = (double)f16_to_f32(e.u16); return true;
    case DTYPE_BF16: out->f = (double)bf16_to_f32(e.u16); return true;
    case DTYPE_F32: out->f = (double)e.f32; return true;
    case DTYPE_F64: out->f = e.f64; return true;
    default: return false;
    }
}

/* Float to integer as C does it where that is defined; elsewhere the value that x86 gives, without undefined
 * behaviour. */
static int64_t to_int(Scalar s) {
    if (s.kind == SCALAR_INT) return s.i;
    return s.f >= -9223372036854775808.0 && s.f < 9223372036854775808.0 ? (int64_t)s.f : INT64_MIN;
}

void scalar_store(Scalar s, DType dtype, void *data) {
    Element e;
    memset(&e, 0, sizeof e);
    switch (dtype) {
    case DTYPE_BOOL: e.u8 = s.kind == SCALAR_INT ? s.i != 0 : s.f != 0; break;
    case DTYPE_U8:
    case DTYPE_I8: e.u8 = (uint8_t)to_int(s); break;
    case DTYPE_I16: e.u16 = (uint16_t)to_int(s); break;
    case DTYPE_I32: e.u32 = (uint32_t)to_int(s); break;
    case DTYPE_I64: e.i64 = to_int(s); break;
    case DTYPE_F16: e.u16 = f32_to_f16((float)scalar_f64(s)); break;
    case DTYPE_BF16: e.u16 = f32_to_bf16((float)scalar_f64(s)); break;
    case DTYPE_F32: e.f32 = (float)scalar_f64(s); break;
    default: e.f64 = scalar_f64(s); break;
    }
    memcpy(data, &e, dtype_size(dtype) <= sizeof e ? dtype_size(dtype) : sizeof e);
}

/* `s` as an element of that type holds it. */
static Scalar scalar_round(Scalar s, DType dtype) {
    unsigned char element[8];
    Scalar out = s;
    scalar_store(s, dtype, element);
    return scalar_load(dtype, element, &out) ? out : s;
}

Tensor constant_tensor(const Constant *c) {
    Tensor t = {.data = c->data, .dtype = c->dtype, .rank = c->rank};
    if (c->rank) memcpy(t.shape, c->shape, c->rank * sizeof *c->shape);
    if (c->rank) memcpy(t.strides, c->strides, c->rank * sizeof *c->strides);
    return t;
}

int64_t tensor_bytes(const Tensor *t) {
    int64_t bytes;
    return __builtin_mul_overflow(tensor_count(t), (int64_t)dtype_size(t->dtype), &bytes) ? INT64_MAX : bytes;
}

bool literal_uniform(const Graph *g, ValueId v, Scalar *out) {
    const Node *node = value_node(g, v);
    DType dtype = graph_value(g, v)->dtype;
    unsigned char zero[16] = {0};
    if (node->op == OP_full) {
        *out = scalar_round(node_attr(node, ATTR_value)->s, dtype);
        return scalar_load(dtype, zero, &(Scalar){0});
    }
    if (node->op != OP_constant) return false;
    const Constant *c = &g->constants[node_int(node, ATTR_index)];
    if (c->kind != CONSTANT_LITERAL || !c->data) return false;
    Tensor t = constant_tensor(c);
    int64_t count = tensor_count(&t);
    size_t size = dtype_size(dtype);
    if (count == 0) return false;
    bool splat = true;
    for (int d = 0; d < t.rank; d++) splat &= t.shape[d] == 1 || t.strides[d] == 0;
    if (!splat) {
        if (!tensor_is_contiguous(&t)) return false;
        if (memcmp(c->data, (const char *)c->data + size, (size_t)(count - 1) * size) != 0) return false;
    }
    return scalar_load(dtype, c->data, out);
}

/* Strides for `shape` over memory of `in`, when dims of equal memory order can be merged and split: PyTorch's
 * computeStride. */
static bool reshape_strides(const Tensor *in, Tensor *out) {
    if (tensor_count(in) == 0) {
        int64_t stride = 1;
        for (int d = out->rank; d-- > 0;) {
            out->strides[d] = stride;
            stride *= out->shape[d] > 1 ? out->shape[d] : 1;
        }
        return true;
    }
    int to = out->rank - 1;
    int64_t base = in->rank ? in->strides[in->rank - 1] : 1, have = 1, want = 1;
    for (int from = in->rank - 1; from >= 0; from--) {
        have *= in->shape[from];
        /* the block of mergeable dimensions ends here? */
        if (from > 0 && (in->shape[from - 1] == 1 || in->strides[from - 1] == have * base)) continue;
        while (to >= 0 && (want < have || out->shape[to] == 1)) {
            out->strides[to] = want * base;
            want *= out->shape[to--];
        }
        if (want != have) return false;
        if (from > 0) {
            base = in->strides[from - 1];
            have = want = 1;
        }
    }
    for (; to >= 0; to--) out->strides[to] = 1; /* only dims of size 1 are left */
    return true;
}

bool view_tensor(const Node *node, const Value *result, const Tensor *in, Tensor *out, int64_t *offset) {
    *offset = 0;
    *out = (Tensor){.dtype = in->dtype, .rank = result->rank};
    if (result->rank) memcpy(out->shape, result->shape, result->rank * sizeof *result->shape);
    switch (node->op) {
    case OP_reshape: return reshape_strides(in, out);
    case OP_permute: {
        const Attr *dims = node_attr(node, ATTR_dims);
        for (int d = 0; d < out->rank; d++) out->strides[d] = in->strides[dims->ints.items[d]];
        return true;
    }
    case OP_expand: {
        int lead = out->rank - in->rank;
        for (int d = 0; d < in->rank; d++)
            out->strides[lead + d] = in->shape[d] == 1 && out->shape[lead + d] != 1 ? 0 : in->strides[d];
        return true;
    }
    case OP_slice: {
        int64_t dim = node_int(node, ATTR_dim);
        memcpy(out->strides, in->strides, sizeof out->strides);
        *offset = node_int(node, ATTR_start) * in->strides[dim];
        if (tensor_count(out) == 0) *offset = 0;
        out->strides[dim] *= node_int(node, ATTR_step);
        return true;
    }
    default: return false;
    }
}
