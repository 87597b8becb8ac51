/* Compiles a program one way: plan, models, then graphs and weights together on a few threads. */
#include <stdlib.h>
#include <string.h>

#include "npu/session.h"

/* --- arguments of a compiled graph -------------------------------------------------------------------------------- */
/* "w12" is argument 12 of kind 'w'. */
static bool read_name(const char *name, const char *prefix, uint32_t *number) {
    size_t length = strlen(prefix);
    uint32_t n = 0;
    if (strncmp(name, prefix, length) != 0 || !name[length]) return false;
    for (const char *at = name + length; *at; at++) {
        if (*at < '0' || *at > '9' || n > 1000000) return false;
        n = 10 * n + (uint32_t)(*at - '0');
    }
    *number = n;
    return true;
}

/* Drivers may call a byte what is a boolean to the model. */
static bool same_dtype(DType a, DType b) {
    bool bytes = (a == DTYPE_BOOL || a == DTYPE_U8) && (b == DTYPE_BOOL || b == DTYPE_U8);
    return a == b || bytes;
}

static Code unexpected(Context *ctx, const NpuArgument *argument, DType dtype, int64_t bytes) {
    return fail_device(ctx, NPU_COMPILE_FAILED, "the driver compiled argument '%s' as %s of %lld bytes, not %s of %lld",
                       argument->name, argument->i4 ? "i4" : dtype_name(argument->dtype), (long long)argument->bytes,
                       dtype_name(dtype), (long long)bytes);
}

static Code bind_argument(Context *ctx, const NpuModel *model, const NpuArgument *argument, Binding *out) {
    uint32_t k;
    if (argument->output && read_name(argument->name, "out", &k) && k < model->n_out) {
        *out = (Binding){BIND_OUT, k};
        if (!same_dtype(argument->dtype, model->out[k].dtype) || argument->bytes != model->out[k].bytes)
            return unexpected(ctx, argument, model->out[k].dtype, model->out[k].bytes);
        return CODE_OK;
    }
    if (!argument->output && read_name(argument->name, "in", &k) && k < model->n_in) {
        *out = (Binding){BIND_IN, k};
        if (!same_dtype(argument->dtype, model->in[k].dtype) || argument->bytes != model->in[k].bytes)
            return unexpected(ctx, argument, model->in[k].dtype, model->in[k].bytes);
        return CODE_OK;
    }
    if (!argument->output && read_name(argument->name, "w", &k) && k < model->n_args) {
        const WeightSource *source = &model->args[k];
        *out = (Binding){BIND_WEIGHT, k};
        bool i4 = source->i4 && source->part == WEIGHT_VALUES; /* the scales of an i4 weight are floats */
        if (argument->i4 != i4 || argument->bytes != source->bytes ||
            !(i4 || same_dtype(argument->dtype, source->dtype)))
            return unexpected(ctx, argument, source->dtype, source->bytes);
        return CODE_OK;
    }
    return fail_device(ctx, NPU_COMPILE_FAILED, "the driver lists an argument '%s' that the model has not",
                       argument->name);
}

static uint32_t count_arguments(const NpuModel *model) { return model->n_in + model->n_args + model->n_out; }

/* `bindings`: as many as the model has arguments. */
static Code bind_arguments(Context *ctx, const NpuModel *model, const NpuGraph *graph, Binding *bindings) {
    uint32_t n = npu_graph_arguments(graph), expected = count_arguments(model);
    if (n != expected)
        return fail_device(ctx, NPU_COMPILE_FAILED, "the driver lists %u arguments of a graph, not %u", n, expected);
    for (uint32_t i = 0; i < n; i++) {
        TRY(bind_argument(ctx, model, npu_graph_argument(graph, i), &bindings[i]));
        for (uint32_t k = 0; k < i; k++) {
            if (bindings[k].kind == bindings[i].kind && bindings[k].index == bindings[i].index)
                return fail_device(ctx, NPU_COMPILE_FAILED, "the driver lists argument '%s' twice",
                                   npu_graph_argument(graph, i)->name);
        }
    }
    return CODE_OK;
}

/* --- jobs --------------------------------------------------------------------------------------------------------- */
typedef struct Build {
    Tier *tier;
    const SessionOptions *options;
    const char **what; /* of each block, for messages */
    uint32_t *order;   /* of blocks, largest first */
    atomic_uint origins[NPU_ORIGIN_COUNT];
    atomic_uint n_refused, refused; /* SessionReport's blobs_refused and refused */
    atomic_uint left;               /* graphs to come */
    Progress *progress;
    double start;
    double compiled_ms; /* written by who compiles the last one */
} Build;

typedef struct Making { /* of one graph */
    const Graph *graph;
    const NpuModel *model;
    Binding *bindings;
    const char *what;
} Making;

static Code fill_bin(Context *ctx, void *user, void *out, int64_t bytes) {
    const Making *making = user;
    if (bytes != making->model->bin_bytes)
        return fail(ctx, CODE_INTERNAL, "weights of %lld bytes into %lld", (long long)making->model->bin_bytes,
                    (long long)bytes);
    return npu_model_bin(ctx, making->graph, making->model, out);
}

static Code accept(Context *ctx, void *user, const NpuGraph *graph) {
    const Making *making = user;
    Code code = bind_arguments(ctx, making->model, graph, making->bindings);
    if (code != CODE_OK) fail_prefix(ctx, "%s", making->what);
    return code;
}

static Code compile_block(Context *ctx, Build *b, uint32_t block) {
    Tier *tier = b->tier;
    NpuModel *model = tier->models[block];
    Making making = {tier->ir->graph, model, tier->bindings[block], b->what[block]};
    NpuMade made;
    const NpuGraphDesc desc = {.xml = model->xml.data,
                               .xml_bytes = model->xml.size,
                               .bin_bytes = model->bin_bytes,
                               .fill = fill_bin,
                               .accept = accept,
                               .user = &making,
                               .config = b->options->config ? b->options->config : "",
                               .cache_dir = b->options->cache_dir,
                               .blobs = b->options->blobs,
                               .n_blobs = b->options->n_blobs,
                               .what = b->what[block]};
    TRY(npu_graph_create(ctx, tier->device, &desc, &tier->graphs[block], &made));
    npu_model_destroy(model);
    text_init(&model->xml);
    atomic_fetch_add(&b->origins[made.origin], 1);
    if (made.refused != NPU_NONE) {
        atomic_fetch_add(&b->n_refused, 1);
        atomic_store(&b->refused, made.refused);
    }
    progress_add(b->progress, 1);
    if (atomic_fetch_sub(&b->left, 1) == 1) b->compiled_ms = session_now_ms() - b->start;
    return CODE_OK;
}

static Code run_job(Context *ctx, void *user, uint32_t job) {
    Build *b = user;
    Tier *tier = b->tier;
    if (job < tier->plan->n_blocks) return compile_block(ctx, b, b->order[job]);
    return weights_fill(ctx, tier->ir->graph, &tier->weights, job - tier->plan->n_blocks);
}

/* --- all ---------------------------------------------------------------------------------------------------------- */
/* "segment 0: 12 instructions from model.py:31 in forward (rms_norm, linear, ...)". */
static Code describe(Context *ctx, Tier *tier, uint32_t block, const char **out) {
    enum { LISTED = 6 };
    const Npuir *ir = tier->ir;
    const NpuBlock *b = &tier->plan->blocks[block];
    const char *where = NULL;
    Text text;
    char *copy;
    for (uint32_t i = 0; i < b->n_instrs && !where; i++) {
        int32_t source = ir->instrs[b->instrs[i]].node->source;
        if (source >= 0 && (uint32_t)source < ir->graph->n_sources) where = ir->graph->sources[source];
    }
    text_init(&text);
    text_add(&text, "%s of %u instruction%s",
             b->columns       ? "column tile"
             : b->n_calls > 1 ? "repeated block"
                              : "block",
             b->n_instrs, b->n_instrs == 1 ? "" : "s");
    for (uint32_t i = 0; i < b->n_instrs && i < LISTED; i++)
        text_add(&text, "%s%s", i ? ", " : " (", op_info(ir->instrs[b->instrs[i]].op)->name);
    text_add(&text, "%s) from %s", b->n_instrs > LISTED ? ", ..." : "", where ? where : "unknown source");
    Code code = text_done(ctx, &text);
    if (code == CODE_OK) code = arena_string(ctx, &tier->memory, text.data, &copy);
    text_destroy(&text);
    if (code == CODE_OK) *out = copy;
    return code;
}

static Code emit_models(Context *ctx, Tier *tier, const SessionOptions *options, Build *b) {
    const NpuPlan *plan = tier->plan;
    double start = session_now_ms();
    TRY(ARENA_NEW(ctx, &tier->memory, plan->n_blocks, &tier->models));
    TRY(ARENA_NEW(ctx, &tier->memory, plan->n_blocks, &tier->graphs));
    TRY(ARENA_NEW(ctx, &tier->memory, plan->n_blocks, &tier->bindings));
    TRY(ARENA_NEW(ctx, &tier->memory, plan->n_blocks, &b->what));
    TRY(ARENA_NEW(ctx, &tier->memory, plan->n_blocks, &b->order));
    for (uint32_t i = 0; i < plan->n_blocks; i++) {
        TRY(check_cancelled(ctx));
        TRY(describe(ctx, tier, i, &b->what[i]));
        TRY(npu_emit(ctx, &tier->memory, tier->ir, &plan->blocks[i], &options->emit, &tier->models[i]));
        TRY(ARENA_NEW(ctx, &tier->memory, count_arguments(tier->models[i]), &tier->bindings[i]));
        uint32_t at = i;
        for (; at > 0 && plan->blocks[b->order[at - 1]].n_instrs < plan->blocks[i].n_instrs; at--)
            b->order[at] = b->order[at - 1];
        b->order[at] = i;
    }
    tier->report.emit_ms = session_now_ms() - start;
    return CODE_OK;
}

/* No other way of compiling is faster to run: weights lie in the graphs, or would be cut no better if they did. */
static bool is_final(const NpuPlan *plan, Fold fold) {
    if (fold != FOLD_ALWAYS) return true;
    for (uint32_t b = 0; b < plan->n_blocks; b++) {
        if (plan->blocks[b].n_weights) return false;
    }
    return plan->n_calls == plan->segments.count;
}

static Code build(Context *ctx, Tier *tier, const Segments *segments, const SessionOptions *options, Fold fold) {
    PlanOptions plan_options = options->plan;
    Build b = {.tier = tier, .options = options, .progress = ctx->progress};
    SessionReport *report = &tier->report;
    plan_options.fold = fold;
    if (segments->count == 0) return fail(ctx, CODE_INVALID, "the program runs nothing on the NPU");
    TRY(npu_plan(ctx, &tier->memory, tier->ir, segments, &plan_options, &tier->plan));
    const NpuPlan *plan = tier->plan;
    TRY(emit_models(ctx, tier, options, &b));
    TRY(values_plan(ctx, &tier->memory, plan, tier->models, &tier->values));
    b.start = session_now_ms();
    TRY(weights_plan(ctx, &tier->memory, tier->device, plan, tier->models, &tier->weights));
    for (int i = 0; i < NPU_ORIGIN_COUNT; i++) atomic_init(&b.origins[i], 0);
    atomic_init(&b.n_refused, 0);
    atomic_init(&b.refused, NPU_NONE);
    atomic_init(&b.left, plan->n_blocks);
    progress_begin(ctx->progress, PHASE_NPU, plan->n_blocks);
    TRY(jobs_run(ctx, options->threads, plan->n_blocks + tier->weights.count, run_job, &b));
    report->compile_ms = b.compiled_ms;
    report->weights_ms = session_now_ms() - b.start - b.compiled_ms;
    for (uint32_t i = 0; i < plan->n_blocks; i++) report->blob_bytes += npu_graph_blob_bytes(tier->graphs[i]);
    tier->number = report->tier = is_final(plan, fold);
    report->n_segments = segments->count;
    report->n_blocks = plan->n_blocks;
    report->n_calls = plan->n_calls;
    report->compiled = atomic_load(&b.origins[NPU_COMPILED]);
    report->cache_hits = atomic_load(&b.origins[NPU_FROM_CACHE]);
    report->blob_hits = atomic_load(&b.origins[NPU_FROM_BLOB]);
    report->blobs_refused = atomic_load(&b.n_refused);
    report->refused = atomic_load(&b.refused);
    report->weight_bytes = tier->weights.bytes;
    return CODE_OK;
}

static void destroy(Tier *tier) {
    for (uint32_t i = 0; tier->plan && i < tier->plan->n_blocks; i++) {
        if (tier->graphs && tier->graphs[i]) npu_graph_destroy(tier->graphs[i]);
        if (tier->models) npu_model_destroy(tier->models[i]);
    }
    weights_free(tier->device, &tier->weights);
    npu_device_unref(tier->device);
    Arena memory = tier->memory; /* which holds `tier` itself */
    arena_destroy(&memory);
}

Code tier_create(Context *ctx, NpuDevice *device, const Npuir *ir, const Segments *segments,
                 const SessionOptions *options, Fold fold, Tier **out) {
    Arena memory;
    Tier *tier;
    *out = NULL;
    arena_init(&memory);
    Code code = ARENA_NEW(ctx, &memory, 1, &tier);
    if (code != CODE_OK) {
        arena_destroy(&memory);
        return code;
    }
    tier->memory = memory;
    tier->ir = ir;
    tier->device = npu_device_ref(device);
    atomic_init(&tier->references, 1);
    code = build(ctx, tier, segments, options, fold);
    if (code == CODE_OK)
        *out = tier;
    else
        destroy(tier);
    return code;
}

void tier_unref(Tier *tier) {
    if (atomic_fetch_sub(&tier->references, 1) == 1) destroy(tier);
}
