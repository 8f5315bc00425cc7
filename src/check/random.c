/* SPDX-License-Identifier: Apache-2.0 */
#include "random.h"

#include "cases/draw.h"

#include <math.h>

static double uniform(uint64_t *state) /* in (0, 1) */
{
    return ((double)(cot_draw(state) >> 11) + 0.5) * 0x1p-53;
}

void random_normal(uint64_t seed, double *values, int64_t count)
{
    static const double two_pi = 6.283185307179586;
    uint64_t state = seed * 0x2545f4914f6cdd1du + 1;
    for (int64_t i = 0; i < count; i += 2) { /* Box-Muller transform: two values at a time */
        const double radius = sqrt(-2 * log(uniform(&state))), angle = two_pi * uniform(&state);
        values[i] = radius * cos(angle);
        if (i + 1 < count)
            values[i + 1] = radius * sin(angle);
    }
}
