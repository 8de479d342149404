/* vla report: one HTML page for a run. */
#include "command.h"

#include "base/fail.h"
#include "train/report.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char help[] =
    "Usage: vla report RUN [--out FILE]\n\n"
    "Writes one self-contained HTML page about a run folder: loss, learning rate, gradient norm, throughput, time, memory, the\n"
    "results of `vla predict`, checkpoints, configuration. It needs no network and no other file.\n\n"
    "  --out FILE   where to write it (RUN/report.html)\n\n"
    "Examples:\n"
    "  vla report ckpt/demo\n"
    "  vla predict ckpt/demo && vla report ckpt/demo --out demo.html\n";

int command_report(int argc, char **argv)
{
    static const char *const known[] = {"--out", "--help"};
    const char *run = NULL, *out = NULL;
    if (argc < 2 || command_help(argc, argv, help))
        return argc < 2 ? fputs(help, stderr), EXIT_USAGE : EXIT_DONE;
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-' && !run)
            run = argv[i];
        else if (!strcmp(argv[i], "--out") && i + 1 < argc)
            out = argv[++i];
        else
            return command_unknown("report", argv[i], known, 2);
    }
    vla_error err = VLA_ERROR_INIT;
    vlai_report_summary s;
    if (!run)
        return vlai_fail_hint(&err, VLA_E_INVALID, "vla report RUN", "no run folder was named"), command_fail("report", &err);
    if (vlai_report_write(run, out, &s, &err) != VLA_OK)
        return command_fail("report", &err);
    if (s.bad_lines)
        fprintf(stderr, "vla report: %" PRId64 " lines of the metrics are no JSON objects and were passed over\n", s.bad_lines);
    printf("%s: %" PRId64 " steps, %" PRId64 " validations, %" PRId64 " checkpoints, %" PRId64 " pictures, %zu bytes\n", s.path, s.steps,
           s.validations, s.checkpoints, s.pictures, s.bytes);
    return EXIT_DONE;
}
