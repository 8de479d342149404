/* Sums over the columns and over the rows of a matrix, in fp32 and a fixed order.
 *
 *     row_sum  x [N,C] -> y [N]: a warp per row, lanes first, then the tree of the warp
 *     col_sum  x [N,C] -> y [C]: kernels/columns.cuh
 *
 * Bytes: x once. Expected: 0.85 of copy bandwidth for N x C beyond a few MB. */
#include "kernels/columns.cuh"

namespace {

template <class X, class Y>
__global__ void __launch_bounds__(THREADS) row_sum_kernel(const X *x, Y *y, int64_t rows, int64_t cols, bool vector)
{
    int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (row >= rows)
        return;
    x += row * cols;
    float sum = 0;
    if (vector) {
#pragma unroll 4
        for (int64_t i = lane * 8; i < cols; i += 8 * WARP) {
            pack<X, 8> p;
            float v[8];
            p.load(x + i);
            p.get(v);
            sum += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
        }
    } else {
        for (int64_t i = lane; i < cols; i += WARP)
            sum += to_float(x[i]);
    }
    sum = warp_sum(sum);
    if (lane == 0)
        y[row] = from_float<Y>(sum);
}

} // namespace

NO_WORKSPACE(row_sum)

extern "C" int vlai_cuda_row_sum(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &x = call->in[0], &y = call->out[0];
    if (!y.data || !y.elements)
        return 0;
    int64_t rows = rows_of(x), cols = cols_of(x);
    return with_types(x.dtype, y.dtype, [&](auto tx, auto ty) {
        using X = typename decltype(tx)::is;
        using Y = typename decltype(ty)::is;
        row_sum_kernel<<<blocks_for(rows, THREADS / WARP), THREADS, 0, stream_of(call)>>>(
            (const X *)x.data, (Y *)y.data, rows, cols, aligned(x.data) && cols % 8 == 0);
        return launched();
    });
}

extern "C" size_t vlai_cuda_workspace_col_sum(const vla_graph *g, const vlai_node *node)
{
    const vlai_value_info &x = operand_of(g, node, 0);
    return column_workspace(x.shape[0], cols_of(x));
}

extern "C" int vlai_cuda_col_sum(const vlai_cuda_call *call)
{
    return call->out[0].data && call->out[0].elements ? column_sum_of(call, call->in[0], call->out[0]) : 0;
}
