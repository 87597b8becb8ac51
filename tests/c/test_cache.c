/* The hash and the blob cache: damage of every byte is a miss, writers at once, the size bound, folders that cannot be
 * written. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "npu/cache.h"

static char root[64];

static void in_root(char *out, size_t bytes, const char *name) { snprintf(out, bytes, "%s/%s", root, name); }

static void path_of(char *out, size_t bytes, const char *dir, Hash128 key) {
    snprintf(out, bytes, "%s/%016llx%016llx.blob", dir, (unsigned long long)key.a, (unsigned long long)key.b);
}

static int files(const char *dir) {
    DIR *d = opendir(dir);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

static bool holds(const char *dir, Hash128 key, const void *want, size_t bytes) {
    void *blob;
    size_t n;
    bool same = cache_load(dir, key, &blob, &n) && n == bytes && !memcmp(blob, want, bytes);
    free(blob);
    return same;
}

/* --- hash ----------------------------------------------------------------------------------------------------------
 */

static bool equal(Hash128 x, Hash128 y) { return x.a == y.a && x.b == y.b; }

static int by_value(const void *pa, const void *pb) { return memcmp(pa, pb, sizeof(Hash128)); }

static void test_hash(void) {
    enum { N = 300 };
    uint8_t data[N];
    for (int i = 0; i < N; i++) data[i] = (uint8_t)(i * 31 + 7);
    for (size_t n = 0; n <= N; n++) /* in pieces as at once */
        for (size_t cut = 0; cut <= n; cut += 1 + cut / 8) {
            Hash h;
            hash_init(&h);
            hash_add(&h, data, cut);
            hash_add(&h, NULL, 0);
            hash_add(&h, data + cut, n - cut);
            CHECK(equal(hash_done(&h), hash_of(data, n)));
        }
    /* Each bit matters, and changes about half of each half. */
    static Hash128 seen[8 * N + N + 1];
    size_t count = 0;
    Hash128 base = hash_of(data, N);
    long turned[2] = {0, 0};
    for (int i = 0; i < 8 * N; i++) {
        data[i / 8] ^= (uint8_t)(1 << i % 8);
        seen[count] = hash_of(data, N);
        turned[0] += __builtin_popcountll(seen[count].a ^ base.a);
        turned[1] += __builtin_popcountll(seen[count].b ^ base.b);
        count++;
        data[i / 8] ^= (uint8_t)(1 << i % 8);
    }
    for (int k = 0; k < 2; k++) CHECK(turned[k] > 8L * N * 31 && turned[k] < 8L * N * 33);
    static const uint8_t zeros[N];
    for (size_t n = 0; n <= N; n++) seen[count++] = hash_of(zeros, n); /* lengths too */
    qsort(seen, count, sizeof *seen, by_value);
    for (size_t i = 1; i < count; i++) CHECK(!equal(seen[i - 1], seen[i]));
    Hash x, y;
    hash_init(&x);
    hash_init(&y);
    hash_add_piece(&x, "ab", 2);
    hash_add_piece(&x, "c", 1);
    hash_add_piece(&y, "a", 1);
    hash_add_piece(&y, "bc", 2);
    CHECK(!equal(hash_done(&x), hash_done(&y)));
}

/* Entries of the file system outlive this program: what a key is may not change unnoticed. */
static void test_hash_is_fixed(void) {
    Hash128 h = hash_of("The quick brown fox jumps over the lazy dog, and over 64 bytes it goes.", 71);
    CHECK(h.a == 0x72b63e10f3175186u && h.b == 0xa3e0395d6ed55bd3u);
}

/* --- cache ---------------------------------------------------------------------------------------------------------
 */

static const Hash128 key = {0x0123456789abcdef, 0xfedcba9876543210}, other = {1, 2};

static void test_store_and_load(void) {
    char dir[128];
    in_root(dir, sizeof dir, "made/when/needed");
    void *blob;
    size_t bytes;
    CHECK(!cache_load(dir, key, &blob, &bytes));
    CHECK(blob == NULL && bytes == 0);
    cache_store(dir, key, "hello", 5);
    CHECK(holds(dir, key, "hello", 5));
    CHECK(cache_load(dir, key, &blob, &bytes));
    CHECK((uintptr_t)blob % 4096 == 0);
    free(blob);
    CHECK(!cache_load(dir, other, &blob, &bytes));
    cache_store(dir, key, "other words", 11);
    CHECK(holds(dir, key, "other words", 11));
    cache_store(dir, key, "", 0); /* nothing is no blob */
    CHECK(holds(dir, key, "other words", 11));
    CHECK_EQUAL(files(dir), 1);
    cache_remove(dir, key);
    cache_remove(dir, key);
    CHECK_EQUAL(files(dir), 0);
    char path[256];
    path_of(path, sizeof path, dir, key);
    CHECK(!mkdir(path, 0755)); /* something else of that name */
    CHECK(!cache_load(dir, key, &blob, &bytes));
    cache_store(dir, key, "hello", 5);
    CHECK_EQUAL(files(dir), 1);
    rmdir(path);
    CHECK(!symlink("/etc/passwd", path));
    CHECK(!cache_load(dir, key, &blob, &bytes));
    cache_store(dir, key, "hello", 5); /* replaces the link, not its target */
    CHECK(holds(dir, key, "hello", 5));
    cache_remove(dir, key);
}

static void write_file(const char *path, const void *data, size_t bytes) {
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(data, 1, bytes, f) == bytes);
    if (f) fclose(f);
}

static void test_damage(void) {
    enum { BLOB = 200, ROOM = 512 };
    uint8_t blob[BLOB], entry[ROOM];
    char dir[128], path[256];
    in_root(dir, sizeof dir, "damage");
    path_of(path, sizeof path, dir, key);
    for (int i = 0; i < BLOB; i++) blob[i] = (uint8_t)(i * 7);
    cache_store(dir, key, blob, BLOB);
    FILE *f = fopen(path, "rb");
    CHECK(f != NULL);
    if (!f) return;
    size_t size = fread(entry, 1, sizeof entry, f);
    fclose(f);
    CHECK(size > BLOB && size < ROOM);
    void *loaded;
    size_t n;
    for (size_t i = 0; i < size; i++)
        for (int bit = 0; bit < 9; bit++) {
            uint8_t flip = bit < 8 ? (uint8_t)(1 << bit) : 0xff;
            entry[i] ^= flip;
            write_file(path, entry, size);
            CHECK(!cache_load(dir, key, &loaded, &n));
            CHECK(access(path, F_OK) != 0); /* removed */
            entry[i] ^= flip;
        }
    for (size_t length = 0; length <= size + 8; length++) { /* cut, or with something after it */
        write_file(path, entry, length);
        CHECK_EQUAL(cache_load(dir, key, &loaded, &n), length == size);
        CHECK_EQUAL(access(path, F_OK) == 0, length == size);
        free(loaded);
    }
    char elsewhere[256];
    path_of(elsewhere, sizeof elsewhere, dir, other); /* another key's entry */
    write_file(elsewhere, entry, size);
    CHECK(!cache_load(dir, other, &loaded, &n));
    CHECK(access(elsewhere, F_OK) != 0);
    write_file(path, entry, size);
    CHECK(holds(dir, key, blob, BLOB));
    if (geteuid() == 0) { /* another user's: it is not to be trusted */
        CHECK(!chown(path, 65534, 65534));
        CHECK(!cache_load(dir, key, &loaded, &n));
    }
}

/* Sets when an entry was used last, so that the test does not depend on the clock's steps. */
static void used_at(const char *dir, Hash128 k, time_t seconds) {
    char path[256];
    path_of(path, sizeof path, dir, k);
    CHECK(!utimensat(AT_FDCWD, path, (struct timespec[2]){{seconds, 0}, {seconds, 0}}, 0));
}

static void test_bound(void) {
    enum { SIZE = 1000, ENTRIES = 10 };
    char dir[128], blob[SIZE];
    in_root(dir, sizeof dir, "bound");
    setenv("FORGE_CACHE_BYTES", "5500", 1); /* five of 1056 */
    for (int i = 0; i < ENTRIES; i++) {
        memset(blob, i, SIZE);
        cache_store(dir, (Hash128){(uint64_t)i, 0}, blob, SIZE);
        used_at(dir, (Hash128){(uint64_t)i, 0}, 1000000 + i);
        if (i >= 4) { /* the first is used again and again */
            memset(blob, 0, SIZE);
            CHECK(holds(dir, (Hash128){0, 0}, blob, SIZE));
        }
        CHECK(files(dir) <= 5);
    }
    CHECK_EQUAL(files(dir), 5);
    for (int i = 0; i < ENTRIES; i++) {
        memset(blob, i, SIZE);
        CHECK_EQUAL(holds(dir, (Hash128){(uint64_t)i, 0}, blob, SIZE), i == 0 || i >= 6);
    }
    char large[6000];
    memset(large, 1, sizeof large);
    cache_store(dir, key, large, sizeof large); /* larger than all: not kept, and nothing is thrown out for it */
    CHECK_EQUAL(files(dir), 5);
    setenv("FORGE_CACHE_BYTES", "nonsense", 1); /* the default then */
    cache_store(dir, key, large, sizeof large);
    CHECK_EQUAL(files(dir), 6);
    setenv("FORGE_CACHE_BYTES", "0", 1);
    cache_store(dir, other, "x", 1);
    CHECK_EQUAL(files(dir), 6);
    unsetenv("FORGE_CACHE_BYTES");
    char path[256];
    snprintf(path, sizeof path, "%s/abcdef.tmp", dir);
    write_file(path, "left over", 9);
    cache_store(dir, other, "x", 1);
    CHECK(access(path, F_OK) == 0); /* it may still be written */
    CHECK(!utimensat(AT_FDCWD, path, (struct timespec[2]){{1000, 0}, {1000, 0}}, 0));
    cache_store(dir, other, "x", 1);
    CHECK(access(path, F_OK) != 0);
    snprintf(path, sizeof path, "%s/notes.txt", dir); /* not ours */
    write_file(path, "notes", 5);
    setenv("FORGE_CACHE_BYTES", "100", 1);
    cache_store(dir, other, "y", 1);
    unsetenv("FORGE_CACHE_BYTES");
    CHECK_EQUAL(files(dir), 2);
    CHECK(access(path, F_OK) == 0);
}

typedef struct Writer {
    pthread_t thread;
    const char *dir;
    int id, wrong;
} Writer;

/* Writers and readers of a few keys; some write over each other, some throw each other's entries out. */
static void *writer(void *arg) {
    Writer *w = arg;
    char blob[700];
    for (int round = 0; round < 150; round++) {
        int k = (round * 7 + w->id) % 5;
        memset(blob, 'a' + k, sizeof blob);
        cache_store(w->dir, (Hash128){(uint64_t)k, 9}, blob, sizeof blob);
        int r = (round + w->id) % 5;
        void *loaded;
        size_t n;
        if (cache_load(w->dir, (Hash128){(uint64_t)r, 9}, &loaded, &n)) {
            memset(blob, 'a' + r, sizeof blob);
            w->wrong += n != sizeof blob || memcmp(loaded, blob, n);
        }
        free(loaded);
    }
    return NULL;
}

static void test_writers(void) {
    enum { THREADS = 4, PROCESSES = 2 };
    char dir[128];
    in_root(dir, sizeof dir, "writers");
    setenv("FORGE_CACHE_BYTES", "2500", 1);
    pid_t children[PROCESSES];
    for (int p = 0; p < PROCESSES; p++)
        if (!(children[p] = fork())) {
            Writer w = {.dir = dir, .id = 10 + p};
            writer(&w);
            _exit(w.wrong != 0);
        }
    Writer w[THREADS];
    for (int i = 0; i < THREADS; i++) {
        w[i] = (Writer){.dir = dir, .id = i};
        CHECK_EQUAL(pthread_create(&w[i].thread, NULL, writer, &w[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(w[i].thread, NULL);
        CHECK_EQUAL(w[i].wrong, 0);
    }
    for (int p = 0; p < PROCESSES; p++) {
        int status = 1;
        waitpid(children[p], &status, 0);
        CHECK_EQUAL(status, 0);
    }
    CHECK(files(dir) <= 3); /* and no temporary ones */
    unsetenv("FORGE_CACHE_BYTES");
}

static char forbidden[128];

static void use_forbidden(void) {
    void *blob;
    size_t n;
    CHECK(holds(forbidden, key, "kept", 4)); /* by reading alone */
    cache_store(forbidden, other, "x", 1);
    CHECK(!cache_load(forbidden, other, &blob, &n));
    cache_remove(forbidden, key);
    CHECK(holds(forbidden, key, "kept", 4));
    CHECK_EQUAL(files(forbidden), 1);
}

/* Folders that take nothing: no error, only misses. Root may do everything, so a child becomes nobody. */
static void test_read_only(void) {
    in_root(forbidden, sizeof forbidden, "forbidden");
    cache_store(forbidden, key, "kept", 4);
    CHECK(!chmod(root, 0755) && !chmod(forbidden, 0555));
    char path[256];
    path_of(path, sizeof path, forbidden, key);
    CHECK(!chmod(path, 0444));
    pid_t child = fork();
    if (!child) {
        check_failures = 0;
        if (geteuid() == 0 && (setgid(65534) || setuid(65534))) _exit(2);
        use_forbidden();
        _exit(check_failures != 0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK_EQUAL(status, 0);
    CHECK(!chmod(forbidden, 0755));
    void *blob;
    size_t n;
    cache_store("/proc/nowhere/at/all", key, "x", 1);
    CHECK(!cache_load("/proc/nowhere/at/all", key, &blob, &n));
    cache_store("/dev/null/file", key, "x", 1);
    CHECK(!cache_load("/dev/null/file", key, &blob, &n));
    static char endless[6000];
    memset(endless, 'a', sizeof endless - 1);
    cache_store(endless, key, "x", 1);
    CHECK(!cache_load(endless, key, &blob, &n));
    cache_remove(endless, key);
}

/* A disk that is full while an entry is written: nothing stays. */
static void test_full(void) {
    char dir[128];
    in_root(dir, sizeof dir, "full");
    pid_t child = fork();
    if (!child) {
        check_failures = 0;
        struct rlimit limit = {3000, 3000};
        signal(SIGXFSZ, SIG_IGN);
        if (setrlimit(RLIMIT_FSIZE, &limit)) _exit(2);
        static char blob[10000];
        void *loaded;
        size_t n;
        cache_store(dir, key, blob, sizeof blob);
        CHECK_EQUAL(files(dir), 0);
        CHECK(!cache_load(dir, key, &loaded, &n));
        cache_store(dir, key, blob, 1000);
        CHECK(holds(dir, key, blob, 1000));
        _exit(check_failures != 0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK_EQUAL(status, 0);
}

int main(void) {
    snprintf(root, sizeof root, "/tmp/forge-cache-XXXXXX");
    if (!mkdtemp(root)) return 1;
    test_hash();
    test_hash_is_fixed();
    test_store_and_load();
    test_damage();
    test_bound();
    test_writers();
    test_read_only();
    test_full();
    char command[96];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    CHECK_EQUAL(system(command), 0);
    return check_done();
}
