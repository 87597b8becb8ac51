/* Small models as graph text, a letter a layer: what repeats in them is known. */
#ifndef FORGE_TESTS_LAYER_MODELS_H
#define FORGE_TESTS_LAYER_MODELS_H

#include <stdio.h>

#include "base/arena.h"

enum { SEQ = 16, WIDTH = 32, HEADS = 4, WIDE = 96 };

typedef struct Writer {
    Text text;
    int value, constant, x;
} Writer;

static inline int constant(Writer *w, const char *type) {
    text_add(&w->text, "%%%d = constant @c%d {index=%d} : %s state\n", w->value, w->constant, w->constant, type);
    w->constant++;
    return w->value++;
}

static inline int weight(Writer *w, int rows, int columns) {
    char type[40];
    snprintf(type, sizeof type, "f32[%d,%d]", rows, columns);
    return constant(w, type);
}

static inline int norm(Writer *w, int x) {
    int scale = constant(w, "f32[32]"), y = w->value;
    text_add(&w->text, "%%%d, %%%d = rms_norm %%%d, %%%d {axes=1, eps=1e-05} : f32[1,%d,%d], f32[1,%d,%d]\n", y, y + 1,
             x, scale, SEQ, WIDTH, SEQ, WIDTH);
    w->value += 2;
    return y;
}

static inline int linear(Writer *w, int x, int rows, int columns, int residual) {
    int matrix = weight(w, rows, columns);
    text_add(&w->text, "%%%d = linear %%%d, %%%d", w->value, x, matrix);
    if (residual >= 0) text_add(&w->text, ", _, %%%d {program=[s0 = add(i0, i1) : f32]}", residual);
    text_add(&w->text, " : f32[1,%d,%d]\n", SEQ, rows);
    return w->value++;
}

static inline int heads(Writer *w, int x) {
    int y = w->value;
    text_add(&w->text, "%%%d = reshape %%%d {shape=[1, %d, %d, %d]} : f32[1,%d,%d,%d]\n", y, x, SEQ, HEADS,
             WIDTH / HEADS, SEQ, HEADS, WIDTH / HEADS);
    text_add(&w->text, "%%%d = permute %%%d {dims=[0, 2, 1, 3]} : f32[1,%d,%d,%d]\n", y + 1, y, HEADS, SEQ,
             WIDTH / HEADS);
    w->value += 2;
    return y + 1;
}

static inline int mlp(Writer *w, int x) {
    int up = linear(w, norm(w, x), WIDE, WIDTH, -1);
    text_add(&w->text, "%%%d = silu %%%d : f32[1,%d,%d]\n", w->value, up, SEQ, WIDE);
    return linear(w, w->value++, WIDTH, WIDE, x);
}

static inline int attention_layer(Writer *w, int x, double scale, bool host) {
    int y = norm(w, x);
    int q = heads(w, linear(w, y, WIDTH, WIDTH, -1)), k = heads(w, linear(w, y, WIDTH, WIDTH, -1));
    int v = heads(w, linear(w, y, WIDTH, WIDTH, -1)), a = w->value;
    text_add(&w->text, "%%%d = attention %%%d, %%%d, %%%d {causal=true, safe=true, scale=%.17g} : f32[1,%d,%d,%d]\n", a,
             q, k, v, scale, HEADS, SEQ, WIDTH / HEADS);
    text_add(&w->text, "%%%d = permute %%%d {dims=[0, 2, 1, 3]} : f32[1,%d,%d,%d]\n", a + 1, a, SEQ, HEADS,
             WIDTH / HEADS);
    text_add(&w->text, "%%%d = reshape %%%d {shape=[1, %d, %d]} : f32[1,%d,%d]\n", a + 2, a + 1, SEQ, WIDTH, SEQ,
             WIDTH);
    w->value += 3;
    x = linear(w, a + 2, WIDTH, WIDTH, x);
    if (host) {
        text_add(&w->text, "%%%d = host %%%d {name=\"aten::odd\"} : f32[1,%d,%d]\n", w->value, x, SEQ, WIDTH);
        x = w->value++;
    }
    return mlp(w, x);
}

static inline int gate_layer(Writer *w, int x) {
    int y = linear(w, norm(w, x), WIDTH, WIDTH, -1);
    text_add(&w->text, "%%%d = sigmoid %%%d : f32[1,%d,%d]\n", w->value, y, SEQ, WIDTH);
    text_add(&w->text, "%%%d = mul %%%d, %%%d : f32[1,%d,%d]\n", w->value + 1, w->value, y, SEQ, WIDTH);
    w->value += 2;
    return mlp(w, linear(w, w->value - 1, WIDTH, WIDTH, x));
}

/* One letter a layer: A attention, a the same with another scale, H with a host call, G gate, N a norm alone; L: the
 * head, 200 wide. */
static inline void model(Writer *w, const char *layers) {
    *w = (Writer){0};
    text_init(&w->text);
    text_add(&w->text, "graph {\n%%0 = input {index=0} : f32[1,%d,%d]\n", SEQ, WIDTH);
    w->value = 1;
    for (const char *at = layers; *at; at++) {
        switch (*at) {
        case 'A': w->x = attention_layer(w, w->x, 0.25, false); break;
        case 'a': w->x = attention_layer(w, w->x, 0.5, false); break;
        case 'H': w->x = attention_layer(w, w->x, 0.25, true); break;
        case 'G': w->x = gate_layer(w, w->x); break;
        case 'N': w->x = norm(w, w->x); break;
        case 'L': w->x = linear(w, w->x, 200, WIDTH, -1); break;
        }
    }
    text_add(&w->text, "return %%%d\n}\n", w->x);
}

#endif
