/* NPUIR: typed instructions over virtual registers, a device on each instruction.
 *
 * A register is a strided view of a buffer. View operators of the graph lower to registers without an instruction
 * wherever strides allow, so what is listed here is what really runs. Buffers are what allocation places. */
#ifndef FORGE_NPUIR_NPUIR_H
#define FORGE_NPUIR_NPUIR_H

#include "graph/graph.h"

typedef enum Device { DEVICE_CPU, DEVICE_NPU, DEVICE_COUNT } Device;
const char *device_name(Device device);

typedef uint32_t RegId;
typedef uint32_t BufferId;
enum { REG_NONE = UINT32_MAX, BUFFER_NONE = UINT32_MAX };

typedef enum Space {
    SPACE_ARENA,    /* planned memory of the device that makes it; `offset` in the arena of `device` */
    SPACE_CONSTANT, /* graph constant `index` */
    SPACE_INPUT,    /* caller's tensor `index`, row major */
    SPACE_OUTPUT,   /* caller's output `index`, row major; written directly by the instruction that makes it */
    SPACE_HOST,     /* result of a host call, row major: adopted from the host at run time, `index` counts them */
    SPACE_OBJECT,   /* opaque host object, no memory; `index` in the object table */
} Space;

typedef struct Buffer {
    Space space;
    Device device; /* whose arena */
    uint32_t index;
    int64_t bytes;
    /* filled by alloc/ : */
    int64_t offset; /* in the arena, 64-byte aligned; -1 before */
    uint32_t slot;  /* physical buffer number; registers that share it share memory over time */
} Buffer;

typedef struct Register {
    DType dtype;
    uint8_t rank;
    const int64_t *shape, *strides; /* elements */
    int64_t offset;                 /* elements from the buffer's start */
    BufferId buffer;
    ValueId value; /* graph value it stands for */
    bool view;     /* made by no instruction: a view of another register */
} Register;

typedef struct Instr {
    Op op;
    Device device;
    uint32_t n_in, n_out;
    RegId *in;  /* REG_NONE for an absent operand */
    RegId *out; /* REG_NONE for a result that nothing uses and need not be written (result 1 of norms, host results) */
    const Node *node;      /* attributes and source; borrowed from the graph that was lowered. Never NULL: a copy that
                            * lowering inserts has a `contiguous` node of its own */
    int64_t scratch_bytes; /* working memory of the kernel; a buffer of its own, live during this instruction only */
    BufferId scratch;      /* BUFFER_NONE if none */
    bool inplace;          /* alloc/ : result 0 lives in the memory of operand `inplace_operand` */
    uint32_t inplace_operand;
    int64_t columns; /* of the result, that a part of the work makes; for results of one width equal numbers mean equal
                      * parts; 0: it is not to run beside others */
    uint32_t group;  /* schedule/ : neighbours in the order with the same number run together; 0: alone */
} Instr;

typedef struct Npuir {
    Arena *arena;
    const Graph *graph; /* borrowed, outlives this */
    Instr *instrs;
    uint32_t n_instrs;
    Register *regs;
    uint32_t n_regs;
    Buffer *buffers;
    uint32_t n_buffers;
    RegId *inputs;  /* one a graph input (opaque ones: SPACE_OBJECT); REG_NONE if the graph has no node for it */
    RegId *outputs; /* one a graph output: a register whose buffer is SPACE_OUTPUT (or OBJECT for opaque outputs) */
    uint32_t n_inputs, n_outputs;
    uint32_t n_host, n_objects;
    char target[16]; /* "cpu", "npu3720", ... */
    /* schedule/ and alloc/ fill: */
    uint32_t *order; /* instruction indices in execution order; identity after lowering */
    int64_t arena_bytes[DEVICE_COUNT];
} Npuir;

/* --- what a target can do (capability.c) -------------------------------------------------------------------------- */
typedef struct Target {
    const char *name; /* "cpu", "npu3720", "npu4000", "npu5010" */
    bool npu;
} Target;
const Target *target_find(const char *name);
/* NULL if there are nodes with this operator that the NPU takes, else the reason (static text). */
const char *npu_op_reason(Op op);
/* NULL when `device` of the target takes the node, else the reason (static text). */
const char *capability(const Target *target, Device device, const Graph *g, const Node *node);

/* A scalar of the operator as an NPU has it, before it is rounded to f16. Finite numbers beyond f16's range are
 * infinite to comparisons, the largest number as limits, and F16_SUBSTITUTE to arithmetic. Numbers that f16 would round
 * to zero guard divisions, as in x / (sum + 1e-9): limits are F16_LEAST_NORMAL, terms, divisors and what is compared
 * with F16_LEAST; factors become zero. */
double npu_scalar(Op op, double value);

/* What lowering must know of the host kernels; a column filled by cpu/ and handed in by forge.c. */
typedef struct KernelTraits {
    uint32_t contiguous; /* bit k: operand k must be row major (a copy is inserted where it is not) */
    uint32_t unit_inner; /* bit k: operand k needs unit stride in its last dimension, one row stride over the others */
    uint32_t inplace;    /* bit k: result 0 may overwrite operand k when both have the same dtype, shape and strides */
    bool strided_out;    /* may write result 0 through strides */
} KernelTraits;
/* Bits stand for operands 0..30; bit 31 for all after them. */
static inline bool trait_bit(uint32_t bits, uint32_t operand) { return bits >> (operand < 31 ? operand : 31) & 1; }
typedef KernelTraits (*TraitsFn)(Op op);
typedef int64_t (*ScratchFn)(const Graph *g, const Node *node, int threads); /* bytes */
typedef int64_t (*ColumnsFn)(const Graph *g, const Node *node);              /* Instr.columns */

typedef struct LowerOptions {
    const Target *target;
    TraitsFn traits;
    ScratchFn scratch;
    ColumnsFn columns; /* may be NULL */
    int threads;
    bool npu_on_host; /* NPU instructions will run on host kernels too (emulation): traits and scratch bind them */
} LowerOptions;
MUST_USE Code npuir_lower(Context *ctx, Arena *arena, const Graph *g, const LowerOptions *options, Npuir **out);
MUST_USE Code npuir_verify(Context *ctx, const Npuir *ir);
/* schedule: in order, with offsets */
MUST_USE Code npuir_print(Context *ctx, const Npuir *ir, bool schedule, Text *text);
MUST_USE Code npuir_parse(Context *ctx, Arena *arena, const char *text, size_t size, Npuir **out);

enum { NPUIR_GROUP_MOST = 8 };
/* Instructions order[position .. end) run together; most often one. */
static inline uint32_t npuir_group_end(const Npuir *ir, const uint32_t *order, uint32_t position) {
    uint32_t group = ir->instrs[order[position]].group, end = position + 1;
    while (group && end < ir->n_instrs && ir->instrs[order[end]].group == group) end++;
    return end;
}
/* Whether operand k may be the result of a sibling in the group: read element by element by an epilogue of the same
 * operator, so that columns of the result need only the same columns of the sibling's. */
bool npuir_may_follow(const Npuir *ir, const Instr *instr, uint32_t k, const Instr *sibling);

/* --- cost model (cost.c): documented in ARCHITECTURE.md ----------------------------------------------------------- */
typedef struct Cost {
    double flops, bytes, launches, transitions;
    double score; /* weighted sum, microseconds by the model's constants */
} Cost;
Cost node_cost(const Graph *g, const Node *node, Device device);
MUST_USE Code graph_cost(Context *ctx, const Graph *g, const Target *target, Cost *out);

#endif
