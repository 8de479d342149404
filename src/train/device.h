/* Which device a command runs on, and the memory that a run takes of it. */
#ifndef VLAI_TRAIN_DEVICE_H
#define VLAI_TRAIN_DEVICE_H

#include "vla/run.h"

enum { VLAI_DEVICE_NAME = 16 };

/* What the driver takes besides: kernels loaded late, captured steps of a few shapes. Left free by automatic choices. */
#define VLAI_DEVICE_SPARE ((size_t)512 << 20)
/* What NCCL takes for its buffers when ranks connect: free memory before less after, of 2 H200 GPUs of one host
 * (tests/gpu/test_cuda_comm). As the difference of what a step of one rank and of each of two holds beside the program's own it was
 * 915 MB (vla bench). */
#define VLAI_DEVICE_COLLECTIVES ((size_t)904000000)

VLA_BEGIN_DECLS

/* GPUs that this build can use, as CUDA_VISIBLE_DEVICES leaves them. */
int vlai_gpu_count(void);
/* The device of one of several ranks on this machine: like vlai_device_choose for one, else cuda:LOCAL_RANK for auto and cuda. A GPU
 * named by its number is refused then, and one that every rank sees alone (its launcher shows each rank its own) is cuda:0. */
vla_status vlai_device_of_rank(const char *wanted, int local_rank, int local_world, char out[VLAI_DEVICE_NAME], vla_error *err);
/* cpu, cuda or cuda:N as they are; auto (or NULL): cuda where this build has CUDA and the machine a GPU, else cpu. The result
 * is a name for vla_executor_create_on. */
vla_status vlai_device_choose(const char *wanted, char out[VLAI_DEVICE_NAME], vla_error *err);

/* Bytes of the store's arenas, on its device or in host memory. */
size_t vlai_store_held(const vla_store *store);
/* Bytes that the executor holds once it has reserved for this plan alone: the arena, and scratch and staging. */
typedef struct vlai_plan_need {
    size_t arena, scratch;
} vlai_plan_need;
vlai_plan_need vlai_plan_needs(const vla_executor *executor, const vla_plan *plan);
/* The most bytes that the store, of which `held` are taken already, and plans may take together: the limit (0: none), and on
 * a device what it has free, less what the driver takes for captured steps and kernels. SIZE_MAX: not bounded. */
size_t vlai_device_room(const vla_executor *executor, size_t limit, size_t held);

/* Of what `need` bytes, among them a plan's arena, leave of the room: how much may go to values that the plan would make
 * again otherwise (vla_plan_options.keep), `wanted` at most (memory.keep_gb; 0: not bounded). A sixteenth of the arena and a
 * 64th of the room stay free, for larger batches. Nothing where nothing is made again. Unless it is wanted, nothing with cheap recompute in bf16-sr and bf16-plain: who takes
 * a mode without masters wants memory for other things (at B = 26, 14 GB of it would buy 1 % of the step). */
size_t vlai_device_keep(vla_recompute mode, vla_numerics numerics, size_t wanted, size_t room, size_t need, size_t arena);

VLA_END_DECLS

#endif
