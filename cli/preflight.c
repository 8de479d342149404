/* vla preflight: what would stop a training run, before it starts. */
#include "args.h"
#include "command.h"

#include "base/fail.h"
#include "base/memory.h"
#include "dist/ranks.h"
#include "train/preflight.h"

#include <inttypes.h>
#include <stdio.h>
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
    "  --allow-change A,B|all the run goes on with it: values that may differ from the checkpoint's\n"
    "  --text-tokens N, --grid HxW[,HxW], --vocab N   plans are made for samples of so many text tokens, with pictures of such patches, and an\n"
    "                         embedding of so many rows, instead of what data set and weights have\n"
    "  --json                 one JSON object: checks, memory in bytes, disk\n\n"
    "Exit codes: 0 all is well; 2 configuration; 3 data, file or disk; 4 memory (of the first failure).\n\n"
    "Examples:\n"
    "  vla preflight --config configs/libero.yml\n"
    "  vla preflight --config configs/demo.yml --hyperparams.batch_size_per_gpu=64\n"
    "  WALLX_PERF_ALLOC=1 vla preflight --config configs/demo.yml --json | jq .memory\n";

static vla_status print(const vlai_preflight *p, bool json, vla_error *err)
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
    enum { NAMES = 64 };
    char device[64], names[4096];
    const char *path = NULL, *place = NULL, *grid = NULL, *allow = NULL, *allowed[NAMES + 1];
    int64_t ranks = 1;
    bool json = false;
    vlai_preflight_options o = {0};
    const arg_row rows[] = {{"--config", ARG_TEXT, &path}, {"--config_path", ARG_TEXT, &path}, {"--device", ARG_TEXT, &place},
                            {"--ranks", ARG_COUNT, &ranks}, {"--allow-change", ARG_TEXT, &allow}, {"--json", ARG_FLAG, &json},
                            {"--text-tokens", ARG_COUNT, &o.sizes.text_tokens}, {"--grid", ARG_TEXT, &grid}, {"--vocab", ARG_COUNT, &o.sizes.vocab}};
    static args a; /* too large for a stack frame */
    a = (args){.name = "preflight", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .overrides = true};
    if (argc < 2)
        return fputs(help, stderr), EXIT_USAGE;
    int given = args_parse(&a, argc, argv);
    if (given >= 0)
        return given;
    vla_error err = VLA_ERROR_INIT;
    if (!path)
        return vlai_fail_hint(&err, VLA_E_INVALID, "vla preflight --config FILE", "no configuration"), command_fail("preflight", &err);
    if (ranks > VLAI_RANKS_MOST)
        return vlai_fail(&err, VLA_E_INVALID, "--ranks %" PRId64 ": wanted 1 to %d", ranks, (int)VLAI_RANKS_MOST), command_fail("preflight", &err);
    if (place && (a.overrides_given == ARGS_MOST || snprintf(device, sizeof device, "training.device=%s", place) >= (int)sizeof device))
        return vlai_fail(&err, VLA_E_INVALID, "--device '%.80s': wanted cpu, cuda, cuda:N or auto", place), command_fail("preflight", &err);
    if (place)
        a.override[a.overrides_given++] = device;
    if (grid && vlai_wallx_grids_parse(grid, &o.sizes, &err) != VLA_OK)
        return command_fail("preflight", &err);
    o.ranks = (int)ranks;
    if (allow) {
        snprintf(names, sizeof names, "%s", allow);
        args_split(names, allowed, NAMES);
        o.allow_change = allowed;
    }
    vlai_config *config = NULL;
    vlai_preflight p = {0};
    vla_status status = vlai_config_load(path, a.override, a.overrides_given, &config, &err);
    if (status == VLA_OK)
        status = vlai_preflight_run(config, &o, &p, &err);
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
