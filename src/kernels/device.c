#include "kernels/device.h"

#include <cuda_runtime_api.h>
#include <stdio.h>

int vlai_device_count(int *count)
{
    *count = 0;
    return (int)cudaGetDeviceCount(count);
}

int vlai_device_describe(int index, vlai_device_info *info)
{
    struct cudaDeviceProp p;
    cudaError_t code = cudaGetDeviceProperties(&p, index);
    if (code != cudaSuccess)
        return (int)code;
    snprintf(info->name, sizeof info->name, "%s", p.name);
    info->major = p.major;
    info->minor = p.minor;
    info->multiprocessors = p.multiProcessorCount;
    info->memory = p.totalGlobalMem;
    info->free = 0;
    return (int)cudaDeviceGetPCIBusId(info->bus, (int)sizeof info->bus, index);
}

int vlai_device_use(int index)
{
    return (int)cudaSetDevice(index);
}

int vlai_device_select(int index, vlai_device_info *info)
{
    int code = vlai_device_use(index);
    if (code || (code = vlai_device_describe(index, info)))
        return code;
    return (int)cudaMemGetInfo(&info->free, &info->memory);
}

const char *vlai_device_error(int code)
{
    return cudaGetErrorString((cudaError_t)code);
}

static _Atomic uint64_t allocations, synchronizations, waits;

vlai_device_counts vlai_device_counts_get(void)
{
    return (vlai_device_counts){allocations, synchronizations, waits};
}

int vlai_device_versions(int *driver, int *runtime)
{
    cudaError_t code = cudaDriverGetVersion(driver);
    return (int)(code != cudaSuccess ? code : cudaRuntimeGetVersion(runtime));
}

int vlai_device_memory(size_t *free, size_t *total)
{
    return (int)cudaMemGetInfo(free, total);
}

/* A lack of memory is told here and now; what launches next must not hear of it again from cudaGetLastError. */
static int told(cudaError_t code)
{
    if (code == cudaErrorMemoryAllocation)
        (void)cudaGetLastError();
    return (int)code;
}

int vlai_device_alloc(size_t bytes, void **device)
{
    allocations++;
    *device = NULL;
    return told(cudaMalloc(device, bytes ? bytes : 1));
}

void vlai_device_free(void *device)
{
    if (device)
        cudaFree(device);
}

int vlai_device_pinned_alloc(size_t bytes, void **host)
{
    allocations++;
    *host = NULL;
    return told(cudaMallocHost(host, bytes ? bytes : 1));
}

void vlai_device_pinned_free(void *host)
{
    if (host)
        cudaFreeHost(host);
}

int vlai_device_stream_create(void **stream)
{
    return (int)cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking);
}

int vlai_device_stream_create_urgent(void **stream)
{
    int least, greatest;
    cudaError_t code = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    return code != cudaSuccess ? (int)code : (int)cudaStreamCreateWithPriority((cudaStream_t *)stream, cudaStreamNonBlocking, greatest);
}

void vlai_device_stream_destroy(void *stream)
{
    if (stream)
        cudaStreamDestroy((cudaStream_t)stream);
}

int vlai_device_synchronize(void *stream)
{
    synchronizations++;
    return (int)cudaStreamSynchronize((cudaStream_t)stream);
}

int vlai_device_upload(void *device, const void *host, size_t bytes, void *stream)
{
    return (int)cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, (cudaStream_t)stream);
}

int vlai_device_download(void *host, const void *device, size_t bytes, void *stream)
{
    return (int)cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, (cudaStream_t)stream);
}

int vlai_device_zero(void *device, size_t bytes, void *stream)
{
    return (int)cudaMemsetAsync(device, 0, bytes, (cudaStream_t)stream);
}

int vlai_device_copy(void *to, const void *from, size_t bytes, void *stream)
{
    return (int)cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, (cudaStream_t)stream);
}

int vlai_device_wait(void *stream, void *event)
{
    return (int)cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)event, 0);
}

int vlai_device_event_synchronize(void *event)
{
    if (cudaEventQuery((cudaEvent_t)event) == cudaSuccess)
        return 0;
    waits++;
    return (int)cudaEventSynchronize((cudaEvent_t)event);
}

int vlai_device_fence_create(void **event)
{
    return (int)cudaEventCreateWithFlags((cudaEvent_t *)event, cudaEventDisableTiming);
}

int vlai_device_kernel_load(const void *code, const char *name, void **library, void **kernel)
{
    cudaError_t failed = cudaLibraryLoadData((cudaLibrary_t *)library, code, NULL, NULL, 0, NULL, NULL, 0);
    return failed != cudaSuccess ? (int)failed : (int)cudaLibraryGetKernel((cudaKernel_t *)kernel, (cudaLibrary_t)*library, name);
}

void vlai_device_kernel_unload(void *library)
{
    if (library)
        cudaLibraryUnload((cudaLibrary_t)library);
}

int vlai_device_kernel_launch(void *kernel, unsigned blocks, unsigned threads, void **arguments, void *stream)
{
    return (int)cudaLaunchKernel(kernel, (dim3){blocks, 1, 1}, (dim3){threads, 1, 1}, arguments, 0, (cudaStream_t)stream);
}

int vlai_device_capture_begin(void *stream)
{
    return (int)cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal);
}

int vlai_device_capture_end(void *stream, void **graph)
{
    cudaGraph_t captured = NULL;
    cudaGraphExec_t exec = NULL;
    cudaError_t code = cudaStreamEndCapture((cudaStream_t)stream, &captured);
    if (code == cudaSuccess)
        code = cudaGraphInstantiate(&exec, captured, 0);
    if (captured)
        cudaGraphDestroy(captured);
    *graph = exec;
    return (int)code;
}

int vlai_device_replay(void *graph, void *stream)
{
    return (int)cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream);
}

void vlai_device_graph_destroy(void *graph)
{
    if (graph)
        cudaGraphExecDestroy((cudaGraphExec_t)graph);
}

int vlai_device_event_create(void **event)
{
    return (int)cudaEventCreate((cudaEvent_t *)event);
}

void vlai_device_event_destroy(void *event)
{
    if (event)
        cudaEventDestroy((cudaEvent_t)event);
}

int vlai_device_event_record(void *event, void *stream)
{
    return (int)cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream);
}

int vlai_device_event_elapsed(void *start, void *end, float *milliseconds)
{
    cudaError_t code = cudaEventSynchronize((cudaEvent_t)end);
    return code != cudaSuccess ? (int)code : (int)cudaEventElapsedTime(milliseconds, (cudaEvent_t)start, (cudaEvent_t)end);
}
