/* vla inspect checkpoint: whether checkpoints are whole, and what they hold. */
#include "args.h"
#include "command.h"
#include "inspect.h"

#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "ckpt/ckpt.h"

#include <stdio.h>
#include <string.h>

static const char help[] =
    "Usage: vla inspect checkpoint [--json] [--tensors] PATH...\n\n"
    "PATH is a checkpoint or a run folder (all of its checkpoints). Checks every file against checksums.json, and shows\n"
    "step, epoch, samples, settings and sizes. Code 3 when one is damaged.\n\n"
    "  --tensors   also every tensor of the weights\n"
    "  --json      one JSON object per checkpoint\n\n"
    "Examples:\n"
    "  vla inspect checkpoint run\n"
    "  vla inspect checkpoint --json run/latest | jq .state.settings\n";

typedef struct {
    bool json, tensors;
} request;

static void show_tensors(const char *dir, vla_error *err)
{
    char path[4096];
    vlai_safetensors *st;
    if (!vlai_path_join(path, sizeof path, dir, VLAI_CKPT_MODEL) || vlai_safetensors_open(path, &st, err) != VLA_OK)
        return;
    for (size_t i = 0; i < vlai_safetensors_count(st); i++) {
        const vlai_tensor_view *t = vlai_safetensors_at(st, i);
        printf("    %-72s %s [", t->name, vla_dtype_name(t->dtype));
        for (int d = 0; d < t->rank; d++)
            printf("%s%lld", d ? ", " : "", (long long)t->shape[d]);
        puts("]");
    }
    vlai_safetensors_close(st);
}

static long long whole(const json_t *state, const char *key)
{
    return (long long)json_integer_value(json_object_get(state, key));
}

static void print_text(const char *dir, const json_t *state, const json_t *files)
{
    const char *name;
    json_t *entry;
    printf("%s: whole; step %lld, epoch %lld, %lld samples, %lld updates, %lld skipped\n", dir, whole(state, "step"),
           whole(state, "epoch"), whole(state, "samples"), whole(state, "updates"), whole(state, "skips"));
    if (whole(state, "world") > 1)
        printf("  written by %lld ranks\n", whole(state, "world"));
    char *settings = json_dumps(json_object_get(state, "settings"), JSON_COMPACT | JSON_REAL_PRECISION(9));
    if (settings)
        printf("  settings  %s\n", settings);
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(settings);
    json_object_foreach((json_t *)(uintptr_t)files, name, entry)
        printf("  %-32s %14lld bytes  xxh64 %s\n", name, whole(entry, "size"),
               json_string_value(json_object_get(entry, "hash")));
}

static vla_status show_one(const request *q, const char *dir, vla_error *err)
{
    vla_checkpoint *c;
    json_t *state = NULL, *sums = NULL;
    char path[4096];
    vla_status status = vla_checkpoint_open(dir, &c, err);
    if (status == VLA_OK) {
        status = vlai_json_parse(vla_checkpoint_state(c), strlen(vla_checkpoint_state(c)), VLAI_CKPT_STATE, &state, err);
        if (status == VLA_OK && vlai_path_join(path, sizeof path, vla_checkpoint_path(c), VLAI_CKPT_CHECKSUMS))
            status = vlai_json_load(path, &sums, err);
        vla_checkpoint_close(c);
    }
    if (q->json) {
        json_t *object = status == VLA_OK ? json_pack("{s:o, s:b, s:O, s:O}", "path", vlai_json_text(dir), "whole", 1, "state", state, "files",
                                                      json_object_get(sums, "xxh64"))
                                          : json_pack("{s:o, s:b, s:o}", "path", vlai_json_text(dir), "whole", 0, "error", vlai_json_text(err->message));
        char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
        puts(text ? text : "{}");
        json_free_t release;
        json_get_alloc_funcs(NULL, &release);
        release(text);
        json_decref(object);
    } else if (status == VLA_OK) {
        print_text(dir, state, json_object_get(sums, "xxh64"));
        if (q->tensors)
            show_tensors(dir, err);
    } else {
        printf("%s%s%s\n", strncmp(err->message, dir, strlen(dir)) ? dir : "", strncmp(err->message, dir, strlen(dir)) ? ": " : "", err->message);
        if (err->hint[0])
            printf("  hint: %s\n", err->hint);
    }
    json_decref(state);
    json_decref(sums);
    return status;
}

/* A folder of checkpoints by its names, also those that are not whole. */
static vla_status show(const request *q, const char *path, vla_error *err)
{
    char **names, inner[4096];
    size_t count, shown = 0;
    int64_t epoch, step;
    vla_status worst = VLA_OK, status = vlai_list_dir(path, &names, &count, err);
    if (status != VLA_OK)
        return show_one(q, path, err);
    for (size_t i = 0; i < count; i++)
        if (vlai_ckpt_parse_name(names[i], &epoch, &step) && vlai_path_join(inner, sizeof inner, path, names[i])) {
            status = show_one(q, inner, err);
            worst = status != VLA_OK ? status : worst;
            shown++;
        }
    vlai_names_free(names, count);
    return shown ? worst : show_one(q, path, err);
}

int inspect_checkpoint(int argc, char **argv)
{
    request q = {0};
    const arg_row rows[] = {{"--json", ARG_FLAG, &q.json}, {"--tensors", ARG_FLAG, &q.tensors}};
    static args a;
    a = (args){.name = "inspect checkpoint", .help = help, .rows = rows, .count = 2, .positionals = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    if (!a.positionals_given) {
        fprintf(stderr, "vla inspect checkpoint: name a checkpoint or a run folder\n");
        return EXIT_USAGE;
    }
    code = EXIT_DONE;
    for (size_t i = 0; i < a.positionals_given; i++) {
        vla_error err = VLA_ERROR_INIT;
        if (show(&q, a.positional[i], &err) != VLA_OK)
            code = EXIT_DATA;
    }
    return code;
}
