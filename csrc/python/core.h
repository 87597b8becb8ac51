/* Inside of the Python door: what its files share. Nothing below python/ knows of Python. */
#ifndef FORGE_PYTHON_CORE_H
#define FORGE_PYTHON_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>

#include "forge.h"
#include "graph/program.h"

/* Slots hold functions as `void *`, which ISO C does not foresee. */
#ifdef __GNUC__
#define SLOT(function) __extension__(void *)(function)
#else
#define SLOT(function) (void *)(function)
#endif

typedef struct ModuleState {
    PyTypeObject *program_type, *device_type;
    PyObject *npu_error; /* the class NpuError */
} ModuleState;

/* --- gil.c: leaving Python while C works -------------------------------------------------------------------------- */
/* A `Door` is left with door_leave() and entered again with door_enter(); code that runs in between on the same thread
 * may enter and leave it for a moment. While it is left, `door_cancelled` looks for signals now and then. */
typedef struct Door {
    PyThreadState *thread;
    bool signals;         /* on the main thread, the only one that Python lets handle them */
    int64_t next, period; /* nanoseconds */
} Door;
void door_leave(Door *door, Context *ctx, int period_ms); /* sets ctx->cancelled */
void door_enter(Door *door);
void door_reenter(Door *door); /* from C that runs while it is left ... */
void door_releave(Door *door); /* ... and back */

/* --- errors.c ----------------------------------------------------------------------------------------------------- */
/* The Python exception of a failure. CODE_HOST and CODE_CANCELLED have set theirs. */
void raise_code(const ModuleState *state, const Context *ctx, Code code);
/* The text as a str, or NULL with that exception; destroys it. */
PyObject *text_or_error(const ModuleState *state, const Context *ctx, Code code, Text *text);
/* The class NpuError: a RuntimeError with `reason` and `facts`. */
PyObject *npu_error_class(void);
/* Py_DECREF that keeps the exception that is being raised. */
void decref_while_raising(PyObject *object);

/* --- table.c ------------------------------------------------------------------------------------------------------ */
enum { TABLE_ARRAYS = 7 };
typedef struct TableArgs {
    Table table;
    Py_buffer views[TABLE_ARRAYS];
    int n_views;
    PyObject *texts[2];       /* tuples of str: strings, sources */
    const char **pointers[2]; /* their UTF-8, which lives as long as they */
} TableArgs;
enum { TABLE_OBJECTS = TABLE_ARRAYS + 2 };
/* nodes, values, constants, operands, attrs, dims, outputs, strings, sources. On failure an exception is set; close
 * anyway. */
bool table_open(TableArgs *args, PyObject *const objects[TABLE_OBJECTS]);
void table_close(TableArgs *args);
PyObject *table_dtypes(void); /* TABLE_DTYPES */

/* --- hostcall.c --------------------------------------------------------------------------------------------------- */
typedef struct HostDoor {
    Door *door;
    PyObject *function; /* borrowed */
} HostDoor;
HostCalls host_calls(HostDoor *host);

/* --- program.c ---------------------------------------------------------------------------------------------------- */
typedef struct ProgramObject {
    PyObject_HEAD Program *program;
    PyObject *keepalive; /* owners of the constants' memory */
    bool opaque_inputs, opaque_outputs;
    atomic_bool stop_upgrade;
} ProgramObject;
extern PyType_Spec program_spec;
enum { COMPILE_POLL_MS = 10 };
/* Takes the program over, also when it fails. */
PyObject *make_program(PyObject *module, Program *program, PyObject *keepalive);
PyObject *program_compile(PyObject *module, PyObject *args, PyObject *kwargs);

/* --- options.c: arguments that every way to a Program takes ------------------------------------------------------- */
typedef struct ProgramArgs {
    CompileOptions options;
    int autotune, keep_text, executable, pack, schedule, fold, f32_types, f32_border;
    PyObject *keepalive, *device, *share; /* borrowed */
    const char *npu_mode, *precision, *host_precision;
} ProgramArgs;
void program_args_init(ProgramArgs *args);
/* Completes args->options; false with an exception set. */
bool program_args_check(const ModuleState *state, ProgramArgs *args);

/* --- artefact.c: programs as text and memory ---------------------------------------------------------------------- */
PyObject *program_portable(PyObject *program, PyObject *unused);
PyObject *program_types(PyObject *program, PyObject *unused);
PyObject *program_hosts(PyObject *program, PyObject *unused);
PyObject *program_load(PyObject *module, PyObject *args, PyObject *kwargs);

/* --- samples.c ---------------------------------------------------------------------------------------------------- */
PyObject *module_samples(PyObject *module, PyObject *places);

/* --- schedule.c --------------------------------------------------------------------------------------------------- */
PyObject *program_schedule(PyObject *program, PyObject *unused);

/* --- npu.c: the device, and what only programs with NPU instructions can do --------------------------------------- */
extern PyType_Spec device_spec;
NpuDevice *device_of(PyObject *object); /* borrowed */
PyObject *module_npu_likely(PyObject *module, PyObject *unused);
PyObject *program_upgrade(PyObject *program, PyObject *unused);
PyObject *program_stop_upgrade(PyObject *program, PyObject *unused);
PyObject *program_npu_report(PyObject *program, PyObject *unused);
PyObject *program_npu_blobs(PyObject *program, PyObject *write);
PyObject *program_openvino_models(PyObject *program, PyObject *args, PyObject *kwargs);

#endif
