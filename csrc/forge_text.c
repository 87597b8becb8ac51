/* Every stage of a program as text, and text through the pipeline. */
#include <stdlib.h>
#include <string.h>

#include "forge_internal.h"

/* "cse", "cse#2": the record of the n-th run of that pass, the last without a number. */
static const PassRecord *find_record(const Program *program, const char *name) {
    size_t length = strcspn(name, "#");
    unsigned long wanted = name[length] ? strtoul(name + length + 1, NULL, 10) : 0, seen = 0;
    const PassRecord *last = NULL;
    for (size_t i = 0; i < program->n_passes; i++) {
        const PassRecord *record = &program->passes[i];
        if (strlen(record->name) != length || memcmp(record->name, name, length) != 0) continue;
        if (++seen == wanted) return record;
        last = record;
    }
    return name[length] ? NULL : last;
}

static Code add_kept(Context *ctx, const char *kept, const char *stage, Text *text) {
    if (!kept) return fail(ctx, CODE_INVALID, "the text of stage '%s' was not kept", stage);
    text_add(text, "%s", kept);
    return text_done(ctx, text);
}

Code forge_text(Context *ctx, const Program *program, const char *stage, Text *text) {
    if (strcmp(stage, "capture") == 0) return add_kept(ctx, program->text_capture, stage, text);
    if (strncmp(stage, "after:", 6) == 0) {
        const PassRecord *record = find_record(program, stage + 6);
        if (!record) return fail(ctx, CODE_INVALID, "no pass '%.64s' was run", stage + 6);
        return add_kept(ctx, record->text, stage, text);
    }
    if (strcmp(stage, "final") == 0 || strcmp(stage, "graph") == 0) {
        TRY(graph_print(ctx, program->graph, text));
        return text_done(ctx, text);
    }
    bool schedule = strcmp(stage, "schedule") == 0;
    if (!schedule && strcmp(stage, "npuir") != 0)
        return fail(ctx, CODE_INVALID,
                    "unknown stage '%.64s'; known are capture, after:<pass>, after:<pass>#<n>, final, npuir, schedule "
                    "(and aten, of a CompiledModel)",
                    stage);
    if (!program->ir) return fail(ctx, CODE_INVALID, "the program was not lowered");
    TRY(npuir_print(ctx, program->ir, schedule, text));
    return text_done(ctx, text);
}

static Code optimize(Context *ctx, const char *text, size_t size, const CompileOptions *options, const char *emit,
                     Arena *arena, Program *program, Text *out) {
    bool plan = strcmp(emit, "graph") != 0;
    CompileOptions planned = *options;
    Graph *g;
    if (plan && strcmp(emit, "npuir") != 0 && strcmp(emit, "schedule") != 0)
        return fail(ctx, CODE_INVALID, "cannot emit '%.64s'; known are graph, npuir, schedule", emit);
    if (!planned.target) planned.target = "cpu";
    planned.executable = false;
    TRY(graph_parse(ctx, arena, text, size, &g));
    TRY(graph_verify(ctx, g));
    TRY(program_build(ctx, program, g, &planned, plan));
    return forge_text(ctx, program, emit, out);
}

Code forge_optimize_text(Context *ctx, const char *text, size_t size, const CompileOptions *options, const char *emit,
                         Text *out) {
    Program *program;
    TRY(program_create(ctx, &program));
    Arena arena;
    arena_init(&arena);
    Code code = optimize(ctx, text, size, options, emit, &arena, program, out);
    arena_destroy(&arena);
    forge_destroy(program);
    return code;
}
