/* Common subexpression elimination.
 * Requires: nothing. Keeps: inputs and every host node (random, effects). Breaks: nothing.
 * Two nodes are one when operator, attributes, operands and result types agree bit for bit. Constants are one when they
 * are the same memory seen the same way (tied weights), or small literals with equal content. */
#include "passes/passes.h"

#include <string.h>

/* Literals up to this size are compared by content. */
enum { SMALL_LITERAL_BYTES = 4096 };

/* a op b == b op a in every bit (but a NaN's payload). Not minimum and maximum: they may tell -0.0 from 0.0 by
 * position. */
static bool is_commutative(const Node *node) {
    switch (node->op) {
    case OP_add:
    case OP_mul:
    case OP_bitwise_and:
    case OP_bitwise_or:
    case OP_bitwise_xor:
    case OP_eq:
    case OP_ne:
    case OP_logical_and:
    case OP_logical_or:
    case OP_logical_xor: return node->n_operands == 2;
    default: return false;
    }
}

static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}

static uint64_t mix_bytes(uint64_t hash, const void *data, size_t size) {
    const unsigned char *bytes = data;
    for (; size >= 8; bytes += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        hash = mix(hash, word);
    }
    uint64_t tail = size;
    for (size_t i = 0; i < size; i++) tail = tail << 8 | bytes[i];
    return mix(hash, tail);
}

static uint64_t scalar_word(Scalar s) { return s.kind == SCALAR_NONE ? 0 : (uint64_t)s.i; }

static bool same_dims(const int64_t *a, const int64_t *b, size_t rank) {
    return rank == 0 || memcmp(a, b, rank * sizeof *a) == 0;
}

/* --- constants ---------------------------------------------------------------------------------------------------- */

static bool is_small_literal(const Constant *c) {
    Tensor t = {.dtype = c->dtype, .rank = c->rank};
    for (size_t i = 0; i < c->rank; i++) {
        t.shape[i] = c->shape[i];
        t.strides[i] = c->strides[i];
    }
    return c->kind == CONSTANT_LITERAL && c->data && c->bytes <= SMALL_LITERAL_BYTES && c->dtype != DTYPE_OBJECT &&
           tensor_is_contiguous(&t);
}

static uint64_t hash_constant(uint64_t hash, const Constant *c, uint32_t index) {
    hash = mix(hash, (uint64_t)c->kind << 16 | (uint64_t)c->derived << 8 | c->dtype);
    if (c->rank) hash = mix_bytes(hash, c->shape, c->rank * sizeof *c->shape);
    if (is_small_literal(c)) return mix_bytes(hash, c->data, (size_t)c->bytes);
    /* Without memory nothing tells two constants apart but the slot: views of one weight share its name. */
    return c->data ? mix(hash, (uint64_t)(uintptr_t)c->data) : mix(hash, index);
}

static bool same_constant(const Graph *g, int64_t ia, int64_t ib) {
    if (ia == ib) return true;
    const Constant *a = &g->constants[ia], *b = &g->constants[ib];
    if (a->kind != b->kind || a->derived != b->derived || a->dtype != b->dtype || a->rank != b->rank) return false;
    if (!a->data || !b->data || a->bytes != b->bytes || !same_dims(a->shape, b->shape, a->rank)) return false;
    if (is_small_literal(a) && is_small_literal(b)) return memcmp(a->data, b->data, (size_t)a->bytes) == 0;
    return a->data == b->data && same_dims(a->strides, b->strides, a->rank);
}

/* --- nodes -------------------------------------------------------------------------------------------------------- */

static uint64_t hash_node(const Graph *g, const Node *node) {
    uint64_t hash = mix(0, (uint64_t)node->op << 32 | node->n_operands);
    if (node->op == OP_constant) {
        uint32_t index = (uint32_t)node_int(node, ATTR_index);
        return hash_constant(hash, &g->constants[index], index);
    }
    if (is_commutative(node)) {
        hash = mix(hash, (uint64_t)node->operands[0] + node->operands[1]);
    } else {
        for (uint32_t k = 0; k < node->n_operands; k++) hash = mix(hash, node->operands[k]);
    }
    const OpInfo *info = op_info(node->op);
    for (size_t i = 0; i < info->n_attrs; i++) {
        const Attr *attr = &node->attrs[i];
        switch (attr_kind(info->attrs[i])) {
        case KIND_INT:
        case KIND_BOOL: hash = mix(hash, (uint64_t)attr->i); break;
        case KIND_FLOAT: hash = mix_bytes(hash, &attr->f, sizeof attr->f); break;
        case KIND_SCALAR: hash = mix(mix(hash, (uint64_t)attr->s.kind), scalar_word(attr->s)); break;
        case KIND_INTS: hash = mix_bytes(hash, attr->ints.items, attr->ints.count * sizeof(int64_t)); break;
        }
    }
    for (uint32_t k = 0; k < node->n_results; k++) {
        const Value *v = graph_value(g, node_result(node, k));
        hash = mix(hash, v->dtype);
        if (v->rank) hash = mix_bytes(hash, v->shape, v->rank * sizeof *v->shape);
    }
    return hash;
}

static bool same_attrs(const Node *a, const Node *b) {
    const OpInfo *info = op_info(a->op);
    for (size_t i = 0; i < info->n_attrs; i++) {
        const Attr *x = &a->attrs[i], *y = &b->attrs[i];
        switch (attr_kind(info->attrs[i])) {
        case KIND_INT:
        case KIND_BOOL:
            if (x->i != y->i) return false;
            break;
        case KIND_FLOAT:
            if (memcmp(&x->f, &y->f, sizeof x->f) != 0) return false;
            break;
        case KIND_SCALAR:
            if (!scalar_equal(x->s, y->s)) return false;
            break;
        case KIND_INTS:
            if (x->ints.count != y->ints.count || !same_dims(x->ints.items, y->ints.items, x->ints.count)) return false;
            break;
        }
    }
    return true;
}

static bool same_node(const Graph *g, const Node *a, const Node *b) {
    if (a->op != b->op || a->n_operands != b->n_operands || a->n_results != b->n_results) return false;
    if (a->op == OP_constant) return same_constant(g, node_int(a, ATTR_index), node_int(b, ATTR_index));
    bool straight = a->n_operands == 0 || memcmp(a->operands, b->operands, a->n_operands * sizeof *a->operands) == 0;
    if (!straight && !(is_commutative(a) && a->operands[0] == b->operands[1] && a->operands[1] == b->operands[0]))
        return false;
    for (uint32_t k = 0; k < a->n_results; k++) {
        const Value *x = graph_value(g, node_result(a, k)), *y = graph_value(g, node_result(b, k));
        if (x->dtype != y->dtype || x->rank != y->rank || !same_dims(x->shape, y->shape, x->rank)) return false;
    }
    return same_attrs(a, b);
}

static Code merge(PassContext *pc, Graph *g, Arena *scratch) {
    typedef struct Slot {
        uint32_t hash; /* the upper half; the lower one chose the slot */
        NodeId node;
    } Slot;
    size_t capacity = 16;
    while (capacity < 2 * (size_t)g->n_nodes) capacity *= 2;
    Slot *slots;
    TRY(ARENA_NEW(pc->ctx, scratch, capacity, &slots));
    for (size_t i = 0; i < capacity; i++) slots[i].node = NODE_NONE;
    bool effects = false; /* host calls that write memory can tell two copies apart */
    GRAPH_EACH(g, id) effects |= graph_node(g, id)->op == OP_host && node_int(graph_node(g, id), ATTR_effect);

    for (NodeId id = g->first, next; id != NODE_NONE; id = next) {
        Node *node = graph_node(g, id);
        next = node->next;
        for (uint32_t k = 0; k < node->n_operands; k++)
            if (node->operands[k] != VALUE_NONE) node->operands[k] = graph_resolve(g, node->operands[k]);
        if (node->op == OP_input || node->op == OP_host || (effects && node->op == OP_contiguous)) continue;

        uint64_t hash = hash_node(g, node);
        size_t at = (size_t)hash & (capacity - 1);
        while (slots[at].node != NODE_NONE) {
            if (slots[at].hash == (uint32_t)(hash >> 32) && same_node(g, graph_node(g, slots[at].node), node)) break;
            at = (at + 1) & (capacity - 1);
        }
        if (slots[at].node == NODE_NONE) {
            slots[at] = (Slot){(uint32_t)(hash >> 32), id};
            continue;
        }
        const Node *first = graph_node(g, slots[at].node);
        for (uint32_t k = 0; k < node->n_results; k++) graph_replace(g, node_result(node, k), node_result(first, k));
        graph_kill(g, id);
    }
    return graph_compact(pc->ctx, g);
}

Code pass_cse(PassContext *pc, Graph *g) {
    Arena scratch;
    arena_init(&scratch);
    Code code = merge(pc, g, &scratch);
    arena_destroy(&scratch);
    return code;
}
