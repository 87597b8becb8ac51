/* Preparing elementwise programs and running them over tensors and rows; see elementwise.h. */
#include "cpu/elementwise.h"

#include <stdatomic.h>
#include <string.h>

#include "cpu/cpu.h"

Code ew_fail(Context *ctx, EwFault fault) {
    switch (fault) {
    case EW_OK: return CODE_OK;
    case EW_DIVIDE_BY_ZERO: return fail(ctx, CODE_INTERNAL, "ZeroDivisionError");
    case EW_NEGATIVE_POWER: break;
    }
    return fail(ctx, CODE_INTERNAL, "Integers to negative integer powers are not allowed.");
}

/* --- preparing ---------------------------------------------------------------------------------------------------- */
static bool is_half(DType t) { return t == DTYPE_F16 || t == DTYPE_BF16; }
static DType compute_type(DType t) { return is_half(t) ? DTYPE_F32 : t; }

/* While building, every micro-step makes a virtual register of its own, named by the step's index. */
typedef struct Builder {
    EwProgram *p;
    bool avx2;
    bool accumulator;
    const DType *input_types;         /* as the graph sees them */
    uint8_t bytes[EW_MAX_MICRO];      /* of an element of the register */
    EwRef inputs[PROGRAM_MAX_INPUTS]; /* in compute type; EW_NONE before the first use */
    EwRef steps[PROGRAM_MAX_STEPS];
    DType types[PROGRAM_MAX_STEPS]; /* of steps, as the graph sees them */
} Builder;

static const EwRef NO_REF = {EW_NONE, 0};

static EwRef emit(Builder *b, EwFn fn, DType made, EwRef s0, EwRef s1, EwRef s2) {
    EwMicro *micro = &b->p->micro[b->p->n_micro];
    *micro = (EwMicro){.fn = fn, .src = {s0, s1, s2}};
    b->bytes[b->p->n_micro] = (uint8_t)dtype_size(made);
    return (EwRef){EW_SLOT, (uint8_t)b->p->n_micro++};
}

static EwRef immediate(Builder *b, DType type, Scalar s) {
    union {
        uint64_t word;
        bool b;
        uint8_t u8;
        float f;
        double d;
        int64_t i;
    } v = {0};
    int64_t whole = s.kind == SCALAR_INT ? s.i : s.f > -0x1p63 && s.f < 0x1p63 ? (int64_t)s.f : INT64_MIN;
    switch (type) {
    case DTYPE_BOOL: v.b = scalar_f64(s) != 0; break;
    case DTYPE_F32: v.f = s.kind == SCALAR_INT ? (float)s.i : (float)s.f; break;
    case DTYPE_F64: v.d = scalar_f64(s); break;
    default: v.i = whole; break; /* little endian: the low bytes are the narrower integer */
    }
    b->p->immediates[b->p->n_immediates] = v.word;
    return (EwRef){EW_IMMEDIATE, (uint8_t)b->p->n_immediates++};
}

static EwFn find_cast(const Builder *b, DType from, DType to) {
    EwFn fn = b->avx2 ? avx2_cast(from, to) : NULL;
    return fn ? fn : ew_cast(from, to);
}

static EwFn find_round(const Builder *b, DType half) {
    EwFn fn = b->avx2 ? avx2_round(half) : NULL;
    return fn ? fn : ew_round(half);
}

/* Input `k` in its compute type. */
static EwRef input_ref(Builder *b, uint32_t k) {
    DType type = b->input_types[k];
    if (b->inputs[k].kind != EW_NONE) return b->inputs[k];
    EwRef raw = {EW_INPUT, (uint8_t)k};
    if (!is_half(type)) {
        b->inputs[k] = raw;
    } else if (k == 0 && b->accumulator) {
        b->inputs[k] = emit(b, find_round(b, type), DTYPE_F32, raw, NO_REF, NO_REF);
    } else {
        b->inputs[k] = emit(b, find_cast(b, type, DTYPE_F32), DTYPE_F32, raw, NO_REF, NO_REF);
    }
    return b->inputs[k];
}

static DType source_type(const Builder *b, int32_t src) { return src >= 0 ? b->input_types[src] : b->types[-src - 1]; }
static EwRef source_ref(Builder *b, int32_t src) { return src >= 0 ? input_ref(b, (uint32_t)src) : b->steps[-src - 1]; }

/* Scalars of half operands: products and quotients use them unrounded (eager's opmath), the rest in the tensor's
 * type. */
static Scalar half_scalar(const Step *step, DType type, Scalar s) {
    bool opmath = step->op == OP_mul || step->op == OP_div || step->op == OP_div_floor || step->op == OP_div_trunc;
    if (!is_half(type) || s.kind == SCALAR_NONE || (opmath && !step->flag)) return s;
    float f = (float)scalar_f64(s);
    f = type == DTYPE_F16 ? f16_to_f32(f32_to_f16(f)) : bf16_to_f32(f32_to_bf16(f));
    return (Scalar){.kind = SCALAR_FLOAT, .f = f};
}

static Scalar bound(DType type, Scalar s, bool high) {
    if (s.kind != SCALAR_NONE && !dtype_is_int(type)) return s;
    if (dtype_is_float(type)) return (Scalar){.kind = SCALAR_FLOAT, .f = high ? __builtin_inf() : -__builtin_inf()};
    int bits = (int)dtype_size(type) * 8;
    int64_t most = type == DTYPE_BOOL ? 1 : type == DTYPE_U8 ? 255 : (int64_t)(((uint64_t)1 << (bits - 1)) - 1);
    int64_t least = type == DTYPE_BOOL || type == DTYPE_U8 ? 0 : -most - 1;
    Scalar r = {.kind = SCALAR_INT, .i = high ? most : least};
    if (s.kind == SCALAR_NONE) return r;
    if (s.kind == SCALAR_INT) return (Scalar){.kind = SCALAR_INT, .i = s.i < least ? least : s.i > most ? most : s.i};
    if (s.f >= (double)least && s.f <= (double)most && s.f < 0x1p63)
        r.i = (int64_t)s.f;
    else if (s.f < 0)
        r.i = least;
    else
        r.i = most;
    return r;
}

/* pow with a constant exponent is what eager makes of it; OP_COUNT: nothing special. */
static Op special_power(DType type, double exponent) {
    if (type == DTYPE_F32 || type == DTYPE_F64 || type == DTYPE_BF16) {
        if (exponent == 0.5) return OP_sqrt;
        if (exponent == -0.5) return OP_rsqrt;
        if (exponent == -1.0) return OP_reciprocal;
    }
    return OP_COUNT;
}

static EwFn find_unary(const Builder *b, Op op, DType type, bool approximate) {
    EwFn fn = b->avx2 && type == DTYPE_F32 ? avx2_unary(op, approximate) : NULL;
    return fn ? fn : ew_unary(op, type, approximate);
}

static EwFn find_binary(const Builder *b, Op op, DType type) {
    EwFn fn = b->avx2 && type == DTYPE_F32 ? avx2_binary(op) : NULL;
    return fn ? fn : ew_binary(op, type);
}

/* Emits the micro-steps of x ** exponent; `*done` is false where the general function is to be used. */
static EwRef emit_power(Builder *b, DType type, EwRef x, Scalar exponent, bool *done) {
    double e = scalar_f64(exponent);
    DType c = compute_type(type);
    Op op = special_power(type, e);
    EwFn mul = find_binary(b, OP_mul, c);
    *done = true;
    if (op != OP_COUNT) return emit(b, find_unary(b, op, c, false), c, x, NO_REF, NO_REF);
    if (!mul || type == DTYPE_F16) goto general;
    if (e == 2) return emit(b, mul, c, x, x, NO_REF);
    if (e == 3) return emit(b, mul, c, emit(b, mul, c, x, x, NO_REF), x, NO_REF);
    if (e == -2 && dtype_is_float(type)) {
        EwRef square = emit(b, mul, c, x, x, NO_REF);
        return emit(b, find_unary(b, OP_reciprocal, c, false), c, square, NO_REF, NO_REF);
    }
general:
    *done = false;
    return NO_REF;
}

/* Operators whose result is one of the operands or exact in half precision: no rounding needed after them. */
static bool keeps_half(Op op) {
    switch (op) {
    case OP_neg:
    case OP_abs:
    case OP_sign:
    case OP_floor:
    case OP_ceil:
    case OP_round:
    case OP_trunc:
    case OP_relu:
    case OP_minimum:
    case OP_maximum:
    case OP_where:
    case OP_clamp: return true;
    default: return false;
    }
}

static Code emit_step(Context *ctx, Builder *b, const Step *step, bool last, EwRef *out) {
    DType type = source_type(b, step->src[step->op == OP_where]);
    DType c = compute_type(type), made = compute_type(step->dtype);
    EwRef x = source_ref(b, step->src[0]), y = NO_REF, z = NO_REF;
    EwFn fn = NULL;
    if (step->op == OP_cast) {
        *out = x;
        if (c == made && (!last || is_half(step->dtype))) goto rounded;
        fn = find_cast(b, c, made);
    } else if (step->op == OP_where) {
        y = source_ref(b, step->src[1]);
        z = source_ref(b, step->src[2]);
        fn = b->avx2 && dtype_size(c) == 4 ? avx2_where32() : NULL;
        if (!fn) fn = ew_where(dtype_size(c));
    } else if (step->op == OP_clamp) {
        y = immediate(b, c, half_scalar(step, type, bound(type, step->scalar, false)));
        z = immediate(b, c, half_scalar(step, type, bound(type, step->high, true)));
        fn = b->avx2 && c == DTYPE_F32 ? avx2_clamp() : NULL;
        if (!fn) fn = ew_clamp(c);
    } else if (step->src[1] == STEP_NONE && step->scalar.kind == SCALAR_NONE) {
        fn = find_unary(b, step->op, c, step->flag);
    } else {
        bool tensors = step->src[1] != STEP_NONE || step->flag;
        fn = find_binary(b, step->op, c);
        if (is_half(type) && tensors && ew_binary(step->op, type)) fn = ew_binary(step->op, type);
        if (step->src[1] != STEP_NONE) {
            y = source_ref(b, step->src[1]);
        } else {
            Scalar s = half_scalar(step, type, step->scalar);
            if (step->op == OP_pow && !step->flag) {
                if (dtype_is_int(type) && scalar_f64(s) < 0) return ew_fail(ctx, EW_NEGATIVE_POWER);
                bool done;
                *out = emit_power(b, type, x, s, &done);
                if (done) goto rounded;
            }
            y = immediate(b, c, s);
            if (step->flag) {
                EwRef t = x;
                x = y;
                y = t;
            }
        }
    }
    if (!fn)
        return fail(ctx, CODE_UNSUPPORTED, "no host kernel for %s of %s", op_info(step->op)->name, dtype_name(type));
    *out = emit(b, fn, made, x, y, z);
rounded:
    if (is_half(step->dtype) && !last && !(type == step->dtype && (step->op == OP_cast || keeps_half(step->op))))
        *out = emit(b, find_round(b, step->dtype), DTYPE_F32, *out, NO_REF, NO_REF);
    return CODE_OK;
}

/* Virtual registers to slots: a linear scan over the micro-steps. A result may take the slot of an operand that ends
 * there if both have one element size (functions read element i before they write it). */
static void assign_slots(Builder *b) {
    EwProgram *p = b->p;
    int last_use[EW_MAX_MICRO];
    int8_t slot_of[EW_MAX_MICRO];
    bool taken[EW_MAX_MICRO] = {false};
    p->slot_bytes = 4;
    for (uint32_t i = 0; i < p->n_micro; i++) {
        last_use[i] = (int)i;
        if (b->bytes[i] > 4) p->slot_bytes = 8;
        for (int k = 0; k < 3; k++)
            if (p->micro[i].src[k].kind == EW_SLOT) last_use[p->micro[i].src[k].index] = (int)i;
    }
    for (uint32_t i = 0; i < p->n_micro; i++) {
        EwMicro *micro = &p->micro[i];
        for (int pass = 0; pass < 2; pass++) {
            for (int k = 0; k < 3; k++) {
                EwRef *ref = &micro->src[k];
                if (ref->kind != EW_SLOT) continue;
                bool same = b->bytes[ref->index] == b->bytes[i];
                if (last_use[ref->index] == (int)i && same == (pass == 0)) taken[slot_of[ref->index]] = false;
            }
            if (pass == 1) break;
            int8_t s = 0;
            while (taken[s]) s++;
            taken[s] = i + 1 < p->n_micro;
            slot_of[i] = s;
            if (taken[s] && (uint32_t)s >= p->n_slots) p->n_slots = (uint32_t)s + 1;
        }
        for (int k = 0; k < 3; k++)
            if (micro->src[k].kind == EW_SLOT) micro->src[k].index = (uint8_t)slot_of[micro->src[k].index];
        micro->slot = i + 1 < p->n_micro ? slot_of[i] : -1;
        if (last_use[i] == (int)i) taken[slot_of[i]] = false;
    }
}

Code ew_prepare(Context *ctx, EwProgram *p, const int64_t *words, size_t n_words, const DType *input_types,
                size_t n_inputs, bool accumulator) {
    size_t n_steps = n_words / STEP_WORDS;
    if (n_steps > PROGRAM_MAX_STEPS || n_inputs > PROGRAM_MAX_INPUTS)
        return fail(ctx, CODE_INVALID, "elementwise program of %zu steps over %zu inputs is too large", n_steps,
                    n_inputs);
    Builder b = {.p = p, .avx2 = cpu_has_avx2(), .accumulator = accumulator, .input_types = input_types};
    p->n_micro = p->n_slots = p->n_immediates = 0;
    p->n_inputs = (uint32_t)n_inputs;
    p->last = OP_COUNT;
    memcpy(p->input, input_types, n_inputs * sizeof *input_types);
    if (accumulator) p->input[0] = DTYPE_F32;
    EwRef result;
    if (n_steps == 0) {
        p->result = input_types[0];
        result = input_ref(&b, 0);
        if (p->n_micro == 0) emit(&b, find_cast(&b, p->result, p->result), p->result, result, NO_REF, NO_REF);
    }
    for (size_t i = 0; i < n_steps; i++) {
        Step step;
        if (!step_decode(words + i * STEP_WORDS, &step))
            return fail(ctx, CODE_INVALID, "malformed elementwise step %zu", i);
        TRY(emit_step(ctx, &b, &step, i + 1 == n_steps, &result));
        b.steps[i] = result;
        b.types[i] = p->result = step.dtype;
        p->last = step.op;
    }
    if (is_half(p->result)) emit(&b, find_cast(&b, DTYPE_F32, p->result), p->result, result, NO_REF, NO_REF);
    assign_slots(&b);
    return CODE_OK;
}

static bool is_ref(EwRef ref, EwRefKind kind, int index) { return ref.kind == kind && ref.index == index; }

bool ew_split(const EwProgram *p, EwProgram *head, Op *last) {
    if (p->result != DTYPE_F32 || p->input[0] != DTYPE_F32 || p->n_micro == 0 || p->n_inputs > 2) return false;
    *head = *p;
    *last = OP_COUNT;
    if (p->n_inputs == 1) return true;
    const EwMicro *join = &p->micro[--head->n_micro];
    EwMicro *before = head->n_micro ? &head->micro[head->n_micro - 1] : NULL;
    if ((p->last != OP_add && p->last != OP_mul) || p->input[1] != DTYPE_F32) return false;
    int first = is_ref(join->src[1], EW_INPUT, 1) ? 0 : 1;
    if (!is_ref(join->src[1 - first], EW_INPUT, 1) || join->src[2].kind != EW_NONE) return false;
    EwRef sum = join->src[first];
    if (before ? !is_ref(sum, EW_SLOT, before->slot) : !is_ref(sum, EW_INPUT, 0)) return false;
    for (uint32_t i = 0; i < head->n_micro; i++)
        for (int k = 0; k < 3; k++)
            if (is_ref(head->micro[i].src[k], EW_INPUT, 1)) return false;
    if (before) before->slot = -1;
    head->n_inputs = 1;
    *last = p->last;
    return true;
}

/* --- running ------------------------------------------------------------------------------------------------------ */
/* One piece; a slot is `slot_size` bytes. */
static EwFault run_piece(const EwProgram *p, void *dst, const EwSrc *inputs, unsigned char *slots, size_t slot_size,
                         int64_t n) {
    for (uint32_t i = 0; i < p->n_micro; i++) {
        const EwMicro *micro = &p->micro[i];
        EwSrc src[3] = {{0}};
        for (int k = 0; k < 3; k++) {
            EwRef ref = micro->src[k];
            if (ref.kind == EW_INPUT) src[k] = inputs[ref.index];
            if (ref.kind == EW_SLOT) src[k] = (EwSrc){slots + ref.index * slot_size, 1};
            if (ref.kind == EW_IMMEDIATE) src[k] = (EwSrc){&p->immediates[ref.index], 0};
        }
        EwFault fault = micro->fn(micro->slot < 0 ? dst : slots + (size_t)micro->slot * slot_size, src, n);
        if (fault != EW_OK) return fault;
    }
    return EW_OK;
}

/* Elements a piece, so that `slots` of `bytes` an element fit the buffer; a multiple of 16 keeps slots 64-byte
 * aligned. */
static int64_t piece_size(uint32_t slots, size_t bytes) {
    int64_t n = slots ? (int64_t)(EW_BUFFER / (slots * bytes)) & ~(int64_t)15 : EW_CHUNK;
    return n > EW_CHUNK ? EW_CHUNK : n;
}

EwFault ew_row(const EwProgram *p, void *dst, const EwSrc *inputs, int64_t n) {
    _Alignas(64) unsigned char buffer[EW_BUFFER];
    int64_t piece = piece_size(p->n_slots, p->slot_bytes);
    size_t width = dtype_size(p->result);
    EwSrc at[PROGRAM_MAX_INPUTS];
    memcpy(at, inputs, p->n_inputs * sizeof *at);
    for (int64_t done = 0; done < n; done += piece) {
        int64_t count = n - done < piece ? n - done : piece;
        EwFault fault =
            run_piece(p, (char *)dst + (size_t)done * width, at, buffer, (size_t)piece * p->slot_bytes, count);
        if (fault != EW_OK) return fault;
        for (uint32_t k = 0; k < p->n_inputs; k++)
            if (at[k].stride) at[k].data = (const char *)at[k].data + (size_t)count * dtype_size(p->input[k]);
    }
    return EW_OK;
}

EwFault ew_rows(const EwProgram *p, void *dst, int64_t dst_step, const EwSrc *inputs, const int64_t *steps,
                int64_t rows, int64_t n) {
    _Alignas(64) unsigned char buffer[EW_BUFFER];
    int64_t piece = piece_size(p->n_slots, p->slot_bytes);
    EwSrc at[PROGRAM_MAX_INPUTS];
    memcpy(at, inputs, p->n_inputs * sizeof *at);
    for (int64_t row = 0; row < rows; row++) {
        EwFault fault =
            n <= piece ? run_piece(p, dst, at, buffer, (size_t)piece * p->slot_bytes, n) : ew_row(p, dst, at, n);
        if (fault != EW_OK) return fault;
        dst = (char *)dst + dst_step;
        for (uint32_t k = 0; k < p->n_inputs; k++) at[k].data = (const char *)at[k].data + steps[k];
    }
    return EW_OK;
}

enum { MIN_ROW = 64, PART = 8192, MAX_OPERANDS = PROGRAM_MAX_INPUTS + 1 };

/* The iteration space of a run: the result's dimensions in its memory order, size-1 dimensions dropped and neighbours
 * merged where every operand allows it. Operand n_in is the result. */
typedef struct Walk {
    const EwProgram *p;
    uint32_t n_in;
    int rank; /* >= 1 */
    int64_t shape[MAX_RANK];
    int64_t strides[MAX_OPERANDS][MAX_RANK]; /* elements */
    char *data[MAX_OPERANDS];
    size_t size[MAX_OPERANDS];
    bool linear[MAX_OPERANDS]; /* walks memory one by one over the whole space */
    bool scalar[MAX_OPERANDS];
    bool by_rows; /* pieces do not cross rows */
    int64_t count, piece;
    size_t slot_bytes;
    atomic_int fault;
} Walk;

static void make_walk(Walk *s, const Tensor *in, const Tensor *out) {
    int order[MAX_RANK], rank = 0;
    uint32_t n = s->n_in + 1;
    for (int d = 0; d < out->rank; d++) {
        if (out->shape[d] == 1) continue;
        int at = rank++;
        while (at > 0 && out->strides[order[at - 1]] < out->strides[d]) {
            order[at] = order[at - 1];
            at--;
        }
        order[at] = d;
    }
    s->rank = 0;
    for (int i = 0; i < rank; i++) {
        int64_t size = out->shape[order[i]], stride[MAX_OPERANDS];
        bool merge = s->rank > 0;
        for (uint32_t k = 0; k < n; k++) {
            const Tensor *t = k < s->n_in ? &in[k] : out;
            int d = order[i] - (out->rank - t->rank);
            stride[k] = d < 0 || t->shape[d] == 1 ? 0 : t->strides[d];
            if (merge && s->strides[k][s->rank - 1] != stride[k] * size) merge = false;
        }
        if (!merge)
            s->shape[s->rank++] = size;
        else
            s->shape[s->rank - 1] *= size;
        for (uint32_t k = 0; k < n; k++) s->strides[k][s->rank - 1] = stride[k];
    }
    if (s->rank == 0) {
        s->shape[s->rank++] = 1;
        for (uint32_t k = 0; k < n; k++) s->strides[k][0] = k < s->n_in ? 0 : 1;
    }
    for (uint32_t k = 0; k < n; k++) {
        const Tensor *t = k < s->n_in ? &in[k] : out;
        int64_t expect = 1;
        s->data[k] = t->data;
        s->size[k] = dtype_size(t->dtype);
        s->linear[k] = s->scalar[k] = true;
        for (int d = s->rank - 1; d >= 0; d--) {
            if (s->strides[k][d] != expect) s->linear[k] = false;
            if (s->strides[k][d] != 0) s->scalar[k] = false;
            expect *= s->shape[d];
        }
    }
}

/* Moves `n` elements of operand k from position `index` on between its memory and a slot. */
static void move_operand(const Walk *s, uint32_t k, const int64_t *index, int64_t n, char *slot, bool gather) {
    const int64_t *strides = s->strides[k], inner = s->shape[s->rank - 1], stride = strides[s->rank - 1];
    int64_t at[MAX_RANK], offset = 0;
    for (int d = 0; d < s->rank; d++) {
        at[d] = index[d];
        offset += index[d] * strides[d];
    }
    /* Rows may be as short as two elements: the type is chosen outside of the loops. */
#define MOVE(T)                                                                                                        \
    for (T *m = (T *)(void *)s->data[k], *v = (T *)(void *)slot; n > 0;) {                                             \
        int64_t run = inner - at[s->rank - 1] < n ? inner - at[s->rank - 1] : n;                                       \
        if (gather)                                                                                                    \
            for (int64_t i = 0; i < run; i++) v[i] = m[offset + i * stride];                                           \
        else                                                                                                           \
            for (int64_t i = 0; i < run; i++) m[offset + i * stride] = v[i];                                           \
        v += run;                                                                                                      \
        n -= run;                                                                                                      \
        offset -= at[s->rank - 1] * stride;                                                                            \
        at[s->rank - 1] = 0;                                                                                           \
        for (int d = s->rank - 2; d >= 0; d--) {                                                                       \
            offset += strides[d];                                                                                      \
            if (++at[d] < s->shape[d]) break;                                                                          \
            offset -= at[d] * strides[d];                                                                              \
            at[d] = 0;                                                                                                 \
        }                                                                                                              \
    }                                                                                                                  \
    break
    switch (s->size[k]) {
    case 1: MOVE(uint8_t);
    case 2: MOVE(uint16_t);
    case 4: MOVE(uint32_t);
    default: MOVE(uint64_t);
    }
#undef MOVE
}

static void run_part(void *arg, int64_t part, int thread) {
    (void)thread;
    Walk *s = arg;
    const EwProgram *p = s->p;
    _Alignas(64) unsigned char buffer[EW_BUFFER];
    size_t slot_size = (size_t)s->piece * s->slot_bytes;
    int64_t index[MAX_RANK], begin = part * PART, end = begin + PART < s->count ? begin + PART : s->count, rest = begin;
    int last = s->rank - 1;
    for (int d = last; d >= 0; d--) {
        index[d] = rest % s->shape[d];
        rest /= s->shape[d];
    }
    for (int64_t pos = begin, n; pos < end; pos += n) {
        n = end - pos < s->piece ? end - pos : s->piece;
        if (s->by_rows && n > s->shape[last] - index[last]) n = s->shape[last] - index[last];
        EwSrc src[PROGRAM_MAX_INPUTS];
        uint32_t slot = p->n_slots;
        char *dst = NULL;
        for (uint32_t k = 0; k <= s->n_in; k++) {
            bool direct = s->linear[k] || s->scalar[k];
            ptrdiff_t stride = s->scalar[k] ? 0 : 1;
            char *data = s->data[k];
            if (s->linear[k]) {
                data += pos * (int64_t)s->size[k];
            } else if (!direct && s->by_rows && (s->strides[k][last] == 0 || s->strides[k][last] == 1)) {
                direct = true;
                stride = s->strides[k][last];
                for (int d = 0; d <= last; d++) data += index[d] * s->strides[k][d] * (int64_t)s->size[k];
            }
            if (!direct) {
                data = (char *)buffer + slot++ * slot_size;
                if (k < s->n_in) move_operand(s, k, index, n, data, true);
            }
            if (k < s->n_in)
                src[k] = (EwSrc){data, stride};
            else
                dst = data;
        }
        EwFault fault = run_piece(p, dst, src, buffer, slot_size, n);
        if (fault != EW_OK) {
            atomic_store(&s->fault, (int)fault);
            return;
        }
        if (slot > p->n_slots && dst == (char *)buffer + (slot - 1) * slot_size)
            move_operand(s, s->n_in, index, n, dst, false);
        index[last] += n;
        for (int d = last; d > 0 && index[d] >= s->shape[d]; d--) {
            index[d - 1] += index[d] / s->shape[d];
            index[d] %= s->shape[d];
        }
    }
}

Code ew_run(Context *ctx, Pool *pool, const EwProgram *p, const Tensor *in, size_t n_in, Tensor *out) {
    Walk s = {.p = p, .n_in = (uint32_t)n_in, .count = tensor_count(out)};
    if (s.count == 0) return CODE_OK;
    make_walk(&s, in, out);
    s.by_rows = s.shape[s.rank - 1] >= MIN_ROW;
    uint32_t slots = p->n_slots;
    for (uint32_t k = 0; k <= s.n_in; k++) {
        int64_t inner = s.strides[k][s.rank - 1];
        slots += !(s.linear[k] || s.scalar[k] || (s.by_rows && (inner == 0 || inner == 1)));
    }
    s.slot_bytes = p->slot_bytes;
    for (uint32_t k = 0; k <= s.n_in; k++) s.slot_bytes = s.size[k] > s.slot_bytes ? s.size[k] : s.slot_bytes;
    s.piece = piece_size(slots, s.slot_bytes);
    pool_run(s.count >= 2 * PART ? pool : NULL, (s.count + PART - 1) / PART, run_part, &s);
    return ew_fail(ctx, (EwFault)atomic_load(&s.fault));
}

Code elementwise_kernel(KernelCall *call) {
    DType types[PROGRAM_MAX_INPUTS];
    int32_t srcs[3] = {0, 1, 2};
    EwProgram p;
    if (call->n_in > PROGRAM_MAX_INPUTS)
        return fail(call->ctx, CODE_INVALID, "elementwise over %u operands", call->n_in);
    for (uint32_t k = 0; k < call->n_in; k++) types[k] = call->in[k].dtype;
    if (call->node->op == OP_elementwise) {
        const Attr *program = node_attr(call->node, ATTR_program);
        TRY(ew_prepare(call->ctx, &p, program->ints.items, program->ints.count, types, call->n_in, false));
    } else {
        Step step;
        int64_t words[STEP_WORDS];
        step_from_node(call->node, call->out[0].dtype, srcs, call->n_in, &step);
        step_encode(&step, words);
        TRY(ew_prepare(call->ctx, &p, words, STEP_WORDS, types, call->n_in, false));
    }
    return ew_run(call->ctx, call->pool, &p, call->in, call->n_in, &call->out[0]);
}
