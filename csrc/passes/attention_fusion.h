/* The parts of attention fusion. */
#ifndef FORGE_PASSES_ATTENTION_FUSION_H
#define FORGE_PASSES_ATTENTION_FUSION_H

#include "passes/match.h"

/* --- attention_fusion_mask.c: what is known of a mask at compile time --------------------------------------------- */
/* A key is visible where a bool mask is true or a float one 0. A float mask is hard if all else in it is HARD_MASK or
 * less. */
#define HARD_MASK (-0x1p127)
typedef struct MaskFacts {
    bool visible; /* all keys are */
    bool causal;  /* query i sees the keys 0..i and no other; a float mask is hard then */
    bool rows;    /* each query sees a key; a float mask is hard then */
    bool hard;    /* float only */
} MaskFacts;
/* The last answer: the layers of a model share their mask. */
typedef struct MaskCache {
    ValueId mask; /* VALUE_NONE: empty */
    bool inverted;
    int64_t S, T;
    MaskFacts facts;
} MaskCache;
/* All false if nothing is known. `inverted`: a bool mask is true where a key is hidden. S queries, T keys. */
MaskFacts mask_facts(const Match *m, MaskCache *cache, ValueId mask, bool inverted, int64_t S, int64_t T);
/* The one value that all elements of `v` have, if it is a number that is known. */
bool mask_scalar(const Match *m, ValueId v, double *out);
/* The value that `v` is an expansion of: consumers of masks broadcast by themselves. */
ValueId mask_unexpanded(const Match *m, ValueId v);

/* --- attention_fusion_scores.c: how the scores are made ----------------------------------------------------------- */
typedef struct Shape4 {
    int64_t batch, heads, queries, keys;
} Shape4;

typedef struct MaskStep { /* scores + value, or where(value, scores, fill) */
    bool is_where, inverted;
    ValueId value;
    double fill;
    unsigned rank; /* of the scores that it is applied to */
} MaskStep;

typedef struct Scores {
    NodeId product; /* matmul(q, k transposed) */
    double scale;
    Shape4 shape;
    bool shape_known;  /* from scores of rank 4, else from the product */
    MaskStep masks[2]; /* in the order in which they are applied */
    uint32_t n_masks;
    NodeId absorbed[24]; /* nodes between product and result, all of one use */
    uint32_t n_absorbed;
} Scores;

/* Reads the computation of probabilities from `v` (operand 0 of the second matmul) down to the first product. NULL, or
 * why not; *softmax is NODE_NONE if it has nothing to do with attention. */
const char *scores_read(const Match *m, ValueId v, Scores *s, NodeId *softmax);
/* The masks as one operand of an attention node before `root`, VALUE_NONE if they say nothing or all that they say is
 * `causal`. *declined: why they can't be. */
MUST_USE Code scores_mask(Match *m, MaskCache *cache, NodeId root, const Scores *s, ValueId *mask, bool *causal,
                          const char **declined);

/* --- attention_fusion.c ------------------------------------------------------------------------------------------- */
MUST_USE Code insert_reshape(Match *m, NodeId before, ValueId x, const int64_t *shape, unsigned rank, ValueId *out);

#endif
