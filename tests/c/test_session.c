/* Sessions on a device that is not there (fake_npu.h): results against the host, memory, tiers, threads, every failure.
 */
#include <math.h>
#include <time.h>

#include "fake_npu.h"
#include "layer_models.h"
#include "npu/session.h"
#include "random_graph.h"

typedef struct Program {
    Arena arena;
    Npuir *ir;
    Segments segments;
} Program;

static KernelTraits no_traits(Op op) {
    (void)op;
    return (KernelTraits){0};
}

static void find_segments(Context *ctx, Program *p) {
    Graph *g = (Graph *)(uintptr_t)p->ir->graph;
    Random r = {99};
    for (uint32_t c = 0; c < g->n_constants; c++) { /* text carries no large constants */
        Constant *constant = &g->constants[c];
        if (constant->data) continue;
        float *data;
        CHECK_OK(ctx, arena_alloc(ctx, &p->arena, (size_t)constant->bytes + 64, (void **)&data));
        for (int64_t i = 0; i < constant->bytes / 4; i++) data[i] = (float)random_below(&r, 2001) / 4000.0f - 0.25f;
        constant->data = data;
    }
    CHECK_OK(ctx, segments_find(ctx, &p->arena, p->ir, &p->segments));
}

/* All on the NPU but host calls, and copies of their results. */
static void place(Npuir *ir) {
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        Instr *instr = &ir->instrs[i];
        bool host = instr->op == OP_host ||
                    (instr->op == OP_contiguous && ir->buffers[ir->regs[instr->in[0]].buffer].space == SPACE_HOST);
        instr->device = host ? DEVICE_CPU : DEVICE_NPU;
    }
}

static void program_of(Context *ctx, Program *p, const char *layers) {
    Writer w;
    Graph *g;
    LowerOptions options = {.target = target_find("npu4000"), .traits = no_traits, .threads = 1};
    arena_init(&p->arena);
    model(&w, layers);
    CHECK_OK(ctx, graph_parse(ctx, &p->arena, w.text.data, w.text.size, &g));
    CHECK_OK(ctx, npuir_lower(ctx, &p->arena, g, &options, &p->ir));
    text_destroy(&w.text);
    place(p->ir);
    find_segments(ctx, p);
}

/* --- a call ---------------------------------------------------------------------------------------------------------
 */
typedef struct Memory {
    char **base; /* of each buffer */
    const Npuir *ir;
} Memory;

static void memory_make(Memory *m, const Npuir *ir, uint64_t seed) {
    Random r = {seed};
    m->ir = ir;
    m->base = calloc(ir->n_buffers + 1, sizeof *m->base);
    for (BufferId b = 0; b < ir->n_buffers; b++) {
        const Buffer *buffer = &ir->buffers[b];
        m->base[b] = new_bytes((size_t)buffer->bytes);
        memset(m->base[b], 0xff, (size_t)buffer->bytes);
        if (buffer->space == SPACE_INPUT) {
            for (int64_t i = 0; i < buffer->bytes / 4; i++)
                ((float *)(void *)m->base[b])[i] = (float)random_below(&r, 2001) / 1000.0f - 1;
        } else if (buffer->space == SPACE_CONSTANT) {
            memcpy(m->base[b], ir->graph->constants[buffer->index].data, (size_t)buffer->bytes);
        }
    }
}

static void memory_free(Memory *m) {
    for (BufferId b = 0; b < m->ir->n_buffers; b++) free(m->base[b]);
    free(m->base);
}

static Tensor tensor_of(const Memory *m, RegId reg) {
    if (reg == REG_NONE) return (Tensor){0};
    return register_tensor(&m->ir->regs[reg], m->base[m->ir->regs[reg].buffer]);
}

static Code run_instr(Context *ctx, const Memory *m, const Instr *instr) {
    Tensor in[MOST_OPERANDS], out[2];
    for (uint32_t k = 0; k < instr->n_in; k++) in[k] = tensor_of(m, instr->in[k]);
    for (uint32_t k = 0; k < instr->n_out; k++) out[k] = tensor_of(m, instr->out[k]);
    return evaluate(ctx, m->ir->graph, instr, in, out);
}

/* Backend NULL: all on the host. */
static Code run_program(Context *ctx, const Program *p, Backend *backend, void *frame, const Memory *m) {
    uint32_t s = 0;
    for (uint32_t at = 0; at < p->ir->n_instrs;) {
        if (!backend || s == p->segments.count || p->segments.items[s].first != at) {
            TRY(run_instr(ctx, m, &p->ir->instrs[p->ir->order[at++]]));
            continue;
        }
        const Segment *segment = &p->segments.items[s];
        Tensor *in = calloc(segment->n_in + 1, sizeof *in), *out = calloc(segment->n_out + 1, sizeof *out);
        for (uint32_t k = 0; k < segment->n_in; k++) in[k] = tensor_of(m, segment->in[k]);
        for (uint32_t k = 0; k < segment->n_out; k++) out[k] = tensor_of(m, segment->out[k]);
        Code code = backend->run(ctx, backend, frame, s, in, out);
        free(in);
        free(out);
        TRY(code);
        at += segment->count;
        s++;
    }
    return CODE_OK;
}

/* The largest difference of outputs, relative to the largest output. */
static double difference(const Memory *a, const Memory *b) {
    double worst = 0;
    for (BufferId id = 0; id < a->ir->n_buffers; id++) {
        const Buffer *buffer = &a->ir->buffers[id];
        if (buffer->space != SPACE_OUTPUT) continue;
        const float *x = (const float *)(void *)a->base[id], *y = (const float *)(void *)b->base[id];
        double most = 1e-6, apart = 0;
        for (int64_t i = 0; i < buffer->bytes / 4; i++) {
            if (fabs(x[i]) > most) most = fabs(x[i]);
            if (!(fabs(x[i] - y[i]) <= apart)) apart = fabs(x[i] - y[i]);
        }
        if (!(apart / most <= worst)) worst = apart / most;
    }
    return worst;
}

static double call_difference(Context *ctx, const Program *p, Backend *backend, void *frame, uint64_t seed) {
    Memory host, device;
    memory_make(&host, p->ir, seed);
    memory_make(&device, p->ir, seed);
    CHECK_OK(ctx, run_program(ctx, p, NULL, NULL, &host));
    CHECK_OK(ctx, run_program(ctx, p, backend, frame, &device));
    double d = difference(&host, &device);
    memory_free(&host);
    memory_free(&device);
    return d;
}

static SessionOptions options_of(Fold fold, bool f32, int threads) {
    return (SessionOptions){.plan = {.fold = fold, .head_columns = 64},
                            .emit = {.target = target_find("npu4000"), .f32_border = f32, .f32_weights = f32},
                            .config = "",
                            .threads = threads};
}

static void check_nothing_lives(const NpuDevice *d) {
    CHECK_EQUAL(d->references, 0);
    CHECK_EQUAL(d->graphs, 0);
    CHECK_EQUAL(d->memories, 0);
    CHECK_EQUAL(d->lists, 0);
    CHECK_EQUAL(d->imported, 0);
}

/* --- tests ----------------------------------------------------------------------------------------------------------
 */
static void test_results(void) {
    static const char *const models[] = {"AAAANL", "GGAGGAGGGANL", "HHHH", "HGHGL", "N", "AGaL"};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        for (int way = 0; way < 12; way++) {
            Context ctx;
            Program p;
            NpuDevice device = {0};
            NpuSession *session;
            void *frames[2];
            bool f32 = way & 1;
            Fold fold = (Fold[]){FOLD_NEVER, FOLD_ALWAYS, FOLD_CUT}[way / 4];
            SessionOptions options = options_of(fold, f32, way & 2 ? 3 : 1);
            context_init(&ctx);
            program_of(&ctx, &p, models[i]);
            CHECK_OK(&ctx, npu_session_create(&ctx, &device, p.ir, &p.segments, &options, &session));
            Backend *backend = npu_session_backend(session);
            for (int f = 0; f < 2; f++) CHECK_OK(&ctx, backend->frame_create(&ctx, backend, &frames[f]));
            for (int call = 0; call < 4; call++) {
                double d = call_difference(&ctx, &p, backend, frames[call % 2], (uint64_t)call);
                if (!(d <= (f32 ? 1e-6 : 2e-2))) {
                    fprintf(stderr, "%s way %d: differs by %g\n", models[i], way, d);
                    check_failures++;
                }
            }
            SessionReport report;
            npu_session_report(session, &report);
            CHECK_EQUAL(device.compiled, report.n_blocks);
            if (fold != FOLD_ALWAYS) CHECK(report.tier == 1 && report.weight_bytes == 0);
            CHECK_EQUAL(device.executions, 4 * report.n_calls);
            CHECK_EQUAL(device.runs, 4 * p.segments.count);
            CHECK_EQUAL(report.compiled, report.n_blocks);
            backend->frame_destroy(backend, frames[0]); /* the other one goes with the session */
            npu_session_destroy(session);
            check_nothing_lives(&device);
            arena_destroy(&p.arena);
        }
    }
}

/* Slots that are there at the same time lie apart, in the frame, on pages of their own; times are in order. */
static void check_slots(const Values *v) {
    for (uint32_t i = 0; i < v->n_slots; i++) {
        const Slot *a = &v->slots[i];
        CHECK(a->first <= a->last && a->bytes >= 0 && a->offset >= 0 && a->offset + a->bytes <= v->bytes);
        CHECK_EQUAL(a->offset % 64, 0);
        for (uint32_t k = 0; k < i; k++) {
            const Slot *b = &v->slots[k];
            bool together = a->first <= b->last && b->first <= a->last;
            bool apart = a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset;
            CHECK(!together || apart);
        }
    }
}

static void check_tier_slots(Context *ctx, const Program *p, NpuDevice *device, const SessionOptions *options) {
    Tier *tier;
    CHECK_OK(ctx, tier_create(ctx, device, p->ir, &p->segments, options, options->plan.fold, &tier));
    check_slots(&tier->values);
    tier_unref(tier);
}

/* Random programs with devices thrown: values that stay on the device, strided ones, several segments. */
static void test_random(void) {
    Random r = {23};
    uint32_t several = 0;
    for (int round = 0; round < 400; round++) {
        Context ctx;
        Program p;
        NpuDevice device = {0};
        NpuSession *session;
        void *frame;
        RandomOptions o = {5 + random_below(&r, 60), 2 + random_below(&r, 8), random_below(&r, 2) != 0,
                           random_below(&r, 2) != 0};
        SessionOptions options = options_of((Fold)(round % 3), true, 1);
        options.plan.head_columns = 16;
        context_init(&ctx);
        arena_init(&p.arena);
        CHECK_OK(&ctx, random_npuir(&ctx, &p.arena, &r, &o, "npu4000", &p.ir));
        for (uint32_t i = 0; i < p.ir->n_instrs; i++) {
            Instr *instr = &p.ir->instrs[i];
            instr->device = instr->op != OP_host && random_below(&r, 100) < 70 ? DEVICE_NPU : DEVICE_CPU;
        }
        find_segments(&ctx, &p);
        if (p.segments.count) {
            several += p.segments.count > 1;
            check_tier_slots(&ctx, &p, &device, &options);
            CHECK_OK(&ctx, npu_session_create(&ctx, &device, p.ir, &p.segments, &options, &session));
            Backend *backend = npu_session_backend(session);
            CHECK_OK(&ctx, backend->frame_create(&ctx, backend, &frame));
            for (int call = 0; call < 2; call++) {
                double d = call_difference(&ctx, &p, backend, frame, (uint64_t)(round + call));
                if (!(d <= 1e-5)) {
                    fprintf(stderr, "random program %d: differs by %g\n", round, d);
                    check_failures++;
                }
            }
            npu_session_destroy(session);
            check_nothing_lives(&device);
        }
        arena_destroy(&p.arena);
    }
    CHECK(several > 100);
}

/* A deep model needs no more memory for activations than a shallow one, and each weight once. */
static void test_memory(void) {
    static const char *const models[] = {"AAAA", "AAAAAAAAAAAAAAAA"};
    int64_t bytes[2], weights[2];
    for (int i = 0; i < 2; i++) {
        Context ctx;
        Program p;
        NpuDevice device = {0};
        SessionOptions options = options_of(FOLD_ALWAYS, false, 1);
        Tier *tier;
        context_init(&ctx);
        program_of(&ctx, &p, models[i]);
        CHECK_OK(&ctx, tier_create(&ctx, &device, p.ir, &p.segments, &options, FOLD_ALWAYS, &tier));
        bytes[i] = tier->values.bytes;
        weights[i] = tier->weights.bytes;
        CHECK_EQUAL(tier->plan->n_blocks, 1);
        tier_unref(tier);
        check_nothing_lives(&device);
        arena_destroy(&p.arena);
    }
    CHECK_EQUAL(bytes[0], bytes[1]);
    CHECK_EQUAL(bytes[0], 2 * PAGE); /* of [16, 32] f16, which fill a page each */
    CHECK_EQUAL(weights[1], 4 * weights[0]);
}

/* f32 weights on a device that takes the model's memory: no copies; off where the driver cannot. */
static void test_import(void) {
    for (int imports = 0; imports < 2; imports++) {
        Context ctx;
        Arena arena;
        Graph *g;
        Program p;
        Text text;
        NpuDevice device = {.imports = imports};
        SessionOptions options = options_of(FOLD_ALWAYS, true, 1);
        LowerOptions lower = {.target = target_find("npu4000"), .traits = no_traits, .threads = 1};
        NpuSession *session;
        void *frame;
        context_init(&ctx);
        arena_init(&arena);
        text_init(&text);
        text_add(&text, "graph {\n%%x0 = input {index=0} : f32[2,512]\n");
        for (int i = 0; i < 8; i++) {
            text_add(&text, "%%w%d = constant @w {index=%d} : f32[512,512] state\n", i, i);
            text_add(&text, "%%a%d = linear %%x%d, %%w%d : f32[2,512]\n%%b%d = relu %%a%d : f32[2,512]\n", i, i, i, i,
                     i);
            text_add(&text, "%%c%d = exp %%b%d : f32[2,512]\n%%x%d = softmax %%c%d {dim=1} : f32[2,512]\n", i, i, i + 1,
                     i);
        }
        text_add(&text, "return %%x8\n}\n");
        arena_init(&p.arena);
        CHECK_OK(&ctx, graph_parse(&ctx, &p.arena, text.data, text.size, &g));
        CHECK_OK(&ctx, npuir_lower(&ctx, &p.arena, g, &lower, &p.ir));
        place(p.ir);
        find_segments(&ctx, &p);
        options.plan.head_columns = 1000;
        CHECK_OK(&ctx, npu_session_create(&ctx, &device, p.ir, &p.segments, &options, &session));
        CHECK_EQUAL(device.imported, imports ? 8 : 0);
        CHECK_EQUAL(device.memories, imports ? 0 : 1);
        Backend *backend = npu_session_backend(session);
        CHECK_OK(&ctx, backend->frame_create(&ctx, backend, &frame));
        CHECK(call_difference(&ctx, &p, backend, frame, 1) <= 1e-6);
        npu_session_destroy(session);
        check_nothing_lives(&device);
        arena_destroy(&p.arena);
        arena_destroy(&arena);
        text_destroy(&text);
    }
}

/* To one graph a segment, or to one a call. */
static void test_upgrade(bool cut) {
    Context ctx;
    Program p;
    NpuDevice device = {0};
    NpuSession *session;
    SessionOptions options = options_of(FOLD_ALWAYS, true, 2);
    SessionReport report;
    int made;
    void *frames[2];
    options.plan.cut_bytes = cut;
    context_init(&ctx);
    program_of(&ctx, &p, "HHHHL");
    CHECK_OK(&ctx, npu_session_create(&ctx, &device, p.ir, &p.segments, &options, &session));
    Backend *backend = npu_session_backend(session);
    for (int f = 0; f < 2; f++) CHECK_OK(&ctx, backend->frame_create(&ctx, backend, &frames[f]));
    npu_session_report(session, &report);
    CHECK_EQUAL(report.tier, 0);
    CHECK(report.weight_bytes > 0 && report.n_blocks < report.n_calls);
    int folded = device.graphs;
    made = cut ? (int)report.n_calls : (int)p.segments.count;

    /* A failure changes nothing. */
    device.fail_at = 3;
    CHECK_CODE(&ctx, CODE_DEVICE, npu_session_upgrade(&ctx, session));
    device.fail_at = 0;
    CHECK_EQUAL(device.graphs, folded);
    CHECK(call_difference(&ctx, &p, backend, frames[0], 1) <= 1e-6);

    /* One frame is in the middle of a call, the other idle: the old tier stays until the call is over. */
    Memory host, memory;
    memory_make(&host, p.ir, 5);
    memory_make(&memory, p.ir, 5);
    CHECK_OK(&ctx, run_program(&ctx, &p, NULL, NULL, &host));
    uint32_t s = 0;
    for (uint32_t at = 0; at < p.ir->n_instrs;) {
        if (s == p.segments.count || p.segments.items[s].first != at) {
            CHECK_OK(&ctx, run_instr(&ctx, &memory, &p.ir->instrs[p.ir->order[at++]]));
            continue;
        }
        const Segment *segment = &p.segments.items[s];
        Tensor in[4], out[4];
        for (uint32_t k = 0; k < segment->n_in; k++) in[k] = tensor_of(&memory, segment->in[k]);
        for (uint32_t k = 0; k < segment->n_out; k++) out[k] = tensor_of(&memory, segment->out[k]);
        CHECK_OK(&ctx, backend->run(&ctx, backend, frames[1], s, in, out));
        if (s == 1) {
            CHECK_OK(&ctx, npu_session_upgrade(&ctx, session));
            CHECK_EQUAL(device.graphs, folded + made);
        }
        at += segment->count;
        s++;
    }
    CHECK_EQUAL(device.graphs, made); /* the old ones are gone */
    CHECK(difference(&host, &memory) <= 1e-6);
    memory_free(&host);
    memory_free(&memory);

    npu_session_report(session, &report);
    CHECK_EQUAL(report.tier, 1);
    CHECK_EQUAL(report.n_blocks, made);
    CHECK_EQUAL(report.weight_bytes, 0);
    for (int f = 0; f < 2; f++) CHECK(call_difference(&ctx, &p, backend, frames[f], 7) <= 1e-6);
    int compiled = device.compiled;
    CHECK_OK(&ctx, npu_session_upgrade(&ctx, session)); /* is there already */
    CHECK_EQUAL(device.compiled, compiled);
    npu_session_destroy(session);
    check_nothing_lives(&device);
    arena_destroy(&p.arena);
}

/* --- compiled graphs ------------------------------------------------------------------------------------------------
 */
typedef struct Seen {
    NpuSession *session; /* upgraded at the first graph */
    uint32_t count;
    int64_t bytes;
} Seen;

static Code see_blob(Context *ctx, void *user, const NpuBlob *blob) {
    Seen *seen = user;
    if (seen->count++ == 0) TRY(npu_session_upgrade(ctx, seen->session));
    const char *data = blob->data;
    for (size_t i = 0; i < blob->bytes; i++) seen->bytes += data[i] == 77; /* it is readable */
    seen->bytes += (int64_t)blob->bytes;
    return CODE_OK;
}

static Code stop(Context *ctx, void *user, const NpuBlob *blob) {
    (void)user, (void)blob;
    return fail(ctx, CODE_HOST, "no more");
}

/* The graphs of a tier stay as they are seen, although an upgrade takes their place meanwhile. */
static void test_blobs(void) {
    Context ctx;
    Program p;
    NpuDevice device = {0};
    NpuSession *session;
    SessionOptions options = options_of(FOLD_ALWAYS, true, 2);
    uint32_t tier, graphs;
    options.cache_dir = "/nowhere";
    context_init(&ctx);
    program_of(&ctx, &p, "HHHHL");
    CHECK_OK(&ctx, npu_session_create(&ctx, &device, p.ir, &p.segments, &options, &session));
    SessionReport report;
    npu_session_report(session, &report);
    device.fail_at = 2;
    Seen seen = {.session = session};
    seen.count = 1;
    CHECK_CODE(&ctx, CODE_DEVICE, npu_session_blobs(&ctx, session, see_blob, &seen, &tier, &graphs));
    device.fail_at = 0;
    CHECK_CODE(&ctx, CODE_HOST, npu_session_blobs(&ctx, session, stop, NULL, &tier, &graphs));
    seen = (Seen){.session = session};
    CHECK_OK(&ctx, npu_session_blobs(&ctx, session, see_blob, &seen, &tier, &graphs));
    CHECK_EQUAL(tier, 0);
    CHECK_EQUAL(graphs, report.n_blocks);
    CHECK_EQUAL(seen.count, report.n_blocks);
    npu_session_report(session, &report);
    CHECK_EQUAL(device.graphs, report.n_blocks); /* the old ones are gone */
    seen = (Seen){.session = session};
    CHECK_OK(&ctx, npu_session_blobs(&ctx, session, see_blob, &seen, &tier, &graphs));
    CHECK_EQUAL(tier, 1);
    CHECK_EQUAL(seen.count, report.n_blocks);
    npu_session_destroy(session);
    check_nothing_lives(&device);
    arena_destroy(&p.arena);
}

/* --- threads --------------------------------------------------------------------------------------------------------
 */
typedef struct Caller {
    const Program *p;
    NpuSession *session;
    pthread_t thread;
    int number;
    double worst;
    Code code;
} Caller;

static void *caller_main(void *arg) {
    Caller *c = arg;
    Context ctx;
    void *frame;
    Backend *backend = npu_session_backend(c->session);
    context_init(&ctx);
    c->code = backend->frame_create(&ctx, backend, &frame);
    for (int call = 0; call < 12 && c->code == CODE_OK; call++) {
        double d = call_difference(&ctx, c->p, backend, frame, (uint64_t)(100 * c->number + call));
        if (!(d <= c->worst)) c->worst = d;
    }
    if (c->code == CODE_OK) backend->frame_destroy(backend, frame);
    return NULL;
}

static void test_threads(void) {
    enum { CALLERS = 4 };
    Context ctx;
    Program p;
    NpuDevice device = {0};
    NpuSession *session;
    SessionOptions options = options_of(FOLD_ALWAYS, true, 3);
    Caller callers[CALLERS];
    context_init(&ctx);
    program_of(&ctx, &p, "HAHAL");
    CHECK_OK(&ctx, npu_session_create(&ctx, &device, p.ir, &p.segments, &options, &session));
    for (int i = 0; i < CALLERS; i++) {
        callers[i] = (Caller){.p = &p, .session = session, .number = i};
        CHECK(pthread_create(&callers[i].thread, NULL, caller_main, &callers[i]) == 0);
    }
    CHECK_OK(&ctx, npu_session_upgrade(&ctx, session));
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i].thread, NULL);
        CHECK_EQUAL(callers[i].code, CODE_OK);
        CHECK(callers[i].worst <= 1e-6);
    }
    CHECK_EQUAL(device.graphs, p.segments.count);
    npu_session_destroy(session);
    check_nothing_lives(&device);
    arena_destroy(&p.arena);
}

/* --- failures
 * --------------------------------------------------------------------------------------------------------- */
/* Each allocation (device false) or call of the device fails in turn, in all that a session does. */
static void test_failures(bool of_device) {
    Context ctx;
    Program p;
    uint32_t failures = 0;
    context_init(&ctx);
    program_of(&ctx, &p, "GGHGGHL");
    for (int k = 1;; k++) {
        NpuDevice device = {.imports = k % 2, .reason = NPU_NO_MEMORY};
        SessionOptions options = options_of(FOLD_ALWAYS, true, 1);
        NpuSession *session;
        Memory memory;
        void *frame = NULL;
        options.plan.cut_bytes = k / 2 % 2; /* the upgrade is cut */
        memory_make(&memory, p.ir, 3);
        options.cache_dir = "nowhere";
        ctx.fail_allocation = of_device ? 0 : (uint64_t)k;
        device.fail_at = of_device ? k : 0;
        Code code = npu_session_create(&ctx, &device, p.ir, &p.segments, &options, &session);
        CHECK_EQUAL(session == NULL, code != CODE_OK);
        Backend *backend = session ? npu_session_backend(session) : NULL;
        if (code == CODE_OK) code = backend->frame_create(&ctx, backend, &frame);
        if (code == CODE_OK && of_device) code = run_program(&ctx, &p, backend, frame, &memory);
        if (code == CODE_OK) code = npu_session_upgrade(&ctx, session);
        if (code == CODE_OK && of_device) code = run_program(&ctx, &p, backend, frame, &memory);
        bool failed = code != CODE_OK;
        bool all_done = of_device ? device.fail_at > 0 : ctx.fail_allocation > 0;
        ctx.fail_allocation = 0;
        device.fail_at = 0;
        failures += failed;
        if (failed) {
            CHECK_EQUAL(code, of_device ? CODE_DEVICE : CODE_NO_MEMORY);
            CHECK_EQUAL(ctx.code, code);
            if (of_device) CHECK_EQUAL(ctx.reason, NPU_NO_MEMORY);
        }
        ctx.code = CODE_OK;
        if (frame) CHECK(call_difference(&ctx, &p, backend, frame, 1) <= 1e-6); /* the next call works */
        npu_session_destroy(session);
        check_nothing_lives(&device);
        memory_free(&memory);
        CHECK(failed || all_done);
        if (all_done) break;
    }
    printf("session: %u failures of %s\n", failures, of_device ? "the device" : "allocation");
    arena_destroy(&p.arena);
}

static bool always(void *user) {
    (void)user;
    return true;
}

static void test_cancel(void) {
    Context ctx;
    Program p;
    NpuDevice device = {0};
    SessionOptions options = options_of(FOLD_ALWAYS, true, 2);
    NpuSession *session;
    context_init(&ctx);
    program_of(&ctx, &p, "AAAA");
    ctx.cancelled = always;
    CHECK_CODE(&ctx, CODE_CANCELLED, npu_session_create(&ctx, &device, p.ir, &p.segments, &options, &session));
    CHECK(!session);
    check_nothing_lives(&device);
    arena_destroy(&p.arena);
}

int main(void) {
    test_results();
    test_random();
    test_memory();
    test_import();
    test_upgrade(false);
    test_upgrade(true);
    test_blobs();
    test_threads();
    test_failures(true);
    test_failures(false);
    test_cancel();
    return check_done();
}
