/* Stochastic rounding of fp32 to bf16: up with the probability that makes the mean exact.
 *
 *     vlai_rounding r = vlai_rounding_of(seed, update, key, (uint32_t)(index >> 32));    // per tensor and update
 *     vlai_rounding_bits bits = vlai_rounding_draw(r, (uint32_t)index);                  // per element
 *     w = vlai_bf16_stochastic(x, bits.weight);
 *
 * A draw is a pure function of the run's seed, the number of the update, the parameter's key (a hash of its name) and the
 * element's index, never of launch shapes, grouping, ranks or devices; this header is compiled for both. Philox would
 * cost more than the rest of the update (30 operations per element); what is wanted here is 16 bits that are uniform and
 * unrelated from element to element and from update to update, for which a keyed 32-bit mix (two multiplications, xor
 * shifts, the key between them) is enough: tests/unit/test_rounding.c measures it. */
#ifndef VLAI_ROUNDING_H
#define VLAI_ROUNDING_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define VLAI_ON_BOTH static __host__ __device__ inline
#else
#define VLAI_ON_BOTH static inline
#endif

typedef struct vlai_rounding {
    uint32_t a, b;
} vlai_rounding;

/* 16 bits each, in the lower half. */
typedef struct vlai_rounding_bits {
    uint32_t weight, m, v;
} vlai_rounding_bits;

/* The finaliser of splitmix64 (Steele, Lea and Flood, 2014). */
VLAI_ON_BOTH uint64_t vlai_mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* high: the upper 32 bits of the indices. */
VLAI_ON_BOTH vlai_rounding vlai_rounding_of(uint64_t seed, uint64_t update, uint64_t key, uint32_t high)
{
    uint64_t h = vlai_mix64(seed + 0x9E3779B97F4A7C15u);
    h = vlai_mix64(h ^ (update * 0x9E3779B97F4A7C15u));
    h = vlai_mix64(h ^ key);
    h = vlai_mix64(h + high);
    vlai_rounding r = {(uint32_t)h, (uint32_t)(h >> 32)};
    return r;
}

/* The multipliers are those of C. Wellons' lowbias32. */
VLAI_ON_BOTH vlai_rounding_bits vlai_rounding_draw(vlai_rounding r, uint32_t index)
{
    uint32_t x = index ^ r.a;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) + r.b;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    vlai_rounding_bits bits = {x >> 16, x & 0xFFFFu, (x * 0x9E3779B1u) >> 16};
    return bits;
}

/* `bits` 16 random bits: the magnitude grows to the next bf16 with probability (what is cut off) / 2^16. Exact values,
 * zeros and infinities stay as they are, NaN stays NaN. */
VLAI_ON_BOTH uint16_t vlai_bf16_stochastic(float x, uint32_t bits)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + bits) >> 16);
}

#endif
