/* A transport behind vlai_comm: vendor/gloo.cc and vendor/nccl.c. Its functions return VLA_OK, or a status with the sentence
 * in `err`; dist/comm.c keeps the first one. They are called for worlds of more than one rank alone. */
#ifndef VLAI_COMM_IMPL_H
#define VLAI_COMM_IMPL_H

#include "dist/comm.h"

VLA_BEGIN_DECLS

typedef struct vlai_transport {
    void (*close)(void *state);
    vla_status (*reduce_scatter)(void *state, const void *in, void *out, int64_t n, vla_dtype dtype, void *scratch, void *stream, vla_error *err);
    vla_status (*all_gather)(void *state, void *data, int64_t n, vla_dtype dtype, void *stream, vla_error *err);
    vla_status (*all_reduce)(void *state, void *data, int64_t n, vla_dtype dtype, void *scratch, void *stream, vla_error *err);
    /* What failed by itself, if anything; asked by a thread of its own. NULL: calls tell all. */
    vla_status (*poll)(void *state, vla_error *err);
    /* Ends what is under way; any thread, once at most. Only close is called afterwards. */
    void (*abort)(void *state);
    /* Memory for gathers by copy engines, see dist/comm.h; *out NULL: there is none. free: whether it was such memory. NULL: never. */
    vla_status (*alloc)(void *state, size_t bytes, void **out, vla_error *err);
    bool (*free)(void *state, void *memory);
} vlai_transport;

extern const vlai_transport vlai_gloo, vlai_nccl;
/* `limit`: seconds until all ranks have to be there, and for a call of the host that waits for another rank. */
vla_status vlai_gloo_open(struct vlai_group *group, double limit, void **state, vla_error *err);
/* The version of the library, 22803 for 2.28.3; an error where it cannot be used. */
vla_status vlai_nccl_version(int *version, vla_error *err);
vla_status vlai_nccl_open(struct vlai_group *group, double limit, int device, void **state, vla_error *err);

VLA_END_DECLS

#endif
