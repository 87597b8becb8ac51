/* Products of f32: tiles of 12 rows give the bits of tiles of 6, also while they copy what they read; the product of
 * any sizes and strides is that of float64, with an epilogue or not, alone and on threads with the same bits. */
#include <math.h>
#include <sys/mman.h>

#include "check.h"
#include "cpu/gemm.h"
#include "random_numbers.h"

enum { RUNS = 3, REGION = 64 << 10 };
static const int threads_of[RUNS] = {1, 3, 8};
static Context ctx;
static Pool *pools[RUNS]; /* NULL: alone */

static float *random_floats(int64_t count) {
    float *p = get(count * 4);
    for (int64_t i = 0; i < count; i++) p[i] = unit();
    return p;
}

/* `bytes` that end where memory does: vectors are read past the sanitizer. */
static char *get_last(char *region, int64_t bytes) { return region + REGION - bytes; }

static void test_pairs(void) {
    char *region = mmap(NULL, 2 * (size_t)REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(region != MAP_FAILED && mprotect(region + REGION, REGION, PROT_NONE) == 0);
    const GemmKernels *small = cpu_has_avx2() ? gemm_kernels_avx2() : NULL;
    for (int round = 0; small && gemm_pair() && round < 300; round++, release_all()) {
        int rows = round % 2 ? 12 : (int)between(1, 12);
        int64_t k = between(0, 70), a_row = k + below(3), b_panel = k * GEMM_COLS, c_row = 2 * GEMM_COLS + below(3);
        int64_t keep_row = round_up(k, 16) + 16 * below(2);
        bool add = below(2);
        int64_t a_size = (rows - 1) * a_row + k;
        float *a = (float *)(void *)get_last(region, a_size * 4);
        for (int64_t i = 0; i < a_size; i++) a[i] = unit();
        float *b = random_floats(2 * b_panel), *start = random_floats(rows * c_row);
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
    munmap(region, 2 * (size_t)REGION);
}

/* What becomes of the sum, which is input 0, and of the operand, input 1. */
typedef struct Epilogue {
    size_t n_inputs;
    int n_steps;
    Step steps[2];
} Epilogue;

#define STEP(...)                                                                                                      \
    { .dtype = DTYPE_F32, __VA_ARGS__ }
static const Epilogue epilogues[] = {
    {1, 0, {{0}}},
    {2, 0, {{0}}},
    {2, 1, {STEP(.op = OP_add, .src = {0, 1, STEP_NONE})}},
    {2, 1, {STEP(.op = OP_mul, .src = {1, 0, STEP_NONE})}},
    {2, 1, {STEP(.op = OP_sub, .src = {1, 0, STEP_NONE})}},
    {2, 1, {STEP(.op = OP_add, .src = {0, 0, STEP_NONE})}},
    {2, 1, {STEP(.op = OP_add, .src = {1, 1, STEP_NONE})}},
    {1, 1, {STEP(.op = OP_neg, .src = {0, STEP_NONE, STEP_NONE})}},
    {2, 2, {STEP(.op = OP_neg, .src = {0, STEP_NONE, STEP_NONE}), STEP(.op = OP_add, .src = {1, -1, STEP_NONE})}},
    {2, 2, {STEP(.op = OP_neg, .src = {0, STEP_NONE, STEP_NONE}), STEP(.op = OP_mul, .src = {0, 1, STEP_NONE})}},
    {2, 2, {STEP(.op = OP_add, .src = {0, 1, STEP_NONE}), STEP(.op = OP_mul, .src = {-1, 1, STEP_NONE})}},
    {2, 2, {STEP(.op = OP_mul, .src = {0, 1, STEP_NONE}), STEP(.op = OP_neg, .src = {-1, STEP_NONE, STEP_NONE})}},
};

/* *size: of the rounding errors that it may have. */
static double finish_in_f64(const Epilogue *e, double sum, double y, double *size) {
    double value[2] = {sum, y}, made = sum;
    *size += e->n_steps ? fabs(y) : 0;
    for (int i = 0; i < e->n_steps; i++) {
        const Step *s = &e->steps[i];
        double l = s->src[0] < 0 ? made : value[s->src[0]], r = 0;
        if (s->src[1] != STEP_NONE) r = s->src[1] < 0 ? made : value[s->src[1]];
        made = s->op == OP_neg ? -l : s->op == OP_add ? l + r : s->op == OP_sub ? l - r : l * r;
    }
    return made;
}

/* The operand's rows: one for each row of the result, also apart from one product to the next; one for all; a number
 * for each row. */
typedef enum Operand { ROWS, ROWS_APART, ONE_ROW, ONE_COLUMN, OPERANDS } Operand;

static GemmRows operand_rows(Operand layout, const float *data, int64_t batch, int64_t m, int64_t n, int64_t apart) {
    GemmRows rows = {.data = (const char *)data, .dtype = DTYPE_F32, .rank = 1, .col = layout != ONE_COLUMN};
    rows.shape[0] = batch * m;
    rows.strides[0] = layout == ONE_ROW ? 0 : layout == ONE_COLUMN ? 1 : n;
    if (layout == ROWS_APART) {
        rows.rank = 2;
        rows.shape[0] = batch, rows.shape[1] = m;
        rows.strides[0] = m * n + apart, rows.strides[1] = n;
    }
    return rows;
}

static void test_product(void) {
    for (int round = 0; round < 400; round++, release_all()) {
        int64_t m = below(3) ? between(1, 40) : between(1, 300), n = between(1, 150), k = between(0, 600);
        if (below(16) == 0)
            m = between(200, 240), n = between(1, 50), k = between(2600, 3000); /* the panels of A in several groups */
        int64_t batch = below(4) ? 1 : between(2, 3);
        bool lying = below(3), b_turned = below(3); /* [n, k] as nn.Linear's, mostly */
        int64_t b_row = lying && b_turned && below(2) ? round_up(k, 512) : (b_turned ? k : n) + below(3);
        int64_t a_turned = below(4) == 0, a_row = (a_turned ? m : k) + below(3);
        int64_t a_size = (a_turned ? k : m) * a_row, b_size = below(2) ? (b_turned ? n : k) * b_row : 0;
        const Epilogue *epilogue = &epilogues[below(sizeof epilogues / sizeof *epilogues)];
        Operand layout = (Operand)below(OPERANDS);
        int64_t apart = below(5);
        bool biased = below(2);
        int64_t words[2 * STEP_WORDS];
        DType types[] = {DTYPE_F32, DTYPE_F32};
        float *a = random_floats(batch * a_size), *bias = random_floats(n);
        int64_t b_end = b_turned ? (n - 1) * b_row + k : max_i64(k - 1, 0) * b_row + n;
        float *b = random_floats((batch - 1) * b_size + b_end);
        float *other = random_floats(batch * (m * n + apart));
        GemmFinish finish = {.kernels = gemm_kernels(), .product = DTYPE_F32, .n = n, .out_size = 4};
        for (int i = 0; i < epilogue->n_steps; i++) step_encode(&epilogue->steps[i], words + i * STEP_WORDS);
        CHECK_OK(&ctx, ew_prepare(&ctx, &finish.program, words, (size_t)epilogue->n_steps * STEP_WORDS, types,
                                  epilogue->n_inputs, true));
        finish.inputs[1] = operand_rows(layout, other, batch, m, n, apart);
        finish.direct = epilogue->n_steps == 0;
        if (biased) finish.bias = (char *)bias, finish.bias_type = DTYPE_F32, finish.bias_stride = 1;
        Gemm gemm = {.batch = 1, .m = m, .n = n, .k = k, .finish = &finish};
        gemm_add_batch(&gemm, batch, a_size, b_size);
        gemm.a = a_turned ? (GemmOperand){a, DTYPE_F32, 1, a_row} : (GemmOperand){a, DTYPE_F32, a_row, 1};
        gemm.b = b_turned ? (GemmOperand){b, DTYPE_F32, 1, b_row} : (GemmOperand){b, DTYPE_F32, b_row, 1};
        float *out[RUNS];
        for (int run = 0; run < RUNS; run++) {
            Pool *pool = pools[run];
            out[run] = get(batch * m * n * 4);
            finish.out = (char *)out[run];
            int threads = pool_threads(pool);
            void *scratch = get_aligned(b_turned ? gemm_turned_scratch(batch, m, n, k, threads)
                                                 : gemm_scratch(batch, m, n, k, false, threads));
            CHECK(!pool || pool_enter(pool));
            (b_turned ? gemm_turned_run : gemm_run)(&gemm, pool, scratch);
            if (pool) pool_leave(pool);
            CHECK(memcmp(out[0], out[run], (size_t)(batch * m * n) * sizeof(float)) == 0);
            memset(out[run], 0, (size_t)(batch * m * n) * sizeof(float)); /* alone, with the scratch for many */
            (b_turned ? gemm_turned_run : gemm_run)(&gemm, NULL, scratch);
            CHECK(memcmp(out[0], out[run], (size_t)(batch * m * n) * sizeof(float)) == 0);
        }
        int bad = 0;
        for (int64_t i = 0; i < batch * m * n; i += 1 + below(batch * m * n / 200 + 1)) {
            int64_t column = i % n, row = i / n, of = row / m;
            const float *a_of = a + of * a_size, *b_of = b + of * b_size;
            double sum = biased ? (double)bias[column] : 0, size = fabs(sum);
            for (int64_t p = 0; p < k; p++) {
                double each = (double)a_of[a_turned ? p * a_row + row % m : row % m * a_row + p] *
                              (double)b_of[b_turned ? column * b_row + p : p * b_row + column];
                sum += each, size += fabs(each);
            }
            double y = (double)other[layout == ONE_ROW      ? column
                                     : layout == ONE_COLUMN ? row
                                     : layout == ROWS_APART ? i + of * apart
                                                            : i];
            bad += !(fabs((double)out[0][i] - finish_in_f64(epilogue, sum, y, &size)) <= 4e-7 * size);
        }
        CHECK_EQUAL(bad, 0);
    }
}

int main(void) {
    context_init(&ctx);
    for (int run = 1; run < RUNS; run++) CHECK_OK(&ctx, pool_create(&ctx, threads_of[run], &pools[run]));
    test_pairs();
    test_product();
    for (int run = 1; run < RUNS; run++) pool_destroy(pools[run]);
    return check_done();
}
