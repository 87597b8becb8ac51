/* The kernel's side: /dev/accel/accel<N> of the driver intel_vpu. Level Zero gives the same result without an NPU,
 * without its kernel driver and without permission, so the difference is found here. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "npu/device_internal.h"

#define ACCEL "/dev/accel"

static const char *accel_dir(void) {
    const char *dir = getenv("FORGE_ACCEL_DIR"); /* for tests */
    return dir && *dir ? dir : ACCEL;
}

/* Other accelerators have nodes there too. Unknown: it may be one. */
static bool of_another_driver(const char *name) {
    if (strcmp(accel_dir(), ACCEL)) return false;
    char link[128], target[256];
    snprintf(link, sizeof link, "/sys/class/accel/%.32s/device/driver", name);
    ssize_t n = readlink(link, target, sizeof target - 1);
    if (n <= 0) return false;
    target[n] = 0;
    const char *slash = strrchr(target, '/');
    return strcmp(slash ? slash + 1 : target, "intel_vpu") != 0;
}

/* With several NPUs: one that can be opened, else the first by name. */
void npu_node_find(NpuFacts *facts) {
    facts->node[0] = 0;
    facts->node_readable = false;
    DIR *dir = opendir(accel_dir());
    if (!dir) {
        /* A directory that may not be listed holds what may not be opened. */
        if (errno == EACCES) snprintf(facts->node, sizeof facts->node, "%s/accel0", accel_dir());
        return;
    }
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (strncmp(entry->d_name, "accel", 5) || of_another_driver(entry->d_name)) continue;
        char path[sizeof facts->node];
        int n = snprintf(path, sizeof path, "%s/%s", accel_dir(), entry->d_name);
        if (n < 0 || (size_t)n >= sizeof path) continue;
        bool readable = faccessat(AT_FDCWD, path, R_OK | W_OK, AT_EACCESS) == 0;
        bool better = !facts->node[0] || (readable && !facts->node_readable) ||
                      (readable == facts->node_readable && strcmp(path, facts->node) < 0);
        if (!better) continue;
        memcpy(facts->node, path, sizeof path);
        facts->node_readable = readable;
    }
    closedir(dir);
}

bool npu_device_likely(void) {
    const char *other = getenv("ZE_ENABLE_ALT_DRIVERS");
    if (other && *other) return true;
    NpuFacts facts;
    npu_node_find(&facts);
    return facts.node[0] != 0;
}

static void group_of(const char *node, char *out, size_t bytes) {
    struct stat info;
    struct group entry, *found = NULL;
    char names[1024];
    if (stat(node, &info) == 0 && info.st_gid != 0 &&
        getgrgid_r(info.st_gid, &entry, names, sizeof names, &found) == 0 && found)
        snprintf(out, bytes, "%s", found->gr_name);
    else
        snprintf(out, bytes, "render");
}

static bool driver_installed(char *why, size_t bytes) {
    static const char *const names[] = {"libze_intel_npu.so.1", "libze_intel_vpu.so.1"};
    why[0] = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *library = dlopen(names[i], RTLD_LAZY | RTLD_LOCAL);
        if (library) {
            dlclose(library);
            return true;
        }
        const char *text = dlerror();
        if (!i && text) snprintf(why, bytes, "%s", text);
    }
    return false;
}

Code npu_node_fail(Context *ctx, const NpuFacts *facts, ZeResult result) {
    const char *name = ze_result_name(result), *other = getenv("ZE_ENABLE_ALT_DRIVERS");
    NpuReason reason = ze_reason(result);
    if (other && *other)
        return fail_device(ctx, reason == NPU_FAILED ? NPU_NO_DRIVER : reason,
                           "no NPU driver: the one that ZE_ENABLE_ALT_DRIVERS names (%s) was not loaded or failed to "
                           "start (%s 0x%x)",
                           other, name, result);
    if (!facts->node[0])
        return fail_device(ctx, NPU_NO_DRIVER,
                           "there is no %s/accel*: this machine has no NPU, or the kernel driver intel_vpu is not "
                           "loaded (`sudo modprobe intel_vpu`; Linux 6.6 or newer; `dmesg | grep vpu` says more)",
                           accel_dir());
    if (!facts->node_readable) {
        char group[64];
        group_of(facts->node, group, sizeof group);
        return fail_device(ctx, NPU_NO_PERMISSION,
                           "%s may not be opened by this user. Add the user to the `%s` group: `sudo usermod -aG %s "
                           "$USER`, then log in again",
                           facts->node, group, group);
    }
    char why[256];
    if (!driver_installed(why, sizeof why))
        return fail_device(ctx, NPU_NO_DRIVER,
                           "%s is there, but no NPU driver for Level Zero (%s). Install Intel's packages "
                           "intel-level-zero-npu, intel-driver-compiler-npu and intel-fw-npu "
                           "(https://github.com/intel/linux-npu-driver/releases)",
                           facts->node, why);
    return fail_device(ctx, reason == NPU_FAILED ? NPU_NO_DEVICE : reason,
                       "the NPU driver does not start (%s 0x%x) although %s can be opened: firmware, kernel driver and "
                       "intel-level-zero-npu may not fit together; `dmesg | grep vpu` says more",
                       name, result, facts->node);
}
