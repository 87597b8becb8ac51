/* `dots` of a file of kernels (QuantisedDots), made of its dots_body(bits, rows, weights together, ...), which is
 * inlined with constants. */
#ifndef FORGE_CPU_QUANTISED_DOTS_H
#define FORGE_CPU_QUANTISED_DOTS_H

#include "cpu/quantised.h"

/* clang-format off */
#define QUANTISED_DOTS_OF(name, bits)                                                                                  \
    static void name(const Quantised *w, int64_t first, int64_t run, int64_t stride, const QuantisedInput *x,          \
                     float *c, int64_t c_row) {                                                                        \
        switch (x->rows) {                                                                                             \
        case 1: dots_body(bits, 1, 4, w, first, run, stride, x, c, c_row); break;                                      \
        case 2: dots_body(bits, 2, 4, w, first, run, stride, x, c, c_row); break;                                      \
        case 3: dots_body(bits, 3, 2, w, first, run, stride, x, c, c_row); break;                                      \
        case 4: dots_body(bits, 4, 2, w, first, run, stride, x, c, c_row); break;                                      \
        case 5: dots_body(bits, 5, 2, w, first, run, stride, x, c, c_row); break;                                      \
        default: dots_body(bits, 6, 2, w, first, run, stride, x, c, c_row); break;                                     \
        }                                                                                                              \
    }
/* clang-format on */

#define QUANTISED_DOTS                                                                                                 \
    QUANTISED_DOTS_OF(dots_8bit, 8)                                                                                    \
    QUANTISED_DOTS_OF(dots_4bit, 4)                                                                                    \
    static void dots(const Quantised *w, int64_t first, int64_t run, int64_t stride, const QuantisedInput *x,          \
                     float *c, int64_t c_row) {                                                                        \
        (w->bits == 8 ? dots_8bit : dots_4bit)(w, first, run, stride, x, c, c_row);                                    \
    }

#endif
