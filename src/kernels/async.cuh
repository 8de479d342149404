/* Copies from global to shared memory that run while the threads compute. A thread waits for its own; what others copied it
 * sees behind a barrier that follows their wait. */
#ifndef VLAI_ASYNC_CUH
#define VLAI_ASYNC_CUH

#include "kernels/common.cuh"

/* Lets a kernel have more shared memory than the 48 KB that need no asking. */
template <class K> inline int allow_shared(K kernel, size_t bytes)
{
    return (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

__device__ inline uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Copies BYTES (4, 8 or 16) from global to shared memory in the background, or zeros when `there` is false. */
template <int BYTES> __device__ inline void copy_async(void *to, const void *from, bool there)
{
    int size = there ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(size) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(size)
                     : "memory");
}

__device__ inline void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most `PENDING` of this thread's groups are on their way. */
template <int PENDING> __device__ inline void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* The copy engine, which copies by itself and counts what has come at a barrier in shared memory: from compute capability 9.0 on. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define VLAI_COPY_ENGINE 1

__device__ inline void full_init(uint64_t *full, int count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(full)), "r"(count) : "memory");
}

/* Once all are made: the copy engine sees them. */
__device__ inline void full_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* The barrier's next phase ends when `bytes` have come. */
__device__ inline void full_expect(uint64_t *full, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full)), "r"(bytes) : "memory");
}

/* Until phase `n` (0, 1, ...) has ended; phases n - 1 and before must have. */
__device__ inline void full_wait(uint64_t *full, int n)
{
    uint32_t at = shared_address(full), done;
    do
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(at), "r"(n & 1)
                     : "memory");
    while (!done);
}

/* By one thread: bytes, a multiple of 16 as both addresses are. */
__device__ inline void full_copy(void *to, const void *from, int bytes, uint64_t *full)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from),
                 "r"(bytes), "r"(shared_address(full))
                 : "memory");
}

/* The same from shared to global memory. What other threads wrote there must have passed their written_for_copies, and a barrier. */
__device__ inline void copy_out(void *to, const void *from, int bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

__device__ inline void written_for_copies()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Until all but PENDING of this thread's copies out have read what they copy. */
template <int PENDING> __device__ inline void copied_out()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Until they have written it, too. */
__device__ inline void copied_out_done()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

/* Words of 16 bytes on their way to the thread that will use them: STAGES turns of WORDS each, in the block's dynamic shared
 * memory. A turn is asked for STAGES - 1 turns before its use, and costs no registers till then. */
template <int WORDS, int STAGES> struct word_ring {
    uint4 *mine;
    int stride;

    __device__ word_ring(uint4 *shared) : mine(shared + threadIdx.x), stride((int)blockDim.x) {}
    __device__ uint4 *slot(int stage, int word) const { return mine + (stage * WORDS + word) * stride; }
    /* 8 elements that begin at word `word` of a turn: asked for, and taken. */
    template <class T> __device__ void ask(int stage, int word, const T *from) const
    {
#pragma unroll
        for (int i = 0; i < pack<T, 8>::WORDS; i++)
            copy_async<16>(slot(stage, word + i), reinterpret_cast<const uint4 *>(from) + i, true);
    }
    template <class T> __device__ void take(int stage, int word, pack<T, 8> &to) const
    {
#pragma unroll
        for (int i = 0; i < pack<T, 8>::WORDS; i++)
            to.w[i] = *slot(stage, word + i);
    }
};

/* Whether a kernel of more than 64 registers, which is empty where the device has no copy engine, was compiled for the device: empty
 * ones take few. */
template <class K> inline bool has_code(K kernel)
{
    cudaFuncAttributes a;
    if (cudaFuncGetAttributes(&a, kernel) == cudaSuccess)
        return a.numRegs > 64;
    (void)cudaGetLastError();
    return false;
}

/* Lets a kernel have this much dynamic shared memory, and as many blocks of it as fit. */
template <class K> inline int allow_ring(K kernel, size_t bytes)
{
    int status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    return status ? status : allow_shared(kernel, bytes);
}

#endif
