/* Gradients into the store, and the graph that clips and steps. State values are found by name: "KIND:PARAMETER". */
#include "base/fail.h"
#include "exec/shard.h"
#include "exec/state_names.h"
#include "graph/graph.h"
#include "ops/op.h"
#include "pass/pass.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const char *const vlai_state_prefix[VLA_STORE_KINDS] = {
    [VLA_STORE_WEIGHT] = "w:", [VLA_STORE_GRADIENT] = "g:", [VLA_STORE_M] = "m:", [VLA_STORE_V] = "v:", [VLA_STORE_LOW] = "l:",
};

static vla_value state_value(vla_graph *g, const vlai_param *p, vla_store_kind kind)
{
    char name[1024];
    snprintf(name, sizeof name, "%s%s", vlai_state_prefix[kind], p->name);
    return vlai_graph_leaf(g, VLAI_STATE, name, p->dtype[kind], 1, &p->stored);
}

/* The values that view the same bytes as an earlier one, or are not made by a node that could write elsewhere. */
static bool can_move(const vla_graph *g, vla_value v)
{
    const vlai_value_info *info = vlai_value(g, v);
    if (info->kind != VLAI_TEMP || info->producer < 0 || info->name)
        return false;
    vlai_op op = g->nodes[info->producer].op;
    if (op == VLAI_OP_reshape || op == VLAI_OP_stop_gradient)
        return false;
    for (size_t n = 0; n < g->n_nodes; n++)
        if (g->nodes[n].op == VLAI_OP_reshape || g->nodes[n].op == VLAI_OP_stop_gradient)
            if (g->nodes[n].inputs[0] == v)
                return false;
    return true;
}

/* A gradient that is exactly zero and not in the graph. Ranks of several hold one all the same: another rank's batch may have
 * more to say about the parameter, and all must reduce the same buckets. */
static vla_value zero_gradient(vla_graph *g, const vlai_param *p)
{
    return vla_fill(g, p->symbolic, 1, &p->stored, 0);
}

vla_status vla_graph_store_gradients(vla_graph *g, const vla_store *store, int accumulate, vla_gradient_status *status,
                                     vla_error *err)
{
    VLA_TRY(vla_graph_check(g, err));
    size_t params = g->n_gradient;
    g->backward = true;
    for (size_t v = 0; v < params; v++) {
        if (g->values[v].kind != VLAI_PARAM || g->values[v].frozen)
            continue;
        int64_t index = vla_store_find(store, g->values[v].name);
        if (index < 0)
            return vlai_fail(err, VLA_E_NOT_FOUND, "parameter '%s' of the graph is not in the store", g->values[v].name);
        const vlai_param *p = &store->params[index];
        vla_value dw = g->gradient[v];
        if (dw == VLA_NONE && g->values[v].touched && vlai_store_is_sharded(store)) {
            status[index] = VLA_GRADIENT_SOME;
            if (accumulate)
                continue;
            dw = zero_gradient(g, p);
        }
        if (dw == VLA_NONE) {
            if (g->values[v].touched && status[index] == VLA_GRADIENT_NONE)
                status[index] = VLA_GRADIENT_ZERO;
            continue;
        }
        status[index] = VLA_GRADIENT_SOME;
        if (accumulate) {
            vla_value acc = state_value(g, p, VLA_STORE_GRADIENT);
            int64_t flat = p->stored;
            vla_value one = vla_reshape(g, dw, 1, &flat);
            vlai_graph_add(g, VLAI_OP_accumulate, 2, (vla_value[]){acc, one}, NULL, NULL);
            g->gradient[v] = VLA_NONE;
            continue;
        }
        if (!can_move(g, dw))
            dw = vlai_graph_op(g, VLAI_OP_copy, 1, &dw, NULL);
        VLA_TRY(vla_graph_check(g, err));
        char name[1024];
        snprintf(name, sizeof name, "%s%s", vlai_state_prefix[VLA_STORE_GRADIENT], p->name);
        g->values[dw].kind = VLAI_STATE;
        vla_graph_name(g, dw, name);
        g->gradient[v] = dw;
    }
    return vla_graph_check(g, err);
}

/* Adds norms, clip and AdamW for every parameter that has a status; gradient[i]: of parameter i, or VLA_NONE where it is
 * zero. guard [1] (or VLA_NONE): 0, or NaN when nothing may be stepped; it counts as one more gradient. */
static void add_update(vla_graph *g, const vla_store *store, const vla_gradient_status *status, const vla_value *gradient,
                       vla_value guard, const vla_adamw_options *options)
{
    int64_t with_gradient = guard != VLA_NONE, next = 0;
    for (size_t i = 0; i < store->count; i++)
        with_gradient += status[i] == VLA_GRADIENT_SOME;
    vla_value hyper = vla_graph_input(g, "hyper", VLA_F64, 1, (int64_t[]){VLA_HYPER_RATES + options->groups});
    vla_value norms = vla_graph_input(g, "norms", VLA_F64, 1, &with_gradient);
    for (size_t i = 0; i < store->count; i++)
        if (status[i] == VLA_GRADIENT_SOME) {
            vlai_attrs attrs = {.clip = {.index = next++}};
            vlai_graph_add(g, VLAI_OP_sum_squares, 2, (vla_value[]){gradient[i], norms}, &attrs, NULL);
        }
    if (guard != VLA_NONE)
        vlai_graph_add(g, VLAI_OP_sum_squares, 2, (vla_value[]){guard, norms}, &(vlai_attrs){.clip = {.index = next}}, NULL);
    vla_value clip = vlai_graph_op(g, VLAI_OP_clip_factor, 1, &norms, &(vlai_attrs){.clip = {.max_norm = options->max_norm}});
    vla_graph_name(g, clip, "clip");
    for (size_t i = 0; i < store->count; i++) {
        if (status[i] == VLA_GRADIENT_NONE)
            continue;
        const vlai_param *p = &store->params[i];
        vlai_attrs attrs = {.adamw = {options->beta1, options->beta2, options->eps, options->weight_decay, vlai_hash_name(p->name), p->group,
                                       store->numerics == VLA_BF16_SR && p->dtype[VLA_STORE_WEIGHT] == VLA_BF16}};
        vla_value operands[7] = {state_value(g, p, VLA_STORE_WEIGHT), gradient[i], state_value(g, p, VLA_STORE_M),
                                 state_value(g, p, VLA_STORE_V), hyper, clip, VLA_NONE};
        int n = 6;
        if (p->dtype[VLA_STORE_LOW] != VLA_DTYPE_NONE)
            operands[n++] = state_value(g, p, VLA_STORE_LOW);
        vlai_graph_add(g, VLAI_OP_adamw, n, operands, &attrs, NULL);
    }
}

static vla_status gradient_list(const vla_store *store, const vla_adamw_options *options, vla_value **out, vla_error *err)
{
    *out = NULL;
    if (!(options->eps > 0))
        return vlai_fail(err, VLA_E_INVALID, "AdamW: eps is %g, wanted more than 0: where gradients are exactly zero a step would be 0/0",
                         options->eps);
    vla_value *list = vlai_array(store->count + 1, sizeof *list);
    for (size_t i = 0; list && i < store->count; i++)
        list[i] = VLA_NONE;
    *out = list;
    return list ? VLA_OK : vlai_nomem(err, store->count * sizeof *list);
}

vla_status vla_graph_step(vla_graph *g, const vla_store *store, vla_gradient_status *status, const vla_adamw_options *options,
                          vla_error *err)
{
    vla_value *gradient;
    vla_adamw_options adamw = {0};
    VLA_TRY(vla_graph_check(g, err));
    VLA_TRY(vlai_take_sized(&adamw, sizeof adamw, options, "vla_adamw_options", err));
    VLA_TRY(gradient_list(store, &adamw, &gradient, err));
    size_t params = g->n_gradient;
    g->backward = true;
    for (size_t v = 0; v < params; v++) {
        if (g->values[v].kind != VLAI_PARAM || g->values[v].frozen)
            continue;
        int64_t index = vla_store_find(store, g->values[v].name);
        if (index < 0) {
            vlai_free(gradient);
            return vlai_fail(err, VLA_E_NOT_FOUND, "parameter '%s' of the graph is not in the store", g->values[v].name);
        }
        if (g->gradient[v] != VLA_NONE) {
            status[index] = VLA_GRADIENT_SOME;
            gradient[index] = vla_reshape(g, g->gradient[v], 1, &store->params[index].stored);
            g->gradient[v] = VLA_NONE; /* used up here: it need not outlive the step */
        } else if (g->values[v].touched && vlai_store_is_sharded(store)) {
            status[index] = VLA_GRADIENT_SOME;
            gradient[index] = zero_gradient(g, &store->params[index]);
        } else if (g->values[v].touched && status[index] == VLA_GRADIENT_NONE) {
            status[index] = VLA_GRADIENT_ZERO;
        }
    }
    /* A loss may be infinite and its gradient finite. */
    vla_value guard = g->loss == VLA_NONE ? VLA_NONE : vla_reshape(g, vla_scale(g, g->loss, 0), 1, (int64_t[]){1});
    add_update(g, store, status, gradient, guard, &adamw);
    vlai_free(gradient);
    return vla_graph_check(g, err);
}

void vla_hyper_fill(const vla_adamw_options *options, uint64_t seed, int64_t applied, double *hyper)
{
    double t = (double)(applied + 1);
    hyper[VLA_HYPER_BIAS1] = 1 - pow(options->beta1, t);
    hyper[VLA_HYPER_BIAS2] = 1 - pow(options->beta2, t);
    hyper[VLA_HYPER_UPDATE] = t;
    hyper[VLA_HYPER_SEED] = (double)(seed & (((uint64_t)1 << 53) - 1));
}

vla_status vlai_graph_norms(const vla_store *store, const int *group, int groups, vla_graph **out, vla_error *err)
{
    vla_graph *g;
    *out = NULL;
    VLA_TRY(vla_graph_create(&g, err));
    for (int k = 0; k < groups; k++) {
        int64_t count = 0, next = 0;
        char name[32];
        for (size_t i = 0; i < store->count; i++)
            count += group[i] == k;
        snprintf(name, sizeof name, "squares.%d", k);
        vla_value norms = vla_graph_input(g, name, VLA_F64, 1, &count);
        for (size_t i = 0; i < store->count; i++)
            if (group[i] == k)
                vlai_graph_add(g, VLAI_OP_sum_squares, 2, (vla_value[]){state_value(g, &store->params[i], VLA_STORE_WEIGHT), norms},
                               &(vlai_attrs){.clip = {.index = next++}}, NULL);
        snprintf(name, sizeof name, "norm.%d", k);
        vla_graph_name(g, vlai_graph_op(g, VLAI_OP_clip_factor, 1, &norms, NULL), name);
    }
    vla_status status = vla_graph_check(g, err);
    if (status != VLA_OK)
        vla_graph_destroy(g);
    else
        *out = g;
    return status;
}

vla_status vla_graph_adamw(const vla_store *store, const vla_gradient_status *status, const vla_adamw_options *options,
                           vla_graph **out, vla_error *err)
{
    vla_graph *g;
    vla_adamw_options adamw = {0};
    VLA_TRY(vlai_take_sized(&adamw, sizeof adamw, options, "vla_adamw_options", err));
    VLA_TRY(vla_graph_create(&g, err));
    g->backward = true;
    vla_value *gradient;
    vla_status result = gradient_list(store, &adamw, &gradient, err);
    if (result == VLA_OK) {
        for (size_t i = 0; i < store->count; i++)
            if (status[i] == VLA_GRADIENT_SOME)
                gradient[i] = state_value(g, &store->params[i], VLA_STORE_GRADIENT);
        add_update(g, store, status, gradient, vla_graph_input(g, "guard", VLA_F32, 1, (int64_t[]){1}), &adamw);
        vlai_free(gradient);
        result = vla_graph_check(g, err);
    }
    if (result != VLA_OK) {
        vla_graph_destroy(g);
        return result;
    }
    *out = g;
    return VLA_OK;
}
