/* What the tables of elementwise functions (elementwise_unary.c, elementwise_binary.c) share. */
#ifndef FORGE_CPU_ELEMENTWISE_TYPES_H
#define FORGE_CPU_ELEMENTWISE_TYPES_H

#include "cpu/elementwise.h"

/* Type that an element is computed in. */
#define WIDE_F32 float
#define WIDE_F64 double
#define WIDE_BOOL int64_t
#define WIDE_U8 int64_t
#define WIDE_I8 int64_t
#define WIDE_I16 int64_t
#define WIDE_I32 int64_t
#define WIDE_I64 int64_t

#define INTEGER_TYPES(X) X(U8, uint8_t) X(I8, int8_t) X(I16, int16_t) X(I32, int32_t) X(I64, int64_t)

#endif
