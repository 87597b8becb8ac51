/* Indexing along whole dimensions: embedding, index_select, index, index_put, index_copy, index_add.
 *
 * All are one loop: the index tensors, broadcast together, name positions of the "far" tensor; at each position a block
 * (the dimensions that are not indexed) goes between it and the "near" tensor, in which the index shape stands instead.
 * An index is checked where it is used, so that memory which changes under us cannot lead outside. */
#include "cpu/index.h"

#include <stdatomic.h>
#include <string.h>

typedef enum Move { MOVE_TO_NEAR, MOVE_TO_FAR, ADD_TO_FAR } Move;

typedef struct Indexing {
    const Tensor *indices[MAX_RANK];
    int64_t index_strides[MAX_RANK][MAX_RANK]; /* of each, broadcast to the index shape */
    int64_t sizes[MAX_RANK], far_strides[MAX_RANK];
    int n_indices, index_rank;
    int64_t index_shape[MAX_RANK], near_strides[MAX_RANK]; /* over the index shape */
    int block_rank;                                        /* >= 1, merged; the last one is copied as a row */
    int64_t block_shape[MAX_RANK], block_near[MAX_RANK], block_far[MAX_RANK];
    char *near, *far;
    size_t size;
    Move move;
    bool wrap; /* negative indices count from the end */
    AddRow add;
    int64_t positions, per_part;
    atomic_bool failed;
    _Atomic int64_t bad_index, bad_size;
} Indexing;

static void add_block_dim(Indexing *x, int64_t size, int64_t near, int64_t far) {
    if (size == 1) return;
    int last = x->block_rank - 1;
    if (last >= 0 && x->block_near[last] == near * size && x->block_far[last] == far * size) {
        x->block_shape[last] *= size;
    } else {
        last = x->block_rank++;
        x->block_shape[last] = size;
    }
    x->block_near[last] = near;
    x->block_far[last] = far;
}

static void move_row(const Indexing *x, int64_t near, int64_t far) {
    int last = x->block_rank - 1;
    char *n = x->near + near * (int64_t)x->size, *f = x->far + far * (int64_t)x->size;
    int64_t count = x->block_shape[last], ns = x->block_near[last], fs = x->block_far[last];
    if (x->move == MOVE_TO_NEAR)
        copy_row(n, ns, f, fs, count, x->size);
    else if (x->move == MOVE_TO_FAR)
        copy_row(f, fs, n, ns, count, x->size);
    else
        x->add(f, fs, n, ns, count);
}

static void move_block(const Indexing *x, int64_t near, int64_t far) {
    int64_t at[MAX_RANK] = {0};
    for (;;) {
        move_row(x, near, far);
        int d = x->block_rank - 2;
        for (; d >= 0; d--) {
            near += x->block_near[d];
            far += x->block_far[d];
            if (++at[d] < x->block_shape[d]) break;
            near -= at[d] * x->block_near[d];
            far -= at[d] * x->block_far[d];
            at[d] = 0;
        }
        if (d < 0) return;
    }
}

static void index_part(void *arg, int64_t part, int thread) {
    (void)thread;
    Indexing *x = arg;
    int64_t end = (part + 1) * x->per_part < x->positions ? (part + 1) * x->per_part : x->positions;
    for (int64_t p = part * x->per_part; p < end; p++) {
        int64_t at[MAX_RANK], rest = p, near = 0, far = 0;
        for (int d = x->index_rank - 1; d >= 0; d--) {
            at[d] = rest % x->index_shape[d];
            rest /= x->index_shape[d];
            near += at[d] * x->near_strides[d];
        }
        for (int k = 0; k < x->n_indices; k++) {
            int64_t offset = 0;
            for (int d = 0; d < x->index_rank; d++) offset += at[d] * x->index_strides[k][d];
            int64_t given = index_at(x->indices[k], offset), i = given < 0 && x->wrap ? given + x->sizes[k] : given;
            if (i < 0 || i >= x->sizes[k]) {
                atomic_store(&x->bad_index, given);
                atomic_store(&x->bad_size, x->sizes[k]);
                atomic_store(&x->failed, true);
                return;
            }
            far += i * x->far_strides[k];
        }
        move_block(x, near, far);
    }
}

/* `indices[k]` walks dimension `dims[k]` of far. The index shape starts at dimension `place` of near, the other
 * dimensions of far stand around it in their order. `near` broadcasts to that shape. */
static Code run_indexing(KernelCall *call, Move move, bool wrap, const Tensor *near, const Tensor *far,
                         const Tensor *indices, const int *dims, int n_indices, int place) {
    Indexing x = {.n_indices = n_indices,
                  .near = near->data,
                  .far = far->data,
                  .size = dtype_size(far->dtype),
                  .move = move,
                  .wrap = wrap,
                  .add = add_row(far->dtype),
                  .positions = 1};
    if (move == ADD_TO_FAR && !x.add)
        return fail(call->ctx, CODE_UNSUPPORTED, "no host kernel for %s of %s", op_info(call->node->op)->name,
                    dtype_name(far->dtype));
    for (int k = 0; k < n_indices; k++)
        if (indices[k].rank > x.index_rank) x.index_rank = indices[k].rank;
    for (int d = 0; d < x.index_rank; d++) x.index_shape[d] = 1;
    bool indexed[MAX_RANK] = {false};
    for (int k = 0; k < n_indices; k++) {
        int lead = x.index_rank - indices[k].rank;
        for (int d = 0; d < indices[k].rank; d++) {
            if (indices[k].shape[d] == 1) continue;
            x.index_shape[lead + d] = indices[k].shape[d];
            x.index_strides[k][lead + d] = indices[k].strides[d];
        }
        x.indices[k] = &indices[k];
        x.sizes[k] = far->shape[dims[k]];
        x.far_strides[k] = far->strides[dims[k]];
        indexed[dims[k]] = true;
    }
    /* near's strides over the whole shape: 0 where it broadcasts */
    int rank = far->rank - n_indices + x.index_rank, lead = rank - near->rank;
    int64_t near_strides[2 * MAX_RANK] = {0}, block_count = 1;
    for (int d = 0; d < near->rank; d++)
        if (near->shape[d] != 1) near_strides[lead + d] = near->strides[d];
    for (int d = 0; d < x.index_rank; d++) {
        x.near_strides[d] = near_strides[place + d];
        x.positions *= x.index_shape[d];
    }
    for (int d = 0, n = 0; d < far->rank; d++) {
        if (indexed[d]) continue;
        if (n == place) n += x.index_rank;
        add_block_dim(&x, far->shape[d], near_strides[n++], far->strides[d]);
        block_count *= far->shape[d];
    }
    if (x.block_rank == 0) x.block_shape[x.block_rank++] = 1;
    if (x.positions * block_count == 0) return CODE_OK;
    x.per_part = 4096 / block_count + 1;
    bool parallel =
        move == MOVE_TO_NEAR && x.positions * block_count >= 16384; /* writes to far may meet: the last one wins */
    pool_run(parallel ? call->pool : NULL, (x.positions + x.per_part - 1) / x.per_part, index_part, &x);
    if (!atomic_load(&x.failed)) return CODE_OK;
    return fail(call->ctx, CODE_INDEX, "index %lld is out of bounds for dimension of size %lld",
                (long long)atomic_load(&x.bad_index), (long long)atomic_load(&x.bad_size));
}

Code embedding_run(KernelCall *call) {
    return run_indexing(call, MOVE_TO_NEAR, false, &call->out[0], &call->in[0], &call->in[1], (int[]){0}, 1, 0);
}

/* A 1-element index of rank 0 as rank 1, so that near keeps its dimension. */
static Tensor as_vector(const Tensor *index) {
    Tensor t = *index;
    if (t.rank == 0) {
        t.rank = 1;
        t.shape[0] = t.strides[0] = 1;
    }
    return t;
}

Code index_select_run(KernelCall *call) {
    int dim = (int)node_int(call->node, ATTR_dim);
    Tensor index = as_vector(&call->in[1]);
    return run_indexing(call, MOVE_TO_NEAR, false, &call->out[0], &call->in[0], &index, &dim, 1, dim);
}

/* index_copy and index_add */
Code index_write_run(KernelCall *call) {
    int dim = (int)node_int(call->node, ATTR_dim);
    Tensor index = as_vector(&call->in[1]);
    tensor_copy(call->pool, &call->out[0], &call->in[0]);
    Move move = call->node->op == OP_index_add ? ADD_TO_FAR : MOVE_TO_FAR;
    return run_indexing(call, move, false, &call->in[2], &call->out[0], &index, &dim, 1, dim);
}

/* Dimensions that `mask` names, and where the index shape stands: in their place if they are neighbours, else first. */
static int masked_dims(const Node *node, int *dims, int *place) {
    const Attr *mask = node_attr(node, ATTR_mask);
    int n = 0;
    for (uint32_t d = 0; d < mask->ints.count; d++)
        if (mask->ints.items[d]) dims[n++] = (int)d;
    *place = dims[n - 1] - dims[0] == n - 1 ? dims[0] : 0;
    return n;
}

Code index_run(KernelCall *call) {
    int dims[MAX_RANK], place, n = masked_dims(call->node, dims, &place);
    return run_indexing(call, MOVE_TO_NEAR, true, &call->out[0], &call->in[0], &call->in[1], dims, n, place);
}

Code index_put_run(KernelCall *call) {
    int dims[MAX_RANK], place, n = masked_dims(call->node, dims, &place);
    tensor_copy(call->pool, &call->out[0], &call->in[0]);
    Move move = node_int(call->node, ATTR_accumulate) ? ADD_TO_FAR : MOVE_TO_FAR;
    return run_indexing(call, move, true, &call->in[1], &call->out[0], &call->in[2], dims, n, place);
}
