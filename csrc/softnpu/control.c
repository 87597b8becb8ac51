/* Settings, faults on demand, counters, the registry of live objects. The exported functions are for tests: they load
 * this library with ctypes beside the loader, and get the same instance.
 *
 * FORGE_SOFTNPU, read when the first function is called, holds settings as "key=value" lines. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softnpu.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- settings ---------------------------------------------------------------------------------------------------- */

static Settings current = {
    .extension = ZE_MAKE_VERSION(1, 16),
    .compiler = ZE_MAKE_VERSION(7, 30),
    .opset = 13,
    .device_id = 0x643e,
    .driver = 1,
    .target = "npu4000",
    .recovers = true,
    .import = true,
    .openvino = "",
    .command = "",
    .refuse = "",
    .folder = "/tmp",
};

static bool version(const char *text, uint32_t *out) {
    unsigned major, minor;
    if (sscanf(text, "%u.%u", &major, &minor) != 2 || major > 0x7fff || minor > 0xffff) return false;
    *out = ZE_MAKE_VERSION(major, minor);
    return true;
}

static bool number(const char *text, uint64_t *out) {
    char *end;
    *out = strtoull(text, &end, 0);
    return *text && !*end;
}

static bool set_text(const char **field, const char *value) {
    char *copy = strdup(value);
    if (copy) *field = copy; /* the old text stays: another thread may be reading it */
    return copy != NULL;
}

static bool set_one(Settings *s, const char *key, const char *value) {
    static const struct {
        const char *target;
        uint32_t device_id;
    } devices[] = {{"npu3720", 0x7d1d}, {"npu4000", 0x643e}, {"npu5010", 0xb03e}};
    uint64_t n = 0;
    if (!strcmp(key, "extension")) return version(value, &s->extension);
    if (!strcmp(key, "compiler")) return version(value, &s->compiler);
    if (!strcmp(key, "openvino")) return set_text(&s->openvino, value);
    if (!strcmp(key, "command")) return set_text(&s->command, value);
    if (!strcmp(key, "refuse")) return set_text(&s->refuse, value);
    if (!strcmp(key, "folder")) return set_text(&s->folder, value);
    if (!strcmp(key, "device")) {
        for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
            if (!strcmp(value, devices[i].target)) {
                snprintf(s->target, sizeof s->target, "%s", value);
                s->device_id = devices[i].device_id;
                return true;
            }
        return false;
    }
    if (!number(value, &n)) return false;
    if (!strcmp(key, "memory")) return s->memory = n, true;
    if (!strcmp(key, "latency_us")) return s->latency_us = n, true;
    if (!strcmp(key, "lose_after")) return s->lose_after = n, true;
    if (!strcmp(key, "driver_version")) return s->driver = (uint32_t)n, true;
    if (!strcmp(key, "opset")) return s->opset = (uint32_t)n, true;
    if (!strcmp(key, "recovers")) return s->recovers = n != 0, true;
    if (!strcmp(key, "import")) return s->import = n != 0, true;
    if (!strcmp(key, "firmware_mismatch")) return s->firmware_mismatch = n != 0, true;
    return false;
}

static void read_environment(void) {
    const char *text = getenv("FORGE_SOFTNPU");
    char *copy = strdup(text ? text : ""), *rest = copy;
    for (char *line; copy && (line = strsep(&rest, "\n"));) {
        char *value = strchr(line, '=');
        if (value) *value++ = 0;
        if (*line && (!value || !set_one(&current, line, value))) misuse("FORGE_SOFTNPU: cannot use '%s'", line);
    }
    free(copy);
}

static void ready(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_environment);
}

Settings settings(void) {
    ready();
    pthread_mutex_lock(&lock);
    Settings copy = current;
    pthread_mutex_unlock(&lock);
    return copy;
}

EXPORT int softnpu_set(const char *key, const char *value) {
    ready();
    pthread_mutex_lock(&lock);
    bool known = set_one(&current, key, value);
    pthread_mutex_unlock(&lock);
    return known ? 0 : -1;
}

/* --- faults and counters ----------------------------------------------------------------------------------------- */

static const char *const entry_names[ENTRY_COUNT] = {
#define CORE(name) #name,
#define GRAPH(since, name, function) #name,
#include "entries.def"
#undef CORE
#undef GRAPH
    "execution",
};

static struct Fault {
    uint64_t calls;
    uint32_t pass, times; /* calls to let through, then calls to fail */
    ze_result_t result;
    char log[512];
} faults[ENTRY_COUNT];

ze_result_t enter(Entry entry) {
    ready();
    pthread_mutex_lock(&lock);
    struct Fault *f = &faults[entry];
    ze_result_t result = OK;
    f->calls++;
    if (f->times && f->pass) {
        f->pass--;
    } else if (f->times) {
        result = f->result;
        if (f->times != UINT32_MAX) f->times--;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

const char *fault_log(Entry entry) { return faults[entry].log; }

EXPORT const char *softnpu_entry(unsigned index) { return index < ENTRY_COUNT ? entry_names[index] : NULL; }

/* The nth call from now on fails with `result`, and the times - 1 calls after it (UINT32_MAX: all). -1: no such entry
 * point. */
EXPORT int softnpu_fail(const char *name, uint32_t nth, uint32_t times, uint32_t result, const char *log) {
    for (size_t i = 0; i < ENTRY_COUNT; i++) {
        if (strcmp(name, entry_names[i])) continue;
        pthread_mutex_lock(&lock);
        faults[i].pass = nth ? nth - 1 : 0;
        faults[i].times = times;
        faults[i].result = (ze_result_t)result;
        snprintf(faults[i].log, sizeof faults[i].log, "%s", log ? log : "");
        pthread_mutex_unlock(&lock);
        return 0;
    }
    return -1;
}

EXPORT void softnpu_heal(void) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < ENTRY_COUNT; i++) faults[i].times = 0;
    pthread_mutex_unlock(&lock);
}

EXPORT uint64_t softnpu_calls(unsigned index) {
    pthread_mutex_lock(&lock);
    uint64_t calls = index < ENTRY_COUNT ? faults[index].calls : 0;
    pthread_mutex_unlock(&lock);
    return calls;
}

EXPORT void softnpu_lose(void) { lose_device(); }

/* --- live objects ------------------------------------------------------------------------------------------------ */

static const char *const kind_names[KIND_COUNT] = {
#define X(name) #name,
    KINDS(X)
#undef X
};
static Object *objects;
static struct { uint64_t count, bytes; } live[KIND_COUNT];

void *object_new(Kind kind, size_t size, size_t bytes) {
    Object *o = calloc(1, size);
    if (!o) return NULL;
    o->kind = kind;
    o->bytes = bytes;
    pthread_mutex_lock(&lock);
    o->next = objects;
    if (objects) objects->previous = o;
    objects = o;
    live[kind].count++;
    live[kind].bytes += bytes;
    pthread_mutex_unlock(&lock);
    return o;
}

bool object_check(const void *handle, Kind kind, const char *where) {
    if (!handle) return false;
    pthread_mutex_lock(&lock);
    const Object *o = objects;
    while (o && o != handle) o = o->next;
    bool alive = o && o->kind == kind;
    pthread_mutex_unlock(&lock);
    if (!alive) misuse("%s: not a live %s", where, kind_names[kind]);
    return alive;
}

void object_free(void *object) {
    Object *o = object;
    pthread_mutex_lock(&lock);
    if (o->previous)
        o->previous->next = o->next;
    else
        objects = o->next;
    if (o->next) o->next->previous = o->previous;
    live[o->kind].count--;
    live[o->kind].bytes -= o->bytes;
    pthread_mutex_unlock(&lock);
    free(o);
}

uint64_t live_bytes(void) {
    pthread_mutex_lock(&lock);
    uint64_t bytes = live[KIND_allocation].bytes + live[KIND_graph].bytes;
    pthread_mutex_unlock(&lock);
    return bytes;
}

EXPORT const char *softnpu_kind(unsigned index) { return index < KIND_COUNT ? kind_names[index] : NULL; }

EXPORT uint64_t softnpu_live(unsigned index, uint64_t *bytes) {
    if (index >= KIND_COUNT) return 0;
    pthread_mutex_lock(&lock);
    uint64_t count = live[index].count;
    if (bytes) *bytes = live[index].bytes;
    pthread_mutex_unlock(&lock);
    return count;
}

/* --- misuses ----------------------------------------------------------------------------------------------------- */

static char misuses[16384];
static size_t misuses_length;

void misuse(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    size_t n = strlen(line);
    pthread_mutex_lock(&lock);
    if (misuses_length + n + 2 <= sizeof misuses) {
        memcpy(misuses + misuses_length, line, n);
        misuses[misuses_length + n] = '\n';
        misuses_length += n + 1;
    }
    pthread_mutex_unlock(&lock);
}

/* Copies the text, one line a misuse, and forgets it; at most size - 1 bytes and a zero. */
EXPORT size_t softnpu_misuses(char *out, size_t size) {
    pthread_mutex_lock(&lock);
    size_t n = misuses_length < size - 1 ? misuses_length : size - 1;
    memcpy(out, misuses, n);
    out[n] = 0;
    misuses_length = 0;
    pthread_mutex_unlock(&lock);
    return n;
}
