/* SPDX-License-Identifier: Apache-2.0
 * compare.h: the error rule, one for all ops.
 *
 * With r the oracle, m its magnitudes, s the scalar kernel in the same dtypes, u the unit roundoff of a dtype:
 *     elementwise   |y - r| <= u_out*|r| + 4*u_mid*m
 *     in norm       ||y - r|| <= 1.5*||s - r|| + 0.25*u_out*||r|| + 0.5*u_f32*||m||     over the whole and every block of 4096
 *     16-bit output mean of sign(r)*(y - r rounded)/ulp(r) within 6 standard errors of 0, and the
 *                   mean of 4*u_mid*m/ulp besides: rounding has no bias
 * The norm rule needs numbers to average over: the ratio of two norms of n random errors scatters by 1/sqrt(n), so it
 * is applied to blocks with at least NORM_LEAST non-zero elements and ||r|| >= 2^-14 ||m||; elsewhere the elementwise
 * rule stands alone.
 * Elements that `shared` one factor have one error, and count as one.
 * NaN and infinities: where r is one of them y is the same, and the other two rules leave the element out. Where m has its
 * sign bit set y may be NaN, or, if r is a NaN or an infinity, either of them. */
#ifndef COT_CHECK_COMPARE_H
#define COT_CHECK_COMPARE_H

#include <cotangent/core.h>
#include <stdbool.h>
#include <stdio.h>

enum { NORM_BLOCK = 4096, NORM_LEAST = 256, THRESHOLD_COUNT = 5 };

typedef struct comparison {
    int64_t elements, violations; /* of the elementwise rule */
    double worst_ratio;           /* |y - r| / its tolerance, at worst_element */
    int64_t worst_element;
    double max_error, rms_error, max_ulp, rms_ulp; /* ulp: the spacing of the output's dtype at r */
    int64_t over[THRESHOLD_COUNT];                 /* elements off by more than thresholds[i] ulp */
    double worst_norm_ratio;                       /* left over right side of the norm rule, over the blocks */
    int64_t worst_block;                           /* first element of that block, -1 = the whole */
    double bias, bias_bound;                       /* in ulp; bound 0 = not checked */
    bool failed;
} comparison;

extern const double thresholds[THRESHOLD_COUNT];

/* u of a dtype: half the spacing at 1. */
double unit_roundoff(cot_dtype dtype);

/* y, r, m, s: `elements` row-major values each; of those, `shared` at a time share an error (1 = none does). Without s
 * (NULL) there is no norm rule. */
comparison compare(const double *y, const double *r, const double *m, const double *s, int64_t elements, cot_dtype out,
                   cot_dtype intermediate, int64_t shared);

/* An output's errors in the measures that people ask for besides the rule. */
typedef struct error_measures {
    int64_t elements, above, below; /* by more than 1.0; by less than 0.1 */
    double max, mean, rms_ulp, relative /* in norm */, largest /* |r| */;
} error_measures;

/* Of the elements with first <= number mod period < end: one stream of many, say. */
error_measures measure_errors(const double *y, const double *r, int64_t elements, int64_t first, int64_t end,
                              int64_t period, cot_dtype dtype);

/* One line: what the rule says of it. */
void comparison_line(const comparison *c, char *text, size_t size);

/* The full report of one output: statistics, counts, the worst elements, and along each axis where the errors are. */
void comparison_report(FILE *file, const char *name, const comparison *c, const double *y, const double *r,
                       const double *m, const cot_tensor *shape, cot_dtype intermediate);

#endif
