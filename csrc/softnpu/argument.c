/* A graph's properties, its arguments, and its commands. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

/* --- properties -------------------------------------------------------------------------------------------------- */

ze_result_t graph_get_properties(Graph *graph, ze_graph_properties_3_t *out) {
    ENTER(pfnGetProperties);
    CHECK_HANDLE(graph, graph);
    CHECK_POINTER(out);
    if (out->stype != ZE_STRUCTURE_TYPE_GRAPH_PROPERTIES) misuse("pfnGetProperties: stype");
    out->numGraphArgs = graph->count;
    return OK;
}

ze_result_t graph_get_properties_2(Graph *graph, ze_graph_properties_3_t *out) {
    ENTER(pfnGetProperties2);
    CHECK_HANDLE(graph, graph);
    CHECK_POINTER(out);
    if (out->stype != ZE_STRUCTURE_TYPE_GRAPH_PROPERTIES_2) misuse("pfnGetProperties2: stype");
    out->numGraphArgs = graph->count;
    out->initStageRequired = ZE_GRAPH_STAGE_INITIALIZE;
    return OK;
}

ze_result_t graph_get_properties_3(Graph *graph, ze_graph_properties_3_t *out) {
    ENTER(pfnGetProperties3);
    CHECK_HANDLE(graph, graph);
    CHECK_POINTER(out);
    if (out->stype != ZE_STRUCTURE_TYPE_GRAPH_PROPERTIES_3) misuse("pfnGetProperties3: stype");
    out->numGraphArgs = graph->count;
    out->initStageRequired = ZE_GRAPH_STAGE_INITIALIZE;
    out->flags = graph->flags;
    return OK;
}

/* By ov_element_type_e: dynamic, boolean, bf16, f16, f32, f64, i4, i8, i16, i32, i64, u1, u2, u3, u4, u6, u8, u16, u32,
 * u64, nf4, f8e4m3, f8e5m2, string, f4e2m1, f8e8m0. */
static uint32_t precision(int type) {
    static const uint8_t of[] = {0x0d, 0x0e, 0x09, 0x02, 0x01, 0x0f, 0x0c, 0x07, 0x06, 0x05, 0x11, 0x08, 0x16,
                                 0,    0x0b, 0,    0x04, 0x03, 0x0a, 0x10, 0x12, 0x13, 0x14, 0,    0,    0x15};
    return type >= 0 && (size_t)type < sizeof of ? of[type] : 0;
}

static ze_result_t describe(Graph *graph, uint32_t index, uint32_t stype, ze_graph_argument_properties_3_t *out) {
    CHECK_HANDLE(graph, graph);
    if (index >= graph->count) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    if (out->stype != stype) misuse("argument properties: stype 0x%x instead of 0x%x", out->stype, stype);
    for (ze_graph_argument_property_strides_t *next = out->pNext; next; next = next->pNext) {
        if (next->stype != ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_PROPERTY_STRIDES ||
            settings().extension < ZE_MAKE_VERSION(1, 15))
            return ZE_RESULT_ERROR_INVALID_ARGUMENT;
        next->supportsDynamicStrides = false;
    }
    const ModelArgument *a = model_argument(graph->model, index);
    static const uint32_t layouts[] = {0x00, 0x60, 0xc1, 0x80, 0x01, 0x03}; /* any, C, NC, CHW, NCHW, NCDHW */
    void *next = out->pNext;
    memset(out, 0, sizeof *out);
    out->stype = stype;
    out->pNext = next;
    /* Of an input the parameter's name; of an output that of the layer which makes it, not the tensor's. */
    memcpy(out->name, graph->node[index], sizeof out->name);
    memcpy(out->debug_friendly_name, graph->node[index], sizeof out->debug_friendly_name);
    memcpy(out->associated_tensor_names[0], a->name, sizeof out->associated_tensor_names[0]);
    out->associated_tensor_names_count = *a->name != 0;
    out->type = a->output ? ZE_GRAPH_ARGUMENT_TYPE_OUTPUT : ZE_GRAPH_ARGUMENT_TYPE_INPUT;
    for (unsigned i = 0; i < ZE_MAX_GRAPH_ARGUMENT_DIMENSIONS_SIZE; i++)
        out->dims[i] = i < a->rank ? (uint32_t)a->shape[i] : 1;
    out->dims_count = a->rank;
    out->networkPrecision = out->devicePrecision = precision(a->type);
    out->networkLayout = out->deviceLayout = layouts[a->rank];
    out->quantReverseScale = 1.0f;
    return OK;
}

/* The older structures are the beginning of the newest. */
static ze_result_t describe_part(Graph *graph, uint32_t index, uint32_t stype, ze_graph_argument_properties_3_t *out,
                                 size_t bytes) {
    CHECK_POINTER(out);
    ze_graph_argument_properties_3_t *whole = calloc(1, sizeof *whole);
    if (!whole) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    whole->stype = out->stype;
    whole->pNext = out->pNext;
    ze_result_t r = describe(graph, index, stype, whole);
    if (!r) memcpy(out, whole, bytes);
    free(whole);
    return r;
}

ze_result_t graph_get_argument(Graph *graph, uint32_t index, ze_graph_argument_properties_3_t *out) {
    ENTER(pfnGetArgumentProperties);
    return describe_part(graph, index, ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_PROPERTIES, out,
                         offsetof(ze_graph_argument_properties_3_t, quantReverseScale));
}

ze_result_t graph_get_argument_2(Graph *graph, uint32_t index, ze_graph_argument_properties_3_t *out) {
    ENTER(pfnGetArgumentProperties2);
    return describe_part(graph, index, ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_PROPERTIES_2, out,
                         offsetof(ze_graph_argument_properties_3_t, dims_count));
}

ze_result_t graph_get_argument_3(Graph *graph, uint32_t index, ze_graph_argument_properties_3_t *out) {
    ENTER(pfnGetArgumentProperties3);
    CHECK_POINTER(out);
    return describe(graph, index, ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_PROPERTIES_3, out);
}

ze_result_t graph_get_metadata(Graph *graph, uint32_t index, ze_graph_argument_metadata_t *out) {
    ENTER(pfnGraphGetArgumentMetadata);
    CHECK_HANDLE(graph, graph);
    CHECK_POINTER(out);
    if (index >= graph->count) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    static const uint8_t types[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 13, 0, 14, 15, 16, 17};
    const ModelArgument *a = model_argument(graph->model, index);
    uint32_t stype = out->stype;
    void *next = out->pNext;
    memset(out, 0, sizeof *out);
    out->stype = stype;
    out->pNext = next;
    out->type = a->output ? ZE_GRAPH_ARGUMENT_TYPE_OUTPUT : ZE_GRAPH_ARGUMENT_TYPE_INPUT;
    out->data_type = a->type >= 0 && (size_t)a->type < sizeof types ? types[a->type] : 0;
    memcpy(out->friendly_name, graph->node[index], sizeof out->friendly_name);
    memcpy(out->input_name, graph->node[index], sizeof out->input_name);
    memcpy(out->tensor_names[0], a->name, sizeof out->tensor_names[0]);
    out->tensor_names_count = *a->name != 0;
    out->shape_size = a->rank;
    for (unsigned i = 0; i < a->rank; i++) out->shape[i] = (uint64_t)a->shape[i];
    return OK;
}

/* --- values and commands ----------------------------------------------------------------------------------------- */

static ze_result_t set_value(Graph *graph, uint32_t index, const void *value) {
    if (index >= graph->count) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    graph->values[index] = value;
    return OK;
}

ze_result_t graph_set_argument(Graph *graph, uint32_t index, const void *value) {
    ENTER(pfnSetArgumentValue);
    CHECK_HANDLE(graph, graph);
    CHECK_POINTER(value);
    return set_value(graph, index, value);
}

ze_result_t graph_set_argument_2(Graph *graph, uint32_t index, const void *value) {
    ENTER(pfnSetArgumentValue2);
    CHECK_HANDLE(graph, graph);
    CHECK_POINTER(value);
    if (index >= graph->count) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    for (const ze_graph_argument_value_tensor_t *next = value; next; next = next->pNext) {
        /* no argument of this device has dynamic strides */
        if (next->stype != ZE_STRUCTURE_TYPE_GRAPH_ARGUMENT_TENSOR) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
        graph->values[index] = next->pTensor;
    }
    return OK;
}

static ze_result_t append(List *list, Command command, Event *signal, uint32_t n_wait, Event **wait) {
    enum { MAX_WAIT = 16 };
    Event *own[MAX_WAIT];
    if (n_wait > MAX_WAIT || (n_wait && !wait)) {
        free(command.arguments);
        return ZE_RESULT_ERROR_INVALID_SIZE;
    }
    for (uint32_t i = 0; i < n_wait; i++) own[i] = unwrapped(ZEL_HANDLE_EVENT, wait[i]);
    return list_append(list, command, unwrapped(ZEL_HANDLE_EVENT, signal), n_wait, own);
}

ze_result_t graph_append_initialize(List *list, Graph *graph, Event *signal, uint32_t n_wait, Event **wait) {
    ENTER(pfnAppendGraphInitialize);
    list = unwrapped(ZEL_HANDLE_COMMAND_LIST, list);
    CHECK_HANDLE(list, list);
    CHECK_HANDLE(graph, graph);
    return append(list, (Command){.kind = COMMAND_INITIALIZE, .graph = graph}, signal, n_wait, wait);
}

ze_result_t graph_append_execute(List *list, Graph *graph, void *profiling, Event *signal, uint32_t n_wait,
                                 Event **wait) {
    ENTER(pfnAppendGraphExecute);
    list = unwrapped(ZEL_HANDLE_COMMAND_LIST, list);
    CHECK_HANDLE(list, list);
    CHECK_HANDLE(graph, graph);
    if (profiling) return ZE_RESULT_ERROR_INVALID_ARGUMENT; /* no graph has profiling data */
    if (list->closed) return ZE_RESULT_ERROR_NOT_AVAILABLE;
    for (uint32_t i = 0; i < graph->count; i++) /* Level Zero memory, and enough of it */
        if (!graph->values[i] || memory_room(graph->context, graph->values[i]) < model_argument(graph->model, i)->bytes)
            return ZE_RESULT_ERROR_UNINITIALIZED;
    void **arguments = malloc(graph->count * sizeof *arguments);
    if (!arguments) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    memcpy(arguments, graph->values, graph->count * sizeof *arguments);
    return append(list, (Command){.kind = COMMAND_EXECUTE, .graph = graph, .arguments = arguments}, signal, n_wait,
                  wait);
}
