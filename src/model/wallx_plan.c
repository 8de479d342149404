#include "model/wallx_plan.h"

#include "base/fail.h"
#include "pass/pass.h"

vla_status vlai_wallx_plan_step(const vlai_wallx_config *config, const vlai_wallx_shape *shape, const vla_store *store,
                                const vla_adamw_options *adamw, const vla_plan_options *options,
                                vla_gradient_status *gradients, vla_plan **out, vla_error *err)
{
    vla_graph *g = NULL;
    vla_status status;
    *out = NULL;
    VLA_TRY(vlai_wallx_build(config, shape, &(vlai_wallx_options){0}, &g, err));
    VLA_TRY_GOTO(vlai_pass_narrow(g, NULL, err), fail);
    VLA_TRY_GOTO(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, err), fail);
    VLA_TRY_GOTO(vla_graph_step(g, store, gradients, adamw, err), fail);
    return vla_plan_build(g, options, out, err); /* owns the graph, also when it fails */
fail:
    vla_graph_destroy(g);
    return status;
}

vla_status vlai_wallx_plan_training(const vlai_wallx_config *config, const vlai_wallx_shape *shape, const vla_store *store,
                                    bool accumulate, const vla_plan_options *options, vla_gradient_status *gradients,
                                    vla_plan **out, vla_error *err)
{
    vla_graph *g = NULL;
    vla_status status;
    *out = NULL;
    VLA_TRY(vlai_wallx_build(config, shape, &(vlai_wallx_options){0}, &g, err));
    VLA_TRY_GOTO(vlai_pass_narrow(g, NULL, err), fail);
    VLA_TRY_GOTO(vla_graph_backward(g, vla_graph_find(g, "loss"), 1.0, err), fail);
    VLA_TRY_GOTO(vla_graph_store_gradients(g, store, accumulate, gradients, err), fail);
    return vla_plan_build(g, options, out, err); /* owns the graph, also when it fails */
fail:
    vla_graph_destroy(g);
    return status;
}
