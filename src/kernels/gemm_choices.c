#include "kernels/gemm_choices.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    vlai_gemm_shape shape;
    vlai_gemm_choice choice;
    bool used;
} entry;

struct vlai_gemm_choices {
    entry *entries; /* ordered by shape, so that the text does not tell who came first */
    size_t count, capacity;
    bool changed;
    char *kind, *path; /* files of the kind of GPU, of this GPU */
};

enum { KEY = 12 };

/* What tells shapes apart, in the order of the text. */
static void key_of(const vlai_gemm_shape *s, int64_t key[KEY])
{
    const int64_t all[KEY] = {s->m, s->n, s->k, s->transpose_a, s->transpose_b, s->bias, s->residual, s->sums, s->operand, s->result,
                              s->bias || s->sums ? s->bias_type : VLA_DTYPE_NONE, s->multiprocessors};
    memcpy(key, all, sizeof all);
}

/* The first entry that is not before the shape: its own, or where it belongs. */
static size_t place_of(const vlai_gemm_choices *c, const vlai_gemm_shape *shape, bool *found)
{
    int64_t wanted[KEY], have[KEY];
    size_t low = 0, high = c->count;
    *found = false;
    key_of(shape, wanted);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int i = 0;
        key_of(&c->entries[middle].shape, have);
        while (i < KEY && have[i] == wanted[i])
            i++;
        *found = *found || i == KEY;
        if (i < KEY && have[i] < wanted[i])
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static entry *find(const vlai_gemm_choices *c, const vlai_gemm_shape *shape)
{
    bool found;
    size_t at = place_of(c, shape, &found);
    return found ? &c->entries[at] : NULL;
}

/* The first `length` characters, one line; false when they are none. scanf goes on into the next line where this one is cut. */
static bool read_line(const char *line, size_t length, vlai_gemm_shape *s, vlai_gemm_choice *c)
{
    int operand, result, bias_type, end = 0;
    uint64_t *w = c->words;
    int n = sscanf(line, "%" SCNd64 " %" SCNd64 " %" SCNd64 " %d %d %d %d %d %d %d %d %" SCNu64
                   " %f %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 "%n",
                   &s->m, &s->n, &s->k, &s->transpose_a, &s->transpose_b, &s->bias, &s->residual, &s->sums, &operand, &result,
                   &bias_type, &c->workspace, &c->milliseconds, &w[0], &w[1], &w[2], &w[3], &w[4], &w[5], &w[6], &w[7], &end);
    s->operand = (vla_dtype)operand;
    s->result = (vla_dtype)result;
    s->bias_type = (vla_dtype)bias_type;
    s->multiprocessors = 0;
    if (n != 21 || (size_t)end >= length)
        return n == 21 && (size_t)end == length;
    char *rest;
    long multiprocessors = strtol(line + end, &rest, 10);
    s->multiprocessors = (int)multiprocessors;
    return line[end] == ' ' && rest == line + length && multiprocessors > 0 && multiprocessors <= INT16_MAX;
}

/* In place of the shape's choice so far; whether it is used stays as it was. */
static vla_status put(vlai_gemm_choices *c, const vlai_gemm_shape *shape, const vlai_gemm_choice *choice, vla_error *err)
{
    bool found;
    size_t at = place_of(c, shape, &found);
    if (!found) {
        VLA_TRY(vlai_reserve((void **)&c->entries, &c->capacity, c->count, sizeof *c->entries, err));
        memmove(c->entries + at + 1, c->entries + at, (c->count++ - at) * sizeof *c->entries);
        c->entries[at] = (entry){.shape = *shape};
        if (!shape->bias && !shape->sums)
            c->entries[at].shape.bias_type = VLA_DTYPE_NONE;
    }
    c->entries[at].choice = *choice;
    return VLA_OK;
}

/* used: they are a run's, not only a file's; then a line that is not understood is an error. */
static vla_status adopt(vlai_gemm_choices *c, const char *text, bool used, vla_error *err)
{
    for (int number = 1; text && *text; number++) {
        const char *end = strchr(text, '\n');
        vlai_gemm_shape s = {0};
        vlai_gemm_choice choice;
        if (end != text && *text) {
            bool understood = read_line(text, end ? (size_t)(end - text) : strlen(text), &s, &choice);
            if (understood)
                VLA_TRY(put(c, &s, &choice, err));
            if (understood && used)
                find(c, &s)->used = true;
            if (!understood && used)
                return vlai_fail(err, VLA_E_INVALID, "choice of a matrix product's algorithm, line %d: '%.60s' is not understood", number, text);
        }
        text = end ? end + 1 : NULL;
    }
    return VLA_OK;
}

const char *vlai_gemm_choices_known(const char *name)
{
    for (const vlai_gemm_product_text *t = vlai_gemm_product_texts; t->name; t++)
        if (!strcmp(t->name, name))
            return t->text;
    return NULL;
}

vla_status vlai_gemm_choices_open(const char *path, const char *gpu, const char *known, vlai_gemm_choices **out, vla_error *err)
{
    vlai_gemm_choices *c = vlai_calloc(1, sizeof *c);
    *out = c;
    if (!c)
        return vlai_nomem(err, sizeof *c);
    VLA_TRY(adopt(c, known, false, err));
    if (!path)
        return VLA_OK;
    size_t room = strlen(path) + strlen(gpu) + 2;
    c->kind = vlai_strdup(path);
    c->path = vlai_alloc(room);
    if (!c->kind || !c->path)
        return vlai_nomem(err, room);
    snprintf(c->path, room, "%s.%s", path, gpu);
    char *text = NULL;
    size_t size;
    if (vlai_is_file(c->path))
        path = c->path;
    if (!vlai_is_file(path) || vlai_read_file(path, 0, &text, &size, NULL) != VLA_OK)
        return VLA_OK;
    vla_status status = adopt(c, text, false, err);
    vlai_free(text);
    return status;
}

void vlai_gemm_choices_close(vlai_gemm_choices *c)
{
    if (!c)
        return;
    vlai_free(c->entries);
    vlai_free(c->kind);
    vlai_free(c->path);
    vlai_free(c);
}

bool vlai_gemm_choices_find(const vlai_gemm_choices *c, const vlai_gemm_shape *shape, vlai_gemm_choice *out)
{
    const entry *e = find(c, shape);
    if (e)
        *out = e->choice;
    return e != NULL;
}

bool vlai_gemm_shape_same(const vlai_gemm_shape *a, const vlai_gemm_shape *b)
{
    int64_t x[KEY], y[KEY];
    key_of(a, x);
    key_of(b, y);
    return !memcmp(x, y, sizeof x);
}

static bool is_near(const vlai_gemm_shape *a, const vlai_gemm_shape *b)
{
    vlai_gemm_shape other = *b;
    const int64_t x = a->transpose_a ? a->k : a->m, y = a->transpose_a ? b->k : b->m;
    *(a->transpose_a ? &other.k : &other.m) = x;
    return x != y && x <= 2 * y && y <= 2 * x && vlai_gemm_shape_same(a, &other);
}

int vlai_gemm_choices_near(const vlai_gemm_choices *c, const vlai_gemm_shape *shape, vlai_gemm_choice *out, int most)
{
    int n = 0;
    for (size_t i = 0; i < c->count && n < most; i++) {
        const entry *e = &c->entries[i];
        bool known = e->choice.milliseconds <= 0 || !is_near(shape, &e->shape); /* 0 and less: no algorithm of this product */
        for (int k = 0; k < n && !known; k++)
            known = !memcmp(out[k].words, e->choice.words, sizeof out[k].words);
        if (!known)
            out[n++] = e->choice;
    }
    return n;
}

void vlai_gemm_choices_use(vlai_gemm_choices *c, const vlai_gemm_shape *shape)
{
    entry *e = find(c, shape);
    if (e)
        e->used = true;
}

vla_status vlai_gemm_choices_put(vlai_gemm_choices *c, const vlai_gemm_shape *shape, const vlai_gemm_choice *choice, vla_error *err)
{
    c->changed = true;
    return put(c, shape, choice, err);
}

static void print(const vlai_gemm_choices *c, bool all, vlai_text *out)
{
    for (size_t i = 0; i < c->count; i++) {
        const vlai_gemm_shape *s = &c->entries[i].shape;
        if (!all && !c->entries[i].used)
            continue;
        vlai_text_printf(out, "%" PRId64 " %" PRId64 " %" PRId64 " %d %d %d %d %d %d %d %d %" PRIu64 " %.4f", s->m, s->n, s->k, s->transpose_a,
                         s->transpose_b, s->bias, s->residual, s->sums, (int)s->operand, (int)s->result, (int)s->bias_type,
                         c->entries[i].choice.workspace, (double)c->entries[i].choice.milliseconds);
        for (int w = 0; w < 8; w++)
            vlai_text_printf(out, " %" PRIx64, c->entries[i].choice.words[w]);
        if (s->multiprocessors)
            vlai_text_printf(out, " %d", s->multiprocessors);
        vlai_text_puts(out, "\n");
    }
}

vla_status vlai_gemm_choices_save(vlai_gemm_choices *c, vla_error *err)
{
    if (!c->changed || !c->path)
        return VLA_OK;
    vlai_text text = {0};
    print(c, true, &text);
    vla_status status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        status = vlai_write_file_atomic(c->path, text.data, text.size, err);
    if (status == VLA_OK && !vlai_is_file(c->kind))
        status = vlai_write_file_atomic(c->kind, text.data, text.size, err);
    vlai_text_fini(&text);
    c->changed = false; /* what could not be written is, once there is more */
    return status;
}

void vlai_gemm_choices_text(const vlai_gemm_choices *c, vlai_text *out)
{
    print(c, false, out);
}

vla_status vlai_gemm_choices_adopt(vlai_gemm_choices *c, const char *text, vla_error *err)
{
    return adopt(c, text, true, err);
}
