/* SPDX-License-Identifier: Apache-2.0
 * scale_admit.h: admission and cost of the kernels. For the kernel table. */
#ifndef COT_SCALE_ADMIT_H
#define COT_SCALE_ADMIT_H

#include "core/op_tables.h"

COT_ADMIT_SCALAR(scale_sizes)

static inline double cost_scalar(const void *problem)
{
    return 10.0 * (double)((const scale_sizes *)problem)->N; /* core cycles */
}

#endif
