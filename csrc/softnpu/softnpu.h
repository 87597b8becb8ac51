/* The software NPU: a Level Zero driver with one device of type VPU, for machines without one. The stock libze_loader
 * loads it through ZE_ENABLE_ALT_DRIVERS, so that dispatch code runs on it unchanged. Graphs (OpenVINO IR) run on
 * OpenVINO's CPU plugin in f32.
 *
 *   tables.c    what the loader asks for: tables of entry points
 *   driver.c    driver and device
 *   memory.c    contexts and allocations
 *   queue.c     command lists, queues, fences;  event.c  events
 *   graph.c     the graph extension: creation, blobs;  argument.c  arguments and properties
 *   compiler.c  what stands for the NPU's compiler
 *   openvino.c  OpenVINO's C library, opened at run time
 *   control.c   settings, faults on demand, counters: what tests reach through ctypes
 *
 * It refuses what the Linux NPU driver refuses, and where that driver leaves a mistake undefined (a handle used after
 * its destruction, a list submitted twice, memory freed while the device reads it) it says so in a list of misuses
 * instead of crashing. It doesn't imitate timing, f16 arithmetic, strided arguments or profiling. */
#ifndef SOFTNPU_SOFTNPU_H
#define SOFTNPU_SOFTNPU_H

#include <pthread.h>
#include <time.h>

#include "level_zero.h"
#include "openvino.h"

#define EXPORT __attribute__((visibility("default")))
#define OK ZE_RESULT_SUCCESS

/* --- entry points (control.c) ------------------------------------------------------------------------------------ */

typedef enum Entry {
#define CORE(name) ENTRY_##name,
#define GRAPH(since, name, function) ENTRY_##name,
#include "entries.def"
#undef CORE
#undef GRAPH
    ENTRY_execution, /* no function: a graph's execution on the device, whose failure the fence reports */
    ENTRY_COUNT
} Entry;

/* Counts a call. Not OK: what this call was told to fail with. */
ze_result_t enter(Entry entry);
/* First line of an entry point. */
#define ENTER(name)                                                                                                    \
    do {                                                                                                               \
        ze_result_t told_ = enter(ENTRY_##name);                                                                       \
        if (told_) return told_;                                                                                       \
    } while (0)
/* The build log that came with the last fault of a creating entry point, "" without one. */
const char *fault_log(Entry entry);

/* --- settings (control.c) ---------------------------------------------------------------------------------------- */

typedef struct Settings {
    uint32_t extension; /* ZE_MAKE_VERSION(1, n); 0: no graph extension */
    uint32_t compiler;  /* the same way; 0: a driver without compiler */
    uint32_t opset;
    uint32_t device_id; /* PCI id, by target */
    uint32_t driver;    /* its version */
    char target[16];    /* "npu3720", "npu4000", "npu5010" */
    uint64_t memory;    /* bytes that may be allocated; 0: as much as the machine has */
    uint64_t latency_us;
    uint64_t lose_after; /* executions after which the device is lost; 0: never */
    bool recovers;       /* a lost device works in contexts made afterwards */
    bool import;         /* the driver takes memory of others */
    bool firmware_mismatch;
    const char *openvino; /* path of libopenvino_c */
    const char *command;  /* run for every compilation; "": none */
    const char *refuse;   /* operators that the compiler refuses, separated by spaces */
    const char *folder;   /* for the files of `command` */
} Settings;
Settings settings(void); /* a copy; the texts live for ever */

/* --- objects (control.c) ----------------------------------------------------------------------------------------- */

#define KINDS(X)                                                                                                       \
    X(context) X(allocation) X(import) X(queue) X(list) X(fence) X(event_pool) X(event) X(graph) X(log) X(query)
typedef enum Kind {
#define X(name) KIND_##name,
    KINDS(X)
#undef X
        KIND_COUNT
} Kind;

typedef struct Object { /* first member of what a handle points at */
    Kind kind;
    size_t bytes; /* what it counts for in the device's memory */
    struct Object *previous, *next;
} Object;
/* Zeroed memory, registered; NULL: none left. `bytes` counts for allocations and graphs. */
void *object_new(Kind kind, size_t size, size_t bytes);
/* Is it a live object of that kind? Says so in the misuses if not (NULL aside). */
bool object_check(const void *handle, Kind kind, const char *where);
void object_free(void *object);
uint64_t live_bytes(void); /* of allocations and graphs */
void misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define CHECK_HANDLE(handle, kind)                                                                                     \
    do {                                                                                                               \
        if (!object_check((handle), KIND_##kind, __func__)) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;                \
    } while (0)
#define CHECK_POINTER(pointer)                                                                                         \
    do {                                                                                                               \
        if (!(pointer)) return ZE_RESULT_ERROR_INVALID_NULL_POINTER;                                                   \
    } while (0)

/* --- driver.c ---------------------------------------------------------------------------------------------------- */

typedef struct Driver Driver;
typedef struct Device Device;
Driver *the_driver(void);
Device *the_device(void);
/* The loader wraps handles when there are two drivers; extension functions get them wrapped. */
void *unwrapped(int zel_type, void *handle);
void remember_loader(const void *address_in_loader);
uint64_t machine_memory(void);

extern uint64_t losses; /* of the device, so far; under device_lock */
void lose_device(void); /* for all contexts that exist now */
bool device_gone(void); /* lost, and it does not recover */

/* --- memory.c ---------------------------------------------------------------------------------------------------- */

typedef struct Allocation {
    Object object;
    struct Context *context;
    char *data;
    size_t size; /* whole pages */
    int users;   /* executions that read or write it now */
    struct Allocation *next;
} Allocation;

typedef struct Context {
    Object object;
    uint64_t losses; /* when it was made; the device is lost for it when there are more */
    uint32_t queues;
    Allocation *allocations; /* under the device's lock */
} Context;
bool context_lost(const Context *context);
/* Bytes from `pointer` to the end of its allocation, 0: none of this context. */
size_t memory_room(Context *context, const void *pointer);
/* Marks the allocation around `pointer` as in use; false: there is none. With the device's lock held. */
bool memory_use(Context *context, const void *pointer, size_t bytes, int change);
bool memory_fits(uint64_t bytes); /* in the device's limit, with what is allocated */

/* --- queue.c ----------------------------------------------------------------------------------------------------- */

/* One lock and one condition for the state of queues, lists, fences, events and running executions. */
extern pthread_mutex_t device_lock;
extern pthread_cond_t device_changed;
struct timespec deadline_after(uint64_t nanoseconds);

typedef enum CommandKind {
    COMMAND_INITIALIZE,
    COMMAND_EXECUTE,
    COMMAND_COPY,
    COMMAND_SIGNAL,
    COMMAND_WAIT,
    COMMAND_RESET
} CommandKind;
typedef struct Command {
    CommandKind kind;
    struct Graph *graph;
    void **arguments; /* EXECUTE: the values when it was appended */
    void *to;
    const void *from;
    size_t bytes;
    struct Event *event;
} Command;

typedef struct List {
    Object object;
    Context *context;
    bool closed;
    Command *commands;
    size_t count, capacity;
    int in_flight;
} List;
typedef struct Queue Queue;
typedef struct Fence Fence;
/* Appends wait events, the command, the signal event. Takes command.arguments in any case. */
ze_result_t list_append(List *list, Command command, struct Event *signal, uint32_t n_wait, struct Event **wait);

typedef struct Event {
    Object object;
    bool set;
} Event;
typedef struct EventPool EventPool;

/* --- graph.c, argument.c ----------------------------------------------------------------------------------------- */

typedef struct Graph {
    Object object;
    Context *context;
    Model *model;
    const void **values;                      /* of the arguments, as set so far */
    char (*node)[ZE_MAX_GRAPH_ARGUMENT_NAME]; /* of each argument: the layer that makes it, Parameter or producer */
    uint32_t flags, count;                    /* of arguments */
    uint8_t *blob;
    size_t blob_bytes;
    bool initialized;
    int running;
} Graph;
typedef struct BuildLog BuildLog;
typedef struct Query Query;

typedef void (*Function)(void);
Function *graph_table(void);

ze_result_t graph_get_properties(Graph *graph, ze_graph_properties_3_t *out);
ze_result_t graph_get_properties_2(Graph *graph, ze_graph_properties_3_t *out);
ze_result_t graph_get_properties_3(Graph *graph, ze_graph_properties_3_t *out);
ze_result_t graph_get_argument(Graph *graph, uint32_t index, ze_graph_argument_properties_3_t *out);
ze_result_t graph_get_argument_2(Graph *graph, uint32_t index, ze_graph_argument_properties_3_t *out);
ze_result_t graph_get_argument_3(Graph *graph, uint32_t index, ze_graph_argument_properties_3_t *out);
ze_result_t graph_get_metadata(Graph *graph, uint32_t index, ze_graph_argument_metadata_t *out);
ze_result_t graph_set_argument(Graph *graph, uint32_t index, const void *value);
ze_result_t graph_set_argument_2(Graph *graph, uint32_t index, const void *value);
ze_result_t graph_append_initialize(List *list, Graph *graph, Event *signal, uint32_t n_wait, Event **wait);
ze_result_t graph_append_execute(List *list, Graph *graph, void *profiling, Event *signal, uint32_t n_wait,
                                 Event **wait);

/* --- compiler.c -------------------------------------------------------------------------------------------------- */

typedef struct Source { /* a graph as the compiler gets it */
    const char *xml, *flags;
    size_t xml_bytes;
    const uint8_t *bin;
    size_t bin_bytes;
} Source;
/* Takes a NGRAPH_LITE buffer apart. */
ze_result_t source_parse(const uint8_t *data, size_t bytes, Source *out, char *log, size_t log_size);
/* What the compiler says to it: its options, operators it refuses, the command. `*blob` (malloc; NULL: none) is what
 * the command wrote. */
ze_result_t compiler_run(const Source *source, uint8_t **blob, size_t *blob_bytes, char *log, size_t log_size);
bool compiler_knows_option(const char *name, size_t length);
const char *compiler_options(void); /* separated by spaces */
bool file_write(const char *path, const void *data, size_t bytes);
uint8_t *file_read(const char *path, size_t *bytes); /* malloc; NULL: it cannot be read, or is empty */
/* Name of the layer that makes tensor `name`, "" unknown. */
void layer_of_tensor(const Source *source, const char *name, char *out, size_t size);

#endif
