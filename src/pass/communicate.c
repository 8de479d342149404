/* Communicate: the update of one rank of several (exec/shard.h). The update arrives as one rank makes it: norms of gradients,
 * clip, AdamW of whole tensors. It leaves as
 *
 *     a bucket's gradients -> reduce_scatter -> this rank's shard -> norms of slices -> all_reduce of the norms -> clip
 *     -> AdamW of the slices of weights, moments and low bits -> all_gather of the bucket's weights
 *
 * or, where the optimizer's state is whole on every rank, with an all_reduce of the bucket and AdamW of everything.
 *
 * Gradients that the plan itself makes are placed: they are made inside the memory of their bucket (vlai_value_info.home), so
 * that nothing is copied together. Those of a store lie in buckets already. What a graph has no gradient for, but which other
 * ranks may have, is a fill of zeros (pass/update.c).
 *
 * With options->overlap a bucket is reduced right behind the maker of its last gradient, and the weights are gathered at the
 * front of the plan that uses them, bucket by bucket in the order of first use: between two steps a rank's weights are its own
 * shard's, and old beside it. Otherwise the reductions stand behind the backward pass and the gathers at the end.
 *
 * Every rank must issue the same collectives in the same order. The order is that of the run's first plan (options->order),
 * which the ranks compare; what a later plan's shape would change does not matter then. Runs after fusions, on concrete types:
 * nobody moves nodes afterwards. */
#include "pass/communicate.h"

#include "base/fail.h"
#include "exec/shard.h"
#include "exec/state_names.h"
#include "graph/graph.h"
#include "ops/op.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The nodes that update one parameter. */
typedef struct change {
    int64_t adamw, squares; /* squares -1: no gradient */
    vla_value base;         /* the gradient as its maker gives it; VLA_NONE: none, or in the store */
    int64_t ready;          /* the node behind which its place in the bucket is filled; -1: before all */
    bool alone;             /* nothing but the update reads it */
    bool zeros;             /* base is a fill, which may stand anywhere */
} change;

typedef struct bucket_state {
    bool stepped, reduced;  /* weights change; there are gradients */
    bool stored;            /* the gradients are the store's */
    int64_t begin, ready;   /* nodes: before the first member is made, behind the last */
    vla_value value, shard; /* shard: what is left of it, the bucket itself when nothing is sharded */
    vla_dtype dtype;        /* that is reduced */
} bucket_state;

typedef struct state {
    vla_graph *g;
    const vla_plan_options *options;
    const vla_store *store;
    change *changes;       /* per parameter of the store; adamw -1: not stepped */
    bucket_state *buckets;
    int32_t *uses;         /* per value: operands that are it */
    size_t n_old;          /* nodes before the pass */
    int64_t *after;        /* of node n_old + i: the old node behind which it stands, -1: at the front */
    size_t n_after, cap_after;
    bool *gone;            /* old nodes that are left out */
    int64_t first, last;   /* old nodes: of the update; the last of the norms */
    int64_t guard;         /* sum_squares of no parameter, or -1 */
    vlai_comm_order *order;
} state;

/* The nodes added since the last call stand behind old node `after`, in the order of the calls. */
static vla_status stands_behind(state *s, int64_t after, vla_error *err)
{
    VLA_TRY(vla_graph_check(s->g, err));
    while (s->n_old + s->n_after < s->g->n_nodes) {
        VLA_TRY(vlai_reserve((void **)&s->after, &s->cap_after, s->n_after, sizeof *s->after, err));
        s->after[s->n_after++] = after;
    }
    return VLA_OK;
}

static bool is_view(vlai_op op)
{
    return op == VLAI_OP_reshape || op == VLAI_OP_stop_gradient;
}

/* ---- what there is ---- */

static vla_status find_updates(state *s, vla_error *err)
{
    const vla_graph *g = s->g;
    s->first = s->guard = s->last = -1;
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        for (int i = 0; i < node->n_inputs; i++)
            if (node->inputs[i] != VLA_NONE)
                s->uses[node->inputs[i]]++;
        if (node->op == VLAI_OP_sum_squares)
            s->last = (int64_t)n;
        if (s->first < 0 && (node->op == VLAI_OP_sum_squares || node->op == VLAI_OP_adamw))
            s->first = (int64_t)n;
        if (node->op != VLAI_OP_adamw)
            continue;
        const char *name = g->values[node->inputs[0]].name;
        int64_t index = name && strlen(name) > 2 ? vla_store_find(s->store, name + 2) : -1;
        if (index < 0)
            return vlai_fail(err, VLA_E_NOT_FOUND, "parameter '%s' of the graph is not in the store", name ? name : "");
        s->changes[index].adamw = (int64_t)n;
    }
    for (size_t n = 0; n < g->n_nodes; n++) {
        if (g->nodes[n].op != VLAI_OP_sum_squares)
            continue;
        bool found = false;
        for (size_t i = 0; !found && i < s->store->count; i++)
            if (s->changes[i].adamw >= 0 && g->nodes[s->changes[i].adamw].inputs[1] == g->nodes[n].inputs[0]) {
                s->changes[i].squares = (int64_t)n;
                found = true;
            }
        if (!found)
            s->guard = (int64_t)n;
    }
    return VLA_OK;
}

/* Follows a gradient through views to what makes it. Views that the update alone reads are gone. */
static void find_base(state *s, change *c)
{
    const vla_graph *g = s->g;
    vla_value v = g->nodes[c->adamw].inputs[1];
    c->alone = s->uses[v] == 2; /* the norm and the step */
    while (g->values[v].kind == VLAI_TEMP && is_view(g->nodes[g->values[v].producer].op)) {
        s->gone[g->values[v].producer] = c->alone;
        v = g->nodes[g->values[v].producer].inputs[0];
        c->alone = c->alone && s->uses[v] == 1;
    }
    c->base = v;
    c->ready = g->values[v].kind == VLAI_TEMP ? g->values[v].producer : -1;
    c->zeros = c->alone && c->ready >= 0 && g->nodes[c->ready].op == VLAI_OP_fill;
}

/* May the base be made inside the bucket: for the update alone, of the bucket's type, and found by no name? */
static bool can_place(const state *s, const change *c, vla_dtype dtype)
{
    const vlai_value_info *info = &s->g->values[c->base];
    return c->alone && info->kind == VLAI_TEMP && !info->name && info->home == VLA_NONE && info->dtype == dtype && c->base != s->g->loss;
}

/* What gradients of a class in low precision are summed in; the others keep their type. */
static vla_dtype reduced_type(const state *s, vla_dtype native)
{
    bool exact = s->options->numerics == VLA_FP32 || s->options->numerics == VLA_FP64;
    return exact || s->options->gradient_dtype == VLA_DTYPE_NONE ? native : s->options->gradient_dtype;
}

/* Buckets that wait for no node of the plan, a store's and those of zeros alone: with the first that does, else where the update
 * begins. */
static void set_free_places(state *s)
{
    int64_t first = s->first - 1;
    for (size_t b = 0; b < s->store->n_buckets; b++)
        if (s->buckets[b].reduced && s->buckets[b].ready >= 0 && s->buckets[b].ready < first)
            first = s->buckets[b].ready;
    for (size_t b = 0; b < s->store->n_buckets; b++)
        if (s->buckets[b].ready < 0) {
            s->buckets[b].ready = first;
            s->buckets[b].begin = first + 1;
        }
}

static vla_status look_at_buckets(state *s, vla_error *err)
{
    const vla_graph *g = s->g;
    for (size_t b = 0; b < s->store->n_buckets; b++) {
        const vlai_store_bucket *k = &s->store->buckets[b];
        bucket_state *t = &s->buckets[b];
        *t = (bucket_state){.begin = INT64_MAX, .ready = -1, .value = VLA_NONE, .shard = VLA_NONE};
        for (size_t m = 0; m < k->count; m++) {
            change *c = &s->changes[k->members[m]];
            const vlai_param *p = &s->store->params[k->members[m]];
            if (c->adamw < 0)
                continue;
            t->stepped = true;
            vla_value gradient = g->nodes[c->adamw].inputs[1];
            if (gradient == VLA_NONE)
                continue;
            bool stored = g->values[gradient].kind == VLAI_STATE;
            if (t->reduced && stored != t->stored)
                return vlai_fail(err, VLA_E_INTERNAL, "communicate: bucket %zu has gradients of the store and of the plan ('%s')", b, p->name);
            if (g->values[gradient].elements != p->stored)
                return vlai_fail(err, VLA_E_INTERNAL, "communicate: the gradient of '%s' has %lld elements, wanted %lld", p->name,
                                 (long long)g->values[gradient].elements, (long long)p->stored);
            t->stored = stored;
            t->reduced = true;
            if (stored)
                continue;
            find_base(s, c);
            if (c->zeros)
                continue;
            t->begin = c->ready < t->begin ? c->ready : t->begin;
            t->ready = c->ready > t->ready ? c->ready : t->ready;
        }
        t->dtype = vlai_store_bucket_dtype(s->store, t->stored ? VLA_STORE_GRADIENT : VLA_STORE_WEIGHT, k);
        if (k->symbolic == VLA_COMPUTE)
            t->dtype = reduced_type(s, t->dtype);
        t->begin = t->begin < 0 ? 0 : t->begin;
    }
    set_free_places(s);
    return VLA_OK;
}

/* ---- the order of collectives ---- */

typedef struct key {
    int64_t at;
    int32_t bucket;
} key;

static int by_key(const void *a, const void *b)
{
    const key *x = a, *y = b;
    return x->at != y->at ? (x->at < y->at ? -1 : 1) : (x->bucket > y->bucket) - (x->bucket < y->bucket);
}

static void order_reductions(state *s, key *keys)
{
    size_t n = 0;
    for (size_t b = 0; b < s->store->n_buckets; b++)
        if (s->buckets[b].reduced)
            keys[n++] = (key){s->buckets[b].ready, (int32_t)b};
    qsort(keys, n, sizeof *keys, by_key);
    s->order->n_reduce = n;
    for (size_t i = 0; i < n; i++)
        s->order->reduce[i] = keys[i].bucket;
}

/* In the order in which the plan first reads a weight of the bucket. */
static void order_gathers(state *s, key *keys)
{
    const vla_graph *g = s->g;
    size_t n = 0;
    for (size_t b = 0; b < s->store->n_buckets; b++)
        keys[b] = (key){INT64_MAX, (int32_t)b};
    for (size_t m = g->n_nodes; m-- > 0;)
        for (int i = 0; i < g->nodes[m].n_inputs; i++) {
            const vlai_value_info *v = g->nodes[m].inputs[i] == VLA_NONE ? NULL : &g->values[g->nodes[m].inputs[i]];
            int64_t index = v && v->kind == VLAI_PARAM ? vla_store_find(s->store, v->name) : -1;
            if (index >= 0 && s->store->params[index].bucket >= 0)
                keys[s->store->params[index].bucket].at = (int64_t)m;
        }
    for (size_t b = 0; b < s->store->n_buckets; b++)
        if (s->buckets[b].stepped)
            keys[n++] = keys[b];
    qsort(keys, n, sizeof *keys, by_key);
    s->order->n_gather = n;
    for (size_t i = 0; i < n; i++)
        s->order->gather[i] = keys[i].bucket;
}

static bool same_set(const int32_t *a, size_t n, const int32_t *b, size_t m)
{
    if (n != m)
        return false;
    for (size_t i = 0; i < n; i++) {
        bool found = false;
        for (size_t j = 0; !found && j < m; j++)
            found = a[i] == b[j];
        if (!found)
            return false;
    }
    return true;
}

/* The plan's own order, or that of the run's first plan of its kind. */
static vla_status choose_order(state *s, vla_error *err)
{
    size_t n = s->store->n_buckets;
    key *keys = vlai_array(n + 1, sizeof *keys);
    s->order->reduce = vlai_array(n + 1, sizeof *s->order->reduce);
    s->order->gather = vlai_array(n + 1, sizeof *s->order->gather);
    if (!keys || !s->order->reduce || !s->order->gather) {
        vlai_free(keys);
        return vlai_nomem(err, n * sizeof *keys);
    }
    order_reductions(s, keys);
    order_gathers(s, keys);
    vlai_free(keys);
    const vlai_comm_order *first = s->options->order;
    if (!first)
        return VLA_OK;
    if (!same_set(first->reduce, first->n_reduce, s->order->reduce, s->order->n_reduce) ||
        !same_set(first->gather, first->n_gather, s->order->gather, s->order->n_gather))
        return vlai_fail_hint(err, VLA_E_INTERNAL, "ranks would wait for each other for ever",
                              "this plan reduces %zu and gathers %zu buckets, the first of the run %zu and %zu, or others", s->order->n_reduce,
                              s->order->n_gather, first->n_reduce, first->n_gather);
    memcpy(s->order->reduce, first->reduce, first->n_reduce * sizeof *first->reduce);
    memcpy(s->order->gather, first->gather, first->n_gather * sizeof *first->gather);
    return VLA_OK;
}

/* ---- gradients into buckets ---- */

static vla_value bucket_leaf(state *s, const char *prefix, size_t b, vla_store_kind kind)
{
    char name[32];
    const vlai_store_bucket *k = &s->store->buckets[b];
    snprintf(name, sizeof name, "%s%zu", prefix, b);
    return vlai_graph_leaf(s->g, VLAI_STATE, name, vlai_store_bucket_dtype(s->store, kind, k), 1, &k->length);
}

/* The member's gradient is made in its place, or copied there behind its maker. */
static vla_status place_member(state *s, bucket_state *t, const vlai_store_bucket *k, size_t index, vla_error *err)
{
    vla_graph *g = s->g;
    change *c = &s->changes[index];
    vla_value v = c->base;
    if (c->zeros) { /* made again at the front of the bucket */
        vlai_node fill = g->nodes[c->ready];
        s->gone[c->ready] = true;
        fill.attrs.fill.dtype = t->dtype;
        v = vlai_graph_op(g, VLAI_OP_fill, 0, NULL, &fill.attrs);
        VLA_TRY(stands_behind(s, t->begin - 1, err));
    } else if (!can_place(s, c, t->dtype)) {
        vlai_attrs attrs = {.fill = {.dtype = t->dtype}};
        bool same = g->values[v].dtype == t->dtype;
        v = vlai_graph_op(g, same ? VLAI_OP_copy : VLAI_OP_cast, 1, &v, same ? NULL : &attrs);
        VLA_TRY(stands_behind(s, c->ready, err));
    }
    VLA_TRY(vla_graph_check(g, err));
    g->values[v].home = t->value;
    g->values[v].inside = s->store->params[index].position - k->first;
    return VLA_OK;
}

static vla_status fill_bucket(state *s, size_t b, vla_error *err)
{
    const vlai_store_bucket *k = &s->store->buckets[b];
    bucket_state *t = &s->buckets[b];
    if (t->stored) {
        t->value = bucket_leaf(s, VLAI_STATE_GRADIENTS, b, VLA_STORE_GRADIENT);
        VLA_TRY(vla_graph_check(s->g, err));
        if (s->g->values[t->value].dtype != t->dtype)
            t->value = vlai_graph_op(s->g, VLAI_OP_cast, 1, &t->value, &(vlai_attrs){.fill = {.dtype = t->dtype}});
        return vla_graph_check(s->g, err);
    }
    t->value = vlai_graph_op(s->g, VLAI_OP_bucket, 0, NULL, &(vlai_attrs){.fill = {.dtype = t->dtype, .rank = 1, .shape = {k->length}}});
    VLA_TRY(stands_behind(s, t->begin - 1, err));
    for (size_t m = 0; m < k->count; m++)
        if (s->changes[k->members[m]].adamw >= 0 && s->g->nodes[s->changes[k->members[m]].adamw].inputs[1] != VLA_NONE)
            VLA_TRY(place_member(s, t, k, (size_t)k->members[m], err));
    return VLA_OK;
}

static vlai_attrs comm_attrs(const state *s, int64_t bucket)
{
    return (vlai_attrs){.comm = {.rank = s->store->rank, .world = s->store->world, .bucket = (int)bucket}};
}

/* All buckets, filled and reduced in the order; one never stands before the one that the order puts before it. */
static vla_status reduce(state *s, vla_error *err)
{
    int64_t at = -1, end = s->first - 1;
    for (size_t i = 0; i < s->order->n_reduce; i++) {
        int32_t b = s->order->reduce[i];
        bucket_state *t = &s->buckets[b];
        vlai_attrs attrs = comm_attrs(s, b);
        VLA_TRY(fill_bucket(s, (size_t)b, err));
        at = s->options->overlap ? (t->ready > at ? t->ready : at) : end;
        if (s->store->zero) {
            t->shard = vlai_graph_op(s->g, VLAI_OP_reduce_scatter, 1, &t->value, &attrs);
        } else {
            vlai_graph_add(s->g, VLAI_OP_all_reduce, 1, &t->value, &attrs, NULL);
            t->shard = t->value;
        }
        VLA_TRY(stands_behind(s, at, err));
    }
    return VLA_OK;
}

/* ---- the update of slices ---- */

/* A value that nobody reads any more: it is bound to nothing. */
static void drop_value(vla_graph *g, vla_value v)
{
    g->values[v].kind = VLAI_TEMP;
    g->values[v].producer = -1;
    g->values[v].name = NULL;
}

/* A state value of the whole tensor becomes that of the slice. */
static vla_status cut_state(state *s, vla_value v, const char *prefix, const vlai_param *p, vla_error *err)
{
    char name[1024];
    if (v == VLA_NONE)
        return VLA_OK;
    if (p->count == 0) {
        drop_value(s->g, v);
        return VLA_OK;
    }
    if (prefix) {
        snprintf(name, sizeof name, "%s%s", prefix, p->name);
        vla_graph_name(s->g, v, name);
    }
    s->g->values[v].elements = s->g->values[v].shape[0] = p->count;
    return vla_graph_check(s->g, err);
}

/* What the update reads as the gradient: a part of what the reduction has left. */
static vla_status take_part(state *s, const vlai_param *p, change *c, vla_error *err)
{
    vla_graph *g = s->g;
    const vlai_store_bucket *k = &s->store->buckets[p->bucket];
    const bucket_state *t = &s->buckets[p->bucket];
    vla_value old = g->nodes[c->adamw].inputs[1];
    if (!s->store->zero && t->stored && g->values[t->value].kind == VLAI_STATE)
        return VLA_OK; /* reduced where it lies */
    int64_t own = s->store->zero ? k->length / s->store->world * s->store->rank : 0;
    vlai_attrs attrs = {.slice = {.first = p->count ? p->position + p->first - k->first - own : 0, .count = p->count}};
    vla_value slice = vlai_graph_op(g, VLAI_OP_part, 1, &t->shard, &attrs);
    VLA_TRY(stands_behind(s, s->first - 1, err));
    g->nodes[c->squares].inputs[0] = slice;
    g->nodes[c->adamw].inputs[1] = slice;
    if (g->values[old].kind == VLAI_STATE)
        drop_value(g, old);
    return VLA_OK;
}

static vla_status step_slices(state *s, vla_error *err)
{
    for (size_t i = 0; i < s->store->count; i++) {
        const vlai_param *p = &s->store->params[i];
        change *c = &s->changes[i];
        if (c->adamw < 0 || p->bucket < 0)
            continue;
        if (s->g->nodes[c->adamw].inputs[1] != VLA_NONE)
            VLA_TRY(take_part(s, p, c, err));
        vlai_node *node = &s->g->nodes[c->adamw];
        if (!s->store->zero)
            continue;
        node->attrs.adamw.first = p->first;
        s->gone[c->adamw] = p->count == 0;
        VLA_TRY(cut_state(s, node->inputs[0], VLAI_STATE_SLICE, p, err));
        VLA_TRY(cut_state(s, node->inputs[2], NULL, p, err));
        VLA_TRY(cut_state(s, node->inputs[3], NULL, p, err));
        VLA_TRY(cut_state(s, node->n_inputs > 6 ? node->inputs[6] : VLA_NONE, NULL, p, err));
    }
    return VLA_OK;
}

/* Slices: every rank has the squares of its own, and all need the sum. Whole tensors: every rank has them all, but for the
 * guard, which is the rank's own. */
static vla_status share_norms(state *s, vla_error *err)
{
    vlai_attrs attrs = comm_attrs(s, -1);
    if (s->last < 0 || (!s->store->zero && s->guard < 0))
        return VLA_OK;
    int64_t node = s->store->zero ? s->last : s->guard;
    vlai_graph_add(s->g, VLAI_OP_all_reduce, 1, &s->g->nodes[node].inputs[s->store->zero ? 1 : 0], &attrs, NULL);
    return stands_behind(s, s->store->zero ? s->last : s->first - 1, err);
}

static vla_status gather(state *s, int64_t after, vla_error *err)
{
    for (size_t i = 0; i < s->order->n_gather; i++) {
        int32_t b = s->order->gather[i];
        vlai_attrs attrs = comm_attrs(s, b);
        vla_value weights = bucket_leaf(s, VLAI_STATE_WEIGHTS, (size_t)b, VLA_STORE_WEIGHT);
        vlai_graph_add(s->g, VLAI_OP_all_gather, 1, &weights, &attrs, NULL);
    }
    return stands_behind(s, after, err);
}

/* ---- the new list ---- */

static void push(vla_graph *g, vlai_node *list, size_t *count, const vlai_node *node, int *order)
{
    list[*count] = *node;
    for (int i = 0; i < node->n_outputs; i++)
        g->values[node->outputs[i]].producer = (int32_t)*count;
    if (vlai_op_is_collective(node->op))
        list[*count].attrs.comm.order = (*order)++;
    ++*count;
}

/* Old nodes in their order, each with what stands behind it. */
static vla_status merge(state *s, vla_error *err)
{
    vla_graph *g = s->g;
    vlai_node *list = vlai_array(g->n_nodes + 1, sizeof *list);
    int32_t *next = vlai_array(s->n_after + 1, sizeof *next), *head = vlai_array(s->n_old + 1, sizeof *head);
    vla_status status = list && next && head ? VLA_OK : vlai_nomem(err, g->n_nodes * sizeof *list);
    if (status == VLA_OK) {
        size_t count = 0;
        int order = 0;
        for (size_t n = 0; n <= s->n_old; n++)
            head[n] = -1;
        for (size_t i = s->n_after; i-- > 0;) { /* head[n + 1]: behind node n */
            next[i] = head[s->after[i] + 1];
            head[s->after[i] + 1] = (int32_t)i;
        }
        for (size_t n = 0; n <= s->n_old; n++) {
            if (n > 0 && !s->gone[n - 1])
                push(g, list, &count, &g->nodes[n - 1], &order);
            for (int32_t i = head[n]; i >= 0; i = next[i])
                push(g, list, &count, &g->nodes[s->n_old + (size_t)i], &order);
        }
        for (size_t n = 0; n < s->n_old; n++)
            for (int i = 0; s->gone[n] && i < g->nodes[n].n_outputs; i++)
                drop_value(g, g->nodes[n].outputs[i]);
        vlai_free(g->nodes);
        g->nodes = list;
        g->cap_nodes = g->n_nodes + 1;
        g->n_nodes = count;
        list = NULL;
    }
    vlai_free(list);
    vlai_free(next);
    vlai_free(head);
    return status;
}

void vlai_comm_order_fini(vlai_comm_order *order)
{
    vlai_free(order->reduce);
    vlai_free(order->gather);
    *order = (vlai_comm_order){0};
}

vla_status vlai_comm_order_copy(const vlai_comm_order *from, vlai_comm_order *to, vla_error *err)
{
    *to = (vlai_comm_order){.reduce = vlai_array(from->n_reduce + 1, sizeof *to->reduce), .gather = vlai_array(from->n_gather + 1, sizeof *to->gather),
                            .n_reduce = from->n_reduce, .n_gather = from->n_gather};
    if (!to->reduce || !to->gather) {
        vlai_comm_order_fini(to);
        return vlai_nomem(err, (from->n_reduce + from->n_gather) * sizeof *to->reduce);
    }
    memcpy(to->reduce, from->reduce, from->n_reduce * sizeof *to->reduce);
    memcpy(to->gather, from->gather, from->n_gather * sizeof *to->gather);
    return VLA_OK;
}

vla_status vlai_pass_communicate(vla_graph *g, const vla_plan_options *options, vlai_comm_order *order, vla_error *err)
{
    const vla_store *store = options->store;
    bool steps = false, whole = false;
    *order = (vlai_comm_order){0};
    for (size_t n = 0; store && vlai_store_is_sharded(store) && n < g->n_nodes; n++)
        steps = steps || g->nodes[n].op == VLAI_OP_adamw;
    if (!steps)
        return VLA_OK;
    state s = {.g = g, .options = options, .store = store, .n_old = g->n_nodes, .order = order,
               .changes = vlai_array(store->count + 1, sizeof *s.changes), .buckets = vlai_calloc(store->n_buckets + 1, sizeof *s.buckets),
               .uses = vlai_calloc(g->n_values + 1, sizeof *s.uses), .gone = vlai_calloc(g->n_nodes + 1, sizeof *s.gone)};
    vla_status status = VLA_OK;
    if (!s.changes || !s.buckets || !s.uses || !s.gone) {
        status = vlai_nomem(err, g->n_values * sizeof *s.uses);
        goto done;
    }
    for (size_t i = 0; i < store->count; i++)
        s.changes[i] = (change){.adamw = -1, .squares = -1, .base = VLA_NONE, .ready = -1};
    bool backward = g->backward;
    g->backward = true;
    VLA_TRY_GOTO(find_updates(&s, err), done);
    VLA_TRY_GOTO(look_at_buckets(&s, err), done);
    VLA_TRY_GOTO(choose_order(&s, err), done);
    for (size_t b = 0; b < store->n_buckets; b++)
        whole = whole || (s.buckets[b].reduced && !s.buckets[b].stored);
    bool early = options->overlap && whole; /* the plan that uses the weights gathers them */
    if (store->zero && early)
        VLA_TRY_GOTO(gather(&s, -1, err), done);
    VLA_TRY_GOTO(reduce(&s, err), done);
    VLA_TRY_GOTO(step_slices(&s, err), done);
    VLA_TRY_GOTO(share_norms(&s, err), done);
    if (store->zero && !early)
        VLA_TRY_GOTO(gather(&s, (int64_t)s.n_old - 1, err), done);
    VLA_TRY_GOTO(merge(&s, err), done);
    g->backward = backward;
    status = vlai_graph_verify(g, "communicate", err);
done:
    vlai_free(s.changes);
    vlai_free(s.buckets);
    vlai_free(s.uses);
    vlai_free(s.after);
    vlai_free(s.gone);
    return status;
}

vla_status vlai_graph_gather(const vla_store *store, const vlai_comm_order *order, vla_graph **out, vla_error *err)
{
    vla_graph *g;
    VLA_TRY(vla_graph_create(&g, err));
    vlai_comm_order copy = *order;
    state s = {.g = g, .store = store, .order = &copy};
    vla_status status = gather(&s, -1, err);
    vlai_free(s.after);
    for (size_t n = 0; n < g->n_nodes; n++)
        g->nodes[n].attrs.comm.order = (int)n;
    if (status != VLA_OK) {
        vla_graph_destroy(g);
        return status;
    }
    *out = g;
    return VLA_OK;
}
