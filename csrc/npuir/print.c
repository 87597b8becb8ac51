/* The text form of NPUIR. Grammar (a statement a line; `#` starts a comment; operators, attributes, types, constants
 * and locations are written as in the text form of graphs, graph/text_print.c):
 *
 *   npuir      = "npuir" TARGET "{" buffer* arena* (register | instr)* "return" [reg {"," reg}] "}"
 *   buffer     = "b"N ":" space "," BYTES "bytes" ["," "offset" N "," "slot" N]
 *   space      = "arena" DEVICE | "constant" N | "input" N | "output" N DEVICE | "host" N | "object" N [DEVICE]
 *   arena      = "arena" DEVICE BYTES                          only in a schedule
 *   register   = result "=" "input" "{index=N}" | result "=" "constant" ["@"name] "{index=N}" constant
 *              | result "=" "view" reg                         another look into that register's buffer
 *   instr      = [result {"," result} "="] OP [operand {"," operand}] [attrs] "on" DEVICE
 *                ["scratch" "b"N] ["inplace" N] ["group" N] [loc]
 *   result     = reg ":" type "b"N ["strides(" ints ")"] ["offset" N]
 *              | "_" ":" type                                 a result that is not written
 *   reg        = "%r"N         operand = reg | "_"
 *
 * Strides are left out when row major, an offset (in elements) when 0. A register stands before its first use. The
 * plain form lists instructions as lowering made them; the schedule lists them in order, marks each change of device
 * and shows the bytes that are live (before in-place reuse) as comments. */
#include <string.h>

#include "graph/text_print.h"
#include "npuir/live.h"
#include "npuir/npuir.h"
#include "npuir/view.h"

typedef struct Printer {
    const Npuir *ir;
    Text *text;
    bool *printed; /* registers */
    RegId *first;  /* of each buffer: the register that a view names */
    bool schedule;
} Printer;

static void print_numbers(Text *text, const int64_t *items, size_t count) {
    for (size_t k = 0; k < count; k++) text_add(text, "%s%lld", k ? "," : "", (long long)items[k]);
}

static void print_type(Text *text, DType dtype, uint8_t rank, const int64_t *shape) {
    text_add(text, "%s[", dtype_name(dtype));
    print_numbers(text, shape, rank);
    text_add(text, "]");
}

static void print_buffer(const Printer *p, BufferId id) {
    static const char *const names[] = {"arena", "constant", "input", "output", "host", "object"};
    const Buffer *b = &p->ir->buffers[id];
    text_add(p->text, "  b%u : %s", id, names[b->space]);
    if (b->space != SPACE_ARENA) text_add(p->text, " %u", b->index);
    if (b->space == SPACE_ARENA || b->space == SPACE_OUTPUT || b->device != DEVICE_CPU)
        text_add(p->text, " %s", device_name(b->device));
    text_add(p->text, ", %lld bytes", (long long)b->bytes);
    if (p->schedule && b->offset >= 0) text_add(p->text, ", offset %lld, slot %u", (long long)b->offset, b->slot);
    text_add(p->text, "\n");
}

static void print_result(const Printer *p, RegId id) {
    const Register *r = &p->ir->regs[id];
    text_add(p->text, "%%r%u : ", id);
    print_type(p->text, r->dtype, r->rank, r->shape);
    text_add(p->text, " b%u", r->buffer);
    bool constant = p->ir->buffers[r->buffer].space == SPACE_CONSTANT && !r->view; /* shows its strides itself */
    if (!constant && !view_is_row_major(r->rank, r->shape, r->strides)) {
        text_add(p->text, " strides(");
        print_numbers(p->text, r->strides, r->rank);
        text_add(p->text, ")");
    }
    if (r->offset) text_add(p->text, " offset %lld", (long long)r->offset);
}

/* A register that no instruction makes, and before it the register that it looks into. */
static void print_register(const Printer *p, RegId id) {
    const Npuir *ir = p->ir;
    const Register *r = &ir->regs[id];
    if (p->printed[id]) return;
    p->printed[id] = true;
    RegId base = p->first[r->buffer];
    if (r->view && !p->printed[base] && !ir->regs[base].view) print_register(p, base);
    text_add(p->text, "  ");
    print_result(p, id);
    if (r->view) {
        text_add(p->text, " = view %%r%u\n", base);
        return;
    }
    uint32_t index = ir->buffers[r->buffer].index;
    if (ir->buffers[r->buffer].space == SPACE_CONSTANT) {
        text_add(p->text, " = constant");
        graph_print_constant_name(p->text, &ir->graph->constants[index]);
        text_add(p->text, " {index=%u}", index);
        graph_print_constant(p->text, &ir->graph->constants[index]);
    } else {
        for (uint32_t i = 0; i < ir->n_inputs; i++) {
            if (ir->inputs[i] == id) index = i; /* an object's index is not its input's */
        }
        text_add(p->text, " = input {index=%u}", index);
    }
    text_add(p->text, "\n");
}

static void print_instr(const Printer *p, const Instr *instr) {
    const Npuir *ir = p->ir;
    for (uint32_t k = 0; k < instr->n_in; k++) {
        if (instr->in[k] != REG_NONE) print_register(p, instr->in[k]);
    }
    text_add(p->text, "  ");
    for (uint32_t k = 0; k < instr->n_out; k++) {
        if (k) text_add(p->text, ", ");
        if (instr->out[k] == REG_NONE) {
            const Value *value = graph_value(ir->graph, node_result(instr->node, k));
            text_add(p->text, "_ : ");
            print_type(p->text, value->dtype, value->rank, value->shape);
        } else {
            print_result(p, instr->out[k]);
        }
    }
    text_add(p->text, "%s%s", instr->n_out ? " = " : "", op_info(instr->op)->name);
    for (uint32_t k = 0; k < instr->n_in; k++) {
        if (instr->in[k] == REG_NONE)
            text_add(p->text, "%s_", k ? ", " : " ");
        else
            text_add(p->text, "%s%%r%u", k ? ", " : " ", instr->in[k]);
    }
    graph_print_attrs(p->text, ir->graph, instr->node);
    text_add(p->text, " on %s", device_name(instr->device));
    if (instr->scratch != BUFFER_NONE) text_add(p->text, " scratch b%u", instr->scratch);
    if (p->schedule && instr->inplace) text_add(p->text, " inplace %u", instr->inplace_operand);
    if (p->schedule && instr->group) text_add(p->text, " group %u", instr->group);
    graph_print_loc(p->text, ir->graph, instr->node->source);
}

static void print_body(const Printer *p, const int64_t *live) {
    const Npuir *ir = p->ir;
    Device device = DEVICE_CPU;
    for (uint32_t i = 0; i < ir->n_inputs; i++) {
        if (ir->inputs[i] != REG_NONE) print_register(p, ir->inputs[i]);
    }
    for (uint32_t n = 0; n < ir->n_instrs; n++) {
        const Instr *instr = &ir->instrs[p->schedule ? ir->order[n] : n];
        if (p->schedule && instr->device != device) {
            device = instr->device;
            text_add(p->text, "  # --- %s\n", device_name(device));
        }
        print_instr(p, instr);
        if (p->schedule) text_add(p->text, " # live %lld", (long long)live[n]);
        text_add(p->text, "\n");
    }
    for (RegId r = 0; r < ir->n_regs; r++) print_register(p, r); /* views that only outputs or nothing uses */
}

static Code print(Context *ctx, Printer *p, Arena *scratch) {
    const Npuir *ir = p->ir;
    int64_t *live, largest = 0;
    TRY(ARENA_NEW(ctx, scratch, ir->n_regs, &p->printed));
    TRY(ARENA_NEW(ctx, scratch, ir->n_buffers, &p->first));
    TRY(ARENA_NEW(ctx, scratch, ir->n_instrs, &live));
    TRY(npuir_live_bytes(ctx, scratch, ir, ir->order, live, &largest));
    memset(p->first, 0xff, ir->n_buffers * sizeof *p->first); /* REG_NONE */
    for (RegId r = ir->n_regs; r-- > 0;) {
        if (!ir->regs[r].view) p->first[ir->regs[r].buffer] = r;
    }
    for (uint32_t i = 0; i < ir->n_instrs; i++) { /* these stand in their instruction's line */
        for (uint32_t k = 0; k < ir->instrs[i].n_out; k++) {
            if (ir->instrs[i].out[k] != REG_NONE) p->printed[ir->instrs[i].out[k]] = true;
        }
    }
    text_add(p->text, "npuir %s {\n", ir->target);
    for (BufferId b = 0; b < ir->n_buffers; b++) print_buffer(p, b);
    for (int d = 0; d < DEVICE_COUNT && p->schedule; d++) {
        if (ir->arena_bytes[d])
            text_add(p->text, "  arena %s %lld\n", device_name((Device)d), (long long)ir->arena_bytes[d]);
    }
    print_body(p, live);
    text_add(p->text, "  return");
    for (uint32_t i = 0; i < ir->n_outputs; i++) text_add(p->text, "%s%%r%u", i ? ", " : " ", ir->outputs[i]);
    text_add(p->text, "\n}\n");
    return text_done(ctx, p->text);
}

Code npuir_print(Context *ctx, const Npuir *ir, bool schedule, Text *text) {
    Printer p = {.ir = ir, .text = text, .schedule = schedule};
    Arena scratch;
    arena_init(&scratch);
    Code code = print(ctx, &p, &scratch);
    arena_destroy(&scratch);
    return code;
}
