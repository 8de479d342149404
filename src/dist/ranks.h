/* Which rank of how many this process is, and where the ranks meet: read from the environment that the usual launchers set.
 *
 *     vlai_ranks ranks;
 *     if (vlai_ranks_read(&ranks, &err) != VLA_OK) return report(&err);
 *     if (ranks.world > 1) ... vlai_group_join(&ranks, ...)      (group.h)
 *
 * Looked for in this order; the first family of which a name is set decides:
 *
 *   RANK, WORLD_SIZE         torchrun, accelerate, vla launch. All of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE are needed,
 *                            MASTER_ADDR and MASTER_PORT too when there are several ranks; GROUP_RANK and GROUP_WORLD_SIZE are read
 *                            where they are set.
 *   OMPI_COMM_WORLD_*        mpirun of Open MPI: RANK, SIZE, LOCAL_RANK, LOCAL_SIZE. MASTER_ADDR is needed when the ranks are on
 *                            several hosts (otherwise 127.0.0.1); MASTER_PORT is 29500 when not set.
 *   SLURM_PROCID             srun: SLURM_PROCID, SLURM_NTASKS (SLURM_STEP_NUM_TASKS first), SLURM_LOCALID, SLURM_NODEID, and for the
 *                            ranks of this host SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE. MASTER_ADDR is the first host of
 *                            SLURM_STEP_NODELIST or SLURM_JOB_NODELIST when not set, MASTER_PORT 20000 + job id modulo 10000. A batch
 *                            script's own process (a job, but no step: not started by srun) is one rank, with a warning when the
 *                            job has several tasks.
 *   none of them             one rank.
 *
 * An earlier family hides the later ones: torchrun under srun sets RANK for its workers while SLURM_PROCID numbers the torchruns.
 * Whatever is missing, is not a number, is out of range or contradicts another variable of its family is an error
 * (VLA_E_INVALID) that names the variable, its value and what was wanted. */
#ifndef VLAI_DIST_RANKS_H
#define VLAI_DIST_RANKS_H

#include "vla/error.h"

VLA_BEGIN_DECLS

enum {
    VLAI_RANKS_MOST = 4096, /* ranks of a run */
    VLAI_RANKS_TEXT = 256,  /* bytes of a host name or a job's name, with the final zero */
};

typedef struct vlai_ranks {
    int rank, world;             /* of the run: 0 <= rank < world */
    int local_rank, local_world; /* among the ranks of this host: which device */
    int node, nodes;             /* hosts; counted from the ranks per host when the environment does not say */
    int port;                    /* where rank 0 listens; 0 when world is 1 and none is set */
    double timeout_s;            /* VLA_DIST_TIMEOUT, else WALLX_DIST_TIMEOUT_MINUTES; 0 when neither is set */
    char address[VLAI_RANKS_TEXT]; /* name or number of rank 0's host (IPv4, IPv6); empty when world is 1 and none is set */
    char job[VLAI_RANKS_TEXT];     /* what tells this run from another that meets at the same port; may be empty */
    const char *source;          /* "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID" or "none": the variable that decided; static */
} vlai_ranks;

/* Reads the environment; changes nothing. VLA_DIST_PORT, where set, replaces MASTER_PORT for us alone; without it the port is
 * MASTER_PORT + 1 under a torchrun that says that it keeps a store of its own at MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE=True).
 * VLA_DIST_TIMEOUT must be a number of seconds above 0, WALLX_DIST_TIMEOUT_MINUTES one of minutes, read without the former. Threads: none may change the environment meanwhile. */
vla_status vlai_ranks_read(vlai_ranks *out, vla_error *err);

/* The first host of a Slurm node list ("gpu[03-05,7],x1" -> "gpu03") into out (VLAI_RANKS_TEXT bytes); VLA_E_INVALID when it cannot
 * be read. Apart for its test. */
vla_status vlai_ranks_first_host(const char *list, char *out, vla_error *err);

/* Tasks of node number `node` in a Slurm count list ("4(x2),3" -> 4, 4, 3); 0 when the list does not say. */
int vlai_ranks_tasks_of(const char *list, int node);

VLA_END_DECLS

#endif
