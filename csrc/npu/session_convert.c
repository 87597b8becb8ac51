/* Host tensors with strides to row-major device memory and back. */
#include <string.h>

#include "npu/session.h"
#include "npu/weights.h"
#include "npuir/view.h"

enum { PART = 512 };

static bool is_float(DType dtype) { return dtype == DTYPE_F16 || dtype == DTYPE_BF16 || dtype == DTYPE_F32; }

bool convert_known(DType from, DType to) {
    return (is_float(from) && is_float(to)) || (from == to && from != DTYPE_OBJECT);
}

/* --- one row ------------------------------------------------------------------------------------------------------ */
static void gather(size_t size, const char *from, int64_t stride, int64_t n, void *to) {
    for (int64_t i = 0; i < n; i++) {
        switch (size) {
        case 1: ((uint8_t *)to)[i] = ((const uint8_t *)from)[i * stride]; break;
        case 2: ((uint16_t *)to)[i] = ((const uint16_t *)from)[i * stride]; break;
        case 4: ((uint32_t *)to)[i] = ((const uint32_t *)from)[i * stride]; break;
        case 8: ((uint64_t *)to)[i] = ((const uint64_t *)from)[i * stride]; break;
        default: memcpy((char *)to + (size_t)i * size, from + (size_t)(i * stride) * size, size); break;
        }
    }
}

static void scatter(size_t size, const char *from, void *to, int64_t stride, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        switch (size) {
        case 1: ((uint8_t *)to)[i * stride] = ((const uint8_t *)from)[i]; break;
        case 2: ((uint16_t *)to)[i * stride] = ((const uint16_t *)from)[i]; break;
        case 4: ((uint32_t *)to)[i * stride] = ((const uint32_t *)from)[i]; break;
        case 8: ((uint64_t *)to)[i * stride] = ((const uint64_t *)from)[i]; break;
        default: memcpy((char *)to + (size_t)(i * stride) * size, from + (size_t)i * size, size); break;
        }
    }
}

static void to_f32(const WeightKernels *c, DType type, const void *from, float *to, int64_t n) {
    (type == DTYPE_F16 ? c->widen : c->widen_bf16)(from, to, n);
}

static void from_f32(const WeightKernels *c, const float *from, DType type, void *to, int64_t n) {
    (type == DTYPE_F16 ? c->narrow : c->narrow_bf16)(from, to, n);
}

static void convert_halves(const WeightKernels *c, DType from_type, const uint16_t *from, DType to_type, uint16_t *to,
                           int64_t n) {
    float part[PART];
    for (int64_t i = 0; i < n; i += PART) {
        int64_t count = n - i < PART ? n - i : PART;
        to_f32(c, from_type, from + i, part, count);
        from_f32(c, part, to_type, to + i, count);
    }
}

static void convert_dense(const WeightKernels *c, DType from_type, const void *from, DType to_type, void *to,
                          int64_t n) {
    if (from_type == to_type)
        memcpy(to, from, (size_t)n * dtype_size(to_type));
    else if (from_type == DTYPE_F32)
        from_f32(c, from, to_type, to, n);
    else if (to_type == DTYPE_F32)
        to_f32(c, from_type, from, to, n);
    else
        convert_halves(c, from_type, from, to_type, to, n);
}

typedef struct Row {
    const WeightKernels *c;
    DType host, device;
    bool to_host;
} Row;

static void convert_row(const Row *row, char *host, int64_t stride, char *device, int64_t n) {
    _Alignas(32) char part[PART * 8];
    size_t size = dtype_size(row->host), device_size = dtype_size(row->device);
    if (stride == 1 || n == 1) {
        if (row->to_host)
            convert_dense(row->c, row->device, device, row->host, host, n);
        else
            convert_dense(row->c, row->host, host, row->device, device, n);
        return;
    }
    int64_t most = PART * 8 / (int64_t)size;
    for (int64_t i = 0; i < n; i += most) {
        int64_t count = n - i < most ? n - i : most;
        char *there = host + i * stride * (int64_t)size, *here = device + i * (int64_t)device_size;
        if (row->to_host) {
            convert_dense(row->c, row->device, here, row->host, part, count);
            scatter(size, part, there, stride, count);
        } else {
            gather(size, there, stride, count, part);
            convert_dense(row->c, row->host, part, row->device, here, count);
        }
    }
}

/* --- all ---------------------------------------------------------------------------------------------------------- */
/* Dimensions of size 1 go, neighbours that lie in memory as one become one. */
static void coalesce(const Tensor *t, View *out) {
    View v = {0};
    for (int d = 0; d < t->rank; d++) {
        if (t->shape[d] == 1) continue;
        if (v.rank && v.strides[v.rank - 1] == t->strides[d] * t->shape[d]) {
            v.shape[v.rank - 1] *= t->shape[d];
            v.strides[v.rank - 1] = t->strides[d];
        } else {
            v.shape[v.rank] = t->shape[d];
            v.strides[v.rank++] = t->strides[d];
        }
    }
    if (v.rank == 0) {
        v.shape[0] = v.strides[0] = 1;
        v.rank = 1;
    }
    *out = v;
}

static void convert(const Tensor *host, DType dtype, char *device, bool to_host) {
    int64_t count = tensor_count(host), size = (int64_t)dtype_size(host->dtype);
    Row row = {weight_kernels(), host->dtype, dtype, to_host};
    View v;
    if (count == 0) return;
    coalesce(host, &v);
    int64_t at[MAX_RANK] = {0}, n = v.shape[v.rank - 1];
    for (;;) {
        int64_t offset = 0;
        for (int d = 0; d < v.rank - 1; d++) offset += at[d] * v.strides[d];
        convert_row(&row, (char *)host->data + offset * size, v.strides[v.rank - 1], device, n);
        device += n * (int64_t)dtype_size(dtype);
        int d = v.rank - 2;
        while (d >= 0 && ++at[d] == v.shape[d]) at[d--] = 0;
        if (d < 0) return;
    }
}

void convert_to_device(const Tensor *from, DType dtype, void *to) { convert(from, dtype, to, false); }

void convert_to_host(const void *from, DType dtype, const Tensor *to) {
    convert(to, dtype, (char *)(uintptr_t)from, true);
}
