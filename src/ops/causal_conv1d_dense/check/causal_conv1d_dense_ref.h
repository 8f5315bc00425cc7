/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_dense_ref.h: the oracles, in the order of the directions. See cases/cases.h. */
#ifndef COT_CAUSAL_CONV1D_DENSE_REF_H
#define COT_CAUSAL_CONV1D_DENSE_REF_H

extern void (*const cot_causal_conv1d_dense_oracles[])(const void *args, void *magnitudes);

#endif
