/* Offline driver for Intel's NPU compiler (the VCL C API), run under wine. A program of its own, no part of Forge-UGC.
 *
 * Build: x86_64-w64-mingw32-gcc -O2 -s -o npu_compile.exe npu_compile.c
 * Use:   wine64 npu_compile.exe LOADER.dll MODEL.xml [key=value ...]
 *           platform=NPU4000    target: NPU3720, NPU4000, NPU5010, NPU5020
 *           bin=FILE            weights (default: MODEL.bin; "none" = a model without weights)
 *           out=FILE            where to write the blob
 *           config=STR          more options, e.g. 'PERFORMANCE_HINT="LATENCY" NPU_TILES="2"'
 *           log=0..5            VCL log level (0 none .. 3 info .. 5 trace); the compiler proper
 *                               logs by config=LOG_LEVEL="LOG_INFO"
 *           query=1             vclQueryNetwork instead of compiling
 *           options=1           print the option names the compiler knows, and stop
 *           json=FILE           write the one-line JSON result here (default: stdout)
 *
 * The types below follow vcl.h of openvinotoolkit/openvino, Apache-2.0
 * (src/plugins/intel_npu/src/utils/include/intel_npu/utils/vcl/vcl.h), API 7.10.
 */
#include <windows.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <psapi.h>

typedef struct {
    uint16_t major, minor;
} ver_t;
typedef struct {
    const char *id;
    ver_t version;
    uint32_t opsets;
} props_t;
typedef struct {
    uint64_t size;
    uint32_t deviceID;
    uint16_t revision;
    uint32_t tileCount;
} device_t;
typedef struct {
    ver_t version;
    int debugLevel;
} cdesc_t;
typedef struct {
    const uint8_t *ir;
    uint64_t irSize;
    const char *opt;
    uint64_t optSize;
} desc_t;
typedef struct alloc_s {
    uint8_t *(*allocate)(struct alloc_s *, uint64_t);
    void (*deallocate)(struct alloc_s *, uint8_t *);
} alloc_t;
typedef void *h_t;

static uint8_t *my_alloc(alloc_t *a, uint64_t n) {
    (void)a;
    return VirtualAlloc(NULL, n, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
}
static void my_free(alloc_t *a, uint8_t *p) {
    (void)a;
    VirtualFree(p, 0, MEM_RELEASE);
}

static double now(void) {
    LARGE_INTEGER f, c;
    QueryPerformanceFrequency(&f);
    QueryPerformanceCounter(&c);
    return (double)c.QuadPart / (double)f.QuadPart;
}

static char *slurp(const char *path, uint64_t *n) {
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    _fseeki64(f, 0, SEEK_END);
    *n = (uint64_t)_ftelli64(f);
    _fseeki64(f, 0, SEEK_SET);
    char *p = malloc(*n + 1);
    if (p && fread(p, 1, *n, f) != *n) {
        free(p);
        p = NULL;
    }
    if (p) p[*n] = 0;
    fclose(f);
    return p;
}

static void json_str(FILE *o, const char *s) { /* a JSON string literal */
    fputc('"', o);
    for (; s && *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\')
            fprintf(o, "\\%c", c);
        else if (c == '\n')
            fputs("\\n", o);
        else if (c < 32)
            fputc(' ', o);
        else
            fputc(c, o);
    }
    fputc('"', o);
}

/* The compiler wants two flags in the model's own rt_info: without is_new_api it
 * runs a legacy pre-processing step that needs per-port precisions and layouts. */
static char *add_rt_info(char *xml, uint64_t *n) {
    static const char ins[] = "<is_new_api value=\"true\" /><use_indices_for_io_metadata value=\"true\" />";
    if (strstr(xml, "<is_new_api")) return xml;
    char *end = NULL, *p = xml, *edges = xml;
    while ((p = strstr(p, "</edges>"))) {
        edges = p;
        p += 8;
    } /* last one: sub-graphs come earlier */
    while ((p = strstr(p ? p : edges, "</net>"))) {
        end = p;
        p += 6;
    }
    if (!end) return xml;
    char *rt = strstr(edges, "<rt_info>");
    char *out = malloc(*n + sizeof ins + 64);
    size_t at;
    const char *pre = "", *post = "";
    if (rt && rt < end)
        at = (size_t)(rt + 9 - xml);
    else {
        at = (size_t)(end - xml);
        pre = "<rt_info>";
        post = "</rt_info>";
    }
    memcpy(out, xml, at);
    int k = sprintf(out + at, "%s%s%s", pre, ins, post);
    memcpy(out + at + k, xml + at, *n - at + 1);
    *n += (uint64_t)k;
    free(xml);
    return out;
}

#define SYM(ret, name, ...) ret (*name)(__VA_ARGS__) = (void *)GetProcAddress(lib, #name)

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: npu_compile.exe LOADER.dll MODEL.xml [key=value ...]\n");
        return 2;
    }
    const char *platform = "NPU4000", *bin = NULL, *outp = NULL, *config = "", *json = NULL;
    int log = 1, query = 0, options = 0;
    for (int i = 3; i < argc; i++) {
        char *a = argv[i];
        if (!strncmp(a, "platform=", 9))
            platform = a + 9;
        else if (!strncmp(a, "bin=", 4))
            bin = a + 4;
        else if (!strncmp(a, "out=", 4))
            outp = a + 4;
        else if (!strncmp(a, "log=", 4))
            log = atoi(a + 4);
        else if (!strncmp(a, "query=", 6))
            query = atoi(a + 6);
        else if (!strncmp(a, "options=", 8))
            options = atoi(a + 8);
        else if (!strncmp(a, "config=", 7))
            config = a + 7;
        else if (!strncmp(a, "json=", 5))
            json = a + 5;
        else {
            fprintf(stderr, "unknown argument %s\n", a);
            return 2;
        }
    }

    HMODULE lib = LoadLibraryExA(argv[1], NULL, LOAD_WITH_ALTERED_SEARCH_PATH);
    if (!lib) {
        fprintf(stderr, "cannot load %s: error %lu\n", argv[1], GetLastError());
        return 3;
    }
    SYM(int, vclGetVersion, ver_t *, ver_t *);
    SYM(int, vclCompilerCreate, cdesc_t *, device_t *, h_t *, h_t *);
    SYM(int, vclCompilerGetProperties, h_t, props_t *);
    SYM(int, vclLogHandleGetString, h_t, size_t *, char *);
    SYM(int, vclGetCompilerSupportedOptions, h_t, char *, uint64_t *);
    SYM(int, vclQueryNetworkCreate, h_t, desc_t, h_t *);
    SYM(int, vclQueryNetwork, h_t, uint8_t *, uint64_t *);
    SYM(int, vclQueryNetworkDestroy, h_t);
    SYM(int, vclAllocatedExecutableCreate4, h_t, desc_t, alloc_t *, uint8_t **, uint64_t *, h_t *);
    SYM(int, vclExecutableGetCompatibilityString, h_t, char *, uint64_t *);
    if (!vclGetVersion || !vclCompilerCreate || !vclAllocatedExecutableCreate4) {
        fprintf(stderr, "not a VCL library\n");
        return 3;
    }

    ver_t cv = {0, 0}, pv = {0, 0};
    vclGetVersion(&cv, &pv);
    cdesc_t cd = {cv, log};
    /* offline: no device id, unknown stepping, no tile limit - NPU_PLATFORM decides */
    device_t dd = {sizeof dd, 0, 0xFFFF, 0xFFFFFFFFu};
    h_t comp = NULL, lh = NULL, exe = NULL;
    double t0 = now();
    int r = vclCompilerCreate(&cd, &dd, &comp, &lh);
    if (r) {
        fprintf(stderr, "vclCompilerCreate: 0x%x\n", r);
        return 4;
    }
    props_t pr = {0};
    vclCompilerGetProperties(comp, &pr);
    double t_create = now() - t0;
    fprintf(stderr, "VCL %d.%d profiling %d.%d compiler id %s version %d.%d opset %u (created in %.2f s)\n", cv.major,
            cv.minor, pv.major, pv.minor, pr.id ? pr.id : "?", pr.version.major, pr.version.minor, pr.opsets, t_create);

    if (options) {
        uint64_t n = 0;
        vclGetCompilerSupportedOptions(comp, NULL, &n);
        char *s = calloc(n + 1, 1);
        vclGetCompilerSupportedOptions(comp, s, &n);
        puts(s);
        return 0;
    }

    /* model buffer: u16 major, u16 minor (compiler properties), u32 count = 2,
     *               u64 xml size, xml, u64 weights size, weights */
    uint64_t xn = 0, wn = 0;
    char path[4096];
    char *xml = slurp(argv[2], &xn);
    if (!xml) {
        fprintf(stderr, "cannot read %s\n", argv[2]);
        return 2;
    }
    xml = add_rt_info(xml, &xn);
    if (!bin) {
        snprintf(path, sizeof path, "%s", argv[2]);
        char *d = strrchr(path, '.');
        if (d) strcpy(d, ".bin");
        bin = path;
    }
    FILE *wf = strcmp(bin, "none") ? fopen(bin, "rb") : NULL;
    if (!wf && strcmp(bin, "none")) {
        fprintf(stderr, "cannot read %s (bin=none if the model has no weights)\n", bin);
        return 2;
    }
    if (wf) {
        _fseeki64(wf, 0, SEEK_END);
        wn = (uint64_t)_ftelli64(wf);
        _fseeki64(wf, 0, SEEK_SET);
    }
    uint64_t total = 4 + 4 + 8 + xn + 8 + wn;
    uint8_t *buf = malloc(total), *p = buf;
    uint32_t two = 2;
    memcpy(p, &pr.version, 4);
    p += 4;
    memcpy(p, &two, 4);
    p += 4;
    memcpy(p, &xn, 8);
    p += 8;
    memcpy(p, xml, xn);
    p += xn;
    memcpy(p, &wn, 8);
    p += 8;
    if (wf) {
        if (fread(p, 1, wn, wf) != wn) {
            fprintf(stderr, "cannot read %s\n", bin);
            return 2;
        }
        fclose(wf);
    }

    char *opt = malloc(strlen(config) + 512);
    sprintf(opt,
            "--inputs_precisions=\"\" --inputs_layouts=\"\" --outputs_precisions=\"\" --outputs_layouts=\"\" "
            "--config NPU_PLATFORM=\"%s\" %s",
            platform, config);
    desc_t d = {buf, total, opt, strlen(opt)};

    uint8_t *blob = NULL;
    uint64_t blobn = 0;
    char *err = NULL, *extra = NULL;
    t0 = now();
    if (query) {
        h_t q = NULL;
        d.opt += strstr(opt, "--config") - opt;
        d.optSize = strlen(d.opt);
        r = vclQueryNetworkCreate(comp, d, &q);
        if (!r) {
            uint64_t n = 0;
            r = vclQueryNetwork(q, NULL, &n);
            extra = calloc(n + 1, 1);
            if (!r) r = vclQueryNetwork(q, (uint8_t *)extra, &n);
            vclQueryNetworkDestroy(q);
        }
    } else {
        alloc_t al = {my_alloc, my_free};
        r = vclAllocatedExecutableCreate4(comp, d, &al, &blob, &blobn, &exe);
    }
    double secs = now() - t0;
    if (r) {
        size_t n = 0;
        vclLogHandleGetString(lh, &n, NULL);
        err = calloc(n + 64, 1);
        if (n)
            vclLogHandleGetString(lh, &n, err);
        else
            sprintf(err, "VCL result 0x%x", r);
    } else if (exe && vclExecutableGetCompatibilityString) {
        uint64_t n = 0;
        vclExecutableGetCompatibilityString(exe, NULL, &n);
        if (n) {
            extra = calloc(n + 1, 1);
            vclExecutableGetCompatibilityString(exe, extra, &n);
        }
    }
    if (!r && blob && outp) {
        FILE *f = fopen(outp, "wb");
        if (!f || fwrite(blob, 1, blobn, f) != blobn) {
            fprintf(stderr, "cannot write %s\n", outp);
            return 2;
        }
        fclose(f);
    }
    PROCESS_MEMORY_COUNTERS mc = {0};
    K32GetProcessMemoryInfo(GetCurrentProcess(), &mc, sizeof mc);
    FILETIME f1, f2, fk, fu;
    GetProcessTimes(GetCurrentProcess(), &f1, &f2, &fk, &fu);
    double cpu = 1e-7 * (double)((((uint64_t)fk.dwHighDateTime + fu.dwHighDateTime) << 32) + fk.dwLowDateTime +
                                 (uint64_t)fu.dwLowDateTime);
    FILE *o = json ? fopen(json, "wb") : stdout;
    if (!o) o = stdout;
    fprintf(o, "{\"platform\": ");
    json_str(o, platform);
    fprintf(o,
            ", \"ok\": %s, \"seconds\": %.2f, \"cpu_seconds\": %.2f, \"blob_bytes\": %llu, \"peak_mb\": %llu, "
            "\"result\": \"0x%x\", \"%s\": ",
            r ? "false" : "true", secs, cpu, (unsigned long long)blobn,
            (unsigned long long)(mc.PeakWorkingSetSize >> 20), r, query ? "supported" : "compat");
    json_str(o, extra ? extra : "");
    fprintf(o, ", \"error\": ");
    if (err)
        json_str(o, err);
    else
        fprintf(o, "null");
    fprintf(o, "}\n");
    fflush(o);
    if (json) fclose(o);
    fflush(stderr);
    /* leave at once: orderly tear-down of the compiler buys nothing here */
    TerminateProcess(GetCurrentProcess(), r ? 1 : 0);
    return 0;
}
