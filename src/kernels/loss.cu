/* The two losses and their gradients.
 *
 *     masked_mse          p, t, mask [N,C] -> sum(mask (p-t)^2) / sum(mask), error [N,C], count; sums in double
 *     masked_mse_grad     dp = dloss 2 mask (p - t) / count
 *     cross_entropy       logits [N,V], labels [N] -> mean of log sum exp(x) - x[label] over counted rows, error [N], count
 *     cross_entropy_grad  dx = dloss (softmax(x) - onehot) / count on counted rows, else 0
 *
 * masked_mse is small (action rows). Cross-entropy takes a block per row: forward reads the row once, with a running maximum
 * in each thread (N V elements); backward reads it twice, the second time mostly from L2, and writes it (3 N V). Rows that
 * do not count are not read. Expected: 0.8 of copy bandwidth from 200 rows on. */
#include "kernels/common.cuh"

namespace {

enum { CHUNK = 4096, ROW_THREADS = 512 };

/* A float operand of either type; for kernels too small to be worth an instance per mixture. */
struct operand {
    const void *data;
    bool is_bf16;
    __device__ float operator[](int64_t i) const
    {
        return is_bf16 ? __bfloat162float(((const bf16 *)data)[i]) : ((const float *)data)[i];
    }
};

operand operand_from(const vlai_cuda_tensor &t)
{
    return {t.data, t.dtype == VLA_BF16};
}

bool is_real(const vlai_cuda_tensor &t)
{
    return t.dtype == VLA_BF16 || t.dtype == VLA_F32;
}

__device__ void put(void *to, bool is_bf16, int64_t i, float x)
{
    if (is_bf16)
        ((bf16 *)to)[i] = __float2bfloat16_rn(x);
    else
        ((float *)to)[i] = x;
}

/* partial [2 blocks]: sum of errors and sum of mask of each chunk. */
__global__ void __launch_bounds__(THREADS)
    mse_kernel(operand p, operand t, operand mask, void *error, bool error_bf16, double *partial, int64_t n)
{
    int64_t first = (int64_t)blockIdx.x * CHUNK, end = first + CHUNK < n ? first + CHUNK : n;
    double sum = 0, count = 0;
    for (int64_t i = first + threadIdx.x; i < end; i += THREADS) {
        float d = p[i] - t[i], m = mask[i], e = __fmul_rn(m, __fmul_rn(d, d));
        if (error)
            put(error, error_bf16, i, e);
        sum += (double)e;
        count += (double)m;
    }
    sum = block_sum(sum, THREADS);
    count = block_sum(count, THREADS);
    if (threadIdx.x == 0) {
        partial[2 * blockIdx.x] = sum;
        partial[2 * blockIdx.x + 1] = count;
    }
}

__global__ void __launch_bounds__(THREADS) mse_total_kernel(const double *partial, int64_t blocks, float *loss, float *counted)
{
    double sum = 0, count = 0;
    for (int64_t i = threadIdx.x; i < blocks; i += THREADS) {
        sum += partial[2 * i];
        count += partial[2 * i + 1];
    }
    sum = block_sum(sum, THREADS);
    count = block_sum(count, THREADS);
    if (threadIdx.x == 0) {
        if (loss)
            *loss = (float)(sum / count);
        if (counted)
            *counted = (float)count;
    }
}

__global__ void __launch_bounds__(THREADS)
    mse_grad_kernel(const float *dloss, operand p, operand t, operand mask, const float *count, void *dp, bool dp_bf16, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n)
        put(dp, dp_bf16, i, 2.0f * *dloss / *count * (mask[i] * (p[i] - t[i])));
}

template <class X> __device__ inline float exponential(float x)
{
    if constexpr (std::is_same_v<X, bf16>)
        return __expf(x);
    else
        return expf(x);
}

/* log of sum exp(x) over a row, about its largest x; every thread gets it. */
template <class X, int V> __device__ double log_sum_exp(const X *x, int64_t n)
{
    float top = -INFINITY, sum = 0;
#pragma unroll 2
    for (int64_t i = threadIdx.x * V; i < n; i += ROW_THREADS * V) {
        pack<X, V> p;
        float v[V];
        p.load(x + i);
        p.get(v);
        float most = v[0];
#pragma unroll
        for (int k = 1; k < V; k++)
            most = fmaxf(most, v[k]);
        if (most > top) {
            sum *= exponential<X>(top - most);
            top = most;
        }
        if (top > -INFINITY) {
            float part = 0;
#pragma unroll
            for (int k = 0; k < V; k++)
                part += exponential<X>(v[k] - top);
            sum += part;
        } else {
#pragma unroll
            for (int k = 0; k < V; k++)
                sum += isnan(v[k]) ? v[k] : 0.0f;
        }
    }
    float most = block_max(top, ROW_THREADS);
    float scaled = sum == 0.0f ? 0.0f : top == -INFINITY ? sum : sum * exponential<X>(top - most);
    return (double)most + log((double)block_sum(scaled, ROW_THREADS));
}

template <class X, int V>
__global__ void __launch_bounds__(ROW_THREADS) cross_entropy_kernel(const X *x, const int32_t *labels, double *error, int64_t classes)
{
    int64_t row = blockIdx.x;
    int32_t label = labels[row];
    if (label < 0 || label >= classes) {
        if (threadIdx.x == 0)
            error[row] = 0;
        return;
    }
    x += row * classes;
    double lse = log_sum_exp<X, V>(x, classes);
    if (threadIdx.x == 0)
        error[row] = lse - (double)to_float(x[label]);
}

__global__ void __launch_bounds__(THREADS)
    cross_entropy_total_kernel(const double *error, const int32_t *labels, int64_t rows, int64_t classes, float *loss, float *errors,
                               float *counted)
{
    double sum = 0, count = 0;
    for (int64_t row = threadIdx.x; row < rows; row += THREADS) {
        sum += error[row];
        count += labels[row] >= 0 && labels[row] < classes;
        if (errors)
            errors[row] = (float)error[row];
    }
    sum = block_sum(sum, THREADS);
    count = block_sum(count, THREADS);
    if (threadIdx.x == 0) {
        if (loss)
            *loss = count > 0 ? (float)(sum / count) : 0.0f;
        if (counted)
            *counted = (float)count;
    }
}

template <class X, int V>
__global__ void __launch_bounds__(ROW_THREADS)
    cross_entropy_grad_kernel(const float *dloss, const X *x, const int32_t *labels, const float *count, X *dx, int64_t classes)
{
    int64_t row = blockIdx.x;
    int32_t label = labels[row];
    bool counts = label >= 0 && label < classes;
    x += row * classes;
    dx += row * classes;
    float lse = counts ? (float)log_sum_exp<X, V>(x, classes) : 0.0f, factor = counts ? *dloss / *count : 0.0f;
    for (int64_t i = threadIdx.x * V; i < classes; i += ROW_THREADS * V) {
        pack<X, V> p;
        float v[V] = {0};
        if (counts) {
            p.load(x + i);
            p.get(v);
#pragma unroll
            for (int k = 0; k < V; k++)
                v[k] = factor * exponential<X>(v[k] - lse) - (i + k == label ? factor : 0.0f);
        }
        p.set(v);
        p.store(dx + i);
    }
}

size_t mse_bytes(int64_t n)
{
    return round_256((size_t)((n + CHUNK - 1) / CHUNK) * 2 * sizeof(double));
}

} // namespace

NO_WORKSPACE(masked_mse_grad)
NO_WORKSPACE(cross_entropy_grad)

extern "C" size_t vlai_cuda_workspace_masked_mse(const vla_graph *g, const vlai_node *node)
{
    return mse_bytes(operand_of(g, node, 0).elements);
}

extern "C" int vlai_cuda_masked_mse(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &p = call->in[0], &t = call->in[1], &mask = call->in[2], &error = call->out[1];
    if (!is_real(p) || !is_real(t) || !is_real(mask))
        return (int)cudaErrorInvalidValue;
    unsigned blocks = blocks_for(p.elements, CHUNK);
    double *partial = (double *)call->workspace;
    if (blocks)
        mse_kernel<<<blocks, THREADS, 0, stream_of(call)>>>(operand_from(p), operand_from(t), operand_from(mask), error.data,
                                                            error.dtype == VLA_BF16, partial, p.elements);
    if (call->out[0].data || call->out[2].data)
        mse_total_kernel<<<1, THREADS, 0, stream_of(call)>>>(partial, blocks, (float *)call->out[0].data, (float *)call->out[2].data);
    return launched();
}

extern "C" int vlai_cuda_masked_mse_grad(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &dloss = call->in[0], &p = call->in[1], &t = call->in[2], &mask = call->in[3], &count = call->in[4];
    const vlai_cuda_tensor &dp = call->out[0];
    if (!dp.data || !p.elements)
        return 0;
    if (!is_real(p) || !is_real(t) || !is_real(mask) || dloss.dtype != VLA_F32 || count.dtype != VLA_F32)
        return (int)cudaErrorInvalidValue;
    mse_grad_kernel<<<blocks_for(p.elements, THREADS), THREADS, 0, stream_of(call)>>>(
        (const float *)dloss.data, operand_from(p), operand_from(t), operand_from(mask), (const float *)count.data, dp.data,
        dp.dtype == VLA_BF16, p.elements);
    return launched();
}

extern "C" size_t vlai_cuda_workspace_cross_entropy(const vla_graph *g, const vlai_node *node)
{
    return round_256((size_t)operand_of(g, node, 0).shape[0] * sizeof(double));
}

extern "C" int vlai_cuda_cross_entropy(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &labels = call->in[1];
    int64_t rows = rows_of(x), classes = cols_of(x);
    double *error = (double *)call->workspace;
    const int32_t *label = (const int32_t *)labels.data;
    return with_type(x.dtype, [&](auto tx) {
        using X = typename decltype(tx)::is;
        if (rows && classes % 8 == 0 && aligned(x.data))
            cross_entropy_kernel<X, 8><<<(unsigned)rows, ROW_THREADS, 0, stream_of(call)>>>((const X *)x.data, label, error, classes);
        else if (rows)
            cross_entropy_kernel<X, 1><<<(unsigned)rows, ROW_THREADS, 0, stream_of(call)>>>((const X *)x.data, label, error, classes);
        cross_entropy_total_kernel<<<1, THREADS, 0, stream_of(call)>>>(error, label, rows, classes, (float *)call->out[0].data,
                                                                      (float *)call->out[1].data, (float *)call->out[2].data);
        return launched();
    });
}

extern "C" int vlai_cuda_cross_entropy_grad(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &dloss = call->in[0], &x = call->in[1], &labels = call->in[2], &count = call->in[3], &dx = call->out[0];
    if (!dx.data || !x.elements)
        return 0;
    if (dx.dtype != x.dtype || dloss.dtype != VLA_F32 || count.dtype != VLA_F32)
        return (int)cudaErrorInvalidValue;
    unsigned rows = (unsigned)rows_of(x);
    int64_t classes = cols_of(x);
    return with_type(x.dtype, [&](auto tx) {
        using X = typename decltype(tx)::is;
        const float *d = (const float *)dloss.data, *n = (const float *)count.data;
        const int32_t *label = (const int32_t *)labels.data;
        if (classes % 8 == 0 && aligned(x.data) && aligned(dx.data))
            cross_entropy_grad_kernel<X, 8><<<rows, ROW_THREADS, 0, stream_of(call)>>>(d, (const X *)x.data, label, n, (X *)dx.data, classes);
        else
            cross_entropy_grad_kernel<X, 1><<<rows, ROW_THREADS, 0, stream_of(call)>>>(d, (const X *)x.data, label, n, (X *)dx.data, classes);
        return launched();
    });
}
