/* The host's column of the operator table: which kernel runs an operator and what it asks of its operands. */
#include "cpu/cpu.h"
#include "cpu/elementwise.h"

#define ALL UINT32_MAX
#define NORM_KERNEL(f)                                                                                                 \
    { .run = f, .traits = {.contiguous = ALL, .inplace = 1}, .scratch = norm_scratch }
#define SOFTMAX_KERNEL                                                                                                 \
    { .run = softmax_run, .traits = {.contiguous = 1, .inplace = 1}, .scratch = softmax_scratch }
#define WRITE_KERNEL(f)                                                                                                \
    {                                                                                                                  \
        .run = f, .traits = {.inplace = 1 }                                                                            \
    } /* takes over operand 0 */

static const Kernel KERNELS[OP_COUNT] = {
    [OP_linear] = {.run = linear_run,
                   .scratch = linear_scratch,
                   .columns = linear_columns,
                   .split = linear_split,
                   .failed = gemm_failed,
                   .prepared_bytes = linear_prepared_bytes,
                   .prepare = linear_prepare},
    [OP_matmul] = {.run = matmul_run,
                   .scratch = matmul_scratch,
                   .prepared_bytes = matmul_prepared_bytes,
                   .prepare = matmul_prepare},
    [OP_quantised_linear] = {.run = quantised_linear_run,
                             .traits = {.contiguous = 0xf},
                             .scratch = quantised_linear_scratch,
                             .columns = quantised_linear_columns,
                             .split = quantised_linear_split,
                             .failed = gemm_failed},
    [OP_grouped_matmul] = {.run = grouped_matmul_run, .scratch = grouped_matmul_scratch},
    [OP_conv] = {.run = conv_run, .traits = {.contiguous = 1 << 1}, .scratch = conv_scratch},
    [OP_attention] = {.run = attention_run, .traits = {.strided_out = true}, .scratch = attention_scratch},
    [OP_layer_norm] = NORM_KERNEL(layer_norm_run),
    [OP_rms_norm] = NORM_KERNEL(rms_norm_run),
    [OP_group_norm] = NORM_KERNEL(group_norm_run),
    [OP_softmax] = SOFTMAX_KERNEL,
    [OP_log_softmax] = SOFTMAX_KERNEL,
    [OP_rope] = {.run = rope_run, .traits = {.strided_out = true}},

    [OP_sum] = {.run = reduce_run},
    [OP_mean] = {.run = reduce_run},
    [OP_prod] = {.run = reduce_run},
    [OP_amax] = {.run = reduce_run},
    [OP_amin] = {.run = reduce_run},
    [OP_any] = {.run = reduce_run},
    [OP_all] = {.run = reduce_run},
    [OP_var] = {.run = reduce_run},
    [OP_argmax] = {.run = arg_reduce_run},
    [OP_argmin] = {.run = arg_reduce_run},
    [OP_cumsum] = WRITE_KERNEL(scan_run),
    [OP_cumprod] = WRITE_KERNEL(scan_run),
    [OP_sort] = {.run = sort_run, .scratch = sort_scratch},
    [OP_topk] = {.run = sort_run, .scratch = sort_scratch},

    [OP_embedding] = {.run = embedding_run},
    [OP_index_select] = {.run = index_select_run},
    [OP_index] = {.run = index_run},
    [OP_gather] = {.run = gather_run},
    [OP_index_put] = WRITE_KERNEL(index_put_run),
    [OP_index_copy] = WRITE_KERNEL(index_write_run),
    [OP_index_add] = WRITE_KERNEL(index_write_run),
    [OP_scatter] = WRITE_KERNEL(scatter_run),
    [OP_slice_scatter] = WRITE_KERNEL(slice_scatter_run),

    [OP_contiguous] = {.run = contiguous_run, .traits = {.strided_out = true}},
    [OP_cat] = {.run = cat_run},
    [OP_pad] = {.run = pad_run},
    [OP_flip] = {.run = flip_run},
    [OP_tril] = WRITE_KERNEL(triangle_run),
    [OP_triu] = WRITE_KERNEL(triangle_run),
    [OP_full] = {.run = full_run},
    [OP_arange] = {.run = arange_run},
};

static const Kernel ELEMENTWISE_KERNEL = {.run = elementwise_kernel, .traits = {.inplace = ALL, .strided_out = true}};

/* Views lower to registers and need no kernel; input, constant and host are the executor's. */
const Kernel *cpu_kernel(Op op) {
    if (op_is(op, ELEMENTWISE)) return &ELEMENTWISE_KERNEL;
    return KERNELS[op].run ? &KERNELS[op] : NULL;
}
