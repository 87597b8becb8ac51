/* How the pass dequantise sees a weight: a chain from the product's matrix to integers. */
#ifndef FORGE_PASSES_DEQUANTISE_H
#define FORGE_PASSES_DEQUANTISE_H

#include "passes/evaluate.h"

enum { MAX_STEPS = 8 };

/* What a dimension of a value in the chain runs over: outputs, inputs, or inputs as group and member of it. */
typedef enum Role { ROLE_ONE, ROLE_ROW, ROLE_COLUMN, ROLE_GROUP, ROLE_MEMBER, ROLE_ROW_GROUP } Role;
typedef struct Axes {
    unsigned rank;
    Role role[MAX_RANK];
} Axes;

/* `operand` (or `scalar`) multiplies, is added, or subtracted; it broadcasts to a value with these axes. */
typedef struct Step {
    bool multiply, negate;
    ValueId operand; /* VALUE_NONE: scalar */
    double scalar;
    Axes axes;
} Step;

typedef struct Chain {
    int64_t rows, columns, group; /* of the weight [rows, columns]; group 0: not divided */
    Step steps[MAX_STEPS];        /* the one next to the product first */
    int n_steps;
    ValueId q; /* the integers */
    Axes axes;
} Chain;

typedef struct Finder {
    PassContext *pc;
    Graph *g;
    uint32_t n_values; /* that were there before */
    bool *known;       /* by value: depends on constants with memory alone */
} Finder;

#endif
