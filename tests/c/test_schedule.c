/* Scheduling against brute force on small random graphs, and on large ones against what must hold. */
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "random_graph.h"
#include "schedule/schedule.h"

enum { MOST = 9 };

/* Devices are thrown anew, without regard to what they can do. */
static void throw_devices(Npuir *ir, Random *r, uint32_t share) {
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        Instr *instr = &ir->instrs[i];
        instr->device = random_below(r, 100) < share ? DEVICE_NPU : DEVICE_CPU;
        for (uint32_t k = 0; k < instr->n_out; k++) {
            if (instr->out[k] != REG_NONE) ir->buffers[ir->regs[instr->out[k]].buffer].device = instr->device;
        }
        if (instr->scratch != BUFFER_NONE) ir->buffers[instr->scratch].device = instr->device;
    }
}

static bool is_effect(const Instr *instr) { return instr->op == OP_host && node_int(instr->node, ATTR_effect); }

/* needs[i]: set of instructions that must run before i. */
static void find_needs(const Npuir *ir, uint32_t *needs) {
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        needs[i] = 0;
        for (uint32_t j = 0; j < i; j++) {
            for (uint32_t k = 0; k < ir->instrs[i].n_in; k++) {
                for (uint32_t m = 0; m < ir->instrs[j].n_out; m++) {
                    RegId in = ir->instrs[i].in[k], out = ir->instrs[j].out[m];
                    if (in != REG_NONE && out != REG_NONE && ir->regs[in].buffer == ir->regs[out].buffer)
                        needs[i] |= 1u << j;
                }
            }
            if (is_effect(&ir->instrs[i]) && is_effect(&ir->instrs[j])) needs[i] |= 1u << j;
        }
    }
}

/* Fewest changes over all orders: over sets of what has run, and the device of the last one. */
static uint32_t brute_force(const Npuir *ir, const uint32_t *needs) {
    static const uint32_t far = 1000;
    uint32_t n = ir->n_instrs, best[1 << MOST][2];
    for (uint32_t set = 0; set < 1u << n; set++) best[set][0] = best[set][1] = far;
    best[0][DEVICE_CPU] = 0;
    for (uint32_t set = 0; set < 1u << n; set++) {
        for (uint32_t last = 0; last < 2; last++) {
            for (uint32_t i = 0; i < n && best[set][last] < far; i++) {
                if (set >> i & 1 || (needs[i] & ~set)) continue;
                uint32_t device = ir->instrs[i].device, cost = best[set][last] + (device != last);
                if (cost < best[set | 1u << i][device]) best[set | 1u << i][device] = cost;
            }
        }
    }
    uint32_t all = (1u << n) - 1, on_cpu = best[all][DEVICE_CPU], on_npu = best[all][DEVICE_NPU] + 1;
    return on_cpu < on_npu ? on_cpu : on_npu;
}

static void test_small(void) {
    Random r = {11};
    uint32_t needs[MOST], rounds = 0, optimal = 0, fewer = 0;
    while (rounds < 2000) {
        Context ctx;
        Arena arena;
        Npuir *ir;
        ScheduleReport report;
        context_init(&ctx);
        arena_init(&arena);
        RandomOptions o = {2 + random_below(&r, 7), 3 + random_below(&r, 8), true, true};
        CHECK_OK(&ctx, random_npuir(&ctx, &arena, &r, &o, "npu4000", &ir));
        if (ir->n_instrs <= MOST) {
            throw_devices(ir, &r, 20 + random_below(&r, 60));
            find_needs(ir, needs);
            uint32_t least = brute_force(ir, needs);
            CHECK_OK(&ctx, schedule_plan(&ctx, ir, &report));
            CHECK(report.transitions_after <= report.transitions_before && report.transitions_after >= least);
            CHECK_EQUAL(report.transitions_after, schedule_transitions(ir, ir->order));
            optimal += report.transitions_after == least;
            fewer += report.transitions_after < report.transitions_before;
            uint32_t done = 0;
            for (uint32_t p = 0; p < ir->n_instrs; p++) {
                CHECK(!(needs[ir->order[p]] & ~done));
                done |= 1u << ir->order[p];
            }
            rounds++;
        }
        arena_destroy(&arena);
    }
    CHECK_EQUAL(optimal, rounds);
    printf("schedule: %u of %u small graphs optimal, %u better than program order\n", optimal, rounds, fewer);
}

/* `relu` on the CPU, `exp` on the NPU; each operand is a letter of an earlier instruction, `.` the input. */
static void plan_text(Context *ctx, Arena *arena, const char *devices, const char *operands, Npuir **ir) {
    Graph *g;
    NodeId id;
    int64_t shape[] = {4};
    Type type = {DTYPE_F32, 1, shape};
    LowerOptions options = {.target = target_find("npu4000"), .traits = test_traits, .scratch = NULL, .threads = 1};
    CHECK_OK(ctx, graph_create(ctx, arena, &g));
    CHECK_OK(ctx, graph_insert(ctx, g, NODE_NONE, OP_input, NULL, 0, &type, 1, -1, &id));
    ValueId in = graph_node(g, id)->first_result;
    g->inputs = &in;
    g->n_inputs = 1;
    for (size_t i = 0; devices[i]; i++) {
        ValueId v = operands[i] == '.' ? in : 1u + (ValueId)(operands[i] - 'a');
        CHECK_OK(ctx, graph_insert(ctx, g, NODE_NONE, OP_relu, &v, 1, &type, 1, -1, &id));
    }
    CHECK_OK(ctx, npuir_lower(ctx, arena, g, &options, ir));
    for (size_t i = 0; devices[i]; i++) (*ir)->instrs[i].device = devices[i] == 'n' ? DEVICE_NPU : DEVICE_CPU;
}

static void test_known(void) {
    static const struct {
        const char *devices, *operands;
        uint32_t before, after;
    } cases[] = {
        {"ccc", ".ab", 0, 0},       {"nnn", ".ab", 2, 2}, {"cnnnc", ".abcd", 2, 2}, /* one run on the NPU */
        {"cncncn", "......", 6, 2},                                                 /* independent ones */
        {"cncncn", ".a.c.e", 6, 2},                                                 /* three pairs */
        {"ncncnc", ".abcde", 6, 6},                                                 /* a chain that alternates */
        {"nccn", ".a.c", 4, 2}, /* the last needs only the third, which needs nothing */
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        Context ctx;
        Arena arena;
        Npuir *ir;
        ScheduleReport report;
        context_init(&ctx);
        arena_init(&arena);
        plan_text(&ctx, &arena, cases[k].devices, cases[k].operands, &ir);
        CHECK_OK(&ctx, schedule_plan(&ctx, ir, &report));
        CHECK_EQUAL(report.transitions_before, cases[k].before);
        CHECK_EQUAL(report.transitions_after, cases[k].after);
        arena_destroy(&arena);
    }
}

static void test_single_device(void) {
    Random r = {3};
    for (int round = 0; round < 50; round++) {
        Context ctx;
        Arena arena;
        Npuir *ir;
        ScheduleReport report;
        context_init(&ctx);
        arena_init(&arena);
        RandomOptions o = {50, 5, false, true};
        CHECK_OK(&ctx, random_npuir(&ctx, &arena, &r, &o, "cpu", &ir));
        CHECK_OK(&ctx, schedule_plan(&ctx, ir, &report));
        CHECK_OK(&ctx, npuir_verify(&ctx, ir));
        CHECK(report.transitions_before == 0 && report.transitions_after == 0);
        arena_destroy(&arena);
    }
}

static double seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }

static void test_large(void) {
    Random r = {4};
    for (int far = 0; far < 2; far++) {
        double took[2];
        for (int size = 0; size < 2; size++) {
            Context ctx;
            Arena arena;
            Npuir *ir;
            ScheduleReport report;
            context_init(&ctx);
            arena_init(&arena);
            uint32_t nodes = size ? 50000 : 12500;
            RandomOptions o = {nodes, far ? nodes : 20, true, true};
            CHECK_OK(&ctx, random_npuir(&ctx, &arena, &r, &o, "npu4000", &ir));
            throw_devices(ir, &r, 50);
            double start = seconds();
            CHECK_OK(&ctx, schedule_plan(&ctx, ir, &report));
            took[size] = seconds() - start;
            CHECK(report.transitions_after <= report.transitions_before);
            arena_destroy(&arena);
        }
        printf("schedule: 12500 nodes %.1f ms, 50000 nodes %.1f ms\n", took[0] * 1e3, took[1] * 1e3);
        CHECK(took[1] < 0.05 + 12 * took[0]); /* near linear, with room for a busy machine */
    }
}

int main(void) {
    test_small();
    test_known();
    test_single_device();
    test_large();
    return check_done();
}
