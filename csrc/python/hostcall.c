/* Calls from the executor to a Python function: tensors go out as DLPack capsules without a copy. */
#include <stdlib.h>

#include "python/core.h"

/* --- DLPack, version 0: its two structs, as every reader lays them out -------------------------------------------- */
typedef struct DLTensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
typedef struct DLManagedTensor {
    DLTensor tensor;
    void *manager;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;
enum { DL_CPU = 1, DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };

typedef struct Exported {
    DLManagedTensor managed;
    int64_t shape[MAX_RANK], strides[MAX_RANK];
} Exported;

static uint8_t dl_code(DType dtype) {
    if (dtype == DTYPE_BF16) return DL_BFLOAT;
    switch (dtype_class(dtype)) {
    case 'b': return DL_BOOL;
    case 'u': return DL_UINT;
    case 'i': return DL_INT;
    case 'c': return DL_COMPLEX;
    default: return DL_FLOAT;
    }
}

/* May run on any thread and without the GIL: the reader decides. */
static void exported_free(DLManagedTensor *self) { free(self->manager); }

static void capsule_free(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return; /* a reader has taken it over */
    DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}

static PyObject *export_tensor(const Tensor *tensor) {
    Exported *exported = calloc(1, sizeof *exported);
    if (!exported) return PyErr_NoMemory();
    memcpy(exported->shape, tensor->shape, sizeof exported->shape);
    memcpy(exported->strides, tensor->strides, sizeof exported->strides);
    DLTensor *dl = &exported->managed.tensor;
    dl->data = tensor->data;
    dl->device.type = DL_CPU;
    dl->ndim = tensor->rank;
    dl->dtype.code = dl_code(tensor->dtype);
    dl->dtype.bits = (uint8_t)(8 * dtype_size(tensor->dtype));
    dl->dtype.lanes = 1;
    dl->shape = exported->shape;
    dl->strides = exported->strides;
    exported->managed.manager = exported;
    exported->managed.deleter = exported_free;
    PyObject *capsule = PyCapsule_New(&exported->managed, "dltensor", capsule_free);
    if (!capsule) free(exported);
    return capsule;
}

/* --- arguments and results ---------------------------------------------------------------------------------------- */
static PyObject *make_arguments(const Tensor *in, uint32_t n_in) {
    PyObject *list = PyList_New((Py_ssize_t)n_in);
    for (uint32_t k = 0; list && k < n_in; k++) {
        PyObject *item = !in[k].data                   ? Py_NewRef(Py_None) /* an absent operand */
                         : in[k].dtype == DTYPE_OBJECT ? Py_NewRef((PyObject *)in[k].data)
                                                       : export_tensor(&in[k]);
        if (item)
            PyList_SET_ITEM(list, (Py_ssize_t)k, item);
        else
            Py_CLEAR(list);
    }
    return list;
}

/* `item` is (address, strides, keepalive). */
static bool read_tensor(PyObject *item, uint32_t k, Tensor *out) {
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3) {
        PyErr_Format(PyExc_TypeError, "host result %u: want (address, strides, keepalive)", k);
        return false;
    }
    out->data = PyLong_AsVoidPtr(PyTuple_GET_ITEM(item, 0));
    if (!out->data && PyErr_Occurred()) return false;
    PyObject *strides = PySequence_Fast(PyTuple_GET_ITEM(item, 1), "host result: strides are no sequence");
    if (!strides) return false;
    bool ok = PySequence_Fast_GET_SIZE(strides) == out->rank;
    if (!ok)
        PyErr_Format(PyExc_ValueError, "host result %u: want %d strides, got %zd", k, (int)out->rank,
                     PySequence_Fast_GET_SIZE(strides));
    for (uint8_t d = 0; ok && d < out->rank; d++) {
        out->strides[d] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(strides, d));
        ok = out->strides[d] != -1 || !PyErr_Occurred();
    }
    Py_DECREF(strides);
    return ok;
}

/* Takes over what `result`, a tuple, says. It is itself the hold: it keeps each tensor's keepalive. */
static bool read_results(PyObject *result, Tensor *out, uint32_t n_out, void **hold) {
    if (PyTuple_GET_SIZE(result) != (Py_ssize_t)n_out) {
        PyErr_Format(PyExc_ValueError, "host: want %u results, got %zd", n_out, PyTuple_GET_SIZE(result));
        return false;
    }
    bool tensors = false;
    for (uint32_t k = 0; k < n_out; k++) {
        if (out[k].dtype == DTYPE_OBJECT) continue;
        tensors = true;
        if (!read_tensor(PyTuple_GET_ITEM(result, (Py_ssize_t)k), k, &out[k])) return false;
    }
    for (uint32_t k = 0; k < n_out; k++)
        if (out[k].dtype == DTYPE_OBJECT) out[k].data = Py_NewRef(PyTuple_GET_ITEM(result, (Py_ssize_t)k));
    if (tensors) *hold = Py_NewRef(result);
    return true;
}

static bool call_function(PyObject *function, uint32_t callee, const Tensor *in, uint32_t n_in, Tensor *out,
                          uint32_t n_out, void **hold) {
    PyObject *arguments = make_arguments(in, n_in);
    if (!arguments) return false;
    PyObject *returned = PyObject_CallFunction(function, "IO", (unsigned)callee, arguments);
    Py_DECREF(arguments);
    if (!returned) return false;
    PyObject *result = PySequence_Tuple(returned);
    Py_DECREF(returned);
    if (!result) return false;
    bool ok = read_results(result, out, n_out, hold);
    decref_while_raising(result);
    return ok;
}

/* --- what the executor sees --------------------------------------------------------------------------------------- */
static Code host_call(Context *ctx, void *user, uint32_t callee, const Tensor *in, uint32_t n_in, Tensor *out,
                      uint32_t n_out, void **hold) {
    HostDoor *host = user;
    door_reenter(host->door);
    bool ok = call_function(host->function, callee, in, n_in, out, n_out, hold);
    door_releave(host->door);
    return ok ? CODE_OK : fail(ctx, CODE_HOST, "host call %u failed", (unsigned)callee);
}

static void host_release(void *user, void *object) {
    HostDoor *host = user;
    door_reenter(host->door);
    decref_while_raising(object); /* the run may be ending with an exception */
    door_releave(host->door);
}

static void host_retain(void *user, void *object) {
    HostDoor *host = user;
    door_reenter(host->door);
    Py_INCREF((PyObject *)object);
    door_releave(host->door);
}

HostCalls host_calls(HostDoor *host) {
    return (HostCalls){
        .call = host->function ? host_call : NULL, .release = host_release, .retain = host_retain, .user = host};
}
