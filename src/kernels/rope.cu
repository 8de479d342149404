/* Rotary tables and rotation, and the sinusoid of the flow time.
 *
 *     rope_table  positions [A,N] -> cos, sin [N,half]: angle = fp32 position x fp32 frequency; frequencies are computed on
 *                 the host as the CPU twin does; cos and sin of the fp32 angle in double, rounded once
 *     rope        x [N, heads D], cos, sin [N, D/2] -> y_i = x_i c - x_{i+D/2} s, y_{i+D/2} = x_{i+D/2} c + x_i s
 *     qkv_rope    a [Na, W], b [Nb, W], map, cos, sin -> y [Na+Nb, W]: row map[i] of a, or -1 - map[i] of b, its first heads rotated
 *     qkv_rope_grad  d [N, W], cos, sin, at_a, at_b   -> da, db: the rows at those places, rotated back; their column sums
 *     sinusoid    t [N] -> [N, dim] = sin(t f_k) | cos(t f_k), f_k = exp(-k ln(period) / (dim/2 - 1))
 *
 * rope: a thread takes V pairs; x is read and written once, the tables' row stays in cache over the heads. 2 N heads D
 * elements; expected 0.85 of copy bandwidth. y may lie over x. qkv_rope: 2 N W elements, or 2 N heads D where the result lies
 * over a: columns that are not rotated then stay where they are. With column sums those are read all the same: the tower's rows
 * by a warp each (kernels/rope_rows.cuh), from compute capability 9.0 on; else a block goes down a part of the rows of one result in
 * a strip of 32 packs of pairs, whose sums stay in registers. The others are small. */
#include "kernels/columns.cuh"
#include "kernels/rope_rows.cuh"

#include <math.h>

namespace {

enum { TABLE = 256 };

/* Frequencies of up to TABLE pairs, passed by value. */
struct frequencies {
    float f[TABLE];
    uint8_t axis[TABLE];
};

template <class C>
__global__ void __launch_bounds__(THREADS)
    table_kernel(const int32_t *position, __grid_constant__ const frequencies table, C *c, C *s, int64_t n, int first, int count, int half)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n * count)
        return;
    int64_t row = divide(i, count);
    int pair = (int)(i - row * count);
    float angle = __fmul_rn((float)position[table.axis[pair] * n + row], table.f[pair]);
    double sine, cosine;
    sincos((double)angle, &sine, &cosine);
    if (c)
        c[row * half + first + pair] = from_float<C>((float)cosine);
    if (s)
        s[row * half + first + pair] = from_float<C>((float)sine);
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    sinusoid_kernel(const T *t, __grid_constant__ const frequencies table, T *y, int64_t n, int first, int count, int half)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n * count)
        return;
    int64_t row = divide(i, count);
    int k = (int)(i - row * count);
    float angle = __fmul_rn(to_float(t[row]), table.f[k]);
    double sine, cosine;
    sincos((double)angle, &sine, &cosine);
    y[row * 2 * half + first + k] = from_float<T>((float)sine);
    y[row * 2 * half + half + first + k] = from_float<T>((float)cosine);
}

/* groups: packs of V pairs in the matrix; per_row of them in a row, per_head in a head. */
template <class X, class C, class Y, int V>
__global__ void __launch_bounds__(THREADS)
    rope_kernel(const X *x, const C *c, const C *s, Y *y, int64_t groups, int64_t per_row, int per_head, int half, float sign)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= groups)
        return;
    int64_t row = divide(i, per_row);
    int in_row = (int)(i - row * per_row), head = in_row / per_head, pair = (in_row - head * per_head) * V;
    int64_t at = row * per_row * V * 2 + (int64_t)head * 2 * half + pair;
    pack<X, V> pa, pb;
    pack<C, V> pc, ps;
    pa.load(x + at);
    pb.load(x + at + half);
    pc.load(c + row * half + pair);
    ps.load(s + row * half + pair);
    float a[V], b[V], cosine[V], sine[V];
    pa.get(a);
    pb.get(b);
    pc.get(cosine);
    ps.get(sine);
#pragma unroll
    for (int k = 0; k < V; k++) {
        float u = a[k], v = b[k], w = sign * sine[k];
        a[k] = u * cosine[k] - v * w;
        b[k] = v * cosine[k] + u * w;
    }
    pack<Y, V> ya, yb;
    ya.set(a);
    yb.set(b);
    ya.store(y + at);
    yb.store(y + at + half);
}

/* Where the rows of qkv_rope come from and where those of its gradient go. Backward: out_a, then out_b. */
template <class X> struct rope_route {
    const X *a, *b;
    X *out_a, *out_b;
    const int32_t *map, *at_a, *at_b;
    int64_t rows_a, rows_b; /* forward: of a and b; backward: of out_a and out_b */
    int64_t rows;           /* backward: of a */
    int64_t cols;
    bool backward;

    /* Row i of all results: source row (null: none), target row, and the tables' row. */
    __device__ void find(int64_t i, const X *&from, X *&to, int64_t &table) const
    {
        if (!backward) {
            int64_t at = map ? map[i] : i, at_b_row = -1 - at;
            from = at >= 0 ? (at < rows_a ? a + at * cols : nullptr) : at_b_row < rows_b ? b + at_b_row * cols : nullptr;
            to = out_a + i * cols;
            table = i;
            return;
        }
        bool second = i >= rows_a;
        int64_t local = second ? i - rows_a : i;
        const int32_t *index = second ? at_b : at_a;
        table = index ? index[local] : local;
        from = table >= 0 && table < rows ? a + table * cols : nullptr;
        to = (second ? out_b : out_a) + local * cols;
    }
};

/* V pairs of a row: columns at + i and at + apart + i, which are (j, j + half) of a rotated head, from its pair `pair` on, or
 * (j, j + rest/2) of the columns behind the heads. Of the groups of a row the first `rotated` are rotated. */
struct pairs {
    int at, apart, pair;
};

template <int V> __device__ inline pairs pairs_of(int group, int rotated, int half, int rest)
{
    int per_head = half / V, head = group / per_head, pair = (group - head * per_head) * V;
    if (group < rotated)
        return {head * 2 * half + pair, half, pair};
    return {rotated / per_head * 2 * half + (group - rotated) * V, rest / 2, 0};
}

template <class X, class C, int V> __device__ inline void rotate(pack<X, V> &a, pack<X, V> &b, const C *c, const C *s, float sign)
{
    pack<C, V> pc, ps;
    pc.load(c);
    ps.load(s);
    float u[V], v[V], cosine[V], sine[V];
    a.get(u);
    b.get(v);
    pc.get(cosine);
    ps.get(sine);
#pragma unroll
    for (int k = 0; k < V; k++) {
        float x = u[k], y = v[k], w = sign * sine[k];
        u[k] = x * cosine[k] - y * w;
        v[k] = y * cosine[k] + x * w;
    }
    a.set(u);
    b.set(v);
}

/* A thread takes one group of one row. */
template <class X, class C, int V>
__global__ void __launch_bounds__(THREADS)
    qkv_rope_kernel(__grid_constant__ const rope_route<X> route, const C *c, const C *s, int64_t groups, int per_row, int rotated, int half,
                    int rest, float sign)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= groups)
        return;
    int64_t row = divide(i, per_row), table;
    int in_row = (int)(i - row * per_row);
    const X *from;
    X *to;
    route.find(row, from, to, table);
    pairs my = pairs_of<V>(in_row, rotated, half, rest);
    pack<X, V> pa, pb;
    if (!from) {
        float zero[V] = {0};
        pa.set(zero);
        pb.set(zero);
    } else {
        pa.load(from + my.at);
        pb.load(from + my.at + my.apart);
        if (in_row < rotated)
            rotate<X, C, V>(pa, pb, c + table * half + my.pair, s + table * half + my.pair, sign);
    }
    pa.store(to + my.at);
    pb.store(to + my.at + my.apart);
}

enum { V = 8, WARPS = THREADS / WARP, RESIDENT = 3 * 132 };

/* Strips of 32 groups, and parts of the rows of both results: as many blocks as are resident, three on each of 132
 * multiprocessors. */
struct row_parts {
    int64_t strips, rows, a, b; /* rows of a part; parts of da and of db */
};

row_parts row_parts_of(int64_t rows_a, int64_t rows_b, int64_t cols)
{
    row_parts p;
    p.strips = (cols + 2 * V * WARP - 1) / (2 * V * WARP);
    int64_t wanted = (p.strips ? RESIDENT / p.strips : 0) - (rows_b > 0), least = 4 * WARPS;
    p.rows = wanted > 1 ? (rows_a + rows_b + wanted - 1) / wanted : rows_a + rows_b;
    p.rows = p.rows > least ? p.rows : least;
    p.a = (rows_a + p.rows - 1) / p.rows;
    p.b = (rows_b + p.rows - 1) / p.rows;
    return p;
}

/* Backward, and partial [parts of da, then of db, W]. In place, columns behind the heads are read alone. */
template <class X, class C>
__global__ void __launch_bounds__(THREADS, 3)
    qkv_rope_sums_kernel(__grid_constant__ const rope_route<X> route, const C *c, const C *s, float *partial, __grid_constant__ const row_parts parts,
                         int per_row, int rotated, int half, int rest, bool in_place)
{
    __shared__ float sums[WARPS][2 * V][WARP + 1];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = blockIdx.x * WARP + lane;
    bool second = blockIdx.y >= parts.a;
    int64_t rows = second ? route.rows_b : route.rows_a, first = (blockIdx.y - (second ? parts.a : 0)) * parts.rows;
    int64_t end = first + parts.rows < rows ? first + parts.rows : rows, row = first + warp;
    const int32_t *index = second ? route.at_b : route.at_a;
    X *to = second ? route.out_b : route.out_a;
    pairs my = pairs_of<V>(group, rotated, half, rest);
    float sum_a[V] = {0}, sum_b[V] = {0};
    pack<X, V> a, b, next_a, next_b;
    auto place = [&](int64_t at) { return at >= end ? -1 : index ? (int64_t)index[at] : at; };
    auto load = [&](pack<X, V> &pa, pack<X, V> &pb, int64_t from) {
        if (from >= 0 && from < route.rows) {
            pa.load(route.a + from * route.cols + my.at);
            pb.load(route.a + from * route.cols + my.at + my.apart);
        } else {
            const float zero[V] = {0};
            pa.set(zero);
            pb.set(zero);
        }
    };
    if (group < per_row) {
        int64_t from = place(row), next = place(row + WARPS);
        load(a, b, from);
        for (; row < end; row += WARPS) {
            int64_t after = place(row + 2 * WARPS);
            load(next_a, next_b, next);
            if (group < rotated && from >= 0 && from < route.rows)
                rotate<X, C, V>(a, b, c + from * half + my.pair, s + from * half + my.pair, -1.0f);
            if (group < rotated || !in_place) {
                a.store(to + row * route.cols + my.at);
                b.store(to + row * route.cols + my.at + my.apart);
            }
            float u[V], v[V];
            a.get(u);
            b.get(v);
#pragma unroll
            for (int i = 0; i < V; i++) {
                sum_a[i] += u[i];
                sum_b[i] += v[i];
            }
            a = next_a;
            b = next_b;
            from = next;
            next = after;
        }
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
        sums[warp][i][lane] = sum_a[i];
        sums[warp][V + i][lane] = sum_b[i];
    }
    __syncthreads();
    static_assert(THREADS == WARP * V, "a thread for each pair of columns of a strip");
    int i = threadIdx.x % V;
    lane = threadIdx.x / V;
    group = blockIdx.x * WARP + lane;
    if (group >= per_row)
        return;
    float total_a = 0, total_b = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        total_a += sums[w][i][lane];
        total_b += sums[w][V + i][lane];
    }
    my = pairs_of<V>(group, rotated, half, rest);
    partial += blockIdx.y * route.cols + my.at + i;
    partial[0] = total_a;
    partial[my.apart] = total_b;
}

/* An odd number of columns behind the heads: they are copied one by one. */
template <class X> __global__ void __launch_bounds__(THREADS) rest_kernel(__grid_constant__ const rope_route<X> route, int64_t n, int first, int rest)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n)
        return;
    int64_t row = divide(i, rest), table;
    const X *from;
    X *to;
    route.find(row, from, to, table);
    int64_t at = first + (i - row * rest);
    to[at] = from ? from[at] : from_float<X>(0.0f);
}

template <class X> bool in_packs(const rope_route<X> &route, const vlai_cuda_tensor &c, const vlai_cuda_tensor &s, int half, int rest)
{
    return half % 8 == 0 && rest % 16 == 0 && aligned(route.a) && aligned(route.b) && aligned(route.out_a) && aligned(route.out_b) &&
           aligned(c.data) && aligned(s.data);
}

template <class X>
int rotate_rows(const vlai_cuda_call *call, const rope_route<X> &route, const vlai_cuda_tensor &c, const vlai_cuda_tensor &s, int64_t rows)
{
    int half = call->node->attrs.rope.head_dim / 2, heads = call->node->attrs.rope.heads, rest = (int)route.cols - 2 * half * heads;
    float sign = route.backward ? -1.0f : 1.0f;
    bool in_place = route.out_a == route.a;
    bool vector = in_packs(route, c, s, half, rest);
    return with_type(c.dtype, [&](auto tc) {
        using C = typename decltype(tc)::is;
        auto launch = [&](auto v) {
            constexpr int V = decltype(v)::value;
            int rotated = heads * half / V, copied = in_place || rest % (2 * V) ? 0 : rest / (2 * V);
            int64_t groups = rows * (rotated + copied);
            if (groups)
                qkv_rope_kernel<X, C, V><<<blocks_for(groups, THREADS), THREADS, 0, stream_of(call)>>>(
                    route, (const C *)c.data, (const C *)s.data, groups, rotated + copied, rotated, half, rest, sign);
            if (rest && !copied && !in_place)
                rest_kernel<<<blocks_for(rows * rest, THREADS), THREADS, 0, stream_of(call)>>>(route, rows * rest, 2 * half * heads, rest);
            return launched();
        };
        return vector ? launch(std::integral_constant<int, 8>{}) : launch(std::integral_constant<int, 1>{});
    });
}

/* A gradient of the tower's shape, of all rows in their order, by a warp per row: where that kernel is compiled for the device
 * and has room. */
template <class C> int rotate_by_rows(const vlai_cuda_call *call, const rope_route<bf16> &route, const C *c, const C *s, row_parts &parts, bool *done)
{
    auto kernel = rope_rows_kernel<C>;
    if (route.cols != ROPE_COLS || call->node->attrs.rope.head_dim != 2 * ROPE_HALF || call->node->attrs.rope.heads != ROPE_HEADS || route.at_a ||
        route.rows_b || route.rows_a != route.rows || route.rows > INT32_MAX / 64)
        return 0;
    if (!has_code(kernel) || allow_ring(kernel, rope_rows_bytes<C>())) {
        (void)cudaGetLastError();
        return 0;
    }
    parts.a = rope_rows_blocks(route.rows);
    *done = true;
    if (parts.a)
        kernel<<<(unsigned)parts.a, ROPE_WARPS * WARP, rope_rows_bytes<C>(), stream_of(call)>>>(route.a, route.out_a, c, s, (float *)call->workspace,
                                                                                                (int)route.rows);
    return launched();
}

/* The gradient with the sums of its columns. */
template <class X>
int rotate_and_sum(const vlai_cuda_call *call, const rope_route<X> &route, const vlai_cuda_tensor &c, const vlai_cuda_tensor &s)
{
    int half = call->node->attrs.rope.head_dim / 2, heads = call->node->attrs.rope.heads, rest = (int)route.cols - 2 * half * heads;
    if (!in_packs(route, c, s, half, rest)) {
        int status = rotate_rows(call, route, c, s, route.rows_a + route.rows_b);
        return status ? status : sums_apart(call);
    }
    row_parts parts = row_parts_of(route.rows_a, route.rows_b, route.cols);
    float *partial = (float *)call->workspace;
    int rotated = heads * half / V, per_row = rotated + rest / (2 * V);
    int status = with_type(c.dtype, [&](auto tc) {
        using C = typename decltype(tc)::is;
        if constexpr (std::is_same_v<X, bf16>) {
            bool done = false;
            int code = rotate_by_rows(call, route, (const C *)c.data, (const C *)s.data, parts, &done);
            if (code || done)
                return code;
        }
        if (parts.strips && parts.a + parts.b)
            qkv_rope_sums_kernel<X, C><<<dim3((unsigned)parts.strips, (unsigned)(parts.a + parts.b)), THREADS, 0, stream_of(call)>>>(
                route, (const C *)c.data, (const C *)s.data, partial, parts, per_row, rotated, half, rest, route.out_a == route.a);
        return launched();
    });
    return status ? status
                  : column_total_2(call, sums_result(call, 0), partial, parts.a, sums_result(call, 1), partial + parts.a * route.cols, parts.b,
                                   route.cols);
}

} // namespace

NO_WORKSPACE(rope_table)
NO_WORKSPACE(qkv_rope)
NO_WORKSPACE(rope)
NO_WORKSPACE(sinusoid)

extern "C" int vlai_cuda_rope_table(const vlai_cuda_call *call)
{
    const vla_rope_options *options = &call->node->attrs.rope_table;
    const vlai_cuda_tensor &p = call->in[0], &c = call->out[0], &s = call->out[1];
    if ((!c.data && !s.data) || !c.elements)
        return 0;
    int64_t n = p.shape[1];
    int half = options->half, at = 0, axis = 0, in_section = 0;
    while (at < half) {
        frequencies table = {};
        int count = 0;
        for (; count < TABLE && at + count < half; count++) {
            while (axis < options->axes - 1 && in_section >= options->sections[axis]) {
                axis++;
                in_section = 0;
            }
            int i = at + count, j = options->restart ? in_section : i, span = options->restart ? options->sections[axis] : half;
            float exponent = (float)(2 * j) / (float)(2 * span);
            table.f[count] = 1.0f / (float)pow((double)(float)options->base, (double)exponent);
            table.axis[count] = (uint8_t)axis;
            in_section++;
        }
        int status = with_type(c.dtype, [&](auto tc) {
            using C = typename decltype(tc)::is;
            table_kernel<<<blocks_for(n * count, THREADS), THREADS, 0, stream_of(call)>>>(
                (const int32_t *)p.data, table, (C *)c.data, (C *)s.data, n, at, count, half);
            return launched();
        });
        if (status)
            return status;
        at += count;
    }
    return 0;
}

extern "C" int vlai_cuda_rope(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &c = call->in[1], &s = call->in[2], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    if (s.dtype != c.dtype)
        return (int)cudaErrorInvalidValue;
    int half = call->node->attrs.rope.head_dim / 2;
    float sign = call->node->attrs.rope.inverse ? -1.0f : 1.0f;
    bool vector = half % 8 == 0 && aligned(x.data) && aligned(c.data) && aligned(s.data) && aligned(y.data);
    return with_types(x.dtype, c.dtype, y.dtype, [&](auto tx, auto tc, auto ty) {
        using X = typename decltype(tx)::is;
        using C = typename decltype(tc)::is;
        using Y = typename decltype(ty)::is;
        auto launch = [&](auto v) {
            constexpr int V = decltype(v)::value;
            int64_t groups = y.elements / (2 * V), per_row = cols_of(x) / (2 * V);
            rope_kernel<X, C, Y, V><<<blocks_for(groups, THREADS), THREADS, 0, stream_of(call)>>>(
                (const X *)x.data, (const C *)c.data, (const C *)s.data, (Y *)y.data, groups, per_row, half / V, half, sign);
            return launched();
        };
        return vector ? launch(std::integral_constant<int, 8>{}) : launch(std::integral_constant<int, 1>{});
    });
}

extern "C" int vlai_cuda_qkv_rope(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &a = call->in[0], &b = call->in[1], &map = call->in[2], &c = call->in[3], &s = call->in[4], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    if (a.dtype != y.dtype || (b.data && b.dtype != y.dtype) || s.dtype != c.dtype)
        return (int)cudaErrorInvalidValue;
    return with_type(y.dtype, [&](auto tx) {
        using X = typename decltype(tx)::is;
        rope_route<X> route = {};
        route.a = (const X *)a.data;
        route.b = (const X *)b.data;
        route.out_a = (X *)y.data;
        route.map = (const int32_t *)map.data;
        route.rows_a = rows_of(a);
        route.rows_b = b.data ? rows_of(b) : 0;
        route.cols = cols_of(y);
        return rotate_rows(call, route, c, s, rows_of(y));
    });
}

extern "C" size_t vlai_cuda_workspace_qkv_rope_grad(const vla_graph *g, const vlai_node *node)
{
    int64_t rows[2] = {operand_of(g, node, 0).shape[0], 0}, cols = cols_of(operand_of(g, node, 0));
    if (node->attrs.rope.sums[0] == VLA_DTYPE_NONE && node->attrs.rope.sums[1] == VLA_DTYPE_NONE)
        return 0;
    for (int k = 0; k < 2; k++)
        if (node->n_inputs > 3 + k && node->inputs[3 + k] != VLA_NONE)
            rows[k] = operand_of(g, node, 3 + k).shape[0];
    row_parts parts = row_parts_of(rows[0], rows[1], cols), alone = row_parts_of(rows[0], 0, cols); /* db may be unwanted */
    int64_t by_rows = rope_rows_blocks(rows[0]), most = parts.a + parts.b > alone.a ? parts.a + parts.b : alone.a;
    most = most > by_rows ? most : by_rows;
    size_t fused = round_256((size_t)(most * cols) * sizeof(float));
    size_t apart_a = column_workspace(rows[0], cols), apart_b = column_workspace(rows[1], cols), apart = apart_a > apart_b ? apart_a : apart_b;
    return apart > fused ? apart : fused;
}

extern "C" int vlai_cuda_qkv_rope_grad(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &d = call->in[0], &c = call->in[1], &s = call->in[2], &da = call->out[0], db = plain_result(call, 1);
    if (!da.data || d.dtype != da.dtype || (db.data && db.dtype != d.dtype) || s.dtype != c.dtype)
        return (int)cudaErrorInvalidValue;
    return with_type(d.dtype, [&](auto tx) {
        using X = typename decltype(tx)::is;
        rope_route<X> route = {};
        route.a = (const X *)d.data;
        route.out_a = (X *)da.data;
        route.out_b = (X *)db.data;
        route.at_a = (const int32_t *)call->in[3].data;
        route.at_b = (const int32_t *)call->in[4].data;
        route.rows_a = rows_of(da);
        route.rows_b = db.data ? rows_of(db) : 0;
        route.rows = rows_of(d);
        route.cols = cols_of(d);
        route.backward = true;
        bool sums = sums_result(call, 0).data || sums_result(call, 1).data;
        return sums ? rotate_and_sum(call, route, c, s) : rotate_rows(call, route, c, s, route.rows_a + route.rows_b);
    });
}

extern "C" int vlai_cuda_sinusoid(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &t = call->in[0], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    if (t.dtype != y.dtype)
        return (int)cudaErrorInvalidValue;
    int64_t n = rows_of(y);
    int half = (int)(cols_of(y) / 2);
    float slope = half > 1 ? (float)-(log(call->node->attrs.sinusoid.period) / (double)(half - 1)) : 0.0f;
    for (int at = 0; at < half; at += TABLE) {
        frequencies table = {};
        int count = half - at < TABLE ? half - at : (int)TABLE;
        for (int k = 0; k < count; k++)
            table.f[k] = (float)exp((double)((float)(at + k) * slope));
        int status = with_type(y.dtype, [&](auto ty) {
            using T = typename decltype(ty)::is;
            sinusoid_kernel<<<blocks_for(n * count, THREADS), THREADS, 0, stream_of(call)>>>((const T *)t.data, table, (T *)y.data, n,
                                                                                            at, count, half);
            return launched();
        });
        if (status)
            return status;
    }
    return 0;
}
