/* Multiprocessors that are taken, for measurements of what runs beside a collective: a block on each, with all of its shared memory,
 * that does nothing until it is told to end, or for MOST_NS. */
#include "base/memory.h"
#include "kernels/device.h"

#include <cuda_runtime.h>

namespace {

enum { HOLD_THREADS = 256 };
const unsigned long long MOST_NS = 20000000000ull;

struct hold {
    cudaStream_t stream;
    int *stop; /* pinned host memory, which the device reads */
};

__device__ unsigned long long nanoseconds()
{
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__global__ void __launch_bounds__(HOLD_THREADS) hold_kernel(const volatile int *stop)
{
    if (threadIdx.x == 0) {
        unsigned long long start = nanoseconds();
        while (!*stop && nanoseconds() - start < MOST_NS)
            __nanosleep(2000);
    }
    __syncthreads();
}

cudaError_t launch(hold *h, int leave)
{
    int device, all, shared;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (code == cudaSuccess)
        code = cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (code == cudaSuccess)
        code = cudaStreamCreateWithFlags(&h->stream, cudaStreamNonBlocking);
    if (code == cudaSuccess)
        code = cudaMallocHost((void **)&h->stop, sizeof *h->stop);
    if (code != cudaSuccess || all <= leave)
        return code;
    *h->stop = 0;
    hold_kernel<<<all - leave, HOLD_THREADS, shared, h->stream>>>(h->stop);
    return cudaGetLastError();
}

} // namespace

int vlai_device_hold_begin(int leave, void **out)
{
    hold *h = (hold *)vlai_calloc(1, sizeof *h);
    *out = h;
    return (int)(h ? launch(h, leave) : cudaErrorMemoryAllocation);
}

int vlai_device_hold_end(void *held)
{
    hold *h = (hold *)held;
    cudaError_t code = cudaSuccess;
    if (!h)
        return 0;
    if (h->stop)
        *(volatile int *)h->stop = 1;
    if (h->stream) {
        code = cudaStreamSynchronize(h->stream);
        cudaStreamDestroy(h->stream);
    }
    if (h->stop)
        cudaFreeHost(h->stop);
    vlai_free(h);
    return (int)code;
}
