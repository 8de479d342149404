/* `vla synth`: a whole LeRobot dataset of the task in data/synth_task.h.
 *
 *     vlai_synth_options options = VLAI_SYNTH_DEFAULT;
 *     options.episodes = 200;
 *     vlai_synth_write("/data/set", &options, &summary, err);
 *
 * The same options give the same bytes, whatever the number of threads. The set is made in a temporary folder beside the
 * target and renamed when it is whole; a target that exists is refused; after a failure nothing is left. */
#ifndef VLAI_SYNTH_H
#define VLAI_SYNTH_H

#include "data/set_write.h"
#include "data/synth_task.h"

VLA_BEGIN_DECLS

enum { VLAI_SYNTH_CAMERAS = 8 };

typedef enum vlai_storage { VLAI_STORE_AV1, VLAI_STORE_H264, VLAI_STORE_IMAGE, VLAI_STORES } vlai_storage;
extern const char *const vlai_storage_names[VLAI_STORES];

typedef struct vlai_synth_options {
    vlai_set_version version;
    int64_t episodes;
    int fps;
    vlai_synth_task task;
    const char *cameras[VLAI_SYNTH_CAMERAS]; /* feature keys */
    vlai_storage storage[VLAI_SYNTH_CAMERAS];
    int camera_count; /* 0: numbers only */
    const char *state_key, *action_key, *robot;
    int gop, crf, preset;
    int64_t chunks_size;
    double data_mb, video_mb;
    int threads; /* 0: all */
} vlai_synth_options;

#define VLAI_SYNTH_DEFAULT                                                                                            \
    {                                                                                                                 \
        .version = VLAI_SET_V30, .episodes = 50, .fps = 10, .task = {.state_dim = 8, .action_dim = 7, .length_min = 20, \
        .length_max = 30, .jitter = 0.05, .goals_min = 2, .phrasings = 1, .width = 256, .height = 256},                                \
        .cameras = {"observation.images.image", "observation.images.wrist_image"}, .camera_count = 2,                 \
        .state_key = "observation.state", .action_key = "action", .robot = "panda", .gop = 2, .crf = 30, .preset = 12, \
        .chunks_size = 1000, .data_mb = 100, .video_mb = 200                                                          \
    }

typedef struct vlai_synth_summary {
    int64_t episodes, frames;
} vlai_synth_summary;

/* What is wrong with the options, naming the option of the program ("--size"). */
vla_status vlai_synth_check(const vlai_synth_options *options, vla_error *err);
vla_status vlai_synth_write(const char *path, const vlai_synth_options *options, vlai_synth_summary *summary,
                            vla_error *err);

VLA_END_DECLS

#endif
