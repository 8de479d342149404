/* The tensors of a Wall-X checkpoint: which there must be, and where a stored file holds them.
 *
 * Names are those of the fused layout that the reference saves: q, k and v of a layer are the rows of one tensor, gate and
 * up likewise. A stored file may spell any tensor otherwise, each by itself:
 *
 *   unfused        ...self_attn.{q,k,v}_proj_experts.E, ...{gate,up}_proj     joined row-wise on reading
 *   plain Qwen     ...mlp.X, ...self_attn.X_proj, ...input_layernorm, norm    expert 0 of a Qwen2.5-VL file
 *   newer Qwen     model.language_model.X, model.visual.X                     the same below other prefixes
 *
 *     vlai_wallx_weight *weights; size_t count; vlai_wallx_layout *layout;
 *     VLA_TRY(vlai_wallx_stored_sizes(st, &config.vocab_size, NULL, NULL, err));   // rows as stored
 *     VLA_TRY(vlai_wallx_weights(&config, &weights, &count, err));
 *     VLA_TRY(vlai_wallx_layout_open(st, weights, count, &layout, err));
 *     VLA_TRY(vlai_wallx_layout_require(layout, err));          // or look at layout->report
 *     for (size_t i = 0; i < count; i++)
 *         if (vlai_wallx_layout_has(layout, i))
 *             VLA_TRY(vlai_wallx_layout_read(layout, i, 0, weights[i].elements, buffer, err));
 *
 * A layout borrows the file and the weights. Threads: reading is safe from any thread. */
#ifndef VLAI_WALLX_LAYOUT_H
#define VLAI_WALLX_LAYOUT_H

#include "format/safetensors.h"
#include "model/wallx_config.h"

VLA_BEGIN_DECLS

typedef struct vlai_wallx_weight {
    char name[96];
    int rank;
    int64_t shape[VLAI_MAX_RANK];
    int64_t elements;
    bool optional; /* lm_head (tied to the embedding) and propri_proj may be absent */
    /* Rows of the unfused parts, for tensors that have such: q, k, v or gate, up. part_count is 1 for the others. */
    int part_count;
    int64_t part_rows[3];
} vlai_wallx_weight;

/* All tensors of a configuration, lm_head and propri_proj last. Released with vlai_free. */
vla_status vlai_wallx_weights(const vlai_wallx_config *config, vlai_wallx_weight **out, size_t *count, vla_error *err);
/* Name of part `part` of a fused tensor in the unfused spelling; false when the tensor has no parts. */
bool vlai_wallx_part_name(const vlai_wallx_weight *weight, int part, char *out, size_t size);

/* Sizes that a stored file decides: embedding rows, action and state widths. One that the file does not tell is left
 * alone; each pointer may be NULL. */
vla_status vlai_wallx_stored_sizes(const vlai_safetensors *st, int64_t *vocab, int64_t *action_dim, int64_t *propri_dim,
                                   vla_error *err);

/* Where one tensor stands: 1 view, or the 2 or 3 parts to join row-wise; 0 when absent. */
typedef struct vlai_wallx_source {
    const vlai_tensor_view *parts[3];
    int count;
} vlai_wallx_source;

typedef struct vlai_wallx_names {
    const char **names; /* each borrowed from the weights or the file, or owned by the layout */
    size_t count, capacity;
} vlai_wallx_names;

typedef struct vlai_wallx_layout {
    const vlai_safetensors *st;
    const vlai_wallx_weight *weights;
    size_t count;
    vlai_wallx_source *sources; /* one per weight */
    struct {
        vlai_wallx_names missing;    /* required and nowhere; a missing part is named itself */
        vlai_wallx_names absent;     /* optional and nowhere */
        vlai_wallx_names unexpected; /* stored and not asked for */
        vlai_wallx_names reshaped;   /* "name: stored [a, b], wanted [c, d]" */
        vlai_wallx_names statistics; /* normaliser statistics, which no model tensor takes */
        size_t joined;               /* tensors joined from parts */
        size_t renamed;              /* tensors found under a Qwen name */
    } report;
    char **owned; /* the sentences of `reshaped` and names of missing parts */
    size_t owned_count, owned_capacity;
} vlai_wallx_layout;

vla_status vlai_wallx_layout_open(const vlai_safetensors *st, const vlai_wallx_weight *weights, size_t count,
                                  vlai_wallx_layout **out, vla_error *err);
void vlai_wallx_layout_close(vlai_wallx_layout *layout);
/* An error that lists what is missing, unexpected or reshaped; VLA_OK when nothing is. */
vla_status vlai_wallx_layout_require(const vlai_wallx_layout *layout, vla_error *err);
static inline bool vlai_wallx_layout_has(const vlai_wallx_layout *layout, size_t i)
{
    return layout->sources[i].count > 0;
}
/* Elements first..first+n-1 of weight i, joined, as float. */
vla_status vlai_wallx_layout_read(const vlai_wallx_layout *layout, size_t i, int64_t first, int64_t n, float *out,
                                  vla_error *err);
/* VLA_E_NONFINITE for the first of these elements that is NaN or infinite, as vlai_tensor_check_finite says it. */
vla_status vlai_wallx_layout_check(const vlai_wallx_layout *layout, size_t i, int64_t first, int64_t n, vla_error *err);
/* The same elements where they stand in the file, when they stand there together and in this type; else NULL. Not aligned. */
const void *vlai_wallx_layout_raw(const vlai_wallx_layout *layout, size_t i, int64_t first, int64_t n, vla_dtype dtype);

VLA_END_DECLS

#endif
