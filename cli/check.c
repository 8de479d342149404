/* vla check: validates datasets; one line per finding. */
#include "args.h"
#include "command.h"

#include "base/io.h"
#include "base/json.h"
#include "data/check.h"

#include <stdio.h>
#include <string.h>

static const char help[] =
    "Usage: vla check [--json] [--quick | --full] [--camera KEY]... DIR...\n\n"
    "Validates LeRobot datasets (v2.0, v2.1, v3.0): metadata, Parquet and video files, indices, lengths, types, every number,\n"
    "statistics, sample frames of every video. A DIR that holds datasets instead of being one is searched for them.\n"
    "Errors (E) stop a training run, warnings (W) do not. Exit code 3 if there was an error.\n\n"
    "  --json        one JSON object per finding and line: set, level, kind, file, and what applies of episode, episodes,\n"
    "                frame, column, camera, key, dim, line, expected, found; message, hint\n"
    "  --quick       metadata, footers, headers and index columns only\n"
    "  --full        decode every frame of every video and picture\n"
    "  --camera KEY  a camera that your configuration maps: it must exist (may be repeated)\n\n"
    "Examples:\n"
    "  vla check data/libero\n"
    "  vla check --json --full data/robotwin | jq 'select(.level==\"E\")'\n";

typedef struct {
    bool json;
    const char *set; /* the folder now checked */
    int64_t errors, warnings;
} printer;

static void put(json_t *object, const char *key, const char *text)
{
    if (text)
        json_object_set_new(object, key, vlai_json_text(text));
}

static void put_number(json_t *object, const char *key, int64_t number)
{
    if (number >= 0)
        json_object_set_new(object, key, json_integer(number));
}

static void put_value(json_t *object, const char *key, const vlai_value *value)
{
    if (value->kind == VLAI_VALUE_WHOLE)
        json_object_set_new(object, key, json_integer(value->whole));
    else if (value->kind == VLAI_VALUE_REAL)
        json_object_set_new(object, key, json_real(value->real));
    else if (value->kind == VLAI_VALUE_TEXT)
        put(object, key, value->text);
}

static void print_json(const printer *p, const vlai_finding *f)
{
    const char level[2] = {f->level, 0};
    json_t *object = json_object();
    put(object, "set", p->set);
    put(object, "level", level);
    put(object, "kind", f->kind);
    put(object, "file", f->file);
    put_number(object, "episode", f->episode);
    if (f->episodes) {
        json_t *list = json_array();
        for (int64_t i = 0; i < f->episode_count; i++)
            json_array_append_new(list, json_integer(f->episodes[i]));
        json_object_set_new(object, "episodes", list);
    }
    put_number(object, "frame", f->frame);
    put(object, "column", f->column);
    put(object, "camera", f->camera);
    put(object, "key", f->key);
    put_number(object, "dim", f->dim);
    put_number(object, "line", f->line);
    put_value(object, "expected", &f->expected);
    put_value(object, "found", &f->found);
    put(object, "message", f->message);
    put(object, "hint", f->hint);
    char *text = json_dumps(object, JSON_COMPACT | JSON_ENSURE_ASCII);
    if (text)
        puts(text);
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    if (text)
        release(text);
    json_decref(object);
}

static void print_finding(const vlai_finding *finding, void *user)
{
    printer *p = user;
    if (p->json) {
        print_json(p, finding);
        return;
    }
    char text[1500];
    vlai_finding_text(finding, text, sizeof text);
    printf("%c %-18s %s\n", finding->level, finding->kind, text);
    if (finding->hint && finding->level == 'E')
        printf("  hint: %s\n", finding->hint);
}

static vla_status check_one(const char *root, const vlai_check_options *options, printer *p, vla_error *err)
{
    vlai_findings findings = {.report = print_finding, .user = p};
    p->set = root;
    vla_status status = vlai_check(root, options, &findings, err);
    int64_t errors = findings.errors + findings.bound_errors;
    if (status == VLA_OK && !p->json)
        printf("%s: %lld error%s, %lld warning%s\n", root, (long long)errors, errors == 1 ? "" : "s",
               (long long)findings.warnings, findings.warnings == 1 ? "" : "s");
    p->errors += errors;
    p->warnings += findings.warnings;
    return status;
}

/* `dir` itself when it has metadata, or when nothing below it has (then its absence is the finding). */
static vla_status check_dir(const char *dir, const vlai_check_options *options, printer *p, vla_error *err)
{
    char path[4096], **roots = NULL;
    size_t count = 0;
    if (vlai_path_join(path, sizeof path, dir, "meta/info.json") && vlai_is_file(path))
        return check_one(dir, options, p, err);
    vla_status status = vla_dataset_discover(dir, &roots, &count, err);
    if (status == VLA_OK && count == 0)
        status = check_one(dir, options, p, err);
    for (size_t i = 0; i < count && status == VLA_OK; i++)
        status = check_one(roots[i], options, p, err);
    vla_dataset_roots_free(roots, count);
    return status;
}

int command_check(int argc, char **argv)
{
    printer p = {0};
    bool quick = false, full = false;
    arg_texts cameras = {.count = 0};
    const arg_row rows[] = {{"--json", ARG_FLAG, &p.json}, {"--quick", ARG_FLAG, &quick}, {"--full", ARG_FLAG, &full},
                            {"--camera", ARG_TEXTS, &cameras}};
    args a = {.name = "check", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .positionals = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    if (a.positionals_given == 0 || (quick && full)) {
        fputs(quick && full ? "vla check: --quick and --full exclude each other\n"
                            : "vla check: no dataset was named\n  hint: vla check DIR...\n", stderr);
        return EXIT_USAGE;
    }
    const vlai_check_options options = {.depth = full ? VLAI_CHECK_FULL : quick ? VLAI_CHECK_QUICK : VLAI_CHECK_NORMAL,
                                        .cameras = cameras.items, .camera_count = cameras.count};
    vla_error err = VLA_ERROR_INIT;
    for (size_t i = 0; i < a.positionals_given; i++)
        if (check_dir(a.positional[i], &options, &p, &err) != VLA_OK)
            return command_fail("check", &err);
    return p.errors ? EXIT_DATA : EXIT_DONE;
}
