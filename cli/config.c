/* vla config: what a configuration says, or what one may say. */
#include "args.h"
#include "command.h"

#include "base/memory.h"
#include "train/config.h"

#include <stdio.h>
#include <string.h>

static const char help[] =
    "Usage: vla config [SECTION]\n"
    "       vla config --config FILE [--section.key=value ...]\n\n"
    "Without a file, lists every key of the training configuration with its default, meaning and range.\n"
    "With one, reads and checks it and prints all values as they count, as JSON.\n\n"
    "Examples:\n"
    "  vla config hyperparams.optimizer\n"
    "  vla config --config configs/libero.yml --hyperparams.seed=7\n";

int command_config(int argc, char **argv)
{
    const char *file = NULL;
    const arg_row rows[] = {{"--config", ARG_TEXT, &file}};
    args a = {.name = "config", .help = help, .rows = rows, .count = 1, .overrides = true, .positionals = true};
    int code = args_parse(&a, argc, argv);
    if (code >= 0)
        return code;
    if (a.positionals_given > 1 || (file && a.positionals_given)) {
        fputs("vla config: wanted one section, or --config FILE\n", stderr);
        return EXIT_USAGE;
    }
    if (!file && a.overrides_given) {
        fprintf(stderr, "vla config: '%s' overrides a configuration, and none is given\n  hint: vla config --config FILE %s\n", a.override[0], a.override[0]);
        return EXIT_USAGE;
    }
    const char *section = a.positionals_given ? a.positional[0] : NULL;
    vla_error err = VLA_ERROR_INIT;
    char *text = NULL;
    vla_status status;
    if (file) {
        vlai_config *config;
        status = vlai_config_load(file, a.override, a.overrides_given, &config, &err);
        if (status == VLA_OK) {
            for (size_t i = 0; i < config->notice_count; i++)
                fprintf(stderr, "vla config: %s\n", config->notices[i]);
            status = vlai_config_dump(config, &text, &err);
            vlai_config_destroy(config);
        }
    } else {
        status = vlai_config_help(section, &text, &err);
    }
    if (status != VLA_OK)
        return command_fail("config", &err);
    fputs(text, stdout);
    vlai_free(text);
    return EXIT_DONE;
}
