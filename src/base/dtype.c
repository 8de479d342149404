#include "vla/dtype.h"

static const struct {
    size_t bytes;
    const char *name;
} table[VLA_DTYPE_COUNT] = {
#define VLA_X(name, bytes, spelling) {bytes, spelling},
    VLA_DTYPE_MAP(VLA_X)
#undef VLA_X
};

size_t vla_dtype_size(vla_dtype dtype)
{
    return (unsigned)dtype < VLA_DTYPE_COUNT ? table[dtype].bytes : 0;
}

const char *vla_dtype_name(vla_dtype dtype)
{
    return (unsigned)dtype < VLA_DTYPE_COUNT ? table[dtype].name : "?";
}
