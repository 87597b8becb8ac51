/* The interface between the executor and an accelerator: it runs whole segments. */
#ifndef FORGE_EXEC_BACKEND_H
#define FORGE_EXEC_BACKEND_H

#include "npuir/segment.h"

typedef struct Backend Backend;
struct Backend {
    /* What one call in flight needs (command lists, staging memory); one a frame of the executor. */
    Code (*frame_create)(Context *ctx, Backend *self, void **frame);
    void (*frame_destroy)(Backend *self, void *frame);
    /* Runs segment `index` and waits for it. in[k] / out[k] are host memory of Segment.in[k] / .out[k], with strides.
     * The segments of a call run in order on one frame, so a value that an earlier segment of the call made or got may
     * still be on the device: the backend then moves nothing. out[k].data is always there, though a value that only
     * later segments read need not be written to it. Memory of `out` may be memory of `in`, whose value is dead by
     * then: all of `in` must be read before any of `out` is written. Called with the GIL released, from any thread, one
     * at a time a frame. */
    Code (*run)(Context *ctx, Backend *self, void *frame, uint32_t index, const Tensor *in, const Tensor *out);
};

#endif
