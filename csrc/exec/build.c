/* Building an executor: everything that a run would otherwise have to look up is worked out here once. */
#include <string.h>

#include "exec/frame.h"

const char *where_of(const Npuir *ir, const Node *node) {
    const Graph *g = ir->graph;
    if (node->source >= 0 && (uint32_t)node->source < g->n_sources) return g->sources[node->source];
    return "unknown source";
}

static Code check_constants(Context *ctx, const Npuir *ir, const Instr *instr) {
    for (uint32_t k = 0; k < instr->n_in; k++) {
        if (instr->in[k] == REG_NONE) continue;
        const Buffer *buffer = &ir->buffers[ir->regs[instr->in[k]].buffer];
        if (buffer->space != SPACE_CONSTANT) continue;
        const Constant *constant = &ir->graph->constants[buffer->index];
        if (!constant->data && buffer->bytes > 0)
            return fail(ctx, CODE_UNSUPPORTED, "constant '%s' has a shape but no data: it can be planned, not run",
                        constant->name ? constant->name : "");
    }
    return CODE_OK;
}

static void describe(Tensor *tensor, DType dtype, uint8_t rank, const int64_t *shape, const int64_t *strides) {
    tensor->dtype = dtype;
    tensor->rank = rank;
    for (uint8_t d = 0; d < rank; d++) {
        tensor->shape[d] = shape[d];
        if (strides) tensor->strides[d] = strides[d];
    }
}

/* Register of argument k: operands, then results. */
static RegId arg_reg(const Task *task, uint32_t k) { return k < task->n_in ? task->in[k] : task->out[k - task->n_in]; }

/* Types of all arguments. A result that nothing uses has no register, but a host call must know what it is. */
static void describe_args(Executor *e, const Task *task) {
    const Npuir *ir = e->ir;
    for (uint32_t k = 0; k < task->n_in + task->n_out; k++) {
        RegId reg = arg_reg(task, k);
        Tensor *tensor = &e->args[task->first_arg + k];
        if (reg != REG_NONE) {
            const Register *r = &ir->regs[reg];
            describe(tensor, r->dtype, r->rank, r->shape, r->strides);
        } else if (k >= task->n_in) {
            const Value *value = graph_value(ir->graph, node_result(task->node, k - task->n_in));
            describe(tensor, value->dtype, value->rank, value->shape, NULL);
        }
    }
}

static Code make_task(Context *ctx, Executor *e, const Instr *instr, Task *task) {
    const char *op = op_info(instr->op)->name, *where = where_of(e->ir, instr->node);
    bool host = instr->op == OP_host;
    if (instr->device != DEVICE_CPU && !e->options.emulation)
        return fail(ctx, CODE_UNSUPPORTED, "%s (%s) is placed on the %s, which is not there to run it", op, where,
                    device_name(instr->device));
    *task = (Task){.kind = host ? TASK_HOST : TASK_KERNEL,
                   .instr = instr,
                   .in = instr->in,
                   .out = instr->out,
                   .n_in = instr->n_in,
                   .n_out = instr->n_out,
                   .node = instr->node,
                   .kernel = host ? NULL : e->options.kernels(instr->op),
                   .scratch = instr->scratch == BUFFER_NONE ? -1 : e->ir->buffers[instr->scratch].offset};
    if (host)
        task->number = e->n_calls++;
    else if (!task->kernel)
        return fail(ctx, CODE_UNSUPPORTED, "%s (%s) has no host kernel", op, where);
    return CODE_OK;
}

static void make_segment_task(Executor *e, uint32_t index, Task *task) {
    const Segment *segment = &e->options.segments->items[index];
    const Instr *first = &e->ir->instrs[e->ir->order[segment->first]];
    *task = (Task){.kind = TASK_SEGMENT,
                   .instr = first,
                   .in = segment->in,
                   .out = segment->out,
                   .n_in = segment->n_in,
                   .n_out = segment->n_out,
                   .node = first->node,
                   .scratch = -1,
                   .number = index};
}

static Code make_tasks(Context *ctx, Executor *e) {
    const Npuir *ir = e->ir;
    const Segments *segments = e->options.backend ? e->options.segments : NULL;
    uint32_t next = 0; /* segment */
    TRY(ARENA_NEW(ctx, &e->memory, ir->n_instrs, &e->tasks));
    for (uint32_t p = 0; p < ir->n_instrs; p++) TRY(check_constants(ctx, ir, &ir->instrs[ir->order[p]]));
    for (uint32_t p = 0; p < ir->n_instrs;) {
        Task *task = &e->tasks[e->n_tasks++];
        if (segments && next < segments->count && segments->items[next].first == p) {
            make_segment_task(e, next, task);
            p += segments->items[next++].count;
        } else {
            TRY(make_task(ctx, e, &ir->instrs[ir->order[p++]], task));
        }
        task->first_arg = e->n_args;
        e->n_args += task->n_in + task->n_out;
    }
    TRY(ARENA_NEW(ctx, &e->memory, e->n_args, &e->args));
    for (uint32_t t = 0; t < e->n_tasks; t++) describe_args(e, &e->tasks[t]);
    return CODE_OK;
}

/* Sorts the arguments by the buffer that they look into, so that placing a buffer is one walk over its patches. */
static Code make_patches(Context *ctx, Executor *e) {
    const Npuir *ir = e->ir;
    TRY(ARENA_NEW(ctx, &e->memory, ir->n_buffers + 2, &e->patch_start));
    TRY(ARENA_NEW(ctx, &e->memory, e->n_args, &e->patches));
    /* Counted two places ahead: filling in moves each start one buffer on, to where it belongs. */
    for (int filling = 0; filling < 2; filling++) {
        for (uint32_t t = 0; t < e->n_tasks; t++) {
            const Task *task = &e->tasks[t];
            for (uint32_t k = 0; k < task->n_in + task->n_out; k++) {
                RegId reg = arg_reg(task, k);
                if (reg == REG_NONE) continue;
                const Register *r = &ir->regs[reg];
                if (filling) {
                    Patch *patch = &e->patches[e->patch_start[r->buffer + 1]++];
                    patch->arg = task->first_arg + k;
                    patch->bytes = r->dtype == DTYPE_OBJECT ? 0 : r->offset * (int64_t)dtype_size(r->dtype);
                } else {
                    e->patch_start[r->buffer + 2]++;
                }
            }
        }
        if (!filling)
            for (uint32_t b = 0; b < ir->n_buffers; b++) e->patch_start[b + 2] += e->patch_start[b + 1];
    }
    return CODE_OK;
}

/* Constants never move: they are bound in the model. Inputs (also objects) and outputs come with each call. */
static Code bind_fixed(Context *ctx, Executor *e) {
    const Npuir *ir = e->ir;
    TRY(ARENA_NEW(ctx, &e->memory, ir->n_objects, &e->object_input));
    memset(e->object_input, 0xff, ir->n_objects * sizeof *e->object_input);
    for (uint32_t i = 0; i < ir->n_inputs; i++) {
        if (ir->inputs[i] == REG_NONE) continue;
        const Buffer *buffer = &ir->buffers[ir->regs[ir->inputs[i]].buffer];
        if (buffer->space == SPACE_OBJECT) e->object_input[buffer->index] = i;
    }
    TRY(ARENA_NEW(ctx, &e->memory, ir->n_buffers, &e->borders));
    for (BufferId b = 0; b < ir->n_buffers; b++) {
        const Buffer *buffer = &ir->buffers[b];
        bool object_input = buffer->space == SPACE_OBJECT && e->object_input[buffer->index] != UINT32_MAX;
        if (buffer->space == SPACE_CONSTANT)
            bind_buffer(e, e->args, b, address_or_nothing(ir->graph->constants[buffer->index].data, e->args));
        else if (buffer->space == SPACE_INPUT || buffer->space == SPACE_OUTPUT || object_input)
            e->borders[e->n_borders++] = b;
    }
    return CODE_OK;
}

/* When each hold may go: after the last task that looks into a buffer that it keeps. What is handed out stays. */
static Code make_drops(Context *ctx, Executor *e) {
    const Npuir *ir = e->ir;
    enum { NEVER = UINT32_MAX };
    uint32_t n_holds = e->n_calls + ir->n_objects;
    uint32_t *last_use, *last;
    TRY(ARENA_NEW(ctx, &e->memory, ir->n_buffers, &last_use));
    TRY(ARENA_NEW(ctx, &e->memory, n_holds, &last));
    TRY(ARENA_NEW(ctx, &e->memory, n_holds, &e->drops));
    for (uint32_t t = 0; t < e->n_tasks; t++) {
        const Task *task = &e->tasks[t];
        for (uint32_t k = 0; k < task->n_in + task->n_out; k++) {
            RegId reg = arg_reg(task, k);
            if (reg != REG_NONE) last_use[ir->regs[reg].buffer] = t;
        }
    }
    for (uint32_t i = 0; i < ir->n_outputs; i++) last_use[ir->regs[ir->outputs[i]].buffer] = NEVER;

    memset(last, 0xff, n_holds * sizeof *last);
    for (uint32_t t = 0; t < e->n_tasks; t++) {
        const Task *task = &e->tasks[t];
        if (task->kind != TASK_HOST) continue;
        uint32_t end = t;
        for (uint32_t k = 0; k < task->n_out; k++) {
            if (task->out[k] == REG_NONE) continue;
            BufferId b = ir->regs[task->out[k]].buffer;
            if (ir->buffers[b].space == SPACE_OBJECT)
                last[e->n_calls + ir->buffers[b].index] = last_use[b];
            else if (last_use[b] > end)
                end = last_use[b];
        }
        last[task->number] = end;
    }
    for (uint32_t h = 0; h < n_holds; h++)
        if (last[h] != NEVER) e->tasks[last[h]].n_drops++;
    for (uint32_t t = 1; t < e->n_tasks; t++)
        e->tasks[t].first_drop = e->tasks[t - 1].first_drop + e->tasks[t - 1].n_drops;
    for (uint32_t t = 0; t < e->n_tasks; t++) e->tasks[t].n_drops = 0;
    for (uint32_t h = 0; h < n_holds; h++) {
        if (last[h] == NEVER) continue;
        Task *task = &e->tasks[last[h]];
        e->drops[task->first_drop + task->n_drops++] = h;
    }
    return CODE_OK;
}

/* --- groups ------------------------------------------------------------------------------------------------------- */
static int64_t columns_of(const Executor *e, const Task *task) {
    if (task->kind != TASK_KERNEL || !task->kernel->columns || !task->kernel->split) return 0;
    return task->kernel->columns(e->ir->graph, task->node);
}

static bool reads_result(const Executor *e, const Task *task, const Task *maker) {
    for (uint32_t k = 0; k < task->n_in; k++)
        if (task->in[k] != REG_NONE && e->ir->regs[task->in[k]].buffer == e->ir->regs[maker->out[0]].buffer)
            return true;
    return false;
}

/* tasks[0 .. count) run together. */
static Code join_tasks(Context *ctx, const Executor *e, Task *tasks, uint32_t count) {
    tasks[0].together = count;
    for (uint32_t m = 0; m < count; m++) {
        int64_t columns = columns_of(e, &tasks[m]);
        if (columns == 0)
            return fail(ctx, CODE_INTERNAL, "group %u: %s (%s) must run alone", tasks[m].instr->group,
                        op_info(tasks[m].instr->op)->name, where_of(e->ir, tasks[m].node));
        tasks[m].head = m;
        for (uint32_t j = 0; j < m; j++) {
            if (!reads_result(e, &tasks[m], &tasks[j])) continue;
            tasks[m].head = tasks[j].head;
            if (columns != columns_of(e, &tasks[j]))
                return fail(ctx, CODE_INTERNAL, "group %u: members that follow each other differ in their parts",
                            tasks[m].instr->group);
        }
    }
    return CODE_OK;
}

static Code make_groups(Context *ctx, Executor *e) {
    for (uint32_t t = 0; t < e->n_tasks; t++) e->tasks[t].together = 1;
    for (uint32_t t = 0, count; t < e->n_tasks; t += count) {
        uint32_t group = e->tasks[t].instr->group;
        for (count = 1; group && t + count < e->n_tasks && e->tasks[t + count].instr->group == group;) count++;
        if (count > NPUIR_GROUP_MOST) return fail(ctx, CODE_INTERNAL, "group %u: too large", group);
        if (count > 1) TRY(join_tasks(ctx, e, &e->tasks[t], count));
    }
    return CODE_OK;
}

Code executor_build(Context *ctx, Executor *e) {
    TRY(make_tasks(ctx, e));
    TRY(make_groups(ctx, e));
    TRY(make_patches(ctx, e));
    TRY(bind_fixed(ctx, e));
    return make_drops(ctx, e);
}
