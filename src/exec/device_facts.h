/* What a device is, what it can do at best, and how it is doing: the yardsticks of measurements. In a build without CUDA,
 * and for the CPU, there is nothing to say: names are empty, numbers 0.
 *
 *     vlai_device_facts f;
 *     VLA_TRY(vlai_device_facts_get(ex, &f, err));
 *     VLA_TRY(vlai_device_peaks_measure(ex, &f, err));    // about 3 s, 1.5 GB of the device's memory meanwhile
 *     ... run ...
 *     vlai_device_now now = vlai_device_now_get(ex); */
#ifndef VLAI_DEVICE_FACTS_H
#define VLAI_DEVICE_FACTS_H

#include "base/text.h"
#include "vla/run.h"

VLA_BEGIN_DECLS

typedef struct vlai_device_facts {
    char name[256], driver[96];
    int cuda_driver, cuda_runtime; /* 1000 major + 10 minor */
    size_t cublaslt;
    size_t memory;        /* bytes */
    double watts;         /* that the board may take */
    double nominal_flops; /* per second, dense bf16, of the vendor's data sheet; 0: not in our table */
    /* measured, 0 before: */
    double copy_bytes; /* per second, read and written, of a copy within the device */
    double gemm_flops; /* per second, bf16 8192^3 of random data through cuBLASLt's fastest algorithm, after a second of it */
} vlai_device_facts;

typedef struct vlai_device_now {
    int mhz, celsius;
    double watts;
    size_t used; /* bytes of device memory that the driver has given out, by all programs */
    uint64_t allocations, synchronizations; /* by this program so far */
} vlai_device_now;

vla_status vlai_device_facts_get(const vla_executor *executor, vlai_device_facts *out, vla_error *err);
vla_status vlai_device_peaks_measure(const vla_executor *executor, vlai_device_facts *out, vla_error *err);
vlai_device_now vlai_device_now_get(const vla_executor *executor);

/* "2 GPUs: NVIDIA H200 (150.1 GB), NVIDIA H200 (150.1 GB)"; nothing where this build can use none. */
void vlai_device_list(vlai_text *out);

VLA_END_DECLS

#endif
