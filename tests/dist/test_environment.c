/* Ranks from the environment of the usual launchers, and what is refused. */
#include "test.h"

#include "dist/ranks.h"
#include "vla/log.h"

#include <stdbool.h>

static const char *const known[] = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "VLA_JOB_ID", "VLA_DIST_PORT", "VLA_DIST_TIMEOUT", "WALLX_DIST_TIMEOUT_MINUTES", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", "SLURM_PROCID", "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID",
};

/* Sets "A=1 B=2" and nothing else of the known ones. */
static void environment(const char *text)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        unsetenv(known[i]);
    char copy[1024];
    snprintf(copy, sizeof copy, "%s", text);
    for (char *save = NULL, *word = strtok_r(copy, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        char *value = strchr(word, '=');
        assert_non_null(value);
        *value = 0;
        bool listed = false;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            listed |= !strcmp(known[i], word);
        assert_true(listed);
        assert_int_equal(setenv(word, value + 1, 1), 0);
    }
}

#define TORCHRUN "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=gpu01 MASTER_PORT=29400 "
#define SRUN                                                                                                                   \
    "SLURM_JOB_ID=123456 SLURM_STEP_ID=2 SLURM_STEP_NUM_TASKS=7 SLURM_NTASKS=7 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=1 " \
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=4,3 SLURM_STEP_NODELIST=gpu[03-04] "
#define MPIRUN "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 "

static void test_accepted(void **state)
{
    (void)state;
    const struct {
        const char *environment;
        int rank, world, local_rank, local_world, node, nodes, port;
        double timeout_s;
        const char *address, *job, *source;
    } cases[] = {
        {"", 0, 1, 0, 1, 0, 1, 0, 0, "", "", "none"},
        {"RANK= WORLD_SIZE= LOCAL_RANK=0 MASTER_PORT=29500", 0, 1, 0, 1, 0, 1, 0, 0, "", "", "none"},
        {"RANK=0 WORLD_SIZE=1", 0, 1, 0, 1, 0, 1, 0, 0, "", "", "RANK"},
        {TORCHRUN, 5, 8, 1, 4, 1, 2, 29400, 0, "gpu01", "", "RANK"},
        {TORCHRUN "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=abc VLA_DIST_TIMEOUT=12.5", 5, 8, 1, 4, 1, 2, 29401, 12.5, "gpu01", "abc", "RANK"},
        {TORCHRUN "TORCHELASTIC_USE_AGENT_STORE=False VLA_DIST_PORT=7000 VLA_JOB_ID=x TORCHELASTIC_RUN_ID=abc", 5, 8, 1, 4, 1, 2, 7000, 0, "gpu01", "x", "RANK"},
        {TORCHRUN "WALLX_DIST_TIMEOUT_MINUTES=1.5", 5, 8, 1, 4, 1, 2, 29400, 90, "gpu01", "", "RANK"},
        {TORCHRUN "WALLX_DIST_TIMEOUT_MINUTES=30 VLA_DIST_TIMEOUT=7", 5, 8, 1, 4, 1, 2, 29400, 7, "gpu01", "", "RANK"},
        /* torchrun under srun: one task per host */
        {TORCHRUN "SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0", 5, 8, 1, 4, 1, 2, 29400, 0, "gpu01", "", "RANK"},
        {"RANK=2 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=::1 MASTER_PORT=1", 2, 3, 0, 1, 2, 3, 1, 0, "::1", "", "RANK"},
        {MPIRUN, 3, 4, 3, 4, 0, 1, 29500, 0, "127.0.0.1", "", "OMPI_COMM_WORLD_RANK"},
        {MPIRUN "PMIX_NAMESPACE=prte@1 MASTER_ADDR=h MASTER_PORT=500 SLURM_PROCID=0 SLURM_NTASKS=9", 3, 4, 3, 4, 0, 1, 500, 0, "h", "prte@1", "OMPI_COMM_WORLD_RANK"},
        {SRUN, 5, 7, 1, 3, 1, 2, 23456, 0, "gpu03", "123456.2", "SLURM_PROCID"},
        {SRUN "MASTER_ADDR=head MASTER_PORT=29500", 5, 7, 1, 3, 1, 2, 29500, 0, "head", "123456.2", "SLURM_PROCID"},
        {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1", 1, 2, 1, 2, 0, 1, 29500, 0, "127.0.0.1", "", "SLURM_PROCID"},
        /* a batch script that was not started by srun */
        {"SLURM_JOB_ID=5 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_NODEID=0", 0, 1, 0, 1, 0, 1, 0, 0, "", "", "none"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        vla_error err = VLA_ERROR_INIT;
        vlai_ranks r;
        environment(cases[i].environment);
        if (vlai_ranks_read(&r, &err) != VLA_OK)
            fail_msg("'%s': %s", cases[i].environment, err.message);
        if (r.rank != cases[i].rank || r.world != cases[i].world || r.local_rank != cases[i].local_rank || r.local_world != cases[i].local_world ||
            r.node != cases[i].node || r.nodes != cases[i].nodes || r.port != cases[i].port || r.timeout_s != cases[i].timeout_s ||
            strcmp(r.address, cases[i].address) != 0 || strcmp(r.job, cases[i].job) != 0 || strcmp(r.source, cases[i].source) != 0)
            fail_msg("'%s': rank %d of %d, local %d of %d, node %d of %d, '%s' port %d, job '%s', %g s, from %s", cases[i].environment, r.rank, r.world,
                     r.local_rank, r.local_world, r.node, r.nodes, r.address, r.port, r.job, r.timeout_s, r.source);
    }
}

static void test_refused(void **state)
{
    (void)state;
    const struct {
        const char *environment, *says[3];
    } cases[] = {
        {"RANK=1", {"WORLD_SIZE is not set"}},
        {"WORLD_SIZE=2", {"RANK is not set"}},
        {"LOCAL_RANK=1", {"LOCAL_RANK is '1'", "RANK"}},
        {"RANK=x WORLD_SIZE=2", {"RANK is 'x'", "wanted a number of 0 to"}},
        {"RANK=1.5 WORLD_SIZE=2", {"RANK is '1.5'"}},
        {"RANK=-1 WORLD_SIZE=2", {"RANK is '-1'"}},
        {"RANK=0 WORLD_SIZE=99999999999999999999", {"WORLD_SIZE is '99999999999999999999'"}},
        {"RANK=0 WORLD_SIZE=0", {"WORLD_SIZE is '0'", "wanted a number of 1 to"}},
        {"RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1", {"RANK is 2", "WORLD_SIZE is 2", "below"}},
        {"RANK=1 WORLD_SIZE=2", {"LOCAL_RANK is not set"}},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", {"LOCAL_WORLD_SIZE is not set"}},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1", {"LOCAL_RANK is 1", "LOCAL_WORLD_SIZE is 1"}},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=1", {"LOCAL_WORLD_SIZE is 4", "WORLD_SIZE is 2"}},
        {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1", {"LOCAL_RANK is 1", "RANK is 0"}},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_PORT=1", {"MASTER_ADDR is not set"}},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h", {"MASTER_PORT is not set"}},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65536", {"MASTER_PORT is '65536'", "1 to 65535"}},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=2 GROUP_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1", {"GROUP_RANK is 2", "GROUP_WORLD_SIZE is 2"}},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1", {"LOCAL_WORLD_SIZE is 2", "several hosts"}},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0 GROUP_WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1", {"LOCAL_WORLD_SIZE is 1", "WORLD_SIZE is 2"}},
        {"RANK=0 WORLD_SIZE=1 VLA_DIST_TIMEOUT=soon", {"VLA_DIST_TIMEOUT is 'soon'", "seconds"}},
        {"RANK=0 WORLD_SIZE=1 VLA_DIST_TIMEOUT=0", {"VLA_DIST_TIMEOUT is '0'"}},
        {"RANK=0 WORLD_SIZE=1 VLA_DIST_TIMEOUT=nan", {"VLA_DIST_TIMEOUT is 'nan'"}},
        {"RANK=0 WORLD_SIZE=1 WALLX_DIST_TIMEOUT_MINUTES=-30", {"WALLX_DIST_TIMEOUT_MINUTES is '-30'", "minutes", "at most 166667"}},
        {"RANK=0 WORLD_SIZE=1 WALLX_DIST_TIMEOUT_MINUTES=30m", {"WALLX_DIST_TIMEOUT_MINUTES is '30m'"}},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 VLA_JOB_ID=a\tb", {"byte 1 of VLA_JOB_ID is the control character 9"}},
        {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", {"OMPI_COMM_WORLD_LOCAL_RANK is not set"}},
        {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1", {"MASTER_ADDR is not set", "1 of 2"}},
        {"SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=2 SLURM_LOCALID=0", {"SLURM_PROCID is 3", "SLURM_NTASKS is 2"}},
        {"SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2", {"SLURM_LOCALID is not set"}},
        {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_TASKS_PER_NODE=1(x2)", {"neither MASTER_ADDR nor SLURM_NODELIST"}},
        {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_TASKS_PER_NODE=1", {"SLURM_TASKS_PER_NODE is '1'"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        vla_error err = VLA_ERROR_INIT;
        vlai_ranks r;
        environment(cases[i].environment);
        if (vlai_ranks_read(&r, &err) != VLA_E_INVALID)
            fail_msg("'%s' was accepted", cases[i].environment);
        for (int k = 0; k < 3 && cases[i].says[k]; k++)
            if (!strstr(err.message, cases[i].says[k]))
                fail_msg("'%s': '%s' lacks '%s'", cases[i].environment, err.message, cases[i].says[k]);
    }
    char text[400];
    memset(text, 'a', sizeof text);
    memcpy(text, "MASTER_ADDR=", 12);
    text[300] = 0;
    environment("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_PORT=1");
    setenv("MASTER_ADDR", text, 1);
    vla_error err = VLA_ERROR_INIT;
    vlai_ranks r;
    assert_fails(vlai_ranks_read(&r, &err), VLA_E_INVALID, err, "MASTER_ADDR has 300 bytes");
    environment("");
}

static void test_slurm_lists(void **state)
{
    (void)state;
    const struct {
        const char *list, *first;
    } hosts[] = {
        {"gpu1", "gpu1"}, {"gpu1,gpu2", "gpu1"}, {"gpu[03-05,7],x1", "gpu03"}, {"a-b[7]", "a-b7"}, {"rack1-n[001,003]-ib,other", "rack1-n001-ib"}, {"gpu[10-12].site.edu", "gpu10.site.edu"},
    };
    char out[VLAI_RANKS_TEXT];
    vla_error err = VLA_ERROR_INIT;
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        assert_ok(vlai_ranks_first_host(hosts[i].list, out, &err), err);
        assert_string_equal(out, hosts[i].first);
    }
    const char *bad[] = {"", ",a", "gpu[", "gpu[]", "gpu[1", "gpu[a-b]", "r[1-2]n[3-4]"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_fails(vlai_ranks_first_host(bad[i], out, &err), VLA_E_INVALID, err, "MASTER_ADDR");
    const struct {
        const char *list;
        int node, tasks;
    } tasks[] = {
        {"4", 0, 4}, {"4", 1, 0}, {"4(x2),3", 0, 4}, {"4(x2),3", 1, 4}, {"4(x2),3", 2, 3}, {"4(x2),3", 3, 0}, {"2,8(x100)", 100, 8},
        {"", 0, 0}, {NULL, 0, 0}, {"x", 0, 0}, {"4(x", 1, 0}, {"4(x2", 1, 0}, {"0", 0, 0}, {"-1", 0, 0}, {"4;3", 1, 0},
    };
    for (size_t i = 0; i < sizeof tasks / sizeof *tasks; i++)
        if (vlai_ranks_tasks_of(tasks[i].list, tasks[i].node) != tasks[i].tasks)
            fail_msg("tasks of node %d in '%s': %d, wanted %d", tasks[i].node, tasks[i].list ? tasks[i].list : "(none)",
                     vlai_ranks_tasks_of(tasks[i].list, tasks[i].node), tasks[i].tasks);
}

static void keep_quiet(vla_log_level level, const char *text, void *user)
{
    (void)level;
    (void)text;
    (void)user;
}

int main(void)
{
    vla_log_set(keep_quiet, NULL, VLA_LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_slurm_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
