/* Entry points of the core API, for tables.c. */
#ifndef SOFTNPU_DRIVER_H
#define SOFTNPU_DRIVER_H

#include "softnpu.h"

ze_result_t driver_init(uint32_t flags);
ze_result_t driver_init_drivers(uint32_t *count, Driver **drivers, const ze_init_driver_type_desc_t *desc);
ze_result_t driver_get(uint32_t *count, Driver **drivers);
ze_result_t driver_api_version(Driver *driver, uint32_t *version);
ze_result_t driver_properties(Driver *driver, ze_driver_properties_t *properties);
ze_result_t driver_ipc_properties(Driver *driver, ze_driver_ipc_properties_t *properties);
ze_result_t driver_extensions(Driver *driver, uint32_t *count, ze_driver_extension_properties_t *properties);
ze_result_t driver_extension_function(Driver *driver, const char *name, void **function);
ze_result_t device_get(Driver *driver, uint32_t *count, Device **devices);
ze_result_t device_properties(Device *device, ze_device_properties_t *properties);
ze_result_t device_queue_groups(Device *device, uint32_t *count, ze_command_queue_group_properties_t *properties);
ze_result_t device_memory(Device *device, uint32_t *count, ze_device_memory_properties_t *properties);
ze_result_t device_external_memory(Device *device, ze_device_external_memory_properties_t *properties);
ze_result_t device_status(Device *device);
ze_result_t device_timestamps(Device *device, uint64_t *host, uint64_t *own);

ze_result_t context_create(Driver *driver, const ze_context_desc_t *desc, Context **context);
ze_result_t context_destroy(Context *context);
ze_result_t context_status(Context *context);
ze_result_t memory_host(Context *context, const ze_host_mem_alloc_desc_t *desc, size_t size, size_t alignment,
                        void **memory);
ze_result_t memory_device(Context *context, const ze_device_mem_alloc_desc_t *desc, size_t size, size_t alignment,
                          Device *device, void **memory);
ze_result_t memory_shared(Context *context, const ze_device_mem_alloc_desc_t *device_desc,
                          const ze_host_mem_alloc_desc_t *host_desc, size_t size, size_t alignment, Device *device,
                          void **memory);
ze_result_t memory_free(Context *context, void *memory);
ze_result_t memory_properties(Context *context, const void *memory, ze_memory_allocation_properties_t *properties,
                              Device **device);
ze_result_t memory_range(Context *context, const void *memory, void **base, size_t *size);

ze_result_t list_create(Context *context, Device *device, const ze_command_list_desc_t *desc, List **list);
ze_result_t list_destroy(List *list);
ze_result_t list_close(List *list);
ze_result_t list_reset(List *list);
ze_result_t list_copy(List *list, void *to, const void *from, size_t bytes, Event *signal, uint32_t n, Event **wait);
ze_result_t list_barrier(List *list, Event *signal, uint32_t n, Event **wait);
ze_result_t list_signal(List *list, Event *event);
ze_result_t list_wait(List *list, uint32_t n, Event **events);
ze_result_t list_reset_event(List *list, Event *event);

ze_result_t queue_create(Context *context, Device *device, const ze_command_queue_desc_t *desc, Queue **queue);
ze_result_t queue_destroy(Queue *queue);
ze_result_t queue_execute(Queue *queue, uint32_t count, List **lists, Fence *fence);
ze_result_t queue_synchronize(Queue *queue, uint64_t timeout);
ze_result_t fence_create(Queue *queue, const ze_fence_desc_t *desc, Fence **fence);
ze_result_t fence_destroy(Fence *fence);
ze_result_t fence_synchronize(Fence *fence, uint64_t timeout);
ze_result_t fence_query(Fence *fence);
ze_result_t fence_reset(Fence *fence);

ze_result_t event_pool_create(Context *context, const ze_event_pool_desc_t *desc, uint32_t n, Device **devices,
                              EventPool **pool);
ze_result_t event_pool_destroy(EventPool *pool);
ze_result_t event_create(EventPool *pool, const ze_event_desc_t *desc, Event **event);
ze_result_t event_destroy(Event *event);
ze_result_t event_signal(Event *event);
ze_result_t event_reset(Event *event);
ze_result_t event_synchronize(Event *event, uint64_t timeout);
ze_result_t event_query(Event *event);

#endif
