/* SPDX-License-Identifier: Apache-2.0
 * compare.h: the error rule, one for all ops.
 *
 * With y the kernel's output, r the oracle, m its magnitudes, s the scalar kernel's output in the same dtypes, u the
 * unit roundoff of a dtype:
 *     elementwise   |y - r| <= u_out*|r| + 4*u_mid*m
 *     in norm       ||y - r|| <= 1.5*||s - r|| + 0.25*u_out*||r|| + 0.5*u_f32*||m||    over the whole and every block
 *                   of 4096 elements; for f64 without the last term. For an f32 output that
 *                   stands for a 16-bit one (a block that is merged later) of a kernel that rounds to 16 bits before:
 *                   0.6*u_mid in place of 0.25*u_out
 *     16-bit output mean of sign(r)*(y - r rounded)/ulp(r) within 6 standard errors of 0, plus the mean of
 *                   4*u_mid*m/ulp: rounding has no bias
 * The norm rule needs many numbers to average over: the ratio of two norms of n random errors scatters by 1/sqrt(n). It
 * applies to blocks with at least NORM_MIN_ELEMENTS non-zero elements and ||r|| >= 2^-14 ||m||. For other blocks, only
 * the elementwise rule applies. Elements that share a factor have one common error and count as one element.
 *
 * NaN and infinities: where r is a NaN or an infinity, y must be the same, and the other two rules skip the element.
 * Where m has its sign bit set, y may be a NaN. It may also be an infinity if r is a NaN or an infinity. */
#ifndef COT_CHECK_COMPARE_H
#define COT_CHECK_COMPARE_H

#include <cotangent/core.h>
#include <stdbool.h>
#include <stdio.h>

enum { NORM_BLOCK = 4096, NORM_MIN_ELEMENTS = 256, THRESHOLD_COUNT = 5 };

typedef struct comparison {
    int64_t elements, violations; /* violations: of the elementwise rule */
    double worst_ratio;           /* |y - r| / its tolerance, at worst_element */
    int64_t worst_element;
    double max_error, rms_error, max_ulp, rms_ulp; /* ulp: the spacing of the output's dtype at r */
    int64_t over[THRESHOLD_COUNT];                 /* elements off by more than thresholds[i] ulp */
    double worst_norm_ratio; /* left side over right side of the norm rule, the largest over the blocks */
    int64_t worst_block;     /* first element of that block, -1 = the whole */
    double bias, bias_bound; /* in ulp; bias_bound 0 = not checked */
    bool failed;
} comparison;

extern const double thresholds[THRESHOLD_COUNT];

/* u of a dtype: half the spacing at 1. */
double unit_roundoff(cot_dtype dtype);

/* y, r, m, s: `elements` row-major values each. Each group of `shared` elements has a common error (1 = no group).
 * Without s (NULL), the norm rule does not apply. */
comparison compare(const double *y, const double *r, const double *m, const double *s, int64_t elements, cot_dtype out,
                   cot_dtype intermediate, int64_t shared);

/* The same for an f32 output in place of one with the dtype `norm`; norm = out: as above. */
comparison compare_with_norm(const double *y, const double *r, const double *m, const double *s, int64_t elements,
                             cot_dtype out, cot_dtype intermediate, cot_dtype norm, int64_t shared);

/* Error measures of an output that are printed in addition to the rule's. */
typedef struct error_measures {
    int64_t elements, above, below; /* elements whose absolute error is above 1.0, or below 0.1 */
    double max, mean, rms_ulp, relative /* in norm */, largest /* |r| */;
} error_measures;

/* Measures the elements with first <= index mod period < end, for example one stream of many. */
error_measures measure_errors(const double *y, const double *r, int64_t elements, int64_t first, int64_t end,
                              int64_t period, cot_dtype dtype);

/* Writes the rule's result in one line. */
void comparison_line(const comparison *c, char *text, size_t size);

/* Writes the full report of one output: statistics, counts, the worst element, and after a failure the errors along
 * each axis. */
void comparison_report(FILE *file, const char *name, const comparison *c, const double *y, const double *r,
                       const double *m, const cot_tensor *shape, cot_dtype intermediate);

#endif
