/* The graph extension: graphs, their blobs and logs, and the table of its functions. What a version lacks an older
 * driver doesn't have: the table ends where that version's ends, before a page that nobody may read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

static __thread char last_log[2048]; /* per thread, as the real driver's */

/* --- blobs ------------------------------------------------------------------------------------------------------- */

/* Over the first bytes of every native blob. Without a compiler command the source follows; with one the blob is what
 * the command made, and the source lies in a file named after its hash, so that the size is the real one. */
typedef struct BlobHeader {
    char magic[8], target[16];
    uint32_t compiler, outside;
    uint64_t source_bytes, source_hash;
} BlobHeader;
static const char blob_magic[8] = "SOFTNPU";

static uint64_t hash(const uint8_t *data, size_t bytes) { /* FNV-1a, eight bytes at a time */
    uint64_t h = 0xcbf29ce484222325u, word;
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        memcpy(&word, data + i, 8);
        h = (h ^ word) * 0x100000001b3u;
        h ^= h >> 29;
    }
    for (; i < bytes; i++) h = (h ^ data[i]) * 0x100000001b3u;
    return h;
}

static void source_path(const BlobHeader *header, const char *folder, char *path, size_t size) {
    snprintf(path, size, "%s/%016llx.source", folder, (unsigned long long)header->source_hash);
}

/* Makes the blob of a compiled source; takes `made`, what the command wrote. */
static bool blob_make(const Settings *s, const uint8_t *source, size_t bytes, uint8_t *made, size_t made_bytes,
                      uint8_t **blob, size_t *blob_bytes) {
    BlobHeader header = {.compiler = s->compiler, .source_bytes = bytes, .source_hash = hash(source, bytes)};
    memcpy(header.magic, blob_magic, sizeof header.magic);
    memcpy(header.target, s->target, sizeof header.target);
    if (made && made_bytes >= sizeof header) {
        char path[512];
        source_path(&header, s->folder, path, sizeof path);
        header.outside = 1;
        memcpy(made, &header, sizeof header);
        *blob = made;
        *blob_bytes = made_bytes;
        return file_write(path, source, bytes);
    }
    free(made);
    *blob = malloc(sizeof header + bytes);
    if (!*blob) return false;
    *blob_bytes = sizeof header + bytes;
    memcpy(*blob, &header, sizeof header);
    memcpy(*blob + sizeof header, source, bytes);
    return true;
}

/* The source of a blob; `*own`: what to free, if it came from a file. */
static ze_result_t blob_open(const Settings *s, const uint8_t *blob, size_t bytes, const uint8_t **source,
                             size_t *source_bytes, uint8_t **own, char *log, size_t log_size) {
    BlobHeader header;
    *own = NULL;
    if (bytes < sizeof header || memcmp(blob, blob_magic, sizeof blob_magic)) {
        snprintf(log, log_size, "[NPU_DRV] Failed to recognize native binary format\n");
        return ZE_RESULT_ERROR_INVALID_NATIVE_BINARY;
    }
    memcpy(&header, blob, sizeof header);
    if (memcmp(header.target, s->target, sizeof header.target)) {
        snprintf(log, log_size, "[NPU_DRV] the blob is for %.15s, the device is %s\n", header.target, s->target);
        return ZE_RESULT_ERROR_UNSUPPORTED_VERSION;
    }
    if (header.outside) {
        char path[512];
        source_path(&header, s->folder, path, sizeof path);
        *source = *own = file_read(path, source_bytes);
    } else {
        *source = blob + sizeof header;
        *source_bytes = bytes - sizeof header;
    }
    if (*source_bytes == header.source_bytes && hash(*source, *source_bytes) == header.source_hash) return OK;
    free(*own);
    *own = NULL;
    snprintf(log, log_size, "[NPU_DRV] the blob is damaged\n");
    return ZE_RESULT_ERROR_INVALID_NATIVE_BINARY;
}

/* --- graphs ------------------------------------------------------------------------------------------------------ */

static void graph_release(Graph *g) {
    model_free(g->model);
    free(g->values);
    free(g->node);
    free(g->blob);
    object_free(g);
}

/* The source is on the device's side now: loads it, and describes its arguments. Takes `blob` in any case. */
static ze_result_t graph_load(Context *context, const Source *source, uint32_t flags, uint8_t *blob, size_t blob_bytes,
                              Graph **out) {
    ze_result_t r = OK;
    Graph *g = NULL;
    if (!memory_fits(blob_bytes)) {
        snprintf(last_log, sizeof last_log, "[NPU_DRV] no device memory for a blob of %zu bytes\n", blob_bytes);
        r = ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
    } else if (!(g = object_new(KIND_graph, sizeof *g, blob_bytes))) {
        r = ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    }
    if (!g) {
        free(blob);
        return r;
    }
    g->context = context;
    g->blob = blob;
    g->blob_bytes = blob_bytes;
    g->flags = flags;
    char error[1024];
    g->model = model_load(settings().openvino, source->xml, source->xml_bytes, source->bin, source->bin_bytes, error,
                          sizeof error);
    if (!g->model) {
        snprintf(last_log, sizeof last_log, "[NPU_VCL] Compiler returned msg:\n%s\n", error);
        graph_release(g);
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    g->count = model_arguments(g->model);
    g->values = calloc(g->count, sizeof *g->values);
    g->node = calloc(g->count, sizeof *g->node);
    if (!g->values || !g->node) {
        graph_release(g);
        return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    }
    for (uint32_t i = 0; i < g->count; i++) {
        const ModelArgument *a = model_argument(g->model, i);
        if (a->rank > ZE_MAX_GRAPH_ARGUMENT_DIMENSIONS_SIZE) {
            snprintf(last_log, sizeof last_log, "[NPU_VCL] argument %s has more than 5 dimensions\n", a->name);
            graph_release(g);
            return ZE_RESULT_ERROR_INVALID_ARGUMENT;
        }
        layer_of_tensor(source, a->name, g->node[i], sizeof g->node[i]);
    }
    *out = g;
    return OK;
}

static ze_result_t create_native(Context *context, const ze_graph_desc_2_t *d, const Settings *s, Graph **out) {
    const uint8_t *data;
    size_t bytes;
    uint8_t *own;
    Source source;
    ze_result_t r = blob_open(s, d->pInput, d->inputSize, &data, &bytes, &own, last_log, sizeof last_log);
    if (r) return r;
    r = source_parse(data, bytes, &source, last_log, sizeof last_log);
    uint8_t *copy = r ? NULL : malloc(d->inputSize);
    if (!r && !copy) r = ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    if (!r) {
        uint32_t flags = ZE_GRAPH_PROPERTIES_FLAG_PRE_COMPILED;
        if (s->extension >= ZE_MAKE_VERSION(1, 14)) flags |= ZE_GRAPH_PROPERTIES_FLAG_NO_STANDARD_ALLOCATION;
        memcpy(copy, d->pInput, d->inputSize);
        r = graph_load(context, &source, flags, copy, d->inputSize, out);
    }
    free(own);
    return r;
}

static ze_result_t create_compiled(Context *context, const ze_graph_desc_2_t *d, const Settings *s, Graph **out) {
    Source source;
    uint8_t *made = NULL, *blob = NULL;
    size_t made_bytes = 0, blob_bytes = 0;
    if (!s->compiler) return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE; /* a driver without compiler; its log is empty */
    ze_result_t r = source_parse(d->pInput, d->inputSize, &source, last_log, sizeof last_log);
    if (r) return r;
    source.flags = d->pBuildFlags ? d->pBuildFlags : "";
    r = compiler_run(&source, &made, &made_bytes, last_log, sizeof last_log);
    if (r) return r;
    if (!blob_make(s, d->pInput, d->inputSize, made, made_bytes, &blob, &blob_bytes)) {
        free(blob);
        return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    }
    return graph_load(context, &source, ZE_GRAPH_PROPERTIES_FLAG_COMPILED, blob, blob_bytes, out);
}

static ze_result_t create(Entry entry, Context *context, Device *device, const ze_graph_desc_2_t *d, Graph **out) {
    Settings s = settings();
    *last_log = 0;
    CHECK_POINTER(d);
    CHECK_POINTER(out);
    ze_result_t told = enter(entry);
    if (told) {
        snprintf(last_log, sizeof last_log, "%s", fault_log(entry));
        return told;
    }
    context = unwrapped(ZEL_HANDLE_CONTEXT, context);
    CHECK_HANDLE(context, context);
    if (unwrapped(ZEL_HANDLE_DEVICE, device) != the_device()) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    CHECK_POINTER(d->pInput);
    if (!d->inputSize) return ZE_RESULT_ERROR_INVALID_SIZE;
    for (const ze_graph_input_hash_t *next = d->pNext; next; next = next->pNext)
        if (next->stype != ZE_STRUCTURE_TYPE_GRAPH_INPUT_HASH || s.extension < ZE_MAKE_VERSION(1, 14))
            return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (s.extension >= ZE_MAKE_VERSION(1, 13) && d->flags & ZE_GRAPH_FLAG_INPUT_GRAPH_PERSISTENT &&
        ((uintptr_t)d->pInput % page || d->inputSize % page))
        return ZE_RESULT_ERROR_UNSUPPORTED_ALIGNMENT;
    if (context_lost(context)) return ZE_RESULT_ERROR_DEVICE_LOST;
    if (s.firmware_mismatch) {
        snprintf(last_log, sizeof last_log, "[NPU_DRV] the firmware's runtime 1.0 is older than the blob's 11.4\n");
        return ZE_RESULT_ERROR_UNSUPPORTED_VERSION;
    }
    if (d->format == ZE_GRAPH_FORMAT_NATIVE) return create_native(context, d, &s, out);
    if (d->format == ZE_GRAPH_FORMAT_NGRAPH_LITE) return create_compiled(context, d, &s, out);
    snprintf(last_log, sizeof last_log, "[NPU_DRV] Graph desc (ze_graph_desc_2_t) format invalid.\n");
    return ZE_RESULT_ERROR_INVALID_ARGUMENT;
}

static ze_result_t create_1(Context *context, Device *device, const ze_graph_desc_t *d, Graph **out) {
    if (!d) return create(ENTRY_pfnCreate, context, device, NULL, out);
    if (d->stype != ZE_STRUCTURE_TYPE_GRAPH_DESC) misuse("pfnCreate: stype of ze_graph_desc_t");
    ze_graph_desc_2_t d2 = {.pNext = d->pNext,
                            .format = d->format,
                            .inputSize = d->inputSize,
                            .pInput = d->pInput,
                            .pBuildFlags = d->pBuildFlags};
    return create(ENTRY_pfnCreate, context, device, &d2, out);
}

static ze_result_t create_2(Context *context, Device *device, const ze_graph_desc_2_t *d, Graph **out) {
    if (d && d->stype != ZE_STRUCTURE_TYPE_GRAPH_DESC_2) misuse("pfnCreate2: stype of ze_graph_desc_2_t");
    return create(ENTRY_pfnCreate2, context, device, d, out);
}

static ze_result_t graph_destroy(Graph *g) {
    ze_result_t told = enter(ENTRY_pfnDestroy);
    CHECK_HANDLE(g, graph);
    pthread_mutex_lock(&device_lock);
    if (g->running) misuse("pfnDestroy: the graph is being executed");
    while (g->running) pthread_cond_wait(&device_changed, &device_lock);
    pthread_mutex_unlock(&device_lock);
    graph_release(g);
    return told;
}

/* --- logs -------------------------------------------------------------------------------------------------------- */

struct BuildLog {
    Object object;
    char text[sizeof last_log];
};

static ze_result_t create_3(Context *context, Device *device, const ze_graph_desc_2_t *d, Graph **out, BuildLog **log) {
    if (d && d->stype != ZE_STRUCTURE_TYPE_GRAPH_DESC_2) misuse("pfnCreate3: stype of ze_graph_desc_2_t");
    ze_result_t r = create(ENTRY_pfnCreate3, context, device, d, out);
    if (log) {
        *log = object_new(KIND_log, sizeof **log, 0);
        if (*log) memcpy((*log)->text, last_log, sizeof last_log);
    }
    return r;
}

static ze_result_t copy_text(const char *text, uint32_t *size, char *out) {
    CHECK_POINTER(size);
    uint32_t have = (uint32_t)strlen(text) + 1;
    if (!out || *size > have) *size = have;
    if (out) memcpy(out, text, *size);
    return OK;
}

static ze_result_t log_string(Graph *graph, uint32_t *size, char *out) {
    ENTER(pfnBuildLogGetString);
    (void)graph;
    return copy_text(last_log, size, out);
}

static ze_result_t log_string_2(BuildLog *log, uint32_t *size, char *out) {
    ENTER(pfnBuildLogGetString2);
    CHECK_HANDLE(log, log);
    return copy_text(log->text, size, out);
}

static ze_result_t log_destroy(BuildLog *log) {
    ze_result_t told = enter(ENTRY_pfnBuildLogDestroy);
    CHECK_HANDLE(log, log);
    object_free(log);
    return told;
}

/* --- blobs, initialisation --------------------------------------------------------------------------------------- */

static ze_result_t native_binary(Graph *g, size_t *size, uint8_t *out) {
    ENTER(pfnGetNativeBinary);
    CHECK_HANDLE(g, graph);
    CHECK_POINTER(size);
    if (*size == 0 || *size > g->blob_bytes) *size = g->blob_bytes;
    if (out) memcpy(out, g->blob, *size);
    return OK;
}

static ze_result_t native_binary_2(Graph *g, size_t *size, const uint8_t **out) {
    ENTER(pfnGetNativeBinary2);
    CHECK_HANDLE(g, graph);
    CHECK_POINTER(size);
    CHECK_POINTER(out);
    *size = g->blob_bytes;
    *out = g->blob;
    return OK;
}

static ze_result_t initialize(Graph *g) {
    ENTER(pfnGraphInitialize);
    CHECK_HANDLE(g, graph);
    if (context_lost(g->context)) return ZE_RESULT_ERROR_DEVICE_LOST;
    g->initialized = true;
    return OK;
}

static ze_result_t evict(Graph *g) {
    ENTER(pfnEvict);
    CHECK_HANDLE(g, graph);
    return OK; /* its memory comes back when the graph runs again */
}

/* --- the device's graph properties ------------------------------------------------------------------------------- */

static void fill_device(ze_device_graph_properties_t *p) {
    Settings s = settings();
    p->graphExtensionVersion = s.extension;
    p->graphFormatsSupported = ZE_GRAPH_FORMAT_NATIVE;
    if (s.compiler) {
        p->graphFormatsSupported = ZE_GRAPH_FORMAT_NGRAPH_LITE; /* as the real driver: no bit mask */
        p->maxOVOpsetVersionSupported = s.opset;
        p->compilerVersion = (ze_graph_version_t){(uint16_t)(s.compiler >> 16), (uint16_t)s.compiler};
    } /* without a compiler the real driver leaves those as they were */
}

static ze_result_t device_graph(Device *device, ze_device_graph_properties_t *p) {
    ENTER(pfnDeviceGetGraphProperties);
    if (unwrapped(ZEL_HANDLE_DEVICE, device) != the_device()) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    CHECK_POINTER(p);
    fill_device(p);
    return OK;
}

static ze_result_t device_graph_2(Device *device, ze_device_graph_properties_2_t *p) {
    ENTER(pfnDeviceGetGraphProperties2);
    if (unwrapped(ZEL_HANDLE_DEVICE, device) != the_device()) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    CHECK_POINTER(p);
    fill_device((ze_device_graph_properties_t *)p);
    memset(p->elfVersion, 0, sizeof p->elfVersion);
    memset(p->runtimeVersion, 0, sizeof p->runtimeVersion);
    return OK;
}

static ze_result_t context_memory(Context *context, uint32_t type, ze_graph_memory_query_t *query) {
    ENTER(pfnQueryContextMemory);
    context = unwrapped(ZEL_HANDLE_CONTEXT, context);
    CHECK_HANDLE(context, context);
    CHECK_POINTER(query);
    uint64_t limit = settings().memory;
    query->total = limit ? limit : machine_memory();
    query->allocated = type == 1 ? live_bytes() : 0; /* 1: DDR; the others are caches, of which there are none */
    return OK;
}

static ze_result_t supported_options(Device *device, uint32_t type, size_t *size, char *out) {
    ENTER(pfnCompilerGetSupportedOptions);
    (void)device;
    CHECK_POINTER(size);
    const char *text = type == ZE_NPU_COMPILER_OPTIONS && settings().compiler ? compiler_options() : "";
    size_t have = *text ? strlen(text) + 1 : 0;
    if (!out || *size > have) *size = have;
    if (out) memcpy(out, text, *size);
    return OK;
}

static ze_result_t option_supported(Device *device, uint32_t type, const char *name, const char *value) {
    ENTER(pfnCompilerIsOptionSupported);
    (void)device;
    (void)value;
    CHECK_POINTER(name);
    bool known = type == ZE_NPU_COMPILER_OPTIONS && settings().compiler && compiler_knows_option(name, strlen(name));
    return known ? OK : ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
}

/* --- which layers are supported: all of a model that compiles, and none of another
 * ------------------------------------ */

struct Query {
    Object object;
    size_t bytes;
    char text[]; /* "<layer><layer>", as the compiler's */
};

static ze_result_t query_source(Entry entry, const ze_graph_desc_2_t *d, Query **out) {
    ze_result_t told = enter(entry);
    if (told) return told;
    CHECK_POINTER(d);
    CHECK_POINTER(d->pInput);
    CHECK_POINTER(out);
    Source source;
    uint8_t *made = NULL;
    size_t made_bytes = 0;
    *last_log = 0;
    if (!settings().compiler) return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
    ze_result_t r = source_parse(d->pInput, d->inputSize, &source, last_log, sizeof last_log);
    if (r) return r;
    source.flags = d->pBuildFlags ? d->pBuildFlags : "";
    r = compiler_run(&source, &made, &made_bytes, last_log, sizeof last_log);
    free(made);
    if (r) return r;
    Query *q = object_new(KIND_query, sizeof *q + source.xml_bytes + 1, 0); /* names are shorter than the xml */
    if (!q) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    const char *end = source.xml + source.xml_bytes, *at = source.xml;
    while ((at = memmem(at, (size_t)(end - at), "<layer ", 7))) {
        const char *close = memchr(at, '>', (size_t)(end - at));
        const char *name = close ? memmem(at, (size_t)(close - at), " name=\"", 7) : NULL;
        const char *quote = name ? memchr(name + 7, '"', (size_t)(close - name - 7)) : NULL;
        if (quote) q->bytes += (size_t)sprintf(q->text + q->bytes, "<%.*s>", (int)(quote - name - 7), name + 7);
        at += 7;
    }
    q->bytes++; /* the zero */
    *out = q;
    return OK;
}

static ze_result_t query_create(Context *context, Device *device, const ze_graph_desc_t *d, Query **out) {
    (void)context;
    (void)device;
    CHECK_POINTER(d);
    ze_graph_desc_2_t d2 = {.inputSize = d->inputSize, .pInput = d->pInput, .pBuildFlags = d->pBuildFlags};
    return query_source(ENTRY_pfnQueryNetworkCreate, &d2, out);
}

static ze_result_t query_create_2(Context *context, Device *device, const ze_graph_desc_2_t *d, Query **out) {
    (void)context;
    (void)device;
    return query_source(ENTRY_pfnQueryNetworkCreate2, d, out);
}

static ze_result_t query_layers(Query *query, size_t *size, char *out) {
    ENTER(pfnQueryNetworkGetSupportedLayers);
    CHECK_HANDLE(query, query);
    CHECK_POINTER(size);
    if (!out || *size > query->bytes) *size = query->bytes;
    if (out) memcpy(out, query->text, *size);
    return OK;
}

static ze_result_t query_destroy(Query *query) {
    ze_result_t told = enter(ENTRY_pfnQueryNetworkDestroy);
    CHECK_HANDLE(query, query);
    object_free(query);
    return told;
}

/* --- the table --------------------------------------------------------------------------------------------------- */

static Function *table;

static void make_table(void) {
    static const struct {
        uint32_t since;
        Function function;
    } all[] = {
#define CORE(name)
#define GRAPH(since, name, function) {since, (Function)function},
#include "entries.def"
#undef CORE
#undef GRAPH
    };
    uint32_t minor = settings().extension & 0xffff;
    size_t count = 0, page = (size_t)sysconf(_SC_PAGESIZE);
    while (count < sizeof all / sizeof *all && all[count].since <= minor) count++;
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages + page, page, PROT_NONE)) return;
    table = (Function *)(void *)(pages + page - count * sizeof *table);
    for (size_t i = 0; i < count; i++) table[i] = all[i].function;
}

Function *graph_table(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_table);
    return table;
}
