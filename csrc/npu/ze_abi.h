/* The part of the binary interface of Level Zero, and of the NPU's graph extension (versions 1.4 to 1.16), that is used
 * here. Nothing of either is linked or included: the loader is opened at run time, and a driver hands out the table of
 * graph functions. Each structure's size and each offset is asserted, since both are fixed by drivers that exist. */
#ifndef FORGE_NPU_ZE_ABI_H
#define FORGE_NPU_ZE_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

_Static_assert(sizeof(void *) == 8 && sizeof(size_t) == 8, "Level Zero drivers of the NPU are 64-bit");
#define ZE_LAYOUT(type, size) _Static_assert(sizeof(type) == (size), "size of " #type)
#define ZE_AT(type, member, offset) _Static_assert(offsetof(type, member) == (offset), #type "." #member)

/* --- results -------------------------------------------------------------------------------------------------------
 */
typedef uint32_t ZeResult;
#define ZE_RESULTS(X)                                                                                                  \
    X(SUCCESS, 0)                                                                                                      \
    X(NOT_READY, 1)                                                                                                    \
    X(DEVICE_LOST, 0x70000001)                                                                                         \
    X(OUT_OF_HOST_MEMORY, 0x70000002)                                                                                  \
    X(OUT_OF_DEVICE_MEMORY, 0x70000003)                                                                                \
    X(MODULE_BUILD_FAILURE, 0x70000004)                                                                                \
    X(MODULE_LINK_FAILURE, 0x70000005)                                                                                 \
    X(DEVICE_REQUIRES_RESET, 0x70000006)                                                                               \
    X(DEVICE_IN_LOW_POWER_STATE, 0x70000007)                                                                           \
    X(INSUFFICIENT_PERMISSIONS, 0x70010000)                                                                            \
    X(NOT_AVAILABLE, 0x70010001)                                                                                       \
    X(DEPENDENCY_UNAVAILABLE, 0x70020000)                                                                              \
    X(UNINITIALIZED, 0x78000001)                                                                                       \
    X(UNSUPPORTED_VERSION, 0x78000002)                                                                                 \
    X(UNSUPPORTED_FEATURE, 0x78000003)                                                                                 \
    X(INVALID_ARGUMENT, 0x78000004)                                                                                    \
    X(INVALID_NULL_HANDLE, 0x78000005)                                                                                 \
    X(HANDLE_OBJECT_IN_USE, 0x78000006)                                                                                \
    X(INVALID_NULL_POINTER, 0x78000007)                                                                                \
    X(INVALID_SIZE, 0x78000008)                                                                                        \
    X(UNSUPPORTED_SIZE, 0x78000009)                                                                                    \
    X(UNSUPPORTED_ALIGNMENT, 0x7800000a)                                                                               \
    X(INVALID_SYNCHRONIZATION_OBJECT, 0x7800000b)                                                                      \
    X(INVALID_ENUMERATION, 0x7800000c)                                                                                 \
    X(UNSUPPORTED_ENUMERATION, 0x7800000d)                                                                             \
    X(INVALID_NATIVE_BINARY, 0x7800000f)                                                                               \
    X(SURVIVABILITY_MODE_DETECTED, 0x78000020)                                                                         \
    X(UNKNOWN, 0x7ffffffe)
enum {
#define X(name, value) ZE_##name = (int)(value),
    ZE_RESULTS(X)
#undef X
};

/* --- core ----------------------------------------------------------------------------------------------------------
 */
typedef struct ZeDriver_ *ZeDriver;
typedef struct ZeDevice_ *ZeDevice;
typedef struct ZeContext_ *ZeContext;
typedef struct ZeQueue_ *ZeQueue;
typedef struct ZeList_ *ZeList;
typedef struct ZeFence_ *ZeFence;
typedef struct ZeEvent_ *ZeEvent;

enum { /* the first member of core structures */
       ZE_TYPE_DRIVER_PROPERTIES = 0x1,
       ZE_TYPE_DEVICE_PROPERTIES = 0x3,
       ZE_TYPE_CONTEXT = 0xd,
       ZE_TYPE_QUEUE = 0xe,
       ZE_TYPE_LIST = 0xf,
       ZE_TYPE_FENCE = 0x12,
       ZE_TYPE_HOST_MEMORY = 0x16,
       ZE_TYPE_INIT_DRIVERS = 0x20021,
       ZE_TYPE_SYSTEM_MEMORY = 0x20037,
};
enum { ZE_INIT_NPU_ONLY = 1 << 1, ZE_INIT_DRIVERS_NPU = 1 << 1 };
enum { ZE_DEVICE_NPU = 5 };
enum { ZE_HOST_MEMORY_WRITE_COMBINED = 1 << 2 }; /* the NPU driver: an import that the device only reads */
enum { ZE_NAME_MAX = 256 };
#define ZE_SYSTEM_MEMORY_EXTENSION "ZE_extension_external_memmap_sysmem"

/* Descriptors without options of interest: contexts, fences, host memory, zeInitDrivers. */
typedef struct ZeDesc {
    int32_t type;
    const void *next;
    uint32_t flags;
} ZeDesc;
ZE_LAYOUT(ZeDesc, 24);
ZE_AT(ZeDesc, next, 8);
ZE_AT(ZeDesc, flags, 16);

typedef struct ZeDriverProperties {
    int32_t type;
    void *next;
    uint8_t uuid[16];
    uint32_t version;
} ZeDriverProperties;
ZE_LAYOUT(ZeDriverProperties, 40);
ZE_AT(ZeDriverProperties, uuid, 16);
ZE_AT(ZeDriverProperties, version, 32);

typedef struct ZeExtension {
    char name[ZE_NAME_MAX];
    uint32_t version;
} ZeExtension;
ZE_LAYOUT(ZeExtension, 260);
ZE_AT(ZeExtension, version, 256);

typedef struct ZeDeviceProperties {
    int32_t type;
    void *next;
    int32_t kind; /* ZE_DEVICE_NPU */
    uint32_t vendor, device, flags, subdevice, clock;
    uint64_t max_allocation;
    uint32_t contexts, priorities, geometry[5];
    uint64_t timer;
    uint32_t timestamp_bits, kernel_timestamp_bits;
    uint8_t uuid[16];
    char name[ZE_NAME_MAX];
} ZeDeviceProperties;
ZE_LAYOUT(ZeDeviceProperties, 368);
ZE_AT(ZeDeviceProperties, kind, 16);
ZE_AT(ZeDeviceProperties, device, 24);
ZE_AT(ZeDeviceProperties, max_allocation, 40);
ZE_AT(ZeDeviceProperties, timer, 80);
ZE_AT(ZeDeviceProperties, uuid, 96);
ZE_AT(ZeDeviceProperties, name, 112);

typedef struct ZeQueueDesc {
    int32_t type;
    const void *next;
    uint32_t ordinal, index, flags;
    int32_t mode, priority;
} ZeQueueDesc;
ZE_LAYOUT(ZeQueueDesc, 40);
ZE_AT(ZeQueueDesc, ordinal, 16);
ZE_AT(ZeQueueDesc, mode, 28);
ZE_AT(ZeQueueDesc, priority, 32);

typedef struct ZeListDesc {
    int32_t type;
    const void *next;
    uint32_t ordinal, flags;
} ZeListDesc;
ZE_LAYOUT(ZeListDesc, 24);
ZE_AT(ZeListDesc, ordinal, 16);
ZE_AT(ZeListDesc, flags, 20);

typedef struct ZeSystemMemory { /* after ZeDesc of host memory: import what the process has */
    int32_t type;
    const void *next;
    void *memory;
    uint64_t bytes;
} ZeSystemMemory;
ZE_LAYOUT(ZeSystemMemory, 32);
ZE_AT(ZeSystemMemory, memory, 16);
ZE_AT(ZeSystemMemory, bytes, 24);

typedef struct ZelVersion {
    char component[64];
    int32_t spec, major, minor, patch;
} ZelVersion;
ZE_LAYOUT(ZelVersion, 80);
ZE_AT(ZelVersion, spec, 64);
ZE_AT(ZelVersion, major, 68);

/* --- graph extension -----------------------------------------------------------------------------------------------
 */
#define ZE_GRAPH_EXTENSION "ZE_extension_graph"
#define ZE_VERSION(major, minor) ((uint32_t)(major) << 16 | (uint32_t)(minor))

typedef struct ZeGraph_ *ZeGraph;
typedef struct ZeBuildLog_ *ZeBuildLog;

enum { /* the first member of the extension's structures */
       ZE_TYPE_DEVICE_GRAPH_PROPERTIES = 0x1,
       ZE_TYPE_GRAPH_DESC = 0x2,
       ZE_TYPE_GRAPH_PROPERTIES = 0x3,
       ZE_TYPE_GRAPH_DESC_2 = 0xe,
       ZE_TYPE_GRAPH_ARGUMENT_3 = 0xd,
       ZE_TYPE_GRAPH_PROPERTIES_2 = 0x10,
};
enum { ZE_GRAPH_NATIVE = 1, ZE_GRAPH_IR = 2 };
enum { ZE_GRAPH_NO_DRIVER_CACHE = 1 << 0 };
enum { ZE_GRAPH_INIT_BY_LIST = 1, ZE_GRAPH_INIT_DIRECT = 2 };
enum { ZE_OPTIONS_COMPILER = 1 };
enum { ZE_ARGUMENT_INPUT = 0, ZE_ARGUMENT_OUTPUT = 1 };
enum { ZE_ARGUMENT_DIMS = 5, ZE_ARGUMENT_NAMES = 32 };
enum { /* element types of arguments */
       ZE_ELEMENT_FP32 = 0x1,
       ZE_ELEMENT_FP16 = 0x2,
       ZE_ELEMENT_UINT8 = 0x4,
       ZE_ELEMENT_INT32 = 0x5,
       ZE_ELEMENT_INT16 = 0x6,
       ZE_ELEMENT_INT8 = 0x7,
       ZE_ELEMENT_BF16 = 0x9,
       ZE_ELEMENT_UINT4 = 0xb,
       ZE_ELEMENT_INT4 = 0xc,
       ZE_ELEMENT_BOOL = 0xe,
       ZE_ELEMENT_FP64 = 0xf,
       ZE_ELEMENT_INT64 = 0x11,
};

typedef struct ZeDeviceGraphProperties {
    int32_t type;
    void *next;
    uint32_t extension; /* ZE_VERSION */
    uint16_t compiler_major, compiler_minor;
    int32_t formats;
    uint32_t opset;
} ZeDeviceGraphProperties;
ZE_LAYOUT(ZeDeviceGraphProperties, 32);
ZE_AT(ZeDeviceGraphProperties, extension, 16);
ZE_AT(ZeDeviceGraphProperties, compiler_major, 20);
ZE_AT(ZeDeviceGraphProperties, compiler_minor, 22);
ZE_AT(ZeDeviceGraphProperties, opset, 28);

/* pfnCreate reads all but the last member. */
typedef struct ZeGraphDesc {
    int32_t type;
    void *next;
    int32_t format;
    size_t bytes;
    const uint8_t *data;
    const char *build_flags;
    uint32_t flags;
} ZeGraphDesc;
ZE_LAYOUT(ZeGraphDesc, 56);
ZE_AT(ZeGraphDesc, format, 16);
ZE_AT(ZeGraphDesc, bytes, 24);
ZE_AT(ZeGraphDesc, data, 32);
ZE_AT(ZeGraphDesc, build_flags, 40);
ZE_AT(ZeGraphDesc, flags, 48);

/* pfnGetProperties writes all but `stages`. */
typedef struct ZeGraphProperties {
    int32_t type;
    void *next;
    uint32_t arguments;
    uint32_t stages; /* ZE_GRAPH_INIT_... that are left to do */
} ZeGraphProperties;
ZE_LAYOUT(ZeGraphProperties, 24);
ZE_AT(ZeGraphProperties, arguments, 16);
ZE_AT(ZeGraphProperties, stages, 20);

/* What pfnGetArgumentProperties3 writes; the structures of the two older functions are its beginnings. */
typedef struct ZeGraphArgument {
    int32_t type;
    void *next;
    char name[ZE_NAME_MAX];
    int32_t direction;
    uint32_t dims[ZE_ARGUMENT_DIMS];
    int32_t network_element, network_layout, device_element, device_layout;
    float reverse_scale;
    uint8_t zero_point;
    uint32_t rank;
    char friendly_name[ZE_NAME_MAX];
    char tensor_names[ZE_ARGUMENT_NAMES][ZE_NAME_MAX];
    uint32_t n_tensor_names;
} ZeGraphArgument;
ZE_LAYOUT(ZeGraphArgument, 8776);
ZE_AT(ZeGraphArgument, name, 16);
ZE_AT(ZeGraphArgument, direction, 272);
ZE_AT(ZeGraphArgument, dims, 276);
ZE_AT(ZeGraphArgument, network_element, 296);
ZE_AT(ZeGraphArgument, device_element, 304);
ZE_AT(ZeGraphArgument, reverse_scale, 312);
ZE_AT(ZeGraphArgument, zero_point, 316);
ZE_AT(ZeGraphArgument, rank, 320);
ZE_AT(ZeGraphArgument, friendly_name, 324);
ZE_AT(ZeGraphArgument, tensor_names, 580);
ZE_AT(ZeGraphArgument, n_tensor_names, 8772);

typedef void (*ZeUnused)(void);

/* The driver's table. A driver of version 1.N has the members up to that comment, and nothing after them. */
typedef struct ZeGraphTable {
    /* 1.0 */
    ZeResult (*create)(ZeContext, ZeDevice, const ZeGraphDesc *, ZeGraph *);
    ZeResult (*destroy)(ZeGraph);
    ZeResult (*properties)(ZeGraph, ZeGraphProperties *);
    ZeUnused argument;
    ZeResult (*set_argument)(ZeGraph, uint32_t index, const void *value);
    ZeResult (*append_initialize)(ZeList, ZeGraph, ZeEvent, uint32_t n_wait, ZeEvent *wait);
    ZeResult (*append_execute)(ZeList, ZeGraph, void *profiling, ZeEvent, uint32_t n_wait, ZeEvent *wait);
    ZeResult (*native_binary)(ZeGraph, size_t *bytes, uint8_t *out);
    ZeResult (*device_properties)(ZeDevice, ZeDeviceGraphProperties *);
    /* 1.1 */
    ZeUnused metadata;
    ZeUnused argument2;
    /* 1.2 */
    ZeResult (*argument3)(ZeGraph, uint32_t index, ZeGraphArgument *);
    /* 1.3 */
    ZeUnused query_create, query_destroy, query_layers;
    /* 1.4 */
    ZeResult (*log)(ZeGraph, uint32_t *bytes, char *out); /* of this thread's last failure */
    /* 1.5 */
    ZeResult (*create2)(ZeContext, ZeDevice, const ZeGraphDesc *, ZeGraph *);
    ZeUnused query_create2, query_memory;
    /* 1.6 */
    ZeUnused device_properties2;
    /* 1.7 */
    ZeResult (*native_binary2)(ZeGraph, size_t *bytes, const uint8_t **view);
    /* 1.8 */
    ZeResult (*properties2)(ZeGraph, ZeGraphProperties *);
    ZeResult (*initialize)(ZeGraph);
    /* 1.11 */
    ZeUnused options;
    ZeResult (*option_supported)(ZeDevice, int32_t kind, const char *option, const char *value);
    /* 1.12 */
    ZeResult (*create3)(ZeContext, ZeDevice, const ZeGraphDesc *, ZeGraph *, ZeBuildLog *);
    ZeUnused properties3;
    ZeResult (*log2)(ZeBuildLog, uint32_t *bytes, char *out);
    ZeResult (*log_destroy)(ZeBuildLog);
    /* 1.15 */
    ZeUnused set_argument2;
    /* 1.16 */
    ZeUnused evict;
} ZeGraphTable;
ZE_LAYOUT(ZeGraphTable, 31 * 8);
ZE_AT(ZeGraphTable, device_properties, 8 * 8);
ZE_AT(ZeGraphTable, argument3, 11 * 8);
ZE_AT(ZeGraphTable, log, 15 * 8);
ZE_AT(ZeGraphTable, create2, 16 * 8);
ZE_AT(ZeGraphTable, native_binary2, 20 * 8);
ZE_AT(ZeGraphTable, properties2, 21 * 8);
ZE_AT(ZeGraphTable, initialize, 22 * 8);
ZE_AT(ZeGraphTable, option_supported, 24 * 8);
ZE_AT(ZeGraphTable, create3, 25 * 8);
ZE_AT(ZeGraphTable, log2, 27 * 8);
ZE_AT(ZeGraphTable, log_destroy, 28 * 8);
ZE_AT(ZeGraphTable, set_argument2, 29 * 8);
ZE_AT(ZeGraphTable, evict, 30 * 8);

#endif
