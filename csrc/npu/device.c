#include "npu/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "npu/device_internal.h"

const char *npu_reason_name(NpuReason reason) {
    static const char *const names[] = {
#define X(e, n) n,
        NPU_REASONS(X)
#undef X
    };
    return (size_t)reason < NPU_REASON_COUNT ? names[reason] : "unknown";
}

/* --- failures ------------------------------------------------------------------------------------------------------
 */

NpuReason ze_reason(ZeResult result) {
    switch (result) {
    case ZE_DEVICE_LOST:
    case ZE_DEVICE_REQUIRES_RESET:
    case ZE_SURVIVABILITY_MODE_DETECTED: return NPU_DEVICE_LOST;
    case ZE_OUT_OF_HOST_MEMORY:
    case ZE_OUT_OF_DEVICE_MEMORY: return NPU_NO_MEMORY;
    case ZE_UNSUPPORTED_VERSION:
    case ZE_INVALID_NATIVE_BINARY: return NPU_VERSION_MISMATCH;
    case ZE_INSUFFICIENT_PERMISSIONS: return NPU_NO_PERMISSION;
    default: return NPU_FAILED;
    }
}

const char *ze_advice(ZeResult result) {
    switch (result) {
    case ZE_DEVICE_LOST:
    case ZE_DEVICE_REQUIRES_RESET: return ". The NPU was reset and what it held is gone; `dmesg | grep vpu` says why";
    case ZE_SURVIVABILITY_MODE_DETECTED: return ". The NPU's firmware did not start; update the package intel-fw-npu";
    case ZE_OUT_OF_HOST_MEMORY: return ". The host has no memory left for it";
    case ZE_OUT_OF_DEVICE_MEMORY:
        return ". The NPU has no memory left for it; close other programs that use it, or take precision=\"w8a16\"";
    case ZE_UNSUPPORTED_VERSION:
    case ZE_INVALID_NATIVE_BINARY:
        return ". Driver, compiler and firmware do not fit together; install intel-level-zero-npu, "
               "intel-driver-compiler-npu and intel-fw-npu of one release";
    case ZE_INSUFFICIENT_PERMISSIONS:
        return ". Add the user to the `render` group: `sudo usermod -aG render $USER`, then log in again";
    default: return "";
    }
}

Code ze_fail(Context *ctx, NpuDevice *device, ZeResult result, const char *format, ...) {
    char doing[320];
    va_list args;
    va_start(args, format);
    vsnprintf(doing, sizeof doing, format, args);
    va_end(args);
    NpuReason reason = ze_reason(result);
    if (device && reason == NPU_DEVICE_LOST) atomic_store(&device->lost, true);
    return fail_device(ctx, reason, "NPU: %s failed: %s (0x%x)%s", doing, ze_result_name(result), result,
                       ze_advice(result));
}

bool npu_device_mine(const NpuDevice *device) { return getpid() == device->owner; }

Code npu_device_usable(Context *ctx, NpuDevice *device) {
    if (!npu_device_mine(device))
        return fail_device(ctx, NPU_FAILED,
                           "the NPU was opened before this process was forked; compile in the process that runs, or "
                           "start it with the `spawn` method");
    if (atomic_load(&device->lost))
        return fail_device(ctx, NPU_DEVICE_LOST, "the NPU was lost by an earlier call and must be opened again");
    return CODE_OK;
}

/* --- finding it ----------------------------------------------------------------------------------------------------
 */

static const char *target_name(uint32_t device_id) {
    switch (device_id) {
    case 0x7d1d: /* Meteor Lake */
    case 0xad1d: /* Arrow Lake */ return "npu3720";
    case 0: /* no PCI device behind it */
    case 0x643e: /* Lunar Lake */ return "npu4000";
    default: /* 0xb03e Panther Lake, 0xfd3e Wildcat Lake, and what comes after them */ return "npu5010";
    }
}

enum { DRIVERS_MAX = 16, DEVICES_MAX = 16 };

/* The first device that is an NPU; *found tells whether there is one. */
static Code find_device(Context *ctx, NpuDevice *d, const ZeDriver *drivers, uint32_t n_drivers, bool *found) {
    *found = false;
    for (uint32_t i = 0; i < n_drivers; i++) {
        ZeDevice devices[DEVICES_MAX];
        uint32_t n = DEVICES_MAX;
        ZeResult r = d->ze.zeDeviceGet(drivers[i], &n, devices);
        if (r == ZE_DEVICE_LOST || r == ZE_OUT_OF_HOST_MEMORY) return ze_fail(ctx, NULL, r, "listing its devices");
        if (r != ZE_SUCCESS) continue;
        for (uint32_t k = 0; k < n && k < DEVICES_MAX; k++) {
            ZeDeviceProperties properties = {.type = ZE_TYPE_DEVICE_PROPERTIES};
            r = d->ze.zeDeviceGetProperties(devices[k], &properties);
            if (r != ZE_SUCCESS) return ze_fail(ctx, NULL, r, "reading the device's properties");
            if (properties.kind != ZE_DEVICE_NPU) continue;
            d->driver = drivers[i];
            d->device = devices[k];
            d->facts.device_id = properties.device;
            d->facts.memory = properties.max_allocation;
            snprintf(d->facts.device_name, sizeof d->facts.device_name, "%.*s", ZE_NAME_MAX, properties.name);
            snprintf(d->facts.target, sizeof d->facts.target, "%s", target_name(properties.device));
            *found = true;
            return CODE_OK;
        }
    }
    return CODE_OK;
}

/* --- graph extension -----------------------------------------------------------------------------------------------
 */

/* Current drivers list "ZE_extension_graph" with its version, old ones "ZE_extension_graph_1_4" and so on. */
static void consider_extension(NpuDevice *d, const ZeExtension *e, char name[ZE_NAME_MAX]) {
    size_t stem = strlen(ZE_GRAPH_EXTENSION);
    uint32_t version = 0;
    unsigned major, minor;
    int end = 0;
    if (!strncmp(e->name, ZE_SYSTEM_MEMORY_EXTENSION, sizeof e->name)) d->imports = true;
    if (strncmp(e->name, ZE_GRAPH_EXTENSION, stem) || !memchr(e->name, 0, sizeof e->name)) return;
    if (!e->name[stem])
        version = e->version;
    else if (sscanf(e->name + stem, "_%4u_%4u%n", &major, &minor, &end) == 2 && !e->name[stem + (size_t)end])
        version = ZE_VERSION(major, minor);
    if (version <= d->facts.extension) return;
    d->facts.extension = version;
    memcpy(name, e->name, sizeof e->name);
}

/* The newest version whose functions are all there: a driver may claim more than it has. */
static uint32_t usable_minor(const ZeGraphTable *t, uint32_t minor) {
    if (minor >= 12 && !(t->create3 && t->log2 && t->log_destroy)) minor = 11;
    if (minor >= 11 && !t->option_supported) minor = 10;
    if (minor >= 8 && !(t->properties2 && t->initialize)) minor = 7;
    if (minor >= 7 && !t->native_binary2) minor = 6;
    if (minor >= 5 && !t->create2) minor = 4;
    if (minor >= 4 && !(t->create && t->destroy && t->properties && t->set_argument && t->append_initialize &&
                        t->append_execute && t->native_binary && t->device_properties && t->argument3 && t->log))
        minor = 3;
    return minor;
}

static Code find_extension(Context *ctx, NpuDevice *d) {
    uint32_t n = 0;
    ZeResult r = d->ze.zeDriverGetExtensionProperties(d->driver, &n, NULL);
    if (r != ZE_SUCCESS) return ze_fail(ctx, NULL, r, "counting the driver's extensions");
    if (n > 4096) n = 4096;
    ZeExtension *list = calloc(n + 1, sizeof *list);
    if (!list) return fail(ctx, CODE_NO_MEMORY, "out of memory for a driver's extensions");
    char name[ZE_NAME_MAX] = "";
    if (n) r = d->ze.zeDriverGetExtensionProperties(d->driver, &n, list);
    for (uint32_t i = 0; i < n && r == ZE_SUCCESS; i++) consider_extension(d, &list[i], name);
    free(list);
    if (r != ZE_SUCCESS) return ze_fail(ctx, NULL, r, "listing the driver's extensions");

    const char *update = "update the packages intel-level-zero-npu, intel-driver-compiler-npu and intel-fw-npu";
    uint32_t major = d->facts.extension >> 16, minor = d->facts.extension & 0xffff;
    if (!name[0])
        return fail_device(ctx, NPU_OLD_EXTENSION, "the NPU driver %s has no graph extension; %s",
                           d->facts.driver_version, update);
    if (major > 1)
        return fail_device(
            ctx, NPU_VERSION_MISMATCH,
            "the NPU driver %s has graph extension %u.%u, which is newer than this Forge-UGC knows (1.x); "
            "update Forge-UGC",
            d->facts.driver_version, major, minor);
    if (major < 1 || minor < 4)
        return fail_device(ctx, NPU_OLD_EXTENSION,
                           "the NPU driver %s has graph extension %u.%u, and 1.4 or newer is needed; %s",
                           d->facts.driver_version, major, minor, update);
    void *table = NULL;
    r = d->ze.zeDriverGetExtensionFunctionAddress(d->driver, name, &table);
    if (r != ZE_SUCCESS) return ze_fail(ctx, NULL, r, "asking for the functions of %s", name);
    d->graphs = table;
    d->minor = table ? usable_minor(table, minor) : 0;
    if (d->minor < 4)
        return fail_device(ctx, NPU_OLD_EXTENSION,
                           "the NPU driver %s claims graph extension %u.%u without its functions; %s",
                           d->facts.driver_version, major, minor, update);
    return CODE_OK;
}

static Code read_compiler(Context *ctx, NpuDevice *d) {
    ZeDeviceGraphProperties properties = {.type = ZE_TYPE_DEVICE_GRAPH_PROPERTIES};
    ZeResult r = d->graphs->device_properties(d->device, &properties);
    if (r != ZE_SUCCESS) return ze_fail(ctx, NULL, r, "reading the graph compiler's version");
    d->facts.compiler = ZE_VERSION(properties.compiler_major, properties.compiler_minor);
    d->facts.opset = properties.opset;
    if (!d->facts.compiler)
        return fail_device(ctx, NPU_NO_COMPILER,
                           "the NPU driver %s has no graph compiler (version 0.0). Install the package "
                           "intel-driver-compiler-npu of the same release as intel-level-zero-npu "
                           "(https://github.com/intel/linux-npu-driver/releases)",
                           d->facts.driver_version);
    return CODE_OK;
}

static Code fill_device(Context *ctx, NpuDevice *d, const char *loader) {
    npu_node_find(&d->facts);
    TRY(ze_loader_open(ctx, loader, &d->ze, d->facts.loader, sizeof d->facts.loader));
    ZeDriver drivers[DRIVERS_MAX];
    uint32_t n_drivers;
    ZeResult r = ze_loader_drivers(&d->ze, drivers, DRIVERS_MAX, &n_drivers);
    ze_loader_version(&d->ze, d->facts.loader_version, sizeof d->facts.loader_version);
    d->facts.n_drivers = n_drivers;
    if (r != ZE_SUCCESS || !n_drivers) return npu_node_fail(ctx, &d->facts, r != ZE_SUCCESS ? r : ZE_UNINITIALIZED);
    bool found;
    TRY(find_device(ctx, d, drivers, n_drivers, &found));
    if (!found) {
        if (d->facts.node[0] && !d->facts.node_readable) return npu_node_fail(ctx, &d->facts, ZE_UNINITIALIZED);
        return fail_device(ctx, NPU_NO_DEVICE,
                           "Level Zero has %u driver%s, but none with an NPU%s: is intel-level-zero-npu installed?",
                           n_drivers, n_drivers == 1 ? "" : "s", d->facts.node[0] ? "" : " (nor is there /dev/accel)");
    }
    ZeDriverProperties driver = {.type = ZE_TYPE_DRIVER_PROPERTIES};
    r = d->ze.zeDriverGetProperties(d->driver, &driver);
    if (r != ZE_SUCCESS) return ze_fail(ctx, NULL, r, "reading the driver's properties");
    snprintf(d->facts.driver_version, sizeof d->facts.driver_version, "%u", driver.version);
    TRY(find_extension(ctx, d));
    TRY(read_compiler(ctx, d));
    ZeDesc desc = {.type = ZE_TYPE_CONTEXT};
    r = d->ze.zeContextCreate(d->driver, &desc, &d->context);
    if (r != ZE_SUCCESS) {
        d->context = NULL;
        return ze_fail(ctx, NULL, r, "creating a context");
    }
    return CODE_OK;
}

/* FORGE_NPU_TIMEOUT_S: how long one submission may take; 60 where it is not a positive number. */
static uint64_t timeout_ns(void) {
    const char *text = getenv("FORGE_NPU_TIMEOUT_S");
    double seconds = text ? strtod(text, NULL) : 0;
    if (!(seconds > 0)) seconds = 60;
    return seconds < 1e9 ? (uint64_t)(seconds * 1e9) : UINT64_MAX / 4;
}

Code npu_device_open(Context *ctx, const char *loader, NpuFacts *facts, NpuDevice **out) {
    *out = NULL;
    if (facts) memset(facts, 0, sizeof *facts);
    NpuDevice *d = calloc(1, sizeof *d);
    if (!d) return fail(ctx, CODE_NO_MEMORY, "out of memory for a device");
    d->owner = getpid();
    d->timeout_ns = timeout_ns();
    atomic_init(&d->refs, 1);
    pthread_mutex_init(&d->lock, NULL);
    Code code = fill_device(ctx, d, loader);
    if (facts) *facts = d->facts;
    if (code == CODE_OK)
        *out = d;
    else
        npu_device_unref(d);
    return code;
}

NpuDevice *npu_device_ref(NpuDevice *device) {
    atomic_fetch_add(&device->refs, 1);
    return device;
}

void npu_device_unref(NpuDevice *d) {
    if (!d || atomic_fetch_sub(&d->refs, 1) != 1) return;
    if (npu_device_mine(d)) {
        for (uint32_t i = 0; i < d->n_queues; i++) d->ze.zeCommandQueueDestroy(d->queues[i].queue);
        if (d->context) d->ze.zeContextDestroy(d->context);
    }
    /* The loader stays open: drivers have threads and exit handlers, and opening it again is cheap. */
    pthread_mutex_destroy(&d->lock);
    free(d->checked_config);
    free(d);
}

const NpuFacts *npu_device_facts(const NpuDevice *device) { return &device->facts; }

/* --- queues --------------------------------------------------------------------------------------------------------
 */

Code npu_queue_take(Context *ctx, NpuDevice *d, uint32_t *index, ZeQueue *out) {
    pthread_mutex_lock(&d->lock);
    uint32_t best = 0;
    for (uint32_t i = 1; i < d->n_queues; i++)
        if (d->queues[i].lists < d->queues[best].lists) best = i;
    ZeResult r = ZE_SUCCESS;
    if (d->n_queues < QUEUES_MAX && (!d->n_queues || d->queues[best].lists)) {
        ZeQueueDesc desc = {.type = ZE_TYPE_QUEUE};
        ZeQueue fresh = NULL;
        r = d->ze.zeCommandQueueCreate(d->context, d->device, &desc, &fresh);
        if (r == ZE_SUCCESS) {
            best = d->n_queues++;
            d->queues[best].queue = fresh;
            d->queues[best].lists = 0;
        } else if (d->n_queues && ze_reason(r) != NPU_DEVICE_LOST) {
            r = ZE_SUCCESS; /* one more is a matter of speed */
        }
    }
    if (r == ZE_SUCCESS) {
        d->queues[best].lists++;
        *index = best;
        *out = d->queues[best].queue;
    }
    pthread_mutex_unlock(&d->lock);
    return r == ZE_SUCCESS ? CODE_OK : ze_fail(ctx, d, r, "creating a command queue");
}

void npu_queue_give(NpuDevice *d, uint32_t index) {
    pthread_mutex_lock(&d->lock);
    d->queues[index].lists--;
    pthread_mutex_unlock(&d->lock);
}
