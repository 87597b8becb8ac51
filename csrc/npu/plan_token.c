/* Instructions as tokens, and the canonical form of stretches of them.
 *
 * A token stands for all that the emitter writes of one instruction but the names of its operands: operator, attributes
 * (`order` is left out: results on the NPU are row major), types, and the views between each operand and the memory
 * that it lies in. Tokens are compared word for word; a hash only finds the candidates. */
#include <string.h>

#include "npu/plan.h"

enum { MAX_CHAIN = 4096 };

static Code words_grow(Tokens *t, Words *w) {
    uint32_t larger = w->capacity ? 2 * w->capacity : 256;
    int64_t *items;
    if (w->capacity > UINT32_MAX / 4) return fail(t->ctx, CODE_UNSUPPORTED, "the program is too large to plan");
    TRY(ARENA_NEW(t->ctx, t->arena, larger, &items));
    if (w->count) memcpy(items, w->items, w->count * sizeof *items);
    w->items = items;
    w->capacity = larger;
    return CODE_OK;
}

static inline Code words_add(Tokens *t, Words *w, int64_t word) {
    if (w->count == w->capacity) TRY(words_grow(t, w));
    w->items[w->count++] = word;
    return CODE_OK;
}

static Code add_list(Tokens *t, Words *w, const int64_t *items, uint32_t count) {
    TRY(words_add(t, w, count));
    for (uint32_t i = 0; i < count; i++) TRY(words_add(t, w, items[i]));
    return CODE_OK;
}

static Code add_attributes(Tokens *t, Words *w, const Node *node) {
    const OpInfo *info = op_info(node->op);
    for (int k = 0; k < info->n_attrs; k++) {
        const Attr *attr = &node->attrs[k];
        if (info->attrs[k] == ATTR_order) continue;
        switch (attr_kind((AttrName)info->attrs[k])) {
        case KIND_INTS: TRY(add_list(t, w, attr->ints.items, attr->ints.count)); break;
        case KIND_SCALAR: { /* of none the value means nothing */
            int64_t bits = 0;
            if (attr->s.kind != SCALAR_NONE) memcpy(&bits, &attr->s.i, sizeof bits);
            TRY(words_add(t, w, attr->s.kind));
            TRY(words_add(t, w, bits));
            break;
        }
        default: TRY(words_add(t, w, attr->i)); break; /* bits of a double too */
        }
    }
    return CODE_OK;
}

static Code add_type(Tokens *t, Words *w, const Register *r) {
    TRY(words_add(t, w, r->dtype));
    return add_list(t, w, r->shape, r->rank);
}

/* The view nodes from the register's value back to the value that lies in memory as it is. */
static Code add_views(Tokens *t, Words *w, const Register *r) {
    const Graph *g = t->ir->graph;
    ValueId v = r->value, whole = t->ir->regs[t->writers.reg[r->buffer]].value;
    for (uint32_t i = 0; v != whole && v != VALUE_NONE; i++) {
        const Node *node = value_node(g, v);
        if (node->op == OP_constant || node->op == OP_input) break; /* the same memory has several nodes */
        if (i == MAX_CHAIN || !(op_is(node->op, VIEW) || node->op == OP_contiguous))
            return fail(t->ctx, CODE_INTERNAL, "value %%%u is no view of %%%u, in whose memory it lies", r->value,
                        whole);
        const Value *value = graph_value(g, v);
        TRY(words_add(t, w, node->op));
        TRY(add_attributes(t, w, node));
        TRY(add_list(t, w, value->shape, value->rank));
        v = node->operands[0];
    }
    return words_add(t, w, -1);
}

static Code add_operand(Tokens *t, Words *w, RegId reg, Ref *ref) {
    *ref = (Ref){REF_NONE, 0};
    if (reg != REG_NONE) {
        const Buffer *b = &t->ir->buffers[t->ir->regs[reg].buffer];
        bool constant = b->space == SPACE_CONSTANT;
        *ref = constant ? (Ref){REF_CONSTANT, b->index} : (Ref){REF_BUFFER, t->ir->regs[reg].buffer};
    }
    TRY(words_add(t, w, ref->kind));
    if (ref->kind == REF_NONE) return CODE_OK;
    const Register *r = &t->ir->regs[reg];
    TRY(add_type(t, w, r));
    TRY(add_views(t, w, r));
    if (ref->kind == REF_BUFFER) return add_type(t, w, &t->ir->regs[t->writers.reg[r->buffer]]);
    /* A constant is read through its strides: the same ones must fit the constants of other calls. */
    TRY(add_list(t, w, r->strides, r->rank));
    return words_add(t, w, r->offset);
}

static Code instr_words(Tokens *t, Words *w, const Instr *instr, Ref *refs) {
    TRY(words_add(t, w, instr->op));
    TRY(add_attributes(t, w, instr->node));
    TRY(words_add(t, w, instr->n_in));
    for (uint32_t k = 0; k < instr->n_in; k++) TRY(add_operand(t, w, instr->in[k], &refs[k]));
    for (uint32_t k = 0; k < instr->n_out; k++) {
        TRY(words_add(t, w, instr->out[k] != REG_NONE));
        if (instr->out[k] != REG_NONE) TRY(add_type(t, w, &t->ir->regs[instr->out[k]]));
    }
    return CODE_OK;
}

/* --- numbering of equal ones -------------------------------------------------------------------------------------- */
typedef struct Entry { /* of an open-addressed table */
    uint64_t hash;
    uint32_t first, count; /* in `all` */
    uint32_t number;       /* + 1; 0: free */
} Entry;

uint64_t words_hash(const int64_t *items, uint32_t count) {
    uint64_t h = 0x9e3779b97f4a7c15u;
    for (uint32_t i = 0; i < count; i++) {
        h = (h ^ (uint64_t)items[i]) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    return h;
}

static Code find_tokens(Tokens *t, const Segments *segments, uint32_t n_positions) {
    Words all = {0};
    Entry *table;
    uint32_t size = 16, at_ref = 0;
    while (size < 2 * n_positions) size *= 2;
    TRY(ARENA_NEW(t->ctx, t->arena, size, &table));
    for (uint32_t s = 0; s < segments->count; s++) {
        const Segment *segment = &segments->items[s];
        for (uint32_t p = segment->first; p < segment->first + segment->count; p++) {
            const Instr *instr = &t->ir->instrs[t->ir->order[p]];
            uint32_t start = all.count;
            t->first_ref[p] = at_ref;
            TRY(instr_words(t, &all, instr, t->refs + at_ref));
            at_ref += instr->n_in;
            uint32_t count = all.count - start;
            uint64_t hash = words_hash(all.items + start, count), slot = hash & (size - 1);
            while (table[slot].number &&
                   (table[slot].hash != hash || table[slot].count != count ||
                    memcmp(all.items + table[slot].first, all.items + start, count * sizeof *all.items) != 0))
                slot = (slot + 1) & (size - 1);
            if (table[slot].number)
                all.count = start; /* known */
            else
                table[slot] = (Entry){hash, start, count, ++t->n_tokens};
            t->token[p] = table[slot].number - 1;
        }
    }
    return CODE_OK;
}

Code tokens_find(Context *ctx, Arena *arena, const Npuir *ir, const Segments *segments, Tokens *out) {
    Tokens *t = out;
    uint32_t n_refs = 0, n_positions = 0;
    *t = (Tokens){.ctx = ctx, .arena = arena, .ir = ir};
    TRY(writers_find(ctx, arena, ir, &t->writers));
    TRY(ARENA_NEW(ctx, arena, ir->n_instrs, &t->position));
    TRY(ARENA_NEW(ctx, arena, ir->n_instrs, &t->token));
    TRY(ARENA_NEW(ctx, arena, ir->n_instrs, &t->first_ref));
    TRY(ARENA_NEW(ctx, arena, ir->n_buffers, &t->last_read));
    TRY(ARENA_NEW(ctx, arena, ir->n_buffers, &t->result));
    TRY(ARENA_NEW(ctx, arena, ir->n_buffers, &t->buffer_stamp));
    TRY(ARENA_NEW(ctx, arena, ir->n_buffers, &t->buffer_number));
    TRY(ARENA_NEW(ctx, arena, ir->graph->n_constants, &t->constant_stamp));
    TRY(ARENA_NEW(ctx, arena, ir->graph->n_constants, &t->constant_number));
    for (uint32_t p = 0; p < ir->n_instrs; p++) {
        const Instr *instr = &ir->instrs[ir->order[p]];
        t->position[ir->order[p]] = p;
        n_refs += instr->n_in;
        for (uint32_t k = 0; k < instr->n_in; k++) {
            if (instr->in[k] != REG_NONE) t->last_read[ir->regs[instr->in[k]].buffer] = p + 1;
        }
        for (uint32_t k = 0; k < instr->n_out; k++) {
            if (instr->out[k] != REG_NONE) t->result[ir->regs[instr->out[k]].buffer] = k;
        }
    }
    TRY(ARENA_NEW(ctx, arena, n_refs, &t->refs));
    for (uint32_t s = 0; s < segments->count; s++) n_positions += segments->items[s].count;
    return find_tokens(t, segments, n_positions);
}

/* --- stretches ---------------------------------------------------------------------------------------------------- */
static bool is_inside(const Tokens *t, Stretch s, BufferId b) {
    uint32_t writer = tokens_writer(t, b);
    return writer != UINT32_MAX && writer >= s.first && writer < s.first + s.count;
}

Code border_alloc(Context *ctx, Arena *arena, const Npuir *ir, Stretch s, Border *out) {
    uint32_t n_in = 0, n_out = 0;
    *out = (Border){0};
    for (uint32_t p = s.first; p < s.first + s.count; p++) {
        n_in += ir->instrs[ir->order[p]].n_in;
        n_out += ir->instrs[ir->order[p]].n_out;
    }
    TRY(ARENA_NEW(ctx, arena, n_in, &out->in));
    TRY(ARENA_NEW(ctx, arena, n_in, &out->constants));
    return ARENA_NEW(ctx, arena, n_out, &out->out);
}

void stretch_border(Tokens *t, Stretch s, Border *border) {
    border->n_in = border->n_out = border->n_constants = 0;
    border->bytes = 0;
    t->stamp++;
    for (uint32_t p = s.first; p < s.first + s.count; p++) {
        const Instr *instr = &t->ir->instrs[t->ir->order[p]];
        for (uint32_t k = 0; k < instr->n_in; k++) {
            Ref ref = t->refs[t->first_ref[p] + k];
            if (ref.kind == REF_CONSTANT && t->constant_stamp[ref.id] != t->stamp) {
                t->constant_stamp[ref.id] = t->stamp;
                border->constants[border->n_constants++] = ref.id;
            } else if (ref.kind == REF_BUFFER && t->buffer_stamp[ref.id] != t->stamp && !is_inside(t, s, ref.id)) {
                t->buffer_stamp[ref.id] = t->stamp;
                border->in[border->n_in++] = ref.id;
                border->bytes += t->ir->buffers[ref.id].bytes;
            }
        }
        for (uint32_t k = 0; k < instr->n_out; k++) {
            BufferId b = instr->out[k] == REG_NONE ? BUFFER_NONE : t->ir->regs[instr->out[k]].buffer;
            if (b == BUFFER_NONE || !tokens_crosses(t, b, s.first + s.count)) continue;
            border->out[border->n_out++] = b;
            border->bytes += t->ir->buffers[b].bytes;
        }
    }
}

/* An instruction is its token, then a word an operand (what it reads: a result of the stretch, or the n-th buffer or
 * constant from outside), then a word that tells which of its results leave the stretch. */
Code stretch_words(Tokens *t, Stretch s, Words *out, uint32_t *n_constants) {
    enum { INSIDE = 1, OUTSIDE, CONSTANT, KINDS };
    uint32_t n_in = 0;
    out->count = *n_constants = 0;
    t->stamp++;
    for (uint32_t p = s.first; p < s.first + s.count; p++) {
        const Instr *instr = &t->ir->instrs[t->ir->order[p]];
        TRY(words_add(t, out, t->token[p]));
        for (uint32_t k = 0; k < instr->n_in; k++) {
            Ref ref = t->refs[t->first_ref[p] + k];
            int64_t word = 0;
            if (ref.kind == REF_BUFFER && is_inside(t, s, ref.id)) {
                word = ((int64_t)(tokens_writer(t, ref.id) - s.first) << 16 | t->result[ref.id]) * KINDS + INSIDE;
            } else if (ref.kind == REF_BUFFER) {
                if (t->buffer_stamp[ref.id] != t->stamp) t->buffer_number[ref.id] = n_in++;
                t->buffer_stamp[ref.id] = t->stamp;
                word = (int64_t)t->buffer_number[ref.id] * KINDS + OUTSIDE;
            } else if (ref.kind == REF_CONSTANT) {
                if (t->constant_stamp[ref.id] != t->stamp) t->constant_number[ref.id] = (*n_constants)++;
                t->constant_stamp[ref.id] = t->stamp;
                word = (int64_t)t->constant_number[ref.id] * KINDS + CONSTANT;
            }
            TRY(words_add(t, out, word));
        }
        for (uint32_t k = 0; k < instr->n_out; k++) {
            BufferId b = instr->out[k] == REG_NONE ? BUFFER_NONE : t->ir->regs[instr->out[k]].buffer;
            TRY(words_add(t, out, b != BUFFER_NONE && tokens_crosses(t, b, s.first + s.count)));
        }
    }
    return CODE_OK;
}
