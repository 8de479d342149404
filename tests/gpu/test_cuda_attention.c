/* Every implementation of attention on the device against the CPU twin, in segments of awkward lengths.
 *
 *     test_cuda_attention [--short | --few] [I/N] [NAME...]      only the implementations named: wide windows long groups cudnn segments
 *                                                                tiles plain plain32; the I-th of N shares of the problems
 *                                                                (gpu/parts.h); --few: own kernels, few segments, in which all
 *                                                                buffers go round
 *
 * What may be wrong follows from what is rounded. Each result is a sum of terms; before the sum, a factor of each term (p, or
 * ds = p (dp - delta)) is rounded to the stored type, and the sum once more when it is stored: for bf16 by at most 2^-8, in
 * the quadratic mean by 2^-9.3; u = 2^-9 stands for it. Errors of many roundings add like a random walk: the norm of a
 * result's error is at most 2 u times the norm of sqrt(sum of squared terms + square of the sum), that of one element 8 u
 * times the former and 2 u times the latter. Sums themselves are fp32 in any order: 2^-17 (one element: 2^-16) of the sum of
 * the terms' absolute values, in which dp and delta count by the absolute values of what they sum, so that a gradient that
 * is truly zero (one key) may be as far off as the terms that cancel in it allow.
 *
 * The twin's delta = rowsum(do o) has the rounding of o in it, delta = rowsum(p dp) has none: ds of a query differ by p times
 * one and the same error, of size u sqrt(sum of (do o)^2). In dk and dq it counts as a term more: sum p k of a query is at most
 * sqrt(sum p k^2), since sum p = 1.
 *
 * With o and do in two streams own kernels have to give the bits that they give without; a library's are compared with the twin.
 *
 * Own kernels also give the same bits twice. Rows that belong to no segment come out as 0, lse -inf. Nothing else is written. */
#include "gpu/cuda_test.h"

#include "kernels/attention.h"
#include "vendor/cudnn.h"

enum { MOST_SEGMENTS = 64, PARTS = 3 };

typedef struct problem {
    const char *what;
    vla_dtype dtype;
    vla_attention_mask mask;
    int heads, kv_heads, dim, packed;
    int cudnn; /* its plans take a second each; on Hopper it has none but for 3 heads to a kv head */
    int64_t front, back; /* rows outside the segments */
    int64_t length[MOST_SEGMENTS]; /* 0 ends the list, -1 stands for an empty segment */
} problem;

typedef struct sums {
    double *squares, *absolute; /* per element of a result */
} sums;

static struct vlai_cudnn *cudnn;
static const char *const *names; /* of implementations, which alone are wanted, if any */
static int n_names;
static long used[16]; /* cases by implementation */

static int wanted(const char *name)
{
    for (int i = 0; i < n_names; i++)
        if (strcmp(names[i], name) == 0)
            return 1;
    return n_names == 0;
}

typedef struct tables {
    int64_t n;
    int segments;
    tensor qpos, rows, cols, cut;
} tables;

static tables make_tables(const problem *p)
{
    tables t = {.n = p->front + p->back};
    for (; t.segments < MOST_SEGMENTS && p->length[t.segments]; t.segments++)
        t.n += p->length[t.segments] > 0 ? p->length[t.segments] : 0;
    t.qpos = ints(0, 1, SHAPE1(t.n));
    t.rows = ints(0, 1, SHAPE2(t.n, 2));
    t.cols = ints(0, 1, SHAPE2(t.n, 4));
    t.cut = ints(0, 1, SHAPE1(t.segments + 1));
    int32_t *qpos = t.qpos.data, *rows = t.rows.data, *cols = t.cols.data, *cut = t.cut.data;
    for (int64_t i = 0; i < t.n; i++)
        qpos[i] = (int32_t)i;
    int64_t first = p->front;
    for (int s = 0; s < t.segments; s++) {
        int64_t end = first + (p->length[s] > 0 ? p->length[s] : 0);
        cut[s] = (int32_t)first;
        for (int64_t i = first; i < end; i++) {
            rows[2 * i] = (int32_t)first;
            rows[2 * i + 1] = (int32_t)(p->mask == VLA_MASK_CAUSAL ? i + 1 : end);
            cols[4 * i] = (int32_t)(p->mask == VLA_MASK_CAUSAL ? i : first);
            cols[4 * i + 1] = (int32_t)end;
        }
        first = end;
    }
    cut[t.segments] = (int32_t)first;
    return t;
}

static int64_t longest(const problem *p)
{
    int64_t most = 1;
    for (int s = 0; s < MOST_SEGMENTS && p->length[s]; s++)
        most = p->length[s] > most ? p->length[s] : most;
    return most;
}

/* Columns of q, k, v (or their gradients): result, first column, width. */
typedef struct part {
    int result;
    int64_t first, width;
} part;

static part part_of(const problem *p, int i)
{
    int64_t wide = (int64_t)p->heads * p->dim, narrow = (int64_t)p->kv_heads * p->dim;
    return (part){p->packed ? 0 : i, !p->packed || i == 0 ? 0 : i == 1 ? wide : wide + narrow, i == 0 ? wide : narrow};
}

/* A part of the operands or of the gradients: its first element and the distance of rows. */
typedef struct view {
    float *at;
    int64_t stride;
} view;

static view widened(const problem *p, const tensor *t, int i)
{
    part of = part_of(p, i);
    const tensor *x = &t[of.result];
    float *all = case_alloc((size_t)x->n * sizeof *all);
    for (int64_t k = 0; k < x->n; k++)
        all[k] = (float)get_real(x->dtype, x->data, k);
    return (view){all + of.first, x->shape[1]};
}

static view plain(const tensor *x)
{
    problem alone = {.packed = 1};
    return widened(&alone, x, 0);
}

static sums sums_like(const tensor *t)
{
    sums s = {case_alloc((size_t)t->n * sizeof(double)), case_alloc((size_t)t->n * sizeof(double))};
    memset(s.squares, 0, (size_t)t->n * sizeof(double));
    memset(s.absolute, 0, (size_t)t->n * sizeof(double));
    return s;
}

static sums sums_from(const sums *s, int64_t i)
{
    return (sums){s->squares + i, s->absolute + i};
}

/* dim terms: factor x[c], whose size is that of `size` |x[c]|; square: of the factor. */
static void add(sums to, int64_t dim, const float *x, double square, double size)
{
    for (int64_t c = 0; c < dim; c++) {
        to.squares[c] += square * (double)x[c] * (double)x[c];
        to.absolute[c] += size * fabs((double)x[c]);
    }
}

static double product(int64_t dim, const float *a, const float *b, double *size, double *squares)
{
    double sum = 0, absolute = 0, square = 0;
    for (int64_t c = 0; c < dim; c++) {
        double x = (double)a[c] * (double)b[c];
        sum += x;
        absolute += fabs(x);
        square += x * x;
    }
    *size = absolute;
    *squares = square;
    return sum;
}

/* The terms of all results, and the largest sum of absolute products of a row's and head's scores. qkv: operands; dy, o as
 * stored; grad: the gradients' tensors. */
static void weigh(const problem *p, const tables *t, const tensor *qkv, const tensor *dy, const tensor *o, const float *lse, sums *of_o,
                  sums *of_grad, double *score, const tensor *grad)
{
    const int32_t *rows = t->rows.data;
    int64_t dim = p->dim, wide = (int64_t)p->heads * dim;
    double scale = 1 / sqrt((double)dim);
    view q = widened(p, qkv, 0), k = widened(p, qkv, 1), v = widened(p, qkv, 2), y = plain(dy), out = plain(o);
    part to_q = part_of(p, 0), to_k = part_of(p, 1), to_v = part_of(p, 2);
    for (int64_t i = 0; i < t->n; i++)
        for (int h = 0; h < p->heads; h++) {
            int64_t col = h * dim, kv = h / (p->heads / p->kv_heads) * dim;
            const float *my_q = q.at + i * q.stride + col, *my_y = y.at + i * wide + col;
            double around, walk, most = 0, delta = product(dim, my_y, out.at + i * wide + col, &around, &walk);
            for (int64_t j = rows[2 * i]; j < rows[2 * i + 1]; j++) {
                const float *my_k = k.at + j * k.stride + kv, *my_v = v.at + j * v.stride + kv;
                double size, dp_size, unused, x = product(dim, my_q, my_k, &size, &unused), dp = product(dim, my_y, my_v, &dp_size, &unused);
                most = fmax(most, size * scale);
                double prob = exp(x * scale - (double)lse[i * p->heads + h]);
                double ds = scale * prob * (dp - delta), ds_size = scale * prob * (dp_size + around);
                double noise = scale * scale * walk * prob;
                add(sums_from(of_o, i * wide + col), dim, my_v, prob * prob, prob);
                add(sums_from(&of_grad[to_q.result], i * grad[to_q.result].shape[1] + to_q.first + col), dim, my_k,
                    ds * ds + noise, ds_size);
                add(sums_from(&of_grad[to_k.result], j * grad[to_k.result].shape[1] + to_k.first + kv), dim, my_q,
                    ds * ds + noise * prob, ds_size);
                add(sums_from(&of_grad[to_v.result], j * grad[to_v.result].shape[1] + to_v.first + kv), dim, my_y, prob * prob, prob);
            }
            score[i * p->heads + h] = most;
        }
}

static int near(const char *name, const tensor *t, const void *got, const float *want, const sums *s)
{
    double u = t->dtype == VLA_BF16 ? 0x1p-9 : 0, error = 0, walk = 0, terms = 0;
    int64_t cols = t->shape[1];
    for (int64_t i = 0; i < t->n; i++) {
        double w = (double)want[i], g = get_real(t->dtype, got, i), e = fabs(g - w);
        double allowed = 2 * u * (sqrt(s->squares[i]) * 4 + fabs(w)) + 0x1p-16 * s->absolute[i];
        allowed = fmin(allowed, 2 * u * (s->absolute[i] + fabs(w)) + 0x1p-16 * s->absolute[i]);
        if (!(e <= allowed)) {
            fail("%s, row %lld, column %lld is %.9g, the twin has %.9g; %.3g off, %.3g allowed", name, (long long)(i / cols),
                 (long long)(i % cols), g, w, e, allowed);
            return 0;
        }
        error += e * e;
        walk += s->squares[i] + w * w;
        terms += s->absolute[i] * s->absolute[i];
    }
    if (!(sqrt(error) <= 2 * u * sqrt(walk) + 0x1p-17 * sqrt(terms))) {
        fail("%s: norm of the error %.4g, allowed %.4g", name, sqrt(error), 2 * u * sqrt(walk) + 0x1p-17 * sqrt(terms));
        return 0;
    }
    return 1;
}

static int near_lse(const problem *p, const float *got, const float *want, const double *score, int64_t n)
{
    for (int64_t i = 0; i < n * p->heads; i++) {
        double allowed = 0x1p-18 * (1 + score[i]);
        if (isfinite(want[i]) ? !(fabs((double)got[i] - (double)want[i]) <= allowed) : got[i] != want[i]) {
            fail("lse of row %lld, head %lld is %.9g, the twin has %.9g", (long long)(i / p->heads), (long long)(i % p->heads), (double)got[i],
                 (double)want[i]);
            return 0;
        }
    }
    return 1;
}

/* By implementation `which`; -1: not for such a call. Results' bytes, guards and operands checked. */
static int run_by(int which, op_case *c, void **out)
{
    vlai_cuda_call call = {.node = &c->node, .stream = test_state.stream, .multiprocessors = test_state.multiprocessors};
    buffer in[VLAI_MAX_INPUTS] = {0}, results[VLAI_MAX_OUTPUTS] = {0};
    fill_graph(c);
    for (int k = 0; k < c->n_in + c->n_out; k++) {
        const tensor *t = k < c->n_in ? &c->in[k] : &c->out[k - c->n_in];
        vlai_cuda_tensor *to = k < c->n_in ? &call.in[k] : &call.out[k - c->n_in];
        *to = (vlai_cuda_tensor){.dtype = t->dtype, .rank = t->rank, .elements = t->n};
        memcpy(to->shape, t->shape, sizeof t->shape);
        buffer *b = k < c->n_in ? &in[k] : &results[k - c->n_in];
        *b = buffer_of(k < c->n_in ? t->data : NULL, bytes_of(t), 0);
        to->data = b->data;
    }
    /* Kernels that are not the call's first choice may want room for o and do in one piece, which is not reserved for them. */
    size_t scratch = c->workspace(&c->graph, &c->node) + c->room;
    buffer workspace = buffer_of(NULL, scratch, 0);
    call.workspace = workspace.data;
    call.workspace_bytes = scratch;
    int fast = strcmp(vlai_cuda_attention_name(which), "cudnn") == 0, code = -1, ok = 1;
    vlai_cuda_context context = {.fast_attention = fast, .cudnn = &cudnn};
    vla_error err;
    if (vlai_cuda_attention_prepare(&context, &call, &err) != VLA_OK)
        fail("preparing fails"), ok = 0;
    for (int run = 0; ok && run < (fast || test_parts.brief ? 1 : 2); run++) {
        code = vlai_cuda_attention_by(which, &call);
        if (code == -1)
            break;
        int after = code ? code : vlai_device_synchronize(test_state.stream);
        if (after) {
            fail("%d: %s", after, vlai_device_error(after));
            if (!code)
                exit(1); /* the device's context is lost */
            ok = 0;
            break;
        }
        for (int k = 0; ok && k < c->n_in; k++) {
            void *bytes = bytes_from(&in[k]);
            if (!bytes || memcmp(bytes, c->in[k].data, in[k].bytes))
                ok = 0, fail("operand %d or its surroundings were written", k);
        }
        for (int k = 0; ok && k < c->n_out; k++) {
            void *bytes = bytes_from(&results[k]);
            if (!bytes)
                ok = 0, fail("writes outside result %d", k);
            else if (run && memcmp(bytes, out[k], results[k].bytes))
                ok = 0, fail("result %d: other bits the second time", k);
            out[k] = bytes;
        }
        if (ok && !bytes_from(&workspace))
            ok = 0, fail("writes outside its workspace of %zu bytes", scratch);
    }
    vlai_cuda_attention_release(&call);
    for (int k = 0; k < c->n_in; k++)
        vlai_device_free(in[k].memory);
    for (int k = 0; k < c->n_out; k++)
        vlai_device_free(results[k].memory);
    vlai_device_free(workspace.memory);
    return code == -1 && ok ? -1 : ok;
}

/* Ways to divide the rows: the end of each segment to the second stream, as the places of actions; each row by chance; the same and
 * both streams in the opposite order; none to the second; none to the first. */
typedef enum division { ENDS, CHANCE, BACKWARDS, FIRST_ALONE, SECOND_ALONE, DIVISIONS } division;

typedef struct streams {
    tensor map, at_a;
    int64_t rows[2];
} streams;

static streams divide(const tables *t, division by)
{
    streams s = {.map = ints(0, 2, SHAPE1(t->n))};
    int32_t *map = s.map.data;
    const int32_t *cut = t->cut.data;
    for (int64_t i = 0; by != CHANCE && by != BACKWARDS && i < t->n; i++)
        map[i] = by == SECOND_ALONE;
    for (int k = 0; by == ENDS && k < t->segments; k++)
        for (int32_t i = cut[k + 1] - 10; i < cut[k + 1]; i++)
            if (i >= cut[k] + 1)
                map[i] = 1;
    for (int64_t i = 0; i < t->n; i++) {
        int64_t row = s.rows[map[i]]++;
        map[i] = map[i] ? (int32_t)(-1 - row) : (int32_t)row;
    }
    for (int64_t i = 0; by == BACKWARDS && i < t->n; i++)
        map[i] = map[i] < 0 ? (int32_t)(-s.rows[1] - 1 - map[i]) : (int32_t)(s.rows[0] - 1 - map[i]);
    s.at_a = ints(0, 1, SHAPE1(s.rows[0]));
    for (int64_t i = 0; i < t->n; i++)
        if (map[i] >= 0)
            ((int32_t *)s.at_a.data)[map[i]] = (int32_t)i;
    return s;
}

/* Where row `row` lies in the tensors (or bytes) of the two streams. */
static void *row_at(const streams *s, void *const part[2], int64_t row, size_t bytes)
{
    int64_t at = ((const int32_t *)s->map.data)[row];
    return at < 0 ? (char *)part[1] + (size_t)(-1 - at) * bytes : (char *)part[0] + (size_t)at * bytes;
}

static void take_apart(const streams *s, const tensor *whole, tensor part[2])
{
    size_t bytes = (size_t)whole->shape[1] * vla_dtype_size(whole->dtype);
    for (int k = 0; k < 2; k++)
        part[k] = result(whole->dtype, SHAPE2(s->rows[k], whole->shape[1]));
    for (int64_t i = 0; i < s->map.n; i++)
        memcpy(row_at(s, (void *[2]){part[0].data, part[1].data}, i, bytes), (char *)whole->data + (size_t)i * bytes, bytes);
}

/* The cases of packed operands with their rows of o and do divided. */
static op_case divided(const op_case *c, const streams *s)
{
    op_case d = *c;
    tensor part[2];
    int backward = c->op == VLAI_OP_attention_qkv_grad;
    d.room = (backward ? 2 : 1) * (bytes_of(backward ? &c->in[2] : &c->out[0]) + 512);
    d.in[d.n_in++] = s->map;
    take_apart(s, backward ? &c->in[0] : &c->out[0], part);
    if (backward) {
        d.in[0] = part[0];
        d.in[d.n_in++] = part[1];
        take_apart(s, &c->in[2], part);
        d.in[2] = part[0];
        d.in[d.n_in++] = part[1];
    } else {
        d.in[d.n_in++] = s->at_a;
        d.out[0] = part[0];
        d.out[d.n_out++] = part[1];
    }
    return d;
}

/* Implementation `which` on the divided rows: the bits of `whole`, its results without a division; NULL: those of a library, close
 * to the twin's `want`. */
static int check_divided(int which, const op_case *c, const streams *s, void **whole, const float *want, const sums *of)
{
    op_case d = divided(c, s);
    void *out[VLAI_MAX_OUTPUTS] = {0};
    int backward = c->op == VLAI_OP_attention_qkv_grad, ran = run_by(which, &d, out);
    if (ran < 0)
        fail("runs without a division alone");
    if (ran <= 0)
        return 0;
    if (backward)
        return whole ? !memcmp(out[0], whole[0], bytes_of(&c->out[0])) || (fail("dqkv has other bits than without a division"), 0)
                     : near("dqkv", &c->out[0], out[0], want, of);
    size_t bytes = (size_t)c->out[0].shape[1] * vla_dtype_size(c->out[0].dtype);
    char *o = case_alloc(bytes_of(&c->out[0]));
    for (int64_t i = 0; i < s->map.n; i++)
        memcpy(o + (size_t)i * bytes, row_at(s, (void *[2]){out[0], out[2]}, i, bytes), bytes);
    if (!whole)
        return near("o", &c->out[0], o, want, of);
    if (memcmp(out[1], whole[1], bytes_of(&c->out[1])))
        return fail("lse has other bits than without a division"), 0;
    for (int64_t i = 0; i < s->map.n; i++)
        if (memcmp(o + (size_t)i * bytes, (char *)whole[0] + (size_t)i * bytes, bytes))
            return fail("row %lld of o, which lies at %d, has other bits than without a division", (long long)i, ((int32_t *)s->map.data)[i]), 0;
    return 1;
}

/* All divisions for the kernels that know of streams, one after another for the others, which get them put together. */
static void check_divisions(int which, const op_case *c, const tables *t, void **whole, const float *want, const sums *of)
{
    static const char *const names[DIVISIONS] = {"ends apart", "rows by chance", "backwards", "first stream alone", "second stream alone"};
    static int turn;
    int all = strcmp(vlai_cuda_attention_name(which), "groups") == 0, one = turn++ % DIVISIONS;
    size_t length = strlen(test_state.what);
    for (int by = all ? 0 : one; by < (all ? test_parts.few ? CHANCE + 1 : DIVISIONS : one + 1); by++) {
        streams s = divide(t, (division)by);
        snprintf(test_state.what + length, sizeof test_state.what - length, ", %s", names[by]);
        *(check_divided(which, c, &s, whole, want, of) ? &test_state.passed : &test_state.failed) += 1;
        used[which]++;
    }
    test_state.what[length] = 0;
}

static void check(const problem *p)
{
    tables t = make_tables(p);
    int64_t wide = (int64_t)p->heads * p->dim, narrow = (int64_t)p->kv_heads * p->dim;
    vlai_attrs a = {.attention = {.heads = p->heads, .kv_heads = p->kv_heads, .head_dim = p->dim, .scale = 1 / sqrt((double)p->dim),
                                  .mask = p->mask, .longest = longest(p)}};
    tensor qkv[PARTS], grad[PARTS], dy = reals(p->dtype, SHAPE2(t.n, wide)), o = result(p->dtype, SHAPE2(t.n, wide));
    tensor lse = result(VLA_F32, SHAPE2(t.n, p->heads));
    int parts = p->packed ? 1 : PARTS;
    for (int i = 0; i < parts; i++) {
        int64_t width = p->packed ? wide + 2 * narrow : i ? narrow : wide;
        qkv[i] = reals(p->dtype, SHAPE2(t.n, width));
        grad[i] = result(p->dtype, SHAPE2(t.n, width));
    }
    op_case forward = {.name = "forward", .op = p->packed ? VLAI_OP_attention_qkv : VLAI_OP_attention, .node = {.attrs = a},
                       .cpu = p->packed ? vlai_cpu_attention_qkv_float : vlai_cpu_attention_float,
                       .workspace = p->packed ? vlai_cuda_workspace_attention_qkv : vlai_cuda_workspace_attention, .n_out = 2, .out = {o, lse}};
    op_case backward = {.name = "backward", .op = p->packed ? VLAI_OP_attention_qkv_grad : VLAI_OP_attention_grad, .node = {.attrs = a},
                        .cpu = p->packed ? vlai_cpu_attention_qkv_grad_float : vlai_cpu_attention_grad_float,
                        .workspace = p->packed ? vlai_cuda_workspace_attention_qkv_grad : vlai_cuda_workspace_attention_grad, .n_out = parts};
    int n = 0, m = 0;
    backward.in[m++] = dy;
    for (int i = 0; i < parts; i++) {
        forward.in[n++] = qkv[i];
        backward.in[m++] = qkv[i];
        backward.out[i] = grad[i];
    }
    void *want[VLAI_MAX_OUTPUTS] = {0}, *want_grad[VLAI_MAX_OUTPUTS] = {0}, *widened[VLAI_MAX_INPUTS] = {0};
    const tensor list[4] = {t.qpos, t.rows, t.cols, t.cut};
    for (int i = 0; i < 4; i++)
        forward.in[n++] = list[i];
    forward.n_in = n;
    fill_graph(&forward);
    run_twin(&forward, want, widened);
    for (int64_t i = 0; i < o.n; i++)
        set_real(&o, i, (double)((float *)want[0])[i]);
    memcpy(lse.data, want[1], bytes_of(&lse));
    backward.in[m++] = o;
    backward.in[m++] = lse;
    for (int i = 0; i < 4; i++)
        backward.in[m++] = list[i];
    backward.n_in = m;
    fill_graph(&backward);
    run_twin(&backward, want_grad, widened);

    sums of_o = sums_like(&o), of_grad[PARTS];
    for (int i = 0; i < parts; i++)
        of_grad[i] = sums_like(&grad[i]);
    double *score = case_alloc((size_t)lse.n * sizeof *score);
    weigh(p, &t, qkv, &dy, &o, lse.data, &of_o, of_grad, score, grad);

    for (int i = 0; vlai_cuda_attention_name(i); i++) {
        const char *name = vlai_cuda_attention_name(i);
        void *out[VLAI_MAX_OUTPUTS] = {0};
        int own = strcmp(name, "cudnn") != 0;
        if (!wanted(name) || (!p->cudnn && strcmp(name, "cudnn") == 0))
            continue;
        snprintf(test_state.what, sizeof test_state.what, "%s, %s: %s, heads %d/%d of %d, %lld rows%s, forward", name, vla_dtype_name(p->dtype),
                 p->what, p->heads, p->kv_heads, p->dim, (long long)t.n, p->packed ? ", packed" : "");
        int ran = run_by(i, &forward, out);
        if (ran >= 0) {
            ran = ran && near("o", &o, out[0], want[0], &of_o) && near_lse(p, out[1], want[1], score, t.n);
            *(ran ? &test_state.passed : &test_state.failed) += 1;
            used[i]++;
            if (ran && p->packed)
                check_divisions(i, &forward, &t, own ? out : NULL, want[0], &of_o);
        }
        memcpy(strstr(test_state.what, ", forward"), ", backwar", 9);
        ran = run_by(i, &backward, out);
        if (ran >= 0) {
            static const char *const names[2][PARTS] = {{"dq", "dk", "dv"}, {"dqkv", "", ""}};
            for (int k = 0; ran && k < parts; k++)
                ran = near(names[p->packed][k], &grad[k], out[k], want_grad[k], &of_grad[k]);
            *(ran ? &test_state.passed : &test_state.failed) += 1;
            used[i]++;
            if (ran && p->packed)
                check_divisions(i, &backward, &t, own ? out : NULL, want_grad[0], &of_grad[0]);
        }
    }
    vlai_arena_fini(&test_state.arena);
    test_state.arena = (vlai_arena){0};
}

static const struct {
    const char *what;
    int64_t front, back, length[MOST_SEGMENTS];
} layouts[] = {
    {"one row", 0, 0, {1}},
    {"two rows outside one", 1, 1, {1}},
    {"a picture's windows, twice", 0, 0, {64, 64, 16, 64, 64, 16, 16, 16, 4, 64, 64, 16, 64, 64, 16, 16, 16, 4}},
    {"63, 64, 1, 2, 3, 15, 16, 17, 33 rows", 5, 3, {63, 64, 1, 2, 3, 15, 16, 17, 33}},
    {"rows of 1 and 17 by turns", 0, 70, {17, 1, 17, 1, 17, 1, 17, 1, 17, 1, 17, 1, 17, 1, 17, 1, 17, 1, 1, 1, 1, 2, 5, 7, 15, 4}},
    {"an empty segment", 66, 0, {48, -1, 64, 3}},
    {"65, 1, 64, 127, 128, 129 rows", 0, 0, {65, 1, 64, 127, 128, 129}},
    {"270 rows or so", 0, 9, {270, 251, 290, 1, 257}},
    {"324 rows twice", 0, 0, {324, 324}},
    {"1 to 64 rows, odd ones between", 7, 2, {36, 64, 9, 31, 32, 33, 49, 63, 5, 17, 23, 4, 1, 61, 64, 47, 13, 29}},
}, few_layouts[] = {
    {"64, 33, 16, 3 rows", 1, 2, {64, 33, 16, 3}},
    {"65, 1, 161 rows", 2, 1, {65, 1, 161}}, /* more tiles of 32 keys than the ring of the forward kernel has */
};

static const struct {
    int heads, kv_heads, dim;
} shapes[] = {{2, 2, 80}, {8, 1, 128}, {4, 2, 64}, {16, 2, 128}, {2, 2, 128}, {16, 1, 72},
              {1, 1, 16}, {3, 1, 40},  {2, 1, 96}, {2, 2, 72},   {3, 3, 56},  {6, 6, 80}};

int main(int argc, char **argv)
{
    const char *named[16];
    names = named;
    for (int i = 1; i < argc; i++) {
        if (!parts_option(argv[i]) && !parts_share(argv[i]) && n_names < (int)(sizeof named / sizeof *named))
            named[n_names++] = argv[i];
    }
    vlai_device_info info;
    int code = vlai_device_select(0, &info);
    if (code || (code = vlai_device_stream_create(&test_state.stream))) {
        printf("no GPU: %s\n0 passed, 1 failed\n", vlai_device_error(code));
        return 1;
    }
    test_state.multiprocessors = info.multiprocessors;
    for (size_t l = 0; test_parts.few && l < sizeof few_layouts / sizeof *few_layouts; l++)
        for (size_t s = 0; s < 8; s++)
            for (int causal = 0; causal < 2; causal++)
                for (int kind = 0; kind < 3; kind++) { /* bf16, bf16 in three pieces, fp32 */
                    if ((s > 2 && s != 5 && s != 7) || (kind && s > 1))
                        continue;
                    problem p = {.what = few_layouts[l].what, .dtype = kind == 2 ? VLA_F32 : VLA_BF16, .mask = causal ? VLA_MASK_CAUSAL : VLA_MASK_FULL,
                                 .heads = shapes[s].heads, .kv_heads = shapes[s].kv_heads, .dim = shapes[s].dim, .packed = kind != 1,
                                 .front = few_layouts[l].front, .back = few_layouts[l].back};
                    memcpy(p.length, few_layouts[l].length, sizeof p.length);
                    if (in_share())
                        check(&p);
                }
    for (size_t l = 0; !test_parts.few && l < sizeof layouts / sizeof *layouts; l++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int causal = 0; causal < 2; causal++)
                for (int packed = 0; packed < 2; packed++) {
                    bool far = l >= 6 && l < 9;
                    if (far && (s >= 3 || !packed))
                        continue; /* long segments take time on the CPU */
                    problem p = {.what = layouts[l].what, .dtype = VLA_BF16, .mask = causal ? VLA_MASK_CAUSAL : VLA_MASK_FULL,
                                 .heads = shapes[s].heads, .kv_heads = shapes[s].kv_heads, .dim = shapes[s].dim, .packed = packed,
                                 .front = layouts[l].front, .back = layouts[l].back};
                    memcpy(p.length, layouts[l].length, sizeof p.length);
                    p.cudnn = l % 2 && (s == 7 || (causal ? s == 1 : s == 0)) && (packed || l == 3);
                    if ((packed || s < 2) && in_share())
                        check(&p);
                    p.dtype = VLA_F32;
                    if (packed && !far && s < 4 && in_share())
                        check(&p);
                }
    for (int i = 0; vlai_cuda_attention_name(i); i++)
        printf("%-8s %ld runs\n", vlai_cuda_attention_name(i), used[i]);
    printf("cuDNN %d\n", vlai_cudnn_version());
    vlai_cudnn_close(cudnn);
    vlai_device_stream_destroy(test_state.stream);
    printf("%ld passed, %ld failed\n", test_state.passed, test_state.failed);
    return test_state.failed != 0;
}
