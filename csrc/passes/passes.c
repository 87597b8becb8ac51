/* The table of passes, their options, and the remarks that they leave for the report. */
#include "passes/passes.h"

#include <stdio.h>
#include <string.h>

static const Pass table[] = {
#define PASS(name, function, by_default) {#name, function, by_default},
#include "passes/passes.def"
#undef PASS
};

const Pass *pass_table(size_t *count) {
    *count = sizeof table / sizeof *table;
    return table;
}

const Pass *pass_find(const char *name, size_t length) {
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strlen(table[i].name) == length && memcmp(table[i].name, name, length) == 0) return &table[i];
    return NULL;
}

void pass_options_default(PassOptions *options) {
    *options = (PassOptions){
        .alpha = 1.0, .fusion_limit = 24, .fuse_layout = true, .fold_limit_bytes = 64 << 20, .quantised = true};
}

/* Equal remarks come close together, so only the last ones are compared: the list stays linear in the graph's size. */
enum { MERGE_WINDOW = 64 };

Code remark_add(PassContext *pc, const char *pass, int32_t source, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);

    Remarks *r = &pc->remarks;
    uint32_t oldest = r->count > MERGE_WINDOW ? r->count - MERGE_WINDOW : 0;
    for (uint32_t i = r->count; i-- > oldest;) {
        if (strcmp(r->items[i].pass, pass) == 0 && strcmp(r->items[i].text, text) == 0) {
            r->items[i].count++;
            return CODE_OK;
        }
    }
    if (r->count == r->capacity) {
        uint32_t capacity = r->capacity ? 2 * r->capacity : 16;
        Remark *items;
        TRY(ARENA_NEW(pc->ctx, pc->arena, capacity, &items));
        if (r->count) memcpy(items, r->items, r->count * sizeof *items);
        r->items = items;
        r->capacity = capacity;
    }
    char *kept;
    TRY(arena_string(pc->ctx, pc->arena, text, &kept));
    r->items[r->count++] = (Remark){pass, kept, source, 1};
    return CODE_OK;
}
