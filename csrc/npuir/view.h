/* Strides of views: which view operators need no copy, and where the elements lie then. Internal to npuir/. */
#ifndef FORGE_NPUIR_VIEW_H
#define FORGE_NPUIR_VIEW_H

#include "base/dtype.h"

/* Shape, strides and offset in elements, without the memory. */
typedef struct View {
    uint8_t rank;
    int64_t shape[MAX_RANK], strides[MAX_RANK];
    int64_t offset;
} View;

/* Strides of dense memory in which dimension order[rank - 1] is innermost; order NULL: row major. */
void view_dense_strides(uint8_t rank, const int64_t *shape, const int64_t *order, int64_t *strides);
bool view_is_row_major(uint8_t rank, const int64_t *shape, const int64_t *strides);
/* Unit stride in the last dimension, and all rows (the other dimensions) one stride apart. */
bool view_is_unit_inner(uint8_t rank, const int64_t *shape, const int64_t *strides);
/* The number of elements, -1 if it does not fit (or a size is negative). */
int64_t view_count(uint8_t rank, const int64_t *shape);
/* Elements from the first to behind the last one that strides reach; -1 if that does not fit. 0 when empty. */
int64_t view_extent(uint8_t rank, const int64_t *shape, const int64_t *strides);

/* Each fills `out` from `in`. reshape is false where no strides express it; the attributes must have been verified. */
bool view_reshape(const View *in, uint8_t rank, const int64_t *shape, View *out);
void view_permute(const View *in, const int64_t *dims, View *out);
void view_expand(const View *in, uint8_t rank, const int64_t *shape, View *out);
void view_slice(const View *in, int64_t dim, int64_t start, int64_t end, int64_t step, View *out);

#endif
