/* Golden cases of numbers: normalisation, rotations, flow times, learning rates, data order. */
#include "parity/parity.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/memory.h"
#include "data/flow_time.h"
#include "data/normalise.h"
#include "data/order.h"
#include "data/rotation.h"
#include "optim/schedule.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The two files that most of these cases have. */
typedef struct pair {
    vlai_safetensors *in, *want;
} pair;

static vla_status pair_open(const vlai_parity_case *c, pair *p, vla_error *err)
{
    *p = (pair){0};
    VLA_TRY(vlai_parity_open(c, "inputs.safetensors", &p->in, err));
    return vlai_parity_open(c, "outputs.safetensors", &p->want, err);
}

static void pair_close(pair *p)
{
    vlai_safetensors_close(p->in);
    vlai_safetensors_close(p->want);
}

static const vlai_tensor_view *group_tensor(const vlai_safetensors *st, int64_t group, const char *name)
{
    char full[160];
    snprintf(full, sizeof full, "g%lld.%s", (long long)group, name);
    return vlai_safetensors_find(st, full);
}

/* A whole tensor as doubles; released with vlai_free. */
static vla_status to_double(const vlai_tensor_view *t, const char *name, double **out, vla_error *err)
{
    *out = NULL;
    if (!t)
        return vlai_fail(err, VLA_E_NOT_FOUND, "there is no tensor '%s'", name);
    size_t n = t->elements ? (size_t)t->elements : 1;
    double *values = vlai_array(n, sizeof *values);
    if (!values)
        return vlai_nomem(err, n * sizeof *values);
    vla_status status = VLA_OK;
    if (t->dtype == VLA_F64) {
        memcpy(values, t->data, (size_t)t->elements * sizeof *values);
    } else {
        float *single = vlai_array(n, sizeof *single);
        status = single ? vlai_tensor_to_float(t, 0, t->elements, single, err) : vlai_nomem(err, n * sizeof *single);
        for (int64_t i = 0; status == VLA_OK && i < t->elements; i++)
            values[i] = single[i];
        vlai_free(single);
    }
    if (status != VLA_OK) {
        vlai_free(values);
        return status;
    }
    *out = values;
    return VLA_OK;
}

static double worst_double(const double *got, const double *want, int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs(got[i] - want[i]);
        worst = d <= worst ? worst : isnan(d) ? INFINITY : d;
    }
    return worst;
}

static vla_status compare(vlai_parity_case *c, const vlai_safetensors *want, int64_t group, const char *name,
                          const char *bound, const float *got, int64_t n, vla_error *err)
{
    const vlai_tensor_view *t = group_tensor(want, group, name);
    if (!t)
        return vlai_fail(err, VLA_E_NOT_FOUND, "outputs.safetensors: no 'g%lld.%s'", (long long)group, name);
    float *values;
    VLA_TRY(vlai_parity_rows(t, name, &values, err));
    double error = n == t->elements ? vlai_parity_max_abs(got, values, n) : INFINITY;
    vlai_free(values);
    vlai_parity_report(c, bound, t->name, error, vlai_parity_bound(c, bound));
    return VLA_OK;
}

/* Normalisation. */

static vla_status norm_of(const vlai_safetensors *in, int64_t group, const char *what, vlai_norm *out, vla_error *err)
{
    char name[64];
    double *q01 = NULL, *q99 = NULL;
    *out = (vlai_norm){0};
    snprintf(name, sizeof name, "%s.q01", what);
    const vlai_tensor_view *low = group_tensor(in, group, name);
    vla_status status = to_double(low, name, &q01, err);
    snprintf(name, sizeof name, "%s.q99", what);
    const vlai_tensor_view *high = group_tensor(in, group, name);
    if (status == VLA_OK)
        status = to_double(high, name, &q99, err);
    if (status == VLA_OK && low->elements != high->elements)
        status = vlai_fail(err, VLA_E_SHAPE, "g%lld.%s: q01 and q99 differ in length", (long long)group, what);
    if (status == VLA_OK)
        status = vlai_norm_make(low->elements, q01, q99, NULL, NULL, out, err);
    vlai_free(q01);
    vlai_free(q99);
    return status;
}

static vla_status data_side(vlai_parity_case *c, const pair *p, int64_t group, const vlai_norm *norm, const char *in_name,
                            int64_t total, const char *out_name, const char *mask_name, vla_error *err)
{
    const vlai_tensor_view *t = group_tensor(p->in, group, in_name);
    float *in;
    VLA_TRY(vlai_parity_rows(t, in_name, &in, err));
    int64_t dims = t->shape[t->rank - 1], rows = dims ? t->elements / dims : 0, width = dims > total ? dims : total;
    float *out = vlai_array((size_t)(rows * width + 1), sizeof *out), *mask = vlai_array((size_t)(rows * width + 1), sizeof *mask);
    vla_status status = out && mask ? VLA_OK : vlai_nomem(err, (size_t)(rows * width) * sizeof *out);
    for (int64_t i = 0; status == VLA_OK && i < rows; i++)
        vlai_normalise(norm, in + i * dims, dims, total, out + i * width, mask + i * width);
    if (status == VLA_OK)
        status = compare(c, p->want, group, out_name, out_name, out, rows * width, err);
    if (status == VLA_OK)
        status = compare(c, p->want, group, mask_name, mask_name, mask, rows * width, err);
    vlai_free(in);
    vlai_free(out);
    vlai_free(mask);
    return status;
}

static vla_status model_side(vlai_parity_case *c, const pair *p, int64_t group, const vlai_norm *norm, const char *form,
                             vla_error *err)
{
    bool tail = !strcmp(form, "tail");
    if (!tail && strcmp(form, "padded"))
        return vlai_fail(err, VLA_E_UNSUPPORTED, "model normaliser form '%s'; 'padded' and 'tail' are known", form);
    char name[64];
    snprintf(name, sizeof name, "%s.in", form);
    const vlai_tensor_view *t = group_tensor(p->in, group, name);
    float *in;
    VLA_TRY(vlai_parity_rows(t, name, &in, err));
    int64_t width = t->shape[t->rank - 1], rows = width ? t->elements / width : 0;
    float *out = vlai_array((size_t)t->elements + 1, sizeof *out);
    vla_status status = out ? VLA_OK : vlai_nomem(err, (size_t)t->elements * sizeof *out);
    for (int inverse = 0; status == VLA_OK && inverse < 2; inverse++) {
        for (int64_t i = 0; i < rows; i++)
            (inverse ? vlai_model_unnormalise : vlai_model_normalise)(norm, in + i * width, width, tail, out + i * width);
        snprintf(name, sizeof name, "%s.%s", form, inverse ? "unnormalise" : "normalise");
        status = compare(c, p->want, group, name, inverse ? "unnormalise" : "normalise", out, rows * width, err);
    }
    vlai_free(in);
    vlai_free(out);
    return status;
}

static vla_status normalise_group(vlai_parity_case *c, const pair *p, const json_t *options, vla_error *err)
{
    int64_t group, state_total, action_total;
    VLA_TRY(vlai_json_need_int(options, "group", "case.json", &group, err));
    VLA_TRY(vlai_json_need_int(options, "state_total", "case.json", &state_total, err));
    VLA_TRY(vlai_json_need_int(options, "action_total", "case.json", &action_total, err));
    vlai_norm state = {0}, action = {0};
    vla_status status;
    VLA_TRY_GOTO(norm_of(p->in, group, "state", &state, err), done);
    VLA_TRY_GOTO(norm_of(p->in, group, "action", &action, err), done);
    VLA_TRY_GOTO(data_side(c, p, group, &state, "state", state_total, "proprioception", "agent_pos_mask", err), done);
    VLA_TRY_GOTO(data_side(c, p, group, &action, "action", action_total, "action_chunk", "dof_mask", err), done);
    size_t i;
    json_t *form;
    json_array_foreach(json_object_get(options, "model"), i, form)
        VLA_TRY_GOTO(model_side(c, p, group, &action, json_is_string(form) ? json_string_value(form) : "?", err), done);
done:
    vlai_norm_fini(&state);
    vlai_norm_fini(&action);
    return status;
}

/* Runs `one` for each of options.groups. */
static vla_status each_group(vlai_parity_case *c, vla_error *err,
                             vla_status (*one)(vlai_parity_case *, const pair *, const json_t *, vla_error *))
{
    pair p;
    vla_status status = pair_open(c, &p, err);
    size_t i;
    json_t *options;
    if (status == VLA_OK)
        json_array_foreach(json_object_get(json_object_get(c->meta, "options"), "groups"), i, options)
            if ((status = one(c, &p, options, err)) != VLA_OK)
                break;
    pair_close(&p);
    return status;
}

vla_status vlai_parity_normalise(vlai_parity_case *c, vla_error *err)
{
    return each_group(c, err, normalise_group);
}

/* Rotations: each function of one row, and what it is compared with. */

static void euler_matrix(const double *in, const double *reference, double *out)
{
    (void)reference;
    vlai_rotation_from_euler(in, out);
}

static void euler_six(const double *in, const double *reference, double *out)
{
    double m[9];
    (void)reference;
    vlai_rotation_from_euler(in, m);
    memcpy(out, m, 6 * sizeof *out);
}

static void euler_canonical(const double *in, const double *reference, double *out)
{
    (void)reference;
    memcpy(out, in, 3 * sizeof *out);
    vlai_rotation_canonical(out);
}

static void matrix_euler(const double *in, const double *reference, double *out)
{
    double m[9];
    (void)reference;
    vlai_rotation_from_euler(in, m);
    vlai_rotation_to_euler(m, out);
}

static void six_matrix(const double *in, const double *reference, double *out)
{
    (void)reference;
    vlai_rotation_from_six(in, out);
}

static void six_euler(const double *in, const double *reference, double *out)
{
    double m[9];
    (void)reference;
    vlai_rotation_from_six(in, m);
    vlai_rotation_to_euler(m, out);
}

static void compose_euler(const double *in, const double *reference, double *out)
{
    double a[9], r[9], m[9];
    vlai_rotation_from_euler(in, a);
    vlai_rotation_from_euler(reference, r);
    vlai_rotation_compose(a, r, m);
    vlai_rotation_to_euler(m, out);
    vlai_rotation_canonical(out);
}

static void compose_six(const double *in, const double *reference, double *out)
{
    double a[9], r[9], m[9];
    vlai_rotation_from_six(in, a);
    vlai_rotation_from_six(reference, r);
    vlai_rotation_compose(a, r, m);
    memcpy(out, m, 6 * sizeof *out);
}

static const struct {
    const char *output, *input, *reference;
    int in, out;
    bool angles; /* compared as angles, or as the rotations they stand for where those do not determine them */
    void (*run)(const double *in, const double *reference, double *out);
} rotations[] = {
    {"euler.matrix", "euler", NULL, 3, 9, false, euler_matrix},
    {"euler.six", "euler", NULL, 3, 6, false, euler_six},
    {"euler.canonical", "euler", NULL, 3, 3, true, euler_canonical},
    {"matrix.euler", "euler", NULL, 3, 3, true, matrix_euler},
    {"six.matrix", "six", NULL, 6, 9, false, six_matrix},
    {"six.euler", "six", NULL, 6, 3, true, six_euler},
    {"compose.rpy", "euler", "compose.state.rpy", 3, 3, true, compose_euler},
    {"compose.six", "six", "compose.state.six", 6, 6, false, compose_six},
};

static vla_status rotation_rows(vlai_parity_case *c, const pair *p, size_t k, vla_error *err)
{
    const vlai_tensor_view *want = vlai_safetensors_find(p->want, rotations[k].output);
    if (!want)
        return VLA_OK;
    const vlai_tensor_view *in = vlai_safetensors_find(p->in, rotations[k].input);
    double *x = NULL, *y = NULL, *reference = NULL;
    vla_status status;
    VLA_TRY_GOTO(to_double(in, rotations[k].input, &x, err), done);
    VLA_TRY_GOTO(to_double(want, rotations[k].output, &y, err), done);
    if (rotations[k].reference)
        VLA_TRY_GOTO(to_double(vlai_safetensors_find(p->in, rotations[k].reference), rotations[k].reference, &reference, err),
                     done);
    if (reference && vlai_safetensors_find(p->in, rotations[k].reference)->elements != rotations[k].in) {
        status = vlai_fail(err, VLA_E_SHAPE, "inputs.safetensors: '%s' has %lld elements, wanted %d", rotations[k].reference,
                           (long long)vlai_safetensors_find(p->in, rotations[k].reference)->elements, rotations[k].in);
        goto done;
    }
    int64_t rows = in->elements / rotations[k].in;
    double worst = want->elements == rows * rotations[k].out ? 0 : INFINITY, bound = vlai_parity_bound(c, "f64");
    for (int64_t i = 0; worst < INFINITY && i < rows; i++) {
        double got[9];
        const double *expected = y + i * rotations[k].out;
        rotations[k].run(x + i * rotations[k].in, reference, got);
        double error = worst_double(got, expected, rotations[k].out);
        if (rotations[k].angles && error > bound) { /* near pitch of +-pi/2 roll and yaw are not determined apart */
            double a[9], b[9];
            vlai_rotation_from_euler(got, a);
            vlai_rotation_from_euler(expected, b);
            error = worst_double(a, b, 9);
        }
        worst = error > worst ? error : worst;
    }
    vlai_parity_report(c, "f64", rotations[k].output, worst, bound);
done:
    vlai_free(x);
    vlai_free(y);
    vlai_free(reference);
    return status;
}

static vla_status rotation_group(vlai_parity_case *c, const pair *p, const json_t *options, vla_error *err)
{
    int64_t group;
    VLA_TRY(vlai_json_need_int(options, "group", "case.json", &group, err));
    vlai_layout dof = {0}, pos = {0};
    float *state = NULL, *action = NULL, *state6 = NULL, *action6 = NULL;
    vla_status status;
    VLA_TRY_GOTO(vlai_layout_parse(json_object_get(options, "dof_config"), "case.json dof_config", &dof, err), done);
    VLA_TRY_GOTO(vlai_layout_parse(json_object_get(options, "agent_pos_config"), "case.json agent_pos_config", &pos, err), done);
    const vlai_tensor_view *s = group_tensor(p->in, group, "state"), *a = group_tensor(p->in, group, "action");
    VLA_TRY_GOTO(vlai_parity_rows(s, "state", &state, err), done);
    VLA_TRY_GOTO(vlai_parity_rows(a, "action", &action, err), done);
    int64_t columns = a->shape[a->rank - 1], rows = columns ? a->elements / columns : 0, width = columns, m;
    state6 = vlai_array((size_t)(2 * s->elements + pos.width + 1), sizeof *state6);
    action6 = vlai_array((size_t)(rows * (2 * columns + dof.width) + 1), sizeof *action6);
    if (!state6 || !action6) {
        status = vlai_nomem(err, (size_t)a->elements * sizeof *action6);
        goto done;
    }
    m = vlai_layout_to_six(&pos, state, s->elements, state6);
    for (int64_t i = 0; i < rows; i++) {
        float *row = action6 + i * width;
        width = vlai_layout_to_six(&dof, action + i * columns, columns, row);
        row = action6 + i * width;
        VLA_TRY_GOTO(vlai_layout_relative(&dof, row, width, state6, m, err), done);
    }
    VLA_TRY_GOTO(compare(c, p->want, group, "agent_pos", "g", state6, m, err), done);
    VLA_TRY_GOTO(compare(c, p->want, group, "action", "g", action6, rows * width, err), done);
done:
    vlai_free(state);
    vlai_free(action);
    vlai_free(state6);
    vlai_free(action6);
    vlai_layout_fini(&dof);
    vlai_layout_fini(&pos);
    return status;
}

vla_status vlai_parity_rotation(vlai_parity_case *c, vla_error *err)
{
    pair p;
    vla_status status = pair_open(c, &p, err);
    for (size_t k = 0; status == VLA_OK && k < sizeof rotations / sizeof *rotations; k++)
        status = rotation_rows(c, &p, k, err);
    pair_close(&p);
    return status == VLA_OK ? each_group(c, err, rotation_group) : status;
}

/* Flow times. */

static vla_status time_group(vlai_parity_case *c, const pair *p, const json_t *options, vla_error *err)
{
    int64_t group;
    vlai_flow_time rule;
    VLA_TRY(vlai_json_need_int(options, "group", "case.json", &group, err));
    const json_t *rules = json_object_get(options, "noise_scheduler");
    if (rules && !json_is_object(rules))
        return vlai_fail(err, VLA_E_FORMAT, "case.json: noise_scheduler of group %lld is not a map", (long long)group);
    VLA_TRY(vlai_flow_time_parse(json_object_get(options, "noise_scheduler"), "case.json", &rule, err));
    const vlai_tensor_view *t = group_tensor(p->in, group, "draw");
    float *u;
    VLA_TRY(vlai_parity_rows(t, "draw", &u, err));
    for (int64_t i = 0; i < t->elements; i++)
        u[i] = vlai_flow_time_map(&rule, u[i]);
    vla_status status = compare(c, p->want, group, "time", "time", u, t->elements, err);
    vlai_free(u);
    return status;
}

vla_status vlai_parity_sample_time(vlai_parity_case *c, vla_error *err)
{
    return each_group(c, err, time_group);
}

/* Learning rates. Rows of `lr` are [step, rate of group 0, rate of group 1, ...]. */

static vla_status lr_rows(vlai_parity_case *c, const json_t *options, vlai_schedule_kind kind, size_t index, vla_error *err)
{
    vlai_schedule s = {.kind = kind};
    VLA_TRY(vlai_json_real(options, "learning_rate", 0, "schedule.json", &s.peak, err));
    VLA_TRY(vlai_json_real(options, "min_lr", -1, "schedule.json", &s.min, err));
    VLA_TRY(vlai_json_int(options, "num_warmup_steps", 0, "schedule.json", &s.warmup, err));
    VLA_TRY(vlai_json_int(options, "num_training_steps", 0, "schedule.json", &s.steps, err));
    VLA_TRY(vlai_schedule_check(&s, err));
    const json_t *peaks = json_object_get(options, "group_lrs");
    double worst = 0;
    size_t i;
    json_t *row;
    if (!json_array_size(json_object_get(options, "lr")))
        return vlai_fail(err, VLA_E_FORMAT, "schedule.json: entry %zu has no rows 'lr'", index);
    json_array_foreach(json_object_get(options, "lr"), i, row) {
        if (json_array_size(row) < 2 || !json_is_integer(json_array_get(row, 0)) || !json_is_number(json_array_get(row, 1)))
            return vlai_fail(err, VLA_E_FORMAT, "schedule.json: entry %zu: lr[%zu] is not a step and rates", index, i);
        for (size_t g = 1; g < json_array_size(row); g++) {
            double peak = peaks ? json_number_value(json_array_get(peaks, g - 1)) : s.peak;
            double got = vlai_schedule_rate(&s, json_integer_value(json_array_get(row, 0)), peak);
            double want = json_number_value(json_array_get(row, g)), error = fabs(got - want);
            error = want != 0 ? error / fabs(want) : error;
            worst = error <= worst ? worst : error;
        }
    }
    char name[64];
    snprintf(name, sizeof name, "%s %zu", kind == VLAI_SCHEDULE_COSINE ? "cosine" : "constant", index);
    vlai_parity_report(c, "lr", name, worst, vlai_parity_bound(c, "lr"));
    return VLA_OK;
}

vla_status vlai_parity_lr(vlai_parity_case *c, vla_error *err)
{
    json_t *root, *options;
    VLA_TRY(vlai_parity_json(c, "schedule.json", &root, err));
    vla_status status = VLA_OK;
    size_t i;
    json_array_foreach(json_object_get(root, "cosine"), i, options)
        if (status == VLA_OK)
            status = lr_rows(c, options, VLAI_SCHEDULE_COSINE, i, err);
    if (status == VLA_OK && (options = json_object_get(root, "constant")))
        status = lr_rows(c, options, VLAI_SCHEDULE_CONSTANT, 0, err);
    json_decref(root);
    return status;
}

/* Data order. */

static double differ(const json_t *want, const int64_t *got, int64_t n)
{
    if (!want)
        return 0;
    if (json_array_size(want) != (size_t)n)
        return INFINITY;
    double wrong = 0;
    for (int64_t i = 0; i < n; i++)
        wrong += json_integer_value(json_array_get(want, (size_t)i)) != got[i];
    return wrong;
}

typedef struct order_plan {
    int64_t frames, world, seed, batch, train, validation;
    size_t index;
} order_plan;

static vla_status order_rank(vlai_parity_case *c, const order_plan *plan, vlai_order *order, int64_t rank,
                             const json_t *want, int64_t *scratch, vla_error *err)
{
    double bound = vlai_parity_bound(c, "order");
    char name[96];
    int64_t n = vlai_order_per_rank(plan->train, plan->world, true);
    size_t epoch;
    json_t *list;
    json_array_foreach(json_object_get(want, "epochs"), epoch, list) {
        for (int64_t i = 0; i < n; i++)
            VLA_TRY(vlai_order_at(order, (int64_t)epoch, vlai_order_place(i, rank, plan->world), &scratch[i], err));
        snprintf(name, sizeof name, "plan %zu rank %lld epoch %zu", plan->index, (long long)rank, epoch);
        vlai_parity_report(c, "epochs", name, differ(list, scratch, n), bound);
    }
    snprintf(name, sizeof name, "plan %zu rank %lld", plan->index, (long long)rank);
    const json_t *count = json_object_get(want, "micro_batches");
    if (count && plan->batch > 0)
        vlai_parity_report(c, "micro_batches", name, json_integer_value(count) == n / plan->batch ? 0 : 1, bound);
    int64_t validation = vlai_order_per_rank(plan->validation, plan->world, false);
    for (int64_t i = 0; i < validation; i++)
        scratch[i] = vlai_order_place(i, rank, plan->world) % plan->validation;
    vlai_parity_report(c, "val", name, differ(json_object_get(want, "val"), scratch, validation), bound);
    count = json_object_get(want, "val_batches");
    if (count && plan->batch > 0)
        vlai_parity_report(c, "val_batches", name,
                           json_integer_value(count) == (validation + plan->batch - 1) / plan->batch ? 0 : 1, bound);
    return VLA_OK;
}

static vla_status order_one(vlai_parity_case *c, const json_t *want, size_t index, vla_error *err)
{
    order_plan plan = {.index = index};
    VLA_TRY(vlai_json_need_int(want, "frames", "order.json", &plan.frames, err));
    VLA_TRY(vlai_json_int(want, "world", 1, "order.json", &plan.world, err));
    VLA_TRY(vlai_json_need_int(want, "seed", "order.json", &plan.seed, err));
    VLA_TRY(vlai_json_int(want, "batch", 0, "order.json", &plan.batch, err));
    if (plan.frames < 1 || plan.frames > 100000000 || plan.world < 1)
        return vlai_fail(err, VLA_E_INVALID, "order.json: plan %zu has %lld frames, world %lld", index,
                         (long long)plan.frames, (long long)plan.world);
    int64_t *rows = vlai_array((size_t)plan.frames, sizeof *rows);
    int64_t *scratch = vlai_array((size_t)(plan.frames + plan.world), sizeof *scratch);
    vlai_order *order = NULL;
    vla_status status = rows && scratch ? VLA_OK : vlai_nomem(err, (size_t)plan.frames * sizeof *rows);
    if (status != VLA_OK)
        goto done;
    VLA_TRY_GOTO(vlai_order_split(plan.frames, (uint64_t)plan.seed, rows, &plan.train, err), done);
    plan.validation = plan.frames - plan.train;
    char name[32];
    snprintf(name, sizeof name, "plan %zu", index);
    vlai_parity_report(c, "split", name,
                       differ(json_object_get(want, "train"), rows, plan.train) +
                           differ(json_object_get(want, "val"), rows + plan.train, plan.validation),
                       vlai_parity_bound(c, "order"));
    VLA_TRY_GOTO(vlai_order_create(NULL, plan.train, (uint64_t)plan.seed, true, &order, err), done);
    size_t rank;
    json_t *entry;
    json_array_foreach(json_object_get(want, "ranks"), rank, entry)
        VLA_TRY_GOTO(order_rank(c, &plan, order, (int64_t)rank, entry, scratch, err), done);
done:
    vlai_order_destroy(order);
    vlai_free(rows);
    vlai_free(scratch);
    return status;
}

vla_status vlai_parity_order(vlai_parity_case *c, vla_error *err)
{
    json_t *plans, *plan;
    VLA_TRY(vlai_parity_json(c, "order.json", &plans, err));
    vla_status status = VLA_OK;
    size_t i;
    json_array_foreach(plans, i, plan)
        if (status == VLA_OK)
            status = order_one(c, plan, i, err);
    json_decref(plans);
    return status;
}
