/* Parts and shares of the device's test programs. */
#include "test.h"

#include "../gpu/parts.h"

static int ran, kept;

static void part(void)
{
    ran++;
    for (int i = 0; i < 5; i++)
        kept += in_share();
}

static const test_part list[] = {{"a", part}, {"ab", part}};

static int begin(char *a, char *b)
{
    char *argv[] = {"program", a, b, NULL};
    int code, argc = 1 + (a != NULL) + (b != NULL);
    test_parts.brief = test_parts.few = false;
    ran = kept = 0;
    if (!parts_begin(argc, argv, list, 2, &code))
        return code;
    parts_run(argc, argv, list, 2, NULL);
    return 0;
}

static void shares(void **state)
{
    (void)state;
    assert_int_equal(begin(NULL, NULL), 0);
    assert_true(ran == 2 && kept == 10);
    assert_int_equal(begin("a:1/2", NULL), 0);
    assert_true(ran == 1 && kept == 3);
    assert_int_equal(begin("a:2/2", "ab:9/9"), 0);
    assert_true(ran == 2 && kept == 2);
    assert_int_equal(begin("ab", "--few"), 0);
    assert_true(ran == 1 && kept == 5 && test_parts.few && test_parts.brief);
    assert_int_equal(begin("--short", NULL), 0);
    assert_true(ran == 2 && !test_parts.few && test_parts.brief);
}

static void refuses(void **state)
{
    (void)state;
    static char bad[][32] = {"b", "", "a:", "a:1", "a:0/2", "a:3/2", "a:1/0", "a:-1/2", "a:1/2x", "a:1/2:1/2", "a:1/4294967297", "a:4294967297/4294967298", ":1/1", "--lis"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(begin(bad[i], NULL), 2);
        assert_int_equal(begin("a", bad[i]), 2);
        assert_int_equal(ran, 0);
    }
    assert_int_equal(begin("--list", "b"), 0);
    assert_int_equal(ran, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(shares), cmocka_unit_test(refuses)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
