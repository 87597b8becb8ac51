/* The text form of graphs: what is printed parses back to the same text, and no bytes whatever crash the parser. */
#include "graph/program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static const char sample[] =
    "graph {\n"
    "  %0 = input {index=0} : i64[1,4]\n"
    "  %1 = constant @wte.weight {index=0} : f32[50257,8] state strides(1,50257)\n"
    "  %2 = constant @\"odd \\\"name\\\"\\n\" {index=1} : f32[2,3] state = [1.0, -0.0, nan, -inf, 0.1, 1e-45]\n"
    "  %3 = constant {index=2} : i64[] literal derived = [-9223372036854775808]\n"
    "  %4 = constant {index=3} : bool[2] literal = [true, false]\n"
    "  %5 = constant {index=4} : c64[1] literal = [(1.0, -2.5)]\n"
    "  %6 = constant {index=5} : bf16[2,2] literal strides(1,2) = [1.0, 2.0, 3.0, 0.0019989014]\n"
    "  %7 = constant {index=6} : u8[0] literal = []\n"
    "  %8 = embedding %1, %0 : f32[1,4,8] loc(\"modeling.py:12 in forward\")\n"
    "  %9, %10 = layer_norm %8, _, _, %8 {axes=1, eps=1e-05} : f32[1,4,8], f32[1,4,8] loc(\"modeling.py:12 in "
    "forward\")\n"
    "  %11, %12 = topk %9 {dim=2, k=5, largest=true, sorted=true} : f32[1,4,5], i64[1,4,5]\n"
    "  %13 = add %11 {scalar=1} : f32[1,4,5]\n"
    "  %14 = sub %13 {scalar=1.0, reverse=true} : f32[1,4,5]\n"
    "  %15 = permute %14 {dims=[1, 0, 2]} : f32[4,1,5]\n"
    "  %16 = elementwise %15, %15 {program=[s0 = gelu(i0) approximate : f32; s1 = add(s0, i1) : f32; "
    "s2 = sub(2.0, s1) : f32; s3 = mul(s2, 3) : f32; s4 = clamp(s3, low=-1.5, high=inf) : f32; s5 = lt(s4, s0) : bool; "
    "s6 = where(s5, i0, s4) : f32; s7 = cast(s6) : f16]} : f16[4,1,5]\n"
    "  %17 = elementwise %15 {program=[1, 2, 3]} : f32[4,1,5]\n"
    "  host %16 {name=\"aten::print\", effect=true}\n"
    "  %18, %19 = host %16 {index=3, name=\"aten::odd\"} : object[], f32[2]\n"
    "  return %18, %12, %12\n"
    "}\n";

/* Parses and prints; NULL when the text does not parse. */
static char *again(const char *text, size_t size, uint64_t fail_allocation) {
    Context ctx;
    Arena arena;
    Graph *g, *clone;
    Text out;
    char *result = NULL;
    context_init(&ctx);
    ctx.fail_allocation = fail_allocation;
    arena_init(&arena);
    text_init(&out);
    if (graph_parse(&ctx, &arena, text, size, &g) == CODE_OK) {
        if (graph_compact(&ctx, g) == CODE_OK && graph_clone(&ctx, g, &arena, &clone) == CODE_OK &&
            graph_print(&ctx, clone, &out) == CODE_OK) {
            result = strdup(out.data);
        }
    } else {
        CHECK(g == NULL && ctx.text[0] && ctx.code != CODE_OK);
    }
    text_destroy(&out);
    arena_destroy(&arena);
    return result;
}

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Random edits of the sample: what still parses must be a fixed point after one printing. */
static void fuzz(int rounds) {
    static const char pieces[] = "%0123456789=[](){},:;_@\"\\#/ \n\tsi.-e+naf";
    uint32_t seed = 7;
    char *text = malloc(4 * sizeof sample);
    for (int round = 0; round < rounds; round++) {
        size_t size = sizeof sample - 1;
        memcpy(text, sample, size);
        for (uint32_t edits = 1 + next_random(&seed) % 4; edits; edits--) {
            size_t at = next_random(&seed) % size, length = 1 + next_random(&seed) % 12, to = next_random(&seed) % size;
            switch (next_random(&seed) % 5) {
            case 0: text[at] = (char)next_random(&seed); break;
            case 1: text[at] = pieces[next_random(&seed) % (sizeof pieces - 1)]; break;
            case 2:
                if (at + length < size) memmove(text + at, text + at + length, size - at - length), size -= length;
                break;
            case 3:
                if (at + length < size && size + length < 3 * sizeof sample) {
                    char copy[16];
                    memcpy(copy, text + at, length);
                    memmove(text + to + length, text + to, size - to);
                    memcpy(text + to, copy, length);
                    size += length;
                }
                break;
            default:
                if (next_random(&seed) % 8 == 0) size = 1 + at;
            }
        }
        char *exact = malloc(size); /* so that a sanitizer sees a read past the end */
        memcpy(exact, text, size);
        char *once = again(exact, size, 0);
        if (once) {
            char *twice = again(once, strlen(once), 0);
            CHECK(twice && strcmp(once, twice) == 0);
            free(twice);
        }
        free(once);
        free(exact);
    }
    free(text);
}

int main(void) {
    char *once = again(sample, sizeof sample - 1, 0);
    CHECK(once);
    if (!once) return check_done();
    char *twice = again(once, strlen(once), 0);
    CHECK(twice && strcmp(once, twice) == 0);
    CHECK(strcmp(once, sample) == 0);
    free(once);
    free(twice);
    for (uint64_t n = 1;; n++) { /* every allocation fails once */
        char *text = again(sample, sizeof sample - 1, n);
        free(text);
        if (text) break;
        CHECK(n < 100000);
    }
    fuzz(20000);
    return check_done();
}
