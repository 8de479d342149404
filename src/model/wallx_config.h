/* The architecture of a Wall-X model: config.json of a checkpoint directory, with the reference's class defaults, and
 * what the training configuration adds to it.
 *
 *     vlai_wallx_config c;
 *     VLA_TRY(vlai_wallx_config_load("configs/wall-oss-0.5/config.json", &c, err));
 *     VLA_TRY(vlai_wallx_config_update(&c, train, false, err)); // dof layout, loss weights, state string
 *
 * Plain data without pointers: copy it freely. Every shape constraint has been checked by load. */
#ifndef VLAI_WALLX_CONFIG_H
#define VLAI_WALLX_CONFIG_H

#include "train/config.h"
#include "vla/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

VLA_BEGIN_DECLS

typedef enum vlai_wallx_attention {
    VLAI_WALLX_SDPA,          /* "sdpa", "eager" */
    VLAI_WALLX_FLASH,         /* "flash_attention_2": plain causal, positional masks unused */
    VLAI_WALLX_FLASH_MASK,    /* "flash_mask" */
    VLAI_WALLX_FLASH_MASK_KI, /* "flash_mask_ki": no gradient from action queries into prefix keys and values */
} vlai_wallx_attention;

typedef struct vlai_wallx_config {
    /* language model */
    int64_t vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads;
    int64_t head_dim; /* hidden_size / num_attention_heads */
    double rms_norm_eps, rope_theta;
    int mrope_section[3]; /* pairs per axis; sum = head_dim/2 */
    bool tie_word_embeddings;
    int64_t pad_token_id; /* -1 when the file has none */
    int64_t image_token_id, video_token_id, vision_start_token_id;
    /* experts: 0 = language, 1 = action */
    int64_t expert_hidden[2], expert_intermediate[2]; /* dim_inputs, experts[i].intermediate_size */
    int64_t action_hidden_size, state_hidden_size;
    bool causal_action_attention_mask, proj_with_mask, use_adarms, use_x_pred, use_x_loss, use_flow_action_expert;
    vlai_wallx_attention attention;
    struct { double beta_alpha, beta_beta, s, time_shift; int64_t num_inference_timesteps; } noise;
    /* vision tower */
    struct {
        int64_t depth, hidden_size, intermediate_size, num_heads, head_dim, in_channels, patch_size, temporal_patch_size,
            spatial_merge_size, window_size, out_hidden_size, tokens_per_second;
        uint64_t full_attention[2]; /* bit n of word n/64: block n attends over whole pictures */
        double eps, theta;          /* 1e-6, 1e4: the tower's own, not the configuration's */
    } vision;
    /* from the training configuration */
    int64_t action_dim, propri_dim;  /* sums of dof_config, agent_pos_config */
    int64_t action_horizon_flow;
    bool use_state_string_representation; /* true: the model does not run propri_proj */
    bool keep_propri_proj; /* and has one all the same, because its weights file does: what is saved then holds it too */
    double ar_loss_weight, flow_loss_weight;
    bool exact_widths; /* graphs and stores take inner widths as they are in the checkpoint (vlai_wallx_inner) */
} vlai_wallx_config;

/* `path`: the file, or a folder that holds config.json. */
vla_status vlai_wallx_config_load(const char *path, vlai_wallx_config *out, vla_error *err);
vla_status vlai_wallx_config_parse(const char *data, size_t size, const char *name, vlai_wallx_config *out,
                                   vla_error *err);
/* `reference_reading`: take use_state_string_representation and action_horizon_flow from `data` and leave flow_loss_weight
 * at 1, as the reference's model does (golden cases); else the one value of `task`, and the weight that is given. */
vla_status vlai_wallx_config_update(vlai_wallx_config *config, const vlai_config *train, bool reference_reading,
                                    vla_error *err);

/* Every value of the architecture that decides numbers, under the file's keys, for a resume to compare; without what the weights or the
 * training configuration decide. The caller's; NULL: no memory. */
json_t *vlai_wallx_config_to_json(const vlai_wallx_config *config);

/* Columns of propri_proj: the state, and its mask where the projections take one. */
static inline int64_t vlai_wallx_state_columns(const vlai_wallx_config *c)
{
    return c->proj_with_mask ? 2 * c->propri_dim : c->propri_dim;
}

static inline bool vlai_wallx_full_attention(const vlai_wallx_config *c, int64_t block)
{
    return block < 128 && (c->vision.full_attention[block / 64] >> (block % 64) & 1);
}

VLA_END_DECLS

#endif
