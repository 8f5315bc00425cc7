/* SPDX-License-Identifier: Apache-2.0
 * attention_maps.h: a call with the tensor maps of its inputs, [b][h][t][x] with boxes of 64 columns. `statistics` maps
 * lse_log2 and then delta: one query tile is one row. `out` is set only if delta_shares > 0. For C and CUDA. */
#ifndef COT_ATTENTION_MAPS_H
#define COT_ATTENTION_MAPS_H

#include "attention_sm90.h"

#include <cuda.h>

typedef struct attention_bwd_mapped_call {
    CUtensorMap q, k, v, dout, out, statistics, dq_accum;
    attention_bwd_call call;
} attention_bwd_mapped_call;

typedef struct attention_fwd_mapped_call {
    CUtensorMap q, k, v;
    attention_fwd_call call;
} attention_fwd_mapped_call;

#endif
