/* Compiled graphs on disk: a folder of files "<key>.blob". Nothing here fails: what cannot be read is a miss, what
 * cannot be written is not kept. Processes and threads may use a folder at once. */
#ifndef FORGE_NPU_CACHE_H
#define FORGE_NPU_CACHE_H

#include <stdbool.h>

#include "npu/hash.h"

/* malloc'd, page aligned; the whole entry was checked. A damaged entry is removed. */
bool cache_load(const char *dir, Hash128 key, void **blob, size_t *bytes);
/* Then removes the least recently used entries beyond FORGE_CACHE_BYTES (default 4 GiB). Makes the folder. */
void cache_store(const char *dir, Hash128 key, const void *blob, size_t bytes);
void cache_remove(const char *dir, Hash128 key);
/* Writes "last-failure.log" into the folder; `path` gets its place. */
bool cache_keep_log(const char *dir, const char *text, char *path, size_t path_bytes);

#endif
