/* The dataset reader: every whole set opens and shows in its pictures which frame they are; damaged sets are refused with
 * a sentence that helps; the sidecar cache changes nothing but the time. */
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "base/pool.h"
#include "vla/dataset.h"

#include <jansson.h>
#include <unistd.h>

static char scratch[256];

static const char *golden(const char *name)
{
    static char path[4096];
    snprintf(path, sizeof path, "%s/assets/%s", golden_dir(), name);
    return path;
}

/* The number that a picture of the golden sets carries: a row of eight blocks, white = 1, least significant first. */
static int number_in(const vla_picture *picture, int row)
{
    int number = 0;
    int64_t w = picture->width / 8, h = picture->height / 8;
    for (int bit = 0; bit < 8; bit++) {
        const uint8_t *p = picture->data + 3 * ((row * h + h / 2) * picture->width + bit * w + w / 2);
        number |= (p[1] > 128) << bit;
    }
    return number;
}

static vla_status read_all(vla_dataset *set, int check_numbers, vla_error *err)
{
    const vla_dataset_info *info = vla_dataset_info_get(set);
    const float *data;
    int64_t dim;
    for (int64_t i = 0; i < info->features; i++)
        if (vla_dataset_feature(set, i)->kind == VLA_FEATURE_NUMBER) {
            vla_status status = vla_dataset_numbers(set, vla_dataset_feature(set, i)->name, &data, &dim, err);
            if (status != VLA_OK)
                return status;
        }
    vla_frame_reader *reader;
    vla_status status = vla_frame_reader_create(set, NULL, &reader, err);
    for (int64_t c = 0; c < info->cameras && status == VLA_OK; c++)
        for (int64_t row = 0; row < info->rows && status == VLA_OK; row++) {
            vla_picture picture;
            const vla_episode *e = vla_dataset_episode(set, vla_dataset_episode_of(set, row));
            status = vla_frame_reader_read(reader, row, vla_dataset_camera(set, c), &picture, err);
            if (status != VLA_OK || !check_numbers)
                continue;
            assert_int_equal(number_in(&picture, 0), (row - e->first_row) & 255);
            assert_int_equal(number_in(&picture, 1) >> 2, e->index & 63);
        }
    if (reader)
        vla_frame_reader_destroy(reader);
    return status;
}

static void whole_sets(void **state)
{
    (void)state;
    char **roots;
    size_t count;
    vla_error err = VLA_ERROR_INIT;
    if (!vlai_is_dir(golden("datasets"))) {
        skip();
        return;
    }
    assert_ok(vla_dataset_discover(golden("datasets"), &roots, &count, &err), err);
    assert_true(count >= 5);
    for (size_t i = 0; i < count; i++) {
        vla_dataset *set;
        assert_ok(vla_dataset_open(roots[i], NULL, &set, &err), err);
        assert_int_equal(vla_dataset_info_get(set)->rows, vla_dataset_info_get(set)->total_frames);
        for (int64_t row = 0; row < vla_dataset_info_get(set)->rows; row++)
            assert_non_null(vla_dataset_task(set, row));
        assert_ok(read_all(set, 1, &err), err);
        vla_dataset_close(set);
    }
    vla_dataset_roots_free(roots, count);
}

static void damaged_sets(void **state)
{
    (void)state;
    json_t *list = json_load_file(golden("broken/expected.json"), 0, NULL), *entry;
    if (!list) {
        skip();
        return;
    }
    size_t i;
    json_array_foreach(list, i, entry) {
        const char *name = json_string_value(json_object_get(entry, "set"));
        const json_t *trainable = json_object_get(entry, "trainable");
        char path[512];
        snprintf(path, sizeof path, "broken/%s", name);
        vla_dataset *set = NULL;
        vla_error err = VLA_ERROR_INIT;
        vla_status status = vla_dataset_open(golden(path), NULL, &set, &err);
        if (status == VLA_OK)
            status = read_all(set, 0, &err);
        if (json_is_true(trainable) && status != VLA_OK)
            fail_msg("%s: refused: %s", name, err.message);
        if (json_is_false(trainable) && status == VLA_OK)
            fail_msg("%s: accepted", name);
        if (status != VLA_OK)
            assert_non_null(strstr(err.message, name));
        vla_dataset_close(set);
    }
    json_decref(list);
}

/* A copy of a golden set in the scratch folder, for damage. NULL when there is no such set here. */
static const char *copy_set(const char *name)
{
    static char root[512];
    char command[8192];
    if (!vlai_is_dir(golden(name)))
        return NULL;
    snprintf(root, sizeof root, "%s/copy", scratch);
    snprintf(command, sizeof command, "rm -rf '%s' && mkdir -p '%s' && cp -rL '%s' '%s'", root, scratch, golden(name), root);
    assert_int_equal(system(command), 0);
    return root;
}

static void overwrite(const char *root, const char *file, const char *data, size_t size)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", root, file);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fwrite(data, 1, size, f);
    fclose(f);
}

static void cut(const char *root, const char *file, double part)
{
    char path[1024], *data;
    size_t size;
    vla_error err = VLA_ERROR_INIT;
    snprintf(path, sizeof path, "%s/%s", root, file);
    assert_ok(vlai_read_file(path, 0, &data, &size, &err), err);
    assert_int_equal(truncate(path, (off_t)((double)size * part)), 0);
    vlai_free(data);
}

static void replace_text(const char *root, const char *file, const char *from, const char *to)
{
    char path[1024], *data;
    size_t size;
    vla_error err = VLA_ERROR_INIT;
    snprintf(path, sizeof path, "%s/%s", root, file);
    assert_ok(vlai_read_file(path, 0, &data, &size, &err), err);
    char *at = strstr(data, from);
    assert_non_null(at);
    FILE *f = fopen(path, "wb");
    fwrite(data, 1, (size_t)(at - data), f);
    fputs(to, f);
    fputs(at + strlen(from), f);
    fclose(f);
    vlai_free(data);
}

static const char wrist[] = "videos/observation.images.wrist_image/chunk-000/file-000.mp4";
static const char rows[] = "data/chunk-000/file-000.parquet";

static void version_4(const char *root)
{
    replace_text(root, "meta/info.json", "\"v3.0\"", "\"v4.0\"");
}

static void pointer(const char *root)
{
    static const char text[] = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n";
    overwrite(root, wrist, text, sizeof text - 1);
}

static void no_footer(const char *root)
{
    cut(root, rows, 0.7);
}

static void no_video(const char *root)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", root, wrist);
    assert_int_equal(unlink(path), 0);
}

static void short_video(const char *root)
{
    cut(root, wrist, 0.6);
}

static void other_rate(const char *root)
{
    replace_text(root, "meta/info.json", "\"fps\": 10", "\"fps\": 20");
}

static void outside(const char *root)
{
    replace_text(root, "meta/info.json", "\"data/chunk", "\"../data/chunk");
}

static void nested(const char *root)
{
    char *text = malloc(200000);
    memset(text, '[', 200000);
    overwrite(root, "meta/info.json", text, 200000);
    free(text);
}

static void endless(const char *root)
{
    replace_text(root, "meta/info.json", "\"total_frames\": 122", "\"total_frames\": 9223372036854775807");
}

/* What a user must be told, in the cases that happen every day. */
static void sentences(void **state)
{
    (void)state;
    static const struct {
        void (*damage)(const char *root);
        const char *parts[4];
    } cases[] = {
        {version_4, {"v4.0", "v2.0, v2.1 and v3.0", "meta/info.json", "update vla"}},
        {pointer, {"Git-LFS pointer", "wrist_image", "git lfs pull", "0 of 5 episodes"}},
        {no_footer, {"no PAR1 at the end", "bytes", "footer is missing", rows}},
        {no_video, {"cannot open", "camera observation.images.wrist_image", "5 episodes", "0 of 5 episodes"}},
        {short_video, {"truncated", "past the end of the file", "fetch the file again", wrist}},
        {other_rate, {"20 frames a second", "has 10", "mp4", NULL}},
        {outside, {"data_path", "leads out of the dataset", NULL}},
        {nested, {"meta/info.json", "not valid JSON", NULL}},
        {endless, {"total_frames is 9223372036854775807", "122", NULL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *root = copy_set("datasets/v30-av1");
        if (!root) {
            skip();
            return;
        }
        cases[i].damage(root);
        vla_dataset *set;
        vla_error err = VLA_ERROR_INIT;
        assert_int_not_equal(vla_dataset_open(root, NULL, &set, &err), VLA_OK);
        assert_null(set);
        for (int k = 0; k < 4 && cases[i].parts[k]; k++)
            if (!strstr(err.message, cases[i].parts[k]) && !strstr(err.hint, cases[i].parts[k]))
                fail_msg("case %zu: '%s' / '%s' lacks '%s'", i, err.message, err.hint, cases[i].parts[k]);
    }
    vla_dataset *set;
    vla_error err = VLA_ERROR_INIT;
    const vla_feature *camera;
    assert_ok(vla_dataset_open(golden("datasets/v30-av1"), NULL, &set, &err), err);
    assert_fails(vla_dataset_need_camera(set, "observation.images.faceImg", &camera, &err), VLA_E_NOT_FOUND, err,
                 "'observation.images.image', 'observation.images.wrist_image'");
    const float *data;
    int64_t dim;
    assert_fails(vla_dataset_numbers(set, "observation.stat", &data, &dim, &err), VLA_E_NOT_FOUND, err,
                 "did you mean 'observation.state'");
    vla_dataset_close(set);
}

static void prepend(const char *root, const char *file, const char *mark)
{
    char path[1024], *data;
    size_t size;
    vla_error err = VLA_ERROR_INIT;
    snprintf(path, sizeof path, "%s/%s", root, file);
    assert_ok(vlai_read_file(path, 0, &data, &size, &err), err);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(mark, 1, strlen(mark), f), strlen(mark));
    assert_int_equal(fwrite(data, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
    vlai_free(data);
}

/* As the reference's readers: jsonlines takes a byte-order mark before a line, json refuses it, here by its name. */
static void byte_order_mark(void **state)
{
    (void)state;
    const char *root = copy_set("datasets/v20-av1");
    if (!root) {
        skip();
        return;
    }
    prepend(root, "meta/tasks.jsonl", "\xef\xbb\xbf");
    prepend(root, "meta/episodes.jsonl", "\n\xef\xbb\xbf");
    vla_dataset *set, *plain;
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vla_dataset_open(root, NULL, &set, &err), err);
    assert_ok(vla_dataset_open(golden("datasets/v20-av1"), NULL, &plain, &err), err);
    assert_int_equal(vla_dataset_info_get(set)->episodes, vla_dataset_info_get(plain)->episodes);
    assert_int_equal(vla_dataset_info_get(set)->rows, vla_dataset_info_get(plain)->rows);
    assert_string_equal(vla_dataset_task(set, 0), vla_dataset_task(plain, 0));
    vla_dataset_close(plain);
    vla_dataset_close(set);
    prepend(root, "meta/tasks.jsonl", "\xef\xbb\xbf"); /* one is left out, a second is no JSON */
    assert_fails(vla_dataset_open(root, NULL, &set, &err), VLA_E_FORMAT, err, "tasks.jsonl");
    root = copy_set("datasets/v20-av1");
    prepend(root, "meta/info.json", "\xef\xbb\xbf");
    assert_fails(vla_dataset_open(root, NULL, &set, &err), VLA_E_FORMAT, err, "byte-order mark (EF BB BF)");
    assert_non_null(strstr(err.message, "meta/info.json"));
    assert_non_null(strstr(err.hint, "sed -i"));
}

/* An incomplete download: refused with the number of whole episodes, opened as far as it is whole when asked to. */
static void partial(void **state)
{
    (void)state;
    const char *root = copy_set("datasets/v20-av1");
    if (!root) {
        skip();
        return;
    }
    char path[1024];
    snprintf(path, sizeof path, "%s/data/chunk-000/episode_000002.parquet", root);
    assert_int_equal(unlink(path), 0);
    vla_dataset_options options = VLA_DATASET_OPTIONS_DEFAULT;
    vla_dataset *set;
    vla_error err = VLA_ERROR_INIT;
    assert_fails(vla_dataset_open(root, NULL, &set, &err), VLA_E_NOT_FOUND, err, "2 of 4 episodes");
    assert_non_null(strstr(err.message, "episode_000002.parquet"));
    assert_non_null(strstr(err.hint, "--allow-partial"));
    options.flags = VLA_DATASET_ALLOW_PARTIAL;
    assert_ok(vla_dataset_open(root, &options, &set, &err), err);
    assert_int_equal(vla_dataset_info_get(set)->episodes, 2);
    assert_int_equal(vla_dataset_info_get(set)->rows, 12 + 21);
    assert_ok(read_all(set, 1, &err), err);
    vla_dataset_close(set);
    snprintf(path, sizeof path, "videos/chunk-000/observation.images.image/episode_000000.mp4");
    cut(root, path, 0.5); /* the index stands at the end of these files */
    assert_fails(vla_dataset_open(root, &options, &set, &err), VLA_E_NOT_FOUND, err, "0 of 4 episodes");
}

static void chosen_episodes(void **state)
{
    (void)state;
    if (!vlai_is_dir(golden("datasets"))) {
        skip();
        return;
    }
    static const int64_t list[] = {3, 0, 3}, beyond[] = {1, 5};
    vla_dataset_options options = VLA_DATASET_OPTIONS_DEFAULT;
    options.episodes = list;
    options.episode_count = 3;
    vla_dataset *set;
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vla_dataset_open(golden("datasets/v30-av1"), &options, &set, &err), err);
    assert_int_equal(vla_dataset_info_get(set)->episodes, 2);
    assert_int_equal(vla_dataset_episode(set, 0)->index, 0); /* file order */
    assert_int_equal(vla_dataset_episode(set, 1)->index, 3);
    const int64_t *index;
    int64_t dim;
    assert_ok(vla_dataset_integers(set, "index", &index, &dim, &err), err);
    assert_int_equal(index[11], 11);
    assert_int_equal(index[12], 65); /* 12 + 20 + 33 frames before episode 3 */
    assert_int_equal(vla_dataset_episode_of(set, 12), 1);
    assert_ok(read_all(set, 1, &err), err);
    vla_dataset_close(set);
    options.episodes = beyond;
    options.episode_count = 2;
    assert_fails(vla_dataset_open(golden("datasets/v30-av1"), &options, &set, &err), VLA_E_INVALID, err, "episode 5");
    options.size = 0;
    assert_fails(vla_dataset_open(golden("datasets/v30-av1"), &options, &set, &err), VLA_E_INVALID, err, "vla_dataset_options: the member size is 0");
    options.size = sizeof options;
    options.flags = VLA_DATASET_SKIP_MISSING;
    assert_ok(vla_dataset_open(golden("datasets/v30-av1"), &options, &set, &err), err);
    assert_int_equal(vla_dataset_info_get(set)->episodes, 1);
    vla_dataset_close(set);
}

/* Many readers of one set at once, each with few decoders, in random order. */
typedef struct crowd {
    vla_dataset *set;
    vla_frame_reader *readers[4];
    int wrong[4];
} crowd;

static void read_one(void *context, int64_t tile, int thread)
{
    crowd *c = context;
    int64_t row = tile * 7919 % vla_dataset_info_get(c->set)->rows;
    const vla_episode *e = vla_dataset_episode(c->set, vla_dataset_episode_of(c->set, row));
    vla_error err = VLA_ERROR_INIT;
    vla_picture picture;
    const float *state;
    int64_t dim;
    if (vla_frame_reader_read(c->readers[thread], row, vla_dataset_camera(c->set, tile % vla_dataset_info_get(c->set)->cameras), &picture, &err) != VLA_OK ||
        number_in(&picture, 0) != ((row - e->first_row) & 255) || number_in(&picture, 1) >> 2 != e->index ||
        vla_dataset_numbers(c->set, tile % 3 ? "action" : "observation.state", &state, &dim, &err) != VLA_OK)
        c->wrong[thread]++;
}

static void many_threads(void **state)
{
    (void)state;
    static const char *const sets[] = {"datasets/v30-av1", "datasets/v20-av1", "datasets/v30-h264-30fps", "datasets/v30-image"};
    if (!vlai_is_dir(golden("datasets"))) {
        skip();
        return;
    }
    vlai_pool *pool;
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_pool_create(4, &pool, &err), err);
    for (int i = 0; i < 4; i++) {
        crowd c = {0};
        vla_frame_reader_options options = VLA_FRAME_READER_OPTIONS_DEFAULT;
        options.decoders = 2;
        assert_ok(vla_dataset_open(golden(sets[i]), NULL, &c.set, &err), err);
        for (int t = 0; t < 4; t++)
            assert_ok(vla_frame_reader_create(c.set, &options, &c.readers[t], &err), err);
        vlai_pool_run(pool, 400, read_one, &c);
        for (int t = 0; t < 4; t++) {
            assert_int_equal(c.wrong[t], 0);
            vla_frame_reader_destroy(c.readers[t]);
        }
        vla_dataset_close(c.set);
    }
    vlai_pool_destroy(pool);
}

/* Any allocation may fail: an error each time, and in the end success. */
static uint64_t fail_at, counted;

static void *failing_alloc(size_t size, size_t align, void *user)
{
    (void)user;
    void *ptr = NULL;
    if (++counted == fail_at)
        return NULL;
    return posix_memalign(&ptr, align < sizeof(void *) ? sizeof(void *) : align, size ? size : 1) ? NULL : ptr;
}

static void plain_release(void *ptr, void *user)
{
    (void)user;
    free(ptr);
}

static void failing_allocations(void **state)
{
    (void)state;
    static const char *const sets[] = {"datasets/v30-av1", "datasets/v21-image"};
    if (!vlai_is_dir(golden("datasets"))) {
        skip();
        return;
    }
    const vla_allocator allocator = {failing_alloc, plain_release, NULL};
    vla_allocator_set(&allocator);
    for (int s = 0; s < 2; s++)
        for (uint64_t n = 1;; n += n < 400 ? 1 : 17) {
            vla_error err = VLA_ERROR_INIT;
            vla_dataset *set = NULL;
            vla_dataset_options options = VLA_DATASET_OPTIONS_DEFAULT;
            options.flags = VLA_DATASET_NO_CACHE;
            fail_at = n;
            counted = 0;
            vla_status status = vla_dataset_open(golden(sets[s]), &options, &set, &err);
            if (status == VLA_OK) {
                const float *data;
                int64_t dim;
                status = vla_dataset_numbers(set, vla_dataset_feature(set, 0)->kind == VLA_FEATURE_NUMBER
                                                      ? vla_dataset_feature(set, 0)->name
                                                      : "timestamp",
                                             &data, &dim, &err);
                vla_frame_reader *reader = NULL;
                vla_picture picture;
                if (status == VLA_OK)
                    status = vla_frame_reader_create(set, NULL, &reader, &err);
                if (status == VLA_OK)
                    status = vla_frame_reader_read(reader, 3, vla_dataset_camera(set, 0), &picture, &err);
                vla_frame_reader_destroy(reader);
            }
            vla_dataset_close(set);
            if (counted < n) {
                assert_int_equal(status, VLA_OK);
                break;
            }
            /* A failed allocation may be absorbed where the result is only a comfort; else it is named. */
            if (status != VLA_OK && status != VLA_E_NOMEM)
                fail_msg("%s, allocation %llu: %s: %s", sets[s], (unsigned long long)n, vla_status_name(status), err.message);
        }
    vla_allocator_set(NULL);
}

/* A set of many files through the sidecar: the same answers, digest included, and nothing written into the set. */
static void sidecar(void **state)
{
    (void)state;
    if (!vlai_is_dir(golden("datasets"))) {
        skip();
        return;
    }
    char root[512], cache[512], command[2048];
    snprintf(root, sizeof root, "%s/set", scratch);
    snprintf(cache, sizeof cache, "%s/cache", scratch);
    snprintf(command, sizeof command, "'%s' synth '%s' --version v2.1 --episodes 20 --length 8 --size 32x32 --storage image >/dev/null 2>&1",
             VLA_TEST_PROGRAM, root);
    if (system(command) != 0 || !vlai_is_dir(root)) {
        skip();
        return;
    }
    vla_dataset_options options = VLA_DATASET_OPTIONS_DEFAULT;
    options.cache_dir = cache;
    char digest[33] = "";
    float first = 0;
    for (int pass = 0; pass < 2; pass++) {
        vla_dataset *set;
        vla_error err = VLA_ERROR_INIT;
        assert_ok(vla_dataset_open(root, &options, &set, &err), err);
        const float *data;
        int64_t dim;
        assert_ok(vla_dataset_numbers(set, "observation.state", &data, &dim, &err), err);
        assert_true(vlai_is_dir(cache));
        if (pass == 0) {
            snprintf(digest, sizeof digest, "%s", vla_dataset_info_get(set)->digest);
            first = data[dim];
        }
        assert_string_equal(vla_dataset_info_get(set)->digest, digest);
        assert_float_equal(data[dim], first, 0);
        vla_dataset_close(set);
    }
    /* A sidecar that cannot be written, at any place, is only missing: the set opens the same, and once more after it. */
    uint64_t writes = 0;
    for (uint64_t n = 1;; n++) {
        vla_error err = VLA_ERROR_INIT;
        assert_ok(vlai_remove_tree(cache, &err), err);
        for (int pass = 0; pass < 2; pass++) {
            vla_dataset *set;
            const float *data;
            int64_t dim;
            vlai_io_fail_nth(pass ? 0 : n);
            assert_ok(vla_dataset_open(root, &options, &set, &err), err);
            assert_ok(vla_dataset_numbers(set, "observation.state", &data, &dim, &err), err);
            writes = pass ? writes : vlai_io_fail_nth(0);
            assert_string_equal(vla_dataset_info_get(set)->digest, digest);
            assert_float_equal(data[dim], first, 0);
            vla_dataset_close(set);
        }
        if (writes < n) {
            assert_true(n > 4); /* two files of several writes each */
            break;
        }
    }
}

static int remove_scratch(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    return vlai_remove_tree(scratch, &err) != VLA_OK;
}

int main(void)
{
    snprintf(scratch, sizeof scratch, "/tmp/vla-test-dataset-%d", (int)getpid());
    setenv("VLA_CACHE_DIR", scratch, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_sets),      cmocka_unit_test(damaged_sets),        cmocka_unit_test(sentences),
        cmocka_unit_test(byte_order_mark),
        cmocka_unit_test(partial),         cmocka_unit_test(chosen_episodes),     cmocka_unit_test(failing_allocations),
        cmocka_unit_test(many_threads),
        cmocka_unit_test(sidecar),
    };
    return cmocka_run_group_tests(tests, NULL, remove_scratch);
}
