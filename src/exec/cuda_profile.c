/* Where the time of a run goes on a CUDA device. Launches are timed one by one between events, on the lane they have, each
 * alone on the device; whole executions are timed as they usually run, so what lanes and replay save shows in the total.
 *
 * With several ranks all of them take the profile, with the same number of repeats: a collective's time is then that of the
 * exchange and of the wait for the slowest rank. */
#ifdef VLA_CUDA

#include "base/fail.h"
#include "base/memory.h"
#include "base/order.h"
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

static double tensor_bytes(const vlai_cuda_tensor *t)
{
    return t->data ? (double)t->elements * (double)vla_dtype_size(t->dtype) : 0;
}

/* Bytes of operands and result that a launch leaves alone: rows that are not picked; and where qkv_rope and its gradient work in
 * place, columns that are not rotated, which are read for the sums alone. */
static double left_alone(const vlai_cuda_call *call)
{
    double in = tensor_bytes(&call->in[0]), out = tensor_bytes(&call->out[0]);
    switch (call->node->op) {
    case VLAI_OP_gather_rows:
    case VLAI_OP_slice_rows: return in > out ? in - out : 0;
    case VLAI_OP_qkv_rope:
    case VLAI_OP_qkv_rope_grad: {
        double rotated = (double)call->node->attrs.rope.heads * call->node->attrs.rope.head_dim / (double)call->in[0].shape[1];
        bool summed = call->node->op == VLAI_OP_qkv_rope_grad && vlai_sums_at(call->node, 0) >= 0;
        return call->out[0].data == call->in[0].data ? (summed ? 1 : 2) * out * (1 - rotated) : 0;
    }
    default: return 0;
    }
}

/* Operands and results, each once. */
static double call_bytes(const vlai_cuda_call *call)
{
    const vlai_node *node = call->node;
    double sum = -left_alone(call);
    for (int i = 0; i < node->n_inputs; i++)
        sum += tensor_bytes(&call->in[i]) * (vlai_ops[node->op].writes >> i & 1 ? 2 : 1);
    for (int i = 0; i < node->n_outputs; i++)
        sum += tensor_bytes(&call->out[i]);
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

enum { REPEATED = 8, COPIES = 20 };

/* Ten times what the L2 cache holds. */
static const size_t copy_bytes = (size_t)512 << 20;

/* Kinds of which a step has many calls, one call behind the other in the order of the step: memory is met as cold as it is there,
 * and nothing but the launches is timed. Values do not matter, so that operations may run out of their place; those that update
 * in place are left out, and so are those whose time depends on values. */
static vla_status in_a_row(const vla_run *run, const marks *m, int repeats, vlai_profile *out, vla_error *err)
{
    const vlai_cuda_run *r = run->state;
    const vlai_cuda_device *d = run->executor->state;
    for (size_t k = 0; k < out->n_rows; k++) {
        vlai_profile_row *row = &out->rows[k];
        vlai_op op = row->node->op;
        float ms = 0;
        if (row->calls < REPEATED || vlai_ops[op].writes || vlai_op_is_collective(op) || op == VLAI_OP_matmul ||
            !strncmp(vlai_ops[op].name, "attention", 9) || vlai_cuda_workspaces[op](run->plan->graph, row->node) > d->scratch_bytes[0])
            continue;
        int code = vlai_device_event_record(m->events[0], d->lanes[0]);
        for (size_t i = 0; !code && i < r->n_launches; i++)
            if (r->launches[i].count == 1 && same_kind(run->plan->graph, row->node, r->calls[r->launches[i].first].node)) {
                vlai_cuda_call call = r->calls[r->launches[i].first];
                call.stream = d->lanes[0];
                call.workspace = d->scratch[0];
                code = vlai_cuda_launchers[op](&call);
            }
        if (code || (code = vlai_device_event_record(m->events[1], d->lanes[0])) || (code = vlai_device_event_elapsed(m->events[0], m->events[1], &ms)))
            return vlai_cuda_failed(err, code, vlai_ops[op].name);
        row->in_a_row += ms * 1e-3 / repeats;
    }
    return VLA_OK;
}

/* Copies of the length of each kind's launches, going round memory that the L2 does not hold. */
static vla_status copies(const vla_run *run, const marks *m, vlai_profile *out, vla_error *err)
{
    const vlai_cuda_device *d = run->executor->state;
    void *memory = NULL;
    int code = vlai_device_alloc(copy_bytes, &memory);
    for (size_t k = 0; !code && k < out->n_rows; k++) {
        vlai_profile_row *row = &out->rows[k];
        double each = row->bytes / (double)row->calls / 2;
        size_t half = each < (double)copy_bytes / 2 ? (size_t)each / 256 * 256 + 256 : copy_bytes / 2, places = copy_bytes / (2 * half);
        float ms = 0;
        for (int i = -2; !code && i < COPIES; i++) {
            char *from = (char *)memory + (size_t)(i + 2) % places * 2 * half;
            if (i == 0)
                code = vlai_device_event_record(m->events[0], d->lanes[0]);
            if (!code)
                code = vlai_device_copy(from + half, from, half, d->lanes[0]);
        }
        if (!code)
            code = vlai_device_event_record(m->events[1], d->lanes[0]);
        if (!code && !(code = vlai_device_event_elapsed(m->events[0], m->events[1], &ms)))
            row->copy_seconds = (double)ms * 1e-3 / COPIES * (row->bytes / (2 * (double)half));
    }
    vlai_device_free(memory);
    return code ? vlai_cuda_failed(err, code, "copies within the device") : VLA_OK;
}

/* The algorithms of the products that count, timed once more beside the others. */
static vla_status compare(const vla_run *run, vlai_profile *out, vla_error *err)
{
    const vlai_cuda_run *r = run->state;
    for (size_t k = 0; k < out->n_rows; k++) {
        vlai_profile_row *row = &out->rows[k];
        float taken, fastest;
        if (row->node->op != VLAI_OP_matmul || row->seconds < 0.002 * out->total)
            continue;
        size_t i = 0;
        while (r->calls[r->launches[i].first].node != row->node)
            i++;
        int code = vlai_cuda_matmul_compare(&r->calls[r->launches[i].first], (int)row->calls, &taken, &fastest);
        if (code)
            return vlai_cuda_failed(err, code, "matmul");
        row->of_fastest = fastest / taken;
    }
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
        if (status == VLA_OK)
            status = in_a_row(run, &m, repeats, out, err);
    }
    if (status == VLA_OK) {
        qsort(out->rows, out->n_rows, sizeof *out->rows, slowest_first);
        qsort(times, (size_t)repeats, sizeof *times, vlai_by_value);
        qsort(alone, (size_t)repeats, sizeof *alone, vlai_by_value);
        out->total = times[repeats / 2];
        out->matmul_alone = alone[repeats / 2];
        status = copies(run, &m, out, err);
    }
    if (status == VLA_OK)
        status = compare(run, out, err);
    if (status != VLA_OK)
        vlai_profile_fini(out);
    marks_fini(&m);
    vlai_free(times);
    return status;
}

#else
typedef int vlai_no_cuda_profile_in_this_build;
#endif
