/* Products with quantised weights (quantised_linear in ops.def says how they lie). Up to QUANTISED_ROWS rows of
 * activations: dot products that read the weights once, converted in registers. More: blocks of weights become f32 in
 * the cache, and gemm_turned.c multiplies them. Activations and sums are f32. */
#ifndef FORGE_CPU_QUANTISED_H
#define FORGE_CPU_QUANTISED_H

#include "cpu/cpu.h"

enum { QUANTISED_ROWS = 6, QUANTISED_LANES = 8 };

typedef struct Quantised {
    const uint8_t *q;
    const float *scales, *zeros; /* [n, groups]; zeros NULL: none */
    int bits;
    int64_t n, k;
    int64_t row_bytes;
    int64_t group, groups; /* columns of a group (of the last one: fewer, maybe) and their number */
} Quantised;

/* Rows of activations as the kernels want them: f32, padded with zeros to a multiple of QUANTISED_BLOCK columns, `row`
 * apart. For 4 bits column c is divided by 16^(c / 8 % 4), so that the nibbles of a word need no shift. sums[i][g][l]:
 * over the columns c of group g with c % 8 == l, of the values before that division. NULL where no kernel reads them.
 */
typedef struct QuantisedInput {
    int64_t rows, row;
    float *x, *sums;
} QuantisedInput;

typedef struct QuantisedKernels {
    /* c[i * c_row + j] += x[i] . w[first + j] for the input's rows, j < rows. */
    void (*dots)(const Quantised *w, int64_t first, int64_t rows, const QuantisedInput *x, float *c, int64_t c_row);
    /* dst[j * depth + c] = w[row + j][k + c] for j < rows, c < depth. k: a multiple of QUANTISED_BLOCK. */
    void (*widen)(const Quantised *w, int64_t row, int64_t rows, int64_t k, int64_t depth, float *dst);
    /* max |from[i]|; infinite or NaN where one is. */
    float (*largest)(const float *from, int64_t n);
    /* from[i] / scale to nearest even: n weights of 8 bits, within -127 .. 127. */
    void (*quantise_8bit)(const float *from, int64_t n, float scale, uint8_t *to);
    /* Of 4 bits, within -8 .. 7: columns [first, first + n) of the row at `to`; first: a multiple of 32, ascending. */
    void (*quantise_4bit)(const float *from, int64_t n, float scale, int64_t first, uint8_t *to);
} QuantisedKernels;
const QuantisedKernels *quantised_kernels(void); /* the best for this machine */
const QuantisedKernels *quantised_kernels_portable(void);
const QuantisedKernels *quantised_kernels_avx2(void); /* NULL where it was not compiled for AVX2 */

/* Quantises weight [n, k] (f32, f16 or bf16, any strides) into q and scales, as quantised_linear has them. group 0: a
 * scale a row. `scratch`: quantise_scratch bytes. False where it has values that are not finite. quantise.c. */
bool quantise_weight(const Tensor *weight, int bits, int64_t group, void *q, float *scales, Pool *pool, void *scratch);
int64_t quantise_scratch(int64_t k, int threads);

static inline int quantised_value(const Quantised *w, int64_t row, int64_t column) {
    const uint8_t *at = w->q + row * w->row_bytes;
    if (w->bits == 8) return (int8_t)at[column];
    int64_t c = column % QUANTISED_BLOCK;
    return (at[column / QUANTISED_BLOCK * (QUANTISED_BLOCK / 2) + 4 * (c % 8) + c / 16] >> (4 * (c / 8 % 2)) & 15) - 8;
}

#endif
