/* The emitter's inside: what the files that write operators (emit_elementwise.c, emit_move.c, emit_reduce.c,
 * emit_linear.c ...) use. Internal to npu/.
 *
 * A graph of OpenVINO layers is built first and written as xml at the end, so layers that nothing reads cost nothing. A
 * Wire is one output of a layer, with its type.
 *
 * Types: all float values of the graph (f16, bf16 and f32) have the one type `e->real`, f16 or f32
 * (EmitOptions.f32_weights); bool is boolean; i8 and u8 stay. Memory is row major in the logical order of dimensions.
 *
 * An operator is written by an EmitFn: it fetches its operands (`emit_operand`: views and constants come out as wires),
 * adds layers, and names the wire of each result (`emit_result`). NaN is carried through arithmetic; operators that
 * pick one of two values (minimum, maximum, clamp, relu) may drop it on the device. */
#ifndef FORGE_NPU_EMIT_H
#define FORGE_NPU_EMIT_H

#include "graph/program.h"
#include "npu/npu.h"

typedef enum Element {
    ELEMENT_BOOL,
    ELEMENT_I4,
    ELEMENT_U8,
    ELEMENT_I8,
    ELEMENT_I32,
    ELEMENT_I64,
    ELEMENT_F16,
    ELEMENT_F32,
} Element;

typedef uint32_t Wire;
enum { WIRE_NONE = UINT32_MAX };

typedef struct WireType {
    Element element;
    uint8_t rank;
    int64_t shape[MAX_RANK];
} WireType;

typedef struct Emitter Emitter;
struct Emitter {
    Context *ctx;
    Arena *arena;   /* of the model */
    Arena *scratch; /* of the emission */
    const Npuir *ir;
    const Graph *g;
    const NpuBlock *block;
    const EmitOptions *options;
    Element real;       /* ELEMENT_F16 or ELEMENT_F32 */
    const Instr *instr; /* being written: layers take its name and source */
    Wire *wires;        /* of each graph value, WIRE_NONE before */
    bool *is_argument;  /* of each graph constant */
    struct Layers *layers;
};

/* --- layers (emit_layers.c) ------------------------------------------------------------------------------------------
 * Attributes are given as the xml text of <data>, printf style: "axis=\"%d\"". `opset` is that of the operator's
 * version. Results are `n_out` consecutive wires from `*out`. */
MUST_USE Code emit_layer(Emitter *e, const char *type, int opset, const Wire *in, size_t n_in, const WireType *types,
                         size_t n_out, Wire *out, const char *format, ...) PRINTF_LIKE(9, 10);
const WireType *wire_type(const Emitter *e, Wire wire); /* valid until the next layer is added: copy it */

/* Constants. A wire of the same constant is made once. */
MUST_USE Code emit_literal(Emitter *e, const WireType *type, const void *data, size_t bytes, Wire *out); /* copied */
MUST_USE Code emit_ints(Emitter *e, const int64_t *items, size_t count, Wire *out); /* i64, rank 1 */
MUST_USE Code emit_number(Emitter *e, double value, Wire *out);                     /* e->real, rank 0 */
MUST_USE Code emit_numbers(Emitter *e, const double *values, uint8_t rank, const int64_t *shape, Wire *out);
/* The same as an argument of the graph, which is given these numbers at each call. */
MUST_USE Code emit_numbers_argument(Emitter *e, const double *values, uint8_t rank, const int64_t *shape, Wire *out);
MUST_USE Code emit_bool(Emitter *e, bool value, Wire *out); /* rank 0 */
/* What lies in the weights file, or an argument if the source's constant is one of block->weights. The element type
 * follows from source->dtype and ->i4; source->bytes is filled in. */
MUST_USE Code emit_source(Emitter *e, const WeightSource *source, Wire *out);
/* The same as an argument of the model in any case, for what the compiler takes better so. */
MUST_USE Code emit_argument(Emitter *e, const WeightSource *source, Wire *out);

/* Common operators. Operands broadcast as numpy's; types of results follow from the operands. */
MUST_USE Code emit_unary(Emitter *e, const char *type, int opset, Wire x, Wire *out);
MUST_USE Code emit_binary(Emitter *e, const char *type, int opset, Wire a, Wire b, Wire *out);
MUST_USE Code emit_binary_number(Emitter *e, const char *type, Wire a, double b, Wire *out); /* opset1 */
MUST_USE Code emit_compare(Emitter *e, const char *type, Wire a, Wire b, Wire *out);         /* boolean result */
MUST_USE Code emit_select(Emitter *e, Wire condition, Wire a, Wire b, Wire *out);
MUST_USE Code emit_convert(Emitter *e, Wire x, Element element, Wire *out); /* x itself if it has that type */
MUST_USE Code emit_reshape(Emitter *e, Wire x, uint8_t rank, const int64_t *shape, Wire *out); /* x itself if equal */
MUST_USE Code emit_transpose(Emitter *e, Wire x, const int64_t *dims, Wire *out);
MUST_USE Code emit_broadcast(Emitter *e, Wire x, uint8_t rank, const int64_t *shape, Wire *out);
MUST_USE Code emit_slice(Emitter *e, Wire x, int64_t dim, int64_t start, int64_t end, int64_t step, Wire *out);
MUST_USE Code emit_concat(Emitter *e, const Wire *parts, size_t count, int64_t dim, Wire *out);
/* "ReduceSum", "ReduceMean", "ReduceMax", ... */
MUST_USE Code emit_reduce_dims(Emitter *e, const char *type, Wire x, const int64_t *dims, size_t n_dims, bool keep,
                               Wire *out);

/* --- values (emit_value.c) -----------------------------------------------------------------------------------------
 */
/* The wire of a graph value: made before, a port, a constant, or a view of one of these. */
MUST_USE Code emit_value(Emitter *e, ValueId value, Wire *out);
/* Whether emit_value has a way to it in this block. */
bool emit_reaches(const Emitter *e, ValueId value);
/* Operand k of the instruction being written; WIRE_NONE if it is absent. */
MUST_USE Code emit_operand(Emitter *e, uint32_t k, Wire *out);
/* The same, but an operand that is only `expand`ed may come unexpanded: for operators that broadcast by themselves. */
MUST_USE Code emit_operand_small(Emitter *e, uint32_t k, Wire *out);
/* The wire of result k. Its shape must be that of the graph's value (of a head's tile but for the last size). */
MUST_USE Code emit_result(Emitter *e, uint32_t k, Wire wire);
/* True if the value is a constant, or a view of one that strides express: `out` is filled as WEIGHT_VALUES in the type
 * that the value has on the device. Change its part and dtype (or shape: a tile) and pass it to emit_source. */
bool emit_is_constant(const Emitter *e, ValueId value, WeightSource *out);
/* The shape and type that a graph value has on the device. */
WireType emit_value_type(const Emitter *e, ValueId value);
Element emit_element(const Emitter *e, DType dtype);

/* --- elementwise (emit_elementwise.c) ------------------------------------------------------------------------------
 */
/* One step on wires; `in` as many as the step has operands. */
MUST_USE Code emit_step(Emitter *e, const Step *step, const Wire *in, Wire *out);
/* The epilogue of the instruction being written, if it has one: `fixed` is how many operands are the contraction's own.
 */
MUST_USE Code emit_epilogue(Emitter *e, uint32_t fixed, Wire product, Wire *out);

/* --- operators: the table is in emit_table.c -------------------------------------------------------------------------
 */
typedef Code (*EmitFn)(Emitter *e);
EmitFn emit_fn(Op op); /* NULL: emit_reason says why */

Code emit_elementwise_node(Emitter *e); /* any ELEMENTWISE operator, and `elementwise` */
Code emit_reduction(Emitter *e);        /* emit_reduce.c */
Code emit_contiguous(Emitter *e);       /* emit_move.c, as those below */
Code emit_cat(Emitter *e);
Code emit_pad(Emitter *e);
Code emit_flip(Emitter *e);
Code emit_triangle(Emitter *e);
Code emit_full(Emitter *e);
Code emit_arange(Emitter *e);
Code emit_slice_scatter(Emitter *e);
Code emit_linear(Emitter *e); /* emit_linear.c, emit_attention.c, emit_norm.c, as those below */
Code emit_matmul(Emitter *e);
Code emit_attention(Emitter *e);
Code emit_conv(Emitter *e);
Code emit_layer_norm(Emitter *e);
Code emit_rms_norm(Emitter *e);
Code emit_group_norm(Emitter *e);
Code emit_rope(Emitter *e);
Code emit_softmax(Emitter *e); /* log_softmax too */
Code emit_gelu(Emitter *e, Wire x, bool approximate, Wire *out);

/* --- writing (emit_xml.c) ------------------------------------------------------------------------------------------
 */
MUST_USE Code emit_parameter(Emitter *e, const WireType *type, Wire *out); /* activations, in order */
MUST_USE Code emit_model_result(Emitter *e, Wire wire);                    /* in order */
MUST_USE Code emit_finish(Emitter *e, NpuModel *model); /* xml, pieces, offsets, args of what is alive */

typedef struct Layer {
    const char *type, *name, *data;
    uint8_t opset;
    uint32_t n_in, n_out;
    const Wire *in;
    Wire first_out;
    uint32_t piece; /* Constant: index of its source; Parameter of a weight: of its argument; else UINT32_MAX */
    bool alive;
    uint32_t id; /* in the file */
} Layer;
typedef struct WireInfo {
    uint32_t layer, port;
    WireType type;
} WireInfo;
typedef struct SourceWire {
    WeightSource source;
    Wire wire;
} SourceWire;
typedef struct Layers {
    Layer *items;
    uint32_t count, cap;
    WireInfo *wires;
    uint32_t n_wires, cap_wires;
    SourceWire *pieces, *args; /* each once */
    uint32_t n_pieces, cap_pieces, n_args, cap_args;
    Wire *inputs, *outputs; /* of the model; as many as the block has */
    uint32_t n_inputs, n_outputs;
} Layers;
const char *element_xml(Element element, bool port); /* "f16", of ports "FP16" */

#endif
