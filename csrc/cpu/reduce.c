/* Reductions: sum, mean, prod, amax, amin, any, all, var, argmax, argmin over any dimensions.
 *
 * Floats accumulate in double, integers in int64. An output element is made by one part in an order that depends on
 * shapes and strides only. Where the outputs, not the reduced dimension, run along memory, a block of them is made
 * together. */
#include "cpu/reduce.h"

#include <string.h>

#include "cpu/cpu.h"

typedef struct Reduction {
    Fold fold;
    bool is_float, mean, var, avx2;
    double divisor;
    WideLoad load;
    WideStore store;
    const char *x;
    char *out;
    size_t x_size, out_size;
    int n_kept, n_reduced;
    int64_t kept[MAX_RANK], kept_stride[MAX_RANK];       /* outermost first, row-major order of the result */
    int64_t reduced[MAX_RANK], reduced_stride[MAX_RANK]; /* by falling stride, merged */
    int64_t block;           /* outputs made together, along the last kept dimension; 1: by rows */
    int64_t blocks_inner;    /* blocks in the last kept dimension */
    int64_t per_part, count; /* blocks a part; blocks in all */
} Reduction;

static Wide identity(const Reduction *r) {
    Wide w = {0};
    switch (r->fold) {
    case FOLD_PROD:
    case FOLD_ALL: r->is_float ? (w.f = 1) : (w.i = 1); break;
    case FOLD_MAX: r->is_float ? (w.f = -__builtin_inf()) : (w.i = INT64_MIN); break;
    case FOLD_MIN: r->is_float ? (w.f = __builtin_inf()) : (w.i = INT64_MAX); break;
    default: break;
    }
    return w;
}

/* acc[j] = acc[j] fold x[j] */
static void fold_columns(const Reduction *r, Wide *acc, const Wide *x, const double *mean, int64_t n) {
#define EACH(expr)                                                                                                     \
    for (int64_t j = 0; j < n; j++) expr;                                                                              \
    break
    if (r->is_float) {
        switch (r->fold) {
        case FOLD_SUM: EACH(acc[j].f += x[j].f);
        case FOLD_SQUARES: EACH(acc[j].f += (x[j].f - mean[j]) * (x[j].f - mean[j]));
        case FOLD_PROD: EACH(acc[j].f *= x[j].f);
        case FOLD_MAX: EACH(acc[j].f = acc[j].f != acc[j].f || acc[j].f > x[j].f ? acc[j].f : x[j].f);
        case FOLD_MIN: EACH(acc[j].f = acc[j].f != acc[j].f || acc[j].f < x[j].f ? acc[j].f : x[j].f);
        case FOLD_ANY: EACH(acc[j].f = acc[j].f != 0 || x[j].f != 0);
        case FOLD_ALL: EACH(acc[j].f = acc[j].f != 0 && x[j].f != 0);
        }
    } else {
        switch (r->fold) {
        case FOLD_SUM: EACH(acc[j].i = (int64_t)((uint64_t)acc[j].i + (uint64_t)x[j].i));
        case FOLD_PROD: EACH(acc[j].i = (int64_t)((uint64_t)acc[j].i * (uint64_t)x[j].i));
        case FOLD_MAX: EACH(acc[j].i = acc[j].i > x[j].i ? acc[j].i : x[j].i);
        case FOLD_MIN: EACH(acc[j].i = acc[j].i < x[j].i ? acc[j].i : x[j].i);
        case FOLD_ANY: EACH(acc[j].i = acc[j].i != 0 || x[j].i != 0);
        case FOLD_ALL: EACH(acc[j].i = acc[j].i != 0 && x[j].i != 0);
        case FOLD_SQUARES: break;
        }
    }
#undef EACH
}

enum { LANES = 8 };
/* All of x[0..n) into one of LANES accumulators by position: short dependency chains. */
static void fold_row(const Reduction *r, Wide *lanes, const Wide *x, const double *mean, int64_t n) {
    double means[LANES];
    for (int k = 0; k < LANES; k++) means[k] = mean ? *mean : 0;
    for (int64_t i = 0; i < n; i += LANES) fold_columns(r, lanes, x + i, means, n - i < LANES ? n - i : LANES);
}

/* One pass over the reduced space for the `n` outputs whose first reads from `x`, output stride `stride`. */
static void pass(const Reduction *r, const char *x, int64_t stride, int64_t n, Wide *acc, const double *mean) {
    Wide chunk[WIDE_CHUNK], lanes[LANES];
    int last = r->n_reduced - 1;
    int64_t at[MAX_RANK] = {0}, inner = r->reduced[last], inner_stride = r->reduced_stride[last];
    for (int64_t j = 0; j < n; j++) acc[j] = identity(r);
    for (int k = 0; k < LANES; k++) lanes[k] = identity(r);
    for (int d = 0; d <= last; d++)
        if (r->reduced[d] == 0) return;
    for (;;) {
        int64_t offset = 0;
        for (int d = 0; d < last; d++) offset += at[d] * r->reduced_stride[d];
        const char *line = x + offset * (int64_t)r->x_size;
        if (r->block > 1) {
            for (int64_t i = 0; i < inner; i++) {
                const char *from = line + i * inner_stride * (int64_t)r->x_size;
                int64_t done = r->avx2 && stride == 1
                                   ? reduce_avx2(r->fold, true, &acc->f, (const float *)(const void *)from, mean, n)
                                   : 0;
                r->load(chunk, from + done * (int64_t)r->x_size, stride, n - done);
                fold_columns(r, acc + done, chunk, mean ? mean + done : NULL, n - done);
            }
        } else {
            int64_t i = r->avx2 && inner_stride == 1
                            ? reduce_avx2(r->fold, false, &lanes->f, (const float *)(const void *)line, mean, inner)
                            : 0;
            for (int64_t m; i < inner; i += m) {
                m = inner - i < WIDE_CHUNK ? inner - i : WIDE_CHUNK;
                r->load(chunk, line + i * inner_stride * (int64_t)r->x_size, inner_stride, m);
                fold_row(r, lanes, chunk, mean, m);
            }
        }
        int d = last - 1;
        for (; d >= 0 && ++at[d] == r->reduced[d]; d--) at[d] = 0;
        if (d < 0) break;
    }
    if (r->block > 1) return;
    Fold fold = r->fold == FOLD_SQUARES ? FOLD_SUM : r->fold;
    Reduction join = {.fold = fold, .is_float = r->is_float};
    for (int k = 0; k < LANES; k++) fold_columns(&join, acc, &lanes[k], NULL, 1);
}

static void reduce_block(const Reduction *r, int64_t index) {
    Wide acc[WIDE_CHUNK];
    double mean[WIDE_CHUNK];
    int last = r->n_kept - 1;
    int64_t inner = last >= 0 ? r->kept[last] : 1, stride = last >= 0 ? r->kept_stride[last] : 0;
    int64_t first = index % r->blocks_inner * r->block, outer = index / r->blocks_inner;
    int64_t n = inner - first < r->block ? inner - first : r->block, offset = first * stride;
    char *out = r->out + (size_t)(outer * inner + first) * r->out_size;
    for (int d = last - 1; d >= 0; d--) {
        offset += outer % r->kept[d] * r->kept_stride[d];
        outer /= r->kept[d];
    }
    const char *x = r->x + offset * (int64_t)r->x_size;
    if (r->var) {
        Reduction sum = *r;
        sum.fold = FOLD_SUM;
        int64_t items = 1;
        for (int d = 0; d < r->n_reduced; d++) items *= r->reduced[d];
        pass(&sum, x, stride, n, acc, NULL);
        for (int64_t j = 0; j < n; j++) mean[j] = acc[j].f / (double)items;
    }
    pass(r, x, stride, n, acc, r->var ? mean : NULL);
    if (r->mean || r->var)
        for (int64_t j = 0; j < n; j++) acc[j].f /= r->divisor;
    if (r->fold == FOLD_ANY || r->fold == FOLD_ALL)
        for (int64_t j = 0; j < n; j++) acc[j].i = r->is_float ? acc[j].f != 0 : acc[j].i != 0;
    r->store(out, acc, n);
}

static void reduce_part(void *arg, int64_t part, int thread) {
    (void)thread;
    const Reduction *r = arg;
    int64_t end = (part + 1) * r->per_part < r->count ? (part + 1) * r->per_part : r->count;
    for (int64_t i = part * r->per_part; i < end; i++) reduce_block(r, i);
}

/* Puts a reduced dimension in its place and merges it with the one before where memory allows. */
static void add_reduced(Reduction *r, int64_t size, int64_t stride) {
    int at = r->n_reduced++;
    for (; at > 0 && r->reduced_stride[at - 1] < stride; at--) {
        r->reduced[at] = r->reduced[at - 1];
        r->reduced_stride[at] = r->reduced_stride[at - 1];
    }
    r->reduced[at] = size;
    r->reduced_stride[at] = stride;
}

Code reduce_run(KernelCall *call) {
    const Tensor *x = &call->in[0];
    Tensor *out = &call->out[0];
    const Node *node = call->node;
    Op op = node->op;
    const Attr *dims = node_attr(node, ATTR_dims);
    bool reduced[MAX_RANK] = {false};
    for (uint32_t k = 0; k < dims->ints.count; k++) reduced[dims->ints.items[k]] = true;
    Reduction r = {.fold = op == OP_prod   ? FOLD_PROD
                           : op == OP_amax ? FOLD_MAX
                           : op == OP_amin ? FOLD_MIN
                           : op == OP_any  ? FOLD_ANY
                           : op == OP_all  ? FOLD_ALL
                           : op == OP_var  ? FOLD_SQUARES
                                           : FOLD_SUM,
                   .mean = op == OP_mean,
                   .var = op == OP_var,
                   .is_float = dtype_is_float(x->dtype),
                   .avx2 = x->dtype == DTYPE_F32 && cpu_has_avx2(),
                   .load = wide_load(x->dtype),
                   .store = wide_store(out->dtype),
                   .x = x->data,
                   .out = out->data,
                   .x_size = dtype_size(x->dtype),
                   .out_size = dtype_size(out->dtype)};
    if (!r.load || !r.store)
        return fail(call->ctx, CODE_UNSUPPORTED, "no host kernel for %s of %s", op_info(op)->name,
                    dtype_name(x->dtype));
    int64_t items = 1, outputs = 1;
    for (int d = 0; d < x->rank; d++) {
        if (reduced[d]) {
            items *= x->shape[d];
            if (x->shape[d] != 1) add_reduced(&r, x->shape[d], x->strides[d]);
        } else {
            outputs *= x->shape[d];
            if (x->shape[d] == 1) continue;
            r.kept[r.n_kept] = x->shape[d];
            r.kept_stride[r.n_kept++] = x->strides[d];
        }
    }
    if (outputs == 0) return CODE_OK;
    if (r.n_reduced == 0) add_reduced(&r, 1, 1);
    for (int d = r.n_reduced - 1; d > 0; d--) {
        if (r.reduced_stride[d - 1] != r.reduced_stride[d] * r.reduced[d]) continue;
        r.reduced[d] *= r.reduced[d - 1];
        r.n_reduced--;
        for (int e = d - 1; e < r.n_reduced; e++) {
            r.reduced[e] = r.reduced[e + 1];
            r.reduced_stride[e] = r.reduced_stride[e + 1];
        }
    }
    r.divisor = (double)items;
    if (r.var) {
        double left = (double)items - node_float(node, ATTR_correction);
        r.divisor = left > 0 ? left : 0;
    }
    int64_t inner = r.n_kept ? r.kept[r.n_kept - 1] : 1;
    bool columns = inner > 1 && r.kept_stride[r.n_kept - 1] < r.reduced_stride[r.n_reduced - 1];
    r.block = columns ? (inner < WIDE_CHUNK ? inner : WIDE_CHUNK) : 1;
    if (columns && inner > 64 && outputs / inner < 8) r.block = 64; /* enough parts for the threads */
    r.blocks_inner = (inner + r.block - 1) / r.block;
    r.count = outputs / inner * r.blocks_inner;
    int64_t work = (items + 1) * r.block;
    r.per_part = work >= 8192 ? 1 : 8192 / work;
    pool_run(outputs * items >= 16384 ? call->pool : NULL, (r.count + r.per_part - 1) / r.per_part, reduce_part, &r);
    return CODE_OK;
}

/* --- argmax, argmin ----------------------------------------------------------------------------------------------- */
typedef struct ArgSearch {
    const Tensor *x;
    WideLoad load;
    int64_t *out, size, stride, outputs, per_part;
    int dim;
    bool is_float, least;
} ArgSearch;

static int64_t search(const ArgSearch *s, const char *x) {
    Wide chunk[WIDE_CHUNK], best = {0};
    int64_t found = -1;
    for (int64_t i = 0; i < s->size; i += WIDE_CHUNK) {
        int64_t n = s->size - i < WIDE_CHUNK ? s->size - i : WIDE_CHUNK;
        s->load(chunk, x + i * s->stride * (int64_t)dtype_size(s->x->dtype), s->stride, n);
        for (int64_t j = 0; j < n; j++) {
            bool better;
            if (!s->is_float) {
                better = s->least ? chunk[j].i < best.i : chunk[j].i > best.i;
            } else {
                if (chunk[j].f != chunk[j].f) return i + j; /* the first NaN */
                better = s->least ? chunk[j].f < best.f : chunk[j].f > best.f;
            }
            if (found < 0 || better) {
                best = chunk[j];
                found = i + j;
            }
        }
    }
    return found;
}

static void search_part(void *arg, int64_t part, int thread) {
    (void)thread;
    const ArgSearch *s = arg;
    int64_t end = (part + 1) * s->per_part < s->outputs ? (part + 1) * s->per_part : s->outputs;
    for (int64_t o = part * s->per_part; o < end; o++) {
        int64_t offset = 0, rest = o;
        for (int d = s->x->rank - 1; d >= 0; d--) {
            if (d == s->dim) continue;
            offset += rest % s->x->shape[d] * s->x->strides[d];
            rest /= s->x->shape[d];
        }
        s->out[o] = search(s, (const char *)s->x->data + offset * (int64_t)dtype_size(s->x->dtype));
    }
}

Code arg_reduce_run(KernelCall *call) {
    const Tensor *x = &call->in[0];
    ArgSearch s = {.x = x,
                   .load = wide_load(x->dtype),
                   .out = call->out[0].data,
                   .dim = (int)node_int(call->node, ATTR_dim),
                   .is_float = dtype_is_float(x->dtype),
                   .least = call->node->op == OP_argmin,
                   .size = 1,
                   .stride = 1,
                   .outputs = tensor_count(&call->out[0])};
    if (!s.load) return fail(call->ctx, CODE_UNSUPPORTED, "no host kernel for argmax of %s", dtype_name(x->dtype));
    if (x->rank) {
        s.size = x->shape[s.dim];
        s.stride = x->strides[s.dim];
    }
    s.per_part = s.size >= 8192 ? 1 : 8192 / (s.size + 1) + 1;
    pool_run(s.outputs * s.size >= 16384 ? call->pool : NULL, (s.outputs + s.per_part - 1) / s.per_part, search_part,
             &s);
    return CODE_OK;
}
