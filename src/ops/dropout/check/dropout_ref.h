/* SPDX-License-Identifier: Apache-2.0
 * dropout_ref.h: the oracles, one for each direction; see cases.h. */
#ifndef COT_DROPOUT_REF_H
#define COT_DROPOUT_REF_H

extern void (*const cot_dropout_oracles[])(const void *args, void *magnitudes);

#endif
