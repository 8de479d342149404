/* The parameters of a Wall-X model in a store: names and shapes from the layout, types by name. */
#include "base/fail.h"
#include "base/memory.h"
#include "ckpt/fill.h"
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

int64_t vlai_wallx_inner(const vlai_wallx_config *config, int64_t inner)
{
    return inner % 8 == 0 || config->exact_widths ? inner : (inner + 63) / 64 * 64;
}

vla_status vlai_wallx_pad(const vlai_wallx_config *config, vla_store *store, const char *name, int rank, const int64_t *shape, vla_error *err)
{
    bool down = strstr(name, ".down_proj.weight"), up = strstr(name, ".gate_up_proj.");
    if (!down && !up)
        return VLA_OK;
    int64_t inner = down ? shape[1] : shape[0] / 2, width = up && rank == 2 ? shape[1] : 1, padded = vlai_wallx_inner(config, inner);
    return padded == inner ? VLA_OK : vla_store_pad(store, name, inner * width, padded * width, err);
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
        if (in_model(config, weights[i].name)) {
            const vlai_wallx_weight *w = &weights[i];
            status = vla_store_add(store, w->name, type_of(w->name), w->rank, w->shape, group_of ? group_of(w->name, user) : 0, err);
            if (status == VLA_OK)
                status = vlai_wallx_pad(config, store, w->name, w->rank, w->shape, err);
        }
    vlai_free(weights);
    return status;
}

/* What the threads that load need: the file's place of each of the store's tensors. */
typedef struct load {
    const vlai_wallx_layout *layout;
    size_t *weight; /* per tensor of the store */
} load;

static vla_status load_tile(void *user, const vlai_fill_tile *t, float *values, const void **raw, vla_error *err)
{
    const load *l = user;
    VLA_TRY(vlai_wallx_layout_check(l->layout, l->weight[t->index], t->first, t->n, err));
    *raw = vlai_wallx_layout_raw(l->layout, l->weight[t->index], t->first, t->n, t->dtype);
    return *raw ? VLA_OK : vlai_wallx_layout_read(l->layout, l->weight[t->index], t->first, t->n, values, err);
}

static vla_status load_all(const vlai_wallx_layout *layout, size_t count, vla_store *store, vlai_pool *pool, vla_error *err)
{
    load l = {layout, vlai_array(vla_store_count(store) + 1, sizeof *l.weight)};
    vla_status status = l.weight ? VLA_OK : vlai_nomem(err, vla_store_count(store) * sizeof *l.weight);
    size_t found = 0;
    for (size_t i = 0; i < count && status == VLA_OK; i++) {
        int64_t param = vla_store_find(store, layout->weights[i].name);
        if (param < 0)
            continue;
        found++;
        l.weight[param] = i;
        if (!vlai_wallx_layout_has(layout, i))
            status = vlai_fail_hint(err, VLA_E_NOT_FOUND, "set task.use_state_string_representation: true if the state is written as text",
                                    "%s: tensor '%s' is missing, and the configuration needs it",
                                    vlai_safetensors_count(layout->st) ? vlai_safetensors_at(layout->st, 0)->file : "weights", layout->weights[i].name);
    }
    if (status == VLA_OK && found != vla_store_count(store))
        status = vlai_fail(err, VLA_E_INVALID, "the store has %zu tensors, %zu of them are those of the architecture", vla_store_count(store), found);
    if (status == VLA_OK)
        status = vlai_store_fill(store, VLA_STORE_WEIGHT, pool, load_tile, &l, err);
    vlai_free(l.weight);
    return status;
}

vla_status vlai_wallx_load(const vlai_wallx_config *config, const vlai_safetensors *st, vla_store *store, vlai_pool *pool, vla_error *err)
{
    vlai_wallx_weight *weights = NULL;
    vlai_wallx_layout *layout = NULL;
    size_t count;
    vla_status status;
    VLA_TRY_GOTO(vlai_wallx_weights(config, &weights, &count, err), done);
    VLA_TRY_GOTO(vlai_wallx_layout_open(st, weights, count, &layout, err), done);
    VLA_TRY_GOTO(vlai_wallx_layout_require(layout, err), done);
    VLA_TRY_GOTO(load_all(layout, count, store, pool, err), done);
done:
    vlai_wallx_layout_close(layout);
    vlai_free(weights);
    return status;
}
