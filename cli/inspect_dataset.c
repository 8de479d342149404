/* vla inspect dataset: what a dataset holds, and what its reader had to survive. */
#include "args.h"
#include "command.h"
#include "inspect.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/memory.h"
#include "vla/dataset.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "Usage: vla inspect dataset [--json] [--allow-partial] DIR...\n\n"
    "Shows version, rate, features, cameras, tasks, lengths of episodes, digest and warnings of datasets. A DIR that holds\n"
    "datasets instead of being one is searched for them.\n\n"
    "  --json            one JSON object per dataset and line\n"
    "  --allow-partial   open the whole episodes at the start of a damaged set\n\n"
    "Examples:\n"
    "  vla inspect dataset data/libero\n"
    "  vla inspect dataset --json data/robotwin | jq .rows\n";

static const char *const kinds[] = {"number", "text", "image", "video", "language"};

static int by_length(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* Shortest, median and longest episode; left alone where there is none, or no memory. */
static void lengths(const vla_dataset *set, int64_t out[3])
{
    int64_t n = vla_dataset_info_get(set)->episodes;
    int64_t *all = n > 0 ? vlai_array((size_t)n, sizeof *all) : NULL;
    if (!all)
        return;
    for (int64_t i = 0; i < n; i++)
        all[i] = vla_dataset_episode(set, i)->length;
    qsort(all, (size_t)n, sizeof *all, by_length);
    out[0] = all[0], out[1] = all[n / 2], out[2] = all[n - 1];
    vlai_free(all);
}

static void shape_text(const vla_feature *f, char out[128])
{
    int n = 0;
    out[0] = 0;
    for (int i = 0; i < f->rank && n < 100; i++)
        n += snprintf(out + n, (size_t)(128 - n), "%s%lld", i ? "x" : "", (long long)f->shape[i]);
}

static void print_text(const vla_dataset *set)
{
    const vla_dataset_info *info = vla_dataset_info_get(set);
    int64_t span[3] = {0, 0, 0};
    lengths(set, span);
    printf("%s\n  LeRobot %s, robot %s, %g frames a second\n", info->root, info->version,
           info->robot_type[0] ? info->robot_type : "not named", info->fps);
    printf("  %lld episodes, %lld frames (%lld to %lld, median %lld), %lld tasks\n", (long long)info->episodes,
           (long long)info->rows, (long long)span[0], (long long)span[2], (long long)span[1], (long long)info->tasks);
    printf("  digest %s\n  features\n", info->digest);
    for (int64_t i = 0; i < info->features; i++) {
        const vla_feature *f = vla_dataset_feature(set, i);
        char shape[128];
        shape_text(f, shape);
        printf("    %-36s %-8s %-10s", f->name, f->dtype, shape);
        if (f->kind == VLA_FEATURE_NUMBER && f->name_count == f->dim && f->dim > 1)
            for (int64_t d = 0; d < f->name_count && d < 8; d++)
                printf("%s%s", d ? "," : " ", f->names[d]);
        printf("%s\n", f->kind == VLA_FEATURE_NUMBER && f->name_count == f->dim && f->dim > 8 ? ",..." : "");
    }
    puts("  tasks");
    for (int64_t i = 0, shown = 0; shown < 10 && shown < info->tasks && i < 1000000; i++)
        if (vla_dataset_task_text(set, i)) {
            printf("    %lld: %s\n", (long long)i, vla_dataset_task_text(set, i));
            shown++;
        }
    if (info->tasks > 10)
        printf("    ... and %lld more\n", (long long)(info->tasks - 10));
    for (int64_t i = 0; i < info->warnings; i++)
        printf("  warning: %s\n", vla_dataset_warning(set, i));
}

static void print_json(const vla_dataset *set)
{
    const vla_dataset_info *info = vla_dataset_info_get(set);
    int64_t span[3] = {0, 0, 0};
    lengths(set, span);
    json_t *features = json_array(), *warnings = json_array();
    for (int64_t i = 0; i < info->features; i++) {
        const vla_feature *f = vla_dataset_feature(set, i);
        json_t *shape = json_array(), *names = json_array();
        for (int d = 0; d < f->rank; d++)
            json_array_append_new(shape, json_integer(f->shape[d]));
        for (int64_t d = 0; d < f->name_count; d++)
            json_array_append_new(names, json_string(f->names[d]));
        json_array_append_new(features, json_pack("{s:s, s:s, s:s, s:o, s:o}", "name", f->name, "dtype", f->dtype, "kind",
                                                  kinds[f->kind], "shape", shape, "names", names));
    }
    for (int64_t i = 0; i < info->warnings; i++)
        json_array_append_new(warnings, vlai_json_text(vla_dataset_warning(set, i)));
    json_t *object = json_pack("{s:o, s:s, s:s, s:f, s:I, s:I, s:I, s:[I,I,I], s:s, s:o, s:o}", "root", vlai_json_text(info->root),
                               "version", info->version, "robot_type", info->robot_type, "fps", info->fps, "episodes",
                               (json_int_t)info->episodes, "rows", (json_int_t)info->rows, "tasks",
                               (json_int_t)info->tasks, "episode_lengths", (json_int_t)span[0], (json_int_t)span[1],
                               (json_int_t)span[2], "digest", info->digest, "features", features, "warnings", warnings);
    json_dumpf(object, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(object);
}

/* The dataset in a folder, or all below it. */
static vla_status show(const char *dir, const vla_dataset_options *options, bool json, vla_error *err)
{
    char **roots;
    size_t count;
    VLA_TRY(vla_dataset_discover(dir, &roots, &count, err));
    vla_status status = VLA_OK;
    for (size_t k = 0; (k < count || k == 0) && status == VLA_OK; k++) {
        vla_dataset *set;
        status = vla_dataset_open(count ? roots[k] : dir, options, &set, err);
        if (status != VLA_OK)
            break;
        if (json)
            print_json(set);
        else
            print_text(set);
        vla_dataset_close(set);
    }
    vla_dataset_roots_free(roots, count);
    return status;
}

int inspect_dataset(int argc, char **argv)
{
    bool json = false, partial = false;
    const arg_row rows[] = {{"--json", ARG_FLAG, &json}, {"--allow-partial", ARG_FLAG, &partial}};
    args a = {.name = "inspect dataset", .help = help, .rows = rows, .count = 2, .positionals = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    if (!a.positionals_given) {
        fputs(help, stderr);
        return EXIT_USAGE;
    }
    vla_dataset_options options = VLA_DATASET_OPTIONS_DEFAULT;
    if (partial)
        options.flags |= VLA_DATASET_ALLOW_PARTIAL;
    vla_error err = VLA_ERROR_INIT;
    for (size_t i = 0; i < a.positionals_given; i++)
        if (show(a.positional[i], &options, json, &err) != VLA_OK)
            return command_fail("inspect dataset", &err);
    return EXIT_DONE;
}
