/* What the loader asks for: tables of entry points, written into its memory slot by slot.
 *
 * A table has the size that the loader's own API version gives it, so a slot may be written only if that version has
 * it; a slot that is left alone stays NULL, and the loader answers ZE_RESULT_ERROR_UNSUPPORTED_FEATURE or
 * _UNINITIALIZED for it. Slots are numbered as in ze_ddi.h; newer versions only add some at the end. Loader 1.8 insists
 * on every function below, also on those that have nothing to give. */
#include "driver.h"

typedef struct Slot {
    uint32_t since; /* minor version of the API */
    uint32_t index;
    Function function;
} Slot;

static ze_result_t fill(uint32_t version, Function *table, const Slot *slots, size_t count) {
    CHECK_POINTER(table);
    if (version >> 16 != 1) return ZE_RESULT_ERROR_UNSUPPORTED_VERSION;
    for (size_t i = 0; i < count; i++)
        if ((version & 0xffff) >= slots[i].since) table[slots[i].index] = slots[i].function;
    return OK;
}

#define TABLE(name, ...)                                                                                               \
    EXPORT ze_result_t name(uint32_t version, Function *table) {                                                       \
        static const Slot slots[] = {__VA_ARGS__};                                                                     \
        return fill(version, table, slots, sizeof slots / sizeof *slots);                                              \
    }
#define S(since, index, function)                                                                                      \
    { since, index, (Function)function }
#define EMPTY_TABLE(name)                                                                                              \
    EXPORT ze_result_t name(uint32_t version, Function *table) { return fill(version, table, NULL, 0); }

EXPORT ze_result_t zeGetGlobalProcAddrTable(uint32_t version, Function *table) {
    static const Slot slots[] = {S(0, 0, driver_init), S(10, 1, driver_init_drivers)};
    remember_loader(__builtin_return_address(0));
    return fill(version, table, slots, sizeof slots / sizeof *slots);
}
TABLE(zeGetDriverProcAddrTable, S(0, 0, driver_get), S(0, 1, driver_api_version), S(0, 2, driver_properties),
      S(0, 3, driver_ipc_properties), S(0, 4, driver_extensions), S(1, 5, driver_extension_function))
TABLE(zeGetDeviceProcAddrTable, S(0, 0, device_get), S(0, 2, device_properties), S(0, 5, device_queue_groups),
      S(0, 6, device_memory), S(0, 10, device_external_memory), S(0, 13, device_status), S(1, 14, device_timestamps))
TABLE(zeGetContextProcAddrTable, S(0, 0, context_create), S(0, 1, context_destroy), S(0, 2, context_status))
TABLE(zeGetMemProcAddrTable, S(0, 0, memory_shared), S(0, 1, memory_device), S(0, 2, memory_host), S(0, 3, memory_free),
      S(0, 4, memory_properties), S(0, 5, memory_range))
TABLE(zeGetCommandQueueProcAddrTable, S(0, 0, queue_create), S(0, 1, queue_destroy), S(0, 2, queue_execute),
      S(0, 3, queue_synchronize))
TABLE(zeGetCommandListProcAddrTable, S(0, 0, list_create), S(0, 2, list_destroy), S(0, 3, list_close),
      S(0, 4, list_reset), S(0, 6, list_barrier), S(0, 8, list_copy), S(0, 18, list_signal), S(0, 19, list_wait),
      S(0, 20, list_reset_event))
TABLE(zeGetFenceProcAddrTable, S(0, 0, fence_create), S(0, 1, fence_destroy), S(0, 2, fence_synchronize),
      S(0, 3, fence_query), S(0, 4, fence_reset))
TABLE(zeGetEventPoolProcAddrTable, S(0, 0, event_pool_create), S(0, 1, event_pool_destroy))
TABLE(zeGetEventProcAddrTable, S(0, 0, event_create), S(0, 1, event_destroy), S(0, 2, event_signal),
      S(0, 3, event_synchronize), S(0, 4, event_query), S(0, 5, event_reset))

EMPTY_TABLE(zeGetCommandListExpProcAddrTable)
EMPTY_TABLE(zeGetImageProcAddrTable)
EMPTY_TABLE(zeGetKernelProcAddrTable)
EMPTY_TABLE(zeGetModuleProcAddrTable)
EMPTY_TABLE(zeGetModuleBuildLogProcAddrTable)
EMPTY_TABLE(zeGetPhysicalMemProcAddrTable)
EMPTY_TABLE(zeGetSamplerProcAddrTable)
EMPTY_TABLE(zeGetVirtualMemProcAddrTable)

EMPTY_TABLE(zetGetCommandListProcAddrTable)
EMPTY_TABLE(zetGetContextProcAddrTable)
EMPTY_TABLE(zetGetDebugProcAddrTable)
EMPTY_TABLE(zetGetDeviceProcAddrTable)
EMPTY_TABLE(zetGetKernelProcAddrTable)
EMPTY_TABLE(zetGetMetricGroupProcAddrTable)
EMPTY_TABLE(zetGetMetricProcAddrTable)
EMPTY_TABLE(zetGetMetricQueryPoolProcAddrTable)
EMPTY_TABLE(zetGetMetricQueryProcAddrTable)
EMPTY_TABLE(zetGetMetricStreamerProcAddrTable)
EMPTY_TABLE(zetGetModuleProcAddrTable)
EMPTY_TABLE(zetGetTracerExpProcAddrTable)

EMPTY_TABLE(zesGetDeviceProcAddrTable)
EMPTY_TABLE(zesGetDiagnosticsProcAddrTable)
EMPTY_TABLE(zesGetDriverProcAddrTable)
EMPTY_TABLE(zesGetEngineProcAddrTable)
EMPTY_TABLE(zesGetFabricPortProcAddrTable)
EMPTY_TABLE(zesGetFanProcAddrTable)
EMPTY_TABLE(zesGetFirmwareProcAddrTable)
EMPTY_TABLE(zesGetFrequencyProcAddrTable)
EMPTY_TABLE(zesGetGlobalProcAddrTable)
EMPTY_TABLE(zesGetLedProcAddrTable)
EMPTY_TABLE(zesGetMemoryProcAddrTable)
EMPTY_TABLE(zesGetOverclockProcAddrTable)
EMPTY_TABLE(zesGetPerformanceFactorProcAddrTable)
EMPTY_TABLE(zesGetPowerProcAddrTable)
EMPTY_TABLE(zesGetPsuProcAddrTable)
EMPTY_TABLE(zesGetRasProcAddrTable)
EMPTY_TABLE(zesGetSchedulerProcAddrTable)
EMPTY_TABLE(zesGetStandbyProcAddrTable)
EMPTY_TABLE(zesGetTemperatureProcAddrTable)
