/* Few rows of activations against quantised weights with AVX-512: 16 columns at a time, as f32 in a register. */
#include "cpu/quantised_dots.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>

enum { UNIT = 2 * QUANTISED_BLOCK, UNIT_BYTES = UNIT / 2, AHEAD = 256 }; /* columns; their bytes of 4 bits */

static inline uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }

static inline __mmask16 first_lanes(int64_t count) {
    return (__mmask16)(count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
}

/* The sums of four vectors. */
static inline __m128 sum4(const __m512 *v) {
    __m256 half[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; t++) half[t] = _mm256_add_ps(_mm512_castps512_ps256(v[t]), _mm512_extractf32x8_ps(v[t], 1));
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

static inline __m512 load16(const uint8_t *at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)at)));
}

/* --- activations -------------------------------------------------------------------------------------------------- */
static float sum_of(const float *x, int64_t n) {
    __m512 s = _mm512_setzero_ps();
    for (int64_t k = 0; k < n; k += 16) s = _mm512_add_ps(s, _mm512_maskz_loadu_ps(first_lanes(n - k), x + k));
    return _mm512_reduce_add_ps(s);
}

/* Of 4 bits: as a unit's words have them, chunks of 8 columns of one block beside those of the other; chunk j divided
 * by 16^(j % 4), so that the nibbles of a word need no shift. */
static void arrange(const Quantised *w, float *x, int64_t columns, float *sums) {
    if (w->bits == 4 || w->zeros)
        for (int64_t g = 0; g < w->groups; g++)
            sums[g] = sum_of(x + g * w->group, min_i64(w->group, w->k - g * w->group));
    if (w->bits == 8) return;
    for (int64_t k = 0; k < columns; k += UNIT) {
        __m512 chunks[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            chunks[j] = _mm512_castps256_ps512(_mm256_loadu_ps(x + k + 8 * j));
            chunks[j] = _mm512_insertf32x8(chunks[j], _mm256_loadu_ps(x + k + QUANTISED_BLOCK + 8 * j), 1);
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            _mm512_storeu_ps(x + k + 16 * j,
                             _mm512_mul_ps(chunks[j], _mm512_set1_ps(1.0f / (float)(1 << (4 * (j % 4))))));
    }
}

/* --- dot products ------------------------------------------------------------------------------------------------- */
/* Rows of w that are taken together, the same distance from each other: few registers address them. */
typedef struct Rows {
    const uint8_t *q;
    const float *scales, *zeros;
    int64_t q_step, scale_step;
} Rows;

/* Asks for 64 bytes of each row that lie AHEAD in its stream, maybe behind the weight. */
static inline __attribute__((always_inline)) void fetch(const int together, const Rows *r, int64_t byte) {
#pragma GCC unroll 4
    for (int t = 0; t < together; t++)
        _mm_prefetch((const char *)((uintptr_t)(r->q + byte) + (uintptr_t)(t * r->q_step) + AHEAD), _MM_HINT_T0);
}

static inline __attribute__((always_inline)) void clear(const int m, const int together, __m512 s[QUANTISED_ROWS][4]) {
#pragma GCC unroll 6
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) s[i][t] = _mm512_setzero_ps();
}

/* s[i][t] += x[i] . row t, 16 columns from k, `lanes` of which there are. */
static inline __attribute__((always_inline)) void add16(const int m, const int together, const Rows *r, __mmask16 lanes,
                                                        const float *x, int64_t x_row, int64_t k,
                                                        __m512 s[QUANTISED_ROWS][4]) {
#pragma GCC unroll 4
    for (int t = 0; t < together; t++) {
        const uint8_t *at = r->q + k + t * r->q_step;
        __m512 v =
            lanes == 0xffff ? load16(at) : _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, at)));
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) s[i][t] = _mm512_fmadd_ps(_mm512_loadu_ps(x + i * x_row + k), v, s[i][t]);
    }
}

static inline __attribute__((always_inline)) void all_8bit(const int m, const int together, const Quantised *w,
                                                           const Rows *r, const float *x, int64_t x_row,
                                                           __m512 total[QUANTISED_ROWS][4]) {
    for (int64_t g = 0, k = 0; g < w->groups; g++) {
        int64_t end = min_i64(k + w->group, w->k);
        __m512 s[QUANTISED_ROWS][4];
        clear(m, together, s);
        for (; k + 64 <= end; k += 64) {
            fetch(together, r, k);
#pragma GCC unroll 4
            for (int c = 0; c < 64; c += 16) add16(m, together, r, 0xffff, x, x_row, k + c, s);
        }
        for (; k + 16 <= end; k += 16) add16(m, together, r, 0xffff, x, x_row, k, s);
        if (k < end) add16(m, together, r, first_lanes(end - k), x, x_row, k, s); /* of the row: x is 0 behind it */
        k = end;
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) {
            __m512 scale = _mm512_set1_ps(r->scales[t * r->scale_step + g]);
#pragma GCC unroll 6
            for (int i = 0; i < m; i++) total[i][t] = _mm512_fmadd_ps(scale, s[i][t], total[i][t]);
        }
    }
}

/* s[i][t] += x[i] . the lower halves of a unit's words; `x`: the chunks that belong to them. */
static inline __attribute__((always_inline)) void add_half(const int m, const int together, const __m512i *words,
                                                           const float *x, int64_t x_row, __m512 s[QUANTISED_ROWS][4]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) {
            __m512 v = _mm512_cvtepi32_ps(_mm512_and_si512(words[t], _mm512_set1_epi32(15 << (4 * j))));
#pragma GCC unroll 6
            for (int i = 0; i < m; i++) s[i][t] = _mm512_fmadd_ps(_mm512_loadu_ps(x + i * x_row + 16 * j), v, s[i][t]);
        }
}

/* total += scale * s; scale: that of group g, and in the upper lanes that of group `next`. */
static inline __attribute__((always_inline)) void add_scaled(const int m, const int together, const Rows *r, int64_t g,
                                                             int64_t next, __m512 s[QUANTISED_ROWS][4],
                                                             __m512 total[QUANTISED_ROWS][4]) {
    const float *first = r->scales + g, *second = r->scales + next;
#pragma GCC unroll 4
    for (int t = 0; t < together; t++) {
        __m512 scale = _mm512_set1_ps(first[t * r->scale_step]);
        if (g != next) scale = _mm512_mask_broadcastss_ps(scale, 0xff00, _mm_load_ss(second + t * r->scale_step));
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) total[i][t] = _mm512_fmadd_ps(scale, s[i][t], total[i][t]);
    }
}

/* `narrow`: a unit has columns of several groups, the halves of its words of two each. */
static inline __attribute__((always_inline)) void all_4bit(const bool narrow, const int m, const int together,
                                                           const Quantised *w, const Rows *rows, const float *x,
                                                           int64_t x_row, __m512 total[QUANTISED_ROWS][4]) {
    Rows r = *rows;
    const uint32_t last = (uint32_t)w->groups - 1, quarters = last ? (uint32_t)(w->group / 32) : UINT32_MAX;
    const int shift = quarters & (quarters - 1) ? -1 : __builtin_ctz(quarters);
#define GROUP(quarter) min_u32(shift < 0 ? (quarter) / quarters : (quarter) >> shift, last)
    uint32_t quarter = 0; /* of a unit */
    for (int64_t left = w->row_bytes; left > 0; left -= UNIT_BYTES, r.q += UNIT_BYTES, x += UNIT, quarter += 4) {
        __mmask16 there = left >= UNIT_BYTES ? 0xffff : 0xff; /* the last unit may be one block */
        __m512i words[4];
        __m512 s[QUANTISED_ROWS][4];
        fetch(together, &r, 0);
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) words[t] = _mm512_maskz_loadu_epi32(there, r.q + t * r.q_step);
        clear(m, together, s);
        add_half(m, together, words, x, x_row, s);
        if (narrow) {
            add_scaled(m, together, &r, GROUP(quarter), GROUP(quarter + 2), s, total);
            clear(m, together, s);
        }
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) words[t] = _mm512_srli_epi32(words[t], 16);
        add_half(m, together, words, x + UNIT / 2, x_row, s);
        uint32_t g = GROUP(quarter + 1), next = narrow ? GROUP(quarter + 3) : g;
        add_scaled(m, together, &r, g, next, s, total);
    }
#undef GROUP
}

/* total -= what the products are too large by: in each group scale * zero * (sum of x). */
static inline __attribute__((always_inline)) void take_zeros(const int bits, const int m, const int together,
                                                             const Quantised *w, const Rows *r, const float *sums,
                                                             __m512 total[QUANTISED_ROWS][4]) {
    for (int64_t g = 0; g < w->groups; g += 16) {
        __mmask16 lanes = first_lanes(w->groups - g);
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) {
            int64_t at = g + t * r->scale_step;
            __m512 zero = _mm512_set1_ps(bits == 4 ? 8.0f : 0.0f);
            if (r->zeros) zero = _mm512_add_ps(zero, _mm512_maskz_loadu_ps(lanes, r->zeros + at));
            zero = _mm512_mul_ps(zero, _mm512_maskz_loadu_ps(lanes, r->scales + at));
#pragma GCC unroll 6
            for (int i = 0; i < m; i++)
                total[i][t] =
                    _mm512_fnmadd_ps(zero, _mm512_maskz_loadu_ps(lanes, sums + i * w->groups + g), total[i][t]);
        }
    }
}

/* c[i * c_row + t * c_step] += x[i] . row t. Rows that are taken together share what is loaded of x, and hide the
 * latency of the sums. */
static inline __attribute__((always_inline)) void rows_body(const int bits, const int m, const int together,
                                                            const Quantised *w, const Rows *r, const QuantisedInput *x,
                                                            float *c, int64_t c_row, int64_t c_step) {
    __m512 total[QUANTISED_ROWS][4];
    clear(m, together, total);
    if (bits == 8)
        all_8bit(m, together, w, r, x->x, x->row, total);
    else if (w->group % UNIT == 0 || w->groups == 1)
        all_4bit(false, m, together, w, r, x->x, x->row, total);
    else
        all_4bit(true, m, together, w, r, x->x, x->row, total);
    if (bits == 4 || w->zeros) take_zeros(bits, m, together, w, r, x->sums, total);
#pragma GCC unroll 6
    for (int i = 0; i < m; i++) {
        float sums[4];
        if (together == 4)
            _mm_storeu_ps(sums, sum4(total[i]));
        else
            for (int t = 0; t < together; t++) sums[t] = _mm512_reduce_add_ps(total[i][t]);
#pragma GCC unroll 4
        for (int t = 0; t < together; t++) c[i * c_row + t * c_step] += sums[t];
    }
}

/* The rows that come next in each stream are taken `together`; where some of them lie behind the weight, one by one. */
static inline __attribute__((always_inline)) void dots_body(const int bits, const int m, const int together,
                                                            const Quantised *w, int64_t first, int64_t run,
                                                            int64_t stride, const QuantisedInput *x, float *c,
                                                            int64_t c_row) {
    for (int64_t j = 0; j < run; j++)
        for (int64_t t = 0, row = first + j, taken; t < QUANTISED_STREAMS && row < w->n;
             t += taken, row += taken * stride) {
            bool whole = row + (together - 1) * stride < w->n;
            float single[QUANTISED_ROWS * 4] = {0}, *to = c + t * run + j;
            int64_t at = row * w->groups, step = whole ? stride : 0;
            Rows r = {w->q + row * w->row_bytes, w->scales + at, w->zeros ? w->zeros + at : NULL, step * w->row_bytes,
                      step * w->groups};
            rows_body(bits, m, together, w, &r, x, whole ? to : single, whole ? c_row : 4, whole ? run : 1);
            for (int64_t i = 0; !whole && i < m; i++) to[i * c_row] += single[i * 4];
            taken = whole ? together : 1;
        }
}

QUANTISED_DOTS

/* --- to f32 ------------------------------------------------------------------------------------------------------- */
static void widen_8bit(const uint8_t *q, int64_t n, __m512 zero, __m512 scale, float *to) {
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) _mm512_storeu_ps(to + c, _mm512_mul_ps(_mm512_sub_ps(load16(q + c), zero), scale));
    if (c < n) {
        __mmask16 lanes = first_lanes(n - c);
        __m512 v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, q + c)));
        _mm512_mask_storeu_ps(to + c, lanes, _mm512_mul_ps(_mm512_sub_ps(v, zero), scale));
    }
}

/* n <= 32 columns that begin with the lowest nibble of each of 8 words. */
static void widen_half(__m256i words, int64_t n, __m512 zero, __m512 scale, float *to) {
    __m512i pair = _mm512_inserti64x4(_mm512_castsi256_si512(words), _mm256_srli_epi32(words, 4), 1);
    for (int64_t c = 0; c < n; c += 16, pair = _mm512_srli_epi32(pair, 8)) {
        __m512i v = _mm512_sub_epi32(_mm512_and_si512(pair, _mm512_set1_epi32(15)), _mm512_set1_epi32(8));
        _mm512_mask_storeu_ps(to + c, first_lanes(n - c),
                              _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(v), zero), scale));
    }
}

static void widen(const Quantised *w, int64_t row, int64_t rows, int64_t k, int64_t depth, float *dst) {
    for (int64_t j = 0; j < rows; j++) {
        const uint8_t *q = w->q + (row + j) * w->row_bytes;
        float *to = dst + j * depth;
        for (int64_t c = k, n; c < k + depth; c += n) {
            int64_t g = c / w->group, at = (row + j) * w->groups + g;
            n = min_i64((g + 1) * w->group, k + depth) - c;
            __m512 scale = _mm512_set1_ps(w->scales[at]), zero = _mm512_set1_ps(w->zeros ? w->zeros[at] : 0.0f);
            if (w->bits == 8) {
                widen_8bit(q + c, n, zero, scale, to + (c - k));
                continue;
            }
            n = min_i64(n, QUANTISED_BLOCK / 2 - c % (QUANTISED_BLOCK / 2));
            const void *block = q + c / QUANTISED_BLOCK * (QUANTISED_BLOCK / 2);
            __m256i words = _mm256_loadu_si256((const __m256i *)block);
            widen_half(c % QUANTISED_BLOCK ? _mm256_srli_epi32(words, 16) : words, n, zero, scale, to + (c - k));
        }
    }
}

const QuantisedDots *quantised_dots_avx512(void) {
    static const QuantisedDots kernels = {arrange, dots, widen};
    return &kernels;
}
#else
const QuantisedDots *quantised_dots_avx512(void) { return NULL; }
#endif
