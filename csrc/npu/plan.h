/* Inside of planning: what plan.c (blocks and calls), plan_token.c (what instructions look like), plan_search.c (where
 * to cut) and plan_check.c (the independent proof) share. */
#ifndef FORGE_NPU_PLAN_H
#define FORGE_NPU_PLAN_H

#include "npu/npu.h"

/* What an operand refers to. */
typedef enum RefKind { REF_NONE, REF_CONSTANT, REF_BUFFER } RefKind;
typedef struct Ref {
    RefKind kind;
    uint32_t id; /* index of the constant, or BufferId */
} Ref;

/* A run of instructions, ir->order[first .. first + count), inside of one segment. */
typedef struct Stretch {
    uint32_t first, count;
} Stretch;

/* Growing list of numbers. */
typedef struct Words {
    int64_t *items;
    uint32_t count, capacity;
} Words;

/* Instructions as tokens: two have the same token if the emitter would write the same for them but for the names of
 * what they read. Arrays are indexed by position in ir->order where nothing else is said; those on the CPU have no
 * token. */
typedef struct Tokens {
    Context *ctx;
    Arena *arena; /* of planning, dropped afterwards */
    const Npuir *ir;
    Writers writers;
    uint32_t *position;  /* of each instruction */
    uint32_t *last_read; /* of each buffer: position of the last instruction that reads it + 1; 0 never */
    uint32_t *result;    /* of each buffer: which result of its writer it is */
    uint32_t *token;
    uint32_t *first_ref; /* refs of position p: refs[first_ref[p] ..], one an operand */
    Ref *refs;
    uint32_t n_tokens;
    /* Numbers given in one walk over a stretch: those whose stamp is the current one. */
    uint32_t stamp, *buffer_stamp, *buffer_number, *constant_stamp, *constant_number;
} Tokens;
MUST_USE Code tokens_find(Context *ctx, Arena *arena, const Npuir *ir, const Segments *segments, Tokens *out);

static inline uint32_t tokens_writer(const Tokens *t, BufferId b) { /* position; UINT32_MAX nobody */
    return t->writers.instr[b] == UINT32_MAX ? UINT32_MAX : t->position[t->writers.instr[b]];
}
/* Does result `b`, made before position `end`, have a use there or behind, or outside of the program? */
static inline bool tokens_crosses(const Tokens *t, BufferId b, uint32_t end) {
    return t->last_read[b] > end || t->ir->buffers[b].space == SPACE_OUTPUT;
}

/* What a stretch reads and makes, in order of first use and of being written. */
typedef struct Border {
    uint32_t n_in, n_out, n_constants;
    BufferId *in, *out;
    uint32_t *constants;
    int64_t bytes; /* in and out */
} Border;
/* Fills `border`, whose arrays must have room for all operands and results of the stretch. */
void stretch_border(Tokens *t, Stretch s, Border *border);
MUST_USE Code border_alloc(Context *ctx, Arena *arena, const Npuir *ir, Stretch s, Border *out);
/* Canonical form: equal for two stretches iff one graph serves both (constants may have other values). */
MUST_USE Code stretch_words(Tokens *t, Stretch s, Words *out, uint32_t *n_constants);
uint64_t words_hash(const int64_t *items, uint32_t count);

/* The stretches that each segment is cut into, in order of execution. `kind`: equal ones have the same. */
typedef struct Piece {
    Stretch stretch;
    uint32_t kind;
    bool head; /* one linear, to be cut into column tiles */
    bool gap;  /* what the search found no repeated block for */
} Piece;
typedef struct Cut {
    Piece *pieces;
    uint32_t count;
    uint32_t *first; /* segment s: pieces[first[s] .. first[s + 1]) */
    uint32_t n_kinds;
} Cut;
/* `heads[position]`: must be a piece of its own. */
MUST_USE Code cut_find(Tokens *t, const Segments *segments, const bool *heads, Fold fold, Arena *arena, Cut *out);

/* Proves a plan against the program alone: every instruction of each segment is run once, by a graph that was made for
 * an instruction that computes the same, on operands that were made before; all that is read outside of a call leaves
 * it; tiles cover their head. CODE_INTERNAL if not. */
MUST_USE Code plan_check(Context *ctx, const NpuPlan *plan);

#endif
