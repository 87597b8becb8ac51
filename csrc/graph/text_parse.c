/* Reads the text form of graphs; the grammar stands in text_print.c. Checks the form only: what the operators require
 * of operands, attributes and types is graph_verify's to say. */
#include "graph/text_parse.h"

#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

Code parse_fail(Parser *p, const char *what) {
    /* show what stands there instead, without control characters */
    char found[24];
    size_t n = 0;
    for (const char *c = p->at; c < p->end && *c >= ' ' && *c < 0x7f && n + 1 < sizeof found; c++) found[n++] = *c;
    found[n] = 0;
    return fail(p->ctx, CODE_INVALID, "line %u: expected %s at '%s'", p->line, what, found);
}

/* --- tokens ------------------------------------------------------------------------------------------------------- */
static void skip_blanks(Parser *p) {
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\r')) p->at++;
}

static bool at_comment(const Parser *p) {
    return *p->at == '#' || (*p->at == '/' && p->end - p->at > 1 && p->at[1] == '/');
}

static void skip_lines(Parser *p) {
    for (;;) {
        skip_blanks(p);
        if (p->at == p->end) return;
        if (*p->at == '\n') {
            p->line++;
            p->at++;
        } else if (at_comment(p)) {
            while (p->at < p->end && *p->at != '\n') p->at++;
        } else {
            return;
        }
    }
}

bool parse_accept(Parser *p, char c) {
    skip_blanks(p);
    if (p->at == p->end || *p->at != c) return false;
    p->at++;
    return true;
}

Code parse_expect(Parser *p, char c) {
    char what[] = {'\'', c, '\'', 0};
    return parse_accept(p, c) ? CODE_OK : parse_fail(p, what);
}

static bool is_word_char(char c, bool loose) {
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_') return true;
    return loose && c && strchr(".$/:-", c);
}

/* `loose`: names of constants and values may hold a few more characters than identifiers. */
static Slice read_word(Parser *p, bool loose) {
    skip_blanks(p);
    Slice word = {p->at, 0};
    while (p->at < p->end && is_word_char(*p->at, loose)) p->at++;
    word.size = (size_t)(p->at - word.data);
    return word;
}

Slice parse_word(Parser *p) { return read_word(p, false); }

bool slice_is(Slice s, const char *text) { return s.size == strlen(text) && memcmp(s.data, text, s.size) == 0; }

bool parse_accept_word(Parser *p, const char *text) {
    const char *back = p->at;
    if (slice_is(parse_word(p), text)) return true;
    p->at = back;
    return false;
}

/* An integer, or a float: what has one of ". e n" (nan, inf) in it. Longer than any number that is printed =
 * malformed. */
Code parse_number(Parser *p, Scalar *out) {
    char digits[64];
    size_t n = 0;
    bool is_float = false;
    skip_blanks(p);
    const char *start = p->at;
    for (; p->at < p->end && n + 1 < sizeof digits; p->at++) {
        char c = *p->at;
        bool sign = (c == '-' || c == '+') && (n == 0 || digits[n - 1] == 'e');
        bool letter = c == 'e' || c == 'n' || c == 'a' || c == 'i' || c == 'f' || c == '.';
        if (!sign && !letter && !(c >= '0' && c <= '9')) break;
        is_float = is_float || letter;
        digits[n++] = c;
    }
    digits[n] = 0;
    const char *body = digits + (digits[0] == '-');
    char *rest = digits;
    *out = (Scalar){.kind = is_float ? SCALAR_FLOAT : SCALAR_INT};
    if (strcmp(body, "nan") == 0 || strcmp(body, "inf") == 0) {
        double value = body[0] == 'n' ? (double)NAN : (double)INFINITY;
        out->f = body == digits ? value : -value;
        return CODE_OK;
    }
    unsigned long long magnitude = 0;
    if (is_float && body[0] >= '0' && body[0] <= '9') {
        char *point = strchr(digits, '.');
        if (point) *point = localeconv()->decimal_point[0];
        out->f = strtod(digits, &rest);
    } else if (!is_float && body[0] >= '0' && body[0] <= '9') {
        rest = digits + (body - digits);
        for (; *rest >= '0' && *rest <= '9'; rest++) {
            if (__builtin_mul_overflow(magnitude, 10, &magnitude) ||
                __builtin_add_overflow(magnitude, (unsigned long long)(*rest - '0'), &magnitude))
                break;
        }
        unsigned long long limit = (unsigned long long)INT64_MAX + (body != digits);
        if (magnitude > limit) rest = digits;
        out->i = body == digits ? (int64_t)magnitude : (int64_t)(0 - magnitude);
    }
    if (n == 0 || rest == digits || *rest) {
        p->at = start;
        return parse_fail(p, "a number");
    }
    return CODE_OK;
}

Code parse_int(Parser *p, int64_t *out) {
    Scalar s;
    const char *start = p->at;
    TRY(parse_number(p, &s));
    if (s.kind != SCALAR_INT) {
        p->at = start;
        return parse_fail(p, "an integer");
    }
    *out = s.i;
    return CODE_OK;
}

/* A quoted string into p->buffer (NUL terminated there; no line is longer than the buffer). */
static Code read_string(Parser *p, Slice *out) {
    size_t n = 0;
    TRY(parse_expect(p, '"'));
    for (; p->at < p->end && *p->at != '"' && *p->at != '\n'; p->at++) {
        char c = *p->at;
        if (c == '\\' && p->end - p->at > 1) {
            c = *++p->at;
            if (c == 'n') {
                c = '\n';
            } else if (c == 'x' && p->end - p->at > 2) {
                char hex[] = {p->at[1], p->at[2], 0}, *rest;
                c = (char)strtol(hex, &rest, 16);
                if (rest != hex + 2 || hex[0] == ' ' || hex[0] == '+' || hex[0] == '-')
                    return parse_fail(p, "two hex digits");
                p->at += 2;
            } else if (c != '"' && c != '\\') {
                return parse_fail(p, "an escape");
            }
        }
        if (!c) return parse_fail(p, "text without NUL");
        p->buffer[n++] = c;
    }
    TRY(parse_expect(p, '"'));
    p->buffer[n] = 0;
    *out = (Slice){p->buffer, n};
    return CODE_OK;
}

/* --- names: one open-addressing table for values, sources and strings --------------------------------------------- */
static uint32_t hash_name(char space, Slice name) {
    uint32_t h = 2166136261u ^ (unsigned char)space;
    for (size_t k = 0; k < name.size; k++) h = (h ^ (unsigned char)name.data[k]) * 16777619u;
    return h ^ h >> 15;
}

/* The entry of `name` in the space 'v', 's' or 'n', made with number UINT32_MAX if it is new. */
static Code find_name(Parser *p, char space, Slice name, NameEntry **out) {
    if (p->n_names * 2 >= p->cap_names) {
        NameEntry *old = p->names;
        uint32_t old_capacity = p->cap_names, capacity = old_capacity ? old_capacity * 2 : 256;
        TRY(ARENA_NEW(p->ctx, p->scratch, capacity, &p->names));
        p->cap_names = capacity;
        for (uint32_t k = 0; k < old_capacity; k++) {
            if (!old[k].name.data) continue;
            uint32_t at = old[k].hash & (capacity - 1);
            while (p->names[at].name.data) at = (at + 1) & (capacity - 1);
            p->names[at] = old[k];
        }
    }
    uint32_t hash = hash_name(space, name), at = hash & (p->cap_names - 1);
    for (;; at = (at + 1) & (p->cap_names - 1)) {
        NameEntry *entry = &p->names[at];
        if (!entry->name.data) break;
        if (entry->hash == hash && entry->space == space && entry->name.size == name.size &&
            memcmp(entry->name.data, name.data, name.size) == 0) {
            *out = entry;
            return CODE_OK;
        }
    }
    void *copy; /* `name` may lie in the buffer */
    TRY(arena_copy(p->ctx, p->scratch, name.data, name.size, &copy));
    p->names[at] = (NameEntry){{copy, name.size}, hash, space, UINT32_MAX};
    p->n_names++;
    *out = &p->names[at];
    return CODE_OK;
}

/* The index of a string in one of the graph's lists, added to it when it is new. */
static Code intern(Parser *p, char space, Slice text, const char **list, uint32_t *count, uint32_t *index) {
    NameEntry *entry;
    TRY(find_name(p, space, text, &entry));
    if (entry->number == UINT32_MAX) {
        char *copy;
        TRY(arena_string(p->ctx, p->g->arena, text.data, &copy)); /* read_string has ended it with NUL */
        entry->number = *count;
        list[(*count)++] = copy;
    }
    *index = entry->number;
    return CODE_OK;
}

/* --- statements --------------------------------------------------------------------------------------------------- */
static Code parse_ints(Parser *p, char open, char close, int64_t *items, size_t most, size_t *count) {
    *count = 0;
    TRY(parse_expect(p, open));
    if (parse_accept(p, close)) return CODE_OK;
    do {
        if (*count == most) return parse_fail(p, "fewer numbers");
        TRY(parse_int(p, &items[(*count)++]));
    } while (parse_accept(p, ','));
    return parse_expect(p, close);
}

static Code parse_type(Parser *p, Type *type, int64_t shape[MAX_RANK]) {
    const char *start = p->at;
    Slice word = parse_word(p);
    size_t rank;
    if (!dtype_from_name(word.data, word.size, &type->dtype)) {
        p->at = start;
        return parse_fail(p, "a type");
    }
    TRY(parse_ints(p, '[', ']', shape, MAX_RANK, &rank));
    int64_t bytes = 16;
    for (size_t d = 0; d < rank; d++) {
        int64_t size = shape[d] ? shape[d] : 1;
        if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return parse_fail(p, "a type of sensible size");
    }
    type->rank = (uint8_t)rank;
    type->shape = shape;
    return CODE_OK;
}

static Code parse_value(Parser *p, ValueId *out) {
    NameEntry *entry;
    TRY(parse_expect(p, '%'));
    const char *start = p->at;
    Slice word = read_word(p, true);
    if (word.size == 0) return parse_fail(p, "a value's name");
    TRY(find_name(p, 'v', word, &entry));
    if (entry->number == UINT32_MAX) {
        p->at = start;
        return parse_fail(p, "a value that is defined above");
    }
    *out = entry->number;
    return CODE_OK;
}

static Code parse_operands(Parser *p, size_t *count) {
    *count = 0;
    skip_blanks(p);
    if (p->at == p->end || (*p->at != '%' && *p->at != '_')) return CODE_OK;
    do {
        ValueId v = VALUE_NONE;
        if (!parse_accept(p, '_')) TRY(parse_value(p, &v));
        p->operands[(*count)++] = v;
    } while (parse_accept(p, ','));
    return CODE_OK;
}

static Code parse_attr(Parser *p, AttrName name, Attr *attr) {
    Graph *g = p->g;
    size_t count;
    skip_blanks(p);
    if (name == ATTR_name && p->at < p->end && *p->at == '"') {
        Slice text;
        uint32_t index;
        TRY(read_string(p, &text));
        TRY(intern(p, 'n', text, g->strings, &g->n_strings, &index));
        attr->i = index;
        return CODE_OK;
    }
    switch (attr_kind(name)) {
    case KIND_INT: return parse_int(p, &attr->i);
    case KIND_BOOL:
        attr->i = parse_accept_word(p, "true");
        return attr->i || parse_accept_word(p, "false") ? CODE_OK : parse_fail(p, "true or false");
    case KIND_FLOAT: {
        Scalar s;
        TRY(parse_number(p, &s));
        attr->f = scalar_f64(s);
        return CODE_OK;
    }
    case KIND_SCALAR: return parse_number(p, &attr->s);
    case KIND_INTS: break;
    }
    if (name == ATTR_program) {
        TRY(parse_program(p, &count));
    } else {
        TRY(parse_ints(p, '[', ']', p->ints, p->cap_ints, &count));
    }
    return attr_set_ints(p->ctx, g, attr, p->ints, count);
}

static Code parse_attrs(Parser *p, NodeId id) {
    uint32_t seen = 0;
    if (!parse_accept(p, '{') || parse_accept(p, '}')) return CODE_OK;
    do {
        const Node *node = graph_node(p->g, id);
        const OpInfo *info = op_info(node->op);
        skip_blanks(p);
        const char *start = p->at;
        Slice word = parse_word(p);
        int slot = 0;
        while (slot < info->n_attrs && !slice_is(word, attr_name(info->attrs[slot]))) slot++;
        if (slot == info->n_attrs || seen >> slot & 1) {
            p->at = start;
            return parse_fail(p, "an attribute of the operator");
        }
        seen |= 1u << slot;
        TRY(parse_expect(p, '='));
        TRY(parse_attr(p, info->attrs[slot], &node->attrs[slot]));
    } while (parse_accept(p, ','));
    return parse_expect(p, '}');
}

static Code parse_name(Parser *p, const char **out) {
    Slice name;
    char *copy;
    *out = "";
    if (!parse_accept(p, '@')) return CODE_OK;
    if (p->at < p->end && *p->at == '"') {
        TRY(read_string(p, &name));
    } else {
        name = read_word(p, true);
        if (name.size == 0) return parse_fail(p, "a name");
        memcpy(p->buffer, name.data, name.size);
        p->buffer[name.size] = 0;
    }
    TRY(arena_string(p->ctx, p->scratch, p->buffer, &copy));
    *out = copy;
    return CODE_OK;
}

/* Results: their names stay in p->results until the node is there. */
static Code parse_results(Parser *p, size_t *count) {
    *count = 0;
    skip_blanks(p);
    if (p->at < p->end && *p->at != '%') return CODE_OK;
    do {
        TRY(parse_expect(p, '%'));
        Slice word = read_word(p, true);
        if (word.size == 0) return parse_fail(p, "a value's name");
        p->results[(*count)++] = word;
    } while (parse_accept(p, ','));
    return parse_expect(p, '=');
}

static Code parse_types(Parser *p, size_t count) {
    for (size_t k = 0; k < count; k++) {
        int64_t *shape;
        TRY(parse_expect(p, k ? ',' : ':'));
        TRY(ARENA_NEW(p->ctx, p->scratch, MAX_RANK, &shape));
        TRY(parse_type(p, &p->types[k], shape));
    }
    return CODE_OK;
}

static Code register_input(Parser *p, NodeId id) {
    const Node *node = graph_node(p->g, id);
    int64_t index = node_int(node, ATTR_index);
    if (index < 0 || index >= (int64_t)p->lines || node->n_results != 1 || p->g->inputs[index] != VALUE_NONE) {
        return fail(p->ctx, CODE_INVALID, "line %u: input index %lld is taken or too large", p->line, (long long)index);
    }
    p->g->inputs[index] = node->first_result;
    if (p->g->n_inputs <= index) p->g->n_inputs = (uint32_t)index + 1;
    return CODE_OK;
}

static Code parse_loc(Parser *p, int32_t *source) {
    Slice text;
    uint32_t index;
    *source = -1;
    if (!parse_accept_word(p, "loc")) return CODE_OK;
    TRY(parse_expect(p, '('));
    TRY(read_string(p, &text));
    TRY(intern(p, 's', text, p->g->sources, &p->g->n_sources, &index));
    *source = (int32_t)index;
    return parse_expect(p, ')');
}

static Code parse_statement(Parser *p) {
    size_t n_results, n_operands;
    const char *name = "";
    NodeId id;
    Op op;
    int32_t source;
    TRY(parse_results(p, &n_results));
    skip_blanks(p);
    const char *start = p->at;
    Slice word = parse_word(p);
    if (word.size == 0 || !op_from_name(word.data, word.size, &op)) {
        p->at = start;
        return parse_fail(p, "an operator");
    }
    if (op == OP_constant) TRY(parse_name(p, &name));
    TRY(parse_operands(p, &n_operands));
    memset(p->types, 0, n_results * sizeof *p->types);
    TRY(graph_insert(p->ctx, p->g, NODE_NONE, op, p->operands, n_operands, p->types, n_results, -1, &id));
    TRY(parse_attrs(p, id));
    TRY(parse_types(p, n_results));
    for (size_t k = 0; k < n_results; k++) {
        Value *value = graph_value(p->g, node_result(graph_node(p->g, id), (uint32_t)k));
        void *shape;
        TRY(arena_copy(p->ctx, p->g->arena, p->types[k].shape, p->types[k].rank * sizeof(int64_t), &shape));
        value->dtype = p->types[k].dtype;
        value->rank = p->types[k].rank;
        value->shape = shape;
        NameEntry *entry;
        TRY(find_name(p, 'v', p->results[k], &entry));
        if (entry->number != UINT32_MAX) return fail(p->ctx, CODE_INVALID, "line %u: value is defined twice", p->line);
        entry->number = node_result(graph_node(p->g, id), (uint32_t)k);
    }
    if (op == OP_input) TRY(register_input(p, id));
    if (op == OP_constant) TRY(parse_constant(p, id, name));
    TRY(parse_loc(p, &source));
    graph_node(p->g, id)->source = source;
    skip_blanks(p);
    if (p->at < p->end && *p->at != '\n' && !at_comment(p)) return parse_fail(p, "the end of the line");
    return CODE_OK;
}

static Code parse_graph(Parser *p) {
    size_t count;
    skip_lines(p);
    if (!parse_accept_word(p, "graph")) return parse_fail(p, "'graph {'");
    TRY(parse_expect(p, '{'));
    for (skip_lines(p); !parse_accept_word(p, "return"); skip_lines(p)) TRY(parse_statement(p));
    TRY(parse_operands(p, &count));
    void *outputs;
    TRY(arena_copy(p->ctx, p->g->arena, p->operands, count * sizeof *p->operands, &outputs));
    p->g->outputs = outputs;
    p->g->n_outputs = (uint32_t)count;
    for (size_t k = 0; k < count; k++) {
        if (p->operands[k] == VALUE_NONE) return parse_fail(p, "outputs that are values");
    }
    for (uint32_t k = 0; k < p->g->n_inputs; k++) {
        if (p->g->inputs[k] == VALUE_NONE) return fail(p->ctx, CODE_INVALID, "input %u is missing", k);
    }
    skip_lines(p);
    TRY(parse_expect(p, '}'));
    skip_lines(p);
    return p->at == p->end ? CODE_OK : parse_fail(p, "the end of the text");
}

static Code start(Parser *p, const char *text, size_t size) {
    size_t longest = 0, length = 0;
    p->lines = 1;
    for (size_t k = 0; k < size; k++) {
        length = text[k] == '\n' ? 0 : length + 1;
        p->lines += text[k] == '\n';
        if (length > longest) longest = length;
    }
    if (p->lines >= INT32_MAX) return fail(p->ctx, CODE_INVALID, "text is too long");
    /* No line holds more items than characters; a line names a source or a string at most once each. */
    p->cap_ints = longest + STEP_WORDS;
    TRY(ARENA_NEW(p->ctx, p->scratch, longest + 1, &p->buffer));
    TRY(ARENA_NEW(p->ctx, p->scratch, longest + 1, &p->operands));
    TRY(ARENA_NEW(p->ctx, p->scratch, longest + 1, &p->results));
    TRY(ARENA_NEW(p->ctx, p->scratch, longest + 1, &p->types));
    TRY(ARENA_NEW(p->ctx, p->scratch, p->cap_ints, &p->ints));
    TRY(ARENA_NEW(p->ctx, p->g->arena, p->lines, &p->g->sources));
    TRY(ARENA_NEW(p->ctx, p->g->arena, p->lines, &p->g->strings));
    TRY(ARENA_NEW(p->ctx, p->g->arena, p->lines, &p->g->inputs));
    for (size_t k = 0; k < p->lines; k++) p->g->inputs[k] = VALUE_NONE;
    return parse_graph(p);
}

Code graph_parse(Context *ctx, Arena *arena, const char *text, size_t size, Graph **out) {
    Arena scratch;
    Graph *g;
    *out = NULL;
    TRY(graph_create(ctx, arena, &g));
    arena_init(&scratch);
    Parser parser = {.ctx = ctx, .g = g, .scratch = &scratch, .at = text, .end = text + size, .line = 1};
    Code code = start(&parser, text, size);
    arena_destroy(&scratch);
    if (code == CODE_OK) *out = g;
    return code;
}
