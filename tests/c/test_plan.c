/* Plans of the NPU: what is folded, what is not, random programs, and that the checker sees what is wrong.
 *
 * With file names as arguments it reads graph text instead and prints a line about each plan: tests/test_npu_plan.py
 * does so with real models. */
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "layer_models.h"
#include "npu/plan.h"
#include "random_graph.h"
#include "schedule/schedule.h"

typedef struct Made {
    Context ctx;
    Arena arena;
    Npuir *ir;
    Segments segments;
    NpuPlan *plan;
} Made;

static double cpu_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* others may be running */
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void begin(Made *m) {
    *m = (Made){0};
    context_init(&m->ctx);
    arena_init(&m->arena);
}

static KernelTraits no_traits(Op op) {
    (void)op;
    return (KernelTraits){0};
}

/* As placed and scheduled; `forced`: in program order, all on the NPU but host calls and the copies of their results
 * to outputs. */
static Code lower(Made *m, const char *text, size_t size, bool forced) {
    Graph *g;
    ScheduleReport report;
    LowerOptions options = {.target = target_find("npu4000"), .traits = no_traits, .threads = 1};
    TRY(graph_parse(&m->ctx, &m->arena, text, size, &g));
    TRY(graph_verify(&m->ctx, g));
    TRY(npuir_lower(&m->ctx, &m->arena, g, &options, &m->ir));
    TRY(npuir_verify(&m->ctx, m->ir));
    if (!forced) TRY(schedule_plan(&m->ctx, m->ir, &report));
    for (uint32_t i = 0; i < m->ir->n_instrs && forced; i++) {
        Instr *instr = &m->ir->instrs[i];
        bool host = instr->op == OP_host || (instr->op == OP_contiguous &&
                                             m->ir->buffers[m->ir->regs[instr->in[0]].buffer].space == SPACE_HOST);
        instr->device = host ? DEVICE_CPU : DEVICE_NPU;
    }
    return segments_find(&m->ctx, &m->arena, m->ir, &m->segments);
}

static Code plan(Made *m, Fold fold, int64_t head_columns) {
    PlanOptions options = {.fold = fold, .head_columns = head_columns};
    return npu_plan(&m->ctx, &m->arena, m->ir, &m->segments, &options, &m->plan);
}

static void plan_text(Made *m, const Text *text, Fold fold, int64_t head_columns) {
    begin(m);
    CHECK(!text->failed);
    CHECK_OK(&m->ctx, lower(m, text->data, text->size, true));
    CHECK_OK(&m->ctx, plan(m, fold, head_columns));
}

static void end(Made *m) { arena_destroy(&m->arena); }

static uint32_t distinct_instrs(const NpuPlan *p) {
    uint32_t n = 0;
    for (uint32_t b = 0; b < p->n_blocks; b++) n += p->blocks[b].n_instrs;
    return n;
}

enum { LAYER_A = 11, LAYER_G = 9, NO_HEAD = 1000 }; /* instructions; one of A's is the copy before a reshape */

static void expect(const char *layers, int64_t head, uint32_t blocks, uint32_t calls, uint32_t instrs) {
    Writer w;
    Made m;
    model(&w, layers);
    plan_text(&m, &w.text, FOLD_ALWAYS, head);
    if (m.plan && (m.plan->n_blocks != blocks || m.plan->n_calls != calls || distinct_instrs(m.plan) != instrs)) {
        fprintf(stderr, "%s: %u blocks, %u calls, %u instructions; want %u, %u, %u\n", layers, m.plan->n_blocks,
                m.plan->n_calls, distinct_instrs(m.plan), blocks, calls, instrs);
        check_failures++;
    }
    end(&m);
    text_destroy(&w.text);
}

static void test_folding(void) {
    expect("AAAA", NO_HEAD, 1, 4, LAYER_A);
    expect("AAAANL", NO_HEAD, 2, 5, LAYER_A + 2); /* norm and head: one block */
    expect("AAAANL", 64, 3, 4 + 1 + 4, LAYER_A + 2);
    expect("AAAAaAAAA", NO_HEAD, 2, 9, 2 * LAYER_A); /* an attribute differs */
    expect("GGAGGAGGGAGGGAGGGAGGGAGGAGGAGGNL", 64, 4, 22 + 8 + 1 + 4, LAYER_A + LAYER_G + 2);
    expect("GGAGGANL", 64, 4, 4 + 3 + 2 + 4, LAYER_A + LAYER_G + 1); /* the last norm is the first of an A */
    expect("AAAAAAGGGGGG", NO_HEAD, 2, 12, LAYER_A + LAYER_G);       /* an encoder, then a decoder */
    expect("AG", NO_HEAD, 1, 1, LAYER_A + LAYER_G);                  /* nothing is repeated */
    expect("N", NO_HEAD, 1, 1, 1);
    expect("HHHH", NO_HEAD, 2, 8, 7 + 4); /* a host call in each layer: before it, and behind */
}

static void test_never(void) {
    static const struct {
        const char *layers;
        uint32_t segments;
    } cases[] = {{"AAAANL", 1}, {"HHHH", 5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Writer w;
        Made m;
        model(&w, cases[i].layers);
        plan_text(&m, &w.text, FOLD_NEVER, 64);
        CHECK_EQUAL(m.segments.count, cases[i].segments);
        CHECK_EQUAL(m.plan->n_blocks, cases[i].segments);
        CHECK_EQUAL(m.plan->n_calls, cases[i].segments);
        for (uint32_t b = 0; b < m.plan->n_blocks; b++) {
            CHECK_EQUAL(m.plan->blocks[b].n_weights, 0);
            CHECK_EQUAL(m.plan->blocks[b].columns, 0);
            CHECK_EQUAL(m.plan->blocks[b].n_instrs, m.segments.items[b].count);
        }
        end(&m);
        text_destroy(&w.text);
    }
}

/* Cut as folded, with a graph for each call. */
static void test_cut(void) {
    Writer w;
    Made folded, m;
    model(&w, "GGAGGAGGGANL");
    plan_text(&folded, &w.text, FOLD_ALWAYS, 64);
    plan_text(&m, &w.text, FOLD_CUT, 64);
    CHECK_EQUAL(m.plan->n_calls, folded.plan->n_calls);
    CHECK_EQUAL(m.plan->n_blocks, m.plan->n_calls);
    for (uint32_t c = 0; c < m.plan->n_calls; c++) {
        const NpuBlock *b = &m.plan->blocks[c], *ours = &folded.plan->blocks[folded.plan->calls[c].block];
        CHECK_EQUAL(m.plan->calls[c].block, c);
        CHECK_EQUAL(b->n_weights, 0);
        CHECK_EQUAL(b->n_calls, 1);
        CHECK_EQUAL(b->n_instrs, ours->n_instrs);
        CHECK_EQUAL(b->columns, ours->columns);
        CHECK_EQUAL(b->first_column, m.plan->calls[c].first_column);
    }
    CHECK(m.plan->blocks[m.plan->n_blocks - 1].first_column == 136);
    m.plan->blocks[m.plan->n_blocks - 1].first_column = 64; /* the checker sees it */
    CHECK_CODE(&m.ctx, CODE_INTERNAL, plan_check(&m.ctx, m.plan));
    end(&m);
    end(&folded);
    text_destroy(&w.text);
}

/* Steps of a chain, every second one with the same weight of n x n. */
static void chain(Text *text, int n) {
    text_init(text);
    text_add(text, "graph {\n%%0 = input {index=0} : f32[4,%d]\n", n);
    text_add(text, "%%w0 = constant @w {index=0} : f32[%d,%d] state\n%%w1 = constant @w {index=1} : f32[%d,%d] state\n",
             n, n, n, n);
    for (int i = 0; i < 6; i++) {
        text_add(text, "%%a%d = linear %%%s%d, %%w%d : f32[4,%d]\n", i, i ? "c" : "", i ? i - 1 : 0, i % 2, n);
        text_add(text, "%%b%d = exp %%a%d : f32[4,%d]\n%%c%d = softmax %%b%d {dim=1} : f32[4,%d]\n", i, i, n, i, i, n);
    }
    text_add(text, "return %%c5\n}\n");
}

static void test_constant(void) {
    static const struct {
        int n;
        Precision precision;
        Fold fold;
        uint32_t blocks, calls;
    } cases[] = {
        {64, PRECISION_FP16, FOLD_CUT, 2, 6},         {64, PRECISION_FP16, FOLD_CONSTANT, 1, 1},
        {8192, PRECISION_FP16, FOLD_CONSTANT, 2, 6},  {12288, PRECISION_W8A16, FOLD_CONSTANT, 2, 6},
        {8192, PRECISION_W8A16, FOLD_CONSTANT, 1, 1}, {12288, PRECISION_W4A16, FOLD_CONSTANT, 1, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Text text;
        Made m;
        PlanOptions options = {.fold = cases[i].fold, .precision = cases[i].precision, .head_columns = 100000};
        chain(&text, cases[i].n);
        begin(&m);
        CHECK_OK(&m.ctx, lower(&m, text.data, text.size, true));
        CHECK_OK(&m.ctx, npu_plan(&m.ctx, &m.arena, m.ir, &m.segments, &options, &m.plan));
        CHECK_EQUAL(m.plan->n_blocks, cases[i].blocks);
        CHECK_EQUAL(m.plan->n_calls, cases[i].calls);
        for (uint32_t b = 0; b < m.plan->n_blocks; b++) CHECK_EQUAL(m.plan->blocks[b].n_weights, 0);
        for (uint32_t c = 0; c < m.plan->n_calls; c++)
            CHECK_EQUAL(m.plan->calls[c].block, cases[i].calls == 1 ? 0 : c % 2); /* equal weights share a graph */
        end(&m);
        text_destroy(&text);
    }
}

static void test_depth(void) {
    char layers[131];
    Writer w;
    Made m;
    memset(layers, 'A', 128);
    memcpy(layers + 128, "NL", 3);
    model(&w, layers);
    begin(&m);
    CHECK_OK(&m.ctx, lower(&m, w.text.data, w.text.size, true));
    double start = cpu_ms();
    CHECK_OK(&m.ctx, plan(&m, FOLD_ALWAYS, 64));
    printf("plan: %u instructions in %.1f ms\n", m.ir->n_instrs, cpu_ms() - start);
    CHECK_EQUAL(m.plan->n_blocks, 3);
    CHECK_EQUAL(m.plan->n_calls, 128 + 1 + 4);
    end(&m);
    text_destroy(&w.text);
}

/* Tiles of a head of 200 columns. */
static void test_head(void) {
    static const struct {
        int64_t most, width;
        uint32_t tiles;
        int64_t last;
    } cases[] = {{64, 64, 4, 136}, {100, 112, 2, 88}, {199, 112, 2, 88}, {16, 16, 13, 184}, {1, 16, 13, 184}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Writer w;
        Made m;
        model(&w, "NL");
        plan_text(&m, &w.text, FOLD_ALWAYS, cases[i].most);
        const NpuPlan *p = m.plan;
        CHECK_EQUAL(p->n_blocks, 2);
        CHECK_EQUAL(p->n_calls, 1 + cases[i].tiles);
        CHECK_EQUAL(p->blocks[1].columns, cases[i].width);
        CHECK_EQUAL(p->blocks[1].n_weights, 1);
        CHECK_EQUAL(p->blocks[1].n_calls, cases[i].tiles);
        CHECK_EQUAL(p->calls[1].first_column, 0);
        CHECK_EQUAL(p->calls[p->n_calls - 1].first_column, cases[i].last);
        end(&m);
        text_destroy(&w.text);
    }
    Writer w; /* as wide as a tile: no tiles */
    Made m;
    model(&w, "NL");
    plan_text(&m, &w.text, FOLD_ALWAYS, 200);
    CHECK_EQUAL(m.plan->n_blocks, 1);
    CHECK_EQUAL(m.plan->blocks[0].columns, 0);
    end(&m);
    text_destroy(&w.text);
}

/* The steps of a chain differ in what constants they read: equal ones stay in the graph, the others are arguments. */
static void test_weights(void) {
    Text text;
    Made m;
    text_init(&text);
    text_add(&text, "graph {\n%%0 = input {index=0} : f32[4,4]\n");
    text_add(&text, "%%mask = constant @mask {index=0} : f32[1,4] literal = [0.0, 1.0, 2.0, 3.0]\n");
    for (int i = 0; i < 6; i++) { /* `eps` has its own copy in each step, `w` its own values */
        text_add(&text, "%%w%d = constant @w {index=%d} : f32[4,4] state\n", i, 1 + 2 * i);
        text_add(&text, "%%e%d = constant @eps {index=%d} : f32[1] literal = [0.5]\n", i, 2 + 2 * i);
        text_add(&text, "%%a%d = linear %%%s%d, %%w%d : f32[4,4]\n", i, i ? "d" : "", i ? i - 1 : 0, i);
        text_add(&text, "%%b%d = add %%a%d, %%mask : f32[4,4]\n", i, i);
        text_add(&text, "%%c%d = mul %%b%d, %%e%d : f32[4,4]\n", i, i, i);
        text_add(&text, "%%d%d = exp %%c%d : f32[4,4]\n", i, i);
    }
    text_add(&text, "return %%d5\n}\n");
    plan_text(&m, &text, FOLD_ALWAYS, NO_HEAD);
    const NpuPlan *p = m.plan;
    CHECK_EQUAL(p->n_blocks, 1);
    CHECK_EQUAL(p->n_calls, 6);
    CHECK_EQUAL(p->blocks[0].n_instrs, 4);
    CHECK_EQUAL(p->blocks[0].n_weights, 1);
    for (uint32_t c = 0; c < p->n_calls; c++) CHECK_EQUAL(p->calls[c].weights[0], 1 + 2 * c);
    end(&m);
    text_destroy(&text);
}

/* Pairs of branches that look alike and are not: one graph must not serve both. */
static void test_differences(void) {
    static const char *const pairs[][2] = {
        /* which operand is which */
        {"%a = exp %x : f32[4,4]\n%b = neg %x : f32[4,4]\n%r = sub %a, %b : f32[4,4]",
         "%a = exp %x : f32[4,4]\n%b = neg %x : f32[4,4]\n%r = sub %b, %a : f32[4,4]"},
        /* one input or two */
        {"%a = exp %x : f32[4,4]\n%b = neg %y : f32[4,4]\n%r = sub %a, %b : f32[4,4]",
         "%a = exp %x : f32[4,4]\n%b = neg %x : f32[4,4]\n%r = sub %a, %b : f32[4,4]"},
        /* views between */
        {"%a = exp %x : f32[4,4]\n%t = permute %a {dims=[1, 0]} : f32[4,4]\n%r = add %t, %x : f32[4,4]",
         "%a = exp %x : f32[4,4]\n%t = reshape %a {shape=[4, 4]} : f32[4,4]\n%r = add %t, %x : f32[4,4]"},
        /* attributes of a view */
        {"%a = exp %x : f32[4,4]\n%s = slice %a {dim=0, end=2, step=1} : f32[2,4]\n%b = cat %s, %s {dim=0} : f32[4,4]\n"
         "%r = neg %b : f32[4,4]",
         "%a = exp %x : f32[4,4]\n%s = slice %a {dim=0, start=2, end=4, step=1} : f32[2,4]\n"
         "%b = cat %s, %s {dim=0} : f32[4,4]\n%r = neg %b : f32[4,4]"},
        /* scalars: 1 and 1.0; -0.0 and 0.0 */
        {"%a = add %x {scalar=0.0} : f32[4,4]\n%r = exp %a : f32[4,4]",
         "%a = add %x {scalar=-0.0} : f32[4,4]\n%r = exp %a : f32[4,4]"},
        {"%a = add %x {scalar=1} : f32[4,4]\n%r = exp %a : f32[4,4]",
         "%a = add %x {scalar=1.0} : f32[4,4]\n%r = exp %a : f32[4,4]"},
        /* programs */
        {"%a = elementwise %x, %y {program=[s0 = mul(i0, i1) : f32; s1 = exp(s0) : f32]} : f32[4,4]\n"
         "%r = neg %a : f32[4,4]",
         "%a = elementwise %x, %y {program=[s0 = mul(i0, i0) : f32; s1 = exp(s0) : f32]} : f32[4,4]\n"
         "%r = neg %a : f32[4,4]"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        for (int equal = 0; equal < 2; equal++) {
            Text text;
            Made m;
            text_init(&text);
            text_add(&text, "graph {\n%%0 = input {index=0} : f32[4,4]\n%%1 = input {index=1} : f32[4,4]\n");
            for (int branch = 0; branch < 2; branch++) { /* host calls make segments of them */
                text_add(&text, "%%x%d = host %%0 {name=\"h\"} : f32[4,4]\n%%y%d = host %%1 {name=\"h\"} : f32[4,4]\n",
                         branch, branch);
                for (const char *at = pairs[i][equal ? 0 : branch]; *at; at++) {
                    text_add(&text, "%c", *at);
                    if (*at == '%') text_add(&text, "%c%d", *++at, branch);
                }
                text_add(&text, "\n%%h%d = host %%r%d {name=\"h\"} : f32[4,4]\n", branch, branch);
            }
            text_add(&text, "return %%h0, %%h1\n}\n");
            plan_text(&m, &text, FOLD_ALWAYS, 0);
            CHECK_EQUAL(m.segments.count, 2);
            if (m.plan && m.plan->n_blocks != (equal ? 1u : 2u)) {
                fprintf(stderr, "pair %zu: %u blocks\n", i, m.plan->n_blocks);
                check_failures++;
            }
            end(&m);
            text_destroy(&text);
        }
    }
}

/* --- random programs ------------------------------------------------------------------------------------------------
 */
static void throw_devices(Npuir *ir, Random *r, uint32_t share) {
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        Instr *instr = &ir->instrs[i];
        instr->device = instr->op != OP_host && random_below(r, 100) < share ? DEVICE_NPU : DEVICE_CPU;
    }
}

static void random_made(Made *m, Random *r) {
    begin(m);
    RandomOptions o = {5 + random_below(r, 150), 2 + random_below(r, 8), random_below(r, 2) != 0,
                       random_below(r, 2) != 0};
    CHECK_OK(&m->ctx, random_npuir(&m->ctx, &m->arena, r, &o, "npu4000", &m->ir));
    throw_devices(m->ir, r, 30 + random_below(r, 71));
    CHECK_OK(&m->ctx, segments_find(&m->ctx, &m->arena, m->ir, &m->segments));
}

static void test_random(void) {
    Random r = {5};
    uint32_t folded = 0, tiles = 0;
    for (int round = 0; round < 1500; round++) {
        Made m;
        random_made(&m, &r);
        CHECK_OK(&m.ctx, plan(&m, FOLD_ALWAYS, 16)); /* which is checked inside */
        if (m.plan) {
            folded += m.plan->n_blocks < m.plan->n_calls;
            for (uint32_t b = 0; b < m.plan->n_blocks; b++) tiles += m.plan->blocks[b].columns > 0;
        }
        CHECK_OK(&m.ctx, plan(&m, FOLD_NEVER, 16));
        CHECK_OK(&m.ctx, plan(&m, FOLD_CUT, 16));
        CHECK_OK(&m.ctx, plan(&m, FOLD_CONSTANT, 16));
        end(&m);
    }
    printf("plan: %u of 1500 random programs fold, %u heads\n", folded, tiles);
    CHECK(folded > 100 && tiles > 0);
}

/* Each allocation fails in turn. */
static void test_memory(void) {
    Random r = {17};
    Made m;
    do {
        end(&m), random_made(&m, &r);
    } while (m.segments.count < 3);
    for (uint64_t k = 1;; k++) {
        m.ctx.fail_allocation = k;
        Code code = plan(&m, FOLD_ALWAYS, 16);
        bool failed = m.ctx.fail_allocation == 0;
        m.ctx.fail_allocation = 0;
        CHECK_EQUAL(code, failed ? CODE_NO_MEMORY : CODE_OK);
        CHECK_EQUAL(m.plan == NULL, failed);
        m.ctx.code = CODE_OK;
        if (!failed) break;
    }
    end(&m);
}

/* The checker refuses plans with a fault in them. */
static void test_checker(void) {
    Writer w;
    model(&w, "GGAGGAGGGANL");
    for (int fault = 0; fault < 11; fault++) {
        Made m;
        plan_text(&m, &w.text, FOLD_ALWAYS, 64);
        NpuPlan *p = m.plan;
        NpuCall *call = &p->calls[1];
        NpuBlock *block = &p->blocks[call->block];
        CHECK_OK(&m.ctx, plan_check(&m.ctx, p));
        switch (fault) {
        case 0: call->weights[0] = call->weights[1]; break;
        case 1: call->in[0] = p->calls[0].in[0]; break;
        case 2: call->out[0] = p->calls[0].out[0]; break;
        case 3: p->calls[p->n_calls - 1].first_column++; break;
        case 4: p->calls[p->n_calls - 2].first_column += 8; break;
        case 5: block->n_weights--; break;
        case 6: block->n_instrs--; break;
        case 7: call->block = p->calls[2].block; break;
        case 8: block->n_calls++; break;
        case 9: block->n_out = 0; break;
        case 10: { /* one call too few */
            p->n_calls--;
            p->first_call[p->segments.count]--;
            p->blocks[p->calls[p->n_calls].block].n_calls--;
            break;
        }
        }
        Code code = plan_check(&m.ctx, p);
        if (code != CODE_INTERNAL) {
            fprintf(stderr, "fault %d is not seen\n", fault);
            check_failures++;
        }
        end(&m);
    }
    text_destroy(&w.text);
}

/* --- files -------------------------------------------------------------------------------------------------------- */
static int plan_files(int n, char **names) {
    for (int i = 0; i < n; i++) {
        Made m;
        FILE *file = fopen(names[i], "rb");
        char *data = NULL;
        size_t size = 0, got;
        if (!file) {
            perror(names[i]);
            return 2;
        }
        do {
            data = realloc(data, size + 65536);
            if (!data) return 2;
            size += got = fread(data + size, 1, 65536, file);
        } while (got);
        fclose(file);
        begin(&m);
        Code code = lower(&m, data, size, false);
        double start = cpu_ms();
        if (code == CODE_OK) code = plan(&m, FOLD_ALWAYS, 0);
        if (code != CODE_OK) {
            fprintf(stderr, "%s: %s\n", names[i], m.ctx.text);
            return 1;
        }
        double ms = cpu_ms() - start;
        uint32_t on_npu = 0;
        for (uint32_t s = 0; s < m.segments.count; s++) on_npu += m.segments.items[s].count;
        printf("%u segments, %u instructions, %u blocks, %u calls, %.2f ms;", m.segments.count, on_npu,
               m.plan->n_blocks, m.plan->n_calls, ms);
        for (uint32_t b = 0; b < m.plan->n_blocks; b++) {
            const NpuBlock *block = &m.plan->blocks[b];
            printf(" %ux%u", block->n_calls, block->n_instrs);
            if (block->columns) printf("(%lld columns)", (long long)block->columns);
        }
        printf("\n");
        end(&m);
        free(data);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1) return plan_files(argc - 1, argv + 1);
    test_folding();
    test_never();
    test_cut();
    test_constant();
    test_depth();
    test_head();
    test_weights();
    test_differences();
    test_random();
    test_memory();
    test_checker();
    return check_done();
}
