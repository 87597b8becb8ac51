/* A program on a device: the tier that calls begin on, and the frames of calls.
 *
 * A frame has a body, made for one tier, with memory and command lists. A call takes the session's tier as it is when
 * its first segment runs and keeps to it. After an upgrade the bodies of idle frames are dropped at once, those of
 * running calls when their frame begins its next call; the old tier goes with its last body. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "npu/session.h"

typedef struct NpuFrame NpuFrame;
struct NpuFrame {
    NpuFrame *next, **link; /* in the session's list */
    Body *body;             /* NULL: the next call makes one */
    bool busy;              /* between the first and the last segment of a call: the body is the caller's */
};

struct NpuSession {
    Backend backend; /* first: the executor's pointer is ours */
    Arena memory;    /* holds this too */
    NpuDevice *device;
    const Npuir *ir;
    const Segments *segments;
    SessionOptions options;
    pthread_mutex_t lock; /* of what follows; never held while the device works */
    pthread_mutex_t upgrading;
    Tier *tier;
    NpuFrame *frames;
};

static Tier *current_tier(NpuSession *s) {
    pthread_mutex_lock(&s->lock);
    Tier *tier = s->tier;
    atomic_fetch_add(&tier->references, 1);
    pthread_mutex_unlock(&s->lock);
    return tier;
}

/* --- frames ------------------------------------------------------------------------------------------------------- */
static Code new_body(Context *ctx, NpuSession *s, Body **out) {
    Tier *tier = current_tier(s);
    Code code = body_create(ctx, tier, out);
    tier_unref(tier);
    return code;
}

static Code frame_create(Context *ctx, Backend *self, void **out) {
    NpuSession *s = (NpuSession *)self;
    *out = NULL;
    bool fails = ctx->fail_allocation && --ctx->fail_allocation == 0;
    NpuFrame *frame = fails ? NULL : calloc(1, sizeof *frame);
    if (!frame) return fail(ctx, CODE_NO_MEMORY, "out of memory: frame of a call");
    Code code = new_body(ctx, s, &frame->body);
    if (code != CODE_OK) {
        free(frame);
        return code;
    }
    pthread_mutex_lock(&s->lock);
    frame->next = s->frames;
    frame->link = &s->frames;
    if (frame->next) frame->next->link = &frame->next;
    s->frames = frame;
    pthread_mutex_unlock(&s->lock);
    *out = frame;
    return CODE_OK;
}

static void frame_destroy(Backend *self, void *memory) {
    NpuSession *s = (NpuSession *)self;
    NpuFrame *frame = memory;
    pthread_mutex_lock(&s->lock);
    *frame->link = frame->next;
    if (frame->next) frame->next->link = frame->link;
    pthread_mutex_unlock(&s->lock);
    body_destroy(frame->body);
    free(frame);
}

/* At a call's first segment: the body must be one of the session's tier. */
static Code begin_call(Context *ctx, NpuSession *s, NpuFrame *frame) {
    Body *old = NULL;
    pthread_mutex_lock(&s->lock);
    frame->busy = true; /* from here on nobody else touches the body */
    if (frame->body && frame->body->tier != s->tier) {
        old = frame->body;
        frame->body = NULL;
    }
    pthread_mutex_unlock(&s->lock);
    body_destroy(old);
    return frame->body ? CODE_OK : new_body(ctx, s, &frame->body);
}

/* The body goes if the device may still be at work on its memory, or if its tier is not the session's any more. */
static void end_call(NpuSession *s, NpuFrame *frame, bool drop) {
    Body *old = NULL;
    pthread_mutex_lock(&s->lock);
    frame->busy = false;
    if (frame->body && (drop || frame->body->tier != s->tier)) {
        old = frame->body;
        frame->body = NULL;
    }
    pthread_mutex_unlock(&s->lock);
    body_destroy(old);
}

static Code run(Context *ctx, Backend *self, void *memory, uint32_t index, const Tensor *in, const Tensor *out) {
    NpuSession *s = (NpuSession *)self;
    NpuFrame *frame = memory;
    if (index >= s->segments->count) return fail(ctx, CODE_INTERNAL, "no segment %u", index);
    Code code = index == 0 ? begin_call(ctx, s, frame) : CODE_OK;
    if (code == CODE_OK && (!frame->busy || !frame->body))
        code = fail(ctx, CODE_INTERNAL, "segment %u runs before segment 0", index);
    if (code == CODE_OK) code = body_run(ctx, frame->body, index, in, out);
    if (code != CODE_OK || index + 1 == s->segments->count)
        end_call(s, frame, code == CODE_DEVICE || code == CODE_INTERNAL);
    return code;
}

/* --- sessions ----------------------------------------------------------------------------------------------------- */
static Code copy_options(Context *ctx, NpuSession *s, const SessionOptions *options) {
    char *text;
    s->options = *options;
    TRY(arena_string(ctx, &s->memory, options->config ? options->config : "", &text));
    s->options.config = text;
    if (options->cache_dir) {
        TRY(arena_string(ctx, &s->memory, options->cache_dir, &text));
        s->options.cache_dir = text;
    }
    if (options->n_blobs) {
        NpuBlob *blobs;
        TRY(ARENA_NEW(ctx, &s->memory, options->n_blobs, &blobs));
        memcpy(blobs, options->blobs, options->n_blobs * sizeof *blobs);
        s->options.blobs = blobs;
    }
    if (s->options.threads < 1) s->options.threads = 1;
    return CODE_OK;
}

Code npu_session_create(Context *ctx, NpuDevice *device, const Npuir *ir, const Segments *segments,
                        const SessionOptions *options, NpuSession **out) {
    Arena memory;
    NpuSession *s;
    *out = NULL;
    arena_init(&memory);
    Code code = ARENA_NEW(ctx, &memory, 1, &s);
    if (code != CODE_OK) {
        arena_destroy(&memory);
        return code;
    }
    s->memory = memory;
    s->backend = (Backend){frame_create, frame_destroy, run};
    s->ir = ir;
    s->segments = segments;
    s->device = npu_device_ref(device);
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->upgrading, NULL);
    code = copy_options(ctx, s, options);
    if (code == CODE_OK) code = tier_create(ctx, device, ir, segments, &s->options, s->options.plan.fold, &s->tier);
    if (code == CODE_OK)
        *out = s;
    else
        npu_session_destroy(s);
    return code;
}

void npu_session_destroy(NpuSession *s) {
    if (!s) return;
    while (s->frames) frame_destroy(&s->backend, s->frames);
    if (s->tier) tier_unref(s->tier);
    npu_device_unref(s->device);
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->upgrading);
    Arena memory = s->memory; /* which holds `s` itself */
    arena_destroy(&memory);
}

Backend *npu_session_backend(NpuSession *s) { return &s->backend; }

/* Makes `tier` the session's, and takes the bodies of idle frames. */
static void swap_tier(NpuSession *s, Tier *tier, Body **idle, Tier **old) {
    pthread_mutex_lock(&s->lock);
    *old = s->tier;
    s->tier = tier;
    for (NpuFrame *frame = s->frames; frame; frame = frame->next) {
        if (frame->busy || !frame->body) continue;
        frame->body->next = *idle;
        *idle = frame->body;
        frame->body = NULL;
    }
    pthread_mutex_unlock(&s->lock);
}

static Code upgrade(Context *ctx, NpuSession *s) {
    Tier *tier, *old;
    Body *idle = NULL;
    if (s->tier->number == 1) return CODE_OK; /* only an upgrade changes it, and there is one at a time */
    TRY(tier_create(ctx, s->device, s->ir, s->segments, &s->options, FOLD_CONSTANT, &tier));
    swap_tier(s, tier, &idle, &old);
    while (idle) {
        Body *next = idle->next;
        body_destroy(idle);
        idle = next;
    }
    tier_unref(old);
    return CODE_OK;
}

Code npu_session_upgrade(Context *ctx, NpuSession *s) {
    pthread_mutex_lock(&s->upgrading);
    Code code = upgrade(ctx, s);
    pthread_mutex_unlock(&s->upgrading);
    return code;
}

static Code visit_blobs(Context *ctx, const Tier *tier, const char *cache_dir, BlobVisit visit, void *user) {
    for (uint32_t i = 0; i < tier->plan->n_blocks; i++) {
        NpuBlob blob;
        void *own;
        TRY(npu_graph_blob(ctx, tier->graphs[i], cache_dir, &blob, &own));
        Code code = blob.data ? visit(ctx, user, &blob) : CODE_OK;
        free(own);
        TRY(code);
    }
    return CODE_OK;
}

Code npu_session_blobs(Context *ctx, NpuSession *s, BlobVisit visit, void *user, uint32_t *tier, uint32_t *graphs) {
    Tier *now = current_tier(s); /* an upgrade meanwhile leaves it alone */
    *tier = now->number;
    *graphs = now->plan->n_blocks;
    Code code = visit_blobs(ctx, now, s->options.cache_dir, visit, user);
    tier_unref(now);
    return code;
}

void npu_session_report(NpuSession *s, SessionReport *out) {
    pthread_mutex_lock(&s->lock);
    *out = s->tier->report;
    pthread_mutex_unlock(&s->lock);
}
