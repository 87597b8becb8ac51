/* Weights for the device: strided memory of the model to row-major memory of the device's type, quantised if asked for.
 *
 * A tensor is cut into planes of its last two dimensions, a plane into tiles that fit the cache. Where the rows lie
 * side by side in memory (a transposed weight), a tile is read along the rows. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") /* vector code for the plain loops */
#endif
#include "npu/weights.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "npu/npu.h"
#include "npuir/view.h"

/* A tile that is read along the rows has so many: whole cache lines. Its rows are PAD apart beyond their length, or
 * they would meet in the same sets of the cache. */
enum { TILE = 8192, TILE_ROWS = 16, PAD = 16 };

static void narrow_plain(const float *from, uint16_t *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = f32_to_f16(f32_within_f16(from[i]));
}

static void widen_plain(const uint16_t *from, float *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = f16_to_f32(from[i]);
}

static void narrow_bf16_plain(const float *from, uint16_t *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = f32_to_bf16(from[i]);
}

static void widen_bf16_plain(const uint16_t *from, float *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = bf16_to_f32(from[i]);
}

static float largest_plain(const float *from, int64_t n) {
    float most = 0;
    for (int64_t i = 0; i < n; i++) {
        float size = fabsf(from[i]);
        most = size > most || size != size ? size : most;
    }
    return most;
}

static void quantise_plain(const float *from, int64_t n, float scale, float levels, int8_t *to) {
    for (int64_t i = 0; i < n; i++) {
        float q = from[i] / scale;
        q = q > levels ? levels : q >= -levels ? q : -levels;
        to[i] = (int8_t)(int32_t)((q + 0x1.8p23f) - 0x1.8p23f);
    }
}

const WeightKernels *weight_kernels(void) {
    static const WeightKernels plain = {narrow_plain,     widen_plain,   narrow_bf16_plain,
                                        widen_bf16_plain, largest_plain, quantise_plain};
#if defined(__x86_64__) && defined(__GNUC__) && !defined(FORGE_PORTABLE)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && weight_kernels_avx2())
        return weight_kernels_avx2();
#endif
    return &plain;
}

/* --- reading ------------------------------------------------------------------------------------------------------ */
typedef struct Plane {
    const char *data;
    DType dtype;
    int64_t rows, columns, row_stride, column_stride; /* elements */
} Plane;

#define READ(T, expr)                                                                                                  \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
        const T x = ((const T *)from)[i * stride];                                                                     \
        to[i] = (float)(expr);                                                                                         \
    }                                                                                                                  \
    break

static void read_f32(const WeightKernels *k, DType dtype, const void *from, int64_t stride, int64_t n, float *to) {
    switch (dtype) {
    case DTYPE_BOOL:
    case DTYPE_U8: READ(uint8_t, x);
    case DTYPE_I8: READ(int8_t, x);
    case DTYPE_I16: READ(int16_t, x);
    case DTYPE_I32: READ(int32_t, x);
    case DTYPE_I64: READ(int64_t, x);
    case DTYPE_F64: READ(double, x);
    case DTYPE_BF16:
        if (stride == 1) {
            k->widen_bf16(from, to, n);
            break;
        }
        READ(uint16_t, bf16_to_f32(x));
    case DTYPE_F16:
        if (stride == 1) {
            k->widen(from, to, n);
            break;
        }
        READ(uint16_t, f16_to_f32(x));
    default:
        if (stride == 1) {
            memcpy(to, from, (size_t)n * sizeof *to);
            break;
        }
        READ(float, x);
    }
}

/* The rows lie side by side: columns are far apart, each with its rows together. */
static bool is_turned(const Plane *p) { return p->row_stride == 1 && p->column_stride != 1; }

static const char *element_at(const Plane *p, int64_t row, int64_t column) {
    return p->data + (row * p->row_stride + column * p->column_stride) * (int64_t)dtype_size(p->dtype);
}

/* Rows [row, row + rows) x columns [column, column + columns) into `to`, rows `lead` apart. rows <= TILE_ROWS. */
static void read_tile(const WeightKernels *k, const Plane *p, int64_t row, int64_t rows, int64_t column,
                      int64_t columns, float *to, int64_t lead) {
    if (!is_turned(p)) {
        for (int64_t r = 0; r < rows; r++)
            read_f32(k, p->dtype, element_at(p, row + r, column), p->column_stride, columns, to + r * lead);
        return;
    }
    float line[TILE_ROWS];
    for (int64_t i = 0; i < columns; i++) {
        if (rows == TILE_ROWS) { /* known counts: straight code */
            read_f32(k, p->dtype, element_at(p, row, column + i), 1, TILE_ROWS, line);
            for (int r = 0; r < TILE_ROWS; r++) to[r * lead + i] = line[r];
        } else {
            read_f32(k, p->dtype, element_at(p, row, column + i), 1, rows, line);
            for (int64_t r = 0; r < rows; r++) to[r * lead + i] = line[r];
        }
    }
}

/* --- plain values ------------------------------------------------------------------------------------------------- */
static void convert_plane(const WeightKernels *k, const Plane *p, DType dtype, char *out) {
    float tile[TILE + TILE_ROWS * PAD];
    size_t size = dtype_size(dtype);
    int64_t height = is_turned(p) ? TILE_ROWS : 1, width = TILE / height, lead = width + PAD;
    for (int64_t row = 0; row < p->rows; row += height) {
        int64_t rows = p->rows - row < height ? p->rows - row : height;
        for (int64_t column = 0; column < p->columns; column += width) {
            int64_t columns = p->columns - column < width ? p->columns - column : width;
            read_tile(k, p, row, rows, column, columns, tile, lead);
            for (int64_t r = 0; r < rows; r++) {
                void *to = out + (size_t)((row + r) * p->columns + column) * size;
                if (dtype == DTYPE_F16)
                    k->narrow(tile + r * lead, to, columns);
                else
                    memcpy(to, tile + r * lead, (size_t)columns * size);
            }
        }
    }
}

#define COPY(T)                                                                                                        \
    for (int64_t k = 0; k < n; k++) ((T *)to)[k] = ((const T *)from)[k * stride];                                      \
    break

static void copy_row(size_t size, const void *from, int64_t stride, int64_t n, void *to) {
    if (stride == 1) {
        memcpy(to, from, (size_t)n * size);
        return;
    }
    switch (size) {
    case 1: COPY(uint8_t);
    case 2: COPY(uint16_t);
    case 4: COPY(uint32_t);
    default: COPY(uint64_t);
    }
}

static void copy_plane(const Plane *p, char *out) {
    size_t size = dtype_size(p->dtype);
    for (int64_t row = 0; row < p->rows; row++)
        copy_row(size, element_at(p, row, 0), p->column_stride, p->columns, out + (size_t)(row * p->columns) * size);
}

/* Dimensions of size 1 go, neighbours that lie in memory as one become one; at least two remain. */
static void coalesce(View *v) {
    View c = {.offset = v->offset};
    for (int d = 0; d < v->rank; d++) {
        if (v->shape[d] == 1) continue;
        if (c.rank && c.strides[c.rank - 1] == v->strides[d] * v->shape[d]) {
            c.shape[c.rank - 1] *= v->shape[d];
            c.strides[c.rank - 1] = v->strides[d];
        } else {
            c.shape[c.rank] = v->shape[d];
            c.strides[c.rank++] = v->strides[d];
        }
    }
    while (c.rank < 2) {
        memmove(c.shape + 1, c.shape, c.rank * sizeof *c.shape);
        memmove(c.strides + 1, c.strides, c.rank * sizeof *c.strides);
        c.shape[0] = 1;
        c.strides[0] = 0;
        c.rank++;
    }
    *v = c;
}

static void fill_values(const Constant *constant, View view, DType dtype, char *out) {
    const WeightKernels *k = weight_kernels();
    coalesce(&view);
    int rank = view.rank;
    size_t size = dtype_size(constant->dtype);
    Plane p = {.dtype = constant->dtype,
               .rows = view.shape[rank - 2],
               .columns = view.shape[rank - 1],
               .row_stride = view.strides[rank - 2],
               .column_stride = view.strides[rank - 1]};
    bool copy = dtype == constant->dtype && (!is_turned(&p) || !dtype_is_float(dtype));
    int64_t at[MAX_RANK] = {0};
    for (;;) {
        int64_t offset = view.offset;
        for (int d = 0; d < rank - 2; d++) offset += at[d] * view.strides[d];
        p.data = (const char *)constant->data + offset * (int64_t)size;
        if (copy)
            copy_plane(&p, out);
        else
            convert_plane(k, &p, dtype, out);
        out += (size_t)(p.rows * p.columns) * dtype_size(dtype);
        int d = rank - 3;
        while (d >= 0 && ++at[d] == view.shape[d]) at[d--] = 0;
        if (d < 0) return;
    }
}

/* --- quantised: symmetric, a scale a row -------------------------------------------------------------------------- */
/* max|row| / 127 (or 7) as f16 holds it; 1 for a row of zeros. */
static float scale_of(float most, float levels) {
    if (most == 0) return 1;
    float scale = f16_to_f32(f32_to_f16(most / levels));
    return scale == 0 ? 0x1p-24f : scale; /* the least number of f16 */
}

static void store_row(const WeightSource *source, const int8_t *q, int64_t row, int64_t n, uint8_t *out) {
    if (!source->i4) {
        memcpy(out + row * n, q, (size_t)n);
        return;
    }
    int64_t i = 0;
    if (row * n % 2 == 0) {
        uint8_t *to = out + row * n / 2;
        for (; i + 2 <= n; i += 2) to[i / 2] = (uint8_t)((q[i] & 15) | (q[i + 1] & 15) << 4);
    }
    for (; i < n; i++) {
        int64_t at = row * n + i;
        uint8_t bits = (uint8_t)(q[i] & 15);
        out[at / 2] = at % 2 ? (uint8_t)(out[at / 2] | bits << 4) : bits;
    }
}

static Code fill_quantised(Context *ctx, const Constant *constant, const View *view, const WeightSource *source,
                           void *out) {
    const WeightKernels *k = weight_kernels();
    int64_t n = view->shape[1], lead = n + PAD;
    float levels = source->i4 ? 7.0f : 127.0f;
    Plane p = {(const char *)constant->data + view->offset * (int64_t)dtype_size(constant->dtype),
               constant->dtype,
               view->shape[0],
               n,
               view->strides[0],
               view->strides[1]};
    float *tile = malloc((size_t)lead * TILE_ROWS * sizeof *tile);
    int8_t *q = malloc((size_t)n + 1);
    if (!tile || !q) {
        free(tile);
        free(q);
        return fail(ctx, CODE_NO_MEMORY, "out of memory");
    }
    int64_t height = is_turned(&p) ? TILE_ROWS : 1; /* rows at a time */
    for (int64_t row = 0; row < p.rows; row += height) {
        int64_t rows = p.rows - row < height ? p.rows - row : height;
        read_tile(k, &p, row, rows, 0, n, tile, lead);
        for (int64_t r = 0; r < rows; r++) {
            float scale = scale_of(k->largest(tile + r * lead, n), levels);
            if (source->part == WEIGHT_VALUES) {
                k->quantise(tile + r * lead, n, scale, levels, q);
                store_row(source, q, row + r, n, out);
            } else if (source->dtype == DTYPE_F32) {
                ((float *)out)[row + r] = scale;
            } else {
                ((uint16_t *)out)[row + r] = f32_to_f16(scale);
            }
        }
    }
    free(tile);
    free(q);
    return CODE_OK;
}

/* --- the entry ---------------------------------------------------------------------------------------------------- */
static Code find_constant(Context *ctx, const Graph *g, const WeightSource *source, uint32_t constant,
                          const Constant **out) {
    uint32_t index = constant == UINT32_MAX ? source->constant : constant;
    if (index >= g->n_constants || source->constant >= g->n_constants)
        return fail(ctx, CODE_INVALID, "constant %u of %u", index, g->n_constants);
    const Constant *c = *out = &g->constants[index], *first = &g->constants[source->constant];
    size_t dims = c->rank * sizeof *c->shape;
    if (c != first && (c->dtype != first->dtype || c->rank != first->rank || memcmp(c->shape, first->shape, dims) ||
                       memcmp(c->strides, first->strides, dims)))
        return fail(ctx, CODE_INTERNAL, "weights of two calls of a graph differ in type, shape or strides");
    if (!c->data) return fail(ctx, CODE_UNSUPPORTED, "the weight '%.200s' has no data (meta device)", c->name);
    return CODE_OK;
}

Code weight_fill(Context *ctx, const Graph *g, const WeightSource *source, uint32_t constant, int64_t column,
                 void *out) {
    const Constant *c = NULL;
    if (source->part == WEIGHT_BYTES) {
        memcpy(out, source->literal, (size_t)source->bytes);
        return CODE_OK;
    }
    TRY(find_constant(ctx, g, source, constant, &c));
    View view = {.rank = source->rank, .offset = source->offset};
    memcpy(view.shape, source->shape, source->rank * sizeof *view.shape);
    memcpy(view.strides, source->strides, source->rank * sizeof *view.strides);
    if (source->rank) view.offset += column * view.strides[0];
    int64_t extent = view_extent(view.rank, view.shape, view.strides);
    if (extent == 0) return CODE_OK;
    if (extent < 0 || view.offset < 0 || column < 0 || view.offset > c->bytes / (int64_t)dtype_size(c->dtype) - extent)
        return fail(ctx, CODE_INTERNAL, "a view that leaves the memory of the weight '%.200s'", c->name);
    bool quantised =
        source->part == WEIGHT_SCALES || source->i4 || (source->dtype == DTYPE_I8 && dtype_is_float(c->dtype));
    if (!quantised && !dtype_is_float(source->dtype) && source->dtype != c->dtype)
        return fail(ctx, CODE_INTERNAL, "weights of %s as %s", dtype_name(c->dtype), dtype_name(source->dtype));
    if (!quantised) {
        fill_values(c, view, source->dtype, out);
        return CODE_OK;
    }
    if (view.rank != 2) return fail(ctx, CODE_INTERNAL, "quantised weights of rank %u", view.rank);
    return fill_quantised(ctx, c, &view, source, out);
}

Code npu_model_bin(Context *ctx, const Graph *g, const NpuModel *model, void *out) {
    memset(out, 0, (size_t)model->bin_bytes);
    for (uint32_t i = 0; i < model->n_pieces; i++) {
        TRY(check_cancelled(ctx));
        TRY(weight_fill(ctx, g, &model->pieces[i], UINT32_MAX, 0, (char *)out + model->offsets[i]));
    }
    return CODE_OK;
}
