/* The integer tables: masks, positions, labels, windows. What the shape promises about masks and segments (vla/graph.h) against the tables that the attention reads otherwise:
 * both must say the same about every pair. */
#include "test.h"

#include "base/memory.h"
#include "model/wallx.h"
#include "model/wallx_mask.h"

#include <stdlib.h>

enum { ACTION = 7, IMAGE = 8, PAD = 0, MOST = 4096 };

/* Buffers by name, as the plan of a graph would have them. */
typedef struct slots {
    struct { char name[40]; int32_t data[4 * MOST]; } at[32];
    int count;
} slots;

static void *find(void *user, const char *name)
{
    slots *s = user;
    static const char *const skipped[] = {"pixels", "pixel_values", "patches"};
    for (int i = 0; i < 3; i++)
        if (!strcmp(name, skipped[i]))
            return NULL;
    for (int i = 0; i < s->count; i++)
        if (!strcmp(s->at[i].name, name))
            return s->at[i].data;
    if (s->count == 32)
        return NULL;
    snprintf(s->at[s->count].name, sizeof s->at[s->count].name, "%s", name);
    return s->at[s->count++].data;
}

static bool by_tables(const int32_t *qpos, const int32_t *rows, const int32_t *cols, int64_t i, int64_t j)
{
    const int32_t *c = cols + 4 * j;
    return j >= rows[2 * i] && j < rows[2 * i + 1] && qpos[i] >= c[0] && qpos[i] < c[1] && !(qpos[i] >= c[2] && qpos[i] < c[3]);
}

static bool by_segments(const int32_t *segments, int64_t count, bool causal, int64_t i, int64_t j)
{
    for (int64_t s = 0; s < count; s++)
        if (i >= segments[s] && i < segments[s + 1])
            return j >= segments[s] && j < segments[s + 1] && (!causal || j <= i);
    return false;
}

static void check_pairs(const int32_t *qpos, const int32_t *rows, const int32_t *cols, const int32_t *segments, int64_t count, int64_t longest,
                        bool causal, int64_t n)
{
    for (int64_t s = 0; s < count; s++)
        assert_in_range(segments[s + 1] - segments[s], 1, longest);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            if (by_tables(qpos, rows, cols, i, j) != by_segments(segments, count, causal, i, j))
                fail_msg("query %lld, key %lld: the tables say %d", (long long)i, (long long)j, by_tables(qpos, rows, cols, i, j));
}

static vlai_wallx_config config_of(vlai_wallx_attention attention, bool causal_actions)
{
    vlai_wallx_config c = {.vocab_size = 50, .attention = attention, .causal_action_attention_mask = causal_actions, .image_token_id = IMAGE,
                           .action_dim = 2, .use_state_string_representation = true};
    c.vision.spatial_merge_size = 2;
    c.vision.patch_size = 14;
    c.vision.window_size = 112;
    return c;
}

static uint64_t state_of = 9;
static int below(int n)
{
    state_of = state_of * 6364136223846793005u + 1442695040888963407u;
    return (int)(state_of >> 40) % n;
}

/* Random batches under random masks: a shape that says causal is held to it, and a plain batch must say so. */
static void test_tokens(void **state)
{
    (void)state;
    static slots s;
    static int32_t ids[MOST];
    static uint8_t marks[4][MOST];
    static float reals[MOST];
    const vlai_wallx_tokens tokens = {ACTION, 6, PAD};
    int causal = 0, other = 0;
    for (int round = 0; round < 200; round++) {
        vlai_wallx_attention kinds[] = {VLAI_WALLX_SDPA, VLAI_WALLX_FLASH, VLAI_WALLX_FLASH_MASK};
        vlai_wallx_config c = config_of(kinds[below(3)], below(4) > 0);
        int64_t offset[5] = {0}, samples = 1 + below(4), horizon = 1 + below(5);
        bool actions = below(5) > 0, marked = below(2);
        for (int64_t k = 0; k < samples; k++) {
            int text = 1 + below(40);
            offset[k + 1] = offset[k] + text + (actions ? horizon : 0);
            for (int64_t i = offset[k]; i < offset[k + 1]; i++)
                ids[i] = i < offset[k] + text ? 10 + below(20) : ACTION;
        }
        memset(marks, 0, sizeof marks);
        for (int m = 0; m < 4; m++)
            for (int64_t i = 0; marked && below(3) == 0 && i < offset[samples]; i++)
                marks[m][i] = below(12) == 0;
        for (int64_t i = 0; i < offset[samples]; i++)
            marks[1][i] = !marks[1][i];
        vlai_wallx_batch b = {.samples = samples, .offset = offset, .ids = ids, .horizon = horizon, .action = reals, .dof_mask = reals,
                              .noise = reals, .time = reals, .padding_positions = below(2) ? marks[0] : NULL,
                              .valid_flow_action_positions = below(2) ? marks[1] : NULL, .ar_predict_token_positions = below(2) ? marks[2] : NULL,
                              .ar_action_mask = below(3) ? NULL : marks[3], .ar_visible = below(2)};
        bool plain = !b.padding_positions && !b.valid_flow_action_positions && !b.ar_predict_token_positions && !b.ar_action_mask;
        vlai_wallx_shape shape;
        vla_error err;
        assert_ok(vlai_wallx_shape_of(&c, &tokens, &b, below(2), &shape, &err), err);
        if ((plain && c.causal_action_attention_mask) || c.attention == VLAI_WALLX_FLASH)
            assert_int_equal(shape.causal, 1);
        *(shape.causal ? &causal : &other) += 1;
        s.count = 0;
        vla_status filled = vlai_wallx_fill(&c, &tokens, &shape, &b, find, &s, &err);
        if (filled != VLA_OK) { /* marks with gaps may be too much for the columns of the SDPA class, and for it alone */
            assert_true(filled == VLA_E_UNSUPPORTED && c.attention == VLAI_WALLX_SDPA && !shape.causal);
            continue;
        }
        if (shape.causal)
            check_pairs(find(&s, "qpos"), find(&s, "rows"), find(&s, "cols"), find(&s, "segments"), samples, shape.longest, true,
                        shape.tokens0 + shape.tokens1);
    }
    assert_in_range(causal, 20, 180);
    assert_in_range(other, 20, 180);
}

static void test_vision(void **state)
{
    (void)state;
    static slots s;
    static const int32_t grids[][9] = {{1, 18, 18, 1, 18, 18, 1, 2, 2}, {1, 2, 30, 1, 16, 8, 1, 10, 6}, {1, 8, 8, 1, 8, 10, 1, 22, 4},
                                       {3, 4, 10, 1, 2, 2, 2, 6, 6}};
    for (size_t k = 0; k < sizeof grids / sizeof *grids; k++) {
        vlai_wallx_config c = config_of(VLAI_WALLX_FLASH_MASK, true);
        vlai_wallx_batch b = {.images = 3, .grid = grids[k]};
        vlai_wallx_shape shape;
        vla_error err;
        assert_ok(vlai_wallx_shape_plan(&c, 1, 0, 1, 3, grids[k], &shape, &err), err);
        assert_in_range(shape.patches, 1, MOST);
        s.count = 0;
        vlai_wallx_fill_vision(&c, &shape, &b, find, &s);
        const int32_t *windows = find(&s, "vision.segments.window"), *pictures = find(&s, "vision.segments.full");
        assert_int_equal(windows[shape.windows], shape.patches);
        assert_int_equal(pictures[shape.images], shape.patches);
        check_pairs(find(&s, "vision.qpos"), find(&s, "vision.rows.window"), find(&s, "vision.cols.window"), windows, shape.windows,
                    shape.longest_window, false, shape.patches);
        check_pairs(find(&s, "vision.qpos"), find(&s, "vision.rows.full"), find(&s, "vision.cols.full"), pictures, shape.images,
                    shape.longest_picture, false, shape.patches);
    }
}

/* Random marks of one sample: columns and rows against the two encodings of the reference, pair by pair. */
static void test_masks(void **state)
{
    (void)state;
    enum { LENGTH = 14 };
    int expressed = 0, refused = 0;
    for (int round = 0; round < 3000; round++) {
        uint8_t marks[5][LENGTH], dense[LENGTH * LENGTH];
        int32_t cols[4 * LENGTH], rows[2 * LENGTH], pairs[2 * LENGTH];
        int flow = below(LENGTH), horizon = below(LENGTH - flow) + 1, block = below(LENGTH), width = below(LENGTH - block) + 1;
        for (int i = 0; i < LENGTH; i++) {
            marks[0][i] = i >= flow && i < flow + horizon && round % 7 > 0;
            marks[1][i] = i < below(4);
            marks[2][i] = below(4) > 0;
            for (int k = 3; k < 5; k++) /* a block, or marks with gaps */
                marks[k][i] = round % 2 ? i >= block && i < block + width && !marks[0][i] : below(5) == 0;
        }
        vlai_wallx_mask_sample s = {LENGTH, marks[0], below(2) ? marks[1] : NULL, below(3) ? NULL : marks[2], below(2) ? marks[3] : NULL,
                                    below(2) ? marks[4] : NULL, below(2)};
        vlai_wallx_config c = config_of(below(2) ? VLAI_WALLX_SDPA : VLAI_WALLX_FLASH_MASK, below(2));
        bool causal = c.causal_action_attention_mask, fits = vlai_wallx_mask(&c, &s, cols, rows);
        vlai_wallx_mask_dense(causal, &s, dense);
        vlai_wallx_mask_pairs(causal, &s, pairs);
        if (c.attention == VLAI_WALLX_FLASH_MASK)
            assert_true(fits);
        *(fits ? &expressed : &refused) += 1;
        for (int i = 0; fits && i < LENGTH; i++)
            for (int j = 0; j < LENGTH; j++) {
                bool wanted = c.attention == VLAI_WALLX_SDPA ? dense[i * LENGTH + j] : i >= j ? i < pairs[2 * j] : i >= pairs[2 * j + 1];
                int32_t qpos[LENGTH];
                for (int k = 0; k < LENGTH; k++)
                    qpos[k] = k;
                if (by_tables(qpos, rows, cols, i, j) != wanted)
                    fail_msg("round %d, query %d, key %d: wanted %d", round, i, j, wanted);
            }
    }
    assert_true(expressed > 2000 && refused > 20);
}

/* Values of the reference: update_joint_attention_flash_mask on "..ff.aa." and get_rope_index. */
static void test_reference_values(void **state)
{
    (void)state;
    const uint8_t flow[] = {0, 0, 1, 1, 0, 0, 0, 0}, discrete[] = {0, 0, 0, 0, 0, 1, 1, 0}, none[8] = {0};
    vlai_wallx_mask_sample s = {.length = 8, .is_action = flow, .ar_action_mask = discrete, .ar_visible = true};
    int32_t pairs[16];
    const int32_t visible[] = {8, 0, 8, 1, 7, 2, 7, 2, 8, 4, 7, 2, 7, 2, 8, 7}, apart[] = {8, 0, 8, 1, 4, 2, 4, 2, 8, 4, 7, 5, 7, 5, 8, 7};
    vlai_wallx_mask_pairs(true, &s, pairs);
    assert_memory_equal(pairs, visible, sizeof pairs);
    s.ar_visible = false;
    vlai_wallx_mask_pairs(true, &s, pairs);
    assert_memory_equal(pairs, apart, sizeof pairs);
    /* A sample without discrete tokens: the flow block alone, bidirectional whatever the configuration says. */
    const int32_t alone[] = {8, 0, 8, 1, 4, 2, 4, 2, 8, 4, 8, 5, 8, 6, 8, 7};
    s.ar_visible = true;
    s.ar_action_mask = none;
    vlai_wallx_mask_pairs(true, &s, pairs);
    assert_memory_equal(pairs, alone, sizeof pairs);
    /* All that follows the flow block moves with it; without one the last token does. */
    const uint8_t late[] = {0, 0, 0, 0, 1, 1, 0, 0}, early[] = {0, 1, 1, 0, 0, 0, 0, 0};
    for (int k = 0; k < 2; k++) {
        int32_t pos[24];
        const int32_t moved[2][8] = {{0, 1, 2, 3, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5, 6, 1}};
        for (int i = 0; i < 24; i++)
            pos[i] = i % 8;
        vlai_wallx_shift_positions(k ? none : late, early, 8, pos, 8);
        for (int axis = 0; axis < 3; axis++)
            assert_memory_equal(pos + 8 * axis, moved[k], sizeof moved[k]);
    }
    /* Two frames of one picture stand at the same places: 2 x 4 x 4 patches, 2 x 2 x 2 merged. */
    const int32_t ids[] = {10, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 11}, grid[] = {2, 4, 4};
    const int32_t wanted[3][10] = {{0, 1, 1, 1, 1, 1, 1, 1, 1, 3}, {0, 1, 1, 2, 2, 1, 1, 2, 2, 3}, {0, 1, 2, 1, 2, 1, 2, 1, 2, 3}};
    vlai_wallx_config c = config_of(VLAI_WALLX_FLASH_MASK, true);
    vlai_wallx_batch b = {.ids = ids, .images = 1, .grid = grid};
    int64_t image = 0;
    int32_t pos[30];
    vlai_wallx_positions(&c, &b, 0, 10, &image, pos, 10);
    assert_memory_equal(pos, wanted, sizeof pos);
}

/* A label behind an action token is predicted by an action row, which stands behind the rows of stream 0. */
static void test_labels(void **state)
{
    (void)state;
    static slots s;
    const int32_t ids[] = {10, 11, ACTION, ACTION, 12, 13}, labels[] = {-100, 21, -100, -100, 22, 23};
    const int64_t offset[] = {0, 6};
    const float mask[] = {0.5f, 0.25f, 0.5f, 1}, reals[4] = {0};
    vlai_wallx_config c = config_of(VLAI_WALLX_FLASH_MASK, true);
    vlai_wallx_batch b = {.samples = 1, .offset = offset, .ids = ids, .labels = labels, .horizon = 2, .action = reals, .dof_mask = mask, .noise = reals, .time = reals};
    const vlai_wallx_tokens tokens = {ACTION, 6, PAD};
    vlai_wallx_shape shape;
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_wallx_shape_of(&c, &tokens, &b, false, &shape, &err), err);
    assert_true(shape.labels == 3 && shape.action_labels == 1 && shape.tokens0 == 4);
    assert_true(shape.flow_scale == 2.25 / 4); /* no weight is zero: the mean is over the elements */
    s.count = 0;
    assert_ok(vlai_wallx_fill(&c, &tokens, &shape, &b, find, &s, &err), err);
    const int32_t rows[] = {0, 5, 2}, next[] = {21, 22, 23};
    assert_memory_equal(find(&s, "label_rows"), rows, sizeof rows);
    assert_memory_equal(find(&s, "label_ids"), next, sizeof next);
    const float holed[] = {0.5f, 0, 0.5f, 1};
    b.dof_mask = holed;
    assert_ok(vlai_wallx_shape_of(&c, &tokens, &b, false, &shape, &err), err);
    assert_true(shape.flow_scale == 1);
    const int32_t beyond[] = {-100, 50, -100, -100, 22, 23}; /* the embedding has 50 rows */
    b.labels = beyond;
    assert_fails(vlai_wallx_shape_of(&c, &tokens, &b, false, &shape, &err), VLA_E_INVALID, err, "label 50, the embedding has 50 rows");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_tokens), cmocka_unit_test(test_masks), cmocka_unit_test(test_reference_values),
                                       cmocka_unit_test(test_labels), cmocka_unit_test(test_vision)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
