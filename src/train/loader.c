#include "train/loader.h"

#include "base/fail.h"
#include "base/memory.h"
#include "base/time.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

/* Samples are numbered as this loader hands them out, from 0 on; index_of says where one stands in the order. A slot is owned
 * by the worker that took its number until it is done, then by the consumer until the batch is released. */
typedef struct {
    void *data;
    bool done;
    vla_status status;
    vla_error error;
} slot;

typedef struct {
    vlai_loader *loader;
    pthread_t thread;
    void *object;
    bool started, made;
} worker;

struct vlai_loader {
    vla_samples samples;
    vlai_loader_options options;
    slot *ring;
    int64_t slots;
    void **batch; /* of the call in progress */
    worker *workers;
    /* under the lock */
    pthread_mutex_t lock;
    pthread_cond_t filled, freed; /* a slot is done; slots were released */
    int64_t next;                 /* number that the next free worker takes */
    int64_t released;             /* those below may be overwritten */
    int64_t taken;                /* those below have been handed out */
    bool stop;
};

int64_t vlai_loader_slots(const vlai_loader_options *o)
{
    int64_t held = o->held > 1 ? o->held : 1;
    if (o->workers == 0)
        return o->batch * held;
    int64_t ahead = o->ahead > 0 ? o->ahead : o->batch > 2 * o->workers ? o->batch : 2 * o->workers;
    return o->batch * held + ahead;
}

vlai_loader_options vlai_loader_of(const vla_trainer_options *o)
{
    int64_t together = o->global_loss ? o->accumulation : 1, least = 2 * o->workers;
    return (vlai_loader_options){.batch = o->batch, .workers = o->workers, .held = together * (o->ahead ? VLAI_FLIGHTS : 1),
                                 .ahead = o->batch * together > least ? o->batch * together : least};
}

/* Place in the endless order of what is handed out as this number. */
static int64_t index_of(const vlai_loader *l, int64_t number)
{
    const vlai_loader_options *o = &l->options;
    int64_t stride = o->stride > 1 ? o->stride : 1;
    return o->first + (number / o->batch * stride + o->offset) * o->batch + number % o->batch;
}

static bool is_past_end(const vlai_loader *l, int64_t number)
{
    return l->options.end >= 0 && index_of(l, number) >= l->options.end;
}

static void read_slot(vlai_loader *l, void *object, int64_t number)
{
    slot *s = &l->ring[number % l->slots];
    int64_t index = index_of(l, number);
    vla_sample_key key = {.epoch = index / l->options.epoch_samples, .place = index % l->options.epoch_samples,
                          .stream = l->options.stream};
    key.position = (uint64_t)key.epoch * (uint64_t)l->samples.count + (uint64_t)key.place;
    s->error = (vla_error)VLA_ERROR_INIT;
    s->status = l->samples.read(l->samples.user, object, &key, s->data, &s->error);
}

static void *work(void *argument)
{
    worker *w = argument;
    vlai_loader *l = w->loader;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        while (!l->stop && (is_past_end(l, l->next) || l->next >= l->released + l->slots))
            pthread_cond_wait(&l->freed, &l->lock);
        if (l->stop)
            break;
        int64_t number = l->next++;
        pthread_mutex_unlock(&l->lock);
        read_slot(l, w->object, number);
        pthread_mutex_lock(&l->lock);
        l->ring[number % l->slots].done = true;
        pthread_cond_signal(&l->filled);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static vla_status start_workers(vlai_loader *l, vla_error *err)
{
    int64_t objects = l->options.workers ? l->options.workers : 1;
    l->workers = vlai_calloc((size_t)objects, sizeof *l->workers);
    if (!l->workers)
        return vlai_nomem(err, (size_t)objects * sizeof *l->workers);
    for (int64_t i = 0; i < objects; i++) {
        worker *w = &l->workers[i];
        w->loader = l;
        if (l->samples.worker_create)
            VLA_TRY(l->samples.worker_create(l->samples.user, &w->object, err));
        w->made = true;
    }
    for (int64_t i = 0; i < l->options.workers; i++) {
        if (pthread_create(&l->workers[i].thread, NULL, work, &l->workers[i]) != 0)
            return vlai_fail_hint(err, VLA_E_NOMEM, "lower data.num_workers", "cannot start loader thread %lld of %lld",
                                  (long long)i + 1, (long long)l->options.workers);
        l->workers[i].started = true;
    }
    return VLA_OK;
}

vla_status vlai_loader_create(const vla_samples *samples, const vlai_loader_options *options, vlai_loader **out,
                              vla_error *err)
{
    *out = NULL;
    if (options->batch < 1 || options->workers < 0 || options->epoch_samples < 1 || samples->count < options->epoch_samples)
        return vlai_fail(err, VLA_E_INVALID,
                         "loader: batch %lld, workers %lld, %lld of %lld samples per epoch: wanted at least 1, 0, 1 and no more",
                         (long long)options->batch, (long long)options->workers, (long long)options->epoch_samples,
                         (long long)samples->count);
    if (options->offset < 0 || options->offset >= (options->stride > 1 ? options->stride : 1))
        return vlai_fail(err, VLA_E_INVALID, "loader: batch %lld of every %lld", (long long)options->offset, (long long)options->stride);
    vlai_loader *l = vlai_calloc(1, sizeof *l);
    if (!l)
        return vlai_nomem(err, sizeof *l);
    l->samples = *samples;
    l->options = *options;
    l->slots = vlai_loader_slots(options);
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->filled, NULL);
    pthread_cond_init(&l->freed, NULL);
    l->ring = vlai_calloc((size_t)l->slots, sizeof *l->ring);
    l->batch = vlai_calloc((size_t)options->batch, sizeof *l->batch);
    vla_status status = l->ring && l->batch ? VLA_OK : vlai_nomem(err, (size_t)l->slots * sizeof *l->ring);
    for (int64_t i = 0; status == VLA_OK && i < l->slots; i++)
        status = samples->slot_create(samples->user, &l->ring[i].data, err);
    if (status == VLA_OK)
        status = start_workers(l, err);
    if (status != VLA_OK) {
        vlai_loader_destroy(l);
        return status;
    }
    *out = l;
    return VLA_OK;
}

void vlai_loader_destroy(vlai_loader *l)
{
    if (!l)
        return;
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_broadcast(&l->freed);
    pthread_mutex_unlock(&l->lock);
    int64_t objects = l->options.workers ? l->options.workers : 1;
    for (int64_t i = 0; l->workers && i < objects; i++) {
        if (l->workers[i].started)
            pthread_join(l->workers[i].thread, NULL);
        if (l->workers[i].made && l->samples.worker_destroy)
            l->samples.worker_destroy(l->samples.user, l->workers[i].object);
    }
    for (int64_t i = 0; l->ring && i < l->slots; i++)
        if (l->ring[i].data)
            l->samples.slot_destroy(l->samples.user, l->ring[i].data);
    pthread_cond_destroy(&l->freed);
    pthread_cond_destroy(&l->filled);
    pthread_mutex_destroy(&l->lock);
    vlai_free(l->workers);
    vlai_free(l->batch);
    vlai_free(l->ring);
    vlai_free(l);
}

/* The slots of the batches handed out before may be filled again, but for the newest held - 1. */
static void release_batch(vlai_loader *l)
{
    pthread_mutex_lock(&l->lock);
    int64_t kept = l->options.held > 1 ? (l->options.held - 1) * l->options.batch : 0;
    int64_t end = l->taken - kept > l->released ? l->taken - kept : l->released;
    for (int64_t i = l->released; i < end; i++)
        l->ring[i % l->slots].done = false;
    l->released = end;
    pthread_cond_broadcast(&l->freed);
    pthread_mutex_unlock(&l->lock);
}

vla_status vlai_loader_next(vlai_loader *l, void *const **slots, int64_t *count, double *stall, vla_error *err)
{
    double began = vlai_now();
    vla_status status = VLA_OK;
    int64_t n = 0;
    release_batch(l);
    for (; n < l->options.batch && !is_past_end(l, l->taken + n); n++) {
        slot *s = &l->ring[(l->taken + n) % l->slots];
        if (l->options.workers == 0) {
            read_slot(l, l->workers[0].object, l->taken + n);
        } else {
            pthread_mutex_lock(&l->lock);
            while (!s->done)
                pthread_cond_wait(&l->filled, &l->lock);
            pthread_mutex_unlock(&l->lock);
        }
        l->batch[n] = s->data;
        if (s->status != VLA_OK && status == VLA_OK) {
            status = s->status;
            if (err)
                *err = s->error;
        }
    }
    pthread_mutex_lock(&l->lock);
    l->taken += n;
    pthread_mutex_unlock(&l->lock);
    *slots = l->batch;
    *count = n;
    if (stall)
        *stall = vlai_now() - began;
    return status;
}
