#include "vla/dtype.h"

static const struct {
    size_t bytes;
    const char *name;
} table[VLA_DTYPE_COUNT] = {
    [VLA_DTYPE_NONE] = {0, "?"},
#define VLA_X(name, bytes, spelling) [VLA_##name] = {bytes, spelling},
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
