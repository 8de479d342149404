/* Normalisation statistics of a dataset's state and action: mean, population deviation, exact 1 % and 99 % quantiles
 * (linear between order statistics) over all frames of all episodes, as the reference's scripts/compute_norm_stats.py.
 *
 *     vlai_norm_request request = {.state_key = "observation.state", .action_key = "action"};
 *     json_t *stats;
 *     VLA_TRY(vlai_norm_stats(set, &request, &stats, err));     // {"norm_stats": {KEY: {mean, std, q01, q99}}}
 *
 * With layouts, Euler angles under a 6D rotation are converted before anything is measured (the reference cuts such columns
 * by their 6D widths, which misplaces all that follow), and the columns of each action key whose name ends in "_relative"
 * get the statistics of action[a + o] - state[a] for every anchor a and offset o < chunk (rotations: R_action * R_state^T).
 * Anchors run over the whole set and cross the borders of episodes, as in the reference; with `within_episodes` they are
 * the chunks that training sees, in which an episode's last action stands for those after it. Sums, deviations and
 * interpolation are in double over float32 values.
 * Threads: the columns are shared out over `threads`; the numbers do not depend on how many. */
#ifndef VLAI_NORM_STATS_H
#define VLAI_NORM_STATS_H

#include "data/rotation.h"
#include "vla/dataset.h"

VLA_BEGIN_DECLS

typedef struct vlai_norm_request {
    const char *state_key, *action_key;
    const vlai_layout *state_layout, *action_layout; /* NULL: columns as they are, no relative keys */
    int64_t chunk;                                   /* frames of an action chunk; for relative keys */
    bool within_episodes;                            /* anchors of relative keys */
    int threads;                                     /* 0 = all processors */
} vlai_norm_request;

vla_status vlai_norm_stats(vla_dataset *set, const vlai_norm_request *request, json_t **out, vla_error *err);

/* The n values that stand at rank k (from 0) and, when there is one, at rank k + 1; reorders `values`. */
void vlai_select_pair(float *values, int64_t n, int64_t k, float *at, float *next);

VLA_END_DECLS

#endif
