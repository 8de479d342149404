/* Counter-based randomness: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
 *
 * A draw is a pure function of (seed, stream, position, site, element): `position` is the sample's place in the global
 * data order, never a rank, worker, step or slot. So resume needs no saved state, and N ranks draw what 1 rank draws. */
#ifndef VLAI_RNG_H
#define VLAI_RNG_H

#include "vla/api.h"

VLA_BEGIN_DECLS

typedef enum vlai_rng_stream {
    VLAI_RNG_TRAIN = 0,
    VLAI_RNG_VALIDATION = 1,
    VLAI_RNG_INIT = 2,
    VLAI_RNG_SYNTH = 3,
    VLAI_RNG_PREDICT = 4,
    VLAI_RNG_ROUNDING = 5,
} vlai_rng_stream;

typedef struct vlai_rng_key {
    uint64_t seed;
    uint32_t stream;   /* vlai_rng_stream */
    uint64_t position; /* place in the data order; any counter for other streams */
    uint32_t site;     /* which draw of the sample: time, noise, ... */
} vlai_rng_key;

/* One Philox block: 4 words from a 4-word counter and a 2-word key. */
void vlai_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

uint32_t vlai_rng_u32(const vlai_rng_key *key, uint32_t element);
/* Uniform in (0, 1), 24 bits, never 0 or 1. */
float vlai_rng_uniform(const vlai_rng_key *key, uint32_t element);
/* Uniform in (0, 1), 53 bits. */
double vlai_rng_uniform64(const vlai_rng_key *key, uint32_t element);
/* n normal draws, elements first..first+n-1, by Box-Muller on one block per pair; independent of how calls are split. */
void vlai_rng_normal(const vlai_rng_key *key, uint32_t first, size_t n, float *out);

VLA_END_DECLS

#endif
