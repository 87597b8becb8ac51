/* A Level Zero loader and NPU driver in one library, for the tests of csrc/npu: it says what the environment asks for.
 *
 *   FAKE_EXTENSION=1.12   version of the graph extension; its table ends at unmapped memory
 *   FAKE_EXTENSION_NAME   its name
 *   FAKE_FINDS=name       the loader finds its driver only if ZE_ENABLE_ALT_DRIVERS has this name
 *   FAKE_NULL=create3     a member of the table that is NULL
 *   FAKE_COMPILER=0       no compiler;  FAKE_DEVICE=1 a GPU
 *   FAKE_FAULT=zeInit=0x78000001@2   the second call of zeInit gives this result (@0: each call)
 *   FAKE_LOG=5000         bytes of the compiler's log
 *   FAKE_REFUSE=1         native blobs are of another version;  2: so they say when they are initialised
 *   FAKE_STAGES=1         how graphs are initialised
 *   FAKE_BUSY_MS=200      how long an execution takes
 *   FAKE_SLOW=1           setting an argument lets other threads run
 *   FAKE_IMPORT=1         system memory can be imported
 *   FAKE_ELEMENT=0x2      element type of arguments
 *
 * A graph has the inputs in0, w0 and the output out0, four floats each; out0 = in0 + w0. `fake_live` counts objects. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "npu/ze_loader.h"

#define EXPORT __attribute__((visibility("default")))

enum { ARGUMENTS = 3, ELEMENTS = 4, CALLS_MAX = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
EXPORT int fake_live, fake_barriers, fake_compiled, fake_log_reads;
EXPORT char fake_flags[512];

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? (int)strtol(text, NULL, 0) : otherwise;
}

/* --- faults: calls are counted while FAKE_FAULT stays the same -----------------------------------------------------
 */

static ZeResult fault(const char *point) {
    static char current[128];
    static int calls;
    const char *spec = getenv("FAKE_FAULT");
    if (!spec) spec = "";
    pthread_mutex_lock(&lock);
    if (strncmp(spec, current, sizeof current - 1)) {
        snprintf(current, sizeof current, "%s", spec);
        calls = 0;
    }
    size_t n = strlen(point);
    ZeResult r = ZE_SUCCESS;
    if (!strncmp(spec, point, n) && spec[n] == '=') {
        char *end;
        ZeResult wanted = (ZeResult)strtoul(spec + n + 1, &end, 0);
        int nth = *end == '@' ? atoi(end + 1) : 0;
        calls++;
        if (!nth || calls == nth) r = wanted;
    }
    pthread_mutex_unlock(&lock);
    return r;
}

#define ENTER(name)                                                                                                    \
    do {                                                                                                               \
        ZeResult fault_ = fault(name);                                                                                 \
        if (fault_ != ZE_SUCCESS) return fault_;                                                                       \
    } while (0)
#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "fake_ze.c:%d: the caller breaks the interface: %s\n", __LINE__, #condition);              \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static void *object(size_t bytes) {
    __atomic_add_fetch(&fake_live, 1, __ATOMIC_SEQ_CST);
    void *made = calloc(1, bytes);
    EXPECT(made);
    return made;
}
static void gone(void *made) {
    EXPECT(made);
    __atomic_sub_fetch(&fake_live, 1, __ATOMIC_SEQ_CST);
    free(made);
}

/* --- core ----------------------------------------------------------------------------------------------------------
 */

struct ZeContext_ {
    int unused;
};
struct ZeQueue_ {
    int unused;
};
struct ZeGraph_ {
    float *set[ARGUMENTS];
    bool ready;
    uint8_t blob[64];
};
typedef struct Command {
    float *arguments[ARGUMENTS];
} Command;
struct ZeList_ {
    Command commands[CALLS_MAX];
    uint32_t n;
    bool closed;
};
struct ZeFence_ {
    ZeList list; /* submitted and not ended */
    bool done;
    struct timespec start;
};
typedef struct Memory {
    struct Memory *next;
    void *data;
    size_t bytes;
    bool imported;
} Memory;
static Memory *memories;
static int driver_handle, device_handle;

EXPORT ZeResult zeInit(uint32_t flags) {
    EXPECT(flags == ZE_INIT_NPU_ONLY);
    ENTER("zeInit");
    const char *wanted = getenv("FAKE_FINDS"), *named = getenv("ZE_ENABLE_ALT_DRIVERS");
    if (wanted && !(named && strstr(named, wanted))) return ZE_UNINITIALIZED;
    return ZE_SUCCESS;
}
EXPORT ZeResult zeDriverGet(uint32_t *count, ZeDriver *out) {
    ENTER("zeDriverGet");
    uint32_t have = (uint32_t)number("FAKE_DRIVERS", 1);
    if (out && *count && have) out[0] = (ZeDriver)(void *)&driver_handle;
    *count = have;
    return ZE_SUCCESS;
}
#ifndef FAKE_OLD
EXPORT ZeResult zeInitDrivers(uint32_t *count, ZeDriver *out, const ZeDesc *desc) {
    EXPECT(desc->type == ZE_TYPE_INIT_DRIVERS && desc->flags == ZE_INIT_DRIVERS_NPU);
    ENTER("zeInitDrivers");
    return zeDriverGet(count, out);
}
EXPORT ZeResult zelLoaderGetVersions(size_t *count, ZelVersion *out) {
    if (*count < 2) return ZE_INVALID_SIZE;
    out[0] = (ZelVersion){.component = "tracing layer", .major = 9};
    out[1] = (ZelVersion){.component = "loader", .major = 1, .minor = 20, .patch = 6};
    *count = 2;
    return ZE_SUCCESS;
}
#endif
EXPORT ZeResult zeDriverGetProperties(ZeDriver d, ZeDriverProperties *p) {
    EXPECT(d == (ZeDriver)(void *)&driver_handle && p->type == ZE_TYPE_DRIVER_PROPERTIES && !p->next);
    ENTER("zeDriverGetProperties");
    p->version = 1234;
    return ZE_SUCCESS;
}
static uint32_t version(void) {
    unsigned major = 1, minor = 16;
    const char *text = getenv("FAKE_EXTENSION");
    if (text) sscanf(text, "%u.%u", &major, &minor);
    return ZE_VERSION(major, minor);
}
EXPORT ZeResult zeDriverGetExtensionProperties(ZeDriver d, uint32_t *count, ZeExtension *out) {
    EXPECT(d == (ZeDriver)(void *)&driver_handle);
    ENTER("zeDriverGetExtensionProperties");
    ZeExtension list[4] = {{"ZE_extension_profiling_data", 1},
                           {"ZE_extension_graph_1_2", ZE_VERSION(1, 2)},
                           {"ZE_extension_graph_extra", ZE_VERSION(1, 99)},
                           {ZE_SYSTEM_MEMORY_EXTENSION, 1}};
    const char *name = getenv("FAKE_EXTENSION_NAME");
    snprintf(list[0].name, sizeof list[0].name, "%s", name ? name : ZE_GRAPH_EXTENSION);
    list[0].version = version();
    uint32_t have = name && !*name ? 0 : number("FAKE_IMPORT", 0) ? 4 : 3;
    if (out) memcpy(out, list, (*count < have ? *count : have) * sizeof *list);
    if (!out || *count > have) *count = have;
    return ZE_SUCCESS;
}
EXPORT ZeResult zeDeviceGet(ZeDriver d, uint32_t *count, ZeDevice *out) {
    EXPECT(d == (ZeDriver)(void *)&driver_handle);
    ENTER("zeDeviceGet");
    if (out && *count) out[0] = (ZeDevice)(void *)&device_handle;
    *count = 1;
    return ZE_SUCCESS;
}
EXPORT ZeResult zeDeviceGetProperties(ZeDevice d, ZeDeviceProperties *p) {
    EXPECT(d == (ZeDevice)(void *)&device_handle && p->type == ZE_TYPE_DEVICE_PROPERTIES && !p->next);
    ENTER("zeDeviceGetProperties");
    p->kind = number("FAKE_DEVICE", ZE_DEVICE_NPU);
    p->device = (uint32_t)number("FAKE_DEVICE_ID", 0x643e);
    p->max_allocation = 1 << 30;
    snprintf(p->name, sizeof p->name, "Fake NPU");
    return ZE_SUCCESS;
}
EXPORT ZeResult zeContextCreate(ZeDriver d, const ZeDesc *desc, ZeContext *out) {
    EXPECT(d == (ZeDriver)(void *)&driver_handle && desc->type == ZE_TYPE_CONTEXT);
    ENTER("zeContextCreate");
    *out = object(sizeof **out);
    return ZE_SUCCESS;
}
EXPORT ZeResult zeContextDestroy(ZeContext c) {
    gone(c);
    return ZE_SUCCESS;
}

static bool known(const void *p, size_t bytes) {
    bool found = false;
    pthread_mutex_lock(&lock);
    for (Memory *m = memories; m && !found; m = m->next)
        found = (const char *)p >= (char *)m->data && (const char *)p + bytes <= (char *)m->data + m->bytes;
    pthread_mutex_unlock(&lock);
    return found;
}
EXPORT ZeResult zeMemAllocHost(ZeContext c, const ZeDesc *desc, size_t bytes, size_t alignment, void **out) {
    EXPECT(c && desc->type == ZE_TYPE_HOST_MEMORY && bytes && alignment == 4096);
    ENTER("zeMemAllocHost");
    const ZeSystemMemory *source = desc->next;
    Memory *m = object(sizeof *m);
    if (source) {
        EXPECT(source->type == ZE_TYPE_SYSTEM_MEMORY && source->bytes == bytes && source->bytes % 4096 == 0);
        m->imported = true;
        m->data = source->memory;
    } else {
        m->data = aligned_alloc(4096, bytes);
        EXPECT(m->data);
    }
    m->bytes = bytes;
    pthread_mutex_lock(&lock);
    m->next = memories;
    memories = m;
    pthread_mutex_unlock(&lock);
    *out = m->data;
    return ZE_SUCCESS;
}
EXPORT ZeResult zeMemFree(ZeContext c, void *p) {
    EXPECT(c);
    pthread_mutex_lock(&lock);
    Memory **at = &memories, *m;
    while (*at && (*at)->data != p) at = &(*at)->next;
    m = *at;
    EXPECT(m);
    *at = m->next;
    pthread_mutex_unlock(&lock);
    if (!m->imported) free(m->data);
    gone(m);
    return ZE_SUCCESS;
}
EXPORT ZeResult zeCommandQueueCreate(ZeContext c, ZeDevice d, const ZeQueueDesc *desc, ZeQueue *out) {
    EXPECT(c && d && desc->type == ZE_TYPE_QUEUE);
    ENTER("zeCommandQueueCreate");
    *out = object(sizeof **out);
    return ZE_SUCCESS;
}
EXPORT ZeResult zeCommandQueueDestroy(ZeQueue q) {
    gone(q);
    return ZE_SUCCESS;
}
EXPORT ZeResult zeCommandListCreate(ZeContext c, ZeDevice d, const ZeListDesc *desc, ZeList *out) {
    EXPECT(c && d && desc->type == ZE_TYPE_LIST);
    ENTER("zeCommandListCreate");
    *out = object(sizeof **out);
    return ZE_SUCCESS;
}
EXPORT ZeResult zeCommandListDestroy(ZeList l) {
    gone(l);
    return ZE_SUCCESS;
}
EXPORT ZeResult zeCommandListClose(ZeList l) {
    ENTER("zeCommandListClose");
    l->closed = true;
    return ZE_SUCCESS;
}
EXPORT ZeResult zeCommandListAppendBarrier(ZeList l, ZeEvent e, uint32_t n, ZeEvent *wait) {
    EXPECT(!l->closed && !e && !n && !wait);
    ENTER("zeCommandListAppendBarrier");
    fake_barriers++;
    return ZE_SUCCESS;
}
EXPORT ZeResult zeFenceCreate(ZeQueue q, const ZeDesc *desc, ZeFence *out) {
    EXPECT(q && desc->type == ZE_TYPE_FENCE);
    ENTER("zeFenceCreate");
    *out = object(sizeof **out);
    return ZE_SUCCESS;
}
EXPORT ZeResult zeFenceDestroy(ZeFence f) {
    EXPECT(!f->list);
    gone(f);
    return ZE_SUCCESS;
}
EXPORT ZeResult zeCommandQueueExecuteCommandLists(ZeQueue q, uint32_t n, ZeList *lists, ZeFence f) {
    EXPECT(q && n == 1 && lists[0]->closed && f && !f->list && !f->done);
    ENTER("zeCommandQueueExecuteCommandLists");
    f->list = lists[0];
    clock_gettime(CLOCK_MONOTONIC, &f->start);
    return ZE_SUCCESS;
}
static double ms_since(const struct timespec *start) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - start->tv_sec) * 1e3 + (double)(now.tv_nsec - start->tv_nsec) / 1e6;
}
EXPORT ZeResult zeFenceHostSynchronize(ZeFence f, uint64_t timeout) {
    ENTER("zeFenceHostSynchronize");
    if (f->done) return ZE_SUCCESS;
    EXPECT(f->list);
    double left = number("FAKE_BUSY_MS", 0) - ms_since(&f->start);
    if (left > 0) {
        double sleep = left * 1e6 < (double)timeout ? left * 1e6 : (double)timeout;
        struct timespec t = {(time_t)(sleep / 1e9), (long)sleep % 1000000000};
        nanosleep(&t, NULL);
        if (number("FAKE_BUSY_MS", 0) > ms_since(&f->start)) return ZE_NOT_READY;
    }
    for (uint32_t i = 0; i < f->list->n; i++) {
        float **a = f->list->commands[i].arguments;
        for (int k = 0; k < ELEMENTS; k++) a[2][k] = a[0][k] + a[1][k];
    }
    f->list = NULL;
    f->done = true;
    return ZE_SUCCESS;
}
#ifndef FAKE_TOO_OLD
EXPORT ZeResult zeFenceReset(ZeFence f) {
    EXPECT(!f->list);
    ENTER("zeFenceReset");
    f->done = false;
    return ZE_SUCCESS;
}
#endif

/* --- graphs --------------------------------------------------------------------------------------------------------
 */

static __thread bool failed_here;

static void write_log(uint32_t *n, char *out) {
    uint32_t have = (uint32_t)number("FAKE_LOG", 0) + 1;
    fake_log_reads++;
    if (!out) {
        *n = have;
        return;
    }
    if (*n > have) *n = have;
    for (uint32_t i = 0; i < *n; i++) out[i] = i + 1 == have ? 0 : (char)('a' + i % 26);
}

static ZeResult make_graph(const ZeGraphDesc *desc, ZeGraph *out) {
    failed_here = true;
    EXPECT(desc->data && desc->bytes && desc->build_flags);
    if (desc->format == ZE_GRAPH_NATIVE) {
        ENTER("native");
        if (number("FAKE_REFUSE", 0) == 1) return ZE_UNSUPPORTED_VERSION;
        if (desc->bytes != 64 || memcmp(desc->data, "FAKEBLOB", 8)) return ZE_INVALID_NATIVE_BINARY;
    } else {
        EXPECT(desc->format == ZE_GRAPH_IR);
        uint16_t compiler[2];
        uint64_t xml, bin;
        memcpy(compiler, desc->data, 4);
        memcpy(&xml, desc->data + 8, 8);
        EXPECT(desc->data[4] == 2 && xml < desc->bytes);
        memcpy(&bin, desc->data + 16 + xml, 8);
        EXPECT(compiler[0] == 7 && compiler[1] == 30 && desc->bytes == 24 + xml + bin);
        snprintf(fake_flags, sizeof fake_flags, "%s", desc->build_flags);
        ENTER("compile");
        fake_compiled++;
    }
    ZeGraph g = object(sizeof *g);
    memcpy(g->blob, "FAKEBLOB", 8);
    g->ready = desc->format == ZE_GRAPH_NATIVE && number("FAKE_REFUSE", 0) == 2;
    *out = g;
    failed_here = false;
    return ZE_SUCCESS;
}
static ZeResult create(ZeContext c, ZeDevice d, const ZeGraphDesc *desc, ZeGraph *out) {
    EXPECT(c && d && desc->type == ZE_TYPE_GRAPH_DESC && (version() & 0xffff) < 5);
    return make_graph(desc, out);
}
static ZeResult create2(ZeContext c, ZeDevice d, const ZeGraphDesc *desc, ZeGraph *out) {
    EXPECT(c && d && desc->type == ZE_TYPE_GRAPH_DESC_2);
    EXPECT(desc->flags == (desc->format == ZE_GRAPH_IR ? ZE_GRAPH_NO_DRIVER_CACHE : 0u));
    return make_graph(desc, out);
}
static ZeResult create3(ZeContext c, ZeDevice d, const ZeGraphDesc *desc, ZeGraph *out, ZeBuildLog *log) {
    *log = object(1);
    return create2(c, d, desc, out);
}
static ZeResult destroy(ZeGraph g) {
    gone(g);
    return ZE_SUCCESS;
}
static ZeResult properties(ZeGraph g, ZeGraphProperties *p) {
    EXPECT(g && p->type == ZE_TYPE_GRAPH_PROPERTIES);
    ENTER("properties");
    p->arguments = ARGUMENTS;
    return ZE_SUCCESS;
}
static ZeResult properties2(ZeGraph g, ZeGraphProperties *p) {
    EXPECT(g && p->type == ZE_TYPE_GRAPH_PROPERTIES_2);
    ENTER("properties2");
    p->arguments = ARGUMENTS;
    p->stages = (uint32_t)number("FAKE_STAGES", ZE_GRAPH_INIT_DIRECT);
    return ZE_SUCCESS;
}
static ZeResult argument3(ZeGraph g, uint32_t i, ZeGraphArgument *a) {
    EXPECT(g && a->type == ZE_TYPE_GRAPH_ARGUMENT_3 && i < ARGUMENTS);
    ENTER("argument3");
    snprintf(a->name, sizeof a->name, "%s", i == 0 ? "in0" : i == 1 ? "w0" : "add.py:3/sum");
    snprintf(a->friendly_name, sizeof a->friendly_name, "%s", a->name);
    if (i == 2) {
        snprintf(a->tensor_names[0], ZE_NAME_MAX, "the_sum");
        snprintf(a->tensor_names[1], ZE_NAME_MAX, "out0");
        a->n_tensor_names = 2;
    }
    a->direction = i == 2 ? ZE_ARGUMENT_OUTPUT : ZE_ARGUMENT_INPUT;
    a->rank = 2;
    a->dims[0] = 1;
    a->dims[1] = ELEMENTS;
    a->dims[2] = a->dims[3] = a->dims[4] = 1;
    a->network_element = a->device_element = number("FAKE_ELEMENT", ZE_ELEMENT_FP32);
    return ZE_SUCCESS;
}
static ZeResult set_argument(ZeGraph g, uint32_t i, const void *value) {
    EXPECT(g && i < ARGUMENTS && value);
    ENTER("set_argument");
    g->set[i] = (float *)(uintptr_t)value;
    if (number("FAKE_SLOW", 0)) nanosleep(&(struct timespec){0, 1000}, NULL);
    return ZE_SUCCESS;
}
static ZeResult append_initialize(ZeList l, ZeGraph g, ZeEvent e, uint32_t n, ZeEvent *wait) {
    EXPECT(l && g && !e && !n && !wait);
    ENTER("append_initialize");
    g->ready = true;
    return ZE_SUCCESS;
}
static ZeResult append_execute(ZeList l, ZeGraph g, void *profiling, ZeEvent e, uint32_t n, ZeEvent *wait) {
    EXPECT(l && g && g->ready && !l->closed && !profiling && !e && !n && !wait && l->n < CALLS_MAX);
    ENTER("append_execute");
    for (int i = 0; i < ARGUMENTS; i++)
        if (!known(g->set[i], ELEMENTS * sizeof(float))) return ZE_UNINITIALIZED;
    memcpy(l->commands[l->n++].arguments, g->set, sizeof g->set);
    return ZE_SUCCESS;
}
static ZeResult native_binary(ZeGraph g, size_t *bytes, uint8_t *out) {
    EXPECT(g);
    ENTER("native_binary");
    *bytes = sizeof g->blob;
    if (out) memcpy(out, g->blob, sizeof g->blob);
    return ZE_SUCCESS;
}
static ZeResult native_binary2(ZeGraph g, size_t *bytes, const uint8_t **view) {
    EXPECT(g);
    ENTER("native_binary");
    *bytes = sizeof g->blob;
    *view = g->blob;
    return ZE_SUCCESS;
}
static ZeResult initialize(ZeGraph g) {
    ENTER("initialize");
    if (g->ready) return ZE_UNSUPPORTED_VERSION;
    g->ready = true;
    return ZE_SUCCESS;
}
static ZeResult device_properties(ZeDevice d, ZeDeviceGraphProperties *p) {
    EXPECT(d && p->type == ZE_TYPE_DEVICE_GRAPH_PROPERTIES);
    ENTER("device_properties");
    p->extension = version();
    p->compiler_major = (uint16_t)number("FAKE_COMPILER", 7);
    p->compiler_minor = p->compiler_major ? 30 : 0;
    p->opset = 13;
    return ZE_SUCCESS;
}
static ZeResult log_text(ZeGraph g, uint32_t *n, char *out) {
    (void)g;
    EXPECT(failed_here);
    ENTER("log");
    write_log(n, out);
    return ZE_SUCCESS;
}
static ZeResult log2_text(ZeBuildLog log, uint32_t *n, char *out) {
    EXPECT(log);
    ENTER("log");
    write_log(n, out);
    return ZE_SUCCESS;
}
static ZeResult log_destroy(ZeBuildLog log) {
    gone(log);
    return ZE_SUCCESS;
}
static ZeResult option_supported(ZeDevice d, int32_t kind, const char *option, const char *value) {
    EXPECT(d && kind == ZE_OPTIONS_COMPILER && !value);
    ENTER("option_supported");
    return strncmp(option, "NPU_", 4) ? ZE_UNSUPPORTED_FEATURE : ZE_SUCCESS;
}

static size_t table_bytes(uint32_t minor) {
    static const struct {
        uint32_t minor;
        size_t end;
    } steps[] = {{16, sizeof(ZeGraphTable)},
                 {15, offsetof(ZeGraphTable, evict)},
                 {12, offsetof(ZeGraphTable, set_argument2)},
                 {11, offsetof(ZeGraphTable, create3)},
                 {8, offsetof(ZeGraphTable, options)},
                 {7, offsetof(ZeGraphTable, properties2)},
                 {6, offsetof(ZeGraphTable, native_binary2)},
                 {5, offsetof(ZeGraphTable, device_properties2)},
                 {4, offsetof(ZeGraphTable, create2)},
                 {3, offsetof(ZeGraphTable, log)},
                 {2, offsetof(ZeGraphTable, query_create)},
                 {1, offsetof(ZeGraphTable, argument3)}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        if (minor >= steps[i].minor) return steps[i].end;
    return offsetof(ZeGraphTable, metadata);
}

EXPORT ZeResult zeDriverGetExtensionFunctionAddress(ZeDriver d, const char *name, void **out) {
    static char *pages; /* the table ends where the second one, which may not be read, begins */
    EXPECT(d == (ZeDriver)(void *)&driver_handle);
    EXPECT(!strncmp(name, ZE_GRAPH_EXTENSION, strlen(ZE_GRAPH_EXTENSION)));
    ENTER("zeDriverGetExtensionFunctionAddress");
    ZeGraphTable t = {.create = create,
                      .destroy = destroy,
                      .properties = properties,
                      .set_argument = set_argument,
                      .append_initialize = append_initialize,
                      .append_execute = append_execute,
                      .native_binary = native_binary,
                      .device_properties = device_properties,
                      .argument3 = argument3,
                      .log = log_text,
                      .create2 = create2,
                      .native_binary2 = native_binary2,
                      .properties2 = properties2,
                      .initialize = initialize,
                      .option_supported = option_supported,
                      .create3 = create3,
                      .log2 = log2_text,
                      .log_destroy = log_destroy};
    const char *null = getenv("FAKE_NULL");
    if (null && !strcmp(null, "create3")) t.create3 = NULL;
    if (null && !strcmp(null, "initialize")) t.initialize = NULL;
    if (null && !strcmp(null, "argument3")) t.argument3 = NULL;
    if (null && !strcmp(null, "table")) {
        *out = NULL;
        return ZE_SUCCESS;
    }
    if (!pages) {
        pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        EXPECT(pages != MAP_FAILED && !mprotect(pages + 4096, 4096, PROT_NONE));
    }
    size_t bytes = table_bytes(version() & 0xffff);
    *out = memcpy(pages + 4096 - bytes, &t, bytes);
    return ZE_SUCCESS;
}
