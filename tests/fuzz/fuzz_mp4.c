/* Any bytes as an mp4 file: refused with a sentence, or a sample table that stays inside the file. */
#include "format/mp4.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    vlai_mp4 mp4;
    vla_error err = VLA_ERROR_INIT;
    if (vlai_mp4_parse(data, size, "fuzz", &mp4, &err) != VLA_OK) {
        if (!err.message[0] || err.status == VLA_E_INTERNAL)
            __builtin_trap();
        return 0;
    }
    for (int64_t i = 0; i < mp4.count; i++)
        if (mp4.samples[i].offset > size || mp4.samples[i].size > size - mp4.samples[i].offset)
            __builtin_trap();
    for (int64_t i = 0; i < mp4.shown_count; i++)
        if (mp4.shown[i] < 0 || mp4.shown[i] >= mp4.count ||
            (i && mp4.samples[mp4.shown[i]].pts < mp4.samples[mp4.shown[i - 1]].pts))
            __builtin_trap();
    vlai_mp4_fini(&mp4);
    return 0;
}
