/* vla predict after a few steps of training: what it compares, what it writes, and what it refuses. */
#include "program.h"

#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "format/image.h"
#include "train/predict.h"
#include "vla/dataset.h"
#include "vla/memory.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static vla_error err = VLA_ERROR_INIT;

#define DEMO_CONFIG VLA_TEST_ROOT "/tests/e2e/small.yml"

/* A set of 20 episodes, of which two are held out, and three steps of training. */
static int make_run(void **state)
{
    if (make_root(state))
        return 1;
    bool good = !run("synth data --episodes 20 --size 56x56 --cameras observation.images.image --storage image --state-dim 3 "
                     "--action-dim 3 --threads 2") &&
                !run("norm-stats --train_config " DEMO_CONFIG) && !run("init start --preset demo --train-config " DEMO_CONFIG) &&
                !run("train --config " DEMO_CONFIG " --hyperparams.batch_size_per_gpu=4 --training.threads=2"
                     " --hyperparams.scheduler.num_training_steps=3 --hyperparams.scheduler.num_warmup_steps=1");
    if (!good)
        output_has("(the output of the command that failed)");
    return good ? 0 : 1;
}

static vlai_predict *predict(vlai_predict_options o)
{
    vlai_predict *p;
    if (!o.checkpoint)
        o.checkpoint = at("run");
    o.threads = 2;
    assert_ok(vlai_predict_create(&o, &p, &err), err);
    assert_ok(vlai_predict_run(p, &err), err);
    return p;
}

/* The held-out episodes, the recorded actions as the data set has them, and errors that are those of the frames. */
static void compares_what_was_recorded(void **state)
{
    (void)state;
    vlai_predict *p = predict((vlai_predict_options)VLAI_PREDICT_DEFAULT);
    const vlai_predict_result *r = vlai_predict_get(p);
    assert_int_equal(r->episode_count, 2);
    assert_int_equal(r->episode_numbers[0], 18);
    assert_int_equal(r->episode_numbers[1], 19);
    assert_int_equal(r->columns, 3);
    assert_int_equal(r->horizon, 4);
    vla_dataset *set;
    const float *actions;
    int64_t dim;
    assert_ok(vla_dataset_open(at("data"), NULL, &set, &err), err);
    assert_ok(vla_dataset_numbers(set, "action", &actions, &dim, &err), err);
    int64_t training = vla_dataset_episode(set, 18)->first_row, compared = 0;
    assert_int_equal(r->training_rows, training);
    double mean[3] = {0}, l1[3] = {0}, mse[3] = {0}, mean_l1[3] = {0}, step0 = 0;
    for (int64_t row = 0; row < training; row++)
        for (int i = 0; i < 3; i++)
            mean[i] += actions[row * 3 + i] / (double)training;
    int64_t covered = 0, frame0 = 0;
    for (int64_t k = 0; k < r->frame_count; k++) {
        const vlai_predict_frame *f = &r->frames[k];
        const vla_episode *e = vla_dataset_episode(set, 18 + f->episode);
        assert_int_equal(f->row, e->first_row + f->frame);
        assert_int_equal(f->known, e->length - f->frame < 4 ? e->length - f->frame : 4);
        covered += f->known;
        for (int64_t h = 0; h < f->known; h++, compared++)
            for (int i = 0; i < 3; i++) {
                double wanted = actions[(f->row + h) * 3 + i], got = f->predicted[h * 3 + i];
                assert_true(f->recorded[h * 3 + i] == (float)wanted);
                l1[i] += fabs(got - wanted);
                mse[i] += (got - wanted) * (got - wanted);
                mean_l1[i] += fabs((float)mean[i] - wanted);
                step0 += h == 0 ? fabs(got - wanted) : 0;
            }
        frame0++;
    }
    assert_int_equal(covered, vla_dataset_episode(set, 18)->length + vla_dataset_episode(set, 19)->length);
    for (int i = 0; i < 3; i++) { /* sums of doubles in another order: far below 1e-12 relative */
        assert_true(fabs(r->dims[i].l1 - l1[i] / (double)compared) < 1e-12 + 1e-10 * l1[i]);
        assert_true(fabs(r->dims[i].mse - mse[i] / (double)compared) < 1e-12 + 1e-10 * mse[i]);
        assert_true(fabs(r->dims[i].mean_l1 - mean_l1[i] / (double)compared) < 1e-6); /* the mean is kept in float */
    }
    assert_true(fabs(r->steps[0].l1 - step0 / (double)(3 * frame0)) < 1e-10);
    assert_true(fabs(r->all.l1 - (r->dims[0].l1 + r->dims[1].l1 + r->dims[2].l1) / 3) < 1e-10);
    vla_dataset_close(set);
    vlai_predict_destroy(p);
}

/* Frames sampled alone get the prediction that they get in a batch, up to fp32 sums over differently cut matrices. */
static void a_batch_changes_nothing(void **state)
{
    (void)state;
    const int64_t only[] = {19};
    vlai_predict_options alone = VLAI_PREDICT_DEFAULT;
    alone.batch = 1;
    alone.episodes = only;
    alone.episode_count = 1;
    vlai_predict *p = predict((vlai_predict_options)VLAI_PREDICT_DEFAULT), *q = predict(alone);
    const vlai_predict_result *a = vlai_predict_get(p), *b = vlai_predict_get(q);
    int64_t shift = a->frame_count - b->frame_count; /* episode 19 comes last */
    assert_true(b->frame_count > 2 && shift > 2);
    double scale = 0, worst = 0;
    for (int64_t k = 0; k < b->frame_count; k++)
        for (int i = 0; i < 12; i++) {
            scale = fmax(scale, fabsf(b->frames[k].predicted[i]));
            worst = fmax(worst, fabs((double)b->frames[k].predicted[i] - a->frames[shift + k].predicted[i]));
        }
    assert_true(scale > 0.05);
    assert_true(worst <= 1e-4 * scale);
    vlai_predict_destroy(p);
    vlai_predict_destroy(q);
}

static void swaps_and_weights_change_predictions(void **state)
{
    (void)state;
    static const vlai_predict_swap swaps[] = {VLAI_SWAP_NOTHING, VLAI_SWAP_IMAGES, VLAI_SWAP_INSTRUCTIONS};
    const int64_t many[] = {0, 1, 2, 3};
    vlai_predict *p[4];
    for (int i = 0; i < 4; i++) {
        vlai_predict_options o = VLAI_PREDICT_DEFAULT;
        o.episodes = many;
        o.episode_count = 4;
        if (i < 3)
            o.swap = swaps[i];
        else
            o.weights = at("start");
        p[i] = predict(o);
    }
    const vlai_predict_result *plain = vlai_predict_get(p[0]);
    for (int i = 1; i < 4; i++) {
        const vlai_predict_result *r = vlai_predict_get(p[i]);
        assert_int_equal(r->frame_count, plain->frame_count);
        assert_true(r->all.mean_l1 == plain->all.mean_l1); /* the same frames */
        assert_true(r->all.l1 != plain->all.l1);
        for (int64_t k = 0; k < r->frame_count; k++) {
            assert_int_equal(r->frames[k].partner < 0, i == 3);
            assert_true(r->frames[k].partner != r->episode_numbers[r->frames[k].episode]);
        }
    }
    for (int i = 0; i < 4; i++)
        vlai_predict_destroy(p[i]);
}

/* Predictions of the run `name`, trained for one step at rate 0 from `weights` with another action layout. */
static vlai_predict *with_layout(const char *name, const char *layout, const char *weights, const char *stats)
{
    assert_int_equal(run("train --config " DEMO_CONFIG " --hyperparams.batch_size_per_gpu=4 --training.threads=2 --stop-at 1 "
                         "--hyperparams.optimizer.learning_rate=0 --checkpoint.save_path=%s '--task.dof_config=%s' "
                         "--checkpoint.resume_from=%s/model.safetensors --data.norm_stats_path=%s", name, layout, weights, stats), 0);
    vlai_predict_options o = VLAI_PREDICT_DEFAULT;
    o.checkpoint = at(name);
    return predict(o);
}

/* Two runs whose models see the same numbers: what one predicts as actions, the other predicts relative to the state. */
static void relative_actions_come_back(void **state)
{
    (void)state;
    vlai_predict *p = with_layout("plain", "{ee_position: 2, gripper: 1}", "start", "norm_stats.json"),
                 *q = with_layout("relative", "{ee_position_relative: 2, gripper: 1}", "start", "norm_stats.json");
    const vlai_predict_result *a = vlai_predict_get(p), *b = vlai_predict_get(q);
    vla_dataset *set;
    const float *states;
    int64_t dim;
    assert_ok(vla_dataset_open(at("data"), NULL, &set, &err), err);
    assert_ok(vla_dataset_numbers(set, "observation.state", &states, &dim, &err), err);
    assert_int_equal(a->frame_count, b->frame_count);
    double moved = 0;
    for (int64_t k = 0; k < a->frame_count; k++)
        for (int i = 0; i < 12; i++) {
            double at_state = i % 3 < 2 ? states[a->frames[k].row * dim + i % 3] : 0;
            assert_true(fabs(b->frames[k].predicted[i] - a->frames[k].predicted[i] - at_state) < 1e-6);
            assert_true(b->frames[k].recorded[i] == a->frames[k].recorded[i]);
            moved = fmax(moved, fabs(at_state));
        }
    assert_true(moved > 0.1);
    assert_true(a->all.mean_l1 == b->all.mean_l1);
    vla_dataset_close(set);
    vlai_predict_destroy(p);
    vlai_predict_destroy(q);
}

/* A layout of one 6D rotation over three angles: six numbers in the model, three in the result. */
static void six_dimensions_come_back(void **state)
{
    (void)state;
    static const char layout[] = "{arm_rotation_6D: 6}";
    assert_int_equal(run("norm-stats --train_config " DEMO_CONFIG " '--task.dof_config=%s' --output_path six.json", layout), 0);
    assert_true(output_has("action: 6 dims"));
    assert_int_equal(run("init start6 --preset demo --action-dim 6 --state-dim 3"), 0);
    vlai_predict *p = with_layout("six", layout, "start6", "six.json");
    const vlai_predict_result *r = vlai_predict_get(p);
    assert_int_equal(r->columns, 3);
    vla_dataset *set;
    const float *actions;
    int64_t dim;
    assert_ok(vla_dataset_open(at("data"), NULL, &set, &err), err);
    assert_ok(vla_dataset_numbers(set, "action", &actions, &dim, &err), err);
    double worst = 0;
    for (int64_t k = 0; k < r->frame_count; k++)
        for (int64_t i = 0; i < 3 * r->frames[k].known; i++) {
            assert_true(r->frames[k].recorded[i] == actions[r->frames[k].row * dim + i]);
            assert_true(fabsf(r->frames[k].predicted[i]) <= 3.1415928f);
            worst = fmax(worst, fabs((double)r->frames[k].predicted[i] - r->frames[k].recorded[i]));
        }
    assert_true(r->all.l1 <= 3.1415927 && r->all.l1 > 0 && worst > r->all.l1 && r->unit.l1 > 0);
    vla_dataset_close(set);
    vlai_predict_destroy(p);
}

static void writes_files_that_can_be_read(void **state)
{
    (void)state;
    assert_int_equal(run("predict run --threads 2 --plots 1 --out old/result"), 0);
    assert_true(output_has("mean L1 error"));
    assert_int_equal(run("predict run --threads 2 --plots 1 --episodes 3-4,7 --stride 2 --max-frames 5 --out old/result"), 0);
    assert_true(vlai_is_file(at("old/result/ep3.png")));
    assert_false(vlai_is_file(at("old/result/ep4.png")));
    assert_false(vlai_is_file(at("old/result/ep18.png"))); /* of the older result */
    json_t *summary, *episode;
    assert_ok(vlai_json_load(at("old/result/summary.json"), &summary, &err), err);
    assert_ok(vlai_json_load(at("old/result/ep7_summary.json"), &episode, &err), err);
    assert_int_equal(json_array_size(json_object_get(summary, "dimensions")), 3);
    assert_int_equal(json_array_size(json_object_get(summary, "horizon_steps")), 4);
    assert_int_equal(json_integer_value(json_object_get(summary, "predictions")), 15);
    assert_int_equal(json_integer_value(json_object_get(summary, "step")), 3);
    assert_int_equal(json_integer_value(json_object_get(episode, "episode_index")), 7);
    assert_int_equal(json_integer_value(json_object_get(episode, "obs_infer_points")), 5);
    assert_non_null(strstr(json_string_value(json_object_get(episode, "instruction")), "goal"));
    json_decref(summary);
    json_decref(episode);
    const char *const pictures[] = {"old/result/ep3.png", "old/result/horizon.png"};
    for (int i = 0; i < 2; i++) {
        vlai_image image = {0};
        char *bytes;
        size_t size, inked = 0;
        assert_ok(vlai_read_file(at(pictures[i]), 0, &bytes, &size, &err), err);
        assert_ok(vlai_image_read((const uint8_t *)bytes, size, pictures[i], &image, &err), err);
        for (size_t k = 0; k < (size_t)image.width * (size_t)image.height; k++)
            inked += image.data[3 * k] != 255;
        assert_true(image.width > 700 && inked > 2000);
        vlai_image_fini(&image);
        vlai_free(bytes);
    }
    /* One line per action, and a head. */
    char *csv;
    assert_ok(vlai_read_file(at("old/result/predictions.csv"), 0, &csv, NULL, &err), err);
    int lines = 0;
    for (const char *c = csv; *c; c++)
        lines += *c == '\n';
    assert_int_equal(lines, 1 + 15 * 4);
    assert_int_equal(strncmp(csv, "episode,frame,step,\"predicted.", 29), 0);
    vlai_free(csv);
    /* --json is the summary itself; without --out it goes beside the checkpoint */
    assert_int_equal(run("predict run/latest --threads 2 --json --episodes 1"), 0);
    json_t *printed;
    assert_ok(vlai_json_load(at("out.txt"), &printed, &err), err);
    assert_int_equal(json_integer_value(json_object_get(json_array_get(json_object_get(printed, "episodes"), 0), "episode")), 1);
    json_decref(printed);
    assert_true(vlai_is_file(at("run/predict/summary.json")));
    /* What could not be written whole has no summary of another result beside it. */
    assert_int_equal(unlink(at("old/result/horizon.png")), 0);
    assert_ok(vlai_mkdirs(at("old/result/horizon.png"), &err), err);
    assert_int_equal(run("predict run --threads 2 --plots 1 --episodes 3 --out old/result"), 3);
    assert_true(output_has("horizon.png"));
    assert_false(vlai_is_file(at("old/result/summary.json")));
}

/* An allocator in whose Nth call a training begins to delete the checkpoint, as the writer does. */
static struct {
    _Atomic uint64_t count;
    uint64_t at;
    char from[512], to[512];
} deletion;

static void *alloc_and_delete(size_t size, size_t align, void *user)
{
    (void)user;
    void *p = NULL;
    if (atomic_fetch_add(&deletion.count, 1) + 1 == deletion.at && rename(deletion.from, deletion.to) != 0)
        return NULL;
    return posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, size ? size : 1) == 0 ? p : NULL;
}

static void release(void *p, void *user)
{
    (void)user;
    free(p);
}

static vla_status open_while_deleting(const char *checkpoint, const char *deleted, uint64_t nth, vla_error *error)
{
    static const vla_allocator deleting = {alloc_and_delete, release, NULL};
    char command[2048];
    snprintf(command, sizeof command, "cd '%s' && rm -rf live && mkdir live && cp -r run/0_3 live/0_3 && cp -r run/0_3 live/0_2 && ln -s 0_3 live/latest", root);
    assert_int_equal(system(command), 0);
    snprintf(deletion.from, sizeof deletion.from, "%s", at(deleted));
    snprintf(deletion.to, sizeof deletion.to, "%s.tmp", at(deleted));
    deletion.count = 0;
    deletion.at = nth;
    vlai_predict_options o = VLAI_PREDICT_DEFAULT;
    o.checkpoint = at(checkpoint);
    o.threads = 1;
    vlai_predict *p = NULL;
    vla_allocator_set(&deleting);
    vla_status status = vlai_predict_create(&o, &p, error);
    vlai_predict_destroy(p);
    vla_allocator_set(NULL);
    return status;
}

/* Whenever a training deletes the checkpoint that is read, the error says so; what was read before that is complete. */
static void a_checkpoint_that_is_deleted(void **state)
{
    (void)state;
    assert_ok(open_while_deleting("live/0_3", "live/0_3", UINT64_MAX, &err), err);
    uint64_t all = deletion.count, step = all / 12;
    int failed = 0, fell_back = 0;
    static const char *const named[] = {"live/0_3", "live/latest/", "live"};
    for (int k = 0; k < 3; k++)
        for (uint64_t n = 2; n < all; n += n < 50 ? 3 : step) {
            vla_status status = open_while_deleting(named[k], "live/0_3", n, &err);
            fell_back += k == 2 && status == VLA_OK && n < 50;
            failed += status != VLA_OK;
            if (status != VLA_OK && (status != VLA_E_NOT_FOUND || !strstr(err.message, "live/0_3 was deleted while it was read") ||
                                     !strstr(err.hint, "name the run folder")))
                fail_msg("%s, allocation %llu of %llu: %s", named[k], (unsigned long long)n, (unsigned long long)all, err.message);
        }
    print_message("%d of the calls failed, %d took the checkpoint before\n", failed, fell_back);
    assert_true(failed > 10 && fell_back > 2);
}

static void says_what_is_wrong(void **state)
{
    (void)state;
    assert_int_equal(run("predict"), 2);
    assert_int_equal(run("predict run --swap colours"), 2);
    assert_true(output_has("'colours' is not images or instructions"));
    assert_int_equal(run("predict run --stides 3"), 2);
    assert_true(output_has("did you mean '--stride'"));
    assert_int_equal(run("predict run --episodes 3,x"), 2);
    assert_int_equal(run("predict run --episodes 77"), 3);
    assert_true(output_has("has no episode 77 (20 episodes)"));
    assert_int_equal(run("predict nowhere"), 3);
    assert_true(output_has("nowhere"));
    assert_int_equal(run("predict run --swap instructions --episodes 4"), 2);
    assert_true(output_has("no other evaluated episode with another instruction"));
    /* another resolution is another contract */
    char command[2048];
    snprintf(command, sizeof command, "sed 's/action_horizon: 4/action_horizon: 5/' '%s' > '%s'", DEMO_CONFIG, at("other.yml"));
    assert_int_equal(system(command), 0);
    assert_int_equal(run("predict run --config other.yml"), 2);
    assert_true(output_has("horizon"));
    assert_int_equal(run("predict run --threads 2 --config " DEMO_CONFIG), 0);
    /* a set that lacks the camera */
    assert_int_equal(run("synth blind --episodes 4 --cameras none --state-dim 3 --action-dim 3"), 0);
    assert_int_not_equal(run("predict run --dataset blind"), 0);
    assert_true(output_has("observation.images.image"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compares_what_was_recorded),    cmocka_unit_test(a_batch_changes_nothing),
        cmocka_unit_test(swaps_and_weights_change_predictions), cmocka_unit_test(relative_actions_come_back),
        cmocka_unit_test(six_dimensions_come_back),      cmocka_unit_test(writes_files_that_can_be_read),
        cmocka_unit_test(a_checkpoint_that_is_deleted),
        cmocka_unit_test(says_what_is_wrong),
    };
    return cmocka_run_group_tests_name("predict", tests, make_run, drop_root);
}
