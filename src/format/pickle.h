/* Tensors of a PyTorch file (torch.save: a zip archive with a pickle and one entry per storage), read as data only.
 *
 * The pickle is run by a machine that knows lists, maps, texts, numbers and the few names by which tensors are rebuilt.
 * Any other name is kept as an unknown value and never looked up or called, so that a hostile file can do nothing but
 * be refused. Not read: compressed entries, files of PyTorch before 1.6 (no zip), tensors that are not row-major.
 *
 * The tensors of the first of {model_state_dict, state_dict, model_state, backbone_state_dict, model, module} that the
 * outermost map has are taken, else those of the outermost map itself; maps inside join their keys with dots.
 *
 *     VLA_TRY(vlai_pickle_read(map.data, map.size, path, on_tensor, context, err));
 *
 * vlai_safetensors_open takes such files too, by their ending (.pth, .pt, .bin). */
#ifndef VLAI_PICKLE_H
#define VLAI_PICKLE_H

#include "format/safetensors.h"

VLA_BEGIN_DECLS

/* `view` and its name live during the call only; its data points into the file. */
typedef vla_status (*vlai_pickle_tensor)(void *context, const vlai_tensor_view *view, vla_error *err);

vla_status vlai_pickle_read(const uint8_t *data, size_t size, const char *name, vlai_pickle_tensor on_tensor,
                            void *context, vla_error *err);

VLA_END_DECLS

#endif
