/* Frames: staging memory and command lists, recorded once, with the addresses that each call then has. */
#include <string.h>

#include "npu/session.h"

static void *address(const Body *body, uint32_t slot) { return body->staging + body->tier->values.slots[slot].offset; }

static Code record_call(Context *ctx, Body *body, NpuList *list, uint32_t call, void **arguments) {
    const Tier *tier = body->tier;
    uint32_t block = tier->plan->calls[call].block;
    NpuGraph *graph = tier->graphs[block];
    for (uint32_t i = 0; i < npu_graph_arguments(graph); i++) {
        const Binding *binding = &tier->bindings[block][i];
        switch (binding->kind) {
        case BIND_IN: arguments[i] = address(body, tier->values.in[call][binding->index]); break;
        case BIND_OUT: arguments[i] = address(body, tier->values.out[call][binding->index]); break;
        case BIND_WEIGHT: arguments[i] = tier->weights.items[tier->weights.of_call[call][binding->index]].memory; break;
        }
    }
    return npu_list_append(ctx, list, graph, arguments);
}

static Code record(Context *ctx, Body *body) {
    const Tier *tier = body->tier;
    const NpuPlan *plan = tier->plan;
    uint32_t most = 0;
    void **arguments;
    for (uint32_t b = 0; b < plan->n_blocks; b++) {
        uint32_t n = npu_graph_arguments(tier->graphs[b]);
        if (n > most) most = n;
    }
    TRY(ARENA_NEW(ctx, &body->memory, most, &arguments));
    TRY(ARENA_NEW(ctx, &body->memory, plan->segments.count, &body->lists));
    TRY(npu_memory_alloc(ctx, tier->device, tier->values.bytes, (void **)&body->staging));
    for (uint32_t s = 0; s < plan->segments.count; s++) {
        TRY(npu_list_create(ctx, tier->device, &body->lists[s]));
        for (uint32_t c = plan->first_call[s]; c < plan->first_call[s + 1]; c++)
            TRY(record_call(ctx, body, body->lists[s], c, arguments));
        TRY(npu_list_close(ctx, body->lists[s]));
    }
    return CODE_OK;
}

Code body_create(Context *ctx, Tier *tier, Body **out) {
    Arena memory;
    Body *body;
    *out = NULL;
    arena_init(&memory);
    Code code = ARENA_NEW(ctx, &memory, 1, &body);
    if (code != CODE_OK) {
        arena_destroy(&memory);
        return code;
    }
    body->memory = memory;
    body->tier = tier;
    atomic_fetch_add(&tier->references, 1);
    code = record(ctx, body);
    if (code == CODE_OK)
        *out = body;
    else
        body_destroy(body);
    return code;
}

void body_destroy(Body *body) {
    if (!body) return;
    Tier *tier = body->tier;
    for (uint32_t s = 0; body->lists && s < tier->plan->segments.count; s++) {
        if (body->lists[s]) npu_list_destroy(body->lists[s]); /* waits for what is in flight */
    }
    if (body->staging) npu_memory_free(tier->device, body->staging);
    Arena memory = body->memory; /* which holds `body` itself */
    arena_destroy(&memory);
    tier_unref(tier); /* graphs outlive the lists that use them */
}

/* A tile's columns of a tensor. */
static Tensor part_of(const Tensor *tensor, const Move *move) {
    Tensor part = *tensor;
    if (!move->columns) return part;
    int last = part.rank - 1;
    part.data = (char *)part.data + move->first_column * part.strides[last] * (int64_t)dtype_size(part.dtype);
    part.shape[last] = move->columns;
    return part;
}

Code body_run(Context *ctx, const Body *body, uint32_t segment, const Tensor *in, const Tensor *out) {
    const Values *v = &body->tier->values;
    for (uint32_t i = v->first_upload[segment]; i < v->first_upload[segment + 1]; i++) {
        const Move *move = &v->uploads[i];
        convert_to_device(&in[move->tensor], v->slots[move->slot].dtype, address(body, move->slot));
    }
    TRY(npu_list_run(ctx, body->lists[segment]));
    for (uint32_t i = v->first_download[segment]; i < v->first_download[segment + 1]; i++) {
        const Move *move = &v->downloads[i];
        Tensor part = part_of(&out[move->tensor], move);
        convert_to_host(address(body, move->slot), v->slots[move->slot].dtype, &part);
    }
    return CODE_OK;
}
