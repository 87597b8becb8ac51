#include "base/arena.h"

#include <stdlib.h>
#include <string.h>

struct ArenaBlock {
    ArenaBlock *next;
    char *at, *end; /* free part */
};

enum { FIRST_BLOCK = 64 * 1024, LARGEST_BLOCK = 4 * 1024 * 1024, ALIGN_SMALL = 16, ALIGN_LARGE = 64 };

void arena_init(Arena *arena) {
    arena->head = NULL;
    arena->used = 0;
}

void arena_destroy(Arena *arena) {
    for (ArenaBlock *block = arena->head; block;) {
        ArenaBlock *next = block->next;
        free(block);
        block = next;
    }
    arena_init(arena);
}

static char *align_up(char *p, size_t align) { return p + (-(uintptr_t)p & (align - 1)); }

static Code no_memory(Context *ctx, size_t size) {
    return fail(ctx, CODE_NO_MEMORY, "out of memory (%zu bytes)", size);
}

Code arena_alloc(Context *ctx, Arena *arena, size_t size, void **out) {
    *out = NULL;
    if (ctx->fail_allocation && --ctx->fail_allocation == 0) return no_memory(ctx, size);
    size_t align = size >= ALIGN_LARGE ? ALIGN_LARGE : ALIGN_SMALL;
    if (size == 0) size = 1;
    if (size > SIZE_MAX / 2) return no_memory(ctx, size);

    ArenaBlock *block = arena->head;
    char *at = block ? align_up(block->at, align) : NULL;
    if (!block || at > block->end || (size_t)(block->end - at) < size) {
        /* Blocks grow with what is in use, so that small compilations stay small; calloc gives the zeroes. */
        size_t room = arena->used < FIRST_BLOCK ? FIRST_BLOCK : arena->used;
        if (room > LARGEST_BLOCK) room = LARGEST_BLOCK;
        bool own = size > room / 4; /* a large request must not waste the rest of the current block */
        if (own) room = size;
        ArenaBlock *fresh = calloc(1, sizeof *fresh + room + ALIGN_LARGE);
        if (!fresh) return no_memory(ctx, size);
        fresh->at = (char *)(fresh + 1);
        fresh->end = fresh->at + room + ALIGN_LARGE;
        if (own && block) {
            fresh->next = block->next;
            block->next = fresh;
        } else {
            fresh->next = block;
            arena->head = fresh;
        }
        block = fresh;
        at = align_up(block->at, align);
    }
    block->at = at + size;
    arena->used += size;
    *out = at;
    return CODE_OK;
}

Code arena_array(Context *ctx, Arena *arena, size_t count, size_t size, void **out) {
    *out = NULL;
    if (size && count > SIZE_MAX / size) return no_memory(ctx, SIZE_MAX);
    return arena_alloc(ctx, arena, count * size, out);
}

Code arena_copy(Context *ctx, Arena *arena, const void *from, size_t size, void **out) {
    TRY(arena_alloc(ctx, arena, size, out));
    if (size) memcpy(*out, from, size);
    return CODE_OK;
}

Code arena_string(Context *ctx, Arena *arena, const char *text, char **out) {
    void *copy;
    *out = NULL;
    TRY(arena_copy(ctx, arena, text, strlen(text) + 1, &copy));
    *out = copy;
    return CODE_OK;
}
