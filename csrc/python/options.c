/* Arguments that every way to a Program takes: compile() and load(). */
#include "python/core.h"

enum { MAX_THREADS = 1024 };

void program_args_init(ProgramArgs *args) {
    *args = (ProgramArgs){.executable = 1,
                          .pack = 1,
                          .schedule = 1,
                          .fold = 1,
                          .keepalive = Py_None,
                          .device = Py_None,
                          .share = Py_None,
                          .npu_mode = "none",
                          .precision = "fp16",
                          .host_precision = "fp32"};
    compile_options_default(&args->options);
}

/* What the instructions on the NPU run on. */
static bool check_npu(const ModuleState *state, ProgramArgs *args) {
    static const char *const modes[] = {"none", "emulate", "dispatch"};
    NpuOptions *npu = &args->options.npu;
    int m = 0;
    while (m < 3 && strcmp(args->npu_mode, modes[m]) != 0) m++;
    if (m == 3) {
        PyErr_Format(PyExc_ValueError, "npu_mode: want none, emulate or dispatch, got %s", args->npu_mode);
        return false;
    }
    npu->mode = (NpuMode)m;
    if (!precision_from_name(args->precision, &npu->precision)) {
        PyErr_Format(PyExc_ValueError, "precision: want fp16, w8a16 or w4a16, got %s", args->precision);
        return false;
    }
    if (args->device != Py_None && !Py_IS_TYPE(args->device, state->device_type)) {
        PyErr_Format(PyExc_TypeError, "device: want an NpuDevice, got %R", args->device);
        return false;
    }
    npu->device = args->device == Py_None ? NULL : device_of(args->device);
    if (npu->mode == NPU_MODE_DISPATCH && !npu->device) {
        PyErr_SetString(PyExc_ValueError, "npu_mode 'dispatch' wants a device");
        return false;
    }
    npu->fold = args->fold;
    npu->f32_types = args->f32_types;
    npu->f32_border = args->f32_border;
    return true;
}

/* Weights of products on the host. */
static bool check_host(ProgramArgs *args) {
    static const struct {
        const char *name;
        int bits;
        int64_t group;
    } known[] = {{"fp32", 0, 0}, {"bf16", 16, 0}, {"w8", 8, 0}, {"w4", 4, 128}, {"w4g64", 4, 64}, {"w4g32", 4, 32}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(args->host_precision, known[i].name) != 0) continue;
        args->options.weight_bits = known[i].bits;
        args->options.weight_group = known[i].group;
        return true;
    }
    PyErr_Format(PyExc_ValueError, "host_precision: want fp32, bf16, w8, w4, w4g64 or w4g32, got %s",
                 args->host_precision);
    return false;
}

bool program_args_check(const ModuleState *state, ProgramArgs *args) {
    CompileOptions *options = &args->options;
    if (!check_npu(state, args) || !check_host(args)) return false;
    options->autotune = args->autotune;
    options->keep_text = args->keep_text;
    options->executable = args->executable;
    options->pack = args->pack;
    options->schedule = args->schedule;
    if (args->share != Py_None) {
        if (!Py_IS_TYPE(args->share, state->program_type)) {
            PyErr_Format(PyExc_TypeError, "share: want a Program, got %R", args->share);
            return false;
        }
        options->packs = ((ProgramObject *)args->share)->program->packs;
    }
    if (options->threads < 1 || options->threads > MAX_THREADS) {
        PyErr_Format(PyExc_ValueError, "threads: want 1 to %d, got %d", MAX_THREADS, options->threads);
        return false;
    }
    if (!(options->alpha >= 0 && options->alpha <= 1)) {
        PyErr_SetString(PyExc_ValueError, "alpha: want a number from 0 to 1");
        return false;
    }
    return true;
}
