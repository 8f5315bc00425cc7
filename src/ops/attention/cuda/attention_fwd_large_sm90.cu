/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_large_sm90.cu: instances of attention_fwd_sm90.cuh for d or d_v above 128, up to 256. */
#include "attention_fwd_sm90.cuh"

ATTENTION_FWD_LARGE(INSTANCE_BF16)
ATTENTION_FWD_LARGE(INSTANCE_F16)
ATTENTION_FWD_LARGE_SOFTCAP(INSTANCE_BF16_SOFTCAP)
ATTENTION_FWD_LARGE_SOFTCAP(INSTANCE_F16_SOFTCAP)
