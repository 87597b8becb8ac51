/* Where the NPU room meets the others: emulation with its weights, sessions for the executor, models for whoever asks.
 */
#include <string.h>

#include "exec/kernel.h"
#include "forge_internal.h"

/* --- emulation ---------------------------------------------------------------------------------------------------- */
typedef struct EmulatedWeights {
    const Graph *graph;
    Precision precision;
} EmulatedWeights;

/* A source whose elements are those of `weight`, wherever its memory is: constant 0 of a graph that has only it. */
static WeightSource source_of(const Tensor *weight, WeightPart part, DType dtype) {
    WeightSource source = {.part = part, .dtype = dtype, .rank = weight->rank};
    memcpy(source.shape, weight->shape, sizeof source.shape);
    memcpy(source.strides, weight->strides, sizeof source.strides);
    return source;
}

typedef struct Fill {
    Graph graph;
    Constant constant;
    Arena arena;
} Fill;

static Code fill_part(Context *ctx, Fill *fill, WeightSource source, int64_t bytes, void **out) {
    source.bytes = bytes;
    TRY(arena_alloc(ctx, &fill->arena, (size_t)bytes, out));
    return weight_fill(ctx, &fill->graph, &source, UINT32_MAX, 0, *out);
}

/* The next index in row-major order; false after the last. */
static bool advance(int64_t *index, const Tensor *t) {
    for (int d = t->rank - 1; d >= 0; d--) {
        if (++index[d] < t->shape[d]) return true;
        index[d] = 0;
    }
    return false;
}

static float quantised(const uint8_t *values, bool i4, int64_t i) {
    if (!i4) return (float)(int8_t)values[i];
    int nibble = values[i / 2] >> (i % 2 * 4) & 15;
    return (float)(nibble < 8 ? nibble : nibble - 16);
}

/* `scales` NULL: `values` are f16. */
static void write_out(const Tensor *out, const void *values, const uint16_t *scales, bool i4) {
    int64_t index[MAX_RANK] = {0}, i = 0;
    do {
        int64_t at = 0;
        for (uint8_t d = 0; d < out->rank; d++) at += index[d] * out->strides[d];
        float x = scales ? quantised(values, i4, i) * f16_to_f32(scales[index[0]])
                         : f16_to_f32(((const uint16_t *)values)[i]);
        i++;
        if (out->dtype == DTYPE_F16)
            ((uint16_t *)out->data)[at] = f32_to_f16(x);
        else if (out->dtype == DTYPE_BF16)
            ((uint16_t *)out->data)[at] = f32_to_bf16(x);
        else
            ((float *)out->data)[at] = x;
    } while (advance(index, out));
}

static Code fill_weight(Context *ctx, Fill *fill, Precision precision, const Tensor *weight, bool linear,
                        const Tensor *out) {
    int64_t count = tensor_count(weight);
    void *values, *scales = NULL;
    bool i4 = precision == PRECISION_W4A16;
    if (!linear || precision == PRECISION_FP16) {
        TRY(fill_part(ctx, fill, source_of(weight, WEIGHT_VALUES, DTYPE_F16), count * 2, &values));
    } else {
        WeightSource source = source_of(weight, WEIGHT_VALUES, i4 ? DTYPE_U8 : DTYPE_I8);
        source.i4 = i4;
        TRY(fill_part(ctx, fill, source, i4 ? (count + 1) / 2 : count, &values));
        source = source_of(weight, WEIGHT_SCALES, DTYPE_F16);
        source.i4 = i4;
        TRY(fill_part(ctx, fill, source, weight->shape[0] * 2, &scales));
    }
    write_out(out, values, scales, i4);
    return CODE_OK;
}

/* What the compiled graphs would have in the weight's place, from the function that fills them. */
static Code emulated_weight(Context *ctx, void *user, const Tensor *weight, bool linear, const Tensor *out) {
    const EmulatedWeights *weights = user;
    Fill fill = {0};
    int64_t extent = 1;
    for (uint8_t d = 0; d < weight->rank; d++) extent += (weight->shape[d] - 1) * weight->strides[d];
    fill.constant = (Constant){.name = "",
                               .data = weight->data,
                               .dtype = weight->dtype,
                               .rank = weight->rank,
                               .shape = weight->shape,
                               .strides = weight->strides,
                               .bytes = extent * (int64_t)dtype_size(weight->dtype)};
    fill.graph.constants = &fill.constant;
    fill.graph.n_constants = 1;
    arena_init(&fill.arena);
    Code code = fill_weight(ctx, &fill, weights->precision, weight, linear, out);
    arena_destroy(&fill.arena);
    return code;
}

/* --- sessions ----------------------------------------------------------------------------------------------------- */
static EmitOptions emit_options(const Target *target, Precision precision, bool f32_types, bool f32_border) {
    return (EmitOptions){.target = target,
                         .precision = precision,
                         .f32_border = f32_border,
                         .f32_weights = f32_types,
                         .forms = emit_default_forms(target, precision)};
}

static Code open_session(Context *ctx, Program *program, const Target *target, const CompileOptions *options) {
    const NpuOptions *npu = &options->npu;
    const SessionOptions session = {
        .plan = {.fold = npu->fold ? FOLD_ALWAYS : FOLD_CONSTANT, .precision = npu->precision},
        .emit = emit_options(target, npu->precision, npu->f32_types, npu->f32_border),
        .config = npu->config ? npu->config : "",
        .cache_dir = npu->cache_dir,
        .blobs = npu->blobs,
        .n_blobs = npu->n_blobs,
        .threads = options->threads,
    };
    double start = forge_now_ms();
    program->device = npu_device_ref(npu->device);
    TRY(npu_session_create(ctx, program->device, program->ir, &program->segments, &session, &program->session));
    program->npu_ms = forge_now_ms() - start;
    return CODE_OK;
}

Code program_executor(Context *ctx, Program *program, const Target *target, const CompileOptions *options) {
    EmulatedWeights weights = {program->graph, options->npu.precision};
    const Emulation emulation = {emulated_weight, &weights}; /* used while the executor is made only */
    ExecutorOptions made = {
        .kernels = cpu_kernel, .threads = options->threads, .pack = options->pack, .packs = program->packs};
    if (options->npu.mode == NPU_MODE_EMULATE) made.emulation = &emulation;
    if (options->npu.mode == NPU_MODE_DISPATCH && program->segments.count) {
        if (!options->npu.device) return fail(ctx, CODE_INVALID, "no device to dispatch to");
        TRY(open_session(ctx, program, target, options));
        made.segments = &program->segments;
        made.backend = npu_session_backend(program->session);
    }
    double start = forge_now_ms();
    TRY(executor_create(ctx, program->ir, &made, &program->executor));
    program->pack_ms += forge_now_ms() - start;
    return CODE_OK;
}

void program_close_device(Program *program) {
    if (program->session) npu_session_destroy(program->session);
    if (program->device) npu_device_unref(program->device);
}

Code forge_upgrade(Context *ctx, Program *program) {
    if (!program->session) return fail(ctx, CODE_INVALID, "the program runs nothing on a device");
    return npu_session_upgrade(ctx, program->session);
}

Code forge_npu_blobs(Context *ctx, const Program *program, BlobVisit visit, void *user, uint32_t *tier,
                     uint32_t *graphs) {
    *tier = *graphs = 0;
    if (!program->session) return CODE_OK;
    return npu_session_blobs(ctx, program->session, visit, user, tier, graphs);
}

/* --- models ------------------------------------------------------------------------------------------------------- */
static Code emit_plan(Context *ctx, Arena *arena, const Program *program, const EmitRequest *request, EmitVisit visit,
                      void *user) {
    const Npuir *ir = program->ir;
    const PlanOptions plan_options = {.fold = request->fold, .precision = request->precision};
    const Target *target = target_find(ir->target);
    if (!target || program->segments.count == 0)
        return fail(ctx, CODE_INVALID, "nothing of the program is on an NPU: there is no model to write");
    EmitOptions options = emit_options(target, request->precision, request->f32_types, request->f32_border);
    if (!request->default_forms) options.forms = request->forms;
    NpuPlan *plan;
    TRY(npu_plan(ctx, arena, ir, &program->segments, &plan_options, &plan));
    for (uint32_t b = 0; b < plan->n_blocks; b++) {
        NpuModel *model;
        TRY(check_cancelled(ctx));
        TRY(npu_emit(ctx, arena, ir, &plan->blocks[b], &options, &model));
        Code code = visit(ctx, user, plan, b, model);
        npu_model_destroy(model);
        TRY(code);
    }
    return CODE_OK;
}

Code forge_emit(Context *ctx, const Program *program, const EmitRequest *request, EmitVisit visit, void *user) {
    Arena arena;
    arena_init(&arena);
    Code code = emit_plan(ctx, &arena, program, request, visit, user);
    arena_destroy(&arena);
    return code;
}
