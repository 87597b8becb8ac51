#include "base/status.h"

#include <stdio.h>
#include <string.h>

static void record(Context *ctx, Code code, uint32_t reason, const char *format, va_list args) {
    if (ctx->code != CODE_OK) return;
    vsnprintf(ctx->text, sizeof ctx->text, format, args);
    ctx->code = code;
    ctx->reason = reason;
}

Code fail(Context *ctx, Code code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    record(ctx, code, 0, format, args);
    va_end(args);
    return code;
}

Code fail_device(Context *ctx, uint32_t reason, const char *format, ...) {
    va_list args;
    va_start(args, format);
    record(ctx, CODE_DEVICE, reason, format, args);
    va_end(args);
    return CODE_DEVICE;
}

void fail_prefix(Context *ctx, const char *format, ...) {
    char joined[ERROR_TEXT_MAX];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(joined, sizeof joined, format, args);
    va_end(args);
    if (n < 0) return;
    size_t used = (size_t)n < sizeof joined ? (size_t)n : sizeof joined - 1;
    size_t room = sizeof joined - used, rest = strlen(ctx->text);
    if (room > 3) {
        if (rest > room - 3) rest = room - 3; /* cut the end, not the prefix */
        memcpy(joined + used, ": ", 2);
        memcpy(joined + used + 2, ctx->text, rest);
        joined[used + 2 + rest] = 0;
    }
    memcpy(ctx->text, joined, sizeof joined);
}

void progress_begin(Progress *progress, Phase phase, int64_t total) {
    if (!progress) return;
    progress->done = 0;
    progress->total = total;
    progress->phase = phase;
}

void progress_add(Progress *progress, int64_t done) {
    if (progress) progress->done += done;
}

void context_init(Context *ctx) { memset(ctx, 0, sizeof *ctx); }

Code check_cancelled(Context *ctx) {
    if (ctx->cancelled && ctx->cancelled(ctx->user)) return fail(ctx, CODE_CANCELLED, "cancelled");
    return CODE_OK;
}
