/* Memory that the device can address. Arguments of graphs must lie in it. */
#include <unistd.h>

#include "npu/device_internal.h"

enum { PAGE = 4096 }; /* of x86-64, the only processors with this NPU */

Code npu_memory_alloc(Context *ctx, NpuDevice *device, int64_t bytes, void **out) {
    *out = NULL;
    TRY(npu_device_usable(ctx, device));
    if (bytes < 0 || bytes > INT64_MAX - PAGE) return fail(ctx, CODE_INVALID, "memory of %lld bytes", (long long)bytes);
    size_t size = bytes ? ((size_t)bytes + PAGE - 1) / PAGE * PAGE : PAGE;
    ZeDesc desc = {.type = ZE_TYPE_HOST_MEMORY};
    ZeResult r = device->ze.zeMemAllocHost(device->context, &desc, size, PAGE, out);
    if (r != ZE_SUCCESS || !*out) {
        *out = NULL;
        return ze_fail(ctx, device, r != ZE_SUCCESS ? r : ZE_OUT_OF_HOST_MEMORY, "allocating %.3g MB of its memory",
                       (double)size / 1e6);
    }
    return CODE_OK;
}

Code npu_memory_import(Context *ctx, NpuDevice *device, void *memory, int64_t bytes, void **out) {
    *out = NULL;
    TRY(npu_device_usable(ctx, device));
    if (!device->imports || !memory || bytes <= 0 || (uintptr_t)memory % PAGE) return CODE_OK;
    /* Whole pages are mapped, so the rest of the last one is there. Read-only: the pages of a file that is mapped
     * privately are not copied then. */
    uint64_t size = ((uint64_t)bytes + PAGE - 1) / PAGE * PAGE;
    ZeSystemMemory source = {.type = ZE_TYPE_SYSTEM_MEMORY, .memory = memory, .bytes = size};
    ZeDesc desc = {.type = ZE_TYPE_HOST_MEMORY, .next = &source, .flags = ZE_HOST_MEMORY_WRITE_COMBINED};
    void *made = NULL;
    ZeResult r = device->ze.zeMemAllocHost(device->context, &desc, size, PAGE, &made);
    if (r == ZE_SUCCESS && made == memory) {
        *out = made;
    } else if (r == ZE_SUCCESS && made) {
        device->ze.zeMemFree(device->context, made); /* a driver that took it for an allocation */
    } else if (ze_reason(r) == NPU_DEVICE_LOST) {
        return ze_fail(ctx, device, r, "importing memory");
    }
    return CODE_OK; /* any other refusal: the caller copies */
}

void npu_memory_free(NpuDevice *device, void *memory) {
    if (memory && npu_device_mine(device)) device->ze.zeMemFree(device->context, memory);
}
