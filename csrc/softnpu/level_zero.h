/* The part of the Level Zero ABI that the software NPU implements: the core API up to 1.4 (what loader 1.8 passes on),
 * zeInitDrivers, memory import, and the NPU's graph extension 1.0 to 1.16.
 *
 * Declared apart from csrc/npu/ze_abi.h on purpose: the driver and the dispatch code check each other, and an offset
 * that is wrong in one shows. Names are those of the specification; handles are the driver's own objects. */
#ifndef SOFTNPU_LEVEL_ZERO_H
#define SOFTNPU_LEVEL_ZERO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ZE_MAKE_VERSION(major, minor) (((uint32_t)(major) << 16) | ((uint32_t)(minor)&0xffff))

typedef enum ze_result_t {
    ZE_RESULT_SUCCESS = 0,
    ZE_RESULT_NOT_READY = 1,
    ZE_RESULT_ERROR_DEVICE_LOST = 0x70000001,
    ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY = 0x70000002,
    ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY = 0x70000003,
    ZE_RESULT_ERROR_NOT_AVAILABLE = 0x70010001,
    ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE = 0x70020000,
    ZE_RESULT_ERROR_UNINITIALIZED = 0x78000001,
    ZE_RESULT_ERROR_UNSUPPORTED_VERSION = 0x78000002,
    ZE_RESULT_ERROR_UNSUPPORTED_FEATURE = 0x78000003,
    ZE_RESULT_ERROR_INVALID_ARGUMENT = 0x78000004,
    ZE_RESULT_ERROR_INVALID_NULL_HANDLE = 0x78000005,
    ZE_RESULT_ERROR_INVALID_NULL_POINTER = 0x78000007,
    ZE_RESULT_ERROR_INVALID_SIZE = 0x78000008,
    ZE_RESULT_ERROR_UNSUPPORTED_SIZE = 0x78000009,
    ZE_RESULT_ERROR_UNSUPPORTED_ALIGNMENT = 0x7800000a,
    ZE_RESULT_ERROR_INVALID_SYNCHRONIZATION_OBJECT = 0x7800000b,
    ZE_RESULT_ERROR_INVALID_ENUMERATION = 0x7800000c,
    ZE_RESULT_ERROR_INVALID_NATIVE_BINARY = 0x7800000f,
    ZE_RESULT_ERROR_UNKNOWN = 0x7ffffffe,
} ze_result_t;

typedef enum ze_structure_type_t { /* the core API's; the graph extension has numbers of its own */
                                   ZE_STRUCTURE_TYPE_DRIVER_PROPERTIES = 0x1,
                                   ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES = 0x3,
                                   ZE_STRUCTURE_TYPE_CONTEXT_DESC = 0xd,
                                   ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC = 0xe,
                                   ZE_STRUCTURE_TYPE_COMMAND_LIST_DESC = 0xf,
                                   ZE_STRUCTURE_TYPE_FENCE_DESC = 0x12,
                                   ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC = 0x15,
                                   ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC = 0x16,
                                   ZE_STRUCTURE_TYPE_INIT_DRIVER_TYPE_DESC = 0x20021,
                                   ZE_STRUCTURE_TYPE_EXTERNAL_MEMMAP_SYSMEM_EXT_DESC = 0x20037,
} ze_structure_type_t;

/* Every structure begins with these two. */
typedef struct ze_base_desc_t {
    uint32_t stype;
    const void *pNext;
} ze_base_desc_t;

typedef struct ze_uuid_t {
    uint8_t id[16];
} ze_uuid_t;

/* --- driver and device ------------------------------------------------------------------------------------------- */

#define ZE_INIT_FLAG_GPU_ONLY 1u
#define ZE_INIT_FLAG_VPU_ONLY 2u
#define ZE_INIT_DRIVER_TYPE_FLAG_NPU 2u
#define ZE_MAX_EXTENSION_NAME 256
#define ZE_MAX_DEVICE_NAME 256
#define ZE_DEVICE_TYPE_VPU 5u
#define ZE_DEVICE_PROPERTY_FLAG_INTEGRATED 1u
#define ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE 1u
#define ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY 2u
#define ZE_EXTERNAL_MEMORY_TYPE_FLAG_STANDARD_ALLOCATION 0x100u
#define ZE_EXTERNAL_MEMORY_MAPPING_EXT_NAME "ZE_extension_external_memmap_sysmem"

typedef struct ze_init_driver_type_desc_t {
    uint32_t stype;
    const void *pNext;
    uint32_t flags;
} ze_init_driver_type_desc_t;

typedef struct ze_driver_properties_t {
    uint32_t stype;
    void *pNext;
    ze_uuid_t uuid;
    uint32_t driverVersion;
} ze_driver_properties_t;

typedef struct ze_driver_ipc_properties_t {
    uint32_t stype;
    void *pNext;
    uint32_t flags;
} ze_driver_ipc_properties_t;

typedef struct ze_driver_extension_properties_t {
    char name[ZE_MAX_EXTENSION_NAME];
    uint32_t version;
} ze_driver_extension_properties_t;

typedef struct ze_device_properties_t {
    uint32_t stype;
    void *pNext;
    uint32_t type, vendorId, deviceId, flags, subdeviceId, coreClockRate;
    uint64_t maxMemAllocSize;
    uint32_t maxHardwareContexts, maxCommandQueuePriority, numThreadsPerEU, physicalEUSimdWidth, numEUsPerSubslice,
        numSubslicesPerSlice, numSlices;
    uint64_t timerResolution;
    uint32_t timestampValidBits, kernelTimestampValidBits;
    ze_uuid_t uuid;
    char name[ZE_MAX_DEVICE_NAME];
} ze_device_properties_t;

typedef struct ze_command_queue_group_properties_t {
    uint32_t stype;
    void *pNext;
    uint32_t flags;
    size_t maxMemoryFillPatternSize;
    uint32_t numQueues;
} ze_command_queue_group_properties_t;

typedef struct ze_device_memory_properties_t {
    uint32_t stype;
    void *pNext;
    uint32_t flags, maxClockRate, maxBusWidth;
    uint64_t totalSize;
    char name[ZE_MAX_DEVICE_NAME];
} ze_device_memory_properties_t;

typedef struct ze_device_external_memory_properties_t {
    uint32_t stype;
    void *pNext;
    uint32_t memoryAllocationImportTypes, memoryAllocationExportTypes, imageImportTypes, imageExportTypes;
} ze_device_external_memory_properties_t;

/* --- context, memory, queue, list, fence, event ------------------------------------------------------------------ */

#define ZE_COMMAND_QUEUE_MODE_SYNCHRONOUS 1u
#define ZE_FENCE_FLAG_SIGNALED 1u
#define ZE_MEMORY_TYPE_HOST 1u

typedef struct ze_flags_desc_t { /* ze_context_desc_t, ze_host_mem_alloc_desc_t, ze_fence_desc_t */
    uint32_t stype;
    const void *pNext;
    uint32_t flags;
} ze_flags_desc_t;
typedef ze_flags_desc_t ze_context_desc_t, ze_host_mem_alloc_desc_t, ze_fence_desc_t;

typedef struct ze_device_mem_alloc_desc_t {
    uint32_t stype;
    const void *pNext;
    uint32_t flags, ordinal;
} ze_device_mem_alloc_desc_t;

typedef struct ze_external_memmap_sysmem_ext_desc_t {
    uint32_t stype;
    const void *pNext;
    void *pSystemMemory;
    uint64_t size;
} ze_external_memmap_sysmem_ext_desc_t;

typedef struct ze_memory_allocation_properties_t {
    uint32_t stype;
    void *pNext;
    uint32_t type;
    uint64_t id, pageSize;
} ze_memory_allocation_properties_t;

typedef struct ze_command_queue_desc_t {
    uint32_t stype;
    const void *pNext;
    uint32_t ordinal, index, flags, mode, priority;
} ze_command_queue_desc_t;

typedef struct ze_command_list_desc_t {
    uint32_t stype;
    const void *pNext;
    uint32_t commandQueueGroupOrdinal, flags;
} ze_command_list_desc_t;

typedef struct ze_event_pool_desc_t {
    uint32_t stype;
    const void *pNext;
    uint32_t flags, count;
} ze_event_pool_desc_t;

typedef struct ze_event_desc_t {
    uint32_t stype;
    const void *pNext;
    uint32_t index, signal, wait;
} ze_event_desc_t;

/* zelLoaderTranslateHandle's names of handle types */
enum { ZEL_HANDLE_DEVICE = 1, ZEL_HANDLE_CONTEXT = 2, ZEL_HANDLE_COMMAND_LIST = 4, ZEL_HANDLE_EVENT = 7 };

/* --- graph extension --------------------------------------------------------------------------------------------- */

#define ZE_GRAPH_EXT_NAME "ZE_extension_graph"
#define ZE_MAX_GRAPH_ARGUMENT_NAME 256
#define ZE_MAX_GRAPH_ARGUMENT_DIMENSIONS_SIZE 5
#define ZE_MAX_GRAPH_TENSOR_REF_DIMS 8
#define ZE_MAX_GRAPH_TENSOR_NAMES_SIZE 32

typedef enum ze_structure_type_graph_ext_t {
    ZE_STRUCTURE_TYPE_DEVICE_GRAPH_PROPERTIES = 0x1,
    ZE_STRUCTURE_TYPE_GRAPH_DESC = 0x2,
    ZE_STRUCTURE_TYPE_GRAPH_PROPERTIES = 0x3,
    ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_PROPERTIES = 0x4,
    ZE_STRUCTURE_TYPE_GRAPH_INPUT_HASH = 0x8,
    ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_PROPERTY_STRIDES = 0x9,
    ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_TENSOR = 0xa,
    ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_STRIDES = 0xb,
    ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_PROPERTIES_2 = 0xc,
    ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_PROPERTIES_3 = 0xd,
    ZE_STRUCTURE_TYPE_GRAPH_DESC_2 = 0xe,
    ZE_STRUCTURE_TYPE_DEVICE_GRAPH_PROPERTIES_2 = 0xf,
    ZE_STRUCTURE_TYPE_GRAPH_PROPERTIES_2 = 0x10,
    ZE_STRUCTURE_TYPE_GRAPH_PROPERTIES_3 = 0x11,
} ze_structure_type_graph_ext_t;

enum { ZE_GRAPH_FORMAT_NATIVE = 1, ZE_GRAPH_FORMAT_NGRAPH_LITE = 2 };
enum { ZE_GRAPH_ARGUMENT_TYPE_INPUT = 0, ZE_GRAPH_ARGUMENT_TYPE_OUTPUT = 1 };
enum { ZE_GRAPH_STAGE_COMMAND_LIST_INITIALIZE = 1, ZE_GRAPH_STAGE_INITIALIZE = 2 };
enum { ZE_NPU_COMPILER_OPTIONS = 1, ZE_NPU_DRIVER_OPTIONS = 2 };

#define ZE_GRAPH_FLAG_ENABLE_PROFILING 2u
#define ZE_GRAPH_FLAG_INPUT_GRAPH_PERSISTENT 4u /* since 1.13 */

#define ZE_GRAPH_PROPERTIES_FLAG_COMPILED 2u
#define ZE_GRAPH_PROPERTIES_FLAG_PRE_COMPILED 4u
#define ZE_GRAPH_PROPERTIES_FLAG_NO_STANDARD_ALLOCATION 8u /* since 1.14 */

typedef struct ze_graph_version_t {
    uint16_t major, minor;
} ze_graph_version_t;

typedef struct ze_device_graph_properties_t {
    uint32_t stype;
    void *pNext;
    uint32_t graphExtensionVersion;
    ze_graph_version_t compilerVersion;
    uint32_t graphFormatsSupported, maxOVOpsetVersionSupported;
} ze_device_graph_properties_t;

typedef struct ze_device_graph_properties_2_t {
    uint32_t stype;
    void *pNext;
    uint32_t graphExtensionVersion;
    ze_graph_version_t compilerVersion;
    uint32_t graphFormatsSupported, maxOVOpsetVersionSupported;
    uint32_t elfVersion[3], runtimeVersion[3];
} ze_device_graph_properties_2_t;

typedef struct ze_graph_desc_t {
    uint32_t stype;
    void *pNext;
    uint32_t format;
    size_t inputSize;
    const uint8_t *pInput;
    const char *pBuildFlags;
} ze_graph_desc_t;

typedef struct ze_graph_desc_2_t {
    uint32_t stype;
    void *pNext;
    uint32_t format;
    size_t inputSize;
    const uint8_t *pInput;
    const char *pBuildFlags;
    uint32_t flags;
} ze_graph_desc_2_t;

typedef struct ze_graph_input_hash_t {
    uint32_t stype;
    void *pNext;
    uint64_t hash;
} ze_graph_input_hash_t;

typedef struct ze_graph_properties_3_t { /* _t and _2_t are its beginnings */
    uint32_t stype;
    void *pNext;
    uint32_t numGraphArgs;
    uint32_t initStageRequired; /* _2_t */
    uint32_t flags;             /* _3_t */
} ze_graph_properties_3_t;

typedef struct ze_graph_argument_properties_3_t { /* _t and _2_t are its beginnings */
    uint32_t stype;
    void *pNext;
    char name[ZE_MAX_GRAPH_ARGUMENT_NAME];
    uint32_t type;
    uint32_t dims[ZE_MAX_GRAPH_ARGUMENT_DIMENSIONS_SIZE];
    uint32_t networkPrecision, networkLayout, devicePrecision, deviceLayout;
    float quantReverseScale; /* _2_t */
    uint8_t quantZeroPoint;
    uint32_t dims_count; /* _3_t */
    char debug_friendly_name[ZE_MAX_GRAPH_ARGUMENT_NAME];
    char associated_tensor_names[ZE_MAX_GRAPH_TENSOR_NAMES_SIZE][ZE_MAX_GRAPH_ARGUMENT_NAME];
    uint32_t associated_tensor_names_count;
} ze_graph_argument_properties_3_t;

typedef struct ze_graph_argument_metadata_t {
    uint32_t stype;
    void *pNext;
    uint32_t type;
    char friendly_name[ZE_MAX_GRAPH_ARGUMENT_NAME];
    uint32_t data_type;
    uint64_t shape[ZE_MAX_GRAPH_TENSOR_REF_DIMS];
    uint32_t shape_size;
    char tensor_names[ZE_MAX_GRAPH_TENSOR_NAMES_SIZE][ZE_MAX_GRAPH_ARGUMENT_NAME];
    uint32_t tensor_names_count;
    char input_name[ZE_MAX_GRAPH_ARGUMENT_NAME];
} ze_graph_argument_metadata_t;

typedef struct ze_graph_memory_query_t {
    uint64_t total, allocated;
} ze_graph_memory_query_t;

typedef struct ze_graph_argument_property_strides_t {
    uint32_t stype;
    void *pNext;
    bool supportsDynamicStrides;
} ze_graph_argument_property_strides_t;

typedef struct ze_graph_argument_value_tensor_t {
    uint32_t stype;
    void *pNext;
    const void *pTensor;
} ze_graph_argument_value_tensor_t;

/* The sizes are those of the C structures on a 64-bit machine. */
_Static_assert(sizeof(ze_device_properties_t) == 368, "ze_device_properties_t");
_Static_assert(sizeof(ze_graph_desc_2_t) == 56, "ze_graph_desc_2_t");
_Static_assert(sizeof(ze_device_graph_properties_t) == 32, "ze_device_graph_properties_t");
_Static_assert(sizeof(ze_device_graph_properties_2_t) == 56, "ze_device_graph_properties_2_t");
_Static_assert(offsetof(ze_graph_argument_properties_3_t, quantReverseScale) == 312, "ze_graph_argument_properties_t");

#endif
