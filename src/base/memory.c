#include "base/memory.h"

#include "base/fail.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static void *default_alloc(size_t size, size_t align, void *user)
{
    (void)user;
    if (align <= 16)
        return malloc(size);
    size_t rounded = (size + align - 1) & ~(align - 1);
    return rounded < size ? NULL : aligned_alloc(align, rounded);
}

static void default_release(void *ptr, void *user)
{
    (void)user;
    free(ptr);
}

static vla_allocator current = {default_alloc, default_release, NULL};
static atomic_uint_fast64_t allocation_count, release_count;

void vla_allocator_set(const vla_allocator *allocator)
{
    static const vla_allocator standard = {default_alloc, default_release, NULL};
    current = allocator ? *allocator : standard;
}

vla_memory_stats vla_memory_stats_get(void)
{
    vla_memory_stats stats = {atomic_load(&allocation_count), atomic_load(&release_count)};
    return stats;
}

void *vlai_alloc_aligned(size_t size, size_t align)
{
    atomic_fetch_add(&allocation_count, 1);
    return current.alloc(size ? size : 1, align, current.user);
}

void *vlai_alloc(size_t size)
{
    return vlai_alloc_aligned(size, 16);
}

void vlai_free(void *ptr)
{
    if (!ptr)
        return;
    atomic_fetch_add(&release_count, 1);
    current.release(ptr, current.user);
}

int vlai_mul_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

int vlai_add_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

void *vlai_array(size_t count, size_t size)
{
    size_t bytes;
    return vlai_mul_size(count, size, &bytes) ? vlai_alloc(bytes) : NULL;
}

void *vlai_calloc(size_t count, size_t size)
{
    size_t bytes;
    if (!vlai_mul_size(count, size, &bytes))
        return NULL;
    void *ptr = vlai_alloc(bytes);
    if (ptr)
        memset(ptr, 0, bytes);
    return ptr;
}

void *vlai_grow(void *ptr, size_t old_bytes, size_t new_bytes)
{
    void *grown = vlai_alloc(new_bytes);
    if (!grown)
        return NULL;
    if (ptr) {
        memcpy(grown, ptr, old_bytes < new_bytes ? old_bytes : new_bytes);
        vlai_free(ptr);
    }
    return grown;
}

char *vlai_strndup(const char *text, size_t n)
{
    char *copy = vlai_alloc(n + 1);
    if (copy) {
        memcpy(copy, text, n);
        copy[n] = 0;
    }
    return copy;
}

char *vlai_strdup(const char *text)
{
    return vlai_strndup(text, strlen(text));
}

vla_status vlai_reserve(void **array, size_t *capacity, size_t count, size_t size, vla_error *err)
{
    if (count < *capacity)
        return VLA_OK;
    size_t wanted = *capacity ? *capacity * 2 : 16, bytes;
    if (wanted <= count)
        wanted = count + 1;
    if (!vlai_mul_size(wanted, size, &bytes))
        return vlai_nomem(err, SIZE_MAX);
    void *grown = vlai_grow(*array, *capacity * size, bytes);
    if (!grown)
        return vlai_nomem(err, bytes);
    *array = grown;
    *capacity = wanted;
    return VLA_OK;
}

struct vlai_arena_block {
    vlai_arena_block *next;
    size_t used, size;
    _Alignas(16) unsigned char data[];
};

void *vlai_arena_alloc(vlai_arena *arena, size_t size)
{
    if (size > SIZE_MAX / 2)
        return NULL;
    size = (size + 15) & ~(size_t)15;
    vlai_arena_block *block = arena->head;
    if (!block || block->size - block->used < size) {
        size_t want = size > 65536 ? size : 65536;
        block = vlai_alloc(sizeof *block + want);
        if (!block)
            return NULL;
        block->next = arena->head;
        block->used = 0;
        block->size = want;
        arena->head = block;
        arena->bytes += want;
    }
    void *ptr = block->data + block->used;
    block->used += size;
    memset(ptr, 0, size);
    return ptr;
}

char *vlai_arena_strdup(vlai_arena *arena, const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = vlai_arena_alloc(arena, n);
    if (copy)
        memcpy(copy, text, n);
    return copy;
}

void vlai_arena_fini(vlai_arena *arena)
{
    for (vlai_arena_block *block = arena->head; block;) {
        vlai_arena_block *next = block->next;
        vlai_free(block);
        block = next;
    }
    arena->head = NULL;
    arena->bytes = 0;
}
