/* The CUDA runtime in plain C, as far as the executor and the tests need it. Functions return 0 or a CUDA error number;
 * vlai_device_error gives its text. Pointers named `device` are device memory. */
#ifndef VLAI_DEVICE_H
#define VLAI_DEVICE_H

#include "vla/api.h"

VLA_BEGIN_DECLS

typedef struct vlai_device_info {
    char name[256];
    int major, minor, multiprocessors;
    size_t memory, free;
} vlai_device_info;

int vlai_device_count(int *count);
int vlai_device_select(int index, vlai_device_info *info);
const char *vlai_device_error(int code);

int vlai_device_alloc(size_t bytes, void **device);
void vlai_device_free(void *device);
int vlai_device_pinned_alloc(size_t bytes, void **host);
void vlai_device_pinned_free(void *host);

int vlai_device_stream_create(void **stream);
void vlai_device_stream_destroy(void *stream);
int vlai_device_synchronize(void *stream);

/* Asynchronous on the stream; host memory should be pinned. */
int vlai_device_upload(void *device, const void *host, size_t bytes, void *stream);
int vlai_device_download(void *host, const void *device, size_t bytes, void *stream);
int vlai_device_zero(void *device, size_t bytes, void *stream);

/* Capture of what is launched on a stream into a graph that can be replayed. */
int vlai_device_capture_begin(void *stream);
int vlai_device_capture_end(void *stream, void **graph);
int vlai_device_replay(void *graph, void *stream);
void vlai_device_graph_destroy(void *graph);

int vlai_device_event_create(void **event);
void vlai_device_event_destroy(void *event);
int vlai_device_event_record(void *event, void *stream);
int vlai_device_event_elapsed(void *start, void *end, float *milliseconds); /* waits for `end` */

VLA_END_DECLS

#endif
