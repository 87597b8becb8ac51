/* The parts of operator fusion, one file each. */
#ifndef FORGE_PASSES_FUSION_H
#define FORGE_PASSES_FUSION_H

#include "passes/match.h"

Code fuse_activations(Match *m); /* fusion_activation.c: hand-written gelu and silu */
Code fuse_norms(Match *m);       /* fusion_norm.c: hand-written RMS and layer norm */
Code fuse_residuals(Match *m);   /* fusion_norm.c: the sum before a norm */
Code fuse_linears(Match *m);     /* fusion_linear.c: matmul with a matrix of weights, bias */
Code fuse_reshapes(Match *m);    /* fusion_reshape.c: reshapes around linear layers */
Code fuse_epilogues(Match *m);   /* fusion_epilogue.c: what follows a contraction element by element */
Code fuse_rope(Match *m);        /* fusion_rope.c: rotary position embedding */
Code fuse_elementwise(Match *m); /* fusion_elementwise.c: chains of what is left */

#endif
