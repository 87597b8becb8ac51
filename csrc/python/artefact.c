/* Programs as text and memory: Program.portable() and load(). */
#include "python/core.h"

/* --- Program.portable() ------------------------------------------------------------------------------------------- */
static PyObject *numbers(const int64_t *items, uint8_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (uint8_t d = 0; tuple && d < count; d++) {
        PyObject *item = PyLong_FromLongLong(items[d]);
        if (item)
            PyTuple_SET_ITEM(tuple, d, item);
        else
            Py_CLEAR(tuple);
    }
    return tuple;
}

/* (name, dtype, shape, strides in the text, address, strides of the memory), or None if the text spells it out or no
 * node uses it. */
static PyObject *describe(const Constant *stored, const Constant *original, bool used) {
    if (!used || !forge_constant_external(stored)) Py_RETURN_NONE;
    PyObject *shape = numbers(stored->shape, stored->rank), *strides = numbers(stored->strides, stored->rank);
    PyObject *source = numbers(original->strides, original->rank), *result = NULL;
    if (shape && strides && source)
        result = Py_BuildValue("(zsOOKO)", stored->name, dtype_name(stored->dtype), shape, strides,
                               (unsigned long long)(uintptr_t)original->data, source);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(source);
    return result;
}

static PyObject *describe_all(const Graph *stored, const Graph *original) {
    bool *used = PyMem_Calloc(stored->n_constants + 1, sizeof *used);
    if (!used) return PyErr_NoMemory();
    GRAPH_EACH(stored, id) {
        const Node *node = graph_node(stored, id);
        if (node->op == OP_constant) used[node_int(node, ATTR_index)] = true;
    }
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < stored->n_constants; i++) {
        PyObject *item = describe(&stored->constants[i], &original->constants[i], used[i]);
        if (!item || PyList_Append(list, item) != 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    PyMem_Free(used);
    return list;
}

PyObject *program_portable(PyObject *object, PyObject *unused) {
    (void)unused;
    const Program *program = ((ProgramObject *)object)->program;
    Context ctx;
    Arena arena;
    Text text;
    Graph *g = NULL;
    context_init(&ctx);
    arena_init(&arena);
    text_init(&text);
    Code code = forge_portable(&ctx, program, &arena, &g);
    if (code == CODE_OK) code = graph_print(&ctx, g, &text);
    if (code == CODE_OK) code = text_done(&ctx, &text);
    PyObject *result = NULL, *constants = NULL, *string = NULL;
    if (code == CODE_OK) constants = describe_all(g, program->graph);
    arena_destroy(&arena);
    if (code == CODE_OK && !constants)
        text_destroy(&text);
    else
        string = text_or_error(PyType_GetModuleState(Py_TYPE(object)), &ctx, code, &text);
    if (string && constants) result = PyTuple_Pack(2, string, constants);
    Py_XDECREF(string);
    Py_XDECREF(constants);
    return result;
}

/* --- Program.types() -----------------------------------------------------------------------------------------------
 */
static PyObject *types_of(const Graph *g, const ValueId *values, uint32_t count) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < count; i++) {
        const Value *value = graph_value(g, values[i]);
        PyObject *shape = numbers(value->shape, value->rank);
        PyObject *item = shape ? Py_BuildValue("(sN)", dtype_name(value->dtype), shape) : NULL;
        if (!item || PyList_Append(list, item) != 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

PyObject *program_types(PyObject *object, PyObject *unused) {
    (void)unused;
    const Graph *g = ((ProgramObject *)object)->program->graph;
    PyObject *inputs = types_of(g, g->inputs, g->n_inputs), *outputs = types_of(g, g->outputs, g->n_outputs);
    PyObject *result = inputs && outputs ? PyTuple_Pack(2, inputs, outputs) : NULL;
    Py_XDECREF(inputs);
    Py_XDECREF(outputs);
    return result;
}

/* --- Program.hosts() ---------------------------------------------------------------------------------------------- */
PyObject *program_hosts(PyObject *object, PyObject *unused) {
    (void)unused;
    const Graph *g = ((ProgramObject *)object)->program->graph;
    PyObject *list = PyList_New(0);
    for (NodeId id = g->first; list && id != NODE_NONE; id = g->nodes[id].next) {
        const Node *node = graph_node(g, id);
        if (node->op != OP_host) continue;
        PyObject *results = PyList_New(0);
        for (uint32_t k = 0; results && k < node->n_results; k++) {
            const Value *value = graph_value(g, node_result(node, k));
            PyObject *shape = numbers(value->shape, value->rank);
            PyObject *type = shape ? Py_BuildValue("(sN)", dtype_name(value->dtype), shape) : NULL;
            if (!type || PyList_Append(results, type) != 0) Py_CLEAR(results);
            Py_XDECREF(type);
        }
        PyObject *item =
            results ? Py_BuildValue("(LIN)", (long long)node_int(node, ATTR_index), (unsigned)node->n_operands, results)
                    : NULL;
        if (!item || PyList_Append(list, item) != 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* --- load() ------------------------------------------------------------------------------------------------------- */
/* A sequence of (address, bytes) or None. */
static bool read_constants(PyObject *sequence, ConstantData **out, size_t *count) {
    PyObject *items = PySequence_Fast(sequence, "constants: want a sequence");
    *out = NULL;
    if (!items) return false;
    *count = (size_t)PySequence_Fast_GET_SIZE(items);
    ConstantData *data = PyMem_Calloc(*count + 1, sizeof *data);
    bool ok = data != NULL;
    if (!ok) PyErr_NoMemory();
    for (size_t i = 0; ok && i < *count; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(items, (Py_ssize_t)i);
        unsigned long long address;
        long long bytes;
        if (item == Py_None) continue;
        if (!PyTuple_Check(item)) {
            PyErr_Format(PyExc_TypeError, "constants[%zu]: want (address, bytes) or None", i);
            ok = false;
            continue;
        }
        ok = PyArg_ParseTuple(item, "KL", &address, &bytes);
        data[i] = (ConstantData){(const void *)(uintptr_t)address, bytes};
    }
    Py_DECREF(items);
    if (!ok) {
        PyMem_Free(data);
        return false;
    }
    *out = data;
    return true;
}

/* 32 digits. */
static bool read_hash(PyObject *text, Hash128 *out) {
    Py_ssize_t size;
    const char *digits = PyUnicode_Check(text) ? PyUnicode_AsUTF8AndSize(text, &size) : NULL;
    if (!digits || size != 32 || strspn(digits, "0123456789abcdef") != 32) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "blobs: %R are not 32 hexadecimal digits", text);
        return false;
    }
    char half[17] = {0};
    memcpy(half, digits, 16);
    out->a = strtoull(half, NULL, 16);
    out->b = strtoull(digits + 16, NULL, 16);
    return true;
}

static bool read_blob(PyObject *item, NpuBlob *out) {
    PyObject *key, *checksum;
    unsigned long long address;
    Py_ssize_t bytes;
    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "blobs: want (key, checksum, address, bytes), got %R", item);
        return false;
    }
    if (!PyArg_ParseTuple(item, "OOKn:blobs", &key, &checksum, &address, &bytes)) return false;
    if (bytes <= 0 || !address) {
        PyErr_Format(PyExc_ValueError, "blobs: %zd bytes at %llu", bytes, address);
        return false;
    }
    out->data = (const void *)(uintptr_t)address;
    out->bytes = (size_t)bytes;
    return read_hash(key, &out->key) && read_hash(checksum, &out->checksum);
}

static bool read_blobs(PyObject *sequence, NpuBlob **out, uint32_t *count) {
    PyObject *items = PySequence_Fast(sequence, "blobs: want a sequence");
    *out = NULL;
    if (!items) return false;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(items);
    NpuBlob *blobs = n <= UINT32_MAX ? PyMem_Calloc((size_t)n + 1, sizeof *blobs) : NULL;
    bool ok = blobs != NULL;
    if (!ok) PyErr_NoMemory();
    for (Py_ssize_t i = 0; ok && i < n; i++) ok = read_blob(PySequence_Fast_GET_ITEM(items, i), &blobs[i]);
    Py_DECREF(items);
    if (!ok) {
        PyMem_Free(blobs);
        return false;
    }
    *out = blobs;
    *count = (uint32_t)n;
    return true;
}

PyObject *program_load(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"text",      "constants",  "target",   "keep_text", "executable",      "pack",
                               "threads",   "keepalive",  "npu_mode", "device",    "precision",       "fold",
                               "f32_types", "f32_border", "config",   "cache_dir", "fail_allocation", "host_precision",
                               "callees",   "share",      "blobs",    NULL};
    ProgramArgs given;
    PyObject *sequence, *blob_sequence = NULL;
    const char *text;
    Py_ssize_t size;
    unsigned long long fail_allocation = 0;
    unsigned callees = 0;
    program_args_init(&given);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s#O|$spppiOsOspppszKsIOO:load", keywords, &text, &size, &sequence,
                                     &given.options.target, &given.keep_text, &given.executable, &given.pack,
                                     &given.options.threads, &given.keepalive, &given.npu_mode, &given.device,
                                     &given.precision, &given.fold, &given.f32_types, &given.f32_border,
                                     &given.options.npu.config, &given.options.npu.cache_dir, &fail_allocation,
                                     &given.host_precision, &callees, &given.share, &blob_sequence))
        return NULL;
    const ModuleState *state = PyModule_GetState(module);
    ConstantData *constants;
    NpuBlob *blobs = NULL;
    size_t n;
    if (!program_args_check(state, &given) || !read_constants(sequence, &constants, &n)) return NULL;
    if (blob_sequence && !read_blobs(blob_sequence, &blobs, &given.options.npu.n_blobs)) {
        PyMem_Free(constants);
        return NULL;
    }
    given.options.npu.blobs = blobs; /* the program has a copy of the list */
    Context ctx;
    Door door;
    Program *program = NULL;
    context_init(&ctx);
    ctx.fail_allocation = fail_allocation;
    door_leave(&door, &ctx, COMPILE_POLL_MS);
    Code code = forge_load(&ctx, text, (size_t)size, constants, n, callees, &given.options, &program);
    door_enter(&door);
    PyMem_Free(constants);
    PyMem_Free(blobs);
    if (code == CODE_OK) return make_program(module, program, given.keepalive);
    raise_code(state, &ctx, code);
    return NULL;
}
