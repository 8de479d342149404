/* The forecast of a run's memory: snapshots of all ranks that share a host need room together. */
#include "test.h"
#include "toy.h"

#include "ckpt/ckpt.h"
#include "train/run_memory.h"

enum { BATCH = 4 };

static vlai_run_memory forecast(int world, int here, int zero, size_t available)
{
    vla_error err = VLA_ERROR_INIT;
    toy t = {.seed = 3, .fail_at = -1};
    vla_model model = toy_model(&t);
    vla_adamw_options adamw = {sizeof adamw, 0.9, 0.95, 1e-8, 1e-8, 1.0, 1};
    void *slots[BATCH];
    vlai_run_memory m = {.process = 1000000, .loader = 5000};
    vlai_run_settings s = {.batch = BATCH, .accumulation = 1, .numerics = VLA_FP32, .layout = VLA_MEMORY_LIFETIMES, .threads = 1,
                           .shard = {sizeof(vla_shard_options), 0, world, 400, zero}, .ranks_here = here};
    for (int i = 0; i < BATCH; i++) {
        vla_sample_key key = {.position = (uint64_t)i};
        assert_ok(toy_slot_create(&t, &slots[i], &err), err);
        assert_ok(toy_read(&t, NULL, &key, slots[i], &err), err);
    }
    assert_ok(vlai_run_memory_plan(&model, &adamw, slots, &s, available, &m, &err), err);
    for (int i = 0; i < BATCH; i++)
        toy_slot_destroy(&t, slots[i]);
    return m;
}

/* A snapshot is taken where an eighth of what is left holds it: of one rank, of four that share the moments, of four of which the
 * first alone writes. */
static void snapshots_share_the_host(void **state)
{
    (void)state;
    static const struct {
        int world, here, zero;
    } rows[] = {{1, 1, 1}, {4, 1, 1}, {4, 4, 1}, {4, 2, 1}, {4, 4, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        vlai_run_memory m = forecast(rows[i].world, rows[i].here, rows[i].zero, 0);
        assert_int_equal(m.snapshot, 0);
        assert_int_equal(m.checkpoint, m.weights + m.optimizer);
        size_t here = (size_t)rows[i].here, others = rows[i].zero ? (here - 1) * m.optimizer : 0;
        /* the padding of shards is not written: this is a little more than enough */
        size_t most = m.checkpoint + others, held = here * m.total - m.process, enough = held + 8 * most;
        assert_int_equal(forecast(rows[i].world, rows[i].here, rows[i].zero, enough).snapshot, m.checkpoint);
        vlai_run_memory less = forecast(rows[i].world, rows[i].here, rows[i].zero, held + 8 * (m.checkpoint + others / 4));
        assert_int_equal(less.snapshot, here > 1 && rows[i].zero ? 0 : m.checkpoint);
        assert_int_equal(less.total, m.total + less.snapshot);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(snapshots_share_the_host)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
