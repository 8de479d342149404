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
    "  vla predict ckpt/demo\n"
    "  vla predict ckpt/demo/0_600 --episodes 180-199 --stride 5 --out /tmp/predicted\n"
    "  vla predict ckpt/demo --weights start/model.safetensors      # the untrained model on the same frames\n"
    "  vla predict ckpt/demo --swap images\n";

typedef enum kind { INTEGER, TEXT, FLAG, EPISODES, SWAP } kind;

typedef struct arguments {
    vlai_predict_options o;
    const char *out;
    bool json;
    int64_t threads, seed;
    int64_t *episodes;
    size_t capacity;
} arguments;

static const struct {
    const char *name;
    kind kind;
    size_t offset;
} rows[] = {
    {"--episodes", EPISODES, 0},
    {"--dataset", TEXT, offsetof(arguments, o.dataset)},
    {"--config", TEXT, offsetof(arguments, o.config)},
    {"--weights", TEXT, offsetof(arguments, o.weights)},
    {"--stride", INTEGER, offsetof(arguments, o.stride)},
    {"--max-frames", INTEGER, offsetof(arguments, o.most_frames)},
    {"--steps", INTEGER, offsetof(arguments, o.steps)},
    {"--swap", SWAP, offsetof(arguments, o.swap)},
    {"--batch", INTEGER, offsetof(arguments, o.batch)},
    {"--seed", INTEGER, offsetof(arguments, seed)},
    {"--device", TEXT, offsetof(arguments, o.device)},
    {"--threads", INTEGER, offsetof(arguments, threads)},
    {"--out", TEXT, offsetof(arguments, out)},
    {"--plots", INTEGER, offsetof(arguments, o.plots)},
    {"--json", FLAG, offsetof(arguments, json)},
};
enum { ROWS = sizeof rows / sizeof *rows };

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

static vla_status set(arguments *a, int row, const char *value, vla_error *err)
{
    void *to = (char *)a + rows[row].offset;
    char *end;
    switch (rows[row].kind) {
    case INTEGER:
        errno = 0;
        *(int64_t *)to = strtoll(value, &end, 10);
        if (end == value || *end || errno || *(int64_t *)to < 0)
            return vlai_fail(err, VLA_E_INVALID, "%s: '%s' is not a whole number", rows[row].name, value);
        return VLA_OK;
    case SWAP:
        a->o.swap = !strcmp(value, "images") ? VLAI_SWAP_IMAGES : VLAI_SWAP_INSTRUCTIONS;
        if (strcmp(value, "images") != 0 && strcmp(value, "instructions") != 0)
            return vlai_fail(err, VLA_E_INVALID, "--swap: '%s' is not images or instructions", value);
        return VLA_OK;
    case EPISODES: return set_episodes(a, value, err);
    default: *(const char **)to = value; return VLA_OK;
    }
}

static vla_status parse(arguments *a, int argc, char **argv, int *unknown, vla_error *err)
{
    for (int i = 1; i < argc; i++) {
        int row = 0;
        if (argv[i][0] != '-' && !a->o.checkpoint) {
            a->o.checkpoint = argv[i];
            continue;
        }
        const char *value = NULL;
        while (row < ROWS && !args_match(argv[i], rows[row].name, &value))
            row++;
        if (row == ROWS) {
            *unknown = i;
            return VLA_OK;
        }
        if (rows[row].kind == FLAG) {
            a->json = true;
            continue;
        }
        if (!value && i + 1 == argc)
            return vlai_fail(err, VLA_E_INVALID, "%s needs a value", argv[i]);
        VLA_TRY(set(a, row, value ? value : argv[++i], err));
    }
    a->o.threads = (int)(a->threads < 4096 ? a->threads : 4096);
    a->o.seed = (uint64_t)a->seed;
    return a->o.checkpoint ? VLA_OK
                           : vlai_fail_hint(err, VLA_E_INVALID, "vla predict CHECKPOINT", "no checkpoint or run folder was named");
}

static void show(void *user, int64_t done, int64_t frames)
{
    (void)user;
    fprintf(stderr, "\r%" PRId64 " of %" PRId64 " predictions%s", done, frames, done == frames ? "\n" : "");
}

/* Results go beside the checkpoints of the run. */
static vla_status save(const arguments *a, const vlai_predict *p, vla_error *err)
{
    char run[4096], dir[4096];
    snprintf(run, sizeof run, "%s", vlai_predict_checkpoint(p));
    if (!a->out && (a->o.swap != VLAI_SWAP_NOTHING || a->o.weights))
        return VLA_OK;
    if (!vlai_path_join(dir, sizeof dir, dirname(run), "predict"))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", run);
    VLA_TRY(vlai_predict_save(p, a->out ? a->out : dir, err));
    if (!a->json)
        printf("written to %s\n", a->out ? a->out : dir);
    return VLA_OK;
}

static vla_status predict(const arguments *a, vla_error *err)
{
    vlai_predict *p;
    VLA_TRY(vlai_predict_create(&a->o, &p, err));
    fputs(vlai_predict_notes(p), stderr);
    vlai_text text = {0};
    vla_status status = vlai_predict_run(p, err);
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
        status = save(a, p, err);
    vlai_predict_destroy(p);
    return status;
}

int command_predict(int argc, char **argv)
{
    if (argc < 2 || command_help(argc, argv, help))
        return argc < 2 ? fputs(help, stderr), EXIT_USAGE : EXIT_DONE;
    arguments a = {.o = VLAI_PREDICT_DEFAULT};
    vla_error err = VLA_ERROR_INIT;
    int unknown = 0;
    vla_status status = parse(&a, argc, argv, &unknown, &err);
    if (status == VLA_OK && !unknown) {
        if (isatty(2))
            a.o.progress = show;
        status = predict(&a, &err);
    }
    vlai_free(a.episodes);
    if (unknown) {
        const char *names[ROWS];
        for (int i = 0; i < ROWS; i++)
            names[i] = rows[i].name;
        return command_unknown("predict", argv[unknown], names, ROWS);
    }
    return status == VLA_OK ? EXIT_DONE : command_fail("predict", &err);
}
