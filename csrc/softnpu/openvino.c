#include "openvino.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct ov_shape_t {
    int64_t rank;
    int64_t *dims;
} ov_shape_t;
enum { OV_U8 = 16 };

/* The part of OpenVINO's stable C ABI that is used. */
static struct {
    int (*core_create)(void **core);
    int (*read_model)(const void *core, const char *xml, size_t bytes, const void *weights, void **model);
    int (*compile_model)(const void *core, const void *model, const char *device, size_t n_properties, void **compiled,
                         ...);
    int (*inputs)(const void *compiled, size_t *count);
    int (*outputs)(const void *compiled, size_t *count);
    int (*input)(const void *compiled, size_t index, void **port);
    int (*output)(const void *compiled, size_t index, void **port);
    int (*port_name)(const void *port, char **name);
    int (*port_type)(const void *port, int *type);
    int (*port_shape)(const void *port, ov_shape_t *shape);
    int (*tensor_on)(int type, ov_shape_t shape, void *memory, void **tensor);
    int (*tensor_bytes)(const void *tensor, size_t *bytes);
    int (*request_create)(const void *compiled, void **request);
    int (*request_input)(void *request, size_t index, const void *tensor);
    int (*request_output)(void *request, size_t index, const void *tensor);
    int (*request_run)(void *request);
    const char *(*last_error)(void);
    void (*free_model)(void *model);
    void (*free_compiled)(void *compiled);
    void (*free_port)(void *port);
    void (*free_tensor)(void *tensor);
    void (*free_request)(void *request);
    void (*free_text)(const char *text);
    void (*free_shape)(ov_shape_t *shape);
} ov;
static void *core;
static char unusable[256]; /* why OpenVINO cannot be used; "" it can */
static const char *library_path;
static pthread_once_t opened = PTHREAD_ONCE_INIT;

static void open_library(void) {
    const struct {
        const char *symbol;
        void *function; /* address of a function pointer */
    } wanted[] = {
        {"ov_core_create", &ov.core_create},
        {"ov_core_read_model_from_memory_buffer", &ov.read_model},
        {"ov_core_compile_model", &ov.compile_model},
        {"ov_compiled_model_inputs_size", &ov.inputs},
        {"ov_compiled_model_outputs_size", &ov.outputs},
        {"ov_compiled_model_input_by_index", &ov.input},
        {"ov_compiled_model_output_by_index", &ov.output},
        {"ov_port_get_any_name", &ov.port_name},
        {"ov_port_get_element_type", &ov.port_type},
        {"ov_const_port_get_shape", &ov.port_shape},
        {"ov_tensor_create_from_host_ptr", &ov.tensor_on},
        {"ov_tensor_get_byte_size", &ov.tensor_bytes},
        {"ov_compiled_model_create_infer_request", &ov.request_create},
        {"ov_infer_request_set_input_tensor_by_index", &ov.request_input},
        {"ov_infer_request_set_output_tensor_by_index", &ov.request_output},
        {"ov_infer_request_infer", &ov.request_run},
        {"ov_get_last_err_msg", &ov.last_error},
        {"ov_model_free", &ov.free_model},
        {"ov_compiled_model_free", &ov.free_compiled},
        {"ov_output_const_port_free", &ov.free_port},
        {"ov_tensor_free", &ov.free_tensor},
        {"ov_infer_request_free", &ov.free_request},
        {"ov_free", &ov.free_text},
        {"ov_shape_free", &ov.free_shape},
    };
    void *library = dlopen(*library_path ? library_path : "libopenvino_c.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(unusable, sizeof unusable, "%s", dlerror());
        return;
    }
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(library, wanted[i].symbol);
        if (!found) {
            snprintf(unusable, sizeof unusable, "%s has no %s", library_path, wanted[i].symbol);
            return;
        }
        memcpy(wanted[i].function, &found, sizeof found);
    }
    if (ov.core_create(&core) || !core) snprintf(unusable, sizeof unusable, "ov_core_create: %s", ov.last_error());
}

typedef struct Request { /* one that no execution uses */
    void *request;
    struct Request *next;
} Request;

struct Model {
    void *compiled;
    void *weights; /* constants may alias them */
    pthread_mutex_t lock;
    Request *idle;
    unsigned n_inputs, count;
    ModelArgument arguments[];
};

static bool describe(const void *port, ModelArgument *a) {
    char *name = NULL, byte = 0;
    ov_shape_t shape = {0};
    void *tensor = NULL;
    if (!ov.port_name(port, &name) && name) { /* a tensor may have no name */
        snprintf(a->name, sizeof a->name, "%s", name);
        ov.free_text(name);
    }
    if (ov.port_type(port, &a->type) || ov.port_shape(port, &shape)) return false;
    bool good = shape.rank <= MODEL_MAX_RANK;
    a->rank = (unsigned)shape.rank;
    for (unsigned i = 0; good && i < a->rank; i++) a->shape[i] = shape.dims[i];
    if (good) { /* a tensor knows how many bytes it has; this one is never read */
        good = !ov.tensor_on(a->type, shape, &byte, &tensor) && !ov.tensor_bytes(tensor, &a->bytes);
        if (tensor) ov.free_tensor(tensor);
    }
    ov.free_shape(&shape);
    return good;
}

static Model *describe_all(void *compiled, void *weights) {
    size_t n_in = 0, n_out = 0;
    if (ov.inputs(compiled, &n_in) || ov.outputs(compiled, &n_out)) return NULL;
    Model *m = calloc(1, sizeof *m + (n_in + n_out) * sizeof m->arguments[0]);
    if (!m) return NULL;
    m->n_inputs = (unsigned)n_in;
    m->count = (unsigned)(n_in + n_out);
    for (unsigned i = 0; i < m->count; i++) {
        void *port = NULL;
        m->arguments[i].output = i >= n_in;
        if (i < n_in ? ov.input(compiled, i, &port) : ov.output(compiled, i - n_in, &port)) break;
        bool good = describe(port, &m->arguments[i]);
        ov.free_port(port);
        if (!good) break;
        if (i + 1 == m->count) {
            pthread_mutex_init(&m->lock, NULL);
            m->compiled = compiled;
            m->weights = weights;
            return m;
        }
    }
    free(m);
    return NULL;
}

Model *model_load(const char *library, const char *xml, size_t xml_bytes, const void *bin, size_t bin_bytes, char *log,
                  size_t log_size) {
    void *graph = NULL, *tensor = NULL, *compiled = NULL, *weights = NULL;
    Model *m = NULL;
    library_path = library;
    pthread_once(&opened, open_library);
    if (*unusable) {
        snprintf(log, log_size, "OpenVINO cannot be used: %s", unusable);
        return NULL;
    }
    bool good = true;
    if (bin_bytes) {
        int64_t size = (int64_t)bin_bytes;
        weights = aligned_alloc(64, (bin_bytes + 63) & ~(size_t)63);
        if (weights) memcpy(weights, bin, bin_bytes);
        good = weights && !ov.tensor_on(OV_U8, (ov_shape_t){1, &size}, weights, &tensor);
    }
    if (good && !ov.read_model(core, xml, xml_bytes, tensor, &graph) &&
        !ov.compile_model(core, graph, "CPU", 4, &compiled, "INFERENCE_PRECISION_HINT", "f32",
                          "DYNAMIC_QUANTIZATION_GROUP_SIZE", "0"))
        m = describe_all(compiled, weights);
    if (!m) {
        const char *error = ov.last_error();
        snprintf(log, log_size, "%s", error ? error : "out of memory");
        if (compiled) ov.free_compiled(compiled);
    }
    if (graph) ov.free_model(graph);
    if (tensor) ov.free_tensor(tensor);
    if (!m) free(weights);
    return m;
}

void model_free(Model *m) {
    if (!m) return;
    for (Request *r = m->idle, *next; r; r = next) {
        next = r->next;
        ov.free_request(r->request);
        free(r);
    }
    ov.free_compiled(m->compiled);
    pthread_mutex_destroy(&m->lock);
    free(m->weights);
    free(m);
}

unsigned model_arguments(const Model *m) { return m->count; }
const ModelArgument *model_argument(const Model *m, unsigned index) { return &m->arguments[index]; }

static Request *request_take(Model *m) {
    pthread_mutex_lock(&m->lock);
    Request *r = m->idle;
    if (r) m->idle = r->next;
    pthread_mutex_unlock(&m->lock);
    if (r) return r;
    r = calloc(1, sizeof *r);
    if (r && ov.request_create(m->compiled, &r->request)) {
        free(r);
        return NULL;
    }
    return r;
}

bool model_run(Model *m, void *const *arguments, char *log, size_t log_size) {
    Request *r = request_take(m);
    bool good = r != NULL;
    for (unsigned i = 0; good && i < m->count; i++) {
        ModelArgument *a = &m->arguments[i];
        void *tensor = NULL;
        good = !ov.tensor_on(a->type, (ov_shape_t){a->rank, a->shape}, arguments[i], &tensor) &&
               !(i < m->n_inputs ? ov.request_input(r->request, i, tensor)
                                 : ov.request_output(r->request, i - m->n_inputs, tensor));
        if (tensor) ov.free_tensor(tensor);
    }
    good = good && !ov.request_run(r->request);
    if (!good) {
        const char *error = ov.last_error();
        snprintf(log, log_size, "%s", error ? error : "no infer request");
    }
    if (r) {
        pthread_mutex_lock(&m->lock);
        r->next = m->idle;
        m->idle = r;
        pthread_mutex_unlock(&m->lock);
    }
    return good;
}
