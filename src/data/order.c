/* MT19937 of Matsumoto and Nishimura (1998); the shuffle of torch's randperm for n below 2^32 / 20. */
#include "data/order.h"

#include "base/fail.h"
#include "base/memory.h"

#include <inttypes.h>
#include <pthread.h>
#include <string.h>

void vlai_mt19937_seed(vlai_mt19937 *mt, uint32_t seed)
{
    mt->state[0] = seed;
    for (uint32_t i = 1; i < 624; i++)
        mt->state[i] = 1812433253u * (mt->state[i - 1] ^ (mt->state[i - 1] >> 30)) + i;
    mt->next = 624;
}

uint32_t vlai_mt19937_next(vlai_mt19937 *mt)
{
    if (mt->next == 624) {
        for (int i = 0; i < 624; i++) {
            uint32_t y = (mt->state[i] & 0x80000000u) | (mt->state[(i + 1) % 624] & 0x7FFFFFFFu);
            mt->state[i] = mt->state[(i + 397) % 624] ^ (y >> 1) ^ ((y & 1) ? 0x9908B0DFu : 0);
        }
        mt->next = 0;
    }
    uint32_t y = mt->state[mt->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9D2C5680u;
    y ^= (y << 15) & 0xEFC60000u;
    return y ^ (y >> 18);
}

vla_status vlai_randperm(int64_t n, uint64_t seed, int64_t *out, vla_error *err)
{
    const int64_t limit = (int64_t)(UINT32_MAX / 20);
    if (n < 0 || n >= limit)
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "train on fewer episodes (data.lerobot_config.episodes)",
                              "%" PRId64 " samples cannot be shuffled as the reference does; the limit is %" PRId64, n,
                              limit - 1);
    vlai_mt19937 mt;
    vlai_mt19937_seed(&mt, (uint32_t)seed);
    for (int64_t i = 0; i < n; i++)
        out[i] = i;
    for (int64_t i = 0; i + 1 < n; i++) {
        int64_t z = (int64_t)(vlai_mt19937_next(&mt) % (uint32_t)(n - i)), moved = out[i];
        out[i] = out[i + z];
        out[i + z] = moved;
    }
    return VLA_OK;
}

vla_status vlai_order_split(int64_t n, uint64_t seed, int64_t *out, int64_t *train, vla_error *err)
{
    VLA_TRY(vlai_randperm(n, seed, out, err));
    int64_t first = (int64_t)(0.95 * (double)n), second = (int64_t)(0.05 * (double)n), rest = n - first - second;
    *train = first + (rest + 1) / 2; /* the remainder goes out one by one, train first */
    return VLA_OK;
}

int64_t vlai_order_per_rank(int64_t n, int64_t world, bool drop)
{
    if (!drop || n % world == 0)
        return (n + world - 1) / world;
    return n < world ? 0 : n / world; /* ceil((n - world) / world) */
}

int64_t vlai_order_place(int64_t i, int64_t rank, int64_t world)
{
    return rank + i * world;
}

typedef struct epoch_order {
    int64_t epoch; /* -1 = empty */
    int64_t *places;
} epoch_order;

struct vlai_order {
    pthread_mutex_t lock;
    int64_t *rows; /* NULL: the identity */
    int64_t count;
    uint64_t seed;
    bool shuffle;
    epoch_order kept[2];
    int oldest;
};

vla_status vlai_order_create(const int64_t *rows, int64_t n, uint64_t seed, bool shuffle, vlai_order **out, vla_error *err)
{
    *out = NULL;
    if (n < 1)
        return vlai_fail(err, VLA_E_INVALID, "a data order of %" PRId64 " samples", n);
    vlai_order *order = vlai_calloc(1, sizeof *order);
    if (!order)
        return vlai_nomem(err, sizeof *order);
    if (pthread_mutex_init(&order->lock, NULL)) {
        vlai_free(order);
        return vlai_nomem(err, sizeof *order);
    }
    order->count = n;
    order->seed = seed;
    order->shuffle = shuffle;
    order->kept[0].epoch = order->kept[1].epoch = -1;
    if (rows) {
        order->rows = vlai_array((size_t)n, sizeof *rows);
        if (!order->rows) {
            vlai_order_destroy(order);
            return vlai_nomem(err, (size_t)n * sizeof *rows);
        }
        memcpy(order->rows, rows, (size_t)n * sizeof *rows);
    }
    *out = order;
    return VLA_OK;
}

void vlai_order_destroy(vlai_order *order)
{
    if (!order)
        return;
    pthread_mutex_destroy(&order->lock);
    for (int i = 0; i < 2; i++)
        vlai_free(order->kept[i].places);
    vlai_free(order->rows);
    vlai_free(order);
}

int64_t vlai_order_count(const vlai_order *order)
{
    return order->count;
}

/* The lock is held. */
static vla_status places_of(vlai_order *order, int64_t epoch, const int64_t **out, vla_error *err)
{
    for (int i = 0; i < 2; i++)
        if (order->kept[i].epoch == epoch) {
            *out = order->kept[i].places;
            return VLA_OK;
        }
    epoch_order *slot = &order->kept[order->oldest];
    slot->epoch = -1;
    if (!slot->places)
        slot->places = vlai_array((size_t)order->count, sizeof *slot->places);
    if (!slot->places)
        return vlai_nomem(err, (size_t)order->count * sizeof *slot->places);
    VLA_TRY(vlai_randperm(order->count, order->seed + (uint64_t)epoch, slot->places, err));
    slot->epoch = epoch;
    order->oldest ^= 1;
    *out = slot->places;
    return VLA_OK;
}

vla_status vlai_order_at(vlai_order *order, int64_t epoch, int64_t position, int64_t *row, vla_error *err)
{
    if (epoch < 0 || position < 0)
        return vlai_fail(err, VLA_E_INVALID, "no sample stands at epoch %" PRId64 ", position %" PRId64, epoch, position);
    int64_t place = position % order->count;
    if (order->shuffle) {
        const int64_t *places = NULL;
        pthread_mutex_lock(&order->lock);
        vla_status status = places_of(order, epoch, &places, err);
        if (status == VLA_OK)
            place = places[place];
        pthread_mutex_unlock(&order->lock);
        VLA_TRY(status);
    }
    *row = order->rows ? order->rows[place] : place;
    return VLA_OK;
}
