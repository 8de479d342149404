/* vla launch: starts the ranks of a training run on this machine. There is one, in this process: on the first GPU, or in a build
 * or on a machine without one on the CPU, and it says so. */
#include "command.h"

#include "exec/device_facts.h"
#include "train/device.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "Usage: vla launch [--gpus N] [--nnodes N] [--node-rank R] [--master-addr A] [--master-port P] train ARGUMENTS...\n\n"
    "Starts one rank, on the first GPU. Without a GPU it starts one CPU rank and says so.\n\n"
    "  --gpus N         ranks on this machine; one is started, and more are answered with a notice\n"
    "  --nnodes N       machines (1)\n"
    "  --node-rank R    which of them this is (0)\n"
    "  --master-addr A  where rank 0 listens (127.0.0.1)\n"
    "  --master-port P  (29500)\n\n"
    "Example:\n"
    "  vla launch --gpus 1 train --config configs/libero_local_perf.yml\n";

/* `wanted`: ranks that were asked for and are not started; NULL. */
static void say_devices(const char *wanted)
{
    vlai_text list = {0};
    vlai_device_list(&list);
    fprintf(stderr, "vla launch: %s; one rank trains, on the first%s%s\n", list.data ? list.data : "a GPU", wanted ? ", instead of " : "", wanted ? wanted : "");
    vlai_text_fini(&list);
}

int command_launch(int argc, char **argv)
{
    static const char *const known[] = {"--gpus", "--nnodes", "--node-rank", "--master-addr", "--master-port", "train", "--help"};
    const char *values[5] = {"", "1", "0", "127.0.0.1", "29500"};
    if (argc < 2 || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        fputs(help, argc < 2 ? stderr : stdout);
        return argc < 2 ? EXIT_USAGE : EXIT_DONE;
    }
    int i = 1;
    for (; i < argc && strcmp(argv[i], "train"); i++) {
        bool found = false;
        for (int k = 0; k < 5 && !found; k++) {
            size_t n = strlen(known[k]);
            if (strncmp(argv[i], known[k], n) || (argv[i][n] && argv[i][n] != '='))
                continue;
            if (argv[i][n])
                values[k] = argv[i] + n + 1;
            else if (i + 1 < argc)
                values[k] = argv[++i];
            else
                return command_unknown("launch", argv[i], known, 7);
            found = true;
        }
        if (!found)
            return command_unknown("launch", argv[i], known, 7);
    }
    if (i == argc) {
        fprintf(stderr, "vla launch: no command to launch\n  hint: vla launch [options] train --config FILE\n");
        return EXIT_USAGE;
    }
    if (atoi(values[1]) > 1) {
        fprintf(stderr, "vla launch: --nnodes %s: one rank trains, on one machine\n  hint: set NNODES=1\n", values[1]);
        return EXIT_USAGE;
    }
    char device[VLAI_DEVICE_NAME] = "cpu";
    vla_error err = VLA_ERROR_INIT;
    bool gpu = vlai_device_choose("auto", device, &err) == VLA_OK && strcmp(device, "cpu") != 0;
    bool asked = *values[0] && strcmp(values[0], "0") != 0, many = asked && atoi(values[0]) > 1;
    if (!gpu)
        fprintf(stderr, "vla launch: no GPU that this build can use: starting one CPU rank%s%s%s\n", asked ? " instead of " : "",
                asked ? values[0] : "", asked ? " GPU ranks" : "");
    else
        say_devices(many ? values[0] : NULL);
    return command_train(argc - i, argv + i);
}
