/* Offsets for blocks of memory with known lifetimes. Internal to alloc/. */
#ifndef FORGE_ALLOC_OFFSETS_H
#define FORGE_ALLOC_OFFSETS_H

#include "base/arena.h"

typedef struct Block {
    uint32_t first, last; /* positions in the schedule, both included */
    int64_t size;         /* > 0, a multiple of the alignment */
    int64_t offset;       /* set here */
} Block;
/* Gives each block an offset such that no two live ones overlap. Blocks come sorted by `first`, positions are below
 * `length`.
 * `*size`: bytes of the arena; `*bound`: the largest live set, which no plan can beat. */
MUST_USE Code assign_offsets(Context *ctx, Arena *scratch, Block *blocks, uint32_t n, uint32_t length, int64_t *size,
                             int64_t *bound);

#endif
