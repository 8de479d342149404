/* The flow time of a sample: t = s * shift(1 - u) with u from Beta(alpha, beta); t near 1 is clean.
 *
 *     vlai_flow_time rule = VLAI_FLOW_TIME_DEFAULT;
 *     float t = vlai_flow_time_map(&rule, vlai_flow_time_draw(&rule, &key));
 *
 * Pure functions: the draw depends on the key alone. */
#ifndef VLAI_FLOW_TIME_H
#define VLAI_FLOW_TIME_H

#include "base/rng.h"
#include "vla/error.h"

#include <jansson.h>

VLA_BEGIN_DECLS

typedef struct vlai_flow_time {
    double alpha, beta; /* data.noise_scheduler beta_alpha, beta_beta */
    double s;           /* largest time */
    double shift;       /* time_shift; 1 = none */
} vlai_flow_time;

#define VLAI_FLOW_TIME_DEFAULT {1.5, 1.0, 0.999, 1.0}

/* data.noise_scheduler, or NULL for the defaults. */
vla_status vlai_flow_time_parse(const json_t *object, const char *where, vlai_flow_time *out, vla_error *err);
/* The Beta draw u in (0, 1). */
float vlai_flow_time_draw(const vlai_flow_time *rule, const vlai_rng_key *key);
/* u to time, in float32. */
float vlai_flow_time_map(const vlai_flow_time *rule, float u);

VLA_END_DECLS

#endif
