/* Angles and quaternions that the validator recognises by the names of dimensions. */
#include "test.h"

#include "data/check.h"

#include <math.h>

typedef struct {
    int jumps, norms;
    int64_t frame, dim;
    double found;
} told;

static void note(const vlai_finding *f, void *user)
{
    told *t = user;
    t->jumps += !strcmp(f->kind, "angle-jump");
    t->norms += !strcmp(f->kind, "quaternion-norm");
    t->frame = f->frame;
    t->dim = f->dim;
    t->found = f->found.real;
    assert_int_equal(f->level, 'W');
    assert_string_equal(f->column, "action");
}

static void look(vlai_angles *a, const vla_feature *feature, const double *x, int64_t row, int64_t frame, told *t)
{
    vlai_findings findings = {.report = note, .user = t};
    vlai_finding at = vlai_finding_warning("", "data.parquet");
    at.column = "action";
    at.frame = frame;
    vlai_angles_look(a, feature, x, row, frame, at, &findings);
}

static void jumps(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    const char *names[] = {"x", "Wrist_Yaw", "gripper"};
    const vla_feature feature = {.name = "action", .dim = 3, .names = names, .name_count = 3};
    vlai_angles a;
    told t = {0};
    assert_ok(vlai_angles_make(&feature, &a, &err), err);
    const double rows[][3] = {{9, 3.1, 0}, {-9, 3.0, 9}, {9, -2.9, 0}, {0, 3.0, 0}};
    look(&a, &feature, rows[0], 0, 0, &t);
    look(&a, &feature, rows[1], 1, 1, &t); /* x and the gripper may jump */
    assert_int_equal(t.jumps, 0);
    look(&a, &feature, rows[2], 2, 0, &t); /* another episode begins */
    assert_int_equal(t.jumps, 0);
    look(&a, &feature, rows[3], 3, 1, &t);
    assert_int_equal(t.jumps, 1);
    assert_true(t.dim == 1 && t.frame == 1 && fabs(t.found - 5.9) < 1e-12);
    look(&a, &feature, rows[2], 4, 2, &t); /* said once */
    assert_true(t.jumps == 1 && t.norms == 0);
    vlai_angles_fini(&a);
}

static void quaternions(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    const char *names[] = {"x", "qx", "qy", "qz", "qw"};
    vla_feature feature = {.name = "action", .dim = 5, .names = names, .name_count = 5};
    vlai_angles a;
    told t = {0};
    assert_ok(vlai_angles_make(&feature, &a, &err), err);
    const double good[] = {7, 0.6, 0, 0.8, 0}, bad[] = {0, 0.6, 0, 0.8, 1};
    look(&a, &feature, good, 0, 0, &t);
    assert_int_equal(t.norms, 0);
    look(&a, &feature, bad, 1, 1, &t);
    look(&a, &feature, bad, 2, 2, &t);
    assert_true(t.norms == 1 && t.dim == 1 && fabs(t.found - sqrt(2)) < 1e-12);
    vlai_angles_fini(&a);
    /* Without names nothing is guessed. */
    feature.name_count = 0;
    feature.names = NULL;
    assert_ok(vlai_angles_make(&feature, &a, &err), err);
    look(&a, &feature, bad, 0, 0, &t);
    assert_int_equal(t.norms, 1);
    vlai_angles_fini(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(jumps), cmocka_unit_test(quaternions)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
