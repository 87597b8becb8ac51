/* Where in the arena each block lies: linear scan first, then better plans while they may exist and are cheap to try.
 *
 * 1. Linear scan over the schedule: each block takes the free gap that fits best; memory of blocks that end is given
 *    back. Near linear, always done.
 * 2. If that misses the bound, greedy plans: blocks are placed one by one in some order, each into the best gap between
 *    the blocks placed before that are live together with it. Orders: by how full memory is while the block lives, by
 *    size, by length of life; each once with the topmost block against the others and once hanging from the bound.
 * 3. Repairs of the best of these orders: a block that lies above the bound is placed before one of those that were in
 *    its way; the change is kept if no more bytes lie above the bound. (The dice are seeded alike: plans do not
 * differ.)
 *
 * The smallest plan is kept. The search ends at the bound (for repairs and many blocks: near it), or when its work is
 * spent; the work allowed grows with the number of blocks, not faster. */
#include "alloc/offsets.h"

#include <stdlib.h>
#include <string.h>

enum {
    WORK = 200000, /* steps of some 20 ns */
    WORK_PER_BLOCK = 600,
    REPAIRS = 200,
    GOOD_ENOUGH = 100, /* one part in so many above the bound: for repairs, and for more than MANY blocks */
    MANY = 2000,
};

/* --- linear scan -------------------------------------------------------------------------------------------------- */
typedef struct Gap {
    int64_t offset, size;
} Gap;
typedef struct Gaps {
    Gap *items; /* sorted by offset, no two touch */
    uint32_t n;
    int64_t top; /* behind the last byte ever used */
} Gaps;

static int64_t take(Gaps *g, int64_t size) {
    uint32_t best = UINT32_MAX;
    for (uint32_t k = 0; k < g->n; k++) {
        if (g->items[k].size >= size && (best == UINT32_MAX || g->items[k].size < g->items[best].size)) best = k;
    }
    if (best == UINT32_MAX) { /* at the top, over a gap that reaches it */
        bool touches = g->n > 0 && g->items[g->n - 1].offset + g->items[g->n - 1].size == g->top;
        int64_t offset = touches ? g->items[--g->n].offset : g->top;
        g->top = offset + size;
        return offset;
    }
    Gap *gap = &g->items[best];
    int64_t offset = gap->offset;
    gap->offset += size;
    gap->size -= size;
    if (gap->size == 0) memmove(gap, gap + 1, (--g->n - best) * sizeof *gap);
    return offset;
}

static void give(Gaps *g, int64_t offset, int64_t size) {
    uint32_t low = 0, high = g->n; /* the first gap behind */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (g->items[middle].offset < offset)
            low = middle + 1;
        else
            high = middle;
    }
    Gap *before = low > 0 ? &g->items[low - 1] : NULL, *after = low < g->n ? &g->items[low] : NULL;
    bool joins_before = before && before->offset + before->size == offset;
    bool joins_after = after && offset + size == after->offset;
    if (joins_before)
        before->size += size + (joins_after ? after->size : 0);
    else if (joins_after)
        *after = (Gap){offset, size + after->size};
    if (joins_before && joins_after) memmove(after, after + 1, (--g->n - low) * sizeof *after);
    if (joins_before || joins_after) return;
    memmove(g->items + low + 1, g->items + low, (g->n - low) * sizeof *g->items);
    g->items[low] = (Gap){offset, size};
    g->n++;
}

static Code linear_scan(Context *ctx, Arena *scratch, Block *blocks, uint32_t n, uint32_t length, int64_t *size) {
    Gaps gaps = {0};
    uint32_t *ends, *next, at = 0; /* blocks that end at a position, as lists */
    TRY(ARENA_NEW(ctx, scratch, (size_t)n + 1, &gaps.items));
    TRY(ARENA_NEW(ctx, scratch, length, &ends));
    TRY(ARENA_NEW(ctx, scratch, n, &next));
    memset(ends, 0xff, length * sizeof *ends);
    for (uint32_t p = 0; p < length; p++) {
        for (; at < n && blocks[at].first == p; at++) {
            blocks[at].offset = take(&gaps, blocks[at].size);
            next[at] = ends[blocks[at].last];
            ends[blocks[at].last] = at;
        }
        for (uint32_t b = ends[p]; b != UINT32_MAX; b = next[b]) give(&gaps, blocks[b].offset, blocks[b].size);
    }
    *size = gaps.top;
    return CODE_OK;
}

/* --- greedy plans ------------------------------------------------------------------------------------------------- */
typedef struct Key {
    int64_t first, second, third;
    uint32_t block;
} Key; /* larger ones come first */
typedef struct Greedy {
    const Block *blocks;
    uint32_t n, leaves;
    uint32_t *latest; /* tree over blocks (sorted by first): 1 + the latest end of those that are placed, 0 none */
    int64_t *offset;
    Key *order;
    Gap *near; /* what conflicts with the block in hand */
    uint32_t n_near;
    int64_t bound;
    bool hang; /* a block above all others hangs from the bound, and leaves the free bytes below itself */
    uint64_t dice;
    int64_t work;
} Greedy;

static int compare_keys(const void *a, const void *b) {
    const Key *x = a, *y = b;
    if (x->first != y->first) return x->first > y->first ? -1 : 1;
    if (x->second != y->second) return x->second > y->second ? -1 : 1;
    if (x->third != y->third) return x->third > y->third ? -1 : 1;
    return x->block < y->block ? -1 : x->block > y->block;
}

static int compare_gaps(const void *a, const void *b) {
    const Gap *x = a, *y = b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* Gathers the placed blocks below `limit` (blocks that begin in time) whose end is not before `first`. */
static void gather(Greedy *g, uint32_t tree, uint32_t low, uint32_t high, uint32_t limit, uint32_t first) {
    if (low >= limit || g->latest[tree] <= first) return;
    g->work--;
    if (high - low == 1) {
        g->near[g->n_near++] = (Gap){g->offset[low], g->blocks[low].size};
        return;
    }
    uint32_t middle = low + (high - low) / 2;
    gather(g, 2 * tree, low, middle, limit, first);
    gather(g, 2 * tree + 1, middle, high, limit, first);
}

static uint32_t begun_by(const Greedy *g, uint32_t position) {
    uint32_t low = 0, high = g->n;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (g->blocks[middle].first <= position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int64_t place_one(Greedy *g, uint32_t b) {
    const Block *block = &g->blocks[b];
    g->n_near = 0;
    gather(g, 1, 0, g->leaves, begun_by(g, block->last), block->first);
    qsort(g->near, g->n_near, sizeof *g->near, compare_gaps);
    int64_t end = 0, best = -1, best_gap = INT64_MAX;
    for (uint32_t k = 0; k < g->n_near; k++) {
        int64_t gap = g->near[k].offset - end;
        if (gap >= block->size && gap < best_gap) {
            best = end;
            best_gap = gap;
        }
        if (g->near[k].offset + g->near[k].size > end) end = g->near[k].offset + g->near[k].size;
    }
    int64_t above = g->hang && g->bound - block->size > end ? g->bound - block->size : end;
    g->offset[b] = best >= 0 ? best : above;
    g->work -= g->n_near;
    for (uint32_t t = g->leaves + b; t > 0; t /= 2) {
        if (g->latest[t] < block->last + 1) g->latest[t] = block->last + 1;
    }
    return g->offset[b] + block->size;
}

typedef struct Outcome {
    int64_t excess;   /* bytes of blocks above the bound, -1 when the work is spent */
    uint32_t culprit; /* place in the order of one of these blocks, by the dice */
} Outcome;

static uint32_t throw_dice(Greedy *g, uint32_t sides) {
    g->dice = g->dice * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(g->dice >> 33) % sides;
}

/* Places all in g->order; keeps the plan if it is smaller than *size. */
static Outcome attempt(Greedy *g, Block *blocks, int64_t *size) {
    Outcome out = {0};
    int64_t most = 0;
    uint32_t n_above = 0;
    memset(g->latest, 0, 2 * (size_t)g->leaves * sizeof *g->latest);
    for (uint32_t k = 0; k < g->n; k++) {
        int64_t end = place_one(g, g->order[k].block);
        if (g->work <= 0) return (Outcome){.excess = -1};
        if (end > most) most = end;
        if (end <= g->bound) continue;
        out.excess += end - g->bound;
        if (throw_dice(g, ++n_above) == 0) out.culprit = k;
    }
    if (most >= *size) return out;
    *size = most;
    for (uint32_t b = 0; b < g->n; b++) blocks[b].offset = g->offset[b];
    return out;
}

/* Moves the block at place `from` of the order before one, by the dice, of those that are placed before it and live
 * with it. */
static void move_before_other(Greedy *g, uint32_t from) {
    Key moved = g->order[from];
    uint32_t to = from, n_others = 0;
    for (uint32_t k = 0; k < from; k++) {
        const Block *a = &g->blocks[g->order[k].block], *b = &g->blocks[moved.block];
        if (a->first <= b->last && b->first <= a->last && throw_dice(g, ++n_others) == 0) to = k;
    }
    memmove(g->order + to + 1, g->order + to, (from - to) * sizeof *g->order);
    g->order[to] = moved;
}

/* How full memory is while a block lives: live bytes at the fullest position, and summed over all its positions. */
typedef struct Load {
    int64_t most, sum;
} Load;

/* `live` is overwritten: by sums from the start and back, then level by level (a sparse table of maxima over 2^k
 * positions), where blocks are answered at the level of their length. */
static void find_loads(const Block *blocks, uint32_t n, int64_t *live, uint32_t length, Load *load) {
    for (uint32_t p = 1; p < length; p++) live[p] += live[p - 1];
    for (uint32_t b = 0; b < n; b++)
        load[b].sum = live[blocks[b].last] - (blocks[b].first ? live[blocks[b].first - 1] : 0);
    for (uint32_t p = length - 1; p > 0; p--) live[p] -= live[p - 1];
    for (uint32_t level = 0; (uint64_t)1 << level <= length; level++) {
        uint32_t span = 1u << level;
        for (uint32_t b = 0; b < n; b++) {
            uint32_t lives = blocks[b].last - blocks[b].first + 1;
            if (lives < span || lives / 2 >= span) continue;
            int64_t left = live[blocks[b].first], right = live[blocks[b].last + 1 - span];
            load[b].most = left > right ? left : right;
        }
        for (uint32_t p = 0; (uint64_t)p + 2 * (uint64_t)span <= length; p++) {
            if (live[p + span] > live[p]) live[p] = live[p + span];
        }
    }
}

enum Kind { FULLEST, LARGEST, FULLEST_LARGEST, LONGEST, KINDS };

static void make_order(Greedy *g, enum Kind kind, const Load *load) {
    for (uint32_t b = 0; b < g->n; b++) {
        int64_t size = g->blocks[b].size, lives = (int64_t)g->blocks[b].last - g->blocks[b].first + 1;
        switch (kind) {
        case FULLEST: g->order[b] = (Key){load[b].most, load[b].sum, size, b}; break;
        case LARGEST: g->order[b] = (Key){size, 0, 0, b}; break;
        case FULLEST_LARGEST: g->order[b] = (Key){load[b].most, size, 0, b}; break;
        default: g->order[b] = (Key){lives, size, 0, b}; break;
        }
    }
    qsort(g->order, g->n, sizeof *g->order, compare_keys);
}

static Code greedy(Context *ctx, Arena *scratch, Block *blocks, uint32_t n, uint32_t length, int64_t *live,
                   int64_t bound, int64_t *size) {
    Greedy g = {
        .blocks = blocks, .n = n, .leaves = 1, .bound = bound, .dice = 1, .work = WORK + WORK_PER_BLOCK * (int64_t)n};
    while (g.leaves < n) g.leaves *= 2;
    TRY(ARENA_NEW(ctx, scratch, 2 * (size_t)g.leaves, &g.latest));
    TRY(ARENA_NEW(ctx, scratch, n, &g.offset));
    TRY(ARENA_NEW(ctx, scratch, n, &g.order));
    TRY(ARENA_NEW(ctx, scratch, n, &g.near));
    Load *load;
    TRY(ARENA_NEW(ctx, scratch, n, &load));
    Key *best_order;
    TRY(ARENA_NEW(ctx, scratch, n, &best_order));
    Outcome out, best = {.excess = INT64_MAX};
    bool best_hangs = false;
    find_loads(blocks, n, live, length, load);
    for (int kind = 0; kind<KINDS && * size> bound; kind++) {
        make_order(&g, (enum Kind)kind, load);
        for (int hang = 0; hang < 2 && *size > bound; hang++) {
            g.hang = hang;
            if ((out = attempt(&g, blocks, size)).excess < 0) return CODE_OK;
            if (out.excess >= best.excess) continue;
            best = out;
            best_hangs = g.hang;
            memcpy(best_order, g.order, n * sizeof *best_order);
        }
    }
    g.hang = best_hangs;
    for (int repair = 0; repair<REPAIRS && * size - bound> bound / GOOD_ENOUGH; repair++) {
        memcpy(g.order, best_order, n * sizeof *best_order);
        move_before_other(&g, best.culprit);
        if ((out = attempt(&g, blocks, size)).excess < 0) break;
        if (out.excess > best.excess) continue;
        best = out;
        memcpy(best_order, g.order, n * sizeof *best_order);
    }
    return CODE_OK;
}

Code assign_offsets(Context *ctx, Arena *scratch, Block *blocks, uint32_t n, uint32_t length, int64_t *size,
                    int64_t *bound) {
    int64_t *live;
    *size = *bound = 0;
    if (n == 0) return CODE_OK;
    TRY(ARENA_NEW(ctx, scratch, (size_t)length + 1, &live));
    for (uint32_t b = 0; b < n; b++) {
        live[blocks[b].first] += blocks[b].size;
        live[blocks[b].last + 1] -= blocks[b].size;
    }
    for (uint32_t p = 0; p < length; p++) {
        live[p + 1] += live[p];
        if (live[p] > *bound) *bound = live[p];
    }
    TRY(linear_scan(ctx, scratch, blocks, n, length, size));
    int64_t enough = n < MANY ? 0 : *bound / GOOD_ENOUGH;
    return *size - *bound > enough ? greedy(ctx, scratch, blocks, n, length, live, *bound, size) : CODE_OK;
}
