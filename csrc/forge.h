/* The public face of the C core: what python/ and tool/ may use, with the headers of base/ and graph/ for types. */
#ifndef FORGE_FORGE_H
#define FORGE_FORGE_H

#include "alloc/alloc.h"
#include "exec/exec.h"
#include "graph/graph.h"
#include "npu/device.h"
#include "npu/npu.h"
#include "npuir/live.h"
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

typedef enum NpuMode {
    NPU_MODE_NONE,     /* nothing runs the NPU's instructions: such a program can be planned and emitted only */
    NPU_MODE_EMULATE,  /* on the host, in the NPU's numbers */
    NPU_MODE_DISPATCH, /* on `device` */
} NpuMode;

typedef struct NpuOptions {
    NpuMode mode;
    NpuDevice *device; /* DISPATCH; the program keeps a reference of its own */
    Precision precision;
    bool fold;       /* DISPATCH: begin with folded graphs, which forge_upgrade replaces; else with constant weights */
    bool f32_types;  /* float constants of the graphs are f32 */
    bool f32_border; /* floats cross the border as f32 */
    const char *config;    /* of the graph compiler: 'KEY="VALUE" ...' */
    const char *cache_dir; /* of compiled graphs; NULL: none */
    const NpuBlob *blobs;  /* compiled graphs of an artefact, whose memory must outlive the program */
    uint32_t n_blobs;
} NpuOptions;

typedef struct CompileOptions {
    const char *target; /* "cpu", "npu3720", "npu4000", "npu5010" */
    const char *passes; /* comma separated names in order; "default"; "none" */
    double alpha;
    bool autotune;
    bool keep_text;       /* keep the text of every stage */
    bool executable;      /* false: plan only (device="npu:plan", meta weights) */
    bool pack;            /* pack weights */
    Packs *packs;         /* of programs whose weights are these, as they are now; NULL: there are none */
    bool schedule;        /* false: program order, to compare with */
    int weight_bits;      /* of products on the host: 16 (bf16), 8, 4, or 0: as the model has them */
    int64_t weight_group; /* weights of a row that share a scale; 0: all */
    int threads;
    NpuOptions npu;
} CompileOptions;
void compile_options_default(CompileOptions *options);

typedef struct Program {
    Arena arena;
    Graph *graph; /* after all passes */
    Npuir *ir;
    Segments segments;  /* of instructions on the NPU */
    Executor *executor; /* NULL when plan only */
    Packs *packs;       /* what it shares with others, and they with it */
    Pack **quantised;   /* values of the weights of 8 or 4 bits */
    uint32_t n_quantised;
    int64_t quantised_bytes; /* of those that were made for it */
    NpuDevice *device;       /* these two: NULL unless dispatched */
    NpuSession *session;
    PassRecord *passes;
    size_t n_passes;
    Remarks remarks;
    double table_ms, passes_ms, lower_ms, alloc_ms, schedule_ms, pack_ms, npu_ms;
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
/* Compiles the graphs with constant weights and swaps them in between calls. From any thread, while the program runs;
 * polls ctx->cancelled. Nothing changes if it fails. */
MUST_USE Code forge_upgrade(Context *ctx, Program *program);

/* The compiled graphs that the program runs on its device (npu_session_blobs); *graphs 0: it runs nothing there. */
MUST_USE Code forge_npu_blobs(Context *ctx, const Program *program, BlobVisit visit, void *user, uint32_t *tier,
                              uint32_t *graphs);

/* Whether input and output may be the same memory (alloc_may_share), proved by the checker. */
MUST_USE Code forge_may_share(Context *ctx, const Program *program, uint32_t input, uint32_t output, bool *may);

/* The segments as OpenVINO models, on any machine: `visit` sees each block of the plan with its model. */
typedef struct EmitRequest {
    Fold fold;
    Precision precision;
    bool f32_types, f32_border;
    bool default_forms;
    uint32_t forms; /* unless default_forms */
} EmitRequest;
typedef Code (*EmitVisit)(Context *ctx, void *user, const NpuPlan *plan, uint32_t block, const NpuModel *model);
MUST_USE Code forge_emit(Context *ctx, const Program *program, const EmitRequest *request, EmitVisit visit, void *user);

/* Parses graph text, runs the passes, prints the result. What forge-opt does. `target` NULL: no lowering; else npuir is
 * printed too. */
MUST_USE Code forge_optimize_text(Context *ctx, const char *text, size_t size, const CompileOptions *options,
                                  const char *emit /* "graph", "npuir", "schedule" */, Text *out);

/* --- artefacts (forge_artefact.c) ----------------------------------------------------------------------------------
 */
/* The final graph with its external constants (those whose elements its text does not spell out) row major and without
 * data, which is the graph that forge_load reads. */
MUST_USE Code forge_portable(Context *ctx, const Program *program, Arena *arena, Graph **out);
bool forge_constant_external(const Constant *constant);
typedef struct ConstantData {
    const void *data; /* NULL: spelled out in the text */
    int64_t bytes;
} ConstantData;
/* Back from text and constants, whose memory is borrowed: an entry for each constant of the graph, in order. `callees`:
 * how many functions there are for the graph's host calls. No pass is run. */
MUST_USE Code forge_load(Context *ctx, const char *text, size_t size, const ConstantData *constants, size_t n,
                         uint32_t callees, const CompileOptions *options, Program **out);

#endif
