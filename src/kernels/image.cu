/* Pictures to patch rows: y = (x - 255 mean) / (255 std), columns in the order channel, frame, row, column; the one frame
 * stands for all of them. A patch that does not lie inside `pixels` becomes NaN, never a stray read.
 *
 *     pixels [bytes] u8 HWC, patches [P,3] (byte offset, bytes per picture row, 0) -> [P, 3 temporal side^2]
 *
 * A block per patch: the bytes once into shared memory, as the result's order wants them, then the frames in 16-byte words.
 * Bytes: 3 side^2 read, 3 temporal side^2 elements written a patch. Expected: 0.5 of copy bandwidth (short blocks). */
#include "kernels/common.cuh"

namespace {

enum { PATCH_THREADS = 128 };

struct normalisation {
    float mean[3], deviation[3];
};

/* SIDE, TEMPORAL: where they are known when this is compiled, so that nothing is divided by; else 0. */
template <class Y, int V, int SIDE, int TEMPORAL>
__global__ void __launch_bounds__(PATCH_THREADS)
    patchify_kernel(const uint8_t *pixels, int64_t bytes, const int32_t *patches, Y *y, int any_side, int any_temporal, normalisation to)
{
    int side = SIDE ? SIDE : any_side, temporal = TEMPORAL ? TEMPORAL : any_temporal;
    extern __shared__ float frame[]; /* [3][side][side] */
    int area = side * side, cols = 3 * temporal * area;
    int64_t first = patches[3 * (int64_t)blockIdx.x], stride = patches[3 * (int64_t)blockIdx.x + 1];
    bool inside = first >= 0 && stride >= 3 * side && first + (side - 1) * stride + 3 * side <= bytes;
    for (int i = threadIdx.x; i < 3 * area; i += PATCH_THREADS) {
        int row = i / (3 * side), in_row = i - row * 3 * side, col = in_row / 3, channel = in_row - col * 3;
        float x = __int_as_float(0x7FC00000); /* NaN */
        if (inside)
            x = ((float)pixels[first + row * stride + in_row] - to.mean[channel]) / to.deviation[channel];
        frame[channel * area + row * side + col] = x;
    }
    __syncthreads();
    y += blockIdx.x * (int64_t)cols;
    for (int i = threadIdx.x * V; i < cols; i += PATCH_THREADS * V) {
        float v[V];
        int channel = i / (temporal * area), at = (i - channel * temporal * area) % area;
#pragma unroll
        for (int k = 0; k < V; k++) {
            v[k] = frame[channel * area + at];
            if (++at == area) {
                at = 0;
                channel = (i + k + 1) / (temporal * area);
                channel = channel < 3 ? channel : 2;
            }
        }
        pack<Y, V> p;
        p.set(v);
        p.store(y + i);
    }
}

} // namespace

NO_WORKSPACE(patchify)

extern "C" int vlai_cuda_patchify(const vlai_cuda_call *call)
{
    const vlai_cuda_tensor &pixels = call->in[0], &patches = call->in[1], &y = call->out[0];
    const vla_patchify_options *options = &call->node->attrs.patchify;
    if (!y.data || !y.elements)
        return 0;
    normalisation to;
    for (int c = 0; c < 3; c++) {
        to.mean[c] = options->mean[c] * 255;
        to.deviation[c] = options->std[c] * 255;
    }
    int side = options->patch;
    size_t shared = (size_t)side * side * 3 * sizeof(float);
    if (shared > 48 * 1024)
        return (int)cudaErrorInvalidValue;
    return with_type(y.dtype, [&](auto ty) {
        using Y = typename decltype(ty)::is;
        auto launch = [&](auto v, auto known_side, auto known_temporal) {
            constexpr int V = decltype(v)::value;
            patchify_kernel<Y, V, decltype(known_side)::value, decltype(known_temporal)::value><<<(unsigned)rows_of(y), PATCH_THREADS, shared, stream_of(call)>>>(
                (const uint8_t *)pixels.data, pixels.elements, (const int32_t *)patches.data, (Y *)y.data, side, options->temporal, to);
            return launched();
        };
        bool vector = cols_of(y) % 8 == 0 && aligned(y.data);
        using std::integral_constant;
        integral_constant<int, 0> any;
        if (vector && side == 14 && options->temporal == 2) /* Qwen2.5-VL's */
            return launch(integral_constant<int, 8>{}, integral_constant<int, 14>{}, integral_constant<int, 2>{});
        return vector ? launch(integral_constant<int, 8>{}, any, any) : launch(integral_constant<int, 1>{}, any, any);
    });
}
