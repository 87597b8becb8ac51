/* Compile-time evaluation that `fold` and `device_constant` share; what is folded is decided by their policies. */
#ifndef FORGE_PASSES_EVALUATE_H
#define FORGE_PASSES_EVALUATE_H

#include "passes/passes.h"

enum { SMALL_BYTES = 4 << 10 }; /* what may be copied and grown without a thought */

/* What a value that is known at compile time was made from. */
typedef struct Sources {
    bool state; /* parameters or buffers take part */
    bool
        narrow; /* integers of less than 32 bits from state or large literals: packed weights, which must stay packed */
    int64_t bytes;    /* memory of the state that takes part */
    const char *name; /* of the first state, "" if none */
} Sources;

typedef struct FoldPolicy {
    const char *pass;
    /* May `node`, all of whose operands are known, be computed at compile time? `bytes`: of its results. */
    bool (*may_fold)(const PassContext *pc, const Sources *sources, int64_t bytes);
    /* May `bytes` of computed result become a constant of the program? `weight_only`: nothing but contractions use it,
     * as their matrix. */
    bool (*may_keep)(PassContext *pc, const Sources *sources, int64_t bytes, bool weight_only, void *user);
    bool remarks; /* say what was made */
    void *user;
} FoldPolicy;

/* Replaces values that are known by constants: view operators on constants become constants that borrow the memory,
 * other operators are computed where the policy allows, uniform results become `full`. Host nodes and inputs are never
 * known. */
MUST_USE Code fold_graph(PassContext *pc, Graph *g, const FoldPolicy *policy, bool *changed);

/* Strides and element offset of a VIEW node's result over the memory of `in`; false: needs a copy. out->data is not
 * set. */
bool view_tensor(const Node *node, const Value *result, const Tensor *in, Tensor *out, int64_t *offset);

/* One element in memory. `scalar_load` is false for types that no scalar can hold. */
bool scalar_load(DType dtype, const void *data, Scalar *out);
void scalar_store(Scalar s, DType dtype, void *data);
/* If all elements of a literal (or `full`) are bitwise the same, that element. */
bool literal_uniform(const Graph *g, ValueId v, Scalar *out);
/* The memory of a constant as a tensor; bytes that a tensor's elements take when row major. */
Tensor constant_tensor(const Constant *c);
int64_t tensor_bytes(const Tensor *t);

/* Exact simplifications of single nodes (simplify.c). */
MUST_USE Code simplify_graph(PassContext *pc, Graph *g, bool *changed);

/* ... of a lookup by consecutive indices (simplify_lookup.c): `with` takes its place, VALUE_NONE if nothing does. */
MUST_USE Code simplify_lookup(PassContext *pc, Graph *g, NodeId id, ValueId *with);

#endif
