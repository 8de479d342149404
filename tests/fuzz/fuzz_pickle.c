/* Any bytes as the pickle of a PyTorch file: refused with a sentence, or tensors readable to their last element. The input
 * is wrapped into an archive with one storage, because a mutated archive would hardly ever reach the pickle; input that
 * begins with "PK" is taken as the archive itself. */
#include "format/pickle.h"

#include <string.h>

enum { LIMIT = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t *put(uint8_t *to, const void *from, size_t n)
{
    memcpy(to, from, n);
    return to + n;
}

static uint8_t *put_number(uint8_t *to, uint64_t value, int n)
{
    for (int i = 0; i < n; i++)
        *to++ = i < 8 ? (uint8_t)(value >> (8 * i)) : 0;
    return to;
}

static uint8_t *put_header(uint8_t *to, int central, const char *name, size_t size, size_t local)
{
    to = put(to, central ? "PK\1\2" : "PK\3\4", 4);
    to = put_number(to, 0, central ? 6 : 4);
    to = put_number(to, 0, 2);
    to = put_number(to, 0, 8);
    to = put_number(to, size, 4);
    to = put_number(to, size, 4);
    to = put_number(to, strlen(name), 2);
    to = put_number(to, 0, central ? 12 : 2);
    if (central)
        to = put_number(to, local, 4);
    return put(to, name, strlen(name));
}

static vla_status read_all(void *context, const vlai_tensor_view *view, vla_error *err)
{
    (void)context;
    for (int64_t at = 0; at < view->elements; at += 64) {
        float values[64];
        if (vlai_tensor_to_float(view, at, view->elements - at < 64 ? view->elements - at : 64, values, err) != VLA_OK)
            __builtin_trap();
    }
    return VLA_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t archive[LIMIT + 1024];
    static const uint8_t storage[64] = {1, 2, 3};
    vla_error err = VLA_ERROR_INIT;
    if (size > LIMIT)
        return 0;
    if (size < 2 || memcmp(data, "PK", 2)) {
        uint8_t *p = put_header(archive, 0, "data.pkl", size, 0);
        p = put(p, data, size);
        size_t second = (size_t)(p - archive);
        p = put_header(p, 0, "data/0", sizeof storage, 0);
        p = put(p, storage, sizeof storage);
        size_t directory = (size_t)(p - archive);
        p = put_header(p, 1, "data.pkl", size, 0);
        p = put_header(p, 1, "data/0", sizeof storage, second);
        size_t length = (size_t)(p - archive) - directory;
        p = put(p, "PK\5\6\0\0\0\0\2\0\2\0", 12);
        p = put_number(p, length, 4);
        p = put_number(p, directory, 4);
        p = put_number(p, 0, 2);
        size = (size_t)(p - archive);
        data = archive;
    }
    if (vlai_pickle_read(data, size, "fuzz", read_all, NULL, &err) != VLA_OK &&
        (!err.message[0] || err.status == VLA_E_INTERNAL))
        __builtin_trap();
    return 0;
}
