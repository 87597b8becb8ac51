/* Shared by forge.c and forge_text.c only. */
#ifndef FORGE_FORGE_INTERNAL_H
#define FORGE_FORGE_INTERNAL_H

#include "forge.h"

double forge_now_ms(void);
MUST_USE Code program_create(Context *ctx, Program **out);
/* From the captured graph (in an arena that may be dropped afterwards) to the plan. `plan` false: stops after the
 * passes. */
MUST_USE Code program_build(Context *ctx, Program *program, Graph *captured, const CompileOptions *options, bool plan);

/* --- forge_quantise.c --------------------------------------------------------------------------------------------- */
/* Makes the values that the pass `quantise` has left to be made, in `program->graph`. */
MUST_USE Code program_quantise(Context *ctx, Program *program, const Quantisations *list, int threads);

/* --- forge_npu.c -------------------------------------------------------------------------------------------------- */
/* The executor of a planned program, with what its NPU instructions need: nothing, emulation, or a session on a device.
 */
MUST_USE Code program_executor(Context *ctx, Program *program, const Target *target, const CompileOptions *options);
void program_close_device(Program *program); /* after the executor */

#endif
