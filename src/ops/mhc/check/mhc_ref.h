/* SPDX-License-Identifier: Apache-2.0
 * mhc_ref.h: the oracles of each op, one for each direction; see cases.h. */
#ifndef COT_MHC_REF_H
#define COT_MHC_REF_H

extern void (*const cot_mhc_pre_oracles[])(const void *args, void *magnitudes);
extern void (*const cot_mhc_sinkhorn_oracles[])(const void *args, void *magnitudes);
extern void (*const cot_mhc_post_oracles[])(const void *args, void *magnitudes);
extern void (*const cot_mhc_post_pre_oracles[])(const void *args, void *magnitudes);

#endif
