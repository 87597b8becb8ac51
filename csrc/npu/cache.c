#include "npu/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct Header {
    char magic[8];
    uint32_t version, header_bytes;
    uint64_t key[2], bytes, checksum[2];
} Header;
_Static_assert(sizeof(Header) == 56, "the file's layout");

enum { VERSION = 1, STALE_SECONDS = 3600, PAGE = 4096 };
static const char magic[8] = {'F', 'O', 'R', 'G', 'E', 'N', 'P', 'U'};
static const char suffix[] = ".blob", temporary[] = ".tmp";

typedef char Path[PATH_MAX];

static Header header_for(Hash128 key, const void *blob, size_t bytes) {
    Hash128 sum = hash_of(blob, bytes);
    Header h = {.version = VERSION,
                .header_bytes = sizeof h,
                .key = {key.a, key.b},
                .bytes = bytes,
                .checksum = {sum.a, sum.b}};
    memcpy(h.magic, magic, sizeof magic);
    return h;
}

static bool path_for(const char *dir, Hash128 key, Path out) {
    int n = snprintf(out, sizeof(Path), "%s/%016llx%016llx%s", dir, (unsigned long long)key.a,
                     (unsigned long long)key.b, suffix);
    return n > 0 && (size_t)n < sizeof(Path);
}

static bool read_all(int fd, void *out, size_t bytes) {
    for (char *to = out; bytes;) {
        ssize_t n = read(fd, to, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        to += n;
        bytes -= (size_t)n;
    }
    return true;
}

static bool write_all(int fd, const void *data, size_t bytes) {
    for (const char *from = data; bytes;) {
        ssize_t n = write(fd, from, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        from += n;
        bytes -= (size_t)n;
    }
    return true;
}

/* --- reading -------------------------------------------------------------------------------------------------------
 */

typedef enum Found { FOUND, ABSENT, DAMAGED } Found;

static Found read_entry(int fd, Hash128 key, void **blob, size_t *bytes) {
    struct stat info;
    /* A blob is code for the NPU: only this user's, or root's. */
    if (fstat(fd, &info) || !S_ISREG(info.st_mode) || (info.st_uid != geteuid() && info.st_uid != 0)) return ABSENT;
    Header h;
    if (info.st_size < (off_t)sizeof h || !read_all(fd, &h, sizeof h)) return DAMAGED;
    uint64_t size = (uint64_t)info.st_size - sizeof h;
    if (!size || size > SIZE_MAX - PAGE) return DAMAGED;
    void *data = aligned_alloc(PAGE, (size_t)((size + PAGE - 1) / PAGE * PAGE));
    if (!data) return ABSENT;
    if (read_all(fd, data, (size_t)size)) {
        Header sound = header_for(key, data, (size_t)size); /* the one header that fits */
        if (!memcmp(&sound, &h, sizeof h)) {
            *blob = data;
            *bytes = (size_t)size;
            return FOUND;
        }
    }
    free(data);
    return DAMAGED;
}

bool cache_load(const char *dir, Hash128 key, void **blob, size_t *bytes) {
    Path path;
    *blob = NULL;
    *bytes = 0;
    if (!path_for(dir, key, path)) return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return false;
    Found found = read_entry(fd, key, blob, bytes);
    if (found == FOUND) (void)!futimens(fd, NULL); /* used now */
    close(fd);
    if (found == DAMAGED) unlink(path);
    return found == FOUND;
}

void cache_remove(const char *dir, Hash128 key) {
    Path path;
    if (path_for(dir, key, path)) unlink(path);
}

/* --- eviction ------------------------------------------------------------------------------------------------------
 */

typedef struct Entry {
    char name[48];
    uint64_t bytes;
    struct timespec used;
} Entry;

static int by_use(const void *pa, const void *pb) {
    const Entry *a = pa, *b = pb;
    if (a->used.tv_sec != b->used.tv_sec) return a->used.tv_sec < b->used.tv_sec ? -1 : 1;
    if (a->used.tv_nsec != b->used.tv_nsec) return a->used.tv_nsec < b->used.tv_nsec ? -1 : 1;
    return strcmp(a->name, b->name);
}

static bool ends_with(const char *name, const char *end) {
    size_t n = strlen(name), m = strlen(end);
    return n > m && !strcmp(name + n - m, end);
}

/* FORGE_CACHE_BYTES; 0 keeps nothing. */
static uint64_t limit_bytes(void) {
    const char *text = getenv("FORGE_CACHE_BYTES");
    char *end;
    errno = 0;
    unsigned long long limit = text ? strtoull(text, &end, 10) : 0;
    return text && end != text && !*end && !errno && text[0] != '-' ? limit : (uint64_t)4 << 30;
}

static void evict(const char *dir, uint64_t limit) {
    DIR *folder = opendir(dir);
    if (!folder) return;
    Entry *entries = NULL;
    size_t n = 0, capacity = 0;
    uint64_t total = 0;
    for (struct dirent *e; (e = readdir(folder));) {
        struct stat info;
        bool left_over = ends_with(e->d_name, temporary);
        if ((!left_over && !ends_with(e->d_name, suffix)) || strlen(e->d_name) >= sizeof entries->name) continue;
        if (fstatat(dirfd(folder), e->d_name, &info, AT_SYMLINK_NOFOLLOW) || !S_ISREG(info.st_mode)) continue;
        if (left_over) { /* of a process that was killed */
            if (time(NULL) - info.st_mtim.tv_sec > STALE_SECONDS) unlinkat(dirfd(folder), e->d_name, 0);
            continue;
        }
        if (n == capacity) {
            size_t more = capacity ? 2 * capacity : 64;
            Entry *grown = realloc(entries, more * sizeof *entries);
            if (!grown) break;
            entries = grown;
            capacity = more;
        }
        Entry *entry = &entries[n++];
        memcpy(entry->name, e->d_name, strlen(e->d_name) + 1);
        entry->bytes = (uint64_t)info.st_size;
        entry->used = info.st_mtim;
        total += entry->bytes;
    }
    if (n && total > limit) {
        qsort(entries, n, sizeof *entries, by_use);
        for (size_t i = 0; i < n && total > limit; i++)
            if (!unlinkat(dirfd(folder), entries[i].name, 0)) total -= entries[i].bytes;
    }
    free(entries);
    closedir(folder);
}

/* --- writing -------------------------------------------------------------------------------------------------------
 */

/* mkdir -p. What it cannot make shows when the file is opened. */
static void make_folders(const char *dir) {
    Path path;
    size_t n = strlen(dir);
    if (n >= sizeof path) return;
    memcpy(path, dir, n + 1);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i]) continue;
        char kept = path[i];
        path[i] = 0;
        mkdir(path, 0700);
        path[i] = kept;
    }
}

void cache_store(const char *dir, Hash128 key, const void *blob, size_t bytes) {
    Path path, fresh;
    uint64_t limit = limit_bytes();
    if (!bytes || bytes > limit || limit - bytes < sizeof(Header) || !path_for(dir, key, path)) return;
    make_folders(dir);
    int n = snprintf(fresh, sizeof fresh, "%s/XXXXXX%s", dir, temporary);
    if (n <= 0 || (size_t)n >= sizeof fresh) return;
    int fd = mkostemps(fresh, (int)strlen(temporary), O_CLOEXEC);
    if (fd < 0) return;
    Header h = header_for(key, blob, bytes);
    bool written = write_all(fd, &h, sizeof h) && write_all(fd, blob, bytes);
    written = close(fd) == 0 && written;
    if (!written || rename(fresh, path)) unlink(fresh);
    evict(dir, limit);
}

bool cache_keep_log(const char *dir, const char *text, char *path, size_t path_bytes) {
    make_folders(dir);
    int n = snprintf(path, path_bytes, "%s/last-failure.log", dir);
    if (n <= 0 || (size_t)n >= path_bytes) return false;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return false;
    bool kept = write_all(fd, text, strlen(text));
    return close(fd) == 0 && kept;
}
