/* The device layer against a fake loader and driver: versions of the graph extension, every failing entry point,
 * timeouts, cancelling, memory. */
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include "npu/ze_loader.h"
#include "ze_use.h"

static void test_use(void) {
    CHECK_OK(&ctx, use(&ctx, NULL, NULL));
    CHECK_EQUAL(live(), 0);
    Use u = {0};
    CHECK_OK(&ctx, use_begin(&ctx, &u, NULL));
    const NpuFacts *f = npu_device_facts(u.device);
    CHECK(strstr(f->loader, "/fake.so") != NULL);
    CHECK(!strcmp(f->loader_version, "1.20.6"));
    CHECK(!strcmp(f->driver_version, "1234"));
    CHECK(!strcmp(f->device_name, "Fake NPU"));
    CHECK(!strcmp(f->target, "npu4000"));
    CHECK_EQUAL(f->device_id, 0x643e);
    CHECK_EQUAL(f->extension, ZE_VERSION(1, 16));
    CHECK_EQUAL(f->compiler, ZE_VERSION(7, 30));
    CHECK_EQUAL(f->opset, 13);
    CHECK_EQUAL(f->n_drivers, 1);
    CHECK_EQUAL(f->memory, 1 << 30);
    CHECK_EQUAL(npu_graph_arguments(u.graph), 3);
    static const char *const names[] = {"in0", "w0", "out0"};
    for (uint32_t i = 0; i < 3; i++) {
        const NpuArgument *a = npu_graph_argument(u.graph, i);
        CHECK(!strcmp(a->name, names[i]));
        CHECK_EQUAL(a->output, i == 2);
        CHECK_EQUAL(a->dtype, DTYPE_F32);
        CHECK_EQUAL(a->rank, 2);
        CHECK_EQUAL(a->shape[0], 1);
        CHECK_EQUAL(a->shape[1], 4);
        CHECK_EQUAL(a->bytes, 16);
        CHECK(!a->i4);
    }
    CHECK(npu_graph_argument(u.graph, 3) == NULL);
    CHECK_EQUAL(npu_graph_blob_bytes(u.graph), 64);
    CHECK(!strcmp(fake_symbol(fake, "fake_flags"), "--inputs_precisions=\"\" --inputs_layouts=\"\" "
                                                   "--outputs_precisions=\"\" --outputs_layouts=\"\""));
    CHECK(*(int *)fake_symbol(fake, "fake_barriers") > 0);
    use_end(&u);
    CHECK_EQUAL(live(), 0);
}

static void test_versions(void) {
    for (int minor = 0; minor <= 18; minor++) {
        char text[16];
        snprintf(text, sizeof text, "1.%d", minor);
        env("FAKE_EXTENSION", text);
        for (int named = 0; named < 2; named++) {
            char name[64];
            snprintf(name, sizeof name, "ZE_extension_graph_1_%d", minor);
            env("FAKE_EXTENSION_NAME", named ? name : NULL);
            if (minor >= 4) {
                CHECK_OK(&ctx, use(&ctx, NULL, NULL));
                env("FAKE_STAGES", "1");
                CHECK_OK(&ctx, use(&ctx, NULL, NULL));
                env("FAKE_STAGES", "3"); /* both: the graph is ready before the list's turn, which is harmless */
                CHECK_OK(&ctx, use(&ctx, NULL, NULL));
                env("FAKE_STAGES", NULL);
            } else {
                CHECK_REASON(NPU_OLD_EXTENSION, use(&ctx, NULL, NULL));
                CHECK_SAYS("1.4 or newer");
            }
        }
        env("FAKE_EXTENSION_NAME", NULL);
    }
    env("FAKE_EXTENSION", "2.0");
    CHECK_REASON(NPU_VERSION_MISMATCH, use(&ctx, NULL, NULL));
    env("FAKE_EXTENSION", NULL);
    env("FAKE_EXTENSION_NAME", "");
    CHECK_REASON(NPU_OLD_EXTENSION, use(&ctx, NULL, NULL));
    env("FAKE_EXTENSION_NAME", "ZE_extension_graph_1_");
    CHECK_REASON(NPU_OLD_EXTENSION, use(&ctx, NULL, NULL)); /* what is left is 1.2 */
    env("FAKE_EXTENSION_NAME", NULL);
    for (int i = 0; i < 2; i++) { /* claims more than it has */
        env("FAKE_NULL", i ? "initialize" : "create3");
        CHECK_OK(&ctx, use(&ctx, NULL, NULL));
    }
    for (int i = 0; i < 2; i++) {
        env("FAKE_NULL", i ? "table" : "argument3");
        CHECK_REASON(NPU_OLD_EXTENSION, use(&ctx, NULL, NULL));
    }
    env("FAKE_NULL", NULL);
    CHECK_EQUAL(live(), 0);
}

/* --- faults --------------------------------------------------------------------------------------------------------
 */

static const struct {
    uint32_t result;
    NpuReason reason;
} results[] = {{0x70000001, NPU_DEVICE_LOST},      {0x70000002, NPU_NO_MEMORY}, {0x70000003, NPU_NO_MEMORY},
               {0x78000002, NPU_VERSION_MISMATCH}, {0x7ffffffe, NPU_FAILED},    {0x78000099, NPU_FAILED}};

/* Whatever fails, at whichever call: a clear failure or success, nothing is left, and the next use works. */
static void test_faults(void) {
    static const char *const points[] = {"zeInit",
                                         "zeDriverGet",
                                         "zeInitDrivers",
                                         "zeDriverGetProperties",
                                         "zeDriverGetExtensionProperties",
                                         "zeDriverGetExtensionFunctionAddress",
                                         "zeDeviceGet",
                                         "zeDeviceGetProperties",
                                         "zeContextCreate",
                                         "zeMemAllocHost",
                                         "zeCommandQueueCreate",
                                         "zeCommandQueueExecuteCommandLists",
                                         "zeCommandListCreate",
                                         "zeCommandListClose",
                                         "zeCommandListAppendBarrier",
                                         "zeFenceCreate",
                                         "zeFenceHostSynchronize",
                                         "zeFenceReset",
                                         "compile",
                                         "properties",
                                         "properties2",
                                         "argument3",
                                         "set_argument",
                                         "append_execute",
                                         "append_initialize",
                                         "initialize",
                                         "native_binary",
                                         "device_properties",
                                         "log"};
    static const char *const versions[] = {"1.4", "1.5", "1.8", "1.16"};
    int failures = 0;
    for (size_t v = 0; v < sizeof versions / sizeof *versions; v++)
        for (size_t p = 0; p < sizeof points / sizeof *points; p++)
            for (size_t r = 0; r < sizeof results / sizeof *results; r++)
                for (int nth = 1; nth <= 4; nth++) {
                    char text[128];
                    env("FAKE_EXTENSION", versions[v]);
                    snprintf(text, sizeof text, "%s=0x%x@%d", points[p], results[r].result, nth);
                    env("FAKE_FAULT", text);
                    ctx.text[0] = 0;
                    Code code = use(&ctx, NULL, NULL);
                    bool fine = code == CODE_OK || (code == CODE_DEVICE && strlen(ctx.text) > 20 && ctx.reason);
                    if (!fine || live()) fprintf(stderr, "%s: %d, %d live: %s\n", text, (int)code, live(), ctx.text);
                    CHECK(fine);
                    CHECK_EQUAL(live(), 0);
                    failures += code != CODE_OK;
                    ctx.code = CODE_OK;
                }
    CHECK(failures > 500);
    env("FAKE_FAULT", NULL);
    env("FAKE_EXTENSION", NULL);
    CHECK_OK(&ctx, use(&ctx, NULL, NULL));
}

static void test_reasons(void) {
    static const char *const points[] = {
        "zeContextCreate",        "zeMemAllocHost", "zeCommandQueueExecuteCommandLists",
        "zeFenceHostSynchronize", "append_execute", "initialize"};
    for (size_t p = 0; p < sizeof points / sizeof *points; p++)
        for (size_t r = 0; r < sizeof results / sizeof *results; r++) {
            char text[128];
            snprintf(text, sizeof text, "%s=0x%x@1", points[p], results[r].result);
            env("FAKE_FAULT", text);
            CHECK_REASON(results[r].reason, use(&ctx, NULL, NULL));
            snprintf(text, sizeof text, "0x%x", results[r].result);
            CHECK_SAYS(text);
        }
    env("FAKE_FAULT", "append_execute=0x78000001@1");
    CHECK_REASON(NPU_NO_MEMORY, use(&ctx, NULL, NULL));
    env("FAKE_FAULT", NULL);
    CHECK(!strcmp(npu_reason_name(NPU_DEVICE_LOST), "device-lost"));
    CHECK(!strcmp(npu_reason_name((NpuReason)99), "unknown"));
    CHECK(!strcmp(ze_result_name(0x70000001), "DEVICE_LOST"));
    CHECK(!strcmp(ze_result_name(5), "unknown result"));
}

/* A device that was lost stays lost; a new one works. */
static void test_lost(void) {
    Use u = {0};
    CHECK_OK(&ctx, use_begin(&ctx, &u, NULL));
    env("FAKE_FAULT", "zeCommandQueueExecuteCommandLists=0x70000001@1");
    CHECK_REASON(NPU_DEVICE_LOST, npu_list_run(&ctx, u.list));
    CHECK_SAYS("dmesg");
    CHECK_REASON(NPU_DEVICE_LOST, npu_list_run(&ctx, u.list));
    CHECK_SAYS("opened again");
    env("FAKE_FAULT", NULL);
    void *memory;
    NpuGraph *graph;
    NpuList *list;
    NpuGraphDesc desc = desc_of(NULL);
    CHECK_REASON(NPU_DEVICE_LOST, npu_memory_alloc(&ctx, u.device, 16, &memory));
    CHECK_REASON(NPU_DEVICE_LOST, npu_graph_create(&ctx, u.device, &desc, &graph, NULL));
    CHECK_REASON(NPU_DEVICE_LOST, npu_list_create(&ctx, u.device, &list));
    use_end(&u);
    CHECK_EQUAL(live(), 0);
    CHECK_OK(&ctx, use(&ctx, NULL, NULL));
}

static void test_other_failures_pass(void) {
    Use u = {0};
    CHECK_OK(&ctx, use_begin(&ctx, &u, NULL));
    static const char *const points[] = {"zeCommandQueueExecuteCommandLists=0x7ffffffe@1", "zeFenceReset=0x7ffffffe@1",
                                         "zeFenceHostSynchronize=0x70000003@1"};
    for (int i = 0; i < 3; i++) {
        env("FAKE_FAULT", points[i]);
        CHECK_CODE(&ctx, CODE_DEVICE, npu_list_run(&ctx, u.list));
        CHECK_OK(&ctx, use_run(&ctx, &u, (float)i));
    }
    env("FAKE_FAULT", NULL);
    use_end(&u);
    CHECK_EQUAL(live(), 0);
}

/* --- waiting -------------------------------------------------------------------------------------------------------
 */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool stop_now(void *user) {
    (*(int *)user)++;
    return *(int *)user > 1; /* the first look is before the submission */
}

static void test_waiting(void) {
    Use u = {0};
    env("FORGE_NPU_TIMEOUT_S", "0.1");
    CHECK_OK(&ctx, use_begin(&ctx, &u, NULL));
    env("FORGE_NPU_TIMEOUT_S", NULL);
    env("FAKE_BUSY_MS", "250");
    double start = now();
    CHECK_REASON(NPU_TIMEOUT, npu_list_run(&ctx, u.list));
    CHECK_SAYS("did not finish 2 graphs within 0.1 s; FORGE_NPU_TIMEOUT_S");
    CHECK(now() - start > 0.09 && now() - start < 5);
    CHECK_REASON(NPU_TIMEOUT, npu_list_run(&ctx, u.list)); /* the earlier work is still there */
    usleep(100000);
    env("FAKE_BUSY_MS", NULL);
    CHECK_OK(&ctx, use_run(&ctx, &u, 3));
    env("FAKE_BUSY_MS", "60");
    CHECK_OK(&ctx, use_run(&ctx, &u, 4)); /* more than one slice */
    env("FAKE_BUSY_MS", "120");
    CHECK_REASON(NPU_TIMEOUT, npu_list_run(&ctx, u.list));
    use_end(&u); /* waits */
    CHECK_EQUAL(live(), 0);

    int looks = 0;
    memset(&u, 0, sizeof u);
    CHECK_OK(&ctx, use_begin(&ctx, &u, NULL));
    env("FAKE_BUSY_MS", "130");
    ctx.cancelled = stop_now;
    ctx.user = &looks;
    memset(u.memory[4], 0xff, ELEMENTS * sizeof(float));
    start = now();
    CHECK_CODE(&ctx, CODE_CANCELLED, npu_list_run(&ctx, u.list));
    CHECK(now() - start > 0.125); /* the device had ended */
    CHECK(looks >= 2);
    ctx.cancelled = NULL;
    env("FAKE_BUSY_MS", NULL);
    CHECK_OK(&ctx, use_run(&ctx, &u, 5));
    use_end(&u);
    CHECK_EQUAL(live(), 0);
}

typedef struct Runner {
    pthread_t thread;
    NpuDevice *device;
    NpuGraph *graph;
    int id, wrong;
} Runner;

/* All threads set arguments of one graph and record it, each into lists of its own. */
static void *runner(void *arg) {
    Runner *r = arg;
    Context c;
    context_init(&c);
    for (int round = 0; round < 50; round++) {
        float *m[3] = {NULL, NULL, NULL};
        NpuList *list = NULL;
        bool fine = npu_list_create(&c, r->device, &list) == CODE_OK;
        for (int i = 0; i < 3 && fine; i++) fine = npu_memory_alloc(&c, r->device, 16, (void **)&m[i]) == CODE_OK;
        fine = fine && npu_list_append(&c, list, r->graph, (void *const *)m) == CODE_OK;
        fine = fine && npu_list_close(&c, list) == CODE_OK;
        if (fine)
            for (int k = 0; k < 4; k++) m[0][k] = (float)(r->id * 1000 + round), m[1][k] = (float)k;
        fine = fine && npu_list_run(&c, list) == CODE_OK;
        for (int k = 0; k < 4 && fine; k++) fine = m[2][k] == (float)(r->id * 1000 + round + k);
        r->wrong += !fine;
        npu_list_destroy(list);
        for (int i = 0; i < 3; i++) npu_memory_free(r->device, m[i]);
    }
    return NULL;
}

static void test_threads(void) {
    enum { THREADS = 24 }; /* more than there are queues */
    Runner r[THREADS];
    NpuDevice *device;
    NpuGraph *graph;
    NpuGraphDesc desc = desc_of(NULL);
    CHECK_OK(&ctx, npu_device_open(&ctx, fake, NULL, &device));
    CHECK_OK(&ctx, npu_graph_create(&ctx, device, &desc, &graph, NULL));
    env("FAKE_SLOW", "1");
    for (int i = 0; i < THREADS; i++) {
        r[i] = (Runner){.device = device, .graph = graph, .id = i};
        CHECK_EQUAL(pthread_create(&r[i].thread, NULL, runner, &r[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(r[i].thread, NULL);
        CHECK_EQUAL(r[i].wrong, 0);
    }
    env("FAKE_SLOW", NULL);
    npu_graph_destroy(graph);
    npu_device_unref(device);
    CHECK_EQUAL(live(), 0);
}

/* 300 lists at once: a context takes 255 queues. */
static void test_many_lists(void) {
    enum { LISTS = 300 };
    static NpuList *lists[LISTS];
    NpuDevice *device;
    CHECK_OK(&ctx, npu_device_open(&ctx, fake, NULL, &device));
    int start = live();
    for (int i = 0; i < LISTS; i++) {
        if (i == 3) env("FAKE_FAULT", "zeCommandQueueCreate=0x70000003@0"); /* the driver has no more: share */
        CHECK_OK(&ctx, npu_list_create(&ctx, device, &lists[i]));
    }
    env("FAKE_FAULT", NULL);
    CHECK_EQUAL(live() - start, 2 * LISTS + 3);
    for (int i = 0; i < LISTS; i++) npu_list_destroy(lists[i]);
    CHECK_OK(&ctx, npu_list_create(&ctx, device, &lists[0]));
    CHECK_EQUAL(live() - start, 2 + 3); /* queues are kept */
    CHECK_OK(&ctx, npu_list_close(&ctx, lists[0]));
    CHECK_OK(&ctx, npu_list_run(&ctx, lists[0])); /* empty */
    npu_list_destroy(lists[0]);
    npu_device_unref(device);
    CHECK_EQUAL(live(), 0);
}

/* --- memory, fork --------------------------------------------------------------------------------------------------
 */

static void test_memory(void) {
    NpuDevice *device;
    void *p;
    CHECK_OK(&ctx, npu_device_open(&ctx, fake, NULL, &device));
    CHECK_OK(&ctx, npu_memory_alloc(&ctx, device, 0, &p));
    CHECK(p && (uintptr_t)p % 4096 == 0);
    npu_memory_free(device, p);
    CHECK_CODE(&ctx, CODE_INVALID, npu_memory_alloc(&ctx, device, -1, &p));
    CHECK_CODE(&ctx, CODE_INVALID, npu_memory_alloc(&ctx, device, INT64_MAX, &p));
    npu_memory_free(device, NULL);
    char *own = aligned_alloc(4096, 8192);
    CHECK_OK(&ctx, npu_memory_import(&ctx, device, own, 5000, &p));
    CHECK(p == NULL); /* the driver cannot */
    npu_device_unref(device);
    env("FAKE_IMPORT", "1");
    CHECK_OK(&ctx, npu_device_open(&ctx, fake, NULL, &device));
    CHECK_OK(&ctx, npu_memory_import(&ctx, device, own, 5000, &p));
    CHECK(p == own);
    npu_memory_free(device, p);
    CHECK_OK(&ctx, npu_memory_import(&ctx, device, own + 64, 100, &p));
    CHECK(p == NULL);
    env("FAKE_FAULT", "zeMemAllocHost=0x70000003@1"); /* refused: copy */
    CHECK_OK(&ctx, npu_memory_import(&ctx, device, own, 100, &p));
    CHECK(p == NULL);
    env("FAKE_FAULT", NULL);
    free(own);
    npu_device_unref(device);
    env("FAKE_IMPORT", NULL);
    CHECK_EQUAL(live(), 0);
}

static void test_fork(void) {
    Use u = {0};
    CHECK_OK(&ctx, use_begin(&ctx, &u, NULL));
    int before_fork = live();
    pid_t child = fork();
    if (child == 0) {
        check_failures = 0;
        CHECK_REASON(NPU_FAILED, npu_list_run(&ctx, u.list));
        CHECK_SAYS("forked");
        use_end(&u);
        CHECK_EQUAL(live(), before_fork); /* the parent's: none was destroyed */
        _exit(check_failures != 0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK_EQUAL(status, 0);
    CHECK_OK(&ctx, use_run(&ctx, &u, 2));
    use_end(&u);
    CHECK_EQUAL(live(), 0);
}

int main(void) {
    context_init(&ctx);
    fake_build(fake, sizeof fake, "fake", "");
    env("ZE_ENABLE_ALT_DRIVERS", NULL);
    env("FORGE_ZE_LOADER", NULL);
    test_use();
    test_versions();
    test_faults();
    test_reasons();
    test_lost();
    test_other_failures_pass();
    test_waiting();
    test_threads();
    test_many_lists();
    test_memory();
    test_fork();
    fake_remove();
    return check_done();
}
