/* safetensors files: read memory-mapped, from one file or from a sharded set with an index; written whole or not at all.
 *
 * Format: 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}, "__metadata__": {...}},
 * then the data. Headers are hostile input: lengths, offsets, overlaps, shapes and duplicate names are checked.
 *
 *     vlai_safetensors *st;
 *     VLA_TRY(vlai_safetensors_open("ckpt/model.safetensors", &st, err));   // a file, an *.index.json, or a directory
 *     const vlai_tensor_view *w = vlai_safetensors_find(st, "model.norms.0.weight");
 *     vlai_safetensors_close(st);
 *
 * Views borrow the mapping and die with it. Threads: reading is safe from any thread. */
#ifndef VLAI_SAFETENSORS_H
#define VLAI_SAFETENSORS_H

#include "vla/dtype.h"
#include "vla/error.h"

VLA_BEGIN_DECLS

enum { VLAI_MAX_RANK = 8 };

typedef struct vlai_tensor_view {
    const char *name;
    vla_dtype dtype;
    int rank;
    int64_t shape[VLAI_MAX_RANK];
    int64_t elements;
    const void *data; /* row-major; not necessarily aligned */
    size_t bytes;
    const char *file; /* path of the file that holds it */
} vlai_tensor_view;

typedef struct vlai_safetensors vlai_safetensors;
struct vlai_writer; /* base/io.h */

/* `path`: a *.safetensors file, a *.safetensors.index.json, or a directory holding model.safetensors, an index, or
 * several *.safetensors files (all of them, sorted by name, as the reference merges a pretrained directory). A file of
 * torch.save (*.pth, *.pt, *.bin) is read as pickle.h says. */
vla_status vlai_safetensors_open(const char *path, vlai_safetensors **out, vla_error *err);
/* The same for one file that is in memory already, and stays there; `name` stands for it in messages. */
vla_status vlai_safetensors_open_memory(const void *data, size_t size, const char *name, vlai_safetensors **out,
                                        vla_error *err);
void vlai_safetensors_close(vlai_safetensors *st);

size_t vlai_safetensors_count(const vlai_safetensors *st);
const vlai_tensor_view *vlai_safetensors_at(const vlai_safetensors *st, size_t i); /* file order */
const vlai_tensor_view *vlai_safetensors_find(const vlai_safetensors *st, const char *name); /* NULL when absent */
const char *vlai_safetensors_metadata(const vlai_safetensors *st, const char *key);           /* NULL when absent */

/* Elements first..first+n-1 converted to float (F32, F64, F16, BF16, integers, BOOL). */
vla_status vlai_tensor_to_float(const vlai_tensor_view *view, int64_t first, int64_t n, float *out, vla_error *err);
/* The same to int64; floating types are an error. */
vla_status vlai_tensor_to_int64(const vlai_tensor_view *view, int64_t first, int64_t n, int64_t *out, vla_error *err);
/* VLA_E_NONFINITE with file, tensor, element and value for the first of these elements that is NaN or infinite: for who reads
 * weights. Integers never are. */
vla_status vlai_tensor_check_finite(const vlai_tensor_view *view, int64_t first, int64_t n, vla_error *err);

/* Writes tensors in the given order. `metadata` is NULL-terminated key, value, key, value... or NULL. `path` appears
 * only when complete (temporary name, fsync, rename). */
vla_status vlai_safetensors_write(const char *path, const vlai_tensor_view *tensors, size_t count,
                                  const char *const *metadata, vla_error *err);

/* The same for data that is not in one piece: `put` is called once per tensor, in order, and writes exactly its bytes. The
 * data pointers of `tensors` are not looked at. On failure `put` returns the status of vlai_writer_put as it is. */
typedef vla_status (*vlai_tensor_put)(void *context, size_t i, struct vlai_writer *writer, vla_error *err);
vla_status vlai_safetensors_stream(const char *path, const vlai_tensor_view *tensors, size_t count,
                                   const char *const *metadata, vlai_tensor_put put, void *context, vla_error *err);

VLA_END_DECLS

#endif
