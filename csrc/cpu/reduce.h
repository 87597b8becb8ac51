/* Reading and writing any element type as double (floats) or int64 (integers, bool): what reductions and scans compute
 * in. */
#ifndef FORGE_CPU_REDUCE_H
#define FORGE_CPU_REDUCE_H

#include "base/dtype.h"

typedef union Wide {
    double f;
    int64_t i;
} Wide;

/* n elements from memory with a stride, as .f where dtype_is_float(type), else .i */
typedef void (*WideLoad)(Wide *to, const void *from, int64_t stride, int64_t n);
/* The other way, to contiguous memory. Floats are rounded, integers cut, bool is `!= 0`. */
typedef void (*WideStore)(void *to, const Wide *from, int64_t n);
WideLoad wide_load(DType type); /* NULL for complex and objects */
WideStore wide_store(DType type);

enum { WIDE_CHUNK = 256 };

typedef enum Fold { FOLD_SUM, FOLD_PROD, FOLD_MAX, FOLD_MIN, FOLD_ANY, FOLD_ALL, FOLD_SQUARES } Fold;
/* Folds from[0 .. n) into accumulators: one for each element (`columns`; so is `mean`), or 8 by place modulo 8 (one
 * mean). Returns how many elements it took (a multiple of 8 in a row), 0 if it does not know the fold. Call only if
 * cpu_has_avx2(). */
int64_t reduce_avx2(Fold fold, bool columns, double *acc, const float *from, const double *mean, int64_t n);

#endif
