/* SPDX-License-Identifier: Apache-2.0
 *
 * cotangent/cotangent.h: includes all public headers.
 */
#ifndef COTANGENT_COTANGENT_H
#define COTANGENT_COTANGENT_H

#include <cotangent/attention.h>
#include <cotangent/causal_conv1d.h>
#include <cotangent/causal_conv1d_dense.h>
#include <cotangent/core.h>
#include <cotangent/dropout.h>
#include <cotangent/mhc.h>

#endif
