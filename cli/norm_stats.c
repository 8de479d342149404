/* vla norm-stats: the statistics that normalise state and action. */
#include "args.h"
#include "command.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "data/norm_stats.h"
#include "train/contract_config.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "Usage: vla norm-stats [--train_config FILE] [--data_root DIR] [--output_path FILE] [--state_key KEY] [--action_key KEY]\n"
    "                      [--within-episodes] [--allow-partial] [--threads N] [--section.key=value ...]\n\n"
    "Computes mean, std, q01 and q99 of state and action over all frames of all episodes and writes norm_stats.json, with\n"
    "the flags, the algorithm and the file of scripts/compute_norm_stats.py. Euler angles under a 6D rotation of the layouts\n"
    "are converted first.\n\n"
    "  --train_config FILE, --config FILE   training configuration: dataset, keys, layouts (for relative keys), where to write\n"
    "  --data_root DIR      the dataset, or a folder that holds data.lerobot_config.repo_id; wins over the configuration\n"
    "  --output_path FILE   where to write; wins over norm_stats_path of the configuration (default norm_stats.json)\n"
    "  --state_key KEY      column of the state (default: configuration, else observation.state)\n"
    "  --action_key KEY     column of the action (default: configuration, else action)\n"
    "  --within-episodes    relative keys: measure the chunks that training sees. Without it chunks run on into the next\n"
    "                       episode, as the reference's do, which widens the ranges\n"
    "  --threads N          (all processors)\n"
    "  --allow-partial      use the whole episodes at the start of a damaged set\n"
    "  --section.key=value  overrides a key of the configuration\n\n"
    "Examples:\n"
    "  vla norm-stats --train_config configs/libero.yml\n"
    "  vla norm-stats --data_root data/libero --output_path norm_stats.json\n";

typedef struct {
    const char *config, *root, *output, *state, *action;
    bool within, allow_partial;
    int64_t threads;
    const char *const *overrides;
    size_t override_count;
} request;

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
    vlai_norm_request wanted = {.state_key = r->state, .action_key = r->action, .within_episodes = r->within,
                                .threads = (int)r->threads};
    vla_status status = VLA_OK;
    if (r->config) {
        VLA_TRY_GOTO(vlai_config_load(r->config, r->overrides, r->override_count, &config, err), done);
        VLA_TRY_GOTO(vlai_config_layout(config, "task.dof_config", &config->task.dof_config, &dof, err), done);
        VLA_TRY_GOTO(vlai_config_layout(config, "task.agent_pos_config", &config->task.agent_pos_config, &agent, err), done);
        wanted.state_layout = &agent;
        wanted.action_layout = &dof;
        wanted.chunk = config->task.action_horizon;
        if (!wanted.state_key)
            wanted.state_key = config->keys.state;
        if (!wanted.action_key)
            wanted.action_key = config->keys.action;
        if (!output)
            output = config->data.norm_stats_path; /* the top-level key where this one is not given */
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
    request r = {0};
    const arg_row rows[] = {{"--train_config", ARG_TEXT, &r.config}, {"--config", ARG_TEXT, &r.config}, {"--data_root", ARG_TEXT, &r.root},
                            {"--output_path", ARG_TEXT, &r.output},  {"--state_key", ARG_TEXT, &r.state},
                            {"--action_key", ARG_TEXT, &r.action},   {"--within-episodes", ARG_FLAG, &r.within},
                            {"--allow-partial", ARG_FLAG, &r.allow_partial},
                            {"--threads", ARG_THREADS, &r.threads}};
    args a = {.name = "norm-stats", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .overrides = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    if (!r.config && !r.root) {
        fputs("vla norm-stats: no dataset\n  hint: --train_config FILE or --data_root DIR\n", stderr);
        return EXIT_USAGE;
    }
    if (!r.config && a.overrides_given) {
        fprintf(stderr, "vla norm-stats: '%s' overrides a configuration, and none is given\n  hint: --train_config FILE, or leave it out\n", a.override[0]);
        return EXIT_USAGE;
    }
    vla_error err = VLA_ERROR_INIT;
    r.overrides = a.override;
    r.override_count = a.overrides_given;
    return run(&r, &err) == VLA_OK ? EXIT_DONE : command_fail("norm-stats", &err);
}
