#include "dist/ranks.h"

#include "base/fail.h"
#include "base/log.h"

#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PORT_DEFAULT = 29500, PORT_MOST = 65535 };

/* An empty variable counts as one that is not set, as launch scripts leave them. */
static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* The variable as a whole number of lowest..highest. */
static vla_status number(const char *name, long lowest, long highest, int *out, vla_error *err)
{
    const char *value = variable(name);
    if (!value)
        return vlai_fail_hint(err, VLA_E_INVALID, "start the ranks with vla launch, torchrun, srun or mpirun, or set it for each of them",
                              "environment: %s is not set, wanted a number of %ld to %ld", name, lowest, highest);
    char *end = NULL;
    errno = 0;
    long n = strtol(value, &end, 10);
    if (errno || end == value || *end || isspace((unsigned char)*value) || n < lowest || n > highest)
        return vlai_fail(err, VLA_E_INVALID, "environment: %s is '%.64s', wanted a number of %ld to %ld", name, value, lowest, highest);
    *out = (int)n;
    return VLA_OK;
}

static vla_status text(const char *name, const char *value, char *out, vla_error *err)
{
    if (strlen(value) >= VLAI_RANKS_TEXT)
        return vlai_fail(err, VLA_E_INVALID, "environment: %s has %zu bytes, wanted at most %d", name, strlen(value), VLAI_RANKS_TEXT - 1);
    for (const char *at = value; *at; at++)
        if ((unsigned char)*at < 32 || *at == 127)
            return vlai_fail(err, VLA_E_INVALID, "environment: byte %zu of %s is the control character %d, wanted text", (size_t)(at - value), name, *at);
    strcpy(out, value);
    return VLA_OK;
}

static vla_status contradiction(const char *a, int a_value, const char *wanted, const char *b, int b_value, vla_error *err)
{
    return vlai_fail_hint(err, VLA_E_INVALID, "these come from one launcher as a rule; unset what is left over from another",
                          "environment: %s is %d and %s is %d, wanted %s %s %s", a, a_value, b, b_value, a, wanted, b);
}

int vlai_ranks_tasks_of(const char *list, int node)
{
    for (const char *p = list; p && *p; p = *p == ',' ? p + 1 : p) {
        char *end;
        long tasks = strtol(p, &end, 10), times = 1;
        if (end == p || tasks < 1 || tasks > VLAI_RANKS_MOST)
            return 0;
        if (end[0] == '(' && end[1] == 'x') {
            const char *start = end + 2;
            times = strtol(start, &end, 10);
            if (end == start || *end != ')' || times < 1 || times > VLAI_RANKS_MOST)
                return 0;
            end++;
        }
        if (node < times)
            return (int)tasks;
        node -= (int)times;
        p = end;
        if (*p && *p != ',')
            return 0;
    }
    return 0;
}

vla_status vlai_ranks_first_host(const char *list, char *out, vla_error *err)
{
    size_t n = strcspn(list, ",[");
    const char *first = "";
    size_t digits = 0, tail = 0;
    const char *rest = "";
    if (list[n] == '[') {
        first = list + n + 1;
        digits = strspn(first, "0123456789");
        const char *close = strchr(first, ']');
        if (digits && close) {
            rest = close + 1;
            tail = strcspn(rest, ",[");
        }
        if (!digits || !close || rest[tail] == '[')
            return vlai_fail_hint(err, VLA_E_INVALID, "set MASTER_ADDR to the host of rank 0",
                                  "environment: no first host can be read from the node list '%.128s'", list);
    }
    if (n + digits + tail == 0 || n + digits + tail >= VLAI_RANKS_TEXT)
        return vlai_fail_hint(err, VLA_E_INVALID, "set MASTER_ADDR to the host of rank 0",
                              "environment: the first host of the node list '%.128s' has %zu bytes, wanted 1 to %d", list, n + digits + tail,
                              VLAI_RANKS_TEXT - 1);
    snprintf(out, VLAI_RANKS_TEXT, "%.*s%.*s%.*s", (int)n, list, (int)digits, first, (int)tail, rest);
    return VLA_OK;
}

/* rank < world, local_rank < local_world <= world, local_rank <= rank; and the number of hosts where it is not said. */
static vla_status check(vlai_ranks *r, const char *rank, const char *world, const char *local_rank, const char *local_world, vla_error *err)
{
    if (r->rank >= r->world)
        return contradiction(rank, r->rank, "below", world, r->world, err);
    if (r->local_rank >= r->local_world)
        return contradiction(local_rank, r->local_rank, "below", local_world, r->local_world, err);
    if (r->local_world > r->world)
        return contradiction(local_world, r->local_world, "at most", world, r->world, err);
    if (r->local_rank > r->rank)
        return contradiction(local_rank, r->local_rank, "at most", rank, r->rank, err);
    if (r->nodes == 0) {
        r->nodes = (r->world + r->local_world - 1) / r->local_world;
        r->node = r->rank / r->local_world;
    }
    if (r->nodes > 1 && r->local_world == r->world)
        return contradiction(local_world, r->local_world, "below, with several hosts,", world, r->world, err);
    return VLA_OK;
}

static vla_status meeting_port(int fallback, vlai_ranks *r, vla_error *err)
{
    if (variable("VLA_DIST_PORT"))
        return number("VLA_DIST_PORT", 1, PORT_MOST, &r->port, err);
    if (!variable("MASTER_PORT") && fallback)
        r->port = fallback;
    else
        VLA_TRY(number("MASTER_PORT", 1, PORT_MOST, &r->port, err));
    const char *agent = variable("TORCHELASTIC_USE_AGENT_STORE");
    if (agent && (!strcmp(agent, "True") || !strcmp(agent, "true") || !strcmp(agent, "1")))
        r->port += r->port < PORT_MOST ? 1 : -1;
    return VLA_OK;
}

static vla_status from_rank(vlai_ranks *r, vla_error *err)
{
    r->source = "RANK";
    VLA_TRY(number("RANK", 0, VLAI_RANKS_MOST - 1, &r->rank, err));
    VLA_TRY(number("WORLD_SIZE", 1, VLAI_RANKS_MOST, &r->world, err));
    bool several = r->world > 1;
    r->local_world = 1;
    if (several || variable("LOCAL_RANK"))
        VLA_TRY(number("LOCAL_RANK", 0, VLAI_RANKS_MOST - 1, &r->local_rank, err));
    if (several || variable("LOCAL_WORLD_SIZE"))
        VLA_TRY(number("LOCAL_WORLD_SIZE", 1, VLAI_RANKS_MOST, &r->local_world, err));
    if (variable("GROUP_RANK") && variable("GROUP_WORLD_SIZE")) {
        VLA_TRY(number("GROUP_RANK", 0, VLAI_RANKS_MOST - 1, &r->node, err));
        VLA_TRY(number("GROUP_WORLD_SIZE", 1, VLAI_RANKS_MOST, &r->nodes, err));
        if (r->node >= r->nodes)
            return contradiction("GROUP_RANK", r->node, "below", "GROUP_WORLD_SIZE", r->nodes, err);
        if (r->nodes > r->world)
            return contradiction("GROUP_WORLD_SIZE", r->nodes, "at most", "WORLD_SIZE", r->world, err);
        if (r->nodes == 1 && r->local_world != r->world)
            return contradiction("LOCAL_WORLD_SIZE", r->local_world, "equal to, on one host,", "WORLD_SIZE", r->world, err);
    }
    if (!several && !variable("MASTER_ADDR"))
        return VLA_OK;
    if (!variable("MASTER_ADDR"))
        return vlai_fail_hint(err, VLA_E_INVALID, "set MASTER_ADDR to the host of rank 0, the same on every rank",
                              "environment: MASTER_ADDR is not set, wanted the host of rank 0, as WORLD_SIZE is %d", r->world);
    VLA_TRY(text("MASTER_ADDR", variable("MASTER_ADDR"), r->address, err));
    if (several || variable("MASTER_PORT"))
        VLA_TRY(meeting_port(0, r, err));
    const char *job = variable("VLA_JOB_ID") ? "VLA_JOB_ID" : "TORCHELASTIC_RUN_ID";
    return variable(job) ? text(job, variable(job), r->job, err) : VLA_OK;
}

static vla_status from_open_mpi(vlai_ranks *r, vla_error *err)
{
    r->source = "OMPI_COMM_WORLD_RANK";
    VLA_TRY(number("OMPI_COMM_WORLD_RANK", 0, VLAI_RANKS_MOST - 1, &r->rank, err));
    VLA_TRY(number("OMPI_COMM_WORLD_SIZE", 1, VLAI_RANKS_MOST, &r->world, err));
    VLA_TRY(number("OMPI_COMM_WORLD_LOCAL_RANK", 0, VLAI_RANKS_MOST - 1, &r->local_rank, err));
    VLA_TRY(number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, VLAI_RANKS_MOST, &r->local_world, err));
    if (!variable("MASTER_ADDR") && r->local_world < r->world)
        return vlai_fail_hint(err, VLA_E_INVALID, "mpirun -x MASTER_ADDR=HOST, the same on every rank",
                              "environment: MASTER_ADDR is not set, wanted the host of rank 0, as %d of %d ranks are on this one", r->local_world,
                              r->world);
    VLA_TRY(text("MASTER_ADDR", variable("MASTER_ADDR") ? variable("MASTER_ADDR") : "127.0.0.1", r->address, err));
    VLA_TRY(meeting_port(PORT_DEFAULT, r, err));
    return variable("PMIX_NAMESPACE") ? text("PMIX_NAMESPACE", variable("PMIX_NAMESPACE"), r->job, err) : VLA_OK;
}

static vla_status from_slurm(vlai_ranks *r, vla_error *err)
{
    const char *world = variable("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
    bool step = variable("SLURM_STEP_NUM_TASKS") || variable("SLURM_STEP_ID") || variable("SLURM_STEPID");
    if (variable("SLURM_JOB_ID") && !step) { /* a batch script has SLURM_PROCID 0 and the job's SLURM_NTASKS */
        if (variable(world) && strcmp(variable(world), "1") != 0)
            vlai_warn("SLURM_NTASKS is %s, but this process was not started by srun: it is the only rank", variable(world));
        return VLA_OK;
    }
    r->source = "SLURM_PROCID";
    VLA_TRY(number("SLURM_PROCID", 0, VLAI_RANKS_MOST - 1, &r->rank, err));
    VLA_TRY(number(world, 1, VLAI_RANKS_MOST, &r->world, err));
    VLA_TRY(number("SLURM_LOCALID", 0, VLAI_RANKS_MOST - 1, &r->local_rank, err));
    if (variable("SLURM_NODEID"))
        VLA_TRY(number("SLURM_NODEID", 0, VLAI_RANKS_MOST - 1, &r->node, err));
    const char *nodes = variable("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : variable("SLURM_NNODES") ? "SLURM_NNODES" : NULL;
    r->nodes = 1;
    if (nodes) {
        VLA_TRY(number(nodes, 1, VLAI_RANKS_MOST, &r->nodes, err));
        if (r->node >= r->nodes)
            return contradiction("SLURM_NODEID", r->node, "below", nodes, r->nodes, err);
    }
    const char *tasks = variable("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
    r->local_world = r->nodes == 1 ? r->world : vlai_ranks_tasks_of(variable(tasks), r->node);
    if (r->local_world == 0)
        return vlai_fail(err, VLA_E_INVALID, "environment: %s is '%.64s', wanted the tasks of node %d, as in 4(x2)", tasks,
                         variable(tasks) ? variable(tasks) : "", r->node);
    const char *list = variable("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : variable("SLURM_JOB_NODELIST") ? "SLURM_JOB_NODELIST" : "SLURM_NODELIST";
    if (variable("MASTER_ADDR"))
        VLA_TRY(text("MASTER_ADDR", variable("MASTER_ADDR"), r->address, err));
    else if (r->local_world == r->world)
        strcpy(r->address, "127.0.0.1");
    else if (variable(list))
        VLA_TRY(vlai_ranks_first_host(variable(list), r->address, err));
    else
        return vlai_fail_hint(err, VLA_E_INVALID, "set MASTER_ADDR to the host of rank 0, the same on every rank",
                              "environment: neither MASTER_ADDR nor %s is set, wanted the host of rank 0", list);
    int job = 0;
    if (variable("SLURM_JOB_ID"))
        job = (int)(strtoul(variable("SLURM_JOB_ID"), NULL, 10) % 10000);
    VLA_TRY(meeting_port(variable("SLURM_JOB_ID") ? 20000 + job : PORT_DEFAULT, r, err));
    const char *id = variable("SLURM_STEP_ID") ? variable("SLURM_STEP_ID") : "";
    if (variable("SLURM_JOB_ID"))
        snprintf(r->job, sizeof r->job, "%.100s.%.100s", variable("SLURM_JOB_ID"), id);
    return VLA_OK;
}

/* Ours in seconds; else what Wall-X's scripts set, in minutes. */
static vla_status time_limit(double *seconds, vla_error *err)
{
    static const struct {
        const char *name, *unit;
        double seconds;
    } known[] = {{"VLA_DIST_TIMEOUT", "seconds", 1}, {"WALLX_DIST_TIMEOUT_MINUTES", "minutes", 60}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *limit = variable(known[i].name);
        char *end = NULL;
        double most = 1e7 / known[i].seconds, n = limit ? strtod(limit, &end) : 0;
        if (!limit)
            continue;
        if (end == limit || *end || !(n > 0) || n > most)
            return vlai_fail(err, VLA_E_INVALID, "environment: %s is '%.64s', wanted %s, above 0 and at most %.0f", known[i].name, limit, known[i].unit, most);
        *seconds = n * known[i].seconds;
        break;
    }
    return VLA_OK;
}

vla_status vlai_ranks_read(vlai_ranks *out, vla_error *err)
{
    *out = (vlai_ranks){.world = 1, .local_world = 1, .source = "none"};
    const char *names[4] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
    if (variable("RANK") || variable("WORLD_SIZE")) {
        VLA_TRY(from_rank(out, err));
    } else if (variable("OMPI_COMM_WORLD_RANK") || variable("OMPI_COMM_WORLD_SIZE")) {
        names[0] = "OMPI_COMM_WORLD_RANK", names[1] = "OMPI_COMM_WORLD_SIZE";
        names[2] = "OMPI_COMM_WORLD_LOCAL_RANK", names[3] = "OMPI_COMM_WORLD_LOCAL_SIZE";
        VLA_TRY(from_open_mpi(out, err));
    } else if (variable("SLURM_PROCID")) {
        names[0] = "SLURM_PROCID", names[1] = variable("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
        names[2] = "SLURM_LOCALID", names[3] = "SLURM_TASKS_PER_NODE";
        VLA_TRY(from_slurm(out, err));
    } else if (variable("LOCAL_RANK") && strcmp(variable("LOCAL_RANK"), "0") != 0) {
        return vlai_fail_hint(err, VLA_E_INVALID, "unset LOCAL_RANK, or start the ranks with vla launch or torchrun",
                              "environment: LOCAL_RANK is '%.64s' and neither RANK nor WORLD_SIZE is set", variable("LOCAL_RANK"));
    }
    VLA_TRY(check(out, names[0], names[1], names[2], names[3], err));
    return time_limit(&out->timeout_s, err);
}
