/* Weights in a form of our own (packed for products, or quantised) that programs of one model share: each is made once
 * for all shapes. A store holds none of them alive by itself: a weight goes with the last program that uses it. */
#ifndef FORGE_EXEC_PACKS_H
#define FORGE_EXEC_PACKS_H

#include "exec/kernel.h"

/* What a form was made of, and how. The memory at `weight.data` stays as it is while any program of the store uses it:
 * that is for whoever joins programs to a store to see to. */
typedef struct PackKey {
    Op op;
    int bits; /* these two: of quantised weights */
    int64_t group;
    Tensor weight;
} PackKey;

typedef struct Packs Packs;
typedef struct Pack {
    Packs *owner; /* referenced */
    struct Pack *next;
    PackKey key;
    uint32_t users;
    bool known; /* others may find it: it is made, and of memory that is not the program's own */
    char *data;
    int64_t bytes;
} Pack;

MUST_USE Code packs_create(Context *ctx, Packs **out);
Packs *packs_ref(Packs *packs);
void packs_unref(Packs *packs); /* NULL: nothing */

bool pack_key_equal(const PackKey *a, const PackKey *b);

/* With `shared`, one that is there (`*made` false); else a new one whose `data` is to be filled. The caller releases
 * it.
 */
MUST_USE Code packs_take(Context *ctx, Packs *packs, const PackKey *key, bool shared, int64_t bytes, Pack **out,
                         bool *made);
/* It has been filled: programs that come later find it. */
void pack_publish(Pack *pack);
void pack_release(Pack *pack); /* NULL: nothing */
/* Of so many bytes of the caller's memory: whether it is worth sharing. A graph's text may spell out smaller ones. */
static inline bool pack_shared(ConstantKind kind, int64_t bytes) { return kind == CONSTANT_STATE && bytes >= 4096; }

#endif
