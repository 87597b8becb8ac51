/* Program.schedule(): the instructions in order and the memory that they use, for pictures and profiles. */
#include "python/core.h"

static bool append(PyObject *list, PyObject *value) {
    bool ok = value && PyList_Append(list, value) == 0;
    Py_XDECREF(value);
    return ok;
}

/* "f32[2,3]" of the instruction's first result that is written, "" if there is none. */
static void type_of(const Npuir *ir, const Instr *instr, Text *text) {
    uint32_t k = 0;
    while (k < instr->n_out && instr->out[k] == REG_NONE) k++;
    if (k == instr->n_out) return;
    const Register *r = &ir->regs[instr->out[k]];
    text_add(text, "%s[", dtype_name(r->dtype));
    for (uint8_t d = 0; d < r->rank; d++) text_add(text, "%s%lld", d ? "," : "", (long long)r->shape[d]);
    text_add(text, "]");
}

static PyObject *instruction(const Program *p, const Instr *instr) {
    Context ctx;
    Text type;
    context_init(&ctx);
    text_init(&type);
    type_of(p->ir, instr, &type);
    int32_t source = instr->node->source;
    bool known = source >= 0 && (uint32_t)source < p->graph->n_sources;
    const char *name = op_info(instr->op)->name;
    if (instr->op == OP_host) name = p->graph->strings[node_int(instr->node, ATTR_name)]; /* verified */
    PyObject *result = NULL;
    if (text_done(&ctx, &type) == CODE_OK)
        result = Py_BuildValue("{s:s,s:s,s:s,s:s}", "op", name, "device", device_name(instr->device), "type",
                               type.size ? type.data : "", "source", known ? p->graph->sources[source] : "");
    else
        PyErr_NoMemory();
    text_destroy(&type);
    return result;
}

static PyObject *instructions(const Program *p) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < p->ir->n_instrs; i++)
        if (!append(list, instruction(p, &p->ir->instrs[p->ir->order[i]]))) Py_CLEAR(list);
    return list;
}

/* Buffers of the arenas, each from the first to the last position of an instruction that touches it. */
static PyObject *buffers(const Program *p, const Lifetimes *life) {
    PyObject *list = PyList_New(0);
    for (BufferId b = 0; list && b < p->ir->n_buffers; b++) {
        const Buffer *buffer = &p->ir->buffers[b];
        if (buffer->space != SPACE_ARENA || life->first[b] == NEVER) continue;
        if (!append(list, Py_BuildValue("{s:I,s:s,s:L,s:L,s:I,s:I,s:I}", "id", (unsigned)b, "device",
                                        device_name(buffer->device), "bytes", (long long)buffer->bytes, "offset",
                                        (long long)buffer->offset, "slot", (unsigned)buffer->slot, "first",
                                        (unsigned)life->first[b], "last", (unsigned)life->last[b])))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *arenas(const Program *p) {
    PyObject *dict = PyDict_New();
    for (int d = 0; dict && d < DEVICE_COUNT; d++) {
        PyObject *bytes = PyLong_FromLongLong(p->ir->arena_bytes[d]);
        if (!bytes || PyDict_SetItemString(dict, device_name((Device)d), bytes) != 0) Py_CLEAR(dict);
        Py_XDECREF(bytes);
    }
    return dict;
}

static PyObject *segments(const Program *p) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < p->segments.count; i++) {
        const Segment *segment = &p->segments.items[i];
        if (!append(list, Py_BuildValue("(II)", (unsigned)segment->first, (unsigned)segment->count))) Py_CLEAR(list);
    }
    return list;
}

PyObject *program_schedule(PyObject *object, PyObject *unused) {
    (void)unused;
    const Program *p = ((ProgramObject *)object)->program;
    Context ctx;
    Arena arena;
    Lifetimes life;
    context_init(&ctx);
    arena_init(&arena);
    Code code = npuir_lifetimes(&ctx, &arena, p->ir, p->ir->order, &life);
    PyObject *result = NULL;
    if (code != CODE_OK) {
        raise_code(PyType_GetModuleState(Py_TYPE(object)), &ctx, code);
    } else {
        PyObject *parts[] = {instructions(p), buffers(p, &life), segments(p), arenas(p)};
        if (parts[0] && parts[1] && parts[2] && parts[3])
            result = Py_BuildValue("{s:O,s:O,s:O,s:O}", "instructions", parts[0], "buffers", parts[1], "segments",
                                   parts[2], "arena_bytes", parts[3]);
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) Py_XDECREF(parts[i]);
    }
    arena_destroy(&arena);
    return result;
}
