/* Errors: a status and a sentence.
 *
 * Every call that can fail returns a vla_status and, when the caller passes a vla_error, fills it in. The message
 * names the thing and shows the numbers; the hint says what the user can do. A vla_error is plain storage owned by the
 * caller: no allocation on the error path, no thread-local state, NULL allowed.
 *
 *     vla_error err = VLA_ERROR_INIT;
 *     if (vla_dataset_open("set", NULL, &ds, &err) != VLA_OK)
 *         fprintf(stderr, "%s: %s\n  %s\n", vla_status_name(err.status), err.message, err.hint);
 */
#ifndef VLA_ERROR_H
#define VLA_ERROR_H

#include "vla/api.h"

/* name, text */
#define VLA_STATUS_MAP(X)                                    \
    X(OK, "no error")                                        \
    X(INVALID, "invalid argument or configuration")          \
    X(SHAPE, "shapes do not fit")                            \
    X(DTYPE, "data type not accepted here")                  \
    X(UNSUPPORTED, "not supported by this build or format")  \
    X(NOMEM, "out of host memory")                           \
    X(DEVICE_NOMEM, "out of device memory")                  \
    X(IO, "the operating system refused a file operation")   \
    X(FORMAT, "the file is not of the expected format")      \
    X(CORRUPT, "the file contradicts itself or is damaged")  \
    X(NOT_FOUND, "not found")                                \
    X(CUDA, "a CUDA call failed")                            \
    X(NCCL, "a collective failed")                           \
    X(NONFINITE, "a value is NaN or infinite")               \
    X(CANCELLED, "stopped on request")                       \
    X(LOST, "a rank of the run was lost")                    \
    X(INTERNAL, "an invariant of the program is broken")

typedef enum vla_status {
#define VLA_X(name, text) VLA_E_##name,
    VLA_STATUS_MAP(VLA_X)
#undef VLA_X
    VLA_STATUS_COUNT
} vla_status;

#define VLA_OK VLA_E_OK

typedef struct vla_error {
    vla_status status;
    char message[1024]; /* one sentence: what failed, where, value found, value wanted */
    char hint[512];     /* what to do about it; empty when there is nothing to say */
    const char *source; /* file and line of this library that raised it */
    int line;
} vla_error;

#define VLA_ERROR_INIT {VLA_OK, {0}, {0}, 0, 0}

VLA_BEGIN_DECLS

VLA_API const char *vla_status_name(vla_status status);
VLA_API const char *vla_status_text(vla_status status);

VLA_END_DECLS

#endif
