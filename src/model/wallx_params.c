/* The parameters of a Wall-X model in a store: names and shapes from the layout, types by name. */
#include "base/fail.h"
#include "base/memory.h"
#include "model/wallx.h"
#include "model/wallx_layout.h"

#include <string.h>

/* Kept in fp32 by the reference, with fp32 arithmetic: language-model norms and the action head. */
bool vlai_wallx_precise(const char *name)
{
    return strstr(name, "layernorms.") || !strncmp(name, "model.norms.", 12) || !strncmp(name, "action_preprocessor.", 20);
}

static vla_dtype type_of(const char *name)
{
    return vlai_wallx_precise(name) ? VLA_PRECISE : VLA_COMPUTE;
}

static bool in_model(const vlai_wallx_config *c, const char *name)
{
    if (!strcmp(name, "lm_head.weight"))
        return !c->tie_word_embeddings;
    if (!strcmp(name, "action_preprocessor.propri_proj.weight"))
        return !c->use_state_string_representation || c->keep_propri_proj;
    return true;
}

vla_status vlai_wallx_params(const vlai_wallx_config *config, int (*group_of)(const char *name, void *user), void *user,
                             vla_store *store, vla_error *err)
{
    vlai_wallx_weight *weights;
    size_t count;
    VLA_TRY(vlai_wallx_weights(config, &weights, &count, err));
    vla_status status = VLA_OK;
    for (size_t i = 0; i < count && status == VLA_OK; i++)
        if (in_model(config, weights[i].name))
            status = vla_store_add(store, weights[i].name, type_of(weights[i].name), weights[i].rank, weights[i].shape,
                                   group_of ? group_of(weights[i].name, user) : 0, err);
    vlai_free(weights);
    return status;
}

enum { CHUNK = 1 << 20 };

static vla_status read_one(const vlai_wallx_layout *layout, size_t i, vla_store *store, size_t param, float *buffer, vla_error *err)
{
    for (int64_t first = 0; first < layout->weights[i].elements; first += CHUNK) {
        int64_t n = layout->weights[i].elements - first < CHUNK ? layout->weights[i].elements - first : CHUNK;
        VLA_TRY(vlai_wallx_layout_read(layout, i, first, n, buffer, err));
        vla_store_set_float(store, param, first, n, buffer);
    }
    return VLA_OK;
}

vla_status vlai_wallx_load(const vlai_wallx_config *config, const vlai_safetensors *st, vla_store *store, vla_error *err)
{
    vlai_wallx_weight *weights = NULL;
    vlai_wallx_layout *layout = NULL;
    float *buffer = NULL;
    size_t count;
    vla_status status;
    VLA_TRY_GOTO(vlai_wallx_weights(config, &weights, &count, err), done);
    VLA_TRY_GOTO(vlai_wallx_layout_open(st, weights, count, &layout, err), done);
    VLA_TRY_GOTO(vlai_wallx_layout_require(layout, err), done);
    buffer = vlai_array(CHUNK, sizeof *buffer);
    if (!buffer) {
        status = vlai_nomem(err, CHUNK * sizeof *buffer);
        goto done;
    }
    for (size_t i = 0; i < count && status == VLA_OK; i++) {
        int64_t param = vla_store_find(store, weights[i].name);
        if (param < 0)
            continue;
        if (!vlai_wallx_layout_has(layout, i))
            status = vlai_fail_hint(err, VLA_E_NOT_FOUND, "set task.use_state_string_representation: true if the state is written as text",
                                    "%s: tensor '%s' is missing, and the configuration needs it",
                                    vlai_safetensors_count(st) ? vlai_safetensors_at(st, 0)->file : "weights", weights[i].name);
        else
            status = read_one(layout, i, store, (size_t)param, buffer, err);
    }
done:
    vlai_free(buffer);
    vlai_wallx_layout_close(layout);
    vlai_free(weights);
    return status;
}
