/* The executor: makes one from a plan, and runs it. */
#include "exec/exec.h"

#include <stdlib.h>
#include <time.h>

#include "exec/frame.h"

Code executor_create(Context *ctx, const Npuir *ir, const ExecutorOptions *options, Executor **out) {
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
    e->options = *options;
    if (options->emulation) {
        e->emulation = *options->emulation;
        e->options.emulation = &e->emulation;
    }
    atomic_init(&e->lock, 0);
    atomic_init(&e->pages.stop, false);
    if (options->packs)
        packs_ref(options->packs);
    else
        code = packs_create(ctx, &e->options.packs);
    if (code == CODE_OK && options->threads > 1) code = pool_create(ctx, options->threads, &e->pool);
    if (code == CODE_OK) code = executor_build(ctx, e);
    if (code == CODE_OK && options->emulation) code = emulate_build(ctx, e);
    if (code == CODE_OK && options->pack) code = executor_pack(ctx, e);
    if (code == CODE_OK && options->pack) code = pages_start(ctx, e);
    if (code == CODE_OK)
        *out = e;
    else
        executor_destroy(e);
    return code;
}

void executor_destroy(Executor *e) {
    if (!e) return;
    pages_stop(e);
    while (e->free) {
        Frame *next = e->free->next;
        frame_destroy(e, e->free);
        e->free = next;
    }
    if (e->pool) pool_destroy(e->pool);
    for (uint32_t i = 0; i < e->n_packs; i++) pack_release(e->packs[i]);
    packs_unref(e->options.packs);
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

static bool among(void *const *list, uint32_t n, const void *memory) {
    for (uint32_t i = 0; i < n; i++)
        if (list[i] == memory) return true;
    return false;
}

static Code bind_borders(const Call *call, void *const *inputs, void *const *outputs) {
    const Executor *e = call->e;
    for (uint32_t i = 0; i < e->n_borders; i++) {
        const Buffer *buffer = &e->ir->buffers[e->borders[i]];
        bool output = buffer->space == SPACE_OUTPUT, object = buffer->space == SPACE_OBJECT;
        uint32_t index = object ? e->object_input[buffer->index] : buffer->index;
        void *memory = output ? outputs[index] : inputs[index];
        if (!memory && (object || buffer->bytes > 0))
            return fail(call->ctx, CODE_INVALID, "%s %u has no memory", output ? "output" : "input", index);
        if (output && buffer->bytes >= HUGE_LEAST_BYTES && !among(inputs, e->ir->n_inputs, memory))
            memory_huge(memory, (size_t)buffer->bytes); /* a new tensor: stores bring its pages in */
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
    const Tensor *in = &call->frame->args[task->first_arg], *result = in + task->n_in + k;
    if (tensor_count(result) == 0) return CODE_OK;
    if (!result->data) return fail(call->ctx, CODE_INTERNAL, "host call: result %u has no memory", k);
    if (!tensor_is_contiguous(result))
        return fail(call->ctx, CODE_INTERNAL, "host call: result %u is not row major", k);
    const char *start = result->data, *end = start + bytes_spanned(result);
    for (uint32_t j = 0; j < task->n_in; j++) {
        if (task->in[j] == REG_NONE || in[j].dtype == DTYPE_OBJECT) continue;
        Space space = call->e->ir->buffers[call->e->ir->regs[task->in[j]].buffer].space;
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
    Tensor *in = &call->frame->args[task->first_arg], *out = in + task->n_in;
    for (uint32_t k = 0; k < task->n_out; k++) out[k].data = NULL;
    TRY(call->host->call(call->ctx, call->host->user, (uint32_t)node_int(task->node, ATTR_index), in, task->n_in, out,
                         task->n_out, &call->frame->holds[task->number]));
    /* Objects first: whatever fails below, the frame then knows what it has to release. */
    for (uint32_t k = 0; k < task->n_out; k++) {
        if (out[k].dtype != DTYPE_OBJECT || !out[k].data) continue;
        if (task->out[k] == REG_NONE)
            call->host->release(call->host->user, out[k].data);
        else
            call->frame->holds[e->n_calls + e->ir->buffers[e->ir->regs[task->out[k]].buffer].index] = out[k].data;
    }
    for (uint32_t k = 0; k < task->n_out; k++) {
        if (task->out[k] == REG_NONE) continue;
        if (out[k].dtype != DTYPE_OBJECT) TRY(check_host_result(call, task, k));
        bind_buffer(e, call->frame->args, e->ir->regs[task->out[k]].buffer, address_or_nothing(out[k].data, e->args));
    }
    return CODE_OK;
}

static KernelCall kernel_call(const Call *call, const Task *task) {
    Tensor *in = &call->frame->args[task->first_arg];
    return (KernelCall){
        .ctx = call->ctx,
        .node = task->node,
        .in = in,
        .out = in + task->n_in,
        .n_in = task->n_in,
        .n_out = task->n_out,
        .scratch = task->scratch < 0 ? NULL : call->frame->arena[task->instr->device] + task->scratch,
        .prepared = task->prepared,
        .pool = call->pool,
    };
}

static Code run_kernel(const Call *call, const Task *task) {
    KernelCall kernel = kernel_call(call, task);
    if (task->enters) return emulate_run(task, &kernel, call->frame->shadow);
    return task->kernel->run(&kernel);
}

static Code run_segment(const Call *call, const Task *task) {
    Backend *backend = call->e->options.backend;
    const Tensor *in = &call->frame->args[task->first_arg];
    return backend->run(call->ctx, backend, call->frame->backend, task->number, in, in + task->n_in);
}

static Code run_task(const Call *call, const Task *task) {
    switch (task->kind) {
    case TASK_KERNEL: return run_kernel(call, task);
    case TASK_HOST: return run_host_call(call, task);
    case TASK_SEGMENT: return run_segment(call, task);
    }
    return fail(call->ctx, CODE_INTERNAL, "no such kind of task");
}

static void say_where(const Call *call, const Task *task) {
    const Npuir *ir = call->e->ir;
    if (task->kind != TASK_SEGMENT) {
        fail_prefix(call->ctx, "%s (%s)", op_info(task->instr->op)->name, where_of(ir, task->instr->node));
        return;
    }
    const Segment *segment = &call->e->options.segments->items[task->number];
    const Instr *last = &ir->instrs[ir->order[segment->first + segment->count - 1]];
    fail_prefix(call->ctx, "NPU segment %u, %u instructions from %s (%s) to %s (%s)", task->number, segment->count,
                op_info(task->instr->op)->name, where_of(ir, task->instr->node), op_info(last->op)->name,
                where_of(ir, last->node));
}

static inline Code finish_task(const Call *call, const Task *task) {
    TRY(check_cancelled(call->ctx));
    Code code = run_task(call, task);
    if (code != CODE_OK) {
        say_where(call, task);
        return code;
    }
    for (uint32_t d = 0; d < task->n_drops; d++) drop(call, call->e->drops[task->first_drop + d]);
    return CODE_OK;
}

/* --- tasks that run together -------------------------------------------------------------------------------------- */
typedef struct Together {
    const Task *tasks;
    uint32_t count;
    KernelParts parts[NPUIR_GROUP_MOST];
    int64_t first[NPUIR_GROUP_MOST]; /* part of the whole that is a head's part 0 */
} Together;

static void run_part(void *arg, int64_t part, int thread) {
    const Together *g = arg;
    uint32_t head = g->count - 1;
    while (g->tasks[head].head != head || part < g->first[head]) head--;
    part -= g->first[head];
    for (uint32_t m = head; m < g->count; m++)
        if (g->tasks[m].head == head) g->parts[m].body(g->parts[m].arg, part, thread);
}

static Code finish_group(const Call *call, const Task *tasks) {
    enum { SMALL_WORK = 32 << 10 }; /* multiply-adds not worth waking a thread */
    Together g = {.tasks = tasks, .count = tasks->together};
    int64_t parts = 0, work = 0;
    Code code = check_cancelled(call->ctx);
    uint32_t m = 0;
    for (; code == CODE_OK && m < g.count; m++) {
        KernelCall kernel = kernel_call(call, &tasks[m]);
        code = tasks[m].kernel->split(&kernel, &g.parts[m]);
        work += g.parts[m].work;
        g.first[m] = parts;
        if (code == CODE_OK && tasks[m].head == m)
            parts += g.parts[m].count;
        else if (code == CODE_OK && g.parts[m].count != g.parts[tasks[m].head].count)
            code = fail(call->ctx, CODE_INTERNAL, "its parts are not those of what it follows");
    }
    if (code == CODE_OK) {
        pool_run(work < SMALL_WORK ? NULL : call->pool, parts, run_part, &g);
        for (m = 0; code == CODE_OK && m < g.count; m++) code = tasks[m].kernel->failed(call->ctx, &g.parts[m]);
    }
    if (code != CODE_OK) {
        if (m > 0) say_where(call, &tasks[m - 1]);
        return code;
    }
    for (m = 0; m < g.count; m++)
        for (uint32_t d = 0; d < tasks[m].n_drops; d++) drop(call, call->e->drops[tasks[m].first_drop + d]);
    return CODE_OK;
}

static Code run_tasks(const Call *call) {
    for (uint32_t t = 0; t < call->e->n_tasks; t += call->e->tasks[t].together) {
        const Task *task = &call->e->tasks[t];
        TRY(task->together > 1 ? finish_group(call, task) : finish_task(call, task));
    }
    return CODE_OK;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static Code time_tasks(const Call *call, TaskTime *times) {
    const Executor *e = call->e;
    uint32_t next = 0; /* position in the order */
    for (uint32_t t = 0; t < e->n_tasks; t++) {
        const Task *task = &e->tasks[t];
        uint32_t count = task->kind == TASK_SEGMENT ? e->options.segments->items[task->number].count : 1;
        times[t] = (TaskTime){.first = next, .count = count, .start_ns = now_ns()};
        TRY(finish_task(call, task));
        times[t].end_ns = now_ns();
        next += count;
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

static Code run_call(Context *ctx, Executor *e, void *const *inputs, void *const *outputs, void **objects,
                     const HostCalls *host, TaskTime *times) {
    if ((e->n_calls && (!host || !host->call)) || (e->ir->n_objects && !host))
        return fail(ctx, CODE_INVALID, "the program calls the host %u times, but there is nothing to call", e->n_calls);
    Call call = {.ctx = ctx, .e = e, .host = host};
    TRY(frame_take(ctx, e, &call.frame));
    bool mine = e->pool && pool_enter(e->pool);
    call.pool = mine ? e->pool : NULL;
    Code code = bind_borders(&call, inputs, outputs);
    if (code == CODE_OK) code = times ? time_tasks(&call, times) : run_tasks(&call);
    if (mine) pool_leave(e->pool);
    if (code == CODE_OK) hand_out_objects(&call, inputs, objects);
    for (uint32_t h = 0; h < e->n_calls + e->ir->n_objects; h++) drop(&call, h);
    frame_give(e, call.frame);
    return code;
}

Code executor_run(Context *ctx, Executor *e, void *const *inputs, void *const *outputs, void **objects,
                  const HostCalls *host) {
    return run_call(ctx, e, inputs, outputs, objects, host, NULL);
}

uint32_t executor_task_count(const Executor *e) { return e->n_tasks; }

Code executor_profile(Context *ctx, Executor *e, void *const *inputs, void *const *outputs, void **objects,
                      const HostCalls *host, TaskTime *times) {
    return run_call(ctx, e, inputs, outputs, objects, host, times);
}
