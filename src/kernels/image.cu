/* Pictures to patch rows: y = (x - 255 mean) / (255 std), columns in the order channel, frame, row, column; the one frame
 * stands for all of them. A patch that does not lie inside `pixels` becomes NaN, never a stray read.
 *
 *     pixels [bytes] u8 HWC, patches [P,3] (byte offset, bytes per picture row, 0) -> [P, 3 temporal side^2]
 *
 * Bytes: 3 side^2 read, 3 temporal side^2 elements written a patch. Patches of 14 in two frames: a warp each, no divisions. Expected: 0.9
 * of copy bandwidth; measured on an H200 by gpu_kernels, [16848,1176] in bf16: 19.1 us, 0.90. Others: a block per patch, the bytes once into shared
 * memory, as the result's order wants them, then the frames in 16-byte words: 114 us at that shape, for its divisions and short blocks. */
#include "kernels/common.cuh"

namespace {

enum { PATCH_THREADS = 128 };

struct normalisation {
    float mean[3], deviation[3];
};

template <class Y, int V>
__global__ void __launch_bounds__(PATCH_THREADS)
    patchify_kernel(const uint8_t *pixels, int64_t bytes, const int32_t *patches, Y *y, int side, int temporal, normalisation to)
{
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

enum { PATCH_WARPS = 8, PATCH_BLOCKS = 4 * 132 /* that are resident at once */ };

/* A warp per patch; SIDE is even. The values of the 256 bytes stand in a table of each channel, made by the block. A patch's bytes
 * are brought to shared memory in pairs, in the order of the picture, so that 4 neighbouring pixels are 12 bytes, or three words: a
 * lane makes of them 4 elements of each channel and stores those to every frame. */
template <class Y, int SIDE, int TEMPORAL>
__global__ void __launch_bounds__(PATCH_WARPS *WARP, 4)
    patchify_warp_kernel(const uint8_t *pixels, int64_t bytes, const int32_t *patches, Y *y, int count, normalisation to)
{
    enum { AREA = SIDE * SIDE, PAIRS = 3 * AREA / 2, ROW_PAIRS = 3 * SIDE / 2, LOADS = (PAIRS + WARP - 1) / WARP, QUADS = AREA / 4 };
    static_assert(SIDE % 2 == 0, "pairs of bytes, and 4 pixels that do not leave a patch");
    __shared__ Y values[3][256];
    __shared__ __align__(16) uint16_t raw[PATCH_WARPS][(PAIRS + 7) / 8 * 8];
    for (int i = threadIdx.x; i < 3 * 256; i += PATCH_WARPS * WARP) {
        int channel = i / 256;
        values[channel][i % 256] = from_float<Y>(((float)(i % 256) - to.mean[channel]) / to.deviation[channel]);
    }
    __syncthreads();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, step = gridDim.x * PATCH_WARPS;
    uint16_t *mine = raw[warp];
    for (int p = blockIdx.x * PATCH_WARPS + warp; p < count; p += step) {
        int64_t first = patches[3 * (int64_t)p], stride = patches[3 * (int64_t)p + 1];
        bool inside = first >= 0 && stride >= 3 * SIDE && first + (SIDE - 1) * stride + 3 * SIDE <= bytes;
        if (inside) {
            const uint8_t *from = pixels + first;
            bool even = (((size_t)from | (size_t)stride) & 1) == 0;
            uint16_t pair[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; k++) {
                int i = k * WARP + lane, row = i / ROW_PAIRS, at = (i - row * ROW_PAIRS) * 2;
                if (i < PAIRS) {
                    const uint8_t *two = from + row * stride + at;
                    pair[k] = even ? *(const uint16_t *)two : (uint16_t)(two[0] | two[1] << 8);
                }
            }
            __syncwarp(); /* all lanes have read the patch before */
#pragma unroll
            for (int k = 0; k < LOADS; k++)
                if (k * WARP + lane < PAIRS)
                    mine[k * WARP + lane] = pair[k];
            __syncwarp();
        }
        Y *out = y + (int64_t)p * (3 * TEMPORAL * AREA);
#pragma unroll
        for (int q = lane; q < QUADS; q += WARP) {
            pack<Y, 4> result[3];
            if (inside) {
                const uint32_t *words = (const uint32_t *)mine + 3 * q;
                uint32_t w[3] = {words[0], words[1], words[2]};
#pragma unroll
                for (int c = 0; c < 3; c++) {
                    Y *four = reinterpret_cast<Y *>(result[c].w);
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        int byte = 3 * k + c;
                        four[k] = values[c][w[byte / 4] >> 8 * (byte % 4) & 255];
                    }
                }
            } else {
                const float nan = __int_as_float(0x7FC00000), none[4] = {nan, nan, nan, nan};
#pragma unroll
                for (int c = 0; c < 3; c++)
                    result[c].set(none);
            }
#pragma unroll
            for (int c = 0; c < 3; c++)
#pragma unroll
                for (int f = 0; f < TEMPORAL; f++)
                    result[c].store(out + (c * TEMPORAL + f) * AREA + 4 * q);
        }
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
    int side = options->patch, temporal = options->temporal;
    size_t shared = (size_t)side * side * 3 * sizeof(float);
    if (shared > 48 * 1024)
        return (int)cudaErrorInvalidValue;
    return with_type(y.dtype, [&](auto ty) {
        using Y = typename decltype(ty)::is;
        const uint8_t *from = (const uint8_t *)pixels.data;
        const int32_t *where = (const int32_t *)patches.data;
        Y *result = (Y *)y.data;
        int64_t count = rows_of(y);
        cudaStream_t stream = stream_of(call);
        bool vector = cols_of(y) % 8 == 0 && aligned(result);
        if (vector && side == 14 && temporal == 2 && count <= INT32_MAX / 2) { /* Qwen2.5-VL's */
            unsigned most = blocks_for(count, PATCH_WARPS), blocks = most < PATCH_BLOCKS ? most : (unsigned)PATCH_BLOCKS;
            patchify_warp_kernel<Y, 14, 2><<<blocks, PATCH_WARPS * WARP, 0, stream>>>(from, pixels.elements, where, result, (int)count, to);
        } else if (vector)
            patchify_kernel<Y, 8><<<(unsigned)count, PATCH_THREADS, shared, stream>>>(from, pixels.elements, where, result, side, temporal, to);
        else
            patchify_kernel<Y, 1><<<(unsigned)count, PATCH_THREADS, shared, stream>>>(from, pixels.elements, where, result, side, temporal, to);
        return launched();
    });
}
