/* The text form of graphs. Grammar (a statement a line; `#` and `//` start comments; blank lines are skipped):
 *
 *   graph      = "graph {" statement* "return" [value {"," value}] "}"
 *   statement  = [value {"," value} "="] OP [name] [operand {"," operand}] ["{" attr {"," attr} "}"]
 *                [":" type {"," type}] [constant] ["loc(" string ")"]
 *   value      = "%" word                  printed as the value's number; any word is read
 *   operand    = value | "_"               "_": an optional operand that is absent
 *   name       = "@" (word | string)       of a constant
 *   attr       = ATTR "=" (integer | float | "true" | "false" | string | ints | program)
 *   ints       = "[" [integer {"," integer}] "]"
 *   type       = DTYPE "[" [size {"," size}] "]"
 *   constant   = ("state" | "literal") ["derived"] ["strides(" [integer {"," integer}] ")"]
 *                ["=" "[" [element {"," element}] "]"]
 *   element    = integer | float | "true" | "false" | "(" float "," float ")"
 *   program    = "[" step {";" step} "]"
 *   step       = "s"NUMBER "=" OP "(" argument {"," argument} ")" ["approximate"] ":" DTYPE
 *   argument   = "i"NUMBER | "s"NUMBER | integer | float | ("low" | "high") "=" (integer | float)
 *   word       = [A-Za-z0-9_.$/:-]+        string = '"' with \" \\ \n \xHH inside '"'
 *
 * Attributes that equal their default (0, false, none, empty) are left out. A float has a '.', an exponent, "inf" or
 * "nan" in it; an integer has not. Strides are left out when row major, elements when there are more than 32 or no
 * data: such a constant is external and has no data after parsing. `host` nodes print their operator's name as a
 * string. */
#include "graph/text_print.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/program.h"

/* The shortest decimal that reads back as the same number; `single`: the same float. */
static void print_float(Text *text, double value, bool single) {
    char digits[40];
    if (isnan(value)) {
        text_add(text, "nan");
        return;
    }
    for (int precision = 1; precision <= 17; precision++) {
        snprintf(digits, sizeof digits, "%.*g", precision, value);
        double back = strtod(digits, NULL);
        if (back == value || (single && (float)back == (float)value)) break;
    }
    char *comma = strchr(digits, ','); /* a locale with decimal commas */
    if (comma) *comma = '.';
    text_add(text, strpbrk(digits, ".en") ? "%s" : "%s.0", digits);
}

static void print_scalar(Text *text, Scalar s) {
    if (s.kind == SCALAR_INT)
        text_add(text, "%lld", (long long)s.i);
    else
        print_float(text, s.f, false);
}

static void print_string(Text *text, const char *s) {
    text_add(text, "\"");
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\')
            text_add(text, "\\%c", c);
        else if (c == '\n')
            text_add(text, "\\n");
        else if (c < 0x20 || c == 0x7f)
            text_add(text, "\\x%02x", c);
        else
            text_add(text, "%c", c);
    }
    text_add(text, "\"");
}

static void print_ints(Text *text, const int64_t *items, size_t count, const char *separator) {
    for (size_t k = 0; k < count; k++) text_add(text, "%s%lld", k ? separator : "", (long long)items[k]);
}

static void print_value(Text *text, const Graph *g, ValueId v) {
    if (v == VALUE_NONE)
        text_add(text, "_");
    else
        text_add(text, "%%%u", graph_resolve(g, v));
}

/* A step whose fields all show in the readable form; anything else makes the program print as plain integers. */
static bool step_is_plain(const int64_t words[STEP_WORDS], Step *step) {
    int64_t again[STEP_WORDS];
    if (!step_decode(words, step)) return false;
    step_encode(step, again);
    if (memcmp(words, again, sizeof again) != 0) return false;
    int n = 0;
    while (n < 3 && step->src[n] != STEP_NONE) n++;
    for (int k = n; k < 3; k++) {
        if (step->src[k] != STEP_NONE) return false;
    }
    if (n == 0) return false;
    if (step->op == OP_clamp) return !step->flag;
    if (step->high.kind != SCALAR_NONE) return false;
    if (step->op == OP_gelu) return step->scalar.kind == SCALAR_NONE;
    return !step->flag || step->scalar.kind != SCALAR_NONE; /* `reverse` shows as the place of the scalar */
}

static void print_step(Text *text, const Step *step, size_t number) {
    const char *separator = "";
    text_add(text, "%ss%zu = %s(", number ? "; " : "", number, op_info(step->op)->name);
    bool scalar = step->scalar.kind != SCALAR_NONE && step->op != OP_clamp;
    if (scalar && step->flag) {
        print_scalar(text, step->scalar);
        separator = ", ";
    }
    for (int k = 0; k < 3 && step->src[k] != STEP_NONE; k++) {
        int32_t src = step->src[k];
        text_add(text, src < 0 ? "%ss%d" : "%si%d", separator, src < 0 ? -(src + 1) : src);
        separator = ", ";
    }
    if (scalar && !step->flag) {
        text_add(text, ", ");
        print_scalar(text, step->scalar);
    }
    if (step->op == OP_clamp && step->scalar.kind != SCALAR_NONE) {
        text_add(text, ", low=");
        print_scalar(text, step->scalar);
    }
    if (step->high.kind != SCALAR_NONE) {
        text_add(text, ", high=");
        print_scalar(text, step->high);
    }
    text_add(text, ")%s : %s", step->op == OP_gelu && step->flag ? " approximate" : "", dtype_name(step->dtype));
}

static void print_program(Text *text, const int64_t *words, size_t count) {
    Step step;
    bool plain = count % STEP_WORDS == 0;
    for (size_t k = 0; plain && k < count; k += STEP_WORDS) plain = step_is_plain(words + k, &step);
    text_add(text, "[");
    if (!plain) print_ints(text, words, count, ", ");
    for (size_t k = 0; plain && k < count; k += STEP_WORDS) {
        if (step_is_plain(words + k, &step)) print_step(text, &step, k / STEP_WORDS);
    }
    text_add(text, "]");
}

static bool attr_is_default(AttrName name, const Attr *attr) {
    switch (attr_kind(name)) {
    case KIND_INTS: return attr->ints.count == 0;
    case KIND_SCALAR: return attr->s.kind == SCALAR_NONE;
    default: return attr->i == 0; /* -0.0 is not the default of a FLOAT */
    }
}

void graph_print_attrs(Text *text, const Graph *g, const Node *node) {
    const OpInfo *info = op_info(node->op);
    const char *separator = " {";
    for (int k = 0; k < info->n_attrs; k++) {
        AttrName name = info->attrs[k];
        const Attr *attr = &node->attrs[k];
        bool is_name = name == ATTR_name && attr->i >= 0 && attr->i < (int64_t)g->n_strings;
        bool always = is_name || (name == ATTR_index && node->op != OP_host); /* 0 says as much as any other there */
        if (!always && attr_is_default(name, attr)) continue;
        text_add(text, "%s%s=", separator, attr_name(name));
        separator = ", ";
        if (is_name) {
            print_string(text, g->strings[attr->i]);
            continue;
        }
        switch (attr_kind(name)) {
        case KIND_INT: text_add(text, "%lld", (long long)attr->i); break;
        case KIND_BOOL: text_add(text, "true"); break;
        case KIND_FLOAT: print_float(text, attr->f, false); break;
        case KIND_SCALAR: print_scalar(text, attr->s); break;
        case KIND_INTS:
            if (name == ATTR_program) {
                print_program(text, attr->ints.items, attr->ints.count);
            } else {
                text_add(text, "[");
                print_ints(text, attr->ints.items, attr->ints.count, ", ");
                text_add(text, "]");
            }
            break;
        }
    }
    if (separator[0] == ',') text_add(text, "}");
}

static void print_element(Text *text, DType dtype, const void *p) {
    float f;
    double d;
    switch (dtype) {
    case DTYPE_BOOL: text_add(text, *(const uint8_t *)p ? "true" : "false"); break;
    case DTYPE_U8: text_add(text, "%d", *(const uint8_t *)p); break;
    case DTYPE_I8: text_add(text, "%d", *(const int8_t *)p); break;
    case DTYPE_I16: text_add(text, "%d", *(const int16_t *)p); break;
    case DTYPE_I32: text_add(text, "%d", *(const int32_t *)p); break;
    case DTYPE_I64: text_add(text, "%lld", (long long)*(const int64_t *)p); break;
    case DTYPE_F16: print_float(text, f16_to_f32(*(const uint16_t *)p), true); break;
    case DTYPE_BF16: print_float(text, bf16_to_f32(*(const uint16_t *)p), true); break;
    case DTYPE_F32: memcpy(&f, p, sizeof f), print_float(text, f, true); break;
    case DTYPE_F64: memcpy(&d, p, sizeof d), print_float(text, d, false); break;
    case DTYPE_C64:
    case DTYPE_C128:
        text_add(text, "(");
        for (int part = 0; part < 2; part++) {
            if (part) text_add(text, ", ");
            if (dtype == DTYPE_C64)
                print_element(text, DTYPE_F32, (const float *)p + part);
            else
                print_element(text, DTYPE_F64, (const double *)p + part);
        }
        text_add(text, ")");
        break;
    default: break;
    }
}

static void print_elements(Text *text, const Constant *c, int64_t count) {
    int64_t index[MAX_RANK] = {0};
    text_add(text, " = [");
    for (int64_t n = 0; n < count; n++) {
        int64_t offset = 0;
        for (int d = 0; d < c->rank; d++) offset += index[d] * c->strides[d];
        if (n) text_add(text, ", ");
        print_element(text, c->dtype, (const char *)c->data + offset * (int64_t)dtype_size(c->dtype));
        for (int d = c->rank - 1; d >= 0 && ++index[d] == c->shape[d]; d--) index[d] = 0;
    }
    text_add(text, "]");
}

void graph_print_constant(Text *text, const Constant *c) {
    int64_t count = 1, stride = 1;
    bool row_major = true;
    for (int d = c->rank - 1; d >= 0; d--) {
        row_major = row_major && c->strides[d] == stride;
        stride *= c->shape[d] > 1 ? c->shape[d] : 1;
        count *= c->shape[d];
    }
    text_add(text, " %s%s", c->kind == CONSTANT_STATE ? "state" : "literal", c->derived ? " derived" : "");
    if (!row_major) {
        text_add(text, " strides(");
        print_ints(text, c->strides, c->rank, ",");
        text_add(text, ")");
    }
    if (c->data && count <= MAX_PRINTED_ELEMENTS && c->dtype != DTYPE_OBJECT) print_elements(text, c, count);
}

static bool is_word(const char *s) {
    return *s && s[strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.$/:-")] == 0;
}

void graph_print_constant_name(Text *text, const Constant *constant) {
    if (!constant->name || !constant->name[0]) return;
    text_add(text, " @");
    if (is_word(constant->name))
        text_add(text, "%s", constant->name);
    else
        print_string(text, constant->name);
}

void graph_print_loc(Text *text, const Graph *g, int32_t source) {
    if (source < 0 || (uint32_t)source >= g->n_sources) return;
    text_add(text, " loc(");
    print_string(text, g->sources[source]);
    text_add(text, ")");
}

static void print_node(Text *text, const Graph *g, const Node *node) {
    const Constant *constant = NULL;
    text_add(text, "  ");
    for (uint32_t k = 0; k < node->n_results; k++) text_add(text, "%s%%%u", k ? ", " : "", node_result(node, k));
    text_add(text, "%s%s", node->n_results ? " = " : "", op_info(node->op)->name);
    if (node->op == OP_constant) {
        int64_t index = node_int(node, ATTR_index);
        if (index >= 0 && index < (int64_t)g->n_constants) constant = &g->constants[index];
        if (constant) graph_print_constant_name(text, constant);
    }
    for (uint32_t k = 0; k < node->n_operands; k++) {
        text_add(text, k ? ", " : " ");
        print_value(text, g, node->operands[k]);
    }
    graph_print_attrs(text, g, node);
    for (uint32_t k = 0; k < node->n_results; k++) {
        const Value *value = graph_value(g, node_result(node, k));
        text_add(text, "%s%s[", k ? ", " : " : ", dtype_name(value->dtype));
        print_ints(text, value->shape, value->rank, ",");
        text_add(text, "]");
    }
    if (constant) graph_print_constant(text, constant);
    graph_print_loc(text, g, node->source);
    text_add(text, "\n");
}

Code graph_print(Context *ctx, const Graph *g, Text *text) {
    text_add(text, "graph {\n");
    GRAPH_EACH(g, id) print_node(text, g, graph_node(g, id));
    text_add(text, "  return");
    for (uint32_t k = 0; k < g->n_outputs; k++) {
        text_add(text, k ? ", " : " ");
        print_value(text, g, g->outputs[k]);
    }
    text_add(text, "\n}\n");
    return text_done(ctx, text);
}
