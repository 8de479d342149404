/* What the loader of a configuration reaches: samples of its data set, read, decoded, resized and tokenised by its workers,
 * handed out in order, with nothing to train on them. */
#include "bench.h"

#include "base/fail.h"
#include "base/time.h"
#include "train/loader.h"
#include "train/wallx_task.h"

#include <inttypes.h>
#include <stdio.h>

static vla_status measure(const vlai_wallx_setup *s, double seconds, bool json, double opened, FILE *out, vla_error *err)
{
    const vlai_loader_options o = {.batch = s->options.batch, .workers = s->options.workers, .end = -1,
                                   .epoch_samples = s->samples.count, .stream = VLA_SAMPLES_TRAIN};
    vlai_loader *loader;
    void *const *slots;
    int64_t count, samples = 0, warm = 0;
    double stall;
    VLA_TRY(vlai_loader_create(&s->samples, &o, &loader, err));
    vla_status status = VLA_OK;
    double start = vlai_now(), measured = 0, first = 0;
    /* The ring fills while the first batches come: they are not counted. */
    while (status == VLA_OK && (measured < seconds || samples == 0)) {
        status = vlai_loader_next(loader, &slots, &count, &stall, err);
        if (first == 0)
            first = vlai_now() - start;
        if (warm < 2 * o.workers + 2 * o.batch) {
            warm += count;
            start = vlai_now();
            continue;
        }
        samples += count;
        measured = vlai_now() - start;
    }
    vlai_loader_destroy(loader);
    VLA_TRY(status);
    double rate = (double)samples / measured;
    json_t *object = json_pack("{s:s, s:I, s:I, s:f, s:f, s:f, s:I, s:f}", "kind", "loader", "workers", (json_int_t)o.workers, "batch", (json_int_t)o.batch,
                               "samples_per_s", rate, "open_ms", opened * 1e3, "first_batch_ms", first * 1e3, "samples", (json_int_t)samples, "seconds", measured);
    if (!object)
        return vlai_nomem(err, 0);
    if (json) {
        json_dumpf(object, stdout, JSON_COMPACT);
        putchar('\n');
    } else {
        printf("loader: %.1f samples/s with %" PRId64 " workers (%" PRId64 " samples in %.1f s; opened in %.0f ms, first batch after %.0f ms); a step of %" PRId64
               " samples may not be shorter than %.1f ms\n",
               rate, o.workers, samples, measured, opened * 1e3, first * 1e3, o.batch, (double)o.batch / rate * 1e3);
    }
    if (out) {
        json_dumpf(object, out, JSON_COMPACT);
        fputc('\n', out);
    }
    json_decref(object);
    return VLA_OK;
}

vla_status bench_loader(const vlai_config *config, double seconds, bool json, FILE *out, vla_error *err)
{
    vlai_wallx_task *task;
    double start = vlai_now();
    VLA_TRY(vlai_wallx_task_open(config, &task, err));
    vla_status status = measure(vlai_wallx_task_setup(task), seconds, json, vlai_now() - start, out, err);
    vlai_wallx_task_close(task);
    return status;
}
