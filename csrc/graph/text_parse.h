/* Parser state, shared by text_parse.c (statements) and text_parse_data.c (constants and programs). */
#ifndef FORGE_GRAPH_TEXT_PARSE_H
#define FORGE_GRAPH_TEXT_PARSE_H

#include "graph/program.h"

typedef struct Slice {
    const char *data;
    size_t size;
} Slice;

typedef struct NameEntry {
    Slice name; /* data NULL: free entry */
    uint32_t hash;
    char space;
    uint32_t number;
} NameEntry;

typedef struct Parser {
    Context *ctx;
    Graph *g;
    Arena *scratch;
    const char *at, *end;
    uint32_t line;
    size_t lines;
    NameEntry *names;
    uint32_t n_names, cap_names;
    /* one line's worth of each */
    char *buffer;
    ValueId *operands;
    Slice *results;
    Type *types;
    int64_t *ints;
    size_t cap_ints;
} Parser;

MUST_USE Code parse_fail(Parser *p, const char *what); /* "line 3: expected <what> at '...'" */
bool parse_accept(Parser *p, char c);
MUST_USE Code parse_expect(Parser *p, char c);
bool parse_accept_word(Parser *p, const char *text);
Slice parse_word(Parser *p);
bool slice_is(Slice s, const char *text);
MUST_USE Code parse_number(Parser *p, Scalar *out);
MUST_USE Code parse_int(Parser *p, int64_t *out);

/* text_parse_data.c */
MUST_USE Code parse_program(Parser *p, size_t *count); /* words into p->ints */
MUST_USE Code parse_constant(Parser *p, NodeId id, const char *name);

#endif
