/* Element types. One row per type: name, bytes, spelling in safetensors files. */
#ifndef VLA_DTYPE_H
#define VLA_DTYPE_H

#include "vla/api.h"

#define VLA_DTYPE_MAP(X)  \
    X(F32, 4, "F32")      \
    X(F64, 8, "F64")      \
    X(BF16, 2, "BF16")    \
    X(F16, 2, "F16")      \
    X(I64, 8, "I64")      \
    X(I32, 4, "I32")      \
    X(I16, 2, "I16")      \
    X(I8, 1, "I8")        \
    X(U8, 1, "U8")        \
    X(BOOL, 1, "BOOL")    \
    X(U16, 2, "U16")      \
    X(U32, 4, "U32")      \
    X(U64, 8, "U64")

typedef enum vla_dtype {
    VLA_DTYPE_NONE, /* zero: not given */
#define VLA_X(name, bytes, spelling) VLA_##name,
    VLA_DTYPE_MAP(VLA_X)
#undef VLA_X
    VLA_DTYPE_COUNT
} vla_dtype;

VLA_BEGIN_DECLS

VLA_API size_t vla_dtype_size(vla_dtype dtype);      /* bytes of an element; 0 for NONE and the symbolic types of a graph */
VLA_API const char *vla_dtype_name(vla_dtype dtype); /* the safetensors spelling; of other numbers "?" */

VLA_END_DECLS

#endif
