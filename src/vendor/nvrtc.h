/* CUDA C to machine code at run time, by NVRTC. The library is loaded when it is first wanted; a machine may lack it. */
#ifndef VLAI_NVRTC_H
#define VLAI_NVRTC_H

#include "vla/error.h"

#include <stdbool.h>
#include <stddef.h>

VLA_BEGIN_DECLS

/* Is the library there? Threads: any, one at first. */
bool vlai_nvrtc_available(void);
/* major * 1000 + minor; 0 without the library. */
int vlai_nvrtc_version(void);
/* Compiles one source for sm_<arch> (90 = 9.0). *code is released with vlai_free. The compiler's log goes into the error. */
vla_status vlai_nvrtc_compile(const char *source, int arch, void **code, size_t *size, vla_error *err);

VLA_END_DECLS

#endif
