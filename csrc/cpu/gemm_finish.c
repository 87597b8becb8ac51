/* What happens to a block of the product while it is hot: it starts as the bias; in the end the node's elementwise
 * program takes it to the result. */
#include "cpu/gemm.h"

#include <string.h>

/* The operand as rows: its leading dimensions aligned to those of the result, neighbours merged where one stride
 * serves. */
static void rows_of(GemmRows *rows, const Tensor *t, const Tensor *out) {
    *rows = (GemmRows){.data = t->data, .dtype = t->dtype};
    int shift = out->rank - t->rank;
    rows->col = t->rank > 0 && t->shape[t->rank - 1] != 1 ? t->strides[t->rank - 1] : 0;
    for (int d = 0; d + 1 < out->rank; d++) {
        int own = d - shift;
        int64_t stride = own >= 0 && t->shape[own] != 1 ? t->strides[own] : 0;
        if (out->shape[d] == 1) continue;
        int last = rows->rank - 1;
        if (last >= 0 && rows->strides[last] == stride * out->shape[d]) {
            rows->shape[last] *= out->shape[d];
            rows->strides[last] = stride;
        } else {
            rows->shape[rows->rank] = out->shape[d];
            rows->strides[rows->rank++] = stride;
        }
    }
}

static int64_t row_offset(const GemmRows *rows, int64_t row) {
    if (rows->rank == 0) return 0;
    if (rows->rank == 1) return row * rows->strides[0];
    int64_t offset = 0;
    for (int d = rows->rank - 1; d >= 0; d--) {
        offset += row % rows->shape[d] * rows->strides[d];
        row /= rows->shape[d];
    }
    return offset;
}

Code gemm_finish_init(GemmFinish *f, const KernelCall *call, uint32_t first, const Tensor *bias) {
    const Tensor *out = &call->out[0];
    const Attr *words = node_has_attr(call->node, ATTR_program) ? node_attr(call->node, ATTR_program) : NULL;
    DType types[PROGRAM_MAX_INPUTS];
    size_t n_inputs = 1;
    types[0] = call->in[0].dtype;
    memset(f, 0, sizeof *f);
    for (uint32_t k = first; k < call->n_in; k++, n_inputs++) {
        if (n_inputs >= PROGRAM_MAX_INPUTS)
            return fail(call->ctx, CODE_INVALID, "epilogue has more than %d inputs", PROGRAM_MAX_INPUTS);
        types[n_inputs] = call->in[k].dtype;
        rows_of(&f->inputs[n_inputs], &call->in[k], out);
    }
    bool f32 = gemm_in_f32(types[0]);
    TRY(ew_prepare(call->ctx, &f->program, words ? words->ints.items : NULL, words ? words->ints.count : 0, types,
                   n_inputs, f32));
    f->kernels = f32 ? gemm_kernels() : NULL;
    f->product = f32 ? DTYPE_F32 : types[0];
    f->direct = types[0] == DTYPE_F32 && !(words && words->ints.count);
    f->out = out->data;
    f->n = out->rank ? out->shape[out->rank - 1] : 1;
    f->out_size = dtype_size(out->dtype);
    if (bias && bias->data) {
        f->bias = bias->data;
        f->bias_type = bias->dtype;
        f->bias_stride = bias->rank ? bias->strides[bias->rank - 1] : 0;
    }
    return CODE_OK;
}

void gemm_start_row(const GemmFinish *f, int64_t row, int64_t col, int64_t count, void *product) {
    size_t size = dtype_size(f->product);
    int64_t there = min_i64(count, f->n - col), at = (f->bias_rows ? row % f->bias_rows : col) * f->bias_stride;
    int64_t step = f->bias_rows ? 0 : f->bias_stride;
    if (!f->bias) {
        memset(product, 0, (size_t)count * size);
        return;
    }
    memset((char *)product + (size_t)there * size, 0, (size_t)(count - there) * size);
    if (f->bias_type == f->product && step == 1) {
        memcpy(product, f->bias + (size_t)at * size, (size_t)there * size);
    } else if (f->product == DTYPE_F32) {
        for (int64_t j = 0; j < there; j++) ((float *)product)[j] = load_f32(f->bias, f->bias_type, at + j * step);
    } else {
        for (int64_t j = 0; j < there; j++)
            memcpy((char *)product + (size_t)j * size, f->bias + (size_t)(at + j * step) * size, size);
    }
}

float gemm_bias(const GemmFinish *f, int64_t col) {
    return f->bias ? load_f32(f->bias, f->bias_type, col * f->bias_stride) : 0.0f;
}

void gemm_finish_row(GemmFinish *f, int64_t row, int64_t col, int64_t count, void *product) {
    EwSrc src[PROGRAM_MAX_INPUTS] = {{product, 1}};
    uint64_t gathered[PROGRAM_MAX_INPUTS][GEMM_MAX_SEGMENT]; /* rows of operands that are strided inside */
    int n_gathered = 0;
    for (uint32_t i = 1; i < f->program.n_inputs; i++) {
        const GemmRows *in = &f->inputs[i];
        size_t size = dtype_size(in->dtype);
        const char *data = in->data + (row_offset(in, row) + col * in->col) * (int64_t)size;
        src[i] = (EwSrc){data, in->col};
        if (in->col == 0 || in->col == 1) continue;
        char *to = (char *)gathered[n_gathered++];
        for (int64_t j = 0; j < count; j++) memcpy(to + (size_t)j * size, data + j * in->col * (int64_t)size, size);
        src[i] = (EwSrc){to, 1};
    }
    EwFault fault = ew_row(&f->program, f->out + (size_t)(row * f->n + col) * f->out_size, src, count);
    if (fault != EW_OK) atomic_store(&f->fault, (int)fault);
}

void gemm_finish_block(GemmFinish *f, int64_t row, int64_t rows, int64_t col, int64_t count, float *product,
                       int64_t stride) {
    if (f->direct) {
        float *out = (float *)(void *)f->out + row * f->n + col;
        for (int64_t i = 0; i < rows; i++) memcpy(out + i * f->n, product + i * stride, (size_t)count * sizeof *out);
        return;
    }
    EwSrc src[PROGRAM_MAX_INPUTS] = {{product, 1}};
    int64_t steps[PROGRAM_MAX_INPUTS] = {stride * (int64_t)sizeof(float)};
    bool even = true; /* each operand's rows are one step apart */
    for (uint32_t i = 1; i < f->program.n_inputs; i++) {
        const GemmRows *in = &f->inputs[i];
        int64_t size = (int64_t)dtype_size(in->dtype);
        even = even && in->rank <= 1 && (in->col == 0 || in->col == 1);
        src[i] = (EwSrc){in->data + (row_offset(in, row) + col * in->col) * size, in->col};
        steps[i] = in->rank == 1 ? in->strides[0] * size : 0;
    }
    if (even) {
        EwFault fault = ew_rows(&f->program, f->out + (size_t)(row * f->n + col) * f->out_size,
                                f->n * (int64_t)f->out_size, src, steps, rows, count);
        if (fault != EW_OK) atomic_store(&f->fault, (int)fault);
        return;
    }
    for (int64_t i = 0; i < rows; i++) gemm_finish_row(f, row + i, col, count, product + i * stride);
}
