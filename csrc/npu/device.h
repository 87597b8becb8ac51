/* A Level Zero NPU: found through the distribution's loader (dlopen), driven by its graph extension. Nothing is linked;
 * the part of the ABI that is used is declared in ze_abi.h. */
#ifndef FORGE_NPU_DEVICE_H
#define FORGE_NPU_DEVICE_H

#include "base/arena.h"
#include "base/dtype.h"
#include "npu/hash.h"

/* Why there is no NPU, or why it failed: Context.reason of a CODE_DEVICE failure. */
#define NPU_REASONS(X)                                                                                                 \
    X(NONE, "none")                                                                                                    \
    X(NO_LOADER, "no-loader")               /* libze_loader.so.1 not found or too old */                               \
    X(NO_DRIVER, "no-driver")               /* no /dev/accel, or no user-mode driver */                                \
    X(NO_PERMISSION, "no-permission")       /* /dev/accel/accel* may not be opened */                                  \
    X(NO_DEVICE, "no-device")               /* drivers, but no device of type VPU */                                   \
    X(NO_COMPILER, "no-compiler")           /* driver without graph compiler */                                        \
    X(OLD_EXTENSION, "old-extension")       /* no graph extension, or older than 1.4 */                                \
    X(VERSION_MISMATCH, "version-mismatch") /* firmware and driver, blob and driver */                                 \
    X(DEVICE_LOST, "device-lost")                                                                                      \
    X(NO_MEMORY, "out-of-memory")                                                                                      \
    X(COMPILE_FAILED, "compile-failed")                                                                                \
    X(TIMEOUT, "timeout")                                                                                              \
    X(FAILED, "failed") /* any other result */

typedef enum NpuReason {
#define X(e, n) NPU_##e,
    NPU_REASONS(X)
#undef X
        NPU_REASON_COUNT
} NpuReason;
const char *npu_reason_name(NpuReason reason);

/* --- device --------------------------------------------------------------------------------------------------------
 */
typedef struct NpuDevice NpuDevice;

typedef struct NpuFacts { /* what doctor prints; known as far as opening came */
    char loader[256];     /* path asked for or found */
    char loader_version[32];
    char node[64]; /* "/dev/accel/accel0", "" none */
    bool node_readable;
    char driver_version[32];
    uint32_t n_drivers;
    char device_name[256];
    uint32_t device_id;
    char target[16];    /* "npu3720", "npu4000", "npu5010"; the nearest known one */
    uint32_t extension; /* major << 16 | minor */
    uint32_t compiler;  /* major << 16 | minor; 0 none */
    uint32_t opset;
    uint64_t memory; /* bytes the device reports */
} NpuFacts;

/* `loader` NULL: FORGE_ZE_LOADER, else "libze_loader.so.1". On failure CODE_DEVICE with ctx->reason and a text that
 * says what to do; `facts` (may be NULL) is filled as far as it came in either case. */
MUST_USE Code npu_device_open(Context *ctx, const char *loader, NpuFacts *facts, NpuDevice **out);
NpuDevice *npu_device_ref(NpuDevice *device); /* counted: sessions keep theirs */
void npu_device_unref(NpuDevice *device);
const NpuFacts *npu_device_facts(const NpuDevice *device);
/* Cheap: is there anything that could be an NPU (a device node, or ZE_ENABLE_ALT_DRIVERS)? Does not load anything. */
bool npu_device_likely(void);

/* --- graphs --------------------------------------------------------------------------------------------------------
 */
typedef struct NpuGraph NpuGraph;
typedef struct NpuArgument {
    char name[64]; /* tensor name: "in0", "w3", "out0" */
    bool output;
    DType dtype; /* of the device's argument */
    bool i4;
    uint8_t rank;
    int64_t shape[8];
    int64_t bytes;
} NpuArgument;

/* A compiled graph that lies in the caller's memory: of an artefact. Nothing of it is believed. */
typedef struct NpuBlob NpuBlob;
struct NpuBlob {
    Hash128 key, checksum; /* what it was compiled from, as the cache's entries have it; of its bytes */
    const void *data;
    size_t bytes;
};
typedef enum NpuOrigin { NPU_COMPILED, NPU_FROM_CACHE, NPU_FROM_BLOB, NPU_ORIGIN_COUNT } NpuOrigin;
typedef struct NpuMade {
    NpuOrigin origin;
    NpuReason refused; /* NPU_NONE, or why the blob with its key could not be used */
} NpuMade;

/* Writes the weights file into `out` (`bytes` long). */
typedef Code (*NpuFillFn)(Context *ctx, void *user, void *out, int64_t bytes);
/* CODE_DEVICE: the graph's arguments are not those of the model. */
typedef Code (*NpuAcceptFn)(Context *ctx, void *user, const NpuGraph *graph);
typedef struct NpuGraphDesc {
    const char *xml; /* with the rt_info that the compiler wants (npu_emit writes it) */
    size_t xml_bytes;
    int64_t bin_bytes;
    NpuFillFn fill;        /* called once */
    NpuAcceptFn accept;    /* NULL: any arguments will do */
    void *user;            /* of both */
    const char *config;    /* 'KEY="VALUE" ...'; options that the driver does not know are an error naming them */
    const char *cache_dir; /* NULL: none */
    const NpuBlob *blobs;  /* looked through before the cache; their memory must outlive the graph */
    uint32_t n_blobs;
    const char *what; /* for messages: "block of 12 instructions from model.py:31" */
} NpuGraphDesc;
/* Loads the blob with the graph's key, or the cache's, or compiles. Thread-safe. Arguments come in the order inputs,
 * outputs as the driver lists them. `made` may be NULL. The cache (cache.h) holds at most FORGE_CACHE_BYTES; what it
 * cannot read or write, and what the driver or `accept` refuses of blobs, is compiled anew. CODE_INVALID: a blob is not
 * what its checksum says. Blobs never get into the cache. */
MUST_USE Code npu_graph_create(Context *ctx, NpuDevice *device, const NpuGraphDesc *desc, NpuGraph **out,
                               NpuMade *made);
void npu_graph_destroy(NpuGraph *graph); /* after the lists that it was recorded into */
uint32_t npu_graph_arguments(const NpuGraph *graph);
const NpuArgument *npu_graph_argument(const NpuGraph *graph, uint32_t index);
int64_t npu_graph_blob_bytes(NpuGraph *graph); /* size of the native blob; 0 where the driver cannot tell */
/* The native blob, until the graph is destroyed and `*own` freed (free()). out->data NULL: it is not to be had, since
 * the cache that the graph came from has lost it, or the driver gives none. */
MUST_USE Code npu_graph_blob(Context *ctx, NpuGraph *graph, const char *cache_dir, NpuBlob *out, void **own);

/* --- memory --------------------------------------------------------------------------------------------------------
 */
/* Host memory that the device can address, page aligned, not zeroed. */
MUST_USE Code npu_memory_alloc(Context *ctx, NpuDevice *device, int64_t bytes, void **out);
/* Makes existing memory addressable without a copy, for inputs: the device only reads it. *out NULL with CODE_OK: the
 * driver cannot, or the memory does not begin at a page; copy then. It must stay until npu_memory_free(*out). */
MUST_USE Code npu_memory_import(Context *ctx, NpuDevice *device, void *memory, int64_t bytes, void **out);
void npu_memory_free(NpuDevice *device, void *memory);

/* --- command lists -------------------------------------------------------------------------------------------------
 */
typedef struct NpuList NpuList; /* a recorded sequence of graph executions with its fence; one call in flight */
MUST_USE Code npu_list_create(Context *ctx, NpuDevice *device, NpuList **out);
/* Records an execution with these argument addresses (one a graph argument); executions run one after the other. */
MUST_USE Code npu_list_append(Context *ctx, NpuList *list, NpuGraph *graph, void *const *arguments);
MUST_USE Code npu_list_close(Context *ctx, NpuList *list);
/* Submits and waits; polls ctx->cancelled between slices of waiting, and gives CODE_CANCELLED when the device has
 * ended, since that works on the caller's memory. May run again afterwards, also after a failure that is not
 * DEVICE_LOST. NPU_TIMEOUT (FORGE_NPU_TIMEOUT_S seconds, 60): the device may still be at work; destroying the list
 * waits for it. */
MUST_USE Code npu_list_run(Context *ctx, NpuList *list);
void npu_list_destroy(NpuList *list);

#endif
