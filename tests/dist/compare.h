/* How far the results of ranks lie from those of one. */
#ifndef VLA_TEST_COMPARE_H
#define VLA_TEST_COMPARE_H

#include "test.h"

#include "base/memory.h"
#include "format/safetensors.h"

#include <math.h>

/* Of the tensor that is furthest: the largest difference of an element relative to the tensor's largest element, and the distance
 * relative to its size, both in L2. */
typedef struct apart {
    double element, size;
} apart;

/* Of two files of weights with the same tensors. */
static inline apart weights_apart(const char *a, const char *b)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_safetensors *x, *y;
    apart worst = {0, 0};
    assert_ok(vlai_safetensors_open(a, &x, &err), err);
    assert_ok(vlai_safetensors_open(b, &y, &err), err);
    assert_int_equal(vlai_safetensors_count(x), vlai_safetensors_count(y));
    for (size_t i = 0; i < vlai_safetensors_count(x); i++) {
        const vlai_tensor_view *v = vlai_safetensors_at(x, i), *w = vlai_safetensors_find(y, v->name);
        float *p = vlai_array((size_t)v->elements + 1, sizeof *p), *q = vlai_array((size_t)v->elements + 1, sizeof *q);
        double largest = 1e-30, difference = 0, size = 0, distance = 0;
        assert_non_null(w);
        assert_non_null(p);
        assert_non_null(q);
        assert_ok(vlai_tensor_to_float(v, 0, v->elements, p, &err), err);
        assert_ok(vlai_tensor_to_float(w, 0, v->elements, q, &err), err);
        for (int64_t e = 0; e < v->elements; e++) {
            double here = fabs((double)p[e]), d = fabs((double)p[e] - q[e]);
            largest = here > largest ? here : largest;
            difference = d > difference ? d : difference;
            size += here * here;
            distance += d * d;
        }
        assert_false(isnan(distance));
        worst.element = fmax(worst.element, difference / largest);
        if (size > 0)
            worst.size = fmax(worst.size, sqrt(distance / size));
        vlai_free(p);
        vlai_free(q);
    }
    vlai_safetensors_close(x);
    vlai_safetensors_close(y);
    return worst;
}

/* For programs that start ranks. A rank that is ended does not join the threads that wait for others, which is no leak; Gloo's threads
 * are not instrumented, so that what they do to each other under its own locks looks like races. */
static inline void tell_sanitizer(void)
{
    char options[512];
    const char *given = getenv("TSAN_OPTIONS");
    snprintf(options, sizeof options, "%.400s:report_thread_leaks=0:ignore_noninstrumented_modules=1", given ? given : "");
    setenv("TSAN_OPTIONS", options, 1);
}

#endif
