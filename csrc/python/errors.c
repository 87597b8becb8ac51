/* The one place where codes become Python exceptions. */
#include "python/core.h"

PyObject *npu_error_class(void) {
    PyObject *defaults = Py_BuildValue("{s:s,s:{}}", "reason", "failed", "facts");
    if (!defaults) return NULL;
    PyObject *made = PyErr_NewExceptionWithDoc(
        "forge_ugc.NpuError",
        "There is no usable NPU, or it failed. `reason`: which case it is, one of \"no-loader\", \"no-driver\",\n"
        "\"no-permission\", \"no-device\", \"no-compiler\", \"old-extension\", \"version-mismatch\", "
        "\"device-lost\",\n"
        "\"out-of-memory\", \"compile-failed\", \"timeout\", \"failed\". `facts`: what was found of the NPU, when "
        "opening it failed.",
        PyExc_RuntimeError, defaults);
    Py_DECREF(defaults);
    return made;
}

static void raise_npu_error(const ModuleState *state, const Context *ctx, PyObject *text) {
    PyObject *error = PyObject_CallOneArg(state->npu_error, text);
    PyObject *reason = error ? PyUnicode_FromString(npu_reason_name((NpuReason)ctx->reason)) : NULL;
    if (reason && PyObject_SetAttrString(error, "reason", reason) == 0) PyErr_SetObject(state->npu_error, error);
    Py_XDECREF(reason);
    Py_XDECREF(error);
}

void raise_code(const ModuleState *state, const Context *ctx, Code code) {
    if (PyErr_Occurred()) return; /* set by a host callback or a signal handler, which say it better */
    PyObject *type = PyExc_RuntimeError;
    switch (code) {
    case CODE_INVALID: type = PyExc_ValueError; break;
    case CODE_TYPE: type = PyExc_TypeError; break;
    case CODE_NO_MEMORY: type = PyExc_MemoryError; break;
    case CODE_UNSUPPORTED: type = PyExc_NotImplementedError; break;
    case CODE_INDEX: type = PyExc_IndexError; break;
    case CODE_CANCELLED: type = PyExc_KeyboardInterrupt; break;
    case CODE_OK:
    case CODE_INTERNAL:
    case CODE_DEVICE:
    case CODE_HOST: break;
    }
    /* The text may have been cut inside a character. */
    PyObject *text = PyUnicode_DecodeUTF8(ctx->text, (Py_ssize_t)strlen(ctx->text), "replace");
    if (!text) return;
    if (code == CODE_DEVICE)
        raise_npu_error(state, ctx, text);
    else
        PyErr_SetObject(type, text);
    Py_DECREF(text);
}

PyObject *text_or_error(const ModuleState *state, const Context *ctx, Code code, Text *text) {
    PyObject *result = NULL;
    if (code == CODE_OK)
        result = PyUnicode_DecodeUTF8(text->data ? text->data : "", (Py_ssize_t)text->size, "replace");
    else
        raise_code(state, ctx, code);
    text_destroy(text);
    return result;
}

void decref_while_raising(PyObject *object) {
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *raised = PyErr_GetRaisedException();
    Py_DECREF(object);
    PyErr_SetRaisedException(raised);
#else
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_DECREF(object);
    PyErr_Restore(type, value, trace);
#endif
}
