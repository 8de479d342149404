#include "base/finite.h"

#include <string.h>

enum { BLOCK = 1024 }; /* elements that are looked at without a branch: a loop of that length is made one of vectors */

/* The exponent bits all set mean NaN or infinity. Whole blocks are passed over until one has such a value, then each element is looked at. */
#define FIRST(type, exponent)                                    \
    do {                                                         \
        const char *from = data;                                 \
        int64_t at = 0;                                          \
        type v;                                                  \
        for (; n - at >= BLOCK; at += BLOCK) {                   \
            type any = 0;                                        \
            const char *block = from + (size_t)at * sizeof v;    \
            for (size_t i = 0; i < BLOCK; i++) {                 \
                memcpy(&v, block + i * sizeof v, sizeof v);      \
                any |= (type)((v & (exponent)) == (exponent));   \
            }                                                    \
            if (any)                                             \
                break;                                           \
        }                                                        \
        for (; at < n; at++) {                                   \
            memcpy(&v, from + (size_t)at * sizeof v, sizeof v);  \
            if ((v & (exponent)) == (exponent))                  \
                return at;                                       \
        }                                                        \
        return -1;                                               \
    } while (0)

int64_t vlai_first_not_finite(vla_dtype dtype, const void *data, int64_t n)
{
    switch (dtype) {
    case VLA_F64: FIRST(uint64_t, 0x7FF0000000000000u);
    case VLA_F32: FIRST(uint32_t, 0x7F800000u);
    case VLA_BF16: FIRST(uint16_t, 0x7F80u);
    case VLA_F16: FIRST(uint16_t, 0x7C00u);
    default: return -1;
    }
}
