/* The driver, its one device, and what they report about themselves. */
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct Driver {
    long unused; /* aligned as handles are */
};
struct Device {
    long unused; /* aligned as handles are */
};
static Driver driver; /* addresses serve as handles */
static Device device;
Driver *the_driver(void) { return &driver; }
Device *the_device(void) { return &device; }

static bool is_driver(const Driver *handle) {
    if (handle && handle != &driver) misuse("not the driver's handle");
    return handle == &driver;
}
static bool is_device(const Device *handle) {
    if (handle && handle != &device) misuse("not the device's handle");
    return handle == &device;
}
#define CHECK_DRIVER(handle)                                                                                           \
    do {                                                                                                               \
        if (!is_driver(handle)) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;                                            \
    } while (0)
#define CHECK_DEVICE(handle)                                                                                           \
    do {                                                                                                               \
        if (!is_device(handle)) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;                                            \
    } while (0)

uint64_t machine_memory(void) { return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE); }

/* --- wrapped handles --------------------------------------------------------------------------------------------- */

static ze_result_t (*translate)(int type, void *handle, void **own);

void remember_loader(const void *address_in_loader) {
    Dl_info info;
    if (translate || !dladdr(address_in_loader, &info) || !info.dli_fname) return;
    void *loader = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    void *found = loader ? dlsym(loader, "zelLoaderTranslateHandle") : NULL;
    if (found) memcpy(&translate, &found, sizeof found);
    if (loader) dlclose(loader);
}

void *unwrapped(int zel_type, void *handle) {
    void *own = handle;
    return handle && translate && translate(zel_type, handle, &own) == OK ? own : handle;
}

/* --- driver ------------------------------------------------------------------------------------------------------ */

ze_result_t driver_init(uint32_t flags) {
    ENTER(zeInit);
    return flags && !(flags & ZE_INIT_FLAG_VPU_ONLY) ? ZE_RESULT_ERROR_UNINITIALIZED : OK;
}

static ze_result_t get_one(uint32_t *count, void **out, void *one) {
    CHECK_POINTER(count);
    if (*count && out) *out = one;
    *count = 1;
    return OK;
}

ze_result_t driver_init_drivers(uint32_t *count, Driver **drivers, const ze_init_driver_type_desc_t *desc) {
    ENTER(zeInitDrivers);
    CHECK_POINTER(desc);
    if (!(desc->flags & ZE_INIT_DRIVER_TYPE_FLAG_NPU)) return ZE_RESULT_ERROR_UNINITIALIZED;
    return get_one(count, (void **)drivers, &driver);
}

ze_result_t driver_get(uint32_t *count, Driver **drivers) {
    ENTER(zeDriverGet);
    return get_one(count, (void **)drivers, &driver);
}

ze_result_t driver_api_version(Driver *handle, uint32_t *version) {
    ENTER(zeDriverGetApiVersion);
    CHECK_DRIVER(handle);
    CHECK_POINTER(version);
    *version = ZE_MAKE_VERSION(1, 13);
    return OK;
}

ze_result_t driver_properties(Driver *handle, ze_driver_properties_t *properties) {
    ENTER(zeDriverGetProperties);
    CHECK_DRIVER(handle);
    CHECK_POINTER(properties);
    static const ze_uuid_t uuid = {{0x01, 0x7d, 0xe9, 0x31, 0x6b, 0x4d, 0x4f, 0xd4, 0xaa, 0x9b, 0x5b, 0xed, 0x77, 0xfc,
                                    0x8e, 0x89}}; /* of Intel's NPU driver: clients know it by that */
    properties->uuid = uuid;
    properties->driverVersion = settings().driver;
    return OK;
}

ze_result_t driver_ipc_properties(Driver *handle, ze_driver_ipc_properties_t *properties) {
    ENTER(zeDriverGetIpcProperties);
    CHECK_DRIVER(handle);
    CHECK_POINTER(properties);
    properties->flags = 0;
    return OK;
}

static void extension_add(ze_driver_extension_properties_t *list, uint32_t *n, const char *name, uint32_t version) {
    memset(&list[*n], 0, sizeof list[*n]);
    snprintf(list[*n].name, sizeof list[*n].name, "%s", name);
    list[(*n)++].version = version;
}

/* As the Linux driver: a name for each of the versions 1.2 to 1.8, and since 1.6 one without a version. */
ze_result_t driver_extensions(Driver *handle, uint32_t *count, ze_driver_extension_properties_t *properties) {
    ENTER(zeDriverGetExtensionProperties);
    CHECK_DRIVER(handle);
    CHECK_POINTER(count);
    ze_driver_extension_properties_t list[12];
    uint32_t n = 0;
    Settings s = settings();
    if (s.extension >= ZE_MAKE_VERSION(1, 6)) extension_add(list, &n, ZE_GRAPH_EXT_NAME, s.extension);
    for (uint32_t minor = 2; minor <= 8 && ZE_MAKE_VERSION(1, minor) <= s.extension; minor++) {
        char name[64];
        snprintf(name, sizeof name, ZE_GRAPH_EXT_NAME "_1_%u", minor);
        extension_add(list, &n, name, ZE_MAKE_VERSION(1, minor));
    }
    if (s.import) extension_add(list, &n, ZE_EXTERNAL_MEMORY_MAPPING_EXT_NAME, ZE_MAKE_VERSION(1, 0));
    if (*count == 0) {
        *count = n;
        return OK;
    }
    CHECK_POINTER(properties);
    if (*count > n) *count = n;
    memcpy(properties, list, *count * sizeof *list);
    return OK;
}

ze_result_t driver_extension_function(Driver *handle, const char *name, void **function) {
    ENTER(zeDriverGetExtensionFunctionAddress);
    CHECK_DRIVER(handle);
    CHECK_POINTER(name);
    CHECK_POINTER(function);
    uint32_t version = settings().extension;
    bool known = version >= ZE_MAKE_VERSION(1, 6) && !strcmp(name, ZE_GRAPH_EXT_NAME);
    for (uint32_t minor = 2; minor <= 8 && ZE_MAKE_VERSION(1, minor) <= version; minor++) {
        char versioned[64];
        snprintf(versioned, sizeof versioned, ZE_GRAPH_EXT_NAME "_1_%u", minor);
        known |= !strcmp(name, versioned);
    }
    if (!known) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    *function = (void *)graph_table();
    return *function ? OK : ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
}

/* --- device ------------------------------------------------------------------------------------------------------ */

ze_result_t device_get(Driver *handle, uint32_t *count, Device **devices) {
    ENTER(zeDeviceGet);
    CHECK_DRIVER(handle);
    return get_one(count, (void **)devices, &device);
}

ze_result_t device_properties(Device *handle, ze_device_properties_t *p) {
    ENTER(zeDeviceGetProperties);
    CHECK_DEVICE(handle);
    CHECK_POINTER(p);
    if (p->pNext) return ZE_RESULT_ERROR_INVALID_ARGUMENT; /* no further properties */
    Settings s = settings();
    *p = (ze_device_properties_t){
        .stype = p->stype,
        .type = ZE_DEVICE_TYPE_VPU,
        .vendorId = 0x8086,
        .deviceId = s.device_id,
        .flags = ZE_DEVICE_PROPERTY_FLAG_INTEGRATED,
        .maxMemAllocSize = s.memory ? s.memory : machine_memory(),
        .maxHardwareContexts = 64,
        .numThreadsPerEU = 1,
        .numEUsPerSubslice = 1,
        .numSubslicesPerSlice = 1,
        .numSlices = 1,
        .timerResolution = 1, /* nanoseconds */
        .timestampValidBits = 64,
        .uuid = {{0x80, 0xd1, 0xd1, 0x1e, 0xb7, 0x38, 0x11, 0xea, 0xb3, 0xde, 0x02, 0x42, 0xac, 0x13, 0x00, 0x04}},
    };
    snprintf(p->name, sizeof p->name, "Software NPU (%s)", s.target);
    return OK;
}

ze_result_t device_queue_groups(Device *handle, uint32_t *count, ze_command_queue_group_properties_t *properties) {
    ENTER(zeDeviceGetCommandQueueGroupProperties);
    CHECK_DEVICE(handle);
    CHECK_POINTER(count);
    if (*count && properties) {
        properties->flags = ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE | ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY;
        properties->maxMemoryFillPatternSize = 4;
        properties->numQueues = 1;
    }
    *count = 1;
    return OK;
}

ze_result_t device_memory(Device *handle, uint32_t *count, ze_device_memory_properties_t *properties) {
    ENTER(zeDeviceGetMemoryProperties);
    CHECK_DEVICE(handle);
    CHECK_POINTER(count);
    if (*count && properties) {
        properties->flags = properties->maxClockRate = properties->maxBusWidth = 0;
        properties->totalSize = 0; /* the Linux driver says so too */
        snprintf(properties->name, sizeof properties->name, "DDR");
    }
    *count = 1;
    return OK;
}

ze_result_t device_external_memory(Device *handle, ze_device_external_memory_properties_t *properties) {
    ENTER(zeDeviceGetExternalMemoryProperties);
    CHECK_DEVICE(handle);
    CHECK_POINTER(properties);
    properties->memoryAllocationImportTypes = settings().import ? ZE_EXTERNAL_MEMORY_TYPE_FLAG_STANDARD_ALLOCATION : 0;
    properties->memoryAllocationExportTypes = properties->imageImportTypes = properties->imageExportTypes = 0;
    return OK;
}

uint64_t losses;

void lose_device(void) {
    pthread_mutex_lock(&device_lock);
    losses++;
    pthread_cond_broadcast(&device_changed);
    pthread_mutex_unlock(&device_lock);
}

bool device_gone(void) {
    pthread_mutex_lock(&device_lock);
    bool gone = losses && !settings().recovers;
    pthread_mutex_unlock(&device_lock);
    return gone;
}

ze_result_t device_status(Device *handle) {
    ENTER(zeDeviceGetStatus);
    CHECK_DEVICE(handle);
    return device_gone() ? ZE_RESULT_ERROR_DEVICE_LOST : OK;
}

ze_result_t device_timestamps(Device *handle, uint64_t *host, uint64_t *own) {
    ENTER(zeDeviceGetGlobalTimestamps);
    CHECK_DEVICE(handle);
    CHECK_POINTER(host);
    CHECK_POINTER(own);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *host = *own = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    return OK;
}
