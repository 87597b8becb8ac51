/* Graphs: OpenVINO IR compiled by the driver, or a native blob: one that came with the program, or the cache's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "npu/cache.h"
#include "npu/device_internal.h"

/* --- the compiler's input --------------------------------------------------------------------------------------------
 * u16 major, u16 minor: of the compiler, exactly; u32 number of what follows: xml, weights; each u64 bytes, then the
 * bytes. Little endian, nothing aligned. */
typedef struct Buffer {
    uint8_t *data;
    size_t bytes;
} Buffer;

static uint8_t *put(uint8_t *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    return to + bytes;
}

static Code make_input(Context *ctx, const NpuDevice *device, const NpuGraphDesc *desc, Buffer *out) {
    size_t fixed = 4 + 4 + 8 + 8;
    if (!desc->xml_bytes || desc->bin_bytes < 0 || (uint64_t)desc->bin_bytes > SIZE_MAX / 4 ||
        desc->xml_bytes > SIZE_MAX / 4)
        return fail(ctx, CODE_INTERNAL, "an IR of %zu and %lld bytes", desc->xml_bytes, (long long)desc->bin_bytes);
    size_t bin_bytes = (size_t)desc->bin_bytes;
    out->bytes = fixed + desc->xml_bytes + bin_bytes;
    out->data = malloc(out->bytes);
    if (!out->data)
        return fail(ctx, CODE_NO_MEMORY, "out of memory for the compiler's input (%.1f MB)", (double)out->bytes / 1e6);
    uint16_t version[2] = {(uint16_t)(device->facts.compiler >> 16), (uint16_t)(device->facts.compiler & 0xffff)};
    uint32_t pieces = 2;
    uint64_t xml = desc->xml_bytes, bin = bin_bytes;
    uint8_t *to = put(out->data, version, sizeof version);
    to = put(to, &pieces, sizeof pieces);
    to = put(to, &xml, sizeof xml);
    to = put(to, desc->xml, desc->xml_bytes);
    to = put(to, &bin, sizeof bin);
    return bin ? desc->fill(ctx, desc->user, to, desc->bin_bytes) : CODE_OK;
}

/* All that decides what a compiler makes. The weights dominate: several GB a second. */
static Hash128 cache_key(const NpuDevice *device, const NpuGraphDesc *desc, const Buffer *input) {
    Hash hash;
    hash_init(&hash);
    hash_add_piece(&hash, input->data, input->bytes); /* with the compiler's version */
    hash_add_piece(&hash, desc->config, desc->config ? strlen(desc->config) : 0);
    hash_add_piece(&hash, device->facts.driver_version, strlen(device->facts.driver_version));
    hash_add_piece(&hash, device->facts.device_name, strlen(device->facts.device_name));
    uint32_t numbers[] = {device->facts.device_id, device->facts.extension, device->facts.opset};
    hash_add_piece(&hash, numbers, sizeof numbers);
    return hash_done(&hash);
}

/* --- options -------------------------------------------------------------------------------------------------------
 */

/* KEY="VALUE" pairs separated by spaces. *text moves behind the pair; false at the end or (with *text not at the end)
 * where that is not the form. */
static bool next_option(const char **text, char *key, size_t key_bytes) {
    const char *p = *text + strspn(*text, " ");
    *text = p;
    size_t n = strspn(p, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.");
    if (!n || n >= key_bytes || p[n] != '=' || p[n + 1] != '"') return false;
    const char *end = strchr(p + n + 2, '"');
    if (!end || (end[1] && end[1] != ' ')) return false;
    memcpy(key, p, n);
    key[n] = 0;
    *text = end + 1;
    return true;
}

static Code check_options(Context *ctx, NpuDevice *device, const char *config) {
    char key[128];
    const char *p = config;
    while (next_option(&p, key, sizeof key)) {
        if (device->minor < 11) continue; /* the compiler itself will say */
        ZeResult r = device->graphs->option_supported(device->device, ZE_OPTIONS_COMPILER, key, NULL);
        if (r == ZE_DEVICE_LOST || r == ZE_OUT_OF_HOST_MEMORY)
            return ze_fail(ctx, device, r, "asking for the compiler's option %s", key);
        if (r == ZE_UNSUPPORTED_FEATURE)
            return fail(ctx, CODE_INVALID, "the NPU compiler %u.%u of driver %s does not know the option %s",
                        device->facts.compiler >> 16, device->facts.compiler & 0xffff, device->facts.driver_version,
                        key);
    }
    if (*p) return fail(ctx, CODE_INVALID, "NPU options must be NAME=\"VALUE\" pairs, not: %s", p);
    return CODE_OK;
}

/* The driver starts a compiler for each question, and a program's graphs have the same options: the last answer holds.
 */
static Code check_config(Context *ctx, NpuDevice *device, const char *config) {
    if (!config || !*config) return CODE_OK;
    pthread_mutex_lock(&device->lock);
    bool known = device->checked_config && !strcmp(device->checked_config, config);
    pthread_mutex_unlock(&device->lock);
    if (known) return CODE_OK;
    TRY(check_options(ctx, device, config));
    char *copy = strdup(config);
    pthread_mutex_lock(&device->lock);
    free(device->checked_config);
    device->checked_config = copy;
    pthread_mutex_unlock(&device->lock);
    return CODE_OK;
}

/* --- compiling -----------------------------------------------------------------------------------------------------
 */

/* The compiler's words; "" where there are none. */
static void read_log(NpuDevice *device, ZeGraph graph, ZeBuildLog log, Text *out) {
    const ZeGraphTable *t = device->graphs;
    uint32_t n = 0;
    ZeResult r = log ? t->log2(log, &n, NULL) : t->log(graph, &n, NULL);
    char *text = r == ZE_SUCCESS && n && n < (1u << 28) ? malloc((size_t)n + 1) : NULL;
    if (text) {
        r = log ? t->log2(log, &n, text) : t->log(graph, &n, text);
        if (r == ZE_SUCCESS) {
            text[n] = 0;
            text_add(out, "%s", text);
        }
        free(text);
    }
}

/* A log that is too long for a message goes to a file. The message's end may be cut, so the log comes last. */
static Code compile_failed(Context *ctx, NpuDevice *device, ZeResult result, const NpuGraphDesc *desc,
                           const char *log) {
    enum { SHOWN = 700, SHOWN_OF_MORE = 550 };
    NpuReason reason = ze_reason(result);
    const char *what = desc->what ? desc->what : "a graph";
    size_t n = strlen(log);
    while (n && (log[n - 1] == '\n' || log[n - 1] == ' ')) n--;
    if (reason == NPU_DEVICE_LOST || reason == NPU_NO_MEMORY || (reason != NPU_FAILED && !n))
        return ze_fail(ctx, device, result, "compiling %.200s", what);
    if (reason == NPU_FAILED) reason = NPU_COMPILE_FAILED;
    char head[480], path[160], place[256] = ". It says:";
    snprintf(head, sizeof head, "the NPU compiler refused %.200s: %s (0x%x)%s", what, ze_result_name(result), result,
             ze_advice(result));
    if (!n) return fail_device(ctx, reason, "%s, without a message", head);
    bool all = strlen(head) + n < SHOWN + 200;
    if (!all && desc->cache_dir && cache_keep_log(desc->cache_dir, log, path, sizeof path))
        snprintf(place, sizeof place, ". It says (%zu bytes, all in %s):", n, path);
    else if (!all)
        snprintf(place, sizeof place, ". It says (the first %d of %zu bytes):", SHOWN_OF_MORE, n);
    return fail_device(ctx, reason, "%s%s\n%.*s", head, place, all ? (int)n : SHOWN_OF_MORE, log);
}

/* Calls the newest function that the driver has. `log` gets what the compiler said when it fails; it is read on this
 * thread at once, since drivers keep one a thread. */
static ZeResult create(NpuDevice *device, int32_t format, const void *data, size_t bytes, const char *flags,
                       uint32_t options, ZeGraph *out, Text *log) {
    const ZeGraphTable *t = device->graphs;
    ZeGraphDesc desc = {.type = ZE_TYPE_GRAPH_DESC_2,
                        .format = format,
                        .bytes = bytes,
                        .data = data,
                        .build_flags = flags,
                        .flags = options};
    ZeBuildLog handle = NULL;
    ZeResult r;
    *out = NULL;
    if (device->minor >= 12) {
        r = t->create3(device->context, device->device, &desc, out, &handle);
    } else if (device->minor >= 5) {
        r = t->create2(device->context, device->device, &desc, out);
    } else {
        desc.type = ZE_TYPE_GRAPH_DESC;
        r = t->create(device->context, device->device, &desc, out);
    }
    if (r == ZE_SUCCESS && !*out) r = ZE_UNKNOWN;
    if (r != ZE_SUCCESS) {
        *out = NULL;
        if (log && (handle || device->minor < 12)) read_log(device, NULL, handle, log);
    }
    if (handle) t->log_destroy(handle);
    return r;
}

static Code compile(Context *ctx, NpuDevice *device, const NpuGraphDesc *desc, const Buffer *input, ZeGraph *out) {
    Text flags, log;
    text_init(&flags);
    text_init(&log);
    /* The types and layouts stand in the IR. */
    text_add(&flags, "--inputs_precisions=\"\" --inputs_layouts=\"\" --outputs_precisions=\"\" --outputs_layouts=\"\"");
    if (desc->config && *desc->config) text_add(&flags, " --config %s", desc->config);
    Code code = text_done(ctx, &flags);
    if (code == CODE_OK) {
        /* Drivers have a cache too. One is enough, and without ours there shall be none. */
        ZeResult r =
            create(device, ZE_GRAPH_IR, input->data, input->bytes, flags.data, ZE_GRAPH_NO_DRIVER_CACHE, out, &log);
        if (r != ZE_SUCCESS) code = compile_failed(ctx, device, r, desc, log.data && !log.failed ? log.data : "");
    }
    text_destroy(&flags);
    text_destroy(&log);
    return code;
}

/* --- arguments -----------------------------------------------------------------------------------------------------
 */

static bool element_type(int32_t element, DType *dtype, bool *i4) {
    *i4 = false;
    switch (element) {
    case ZE_ELEMENT_FP32: *dtype = DTYPE_F32; return true;
    case ZE_ELEMENT_FP16: *dtype = DTYPE_F16; return true;
    case ZE_ELEMENT_BF16: *dtype = DTYPE_BF16; return true;
    case ZE_ELEMENT_FP64: *dtype = DTYPE_F64; return true;
    case ZE_ELEMENT_INT64: *dtype = DTYPE_I64; return true;
    case ZE_ELEMENT_INT32: *dtype = DTYPE_I32; return true;
    case ZE_ELEMENT_INT16: *dtype = DTYPE_I16; return true;
    case ZE_ELEMENT_INT8: *dtype = DTYPE_I8; return true;
    case ZE_ELEMENT_UINT8: *dtype = DTYPE_U8; return true;
    case ZE_ELEMENT_BOOL: *dtype = DTYPE_BOOL; return true;
    case ZE_ELEMENT_INT4:
    case ZE_ELEMENT_UINT4:
        *dtype = DTYPE_U8;
        *i4 = true;
        return true;
    default: return false;
    }
}

/* "in0", "w12" or "out3", as the emitter names them. */
static bool is_ours(const char *name, bool output) {
    size_t stem = output ? 3 : name[0] == 'w' ? 1 : 2;
    if (strncmp(name, output ? "out" : name[0] == 'w' ? "w" : "in", stem)) return false;
    size_t digits = strspn(name + stem, "0123456789");
    return digits && !name[stem + digits];
}

/* Drivers give the operator's name and the tensor's names; for a result the operator is the one that made it. */
static const char *argument_name(ZeGraphArgument *a) {
    bool output = a->direction == ZE_ARGUMENT_OUTPUT;
    uint32_t n = a->n_tensor_names < ZE_ARGUMENT_NAMES ? a->n_tensor_names : ZE_ARGUMENT_NAMES;
    a->name[ZE_NAME_MAX - 1] = a->friendly_name[ZE_NAME_MAX - 1] = 0;
    for (uint32_t i = 0; i < n; i++) {
        a->tensor_names[i][ZE_NAME_MAX - 1] = 0;
        if (is_ours(a->tensor_names[i], output)) return a->tensor_names[i];
    }
    if (is_ours(a->friendly_name, output)) return a->friendly_name;
    if (is_ours(a->name, output) || !n) return a->name;
    return a->tensor_names[0];
}

static Code read_argument(Context *ctx, NpuGraph *graph, uint32_t index, ZeGraphArgument *a, const char *what) {
    memset(a, 0, sizeof *a);
    a->type = ZE_TYPE_GRAPH_ARGUMENT_3;
    ZeResult r = graph->device->graphs->argument3(graph->graph, index, a);
    if (r != ZE_SUCCESS) return ze_fail(ctx, graph->device, r, "reading argument %u of %.200s", index, what);
    NpuArgument *out = &graph->arguments[index];
    const char *name = argument_name(a);
    snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, name);
    out->output = a->direction == ZE_ARGUMENT_OUTPUT;
    if (!element_type(a->device_element, &out->dtype, &out->i4) || a->rank > ZE_ARGUMENT_DIMS)
        return fail_device(ctx, NPU_COMPILE_FAILED, "%.200s: argument %.64s has element type %d and rank %u on the NPU",
                           what, name, a->device_element, a->rank);
    out->rank = (uint8_t)a->rank;
    uint64_t count = 1;
    for (uint32_t k = 0; k < a->rank; k++) {
        out->shape[k] = a->dims[k];
        if (__builtin_mul_overflow(count, (uint64_t)a->dims[k], &count) || count > INT64_MAX / 16)
            return fail_device(ctx, NPU_COMPILE_FAILED, "%.200s: argument %.64s is too large", what, name);
    }
    out->bytes = (int64_t)(out->i4 ? (count + 1) / 2 : count * dtype_size(out->dtype));
    return CODE_OK;
}

static Code read_arguments(Context *ctx, NpuGraph *graph, const char *what) {
    ZeGraphProperties properties = {.type = ZE_TYPE_GRAPH_PROPERTIES};
    ZeResult r = graph->device->graphs->properties(graph->graph, &properties);
    if (r != ZE_SUCCESS) return ze_fail(ctx, graph->device, r, "reading the properties of %.200s", what);
    uint32_t n = properties.arguments;
    graph->arguments = calloc((size_t)n + 1, sizeof *graph->arguments);
    ZeGraphArgument *a = malloc(sizeof *a);
    if (!graph->arguments || !a) {
        free(a);
        return fail(ctx, CODE_NO_MEMORY, "out of memory for %u graph arguments", n);
    }
    graph->n_arguments = n;
    Code code = CODE_OK;
    for (uint32_t i = 0; i < n && code == CODE_OK; i++) code = read_argument(ctx, graph, i, a, what);
    free(a);
    return code;
}

/* --- initialising --------------------------------------------------------------------------------------------------
 */

static Code initialize(Context *ctx, NpuGraph *graph, const char *what) {
    NpuDevice *device = graph->device;
    if (device->minor < 8) return npu_list_initialize(ctx, device, graph->graph, what);
    ZeGraphProperties properties = {.type = ZE_TYPE_GRAPH_PROPERTIES_2};
    ZeResult r = device->graphs->properties2(graph->graph, &properties);
    if (r != ZE_SUCCESS) return ze_fail(ctx, device, r, "reading the properties of %.200s", what);
    if (properties.stages & ZE_GRAPH_INIT_DIRECT) {
        r = device->graphs->initialize(graph->graph);
        if (r != ZE_SUCCESS) return ze_fail(ctx, device, r, "loading %.200s onto the device", what);
    }
    if (properties.stages & ZE_GRAPH_INIT_BY_LIST) {
        TRY(npu_list_initialize(ctx, device, graph->graph, what));
    } else if (graph->blob) { /* copied to the device; until then the driver read the caller's memory */
        free(graph->blob);
        graph->blob = NULL;
    }
    return CODE_OK;
}

/* --- native blobs --------------------------------------------------------------------------------------------------
 */

static Code finish(Context *ctx, NpuGraph *graph, const NpuGraphDesc *desc) {
    const char *what = desc->what ? desc->what : "a graph";
    TRY(read_arguments(ctx, graph, what));
    if (desc->accept) TRY(desc->accept(ctx, desc->user, graph));
    return initialize(ctx, graph, what);
}

static void unload(NpuGraph *graph) {
    if (graph->graph && npu_device_mine(graph->device)) graph->device->graphs->destroy(graph->graph);
    free(graph->arguments);
    free(graph->blob);
    graph->graph = NULL;
    graph->arguments = NULL;
    graph->blob = NULL;
    graph->n_arguments = 0;
    graph->blob_bytes = 0;
}

static bool passes_on(NpuReason reason) { return reason == NPU_DEVICE_LOST || reason == NPU_NO_MEMORY; }

/* A driver may refuse a blob, at once or when it is initialised: of another firmware, or damaged before its checksum
 * was made. Such a graph is unloaded again, and *refused says why. */
static Code load_blob(Context *ctx, NpuGraph *graph, const NpuGraphDesc *desc, const void *data, size_t bytes,
                      NpuReason *refused) {
    *refused = NPU_NONE;
    ZeResult r = create(graph->device, ZE_GRAPH_NATIVE, data, bytes, "", 0, &graph->graph, NULL);
    if (r != ZE_SUCCESS) {
        *refused = ze_reason(r);
        if (passes_on(*refused))
            return ze_fail(ctx, graph->device, r, "loading %.200s", desc->what ? desc->what : "a graph");
    } else {
        graph->blob_bytes = (int64_t)bytes;
        Code code = finish(ctx, graph, desc);
        if (code != CODE_DEVICE || passes_on((NpuReason)ctx->reason)) return code;
        *refused = (NpuReason)ctx->reason;
        ctx->code = CODE_OK;
    }
    unload(graph);
    return CODE_OK;
}

static Code try_blobs(Context *ctx, NpuGraph *graph, const NpuGraphDesc *desc, NpuMade *made) {
    const NpuBlob *blob = NULL;
    for (uint32_t i = 0; i < desc->n_blobs && !blob; i++) {
        if (hash_equal(desc->blobs[i].key, graph->key)) blob = &desc->blobs[i];
    }
    if (!blob) return CODE_OK;
    if (!hash_equal(hash_of(blob->data, blob->bytes), blob->checksum))
        return fail(ctx, CODE_INVALID,
                    "the compiled graph %016llx%016llx (%zu bytes) is damaged: its checksum is wrong",
                    (unsigned long long)blob->key.a, (unsigned long long)blob->key.b, blob->bytes);
    TRY(load_blob(ctx, graph, desc, blob->data, blob->bytes, &made->refused));
    if (made->refused != NPU_NONE) return CODE_OK;
    graph->given = blob;
    made->origin = NPU_FROM_BLOB;
    return CODE_OK;
}

static Code try_cache(Context *ctx, NpuGraph *graph, const NpuGraphDesc *desc, NpuMade *made) {
    size_t bytes;
    NpuReason refused;
    if (!desc->cache_dir || !cache_load(desc->cache_dir, graph->key, &graph->blob, &bytes)) return CODE_OK;
    TRY(load_blob(ctx, graph, desc, graph->blob, bytes, &refused));
    if (refused == NPU_NONE)
        made->origin = NPU_FROM_CACHE;
    else
        cache_remove(desc->cache_dir, graph->key);
    return CODE_OK;
}

/* What the driver made: its own memory, or (`*own`) a copy. NULL: it does not say. */
static const void *native_binary(NpuGraph *graph, size_t *bytes, void **own) {
    const ZeGraphTable *t = graph->device->graphs;
    const uint8_t *view = NULL;
    *bytes = 0;
    *own = NULL;
    if (graph->device->minor >= 7) return t->native_binary2(graph->graph, bytes, &view) == ZE_SUCCESS ? view : NULL;
    if (t->native_binary(graph->graph, bytes, NULL) != ZE_SUCCESS || !*bytes || !(*own = malloc(*bytes))) return NULL;
    return t->native_binary(graph->graph, bytes, *own) == ZE_SUCCESS ? *own : NULL;
}

static void store(NpuGraph *graph, const char *dir) {
    size_t bytes;
    void *own;
    const void *blob = native_binary(graph, &bytes, &own);
    if (blob && bytes) {
        cache_store(dir, graph->key, blob, bytes);
        graph->blob_bytes = (int64_t)bytes;
    }
    free(own);
}

/* Of a graph that was loaded the driver has no more than our pointer, so that it is never asked for the blob. */
Code npu_graph_blob(Context *ctx, NpuGraph *graph, const char *cache_dir, NpuBlob *out, void **own) {
    *own = NULL;
    *out = (NpuBlob){.key = graph->key};
    TRY(check_cancelled(ctx));
    if (graph->origin == NPU_FROM_BLOB) {
        *out = *graph->given;
        return CODE_OK;
    }
    if (graph->origin == NPU_FROM_CACHE) {
        if (cache_dir && cache_load(cache_dir, graph->key, own, &out->bytes)) out->data = *own;
    } else if (npu_device_mine(graph->device)) {
        pthread_mutex_lock(&graph->lock);
        out->data = native_binary(graph, &out->bytes, own);
        pthread_mutex_unlock(&graph->lock);
    }
    if (out->data && out->bytes)
        out->checksum = hash_of(out->data, out->bytes);
    else
        out->data = NULL;
    return CODE_OK;
}

/* --- the whole -----------------------------------------------------------------------------------------------------
 */

static Code fill_graph(Context *ctx, NpuGraph *graph, const NpuGraphDesc *desc, const Buffer *input, NpuMade *made) {
    graph->key = cache_key(graph->device, desc, input);
    TRY(try_blobs(ctx, graph, desc, made));
    if (made->origin == NPU_COMPILED) TRY(try_cache(ctx, graph, desc, made));
    if (made->origin != NPU_COMPILED) return CODE_OK;
    TRY(check_cancelled(ctx));
    TRY(compile(ctx, graph->device, desc, input, &graph->graph));
    if (desc->cache_dir) store(graph, desc->cache_dir);
    return finish(ctx, graph, desc);
}

Code npu_graph_create(Context *ctx, NpuDevice *device, const NpuGraphDesc *desc, NpuGraph **out, NpuMade *made) {
    NpuMade how = {NPU_COMPILED, NPU_NONE};
    *out = NULL;
    if (made) *made = how;
    TRY(npu_device_usable(ctx, device));
    TRY(check_config(ctx, device, desc->config));
    NpuGraph *graph = calloc(1, sizeof *graph);
    if (!graph) return fail(ctx, CODE_NO_MEMORY, "out of memory for a graph");
    graph->device = npu_device_ref(device);
    pthread_mutex_init(&graph->lock, NULL);
    Buffer input = {NULL, 0};
    Code code = make_input(ctx, device, desc, &input);
    if (code == CODE_OK) code = fill_graph(ctx, graph, desc, &input, &how);
    free(input.data);
    if (code != CODE_OK) {
        npu_graph_destroy(graph);
        return code;
    }
    graph->origin = how.origin;
    if (made) *made = how;
    *out = graph;
    return CODE_OK;
}

void npu_graph_destroy(NpuGraph *graph) {
    if (!graph) return;
    unload(graph);
    pthread_mutex_destroy(&graph->lock);
    npu_device_unref(graph->device);
    free(graph);
}

uint32_t npu_graph_arguments(const NpuGraph *graph) { return graph->n_arguments; }

const NpuArgument *npu_graph_argument(const NpuGraph *graph, uint32_t index) {
    return index < graph->n_arguments ? &graph->arguments[index] : NULL;
}

int64_t npu_graph_blob_bytes(NpuGraph *graph) {
    if (!npu_device_mine(graph->device)) return 0;
    pthread_mutex_lock(&graph->lock);
    if (!graph->blob_bytes) {
        size_t bytes = 0;
        if (graph->device->graphs->native_binary(graph->graph, &bytes, NULL) == ZE_SUCCESS)
            graph->blob_bytes = (int64_t)bytes;
    }
    int64_t bytes = graph->blob_bytes;
    pthread_mutex_unlock(&graph->lock);
    return bytes;
}
