/* Host allocation inside the library, and arenas.
 *
 * Everything that the library allocates comes from here, so that a test can make any of it fail. An arena is a list of
 * blocks freed as a whole; objects in it have no destructor. */
#ifndef VLAI_MEMORY_H
#define VLAI_MEMORY_H

#include "vla/error.h"
#include "vla/memory.h"

VLA_BEGIN_DECLS

void *vlai_alloc(size_t size);                                  /* uninitialised; NULL on failure */
void *vlai_alloc_aligned(size_t size, size_t align);            /* released with vlai_free too */
void *vlai_calloc(size_t count, size_t size);                   /* zeroed; NULL on failure or overflow */
void *vlai_array(size_t count, size_t size);                    /* uninitialised count*size; NULL on overflow */
void *vlai_grow(void *ptr, size_t old_bytes, size_t new_bytes); /* NULL on failure, and `ptr` stays valid */
char *vlai_strdup(const char *text);
char *vlai_strndup(const char *text, size_t n);
void vlai_free(void *ptr);

/* Makes room for one more element of `size` bytes in a growing array; doubles. */
vla_status vlai_reserve(void **array, size_t *capacity, size_t count, size_t size, vla_error *err);

typedef struct vlai_arena_block vlai_arena_block;
typedef struct vlai_arena {
    vlai_arena_block *head;
    size_t bytes;
} vlai_arena;

void *vlai_arena_alloc(vlai_arena *arena, size_t size); /* zeroed, 16-byte aligned; NULL on failure */
char *vlai_arena_strdup(vlai_arena *arena, const char *text);
void vlai_arena_fini(vlai_arena *arena);

/* a*b and a+b with overflow reported as 0. */
int vlai_mul_size(size_t a, size_t b, size_t *out);
int vlai_add_size(size_t a, size_t b, size_t *out);

VLA_END_DECLS

#endif
