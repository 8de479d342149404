/* The task of synthetic sets: two or three coloured goals lie in the picture, the instruction names one colour, the
 * effector moves there from where the state says it is. Each input is needed: where the goals lie stands only in the
 * picture (the effector is not drawn), which goal is meant only in the instruction, where the motion starts only in the
 * state.
 *
 * The three colours are permuted over three places from episode to episode, each place jittered a little. With goals
 * spread evenly over the picture, or with few episodes, a small model learns the episodes by heart instead of looking.
 * Where all three goals always show, picture and instruction each say nothing without the other, and a small model stays
 * long at what the state alone tells; a goal fewer in some pictures gives it something to begin with. The table's colour
 * changes from place to place, as real ones do.
 *
 * Motion. The effector starts anywhere in the square (-1, 1) x (-1, 1), x right and y up, and each frame covers a tenth
 * of what remains to the goal. The pose has J = max(1, action_dim - 1) joints, all functions of the effector: joint 0 is
 * x, joint 1 is y, joint j is 0.7 (x cos 2j + y sin 2j). (Joints with goals and starts of their own would betray the goal
 * from the state alone.) The action of a joint is half of what remains to its target. The gripper opening starts anywhere
 * in (0, 1) and closes at the same rate; its action, the last one, is 1 - 2 opening. The state holds the joints, then
 * fingers at +-0.04 opening. Where the state has no room for fingers, the gripper moves as joint 0, so that the action
 * always follows from the inputs.
 *
 * Everything is a pure function of (seed, episode): episodes can be made in any order, on any thread. */
#ifndef VLAI_SYNTH_TASK_H
#define VLAI_SYNTH_TASK_H

#include "vla/error.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

enum { VLAI_SYNTH_GOALS = 3, VLAI_SYNTH_PHRASINGS = 4, VLAI_SYNTH_DIMS = 64 };

typedef struct vlai_synth_task {
    uint64_t seed;
    int state_dim, action_dim; /* 1 .. VLAI_SYNTH_DIMS */
    int64_t length_min, length_max;
    double jitter; /* of the places, fraction of the picture either way */
    int goals_min; /* a picture shows this many to all three; the one that is meant is among them */
    int phrasings; /* 1 .. VLAI_SYNTH_PHRASINGS ways to say the instruction */
    int width, height;
    int noise;  /* grey levels of per-pixel noise, either way; 0 none */
    bool stamp; /* draw frame, camera and episode number as blocks, so that a decoded frame shows which it is */
} vlai_synth_task;

typedef struct vlai_synth_scene {
    int64_t episode, length;
    double goal[VLAI_SYNTH_GOALS][2]; /* centre of colour c: right and down, in fractions of the picture of camera 0 */
    bool shown[VLAI_SYNTH_GOALS];
    int meant;                        /* the colour that the instruction names */
    int phrasing;
    double start[2], target[2]; /* of the effector: right, up */
    double opening;             /* of the gripper, at the start */
    int joints;
} vlai_synth_scene;

void vlai_synth_scene_make(const vlai_synth_task *task, int64_t episode, vlai_synth_scene *out);
/* "move to the red goal" and the like; colour 0 red, 1 green, 2 blue. */
const char *vlai_synth_text(int colour, int phrasing);
/* State (state_dim) and action (action_dim) of one frame. */
void vlai_synth_frame(const vlai_synth_task *task, const vlai_synth_scene *scene, int64_t frame, float *state,
                      float *action);
/* True when the pictures of an episode are all alike. */
bool vlai_synth_still(const vlai_synth_task *task);
/* (height, width, 3) uint8. Camera k sees the scene turned by k quarter turns, mirrored from the fourth on. */
void vlai_synth_draw(const vlai_synth_task *task, const vlai_synth_scene *scene, int camera, int64_t frame, uint8_t *rgb);
/* Where camera k shows a point of camera 0. */
void vlai_synth_view(int camera, const double in[2], double out[2]);

VLA_END_DECLS

#endif
