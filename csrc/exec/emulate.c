/* An NPU's numbers on the host (exec.h says what is rounded). Constants and scalars are rounded once, when the executor
 * is made; operands that enter the NPU and results at run time. */
#include <string.h>

#include "exec/frame.h"
#include "graph/program.h"

enum { SHADOW_ALIGN = 64 };

/* --- scalars ------------------------------------------------------------------------------------------------------ */
static Scalar rounded(Op op, Scalar s) {
    if (s.kind == SCALAR_NONE) return s;
    double x = scalar_f64(s), y = (double)f16_to_f32(f32_to_f16((float)npu_scalar(op, x)));
    if (x == y) return s;
    return (Scalar){.kind = SCALAR_FLOAT, .f = y};
}

/* The node with rounded scalars. What the NPU takes computes floats and bools, so all scalars are of floats. */
static Code round_node(Context *ctx, Executor *e, const Node *node, const Node **out) {
    const OpInfo *info = op_info(node->op);
    void *copy;
    TRY(arena_copy(ctx, &e->memory, node, sizeof *node, &copy));
    Node *made = copy;
    TRY(arena_copy(ctx, &e->memory, node->attrs, info->n_attrs * sizeof *node->attrs, &copy));
    made->attrs = copy;
    for (uint8_t k = 0; k < info->n_attrs; k++) {
        Attr *attr = &made->attrs[k];
        if (attr_kind(info->attrs[k]) == KIND_SCALAR) attr->s = rounded(node->op, attr->s);
        if (info->attrs[k] != ATTR_program || attr->ints.count == 0) continue;
        TRY(arena_copy(ctx, &e->memory, attr->ints.items, attr->ints.count * sizeof(int64_t), &copy));
        int64_t *words = copy;
        for (uint32_t s = 0; s + STEP_WORDS <= attr->ints.count; s += STEP_WORDS) {
            Step step;
            if (!step_decode(words + s, &step)) return fail(ctx, CODE_INTERNAL, "a malformed elementwise program");
            step.scalar = rounded(step.op, step.scalar);
            step.high = rounded(step.op, step.high);
            step_encode(&step, words + s);
        }
        attr->ints.items = words;
    }
    *out = made;
    return CODE_OK;
}

/* --- constants ---------------------------------------------------------------------------------------------------- */
static bool is_half_on_npu(DType dtype) { return dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16; }

/* The same elements without gaps, in the same memory order; broadcast dimensions stay so. Returns their number. */
static int64_t compact_strides(const Tensor *from, Tensor *to) {
    int64_t stride = 1;
    bool done[MAX_RANK] = {false};
    *to = *from;
    for (int round = 0; round < from->rank; round++) {
        int inner = -1; /* the dimension of smallest stride that is left, the last one of equals */
        for (int d = 0; d < from->rank; d++)
            if (!done[d] && (inner < 0 || from->strides[d] <= from->strides[inner])) inner = d;
        done[inner] = true;
        if (from->strides[inner] == 0) continue;
        to->strides[inner] = stride;
        stride *= from->shape[inner] > 1 ? from->shape[inner] : 1;
    }
    return stride;
}

typedef struct Made {  /* a constant as the NPU has it */
    struct Made *next; /* of the same buffer */
    Tensor from, to;
    bool linear;
} Made;

static bool same_view(const Tensor *a, const Tensor *b) {
    size_t bytes = a->rank * sizeof(int64_t);
    return a->data == b->data && a->dtype == b->dtype && a->rank == b->rank && memcmp(a->shape, b->shape, bytes) == 0 &&
           memcmp(a->strides, b->strides, bytes) == 0;
}

static Code round_constant(Context *ctx, Executor *e, const Tensor *from, bool linear, Made **list, Tensor *to) {
    for (const Made *made = *list; made; made = made->next) {
        if (made->linear != linear || !same_view(&made->from, from)) continue;
        *to = made->to;
        return CODE_OK;
    }
    Made *made;
    TRY(ARENA_NEW(ctx, &e->memory, 1, &made));
    *made = (Made){.next = *list, .from = *from, .linear = linear};
    int64_t count = compact_strides(from, &made->to);
    TRY(arena_array(ctx, &e->memory, (size_t)count, dtype_size(from->dtype), &made->to.data));
    Tensor source = *from, target = made->to; /* each element once */
    for (uint8_t d = 0; d < from->rank; d++)
        if (from->strides[d] == 0 && from->shape[d] > 1) source.shape[d] = target.shape[d] = 1;
    if (tensor_count(&source) > 0) TRY(e->emulation.weight(ctx, e->emulation.user, &source, linear, &target));
    *list = made;
    *to = made->to;
    return CODE_OK;
}

/* --- building ----------------------------------------------------------------------------------------------------- */
static Code build_task(Context *ctx, Executor *e, Task *task, const bool *inside, Made **constants) {
    bool *enters;
    int64_t shadow = 0;
    TRY(ARENA_NEW(ctx, &e->memory, task->n_in, &enters));
    for (uint32_t k = 0; k < task->n_in; k++) {
        if (task->in[k] == REG_NONE || !is_half_on_npu(e->ir->regs[task->in[k]].dtype)) continue;
        BufferId b = e->ir->regs[task->in[k]].buffer;
        Tensor *arg = &e->args[task->first_arg + k], compact;
        if (e->ir->buffers[b].space == SPACE_CONSTANT) {
            TRY(round_constant(ctx, e, arg, task->instr->op == OP_linear && k == 1, &constants[b], arg));
        } else if (!inside[b]) {
            enters[k] = true;
            int64_t bytes = compact_strides(arg, &compact) * (int64_t)dtype_size(arg->dtype);
            shadow += (bytes + SHADOW_ALIGN - 1) / SHADOW_ALIGN * SHADOW_ALIGN;
        }
    }
    if (shadow > e->shadow_bytes) e->shadow_bytes = shadow;
    task->enters = enters;
    return round_node(ctx, e, task->instr->node, &task->node);
}

Code emulate_build(Context *ctx, Executor *e) {
    Arena scratch;
    arena_init(&scratch);
    bool *inside; /* of each buffer: the NPU writes it */
    Made **constants;
    Code code = ARENA_NEW(ctx, &scratch, e->ir->n_buffers, &inside);
    if (code == CODE_OK) code = ARENA_NEW(ctx, &scratch, e->ir->n_buffers, &constants);
    for (uint32_t t = 0; t < e->n_tasks && code == CODE_OK; t++) {
        const Task *task = &e->tasks[t];
        for (uint32_t k = 0; k < task->n_out && task->instr->device == DEVICE_NPU; k++)
            if (task->out[k] != REG_NONE) inside[e->ir->regs[task->out[k]].buffer] = true;
    }
    for (uint32_t t = 0; t < e->n_tasks && code == CODE_OK; t++) {
        Task *task = &e->tasks[t];
        if (task->instr->device != DEVICE_NPU) continue;
        code = check_cancelled(ctx);
        if (code == CODE_OK) code = build_task(ctx, e, task, inside, constants);
        if (code != CODE_OK)
            fail_prefix(ctx, "%s (%s)", op_info(task->instr->op)->name, where_of(e->ir, task->instr->node));
    }
    arena_destroy(&scratch);
    return code;
}

/* --- running ------------------------------------------------------------------------------------------------------ */
/* to[...] = from[...] as f16 holds it; `to` may be `from`. `clamp`: finite values stay finite.
 *
 * The NPU computes what is bf16 in the model as f16, and keeps f16's 11 digits from operator to operator. Kernels here
 * round each bf16 result to its 8 digits: emulation is less precise than the device, never more, and ends in the dtype
 * that the host is given. What the device changes, f16's range and its subnormal numbers, is put on top. */
static void round_dims(const Tensor *from, const Tensor *to, int d, const char *source, char *target, bool clamp) {
    int64_t size = (int64_t)dtype_size(from->dtype);
    if (d < from->rank) {
        int64_t n = to->strides[d] == 0 && from->shape[d] > 1 ? 1 : from->shape[d]; /* broadcast: once */
        for (int64_t i = 0; i < n; i++)
            round_dims(from, to, d + 1, source + i * from->strides[d] * size, target + i * to->strides[d] * size,
                       clamp);
        return;
    }
    if (from->dtype == DTYPE_F16) { /* has the values already */
        if (source != target) memcpy(target, source, 2);
        return;
    }
    bool brief = from->dtype == DTYPE_BF16;
    float x;
    if (brief)
        x = bf16_to_f32(*(const uint16_t *)source);
    else
        memcpy(&x, source, sizeof x);
    x = f16_to_f32(f32_to_f16(clamp ? f32_within_f16(x) : x));
    if (brief)
        *(uint16_t *)target = f32_to_bf16(x); /* exact: bf16 has fewer digits, and x is of its range */
    else
        memcpy(target, &x, sizeof x);
}

static void round_tensor(const Tensor *from, const Tensor *to, bool clamp) {
    round_dims(from, to, 0, from->data, to->data, clamp);
}

Code emulate_run(const Task *task, KernelCall *call, char *shadow) {
    Tensor few[16], *in = few;
    Arena scratch;
    arena_init(&scratch);
    if (task->n_in > sizeof few / sizeof *few) {
        Code code = ARENA_NEW(call->ctx, &scratch, task->n_in, &in);
        if (code != CODE_OK) return code;
    }
    for (uint32_t k = 0; k < task->n_in; k++) {
        in[k] = call->in[k];
        if (!task->enters[k]) continue;
        int64_t bytes = compact_strides(&call->in[k], &in[k]) * (int64_t)dtype_size(in[k].dtype);
        in[k].data = shadow;
        shadow += (bytes + SHADOW_ALIGN - 1) / SHADOW_ALIGN * SHADOW_ALIGN;
        round_tensor(&call->in[k], &in[k], true);
    }
    call->in = in;
    Code code = task->kernel->run(call);
    for (uint32_t k = 0; k < task->n_out && code == CODE_OK; k++)
        if (call->out[k].data && is_half_on_npu(call->out[k].dtype)) round_tensor(&call->out[k], &call->out[k], false);
    arena_destroy(&scratch);
    return code;
}
