/* Status codes and the compilation context that carries the error text.
 *
 * Every fallible function takes a `Context *` first and returns a `Code` that must be looked at. The text of the first
 * failure is kept in the context; one place (python/errors.c) turns codes into Python exceptions. */
#ifndef FORGE_BASE_STATUS_H
#define FORGE_BASE_STATUS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MUST_USE __attribute__((warn_unused_result))
#define PRINTF_LIKE(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#define MUST_USE
#define PRINTF_LIKE(fmt, first)
#endif

typedef enum Code {
    CODE_OK = 0,
    CODE_INVALID,     /* malformed input: ValueError */
    CODE_TYPE,        /* wrong type or dtype: TypeError */
    CODE_NO_MEMORY,   /* MemoryError */
    CODE_UNSUPPORTED, /* known, but not here: NotImplementedError */
    CODE_INTERNAL,    /* a bug of ours: RuntimeError */
    CODE_INDEX,       /* an index that is out of range at run time (gather, embedding): IndexError */
    CODE_HOST,        /* a host callback failed and has set its own exception */
    CODE_CANCELLED,   /* KeyboardInterrupt was seen */
    CODE_DEVICE,      /* an accelerator is missing or failed: NpuError, with Context.reason */
} Code;

enum { ERROR_TEXT_MAX = 1024 };

/* How far a compilation is: numbers that another thread may read at any time. `done` of `total` are passes, graphs of
 * the NPU, or bytes of packed weights. */
typedef enum Phase { PHASE_NONE, PHASE_TABLE, PHASE_PASSES, PHASE_PLAN, PHASE_NPU, PHASE_PACK } Phase;
typedef struct Progress {
    _Atomic int64_t phase, done, total;
} Progress;
/* With NULL nobody is looking. */
void progress_begin(Progress *progress, Phase phase, int64_t total);
void progress_add(Progress *progress, int64_t done);

typedef struct Context {
    Code code; /* of the first failure, CODE_OK before it */
    char text[ERROR_TEXT_MAX];
    uint32_t reason; /* with CODE_DEVICE: an NpuReason */
    /* Polled between passes and nodes; returns true when the caller wants to stop. May be NULL. */
    bool (*cancelled)(void *user);
    void *user;
    Progress *progress; /* of the compilation; NULL: nobody is looking */
    /* Test switch: when not 0, the allocation with this number fails (counts down in arena.c). */
    uint64_t fail_allocation;
} Context;

/* Records the failure (the first one wins) and returns `code`, so that callers can `return fail(...)`. */
Code fail(Context *ctx, Code code, const char *format, ...) PRINTF_LIKE(3, 4);
/* The same for CODE_DEVICE, with its reason. */
Code fail_device(Context *ctx, uint32_t reason, const char *format, ...) PRINTF_LIKE(3, 4);
/* Puts "prefix: " before the text that is there. Used where a node or source line becomes known. */
void fail_prefix(Context *ctx, const char *format, ...) PRINTF_LIKE(2, 3);
void context_init(Context *ctx);
MUST_USE Code check_cancelled(Context *ctx);

#define TRY(expr)                                                                                                      \
    do {                                                                                                               \
        Code try_code_ = (expr);                                                                                       \
        if (try_code_ != CODE_OK) return try_code_;                                                                    \
    } while (0)

#endif
