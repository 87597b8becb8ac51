/* Contexts, and the memory that the device can address: whole pages, as the real driver's. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"

bool context_lost(const Context *context) {
    pthread_mutex_lock(&device_lock);
    bool lost = context->losses != losses;
    pthread_mutex_unlock(&device_lock);
    return lost;
}

ze_result_t context_create(Driver *driver, const ze_context_desc_t *desc, Context **context) {
    ENTER(zeContextCreate);
    CHECK_POINTER(desc);
    CHECK_POINTER(context);
    if (driver != the_driver()) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    if (desc->stype != ZE_STRUCTURE_TYPE_CONTEXT_DESC) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    if (device_gone()) return ZE_RESULT_ERROR_DEVICE_LOST;
    Context *c = object_new(KIND_context, sizeof *c, 0);
    if (!c) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    pthread_mutex_lock(&device_lock);
    c->losses = losses;
    pthread_mutex_unlock(&device_lock);
    *context = c;
    return OK;
}

/* Functions that destroy do so also when they are told to fail: the caller can do nothing more about it. */
ze_result_t context_destroy(Context *context) {
    ze_result_t told = enter(ENTRY_zeContextDestroy);
    CHECK_HANDLE(context, context);
    if (context->allocations || context->queues) misuse("zeContextDestroy: the context still has memory or queues");
    object_free(context); /* what it has stays alive, and in the counts */
    return told;
}

ze_result_t context_status(Context *context) {
    ENTER(zeContextGetStatus);
    CHECK_HANDLE(context, context);
    return context_lost(context) ? ZE_RESULT_ERROR_DEVICE_LOST : OK;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* With the device's lock held. */
static Allocation *find(Context *context, const void *pointer) {
    const char *p = pointer;
    for (Allocation *a = context->allocations; a; a = a->next)
        if (p >= a->data && p < a->data + a->size) return a;
    return NULL;
}

size_t memory_room(Context *context, const void *pointer) {
    pthread_mutex_lock(&device_lock);
    Allocation *a = find(context, pointer);
    size_t room = a ? (size_t)(a->data + a->size - (const char *)pointer) : 0;
    pthread_mutex_unlock(&device_lock);
    return room;
}

bool memory_use(Context *context, const void *pointer, size_t bytes, int change) {
    Allocation *a = find(context, pointer);
    if (!a || (size_t)(a->data + a->size - (const char *)pointer) < bytes) return false;
    a->users += change;
    return true;
}

bool memory_fits(uint64_t bytes) {
    uint64_t limit = settings().memory, used = live_bytes();
    return !limit || (bytes <= limit && used <= limit - bytes);
}

static ze_result_t keep(Context *context, Kind kind, char *data, size_t size, void **memory) {
    Allocation *a = object_new(kind, sizeof *a, size);
    if (!a) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    a->context = context;
    a->data = data;
    a->size = size;
    pthread_mutex_lock(&device_lock);
    a->next = context->allocations;
    context->allocations = a;
    pthread_mutex_unlock(&device_lock);
    *memory = data;
    return OK;
}

static ze_result_t allocate(Context *context, size_t size, size_t alignment, void **memory) {
    CHECK_HANDLE(context, context);
    CHECK_POINTER(memory);
    if (size == 0) return ZE_RESULT_ERROR_UNSUPPORTED_SIZE;
    if (alignment & (alignment - 1)) return ZE_RESULT_ERROR_UNSUPPORTED_ALIGNMENT;
    if (context_lost(context)) return ZE_RESULT_ERROR_DEVICE_LOST;
    size_t page = page_size();
    if (size > SIZE_MAX - page || !memory_fits((size + page - 1) / page * page))
        return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
    size_t whole = (size + page - 1) / page * page;
    char *data = aligned_alloc(alignment > page ? alignment : page, whole);
    if (!data) return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
    memset(data, 0xa5, whole); /* nobody may count on zeros: NaN-like bytes in floats, large integers */
    ze_result_t r = keep(context, KIND_allocation, data, whole, memory);
    if (r) free(data);
    return r;
}

static ze_result_t import(Context *context, const ze_external_memmap_sysmem_ext_desc_t *desc, void **memory) {
    CHECK_HANDLE(context, context);
    CHECK_POINTER(memory);
    CHECK_POINTER(desc->pSystemMemory);
    if (!settings().import) return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
    if (desc->size == 0) return ZE_RESULT_ERROR_UNSUPPORTED_SIZE;
    if ((uintptr_t)desc->pSystemMemory % page_size() || desc->size % page_size())
        return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY; /* what the kernel's refusal becomes */
    if (context_lost(context)) return ZE_RESULT_ERROR_DEVICE_LOST;
    if (memory_room(context, desc->pSystemMemory)) return ZE_RESULT_ERROR_INVALID_ARGUMENT; /* imported already */
    return keep(context, KIND_import, desc->pSystemMemory, desc->size, memory);
}

ze_result_t memory_host(Context *context, const ze_host_mem_alloc_desc_t *desc, size_t size, size_t alignment,
                        void **memory) {
    ENTER(zeMemAllocHost);
    CHECK_POINTER(desc);
    if (desc->stype != ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    const ze_base_desc_t *next = desc->pNext;
    if (next && next->stype == ZE_STRUCTURE_TYPE_EXTERNAL_MEMMAP_SYSMEM_EXT_DESC)
        return import(context, (const void *)next, memory);
    return allocate(context, size, alignment, memory);
}

ze_result_t memory_device(Context *context, const ze_device_mem_alloc_desc_t *desc, size_t size, size_t alignment,
                          Device *device, void **memory) {
    ENTER(zeMemAllocDevice);
    CHECK_POINTER(desc);
    if (device != the_device()) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    return allocate(context, size, alignment, memory);
}

ze_result_t memory_shared(Context *context, const ze_device_mem_alloc_desc_t *device_desc,
                          const ze_host_mem_alloc_desc_t *host_desc, size_t size, size_t alignment, Device *device,
                          void **memory) {
    ENTER(zeMemAllocShared);
    (void)device;
    CHECK_POINTER(device_desc);
    CHECK_POINTER(host_desc);
    return allocate(context, size, alignment, memory);
}

ze_result_t memory_free(Context *context, void *memory) {
    ze_result_t told = enter(ENTRY_zeMemFree);
    CHECK_HANDLE(context, context);
    pthread_mutex_lock(&device_lock);
    Allocation **link = &context->allocations;
    while (*link && (*link)->data != memory) link = &(*link)->next;
    Allocation *a = *link;
    if (a && a->users) misuse("zeMemFree: the device is using the memory");
    while (a && a->users) pthread_cond_wait(&device_changed, &device_lock);
    /* others may have changed the list while this one waited */
    for (link = &context->allocations; a && *link != a;) link = &(*link)->next;
    if (a) *link = a->next;
    pthread_mutex_unlock(&device_lock);
    if (!a) {
        misuse("zeMemFree: not an allocation of this context");
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    if (a->object.kind == KIND_allocation) free(a->data);
    object_free(a);
    return told;
}

ze_result_t memory_properties(Context *context, const void *memory, ze_memory_allocation_properties_t *properties,
                              Device **device) {
    ENTER(zeMemGetAllocProperties);
    CHECK_HANDLE(context, context);
    CHECK_POINTER(memory);
    CHECK_POINTER(properties);
    if (!memory_room(context, memory)) return ZE_RESULT_ERROR_NOT_AVAILABLE;
    properties->type = ZE_MEMORY_TYPE_HOST;
    properties->id = 1;
    properties->pageSize = page_size();
    if (device) *device = the_device();
    return OK;
}

ze_result_t memory_range(Context *context, const void *memory, void **base, size_t *size) {
    ENTER(zeMemGetAddressRange);
    CHECK_HANDLE(context, context);
    CHECK_POINTER(memory);
    pthread_mutex_lock(&device_lock);
    Allocation *a = find(context, memory);
    if (a && base) *base = a->data;
    if (a && size) *size = a->size;
    pthread_mutex_unlock(&device_lock);
    return a ? OK : ZE_RESULT_ERROR_NOT_AVAILABLE;
}
