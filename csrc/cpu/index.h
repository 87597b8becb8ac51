/* What the indexing kernels share. */
#ifndef FORGE_CPU_INDEX_H
#define FORGE_CPU_INDEX_H

#include "cpu/cpu.h"
#include "cpu/move.h"

/* Element `offset` of an index tensor (i32 or i64). */
static inline int64_t index_at(const Tensor *t, int64_t offset) {
    return t->dtype == DTYPE_I32 ? ((const int32_t *)t->data)[offset] : ((const int64_t *)t->data)[offset];
}

/* to[i] += from[i] in the type's own arithmetic, any strides. */
typedef void (*AddRow)(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t n);
AddRow add_row(DType type); /* NULL for complex and objects */

#endif
