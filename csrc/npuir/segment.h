/* Segments: what an accelerator runs in one go. A segment is a maximal run of instructions on the NPU in ir->order. */
#ifndef FORGE_NPUIR_SEGMENT_H
#define FORGE_NPUIR_SEGMENT_H

#include "npuir/npuir.h"

typedef struct Segment {
    uint32_t first, count; /* ir->order[first .. first + count) */
    /* Memory that crosses the border, a register a buffer: the one that its writer (or the graph input) has, so it is
     * the whole buffer. Constants are not listed. In order of first use / of being written. */
    RegId *in;
    uint32_t n_in;
    RegId *out; /* read by an instruction after the segment, or a graph output */
    uint32_t n_out;
} Segment;

typedef struct Segments {
    Segment *items;
    uint32_t count;
} Segments;
/* For a scheduled program. A program without NPU instructions has none. */
MUST_USE Code segments_find(Context *ctx, Arena *arena, const Npuir *ir, Segments *out);

/* Who writes each buffer: the instruction's index (UINT32_MAX: nobody; inputs, constants) and the register that it
 * writes through (for inputs and constants: the register of their graph node). Arrays have ir->n_buffers entries. */
typedef struct Writers {
    uint32_t *instr;
    RegId *reg;
} Writers;
MUST_USE Code writers_find(Context *ctx, Arena *arena, const Npuir *ir, Writers *out);

#endif
