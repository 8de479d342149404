/* A store shared out over ranks: buckets and slices cover everything once, state is kept where it belongs, and N ranks that
 * are stepped one after the other by their own plans get the bits of one rank that accumulates their micro-batches. */
#include "test.h"

#include "exec/plan.h"
#include "exec/shard.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 6, WIDTH = 20, INNER = 37, PADDED = 64, WORLDS = 5, MODES = 5 };

static const int worlds[WORLDS] = {1, 2, 3, 4, 8};
static const vla_numerics modes[MODES] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR, VLA_BF16_PLAIN, VLA_FP64};

/* Tensors of less than 128 elements and of many, padded ones, precise ones between, an empty one, one that no loss reaches and
 * one whose gradient is exactly zero. */
static const struct {
    const char *name;
    vla_dtype dtype;
    int rank;
    int64_t shape[2], run, pitch;
} params[] = {
    {"embed", VLA_COMPUTE, 2, {11, WIDTH}, 0, 0},
    {"norm.0", VLA_PRECISE, 1, {WIDTH, 0}, 0, 0},
    {"up.0", VLA_COMPUTE, 2, {2 * INNER, WIDTH}, INNER * WIDTH, PADDED * WIDTH},
    {"up.0.bias", VLA_COMPUTE, 1, {2 * INNER, 0}, INNER, PADDED},
    {"down.0", VLA_COMPUTE, 2, {WIDTH, INNER}, INNER, PADDED},
    {"empty", VLA_COMPUTE, 1, {0, 0}, 0, 0},
    {"unused", VLA_COMPUTE, 1, {150, 0}, 0, 0},
    {"norm.1", VLA_PRECISE, 1, {WIDTH, 0}, 0, 0},
    {"up.1", VLA_COMPUTE, 2, {2 * PADDED, WIDTH}, 0, 0},
    {"down.1", VLA_COMPUTE, 2, {WIDTH, PADDED}, 0, 0},
    {"touched", VLA_COMPUTE, 1, {77, 0}, 0, 0},
    {"head", VLA_PRECISE, 2, {3, WIDTH}, 0, 0},
    {"head.bias", VLA_PRECISE, 1, {3, 0}, 0, 0},
};
enum { COUNT = sizeof params / sizeof *params };

static vla_store *make_store(int rank, int world, int zero, size_t bucket_bytes)
{
    vla_store *s;
    vla_error err;
    assert_ok(vla_store_create(&s, &err), err);
    for (int i = 0; i < COUNT; i++) {
        assert_ok(vla_store_add(s, params[i].name, params[i].dtype, params[i].rank, params[i].shape, i % 2, &err), err);
        if (params[i].run)
            assert_ok(vla_store_pad(s, params[i].name, params[i].run, params[i].pitch, &err), err);
    }
    vla_shard_options o = {sizeof o, rank, world, bucket_bytes, zero};
    assert_ok(vla_store_shard(s, &o, &err), err);
    return s;
}

static float weight(size_t i, int64_t k)
{
    return (float)(((k + 1) * 7919 + (int64_t)i * 104729) % 2003 - 1001) * 0x1.23456p-11f;
}

static void set_weights(vla_store *s)
{
    for (size_t i = 0; i < COUNT; i++) {
        int64_t n = vla_store_tensor(s, VLA_STORE_WEIGHT, i).elements, cut = n / 3;
        float *x = malloc((size_t)n * sizeof *x + 1);
        assert_non_null(x);
        for (int64_t k = 0; k < n; k++)
            x[k] = weight(i, k);
        vla_store_set_float(s, i, 0, cut, x);
        vla_store_set_float(s, i, cut, n - cut, x + cut);
        free(x);
    }
}

/* ---- layout ---- */

static void check_buckets(const vla_store *s, size_t bucket_bytes)
{
    size_t seen[COUNT] = {0}, size[2] = {vla_dtype_size(s->params[0].dtype[VLA_STORE_WEIGHT]), vla_dtype_size(s->params[1].dtype[VLA_STORE_WEIGHT])};
    int64_t end[2] = {0, 0}, shards[2] = {0, 0};
    for (size_t b = 0; b < s->n_buckets; b++) {
        const vlai_store_bucket *k = &s->buckets[b];
        int c = k->symbolic == VLA_PRECISE;
        int64_t reached = k->first;
        assert_true(k->count > 0 && k->length > 0 && k->length % (128 * s->world) == 0);
        assert_int_equal(k->first, end[c]);
        assert_int_equal(k->shard, shards[c]);
        end[c] += k->length;
        shards[c] += k->length / s->world;
        for (size_t m = 0; m < k->count; m++) {
            const vlai_param *p = &s->params[k->members[m]];
            assert_int_equal(p->bucket, b);
            assert_true(p->symbolic == k->symbolic && p->position % 128 == 0 && p->position >= reached);
            reached = p->position + p->stored;
            seen[k->members[m]]++;
        }
        assert_true(reached <= k->first + k->length);
        assert_true(k->count == 1 || (size_t)(reached - k->first) * size[c] <= bucket_bytes);
        assert_int_equal(vlai_bucket_offset(s, VLA_STORE_WEIGHT, k) % 256, 0);
    }
    for (size_t i = 0; i < COUNT; i++)
        assert_int_equal(seen[i], s->params[i].elements > 0);
}

/* Every stored element and every element of the checkpoint belongs to one rank; slices of a kind do not meet in memory. */
static void check_slices(vla_store *const *ranks, int world, int zero)
{
    for (size_t i = 0; i < COUNT; i++) {
        int64_t stored = 0, elements = 0;
        for (int r = 0; r < world; r++) {
            const vlai_param *p = &ranks[r]->params[i];
            int64_t first, count;
            vla_store_slice(ranks[r], VLA_STORE_M, i, &first, &count);
            if (world == 1 || !zero) {
                assert_true(p->first == 0 && p->count == p->stored && first == 0 && count == p->elements);
                continue;
            }
            if (p->count)
                assert_int_equal(p->first, stored);
            if (count)
                assert_int_equal(first, elements);
            assert_true(p->first % 128 == 0);
            stored += p->count;
            elements += count;
            vla_store_slice(ranks[r], VLA_STORE_WEIGHT, i, &first, &count);
            assert_true(first == 0 && count == p->elements);
        }
        assert_true(world == 1 || !zero || (stored == ranks[0]->params[i].stored && elements == ranks[0]->params[i].elements));
    }
    for (int r = 0; r < world; r++)
        for (int k = 0; k < VLA_STORE_KINDS; k++)
            for (size_t i = 0; i < COUNT; i++)
                for (size_t j = 0; j < COUNT; j++) {
                    const vlai_param *p = &ranks[r]->params[i], *q = &ranks[r]->params[j];
                    size_t n = (size_t)vlai_param_kept(p, k) * vla_dtype_size(p->dtype[k]), m = (size_t)vlai_param_kept(q, k) * vla_dtype_size(q->dtype[k]);
                    assert_true(n == 0 || p->offset[k] + n <= ranks[r]->bytes[k]);
                    assert_true(n == 0 || p->offset[k] % 256 == 0);
                    assert_true(i == j || n == 0 || m == 0 || p->offset[k] + n <= q->offset[k] || q->offset[k] + m <= p->offset[k]);
                }
}

static void test_layout(void **state)
{
    (void)state;
    static const size_t sizes[] = {1, 6000, 1 << 30};
    static const vla_store_use uses[] = {VLA_STORE_TRAIN, VLA_STORE_ACCUMULATE, VLA_STORE_STEP};
    for (int w = 0; w < WORLDS; w++)
        for (int zero = 0; zero < 2; zero++)
            for (int m = 0; m < MODES; m++)
                for (int b = 0; b < 3; b++) {
                    vla_store *ranks[8];
                    vla_error err;
                    for (int r = 0; r < worlds[w]; r++) {
                        ranks[r] = make_store(r, worlds[w], zero, sizes[b]);
                        size_t before[VLA_STORE_KINDS];
                        for (int k = 0; k < VLA_STORE_KINDS; k++)
                            before[k] = vla_store_bytes(ranks[r], k, modes[m], uses[(m + b) % 3]);
                        assert_ok(vla_store_allocate(ranks[r], modes[m], uses[(m + b) % 3], &err), err);
                        for (int k = 0; k < VLA_STORE_KINDS; k++)
                            assert_int_equal(ranks[r]->bytes[k], before[k]);
                        if (worlds[w] > 1)
                            check_buckets(ranks[r], sizes[b]);
                        assert_int_equal(ranks[r]->bytes[VLA_STORE_M], ranks[0]->bytes[VLA_STORE_M]);
                    }
                    check_slices(ranks, worlds[w], zero);
                    if (zero && worlds[w] > 1 && modes[m] == VLA_FP32) /* moments as the weights, but a part of each bucket */
                        assert_int_equal(ranks[0]->bytes[VLA_STORE_M] * (size_t)worlds[w], ranks[0]->bytes[VLA_STORE_WEIGHT]);
                    for (int r = 0; r < worlds[w]; r++)
                        vla_store_destroy(ranks[r]);
                }
}

/* Values go to and come from the slices alone, and the weights of all ranks are those of a whole store. */
static void test_values(void **state)
{
    (void)state;
    vla_error err;
    for (int m = 0; m < MODES; m++)
        for (int world = 2; world <= 3; world++)
            for (int r = 0; r < world; r++) {
                vla_store *whole = make_store(0, 1, 1, 1), *s = make_store(r, world, 1, 6000);
                assert_ok(vla_store_allocate(whole, modes[m], VLA_STORE_STEP, &err), err);
                assert_ok(vla_store_allocate(s, modes[m], VLA_STORE_STEP, &err), err);
                set_weights(whole);
                set_weights(s);
                for (size_t i = 0; i < COUNT; i++) {
                    vla_tensor t = vla_store_tensor(s, VLA_STORE_WEIGHT, i), all = vla_store_tensor(whole, VLA_STORE_WEIGHT, i);
                    int64_t first, count, n = t.elements;
                    size_t size = vla_dtype_size(t.dtype), moment = vla_dtype_size(s->params[i].dtype[VLA_STORE_M]);
                    assert_memory_equal(t.data, all.data, (size_t)s->params[i].stored * size);
                    vla_store_slice(s, VLA_STORE_V, i, &first, &count);
                    assert_true(count == n || !vla_store_tensor(s, VLA_STORE_V, i).data);
                    char *in = malloc((size_t)n * 8 + 8), *out = calloc((size_t)n + 1, 8);
                    assert_true(in && out);
                    for (size_t k = 0; k < (size_t)n * moment; k++)
                        in[k] = (char)(k * 31 + i);
                    assert_ok(vla_store_write(s, VLA_STORE_V, i, first, count, in + (size_t)first * moment, &err), err);
                    assert_ok(vla_store_read(s, VLA_STORE_V, i, first, count, out, &err), err);
                    assert_memory_equal(out, in + (size_t)first * moment, (size_t)count * moment);
                    if (first > 0)
                        assert_fails(vla_store_read(s, VLA_STORE_V, i, first - 1, 1, out, &err), VLA_E_INVALID, err, "keeps");
                    if (first + count < n)
                        assert_fails(vla_store_write(s, VLA_STORE_V, i, first + count, 1, in, &err), VLA_E_INVALID, err, "keeps");
                    float *x = malloc((size_t)n * sizeof *x + 4), *y = malloc((size_t)n * sizeof *y + 4);
                    assert_true(x && y);
                    vla_store_get_float(s, i, 0, n, x);
                    vla_store_get_float(whole, i, 0, n, y);
                    for (int64_t k = 0; k < n; k++) {
                        bool own = k >= first && k < first + count;
                        assert_true(own || modes[m] != VLA_BF16_MASTER ? x[k] == y[k] : fabsf(x[k] - y[k]) <= 0x1p-8f * fabsf(y[k]));
                    }
                    free(in), free(out), free(x), free(y);
                }
                vla_store_destroy(whole);
                vla_store_destroy(s);
            }
}

static void test_refusals(void **state)
{
    (void)state;
    vla_error err;
    vla_store *s = make_store(0, 1, 1, 0);
    assert_fails(vla_store_shard(s, &(vla_shard_options){sizeof(vla_shard_options), 2, 2, 1, 1}, &err), VLA_E_INVALID, err, "rank 2 of 2");
    assert_fails(vla_store_shard(s, &(vla_shard_options){sizeof(vla_shard_options), 0, 0, 1, 1}, &err), VLA_E_INVALID, err, "of 0");
    assert_fails(vla_store_shard(s, &(vla_shard_options){sizeof(vla_shard_options), 1, 2, 0, 1}, &err), VLA_E_INVALID, err, "0 bytes");
    assert_ok(vla_store_allocate(s, VLA_FP32, VLA_STORE_TRAIN, &err), err);
    assert_fails(vla_store_shard(s, &(vla_shard_options){sizeof(vla_shard_options), 1, 2, 1, 1}, &err), VLA_E_INVALID, err, "already allocated");
    vla_store_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
