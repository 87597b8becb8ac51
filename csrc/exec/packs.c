#include "exec/packs.h"

#include <stdlib.h>
#include <string.h>

#include "exec/frame.h"
#include "exec/lock.h"

struct Packs {
    atomic_int lock;
    uint32_t users; /* programs and packs */
    Pack *first;
};

Code packs_create(Context *ctx, Packs **out) {
    *out = allocation_fails(ctx) ? NULL : calloc(1, sizeof **out);
    if (!*out) return fail(ctx, CODE_NO_MEMORY, "out of memory");
    (*out)->users = 1;
    return CODE_OK;
}

Packs *packs_ref(Packs *packs) {
    process_lock(&packs->lock);
    packs->users++;
    process_unlock(&packs->lock);
    return packs;
}

void packs_unref(Packs *packs) {
    if (!packs) return;
    process_lock(&packs->lock);
    bool last = --packs->users == 0;
    process_unlock(&packs->lock);
    if (last) free(packs);
}

bool pack_key_equal(const PackKey *a, const PackKey *b) {
    const Tensor *x = &a->weight, *y = &b->weight;
    if (x->data != y->data || a->op != b->op || a->bits != b->bits || a->group != b->group || x->dtype != y->dtype ||
        x->rank != y->rank)
        return false;
    size_t bytes = x->rank * sizeof(int64_t);
    return memcmp(x->shape, y->shape, bytes) == 0 && memcmp(x->strides, y->strides, bytes) == 0;
}

static Pack *find(Packs *packs, const PackKey *key, int64_t bytes) {
    process_lock(&packs->lock);
    Pack *pack = packs->first;
    while (pack && !(pack->known && pack->bytes == bytes && pack_key_equal(&pack->key, key))) pack = pack->next;
    if (pack) pack->users++;
    process_unlock(&packs->lock);
    return pack;
}

Code packs_take(Context *ctx, Packs *packs, const PackKey *key, bool shared, int64_t bytes, Pack **out, bool *made) {
    *out = shared ? find(packs, key, bytes) : NULL;
    *made = !*out;
    if (*out) return CODE_OK;
    Pack *pack = allocation_fails(ctx) ? NULL : calloc(1, sizeof *pack);
    if (!pack) return fail(ctx, CODE_NO_MEMORY, "out of memory");
    Code code = memory_aligned(ctx, (size_t)bytes, &pack->data);
    if (code != CODE_OK) {
        free(pack);
        return code;
    }
    pack->owner = packs_ref(packs);
    pack->key = *key;
    pack->users = 1;
    pack->bytes = bytes;
    *out = pack;
    return CODE_OK;
}

void pack_publish(Pack *pack) {
    Packs *packs = pack->owner;
    process_lock(&packs->lock);
    if (!pack->known) {
        pack->known = true;
        pack->next = packs->first;
        packs->first = pack;
    }
    process_unlock(&packs->lock);
}

void pack_release(Pack *pack) {
    if (!pack) return;
    Packs *packs = pack->owner;
    process_lock(&packs->lock);
    bool last = --pack->users == 0;
    if (last && pack->known) {
        Pack **at = &packs->first;
        while (*at != pack) at = &(*at)->next;
        *at = pack->next;
    }
    process_unlock(&packs->lock);
    if (!last) return;
    free(pack->data);
    free(pack);
    packs_unref(packs);
}
