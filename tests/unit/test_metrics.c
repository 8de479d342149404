/* Lines of metrics.jsonl, as JSON. */
#include "folder.h"
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "train/metrics.h"

#include <jansson.h>
#include <math.h>

/* Any number of groups fits a line, their names are the user's, and every value reads back as the same double. */
static void long_lines(void **state)
{
    (void)state;
    enum { GROUPS = 1000 };
    static char names[GROUPS][64];
    static vla_metric more[GROUPS];
    for (int i = 0; i < GROUPS; i++) {
        snprintf(names[i], sizeof names[i], "lr_group/a \"quoted\" name that is not short \\ %d", i);
        more[i] = (vla_metric){names[i], 1.0 / (i + 3)};
    }
    more[1].value = NAN;
    vla_record r = {.kind = VLA_RECORD_STEP, .step = 1, .loss = 100, .rate = 1e-5 / 3, .more = more, .more_count = GROUPS};
    vla_error err = VLA_ERROR_INIT;
    vlai_metrics *m;
    assert_ok(vlai_metrics_open(root, 0, &m, &err), err);
    assert_ok(vlai_metrics_put(m, &r, &err), err);
    r.step = 2;
    r.more_count = 0;
    assert_ok(vlai_metrics_put(m, &r, &err), err);
    vlai_metrics_close(m);
    char *text;
    size_t size;
    assert_ok(vlai_read_file(at(VLAI_METRICS_FILE), 0, &text, &size, &err), err);
    char *end = strchr(text, '\n');
    assert_non_null(end);
    json_t *first = json_loadb(text, (size_t)(end - text), 0, NULL), *second = json_loads(end + 1, 0, NULL);
    assert_non_null(first);
    assert_non_null(second);
    assert_int_equal(json_integer_value(json_object_get(second, "step")), 2);
    assert_true(json_number_value(json_object_get(first, "loss")) == 100);
    assert_true(json_number_value(json_object_get(first, "lr")) == 1e-5 / 3);
    assert_true(json_is_null(json_object_get(first, names[1])));
    for (int i = 2; i < GROUPS; i++)
        assert_true(json_number_value(json_object_get(first, names[i])) == more[i].value);
    json_decref(first);
    json_decref(second);
    vlai_free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(long_lines)};
    return cmocka_run_group_tests_name("metrics", tests, make_root, drop_root);
}
