#include "npu/hash.h"

#include <string.h>

/* Odd numbers with as many ones as zeros, from the fractional parts of square roots of primes. */
static const uint64_t first[2] = {0x9e3779b97f4a7c15u, 0xbb67ae8584caa73bu};
static const uint64_t second[2] = {0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u};
static const unsigned turn[2] = {31, 27};

static inline uint64_t rotl(uint64_t x, unsigned n) { return x << n | x >> (64 - n); }

void hash_init(Hash *hash) {
    memset(hash, 0, sizeof *hash);
    for (unsigned bank = 0; bank < 2; bank++)
        for (unsigned k = 0; k < HASH_LANES; k++) hash->lane[bank][k] = first[bank] * (k + 1) ^ second[1 - bank];
}

static void add_blocks(Hash *hash, const uint8_t *data, size_t blocks) {
    uint64_t a[HASH_LANES], b[HASH_LANES];
    memcpy(a, hash->lane[0], sizeof a);
    memcpy(b, hash->lane[1], sizeof b);
    for (; blocks; blocks--, data += HASH_BLOCK) {
        uint64_t word[HASH_LANES];
        memcpy(word, data, sizeof word);
        for (unsigned k = 0; k < HASH_LANES; k++) {
            a[k] = rotl(a[k] + word[k] * second[0], 31) * first[0];
            b[k] = rotl(b[k] ^ word[k] * first[1], 27) * second[1];
        }
    }
    memcpy(hash->lane[0], a, sizeof a);
    memcpy(hash->lane[1], b, sizeof b);
}

void hash_add(Hash *hash, const void *data, size_t bytes) {
    if (!bytes) return;
    const uint8_t *from = data;
    size_t have = hash->bytes % HASH_BLOCK;
    hash->bytes += bytes;
    if (have) {
        size_t take = bytes < HASH_BLOCK - have ? bytes : HASH_BLOCK - have;
        memcpy(hash->block + have, from, take);
        from += take;
        bytes -= take;
        if (have + take < HASH_BLOCK) return;
        add_blocks(hash, hash->block, 1);
    }
    add_blocks(hash, from, bytes / HASH_BLOCK);
    size_t rest = bytes % HASH_BLOCK;
    if (rest) memcpy(hash->block, from + (bytes - rest), rest);
}

void hash_add_piece(Hash *hash, const void *data, size_t bytes) {
    uint64_t length = bytes;
    hash_add(hash, &length, sizeof length);
    hash_add(hash, data, bytes);
}

/* Each bit of the result depends on each of the input. */
static uint64_t finish(const uint64_t *lane, uint64_t bytes, unsigned bank) {
    uint64_t h = bytes * first[bank] + second[bank];
    for (unsigned k = 0; k < HASH_LANES; k++) {
        uint64_t x = lane[k];
        x ^= x >> 32;
        x *= first[bank];
        x ^= x >> 29;
        h = rotl(h ^ x * second[bank], turn[bank]) * first[bank] + k;
    }
    h ^= h >> 33;
    h *= 0xc2b2ae3d27d4eb4fu;
    h ^= h >> 29;
    h *= 0x165667b19e3779f9u;
    return h ^ h >> 32;
}

Hash128 hash_done(const Hash *hash) {
    Hash last = *hash;
    size_t have = last.bytes % HASH_BLOCK;
    if (have) { /* the length tells padding from data */
        memset(last.block + have, 0, HASH_BLOCK - have);
        add_blocks(&last, last.block, 1);
    }
    return (Hash128){finish(last.lane[0], last.bytes, 0), finish(last.lane[1], last.bytes, 1)};
}

Hash128 hash_of(const void *data, size_t bytes) {
    Hash hash;
    hash_init(&hash);
    hash_add(&hash, data, bytes);
    return hash_done(&hash);
}
