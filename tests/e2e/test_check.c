/* vla check against the list of damaged sets: each fault is reported as the list says, and no whole set gets an error. */
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "data/finding.h"
#include "format/image.h"
#include "vla/dataset.h"

#include <jansson.h>
#include <sys/wait.h>
#include <unistd.h>

/* Runs the validator; its findings as an array, its exit code in *code. */
static json_t *check(const char *arguments, const char *dir, int *code)
{
    char command[4096];
    snprintf(command, sizeof command, "'%s' check --json %s '%s'", VLA_TEST_PROGRAM, arguments, dir);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    json_t *findings = json_array();
    char line[8192];
    while (fgets(line, sizeof line, pipe)) {
        json_t *finding = json_loads(line, 0, NULL);
        if (!finding)
            fail_msg("%s printed a line that is not JSON: %s", command, line);
        json_array_append_new(findings, finding);
    }
    int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    *code = WEXITSTATUS(status);
    return findings;
}

static const char *text(const json_t *object, const char *key)
{
    const char *value = json_string_value(json_object_get(object, key));
    return value ? value : "";
}

/* Every field of the expected finding but the prose stands in the found one with the same value. */
static int matches(const json_t *wanted, const json_t *finding)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)wanted, key, value)
        if (strcmp(key, "detail") && strcmp(key, "only_with_config") && !json_equal(value, json_object_get(finding, key)))
            return 0;
    return 1;
}

static int64_t errors_in(const json_t *findings)
{
    int64_t errors = 0;
    size_t i;
    json_t *finding;
    json_array_foreach((json_t *)findings, i, finding)
        errors += !strcmp(text(finding, "level"), "E");
    return errors;
}

static void broken_sets(void **state)
{
    (void)state;
    char path[4096];
    snprintf(path, sizeof path, "%s/assets/broken/expected.json", golden_dir());
    json_t *list = json_load_file(path, 0, NULL), *entry;
    if (!list) {
        skip();
        return;
    }
    assert_true(json_array_size(list) > 30);
    size_t i, k, j;
    json_array_foreach(list, i, entry) {
        const char *name = text(entry, "set");
        const json_t *trainable = json_object_get(entry, "trainable");
        json_t *wanted, *finding;
        int code, config_only = 0;
        snprintf(path, sizeof path, "%s/assets/broken/%s", golden_dir(), name);
        json_t *findings = check("", path, &code);
        int64_t errors = errors_in(findings);
        if (code != (errors ? 3 : 0))
            fail_msg("%s: exit code %d with %lld errors", name, code, (long long)errors);
        json_array_foreach(json_object_get(entry, "must_report"), k, wanted) {
            json_t *looked_in = findings, *special = NULL;
            if (json_is_true(json_object_get(wanted, "only_with_config"))) {
                char arguments[512];
                snprintf(arguments, sizeof arguments, "--camera '%s'", text(wanted, "camera"));
                looked_in = special = check(arguments, path, &code);
                config_only = 1;
            }
            int found = 0;
            json_array_foreach(looked_in, j, finding)
                found |= matches(wanted, finding);
            if (!found) {
                char *want = json_dumps(wanted, 0), *got = json_dumps(looked_in, 0);
                fail_msg("%s: not reported: %s\nfound: %s", name, want, got);
            }
            json_decref(special);
        }
        if (json_is_true(trainable) && errors)
            fail_msg("%s may be trained on, yet %lld errors", name, (long long)errors);
        if (json_is_false(trainable) && !errors && !config_only)
            fail_msg("%s must not be trained on, yet no error", name);
        json_decref(findings);
    }
    json_decref(list);
}

static void whole_sets(void **state)
{
    (void)state;
    char path[4096];
    snprintf(path, sizeof path, "%s/assets/datasets", golden_dir());
    if (!vlai_is_dir(path)) {
        skip();
        return;
    }
    for (int full = 0; full < 2; full++) {
        int code;
        json_t *findings = check(full ? "--full" : "--quick", path, &code), *finding;
        size_t i;
        json_array_foreach(findings, i, finding)
            if (!strcmp(text(finding, "level"), "E"))
                fail_msg("%s: %s: %s", text(finding, "set"), text(finding, "kind"), text(finding, "message"));
        assert_int_equal(code, 0);
        json_decref(findings);
    }
}

static void no_set(void **state)
{
    (void)state;
    int code;
    json_t *findings = check("", "/nonexistent/folder", &code);
    assert_int_equal(code, 3);
    assert_int_equal(json_array_size(findings), 1);
    assert_string_equal(text(json_array_get(findings, 0), "kind"), "file-missing");
    assert_string_equal(text(json_array_get(findings, 0), "message"), "the file is missing: the folder cannot be read as a LeRobot dataset");
    json_decref(findings);
}

/* Whatever is missing, empty or a pointer: its kind has a column, and the sentence says it in words. */
static void kinds_once(void **state)
{
    (void)state;
    static const struct {
        const char *file, *content, *kind, *message;
    } rows[] = {
        {"meta/info.json", "", "file-empty", "the file is empty: the folder cannot be read as a LeRobot dataset"},
        {"meta/episodes.jsonl", NULL, "file-missing", "the file is missing: the episodes cannot be listed"},
        {"meta/tasks.jsonl", "version https://git-lfs.github.com/spec/v1\n", "lfs-pointer", "the file is a Git-LFS pointer: the instructions cannot be read"},
        {"meta/info.json", "{\"codebase_version\": \"v2.1\", \"total_episodes\": \"6\", \"splits\": {\"train\": \"0:6\"}}", "value", "total_episodes is '6', wanted a whole number"},
        {"meta/info.json", "{\"codebase_version\": \"v2.1\", \"total_frames\": 2.5}", "value", "total_frames is 2.5, wanted a whole number"},
        {"meta/tasks.jsonl", "{\"task_index\": 0, \"task\": \" \\t\"}\n", "task-empty", "task 0 has an empty text"},
        {"meta/info.json", "{\"codebase_version\": \"v2.1\", \"fps\": \"10\"}", "fps", "fps is the text '10': a frame rate above 0 is needed"},
        {"meta/info.json", "{\"codebase_version\": \"v2.1\", \"fps\": -2}", "fps", "fps is -2: a frame rate above 0 is needed"},
        {"meta/info.json", "{\"codebase_version\": \"v2.1\"}", "fps", "fps is missing: a frame rate above 0 is needed"},
    };
    char root[] = "/tmp/vla-check-XXXXXX", command[512], path[128];
    vla_error err = VLA_ERROR_INIT;
    assert_non_null(mkdtemp(root));
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int code, told = 0;
        size_t k;
        snprintf(command, sizeof command, "'%s' synth %s/%zu --cameras none --episodes 2 --version v2.1 > /dev/null", VLA_TEST_PROGRAM, root, i);
        assert_int_equal(system(command), 0);
        snprintf(path, sizeof path, "%s/%zu/%s", root, i, rows[i].file);
        if (rows[i].content)
            assert_ok(vlai_write_file_atomic(path, rows[i].content, strlen(rows[i].content), &err), err);
        else
            assert_int_equal(unlink(path), 0);
        snprintf(path, sizeof path, "%s/%zu", root, i);
        json_t *findings = check("", path, &code), *finding;
        assert_int_equal(code, 3);
        json_array_foreach(findings, k, finding) {
            assert_null(strstr(text(finding, "message"), "-1"));
            if (!strcmp(text(finding, "file"), rows[i].file) && !strcmp(text(finding, "kind"), rows[i].kind)) {
                assert_string_equal(text(finding, "message"), rows[i].message);
                told++;
            }
        }
        assert_int_equal(told, 1);
        json_decref(findings);
    }
    assert_ok(vlai_remove_tree(root, &err), err);
}

/* An episode that the metadata lets end after its video: a warning, in the check and when the set is opened to train. */
static void beyond_the_end(void **state)
{
    (void)state;
    char root[] = "/tmp/vla-check-XXXXXX", command[512], path[128], set[64], *data;
    size_t size, changed = 0;
    vla_error err = VLA_ERROR_INIT;
    assert_non_null(mkdtemp(root));
    snprintf(set, sizeof set, "%s/set", root);
    snprintf(command, sizeof command, "'%s' synth %s --episodes 3 --length 7 --size 64x64 --cameras cam > /dev/null 2>&1",
             VLA_TEST_PROGRAM, set);
    assert_int_equal(system(command), 0);
    snprintf(path, sizeof path, "%s/meta/episodes/chunk-000/file-000.parquet", set);
    assert_ok(vlai_read_file(path, 0, &data, &size, &err), err);
    const double ends = 2.1, later = 2.2; /* 21 frames, 10 a second */
    for (size_t i = 0; i + sizeof ends <= size; i++)
        if (!memcmp(data + i, &ends, sizeof ends)) {
            memcpy(data + i, &later, sizeof later);
            changed++;
        }
    assert_true(changed > 0);
    assert_ok(vlai_write_file_atomic(path, data, size, &err), err);
    vlai_free(data);
    int code, told = 0;
    json_t *findings = check("--quick", set, &code), *finding;
    size_t k;
    assert_int_equal(code, 0);
    json_array_foreach(findings, k, finding)
        if (!strcmp(text(finding, "kind"), "video-end")) {
            assert_string_equal(text(finding, "level"), "W");
            assert_string_equal(text(finding, "file"), "videos/cam/chunk-000/file-000.mp4");
            assert_string_equal(text(finding, "camera"), "cam");
            assert_int_equal(json_integer_value(json_object_get(finding, "episode")), 2);
            assert_non_null(strstr(text(finding, "message"), "2.2000 s, the video ends at 2.1000 s (1 of its 3 episodes"));
            told++;
        }
    assert_int_equal(told, 1);
    json_decref(findings);
    vla_dataset *open;
    assert_ok(vla_dataset_open(set, NULL, &open, &err), err);
    told = 0;
    for (int64_t i = 0; i < vla_dataset_info_get(open)->warnings; i++)
        told += strstr(vla_dataset_warning(open, i), "to_timestamp of episode 2") != NULL;
    assert_int_equal(told, 1);
    vla_dataset_close(open);
    assert_ok(vlai_remove_tree(root, &err), err);
}

/* Pictures that lie beside the data instead of in it, as some converters leave them: read, and reported when gone. */
static void pictures_beside(void **state)
{
    (void)state;
    /* Parquet of one row: cam {bytes: null, path: "a.png"}, index 0. */
    static const uint8_t data[] = {
        0x50, 0x41, 0x52, 0x31, 0x15, 0x00, 0x15, 0x0c, 0x15, 0x0c, 0x2c, 0x15, 0x02, 0x15, 0x00, 0x15, 0x06, 0x15, 0x06, 0x1c, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00,
        0x00, 0x02, 0x01, 0x15, 0x00, 0x15, 0x1e, 0x15, 0x1e, 0x2c, 0x15, 0x02, 0x15, 0x00, 0x15, 0x06, 0x15, 0x06, 0x1c, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00,
        0x02, 0x02, 0x05, 0x00, 0x00, 0x00, 0x61, 0x2e, 0x70, 0x6e, 0x67, 0x15, 0x00, 0x15, 0x1c, 0x15, 0x1c, 0x2c, 0x15, 0x02, 0x15, 0x00, 0x15, 0x06, 0x15, 0x06,
        0x1c, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x02, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x15, 0x04, 0x19, 0x5c, 0x35, 0x00, 0x18, 0x06,
        0x73, 0x63, 0x68, 0x65, 0x6d, 0x61, 0x15, 0x04, 0x00, 0x35, 0x02, 0x18, 0x03, 0x63, 0x61, 0x6d, 0x15, 0x04, 0x00, 0x15, 0x0c, 0x25, 0x02, 0x18, 0x05, 0x62,
        0x79, 0x74, 0x65, 0x73, 0x00, 0x15, 0x0c, 0x25, 0x02, 0x18, 0x04, 0x70, 0x61, 0x74, 0x68, 0x25, 0x00, 0x4c, 0x1c, 0x00, 0x00, 0x00, 0x15, 0x04, 0x25, 0x02,
        0x18, 0x05, 0x69, 0x6e, 0x64, 0x65, 0x78, 0x00, 0x16, 0x02, 0x19, 0x1c, 0x19, 0x3c, 0x26, 0x00, 0x1c, 0x15, 0x0c, 0x19, 0x25, 0x06, 0x00, 0x19, 0x28, 0x03,
        0x63, 0x61, 0x6d, 0x05, 0x62, 0x79, 0x74, 0x65, 0x73, 0x15, 0x00, 0x16, 0x02, 0x16, 0x32, 0x16, 0x32, 0x26, 0x08, 0x49, 0x1c, 0x15, 0x00, 0x15, 0x00, 0x15,
        0x02, 0x00, 0x3c, 0x16, 0x00, 0x19, 0x06, 0x19, 0x36, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x26, 0x00, 0x1c, 0x15, 0x0c, 0x19, 0x25, 0x06, 0x00, 0x19, 0x28,
        0x03, 0x63, 0x61, 0x6d, 0x04, 0x70, 0x61, 0x74, 0x68, 0x15, 0x00, 0x16, 0x02, 0x16, 0x44, 0x16, 0x44, 0x26, 0x3a, 0x49, 0x1c, 0x15, 0x00, 0x15, 0x00, 0x15,
        0x02, 0x00, 0x3c, 0x16, 0x0a, 0x19, 0x06, 0x19, 0x36, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x26, 0x00, 0x1c, 0x15, 0x04, 0x19, 0x25, 0x06, 0x00, 0x19, 0x18,
        0x05, 0x69, 0x6e, 0x64, 0x65, 0x78, 0x15, 0x00, 0x16, 0x02, 0x16, 0x42, 0x16, 0x42, 0x26, 0x7e, 0x49, 0x1c, 0x15, 0x00, 0x15, 0x00, 0x15, 0x02, 0x00, 0x3c,
        0x29, 0x06, 0x19, 0x26, 0x00, 0x02, 0x00, 0x00, 0x00, 0x16, 0xb8, 0x01, 0x16, 0x02, 0x26, 0x08, 0x16, 0xb8, 0x01, 0x00, 0x28, 0x20, 0x70, 0x61, 0x72, 0x71,
        0x75, 0x65, 0x74, 0x2d, 0x63, 0x70, 0x70, 0x2d, 0x61, 0x72, 0x72, 0x6f, 0x77, 0x20, 0x76, 0x65, 0x72, 0x73, 0x69, 0x6f, 0x6e, 0x20, 0x32, 0x36, 0x2e, 0x30,
        0x2e, 0x31, 0x19, 0x3c, 0x1c, 0x00, 0x00, 0x1c, 0x00, 0x00, 0x1c, 0x00, 0x00, 0x00, 0x1a, 0x01, 0x00, 0x00, 0x50, 0x41, 0x52, 0x31,
    };
    static const char info[] =
        "{\"codebase_version\": \"v2.1\", \"fps\": 10, \"total_episodes\": 1, \"total_frames\": 1, \"features\": {"
        "\"cam\": {\"dtype\": \"image\", \"shape\": [2, 3, 3], \"names\": [\"height\", \"width\", \"channel\"]},"
        "\"index\": {\"dtype\": \"int64\", \"shape\": [1], \"names\": null}}}";
    static const char tasks[] = "{\"task_index\": 0, \"task\": \"wait\"}\n";
    static const char episodes[] = "{\"episode_index\": 0, \"tasks\": [\"wait\"], \"length\": 1}\n";
    static const struct {
        const char *file;
        const void *content;
        size_t size;
    } files[] = {{"meta/info.json", info, sizeof info - 1},
                 {"meta/tasks.jsonl", tasks, sizeof tasks - 1},
                 {"meta/episodes.jsonl", episodes, sizeof episodes - 1},
                 {"data/chunk-000/episode_000000.parquet", data, sizeof data}};
    static const uint8_t rgb[18] = {255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 8, 7, 6, 5, 4, 3, 2, 1};
    char root[] = "/tmp/vla-check-XXXXXX", path[128], picture[128];
    vla_error err = VLA_ERROR_INIT;
    assert_non_null(mkdtemp(root));
    snprintf(path, sizeof path, "mkdir -p %s/meta %s/data/chunk-000", root, root);
    assert_int_equal(system(path), 0);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", root, files[i].file);
        assert_ok(vlai_write_file_atomic(path, files[i].content, files[i].size, &err), err);
    }
    snprintf(picture, sizeof picture, "%s/a.png", root);
    assert_ok(vlai_png_write(picture, rgb, 3, 2, &err), err);
    vla_dataset *set;
    vla_frame_reader *reader;
    vla_picture got;
    vla_dataset_options options = VLA_DATASET_OPTIONS_DEFAULT;
    options.flags = VLA_DATASET_NO_CACHE;
    assert_ok(vla_dataset_open(root, &options, &set, &err), err);
    assert_ok(vla_frame_reader_create(set, NULL, &reader, &err), err);
    assert_ok(vla_frame_reader_read(reader, 0, vla_dataset_camera(set, 0), &got, &err), err);
    assert_int_equal(got.width, 3);
    assert_int_equal(got.height, 2);
    assert_memory_equal(got.data, rgb, sizeof rgb);
    int code;
    json_t *findings = check("", root, &code);
    assert_int_equal(errors_in(findings), 0);
    assert_int_equal(code, 0);
    json_decref(findings);
    assert_int_equal(unlink(picture), 0);
    assert_fails(vla_frame_reader_read(reader, 0, vla_dataset_camera(set, 0), &got, &err), VLA_E_NOT_FOUND, err, "a.png");
    findings = check("", root, &code);
    assert_int_equal(code, 3);
    assert_int_equal(errors_in(findings), 1);
    json_t *finding;
    size_t i;
    json_array_foreach(findings, i, finding)
        if (!strcmp(text(finding, "level"), "E"))
            assert_string_equal(text(finding, "kind"), "image-decode");
    json_decref(findings);
    vla_frame_reader_destroy(reader);
    vla_dataset_close(set);
    assert_ok(vlai_remove_tree(root, &err), err);
}

static void sentence(char level, vlai_finding f, const char *wanted, const char *message)
{
    char found[256];
    f.level = level;
    f.message = message;
    vlai_finding_text(&f, found, sizeof found);
    assert_string_equal(found, wanted);
}

/* A sentence names the file, the episode and the line once, wherever its words come from. */
static void places_once(void **state)
{
    (void)state;
    vlai_finding f = vlai_finding_error("kind", "meta/x.json");
    sentence('E', f, "meta/x.json: no words", "no words");
    sentence('E', f, "meta/x.json: no words", "/sets/a/meta/x.json: no words");
    sentence('E', f, "meta/x.json: 64:14: not valid JSON", "/sets/a/meta/x.json:64:14: not valid JSON");
    f.episode = 1;
    f.frame = 20;
    sentence('E', f, "meta/x.json: episode 1, frame 20: no words", "no words");
    sentence('E', f, "meta/x.json: frame 20: episode 1 stands twice", "episode 1 stands twice");
    sentence('W', f, "meta/x.json: episode 1: episode 12 begins behind frame 20", "episode 12 begins behind frame 20");
    f.frame = -1;
    sentence('W', f, "meta/x.json: null for episode 1", "null for episode 1");
}

/* A column that the metadata do not declare is named once, and training may go on. */
static void undeclared_column(void **state)
{
    (void)state;
    char root[] = "/tmp/vla-check-XXXXXX", command[512], path[128];
    vla_error err = VLA_ERROR_INIT;
    int code;
    assert_non_null(mkdtemp(root));
    snprintf(path, sizeof path, "%s/set", root);
    snprintf(command, sizeof command, "'%s' synth %s --cameras none --episodes 4 --version v2.1 > /dev/null", VLA_TEST_PROGRAM, path);
    assert_int_equal(system(command), 0);
    snprintf(path, sizeof path, "%s/set/meta/info.json", root);
    json_t *info = json_load_file(path, 0, NULL);
    assert_int_equal(json_object_del(json_object_get(info, "features"), "action"), 0);
    assert_int_equal(json_dump_file(info, path, JSON_INDENT(4)), 0);
    json_decref(info);
    snprintf(path, sizeof path, "%s/set", root);
    json_t *findings = check("", path, &code), *finding;
    assert_int_equal(code, 0);
    size_t i, told = 0;
    json_array_foreach(findings, i, finding)
        if (!strcmp(text(finding, "kind"), "column-undeclared")) {
            assert_string_equal(text(finding, "column"), "action");
            assert_string_equal(text(finding, "level"), "W");
            told++;
        }
    assert_int_equal(told, 1);
    json_decref(findings);
    assert_ok(vlai_remove_tree(root, &err), err);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(broken_sets),
        cmocka_unit_test(whole_sets),
        cmocka_unit_test(no_set),
        cmocka_unit_test(kinds_once),
        cmocka_unit_test(beyond_the_end),
        cmocka_unit_test(places_once),
        cmocka_unit_test(undeclared_column),
        cmocka_unit_test(pictures_beside),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
