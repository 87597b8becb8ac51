/* Why there is no NPU: no loader or an old one, no node, no permission, no driver, another device. */
#include <sys/wait.h>

#include "fake_ze.h"

static Context ctx;
static char fake[128];   /* as current loaders and drivers */
static char before[128]; /* no zeInitDrivers, no versions: as loader 1.8 */

static void test_loaders(void) {
    NpuDevice *device;
    NpuFacts facts;
    char path[128];
    CHECK_REASON(NPU_NO_LOADER, npu_device_open(&ctx, "/nonexistent/libze_loader.so.1", &facts, &device));
    CHECK_SAYS("/nonexistent/libze_loader.so.1");
    CHECK(device == NULL && !strcmp(facts.loader, "/nonexistent/libze_loader.so.1"));
    env("FORGE_ZE_LOADER", "/nonexistent/other.so");
    CHECK_REASON(NPU_NO_LOADER, npu_device_open(&ctx, NULL, &facts, &device));
    CHECK_SAYS("/nonexistent/other.so");
    snprintf(path, sizeof path, "%s/text.so", fake_dir());
    FILE *file = fopen(path, "w");
    fputs("not a library", file);
    fclose(file);
    CHECK_REASON(NPU_NO_LOADER, npu_device_open(&ctx, path, &facts, &device));
    fake_build(path, sizeof path, "too_old", "-DFAKE_OLD -DFAKE_TOO_OLD");
    env("FORGE_ZE_LOADER", path);
    CHECK_REASON(NPU_NO_LOADER, npu_device_open(&ctx, NULL, &facts, &device));
    CHECK_SAYS("lacks zeFenceReset.");
    env("FORGE_ZE_LOADER", before);
    CHECK_OK(&ctx, npu_device_open(&ctx, NULL, &facts, &device));
    CHECK(facts.loader_version[0] == 0 && facts.n_drivers == 1);
    npu_device_unref(device);
    env("FORGE_ZE_LOADER", NULL);
}

/* Old loaders do not know the driver's present name. */
static void test_renamed_driver(void) {
    NpuDevice *device;
    char path[128];
    env("FAKE_FINDS", "libze_intel_npu.so.1");
    CHECK_CODE(&ctx, CODE_DEVICE, npu_device_open(&ctx, before, NULL, &device)); /* it is not installed */
    fake_build(path, sizeof path, "renamed", "-Wl,-soname,libze_intel_npu.so.1");
    void *driver = dlopen(path, RTLD_NOW); /* found by that name from now on */
    CHECK(driver != NULL);
    CHECK_OK(&ctx, npu_device_open(&ctx, before, NULL, &device));
    CHECK(getenv("ZE_ENABLE_ALT_DRIVERS") == NULL);
    npu_device_unref(device);
    env("ZE_ENABLE_ALT_DRIVERS", "another.so"); /* the user's choice stands */
    CHECK_CODE(&ctx, CODE_DEVICE, npu_device_open(&ctx, before, NULL, &device));
    CHECK(!strcmp(getenv("ZE_ENABLE_ALT_DRIVERS"), "another.so"));
    env("ZE_ENABLE_ALT_DRIVERS", NULL);
    env("FAKE_FINDS", NULL);
    dlclose(driver);
}

/* As a user who is not root, whom permissions hold back; root becomes nobody in a child. */
static void as_user(void (*test)(void)) {
    pid_t child = fork();
    if (child == 0) {
        check_failures = 0;
        if (geteuid() == 0 && (setgid(65534) || setuid(65534))) _exit(2);
        test();
        _exit(check_failures != 0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK_EQUAL(status, 0);
}

static char accel[128];

static void open_without_permission(void) {
    NpuDevice *device;
    NpuFacts facts;
    CHECK_REASON(NPU_NO_PERMISSION, npu_device_open(&ctx, fake, &facts, &device));
    CHECK_SAYS("accel0 may not be opened");
    CHECK_SAYS("sudo usermod -aG render $USER");
    CHECK(strstr(facts.node, "/accel0") != NULL && !facts.node_readable);
    CHECK(npu_device_likely());
}

static void test_causes(void) {
    NpuDevice *device;
    NpuFacts facts;
    char node[160];
    snprintf(accel, sizeof accel, "%s/accel", fake_dir());
    env("FORGE_ACCEL_DIR", accel);
    static const char *const ways[] = {"zeInit=0x78000001@0", "zeDriverGet=0x78000001@0", NULL};
    for (int i = 0; i < 3; i++) { /* no node */
        env("FAKE_FAULT", ways[i]);
        env("FAKE_DRIVERS", i == 2 ? "0" : NULL);
        CHECK_REASON(NPU_NO_DRIVER, npu_device_open(&ctx, before, &facts, &device));
        CHECK_SAYS("intel_vpu");
        CHECK(!facts.node[0] && facts.n_drivers == 0);
        CHECK(!npu_device_likely());
    }
    CHECK(!mkdir(accel, 0755));
    CHECK_REASON(NPU_NO_DRIVER, npu_device_open(&ctx, before, &facts, &device));
    CHECK(!npu_device_likely());
    snprintf(node, sizeof node, "%s/accel0", accel);
    FILE *file = fopen(node, "w");
    fclose(file);
    CHECK(!chmod(node, 0));
    as_user(open_without_permission);
    env("FAKE_DRIVERS", NULL);
    env("FAKE_DEVICE", "1"); /* a driver of another device */
    as_user(open_without_permission);
    CHECK(!chmod(node, 0666) && !chmod(accel, 0));
    as_user(open_without_permission); /* the folder itself */
    CHECK(!chmod(accel, 0755));
    CHECK_REASON(NPU_NO_DEVICE, npu_device_open(&ctx, fake, &facts, &device));
    CHECK(facts.node_readable && facts.n_drivers == 1);
    env("FAKE_DEVICE", NULL);
    env("FAKE_DRIVERS", "0"); /* a node, but no driver or one that does not start */
    CHECK_CODE(&ctx, CODE_DEVICE, npu_device_open(&ctx, fake, &facts, &device));
    CHECK(ctx.reason == NPU_NO_DRIVER || ctx.reason == NPU_NO_DEVICE);
    CHECK_SAYS("intel-level-zero-npu");
    env("ZE_ENABLE_ALT_DRIVERS", "/nonexistent/driver.so");
    CHECK(npu_device_likely());
    CHECK_REASON(NPU_NO_DRIVER, npu_device_open(&ctx, fake, &facts, &device));
    CHECK_SAYS("/nonexistent/driver.so");
    env("ZE_ENABLE_ALT_DRIVERS", NULL);
    env("FAKE_DRIVERS", NULL);
    env("FAKE_FAULT", NULL);
    env("FORGE_ACCEL_DIR", NULL);
    static const struct {
        const char *id, *target;
    } ids[] = {{"0x7d1d", "npu3720"}, {"0xad1d", "npu3720"}, {"0x643e", "npu4000"}, {"0xb03e", "npu5010"},
               {"0xfd3e", "npu5010"}, {"0x1234", "npu5010"}, {"0", "npu4000"}};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        env("FAKE_DEVICE_ID", ids[i].id);
        CHECK_OK(&ctx, npu_device_open(&ctx, fake, &facts, &device));
        CHECK(!strcmp(facts.target, ids[i].target));
        npu_device_unref(device);
    }
    env("FAKE_DEVICE_ID", NULL);
}

int main(void) {
    context_init(&ctx);
    fake_build(fake, sizeof fake, "fake", "");
    fake_build(before, sizeof before, "before", "-DFAKE_OLD");
    env("ZE_ENABLE_ALT_DRIVERS", NULL);
    env("FORGE_ZE_LOADER", NULL);
    test_loaders();
    test_causes();
    test_renamed_driver();
    fake_remove();
    return check_done();
}
