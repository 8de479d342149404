/* An order for qsort. */
#ifndef VLAI_BASE_ORDER_H
#define VLAI_BASE_ORDER_H

/* Of doubles, ascending. */
static inline int vlai_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

#endif
