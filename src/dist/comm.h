/* Collectives: the same call by every rank of a run, in the same order, on buffers of the same size. Gloo on CPUs, NCCL on
 * GPUs; of world 1 there is neither, and every call is a copy or nothing.
 *
 *     vlai_comm *comm = NULL;
 *     VLA_TRY(vlai_comm_open(group, "cuda:0", &comm, err));   // meets the other ranks through the group
 *     vlai_executor_set_comm(executor, comm);                 // before runs of plans with collectives are created
 *     ...
 *     vlai_comm_close(comm);                                  // after the executor's runs, before the group is left
 *
 * On a GPU calls are enqueued on a stream (and captured with it); they return before the work is done. On a CPU they return
 * when it is. A communicator that failed stays failed: later calls return VLA_E_NCCL at once, and vlai_comm_error says
 * what it was. Results that were under way are then not to be used. A thread of its own watches the group and NCCL: a rank that
 * is lost ends the collectives under way within a second, and the failure is the group's sentence.
 *
 * Threads: one at a time may enqueue; vlai_comm_error and vlai_comm_abort may be called from any. */
#ifndef VLAI_COMM_H
#define VLAI_COMM_H

#include "vla/dtype.h"
#include "vla/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

VLA_BEGIN_DECLS

struct vla_executor;
struct vlai_group;
typedef struct vlai_comm vlai_comm;

/* Whether ranks on `device` could be connected by this build and on this machine: what by goes to `text` ("NCCL 2.28.3", "Gloo"). */
vla_status vlai_comm_available(const char *device, char *text, size_t size, vla_error *err);
/* `device`: "cpu" (Gloo), "cuda" or "cuda:N" (NCCL). Every rank calls it; it returns when all are connected, or fails within
 * the group's time limit. The group must outlive the communicator. NULL group: rank 0 of 1. */
vla_status vlai_comm_open(struct vlai_group *group, const char *device, vlai_comm **out, vla_error *err);
/* Work under way should be waited for first. In good order every rank closes: NCCL gives its memory back when all ranks of a machine
 * do, so that a rank which comes early waits for the others, until the group's time limit; then the rest is left to the end of the
 * process. After a failure nobody is waited for. NULL: nothing. */
void vlai_comm_close(vlai_comm *comm);

/* NULL: rank 0 of 1. */
int vlai_comm_rank(const vlai_comm *comm);
int vlai_comm_world(const vlai_comm *comm);
const char *vlai_comm_device(const vlai_comm *comm); /* "cpu", "cuda"; "" for NULL */

/* in [world * n] -> out [n]: the sum over ranks of their part `rank`. Float types and I32, I64. On a CPU the sum is taken in
 * the order of ranks, bf16 in fp32 and rounded once; `scratch` as vlai_comm_scratch says, NULL on a GPU. `out` lies apart
 * from `in`. `stream` is NULL on a CPU. Of world 1, and with comm NULL, a copy: on the host without a stream. */
vla_status vlai_comm_reduce_scatter(vlai_comm *comm, const void *in, void *out, int64_t n, vla_dtype dtype, void *scratch, void *stream);
/* data [world * n], any type: the own part n * rank .. is given, the others are filled in. */
vla_status vlai_comm_all_gather(vlai_comm *comm, void *data, int64_t n, vla_dtype dtype, void *stream);
/* data [n], in place: the sum over ranks, the same bits on every rank. `scratch` as above. */
vla_status vlai_comm_all_reduce(vlai_comm *comm, void *data, int64_t n, vla_dtype dtype, void *scratch, void *stream);

/* Device memory of which all_gather is done by the GPUs' copy engines, so that no multiprocessor is taken from what runs beside it:
 * where NCCL_CTA_POLICY=2 is in rank 0's environment, NCCL is 2.28 or later and all GPUs are on one machine. By all ranks together,
 * with the same size. *out NULL: there is no such memory, and any other serves. */
vla_status vlai_comm_memory_alloc(vlai_comm *comm, size_t bytes, void **out, vla_error *err);
/* false: it is other memory. Before the communicator is closed. */
bool vlai_comm_memory_free(vlai_comm *comm, void *memory);

/* Bytes of scratch on a CPU for `elements` of the whole bucket, or of the data: reduce_scatter wants so much once, all_reduce
 * twice. */
size_t vlai_comm_scratch(int64_t elements, vla_dtype dtype, int world);

/* Whether the communicator has failed, also by itself, between calls; the sentence goes to `text`. */
bool vlai_comm_error(vlai_comm *comm, char *text, size_t size);
/* Ends what is under way, so that a thread that waits for it returns; the communicator has failed with `why`. */
void vlai_comm_abort(vlai_comm *comm, const char *why);

/* While it is paused, collectives of plans are those of one rank: reduce_scatter copies the own part, the others do nothing. What a
 * device captures then stays so. For measurements: every rank pauses in the same places. NULL: nothing. */
void vlai_comm_pause(vlai_comm *comm, bool paused);
bool vlai_comm_is_paused(const vlai_comm *comm);

/* Collectives of plans that this executor runs go through `comm`; the executor does not own it. */
void vlai_executor_set_comm(struct vla_executor *executor, vlai_comm *comm);

VLA_END_DECLS

#endif
