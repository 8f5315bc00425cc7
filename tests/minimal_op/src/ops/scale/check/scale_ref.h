/* SPDX-License-Identifier: Apache-2.0
 * scale_ref.h: the oracles, one for each direction; see cases.h. */
#ifndef COT_SCALE_REF_H
#define COT_SCALE_REF_H

extern void (*const cot_scale_oracles[])(const void *args, void *magnitudes);

#endif
