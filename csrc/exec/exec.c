/* The executor: makes one from a plan, and runs it. */
#include "exec/exec.h"

#include <stdlib.h>

#include "exec/frame.h"

Code executor_create(Context *ctx, const Npuir *ir, KernelFn kernels, int threads, bool pack, Executor **out) {
    Arena memory;
    Executor *e;
    *out = NULL;
    arena_init(&memory);
    Code code = ARENA_NEW(ctx, &memory, 1, &e);
    if (code != CODE_OK) {
        arena_destroy(&memory);
        return code;
    }
    e->memory = memory;
    e->ir = ir;
    atomic_init(&e->lock, 0);
    if (threads > 1) code = pool_create(ctx, threads, &e->pool);
    if (code == CODE_OK) code = executor_build(ctx, e, kernels);
    if (code == CODE_OK && pack) code = executor_pack(ctx, e);
    if (code == CODE_OK)
        *out = e;
    else
        executor_destroy(e);
    return code;
}

void executor_destroy(Executor *e) {
    if (!e) return;
    while (e->free) {
        Frame *next = e->free->next;
        frame_destroy(e->free);
        e->free = next;
    }
    if (e->pool) pool_destroy(e->pool);
    free(e->packed);
    Arena memory = e->memory; /* which holds `e` itself */
    arena_destroy(&memory);
}

int64_t executor_packed_bytes(const Executor *e) { return e->packed_bytes; }

/* --- one call ----------------------------------------------------------------------------------------------------- */
typedef struct Call {
    Context *ctx;
    const Executor *e;
    Frame *frame;
    Pool *pool;
    const HostCalls *host;
} Call;

static Code bind_borders(const Call *call, void *const *inputs, void *const *outputs) {
    const Executor *e = call->e;
    for (uint32_t i = 0; i < e->n_borders; i++) {
        const Buffer *buffer = &e->ir->buffers[e->borders[i]];
        bool output = buffer->space == SPACE_OUTPUT, object = buffer->space == SPACE_OBJECT;
        uint32_t index = object ? e->object_input[buffer->index] : buffer->index;
        void *memory = output ? outputs[index] : inputs[index];
        if (!memory && (object || buffer->bytes > 0))
            return fail(call->ctx, CODE_INVALID, "%s %u has no memory", output ? "output" : "input", index);
        bind_buffer(e, call->frame->args, e->borders[i], address_or_nothing(memory, e->args));
    }
    return CODE_OK;
}

static int64_t bytes_spanned(const Tensor *t) {
    int64_t last = 0;
    for (uint8_t d = 0; d < t->rank; d++) {
        if (t->shape[d] == 0) return 0;
        last += (t->shape[d] - 1) * t->strides[d];
    }
    return (last + 1) * (int64_t)dtype_size(t->dtype);
}

/* A host result must be row major, as lowering took it to be, and must not lie in memory of the operands that is reused
 * or released while the result still lives. */
static Code check_host_result(const Call *call, const Task *task, uint32_t k) {
    const Instr *instr = task->instr;
    const Tensor *in = &call->frame->args[task->first_arg], *result = in + instr->n_in + k;
    if (tensor_count(result) == 0) return CODE_OK;
    if (!result->data) return fail(call->ctx, CODE_INTERNAL, "host call: result %u has no memory", k);
    if (!tensor_is_contiguous(result))
        return fail(call->ctx, CODE_INTERNAL, "host call: result %u is not row major", k);
    const char *start = result->data, *end = start + bytes_spanned(result);
    for (uint32_t j = 0; j < instr->n_in; j++) {
        if (instr->in[j] == REG_NONE || in[j].dtype == DTYPE_OBJECT) continue;
        Space space = call->e->ir->buffers[call->e->ir->regs[instr->in[j]].buffer].space;
        const char *from = in[j].data;
        if ((space == SPACE_ARENA || space == SPACE_HOST) && start < from + bytes_spanned(&in[j]) && from < end)
            return fail(call->ctx, CODE_INTERNAL, "host call: result %u lies in the memory of operand %u", k, j);
    }
    return CODE_OK;
}

static void drop(const Call *call, uint32_t hold) {
    void **kept = &call->frame->holds[hold];
    if (*kept) call->host->release(call->host->user, *kept);
    *kept = NULL;
}

static Code run_host_call(const Call *call, const Task *task) {
    const Executor *e = call->e;
    const Instr *instr = task->instr;
    Tensor *in = &call->frame->args[task->first_arg], *out = in + instr->n_in;
    for (uint32_t k = 0; k < instr->n_out; k++) out[k].data = NULL;
    TRY(call->host->call(call->ctx, call->host->user, (uint32_t)node_int(instr->node, ATTR_index), in, instr->n_in, out,
                         instr->n_out, &call->frame->holds[task->call]));
    /* Objects first: whatever fails below, the frame then knows what it has to release. */
    for (uint32_t k = 0; k < instr->n_out; k++) {
        if (out[k].dtype != DTYPE_OBJECT || !out[k].data) continue;
        if (instr->out[k] == REG_NONE)
            call->host->release(call->host->user, out[k].data);
        else
            call->frame->holds[e->n_calls + e->ir->buffers[e->ir->regs[instr->out[k]].buffer].index] = out[k].data;
    }
    for (uint32_t k = 0; k < instr->n_out; k++) {
        if (instr->out[k] == REG_NONE) continue;
        if (out[k].dtype != DTYPE_OBJECT) TRY(check_host_result(call, task, k));
        bind_buffer(e, call->frame->args, e->ir->regs[instr->out[k]].buffer, address_or_nothing(out[k].data, e->args));
    }
    return CODE_OK;
}

static Code run_kernel(const Call *call, const Task *task) {
    const Instr *instr = task->instr;
    Tensor *in = &call->frame->args[task->first_arg];
    KernelCall kernel_call = {
        .ctx = call->ctx,
        .node = instr->node,
        .in = in,
        .out = in + instr->n_in,
        .n_in = instr->n_in,
        .n_out = instr->n_out,
        .scratch = task->scratch < 0 ? NULL : call->frame->arena + task->scratch,
        .prepared = task->prepared,
        .pool = call->pool,
    };
    return task->kernel->run(&kernel_call);
}

static Code run_tasks(const Call *call) {
    const Executor *e = call->e;
    for (uint32_t t = 0; t < e->n_tasks; t++) {
        const Task *task = &e->tasks[t];
        TRY(check_cancelled(call->ctx));
        Code code = task->kernel ? run_kernel(call, task) : run_host_call(call, task);
        if (code != CODE_OK) {
            fail_prefix(call->ctx, "%s (%s)", op_info(task->instr->op)->name, where_of(e->ir, task->instr->node));
            return code;
        }
        for (uint32_t d = 0; d < task->n_drops; d++) drop(call, e->drops[task->first_drop + d]);
    }
    return CODE_OK;
}

static void hand_out_objects(const Call *call, void *const *inputs, void **objects) {
    const Executor *e = call->e;
    for (uint32_t i = 0; i < e->ir->n_outputs; i++) {
        const Buffer *buffer = &e->ir->buffers[e->ir->regs[e->ir->outputs[i]].buffer];
        if (buffer->space != SPACE_OBJECT) continue;
        uint32_t input = e->object_input[buffer->index];
        objects[i] = input != UINT32_MAX ? inputs[input] : call->frame->holds[e->n_calls + buffer->index];
        call->host->retain(call->host->user, objects[i]);
    }
}

Code executor_run(Context *ctx, Executor *e, void *const *inputs, void *const *outputs, void **objects,
                  const HostCalls *host) {
    if ((e->n_calls && (!host || !host->call)) || (e->ir->n_objects && !host))
        return fail(ctx, CODE_INVALID, "the program calls the host %u times, but there is nothing to call", e->n_calls);
    Call call = {.ctx = ctx, .e = e, .host = host};
    TRY(frame_take(ctx, e, &call.frame));
    bool mine = e->pool && pool_enter(e->pool);
    call.pool = mine ? e->pool : NULL;
    Code code = bind_borders(&call, inputs, outputs);
    if (code == CODE_OK) code = run_tasks(&call);
    if (mine) pool_leave(e->pool);
    if (code == CODE_OK) hand_out_objects(&call, inputs, objects);
    for (uint32_t h = 0; h < e->n_calls + e->ir->n_objects; h++) drop(&call, h);
    frame_give(e, call.frame);
    return code;
}
