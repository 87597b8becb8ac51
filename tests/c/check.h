/* Checks for the C tests: a failure is printed and counted, the test goes on; main ends with `return check_done();`. */
#ifndef FORGE_TESTS_CHECK_H
#define FORGE_TESTS_CHECK_H

#include <stdio.h>
#include <string.h>

#include "base/status.h"

static int check_failures;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            check_failures++;                                                                                          \
        }                                                                                                              \
    } while (0)

#define CHECK_EQUAL(a, b)                                                                                              \
    do {                                                                                                               \
        long long check_a = (long long)(a), check_b = (long long)(b);                                                  \
        if (check_a != check_b) {                                                                                      \
            fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #a, check_a, check_b);                \
            check_failures++;                                                                                          \
        }                                                                                                              \
    } while (0)

/* The call must give `want`; for failures the context must say so too. The context is then ready for the next call. */
#define CHECK_CODE(ctx, want, call)                                                                                    \
    do {                                                                                                               \
        Code check_code = (call);                                                                                      \
        if (check_code != (want) || (ctx)->code != (want)) {                                                           \
            fprintf(stderr, "%s:%d: %s gives %d (%s), not %d\n", __FILE__, __LINE__, #call, (int)check_code,           \
                    (ctx)->text, (int)(want));                                                                         \
            check_failures++;                                                                                          \
        }                                                                                                              \
        (ctx)->code = CODE_OK;                                                                                         \
    } while (0)

#define CHECK_OK(ctx, call) CHECK_CODE(ctx, CODE_OK, call)

static inline int check_done(void) {
    if (check_failures) fprintf(stderr, "%d checks failed\n", check_failures);
    return check_failures != 0;
}

#endif
