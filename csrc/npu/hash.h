/* A 128-bit hash for cache keys and checksums: against accidents, not against attackers. */
#ifndef FORGE_NPU_HASH_H
#define FORGE_NPU_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HASH_LANES = 8, HASH_BLOCK = 8 * HASH_LANES };

typedef struct Hash128 {
    uint64_t a, b;
} Hash128;

/* Two independent banks of 64-bit lanes. Word k of each 64-byte block goes into lane k of both banks by a step
 * (multiply, add, rotate, multiply, as in xxHash64) that is a bijection of the word and of the lane: a single changed
 * word always changes both banks, and several changes cancel in one bank with probability 2^-64, in both with 2^-128.
 */
typedef struct Hash {
    uint64_t lane[2][HASH_LANES];
    uint8_t block[HASH_BLOCK];
    uint64_t bytes; /* so far; bytes % HASH_BLOCK of them are in `block` */
} Hash;

void hash_init(Hash *hash);
void hash_add(Hash *hash, const void *data, size_t bytes);
/* A piece with its length before it, so that neighbours cannot trade bytes. */
void hash_add_piece(Hash *hash, const void *data, size_t bytes);
Hash128 hash_done(const Hash *hash);
Hash128 hash_of(const void *data, size_t bytes);
static inline bool hash_equal(Hash128 x, Hash128 y) { return x.a == y.a && x.b == y.b; }

#endif
