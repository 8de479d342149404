#include "optim/settings.h"

#include "base/fail.h"

#include <math.h>
#include <string.h>

static bool takes(const vlai_lr_group *group, const char *parameter)
{
    for (size_t k = 0; k < group->include.count; k++)
        if (strstr(parameter, group->include.values[k]))
            return true;
    return false;
}

int vlai_settings_group(const char *parameter, void *user)
{
    const vlai_config *config = user;
    for (size_t g = 0; config && g < config->optimizer.lr_groups.count; g++)
        if (takes(&config->optimizer.lr_groups.groups[g], parameter))
            return 1 + (int)g;
    return 0;
}

vla_status vlai_settings_check_groups(const vlai_config *config, const vla_store *store, vla_error *err)
{
    const vlai_lr_groups *groups = &config->optimizer.lr_groups;
    size_t together = 0;
    for (size_t g = 0; g < groups->count; g++) {
        size_t taken = 0;
        for (size_t i = 0; i < vla_store_count(store); i++) {
            const char *name = vla_store_tensor(store, VLA_STORE_WEIGHT, i).name;
            if (!takes(&groups->groups[g], name))
                continue;
            taken++;
            for (size_t other = 0; other < g; other++)
                if (takes(&groups->groups[other], name))
                    return vlai_fail(err, VLA_E_INVALID, "optimizer.lr_groups: parameter '%s' matches both '%s' and '%s'", name,
                                     groups->groups[other].name, groups->groups[g].name);
        }
        if (taken == 0 && groups->groups[g].fail_on_empty)
            return vlai_fail_hint(err, VLA_E_INVALID, "correct its include list, or set fail_on_empty: false",
                                  "optimizer.lr_groups: group '%s' matches no parameter", groups->groups[g].name);
        together += taken;
    }
    if (config->optimizer.train_action_expert_only && together == 0)
        return vlai_fail_hint(err, VLA_E_INVALID, "correct the include lists of optimizer.lr_groups",
                              "train_action_expert_only: no group matches a parameter, and nothing would be trained");
    return VLA_OK;
}

vla_adamw_options vlai_settings_adamw(const vlai_config *config)
{
    vla_adamw_options o = {.size = sizeof o, .beta1 = config->optimizer.betas.values[0], .beta2 = config->optimizer.betas.values[1],
                           .eps = config->optimizer.eps, .weight_decay = config->optimizer.weight_decay,
                           .groups = 1 + (int)config->optimizer.lr_groups.count};
    if (config->optimizer.enable_grad_clip)
        o.max_norm = config->optimizer.max_grad_norm;
    return o;
}

static const char *const numerics_names[] = {"fp32", "bf16", "bf16-sr", "bf16-plain", "fp64"};
static const char *const recompute_names[] = {"none", "cheap", "layer"};
enum { NUMERICS = sizeof numerics_names / sizeof *numerics_names, RECOMPUTES = sizeof recompute_names / sizeof *recompute_names };

/* The name's place in the list; `count` where it is none of them. */
static int place_of(const char *name, const char *const *names, int count)
{
    int i = 0;
    while (i < count && strcmp(name, names[i]) != 0)
        i++;
    return i;
}

const char *vlai_numerics_name(vla_numerics numerics)
{
    return (unsigned)numerics < NUMERICS ? numerics_names[numerics] : "?";
}

bool vlai_numerics_parse(const char *name, vla_numerics *out)
{
    int i = place_of(name, numerics_names, NUMERICS);
    *out = i < NUMERICS ? (vla_numerics)i : *out;
    return i < NUMERICS;
}

const char *vlai_recompute_name(vla_recompute mode)
{
    return (unsigned)mode < RECOMPUTES ? recompute_names[mode] : "?";
}

bool vlai_recompute_parse(const char *name, vla_recompute *out)
{
    int i = place_of(name, recompute_names, RECOMPUTES);
    *out = i < RECOMPUTES ? (vla_recompute)i : *out;
    return i < RECOMPUTES;
}

vla_numerics vlai_settings_numerics(const vlai_config *config, bool gpu)
{
    static const vla_numerics modes[] = {[VLAI_NUMERICS_FP32] = VLA_FP32, [VLAI_NUMERICS_BF16] = VLA_BF16_MASTER,
                                         [VLAI_NUMERICS_BF16_SR] = VLA_BF16_SR, [VLAI_NUMERICS_BF16_PLAIN] = VLA_BF16_PLAIN};
    int choice = config->training.numerics;
    return choice == VLAI_NUMERICS_AUTO ? gpu ? VLA_BF16_MASTER : VLA_FP32 : modes[choice];
}

vlai_schedule vlai_settings_schedule(const vlai_config *config)
{
    return (vlai_schedule){
        .kind = config->scheduler.scheduler_type == VLAI_SCHEDULER_COSINE ? VLAI_SCHEDULE_COSINE : VLAI_SCHEDULE_CONSTANT,
        .peak = config->optimizer.learning_rate,
        .min = isnan(config->scheduler.min_lr) ? -1 : config->scheduler.min_lr,
        .warmup = config->scheduler.num_warmup_steps,
        .steps = config->scheduler.num_training_steps,
    };
}

double vlai_settings_peak(const vlai_config *config, int group)
{
    return group == 0 ? config->optimizer.learning_rate : config->optimizer.lr_groups.groups[group - 1].lr;
}

void vlai_settings_hyper(const vlai_config *config, int64_t step, int64_t applied, double *hyper)
{
    vlai_schedule schedule = vlai_settings_schedule(config);
    vla_adamw_options options = vlai_settings_adamw(config);
    vla_hyper_fill(&options, (uint64_t)config->hyperparams.seed, applied, hyper);
    for (int g = 0; g < 1 + (int)config->optimizer.lr_groups.count; g++)
        hyper[VLA_HYPER_RATES + g] = vlai_schedule_rate(&schedule, step, vlai_settings_peak(config, g));
}
