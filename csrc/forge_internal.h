/* Shared by forge.c and forge_text.c only. */
#ifndef FORGE_FORGE_INTERNAL_H
#define FORGE_FORGE_INTERNAL_H

#include "forge.h"

MUST_USE Code program_create(Context *ctx, Program **out);
/* From the captured graph (in an arena that may be dropped afterwards) to the plan. `plan` false: stops after the
 * passes. */
MUST_USE Code program_build(Context *ctx, Program *program, Graph *captured, const CompileOptions *options, bool plan);

#endif
