/* The online softmax of attention, between its two products. */
#ifndef FORGE_CPU_ATTENTION_H
#define FORGE_CPU_ATTENTION_H

#include "base/dtype.h"
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

/* Keys [first, end) are all that some row of a mask may see: the others are not read, whatever lies there, as in a
 * static cache beyond its valid length. Their weights are 0 for certain where the mask is false or -inf. `low`: some of
 * them are hidden by a number below ATTENTION_LOW instead, such as the least of f32: these have weight 0 for rows with
 * a maximum above ATTENTION_SEEN, as no product reaches the difference; a row that sees nothing weighs them all. */
typedef struct AttentionKeys {
    int64_t first, end;
    bool low;
} AttentionKeys;
#define ATTENTION_LOW (-1e38f)
#define ATTENTION_SEEN (-1e37f)
/* Narrows `keys` by the mask of a row, which begins at `row`, contiguous, bool or f32; *keys starts with end < first.
 * `end`: keys that there are. */
void attention_see(AttentionKeys *keys, const void *row, DType dtype, int64_t end);

/* out = sum of weights[t] * v[t], rows of v `row` apart: for one query, where the tiles of a block would be mostly
 * empty. */
typedef void (*AttentionAverage)(float *out, const float *weights, const float *v, int64_t row, int64_t keys,
                                 int64_t width);
AttentionAverage attention_average_avx2(void); /* NULL likewise */

#endif
