/* Masks whose values are known: which keys does each query see?
 *
 * A hard mask adds HARD_MASK (-2^127) or less where it hides a key. For |score| < 2^102 the sum is then below -2^126,
 * so that, in a row with a visible key, exp(sum - largest) is 0 in f32 just as if the key was not there. A row without
 * one is another matter: softmax gives each key its share, where a hidden key has none. So only `rows` lets a float
 * mask become a bool one. */
#include "passes/attention_fusion.h"

#include <string.h>

#include "passes/evaluate.h"

ValueId mask_unexpanded(const Match *m, ValueId v) {
    for (;;) {
        NodeId expand = match_def(m, v, OP_expand);
        if (expand == NODE_NONE) return v;
        v = graph_resolve(m->g, graph_node(m->g, expand)->operands[0]);
    }
}

bool mask_scalar(const Match *m, ValueId v, double *out) {
    Scalar s;
    v = mask_unexpanded(m, v);
    NodeId cast = match_def(m, v, OP_cast); /* of a number that f32 holds, or it is not used as such */
    if (cast != NODE_NONE) v = mask_unexpanded(m, graph_node(m->g, cast)->operands[0]);
    if (!literal_uniform(m->g, v, &s)) return false;
    *out = scalar_f64(s);
    return true;
}

static bool is_visible(DType dtype, double value, bool inverted) {
    return dtype == DTYPE_BOOL ? (value != 0) != inverted : value == 0;
}

/* One row of the mask: narrows down what holds of all. */
static void look_at_row(const Tensor *t, const char *row, bool inverted, int64_t query, MaskFacts *facts) {
    int64_t keys = t->rank ? t->shape[t->rank - 1] : 1, stride = t->rank ? t->strides[t->rank - 1] : 0;
    size_t size = dtype_size(t->dtype);
    bool any = false;
    for (int64_t key = 0; key < keys; key++) {
        const char *at = row + key * stride * (int64_t)size;
        float value;
        if (t->dtype == DTYPE_BOOL)
            value = *(const uint8_t *)at;
        else
            memcpy(&value, at, sizeof value);
        bool visible = is_visible(t->dtype, (double)value, inverted);
        any = any || visible;
        facts->visible = facts->visible && visible;
        facts->causal = facts->causal && visible == (key <= query);
        if (t->dtype != DTYPE_BOOL && !visible && !((double)value <= HARD_MASK))
            facts->hard = false; /* NaN isn't either */
    }
    facts->rows = facts->rows && any;
}

static MaskFacts find_facts(const Match *m, ValueId mask, bool inverted, int64_t S, int64_t T) {
    const MaskFacts unknown = {0};
    const Graph *g = m->g;
    double uniform;
    DType dtype = graph_value(g, mask)->dtype;
    if ((dtype != DTYPE_BOOL && dtype != DTYPE_F32) || S <= 0 || T <= 0) return unknown;
    if (mask_scalar(m, mask, &uniform)) {
        bool visible = is_visible(dtype, uniform, inverted),
             hard = dtype != DTYPE_BOOL && (visible || uniform <= HARD_MASK);
        return (MaskFacts){visible, visible && S == 1 && T == 1, visible, hard};
    }
    NodeId def = match_def(m, mask, OP_where);
    double a, b;
    if (def != NODE_NONE && dtype != DTYPE_BOOL && mask_scalar(m, graph_node(g, def)->operands[1], &a) &&
        mask_scalar(m, graph_node(g, def)->operands[2], &b)) {
        return (MaskFacts){.hard = (a == 0 || a <= HARD_MASK) && (b == 0 || b <= HARD_MASK)};
    }
    def = match_def(m, mask, OP_constant);
    if (def == NODE_NONE) return unknown;
    const Constant *c = &g->constants[node_int(graph_node(g, def), ATTR_index)];
    Tensor t = constant_tensor(c);
    if (!t.data || tensor_count(&t) == 0) return unknown;

    bool full =
        t.rank >= 2 && t.shape[t.rank - 2] == S && t.shape[t.rank - 1] == T; /* else rows or keys are broadcast */
    MaskFacts facts = {true, full, true, dtype != DTYPE_BOOL};
    int64_t index[MAX_RANK] = {0};
    for (bool more = true; more;) {
        int64_t offset = 0;
        for (int d = 0; d + 1 < t.rank; d++) offset += index[d] * t.strides[d];
        const char *row = (const char *)t.data + offset * (int64_t)dtype_size(t.dtype);
        look_at_row(&t, row, inverted, t.rank >= 2 ? index[t.rank - 2] : 0, &facts);
        more = false;
        for (int d = t.rank - 2; d >= 0 && !more; d--) {
            more = ++index[d] < t.shape[d];
            if (!more) index[d] = 0;
        }
    }
    if (dtype != DTYPE_BOOL && !facts.hard) facts.causal = facts.rows = false;
    return facts;
}

MaskFacts mask_facts(const Match *m, MaskCache *cache, ValueId mask, bool inverted, int64_t S, int64_t T) {
    mask = mask_unexpanded(m, mask);
    if (cache->mask != mask || cache->inverted != inverted || cache->S != S || cache->T != T) {
        *cache = (MaskCache){mask, inverted, S, T, find_facts(m, mask, inverted, S, T)};
    }
    return cache->facts;
}
