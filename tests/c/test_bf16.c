/* Products of bf16: the kernels of each instruction set give the same bits (denormal numbers apart), the product of any
 * sizes and strides is that of the rounded numbers, alone and on three threads. */
#include <math.h>

#include "check.h"
#include "cpu/gemm.h"
#include "random_numbers.h"

enum { THREADS = 3 };
static Context ctx;
static Pool *pool;

/* Numbers of bf16, two in each float. */
static float *random_pairs(int64_t count) {
    uint16_t *p = get(count * 4);
    for (int64_t i = 0; i < 2 * count; i++) p[i] = f32_to_bf16(unit());
    return (float *)(void *)p;
}

static const GemmBf16 *const *kernels(void) {
    static const GemmBf16 *all[3];
    all[0] = gemm_bf16_portable();
    all[1] = cpu_has_avx2() ? gemm_bf16_avx2() : NULL;
    all[2] = cpu_has_avx512_bf16() ? gemm_bf16_avx512() : NULL;
    return all;
}

static void test_tiles(void) {
    for (int round = 0; round < 200; round++, release_all()) {
        int rows = (int)between(1, 12);
        int64_t k = between(1, 70), a_row = k + below(3), b_panel = k * GEMM_COLS, c_row = 2 * GEMM_COLS + below(3);
        bool add = below(2);
        float *a = random_pairs(rows * a_row), *b = random_pairs(2 * b_panel), *want = NULL;
        float *start = get(rows * c_row * 4);
        for (int64_t i = 0; i < rows * c_row; i++) start[i] = unit();
        for (int s = 0; s < 3; s++) {
            const GemmBf16 *set = kernels()[s];
            if (!set) continue;
            float *c = memcpy(get(rows * c_row * 4), start, (size_t)(rows * c_row) * sizeof *c);
            if (set->pair) set->pair(rows, k, a, a_row, 1, b, GEMM_COLS, b_panel, c, c_row, add);
            for (int i = 0; !set->pair && i < rows; i += GEMM_ROWS)
                for (int j = 0; j < 2; j++)
                    set->tile(rows - i < GEMM_ROWS ? rows - i : GEMM_ROWS, k, a + i * a_row, a_row, 1, b + j * b_panel,
                              GEMM_COLS, c + i * c_row + j * GEMM_COLS, c_row, add);
            if (!want) want = c;
            CHECK(memcmp(c, want, (size_t)(rows * c_row) * sizeof *c) == 0);
            float *one = memcpy(get(rows * c_row * 4), start, (size_t)(rows * c_row) * sizeof *c);
            int few = rows < GEMM_ROWS ? rows : GEMM_ROWS;
            set->tile(few, k, a, a_row, 1, b, GEMM_COLS, one, c_row, add);
            for (int i = 0; i < few; i++)
                CHECK(memcmp(one + i * c_row, want + i * c_row, GEMM_COLS * sizeof(float)) == 0);
        }
    }
}

static void test_dots_and_rounding(void) {
    for (int round = 0; round < 200; round++, release_all()) {
        int m = (int)between(1, GEMM_ROWS);
        int64_t rows = between(1, 30), k = between(1, 150);
        float *x = random_pairs(m * k), *w = random_pairs(rows * k);
        const uint16_t *xs = (const uint16_t *)(const void *)x, *ws = (const uint16_t *)(const void *)w;
        float *wide = get(k * 4);
        uint16_t *narrow = get(k * 2);
        for (int64_t i = 0; i < k; i++) wide[i] = ldexpf(unit(), (int)between(-100, 100));
        if (below(2)) wide[below(k)] = below(2) ? INFINITY : 3.4e38f;
        for (int s = 0; s < 3; s++) {
            const GemmBf16 *set = kernels()[s];
            if (!set) continue;
            float *c = get(m * rows * 4);
            memset(c, 0, (size_t)(m * rows) * sizeof *c);
            set->dots(m, x, k, rows, w, k, k, c, rows);
            for (int64_t i = 0; i < m * rows; i++) {
                double sum = 0, size = 0;
                for (int64_t p = 0; p < 2 * k; p++) {
                    double each =
                        (double)bf16_to_f32(xs[i / rows * 2 * k + p]) * (double)bf16_to_f32(ws[i % rows * 2 * k + p]);
                    sum += each, size += fabs(each);
                }
                CHECK(fabs((double)c[i] - sum) <= 4e-7 * size);
            }
            set->narrow(narrow, wide, k);
            for (int64_t i = 0; i < k; i++) CHECK_EQUAL(narrow[i], f32_to_bf16(wide[i]));
            float nan = NAN;
            set->narrow(narrow, &nan, 1);
            CHECK(isnan(bf16_to_f32(narrow[0])));
        }
    }
}

/* The whole product, of A in f32, f16 or bf16, also turned or with rows of odd length. */
static void test_product(void) {
    static const DType types[] = {DTYPE_F32, DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    for (int round = 0; round < 300; round++, release_all()) {
        DType type = types[below(4)];
        int64_t m = below(3) ? between(1, 40) : between(1, 200), n = between(1, 150), k = between(1, 500);
        int64_t width = k + k % 2, row = k + below(3), turned = below(4) == 0;
        char *a = get(m * row * (int64_t)dtype_size(type));
        uint16_t *b = get(n * width * 2);
        for (int64_t i = 0; i < m * row; i++) store_f32(a, type, i, unit());
        for (int64_t i = 0; i < n * width; i++) b[i] = i % width < k ? f32_to_bf16(unit()) : 0;
        GemmFinish finish = {.kernels = gemm_kernels(), .product = DTYPE_F32, .direct = true, .n = n, .out_size = 4};
        CHECK_OK(&ctx, ew_prepare(&ctx, &finish.program, NULL, 0, &(DType){DTYPE_F32}, 1, true));
        Gemm gemm = {.batch = 1, .m = m, .n = n, .k = k, .finish = &finish, .b = {b, DTYPE_BF16, 1, width}};
        gemm.a = turned ? (GemmOperand){a, type, 1, m} : (GemmOperand){a, type, row, 1};
        float *out = get(m * n * 4), *again = get(m * n * 4);
        finish.out = (char *)out;
        gemm_bf16_run(&gemm, NULL, get(gemm_bf16_scratch(m, n, k, THREADS)));
        finish.out = (char *)again;
        CHECK(pool_enter(pool));
        gemm_bf16_run(&gemm, pool, get(gemm_bf16_scratch(m, n, k, THREADS)));
        pool_leave(pool);
        CHECK(memcmp(out, again, (size_t)(m * n) * sizeof *out) == 0);
        int bad = 0;
        for (int64_t i = 0; i < m * n; i += 1 + below(m * n / 200 + 1)) {
            double sum = 0, size = 0;
            for (int64_t p = 0; p < k; p++) {
                float x = load_f32(a, type, turned ? p * m + i / n : i / n * row + p);
                double each = (double)round_f32(DTYPE_BF16, x) * (double)bf16_to_f32(b[i % n * width + p]);
                sum += each, size += fabs(each);
            }
            bad += !(fabs((double)out[i] - sum) <= 4e-7 * size);
        }
        CHECK_EQUAL(bad, 0);
    }
}

/* A copy that lies turned. */
static void test_turning(void) {
    for (int round = 0; round < 50; round++, release_all()) {
        int64_t n = between(1, 150), k = between(1, 200), row = n + below(3), width = k + k % 2;
        uint16_t *from = get(k * row * 2), *to = get(gemm_bf16_turned_bytes(n, k));
        for (int64_t i = 0; i < k * row; i++) from[i] = (uint16_t)next_random();
        gemm_bf16_turn(&(GemmOperand){from, DTYPE_BF16, row, 1}, n, k, NULL, to);
        CHECK_EQUAL(gemm_bf16_turned(to, k).col, width);
        for (int64_t i = 0; i < n * width; i++)
            CHECK_EQUAL(to[i], i % width < k ? from[i % width * row + i / width] : 0);
    }
}

int main(void) {
    context_init(&ctx);
    CHECK_OK(&ctx, pool_create(&ctx, THREADS, &pool));
    test_tiles();
    test_dots_and_rounding();
    test_product();
    test_turning();
    pool_destroy(pool);
    return check_done();
}
