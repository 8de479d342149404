/* The CUDA runtime in plain C, as far as the executor and the tests need it. Functions return 0 or a CUDA error number;
 * vlai_device_error gives its text. Pointers named `device` are device memory. */
#ifndef VLAI_DEVICE_H
#define VLAI_DEVICE_H

#include "vla/api.h"

#include <stddef.h>
#include <stdint.h>

VLA_BEGIN_DECLS

typedef struct vlai_device_info {
    char name[256], bus[32]; /* bus: PCI address */
    int major, minor, multiprocessors;
    size_t memory, free;
} vlai_device_info;

int vlai_device_count(int *count);
int vlai_device_select(int index, vlai_device_info *info); /* of this thread, as vlai_device_use; and what it is */
int vlai_device_use(int index); /* this thread's calls are for that device */
int vlai_device_describe(int index, vlai_device_info *info); /* without opening it; `free` is 0 */
const char *vlai_device_error(int code);

int vlai_device_alloc(size_t bytes, void **device);
void vlai_device_free(void *device);
int vlai_device_pinned_alloc(size_t bytes, void **host);
void vlai_device_pinned_free(void *host);

int vlai_device_stream_create(void **stream);
int vlai_device_stream_create_urgent(void **stream); /* its work goes first where both could */
void vlai_device_stream_destroy(void *stream);
int vlai_device_synchronize(void *stream);

/* Asynchronous on the stream; host memory should be pinned. */
int vlai_device_upload(void *device, const void *host, size_t bytes, void *stream);
int vlai_device_download(void *host, const void *device, size_t bytes, void *stream);
int vlai_device_zero(void *device, size_t bytes, void *stream);
int vlai_device_copy(void *to, const void *from, size_t bytes, void *stream); /* within the device */

/* Makes what is launched on `stream` from now on wait for the event. */
int vlai_device_wait(void *stream, void *event);
int vlai_device_event_synchronize(void *event); /* the host waits */

/* What may not happen while steps run: calls so far, of this process. `waits`: times the host waited for an event. */
typedef struct vlai_device_counts {
    uint64_t allocations, synchronizations, waits;
} vlai_device_counts;
vlai_device_counts vlai_device_counts_get(void);

int vlai_device_versions(int *driver, int *runtime); /* of CUDA: 1000 major + 10 minor */

/* Bytes of device memory that the driver has free, and the total. */
int vlai_device_memory(size_t *free, size_t *total);

/* Machine code that was compiled at run time. */
int vlai_device_kernel_load(const void *code, const char *name, void **library, void **kernel);
void vlai_device_kernel_unload(void *library);
int vlai_device_kernel_launch(void *kernel, unsigned blocks, unsigned threads, void **arguments, void *stream);

/* Capture of what is launched on a stream into a graph that can be replayed. */
int vlai_device_capture_begin(void *stream);
int vlai_device_capture_end(void *stream, void **graph);
int vlai_device_replay(void *graph, void *stream);
void vlai_device_graph_destroy(void *graph);

/* For measurements (kernels/hold.cu): all multiprocessors of the chosen device but `leave` are taken from whatever is launched now,
 * until the end, or for 20 s. A kernel that was never launched before may have to wait until then. *hold goes to end in any case;
 * NULL: nothing. */
int vlai_device_hold_begin(int leave, void **hold);
int vlai_device_hold_end(void *hold);

int vlai_device_event_create(void **event); /* with time */
int vlai_device_fence_create(void **event); /* an event without time: cheaper, for order alone */
void vlai_device_event_destroy(void *event);
int vlai_device_event_record(void *event, void *stream);
int vlai_device_event_elapsed(void *start, void *end, float *milliseconds); /* waits for `end` */

VLA_END_DECLS

#endif
