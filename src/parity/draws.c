/* More than one draw of a bf16 run's rounding errors. A case is one draw, and so is the reference's own bf16 that it recorded: of a few
 * numbers, either may be far off or near by luck. Weights moved by 2 % round anew, all of them, and so does all that follows; what
 * is right for them, this program's fp32 says, which the case as recorded holds to the reference. */
#include "base/fail.h"
#include "base/memory.h"
#include "base/rng.h"
#include "parity/parity.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const float MOVE = 0.02f;

struct vlai_parity_kept {
    struct vlai_parity_kept *next;
    char *name;
    float *values;
    int64_t n;
};

double vlai_parity_distance(vlai_parity_case *c, const char *quantity, const char *tensor, const float *got, const float *want, int64_t n)
{
    vlai_parity_tape *tape = c->tape;
    if (!tape)
        return vlai_parity_rel_l2(got, want, n);
    char name[256];
    snprintf(name, sizeof name, "%s %s", quantity, tensor);
    if (tape->replay) {
        for (const struct vlai_parity_kept *k = tape->kept; k; k = k->next)
            if (!strcmp(k->name, name))
                return k->n == n ? vlai_parity_rel_l2(got, k->values, n) : INFINITY;
        return INFINITY;
    }
    struct vlai_parity_kept *k = vlai_arena_alloc(&tape->arena, sizeof *k);
    if (!k || !(k->name = vlai_arena_strdup(&tape->arena, name)) || !(k->values = vlai_arena_alloc(&tape->arena, (size_t)n * sizeof *got + 1)))
        return NAN;
    memcpy(k->values, got, (size_t)n * sizeof *got);
    k->n = n;
    k->next = tape->kept;
    tape->kept = k;
    return vlai_parity_rel_l2(got, want, n);
}

vla_status vlai_parity_move(const vlai_parity_case *c, vla_store *store, vla_error *err)
{
    for (size_t i = 0; c->draw && i < vla_store_count(store); i++) {
        int64_t n = vla_store_tensor(store, VLA_STORE_WEIGHT, i).elements;
        float *w = vlai_array((size_t)n * 2 + 1, sizeof *w), *by = w + n;
        if (!w)
            return vlai_nomem(err, (size_t)n * 2 * sizeof *w);
        const vlai_rng_key key = {.seed = c->draw, .stream = VLAI_RNG_INIT, .position = i};
        vlai_rng_normal(&key, 0, (size_t)n, by);
        vla_store_get_float(store, i, 0, n, w);
        for (int64_t e = 0; e < n; e++)
            w[e] *= 1 + MOVE * by[e];
        vla_store_set_float(store, i, 0, n, w);
        vlai_free(w);
    }
    return VLA_OK;
}
