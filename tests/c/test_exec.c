/* The executor alone: plans made by hand, kernels and host calls of the test's own. */
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "exec/frame.h"

/* --- counting allocations (glibc; the sanitizers have their own malloc) ----------------------------------------- */
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#define COUNTS_ALLOCATIONS 1
static atomic_long allocations;
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
__attribute__((visibility("default"))) void *malloc(size_t size) {
    allocations++;
    return __libc_malloc(size);
}
__attribute__((visibility("default"))) void *calloc(size_t count, size_t size) {
    allocations++;
    return __libc_calloc(count, size);
}
__attribute__((visibility("default"))) int posix_memalign(void **out, size_t alignment, size_t size) {
    allocations++;
    *out = __libc_memalign(alignment, size);
    return *out ? 0 : 12;
}
#endif

/* --- kernels ---------------------------------------------------------------------------------------------------- */
static float read_at(const Tensor *t, int64_t i) { /* rank 1 or 2, row-major index */
    int64_t at = t->rank == 2 ? i / t->shape[1] * t->strides[0] + i % t->shape[1] * t->strides[1]
                 : t->rank    ? i * t->strides[0]
                              : 0;
    return ((const float *)t->data)[at];
}

static Code run_add(KernelCall *call) {
    for (int64_t i = 0; i < tensor_count(&call->out[0]); i++)
        ((float *)call->out[0].data)[i] = read_at(&call->in[0], i) + read_at(&call->in[1], i);
    return CODE_OK;
}

static Code run_copy(KernelCall *call) {
    for (int64_t i = 0; i < tensor_count(&call->out[0]); i++)
        ((float *)call->out[0].data)[i] = read_at(&call->in[0], i);
    return CODE_OK;
}

/* y = x + 10 * prepared[0] + scratch round trip: enough to see that both arrive. */
static Code run_linear(KernelCall *call) {
    if (!call->scratch || (uintptr_t)call->scratch % 64) return fail(call->ctx, CODE_INTERNAL, "scratch");
    float *scratch = call->scratch;
    scratch[0] = call->prepared ? *(const float *)call->prepared : ((const float *)call->in[1].data)[0];
    for (int64_t i = 0; i < tensor_count(&call->out[0]); i++)
        ((float *)call->out[0].data)[i] = read_at(&call->in[0], i) + 10 * scratch[0];
    return CODE_OK;
}
static int64_t linear_bytes(const Graph *g, const Node *node) {
    return value_node(g, node->operands[1])->op == OP_constant ? 4 : 0;
}
static Code linear_prepare(Context *ctx, const Node *node, const Tensor *in, Pool *pool, void *prepared) {
    (void)node, (void)pool;
    if (in[0].data || !in[1].data) return fail(ctx, CODE_INTERNAL, "what is constant");
    memcpy(prepared, in[1].data, 4);
    return CODE_OK;
}
static Code run_failing(KernelCall *call) { return fail(call->ctx, CODE_INDEX, "index 7 is out of range"); }

static const Kernel *test_kernel(Op op) {
    static const Kernel add = {.run = run_add}, copy = {.run = run_copy}, failing = {.run = run_failing};
    static const Kernel linear = {.run = run_linear, .prepared_bytes = linear_bytes, .prepare = linear_prepare};
    switch (op) {
    case OP_add: return &add;
    case OP_contiguous: return &copy;
    case OP_linear: return &linear;
    case OP_embedding: return &failing;
    default: return NULL;
    }
}

/* --- making plans ----------------------------------------------------------------------------------------------- */
enum { N = 4, MANY = 64 };
static const int64_t SHAPE[1] = {N}, STRIDES[1] = {1};

typedef struct Plan {
    Context ctx;
    Arena arena;
    Graph *g;
    Npuir ir;
    Instr instrs[MANY];
    Register regs[MANY];
    Buffer buffers[MANY];
    RegId inputs[MANY], outputs[MANY], ins[MANY][4], outs[MANY][4];
    uint32_t order[MANY];
} Plan;

static void plan_open(Plan *p) {
    memset(p, 0, sizeof *p);
    context_init(&p->ctx);
    arena_init(&p->arena);
    CHECK_OK(&p->ctx, graph_create(&p->ctx, &p->arena, &p->g));
    p->g->n_sources = 1;
    static const char *source = "model.py:3 in forward";
    p->g->sources = &source;
    p->ir = (Npuir){.arena = &p->arena,
                    .graph = p->g,
                    .instrs = p->instrs,
                    .regs = p->regs,
                    .buffers = p->buffers,
                    .inputs = p->inputs,
                    .outputs = p->outputs,
                    .order = p->order};
}

static void plan_close(Plan *p) { arena_destroy(&p->arena); }

/* A register over all of a new buffer: f32 [N] or an object. Its index in its space, or its slot in the arena. */
static RegId new_reg(Plan *p, Space space, uint32_t index, ValueId value) {
    bool object = space == SPACE_OBJECT;
    Buffer *b = &p->buffers[p->ir.n_buffers];
    *b = (Buffer){.space = space, .index = index, .bytes = object ? 0 : N * 4, .offset = -1};
    if (space == SPACE_ARENA) {
        b->offset = index * 64;
        if (p->ir.arena_bytes[0] < b->offset + 64) p->ir.arena_bytes[0] = b->offset + 64;
    }
    if (object && p->ir.n_objects <= index) p->ir.n_objects = index + 1;
    if (space == SPACE_HOST) p->ir.n_host++;
    p->regs[p->ir.n_regs] = (Register){.dtype = object ? DTYPE_OBJECT : DTYPE_F32,
                                       .rank = !object,
                                       .shape = SHAPE,
                                       .strides = STRIDES,
                                       .buffer = p->ir.n_buffers++,
                                       .value = value};
    return p->ir.n_regs++;
}

static ValueId value_of(const Plan *p, RegId r) { return p->regs[r].value; }

static NodeId new_node(Plan *p, Op op, const RegId *ins, size_t n_in, const Space *spaces, size_t n_out) {
    ValueId operands[4];
    Type types[4];
    NodeId node;
    for (size_t k = 0; k < n_in; k++) operands[k] = ins[k] == REG_NONE ? VALUE_NONE : value_of(p, ins[k]);
    for (size_t k = 0; k < n_out; k++)
        types[k] = spaces[k] == SPACE_OBJECT ? (Type){DTYPE_OBJECT, 0, NULL} : (Type){DTYPE_F32, 1, SHAPE};
    CHECK_OK(&p->ctx, graph_insert(&p->ctx, p->g, NODE_NONE, op, operands, n_in, types, n_out, 0, &node));
    return node;
}

static RegId input(Plan *p, Space space, uint32_t object) {
    NodeId node = new_node(p, OP_input, NULL, 0, &space, 1);
    RegId r =
        new_reg(p, space, space == SPACE_OBJECT ? object : p->ir.n_inputs, node_result(graph_node(p->g, node), 0));
    p->inputs[p->ir.n_inputs++] = r;
    return r;
}

static RegId constant(Plan *p, float *data) {
    Space space = SPACE_CONSTANT;
    uint32_t index;
    Constant c = {
        .name = "w", .data = data, .dtype = DTYPE_F32, .rank = 1, .shape = SHAPE, .strides = STRIDES, .bytes = N * 4};
    CHECK_OK(&p->ctx, graph_add_constant(&p->ctx, p->g, &c, &index));
    NodeId node = new_node(p, OP_constant, NULL, 0, &space, 1);
    return new_reg(p, SPACE_CONSTANT, index, node_result(graph_node(p->g, node), 0));
}

/* Appends an instruction; the nodes of graphs move, so `finish` sets the pointers. */
static Instr *instr(Plan *p, Op op, const RegId *ins, uint32_t n_in, const Space *spaces, const uint32_t *indices,
                    uint32_t n_out) {
    uint32_t i = p->ir.n_instrs++;
    NodeId node = new_node(p, op, ins, n_in, spaces, n_out);
    memcpy(p->ins[i], ins, n_in * sizeof *ins);
    for (uint32_t k = 0; k < n_out; k++)
        p->outs[i][k] = new_reg(p, spaces[k], indices[k], node_result(graph_node(p->g, node), k));
    p->instrs[i] = (Instr){.op = op,
                           .n_in = n_in,
                           .n_out = n_out,
                           .in = p->ins[i],
                           .out = p->outs[i],
                           .node = (const Node *)(uintptr_t)node,
                           .scratch = BUFFER_NONE};
    p->order[i] = i;
    return &p->instrs[i];
}

static RegId instr1(Plan *p, Op op, RegId a, RegId b, Space space, uint32_t index) {
    RegId ins[2] = {a, b};
    RegId out = instr(p, op, ins, b == REG_NONE ? 1 : 2, &space, &index, 1)->out[0];
    if (space == SPACE_OUTPUT) p->outputs[p->ir.n_outputs++] = out;
    return out;
}

static void finish(Plan *p) {
    for (uint32_t i = 0; i < p->ir.n_instrs; i++)
        p->instrs[i].node = graph_node(p->g, (NodeId)(uintptr_t)p->instrs[i].node);
}

static Code create(Plan *p, int threads, bool pack, Executor **out) {
    const ExecutorOptions options = {.kernels = test_kernel, .threads = threads, .pack = pack};
    return executor_create(&p->ctx, &p->ir, &options, out);
}

/* --- host calls ------------------------------------------------------------------------------------------------- */
typedef enum HostMode { HOST_ADDS, HOST_FAILS, HOST_STRIDED, HOST_ALIAS } HostMode;
typedef struct TestHost {
    HostMode mode;
    int calls, released, retained, alive;
    float *memory; /* of the last tensor result */
    char log[64];
} TestHost;

static void note(TestHost *h, char what) {
    size_t n = strlen(h->log);
    if (n + 1 < sizeof h->log) h->log[n] = what;
}

static Code test_host_call(Context *ctx, void *user, uint32_t callee, const Tensor *in, uint32_t n_in, Tensor *out,
                           uint32_t n_out, void **hold) {
    TestHost *h = user;
    h->calls++;
    note(h, 'c');
    if (h->mode == HOST_FAILS) return fail(ctx, CODE_HOST, "host");
    for (uint32_t k = 0; k < n_out; k++) {
        float *made = calloc(N * 2, sizeof *made);
        h->alive++;
        if (out[k].dtype == DTYPE_OBJECT) {
            made[0] = (float)callee;
            out[k].data = made;
            continue;
        }
        for (uint32_t j = 0; j < n_in; j++)
            for (int64_t i = 0; in[j].data && i < N; i++)
                made[i] += in[j].dtype == DTYPE_OBJECT ? *(float *)in[j].data : read_at(&in[j], i);
        *hold = made;
        out[k].data = h->mode == HOST_ALIAS ? in[0].data : made;
        out[k].strides[0] = h->mode == HOST_STRIDED ? 2 : 1;
        h->memory = made;
    }
    return CODE_OK;
}
static void test_release(void *user, void *hold) {
    TestHost *h = user;
    note(h, 'r');
    h->released++;
    h->alive--;
    free(hold);
}
static void test_retain(void *user, void *object) {
    (void)object;
    TestHost *h = user;
    h->retained++;
}

/* --- tests ------------------------------------------------------------------------------------------------------ */
static float WEIGHT[N] = {5, 6, 7, 8};

/* (x + w) + x -> output 0, through a view that starts at element 1 of the sum -> output 1 */
static void make_chain(Plan *p) {
    plan_open(p);
    RegId x = input(p, SPACE_INPUT, 0), w = constant(p, WEIGHT);
    RegId sum = instr1(p, OP_add, x, w, SPACE_ARENA, 1);
    instr1(p, OP_add, sum, x, SPACE_OUTPUT, 0);
    RegId shifted = p->ir.n_regs++;
    static const int64_t none[1] = {0};
    p->regs[shifted] = p->regs[sum];
    p->regs[shifted].view = true;
    p->regs[shifted].offset = 1;
    p->regs[shifted].strides = none; /* expand of element 1 */
    instr1(p, OP_contiguous, shifted, REG_NONE, SPACE_OUTPUT, 1);
    finish(p);
}

static void check_chain(Executor *e, float seed) {
    Context ctx;
    context_init(&ctx);
    float x[N] = {seed, seed + 1, seed + 2, seed + 3}, y[N], z[N];
    CHECK_OK(&ctx, executor_run(&ctx, e, (void *[]){x}, (void *[]){y, z}, NULL, NULL));
    for (int i = 0; i < N; i++) {
        CHECK(y[i] == 2 * x[i] + WEIGHT[i]);
        CHECK(z[i] == x[1] + WEIGHT[1]);
    }
}

static void test_chain(void) {
    Plan p;
    Executor *e;
    make_chain(&p);
    CHECK_OK(&p.ctx, create(&p, 1, true, &e));
    CHECK_EQUAL(executor_packed_bytes(e), 0);
    check_chain(e, 1);
#ifdef COUNTS_ALLOCATIONS
    long before = allocations;
    for (int i = 0; i < 100; i++) check_chain(e, (float)i);
    CHECK_EQUAL(allocations - before, 0);
#endif
    float x[N] = {0};
    CHECK_CODE(&p.ctx, CODE_INVALID, executor_run(&p.ctx, e, (void *[]){x}, (void *[]){x, NULL}, NULL, NULL));
    CHECK_CODE(&p.ctx, CODE_INVALID, executor_run(&p.ctx, e, (void *[]){NULL}, (void *[]){x, x}, NULL, NULL));
    check_chain(e, 3);
    executor_destroy(e);
    plan_close(&p);
}

static void *chain_thread(void *executor) {
    for (int i = 0; i < 200; i++) check_chain(executor, (float)i);
    return NULL;
}

static void test_threads_and_fork(void) {
    Plan p;
    Executor *e;
    pthread_t threads[4];
    make_chain(&p);
    CHECK_OK(&p.ctx, create(&p, 2, true, &e));
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, chain_thread, e) == 0);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);

    /* A child whose parent held the lock at the fork must go on. */
    atomic_store(&e->lock, (int)getpid());
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        check_chain(e, 5);
        _exit(check_failures != 0);
    }
    atomic_store(&e->lock, 0);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    check_chain(e, 6);
    executor_destroy(e);
    plan_close(&p);
}

static void test_not_runnable(void) {
    Plan p;
    Executor *e;
    make_chain(&p);
    p.instrs[1].device = DEVICE_NPU;
    CHECK_CODE(&p.ctx, CODE_UNSUPPORTED, create(&p, 1, true, &e));
    CHECK(!e && strstr(p.ctx.text, "add (model.py:3 in forward)"));
    p.instrs[1].device = DEVICE_CPU;
    p.instrs[1].op = OP_sub;
    CHECK_CODE(&p.ctx, CODE_UNSUPPORTED, create(&p, 1, true, &e));
    CHECK(!e && strstr(p.ctx.text, "sub (model.py:3 in forward) has no host kernel"));
    p.instrs[1].op = OP_add;
    p.g->constants[0].data = NULL;
    CHECK_CODE(&p.ctx, CODE_UNSUPPORTED, create(&p, 1, true, &e));
    CHECK(!e && strstr(p.ctx.text, "'w'"));
    plan_close(&p);
}

static void test_failing_kernel(void) {
    Plan p;
    Executor *e;
    plan_open(&p);
    RegId x = input(&p, SPACE_INPUT, 0);
    instr1(&p, OP_embedding, x, x, SPACE_OUTPUT, 0);
    finish(&p);
    CHECK_OK(&p.ctx, create(&p, 1, true, &e));
    float v[N] = {0}, y[N];
    for (int i = 0; i < 2; i++) {
        CHECK_CODE(&p.ctx, CODE_INDEX, executor_run(&p.ctx, e, (void *[]){v}, (void *[]){y}, NULL, NULL));
        CHECK(strcmp(p.ctx.text, "embedding (model.py:3 in forward): index 7 is out of range") == 0);
    }
    executor_destroy(e);
    plan_close(&p);
}

/* Three linears over two weights. */
static void make_linears(Plan *p, float *other) {
    plan_open(p);
    RegId x = input(p, SPACE_INPUT, 0), w = constant(p, WEIGHT), v = constant(p, other);
    RegId weights[3] = {w, v, w};
    for (uint32_t i = 0; i < 3; i++) {
        instr1(p, OP_linear, x, weights[i], SPACE_OUTPUT, i);
        p->instrs[i].scratch = p->regs[new_reg(p, SPACE_ARENA, 3 + i, VALUE_NONE)].buffer;
        p->instrs[i].scratch_bytes = N * 4;
    }
    finish(p);
}

static void test_packing(void) {
    float other[N] = {2, 0, 0, 0}, x[N] = {1, 2, 3, 4}, y[3][N];
    for (int pack = 0; pack < 2; pack++) {
        for (int threads = 1; threads < 3; threads++) {
            Plan p;
            Executor *e;
            make_linears(&p, other);
            CHECK_OK(&p.ctx, create(&p, threads, pack, &e));
            CHECK_EQUAL(executor_packed_bytes(e), pack ? 128 : 0); /* two weights, the shared one once */
            CHECK_OK(&p.ctx, executor_run(&p.ctx, e, (void *[]){x}, (void *[]){y[0], y[1], y[2]}, NULL, NULL));
            CHECK(y[0][0] == 51 && y[1][3] == 24 && y[2][1] == 52);
            executor_destroy(e);
            plan_close(&p);
        }
    }
}

/* x -> host 0 -> t (+ object o) ; t + x -> arena ; host 1 (arena, o) -> u ; u -> output 0. */
static void make_host(Plan *p) {
    plan_open(p);
    RegId x = input(p, SPACE_INPUT, 0);
    RegId copy = instr1(p, OP_contiguous, x, REG_NONE, SPACE_ARENA, 0);
    Space both[2] = {SPACE_HOST, SPACE_OBJECT};
    RegId *made = instr(p, OP_host, &copy, 1, both, (uint32_t[]){0, 0}, 2)->out;
    RegId sum = instr1(p, OP_add, made[0], x, SPACE_ARENA, 1);
    RegId ins[3] = {sum, REG_NONE, made[1]};
    Space host = SPACE_HOST;
    RegId u = instr(p, OP_host, ins, 3, &host, (uint32_t[]){1}, 1)->out[0];
    instr1(p, OP_contiguous, u, REG_NONE, SPACE_OUTPUT, 0);
    finish(p);
    for (uint32_t i = 0; i < p->ir.n_instrs; i++)
        if (p->instrs[i].op == OP_host)
            node_attr_mut((Node *)(uintptr_t)p->instrs[i].node, ATTR_index)->i = 100 * (i == 1);
}

static void test_host(void) {
    Plan p;
    Executor *e;
    float x[N] = {1, 2, 3, 4}, y[N] = {0};
    TestHost h = {0};
    HostCalls calls = {test_host_call, test_release, test_retain, &h};
    make_host(&p);
    CHECK_OK(&p.ctx, create(&p, 1, true, &e));
    CHECK_CODE(&p.ctx, CODE_INVALID, executor_run(&p.ctx, e, (void *[]){x}, (void *[]){y}, NULL, NULL));
    for (int i = 0; i < 3; i++) {
        h = (TestHost){0};
        CHECK_OK(&p.ctx, executor_run(&p.ctx, e, (void *[]){x}, (void *[]){y}, NULL, &calls));
        CHECK(y[0] == 2 * x[0] + 100 && y[3] == 2 * x[3] + 100);
        CHECK_EQUAL(h.alive, 0);
        CHECK_EQUAL(h.calls, 2);
        CHECK(strcmp(h.log, "crcrr") == 0); /* t goes before the second call, o after it, u at the end */
    }
    const struct {
        HostMode mode;
        Code code;
        int calls;
    } bad[] = {{HOST_FAILS, CODE_HOST, 1}, {HOST_STRIDED, CODE_INTERNAL, 1}, {HOST_ALIAS, CODE_INTERNAL, 1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        h = (TestHost){.mode = bad[i].mode};
        CHECK_CODE(&p.ctx, bad[i].code, executor_run(&p.ctx, e, (void *[]){x}, (void *[]){y}, NULL, &calls));
        CHECK_EQUAL(h.alive, 0);
        CHECK_EQUAL(h.calls, bad[i].calls);
    }
    h = (TestHost){0};
    CHECK_OK(&p.ctx, executor_run(&p.ctx, e, (void *[]){x}, (void *[]){y}, NULL, &calls));
    executor_destroy(e);
    plan_close(&p);
}

/* Objects: one that a call makes and nothing uses, one that is handed out twice, one that only passes through. */
static void test_objects(void) {
    Plan p;
    Executor *e;
    plan_open(&p);
    RegId through = input(&p, SPACE_OBJECT, 0);
    Space two[2] = {SPACE_OBJECT, SPACE_OBJECT};
    RegId *made = instr(&p, OP_host, &through, 1, two, (uint32_t[]){1, 2}, 2)->out;
    RegId keep = made[1];
    made[0] = REG_NONE;
    RegId outputs[3] = {keep, through, keep};
    memcpy(p.outputs, outputs, sizeof outputs);
    p.ir.n_outputs = 3;
    finish(&p);
    CHECK_OK(&p.ctx, create(&p, 1, true, &e));
    TestHost h = {0};
    HostCalls calls = {test_host_call, test_release, test_retain, &h};
    float given = 3;
    void *objects[3] = {NULL};
    CHECK_OK(&p.ctx, executor_run(&p.ctx, e, (void *[]){&given}, (void *[]){NULL, NULL, NULL}, objects, &calls));
    CHECK(objects[1] == &given && objects[0] == objects[2] && objects[0]);
    CHECK_EQUAL(h.retained, 3);
    CHECK_EQUAL(h.released, 2); /* the unused one, and our own reference to the one that is handed out */
    executor_destroy(e);
    plan_close(&p);
}

static bool stop(void *user) { return --*(int *)user == 0; }

static void test_cancel(void) {
    Plan p;
    Executor *e;
    make_chain(&p);
    CHECK_OK(&p.ctx, create(&p, 1, true, &e));
    float x[N] = {0}, y[N];
    int countdown = 2;
    p.ctx.cancelled = stop;
    p.ctx.user = &countdown;
    CHECK_CODE(&p.ctx, CODE_CANCELLED, executor_run(&p.ctx, e, (void *[]){x}, (void *[]){y, y}, NULL, NULL));
    check_chain(e, 1);
    executor_destroy(e);
    plan_close(&p);
}

static void test_memory_fails(void) {
    float other[N] = {2, 0, 0, 0}, x[N] = {1, 2, 3, 4}, y[3][N];
    for (uint64_t n = 1; n < 1000; n++) {
        Plan p;
        Executor *e;
        make_linears(&p, other);
        p.ctx.fail_allocation = n;
        Code code = create(&p, 2, true, &e);
        if (code == CODE_OK) code = executor_run(&p.ctx, e, (void *[]){x}, (void *[]){y[0], y[1], y[2]}, NULL, NULL);
        CHECK(code == CODE_OK || code == CODE_NO_MEMORY);
        executor_destroy(e);
        plan_close(&p);
        if (code == CODE_OK) {
            CHECK(n > 10);
            return;
        }
    }
    CHECK(!"never succeeds");
}

int main(void) {
    test_chain();
    test_threads_and_fork();
    test_not_runnable();
    test_failing_kernel();
    test_packing();
    test_host();
    test_objects();
    test_cancel();
    test_memory_fails();
    return check_done();
}
