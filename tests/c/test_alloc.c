/* Allocation: every plan on random graphs is proved by the checker and stays near its bound; the checker finds spoiled
 * plans. */
#include <stdlib.h>
#include <time.h>

#include "alloc/alloc.h"
#include "check.h"
#include "npuir/live.h"
#include "random_graph.h"
#include "schedule/schedule.h"

/* The largest live set, byte by byte and the slow way: blocks joined by in-place reuse, counted at each position. */
static int64_t slow_bound(const Npuir *ir) {
    int64_t total = 0;
    uint32_t *root = malloc(ir->n_buffers * sizeof *root), *first = malloc(ir->n_buffers * sizeof *first),
             *last = malloc(ir->n_buffers * sizeof *last);
    for (BufferId b = 0; b < ir->n_buffers; b++) {
        root[b] = b;
        first[b] = last[b] = UINT32_MAX;
    }
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        const Instr *i = &ir->instrs[ir->order[p]];
        if (i->inplace) root[ir->regs[i->out[0]].buffer] = root[ir->regs[i->in[i->inplace_operand]].buffer];
        for (uint32_t k = 0; k < i->n_in + i->n_out + 1; k++) {
            BufferId b = BUFFER_NONE;
            if (k == i->n_in + i->n_out)
                b = i->scratch;
            else if (k < i->n_in)
                b = i->in[k] == REG_NONE ? BUFFER_NONE : ir->regs[i->in[k]].buffer;
            else
                b = i->out[k - i->n_in] == REG_NONE ? BUFFER_NONE : ir->regs[i->out[k - i->n_in]].buffer;
            if (b == BUFFER_NONE) continue;
            b = root[b];
            if (first[b] == UINT32_MAX) first[b] = p;
            last[b] = p;
        }
    }
    for (int d = 0; d < DEVICE_COUNT; d++) {
        int64_t most = 0;
        for (uint32_t p = 0; p < ir->n_instrs; p++) {
            int64_t live = 0;
            for (BufferId b = 0; b < ir->n_buffers; b++) {
                const Buffer *buffer = &ir->buffers[b];
                if (buffer->space != SPACE_ARENA || buffer->device != (Device)d || root[b] != b || first[b] > p ||
                    last[b] < p)
                    continue;
                live += (buffer->bytes + 63) / 64 * 64;
            }
            most = live > most ? live : most;
        }
        total += most;
    }
    free(root);
    free(first);
    free(last);
    return total;
}

static void test_random(void) {
    Random r = {21};
    int exact = 0, rounds = 400, near = 0, inplace = 0, clashes = 0, moved = 0;
    double worst = 1;
    for (int round = 0; round < rounds; round++) {
        Context ctx;
        Arena arena;
        Npuir *ir;
        AllocReport report;
        ScheduleReport schedule;
        context_init(&ctx);
        arena_init(&arena);
        RandomOptions o = {1 + random_below(&r, 150), 2 + random_below(&r, 40), round % 2, round % 3 > 0};
        CHECK_OK(&ctx, random_npuir(&ctx, &arena, &r, &o, round % 4 ? "cpu" : "npu4000", &ir));
        CHECK_OK(&ctx, schedule_plan(&ctx, ir, &schedule));
        CHECK_OK(&ctx, alloc_plan(&ctx, ir, test_traits, &report));
        CHECK_OK(&ctx, alloc_check(&ctx, ir));
        CHECK_EQUAL(report.lower_bound_bytes, slow_bound(ir));
        CHECK(report.arena_bytes >= report.lower_bound_bytes && report.physical_buffers <= report.virtual_buffers);
        exact += report.arena_bytes == report.lower_bound_bytes;
        near += report.lower_bound_bytes == 0;
        if (report.lower_bound_bytes) {
            double over = (double)report.arena_bytes / (double)report.lower_bound_bytes;
            worst = over > worst ? over : worst;
            near += over <= 1.05;
        }
        for (uint32_t i = 0; i < ir->n_instrs; i++) inplace += ir->instrs[i].inplace;
        /* the checker is no rubber stamp: a buffer moved over another that is live with it is found */
        Lifetimes life;
        CHECK_OK(&ctx, npuir_lifetimes(&ctx, &arena, ir, ir->order, &life));
        for (int k = 0; k < 20; k++) {
            BufferId a = random_below(&r, ir->n_buffers), b = random_below(&r, ir->n_buffers);
            Buffer *x = &ir->buffers[a], *y = &ir->buffers[b];
            if (a == b || x->space != SPACE_ARENA || y->space != SPACE_ARENA || x->device != y->device) continue;
            if (x->bytes == 0 || x->bytes > y->bytes || x->offset == y->offset) continue;
            bool together = life.first[a] <= life.last[b] && life.first[b] <= life.last[a];
            int64_t kept = x->offset;
            x->offset = y->offset;
            Code code = alloc_check(&ctx, ir);
            x->offset = kept;
            moved++;
            if (together) {
                CHECK(code == CODE_INTERNAL && ctx.text[0]);
                clashes++;
            }
            ctx.code = CODE_OK;
        }
        arena_destroy(&arena);
    }
    CHECK(clashes > 100 && inplace > 1000);
    CHECK(worst <= 1.15 && near >= rounds * 98 / 100); /* some sets of lifetimes cannot be packed into their bound */
    printf("alloc: %d of %d plans at their bound, the worst %.4f of it; %d in place; %d of %d spoiled plans had to "
           "clash and did\n",
           exact, rounds, worst, inplace, clashes, moved);
}

#ifdef __SANITIZE_ADDRESS__
#define SLACK 0.5 /* seconds of noise, where all takes five times as long */
#else
#define SLACK 0.1
#endif

static double seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }

static void test_large(void) {
    Random r = {31};
    for (int far = 0; far < 3; far++) {
        double took[2];
        for (int size = 0; size < 2; size++) {
            Context ctx;
            Arena arena;
            Npuir *ir;
            AllocReport report;
            context_init(&ctx);
            arena_init(&arena);
            uint32_t nodes = size ? 50000 : 12500;
            RandomOptions o = {nodes, far == 0 ? 10 : far == 1 ? 200 : nodes, false, true};
            double start = seconds();
            CHECK_OK(&ctx, random_npuir(&ctx, &arena, &r, &o, "cpu", &ir));
            double lowered = seconds();
            CHECK_OK(&ctx, alloc_plan(&ctx, ir, test_traits, &report));
            took[size] = seconds() - lowered;
            double planned = seconds();
            CHECK_OK(&ctx, alloc_check(&ctx, ir));
            double checked = seconds();
            printf("alloc: %u nodes, reach %u: graph and lowering %.1f ms, plan %.1f ms, check %.1f ms, %.4f of the "
                   "bound\n",
                   nodes, o.reach, (lowered - start) * 1e3, took[size] * 1e3, (checked - planned) * 1e3,
                   (double)report.arena_bytes / (double)report.lower_bound_bytes);
            if (size == 1) { /* the sweep finds a clash too */
                Lifetimes life;
                CHECK_OK(&ctx, npuir_lifetimes(&ctx, &arena, ir, ir->order, &life));
                int found = 0;
                for (BufferId a = 0; a + 1 < ir->n_buffers && found < 3; a++) {
                    Buffer *x = &ir->buffers[a], *y = &ir->buffers[a + 1];
                    if (x->space != SPACE_ARENA || y->space != SPACE_ARENA || x->offset == y->offset || !x->bytes ||
                        !y->bytes)
                        continue;
                    if (life.last[a] < life.first[a + 1] || x->bytes > y->bytes) continue;
                    int64_t kept = x->offset;
                    x->offset = y->offset;
                    CHECK_CODE(&ctx, CODE_INTERNAL, alloc_check(&ctx, ir));
                    x->offset = kept;
                    found++;
                }
                CHECK_EQUAL(found, 3);
            }
            arena_destroy(&arena);
        }
        CHECK(took[1] < SLACK + 12 * took[0]); /* four times the nodes; the square would be 16 */
    }
}

int main(void) {
    test_random();
    test_large();
    return check_done();
}
