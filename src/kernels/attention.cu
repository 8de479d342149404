/* Attention over packed rows with masks made of column intervals (vla/graph.h), forward and backward.
 *
 *     q, o [Nq, heads D], k, v [Nk, kv_heads D], qpos [Nq], rows [Nq,2], cols [Nk,4], lse [Nq, heads] fp32
 *     forward   o = softmax(scale q k^T + mask) v, softmax rescaled as key tiles go by; lse = log sum exp; none seen: 0, -inf
 *     backward  delta = rowsum(do o); p = exp(scale q k^T - lse); dv = p^T do; ds = p (do v^T - delta);
 *               dq = scale ds k; dk = scale ds^T q
 *
 * Backward is two kernels, one that owns keys and one that owns queries: nothing is added by two blocks, so the order of
 * every sum is fixed, at the price of computing the scores twice. Key tiles outside the union of a query tile's spans are
 * never visited; the kernel that owns keys finds its query tiles in a table of 32-query tiles made beforehand.
 *
 * bf16 up to head dimension 128: tensor cores (kernels/attention_tiles.cuh); 4 D flops a pair forward, 14 D backward;
 * bound by mma.sync, about half of what wgmma reaches. Otherwise plain: a warp per row, fp32 multiply-adds, for parity.
 * Bytes: q, k, v, o once, k and v again from L2 for every query tile. */
#include "kernels/attention_tiles.cuh"

namespace {

enum { PLAIN_WARPS = 4, PLAIN_THREADS = PLAIN_WARPS * WARP, PLAIN_DIM = 256, PER_LANE = PLAIN_DIM / WARP };

/* tiles[t]: what the queries 32 t.. see. A warp per tile. */
__global__ void __launch_bounds__(BLOCK) query_tile_kernel(attention_shape s, query_tile *tiles, int n_tiles)
{
    int tile = (int)((blockIdx.x * BLOCK + threadIdx.x) / WARP);
    if (tile >= n_tiles)
        return;
    int64_t i = (int64_t)tile * TILE_QUERIES + threadIdx.x % WARP;
    int2 span = key_span(s, i);
    bool sees = span.y > span.x;
    int q = i < s.queries ? s.qpos[i] : 0;
    query_tile f = {};
    f.q_min = __reduce_min_sync(0xFFFFFFFFu, sees ? q : INT32_MAX);
    f.q_max = __reduce_max_sync(0xFFFFFFFFu, sees ? q : INT32_MIN);
    f.first_min = __reduce_min_sync(0xFFFFFFFFu, sees ? span.x : INT32_MAX);
    f.end_max = __reduce_max_sync(0xFFFFFFFFu, sees ? span.y : INT32_MIN);
    f.first_max = __reduce_max_sync(0xFFFFFFFFu, span.x);
    f.end_min = __reduce_min_sync(0xFFFFFFFFu, span.y);
    if (threadIdx.x % WARP == 0)
        tiles[tile] = f;
}

/* delta [Nq, heads]: 16 lanes per row and head. */
template <class T>
__global__ void __launch_bounds__(THREADS) delta_kernel(const T *dy, const T *o, float *delta, int64_t n, int dim, bool vector)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 16;
    int lane = threadIdx.x % 16;
    float sum = 0;
    if (i < n) {
        dy += i * dim;
        o += i * dim;
        if (vector) {
            for (int c = lane * 8; c < dim; c += 128) {
                pack<T, 8> pa, pb;
                float a[8], b[8];
                pa.load(dy + c);
                pb.load(o + c);
                pa.get(a);
                pb.get(b);
#pragma unroll
                for (int k = 0; k < 8; k++)
                    sum += a[k] * b[k];
            }
        } else {
            for (int c = lane; c < dim; c += 16)
                sum += to_float(dy[c]) * to_float(o[c]);
        }
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (i < n && lane == 0)
        delta[i] = sum;
}

/* A row of this warp, in shared memory, as floats. */
template <class T> __device__ const float *keep_row(float *to, const T *from, int dim)
{
    for (int c = threadIdx.x % WARP; c < dim; c += WARP)
        to[c] = to_float(from[c]);
    __syncwarp();
    return to;
}

template <class T> __device__ inline float dot(const float *a, const T *b, int dim)
{
    float sum = 0;
    for (int c = 0; c < dim; c++)
        sum += a[c] * to_float(b[c]);
    return sum;
}

/* acc[c] += sum over the lanes' weights of weight x row, lanes in order; this lane holds columns lane + 32 i. */
template <class T>
__device__ inline void add_rows(float (&acc)[PER_LANE], float weight, const T *rows, int64_t stride, int count, int dim)
{
    int lane = threadIdx.x % WARP;
    for (int j = 0; j < count; j++) {
        float w = __shfl_sync(0xFFFFFFFFu, weight, j);
        if (w == 0.0f)
            continue;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (lane + WARP * i < dim)
                acc[i] += w * to_float(rows[j * stride + lane + WARP * i]);
    }
}

template <class T> __device__ inline void store_row(T *to, const float (&acc)[PER_LANE], float factor, int dim)
{
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        if (lane + WARP * i < dim)
            to[lane + WARP * i] = from_float<T>(acc[i] * factor);
}

/* A warp per query and head; 32 keys at a time, one to a lane. */
template <class T>
__global__ void __launch_bounds__(PLAIN_THREADS)
    attention_plain_kernel(attention_shape s, const T *q, const T *k, const T *v, T *o, float *lse)
{
    __shared__ float row[PLAIN_WARPS][PLAIN_DIM];
    int64_t at = ((int64_t)blockIdx.x * PLAIN_THREADS + threadIdx.x) / WARP, i = at / s.heads;
    int head = (int)(at % s.heads), lane = threadIdx.x % WARP;
    if (i >= s.queries)
        return;
    int64_t kv_stride = (int64_t)s.kv_heads * s.dim, kv = (int64_t)(head / s.group) * s.dim;
    const float *mine = keep_row(row[threadIdx.x / WARP], q + at * s.dim, s.dim);
    int2 span = key_span(s, i);
    int position = s.qpos[i];
    float acc[PER_LANE] = {0}, top = -INFINITY, sum = 0;
    for (int64_t key = span.x; key < span.y; key += WARP) {
        int64_t j = key + lane;
        int4 c = j < span.y ? s.cols[j] : make_int4(0, 0, 0, 0);
        bool sees = j < span.y && visible(position, span, (int)j, c);
        if (!__any_sync(0xFFFFFFFFu, sees))
            continue;
        float x = sees ? s.scale * dot(mine, k + j * kv_stride + kv, s.dim) : -INFINITY;
        float most = fmaxf(top, warp_max(x)), shrink = expf(top - most), p = expf(x - most);
        if (most == -INFINITY)
            continue;
        top = most;
        sum = sum * shrink + warp_sum(p);
#pragma unroll
        for (int e = 0; e < PER_LANE; e++)
            acc[e] *= shrink;
        add_rows(acc, p, v + key * kv_stride + kv, kv_stride, span.y - key < WARP ? (int)(span.y - key) : (int)WARP, s.dim);
    }
    if (o)
        store_row(o + at * s.dim, acc, sum > 0 ? 1.0f / sum : 0.0f, s.dim);
    if (lse && lane == 0)
        lse[at] = sum > 0 ? top + logf(sum) : -INFINITY;
}

template <class T>
__global__ void __launch_bounds__(PLAIN_THREADS)
    query_grad_plain_kernel(attention_shape s, const T *dy, const T *q, const T *k, const T *v, const float *lse, const float *delta, T *dq)
{
    __shared__ float row[PLAIN_WARPS][2][PLAIN_DIM];
    int64_t at = ((int64_t)blockIdx.x * PLAIN_THREADS + threadIdx.x) / WARP, i = at / s.heads;
    int head = (int)(at % s.heads), lane = threadIdx.x % WARP;
    if (i >= s.queries)
        return;
    int64_t kv_stride = (int64_t)s.kv_heads * s.dim, kv = (int64_t)(head / s.group) * s.dim;
    const float *my_q = keep_row(row[threadIdx.x / WARP][0], q + at * s.dim, s.dim);
    const float *my_dy = keep_row(row[threadIdx.x / WARP][1], dy + at * s.dim, s.dim);
    int2 span = key_span(s, i);
    int position = s.qpos[i];
    float acc[PER_LANE] = {0}, top = lse[at], mean = delta[at];
    for (int64_t key = span.x; key < span.y; key += WARP) {
        int64_t j = key + lane;
        float ds = 0;
        if (j < span.y && visible(position, span, (int)j, s.cols[j]))
            ds = expf(s.scale * dot(my_q, k + j * kv_stride + kv, s.dim) - top) * (dot(my_dy, v + j * kv_stride + kv, s.dim) - mean);
        add_rows(acc, ds, k + key * kv_stride + kv, kv_stride, span.y - key < WARP ? (int)(span.y - key) : (int)WARP, s.dim);
    }
    store_row(dq + at * s.dim, acc, s.scale, s.dim);
}

/* A warp per key and kv head; a tile of 32 queries at a time, one to a lane. */
template <class T>
__global__ void __launch_bounds__(PLAIN_THREADS)
    key_grad_plain_kernel(attention_shape s, const T *dy, const T *q, const T *k, const T *v, const float *lse, const float *delta,
                          const query_tile *tiles, int n_tiles, T *dk, T *dv)
{
    __shared__ float row[PLAIN_WARPS][2][PLAIN_DIM];
    int64_t at = ((int64_t)blockIdx.x * PLAIN_THREADS + threadIdx.x) / WARP, j = at / s.kv_heads;
    int kv_head = (int)(at % s.kv_heads), lane = threadIdx.x % WARP;
    if (j >= s.keys)
        return;
    int64_t q_stride = (int64_t)s.heads * s.dim;
    const float *my_k = keep_row(row[threadIdx.x / WARP][0], k + at * s.dim, s.dim);
    const float *my_v = keep_row(row[threadIdx.x / WARP][1], v + at * s.dim, s.dim);
    int4 c = s.cols[j];
    float acc_k[PER_LANE] = {0}, acc_v[PER_LANE] = {0};
    for (int tile = 0; tile < n_tiles; tile++) {
        query_tile f = tiles[tile];
        if (f.first_min > j || f.end_max <= j || c.x > f.q_max || c.y <= f.q_min)
            continue;
        int64_t first = (int64_t)tile * TILE_QUERIES, i = first + lane;
        int count = s.queries - first < TILE_QUERIES ? (int)(s.queries - first) : (int)TILE_QUERIES;
        bool sees = i < s.queries && visible(s.qpos[i], key_span(s, i), (int)j, c);
        for (int head = kv_head * s.group; head < (kv_head + 1) * s.group; head++) {
            const T *rows_q = q + first * q_stride + (int64_t)head * s.dim, *rows_dy = dy + first * q_stride + (int64_t)head * s.dim;
            float p = 0, ds = 0;
            if (sees) {
                p = expf(s.scale * dot(my_k, rows_q + lane * q_stride, s.dim) - lse[i * s.heads + head]);
                ds = p * (dot(my_v, rows_dy + lane * q_stride, s.dim) - delta[i * s.heads + head]);
            }
            add_rows(acc_v, p, rows_dy, q_stride, count, s.dim);
            add_rows(acc_k, ds, rows_q, q_stride, count, s.dim);
        }
    }
    if (dk)
        store_row(dk + at * s.dim, acc_k, s.scale, s.dim);
    if (dv)
        store_row(dv + at * s.dim, acc_v, 1.0f, s.dim);
}

/* first: index of qpos among the operands; q, k, v lie at `q` .. q + 2. */
attention_shape shape_of(const vlai_cuda_call *call, int first, int q)
{
    const vla_attention_options *options = &call->node->attrs.attention;
    attention_shape s = {};
    s.queries = rows_of(call->in[q]);
    s.keys = rows_of(call->in[q + 1]);
    s.heads = options->heads;
    s.kv_heads = options->kv_heads;
    s.group = options->heads / options->kv_heads;
    s.dim = options->head_dim;
    s.scale = (float)options->scale;
    s.qpos = (const int32_t *)call->in[first].data;
    s.rows = (const int2 *)call->in[first + 1].data;
    s.cols = (const int4 *)call->in[first + 2].data;
    s.vector = s.dim % 8 == 0;
    for (int i = 0; i < first; i++)
        s.vector = s.vector && aligned(call->in[i].data);
    for (int i = 0; i < call->node->n_outputs; i++)
        s.vector = s.vector && aligned(call->out[i].data);
    return s;
}

/* The padded head dimension; 0 where there is no kernel on tiles. */
template <class F> int with_dim(int dim, F f)
{
    if (dim <= 32)
        return f(std::integral_constant<int, 32>{});
    if (dim <= 64)
        return f(std::integral_constant<int, 64>{});
    if (dim <= 80)
        return f(std::integral_constant<int, 80>{});
    return f(std::integral_constant<int, 128>{});
}

template <class K> int allow_shared(K kernel, size_t bytes)
{
    return (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

unsigned plain_blocks(int64_t warps)
{
    return blocks_for(warps, PLAIN_WARPS);
}

template <class T> int forward_plain(const vlai_cuda_call *call, const attention_shape &s)
{
    attention_plain_kernel<<<plain_blocks(s.queries * s.heads), PLAIN_THREADS, 0, stream_of(call)>>>(
        s, (const T *)call->in[0].data, (const T *)call->in[1].data, (const T *)call->in[2].data, (T *)call->out[0].data,
        (float *)call->out[1].data);
    return launched();
}

int forward_tiles(const vlai_cuda_call *call, const attention_shape &s)
{
    return with_dim(s.dim, [&](auto d) {
        constexpr int DP = decltype(d)::value;
        int status = allow_shared(attention_tile_kernel<DP>, attention_shared<DP>());
        if (status)
            return status;
        dim3 grid((unsigned)s.heads, blocks_for(s.queries, TILE));
        attention_tile_kernel<DP><<<grid, BLOCK, attention_shared<DP>(), stream_of(call)>>>(
            s, (const bf16 *)call->in[0].data, (const bf16 *)call->in[1].data, (const bf16 *)call->in[2].data,
            (bf16 *)call->out[0].data, (float *)call->out[1].data);
        return launched();
    });
}

template <class T>
int backward_plain(const vlai_cuda_call *call, const attention_shape &s, const float *delta, const query_tile *tiles, int n_tiles)
{
    const T *dy = (const T *)call->in[0].data, *q = (const T *)call->in[1].data, *k = (const T *)call->in[2].data;
    const T *v = (const T *)call->in[3].data;
    const float *lse = (const float *)call->in[5].data;
    T *dq = (T *)call->out[0].data, *dk = (T *)call->out[1].data, *dv = (T *)call->out[2].data;
    if ((dk || dv) && s.keys)
        key_grad_plain_kernel<<<plain_blocks(s.keys * s.kv_heads), PLAIN_THREADS, 0, stream_of(call)>>>(s, dy, q, k, v, lse, delta, tiles,
                                                                                                       n_tiles, dk, dv);
    if (dq && s.queries)
        query_grad_plain_kernel<<<plain_blocks(s.queries * s.heads), PLAIN_THREADS, 0, stream_of(call)>>>(s, dy, q, k, v, lse, delta, dq);
    return launched();
}

int backward_tiles(const vlai_cuda_call *call, const attention_shape &s, const float *delta, const query_tile *tiles, int n_tiles)
{
    const bf16 *dy = (const bf16 *)call->in[0].data, *q = (const bf16 *)call->in[1].data, *k = (const bf16 *)call->in[2].data;
    const bf16 *v = (const bf16 *)call->in[3].data;
    const float *lse = (const float *)call->in[5].data;
    bf16 *dq = (bf16 *)call->out[0].data, *dk = (bf16 *)call->out[1].data, *dv = (bf16 *)call->out[2].data;
    return with_dim(s.dim, [&](auto d) {
        constexpr int DP = decltype(d)::value;
        int status = allow_shared(key_grad_kernel<DP>, key_grad_shared<DP>());
        if (!status)
            status = allow_shared(query_grad_kernel<DP>, query_grad_shared<DP>());
        if (status)
            return status;
        if ((dk || dv) && s.keys)
            key_grad_kernel<DP><<<dim3((unsigned)s.kv_heads, blocks_for(s.keys, TILE)), BLOCK, key_grad_shared<DP>(), stream_of(call)>>>(
                s, dy, q, k, v, lse, delta, tiles, n_tiles, dk, dv);
        if (dq && s.queries)
            query_grad_kernel<DP><<<dim3((unsigned)s.heads, blocks_for(s.queries, TILE)), BLOCK, query_grad_shared<DP>(), stream_of(call)>>>(
                s, dy, q, k, v, lse, delta, dq);
        return launched();
    });
}

/* All operands and results of one stored type. */
bool one_type(const vlai_cuda_call *call, int inputs, int outputs, vla_dtype dtype)
{
    for (int i = 0; i < inputs; i++)
        if (call->in[i].dtype != dtype && call->in[i].dtype != VLA_F32)
            return false;
    for (int i = 0; i < outputs; i++)
        if (call->out[i].data && call->out[i].dtype != dtype)
            return false;
    return true;
}

} // namespace

NO_WORKSPACE(attention)

extern "C" int vlai_cuda_attention(const vlai_cuda_call *call)
{
    attention_shape s = shape_of(call, 3, 0);
    vla_dtype dtype = call->in[0].dtype;
    if (!s.queries || (!call->out[0].data && !call->out[1].data))
        return 0;
    if (s.dim > PLAIN_DIM || call->in[1].dtype != dtype || call->in[2].dtype != dtype || !one_type(call, 0, 1, dtype))
        return (int)cudaErrorInvalidValue;
    if (dtype == VLA_BF16)
        return s.dim <= 128 ? forward_tiles(call, s) : forward_plain<bf16>(call, s);
    return dtype == VLA_F32 ? forward_plain<float>(call, s) : (int)cudaErrorInvalidValue;
}

/* delta [Nq, heads] fp32, then a query_tile for every 32 queries. */
extern "C" size_t vlai_cuda_workspace_attention_grad(const vla_graph *g, const vlai_node *node)
{
    int64_t queries = operand_of(g, node, 1).shape[0];
    return round_256((size_t)(queries * node->attrs.attention.heads) * sizeof(float)) +
           round_256((size_t)((queries + TILE_QUERIES - 1) / TILE_QUERIES) * sizeof(query_tile));
}

extern "C" int vlai_cuda_attention_grad(const vlai_cuda_call *call)
{
    attention_shape s = shape_of(call, 6, 1);
    vla_dtype dtype = call->in[1].dtype;
    bool same = call->in[5].dtype == VLA_F32 && one_type(call, 0, 3, dtype);
    for (int i = 0; i < 5; i++)
        same = same && call->in[i].dtype == dtype;
    if (s.dim > PLAIN_DIM || !same || (dtype != VLA_BF16 && dtype != VLA_F32))
        return (int)cudaErrorInvalidValue;
    float *delta = (float *)call->workspace;
    query_tile *tiles = (query_tile *)((char *)delta + round_256((size_t)(s.queries * s.heads) * sizeof(float)));
    int n_tiles = (int)((s.queries + TILE_QUERIES - 1) / TILE_QUERIES);
    if (s.queries) {
        query_tile_kernel<<<blocks_for(n_tiles, BLOCK / WARP), BLOCK, 0, stream_of(call)>>>(s, tiles, n_tiles);
        int64_t n = s.queries * s.heads;
        unsigned blocks = blocks_for(n, THREADS / 16);
        if (dtype == VLA_BF16)
            delta_kernel<<<blocks, THREADS, 0, stream_of(call)>>>((const bf16 *)call->in[0].data, (const bf16 *)call->in[4].data, delta, n,
                                                                  s.dim, s.vector);
        else
            delta_kernel<<<blocks, THREADS, 0, stream_of(call)>>>((const float *)call->in[0].data, (const float *)call->in[4].data, delta,
                                                                  n, s.dim, s.vector);
    }
    if (dtype == VLA_F32)
        return backward_plain<float>(call, s, delta, tiles, n_tiles);
    return s.dim <= 128 ? backward_tiles(call, s, delta, tiles, n_tiles) : backward_plain<bf16>(call, s, delta, tiles, n_tiles);
}
