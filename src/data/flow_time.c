#include "data/flow_time.h"

#include "base/fail.h"
#include "base/json.h"

#include <math.h>

vla_status vlai_flow_time_parse(const json_t *object, const char *where, vlai_flow_time *out, vla_error *err)
{
    *out = (vlai_flow_time)VLAI_FLOW_TIME_DEFAULT;
    if (!object || json_is_null(object))
        return VLA_OK;
    VLA_TRY(vlai_json_real(object, "beta_alpha", out->alpha, where, &out->alpha, err));
    VLA_TRY(vlai_json_real(object, "beta_beta", out->beta, where, &out->beta, err));
    VLA_TRY(vlai_json_real(object, "s", out->s, where, &out->s, err));
    VLA_TRY(vlai_json_real(object, "time_shift", out->shift, where, &out->shift, err));
    if (!(out->alpha > 0) || !(out->beta > 0) || !(out->s > 0 && out->s <= 1) || !(out->shift > 0))
        return vlai_fail(err, VLA_E_INVALID,
                         "%s: noise_scheduler beta_alpha %g, beta_beta %g, s %g, time_shift %g; all must be above 0, s at most 1",
                         where, out->alpha, out->beta, out->s, out->shift);
    return VLA_OK;
}

/* Gamma(shape, 1) by Marsaglia and Tsang, "A simple method for generating gamma variables" (2000). Attempt i takes Philox
 * blocks 2i and 2i + 1 from `first` on, so that no two draws share one. */
static double gamma_draw(double shape, const vlai_rng_key *key, uint32_t first)
{
    double boost = 1;
    if (shape < 1) { /* Gamma(a) = Gamma(a + 1) U^(1/a) */
        boost = pow(vlai_rng_uniform64(key, first), 1 / shape);
        shape += 1;
        first += 2;
    }
    double d = shape - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (uint32_t i = 0;; i++) {
        float x;
        vlai_rng_normal(key, 2 * (first + 2 * i), 1, &x); /* two normals per block */
        double v = 1 + c * x;
        if (v <= 0)
            continue;
        v = v * v * v;
        double u = vlai_rng_uniform64(key, first + 2 * i + 1);
        if (log(u) < 0.5 * (double)x * x + d - d * v + d * log(v))
            return boost * d * v;
    }
}

float vlai_flow_time_draw(const vlai_flow_time *rule, const vlai_rng_key *key)
{
    if (rule->beta == 1) /* the distribution function is u^alpha */
        return (float)pow(vlai_rng_uniform64(key, 0), 1 / rule->alpha);
    double x = gamma_draw(rule->alpha, key, 0), y = gamma_draw(rule->beta, key, 1u << 20);
    return (float)(x / (x + y));
}

float vlai_flow_time_map(const vlai_flow_time *rule, float u)
{
    float t = 1 - u, k = (float)rule->shift;
    if (rule->shift != 1)
        t = k * t / (1 + (k - 1) * t);
    return t * (float)rule->s;
}
