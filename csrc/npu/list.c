/* Command lists: recorded once, run many times. */
#include <stdlib.h>
#include <time.h>

#include "npu/device_internal.h"

struct NpuList {
    NpuDevice *device;
    uint32_t queue_index;
    ZeQueue queue;
    ZeList list;
    ZeFence fence;
    uint32_t n_graphs;
    bool closed;
    bool busy; /* submitted, and not seen to end */
};

enum { SLICE_NS = 50 * 1000 * 1000 }; /* between looks at ctx->cancelled */
#define DESTROY_WAIT_NS 10000000000u

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

Code npu_list_create(Context *ctx, NpuDevice *device, NpuList **out) {
    *out = NULL;
    TRY(npu_device_usable(ctx, device));
    NpuList *list = calloc(1, sizeof *list);
    if (!list) return fail(ctx, CODE_NO_MEMORY, "out of memory for a command list");
    Code code = npu_queue_take(ctx, device, &list->queue_index, &list->queue);
    if (code != CODE_OK) {
        free(list);
        return code;
    }
    list->device = npu_device_ref(device);
    ZeListDesc list_desc = {.type = ZE_TYPE_LIST};
    ZeDesc fence_desc = {.type = ZE_TYPE_FENCE};
    ZeResult r = device->ze.zeCommandListCreate(device->context, device->device, &list_desc, &list->list);
    if (r != ZE_SUCCESS) {
        list->list = NULL;
        code = ze_fail(ctx, device, r, "creating a command list");
    } else {
        pthread_mutex_lock(&device->lock); /* lists share queues, and old drivers keep a queue's fences unguarded */
        r = device->ze.zeFenceCreate(list->queue, &fence_desc, &list->fence);
        pthread_mutex_unlock(&device->lock);
        if (r != ZE_SUCCESS) {
            list->fence = NULL;
            code = ze_fail(ctx, device, r, "creating a fence");
        }
    }
    if (code != CODE_OK) {
        npu_list_destroy(list);
        return code;
    }
    *out = list;
    return CODE_OK;
}

static Code may_append(Context *ctx, const NpuList *list) {
    TRY(npu_device_usable(ctx, list->device));
    return list->closed ? fail(ctx, CODE_INTERNAL, "recording into a closed command list") : CODE_OK;
}

/* The commands of a list overlap where no barrier separates them. */
static Code append_barrier(Context *ctx, NpuList *list) {
    if (!list->n_graphs) return CODE_OK;
    ZeResult r = list->device->ze.zeCommandListAppendBarrier(list->list, NULL, 0, NULL);
    return r == ZE_SUCCESS ? CODE_OK : ze_fail(ctx, list->device, r, "recording a barrier");
}

Code npu_list_append(Context *ctx, NpuList *list, NpuGraph *graph, void *const *arguments) {
    TRY(may_append(ctx, list));
    for (uint32_t i = 0; i < graph->n_arguments; i++)
        if (!arguments[i]) return fail(ctx, CODE_INTERNAL, "graph argument %u has no memory", i);
    TRY(append_barrier(ctx, list));
    const ZeGraphTable *table = list->device->graphs;
    ZeResult r = ZE_SUCCESS;
    uint32_t i = 0;
    pthread_mutex_lock(&graph->lock);
    for (; i < graph->n_arguments && r == ZE_SUCCESS; i++) r = table->set_argument(graph->graph, i, arguments[i]);
    bool set = r == ZE_SUCCESS;
    if (set) r = table->append_execute(list->list, graph->graph, NULL, NULL, 0, NULL);
    pthread_mutex_unlock(&graph->lock);
    if (!set) return ze_fail(ctx, list->device, r, "setting graph argument \"%s\"", graph->arguments[i - 1].name);
    if (r == ZE_UNINITIALIZED) /* seen when its buffers cannot be allocated */
        return fail_device(ctx, NPU_NO_MEMORY,
                           "NPU: recording the execution of a graph failed: UNINITIALIZED (0x%x). The driver had no "
                           "memory for it, or an argument does not lie in the NPU's memory",
                           r);
    if (r != ZE_SUCCESS) return ze_fail(ctx, list->device, r, "recording the execution of a graph");
    list->n_graphs++;
    return CODE_OK;
}

Code npu_list_close(Context *ctx, NpuList *list) {
    TRY(may_append(ctx, list));
    ZeResult r = list->device->ze.zeCommandListClose(list->list);
    if (r != ZE_SUCCESS) return ze_fail(ctx, list->device, r, "closing a command list");
    list->closed = true;
    return CODE_OK;
}

/* Waits until the list has ended or `limit` has passed (then ZE_NOT_READY). `cancelled` (may be NULL) notes that the
 * caller wants to stop: the device cannot, and it works on the caller's memory, so waiting goes on. An error may be the
 * list's or that of waiting: it is asked for twice, since after the former the device writes no more. */
static ZeResult wait_for_end(Context *ctx, NpuList *list, uint64_t limit_ns, bool *cancelled) {
    uint64_t start = now_ns();
    ZeResult error = ZE_SUCCESS;
    for (;;) {
        uint64_t spent = now_ns() - start;
        uint64_t slice = spent >= limit_ns ? 0 : limit_ns - spent;
        if (slice > SLICE_NS) slice = SLICE_NS;
        ZeResult r = list->device->ze.zeFenceHostSynchronize(list->fence, slice);
        if (r == ZE_SUCCESS || (r != ZE_NOT_READY && error != ZE_SUCCESS)) {
            list->busy = false;
            return error != ZE_SUCCESS ? error : r;
        }
        if (r != ZE_NOT_READY) error = r;
        if (!slice && r == ZE_NOT_READY) return r;
        if (cancelled && !*cancelled && ctx->cancelled && ctx->cancelled(ctx->user)) *cancelled = true;
    }
}

static Code fail_timeout(Context *ctx, const NpuList *list) {
    return fail_device(ctx, NPU_TIMEOUT,
                       "the NPU did not finish %u graph%s within %.3g s; FORGE_NPU_TIMEOUT_S allows more",
                       list->n_graphs, list->n_graphs == 1 ? "" : "s", (double)list->device->timeout_ns / 1e9);
}

Code npu_list_run(Context *ctx, NpuList *list) {
    NpuDevice *device = list->device;
    TRY(npu_device_usable(ctx, device));
    TRY(check_cancelled(ctx));
    if (!list->closed) return fail(ctx, CODE_INTERNAL, "running an open command list");
    if (!list->n_graphs) return CODE_OK;
    ZeResult r;
    if (list->busy) { /* an earlier run timed out */
        r = wait_for_end(ctx, list, device->timeout_ns, NULL);
        if (r == ZE_NOT_READY) return fail_timeout(ctx, list);
        if (ze_reason(r) == NPU_DEVICE_LOST) return ze_fail(ctx, device, r, "ending an earlier call");
    }
    r = device->ze.zeFenceReset(list->fence);
    if (r != ZE_SUCCESS) return ze_fail(ctx, device, r, "resetting a fence");
    r = device->ze.zeCommandQueueExecuteCommandLists(list->queue, 1, &list->list, list->fence);
    if (r != ZE_SUCCESS)
        return ze_fail(ctx, device, r, "submitting %u graph%s", list->n_graphs, list->n_graphs == 1 ? "" : "s");
    list->busy = true;
    bool cancelled = false;
    r = wait_for_end(ctx, list, device->timeout_ns, &cancelled);
    if (r == ZE_NOT_READY) return fail_timeout(ctx, list);
    if (r != ZE_SUCCESS)
        return ze_fail(ctx, device, r, "running %u graph%s", list->n_graphs, list->n_graphs == 1 ? "" : "s");
    return cancelled ? fail(ctx, CODE_CANCELLED, "cancelled") : CODE_OK;
}

void npu_list_destroy(NpuList *list) {
    if (!list) return;
    NpuDevice *device = list->device;
    if (npu_device_mine(device)) {
        uint64_t wait = device->timeout_ns < DESTROY_WAIT_NS ? device->timeout_ns : DESTROY_WAIT_NS;
        /* What does not end is left alone: the driver would free what the device still uses. */
        bool ended = !list->busy || wait_for_end(NULL, list, wait, NULL) != ZE_NOT_READY;
        if (ended && list->fence) {
            pthread_mutex_lock(&device->lock);
            device->ze.zeFenceDestroy(list->fence);
            pthread_mutex_unlock(&device->lock);
        }
        if (ended && list->list) device->ze.zeCommandListDestroy(list->list);
    }
    npu_queue_give(device, list->queue_index);
    npu_device_unref(device);
    free(list);
}

Code npu_list_initialize(Context *ctx, NpuDevice *device, ZeGraph graph, const char *what) {
    NpuList *list;
    TRY(npu_list_create(ctx, device, &list));
    Code code = CODE_OK;
    ZeResult r = device->graphs->append_initialize(list->list, graph, NULL, 0, NULL);
    if (r != ZE_SUCCESS) code = ze_fail(ctx, device, r, "recording the initialisation of %s", what);
    list->n_graphs = 1;
    if (code == CODE_OK) code = npu_list_close(ctx, list);
    if (code == CODE_OK) code = npu_list_run(ctx, list);
    npu_list_destroy(list);
    return code;
}
