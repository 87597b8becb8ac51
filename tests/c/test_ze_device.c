/* The device layer on a device that computes: the software NPU, or any other that the stock loader finds. Without one
 * nothing is tested here; tests/test_ze.py sets one up and looks for this program's last line. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/arena.h"
#include "check.h"
#include "npu/device.h"

static Context ctx;

enum { ROWS = 3, INNER = 8, COLUMNS = 5 };
static float weights[INNER * COLUMNS];

static void dims(Text *t, int rank, const int *shape) {
    for (int i = 0; i < rank; i++) text_add(t, "<dim>%d</dim>", shape[i]);
}

static void layer(Text *t, int id, const char *name, const char *type, const char *data) {
    text_add(t, "<layer id=\"%d\" name=\"%s\" type=\"%s\" version=\"opset1\">%s", id, name, type, data);
}

static void port(Text *t, int id, const char *names, int rows, int columns) {
    text_add(t, "<port id=\"%d\" precision=\"FP32\"%s%s%s>", id, names ? " names=\"" : "", names ? names : "",
             names ? "\"" : "");
    dims(t, 2, (const int[]){rows, columns});
    text_add(t, "</port>");
}

/* out0 = in0 @ constant + w0, where `product` is MatMul */
static void model(Text *t, const char *product) {
    text_init(t);
    text_add(t, "<?xml version=\"1.0\"?><net name=\"test\" version=\"11\"><layers>");
    layer(t, 0, "in0", "Parameter", "<data shape=\"3,8\" element_type=\"f32\"/><output>");
    port(t, 0, "in0", ROWS, INNER);
    text_add(t, "</output></layer>");
    layer(t, 1, "w0", "Parameter", "<data shape=\"1,5\" element_type=\"f32\"/><output>");
    port(t, 0, "w0", 1, COLUMNS);
    text_add(t, "</output></layer>");
    layer(t, 2, "constant", "Const", "<data element_type=\"f32\" shape=\"8,5\" offset=\"0\" size=\"160\"/><output>");
    port(t, 0, NULL, INNER, COLUMNS);
    text_add(t, "</output></layer>");
    layer(t, 3, "product", product, "<data transpose_a=\"false\" transpose_b=\"false\"/><input>");
    port(t, 0, NULL, ROWS, INNER);
    port(t, 1, NULL, INNER, COLUMNS);
    text_add(t, "</input><output>");
    port(t, 2, NULL, ROWS, COLUMNS);
    text_add(t, "</output></layer>");
    layer(t, 4, "sum", "Add", "<data auto_broadcast=\"numpy\"/><input>");
    port(t, 0, NULL, ROWS, COLUMNS);
    port(t, 1, NULL, 1, COLUMNS);
    text_add(t, "</input><output>");
    port(t, 2, "out0", ROWS, COLUMNS);
    text_add(t, "</output></layer>");
    layer(t, 5, "out0", "Result", "<input>");
    port(t, 0, NULL, ROWS, COLUMNS);
    text_add(t, "</input></layer></layers><edges>");
    static const int edges[][4] = {{0, 0, 3, 0}, {2, 0, 3, 1}, {3, 2, 4, 0}, {1, 0, 4, 1}, {4, 2, 5, 0}};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++)
        text_add(t, "<edge from-layer=\"%d\" from-port=\"%d\" to-layer=\"%d\" to-port=\"%d\"/>", edges[i][0],
                 edges[i][1], edges[i][2], edges[i][3]);
    text_add(
        t,
        "</edges><rt_info><is_new_api value=\"true\"/><use_indices_for_io_metadata value=\"true\"/></rt_info></net>");
    CHECK_OK(&ctx, text_done(&ctx, t));
}

static Code fill(Context *c, void *user, void *out, int64_t bytes) {
    (void)c, (void)user;
    CHECK_EQUAL(bytes, sizeof weights);
    memcpy(out, weights, sizeof weights);
    return CODE_OK;
}

typedef struct Use {
    NpuDevice *device;
    NpuGraph *graph;
    NpuList *list;
    float *in, *w, *out;
    int failures;
    pthread_t thread;
} Use;

static Code prepare(Context *c, Use *u) {
    TRY(npu_memory_alloc(c, u->device, ROWS * INNER * 4, (void **)&u->in));
    TRY(npu_memory_alloc(c, u->device, COLUMNS * 4, (void **)&u->w));
    TRY(npu_memory_alloc(c, u->device, ROWS * COLUMNS * 4, (void **)&u->out));
    TRY(npu_list_create(c, u->device, &u->list));
    TRY(npu_list_append(c, u->list, u->graph, (void *[]){u->in, u->w, u->out}));
    return npu_list_close(c, u->list);
}

static void release(Use *u) {
    npu_list_destroy(u->list);
    npu_memory_free(u->device, u->in);
    npu_memory_free(u->device, u->w);
    npu_memory_free(u->device, u->out);
}

static void *call_often(void *arg) {
    Use *u = arg;
    Context c;
    context_init(&c);
    u->failures += prepare(&c, u) != CODE_OK;
    for (int n = 0; n < 40 && !u->failures; n++) {
        for (int i = 0; i < ROWS * INNER; i++) u->in[i] = (float)((i * 7 + n) % 11 - 5);
        for (int i = 0; i < COLUMNS; i++) u->w[i] = (float)(n - i);
        u->failures += npu_list_run(&c, u->list) != CODE_OK;
        for (int r = 0; r < ROWS; r++)
            for (int k = 0; k < COLUMNS; k++) {
                float want = u->w[k];
                for (int i = 0; i < INNER; i++) want += u->in[r * INNER + i] * weights[i * COLUMNS + k];
                float error = u->out[r * COLUMNS + k] - want;
                u->failures += !(error < 0.05f && error > -0.05f); /* exact in f32; halves on an NPU */
            }
    }
    if (c.code != CODE_OK) fprintf(stderr, "%s\n", c.text);
    release(u);
    return NULL;
}

static void test_model(NpuDevice *device, const char *cache, bool want_hit) {
    Text xml;
    model(&xml, "MatMul");
    NpuGraph *graph;
    NpuMade made;
    NpuGraphDesc desc = {.xml = xml.data,
                         .xml_bytes = xml.size,
                         .bin_bytes = sizeof weights,
                         .fill = fill,
                         .cache_dir = cache,
                         .what = "a test"};
    CHECK_OK(&ctx, npu_graph_create(&ctx, device, &desc, &graph, &made));
    text_destroy(&xml);
    if (!graph) return;
    CHECK_EQUAL(made.origin, want_hit ? NPU_FROM_CACHE : NPU_COMPILED);
    CHECK_EQUAL(npu_graph_arguments(graph), 3);
    static const char *const names[] = {"in0", "w0", "out0"};
    static const int64_t bytes[] = {ROWS * INNER * 4, COLUMNS * 4, ROWS * COLUMNS * 4};
    for (uint32_t i = 0; i < 3; i++) {
        const NpuArgument *a = npu_graph_argument(graph, i);
        CHECK(!strcmp(a->name, names[i]));
        CHECK_EQUAL(a->bytes, bytes[i]);
        CHECK_EQUAL(a->output, i == 2);
        CHECK_EQUAL(a->rank, 2);
        CHECK_EQUAL(a->dtype, DTYPE_F32);
    }
    CHECK(npu_graph_blob_bytes(graph) > 0);
    Use uses[4];
    for (int i = 0; i < 4; i++) {
        uses[i] = (Use){.device = device, .graph = graph};
        CHECK_EQUAL(pthread_create(&uses[i].thread, NULL, call_often, &uses[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(uses[i].thread, NULL);
        CHECK_EQUAL(uses[i].failures, 0);
    }
    npu_graph_destroy(graph);
}

static void test_refused(NpuDevice *device) {
    Text xml;
    model(&xml, "NoSuchThing");
    NpuGraph *graph;
    NpuGraphDesc desc = {.xml = xml.data,
                         .xml_bytes = xml.size,
                         .bin_bytes = sizeof weights,
                         .fill = fill,
                         .what = "block of 1 instruction from model.py:31"};
    CHECK_CODE(&ctx, CODE_DEVICE, npu_graph_create(&ctx, device, &desc, &graph, NULL));
    text_destroy(&xml);
    CHECK(graph == NULL);
    CHECK_EQUAL(ctx.reason, NPU_COMPILE_FAILED);
    CHECK(strstr(ctx.text, "block of 1 instruction from model.py:31") != NULL);
    CHECK(strstr(ctx.text, "NoSuchThing") != NULL);
}

/* --- the software NPU: its counters, and failures that it is told to have ------------------------------------------
 */

typedef struct Driver {
    void *library;
    const char *(*entry)(unsigned), *(*kind)(unsigned);
    int (*fail)(const char *entry, uint32_t nth, uint32_t times, uint32_t result, const char *log);
    void (*heal)(void);
    uint64_t (*calls)(unsigned), (*live)(unsigned, uint64_t *);
    size_t (*misuses)(char *, size_t);
} Driver;

static void *symbol(Driver *d, const char *name) {
    void *found = dlsym(d->library, name);
    CHECK(found != NULL);
    return found;
}

/* False: the device is a real one. */
static bool find_driver(Driver *d) {
    const char *path = getenv("ZE_ENABLE_ALT_DRIVERS");
    d->library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (!d->library) return false;
    *(void **)&d->entry = symbol(d, "softnpu_entry");
    *(void **)&d->kind = symbol(d, "softnpu_kind");
    *(void **)&d->fail = symbol(d, "softnpu_fail");
    *(void **)&d->heal = symbol(d, "softnpu_heal");
    *(void **)&d->calls = symbol(d, "softnpu_calls");
    *(void **)&d->live = symbol(d, "softnpu_live");
    *(void **)&d->misuses = symbol(d, "softnpu_misuses");
    return !check_failures;
}

/* Nothing is left, and nothing was done that Level Zero leaves undefined. */
static bool check_clean(const Driver *d, const char *after) {
    int before = check_failures;
    for (unsigned i = 0; d->kind(i); i++)
        if (d->live(i, NULL)) {
            fprintf(stderr, "after %s: %llu objects left: %s\n", after, (unsigned long long)d->live(i, NULL),
                    d->kind(i));
            check_failures++;
        }
    char text[2048] = "";
    d->misuses(text, sizeof text);
    if (text[0]) fprintf(stderr, "after %s: misuse: %s\n", after, text);
    CHECK(!text[0]);
    return check_failures == before;
}

static Code use_once(Context *c, const char *xml, size_t xml_bytes) {
    Use u = {0};
    TRY(npu_device_open(c, NULL, NULL, &u.device));
    NpuGraphDesc desc = {.xml = xml, .xml_bytes = xml_bytes, .bin_bytes = sizeof weights, .fill = fill};
    Code code = npu_graph_create(c, u.device, &desc, &u.graph, NULL);
    if (code == CODE_OK) code = prepare(c, &u);
    for (int i = 0; code == CODE_OK && i < 2; i++) code = npu_list_run(c, u.list);
    release(&u);
    npu_graph_destroy(u.graph);
    npu_device_unref(u.device);
    return code;
}

/* Each entry point that a use calls, failing in turn at its first and second call. */
static void test_failures(const Driver *d) {
    enum { ENTRIES_MAX = 256 };
    static const uint32_t results[] = {0x70000001, 0x70000003, 0x7ffffffe};
    uint64_t calls[ENTRIES_MAX] = {0};
    Text xml;
    model(&xml, "MatMul");
    for (unsigned e = 0; e < ENTRIES_MAX && d->entry(e); e++) calls[e] = d->calls(e);
    CHECK_OK(&ctx, use_once(&ctx, xml.data, xml.size));
    for (unsigned e = 0; e < ENTRIES_MAX && d->entry(e); e++) calls[e] = d->calls(e) - calls[e];
    unsigned failures = 0, tries = 0;
    const char *layers = getenv("ZE_ENABLE_LOADER_INTERCEPT");
    for (unsigned e = 0; e < ENTRIES_MAX && d->entry(e); e++) {
        /* A loader with layers never again asks a driver that failed to start. */
        bool start = !strcmp(d->entry(e), "zeInit") || !strcmp(d->entry(e), "zeDriverGet");
        if (start && layers && *layers == '1') continue;
        for (uint32_t nth = 1; nth <= 2 && nth <= calls[e]; nth++) {
            CHECK_EQUAL(d->fail(d->entry(e), nth, 1, results[tries++ % 3], ""), 0);
            ctx.text[0] = 0;
            Code code = use_once(&ctx, xml.data, xml.size);
            CHECK(code == CODE_OK || (code == CODE_DEVICE && ctx.reason && strlen(ctx.text) > 20));
            failures += code != CODE_OK;
            ctx.code = CODE_OK;
            d->heal();
            check_clean(d, d->entry(e));
        }
    }
    CHECK_OK(&ctx, use_once(&ctx, xml.data, xml.size));
    check_clean(d, "all failures");
    CHECK(tries > 25 && failures > 20);
    text_destroy(&xml);
}

int main(void) {
    context_init(&ctx);
    if (!npu_device_likely()) {
        puts("no NPU: skipped");
        return 0;
    }
    for (int i = 0; i < INNER * COLUMNS; i++) weights[i] = (float)(i % 9 - 4) * 0.25f;
    NpuDevice *device;
    NpuFacts facts;
    Code code = npu_device_open(&ctx, NULL, &facts, &device);
    if (code != CODE_OK) {
        fprintf(stderr, "%s: %s\n", npu_reason_name((NpuReason)ctx.reason), ctx.text);
        return 1;
    }
    char cache[] = "/tmp/forge-ze-device-XXXXXX", command[64];
    if (!mkdtemp(cache)) return 1;
    test_model(device, NULL, false);
    test_model(device, cache, false);
    test_model(device, cache, true);
    test_refused(device);
    test_model(device, cache, true);
    npu_device_unref(device);
    Driver driver;
    if (find_driver(&driver) && check_clean(&driver, "all")) test_failures(&driver);
    snprintf(command, sizeof command, "rm -rf '%s'", cache);
    CHECK_EQUAL(system(command), 0);
    printf("ran on %s, loader %s, extension %u.%u\n", facts.device_name, facts.loader_version, facts.extension >> 16,
           facts.extension & 0xffff);
    return check_done();
}
