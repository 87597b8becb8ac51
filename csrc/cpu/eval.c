/* Constant folding: one node on the calling thread. What eager would raise is left for the program to raise. */
#include <stdlib.h>
#include <string.h>

#include "cpu/cpu.h"
#include "cpu/move.h"

static void make_row_major(Tensor *t) {
    int64_t stride = 1;
    for (int d = t->rank; d-- > 0;) {
        t->strides[d] = stride;
        stride *= t->shape[d];
    }
}

/* A view operator as a copy: `from` becomes the view. */
static void eval_view(const Node *node, const Tensor *in, const Tensor *out) {
    Tensor from = *in, to = *out;
    if (node->op == OP_reshape) { /* the result's memory, seen in the operand's shape */
        to = *in;
        to.data = out->data;
        make_row_major(&to);
    } else if (node->op == OP_permute) {
        const Attr *dims = node_attr(node, ATTR_dims);
        for (uint32_t d = 0; d < dims->ints.count; d++) {
            from.shape[d] = in->shape[dims->ints.items[d]];
            from.strides[d] = in->strides[dims->ints.items[d]];
        }
    } else if (node->op == OP_expand) {
        int lead = out->rank - in->rank;
        from.rank = out->rank;
        for (int d = 0; d < out->rank; d++) {
            from.shape[d] = out->shape[d];
            from.strides[d] = d < lead || in->shape[d - lead] == 1 ? 0 : in->strides[d - lead];
        }
    } else {
        int64_t dim = node_int(node, ATTR_dim);
        from.data = tensor_byte(in, node_int(node, ATTR_start) * in->strides[dim]);
        from.shape[dim] = out->shape[dim];
        from.strides[dim] *= node_int(node, ATTR_step);
    }
    tensor_copy(NULL, &to, &from);
}

static void *aligned(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes ? bytes : 1) ? NULL : memory;
}

static Code run_kernel(Context *ctx, const Kernel *kernel, const Graph *g, const Node *node, Tensor *in, size_t n_in,
                       Tensor *out, size_t n_out, void **copies) {
    for (size_t k = 0; k < n_in; k++) {
        uint32_t wants = kernel->traits.contiguous | kernel->traits.unit_inner;
        if (!in[k].data || k >= 32 || !(wants >> k & 1) || tensor_is_contiguous(&in[k])) continue;
        Tensor copy = in[k];
        make_row_major(&copy);
        copy.data = copies[k] = aligned((size_t)tensor_count(&copy) * dtype_size(copy.dtype));
        if (!copy.data) return fail(ctx, CODE_NO_MEMORY, "out of memory while folding %s", op_info(node->op)->name);
        tensor_copy(NULL, &copy, &in[k]);
        in[k] = copy;
    }
    int64_t bytes = kernel->scratch ? kernel->scratch(g, node, 1) : 0;
    void *scratch = copies[n_in] = aligned((size_t)bytes);
    if (!scratch) return fail(ctx, CODE_NO_MEMORY, "out of memory while folding %s", op_info(node->op)->name);
    KernelCall call = {.ctx = ctx,
                       .node = node,
                       .in = in,
                       .out = out,
                       .n_in = (uint32_t)n_in,
                       .n_out = (uint32_t)n_out,
                       .scratch = scratch};
    return kernel->run(&call);
}

Code cpu_eval(Context *ctx, const Graph *g, NodeId id, const Tensor *in, size_t n_in, Tensor *out, size_t n_out,
              void *user) {
    (void)user;
    const Node *node = graph_node(g, id);
    const Kernel *kernel = cpu_kernel(node->op);
    if (op_is(node->op, VIEW)) return eval_view(node, &in[0], &out[0]), CODE_OK;
    if (!kernel) return CODE_UNSUPPORTED;
    void **copies = calloc(n_in + 1, sizeof *copies);
    Tensor *operands = calloc(n_in + 1, sizeof *operands);
    Context quiet;
    context_init(&quiet);
    Code code = CODE_NO_MEMORY;
    if (copies && operands) {
        if (n_in) memcpy(operands, in, n_in * sizeof *in);
        code = run_kernel(&quiet, kernel, g, node, operands, n_in, out, n_out, copies);
    }
    for (size_t k = 0; copies && k <= n_in; k++) free(copies[k]);
    free(copies);
    free(operands);
    if (code == CODE_OK) return CODE_OK;
    return code == CODE_NO_MEMORY ? fail(ctx, CODE_NO_MEMORY, "out of memory while folding %s", op_info(node->op)->name)
                                  : CODE_UNSUPPORTED;
}
