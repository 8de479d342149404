/* From the training configuration to the update: groups of learning rates, AdamW's numbers, the schedule, and the
 * "hyper" input of vla_graph_adamw. Pure functions, used by the trainer and by comparisons with recorded results. */
#ifndef VLAI_SETTINGS_H
#define VLAI_SETTINGS_H

#include "optim/schedule.h"
#include "train/config.h"
#include "vla/run.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

/* Learning-rate group of a parameter: 0 = base, 1 + i = entry i of optimizer.lr_groups, matched by substring. `config` is
 * a const vlai_config *, void for use as callback (NULL: always 0). */
int vlai_settings_group(const char *parameter, void *config);
/* Errors: a parameter that two groups take, a group that takes none and must not be empty, train_action_expert_only with
 * groups that take none together. */
vla_status vlai_settings_check_groups(const vlai_config *config, const vla_store *store, vla_error *err);
vla_adamw_options vlai_settings_adamw(const vlai_config *config);
vlai_schedule vlai_settings_schedule(const vlai_config *config);
/* Peak rate of a group. */
double vlai_settings_peak(const vlai_config *config, int group);
/* "fp32", "bf16", "bf16-sr", "bf16-plain", "fp64", in the order of vla_numerics; parse takes these, false otherwise. */
const char *vlai_numerics_name(vla_numerics numerics);
bool vlai_numerics_parse(const char *name, vla_numerics *out);
const char *vlai_recompute_name(vla_recompute mode); /* "none", "cheap", "layer" */
bool vlai_recompute_parse(const char *name, vla_recompute *out);
/* training.numerics; auto is bf16 with fp32 masters on a GPU, fp32 without. */
vla_numerics vlai_settings_numerics(const vlai_config *config, bool gpu);
/* All of hyper (VLA_HYPER_...): `step` counts scheduler steps from 0, `applied` optimiser updates before this one. */
void vlai_settings_hyper(const vlai_config *config, int64_t step, int64_t applied, double *hyper);

VLA_END_DECLS

#endif
