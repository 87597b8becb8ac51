/* cumsum and cumprod. Running values are kept in double or int64 and rounded as they are written (as eager does). */
#include <string.h>

#include "cpu/cpu.h"
#include "cpu/reduce.h"

typedef struct Scan {
    const Tensor *x;
    char *out;
    WideLoad load;
    WideStore store;
    int dim;
    int64_t size, inner, block, blocks_inner; /* of the dimension; elements after it; lines scanned together */
    bool is_float, product;
} Scan;

/* acc[j] = acc[j] op x[j]; in a row (`chain` 1) x[j] becomes the running value after it. */
static void step(const Scan *s, Wide *acc, Wide *x, int64_t n, bool chain) {
#define EACH(member, expr)                                                                                             \
    if (chain) {                                                                                                       \
        Wide running = *acc;                                                                                           \
        for (int64_t j = 0; j < n; j++) x[j].member = running.member = expr(running.member, x[j].member);              \
        *acc = running;                                                                                                \
    } else {                                                                                                           \
        for (int64_t j = 0; j < n; j++) acc[j].member = expr(acc[j].member, x[j].member);                              \
    }
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define ADD_WRAPPED(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b)))
#define MULTIPLY_WRAPPED(a, b) ((int64_t)((uint64_t)(a) * (uint64_t)(b)))
    if (s->is_float && s->product) {
        EACH(f, MULTIPLY)
    } else if (s->is_float) {
        EACH(f, ADD)
    } else if (s->product) {
        EACH(i, MULTIPLY_WRAPPED)
    } else {
        EACH(i, ADD_WRAPPED)
    }
#undef EACH
}

/* Element offset in x of row-major position `index` over its dimensions but `dim` (`from` <= d < `to`). */
static int64_t offset_in(const Tensor *x, int from, int to, int64_t index) {
    int64_t offset = 0;
    for (int d = to - 1; d >= from; d--) {
        offset += index % x->shape[d] * x->strides[d];
        index /= x->shape[d];
    }
    return offset;
}

/* Lines that lie side by side in the result: at each step along the dimension a block of them. */
static void scan_part(void *arg, int64_t part, int thread) {
    (void)thread;
    const Scan *s = arg;
    const Tensor *x = s->x;
    Wide acc[WIDE_CHUNK], chunk[WIDE_CHUNK];
    int64_t outer = part / s->blocks_inner, first = part % s->blocks_inner * s->block;
    int64_t n = s->inner - first < s->block ? s->inner - first : s->block;
    int64_t x_size = (int64_t)dtype_size(x->dtype), stride = x->rank ? x->strides[s->dim] : 1;
    const char *from = (const char *)x->data + offset_in(x, 0, s->dim, outer) * x_size;
    char *to = s->out + (outer * s->size * s->inner + first) * x_size;
    Wide start = {0};
    if (s->product) s->is_float ? (start.f = 1) : (start.i = 1);
    for (int64_t j = 0; j < n; j++) acc[j] = start;
    if (s->inner == 1) {
        for (int64_t t = 0; t < s->size; t += WIDE_CHUNK) {
            int64_t m = s->size - t < WIDE_CHUNK ? s->size - t : WIDE_CHUNK;
            s->load(chunk, from + t * stride * x_size, stride, m);
            step(s, acc, chunk, m, true);
            s->store(to + t * x_size, chunk, m);
        }
        return;
    }
    int64_t offsets[WIDE_CHUNK];
    for (int64_t j = 0; j < n; j++) offsets[j] = offset_in(x, s->dim + 1, x->rank, first + j);
    for (int64_t t = 0; t < s->size; t++) {
        for (int64_t j = 0; j < n; j++) s->load(&chunk[j], from + (t * stride + offsets[j]) * x_size, 1, 1);
        step(s, acc, chunk, n, false);
        s->store(to + t * s->inner * x_size, acc, n);
    }
}

Code scan_run(KernelCall *call) {
    const Tensor *x = &call->in[0];
    Scan s = {.x = x,
              .out = call->out[0].data,
              .load = wide_load(x->dtype),
              .store = wide_store(x->dtype),
              .dim = (int)node_int(call->node, ATTR_dim),
              .size = 1,
              .inner = 1,
              .is_float = dtype_is_float(x->dtype),
              .product = call->node->op == OP_cumprod};
    if (!s.load)
        return fail(call->ctx, CODE_UNSUPPORTED, "no host kernel for %s of %s", op_info(call->node->op)->name,
                    dtype_name(x->dtype));
    int64_t outer = 1;
    for (int d = 0; d < x->rank; d++) {
        if (d < s.dim)
            outer *= x->shape[d];
        else if (d == s.dim)
            s.size = x->shape[d];
        else
            s.inner *= x->shape[d];
    }
    if (outer * s.size * s.inner == 0) return CODE_OK;
    s.block = s.inner < 64 ? s.inner : 64;
    s.blocks_inner = (s.inner + s.block - 1) / s.block;
    pool_run(outer * s.size * s.inner >= 16384 ? call->pool : NULL, outer * s.blocks_inner, scan_part, &s);
    return CODE_OK;
}
