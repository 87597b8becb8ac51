/* Which device runs which node. Internal to npuir/. */
#ifndef FORGE_NPUIR_PLACE_H
#define FORGE_NPUIR_PLACE_H

#include "npuir/npuir.h"

typedef struct Placement {
    uint8_t *device;      /* Device of each node id */
    uint32_t transitions; /* of the best order for this placement */
} Placement;
MUST_USE Code place_nodes(Context *ctx, Arena *arena, const Graph *g, const Target *target, Placement *out);

double transition_cost(void); /* microseconds; cost.c */

#endif
