/* vla launch: the ranks of a training run, or of a measurement, on this machine, one process per GPU, watched until all have
 * ended. One rank stays in this process. */
#include "args.h"
#include "command.h"

#include "dist/ranks.h"
#include "dist/supervise.h"
#include "exec/device_facts.h"
#include "train/device.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "Usage: vla launch [--nproc auto|N] [--nnodes N] [--node-rank R] [--master-addr A] [--master-port P] [--time-limit S]\n"
    "                  train|bench ARGUMENTS...\n\n"
    "Starts one rank per GPU of this machine, as CUDA_VISIBLE_DEVICES shows them, and watches them: when one fails it is named,\n"
    "the others are ended within 10 s, and its code is the launcher's. SIGINT, SIGTERM and SIGHUP make all ranks save and end\n"
    "with code 75 (of bench just end); a second one kills them. Without a GPU it starts CPU ranks, and says so. docs/ranks.md tells more.\n\n"
    "  --nproc N, --gpus N  ranks on this machine, the same number on each; auto, 0 or empty: its GPUs, or one CPU rank\n"
    "  --nnodes N           machines (1)\n"
    "  --node-rank R        which of them this is, from 0 (0)\n"
    "  --master-addr A      host of rank 0, which is on machine 0 (127.0.0.1)\n"
    "  --master-port P      where it listens (29500; on one machine any that is free)\n"
    "  --time-limit S       most seconds that ranks wait for each other, also at the start (300)\n\n"
    "NNODES, NODE_RANK, MASTER_ADDR and, with several machines, MASTER_PORT stand in for these arguments where they are not given.\n\n"
    "Examples:\n"
    "  vla launch train --config configs/libero.yml\n"
    "  vla launch --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 train --config configs/libero.yml   # once per machine\n"
    "  vla launch --nproc 2 train --config configs/demo.yml --device cpu\n"
    "  vla launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 bench --config configs/libero_local_perf.yml --batch 26\n";

enum { USUAL_PORT = 29500, PORT_MOST = 65535, RANKS_MOST = 4096, SECONDS_MOST = 10000000 };

typedef struct {
    const char *nproc, *gpus, *port, *address;
    int64_t nodes, node;
    double time_limit;
} request;

static const char *meaning(int code)
{
    switch (code) {
    case EXIT_USAGE: return "usage or configuration";
    case EXIT_DATA: return "data or file";
    case EXIT_MEMORY: return "memory";
    case EXIT_NONFINITE: return "not finite";
    case EXIT_COLLECTIVE: return "a collective of the ranks";
    default: return NULL;
    }
}

static void say(void *user, int rank, const char *line)
{
    (void)user;
    if (rank < 0)
        fprintf(stderr, "vla launch: %s\n", line);
    else
        fprintf(stderr, "[rank %d] %s\n", rank, line);
}

static int refuse(const char *message, const char *hint)
{
    fprintf(stderr, "vla launch: %s\n  hint: %s\n", message, hint);
    return EXIT_USAGE;
}

/* The device that the arguments of `vla train` name; NULL: none. The last one counts. */
static const char *named_device(int argc, char **argv)
{
    const char *found = NULL, *value;
    for (int i = 0; i < argc; i++) {
        if (!strncmp(argv[i], "--training.device=", 18))
            found = argv[i] + 18;
        else if (args_match(argv[i], "--device", &value))
            found = value ? value : i + 1 < argc ? argv[i + 1] : NULL;
    }
    return found && strcmp(found, "auto") != 0 && strcmp(found, "cuda") != 0 ? found : NULL;
}

/* Ranks of this machine, and a line that says which; negative: refused. */
static int count_ranks(const request *q, const char *device)
{
    const char *text = q->nproc && *q->nproc ? q->nproc : q->gpus;
    bool given = text && *text && strcmp(text, "auto") != 0 && strcmp(text, "0") != 0;
    char *end, message[256];
    long n = given ? strtol(text, &end, 10) : 0;
    if (given && (*end || n < 1 || n > VLAI_RANKS_MOST)) {
        snprintf(message, sizeof message, "--nproc '%.100s': wanted auto or a number of ranks, at most %d", text, (int)VLAI_RANKS_MOST);
        return refuse(message, "vla launch --help"), -1;
    }
    int gpus = device && !strcmp(device, "cpu") ? 0 : vlai_gpu_count();
    if (!given)
        n = device || gpus == 0 ? 1 : gpus;
    if (gpus > 0 && !device && n > gpus) {
        snprintf(message, sizeof message, "--nproc %ld: this machine shows %d GPU%s", n, gpus, gpus == 1 ? "" : "s");
        return refuse(message, "one rank takes one GPU; CUDA_VISIBLE_DEVICES hides some; --device cpu trains without"), -1;
    }
    if (gpus == 0 && n == 1)
        fprintf(stderr, "vla launch: %s: starting one CPU rank\n", device ? "--device cpu" : "no GPU that this build can use");
    else if (gpus == 0)
        fprintf(stderr, "vla launch: %s: starting %ld CPU ranks\n", device ? "--device cpu" : "no GPU that this build can use", n);
    else {
        vlai_text list = {0};
        vlai_device_list(&list);
        fprintf(stderr, "vla launch: %s; %ld rank%s\n", list.data ? list.data : "a GPU", n, n == 1 ? "" : "s");
        vlai_text_fini(&list);
    }
    return (int)n;
}

static bool is_bench(const char *command)
{
    return !strcmp(command, "bench");
}

/* One rank in this process, whatever a batch system says of others. */
static int stay(int argc, char **argv)
{
    static const char *const variables[][2] = {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"},
                                               {"GROUP_RANK", "0"}, {"GROUP_WORLD_SIZE", "1"}};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        setenv(variables[i][0], variables[i][1], 1);
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
    return is_bench(argv[0]) ? command_bench(argc, argv) : command_train(argc, argv);
}

static int start(int argc, char **argv, const request *q, int ranks, int port)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_supervised end;
    char **arguments = calloc((size_t)argc + 2, sizeof *arguments);
    if (!arguments) {
        fprintf(stderr, "vla launch: out of host memory\n");
        return EXIT_MEMORY;
    }
    arguments[0] = "vla";
    memcpy(arguments + 1, argv, (size_t)argc * sizeof *argv);
    vlai_supervise_options o = {.argv = arguments, .ranks = ranks, .first = (int)q->node * ranks, .world = (int)q->nodes * ranks,
                                .node = (int)q->node, .nodes = (int)q->nodes, .address = q->address, .port = port,
                                .time_limit_s = q->time_limit, .nothing_to_save = is_bench(argv[0]), .meaning = meaning, .say = say};
    vla_status status = vlai_supervise(&o, &end, &err);
    free(arguments);
    return status == VLA_OK ? end.code : command_fail("launch", &err);
}

/* What the environment says of machines, for arguments that are not given; false where it was refused. */
static bool take_environment(request *q)
{
    const struct {
        const char *name;
        int64_t *value, least, most;
    } rows[] = {{"NNODES", &q->nodes, 1, RANKS_MOST}, {"NODE_RANK", &q->node, 0, RANKS_MOST - 1}};
    char message[256], *end;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *text = getenv(rows[i].name);
        bool given = *rows[i].value >= 0;
        long long n = text && *text ? strtoll(text, &end, 10) : rows[i].least;
        if (!given && text && *text && (*end || n < rows[i].least || n > rows[i].most)) {
            snprintf(message, sizeof message, "environment: %s is '%.64s', wanted a number of %lld to %lld", rows[i].name, text, (long long)rows[i].least,
                     (long long)rows[i].most);
            refuse(message, "set it to a number, or unset it");
            return false;
        }
        if (!given)
            *rows[i].value = n;
    }
    const char *address = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    if (!q->address)
        q->address = address && *address && q->nodes > 1 ? address : "127.0.0.1";
    if (!q->port && q->nodes > 1)
        q->port = port;
    return true;
}

int command_launch(int argc, char **argv)
{
    request q = {.nodes = -1, .node = -1, .time_limit = NAN};
    const arg_row rows[] = {
        {"--nproc", ARG_EMPTY, &q.nproc},        {"--gpus", ARG_EMPTY, &q.gpus},
        {"--nnodes", ARG_COUNT, &q.nodes},       {"--node-rank", ARG_INT, &q.node},
        {"--master-addr", ARG_TEXT, &q.address}, {"--master-port", ARG_EMPTY, &q.port},
        {"--time-limit", ARG_REAL, &q.time_limit},
    };
    static args a; /* too large for a stack frame */
    a = (args){.name = "launch", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows};
    int split = 1;
    while (split < argc && strcmp(argv[split], "train") != 0 && !is_bench(argv[split]))
        split++;
    if (argc < 2)
        return fputs(help, stderr), EXIT_USAGE;
    int code = args_parse(&a, split, argv);
    if (code >= 0)
        return code;
    if (q.nproc && *q.nproc && q.gpus && *q.gpus && strcmp(q.nproc, q.gpus) != 0) {
        fprintf(stderr, "vla launch: --nproc '%s' and --gpus '%s': wanted one of them\n  hint: both are the ranks on this machine\n", q.nproc, q.gpus);
        return EXIT_USAGE;
    }
    if (split == argc)
        return refuse("no command to launch", "vla launch [options] train --config FILE, or bench");
    char message[256], *end;
    const char *world = getenv("WORLD_SIZE"), *rank = getenv("RANK");
    if (world && *world && strcmp(world, "1") != 0) {
        snprintf(message, sizeof message, "WORLD_SIZE is %.32s and RANK %.32s: another launcher has started this process as one of its ranks, "
                 "and each of them would start its own", world, rank ? rank : "is not set");
        return refuse(message, "under torchrun, accelerate or srun start `vla train` itself; else unset WORLD_SIZE and RANK");
    }
    if (!take_environment(&q))
        return EXIT_USAGE;
    long port = q.port && *q.port ? strtol(q.port, &end, 10) : 0;
    if ((q.port && *q.port && *end) || port < 0 || port > PORT_MOST) {
        snprintf(message, sizeof message, "--master-port or MASTER_PORT '%.64s': wanted a number of 1 to 65535, or 0 for one that is free", q.port);
        return refuse(message, "vla launch --help");
    }
    if (q.node >= q.nodes) {
        snprintf(message, sizeof message, "--node-rank %lld with --nnodes %lld: wanted 0 to %lld", (long long)q.node, (long long)q.nodes,
                 (long long)q.nodes - 1);
        return refuse(message, "machines are counted from 0");
    }
    if (q.nodes > 1 && port == 0)
        port = USUAL_PORT;
    if (!isnan(q.time_limit) && (q.time_limit <= 0 || q.time_limit > SECONDS_MOST)) {
        snprintf(message, sizeof message, "--time-limit %g: wanted seconds, above 0 and at most %d", q.time_limit, SECONDS_MOST);
        return refuse(message, "vla launch --help");
    }
    if (q.nodes > RANKS_MOST) {
        snprintf(message, sizeof message, "--nnodes %lld: wanted 1 to %d", (long long)q.nodes, RANKS_MOST);
        return refuse(message, "vla launch --help");
    }
    int ranks = count_ranks(&q, named_device(argc - split, argv + split));
    if (ranks < 0)
        return EXIT_USAGE;
    if (ranks == 1 && q.nodes == 1)
        return stay(argc - split, argv + split);
    if ((int64_t)ranks * q.nodes > RANKS_MOST) {
        snprintf(message, sizeof message, "%d ranks on each of %lld machines: wanted at most %d ranks in all", ranks, (long long)q.nodes, RANKS_MOST);
        return refuse(message, "vla launch --help");
    }
    return start(argc - split, argv + split, &q, ranks, (int)port);
}
