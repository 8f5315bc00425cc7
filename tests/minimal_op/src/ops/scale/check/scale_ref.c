/* SPDX-License-Identifier: Apache-2.0
 *
 * scale_ref.c: the oracle. All its tensors are row-major f64. The magnitude of factor x is |factor| |x|. */
#include "scale_ref.h"

#include "../scale_problem.h"

#include <math.h>

static void forward(const void *args, void *magnitudes)
{
    const cot_scale_forward_args *a = args, *m = magnitudes;
    const double *x = a->x.data;
    double *y = a->y.data, *y_magnitude = m->y.data;
    for (int64_t i = 0; i < a->x.shape[0]; i++) {
        y[i] = (double)((long double)a->factor * x[i]);
        y_magnitude[i] = fabs(y[i]);
    }
}

void (*const cot_scale_oracles[])(const void *, void *) = {forward};
