/* The validator and the statistics tool with each allocation failing in turn. */
#include "oom.h"

#include "data/check.h"

static char last[1024]; /* sentence of the newest finding, for the message of a failure */

static void count_finding(const vlai_finding *finding, void *user)
{
    vlai_finding_text(finding, last, sizeof last);
    ++*(int64_t *)user;
}

/* What the validator finds must not depend on which allocation failed: it stops with an error instead. */
static vla_status check(void *user, vla_error *err)
{
    static int64_t whole = -1;
    static const char *set;
    int64_t told = 0;
    vlai_findings findings = {.report = count_finding, .user = &told};
    vlai_check_options options = {.depth = VLAI_CHECK_NORMAL};
    vla_status status = vlai_check(user, &options, &findings, err);
    if (!set || strcmp(user, set)) {
        whole = told;
        set = user;
    }
    if (status == VLA_OK && told != whole)
        fail_msg("%s: %lld findings instead of %lld, without an error; the last is: %s", set, (long long)told, (long long)whole, last);
    return status;
}

static void whole_sets(void **state)
{
    (void)state;
    oom_every("check v30-av1", 60, check, VLA_TEST_ROOT "/tests/golden/assets/datasets/v30-av1");
    oom_every("check v21-image", 40, check, VLA_TEST_ROOT "/tests/golden/assets/datasets/v21-image");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(whole_sets)};
    return cmocka_run_group_tests(tests, oom_set_up, NULL);
}
