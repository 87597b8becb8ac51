/* The node table as Python hands it over: seven arrays and two lists of texts. Their form is checked here, what stands
 * in them by graph_from_table. */
#include <stddef.h>

#include "python/core.h"

/* X(struct, field, numpy type, letter of the buffer protocol): in the order of the struct, which has no holes. */
#define NODE_FIELDS(X)                                                                                                 \
    X(TableNode, op, "u2", H)                                                                                          \
    X(TableNode, n_results, "u2", H)                                                                                   \
    X(TableNode, first_operand, "u4", I)                                                                               \
    X(TableNode, n_operands, "u4", I)                                                                                  \
    X(TableNode, first_attr, "u4", I)                                                                                  \
    X(TableNode, n_attr_words, "u4", I)                                                                                \
    X(TableNode, source, "i4", i)
#define VALUE_FIELDS(X)                                                                                                \
    X(TableValue, dtype, "u1", B)                                                                                      \
    X(TableValue, rank, "u1", B)                                                                                       \
    X(TableValue, reserved, "u2", H)                                                                                   \
    X(TableValue, first_dim, "u4", I)
#define CONSTANT_FIELDS(X)                                                                                             \
    X(TableConstant, data, "u8", Q)                                                                                    \
    X(TableConstant, dtype, "u1", B)                                                                                   \
    X(TableConstant, rank, "u1", B)                                                                                    \
    X(TableConstant, kind, "u1", B)                                                                                    \
    X(TableConstant, reserved, "u1", B)                                                                                \
    X(TableConstant, first_dim, "u4", I)                                                                               \
    X(TableConstant, name, "i4", i)                                                                                    \
    X(TableConstant, reserved2, "i4", i)

/* The sizes of all fields together are the size of the struct: no holes, so numpy lays it out in the same way. */
#define FIELD_SIZE(type, field, numpy, letter) +sizeof(((type *)0)->field)
_Static_assert(0 NODE_FIELDS(FIELD_SIZE) == sizeof(TableNode), "TableNode");
_Static_assert(0 VALUE_FIELDS(FIELD_SIZE) == sizeof(TableValue), "TableValue");
_Static_assert(0 CONSTANT_FIELDS(FIELD_SIZE) == sizeof(TableConstant), "TableConstant");

#define LETTER(type, field, numpy, letter) #letter
static const struct ArrayForm {
    const char *name, *letters;
    Py_ssize_t size, alignment;
} ARRAYS[TABLE_ARRAYS] = {
    {"nodes", NODE_FIELDS(LETTER), sizeof(TableNode), _Alignof(TableNode)},
    {"values", VALUE_FIELDS(LETTER), sizeof(TableValue), _Alignof(TableValue)},
    {"constants", CONSTANT_FIELDS(LETTER), sizeof(TableConstant), _Alignof(TableConstant)},
    {"operands", "I", 4, 4},
    {"attrs", "q", 8, 8},
    {"dims", "q", 8, 8},
    {"outputs", "I", 4, 4},
};

static bool add_fields(PyObject *dtypes, const char *name, PyObject *fields) {
    bool ok = fields && PyDict_SetItemString(dtypes, name, fields) == 0;
    Py_XDECREF(fields);
    return ok;
}

PyObject *table_dtypes(void) {
    PyObject *dtypes = PyDict_New();
    if (!dtypes) return NULL;
#define SPACE(type, field, numpy, letter) "(ss)"
#define PAIR(type, field, numpy, letter) , #field, numpy
    if (add_fields(dtypes, "nodes", Py_BuildValue("[" NODE_FIELDS(SPACE) "]" NODE_FIELDS(PAIR))) &&
        add_fields(dtypes, "values", Py_BuildValue("[" VALUE_FIELDS(SPACE) "]" VALUE_FIELDS(PAIR))) &&
        add_fields(dtypes, "constants", Py_BuildValue("[" CONSTANT_FIELDS(SPACE) "]" CONSTANT_FIELDS(PAIR))))
        return dtypes;
    Py_DECREF(dtypes);
    return NULL;
}

/* Whether `format`, e.g. "T{=H:op:=H:n_results:}", has just the type letters `want`. Which of `l` and `q` (`L` and `Q`)
 * stands for 8 bytes depends on the platform; the item size tells them apart. */
static bool format_is(const char *format, const char *want) {
    if (!format) return false; /* unsigned bytes */
    bool record = strncmp(format, "T{", 2) == 0;
    if (record) format += 2;
    for (; *format; format++) {
        char letter = *format;
        if (strchr("@=<^ ", letter) || (record && letter == '}' && format[1] == 0)) continue;
        if (letter == ':') {
            format = strchr(format + 1, ':');
            if (!format) return false;
            continue;
        }
        if (letter == 'l') letter = *want == 'q' ? 'q' : 'i';
        if (letter == 'L') letter = *want == 'Q' ? 'Q' : 'I';
        if (letter != *want) return false;
        want++;
    }
    return *want == 0;
}

static bool open_array(TableArgs *args, const struct ArrayForm *form, PyObject *object, const void **items,
                       size_t *count) {
    Py_buffer *view = &args->views[args->n_views];
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
        if (PyErr_ExceptionMatches(PyExc_BufferError)) PyErr_Format(PyExc_ValueError, "%s: not contiguous", form->name);
        return false;
    }
    args->n_views++;
    if (view->ndim != 1 || view->itemsize != form->size || !format_is(view->format, form->letters)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: want one dimension of %zd-byte items of format '%s', got %d of %zd bytes, '%s'", form->name,
                     form->size, form->letters, view->ndim, view->itemsize, view->format ? view->format : "B");
        return false;
    }
    if (view->len > 0 && (uintptr_t)view->buf % (uintptr_t)form->alignment != 0) {
        PyErr_Format(PyExc_ValueError, "%s: memory is not aligned to %zd bytes", form->name, form->alignment);
        return false;
    }
    *items = view->buf;
    *count = (size_t)(view->len / view->itemsize);
    return true;
}

static bool open_texts(TableArgs *args, int which, const char *name, PyObject *object, const char *const **items,
                       size_t *count) {
    PyObject *texts = args->texts[which] = PySequence_Tuple(object);
    if (!texts) return false;
    Py_ssize_t n = PyTuple_GET_SIZE(texts);
    const char **pointers = args->pointers[which] = PyMem_New(const char *, n + 1);
    if (!pointers) return PyErr_NoMemory(), false;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *text = PyTuple_GET_ITEM(texts, i);
        if (!PyUnicode_Check(text)) {
            PyErr_Format(PyExc_TypeError, "%s[%zd]: want str, got %.100s", name, i, Py_TYPE(text)->tp_name);
            return false;
        }
        Py_ssize_t size;
        pointers[i] = PyUnicode_AsUTF8AndSize(text, &size);
        if (!pointers[i]) return false;
        if ((size_t)size != strlen(pointers[i])) {
            PyErr_Format(PyExc_ValueError, "%s[%zd]: contains a null character", name, i);
            return false;
        }
    }
    *items = pointers;
    *count = (size_t)n;
    return true;
}

bool table_open(TableArgs *args, PyObject *const objects[TABLE_OBJECTS]) {
    memset(args, 0, sizeof *args);
    Table *t = &args->table;
    const void *items[TABLE_ARRAYS];
    size_t *counts[TABLE_ARRAYS] = {&t->n_nodes, &t->n_values, &t->n_constants, &t->n_operands,
                                    &t->n_attrs, &t->n_dims,   &t->n_outputs};
    for (int k = 0; k < TABLE_ARRAYS; k++)
        if (!open_array(args, &ARRAYS[k], objects[k], &items[k], counts[k])) return false;
    t->nodes = items[0];
    t->values = items[1];
    t->constants = items[2];
    t->operands = items[3];
    t->attrs = items[4];
    t->dims = items[5];
    t->outputs = items[6];
    return open_texts(args, 0, "strings", objects[TABLE_ARRAYS], &t->strings, &t->n_strings) &&
           open_texts(args, 1, "sources", objects[TABLE_ARRAYS + 1], &t->sources, &t->n_sources);
}

void table_close(TableArgs *args) {
    for (int k = 0; k < args->n_views; k++) PyBuffer_Release(&args->views[k]);
    for (int k = 0; k < 2; k++) {
        PyMem_Free(args->pointers[k]);
        Py_XDECREF(args->texts[k]);
    }
    memset(args, 0, sizeof *args);
}
