/* The inside of a run on a CUDA device, shared by its execution (exec/run_cuda.c) and its profile (exec/cuda_profile.c). */
#ifndef VLAI_CUDA_RUN_H
#define VLAI_CUDA_RUN_H

#include "exec/executor.h"
#include "exec/schedule.h"
#include "exec/store.h"
#include "kernels/cuda.h"
#include "kernels/device.h"
#include "kernels/optim.h"

typedef struct vlai_cuda_device {
    vlai_device_info info;
    vlai_cuda_context context;
    struct vlai_cudnn *cudnn;
    void *lanes[VLAI_LANES], *copies; /* streams */
    void *scratch[VLAI_LANE_COMM], *staging[2];
    size_t scratch_bytes[VLAI_LANE_COMM], staging_bytes[2];
    void *uploaded[2], *consumed[2]; /* events of the staging memory */
    void *fork, *join[VLAI_LANES];
    int turn;                        /* staging memory of the latest execution */
    int64_t under_way;               /* executions of all runs that were not waited for */
} vlai_cuda_device;

typedef struct vlai_cuda_launch {
    size_t first, count; /* calls; more than one: a group of the update */
    void *table, *fence; /* fence: recorded behind it when another lane waits for it */
    size_t table_bytes;
    vlai_optim_launch_plan group;
} vlai_cuda_launch;

typedef struct vlai_cuda_run {
    vlai_cuda_call *calls; /* per node */
    vlai_cuda_launch *launches;
    size_t n_launches;
    vlai_schedule schedule;
    bool lanes[VLAI_LANES]; /* that some launch is in */
    void *graph;           /* captured launches */
    int64_t executions;
    void *inputs[2], *results[2], *finished[2]; /* pinned memory; events */
    int64_t *place;        /* per value: bytes into results, or -1 */
    void **large;          /* per value: pinned memory of a large result that was asked for */
    int slot, shown;       /* inputs that vla_run_data shows; results that it shows */
    int64_t submitted, waited;
} vlai_cuda_run;

vla_status vlai_cuda_failed(vla_error *err, int code, const char *what);
int vlai_cuda_launch_one(const vla_run *run, size_t launch);
vla_status vlai_cuda_launch_failed(const vla_run *run, size_t launch, int code, vla_error *err);
vla_status vlai_cuda_profile(vla_run *run, int repeats, vlai_profile *out, vla_error *err);

#endif
