/* Products with quantised weights (quantised_linear in ops.def says how they lie). Up to QUANTISED_ROWS rows of
 * activations: dot products that read the weights once, converted in registers, as QUANTISED_STREAMS runs of rows side
 * by side: memory is read fastest as a few long streams. More: blocks of weights become f32 in
 * the cache, and gemm_turned.c multiplies them. Activations and sums are f32. */
#ifndef FORGE_CPU_QUANTISED_H
#define FORGE_CPU_QUANTISED_H

#include "cpu/cpu.h"

enum { QUANTISED_ROWS = 6, QUANTISED_STREAMS = 4 };

typedef struct Quantised {
    const uint8_t *q;
    const float *scales, *zeros; /* [n, groups]; zeros NULL: none */
    int bits;
    int64_t n, k;
    int64_t row_bytes;
    int64_t group, groups; /* columns of a group (of the last one: fewer, maybe) and their number */
} Quantised;

/* Rows of activations as `dots` wants them: f32, padded with zeros to a multiple of 2 QUANTISED_BLOCK columns, `row`
 * apart, in the order that `arrange` has put them in. sums[i * groups + g]: of row i over the columns of group g. */
typedef struct QuantisedInput {
    int64_t rows, row;
    float *x, *sums;
} QuantisedInput;

/* What reads the weights. */
typedef struct QuantisedDots {
    /* A row of an input with so many columns, which are in their natural order before. */
    void (*arrange)(const Quantised *w, float *x, int64_t columns, float *sums);
    /* c[i * c_row + t * run + j] += x[i] . w[first + t * stride + j] for the input's rows, t < QUANTISED_STREAMS,
     * j < run; what c has of rows past the last is of no meaning. */
    void (*dots)(const Quantised *w, int64_t first, int64_t run, int64_t stride, const QuantisedInput *x, float *c,
                 int64_t c_row);
    /* dst[j * depth + c] = w[row + j][k + c] for j < rows, c < depth. k: a multiple of QUANTISED_BLOCK. */
    void (*widen)(const Quantised *w, int64_t row, int64_t rows, int64_t k, int64_t depth, float *dst);
} QuantisedDots;
const QuantisedDots *quantised_dots(void); /* the best for this machine */
const QuantisedDots *quantised_dots_portable(void);
const QuantisedDots *quantised_dots_avx2(void); /* NULL where it was not compiled for AVX2 */
const QuantisedDots *quantised_dots_avx512(void);

/* What makes them. */
typedef struct QuantisedMaking {
    /* max |from[i]|; infinite or NaN where one is. */
    float (*largest)(const float *from, int64_t n);
    /* from[i] / scale to nearest even: n weights of 8 bits, within -127 .. 127. */
    void (*quantise_8bit)(const float *from, int64_t n, float scale, uint8_t *to);
    /* Of 4 bits, within -8 .. 7: columns [first, first + n) of the row at `to`; first: a multiple of 32, ascending. */
    void (*quantise_4bit)(const float *from, int64_t n, float scale, int64_t first, uint8_t *to);
} QuantisedMaking;
const QuantisedMaking *quantised_making(void);
const QuantisedMaking *quantised_making_avx2(void);

/* Quantises weight [n, k] (f32, f16 or bf16, any strides) into q and scales (of 16 bits: none), as quantised_linear has
 * them. group 0: a scale a row. `scratch`: quantise_scratch bytes. False where it has values that are not finite.
 * quantise.c. */
bool quantise_weight(const Tensor *weight, int bits, int64_t group, void *q, float *scales, Pool *pool, void *scratch);
int64_t quantise_scratch(int64_t k, int threads);

static inline int quantised_value(const Quantised *w, int64_t row, int64_t column) {
    const uint8_t *at = w->q + row * w->row_bytes;
    if (w->bits == 8) return (int8_t)at[column];
    int64_t c = column % QUANTISED_BLOCK;
    return (at[column / QUANTISED_BLOCK * (QUANTISED_BLOCK / 2) + 4 * (c % 8) + c / 16] >> (4 * (c / 8 % 2)) & 15) - 8;
}

#endif
