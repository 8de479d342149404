/* Every two launches that touch the same bytes, one of them writing, are in order: by their lane or by a chain of waits. */
#include "test.h"

#include "exec/schedule.h"

#include <stdlib.h>
#include <string.h>

enum { LAUNCHES = 120, SPANS = 4 };

static uint32_t next(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

static bool conflict(const vlai_span *a, const vlai_span *b)
{
    for (int i = 0; i < SPANS; i++)
        for (int j = 0; j < SPANS; j++)
            if ((a[i].write || b[j].write) && a[i].first < b[j].end && b[j].first < a[i].end)
                return true;
    return false;
}

static void random_launches(void **state)
{
    (void)state;
    static vlai_span spans[LAUNCHES][SPANS];
    static bool before[LAUNCHES][LAUNCHES]; /* before[i][j]: j is over when i starts */
    int waits = 0, conflicts = 0;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        uint64_t s = seed;
        vla_error err;
        vlai_schedule schedule = {0};
        memset(before, 0, sizeof before);
        for (int i = 0; i < LAUNCHES; i++) {
            int lane = next(&s) % 8 < 5 ? 0 : 1 + (int)(next(&s) % (VLAI_LANES - 1));
            for (int k = 0; k < SPANS; k++) {
                uintptr_t first = 1000 + next(&s) % 400;
                spans[i][k] = (vlai_span){first, first + 1 + next(&s) % 30, k == 0};
            }
            assert_ok(vlai_schedule_add(&schedule, lane, spans[i], SPANS, &err), err);
            int edges[VLAI_LANES];
            for (int l = 0; l < VLAI_LANES; l++)
                edges[l] = schedule.waits[i][l];
            assert_int_equal(edges[lane], -1);
            for (int j = i - 1; j >= 0 && edges[lane] < 0; j--)
                if (schedule.lanes[j] == lane)
                    edges[lane] = j;
            for (int e = 0; e < VLAI_LANES; e++)
                if (edges[e] >= 0) {
                    before[i][edges[e]] = true;
                    for (int j = 0; j < LAUNCHES; j++)
                        before[i][j] |= before[edges[e]][j];
                }
            for (int l = 0; l < VLAI_LANES; l++)
                if (schedule.waits[i][l] >= 0) {
                    waits++;
                    assert_int_equal(schedule.lanes[schedule.waits[i][l]], l);
                    assert_true(schedule.signals[schedule.waits[i][l]]);
                }
            for (int j = 0; j < i; j++)
                if (conflict(spans[i], spans[j])) {
                    conflicts++;
                    if (!before[i][j])
                        fail_msg("seed %d: launches %d and %d share bytes and have no order", (int)seed, j, i);
                }
        }
        vlai_schedule_fini(&schedule);
    }
    assert_true(waits > 1000 && conflicts > 10000);
}

/* Two lanes that share nothing, or only read the same, never wait. */
static void independent(void **state)
{
    (void)state;
    vlai_schedule s = {0};
    vla_error err;
    for (int i = 0; i < 100; i++) {
        uintptr_t own = i % 2 ? 5000 : 9000;
        vlai_span spans[3] = {{100, 200, false}, {own, own + 64, true}, {7, 7, true}};
        assert_ok(vlai_schedule_add(&s, i % 2, spans, 3, &err), err);
        for (int l = 0; l < VLAI_LANES; l++)
            assert_int_equal(s.waits[i][l], -1);
    }
    /* Then lane 0 reads what lane 1 wrote: one wait, and no second one for the same. */
    vlai_span spans[1] = {{5010, 5020, false}};
    assert_ok(vlai_schedule_add(&s, 0, spans, 1, &err), err);
    assert_int_equal(s.waits[100][1], 99);
    assert_ok(vlai_schedule_add(&s, 0, spans, 1, &err), err);
    assert_int_equal(s.waits[101][1], -1);
    vlai_schedule_fini(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_launches), cmocka_unit_test(independent)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
