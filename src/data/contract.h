/* The contract: everything between a robot's raw numbers and pictures and what the model sees. Computed once, saved in
 * every checkpoint, enforced at prediction.
 *
 *     vlai_contract contract;
 *     VLA_TRY(vlai_contract_init(&contract, err));
 *     contract.horizon = 10; ... vlai_contract_add_camera(...), vlai_layout_parse(..., &contract.dof, err) ...
 *     VLA_TRY(vlai_contract_take_tokens(&contract, tok, err));
 *     VLA_TRY(vlai_contract_check_set(&contract, set, &notes, err));    // cameras, columns, widths against a data set
 *     json = vlai_contract_to_json(&contract);
 *     VLA_TRY(vlai_contract_match(saved, json, "checkpoint", "config", err));   // an error lists each differing field
 *     vlai_contract_fini(&contract);
 *
 * Cameras stand in one list, that of data.key_mappings.camera: prompt names, pictures and grids all follow it. The reference
 * orders pictures by the data set's features and names by the mapping; data.picture_order: features brings that back.
 * Threads: read-only once it is filled. */
#ifndef VLAI_CONTRACT_H
#define VLAI_CONTRACT_H

#include "base/memory.h"
#include "data/normalise.h"
#include "data/rotation.h"
#include "image/patchify.h"
#include "text/fast_actions.h"
#include "vla/dataset.h"

VLA_BEGIN_DECLS

typedef struct vlai_contract_camera {
    const char *key;     /* column of the data set */
    const char *view;    /* name in data.key_mappings.camera */
    const char *display; /* name in the prompt */
    int64_t resolution;  /* longest side; -1 = keep */
} vlai_contract_camera;

typedef struct vlai_contract_token {
    const char *text;
    int32_t id;
} vlai_contract_token;

typedef struct vlai_contract {
    vlai_arena arena; /* holds the strings */
    const char *state_key, *action_key;
    vlai_contract_camera *cameras;
    size_t camera_count, camera_capacity;
    bool feature_order;      /* pictures in the order of the data set's features, whatever the names: as the reference does */
    vlai_layout pos, dof;    /* task.agent_pos_config, task.dof_config */
    vlai_norm state, action; /* statistics in the form of the model's columns (6D where the layout says so) */
    int64_t horizon;         /* actions per chunk */
    bool mask_padded;        /* actions repeated past an episode's end carry no loss */
    bool state_string;       /* the state is written into the prompt */
    int64_t state_bins;
    bool discrete;           /* discrete action tokens instead of flow placeholders */
    vlai_fast *fast;         /* what writes them; owned; NULL: the caller gives their ids, or there are none */
    bool pads_left;          /* padded layout only */
    bool truncate;           /* longer prompts are cut, as in the reference, instead of refused */
    int64_t max_length;      /* tokens per sample; 0 = unlimited */
    vlai_image_processor image;
    vlai_contract_token *tokens; /* that prompts rely on */
    size_t token_count, token_capacity;
    int64_t vocabulary;
} vlai_contract;

/* Qwen2.5-VL's image processor, 256 bins, left pads; everything else empty. */
vla_status vlai_contract_init(vlai_contract *c, vla_error *err);
void vlai_contract_fini(vlai_contract *c);

/* Strings are copied. `display` NULL = `view`. */
vla_status vlai_contract_add_camera(vlai_contract *c, const char *key, const char *view, const char *display,
                                    int64_t resolution, vla_error *err);
vla_status vlai_contract_set_keys(vlai_contract *c, const char *state, const char *action, vla_error *err);
/* Statistics of both columns from a file written by `vla norm-stats`; Euler-width ones are brought to a 6D layout. */
vla_status vlai_contract_read_stats(vlai_contract *c, const char *path, vla_error *err);
/* Records the ids that prompts rely on. */
vla_status vlai_contract_take_tokens(vlai_contract *c, const vlai_tokenizer *tok, vla_error *err);
/* The tokenizer gives each recorded token its recorded id and has the recorded size; else an error lists the differences. */
vla_status vlai_contract_check_tokens(const vlai_contract *c, const vlai_tokenizer *tok, vla_error *err);

/* Widths of the model's vectors. */
int64_t vlai_contract_state_width(const vlai_contract *c);
int64_t vlai_contract_action_width(const vlai_contract *c);

/* Against a data set: the columns exist, cameras are mapped both ways, widths fit the layouts' slots. `notes` gets one line
 * per oddity that training survives (statistics cut or padded to the data's width; constant and tiny-range dimensions and
 * what is done with them); NULL drops them. */
vla_status vlai_contract_check_set(const vlai_contract *c, const vla_dataset *set, vlai_text *notes, vla_error *err);

/* NULL when memory runs out. The caller releases it with json_decref. */
json_t *vlai_contract_to_json(const vlai_contract *c);
vla_status vlai_contract_from_json(const json_t *object, const char *where, vlai_contract *out, vla_error *err);
/* Equal trees, order of keys included; else one error that lists every field with both values, `a_name` and `b_name` saying
 * whose they are. */
vla_status vlai_contract_match(const json_t *a, const json_t *b, const char *a_name, const char *b_name, vla_error *err);

VLA_END_DECLS

#endif
