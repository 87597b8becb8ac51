/* One use of the device layer from beginning to end, on the fake loader and driver of fake_ze.h. */
#ifndef FORGE_TESTS_ZE_USE_H
#define FORGE_TESTS_ZE_USE_H

#include "check.h"
#include "fake_ze.h"
#include "npu/device.h"

static Context ctx;
static char fake[128]; /* as current loaders and drivers */

static inline int live(void) { return *(int *)fake_symbol(fake, "fake_live"); }
static inline int compiled(void) { return *(int *)fake_symbol(fake, "fake_compiled"); }

enum { ELEMENTS = 4 };
static const char xml[] = "<net/>";

static inline Code fill(Context *c, void *user, void *out, int64_t bytes) {
    (void)c;
    memset(out, *(int *)user, (size_t)bytes);
    return CODE_OK;
}
static int filler = 7;
static const NpuBlob *use_blobs; /* one, or NULL */
static NpuAcceptFn use_accept;

static inline NpuGraphDesc desc_of(const char *cache) {
    return (NpuGraphDesc){.xml = xml,
                          .xml_bytes = sizeof xml - 1,
                          .bin_bytes = 100,
                          .fill = fill,
                          .user = &filler,
                          .cache_dir = cache,
                          .accept = use_accept,
                          .blobs = use_blobs,
                          .n_blobs = use_blobs ? 1 : 0,
                          .what = "the sum of model.py:3"};
}

typedef struct Use {
    NpuDevice *device;
    NpuGraph *graph;
    NpuList *list;
    float *memory[5]; /* in, w, out of the first graph, w, out of the second */
    NpuMade made;
} Use;

static inline Code use_begin(Context *c, Use *u, const char *cache) {
    TRY(npu_device_open(c, fake, NULL, &u->device));
    NpuGraphDesc desc = desc_of(cache);
    TRY(npu_graph_create(c, u->device, &desc, &u->graph, &u->made));
    for (int i = 0; i < 5; i++) TRY(npu_memory_alloc(c, u->device, ELEMENTS * sizeof(float), (void **)&u->memory[i]));
    TRY(npu_list_create(c, u->device, &u->list));
    TRY(npu_list_append(c, u->list, u->graph, (void *[]){u->memory[0], u->memory[1], u->memory[2]}));
    TRY(npu_list_append(c, u->list, u->graph, (void *[]){u->memory[2], u->memory[3], u->memory[4]}));
    return npu_list_close(c, u->list);
}

static inline Code use_run(Context *c, Use *u, float value) {
    for (int k = 0; k < ELEMENTS; k++) {
        u->memory[0][k] = value;
        u->memory[1][k] = 10 * (float)k;
        u->memory[3][k] = 100;
    }
    memset(u->memory[4], 0, ELEMENTS * sizeof(float));
    TRY(npu_list_run(c, u->list));
    for (int k = 0; k < ELEMENTS; k++) CHECK(u->memory[4][k] == value + 10 * (float)k + 100);
    return CODE_OK;
}

static inline void use_end(Use *u) {
    npu_list_destroy(u->list);
    npu_graph_destroy(u->graph);
    for (int i = 0; i < 5 && u->device; i++) npu_memory_free(u->device, u->memory[i]);
    npu_device_unref(u->device);
}

static inline Code use_made(Context *c, const char *cache, NpuMade *made) {
    Use u = {0};
    Code code = use_begin(c, &u, cache);
    if (code == CODE_OK) code = use_run(c, &u, 1);
    if (code == CODE_OK) code = use_run(c, &u, -5);
    *made = u.made;
    use_end(&u);
    return code;
}

static inline Code use(Context *c, const char *cache, bool *hit) {
    NpuMade made;
    Code code = use_made(c, cache, &made);
    if (hit) *hit = made.origin == NPU_FROM_CACHE;
    return code;
}

#endif
