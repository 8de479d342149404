/* matmul: cuBLASLt does the work; its descriptors and algorithm are made when the run is bound. Column sums come from the
 * library's epilogue or from a kernel of ours: where it has none, and where timing finds the kernel faster. */
#include "kernels/cuda.h"

#include "base/fail.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/time.h"
#include "base/work.h"
#include "kernels/device.h"
#include "kernels/gemm_choices.h"
#include "vendor/cublaslt.h"

#include <stdlib.h>

enum { WORKSPACE = 32 << 20, APART = -1, NEAR = 8 };

typedef struct {
    vlai_gemm *gemm;
    vlai_gemm *apart; /* instead of gemm, when the sums are made apart */
    vlai_node sums_node;
    vlai_cuda_call sums; /* op col_sum */
} prepared;

static bool has_sums(const vlai_cuda_call *call)
{
    return call->node->attrs.matmul.sums != VLA_DTYPE_NONE && call->out[1].data;
}

static vlai_gemm_operands operands_of(const vlai_cuda_call *call)
{
    return (vlai_gemm_operands){.a = call->in[0].data, .b = call->in[1].data, .c = call->out[0].data, .residual = call->in[3].data,
                                .bias = has_sums(call) ? call->out[1].data : call->in[2].data};
}

static vlai_gemm_shape shape_of(const vlai_cuda_call *call)
{
    const vlai_node *node = call->node;
    bool ta = node->attrs.matmul.transpose_a;
    vlai_gemm_shape s = {.m = call->out[0].shape[0], .n = call->out[0].shape[1], .k = call->in[0].shape[ta ? 0 : 1],
                         .transpose_a = ta, .transpose_b = node->attrs.matmul.transpose_b, .bias = call->in[2].data != NULL,
                         .residual = call->in[3].data != NULL, .sums = has_sums(call),
                         .operand = call->in[0].dtype, .result = call->out[0].dtype};
    s.bias_type = s.sums ? call->out[1].dtype : call->in[2].dtype;
    if (node->sms_free > 0 && node->sms_free < call->multiprocessors)
        s.multiprocessors = call->multiprocessors - node->sms_free;
    return s;
}

/* How often the run makes a product of this shape, sums or not. */
static int launches_of(const vlai_cuda_context *context, const vlai_gemm_shape *shape)
{
    int n = 0;
    for (size_t i = 0; i < context->n_calls; i++)
        if (context->calls[i].node->op == VLAI_OP_matmul) {
            vlai_gemm_shape s = shape_of(&context->calls[i]);
            if (!shape->sums && s.sums)
                s.sums = 0;
            n += vlai_gemm_shape_same(&s, shape);
        }
    return n > 0 ? n : 1;
}

/* Is there nothing to multiply? */
static bool is_empty(const vlai_gemm_shape *s)
{
    return s->m == 0 || s->n == 0 || s->k == 0;
}

/* The algorithm of a product: one that was chosen before, else by timing when that is wanted. */
static vla_status choose(const vlai_cuda_context *context, const vlai_cuda_call *call, const vlai_gemm_shape *s, vlai_gemm *gemm,
                         vla_error *err)
{
    vlai_gemm_choice choice, near[NEAR];
    vlai_gemm_operands o = operands_of(call);
    if (!context->search || is_empty(s))
        return VLA_OK;
    if (vlai_gemm_choices_find(context->choices, s, &choice) && vlai_cublaslt_choice_set(gemm, &choice) == 0)
        return VLA_OK;
    const vlai_gemm_effort effort = {.proposals = VLAI_GEMM_PROPOSALS, .launches = launches_of(context, s), .near = near,
                                     .n_near = vlai_gemm_choices_near(context->choices, s, near, NEAR)};
    int code = vlai_cublaslt_search(gemm, &o, &effort, call->workspace, call->stream, &choice.milliseconds);
    if (code)
        return vlai_fail(err, VLA_E_CUDA, "matmul [%lld,%lld] x [%lld,%lld]: no algorithm of cuBLASLt runs: %s", (long long)s->m,
                         (long long)s->k, (long long)s->k, (long long)s->n, vlai_cublaslt_error(code));
    vlai_cublaslt_choice_get(gemm, &choice);
    return vlai_gemm_choices_put(context->choices, s, &choice, err);
}

static vla_status no_algorithm(const vlai_gemm_shape *s, int code, vla_error *err)
{
    return vlai_fail(err, VLA_E_CUDA, "cuBLASLt has no algorithm for [%lld,%lld] x [%lld,%lld] of %s: %s", (long long)s->m, (long long)s->k,
                     (long long)s->k, (long long)s->n, vla_dtype_name(s->operand), vlai_cublaslt_error(code));
}

/* The product with its sums made by a kernel of ours. */
static vla_status make_apart(const vlai_cuda_context *context, const vlai_cuda_call *call, vlai_gemm_shape s, size_t most, prepared *p,
                             vla_error *err)
{
    p->sums_node = (vlai_node){.op = VLAI_OP_col_sum, .n_inputs = 1, .n_outputs = 1, .attrs = {.matmul = {.dtype = s.bias_type}}};
    p->sums = *call;
    p->sums.node = &p->sums_node;
    p->sums.plan = NULL;
    p->sums.out[0] = call->out[1];
    s.sums = 0;
    int code = vlai_cublaslt_prepare(context->cublaslt, &s, most, &p->apart);
    return code ? no_algorithm(&s, code, err) : choose(context, call, &s, p->apart, err);
}

static float milliseconds_of(const vlai_cuda_context *context, const vlai_gemm_shape *shape)
{
    vlai_gemm_choice choice;
    return vlai_gemm_choices_find(context->choices, shape, &choice) ? choice.milliseconds : 0;
}

/* Time of the column sums alone: the least of a few launches after the first. Negative when it cannot be had. */
static float time_sums(const prepared *p)
{
    enum { ROUNDS = 5 };
    void *start = NULL, *end = NULL;
    float ms[ROUNDS], result = -1;
    int code = vlai_device_event_create(&start);
    if (!code)
        code = vlai_device_event_create(&end);
    for (int r = 0; !code && r < ROUNDS; r++)
        if ((code = vlai_device_event_record(start, p->sums.stream)) || (code = vlai_cuda_col_sum(&p->sums)) ||
            (code = vlai_device_event_record(end, p->sums.stream)) || (code = vlai_device_event_elapsed(start, end, &ms[r])))
            break;
    if (!code) {
        result = ms[1];
        for (int r = 2; r < ROUNDS; r++)
            result = ms[r] < result ? ms[r] : result;
    }
    vlai_device_event_destroy(start);
    vlai_device_event_destroy(end);
    return result;
}

static vla_status prepare(const vlai_cuda_context *context, vlai_cuda_call *call, vlai_gemm_shape *shape, vla_error *err)
{
    vlai_gemm_shape s = shape_of(call);
    *shape = s;
    if (call->in[0].dtype != call->in[1].dtype || (s.residual && call->in[3].dtype != s.result))
        return vlai_fail(err, VLA_E_DTYPE, "matmul: operands of %s and %s, residual of %s", vla_dtype_name(call->in[0].dtype),
                         vla_dtype_name(call->in[1].dtype), vla_dtype_name(call->in[3].dtype));
    if (s.sums && !s.transpose_a)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "matmul: sums of an operand that is not transposed");
    prepared *p = vlai_calloc(1, sizeof *p);
    call->plan = p;
    if (!p)
        return vlai_nomem(err, sizeof *p);
    size_t most = call->workspace_bytes < WORKSPACE ? call->workspace_bytes : WORKSPACE;
    if (s.sums && is_empty(&s))
        return make_apart(context, call, s, most, p, err);
    int code = vlai_cublaslt_prepare(context->cublaslt, &s, most, &p->gemm);
    if (code && !s.sums)
        return no_algorithm(&s, code, err);
    if (!s.sums)
        return choose(context, call, &s, p->gemm, err);
    /* With sums there are two ways; which one was taken is part of the choice, as it decides bits: APART as its time. */
    vlai_gemm_choice choice;
    bool chosen = context->search && vlai_gemm_choices_find(context->choices, &s, &choice);
    if (!code && (!context->search || (chosen && choice.milliseconds >= 0)))
        return choose(context, call, &s, p->gemm, err);
    VLA_TRY(make_apart(context, call, s, most, p, err));
    if (code || chosen)
        return VLA_OK;
    VLA_TRY(choose(context, call, &s, p->gemm, err));
    vlai_gemm_shape bare = s;
    bare.sums = 0;
    float sums = time_sums(p);
    if (sums < 0 || milliseconds_of(context, &s) <= milliseconds_of(context, &bare) + sums) {
        vlai_cublaslt_release(p->apart);
        p->apart = NULL;
        return VLA_OK;
    }
    return vlai_gemm_choices_put(context->choices, &s, &(vlai_gemm_choice){.milliseconds = APART}, err);
}

vla_status vlai_cuda_matmul_prepare(const vlai_cuda_context *context, vlai_cuda_call *call, vla_error *err)
{
    vlai_gemm_shape s;
    VLA_TRY(prepare(context, call, &s, err));
    if (!context->search)
        return VLA_OK;
    vlai_gemm_choices_use(context->choices, &s);
    s.sums = 0;
    if (((const prepared *)call->plan)->apart)
        vlai_gemm_choices_use(context->choices, &s);
    return VLA_OK;
}

bool vlai_cuda_matmul_will_search(const vlai_cuda_context *context)
{
    vlai_gemm_choice choice;
    for (size_t i = 0; context->search && i < context->n_calls; i++)
        if (context->calls[i].node->op == VLAI_OP_matmul) {
            vlai_gemm_shape s = shape_of(&context->calls[i]);
            if (!is_empty(&s) && !vlai_gemm_choices_find(context->choices, &s, &choice))
                return true;
        }
    return false;
}

/* ---- the long search ---- */

/* Products of one shape. */
typedef struct {
    vlai_gemm_shape shape; /* without sums, where those are made apart */
    const vlai_cuda_call *call;
    int launches;
    float milliseconds; /* of one */
} product;

/* A product whose share of the time is less is left as it is: too short to be compared. */
static const double LEAST_SECONDS = 0.5;

static vlai_gemm *gemm_of(const vlai_cuda_call *call)
{
    const prepared *p = call->plan;
    return p->apart ? p->apart : p->gemm;
}

static vlai_gemm_shape prepared_shape(const vlai_cuda_call *call)
{
    vlai_gemm_shape s = shape_of(call);
    if (((const prepared *)call->plan)->apart)
        s.sums = 0;
    return s;
}

static bool is_explored(const vlai_cuda_call *call)
{
    if (call->node->op != VLAI_OP_matmul || !call->plan)
        return false;
    vlai_gemm_shape s = prepared_shape(call);
    return !is_empty(&s) && s.multiprocessors == 0;
}

static int most_time_first(const void *a, const void *b)
{
    const product *p = a, *q = b;
    const float x = p->milliseconds * (float)p->launches, y = q->milliseconds * (float)q->launches;
    return (x < y) - (x > y);
}

static int products_of(const vlai_cuda_context *context, product *out)
{
    int n = 0;
    for (size_t i = 0; i < context->n_calls; i++) {
        const vlai_cuda_call *call = &context->calls[i];
        if (!is_explored(call))
            continue;
        vlai_gemm_shape s = prepared_shape(call);
        int k = 0;
        while (k < n && !vlai_gemm_shape_same(&out[k].shape, &s))
            k++;
        if (k == n)
            out[n++] = (product){.shape = s, .call = call, .milliseconds = milliseconds_of(context, &s)};
        out[k].launches++;
    }
    qsort(out, (size_t)n, sizeof *out, most_time_first);
    return n;
}

/* Calls of the shape take the choice that there is now. */
static void take_choice(const vlai_cuda_context *context, const vlai_gemm_shape *shape)
{
    vlai_gemm_choice choice;
    for (size_t i = 0; i < context->n_calls; i++) {
        const vlai_cuda_call *call = &context->calls[i];
        if (!is_explored(call))
            continue;
        vlai_gemm_shape s = prepared_shape(call);
        if (vlai_gemm_shape_same(&s, shape) && vlai_gemm_choices_find(context->choices, shape, &choice))
            vlai_cublaslt_choice_set(gemm_of(call), &choice);
    }
}

static vla_status explore(const vlai_cuda_context *context, const product *p, double seconds, vlai_gemm_found *found, vla_error *err)
{
    const vlai_gemm_shape *s = &p->shape;
    vlai_gemm *gemm = gemm_of(p->call);
    vlai_gemm_operands o = operands_of(p->call);
    vlai_gemm_choice choice;
    int code = vlai_cublaslt_explore(gemm, s, &o, seconds, p->call->workspace, p->call->stream, found);
    if (code)
        return vlai_fail(err, VLA_E_CUDA, "matmul [%lld,%lld] x [%lld,%lld]: the search of all settings: %s", (long long)s->m, (long long)s->k, (long long)s->k,
                         (long long)s->n, vlai_cublaslt_error(code));
    if (found->after < found->before) {
        vlai_cublaslt_choice_get(gemm, &choice);
        choice.milliseconds = found->after;
        VLA_TRY(vlai_gemm_choices_put(context->choices, s, &choice, err));
        take_choice(context, s);
        VLA_TRY(vlai_gemm_choices_save(context->choices, err)); /* now: the next setting may be one that the device does not survive */
    }
    vlai_info("products: m n k %lld %lld %lld%s%s%s%s%s x %d: %.4f -> %.4f ms (%+.1f %%); %d settings%s, %d wrong; %s", (long long)s->m, (long long)s->n, (long long)s->k,
              s->transpose_a ? " ta" : "", s->transpose_b ? " tb" : "", s->bias ? " bias" : "", s->residual ? " residual" : "", s->sums ? " sums" : "", p->launches,
              (double)found->before, (double)found->after, 100 * ((double)found->after / (double)found->before - 1), found->tried,
              found->screened ? "" : " (not all: no time)", found->wrong, found->settings);
    return VLA_OK;
}

vla_status vlai_cuda_matmul_explore(const vlai_cuda_context *context, double seconds, vla_error *err)
{
    const double end = vlai_now() + seconds;
    product *all = vlai_array(context->n_calls + 1, sizeof *all);
    if (!all)
        return vlai_nomem(err, context->n_calls * sizeof *all);
    const int n = products_of(context, all);
    double rest = 0, before = 0, after = 0;
    vla_status status = VLA_OK;
    for (int i = 0; i < n; i++)
        rest += (double)all[i].milliseconds * all[i].launches;
    vlai_info("products: %d shapes, %.1f ms a step one by one; the search ends in %.0f s", n, rest, seconds);
    int i = 0;
    for (; i < n && status == VLA_OK; i++) {
        const double share = (double)all[i].milliseconds * all[i].launches, part = rest > 0 ? (end - vlai_now()) * share / rest : 0;
        vlai_gemm_found found;
        if (part < LEAST_SECONDS)
            break;
        rest -= share;
        status = explore(context, &all[i], part, &found, err);
        if (status == VLA_OK) {
            before += (double)found.before * all[i].launches;
            after += (double)found.after * all[i].launches;
        }
        vlai_work_add();
    }
    if (status == VLA_OK)
        vlai_info("products: %d of %d shapes searched: %.2f -> %.2f ms a step in long runs; the others, %.1f ms, are as they were", i, n, before, after, rest);
    vlai_free(all);
    return status;
}

void vlai_cuda_matmul_release(vlai_cuda_call *call)
{
    prepared *p = call->plan;
    if (p) {
        vlai_cublaslt_release(p->gemm);
        vlai_cublaslt_release(p->apart);
    }
    vlai_free(p);
    call->plan = NULL;
}

int vlai_cuda_matmul(const vlai_cuda_call *call)
{
    const prepared *p = call->plan;
    vlai_gemm_operands o = operands_of(call);
    int code = vlai_cublaslt_run(p->apart ? p->apart : p->gemm, &o, call->workspace, call->stream);
    if (code)
        return 100000 + code; /* told apart from CUDA's own numbers */
    if (!p->apart)
        return 0;
    vlai_cuda_call sums = p->sums; /* on this call's stream, which a profile chooses otherwise than the plan */
    sums.stream = call->stream;
    sums.workspace = call->workspace;
    return vlai_cuda_col_sum(&sums);
}

int vlai_cuda_matmul_compare(const vlai_cuda_call *call, int launches, float *taken, float *fastest)
{
    const prepared *p = call->plan;
    vlai_gemm_operands o = operands_of(call);
    const vlai_gemm_effort effort = {.proposals = VLAI_GEMM_PROPOSALS, .launches = launches};
    int code = vlai_cublaslt_compare(p->apart ? p->apart : p->gemm, &o, &effort, call->workspace, call->stream, taken, fastest);
    return code ? 100000 + code : 0;
}

size_t vlai_cuda_workspace_matmul(const vla_graph *g, const vlai_node *node)
{
    vlai_node sums = {.op = VLAI_OP_col_sum, .n_inputs = 1, .n_outputs = 1, .inputs = {node->inputs[0]}, .outputs = {node->outputs[0]}};
    size_t apart = node->attrs.matmul.sums != VLA_DTYPE_NONE ? vlai_cuda_workspace_col_sum(g, &sums) : 0;
    return apart > WORKSPACE ? apart : WORKSPACE;
}
