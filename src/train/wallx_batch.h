/* A micro-batch of Wall-X from the loader's slots, in buffers that are kept from batch to batch. */
#ifndef VLAI_WALLX_BATCH_H
#define VLAI_WALLX_BATCH_H

#include "train/wallx_task.h"

VLA_BEGIN_DECLS

typedef struct vlai_wallx_assembly {
    vlai_wallx_batch batch; /* points into the buffers below and into the slots */
    void *buffer;
    size_t capacity;
    const vlai_sample **samples;
    size_t sample_capacity;
    vlai_token_batch padded;
    float mean[3], std[3];
    vlai_wallx_scratch scratch; /* of filling */
} vlai_wallx_assembly;

/* Pictures are cut as the architecture's tower takes them; the processor of another model would scramble them. */
vla_status vlai_wallx_check_pictures(const vlai_wallx_config *config, const vlai_image_processor *image, vla_error *err);
/* `sampler`: NULL for the packed layout, else pads as the reference's collator does. */
vla_status vlai_wallx_assemble(vlai_wallx_assembly *a, const vlai_contract *contract, const vlai_sampler *sampler,
                               void *const *slots, int64_t count, vla_error *err);
void vlai_wallx_assembly_fini(vlai_wallx_assembly *a);

VLA_END_DECLS

#endif
