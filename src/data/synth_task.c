#include "data/synth_task.h"

#include "base/rng.h"

#include <math.h>
#include <string.h>

/* Draws of an episode: the `site` of their key. */
enum { SITE_COMBINATION, SITE_JITTER, SITE_START, SITE_LENGTH, SITE_PHRASING, SITE_NOISE, SITE_GOALS };

static const double places[VLAI_SYNTH_GOALS][2] = {{0.25, 0.25}, {0.75, 0.25}, {0.25, 0.75}};
static const uint8_t colours[VLAI_SYNTH_GOALS][3] = {{225, 30, 30}, {30, 175, 45}, {40, 70, 230}};
static const double radius = 0.18, gain = 0.1, finger = 0.04;

static vlai_rng_key key_of(const vlai_synth_task *task, int64_t position, uint32_t site)
{
    return (vlai_rng_key){task->seed, VLAI_RNG_SYNTH, (uint64_t)position, site};
}

/* Colour orders (6) times colours meant (3): every block of 18 episodes has each combination once, in random order. */
static int combination(const vlai_synth_task *task, int64_t episode)
{
    enum { COUNT = 18 };
    vlai_rng_key key = key_of(task, episode / COUNT, SITE_COMBINATION);
    int order[COUNT];
    for (int i = 0; i < COUNT; i++)
        order[i] = i;
    for (int i = COUNT - 1; i > 0; i--) {
        int j = (int)(vlai_rng_uniform64(&key, (uint32_t)i) * (i + 1)), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
    return order[episode % COUNT];
}

void vlai_synth_scene_make(const vlai_synth_task *task, int64_t episode, vlai_synth_scene *out)
{
    static const int orders[6][VLAI_SYNTH_GOALS] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    *out = (vlai_synth_scene){.episode = episode};
    int which = combination(task, episode);
    vlai_rng_key key = key_of(task, episode, SITE_JITTER);
    for (int c = 0; c < VLAI_SYNTH_GOALS; c++)
        for (int d = 0; d < 2; d++)
            out->goal[c][d] = places[orders[which / 3][c]][d] +
                              task->jitter * (2 * vlai_rng_uniform64(&key, (uint32_t)(c * 2 + d)) - 1);
    out->meant = which % 3;
    key.site = SITE_LENGTH;
    int64_t span = task->length_max - task->length_min + 1;
    out->length = task->length_min + (int64_t)(vlai_rng_uniform64(&key, 0) * (double)span);
    key.site = SITE_PHRASING;
    out->phrasing = (int)(vlai_rng_uniform64(&key, 0) * task->phrasings);
    out->joints = task->action_dim > 1 ? task->action_dim - 1 : 1;
    out->target[0] = 2 * out->goal[out->meant][0] - 1;
    out->target[1] = 1 - 2 * out->goal[out->meant][1];
    key.site = SITE_GOALS;
    int shown = task->goals_min + (int)(vlai_rng_uniform64(&key, 0) * (VLAI_SYNTH_GOALS - task->goals_min + 1));
    int other = (out->meant + 1 + (vlai_rng_uniform64(&key, 1) < 0.5)) % VLAI_SYNTH_GOALS; /* the first beside it */
    for (int c = 0; c < VLAI_SYNTH_GOALS; c++)
        out->shown[c] = shown == VLAI_SYNTH_GOALS || c == out->meant || (shown == 2 && c == other);
    key.site = SITE_START;
    for (int d = 0; d < 2; d++)
        out->start[d] = 2 * vlai_rng_uniform64(&key, (uint32_t)d) - 1;
    out->opening = vlai_rng_uniform64(&key, 2);
}

const char *vlai_synth_text(int colour, int phrasing)
{
    static const char *const texts[VLAI_SYNTH_PHRASINGS][VLAI_SYNTH_GOALS] = {
        {"move to the red goal", "move to the green goal", "move to the blue goal"},
        {"go to the red goal", "go to the green goal", "go to the blue goal"},
        {"reach the red goal", "reach the green goal", "reach the blue goal"},
        {"bring the gripper to the red goal", "bring the gripper to the green goal", "bring the gripper to the blue goal"},
    };
    return texts[phrasing][colour];
}

/* A joint as a function of the effector's place; linear, so it turns remaining ways into remaining ways too. */
static double joint(int j, const double place[2])
{
    return j < 2 ? place[j] : 0.7 * (place[0] * cos(2.0 * j) + place[1] * sin(2.0 * j));
}

void vlai_synth_frame(const vlai_synth_task *task, const vlai_synth_scene *scene, int64_t frame, float *state,
                      float *action)
{
    double left = pow(1 - gain, (double)frame), opening = scene->opening * left, place[2], way[2];
    for (int d = 0; d < 2; d++) {
        way[d] = (scene->target[d] - scene->start[d]) * left;
        place[d] = scene->target[d] - way[d];
    }
    for (int i = 0; i < task->state_dim; i++) {
        double side = (i - scene->joints) % 2 ? -finger : finger;
        state[i] = (float)(i < scene->joints ? joint(i, place) : side * opening);
    }
    bool seen = task->state_dim > scene->joints; /* the fingers */
    for (int i = 0; i < task->action_dim; i++)
        action[i] = (float)(i < scene->joints ? joint(i, way) / 2 : seen ? 1 - 2 * opening : way[0] / 2);
}

bool vlai_synth_still(const vlai_synth_task *task)
{
    return task->noise == 0 && !task->stamp;
}

void vlai_synth_view(int camera, const double in[2], double out[2])
{
    double u = in[0], v = in[1];
    if (camera % 8 >= 4)
        u = 1 - u;
    for (int turn = 0; turn < camera % 4; turn++) {
        double kept = u;
        u = 1 - v;
        v = kept;
    }
    out[0] = u;
    out[1] = v;
}

/* Two rows of eight blocks from the top: bits of the frame number, least first; then 2 bits camera, 6 bits episode. */
static void draw_stamp(const vlai_synth_task *task, int64_t episode, int camera, int64_t frame, uint8_t *rgb)
{
    uint32_t bits = (uint32_t)(frame & 255) | (uint32_t)(camera & 3) << 8 | (uint32_t)(episode & 63) << 10;
    for (int y = 0; y < task->height / 4; y++)
        for (int x = 0; x < task->width; x++) {
            int block = x * 8 / task->width + 8 * (y * 8 / task->height);
            memset(rgb + ((size_t)y * (size_t)task->width + (size_t)x) * 3, bits >> block & 1 ? 255 : 0, 3);
        }
}

/* Evenly distributed noise, a function of (episode, camera, frame, pixel). */
static void add_noise(const vlai_synth_task *task, int64_t episode, int camera, int64_t frame, uint8_t *rgb)
{
    const uint32_t key[2] = {(uint32_t)task->seed, (uint32_t)(task->seed >> 32)};
    size_t bytes = (size_t)task->width * (size_t)task->height * 3;
    int levels = 2 * task->noise + 1;
    for (size_t i = 0; i < bytes; i += 16) {
        const uint32_t counter[4] = {(uint32_t)(i / 16), (uint32_t)frame, (uint32_t)episode,
                                     (uint32_t)camera << 16 | (uint32_t)VLAI_RNG_SYNTH << 8 | SITE_NOISE};
        uint32_t word[4];
        vlai_philox(counter, key, word);
        for (size_t k = 0; k < 16 && i + k < bytes; k++) {
            int v = rgb[i + k] + (int)((word[k / 4] >> (k % 4 * 8) & 255) * (uint32_t)levels >> 8) - task->noise;
            rgb[i + k] = (uint8_t)(v < 0 ? 0 : v > 255 ? 255 : v);
        }
    }
}

/* The table's colour at a place of camera 0: redder to the right, bluer downwards, so that a patch shows where it lies.
 * (Rotary positions tell only where patches lie to each other.) */
static void ground(double u, double v, uint8_t *pixel)
{
    pixel[0] = (uint8_t)(135 + 110 * u);
    pixel[1] = 205;
    pixel[2] = (uint8_t)(135 + 110 * v);
}

void vlai_synth_draw(const vlai_synth_task *task, const vlai_synth_scene *scene, int camera, int64_t frame, uint8_t *rgb)
{
    double centre[VLAI_SYNTH_GOALS][2];
    for (int c = 0; c < VLAI_SYNTH_GOALS; c++)
        vlai_synth_view(camera, scene->goal[c], centre[c]);
    double r = radius * (task->width < task->height ? task->width : task->height), right[2], down[2];
    vlai_synth_view(camera, (const double[2]){1, 0.5}, right);
    vlai_synth_view(camera, (const double[2]){0.5, 1}, down);
    uint8_t *pixel = rgb;
    for (int y = 0; y < task->height; y++)
        for (int x = 0; x < task->width; x++, pixel += 3) {
            double across = (x + 0.5) / task->width - 0.5, along = (y + 0.5) / task->height - 0.5;
            ground(0.5 + 2 * (across * (right[0] - 0.5) + along * (right[1] - 0.5)),
                   0.5 + 2 * (across * (down[0] - 0.5) + along * (down[1] - 0.5)), pixel);
            for (int c = 0; c < VLAI_SYNTH_GOALS; c++) {
                double dx = x + 0.5 - centre[c][0] * task->width, dy = y + 0.5 - centre[c][1] * task->height;
                if (scene->shown[c] && dx * dx + dy * dy < r * r)
                    memcpy(pixel, colours[c], 3);
            }
        }
    if (task->noise)
        add_noise(task, scene->episode, camera, frame, rgb);
    if (task->stamp)
        draw_stamp(task, scene->episode, camera, frame, rgb);
}
