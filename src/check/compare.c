/* SPDX-License-Identifier: Apache-2.0 */
#include "compare.h"

#include "core/float16.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>

const double thresholds[THRESHOLD_COUNT] = {0.51, 1, 2, 8, 64};

double unit_roundoff(cot_dtype dtype)
{
    switch (dtype) {
    case COT_F64: return 0x1p-53;
    case COT_F16: return 0x1p-11;
    case COT_BF16: return 0x1p-8;
    default: return 0x1p-24;
    }
}

/* The distance between adjacent numbers of the dtype at |value|. */
static double spacing(double value, cot_dtype dtype)
{
    enum { MANTISSA = 52, BIAS = 1023, SPECIAL = 0x7ff };
    const int64_t min_exponent = dtype == COT_F64 ? -1022 : dtype == COT_F16 ? -14 : -126;
    uint64_t bits; /* replaces ilogb and ldexp, which took 10 % of check's time */
    memcpy(&bits, &value, sizeof bits);
    int64_t exponent = (int64_t)(bits >> MANTISSA & SPECIAL) - BIAS;
    if (exponent < min_exponent || exponent == SPECIAL - BIAS)
        exponent = min_exponent;
    double power;
    bits = (uint64_t)(exponent + BIAS) << MANTISSA;
    memcpy(&power, &bits, sizeof power);
    return 2 * unit_roundoff(dtype) * power;
}

static double tolerance(double r, double m, cot_dtype out, cot_dtype intermediate)
{
    /* The spacing of subnormal numbers does not shrink with the value. */
    const double rounding = fmax(unit_roundoff(out) * fabs(r), 0.5 * spacing(0, out));
    return rounding + 4 * unit_roundoff(intermediate) * fabs(m);
}

/* |y - r|. Infinite if only one of y and r is a NaN. */
static double distance(double y, double r)
{
    if (y == r || (isnan(y) && isnan(r)))
        return 0;
    const double error = fabs(y - r);
    return isnan(error) ? INFINITY : error;
}

/* Returns whether y is a NaN or an infinity that the oracle allows. */
static bool allowed_special(double y, double r, double m)
{
    return signbit(m) && (isnan(y) || (isinf(y) && !isfinite(r)));
}

/* The error as a multiple of its tolerance. A tolerance that is not finite fails the element, unless y equals r or is
 * an allowed NaN or infinity. */
static double tolerance_ratio(double y, double r, double m, cot_dtype out, cot_dtype intermediate)
{
    const double error = distance(y, r), allowed = tolerance(r, m, out, intermediate);
    if (error == 0 || allowed_special(y, r, m))
        return 0;
    return isfinite(allowed) ? error / allowed : INFINITY;
}

static void compare_elements(comparison *c, const double *y, const double *r, const double *m, cot_dtype out,
                             cot_dtype intermediate)
{
    double squares = 0, squares_ulp = 0;
    for (int64_t i = 0; i < c->elements; i++) {
        const double error = allowed_special(y[i], r[i], m[i]) ? 0 : distance(y[i], r[i]);
        const double ulp = error / spacing(r[i], out);
        const double ratio = tolerance_ratio(y[i], r[i], m[i], out, intermediate);
        c->violations += !(ratio <= 1);
        if (!(ratio <= c->worst_ratio)) {
            c->worst_ratio = ratio;
            c->worst_element = i;
        }
        c->max_error = fmax(c->max_error, error);
        c->max_ulp = fmax(c->max_ulp, ulp);
        for (int t = 0; t < THRESHOLD_COUNT; t++)
            c->over[t] += !(ulp <= thresholds[t]);
        squares += error * error;
        squares_ulp += ulp * ulp;
    }
    c->rms_error = c->elements > 0 ? sqrt(squares / (double)c->elements) : 0;
    c->rms_ulp = c->elements > 0 ? sqrt(squares_ulp / (double)c->elements) : 0;
}

/* The left side over the right side of the norm rule for the elements [first, end). Returns false if the rule does not
 * apply: if there are too few elements, or if float32 sums of the terms' size keep less than 10 bits of the result. In
 * the second case the scalar kernel's error depends on chance, for example it is 0 if the terms cancel, and a few
 * elements decide. That happens with attention logits of 1e4, whose exponentials have lost 13 bits before they are
 * summed. No case of the other ops comes close.
 *
 * The bound has half a float32 unit of the summed terms in addition to a quarter of the output's unit. A sum of n
 * products of normal numbers, accumulated one after the other in float32, has an error of 0.58 u sqrt(1 + 2 + ... n) =
 * 0.41 n u, and its magnitude is 0.64 n. Another order has the same error where the scalar kernel's terms cancel
 * exactly (attention's dP - D of a query with one key). Tensor cores have such an error too: they truncate the addends
 * that a loop rounds, which gives errors of one sign.
 *
 * A kernel that rounds P to 16 bits has the same error before the output's own rounding, whatever the output's dtype is.
 * For a 16-bit output the bound is 0.25 + 1.5 * 0.29 = 0.68 units, where 0.29 = 1/sqrt(12) is the rounding of an output. So
 * its error before that rounding is at most sqrt(0.68^2 - 0.29^2) = 0.6 units. An f32 output in place of a 16-bit one gets
 * this bound. */
static bool norm_ratio(const double *y, const double *r, const double *m, const double *s, int64_t first, int64_t end,
                       cot_dtype out, cot_dtype wide, int64_t shared, double *ratio)
{
    double error = 0, scalar_error = 0, norm = 0, terms = 0;
    int64_t element_count = 0;
    for (int64_t i = first; i < end; i++) {
        if (!isfinite(r[i]) || allowed_special(y[i], r[i], m[i]) || allowed_special(s[i], r[i], m[i]))
            continue; /* not a number to average */
        error += (y[i] - r[i]) * (y[i] - r[i]);
        scalar_error += (s[i] - r[i]) * (s[i] - r[i]);
        norm += r[i] * r[i];
        terms += m[i] * m[i];
        element_count += r[i] != 0;
    }
    const double bound = 1.5 * sqrt(scalar_error) + (wide != out ? 0.6 : 0.25) * unit_roundoff(wide) * sqrt(norm) +
                         (out == COT_F64 ? 0 : 0.5 * unit_roundoff(COT_F32) * sqrt(terms));
    *ratio = bound > 0 ? sqrt(error) / bound : 0;
    return element_count / shared >= NORM_MIN_ELEMENTS && unit_roundoff(COT_F32) * sqrt(terms) <= 0x1p-10 * sqrt(norm);
}

static void compare_norms(comparison *c, const double *y, const double *r, const double *m, const double *s,
                          cot_dtype out, cot_dtype wide, int64_t shared)
{
    double ratio;
    c->worst_block = -1;
    if (s == NULL)
        return;
    if (norm_ratio(y, r, m, s, 0, c->elements, out, wide, shared, &ratio))
        c->worst_norm_ratio = isnan(ratio) ? INFINITY : ratio;
    for (int64_t first = 0; first < c->elements; first += NORM_BLOCK) {
        const int64_t end = first + NORM_BLOCK < c->elements ? first + NORM_BLOCK : c->elements;
        if (norm_ratio(y, r, m, s, first, end, out, wide, shared, &ratio) && !(ratio <= c->worst_norm_ratio)) {
            c->worst_norm_ratio = isnan(ratio) ? INFINITY : ratio;
            c->worst_block = first;
        }
    }
}

/* Compares y with r rounded to nearest, not with r. In 0.7 * x of a bf16 x, one factor is the same for all elements.
 * The rounding errors of r are then those of a few hundred products, and their mean is not 0. The bound is that of
 * values uniform over one spacing, with standard deviation 1/sqrt(12). It adds the shift that an error common to many
 * elements can cause, from a factor that was computed before. */
static void compare_bias(comparison *c, const double *y, const double *r, const double *m, cot_dtype out,
                         cot_dtype intermediate)
{
    double sum = 0, common_error = 0;
    int64_t element_count = 0;
    if (out != COT_F16 && out != COT_BF16)
        return;
    for (int64_t i = 0; i < c->elements; i++) {
        if (r[i] == 0 || !isfinite(r[i]) || allowed_special(y[i], r[i], m[i]))
            continue;
        double nearest; /* large enough for every dtype */
        cot_store_f64(&nearest, out, 0, r[i]);
        nearest = cot_load_f64(&nearest, out, 0);
        if (y[i] != nearest) /* if equal, both may be infinite */
            sum += (r[i] < 0 ? nearest - y[i] : y[i] - nearest) / spacing(r[i], out);
        common_error += 4 * unit_roundoff(intermediate) * fabs(m[i]) / spacing(r[i], out);
        element_count++;
    }
    if (element_count < NORM_MIN_ELEMENTS)
        return;
    c->bias = sum / (double)element_count;
    c->bias_bound = 6 / sqrt(12.0 * (double)element_count) + common_error / (double)element_count;
}

comparison compare(const double *y, const double *r, const double *m, const double *s, int64_t elements, cot_dtype out,
                   cot_dtype intermediate, int64_t shared)
{
    return compare_with_norm(y, r, m, s, elements, out, intermediate, out, shared);
}

comparison compare_with_norm(const double *y, const double *r, const double *m, const double *s, int64_t elements,
                             cot_dtype out, cot_dtype intermediate, cot_dtype norm, int64_t shared)
{
    comparison c = {.elements = elements, .worst_element = -1};
    compare_elements(&c, y, r, m, out, intermediate);
    compare_norms(&c, y, r, m, s, out, norm, shared);
    compare_bias(&c, y, r, m, out, intermediate);
    c.failed = c.violations > 0 || !(c.worst_norm_ratio <= 1) || (c.bias_bound > 0 && !(fabs(c.bias) <= c.bias_bound));
    return c;
}

error_measures measure_errors(const double *y, const double *r, int64_t elements, int64_t first, int64_t end,
                              int64_t period, cot_dtype dtype)
{
    error_measures m = {0};
    double squares = 0, norm = 0, ulps = 0;
    for (int64_t i = 0; i < elements; i++) {
        if (i % period < first || i % period >= end)
            continue;
        const double error = distance(y[i], r[i]), ulp = error / spacing(r[i], dtype);
        m.elements++;
        m.above += !(error <= 1.0);
        m.below += error < 0.1;
        m.max = fmax(m.max, error);
        m.largest = fmax(m.largest, fabs(r[i]));
        m.mean += error;
        squares += error * error;
        ulps += ulp * ulp;
        norm += r[i] * r[i];
    }
    m.mean /= (double)(m.elements > 0 ? m.elements : 1);
    m.rms_ulp = sqrt(ulps / (double)(m.elements > 0 ? m.elements : 1));
    m.relative = norm > 0 ? sqrt(squares / norm) : 0;
    return m;
}

void comparison_line(const comparison *c, char *text, size_t size)
{
    if (c->violations > 0)
        snprintf(text, size, "%" PRId64 " of %" PRId64 " elements beyond the tolerance, worst by %.3g times",
                 c->violations, c->elements, c->worst_ratio);
    else if (!(c->worst_norm_ratio <= 1))
        snprintf(text, size, "error norm of %s %.3g times the bound (first element %" PRId64 ")",
                 c->worst_block < 0 ? "the whole" : "a block", c->worst_norm_ratio,
                 c->worst_block < 0 ? 0 : c->worst_block);
    else if (c->bias_bound > 0 && !(fabs(c->bias) <= c->bias_bound))
        snprintf(text, size, "rounding is biased by %.3g ulp (bound %.3g)", c->bias, c->bias_bound);
    else
        snprintf(text, size, "at most %.3g of the tolerance, max %.3g ulp, rms %.3g ulp", c->worst_ratio, c->max_ulp,
                 c->rms_ulp);
}

/* ---- the long report ---------------------------------------------------------------------------------- */

static void print_index(FILE *file, const cot_tensor *shape, int64_t number)
{
    int64_t index[COT_MAX_RANK];
    for (int axis = shape->rank - 1; axis >= 0; axis--) {
        index[axis] = number % shape->shape[axis];
        number /= shape->shape[axis];
    }
    fputc('[', file);
    for (int axis = 0; axis < shape->rank; axis++)
        fprintf(file, "%s%" PRId64, axis > 0 ? "," : "", index[axis]);
    fputc(']', file);
}

/* Statistics of a range of indices of one axis. */
typedef struct axis_range {
    int64_t elements, violations;
    double max_ulp, squares_ulp;
} axis_range;

enum { AXIS_RANGES = 8 };

static void report_axis(FILE *file, int axis, const double *y, const double *r, const double *m,
                        const cot_tensor *shape, cot_dtype intermediate)
{
    const int64_t size = shape->shape[axis];
    int64_t inner = 1, elements = 1, first_bad = -1, last_bad = -1, bad_indices = 0;
    for (int a = 0; a < shape->rank; a++) {
        inner *= a > axis ? shape->shape[a] : 1;
        elements *= shape->shape[a];
    }
    const int count = size < AXIS_RANGES ? (int)size : AXIS_RANGES;
    axis_range ranges[AXIS_RANGES] = {{0}};
    for (int64_t index = 0; index < size; index++) {
        axis_range *part = &ranges[index * count / size];
        const int64_t before = part->violations;
        for (int64_t outer = 0; outer < elements; outer += inner * size) {
            for (int64_t i = outer + index * inner; i < outer + (index + 1) * inner; i++) {
                const double error = allowed_special(y[i], r[i], m[i]) ? 0 : distance(y[i], r[i]);
                const double ulp = error / spacing(r[i], shape->dtype);
                part->violations += !(tolerance_ratio(y[i], r[i], m[i], shape->dtype, intermediate) <= 1);
                part->max_ulp = fmax(part->max_ulp, ulp);
                part->squares_ulp += ulp * ulp;
                part->elements++;
            }
        }
        if (part->violations > before) {
            first_bad = first_bad < 0 ? index : first_bad;
            last_bad = index;
            bad_indices++;
        }
    }
    fprintf(file, "      axis %d (%" PRId64 "): ", axis, size);
    if (bad_indices > 0)
        fprintf(file, "%" PRId64 " indices beyond the tolerance, from %" PRId64 " to %" PRId64 "\n", bad_indices,
                first_bad, last_bad);
    else
        fprintf(file, "no index beyond the tolerance\n");
    for (int part = 0; part < count; part++) {
        const axis_range *p = &ranges[part];
        fprintf(file, "        %6" PRId64 "..%-6" PRId64 " %8" PRId64 " beyond, max %9.3g ulp, rms %9.3g ulp\n",
                (part * size + count - 1) / count, ((part + 1) * size + count - 1) / count - 1, p->violations,
                p->max_ulp, sqrt(p->squares_ulp / (double)(p->elements > 0 ? p->elements : 1)));
    }
}

void comparison_report(FILE *file, const char *name, const comparison *c, const double *y, const double *r,
                       const double *m, const cot_tensor *shape, cot_dtype intermediate)
{
    fprintf(file, "    %s %s, %" PRId64 " elements: %s\n", name, cot_dtype_name(shape->dtype), c->elements,
            c->failed ? "FAILED" : "passed");
    fprintf(file, "      error: max %.3g (%.3g ulp), rms %.3g (%.3g ulp), %.3g of the tolerance", c->max_error,
            c->max_ulp, c->rms_error, c->rms_ulp, c->worst_ratio);
    if (c->worst_norm_ratio > 0) /* 0: the norm rule did not apply, or no scalar kernel was compared */
        fprintf(file, ", norm %.3g of its bound", c->worst_norm_ratio);
    fputc('\n', file);
    if (c->bias_bound > 0)
        fprintf(file, "      bias of rounding: %+.3g ulp (bound %.3g)\n", c->bias, c->bias_bound);
    fprintf(file, "      elements off by more than");
    for (int t = 0; t < THRESHOLD_COUNT; t++)
        fprintf(file, "%s %g ulp: %" PRId64, t > 0 ? "," : "", thresholds[t], c->over[t]);
    fputc('\n', file);
    if (c->worst_element >= 0) {
        fprintf(file, "      worst at ");
        print_index(file, shape, c->worst_element);
        fprintf(file, ": %.9g, expected %.9g, tolerance %.3g\n", y[c->worst_element], r[c->worst_element],
                tolerance(r[c->worst_element], m[c->worst_element], shape->dtype, intermediate));
    }
    for (int axis = 0; c->failed && c->elements > 0 && axis < shape->rank; axis++)
        report_axis(file, axis, y, r, m, shape, intermediate);
}
