/* Where a step's time goes: by operation, and by kind of launch (one operation on one set of shapes). */
#include "bench.h"

#include "exec/plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { KINDS_SHOWN = 40, SHAPES = 200 };

/* Launches that take less are bound by latency: by that of the launch, of memory and of the last block, not by what they move. */
static const double SHORT_LAUNCH = 10e-6;

/* Of one operation, summed over its kinds of launches. Rates are of the launches that are not short; their bytes are 0 where the
 * device does not count them (the CPU). */
typedef struct family {
    vlai_op op;
    int64_t calls, short_calls;
    double seconds, flops, bytes;                              /* all */
    double rate_seconds, rate_flops, rate_bytes, copy_seconds; /* not short */
} family;

/* In a row where that was measured, else one by one. */
static double seconds_of(const vlai_profile_row *r)
{
    return r->in_a_row > 0 ? r->in_a_row : r->seconds;
}

static bool is_short(const vlai_profile_row *r)
{
    return seconds_of(r) < SHORT_LAUNCH * (double)r->calls;
}

static bool is_product(vlai_op op)
{
    return op == VLAI_OP_matmul || !strncmp(vlai_ops[op].name, "attention", 9);
}

/* Operations by falling time. */
static int families(const vlai_profile *p, family out[VLAI_OP_COUNT])
{
    int n = 0;
    for (int op = 0; op < VLAI_OP_COUNT; op++) {
        family f = {.op = (vlai_op)op, .calls = p->calls[op], .seconds = p->seconds[op]};
        for (size_t i = 0; i < p->n_rows; i++)
            if (p->rows[i].node->op == f.op) {
                const vlai_profile_row *r = &p->rows[i];
                f.flops += r->flops;
                f.bytes += r->bytes;
                if (is_short(r)) {
                    f.short_calls += r->calls;
                    continue;
                }
                f.rate_seconds += seconds_of(r);
                f.rate_flops += r->flops;
                f.rate_bytes += r->bytes;
                f.copy_seconds += r->copy_seconds;
            }
        if (!f.calls)
            continue;
        int at = n++;
        for (; at > 0 && out[at - 1].seconds < f.seconds; at--)
            out[at] = out[at - 1];
        out[at] = f;
    }
    return n;
}

static double sum_of(const vlai_profile *p)
{
    double sum = 0;
    for (int op = 0; op < VLAI_OP_COUNT; op++)
        sum += p->seconds[op];
    return sum;
}

static void print_shapes(const vla_graph *g, const vlai_node *node, char text[SHAPES])
{
    size_t n = 0;
    text[0] = 0;
    for (int i = 0; i < node->n_inputs + node->n_outputs; i++) {
        vla_value v = i < node->n_inputs ? node->inputs[i] : node->outputs[i - node->n_inputs];
        if (i == node->n_inputs && n < SHAPES)
            n += (size_t)snprintf(text + n, SHAPES - n, " ->");
        if (v == VLA_NONE || n >= SHAPES)
            continue;
        const vlai_value_info *info = vlai_value(g, v);
        n += (size_t)snprintf(text + n, SHAPES - n, " %s[", vla_dtype_name(info->dtype));
        for (int k = 0; k < info->rank && n < SHAPES; k++)
            n += (size_t)snprintf(text + n, SHAPES - n, "%s%lld", k ? "," : "", (long long)info->shape[k]);
        if (n < SHAPES)
            n += (size_t)snprintf(text + n, SHAPES - n, "]");
    }
}

/* The share of what bounds such work: products of the measured product, the rest of copies that move as much. NAN: not known. */
static double share(vlai_op op, double flops, double copy_seconds, double seconds, const vlai_device_facts *f)
{
    if (seconds <= 0)
        return NAN;
    if (is_product(op))
        return f->gemm_flops > 0 && flops > 0 ? flops / seconds / f->gemm_flops : NAN;
    return copy_seconds > 0 ? copy_seconds / seconds : NAN;
}

static void print_rate(vlai_op op, double flops, double bytes, double copy_seconds, double seconds, const vlai_device_facts *f)
{
    double s = share(op, flops, copy_seconds, seconds, f);
    if (seconds <= 0)
        printf(" %16s", "-");
    else if (is_product(op) && flops > 0)
        printf(" %8.1f TFLOP/s", flops / seconds * 1e-12);
    else if (bytes > 0)
        printf(" %8.0f GB/s   ", bytes / seconds * 1e-9);
    else
        printf(" %16s", "-");
    if (isnan(s))
        printf("          ");
    else
        printf("  %5.1f %% of %s", 100 * s, is_product(op) ? "GEMM" : "copy");
}

void bench_profile_print(const bench_row *row, const vlai_device_facts *facts)
{
    const vlai_profile *p = &row->profile;
    const vla_graph *g = bench_row_plan(row)->graph;
    family list[VLAI_OP_COUNT];
    int n = families(p, list);
    double sum = sum_of(p);
    printf("\n  operation                 calls   <10 us        ms    share         rate of the others\n");
    for (int i = 0; i < n; i++) {
        printf("  %-23s %7lld  %7lld %9.3f  %5.1f %%", vlai_ops[list[i].op].name, (long long)list[i].calls, (long long)list[i].short_calls, list[i].seconds * 1e3,
               100 * list[i].seconds / sum);
        if (p->rows)
            print_rate(list[i].op, list[i].rate_flops, list[i].rate_bytes, list[i].copy_seconds, list[i].rate_seconds, facts);
        putchar('\n');
    }
    printf("  matrix products alone: %.2f ms of a step of %.2f ms = %.0f %%, %.1f GFLOP/s\n", p->matmul_alone * 1e3, p->total * 1e3,
           100 * p->matmul_alone / p->total, p->flops_matmul / p->matmul_alone * 1e-9);
    if (p->rows)
        printf("  launches one by one: %.2f ms; the step %s %.2f ms = %.1f %%\n", sum * 1e3, sum > p->total ? "is shorter, work runs side by side:" : "idles for",
               fabs(p->total - sum) * 1e3, 100 * fabs(p->total - sum) / p->total);
    if (p->rows)
        printf("  kinds of launches: ms one by one; ms one behind the other, which the rate is of; copy: of as many bytes a launch; products: against the fastest algorithm of cuBLASLt\n");
    for (size_t i = 0; i < p->n_rows && i < KINDS_SHOWN; i++) {
        const vlai_profile_row *r = &p->rows[i];
        char shapes[SHAPES];
        print_shapes(g, r->node, shapes);
        printf("  %-20s x %-4lld %8.3f ms", vlai_ops[r->node->op].name, (long long)r->calls, r->seconds * 1e3);
        if (r->in_a_row > 0)
            printf(" %8.3f", r->in_a_row * 1e3);
        else
            printf(" %8s", "");
        print_rate(r->node->op, r->flops, r->bytes, r->copy_seconds, seconds_of(r), facts);
        if (r->of_fastest > 0)
            printf("  %5.1f %% of the fastest", 100 * r->of_fastest);
        printf(" %s\n", shapes);
    }
    putchar('\n');
}

json_t *bench_profile_json(const bench_row *row)
{
    const vlai_profile *p = &row->profile;
    const vla_graph *g = bench_row_plan(row)->graph;
    family list[VLAI_OP_COUNT];
    int n = families(p, list);
    json_t *ops = json_object(), *kinds = json_array();
    for (int i = 0; i < n; i++)
        json_object_set_new(ops, vlai_ops[list[i].op].name, json_pack("{s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "calls", (json_int_t)list[i].calls, "short_calls",
                            (json_int_t)list[i].short_calls, "ms", list[i].seconds * 1e3, "flops", list[i].flops, "bytes", list[i].bytes, "rate_ms",
                            list[i].rate_seconds * 1e3, "rate_flops", list[i].rate_flops, "rate_bytes", list[i].rate_bytes, "copy_ms", list[i].copy_seconds * 1e3));
    for (size_t i = 0; i < p->n_rows; i++) {
        char shapes[SHAPES];
        print_shapes(g, p->rows[i].node, shapes);
        json_array_append_new(kinds, json_pack("{s:s, s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "op", vlai_ops[p->rows[i].node->op].name, "shapes", shapes + (shapes[0] == ' '),
                                               "calls", (json_int_t)p->rows[i].calls, "ms", p->rows[i].seconds * 1e3, "flops", p->rows[i].flops, "bytes",
                                               p->rows[i].bytes, "in_a_row_ms", p->rows[i].in_a_row * 1e3, "copy_ms", p->rows[i].copy_seconds * 1e3, "of_fastest", p->rows[i].of_fastest));
    }
    return json_pack("{s:o, s:o, s:f, s:f, s:f, s:f}", "ops", ops, "kinds", kinds, "step_ms", p->total * 1e3, "launches_ms", sum_of(p) * 1e3, "matmul_alone_ms",
                     p->matmul_alone * 1e3, "matmul_share", p->matmul_alone / p->total);
}
