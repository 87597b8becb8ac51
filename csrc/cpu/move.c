/* Kernels that move or make data: contiguous, cat, pad, flip, tril, triu, slice_scatter, full, arange. */
#include "cpu/move.h"

#include <string.h>

#include "cpu/cpu.h"

static Element scalar_element(DType type, Scalar s) {
    return s.kind == SCALAR_INT ? element_from_i64(type, s.i) : element_from_f64(type, s.f);
}

Code contiguous_run(KernelCall *call) {
    tensor_copy(call->pool, &call->out[0], &call->in[0]);
    return CODE_OK;
}

/* The part [start, start + size * step) of dimension `dim`. */
static Tensor slice_of(const Tensor *t, int dim, int64_t start, int64_t size, int64_t step) {
    Tensor part = *t;
    part.data = tensor_byte(t, start * t->strides[dim]);
    part.shape[dim] = size;
    part.strides[dim] = t->strides[dim] * step;
    return part;
}

Code cat_run(KernelCall *call) {
    int dim = (int)node_int(call->node, ATTR_dim);
    int64_t start = 0;
    for (uint32_t k = 0; k < call->n_in; k++) {
        Tensor part = slice_of(&call->out[0], dim, start, call->in[k].shape[dim], 1);
        tensor_copy(call->pool, &part, &call->in[k]);
        start += call->in[k].shape[dim];
    }
    return CODE_OK;
}

Code slice_scatter_run(KernelCall *call) {
    Tensor part = slice_of(&call->out[0], (int)node_int(call->node, ATTR_dim), node_int(call->node, ATTR_start), 0,
                           node_int(call->node, ATTR_step));
    memcpy(part.shape, call->in[1].shape, sizeof part.shape);
    tensor_copy(call->pool, &call->out[0], &call->in[0]);
    tensor_copy(call->pool, &part, &call->in[1]);
    return CODE_OK;
}

/* Fills the borders dimension by dimension, so that nothing is written twice. */
Code pad_run(KernelCall *call) {
    const int64_t *padding = node_attr(call->node, ATTR_padding)->ints.items;
    Element value = scalar_element(call->out[0].dtype, node_attr(call->node, ATTR_value)->s);
    Tensor inner = call->out[0];
    for (int d = 0; d < inner.rank; d++) {
        int64_t before = padding[2 * d], size = call->in[0].shape[d];
        Tensor low = slice_of(&inner, d, 0, before, 1),
               high = slice_of(&inner, d, before + size, padding[2 * d + 1], 1);
        tensor_fill(call->pool, &low, &value);
        tensor_fill(call->pool, &high, &value);
        inner = slice_of(&inner, d, before, size, 1);
    }
    tensor_copy(call->pool, &inner, &call->in[0]);
    return CODE_OK;
}

Code flip_run(KernelCall *call) {
    const Attr *dims = node_attr(call->node, ATTR_dims);
    Tensor x = call->in[0];
    if (tensor_count(&x) == 0) return CODE_OK;
    for (uint32_t k = 0; k < dims->ints.count && x.rank > 0; k++) {
        int d = (int)dims->ints.items[k];
        x = slice_of(&x, d, x.shape[d] - 1, x.shape[d], -1);
    }
    tensor_copy(call->pool, &call->out[0], &x);
    return CODE_OK;
}

/* tril keeps j <= i + diagonal, triu j >= i + diagonal. One row of all matrices at a time. */
Code triangle_run(KernelCall *call) {
    bool lower = call->node->op == OP_tril;
    int64_t diagonal = node_int(call->node, ATTR_diagonal);
    const Tensor *x = &call->in[0], *out = &call->out[0];
    int row = out->rank - 2, col = out->rank - 1;
    int64_t rows = out->shape[row], cols = out->shape[col];
    diagonal = diagonal < -rows ? -rows : diagonal > cols ? cols : diagonal;
    Element zero = {{0}};
    for (int64_t i = 0; i < rows; i++) {
        int64_t cut = i + diagonal + lower;
        cut = cut < 0 ? 0 : cut > cols ? cols : cut;
        Tensor to = slice_of(out, row, i, 1, 1), from = slice_of(x, row, i, 1, 1);
        Tensor to_left = slice_of(&to, col, 0, cut, 1), to_right = slice_of(&to, col, cut, cols - cut, 1);
        Tensor kept = lower ? slice_of(&from, col, 0, cut, 1) : slice_of(&from, col, cut, cols - cut, 1);
        tensor_copy(call->pool, lower ? &to_left : &to_right, &kept);
        tensor_fill(call->pool, lower ? &to_right : &to_left, &zero);
    }
    return CODE_OK;
}

Code full_run(KernelCall *call) {
    Element value = scalar_element(call->out[0].dtype, node_attr(call->node, ATTR_value)->s);
    tensor_fill(call->pool, &call->out[0], &value);
    return CODE_OK;
}

Code arange_run(KernelCall *call) {
    const Tensor *out = &call->out[0];
    Scalar first = node_attr(call->node, ATTR_first)->s, delta = node_attr(call->node, ATTR_delta)->s;
    bool whole = first.kind == SCALAR_INT && delta.kind == SCALAR_INT && !dtype_is_float(out->dtype);
    for (int64_t i = 0; i < out->shape[0]; i++) {
        Element e = whole ? element_from_i64(out->dtype, (int64_t)((uint64_t)first.i + (uint64_t)i * (uint64_t)delta.i))
                          : element_from_f64(out->dtype, scalar_f64(first) + scalar_f64(delta) * (double)i);
        memcpy(tensor_byte(out, i * out->strides[0]), &e, dtype_size(out->dtype));
    }
    return CODE_OK;
}
