#include "model/wallx_plan.h"

#include "base/fail.h"
#include "exec/store.h"
#include "pass/pass.h"

#include <stdlib.h>
#include <string.h>

static bool read_side(const char *text, int32_t *out, const char **end)
{
    char *stop;
    long value = strtol(text, &stop, 10);
    *end = stop;
    *out = (int32_t)value;
    return stop > text && value >= 1 && value <= 4096;
}

vla_status vlai_wallx_grids_parse(const char *text, vlai_wallx_sizes *out, vla_error *err)
{
    const char *p = text;
    for (out->images = 0; out->images < VLAI_WALLX_PLAN_IMAGES; out->images++) {
        int32_t *grid = &out->grid[3 * out->images];
        grid[0] = 1;
        if (!read_side(p, &grid[1], &p) || *p++ != 'x' || !read_side(p, &grid[2], &p))
            break;
        if (!*p) {
            out->images++;
            return VLA_OK;
        }
        if (*p++ != ',')
            break;
    }
    return vlai_fail(err, VLA_E_INVALID, "--grid '%s': wanted HEIGHTxWIDTH in patches, for at most %d pictures, as in 18x18,18x18", text, VLAI_WALLX_PLAN_IMAGES);
}

/* The graph, narrowed and with its backward pass; nothing when it fails. The loss is that of the mean over micro-batches and ranks. */
static vla_status differentiate(const vlai_wallx_config *config, const vlai_wallx_shape *shape, const vla_store *store, int64_t accumulation, vla_graph **out, vla_error *err)
{
    VLA_TRY(vlai_wallx_build(config, shape, &(vlai_wallx_options){0}, out, err));
    vla_status status = vlai_pass_narrow(*out, NULL, err);
    if (status == VLA_OK)
        status = vla_graph_backward(*out, vla_graph_find(*out, "loss"), 1.0 / (double)(accumulation * (store->world > 1 ? store->world : 1)), err);
    if (status != VLA_OK)
        vla_graph_destroy(*out);
    return status;
}

/* Plans a graph that was finished with `status`. */
static vla_status finish(vla_graph *g, vla_status status, const vla_plan_options *options, vla_plan **out, vla_error *err)
{
    if (status == VLA_OK)
        return vla_plan_build(g, options, out, err); /* owns the graph, also when it fails */
    vla_graph_destroy(g);
    return status;
}

vla_status vlai_wallx_plan_step(const vlai_wallx_config *config, const vlai_wallx_shape *shape, const vla_store *store,
                                const vla_adamw_options *adamw, const vla_plan_options *options,
                                vla_gradient_status *gradients, vla_plan **out, vla_error *err)
{
    vla_graph *g;
    *out = NULL;
    VLA_TRY(differentiate(config, shape, store, 1, &g, err));
    return finish(g, vla_graph_step(g, store, gradients, adamw, err), options, out, err);
}

vla_status vlai_wallx_plan_training(const vlai_wallx_config *config, const vlai_wallx_shape *shape, const vla_store *store,
                                    int64_t accumulation, const vla_plan_options *options, vla_gradient_status *gradients,
                                    vla_plan **out, vla_error *err)
{
    vla_graph *g;
    *out = NULL;
    VLA_TRY(differentiate(config, shape, store, accumulation, &g, err));
    return finish(g, vla_graph_store_gradients(g, store, accumulation > 1, gradients, err), options, out, err);
}
