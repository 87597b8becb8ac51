/* Reads the text form of NPUIR; the grammar stands in print.c.
 *
 * Operators, attributes, constants and locations are the graph's: each line is rewritten as a statement of graph text
 * on a line of the same number, and graph_parse reads the whole. The graph that comes of it carries types, attributes
 * and sources of the instructions (views stand in it as `reshape`); it is not one to compile. npuir_verify then checks
 * the rest. */
#include <string.h>

#include "graph/text_parse.h"
#include "npuir/npuir.h"
#include "npuir/view.h"

enum Statement { STATEMENT_INPUT, STATEMENT_CONSTANT, STATEMENT_VIEW, STATEMENT_INSTR };

typedef struct Line { /* one statement of the graph text */
    enum Statement kind;
    uint32_t index; /* register, or instruction */
} Line;

typedef struct Reader {
    Parser p; /* only its position is used, and what moves it */
    Arena *arena, scratch;
    Npuir *ir;
    Text graph, types; /* the graph text; the types of one line's results */
    Line *lines;       /* of each node of the graph */
    uint32_t n_lines, n_values;
    bool *defined; /* registers */
    uint32_t cap_regs;
    RegId *results, *operands; /* of one line */
} Reader;

/* --- tokens ------------------------------------------------------------------------------------------------------- */
static bool at_line_end(Reader *r) {
    parse_accept(&r->p, '\0'); /* skips blanks; no text of ours holds a NUL */
    return r->p.at == r->p.end || *r->p.at == '\n' || *r->p.at == '#';
}

/* To the start of the next line, which also begins in the graph text. */
static void next_line(Reader *r) {
    while (r->p.at < r->p.end && *r->p.at != '\n') r->p.at++;
    if (r->p.at == r->p.end) return;
    r->p.at++;
    r->p.line++;
    text_add(&r->graph, "\n");
}

static Code end_line(Reader *r) {
    if (!at_line_end(r)) return parse_fail(&r->p, "the end of the line");
    next_line(r);
    return CODE_OK;
}

static void skip_empty_lines(Reader *r) {
    while (at_line_end(r) && r->p.at < r->p.end) next_line(r);
}

static Code read_u32(Reader *r, uint32_t *out) {
    int64_t number;
    TRY(parse_int(&r->p, &number));
    if (number < 0 || number >= INT32_MAX) return parse_fail(&r->p, "a smaller number");
    *out = (uint32_t)number;
    return CODE_OK;
}

static Code read_size(Reader *r, int64_t *out) {
    TRY(parse_int(&r->p, out));
    return *out < 0 || *out > INT64_MAX / 4 ? parse_fail(&r->p, "a sensible size") : CODE_OK;
}

/* "r12" or "b3" */
static Code read_numbered(Reader *r, char prefix, const char *what, uint32_t *out) {
    parse_accept(&r->p, '\0');
    if (r->p.at == r->p.end || *r->p.at != prefix) return parse_fail(&r->p, what);
    r->p.at++;
    if (r->p.at == r->p.end || *r->p.at < '0' || *r->p.at > '9') return parse_fail(&r->p, what);
    return read_u32(r, out);
}

static Code read_device(Reader *r, Device *out) {
    for (int d = 0; d < DEVICE_COUNT; d++) {
        *out = (Device)d;
        if (parse_accept_word(&r->p, device_name(*out))) return CODE_OK;
    }
    return parse_fail(&r->p, "a device");
}

static Code read_buffer_name(Reader *r, BufferId *out) {
    TRY(read_numbered(r, 'b', "a buffer", out));
    return *out < r->ir->n_buffers ? CODE_OK : parse_fail(&r->p, "a buffer that is listed above");
}

/* A register that is there already, or REG_NONE for "_". */
static Code read_operand(Reader *r, RegId *out) {
    *out = REG_NONE;
    if (parse_accept(&r->p, '_')) return CODE_OK;
    TRY(parse_expect(&r->p, '%'));
    TRY(read_numbered(r, 'r', "a register", out));
    return *out < r->cap_regs && r->defined[*out] ? CODE_OK : parse_fail(&r->p, "a register that is defined above");
}

/* Copies what stands from here to an unquoted character of `stop`, or to the end of the line. */
static void copy_until(Reader *r, const char *stop) {
    const char *start = r->p.at;
    bool quoted = false;
    for (; r->p.at < r->p.end && *r->p.at != '\n'; r->p.at++) {
        char c = *r->p.at;
        if (c == '\\' && quoted && r->p.end - r->p.at > 1 && r->p.at[1] != '\n')
            r->p.at++;
        else if (c == '"')
            quoted = !quoted;
        else if (!quoted && c && strchr(stop, c))
            break;
    }
    while (start < r->p.at) { /* in pieces, since a precision is an int */
        size_t n = (size_t)(r->p.at - start) < 4096 ? (size_t)(r->p.at - start) : 4096;
        text_add(&r->graph, "%.*s", (int)n, start);
        start += n;
    }
}

static void copy_attrs(Reader *r) {
    parse_accept(&r->p, '\0');
    if (r->p.at == r->p.end || *r->p.at != '{') return;
    text_add(&r->graph, " ");
    copy_until(r, "}");
    if (parse_accept(&r->p, '}')) text_add(&r->graph, "}");
}

static Code read_ints(Reader *r, char open, char close, int64_t *items, uint8_t *count) {
    *count = 0;
    TRY(parse_expect(&r->p, open));
    if (parse_accept(&r->p, close)) return CODE_OK;
    do {
        if (*count == MAX_RANK) return parse_fail(&r->p, "fewer numbers");
        TRY(read_size(r, &items[(*count)++]));
    } while (parse_accept(&r->p, ','));
    return parse_expect(&r->p, close);
}

/* --- lines -------------------------------------------------------------------------------------------------------- */
static Code read_buffer(Reader *r) {
    static const char *const names[] = {"arena", "constant", "input", "output", "host", "object"};
    Npuir *ir = r->ir;
    Buffer b = {.offset = -1};
    uint32_t id, space = 0;
    TRY(read_numbered(r, 'b', "a buffer", &id));
    if (id != ir->n_buffers) return parse_fail(&r->p, "buffers numbered from 0");
    TRY(parse_expect(&r->p, ':'));
    while (space < sizeof names / sizeof *names && !parse_accept_word(&r->p, names[space])) space++;
    if (space == sizeof names / sizeof *names) return parse_fail(&r->p, "a space");
    b.space = (Space)space;
    if (b.space != SPACE_ARENA) TRY(read_u32(r, &b.index));
    if (!parse_accept(&r->p, ',')) {
        TRY(read_device(r, &b.device));
        TRY(parse_expect(&r->p, ','));
    }
    TRY(read_size(r, &b.bytes));
    if (!parse_accept_word(&r->p, "bytes")) return parse_fail(&r->p, "'bytes'");
    if (parse_accept(&r->p, ',')) {
        if (!parse_accept_word(&r->p, "offset")) return parse_fail(&r->p, "'offset'");
        TRY(read_size(r, &b.offset));
        TRY(parse_expect(&r->p, ','));
        if (!parse_accept_word(&r->p, "slot")) return parse_fail(&r->p, "'slot'");
        TRY(read_u32(r, &b.slot));
    }
    if (b.space == SPACE_HOST && b.index >= ir->n_host) ir->n_host = b.index + 1;
    if (b.space == SPACE_OBJECT && b.index >= ir->n_objects) ir->n_objects = b.index + 1;
    ir->buffers[ir->n_buffers++] = b;
    return end_line(r);
}

static Code read_arena(Reader *r) {
    Device device;
    TRY(read_device(r, &device));
    TRY(read_size(r, &r->ir->arena_bytes[device]));
    return end_line(r);
}

static Code read_type(Reader *r, DType *dtype, View *v) {
    Slice word = parse_word(&r->p);
    if (!dtype_from_name(word.data, word.size, dtype)) return parse_fail(&r->p, "a type");
    TRY(read_ints(r, '[', ']', v->shape, &v->rank));
    text_add(&r->types, "%s%s[", r->types.size ? ", " : " : ", dtype_name(*dtype));
    for (int d = 0; d < v->rank; d++) text_add(&r->types, "%s%lld", d ? "," : "", (long long)v->shape[d]);
    text_add(&r->types, "]");
    view_dense_strides(v->rank, v->shape, NULL, v->strides);
    return view_count(v->rank, v->shape) < 0 ? parse_fail(&r->p, "a type of sensible size") : CODE_OK;
}

static Code read_result(Reader *r, RegId *out) {
    Npuir *ir = r->ir;
    Register reg = {.value = r->n_values++};
    View v = {0};
    uint8_t n_strides;
    bool written = !parse_accept(&r->p, '_');
    *out = REG_NONE;
    if (written) {
        TRY(parse_expect(&r->p, '%'));
        TRY(read_numbered(r, 'r', "a register", out));
        if (*out >= r->cap_regs || r->defined[*out]) return parse_fail(&r->p, "registers numbered from 0, each once");
        text_add(&r->graph, "%%%u", *out);
    } else {
        text_add(&r->graph, "%%unused_%u", reg.value);
    }
    TRY(parse_expect(&r->p, ':'));
    TRY(read_type(r, &reg.dtype, &v));
    if (!written) return CODE_OK;
    TRY(read_buffer_name(r, &reg.buffer));
    if (parse_accept_word(&r->p, "strides")) {
        TRY(read_ints(r, '(', ')', v.strides, &n_strides));
        if (n_strides != v.rank) return parse_fail(&r->p, "a stride for each dimension");
    }
    if (parse_accept_word(&r->p, "offset")) TRY(read_size(r, &reg.offset));
    void *shape, *strides;
    TRY(arena_copy(r->p.ctx, r->arena, v.shape, v.rank * sizeof *v.shape, &shape));
    TRY(arena_copy(r->p.ctx, r->arena, v.strides, v.rank * sizeof *v.strides, &strides));
    reg.rank = v.rank;
    reg.shape = shape;
    reg.strides = strides;
    ir->regs[*out] = reg;
    if (*out >= ir->n_regs) ir->n_regs = *out + 1;
    return CODE_OK;
}

static const char *types_of(const Reader *r) { return r->types.failed ? "" : r->types.data; }

static Code read_view(Reader *r, RegId id) {
    RegId base;
    TRY(read_operand(r, &base));
    if (base == REG_NONE || r->ir->regs[base].buffer != r->ir->regs[id].buffer)
        return parse_fail(&r->p, "a register of the same buffer before this");
    r->ir->regs[id].view = true;
    text_add(&r->graph, "reshape %%%u%s", base, types_of(r));
    return CODE_OK;
}

static Code read_list(Reader *r, RegId *items, uint32_t *count) {
    *count = 0;
    parse_accept(&r->p, '\0');
    if (r->p.at == r->p.end || (*r->p.at != '%' && *r->p.at != '_')) return CODE_OK;
    do {
        if (*count) text_add(&r->graph, ",");
        TRY(read_operand(r, &items[*count]));
        if (items[*count] == REG_NONE)
            text_add(&r->graph, " _");
        else
            text_add(&r->graph, " %%%u", items[*count]);
        (*count)++;
    } while (parse_accept(&r->p, ','));
    return CODE_OK;
}

static Code read_instr(Reader *r, uint32_t n_out) {
    Instr *instr = &r->ir->instrs[r->ir->n_instrs];
    void *in, *out;
    *instr = (Instr){.n_out = n_out, .scratch = BUFFER_NONE};
    Slice word = parse_word(&r->p);
    if (!op_from_name(word.data, word.size, &instr->op)) return parse_fail(&r->p, "an operator");
    text_add(&r->graph, "%s", op_info(instr->op)->name);
    TRY(read_list(r, r->operands, &instr->n_in));
    TRY(arena_copy(r->p.ctx, r->arena, r->operands, instr->n_in * sizeof *r->operands, &in));
    TRY(arena_copy(r->p.ctx, r->arena, r->results, n_out * sizeof *r->results, &out));
    instr->in = in;
    instr->out = out;
    copy_attrs(r);
    text_add(&r->graph, "%s ", types_of(r));
    if (!parse_accept_word(&r->p, "on")) return parse_fail(&r->p, "'on'");
    TRY(read_device(r, &instr->device));
    if (parse_accept_word(&r->p, "scratch")) {
        TRY(read_buffer_name(r, &instr->scratch));
        instr->scratch_bytes = r->ir->buffers[instr->scratch].bytes;
    }
    if (parse_accept_word(&r->p, "inplace")) {
        instr->inplace = true;
        TRY(read_u32(r, &instr->inplace_operand));
    }
    if (parse_accept_word(&r->p, "group")) {
        TRY(read_u32(r, &instr->group));
    }
    copy_until(r, "#");
    r->lines[r->n_lines++] = (Line){STATEMENT_INSTR, r->ir->n_instrs++};
    return CODE_OK;
}

static Code read_statement(Reader *r) {
    uint32_t n = 0;
    r->types.size = 0;
    text_add(&r->types, "%s", "");
    parse_accept(&r->p, '\0');
    bool results = r->p.at < r->p.end && (*r->p.at == '%' || *r->p.at == '_');
    if (results) {
        do {
            if (n) text_add(&r->graph, ", ");
            TRY(read_result(r, &r->results[n++]));
        } while (parse_accept(&r->p, ','));
        TRY(parse_expect(&r->p, '='));
        text_add(&r->graph, " = ");
    }
    bool one = n == 1 && r->results[0] != REG_NONE;
    enum Statement kind = STATEMENT_INSTR;
    if (one && parse_accept_word(&r->p, "view")) {
        TRY(read_view(r, r->results[0]));
        kind = STATEMENT_VIEW;
    } else if (one && parse_accept_word(&r->p, "input")) {
        text_add(&r->graph, "input");
        copy_attrs(r);
        text_add(&r->graph, "%s", types_of(r));
        kind = STATEMENT_INPUT;
    } else if (one && parse_accept_word(&r->p, "constant")) {
        text_add(&r->graph, "constant ");
        copy_until(r, "{#");
        copy_attrs(r);
        text_add(&r->graph, "%s ", types_of(r));
        copy_until(r, "#");
        kind = STATEMENT_CONSTANT;
    } else {
        TRY(read_instr(r, n));
    }
    if (kind != STATEMENT_INSTR) r->lines[r->n_lines++] = (Line){kind, r->results[0]};
    for (uint32_t k = 0; k < n; k++) {
        if (r->results[k] == REG_NONE) continue;
        if (r->defined[r->results[k]]) return parse_fail(&r->p, "each register once");
        r->defined[r->results[k]] = true;
    }
    return end_line(r);
}

/* --- the whole ---------------------------------------------------------------------------------------------------- */
static Code read_text(Reader *r) {
    Npuir *ir = r->ir;
    void *outputs;
    skip_empty_lines(r);
    if (!parse_accept_word(&r->p, "npuir")) return parse_fail(&r->p, "'npuir TARGET {'");
    Slice target = parse_word(&r->p);
    if (target.size == 0 || target.size >= sizeof ir->target) return parse_fail(&r->p, "a target");
    memcpy(ir->target, target.data, target.size);
    TRY(parse_expect(&r->p, '{'));
    text_add(&r->graph, "graph {");
    TRY(end_line(r));
    for (;;) {
        skip_empty_lines(r);
        const char *start = r->p.at;
        Slice word = parse_word(&r->p);
        if (slice_is(word, "return")) break;
        if (slice_is(word, "arena")) {
            TRY(read_arena(r));
            continue;
        }
        bool buffer = word.size > 1 && word.data[0] == 'b' && word.data[1] >= '0' && word.data[1] <= '9';
        r->p.at = start;
        TRY(buffer ? read_buffer(r) : read_statement(r));
    }
    text_add(&r->graph, "return");
    TRY(read_list(r, r->operands, &ir->n_outputs));
    for (uint32_t k = 0; k < ir->n_outputs; k++) {
        if (r->operands[k] == REG_NONE) return parse_fail(&r->p, "outputs that are registers");
    }
    TRY(arena_copy(r->p.ctx, r->arena, r->operands, ir->n_outputs * sizeof *r->operands, &outputs));
    ir->outputs = outputs;
    TRY(end_line(r));
    skip_empty_lines(r);
    TRY(parse_expect(&r->p, '}'));
    text_add(&r->graph, "}");
    while (at_line_end(r) && r->p.at < r->p.end) next_line(r);
    if (r->p.at < r->p.end) return parse_fail(&r->p, "the end of the text");
    for (RegId id = 0; id < ir->n_regs; id++) {
        if (!r->defined[id]) return fail(r->p.ctx, CODE_INVALID, "line %u: register %%r%u is missing", r->p.line, id);
    }
    TRY(text_done(r->p.ctx, &r->types));
    return text_done(r->p.ctx, &r->graph);
}

/* Ties instructions to the graph's nodes, inputs and constants to its lists. */
static Code join_graph(Reader *r, const Graph *g) {
    Npuir *ir = r->ir;
    ir->graph = g;
    ir->n_inputs = g->n_inputs;
    TRY(ARENA_NEW(r->p.ctx, r->arena, g->n_inputs, &ir->inputs));
    if (g->n_nodes != r->n_lines || g->n_values != r->n_values)
        return fail(r->p.ctx, CODE_INVALID, "the text holds statements that are not NPUIR");
    for (uint32_t k = 0; k < r->n_lines; k++) {
        const Node *node = graph_node(g, k);
        Line line = r->lines[k];
        if (line.kind == STATEMENT_INSTR) ir->instrs[line.index].node = node;
        if (line.kind == STATEMENT_INPUT) ir->inputs[node_int(node, ATTR_index)] = line.index;
        if (line.kind != STATEMENT_CONSTANT) continue;
        Register *reg = &ir->regs[line.index];
        const Buffer *b = &ir->buffers[reg->buffer];
        int64_t index = node_int(node, ATTR_index);
        if (b->space != SPACE_CONSTANT || b->index != index)
            return fail(r->p.ctx, CODE_INVALID, "register %%r%u: constant %lld lies in another buffer", line.index,
                        (long long)index);
        reg->strides = g->constants[index].strides;
    }
    TRY(ARENA_NEW(r->p.ctx, r->arena, ir->n_instrs, &ir->order));
    for (uint32_t i = 0; i < ir->n_instrs; i++) ir->order[i] = i;
    return npuir_verify(r->p.ctx, ir);
}

static Code parse(Reader *r) {
    size_t size = (size_t)(r->p.end - r->p.at), lines = 1, marks = 1;
    for (const char *c = r->p.at; c < r->p.end; c++) {
        lines += *c == '\n';
        marks += *c == '%' || *c == '_';
        if (!*c) return fail(r->p.ctx, CODE_INVALID, "line %zu: a NUL character", lines);
    }
    if (size >= INT32_MAX) return fail(r->p.ctx, CODE_INVALID, "text is too long");
    r->cap_regs = (uint32_t)marks;
    TRY(ARENA_NEW(r->p.ctx, r->arena, 1, &r->ir));
    r->ir->arena = r->arena;
    TRY(ARENA_NEW(r->p.ctx, r->arena, lines, &r->ir->buffers));
    TRY(ARENA_NEW(r->p.ctx, r->arena, lines, &r->ir->instrs));
    TRY(ARENA_NEW(r->p.ctx, r->arena, marks, &r->ir->regs));
    TRY(ARENA_NEW(r->p.ctx, &r->scratch, lines, &r->lines));
    TRY(ARENA_NEW(r->p.ctx, &r->scratch, marks, &r->defined));
    TRY(ARENA_NEW(r->p.ctx, &r->scratch, marks, &r->results));
    TRY(ARENA_NEW(r->p.ctx, &r->scratch, marks, &r->operands));
    TRY(read_text(r));
    Graph *g;
    TRY(graph_parse(r->p.ctx, r->arena, r->graph.data, r->graph.size, &g));
    return join_graph(r, g);
}

Code npuir_parse(Context *ctx, Arena *arena, const char *text, size_t size, Npuir **out) {
    Reader r = {.p = {.ctx = ctx, .at = text, .end = text + size, .line = 1}, .arena = arena};
    *out = NULL;
    arena_init(&r.scratch);
    text_init(&r.graph);
    text_init(&r.types);
    Code code = parse(&r);
    text_destroy(&r.graph);
    text_destroy(&r.types);
    arena_destroy(&r.scratch);
    if (code == CODE_OK) *out = r.ir;
    return code;
}
