/* Pieces of the graph's text form that the text form of NPUIR prints too. Each begins with a blank if it prints
 * anything. */
#ifndef FORGE_GRAPH_TEXT_PRINT_H
#define FORGE_GRAPH_TEXT_PRINT_H

#include "graph/graph.h"

void graph_print_attrs(Text *text, const Graph *g, const Node *node); /* " {dim=1, keepdim=true}" */
void graph_print_loc(Text *text, const Graph *g, int32_t source);     /* " loc("file.py:12")" */
/* Of a `constant` node: " @name", and what stands behind the type: " state strides(1,768) = [0.5]". */
void graph_print_constant_name(Text *text, const Constant *constant);
void graph_print_constant(Text *text, const Constant *constant);

#endif
