/* What the server judges by the time: who has not come, who is late, silent or standing still. */
#include "dist/server_state.h"

#include "base/fail.h"
#include "base/log.h"

#include <stdio.h>
#include <string.h>

static bool is_missing(const void *server, int rank)
{
    return ((const vlai_server *)server)->members[rank].state == ABSENT;
}

static bool is_staying(const void *server, int rank)
{
    return ((const vlai_server *)server)->members[rank].state == HERE;
}

static bool is_awaited(const void *collective, int rank)
{
    return !((const slot *)collective)->parts[rank].here;
}

static void pulse(vlai_server *s, int rank, const char *missing)
{
    member *m = &s->members[rank];
    vlai_head head = {.size = 0};
    vlai_head_text(&head, s->members[0].phase);
    vlai_head_i64(&head, s->members[0].step);
    vlai_head_text(&head, missing);
    vlai_head_u32(&head, (uint32_t)s->patient);
    if (!vlai_wire_put(&m->wire, FRAME_PULSE, 0, &head, NULL, 0))
        vlai_server_no_memory(s);
}

static void check_meeting(vlai_server *s, double now)
{
    char list[VLAI_LISTED];
    vlai_list_ranks(s->ranks.world, is_missing, s, list);
    if (now - s->started > s->timeout_s) {
        vlai_fail_hint(&s->verdict, VLA_E_LOST, vlai_late_hint, "%s of %d did not come to %s port %d within %g s", list, s->ranks.world, s->ranks.address, s->ranks.port,
                       s->timeout_s);
        vlai_server_end(s, CULPRIT_NONE);
    } else if (now > s->told_missing) {
        vlai_info("rank 0 waits for %s of %d at %s port %d", list, s->ranks.world, s->ranks.address, s->ranks.port);
        s->told_missing = now + 30;
    }
}

/* Whom the rank's work waits for in the end: itself where it waits for none, or for one that waits for it. */
static int awaited_by(const vlai_server *s, int rank)
{
    int at = rank;
    for (int i = 0; i < s->ranks.world; i++) {
        int next = s->members[at].awaits;
        if (next < 0)
            return at;
        if (s->members[next].state != HERE)
            break;
        at = next;
    }
    return rank;
}

static void check_late(vlai_server *s, double now)
{
    char list[VLAI_LISTED], place[VLAI_PLACE];
    s->patient = 0;
    for (int i = 0; i < SLOTS && !s->verdict_at; i++) {
        const slot *c = &s->slots[i];
        if (!c->used || now < c->deadline)
            continue;
        int r = 0, end = 0;
        for (; r < s->ranks.world; r++) { /* the first to blame: who works on is waited for, and who waited in an earlier one till now */
            const member *m = &s->members[r];
            end = awaited_by(s, r);
            if (!c->parts[r].here && !m->waiting && now - m->waited >= c->limit_s && (!m->works || now - s->members[end].moved >= c->limit_s))
                break;
        }
        if (r == s->ranks.world) {
            s->patient++;
            continue;
        }
        r = end;
        vlai_list_ranks(s->ranks.world, is_awaited, c, list);
        vlai_fail_hint(&s->verdict, VLA_E_LOST, vlai_late_hint, "%s '%s': %s did not come within %g s; rank %d (host %s) is %s", vlai_server_kinds[c->kind], c->what, list, c->limit_s,
                       r, s->members[r].host, vlai_server_where(s, &s->members[r], place));
        vlai_server_end(s, r);
    }
    if (s->left_at && s->left < s->ranks.world && now - s->left_at > s->timeout_s && !s->verdict_at) {
        vlai_list_ranks(s->ranks.world, is_staying, s, list);
        vlai_fail_hint(&s->verdict, VLA_E_LOST, vlai_late_hint, "%s did not leave within %g s of rank 0", list, s->timeout_s);
        vlai_server_end(s, CULPRIT_NONE);
    }
    for (size_t i = 0; i < s->keys.waiter_count && !s->verdict_at;) {
        vlai_key_waiter w = s->keys.waiters[i];
        if (now < w.deadline) {
            i++;
            continue;
        }
        vlai_keys_drop_waiter(&s->keys, i);
        vlai_server_key_late(s, w.rank, w.id, w.key, w.limit_s);
    }
}

/* A rank that stands still while it is its own turn. Judged a little after the limit, so that ranks that stopped together are seen
 * together; then the one furthest behind is named: the lowest step, and of those the one that moved least recently. */
static void check_progress(vlai_server *s, double now)
{
    enum { JUDGE_AFTER = 2 };
    int worst = -1, watched = 0, still = 0;
    bool due = false, alike = true;
    for (int r = 0; r < s->ranks.world; r++) {
        const member *m = &s->members[r];
        if (m->state != HERE || !m->moves)
            continue;
        watched++;
        if (m->waiting || now - m->moved < s->timeout_s || awaited_by(s, r) != r)
            continue;
        due |= now - m->moved >= s->timeout_s + JUDGE_AFTER;
        still++;
        const member *w = worst < 0 ? m : &s->members[worst];
        alike &= m->step == w->step && strcmp(m->phase, w->phase) == 0;
        if (worst < 0 || m->step < w->step || (m->step == w->step && m->moved < w->moved))
            worst = r;
    }
    if (!due || s->verdict_at)
        return;
    const member *m = &s->members[worst];
    char place[VLAI_PLACE];
    vlai_server_where(s, m, place);
    if (still == watched && still > 1 && alike)
        vlai_fail_hint(&s->verdict, VLA_E_LOST, vlai_lost_hint, "no rank has made progress for %g s: all of them are %s", s->timeout_s, place);
    else
        vlai_fail_hint(&s->verdict, VLA_E_LOST, vlai_lost_hint, "rank %d (host %s) has made no progress for %g s: it is %s", worst, m->host, s->timeout_s, place);
    vlai_server_end(s, worst);
}

static void beat_members(vlai_server *s, double now)
{
    char missing[VLAI_LISTED] = "";
    if (!s->met)
        vlai_list_ranks(s->ranks.world, is_missing, s, missing);
    bool due = now - s->pulsed >= (s->members[0].moves != s->pulsed_moves ? BEAT_CHANGED(s->ranks.world) : BEAT_EVERY);
    for (int r = 0; r < s->ranks.world && !s->verdict_at; r++) {
        const member *m = &s->members[r];
        if (m->wire.fd < 0)
            continue;
        if (due)
            pulse(s, r, missing);
        if (r > 0 && m->state == HERE && now - m->heard > s->silence_s) {
            char why[64];
            snprintf(why, sizeof why, "no sign of life for %g s", s->silence_s);
            vlai_server_lose(s, r, why);
        }
    }
    if (due) {
        s->pulsed = now;
        s->pulsed_moves = s->members[0].moves;
    }
}

void vlai_server_watch(vlai_server *s, double now)
{
    if (!s->met && !s->verdict_at)
        check_meeting(s, now);
    if (s->met && !s->verdict_at)
        check_late(s, now);
    if (s->met && !s->verdict_at)
        check_progress(s, now);
    if (!s->verdict_at)
        beat_members(s, now);
}
