/* Where the time of a run goes on a CUDA device. Launches are timed one by one between events, on the lane they have, each
 * alone on the device; whole executions are timed as they usually run, so what lanes and replay save shows in the total.
 *
 * With several ranks all of them take the profile, with the same number of repeats: a collective's time is then that of the
 * exchange and of the wait for the slowest rank. */
#ifdef VLA_CUDA

#include "base/fail.h"
#include "base/memory.h"
#include "exec/cuda_run.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    void **events; /* one before each launch and one behind the last */
    size_t n;
} marks;

static void marks_fini(marks *m)
{
    for (size_t i = 0; m->events && i < m->n; i++)
        vlai_device_event_destroy(m->events[i]);
    vlai_free(m->events);
}

static vla_status marks_init(marks *m, size_t n, vla_error *err)
{
    *m = (marks){vlai_calloc(n, sizeof(void *)), n};
    if (!m->events)
        return vlai_nomem(err, n * sizeof(void *));
    for (size_t i = 0; i < n; i++) {
        int code = vlai_device_event_create(&m->events[i]);
        if (code)
            return vlai_cuda_failed(err, code, "an event");
    }
    return VLA_OK;
}

static bool same_kind(const vla_graph *g, const vlai_node *a, const vlai_node *b)
{
    if (a->op != b->op || a->n_inputs != b->n_inputs || a->n_outputs != b->n_outputs)
        return false;
    if (a->op == VLAI_OP_matmul && (a->attrs.matmul.transpose_a != b->attrs.matmul.transpose_a || a->attrs.matmul.transpose_b != b->attrs.matmul.transpose_b))
        return false;
    for (int i = 0; i < a->n_inputs + a->n_outputs; i++) {
        vla_value x = i < a->n_inputs ? a->inputs[i] : a->outputs[i - a->n_inputs];
        vla_value y = i < a->n_inputs ? b->inputs[i] : b->outputs[i - a->n_inputs];
        if ((x == VLA_NONE) != (y == VLA_NONE))
            return false;
        if (x == VLA_NONE)
            continue;
        const vlai_value_info *p = vlai_value(g, x), *q = vlai_value(g, y);
        if (p->dtype != q->dtype || p->rank != q->rank || memcmp(p->shape, q->shape, (size_t)p->rank * sizeof *p->shape))
            return false;
    }
    return true;
}

static double call_bytes(const vlai_cuda_call *call)
{
    double sum = 0;
    for (int i = 0; i < call->node->n_inputs + call->node->n_outputs; i++) {
        const vlai_cuda_tensor *t = i < call->node->n_inputs ? &call->in[i] : &call->out[i - call->node->n_inputs];
        double times = i < call->node->n_inputs && vlai_ops[call->node->op].writes >> i & 1 ? 2 : 1;
        if (t->data)
            sum += times * (double)t->elements * (double)vla_dtype_size(t->dtype);
    }
    return sum;
}

/* The row of launch l; made when it is the first of its kind. */
static vlai_profile_row *row_of(const vla_run *run, const vlai_cuda_launch *l, vlai_profile *out)
{
    const vlai_cuda_run *r = run->state;
    const vlai_node *node = r->calls[l->first].node;
    for (size_t i = 0; i < out->n_rows; i++)
        if (same_kind(run->plan->graph, out->rows[i].node, node))
            return &out->rows[i];
    out->rows[out->n_rows] = (vlai_profile_row){.node = node};
    return &out->rows[out->n_rows++];
}

static int slowest_first(const void *a, const void *b)
{
    double x = ((const vlai_profile_row *)a)->seconds, y = ((const vlai_profile_row *)b)->seconds;
    return (x < y) - (x > y);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void count(const vla_run *run, vlai_profile *out)
{
    const vlai_cuda_run *r = run->state;
    for (size_t i = 0; i < r->n_launches; i++) {
        vlai_profile_row *row = row_of(run, &r->launches[i], out);
        vlai_op op = row->node->op;
        row->calls++;
        out->calls[op]++;
        for (size_t c = r->launches[i].first; c < r->launches[i].first + r->launches[i].count; c++) {
            vlai_cost cost = {0};
            vlai_ops[op].cost(run->plan->graph, r->calls[c].node, &cost);
            row->flops += cost.flops;
            row->bytes += call_bytes(&r->calls[c]);
            if (op == VLAI_OP_matmul)
                out->flops_matmul += cost.flops;
        }
    }
}

/* One execution, launch by launch. */
static vla_status one_by_one(const vla_run *run, const marks *m, int repeats, vlai_profile *out, vla_error *err)
{
    const vlai_cuda_run *r = run->state;
    const vlai_cuda_device *d = run->executor->state;
    int code = 0;
    for (size_t i = 0; i < r->n_launches; i++) {
        void *stream = d->lanes[r->schedule.lanes[i]];
        if (i && r->schedule.lanes[i] != r->schedule.lanes[i - 1])
            code = vlai_device_wait(stream, m->events[2 * i - 1]);
        if (code || (code = vlai_device_event_record(m->events[2 * i], stream)) || (code = vlai_cuda_launch_one(run, i)) ||
            (code = vlai_device_event_record(m->events[2 * i + 1], stream)))
            return vlai_cuda_launch_failed(run, i, code, err);
    }
    for (size_t i = 0; i < r->n_launches; i++) {
        float ms;
        if ((code = vlai_device_event_elapsed(m->events[2 * i], m->events[2 * i + 1], &ms)))
            return vlai_cuda_failed(err, code, "a kernel of this run");
        vlai_profile_row *row = row_of(run, &r->launches[i], out);
        row->seconds += ms * 1e-3 / repeats;
        out->nodes[r->launches[i].first] += ms * 1e-3 / repeats;
        out->seconds[row->node->op] += ms * 1e-3 / repeats;
    }
    return VLA_OK;
}

/* All products back to back. */
static vla_status products(const vla_run *run, const marks *m, double *seconds, vla_error *err)
{
    const vlai_cuda_run *r = run->state;
    const vlai_cuda_device *d = run->executor->state;
    float ms = 0;
    int code = vlai_device_event_record(m->events[0], d->lanes[0]);
    for (size_t i = 0; !code && i < r->n_launches; i++)
        if (r->calls[r->launches[i].first].node->op == VLAI_OP_matmul) {
            vlai_cuda_call call = r->calls[r->launches[i].first];
            call.stream = d->lanes[0];
            call.workspace = d->scratch[0];
            code = vlai_cuda_matmul(&call);
        }
    if (code || (code = vlai_device_event_record(m->events[1], d->lanes[0])) || (code = vlai_device_event_elapsed(m->events[0], m->events[1], &ms)))
        return vlai_cuda_failed(err, code, "matmul");
    *seconds = ms * 1e-3;
    return VLA_OK;
}

static vla_status whole(vla_run *run, const marks *m, double *seconds, vla_error *err)
{
    const vlai_cuda_device *d = run->executor->state;
    float ms = 0;
    int code = vlai_device_event_record(m->events[0], d->lanes[0]);
    if (code)
        return vlai_cuda_failed(err, code, "an event");
    VLA_TRY(run->executor->backend->submit(run, err));
    code = vlai_device_event_record(m->events[1], d->lanes[0]);
    VLA_TRY(run->executor->backend->wait(run, err));
    if (code || (code = vlai_device_event_elapsed(m->events[0], m->events[1], &ms)))
        return vlai_cuda_failed(err, code, "an event");
    *seconds = ms * 1e-3;
    return VLA_OK;
}

vla_status vlai_cuda_profile(vla_run *run, int repeats, vlai_profile *out, vla_error *err)
{
    const vlai_cuda_run *r = run->state;
    marks m;
    double *times = vlai_calloc((size_t)repeats * 2 + 2, sizeof *times), *alone = times + repeats;
    vla_status status = marks_init(&m, 2 * r->n_launches + 2, err);
    out->rows = vlai_calloc(r->n_launches + 1, sizeof *out->rows);
    out->nodes = vlai_calloc(run->plan->graph->n_nodes + 1, sizeof *out->nodes);
    if (status == VLA_OK && (!times || !out->rows || !out->nodes))
        status = vlai_nomem(err, r->n_launches * sizeof *out->rows);
    if (status == VLA_OK)
        count(run, out);
    for (int i = 0; status == VLA_OK && i < repeats; i++) {
        status = whole(run, &m, &times[i], err);
        if (status == VLA_OK)
            status = products(run, &m, &alone[i], err);
        if (status == VLA_OK)
            status = one_by_one(run, &m, repeats, out, err);
    }
    if (status == VLA_OK) {
        qsort(out->rows, out->n_rows, sizeof *out->rows, slowest_first);
        qsort(times, (size_t)repeats, sizeof *times, by_value);
        qsort(alone, (size_t)repeats, sizeof *alone, by_value);
        out->total = times[repeats / 2];
        out->matmul_alone = alone[repeats / 2];
    } else {
        vlai_profile_fini(out);
    }
    marks_fini(&m);
    vlai_free(times);
    return status;
}

#else
typedef int vlai_no_cuda_profile_in_this_build;
#endif
