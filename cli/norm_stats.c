/* vla norm-stats: the statistics that normalise state and action. */
#include "command.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "data/norm_stats.h"
#include "train/config.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "Usage: vla norm-stats [--train_config FILE] [--data_root DIR] [--output_path FILE] [--state_key KEY] [--action_key KEY]\n\n"
    "Computes mean, std, q01 and q99 of state and action over all frames of all episodes and writes norm_stats.json, with\n"
    "the flags, the algorithm and the file of scripts/compute_norm_stats.py.\n\n"
    "  --train_config FILE  training configuration: dataset, keys, layouts (for relative keys) and where to write\n"
    "  --data_root DIR      the dataset, or a folder that holds data.lerobot_config.repo_id; wins over the configuration\n"
    "  --output_path FILE   where to write; wins over norm_stats_path of the configuration (default norm_stats.json)\n"
    "  --state_key KEY      column of the state (default: configuration, else observation.state)\n"
    "  --action_key KEY     column of the action (default: configuration, else action)\n"
    "  --threads N          (all processors)\n"
    "  --allow-partial      use the whole episodes at the start of a damaged set\n\n"
    "Examples:\n"
    "  vla norm-stats --train_config configs/libero.yml\n"
    "  vla norm-stats --data_root data/libero --output_path norm_stats.json\n";

typedef struct {
    const char *config, *root, *output, *state, *action;
    int threads;
    bool allow_partial;
} request;

/* True when argv[*i] is --NAME VALUE or --NAME=VALUE; dashes and underscores are alike. */
static bool take(int argc, char **argv, int *i, const char *name, const char **out)
{
    const char *a = argv[*i];
    if (a[0] != '-' || a[1] != '-')
        return false;
    a += 2;
    for (; *name && (*a == *name || (*a == '-' && *name == '_')); a++, name++) {
    }
    if (*name || (*a && *a != '='))
        return false;
    if (*a == '=')
        *out = a + 1;
    else if (*i + 1 < argc)
        *out = argv[++*i];
    else
        return false;
    return true;
}

static vla_status layout_of(const vlai_dims *dims, const char *key, const char *where, vlai_layout *out, vla_error *err)
{
    if (dims->count == 0)
        return vlai_fail(err, VLA_E_INVALID, "%s: %s is required", where, key);
    json_t *object = json_object();
    for (size_t i = 0; i < dims->count; i++)
        json_object_set_new(object, dims->names[i], json_integer(dims->values[i]));
    vla_status status = vlai_layout_parse(object, where, out, err);
    json_decref(object);
    return status;
}

static vla_status find_set(const request *r, const vlai_config *config, char *out, size_t size, vla_error *err)
{
    char info[4096];
    if (!r->root)
        return vlai_config_dataset(config, out, size, err);
    snprintf(out, size, "%s", r->root);
    if (vlai_path_join(info, sizeof info, out, "meta/info.json") && vlai_is_file(info))
        return VLA_OK;
    if (config && config->lerobot.repo_id && vlai_path_join(out, size, r->root, config->lerobot.repo_id) &&
        vlai_path_join(info, sizeof info, out, "meta/info.json") && vlai_is_file(info))
        return VLA_OK;
    return vlai_fail_hint(err, VLA_E_NOT_FOUND, "--data_root is a folder with meta/info.json, or one that holds the "
                                                "configuration's repo_id",
                          "Dataset not found: %s", out);
}

static void print_dims(const json_t *stats)
{
    const char *key;
    json_t *entry;
    json_object_foreach((json_t *)json_object_get(stats, "norm_stats"), key, entry)
        printf("%s: %zu dims\n", key, json_array_size(json_object_get(entry, "mean")));
}

static vla_status run(const request *r, vla_error *err)
{
    vlai_config *config = NULL;
    vla_dataset *set = NULL;
    vlai_layout dof = {0}, agent = {0};
    json_t *stats = NULL;
    char root[4096];
    const char *output = r->output;
    vlai_norm_request wanted = {.state_key = r->state, .action_key = r->action, .threads = r->threads};
    vla_status status = VLA_OK;
    if (r->config) {
        VLA_TRY_GOTO(vlai_config_load(r->config, NULL, 0, &config, err), done);
        VLA_TRY_GOTO(layout_of(&config->task.dof_config, "task.dof_config", r->config, &dof, err), done);
        VLA_TRY_GOTO(layout_of(&config->task.agent_pos_config, "task.agent_pos_config", r->config, &agent, err), done);
        wanted.action_layout = &dof;
        wanted.chunk = config->task.action_horizon;
        if (!wanted.state_key)
            wanted.state_key = config->keys.state;
        if (!wanted.action_key)
            wanted.action_key = config->keys.action;
        if (!output)
            output = config->top.norm_stats_path ? config->top.norm_stats_path : config->data.norm_stats_path;
        if (!output) {
            status = vlai_fail(err, VLA_E_INVALID, "%s: norm_stats_path is required, or --output_path", r->config);
            goto done;
        }
    }
    if (!wanted.state_key)
        wanted.state_key = "observation.state";
    if (!wanted.action_key)
        wanted.action_key = "action";
    if (!output)
        output = "norm_stats.json";
    VLA_TRY_GOTO(find_set(r, config, root, sizeof root, err), done);
    vla_dataset_options open = VLA_DATASET_OPTIONS_DEFAULT;
    if (r->allow_partial || (config && config->lerobot.allow_partial))
        open.flags |= VLA_DATASET_ALLOW_PARTIAL;
    VLA_TRY_GOTO(vla_dataset_open(root, &open, &set, err), done);
    VLA_TRY_GOTO(vlai_norm_stats(set, &wanted, &stats, err), done);
    print_dims(stats);
    VLA_TRY_GOTO(vlai_json_save(stats, output, err), done);
    printf("Saved norm stats to %s\n", output);
done:
    json_decref(stats);
    vla_dataset_close(set);
    vlai_layout_fini(&dof);
    vlai_layout_fini(&agent);
    vlai_config_destroy(config);
    return status;
}

int command_norm_stats(int argc, char **argv)
{
    static const char *const known[] = {"--train_config", "--data_root",  "--output_path", "--state_key",
                                        "--action_key",   "--threads",    "--allow-partial", "--help"};
    if (command_help(argc, argv, help))
        return EXIT_DONE;
    request r = {0};
    const char *threads = NULL;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--allow-partial"))
            r.allow_partial = true;
        else if (!take(argc, argv, &i, "train_config", &r.config) && !take(argc, argv, &i, "data_root", &r.root) &&
            !take(argc, argv, &i, "output_path", &r.output) && !take(argc, argv, &i, "state_key", &r.state) &&
            !take(argc, argv, &i, "action_key", &r.action) && !take(argc, argv, &i, "threads", &threads))
            return command_unknown("norm-stats", argv[i], known, 8);
    if (!r.config && !r.root) {
        fputs("vla norm-stats: no dataset\n  hint: --train_config FILE or --data_root DIR\n", stderr);
        return EXIT_USAGE;
    }
    r.threads = threads ? atoi(threads) : 0;
    vla_error err = VLA_ERROR_INIT;
    return run(&r, &err) == VLA_OK ? EXIT_DONE : command_fail("norm-stats", &err);
}
