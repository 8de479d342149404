/* Any bytes as a safetensors file: refused with a sentence, or every tensor readable to its last element. */
#include "base/memory.h"
#include "format/safetensors.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_safetensors *st;
    if (vlai_safetensors_open_memory(data, size, "fuzz", &st, &err) != VLA_OK) {
        if (!err.message[0] || err.status == VLA_E_INTERNAL)
            __builtin_trap();
        return 0;
    }
    for (size_t i = 0; i < vlai_safetensors_count(st); i++) {
        const vlai_tensor_view *v = vlai_safetensors_at(st, i);
        if (vlai_safetensors_find(st, v->name) != v)
            __builtin_trap();
        for (int64_t at = 0; at < v->elements; at += 64) {
            float values[64];
            int64_t n = v->elements - at < 64 ? v->elements - at : 64, integers[64];
            if (vlai_tensor_to_float(v, at, n, values, &err) != VLA_OK)
                __builtin_trap();
            vlai_tensor_to_int64(v, at, n, integers, &err);
        }
    }
    vlai_safetensors_close(st);
    return 0;
}
