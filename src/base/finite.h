/* NaN and infinity among stored numbers. */
#ifndef VLAI_FINITE_H
#define VLAI_FINITE_H

#include "vla/dtype.h"

VLA_BEGIN_DECLS

/* Index of the first of n values that is NaN or infinite, or -1; integers never are. The data need not be aligned. */
int64_t vlai_first_not_finite(vla_dtype dtype, const void *data, int64_t n);

VLA_END_DECLS

#endif
