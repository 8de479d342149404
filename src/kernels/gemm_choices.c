#include "kernels/gemm_choices.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    vlai_gemm_shape shape;
    vlai_gemm_choice choice;
    bool used;
} entry;

struct vlai_gemm_choices {
    entry *entries;
    size_t count, capacity;
    bool changed;
    char *kind, *path; /* files of the kind of GPU, of this GPU */
};

static bool same(const vlai_gemm_shape *a, const vlai_gemm_shape *b)
{
    return a->m == b->m && a->n == b->n && a->k == b->k && a->transpose_a == b->transpose_a && a->transpose_b == b->transpose_b &&
           a->bias == b->bias && a->residual == b->residual && a->sums == b->sums && a->operand == b->operand &&
           a->result == b->result && ((!a->bias && !a->sums) || a->bias_type == b->bias_type);
}

static entry *find(const vlai_gemm_choices *c, const vlai_gemm_shape *shape)
{
    for (size_t i = 0; i < c->count; i++)
        if (same(&c->entries[i].shape, shape))
            return &c->entries[i];
    return NULL;
}

/* One line; false when it is none. */
static bool read_line(const char *line, vlai_gemm_shape *s, vlai_gemm_choice *c)
{
    int operand, result, bias_type;
    uint64_t *w = c->words;
    int n = sscanf(line, "%" SCNd64 " %" SCNd64 " %" SCNd64 " %d %d %d %d %d %d %d %d %" SCNu64
                   " %f %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64,
                   &s->m, &s->n, &s->k, &s->transpose_a, &s->transpose_b, &s->bias, &s->residual, &s->sums, &operand, &result,
                   &bias_type, &c->workspace, &c->milliseconds, &w[0], &w[1], &w[2], &w[3], &w[4], &w[5], &w[6], &w[7]);
    s->operand = (vla_dtype)operand;
    s->result = (vla_dtype)result;
    s->bias_type = (vla_dtype)bias_type;
    return n == 21;
}

static vla_status put(vlai_gemm_choices *c, const vlai_gemm_shape *shape, const vlai_gemm_choice *choice, bool used, vla_error *err)
{
    entry *e = find(c, shape);
    if (!e) {
        VLA_TRY(vlai_reserve((void **)&c->entries, &c->capacity, c->count, sizeof *c->entries, err));
        e = &c->entries[c->count++];
    }
    *e = (entry){*shape, *choice, used};
    return VLA_OK;
}

static vla_status adopt(vlai_gemm_choices *c, const char *text, bool strict, vla_error *err)
{
    for (int number = 1; text && *text; number++) {
        const char *end = strchr(text, '\n');
        vlai_gemm_shape s = {0};
        vlai_gemm_choice choice;
        if (end != text && *text) {
            if (read_line(text, &s, &choice))
                VLA_TRY(put(c, &s, &choice, false, err));
            else if (strict)
                return vlai_fail(err, VLA_E_INVALID, "choice of a matrix product's algorithm, line %d: '%.60s' is not understood", number, text);
        }
        text = end ? end + 1 : NULL;
    }
    return VLA_OK;
}

vla_status vlai_gemm_choices_open(const char *path, const char *gpu, vlai_gemm_choices **out, vla_error *err)
{
    vlai_gemm_choices *c = vlai_calloc(1, sizeof *c);
    *out = c;
    if (!c)
        return vlai_nomem(err, sizeof *c);
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

bool vlai_gemm_choices_find(vlai_gemm_choices *c, const vlai_gemm_shape *shape, vlai_gemm_choice *out)
{
    entry *e = find(c, shape);
    if (!e)
        return false;
    e->used = true;
    *out = e->choice;
    return true;
}

vla_status vlai_gemm_choices_put(vlai_gemm_choices *c, const vlai_gemm_shape *shape, const vlai_gemm_choice *choice, vla_error *err)
{
    c->changed = true;
    return put(c, shape, choice, true, err);
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
    c->changed = status != VLA_OK;
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
