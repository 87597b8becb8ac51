/* samples(): elements of weights, by which writes are noticed that torch does not count. */
#include <string.h>

#include "python/core.h"

typedef struct Place {
    uint64_t address, bytes;
} Place;

PyObject *module_samples(PyObject *module, PyObject *places) {
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(places, &view, PyBUF_C_CONTIGUOUS)) return NULL;
    const Place *place = view.buf;
    size_t count = (size_t)view.len / sizeof *place;
    PyObject *result = NULL;
    if ((size_t)view.len % sizeof *place || (uintptr_t)view.buf % _Alignof(Place))
        PyErr_Format(PyExc_ValueError, "places: want pairs of uint64, got %zd bytes", view.len);
    else
        result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(uint64_t)));
    for (size_t i = 0; result && i < count; i++) {
        uint64_t word = 0;
        if (place[i].bytes > sizeof word) {
            PyErr_Format(PyExc_ValueError, "places: %llu bytes at once, at most 8",
                         (unsigned long long)place[i].bytes);
            Py_CLEAR(result);
            break;
        }
        memcpy(&word, (const void *)(uintptr_t)place[i].address, place[i].bytes);
        memcpy(PyBytes_AS_STRING(result) + i * sizeof word, &word, sizeof word);
    }
    PyBuffer_Release(&view);
    return result;
}
