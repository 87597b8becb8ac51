/* Command lists, and queues that execute them on a thread each. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum { MAX_QUEUES = 255 }; /* of a context */

pthread_mutex_t device_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t device_changed; /* waits by CLOCK_MONOTONIC */

__attribute__((constructor)) static void make_condition(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&device_changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

struct timespec deadline_after(uint64_t nanoseconds) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t seconds = nanoseconds / 1000000000u;
    t.tv_sec += (time_t)(seconds > 1u << 30 ? 1u << 30 : seconds); /* UINT64_MAX: for ever */
    t.tv_nsec += (long)(nanoseconds % 1000000000u);
    if (t.tv_nsec >= 1000000000) {
        t.tv_nsec -= 1000000000;
        t.tv_sec++;
    }
    return t;
}

/* --- command lists ----------------------------------------------------------------------------------------------- */

ze_result_t list_create(Context *context, Device *device, const ze_command_list_desc_t *desc, List **list) {
    ENTER(zeCommandListCreate);
    CHECK_HANDLE(context, context);
    CHECK_POINTER(desc);
    CHECK_POINTER(list);
    if (device != the_device()) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    if (desc->stype != ZE_STRUCTURE_TYPE_COMMAND_LIST_DESC) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    if (desc->commandQueueGroupOrdinal) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    List *l = object_new(KIND_list, sizeof *l, 0);
    if (!l) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    l->context = context;
    *list = l;
    return OK;
}

static void wait_until_done(List *list, const char *what) {
    pthread_mutex_lock(&device_lock);
    if (list->in_flight) misuse("%s: the list is being executed", what);
    while (list->in_flight) pthread_cond_wait(&device_changed, &device_lock);
    pthread_mutex_unlock(&device_lock);
}

static void list_clear(List *list) {
    for (size_t i = 0; i < list->count; i++) free(list->commands[i].arguments);
    list->count = 0;
}

ze_result_t list_destroy(List *list) {
    ze_result_t told = enter(ENTRY_zeCommandListDestroy);
    CHECK_HANDLE(list, list);
    wait_until_done(list, "zeCommandListDestroy");
    list_clear(list);
    free(list->commands);
    object_free(list);
    return told;
}

ze_result_t list_close(List *list) {
    ENTER(zeCommandListClose);
    CHECK_HANDLE(list, list);
    list->closed = true;
    return OK;
}

ze_result_t list_reset(List *list) {
    ENTER(zeCommandListReset);
    CHECK_HANDLE(list, list);
    wait_until_done(list, "zeCommandListReset");
    list_clear(list);
    list->closed = false;
    return OK;
}

static ze_result_t append_one(List *list, Command command) {
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 8;
        Command *grown = realloc(list->commands, capacity * sizeof *grown);
        if (!grown) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
        list->commands = grown;
        list->capacity = capacity;
    }
    list->commands[list->count++] = command;
    return OK;
}

static ze_result_t append_all(List *list, Command command, Event *signal, uint32_t n_wait, Event **wait) {
    CHECK_HANDLE(list, list);
    if (list->closed) return ZE_RESULT_ERROR_NOT_AVAILABLE;
    if (n_wait && !wait) return ZE_RESULT_ERROR_INVALID_SIZE;
    for (uint32_t i = 0; i < n_wait; i++) CHECK_HANDLE(wait[i], event);
    if (signal) CHECK_HANDLE(signal, event);
    size_t before = list->count;
    ze_result_t r = OK;
    for (uint32_t i = 0; i < n_wait && !r; i++) r = append_one(list, (Command){.kind = COMMAND_WAIT, .event = wait[i]});
    if (!r) r = append_one(list, command);
    if (!r && signal) r = append_one(list, (Command){.kind = COMMAND_SIGNAL, .event = signal});
    if (r) list->count = before;
    return r;
}

ze_result_t list_append(List *list, Command command, Event *signal, uint32_t n_wait, Event **wait) {
    ze_result_t r = append_all(list, command, signal, n_wait, wait);
    if (r) free(command.arguments);
    return r;
}

ze_result_t list_copy(List *list, void *to, const void *from, size_t bytes, Event *signal, uint32_t n, Event **wait) {
    ENTER(zeCommandListAppendMemoryCopy);
    CHECK_HANDLE(list, list);
    CHECK_POINTER(to);
    CHECK_POINTER(from);
    if (memory_room(list->context, to) < bytes || memory_room(list->context, from) < bytes)
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    return list_append(list, (Command){.kind = COMMAND_COPY, .to = to, .from = from, .bytes = bytes}, signal, n, wait);
}

ze_result_t list_barrier(List *list, Event *signal, uint32_t n, Event **wait) {
    ENTER(zeCommandListAppendBarrier);
    /* commands run in order anyway; one of no bytes keeps the events */
    return list_append(list, (Command){.kind = COMMAND_COPY}, signal, n, wait);
}

ze_result_t list_signal(List *list, Event *event) {
    ENTER(zeCommandListAppendSignalEvent);
    CHECK_HANDLE(event, event);
    return list_append(list, (Command){.kind = COMMAND_SIGNAL, .event = event}, NULL, 0, NULL);
}

ze_result_t list_wait(List *list, uint32_t n, Event **events) {
    ENTER(zeCommandListAppendWaitOnEvents);
    return list_append(list, (Command){.kind = COMMAND_COPY}, NULL, n, events);
}

ze_result_t list_reset_event(List *list, Event *event) {
    ENTER(zeCommandListAppendEventReset);
    CHECK_HANDLE(event, event);
    return list_append(list, (Command){.kind = COMMAND_RESET, .event = event}, NULL, 0, NULL);
}

/* --- queues ------------------------------------------------------------------------------------------------------ */

typedef struct Job { /* the lists of one submission */
    Fence *fence;
    struct Job *next;
    uint32_t count;
    List *lists[];
} Job;

struct Queue {
    Object object;
    Context *context;
    pthread_t thread;
    Job *first, **last;
    uint32_t pending;
    bool stop, synchronous;
    ze_result_t result; /* the first failure of jobs without a fence since the last synchronisation */
};

struct Fence {
    Object object;
    Queue *queue;
    int pending; /* submissions that will signal it: more than one is a misuse */
    bool signaled;
    bool given_up; /* waiting for it failed: the caller may take the device for lost */
    ze_result_t result;
};

/* Sleeps as long as an execution is said to take; not when the queue goes away or the device is lost. */
static void pass_time(const Queue *queue, uint64_t microseconds) {
    struct timespec end = deadline_after(microseconds * 1000);
    int late = 0;
    pthread_mutex_lock(&device_lock);
    while (!queue->stop && queue->context->losses == losses && !late)
        late = pthread_cond_timedwait(&device_changed, &device_lock, &end);
    pthread_mutex_unlock(&device_lock);
}

/* Marks graph and arguments as in use, so that nobody frees them meanwhile. */
static bool use_arguments(const Command *c, int change) {
    bool good = true;
    pthread_mutex_lock(&device_lock);
    for (uint32_t i = 0; i < c->graph->count; i++) {
        if (memory_use(c->graph->context, c->arguments[i], model_argument(c->graph->model, i)->bytes, change)) continue;
        good = false;
        for (uint32_t k = 0; k < i; k++)
            memory_use(c->graph->context, c->arguments[k], model_argument(c->graph->model, k)->bytes, -change);
        break;
    }
    if (good) {
        c->graph->running += change;
        pthread_cond_broadcast(&device_changed);
    }
    pthread_mutex_unlock(&device_lock);
    return good;
}

static ze_result_t execute_graph(Queue *queue, const Command *c) {
    char log[512];
    if (!object_check(c->graph, KIND_graph, "execution")) return ZE_RESULT_ERROR_DEVICE_LOST;
    if (!c->graph->initialized) {
        misuse("execution: the graph was never initialised");
        return ZE_RESULT_ERROR_DEVICE_LOST;
    }
    ze_result_t told = enter(ENTRY_execution);
    Settings s = settings();
    static uint64_t executions;
    if (s.lose_after && __atomic_add_fetch(&executions, 1, __ATOMIC_RELAXED) == s.lose_after + 1) lose_device();
    if (s.latency_us) pass_time(queue, s.latency_us);
    if (told) return told;
    if (queue->stop || context_lost(queue->context)) return ZE_RESULT_ERROR_DEVICE_LOST;
    if (!use_arguments(c, 1)) {
        misuse("execution: an argument's memory was freed");
        return ZE_RESULT_ERROR_DEVICE_LOST;
    }
    bool good = model_run(c->graph->model, c->arguments, log, sizeof log);
    use_arguments(c, -1);
    if (!good) misuse("execution: OpenVINO failed: %s", log);
    return good ? OK : ZE_RESULT_ERROR_DEVICE_LOST;
}

static ze_result_t execute_list(Queue *queue, const List *list) {
    for (size_t i = 0; i < list->count; i++) {
        const Command *c = &list->commands[i];
        ze_result_t r = OK;
        switch (c->kind) {
        case COMMAND_INITIALIZE:
            if (object_check(c->graph, KIND_graph, "execution")) c->graph->initialized = true;
            break;
        case COMMAND_EXECUTE: r = execute_graph(queue, c); break;
        case COMMAND_COPY:
            if (c->bytes) memmove(c->to, c->from, c->bytes);
            break;
        case COMMAND_SIGNAL:
        case COMMAND_RESET:
            pthread_mutex_lock(&device_lock);
            c->event->set = c->kind == COMMAND_SIGNAL;
            pthread_cond_broadcast(&device_changed);
            pthread_mutex_unlock(&device_lock);
            break;
        case COMMAND_WAIT:
            pthread_mutex_lock(&device_lock);
            while (!c->event->set && !queue->stop) pthread_cond_wait(&device_changed, &device_lock);
            pthread_mutex_unlock(&device_lock);
            break;
        }
        if (r) return r;
    }
    return context_lost(queue->context) ? ZE_RESULT_ERROR_DEVICE_LOST : OK;
}

static void *queue_thread(void *argument) {
    Queue *q = argument;
    pthread_mutex_lock(&device_lock);
    for (;;) {
        while (!q->first && !q->stop) pthread_cond_wait(&device_changed, &device_lock);
        Job *job = q->first;
        if (!job) break;
        q->first = job->next;
        if (!q->first) q->last = &q->first;
        pthread_mutex_unlock(&device_lock);
        ze_result_t r = OK;
        for (uint32_t i = 0; i < job->count && !r; i++) r = execute_list(q, job->lists[i]);
        pthread_mutex_lock(&device_lock);
        if (r && !q->result && !job->fence) q->result = r;
        for (uint32_t i = 0; i < job->count; i++) job->lists[i]->in_flight--;
        if (job->fence) {
            job->fence->result = r;
            job->fence->signaled = true;
            job->fence->pending--;
        }
        q->pending--;
        free(job);
        pthread_cond_broadcast(&device_changed);
    }
    pthread_mutex_unlock(&device_lock);
    return NULL;
}

ze_result_t queue_create(Context *context, Device *device, const ze_command_queue_desc_t *desc, Queue **queue) {
    ENTER(zeCommandQueueCreate);
    CHECK_HANDLE(context, context);
    CHECK_POINTER(desc);
    CHECK_POINTER(queue);
    if (device != the_device()) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    if (desc->stype != ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    if (desc->ordinal) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    if (context_lost(context)) return ZE_RESULT_ERROR_DEVICE_LOST;
    pthread_mutex_lock(&device_lock);
    bool room = context->queues < MAX_QUEUES;
    context->queues += room;
    pthread_mutex_unlock(&device_lock);
    if (!room) return ZE_RESULT_ERROR_UNINITIALIZED;
    Queue *q = object_new(KIND_queue, sizeof *q, 0);
    if (q) {
        q->context = context;
        q->last = &q->first;
        q->synchronous = desc->mode == ZE_COMMAND_QUEUE_MODE_SYNCHRONOUS;
        if (pthread_create(&q->thread, NULL, queue_thread, q)) {
            object_free(q);
            q = NULL;
        }
    }
    if (!q) {
        pthread_mutex_lock(&device_lock);
        context->queues--;
        pthread_mutex_unlock(&device_lock);
        return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    }
    *queue = q;
    return OK;
}

ze_result_t queue_destroy(Queue *queue) {
    ze_result_t told = enter(ENTRY_zeCommandQueueDestroy);
    CHECK_HANDLE(queue, queue);
    pthread_mutex_lock(&device_lock);
    queue->stop = true; /* what is still in it ends as if the device were lost */
    queue->context->queues--;
    pthread_cond_broadcast(&device_changed);
    pthread_mutex_unlock(&device_lock);
    pthread_join(queue->thread, NULL);
    object_free(queue);
    return told;
}

ze_result_t queue_synchronize(Queue *queue, uint64_t timeout) {
    ENTER(zeCommandQueueSynchronize);
    CHECK_HANDLE(queue, queue);
    struct timespec end = deadline_after(timeout);
    int late = 0;
    pthread_mutex_lock(&device_lock);
    while (queue->pending && !late) late = pthread_cond_timedwait(&device_changed, &device_lock, &end);
    ze_result_t r = queue->pending ? ZE_RESULT_NOT_READY : queue->result;
    if (!queue->pending) queue->result = OK;
    pthread_mutex_unlock(&device_lock);
    return r;
}

ze_result_t queue_execute(Queue *queue, uint32_t count, List **lists, Fence *fence) {
    ENTER(zeCommandQueueExecuteCommandLists);
    CHECK_HANDLE(queue, queue);
    CHECK_POINTER(lists);
    if (count == 0) return ZE_RESULT_ERROR_INVALID_SIZE;
    for (uint32_t i = 0; i < count; i++) {
        CHECK_HANDLE(lists[i], list);
        if (!lists[i]->closed) return ZE_RESULT_ERROR_UNINITIALIZED;
    }
    if (fence) CHECK_HANDLE(fence, fence);
    if (fence && fence->queue != queue) return ZE_RESULT_ERROR_INVALID_SYNCHRONIZATION_OBJECT;
    if (context_lost(queue->context)) return ZE_RESULT_ERROR_DEVICE_LOST;
    Job *job = calloc(1, sizeof *job + count * sizeof job->lists[0]);
    if (!job) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    job->count = count;
    job->fence = fence;
    memcpy(job->lists, lists, count * sizeof *lists);
    pthread_mutex_lock(&device_lock);
    for (uint32_t i = 0; i < count; i++)
        if (lists[i]->in_flight++) misuse("zeCommandQueueExecuteCommandLists: the list is already being executed");
    if (fence && (fence->pending++ || fence->signaled))
        misuse("zeCommandQueueExecuteCommandLists: the fence was not reset");
    *queue->last = job;
    queue->last = &job->next;
    queue->pending++;
    pthread_cond_broadcast(&device_changed);
    pthread_mutex_unlock(&device_lock);
    return queue->synchronous ? queue_synchronize(queue, UINT64_MAX) : OK;
}

/* --- fences ------------------------------------------------------------------------------------------------------ */

ze_result_t fence_create(Queue *queue, const ze_fence_desc_t *desc, Fence **fence) {
    ENTER(zeFenceCreate);
    CHECK_HANDLE(queue, queue);
    CHECK_POINTER(desc);
    CHECK_POINTER(fence);
    if (desc->stype != ZE_STRUCTURE_TYPE_FENCE_DESC) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    Fence *f = object_new(KIND_fence, sizeof *f, 0);
    if (!f) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    f->queue = queue;
    f->signaled = desc->flags & ZE_FENCE_FLAG_SIGNALED;
    *fence = f;
    return OK;
}

ze_result_t fence_destroy(Fence *fence) {
    ze_result_t told = enter(ENTRY_zeFenceDestroy);
    CHECK_HANDLE(fence, fence);
    pthread_mutex_lock(&device_lock);
    if (fence->pending && !fence->given_up) misuse("zeFenceDestroy: an execution has yet to signal the fence");
    while (fence->pending) pthread_cond_wait(&device_changed, &device_lock);
    pthread_mutex_unlock(&device_lock);
    object_free(fence);
    return told;
}

static ze_result_t fence_wait(Fence *fence, uint64_t timeout) {
    CHECK_HANDLE(fence, fence);
    struct timespec end = deadline_after(timeout);
    int late = 0;
    pthread_mutex_lock(&device_lock);
    while (fence->pending && !fence->signaled && !late)
        late = pthread_cond_timedwait(&device_changed, &device_lock, &end);
    ze_result_t r = fence->signaled ? fence->result : ZE_RESULT_NOT_READY;
    pthread_mutex_unlock(&device_lock);
    return r;
}

ze_result_t fence_synchronize(Fence *fence, uint64_t timeout) {
    ze_result_t told = enter(ENTRY_zeFenceHostSynchronize);
    if (!told) return fence_wait(fence, timeout);
    CHECK_HANDLE(fence, fence);
    fence->given_up = told != ZE_RESULT_NOT_READY;
    return told;
}

ze_result_t fence_query(Fence *fence) {
    ENTER(zeFenceQueryStatus);
    return fence_wait(fence, 0);
}

ze_result_t fence_reset(Fence *fence) {
    ENTER(zeFenceReset);
    CHECK_HANDLE(fence, fence);
    pthread_mutex_lock(&device_lock);
    bool pending = fence->pending != 0;
    fence->signaled = false;
    fence->result = OK;
    pthread_mutex_unlock(&device_lock);
    if (pending) misuse("zeFenceReset: an execution has yet to signal the fence");
    return OK;
}
