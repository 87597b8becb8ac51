/* Shared by the files that make up device.h. */
#ifndef FORGE_NPU_DEVICE_INTERNAL_H
#define FORGE_NPU_DEVICE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "npu/device.h"
#include "npu/ze_loader.h"

/* A context takes at most 255 queues, and more than a few do not make one NPU faster: lists share these. */
enum { QUEUES_MAX = 16 };

struct NpuDevice {
    ZeLoader ze;
    ZeDriver driver;
    ZeDevice device;
    ZeContext context;
    const ZeGraphTable *graphs;
    uint32_t minor;      /* graphs has the functions of version 1.minor */
    bool imports;        /* system memory can be imported */
    uint64_t timeout_ns; /* of a list */
    NpuFacts facts;
    pid_t owner; /* a forked child may not use the handles, nor free them: they are the parent's too */
    atomic_uint refs;
    atomic_bool lost;
    pthread_mutex_t lock; /* what follows */
    struct {
        ZeQueue queue;
        uint32_t lists;
    } queues[QUEUES_MAX];
    uint32_t n_queues;
    char *checked_config; /* whose options the compiler knows; malloc'd */
};

/* CODE_DEVICE when the device was lost or belongs to another process. */
MUST_USE Code npu_device_usable(Context *ctx, NpuDevice *device);
bool npu_device_mine(const NpuDevice *device);

/* Turns a result into a failure with its reason and what to do: "running 3 graphs: the NPU was lost (DEVICE_LOST
 * 0x70000001) ...". `device` may be NULL. */
Code ze_fail(Context *ctx, NpuDevice *device, ZeResult result, const char *format, ...) PRINTF_LIKE(4, 5);
NpuReason ze_reason(ZeResult result);
const char *ze_advice(ZeResult result); /* what the user can do: ". Add the user to ..." or "" */

/* device_node.c: fills facts->node and node_readable from /dev/accel. */
void npu_node_find(NpuFacts *facts);
/* Why there is no driver or device, when the loader's initialisation gave `result`. */
Code npu_node_fail(Context *ctx, const NpuFacts *facts, ZeResult result);

/* A queue with few lists on it; `index` is given back. */
MUST_USE Code npu_queue_take(Context *ctx, NpuDevice *device, uint32_t *index, ZeQueue *out);
void npu_queue_give(NpuDevice *device, uint32_t index);

/* graph.c for list.c */
struct NpuGraph {
    NpuDevice *device;
    ZeGraph graph;
    NpuArgument *arguments;
    uint32_t n_arguments;
    pthread_mutex_t lock; /* set_argument and append_execute belong together */
    Hash128 key;          /* of what it was compiled from */
    NpuOrigin origin;
    const NpuBlob *given; /* with NPU_FROM_BLOB */
    void *blob;           /* cached blob that the driver may still read; free() */
    int64_t blob_bytes;   /* 0: not asked yet */
};
/* Runs the graph's initialisation on a list of its own: drivers before 1.8. */
MUST_USE Code npu_list_initialize(Context *ctx, NpuDevice *device, ZeGraph graph, const char *what);

#endif
