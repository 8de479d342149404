/* vla config: what a configuration says, or what one may say. */
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
    static const char *const known[] = {"--config", "--help"};
    enum { OVERRIDE_LIMIT = 256 };
    const char *file = NULL, *section = NULL, *overrides[OVERRIDE_LIMIT];
    size_t count = 0;
    if (command_help(argc, argv, help))
        return EXIT_DONE;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--config") && i + 1 < argc)
            file = argv[++i];
        else if (!strncmp(argv[i], "--config=", 9))
            file = argv[i] + 9;
        else if (vlai_config_is_override(argv[i]) && count < OVERRIDE_LIMIT)
            overrides[count++] = argv[i];
        else if (argv[i][0] != '-' && !section)
            section = argv[i];
        else
            return command_unknown("config", argv[i], known, 2);
    }
    vla_error err = VLA_ERROR_INIT;
    char *text = NULL;
    vla_status status;
    if (file) {
        vlai_config *config;
        status = vlai_config_load(file, overrides, count, &config, &err);
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
