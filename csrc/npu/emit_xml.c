/* The layers that the outputs need, as an OpenVINO IR file (version 11), and where each constant lies in the weights
 * file. */
#include <stdio.h>
#include <string.h>

#include "npu/emit.h"

enum { PIECE_ALIGNMENT = 64 };

/* Layers come after what they read, so one pass backwards finds all that is needed. */
static void mark_alive(Layers *l) {
    for (uint32_t k = 0; k < l->n_inputs; k++) l->items[l->wires[l->inputs[k]].layer].alive = true;
    for (uint32_t k = 0; k < l->n_outputs; k++) l->items[l->wires[l->outputs[k]].layer].alive = true;
    for (uint32_t i = l->count; i-- > 0;) {
        const Layer *layer = &l->items[i];
        for (uint32_t k = 0; layer->alive && k < layer->n_in; k++) l->items[l->wires[layer->in[k]].layer].alive = true;
    }
}

static void add_escaped(Text *text, const char *from) {
    for (; *from; from++) {
        switch (*from) {
        case '&': text_add(text, "&amp;"); break;
        case '<': text_add(text, "&lt;"); break;
        case '>': text_add(text, "&gt;"); break;
        case '"': text_add(text, "&quot;"); break;
        default: text_add(text, "%c", (unsigned char)*from < ' ' ? ' ' : *from);
        }
    }
}

static void add_port(Text *text, uint32_t id, const WireType *type, const char *names) {
    text_add(text, "<port id=\"%u\" precision=\"%s\"", id, element_xml(type->element, true));
    if (names[0]) text_add(text, " names=\"%s\"", names);
    if (type->rank == 0) {
        text_add(text, "/>");
        return;
    }
    text_add(text, ">");
    for (int d = 0; d < type->rank; d++) text_add(text, "<dim>%lld</dim>", (long long)type->shape[d]);
    text_add(text, "</port>");
}

/* The name of a wire that is an output of the model. */
static void output_name(const Layers *l, Wire wire, char *name, size_t size) {
    name[0] = 0;
    for (uint32_t k = 0; k < l->n_outputs; k++) {
        if (l->outputs[k] == wire) snprintf(name, size, "out%u", k);
    }
}

typedef struct Writer {
    Emitter *e;
    NpuModel *model;
    Text edges, names;
    uint32_t next; /* layer id */
} Writer;

static Code begin_layer(Writer *w, Layer *layer, const char *name, const char *data) {
    Text *xml = &w->model->xml;
    layer->id = w->next++;
    text_add(xml, "<layer id=\"%u\" name=\"", layer->id);
    add_escaped(xml, name);
    text_add(xml, "\" type=\"%s\" version=\"opset%u\">", layer->type, layer->opset);
    if (data[0]) text_add(xml, "<data %s/>", data);
    return CODE_OK;
}

static Code end_layer(Writer *w, const Layer *layer, const char *own) {
    const Layers *l = w->e->layers;
    Text *xml = &w->model->xml;
    if (layer->n_in) {
        text_add(xml, "<input>");
        for (uint32_t k = 0; k < layer->n_in; k++) {
            const WireInfo *from = &l->wires[layer->in[k]];
            const Layer *producer = &l->items[from->layer];
            add_port(xml, k, &from->type, "");
            text_add(&w->edges, "<edge from-layer=\"%u\" from-port=\"%u\" to-layer=\"%u\" to-port=\"%u\"/>\n",
                     producer->id, producer->n_in + from->port, layer->id, k);
        }
        text_add(xml, "</input>");
    }
    text_add(xml, "<output>");
    for (uint32_t k = 0; k < layer->n_out; k++) {
        char name[32];
        output_name(l, layer->first_out + k, name, sizeof name);
        add_port(xml, layer->n_in + k, &l->wires[layer->first_out + k].type, own[0] ? own : name);
    }
    text_add(xml, "</output></layer>\n");
    return CODE_OK;
}

static Code write_parameter(Writer *w, Wire wire, const char *prefix, uint32_t number) {
    Layers *l = w->e->layers;
    Layer *layer = &l->items[l->wires[wire].layer];
    char name[32];
    snprintf(name, sizeof name, "%s%u", prefix, number);
    TRY(begin_layer(w, layer, name, layer->data));
    return end_layer(w, layer, name);
}

static Code write_layer(Writer *w, Layer *layer) {
    NpuModel *model = w->model;
    char data[1024], number[16];
    if (layer->piece != UINT32_MAX) { /* Const */
        const WeightSource *source = &w->e->layers->pieces[layer->piece].source;
        uint32_t p = model->n_pieces++;
        model->pieces[p] = *source;
        model->offsets[p] = model->bin_bytes;
        snprintf(data, sizeof data, "%s offset=\"%lld\" size=\"%lld\"", layer->data, (long long)model->bin_bytes,
                 (long long)source->bytes);
        model->bin_bytes += (source->bytes + PIECE_ALIGNMENT - 1) / PIECE_ALIGNMENT * PIECE_ALIGNMENT;
    } else {
        snprintf(data, sizeof data, "%s", layer->data);
    }
    w->names.size = 0; /* names are unique by their number */
    snprintf(number, sizeof number, " #%u", w->next);
    text_add(&w->names, "%s%s", layer->name, number);
    if (w->names.failed) return text_done(w->e->ctx, &w->names);
    TRY(begin_layer(w, layer, w->names.data, data));
    return end_layer(w, layer, "");
}

static Code write_result(Writer *w, uint32_t k) {
    Layers *l = w->e->layers;
    const WireInfo *from = &l->wires[l->outputs[k]];
    const Layer *producer = &l->items[from->layer];
    Text *xml = &w->model->xml;
    uint32_t id = w->next++;
    text_add(xml, "<layer id=\"%u\" name=\"out%u\" type=\"Result\" version=\"opset1\" output_names=\"out%u\"><input>",
             id, k, k);
    add_port(xml, 0, &from->type, "");
    text_add(xml, "</input></layer>\n");
    text_add(&w->edges, "<edge from-layer=\"%u\" from-port=\"%u\" to-layer=\"%u\" to-port=\"0\"/>\n", producer->id,
             producer->n_in + from->port, id);
    return CODE_OK;
}

static Code write_model(Writer *w) {
    Emitter *e = w->e;
    Layers *l = e->layers;
    NpuModel *model = w->model;
    Text *xml = &model->xml;
    text_add(xml, "<?xml version=\"1.0\"?>\n<net name=\"forge\" version=\"11\">\n<layers>\n");
    for (uint32_t k = 0; k < l->n_inputs; k++) TRY(write_parameter(w, l->inputs[k], "in", k));
    for (uint32_t k = 0; k < l->n_args; k++) {
        if (!l->items[l->wires[l->args[k].wire].layer].alive) continue;
        model->args[model->n_args] = l->args[k].source;
        TRY(write_parameter(w, l->args[k].wire, "w", model->n_args++));
    }
    for (uint32_t i = 0; i < l->count; i++) {
        Layer *layer = &l->items[i];
        if (layer->alive && strcmp(layer->type, "Parameter") != 0) TRY(write_layer(w, layer));
    }
    for (uint32_t k = 0; k < l->n_outputs; k++) TRY(write_result(w, k));
    TRY(text_done(e->ctx, &w->edges));
    text_add(xml, "</layers>\n<edges>\n");
    if (w->edges.size) text_add(xml, "%s", w->edges.data);
    text_add(xml, "</edges>\n<rt_info><is_new_api value=\"true\"/><use_indices_for_io_metadata value=\"true\"/>"
                  "</rt_info>\n</net>\n");
    return text_done(e->ctx, xml);
}

Code emit_finish(Emitter *e, NpuModel *model) {
    Layers *l = e->layers;
    Writer w = {.e = e, .model = model};
    TRY(ARENA_NEW(e->ctx, e->arena, l->n_pieces, &model->pieces));
    TRY(ARENA_NEW(e->ctx, e->arena, l->n_pieces, &model->offsets));
    TRY(ARENA_NEW(e->ctx, e->arena, l->n_args, &model->args));
    mark_alive(l);
    text_init(&w.edges);
    text_init(&w.names);
    Code code = write_model(&w);
    text_destroy(&w.edges);
    text_destroy(&w.names);
    return code;
}
