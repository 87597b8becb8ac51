/* What of the values between calls lies where in a frame, and what moves between host and device.
 *
 * A value is live from its upload or the call that makes it to the last call or download that reads it, over all
 * segments of the program. Which segment is the first to need a value on the device, and which values the host reads,
 * is known beforehand, since the segments of a call always run in order. */
#include <string.h>

#include "alloc/offsets.h"
#include "npu/session.h"

typedef struct Planner {
    Context *ctx;
    Arena *arena, scratch;
    const NpuPlan *plan;
    NpuModel *const *models;
    Values *v;
    uint32_t *slot_of;            /* of each buffer: where it lies; VALUE_SLOT_NONE: not on the device yet */
    bool *host_reads;             /* of each buffer */
    uint32_t *first_tile, *tiles; /* of each buffer: the calls that make its columns */
} Planner;

/* Places in a call. Segment s owns those from upload_time(s) to download_time(s). */
static uint32_t upload_time(const NpuPlan *plan, uint32_t s) { return plan->first_call[s] + 2 * s; }
static uint32_t call_time(uint32_t call, uint32_t s) { return call + 2 * s + 1; }
static uint32_t download_time(const NpuPlan *plan, uint32_t s) { return plan->first_call[s + 1] + 2 * s + 1; }

static void find_host_reads(Planner *p) {
    const Npuir *ir = p->plan->ir;
    for (uint32_t i = 0; i < ir->n_instrs; i++) {
        const Instr *instr = &ir->instrs[i];
        for (uint32_t k = 0; k < instr->n_in; k++) {
            if (instr->device == DEVICE_CPU && instr->in[k] != REG_NONE)
                p->host_reads[ir->regs[instr->in[k]].buffer] = true;
        }
    }
    for (BufferId b = 0; b < ir->n_buffers; b++) {
        if (ir->buffers[b].space == SPACE_OUTPUT) p->host_reads[b] = true;
    }
}

static uint32_t add_slot(Planner *p, DType dtype, int64_t bytes, uint32_t time) {
    p->v->slots[p->v->n_slots] = (Slot){.dtype = dtype, .bytes = bytes, .first = time, .last = time};
    return p->v->n_slots++;
}

static Code read_slot(Planner *p, const Port *port, BufferId b, uint32_t time, uint32_t *out) {
    uint32_t slot = p->slot_of[b];
    if (slot == VALUE_SLOT_NONE) return fail(p->ctx, CODE_INTERNAL, "NPU session: b%u is not on the device", b);
    Slot *s = &p->v->slots[slot];
    if (s->bytes < 0) { /* an upload, whose first reader this is */
        s->dtype = port->dtype;
        s->bytes = port->bytes;
    }
    if (s->dtype != port->dtype || s->bytes != port->bytes)
        return fail(p->ctx, CODE_INTERNAL, "NPU session: b%u is %s, %lld bytes in one graph, %s, %lld bytes in another",
                    b, dtype_name(s->dtype), (long long)s->bytes, dtype_name(port->dtype), (long long)port->bytes);
    s->last = time;
    *out = slot;
    return CODE_OK;
}

static Code plan_call(Planner *p, uint32_t call, uint32_t s) {
    const NpuPlan *plan = p->plan;
    const NpuCall *item = &plan->calls[call];
    const NpuBlock *block = &plan->blocks[item->block];
    const NpuModel *model = p->models[item->block];
    uint32_t time = call_time(call, s);
    if (model->n_in != block->n_in || model->n_out != block->n_out)
        return fail(p->ctx, CODE_INTERNAL, "NPU session: a model has other ports than its block");
    TRY(ARENA_NEW(p->ctx, p->arena, block->n_in, &p->v->in[call]));
    TRY(ARENA_NEW(p->ctx, p->arena, block->n_out, &p->v->out[call]));
    for (uint32_t k = 0; k < block->n_in; k++)
        TRY(read_slot(p, &model->in[k], plan->ir->regs[item->in[k]].buffer, time, &p->v->in[call][k]));
    for (uint32_t k = 0; k < block->n_out; k++) {
        BufferId b = plan->ir->regs[item->out[k]].buffer;
        uint32_t slot = add_slot(p, model->out[k].dtype, model->out[k].bytes, time);
        p->v->out[call][k] = slot;
        if (block->columns) {
            if (p->tiles[b]++ == 0) p->first_tile[b] = call;
        } else {
            p->slot_of[b] = slot;
        }
    }
    return CODE_OK;
}

static int64_t columns_of(const Register *r) { return r->rank ? r->shape[r->rank - 1] : 1; }

/* Is what moves as large on either side, and of types that can be converted? */
static Code check_move(Planner *p, const Register *r, const Move *move) {
    const Slot *slot = &p->v->slots[move->slot];
    int64_t count = 1;
    for (int d = 0; d < r->rank; d++) count *= r->shape[d];
    if (move->columns) count = count / columns_of(r) * move->columns;
    if (!convert_known(r->dtype, slot->dtype) || slot->bytes != count * (int64_t)dtype_size(slot->dtype))
        return fail(p->ctx, CODE_INTERNAL, "NPU session: %lld elements of %s are %lld bytes of %s on the device",
                    (long long)count, dtype_name(r->dtype), (long long)slot->bytes, dtype_name(slot->dtype));
    return CODE_OK;
}

static Code plan_downloads(Planner *p, uint32_t s, uint32_t *n) {
    const NpuPlan *plan = p->plan;
    const Segment *segment = &plan->segments.items[s];
    uint32_t time = download_time(plan, s);
    for (uint32_t k = 0; k < segment->n_out; k++) {
        const Register *r = &plan->ir->regs[segment->out[k]];
        uint32_t pieces = p->tiles[r->buffer] ? p->tiles[r->buffer] : 1;
        for (uint32_t i = 0; i < pieces && p->host_reads[r->buffer]; i++) {
            Move move = {.tensor = k, .slot = p->slot_of[r->buffer]};
            if (p->tiles[r->buffer]) {
                const NpuCall *call = &plan->calls[p->first_tile[r->buffer] + i];
                move = (Move){k, p->v->out[p->first_tile[r->buffer] + i][0], call->first_column,
                              plan->blocks[call->block].columns};
            }
            if (move.slot == VALUE_SLOT_NONE)
                return fail(p->ctx, CODE_INTERNAL, "NPU session: output %u of segment %u is not made", k, s);
            TRY(check_move(p, r, &move));
            p->v->slots[move.slot].last = time;
            p->v->downloads[(*n)++] = move;
        }
    }
    return CODE_OK;
}

static Code plan_segment(Planner *p, uint32_t s, uint32_t *n_uploads, uint32_t *n_downloads) {
    const NpuPlan *plan = p->plan;
    const Segment *segment = &plan->segments.items[s];
    p->v->first_upload[s] = *n_uploads;
    p->v->first_download[s] = *n_downloads;
    for (uint32_t k = 0; k < segment->n_in; k++) {
        BufferId b = plan->ir->regs[segment->in[k]].buffer;
        if (p->slot_of[b] != VALUE_SLOT_NONE) continue; /* a segment before has got or made it */
        p->slot_of[b] = add_slot(p, DTYPE_F32, -1, upload_time(plan, s));
        p->v->uploads[(*n_uploads)++] = (Move){.tensor = k, .slot = p->slot_of[b]};
    }
    for (uint32_t c = plan->first_call[s]; c < plan->first_call[s + 1]; c++) TRY(plan_call(p, c, s));
    for (uint32_t i = p->v->first_upload[s]; i < *n_uploads; i++)
        TRY(check_move(p, &plan->ir->regs[segment->in[p->v->uploads[i].tensor]], &p->v->uploads[i]));
    return plan_downloads(p, s, n_downloads);
}

/* Slots come in order of their first time, as the assignment of offsets wants them. */
static Code place_slots(Planner *p) {
    Values *v = p->v;
    Block *blocks;
    uint32_t length = download_time(p->plan, p->plan->segments.count - 1) + 1;
    int64_t bound;
    TRY(ARENA_NEW(p->ctx, &p->scratch, v->n_slots, &blocks));
    for (uint32_t i = 0; i < v->n_slots; i++) {
        const Slot *slot = &v->slots[i];
        blocks[i] = (Block){slot->first, slot->last, page_up(slot->bytes > 0 ? slot->bytes : 1), 0};
    }
    TRY(assign_offsets(p->ctx, &p->scratch, blocks, v->n_slots, length, &v->bytes, &bound));
    for (uint32_t i = 0; i < v->n_slots; i++) v->slots[i].offset = blocks[i].offset;
    return CODE_OK;
}

static Code plan_values(Planner *p) {
    const NpuPlan *plan = p->plan;
    const Npuir *ir = plan->ir;
    Values *v = p->v;
    uint32_t n_in = 0, n_out = 0, n_uploads = 0, n_downloads = 0;
    for (uint32_t s = 0; s < plan->segments.count; s++) {
        n_in += plan->segments.items[s].n_in;
        n_out += plan->segments.items[s].n_out;
    }
    uint32_t most = n_in;
    for (uint32_t c = 0; c < plan->n_calls; c++) most += plan->blocks[plan->calls[c].block].n_out;
    TRY(ARENA_NEW(p->ctx, p->arena, most, &v->slots));
    TRY(ARENA_NEW(p->ctx, p->arena, plan->n_calls, &v->in));
    TRY(ARENA_NEW(p->ctx, p->arena, plan->n_calls, &v->out));
    TRY(ARENA_NEW(p->ctx, p->arena, n_in, &v->uploads));
    TRY(ARENA_NEW(p->ctx, p->arena, n_out + plan->n_calls, &v->downloads));
    TRY(ARENA_NEW(p->ctx, p->arena, plan->segments.count + 1, &v->first_upload));
    TRY(ARENA_NEW(p->ctx, p->arena, plan->segments.count + 1, &v->first_download));
    TRY(ARENA_NEW(p->ctx, &p->scratch, ir->n_buffers, &p->slot_of));
    TRY(ARENA_NEW(p->ctx, &p->scratch, ir->n_buffers, &p->host_reads));
    TRY(ARENA_NEW(p->ctx, &p->scratch, ir->n_buffers, &p->first_tile));
    TRY(ARENA_NEW(p->ctx, &p->scratch, ir->n_buffers, &p->tiles));
    memset(p->slot_of, 0xff, ir->n_buffers * sizeof *p->slot_of); /* VALUE_SLOT_NONE */
    find_host_reads(p);
    for (uint32_t s = 0; s < plan->segments.count; s++) TRY(plan_segment(p, s, &n_uploads, &n_downloads));
    v->first_upload[plan->segments.count] = n_uploads;
    v->first_download[plan->segments.count] = n_downloads;
    return place_slots(p);
}

Code values_plan(Context *ctx, Arena *arena, const NpuPlan *plan, NpuModel *const *models, Values *out) {
    Planner p = {.ctx = ctx, .arena = arena, .plan = plan, .models = models, .v = out};
    *out = (Values){0};
    arena_init(&p.scratch);
    Code code = plan_values(&p);
    arena_destroy(&p.scratch);
    return code;
}
