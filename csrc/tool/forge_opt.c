/* forge-opt: graph text in, named passes, text out. Needs neither Python nor torch. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "forge.h"

static const char usage[] = "usage: forge-opt [options] FILE|-\n"
                            "Reads a graph as text, runs passes, prints the result.\n"
                            "  --passes=NAMES   comma separated, in order; \"default\" or \"none\" (default: none)\n"
                            "  --emit=STAGE     graph, npuir or schedule (default: graph)\n"
                            "  --target=NAME    cpu, npu3720, npu4000 or npu5010 (default: cpu)\n"
                            "  --alpha=NUMBER   how far operator fusion goes, 0 to 1 (default: 1)\n"
                            "  --weight-bits=N  16, 8 or 4: what the pass quantise makes of weights\n"
                            "  --weight-group=N columns that share a scale; 0: all (default)\n"
                            "  --autotune       search alpha and other options with the cost model\n"
                            "  --list-passes    print the names of the passes in default order\n"
                            "  --help           this text\n";

static void list_passes(void) {
    size_t count;
    const Pass *table = pass_table(&count);
    for (size_t i = 0; i < count; i++) puts(table[i].name);
}

/* The value of "--name=value", or NULL. */
static const char *option(const char *arg, const char *name) {
    size_t length = strlen(name);
    return strncmp(arg, name, length) == 0 && arg[length] == '=' ? arg + length + 1 : NULL;
}

static char *read_all(FILE *file, size_t *size) {
    char *data = NULL;
    size_t capacity = 0, got;
    *size = 0;
    do {
        if (*size == capacity) {
            capacity = capacity ? 2 * capacity : 1 << 16;
            char *bigger = realloc(data, capacity);
            if (!bigger) {
                free(data);
                return NULL;
            }
            data = bigger;
        }
        got = fread(data + *size, 1, capacity - *size, file);
        *size += got;
    } while (got > 0);
    return data;
}

static int run(const char *path, const CompileOptions *options, const char *emit) {
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "forge-opt: %s: %s\n", path, strerror(errno));
        return 1;
    }
    size_t size;
    char *data = read_all(file, &size);
    bool failed = ferror(file) != 0;
    char *expected = data ? memmem(data, size, "\n----\n", 6) : NULL;
    if (expected) size = (size_t)(expected - data) + 1; /* of a golden, what comes out is not read */
    if (file != stdin) fclose(file);
    if (!data || failed) {
        fprintf(stderr, "forge-opt: %s: cannot read\n", path);
        free(data);
        return 1;
    }
    Context ctx;
    Text text;
    context_init(&ctx);
    text_init(&text);
    Code code = forge_optimize_text(&ctx, data, size, options, emit, &text);
    if (code == CODE_OK)
        fwrite(text.data, 1, text.size, stdout);
    else
        fprintf(stderr, "forge-opt: %s\n", ctx.text);
    text_destroy(&text);
    free(data);
    return code == CODE_OK ? 0 : 1;
}

static bool number(const char *text, double *out) {
    char *end;
    *out = strtod(text, &end);
    if (end != text && !*end) return true;
    fprintf(stderr, "forge-opt: '%s' is not a number\n", text);
    return false;
}

int main(int argc, char **argv) {
    CompileOptions options;
    compile_options_default(&options);
    options.passes = "none";
    const char *emit = "graph", *path = NULL, *value;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (strcmp(arg, "--help") == 0) {
            fputs(usage, stdout);
            return 0;
        } else if (strcmp(arg, "--list-passes") == 0) {
            list_passes();
            return 0;
        } else if (strcmp(arg, "--autotune") == 0) {
            options.autotune = true;
        } else if ((value = option(arg, "--passes"))) {
            options.passes = value;
        } else if ((value = option(arg, "--emit"))) {
            emit = value;
        } else if ((value = option(arg, "--target"))) {
            options.target = value;
        } else if ((value = option(arg, "--alpha"))) {
            if (!number(value, &options.alpha)) return 1;
        } else if ((value = option(arg, "--weight-bits"))) {
            double bits;
            if (!number(value, &bits)) return 1;
            options.weight_bits = bits == 16 || bits == 8 || bits == 4 ? (int)bits : -1;
        } else if ((value = option(arg, "--weight-group"))) {
            double group;
            if (!number(value, &group)) return 1;
            options.weight_group = group >= 0 && group <= 1 << 20 ? (int64_t)group : -1;
        } else if ((arg[0] == '-' && arg[1]) || path) {
            fprintf(stderr, "forge-opt: unexpected argument '%s'\n%s", arg, usage);
            return 1;
        } else {
            path = arg;
        }
    }
    if (!path) {
        fputs(usage, stderr);
        return 1;
    }
    return run(path, &options, emit);
}
