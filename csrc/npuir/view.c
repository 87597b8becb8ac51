#include "npuir/view.h"

#include <string.h>

void view_dense_strides(uint8_t rank, const int64_t *shape, const int64_t *order, int64_t *strides) {
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; i--) {
        int64_t d = order ? order[i] : i;
        strides[d] = stride;
        stride *= shape[d] > 1 ? shape[d] : 1;
    }
}

int64_t view_count(uint8_t rank, const int64_t *shape) {
    int64_t count = 1;
    for (int i = 0; i < rank; i++) {
        if (shape[i] < 0 || __builtin_mul_overflow(count, shape[i], &count)) return -1;
    }
    return count;
}

int64_t view_extent(uint8_t rank, const int64_t *shape, const int64_t *strides) {
    int64_t extent = 1, span;
    for (int i = 0; i < rank; i++) {
        if (shape[i] == 0) return 0;
        if (shape[i] < 0 || strides[i] < 0) return -1;
        if (__builtin_mul_overflow(shape[i] - 1, strides[i], &span)) return -1;
        if (__builtin_add_overflow(extent, span, &extent)) return -1;
    }
    return extent;
}

static bool is_empty(uint8_t rank, const int64_t *shape) {
    for (int i = 0; i < rank; i++) {
        if (shape[i] == 0) return true;
    }
    return false;
}

bool view_is_row_major(uint8_t rank, const int64_t *shape, const int64_t *strides) {
    if (is_empty(rank, shape)) return true;
    int64_t expect = 1;
    for (int i = rank - 1; i >= 0; i--) {
        if (shape[i] == 1) continue;
        if (strides[i] != expect) return false;
        expect *= shape[i];
    }
    return true;
}

bool view_is_unit_inner(uint8_t rank, const int64_t *shape, const int64_t *strides) {
    if (rank == 0 || is_empty(rank, shape)) return true;
    if (shape[rank - 1] != 1 && strides[rank - 1] != 1) return false;
    int inner = -1; /* the dimension inside of the one looked at, size-1 dimensions left out */
    for (int i = rank - 2; i >= 0; i--) {
        if (shape[i] == 1) continue;
        if (inner >= 0 && strides[i] != strides[inner] * shape[inner]) return false;
        inner = i;
    }
    return true;
}

/* The rule of torch's view(): dimensions of the old shape that lie in memory as one (a chunk) may be cut anew; a new
 * dimension may not cross from one chunk into another. Both shapes are walked from the innermost dimension. */
bool view_reshape(const View *in, uint8_t rank, const int64_t *shape, View *out) {
    View v = {.rank = rank, .offset = in->offset};
    memcpy(v.shape, shape, rank * sizeof *shape);
    if (in->rank == 0 || is_empty(in->rank, in->shape)) {
        view_dense_strides(rank, shape, NULL, v.strides);
        *out = v;
        return true;
    }
    int next = rank - 1;
    int64_t base = in->strides[in->rank - 1], old_count = 1, new_count = 1;
    for (int d = in->rank - 1; d >= 0; d--) {
        old_count *= in->shape[d];
        bool chunk_ends = d == 0 || (in->shape[d - 1] != 1 && in->strides[d - 1] != old_count * base);
        if (!chunk_ends) continue;
        while (next >= 0 && (new_count < old_count || shape[next] == 1)) {
            v.strides[next] = new_count * base;
            new_count *= shape[next--];
        }
        if (new_count != old_count) return false;
        if (d > 0) {
            base = in->strides[d - 1];
            old_count = new_count = 1;
        }
    }
    if (next != -1) return false;
    *out = v;
    return true;
}

void view_permute(const View *in, const int64_t *dims, View *out) {
    View v = {.rank = in->rank, .offset = in->offset};
    for (int i = 0; i < in->rank; i++) {
        v.shape[i] = in->shape[dims[i]];
        v.strides[i] = in->strides[dims[i]];
    }
    *out = v;
}

void view_expand(const View *in, uint8_t rank, const int64_t *shape, View *out) {
    View v = {.rank = rank, .offset = in->offset};
    int added = rank - in->rank;
    for (int i = 0; i < rank; i++) {
        v.shape[i] = shape[i];
        bool kept = i >= added && in->shape[i - added] == shape[i];
        v.strides[i] = kept ? in->strides[i - added] : 0;
    }
    *out = v;
}

void view_slice(const View *in, int64_t dim, int64_t start, int64_t end, int64_t step, View *out) {
    View v = *in;
    v.shape[dim] = end > start ? (end - start + step - 1) / step : 0;
    v.strides[dim] = in->strides[dim] * step;
    if (v.shape[dim] > 0) v.offset += start * in->strides[dim]; /* an empty slice may start behind the buffer's end */
    *out = v;
}
