/* SPDX-License-Identifier: Apache-2.0
 * attention_ref.h: the oracle of each direction; see cases/cases.h. */
#ifndef COT_ATTENTION_REF_H
#define COT_ATTENTION_REF_H

extern void (*const cot_attention_oracles[])(const void *args, void *magnitudes);

#endif
