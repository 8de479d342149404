/* Plans that a run over a LIBERO-shaped set makes, and the rows that rounding adds: few, and below one percent. */
#include "test.h"

#include "base/memory.h"
#include "base/rng.h"
#include "model/wallx.h"

#include <string.h>

enum { TASKS = 40, FIXED = 70, PICTURES = 2, UNITS = 81, HORIZON = 10, BATCHES = 1500, MOST = 64, LENGTH = 512, KEPT = 32 };

static vlai_rng_key key = {.seed = 5, .stream = VLAI_RNG_SYNTH};
static uint32_t drawn;

static int64_t draw(int64_t low, int64_t high)
{
    return low + (int64_t)(vlai_rng_uniform(&key, drawn++) * (float)(high - low + 1));
}

/* Text tokens of a prompt: fixed words, an instruction of 7 to 20, eight state numbers of one to three digits each. */
static int64_t text_tokens(const int64_t *tasks)
{
    int64_t n = FIXED + tasks[draw(0, TASKS - 1)];
    for (int i = 0; i < 8; i++) {
        int64_t percent = draw(0, 99);
        n += percent < 5 ? 1 : percent < 45 ? 2 : 3;
    }
    return n;
}

static void few_plans(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_wallx_config c;
    assert_ok(vlai_wallx_config_load(VLA_TEST_ROOT "/configs/wall-oss-0.5", &c, &err), err);
    c.vocab_size = 151936;
    const vlai_wallx_tokens tokens = {.action = 151934, .propri = 151933, .pad = 151643};
    static const int64_t sizes[] = {4, 8, 16, 26, 32, 64};
    static int32_t grid[3 * PICTURES * MOST], ids[MOST * LENGTH];
    static int64_t offset[MOST + 1];
    int64_t tasks[TASKS];
    for (int i = 0; i < TASKS; i++)
        tasks[i] = draw(7, 20);
    for (int i = 0; i < PICTURES * MOST; i++) {
        grid[3 * i] = 1;
        grid[3 * i + 1] = grid[3 * i + 2] = 18;
    }
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        vlai_wallx_shape seen[KEPT];
        int64_t plans = 0, exact = 0, rounded = 0;
        for (int k = 0; k < BATCHES; k++) {
            vlai_wallx_batch b = {.samples = sizes[s], .offset = offset, .ids = ids, .images = PICTURES * sizes[s], .grid = grid, .horizon = HORIZON};
            for (int64_t i = 0; i < sizes[s]; i++) {
                int64_t text = text_tokens(tasks), at = offset[i];
                for (int64_t t = 0; t < text; t++)
                    ids[at++] = 100;
                for (int64_t t = 0; t < PICTURES * UNITS; t++)
                    ids[at++] = (int32_t)c.image_token_id;
                for (int64_t t = 0; t < HORIZON; t++)
                    ids[at++] = tokens.action;
                offset[i + 1] = at;
            }
            vlai_wallx_shape shape;
            memset(&shape, 0, sizeof shape);
            assert_ok(vlai_wallx_shape_of(&c, &tokens, &b, true, &shape, &err), err);
            exact += offset[sizes[s]] - sizes[s] * HORIZON;
            rounded += shape.tokens0;
            int64_t at = 0;
            while (at < plans && memcmp(&seen[at], &shape, sizeof shape) != 0)
                at++;
            if (at < plans)
                continue;
            assert_true(plans < KEPT);
            seen[plans++] = shape;
        }
        double waste = (double)rounded / (double)exact - 1;
        print_message("batch %lld: %lld plans, %.2f %% of the rows are added\n", (long long)sizes[s], (long long)plans, 100 * waste);
        assert_true(plans <= 6);
        assert_true(waste < 0.01);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(few_plans)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
