/* Golden stage norm-stats: the reference's statistics script on a whole set, run by run. */
#include "parity/parity.h"

#include "base/fail.h"
#include "base/json.h"
#include "data/norm_stats.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* "3e-6 * max(1, |value|)": the factor; a plain number is taken as it is. */
static double relative_bound(const vlai_parity_case *c)
{
    const json_t *entry = json_object_get(json_object_get(c->meta, "bound"), "every number");
    const json_t *value = json_is_object(entry) ? json_object_get(entry, "abs") : entry;
    double bound = 0;
    if (json_is_string(value))
        (void)!sscanf(json_string_value(value), "%lf", &bound);
    else
        bound = json_number_value(value);
    return bound;
}

static void compare(vlai_parity_case *c, const char *run, const json_t *want, const json_t *got, double bound)
{
    const char *key, *stat;
    json_t *stats, *list;
    json_object_foreach((json_t *)want, key, stats) {
        json_object_foreach(stats, stat, list) {
            const json_t *own = json_object_get(json_object_get(got, key), stat);
            char tensor[160];
            snprintf(tensor, sizeof tensor, "%s.%s.%s", run, key, stat);
            double worst = json_array_size(own) == json_array_size(list) ? 0 : INFINITY;
            for (size_t i = 0; i < json_array_size(list) && isfinite(worst); i++) {
                double a = json_number_value(json_array_get(list, i)), b = json_number_value(json_array_get(own, i));
                double error = fabs(a - b) / fmax(1, fabs(a));
                worst = error > worst || isnan(error) ? error : worst;
            }
            vlai_parity_report(c, stat, tensor, worst, bound);
        }
    }
    /* The same columns in the same order, and nothing beyond them. */
    vlai_parity_report(c, "columns", run, json_object_size(want) != json_object_size(got), 0);
}

static vla_status one_run(vlai_parity_case *c, vla_dataset *set, const json_t *run, const json_t *want, vla_error *err)
{
    const json_t *task = json_object_get(run, "task"), *keys = json_object_get(run, "keys");
    const char *name, *state_key, *action_key;
    int64_t chunk;
    vlai_layout dof = {0};
    VLA_TRY(vlai_json_string(run, "name", "run", "case.json", &name, err));
    VLA_TRY(vlai_json_string(keys, "state_key", "observation.state", "case.json", &state_key, err));
    VLA_TRY(vlai_json_string(keys, "action_key", "action", "case.json", &action_key, err));
    VLA_TRY(vlai_json_int(run, "action_horizon", 0, "case.json", &chunk, err));
    vlai_norm_request request = {.state_key = state_key, .action_key = action_key, .chunk = chunk};
    vla_status status = VLA_OK;
    if (json_is_object(task)) {
        status = vlai_layout_parse(json_object_get(task, "dof_config"), "case.json", &dof, err);
        request.action_layout = &dof;
    }
    json_t *got = NULL;
    if (status == VLA_OK)
        status = vlai_norm_stats(set, &request, &got, err);
    if (status == VLA_OK)
        compare(c, name, json_object_get(want, "norm_stats"), json_object_get(got, "norm_stats"), relative_bound(c));
    json_decref(got);
    vlai_layout_fini(&dof);
    return status;
}

vla_status vlai_parity_norm_stats(vlai_parity_case *c, vla_error *err)
{
    const json_t *options = json_object_get(c->meta, "options"), *runs = json_object_get(options, "runs");
    const char *dataset;
    char path[4096];
    json_t *want = NULL;
    vla_dataset *set = NULL;
    VLA_TRY(vlai_json_string(options, "dataset", "", "case.json", &dataset, err));
    VLA_TRY(vlai_parity_path(c, dataset, path, sizeof path, err));
    VLA_TRY(vlai_parity_json(c, "stats.json", &want, err));
    vla_dataset_options open = VLA_DATASET_OPTIONS_DEFAULT;
    open.flags = VLA_DATASET_NO_CACHE;
    vla_status status = vla_dataset_open(path, &open, &set, err);
    for (size_t i = 0; i < json_array_size(runs) && status == VLA_OK; i++) {
        const json_t *run = json_array_get(runs, i), *entry = json_array_get(want, i);
        const char *a = json_string_value(json_object_get(run, "name")), *b = json_string_value(json_object_get(entry, "name"));
        if (!a || !b || strcmp(a, b))
            status = vlai_fail(err, VLA_E_FORMAT, "stats.json: run %zu is '%s', case.json says '%s'", i, b ? b : "", a ? a : "");
        else
            status = one_run(c, set, run, entry, err);
    }
    vla_dataset_close(set);
    json_decref(want);
    return status;
}
