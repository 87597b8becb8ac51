/* samples(): elements of weights, by which writes are noticed that torch does not count. */
#include <string.h>

#include "python/core.h"

typedef struct Place {
    uint64_t address, bytes;
} Place;

/* Sizes are constants, so that copies are loads. */
static inline bool read_word(const Place *place, uint64_t *word) {
    const void *from = (const void *)(uintptr_t)place->address;
    switch (place->bytes) {
    case 1: memcpy(word, from, 1); return true;
    case 2: memcpy(word, from, 2); return true;
    case 4: memcpy(word, from, 4); return true;
    case 8: memcpy(word, from, 8); return true;
    default: return false;
    }
}

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
    char *to = result ? PyBytes_AS_STRING(result) : NULL;
    for (size_t i = 0; result && i < count; i++) {
        uint64_t word = 0;
        if (!read_word(&place[i], &word)) {
            PyErr_Format(PyExc_ValueError, "places: %llu bytes at once; 1, 2, 4 or 8 can be read",
                         (unsigned long long)place[i].bytes);
            Py_CLEAR(result);
            break;
        }
        memcpy(to + i * sizeof word, &word, sizeof word);
    }
    PyBuffer_Release(&view);
    return result;
}
