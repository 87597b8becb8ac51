/* grouped_matmul: the experts of a mixture. Each group of rows is a product of its own, with the whole pool. */
#include "cpu/gemm.h"

#include <string.h>

/* Rows of group e end at the e-th offset; those past the last offset are zero. */
static Code group_end(KernelCall *call, int64_t e, int64_t begin, int64_t rows, int64_t *end) {
    const Tensor *offsets = &call->in[2];
    *end = ((const int32_t *)offsets->data)[e * offsets->strides[0]];
    if (*end >= begin && *end <= rows) return CODE_OK;
    return fail(call->ctx, CODE_INDEX, "offset %lld of group %lld is not in [%lld, %lld]", (long long)*end,
                (long long)e, (long long)begin, (long long)rows);
}

Code grouped_matmul_run(KernelCall *call) {
    const Tensor *x = &call->in[0], *w = &call->in[1], *out = &call->out[0];
    int64_t rows = x->shape[0], n = w->shape[2], begin = 0, end;
    for (int64_t e = 0; e < w->shape[0]; e++, begin = end) {
        TRY(group_end(call, e, begin, rows, &end));
        if (end == begin || n == 0) continue;
        Gemm gemm = {.batch = 1,
                     .m = end - begin,
                     .n = n,
                     .k = x->shape[1],
                     .a = {NULL, x->dtype, x->strides[0], x->strides[1]},
                     .b = {NULL, w->dtype, w->strides[1], w->strides[2]}};
        GemmOperand all_x = {x->data, x->dtype, 0, 0}, all_w = {w->data, w->dtype, 0, 0};
        gemm.a.data = gemm_element(&all_x, begin * x->strides[0]);
        gemm.b.data = gemm_element(&all_w, e * w->strides[0]);
        TRY(gemm_call(call, &gemm, (uint32_t)call->n_in, NULL, begin));
    }
    memset((char *)out->data + begin * n * (int64_t)dtype_size(out->dtype), 0,
           (size_t)((rows - begin) * n) * dtype_size(out->dtype));
    return CODE_OK;
}

int64_t grouped_matmul_scratch(const Graph *g, const Node *node, int threads) {
    const Value *x = graph_value(g, node->operands[0]), *w = graph_value(g, node->operands[1]);
    int64_t worst = 0; /* which is not that of the most rows */
    if (!gemm_in_f32(x->dtype)) return gemm_plain_scratch(threads);
    for (int64_t m = 1; m <= x->shape[0]; m++) {
        worst = max_i64(worst, gemm_turned_scratch(1, m, w->shape[2], w->shape[1], threads));
        worst = max_i64(worst, gemm_scratch(1, m, w->shape[2], w->shape[1], false, threads));
    }
    return worst;
}
