/* Builds fake_ze/fake_ze.c, a loader and driver that do as the environment says, and looks into it. */
#ifndef FORGE_TESTS_FAKE_ZE_H
#define FORGE_TESTS_FAKE_ZE_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "npu/device.h"

static char fake_folder[64];

/* The folder of this test's files, made at the first call; fake_remove() removes it. */
static inline const char *fake_dir(void) {
    if (!fake_folder[0]) {
        snprintf(fake_folder, sizeof fake_folder, "/tmp/forge-ze-XXXXXX");
        if (!mkdtemp(fake_folder) || chmod(fake_folder, 0755)) abort();
    }
    return fake_folder;
}

static inline void fake_remove(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", fake_dir());
    if (system(command)) abort();
}

/* Path of the library, built with `flags`. */
static inline const char *fake_build(char *path, size_t bytes, const char *name, const char *flags) {
    char command[2048];
    const char *here = __FILE__, *slash = strrchr(here, '/'), *cc = getenv("CC");
    int n = slash ? (int)(slash - here) : 1;
    snprintf(path, bytes, "%s/%s.so", fake_dir(), name);
    snprintf(command, sizeof command,
             "%s -shared -fPIC -O1 -g -std=c11 -D_GNU_SOURCE -pthread -I'%.*s/../../csrc' %s '%.*s/fake_ze/fake_ze.c' "
             "-o '%s'",
             cc && *cc ? cc : "gcc", n, slash ? here : ".", flags, n, slash ? here : ".", path);
    if (system(command)) {
        fprintf(stderr, "cannot build the fake driver: %s\n", command);
        exit(1);
    }
    return path;
}

/* A variable of the library, which must be loaded. */
static inline void *fake_symbol(const char *path, const char *name) {
    void *library = dlopen(path, RTLD_NOW), *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        exit(1);
    }
    dlclose(library);
    return found;
}

/* setenv for a while: env("A", "1") ... env("A", NULL). */
static inline void env(const char *name, const char *value) {
    if (value ? setenv(name, value, 1) : unsetenv(name)) abort();
}

/* A failure of the device with this reason, in the variable `ctx`; what its text says. */
#define CHECK_REASON(want, call)                                                                                       \
    do {                                                                                                               \
        CHECK_CODE(&ctx, CODE_DEVICE, call);                                                                           \
        if (ctx.reason != (want)) fprintf(stderr, "%s: %s\n", npu_reason_name((NpuReason)ctx.reason), ctx.text);       \
        CHECK_EQUAL(ctx.reason, want);                                                                                 \
    } while (0)
#define CHECK_SAYS(part)                                                                                               \
    do {                                                                                                               \
        if (!strstr(ctx.text, part)) fprintf(stderr, "%s:%d: not in: %s\n", __FILE__, __LINE__, ctx.text);             \
        CHECK(strstr(ctx.text, part) != NULL);                                                                         \
    } while (0)

#endif
