/* Compiles one kernel family, named by the macro FAMILY, for float and for double.
 *
 *     #define FAMILY "cpu/norm.inc.h"
 *     #include "cpu/instantiate.h"
 *
 * The family is written in terms of
 *     real      float or double
 *     FN(name)  the kernel of op `name`: vlai_cpu_<name>_float, vlai_cpu_<name>_double
 *     L(name)   a static helper of one instance
 *     EXP(x)    exp(x), for float in a form that vectorises
 *     GEMM      cblas_sgemm or cblas_dgemm
 *     REAL_IS_FLOAT  1 or 0, for the few places where the two differ
 * and calls the math functions by their type-generic names. */
#include "cpu/kernel.h"

#include <cblas.h>
#include <tgmath.h>

#define real float
#define REAL_IS_FLOAT 1
#define FN(name) vlai_cpu_##name##_float
#define L(name) name##_float
#define EXP(x) vlai_expf(x)
#define GEMM cblas_sgemm
#include FAMILY
#undef real
#undef REAL_IS_FLOAT
#undef FN
#undef L
#undef EXP
#undef GEMM

#define real double
#define REAL_IS_FLOAT 0
#define FN(name) vlai_cpu_##name##_double
#define L(name) name##_double
#define EXP(x) exp(x)
#define GEMM cblas_dgemm
#include FAMILY
