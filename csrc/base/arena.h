/* Bump allocator: one for a compilation, one for the program that it yields. Nothing is freed but the whole. */
#ifndef FORGE_BASE_ARENA_H
#define FORGE_BASE_ARENA_H

#include "base/status.h"

typedef struct ArenaBlock ArenaBlock;
typedef struct Arena {
    ArenaBlock *head;
    size_t used; /* bytes handed out */
} Arena;

void arena_init(Arena *arena);
void arena_destroy(Arena *arena);
/* Zeroed memory aligned to 64 bytes for sizes >= 64, to 16 below; `*out` is NULL on failure. size 0 yields a valid
 * pointer. */
MUST_USE Code arena_alloc(Context *ctx, Arena *arena, size_t size, void **out);
MUST_USE Code arena_array(Context *ctx, Arena *arena, size_t count, size_t size, void **out); /* overflow-checked */
MUST_USE Code arena_copy(Context *ctx, Arena *arena, const void *from, size_t size, void **out);
MUST_USE Code arena_string(Context *ctx, Arena *arena, const char *text, char **out);

/* Typed form: ARENA_NEW(ctx, arena, count, &pointer). */
#define ARENA_NEW(ctx, arena, count, outp) arena_array(ctx, arena, (size_t)(count), sizeof **(outp), (void **)(outp))

/* Growing text for printers. On failure `failed` is set and appends do nothing; check once at the end. */
typedef struct Text {
    char *data; /* NUL terminated; malloc'd */
    size_t size, capacity;
    bool failed;
} Text;
void text_init(Text *text);
void text_destroy(Text *text);
void text_add(Text *text, const char *format, ...) PRINTF_LIKE(2, 3);
MUST_USE Code text_done(Context *ctx, Text *text);

#endif
