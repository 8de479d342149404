/* Runs a CUDA launcher beside its CPU twin on the same stored operands, and compares.
 *
 *     vlai_attrs a = {.fill = {.value = 2}};
 *     CHECK(scale, a, exact, OPERANDS(reals(VLA_BF16, SHAPE2(5, 24))), RESULTS(result(VLA_BF16, SHAPE2(5, 24))), .over = 1);
 *
 * A case runs with its operands aligned and one element off, twice each (--short: once), and once more with the result over an
 * operand where the plan may do that (not with --few). Wanted: results within the tolerance of the twin, the same bits every time,
 * and nothing else written: neither around results and workspace, nor in operands that the op does not name as written.
 *
 * Tolerances, per element of a result whose row (last axis) has largest value r and whose tensor has root mean square s:
 *     |got - want| <= rel max(|want|, s) + row max(r, s) + floor + roundings |want| 2^-8   (the last for bf16 results only)
 * floor is for results that are truly 0 because terms cancel: the precision of the terms.
 * A bf16 result of the same real number may be one unit in the last place (2^-8) away where the twin's fp32 value lies near
 * the middle of two, hence roundings = 1. exact: the bits of the twin. */
#ifndef VLA_CUDA_TEST_H
#define VLA_CUDA_TEST_H

#include "base/bf16.h"
#include "base/memory.h"
#include "cpu/cpu.h"
#include "cpu/workspace.h"
#include "exec/plan.h"
#include "gpu/parts.h"
#include "kernels/cuda.h"
#include "kernels/device.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHAPE1(a) 1, (int64_t[]){a}
#define SHAPE2(a, b) 2, (int64_t[]){a, b}

/* A tensor as it is stored; data NULL: an operand left out, or a result that nobody wants. */
typedef struct tensor {
    vla_dtype dtype;
    int rank;
    int64_t shape[VLA_MAX_RANK], n;
    void *data;
} tensor;

typedef struct tolerance {
    double rel, row, floor;
    int roundings; /* 0: one */
    int exact;
} tolerance;

enum { SPARE = 64 };

typedef struct device_state {
    void *stream;
    struct {
        void *memory;
        size_t bytes;
    } spare[SPARE]; /* device memory that is free for buffers of that size */
    int n_spare;
    int multiprocessors;
    long passed, failed;
    vlai_arena arena; /* of the case that runs */
    uint64_t random;
    char what[256];
} device_state;

static device_state test_state;

static const tolerance exact = {.exact = 1};

static inline tolerance relative(double rel)
{
    return (tolerance){.rel = rel};
}

static inline void fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    printf("FAIL %s: ", test_state.what);
    vprintf(format, args);
    printf("\n");
    va_end(args);
}

static inline void *case_alloc(size_t bytes)
{
    void *p = vlai_arena_alloc(&test_state.arena, bytes + 64);
    if (!p) {
        printf("out of memory\n");
        exit(2);
    }
    return p;
}

static inline uint64_t random_bits(void)
{
    test_state.random += 0x9E3779B97F4A7C15u; /* splitmix64 */
    uint64_t z = test_state.random;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static inline double random_value(void) /* uniform in [-2, 2) */
{
    return (double)((int64_t)(random_bits() >> 44) - (1 << 19)) / (1 << 18);
}

static inline int64_t random_below(int64_t n)
{
    return (int64_t)(random_bits() >> 1) % n;
}

static inline tensor result(vla_dtype dtype, int rank, const int64_t *shape)
{
    tensor t = {.dtype = dtype, .rank = rank, .n = 1};
    for (int k = 0; k < rank; k++) {
        t.shape[k] = shape[k];
        t.n *= shape[k];
    }
    t.data = case_alloc((size_t)t.n * vla_dtype_size(dtype));
    return t;
}

static inline void set_real(tensor *t, int64_t i, double x)
{
    if (t->dtype == VLA_BF16)
        ((uint16_t *)t->data)[i] = vlai_bf16_from_float((float)x);
    else if (t->dtype == VLA_F64)
        ((double *)t->data)[i] = x;
    else
        ((float *)t->data)[i] = (float)x;
}

static inline double get_real(vla_dtype dtype, const void *data, int64_t i)
{
    switch (dtype) {
    case VLA_BF16: return (double)vlai_bf16_to_float(((const uint16_t *)data)[i]);
    case VLA_F64: return ((const double *)data)[i];
    case VLA_F32: return (double)((const float *)data)[i];
    case VLA_I32: return ((const int32_t *)data)[i];
    case VLA_U16: return ((const uint16_t *)data)[i];
    default: return ((const uint8_t *)data)[i];
    }
}

static inline tensor reals_of(vla_dtype dtype, double factor, int rank, const int64_t *shape)
{
    tensor t = result(dtype, rank, shape);
    for (int64_t i = 0; i < t.n; i++)
        set_real(&t, i, factor * random_value());
    return t;
}

static inline tensor reals(vla_dtype dtype, int rank, const int64_t *shape)
{
    return reals_of(dtype, 1, rank, shape);
}

/* Integers in [low, high). */
static inline tensor ints(int64_t low, int64_t high, int rank, const int64_t *shape)
{
    tensor t = result(VLA_I32, rank, shape);
    for (int64_t i = 0; i < t.n; i++)
        ((int32_t *)t.data)[i] = (int32_t)(low + random_below(high - low));
    return t;
}

static inline int is_real(vla_dtype dtype)
{
    return dtype == VLA_BF16 || dtype == VLA_F32;
}

static inline size_t bytes_of(const tensor *t)
{
    return (size_t)t->n * vla_dtype_size(t->dtype);
}

enum { GUARD = 256, GUARD_BYTE = 0xFB }; /* as a number of any float type: far from any result, or NaN */

/* A device buffer of which the tensor's bytes lie `shift` bytes off alignment, guards on both sides. */
typedef struct buffer {
    void *memory, *data;
    size_t bytes, whole;
} buffer;

static inline int device_ok(int code, const char *call)
{
    if (code)
        fail("%s: %s", call, vlai_device_error(code));
    return code == 0;
}
#define DEVICE(call) device_ok(call, #call)

/* Device memory is taken and given back rarely: that takes longer than most cases. */
static inline void *device_take(size_t bytes)
{
    void *memory;
    for (int i = test_state.n_spare; i-- > 0;)
        if (test_state.spare[i].bytes == bytes) {
            memory = test_state.spare[i].memory;
            test_state.spare[i] = test_state.spare[--test_state.n_spare];
            return memory;
        }
    if (!DEVICE(vlai_device_alloc(bytes, &memory)))
        exit(2);
    return memory;
}

static inline void device_give(void *memory, size_t bytes)
{
    if (!memory)
        return;
    if (test_state.n_spare == SPARE)
        while (test_state.n_spare > 0)
            vlai_device_free(test_state.spare[--test_state.n_spare].memory);
    test_state.spare[test_state.n_spare].memory = memory;
    test_state.spare[test_state.n_spare++].bytes = bytes;
}

static inline buffer buffer_of(const void *host, size_t bytes, size_t shift)
{
    enum { MOST_SHIFT = 8 };
    buffer b = {.bytes = bytes, .whole = (bytes + MOST_SHIFT + 2 * GUARD + 255) / 256 * 256};
    unsigned char *copy = case_alloc(b.whole);
    memset(copy, GUARD_BYTE, b.whole);
    if (host)
        memcpy(copy + GUARD + shift, host, bytes);
    b.memory = device_take(b.whole);
    b.data = (char *)b.memory + GUARD + shift;
    DEVICE(vlai_device_upload(b.memory, copy, b.whole, test_state.stream));
    return b;
}

/* The tensor's bytes; NULL when something around them was written. */
static inline void *bytes_from(const buffer *b)
{
    unsigned char *copy = case_alloc(b->whole);
    size_t before = (size_t)((char *)b->data - (char *)b->memory);
    DEVICE(vlai_device_download(copy, b->memory, b->whole, test_state.stream));
    DEVICE(vlai_device_synchronize(test_state.stream));
    for (size_t i = 0; i < before; i++)
        if (copy[i] != GUARD_BYTE)
            return NULL;
    for (size_t i = before + b->bytes; i < b->whole; i++)
        if (copy[i] != GUARD_BYTE)
            return NULL;
    return copy + before;
}

typedef struct op_case {
    const char *name;
    vlai_op op;
    vlai_cpu_fn cpu;
    vlai_cuda_fn cuda;
    vlai_cuda_workspace_fn workspace;
    uint32_t writes, over; /* operands written; operands that a result may lie over */
    vlai_node node;
    tensor in[VLAI_MAX_INPUTS], out[VLAI_MAX_OUTPUTS];
    int n_in, n_out;
    tolerance within;
    double floors[VLAI_MAX_OUTPUTS]; /* added to within.floor, for one result each */
    int summed[VLAI_MAX_OUTPUTS];    /* j + 1: this result is the column sums of result j, as the device stored that; 0: none */
    const vlai_cuda_context *context; /* for operations that are prepared */
    int aligned_only;
    size_t room; /* scratch beyond the operation's own; test_cuda_attention */
    vlai_value_info values[VLAI_MAX_INPUTS + VLAI_MAX_OUTPUTS];
    vla_graph graph;
} op_case;

static inline void fill_graph(op_case *c)
{
    c->node.op = c->op;
    c->node.n_inputs = (int8_t)c->n_in;
    c->node.n_outputs = (int8_t)c->n_out;
    for (int k = 0; k < c->n_in + c->n_out; k++) {
        const tensor *t = k < c->n_in ? &c->in[k] : &c->out[k - c->n_in];
        c->values[k] = (vlai_value_info){.dtype = t->dtype, .rank = t->rank, .elements = t->n, .producer = -1};
        memcpy(c->values[k].shape, t->shape, sizeof t->shape);
        *(k < c->n_in ? &c->node.inputs[k] : &c->node.outputs[k - c->n_in]) = k < c->n_in && !t->data ? VLA_NONE : k;
    }
    for (int k = 0; k < c->n_in; k++)
        c->node.inputs[k] = k; /* the workspace tables look at shapes of operands that are there */
    c->graph = (vla_graph){.values = c->values, .n_values = (size_t)(c->n_in + c->n_out), .nodes = &c->node, .n_nodes = 1};
}

/* The twin's results, as floats (raw ops: as stored), and for written operands their new bytes. */
static inline void run_twin(const op_case *c, void **out, void **written)
{
    vlai_cpu_call call = {.node = &c->node};
    int raw = vlai_op_is_raw(c->op);
    for (int k = 0; k < c->n_in + c->n_out; k++) {
        const tensor *t = k < c->n_in ? &c->in[k] : &c->out[k - c->n_in];
        vlai_cpu_tensor *to = k < c->n_in ? &call.in[k] : &call.out[k - c->n_in];
        *to = (vlai_cpu_tensor){.dtype = t->dtype, .rank = t->rank, .elements = t->n};
        memcpy(to->shape, t->shape, sizeof t->shape);
        if (!t->data)
            continue;
        int widen = !raw && is_real(t->dtype);
        to->data = case_alloc(widen ? (size_t)t->n * 4 : bytes_of(t));
        if (widen)
            for (int64_t i = 0; i < t->n; i++)
                ((float *)to->data)[i] = (float)get_real(t->dtype, t->data, i);
        else if (bytes_of(t))
            memcpy(to->data, t->data, bytes_of(t));
        if (k >= c->n_in)
            out[k - c->n_in] = to->data;
        else
            written[k] = to->data;
    }
    size_t shared, each;
    vlai_cpu_workspace(&c->graph, &c->node, &shared, &each);
    call.workspace = case_alloc(shared);
    call.thread_workspace = case_alloc(each);
    call.workspace_per_thread = each;
    c->cpu(&call);
}

static inline int compare(const char *name, const tensor *t, const void *got, const void *want, int want_stored, tolerance within)
{
    int64_t cols = t->rank > 1 ? t->shape[t->rank - 1] : 1;
    vla_dtype stored = want_stored ? t->dtype : is_real(t->dtype) ? VLA_F32 : t->dtype;
    if (!is_real(t->dtype) && t->dtype != VLA_F64)
        within.exact = 1;
    double squares = 0;
    for (int64_t i = 0; i < t->n; i++) {
        double w = get_real(stored, want, i);
        squares += isfinite(w) ? w * w : 0;
    }
    double rms = t->n ? sqrt(squares / (double)t->n) : 0;
    double roundings = t->dtype == VLA_BF16 ? (within.roundings ? within.roundings : 1) * 0x1p-8 : 0;
    for (int64_t row = 0; cols && row < t->n / cols; row++) {
        double most = 0;
        for (int64_t c = 0; c < cols; c++) {
            double w = fabs(get_real(stored, want, row * cols + c));
            most = isfinite(w) && w > most ? w : most;
        }
        for (int64_t c = 0; c < cols; c++) {
            int64_t i = row * cols + c;
            double w = get_real(stored, want, i), g = get_real(t->dtype, got, i);
            int same;
            if (within.exact) {
                double rounded = t->dtype == VLA_BF16 ? (double)vlai_bf16_to_float(vlai_bf16_from_float((float)w)) : w;
                same = g == rounded || (isnan(g) && isnan(w));
            } else if (!isfinite(w)) {
                same = isnan(w) ? isnan(g) : g == w;
            } else {
                double allowed = within.rel * fmax(fabs(w), rms) + within.row * fmax(most, rms) + within.floor + roundings * fabs(w) + 1e-37;
                same = fabs(g - w) <= allowed;
            }
            if (!same) {
                fail("%s, row %lld, column %lld is %.9g, the twin has %.9g (tensor's rms %.3g, row's largest %.3g)", name, (long long)row,
                     (long long)c, g, w, rms, most);
                return 0;
            }
        }
    }
    return 1;
}

/* y [C] against the sums of x's columns. In fp32 no sum is a chain of more than 128 additions: each is good to 128 half units
 * (2^-24) of the sum of sizes. */
static inline int compare_sums(const char *name, const tensor *y, const void *got, const tensor *x, const void *values)
{
    int64_t cols = x->shape[1], rows = x->shape[0], chain = rows < 128 ? rows : 128;
    double *sum = case_alloc(2 * (size_t)cols * sizeof *sum), *size = sum + cols;
    memset(sum, 0, 2 * (size_t)cols * sizeof *sum);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            double v = get_real(x->dtype, values, i * cols + j);
            sum[j] += v;
            size[j] += fabs(v);
        }
    for (int64_t j = 0; j < cols; j++) {
        double g = get_real(y->dtype, got, j);
        double allowed = (double)chain * 0x1p-24 * size[j] + (y->dtype == VLA_BF16 ? 0x1p-8 * fabs(sum[j]) : 0x1p-23 * fabs(sum[j]));
        if (!(fabs(g - sum[j]) <= allowed))
            return fail("%s, column %lld is %.9g, and the result's column sums to %.9g (sizes to %.3g)", name, (long long)j, g, sum[j], size[j]), 0;
    }
    return 1;
}

/* One launch. over >= 0: result 0 lies over that operand. Returns the bytes of results and written operands, or NULL. */
static inline int run_device(const op_case *c, int shifted, int over, void **out, void **written)
{
    vlai_cuda_call call = {.node = &c->node, .stream = test_state.stream, .multiprocessors = test_state.multiprocessors};
    buffer in[VLAI_MAX_INPUTS] = {0}, results[VLAI_MAX_OUTPUTS] = {0};
    for (int k = 0; k < c->n_in + c->n_out; k++) {
        const tensor *t = k < c->n_in ? &c->in[k] : &c->out[k - c->n_in];
        vlai_cuda_tensor *to = k < c->n_in ? &call.in[k] : &call.out[k - c->n_in];
        *to = (vlai_cuda_tensor){.dtype = t->dtype, .rank = t->rank, .elements = t->n};
        memcpy(to->shape, t->shape, sizeof t->shape);
        if (!t->data)
            continue;
        if (k == c->n_in && over >= 0) {
            to->data = in[over].data;
            continue;
        }
        size_t shift = shifted && (is_real(t->dtype) || t->dtype == VLA_U16) ? vla_dtype_size(t->dtype) : 0;
        buffer b = buffer_of(k < c->n_in ? t->data : NULL, bytes_of(t), shift);
        *(k < c->n_in ? &in[k] : &results[k - c->n_in]) = b;
        to->data = b.data;
    }
    size_t wanted = c->workspace(&c->graph, &c->node);
    buffer workspace = buffer_of(NULL, wanted, 0);
    call.workspace = workspace.data;
    call.workspace_bytes = wanted;
    const vlai_cuda_preparer *preparer = &vlai_cuda_preparers[c->op];
    vla_error err = VLA_ERROR_INIT;
    int ok = !c->context || !preparer->prepare || preparer->prepare(c->context, &call, &err) == VLA_OK, code = 0;
    if (!ok)
        fail("%s", err.message);
    else if ((code = c->cuda(&call)))
        ok = 0, fail("the launcher returns %d: %s", code, vlai_device_error(code));
    code = vlai_device_synchronize(test_state.stream);
    if (c->context && preparer->release)
        preparer->release(&call);
    if (code) {
        fail("the kernel ends with %d: %s", code, vlai_device_error(code));
        exit(1); /* the device's context is lost */
    }
    if (ok && !bytes_from(&workspace))
        ok = 0, fail("writes outside its workspace of %zu bytes", wanted);
    for (int k = 0; ok && k < c->n_in; k++) {
        if (!in[k].memory)
            continue;
        void *bytes = bytes_from(&in[k]);
        written[k] = bytes;
        if (!bytes)
            ok = 0, fail("writes outside operand %d", k);
        else if (!(c->writes >> k & 1) && k != over && memcmp(bytes, c->in[k].data, in[k].bytes))
            ok = 0, fail("operand %d was written", k);
    }
    for (int k = 0; ok && k < c->n_out; k++) {
        if (!call.out[k].data)
            continue;
        out[k] = k == 0 && over >= 0 ? written[over] : bytes_from(&results[k]);
        if (!out[k])
            ok = 0, fail("writes outside result %d", k);
    }
    for (int k = 0; k < VLAI_MAX_INPUTS; k++)
        device_give(in[k].memory, in[k].whole);
    for (int k = 0; k < VLAI_MAX_OUTPUTS; k++)
        device_give(results[k].memory, results[k].whole);
    device_give(workspace.memory, workspace.whole);
    return ok;
}

static inline int check_case(op_case *c)
{
    void *want[VLAI_MAX_OUTPUTS] = {0}, *want_written[VLAI_MAX_INPUTS] = {0};
    fill_graph(c);
    run_twin(c, want, want_written);
    int raw = vlai_op_is_raw(c->op);
    for (int shifted = 0; shifted < (c->aligned_only ? 1 : 2); shifted++) {
        void *first[VLAI_MAX_OUTPUTS] = {0}, *first_written[VLAI_MAX_INPUTS] = {0};
        for (int run = 0; run < 3; run++) {
            void *out[VLAI_MAX_OUTPUTS] = {0}, *written[VLAI_MAX_INPUTS] = {0};
            int over = -1;
            for (int k = 0; run == 2 && k < c->n_in; k++)
                if (c->over >> k & 1 && c->in[k].data && c->in[k].dtype == c->out[0].dtype && c->in[k].n == c->out[0].n)
                    over = k;
            if (run == 2 && (over < 0 || test_parts.few))
                break;
            if (run == 1 && test_parts.brief)
                continue;
            if (!run_device(c, shifted, over, out, written))
                return 0;
            for (int k = 0; k < c->n_out; k++) {
                char name[48];
                snprintf(name, sizeof name, "%sresult %d", shifted ? "one element off alignment: " : "", k);
                if (!out[k])
                    continue;
                if (run == 0) {
                    first[k] = out[k];
                    tolerance within = c->within;
                    within.floor += c->floors[k];
                    int of = c->summed[k] - 1;
                    if (of >= 0 ? !compare_sums(name, &c->out[k], out[k], &c->out[of], out[of]) : !compare(name, &c->out[k], out[k], want[k], raw, within))
                        return 0;
                } else if (memcmp(first[k], out[k], bytes_of(&c->out[k]))) {
                    int64_t at = 0, differ = 0;
                    for (int64_t i = c->out[k].n; i-- > 0;)
                        if (get_real(c->out[k].dtype, first[k], i) != get_real(c->out[k].dtype, out[k], i))
                            at = i, differ++;
                    return fail("%s: other bits in run %d%s: %lld of %lld differ, element %lld was %.9g and is %.9g", name, run + 1, over >= 0 ? ", in place" : "",
                                (long long)differ, (long long)c->out[k].n, (long long)at, get_real(c->out[k].dtype, first[k], at),
                                get_real(c->out[k].dtype, out[k], at)), 0;
                }
            }
            for (int k = 0; run < 2 && k < c->n_in; k++) {
                if (!(c->writes >> k & 1) || !c->in[k].data)
                    continue;
                char name[48];
                snprintf(name, sizeof name, "%soperand %d", shifted ? "one element off alignment: " : "", k);
                if (run == 0) {
                    first_written[k] = written[k];
                    if (!compare(name, &c->in[k], written[k], want_written[k], raw, c->within))
                        return 0;
                } else if (memcmp(first_written[k], written[k], bytes_of(&c->in[k]))) {
                    return fail("%s: other bits in run %d", name, run + 1), 0;
                }
            }
        }
    }
    return 1;
}

static inline const char *shapes_text(const op_case *c)
{
    static char text[200];
    int n = 0;
    text[0] = 0;
    for (int k = 0; k < c->n_in + c->n_out && n < 170; k++) {
        const tensor *t = k < c->n_in ? &c->in[k] : &c->out[k - c->n_in];
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%s%s", k == c->n_in ? " -> " : k ? ", " : "", t->data ? "" : "no ",
                      vla_dtype_name(t->dtype));
        for (int d = 0; d < t->rank && n < 180; d++)
            n += snprintf(text + n, sizeof text - (size_t)n, "%s%lld%s", d ? "," : "[", (long long)t->shape[d], d == t->rank - 1 ? "]" : "");
    }
    return text;
}

/* With --few, of the cases that are alike in the operation, types, operands that are there, columns in whole vectors or not (in norms,
 * sums and losses also how many, by powers of 2 from 256 on), some rows or many, the head's size and mask of attention, and the form of
 * a product: the first. Left out are cases with something empty or of one row, and attention over many rows. */
static inline bool is_new_kind(const op_case *c)
{
    enum { KINDS = 1 << 14, MANY = 512, NARROW = 256 };
    static uint64_t seen[KINDS];
    static const vlai_op by_columns[] = {VLAI_OP_rms_norm, VLAI_OP_rms_norm_grad, VLAI_OP_rms_norm_backward, VLAI_OP_rms_norm_grad_weight,
                                         VLAI_OP_row_sum,  VLAI_OP_col_sum,       VLAI_OP_cross_entropy,     VLAI_OP_cross_entropy_grad};
    bool attends = c->op == VLAI_OP_attention || c->op == VLAI_OP_attention_grad || c->op == VLAI_OP_attention_qkv ||
                   c->op == VLAI_OP_attention_qkv_grad;
    bool columns = false;
    for (size_t i = 0; i < sizeof by_columns / sizeof *by_columns; i++)
        columns |= c->op == by_columns[i];
    uint64_t h = 1469598103934665603u;
#define KIND_OF(x) h = (h ^ (uint64_t)(x)) * 1099511628211u
    KIND_OF(c->op);
    KIND_OF(c->context != NULL);
    int64_t most_rows = 0, most_cols = 0;
    for (int k = 0; k < c->n_in + c->n_out; k++) {
        const tensor *t = k < c->n_in ? &c->in[k] : &c->out[k - c->n_in];
        int64_t cols = t->rank > 1 ? t->shape[t->rank - 1] : 1, rows = cols ? t->n / cols : 0;
        most_rows = rows > most_rows ? rows : most_rows;
        most_cols = cols > most_cols ? cols : most_cols;
        if (t->data && t->n == 0)
            return false;
        KIND_OF(k < c->n_in);
        KIND_OF(t->data ? (int)t->dtype + 1 : 0);
    }
    if (most_rows < 2 || (attends && most_rows > MANY))
        return false;
    KIND_OF(most_rows > MANY);
    KIND_OF(most_cols % 8 == 0);
    for (int64_t n = most_cols; columns && n >= NARROW; n /= 2)
        KIND_OF(1);
    if (attends) {
        KIND_OF(c->node.attrs.attention.mask);
        KIND_OF(c->node.attrs.attention.head_dim);
    } else if (c->op == VLAI_OP_matmul) {
        KIND_OF(c->node.attrs.matmul.transpose_a * 2 + c->node.attrs.matmul.transpose_b);
    }
#undef KIND_OF
    size_t at = h % KINDS;
    while (seen[at] && seen[at] != h)
        at = (at + 1) % KINDS;
    bool is_new = !seen[at];
    seen[at] = h;
    return is_new;
}

static inline void run_case(op_case c)
{
    if ((!test_parts.few || is_new_kind(&c)) && in_share()) {
        snprintf(test_state.what, sizeof test_state.what, "%s %s", c.name, shapes_text(&c));
        if (check_case(&c))
            test_state.passed++;
        else
            test_state.failed++;
    }
    vlai_arena_fini(&test_state.arena);
    test_state.arena = (vlai_arena){0};
}

#define COUNT(...) (int)(sizeof((tensor[]){__VA_ARGS__}) / sizeof(tensor))
#define OPERANDS(...) .in = {__VA_ARGS__}, .n_in = COUNT(__VA_ARGS__)
#define RESULTS(...) .out = {__VA_ARGS__}, .n_out = COUNT(__VA_ARGS__)
/* CHECK(op, {attributes}, tolerance, OPERANDS(...), RESULTS(...)) */
#define CHECK(op_, attrs_, within_, ...)                                                                                       \
    run_case((op_case){.name = #op_, .op = VLAI_OP_##op_, .cpu = vlai_cpu_##op_##_float, .cuda = vlai_cuda_##op_,               \
                       .workspace = vlai_cuda_workspace_##op_, .node = {.attrs = attrs_}, .within = within_, __VA_ARGS__})

#endif
