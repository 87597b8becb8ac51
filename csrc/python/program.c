/* The type Program: compile, run, text, report. */
#include "python/core.h"

enum { RUN_POLL_MS = 50, FEW_POINTERS = 32 };

/* --- compile ------------------------------------------------------------------------------------------------------ */
static bool any_opaque(const Graph *g, const ValueId *values, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (graph_value(g, values[i])->dtype == DTYPE_OBJECT) return true;
    return false;
}

PyObject *make_program(PyObject *module, Program *program, PyObject *keepalive) {
    ModuleState *state = PyModule_GetState(module);
    PyTypeObject *type = state->program_type;
    ProgramObject *self = (ProgramObject *)type->tp_alloc(type, 0);
    if (!self) {
        forge_destroy(program);
        return NULL;
    }
    self->program = program;
    self->keepalive = Py_NewRef(keepalive);
    self->opaque_inputs = any_opaque(program->graph, program->graph->inputs, program->graph->n_inputs);
    self->opaque_outputs = any_opaque(program->graph, program->graph->outputs, program->graph->n_outputs);
    return (PyObject *)self;
}

/* Three int64 that count while compiling (base/status.h): phase, done, total. None: nobody looks. */
static bool progress_open(PyObject *object, Py_buffer *out) {
    _Static_assert(sizeof(Progress) == 3 * sizeof(int64_t), "a Progress is three plain numbers");
    if (object == Py_None) return true;
    if (PyObject_GetBuffer(object, out, PyBUF_WRITABLE)) return false;
    if (out->len == sizeof(Progress) && (uintptr_t)out->buf % _Alignof(Progress) == 0) return true;
    PyErr_Format(PyExc_ValueError, "progress: want three int64, got %zd bytes", out->len);
    PyBuffer_Release(out);
    return false;
}

PyObject *program_compile(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"nodes",    "values",    "constants",       "operands",       "attrs",     "dims",
                               "outputs",  "strings",   "sources",         "target",         "passes",    "alpha",
                               "autotune", "keep_text", "executable",      "pack",           "threads",   "keepalive",
                               "npu_mode", "device",    "precision",       "fold",           "f32_types", "f32_border",
                               "config",   "cache_dir", "fail_allocation", "host_precision", "progress",  "schedule",
                               "share",    NULL};
    const ModuleState *state = PyModule_GetState(module);
    PyObject *table[TABLE_OBJECTS];
    ProgramArgs given;
    CompileOptions *options = &given.options;
    PyObject *shown = Py_None;
    Py_buffer counters = {0};
    unsigned long long fail_allocation = 0;
    program_args_init(&given);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOO|$ssdppppiOsOspppszKsOpO:compile", keywords, &table[0],
                                     &table[1], &table[2], &table[3], &table[4], &table[5], &table[6], &table[7],
                                     &table[8], &options->target, &options->passes, &options->alpha, &given.autotune,
                                     &given.keep_text, &given.executable, &given.pack, &options->threads,
                                     &given.keepalive, &given.npu_mode, &given.device, &given.precision, &given.fold,
                                     &given.f32_types, &given.f32_border, &options->npu.config, &options->npu.cache_dir,
                                     &fail_allocation, &given.host_precision, &shown, &given.schedule, &given.share))
        return NULL;
    if (!program_args_check(state, &given) || !progress_open(shown, &counters)) return NULL;

    TableArgs table_args;
    PyObject *result = NULL;
    if (table_open(&table_args, table)) {
        Context ctx;
        Door door;
        Program *program = NULL;
        context_init(&ctx);
        ctx.fail_allocation = fail_allocation;
        ctx.progress = counters.buf;
        door_leave(&door, &ctx, COMPILE_POLL_MS);
        Code code = forge_compile(&ctx, &table_args.table, options, &program);
        door_enter(&door);
        if (code == CODE_OK)
            result = make_program(module, program, given.keepalive);
        else
            raise_code(state, &ctx, code);
    }
    table_close(&table_args);
    PyBuffer_Release(&counters);
    return result;
}

/* --- run ---------------------------------------------------------------------------------------------------------- */
typedef struct RunArgs {
    PyObject *inputs, *outputs; /* fast sequences, owned */
    PyObject *host;             /* NULL: none; borrowed */
    void **pointers;            /* inputs, outputs, objects */
    void *few[FEW_POINTERS];
} RunArgs;

/* (inputs, outputs, host=None), each also by its name. */
static bool split_arguments(PyObject *const *args, Py_ssize_t n, PyObject *names, PyObject *split[3]) {
    static const char *const expected[3] = {"inputs", "outputs", "host"};
    if (n > 3) return PyErr_Format(PyExc_TypeError, "run() takes at most 3 arguments, got %zd", n), false;
    for (Py_ssize_t i = 0; i < n; i++) split[i] = args[i];
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int k = 0;
        while (k < 3 && PyUnicode_CompareWithASCIIString(name, expected[k]) != 0) k++;
        if (k == 3 || split[k])
            return PyErr_Format(PyExc_TypeError, "run() got an unexpected or second argument '%U'", name), false;
        split[k] = args[n + i];
    }
    for (int k = 0; k < 2; k++)
        if (!split[k]) return PyErr_Format(PyExc_TypeError, "run() misses argument '%s'", expected[k]), false;
    return true;
}

/* Addresses of `sequence`, or for opaque values the objects themselves (inputs) and nothing (outputs). */
static bool read_addresses(const Graph *g, PyObject *sequence, const char *what, const ValueId *values, uint32_t count,
                           bool objects, void **pointers) {
    if (PySequence_Fast_GET_SIZE(sequence) != (Py_ssize_t)count) {
        PyErr_Format(PyExc_ValueError, "%s: want %u, got %zd", what, (unsigned)count,
                     PySequence_Fast_GET_SIZE(sequence));
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(sequence, (Py_ssize_t)i);
        if (graph_value(g, values[i])->dtype == DTYPE_OBJECT) {
            pointers[i] = objects ? item : NULL;
            continue;
        }
        pointers[i] = PyLong_AsVoidPtr(item);
        if (!pointers[i] && PyErr_Occurred()) {
            if (PyErr_ExceptionMatches(PyExc_TypeError))
                PyErr_Format(PyExc_TypeError, "%s[%u]: want an address (int), got %.100s", what, (unsigned)i,
                             Py_TYPE(item)->tp_name);
            return false;
        }
    }
    return true;
}

static bool open_run(RunArgs *run, const ProgramObject *self, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    const Graph *g = self->program->graph;
    PyObject *split[3] = {NULL, NULL, NULL};
    memset(run, 0, offsetof(RunArgs, few));
    run->pointers = run->few;
    if (!split_arguments(args, n, names, split)) return false;
    run->host = split[2] == Py_None ? NULL : split[2];
    /* A tuple owns the objects while the GIL is released; a list could lose them. */
    run->inputs =
        self->opaque_inputs ? PySequence_Tuple(split[0]) : PySequence_Fast(split[0], "inputs: want a sequence");
    if (!run->inputs) return false;
    run->outputs = PySequence_Fast(split[1], "outputs: want a sequence");
    if (!run->outputs) return false;
    size_t needed = (size_t)g->n_inputs + 2 * (size_t)g->n_outputs;
    if (needed > FEW_POINTERS) {
        run->pointers = PyMem_New(void *, needed);
        if (!run->pointers) return PyErr_NoMemory(), false;
    }
    memset(run->pointers, 0, needed * sizeof(void *));
    return read_addresses(g, run->inputs, "inputs", g->inputs, g->n_inputs, true, run->pointers) &&
           read_addresses(g, run->outputs, "outputs", g->outputs, g->n_outputs, false, run->pointers + g->n_inputs);
}

static void close_run(RunArgs *run) {
    if (run->pointers != run->few) PyMem_Free(run->pointers);
    Py_XDECREF(run->inputs);
    Py_XDECREF(run->outputs);
}

/* The opaque outputs, whose references are ours, with None in the others' places. */
static PyObject *take_objects(void **objects, uint32_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; i < count; i++) {
        if (list)
            PyList_SET_ITEM(list, (Py_ssize_t)i, objects[i] ? (PyObject *)objects[i] : Py_NewRef(Py_None));
        else if (objects[i])
            decref_while_raising(objects[i]);
    }
    return list;
}

/* `times`: NULL, or where to put when each task ran. */
static PyObject *run_once(PyObject *object, PyObject *const *args, Py_ssize_t n, PyObject *names, TaskTime *times) {
    ProgramObject *self = (ProgramObject *)object;
    const Graph *g = self->program->graph;
    RunArgs run;
    PyObject *result = NULL;
    if (open_run(&run, self, args, n, names)) {
        Context ctx;
        Door door;
        HostDoor host = {&door, run.host};
        HostCalls calls = host_calls(&host);
        void **outputs = run.pointers + g->n_inputs, **objects = outputs + g->n_outputs;
        context_init(&ctx);
        door_leave(&door, &ctx, RUN_POLL_MS);
        Executor *executor = self->program->executor;
        Code code = times ? executor_profile(&ctx, executor, run.pointers, outputs, objects, &calls, times)
                          : executor_run(&ctx, executor, run.pointers, outputs, objects, &calls);
        door_enter(&door);
        if (code != CODE_OK)
            raise_code(PyType_GetModuleState(Py_TYPE(object)), &ctx, code);
        else
            result = self->opaque_outputs ? take_objects(objects, g->n_outputs) : Py_NewRef(Py_None);
    }
    close_run(&run);
    return result;
}

static bool check_executable(const ProgramObject *self) {
    if (self->program->executor) return true;
    PyErr_SetString(PyExc_NotImplementedError, "the program was only planned (executable=False): it cannot run");
    return false;
}

static PyObject *program_run(PyObject *object, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    return check_executable((ProgramObject *)object) ? run_once(object, args, n, names, NULL) : NULL;
}

static PyObject *program_profile(PyObject *object, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    const ProgramObject *self = (ProgramObject *)object;
    if (!check_executable(self)) return NULL;
    uint32_t count = executor_task_count(self->program->executor);
    TaskTime *times = PyMem_Calloc((size_t)count + 1, sizeof *times);
    if (!times) return PyErr_NoMemory();
    PyObject *objects = run_once(object, args, n, names, times), *list = NULL;
    if (objects) list = PyList_New((Py_ssize_t)count);
    for (uint32_t t = 0; list && t < count; t++) {
        PyObject *row = Py_BuildValue("(IILL)", (unsigned)times[t].first, (unsigned)times[t].count,
                                      (long long)times[t].start_ns, (long long)times[t].end_ns);
        if (row)
            PyList_SET_ITEM(list, (Py_ssize_t)t, row);
        else
            Py_CLEAR(list);
    }
    Py_XDECREF(objects);
    PyMem_Free(times);
    return list;
}

static PyObject *program_may_share(PyObject *object, PyObject *args) {
    unsigned input, output;
    bool may;
    if (!PyArg_ParseTuple(args, "II:may_share", &input, &output)) return NULL;
    Context ctx;
    context_init(&ctx);
    Code code = forge_may_share(&ctx, ((ProgramObject *)object)->program, input, output, &may);
    if (code != CODE_OK) return raise_code(PyType_GetModuleState(Py_TYPE(object)), &ctx, code), NULL;
    return PyBool_FromLong(may);
}

/* --- text and report ---------------------------------------------------------------------------------------------- */
static PyObject *program_text(PyObject *object, PyObject *stage) {
    const Program *program = ((ProgramObject *)object)->program;
    const char *name = PyUnicode_AsUTF8(stage);
    if (!name) return NULL;
    Context ctx;
    Text text;
    context_init(&ctx);
    text_init(&text);
    Code code = forge_text(&ctx, program, name, &text);
    return text_or_error(PyType_GetModuleState(Py_TYPE(object)), &ctx, code, &text);
}

/* Adds and drops the reference; false if there is none or the dict is full. */
static bool put(PyObject *dict, const char *key, PyObject *value) {
    bool ok = value && PyDict_SetItemString(dict, key, value) == 0;
    Py_XDECREF(value);
    return ok;
}

static bool append(PyObject *list, PyObject *value) {
    bool ok = value && PyList_Append(list, value) == 0;
    Py_XDECREF(value);
    return ok;
}

static PyObject *report_passes(const Program *p) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < p->n_passes; i++) {
        const PassRecord *r = &p->passes[i];
        if (!append(list, Py_BuildValue("{s:s,s:d,s:n,s:n,s:d,s:d}", "name", r->name, "ms", r->ms, "nodes_before",
                                        (Py_ssize_t)r->nodes_before, "nodes_after", (Py_ssize_t)r->nodes_after,
                                        "cost_before", r->cost_before, "cost_after", r->cost_after)))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *report_remarks(const Program *p) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < p->remarks.count; i++) {
        const Remark *r = &p->remarks.items[i];
        bool known = r->source >= 0 && (uint32_t)r->source < p->graph->n_sources;
        if (!append(list, Py_BuildValue("{s:s,s:s,s:z,s:I}", "pass", r->pass, "text", r->text, "source",
                                        known ? p->graph->sources[r->source] : NULL, "count", (unsigned)r->count)))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *report_buffers(const AllocReport *a) {
    return Py_BuildValue("{s:I,s:I,s:d,s:L,s:L}", "virtual", (unsigned)a->virtual_buffers, "physical",
                         (unsigned)a->physical_buffers, "rho", a->rho, "arena_bytes", (long long)a->arena_bytes,
                         "lower_bound_bytes", (long long)a->lower_bound_bytes);
}

static PyObject *report_devices(const Program *p, bool bytes) {
    PyObject *dict = PyDict_New();
    for (int d = 0; dict && d < DEVICE_COUNT; d++) {
        long long amount = p->ir->arena_bytes[d];
        if (!bytes) {
            amount = 0;
            for (uint32_t i = 0; i < p->ir->n_instrs; i++) amount += p->ir->instrs[i].device == (Device)d;
        }
        if ((amount || d == DEVICE_CPU) && !put(dict, device_name((Device)d), PyLong_FromLongLong(amount)))
            Py_CLEAR(dict);
    }
    return dict;
}

static PyObject *report_instructions(const Program *p) {
    uint32_t counts[OP_COUNT] = {0};
    for (uint32_t i = 0; i < p->ir->n_instrs; i++) counts[p->ir->instrs[i].op]++;
    PyObject *dict = PyDict_New();
    for (int op = 0; dict && op < OP_COUNT; op++)
        if (counts[op] && !put(dict, op_info((Op)op)->name, PyLong_FromUnsignedLong(counts[op]))) Py_CLEAR(dict);
    return dict;
}

static PyObject *program_report(PyObject *object, PyObject *unused) {
    (void)unused;
    const Program *p = ((ProgramObject *)object)->program;
    const struct {
        const char *key;
        double value;
    } numbers[] = {
        {"table_ms", p->table_ms},       {"passes_ms", p->passes_ms},
        {"lower_ms", p->lower_ms},       {"alloc_ms", p->alloc_ms},
        {"schedule_ms", p->schedule_ms}, {"pack_ms", p->pack_ms},
        {"npu_ms", p->npu_ms},           {"alpha", p->alpha},
    };
    PyObject *report = PyDict_New();
    if (!report) return NULL;
    bool ok = put(report, "passes", report_passes(p));
    for (size_t i = 0; ok && i < sizeof numbers / sizeof *numbers; i++)
        ok = put(report, numbers[i].key, PyFloat_FromDouble(numbers[i].value));
    ok = ok && put(report, "nodes_table", PyLong_FromSize_t(p->nodes_table)) &&
         put(report, "nodes_final", PyLong_FromUnsignedLong(p->ir->n_instrs)) &&
         put(report, "remarks", report_remarks(p)) && put(report, "buffers", report_buffers(&p->alloc)) &&
         put(report, "transitions",
             Py_BuildValue("{s:I,s:I}", "before", (unsigned)p->schedule.transitions_before, "after",
                           (unsigned)p->schedule.transitions_after)) &&
         put(report, "groups",
             Py_BuildValue("{s:I,s:I}", "groups", (unsigned)p->schedule.groups, "instructions",
                           (unsigned)p->schedule.grouped)) &&
         put(report, "placement", report_devices(p, false)) && put(report, "arena_bytes", report_devices(p, true)) &&
         put(report, "quantised_bytes", PyLong_FromLongLong(p->quantised_bytes)) &&
         put(report, "packed_bytes", PyLong_FromLongLong(p->executor ? executor_packed_bytes(p->executor) : 0)) &&
         put(report, "instructions", report_instructions(p));
    if (!ok) Py_CLEAR(report);
    return report;
}

/* --- the type ----------------------------------------------------------------------------------------------------- */
static PyObject *program_repr(PyObject *object) {
    const Program *p = ((ProgramObject *)object)->program;
    return PyUnicode_FromFormat("<forge_ugc._core.Program for %s, %u instructions>", p->ir->target,
                                (unsigned)p->ir->n_instrs);
}

static int program_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((ProgramObject *)object)->keepalive);
    return 0;
}

/* No tp_clear: the keepalive must outlive the program, whose constants lie in it. A cycle through it is broken
 * elsewhere, since what it holds is a container of tensors or an object with a __dict__. */
static void program_dealloc(PyObject *object) {
    ProgramObject *self = (ProgramObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_BEGIN_ALLOW_THREADS forge_destroy(self->program);
    Py_END_ALLOW_THREADS Py_CLEAR(self->keepalive);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef program_methods[] = {
    {"run", (PyCFunction)(void (*)(void))program_run, METH_FASTCALL | METH_KEYWORDS,
     "run(inputs, outputs, host=None)\n--\n\n"
     "Runs once with the GIL released. Inputs and outputs are addresses of row-major memory, which the caller keeps "
     "alive;\n"
     "for opaque values the object and 0. Returns the list of opaque outputs or None."},
    {"profile", (PyCFunction)(void (*)(void))program_profile, METH_FASTCALL | METH_KEYWORDS,
     "profile(inputs, outputs, host=None)\n--\n\n"
     "As run(); returns (first, count, start_ns, end_ns) of each task: instructions first .. first + count of "
     "schedule()."},
    {"schedule", program_schedule, METH_NOARGS,
     "schedule()\n--\n\nThe instructions in order, the buffers of the arenas with their lifetimes, the segments."},
    {"may_share", program_may_share, METH_VARARGS,
     "may_share(input, output)\n--\n\n"
     "Whether run() takes one address for this input and this output, which is then written over it."},
    {"text", program_text, METH_O, "text(stage)\n--\n\nThe program as text, as it was at a stage of the compilation."},
    {"portable", program_portable, METH_NOARGS,
     "portable()\n--\n\n(text, constants): the final graph as load() takes it. Of each constant of the graph in order "
     "(name, dtype,\nshape, strides in the text, address, strides of that memory), or None where the text has its "
     "elements."},
    {"types", program_types, METH_NOARGS,
     "types()\n--\n\n([(dtype, shape)], [(dtype, shape)]): of the inputs and of the outputs."},
    {"hosts", program_hosts, METH_NOARGS,
     "hosts()\n--\n\n[(callee, number of operands, [(dtype, shape)] of the results)]: of the host calls in order."},
    {"report", program_report, METH_NOARGS, "report()\n--\n\nWhat the compilation did, in times, counts and bytes."},
    {"upgrade", program_upgrade, METH_NOARGS,
     "upgrade()\n--\n\nCompiles the graphs with constant weights and swaps them in between calls; False if "
     "stop_upgrade() ended it."},
    {"stop_upgrade", program_stop_upgrade, METH_NOARGS,
     "stop_upgrade()\n--\n\nEnds an upgrade after the graph that it is compiling, and all later ones."},
    {"npu_blobs", program_npu_blobs, METH_O,
     "npu_blobs(write)\n--\n\nCalls write(key, checksum, memoryview) for each compiled graph of the present tier; "
     "returns {tier, graphs}."},
    {"npu_report", program_npu_report, METH_NOARGS,
     "npu_report()\n--\n\nSegments, floating-point operations by device, and the session on the device if there is "
     "one."},
    {"openvino_models", (PyCFunction)(void (*)(void))program_openvino_models, METH_VARARGS | METH_KEYWORDS,
     "openvino_models(write, *, fold='always', precision='fp16', f32_types=False, f32_border=False, forms=None)\n--\n\n"
     "The segments as OpenVINO models: calls write(kind, number, data) with \"xml\" and \"bin\" of each block and "
     "\"weight\" of\n"
     "each weight argument; returns the manifest."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot program_slots[] = {
    {Py_tp_doc, "A compiled program. Made by compile()."},
    {Py_tp_dealloc, SLOT(program_dealloc)},
    {Py_tp_traverse, SLOT(program_traverse)},
    {Py_tp_repr, SLOT(program_repr)},
    {Py_tp_methods, program_methods},
    {0, NULL},
};

PyType_Spec program_spec = {
    .name = "forge_ugc._core.Program",
    .basicsize = sizeof(ProgramObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = program_slots,
};
