/* The f32 product: blocking, packing and sharing out; see gemm.h. */
#include "cpu/gemm.h"

#include <string.h>

enum {
    BLOCK_ROWS = 144, /* with GEMM_BLOCK_K: 108 KB of A, for the L2 */
    GROUP_PANELS = GEMM_MAX_SEGMENT / GEMM_COLS,
    A_FLOATS = 512 << 10,      /* of A packed at once, if that is at least one block */
    B_FLOATS = 256 << 10,      /* of B, if that is at least one panel */
    LOCAL_FLOATS = 256 << 10,  /* products of a batch with less than this are computed by one thread each */
    PACK_ROWS = 4 * GEMM_ROWS, /* of A in one part of work */
};

/* All that follows from the shape alone. */
typedef struct Plan {
    int64_t block_rows;
    int64_t group; /* panels in a part */
    int64_t chunk_rows, chunk_panels;
    int64_t a_floats, b_floats, c_floats;
    bool local;
} Plan;

static Plan make_plan(int64_t batch, int64_t m, int64_t n, int64_t k, bool packed) {
    Plan p;
    int64_t rows = round_up(max_i64(m, 1), GEMM_ROWS), panels = max_i64(gemm_panels(n), 1), depth = max_i64(k, 1);
    int64_t row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    p.block_rows = round_up((rows + row_blocks - 1) / row_blocks, GEMM_ROWS);
    p.local = batch > 1 && (rows + panels * GEMM_COLS) * k <= LOCAL_FLOATS;
    p.chunk_rows = min_i64(rows, p.block_rows * max_i64(1, A_FLOATS / (p.block_rows * depth)));
    p.chunk_panels = packed ? panels : min_i64(panels, max_i64(1, B_FLOATS / (GEMM_COLS * depth)));
    /* some 24 parts where there are panels for it, an even number of panels in each (gemm_pair), 4 at least where there
     * are 12 parts then, but a part's buffer is no wider than 16 panels */
    p.group = min_i64(round_up((p.chunk_panels + 23) / 24, p.chunk_panels < 48 ? 2 : 4), GROUP_PANELS);
    if (p.local) p.group = GROUP_PANELS;
    p.a_floats = round_up(p.chunk_rows * k, 16);
    p.b_floats = packed ? 0 : p.chunk_panels * GEMM_COLS * k;
    p.c_floats = p.block_rows * min_i64(p.group, panels) * GEMM_COLS;
    return p;
}

int64_t gemm_scratch(int64_t batch, int64_t m, int64_t n, int64_t k, bool packed, int threads) {
    Plan p = make_plan(batch, m, n, k, packed);
    int64_t once = p.a_floats + p.b_floats;
    return (p.local ? (once + p.c_floats) * threads : once + p.c_floats * threads) * (int64_t)sizeof(float);
}

void gemm_add_batch(Gemm *g, int64_t size, int64_t a_stride, int64_t b_stride) {
    if (size == 1) return;
    int last = g->batch_rank - 1;
    if (last >= 0 && g->a_batch[last] == a_stride * size && g->b_batch[last] == b_stride * size)
        g->batch_shape[last] *= size;
    else
        g->batch_shape[last = g->batch_rank++] = size;
    g->a_batch[last] = a_stride;
    g->b_batch[last] = b_stride;
    g->batch *= size;
}

void gemm_fold_batch(Gemm *g) {
    while (g->batch_rank > 0 && g->batch > 0) {
        int last = g->batch_rank - 1;
        if (g->b_batch[last] != 0 || (g->m != 1 && g->a_batch[last] != g->m * g->a.row)) return;
        if (g->m == 1) g->a.row = g->a_batch[last];
        g->m *= g->batch_shape[last];
        g->batch /= g->batch_shape[last];
        g->batch_rank--;
    }
}

int64_t gemm_offset(const Gemm *g, const int64_t *strides, int64_t batch) {
    int64_t offset = 0;
    for (int d = g->batch_rank - 1; d >= 0; d--) {
        offset += batch % g->batch_shape[d] * strides[d];
        batch /= g->batch_shape[d];
    }
    return offset;
}

/* Rows of the next tile. Tiles of one or two rows would wait for their own sums: the last ones are made of equal height
 * instead. A pair takes its rows in sixes. */
static inline int64_t tile_rows(int64_t left, bool paired) {
    return left <= GEMM_ROWS ? left : !paired && left < GEMM_ROWS + 4 ? (left + 1) / 2 : GEMM_ROWS;
}

/* One product of the batch, a chunk of its rows and panels. */
typedef struct Job {
    const Gemm *g;
    const Plan *p;
    int64_t batch, row, rows, panel, panels;
    const void *a_data, *b_data;
    /* packed A, [block of k][tile][k][rows of the tile] (NULL: used as it lies), packed B, the threads' buffers */
    float *a, *b, *c;
    int64_t row_blocks;
    bool few; /* one tile of rows */
} Job;

static void pack_b(void *arg, int64_t part, int thread) {
    (void)thread;
    Job *job = arg;
    const Gemm *g = job->g;
    float *dst = job->b + part * GEMM_COLS * g->k;
    GemmOperand b = g->b;
    b.data = job->b_data;
    if (g->fill)
        g->fill(g->user, job->batch, job->panel + part, dst);
    else
        gemm_pack_panel(g->finish->kernels, &b, g->n, g->k, job->panel + part, dst);
}

/* The last part of the packing of A takes what is left too, so that none begins within a tile. */
static int64_t pack_parts(int64_t rows) { return max_i64(1, rows / PACK_ROWS); }

static void pack_a(void *arg, int64_t part, int thread) {
    (void)thread;
    Job *job = arg;
    const Gemm *g = job->g;
    int64_t begin = part * PACK_ROWS, end = part + 1 < pack_parts(job->rows) ? begin + PACK_ROWS : job->rows;
    bool paired = gemm_pair() != NULL;
    for (int64_t i = begin, rows; i < end; i += rows) {
        int64_t block = job->p->block_rows, block_end = min_i64(job->rows, (i / block + 1) * block);
        rows = tile_rows(block_end - i, paired);
        int64_t at = (job->row + i) * g->a.row;
        for (int64_t k = 0; k < g->k; k += GEMM_BLOCK_K) {
            int64_t depth = min_i64(GEMM_BLOCK_K, g->k - k);
            float *dst = job->a + k * job->rows + i * depth;
            if (g->a.dtype == DTYPE_F32 && g->a.col == 1) {
                g->finish->kernels->interleave((int)rows, (int)rows, depth, (const float *)job->a_data + at + k,
                                               g->a.row, dst);
                continue;
            }
            for (int64_t p = 0; p < depth; p++)
                for (int64_t r = 0; r < rows; r++)
                    dst[p * rows + r] = load_f32(job->a_data, g->a.dtype, at + r * g->a.row + (k + p) * g->a.col);
        }
    }
}

/* Steps [k, k + depth) of all rows against two panels, while those that are next come into the L2. */
static void tiles_of_pair(GemmPair *pair, const Gemm *g, const float *a, int64_t rows, int64_t k, int64_t depth,
                          const float *b, const float *next, float *c, int64_t c_row, bool add, int64_t row,
                          int64_t col) {
    int64_t panel = g->k * GEMM_COLS, share = (depth * 2 * GEMM_ROWS + rows - 1) / rows, line = 0;
    for (int64_t i = 0, tall; i < rows; i += tall) {
        tall = gemm_tall(rows - i);
        int64_t upper = min_i64(GEMM_ROWS, tall), lower = tall - upper;
        for (int64_t end = min_i64(line + share, depth); line < end; line++) {
            __builtin_prefetch(next + line * GEMM_COLS, 0, 2);
            __builtin_prefetch(next + panel + line * GEMM_COLS, 0, 2);
        }
        if (k + depth == g->k) gemm_touch(g->finish, row + i, tall, col, 2 * GEMM_COLS);
        pair((int)tall, depth, a + i * depth, 1, upper, a + (i + upper) * depth, lower, b, GEMM_COLS, panel,
             c + i * c_row, c_row, add);
    }
}

/* The same for one panel and tiles of 6 rows. `a`: these steps, packed or in rows of g->a.row. */
static void tiles_of_panel(const Job *job, const float *a, int64_t rows, int64_t k, int64_t depth, const float *b,
                           const float *next, float *c, int64_t c_row, bool add, int64_t row, int64_t col) {
    const Gemm *g = job->g;
    const GemmKernels *kernels = g->finish->kernels;
    int64_t share = (depth * GEMM_ROWS + rows - 1) / rows, line = 0;
    for (int64_t i = 0, tall; i < rows; i += tall) {
        tall = tile_rows(rows - i, job->a && gemm_pair()); /* as it is packed */
        for (int64_t end = min_i64(line + share, depth); line < end; line++)
            __builtin_prefetch(next + line * GEMM_COLS, 0, 2);
        if (k + depth == g->k) gemm_touch(g->finish, row + i, tall, col, GEMM_COLS);
        if (job->a)
            kernels->tile_packed((int)tall, depth, a + i * depth, b, c + i * c_row, c_row, add);
        else
            kernels->tile((int)tall, depth, a + i * g->a.row, g->a.row, 1, b, GEMM_COLS, c + i * c_row, c_row, add);
    }
}

/* All of the sum for rows of a block and panels of a group; then its rows are finished. */
static void compute(void *arg, int64_t part, int thread) {
    Job *job = arg;
    const Gemm *g = job->g;
    const Plan *p = job->p;
    GemmFinish *finish = g->finish;
    GemmPair *pair = job->a ? gemm_pair() : NULL;
    int64_t begin = part % job->row_blocks * p->block_rows, rows = min_i64(p->block_rows, job->rows - begin);
    int64_t panel = part / job->row_blocks * p->group, panels = min_i64(p->group, job->panels - panel);
    const float *b = (g->panels ? g->panels + job->panel * GEMM_COLS * g->k : job->b) + panel * GEMM_COLS * g->k;
    int64_t width = panels * GEMM_COLS, step = g->a.col;

    bool start = finish->bias || g->k == 0;
    int64_t row = job->batch * g->m + job->row + begin, col = (job->panel + panel) * GEMM_COLS;
    float *c = job->c + thread * p->c_floats;
    const float *in_place = job->a ? NULL : (const float *)job->a_data + (job->row + begin) * g->a.row;
    for (int64_t i = 0; start && i < rows; i++) gemm_start_row(finish, row + i, col, width, c + i * width);
    if (job->few) { /* each panel is read once, a few side by side */
        for (int64_t j = 0, next; j < panels; j = next) {
            next = min_i64(j + gemm_streams(rows), panels);
            for (int64_t k = 0; k < g->k; k += GEMM_BLOCK_K)
                finish->kernels->stream((int)rows, (int)(next - j), min_i64(GEMM_BLOCK_K, g->k - k),
                                        in_place + k * step, g->a.row, step, b + (j * g->k + k) * GEMM_COLS,
                                        g->k * GEMM_COLS, c + j * GEMM_COLS, width, start || k > 0);
        }
    } else {
        for (int64_t k = 0; k < g->k; k += GEMM_BLOCK_K) {
            int64_t depth = min_i64(GEMM_BLOCK_K, g->k - k);
            const float *b_k = b + k * GEMM_COLS;
            const float *a = job->a ? job->a + k * job->rows + begin * depth : in_place + k;
            /* after the last panel: the first one's next steps, or those of the next part */
            const float *wrap = k + depth < g->k ? b_k + depth * GEMM_COLS : b + panels * GEMM_COLS * g->k;
            int64_t j = 0;
            for (; pair && j + 1 < panels; j += 2) {
                const float *next = j + 3 < panels ? b_k + (j + 2) * GEMM_COLS * g->k : b_k + depth * GEMM_COLS;
                tiles_of_pair(pair, g, a, rows, k, depth, b_k + j * GEMM_COLS * g->k, next, c + j * GEMM_COLS, width,
                              start || k > 0, row, col + j * GEMM_COLS);
            }
            for (; j < panels; j++)
                tiles_of_panel(job, a, rows, k, depth, b_k + j * GEMM_COLS * g->k,
                               j + 1 < panels ? b_k + (j + 1) * GEMM_COLS * g->k : wrap, c + j * GEMM_COLS, width,
                               start || k > 0, row, col + j * GEMM_COLS);
        }
    }
    gemm_finish_block(finish, row, rows, col, min_i64(width, g->n - col), c, width);
}

/* A that lies in rows can stay so, unless the rows of a block would fall into the same few sets of the cache. */
static bool reads_rows(const Gemm *g) {
    return g->a.dtype == DTYPE_F32 && g->a.col == 1 && !gemm_pair() && g->a.row * (int64_t)sizeof(float) % 2048 != 0;
}

/* scratch: a_floats, b_floats, c_floats for each thread of the pool. */
static void run_one(const Gemm *g, const void *plan, int64_t batch, Pool *pool, float *scratch) {
    const Plan *p = plan;
    Job job = {.g = g, .p = p, .batch = batch, .b = scratch + p->a_floats, .c = scratch + p->a_floats + p->b_floats};
    job.a_data = gemm_element(&g->a, gemm_offset(g, g->a_batch, batch));
    job.b_data = gemm_element(&g->b, gemm_offset(g, g->b_batch, batch));
    if (gemm_is_small(g, 1)) pool = NULL;
    int64_t panels = gemm_panels(g->n);
    bool one_chunk = g->m <= p->chunk_rows;
    job.few = g->m <= GEMM_ROWS && g->a.dtype == DTYPE_F32;
    bool in_place = job.few || (g->m >= GEMM_TALL_ROWS && reads_rows(g));
    for (job.panel = 0; job.panel < panels; job.panel += p->chunk_panels) {
        job.panels = min_i64(p->chunk_panels, panels - job.panel);
        if (!g->panels) pool_run(pool, job.panels, pack_b, &job);
        for (job.row = 0; job.row < g->m; job.row += p->chunk_rows) {
            job.rows = min_i64(p->chunk_rows, g->m - job.row);
            job.row_blocks = (job.rows + p->block_rows - 1) / p->block_rows;
            if (!in_place && (job.panel == 0 || !one_chunk)) {
                job.a = scratch;
                pool_run(pool, pack_parts(job.rows), pack_a, &job);
            }
            pool_run(pool, (job.panels + p->group - 1) / p->group * job.row_blocks, compute, &job);
        }
    }
}

void gemm_run(const Gemm *g, Pool *pool, void *scratch) {
    Plan p = make_plan(g->batch, g->m, g->n, g->k, g->panels != NULL);
    if (g->m == 0 || g->n == 0) return;
    gemm_run_batch(g, run_one, &p, p.local ? p.a_floats + p.b_floats + p.c_floats : 0, pool, scratch);
}

/* --- batches, of both ways ---------------------------------------------------------------------------------------- */
typedef struct Batch {
    const Gemm *g;
    GemmOne *one;
    const void *plan;
    int64_t floats;
    float *scratch;
} Batch;

static void run_local(void *arg, int64_t part, int thread) {
    const Batch *b = arg;
    b->one(b->g, b->plan, part, NULL, b->scratch + thread * b->floats);
}

void gemm_run_batch(const Gemm *g, GemmOne *one, const void *plan, int64_t local_floats, Pool *pool, float *scratch) {
    if (local_floats > 0) {
        Batch batch = {g, one, plan, local_floats, scratch};
        pool_run(gemm_is_small(g, g->batch) ? NULL : pool, g->batch, run_local, &batch);
        return;
    }
    for (int64_t i = 0; i < g->batch; i++) one(g, plan, i, pool, scratch);
}
