/* The typed operator graph: SSA values, nodes in a doubly linked list that is always in topological order.
 *
 * Passes edit in place: relink operands, insert nodes, redirect a value to another (`graph_replace`), then
 * `graph_compact` resolves the redirections and drops the nodes that are marked dead. Memory comes from the
 * compilation's arena. */
#ifndef FORGE_GRAPH_GRAPH_H
#define FORGE_GRAPH_GRAPH_H

#include "base/arena.h"
#include "base/dtype.h"
#include "base/status.h"

/* --- operators ---------------------------------------------------------------------------------------------------- */
enum { ANY = 255 };
enum {
    ELEMENTWISE = 1 << 0,
    COMPARE = 1 << 1,
    VIEW = 1 << 2,
    CONTRACTION = 1 << 3,
    CREATE = 1 << 4,
    OPAQUE = 1 << 5,
    STRIDED_OUT = 1 << 6,
    FUSED = 1 << 7,
};

typedef enum Op {
#define OP(name, ...) OP_##name,
#include "graph/ops.def"
#undef OP
    OP_COUNT
} Op;

typedef enum AttrKind { KIND_INT, KIND_BOOL, KIND_FLOAT, KIND_SCALAR, KIND_INTS } AttrKind;
typedef enum AttrName {
    ATTR_END = 0, /* ends an operator's list */
#define ATTR(name, kind) ATTR_##name,
#include "graph/attrs.def"
#undef ATTR
    ATTR_COUNT
} AttrName;

enum { OP_MAX_ATTRS = 6 };
typedef struct OpInfo {
    const char *name;
    uint8_t min_operands, max_operands, results; /* ANY = unbounded */
    uint32_t flags;
    uint8_t n_attrs;
    uint8_t attrs[OP_MAX_ATTRS]; /* AttrName, in table order */
} OpInfo;
const OpInfo *op_info(Op op);
bool op_from_name(const char *name, size_t length, Op *out);
const char *attr_name(AttrName name);
AttrKind attr_kind(AttrName name);
static inline bool op_is(Op op, uint32_t flags) { return (op_info(op)->flags & flags) == flags; }

/* Operands of a contraction before those of its epilogue. */
static inline uint32_t contraction_operands(Op op) { return op == OP_matmul ? 2 : op == OP_linear ? 3 : 5; }

/* quantised_linear (ops.def): columns of a block of 4-bit weights, least size of a group; how many there are. */
enum { QUANTISED_BLOCK = 64, QUANTISED_GROUP = 32 };
static inline int64_t quantised_blocks(int64_t columns) { return (columns + QUANTISED_BLOCK - 1) / QUANTISED_BLOCK; }
static inline int64_t quantised_groups(int64_t columns, int64_t group) {
    return group == 0 || group >= columns ? 1 : (columns + group - 1) / group;
}

/* --- attributes --------------------------------------------------------------------------------------------------- */
typedef enum ScalarKind { SCALAR_NONE, SCALAR_INT, SCALAR_FLOAT } ScalarKind;
typedef struct Scalar {
    ScalarKind kind;
    union {
        int64_t i;
        double f;
    };
} Scalar;
static inline double scalar_f64(Scalar s) { return s.kind == SCALAR_INT ? (double)s.i : s.f; }
bool scalar_equal(Scalar a, Scalar b); /* bitwise: 0.0 and -0.0 differ, a NaN equals itself */

typedef struct Attr {
    union {
        int64_t i; /* INT, BOOL */
        double f;  /* FLOAT */
        Scalar s;  /* SCALAR */
        struct {
            const int64_t *items;
            uint32_t count;
        } ints;
    };
} Attr;

/* --- values and nodes --------------------------------------------------------------------------------------------- */
typedef uint32_t ValueId;
typedef uint32_t NodeId;
enum { VALUE_NONE = UINT32_MAX, NODE_NONE = UINT32_MAX };

typedef struct Value {
    DType dtype;
    uint8_t rank; /* objects: 0 */
    const int64_t *shape;
    NodeId def;      /* the node that makes it */
    uint32_t result; /* which of its results */
    ValueId forward; /* VALUE_NONE, or the value that takes its place (graph_replace) */
} Value;

typedef struct Node {
    Op op;
    uint32_t n_operands, n_results;
    ValueId *operands;    /* VALUE_NONE for an absent optional one */
    ValueId first_result; /* results are consecutive */
    Attr *attrs;          /* op_info(op)->n_attrs of them, in that order */
    int32_t source;       /* index into graph->sources, -1 unknown */
    NodeId prev, next;
    bool dead;
} Node;

typedef enum ConstantKind {
    CONSTANT_STATE,   /* parameter or buffer that the caller owns; borrowed; all is rebuilt when it has changed */
    CONSTANT_LITERAL, /* value known from the program: lifted tensors, folded results */
} ConstantKind;

typedef struct Constant {
    ConstantKind kind;
    const char *name; /* state: fully qualified name; literal: "" or a hint */
    void *data;       /* NULL: shape only (meta weights): can be planned, not run nor folded */
    bool derived;     /* literal made from state by folding or device-constant */
    DType dtype;
    uint8_t rank;
    const int64_t *shape, *strides; /* in elements */
    int64_t bytes;                  /* memory that it spans */
} Constant;

typedef struct Graph {
    Arena *arena; /* borrowed */
    Node *nodes;
    uint32_t n_nodes, cap_nodes; /* ids handed out; dead ones included until compaction */
    NodeId first, last;          /* list order */
    bool edited;                 /* nodes came, went or were replaced since the last compaction */
    Value *values;
    uint32_t n_values, cap_values;
    Constant *constants;
    uint32_t n_constants, cap_constants;
    ValueId *inputs; /* values of the `input` nodes, by input index */
    uint32_t n_inputs;
    ValueId *outputs;
    uint32_t n_outputs;
    const char **sources; /* "file.py:12 in forward" texts */
    uint32_t n_sources;
    const char **strings; /* host operator names */
    uint32_t n_strings;
} Graph;

static inline Node *graph_node(const Graph *g, NodeId id) { return &g->nodes[id]; }
static inline Value *graph_value(const Graph *g, ValueId id) { return &g->values[id]; }
static inline Node *value_node(const Graph *g, ValueId id) { return &g->nodes[g->values[id].def]; }
static inline ValueId node_result(const Node *n, uint32_t k) { return n->first_result + k; }
/* Iterates live nodes in order; the body may mark `n` dead and insert before or after it. */
#define GRAPH_EACH(g, id) for (NodeId id = (g)->first; id != NODE_NONE; id = (g)->nodes[id].next)

/* The attribute called `name`; the operator must have it. */
const Attr *node_attr(const Node *node, AttrName name);
Attr *node_attr_mut(Node *node, AttrName name);
bool node_has_attr(const Node *node, AttrName name);
static inline int64_t node_int(const Node *n, AttrName a) { return node_attr(n, a)->i; }
static inline double node_float(const Node *n, AttrName a) { return node_attr(n, a)->f; }

/* --- building and editing ----------------------------------------------------------------------------------------- */
MUST_USE Code graph_create(Context *ctx, Arena *arena, Graph **out);
/* Appends a node before `before` (NODE_NONE: at the end). Attributes start as zero / none / empty; operands are copied.
 * The results' types are given. `*out` is the node's id; pointers into graph->nodes and ->values move: fetch again. */
typedef struct Type {
    DType dtype;
    uint8_t rank;
    const int64_t *shape;
} Type;
MUST_USE Code graph_insert(Context *ctx, Graph *g, NodeId before, Op op, const ValueId *operands, size_t n_operands,
                           const Type *results, size_t n_results, int32_t source, NodeId *out);
/* Room for that many more at once; without it, insertion makes room as it goes. */
MUST_USE Code graph_reserve(Context *ctx, Graph *g, size_t n_nodes, size_t n_values);
MUST_USE Code graph_add_constant(Context *ctx, Graph *g, const Constant *constant, uint32_t *index);
static inline Type value_type(const Graph *g, ValueId v) {
    Type t = {g->values[v].dtype, g->values[v].rank, g->values[v].shape};
    return t;
}
MUST_USE Code attr_set_ints(Context *ctx, Graph *g, Attr *attr, const int64_t *items, size_t count); /* copies */
/* Copies. */
MUST_USE Code node_set_operands(Context *ctx, Graph *g, NodeId node, const ValueId *operands, size_t count);
/* From now on every use of `old` means `with` (same type). Takes effect at graph_compact; `graph_resolve` sees through
 * it. */
void graph_replace(Graph *g, ValueId old, ValueId with);
ValueId graph_resolve(const Graph *g, ValueId v);
void graph_kill(Graph *g, NodeId node); /* unlinks; its results must be unused or replaced by the time of compaction */
/* Resolves redirections, drops dead nodes, renumbers values and nodes densely in list order. Costs nothing where
 * nothing was edited. */
MUST_USE Code graph_compact(Context *ctx, Graph *g);
/* Deep copy into the same or another arena (constants' data stays borrowed). */
MUST_USE Code graph_clone(Context *ctx, const Graph *g, Arena *arena, Graph **out);
size_t graph_count(const Graph *g); /* nodes that are neither input nor constant: "nodes" in reports */

/* Users of each value, as rows: users[start[v] .. start[v + 1]) are node ids in list order, a node once a use; graph
 * outputs are counted in `output_uses`. Valid until the next edit. */
typedef struct Uses {
    const uint32_t *start;
    const NodeId *users;
    const uint32_t *output_uses;
} Uses;
MUST_USE Code graph_uses(Context *ctx, const Graph *g, Arena *arena, Uses *out);
static inline uint32_t use_count(const Uses *u, ValueId v) { return u->start[v + 1] - u->start[v] + u->output_uses[v]; }

/* --- checking and text -------------------------------------------------------------------------------------------- */
/* Shape rule of each operator: from operands and attributes to result types, `results[k].shape` arena-allocated.
 * Operators whose result is not determined (host, full, arange, input, constant, cast's dtype) take what the values
 * say. */
MUST_USE Code graph_infer(Context *ctx, const Graph *g, NodeId node, Type *results);
/* Everything that must hold: links, ids, order, arity, attributes, types against the shape rule, programs. */
MUST_USE Code graph_verify(Context *ctx, const Graph *g);
enum { MAX_PRINTED_ELEMENTS = 32 }; /* of a constant whose text carries its values */
/* Text form; `graph_parse` accepts what `graph_print` prints (constants up to MAX_PRINTED_ELEMENTS carry their values,
 * larger state and literals are "external" and get no data). See graph/text_print.c for the grammar. */
MUST_USE Code graph_print(Context *ctx, const Graph *g, Text *text);
MUST_USE Code graph_parse(Context *ctx, Arena *arena, const char *text, size_t size, Graph **out);

/* --- the flat node table, as Python fills it (native byte order) -------------------------------------------------- */
typedef struct TableNode {
    uint16_t op;
    uint16_t n_results;
    uint32_t first_operand, n_operands;
    uint32_t first_attr, n_attr_words;
    int32_t source;
} TableNode;
typedef struct TableValue { /* one a result, nodes' results in order */
    uint8_t dtype, rank;
    uint16_t reserved;
    uint32_t first_dim;
} TableValue;
typedef struct TableConstant {
    uint64_t data; /* address, 0 = none */
    uint8_t dtype, rank, kind, reserved;
    uint32_t first_dim; /* rank sizes then rank strides in the shape pool */
    int32_t name;       /* string index */
    int32_t reserved2;
} TableConstant;
typedef struct Table {
    const TableNode *nodes;
    size_t n_nodes;
    const TableValue *values;
    size_t n_values;
    const TableConstant *constants;
    size_t n_constants;
    const uint32_t *operands;
    size_t n_operands;
    const int64_t *attrs;
    size_t n_attrs;
    const int64_t *dims;
    size_t n_dims;
    const uint32_t *outputs;
    size_t n_outputs;
    const char *const *strings;
    size_t n_strings; /* constant and host names */
    const char *const *sources;
    size_t n_sources;
} Table;
/* Believes nothing: every index, range, type and shape is checked; a bad row is CODE_INVALID naming it. */
MUST_USE Code graph_from_table(Context *ctx, Arena *arena, const Table *table, Graph **out);

#endif
