/* The Level Zero loader, opened at run time. */
#ifndef FORGE_NPU_ZE_LOADER_H
#define FORGE_NPU_ZE_LOADER_H

#include "base/status.h"
#include "npu/ze_abi.h"

/* X(name, parameters): functions of the loader; each returns a ZeResult. All of REQUIRED exist since loader 1.0. */
#define ZE_REQUIRED(X)                                                                                                 \
    X(zeInit, (uint32_t flags))                                                                                        \
    X(zeDriverGet, (uint32_t * count, ZeDriver * out))                                                                 \
    X(zeDriverGetProperties, (ZeDriver, ZeDriverProperties *))                                                         \
    X(zeDriverGetExtensionProperties, (ZeDriver, uint32_t * count, ZeExtension * out))                                 \
    X(zeDriverGetExtensionFunctionAddress, (ZeDriver, const char *name, void **out))                                   \
    X(zeDeviceGet, (ZeDriver, uint32_t * count, ZeDevice * out))                                                       \
    X(zeDeviceGetProperties, (ZeDevice, ZeDeviceProperties *))                                                         \
    X(zeContextCreate, (ZeDriver, const ZeDesc *, ZeContext *))                                                        \
    X(zeContextDestroy, (ZeContext))                                                                                   \
    X(zeMemAllocHost, (ZeContext, const ZeDesc *, size_t bytes, size_t alignment, void **out))                         \
    X(zeMemFree, (ZeContext, void *))                                                                                  \
    X(zeCommandQueueCreate, (ZeContext, ZeDevice, const ZeQueueDesc *, ZeQueue *))                                     \
    X(zeCommandQueueDestroy, (ZeQueue))                                                                                \
    X(zeCommandQueueExecuteCommandLists, (ZeQueue, uint32_t count, ZeList *, ZeFence))                                 \
    X(zeCommandListCreate, (ZeContext, ZeDevice, const ZeListDesc *, ZeList *))                                        \
    X(zeCommandListDestroy, (ZeList))                                                                                  \
    X(zeCommandListClose, (ZeList))                                                                                    \
    X(zeCommandListAppendBarrier, (ZeList, ZeEvent, uint32_t n_wait, ZeEvent * wait))                                  \
    X(zeFenceCreate, (ZeQueue, const ZeDesc *, ZeFence *))                                                             \
    X(zeFenceDestroy, (ZeFence))                                                                                       \
    X(zeFenceHostSynchronize, (ZeFence, uint64_t timeout_ns))                                                          \
    X(zeFenceReset, (ZeFence))
#define ZE_OPTIONAL(X)                                                                                                 \
    X(zeInitDrivers, (uint32_t * count, ZeDriver * out, const ZeDesc *)) /* 1.18 */                                    \
    X(zelLoaderGetVersions, (size_t * count, ZelVersion * out))

typedef struct ZeLoader {
    void *library;
#define X(name, parameters) ZeResult(*name) parameters;
    ZE_REQUIRED(X)
    ZE_OPTIONAL(X)
#undef X
} ZeLoader;

/* `path` NULL: FORGE_ZE_LOADER, else the distribution's. `found` gets the file's path, as far as it is known. On
 * failure CODE_DEVICE with NPU_NO_LOADER. */
MUST_USE Code ze_loader_open(Context *ctx, const char *path, ZeLoader *out, char *found, size_t found_bytes);
/* Only before a driver was initialised: drivers have threads and exit handlers of their own. */
void ze_loader_close(ZeLoader *loader);

/* The drivers that may have an NPU, `*count` of at most `max`. The loader's result, not a Code: what it means depends
 * on what else is there. */
ZeResult ze_loader_drivers(const ZeLoader *loader, ZeDriver *out, uint32_t max, uint32_t *count);
/* "1.8.12", "" where it cannot be told; after ze_loader_drivers. */
void ze_loader_version(const ZeLoader *loader, char *out, size_t bytes);

const char *ze_result_name(ZeResult result); /* "DEVICE_LOST"; "unknown result" */

#endif
