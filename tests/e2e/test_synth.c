/* Synthetic sets, written and read back: every version and storage, the task itself, equal bytes, and what goes wrong. */
#include "test.h"

#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "data/synth.h"
#include "format/image.h"
#include "format/video.h"
#include "vla/memory.h"

#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char folder[] = "/tmp/vla_synth_XXXXXX";
static vla_error err = VLA_ERROR_INIT;

enum { EPISODES = 5, MOST_FRAMES = 64, SIDE = 64, PATH = 1024 };

static const char *in_folder(char out[PATH], const char *format, ...) __attribute__((format(printf, 2, 3)));
static const char *in_folder(char out[PATH], const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = snprintf(out, PATH, "%s/", folder);
    vsnprintf(out + n, PATH - (size_t)n, format, args);
    va_end(args);
    return out;
}

/* The path of a file in a set. */
static const char *in_set(char out[PATH], const char *set, const char *format, ...) __attribute__((format(printf, 3, 4)));
static const char *in_set(char out[PATH], const char *set, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = snprintf(out, PATH, "%s/", set);
    vsnprintf(out + n, PATH - (size_t)n, format, args);
    va_end(args);
    return out;
}

static vlai_synth_options small(void)
{
    vlai_synth_options o = VLAI_SYNTH_DEFAULT;
    o.episodes = EPISODES;
    o.fps = 30;
    o.task.length_min = 6;
    o.task.length_max = 9;
    o.task.width = o.task.height = SIDE;
    o.task.stamp = true;
    o.task.seed = 3;
    o.chunks_size = 2;
    o.threads = 2;
    o.task.phrasings = 2;
    return o;
}

/* ---- reading a set back ---- */

typedef struct {
    int64_t rows;
    float state[MOST_FRAMES * 8], action[MOST_FRAMES * 7], timestamp[MOST_FRAMES];
    int64_t frame[MOST_FRAMES], episode[MOST_FRAMES], index[MOST_FRAMES], task[MOST_FRAMES];
    int files;
} table;

static void read_column(vlai_parquet *file, const char *name, vlai_parquet_type type, int dims, void *out, size_t width)
{
    const vlai_parquet_column *column = vlai_parquet_find(file, name);
    assert_non_null(column);
    vlai_parquet_values v;
    assert_ok(vlai_parquet_read(file, column, 0, vlai_parquet_rows(file), type, &v, &err), err);
    assert_int_equal(v.nulls, 0);
    assert_int_equal(v.count, vlai_parquet_rows(file) * dims);
    for (int64_t row = 0; row < v.rows; row++)
        assert_int_equal(v.offsets[row + 1] - v.offsets[row], dims);
    memcpy(out, type == VLAI_PARQUET_F32 ? (void *)v.f32 : type == VLAI_PARQUET_F64 ? (void *)v.f64 : (void *)v.i64,
           (size_t)v.count * width);
    vlai_parquet_values_fini(&v);
}

/* Checks the PNG cells of a file against the pictures drawn anew. */
static void check_images(vlai_parquet *file, const vlai_synth_options *o, const table *t, int64_t first)
{
    static uint8_t wanted[SIDE * SIDE * 3];
    for (int c = 0; c < o->camera_count; c++) {
        const vlai_parquet_column *column = vlai_parquet_find(file, o->cameras[c]);
        assert_int_equal(column != NULL, o->storage[c] == VLAI_STORE_IMAGE);
        if (!column)
            continue;
        assert_int_equal(column->type, VLAI_PARQUET_IMAGE);
        vlai_parquet_values v;
        assert_ok(vlai_parquet_read(file, column, 0, vlai_parquet_rows(file), VLAI_PARQUET_IMAGE, &v, &err), err);
        for (int64_t row = 0; row < v.rows; row++) {
            int64_t at = first + row;
            vlai_synth_scene scene;
            vlai_synth_scene_make(&o->task, t->episode[at], &scene);
            vlai_synth_draw(&o->task, &scene, c, t->frame[at], wanted);
            vlai_image image = {0};
            assert_ok(vlai_image_read(v.bytes[row].data, v.bytes[row].size, "cell", &image, &err), err);
            assert_int_equal(image.width, SIDE);
            assert_int_equal(image.height, SIDE);
            assert_memory_equal(image.data, wanted, sizeof wanted);
            vlai_image_fini(&image);
            char name[32];
            snprintf(name, sizeof name, o->version == VLAI_SET_V30 ? "frame-%06lld.png" : "frame_%06lld.png",
                     (long long)t->frame[at]);
            assert_int_equal(v.paths[row].size, strlen(name));
            assert_memory_equal(v.paths[row].data, name, strlen(name));
        }
        vlai_parquet_values_fini(&v);
    }
}

static void read_file(const char *path, const vlai_synth_options *o, table *t)
{
    vlai_parquet *file;
    assert_ok(vlai_parquet_open(path, &file, &err), err);
    int64_t n = t->rows;
    assert_true(n + vlai_parquet_rows(file) <= MOST_FRAMES);
    read_column(file, "observation.state", VLAI_PARQUET_F32, 8, t->state + n * 8, 4);
    read_column(file, "action", VLAI_PARQUET_F32, 7, t->action + n * 7, 4);
    read_column(file, "timestamp", VLAI_PARQUET_F32, 1, t->timestamp + n, 4);
    read_column(file, "frame_index", VLAI_PARQUET_I64, 1, t->frame + n, 8);
    read_column(file, "episode_index", VLAI_PARQUET_I64, 1, t->episode + n, 8);
    read_column(file, "index", VLAI_PARQUET_I64, 1, t->index + n, 8);
    read_column(file, "task_index", VLAI_PARQUET_I64, 1, t->task + n, 8);
    check_images(file, o, t, n);
    /* One row group per episode. */
    for (int g = 0; g < vlai_parquet_group_count(file); g++) {
        int64_t low, high;
        assert_true(vlai_parquet_group_range(file, g, vlai_parquet_find(file, "episode_index"), &low, &high));
        assert_int_equal(low, high);
    }
    t->rows += vlai_parquet_rows(file);
    t->files++;
    vlai_parquet_close(file);
}

static void read_data(const char *set, const vlai_synth_options *o, table *t)
{
    memset(t, 0, sizeof *t);
    char dir[PATH], sub[PATH], path[PATH], **chunks, **names;
    size_t chunk_count, count;
    in_set(dir, set, "data");
    assert_ok(vlai_list_dir(dir, &chunks, &chunk_count, &err), err);
    for (size_t c = 0; c < chunk_count; c++) {
        in_set(sub, dir, "%s", chunks[c]);
        assert_ok(vlai_list_dir(sub, &names, &count, &err), err);
        assert_true(count <= (size_t)o->chunks_size);
        for (size_t i = 0; i < count; i++) {
            in_set(path, sub, "%s", names[i]);
            read_file(path, o, t);
        }
        vlai_names_free(names, count);
    }
    vlai_names_free(chunks, chunk_count);
}

static void check_rows(const vlai_synth_options *o, const table *t)
{
    int64_t row = 0;
    for (int64_t e = 0; e < o->episodes; e++) {
        vlai_synth_scene scene;
        vlai_synth_scene_make(&o->task, e, &scene);
        assert_in_range(scene.length, 6, 9);
        for (int64_t k = 0; k < scene.length; k++, row++) {
            float state[8], action[7];
            vlai_synth_frame(&o->task, &scene, k, state, action);
            assert_memory_equal(t->state + row * 8, state, sizeof state);
            assert_memory_equal(t->action + row * 7, action, sizeof action);
            assert_int_equal(t->frame[row], k);
            assert_int_equal(t->episode[row], e);
            assert_int_equal(t->index[row], row);
            assert_true(t->timestamp[row] == (float)((double)k / o->fps));
        }
    }
    assert_int_equal(row, t->rows);
}

/* The text of every episode is what its scene says, through the tasks table. */
static void check_texts(const char *set, const vlai_synth_options *o, const table *t)
{
    char path[PATH], texts[16][64];
    size_t count = 0;
    if (o->version == VLAI_SET_V30) {
        vlai_parquet *file;
        in_set(path, set, "meta/tasks.parquet");
        assert_ok(vlai_parquet_open(path, &file, &err), err);
        vlai_parquet_values v;
        assert_ok(vlai_parquet_read(file, vlai_parquet_find(file, "task"), 0, vlai_parquet_rows(file), VLAI_PARQUET_TEXT, &v,
                                    &err), err);
        for (; count < (size_t)v.rows; count++)
            snprintf(texts[count], sizeof texts[count], "%.*s", (int)v.bytes[count].size, (const char *)v.bytes[count].data);
        vlai_parquet_values_fini(&v);
        assert_non_null(strstr(vlai_parquet_metadata(file, "pandas"), "\"index_columns\": [\"task\"]"));
        vlai_parquet_close(file);
    } else {
        char *data;
        in_set(path, set, "meta/tasks.jsonl");
        assert_ok(vlai_read_file(path, 0, &data, NULL, &err), err);
        for (char *line = strtok(data, "\n"); line; line = strtok(NULL, "\n"), count++) {
            json_t *object;
            assert_ok(vlai_json_parse(line, strlen(line), path, &object, &err), err);
            assert_int_equal(json_integer_value(json_object_get(object, "task_index")), count);
            snprintf(texts[count], sizeof texts[count], "%s", json_string_value(json_object_get(object, "task")));
            json_decref(object);
        }
        vlai_free(data);
    }
    for (int64_t row = 0; row < t->rows; row++) {
        vlai_synth_scene scene;
        vlai_synth_scene_make(&o->task, t->episode[row], &scene);
        assert_in_range(t->task[row], 0, count - 1);
        assert_string_equal(texts[t->task[row]], vlai_synth_text(scene.meant, scene.phrasing));
    }
}

/* Brightness of stamp block b in a decoded picture. */
static int block(const uint8_t *rgb, int b)
{
    int x = b % 8 * SIDE / 8 + SIDE / 16, y = b / 8 * SIDE / 8 + SIDE / 16;
    return rgb[(y * SIDE + x) * 3 + 1] > 127;
}

static void check_clip(const char *path, const vlai_synth_options *o, int camera, int64_t episode, int64_t base,
                       int64_t length)
{
    static uint8_t rgb[SIDE * SIDE * 3];
    vlai_clip *clip;
    vlai_decoder *decoder;
    assert_ok(vlai_clip_open(path, &clip, &err), err);
    assert_ok(vlai_decoder_create(2, &decoder, &err), err);
    assert_string_equal(vlai_clip_codec(clip), vlai_storage_names[o->storage[camera]]);
    assert_true(vlai_clip_frames(clip) >= base + length);
    if (o->version != VLAI_SET_V30)
        assert_int_equal(vlai_clip_frames(clip), length);
    assert_true(vlai_clip_gop(clip) <= o->gop);
    for (int64_t k = 0; k < length; k++) {
        vlai_frame frame;
        assert_true(fabs(vlai_clip_time(clip, base + k) - (double)(base + k) / o->fps) < 1e-9);
        assert_ok(vlai_decoder_read(decoder, clip, base + k, &frame, &err), err);
        assert_ok(vlai_decoder_rgb(decoder, &frame, rgb, &err), err);
        int64_t seen_frame = 0, seen_camera = block(rgb, 8) + 2 * block(rgb, 9), seen_episode = 0;
        for (int b = 0; b < 8; b++)
            seen_frame |= (int64_t)block(rgb, b) << b;
        for (int b = 0; b < 6; b++)
            seen_episode |= (int64_t)block(rgb, 10 + b) << b;
        assert_int_equal(seen_frame, k);
        assert_int_equal(seen_camera, camera);
        assert_int_equal(seen_episode, episode);
    }
    /* A key frame at the start of the episode: the decoder needs one packet for it. */
    int64_t before, after, opened;
    vlai_decoder *fresh;
    vlai_frame frame;
    assert_ok(vlai_decoder_create(1, &fresh, &err), err);
    vlai_decoder_counts(fresh, &before, &opened);
    assert_ok(vlai_decoder_read(fresh, clip, base, &frame, &err), err);
    vlai_decoder_counts(fresh, &after, &opened);
    assert_int_equal(after - before, 1);
    vlai_decoder_destroy(fresh);
    vlai_decoder_destroy(decoder);
    vlai_clip_close(clip);
}

static void check_videos(const char *set, const vlai_synth_options *o)
{
    char path[PATH], name[PATH];
    int64_t chunk[EPISODES], file_index[EPISODES], from_row[EPISODES], to_row[EPISODES], length[EPISODES], rows = 0;
    double from[EPISODES], to[EPISODES];
    vlai_parquet *file = NULL;
    if (o->version == VLAI_SET_V30) {
        in_set(path, set, "meta/episodes/chunk-000/file-000.parquet");
        assert_ok(vlai_parquet_open(path, &file, &err), err);
        assert_int_equal(vlai_parquet_rows(file), o->episodes);
        read_column(file, "length", VLAI_PARQUET_I64, 1, length, 8);
        read_column(file, "dataset_from_index", VLAI_PARQUET_I64, 1, from_row, 8);
        read_column(file, "dataset_to_index", VLAI_PARQUET_I64, 1, to_row, 8);
    }
    for (int c = 0; c < o->camera_count; c++) {
        if (o->storage[c] == VLAI_STORE_IMAGE)
            continue;
        if (file) {
            snprintf(name, sizeof name, "videos/%s/chunk_index", o->cameras[c]);
            read_column(file, name, VLAI_PARQUET_I64, 1, chunk, 8);
            snprintf(name, sizeof name, "videos/%s/file_index", o->cameras[c]);
            read_column(file, name, VLAI_PARQUET_I64, 1, file_index, 8);
            snprintf(name, sizeof name, "videos/%s/from_timestamp", o->cameras[c]);
            read_column(file, name, VLAI_PARQUET_F64, 1, from, 8);
            snprintf(name, sizeof name, "videos/%s/to_timestamp", o->cameras[c]);
            read_column(file, name, VLAI_PARQUET_F64, 1, to, 8);
        }
        rows = 0;
        for (int64_t e = 0; e < o->episodes; e++) {
            vlai_synth_scene scene;
            vlai_synth_scene_make(&o->task, e, &scene);
            int64_t base = 0;
            if (file) {
                base = llround(from[e] * o->fps);
                assert_int_equal(length[e], scene.length);
                assert_int_equal(from_row[e], rows);
                assert_int_equal(to_row[e], rows + scene.length);
                assert_int_equal(llround(to[e] * o->fps), base + scene.length);
                in_set(path, set, "videos/%s/chunk-%03lld/file-%03lld.mp4", o->cameras[c], (long long)chunk[e], (long long)file_index[e]);
            } else {
                in_set(path, set, "videos/chunk-%03lld/%s/episode_%06lld.mp4", (long long)(e / o->chunks_size), o->cameras[c],
                       (long long)e);
            }
            check_clip(path, o, c, e, base, scene.length);
            rows += scene.length;
        }
        if (file) /* small limits: the files did roll over, also into a second folder */
            assert_true(chunk[EPISODES - 1] > 0);
    }
    if (file)
        vlai_parquet_close(file);
}

/* Totals of info.json, and statistics of one column against a plain computation. */
static void check_meta(const char *set, const vlai_synth_options *o, const table *t)
{
    char path[PATH];
    json_t *info, *stats = NULL;
    in_set(path, set, "meta/info.json");
    assert_ok(vlai_json_load(path, &info, &err), err);
    assert_string_equal(json_string_value(json_object_get(info, "codebase_version")), vlai_set_version_names[o->version]);
    assert_int_equal(json_integer_value(json_object_get(info, "total_episodes")), o->episodes);
    assert_int_equal(json_integer_value(json_object_get(info, "total_frames")), t->rows);
    assert_int_equal(json_object_size(json_object_get(info, "features")), 2 + o->camera_count + 5);
    json_decref(info);
    const char *stored = o->version == VLAI_SET_V21 ? "meta/episodes_stats.jsonl" : "meta/stats.json";
    in_set(path, set, "%s", stored);
    int64_t rows = t->rows;
    if (o->version == VLAI_SET_V21) { /* its first line: episode 0 */
        char *data;
        assert_ok(vlai_read_file(path, 0, &data, NULL, &err), err);
        json_t *line;
        assert_ok(vlai_json_parse(data, strcspn(data, "\n"), path, &line, &err), err);
        stats = json_incref(json_object_get(line, "stats"));
        json_decref(line);
        vlai_free(data);
        for (rows = 0; t->episode[rows] == 0;)
            rows++;
    } else {
        assert_ok(vlai_json_load(path, &stats, &err), err);
    }
    double sum = 0, squares = 0, low = INFINITY, high = -INFINITY;
    for (int64_t i = 0; i < rows; i++) {
        double x = t->action[i * 7 + 2];
        sum += x;
        low = fmin(low, x);
        high = fmax(high, x);
    }
    for (int64_t i = 0; i < rows; i++)
        squares += pow(t->action[i * 7 + 2] - sum / (double)rows, 2);
    json_t *action = json_object_get(stats, "action");
#define STAT(name) json_real_value(json_array_get(json_object_get(action, name), 2))
    assert_true(STAT("min") == low);
    assert_true(STAT("max") == high);
    assert_true(fabs(STAT("mean") - sum / (double)rows) < 1e-12);
    assert_true(fabs(STAT("std") - sqrt(squares / (double)rows)) < 1e-12);
    assert_int_equal(json_object_get(action, "q50") != NULL, o->version == VLAI_SET_V30);
    assert_int_equal(json_object_get(action, "count") != NULL, o->version != VLAI_SET_V20);
    if (o->version == VLAI_SET_V30) { /* the median has as many values below as above it */
        int below = 0, above = 0;
        for (int64_t i = 0; i < rows; i++) {
            below += t->action[i * 7 + 2] < STAT("q50");
            above += t->action[i * 7 + 2] > STAT("q50");
        }
        assert_int_equal(below, above);
    }
#undef STAT
    for (int c = 0; c < o->camera_count; c++) {
        json_t *mean = json_object_get(json_object_get(stats, o->cameras[c]), "mean");
        assert_int_equal(json_array_size(mean), 3);
        double red = json_real_value(json_array_get(json_array_get(json_array_get(mean, 0), 0), 0));
        assert_true(red > 0.3 && red < 0.9);
    }
    json_decref(stats);
}

/* Runs the program; its words go to `text`. */
static int run(char text[4096], const char *arguments)
{
    char command[4 * PATH];
    snprintf(command, sizeof command, "cd '%s' && '%s' %s 2>&1", folder, VLA_TEST_PROGRAM, arguments);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t n = fread(text, 1, 4095, pipe);
    text[n] = 0;
    int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_versions_and_storages(void **state)
{
    (void)state;
    static table t;
    for (int v = 0; v < VLAI_SET_VERSIONS; v++)
        for (int s = 0; s <= VLAI_STORES; s++) {
            vlai_synth_options o = small();
            o.version = (vlai_set_version)v;
            for (int c = 0; c < o.camera_count; c++) /* the last round: one camera each of two */
                o.storage[c] = s < VLAI_STORES ? (vlai_storage)s : c ? VLAI_STORE_H264 : VLAI_STORE_AV1;
            o.data_mb = o.video_mb = 0.002; /* about an episode of video, less than one of images */
            char set[PATH];
            in_folder(set, "set-%d-%d", v, s);
            vlai_synth_summary made;
            assert_ok(vlai_synth_write(set, &o, &made, &err), err);
            assert_int_equal(made.episodes, EPISODES);
            read_data(set, &o, &t);
            assert_int_equal(made.frames, t.rows);
            assert_true(t.files > 1);
            check_rows(&o, &t);
            check_texts(set, &o, &t);
            check_videos(set, &o);
            check_meta(set, &o, &t);
            char text[4096], arguments[2 * PATH];
            snprintf(arguments, sizeof arguments, "check --full '%s'", set);
            int code = run(text, arguments);
            if (code != 0 || !strstr(text, ": 0 errors, 0 warnings"))
                fail_msg("vla %s: code %d, said '%s'", arguments, code, text);
        }
}

/* ---- the task ---- */

static void test_scenes(void **state)
{
    (void)state;
    static const uint8_t colours[3][3] = {{225, 30, 30}, {30, 175, 45}, {40, 70, 230}};
    static const char *const words[3] = {"red", "green", "blue"};
    static uint8_t rgb[SIDE * SIDE * 3];
    vlai_synth_options o = small();
    o.task.stamp = false;
    o.task.length_min = o.task.length_max = 60;
    int meant[3] = {0}, quarter[3][3] = {{0}}, hidden = 0;
    for (int64_t e = 0; e < 36; e++) {
        vlai_synth_scene scene;
        vlai_synth_scene_make(&o.task, e, &scene);
        meant[scene.meant]++;
        assert_non_null(strstr(vlai_synth_text(scene.meant, scene.phrasing), words[scene.meant]));
        for (int camera = 0; camera < 8; camera++) {
            vlai_synth_draw(&o.task, &scene, camera, 0, rgb);
            for (int c = 0; c < 3; c++) {
                double at[2];
                vlai_synth_view(camera, scene.goal[c], at);
                const uint8_t *pixel = rgb + ((int)(at[1] * SIDE) * SIDE + (int)(at[0] * SIDE)) * 3;
                assert_int_equal(memcmp(pixel, colours[c], 3) == 0, scene.shown[c]);
            }
        }
        assert_true(scene.shown[scene.meant]);
        int shown = scene.shown[0] + scene.shown[1] + scene.shown[2];
        assert_true(shown == 2 || shown == 3);
        hidden += shown == 2;
        for (int c = 0; c < 3; c++)
            quarter[c][(scene.goal[c][0] > 0.5) + 2 * (scene.goal[c][1] > 0.5)]++;
        /* The motion ends at the goal that is meant, and each step is a fifth of its action. */
        float now[8], next[8], action[7], unused[7];
        vlai_synth_frame(&o.task, &scene, 59, now, action);
        assert_true(fabs(now[0] - (2 * scene.goal[scene.meant][0] - 1)) < 0.01);
        assert_true(fabs(now[1] - (1 - 2 * scene.goal[scene.meant][1])) < 0.01);
        vlai_synth_frame(&o.task, &scene, 4, now, action);
        vlai_synth_frame(&o.task, &scene, 5, next, unused);
        for (int j = 0; j < 6; j++)
            assert_true(fabs(next[j] - (now[j] + action[j] / 5)) < 1e-6);
        assert_true(fabs(action[6] - (1 - 2 * now[6] / 0.04)) < 1e-5);
    }
    assert_in_range(hidden, 9, 27); /* of 36, each with probability 1/2: the mean and three standard deviations */
    for (int c = 0; c < 3; c++) {
        assert_int_equal(meant[c], 12);
        for (int q = 0; q < 3; q++)
            assert_int_equal(quarter[c][q], 12); /* each colour in each place equally often: no short cut */
    }
}

/* A state without room for fingers still determines the action: the gripper moves as joint 0 does. */
static void test_narrow_state(void **state)
{
    (void)state;
    vlai_synth_options o = small();
    o.task.state_dim = 2;
    o.task.action_dim = 5;
    vlai_synth_scene scene;
    vlai_synth_scene_make(&o.task, 1, &scene);
    float seen[2], action[5];
    vlai_synth_frame(&o.task, &scene, 3, seen, action);
    assert_true(action[4] == action[0] && action[0] != action[1]);
    for (int j = 2; j < 4; j++) /* joints are functions of the effector's place */
        assert_true(fabs(action[j] - 0.7 * (action[0] * cos(2.0 * j) + action[1] * sin(2.0 * j))) < 1e-6);
}

/* ---- equal bytes ---- */

static void hash_tree(const char *path, uint64_t *hash)
{
    char **names, child[PATH];
    size_t count;
    assert_ok(vlai_list_dir(path, &names, &count, &err), err);
    for (size_t i = 0; i < count; i++) {
        for (const char *c = names[i]; *c; c++)
            *hash = (*hash ^ (uint8_t)*c) * 0x100000001b3u;
        in_set(child, path, "%s", names[i]);
        if (vlai_is_dir(child)) {
            hash_tree(child, hash);
            continue;
        }
        char *data;
        size_t size;
        assert_ok(vlai_read_file(child, 0, &data, &size, &err), err);
        for (size_t k = 0; k < size; k++)
            *hash = (*hash ^ (uint8_t)data[k]) * 0x100000001b3u;
        vlai_free(data);
    }
    vlai_names_free(names, count);
}

static uint64_t hash_set(const char *name, const vlai_synth_options *o)
{
    char set[PATH];
    uint64_t hash = 0xcbf29ce484222325u;
    assert_ok(vlai_synth_write(in_folder(set, "%s", name), o, NULL, &err), err);
    hash_tree(set, &hash);
    return hash;
}

static void test_equal_bytes(void **state)
{
    (void)state;
    for (int v = VLAI_SET_V21; v <= VLAI_SET_V30; v++) {
        vlai_synth_options o = small();
        o.version = (vlai_set_version)v;
        o.storage[1] = VLAI_STORE_H264;
        o.task.noise = 9;
        char name[64];
        uint64_t hashes[3];
        for (int i = 0; i < 3; i++) {
            snprintf(name, sizeof name, "same-%d-%d", v, i);
            o.threads = i == 1 ? 1 : 3;
            o.task.seed = i == 2 ? 4 : 3;
            hashes[i] = hash_set(name, &o);
        }
        assert_true(hashes[0] == hashes[1]);
        assert_true(hashes[0] != hashes[2]);
    }
}

/* ---- what goes wrong ---- */

static size_t entries(void)
{
    char **names;
    size_t count;
    assert_ok(vlai_list_dir(folder, &names, &count, &err), err);
    vlai_names_free(names, count);
    return count;
}

static void test_existing_target(void **state)
{
    (void)state;
    char set[PATH];
    vlai_synth_options o = small();
    assert_ok(vlai_mkdirs(in_folder(set, "there"), &err), err);
    size_t before = entries();
    assert_fails(vlai_synth_write(set, &o, NULL, &err), VLA_E_INVALID, err, "exists already");
    char **names;
    size_t count;
    assert_ok(vlai_list_dir(set, &names, &count, &err), err);
    assert_int_equal(count, 0);
    vlai_names_free(names, count);
    assert_int_equal(entries(), before);
}

static vlai_synth_options tiny(int version)
{
    vlai_synth_options o = small();
    o.version = (vlai_set_version)version;
    o.episodes = 2;
    o.task.length_min = o.task.length_max = 2;
    o.storage[0] = VLAI_STORE_H264;
    o.storage[1] = VLAI_STORE_IMAGE;
    o.threads = 1;
    o.data_mb = 0.001;
    return o;
}

/* Whichever write fails: an error, and nothing left. */
static void test_failed_writes(void **state)
{
    (void)state;
    for (int v = 0; v < VLAI_SET_VERSIONS; v++) {
        vlai_synth_options o = tiny(v);
        char set[PATH];
        in_folder(set, "unlucky-%d", v);
        size_t before = entries();
        int failures = 0;
        for (uint64_t n = 1;; n++, failures++) {
            vlai_io_fail_nth(n);
            vla_status status = vlai_synth_write(set, &o, NULL, &err);
            vlai_io_fail_nth(0);
            if (status == VLA_OK)
                break;
            assert_int_equal(status, VLA_E_IO);
            assert_true(strlen(err.message) > 0);
            assert_int_equal(entries(), before);
        }
        assert_true(failures > 20);
        assert_int_equal(entries(), before + 1);
    }
}

static atomic_uint_fast64_t until_failure;

static void *failing_alloc(size_t size, size_t align, void *user)
{
    (void)user;
    void *p = NULL;
    if (atomic_load(&until_failure) && atomic_fetch_sub(&until_failure, 1) == 1)
        return NULL;
    return posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, size ? size : 1) ? NULL : p;
}

static void failing_release(void *p, void *user)
{
    (void)user;
    free(p);
}

/* Whichever allocation fails: the same. Every one of the first 40, then in growing steps. */
static void test_failed_allocations(void **state)
{
    (void)state;
    const vla_allocator allocator = {failing_alloc, failing_release, NULL};
    vla_allocator_set(&allocator);
    for (int v = 0; v < VLAI_SET_VERSIONS; v++) {
        vlai_synth_options o = tiny(v);
        char set[PATH];
        in_folder(set, "starved-%d", v);
        size_t before = entries();
        int failures = 0;
        for (uint64_t n = 1;; n += n < 40 ? 1 : n / 20, failures++) {
            atomic_store(&until_failure, n);
            vla_status status = vlai_synth_write(set, &o, NULL, &err);
            uint64_t left = atomic_exchange(&until_failure, 0);
            if (status == VLA_OK && left > 0)
                break;
            /* libav reports a failed callback of ours as its own I/O error. */
            if (status != VLA_E_NOMEM && status != VLA_E_IO)
                fail_msg("allocation %d: %s (%s)", (int)n, vla_status_name(status), err.message);
            assert_int_equal(entries(), before);
        }
        assert_true(failures > 40);
    }
    vla_allocator_set(NULL);
}

static void test_program(void **state)
{
    (void)state;
    static const struct {
        const char *arguments, *words;
    } wrong[] = {
        {"x --episodes 0", "--episodes: 0, wanted 1"},
        {"x --episodes many", "--episodes: 'many' is not a whole number"},
        {"x --length 9:5", "--length: 5, wanted 9"},
        {"x --length 9-5", "--length: '9-5'"},
        {"x --size 64", "--size: '64'"},
        {"x --size 32x32", "libsvtav1 takes sides of 64"},
        {"x --size 65x64 --storage h264", "65x64: both sides must be even"},
        {"x --version v4.0", "--version: 'v4.0' is not v3.0, v2.1 or v2.0"},
        {"x --storage av1,h264,image", "3 given for 2 cameras"},
        {"x --storage mpeg", "--storage: 'mpeg' is not av1, h264 or image"},
        {"x --cameras a,a", "'a' is named twice"},
        {"x --cameras a/b", "'a/b' cannot name a feature"},
        {"x --cameras timestamp", "'timestamp' is a feature that every dataset has"},
        {"x --cameras action", "'action' is the key of a vector already"},
        {"x --cameras a,b,c,d,e,f,g,h,i", "--cameras: 9, wanted 0 to 8"},
        {"x --state-dim 65", "--state-dim: 65, wanted 1 to 64"},
        {"x --state-key action", "'action' is the state's key already"},
        {"x --data-mb 0", "--data-mb: 0"},
        {"x --cameras none --gop 0", "--gop: 0, wanted 1 to 100000"},
        {"x --cameras none --preset 14", "--preset: 14, wanted 0 to 13"},
        {"x --threads 4097", "--threads: 4097, wanted 0 to 4096"},
        {"x --threads -1", "--threads: -1, wanted 0 to 4096"},
        {"x --robot=", "--robot: '', wanted a name"},
        {"x --robot \xff", "--robot: '\xff', wanted a name of 1 to 200 bytes of UTF-8"},
        {"x --cameras \xff", "cannot name a feature: wanted 1 to 200 bytes of UTF-8"},
        {"x --stamp=yes", "--stamp takes no value, and 'yes' was given"},
        {"x --jitter 0.2", "--jitter: 0.2, wanted 0 to 0.1"},
        {"x --crf 64", "--crf: 64, wanted 0 to 63"},
        {"x --crf 52 --storage h264", "crf 52: libx264 takes 0 to 51"},
        {"x --episode 5", "did you mean '--episodes'?"},
        {"x --episodes", "--episodes needs a value"},
        {"x y", "wanted one folder"},
        {"--episodes 3", "no folder to write to"},
        {"there", "there: exists already"},
    };
    char text[4096], set[PATH];
    assert_ok(vlai_mkdirs(in_folder(set, "there"), &err), err);
    size_t before = entries();
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char arguments[PATH];
        snprintf(arguments, sizeof arguments, "synth %s", wrong[i].arguments);
        int code = run(text, arguments);
        if (code != 2 || !strstr(text, wrong[i].words))
            fail_msg("vla synth %s: code %d, said '%s', wanted '%s'", wrong[i].arguments, code, text, wrong[i].words);
        assert_int_equal(entries(), before);
    }
    assert_int_equal(run(text, "synth good --episodes 2 --length 3 --cameras front --size 16x24 --storage image --state-dim 3 "
                               "--action-dim 4 --robot arm --seed 7"), 0);
    assert_non_null(strstr(text, "good: LeRobot v3.0, 2 episodes, 6 frames, 1 cameras"));
    json_t *info;
    assert_ok(vlai_json_load(in_folder(set, "good/meta/info.json"), &info, &err), err);
    assert_string_equal(json_string_value(json_object_get(info, "robot_type")), "arm");
    assert_true(json_is_null(json_object_get(info, "video_path")));
    json_decref(info);
    assert_int_equal(run(text, "synth numbers --episodes 3 --length 4 --cameras none --version v2.1"), 0);
    assert_int_equal(run(text, "synth --help"), 0);
    assert_non_null(strstr(text, "Examples:"));
}

static bool exists(const char *name)
{
    char path[PATH];
    return vlai_is_dir(in_folder(path, "%s", name));
}

/* What a killed process leaves goes with the next one to the same folder; what belongs to a living one, here or on another machine,
 * stays, and so does what only looks alike. */
static void test_leftovers(void **state)
{
    (void)state;
    char text[4096], path[PATH], killed[80], of_living[64], of_elsewhere[64];
    pid_t writer = fork();
    if (writer == 0) {
        if (chdir(folder) == 0)
            execl(VLA_TEST_PROGRAM, "vla", "synth", "cut", "--episodes", "100000", "--cameras", "none", (char *)NULL);
        _exit(127);
    }
    snprintf(killed, sizeof killed, "cut.tmp-%ld", (long)writer);
    for (int i = 0; i < 30000 && !exists(killed); i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    snprintf(of_living, sizeof of_living, "cut.tmp-%ld", (long)getpid());
    assert_true(exists(killed));
    /* The living one's is spared by any other that begins. */
    assert_int_equal(run(text, "synth cut --episodes 1 --cameras none"), 0);
    assert_true(exists(killed));
    assert_ok(vlai_remove_tree(in_folder(path, "cut"), &err), err);
    kill(writer, SIGKILL);
    assert_int_equal(waitpid(writer, NULL, 0), writer);
    assert_true(exists(killed));

    pid_t gone = fork();
    if (gone == 0)
        _exit(0);
    assert_int_equal(waitpid(gone, NULL, 0), gone);
    snprintf(of_elsewhere, sizeof of_elsewhere, "cut.tmp-%ld", (long)gone);
    const char *const kept[] = {of_living, of_elsewhere, "cut.tmp-", "cut.tmp-1x", "cut.tmp--1", "cut.tmp-99999999999999999999", "acut.tmp-999999999"};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        assert_ok(vlai_mkdirs(in_folder(path, "%s", kept[i]), &err), err);
    int lock;
    assert_ok(vlai_lock_dir(in_folder(path, "%s", of_elsewhere), NULL, &lock, &err), err);
    assert_int_equal(run(text, "synth cut --episodes 1 --cameras none"), 0);
    assert_false(exists(killed));
    char line[256];
    snprintf(line, sizeof line, "vla: ./%s, which a process that is gone had left, was removed\n", killed);
    assert_non_null(strstr(text, line));
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        if (!exists(kept[i]))
            fail_msg("%s was removed", kept[i]);
    vlai_unlock_dir(lock);
    assert_ok(vlai_remove_tree(in_folder(path, "cut"), &err), err);
    assert_int_equal(run(text, "init cut --preset demo --hidden 32 --layers 2 --intermediate 48 --action-hidden 16 --action-intermediate 24 "
                               "--vision-hidden 32 --vision-intermediate 48"), 0);
    assert_false(exists(of_elsewhere)); /* now nobody holds it */
    assert_true(exists(of_living));

    /* Another container's process has the number of this one. */
    vlai_synth_options o = VLAI_SYNTH_DEFAULT;
    o.episodes = 1;
    o.camera_count = 0;
    snprintf(killed, sizeof killed, "%s/theirs", of_living);
    assert_ok(vlai_remove_tree(in_folder(path, "cut"), &err), err);
    assert_ok(vlai_mkdirs(in_folder(path, "%s", killed), &err), err);
    assert_ok(vlai_lock_dir(in_folder(path, "%s", of_living), NULL, &lock, &err), err);
    assert_int_equal(vlai_synth_write(in_folder(path, "cut"), &o, NULL, &err), VLA_E_INVALID);
    assert_non_null(strstr(err.message, "in use by another process"));
    assert_true(exists(killed));
    vlai_unlock_dir(lock);
    assert_ok(vlai_synth_write(in_folder(path, "cut"), &o, NULL, &err), err);
    assert_false(exists(of_living));
}

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return vlai_remove_tree(folder, &err) == VLA_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_versions_and_storages), cmocka_unit_test(test_scenes),
        cmocka_unit_test(test_narrow_state),          cmocka_unit_test(test_equal_bytes),
        cmocka_unit_test(test_existing_target),       cmocka_unit_test(test_failed_writes),
        cmocka_unit_test(test_failed_allocations),    cmocka_unit_test(test_program),
        cmocka_unit_test(test_leftovers),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
