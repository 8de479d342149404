/* The memory plan: every value that one run makes gets bytes of one arena, from its making to its last use.
 *
 * Steps: who shares bytes with whom (reshapes, and results written over an operand that dies), how long each shared
 * block lives, and where it lies. Two layouts: `lifetimes` looks at the whole plan and packs the blocks like boxes in
 * time and space; `free_lists` does what an allocator would do at run time, step by step, with power-of-two classes. */
#include "base/fail.h"
#include "ops/op.h"
#include "pass/pass.h"

#include <stdlib.h>
#include <string.h>

/* What matrix units and vector loads of every device are content with. */
enum { ALIGN = 256 };

/* A run of bytes in the arena, and the nodes between which it is alive (both included). -1: before the first node. */
typedef struct block {
    vla_value root;
    int32_t first, last;
    int64_t bytes, offset;
} block;

typedef struct lifetimes {
    int32_t *root, *first, *last; /* per value; first and last count for roots */
    int64_t *inside;              /* per value: bytes of its root before it */
    block *blocks;
    size_t n_blocks;
} lifetimes;

/* The result is the operand, or a part of it, seen differently. */
static bool is_view(vlai_op op)
{
    return op == VLAI_OP_reshape || op == VLAI_OP_stop_gradient || op == VLAI_OP_part;
}

/* Which operands a result may be written over when they die there (bit i: operand i). A row says that every kernel of
 * the op reads element i (or the pair, or the row) of that operand before it writes there and never afterwards, on every
 * device. */
static uint32_t overwrites(const vlai_node *node)
{
    switch (node->op) {
    case VLAI_OP_add:
    case VLAI_OP_sub:
    case VLAI_OP_mul:
    case VLAI_OP_silu_grad:
    case VLAI_OP_gelu_grad: return 3;
    case VLAI_OP_scale:
    case VLAI_OP_silu:
    case VLAI_OP_gelu:
    case VLAI_OP_rope:
    case VLAI_OP_mul_rows:
    case VLAI_OP_zero_rows:
    case VLAI_OP_put_rows:
    case VLAI_OP_rms_norm_grad: return 1;
    case VLAI_OP_rms_norm_backward: return 1 | 16;
    case VLAI_OP_swiglu_grad:
    case VLAI_OP_swiglu_backward: return 2;
    case VLAI_OP_chain: return (1u << VLAI_CHAIN_INPUTS) - 1;
    case VLAI_OP_qkv_rope: return node->inputs[1] == VLA_NONE;      /* rows stay where they are */
    case VLAI_OP_qkv_rope_grad: return node->n_inputs < 4 || node->inputs[3] == VLA_NONE;
    default: return 0;
    }
}

static int64_t bytes_of(const vlai_value_info *v)
{
    return v->elements * (int64_t)vla_dtype_size(v->dtype);
}

static bool in_arena(const vlai_value_info *v)
{
    return v->kind == VLAI_INPUT || (v->kind == VLAI_TEMP && v->producer >= 0);
}

/* What must survive the run: inputs (so that a plan can be run again on the same batch), named values, the loss, and
 * gradients that no update has taken into the store. */
static void mark_results(const vla_graph *g, lifetimes *l)
{
    int32_t end = (int32_t)g->n_nodes;
    for (size_t v = 0; v < g->n_values; v++)
        if (g->values[v].kind == VLAI_INPUT || g->values[v].name)
            l->last[l->root[v]] = end;
    if (g->loss != VLA_NONE)
        l->last[l->root[g->loss]] = end;
    for (size_t v = 0; v < g->n_gradient; v++)
        if (g->values[v].kind == VLAI_PARAM && g->gradient[v] != VLA_NONE)
            l->last[l->root[g->gradient[v]]] = end;
}

static void measure_node(const vla_graph *g, lifetimes *l, size_t n)
{
    const vlai_node *node = &g->nodes[n];
    vla_value out = node->n_outputs ? node->outputs[0] : VLA_NONE;
    if (is_view(node->op) && g->values[out].kind == VLAI_TEMP) {
        int32_t root = l->root[node->inputs[0]];
        if (node->op != VLAI_OP_part || in_arena(&g->values[root])) { /* else it is a copy */
            l->root[out] = root;
            l->inside[out] = l->inside[node->inputs[0]];
        }
        if (node->op == VLAI_OP_part && l->root[out] == root)
            l->inside[out] += node->attrs.slice.first * (int64_t)vla_dtype_size(g->values[out].dtype);
    }
    for (int i = 0; i < node->n_inputs + node->n_outputs; i++) {
        vla_value v = i < node->n_inputs ? node->inputs[i] : node->outputs[i - node->n_inputs];
        if (v != VLA_NONE && l->last[l->root[v]] < (int32_t)n)
            l->last[l->root[v]] = (int32_t)n;
    }
}

/* A bucket that is being reduced beside other work keeps its bytes for some collectives more: whoever took them over sooner would
 * wait for the ranks, and for the products of weights' gradients, which a device makes as it finds time. */
static void hold_buckets(const vla_graph *g, lifetimes *l)
{
    enum { HELD = 3 };
    int32_t held[HELD];
    int count = 0;
    for (size_t n = 0; n < g->n_nodes; n++) {
        if (!vlai_op_is_collective(g->nodes[n].op))
            continue;
        for (int h = 0; h < count && h < HELD; h++)
            if (l->last[held[h]] < (int32_t)n)
                l->last[held[h]] = (int32_t)n;
        if (g->nodes[n].op == VLAI_OP_reduce_scatter)
            held[count++ % HELD] = l->root[g->nodes[n].inputs[0]];
    }
}

/* The value whose bytes `v` shares. */
static int32_t root_of(const lifetimes *l, vla_value v)
{
    int32_t root = v;
    while (l->root[root] != root)
        root = l->root[root];
    return root;
}

/* Roots by views alone, and how long what they name is alive. */
static void measure(const vla_graph *g, lifetimes *l)
{
    for (size_t v = 0; v < g->n_values; v++) {
        const vlai_value_info *info = &g->values[v];
        l->root[v] = info->home == VLA_NONE ? (int32_t)v : info->home;
        l->inside[v] = info->home == VLA_NONE ? 0 : info->inside * (int64_t)vla_dtype_size(info->dtype);
        l->first[v] = l->last[v] = info->kind == VLAI_TEMP ? info->producer : -1;
    }
    for (size_t n = 0; n < g->n_nodes; n++)
        measure_node(g, l, n);
    hold_buckets(g, l);
    mark_results(g, l);
}

/* Does the op allow its result 0 to be written over every operand that shares bytes with `root`? Not where element i of the one
 * is not element i of the other: a factor a row in fp32 has as many bytes as a result of two columns in bf16. */
static bool allows(const vla_graph *g, const lifetimes *l, const vlai_node *node, vla_value root)
{
    for (int i = 0; i < node->n_inputs; i++)
        if (node->inputs[i] != VLA_NONE && root_of(l, node->inputs[i]) == root &&
            (!(overwrites(node) >> i & 1) || g->values[node->inputs[i]].elements != g->values[node->outputs[0]].elements))
            return false;
    return true;
}

/* The operand whose bytes result 0 of the node may take over, or VLA_NONE: a temporary of the same size that nothing
 * reads later. */
static vla_value dying_operand(const vla_graph *g, const lifetimes *l, size_t n)
{
    const vlai_node *node = &g->nodes[n];
    uint32_t candidates = overwrites(node);
    if (!candidates || g->values[node->outputs[0]].kind != VLAI_TEMP || g->values[node->outputs[0]].home != VLA_NONE)
        return VLA_NONE;
    for (int i = 0; i < node->n_inputs; i++) {
        vla_value v = candidates >> i & 1 ? node->inputs[i] : VLA_NONE;
        if (v == VLA_NONE)
            continue;
        int32_t root = root_of(l, v);
        if (g->values[root].kind == VLAI_TEMP && l->last[root] == (int32_t)n && allows(g, l, node, root) &&
            bytes_of(&g->values[root]) == bytes_of(&g->values[node->outputs[0]]))
            return v;
    }
    return VLA_NONE;
}

/* Joins results to operands that die at their making: the operand's block lives on as the result. */
static void join(const vla_graph *g, lifetimes *l)
{
    for (size_t n = 0; n < g->n_nodes; n++) {
        vla_value operand = dying_operand(g, l, n);
        if (operand == VLA_NONE)
            continue;
        vla_value out = g->nodes[n].outputs[0];
        int32_t root = root_of(l, operand);
        l->last[root] = l->last[out];
        l->root[out] = root;
    }
}

static vla_status lifetimes_init(const vla_graph *g, bool in_place, lifetimes *l, vla_error *err)
{
    size_t n = g->n_values + 1;
    *l = (lifetimes){.root = vlai_array(n, sizeof(int32_t)), .first = vlai_array(n, sizeof(int32_t)),
                     .last = vlai_array(n, sizeof(int32_t)), .inside = vlai_array(n, sizeof(int64_t)), .blocks = vlai_array(n, sizeof(block))};
    if (!l->root || !l->first || !l->last || !l->inside || !l->blocks)
        return vlai_nomem(err, n * sizeof(block));
    measure(g, l);
    if (in_place)
        join(g, l);
    for (size_t v = 0; v < g->n_values; v++) {
        l->root[v] = root_of(l, (vla_value)v);
        if (l->root[v] != (int32_t)v || !in_arena(&g->values[v]))
            continue;
        int64_t bytes = bytes_of(&g->values[v]);
        l->blocks[l->n_blocks++] = (block){(vla_value)v, l->first[v], l->last[v], (bytes + ALIGN - 1) & -ALIGN, 0};
    }
    return VLA_OK;
}

/* Inputs are alive for the whole run, so they lose nothing by standing side by side at the start of the arena: a device
 * takes them in one copy. Takes their blocks out of the list and returns their bytes. */
static int64_t place_inputs(const vla_graph *g, lifetimes *l, vlai_memory *out)
{
    size_t kept = 0;
    int64_t end = 0;
    for (size_t b = 0; b < l->n_blocks; b++) {
        if (g->values[l->blocks[b].root].kind != VLAI_INPUT) {
            l->blocks[kept++] = l->blocks[b];
            continue;
        }
        out->offset[l->blocks[b].root] = end;
        end += l->blocks[b].bytes;
    }
    l->n_blocks = kept;
    return end;
}

static void lifetimes_fini(lifetimes *l)
{
    vlai_free(l->root);
    vlai_free(l->first);
    vlai_free(l->last);
    vlai_free(l->inside);
    vlai_free(l->blocks);
}

/* The largest sum of bytes alive at one node: no layout can do with less. */
static vla_status find_peak(const vla_graph *g, const lifetimes *l, size_t *peak, vla_error *err)
{
    int64_t *change = vlai_calloc(g->n_nodes + 3, sizeof *change), sum = 0, most = 0;
    if (!change)
        return vlai_nomem(err, g->n_nodes * sizeof *change);
    for (size_t i = 0; i < l->n_blocks; i++) {
        change[l->blocks[i].first + 1] += l->blocks[i].bytes;
        change[l->blocks[i].last + 2] -= l->blocks[i].bytes;
    }
    for (size_t n = 0; n < g->n_nodes + 3; n++) {
        sum += change[n];
        most = sum > most ? sum : most;
    }
    vlai_free(change);
    *peak = (size_t)most;
    return VLA_OK;
}

/* Orders of placement. The activations of a training step are nested in time, made in the forward and used up in reverse
 * in the backward: longest first stacks them without a gap. The others suit graphs of less order; the best counts. */
static int by_duration(const void *a, const void *b)
{
    const block *x = a, *y = b;
    int32_t dx = x->last - x->first, dy = y->last - y->first;
    if (dx != dy)
        return dx > dy ? -1 : 1;
    if (x->bytes != y->bytes)
        return x->bytes > y->bytes ? -1 : 1;
    return x->root < y->root ? -1 : 1;
}

static int by_bytes(const void *a, const void *b)
{
    const block *x = a, *y = b;
    if (x->bytes != y->bytes)
        return x->bytes > y->bytes ? -1 : 1;
    return by_duration(a, b);
}

static int by_area(const void *a, const void *b)
{
    const block *x = a, *y = b;
    double ax = (double)x->bytes * (x->last - x->first + 1), ay = (double)y->bytes * (y->last - y->first + 1);
    if (ax < ay || ax > ay)
        return ax > ay ? -1 : 1;
    return by_duration(a, b);
}

/* Places the blocks in the order given, each in the smallest gap among those placed before that are alive with it.
 * `placed` has room for all; it is kept sorted by offset. Returns the bytes of the arena. */
static int64_t pack(block *blocks, size_t n, block *placed)
{
    int64_t arena = 0;
    for (size_t i = 0; i < n; i++) {
        block *b = &blocks[i];
        int64_t end = 0, best = -1, best_gap = INT64_MAX;
        for (size_t j = 0; j < i; j++) {
            const block *p = &placed[j];
            if (p->last < b->first || p->first > b->last)
                continue;
            int64_t gap = p->offset - end;
            if (gap >= b->bytes && gap < best_gap) {
                best = end;
                best_gap = gap;
            }
            if (p->offset + p->bytes > end)
                end = p->offset + p->bytes;
        }
        b->offset = best >= 0 ? best : end;
        if (b->offset + b->bytes > arena)
            arena = b->offset + b->bytes;
        size_t low = 0, high = i;
        while (low < high) {
            size_t middle = (low + high) / 2;
            if (placed[middle].offset <= b->offset)
                low = middle + 1;
            else
                high = middle;
        }
        memmove(&placed[low + 1], &placed[low], (i - low) * sizeof *placed);
        placed[low] = *b;
    }
    return arena;
}

static vla_status layout_lifetimes(lifetimes *l, int64_t base, size_t peak, vlai_memory *out, vla_error *err)
{
    static int (*const orders[])(const void *, const void *) = {by_duration, by_bytes, by_area};
    block *placed = vlai_array(l->n_blocks + 1, sizeof *placed);
    if (!placed)
        return vlai_nomem(err, l->n_blocks * sizeof *placed);
    int64_t best = INT64_MAX;
    for (size_t o = 0; o < sizeof orders / sizeof *orders && best > (int64_t)peak - base; o++) {
        qsort(l->blocks, l->n_blocks, sizeof(block), orders[o]);
        int64_t arena = pack(l->blocks, l->n_blocks, placed);
        if (arena >= best)
            continue;
        best = arena;
        for (size_t i = 0; i < l->n_blocks; i++)
            out->offset[l->blocks[i].root] = base + l->blocks[i].offset;
    }
    out->arena_bytes = (size_t)(base + (l->n_blocks ? best : 0));
    vlai_free(placed);
    return VLA_OK;
}

/* Power-of-two classes; a freed buffer goes to the list of its class and the last one freed is reused first. */
typedef struct free_lists {
    int32_t head[64];  /* block whose bytes are free, by class; -1: none */
    int32_t *next;     /* per block */
    int32_t *block_of; /* root -> block, or -1 */
    int64_t arena;
} free_lists;

static int class_of(int64_t bytes)
{
    int c = 8;
    while (c < 62 && (int64_t)1 << c < bytes)
        c++;
    return c;
}

static void list_take(free_lists *f, block *blocks, int32_t b)
{
    int c = class_of(blocks[b].bytes);
    int32_t old = f->head[c];
    if (old >= 0) {
        f->head[c] = f->next[old];
        blocks[b].offset = blocks[old].offset;
        return;
    }
    blocks[b].offset = f->arena;
    f->arena += (int64_t)1 << c;
}

static void list_give(free_lists *f, const block *blocks, int32_t b)
{
    int c = class_of(blocks[b].bytes);
    f->next[b] = f->head[c];
    f->head[c] = b;
}

static vla_status layout_free_lists(const vla_graph *g, lifetimes *l, int64_t base, vlai_memory *out, vla_error *err)
{
    free_lists f = {.next = vlai_array(l->n_blocks + 1, sizeof *f.next),
                    .block_of = vlai_array(g->n_values + 1, sizeof *f.block_of), .arena = base};
    vla_status status = VLA_OK;
    if (!f.next || !f.block_of) {
        status = vlai_nomem(err, g->n_values * sizeof *f.block_of);
        goto done;
    }
    for (int c = 0; c < 64; c++)
        f.head[c] = -1;
    for (size_t v = 0; v < g->n_values; v++)
        f.block_of[v] = -1;
    for (size_t b = 0; b < l->n_blocks; b++) {
        f.block_of[l->blocks[b].root] = (int32_t)b;
        if (l->blocks[b].first < 0)
            list_take(&f, l->blocks, (int32_t)b);
    }
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        for (int i = 0; i < node->n_outputs; i++) {
            int32_t b = f.block_of[node->outputs[i]];
            if (b >= 0)
                list_take(&f, l->blocks, b);
        }
        for (int i = 0; i < node->n_inputs + node->n_outputs; i++) {
            vla_value v = i < node->n_inputs ? node->inputs[i] : node->outputs[i - node->n_inputs];
            int32_t b = v == VLA_NONE ? -1 : f.block_of[l->root[v]];
            if (b < 0 || l->blocks[b].last != (int32_t)n)
                continue;
            list_give(&f, l->blocks, b);
            l->blocks[b].last = -2; /* an operand may stand twice in a node */
        }
    }
    for (size_t b = 0; b < l->n_blocks; b++)
        out->offset[l->blocks[b].root] = l->blocks[b].offset;
    out->arena_bytes = (size_t)f.arena;
done:
    vlai_free(f.next);
    vlai_free(f.block_of);
    return status;
}

vla_status vlai_pass_memory(const vla_graph *g, vla_memory_layout layout, vlai_memory *out, vla_error *err)
{
    lifetimes l = {0};
    *out = (vlai_memory){.offset = vlai_array(g->n_values + 1, sizeof *out->offset),
                         .root = vlai_array(g->n_values + 1, sizeof *out->root), .n_values = g->n_values};
    vla_status status = VLA_OK;
    if (!out->offset || !out->root) {
        status = vlai_nomem(err, g->n_values * sizeof *out->offset);
        goto done;
    }
    VLA_TRY_GOTO(lifetimes_init(g, layout == VLA_MEMORY_LIFETIMES, &l, err), done);
    VLA_TRY_GOTO(find_peak(g, &l, &out->peak_bytes, err), done);
    for (size_t v = 0; v < g->n_values; v++)
        out->offset[v] = -1;
    out->input_bytes = (size_t)place_inputs(g, &l, out);
    VLA_TRY_GOTO(layout == VLA_MEMORY_LIFETIMES ? layout_lifetimes(&l, (int64_t)out->input_bytes, out->peak_bytes, out, err)
                                                : layout_free_lists(g, &l, (int64_t)out->input_bytes, out, err), done);
    for (size_t v = 0; v < g->n_values; v++) {
        out->root[v] = l.root[v];
        if (l.root[v] != (int32_t)v)
            out->offset[v] = out->offset[l.root[v]] < 0 ? -1 : out->offset[l.root[v]] + l.inside[v];
    }
    status = vlai_memory_verify(g, out, err);
done:
    lifetimes_fini(&l);
    if (status != VLA_OK)
        vlai_memory_fini(out);
    return status;
}

void vlai_memory_fini(vlai_memory *memory)
{
    vlai_free(memory->offset);
    vlai_free(memory->root);
    *memory = (vlai_memory){0};
}

static vla_status overlap(const vla_graph *g, const vlai_memory *m, vla_value a, vla_value b, int32_t node, vla_error *err)
{
    return vlai_fail(err, VLA_E_INTERNAL,
                     "after memory: %%%d (bytes %lld..%lld) and %%%d (%lld..%lld) are both alive at node %d and overlap",
                     (int)a, (long long)m->offset[a], (long long)(m->offset[a] + bytes_of(&g->values[a])), (int)b,
                     (long long)m->offset[b], (long long)(m->offset[b] + bytes_of(&g->values[b])), (int)node);
}

/* May result 0 of node n stand on the bytes of `a`, whose last reader it is? */
static bool may_overwrite(const vla_graph *g, const lifetimes *views, int32_t n, vla_value a, vla_value result)
{
    if (n < 0 || (size_t)n >= g->n_nodes || views->last[a] != n || g->nodes[n].outputs[0] != result)
        return false;
    return overwrites(&g->nodes[n]) && allows(g, views, &g->nodes[n], a);
}

/* Values placed inside a bucket: inside its bytes, apart from each other, made after it and before the first that reads it. */
static vla_status verify_homes(const vla_graph *g, const lifetimes *views, vla_error *err)
{
    for (size_t v = 0; v < g->n_values; v++) {
        const vlai_value_info *info = &g->values[v];
        if (info->home == VLA_NONE)
            continue;
        const vlai_value_info *home = &g->values[info->home];
        int64_t first = views->inside[v], end = first + bytes_of(info);
        if (info->kind != VLAI_TEMP || info->producer <= home->producer || home->producer < 0 || g->nodes[home->producer].op != VLAI_OP_bucket || first < 0 ||
            end > bytes_of(home))
            return vlai_fail(err, VLA_E_INTERNAL, "after memory: %%%zu does not fit into %%%d, its bucket", v, (int)info->home);
        for (size_t w = 0; w < v; w++)
            if (g->values[w].home == info->home && views->inside[w] < end && first < views->inside[w] + bytes_of(&g->values[w]))
                return vlai_fail(err, VLA_E_INTERNAL, "after memory: %%%zu and %%%zu overlap in their bucket %%%d", w, v, (int)info->home);
    }
    for (size_t n = 0; n < g->n_nodes; n++) /* who reads a bucket reads all of its members */
        for (int i = 0; i < g->nodes[n].n_outputs; i++) {
            vla_value home = g->values[g->nodes[n].outputs[i]].home;
            for (size_t m = home == VLA_NONE ? n : (size_t)g->values[home].producer; m < n; m++)
                for (int k = 0; k < g->nodes[m].n_inputs; k++)
                    if (g->nodes[m].inputs[k] == home)
                        return vlai_fail(err, VLA_E_INTERNAL, "after memory: node %zu reads %%%d before node %zu has made its part %%%d", m, (int)home, n,
                                         (int)g->nodes[n].outputs[i]);
        }
    return VLA_OK;
}

/* A sweep over the nodes with the set of values alive. It knows views but nothing of how the layout was found. */
vla_status vlai_memory_verify(const vla_graph *g, const vlai_memory *m, vla_error *err)
{
    lifetimes views = {0};
    vla_value *alive = vlai_array(g->n_values + 1, sizeof *alive);
    size_t n_alive = 0;
    vla_status status = VLA_OK;
    if (!alive) {
        status = vlai_nomem(err, g->n_values * sizeof *alive);
        goto done;
    }
    VLA_TRY_GOTO(lifetimes_init(g, false, &views, err), done);
    VLA_TRY_GOTO(verify_homes(g, &views, err), done);
    for (size_t v = 0; v < g->n_values; v++) {
        const vlai_value_info *info = &g->values[v];
        int64_t offset = m->offset[v];
        bool placed = in_arena(&g->values[views.root[v]]) && in_arena(info);
        if (placed != (offset >= 0) || (placed && (offset % ALIGN || (size_t)(offset + bytes_of(info)) > m->arena_bytes)) ||
            (placed && m->offset[views.root[v]] + views.inside[v] != offset) || m->root[views.root[v]] != m->root[v]) {
            status = vlai_fail(err, VLA_E_INTERNAL, "after memory: %%%zu has offset %lld in an arena of %zu bytes", v,
                               (long long)offset, m->arena_bytes);
            goto done;
        }
    }
    for (int64_t n = -1; n < (int64_t)g->n_nodes; n++) {
        size_t born = n < 0 ? g->n_values : (size_t)g->nodes[n].n_outputs, kept = 0;
        for (size_t i = 0; i < n_alive; i++)
            if (views.last[alive[i]] >= n)
                alive[kept++] = alive[i];
        n_alive = kept;
        for (size_t i = 0; i < born; i++) {
            vla_value v = n < 0 ? (vla_value)i : g->nodes[n].outputs[i];
            if ((n < 0 && g->values[v].kind != VLAI_INPUT) || views.root[v] != v || m->offset[v] < 0)
                continue;
            int64_t first = m->offset[v], end = first + bytes_of(&g->values[v]);
            for (size_t j = 0; j < n_alive; j++) {
                vla_value a = alive[j];
                if (m->offset[a] >= end || first >= m->offset[a] + bytes_of(&g->values[a]))
                    continue;
                if (m->root[a] == m->root[v] && may_overwrite(g, &views, (int32_t)n, a, v))
                    continue;
                status = overlap(g, m, a, v, (int32_t)n, err);
                goto done;
            }
            alive[n_alive++] = v;
        }
    }
done:
    lifetimes_fini(&views);
    vlai_free(alive);
    return status;
}
