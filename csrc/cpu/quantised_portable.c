/* The kernels of quantised weights in plain C, and the choice between them and the vectorised ones. */
#include "cpu/quantised.h"

static float weight(const Quantised *w, int64_t row, int64_t column) {
    int64_t at = row * w->groups + column / w->group;
    float q = (float)quantised_value(w, row, column);
    return (w->zeros ? q - w->zeros[at] : q) * w->scales[at];
}

static void dots(const Quantised *w, int64_t first, int64_t rows, const QuantisedInput *x, float *c, int64_t c_row) {
    for (int64_t i = 0; i < x->rows; i++)
        for (int64_t j = 0; j < rows; j++) {
            float lanes[QUANTISED_LANES] = {0}, total = 0;
            for (int64_t k = 0; k < w->k; k++) {
                float undo = w->bits == 4 ? (float)(1 << (4 * (k / 8 % 4))) : 1.0f;
                lanes[k % QUANTISED_LANES] += x->x[i * x->row + k] * undo * weight(w, first + j, k);
            }
            for (int l = 0; l < QUANTISED_LANES; l++) total += lanes[l];
            c[i * c_row + j] += total;
        }
}

static void widen(const Quantised *w, int64_t row, int64_t rows, int64_t k, int64_t depth, float *dst) {
    for (int64_t j = 0; j < rows; j++)
        for (int64_t c = 0; c < depth; c++) dst[j * depth + c] = weight(w, row + j, k + c);
}

const QuantisedKernels *quantised_kernels(void) {
    static const QuantisedKernels portable = {dots, widen};
    return &portable;
}
