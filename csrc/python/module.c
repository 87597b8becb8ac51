/* forge_ugc._core: what the C core is made of, and the door to it. The contract is forge_ugc/_core.pyi. */
#include "python/core.h"

#ifndef FORGE_VERSION
#define FORGE_VERSION "0.1.0"
#endif

/* --- what there is: operators, dtypes, passes, targets ------------------------------------------------------------ */
static bool append(PyObject *list, PyObject *value) {
    bool ok = value && PyList_Append(list, value) == 0;
    Py_XDECREF(value);
    return ok;
}

static PyObject *flag_names(uint32_t flags) {
    const struct {
        uint32_t flag;
        const char *name;
    } names[] = {
#define FLAG(f) {f, #f}
        FLAG(ELEMENTWISE), FLAG(COMPARE), FLAG(VIEW),        FLAG(CONTRACTION),
        FLAG(CREATE),      FLAG(OPAQUE),  FLAG(STRIDED_OUT), FLAG(FUSED),
#undef FLAG
    };
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < sizeof names / sizeof *names; i++)
        if ((flags & names[i].flag) && !append(list, PyUnicode_FromString(names[i].name))) Py_CLEAR(list);
    return list;
}

static const char *kind_name(AttrKind kind) {
    switch (kind) {
    case KIND_INT: return "INT";
    case KIND_BOOL: return "BOOL";
    case KIND_FLOAT: return "FLOAT";
    case KIND_SCALAR: return "SCALAR";
    case KIND_INTS: return "INTS";
    }
    return "";
}

static PyObject *attr_pairs(const OpInfo *info) {
    PyObject *list = PyList_New(0);
    for (uint8_t k = 0; list && k < info->n_attrs; k++) {
        AttrName name = info->attrs[k];
        if (!append(list, Py_BuildValue("(ss)", attr_name(name), kind_name(attr_kind(name))))) Py_CLEAR(list);
    }
    return list;
}

static PyObject *count_or_none(uint8_t count) { return count == ANY ? Py_NewRef(Py_None) : PyLong_FromLong(count); }

static PyObject *module_ops(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
    for (int op = 0; list && op < OP_COUNT; op++) {
        const OpInfo *info = op_info((Op)op);
        if (!append(list, Py_BuildValue("{s:i,s:s,s:i,s:N,s:N,s:N,s:N}", "id", op, "name", info->name, "min_operands",
                                        (int)info->min_operands, "max_operands", count_or_none(info->max_operands),
                                        "results", count_or_none(info->results), "flags", flag_names(info->flags),
                                        "attrs", attr_pairs(info))))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *module_dtypes(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
    for (int d = 0; list && d < DTYPE_COUNT; d++)
        if (!append(list, Py_BuildValue("(snC)", dtype_name((DType)d), (Py_ssize_t)dtype_size((DType)d),
                                        (int)dtype_class((DType)d))))
            Py_CLEAR(list);
    return list;
}

static PyObject *module_passes(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    size_t count;
    const Pass *table = pass_table(&count);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < count; i++)
        if (!append(list, Py_BuildValue("(sN)", table[i].name, PyBool_FromLong(table[i].by_default)))) Py_CLEAR(list);
    return list;
}

static PyObject *module_targets(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    const char *const names[] = {"cpu", "npu3720", "npu4000", "npu5010"};
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < sizeof names / sizeof *names; i++)
        if (target_find(names[i]) && !append(list, PyUnicode_FromString(names[i]))) Py_CLEAR(list);
    return list;
}

static PyObject *module_cpu_features(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
#if defined(__x86_64__) || defined(__i386__)
#define FEATURE(name)                                                                                                  \
    if (list && __builtin_cpu_supports(name) && !append(list, PyUnicode_FromString(name))) Py_CLEAR(list);
    FEATURE("avx2")
    FEATURE("fma")
    FEATURE("f16c")
    FEATURE("avx512f")
    FEATURE("avx512bw")
    FEATURE("avx512vl")
    FEATURE("avx512dq")
    FEATURE("avx512vnni")
    FEATURE("avx512bf16")
#undef FEATURE
#endif
    return list;
}

/* --- text to text ------------------------------------------------------------------------------------------------- */
static PyObject *module_optimize_text(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"text", "passes", "emit", "target", "alpha", NULL};
    const char *source, *emit = "graph";
    Py_ssize_t size;
    CompileOptions options;
    compile_options_default(&options);
    options.passes = "default";
    options.target = "cpu";
    options.alpha = 1.0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s#|sssd:optimize_text", keywords, &source, &size, &options.passes,
                                     &emit, &options.target, &options.alpha))
        return NULL;
    Context ctx;
    Door door;
    Text text;
    context_init(&ctx);
    text_init(&text);
    door_leave(&door, &ctx, 10);
    Code code = forge_optimize_text(&ctx, source, (size_t)size, &options, emit, &text);
    door_enter(&door);
    return text_or_error(PyModule_GetState(module), &ctx, code, &text);
}

/* --- the module --------------------------------------------------------------------------------------------------- */
static PyMethodDef module_methods[] = {
    {"ops", module_ops, METH_NOARGS, "ops()\n--\n\nThe operators, in the order of their ids."},
    {"dtypes", module_dtypes, METH_NOARGS,
     "dtypes()\n--\n\n(name, bytes, class) of each dtype, in the order of their numbers."},
    {"passes", module_passes, METH_NOARGS, "passes()\n--\n\n(name, runs by default) of each pass, in default order."},
    {"targets", module_targets, METH_NOARGS, "targets()\n--\n\nNames of the machines that there is a plan for."},
    {"cpu_features", module_cpu_features, METH_NOARGS, "cpu_features()\n--\n\nInstruction sets that this machine has."},
    {"compile", (PyCFunction)(void (*)(void))program_compile, METH_VARARGS | METH_KEYWORDS,
     "compile(nodes, values, constants, operands, attrs, dims, outputs, strings, sources, *, target='cpu', "
     "passes='default', "
     "alpha=1.0, autotune=False, keep_text=False, executable=True, pack=True, threads=1, keepalive=None, "
     "npu_mode='none', device=None, precision='fp16', fold=True, f32_types=False, f32_border=False, config='', "
     "cache_dir=None, fail_allocation=0, host_precision='fp32', progress=None, schedule=True)\n--\n\n"
     "Compiles a node table. `fail_allocation=N` is for tests: the Nth allocation fails."},
    {"load", (PyCFunction)(void (*)(void))program_load, METH_VARARGS | METH_KEYWORDS,
     "load(text, constants, *, target='cpu', keep_text=False, executable=True, pack=True, threads=1, keepalive=None, "
     "npu_mode='none', device=None, precision='fp16', fold=True, f32_types=False, f32_border=False, config='', "
     "cache_dir=None, fail_allocation=0, host_precision='fp32', callees=0, share=None, blobs=())\n--\n\n"
     "A program from what portable() gave: its text and, for each constant, (address, bytes) or None."},
    {"optimize_text", (PyCFunction)(void (*)(void))module_optimize_text, METH_VARARGS | METH_KEYWORDS,
     "optimize_text(text, passes='default', emit='graph', target='cpu', alpha=1.0)\n--\n\n"
     "Runs passes on a graph in its text form."},
    {"samples", module_samples, METH_O,
     "samples(places)\n--\n\nWhat lies at (address, bytes) pairs of uint64 (1, 2, 4 or 8 bytes), in 8 bytes each. "
     "The caller keeps the memory alive."},
    {"npu_likely", module_npu_likely, METH_NOARGS,
     "npu_likely()\n--\n\nWhether anything here could be an NPU. Loads nothing."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    ModuleState *state = PyModule_GetState(module);
    state->program_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &program_spec, NULL);
    if (!state->program_type || PyModule_AddType(module, state->program_type) != 0) return -1;
    state->device_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &device_spec, NULL);
    if (!state->device_type || PyModule_AddType(module, state->device_type) != 0) return -1;
    state->npu_error = npu_error_class();
    if (!state->npu_error || PyModule_AddObjectRef(module, "NpuError", state->npu_error) != 0) return -1;
    PyObject *dtypes = table_dtypes();
    int added = dtypes ? PyModule_AddObjectRef(module, "TABLE_DTYPES", dtypes) : -1;
    Py_XDECREF(dtypes);
    PyObject *none = PyLong_FromUnsignedLong(VALUE_NONE);
    if (added == 0) added = none ? PyModule_AddObjectRef(module, "VALUE_NONE", none) : -1;
    Py_XDECREF(none);
    if (added != 0) return -1;
    if (PyModule_AddIntConstant(module, "MAX_RANK", MAX_RANK) != 0) return -1;
    if (PyModule_AddIntConstant(module, "STEP_WORDS", STEP_WORDS) != 0) return -1;
    return PyModule_AddStringConstant(module, "VERSION", FORGE_VERSION);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    ModuleState *state = PyModule_GetState(module);
    if (!state) return 0;
    Py_VISIT(state->program_type);
    Py_VISIT(state->device_type);
    Py_VISIT(state->npu_error);
    return 0;
}

static int module_clear(PyObject *module) {
    ModuleState *state = PyModule_GetState(module);
    if (!state) return 0;
    Py_CLEAR(state->program_type);
    Py_CLEAR(state->device_type);
    Py_CLEAR(state->npu_error);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, SLOT(module_exec)},
    {0, NULL},
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,         .m_name = "forge_ugc._core", .m_doc = "The C core of Forge-UGC.",
    .m_size = sizeof(ModuleState), .m_methods = module_methods, .m_slots = module_slots,
    .m_traverse = module_traverse, .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module_def); }
