/* The public face of the C core: what python/ and tool/ may use, with the headers of base/ and graph/ for types. */
#ifndef FORGE_FORGE_H
#define FORGE_FORGE_H

#include "alloc/alloc.h"
#include "exec/exec.h"
#include "graph/graph.h"
#include "npuir/npuir.h"
#include "passes/passes.h"
#include "schedule/schedule.h"

typedef struct PassRecord {
    const char *name;
    double ms;
    size_t nodes_before, nodes_after;
    double cost_before, cost_after;
    char *text; /* graph after it, if asked for; NULL else; malloc'd, owned by the program */
} PassRecord;

typedef struct CompileOptions {
    const char *target; /* "cpu", "npu3720", "npu4000", "npu5010" */
    const char *passes; /* comma separated names in order; "default"; "none" */
    double alpha;
    bool autotune;
    bool keep_text;  /* keep the text of every stage */
    bool executable; /* false: plan only (device="npu:plan", meta weights) */
    bool pack;       /* pack weights */
    int threads;
} CompileOptions;
void compile_options_default(CompileOptions *options);

typedef struct Program {
    Arena arena;
    Graph *graph; /* after all passes */
    Npuir *ir;
    Executor *executor; /* NULL when plan only */
    PassRecord *passes;
    size_t n_passes;
    Remarks remarks;
    double table_ms, passes_ms, lower_ms, alloc_ms, schedule_ms, pack_ms;
    size_t nodes_table; /* nodes in the table, inputs and constants not counted */
    double alpha;       /* as autotuned */
    AllocReport alloc;
    ScheduleReport schedule;
    char *text_capture; /* with keep_text */
} Program;

MUST_USE Code forge_compile(Context *ctx, const Table *table, const CompileOptions *options, Program **out);
void forge_destroy(Program *program);
/* stage: "capture", "after:<pass>" (the last of that name), "after:<pass>#<n>", "final", "npuir", "schedule". */
MUST_USE Code forge_text(Context *ctx, const Program *program, const char *stage, Text *text);
/* Parses graph text, runs the passes, prints the result. What forge-opt does. `target` NULL: no lowering; else npuir is
 * printed too. */
MUST_USE Code forge_optimize_text(Context *ctx, const char *text, size_t size, const CompileOptions *options,
                                  const char *emit /* "graph", "npuir", "schedule" */, Text *out);

#endif
