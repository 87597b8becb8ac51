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

/* Whether a caller may hand in the memory of graph input `input` for graph output `output` too, so that the output is
 * written over the input (a cache that is updated). All that reads the input must have run when the output is written;
 * the instruction that writes it may read the input only as kernels do that work in place. Follows ir->order. False
 * where a segment of an NPU follows, since a call is made again when the device is lost, and for memory that host calls
 * see, which may keep it. With memory of its own for the output the program works all the same. */
bool alloc_may_share(const Npuir *ir, TraitsFn traits, uint32_t input, uint32_t output);
/* Independent proof of that: follows the shared memory through the schedule. CODE_INTERNAL if an instruction reads what
 * has been written over. */
MUST_USE Code alloc_check_shared(Context *ctx, const Npuir *ir, uint32_t input, uint32_t output);

#endif
