/* Where to cut segments, so that few and small graphs serve all of it.
 *
 * Candidates are the stretches between an instruction and the next ones that look the same (same token, or same three
 * tokens), since repeated blocks follow each other so. Starting with none, the candidate that makes the whole cheapest
 * is taken into the dictionary until none does; what no entry covers are gaps, blocks of their own, and equal gaps
 * share a block too. In instructions to compile:
 *
 *     cost = sum over distinct blocks of (GRAPH_COST + their instructions)
 *          + CALL_SHARE * calls / instructions + BORDER_SHARE * bytes at borders / bytes of all results
 *
 * The last two are what folding costs at run time; as shares they do not depend on how deep a model is. */
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "npu/plan.h"

static const double GRAPH_COST = 3.0, CALL_SHARE = 16.0, BORDER_SHARE = 5.0;
enum {
    MAX_RETURNS = 8,  /* of one instruction */
    MAX_LENGTHS = 32, /* of candidates */
    PER_LENGTH = 3,   /* candidates */
    MAX_DICTIONARY = 16,
    MAX_GAP_KINDS = 16,
    MAX_ARGUMENTS = 160 /* constants of a block that calls share */
};

typedef struct Class { /* of equal stretches */
    uint64_t hash;
    Stretch example;
    uint32_t next; /* in its bucket */
    double call;   /* what each call costs */
} Class;

typedef struct Candidate {
    uint32_t kind, length;
    uint32_t first, count; /* of its occurrences */
    double saving;
} Candidate;

typedef struct Search {
    Tokens *t;
    Arena *arena;  /* dropped after the search */
    Stretch *runs; /* parts of segments between heads */
    uint32_t n_runs;
    uint32_t n; /* positions in the order */
    double per_call, per_byte;
    uint64_t *sums, *powers; /* rolling hash over tokens: of [0, p) */
    /* classes */
    Class *classes;
    uint32_t n_classes, cap_classes, *buckets, n_buckets;
    Words words, other;
    Border border;
    /* candidates */
    Candidate *candidates;
    uint32_t n_candidates;
    uint32_t *occurrences, n_occurrences, cap_occurrences; /* first positions */
    /* the dictionary, and work space of the cut that belongs to it */
    uint32_t dictionary[MAX_DICTIONARY + 1], n_dictionary;
    uint32_t *starts; /* [position]: bits of the dictionary entries that occur there */
    double *closed, *gap;
    uint32_t *from; /* entry that ends here + 1; 0: a gap does, which starts at gap_from */
    uint32_t *gap_from;
    Piece *pieces;  /* in reverse order while one run is traced */
    uint32_t *used; /* [kind]: number of the last evaluation that used it */
    uint32_t cap_used, evaluation;
} Search;

static Code grow(Search *s, uint32_t count, uint32_t *capacity, size_t size, void **items) {
    if (count < *capacity) return CODE_OK;
    uint32_t larger = *capacity ? 2 * *capacity : 64;
    void *moved;
    if (*capacity > UINT32_MAX / 4) return fail(s->t->ctx, CODE_UNSUPPORTED, "the program is too large to plan");
    TRY(arena_array(s->t->ctx, s->arena, larger, size, &moved));
    if (count) memcpy(moved, *items, count * size);
    *items = moved;
    *capacity = larger;
    return CODE_OK;
}

/* --- classes of equal stretches ----------------------------------------------------------------------------------- */
static Code add_class(Search *s, Stretch stretch, uint64_t hash, uint32_t *kind) {
    TRY(grow(s, s->n_classes, &s->cap_classes, sizeof *s->classes, (void **)&s->classes));
    stretch_border(s->t, stretch, &s->border);
    uint32_t *bucket = &s->buckets[hash & (s->n_buckets - 1)];
    s->classes[s->n_classes] = (Class){hash, stretch, *bucket, s->per_call + s->per_byte * (double)s->border.bytes};
    *kind = s->n_classes++;
    *bucket = *kind + 1;
    return CODE_OK;
}

static Code classify(Search *s, Stretch stretch, uint32_t *kind) {
    uint32_t n_constants, unused;
    TRY(stretch_words(s->t, stretch, &s->words, &n_constants));
    uint64_t hash = words_hash(s->words.items, s->words.count);
    for (uint32_t c = s->buckets[hash & (s->n_buckets - 1)]; c; c = s->classes[c - 1].next) {
        const Class *class = &s->classes[c - 1];
        if (class->hash != hash || class->example.count != stretch.count) continue;
        *kind = c - 1;
        if (class->example.first == stretch.first) return CODE_OK;
        if (n_constants > MAX_ARGUMENTS) continue;
        TRY(stretch_words(s->t, class->example, &s->other, &unused));
        if (s->other.count == s->words.count &&
            memcmp(s->other.items, s->words.items, s->words.count * sizeof *s->words.items) == 0)
            return CODE_OK;
    }
    return add_class(s, stretch, hash, kind);
}

/* --- candidates --------------------------------------------------------------------------------------------------- */
static uint64_t token_hash(const Search *s, uint32_t first, uint32_t count) {
    return s->sums[first + count] - s->sums[first] * s->powers[count];
}

static Code sum_tokens(Search *s) {
    const uint64_t base = 0x9e3779b97f4a7c15u;
    TRY(ARENA_NEW(s->t->ctx, s->arena, s->n + 1, &s->sums));
    TRY(ARENA_NEW(s->t->ctx, s->arena, s->n + 1, &s->powers));
    s->powers[0] = 1;
    for (uint32_t p = 0; p < s->n; p++) {
        s->powers[p + 1] = s->powers[p] * base;
        s->sums[p + 1] = s->sums[p] * base + s->t->token[p] + 1;
    }
    return CODE_OK;
}

typedef struct Start {
    uint64_t hash;
    uint32_t first;
} Start;

static int compare_starts(const void *a, const void *b) {
    const Start *x = a, *y = b;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Counts how often an instruction looks the same as the one `length` behind it: at most MAX_RETURNS a position, over
 * `width` tokens. */
static Code count_returns(Search *s, uint32_t width, uint32_t *frequency) {
    for (uint32_t r = 0; r < s->n_runs; r++) {
        const Stretch *run = &s->runs[r];
        Start *starts;
        if (run->count <= width) continue;
        uint32_t n = run->count - width + 1;
        TRY(ARENA_NEW(s->t->ctx, s->arena, n, &starts));
        for (uint32_t i = 0; i < n; i++) starts[i] = (Start){token_hash(s, run->first + i, width), run->first + i};
        qsort(starts, n, sizeof *starts, compare_starts);
        for (uint32_t i = 0; i < n; i++) {
            for (uint32_t j = i + 1; j < n && j <= i + MAX_RETURNS && starts[j].hash == starts[i].hash; j++)
                frequency[starts[j].first - starts[i].first]++;
        }
    }
    return CODE_OK;
}

typedef struct Length {
    uint32_t length;
    double weight;
} Length;

static int compare_lengths(const void *a, const void *b) { /* heaviest first */
    const Length *x = a, *y = b;
    if (x->weight != y->weight) return x->weight > y->weight ? -1 : 1;
    return x->length < y->length ? -1 : x->length > y->length;
}

static int compare_candidates(const void *a, const void *b) { /* largest saving first */
    const Candidate *x = a, *y = b;
    if (x->saving != y->saving) return x->saving > y->saving ? -1 : 1;
    if (x->length != y->length) return x->length < y->length ? -1 : 1;
    return x->kind < y->kind ? -1 : x->kind > y->kind;
}

/* Is the stretch a shorter one written several times? That one is a candidate itself. */
static bool is_power(const Search *s, uint32_t first, uint32_t length) {
    for (uint32_t period = 1; period <= length / 2; period++) {
        if (length % period == 0 &&
            token_hash(s, first, length - period) == token_hash(s, first + period, length - period))
            return true;
    }
    return false;
}

/* Stretches with equal tokens, start by start in order, divided into those that are really equal. */
static Code divide(Search *s, uint32_t length, const Start *starts, uint32_t n, uint32_t *kinds, uint32_t first) {
    for (uint32_t i = 0; i < n; i++) TRY(classify(s, (Stretch){starts[i].first, length}, &kinds[i]));
    for (uint32_t i = 0; i < n; i++) {
        if (kinds[i] == UINT32_MAX) continue;
        Candidate c = {.kind = kinds[i], .length = length, .first = s->n_occurrences};
        uint32_t free_from = 0, apart = 0;
        for (uint32_t j = i; j < n; j++) {
            if (kinds[j] != c.kind) continue;
            kinds[j] = UINT32_MAX;
            TRY(grow(s, s->n_occurrences, &s->cap_occurrences, sizeof *s->occurrences, (void **)&s->occurrences));
            s->occurrences[s->n_occurrences++] = starts[j].first;
            if (starts[j].first < free_from) continue;
            free_from = starts[j].first + length;
            apart++;
        }
        c.count = s->n_occurrences - c.first;
        c.saving = ((double)apart - 1) * length - apart * s->classes[c.kind].call;
        if (apart < 2 || c.saving <= 0) {
            s->n_occurrences = c.first;
            continue;
        }
        /* The list is kept short (turned by an instruction, a repeated block is another candidate): the least promising
         * one of this length makes room. */
        uint32_t at = s->n_candidates;
        while (at > first && compare_candidates(&c, &s->candidates[at - 1]) < 0) at--;
        if (at == first + PER_LENGTH) {
            s->n_occurrences = c.first;
            continue;
        }
        if (s->n_candidates < first + PER_LENGTH) s->n_candidates++;
        memmove(&s->candidates[at + 1], &s->candidates[at], (s->n_candidates - 1 - at) * sizeof c);
        s->candidates[at] = c;
    }
    return CODE_OK;
}

static Code find_of_length(Search *s, uint32_t length, Start *starts, uint32_t *kinds) {
    uint32_t n = 0, first = s->n_candidates;
    for (uint32_t r = 0; r < s->n_runs; r++) {
        const Stretch *run = &s->runs[r];
        for (uint32_t i = 0; i + length <= run->count; i++)
            starts[n++] = (Start){token_hash(s, run->first + i, length), run->first + i};
    }
    qsort(starts, n, sizeof *starts, compare_starts);
    for (uint32_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && starts[end].hash == starts[i].hash;) end++;
        if (end - i < 2 || is_power(s, starts[i].first, length)) continue;
        TRY(divide(s, length, starts + i, end - i, kinds, first));
    }
    return CODE_OK;
}

static Code find_candidates(Search *s) {
    Context *ctx = s->t->ctx;
    uint32_t *frequency, *kinds, n_lengths = 0;
    Length *lengths;
    Start *starts;
    TRY(ARENA_NEW(ctx, s->arena, s->n + 1, &frequency));
    TRY(ARENA_NEW(ctx, s->arena, s->n + 1, &lengths));
    TRY(ARENA_NEW(ctx, s->arena, s->n + 1, &starts));
    TRY(ARENA_NEW(ctx, s->arena, s->n + 1, &kinds));
    TRY(ARENA_NEW(ctx, s->arena, (MAX_LENGTHS * PER_LENGTH), &s->candidates));
    TRY(sum_tokens(s));
    TRY(count_returns(s, 1, frequency));
    TRY(count_returns(s, 3, frequency));
    for (uint32_t length = 1; length <= s->n; length++) {
        if (frequency[length]) lengths[n_lengths++] = (Length){length, (double)frequency[length] * length};
    }
    qsort(lengths, n_lengths, sizeof *lengths, compare_lengths);
    if (n_lengths > MAX_LENGTHS) n_lengths = MAX_LENGTHS;
    for (uint32_t i = 0; i < n_lengths; i++) {
        TRY(check_cancelled(ctx));
        TRY(find_of_length(s, lengths[i].length, starts, kinds));
    }
    return CODE_OK;
}

/* --- the cheapest cut for a dictionary -----------------------------------------------------------------------------
 */
static void mark(Search *s, uint32_t entry, bool on) {
    const Candidate *c = &s->candidates[s->dictionary[entry]];
    for (uint32_t i = 0; i < c->count; i++) {
        uint32_t *bits = &s->starts[s->occurrences[c->first + i]];
        *bits = on ? *bits | 1u << entry : *bits & ~(1u << entry);
    }
}

/* Shortest path over the positions of a run, in steps of dictionary entries and gaps. */
static void cut_run(Search *s, const Stretch *run) {
    for (uint32_t i = 0; i <= run->count; i++) s->closed[i] = s->gap[i] = DBL_MAX;
    s->closed[0] = 0;
    for (uint32_t i = 0; i <= run->count; i++) {
        if (s->gap[i] < s->closed[i]) {
            s->closed[i] = s->gap[i];
            s->from[i] = 0;
        }
        if (i == run->count) break;
        double open = s->closed[i] + GRAPH_COST + s->per_call, stay = s->gap[i];
        s->gap[i + 1] = (open < stay ? open : stay) + 1;
        s->gap_from[i + 1] = open < stay ? i : s->gap_from[i];
        uint32_t bits = s->starts[run->first + i];
        for (uint32_t e = 0; bits >> e; e++) {
            if (!(bits >> e & 1)) continue;
            const Candidate *c = &s->candidates[s->dictionary[e]];
            double cost = s->closed[i] + s->classes[c->kind].call;
            if (cost >= s->closed[i + c->length]) continue;
            s->closed[i + c->length] = cost;
            s->from[i + c->length] = e + 1;
        }
    }
}

/* Adds a run's pieces in order. */
static Code trace_run(Search *s, const Stretch *run, uint32_t *n_pieces) {
    uint32_t begin = *n_pieces, at = run->count;
    while (at > 0) {
        Piece *piece = &s->pieces[*n_pieces];
        *piece = (Piece){0};
        if (s->from[at]) {
            const Candidate *c = &s->candidates[s->dictionary[s->from[at] - 1]];
            at -= c->length;
            piece->stretch = (Stretch){run->first + at, c->length};
            piece->kind = c->kind;
        } else {
            uint32_t end = at;
            at = s->gap_from[at];
            piece->stretch = (Stretch){run->first + at, end - at};
            piece->gap = true;
            TRY(classify(s, piece->stretch, &piece->kind));
        }
        (*n_pieces)++;
    }
    for (uint32_t i = begin, j = *n_pieces; i + 1 < j; i++) {
        Piece swap = s->pieces[i];
        s->pieces[i] = s->pieces[--j];
        s->pieces[j] = swap;
    }
    return CODE_OK;
}

/* Splits gap `i` if it begins or ends with the gap `whole`. */
static Code split_gap(Search *s, uint32_t i, Piece whole, uint32_t *n_pieces, bool *split) {
    Stretch gap = s->pieces[i].stretch;
    uint32_t length = whole.stretch.count, kind;
    *split = false;
    for (int at_end = 0; at_end < 2 && !*split && length < gap.count; at_end++) {
        Stretch same = {at_end ? gap.first + gap.count - length : gap.first, length};
        Stretch rest = {at_end ? gap.first : gap.first + length, gap.count - length};
        if (token_hash(s, same.first, length) != token_hash(s, whole.stretch.first, length)) continue;
        TRY(classify(s, same, &kind));
        if (kind != whole.kind) continue;
        memmove(&s->pieces[i + 2], &s->pieces[i + 1], (*n_pieces - i - 1) * sizeof *s->pieces);
        (*n_pieces)++;
        TRY(classify(s, rest, &kind));
        s->pieces[i + (uint32_t)at_end] = (Piece){.stretch = same, .kind = whole.kind, .gap = true};
        s->pieces[i + (uint32_t)!at_end] = (Piece){.stretch = rest, .kind = kind, .gap = true};
        *split = true;
    }
    return CODE_OK;
}

/* A gap may be another one and more: "A" here, "A and the last norm" there. */
static Code split_gaps(Search *s, uint32_t *n_pieces) {
    Piece kinds[MAX_GAP_KINDS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < *n_pieces && n < MAX_GAP_KINDS; i++) {
        bool known = !s->pieces[i].gap || s->pieces[i].stretch.count <= GRAPH_COST;
        for (uint32_t k = 0; k < n && !known; k++) known = kinds[k].kind == s->pieces[i].kind;
        if (!known) kinds[n++] = s->pieces[i];
    }
    for (uint32_t i = 0; i < *n_pieces && n > 1; i++) {
        bool split = s->pieces[i].gap;
        while (split) { /* the first part may be split again */
            split = false;
            for (uint32_t k = 0; k < n && !split; k++) TRY(split_gap(s, i, kinds[k], n_pieces, &split));
        }
    }
    return CODE_OK;
}

/* The cut that goes with the dictionary: s->pieces, run after run. */
static Code evaluate(Search *s, double *cost, uint32_t *n_pieces) {
    *cost = 0;
    *n_pieces = 0;
    s->evaluation++;
    for (uint32_t r = 0; r < s->n_runs; r++) {
        cut_run(s, &s->runs[r]);
        TRY(trace_run(s, &s->runs[r], n_pieces));
    }
    TRY(split_gaps(s, n_pieces));
    if (s->cap_used < s->n_classes) {
        s->cap_used = s->cap_classes;
        TRY(ARENA_NEW(s->t->ctx, s->arena, s->cap_used, &s->used));
    }
    for (uint32_t i = 0; i < *n_pieces; i++) {
        const Piece *piece = &s->pieces[i];
        *cost += s->classes[piece->kind].call;
        if (s->used[piece->kind] != s->evaluation) *cost += GRAPH_COST + piece->stretch.count;
        s->used[piece->kind] = s->evaluation;
    }
    return CODE_OK;
}

static void push(Search *s, uint32_t candidate) {
    s->dictionary[s->n_dictionary] = candidate;
    mark(s, s->n_dictionary++, true);
}

static void pop(Search *s) { mark(s, --s->n_dictionary, false); }

/* Takes entries out as long as that makes it cheaper: a later one may have made an earlier one superfluous. */
static Code shrink(Search *s, double *best) {
    for (uint32_t e = s->n_dictionary; e-- > 0;) {
        uint32_t candidate = s->dictionary[e], last = s->dictionary[s->n_dictionary - 1], n_pieces;
        double cost;
        pop(s); /* the last one moves to its place; if it stays it becomes the last, which has been looked at */
        if (e < s->n_dictionary) {
            mark(s, e, false);
            s->dictionary[e] = last;
            mark(s, e, true);
        }
        TRY(evaluate(s, &cost, &n_pieces));
        if (cost < *best) {
            *best = cost;
            e = s->n_dictionary;
        } else {
            push(s, candidate);
        }
    }
    return CODE_OK;
}

static Code choose(Search *s) {
    double best, cost;
    uint32_t n_pieces;
    TRY(evaluate(s, &best, &n_pieces));
    while (s->n_dictionary < MAX_DICTIONARY) {
        uint32_t chosen = UINT32_MAX;
        double least = best;
        TRY(check_cancelled(s->t->ctx));
        for (uint32_t c = 0; c < s->n_candidates; c++) {
            push(s, c);
            Code code = evaluate(s, &cost, &n_pieces);
            pop(s);
            TRY(code);
            if (cost >= least) continue;
            least = cost;
            chosen = c;
        }
        if (chosen == UINT32_MAX) break;
        push(s, chosen);
        best = least;
        TRY(shrink(s, &best));
    }
    return CODE_OK;
}

/* --- all ---------------------------------------------------------------------------------------------------------- */
static Code find_runs(Search *s, const Segments *segments, const bool *heads) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < segments->count; i++) n += segments->items[i].count;
    TRY(ARENA_NEW(s->t->ctx, s->arena, n, &s->runs));
    for (uint32_t i = 0; i < segments->count; i++) {
        uint32_t p = segments->items[i].first, end = p + segments->items[i].count;
        while (p < end) {
            Stretch run = {p, 0};
            while (p < end && !heads[p]) p++;
            run.count = p - run.first;
            if (run.count) s->runs[s->n_runs++] = run;
            while (p < end && heads[p]) p++;
        }
    }
    return CODE_OK;
}

static Code prepare(Search *s, const Segments *segments) {
    Context *ctx = s->t->ctx;
    const Npuir *ir = s->t->ir;
    Stretch all = {0, ir->n_instrs};
    double instrs = 0, bytes = 0;
    s->n = ir->n_instrs;
    for (uint32_t i = 0; i < segments->count; i++) {
        const Segment *segment = &segments->items[i];
        instrs += segment->count;
        for (uint32_t p = segment->first; p < segment->first + segment->count; p++) {
            const Instr *instr = &ir->instrs[ir->order[p]];
            for (uint32_t k = 0; k < instr->n_out; k++) {
                if (instr->out[k] != REG_NONE) bytes += (double)ir->buffers[ir->regs[instr->out[k]].buffer].bytes;
            }
        }
    }
    s->per_call = CALL_SHARE / (instrs > 0 ? instrs : 1);
    s->per_byte = BORDER_SHARE / (bytes > 0 ? bytes : 1);
    for (s->n_buckets = 64; s->n_buckets < s->n; s->n_buckets *= 2) {
    }
    TRY(ARENA_NEW(ctx, s->arena, s->n_buckets, &s->buckets));
    TRY(border_alloc(ctx, s->arena, ir, all, &s->border));
    TRY(ARENA_NEW(ctx, s->arena, s->n + 1, &s->starts));
    TRY(ARENA_NEW(ctx, s->arena, s->n + 1, &s->closed));
    TRY(ARENA_NEW(ctx, s->arena, s->n + 1, &s->gap));
    TRY(ARENA_NEW(ctx, s->arena, s->n + 1, &s->from));
    TRY(ARENA_NEW(ctx, s->arena, s->n + 1, &s->gap_from));
    return ARENA_NEW(ctx, s->arena, s->n + 1, &s->pieces);
}

/* Pieces of runs and heads, segment by segment; kinds numbered in order of appearance. */
static Code collect(Search *s, const Segments *segments, const bool *heads, Arena *arena, Cut *out) {
    uint32_t n_pieces, at = 0, *number;
    double cost;
    TRY(evaluate(s, &cost, &n_pieces));
    TRY(ARENA_NEW(s->t->ctx, arena, s->n + 1, &out->pieces));
    TRY(ARENA_NEW(s->t->ctx, arena, segments->count + 1, &out->first));
    for (uint32_t i = 0; i < segments->count; i++) {
        uint32_t p = segments->items[i].first, end = p + segments->items[i].count;
        out->first[i] = out->count;
        while (p < end) {
            Piece *piece = &out->pieces[out->count++];
            if (heads[p]) {
                *piece = (Piece){.stretch = {p, 1}, .head = true};
                TRY(classify(s, piece->stretch, &piece->kind));
            } else {
                *piece = s->pieces[at++];
            }
            p += piece->stretch.count;
        }
    }
    out->first[segments->count] = out->count;
    TRY(ARENA_NEW(s->t->ctx, s->arena, 2 * (size_t)s->n_classes, &number)); /* tiles of heads are of other kinds */
    memset(number, 0xff, 2 * (size_t)s->n_classes * sizeof *number);
    for (uint32_t i = 0; i < out->count; i++) {
        uint32_t *n = &number[2 * out->pieces[i].kind + out->pieces[i].head];
        if (*n == UINT32_MAX) *n = out->n_kinds++;
        out->pieces[i].kind = *n;
    }
    return CODE_OK;
}

static Code cut_whole(Tokens *t, const Segments *segments, Arena *arena, Cut *out) {
    TRY(ARENA_NEW(t->ctx, arena, segments->count, &out->pieces));
    TRY(ARENA_NEW(t->ctx, arena, segments->count + 1, &out->first));
    for (uint32_t s = 0; s < segments->count; s++) {
        out->pieces[s] = (Piece){.stretch = {segments->items[s].first, segments->items[s].count}, .kind = s};
        out->first[s + 1] = s + 1;
    }
    out->count = out->n_kinds = segments->count;
    return CODE_OK;
}

Code cut_find(Tokens *t, const Segments *segments, const bool *heads, Fold fold, Arena *arena, Cut *out) {
    Search s = {.t = t, .arena = t->arena};
    *out = (Cut){0};
    if (fold == FOLD_NEVER) return cut_whole(t, segments, arena, out);
    TRY(prepare(&s, segments));
    TRY(find_runs(&s, segments, heads));
    TRY(find_candidates(&s));
    TRY(choose(&s));
    return collect(&s, segments, heads, arena, out);
}
