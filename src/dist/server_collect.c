/* The calls that members wait for: answers, collectives, keys. */
#include "dist/server_state.h"

#include "base/fail.h"
#include "base/memory.h"

#include <string.h>

enum { PART_KEPT = 64 << 10 };

/* --- answers --- */

static void answer_error(vlai_server *s, int rank, uint32_t id, const vla_error *e)
{
    member *m = &s->members[rank];
    vlai_head head = {.size = 0};
    vlai_head_u32(&head, e->status);
    vlai_server_put_error(&head, e);
    if (m->wire.fd >= 0 && !vlai_wire_put(&m->wire, FRAME_RESULT, id, &head, NULL, 0))
        vlai_server_no_memory(s);
}

/* `data` may be NULL with a size: the caller appends that much. False when nothing may follow. */
static bool answer(vlai_server *s, int rank, uint32_t id, const void *data, size_t size)
{
    member *m = &s->members[rank];
    uint8_t ok[4] = {0};
    if (m->wire.fd < 0)
        return false;
    if (vlai_wire_start(&m->wire, FRAME_RESULT, id, sizeof ok + size) && vlai_wire_append(&m->wire, ok, sizeof ok) &&
        (!data || vlai_wire_append(&m->wire, data, size)))
        return true;
    vlai_server_no_memory(s);
    return false;
}

static void stop_waiting(member *m, double now)
{
    m->waiting--;
    m->moved = m->waited = now;
}

/* --- collectives --- */

const char *const vlai_server_kinds[COLLECT_COUNT] = {"barrier", "agree", "broadcast", "gather", "gather_all"};

static bool keep_part(part *p, const uint8_t *data, size_t size)
{
    if (p->capacity < size) {
        uint8_t *grown = vlai_alloc(size);
        if (!grown)
            return false;
        vlai_free(p->data);
        p->data = grown;
        p->capacity = size;
    }
    if (size)
        memcpy(p->data, data, size);
    p->size = size;
    return true;
}

/* Whether the rank's call returns only with the result. */
static bool waits(uint32_t kind, int rank)
{
    return kind != COLLECT_GATHER || rank == 0;
}

/* VLA_OK, or the sentence about the first rank whose text differs from rank 0's. */
static vla_status compare(const vlai_server *s, const slot *c, vla_error *e)
{
    char difference[VLAI_LISTED];
    for (int r = 1; r < s->ranks.world; r++)
        if (vlai_first_difference((vlai_lines){c->parts[r].data, c->parts[r].size}, (vlai_lines){c->parts[0].data, c->parts[0].size}, difference))
            return vlai_fail_hint(e, VLA_E_INVALID, vlai_differ_hint, "%s: rank %d (host %s) differs from rank 0 (host %s) in %s", c->what, r, s->members[r].host,
                                  s->members[0].host, difference);
    return VLA_OK;
}

static void complete(vlai_server *s, slot *c, double now)
{
    vla_error e = VLA_ERROR_INIT;
    vla_status same = c->kind == COLLECT_AGREE ? compare(s, c, &e) : VLA_OK;
    for (int r = 0; r < s->ranks.world; r++) {
        uint32_t id = c->parts[r].id;
        if (waits(c->kind, r))
            stop_waiting(&s->members[r], now);
        if (same != VLA_OK) {
            answer_error(s, r, id, &e);
        } else if (c->kind == COLLECT_BROADCAST && r > 0) {
            answer(s, r, id, c->parts[0].data, c->parts[0].size);
        } else if (c->kind == COLLECT_GATHER_ALL || (c->kind == COLLECT_GATHER && r == 0)) {
            bool good = answer(s, r, id, NULL, (size_t)c->size * (size_t)s->ranks.world);
            for (int k = 0; k < s->ranks.world && good; k++)
                if (!vlai_wire_append(&s->members[r].wire, c->parts[k].data, c->size)) {
                    good = false;
                    vlai_server_no_memory(s);
                }
        } else {
            answer(s, r, id, "", 0);
        }
    }
    for (int r = 0; r < s->ranks.world; r++) {
        part *p = &c->parts[r];
        p->here = false;
        if (p->capacity > PART_KEPT) {
            vlai_free(p->data);
            *p = (part){.data = NULL};
        }
    }
    c->used = false;
    s->first++;
}

void vlai_server_check_left(vlai_server *s, const slot *c)
{
    for (int r = 0; r < s->ranks.world && c->used && !s->verdict_at; r++) {
        if (s->members[r].state != LEFT || c->parts[r].here)
            continue;
        vlai_fail_hint(&s->verdict, VLA_E_LOST, vlai_lost_hint, "rank %d (host %s) has left, and rank %d (host %s) waits for it in %s '%s'", r, s->members[r].host,
                       c->opener, s->members[c->opener].host, vlai_server_kinds[c->kind], c->what);
        vlai_server_end(s, r);
    }
}

bool vlai_server_collect(vlai_server *s, int rank, const vlai_frame *f, double now)
{
    vlai_cut cut = {f->data, f->size, false};
    char what[VLAI_GROUP_KEY + 1];
    uint32_t sequence = vlai_cut_u32(&cut), kind = vlai_cut_u32(&cut);
    double limit_s = vlai_cut_u32(&cut) / 1e3;
    uint32_t size = vlai_cut_u32(&cut);
    vlai_cut_text(&cut, what, sizeof what);
    bool brings = kind == COLLECT_AGREE || kind == COLLECT_GATHER || kind == COLLECT_GATHER_ALL || (kind == COLLECT_BROADCAST && rank == 0);
    size_t most = kind == COLLECT_GATHER || kind == COLLECT_GATHER_ALL ? VLAI_GROUP_MESSAGE / (size_t)s->ranks.world : VLAI_GROUP_MESSAGE;
    slot *c = &s->slots[sequence % SLOTS];
    if (cut.failed || kind >= COLLECT_COUNT || sequence - s->first >= SLOTS || size > most || cut.size != (brings ? size : 0) ||
        (c->used && c->parts[rank].here) || !s->met)
        return false;
    if (!c->used) {
        c->used = true;
        c->kind = kind;
        c->size = size;
        c->opener = rank;
        c->arrived = 0;
        c->deadline = 0;
        memcpy(c->what, what, sizeof what);
    } else if (c->kind != kind || strcmp(c->what, what) != 0 || (kind != COLLECT_AGREE && c->size != size)) {
        vlai_fail_hint(&s->verdict, VLA_E_INVALID, vlai_differ_hint, "rank %d (host %s) calls %s '%s' of %u bytes where rank %d (host %s) calls %s '%s' of %u bytes", rank,
                       s->members[rank].host, vlai_server_kinds[kind], what, size, c->opener, s->members[c->opener].host, vlai_server_kinds[c->kind], c->what, c->size);
        vlai_server_end(s, CULPRIT_NONE);
        return true;
    }
    part *p = &c->parts[rank];
    if (!keep_part(p, cut.data, cut.size)) {
        vlai_server_no_memory(s);
        return true;
    }
    p->id = f->id;
    p->here = true;
    if (waits(kind, rank))
        s->members[rank].waiting++;
    if (now + limit_s > c->deadline) {
        c->deadline = now + limit_s;
        c->limit_s = limit_s;
    }
    if (++c->arrived == s->ranks.world)
        complete(s, c, now);
    else if (s->left)
        vlai_server_check_left(s, c);
    return true;
}

/* --- keys --- */

bool vlai_server_set_key(vlai_server *s, int rank, const vlai_frame *f)
{
    vlai_cut cut = {f->data, f->size, false};
    char key[VLAI_GROUP_KEY + 1];
    vlai_cut_text(&cut, key, sizeof key);
    if (cut.failed || !*key || cut.size > VLAI_GROUP_MESSAGE)
        return false;
    vla_error e = VLA_ERROR_INIT;
    if (vlai_keys_set(&s->keys, key, cut.data, cut.size, &e) != VLA_OK) {
        answer_error(s, rank, f->id, &e);
        return true;
    }
    answer(s, rank, f->id, "", 0);
    /* Out of memory an answer ends the run and may take this rank's connection, with the frame in it: no more of that from here on. */
    for (size_t i = 0; i < s->keys.waiter_count && !s->verdict_at;) {
        vlai_key_waiter w = s->keys.waiters[i];
        if (strcmp(w.key, key) != 0) {
            i++;
            continue;
        }
        vlai_keys_drop_waiter(&s->keys, i);
        const vlai_key *k = vlai_keys_find(&s->keys, key);
        answer(s, w.rank, w.id, k->size ? k->data : (const void *)"", k->size);
    }
    return true;
}

bool vlai_server_forget_keys(vlai_server *s, int rank, const vlai_frame *f)
{
    vlai_cut cut = {f->data, f->size, false};
    char prefix[VLAI_GROUP_KEY + 1];
    vlai_cut_text(&cut, prefix, sizeof prefix);
    if (cut.failed || !*prefix || cut.size)
        return false;
    vlai_keys_forget(&s->keys, prefix);
    answer(s, rank, f->id, "", 0);
    return true;
}

void vlai_server_key_late(vlai_server *s, int rank, uint32_t id, const char *key, double limit_s)
{
    vla_error e = VLA_ERROR_INIT;
    if (limit_s > 0)
        vlai_fail_hint(&e, VLA_E_NOT_FOUND, vlai_late_hint, "no rank has set '%s' within %g s", key, limit_s);
    else
        vlai_fail(&e, VLA_E_NOT_FOUND, "no rank has set '%s'", key);
    answer_error(s, rank, id, &e);
}

bool vlai_server_get_key(vlai_server *s, int rank, const vlai_frame *f, double now)
{
    vlai_cut cut = {f->data, f->size, false};
    char key[VLAI_GROUP_KEY + 1];
    vlai_cut_text(&cut, key, sizeof key);
    double limit_s = vlai_cut_u32(&cut) / 1e3;
    if (cut.failed || !*key || cut.size)
        return false;
    const vlai_key *k = vlai_keys_find(&s->keys, key);
    if (k) {
        answer(s, rank, f->id, k->size ? k->data : (const void *)"", k->size);
    } else if (limit_s <= 0) {
        vlai_server_key_late(s, rank, f->id, key, 0);
    } else {
        vlai_key_waiter w = {.rank = rank, .id = f->id, .deadline = now + limit_s, .limit_s = limit_s};
        memcpy(w.key, key, sizeof key);
        if (vlai_keys_wait(&s->keys, &w) != VLA_OK)
            vlai_server_no_memory(s);
    }
    return true;
}
