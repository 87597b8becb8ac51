/* The executor with an accelerator: segments through a backend of the test's own, and an NPU emulated on the host. */
#include <math.h>
#include <stdlib.h>

#include "alloc/alloc.h"
#include "check.h"
#include "exec/frame.h"
#include "schedule/schedule.h"

/* --- programs from text ------------------------------------------------------------------------------------------- */
static KernelTraits traits(Op op) {
    const Kernel *kernel = cpu_kernel(op);
    return kernel ? kernel->traits : (KernelTraits){.contiguous = UINT32_MAX};
}
static int64_t scratch(const Graph *g, const Node *node, int threads) {
    const Kernel *kernel = cpu_kernel(node->op);
    return kernel && kernel->scratch ? kernel->scratch(g, node, threads) : 0;
}

typedef struct Subject {
    Context ctx;
    Arena arena;
    Graph *g;
    Npuir *ir;
    Segments segments;
} Subject;

static void open_subject(Subject *s, const char *text, const char *target) {
    memset(s, 0, sizeof *s);
    context_init(&s->ctx);
    arena_init(&s->arena);
    const LowerOptions lower = {
        .target = target_find(target), .traits = traits, .scratch = scratch, .threads = 1, .npu_on_host = true};
    ScheduleReport scheduled;
    AllocReport allocated;
    CHECK_OK(&s->ctx, graph_parse(&s->ctx, &s->arena, text, strlen(text), &s->g));
    CHECK_OK(&s->ctx, graph_verify(&s->ctx, s->g));
    CHECK_OK(&s->ctx, npuir_lower(&s->ctx, &s->arena, s->g, &lower, &s->ir));
    CHECK_OK(&s->ctx, npuir_verify(&s->ctx, s->ir));
    CHECK_OK(&s->ctx, schedule_plan(&s->ctx, s->ir, &scheduled));
    CHECK_OK(&s->ctx, alloc_plan(&s->ctx, s->ir, traits, &allocated));
    CHECK_OK(&s->ctx, alloc_check(&s->ctx, s->ir));
    CHECK_OK(&s->ctx, segments_find(&s->ctx, &s->arena, s->ir, &s->segments));
}
static void close_subject(Subject *s) { arena_destroy(&s->arena); }

/* --- a backend that has memory of its own ------------------------------------------------------------------------- */
typedef struct FakeFrame {
    char **memory; /* of each buffer that the device has, as it would keep it there between segments */
} FakeFrame;
typedef struct Fake {
    Backend backend;
    Subject *subject;
    int frames, runs, fail_at; /* fail_at: the run that fails, counted from 1 */
} Fake;

static Code fake_frame_create(Context *ctx, Backend *self, void **frame) {
    Fake *fake = (Fake *)self;
    FakeFrame *made = calloc(1, sizeof *made);
    if (!made) return fail(ctx, CODE_NO_MEMORY, "fake frame");
    made->memory = calloc(fake->subject->ir->n_buffers, sizeof *made->memory);
    fake->frames++;
    *frame = made;
    return CODE_OK;
}
static void fake_frame_destroy(Backend *self, void *frame) {
    Fake *fake = (Fake *)self;
    FakeFrame *f = frame;
    for (uint32_t b = 0; b < fake->subject->ir->n_buffers; b++) free(f->memory[b]);
    free(f->memory);
    free(f);
    fake->frames--;
}

static char *device_memory(FakeFrame *f, const Npuir *ir, BufferId b) {
    if (ir->buffers[b].space == SPACE_CONSTANT) return ir->graph->constants[ir->buffers[b].index].data;
    if (!f->memory[b]) f->memory[b] = aligned_alloc(64, (size_t)(ir->buffers[b].bytes + 64) & ~(size_t)63);
    return f->memory[b];
}
static Tensor device_tensor(FakeFrame *f, const Npuir *ir, RegId reg) {
    Tensor t = {0};
    if (reg == REG_NONE) return t;
    const Register *r = &ir->regs[reg];
    t = (Tensor){.dtype = r->dtype, .rank = r->rank};
    memcpy(t.shape, r->shape, r->rank * sizeof *r->shape);
    memcpy(t.strides, r->strides, r->rank * sizeof *r->strides);
    t.data = device_memory(f, ir, r->buffer) + r->offset * (int64_t)dtype_size(r->dtype);
    return t;
}

static Code fake_run(Context *ctx, Backend *self, void *frame, uint32_t index, const Tensor *in, const Tensor *out) {
    Fake *fake = (Fake *)self;
    FakeFrame *f = frame;
    const Npuir *ir = fake->subject->ir;
    const Segment *s = &fake->subject->segments.items[index];
    if (++fake->runs == fake->fail_at) return fail_device(ctx, 8, "the device is gone");
    for (uint32_t k = 0; k < s->n_in; k++) {
        BufferId b = ir->regs[s->in[k]].buffer;
        if (ir->buffers[b].device == DEVICE_NPU) continue; /* an earlier segment left it on the device */
        memcpy(device_memory(f, ir, b), in[k].data, (size_t)ir->buffers[b].bytes);
    }
    for (uint32_t p = s->first; p < s->first + s->count; p++) {
        const Instr *i = &ir->instrs[ir->order[p]];
        CHECK_EQUAL(i->device, DEVICE_NPU);
        Tensor args[2][8];
        for (uint32_t k = 0; k < i->n_in; k++) args[0][k] = device_tensor(f, ir, i->in[k]);
        for (uint32_t k = 0; k < i->n_out; k++) args[1][k] = device_tensor(f, ir, i->out[k]);
        KernelCall call = {
            .ctx = ctx, .node = i->node, .in = args[0], .out = args[1], .n_in = i->n_in, .n_out = i->n_out};
        if (i->scratch != BUFFER_NONE) call.scratch = device_memory(f, ir, i->scratch);
        TRY(cpu_kernel(i->op)->run(&call));
    }
    for (uint32_t k = 0; k < s->n_out; k++) {
        BufferId b = ir->regs[s->out[k]].buffer;
        memcpy(out[k].data, device_memory(f, ir, b), (size_t)ir->buffers[b].bytes);
    }
    return CODE_OK;
}

/* cumsum is for the host alone, so the two linears are segments; `t` skips the host, `u` is an output of the first. */
#define TWO_SEGMENTS                                                                                                   \
    "graph {\n"                                                                                                        \
    "  %x = input {index=0} : f32[64, 64]\n"                                                                           \
    "  %w = constant @w {index=0} : f32[64, 64] state\n"                                                               \
    "  %a = linear %x, %w : f32[64, 64] loc(\"model.py:3 in forward\")\n"                                              \
    "  %t = mul %a, %a : f32[64, 64]\n"                                                                                \
    "  %u = permute %t {dims=[1, 0]} : f32[64, 64]\n"                                                                  \
    "  %c = cumsum %u {dim=0} : f32[64, 64]\n"                                                                         \
    "  %b = linear %c, %w : f32[64, 64]\n"                                                                             \
    "  %s = add %b, %t : f32[64, 64] loc(\"model.py:9 in forward\")\n"                                                 \
    "  return %s, %t, %c\n"                                                                                            \
    "}\n"
enum { SIDE = 64, COUNT = SIDE * SIDE };

static void fill(float *x, int n, float scale) {
    for (int i = 0; i < n; i++) x[i] = scale * (float)((i * 37 + 11) % 17 - 8);
}
static void give_weight(Subject *s, float *w) {
    for (uint32_t c = 0; c < s->g->n_constants; c++) s->g->constants[c].data = w;
}

/* Islands that do not pay leave the NPU: this moves all linears and what both devices take back to it. */
static void force_segments(Subject *s) {
    const Target *target = target_find(s->ir->target);
    for (uint32_t i = 0; i < s->ir->n_instrs; i++) {
        Instr *instr = &s->ir->instrs[i];
        if (capability(target, DEVICE_NPU, s->g, instr->node)) continue;
        instr->device = DEVICE_NPU;
        for (uint32_t k = 0; k < instr->n_out; k++)
            if (instr->out[k] != REG_NONE) s->ir->buffers[s->ir->regs[instr->out[k]].buffer].device = DEVICE_NPU;
        if (instr->scratch != BUFFER_NONE) s->ir->buffers[instr->scratch].device = DEVICE_NPU;
    }
    ScheduleReport scheduled;
    AllocReport allocated;
    CHECK_OK(&s->ctx, npuir_verify(&s->ctx, s->ir));
    CHECK_OK(&s->ctx, schedule_plan(&s->ctx, s->ir, &scheduled));
    CHECK_OK(&s->ctx, alloc_plan(&s->ctx, s->ir, traits, &allocated));
    CHECK_OK(&s->ctx, alloc_check(&s->ctx, s->ir));
    CHECK_OK(&s->ctx, segments_find(&s->ctx, &s->arena, s->ir, &s->segments));
}

static void test_segments(void) {
    static float w[COUNT], x[COUNT], want[3][COUNT], got[3][COUNT];
    fill(w, COUNT, 0.03f);
    fill(x, COUNT, 0.1f);
    Subject host, npu;
    Executor *e;
    open_subject(&host, TWO_SEGMENTS, "cpu");
    give_weight(&host, w);
    const ExecutorOptions plain = {.kernels = cpu_kernel, .threads = 1, .pack = true};
    CHECK_OK(&host.ctx, executor_create(&host.ctx, host.ir, &plain, &e));
    CHECK_OK(&host.ctx, executor_run(&host.ctx, e, (void *[]){x}, (void *[]){want[0], want[1], want[2]}, NULL, NULL));
    executor_destroy(e);
    close_subject(&host);

    open_subject(&npu, TWO_SEGMENTS, "npu4000");
    give_weight(&npu, w);
    force_segments(&npu);
    CHECK_EQUAL(npu.segments.count, 2);
    CHECK_CODE(&npu.ctx, CODE_UNSUPPORTED, executor_create(&npu.ctx, npu.ir, &plain, &e));
    Fake fake = {.backend = {fake_frame_create, fake_frame_destroy, fake_run}, .subject = &npu};
    const ExecutorOptions options = {
        .kernels = cpu_kernel, .threads = 1, .pack = true, .segments = &npu.segments, .backend = &fake.backend};
    CHECK_OK(&npu.ctx, executor_create(&npu.ctx, npu.ir, &options, &e));
    CHECK_EQUAL(e->n_tasks, 3);
    for (int round = 0; round < 3; round++) {
        memset(got, 0, sizeof got);
        CHECK_OK(&npu.ctx, executor_run(&npu.ctx, e, (void *[]){x}, (void *[]){got[0], got[1], got[2]}, NULL, NULL));
        CHECK(memcmp(got, want, sizeof got) == 0);
    }
    CHECK_EQUAL(fake.frames, 1);

    fake.fail_at = fake.runs + 2;
    CHECK_CODE(&npu.ctx, CODE_DEVICE,
               executor_run(&npu.ctx, e, (void *[]){x}, (void *[]){got[0], got[1], got[2]}, NULL, NULL));
    CHECK_EQUAL(npu.ctx.reason, 8);
    CHECK(strstr(npu.ctx.text, "NPU segment 1, ") && strstr(npu.ctx.text, "model.py:9 in forward") &&
          strstr(npu.ctx.text, "the device is gone"));
    CHECK_OK(&npu.ctx, executor_run(&npu.ctx, e, (void *[]){x}, (void *[]){got[0], got[1], got[2]}, NULL, NULL));
    CHECK(memcmp(got, want, sizeof got) == 0);
    executor_destroy(e);
    CHECK_EQUAL(fake.frames, 0);
    close_subject(&npu);
}

/* --- emulation ---------------------------------------------------------------------------------------------------- */
static Code halve(Context *ctx, void *user, const Tensor *weight, bool linear, const Tensor *out) {
    (void)ctx;
    int *linears = user;
    *linears += linear;
    for (int64_t i = 0; i < weight->shape[0]; i++)
        for (int64_t j = 0; j < weight->shape[1]; j++) {
            const float *from = (const float *)weight->data + i * weight->strides[0] + j * weight->strides[1];
            ((float *)out->data)[i * out->strides[0] + j * out->strides[1]] = f16_to_f32(f32_to_f16(*from));
        }
    return CODE_OK;
}

#define EMULATED                                                                                                       \
    "graph {\n"                                                                                                        \
    "  %x = input {index=0} : f32[4, 4]\n"                                                                             \
    "  %w = constant @w {index=0} : f32[4, 4] state\n"                                                                 \
    "  %a = linear %x, %w : f32[4, 4]\n"                                                                               \
    "  %t = gt %a {scalar=1000.0} : bool[4, 4]\n"                                                                      \
    "  %m = mul %a {scalar=1000.0} : f32[4, 4]\n"                                                                      \
    "  %k = minimum %a {scalar=-3.4e+38} : f32[4, 4]\n"                                                                \
    "  return %a, %t, %m, %k\n"                                                                                        \
    "}\n"

static void test_emulation(void) {
    static float w[16], x[16], a[16], m[16], k[16];
    unsigned char t[16];
    for (int i = 0; i < 16; i++) {
        w[i] = i % 5 == 0 ? 1.0f + 0x1p-14f : 0; /* rounds to 1 */
        x[i] = i == 0 ? 1e6f : i == 1 ? 1025.3f : i == 2 ? -1e-9f : (float)i + 0x1p-12f;
    }
    Subject s;
    Executor *e;
    int linears = 0;
    open_subject(&s, EMULATED, "npu4000");
    give_weight(&s, w);
    force_segments(&s);
    const Emulation emulation = {halve, &linears};
    for (int pack = 0; pack < 2; pack++) {
        const ExecutorOptions options = {.kernels = cpu_kernel, .threads = 1, .pack = pack, .emulation = &emulation};
        CHECK_OK(&s.ctx, executor_create(&s.ctx, s.ir, &options, &e));
        CHECK_OK(&s.ctx, executor_run(&s.ctx, e, (void *[]){x}, (void *[]){a, t, m, k}, NULL, NULL));
        CHECK(a[0] == 57344.0f); /* an input that is too large stays finite, */
        CHECK(isinf(m[0]));      /* a result is not */
        CHECK(a[1] == 1025.0f && a[2] == 0.0f && a[3] == 3.0f && a[15] == 15.0f);
        CHECK(t[0] == 1 && t[1] == 1 && t[2] == 0 && t[15] == 0);
        CHECK(isinf(m[1]) && m[3] == 3000.0f);
        CHECK(k[0] == -65504.0f && k[15] == -65504.0f); /* a limit */
        CHECK(x[0] == 1e6f && w[0] == 1.0f + 0x1p-14f); /* what is not ours is as it was */
        executor_destroy(e);
    }
    CHECK_EQUAL(linears, 2);
    close_subject(&s);
}

static void test_memory_fails(void) {
    static float w[COUNT], x[COUNT], got[3][COUNT];
    int linears = 0;
    const Emulation emulation = {halve, &linears};
    for (int emulated = 0; emulated < 2; emulated++) {
        Subject s;
        open_subject(&s, TWO_SEGMENTS, "npu4000");
        give_weight(&s, w);
        force_segments(&s);
        Fake fake = {.backend = {fake_frame_create, fake_frame_destroy, fake_run}, .subject = &s};
        ExecutorOptions options = {.kernels = cpu_kernel, .threads = 1, .pack = true, .segments = &s.segments};
        if (emulated)
            options.emulation = &emulation;
        else
            options.backend = &fake.backend;
        bool done = false;
        for (uint64_t n = 1; n < 1000 && !done; n++) {
            Executor *e;
            s.ctx.code = CODE_OK;
            s.ctx.fail_allocation = n;
            Code code = executor_create(&s.ctx, s.ir, &options, &e);
            if (code == CODE_OK)
                code = executor_run(&s.ctx, e, (void *[]){x}, (void *[]){got[0], got[1], got[2]}, NULL, NULL);
            CHECK(code == CODE_OK || code == CODE_NO_MEMORY);
            executor_destroy(e);
            CHECK_EQUAL(fake.frames, 0);
            if (code == CODE_OK) CHECK(n > 10);
            done = code == CODE_OK;
        }
        CHECK(done);
        close_subject(&s);
    }
}

int main(void) {
    test_segments();
    test_emulation();
    test_memory_fails();
    return check_done();
}
