/* sort (stable) and topk along a dimension. Elements become 64-bit keys in ascending order, so one comparison serves
 * all types: NaN is the largest and equal to itself, -0 equals 0, and a descending order is the complement of the
 * key. */
#include <string.h>

#include "cpu/cpu.h"
#include "cpu/move.h"
#include "cpu/reduce.h"

typedef struct Item {
    uint64_t key;
    int64_t index;
} Item;

typedef struct Sort {
    const Tensor *x, *values, *indices;
    WideLoad load;
    Item *scratch; /* of each thread */
    int64_t scratch_items, size, keep, lines, per_part;
    int dim;
    bool is_float, descending, top;
} Sort;

static uint64_t key_of(bool is_float, bool descending, Wide w) {
    uint64_t key;
    if (is_float) {
        double f = w.f + 0.0; /* -0 + 0 is 0 */
        memcpy(&key, &f, sizeof key);
        key = f != f ? UINT64_MAX : key >> 63 ? ~key : key | (uint64_t)1 << 63;
    } else {
        key = (uint64_t)w.i ^ (uint64_t)1 << 63;
    }
    return descending ? ~key : key;
}

/* Bottom-up merge sort over insertion-sorted runs; returns where the result is: items or other. */
static Item *merge_sort(Item *items, Item *other, int64_t n) {
    enum { RUN = 16 };
    for (int64_t begin = 0; begin < n; begin += RUN) {
        int64_t end = begin + RUN < n ? begin + RUN : n;
        for (int64_t i = begin + 1; i < end; i++) {
            Item item = items[i];
            int64_t j = i;
            for (; j > begin && items[j - 1].key > item.key; j--) items[j] = items[j - 1];
            items[j] = item;
        }
    }
    for (int64_t width = RUN; width < n; width *= 2) {
        for (int64_t begin = 0; begin < n; begin += 2 * width) {
            int64_t middle = begin + width < n ? begin + width : n, end = middle + width < n ? middle + width : n;
            int64_t a = begin, b = middle;
            for (int64_t k = begin; k < end; k++)
                other[k] = a < middle && (b == end || items[a].key <= items[b].key) ? items[a++] : items[b++];
        }
        Item *t = items;
        items = other;
        other = t;
    }
    return items;
}

static bool before(Item a, Item b) { return a.key < b.key || (a.key == b.key && a.index < b.index); }

/* `heap` holds its last item (in order) on top. */
static void sift_down(Item *heap, int64_t n, int64_t at) {
    Item item = heap[at];
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && before(heap[child], heap[child + 1])) child++;
        if (!before(item, heap[child])) break;
        heap[at] = heap[child];
    }
    heap[at] = item;
}

static void sort_line(const Sort *s, int64_t line, Item *scratch) {
    const Tensor *x = s->x;
    int64_t rest = line, from = 0, value_at = 0, index_at = 0, stride = x->rank ? x->strides[s->dim] : 1;
    for (int d = x->rank - 1; d >= 0; d--) {
        if (d == s->dim) continue;
        int64_t i = rest % x->shape[d];
        from += i * x->strides[d];
        value_at += i * s->values->strides[d];
        index_at += i * s->indices->strides[d];
        rest /= x->shape[d];
    }
    Item *items = scratch;
    int64_t held = 0;
    Wide chunk[WIDE_CHUNK];
    for (int64_t i = 0; i < s->size && s->keep > 0; i += WIDE_CHUNK) {
        int64_t n = s->size - i < WIDE_CHUNK ? s->size - i : WIDE_CHUNK;
        s->load(chunk, tensor_byte(x, from + i * stride), stride, n);
        for (int64_t j = 0; j < n; j++) {
            Item item = {key_of(s->is_float, s->descending, chunk[j]), i + j};
            if (!s->top) {
                items[held++] = item;
            } else if (held < s->keep) {
                items[held++] = item;
                if (held == s->keep)
                    for (int64_t at = held / 2; at-- > 0;) sift_down(items, held, at);
            } else if (before(item, items[0])) {
                items[0] = item;
                sift_down(items, held, 0);
            }
        }
    }
    if (s->top) {
        for (int64_t n = held; n-- > 1;) {
            Item last = items[n];
            items[n] = items[0];
            items[0] = last;
            sift_down(items, n, 0);
        }
    } else {
        items = merge_sort(items, scratch + s->size, s->size);
    }
    size_t size = dtype_size(x->dtype);
    int64_t value_stride = x->rank ? s->values->strides[s->dim] : 1,
            index_stride = x->rank ? s->indices->strides[s->dim] : 1;
    for (int64_t j = 0; j < s->keep; j++) {
        if (s->values->data)
            memcpy(tensor_byte(s->values, value_at + j * value_stride), tensor_byte(x, from + items[j].index * stride),
                   size);
        if (s->indices->data) ((int64_t *)s->indices->data)[index_at + j * index_stride] = items[j].index;
    }
}

static void sort_part(void *arg, int64_t part, int thread) {
    const Sort *s = arg;
    int64_t end = (part + 1) * s->per_part < s->lines ? (part + 1) * s->per_part : s->lines;
    for (int64_t line = part * s->per_part; line < end; line++)
        sort_line(s, line, s->scratch + thread * s->scratch_items);
}

static int64_t scratch_items(Op op, int64_t size, int64_t k) { return op == OP_topk ? k : 2 * size; }

int64_t sort_scratch(const Graph *g, const Node *node, int threads) {
    const Value *x = graph_value(g, node->operands[0]);
    int64_t size = x->rank ? x->shape[node_int(node, ATTR_dim)] : 1;
    int64_t keep = node->op == OP_topk && x->rank ? node_int(node, ATTR_k) : size;
    return threads * scratch_items(node->op, size, keep) * (int64_t)sizeof(Item);
}

Code sort_run(KernelCall *call) {
    const Tensor *x = &call->in[0];
    const Node *node = call->node;
    Sort s = {.x = x,
              .values = &call->out[0],
              .indices = &call->out[1],
              .load = wide_load(x->dtype),
              .scratch = call->scratch,
              .dim = (int)node_int(node, ATTR_dim),
              .is_float = dtype_is_float(x->dtype),
              .top = node->op == OP_topk,
              .size = 1,
              .lines = 1};
    if (!s.load)
        return fail(call->ctx, CODE_UNSUPPORTED, "no host kernel for %s of %s", op_info(node->op)->name,
                    dtype_name(x->dtype));
    s.descending = s.top ? node_int(node, ATTR_largest) != 0 : node_int(node, ATTR_descending) != 0;
    for (int d = 0; d < x->rank; d++) {
        if (d == s.dim)
            s.size = x->shape[d];
        else
            s.lines *= x->shape[d];
    }
    s.keep =
        s.top && x->rank ? node_int(node, ATTR_k) : s.size; /* of a rank-0 tensor the element is kept whatever k is */
    s.scratch_items = scratch_items(node->op, s.size, s.keep);
    if (s.lines * s.size == 0) return CODE_OK;
    s.per_part = s.size >= 2048 ? 1 : 2048 / s.size;
    pool_run(s.lines * s.size >= 4096 ? call->pool : NULL, (s.lines + s.per_part - 1) / s.per_part, sort_part, &s);
    return CODE_OK;
}
