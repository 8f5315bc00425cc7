/* SPDX-License-Identifier: Apache-2.0
 * random.h: reproducible test data. */
#ifndef COT_CHECK_RANDOM_H
#define COT_CHECK_RANDOM_H

#include <stdint.h>

/* `count` independent standard normal values. The seed alone determines them. */
void random_normal(uint64_t seed, double *values, int64_t count);

#endif
