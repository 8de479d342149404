/* Attention over packed rows with masks made of column intervals (vla/graph.h), forward and backward.
 *
 *     q, o [Nq, heads D], k, v [Nk, kv_heads D], qpos [Nq], rows [Nq,2], cols [Nk,4], lse [Nq, heads] fp32
 *     forward   o = softmax(scale q k^T + mask) v, softmax rescaled as key tiles go by; lse = log sum exp; none seen: 0, -inf
 *     backward  delta = rowsum(do o); p = exp(scale q k^T - lse); dv = p^T do; ds = p (do v^T - delta);
 *               dq = scale ds k; dk = scale ds^T q
 *
 * Which kernels run is a table at the end of this file; the first row that fits is taken:
 *
 *     wide       segments of at most 64 rows, each whole, a kv head for every head, on sm_90a   (kernels/attention_wide.cu)
 *     windows    the same on other cards, and with heads of more than 80 columns   (kernels/attention_window.cuh)
 *     long       full segments of any length, a kv head for every head, backward alone, on sm_90a   (kernels/attention_wide.cu)
 *     groups     whole or causal segments, on sm_90a   (kernels/attention_groups.cu)
 *     cudnn      whole or causal segments, where a plan was made: fast attention alone   (kernels/attention_cudnn.cu)
 *     segments   whole or causal segments   (kernels/attention_segments.cuh)
 *     tiles      any mask, bf16 up to D = 128   (kernels/attention_tiles.cuh)
 *     plain      any mask: here, a warp per row, fp32 multiply-adds, for parity
 *
 * Backward of long, groups and the last three is two kernels, one that owns keys and one that owns queries: two blocks never add
 * to one sum, but for those of a cluster, in the order of their ranks. The order of every sum is fixed, at the price of computing
 * the scores twice. 4 D flops a pair forward, 14 D backward; wide, long and groups use the tensor cores by wgmma, the others by
 * mma.sync, about half of what wgmma reaches.
 *
 * Operands may be columns of one matrix q|k|v: rows have strides. o and do may be two streams of rows, which groups reads and
 * writes as they lie; for the others o and do are put together in scratch. */
#include "kernels/attention.h"
#include "kernels/attention_cudnn.cuh"
#include "kernels/attention_groups.cuh"
#include "kernels/attention_segments.cuh"
#include "kernels/attention_tiles.cuh"
#include "kernels/attention_wide.cuh"
#include "kernels/attention_window.cuh"

#include "base/log.h"
#include "vendor/cudnn.h"

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
    int64_t kv_stride = s.kv_stride, kv = (int64_t)(head / s.group) * s.dim, col = (int64_t)head * s.dim;
    const float *mine = keep_row(row[threadIdx.x / WARP], q + i * s.q_stride + col, s.dim);
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
        store_row(o + i * s.o_stride + col, acc, sum > 0 ? 1.0f / sum : 0.0f, s.dim);
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
    int64_t kv_stride = s.kv_stride, kv = (int64_t)(head / s.group) * s.dim, col = (int64_t)head * s.dim;
    const float *my_q = keep_row(row[threadIdx.x / WARP][0], q + i * s.q_stride + col, s.dim);
    const float *my_dy = keep_row(row[threadIdx.x / WARP][1], dy + i * s.o_stride + col, s.dim);
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
    store_row(dq + i * s.dq_stride + col, acc, s.scale, s.dim);
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
    int64_t col = (int64_t)kv_head * s.dim;
    const float *my_k = keep_row(row[threadIdx.x / WARP][0], k + j * s.kv_stride + col, s.dim);
    const float *my_v = keep_row(row[threadIdx.x / WARP][1], v + j * s.kv_stride + col, s.dim);
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
            const T *rows_q = q + first * s.q_stride + (int64_t)head * s.dim, *rows_dy = dy + first * s.o_stride + (int64_t)head * s.dim;
            float p = 0, ds = 0;
            if (sees) {
                p = expf(s.scale * dot(my_k, rows_q + lane * s.q_stride, s.dim) - lse[i * s.heads + head]);
                ds = p * (dot(my_v, rows_dy + lane * s.o_stride, s.dim) - delta[i * s.heads + head]);
            }
            add_rows(acc_v, p, rows_dy, s.o_stride, count, s.dim);
            add_rows(acc_k, ds, rows_q, s.q_stride, count, s.dim);
        }
    }
    if (dk)
        store_row(dk + j * s.dkv_stride + col, acc_k, s.scale, s.dim);
    if (dv)
        store_row(dv + j * s.dkv_stride + col, acc_v, 1.0f, s.dim);
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

unsigned plain_blocks(int64_t warps)
{
    return blocks_for(warps, PLAIN_WARPS);
}

/* delta [Nq, heads] fp32, then a query_tile for every 32 queries. */
size_t delta_bytes(int64_t queries, int heads)
{
    return round_256((size_t)(queries * heads) * sizeof(float));
}

int query_tiles(int64_t queries)
{
    return (int)((queries + TILE_QUERIES - 1) / TILE_QUERIES);
}

struct grad_scratch {
    float *delta;
    query_tile *tiles;
    int n_tiles;
};

template <class T> grad_scratch prepare_grad(const attention_task &task)
{
    const attention_shape &s = task.shape;
    grad_scratch w = {(float *)task.workspace, (query_tile *)((char *)task.workspace + delta_bytes(s.queries, s.heads)),
                      query_tiles(s.queries)};
    int64_t n = s.queries * s.heads;
    if (n) {
        query_tile_kernel<<<blocks_for(w.n_tiles, BLOCK / WARP), BLOCK, 0, task.stream>>>(s, w.tiles, w.n_tiles);
        delta_kernel<<<blocks_for(n, THREADS / 16), THREADS, 0, task.stream>>>((const T *)task.dy, (const T *)task.o, w.delta, n, s.dim,
                                                                              s.vector);
    }
    return w;
}

template <class T> int forward_plain(const attention_task &task)
{
    const attention_shape &s = task.shape;
    attention_plain_kernel<<<plain_blocks(s.queries * s.heads), PLAIN_THREADS, 0, task.stream>>>(
        s, (const T *)task.q, (const T *)task.k, (const T *)task.v, (T *)task.o, task.lse);
    return launched();
}

template <class T> int backward_plain(const attention_task &task)
{
    const attention_shape &s = task.shape;
    grad_scratch w = prepare_grad<T>(task);
    const T *dy = (const T *)task.dy, *q = (const T *)task.q, *k = (const T *)task.k, *v = (const T *)task.v;
    T *dq = (T *)task.dq, *dk = (T *)task.dk, *dv = (T *)task.dv;
    if ((dk || dv) && s.keys)
        key_grad_plain_kernel<<<plain_blocks(s.keys * s.kv_heads), PLAIN_THREADS, 0, task.stream>>>(s, dy, q, k, v, task.lse, w.delta,
                                                                                                   w.tiles, w.n_tiles, dk, dv);
    if (dq && s.queries)
        query_grad_plain_kernel<<<plain_blocks(s.queries * s.heads), PLAIN_THREADS, 0, task.stream>>>(s, dy, q, k, v, task.lse, w.delta, dq);
    return launched();
}

int forward_tiles(const attention_task &task)
{
    const attention_shape &s = task.shape;
    return with_dim(s.dim, [&](auto d) {
        constexpr int DP = decltype(d)::value;
        int status = allow_shared(attention_tile_kernel<DP>, attention_shared<DP>());
        if (status)
            return status;
        dim3 grid((unsigned)s.heads, blocks_for(s.queries, TILE));
        attention_tile_kernel<DP><<<grid, BLOCK, attention_shared<DP>(), task.stream>>>(s, (const bf16 *)task.q, (const bf16 *)task.k,
                                                                                        (const bf16 *)task.v, (bf16 *)task.o, task.lse);
        return launched();
    });
}

int backward_tiles(const attention_task &task)
{
    const attention_shape &s = task.shape;
    grad_scratch w = prepare_grad<bf16>(task);
    const bf16 *dy = (const bf16 *)task.dy, *q = (const bf16 *)task.q, *k = (const bf16 *)task.k, *v = (const bf16 *)task.v;
    bf16 *dq = (bf16 *)task.dq, *dk = (bf16 *)task.dk, *dv = (bf16 *)task.dv;
    return with_dim(s.dim, [&](auto d) {
        constexpr int DP = decltype(d)::value;
        int status = allow_shared(key_grad_kernel<DP>, key_grad_shared<DP>());
        if (!status)
            status = allow_shared(query_grad_kernel<DP>, query_grad_shared<DP>());
        if (status)
            return status;
        if ((dk || dv) && s.keys)
            key_grad_kernel<DP><<<dim3((unsigned)s.kv_heads, blocks_for(s.keys, TILE)), BLOCK, key_grad_shared<DP>(), task.stream>>>(
                s, dy, q, k, v, task.lse, w.delta, w.tiles, w.n_tiles, dk, dv);
        if (dq && s.queries)
            query_grad_kernel<DP><<<dim3((unsigned)s.heads, blocks_for(s.queries, TILE)), BLOCK, query_grad_shared<DP>(), task.stream>>>(
                s, dy, q, k, v, task.lse, w.delta, dq);
        return launched();
    });
}

/* The padded head dimension of kernels on rows without padding. */
template <class F> int with_row_dim(int dim, F f)
{
    if (dim <= 64)
        return f(std::integral_constant<int, 64>{});
    if (dim <= 80)
        return f(std::integral_constant<int, 80>{});
    return f(std::integral_constant<int, 128>{});
}

int device_attribute(cudaDeviceAttr attribute)
{
    int device = 0, value = 0;
    return cudaGetDevice(&device) || cudaDeviceGetAttribute(&value, attribute, device) ? 0 : value;
}

bool fits_window(const attention_task &t)
{
    const attention_shape &s = t.shape;
    return t.dtype == VLA_BF16 && t.mask == VLA_MASK_FULL && t.longest > 0 && t.longest <= WINDOW_LONGEST && s.queries == s.keys &&
           s.group == 1 && s.dim <= 128 && s.vector && s.scale > 0;
}

dim3 window_grid(const attention_shape &s)
{
    return dim3(blocks_for(s.heads, WINDOW_HEADS), blocks_for(s.queries, WINDOW_ANCHOR));
}

int forward_window(const attention_task &task)
{
    const attention_shape &s = task.shape;
    return with_row_dim(s.dim, [&](auto d) {
        constexpr int DP = decltype(d)::value;
        constexpr size_t SHARED = window_shared<DP, 3>();
        int status = allow_shared(window_kernel<DP>, SHARED);
        if (status)
            return status;
        window_kernel<DP><<<window_grid(s), WINDOW_BLOCK, SHARED, task.stream>>>(s, (const bf16 *)task.q, (const bf16 *)task.k,
                                                                                 (const bf16 *)task.v, (bf16 *)task.o, task.lse);
        return launched();
    });
}

int backward_window(const attention_task &task)
{
    const attention_shape &s = task.shape;
    if (!s.queries)
        return 0;
    return with_row_dim(s.dim, [&](auto d) {
        constexpr int DP = decltype(d)::value;
        constexpr size_t SHARED = window_shared<DP, 4>();
        int status = allow_shared(window_grad_kernel<DP>, SHARED);
        if (status)
            return status;
        window_grad_kernel<DP><<<window_grid(s), WINDOW_BLOCK, SHARED, task.stream>>>(
            s, (const bf16 *)task.dy, (const bf16 *)task.q, (const bf16 *)task.k, (const bf16 *)task.v, task.lse, (bf16 *)task.dq,
            (bf16 *)task.dk, (bf16 *)task.dv);
        return launched();
    });
}

bool fits_segments(const attention_task &t)
{
    const attention_shape &s = t.shape;
    return t.dtype == VLA_BF16 && t.mask != VLA_MASK_COLUMNS && t.segments && t.n_segments > 0 && t.n_segments < 65535 && t.longest > 0 &&
           s.queries == s.keys && s.dim <= 128 && s.vector && s.scale > 0;
}

dim3 segment_grid(const attention_task &t, int x)
{
    return dim3((unsigned)x, (unsigned)t.n_segments + 1, blocks_for(t.longest, SEGMENT_TILE));
}

/* f(padded head dimension, causal). */
template <class F> int with_segments(const attention_task &t, F f)
{
    return with_row_dim(t.shape.dim, [&](auto d) {
        return t.mask == VLA_MASK_CAUSAL ? f(d, std::true_type{}) : f(d, std::false_type{});
    });
}

int forward_segments(const attention_task &task)
{
    return with_segments(task, [&](auto d, auto causal) {
        constexpr int DP = decltype(d)::value;
        constexpr bool CAUSAL = decltype(causal)::value;
        int status = allow_shared(segment_kernel<DP, CAUSAL>, segment_shared<DP>());
        if (status)
            return status;
        segment_kernel<DP, CAUSAL><<<segment_grid(task, task.shape.heads), ROWS_BLOCK, segment_shared<DP>(), task.stream>>>(
            task.shape, task.segments, (const bf16 *)task.q, (const bf16 *)task.k, (const bf16 *)task.v, (bf16 *)task.o, task.lse);
        return launched();
    });
}

/* Blocks that share the query heads of a kv head: they add through the shared memory of a cluster, which sm_90 brought. */
int segment_split(const attention_shape &s)
{
    int split = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? SEGMENT_SPLIT : 1;
    while (s.group % split)
        split /= 2;
    return split;
}

int backward_segments(const attention_task &task)
{
    const attention_shape &s = task.shape;
    float *delta = (float *)task.workspace;
    const bf16 *dy = (const bf16 *)task.dy, *q = (const bf16 *)task.q, *k = (const bf16 *)task.k, *v = (const bf16 *)task.v;
    return with_segments(task, [&](auto d, auto causal) {
        constexpr int DP = decltype(d)::value;
        constexpr bool CAUSAL = decltype(causal)::value;
        auto *keys = segment_key_grad_kernel<DP, CAUSAL>;
        int status = allow_shared(segment_query_grad_kernel<DP, CAUSAL>, segment_shared<DP>());
        if (!status)
            status = allow_shared(keys, segment_key_shared<DP>());
        if (status)
            return status;
        segment_query_grad_kernel<DP, CAUSAL><<<segment_grid(task, s.heads), ROWS_BLOCK, segment_shared<DP>(), task.stream>>>(
            s, task.segments, dy, q, k, v, (const bf16 *)task.o, task.lse, delta, (bf16 *)task.dq);
        if ((status = launched()) || (!task.dk && !task.dv))
            return status;
        int split = segment_split(s);
        cudaLaunchAttribute cluster = {};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = (unsigned)split;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = segment_grid(task, s.kv_heads * split);
        config.blockDim = dim3(ROWS_BLOCK);
        config.dynamicSmemBytes = segment_key_shared<DP>();
        config.stream = task.stream;
        config.attrs = &cluster;
        config.numAttrs = split > 1;
        return (int)cudaLaunchKernelEx(&config, keys, s, task.segments, dy, q, k, v, (const float *)task.lse, (const float *)delta,
                                       (bf16 *)task.dk, (bf16 *)task.dv, split);
    });
}

/* Of an implementation that has no forward pass of its own. */
int forward_none(const attention_task &)
{
    return (int)cudaErrorInvalidValue;
}

int forward_cudnn(const attention_task &task)
{
    return attention_cudnn_run(task, false);
}

int backward_cudnn(const attention_task &task)
{
    return attention_cudnn_run(task, true);
}

/* The implementations, best first; the first that fits runs. streams: may o and do be two streams? NULL: never. */
struct implementation {
    const char *name;
    bool (*fits)(const attention_task &task);
    int (*forward)(const attention_task &task), (*backward)(const attention_task &task);
    bool (*streams)(const attention_task &task);
};

const implementation implementations[] = {
    {"wide", attention_wide_fits, attention_wide_forward, attention_wide_backward},
    {"windows", fits_window, forward_window, backward_window},
    {"long", attention_long_fits, forward_none, attention_long_backward},
    {"groups", attention_groups_fits, attention_groups_forward, attention_groups_backward, attention_groups_streams},
    {"cudnn", [](const attention_task &t) { return t.plan != nullptr; }, forward_cudnn, backward_cudnn},
    {"segments", fits_segments, forward_segments, backward_segments},
    {"tiles", [](const attention_task &t) { return t.dtype == VLA_BF16 && t.shape.dim <= 128; }, forward_tiles, backward_tiles},
    {"plain", [](const attention_task &t) { return t.dtype == VLA_BF16 && t.shape.dim <= PLAIN_DIM; }, forward_plain<bf16>, backward_plain<bf16>},
    {"plain32", [](const attention_task &t) { return t.dtype == VLA_F32 && t.shape.dim <= PLAIN_DIM; }, forward_plain<float>, backward_plain<float>},
};
enum { IMPLEMENTATIONS = sizeof implementations / sizeof *implementations };

/* joined [rows][words] from streams, rows without a place zeros; apart: the other way, rows without a place left out. */
template <class W> __global__ void __launch_bounds__(THREADS) join_kernel(row_streams<W> s, W *joined, int64_t rows, int words, bool apart)
{
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        int place = s.place(row);
        W *one = joined + row * words, *other = place == NOWHERE ? nullptr : s.at(place, words);
        for (int c = threadIdx.x; c < words; c += THREADS) {
            if (apart && other)
                other[c] = one[c];
            else if (!apart)
                one[c] = other ? other[c] : W{};
        }
    }
}

enum { JOIN_BLOCKS = 4096 };

template <class W> int join(const attention_task &t, const void *a, const void *b, void *joined, bool apart)
{
    row_streams<W> s = {(W *)a, (W *)b, t.map, (int)t.rows_a, (int)t.rows_b};
    int64_t rows = t.shape.queries, words = t.shape.o_stride * (int64_t)vla_dtype_size(t.dtype) / (int64_t)sizeof(W);
    if (rows)
        join_kernel<W><<<(unsigned)(rows < JOIN_BLOCKS ? rows : JOIN_BLOCKS), THREADS, 0, t.stream>>>(s, (W *)joined, rows, (int)words, apart);
    return launched();
}

int join(const attention_task &t, const void *a, const void *b, void *joined, bool apart)
{
    return t.shape.vector ? join<uint4>(t, a, b, joined, apart) : join<uint16_t>(t, a, b, joined, apart);
}

/* Of o or of do, in the order of rows. */
size_t joined_bytes(int64_t queries, int heads, int dim, vla_dtype dtype)
{
    return round_256((size_t)(queries * heads * dim) * vla_dtype_size(dtype));
}

/* The task with o and do in one piece each, at the end of the scratch; false when that is too small. */
bool joined_of(const attention_task &t, attention_task &whole)
{
    size_t each = joined_bytes(t.shape.queries, t.shape.heads, t.shape.dim, t.dtype), all = (t.backward ? 2 : 1) * each;
    whole = t;
    if (t.workspace_bytes < all)
        return false;
    whole.workspace_bytes = (t.workspace_bytes - all) / 256 * 256;
    whole.map = nullptr;
    whole.o = (char *)t.workspace + whole.workspace_bytes;
    whole.dy = t.backward ? (char *)whole.o + each : nullptr;
    whole.o_b = nullptr;
    whole.dy_b = nullptr;
    whole.rows_a = t.shape.queries;
    whole.rows_b = 0;
    return true;
}

int run_whole(const implementation &by, const attention_task &t)
{
    return t.backward ? by.backward(t) : t.shape.queries ? by.forward(t) : 0;
}

int run_by(const implementation &by, const attention_task &t)
{
    if (!t.map || (by.streams && by.streams(t)))
        return run_whole(by, t);
    attention_task whole;
    if (!joined_of(t, whole) || !by.fits(whole))
        return (int)cudaErrorInvalidValue;
    int status = t.backward ? join(t, t.o, t.o_b, whole.o, false) : run_whole(by, whole);
    if (status || !t.backward)
        return status ? status : join(t, t.o, t.o_b, whole.o, true);
    status = join(t, t.dy, t.dy_b, const_cast<void *>(whole.dy), false);
    return status ? status : run_whole(by, whole);
}

/* Where the operands of each op stand: -1 = it has none such. Tables are qpos, rows, cols, segments, one after another. */
struct layout {
    int dy, q, k, v, qkv, o, lse, tables; /* behind the tables of packed operands: the map, and backward do_b, o_b */
    bool backward;
};

layout layout_of(const vlai_cuda_call *call)
{
    switch (call->node->op) {
    case VLAI_OP_attention: return {-1, 0, 1, 2, -1, 0, 1, 3, false};
    case VLAI_OP_attention_qkv: return {-1, -1, -1, -1, 0, 0, 1, 1, false};
    case VLAI_OP_attention_grad: return {0, 1, 2, 3, -1, 4, 5, 6, true};
    default: return {0, -1, -1, -1, 1, 2, 3, 4, true};
    }
}

void *column(const vlai_cuda_tensor &t, int64_t col)
{
    return t.data ? (char *)t.data + (size_t)col * vla_dtype_size(t.dtype) : nullptr;
}

/* False when the operands are of types that no kernel takes together. */
bool task_of(const vlai_cuda_call *call, const layout &at, attention_task &t)
{
    const vla_attention_options *options = &call->node->attrs.attention;
    const vlai_cuda_tensor *in = call->in, *out = call->out;
    const vlai_cuda_tensor &q = in[at.qkv >= 0 ? at.qkv : at.q], &k = in[at.qkv >= 0 ? at.qkv : at.k];
    const vlai_cuda_tensor &o = at.backward ? in[at.o] : out[at.o], &lse = at.backward ? in[at.lse] : out[at.lse];
    const vlai_cuda_tensor &segments = in[at.tables + 3];
    t = {};
    attention_shape &s = t.shape;
    s.queries = rows_of(q);
    s.keys = rows_of(k);
    s.heads = options->heads;
    s.kv_heads = options->kv_heads;
    s.group = options->heads / options->kv_heads;
    s.dim = options->head_dim;
    s.scale = (float)options->scale;
    s.qpos = (const int32_t *)in[at.tables].data;
    s.rows = (const int2 *)in[at.tables + 1].data;
    s.cols = (const int4 *)in[at.tables + 2].data;
    int64_t wide = (int64_t)s.heads * s.dim, narrow = (int64_t)s.kv_heads * s.dim;
    s.q_stride = s.o_stride = s.dq_stride = wide;
    s.kv_stride = s.dkv_stride = narrow;
    s.vector = s.dim % 8 == 0;
    t.dtype = q.dtype;
    t.backward = at.backward;
    bool same = lse.data == nullptr || lse.dtype == VLA_F32;
    for (int i = 0; i < at.tables; i++) {
        s.vector = s.vector && aligned(in[i].data);
        same = same && (in[i].dtype == t.dtype || &in[i] == &lse);
    }
    for (int i = 0; i < call->node->n_outputs; i++) {
        s.vector = s.vector && aligned(out[i].data);
        same = same && (!out[i].data || out[i].dtype == t.dtype || &out[i] == &lse);
    }
    if (at.qkv >= 0) {
        s.q_stride = s.kv_stride = s.dq_stride = s.dkv_stride = cols_of(q);
        t.q = q.data;
        t.k = column(q, wide);
        t.v = column(q, wide + narrow);
        if (at.backward) {
            t.dq = out[0].data;
            t.dk = column(out[0], wide);
            t.dv = column(out[0], wide + narrow);
        }
    } else {
        t.q = in[at.q].data;
        t.k = in[at.k].data;
        t.v = in[at.v].data;
        if (at.backward) {
            t.dq = out[0].data;
            t.dk = out[1].data;
            t.dv = out[2].data;
        }
    }
    t.dy = at.backward ? in[at.dy].data : nullptr;
    t.o = o.data;
    t.lse = (float *)lse.data;
    t.rows_a = s.queries;
    t.mask = options->mask;
    t.longest = options->longest;
    t.segments = (const int32_t *)segments.data;
    t.n_segments = segments.data ? segments.elements - 1 : 0;
    t.stream = stream_of(call);
    t.workspace = call->workspace;
    t.workspace_bytes = call->workspace_bytes;
    t.plan = call->plan;
    if (at.qkv >= 0 && in[at.tables + 4].data) {
        const vlai_cuda_tensor &o_b = at.backward ? in[at.tables + 6] : out[2];
        t.map = (const int32_t *)in[at.tables + 4].data;
        t.o_b = o_b.data;
        t.dy_b = at.backward ? in[at.tables + 5].data : nullptr;
        t.rows_a = rows_of(o);
        t.rows_b = rows_of(o_b);
        s.vector = s.vector && aligned(t.o_b) && aligned(t.dy_b);
        same = same && (!t.o_b || o_b.dtype == t.dtype) && (!t.dy_b || in[at.tables + 5].dtype == t.dtype);
        same = same && t.rows_a < MOST_STREAM_ROWS && t.rows_b < MOST_STREAM_ROWS;
    }
    return same;
}

/* By implementation i, or the first that fits when i < 0. */
int run(const vlai_cuda_call *call, int i)
{
    layout at = layout_of(call);
    attention_task t;
    if (!task_of(call, at, t))
        return (int)cudaErrorInvalidValue;
    if (at.backward ? !t.dq && !t.dk && !t.dv : !t.o && !t.o_b && !t.lse)
        return 0;
    if (!t.shape.queries && !t.shape.keys)
        return 0;
    for (int k = i < 0 ? 0 : i; k < (i < 0 ? (int)IMPLEMENTATIONS : i + 1); k++)
        if (implementations[k].fits(t))
            return run_by(implementations[k], t);
    return i < 0 ? (int)cudaErrorInvalidValue : -1;
}

/* Scratch of whichever implementation may run, without what streams take. `rows`: an operand with as many rows as queries. */
size_t own_workspace_of(const vla_graph *g, const vlai_node *node, int rows, int tables, bool backward)
{
    const vla_attention_options *options = &node->attrs.attention;
    int64_t queries = operand_of(g, node, rows).shape[0];
    size_t own = backward ? delta_bytes(queries, options->heads) + round_256((size_t)query_tiles(queries) * sizeof(query_tile)) : 0;
    size_t groups = backward ? attention_groups_workspace(queries, options->heads) : 0;
    size_t longs = backward ? attention_long_workspace(queries, options->heads) : 0;
    own = groups > own ? groups : own;
    own = longs > own ? longs : own;
    if (options->mask == VLA_MASK_COLUMNS || options->longest <= WINDOW_LONGEST || node->n_inputs <= tables + 3 ||
        operand_of(g, node, rows).dtype != VLA_BF16)
        return own;
    size_t cudnn = attention_cudnn_workspace(operand_of(g, node, tables + 3).elements - 1, options->longest, options->heads, options->kv_heads,
                                             options->head_dim, backward);
    return cudnn > own ? cudnn : own;
}

size_t workspace_of(const vla_graph *g, const vlai_node *node, int rows, int tables, bool backward)
{
    const vla_attention_options *options = &node->attrs.attention;
    size_t own = own_workspace_of(g, node, rows, tables, backward);
    bool packed = node->op == VLAI_OP_attention_qkv || node->op == VLAI_OP_attention_qkv_grad;
    if (!packed || node->n_inputs <= tables + 4 || node->inputs[tables + 4] == VLA_NONE)
        return own;
    /* Two streams: nothing more where the kernels that know of them run. */
    const vlai_value_info &qkv = operand_of(g, node, rows);
    attention_task t = {};
    t.shape.queries = t.shape.keys = qkv.shape[0];
    t.shape.group = options->heads / options->kv_heads;
    t.shape.dim = options->head_dim;
    t.shape.scale = (float)options->scale;
    t.shape.vector = options->head_dim % 8 == 0;
    t.dtype = qkv.dtype;
    t.mask = options->mask;
    t.longest = options->longest;
    t.backward = backward;
    t.workspace_bytes = SIZE_MAX;
    if (t.mask != VLA_MASK_COLUMNS) {
        static const int32_t somewhere = 0;
        t.segments = &somewhere;
        t.n_segments = operand_of(g, node, tables + 3).elements - 1;
    }
    if (!fits_window(t) && attention_groups_fits(t) && attention_groups_streams(t))
        return own; /* wide, windows and long, which come before groups, do not: the first two fit only where windows does, long not with it */
    return round_256(own) + (backward ? 2 : 1) * joined_bytes(qkv.shape[0], options->heads, options->head_dim, qkv.dtype);
}

} // namespace

#define OP(name, rows, tables, backward)                                                               \
    extern "C" int vlai_cuda_##name(const vlai_cuda_call *call)                                        \
    {                                                                                                  \
        return run(call, -1);                                                                          \
    }                                                                                                  \
    extern "C" size_t vlai_cuda_workspace_##name(const vla_graph *g, const vlai_node *node)            \
    {                                                                                                  \
        return workspace_of(g, node, rows, tables, backward);                                          \
    }
OP(attention, 0, 3, false)
OP(attention_qkv, 0, 1, false)
OP(attention_grad, 1, 6, true)
OP(attention_qkv_grad, 1, 4, true)

extern "C" const char *vlai_cuda_attention_name(int i)
{
    return i >= 0 && i < IMPLEMENTATIONS ? implementations[i].name : nullptr;
}

extern "C" int vlai_cuda_attention_by(int i, const vlai_cuda_call *call)
{
    return i >= 0 && i < IMPLEMENTATIONS ? run(call, i) : -1;
}

extern "C" vla_status vlai_cuda_attention_prepare(const vlai_cuda_context *context, vlai_cuda_call *call, vla_error *)
{
    layout at = layout_of(call);
    attention_task t;
    char why[512] = "";
    if (!context->fast_attention || !context->cudnn || !task_of(call, at, t) || !attention_cudnn_fits(t))
        return VLA_OK;
    attention_task whole = t;
    if (t.map && !joined_of(t, whole))
        return VLA_OK;
    for (const implementation *i = implementations; i->forward != forward_cudnn; i++)
        if (i->fits(t))
            return VLA_OK; /* a better one */
    if (!t.o || !t.lse || (at.backward && (!t.dq || !t.dk || !t.dv)))
        return VLA_OK;
    if (!*context->cudnn)
        *context->cudnn = vlai_cudnn_open();
    call->plan = const_cast<void *>(attention_cudnn_plan(whole, at.backward, *context->cudnn, why, sizeof why));
    if (!call->plan && *why)
        vlai_warn("own attention kernels run instead of the fastest: %s", why);
    return VLA_OK;
}

/* Plans belong to the library's handle. */
extern "C" void vlai_cuda_attention_release(vlai_cuda_call *call)
{
    call->plan = nullptr;
}
