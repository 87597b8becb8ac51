/* Inside of the session: what session.c (tiers and calls), session_tier.c (compiles one), session_weights.c (arguments
 * that are weights), session_values.c (what lies where between calls), session_frame.c (command lists),
 * session_convert.c (host memory to and from the device's) and session_jobs.c (threads) share. */
#ifndef FORGE_NPU_SESSION_H
#define FORGE_NPU_SESSION_H

#include <stdatomic.h>

#include "npu/device.h"
#include "npu/npu.h"

enum { PAGE = 4096 }; /* what the device sees of a frame starts on pages of their own */
static inline int64_t page_up(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* --- threads (session_jobs.c) --------------------------------------------------------------------------------------
 * Runs fn(ctx, user, 0 .. n - 1), each once, on at most `threads` threads, the caller's among them; jobs begin in
 * order. After a failure no more begin; `ctx` then has the first one's. Only the caller's thread polls ctx->cancelled.
 */
typedef Code (*JobFn)(Context *ctx, void *user, uint32_t job);
MUST_USE Code jobs_run(Context *ctx, int threads, uint32_t n, JobFn fn, void *user);
double session_now_ms(void);

/* --- values (session_values.c) -------------------------------------------------------------------------------------
 * Memory that activations have in a frame. Times are places in a call: a segment's uploads, its calls one by one, its
 * downloads, the next segment's uploads ... Two values share bytes if they are never there at the same time. */
enum { VALUE_SLOT_NONE = UINT32_MAX };
typedef struct Slot {
    DType dtype;
    int64_t bytes;
    uint32_t first, last; /* times, both included */
    int64_t offset;       /* in the frame's memory */
} Slot;

/* Between the host's tensor k of a segment and a slot; for a head's tile its columns of the tensor. */
typedef struct Move {
    uint32_t tensor, slot;
    int64_t first_column, columns; /* columns 0: all */
} Move;

typedef struct Values {
    Slot *slots;
    uint32_t n_slots;
    uint32_t **in, **out; /* of each call: the slots of its block's ports */
    /* Segment s: uploads[first_upload[s] .. first_upload[s + 1]), ...; only what the device has not got before in the
     * same call, and only what the host reads. */
    Move *uploads, *downloads;
    uint32_t *first_upload, *first_download;
    int64_t bytes; /* of a frame */
} Values;
MUST_USE Code values_plan(Context *ctx, Arena *arena, const NpuPlan *plan, NpuModel *const *models, Values *out);

/* --- weights (session_weights.c) -----------------------------------------------------------------------------------
 */
typedef struct Weight {
    const WeightSource *source;
    uint32_t constant; /* UINT32_MAX: the source's own */
    int64_t column;
    void *memory;  /* the device can read it */
    bool imported; /* nothing to fill */
} Weight;
typedef struct Weights {
    Weight *items; /* each once, however many calls read it */
    uint32_t count;
    uint32_t **of_call; /* [call][argument of its block's model] */
    void **allocations;
    uint32_t n_allocations;
    int64_t bytes;
} Weights;
/* Finds the weights of all calls and gets memory for them. What was got is in `out` also after a failure. */
MUST_USE Code weights_plan(Context *ctx, Arena *arena, NpuDevice *device, const NpuPlan *plan, NpuModel *const *models,
                           Weights *out);
MUST_USE Code weights_fill(Context *ctx, const Graph *g, const Weights *weights, uint32_t index);
void weights_free(NpuDevice *device, Weights *weights);

/* --- tiers (session_tier.c) ----------------------------------------------------------------------------------------
 * A program compiled one way. Counted: the session has a reference, and each frame that was made for it. */
typedef struct Binding { /* of a graph argument */
    enum { BIND_IN, BIND_WEIGHT, BIND_OUT } kind;
    uint32_t index;
} Binding;

typedef struct Tier {
    Arena memory; /* holds this too */
    atomic_uint references;
    uint32_t number; /* 0: folded, 1: constant weights */
    NpuDevice *device;
    const Npuir *ir;
    NpuPlan *plan;
    NpuModel **models; /* of each block; xml is dropped after compiling */
    NpuGraph **graphs;
    Binding **bindings; /* of each block, in the order of the graph's arguments */
    Values values;
    Weights weights;
    SessionReport report;
} Tier;
MUST_USE Code tier_create(Context *ctx, NpuDevice *device, const Npuir *ir, const Segments *segments,
                          const SessionOptions *options, Fold fold, Tier **out);
void tier_unref(Tier *tier);

/* --- frames (session_frame.c) --------------------------------------------------------------------------------------
 * What one call in flight needs of a tier: memory and recorded command lists. */
typedef struct Body Body;
struct Body {
    Arena memory; /* holds this too */
    Tier *tier;   /* referenced */
    Body *next;   /* of those to be destroyed */
    char *staging;
    NpuList **lists; /* of each segment */
};
MUST_USE Code body_create(Context *ctx, Tier *tier, Body **out);
void body_destroy(Body *body);
MUST_USE Code body_run(Context *ctx, const Body *body, uint32_t segment, const Tensor *in, const Tensor *out);

/* --- conversions (session_convert.c) -------------------------------------------------------------------------------
 * Between strided tensors of the host and row-major memory of the device. Floats are f16 or f32 on either side; f32
 * that f16 cannot hold becomes its largest number, as on the device. */
bool convert_known(DType from, DType to);
void convert_to_device(const Tensor *from, DType dtype, void *to);
void convert_to_host(const void *from, DType dtype, const Tensor *to);

#endif
