#include "alloc.h"
#include "folder.h"

#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/rng.h"
#include "ckpt/ckpt.h"
#include "vla/log.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

static vla_store *make_rank(vla_numerics numerics, bool padded, int rank, int world)
{
    vla_error err = VLA_ERROR_INIT;
    vla_store *store;
    assert_ok(vla_store_create(&store, &err), err);
    assert_ok(vla_store_add(store, "head.weight", VLA_COMPUTE, 2, (int64_t[]){5, 7}, 0, &err), err);
    assert_ok(vla_store_add(store, "head.bias", VLA_COMPUTE, 1, (int64_t[]){5}, 0, &err), err);
    assert_ok(vla_store_add(store, "norm.weight", VLA_PRECISE, 1, (int64_t[]){7}, 0, &err), err);
    assert_ok(vla_store_add(store, "table", VLA_COMPUTE, 2, (int64_t[]){300, 41}, 0, &err), err);
    if (padded) {
        assert_ok(vla_store_pad(store, "table", 41, 64, &err), err);
        assert_ok(vla_store_pad(store, "head.weight", 35, 40, &err), err);
    }
    vla_shard_options share = {sizeof share, rank, world, 4000, 1};
    assert_ok(vla_store_shard(store, &share, &err), err);
    assert_ok(vla_store_allocate(store, numerics, VLA_STORE_TRAIN, &err), err);
    return store;
}

static vla_store *make_padded(vla_numerics numerics, bool padded)
{
    return make_rank(numerics, padded, 0, 1);
}

static vla_store *make_store(vla_numerics numerics)
{
    return make_padded(numerics, false);
}

/* Every tensor gets values of the seed. Masters are arbitrary fp32 numbers. */
static void fill(vla_store *store, uint64_t seed)
{
    for (size_t i = 0; i < vla_store_count(store); i++) {
        vla_tensor t = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        float *values = malloc((size_t)t.elements * sizeof *values);
        vla_error err = VLA_ERROR_INIT;
        vlai_rng_key key = {.seed = seed, .position = i};
        vlai_rng_normal(&key, 0, (size_t)t.elements, values);
        vla_store_set_float(store, i, 0, t.elements, values);
        vla_store_kind kinds[] = {VLA_STORE_M, VLA_STORE_V};
        for (int k = 0; k < 2; k++) {
            vla_tensor m = vla_store_tensor(store, kinds[k], i);
            key.site = (uint32_t)k + 1;
            if (m.dtype != VLA_F32)
                continue;
            vlai_rng_normal(&key, 0, (size_t)m.elements, values);
            assert_ok(vla_store_write(store, kinds[k], i, 0, m.elements, values, &err), err);
        }
        free(values);
    }
}

/* As far as b keeps them. */
static void assert_same(const vla_store *a, const vla_store *b)
{
    vla_store_kind kinds[] = {VLA_STORE_WEIGHT, VLA_STORE_M, VLA_STORE_V, VLA_STORE_LOW};
    assert_int_equal(vla_store_count(a), vla_store_count(b));
    for (size_t i = 0; i < vla_store_count(a); i++)
        for (int k = 0; k < 4; k++) {
            vla_tensor x = vla_store_tensor(a, kinds[k], i), y = vla_store_tensor(b, kinds[k], i);
            assert_int_equal(x.dtype, y.dtype);
            if (x.dtype == VLA_DTYPE_NONE)
                continue;
            int64_t first, n;
            vla_store_slice(b, kinds[k], i, &first, &n);
            size_t size = (size_t)n * vla_dtype_size(x.dtype);
            void *p = malloc(size + 1), *q = malloc(size + 1);
            vla_error err = VLA_ERROR_INIT;
            assert_ok(vla_store_read(a, kinds[k], i, first, n, p, &err), err);
            assert_ok(vla_store_read(b, kinds[k], i, first, n, q, &err), err);
            assert_memory_equal(p, q, size);
            free(p);
            free(q);
        }
}

static const vla_checkpoint_file extra[] = {{"note.json", NULL, "{}\n", 3}};

static vla_status save(vla_checkpoint_writer *w, const vla_store *store, int64_t step, vla_error *err)
{
    char state[64];
    snprintf(state, sizeof state, "{\"step\": %lld}", (long long)step);
    vla_checkpoint_content c = {.size = sizeof c, .step = step, .state = state, .files = extra, .file_count = 1};
    return vla_checkpoint_save(w, store, &c, err);
}

static void round_trip(vla_numerics numerics, const char *name, bool pad_a, bool pad_b)
{
    vla_error err = VLA_ERROR_INIT;
    vla_store *a = make_padded(numerics, pad_a), *b = make_padded(numerics, pad_b);
    fill(a, 3);
    vla_checkpoint_writer *w;
    assert_ok(vla_checkpoint_writer_create(at(name), NULL, &w, &err), err);
    assert_ok(save(w, a, 12, &err), err);
    fill(a, 4); /* the snapshot was taken before */
    const char *path;
    assert_ok(vla_checkpoint_wait(w, &path, &err), err);
    assert_non_null(strstr(path, "/0_12"));
    vla_checkpoint_writer_destroy(w);

    vla_checkpoint *c;
    assert_ok(vla_checkpoint_open(at(name), &c, &err), err);
    assert_int_equal(vla_checkpoint_step(c), 12);
    assert_string_equal(vla_checkpoint_state(c), "{\"step\": 12}");
    assert_ok(vla_checkpoint_restore(c, b, &err), err);
    vla_checkpoint_close(c);
    fill(a, 3);
    assert_same(a, b);

    char link[256] = {0};
    char where[512];
    snprintf(where, sizeof where, "%s/latest", at(name));
    assert_int_equal(readlink(where, link, sizeof link - 1), 4);
    assert_string_equal(link, "0_12");
    assert_ok(vla_checkpoint_open(where, &c, &err), err);
    vla_checkpoint_close(c);
    vla_store_destroy(a);
    vla_store_destroy(b);
}

static void bits_come_back(void **state)
{
    (void)state;
    round_trip(VLA_FP32, "fp32", false, false);
    round_trip(VLA_BF16_MASTER, "bf16", false, false);
    round_trip(VLA_BF16_PLAIN, "plain", false, false);
}

/* Pads are a matter of memory: what a padded store saved, an unpadded one reads, and the other way round. */
static void pads_are_not_saved(void **state)
{
    (void)state;
    round_trip(VLA_FP32, "padded-fp32", true, false);
    round_trip(VLA_BF16_MASTER, "padded-bf16", true, true);
    round_trip(VLA_BF16_SR, "padded-sr", false, true);
}

/* From fp32 to bf16 with masters: the masters are the fp32 values. */
static void changes_of_numerics(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_store *a = make_store(VLA_FP32), *b = make_store(VLA_BF16_MASTER);
    vla_checkpoint *c;
    assert_ok(vla_checkpoint_open(at("fp32"), &c, &err), err);
    assert_ok(vla_checkpoint_restore(c, b, &err), err);
    vla_checkpoint_close(c);
    fill(a, 3);
    float x[41], y[41];
    for (size_t i = 0; i < vla_store_count(a); i++) {
        int64_t n = vla_store_tensor(a, VLA_STORE_WEIGHT, i).elements < 41 ? vla_store_tensor(a, VLA_STORE_WEIGHT, i).elements : 41;
        vla_store_get_float(a, i, 0, n, x);
        vla_store_get_float(b, i, 0, n, y);
        assert_memory_equal(x, y, (size_t)n * sizeof *x);
    }
    vla_store_destroy(a);
    vla_store_destroy(b);
}

/* The optimizer's file of one rank becomes those of three, each tensor cut where it happens; a first element of `gap` more than
 * it should leaves a hole. */
static void split_optimizer(const char *dir, int64_t gap)
{
    vla_error err = VLA_ERROR_INIT;
    enum { PARTS = 3, MOST = 64 };
    char path[512], name[VLAI_CKPT_NAME];
    vlai_safetensors *whole;
    snprintf(path, sizeof path, "%s/optimizer-0-of-1.safetensors", dir);
    assert_ok(vlai_safetensors_open(path, &whole, &err), err);
    size_t count = vlai_safetensors_count(whole);
    assert_true(count <= MOST);
    snprintf(path, sizeof path, "%s/%s", dir, VLAI_CKPT_CHECKSUMS);
    json_t *sums;
    assert_ok(vlai_json_load(path, &sums, &err), err);
    for (int r = 0; r < PARTS; r++) {
        vlai_tensor_view views[MOST];
        const char *metadata[2 * MOST + 1];
        char keys[MOST][96], firsts[MOST][24];
        size_t n = 0;
        for (size_t i = 0; i < count; i++) {
            vlai_tensor_view v = *vlai_safetensors_at(whole, i);
            size_t size = vla_dtype_size(v.dtype);
            int64_t cut[] = {0, v.elements / 5, v.elements / 5 + v.elements / 3, v.elements};
            if (cut[r] == cut[r + 1])
                continue;
            v.data = (const char *)v.data + (size_t)cut[r] * size;
            v.rank = 1;
            v.shape[0] = v.elements = cut[r + 1] - cut[r];
            v.bytes = (size_t)v.elements * size;
            snprintf(keys[n], sizeof keys[n], "slice:%s", v.name);
            snprintf(firsts[n], sizeof firsts[n], "%lld", (long long)(cut[r] + (r == 1 && v.elements > gap ? gap : 0)));
            metadata[2 * n] = keys[n];
            metadata[2 * n + 1] = firsts[n];
            views[n++] = v;
        }
        metadata[2 * n] = NULL;
        vlai_ckpt_optimizer_name(r, PARTS, name);
        snprintf(path, sizeof path, "%s/%s", dir, name);
        assert_ok(vlai_safetensors_write(path, views, n, metadata, &err), err);
        uint64_t hash, bytes;
        assert_ok(vlai_ckpt_hash_file(path, &hash, &bytes, &err), err);
        char text[20];
        snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
        json_object_set_new(json_object_get(sums, "xxh64"), name, json_pack("{s:I, s:s}", "size", (json_int_t)bytes, "hash", text));
    }
    vlai_safetensors_close(whole);
    json_object_del(json_object_get(sums, "xxh64"), "optimizer-0-of-1.safetensors");
    snprintf(path, sizeof path, "%s/optimizer-0-of-1.safetensors", dir);
    assert_int_equal(unlink(path), 0);
    snprintf(path, sizeof path, "%s/%s", dir, VLAI_CKPT_CHECKSUMS);
    assert_ok(vlai_json_save(sums, path, &err), err);
    json_decref(sums);
}

/* A file of the caller's must not stand in for one of the checkpoint's own. */
static void names_of_its_own_are_refused(void **state)
{
    (void)state;
    static const char *const names[] = {"model.safetensors", "state.json", "checksums.json", "DONE", "optimizer-0-of-1.safetensors",
                                        "optimizer-notes", "a/b", "..", ""};
    vla_error err = VLA_ERROR_INIT;
    vla_store *a = make_store(VLA_FP32);
    vla_checkpoint_writer *w;
    fill(a, 3);
    assert_ok(vla_checkpoint_writer_create(at("names"), NULL, &w, &err), err);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        vla_checkpoint_file file = {names[i], NULL, "x", 1};
        vla_checkpoint_content c = {.size = sizeof c, .step = 1, .state = "{\"step\": 1}", .files = &file, .file_count = 1};
        assert_fails(vla_checkpoint_save(w, a, &c, &err), VLA_E_INVALID, err, "a further file of a checkpoint");
        assert_false(vlai_is_dir(at("names/0_1")));
    }
    assert_ok(save(w, a, 1, &err), err);
    assert_ok(vla_checkpoint_wait(w, NULL, &err), err);
    vla_checkpoint_writer_destroy(w);
    vla_store_destroy(a);
}

/* Of a caller's structs the members that its size spans count alone, and a size must be there. */
static void structs_of_other_sizes(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_store *a = make_store(VLA_FP32);
    vla_checkpoint_writer *w;
    fill(a, 3);
    vla_checkpoint_writer_options o = {.size = 0, .keep_last = 1};
    assert_fails(vla_checkpoint_writer_create(at("sizes"), &o, &w, &err), VLA_E_INVALID, err, "vla_checkpoint_writer_options: the member size is 0");
    o = (vla_checkpoint_writer_options){.size = offsetof(vla_checkpoint_writer_options, flags), .keep_last = 1, .flags = ~0u, .group = (void *)&o, .rank = 7, .world = 9};
    assert_ok(vla_checkpoint_writer_create(at("sizes"), &o, &w, &err), err);
    vla_checkpoint_content c = {.size = offsetof(vla_checkpoint_content, files), .step = 4, .state = "{\"step\": 4}", .file_count = 1};
    assert_ok(vla_checkpoint_save(w, a, &c, &err), err);
    assert_ok(vla_checkpoint_wait(w, NULL, &err), err);
    c.size = 0;
    assert_fails(vla_checkpoint_save(w, a, &c, &err), VLA_E_INVALID, err, "vla_checkpoint_content: the member size is 0");
    c = (vla_checkpoint_content){.size = sizeof c, .step = 5};
    assert_fails(vla_checkpoint_save(w, a, &c, &err), VLA_E_INVALID, err, "the checkpoint of step 5 has no state");
    vla_checkpoint_writer_destroy(w);
    assert_true(vlai_is_dir(at("sizes/0_4")));
    assert_false(vlai_is_dir(at("sizes/0_5")));
    vla_store_destroy(a);
}

/* A state that three ranks have written is that of one, whatever the cuts; the files must be of one world, and complete. */
static void files_of_several_ranks(void **state)
{
    (void)state;
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR};
    vla_error err = VLA_ERROR_INIT;
    vla_checkpoint *c;
    for (int i = 0; i < 3; i++) {
        char run[64], dir[512];
        snprintf(run, sizeof run, "ranks%d", i);
        vla_store *a = make_padded(modes[i], i == 1), *b = make_store(modes[i]);
        fill(a, 31);
        vla_checkpoint_writer *w;
        assert_ok(vla_checkpoint_writer_create(at(run), NULL, &w, &err), err);
        assert_ok(save(w, a, 5, &err), err);
        vla_checkpoint_writer_destroy(w);
        snprintf(dir, sizeof dir, "%s/0_5", at(run));
        split_optimizer(dir, 0);
        assert_ok(vla_checkpoint_open(dir, &c, &err), err);
        assert_ok(vla_checkpoint_restore(c, b, &err), err);
        assert_same(a, b);
        vla_store_destroy(b);
        for (int rank = 0; rank < 5; rank++) { /* of 2 ranks, and of 3 */
            b = make_rank(modes[i], rank & 1, rank < 2 ? rank : rank - 2, rank < 2 ? 2 : 3);
            assert_ok(vla_checkpoint_restore(c, b, &err), err);
            assert_same(a, b);
            vla_store_destroy(b);
        }
        vla_checkpoint_close(c);
        vla_store_destroy(a);
    }
    vla_store *store = make_store(VLA_FP32);
    vla_checkpoint_writer *w;
    fill(store, 32);
    assert_ok(vla_checkpoint_writer_create(at("gaps"), NULL, &w, &err), err);
    assert_ok(save(w, store, 5, &err), err);
    assert_ok(save(w, store, 6, &err), err);
    vla_checkpoint_writer_destroy(w);
    split_optimizer(at("gaps/0_5"), 1);
    assert_ok(vla_checkpoint_open(at("gaps/0_5"), &c, &err), err);
    assert_fails(vla_checkpoint_restore(c, store, &err), VLA_E_CORRUPT, err, "do not join at element");
    vla_checkpoint_close(c);
    split_optimizer(at("gaps/0_6"), 0);
    assert_int_equal(unlink(at("gaps/0_6/optimizer-1-of-3.safetensors")), 0);
    assert_fails(vla_checkpoint_open(at("gaps/0_6"), &c, &err), VLA_E_CORRUPT, err, "optimizer-1-of-3.safetensors: the checkpoint is damaged: the file is missing");
    vla_store_destroy(store);
}

/* One writer, stores that come and go: of another size, of fewer and of more kinds, of other tensors. */
static void one_store_after_another(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_checkpoint_writer *w;
    vla_checkpoint *c;
    assert_ok(vla_checkpoint_writer_create(at("stores"), NULL, &w, &err), err);
    for (int i = 0; i < 6; i++) {
        static const vla_numerics modes[] = {VLA_BF16_SR, VLA_FP32, VLA_BF16_MASTER};
        vla_store *stores[2];
        for (int k = 0; k < 2; k++) {
            assert_ok(vla_store_create(&stores[k], &err), err);
            assert_ok(vla_store_add(stores[k], i & 1 ? "small" : "large", VLA_COMPUTE, 1, (int64_t[]){i & 1 ? 3 : 70000}, 0, &err), err);
            assert_ok(vla_store_allocate(stores[k], modes[i % 3], i == 3 ? VLA_STORE_PREDICT : VLA_STORE_TRAIN, &err), err);
        }
        fill(stores[0], (uint64_t)i + 90);
        assert_ok(save(w, stores[0], i + 1, &err), err);
        fill(stores[0], 3);
        const char *path;
        assert_ok(vla_checkpoint_wait(w, &path, &err), err);
        fill(stores[0], (uint64_t)i + 90);
        assert_ok(vla_checkpoint_open(path, &c, &err), err);
        assert_int_equal(vla_checkpoint_step(c), i + 1);
        assert_ok(vla_checkpoint_restore(c, stores[1], &err), err);
        assert_same(stores[0], stores[1]);
        vla_checkpoint_close(c);
        vla_store_destroy(stores[0]);
        vla_store_destroy(stores[1]);
    }
    vla_checkpoint_writer_destroy(w);
}

static void old_ones_are_pruned(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_store *store = make_store(VLA_FP32);
    vla_checkpoint_writer_options o = VLA_CHECKPOINT_WRITER_OPTIONS_DEFAULT;
    o.keep_last = 2;
    vla_checkpoint_writer *w;
    assert_ok(vla_checkpoint_writer_create(at("prune"), &o, &w, &err), err);
    for (int64_t step = 7; step <= 11; step++)
        assert_ok(save(w, store, step, &err), err);
    assert_ok(save(w, store, 10, &err), err); /* written again over the old one */
    assert_ok(vla_checkpoint_wait(w, NULL, &err), err);
    vla_checkpoint_writer_destroy(w);
    char **names;
    size_t count;
    assert_ok(vlai_list_dir(at("prune"), &names, &count, &err), err);
    assert_int_equal(count, 3);
    assert_string_equal(names[0], "0_10");
    assert_string_equal(names[1], "0_11");
    assert_string_equal(names[2], "latest");
    vlai_names_free(names, count);
    vla_store_destroy(store);
}

static void cut(const char *path, int64_t bytes)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(truncate(path, st.st_size - bytes), 0);
}

static void damage_is_refused_and_skipped(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_store *store = make_store(VLA_FP32);
    fill(store, 9);
    vla_checkpoint_writer *w;
    assert_ok(vla_checkpoint_writer_create(at("damage"), NULL, &w, &err), err);
    for (int64_t step = 1; step <= 4; step++)
        assert_ok(save(w, store, step, &err), err);
    vla_checkpoint_writer_destroy(w);

    vla_checkpoint *c;
    assert_int_equal(unlink(at("damage/0_4/DONE")), 0);
    assert_fails(vla_checkpoint_open(at("damage/0_4"), &c, &err), VLA_E_CORRUPT, err, "not a whole checkpoint");
    cut(at("damage/0_3/model.safetensors"), 1);
    assert_fails(vla_checkpoint_open(at("damage/0_3"), &c, &err), VLA_E_CORRUPT, err, "bytes, wanted");
    FILE *f = fopen(at("damage/0_2/optimizer-0-of-1.safetensors"), "r+b");
    fseek(f, -5, SEEK_END);
    fputc(0x5a, f);
    fclose(f);
    assert_fails(vla_checkpoint_open(at("damage/0_2"), &c, &err), VLA_E_CORRUPT, err, "XXH64");
    assert_ok(vla_checkpoint_open(at("damage"), &c, &err), err);
    assert_int_equal(vla_checkpoint_step(c), 1);
    vla_checkpoint_close(c);
    assert_int_equal(unlink(at("damage/0_1/state.json")), 0);
    assert_fails(vla_checkpoint_open(at("damage/0_1"), &c, &err), VLA_E_CORRUPT, err, "state.json: the checkpoint is damaged: the file is missing");
    assert_fails(vla_checkpoint_open(at("damage"), &c, &err), VLA_E_CORRUPT, err, "damaged");
    assert_fails(vla_checkpoint_open(at("nowhere"), &c, &err), VLA_E_NOT_FOUND, err, "no such checkpoint");
    assert_ok(vlai_mkdirs(at("empty"), &err), err);
    assert_fails(vla_checkpoint_open(at("empty"), &c, &err), VLA_E_NOT_FOUND, err, "no whole checkpoint");
    vla_store_destroy(store);
}

static void weights_files_are_strict(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_store *a = make_store(VLA_FP32), *b;
    fill(a, 5);
    assert_ok(vla_store_save(a, at("w.safetensors"), &err), err);
    assert_ok(vla_store_create(&b, &err), err);
    assert_ok(vla_store_add(b, "head.weight", VLA_COMPUTE, 2, (int64_t[]){7, 5}, 0, &err), err);
    assert_ok(vla_store_add(b, "other", VLA_COMPUTE, 1, (int64_t[]){5}, 0, &err), err);
    assert_ok(vla_store_add(b, "table", VLA_COMPUTE, 2, (int64_t[]){300, 41}, 0, &err), err);
    assert_ok(vla_store_allocate(b, VLA_FP32, VLA_STORE_PREDICT, &err), err);
    assert_fails(vla_store_load(b, at("w.safetensors"), &err), VLA_E_SHAPE, err, "1 missing (other)");
    assert_non_null(strstr(err.message, "head.weight is [5,7], wanted [7,5]"));
    assert_non_null(strstr(err.message, "2 unexpected (head.bias, norm.weight)"));
    vla_store_destroy(b);
    b = make_store(VLA_FP32);
    assert_ok(vla_store_load(b, at("w.safetensors"), &err), err);
    fill(a, 5);
    for (size_t i = 0; i < vla_store_count(a); i++) {
        vla_tensor x = vla_store_tensor(a, VLA_STORE_WEIGHT, i), y = vla_store_tensor(b, VLA_STORE_WEIGHT, i);
        assert_memory_equal(x.data, y.data, (size_t)x.elements * 4);
    }
    vla_store_destroy(a);
    vla_store_destroy(b);
}

static void a_state_that_is_not_finite_is_not_saved(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_store *store = make_store(VLA_FP32);
    ((float *)vla_store_tensor(store, VLA_STORE_V, 3).data)[17] = INFINITY;
    vla_checkpoint_writer *w;
    assert_ok(vla_checkpoint_writer_create(at("nan"), NULL, &w, &err), err);
    assert_ok(save(w, store, 1, &err), err);
    assert_fails(vla_checkpoint_wait(w, NULL, &err), VLA_E_NONFINITE, err, "second moment of 'table' is not finite at element 17");
    vla_checkpoint_writer_destroy(w);
    char **names;
    size_t count;
    assert_ok(vlai_list_dir(at("nan"), &names, &count, &err), err);
    assert_int_equal(count, 0);
    vlai_names_free(names, count);
    vla_store_destroy(store);
}

/* One element of a file's tensor becomes all ones: NaN in every type. */
static void poison(const char *path, const char *name, int64_t element)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_safetensors *file;
    char *data;
    size_t size;
    assert_ok(vlai_read_file(path, 0, &data, &size, &err), err);
    assert_ok(vlai_safetensors_open_memory(data, size, path, &file, &err), err);
    const vlai_tensor_view *v = vlai_safetensors_find(file, name);
    assert_non_null(v);
    size_t each = vla_dtype_size(v->dtype);
    memset(data + (size_t)((const char *)v->data - data) + (size_t)element * each, 0xFF, each);
    vlai_safetensors_close(file);
    assert_ok(vlai_write_file_atomic(path, data, size, &err), err);
    vlai_free(data);
}

static void what_is_not_finite_is_not_loaded(void **state)
{
    (void)state;
    static const vla_numerics modes[] = {VLA_FP32, VLA_BF16_MASTER};
    for (int i = 0; i < 2; i++) {
        vla_error err = VLA_ERROR_INIT;
        vla_store *a = make_store(modes[i]), *same = make_store(modes[i]), *other = make_store(modes[1 - i]);
        vla_checkpoint_writer *w;
        vla_checkpoint *c;
        char path[VLAI_CKPT_PATH];
        fill(a, 5);
        const char *run = i ? at("poison1") : at("poison0");
        assert_ok(vla_checkpoint_writer_create(run, NULL, &w, &err), err);
        assert_ok(save(w, a, 1, &err), err);
        assert_ok(vla_checkpoint_wait(w, NULL, &err), err);
        vla_checkpoint_writer_destroy(w);
        assert_ok(vla_checkpoint_open(run, &c, &err), err);
        assert_ok(vla_checkpoint_restore(c, same, &err), err);
        snprintf(path, sizeof path, "%s/optimizer-0-of-1.safetensors", vla_checkpoint_path(c));
        poison(path, "table.exp_avg_sq", 4000);
        assert_fails(vla_checkpoint_restore(c, same, &err), VLA_E_NONFINITE, err,
                     "optimizer-0-of-1.safetensors: tensor 'table.exp_avg_sq' is nan at element 4000");
        snprintf(path, sizeof path, "%s/model.safetensors", vla_checkpoint_path(c));
        poison(path, "table", 12299);
        poison(path, "table", 1234);
        vla_store *const stores[] = {same, other}; /* bits as they are, and converted */
        for (int k = 0; k < 2; k++) {
            assert_fails(vla_store_load(stores[k], path, &err), VLA_E_NONFINITE, err, "model.safetensors: tensor 'table' is nan at element 1234, wanted");
            assert_non_null(strstr(err.hint, "take another file or an older checkpoint"));
            assert_fails(vla_checkpoint_restore(c, stores[k], &err), VLA_E_NONFINITE, err, "tensor 'table' is nan at element 1234");
        }
        vla_checkpoint_close(c);
        vla_store_destroy(a);
        vla_store_destroy(same);
        vla_store_destroy(other);
    }
}

static bool exists(const char *folder, const char *name)
{
    char path[VLAI_CKPT_PATH];
    return vlai_path_join(path, sizeof path, folder, name) && (vlai_is_dir(path) || vlai_is_file(path));
}

/* What runs before this one left is never replaced, and neither counted nor deleted by keep_last. */
static void what_is_set_aside_stays(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_store *store = make_store(VLA_FP32);
    vla_checkpoint_writer_options o = VLA_CHECKPOINT_WRITER_OPTIONS_DEFAULT;
    o.keep_last = 2;
    for (int run = 1; run <= 4; run++) {
        vla_checkpoint_writer *w;
        assert_ok(vlai_ckpt_set_aside(at("aside"), 0, &err), err);
        assert_ok(vla_checkpoint_writer_create(at("aside"), &o, &w, &err), err);
        for (int64_t step = 5; step <= (run == 3 ? 8 : 7); step++)
            assert_ok(save(w, store, step, &err), err);
        assert_ok(vla_checkpoint_wait(w, NULL, &err), err);
        vla_checkpoint_writer_destroy(w);
    }
    static const char *const there[] = {"0_6.old", "0_7.old", "0_6.old2", "0_7.old2", "0_7.old3", "0_8.old3", "0_6", "0_7"};
    for (size_t i = 0; i < sizeof there / sizeof *there; i++)
        if (!exists(at("aside"), there[i]))
            fail_msg("%s is gone", there[i]);
    char **names;
    size_t count;
    assert_ok(vlai_list_dir(at("aside"), &names, &count, &err), err);
    assert_int_equal(count, 9); /* and latest */
    vlai_names_free(names, count);
    vla_checkpoint *c;
    assert_ok(vla_checkpoint_open(at("aside"), &c, &err), err);
    assert_int_equal(vla_checkpoint_step(c), 7);
    vla_checkpoint_close(c);
    /* A number whose checkpoints somebody has deleted is free again, and one that has some is not. */
    assert_ok(vlai_remove_tree(at("aside/0_6.old2"), &err), err);
    assert_ok(vlai_ckpt_set_aside(at("aside"), 6, &err), err);
    assert_true(exists(at("aside"), "0_7.old4") && exists(at("aside"), "0_7.old2") && exists(at("aside"), "0_6"));
    vla_store_destroy(store);
}

/* A kill may leave what a rewrite has moved aside: it is kept while it is all there is of its step, and removed once it has a successor. */
static void what_is_replaced_goes(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_store *store = make_store(VLA_FP32);
    vla_checkpoint_writer *w;
    vla_checkpoint *c;
    assert_ok(vla_checkpoint_writer_create(at("rewrite"), NULL, &w, &err), err);
    assert_ok(save(w, store, 1, &err), err);
    assert_ok(save(w, store, 2, &err), err);
    vla_checkpoint_writer_destroy(w);
    char aside[512], whole[512];
    snprintf(aside, sizeof aside, "%s", at("rewrite/0_2.replaced"));
    snprintf(whole, sizeof whole, "%s", at("rewrite/0_2"));
    assert_int_equal(rename(whole, aside), 0); /* killed between the two renames */
    assert_ok(vla_checkpoint_writer_create(at("rewrite"), NULL, &w, &err), err);
    assert_ok(vla_checkpoint_open(at("rewrite"), &c, &err), err);
    assert_int_equal(vla_checkpoint_step(c), 2);
    vla_checkpoint_close(c);
    assert_ok(save(w, store, 2, &err), err);
    vla_checkpoint_writer_destroy(w);
    assert_true(exists(at("rewrite"), "0_2"));
    assert_false(exists(at("rewrite"), "0_2.replaced"));
    assert_int_equal(rename(whole, aside), 0); /* killed after both */
    assert_int_equal(rename(at("rewrite/0_1"), whole), 0);
    assert_ok(vla_checkpoint_writer_create(at("rewrite"), NULL, &w, &err), err);
    vla_checkpoint_writer_destroy(w);
    assert_true(exists(at("rewrite"), "0_2"));
    assert_false(exists(at("rewrite"), "0_2.replaced"));
    vla_store_destroy(store);
}

/* A folder of `length` bytes, made of folders with long names. */
static void long_path(char *path, size_t length)
{
    size_t used = (size_t)snprintf(path, VLAI_CKPT_PATH, "%s", root);
    while (used < length) {
        size_t more = length - used > 400 ? 200 : length - used > 202 ? (length - used) / 2 : length - used;
        path[used] = '/';
        memset(path + used + 1, 'f', more - 1);
        used += more;
    }
    path[used] = 0;
}

/* In the longest run folder that is accepted the checkpoint with the longest names is saved, written again and read; one byte more is
 * refused. */
static void the_longest_path(void **state)
{
    (void)state;
    enum { MOST = 3994 };
    vla_error err = VLA_ERROR_INIT;
    vla_store *store = make_store(VLA_FP32);
    vla_checkpoint_writer *w;
    vla_checkpoint *c;
    char path[VLAI_CKPT_PATH], file[VLAI_CKPT_NAME];
    memset(file, 'n', sizeof file - 1);
    file[sizeof file - 1] = 0;
    vla_checkpoint_file files[] = {{file, NULL, "{}\n", 3}};
    vla_checkpoint_content content = {.size = sizeof content, .epoch = 1000000000, .step = 1000000000000000, .state = "{\"step\": 1000000000000000}",
                                      .files = files, .file_count = 1};
    long_path(path, MOST);
    assert_int_equal(strlen(path), MOST);
    assert_ok(vla_checkpoint_writer_create(path, NULL, &w, &err), err);
    for (int i = 0; i < 2; i++) {
        assert_ok(vla_checkpoint_save(w, store, &content, &err), err);
        assert_ok(vla_checkpoint_wait(w, NULL, &err), err);
    }
    vla_checkpoint_writer_destroy(w);
    assert_ok(vla_checkpoint_open(path, &c, &err), err);
    assert_ok(vla_checkpoint_restore(c, store, &err), err);
    vla_checkpoint_close(c);
    assert_ok(vlai_ckpt_set_aside(path, 0, &err), err);

    char longer[VLAI_CKPT_NAME + 1];
    snprintf(longer, sizeof longer, "%sn", file);
    files[0].name = longer; /* leaves less */
    assert_fails(vlai_ckpt_check_path(path, files, 1, &err), VLA_E_INVALID, err, "has 3994 bytes, wanted at most 3993");
    long_path(path, MOST + 1);
    assert_fails(vla_checkpoint_writer_create(path, NULL, &w, &err), VLA_E_INVALID, err, "the path of the run folder has 3995 bytes, wanted at most 3994");
    assert_non_null(strstr(err.hint, "checkpoint.save_path"));
    assert_false(vlai_is_dir(path));
    vla_store_destroy(store);
}

static void room_is_asked_for(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    uint64_t room;
    assert_ok(vlai_ckpt_free_bytes(at("not/made/yet"), &room, &err), err);
    assert_true(room > 1000);
    assert_ok(vlai_ckpt_check_room(root, room / 100, 3, -1, &err), err);
    assert_fails(vlai_ckpt_check_room(root, room / 4, 6, -1, &err), VLA_E_IO, err, "checkpoint.keep_last=3 fits");
    assert_ok(vlai_ckpt_check_room(root, room / 4, 6, 2, &err), err);
    assert_fails(vlai_ckpt_check_room(root, room * 2, 0, -1, &err), VLA_E_IO, err, "GB free");
}

/* Every write, sync and rename of a save fails in turn: an error each time, what was saved before stays whole, and the
 * next save works. Failures after the rename are only warnings. */
static void every_failing_write(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vla_store *a = make_store(VLA_BF16_MASTER), *b = make_store(VLA_BF16_MASTER);
    fill(a, 1);
    vla_checkpoint_writer_options o = VLA_CHECKPOINT_WRITER_OPTIONS_DEFAULT;
    o.keep_last = 1;
    vla_checkpoint_writer *w;
    assert_ok(vla_checkpoint_writer_create(at("writes"), &o, &w, &err), err);
    assert_ok(save(w, a, 1, &err), err);
    assert_ok(vla_checkpoint_wait(w, NULL, &err), err);
    fill(a, 2);
    uint64_t nth = 0;
    int failures = 0;
    for (bool hit = true; hit;) {
        vlai_io_fail_nth(++nth);
        vla_status saved = save(w, a, 2, &err);
        if (saved == VLA_OK)
            saved = vla_checkpoint_wait(w, NULL, &err);
        hit = vlai_io_fail_nth(0) >= nth;
        failures += saved != VLA_OK;
        if (saved != VLA_OK)
            assert_non_null(strstr(err.message, "checkpoint 0_2"));
        vla_checkpoint *c;
        assert_ok(vla_checkpoint_open(at("writes"), &c, &err), err);
        assert_ok(vla_checkpoint_restore(c, b, &err), err);
        fill(a, (uint64_t)vla_checkpoint_step(c));
        assert_same(a, b);
        vla_checkpoint_close(c);
        fill(a, 2);
    }
    assert_true(failures > 15);
    vla_checkpoint_writer_destroy(w);
    vla_store_destroy(a);
    vla_store_destroy(b);
}

static vla_status save_and_load(const vla_store *a, vla_store *b, vla_error *err)
{
    vla_checkpoint_writer *w = NULL;
    vla_checkpoint *c = NULL;
    vla_status status = vla_checkpoint_writer_create(at("allocs"), NULL, &w, err);
    if (status == VLA_OK)
        status = save(w, a, 5, err);
    if (status == VLA_OK)
        status = vla_checkpoint_wait(w, NULL, err);
    if (status == VLA_OK)
        status = vla_checkpoint_open(at("allocs"), &c, err);
    if (status == VLA_OK)
        status = vla_checkpoint_restore(c, b, err);
    vla_checkpoint_close(c);
    vla_checkpoint_writer_destroy(w);
    return status;
}

static void every_failing_allocation(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    failing_allocation(UINT64_MAX);
    vla_store *a = make_store(VLA_BF16_MASTER), *b = make_store(VLA_BF16_MASTER);
    fill(a, 8);
    vla_log_set(NULL, NULL, VLA_LOG_ERROR);
    int failures = 0;
    for (long n = 1;; n++) {
        failing_allocation((uint64_t)n);
        vla_status status = save_and_load(a, b, &err);
        bool reached = alloc_reached();
        failing_allocation(UINT64_MAX);
        if (status != VLA_OK)
            failures++;
        if (!reached) {
            assert_int_equal(status, VLA_OK);
            break;
        }
    }
    assert_true(failures > 10);
    assert_same(a, b);
    vla_store_destroy(a);
    vla_store_destroy(b);
    failing_allocation(0);
    vla_log_set(NULL, NULL, VLA_LOG_INFO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_come_back),
        cmocka_unit_test(pads_are_not_saved),
        cmocka_unit_test(changes_of_numerics),
        cmocka_unit_test(files_of_several_ranks),
        cmocka_unit_test(names_of_its_own_are_refused),
        cmocka_unit_test(one_store_after_another),
        cmocka_unit_test(old_ones_are_pruned),
        cmocka_unit_test(damage_is_refused_and_skipped),
        cmocka_unit_test(weights_files_are_strict),
        cmocka_unit_test(a_state_that_is_not_finite_is_not_saved), cmocka_unit_test(what_is_not_finite_is_not_loaded),
        cmocka_unit_test(what_is_set_aside_stays), cmocka_unit_test(what_is_replaced_goes), cmocka_unit_test(structs_of_other_sizes),
        cmocka_unit_test(the_longest_path),
        cmocka_unit_test(room_is_asked_for),
        cmocka_unit_test(every_failing_write),
        cmocka_unit_test(every_failing_allocation),
    };
    return cmocka_run_group_tests(tests, make_root, drop_root);
}
