/* The NPU's side of the door: the device, tiers, and models for OpenVINO. */
#include "python/core.h"

enum { EMIT_POLL_MS = 50, OPEN_POLL_MS = 50 };

/* --- the device --------------------------------------------------------------------------------------------------- */
typedef struct DeviceObject {
    PyObject_HEAD NpuDevice *device;
} DeviceObject;

NpuDevice *device_of(PyObject *object) { return ((DeviceObject *)object)->device; }

static PyObject *version(uint32_t packed) {
    return packed ? PyUnicode_FromFormat("%u.%u", (unsigned)(packed >> 16), (unsigned)(packed & 0xffff))
                  : Py_NewRef(Py_None);
}

/* As far as they are known. */
static PyObject *facts_dict(const NpuFacts *f) {
    return Py_BuildValue("{s:s,s:s,s:s,s:N,s:s,s:I,s:s,s:I,s:s,s:N,s:N,s:I,s:K}", "loader", f->loader, "loader_version",
                         f->loader_version, "node", f->node, "node_readable", PyBool_FromLong(f->node_readable),
                         "driver_version", f->driver_version, "drivers", (unsigned)f->n_drivers, "device_name",
                         f->device_name, "device_id", (unsigned)f->device_id, "target", f->target, "extension",
                         version(f->extension), "compiler", version(f->compiler), "opset", (unsigned)f->opset, "memory",
                         (unsigned long long)f->memory);
}

/* Adds what was found to the NpuError that is being raised. */
static void add_facts(const ModuleState *state, const NpuFacts *facts) {
    if (!PyErr_ExceptionMatches(state->npu_error)) return;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *dict = facts_dict(facts);
    if (!dict || PyObject_SetAttrString(error, "facts", dict) != 0) PyErr_Clear();
    Py_XDECREF(dict);
    PyErr_Restore(type, error, trace);
}

static PyObject *device_open(PyObject *class, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"loader", NULL};
    const char *loader = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|z:open", keywords, &loader)) return NULL;
    PyTypeObject *type = (PyTypeObject *)class;
    const ModuleState *state = PyType_GetModuleState(type);
    DeviceObject *self = (DeviceObject *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    Context ctx;
    Door door;
    NpuFacts facts = {0};
    context_init(&ctx);
    door_leave(&door, &ctx, OPEN_POLL_MS);
    Code code = npu_device_open(&ctx, loader, &facts, &self->device);
    door_enter(&door);
    if (code == CODE_OK) return (PyObject *)self;
    raise_code(state, &ctx, code);
    add_facts(state, &facts);
    decref_while_raising((PyObject *)self);
    return NULL;
}

static PyObject *device_facts(PyObject *object, void *unused) {
    (void)unused;
    return facts_dict(npu_device_facts(device_of(object)));
}

static void device_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    NpuDevice *device = device_of(object);
    if (device) {
        Py_BEGIN_ALLOW_THREADS npu_device_unref(device);
        Py_END_ALLOW_THREADS
    }
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef device_methods[] = {
    {"open", (PyCFunction)(void (*)(void))device_open, METH_CLASS | METH_VARARGS | METH_KEYWORDS,
     "open(loader=None)\n--\n\nOpens the NPU through the loader (FORGE_ZE_LOADER or libze_loader.so.1). Raises "
     "NpuError."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef device_getters[] = {
    {"facts", device_facts, NULL, "What the loader, driver and device say of themselves.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_doc, "An NPU. Made by open(); programs that run on it keep it open."},
    {Py_tp_dealloc, SLOT(device_dealloc)},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_getters},
    {0, NULL},
};

PyType_Spec device_spec = {
    .name = "forge_ugc._core.NpuDevice",
    .basicsize = sizeof(DeviceObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = device_slots,
};

PyObject *module_npu_likely(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(npu_device_likely());
}

/* --- tiers and report --------------------------------------------------------------------------------------------- */
static bool upgrade_stopped(void *user) { return atomic_load((atomic_bool *)user); }

PyObject *program_upgrade(PyObject *object, PyObject *unused) {
    (void)unused;
    ProgramObject *self = (ProgramObject *)object;
    Context ctx;
    Door door;
    context_init(&ctx);
    door_leave(&door, &ctx, EMIT_POLL_MS);
    /* Made for threads in the background, which get no signals. */
    ctx.cancelled = upgrade_stopped;
    ctx.user = &self->stop_upgrade;
    Code code = forge_upgrade(&ctx, self->program);
    door_enter(&door);
    if (code == CODE_OK) Py_RETURN_TRUE;
    if (code == CODE_CANCELLED) Py_RETURN_FALSE;
    raise_code(PyType_GetModuleState(Py_TYPE(object)), &ctx, code);
    return NULL;
}

PyObject *program_stop_upgrade(PyObject *object, PyObject *unused) {
    (void)unused;
    atomic_store(&((ProgramObject *)object)->stop_upgrade, true);
    Py_RETURN_NONE;
}

PyObject *program_npu_report(PyObject *object, PyObject *unused) {
    (void)unused;
    const Program *p = ((ProgramObject *)object)->program;
    double flops[DEVICE_COUNT] = {0};
    for (uint32_t i = 0; i < p->ir->n_instrs; i++) {
        const Instr *instr = &p->ir->instrs[i];
        flops[instr->device] += node_cost(p->graph, instr->node, instr->device).flops;
    }
    PyObject *report = Py_BuildValue("{s:I,s:{s:d,s:d}}", "segments", (unsigned)p->segments.count, "flops", "cpu",
                                     flops[DEVICE_CPU], "npu", flops[DEVICE_NPU]);
    if (!report || !p->session) return report;
    SessionReport r;
    npu_session_report(p->session, &r);
    PyObject *session = Py_BuildValue(
        "{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:s,s:d,s:d,s:d,s:L,s:L}", "tier", (unsigned)r.tier, "blocks",
        (unsigned)r.n_blocks, "calls", (unsigned)r.n_calls, "artefact_hits", (unsigned)r.blob_hits, "cache_hits",
        (unsigned)r.cache_hits, "compiled", (unsigned)r.compiled, "artefact_refused", (unsigned)r.blobs_refused,
        "refused_reason", npu_reason_name((NpuReason)r.refused), "emit_ms", r.emit_ms, "compile_ms", r.compile_ms,
        "weights_ms", r.weights_ms, "blob_bytes", (long long)r.blob_bytes, "weight_bytes", (long long)r.weight_bytes);
    bool ok = session && PyDict_Update(report, session) == 0;
    Py_XDECREF(session);
    if (!ok) Py_CLEAR(report);
    return report;
}

/* --- compiled graphs ---------------------------------------------------------------------------------------------- */
typedef struct Blobs {
    Door *door;
    PyObject *write;
} Blobs;

static PyObject *hash_text(Hash128 hash) {
    char text[33];
    snprintf(text, sizeof text, "%016llx%016llx", (unsigned long long)hash.a, (unsigned long long)hash.b);
    return PyUnicode_FromString(text);
}

/* The memory is the driver's: the view of it ends with the call, however that ends. */
static bool write_blob(PyObject *write, const NpuBlob *blob) {
    PyObject *view = PyMemoryView_FromMemory((char *)(uintptr_t)blob->data, (Py_ssize_t)blob->bytes, PyBUF_READ);
    if (!view) return false;
    PyObject *done = PyObject_CallFunction(write, "NNO", hash_text(blob->key), hash_text(blob->checksum), view);
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *released = PyObject_CallMethod(view, "release", NULL);
    bool ok = done && released;
    if (!done) PyErr_Restore(type, error, trace);
    Py_XDECREF(done);
    Py_XDECREF(released);
    decref_while_raising(view);
    return ok;
}

static Code visit_blob(Context *ctx, void *user, const NpuBlob *blob) {
    Blobs *blobs = user;
    door_reenter(blobs->door);
    bool ok = write_blob(blobs->write, blob);
    door_releave(blobs->door);
    return ok ? CODE_OK : fail(ctx, CODE_HOST, "writing a compiled graph failed");
}

PyObject *program_npu_blobs(PyObject *object, PyObject *write) {
    Context ctx;
    Door door;
    Blobs blobs = {&door, write};
    uint32_t tier, graphs;
    context_init(&ctx);
    door_leave(&door, &ctx, EMIT_POLL_MS);
    Code code = forge_npu_blobs(&ctx, ((ProgramObject *)object)->program, visit_blob, &blobs, &tier, &graphs);
    door_enter(&door);
    if (code == CODE_OK) return Py_BuildValue("{s:I,s:I}", "tier", (unsigned)tier, "graphs", (unsigned)graphs);
    raise_code(PyType_GetModuleState(Py_TYPE(object)), &ctx, code);
    return NULL;
}

/* --- models ------------------------------------------------------------------------------------------------------- */
typedef struct Models {
    const Program *program;
    Door *door;
    PyObject *write;
    PyObject *blocks, *calls; /* lists; a call's entry is None until its block is written */
    long n_weights;
} Models;

static bool add(PyObject *list, PyObject *item) {
    bool ok = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return ok;
}

static PyObject *shape_tuple(uint8_t rank, const int64_t *shape) {
    PyObject *tuple = PyTuple_New(rank);
    for (uint8_t d = 0; tuple && d < rank; d++) {
        PyObject *size = PyLong_FromLongLong(shape[d]);
        if (size)
            PyTuple_SET_ITEM(tuple, d, size);
        else
            Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *port_list(const Port *ports, uint32_t count) {
    PyObject *list = PyList_New(0);
    for (uint32_t k = 0; list && k < count; k++)
        if (!add(list, Py_BuildValue("{s:s,s:N}", "dtype", dtype_name(ports[k].dtype), "shape",
                                     shape_tuple(ports[k].rank, ports[k].shape))))
            Py_CLEAR(list);
    return list;
}

/* Names of the memory at a call's border: "input 0" of the graph, "output 0", or "value 12" between calls. */
static PyObject *memory_names(const Npuir *ir, const RegId *regs, uint32_t count) {
    PyObject *list = PyList_New(0);
    for (uint32_t k = 0; list && k < count; k++) {
        BufferId b = ir->regs[regs[k]].buffer;
        Space space = ir->buffers[b].space;
        bool end = space == SPACE_INPUT || space == SPACE_OUTPUT;
        const char *kind = space == SPACE_INPUT ? "input" : space == SPACE_OUTPUT ? "output" : "value";
        if (!add(list, PyUnicode_FromFormat("%s %u", kind, (unsigned)(end ? ir->buffers[b].index : b)))) Py_CLEAR(list);
    }
    return list;
}

static bool call_write(const Models *m, const char *kind, long number, PyObject *data) {
    PyObject *done = PyObject_CallFunction(m->write, "slO", kind, number, data);
    Py_XDECREF(done);
    return done != NULL;
}

static Code no_data(Context *ctx, const Graph *g, uint32_t constant) {
    const char *name = g->constants[constant].name;
    return fail(ctx, CODE_INVALID,
                "weight '%s' has a shape but no values (it is on the meta device): no model with "
                "values can be written",
                name ? name : "");
}

/* Bytes made by C with the GIL released, then given to `write`. The GIL is not held before and after. */
typedef Code (*FillFn)(Context *ctx, const Graph *g, const void *what, uint32_t constant, int64_t column, void *out);

static Code write_made(Context *ctx, const Models *m, const char *kind, long number, int64_t bytes, FillFn fill,
                       const void *what, uint32_t constant, int64_t column) {
    door_reenter(m->door);
    PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (data) {
        char *out = PyBytes_AS_STRING(data);
        door_releave(m->door);
        Code code = fill(ctx, m->program->graph, what, constant, column, out);
        door_reenter(m->door);
        if (code != CODE_OK || !call_write(m, kind, number, data)) {
            decref_while_raising(data);
            data = NULL;
        }
        Py_XDECREF(data);
        door_releave(m->door);
        if (code != CODE_OK) return code;
    } else {
        door_releave(m->door);
    }
    return data ? CODE_OK : fail(ctx, CODE_HOST, "writing a model failed");
}

static Code fill_bin(Context *ctx, const Graph *g, const void *what, uint32_t constant, int64_t column, void *out) {
    (void)constant, (void)column;
    return npu_model_bin(ctx, g, what, out);
}

static Code fill_weight(Context *ctx, const Graph *g, const void *what, uint32_t constant, int64_t column, void *out) {
    return weight_fill(ctx, g, what, constant, column, out);
}

/* The constant that takes the place of the first call's; what is no weight of the block is the same for all calls. */
static uint32_t constant_of(const NpuBlock *block, const NpuCall *call, uint32_t first) {
    for (uint32_t w = 0; w < block->n_weights; w++)
        if (block->weights[w] == first) return call->weights[w];
    return first;
}

/* The weight arguments of a call: each is written, and described in a list, which is made without the GIL held. */
static Code write_weights(Context *ctx, Models *m, const NpuBlock *block, const NpuCall *call, const NpuModel *model,
                          PyObject *list) {
    static const char *const parts[] = {"values", "scales", "bytes"};
    const Graph *g = m->program->graph;
    for (uint32_t a = 0; a < model->n_args; a++) {
        const WeightSource *source = &model->args[a];
        bool made = source->part == WEIGHT_BYTES; /* by the emitter */
        uint32_t constant = made ? UINT32_MAX : constant_of(block, call, source->constant);
        const Constant *c = made ? NULL : &g->constants[constant];
        if (c && !c->data && source->bytes) return no_data(ctx, g, constant);
        TRY(write_made(ctx, m, "weight", m->n_weights, source->bytes, fill_weight, source, constant,
                       call->first_column));
        door_reenter(m->door);
        int64_t shape[MAX_RANK] = {source->rank ? source->shape[0] : 1, 1}; /* of scales: one a row */
        bool scales = source->part == WEIGHT_SCALES;
        if (!scales) memcpy(shape, source->shape, sizeof shape);
        bool ok =
            add(list, Py_BuildValue("{s:l,s:s,s:s,s:s,s:N,s:L}", "weight", m->n_weights++, "constant",
                                    c && c->name ? c->name : "", "part", parts[source->part], "dtype",
                                    source->i4 ? "i4" : dtype_name(source->dtype), "shape",
                                    shape_tuple(scales ? 2 : source->rank, shape), "bytes", (long long)source->bytes));
        door_releave(m->door);
        if (!ok) return fail(ctx, CODE_HOST, "writing a model failed");
    }
    return CODE_OK;
}

static Code write_call(Context *ctx, Models *m, const NpuPlan *plan, uint32_t number, uint32_t segment,
                       const NpuModel *model) {
    const NpuCall *call = &plan->calls[number];
    const NpuBlock *block = &plan->blocks[call->block];
    door_reenter(m->door);
    PyObject *weights = PyList_New(0);
    door_releave(m->door);
    if (!weights) return fail(ctx, CODE_HOST, "writing a model failed");
    Code code = write_weights(ctx, m, block, call, model, weights);
    door_reenter(m->door);
    bool ok = code == CODE_OK;
    if (ok) {
        PyObject *entry = Py_BuildValue("{s:I,s:I,s:N,s:N,s:O,s:L}", "segment", (unsigned)segment, "block",
                                        (unsigned)call->block, "inputs", memory_names(plan->ir, call->in, block->n_in),
                                        "outputs", memory_names(plan->ir, call->out, block->n_out), "weights", weights,
                                        "first_column", (long long)call->first_column);
        ok = entry && PyList_SetItem(m->calls, (Py_ssize_t)number, entry) == 0;
    }
    decref_while_raising(weights);
    door_releave(m->door);
    if (code != CODE_OK) return code;
    return ok ? CODE_OK : fail(ctx, CODE_HOST, "writing a model failed");
}

static bool describe_block(Models *m, const NpuPlan *plan, uint32_t number, const NpuModel *model) {
    const NpuBlock *block = &plan->blocks[number];
    while (PyList_GET_SIZE(m->calls) < (Py_ssize_t)plan->n_calls)
        if (PyList_Append(m->calls, Py_None) != 0) return false;
    PyObject *xml = PyBytes_FromStringAndSize(model->xml.data, (Py_ssize_t)model->xml.size);
    bool ok = xml && call_write(m, "xml", (long)number, xml);
    Py_XDECREF(xml);
    return ok &&
           add(m->blocks, Py_BuildValue("{s:N,s:N,s:I,s:L,s:I,s:L}", "inputs", port_list(model->in, model->n_in),
                                        "outputs", port_list(model->out, model->n_out), "instructions",
                                        (unsigned)block->n_instrs, "bin_bytes", (long long)model->bin_bytes, "weights",
                                        (unsigned)model->n_args, "columns", (long long)block->columns));
}

static Code visit_block(Context *ctx, void *user, const NpuPlan *plan, uint32_t number, const NpuModel *model) {
    Models *m = user;
    for (uint32_t p = 0; p < model->n_pieces; p++) {
        const WeightSource *piece = &model->pieces[p];
        if (piece->part != WEIGHT_BYTES && piece->bytes && !m->program->graph->constants[piece->constant].data)
            return no_data(ctx, m->program->graph, piece->constant);
    }
    door_reenter(m->door);
    bool ok = describe_block(m, plan, number, model);
    door_releave(m->door);
    if (!ok) return fail(ctx, CODE_HOST, "writing a model failed");
    TRY(write_made(ctx, m, "bin", (long)number, model->bin_bytes, fill_bin, model, 0, 0));
    for (uint32_t s = 0; s < plan->segments.count; s++)
        for (uint32_t c = plan->first_call[s]; c < plan->first_call[s + 1]; c++)
            if (plan->calls[c].block == number) TRY(write_call(ctx, m, plan, c, s, model));
    return CODE_OK;
}

PyObject *program_openvino_models(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"write", "fold", "precision", "f32_types", "f32_border", "forms", NULL};
    const ModuleState *state = PyType_GetModuleState(Py_TYPE(object));
    PyObject *write, *forms = Py_None;
    const char *precision = "fp16", *fold = "always";
    int f32_types = 0, f32_border = 0;
    EmitRequest request = {.default_forms = true};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$ssppO:openvino_models", keywords, &write, &fold, &precision,
                                     &f32_types, &f32_border, &forms))
        return NULL;
    if (!precision_from_name(precision, &request.precision))
        return PyErr_Format(PyExc_ValueError, "precision: want fp16, w8a16 or w4a16, got %s", precision);
    if (!fold_from_name(fold, &request.fold))
        return PyErr_Format(PyExc_ValueError, "fold: want never, always, cut or constant, got %s", fold);
    if (forms != Py_None) {
        request.default_forms = false;
        request.forms = (uint32_t)PyLong_AsUnsignedLongMask(forms);
        if (PyErr_Occurred()) return NULL;
    }
    request.f32_types = f32_types;
    request.f32_border = f32_border;
    Context ctx;
    Door door;
    Models m = {((ProgramObject *)object)->program, &door, write, PyList_New(0), PyList_New(0), 0};
    PyObject *manifest = NULL;
    context_init(&ctx);
    if (m.blocks && m.calls) {
        door_leave(&door, &ctx, EMIT_POLL_MS);
        Code code = forge_emit(&ctx, m.program, &request, visit_block, &m);
        door_enter(&door);
        if (code == CODE_OK)
            manifest = Py_BuildValue("{s:O,s:O}", "blocks", m.blocks, "calls", m.calls);
        else
            raise_code(state, &ctx, code);
    }
    if (m.blocks) decref_while_raising(m.blocks);
    if (m.calls) decref_while_raising(m.calls);
    return manifest;
}
