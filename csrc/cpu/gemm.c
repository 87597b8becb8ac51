/* The f32 product: blocking, loading and sharing out; see gemm.h. */
#include "cpu/gemm.h"

#include <string.h>

enum {
    BLOCK_ROWS = 144,               /* with GEMM_BLOCK_K: 108 KB of A, for the L2 */
    GROUP_PANELS = 8,               /* of B in a part: 96 KB of a block of k, for the L2 too */
    ROW_FLOATS = GEMM_BLOCK_K + 16, /* a row of A's copy: those of a tile fall into different sets of the cache */
    A_FLOATS = 512 << 10,           /* of A copied at once, if that is at least one block */
    B_FLOATS = 256 << 10,           /* of B packed at once, if that is at least one panel */
    LOCAL_FLOATS = 256 << 10,       /* products of a batch with less than this are computed by one thread each */
    OWN_FLOATS = 16,                /* before what a thread has: the row that its copy of A begins with */
    FEW_COLS = 1024,                /* of a part with few rows of A, at most */
};

/* All that follows from the shape alone. */
typedef struct Plan {
    int64_t block_rows;
    int64_t group; /* panels in a part */
    int64_t chunk_rows, chunk_panels;
    int64_t b_floats;                             /* packed B */
    int64_t a_floats, load_floats, c_floats, own; /* a thread's: a copy of A, a block of B, the product; all of it */
    bool local;
} Plan;

static int64_t blocks_of_k(int64_t k) { return (k + GEMM_BLOCK_K - 1) / GEMM_BLOCK_K; }

static Plan make_plan(int64_t batch, int64_t m, int64_t n, int64_t k, bool packed) {
    Plan p;
    int64_t rows = round_up(max_i64(m, 1), GEMM_ROWS), panels = max_i64(gemm_panels(n), 1), depth = max_i64(k, 1);
    int64_t row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, row_floats = blocks_of_k(depth) * ROW_FLOATS;
    p.block_rows = round_up((rows + row_blocks - 1) / row_blocks, GEMM_ROWS);
    p.local = batch > 1 && (rows + panels * GEMM_COLS) * k <= LOCAL_FLOATS;
    p.chunk_rows = min_i64(rows, p.block_rows * max_i64(1, A_FLOATS / (p.block_rows * row_floats)));
    p.chunk_panels = packed ? panels : min_i64(panels, max_i64(1, B_FLOATS / (GEMM_COLS * depth)));
    /* one block of rows: as many as are left for a thread (pool_run_ranges); else some 12 parts where there are panels
     * for it, in twos (gemm_pair) or in fours (`stream`) */
    p.group = GROUP_PANELS;
    if (!p.local && (row_blocks > 1 || m <= GEMM_ROWS))
        p.group = min_i64(round_up((panels + 11) / 12, m <= GEMM_ROWS ? 4 : 2), GROUP_PANELS);
    p.b_floats = packed ? 0 : p.chunk_panels * GEMM_COLS * k;
    p.a_floats = p.chunk_rows * row_floats;
    p.load_floats = packed ? 0 : 2 * GEMM_COLS * GEMM_BLOCK_K;
    p.c_floats = p.block_rows * min_i64(p.group, panels) * GEMM_COLS;
    if (m <= GEMM_ROWS) p.c_floats = max_i64(p.c_floats, 2 * m * FEW_COLS);
    p.own = OWN_FLOATS + p.a_floats + p.load_floats + p.c_floats;
    return p;
}

int64_t gemm_scratch(int64_t batch, int64_t m, int64_t n, int64_t k, bool packed, int threads) {
    Plan p = make_plan(batch, m, n, k, packed);
    return (p.local ? (p.b_floats + p.own) * threads : p.b_floats + p.own * threads) * (int64_t)sizeof(float);
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

/* One product of the batch, a chunk of its rows and panels. */
typedef struct Job {
    const Gemm *g;
    const Plan *p;
    int64_t batch, row, rows, panel, panels;
    const void *a_data, *b_data;
    const float *b;      /* panels; NULL: a thread loads what it reads */
    float *packed, *own; /* memory for panels; the threads' */
    int64_t row_blocks, part_panels, few_cols;
    bool in_place; /* A is read as it lies */
} Job;

static void pack_b(void *arg, int64_t part, int thread) {
    (void)thread;
    Job *job = arg;
    const Gemm *g = job->g;
    float *dst = job->packed + part * GEMM_COLS * g->k;
    GemmOperand b = g->b;
    b.data = job->b_data;
    if (g->fill)
        g->fill(g->user, job->batch, job->panel + part, dst);
    else
        gemm_pack_panel(g->finish->kernels, &b, g->n, g->k, job->panel + part, dst);
}

/* --- what a thread reads ------------------------------------------------------------------------------------------ */
/* Row i of A, step k: at[i * row + k / GEMM_BLOCK_K * block + k % GEMM_BLOCK_K]. */
typedef struct Rows {
    const float *at;
    int64_t row, block;
} Rows;

/* Steps [k, k + depth) of the chunk's rows of A. */
static void load_block(const Job *job, int64_t k, int64_t depth, float *to) {
    const Gemm *g = job->g;
    const GemmOperand a = {job->a_data, g->a.dtype, g->a.row, g->a.col};
    const void *from = gemm_element(&a, job->row * a.row + k * a.col);
    int64_t i = 0;
    if (a.dtype == DTYPE_F32 && a.row == 1)
        for (; i + GEMM_COLS <= job->rows; i += GEMM_COLS)
            g->finish->kernels->turn(depth, GEMM_COLS, (const float *)from + i, a.col, to + i * ROW_FLOATS, ROW_FLOATS,
                                     (GemmOther){0});
    for (; i < job->rows; i++) {
        float *row = to + i * ROW_FLOATS;
        if (a.col == 1 && a.dtype == DTYPE_F32)
            memcpy(row, (const float *)from + i * a.row, (size_t)depth * sizeof *row);
        else if (a.col == 1)
            g->finish->kernels->widen(row, (const uint16_t *)from + i * a.row, a.dtype, depth);
        else
            for (int64_t p = 0; p < depth; p++) row[p] = load_f32(from, a.dtype, i * a.row + p * a.col);
    }
}

/* Rows of A from row `begin` of the chunk on. A copy each thread makes for itself, with its first part: it then reads
 * lines that no other core has. */
static Rows rows_of_a(const Job *job, int64_t begin, float *own) {
    const Gemm *g = job->g;
    if (job->in_place)
        return (Rows){(const float *)job->a_data + (job->row + begin) * g->a.row, g->a.row, GEMM_BLOCK_K};
    int64_t *loaded = (int64_t *)(void *)own;
    float *copy = own + OWN_FLOATS;
    int64_t block = job->rows * ROW_FLOATS;
    if (*loaded != job->row)
        for (int64_t k = 0; k < g->k; k += GEMM_BLOCK_K)
            load_block(job, k, min_i64(GEMM_BLOCK_K, g->k - k), copy + k / GEMM_BLOCK_K * block);
    *loaded = job->row;
    return (Rows){copy + begin * ROW_FLOATS, ROW_FLOATS, block};
}

/* Panels of B from step k on, if they lie in memory as rows of f32; else NULL. */
static const float *find_panels(const Job *job, int64_t panel, int64_t panels, int64_t k) {
    const Gemm *g = job->g;
    if (g->b.dtype != DTYPE_F32 || (panel + panels) * GEMM_COLS > g->n) return NULL;
    return (const float *)job->b_data + k * g->b.row + panel * GEMM_COLS;
}

/* Steps [k, k + depth) of one or two panels of B whose rows lie in memory, [panel][depth][16]. */
static void load_panels(const Job *job, int64_t panel, int64_t panels, int64_t k, int64_t depth, float *to) {
    const Gemm *g = job->g;
    GemmOperand b = {job->b_data, g->b.dtype, g->b.row, 1};
    b.data = gemm_element(&b, k * b.row);
    const void *from = gemm_element(&b, panel * GEMM_COLS);
    int64_t whole = min_i64(panels, g->n / GEMM_COLS - panel), step = depth * GEMM_COLS;
    if (b.dtype == DTYPE_F32) {
        g->finish->kernels->strip(whole, depth, from, b.row, to, step);
    } else {
        for (int64_t p = 0; p < depth; p++) {
            float wide[2 * GEMM_COLS];
            g->finish->kernels->widen(wide, (const uint16_t *)from + p * b.row, b.dtype, whole * GEMM_COLS);
            for (int64_t j = 0; j < whole; j++)
                memcpy(to + j * step + p * GEMM_COLS, wide + j * GEMM_COLS, GEMM_COLS * sizeof *to);
        }
    }
    if (whole < panels) gemm_pack_panel(g->finish->kernels, &b, g->n, depth, panel + whole, to + whole * step);
}

/* What comes into the L2 meanwhile: `rows` runs of memory, `step` bytes apart, of `lines` lines each. */
typedef struct Ahead {
    const char *at;
    int64_t rows, step, lines, line;
} Ahead;

static inline void fetch(Ahead *ahead, int64_t lines) {
    for (; lines > 0 && ahead->rows > 0; lines--) {
        __builtin_prefetch(ahead->at + ahead->line * 64, 0, 2);
        if (++ahead->line < ahead->lines) continue;
        ahead->line = 0;
        ahead->at += ahead->step;
        ahead->rows--;
    }
}

/* Steps from k on of these panels; past the last step: the first ones of what the next part reads. */
static Ahead find_next(const Job *job, int64_t part, int64_t panel, int64_t panels, int64_t k) {
    const Gemm *g = job->g;
    if (k >= g->k) {
        k = 0;
        if ((part + 1) % job->row_blocks == 0) panel += panels;
    }
    int64_t depth = min_i64(GEMM_BLOCK_K, g->k - k), line = 64, made = GEMM_COLS * (int64_t)sizeof(float);
    panels = min_i64(panels, job->panels - panel);
    if (panels <= 0) return (Ahead){0};
    if (job->b) return (Ahead){(const char *)(job->b + (panel * g->k + k) * GEMM_COLS), panels, g->k * made, depth, 0};
    GemmOperand b = {job->b_data, g->b.dtype, g->b.row, 1};
    const char *at = gemm_element(&b, k * b.row + panel * GEMM_COLS);
    int64_t size = (int64_t)dtype_size(b.dtype), bytes = panels * GEMM_COLS * size;
    bool even = ((uintptr_t)at | (uintptr_t)(b.row * size)) % 64 == 0;
    return (Ahead){at, depth, b.row * size, (bytes + line - 1) / line + !even, 0};
}

/* --- the work ----------------------------------------------------------------------------------------------------- */
/* All of the sum for rows of a block and panels of some neighbouring parts; then its rows are finished. */
static void compute(void *arg, int64_t part, int64_t count, int thread) {
    Job *job = arg;
    const Gemm *g = job->g;
    const Plan *p = job->p;
    GemmFinish *finish = g->finish;
    const GemmKernels *kernels = finish->kernels;
    GemmPair *pair = gemm_pair();
    GemmPairCopy *copy_pair = gemm_pair_copy();
    int64_t begin = part % job->row_blocks * p->block_rows, rows = min_i64(p->block_rows, job->rows - begin);
    int64_t panel = part / job->row_blocks * job->part_panels;
    int64_t panels = min_i64(count * job->part_panels, job->panels - panel), width = panels * GEMM_COLS;
    float *own = job->own + thread * p->own, *loaded = own + OWN_FLOATS + p->a_floats, *c = loaded + p->load_floats;

    bool start = finish->bias || g->k == 0;
    int64_t row = job->batch * g->m + job->row + begin, col = (job->panel + panel) * GEMM_COLS;
    Rows a = rows_of_a(job, begin, own);
    for (int64_t i = 0; start && i < rows; i++) gemm_start_row(finish, row + i, col, width, c + i * width);
    int64_t tiles = (rows + GEMM_ROWS - 1) / GEMM_ROWS * panels, calls = pair ? (tiles + 3) / 4 : tiles;
    for (int64_t k = 0; k < g->k; k += GEMM_BLOCK_K) {
        int64_t depth = min_i64(GEMM_BLOCK_K, g->k - k), b_panel = (job->b ? g->k : depth) * GEMM_COLS;
        const float *a_k = a.at + k / GEMM_BLOCK_K * a.block;
        bool add = start || k > 0, last = k + depth == g->k;
        Ahead next = find_next(job, part, panel, panels, k + depth);
        int64_t share = next.rows * next.lines / calls + 1;
        for (int64_t j = 0; j < panels; j += 2) {
            /* the first tile reads panels as they lie, and leaves them beside each other for the others */
            int64_t beside = min_i64(2, panels - j), step = pair ? beside : 1, tall;
            bool full = step == 2 ? gemm_tall(rows) == 2 * GEMM_ROWS : gemm_tile_rows(rows) == GEMM_ROWS;
            const float *lying = job->b || !full ? NULL : find_panels(job, panel + j, beside, k);
            if (!job->b && !lying) load_panels(job, panel + j, beside, k, depth, loaded);
            const float *b = job->b ? job->b + ((panel + j) * g->k + k) * GEMM_COLS : loaded;
            for (int64_t of = 0; of < beside; of += step)
                for (int64_t i = 0; i < rows; i += tall) {
                    const float *a_i = a_k + i * a.row, *b_of = b + of * b_panel;
                    float *to = c + i * width + (j + of) * GEMM_COLS;
                    tall = step == 2 ? gemm_tall(rows - i) : gemm_tile_rows(rows - i);
                    fetch(&next, share);
                    if (last) gemm_touch(finish, row + i, tall, col + (j + of) * GEMM_COLS, step * GEMM_COLS);
                    if (lying && i + of == 0 && step == 2)
                        copy_pair(depth, a_i, a.row, lying, g->b.row, to, width, add, loaded);
                    else if (lying && i + of == 0)
                        kernels->tile_copy(depth, a_i, a.row, lying, g->b.row, to, width, add, loaded, (int)beside);
                    else if (step == 2)
                        pair((int)tall, depth, a_i, a.row, 1, b_of, GEMM_COLS, b_panel, to, width, add);
                    else
                        kernels->tile((int)tall, depth, a_i, a.row, 1, b_of, GEMM_COLS, to, width, add);
                }
        }
    }
    gemm_finish_block(finish, row, rows, col, min_i64(width, g->n - col), c, width);
}

/* Few rows, B in panels: each is read once, a few side by side. */
static void compute_few(void *arg, int64_t part, int thread) {
    const Job *job = arg;
    const Gemm *g = job->g;
    GemmFinish *finish = g->finish;
    int64_t panel = part * job->p->group, panels = min_i64(job->p->group, job->panels - panel);
    int64_t width = panels * GEMM_COLS, row = job->batch * g->m, col = (job->panel + panel) * GEMM_COLS;
    float *c = job->own + (thread + 1) * job->p->own - job->p->c_floats;
    const float *a = job->a_data;
    bool start = finish->bias || g->k == 0;
    for (int64_t i = 0; start && i < g->m; i++) gemm_start_row(finish, row + i, col, width, c + i * width);
    for (int64_t j = 0, next; j < panels; j = next) {
        next = min_i64(j + gemm_streams(g->m), panels);
        for (int64_t k = 0; k < g->k; k += GEMM_BLOCK_K)
            finish->kernels->stream((int)g->m, (int)(next - j), min_i64(GEMM_BLOCK_K, g->k - k), a + k * g->a.col,
                                    g->a.row, g->a.col, job->b + ((panel + j) * g->k + k) * GEMM_COLS, g->k * GEMM_COLS,
                                    c + j * GEMM_COLS, width, start || k > 0);
    }
    gemm_finish_block(finish, row, g->m, col, min_i64(width, g->n - col), c, width);
}

/* Few rows, rows of B as they lie: sums of columns are made in memory, several rows of B at a time. */
static void compute_few_rows(void *arg, int64_t part, int thread) {
    const Job *job = arg;
    const Gemm *g = job->g;
    GemmFinish *finish = g->finish;
    int64_t col = part * job->few_cols, cols = min_i64(job->few_cols, g->n - col), row = job->batch * g->m;
    float *c = job->own + (thread + 1) * job->p->own - job->p->c_floats, *sums = c + g->m * cols;
    const float *a = job->a_data, *b = (const float *)job->b_data + col;
    bool start = finish->bias || g->k == 0;
    for (int64_t i = 0; start && i < g->m; i++) gemm_start_row(finish, row + i, col, cols, c + i * cols);
    for (int64_t k = 0; k < g->k; k += GEMM_BLOCK_K) {
        float *to = start || k > 0 ? sums : c;
        memset(to, 0, (size_t)(g->m * cols) * sizeof *to);
        finish->kernels->update((int)g->m, min_i64(GEMM_BLOCK_K, g->k - k), a + k * g->a.col, g->a.row, g->a.col,
                                b + k * g->b.row, g->b.row, cols, to, cols);
        for (int64_t i = 0; to == sums && i < g->m * cols; i++) c[i] += sums[i];
    }
    for (int64_t j = 0; j < cols; j += GEMM_MAX_SEGMENT)
        gemm_finish_block(finish, row, g->m, col + j, min_i64(GEMM_MAX_SEGMENT, cols - j), c + j, cols);
}

/* A that lies in rows is read so, unless the rows of a tile would fall into the same few sets of the cache. */
static bool reads_rows(const Gemm *g) {
    return g->a.dtype == DTYPE_F32 && g->a.col == 1 && g->a.row * (int64_t)sizeof(float) % 2048 != 0;
}

/* scratch: b_floats, then `own` for each thread of the pool. */
static void run_one(const Gemm *g, const void *plan, int64_t batch, Pool *pool, float *scratch) {
    const Plan *p = plan;
    Job job = {.g = g, .p = p, .batch = batch, .packed = scratch, .own = scratch + p->b_floats};
    job.a_data = gemm_element(&g->a, gemm_offset(g, g->a_batch, batch));
    job.b_data = gemm_element(&g->b, gemm_offset(g, g->b_batch, batch));
    if (gemm_is_small(g, 1)) pool = NULL;
    int64_t panels = gemm_panels(g->n);
    bool few = g->m <= GEMM_ROWS && g->a.dtype == DTYPE_F32, rows_of_b = !g->panels && !g->fill && g->b.col == 1;
    if (few && rows_of_b && g->b.dtype == DTYPE_F32) {
        int parts = 2 * pool_threads(pool); /* at least: long runs of memory */
        job.few_cols = min_i64(FEW_COLS, round_up((g->n + parts - 1) / parts, 4 * GEMM_COLS));
        pool_run(pool, (g->n + job.few_cols - 1) / job.few_cols, compute_few_rows, &job);
        return;
    }
    job.in_place = reads_rows(g);
    int64_t chunk_rows = job.in_place ? g->m : p->chunk_rows, chunk_panels = rows_of_b ? panels : p->chunk_panels;
    for (job.panel = 0; job.panel < panels; job.panel += chunk_panels) {
        job.panels = min_i64(chunk_panels, panels - job.panel);
        job.b = g->panels ? g->panels : rows_of_b ? NULL : scratch;
        if (job.b == scratch) pool_run(pool, job.panels, pack_b, &job);
        if (few && !rows_of_b) {
            pool_run(pool, (job.panels + p->group - 1) / p->group, compute_few, &job);
            continue;
        }
        for (job.row = 0; job.row < g->m; job.row += chunk_rows) {
            job.rows = min_i64(chunk_rows, g->m - job.row);
            job.row_blocks = (job.rows + p->block_rows - 1) / p->block_rows;
            for (int t = 0; t < pool_threads(pool) && (job.panel == 0 || g->m > chunk_rows); t++)
                *(int64_t *)(void *)(job.own + t * p->own) = -1;
            /* with one block of rows: panels in twos, as many at once as a group has */
            job.part_panels = job.row_blocks == 1 ? 2 : p->group;
            int64_t parts = (job.panels + job.part_panels - 1) / job.part_panels * job.row_blocks;
            pool_run_ranges(pool, parts, p->group / job.part_panels, compute, &job);
        }
    }
}

void gemm_run(const Gemm *g, Pool *pool, void *scratch) {
    Plan p = make_plan(g->batch, g->m, g->n, g->k, g->panels != NULL);
    if (g->m == 0 || g->n == 0) return;
    gemm_run_batch(g, run_one, &p, p.local ? p.b_floats + p.own : 0, pool, scratch);
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
