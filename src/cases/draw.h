/* SPDX-License-Identifier: Apache-2.0
 * draw.h: splitmix64, a small pseudo-random generator for cases and tests, with the same numbers on every machine. */
#ifndef COT_CASES_DRAW_H
#define COT_CASES_DRAW_H

#include <stdbool.h>
#include <stdint.h>

static inline uint64_t cot_draw(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A number in [0, bound), or 0 if bound <= 0. */
static inline int64_t cot_draw_below(uint64_t *state, int64_t bound)
{
    return bound > 0 ? (int64_t)(cot_draw(state) % (uint64_t)bound) : 0;
}

static inline bool cot_draw_bool(uint64_t *state)
{
    return cot_draw(state) & 1;
}

#endif
