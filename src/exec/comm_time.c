#include "exec/comm_time.h"

#include "base/fail.h"
#include "base/order.h"
#include "base/time.h"
#include "dist/comm.h"
#include "exec/executor.h"

#ifdef VLA_CUDA
#include "exec/cuda_run.h"
#endif

#include <stdlib.h>

enum { MOST_REPEATS = 16, SMALL = 4096 /* elements: norms, counts */ };

static void *lane(const vla_executor *ex)
{
#ifdef VLA_CUDA
    if (ex->backend == &vlai_backend_cuda)
        return ((const vlai_cuda_device *)ex->state)->lanes[VLAI_LANE_COMM];
#endif
    (void)ex;
    return NULL;
}

/* The host waits for the lane. */
static vla_status settle(const vla_executor *ex, vla_error *err)
{
    char why[512];
#ifdef VLA_CUDA
    if (ex->backend == &vlai_backend_cuda) {
        int code = vlai_device_synchronize(lane(ex));
        if (code)
            return vlai_cuda_failed(err, code, "collectives back to back");
    }
#endif
    return vlai_comm_error(ex->comm, why, sizeof why) ? vlai_fail(err, VLA_E_NCCL, "collectives back to back: %s", why) : VLA_OK;
}

static const vlai_value_info *bucket_of(const vla_plan *plan, size_t n, vlai_op op)
{
    const vlai_node *node = &plan->graph->nodes[n];
    const vlai_value_info *v = node->op == op ? vlai_value(plan->graph, node->inputs[0]) : NULL;
    return v && !(op == VLAI_OP_all_reduce && v->elements <= SMALL) ? v : NULL;
}

static size_t bytes_of(const vlai_value_info *v)
{
    return (size_t)v->elements * vla_dtype_size(v->dtype);
}

static void issue(const vla_run *run, vlai_op op, int world)
{
    const vla_executor *ex = run->executor;
    for (size_t n = 0; n < run->plan->graph->n_nodes; n++) {
        const vlai_node *node = &run->plan->graph->nodes[n];
        const vlai_value_info *v = bucket_of(run->plan, n, op);
        void *data = v ? run->data[node->inputs[0]] : NULL;
        if (!v)
            continue;
        if (op == VLAI_OP_reduce_scatter)
            vlai_comm_reduce_scatter(ex->comm, data, run->data[node->outputs[0]], v->elements / world, v->dtype, ex->workspace, lane(ex));
        else if (op == VLAI_OP_all_gather)
            vlai_comm_all_gather(ex->comm, data, v->elements / world, v->dtype, lane(ex));
        else
            vlai_comm_all_reduce(ex->comm, data, v->elements, v->dtype, ex->workspace, lane(ex));
    }
}

static vla_status measure(const vla_run *run, vlai_op op, int repeats, vlai_comm_rate *out, vla_error *err)
{
    const vla_executor *ex = run->executor;
    int world = vlai_comm_world(ex->comm);
    double times[MOST_REPEATS];
    *out = (vlai_comm_rate){0};
    for (size_t n = 0; n < run->plan->graph->n_nodes; n++) {
        const vlai_value_info *v = bucket_of(run->plan, n, op);
        out->calls += v != NULL;
        out->bytes += v ? bytes_of(v) : 0;
    }
    if (!out->calls || world == 1)
        return VLA_OK;
    VLA_TRY(settle(ex, err));
    for (int r = -1; r < repeats; r++) { /* the first one is not counted */
        double began = vlai_now();
        issue(run, op, world);
        VLA_TRY(settle(ex, err));
        if (r >= 0)
            times[r] = vlai_now() - began;
    }
    qsort(times, (size_t)repeats, sizeof *times, vlai_by_value);
    out->seconds = times[repeats / 2];
    out->bus = (double)out->bytes * (world - 1) / world * (op == VLAI_OP_all_reduce ? 2 : 1) / out->seconds;
    return VLA_OK;
}

vla_status vlai_comm_rates_measure(const vla_run *run, int repeats, vlai_comm_rates *out, vla_error *err)
{
    *out = (vlai_comm_rates){0};
    repeats = repeats < 1 ? 1 : repeats > MOST_REPEATS ? MOST_REPEATS : repeats;
    VLA_TRY(measure(run, VLAI_OP_reduce_scatter, repeats, &out->reduce_scatter, err));
    VLA_TRY(measure(run, VLAI_OP_all_gather, repeats, &out->all_gather, err));
    return measure(run, VLAI_OP_all_reduce, repeats, &out->all_reduce, err);
}
