#define _GNU_SOURCE
#include "base/pool.h"

#include "base/fail.h"
#include "base/memory.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

typedef struct {
    vlai_pool *pool;
    int index;
} worker_arg;

struct vlai_pool {
    int threads, started;
    pthread_t *handles;
    worker_arg *args;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    uint64_t generation; /* of the current job, under lock */
    int inside;          /* workers in the current job, under lock */
    bool open;           /* the current job may still be entered, under lock */
    bool stop;
    vlai_tile_fn fn;
    void *context;
    int64_t tiles;
    atomic_int_fast64_t next;
};

static void drain(vlai_pool *pool, int thread)
{
    for (;;) {
        int64_t tile = atomic_fetch_add(&pool->next, 1);
        if (tile >= pool->tiles)
            return;
        pool->fn(pool->context, tile, thread);
    }
}

static void *worker(void *argument)
{
    worker_arg *arg = argument;
    vlai_pool *pool = arg->pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stop && pool->generation == seen)
            pthread_cond_wait(&pool->wake, &pool->lock);
        if (pool->stop)
            break;
        seen = pool->generation;
        if (!pool->open) /* woke too late: the others have done it all */
            continue;
        pool->inside++;
        pthread_mutex_unlock(&pool->lock);
        drain(pool, arg->index);
        pthread_mutex_lock(&pool->lock);
        if (--pool->inside == 0)
            pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

int vlai_pool_processors(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > 0 ? n : 1;
}

vla_status vlai_pool_create(int threads, vlai_pool **out, vla_error *err)
{
    *out = NULL;
    if (threads <= 0)
        threads = vlai_pool_processors();
    vlai_pool *pool = vlai_calloc(1, sizeof *pool);
    if (!pool)
        return vlai_nomem(err, sizeof *pool);
    pool->threads = threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->handles = vlai_calloc((size_t)threads, sizeof *pool->handles);
    pool->args = vlai_calloc((size_t)threads, sizeof *pool->args);
    if (!pool->handles || !pool->args) {
        vlai_pool_destroy(pool);
        return vlai_nomem(err, sizeof *pool->handles * (size_t)threads);
    }
    for (int i = 1; i < threads; i++) {
        pool->args[i] = (worker_arg){pool, i};
        if (pthread_create(&pool->handles[i], NULL, worker, &pool->args[i]) != 0) {
            vlai_pool_destroy(pool);
            return vlai_fail(err, VLA_E_NOMEM, "cannot start worker thread %d of %d", i, threads);
        }
        pool->started = i;
    }
    *out = pool;
    return VLA_OK;
}

void vlai_pool_destroy(vlai_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 1; i <= pool->started; i++)
        pthread_join(pool->handles[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    vlai_free(pool->handles);
    vlai_free(pool->args);
    vlai_free(pool);
}

int vlai_pool_threads(const vlai_pool *pool)
{
    return pool ? pool->threads : 1;
}

void vlai_pool_run(vlai_pool *pool, int64_t tiles, vlai_tile_fn fn, void *context)
{
    if (!pool || pool->threads == 1 || tiles <= 1) {
        for (int64_t tile = 0; tile < tiles; tile++)
            fn(context, tile, 0);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->context = context;
    pool->tiles = tiles;
    atomic_store(&pool->next, 0);
    pool->open = true;
    pool->generation++;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    drain(pool, 0);
    pthread_mutex_lock(&pool->lock);
    pool->open = false;
    while (pool->inside)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
