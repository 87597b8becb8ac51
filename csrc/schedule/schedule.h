/* Device-affinity scheduling: an order of the instructions with few changes of device. Then groups that run together.
 */
#ifndef FORGE_SCHEDULE_SCHEDULE_H
#define FORGE_SCHEDULE_SCHEDULE_H

#include "npuir/npuir.h"

typedef struct ScheduleReport {
    /* changes of device along the order; entering and leaving the NPU count */
    uint32_t transitions_before, transitions_after;
    uint32_t groups, grouped; /* sets of instructions that run together; their instructions */
} ScheduleReport;
/* Sets ir->order to a topological order; host calls with effects keep their relative order. Never worse than program
 * order. */
MUST_USE Code schedule_plan(Context *ctx, Npuir *ir, ScheduleReport *report);
/* Numbers Instr.group and brings members together; after schedule_plan. */
MUST_USE Code group_plan(Context *ctx, Npuir *ir, ScheduleReport *report);
uint32_t schedule_transitions(const Npuir *ir, const uint32_t *order);

#endif
