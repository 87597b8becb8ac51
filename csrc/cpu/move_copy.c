/* Strided copies: dimensions are put in the target's memory order and merged, then planes of two dimensions are copied
 * row by row, or tile by tile where the source runs across. */
#include "cpu/move.h"

#include <string.h>

typedef struct Copy {
    char *to;
    const char *from;
    size_t size;
    int rank; /* >= 2; the last two are the plane */
    int64_t shape[MAX_RANK + 1], to_stride[MAX_RANK + 1], from_stride[MAX_RANK + 1];
    int64_t rows, row_parts; /* rows of the plane a part, parts a plane */
} Copy;

enum { PART_BYTES = 64 << 10, TILE = 8 };

static void insert_dim(Copy *c, int at, int64_t size, int64_t to_stride, int64_t from_stride) {
    for (int d = c->rank; d > at; d--) {
        c->shape[d] = c->shape[d - 1];
        c->to_stride[d] = c->to_stride[d - 1];
        c->from_stride[d] = c->from_stride[d - 1];
    }
    c->shape[at] = size;
    c->to_stride[at] = to_stride;
    c->from_stride[at] = from_stride;
    c->rank++;
}

static void remove_dim(Copy *c, int at) {
    c->rank--;
    for (int d = at; d < c->rank; d++) {
        c->shape[d] = c->shape[d + 1];
        c->to_stride[d] = c->to_stride[d + 1];
        c->from_stride[d] = c->from_stride[d + 1];
    }
}

/* A transposition: the source runs along the rows' index. Tiles of few columns, for their lines may share a cache
 * set. */
static void copy_across(char *to, const char *from, int64_t begin, int64_t end, int64_t n, int64_t to_row,
                        int64_t to_col, int64_t from_col, size_t size) {
#define TILES(T)                                                                                                       \
    for (int64_t i0 = begin; i0 < end; i0 += TILE)                                                                     \
        for (int64_t j0 = 0; j0 < n; j0 += TILE)                                                                       \
            for (int64_t i = i0; i < end && i < i0 + TILE; i++) {                                                      \
                T *d = (T *)(void *)to + i * to_row;                                                                   \
                const T *s = (const T *)(const void *)from + i;                                                        \
                for (int64_t j = j0; j < n && j < j0 + TILE; j++) d[j * to_col] = s[j * from_col];                     \
            }                                                                                                          \
    break
    switch (size) {
    case 1: TILES(uint8_t);
    case 2: TILES(uint16_t);
    case 4: TILES(uint32_t);
    default: TILES(uint64_t);
    }
#undef TILES
}

static void copy_part(void *arg, int64_t part, int thread) {
    (void)thread;
    const Copy *c = arg;
    int row = c->rank - 2, col = c->rank - 1;
    int64_t size = (int64_t)c->size, begin = part % c->row_parts * c->rows, plane = part / c->row_parts, at = 0,
            from_at = 0;
    int64_t end = begin + c->rows < c->shape[row] ? begin + c->rows : c->shape[row], n = c->shape[col];
    for (int d = row - 1; d >= 0; d--) {
        at += plane % c->shape[d] * c->to_stride[d];
        from_at += plane % c->shape[d] * c->from_stride[d];
        plane /= c->shape[d];
    }
    char *to = c->to + at * size;
    const char *from = c->from + from_at * size;
    int64_t to_row = c->to_stride[row], to_col = c->to_stride[col], from_row = c->from_stride[row],
            from_col = c->from_stride[col];
    if (from_row == 1 && from_col != 1 && from_col != 0 && c->size <= 8) {
        copy_across(to, from, begin, end, n, to_row, to_col, from_col, c->size);
        return;
    }
    for (int64_t i = begin; i < end; i++)
        copy_row(to + i * to_row * size, to_col, from + i * from_row * size, from_col, n, c->size);
}

void tensor_copy(Pool *pool, const Tensor *to, const Tensor *from) {
    Copy c = {.to = to->data, .from = from->data, .size = dtype_size(to->dtype)};
    int64_t count = 1;
    bool same = to->data == from->data;
    for (int d = 0; d < to->rank; d++) {
        int64_t size = to->shape[d];
        count *= size;
        if (size == 1) continue;
        same = same && to->strides[d] == from->strides[d];
        int at = c.rank;
        while (at > 0 && c.to_stride[at - 1] < to->strides[d]) at--;
        insert_dim(&c, at, size, to->strides[d], from->strides[d]);
    }
    if (count == 0 || same) return;
    for (int d = c.rank - 1; d > 0; d--) {
        if (c.to_stride[d - 1] != c.to_stride[d] * c.shape[d] || c.from_stride[d - 1] != c.from_stride[d] * c.shape[d])
            continue;
        c.shape[d] *= c.shape[d - 1];
        remove_dim(&c, d - 1);
    }
    if (c.rank == 0) insert_dim(&c, 0, 1, 1, 1);
    if (c.rank == 1 && c.to_stride[0] == 1 && c.from_stride[0] == 1 && (int64_t)c.size * count > PART_BYTES) {
        int64_t piece = PART_BYTES / (int64_t)c.size, whole = count / piece * piece; /* one long run: cut into rows */
        memcpy(c.to + whole * (int64_t)c.size, c.from + whole * (int64_t)c.size, (size_t)(count - whole) * c.size);
        c.shape[0] = piece;
        insert_dim(&c, 0, count / piece, piece, piece);
    }
    if (c.rank == 1) insert_dim(&c, 0, 1, 0, 0);
    int unit =
        -1; /* the dimension along which the source runs: tiles of it and the last one are read and written by lines */
    for (int d = 0; d < c.rank - 1; d++)
        if (c.from_stride[d] == 1) unit = d;
    if (unit >= 0 && unit < c.rank - 2) {
        int64_t size = c.shape[unit], to_stride = c.to_stride[unit], from_stride = c.from_stride[unit];
        remove_dim(&c, unit);
        insert_dim(&c, c.rank - 1, size, to_stride, from_stride);
    }
    int64_t rows = c.shape[c.rank - 2], row_bytes = c.shape[c.rank - 1] * (int64_t)c.size, planes = 1;
    c.rows = (PART_BYTES + row_bytes - 1) / row_bytes;
    c.rows = (c.rows + TILE - 1) / TILE * TILE;
    if (c.rows > rows) c.rows = rows;
    c.row_parts = (rows + c.rows - 1) / c.rows;
    for (int d = 0; d < c.rank - 2; d++) planes *= c.shape[d];
    pool_run(count * (int64_t)c.size >= 2 * PART_BYTES ? pool : NULL, planes * c.row_parts, copy_part, &c);
}

void tensor_fill(Pool *pool, const Tensor *to, const void *element) {
    Tensor from = *to;
    from.data = (void *)element;
    for (int d = 0; d < from.rank; d++) from.strides[d] = 0;
    tensor_copy(pool, to, &from);
}

Element element_from_i64(DType type, int64_t value) {
    Element e = {{0}};
    switch (type) {
    case DTYPE_BOOL: e.u8 = value != 0; break;
    case DTYPE_U8:
    case DTYPE_I8: e.u8 = (uint8_t)value; break;
    case DTYPE_I16: e.i16 = (int16_t)value; break;
    case DTYPE_I32: e.i32 = (int32_t)value; break;
    case DTYPE_I64: e.i64 = value; break;
    case DTYPE_F16: e.u16 = f32_to_f16((float)value); break;
    case DTYPE_BF16: e.u16 = f32_to_bf16((float)value); break;
    case DTYPE_F32:
    case DTYPE_C64: e.f32 = (float)value; break;
    default: e.f64[0] = (double)value; break;
    }
    return e;
}

Element element_from_f64(DType type, double value) {
    Element e = {{0}};
    switch (type) {
    case DTYPE_BOOL: e.u8 = value != 0; break;
    case DTYPE_F16: e.u16 = f32_to_f16((float)value); break;
    case DTYPE_BF16: e.u16 = f32_to_bf16((float)value); break;
    case DTYPE_F32:
    case DTYPE_C64: e.f32 = (float)value; break;
    case DTYPE_F64:
    case DTYPE_C128: e.f64[0] = value; break;
    default: return element_from_i64(type, value >= -0x1p63 && value < 0x1p63 ? (int64_t)value : INT64_MIN);
    }
    return e;
}
