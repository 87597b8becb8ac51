/* Lowering, verification and text of NPUIR. */
#include <stdlib.h>

#include "alloc/alloc.h"
#include "check.h"
#include "npuir/view.h"
#include "random_graph.h"
#include "schedule/schedule.h"

/* --- views: compare with indexing element by element ------------------------------------------------------------ */
static void elements(const View *v, int64_t *out) {
    int64_t count = view_count(v->rank, v->shape), index[MAX_RANK] = {0};
    for (int64_t n = 0; n < count; n++) {
        out[n] = v->offset;
        for (int d = 0; d < v->rank; d++) out[n] += index[d] * v->strides[d];
        for (int d = v->rank - 1; d >= 0 && ++index[d] == v->shape[d]; d--) index[d] = 0;
    }
}

static void test_reshape(void) {
    Random r = {7};
    int views = 0, copies = 0;
    for (int round = 0; round < 20000; round++) {
        View v = {.rank = 3}, out;
        int64_t dims[3] = {0, 1, 2}, shape[4], before[512], after[512], dense[512];
        for (int d = 0; d < 3; d++) v.shape[d] = 1 + random_below(&r, 4);
        view_dense_strides(3, v.shape, NULL, v.strides);
        if (random_below(&r, 2)) {
            int a = (int)random_below(&r, 3), b = (int)random_below(&r, 3);
            int64_t t = dims[a];
            dims[a] = dims[b];
            dims[b] = t;
            view_permute(&v, dims, &v);
        }
        if (random_below(&r, 3) == 0) {
            int64_t d = random_below(&r, 3), start = random_below(&r, (uint32_t)v.shape[d]);
            view_slice(&v, d, start, v.shape[d], 1 + random_below(&r, 2), &v);
        }
        if (random_below(&r, 4) == 0 && v.shape[1] == 1) view_expand(&v, 3, (int64_t[]){v.shape[0], 3, v.shape[2]}, &v);
        int64_t count = view_count(3, v.shape), left = count;
        for (int d = 0; d < 3; d++) { /* a random shape of the same count */
            do shape[d] = 1 + random_below(&r, (uint32_t)left);
            while (left % shape[d]);
            left /= shape[d];
        }
        shape[3] = left;
        elements(&v, before);
        if (view_reshape(&v, 4, shape, &out)) {
            views++;
            elements(&out, after);
            CHECK(memcmp(before, after, (size_t)count * sizeof *before) == 0);
        } else { /* no strides exist: the innermost dimension or another would have to jump; dense memory always has
                    them */
            copies++;
            View row = {.rank = 3};
            memcpy(row.shape, v.shape, sizeof row.shape);
            view_dense_strides(3, row.shape, NULL, row.strides);
            CHECK(view_reshape(&row, 4, shape, &out));
            elements(&out, dense);
            for (int64_t n = 0; n < count; n++) CHECK_EQUAL(dense[n], n);
            CHECK(!view_is_row_major(3, v.shape, v.strides));
        }
    }
    CHECK(views > 5000 && copies > 500);
    View empty = {.rank = 2, .shape = {0, 3}, .strides = {3, 1}}, out;
    CHECK(view_reshape(&empty, 1, (int64_t[]){0}, &out) && out.strides[0] == 1);
    CHECK_EQUAL(view_extent(2, (int64_t[]){2, INT64_MAX}, (int64_t[]){1, 2}), -1);
    CHECK(view_is_unit_inner(3, (int64_t[]){2, 3, 4}, (int64_t[]){18, 6, 1}));
    CHECK(!view_is_unit_inner(3, (int64_t[]){2, 3, 4}, (int64_t[]){20, 6, 1}));
    CHECK(!view_is_unit_inner(2, (int64_t[]){3, 4}, (int64_t[]){1, 3}));
    CHECK(view_is_unit_inner(3, (int64_t[]){3, 1, 4}, (int64_t[]){4, 99, 1}));
}

/* --- text ------------------------------------------------------------------------------------------------------- */
static char *print(Context *ctx, const Npuir *ir, bool schedule) {
    Text text;
    text_init(&text);
    CHECK_OK(ctx, npuir_print(ctx, ir, schedule, &text));
    return text.data;
}

/* What must run alone does not pass as a member of a group. */
static void check_wrong_groups(Npuir *ir) {
    for (uint32_t p = 0; p + 1 < ir->n_instrs; p++) {
        Instr *a = &ir->instrs[ir->order[p]], *b = &ir->instrs[ir->order[p + 1]];
        uint32_t kept[2] = {a->group, b->group};
        bool needs = false;
        for (uint32_t k = 0; k < b->n_in; k++)
            for (uint32_t m = 0; m < a->n_out; m++)
                needs = needs || (b->in[k] != REG_NONE && a->out[m] != REG_NONE &&
                                  ir->regs[b->in[k]].buffer == ir->regs[a->out[m]].buffer);
        if (!needs && op_is(a->op, CONTRACTION) && op_is(b->op, CONTRACTION)) continue;
        Context ctx;
        context_init(&ctx);
        a->group = b->group = 1000;
        CHECK(npuir_verify(&ctx, ir) == CODE_INVALID);
        a->group = kept[0], b->group = kept[1];
    }
}

static void test_random(void) {
    Random r = {1};
    uint32_t grouped = 0;
    for (int round = 0; round < 300; round++) {
        Context ctx;
        Arena arena;
        Npuir *ir, *back;
        AllocReport report;
        ScheduleReport schedule;
        context_init(&ctx);
        arena_init(&arena);
        RandomOptions o = {1 + random_below(&r, 60), 1 + random_below(&r, 20), round % 2, true};
        CHECK_OK(&ctx, random_npuir(&ctx, &arena, &r, &o, round % 3 ? "npu4000" : "cpu", &ir));
        CHECK_OK(&ctx, npuir_verify(&ctx, ir));
        CHECK_OK(&ctx, schedule_plan(&ctx, ir, &schedule));
        CHECK_OK(&ctx, npuir_verify(&ctx, ir));
        CHECK(schedule.transitions_after <= schedule.transitions_before);
        for (uint32_t i = 0; i < ir->n_instrs; i++)
            if (op_is(ir->instrs[i].op, CONTRACTION)) ir->instrs[i].columns = 8;
        CHECK_OK(&ctx, group_plan(&ctx, ir, &schedule));
        CHECK_OK(&ctx, npuir_verify(&ctx, ir));
        CHECK(schedule_transitions(ir, ir->order) <= schedule.transitions_after);
        grouped += schedule.grouped;
        check_wrong_groups(ir);
        CHECK_OK(&ctx, alloc_plan(&ctx, ir, test_traits, &report));
        CHECK_OK(&ctx, alloc_check(&ctx, ir));
        for (uint32_t input = 0; input < ir->n_inputs; input++) {
            for (uint32_t output = 0; output < ir->n_outputs; output++)
                if (alloc_may_share(ir, test_traits, input, output))
                    CHECK_OK(&ctx, alloc_check_shared(&ctx, ir, input, output));
        }
        CHECK_OK(&ctx, npuir_verify(&ctx, ir));
        for (int form = 0; form < 2; form++) {
            char *text = print(&ctx, ir, form);
            Code code = npuir_parse(&ctx, &arena, text, strlen(text), &back);
            CHECK(code == CODE_OK);
            if (code != CODE_OK) {
                fprintf(stderr, "%s\n%s", ctx.text, text);
                exit(1);
            }
            char *again = print(&ctx, back, form);
            CHECK(strcmp(text, again) == 0);
            if (form) CHECK_OK(&ctx, alloc_check(&ctx, back));
            /* no bytes whatever crash the parser */
            for (int k = 0; k < 40; k++) {
                size_t size = strlen(again);
                strcpy(again, text);
                for (uint32_t n = 1 + random_below(&r, 3); n > 0; n--) {
                    char *at = again + random_below(&r, (uint32_t)size);
                    switch (random_below(&r, 4)) {
                    case 0: *at = (char)random_below(&r, 256); break;
                    case 1: *at = "0123456789_%rb-{}[]\n"[random_below(&r, 20)]; break;
                    case 2: size = (size_t)(at - again) + 1; break;
                    default:
                        memmove(again + random_below(&r, (uint32_t)size / 2 + 1), again + size / 2,
                                random_below(&r, (uint32_t)size / 2 + 1));
                    }
                }
                Context other;
                Arena space;
                context_init(&other);
                arena_init(&space);
                code = npuir_parse(&other, &space, again, size, &back);
                CHECK(code == CODE_OK || (code == CODE_INVALID && other.text[0]));
                if (code == CODE_OK) {
                    Text out;
                    text_init(&out);
                    CHECK_OK(&other, npuir_print(&other, back, false, &out));
                    if (schedule_plan(&other, back, &schedule) == CODE_OK &&
                        alloc_plan(&other, back, test_traits, &report) == CODE_OK)
                        CHECK_OK(&other, alloc_check(&other, back));
                    text_destroy(&out);
                }
                arena_destroy(&space);
            }
            free(again);
            free(text);
        }
        arena_destroy(&arena);
    }
    CHECK(grouped > 20);
}

static void test_no_memory(void) {
    for (uint64_t n = 1;; n++) {
        Context ctx;
        Arena arena;
        Npuir *ir, *back;
        Random r = {5};
        Text text;
        context_init(&ctx);
        arena_init(&arena);
        text_init(&text);
        RandomOptions o = {40, 10, true, true};
        ctx.fail_allocation = n;
        ScheduleReport schedule;
        AllocReport report;
        Code code = random_npuir(&ctx, &arena, &r, &o, "npu4000", &ir);
        if (code == CODE_OK) code = npuir_verify(&ctx, ir);
        if (code == CODE_OK) code = schedule_plan(&ctx, ir, &schedule);
        if (code == CODE_OK) code = alloc_plan(&ctx, ir, test_traits, &report);
        if (code == CODE_OK) code = alloc_check(&ctx, ir);
        if (code == CODE_OK) code = npuir_print(&ctx, ir, true, &text);
        if (code == CODE_OK) code = npuir_parse(&ctx, &arena, text.data, text.size, &back);
        bool done = ctx.fail_allocation > 0;
        CHECK(code == (done ? CODE_OK : CODE_NO_MEMORY));
        text_destroy(&text);
        arena_destroy(&arena);
        if (done) break;
    }
}

/* --- one graph of each kind ------------------------------------------------------------------------------------- */
static const char block[] =
    "graph {\n"
    "  %ids = input {index=0} : i64[1,4]\n"
    "  %past = input {index=1} : f32[1,2,4,8]\n"
    "  %wte = constant @wte {index=0} : f32[100,16] state\n"
    "  %w = constant @w {index=1} : f32[48,16] state\n"
    "  %o = constant @o {index=2} : f32[16,16] state\n"
    "  %x = embedding %wte, %ids : f32[1,4,16] loc(\"model.py:1\")\n"
    "  %n, %sum = layer_norm %x {axes=1, eps=1e-05} : f32[1,4,16], f32[1,4,16] loc(\"model.py:2\")\n"
    "  %qkv = linear %n, %w : f32[1,4,48] loc(\"model.py:3\")\n"
    "  %qs = slice %qkv {dim=2, end=16, step=1} : f32[1,4,16]\n"
    "  %ks = slice %qkv {dim=2, start=16, end=32, step=1} : f32[1,4,16]\n"
    "  %vs = slice %qkv {dim=2, start=32, end=48, step=1} : f32[1,4,16]\n"
    "  %q1 = reshape %qs {shape=[1, 4, 2, 8]} : f32[1,4,2,8]\n"
    "  %k1 = reshape %ks {shape=[1, 4, 2, 8]} : f32[1,4,2,8]\n"
    "  %v1 = reshape %vs {shape=[1, 4, 2, 8]} : f32[1,4,2,8]\n"
    "  %q = permute %q1 {dims=[0, 2, 1, 3]} : f32[1,2,4,8]\n"
    "  %k = permute %k1 {dims=[0, 2, 1, 3]} : f32[1,2,4,8]\n"
    "  %v = permute %v1 {dims=[0, 2, 1, 3]} : f32[1,2,4,8]\n"
    "  %a = attention %q, %k, %v {causal=true, safe=true, scale=0.35, order=[0, 2, 1, 3]} : f32[1,2,4,8] "
    "loc(\"model.py:4\")\n"
    "  %at = permute %a {dims=[0, 2, 1, 3]} : f32[1,4,2,8]\n"
    "  %ac = contiguous %at : f32[1,4,2,8]\n"
    "  %ar = reshape %ac {shape=[1, 4, 16]} : f32[1,4,16]\n"
    "  %p = linear %ar, %o : f32[1,4,16]\n"
    "  %y = add %x, %p : f32[1,4,16]\n"
    "  %logits = linear %y, %wte : f32[1,4,100]\n"
    "  %flat = reshape %logits {shape=[4, 100]} : f32[4,100]\n"
    "  return %flat, %k, %past, %flat\n"
    "}\n";

static uint32_t count_op(const Npuir *ir, Op op) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < ir->n_instrs; i++) n += ir->instrs[i].op == op;
    return n;
}

static void test_block(void) {
    Context ctx;
    Arena arena;
    Graph *g;
    Npuir *ir;
    ScheduleReport schedule;
    AllocReport report;
    Cost cost;
    context_init(&ctx);
    arena_init(&arena);
    CHECK_OK(&ctx, graph_parse(&ctx, &arena, block, strlen(block), &g));
    CHECK_OK(&ctx, graph_verify(&ctx, g));
    for (int npu = 0; npu < 2; npu++) {
        LowerOptions options = {.target = target_find(npu ? "npu4000" : "cpu"),
                                .traits = test_traits,
                                .scratch = NULL,
                                .threads = 1,
                                .npu_on_host = true};
        CHECK_OK(&ctx, npuir_lower(&ctx, &arena, g, &options, &ir));
        CHECK_OK(&ctx, npuir_verify(&ctx, ir));
        /* views cost nothing; attention writes the order that the permute wants; only outputs that are no buffer of
         * their own are copied: %k is a view, %past an input, %flat was given already */
        CHECK_EQUAL(count_op(ir, OP_contiguous), 3);
        CHECK_EQUAL(ir->n_instrs, 7 + 3);
        CHECK_EQUAL(ir->buffers[ir->regs[ir->outputs[0]].buffer].index, 0);
        CHECK(ir->instrs[1].out[1] == REG_NONE); /* the norm's sum */
        CHECK_OK(&ctx, schedule_plan(&ctx, ir, &schedule));
        CHECK_EQUAL(schedule.transitions_after, npu ? 2 : 0);
        CHECK_OK(&ctx, alloc_plan(&ctx, ir, test_traits, &report));
        CHECK_OK(&ctx, alloc_check(&ctx, ir));
        CHECK(report.arena_bytes == report.lower_bound_bytes);
        CHECK_OK(&ctx, graph_cost(&ctx, g, options.target, &cost));
        CHECK(cost.launches == 8 && cost.flops > 0 && cost.bytes > 0 && cost.transitions == (npu ? 2 : 0));
        if (npu) CHECK(ir->instrs[0].device == DEVICE_CPU && ir->instrs[2].device == DEVICE_NPU);
    }
    if (getenv("FORGE_SHOW")) {
        char *text = print(&ctx, ir, true);
        fputs(text, stderr);
        free(text);
    }
    arena_destroy(&arena);
}

/* Where nodes go, by the name of a line: `c` or `n`. */
static void check_placement(const char *text, const char *want, uint32_t transitions) {
    Context ctx;
    Arena arena;
    Graph *g;
    Npuir *ir;
    ScheduleReport report;
    context_init(&ctx);
    arena_init(&arena);
    LowerOptions options = {.target = target_find("npu4000"), .traits = test_traits, .scratch = NULL, .threads = 1};
    CHECK_OK(&ctx, graph_parse(&ctx, &arena, text, strlen(text), &g));
    CHECK_OK(&ctx, graph_verify(&ctx, g));
    CHECK_OK(&ctx, npuir_lower(&ctx, &arena, g, &options, &ir));
    CHECK_OK(&ctx, npuir_verify(&ctx, ir));
    CHECK_EQUAL(ir->n_instrs, strlen(want));
    for (uint32_t i = 0; i < ir->n_instrs; i++) CHECK_EQUAL(ir->instrs[i].device == DEVICE_NPU ? 'n' : 'c', want[i]);
    CHECK_OK(&ctx, schedule_plan(&ctx, ir, &report));
    CHECK_EQUAL(report.transitions_after, transitions);
    arena_destroy(&arena);
}

static void test_placement(void) {
    /* masks and positions that feed only look-ups stay on the host; light float work between NPU work stays there */
    check_placement("graph {\n"
                    "  %ids = input {index=0} : i64[4]\n"
                    "  %t = constant @t {index=0} : f32[9,8] state\n"
                    "  %w = constant @w {index=1} : f32[8,8] state\n"
                    "  %p = add %ids {scalar=1} : i64[4]\n"
                    "  %x = embedding %t, %p : f32[4,8]\n"
                    "  %s = mul %x {scalar=2.0} : f32[4,8]\n"
                    "  %a = linear %s, %w : f32[4,8]\n"
                    "  %b = gelu %a : f32[4,8]\n"
                    "  %c = linear %b, %w : f32[4,8]\n"
                    "  %d = softmax %c {dim=1} : f32[4,8]\n"
                    "  return %d\n}\n",
                    "ccnnnnn", 2);
    /* an island: the second linear alone saves less than two transitions cost */
    check_placement("graph {\n"
                    "  %x = input {index=0} : f32[64,64]\n"
                    "  %w = constant @w {index=0} : f32[64,64] state\n"
                    "  %a = linear %x, %w : f32[64,64]\n"
                    "  %b = linear %a, %w : f32[64,64]\n"
                    "  %c = cumsum %b {dim=1} : f32[64,64]\n"
                    "  %d = linear %c, %w : f32[64,64]\n"
                    "  %e = cumsum %d {dim=1} : f32[64,64]\n"
                    "  return %e\n}\n",
                    "nnccc", 2);
    /* f64 and nothing but host work: no NPU at all */
    check_placement("graph {\n"
                    "  %x = input {index=0} : f64[4,4]\n"
                    "  %a = matmul %x, %x : f64[4,4]\n"
                    "  %b = cast %a : f32[4,4]\n"
                    "  return %b\n}\n",
                    "cc", 0);
}

static void test_verify(void) {
    Context ctx;
    Arena arena;
    Graph *g;
    Npuir *ir;
    context_init(&ctx);
    arena_init(&arena);
    LowerOptions options = {
        .target = target_find("npu3720"), .traits = test_traits, .scratch = test_scratch, .threads = 1};
    CHECK_OK(&ctx, graph_parse(&ctx, &arena, block, strlen(block), &g));
    CHECK_OK(&ctx, npuir_lower(&ctx, &arena, g, &options, &ir));
#define SPOILED(lvalue, value)                                                                                         \
    do {                                                                                                               \
        __typeof__(lvalue) kept = (lvalue);                                                                            \
        (lvalue) = (value);                                                                                            \
        CHECK_CODE(&ctx, CODE_INVALID, npuir_verify(&ctx, ir));                                                        \
        (lvalue) = kept;                                                                                               \
        CHECK_OK(&ctx, npuir_verify(&ctx, ir));                                                                        \
    } while (0)
    SPOILED(ir->order[0], 1);
    SPOILED(ir->order[1], 99);
    SPOILED(ir->instrs[2].in[0], ir->n_regs);
    SPOILED(ir->instrs[2].in[0], ir->instrs[4].out[0]);
    SPOILED(ir->instrs[2].out[0], ir->instrs[1].out[0]);
    SPOILED(ir->instrs[0].device, DEVICE_NPU); /* a look-up */
    SPOILED(ir->instrs[2].device, (Device)7);
    SPOILED(ir->instrs[2].op, OP_matmul);
    SPOILED(ir->instrs[2].n_in, 1);
    SPOILED(ir->instrs[2].scratch, 0);
    SPOILED(ir->regs[ir->instrs[2].out[0]].offset, 1);
    SPOILED(ir->regs[ir->instrs[2].out[0]].buffer, ir->n_buffers);
    SPOILED(ir->regs[ir->instrs[2].out[0]].dtype, DTYPE_F64);
    SPOILED(ir->buffers[ir->regs[ir->instrs[2].out[0]].buffer].bytes, 8);
    SPOILED(ir->buffers[ir->regs[ir->instrs[2].out[0]].buffer].space, SPACE_HOST);
    SPOILED(ir->outputs[0], ir->outputs[1]);
    SPOILED(ir->inputs[0], ir->inputs[1]);
    SPOILED(ir->target[0], 'x');
    arena_destroy(&arena);
}

/* --- an output in the memory of an input -------------------------------------------------------------------------- */
static const char update[] = "graph {\n"
                             "  %x = input {index=0} : f32[4,8]\n"
                             "  %v = input {index=1} : f32[4,8]\n"
                             "  %w = input {index=2} : f32[4,4]\n"
                             "  %old = neg %x : f32[4,8]\n"
                             "  %t = permute %x {dims=[1, 0]} : f32[8,4]\n"
                             "  %r = reshape %t {shape=[4, 8]} : f32[4,8]\n"
                             "  %p = add %r, %v : f32[4,8]\n"
                             "  %y = add %x, %v : f32[4,8]\n"
                             "  %s = mul %y, %old : f32[4,8]\n"
                             "  %m = matmul %w, %w : f32[4,4]\n"
                             "  return %y, %s, %p, %m, %x\n"
                             "}\n";

static KernelTraits no_traits(Op op) {
    (void)op;
    return (KernelTraits){0};
}

static void test_shared(void) {
    Context ctx;
    Arena arena;
    Graph *g;
    Npuir *ir;
    context_init(&ctx);
    arena_init(&arena);
    CHECK_OK(&ctx, graph_parse(&ctx, &arena, update, strlen(update), &g));
    LowerOptions options = {.target = target_find("cpu"), .traits = test_traits, .threads = 1};
    CHECK_OK(&ctx, npuir_lower(&ctx, &arena, g, &options, &ir));
    uint32_t n = ir->n_instrs,
             sum = 3; /* neg, a copy for the reshape, add, add, mul, matmul, a copy for the output %x */
    CHECK_EQUAL(n, 7);
    CHECK(ir->instrs[sum].op == OP_add && ir->instrs[6].op == OP_contiguous);
    CHECK(!alloc_may_share(ir, test_traits, 0, 0)); /* %x is an output too, and copied last */
    CHECK_CODE(&ctx, CODE_INTERNAL, alloc_check_shared(&ctx, ir, 0, 0));
    CHECK(strstr(ctx.text, "contiguous at 6 reads input 0") != NULL);
    memmove(ir->order + 1, ir->order, 6 * sizeof *ir->order); /* now it is copied first */
    ir->order[0] = 6;
    CHECK_OK(&ctx, npuir_verify(&ctx, ir));
    CHECK(alloc_may_share(ir, test_traits, 0, 0));
    CHECK_OK(&ctx, alloc_check_shared(&ctx, ir, 0, 0));
    CHECK(!alloc_may_share(ir, no_traits, 0, 0));  /* the kernel does not work in place */
    CHECK(alloc_may_share(ir, test_traits, 0, 1)); /* all that reads %x comes before %s */
    CHECK(alloc_may_share(ir, test_traits, 1, 0) && alloc_may_share(ir, test_traits, 1, 1));
    CHECK(!alloc_may_share(ir, test_traits, 1, 2)); /* %v is read after %p */
    CHECK(!alloc_may_share(ir, test_traits, 2, 3)); /* matmul reads what it would write over */
    CHECK_CODE(&ctx, CODE_OK, alloc_check_shared(&ctx, ir, 1, 1));
    CHECK_CODE(&ctx, CODE_INTERNAL, alloc_check_shared(&ctx, ir, 1, 2));
    CHECK(!alloc_may_share(ir, test_traits, 2, 0)); /* other sizes, no such input or output */
    CHECK(!alloc_may_share(ir, test_traits, 3, 0) && !alloc_may_share(ir, test_traits, 0, 5));
    CHECK_CODE(&ctx, CODE_INTERNAL, alloc_check_shared(&ctx, ir, 2, 0));
    CHECK_CODE(&ctx, CODE_INTERNAL, alloc_check_shared(&ctx, ir, 3, 0));
    /* another operand sees the same memory in another layout */
    RegId old = ir->instrs[sum].in[1];
    ir->instrs[sum].in[1] = ir->instrs[1].in[0];
    CHECK(!alloc_may_share(ir, test_traits, 0, 0));
    CHECK_CODE(&ctx, CODE_INTERNAL, alloc_check_shared(&ctx, ir, 0, 0));
    ir->instrs[sum].in[1] = old;
    ir->instrs[5].device = DEVICE_NPU; /* anywhere in the program */
    CHECK(!alloc_may_share(ir, test_traits, 0, 0));
    arena_destroy(&arena);
}

int main(void) {
    test_shared();
    test_reshape();
    test_block();
    test_placement();
    test_verify();
    test_random();
    test_no_memory();
    return check_done();
}
