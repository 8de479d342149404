/* vla preflight: what would stop a training run, before it starts. */
#include "command.h"

#include "base/fail.h"
#include "base/memory.h"
#include "dist/ranks.h"
#include "train/preflight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "Usage: vla preflight --config FILE [--section.key=value ...] [--json]\n\n"
    "Looks at everything that a training run of the configuration will need, without starting it: configuration, architecture,\n"
    "processor, data set, keys, statistics, samples, weights (their header), memory (plans at the run's real shapes), disk. One\n"
    "line per finding; all are shown, not only the first. Where the run does not fit in memory, settings that would are named.\n\n"
    "  --config FILE          YAML or JSON, as for vla train\n"
    "  --section.key=value    overrides a key\n"
    "  --device cpu|cuda|cuda:N|auto   the same as --training.device=\n"
    "  --ranks N              the run has N ranks, each with a GPU of its own: memory is that of one of them, host memory is shared by those\n"
    "                         of this machine (by all on CPUs), and NCCL (on CPUs Gloo) is looked for (1)\n"
    "  --json                 one JSON object: checks, memory in bytes, disk\n\n"
    "Exit codes: 0 all is well; 2 configuration; 3 data, file or disk; 4 memory (of the first failure).\n\n"
    "Examples:\n"
    "  vla preflight --config configs/libero.yml\n"
    "  vla preflight --config demo.yml --hyperparams.batch_size_per_gpu=64\n"
    "  WALLX_PERF_ALLOC=1 vla preflight --config demo.yml --json | jq .memory\n";

enum { OVERRIDES = 256 };

static vla_status print(const vlai_preflight *p, int json, vla_error *err)
{
    if (json) {
        json_t *all = vlai_preflight_json(p);
        int bad = !all || json_dumpf(all, stdout, JSON_INDENT(2)) != 0;
        json_decref(all);
        putchar('\n');
        return bad ? vlai_nomem(err, 4096) : VLA_OK;
    }
    vlai_text text = {0};
    vlai_preflight_print(p, &text);
    vla_status status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        fputs(text.data, stdout);
    vlai_text_fini(&text);
    return status;
}

int command_preflight(int argc, char **argv)
{
    static const char *const known[] = {"--config", "--device", "--ranks", "--json", "--help"};
    const char *path = NULL, *overrides[OVERRIDES];
    char device[64];
    size_t count = 0;
    int json = 0, ranks = 1;
    if (argc < 2 || command_help(argc, argv, help))
        return argc < 2 ? fputs(help, stderr), EXIT_USAGE : EXIT_DONE;
    for (int i = 1; i < argc; i++) {
        if ((!strcmp(argv[i], "--config") || !strcmp(argv[i], "--config_path")) && i + 1 < argc)
            path = argv[++i];
        else if (!strcmp(argv[i], "--device") && i + 1 < argc && count < OVERRIDES) {
            snprintf(device, sizeof device, "training.device=%s", argv[++i]);
            overrides[count++] = device;
        } else if (!strcmp(argv[i], "--ranks") && i + 1 < argc) {
            char *end;
            long n = strtol(argv[++i], &end, 10);
            if (*end || n < 1 || n > VLAI_RANKS_MOST) {
                fprintf(stderr, "vla preflight: --ranks '%s': wanted a count from 1 to %d\n", argv[i], VLAI_RANKS_MOST);
                return EXIT_USAGE;
            }
            ranks = (int)n;
        } else if (!strcmp(argv[i], "--json"))
            json = 1;
        else if (vlai_config_is_override(argv[i]) && count < OVERRIDES)
            overrides[count++] = argv[i];
        else
            return command_unknown("preflight", argv[i], known, 5);
    }
    vla_error err = VLA_ERROR_INIT;
    if (!path)
        return vlai_fail_hint(&err, VLA_E_INVALID, "vla preflight --config FILE", "no configuration"), command_fail("preflight", &err);
    vlai_config *config = NULL;
    vlai_preflight p = {0};
    vla_status status = vlai_config_load(path, overrides, count, &config, &err);
    if (status == VLA_OK)
        status = vlai_preflight_run(config, ranks, &p, &err);
    if (status == VLA_OK)
        status = print(&p, json, &err);
    int code = status == VLA_OK ? EXIT_DONE : command_fail("preflight", &err);
    vla_status found = vlai_preflight_status(&p);
    if (status == VLA_OK && found != VLA_OK)
        code = command_exit_code(found);
    vlai_preflight_fini(&p);
    vlai_config_destroy(config);
    return code;
}
