/* Weights from f32, f16 or bf16 to quantised ones: symmetric, a scale for each row or group of its columns; or to bf16.
 */
#include "cpu/quantised.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "cpu/gemm_kernels.h"

enum { PART_ROWS = 16 };

typedef struct Job {
    const Quantised *to;
    const Tensor *weight;
    float *buffers; /* PART_ROWS rows for each thread */
    atomic_bool odd;
} Job;

static int64_t buffer_row(int64_t k) { return round_up(k, 8); }

/* Rows [row, row + rows) as f32, `*stride` apart: where they lie, or in the buffer. */
static const float *read_rows(const Tensor *w, int64_t row, int64_t rows, float *buffer, int64_t *stride) {
    const GemmKernels *kernels = gemm_kernels();
    int64_t k = w->shape[1], n_step = w->strides[0], k_step = w->strides[1];
    const char *from = (const char *)w->data + row * n_step * (int64_t)dtype_size(w->dtype);
    *stride = n_step;
    if (w->dtype == DTYPE_F32 && k_step == 1) return (const float *)(const void *)from;
    *stride = buffer_row(k);
    if (w->dtype == DTYPE_F32 && n_step == 1) {
        kernels->interleave((int)k, (int)*stride, rows, (const float *)(const void *)from, k_step, buffer);
        return buffer;
    }
    for (int64_t j = 0; j < rows; j++) {
        if (w->dtype != DTYPE_F32 && k_step == 1)
            kernels->widen(buffer + j * *stride, (const uint16_t *)(const void *)from + j * n_step, w->dtype, k);
        else
            for (int64_t c = 0; c < k; c++) buffer[j * *stride + c] = load_f32(from, w->dtype, j * n_step + c * k_step);
    }
    return buffer;
}

static float scale_of(float most, int bits) {
    float scale = bits == 8 ? most / 127.0f : most / 7.5f;
    return scale > 0 ? scale : 1.0f; /* zeros, or numbers so small that they become zeros */
}

static void quantise_row(const Quantised *to, const float *from, int64_t row, Job *job) {
    const QuantisedMaking *making = quantised_making();
    uint8_t *q = (uint8_t *)(uintptr_t)to->q + row * to->row_bytes;
    float *scales = (float *)(uintptr_t)to->scales + row * to->groups;
    for (int64_t g = 0, k = 0; g < to->groups; g++, k += to->group) {
        int64_t n = min_i64(to->group, to->k - k);
        float most = making->largest(from + k, n);
        if (!(most <= 3.40282347e38f)) {
            atomic_store(&job->odd, true);
            most = 0;
        }
        scales[g] = scale_of(most, to->bits);
        if (to->bits == 8)
            making->quantise_8bit(from + k, n, scales[g], q + k);
        else
            making->quantise_4bit(from + k, n, scales[g], k, q);
    }
}

static void narrow_row(const Quantised *to, const float *from, int64_t row) {
    uint16_t *q = (uint16_t *)(uintptr_t)(to->q + row * to->row_bytes);
    gemm_bf16()->narrow(q, from, to->k);
    if (to->k % 2) q[to->k] = 0;
}

static void quantise_part(void *arg, int64_t part, int thread) {
    Job *job = arg;
    const Quantised *to = job->to;
    int64_t row = part * PART_ROWS, rows = min_i64(PART_ROWS, to->n - row), stride;
    float *buffer = job->buffers + thread * PART_ROWS * buffer_row(to->k);
    const float *from = read_rows(job->weight, row, rows, buffer, &stride);
    for (int64_t j = 0; j < rows; j++) {
        if (to->bits == 16)
            narrow_row(to, from + j * stride, row + j);
        else
            quantise_row(to, from + j * stride, row + j, job);
    }
}

int64_t quantise_scratch(int64_t k, int threads) {
    return PART_ROWS * buffer_row(k) * threads * (int64_t)sizeof(float);
}

bool quantise_weight(const Tensor *weight, int bits, int64_t group, void *q, float *scales, Pool *pool, void *scratch) {
    int64_t k = weight->shape[1];
    const Quantised to = {.q = q,
                          .scales = scales,
                          .bits = bits,
                          .n = weight->shape[0],
                          .k = k,
                          .row_bytes = bits == 16  ? 2 * (k + k % 2)
                                       : bits == 8 ? k
                                                   : quantised_blocks(k) * (QUANTISED_BLOCK / 2),
                          .group = group ? group : k,
                          .groups = quantised_groups(k, group)};
    Job job = {.to = &to, .weight = weight, .buffers = scratch};
    atomic_init(&job.odd, false);
    pool_run(pool, (to.n + PART_ROWS - 1) / PART_ROWS, quantise_part, &job);
    return !atomic_load(&job.odd);
}
