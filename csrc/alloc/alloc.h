/* Buffer allocation: liveness over the schedule, linear scan over one arena a memory space, in-place reuse. */
#ifndef FORGE_ALLOC_ALLOC_H
#define FORGE_ALLOC_ALLOC_H

#include "npuir/npuir.h"

typedef struct AllocReport {
    uint32_t virtual_buffers;  /* arena buffers before reuse (scratch excluded) */
    uint32_t physical_buffers; /* slots after it */
    double rho;                /* 1 - physical / virtual; 0 when there are none */
    int64_t arena_bytes;       /* all spaces */
    int64_t lower_bound_bytes; /* largest live set over the schedule, in-place and scratch included */
} AllocReport;
/* Sets offset and slot of every SPACE_ARENA buffer, `inplace` of instructions and ir->arena_bytes. Follows
 * ir->order. */
MUST_USE Code alloc_plan(Context *ctx, Npuir *ir, TraitsFn traits, AllocReport *report);
/* Independent proof of a plan: recomputes lifetimes from instructions and order alone and compares all pairs of arena
 * buffers that are live together, scratch and in-place included. CODE_INTERNAL with both buffers' names on a clash. */
MUST_USE Code alloc_check(Context *ctx, const Npuir *ir);

#endif
