/* conv1d and conv2d. A product of each group's weights with columns of x: panel j of B is gathered from x for 16 places
 * of the result. Depthwise and f64 convolutions are summed directly. A conv1d is a conv2d of height 1. */
#include "cpu/gemm.h"

#include <string.h>

typedef struct Conv {
    const Tensor *x, *w, *bias, *out;
    DType dtype;
    int64_t batch, groups, in_channels, out_channels; /* channels of one group */
    int64_t height, width, kernel_h, kernel_w, out_h, out_w;
    int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int64_t x_n, x_c, x_h, x_w; /* strides of x */
} Conv;

static void get_conv(const Tensor *x, const Tensor *w, const Tensor *out, const Node *node, Conv *c) {
    bool two = x->rank == 4;
    const int64_t *stride = node_attr(node, ATTR_stride)->ints.items,
                  *padding = node_attr(node, ATTR_padding)->ints.items;
    const int64_t *dilation = node_attr(node, ATTR_dilation)->ints.items;
    *c = (Conv){
        .x = x, .w = w, .out = out, .dtype = x->dtype, .batch = x->shape[0], .groups = node_int(node, ATTR_groups)};
    c->in_channels = w->shape[1], c->out_channels = w->shape[0] / c->groups;
    c->height = two ? x->shape[2] : 1, c->width = x->shape[two ? 3 : 2];
    c->kernel_h = two ? w->shape[2] : 1, c->kernel_w = w->shape[two ? 3 : 2];
    c->out_h = two ? out->shape[2] : 1, c->out_w = out->shape[two ? 3 : 2];
    c->stride_h = two ? stride[0] : 1, c->stride_w = stride[two];
    c->pad_h = two ? padding[0] : 0, c->pad_w = padding[two];
    c->dilation_h = two ? dilation[0] : 1, c->dilation_w = dilation[two];
    c->x_n = x->strides[0], c->x_c = x->strides[1];
    c->x_h = two ? x->strides[2] : 0, c->x_w = x->strides[two ? 3 : 2];
}

/* --- as a product ------------------------------------------------------------------------------------------------- */
static void fill_panel(const void *user, int64_t batch, int64_t panel, float *dst) {
    const Conv *c = user;
    int64_t base = batch / c->groups * c->x_n + batch % c->groups * c->in_channels * c->x_c;
    int64_t places = c->out_h * c->out_w, from[GEMM_COLS], h[GEMM_COLS], w[GEMM_COLS];
    int count = (int)min_i64(GEMM_COLS, places - panel * GEMM_COLS);
    int64_t reach_h = (c->kernel_h - 1) * c->dilation_h, reach_w = (c->kernel_w - 1) * c->dilation_w;
    bool inside = count == GEMM_COLS, run = c->dtype == DTYPE_F32;
    for (int j = 0; j < count; j++) {
        int64_t place = panel * GEMM_COLS + j;
        h[j] = place / c->out_w * c->stride_h - c->pad_h;
        w[j] = place % c->out_w * c->stride_w - c->pad_w;
        from[j] = h[j] * c->x_h + w[j] * c->x_w;
        inside = inside && h[j] >= 0 && w[j] >= 0 && h[j] + reach_h < c->height && w[j] + reach_w < c->width;
        run = run && from[j] == from[0] + j;
    }
    if (!inside) memset(dst, 0, (size_t)(c->in_channels * c->kernel_h * c->kernel_w * GEMM_COLS) * sizeof *dst);
    for (int64_t channel = 0; channel < c->in_channels; channel++)
        for (int64_t kh = 0; kh < c->kernel_h * c->dilation_h; kh += c->dilation_h)
            for (int64_t kw = 0; kw < c->kernel_w * c->dilation_w; kw += c->dilation_w, dst += GEMM_COLS) {
                int64_t at = base + channel * c->x_c + kh * c->x_h + kw * c->x_w;
                if (inside && run) {
                    memcpy(dst, (const float *)c->x->data + at + from[0], GEMM_COLS * sizeof *dst);
                    continue;
                }
                if (inside && c->dtype == DTYPE_F32) { /* a patch embedding, say */
                    const float *x = (const float *)c->x->data + at;
                    for (int j = 0; j < GEMM_COLS; j++) dst[j] = x[from[j]];
                    continue;
                }
                for (int j = 0; j < count; j++) {
                    bool there =
                        inside || (h[j] + kh >= 0 && h[j] + kh < c->height && w[j] + kw >= 0 && w[j] + kw < c->width);
                    if (there) dst[j] = load_f32(c->x->data, c->dtype, at + from[j]);
                }
            }
}

static Code run_product(KernelCall *call, const Conv *c) {
    GemmFinish finish;
    int64_t k = c->in_channels * c->kernel_h * c->kernel_w;
    Gemm gemm = {.batch = 1,
                 .m = c->out_channels,
                 .n = c->out_h * c->out_w,
                 .k = k,
                 .fill = fill_panel,
                 .user = c,
                 .finish = &finish};
    gemm.a = (GemmOperand){c->w->data, c->dtype, k, 1};
    gemm.b = (GemmOperand){c->x->data, c->dtype, 0, 0};
    gemm_add_batch(&gemm, c->batch, 0, 0);
    gemm_add_batch(&gemm, c->groups, c->out_channels * k, 0);
    TRY(gemm_finish_init(&finish, call, call->n_in, c->bias));
    finish.n = gemm.n;
    finish.bias_rows = c->groups * c->out_channels;
    gemm_run(&gemm, call->pool, call->scratch);
    return CODE_OK;
}

/* --- directly ----------------------------------------------------------------------------------------------------- */
/* The results o with 0 <= o * stride + offset < size: [*begin, *end). */
static void valid_range(int64_t size, int64_t count, int64_t stride, int64_t offset, int64_t *begin, int64_t *end) {
    *begin = offset >= 0 ? 0 : min_i64(count, (-offset + stride - 1) / stride);
    *end = size <= offset ? 0 : min_i64(count, (size - offset + stride - 1) / stride);
}

/* One plane [out_h, out_w] of the result: for each weight, a shifted row of x is added to a row of the plane. */
#define PLANE(name, T)                                                                                                 \
    static void name(void *arg, int64_t plane, int thread) {                                                           \
        (void)thread;                                                                                                  \
        const Conv *c = arg;                                                                                           \
        int64_t channels = c->groups * c->out_channels, n = plane / channels, o = plane % channels;                    \
        const T *w = (const T *)c->w->data + o * c->in_channels * c->kernel_h * c->kernel_w;                           \
        T *out = (T *)c->out->data + plane * c->out_h * c->out_w;                                                      \
        T bias = c->bias ? ((const T *)c->bias->data)[o * c->bias->strides[0]] : 0;                                    \
        for (int64_t i = 0; i < c->out_h * c->out_w; i++) out[i] = 0;                                                  \
        for (int64_t channel = 0; channel < c->in_channels; channel++)                                                 \
            for (int64_t kh = 0; kh < c->kernel_h; kh++)                                                               \
                for (int64_t kw = 0; kw < c->kernel_w; kw++) {                                                         \
                    T weight = *w++;                                                                                   \
                    int64_t shift_h = kh * c->dilation_h - c->pad_h, shift_w = kw * c->dilation_w - c->pad_w;          \
                    int64_t h, h_end, w_begin, w_end, step = c->stride_w * c->x_w;                                     \
                    valid_range(c->height, c->out_h, c->stride_h, shift_h, &h, &h_end);                                \
                    valid_range(c->width, c->out_w, c->stride_w, shift_w, &w_begin, &w_end);                           \
                    for (; h < h_end; h++) {                                                                           \
                        const T *x = (const T *)c->x->data + n * c->x_n;                                               \
                        x += (o / c->out_channels * c->in_channels + channel) * c->x_c;                                \
                        x += (h * c->stride_h + shift_h) * c->x_h + shift_w * c->x_w;                                  \
                        T *row = out + h * c->out_w;                                                                   \
                        for (int64_t i = w_begin; i < w_end; i++) row[i] += weight * x[i * step];                      \
                    }                                                                                                  \
                }                                                                                                      \
        for (int64_t i = 0; c->bias && i < c->out_h * c->out_w; i++) out[i] += bias;                                   \
    }
PLANE(plane_f32, float)
PLANE(plane_f64, double)
#undef PLANE

static bool direct(DType dtype, int64_t in_channels) {
    return dtype == DTYPE_F64 || (dtype == DTYPE_F32 && in_channels == 1);
}

int64_t conv_scratch(const Graph *g, const Node *node, int threads) {
    const Value *x = graph_value(g, node->operands[0]), *w = graph_value(g, node->operands[1]);
    const Value *out = graph_value(g, node_result(node, 0));
    if (direct(x->dtype, w->shape[1])) return 0;
    int64_t groups = node_int(node, ATTR_groups), k = w->shape[1], n = 1;
    for (int d = 2; d < w->rank; d++) k *= w->shape[d], n *= out->shape[d];
    return gemm_scratch(x->shape[0] * groups, w->shape[0] / groups, n, k, false, threads);
}

Code conv_run(KernelCall *call) {
    const Tensor *x = &call->in[0], *w = &call->in[1], *out = &call->out[0];
    if (!dtype_is_float(x->dtype))
        return fail(call->ctx, CODE_UNSUPPORTED, "no convolution for %s", dtype_name(x->dtype));
    if (tensor_count(out) == 0) return CODE_OK;
    Conv c;
    get_conv(x, w, out, call->node, &c);
    c.bias = call->n_in > 2 && call->in[2].data ? &call->in[2] : NULL;
    if (!direct(x->dtype, c.in_channels)) return run_product(call, &c);
    pool_run(call->pool, c.batch * c.groups * c.out_channels, x->dtype == DTYPE_F64 ? plane_f64 : plane_f32, &c);
    return CODE_OK;
}
