/* emit_ir TABLE PREFIX F32_BORDER F32_WEIGHTS PRECISION FORMS ARGUMENTS PASSES: for tests/npu_ir.py.
 *
 * Reads a node table with its constants' memory, runs the passes for npu4000, and writes all instructions of
 * the program, wherever placement would have put them, as one block: PREFIX.xml, PREFIX.bin, and PREFIX.args with the
 * weight arguments one after the other if ARGUMENTS asks for constants as such. Prints what the ports are. An
 * instruction that the NPU does not take is named, with its reason, and ends it with status 2.
 *
 * emit_ir --table: each operator's name, and after a tab why the NPU does not take it, if so. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "forge.h"
#include "npu/npu.h"

typedef struct Reader {
    char *data;
    size_t size, at;
} Reader;

static void *take(Reader *r, size_t bytes) {
    if (bytes > r->size - r->at) {
        fprintf(stderr, "the table ends too early\n");
        exit(1);
    }
    void *found = r->data + r->at;
    r->at += (bytes + 7) / 8 * 8;
    if (r->at > r->size) r->at = r->size;
    return found;
}

static size_t take_count(Reader *r) { return (size_t) * (uint64_t *)take(r, 8); }

static void *take_array(Reader *r, size_t item, size_t *count) {
    *count = take_count(r);
    return take(r, item * *count);
}

static const char *const *take_texts(Reader *r, size_t *count) {
    *count = take_count(r);
    const char **texts = calloc(*count + 1, sizeof *texts);
    for (size_t i = 0; texts && i < *count; i++) {
        size_t size;
        texts[i] = take_array(r, 1, &size);
    }
    return texts;
}

/* Each array: its count, its bytes; padded to 8. */
static Table read_table(Reader *r) {
    Table t = {0};
    t.nodes = take_array(r, sizeof *t.nodes, &t.n_nodes);
    t.values = take_array(r, sizeof *t.values, &t.n_values);
    TableConstant *constants = take_array(r, sizeof *t.constants, &t.n_constants);
    t.constants = constants;
    t.operands = take_array(r, sizeof *t.operands, &t.n_operands);
    t.attrs = take_array(r, sizeof *t.attrs, &t.n_attrs);
    t.dims = take_array(r, sizeof *t.dims, &t.n_dims);
    t.outputs = take_array(r, sizeof *t.outputs, &t.n_outputs);
    t.strings = take_texts(r, &t.n_strings);
    t.sources = take_texts(r, &t.n_sources);
    for (size_t i = 0; i < t.n_constants; i++) {
        size_t size;
        void *data = take_array(r, 1, &size);
        constants[i].data = (uint64_t)(uintptr_t)data;
    }
    return t;
}

static Reader read_file(const char *path) {
    Reader r = {0};
    FILE *file = fopen(path, "rb");
    if (!file) exit(1);
    fseek(file, 0, SEEK_END);
    r.size = (size_t)ftell(file);
    rewind(file);
    r.data = aligned_alloc(64, (r.size + 64) / 64 * 64);
    if (!r.data || fread(r.data, 1, r.size, file) != r.size) exit(1);
    fclose(file);
    return r;
}

static void write_file(const char *prefix, const char *suffix, const void *data, size_t size) {
    char path[4096];
    snprintf(path, sizeof path, "%s%s", prefix, suffix);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, size, file) != size) exit(1);
    fclose(file);
}

static KernelTraits no_traits(Op op) {
    (void)op;
    return (KernelTraits){0};
}

static void print_port(const char *what, long long index, const Port *port) {
    printf("%s %lld %s", what, index, dtype_name(port->dtype));
    for (int d = 0; d < port->rank; d++) printf(" %lld", (long long)port->shape[d]);
    printf("\n");
}

typedef struct Job {
    Context *ctx;
    Arena arena;
    const Npuir *ir;
    NpuBlock block;
    EmitOptions options;
    long long *inputs; /* graph input of each input of the block */
} Job;

/* Status 2 if there is an instruction that the NPU does not take. */
static Code make_block(Job *job, bool arguments, bool *refused) {
    Context *ctx = job->ctx;
    const Npuir *ir = job->ir;
    NpuBlock *b = &job->block;
    uint32_t *instrs;
    *b = (NpuBlock){.n_instrs = ir->n_instrs, .n_calls = 1};
    TRY(ARENA_NEW(ctx, &job->arena, ir->n_instrs, &instrs));
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        const Instr *instr = &ir->instrs[i];
        const char *reason = capability(job->options.target, DEVICE_NPU, ir->graph, instr->node);
        printf("op %u : %s\n", i, op_info(instr->op)->name);
        if (reason) printf("refused %s: %s\n", op_info(instr->op)->name, reason);
        *refused = *refused || reason;
        instrs[i] = i;
    }
    b->instrs = instrs;
    TRY(ARENA_NEW(ctx, &job->arena, ir->n_inputs, &b->in));
    TRY(ARENA_NEW(ctx, &job->arena, ir->n_inputs, &job->inputs));
    TRY(ARENA_NEW(ctx, &job->arena, ir->n_outputs, &b->out));
    TRY(ARENA_NEW(ctx, &job->arena, ir->graph->n_constants, &b->weights));
    for (uint32_t i = 0; i < ir->n_inputs; i++) {
        if (ir->inputs[i] == REG_NONE) continue;
        job->inputs[b->n_in] = i;
        b->in[b->n_in++] = ir->inputs[i];
    }
    for (uint32_t i = 0; i < ir->n_outputs; i++) b->out[b->n_out++] = ir->outputs[i];
    for (uint32_t i = 0; arguments && i < ir->graph->n_constants; i++) b->weights[b->n_weights++] = i;
    return CODE_OK;
}

static Code write_model(Job *job, const char *prefix) {
    Context *ctx = job->ctx;
    NpuModel *model;
    TRY(npu_emit(ctx, &job->arena, job->ir, &job->block, &job->options, &model));
    write_file(prefix, ".xml", model->xml.data, model->xml.size);
    char *bin = malloc((size_t)model->bin_bytes + 1);
    TRY(npu_model_bin(ctx, job->ir->graph, model, bin));
    write_file(prefix, ".bin", bin, (size_t)model->bin_bytes);
    free(bin);
    int64_t total = 0;
    for (uint32_t i = 0; i < model->n_args; i++) total += model->args[i].bytes;
    char *args = malloc((size_t)total + 1);
    int64_t at = 0;
    for (uint32_t i = 0; i < model->n_args; i++) {
        TRY(weight_fill(ctx, job->ir->graph, &model->args[i], UINT32_MAX, 0, args + at));
        at += model->args[i].bytes;
        printf("arg %lld\n", (long long)model->args[i].bytes);
    }
    write_file(prefix, ".args", args, (size_t)total);
    free(args);
    for (uint32_t i = 0; i < model->n_in; i++) print_port("in", job->inputs[i], &model->in[i]);
    for (uint32_t i = 0; i < model->n_out; i++) print_port("out", i, &model->out[i]);
    npu_model_destroy(model);
    return CODE_OK;
}

static Code run(Context *ctx, char **argv, bool *refused) {
    Reader r = read_file(argv[1]);
    Table table = read_table(&r);
    CompileOptions options;
    Program *program;
    Job job = {.ctx = ctx};
    Npuir *ir;
    compile_options_default(&options);
    options.target = "npu4000";
    options.executable = false;
    options.passes = argv[8];
    TRY(forge_compile(ctx, &table, &options, &program));
    arena_init(&job.arena);
    job.options = (EmitOptions){.target = target_find("npu4000"),
                                .f32_border = atoi(argv[3]),
                                .f32_weights = atoi(argv[4]),
                                .precision = (Precision)atoi(argv[5])};
    job.options.forms = argv[6][0] == 'd' ? emit_default_forms(job.options.target, job.options.precision)
                                          : (uint32_t)strtoul(argv[6], NULL, 0);
    /* As on the NPU: no copies for kernels. */
    LowerOptions lower = {.target = job.options.target, .traits = no_traits, .threads = 1};
    TRY(npuir_lower(ctx, &job.arena, program->graph, &lower, &ir));
    job.ir = ir;
    TRY(make_block(&job, atoi(argv[7]), refused));
    if (!*refused) TRY(write_model(&job, argv[2]));
    arena_destroy(&job.arena);
    forge_destroy(program);
    free(r.data);
    free((void *)table.strings);
    free((void *)table.sources);
    return CODE_OK;
}

static int print_table(void) {
    for (int op = 0; op < OP_COUNT; op++) {
        const char *reason = emit_reason((Op)op);
        printf("%s\t%s\n", op_info((Op)op)->name, reason ? reason : "");
    }
    return 0;
}

int main(int argc, char **argv) {
    Context ctx;
    bool refused = false;
    context_init(&ctx);
    if (argc == 2 && strcmp(argv[1], "--table") == 0) return print_table();
    if (argc != 9) return 1;
    if (run(&ctx, argv, &refused) != CODE_OK) {
        fprintf(stderr, "%s\n", ctx.text);
        return 1;
    }
    return refused ? 2 : 0;
}
