#include "base/rng.h"

#include <math.h>

void vlai_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Counter = (block, site and stream, position); key = seed. Streams and sites share a word: 8 and 24 bits. */
static void block(const vlai_rng_key *key, uint32_t index, uint32_t out[4])
{
    uint32_t counter[4] = {index, (key->stream << 24) | (key->site & 0xFFFFFFu), (uint32_t)key->position,
                           (uint32_t)(key->position >> 32)};
    uint32_t k[2] = {(uint32_t)key->seed, (uint32_t)(key->seed >> 32)};
    vlai_philox(counter, k, out);
}

uint32_t vlai_rng_u32(const vlai_rng_key *key, uint32_t element)
{
    uint32_t out[4];
    block(key, element >> 2, out);
    return out[element & 3];
}

float vlai_rng_uniform(const vlai_rng_key *key, uint32_t element)
{
    return ((float)(vlai_rng_u32(key, element) >> 9) + 0.5f) * (1.0f / 8388608.0f);
}

double vlai_rng_uniform64(const vlai_rng_key *key, uint32_t element)
{
    uint32_t out[4];
    block(key, element, out);
    uint64_t bits = ((uint64_t)out[0] << 20) ^ (out[1] >> 12);
    return ((double)bits + 0.5) * (1.0 / 4503599627370496.0);
}

void vlai_rng_normal(const vlai_rng_key *key, uint32_t first, size_t n, float *out)
{
    for (size_t i = 0; i < n;) { /* both draws of a pair that lies inside the range come from one block */
        uint32_t element = first + (uint32_t)i, words[4];
        block(key, element >> 1, words);
        double u1 = ((double)words[0] + 0.5) * (1.0 / 4294967296.0);
        double u2 = ((double)words[1] + 0.5) * (1.0 / 4294967296.0);
        double r = sqrt(-2.0 * log(u1)), a = 6.283185307179586476925 * u2;
        if (!(element & 1))
            out[i++] = (float)(r * cos(a));
        if (i < n)
            out[i++] = (float)(r * sin(a));
    }
}
