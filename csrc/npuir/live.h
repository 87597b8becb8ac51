/* Lifetimes of buffers along ir->order. A view keeps the buffer that it looks into alive: lifetimes are of buffers. */
#ifndef FORGE_NPUIR_LIVE_H
#define FORGE_NPUIR_LIVE_H

#include "npuir/npuir.h"

enum { NEVER = UINT32_MAX };

typedef struct Lifetimes {
    uint32_t *first, *last; /* of each buffer: positions in the order; first NEVER: no instruction touches it */
} Lifetimes;
/* Scratch lives during its instruction only. What a group touches lives through all of the group. The caller's memory
 * (inputs, outputs, constants) is listed too. */
MUST_USE Code npuir_lifetimes(Context *ctx, Arena *arena, const Npuir *ir, const uint32_t *order, Lifetimes *out);
/* live[p]: bytes of arena buffers that are live at position p of `order`, each rounded up to the arena's alignment;
 * without in-place reuse. Returned: the largest of them. */
MUST_USE Code npuir_live_bytes(Context *ctx, Arena *arena, const Npuir *ir, const uint32_t *order, int64_t *live,
                               int64_t *largest);

enum { ARENA_ALIGNMENT = 64 };
static inline int64_t arena_round(int64_t bytes) { return (bytes + ARENA_ALIGNMENT - 1) & -(int64_t)ARENA_ALIGNMENT; }

#endif
