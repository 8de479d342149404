/* The model of scaling, on steps whose times can be written down. */
#include "test.h"

#include "train/scaling.h"

#include <math.h>

static void assert_near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-12 * (1 + fabs(want))))
        fail_msg("%.15g, wanted %.15g", got, want);
}

/* Two ranks, no latency, 1 byte per second: a bucket of S bytes takes S / 2 seconds. */
static const vlai_scaling_net two = {.ranks = 2, .nodes = 1, .reduce = 1, .gather = 1};

static void times_of_collectives(void **state)
{
    (void)state;
    assert_near(vlai_scaling_collective(&two, 8, 1), 4);
    assert_near(vlai_scaling_collective(&(vlai_scaling_net){.ranks = 1}, 8, 1), 0);
    vlai_scaling_net n = vlai_scaling_cluster(8, 8, 400e9, 50e9);
    assert_int_equal(n.nodes, 1);
    assert_near(n.reduce, 400e9);
    assert_near(vlai_scaling_collective(&n, 80e6, n.reduce), 8.4e-6 + 7 * 3.4e-6 + 70e6 / 400e9);
    n = vlai_scaling_cluster(64, 8, 400e9, 12.5e9);
    assert_int_equal(n.nodes, 8);
    assert_near(n.gather, 12.5e9);
    assert_near(vlai_scaling_collective(&n, 64e6, n.gather), 8.4e-6 + 56 * 3.4e-6 + 7 * 9.6e-6 + 63e6 / 12.5e9);
    assert_near(vlai_scaling_cluster(16, 8, 10e9, 50e9).reduce, 10e9); /* the machine itself is slower */
}

/* Everything fits under the passes but the bucket that becomes ready last, and the first that is needed. */
static void hidden(void **state)
{
    (void)state;
    const vlai_scaling_bucket buckets[] = {{2, 4, 5, 20}, {2, 6, 0, 8}, {4, 2, 7, 15}};
    const vlai_scaling_step s = {10, 20, 6, buckets, 3, true, true};
    vlai_scaling r = vlai_scaling_model(&s, &two);
    assert_near(r.forward_wait, 3);  /* bucket 1 is needed at once and there after 3; bucket 0 after 5, bucket 2 after 6 */
    assert_near(r.backward_wait, 1); /* buckets 1 and 2 are done at 9 and 17; bucket 0 begins at 20 */
    assert_near(r.update, 3);
    assert_near(r.exposed, 4);
    assert_near(r.step, 10 + 20 + 3 + 4);
}

/* More than the passes hide: collectives queue up. */
static void queued(void **state)
{
    (void)state;
    const vlai_scaling_bucket buckets[] = {{10, 8, 0, 10}, {10, 8, 1, 9}, {10, 8, 2, 2}};
    const vlai_scaling_step s = {4, 10, 2, buckets, 3, true, true};
    vlai_scaling r = vlai_scaling_model(&s, &two);
    assert_near(r.forward_wait, 10); /* there at 4, 8, 12, needed at 0, 1, 2 */
    assert_near(r.backward_wait, 9); /* 2 to 7, 9 to 14, 14 to 19 */
    assert_near(r.step, 4 + 10 + 1 + 19);
    /* The last bucket is exposed although its last gradient came before the end of the pass. */
    const vlai_scaling_bucket early = {6, 0, 4, 1};
    assert_near(vlai_scaling_model(&(vlai_scaling_step){4, 10, 0, &early, 1, true, true}, &two).backward_wait, 3);
}

static void other_forms(void **state)
{
    (void)state;
    const vlai_scaling_bucket buckets[] = {{2, 4, 5, 20}, {2, 6, 0, 20}, {4, 2, 7, 15}};
    vlai_scaling_step s = {10, 20, 6, buckets, 3, false, true};
    vlai_scaling r = vlai_scaling_model(&s, &two);
    assert_near(r.exposed, (2 + 2 + 4 + 4 + 6 + 2) / 2.0); /* nothing overlaps */
    assert_near(r.step, 10 + 20 + 3 + 10);
    s.overlap = true;
    s.zero = false;
    r = vlai_scaling_model(&s, &two);
    assert_near(r.forward_wait, 0);
    assert_near(r.backward_wait, 4); /* bucket 2 from 15 to 19, buckets 0 and 1, which are ready at once, behind the pass */
    assert_near(r.update, 6);
    vlai_scaling_net one = vlai_scaling_cluster(1, 8, 1, 1);
    r = vlai_scaling_model(&s, &one);
    assert_near(r.step, 36);
    assert_near(r.exposed, 0);
    s.zero = true;
    vlai_scaling_net slow = two;
    slow.start = 0.5;
    slow.hop = 0.25;
    r = vlai_scaling_model(&s, &slow);
    assert_near(r.norm, 2 * 0.75);
    assert_near(r.forward_wait, 3.75);        /* the first bucket */
    assert_near(r.backward_wait, 2 * 1.75);   /* 15 to 17.75; 20 to 21.75, 21.75 to 23.5 */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(times_of_collectives), cmocka_unit_test(hidden), cmocka_unit_test(queued),
                                       cmocka_unit_test(other_forms)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
