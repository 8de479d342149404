#include "test.h"

#include "base/fail.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/time.h"
#include "train/loader.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

/* Samples that take a random while, so that workers finish out of order. */
typedef struct {
    int64_t epoch, place;
    uint64_t position;
    uint32_t draw;
} sample;

typedef struct {
    atomic_int slots, workers, reading, most;
    int64_t fail_at;
    int busy;
} source;

static vla_status slot_create(void *user, void **slot, vla_error *err)
{
    *slot = vlai_calloc(1, sizeof(sample));
    if (!*slot)
        return vlai_nomem(err, sizeof(sample));
    atomic_fetch_add(&((source *)user)->slots, 1);
    return VLA_OK;
}

static void slot_destroy(void *user, void *slot)
{
    atomic_fetch_sub(&((source *)user)->slots, 1);
    vlai_free(slot);
}

static vla_status worker_create(void *user, void **worker, vla_error *err)
{
    (void)err;
    atomic_fetch_add(&((source *)user)->workers, 1);
    *worker = user;
    return VLA_OK;
}

static void worker_destroy(void *user, void *worker)
{
    assert_ptr_equal(user, worker);
    atomic_fetch_sub(&((source *)user)->workers, 1);
}

static vla_status read_sample(void *user, void *worker, const vla_sample_key *key, void *slot, vla_error *err)
{
    source *s = user;
    (void)worker;
    int now = atomic_fetch_add(&s->reading, 1) + 1;
    if (now > atomic_load(&s->most))
        atomic_store(&s->most, now);
    vlai_rng_key rng = {.seed = 5, .stream = key->stream, .position = key->position};
    uint32_t draw = vlai_rng_u32(&rng, 0);
    if (s->busy)
        nanosleep(&(struct timespec){.tv_nsec = draw % 1000000}, NULL);
    *(sample *)slot = (sample){key->epoch, key->place, key->position, draw};
    atomic_fetch_sub(&s->reading, 1);
    if ((int64_t)key->position == s->fail_at)
        return vlai_fail(err, VLA_E_CORRUPT, "set, episode 3, frame 7, camera top: broken");
    return VLA_OK;
}

static vla_samples samples_of(source *s, int64_t count)
{
    return (vla_samples){sizeof(vla_samples), s, count, slot_create, slot_destroy, worker_create, worker_destroy,
                         read_sample, NULL};
}

enum { COUNT = 23, USED = 20, BATCH = 4, BATCHES = 15 };

static void take(int64_t workers, int64_t first, sample *out)
{
    vla_error err = VLA_ERROR_INIT;
    source s = {.fail_at = -1, .busy = 1};
    vla_samples samples = samples_of(&s, COUNT);
    vlai_loader_options o = {.batch = BATCH, .workers = workers, .first = first, .end = -1, .epoch_samples = USED};
    vlai_loader *loader;
    assert_ok(vlai_loader_create(&samples, &o, &loader, &err), err);
    for (int64_t b = first / BATCH; b < BATCHES; b++) {
        void *const *slots;
        int64_t count;
        assert_ok(vlai_loader_next(loader, &slots, &count, NULL, &err), err);
        assert_int_equal(count, BATCH);
        for (int64_t i = 0; i < count; i++)
            *out++ = *(sample *)slots[i];
    }
    vlai_loader_destroy(loader);
    assert_int_equal(s.slots, 0);
    assert_int_equal(s.workers, 0);
    if (workers > 1)
        assert_true(s.most > 1);
}

static void contents_do_not_depend_on_workers(void **state)
{
    (void)state;
    static sample one[BATCH * BATCHES], many[BATCH * BATCHES], later[BATCH * BATCHES];
    take(0, 0, one);
    for (int64_t i = 0; i < BATCH * BATCHES; i++) {
        assert_int_equal(one[i].epoch, i / USED);
        assert_int_equal(one[i].place, i % USED);
        assert_int_equal(one[i].position, i / USED * COUNT + i % USED);
    }
    int64_t counts[] = {1, 3, 9};
    for (int i = 0; i < 3; i++) {
        take(counts[i], 0, many);
        assert_memory_equal(one, many, sizeof one);
    }
    take(2, 6 * BATCH, later);
    assert_memory_equal(later, one + 6 * BATCH, 9 * BATCH * sizeof *one);
}

/* Loaders of 3 ranks hand out the batches of one, in turn, whatever their workers; the short batch at the end too. */
static void ranks_share_the_order(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    source s = {.fail_at = -1, .busy = 1};
    vla_samples samples = samples_of(&s, 26);
    vlai_loader *loader[3];
    void *const *slots;
    int64_t count;
    for (int64_t r = 0; r < 3; r++) {
        vlai_loader_options o = {.batch = BATCH, .workers = r * 2, .first = 12, .end = -1, .epoch_samples = 24, .stride = 3, .offset = r};
        assert_ok(vlai_loader_create(&samples, &o, &loader[r], &err), err);
    }
    for (int64_t b = 0; b < 30; b++) {
        assert_ok(vlai_loader_next(loader[b % 3], &slots, &count, NULL, &err), err);
        assert_int_equal(count, BATCH);
        for (int64_t i = 0; i < count; i++) {
            assert_int_equal(((sample *)slots[i])->epoch, (12 + b * BATCH + i) / 24);
            assert_int_equal(((sample *)slots[i])->place, (12 + b * BATCH + i) % 24);
        }
    }
    for (int64_t r = 0; r < 3; r++)
        vlai_loader_destroy(loader[r]);

    /* Of 22 samples: batches 0, 3 and 1, 4 and 2, 5, the last of which has two samples. */
    static const int64_t wanted[3][4] = {{4, 4, 0, 0}, {4, 4, 0, 0}, {4, 2, 0, 0}};
    for (int64_t r = 0; r < 3; r++) {
        vlai_loader_options o = {.batch = BATCH, .workers = r, .end = 22, .epoch_samples = 26, .stride = 3, .offset = r};
        assert_ok(vlai_loader_create(&samples, &o, &loader[0], &err), err);
        for (int i = 0; i < 4; i++) {
            assert_ok(vlai_loader_next(loader[0], &slots, &count, NULL, &err), err);
            assert_int_equal(count, wanted[r][i]);
        }
        vlai_loader_destroy(loader[0]);
    }
    vlai_loader_options wrong = {.batch = BATCH, .end = -1, .epoch_samples = 24, .stride = 3, .offset = 3};
    assert_fails(vlai_loader_create(&samples, &wrong, &loader[0], &err), VLA_E_INVALID, err, "batch 3 of every 3");
}

static void ends_with_a_short_batch(void **state)
{
    (void)state;
    for (int64_t workers = 0; workers < 4; workers += 3) {
        vla_error err = VLA_ERROR_INIT;
        source s = {.fail_at = -1};
        vla_samples samples = samples_of(&s, 10);
        vlai_loader_options o = {.batch = 4, .workers = workers, .end = 10, .epoch_samples = 10, .stream = VLA_SAMPLES_VALIDATION};
        vlai_loader *loader;
        assert_ok(vlai_loader_create(&samples, &o, &loader, &err), err);
        int64_t wanted[] = {4, 4, 2, 0, 0}, count;
        for (int i = 0; i < 5; i++) {
            void *const *slots;
            assert_ok(vlai_loader_next(loader, &slots, &count, NULL, &err), err);
            assert_int_equal(count, wanted[i]);
        }
        vlai_loader_destroy(loader);
    }
}

static void an_error_comes_with_its_batch(void **state)
{
    (void)state;
    for (int64_t workers = 0; workers < 4; workers += 3) {
        vla_error err = VLA_ERROR_INIT;
        source s = {.fail_at = 9};
        vla_samples samples = samples_of(&s, 100);
        vlai_loader_options o = {.batch = 4, .workers = workers, .end = -1, .epoch_samples = 100};
        vlai_loader *loader;
        void *const *slots;
        int64_t count;
        assert_ok(vlai_loader_create(&samples, &o, &loader, &err), err);
        assert_ok(vlai_loader_next(loader, &slots, &count, NULL, &err), err);
        assert_ok(vlai_loader_next(loader, &slots, &count, NULL, &err), err);
        assert_fails(vlai_loader_next(loader, &slots, &count, NULL, &err), VLA_E_CORRUPT, err, "episode 3, frame 7, camera top");
        vlai_loader_destroy(loader);
    }
}

/* The consumer waits for slow samples; returns the part of their time that the meter counts. */
static double counted_stall(void)
{
    vla_error err = VLA_ERROR_INIT;
    source s = {.fail_at = -1, .busy = 1};
    vla_samples samples = samples_of(&s, 100);
    vlai_loader_options o = {.batch = 50, .workers = 1, .end = -1, .epoch_samples = 100};
    vlai_loader *loader;
    void *const *slots;
    int64_t count;
    double stall, start = vlai_now();
    assert_ok(vlai_loader_create(&samples, &o, &loader, &err), err);
    assert_ok(vlai_loader_next(loader, &slots, &count, &stall, &err), err);
    double passed = vlai_now() - start, slept = 0;
    for (int64_t i = 0; i < count; i++)
        slept += 1e-9 * (((sample *)slots[i])->draw % 1000000);
    assert_true(stall >= 0 && stall <= passed && passed >= slept);
    vlai_loader_destroy(loader);
    return stall / slept;
}

/* On a busy machine the consumer may come late, when the worker has slept already: one of ten comes in time. */
static void stall_is_measured(void **state)
{
    (void)state;
    bool measured = false;
    for (int i = 0; i < 10 && !measured; i++)
        measured = counted_stall() > 0.5;
    assert_true(measured);
}

/* Stopping while the ring is full, empty, and half read leaves nothing behind. */
static void stops_at_any_moment(void **state)
{
    (void)state;
    for (int i = 0; i < 30; i++) {
        vla_error err = VLA_ERROR_INIT;
        source s = {.fail_at = -1, .busy = 1};
        vla_samples samples = samples_of(&s, 100);
        vlai_loader_options o = {.batch = 2, .workers = 4, .end = -1, .epoch_samples = 100};
        vlai_loader *loader;
        void *const *slots;
        int64_t count;
        assert_ok(vlai_loader_create(&samples, &o, &loader, &err), err);
        for (int b = 0; b < i % 3; b++)
            assert_ok(vlai_loader_next(loader, &slots, &count, NULL, &err), err);
        if (i % 2)
            nanosleep(&(struct timespec){.tv_nsec = i * 100000}, NULL);
        vlai_loader_destroy(loader);
        assert_int_equal(s.slots, 0);
        assert_int_equal(s.workers, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(contents_do_not_depend_on_workers), cmocka_unit_test(ranks_share_the_order),
        cmocka_unit_test(ends_with_a_short_batch),
        cmocka_unit_test(an_error_comes_with_its_batch),     cmocka_unit_test(stall_is_measured),
        cmocka_unit_test(stops_at_any_moment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
