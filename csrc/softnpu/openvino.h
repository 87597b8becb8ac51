/* Runs OpenVINO IR on OpenVINO's CPU plugin in f32, through the C library of the `openvino` package. It is opened at
 * first use; neither its headers nor the library are needed to build or load the driver. */
#ifndef SOFTNPU_OPENVINO_H
#define SOFTNPU_OPENVINO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MODEL_MAX_RANK 8

typedef struct Model Model;
typedef struct ModelArgument {
    bool output;
    char name[256]; /* of the tensor */
    int type;       /* ov_element_type_e */
    unsigned rank;
    int64_t shape[MODEL_MAX_RANK];
    size_t bytes;
} ModelArgument;

/* NULL: OpenVINO cannot be used or refused the model; `log` says why. The buffers are copied. */
Model *model_load(const char *library, const char *xml, size_t xml_bytes, const void *bin, size_t bin_bytes, char *log,
                  size_t log_size);
void model_free(Model *model);
unsigned model_arguments(const Model *model); /* inputs first */
const ModelArgument *model_argument(const Model *model, unsigned index);
/* Reads inputs from and writes outputs to these addresses; threads may call at once. */
bool model_run(Model *model, void *const *arguments, char *log, size_t log_size);

#endif
