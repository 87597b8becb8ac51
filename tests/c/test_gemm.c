/* Products of f32: tiles of 12 rows give the bits of tiles of 6, also while they copy what they read; the product of
 * any sizes and strides is that of float64, with an epilogue or not, alone and on three threads with the same bits. */
#include <math.h>

#include "check.h"
#include "cpu/gemm.h"
#include "random_numbers.h"

enum { THREADS = 3 };
static Context ctx;
static Pool *pool;

static float *random_floats(int64_t count) {
    float *p = get(count * 4);
    for (int64_t i = 0; i < count; i++) p[i] = unit();
    return p;
}

static void test_pairs(void) {
    const GemmKernels *small = cpu_has_avx2() ? gemm_kernels_avx2() : NULL;
    for (int round = 0; small && gemm_pair() && round < 300; round++, release_all()) {
        int rows = round % 2 ? 12 : (int)between(1, 12);
        int64_t k = between(0, 70), a_row = k + below(3), b_panel = k * GEMM_COLS, c_row = 2 * GEMM_COLS + below(3);
        int64_t keep_row = round_up(k, 16) + 16 * below(2);
        bool add = below(2);
        float *a = random_floats(rows * a_row), *b = random_floats(2 * b_panel), *start = random_floats(rows * c_row);
        size_t bytes = (size_t)(rows * c_row) * sizeof *start;
        float *want = memcpy(get((int64_t)bytes), start, bytes), *got = memcpy(get((int64_t)bytes), start, bytes);
        for (int i = 0; i < rows; i += GEMM_ROWS)
            for (int j = 0; j < 2; j++)
                small->tile(rows - i < GEMM_ROWS ? rows - i : GEMM_ROWS, k, a + i * a_row, a_row, 1, b + j * b_panel,
                            GEMM_COLS, want + i * c_row + j * GEMM_COLS, c_row, add);
        gemm_pair()(rows, k, a, a_row, 1, b, GEMM_COLS, b_panel, got, c_row, add);
        CHECK(memcmp(got, want, bytes) == 0);
        if (rows < 12) continue;
        float *keep = get(rows * keep_row * 4);
        for (int keeps = 0; keeps < 2; keeps++) {
            memcpy(got, start, bytes);
            gemm_pair_rows()(k, a, a_row, b, b_panel, got, c_row, add, keeps ? keep : NULL, keep_row,
                             (GemmAhead){a, a_row, below(3)});
            CHECK(memcmp(got, want, bytes) == 0);
        }
        for (int i = 0; i < rows; i++)
            CHECK(k == 0 || memcmp(keep + i * keep_row, a + i * a_row, (size_t)k * sizeof *a) == 0);
    }
}

/* What becomes of the sum: nothing; it meets an operand with a row for each row of the result, or one row for all. */
typedef enum Epilogue { PLAIN, SUM, PRODUCT, DIFFERENCE, EPILOGUES } Epilogue;

static void test_product(void) {
    static const Op ops[] = {OP_add, OP_add, OP_mul, OP_sub};
    for (int round = 0; round < 400; round++, release_all()) {
        int64_t m = below(3) ? between(1, 40) : between(1, 300), n = between(1, 150), k = between(1, 600);
        bool lying = below(3), b_turned = below(3); /* [n, k] as nn.Linear's, mostly */
        int64_t b_row = lying && b_turned && below(2) ? round_up(k, 512) : (b_turned ? k : n) + below(3);
        int64_t a_turned = below(4) == 0, a_row = (a_turned ? m : k) + below(3);
        Epilogue epilogue = (Epilogue)below(EPILOGUES);
        bool one_row = below(4) == 0, biased = below(2);
        int64_t words[STEP_WORDS];
        DType types[] = {DTYPE_F32, DTYPE_F32};
        float *a = random_floats((a_turned ? k : m) * a_row), *b = random_floats((b_turned ? n : k) * b_row);
        float *bias = random_floats(n), *other = random_floats(one_row ? n : m * n);
        GemmFinish finish = {.kernels = gemm_kernels(), .product = DTYPE_F32, .n = n, .out_size = 4};
        step_encode(&(Step){.op = ops[epilogue], .dtype = DTYPE_F32, .src = {0, 1, STEP_NONE}}, words);
        CHECK_OK(&ctx, ew_prepare(&ctx, &finish.program, epilogue == PLAIN ? NULL : words,
                                  epilogue == PLAIN ? 0 : STEP_WORDS, types, epilogue == PLAIN ? 1 : 2, true));
        finish.inputs[1] = (GemmRows){(char *)other, DTYPE_F32, 1, {m}, {one_row ? 0 : n}, 1};
        finish.direct = epilogue == PLAIN;
        if (biased) finish.bias = (char *)bias, finish.bias_type = DTYPE_F32, finish.bias_stride = 1;
        Gemm gemm = {.batch = 1, .m = m, .n = n, .k = k, .finish = &finish};
        gemm.a = a_turned ? (GemmOperand){a, DTYPE_F32, 1, a_row} : (GemmOperand){a, DTYPE_F32, a_row, 1};
        gemm.b = b_turned ? (GemmOperand){b, DTYPE_F32, 1, b_row} : (GemmOperand){b, DTYPE_F32, b_row, 1};
        float *out[2];
        for (int threads = 0; threads < 2; threads++) {
            out[threads] = get(m * n * 4);
            finish.out = (char *)out[threads];
            void *scratch = get(
                (b_turned ? gemm_turned_scratch(1, m, n, k, THREADS) : gemm_scratch(1, m, n, k, false, THREADS)) + 64);
            scratch = (void *)(((uintptr_t)scratch + 63) / 64 * 64);
            CHECK(!threads || pool_enter(pool));
            (b_turned ? gemm_turned_run : gemm_run)(&gemm, threads ? pool : NULL, scratch);
            if (threads) pool_leave(pool);
        }
        CHECK(memcmp(out[0], out[1], (size_t)(m * n) * sizeof(float)) == 0);
        int bad = 0;
        for (int64_t i = 0; i < m * n; i += 1 + below(m * n / 200 + 1)) {
            int64_t row = i / n, column = i % n;
            double sum = biased ? (double)bias[column] : 0, size = fabs(sum);
            double y = (double)other[one_row ? column : i];
            for (int64_t p = 0; p < k; p++) {
                double each = (double)a[a_turned ? p * a_row + row : row * a_row + p] *
                              (double)b[b_turned ? column * b_row + p : p * b_row + column];
                sum += each, size += fabs(each);
            }
            if (epilogue == SUM) sum += y, size += fabs(y);
            if (epilogue == DIFFERENCE) sum -= y, size += fabs(y);
            if (epilogue == PRODUCT) sum *= y;
            bad += !(fabs((double)out[0][i] - sum) <= 4e-7 * size);
        }
        CHECK_EQUAL(bad, 0);
    }
}

int main(void) {
    context_init(&ctx);
    CHECK_OK(&ctx, pool_create(&ctx, THREADS, &pool));
    test_pairs();
    test_product();
    pool_destroy(pool);
    return check_done();
}
