/* The whole pipeline as straight calls: table -> graph -> passes -> NPUIR -> schedule -> allocation -> executor, with a
 * verifier between them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "exec/kernel.h"
#include "forge_internal.h"
#include "passes/autotune.h"

static const char default_passes[] =
    "dce,cse,fold,device_constant,cse,dce,dequantise,attention_fusion,dce,cache_update,operator_fusion,cse,dce,layout";
enum { MAX_PASSES = 64, AUTOTUNE_MS = 200 };

double forge_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

void compile_options_default(CompileOptions *options) {
    *options = (CompileOptions){.target = "cpu",
                                .passes = "default",
                                .alpha = 1.0,
                                .executable = true,
                                .pack = true,
                                .schedule = true,
                                .threads = 1};
}

/* --- names of passes ---------------------------------------------------------------------------------------------- */

typedef struct Pipeline {
    const Pass *passes[MAX_PASSES];
    size_t count;
} Pipeline;

static Code unknown_pass(Context *ctx, const char *name, size_t length) {
    char known[256] = "";
    size_t count;
    const Pass *table = pass_table(&count);
    for (size_t i = 0; i < count; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", table[i].name);
    }
    return fail(ctx, CODE_INVALID, "unknown pass '%.*s'; known are %s (or \"default\", \"none\")", (int)length, name,
                known);
}

static Code parse_pipeline(Context *ctx, const char *names, Pipeline *out) {
    out->count = 0;
    if (!names || strcmp(names, "default") == 0) names = default_passes;
    if (strcmp(names, "none") == 0 || names[0] == 0) return CODE_OK;
    for (const char *at = names;; at++) {
        at += strspn(at, " ");
        size_t field = strcspn(at, ","), length = field;
        while (length > 0 && at[length - 1] == ' ') length--;
        const Pass *pass = pass_find(at, length);
        if (!pass) return unknown_pass(ctx, at, length < 64 ? length : 64);
        if (out->count == MAX_PASSES) return fail(ctx, CODE_INVALID, "more than %d passes", MAX_PASSES);
        out->passes[out->count++] = pass;
        at += field;
        if (*at == 0) return CODE_OK;
    }
}

/* Precision is no matter of taste, as passes are: it is seen to whatever passes were asked for, after them. */
static Code add_quantise(Context *ctx, Pipeline *pipeline) {
    static const char name[] = "quantise";
    for (size_t i = 0; i < pipeline->count; i++)
        if (strcmp(pipeline->passes[i]->name, name) == 0) return CODE_OK;
    if (pipeline->count == MAX_PASSES) return fail(ctx, CODE_INVALID, "more than %d passes", MAX_PASSES);
    pipeline->passes[pipeline->count++] = pass_find(name, strlen(name));
    return CODE_OK;
}

/* --- passes ------------------------------------------------------------------------------------------------------- */

static Code graph_text(Context *ctx, const Graph *g, char **out) {
    Text text;
    text_init(&text);
    Code code = graph_print(ctx, g, &text);
    if (code == CODE_OK) code = text_done(ctx, &text);
    if (code != CODE_OK) {
        text_destroy(&text);
        return code;
    }
    *out = text.data; /* the program frees it */
    return CODE_OK;
}

static Code score_of(Context *ctx, const Graph *g, void *target, double *score) {
    Cost cost;
    TRY(graph_cost(ctx, g, target, &cost));
    *score = cost.score;
    return CODE_OK;
}

/* The first pass whose options autotune searches. */
static size_t first_tunable(const Pipeline *pipeline) {
    size_t i = 0;
    while (i < pipeline->count && strcmp(pipeline->passes[i]->name, "operator_fusion") != 0 &&
           strcmp(pipeline->passes[i]->name, "layout") != 0)
        i++;
    return i;
}

static Code run_passes(PassContext *pc, Graph *g, const Pipeline *pipeline, const Target *target,
                       const CompileOptions *options, Program *program) {
    Context *ctx = pc->ctx;
    double cost;
    void *user = (void *)target;
    size_t tune_at = options->autotune ? first_tunable(pipeline) : pipeline->count;
    TRY(ARENA_NEW(ctx, &program->arena, pipeline->count, &program->passes));
    TRY(score_of(ctx, g, user, &cost));
    progress_begin(ctx->progress, PHASE_PASSES, (int64_t)pipeline->count);
    for (size_t i = 0; i < pipeline->count; i++) {
        if (i == tune_at) TRY(autotune(pc, g, pipeline->passes + i, pipeline->count - i, score_of, user, AUTOTUNE_MS));
        const Pass *pass = pipeline->passes[i];
        PassRecord *record = &program->passes[program->n_passes++];
        *record = (PassRecord){.name = pass->name, .nodes_before = graph_count(g), .cost_before = cost};
        TRY(check_cancelled(ctx));
        double start = forge_now_ms();
        Code code = pass->run(pc, g);
        record->ms = forge_now_ms() - start;
        if (code == CODE_OK) code = graph_verify(ctx, g);
        if (code != CODE_OK) {
            fail_prefix(ctx, "pass %s", pass->name);
            return code;
        }
        TRY(score_of(ctx, g, user, &cost));
        record->nodes_after = graph_count(g);
        record->cost_after = cost;
        if (options->keep_text) TRY(graph_text(ctx, g, &record->text));
        progress_add(ctx->progress, 1);
    }
    program->alpha = pc->options.alpha;
    return CODE_OK;
}

/* --- the back end ------------------------------------------------------------------------------------------------- */

static KernelTraits kernel_traits(Op op) {
    const Kernel *kernel = cpu_kernel(op);
    return kernel ? kernel->traits : (KernelTraits){.contiguous = UINT32_MAX};
}

static int64_t kernel_scratch(const Graph *g, const Node *node, int threads) {
    const Kernel *kernel = cpu_kernel(node->op);
    return kernel && kernel->scratch ? kernel->scratch(g, node, threads) : 0;
}

static int64_t kernel_columns(const Graph *g, const Node *node) {
    const Kernel *kernel = cpu_kernel(node->op);
    return kernel && kernel->columns ? kernel->columns(g, node) : 0;
}

static Code plan_program(Context *ctx, Program *program, const Target *target, const CompileOptions *options) {
    const LowerOptions lower = {.target = target,
                                .traits = kernel_traits,
                                .scratch = kernel_scratch,
                                .columns = kernel_columns,
                                .threads = options->threads,
                                .npu_on_host = options->npu.mode == NPU_MODE_EMULATE};
    double start = forge_now_ms();
    progress_begin(ctx->progress, PHASE_PLAN, 0);
    TRY(npuir_lower(ctx, &program->arena, program->graph, &lower, &program->ir));
    TRY(npuir_verify(ctx, program->ir));
    program->lower_ms = forge_now_ms() - start;
    TRY(check_cancelled(ctx));

    start = forge_now_ms();
    if (options->schedule) {
        TRY(schedule_plan(ctx, program->ir, &program->schedule));
        TRY(group_plan(ctx, program->ir, &program->schedule));
        TRY(npuir_verify(ctx, program->ir));
    } else {
        uint32_t transitions = schedule_transitions(program->ir, program->ir->order);
        program->schedule = (ScheduleReport){.transitions_before = transitions, .transitions_after = transitions};
    }
    program->schedule_ms = forge_now_ms() - start;

    start = forge_now_ms();
    TRY(alloc_plan(ctx, program->ir, kernel_traits, &program->alloc));
    TRY(alloc_check(ctx, program->ir));
    program->alloc_ms = forge_now_ms() - start;
    TRY(check_cancelled(ctx));

    TRY(segments_find(ctx, &program->arena, program->ir, &program->segments));
    return options->executable ? program_executor(ctx, program, target, options) : CODE_OK;
}

Code forge_may_share(Context *ctx, const Program *program, uint32_t input, uint32_t output, bool *may) {
    *may = alloc_may_share(program->ir, kernel_traits, input, output);
    return *may ? alloc_check_shared(ctx, program->ir, input, output) : CODE_OK;
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

static Code check_options(Context *ctx, const CompileOptions *options, const Target **target) {
    *target = options->target ? target_find(options->target) : NULL;
    if (!*target)
        return fail(ctx, CODE_INVALID, "unknown target '%.32s'; known are cpu, npu3720, npu4000, npu5010",
                    options->target ? options->target : "");
    if (!(options->alpha >= 0.0 && options->alpha <= 1.0))
        return fail(ctx, CODE_INVALID, "alpha must be between 0 and 1, not %g", options->alpha);
    if (options->threads < 1) return fail(ctx, CODE_INVALID, "threads must be at least 1, not %d", options->threads);
    int bits = options->weight_bits;
    if (bits != 0 && bits != 4 && bits != 8 && bits != 16)
        return fail(ctx, CODE_INVALID, "weights of 16, 8 or 4 bits, not %d", bits);
    if (options->weight_group < 0 || options->weight_group % 32)
        return fail(ctx, CODE_INVALID, "groups of weights must be multiples of 32, not %lld",
                    (long long)options->weight_group);
    return CODE_OK;
}

Code program_create(Context *ctx, Program **out) {
    *out = calloc(1, sizeof **out);
    if (!*out) return fail(ctx, CODE_NO_MEMORY, "out of memory");
    arena_init(&(*out)->arena);
    return CODE_OK;
}

Code program_build(Context *ctx, Program *program, Graph *captured, const CompileOptions *options, bool plan) {
    const Target *target;
    Pipeline pipeline;
    TRY(check_options(ctx, options, &target));
    TRY(parse_pipeline(ctx, options->passes, &pipeline));
    if (options->weight_bits) TRY(add_quantise(ctx, &pipeline));
    if (options->packs)
        program->packs = packs_ref(options->packs);
    else
        TRY(packs_create(ctx, &program->packs));
    double start = forge_now_ms();
    program->nodes_table = graph_count(captured);
    program->alpha = options->alpha;
    if (options->keep_text) TRY(graph_text(ctx, captured, &program->text_capture));

    PassContext pc = {.ctx = ctx, .arena = &program->arena, .eval = cpu_eval};
    pass_options_default(&pc.options);
    pc.options.alpha = options->alpha;
    pc.options.weight_bits = options->weight_bits;
    pc.options.weight_group = options->weight_group;
    pc.options.quantised = !target->npu;
    pc.options.npu = target->npu;
    TRY(run_passes(&pc, captured, &pipeline, target, options, program));
    program->remarks = pc.remarks;
    /* The passes leave their old versions behind in the captured graph's arena; what the program keeps is compact. */
    TRY(graph_clone(ctx, captured, &program->arena, &program->graph));
    program->passes_ms = forge_now_ms() - start;
    if (options->executable || !options->keep_text) /* texts do without values */
        TRY(program_quantise(ctx, program, &pc.quantisations, options->threads));
    return plan ? plan_program(ctx, program, target, options) : CODE_OK;
}

static Code compile(Context *ctx, const Table *table, const CompileOptions *options, Arena *arena, Program *program) {
    Graph *g;
    double start = forge_now_ms();
    progress_begin(ctx->progress, PHASE_TABLE, 0);
    TRY(graph_from_table(ctx, arena, table, &g));
    program->table_ms = forge_now_ms() - start;
    return program_build(ctx, program, g, options, true);
}

Code forge_compile(Context *ctx, const Table *table, const CompileOptions *options, Program **out) {
    Program *program;
    *out = NULL;
    TRY(program_create(ctx, &program));
    Arena arena;
    arena_init(&arena);
    Code code = compile(ctx, table, options, &arena, program);
    arena_destroy(&arena);
    if (code != CODE_OK) {
        forge_destroy(program);
        return code;
    }
    *out = program;
    return CODE_OK;
}

void forge_destroy(Program *program) {
    if (!program) return;
    executor_destroy(program->executor); /* first: its frames are the session's */
    program_close_device(program);
    for (size_t i = 0; i < program->n_passes; i++) free(program->passes[i].text);
    free(program->text_capture);
    for (uint32_t i = 0; i < program->n_quantised; i++) pack_release(program->quantised[i]);
    packs_unref(program->packs);
    arena_destroy(&program->arena);
    free(program);
}
