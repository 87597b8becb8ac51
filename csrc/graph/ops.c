/* Operators and attributes: the tables that ops.def and attrs.def expand to. */
#include "graph/graph.h"

#include <string.h>

/* How many of an operator's attributes are real (ATTR_END stands for "none" in ops.def). */
#define COUNT_ATTRS(...) COUNT_SIX(__VA_ARGS__, 0, 0, 0, 0, 0, 0, 0)
#define COUNT_SIX(a, b, c, d, e, f, ...) (((a) != 0) + ((b) != 0) + ((c) != 0) + ((d) != 0) + ((e) != 0) + ((f) != 0))

static const OpInfo ops[OP_COUNT] = {
#define OP(name, least, most, results, flags, ...)                                                                     \
    [OP_##name] = {#name, least, most, results, flags, COUNT_ATTRS(__VA_ARGS__), {__VA_ARGS__}},
#include "graph/ops.def"
#undef OP
};

static const struct {
    const char *name;
    AttrKind kind;
} attrs[ATTR_COUNT] = {
    [ATTR_END] = {"", KIND_INT},
#define ATTR(name, kind) [ATTR_##name] = {#name, KIND_##kind},
#include "graph/attrs.def"
#undef ATTR
};

static const Attr no_attr;

const OpInfo *op_info(Op op) { return &ops[op]; }

bool op_from_name(const char *name, size_t length, Op *out) {
    for (int op = 0; length && op < OP_COUNT; op++) {
        if (ops[op].name[0] == name[0] && strlen(ops[op].name) == length && memcmp(ops[op].name, name, length) == 0) {
            *out = (Op)op;
            return true;
        }
    }
    return false;
}

const char *attr_name(AttrName name) { return attrs[name].name; }

AttrKind attr_kind(AttrName name) { return attrs[name].kind; }

bool scalar_equal(Scalar a, Scalar b) {
    if (a.kind != b.kind) return false;
    if (a.kind == SCALAR_NONE) return true;
    return memcmp(&a.i, &b.i, sizeof a.i) == 0;
}

static int attr_slot(const Node *node, AttrName name) {
    const OpInfo *info = &ops[node->op];
    for (int k = 0; k < info->n_attrs; k++) {
        if (info->attrs[k] == name) return k;
    }
    return -1;
}

bool node_has_attr(const Node *node, AttrName name) { return attr_slot(node, name) >= 0; }

const Attr *node_attr(const Node *node, AttrName name) {
    int slot = attr_slot(node, name);
    return slot < 0 ? &no_attr : &node->attrs[slot]; /* an attribute that an operator lacks reads as its default */
}

Attr *node_attr_mut(Node *node, AttrName name) {
    int slot = attr_slot(node, name);
    return slot < 0 ? NULL : &node->attrs[slot];
}
