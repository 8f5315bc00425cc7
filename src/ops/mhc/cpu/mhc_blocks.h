/* SPDX-License-Identifier: Apache-2.0
 * mhc_blocks.h: the parts of post's and pre's vector kernels that post_pre's kernels call. Each function exists once
 * for each instruction set. */
#ifndef COT_MHC_BLOCKS_H
#define COT_MHC_BLOCKS_H

#include "ops/mhc/mhc_admit.h"
#include "simd/simd.h"

/* Post has no AMX kernels. The AMX kernels of pre call its functions for AVX-512 with bf16. */
#if defined(COT_MATMUL_AMX)
#define MHC_POST_NAME(name) name##_avx512bf16
#else
#define MHC_POST_NAME(name) V_NAME(name)
#endif

/* Computes y of tokens [begin, end). Also stores it in `copy` [tokens][n][D], unless NULL. y may be absent. */
void MHC_POST_NAME(mhc_post_fwd_tokens)(const mhc_post_forward_problem *p, int64_t begin, int64_t end, void *copy);

/* Computes all outputs of post's backward for tokens [begin, end). With g [tokens][n][D], g replaces dy. */
void MHC_POST_NAME(mhc_post_bwd_tokens)(const mhc_post_backward_problem *p, int64_t begin, int64_t end, float *g);

/* The kernel of mhc_pre_fwd_tiles.c, which computes a block of tokens at a time. With `post`, each block first computes
 * its x as the y of post. `post` may be NULL. */
cot_status V_NAME(mhc_pre_fwd_blocks)(cot_queue *queue, const mhc_pre_forward_problem *p,
                                      const mhc_post_forward_problem *post, void *workspace);

/* Pre's backward. With `recomputation`, each block of tokens first computes its x as the y of that post. With `post`,
 * dx is g: each block stores it in f32 and then computes post's backward from it. */
cot_status V_NAME(mhc_pre_bwd_blocks)(cot_queue *queue, const mhc_pre_backward_problem *p,
                                      const mhc_post_forward_problem *recomputation,
                                      const mhc_post_backward_problem *post, void *workspace);

#endif
