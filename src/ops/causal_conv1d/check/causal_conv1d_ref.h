/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_ref.h: the oracle functions, one per direction, see cases.h. */
#ifndef COT_CAUSAL_CONV1D_REF_H
#define COT_CAUSAL_CONV1D_REF_H

extern void (*const cot_causal_conv1d_oracles[])(const void *args, void *magnitudes);

#endif
