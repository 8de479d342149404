#include "together.h"

#include "command.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const double failure_limit_s = 10;

/* The loss is said once, by the group's thread or by the one that a call has told. */
static atomic_flag said = ATOMIC_FLAG_INIT;

static void on_lost(void *user, const char *text)
{
    const together *t = user;
    if (!atomic_flag_test_and_set(&said)) {
        dprintf(STDERR_FILENO, "vla %s: %s\n", t->name, text);
        if (t->log)
            dprintf(fileno(t->log), "ERROR - %s\n", text);
    } else {
        sleep(1); /* the main thread is about to end */
    }
    _exit(EXIT_RANK);
}

vla_status together_read(together *t, vla_error *err)
{
    return vlai_ranks_read(&t->ranks, err);
}

vla_status together_meet(together *t, double limit_s, vla_status status, vla_error *err)
{
    vla_error inner = VLA_ERROR_INIT;
    if (t->ranks.world == 1)
        return status;
    vlai_group_options o = VLAI_GROUP_OPTIONS_DEFAULT;
    o.timeout_s = t->ranks.timeout_s > 0 ? t->ranks.timeout_s : limit_s;
    if (status != VLA_OK && o.timeout_s > failure_limit_s)
        o.timeout_s = failure_limit_s;
    o.lost = on_lost;
    o.user = t;
    vla_status met = vlai_group_join(&t->ranks, &o, &t->group, &inner);
    if (met != VLA_OK && status == VLA_OK && err)
        *err = inner;
    if (met == VLA_OK)
        vlai_group_work(t->group, "start", 0);
    return status != VLA_OK ? status : met;
}

vla_status together_agree(together *t, const char *what, const char *text, vla_error *err)
{
    vla_status status = vlai_group_agree(t->group, what, text, err);
    t->differs |= status == VLA_E_INVALID;
    return status;
}

vla_status together_share(together *t, const char *what, char *text, size_t size, vla_error *err)
{
    if (t->ranks.world == 1)
        return VLA_OK;
    vla_status status = vlai_group_broadcast(t->group, what, text, size, err);
    text[size - 1] = 0;
    return status;
}

vla_status together_tell(together *t, vla_status status, vla_error *err)
{
    bool told = status == VLA_OK || status == VLA_E_CANCELLED || status == VLA_E_LOST || t->differs;
    return t->group && !told ? vlai_group_fail(t->group, err) : status;
}

int together_end(together *t, vla_status status, vla_error *err)
{
    if (t->ranks.world == 1)
        return status == VLA_OK ? EXIT_DONE : command_fail(t->name, err);
    if (status == VLA_OK || status == VLA_E_CANCELLED || t->differs) {
        vla_error inner = VLA_ERROR_INIT;
        vla_status left = vlai_group_leave(t->group, &inner);
        t->group = NULL;
        if (left == VLA_OK && !t->differs)
            return status == VLA_OK ? EXIT_DONE : command_fail(t->name, err);
        if (!t->differs)
            *err = inner;
        status = err->status;
    } else {
        status = together_tell(t, status, err);
        vlai_group_hang_up(t->group); /* not leave: a save in progress may be asking the group */
    }
    if (status == VLA_E_LOST && atomic_flag_test_and_set(&said))
        sleep(2); /* the group's thread says it and ends the process */
    else
        command_fail(t->name, err);
    fflush(stdout);
    _exit(command_exit_code(status));
}
