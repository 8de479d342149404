/* vla report: one HTML page for a run, or whether two took the same steps. */
#include "args.h"
#include "command.h"

#include "base/fail.h"
#include "train/compare.h"
#include "train/report.h"

#include <inttypes.h>
#include <stdio.h>

static const char help[] =
    "Usage: vla report RUN [--out FILE]\n"
    "       vla report RUN --against OTHER [--rtol X]\n\n"
    "Writes one self-contained HTML page about a run folder: loss (of each data set, too), learning rates, norms of gradients and\n"
    "weights, throughput, time, memory, the results of `vla predict` and `vla bench`, checkpoints, configuration. It needs no\n"
    "network and no other file. What the folder lacks is left out; so is a file that cannot be read, and it is named.\n\n"
    "  --out FILE        where to write it (RUN/report.html)\n"
    "  --against OTHER   no page: says whether loss, gradient norm and skipped steps are those of another run folder or metrics file,\n"
    "                    and the first step that differs; code 3 where one does\n"
    "  --rtol X          relative difference that is allowed then (0.001); 0: none\n\n"
    "Examples:\n"
    "  vla report build/demo/run                      # what make demo has trained\n"
    "  vla predict build/demo/run && vla report build/demo/run --out demo.html\n"
    "  vla report ckpt/first --against ckpt/second --rtol 0      # the same bits?\n";

static int against(const char *run, const char *other, double rtol)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_comparison c;
    if (vlai_compare_runs(run, other, rtol, &c, &err) != VLA_OK)
        return command_fail("report", &err);
    puts(c.text);
    return c.same ? EXIT_DONE : EXIT_DATA;
}

int command_report(int argc, char **argv)
{
    const char *out = NULL, *other = NULL;
    double rtol = 1e-3;
    const arg_row rows[] = {{"--out", ARG_TEXT, &out}, {"--against", ARG_TEXT, &other}, {"--rtol", ARG_REAL, &rtol}};
    args a = {.name = "report", .help = help, .rows = rows, .count = sizeof rows / sizeof *rows, .positionals = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    vla_error err = VLA_ERROR_INIT;
    vlai_report_summary s;
    if (a.positionals_given != 1)
        return vlai_fail_hint(&err, VLA_E_INVALID, "vla report RUN", "%zu run folders were named, wanted one", a.positionals_given),
               command_fail("report", &err);
    if (rtol < 0)
        return vlai_fail(&err, VLA_E_INVALID, "--rtol: %g, wanted 0 or more", rtol), command_fail("report", &err);
    if (other && out)
        return vlai_fail(&err, VLA_E_INVALID, "--out %s: with --against no page is written", out), command_fail("report", &err);
    if (other)
        return against(a.positional[0], other, rtol);
    if (vlai_report_write(a.positional[0], out, &s, &err) != VLA_OK)
        return command_fail("report", &err);
    for (int i = 0; i < s.damaged_count; i++)
        fprintf(stderr, "vla report: left out: %s\n", s.damaged[i].message);
    if (s.bad_lines)
        fprintf(stderr, "vla report: %" PRId64 " line%s of the metrics %s no JSON object%s with a step and %s passed over\n", s.bad_lines,
                s.bad_lines == 1 ? "" : "s", s.bad_lines == 1 ? "is" : "are", s.bad_lines == 1 ? "" : "s", s.bad_lines == 1 ? "was" : "were");
    printf("%s: %" PRId64 " step%s, %" PRId64 " validation%s, %" PRId64 " checkpoint%s, %" PRId64 " picture%s, %zu bytes\n", s.path, s.steps,
           s.steps == 1 ? "" : "s", s.validations, s.validations == 1 ? "" : "s", s.checkpoints, s.checkpoints == 1 ? "" : "s", s.pictures,
           s.pictures == 1 ? "" : "s", s.bytes);
    return EXIT_DONE;
}
