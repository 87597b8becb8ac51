/* Compiling graphs against a fake loader and driver: what the compiler says, types of arguments, options, the blob
 * cache. */
#include "npu/cache.h"
#include "ze_use.h"

static void test_compile_failures(void) {
    static const char *const versions[] = {"1.4", "1.11", "1.12"};
    env("FAKE_FAULT", "compile=0x78000004@0");
    for (int v = 0; v < 3; v++) {
        env("FAKE_EXTENSION", versions[v]);
        CHECK_REASON(NPU_COMPILE_FAILED, use(&ctx, NULL, NULL));
        CHECK_SAYS("the sum of model.py:3");
        CHECK_SAYS("INVALID_ARGUMENT (0x78000004), without a message");
        env("FAKE_LOG", "600");
        CHECK_REASON(NPU_COMPILE_FAILED, use(&ctx, NULL, NULL));
        CHECK_SAYS("abcdefghijklm");
        CHECK(strlen(ctx.text) > 660);
        env("FAKE_LOG", "50000");
        CHECK_REASON(NPU_COMPILE_FAILED, use(&ctx, NULL, NULL));
        CHECK_SAYS("It says (the first 550 of 50000 bytes):\nabcdef");
        CHECK_REASON(NPU_COMPILE_FAILED, use(&ctx, fake_dir(), NULL));
        char path[128];
        snprintf(path, sizeof path, "%s/last-failure.log", fake_dir());
        CHECK_SAYS("It says (50000 bytes, all in /");
        CHECK_SAYS(path);
        struct stat info;
        CHECK(!stat(path, &info) && info.st_size == 50000);
        env("FAKE_LOG", NULL);
        CHECK_EQUAL(live(), 0);
    }
    env("FAKE_EXTENSION", NULL);
    env("FAKE_FAULT", "compile=0x70000002@0");
    CHECK_REASON(NPU_NO_MEMORY, use(&ctx, NULL, NULL));
    env("FAKE_FAULT", "compile=0x78000002@0");
    CHECK_REASON(NPU_VERSION_MISMATCH, use(&ctx, NULL, NULL));
    CHECK_SAYS("of one release");
    env("FAKE_LOG", "50");
    CHECK_REASON(NPU_VERSION_MISMATCH, use(&ctx, NULL, NULL));
    CHECK_SAYS("of one release. It says:\nabcdef");
    env("FAKE_LOG", NULL);
    env("FAKE_FAULT", NULL);
    env("FAKE_COMPILER", "0");
    CHECK_REASON(NPU_NO_COMPILER, use(&ctx, NULL, NULL));
    CHECK_SAYS("intel-driver-compiler-npu");
    env("FAKE_COMPILER", NULL);
}

static void test_elements(void) {
    static const struct {
        const char *element;
        DType dtype;
        bool i4;
        int64_t bytes;
    } cases[] = {{"0x1", DTYPE_F32, false, 16}, {"0x2", DTYPE_F16, false, 8},  {"0x4", DTYPE_U8, false, 4},
                 {"0x5", DTYPE_I32, false, 16}, {"0x6", DTYPE_I16, false, 8},  {"0x7", DTYPE_I8, false, 4},
                 {"0x9", DTYPE_BF16, false, 8}, {"0xb", DTYPE_U8, true, 2},    {"0xc", DTYPE_U8, true, 2},
                 {"0xe", DTYPE_BOOL, false, 4}, {"0xf", DTYPE_F64, false, 32}, {"0x11", DTYPE_I64, false, 32}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        env("FAKE_ELEMENT", cases[i].element);
        Use u = {0};
        CHECK_OK(&ctx, use_begin(&ctx, &u, NULL));
        const NpuArgument *a = npu_graph_argument(u.graph, 0);
        CHECK_EQUAL(a->dtype, cases[i].dtype);
        CHECK_EQUAL(a->i4, cases[i].i4);
        CHECK_EQUAL(a->bytes, cases[i].bytes);
        use_end(&u);
    }
    env("FAKE_ELEMENT", "0x10"); /* u64: no type of ours */
    CHECK_REASON(NPU_COMPILE_FAILED, use(&ctx, NULL, NULL));
    env("FAKE_ELEMENT", NULL);
}

static Code create_with(NpuDevice *device, const char *config) {
    NpuGraph *graph;
    NpuGraphDesc desc = desc_of(NULL);
    desc.config = config;
    Code code = npu_graph_create(&ctx, device, &desc, &graph, NULL);
    npu_graph_destroy(graph);
    return code;
}

static void test_options(void) {
    NpuDevice *device;
    CHECK_OK(&ctx, npu_device_open(&ctx, fake, NULL, &device));
    CHECK_OK(&ctx, create_with(device, "NPU_TILES=\"2\" NPU_TURBO=\"YES\""));
    CHECK(strstr(fake_symbol(fake, "fake_flags"), " --config NPU_TILES=\"2\" NPU_TURBO=\"YES\"") != NULL);
    CHECK_OK(&ctx, create_with(device, ""));
    CHECK(!strstr(fake_symbol(fake, "fake_flags"), "--config"));
    CHECK_CODE(&ctx, CODE_INVALID, create_with(device, "NPU_TILES=\"2\" TYPO=\"1\""));
    CHECK_SAYS("does not know the option TYPO");
    static const char *const malformed[] = {
        "NPU_TILES", "NPU_TILES=2", "NPU_TILES=\"2", "NPU_TILES=\"2\"NPU_TURBO=\"1\"", "=\"2\"", "NPU_TILES=\"2\" ;"};
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        CHECK_CODE(&ctx, CODE_INVALID, create_with(device, malformed[i]));
        CHECK_SAYS("NAME=\"VALUE\"");
    }
    npu_device_unref(device);
    env("FAKE_EXTENSION", "1.10"); /* cannot be asked: the compiler would say */
    CHECK_OK(&ctx, npu_device_open(&ctx, fake, NULL, &device));
    CHECK_OK(&ctx, create_with(device, "TYPO=\"1\""));
    npu_device_unref(device);
    env("FAKE_EXTENSION", NULL);
    CHECK_EQUAL(live(), 0);
}

/* A copy of what the graph was compiled to. `from`: as in npu_graph_blob. */
static NpuBlob blob_of(const char *cache, NpuOrigin from, char *copy, size_t room) {
    Use u = {0};
    NpuBlob blob;
    void *own;
    CHECK_OK(&ctx, use_begin(&ctx, &u, cache));
    CHECK_EQUAL(u.made.origin, from);
    CHECK_OK(&ctx, npu_graph_blob(&ctx, u.graph, cache, &blob, &own));
    CHECK(blob.data && blob.bytes && blob.bytes <= room);
    if (blob.data && blob.bytes <= room) memcpy(copy, blob.data, blob.bytes);
    blob.data = copy;
    CHECK(hash_equal(blob.checksum, hash_of(copy, blob.bytes)));
    free(own);
    use_end(&u);
    return blob;
}

static int refusals; /* how many graphs are not accepted */
static Code refuse(Context *c, void *user, const NpuGraph *graph) {
    (void)user;
    CHECK_EQUAL(npu_graph_arguments(graph), 3);
    return refusals-- > 0 ? fail_device(c, NPU_COMPILE_FAILED, "not what I wanted") : CODE_OK;
}

/* Blobs of the caller. */
static void test_given_blobs(void) {
    char dir[128], copy[64];
    NpuMade made;
    snprintf(dir, sizeof dir, "%s/never/made", fake_dir());
    static const char *const versions[] = {"1.4", "1.7", "1.16"};
    for (int v = 0; v < 3; v++) {
        env("FAKE_EXTENSION", versions[v]);
        NpuBlob blob = blob_of(NULL, NPU_COMPILED, copy, sizeof copy);
        use_blobs = &blob;
        int count = compiled();
        CHECK_OK(&ctx, use_made(&ctx, dir, &made));
        CHECK(made.origin == NPU_FROM_BLOB && made.refused == NPU_NONE);
        CHECK_EQUAL(compiled(), count);
        CHECK(access(dir, F_OK) != 0); /* the cache gets none of it */
        char again[64];
        NpuBlob same = blob_of(dir, NPU_FROM_BLOB, again, sizeof again);
        CHECK(hash_equal(same.key, blob.key) && same.bytes == blob.bytes && !memcmp(again, copy, same.bytes));

        filler++; /* other weights: another key */
        CHECK_OK(&ctx, use_made(&ctx, NULL, &made));
        CHECK(made.origin == NPU_COMPILED && made.refused == NPU_NONE);
        filler--;

        copy[blob.bytes - 1] ^= 1;
        CHECK_CODE(&ctx, CODE_INVALID, use_made(&ctx, NULL, &made));
        CHECK_SAYS("is damaged");
        copy[blob.bytes - 1] ^= 1;

        use_accept = refuse;
        refusals = 1;
        count = compiled();
        CHECK_OK(&ctx, use_made(&ctx, NULL, &made));
        CHECK(made.origin == NPU_COMPILED && made.refused == NPU_COMPILE_FAILED);
        CHECK_EQUAL(compiled(), count + 1);
        refusals = 2; /* what was compiled is refused, too */
        CHECK_REASON(NPU_COMPILE_FAILED, use_made(&ctx, NULL, &made));
        CHECK_SAYS("not what I wanted");
        use_accept = NULL;

        env("FAKE_FAULT", "native=0x70000001@1");
        CHECK_REASON(NPU_DEVICE_LOST, use_made(&ctx, NULL, &made));
        env("FAKE_FAULT", NULL);
        CHECK_EQUAL(live(), 0);

        char cache[128];
        snprintf(cache, sizeof cache, "%s/given%d", fake_dir(), v);
        for (int way = 1; way <= (v == 2 ? 2 : 1); way++) {
            env("FAKE_REFUSE", way == 1 ? "1" : "2"); /* at creation, at initialisation */
            CHECK_OK(&ctx, use_made(&ctx, cache, &made));
            CHECK(made.origin == NPU_COMPILED && made.refused != NPU_NONE);
            env("FAKE_REFUSE", NULL);
        }
        use_blobs = NULL;
        char third[64];
        same = blob_of(cache, NPU_FROM_CACHE, third, sizeof third); /* where what was compiled instead went */
        CHECK(hash_equal(same.key, blob.key) && !memcmp(third, copy, same.bytes));

        Use u = {0};
        void *own;
        CHECK_OK(&ctx, use_begin(&ctx, &u, cache));
        cache_remove(cache, blob.key);
        CHECK_OK(&ctx, npu_graph_blob(&ctx, u.graph, cache, &same, &own));
        CHECK(u.made.origin == NPU_FROM_CACHE && !same.data && !own);
        use_end(&u);
        CHECK_EQUAL(live(), 0);
    }
    env("FAKE_EXTENSION", NULL);
}

static void test_blobs(void) {
    char dir[128];
    snprintf(dir, sizeof dir, "%s/cache/deep", fake_dir());
    static const char *const versions[] = {"1.4", "1.7", "1.16"};
    for (int v = 0; v < 3; v++) { /* the version is part of the key */
        env("FAKE_EXTENSION", versions[v]);
        bool hit;
        int count = compiled();
        CHECK_OK(&ctx, use(&ctx, dir, &hit));
        CHECK(!hit);
        CHECK_EQUAL(compiled(), ++count);
        CHECK_OK(&ctx, use(&ctx, dir, &hit));
        CHECK(hit);
        CHECK_EQUAL(compiled(), count);
        filler++; /* other weights */
        CHECK_OK(&ctx, use(&ctx, dir, &hit));
        CHECK(!hit);
        filler--;
        CHECK_OK(&ctx, use(&ctx, dir, &hit));
        CHECK(hit);
        for (int way = 1; way <= (v == 2 ? 2 : 1); way++) {
            env("FAKE_REFUSE", way == 1 ? "1" : "2"); /* at creation, at initialisation */
            CHECK_OK(&ctx, use(&ctx, dir, &hit));
            CHECK(!hit);
            env("FAKE_REFUSE", NULL);
            CHECK_OK(&ctx, use(&ctx, dir, &hit));
            CHECK(hit);
        }
        env("FAKE_FAULT", "native=0x70000001@1");
        CHECK_REASON(NPU_DEVICE_LOST, use(&ctx, dir, &hit));
        env("FAKE_FAULT", NULL);
        CHECK_OK(&ctx, use(&ctx, dir, &hit));
        CHECK(hit);
        CHECK_EQUAL(live(), 0);
    }
    env("FAKE_EXTENSION", NULL);
}

int main(void) {
    context_init(&ctx);
    fake_build(fake, sizeof fake, "fake", "");
    env("ZE_ENABLE_ALT_DRIVERS", NULL);
    env("FORGE_ZE_LOADER", NULL);
    test_compile_failures();
    test_elements();
    test_options();
    test_blobs();
    test_given_blobs();
    fake_remove();
    return check_done();
}
