/* The one place where codes become Python exceptions. */
#include "python/core.h"

void raise_code(const Context *ctx, Code code) {
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
    PyErr_SetObject(type, text);
    Py_DECREF(text);
}

PyObject *text_or_error(const Context *ctx, Code code, Text *text) {
    PyObject *result = NULL;
    if (code == CODE_OK)
        result = PyUnicode_DecodeUTF8(text->data ? text->data : "", (Py_ssize_t)text->size, "replace");
    else
        raise_code(ctx, code);
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
