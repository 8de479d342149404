/* The update of many tensors in one launch (kernels/optim.h), against one launch per tensor and against the CPU twin.
 *
 *     test_cuda_optim
 *
 * Tensors of awkward sizes and slices of tensors, of every combination of types in turn, aligned and one element off, in one table. adamw: every
 * written operand has the twin's bits in both forms, usual numbers and strange ones (a NaN is a NaN). sum_squares: both forms agree to the bit, and with the twin to a few
 * units of fp32. Nothing else is written. Prints "N passed, N failed"; exit code 0 when nothing failed. */
#include "gpu/cuda_test.h"

#include "kernels/optim.h"

enum { MAX = 256, OPERAND_COUNT = 7 };

typedef struct mode {
    const char *name;
    vla_dtype weight, gradient, moment; /* gradient VLA_DTYPE_NONE: left out */
    int masters, stochastic;
} mode;

static const mode MODES[] = {
    {"masters", VLA_BF16, VLA_BF16, VLA_F32, 1, 0},
    {"masters, fp32 gradient", VLA_BF16, VLA_F32, VLA_F32, 1, 0},
    {"masters, no gradient", VLA_BF16, VLA_DTYPE_NONE, VLA_F32, 1, 0},
    {"bf16", VLA_BF16, VLA_BF16, VLA_BF16, 0, 0},
    {"bf16, fp32 gradient", VLA_BF16, VLA_F32, VLA_BF16, 0, 0},
    {"bf16, no gradient", VLA_BF16, VLA_DTYPE_NONE, VLA_BF16, 0, 0},
    {"stochastic", VLA_BF16, VLA_BF16, VLA_BF16, 0, 1},
    {"stochastic, fp32 gradient", VLA_BF16, VLA_F32, VLA_BF16, 0, 1},
    {"stochastic, no gradient", VLA_BF16, VLA_DTYPE_NONE, VLA_BF16, 0, 1},
    {"fp32", VLA_F32, VLA_F32, VLA_F32, 0, 0},
    {"fp32, bf16 gradient", VLA_F32, VLA_BF16, VLA_F32, 0, 0},
};
enum { MODE_COUNT = sizeof MODES / sizeof *MODES };

static const int64_t SIZES[] = {1, 7, 8, 9, 2047, 2049, 32767, 32768, 32769, 0, 65535, 65536, 65537, 3 * 32768 + 13};
enum { SIZE_COUNT = sizeof SIZES / sizeof *SIZES };

/* Where slices begin in their tensors: at cuts of chunks and between, at odd elements, and just below 2^32. */
static const int64_t FIRSTS[] = {0, 128, 0, 32768, 5, 32768 * 3 + 1024, 0, 4294967296 - 4096, 4294967296 + 7};
enum { FIRST_COUNT = sizeof FIRSTS / sizeof *FIRSTS };

typedef struct update {
    const mode *mode;
    vlai_node node;
    tensor in[OPERAND_COUNT];
    void *want[OPERAND_COUNT]; /* what the twin leaves there */
    buffer device[OPERAND_COUNT];
} update;

static const char *const OPERAND[OPERAND_COUNT] = {"the weight", "the gradient", "m", "v", "hyper", "clip", "the low bits"};

/* Zeros, subnormals, the ends of ranges, what overflows; from FINITE on what would make a master NaN, which its two halves cannot hold. */
static const float STRANGE[] = {0, -0.0f, 1e-45f, -3e-39f, 0x1p-126f, 0x1p-101f, 0x1p-100f, -0x1.8p-100f, 0x1p-99f, -0x1p-61f, 0x1p-60f, 1e-12f, 0x1p19f,
                                0x1p20f, 0x1.02p20f, -0x1p21f, 0x1p59f, 0x1p60f, -0x1.02p60f, 0x1p61f, 1e38f, -3e38f, INFINITY, -INFINITY, NAN};
enum { STRANGE_COUNT = sizeof STRANGE / sizeof *STRANGE, FINITE = STRANGE_COUNT - 4 };

/* Of packs of 8 one in four is words that no batch has met, one as it was, two with strange numbers among the others. */
static void make_strange(update *u)
{
    for (int64_t i = 0; i < u->in[0].n; i++) {
        int64_t pack = (i / 8 + i / 4096) % 4;
        for (int k = 0; pack && k < 4; k++) {
            float x = STRANGE[random_below(u->mode->masters ? FINITE : STRANGE_COUNT)];
            bool chosen = pack == 1 ? k > 0 : random_below(pack == 2 ? 4 : 32) == 0;
            if (!u->in[k].data || !chosen)
                continue;
            if (u->in[6].data && k == 0)
                ((uint16_t *)u->in[6].data)[i] = 0;
            set_real(&u->in[k], i, pack == 1 ? 0 : k == 3 ? fabsf(x) : x);
        }
    }
}

static void make(update *u, const mode *m, int64_t n, int index, int strange, tensor hyper, tensor clip)
{
    double eps = strange && index % 7 == 6 ? 1e-20 : 1e-8;
    *u = (update){.mode = m, .node = {.op = VLAI_OP_adamw, .attrs.adamw = {.beta1 = 0.9, .beta2 = 0.95, .eps = eps, .weight_decay = 0.1,
                                                                           .group = index % 2, .stochastic = m->stochastic,
                                                                           .first = FIRSTS[index % FIRST_COUNT],
                                                                           .key = (uint64_t)index * 0x9E3779B97F4A7C15u}}};
    u->in[0] = reals(m->weight, SHAPE1(n));
    u->in[1] = reals(m->gradient ? m->gradient : VLA_BF16, SHAPE1(n));
    u->in[2] = reals_of(m->moment, 1e-2, SHAPE1(n));
    u->in[3] = reals_of(m->moment, 1e-3, SHAPE1(n));
    for (int64_t i = 0; i < n; i++)
        set_real(&u->in[3], i, fabs(get_real(m->moment, u->in[3].data, i)));
    u->in[4] = hyper;
    u->in[5] = clip;
    u->in[6] = result(VLA_U16, SHAPE1(n));
    for (int64_t i = 0; m->masters && i < n; i++) /* below a zero, 0x8000 and more would stand for no number */
        ((uint16_t *)u->in[6].data)[i] = (uint16_t)(random_bits() & (((uint16_t *)u->in[0].data)[i] & 0x7FFF ? 0xFFFF : 0x7FFF));
    if (!m->gradient)
        u->in[1].data = NULL;
    if (!m->masters)
        u->in[6].data = NULL;
    if (strange)
        make_strange(u);
}

static void twin(update *u)
{
    vlai_cpu_call call = {.node = &u->node};
    for (int k = 0; k < OPERAND_COUNT; k++) {
        const tensor *t = &u->in[k];
        call.in[k] = (vlai_cpu_tensor){.dtype = t->dtype, .rank = 1, .shape = {t->n}, .elements = t->n};
        if (t->data) {
            call.in[k].data = u->want[k] = case_alloc(bytes_of(t));
            memcpy(u->want[k], t->data, bytes_of(t));
        }
    }
    vlai_cpu_adamw_float(&call);
}

/* Fresh operands on the device and the calls on them; hyper and clip are shared. */
static void upload(update *u, int count, int shifted, vlai_cuda_call *calls)
{
    for (int i = 0; i < count; i++) {
        calls[i] = (vlai_cuda_call){.node = &u[i].node, .stream = test_state.stream, .multiprocessors = test_state.multiprocessors};
        for (int k = 0; k < OPERAND_COUNT; k++) {
            const tensor *t = &u[i].in[k];
            if (!t->data)
                continue;
            if ((k == 4 || k == 5) && i > 0)
                u[i].device[k] = u[0].device[k];
            else
                u[i].device[k] = buffer_of(t->data, bytes_of(t), shifted && t->dtype != VLA_F64 ? vla_dtype_size(t->dtype) : 0);
            calls[i].in[k] = (vlai_cuda_tensor){.data = u[i].device[k].data, .dtype = t->dtype, .rank = 1, .shape = {t->n}, .elements = t->n};
        }
    }
}

static void drop(update *u, int count)
{
    for (int i = 0; i < count; i++)
        for (int k = 0; k < OPERAND_COUNT; k++)
            if (i == 0 || (k != 4 && k != 5))
                vlai_device_free(u[i].device[k].memory);
}

static int finished(void)
{
    int code = vlai_device_synchronize(test_state.stream);
    if (code) {
        fail("a kernel ends with %d: %s", code, vlai_device_error(code));
        exit(1); /* the device's context is lost */
    }
    return 1;
}

/* One table of the calls, launched `times` times. */
static int launch_table(const vlai_cuda_call *calls, int count, int times)
{
    vla_error err;
    vlai_optim_launch_plan plan;
    size_t bytes = vlai_optim_table_bytes(calls, (size_t)count);
    void *host = case_alloc(bytes);
    if (vlai_optim_table_fill(calls, (size_t)count, host, bytes, &plan, &err) != VLA_OK)
        return fail("the table: %s", err.message), 0;
    buffer table = buffer_of(host, bytes, 0);
    int ok = 1;
    for (int t = 0; ok && t < times; t++)
        ok = DEVICE(vlai_optim_launch(table.data, &plan, test_state.stream));
    ok = finished() && ok;
    if (ok && !bytes_from(&table))
        ok = 0, fail("writes outside the table");
    vlai_device_free(table.memory);
    return ok;
}

static int both_nan(vla_dtype dtype, const void *a, const void *b, int64_t i)
{
    return isnan(get_real(dtype, a, i)) && isnan(get_real(dtype, b, i));
}

static int adamw_agrees(const update *u, int count)
{
    for (int i = 0; i < count; i++)
        for (int k = 0; k < OPERAND_COUNT; k++) {
            if (!u[i].in[k].data)
                continue;
            const unsigned char *got = bytes_from(&u[i].device[k]), *want = u[i].want[k];
            if (!got)
                return fail("%s, %lld elements: writes outside %s", u[i].mode->name, (long long)u[i].in[0].n, OPERAND[k]), 0;
            size_t size = vla_dtype_size(u[i].in[k].dtype);
            for (size_t at = 0; at < bytes_of(&u[i].in[k]); at++)
                if (got[at] != want[at] && (u[i].in[k].dtype == VLA_U16 || !both_nan(u[i].in[k].dtype, got, want, (int64_t)(at / size))))
                    return fail("%s, %lld elements: %s %zu is %.9g, the twin has %.9g", u[i].mode->name, (long long)u[i].in[0].n, OPERAND[k],
                                at / size, get_real(u[i].in[k].dtype, got, (int64_t)(at / size)), get_real(u[i].in[k].dtype, want, (int64_t)(at / size))),
                           0;
        }
    return 1;
}

static tensor doubles(int64_t n, const double *x)
{
    tensor t = result(VLA_F64, SHAPE1(n));
    memcpy(t.data, x, (size_t)n * sizeof *x);
    return t;
}

static void settle(int ok)
{
    ok ? test_state.passed++ : test_state.failed++;
    vlai_arena_fini(&test_state.arena);
    test_state.arena = (vlai_arena){0};
}

static void adamw(int shifted, int skip, int strange)
{
    static update u[MAX];
    static vlai_cuda_call calls[MAX];
    int count = 0;
    tensor hyper = doubles(6, (double[]){0.271, 0.1426, 3, 12345678901, 1e-3, 3e-4}), clip = doubles(3, (double[]){4.1, 0.24, skip ? 0 : 1});
    for (int s = 0; s < SIZE_COUNT; s++)
        for (int m = 0; m < MODE_COUNT; m++, count++)
            make(&u[count], &MODES[m], SIZES[s], count, strange, hyper, clip);
    for (int i = 0; i < count; i++)
        twin(&u[i]);
    for (int form = 0; form < 2; form++) {
        snprintf(test_state.what, sizeof test_state.what, "adamw, %s%s%s%s", form ? "one launch per tensor" : "one table",
                 shifted ? ", one element off alignment" : "", skip ? ", not finite" : "", strange ? ", strange numbers" : "");
        upload(u, count, shifted, calls);
        int ok = 1;
        if (form == 0)
            ok = launch_table(calls, count, 1);
        for (int i = 0; form == 1 && ok && i < count; i++)
            ok = DEVICE(vlai_cuda_adamw(&calls[i]));
        ok = finished() && ok && adamw_agrees(u, count);
        drop(u, count);
        ok ? test_state.passed++ : test_state.failed++;
    }
    vlai_arena_fini(&test_state.arena);
    test_state.arena = (vlai_arena){0};
}

static void sum_squares(int shifted)
{
    static vlai_node nodes[MAX];
    static tensor x[MAX];
    static buffer device[MAX];
    static vlai_cuda_call calls[MAX];
    int count = 0, ok = 1;
    snprintf(test_state.what, sizeof test_state.what, "sum_squares%s", shifted ? ", one element off alignment" : "");
    for (int s = 0; s < SIZE_COUNT; s++)
        for (int t = 0; t < 2; t++, count++)
            x[count] = reals(t ? VLA_F32 : VLA_BF16, SHAPE1(SIZES[s]));
    double unwritten[MAX], want[MAX], *got[3];
    for (int i = 0; i < count; i++)
        unwritten[i] = -1;
    buffer norms[2] = {buffer_of(unwritten, (size_t)count * 8, 0), buffer_of(unwritten, (size_t)count * 8, 0)};
    buffer workspace = buffer_of(NULL, 1 << 20, 0);
    for (int i = 0; i < count; i++) {
        nodes[i] = (vlai_node){.op = VLAI_OP_sum_squares, .attrs.clip.index = count - 1 - i};
        device[i] = buffer_of(x[i].data, bytes_of(&x[i]), shifted ? vla_dtype_size(x[i].dtype) : 0);
        calls[i] = (vlai_cuda_call){.node = &nodes[i], .stream = test_state.stream, .multiprocessors = test_state.multiprocessors,
                                    .workspace = workspace.data, .workspace_bytes = workspace.bytes,
                                    .in = {{.data = device[i].data, .dtype = x[i].dtype, .rank = 1, .shape = {x[i].n}, .elements = x[i].n},
                                           {.data = norms[0].data, .dtype = VLA_F64, .rank = 1, .shape = {count}, .elements = count}}};
        vlai_cpu_call twin = {.node = &nodes[i], .workspace = case_alloc(64), .in = {{x[i].data, x[i].dtype, 1, {x[i].n}, x[i].n}, {want, VLA_F64, 1, {count}, count}}};
        vlai_cpu_sum_squares_float(&twin);
    }
    ok = launch_table(calls, count, 1);
    got[0] = bytes_from(&norms[0]);
    ok = ok && launch_table(calls, count, 3);
    got[1] = bytes_from(&norms[0]);
    for (int i = 0; i < count; i++)
        calls[i].in[1].data = norms[1].data;
    for (int i = 0; ok && i < count; i++)
        ok = DEVICE(vlai_cuda_sum_squares(&calls[i]));
    ok = finished() && ok;
    got[2] = bytes_from(&norms[1]);
    if (ok && (!got[0] || !got[1] || !got[2] || !bytes_from(&workspace)))
        ok = 0, fail("writes outside the norms or the workspace");
    for (int i = 0; ok && i < count; i++) {
        int64_t at = count - 1 - i;
        if (!(fabs(got[0][at] - want[at]) <= 1e-6 * want[at]))
            ok = 0, fail("%lld elements: %.17g, the twin has %.17g", (long long)x[i].n, got[0][at], want[at]);
        else if (got[1][at] != got[0][at] || got[2][at] != got[0][at])
            ok = 0, fail("%lld elements: %.17g, then %.17g, alone %.17g", (long long)x[i].n, got[0][at], got[1][at], got[2][at]);
    }
    for (int i = 0; i < count; i++)
        vlai_device_free(device[i].memory);
    vlai_device_free(norms[0].memory);
    vlai_device_free(norms[1].memory);
    vlai_device_free(workspace.memory);
    settle(ok);
}

/* Calls that cannot share a table are refused. */
static void refusals(void)
{
    vlai_node nodes[2] = {{.op = VLAI_OP_sum_squares}, {.op = VLAI_OP_adamw}};
    vlai_cuda_call calls[2] = {{.node = &nodes[0], .in = {{.dtype = VLA_BF16, .elements = 3}}}, {.node = &nodes[1], .in = {{.dtype = VLA_BF16, .elements = 3}}}};
    vlai_optim_launch_plan plan;
    vla_error err;
    size_t bytes = vlai_optim_table_bytes(calls, 2);
    void *host = case_alloc(bytes);
    snprintf(test_state.what, sizeof test_state.what, "refusals");
    int ok = vlai_optim_table_fill(calls, 2, host, bytes, &plan, &err) != VLA_OK && vlai_optim_table_fill(calls, 1, host, bytes, &plan, &err) != VLA_OK;
    nodes[0].op = VLAI_OP_matmul;
    ok = ok && vlai_optim_table_bytes(calls, 2) == 0 && vlai_optim_table_bytes(calls, 0) == 0;
    if (!ok)
        fail("a table of calls that do not belong together is taken");
    settle(ok);
}

int main(void)
{
    int count = 0;
    vlai_device_info info = {0};
    int code = vlai_device_count(&count);
    if (!code && count)
        code = vlai_device_select(0, &info);
    if (code || !count) {
        printf("no CUDA device: %s\n", code ? vlai_device_error(code) : "none found");
        return 77;
    }
    test_state.multiprocessors = info.multiprocessors;
    if (!DEVICE(vlai_device_stream_create(&test_state.stream)))
        return 2;
    for (int shifted = 0; shifted < 2; shifted++) {
        for (int skip = 0; skip < 2; skip++)
            adamw(shifted, skip, 0);
        adamw(shifted, 0, 1);
        sum_squares(shifted);
    }
    refusals();
    vlai_device_stream_destroy(test_state.stream);
    printf("%ld passed, %ld failed\n", test_state.passed, test_state.failed);
    return test_state.failed > 0;
}
