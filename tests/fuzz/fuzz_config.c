/* Any text as a training configuration: refused with a sentence, or a configuration whose print reads back to itself. */
#include "base/memory.h"
#include "train/config.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_config *a, *b;
    char *first = NULL, *second = NULL;
    if (vlai_config_parse((const char *)data, size, "fuzz", NULL, 0, &a, &err) != VLA_OK) {
        if (!err.message[0] || err.status == VLA_E_INTERNAL)
            __builtin_trap();
        return 0;
    }
    if (vlai_config_dump(a, &first, &err) != VLA_OK ||
        vlai_config_parse(first, strlen(first), "dump", NULL, 0, &b, &err) != VLA_OK ||
        vlai_config_dump(b, &second, &err) != VLA_OK || strcmp(first, second))
        __builtin_trap();
    vlai_free(first);
    vlai_free(second);
    vlai_config_destroy(a);
    vlai_config_destroy(b);
    return 0;
}
