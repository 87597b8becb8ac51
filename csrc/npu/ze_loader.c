#include "npu/ze_loader.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "npu/device.h"

typedef struct Symbol {
    const char *name;
    size_t offset; /* in ZeLoader */
    bool required;
} Symbol;

static const Symbol symbols[] = {
#define X(name, parameters) {#name, offsetof(ZeLoader, name), true},
    ZE_REQUIRED(X)
#undef X
#define X(name, parameters) {#name, offsetof(ZeLoader, name), false},
        ZE_OPTIONAL(X)
#undef X
};

static const char *const usual_names[] = {"libze_loader.so.1", "libze_loader.so"};

#define INSTALL "Debian and Ubuntu: `apt install libze1`; Fedora: `dnf install oneapi-level-zero`"

/* dlopen by each name; `tried` gets what went wrong with each. */
static void *open_library(const char *path, Text *tried, const char **name) {
    for (size_t i = 0; i < (path ? 1 : sizeof usual_names / sizeof *usual_names); i++) {
        *name = path ? path : usual_names[i];
        void *library = dlopen(*name, RTLD_NOW | RTLD_LOCAL);
        if (library) return library;
        const char *why = dlerror();
        text_add(tried, "%s%s", i ? "; " : "", why ? why : *name);
    }
    return NULL;
}

/* Fills in the functions; the names of required ones that are missing go to `missing`. */
static void find_symbols(ZeLoader *loader, Text *missing) {
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address = dlsym(loader->library, symbols[i].name);
        memcpy((char *)loader + symbols[i].offset, &address, sizeof address);
        if (!address && symbols[i].required) text_add(missing, "%s%s", missing->size ? ", " : "", symbols[i].name);
    }
}

Code ze_loader_open(Context *ctx, const char *path, ZeLoader *out, char *found, size_t found_bytes) {
    memset(out, 0, sizeof *out);
    if (!path) path = getenv("FORGE_ZE_LOADER");
    if (path && !*path) path = NULL;
    snprintf(found, found_bytes, "%s", path ? path : "");
    Text problem;
    text_init(&problem);
    const char *name;
    Code code = CODE_OK;
    out->library = open_library(path, &problem, &name);
    if (!out->library) {
        code = text_done(ctx, &problem);
        if (code == CODE_OK && path)
            code = fail_device(ctx, NPU_NO_LOADER, "the Level Zero loader cannot be opened: %s", problem.data);
        else if (code == CODE_OK)
            code = fail_device(ctx, NPU_NO_LOADER,
                               "the Level Zero loader is not installed (%s). Install it: " INSTALL
                               ", or name it in FORGE_ZE_LOADER",
                               problem.data);
    } else {
        find_symbols(out, &problem);
        if (problem.size || problem.failed) {
            code = text_done(ctx, &problem);
            if (code == CODE_OK)
                code = fail_device(ctx, NPU_NO_LOADER,
                                   "%s is not a Level Zero loader or too old: it lacks %s. Version 1.8 or newer is "
                                   "needed: " INSTALL,
                                   name, problem.data);
            ze_loader_close(out);
        } else {
            Dl_info info;
            void *function;
            memcpy(&function, &out->zeInit, sizeof function);
            if (dladdr(function, &info) && info.dli_fname) snprintf(found, found_bytes, "%s", info.dli_fname);
        }
    }
    text_destroy(&problem);
    return code;
}

void ze_loader_close(ZeLoader *loader) {
    if (loader->library) dlclose(loader->library);
    memset(loader, 0, sizeof *loader);
}

/* Current loaders: one call, for the NPU only. It fails with some drivers that zeInit takes. */
static ZeResult init_drivers(const ZeLoader *loader, ZeDriver *out, uint32_t max, uint32_t *count) {
    ZeDesc desc = {.type = ZE_TYPE_INIT_DRIVERS, .flags = ZE_INIT_DRIVERS_NPU};
    uint32_t n = 0;
    ZeResult r = loader->zeInitDrivers(&n, NULL, &desc);
    if (r != ZE_SUCCESS || !n) return r;
    if (n > max) n = max;
    r = loader->zeInitDrivers(&n, out, &desc);
    if (r == ZE_SUCCESS) *count = n < max ? n : max;
    return r;
}

/* The NPU driver's library has been libze_intel_npu.so.1 since its release 1.16; loaders before 1.17.17 know only the
 * name that it had before, and would not find it. They take names from the environment. */
static bool must_name_driver(const ZeLoader *loader) {
    const char *named = getenv("ZE_ENABLE_ALT_DRIVERS");
    if (loader->zeInitDrivers || (named && *named)) return false;
    void *old = dlopen("libze_intel_vpu.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (old) {
        dlclose(old);
        return false;
    }
    return dlopen("libze_intel_npu.so.1", RTLD_LAZY | RTLD_LOCAL) != NULL; /* stays open: the loader wants it next */
}

static ZeResult init(const ZeLoader *loader) {
    bool name = must_name_driver(loader);
    if (name) setenv("ZE_ENABLE_ALT_DRIVERS", "libze_intel_npu.so.1,libze_intel_gpu.so.1", 1);
    ZeResult r = loader->zeInit(ZE_INIT_NPU_ONLY);
    if (name) unsetenv("ZE_ENABLE_ALT_DRIVERS");
    return r;
}

ZeResult ze_loader_drivers(const ZeLoader *loader, ZeDriver *out, uint32_t max, uint32_t *count) {
    *count = 0;
    if (loader->zeInitDrivers && init_drivers(loader, out, max, count) == ZE_SUCCESS && *count) return ZE_SUCCESS;
    *count = 0;
    ZeResult r = init(loader);
    uint32_t n = 0;
    if (r == ZE_SUCCESS) r = loader->zeDriverGet(&n, NULL);
    if (r != ZE_SUCCESS || !n) return r;
    if (n > max) n = max;
    r = loader->zeDriverGet(&n, out);
    if (r == ZE_SUCCESS) *count = n < max ? n : max;
    return r;
}

void ze_loader_version(const ZeLoader *loader, char *out, size_t bytes) {
    enum { COMPONENTS = 8 };
    ZelVersion versions[COMPONENTS];
    size_t n = COMPONENTS;
    snprintf(out, bytes, "%s", "");
    if (!loader->zelLoaderGetVersions || loader->zelLoaderGetVersions(&n, versions) != ZE_SUCCESS) return;
    for (size_t i = 0; i < n && i < COMPONENTS; i++)
        if (!strncmp(versions[i].component, "loader", sizeof versions[i].component))
            snprintf(out, bytes, "%d.%d.%d", versions[i].major, versions[i].minor, versions[i].patch);
}

const char *ze_result_name(ZeResult result) {
    switch (result) {
#define X(name, value)                                                                                                 \
    case value: return #name;
        ZE_RESULTS(X)
#undef X
    default: return "unknown result";
    }
}
