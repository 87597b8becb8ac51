/* Which keys a mask hides at its two ends: behind them no key and no value is read. */
#include "cpu/attention.h"

#include <math.h>
#include <string.h>

enum { STEP = 16 };

typedef struct Seen {
    bool any, low;
} Seen;

static inline Seen look_bool(const uint8_t *row, int64_t count) {
    uint8_t any = 0;
    for (int64_t t = 0; t < count; t++) any |= row[t];
    return (Seen){any != 0, false};
}

static inline Seen look_f32(const float *row, int64_t count) {
    int any = 0, low = 0;
    for (int64_t t = 0; t < count; t++) {
        any |= !(row[t] < ATTENTION_LOW); /* a NaN is seen */
        low |= row[t] != -INFINITY;
    }
    return (Seen){any != 0, low != 0};
}

static inline Seen look(const void *row, DType dtype, int64_t at, int64_t count) {
    return dtype == DTYPE_BOOL ? look_bool((const uint8_t *)row + at, count) : look_f32((const float *)row + at, count);
}

/* Both ends come inwards, in steps that hide all, then key by key. */
void attention_see(AttentionKeys *keys, const void *row, DType dtype, int64_t end) {
    bool empty = keys->end <= keys->first;
    int64_t left = empty ? end : keys->first, right = empty ? 0 : keys->end;
    int64_t a = 0, b = end;
    for (int64_t step = STEP; step; step = step == STEP ? 1 : 0)
        while (a + step <= left) {
            Seen seen = look(row, dtype, a, step);
            if (seen.any) break;
            keys->low |= seen.low;
            a += step;
        }
    if (a < left) {
        keys->first = a;
    } else if (empty) { /* it hides all */
        return;
    }
    int64_t least = empty ? a + 1 : right;
    for (int64_t step = STEP; step; step = step == STEP ? 1 : 0)
        while (b - step >= least) {
            Seen seen = look(row, dtype, b - step, step);
            if (seen.any) break;
            keys->low |= seen.low;
            b -= step;
        }
    keys->end = b;
}
