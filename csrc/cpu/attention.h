/* The online softmax of attention, between its two products. */
#ifndef FORGE_CPU_ATTENTION_H
#define FORGE_CPU_ATTENTION_H

#include "cpu/gemm_kernels.h"

enum { ATTENTION_ROWS = 48, ATTENTION_KEYS = 96 }; /* a block: queries (3 panels of 16; 8 tiles of 6) and keys */

typedef struct AttentionBlock {
    float scores[ATTENTION_KEYS][ATTENTION_ROWS];   /* in: products q.k, out: weights before normalisation */
    float mask[ATTENTION_KEYS][ATTENTION_ROWS];     /* added to scores, if `masked` */
    float max[ATTENTION_ROWS], sum[ATTENTION_ROWS]; /* running; start with -inf and 0 */
    float decay[ATTENTION_ROWS];                    /* out: what earlier sums are to be multiplied by */
    int32_t last[ATTENTION_ROWS]; /* last key that the row sees, counted from this block's first; if `causal` */
    float staged[ATTENTION_ROWS][ATTENTION_KEYS]; /* the mask before it is transposed */
    bool masked, causal;
} AttentionBlock;

/* scores = scores * scale + mask, then exp(scores - new running maximum), for the first `rows` rounded up to 8. A row
 * that has seen no key yet keeps weights of 0. */
typedef void (*AttentionSoftmax)(AttentionBlock *block, int64_t rows, int64_t keys, float scale);
AttentionSoftmax attention_softmax_avx2(void); /* NULL where it was not compiled for AVX2 */

/* out = sum of weights[t] * v[t], rows of v `row` apart: for one query, where the tiles of a block would be mostly
 * empty. */
typedef void (*AttentionAverage)(float *out, const float *weights, const float *v, int64_t row, int64_t keys,
                                 int64_t width);
AttentionAverage attention_average_avx2(void); /* NULL likewise */

#endif
