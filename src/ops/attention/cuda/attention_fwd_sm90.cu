/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_sm90.cu: instances of attention_fwd_sm90.cuh for d and d_v up to 128. */
#include "attention_fwd_sm90.cuh"

ATTENTION_FWD_SMALL(INSTANCE_BF16)
ATTENTION_FWD_SMALL(INSTANCE_F16)
ATTENTION_FWD_SMALL_SOFTCAP(INSTANCE_BF16_SOFTCAP)
ATTENTION_FWD_SMALL_SOFTCAP(INSTANCE_F16_SOFTCAP)
