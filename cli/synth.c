/* vla synth: writes a synthetic LeRobot dataset with a task that a small model can learn. */
#include "args.h"
#include "command.h"
#include "interrupt.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/text.h"
#include "base/time.h"
#include "data/synth.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "Usage: vla synth OUT [options]\n\n"
    "Writes a LeRobot dataset of a learnable task to the new folder OUT. Two or three coloured goals lie in the picture,\n"
    "the instruction names one (\"move to the red goal\"), the effector moves there from where the state says it is. Every\n"
    "input matters: the goals stand only in the picture, which one is meant only in the instruction, the start only in\n"
    "the state. An action is half of what remains to the goal; the gripper closes on the way. A small model learns it\n"
    "from many short episodes (first example); it learns a few long ones by heart instead. Few dimensions are easier.\n\n"
    "  --version v3.0|v2.1|v2.0    dataset format (v3.0)\n"
    "  --episodes N                (50)\n"
    "  --length MIN:MAX            frames of an episode, evenly drawn (20:30); N for one length\n"
    "  --fps N                     (10)\n"
    "  --cameras KEY,KEY...|none   feature keys (observation.images.image,observation.images.wrist_image); camera k sees\n"
    "                              the scene turned by k quarter turns; none: numbers only, for measuring statistics\n"
    "  --size WxH                  of the pictures (256x256); AV1 takes 64x64 and up, sides of video must be even\n"
    "  --storage av1|h264|image    video codec, or PNG in the Parquet files (av1); one for all cameras, or one each: av1,h264\n"
    "  --gop N                     video: a key frame every N frames (2)\n"
    "  --crf N                     video: quality, 0 best (30)\n"
    "  --preset N                  AV1: speed, 0 slowest to 13 (12)\n"
    "  --state-dim N               (8)      --state-key KEY   (observation.state)\n"
    "  --action-dim N              (7)      --action-key KEY  (action)\n"
    "  --robot NAME                robot_type (panda)\n"
    "  --phrasings N               ways to say the instruction, 1 to 4 (1: three tasks in all)\n"
    "  --jitter X                  how far goals lie from their three places, in fractions of the picture (0.05)\n"
    "  --goals-min N               a picture shows N to 3 goals (2), the one that is meant among them; 3 is hardest to learn\n"
    "  --noise N                   noise of +-N grey levels on every pixel (0): pictures as hard to decode as real ones\n"
    "  --stamp                     draw frame, camera and episode number as black and white blocks, two rows of eight from\n"
    "                              the top: bits of the frame, least first; then 2 bits camera, 6 bits episode\n"
    "  --data-mb X, --video-mb X   v3.0: begin a new file before one grows past X (100, 200); fractions are fine\n"
    "  --chunks-size N             files (v3.0) or episodes (v2.x) per chunk folder (1000)\n"
    "  --seed N                    (0) the same options and seed give the same bytes\n"
    "  --threads N                 (0: all processors)\n\n"
    "Examples:\n"
    "  vla synth /tmp/demo --episodes 1000 --length 10:14 --size 64x64 --storage av1,h264 --state-dim 3 --action-dim 3\n"
    "  vla synth /tmp/old --version v2.1 --storage h264 --gop 12 --episodes 20\n"
    "  vla synth /tmp/numbers --cameras none --episodes 5000 --length 200      # 1,000,000 frames\n"
    "  vla synth /tmp/many --episodes 1000 --length 4:8 --storage h264 --size 64x64\n"
    "  vla synth /tmp/hard --noise 10 --episodes 40 --length 100               # AV1 for measuring a loader\n"
    "  vla synth /tmp/aloha --state-dim 14 --action-dim 14 --robot aloha --fps 25 --size 320x240 \\\n"
    "      --cameras observation.images.cam_high,observation.images.cam_left_wrist,observation.images.cam_right_wrist\n";

typedef enum kind { INTEGER, INTEGER64, REAL, TEXT, FLAG, LENGTH, SIZE, VERSION, CAMERAS, STORAGE } kind;

/* One row per option: where its value goes, and for numbers what type it has there. */
static const struct option {
    const char *name;
    kind kind;
    size_t offset;
} rows[] = {
#define OPTION(name, kind, field) {name, kind, offsetof(vlai_synth_options, field)},
    OPTION("--version", VERSION, version)
    OPTION("--episodes", INTEGER64, episodes)
    OPTION("--length", LENGTH, task.length_min)
    OPTION("--fps", INTEGER, fps)
    OPTION("--cameras", CAMERAS, cameras)
    OPTION("--size", SIZE, task.width)
    OPTION("--storage", STORAGE, storage)
    OPTION("--gop", INTEGER, gop)
    OPTION("--crf", INTEGER, crf)
    OPTION("--preset", INTEGER, preset)
    OPTION("--state-dim", INTEGER, task.state_dim)
    OPTION("--state-key", TEXT, state_key)
    OPTION("--action-dim", INTEGER, task.action_dim)
    OPTION("--action-key", TEXT, action_key)
    OPTION("--robot", TEXT, robot)
    OPTION("--goals-min", INTEGER, task.goals_min)
    OPTION("--phrasings", INTEGER, task.phrasings)
    OPTION("--jitter", REAL, task.jitter)
    OPTION("--noise", INTEGER, task.noise)
    OPTION("--stamp", FLAG, task.stamp)
    OPTION("--data-mb", REAL, data_mb)
    OPTION("--video-mb", REAL, video_mb)
    OPTION("--chunks-size", INTEGER64, chunks_size)
    OPTION("--seed", INTEGER64, task.seed)
    OPTION("--threads", INTEGER, threads)
#undef OPTION
};
enum { OPTION_COUNT = sizeof rows / sizeof *rows };

static vla_status bad(const char *option, const char *value, const char *wanted, vla_error *err)
{
    return vlai_fail(err, VLA_E_INVALID, "%s: '%s' is not %s", option, value, wanted);
}

static bool integer(const char *text, char **end, int64_t *out)
{
    errno = 0;
    *out = strtoll(text, end, 10);
    return *end != text && errno == 0;
}

static vla_status set_length(vlai_synth_options *o, const char *value, vla_error *err)
{
    char *end;
    bool good = integer(value, &end, &o->task.length_min);
    o->task.length_max = o->task.length_min;
    if (good && *end == ':')
        good = integer(end + 1, &end, &o->task.length_max);
    return good && !*end ? VLA_OK : bad("--length", value, "a range such as 20:30", err);
}

static vla_status set_size(vlai_synth_options *o, const char *value, vla_error *err)
{
    char *end;
    int64_t width, height;
    if (!integer(value, &end, &width) || *end != 'x' || !integer(end + 1, &end, &height) || *end || width < 0 ||
        height < 0 || width > 100000 || height > 100000)
        return bad("--size", value, "a size such as 256x256", err);
    o->task.width = (int)width;
    o->task.height = (int)height;
    return VLA_OK;
}

static vla_status set_version(vlai_synth_options *o, const char *value, vla_error *err)
{
    for (int v = 0; v < VLAI_SET_VERSIONS; v++)
        if (!strcmp(value, vlai_set_version_names[v])) {
            o->version = (vlai_set_version)v;
            return VLA_OK;
        }
    return bad("--version", value, "v3.0, v2.1 or v2.0", err);
}

/* Cuts a list at its commas, in place. More than there is room for: a count that the range check refuses. */
static int cut(char *list, char *parts[VLAI_SYNTH_CAMERAS])
{
    int count = 0;
    for (char *part = list; part; count++) {
        char *comma = strchr(part, ',');
        if (comma)
            *comma++ = 0;
        if (count < VLAI_SYNTH_CAMERAS)
            parts[count] = part;
        part = comma;
    }
    return count;
}

/* Storage by name, for each camera. One name stands for all. */
static vla_status set_storage(vlai_synth_options *o, char *value, vla_error *err)
{
    char *parts[VLAI_SYNTH_CAMERAS];
    int count = cut(value, parts);
    if (count > 1 && count != o->camera_count)
        return vlai_fail(err, VLA_E_INVALID, "--storage: %d given for %d cameras; wanted one, or one for each", count,
                         o->camera_count);
    for (int c = 0; c < o->camera_count; c++) {
        const char *name = parts[count > 1 ? c : 0];
        int s = 0;
        while (s < VLAI_STORES && strcmp(name, vlai_storage_names[s]) != 0)
            s++;
        if (s == VLAI_STORES)
            return bad("--storage", name, "av1, h264 or image", err);
        o->storage[c] = (vlai_storage)s;
    }
    return VLA_OK;
}

static vla_status set_option(vlai_synth_options *o, const struct option *row, char *value, vla_error *err)
{
    void *to = (char *)o + row->offset;
    char *end, *parts[VLAI_SYNTH_CAMERAS];
    int64_t number;
    switch (row->kind) {
    case INTEGER:
    case INTEGER64:
        if (!integer(value, &end, &number) || *end || (row->kind == INTEGER && (number > INT32_MAX || number < INT32_MIN)))
            return bad(row->name, value, "a whole number", err);
        if (row->kind == INTEGER)
            *(int *)to = (int)number;
        else
            *(int64_t *)to = number;
        return VLA_OK;
    case REAL:
        *(double *)to = strtod(value, &end);
        return end == value || *end || !isfinite(*(double *)to) ? bad(row->name, value, "a number", err) : VLA_OK;
    case TEXT: *(const char **)to = value; return VLA_OK;
    case LENGTH: return set_length(o, value, err);
    case SIZE: return set_size(o, value, err);
    case VERSION: return set_version(o, value, err);
    case CAMERAS:
        o->camera_count = strcmp(value, "none") ? cut(value, parts) : 0;
        for (int c = 0; c < o->camera_count && c < VLAI_SYNTH_CAMERAS; c++)
            o->cameras[c] = parts[c];
        return VLA_OK;
    default: return VLA_OK; /* flags take no value; --storage waits for the cameras */
    }
}

int command_synth(int argc, char **argv)
{
    if (argc < 2 || command_help(argc, argv, help))
        return argc < 2 ? fputs(help, stderr), EXIT_USAGE : EXIT_DONE;
    vlai_synth_options o = VLAI_SYNTH_DEFAULT;
    vla_error err = VLA_ERROR_INIT;
    char *out = NULL, *storage = NULL;
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') {
            if (out)
                return vlai_fail(&err, VLA_E_INVALID, "'%s' and '%s': wanted one folder", out, argv[i]),
                       command_fail("synth", &err);
            out = argv[i];
            continue;
        }
        int k = 0;
        const char *value = NULL;
        while (k < OPTION_COUNT && !args_match(argv[i], rows[k].name, &value))
            k++;
        if (k == OPTION_COUNT) {
            const char *names[OPTION_COUNT];
            for (int n = 0; n < OPTION_COUNT; n++)
                names[n] = rows[n].name;
            return command_unknown("synth", argv[i], names, OPTION_COUNT);
        }
        if (rows[k].kind == FLAG) {
            if (value)
                return vlai_fail(&err, VLA_E_INVALID, "%s takes no value, and '%s' was given", rows[k].name, value), command_fail("synth", &err);
            *(bool *)((char *)&o + rows[k].offset) = true;
            continue;
        }
        if (!value && i + 1 == argc)
            return vlai_fail(&err, VLA_E_INVALID, "%s needs a value", argv[i]), command_fail("synth", &err);
        char *given = value ? argv[i] + (value - argv[i]) : argv[++i];
        if (rows[k].kind == STORAGE)
            storage = given;
        if (set_option(&o, &rows[k], given, &err) != VLA_OK)
            return command_fail("synth", &err);
    }
    if (!out)
        return vlai_fail_hint(&err, VLA_E_INVALID, "vla synth OUT [options]", "no folder to write to"),
               command_fail("synth", &err);
    bool countable = o.camera_count <= VLAI_SYNTH_CAMERAS;
    if (storage && countable && set_storage(&o, storage, &err) != VLA_OK)
        return command_fail("synth", &err);
    double start = vlai_now();
    vlai_synth_summary made;
    char target[4096], temporary[4096];
    if (vlai_temporary_dir(out, target, temporary, sizeof target))
        interrupt_removes(temporary);
    if (vlai_synth_write(out, &o, &made, &err) != VLA_OK)
        return command_fail("synth", &err);
    printf("%s: LeRobot %s, %lld episodes, %lld frames, %d cameras, written in %.1f s\n", out,
           vlai_set_version_names[o.version], (long long)made.episodes, (long long)made.frames, o.camera_count,
           vlai_now() - start);
    return EXIT_DONE;
}
