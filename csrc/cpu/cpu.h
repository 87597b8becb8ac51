/* The host kernels' own table: each operator's `run` and its helpers, listed by kernels.c. */
#ifndef FORGE_CPU_CPU_H
#define FORGE_CPU_CPU_H

#include "exec/kernel.h"

/* Code in files named *_avx2.c runs only where this holds. FORGE_PORTABLE is a build switch for tests. */
static inline bool cpu_has_avx2(void) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(FORGE_PORTABLE)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

/* The same for *_avx512.c. */
static inline bool cpu_has_avx512(void) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(FORGE_PORTABLE)
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

/* The same for *_avx512bf16.c: products of bf16. */
static inline bool cpu_has_avx512_bf16(void) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(FORGE_PORTABLE)
    return cpu_has_avx512() && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

/* --- contractions: linear.c, grouped.c, conv.c, attention.c ------------------------------------------------------- */
Code linear_run(KernelCall *call);
int64_t linear_scratch(const Graph *g, const Node *node, int threads);
int64_t linear_columns(const Graph *g, const Node *node);
Code linear_split(KernelCall *call, KernelParts *parts);
Code gemm_failed(Context *ctx, const KernelParts *parts);
int64_t linear_prepared_bytes(const Graph *g, const Node *node);
Code linear_prepare(Context *ctx, const Node *node, const Tensor *in, Pool *pool, void *prepared);
Code matmul_run(KernelCall *call);
int64_t matmul_scratch(const Graph *g, const Node *node, int threads);
int64_t matmul_prepared_bytes(const Graph *g, const Node *node);
Code matmul_prepare(Context *ctx, const Node *node, const Tensor *in, Pool *pool, void *prepared);
Code quantised_linear_run(KernelCall *call); /* contiguous: 0, 1, 2, 3 */
int64_t quantised_linear_scratch(const Graph *g, const Node *node, int threads);
int64_t quantised_linear_columns(const Graph *g, const Node *node);
Code quantised_linear_split(KernelCall *call, KernelParts *parts);
Code grouped_matmul_run(KernelCall *call);
int64_t grouped_matmul_scratch(const Graph *g, const Node *node, int threads);
Code conv_run(KernelCall *call); /* contiguous: 1 */
int64_t conv_scratch(const Graph *g, const Node *node, int threads);
Code attention_run(KernelCall *call); /* strided_out */
int64_t attention_scratch(const Graph *g, const Node *node, int threads);

/* --- rows: norm.c, softmax.c, rope.c ------------------------------------------------------------------------------ */
Code layer_norm_run(KernelCall *call); /* contiguous: 0, 1, 2, 3 */
Code rms_norm_run(KernelCall *call);   /* contiguous: 0, 1, 2 */
Code group_norm_run(KernelCall *call); /* contiguous: 0, 1, 2 */
int64_t norm_scratch(const Graph *g, const Node *node, int threads);
Code softmax_run(KernelCall *call); /* and log_softmax; contiguous: 0; in place: 0 */
int64_t softmax_scratch(const Graph *g, const Node *node, int threads);
Code rope_run(KernelCall *call); /* strided_out */

/* --- elementwise.c has elementwise_kernel; reduce.c, scan.c, sort.c ----------------------------------------------- */
Code reduce_run(KernelCall *call);     /* sum, mean, prod, amax, amin, any, all, var */
Code arg_reduce_run(KernelCall *call); /* argmax, argmin */
Code scan_run(KernelCall *call);       /* cumsum, cumprod; in place: 0 */
Code sort_run(KernelCall *call);       /* and topk */
int64_t sort_scratch(const Graph *g, const Node *node, int threads);

/* --- index.c, index_element.c; those that write take over operand 0 in place -------------------------------------- */
Code embedding_run(KernelCall *call);
Code index_select_run(KernelCall *call);
Code index_run(KernelCall *call);
Code index_put_run(KernelCall *call);
Code index_write_run(KernelCall *call); /* index_copy, index_add */
Code gather_run(KernelCall *call);
Code scatter_run(KernelCall *call);

/* --- move.c ------------------------------------------------------------------------------------------------------- */
Code contiguous_run(KernelCall *call); /* strided_out */
Code cat_run(KernelCall *call);
Code slice_scatter_run(KernelCall *call); /* in place: 0 */
Code pad_run(KernelCall *call);
Code flip_run(KernelCall *call);
Code triangle_run(KernelCall *call); /* in place: 0 */
Code full_run(KernelCall *call);
Code arange_run(KernelCall *call);

/* --- small helpers ------------------------------------------------------------------------------------------------ */
static inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Element i of f16, bf16 or f32 memory. */
static inline float load_f32(const void *data, DType dtype, int64_t i) {
    switch (dtype) {
    case DTYPE_F16: return f16_to_f32(((const uint16_t *)data)[i]);
    case DTYPE_BF16: return bf16_to_f32(((const uint16_t *)data)[i]);
    default: return ((const float *)data)[i];
    }
}

static inline void store_f32(void *data, DType dtype, int64_t i, float value) {
    if (dtype == DTYPE_F32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] = dtype == DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
}

/* The value as it is after being stored as f16, bf16 or f32. */
static inline float round_f32(DType dtype, float value) {
    if (dtype == DTYPE_F32) return value;
    return dtype == DTYPE_F16 ? f16_to_f32(f32_to_f16(value)) : bf16_to_f32(f32_to_bf16(value));
}

#endif
