/* What the loader can reach: random frames of a dataset decoded and resized as Wall-X takes them, and the same from the
 * cache of resized frames.
 *
 *     vla synth /tmp/hard --noise 10 --episodes 40 --length 100      # AV1, 256 px, a key frame every second frame
 *     bench_loader /tmp/hard [threads] [frames] */
#include "base/memory.h"
#include "base/pool.h"
#include "base/rng.h"
#include "base/time.h"
#include "data/frame_cache.h"
#include "image/resize.h"
#include "vla/dataset.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { THREADS = 64, CAMERAS = 8, CHUNK = 16 };

typedef struct {
    vla_dataset *set;
    vla_frame_reader *readers[THREADS];
    vlai_resizer *resizers[THREADS];
    uint8_t *out[THREADS];
    vlai_image_size sizes[CAMERAS];
    int64_t cameras;
    vlai_frame_cache *cache;
    vla_error errors[THREADS];
} bench;

static int64_t random_row(const bench *b, uint64_t i)
{
    const vlai_rng_key key = {.seed = 1, .stream = VLAI_RNG_SYNTH, .position = i};
    return (int64_t)(vlai_rng_uniform64(&key, 0) * (double)vla_dataset_info_get(b->set)->rows);
}

/* CHUNK frames: decode, convert, resize; into the cache when there is one. */
static void decode(void *context, int64_t tile, int thread)
{
    bench *b = context;
    vla_error *err = &b->errors[thread];
    for (int k = 0; k < CHUNK && err->status == VLA_OK; k++) {
        uint64_t i = (uint64_t)(tile * CHUNK + k);
        int64_t row = random_row(b, i), camera = (int64_t)i % b->cameras;
        vla_picture picture;
        if (vla_frame_reader_read(b->readers[thread], row, vla_dataset_camera(b->set, camera), &picture, err) == VLA_OK &&
            vlai_resizer_fit(b->resizers[thread], picture.data, picture.width, picture.height, &b->sizes[camera],
                             b->out[thread], err) == VLA_OK &&
            b->cache)
            vlai_frame_cache_put(b->cache, row, camera, b->out[thread]);
    }
}

/* CHUNK samples (all cameras) copied out of the cache. */
static void recall(void *context, int64_t tile, int thread)
{
    bench *b = context;
    for (int k = 0; k < CHUNK; k++) {
        int64_t row = random_row(b, (uint64_t)(tile * CHUNK + k));
        for (int64_t c = 0; c < b->cameras; c++) {
            const uint8_t *p = vlai_frame_cache_get(b->cache, row, c);
            int64_t n = b->sizes[c].width * b->sizes[c].height * 3;
            for (int64_t i = 0; p && i < n; i += 8)
                *(uint64_t *)(void *)(b->out[thread] + i) = *(const uint64_t *)(const void *)(p + i);
        }
    }
}

static double timed(vlai_pool *pool, int64_t tiles, vlai_tile_fn fn, bench *b)
{
    double start = vlai_now();
    vlai_pool_run(pool, tiles, fn, b);
    return vlai_now() - start;
}

static int fail(const vla_error *err)
{
    fprintf(stderr, "bench_loader: %s\n  %s\n", err->message, err->hint);
    return 1;
}

int main(int argc, char **argv)
{
    static bench b;
    vla_error err = VLA_ERROR_INIT;
    int threads = argc > 2 ? atoi(argv[2]) : 2;
    int64_t frames = argc > 3 ? atoll(argv[3]) : 8000;
    if (argc < 2 || threads < 1 || threads > THREADS) {
        fputs("usage: bench_loader DATASET [threads] [frames]\n", stderr);
        return 2;
    }
    double start = vlai_now();
    if (vla_dataset_open(argv[1], NULL, &b.set, &err) != VLA_OK)
        return fail(&err);
    printf("open: %.0f ms, %lld rows\n", 1e3 * (vlai_now() - start), (long long)vla_dataset_info_get(b.set)->rows);
    b.cameras = vla_dataset_info_get(b.set)->cameras < CAMERAS ? vla_dataset_info_get(b.set)->cameras : CAMERAS;
    int64_t bytes[CAMERAS], largest = 0, sample = 0;
    const vlai_image_rule rule = VLAI_IMAGE_RULE_DEFAULT;
    for (int64_t c = 0; c < b.cameras; c++) {
        const vla_feature *camera = vla_dataset_camera(b.set, c);
        if (vlai_image_fit(camera->width, camera->height, 256, &rule, &b.sizes[c], &err) != VLA_OK)
            return fail(&err);
        bytes[c] = b.sizes[c].width * b.sizes[c].height * 3;
        largest = bytes[c] > largest ? bytes[c] : largest;
        sample += bytes[c];
    }
    for (int t = 0; t < threads; t++) {
        b.out[t] = vlai_alloc((size_t)largest + 8);
        if (!b.out[t] || vla_frame_reader_create(b.set, NULL, &b.readers[t], &err) != VLA_OK ||
            vlai_resizer_create(&b.resizers[t], &err) != VLA_OK)
            return fail(&err);
    }
    vlai_pool *pool;
    if (vlai_pool_create(threads, &pool, &err) != VLA_OK)
        return fail(&err);
    int64_t tiles = frames / CHUNK;
    (void)timed(pool, threads * 4, decode, &b); /* opens files and decoders */
    double seconds = timed(pool, tiles, decode, &b);
    printf("decode and resize: %.0f frames/s (%d threads, random access)\n", (double)(tiles * CHUNK) / seconds, threads);
    char dir[256];
    snprintf(dir, sizeof dir, "/tmp/vla-bench-loader-%d", (int)getpid());
    const vlai_frame_cache_options o = {.dir = dir, .digest = vla_dataset_info_get(b.set)->digest, .transform = "bench",
                                        .rows = vla_dataset_info_get(b.set)->rows, .sizes = bytes, .cameras = b.cameras,
                                        .limit = UINT64_C(4000000000)};
    if (vlai_frame_cache_open(&o, &b.cache, &err) != VLA_OK)
        return fail(&err);
    seconds = timed(pool, tiles, decode, &b);
    printf("the same, filling the cache: %.0f frames/s\n", (double)(tiles * CHUNK) / seconds);
    (void)timed(pool, tiles, recall, &b); /* hashes are checked once */
    seconds = timed(pool, tiles, recall, &b);
    vlai_frame_cache_stats stats = vlai_frame_cache_stats_get(b.cache);
    printf("from the cache: %.0f samples/s of %.2f MB (%lld hits, %lld misses)\n", (double)(tiles * CHUNK) / seconds,
           (double)sample / 1e6, (long long)stats.hits, (long long)stats.misses);
    vlai_frame_cache_close(b.cache);
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    for (int t = 0; t < threads; t++) {
        if (b.errors[t].status != VLA_OK)
            return fail(&b.errors[t]);
        vla_frame_reader_destroy(b.readers[t]);
        vlai_resizer_destroy(b.resizers[t]);
        vlai_free(b.out[t]);
    }
    vlai_pool_destroy(pool);
    vla_dataset_close(b.set);
    return system(command) != 0;
}
