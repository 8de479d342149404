/* Where a step's time goes: by operation, and by kind of launch (one operation on one set of shapes). */
#include "bench.h"

#include "exec/plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { KINDS_SHOWN = 30, SHAPES = 160 };

/* Of one operation, summed over its kinds of launches; bytes 0 where the device does not count them (the CPU). */
typedef struct family {
    vlai_op op;
    int64_t calls;
    double seconds, flops, bytes;
} family;

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
                f.flops += p->rows[i].flops;
                f.bytes += p->rows[i].bytes;
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

/* The share of what bounds such work: products of the measured product, the rest of the measured copy. NAN: not known. */
static double share(vlai_op op, double flops, double bytes, double seconds, const vlai_device_facts *f)
{
    if (is_product(op))
        return f->gemm_flops > 0 && flops > 0 ? flops / seconds / f->gemm_flops : NAN;
    return f->copy_bytes > 0 && bytes > 0 ? bytes / seconds / f->copy_bytes : NAN;
}

static void print_rate(vlai_op op, double flops, double bytes, double seconds, const vlai_device_facts *f)
{
    double s = share(op, flops, bytes, seconds, f);
    if (is_product(op) && flops > 0)
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
    printf("\n  operation                 calls        ms    share         rate\n");
    for (int i = 0; i < n; i++) {
        printf("  %-23s %7lld %9.3f  %5.1f %%", vlai_ops[list[i].op].name, (long long)list[i].calls, list[i].seconds * 1e3, 100 * list[i].seconds / sum);
        if (p->rows)
            print_rate(list[i].op, list[i].flops, list[i].bytes, list[i].seconds, facts);
        putchar('\n');
    }
    printf("  matrix products alone: %.2f ms of a step of %.2f ms = %.0f %%, %.1f GFLOP/s\n", p->matmul_alone * 1e3, p->total * 1e3,
           100 * p->matmul_alone / p->total, p->flops_matmul / p->matmul_alone * 1e-9);
    if (p->rows)
        printf("  launches one by one: %.2f ms; the step %s %.2f ms = %.1f %%\n", sum * 1e3, sum > p->total ? "is shorter, work runs side by side:" : "idles for",
               fabs(p->total - sum) * 1e3, 100 * fabs(p->total - sum) / p->total);
    for (size_t i = 0; i < p->n_rows && i < KINDS_SHOWN; i++) {
        const vlai_profile_row *r = &p->rows[i];
        char shapes[SHAPES];
        print_shapes(g, r->node, shapes);
        printf("  %-20s x %-4lld %8.3f ms", vlai_ops[r->node->op].name, (long long)r->calls, r->seconds * 1e3);
        print_rate(r->node->op, r->flops, r->bytes, r->seconds, facts);
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
        json_object_set_new(ops, vlai_ops[list[i].op].name, json_pack("{s:I, s:f, s:f, s:f}", "calls", (json_int_t)list[i].calls, "ms", list[i].seconds * 1e3,
                                                                      "flops", list[i].flops, "bytes", list[i].bytes));
    for (size_t i = 0; i < p->n_rows; i++) {
        char shapes[SHAPES];
        print_shapes(g, p->rows[i].node, shapes);
        json_array_append_new(kinds, json_pack("{s:s, s:s, s:I, s:f, s:f, s:f}", "op", vlai_ops[p->rows[i].node->op].name, "shapes", shapes + (shapes[0] == ' '),
                                               "calls", (json_int_t)p->rows[i].calls, "ms", p->rows[i].seconds * 1e3, "flops", p->rows[i].flops, "bytes",
                                               p->rows[i].bytes));
    }
    return json_pack("{s:o, s:o, s:f, s:f, s:f, s:f}", "ops", ops, "kinds", kinds, "step_ms", p->total * 1e3, "launches_ms", sum_of(p) * 1e3, "matmul_alone_ms",
                     p->matmul_alone * 1e3, "matmul_share", p->matmul_alone / p->total);
}
