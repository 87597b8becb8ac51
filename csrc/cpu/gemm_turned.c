/* The product turned around, for B whose columns are contiguous: weights as torch keeps them, [n, k]. C^T = B^T * A^T
 * uses B^T's rows as they lie, so weights need no packed copy; A^T, which is small, is packed into panels of 16 of its
 * rows, by each thread those that it needs. A thread makes a block of rows of C^T at a time, which is turned back when
 * it is finished. Rows of B^T that would push each other out of the cache are copied, tile by tile. Sums have
 * the same order as in gemm.c, so the bits are equal. Up to 6 rows of A: dot products, which read B once at full speed.
 * gemm_bf16.c comes here with pairs of numbers for elements. */
#include "cpu/gemm.h"

#include <string.h>

enum {
    PART_ROWS = 24,    /* of B^T: what tiles and transposition by 8 fill */
    MOST_ROWS = 96,    /* of parts that a thread takes at once */
    GROUP_PANELS = 16, /* panels of A^T in a part, and packed at once; with GEMM_BLOCK_K 192 KB for the L2 */
    LEAST_PANELS = 8,  /* but fewer, down to these, where they would have more than A_FLOATS */
    SHARE_PANELS = 4,  /* each thread gets panels of its own where they are so many, and B^T, which all read then, is */
    SHARE_ROWS = 4,    /* not longer than A by this, or A has */
    SHARE_TALL = 256,  /* so many rows, */
    SHARE_FLOATS = 4 << 20, /* and the last cache holds it */
    STEADY_PANELS = 4,      /* up to here B^T is asked for while tiles are made, not between them */
    A_FLOATS = 512 << 10,
    LOCAL_FLOATS = 256 << 10,
    OWN_FLOATS = 16,                /* before what a thread has: the group that its panels are of */
    ROW_FLOATS = GEMM_BLOCK_K + 16, /* of B^T in a copy: those of a tile fall into different sets of the cache */
};

typedef struct Plan {
    int64_t block_rows, group;
    int64_t a_floats, b_floats, c_floats, own; /* a thread's: panels of A^T, a block of B^T, the product; all of it */
    bool local, few;
} Plan;

/* Panels of A^T that a thread packs at once. */
static int64_t group_of(int64_t panels, int64_t m, int64_t n, int64_t k, int threads) {
    int64_t most = min_i64(GROUP_PANELS, max_i64(LEAST_PANELS, A_FLOATS / (GEMM_COLS * max_i64(k, 1))));
    int64_t groups = (panels + most - 1) / most;
    bool shared = (n <= SHARE_ROWS * m || m >= SHARE_TALL) && n * k <= SHARE_FLOATS;
    if (shared) groups = max_i64(groups, min_i64(round_up(groups, threads), panels / SHARE_PANELS));
    return min_i64(panels, round_up((panels + groups - 1) / groups, 2));
}

static Plan make_plan(int64_t batch, int64_t m, int64_t n, int64_t k, int threads) {
    Plan p;
    int64_t panels = max_i64(1, gemm_panels(m));
    p.few = m <= GEMM_ROWS;
    p.local = batch > 1 && (m + n) * k <= LOCAL_FLOATS;
    /* few: some 16 parts, fewer and longer ones where memory streams */
    p.block_rows = p.few ? min_i64(MOST_ROWS, max_i64(PART_ROWS, round_up((n + 15) / 16, GEMM_ROWS))) : MOST_ROWS;
    p.group = group_of(panels, m, n, k, p.local ? 1 : threads);
    p.a_floats = round_up(p.few ? m * k : p.group * GEMM_COLS * k, 16);
    p.b_floats = p.block_rows * ROW_FLOATS;
    /* C^T, and a panel of it turned back */
    p.c_floats = (p.block_rows * p.group + round_up(p.block_rows, 8)) * GEMM_COLS;
    p.own = OWN_FLOATS + p.b_floats + p.c_floats + (p.few ? 0 : p.a_floats);
    return p;
}

int64_t gemm_turned_scratch(int64_t batch, int64_t m, int64_t n, int64_t k, int threads) {
    Plan p = make_plan(batch, m, n, k, threads);
    int64_t shared = p.few ? p.a_floats : 0;
    return (p.local ? (shared + p.own) * threads : shared + p.own * threads) * (int64_t)sizeof(float);
}

/* How a block of C^T becomes rows of the result, where the result is f32: `head` makes all of it in place, unless it is
 * empty, then it is turned back and meets (OP_add, OP_mul; OP_COUNT: it does not) the program's input 1, whose rows
 * have unit stride. turns: false: turned back first, then the whole program row by row. */
typedef struct Ending {
    bool turns;
    Op last;
    EwProgram head;
} Ending;

/* One product of the batch. */
typedef struct Job {
    const Gemm *g;
    const Plan *p;
    const Ending *ending; /* NULL: few rows */
    int64_t batch;
    GemmOperand a;     /* A^T, k x m */
    const void *b;     /* rows of B^T, g->b.col apart */
    float *x, *own;    /* few rows: A; the threads' memory */
    int64_t row_parts; /* of a group of panels */
} Job;

/* Panels of a group, [block of k][panel][k][16]. Each thread makes them for itself, with its first part of the group:
 * lines that another core has read or written are slow to write, and slow to get. */
static const float *panels_of_a(const Job *job, int64_t panel, int64_t panels, float *own) {
    const Gemm *g = job->g;
    int64_t *made = (int64_t *)(void *)own;
    float *packed = own + OWN_FLOATS + job->p->b_floats + job->p->c_floats;
    if (*made == panel) return packed;
    for (int64_t k = 0; k < g->k; k += GEMM_BLOCK_K) {
        int64_t depth = min_i64(GEMM_BLOCK_K, g->k - k);
        GemmOperand a = job->a;
        a.data = gemm_element(&a, k * a.row);
        for (int64_t j = 0; j < panels; j++)
            gemm_pack_panel(g->finish->kernels, &a, g->m, depth, panel + j,
                            packed + (k * panels + j * depth) * GEMM_COLS);
    }
    *made = panel;
    return packed;
}

/* B^T is read as it lies. */
static bool lies(const Gemm *g) { return g->b.dtype == DTYPE_F32 && !g->load; }

/* Its rows would fall into the same few sets of the cache. */
static bool collides(const Gemm *g) { return lies(g) && g->b.col * (int64_t)sizeof(float) % 2048 == 0; }

/* --- the end of a block ------------------------------------------------------------------------------------------- */
static Ending find_ending(const GemmFinish *f) {
    Ending e = {.last = OP_COUNT};
    const GemmRows *in = &f->inputs[1];
    if (f->direct) {
        e.turns = true;
        return e;
    }
    e.turns = ew_split(&f->program, &e.head, &e.last);
    if (e.last != OP_COUNT) e.turns = e.turns && in->col == 1 && in->rank <= 1;
    return e;
}

/* Turns the columns of one panel back into rows of the result; `turned`: memory for a panel. */
static void finish_panel(const Job *job, int64_t row, int64_t rows, int64_t panel, const float *c, int64_t width,
                         float *turned) {
    const Gemm *g = job->g;
    GemmFinish *finish = g->finish;
    const Ending *ending = job->ending;
    const GemmRows *in = &finish->inputs[1];
    int64_t first = panel * GEMM_COLS, count = min_i64(GEMM_COLS, g->m - first), stride = round_up(rows, 8);
    int64_t to = job->batch * g->m + first, step = in->rank == 1 ? in->strides[0] : 0;
    GemmOther other = {NULL, step, ending->last == OP_mul};
    if (ending->turns) {
        float *out = (float *)(void *)finish->out + to * finish->n + row;
        if (ending->last != OP_COUNT) other.data = (const float *)(const void *)in->data + to * step + row;
        finish->kernels->turn(rows, count, c, width, out, finish->n, other);
        return;
    }
    finish->kernels->turn(rows, count, c, width, turned, stride, other);
    gemm_finish_block(finish, to, count, row, rows, turned, stride);
}

/* All panels of a block of C^T, which is overwritten. */
static void finish_panels(const Job *job, int64_t row, int64_t rows, int64_t panel, int64_t panels, float *c,
                          float *turned) {
    const Ending *ending = job->ending;
    int64_t width = panels * GEMM_COLS;
    if (ending->turns && ending->head.n_micro) { /* in long runs */
        EwFault fault = ew_row(&ending->head, c, &(EwSrc){c, 1}, rows * width);
        if (fault != EW_OK) atomic_store(&job->g->finish->fault, (int)fault);
    }
    for (int64_t j = 0; j < panels; j++) finish_panel(job, row, rows, panel + j, c + j * GEMM_COLS, width, turned);
}

/* --- the work ----------------------------------------------------------------------------------------------------- */
/* Columns [k, k + depth) of rows of B^T as f32: in place, or made in `wide`. */
static const float *load_block(const Job *job, int64_t row, int64_t rows, int64_t k, int64_t depth, float *wide,
                               int64_t *stride) {
    const GemmOperand *b = &job->g->b;
    if (lies(job->g)) {
        *stride = b->col;
        return (const float *)job->b + row * b->col + k;
    }
    *stride = depth;
    if (job->g->load)
        job->g->load(job->g->user, row, rows, k, depth, wide);
    else
        for (int64_t i = 0; i < rows; i++)
            job->g->finish->kernels->widen(wide + i * depth, (const uint16_t *)job->b + (row + i) * b->col + k,
                                           b->dtype, depth);
    return wide;
}

typedef struct Rows {
    const float *first;
    int64_t count, depth;
} Rows;

/* What comes after tile i .. i + tall - 1 of a block of rows that lie at `b`, columns from k on: the next tile, or the
 * first one's next columns, or the first one of the next part. */
static Rows next_rows(const Job *job, const float *b, int64_t row, int64_t rows, int64_t i, int64_t tall, int64_t k,
                      int64_t depth) {
    const Gemm *g = job->g;
    if (i + tall < rows) return (Rows){b + (i + tall) * g->b.col, min_i64(tall, rows - i - tall), depth};
    if (k + depth < g->k) return (Rows){b + depth, min_i64(tall, rows), min_i64(GEMM_BLOCK_K, g->k - k - depth)};
    int64_t left = min_i64(tall, g->n - row - rows);
    return (Rows){b - k + rows * g->b.col, max_i64(left, 0), min_i64(GEMM_BLOCK_K, g->k)};
}

/* Part `part` of `parts` of them. */
static GemmAhead share_of(const Rows *next, int64_t b_row, int64_t part, int64_t parts) {
    int64_t first = next->count * part / parts, end = next->count * (part + 1) / parts;
    return (GemmAhead){next->first + first * b_row, b_row, end - first};
}

/* So many columns of rows of B^T come into the L2. */
static void prefetch_rows(const GemmAhead *ahead, int64_t depth) {
    for (int64_t i = 0; i < ahead->rows; i++)
        for (int64_t k = 0; k < depth; k += 16) __builtin_prefetch(ahead->at + i * ahead->row + k, 0, 2);
}

/* Rows of B^T against a group of panels. */
static void compute_block(const Job *job, int64_t row, int64_t rows, int64_t panel, int thread) {
    const Gemm *g = job->g;
    const Plan *p = job->p;
    const GemmKernels *kernels = g->finish->kernels;
    const GemmBf16 *bf16 = g->pairs ? gemm_bf16() : NULL;
    GemmPair *pair = bf16 ? bf16->pair : gemm_pair();
    GemmPairRows *pair_rows = bf16 ? bf16->rows : gemm_pair_rows();
    int64_t panels = min_i64(p->group, gemm_panels(g->m) - panel), width = panels * GEMM_COLS, b_row;
    float *own = job->own + thread * p->own, *c = own + OWN_FLOATS, *wide = c + p->c_floats;
    const float *packed = panels_of_a(job, panel, panels, own);
    int64_t together = pair ? 2 : 1; /* panels of a tile */
    bool start = g->finish->bias || g->k == 0, lying = lies(g), apart = collides(g);
    for (int64_t i = 0; start && i < rows; i++) kernels->fill(c + i * width, gemm_bias(g->finish, row + i), width);
    for (int64_t k = 0; k < g->k; k += GEMM_BLOCK_K) {
        int64_t depth = min_i64(GEMM_BLOCK_K, g->k - k);
        const float *a = packed + k * panels * GEMM_COLS, *b = load_block(job, row, rows, k, depth, wide, &b_row);
        for (int64_t i = 0, tall; i < rows; i += tall) {
            tall = pair ? gemm_tall(rows - i) : gemm_tile_rows(rows - i);
            const float *from = b + i * b_row;
            int64_t from_row = b_row;
            bool whole = pair_rows && tall == 2 * GEMM_ROWS && panels > 1;
            Rows next = {0};
            if (lying) next = next_rows(job, b, row, rows, i, tall, k, depth);
            if (apart && !whole) {
                for (int64_t t = 0; t < tall; t++)
                    memcpy(wide + t * ROW_FLOATS, from + t * b_row, (size_t)depth * sizeof *wide);
                from = wide;
                from_row = ROW_FLOATS;
            }
            for (int64_t j = 0, step; j < panels; j += step) {
                const float *a_j = a + j * depth * GEMM_COLS;
                float *to = c + i * width + j * GEMM_COLS;
                int64_t of = (panel + j) * GEMM_COLS;
                bool add = start || k > 0;
                step = min_i64(together, panels - j);
                if (k + depth == g->k)
                    gemm_touch(g->finish, job->batch * g->m + of, min_i64(step * GEMM_COLS, g->m - of), row + i, tall);
                bool steady = whole && step == 2 && panels <= STEADY_PANELS, keeps = whole && apart && j == 0;
                GemmAhead ahead = share_of(&next, g->b.col, j / together, (panels + together - 1) / together);
                if (!steady) {
                    prefetch_rows(&ahead, next.depth);
                    ahead.rows = 0;
                }
                if (steady || keeps) {
                    pair_rows(depth, from, from_row, a_j, depth * GEMM_COLS, to, width, add, keeps ? wide : NULL,
                              ROW_FLOATS, ahead);
                    if (keeps) from = wide, from_row = ROW_FLOATS;
                    continue;
                }
                if (step == 2)
                    pair((int)tall, depth, from, from_row, 1, a_j, GEMM_COLS, depth * GEMM_COLS, to, width, add);
                else
                    for (int64_t t = 0; t < tall; t += GEMM_ROWS) /* a pair's last panel may be alone */
                        (bf16 ? bf16->tile : kernels->tile)((int)min_i64(GEMM_ROWS, tall - t), depth,
                                                            from + t * from_row, from_row, 1, a_j, GEMM_COLS,
                                                            to + t * width, width, add);
            }
        }
    }
    finish_panels(job, row, rows, panel, panels, c, c + p->block_rows * p->group * GEMM_COLS);
}

/* Parts are PART_ROWS rows of a group of panels, group after group. */
static void compute(void *arg, int64_t first, int64_t count, int thread) {
    const Job *job = arg;
    for (int64_t end = first + count, next; first < end; first = next) {
        int64_t group = first / job->row_parts, row = first % job->row_parts * PART_ROWS;
        next = min_i64(end, (group + 1) * job->row_parts);
        int64_t rows = min_i64((next - first) * PART_ROWS, job->g->n - row);
        compute_block(job, row, rows, group * job->p->group, thread);
    }
}

static void compute_few(void *arg, int64_t part, int thread) {
    const Job *job = arg;
    const Gemm *g = job->g;
    const Plan *p = job->p;
    int64_t row = part * p->block_rows, rows = min_i64(p->block_rows, g->n - row);
    float *c = job->own + thread * p->own + OWN_FLOATS, *wide = c + p->c_floats;
    for (int64_t i = 0; i < g->m; i++) gemm_start_row(g->finish, job->batch * g->m + i, row, rows, c + i * rows);
    bool half = !g->load && g->b.dtype != DTYPE_F32;
    if (half)
        gemm_dots_half()(g->b.dtype, (int)g->m, job->x, g->k, rows, (const uint16_t *)job->b + row * g->b.col, g->b.col,
                         g->k, c, rows);
    for (int64_t k = half ? g->k : 0, step = g->load ? GEMM_BLOCK_K : g->k; k < g->k; k += step) {
        int64_t depth = min_i64(step, g->k - k), b_row;
        const float *b = load_block(job, row, rows, k, depth, wide, &b_row);
        (g->pairs ? gemm_bf16()->dots : g->finish->kernels->dots)((int)g->m, job->x + k, g->k, rows, b, b_row, depth, c,
                                                                  rows);
    }
    for (int64_t i = 0; i < g->m; i++) gemm_finish_row(g->finish, job->batch * g->m + i, row, rows, c + i * rows);
}

/* Row `row` of A, which is column `row` of A^T, as f32. */
static void read_row(const GemmOperand *a, int64_t row, int64_t k, const GemmKernels *kernels, float *to) {
    const void *from = gemm_element(a, row * a->col);
    if (a->row != 1) {
        for (int64_t p = 0; p < k; p++) to[p] = load_f32(from, a->dtype, p * a->row);
    } else if (a->dtype != DTYPE_F32) {
        kernels->widen(to, from, a->dtype, k);
    } else if (k > 0) {
        memcpy(to, from, (size_t)k * sizeof *to);
    }
}

static Job make_job(const Gemm *g, const Plan *p, int64_t batch, float *scratch) {
    Job job = {.g = g, .p = p, .batch = batch, .x = scratch, .own = scratch + (p->few ? p->a_floats : 0)};
    job.a = (GemmOperand){gemm_element(&g->a, gemm_offset(g, g->a_batch, batch)), g->a.dtype, g->a.col, g->a.row};
    job.b = gemm_element(&g->b, gemm_offset(g, g->b_batch, batch));
    int64_t part_rows = p->few ? p->block_rows : PART_ROWS;
    job.row_parts = (g->n + part_rows - 1) / part_rows;
    for (int64_t i = 0; p->few && i < g->m; i++) read_row(&job.a, i, g->k, g->finish->kernels, scratch + i * g->k);
    return job;
}

/* What all products of a batch have in common. */
typedef struct Common {
    Plan plan;
    Ending ending;
} Common;

static void run_one(const Gemm *g, const void *arg, int64_t batch, Pool *pool, float *scratch) {
    const Common *common = arg;
    const Plan *p = &common->plan;
    if (gemm_is_small(g, 1)) pool = NULL;
    Job job = make_job(g, p, batch, scratch);
    if (p->few) {
        pool_run(pool, job.row_parts, compute_few, &job);
        return;
    }
    job.ending = &common->ending;
    for (int t = 0; t < pool_threads(pool); t++) *(int64_t *)(void *)(job.own + t * p->own) = -1;
    int64_t groups = (gemm_panels(g->m) + p->group - 1) / p->group;
    pool_run_ranges(pool, groups * job.row_parts, MOST_ROWS / PART_ROWS, compute, &job);
}

void gemm_turned_run(const Gemm *g, Pool *pool, void *scratch) {
    Common common;
    common.plan = make_plan(g->batch, g->m, g->n, g->k, pool_threads(pool));
    const Plan *p = &common.plan;
    if (!p->few) common.ending = find_ending(g->finish);
    gemm_run_batch(g, run_one, &common, p->local ? p->own + (p->few ? p->a_floats : 0) : 0, pool, scratch);
}

/* --- few rows, beside other products ------------------------------------------------------------------------------ */
struct GemmFew {
    Plan plan;
    Job job;
};

int64_t gemm_turned_few_bytes(void) { return round_up((int64_t)sizeof(GemmFew), 64); }

int64_t gemm_turned_columns(int64_t m, int64_t n) {
    return m >= 1 && m <= GEMM_ROWS && n >= 1 ? make_plan(1, m, n, 1, 1).block_rows : 0;
}

void gemm_turned_split(const Gemm *g, GemmFew *few, void *scratch, KernelParts *parts) {
    few->plan = make_plan(1, g->m, g->n, g->k, 1);
    few->job = make_job(g, &few->plan, 0, scratch);
    *parts = (KernelParts){.count = few->job.row_parts,
                           .work = g->m * g->n * g->k,
                           .body = compute_few,
                           .arg = &few->job,
                           .fault = &g->finish->fault};
}
