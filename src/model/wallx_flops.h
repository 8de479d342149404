/* Model FLOPs of Wall-X: the declared numerator of MFU, a formula of the architecture and of the sizes of one sample.
 *
 * Multiply-add = 2. Linears, and attention over the pairs that the masks allow (causal attention therefore counts half);
 * norms, activations and moves count 0. Training is 3 times the forward: nothing that recompute repeats is in it, and work
 * that provably changes nothing (the last layer's unread rows) is, so that figures of different programs compare. What a
 * plan executes is another number, vla_plan_flops.
 *
 *     vlai_wallx_flops f;
 *     vlai_wallx_flops_of(&config, 98, 10, 0, 2, (int32_t[]){1, 18, 18, 1, 18, 18}, &f);
 *     double mfu = f.training * samples_per_second / peak; */
#ifndef VLAI_WALLX_FLOPS_H
#define VLAI_WALLX_FLOPS_H

#include "model/wallx_config.h"

VLA_BEGIN_DECLS

typedef struct vlai_wallx_flops {
    double vision_linear, vision_attention; /* forward; patch embedding and merger are linear */
    double language_linear, language_attention;
    double action_head;
    double lm_head; /* rows with a label alone */
    double forward, training;
} vlai_wallx_flops;

/* Of one sample: text tokens (all of stream 0 but picture tokens), action tokens, rows with a label, and the grids
 * [images,3] of its pictures in patches. */
void vlai_wallx_flops_of(const vlai_wallx_config *config, int64_t text_tokens, int64_t action_tokens, int64_t label_rows,
                         int64_t images, const int32_t *grid, vlai_wallx_flops *out);

VLA_END_DECLS

#endif
