#include "base/arena.h"

#include <stdio.h>
#include <stdlib.h>

void text_init(Text *text) {
    text->data = NULL;
    text->size = text->capacity = 0;
    text->failed = false;
}

void text_destroy(Text *text) {
    free(text->data);
    text_init(text);
}

static bool reserve(Text *text, size_t extra) {
    if (text->capacity - text->size > extra) return true;
    size_t capacity = text->capacity < 256 ? 256 : text->capacity;
    while (capacity - text->size <= extra) {
        if (capacity > SIZE_MAX / 2) return false;
        capacity *= 2;
    }
    char *data = realloc(text->data, capacity);
    if (!data) return false;
    text->data = data;
    text->capacity = capacity;
    return true;
}

void text_add(Text *text, const char *format, ...) {
    if (text->failed) return;
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    /* Most pieces are short: format into what is there and grow only when it was too little. */
    size_t room = text->capacity - text->size;
    int n = vsnprintf(room ? text->data + text->size : NULL, room, format, args);
    if (n < 0) {
        text->failed = true;
    } else if ((size_t)n >= room) {
        if (reserve(text, (size_t)n))
            vsnprintf(text->data + text->size, (size_t)n + 1, format, again);
        else
            text->failed = true;
    }
    if (!text->failed) text->size += (size_t)n;
    va_end(again);
    va_end(args);
}

Code text_done(Context *ctx, Text *text) {
    bool injected = ctx->fail_allocation && --ctx->fail_allocation == 0; /* text_add has no context to count in */
    text_add(text, "%s", "");                                            /* an empty text is a string too */
    if (text->failed || injected) return fail(ctx, CODE_NO_MEMORY, "out of memory for text");
    return CODE_OK;
}
