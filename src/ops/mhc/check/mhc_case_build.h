/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_case_build.h: builds a case of one of the four ops from its sizes and choices, or from words. */
#ifndef COT_MHC_CASE_BUILD_H
#define COT_MHC_CASE_BUILD_H

#include "../mhc_problem.h"

#include "cases/cases.h"

enum { PRE, SINKHORN, POST, POST_PRE }; /* mhc_case_params.op */

typedef enum mhc_case_layout {
    TOKEN_MAJOR,  /* [B,T,n,D] */
    STREAM_MAJOR, /* [B,n,T,D] */
    SLICE,        /* a slice of the columns of wider rows, from an odd element on */
    STRIDED,      /* every second column, and the other axes in reverse order */
    LAYOUT_COUNT
} mhc_case_layout;

typedef struct mhc_case_params {
    int op, direction;
    unsigned uses;
    int64_t B, T, n, D;
    mhc_case_layout layout;
    cot_dtype dtype;
    int64_t iterations;
    bool gamma, wide_phi;                           /* phi ~ N(0,1) instead of N(0, 1/(n*D)) */
    bool fused, dh_res_logits, dx_post, accumulate; /* pre */
    bool no_data_gradient, no_parameter_gradient;   /* leave out dx or df; leave out the other gradients */
    bool only_saved;                                /* pre's forward: only the outputs that the backward needs */
    bool wide_logits, no_eps, out_in;               /* sinkhorn, post */
    bool only_y, saved_y; /* post_pre: y is the only output of the forward; y is an input of the backward */
    /* Every eps is 0.25; one logit of each row is 200 above the others. */
    bool large_eps, peaks;
    uint64_t seed;
} mhc_case_params;

void mhc_case_build(const mhc_case_params *p, cot_case *c);

/* Parses the command line's words of a case; see cot_op_cases. */
const char *mhc_case_parse(int op, int direction, int count, char *const words[], cot_case *c);

#endif
