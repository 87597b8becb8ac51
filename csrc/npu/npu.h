/* The NPU room: NPUIR to OpenVINO models (emit*.c), repeated blocks (plan.c), Level Zero (device.h), and the session
 * that runs segments on a device (session.c).
 *
 *   segment of NPUIR ── plan.c ──► blocks (distinct graphs) and calls of them
 *   block ── emit.c ──► OpenVINO IR: xml, and what its constants are made from
 *   session.c: compiles the blocks on the device, fills weights, keeps command lists, runs
 *
 * A graph value is either read from outside of a block (a port), made inside, or a constant of the model. Views of the
 * graph (reshape, permute, slice, expand, `contiguous` that lowering skipped) have no instruction; the emitter writes
 * them as OpenVINO operators where they are read. */
#ifndef FORGE_NPU_NPU_H
#define FORGE_NPU_NPU_H

#include "exec/backend.h"
#include "npu/hash.h"
#include "npuir/segment.h"

typedef enum Precision {
    PRECISION_FP16,  /* weights and activations f16 */
    PRECISION_W8A16, /* weights of linear: int8, symmetric, a scale a output channel; activations f16 */
    PRECISION_W4A16, /* the same with int4 */
} Precision;
const char *precision_name(Precision precision);            /* "fp16", "w8a16", "w4a16" */
bool precision_from_name(const char *name, Precision *out); /* false: unknown */

/* --- plan.c: blocks and calls --------------------------------------------------------------------------------------
 */

/* Memory at the border of a block: row major, in the order of `value`'s dimensions. */
typedef struct Port {
    ValueId value; /* of the block's first call; the calls have their own */
    DType dtype;   /* on the device: f16 or f32 for floats (EmitOptions), bool, i8 ... for the rest */
    uint8_t rank;
    int64_t shape[MAX_RANK]; /* a head's output has the tile's columns in its last dimension */
    int64_t bytes;
} Port;

/* A distinct graph. Its instructions are those of its first call. */
typedef struct NpuBlock {
    const uint32_t *instrs; /* indices into ir->instrs, in execution order */
    uint32_t n_instrs;
    RegId *in, *out; /* whole-buffer registers (as Segment.in) of the first call */
    uint32_t n_in, n_out;
    /* Constants that are arguments because they differ between the calls; all others lie in the graph. */
    uint32_t *weights; /* indices into graph->constants, of the first call */
    uint32_t n_weights;
    /* A head (one linear whose result only the host reads) cut into equal column tiles; 0: not a tile. */
    int64_t columns;
    int64_t first_column; /* of a tile whose weights lie in the graph */
    uint32_t n_calls;
} NpuBlock;

typedef struct NpuCall {
    uint32_t block;
    RegId *in, *out;      /* as many as the block has */
    uint32_t *weights;    /* constants */
    int64_t first_column; /* of a head's tile; the last one may overlap the one before */
} NpuCall;

typedef struct NpuPlan {
    const Npuir *ir;
    Segments segments; /* as given */
    NpuBlock *blocks;
    uint32_t n_blocks;
    NpuCall *calls; /* segment s: calls[first_call[s] .. first_call[s + 1]), to run in this order */
    uint32_t n_calls;
    uint32_t *first_call; /* segments.count + 1 */
} NpuPlan;

typedef enum Fold {
    FOLD_NEVER,  /* one block a segment, all its constants in the graph */
    FOLD_ALWAYS, /* equal stretches are calls of one block, constants that differ are arguments */
    FOLD_CUT,    /* the same stretches, but all constants in the graph: calls share one only if all theirs are equal */
    FOLD_CONSTANT, /* constants in the graph, the faster way: CUT where the repeated blocks are large, else NEVER */
} Fold;
bool fold_from_name(const char *name, Fold *out); /* "never", "always", "cut", "constant"; false: unknown */
typedef struct PlanOptions {
    Fold fold;
    Precision precision;
    int64_t head_columns; /* tiles of a head are at most that wide; 0: default */
    int64_t cut_bytes;    /* CONSTANT: weights that make a repeated block a large one; 0: default */
} PlanOptions;
MUST_USE Code npu_plan(Context *ctx, Arena *arena, const Npuir *ir, const Segments *segments,
                       const PlanOptions *options, NpuPlan **out);

/* --- emit.c: a block as OpenVINO IR ---------------------------------------------------------------------------------
 */

/* Ways to write the same computation, chosen by measuring with Intel's compiler: see benchmarks/npu_forms.py. */
enum {
    FORM_SDPA = 1 << 0,            /* attention as one ScaledDotProductAttention; else MatMul, Add, SoftMax, MatMul */
    FORM_STACKED_QUERIES = 1 << 1, /* grouped queries: heads of a group along the sequence, no repeated K and V */
    FORM_MVN = 1 << 2,             /* layer_norm by MVN; else by means */
    FORM_SPLIT_N = 1 << 3,         /* q, k and v of one projection as contractions of their own */
    FORM_SPLIT_K = 1 << 4,         /* a contraction over a long K as two that are added */
    FORM_FUSE_PAIR = 1 << 7,       /* gate and up of a wide feed-forward as one contraction, unless folded */
    FORM_MASK_ARGUMENT = 1 << 6,   /* known masks as arguments: as constants they are expanded to a mask a head */
    FORM_SIGNED_SIN = 1 << 5,      /* rotary embedding: the signs of the rotation in sin, so that the compiler does not
                                    * make its own operator of it; that one fails for two heads on NPU3720 */
    FORM_JOINED_SCORES = 1 << 8,   /* attention to two tensors of keys one behind the other (a cache and its new rows):
                                    * the scores are joined, not the keys and values */
};

typedef struct EmitOptions {
    const Target *target;
    Precision precision;
    bool f32_border;  /* float ports are f32 (the device converts); else f16 */
    bool f32_weights; /* float constants are f32 (what the software NPU can be exact with); else f16 */
    uint32_t forms;
} EmitOptions;
uint32_t emit_default_forms(const Target *target, Precision precision);

/* What one constant or weight argument is made from. */
typedef enum WeightPart {
    WEIGHT_VALUES, /* as dtype: cast from the constant's own type; i8, i4: quantised a output channel (row of [N, K]) */
    WEIGHT_SCALES, /* the scales of that quantisation, [N, 1], in dtype; shape and strides are still the weight's */
    WEIGHT_BYTES,  /* `literal`: bytes made by the emitter (shapes, axes, scalars) */
} WeightPart;
typedef struct WeightSource {
    WeightPart part;
    uint32_t constant; /* index into graph->constants */
    bool i4;           /* VALUES: two a byte, low half first; dtype is U8 then. SCALES: those of int4 */
    DType dtype;
    uint8_t rank;
    int64_t shape[MAX_RANK], strides[MAX_RANK]; /* logical view of the constant's memory (in elements): views of
                                                 * constants (permute, reshape, slice) need no operator */
    int64_t offset;                             /* elements from constant.data */
    const void *literal;
    int64_t bytes; /* what weight_fill writes */
} WeightSource;
/* Writes source->bytes row-major bytes. `constant` UINT32_MAX takes source->constant, else that one in its place (the
 * same weight of another call). `column` is added to the first row of [N, ..] (a tile of a head). Threads may call at
 * once. */
MUST_USE Code weight_fill(Context *ctx, const Graph *g, const WeightSource *source, uint32_t constant, int64_t column,
                          void *out);

typedef struct NpuModel {
    Text xml;
    /* The weights file: piece i at offset[i], 64-byte aligned. */
    WeightSource *pieces;
    int64_t *offsets;
    uint32_t n_pieces;
    int64_t bin_bytes;
    /* Parameters: n_in activations as block->in, then n_args weights (or bytes made by the emitter: masks); Results as
     * block->out. */
    Port *in, *out;
    uint32_t n_in, n_out;
    WeightSource *args; /* weight arguments in order of Parameters after the activations; args[i].constant is one of
                         * block->weights, unless its part is WEIGHT_BYTES */
    uint32_t n_args;
} NpuModel;
/* Names in the xml: Parameters "in0".., "w0".., Results "out0"..; other layers are named after their operator and
 * source line, so that the compiler's messages name the user's line. Memory from `arena`; xml is freed by
 * npu_model_destroy. */
MUST_USE Code npu_emit(Context *ctx, Arena *arena, const Npuir *ir, const NpuBlock *block, const EmitOptions *options,
                       NpuModel **out);
void npu_model_destroy(NpuModel *model); /* the text; the rest is the arena's */
/* Writes model->bin_bytes of the weights file. */
MUST_USE Code npu_model_bin(Context *ctx, const Graph *g, const NpuModel *model, void *out);
/* NULL when an operator can be written, else the reason (static text); the capability table asks the same. */
const char *emit_reason(Op op);

/* --- session.c: a program on a device --------------------------------------------------------------------------------
 */
typedef struct NpuDevice NpuDevice; /* device.h */
typedef struct NpuSession NpuSession;
typedef struct NpuBlob NpuBlob;

typedef struct SessionOptions {
    PlanOptions plan;
    EmitOptions emit;
    const char *config;    /* options for the compiler: 'KEY="VALUE" ...' or "" */
    const char *cache_dir; /* NULL: no blob cache */
    const NpuBlob *blobs;  /* compiled graphs that are there already; what they point to must outlive the session */
    uint32_t n_blobs;
    int threads; /* how many blocks are compiled at once */
} SessionOptions;

typedef struct SessionReport {
    uint32_t tier; /* 0: folded graphs, 1: constant weights */
    uint32_t n_segments, n_blocks, n_calls;
    uint32_t blob_hits, cache_hits, compiled; /* blocks: from options.blobs, from the cache, neither */
    uint32_t blobs_refused;                   /* of options.blobs, by the driver or since its arguments are others */
    uint32_t refused;                         /* an NpuReason for one of them */
    double emit_ms, compile_ms, weights_ms;   /* of the current tier */
    int64_t blob_bytes, weight_bytes;         /* compiled graphs; weights as arguments */
} SessionReport;

/* Plans, emits and compiles. `ir`, its graph and constants are borrowed and must outlive the session; `segments` too.
 */
MUST_USE Code npu_session_create(Context *ctx, NpuDevice *device, const Npuir *ir, const Segments *segments,
                                 const SessionOptions *options, NpuSession **out);
void npu_session_destroy(NpuSession *session);
Backend *npu_session_backend(NpuSession *session);
/* The second tier: compiles the unfolded graphs and swaps them in for calls that begin afterwards. From any thread,
 * while calls run. Nothing changes if it fails. */
MUST_USE Code npu_session_upgrade(Context *ctx, NpuSession *session);
void npu_session_report(NpuSession *session, SessionReport *out);
/* `visit` sees the compiled graphs of the present tier, those that are to be had (npu_graph_blob); *tier and *graphs
 * say which tier that is, and how many it has. From any thread. */
typedef Code (*BlobVisit)(Context *ctx, void *user, const NpuBlob *blob);
MUST_USE Code npu_session_blobs(Context *ctx, NpuSession *session, BlobVisit visit, void *user, uint32_t *tier,
                                uint32_t *graphs);

#endif
