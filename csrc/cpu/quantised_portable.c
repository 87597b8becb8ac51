/* The kernels of quantised weights in plain C, and the choice between them and the vectorised ones. */
#include "cpu/quantised.h"

#include <math.h>

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

static float largest(const float *from, int64_t n) {
    float most = 0;
    for (int64_t i = 0; i < n; i++) {
        float size = fabsf(from[i]);
        most = size > most || size != size ? size : most;
        if (most != most) return most;
    }
    return most;
}

static int rounded(float x, float low, float high) { return (int)nearbyintf(x < low ? low : x > high ? high : x); }

static void quantise_8bit(const float *from, int64_t n, float scale, uint8_t *to) {
    for (int64_t i = 0; i < n; i++) to[i] = (uint8_t)(int8_t)rounded(from[i] / scale, -127.0f, 127.0f);
}

static void quantise_4bit(const float *from, int64_t n, float scale, int64_t first, uint8_t *to) {
    for (int64_t i = 0; i < round_up(n, QUANTISED_GROUP); i++) {
        int64_t c = (first + i) % QUANTISED_BLOCK, shift = 4 * (c / 8 % 2);
        uint8_t *byte = to + (first + i) / QUANTISED_BLOCK * (QUANTISED_BLOCK / 2) + 4 * (c % 8) + c / 16;
        if (c < QUANTISED_GROUP && shift == 0) byte[2] = 0x88; /* of the block's upper half */
        int q = i < n ? rounded(from[i] / scale, -8.0f, 7.0f) + 8 : 8;
        *byte = (uint8_t)((shift ? *byte & 15 : 0) | q << shift);
    }
}

const QuantisedKernels *quantised_kernels_portable(void) {
    static const QuantisedKernels portable = {dots, widen, largest, quantise_8bit, quantise_4bit};
    return &portable;
}

const QuantisedKernels *quantised_kernels(void) {
    const QuantisedKernels *avx2 = cpu_has_avx2() ? quantised_kernels_avx2() : NULL;
    return avx2 ? avx2 : quantised_kernels_portable();
}
