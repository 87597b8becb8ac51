/* What stands for the NPU's compiler: it checks what the real one checks before it compiles, refuses the operators that
 * it was told to refuse, and may ask a command, such as Intel's offline compiler. */
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "softnpu.h"

/* --- the source -------------------------------------------------------------------------------------------------- */

/* Packed, little endian: u16 major, u16 minor, u32 number of parts (2), u64 size, xml, u64 size, weights. */
ze_result_t source_parse(const uint8_t *data, size_t bytes, Source *out, char *log, size_t log_size) {
    const uint8_t *end = data + bytes;
    uint16_t version[2];
    uint32_t parts;
    uint64_t size;
    const char *wrong = NULL;
    memset(out, 0, sizeof *out);
    out->flags = "";
    if (bytes < 24) {
        snprintf(log, log_size, "[NPU_VCL] The IR content and size mismatch!\n");
        return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
    }
    memcpy(version, data, 4);
    memcpy(&parts, data + 4, 4);
    memcpy(&size, data + 8, 8);
    data += 16;
    if (ZE_MAKE_VERSION(version[0], version[1]) != settings().compiler)
        wrong = "Unsupported IR API version!";
    else if (parts >= 10)
        wrong = "Bad elements number in IR!";
    else if (!size || size > (uint64_t)(end - data) || (uint64_t)(end - data) - size < 8)
        wrong = "Bad buffer size in IR!";
    if (!wrong) {
        out->xml = (const char *)data;
        out->xml_bytes = size;
        data += size;
        memcpy(&size, data, 8);
        data += 8;
        out->bin = data;
        out->bin_bytes = size;
        if (size > (uint64_t)(end - data)) wrong = "Bad weights size in IR!";
    }
    if (!wrong) return OK;
    snprintf(log, log_size, "[NPU_VCL] %s\n", wrong);
    return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
}

static bool contains(const Source *source, const char *text) {
    return memmem(source->xml, source->xml_bytes, text, strlen(text)) != NULL;
}

/* The value of attribute `name` of the tag that begins at `tag`. */
static bool attribute(const char *tag, const char *end, const char *name, const char **value, size_t *length) {
    char wanted[32];
    int n = snprintf(wanted, sizeof wanted, " %s=\"", name);
    const char *close = memchr(tag, '>', (size_t)(end - tag));
    const char *at = close ? memmem(tag, (size_t)(close - tag), wanted, (size_t)n) : NULL;
    const char *quote = at ? memchr(at + n, '"', (size_t)(close - at - n)) : NULL;
    if (!quote) return false;
    *value = at + n;
    *length = (size_t)(quote - *value);
    return true;
}

void layer_of_tensor(const Source *source, const char *name, char *out, size_t size) {
    const char *at = source->xml, *end = source->xml + source->xml_bytes, *layer = NULL, *value;
    size_t length, wanted = strlen(name);
    *out = 0;
    while (wanted && (at = memchr(at, '<', (size_t)(end - at)))) {
        if (end - at > 7 && !memcmp(at, "<layer ", 7)) layer = at;
        if (layer && end - at > 6 && !memcmp(at, "<port ", 6) && attribute(at, end, "names", &value, &length)) {
            /* a list, separated by commas */
            const char *found = memmem(value, length, name, wanted);
            if (found && (found == value || found[-1] == ',') &&
                (found + wanted == value + length || found[wanted] == ',') &&
                attribute(layer, end, "name", &value, &length)) {
                snprintf(out, size, "%.*s", (int)length, value);
                return;
            }
        }
        at++;
    }
}

/* --- options ----------------------------------------------------------------------------------------------------- */

static const char options[] =
    "NPU_PLATFORM DEVICE_ID PERFORMANCE_HINT PERFORMANCE_HINT_NUM_REQUESTS INFERENCE_PRECISION_HINT "
    "EXECUTION_MODE_HINT PERF_COUNT LOG_LEVEL NPU_TILES NPU_MAX_TILES NPU_STEPPING NPU_COMPILATION_MODE "
    "NPU_COMPILATION_MODE_PARAMS COMPILATION_NUM_THREADS NPU_TURBO NPU_DMA_ENGINES NPU_BATCH_MODE";
const char *compiler_options(void) { return options; }

static bool listed(const char *list, const char *word, size_t length) {
    for (const char *at = list; length && (at = strstr(at, word)); at++) {
        if (at != list && at[-1] != ' ') continue;
        if (at[length] == ' ' || at[length] == 0) return true;
    }
    return false;
}

bool compiler_knows_option(const char *name, size_t length) {
    char word[64];
    if (length >= sizeof word) return false;
    memcpy(word, name, length);
    word[length] = 0;
    return listed(options, word, length);
}

/* '--inputs_precisions="" ... --config KEY="VALUE" ...'. NULL: good. */
static const char *flags_wrong(const Source *source, char *detail, size_t size) {
    static const char *const wanted[] = {"--inputs_precisions", "--inputs_layouts", "--outputs_precisions",
                                         "--outputs_layouts"};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (!strstr(source->flags, wanted[i])) {
            snprintf(detail, size, "%s", wanted[i]);
            return "Missing build flag";
        }
    /* Without precisions in the flags the compiler takes the model's own only if the model says so. */
    bool new_api = contains(source, "<is_new_api value=\"true\"") &&
                   contains(source, "<use_indices_for_io_metadata value=\"true\"");
    const char *precisions = strstr(source->flags, "--inputs_precisions");
    size_t skip = strcspn(precisions, "=");
    bool empty = precisions[skip] != '=' || strchr("\" ", precisions[skip + 1 + (precisions[skip + 1] == '"')]);
    if (empty && !new_api) {
        snprintf(detail, size, "is_new_api, use_indices_for_io_metadata");
        return "No precisions in the build flags, and rt_info lacks";
    }
    const char *at = strstr(source->flags, "--config");
    for (at = at ? at + 8 : ""; *(at += strspn(at, " "));) {
        size_t length = strcspn(at, "=");
        const char *end = at[length] && at[length + 1] == '"' ? strchr(at + length + 2, '"') : NULL;
        if (!end || !compiler_knows_option(at, length)) {
            snprintf(detail, size, "%.*s", (int)length, at);
            return "[ NOT_FOUND ] Option is not supported";
        }
        at = end + 1;
    }
    return NULL;
}

/* --- the compiler ------------------------------------------------------------------------------------------------ */

bool file_write(const char *path, const void *data, size_t bytes) {
    FILE *f = fopen(path, "wb");
    if (!f) return false;
    bool good = fwrite(data, 1, bytes, f) == bytes;
    return fclose(f) == 0 && good;
}

uint8_t *file_read(const char *path, size_t *bytes) {
    FILE *f = fopen(path, "rb");
    long size = f && !fseek(f, 0, SEEK_END) ? ftell(f) : 0;
    uint8_t *data = size > 0 && !fseek(f, 0, SEEK_SET) ? malloc((size_t)size) : NULL;
    *bytes = data ? fread(data, 1, (size_t)size, f) : 0;
    if (f) fclose(f);
    return data;
}

/* Runs the command, a line for the shell that sees $XML (its weights beside it, as .bin), $BLOB (where the compiled
 * graph may be put), $DEVICE and $CONFIG. What it prints goes to $BLOB.log. */
static bool command_run(const char *command, const char *stem, const char *config) {
    extern char **environ;
    char *script = NULL;
    Settings s = settings();
    if (strchr(config, '\'')) return false;
    if (asprintf(&script, "XML='%s.xml' BLOB='%s.blob' DEVICE='%s' CONFIG='%s'\nexec >'%s.blob.log' 2>&1\n%s", stem,
                 stem, s.target, config, stem, command) < 0)
        return false;
    char sh[] = "sh", c[] = "-c";
    char *arguments[] = {sh, c, script, NULL};
    pid_t child;
    int status = -1;
    bool started = !posix_spawn(&child, "/bin/sh", NULL, NULL, arguments, environ);
    free(script);
    return started && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static ze_result_t ask_command(const Settings *s, const Source *source, uint8_t **blob, size_t *blob_bytes, char *log,
                               size_t log_size) {
    static unsigned counter;
    char stem[400], path[420];
    snprintf(stem, sizeof stem, "%s/graph-%u", s->folder, __atomic_add_fetch(&counter, 1, __ATOMIC_RELAXED));
    snprintf(path, sizeof path, "%s.xml", stem);
    bool written = file_write(path, source->xml, source->xml_bytes);
    snprintf(path, sizeof path, "%s.bin", stem);
    written = written && file_write(path, source->bin, source->bin_bytes);
    if (!written) {
        snprintf(log, log_size, "[NPU_VCL] cannot write %s\n", path);
        return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    }
    const char *config = strstr(source->flags, "--config");
    bool accepted = command_run(s->command, stem, config ? config + 8 : "");
    snprintf(path, sizeof path, "%s.bin", stem);
    unlink(path);
    snprintf(path, sizeof path, "%s.blob.log", stem);
    size_t bytes = 0;
    uint8_t *said = file_read(path, &bytes);
    if (!accepted)
        snprintf(log, log_size, "[NPU_VCL] Compiler returned msg:\n%.*s\n", (int)(bytes < 1500 ? bytes : 1500),
                 said ? (const char *)said : "");
    free(said);
    snprintf(path, sizeof path, "%s.blob", stem);
    if (accepted) *blob = file_read(path, blob_bytes);
    unlink(path);
    return accepted ? OK : ZE_RESULT_ERROR_INVALID_ARGUMENT;
}

/* The first layer of a type that is to be refused. */
static bool refused(const Settings *s, const Source *source, char *log, size_t log_size) {
    const char *at = source->xml, *end = source->xml + source->xml_bytes, *type, *name;
    size_t type_length, name_length;
    while (*s->refuse && (at = memmem(at, (size_t)(end - at), "<layer ", 7))) {
        char word[64];
        if (attribute(at, end, "type", &type, &type_length) && type_length < sizeof word) {
            memcpy(word, type, type_length);
            word[type_length] = 0;
            if (listed(s->refuse, word, type_length)) {
                if (!attribute(at, end, "name", &name, &name_length)) name_length = 0;
                snprintf(log, log_size, "[NPU_VCL] Compiler returned msg:\nUnsupported operation %.*s with type %s\n",
                         (int)name_length, name_length ? name : "", word);
                return true;
            }
        }
        at += 7;
    }
    return false;
}

ze_result_t compiler_run(const Source *source, uint8_t **blob, size_t *blob_bytes, char *log, size_t log_size) {
    char detail[128];
    Settings s = settings();
    const char *wrong = flags_wrong(source, detail, sizeof detail);
    if (wrong) {
        snprintf(log, log_size, "[NPU_VCL] %s: %s\n", wrong, detail);
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    if (refused(&s, source, log, log_size)) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    return *s.command ? ask_command(&s, source, blob, blob_bytes, log, log_size) : OK;
}
