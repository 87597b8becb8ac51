/* Conversions at the border of the NPU: all of f16 and bf16, any strides, values beyond the range. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "npu/session.h"

static uint16_t half_of(float x) { /* as the device is given it */
    if (isfinite(x) && fabsf(x) >= 65520) x = x < 0 ? -57344 : 57344;
    return f32_to_f16(x);
}

static void test_convert(void) {
    static const float values[] = {0.0f,  -0.0f,    1.5f,  65504.0f, 65519.0f, 65520.0f,
                                   1e30f, -3.4e38f, 1e-7f, 6e-8f,    0.1f};
    enum { ROWS = 7, COLUMNS = 37, VALUES = sizeof values / sizeof *values };
    float host[ROWS * COLUMNS * 2];
    uint16_t device[ROWS * COLUMNS];
    for (int turned = 0; turned < 3; turned++) {
        int64_t strides[3][2] = {{COLUMNS, 1}, {1, ROWS}, {2 * COLUMNS, 2}};
        Tensor t = {.data = host, .dtype = DTYPE_F32, .rank = 2, .shape = {ROWS, COLUMNS}};
        memcpy(t.strides, strides[turned], sizeof strides[turned]);
        for (int64_t i = 0; i < ROWS; i++) {
            for (int64_t k = 0; k < COLUMNS; k++)
                host[i * t.strides[0] + k * t.strides[1]] = values[(i * COLUMNS + k) % VALUES];
        }
        host[0] = INFINITY;
        host[t.strides[1]] = NAN;
        convert_to_device(&t, DTYPE_F16, device);
        CHECK_EQUAL(device[0], 0x7c00);
        CHECK((device[1] & 0x7fff) > 0x7c00);
        for (int64_t i = 2; i < ROWS * COLUMNS; i++) CHECK_EQUAL(device[i], half_of(values[i % VALUES]));
        memset(host, 0, sizeof host);
        convert_to_host(device, DTYPE_F16, &t);
        CHECK(isinf(host[0]) && isnan(host[t.strides[1]]));
        for (int64_t i = 2; i < ROWS * COLUMNS; i++)
            CHECK(host[i / COLUMNS * t.strides[0] + i % COLUMNS * t.strides[1]] == f16_to_f32(device[i]));
    }
    CHECK(convert_known(DTYPE_BOOL, DTYPE_BOOL) && convert_known(DTYPE_F32, DTYPE_F16));
    CHECK(convert_known(DTYPE_BF16, DTYPE_F16) && convert_known(DTYPE_F32, DTYPE_BF16));
    CHECK(!convert_known(DTYPE_F64, DTYPE_F16) && !convert_known(DTYPE_I64, DTYPE_I32));
}

/* All numbers of bf16, in rows and in columns, to f16 and f32 and back. */
static void test_convert_bf16(void) {
    enum { COUNT = 1 << 16, COLUMNS = 1 << 8 };
    static uint16_t host[COUNT], back[COUNT], half[COUNT];
    static float whole[COUNT];
    for (int turned = 0; turned < 2; turned++) {
        Tensor t = {host, DTYPE_BF16, 2, {COUNT / COLUMNS, COLUMNS}, {COLUMNS, 1}}, result;
        if (turned) {
            t.strides[0] = 1;
            t.strides[1] = COUNT / COLUMNS;
        }
        result = t;
        result.data = back;
        for (int i = 0; i < COUNT; i++) host[i / COLUMNS * t.strides[0] + i % COLUMNS * t.strides[1]] = (uint16_t)i;
        convert_to_device(&t, DTYPE_F16, half);
        convert_to_device(&t, DTYPE_F32, whole);
        convert_to_host(half, DTYPE_F16, &result);
        int wrong = 0;
        for (int i = 0; i < COUNT; i++) {
            float x = bf16_to_f32((uint16_t)i);
            uint16_t have = back[i / COLUMNS * t.strides[0] + i % COLUMNS * t.strides[1]];
            if (isnan(x)) { /* which one it is, is nobody's affair */
                wrong += !isnan(f16_to_f32(half[i])) + !isnan(whole[i]) + !isnan(bf16_to_f32(have));
                continue;
            }
            wrong += half[i] != half_of(x);
            wrong += memcmp(&whole[i], &x, sizeof x) != 0;
            wrong += have != f32_to_bf16(f16_to_f32(half[i]));
        }
        CHECK_EQUAL(wrong, 0);
        convert_to_host(whole, DTYPE_F32, &result);
        for (int i = 0; i < COUNT; i++) wrong += back[i] != host[i] && !isnan(bf16_to_f32(host[i]));
        CHECK_EQUAL(wrong, 0);
        for (int i = 0; i < COUNT; i++) half[i] = (uint16_t)i; /* f16 has more digits: to nearest even */
        convert_to_host(half, DTYPE_F16, &result);
        for (int i = 0; i < COUNT; i++) {
            uint16_t have = back[i / COLUMNS * t.strides[0] + i % COLUMNS * t.strides[1]];
            wrong += have != f32_to_bf16(f16_to_f32((uint16_t)i));
        }
        CHECK_EQUAL(wrong, 0);
    }
}

/* Logits of GPT-2: [128, 50257], in tiles of 7184 columns. */
static void test_convert_speed(void) {
    enum { ROWS = 128, COLUMNS = 50257, TILE = 7184 };
    float *host = malloc(sizeof(float) * ROWS * COLUMNS);
    uint16_t *device = malloc(sizeof(uint16_t) * ROWS * TILE);
    if (!host || !device) abort();
    memset(host, 0, sizeof(float) * ROWS * COLUMNS);
    for (int i = 0; i < ROWS * TILE; i++) device[i] = (uint16_t)(i % 30000);
    double best = 1e9;
    for (int round = 0; round < 5; round++) {
        double start = session_now_ms();
        for (int64_t column = 0; column < COLUMNS; column += TILE) {
            int64_t first = column > COLUMNS - TILE ? COLUMNS - TILE : column;
            Tensor t = {host + first, DTYPE_F32, 2, {ROWS, TILE}, {COLUMNS, 1}};
            convert_to_host(device, DTYPE_F16, &t);
        }
        double ms = session_now_ms() - start;
        if (ms < best) best = ms;
    }
    printf("session: logits of [128, 50257] to the host in %.2f ms\n", best);
    CHECK(host[ROWS * COLUMNS - 1] == f16_to_f32(device[ROWS * TILE - 1]));
    free(host);
    free(device);
}

int main(void) {
    test_convert();
    test_convert_bf16();
    test_convert_speed();
    return check_done();
}
