/* Any text as an architecture file: refused with a sentence, or sizes from which the list of tensors can be made. */
#include "base/memory.h"
#include "model/wallx_layout.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_wallx_config c;
    vlai_wallx_weight *weights;
    size_t count;
    if (vlai_wallx_config_parse((const char *)data, size, "fuzz", &c, &err) != VLA_OK) {
        if (!err.message[0] || err.status == VLA_E_INTERNAL)
            __builtin_trap();
        return 0;
    }
    if (c.num_hidden_layers > 4 || c.vision.depth > 4) /* the list is long then, and no different */
        return 0;
    c.action_dim = c.propri_dim = 4096;
    if (vlai_wallx_weights(&c, &weights, &count, &err) != VLA_OK)
        __builtin_trap();
    for (size_t i = 0; i < count; i++) {
        int64_t parts = weights[i].part_rows[0] + weights[i].part_rows[1] + weights[i].part_rows[2];
        if (weights[i].elements <= 0 || parts != weights[i].shape[0])
            __builtin_trap();
    }
    vlai_free(weights);
    return 0;
}
