/* Indexing element by element: gather and scatter; and the additions that scattered writes need. */
#include <stdatomic.h>

#include "cpu/index.h"

#define ADD(S, T, read, write)                                                                                         \
    static void add_##S(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t n) {               \
        T *d = (T *)(void *)to;                                                                                        \
        const T *a = (const T *)(const void *)from;                                                                    \
        for (int64_t i = 0; i < n; i++)                                                                                \
            d[i * to_stride] = (T)write(read(d[i * to_stride]) + read(a[i * from_stride]));                            \
    }
#define UNSIGNED(x) ((uint64_t)(x))
#define KEEP(x) (x)
#define TRUTH(x) ((x) != 0)
ADD(BOOL, uint8_t, KEEP, TRUTH)
ADD(U8, uint8_t, KEEP, KEEP)
ADD(I8, int8_t, UNSIGNED, KEEP)
ADD(I16, int16_t, UNSIGNED, KEEP)
ADD(I32, int32_t, UNSIGNED, KEEP)
ADD(I64, int64_t, UNSIGNED, KEEP)
ADD(F16, uint16_t, f16_to_f32, f32_to_f16)
ADD(BF16, uint16_t, bf16_to_f32, f32_to_bf16)
ADD(F32, float, KEEP, KEEP)
ADD(F64, double, KEEP, KEEP)

AddRow add_row(DType type) {
    switch (type) {
    case DTYPE_BOOL: return add_BOOL;
    case DTYPE_U8: return add_U8;
    case DTYPE_I8: return add_I8;
    case DTYPE_I16: return add_I16;
    case DTYPE_I32: return add_I32;
    case DTYPE_I64: return add_I64;
    case DTYPE_F16: return add_F16;
    case DTYPE_BF16: return add_BF16;
    case DTYPE_F32: return add_F32;
    case DTYPE_F64: return add_F64;
    default: return NULL;
    }
}

/* For each element of the index: gather copies far[.. index ..] to near, scatter near to far. Both have the index's
 * rank; in dimension `dim` the index takes the place of the coordinate in far. */
typedef struct Elements {
    const Tensor *index, *near, *far;
    int dim;
    bool gather;
    AddRow add;                  /* scatter that adds */
    int64_t rows, row, per_part; /* by lines of the last dimension */
    atomic_bool failed;
    _Atomic int64_t bad_index;
} Elements;

/* Between near's row and the elements of far at `offsets`. */
static void move_elements(const Elements *e, char *near, int64_t step, char *far, const int64_t *offsets, int64_t n) {
    size_t size = dtype_size(e->far->dtype);
    if (e->add) {
        for (int64_t j = 0; j < n; j++)
            e->add(far + offsets[j] * (int64_t)size, 1, near + j * step * (int64_t)size, 1, 1);
        return;
    }
#define MOVE(T)                                                                                                        \
    for (int64_t j = 0; j < n; j++) {                                                                                  \
        T *a = (T *)(void *)near + j * step, *b = (T *)(void *)far + offsets[j];                                       \
        if (e->gather)                                                                                                 \
            *a = *b;                                                                                                   \
        else                                                                                                           \
            *b = *a;                                                                                                   \
    }                                                                                                                  \
    break
    typedef struct Pair {
        uint64_t word[2];
    } Pair;
    switch (size) {
    case 1: MOVE(uint8_t);
    case 2: MOVE(uint16_t);
    case 4: MOVE(uint32_t);
    case 8: MOVE(uint64_t);
    default: MOVE(Pair);
    }
#undef MOVE
}

static void elements_part(void *arg, int64_t part, int thread) {
    (void)thread;
    Elements *e = arg;
    const Tensor *index = e->index, *near = e->near, *far = e->far;
    int last = index->rank - 1;
    int64_t limit = index->rank ? far->shape[e->dim] : 1, jump = index->rank ? far->strides[e->dim] : 0;
    int64_t index_step = last >= 0 ? index->strides[last] : 0, near_step = last >= 0 ? near->strides[last] : 0;
    int64_t far_step = last >= 0 && last != e->dim ? far->strides[last] : 0;
    int64_t end = (part + 1) * e->per_part < e->rows ? (part + 1) * e->per_part : e->rows;
    for (int64_t r = part * e->per_part; r < end; r++) {
        int64_t rest = r, at = 0, near_at = 0, far_at = 0;
        for (int d = last - 1; d >= 0; d--) {
            int64_t i = rest % index->shape[d];
            rest /= index->shape[d];
            at += i * index->strides[d];
            near_at += i * near->strides[d];
            if (d != e->dim) far_at += i * far->strides[d];
        }
        for (int64_t i = 0, n; i < e->row; i += n) {
            int64_t offsets[256];
            n = e->row - i < 256 ? e->row - i : 256;
            for (int64_t j = 0; j < n; j++) {
                int64_t k = index_at(index, at + (i + j) * index_step);
                if (k < 0 || k >= limit) {
                    atomic_store(&e->bad_index, k);
                    atomic_store(&e->failed, true);
                    return;
                }
                offsets[j] = (i + j) * far_step + k * jump;
            }
            move_elements(e, tensor_byte(near, near_at + i * near_step), near_step, tensor_byte(far, far_at), offsets,
                          n);
        }
    }
}

static Code run_elements(KernelCall *call, Elements *e) {
    int64_t count = tensor_count(e->index);
    if (count == 0) return CODE_OK;
    e->dim = (int)node_int(call->node, ATTR_dim);
    e->row = e->index->rank ? e->index->shape[e->index->rank - 1] : 1;
    e->rows = count / e->row;
    e->per_part = 4096 / e->row + 1;
    /* writes may meet: in order, the last one wins */
    pool_run(e->gather && count >= 16384 ? call->pool : NULL, (e->rows + e->per_part - 1) / e->per_part, elements_part,
             e);
    if (!atomic_load(&e->failed)) return CODE_OK;
    return fail(call->ctx, CODE_INDEX, "index %lld is out of bounds for dimension %d with size %lld",
                (long long)atomic_load(&e->bad_index), e->dim, (long long)(e->far->rank ? e->far->shape[e->dim] : 1));
}

Code gather_run(KernelCall *call) {
    Elements e = {.index = &call->in[1], .near = &call->out[0], .far = &call->in[0], .gather = true};
    return run_elements(call, &e);
}

Code scatter_run(KernelCall *call) {
    Elements e = {.index = &call->in[1], .near = &call->in[2], .far = &call->out[0]};
    if (node_int(call->node, ATTR_reduce) == 1 && !(e.add = add_row(call->out[0].dtype)))
        return fail(call->ctx, CODE_UNSUPPORTED, "no host kernel for scatter of %s", dtype_name(call->out[0].dtype));
    tensor_copy(call->pool, &call->out[0], &call->in[0]);
    return run_elements(call, &e);
}
