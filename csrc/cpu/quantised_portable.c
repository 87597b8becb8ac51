/* The kernels of quantised weights in plain C, and the choice between them and the vectorised ones. */
#include "cpu/quantised.h"

#include <math.h>

static float weight(const Quantised *w, int64_t row, int64_t column) {
    int64_t at = row * w->groups + column / w->group;
    float q = (float)quantised_value(w, row, column);
    return (w->zeros ? q - w->zeros[at] : q) * w->scales[at];
}

static void arrange(const Quantised *w, float *x, int64_t columns, float *sums) {
    (void)w, (void)x, (void)columns, (void)sums;
}

static float dot(const Quantised *w, int64_t row, const float *x) {
    enum { LANES = 8 };
    float lanes[LANES] = {0}, total = 0;
    for (int64_t k = 0; k < w->k; k++) lanes[k % LANES] += x[k] * weight(w, row, k);
    for (int l = 0; l < LANES; l++) total += lanes[l];
    return total;
}

static void dots(const Quantised *w, int64_t first, int64_t run, int64_t stride, const QuantisedInput *x, float *c,
                 int64_t c_row) {
    for (int64_t i = 0; i < x->rows; i++)
        for (int64_t t = 0; t < QUANTISED_STREAMS; t++)
            for (int64_t j = 0; j < run && first + t * stride + j < w->n; j++)
                c[i * c_row + t * run + j] += dot(w, first + t * stride + j, x->x + i * x->row);
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

const QuantisedDots *quantised_dots_portable(void) {
    static const QuantisedDots portable = {arrange, dots, widen};
    return &portable;
}

const QuantisedDots *quantised_dots(void) {
    const QuantisedDots *avx512 = cpu_has_avx512() ? quantised_dots_avx512() : NULL;
    const QuantisedDots *avx2 = cpu_has_avx2() ? quantised_dots_avx2() : NULL;
    return avx512 ? avx512 : avx2 ? avx2 : quantised_dots_portable();
}

const QuantisedMaking *quantised_making(void) {
    static const QuantisedMaking portable = {largest, quantise_8bit, quantise_4bit};
    const QuantisedMaking *avx2 = cpu_has_avx2() ? quantised_making_avx2() : NULL;
    return avx2 ? avx2 : &portable;
}
