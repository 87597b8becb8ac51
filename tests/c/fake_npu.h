/* A device that is not there: npu/device.h and the emitter's entry, for tests of sessions. A "graph" carries the
 * address of what was emitted; running it computes the block's instructions with the host kernels, on nothing but its
 * arguments and its weights file. Objects alive and calls are counted; any call can be made to fail. */
#ifndef FORGE_TESTS_FAKE_NPU_H
#define FORGE_TESTS_FAKE_NPU_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "check.h"
#include "cpu/move.h"
#include "exec/kernel.h"
#include "npu/device.h"
#include "npu/npu.h"
#include "npuir/view.h"

struct NpuDevice {
    atomic_int references, graphs, memories, lists, uploads_bytes;
    atomic_int runs, executions, compiled;
    atomic_int fail_at; /* the call with this number fails; 0: none */
    NpuReason reason;
    bool imports, import_fails;
    atomic_int imported;
};

/* --- host side: one instruction -------------------------------------------------------------------------------------
 */
static inline Tensor register_tensor(const Register *r, void *base) {
    Tensor t = {.dtype = r->dtype, .rank = r->rank};
    memcpy(t.shape, r->shape, r->rank * sizeof *r->shape);
    memcpy(t.strides, r->strides, r->rank * sizeof *r->strides);
    t.data = (char *)base + r->offset * (int64_t)dtype_size(r->dtype);
    return t;
}

static inline Tensor row_major(const Tensor *like, void *data) {
    Tensor t = *like;
    view_dense_strides(t.rank, t.shape, NULL, t.strides);
    t.data = data;
    return t;
}

static inline size_t tensor_bytes(const Tensor *t) { return (size_t)tensor_count(t) * dtype_size(t->dtype); }

static inline void *new_bytes(size_t n) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, n ? n : 64)) abort();
    return memory;
}

enum { MOST_OPERANDS = 20 };

/* Absent operands have no data. A host call halves its first operand and adds the number of the result. */
static inline Code evaluate(Context *ctx, const Graph *g, const Instr *instr, const Tensor *in, const Tensor *out) {
    Tensor operands[MOST_OPERANDS] = {{0}}, results[2] = {{0}};
    void *made[MOST_OPERANDS + 3] = {NULL};
    uint32_t n = 0;
    Code code = CODE_OK;
    for (uint32_t k = 0; k < instr->n_in; k++) {
        if (!in[k].data) continue;
        made[n] = new_bytes(tensor_bytes(&in[k]));
        operands[k] = row_major(&in[k], made[n++]);
        tensor_copy(NULL, &operands[k], &in[k]);
    }
    for (uint32_t k = 0; k < instr->n_out; k++) {
        if (!out[k].data) continue;
        made[n] = new_bytes(tensor_bytes(&out[k]));
        results[k] = row_major(&out[k], made[n++]);
    }
    if (instr->op == OP_host) {
        for (uint32_t k = 0; k < instr->n_out; k++) {
            float *y = results[k].data;
            const float *x = operands[0].data;
            for (int64_t i = 0; y && i < tensor_count(&results[k]); i++) y[i] = 0.5f * x[i] + (float)k;
        }
    } else {
        const Kernel *kernel = cpu_kernel(instr->op);
        int64_t scratch = kernel->scratch ? kernel->scratch(g, instr->node, 1) : 0;
        made[n] = new_bytes((size_t)scratch);
        KernelCall call = {.ctx = ctx,
                           .node = instr->node,
                           .in = operands,
                           .out = results,
                           .n_in = instr->n_in,
                           .n_out = instr->n_out,
                           .scratch = made[n++]};
        code = kernel->run(&call);
    }
    for (uint32_t k = 0; k < instr->n_out; k++) {
        if (out[k].data) tensor_copy(NULL, &out[k], &results[k]);
    }
    for (uint32_t i = 0; i < n; i++) free(made[i]);
    return code;
}

/* --- the emitter ----------------------------------------------------------------------------------------------------
 */
typedef struct Emitted {
    const Npuir *ir;
    const NpuBlock *block;
    NpuModel *model;
    bool f32;
    /* Operand k of instruction j: number[j * MOST_OPERANDS + k] is the argument or, negative, the piece -number - 1. */
    int *number;
} Emitted;

static inline DType device_dtype(DType dtype, bool f32) {
    return dtype_is_float(dtype) ? f32 ? DTYPE_F32 : DTYPE_F16 : dtype;
}

static inline Port port_of(const Emitted *e, const EmitOptions *options, RegId reg, bool output) {
    const Register *r = &e->ir->regs[reg];
    Port port = {.value = r->value, .dtype = device_dtype(r->dtype, options->f32_border), .rank = r->rank};
    memcpy(port.shape, r->shape, r->rank * sizeof *r->shape);
    if (output && e->block->columns) port.shape[r->rank - 1] = e->block->columns;
    port.bytes = view_count(port.rank, port.shape) * (int64_t)dtype_size(port.dtype);
    return port;
}

Code npu_emit(Context *ctx, Arena *arena, const Npuir *ir, const NpuBlock *block, const EmitOptions *options,
              NpuModel **out) {
    Emitted *e;
    NpuModel *m;
    *out = NULL;
    TRY(ARENA_NEW(ctx, arena, 1, &e));
    TRY(ARENA_NEW(ctx, arena, 1, &m));
    *e = (Emitted){.ir = ir, .block = block, .model = m, .f32 = options->f32_weights};
    TRY(ARENA_NEW(ctx, arena, block->n_instrs * MOST_OPERANDS, &e->number));
    TRY(ARENA_NEW(ctx, arena, block->n_instrs * MOST_OPERANDS, &m->args));
    TRY(ARENA_NEW(ctx, arena, block->n_instrs * MOST_OPERANDS, &m->pieces));
    TRY(ARENA_NEW(ctx, arena, block->n_instrs * MOST_OPERANDS, &m->offsets));
    TRY(ARENA_NEW(ctx, arena, block->n_in, &m->in));
    TRY(ARENA_NEW(ctx, arena, block->n_out, &m->out));
    for (uint32_t k = 0; k < block->n_in; k++) m->in[m->n_in++] = port_of(e, options, block->in[k], false);
    for (uint32_t k = 0; k < block->n_out; k++) m->out[m->n_out++] = port_of(e, options, block->out[k], true);
    for (uint32_t j = 0; j < block->n_instrs; j++) {
        const Instr *instr = &ir->instrs[block->instrs[j]];
        for (uint32_t k = 0; k < instr->n_in; k++) {
            if (instr->in[k] == REG_NONE) continue;
            const Register *r = &ir->regs[instr->in[k]];
            const Buffer *b = &ir->buffers[r->buffer];
            if (b->space != SPACE_CONSTANT) continue;
            WeightSource source = {.part = WEIGHT_VALUES,
                                   .constant = b->index,
                                   .dtype = device_dtype(r->dtype, options->f32_weights),
                                   .rank = r->rank,
                                   .offset = r->offset};
            memcpy(source.shape, r->shape, r->rank * sizeof *r->shape);
            memcpy(source.strides, r->strides, r->rank * sizeof *r->strides);
            if (block->columns) {
                source.shape[0] = block->columns;
                source.offset += block->first_column * source.strides[0];
            }
            source.bytes = view_count(r->rank, source.shape) * (int64_t)dtype_size(source.dtype);
            bool argument = false;
            for (uint32_t w = 0; w < block->n_weights; w++) argument = argument || block->weights[w] == b->index;
            if (argument) {
                e->number[j * MOST_OPERANDS + k] = (int)m->n_args;
                m->args[m->n_args++] = source;
            } else {
                e->number[j * MOST_OPERANDS + k] = -(int)m->n_pieces - 1;
                m->offsets[m->n_pieces] = m->bin_bytes;
                m->pieces[m->n_pieces++] = source;
                m->bin_bytes += (source.bytes + 63) / 64 * 64;
            }
        }
    }
    text_init(&m->xml);
    text_add(&m->xml, "%p", (void *)e);
    *out = m;
    return text_done(ctx, &m->xml);
}

void npu_model_destroy(NpuModel *model) {
    if (model) text_destroy(&model->xml);
}

/* --- the device ------------------------------------------------------------------------------------------------------
 */
struct NpuGraph {
    NpuDevice *device;
    const Emitted *e;
    char *bin;
    NpuArgument *arguments;
    uint32_t n;
};

typedef struct Recorded {
    NpuGraph *graph;
    void **arguments;
} Recorded;
struct NpuList {
    NpuDevice *device;
    Recorded *items;
    uint32_t n;
    bool closed;
};

static inline Code maybe_fail(Context *ctx, NpuDevice *device, const char *what) {
    if (atomic_load(&device->fail_at) && atomic_fetch_sub(&device->fail_at, 1) == 1)
        return fail_device(ctx, device->reason ? device->reason : NPU_FAILED, "%s fails", what);
    return CODE_OK;
}

NpuDevice *npu_device_ref(NpuDevice *device) {
    atomic_fetch_add(&device->references, 1);
    return device;
}
void npu_device_unref(NpuDevice *device) { atomic_fetch_sub(&device->references, 1); }

Code npu_graph_create(Context *ctx, NpuDevice *device, const NpuGraphDesc *desc, NpuGraph **out, NpuMade *made) {
    *out = NULL;
    TRY(maybe_fail(ctx, device, "graph"));
    NpuGraph *g = calloc(1, sizeof *g);
    void *emitted = NULL;
    if (sscanf(desc->xml, "%p", &emitted) != 1) return fail(ctx, CODE_INTERNAL, "not a graph");
    *g = (NpuGraph){.device = device, .e = emitted, .bin = new_bytes((size_t)desc->bin_bytes)};
    Code code = desc->fill(ctx, desc->user, g->bin, desc->bin_bytes);
    if (code != CODE_OK) {
        free(g->bin);
        free(g);
        return code;
    }
    const NpuModel *m = g->e->model;
    g->arguments = calloc(m->n_in + m->n_args + m->n_out + 1, sizeof *g->arguments);
    for (uint32_t k = m->n_args; k-- > 0;) { /* in an order of its own */
        NpuArgument *a = &g->arguments[g->n++];
        *a = (NpuArgument){.dtype = m->args[k].dtype, .bytes = m->args[k].bytes};
        snprintf(a->name, sizeof a->name, "w%u", k);
    }
    for (uint32_t k = 0; k < m->n_in; k++) {
        NpuArgument *a = &g->arguments[g->n++];
        *a = (NpuArgument){.dtype = m->in[k].dtype, .bytes = m->in[k].bytes};
        snprintf(a->name, sizeof a->name, "in%u", k);
    }
    for (uint32_t k = 0; k < m->n_out; k++) {
        NpuArgument *a = &g->arguments[g->n++];
        *a = (NpuArgument){.output = true, .dtype = m->out[k].dtype, .bytes = m->out[k].bytes};
        snprintf(a->name, sizeof a->name, "out%u", k);
    }
    atomic_fetch_add(&device->graphs, 1);
    code = desc->accept ? desc->accept(ctx, desc->user, g) : CODE_OK;
    if (code != CODE_OK) {
        npu_graph_destroy(g);
        return code;
    }
    atomic_fetch_add(&device->compiled, 1);
    if (made) *made = (NpuMade){NPU_COMPILED, NPU_NONE};
    *out = g;
    return CODE_OK;
}
void npu_graph_destroy(NpuGraph *g) {
    atomic_fetch_sub(&g->device->graphs, 1);
    free(g->arguments);
    free(g->bin);
    free(g);
}
uint32_t npu_graph_arguments(const NpuGraph *g) { return g->n; }
const NpuArgument *npu_graph_argument(const NpuGraph *g, uint32_t index) { return &g->arguments[index]; }
Code npu_graph_blob(Context *ctx, NpuGraph *g, const char *cache_dir, NpuBlob *out, void **own) {
    TRY(maybe_fail(ctx, g->device, "blob"));
    *own = cache_dir ? strdup(cache_dir) : NULL; /* to be freed */
    *out = (NpuBlob){.data = g->bin, .bytes = (size_t)g->e->model->bin_bytes};
    return CODE_OK;
}
int64_t npu_graph_blob_bytes(NpuGraph *g) { return 1000 + g->e->model->bin_bytes; }

Code npu_memory_alloc(Context *ctx, NpuDevice *device, int64_t bytes, void **out) {
    *out = NULL;
    TRY(maybe_fail(ctx, device, "memory"));
    *out = new_bytes((size_t)bytes);
    memset(*out, 0xff, (size_t)bytes); /* NaN */
    atomic_fetch_add(&device->memories, 1);
    return CODE_OK;
}
Code npu_memory_import(Context *ctx, NpuDevice *device, void *memory, int64_t bytes, void **out) {
    (void)bytes;
    *out = NULL;
    TRY(maybe_fail(ctx, device, "import"));
    if (!device->imports) return CODE_OK;
    *out = (void *)((uintptr_t)memory | 1); /* told apart when it is freed */
    atomic_fetch_add(&device->imported, 1);
    return CODE_OK;
}
void npu_memory_free(NpuDevice *device, void *memory) {
    if ((uintptr_t)memory & 1) {
        atomic_fetch_sub(&device->imported, 1);
        return;
    }
    atomic_fetch_sub(&device->memories, 1);
    free(memory);
}

Code npu_list_create(Context *ctx, NpuDevice *device, NpuList **out) {
    *out = NULL;
    TRY(maybe_fail(ctx, device, "list"));
    *out = calloc(1, sizeof **out);
    (*out)->device = device;
    atomic_fetch_add(&device->lists, 1);
    return CODE_OK;
}
Code npu_list_append(Context *ctx, NpuList *list, NpuGraph *graph, void *const *arguments) {
    TRY(maybe_fail(ctx, list->device, "append"));
    CHECK(!list->closed);
    list->items = realloc(list->items, (list->n + 1) * sizeof *list->items);
    Recorded *r = &list->items[list->n++];
    *r = (Recorded){graph, calloc(graph->n + 1, sizeof(void *))};
    for (uint32_t i = 0; i < graph->n; i++) {
        CHECK(arguments[i] != NULL);
        r->arguments[i] = (void *)((uintptr_t)arguments[i] & ~(uintptr_t)1);
    }
    return CODE_OK;
}
Code npu_list_close(Context *ctx, NpuList *list) {
    TRY(maybe_fail(ctx, list->device, "close"));
    list->closed = true;
    return CODE_OK;
}
void npu_list_destroy(NpuList *list) {
    atomic_fetch_sub(&list->device->lists, 1);
    for (uint32_t i = 0; i < list->n; i++) free(list->items[i].arguments);
    free(list->items);
    free(list);
}

static inline void convert_floats(DType from_type, const void *from, DType to_type, void *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (from_type == to_type) {
            memcpy((char *)to + (size_t)i * dtype_size(to_type), (const char *)from + (size_t)i * dtype_size(to_type),
                   dtype_size(to_type));
            continue;
        }
        float x = from_type == DTYPE_F16 ? f16_to_f32(((const uint16_t *)from)[i]) : ((const float *)from)[i];
        if (to_type == DTYPE_F16)
            ((uint16_t *)to)[i] = f32_to_f16(x);
        else
            ((float *)to)[i] = x;
    }
}

static inline void *argument_of(const Recorded *r, const char *prefix, uint32_t number) {
    char name[64];
    snprintf(name, sizeof name, "%s%u", prefix, number);
    for (uint32_t i = 0; i < r->graph->n; i++) {
        if (strcmp(r->graph->arguments[i].name, name) == 0) return r->arguments[i];
    }
    return NULL;
}

static inline Code execute(Context *ctx, const Recorded *r) {
    const Emitted *e = r->graph->e;
    const Npuir *ir = e->ir;
    const NpuBlock *block = e->block;
    const NpuModel *m = e->model;
    Arena arena;
    char **base;
    arena_init(&arena);
    Code code = ARENA_NEW(ctx, &arena, ir->n_buffers, &base);
    for (uint32_t k = 0; k < m->n_in && code == CODE_OK; k++) {
        const Register *reg = &ir->regs[block->in[k]];
        void *dense;
        code = arena_alloc(ctx, &arena, (size_t)ir->buffers[reg->buffer].bytes, (void **)&base[reg->buffer]);
        Tensor there = register_tensor(reg, base[reg->buffer]);
        if (code == CODE_OK) code = arena_alloc(ctx, &arena, tensor_bytes(&there), &dense);
        if (code != CODE_OK) break;
        Tensor from = row_major(&there, dense);
        convert_floats(m->in[k].dtype, argument_of(r, "in", k), reg->dtype, dense, tensor_count(&there));
        tensor_copy(NULL, &there, &from);
    }
    for (uint32_t j = 0; j < block->n_instrs && code == CODE_OK; j++) {
        const Instr *instr = &ir->instrs[block->instrs[j]];
        Tensor in[MOST_OPERANDS] = {{0}}, out[2] = {{0}};
        for (uint32_t k = 0; k < instr->n_in && code == CODE_OK; k++) {
            if (instr->in[k] == REG_NONE) continue;
            const Register *reg = &ir->regs[instr->in[k]];
            if (ir->buffers[reg->buffer].space != SPACE_CONSTANT) {
                CHECK(base[reg->buffer] != NULL);
                in[k] = register_tensor(reg, base[reg->buffer]);
                continue;
            }
            int number = e->number[j * MOST_OPERANDS + k];
            const WeightSource *source = number >= 0 ? &m->args[number] : &m->pieces[-number - 1];
            const void *from =
                number >= 0 ? argument_of(r, "w", (uint32_t)number) : r->graph->bin + m->offsets[-number - 1];
            Tensor shape = register_tensor(reg, NULL);
            memcpy(shape.shape, source->shape, sizeof shape.shape);
            void *dense;
            code = arena_alloc(ctx, &arena, tensor_bytes(&shape), &dense);
            if (code != CODE_OK) break;
            convert_floats(source->dtype, from, reg->dtype, dense, tensor_count(&shape));
            in[k] = row_major(&shape, dense);
        }
        for (uint32_t k = 0; k < instr->n_out && code == CODE_OK; k++) {
            if (instr->out[k] == REG_NONE) continue;
            const Register *reg = &ir->regs[instr->out[k]];
            code = arena_alloc(ctx, &arena, (size_t)ir->buffers[reg->buffer].bytes, (void **)&base[reg->buffer]);
            out[k] = register_tensor(reg, base[reg->buffer]);
            if (!block->columns) continue;
            out[k].shape[reg->rank - 1] = block->columns;
            out[k] = row_major(&out[k], base[reg->buffer]);
        }
        if (code == CODE_OK) code = evaluate(ctx, ir->graph, instr, in, out);
    }
    for (uint32_t k = 0; k < m->n_out && code == CODE_OK; k++) {
        const Register *reg = &ir->regs[block->out[k]];
        Tensor there = register_tensor(reg, base[reg->buffer]);
        if (block->columns) {
            there.shape[reg->rank - 1] = block->columns;
            there = row_major(&there, base[reg->buffer]);
        }
        void *dense;
        code = arena_alloc(ctx, &arena, tensor_bytes(&there), &dense);
        if (code != CODE_OK) break;
        Tensor to = row_major(&there, dense);
        tensor_copy(NULL, &to, &there);
        convert_floats(reg->dtype, dense, m->out[k].dtype, argument_of(r, "out", k), tensor_count(&there));
    }
    arena_destroy(&arena);
    return code;
}

Code npu_list_run(Context *ctx, NpuList *list) {
    TRY(maybe_fail(ctx, list->device, "run"));
    CHECK(list->closed);
    atomic_fetch_add(&list->device->runs, 1);
    for (uint32_t i = 0; i < list->n; i++) {
        TRY(execute(ctx, &list->items[i]));
        atomic_fetch_add(&list->device->executions, 1);
    }
    return CODE_OK;
}

#endif
