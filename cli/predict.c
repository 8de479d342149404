/* vla predict: open-loop evaluation of a checkpoint on held-out episodes. */
#include "args.h"
#include "command.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "train/predict.h"

#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "Usage: vla predict CHECKPOINT [options]\n\n"
    "Predicts action chunks at frames of episodes that were held out from training, and compares them with the recorded\n"
    "actions, in the data set's units: per dimension, per step of the horizon, and over all, beside what the mean action of\n"
    "the training episodes would have got. CHECKPOINT is a checkpoint or a run folder, of which the newest whole checkpoint\n"
    "is taken. Samples are made as in training, under the contract that the checkpoint recorded.\n\n"
    "  --episodes N,N-M,...   these instead of the held-out ones\n"
    "  --dataset DIR          another data set of the same contract\n"
    "  --config FILE          another training configuration; it must agree with the contract\n"
    "  --weights PATH         other weights of the same architecture, such as the untrained ones\n"
    "  --stride N             frames from one prediction to the next (the horizon)\n"
    "  --max-frames N         predictions per episode (0: all)\n"
    "  --steps N              Euler steps of the flow (as the architecture says)\n"
    "  --swap images|instructions   takes these from another episode with another instruction: an error that does not grow\n"
    "                         shows that the policy does not look at them\n"
    "  --batch N              frames sampled together (16)\n"
    "  --seed N               of the noise (0)\n"
    "  --device cpu|cuda|cuda:N|auto   (auto: a GPU where there is one)\n"
    "  --threads N            (0: all processors)\n"
    "  --out DIR              summary.json, predictions.csv, horizon.png, and per episode epN_summary.json and epN.png go there\n"
    "                         (predict beside the checkpoint; with --swap or --weights nothing is written unless this is given)\n"
    "  --plots N              episodes drawn (8)\n"
    "  --json                 print summary.json instead of the tables\n\n"
    "Examples:\n"
    "  vla predict build/demo/run                     # what make demo has trained\n"
    "  vla predict build/demo/run/latest --episodes 180-199 --stride 5 --out /tmp/predicted\n"
    "  vla predict build/demo/run --weights build/demo/start/model.safetensors      # the untrained model on the same frames\n"
    "  vla predict build/demo/run --swap images\n";

enum { PATH = 4096 };

typedef struct arguments {
    vlai_predict_options o;
    const char *out;
    bool json;
    int64_t threads, seed;
    int64_t *episodes;
    size_t capacity;
} arguments;

/* "3,7,10-12" */
static vla_status set_episodes(arguments *a, const char *value, vla_error *err)
{
    const char *at = value;
    while (*at) {
        char *end;
        errno = 0;
        int64_t first = strtoll(at, &end, 10), last = first;
        bool good = end != at && first >= 0;
        if (good && *end == '-') {
            const char *second = end + 1;
            last = strtoll(second, &end, 10);
            good = end != second;
        }
        if (!good || errno || last < first || last - first > 10000000 || (*end && *end != ','))
            return vlai_fail(err, VLA_E_INVALID, "--episodes: '%s' is not a list such as 3,7,10-12", value);
        for (; first <= last; first++) {
            VLA_TRY(vlai_reserve((void **)&a->episodes, &a->capacity, a->o.episode_count, sizeof *a->episodes, err));
            a->episodes[a->o.episode_count++] = first;
        }
        at = *end ? end + 1 : end;
    }
    a->o.episodes = a->episodes;
    return VLA_OK;
}

static vla_status set_swap(arguments *a, const char *value, vla_error *err)
{
    a->o.swap = !strcmp(value, "images") ? VLAI_SWAP_IMAGES : VLAI_SWAP_INSTRUCTIONS;
    if (strcmp(value, "images") != 0 && strcmp(value, "instructions") != 0)
        return vlai_fail(err, VLA_E_INVALID, "--swap: '%s' is not images or instructions", value);
    return VLA_OK;
}

static void show(void *user, int64_t done, int64_t frames)
{
    (void)user;
    fprintf(stderr, "\r%" PRId64 " of %" PRId64 " predictions%s", done, frames, done == frames ? "\n" : "");
}

/* Results go beside the checkpoints of the run; "": nowhere. The folder is made before they are, so that none are made in vain. */
static vla_status find_folder(const arguments *a, const vlai_predict *p, char dir[PATH], vla_error *err)
{
    char run[PATH];
    snprintf(run, sizeof run, "%s", vlai_predict_checkpoint(p));
    *dir = 0;
    if (!a->out && (a->o.swap != VLAI_SWAP_NOTHING || a->o.weights))
        return VLA_OK;
    if (a->out ? snprintf(dir, PATH, "%s", a->out) >= PATH : !vlai_path_join(dir, PATH, dirname(run), "predict"))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", a->out ? a->out : run);
    return vlai_mkdirs(dir, err);
}

static vla_status save(const arguments *a, const vlai_predict *p, const char *dir, vla_error *err)
{
    if (!*dir)
        return VLA_OK;
    VLA_TRY(vlai_predict_save(p, dir, err));
    if (!a->json)
        printf("written to %s\n", dir);
    return VLA_OK;
}

static vla_status predict(const arguments *a, vla_error *err)
{
    vlai_predict *p;
    VLA_TRY(vlai_predict_create(&a->o, &p, err));
    fputs(vlai_predict_notes(p), stderr);
    vlai_text text = {0};
    char dir[PATH];
    vla_status status = find_folder(a, p, dir, err);
    if (status == VLA_OK)
        status = vlai_predict_run(p, err);
    if (status == VLA_OK && a->json)
        status = vlai_predict_json(p, &text, err);
    else if (status == VLA_OK)
        vlai_predict_print(p, &text);
    if (status == VLA_OK)
        status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        fputs(text.data, stdout);
    vlai_text_fini(&text);
    if (status == VLA_OK)
        status = save(a, p, dir, err);
    vlai_predict_destroy(p);
    return status;
}

int command_predict(int argc, char **argv)
{
    arguments a = {.o = VLAI_PREDICT_DEFAULT};
    const char *episodes = NULL, *swap = NULL;
    const arg_row rows[] = {
        {"--episodes", ARG_TEXT, &episodes},       {"--dataset", ARG_TEXT, &a.o.dataset}, {"--config", ARG_TEXT, &a.o.config},
        {"--weights", ARG_TEXT, &a.o.weights},     {"--stride", ARG_INT, &a.o.stride},    {"--max-frames", ARG_INT, &a.o.most_frames},
        {"--steps", ARG_INT, &a.o.steps},          {"--swap", ARG_TEXT, &swap},           {"--batch", ARG_COUNT, &a.o.batch},
        {"--seed", ARG_SEED, &a.seed},             {"--device", ARG_TEXT, &a.o.device},   {"--threads", ARG_THREADS, &a.threads},
        {"--out", ARG_TEXT, &a.out},               {"--plots", ARG_INT, &a.o.plots},      {"--json", ARG_FLAG, &a.json},
    };
    static args given; /* too large for a stack frame */
    given = (args){.name = "predict", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .positionals = true};
    if (argc < 2)
        return fputs(help, stderr), EXIT_USAGE;
    int code = args_parse(&given, argc, argv);
    if (code >= 0)
        return code;
    if (given.positionals_given != 1) {
        fprintf(stderr, "vla predict: %zu checkpoints or run folders were named, wanted one\n  hint: vla predict CHECKPOINT\n",
                given.positionals_given);
        return EXIT_USAGE;
    }
    a.o.checkpoint = given.positional[0];
    a.o.threads = (int)a.threads;
    a.o.seed = (uint64_t)a.seed;
    vla_error err = VLA_ERROR_INIT;
    vla_status status = episodes ? set_episodes(&a, episodes, &err) : VLA_OK;
    if (status == VLA_OK && swap)
        status = set_swap(&a, swap, &err);
    if (status == VLA_OK) {
        if (isatty(2))
            a.o.progress = show;
        status = predict(&a, &err);
    }
    vlai_free(a.episodes);
    return status == VLA_OK ? EXIT_DONE : command_fail("predict", &err);
}
