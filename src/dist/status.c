#define _GNU_SOURCE /* memfd_create: shared memory that has no name, and so leaves nothing behind */
#include "dist/status.h"

#include "base/fail.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WORDS = VLAI_STATUS_PHASE / 8, MOST = 1 << 20 };
static const uint64_t magic = 0x31737574617473; /* another program's descriptor of that number is not ours */

/* One per rank. A reader may see the old step with the new phase, which is as good as either. */
typedef struct {
    _Atomic uint64_t magic;
    _Atomic int64_t step;
    _Atomic uint64_t phase[WORDS];
} page;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static page *mine;

static void find_mine(void)
{
    const char *text = getenv(VLAI_STATUS_VARIABLE);
    int fd, slot;
    char end;
    struct stat info;
    if (!text || sscanf(text, "%d:%d%c", &fd, &slot, &end) != 2 || fd < 0 || slot < 0 || slot >= MOST || fstat(fd, &info) != 0)
        return;
    size_t bytes = ((size_t)slot + 1) * sizeof(page);
    if ((uint64_t)info.st_size < bytes)
        return;
    page *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (pages != MAP_FAILED && atomic_load(&pages[slot].magic) == magic)
        mine = pages + slot;
}

static void write_page(page *p, const char *phase, int64_t step)
{
    char text[VLAI_STATUS_PHASE] = {0};
    uint64_t words[WORDS];
    snprintf(text, sizeof text, "%s", phase);
    memcpy(words, text, sizeof text);
    for (int i = 0; i < WORDS; i++)
        atomic_store_explicit(&p->phase[i], words[i], memory_order_relaxed);
    atomic_store_explicit(&p->step, step, memory_order_relaxed);
}

void vlai_status_put(const char *phase, int64_t step)
{
    pthread_once(&once, find_mine);
    if (mine)
        write_page(mine, phase, step);
}

vla_status vlai_status_make(int slots, vlai_status_pages *out, vla_error *err)
{
    *out = (vlai_status_pages){0};
    size_t bytes = (size_t)slots * sizeof(page);
    int fd = memfd_create("vla-status", 0);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
        int code = errno;
        if (fd >= 0)
            close(fd);
        return vlai_fail(err, VLA_E_IO, "no shared memory of %zu bytes for the state of %d ranks: %s", bytes, slots, strerror(code));
    }
    page *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (pages == MAP_FAILED) {
        close(fd);
        return vlai_nomem(err, bytes);
    }
    for (int i = 0; i < slots; i++) {
        write_page(pages + i, VLAI_STATUS_FIRST, 0);
        atomic_store(&pages[i].magic, magic);
    }
    *out = (vlai_status_pages){.fd = fd, .slots = slots, .map = pages};
    return VLA_OK;
}

void vlai_status_get(const vlai_status_pages *pages, int slot, char phase[VLAI_STATUS_PHASE], int64_t *step)
{
    page *p = (page *)pages->map + slot;
    uint64_t words[WORDS];
    for (int i = 0; i < WORDS; i++)
        words[i] = atomic_load_explicit(&p->phase[i], memory_order_relaxed);
    memcpy(phase, words, VLAI_STATUS_PHASE);
    phase[VLAI_STATUS_PHASE - 1] = 0;
    *step = atomic_load_explicit(&p->step, memory_order_relaxed);
}

void vlai_status_drop(vlai_status_pages *pages)
{
    if (!pages->map)
        return;
    munmap(pages->map, (size_t)pages->slots * sizeof(page));
    close(pages->fd);
    *pages = (vlai_status_pages){0};
}
