/* The elementwise engine: runs programs (graph/program.h) over strided tensors, and over rows as the epilogue of a
 * GEMM.
 *
 * A program is prepared once a run into micro-steps over vectors of at most EW_CHUNK elements that stay in L1: typed
 * functions from the tables below, operands either contiguous or one broadcast element. f16 and bf16 live as f32
 * between micro-steps and are rounded after each step. What an element becomes depends on its operands alone, never on
 * its place. */
#ifndef FORGE_CPU_ELEMENTWISE_H
#define FORGE_CPU_ELEMENTWISE_H

#include "exec/kernel.h"
#include "graph/program.h"

/* Operand of a micro-step: `stride` is 0 (one element for all) or 1 (contiguous). */
typedef struct EwSrc {
    const void *data;
    ptrdiff_t stride;
} EwSrc;

/* What eager raises while computing. */
typedef enum EwFault { EW_OK, EW_DIVIDE_BY_ZERO, EW_NEGATIVE_POWER } EwFault;
Code ew_fail(Context *ctx, EwFault fault); /* CODE_OK for EW_OK, else the error text of eager */

typedef EwFault (*EwFn)(void *dst, const EwSrc *src, int64_t n);

enum {
    EW_CHUNK = 1024,
    EW_BUFFER = 32 << 10, /* working memory of a run, on the stack */
    EW_MAX_MICRO = 3 * PROGRAM_MAX_STEPS + PROGRAM_MAX_INPUTS + 2,
};

typedef enum EwRefKind { EW_NONE, EW_INPUT, EW_SLOT, EW_IMMEDIATE } EwRefKind;
typedef struct EwRef {
    uint8_t kind, index;
} EwRef;

typedef struct EwMicro {
    EwFn fn;
    EwRef src[3];
    int8_t slot; /* of its result; -1: the result of the program */
} EwMicro;

typedef struct EwProgram {
    uint32_t n_micro, n_inputs, n_slots, n_immediates;
    uint8_t slot_bytes; /* a slot's bytes an element: 4 or 8 */
    Op last;            /* of the last step; OP_COUNT without steps */
    DType result;
    DType input[PROGRAM_MAX_INPUTS]; /* as given: f32 for an accumulator */
    EwMicro micro[EW_MAX_MICRO];
    uint64_t immediates[2 * PROGRAM_MAX_STEPS];
} EwProgram;

/* `words`: as in attribute `program` (already checked by program_check); n_words 0: the result is input 0. With
 * `accumulator` input 0 is given as f32 whatever input_types[0] (f16, bf16, f32) and rounded to that type first. */
MUST_USE Code ew_prepare(Context *ctx, EwProgram *p, const int64_t *words, size_t n_words, const DType *input_types,
                         size_t n_inputs, bool accumulator);

/* Splits a program with an f32 result into what it makes of input 0 alone, in f32 (`head`; n_micro 0: nothing), and a
 * last step that adds input 1 to that or multiplies them (*last; OP_COUNT: none). False: it has another form. */
bool ew_split(const EwProgram *p, EwProgram *head, Op *last);

/* The epilogue form: n elements in a row. dst has type p->result, inputs[k] type p->input[k]; dst may be inputs[k].data
 * where both have one element size. Callable from any thread. */
MUST_USE EwFault ew_row(const EwProgram *p, void *dst, const EwSrc *inputs, int64_t n);

/* ew_row for so many rows; `steps` and dst_step: bytes from one to the next. */
MUST_USE EwFault ew_rows(const EwProgram *p, void *dst, int64_t dst_step, const EwSrc *inputs, const int64_t *steps,
                         int64_t rows, int64_t n);

/* Over whole tensors: inputs broadcast to out (same rank after aligning at the last dimension), any strides. */
MUST_USE Code ew_run(Context *ctx, Pool *pool, const EwProgram *p, const Tensor *in, size_t n_in, Tensor *out);

/* Kernel of every ELEMENTWISE operator. */
Code elementwise_kernel(KernelCall *call);

/* --- function tables; NULL where the operator does not exist for the type ----------------------------------------- */
EwFn ew_unary(Op op, DType operand, bool approximate); /* approximate: of gelu. Result: same type, or bool for tests */
EwFn ew_binary(Op op, DType operand);                  /* src 0 and 1; f16, bf16: on f32, where eager rounds within */
EwFn ew_where(size_t element_size);                    /* src 0 bool, 1, 2 */
EwFn ew_clamp(DType type);                             /* src 0, low, high */
EwFn ew_cast(DType from, DType to);
EwFn ew_round(DType half); /* f32 to the nearest f16 or bf16, still as f32 */

/* AVX2 forms for f32 (vector_avx2.c); NULL where there is none. Call only if cpu_has_avx2(). */
EwFn avx2_unary(Op op, bool approximate);
EwFn avx2_binary(Op op);
EwFn avx2_where32(void);
EwFn avx2_clamp(void);
EwFn avx2_cast(DType from, DType to);
EwFn avx2_round(DType half);

#endif
