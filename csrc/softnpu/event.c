/* Events: what one command signals and another, or the host, waits for. */
#include "driver.h"

struct EventPool {
    Object object;
    uint32_t count;
};

ze_result_t event_pool_create(Context *context, const ze_event_pool_desc_t *desc, uint32_t n, Device **devices,
                              EventPool **pool) {
    ENTER(zeEventPoolCreate);
    (void)n;
    (void)devices;
    CHECK_HANDLE(context, context);
    CHECK_POINTER(desc);
    CHECK_POINTER(pool);
    if (!desc->count) return ZE_RESULT_ERROR_INVALID_SIZE;
    EventPool *p = object_new(KIND_event_pool, sizeof *p, 0);
    if (!p) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    p->count = desc->count;
    *pool = p;
    return OK;
}

ze_result_t event_pool_destroy(EventPool *pool) {
    ze_result_t told = enter(ENTRY_zeEventPoolDestroy);
    CHECK_HANDLE(pool, event_pool);
    object_free(pool);
    return told;
}

ze_result_t event_create(EventPool *pool, const ze_event_desc_t *desc, Event **event) {
    ENTER(zeEventCreate);
    CHECK_HANDLE(pool, event_pool);
    CHECK_POINTER(desc);
    CHECK_POINTER(event);
    if (desc->index >= pool->count) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    Event *e = object_new(KIND_event, sizeof *e, 0);
    if (!e) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    *event = e;
    return OK;
}

ze_result_t event_destroy(Event *event) {
    ze_result_t told = enter(ENTRY_zeEventDestroy);
    CHECK_HANDLE(event, event);
    object_free(event);
    return told;
}

static ze_result_t put(Event *event, bool set) {
    CHECK_HANDLE(event, event);
    pthread_mutex_lock(&device_lock);
    event->set = set;
    pthread_cond_broadcast(&device_changed);
    pthread_mutex_unlock(&device_lock);
    return OK;
}

ze_result_t event_signal(Event *event) {
    ENTER(zeEventHostSignal);
    return put(event, true);
}

ze_result_t event_reset(Event *event) {
    ENTER(zeEventHostReset);
    return put(event, false);
}

static ze_result_t wait_for(Event *event, uint64_t timeout) {
    CHECK_HANDLE(event, event);
    struct timespec end = deadline_after(timeout);
    int late = 0;
    pthread_mutex_lock(&device_lock);
    while (!event->set && !late) late = pthread_cond_timedwait(&device_changed, &device_lock, &end);
    ze_result_t r = event->set ? OK : ZE_RESULT_NOT_READY;
    pthread_mutex_unlock(&device_lock);
    return r;
}

ze_result_t event_synchronize(Event *event, uint64_t timeout) {
    ENTER(zeEventHostSynchronize);
    return wait_for(event, timeout);
}

ze_result_t event_query(Event *event) {
    ENTER(zeEventQueryStatus);
    return wait_for(event, 0);
}
