/* Weights that are arguments of graphs: found, given memory that the device can read, filled. A weight that several
 * calls (or arguments) read is there once. What lies in the model's own memory just as the device wants it is imported
 * where the driver can; the rest lies in a few large allocations. */
#include <string.h>

#include "npu/session.h"
#include "npuir/view.h"

enum { CHUNK = 64 << 20, LEAST_IMPORT = 1 << 20 };

typedef struct Planner {
    Context *ctx;
    Arena *arena, scratch;
    NpuDevice *device;
    const NpuPlan *plan;
    Weights *w;
    uint32_t *table, size; /* open addressing: weight + 1 */
} Planner;

static bool same_source(const WeightSource *a, const WeightSource *b) {
    if (a == b) return true;
    return a->part == b->part && a->part != WEIGHT_BYTES && a->i4 == b->i4 && a->dtype == b->dtype &&
           a->rank == b->rank && a->offset == b->offset && a->bytes == b->bytes &&
           memcmp(a->shape, b->shape, a->rank * sizeof *a->shape) == 0 &&
           memcmp(a->strides, b->strides, a->rank * sizeof *a->strides) == 0;
}

static uint32_t constant_of(const Weight *w) { return w->constant == UINT32_MAX ? w->source->constant : w->constant; }

static bool same_weight(const Weight *a, const Weight *b) {
    return a->column == b->column && same_source(a->source, b->source) &&
           (a->source->part == WEIGHT_BYTES || constant_of(a) == constant_of(b));
}

static uint32_t find_or_add(Planner *p, const Weight *weight) {
    uint64_t hash = (uint64_t)constant_of(weight) * 0x9e3779b97f4a7c15u +
                    (uint64_t)weight->column * 0xff51afd7ed558ccdu + (uint64_t)weight->source->bytes * 31 +
                    weight->source->part;
    uint32_t slot = (uint32_t)(hash >> 20) & (p->size - 1);
    for (; p->table[slot]; slot = (slot + 1) & (p->size - 1)) {
        if (same_weight(&p->w->items[p->table[slot] - 1], weight)) return p->table[slot] - 1;
    }
    p->w->items[p->w->count++] = *weight;
    return (p->table[slot] = p->w->count) - 1;
}

static Code find_weights(Planner *p, NpuModel *const *models) {
    const NpuPlan *plan = p->plan;
    uint32_t n = 0;
    for (uint32_t c = 0; c < plan->n_calls; c++) n += models[plan->calls[c].block]->n_args;
    for (p->size = 16; p->size < 2 * n; p->size *= 2) {
    }
    TRY(ARENA_NEW(p->ctx, &p->scratch, p->size, &p->table));
    TRY(ARENA_NEW(p->ctx, p->arena, n, &p->w->items));
    TRY(ARENA_NEW(p->ctx, p->arena, n + 1, &p->w->allocations));
    TRY(ARENA_NEW(p->ctx, p->arena, plan->n_calls, &p->w->of_call));
    for (uint32_t c = 0; c < plan->n_calls; c++) {
        const NpuCall *call = &plan->calls[c];
        const NpuBlock *block = &plan->blocks[call->block];
        const NpuModel *model = models[call->block];
        TRY(ARENA_NEW(p->ctx, p->arena, model->n_args, &p->w->of_call[c]));
        for (uint32_t a = 0; a < model->n_args; a++) {
            Weight weight = {.source = &model->args[a], .constant = UINT32_MAX};
            for (uint32_t k = 0; k < block->n_weights && weight.source->part != WEIGHT_BYTES; k++) {
                if (block->weights[k] != weight.source->constant) continue;
                weight.constant = call->weights[k];
                weight.column = block->columns ? call->first_column : 0;
            }
            p->w->of_call[c][a] = find_or_add(p, &weight);
        }
    }
    return CODE_OK;
}

/* The weight's bytes in the model's memory, if they are there as the device wants them. */
static void *ready_memory(const Graph *g, const Weight *w) {
    const WeightSource *s = w->source;
    uint32_t index = constant_of(w);
    if (s->part != WEIGHT_VALUES || s->i4 || index >= g->n_constants) return NULL;
    const Constant *c = &g->constants[index];
    if (!c->data || c->dtype != s->dtype || !view_is_row_major(s->rank, s->shape, s->strides)) return NULL;
    int64_t offset = (s->offset + (s->rank ? w->column * s->strides[0] : 0)) * (int64_t)dtype_size(c->dtype);
    if (offset < 0 || s->bytes > c->bytes - offset) return NULL;
    return (char *)c->data + offset;
}

static Code allocate(Planner *p, int64_t bytes, void **out) {
    TRY(npu_memory_alloc(p->ctx, p->device, bytes, out));
    p->w->allocations[p->w->n_allocations++] = *out;
    return CODE_OK;
}

static Code place_weights(Planner *p) {
    Weights *w = p->w;
    for (uint32_t i = 0; i < w->count; i++) {
        Weight *weight = &w->items[i];
        void *ready = weight->source->bytes >= LEAST_IMPORT ? ready_memory(p->plan->ir->graph, weight) : NULL;
        if (weight->source->part != WEIGHT_BYTES) w->bytes += weight->source->bytes; /* masks are no weights */
        if (!ready) continue;
        TRY(npu_memory_import(p->ctx, p->device, ready, weight->source->bytes, &weight->memory));
        if (!weight->memory) continue; /* the driver cannot */
        weight->imported = true;
        w->allocations[w->n_allocations++] = weight->memory;
    }
    for (uint32_t i = 0, end; i < w->count; i = end) { /* weights i .. end lie in one allocation */
        int64_t bytes = 0;
        char *memory;
        for (end = i; end < w->count; end++) {
            int64_t more = w->items[end].imported ? 0 : page_up(w->items[end].source->bytes);
            if (bytes && bytes + more > CHUNK) break;
            bytes += more;
        }
        if (bytes == 0) continue;
        TRY(allocate(p, bytes, (void **)&memory));
        for (uint32_t k = i; k < end; k++) {
            if (w->items[k].imported) continue;
            w->items[k].memory = memory;
            memory += page_up(w->items[k].source->bytes);
        }
    }
    return CODE_OK;
}

Code weights_plan(Context *ctx, Arena *arena, NpuDevice *device, const NpuPlan *plan, NpuModel *const *models,
                  Weights *out) {
    Planner p = {.ctx = ctx, .arena = arena, .device = device, .plan = plan, .w = out};
    *out = (Weights){0};
    arena_init(&p.scratch);
    Code code = find_weights(&p, models);
    if (code == CODE_OK) code = place_weights(&p);
    arena_destroy(&p.scratch);
    return code;
}

Code weights_fill(Context *ctx, const Graph *g, const Weights *weights, uint32_t index) {
    const Weight *w = &weights->items[index];
    if (w->imported) return CODE_OK;
    return weight_fill(ctx, g, w->source, w->constant, w->column, w->memory);
}

void weights_free(NpuDevice *device, Weights *weights) {
    for (uint32_t i = 0; i < weights->n_allocations; i++) npu_memory_free(device, weights->allocations[i]);
    weights->n_allocations = 0;
}
