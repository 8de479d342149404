/* The loader: worker threads read samples into a bounded ring, and the trainer takes the next ones in order.
 *
 * The queue holds samples, not batches: each free thread takes the next sample that nobody has, so that a slow one delays
 * only itself. What stands in a slot depends on the sample's index alone, never on timing, thread or worker count.
 *
 *     vlai_loader_options o = {.batch = 8, .workers = 4, .first = 0, .end = -1};
 *     vlai_loader *loader;
 *     VLA_TRY(vlai_loader_create(&source, &o, &loader, err));
 *     void *const *slots;
 *     int64_t count;
 *     VLA_TRY(vlai_loader_next(loader, &slots, &count, &stall, err));   // valid until the next call, or the held-th
 *     vlai_loader_destroy(loader);
 *
 * With stride N and offset r the loader hands out every N-th batch of the order, from the r-th on: rank r of N.
 *
 * Slots are created once by the source; the ring holds `batch` of them for the trainer and the rest ahead of it. Errors of a
 * sample are kept in its slot and returned when its batch is asked for. Threads: one consumer. */
#ifndef VLAI_LOADER_H
#define VLAI_LOADER_H

#include "vla/trainer.h"

VLA_BEGIN_DECLS

typedef struct vlai_loader vlai_loader;

enum { VLAI_FLIGHTS = 2 }; /* steps of a training that may be under way at once */

typedef struct vlai_loader_options {
    int64_t batch;   /* samples per call of next */
    int64_t workers; /* 0: next reads in the calling thread */
    int64_t held;    /* batches that stay valid: 1 (also 0) is the newest alone */
    int64_t ahead;   /* slots beyond those of one batch; 0 = another batch, at least two per worker */
    int64_t first;   /* index of the first sample of batch 0 */
    int64_t end;     /* index after the last; negative = endless */
    int64_t stride, offset; /* batches offset, offset + stride, ... are handed out; stride 1 (also 0): all */
    int64_t epoch_samples; /* samples that an epoch hands out: index i is place i mod this of epoch i / this */
    uint32_t stream; /* VLA_SAMPLES_TRAIN or VLA_SAMPLES_VALIDATION */
} vlai_loader_options;

vla_status vlai_loader_create(const vla_samples *samples, const vlai_loader_options *options, vlai_loader **out,
                              vla_error *err);
/* Stops the threads and waits for them; accepts NULL. */
void vlai_loader_destroy(vlai_loader *loader);
/* The next samples. `count` is below the batch only before `end`, and 0 there; an empty batch may be asked for again. `stall`: seconds that the call waited. */
vla_status vlai_loader_next(vlai_loader *loader, void *const **slots, int64_t *count, double *stall, vla_error *err);
/* batch, workers, held and ahead of a training's loader. With global_loss the samples of a whole step are there together, since
 * each micro-batch weighs by what the others have. */
vlai_loader_options vlai_loader_of(const vla_trainer_options *trainer);
/* Slots that a loader of these options makes (for memory plans). */
int64_t vlai_loader_slots(const vlai_loader_options *options);

VLA_END_DECLS

#endif
