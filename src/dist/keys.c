#include "dist/keys.h"

#include "base/fail.h"
#include "base/memory.h"

#include <string.h>

/* FNV-1a. */
static uint64_t hash_of(const char *name)
{
    uint64_t h = 14695981039346656037u;
    for (const char *p = name; *p; p++)
        h = (h ^ (uint8_t)*p) * 1099511628211u;
    return h;
}

const vlai_key *vlai_keys_find(const vlai_keys *keys, const char *name)
{
    uint64_t hash = hash_of(name);
    for (size_t i = 0; i < keys->count; i++)
        if (keys->list[i].hash == hash && strcmp(keys->list[i].name, name) == 0)
            return &keys->list[i];
    return NULL;
}

vla_status vlai_keys_set(vlai_keys *keys, const char *name, const void *data, size_t size, vla_error *err)
{
    vlai_key *old = (vlai_key *)vlai_keys_find(keys, name);
    size_t freed = old ? old->size : 0;
    if (size > VLAI_KEYS_BYTES - (keys->bytes - freed))
        return vlai_fail(err, VLA_E_INVALID, "key '%s': %zu bytes do not fit beside %zu of other keys, wanted at most %d together", name, size,
                         keys->bytes - freed, (int)VLAI_KEYS_BYTES);
    if (!old && keys->count >= VLAI_KEYS_MOST)
        return vlai_fail(err, VLA_E_INVALID, "key '%s': there are %zu keys already, wanted at most %d", name, keys->count, (int)VLAI_KEYS_MOST);
    void *copy = size ? vlai_alloc(size) : NULL;
    if (size && !copy)
        return vlai_nomem(err, size);
    if (size)
        memcpy(copy, data, size);
    if (!old) {
        char *own = vlai_strdup(name);
        if (!own || vlai_reserve((void **)&keys->list, &keys->capacity, keys->count, sizeof *keys->list, err) != VLA_OK) {
            vlai_free(own);
            vlai_free(copy);
            return vlai_nomem(err, size);
        }
        old = &keys->list[keys->count++];
        *old = (vlai_key){.hash = hash_of(name), .name = own};
    }
    vlai_free(old->data);
    old->data = copy;
    old->size = size;
    keys->bytes += size - freed;
    return VLA_OK;
}

void vlai_keys_forget(vlai_keys *keys, const char *prefix)
{
    size_t n = strlen(prefix);
    for (size_t i = 0; i < keys->count;) {
        vlai_key *k = &keys->list[i];
        if (strncmp(k->name, prefix, n) != 0) {
            i++;
            continue;
        }
        keys->bytes -= k->size;
        vlai_free(k->name);
        vlai_free(k->data);
        *k = keys->list[--keys->count];
    }
}

vla_status vlai_keys_wait(vlai_keys *keys, const vlai_key_waiter *waiter)
{
    if (keys->waiter_count >= VLAI_KEYS_MOST)
        return VLA_E_NOMEM;
    VLA_TRY(vlai_reserve((void **)&keys->waiters, &keys->waiter_capacity, keys->waiter_count, sizeof *keys->waiters, NULL));
    keys->waiters[keys->waiter_count++] = *waiter;
    return VLA_OK;
}

void vlai_keys_drop_waiter(vlai_keys *keys, size_t i)
{
    keys->waiters[i] = keys->waiters[--keys->waiter_count];
}

void vlai_keys_fini(vlai_keys *keys)
{
    for (size_t i = 0; i < keys->count; i++) {
        vlai_free(keys->list[i].name);
        vlai_free(keys->list[i].data);
    }
    vlai_free(keys->list);
    vlai_free(keys->waiters);
    *keys = (vlai_keys){.list = NULL};
}
