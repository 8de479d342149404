/* New models: a folder with an architecture, random weights and a processor, in the forms that training reads.
 *
 *     vlai_wallx_init_options o = VLAI_WALLX_INIT_DEMO;
 *     o.out = "start";
 *     vlai_wallx_init_summary made;
 *     VLA_TRY(vlai_wallx_init(&o, &made, err));   // start/config.json, model.safetensors, tokenizer.json, ...
 *
 * Matrices are drawn from normal(0, initializer_range), biases are 0, norm weights 1. A draw depends on the seed, the
 * tensor's name and the element alone: a tensor of the same name and shape is the same in every model, and the file does
 * not depend on the number of threads. Tensors are written one after the other, so that the memory needed does not grow
 * with the model. The folder appears complete or not at all; one that exists is refused. */
#ifndef VLAI_WALLX_INIT_H
#define VLAI_WALLX_INIT_H

#include "vla/dtype.h"
#include "vla/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

VLA_BEGIN_DECLS

/* Sizes of an architecture that is not read from a file. */
typedef struct vlai_wallx_sizes {
    int64_t hidden, layers, heads, kv_heads, intermediate, action_hidden, action_intermediate;
    int64_t vision_hidden, vision_depth, vision_heads, vision_intermediate;
    int64_t vision_full_every; /* every nth vision block attends over whole pictures, the others in windows */
    int64_t patch, merge, window;
    int64_t vocab; /* 0: as many as the tokenizer has */
    double range;  /* initializer_range */
    double theta;  /* rope_theta; small models of few pairs need a small one, or rows and columns of pictures look alike */
} vlai_wallx_sizes;

typedef struct vlai_wallx_init_options {
    const char *out;
    const char *config; /* an architecture file instead of `sizes`; NULL */
    vlai_wallx_sizes sizes;
    int64_t vocab;       /* embedding rows; 0: as the architecture says, else as many as the tokenizer has */
    double range;        /* initializer_range; 0: as the architecture says, else 0.02 */
    int64_t action_dim, state_dim;
    uint64_t seed;
    vla_dtype dtype;     /* VLA_F32, or VLA_BF16: then norms and the action head stay F32, as training keeps them */
    double shard_gb;     /* decimal GB per weights file; 0: one file */
    const char *processor; /* folder to copy the processor from; NULL: a vocabulary made from `texts` */
    const char *const *texts;
    size_t text_count, merges;
    int threads; /* 0: all processors */
    bool dry;    /* nothing is written; `each` sees the tensors */
    void (*each)(void *user, const char *name, vla_dtype dtype, int rank, const int64_t *shape, size_t bytes);
    void *user;
} vlai_wallx_init_options;

/* A model that learns the synthetic task in 600 steps on two cores, and the full one. */
#define VLAI_WALLX_SIZES_DEMO {64, 3, 4, 2, 128, 64, 128, 64, 2, 4, 128, 2, 14, 2, 112, 0, 0.08, 10}
#define VLAI_WALLX_SIZES_FULL {2048, 36, 16, 2, 11008, 1024, 2048, 1280, 32, 16, 3420, 8, 14, 2, 112, 151936, 0.02, 1e6}
#define VLAI_WALLX_INIT_DEMO \
    {.sizes = VLAI_WALLX_SIZES_DEMO, .action_dim = 7, .state_dim = 8, .dtype = VLA_F32, .merges = 300}

typedef struct vlai_wallx_init_summary {
    size_t tensors, files; /* files: of weights */
    int64_t parameters;
    uint64_t bytes; /* of tensors */
    int64_t vocab;
} vlai_wallx_init_summary;

vla_status vlai_wallx_init(const vlai_wallx_init_options *options, vlai_wallx_init_summary *out, vla_error *err);

VLA_END_DECLS

#endif
