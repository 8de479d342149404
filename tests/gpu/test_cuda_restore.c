/* A checkpoint that several ranks write from device memory, each its slices, holds the state to the bit for any number of ranks:
 * saved by 1, 2 and 4, read back by 1, 2 and 4, in the modes of training. All ranks are processes on one GPU: nothing is sent
 * but through the control plane.
 *
 *     test_cuda_restore [DEVICE]      cuda:0; cpu tests the same on a CPU */
#include "dist/forked.h"

#include "base/bf16.h"
#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "vla/checkpoint.h"

#include <stdbool.h>

enum { PARAMS = 6, LARGEST = 700 * 513 };

static const struct {
    const char *name;
    vla_dtype dtype;
    int64_t shape[2];
    int64_t run, pitch; /* 0: not padded */
} params[PARAMS] = {{"large.weight", VLA_COMPUTE, {700, 513}, 0, 0}, {"odd.weight", VLA_COMPUTE, {131, 67}, 0, 0},
                    {"padded.weight", VLA_COMPUTE, {9, 5}, 5, 8},    {"norm.weight", VLA_PRECISE, {1, 77}, 0, 0},
                    {"one", VLA_PRECISE, {1, 1}, 0, 0},              {"last.weight", VLA_COMPUTE, {64, 96}, 0, 0}};

static const char *device = "cuda:0";
static char root[] = "/tmp/vla-restore-XXXXXX";

enum { MODES = 3 };
static const vla_numerics modes[MODES] = {VLA_FP32, VLA_BF16_MASTER, VLA_BF16_SR};

/* Of so many ranks: one run folder, a step of it for each mode. */
typedef struct job {
    vla_numerics numerics;
    int64_t step;
    char run[64], checkpoint[96];
} job;

static job job_of(int world, int mode)
{
    job j = {.numerics = modes[mode], .step = mode + 1};
    snprintf(j.run, sizeof j.run, "%s/%d", root, world);
    snprintf(j.checkpoint, sizeof j.checkpoint, "%s/0_%d", j.run, mode + 1);
    return j;
}

static int said(int rank, const vla_error *err, const char *what)
{
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, err->message);
    return 1;
}

/* Element e of what tensor `index` holds: finite, of both signs and all sizes; low bits are any. */
static void put(vla_dtype dtype, int kind, size_t index, int64_t e, void *out, int64_t at)
{
    uint64_t x = (uint64_t)(e + 1) * 0x9E3779B97F4A7C15u + (uint64_t)(kind * 64 + (int)index + 1) * 0xBF58476D1CE4E5B9u;
    x ^= x >> 29;
    x *= 0x94D049BB133111EBu;
    x ^= x >> 32;
    float value = (float)((x & 1 && kind != VLA_STORE_V ? -1.0 : 1.0) * (1 + (double)(x >> 8 & 0xFFFFFF) * 0x1p-24) / (double)(1u << (x >> 40 & 15)));
    if (dtype == VLA_F32)
        ((float *)out)[at] = value;
    else if (dtype == VLA_BF16)
        ((uint16_t *)out)[at] = vlai_bf16_from_float(value);
    else
        ((uint16_t *)out)[at] = (uint16_t)(x >> 16);
}

static vla_status open_store(const job *j, int rank, int world, vla_executor **ex, vla_store **store, vla_error *err)
{
    vla_shard_options share = {sizeof share, rank, world, 65536, 1};
    VLA_TRY(vla_executor_create_on(device, 1, ex, err));
    VLA_TRY(vla_store_create(store, err));
    for (int i = 0; i < PARAMS; i++)
        VLA_TRY(vla_store_add(*store, params[i].name, params[i].dtype, 2, params[i].shape, 0, err));
    for (int i = 0; i < PARAMS; i++)
        if (params[i].run)
            VLA_TRY(vla_store_pad(*store, params[i].name, params[i].run, params[i].pitch, err));
    VLA_TRY(vla_store_shard(*store, &share, err));
    return vla_store_allocate_on(*store, *ex, j->numerics, VLA_STORE_STEP, 0, err);
}

/* Every element of a kind that this rank keeps: written, or compared with what was written. */
static int each(vla_store *store, bool compare, int64_t *elements)
{
    int rank = -1;
    vla_error err = VLA_ERROR_INIT;
    char *data = malloc(LARGEST * 4), *want = malloc(LARGEST * 4);
    int bad = !data || !want;
    for (int kind = 0; kind < VLA_STORE_KINDS && !bad; kind++)
        for (size_t i = 0; i < PARAMS && !bad; i++) {
            vla_tensor t = vla_store_tensor(store, (vla_store_kind)kind, i);
            int64_t first, count;
            vla_store_slice(store, (vla_store_kind)kind, i, &first, &count);
            if (t.dtype == VLA_DTYPE_NONE || count == 0)
                continue;
            for (int64_t e = 0; e < count; e++)
                put(t.dtype, kind, i, first + e, want, e);
            vla_status status = compare ? vla_store_read(store, (vla_store_kind)kind, i, first, count, data, &err)
                                        : vla_store_write(store, (vla_store_kind)kind, i, first, count, want, &err);
            if (status != VLA_OK)
                bad = said(rank, &err, params[i].name);
            else if (compare && memcmp(data, want, (size_t)count * vla_dtype_size(t.dtype)))
                bad = fprintf(stderr, "kind %d of %s, elements %lld to %lld, is not what was saved\n", kind, params[i].name, (long long)first,
                              (long long)(first + count - 1)) > 0;
            *elements += count;
        }
    free(data);
    free(want);
    return bad;
}

static int save(vla_checkpoint_writer *writer, int rank, int world, const job *j)
{
    vla_executor *ex = NULL;
    vla_store *store = NULL;
    vla_error err = VLA_ERROR_INIT;
    int64_t elements = 0;
    if (open_store(j, rank, world, &ex, &store, &err) != VLA_OK)
        return said(rank, &err, "store");
    int bad = each(store, false, &elements);
    char state[64];
    snprintf(state, sizeof state, "{\"step\": %lld}", (long long)j->step);
    vla_checkpoint_content c = {.size = sizeof c, .step = j->step, .state = state};
    if (!bad && (vla_checkpoint_save(writer, store, &c, &err) != VLA_OK || vla_checkpoint_wait(writer, NULL, &err) != VLA_OK))
        bad = said(rank, &err, "save");
    vla_store_destroy(store);
    vla_executor_destroy(ex);
    return bad;
}

/* A device is opened once per process: it takes seconds. */
static int save_body(vlai_group *group, void *context)
{
    const int *world = context;
    vla_error err = VLA_ERROR_INIT;
    vla_checkpoint_writer *writer = NULL;
    vla_checkpoint_writer_options o = VLA_CHECKPOINT_WRITER_OPTIONS_DEFAULT;
    job j = job_of(*world, 0);
    o.group = group;
    o.rank = vlai_group_rank(group);
    o.world = *world;
    if (vla_checkpoint_writer_create(j.run, &o, &writer, &err) != VLA_OK)
        return said(o.rank, &err, "writer");
    int bad = 0;
    for (int m = 0; m < MODES && !bad; m++) {
        j = job_of(*world, m);
        bad = save(writer, o.rank, o.world, &j);
    }
    vla_checkpoint_writer_destroy(writer);
    return bad;
}

/* As each rank of 1, 2 and 4 in turn. */
static int load(const job *j)
{
    int bad = 0;
    for (int world = 1; world <= 4; world *= 2) {
        int64_t elements = 0;
        for (int rank = 0; rank < world && !bad; rank++) {
            vla_executor *ex = NULL;
            vla_store *store = NULL;
            vla_checkpoint *c = NULL;
            vla_error err = VLA_ERROR_INIT;
            if (open_store(j, rank, world, &ex, &store, &err) != VLA_OK || vla_checkpoint_open(j->checkpoint, &c, &err) != VLA_OK ||
                vla_checkpoint_restore(c, store, &err) != VLA_OK)
                bad = said(rank, &err, "load");
            bad = bad || each(store, true, &elements);
            vla_checkpoint_close(c);
            vla_store_destroy(store);
            vla_executor_destroy(ex);
        }
        if (!bad && elements < LARGEST)
            bad = fprintf(stderr, "%lld elements were compared\n", (long long)elements) > 0;
    }
    return bad;
}

static int load_body(vlai_group *group, void *context)
{
    const int *world = context;
    int bad = 0;
    (void)group;
    for (int m = 0; m < MODES && !bad; m++) {
        job j = job_of(*world, m);
        bad = load(&j);
    }
    return bad;
}

int main(int argc, char **argv)
{
    int passed = 0, failed = 0;
    vla_error err = VLA_ERROR_INIT;
    if (argc > 1)
        device = argv[1];
    if (!mkdtemp(root))
        return fprintf(stderr, "no temporary folder\n0 passed, 1 failed\n"), 1;
    for (int world = 1; world <= 4; world *= 2) {
        double start = vlai_now();
        int bad = forked_run(&(forked){world, 60, 60, save_body, &world}, NULL) || forked_run(&(forked){1, 60, 60, load_body, &world}, NULL);
        *(bad ? &failed : &passed) += 1;
        fprintf(stderr, "%s  saved by %d, loaded by 1, 2 and 4 (%.1f s)\n", bad ? "FAIL" : "ok  ", world, vlai_now() - start);
    }
    vlai_remove_tree(root, &err);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
