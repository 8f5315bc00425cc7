/* SPDX-License-Identifier: Apache-2.0
 * test_compare.c: tests each rule of src/check/compare.h separately, with errors that only this rule refuses and
 * with the largest errors that it allows. */
#include "support.h"

#include "check/compare.h"
#include "core/float16.h"

#include <math.h>

enum { BLOCKS = 32, MAX_ELEMENTS = BLOCKS * NORM_BLOCK };

static const double u32 = 0x1p-24; /* unit roundoff of f32 */

/* One output: y, the oracle's result r, its magnitudes m, the scalar kernel's result s. */
static double y[MAX_ELEMENTS], r[MAX_ELEMENTS], m[MAX_ELEMENTS], s[MAX_ELEMENTS];

/* Fills y, r, m and s with elements of random sign and of size 1 to 2, without errors. m is the absolute value. */
static void fill_exact(int64_t count)
{
    uint64_t seed = 7;
    for (int64_t i = 0; i < count; i++) {
        r[i] = (float)(1.5 + 0.5 * random_real(&seed)) * (random_int(&seed, 0, 1) ? 1 : -1);
        y[i] = s[i] = r[i];
        m[i] = fabs(r[i]);
    }
}

static void add_errors(double *values, int64_t first, int64_t end, double units)
{
    for (int64_t i = first; i < end; i++)
        values[i] = r[i] + (i % 2 ? units : -units) * u32 * fabs(r[i]);
}

/* Compares f32 elements with sums in f32. */
static comparison compare_f32(int64_t count)
{
    return compare(y, r, m, s, count, COT_F32, COT_F32, 1);
}

static void assert_passes(const comparison *c)
{
    char line[200];
    comparison_line(c, line, sizeof line);
    if (c->failed)
        fail_msg("refused: %s", line);
    assert_non_null(strstr(line, "at most"));
}

static void assert_refused(const comparison *c, const char *because)
{
    char line[200];
    comparison_line(c, line, sizeof line);
    if (!c->failed || strstr(line, because) == NULL)
        fail_msg("expected a refusal with '%s', got %s: %s", because, c->failed ? "a refusal" : "none", line);
}

/* ---- element by element: u_out*|r| + 4*u_mid*m; fewer elements than the norm rule needs ------------------ */

static void passes_exact_results(void **state)
{
    (void)state;
    fill_exact(MAX_ELEMENTS);
    comparison c = compare_f32(MAX_ELEMENTS);
    assert_passes(&c);
    assert_int_equal(c.elements, MAX_ELEMENTS);
    assert_int_equal(c.violations, 0);
    c = compare(y, r, m, s, 0, COT_F32, COT_F32, 1);
    assert_passes(&c);
}

static void refuses_one_element_beyond_its_tolerance(void **state)
{
    (void)state;
    fill_exact(200);
    y[77] = r[77] * (1 + 4.9 * u32);
    comparison c = compare_f32(200);
    assert_passes(&c);
    assert_int_equal(c.worst_element, 77);
    y[77] = r[77] * (1 + 5.1 * u32);
    c = compare_f32(200);
    assert_refused(&c, "1 of 200 elements beyond the tolerance");
    assert_int_equal(c.worst_element, 77);
    assert_true(fabs(c.worst_ratio - 5.1 / 5) < 1e-3);
    y[77] = r[77] * (1 - 5.1 * u32);
    c = compare_f32(200);
    assert_refused(&c, "1 of 200 elements beyond the tolerance");
}

/* Each term of the tolerance, with the other term 0. */
static void allows_the_rounding_of_the_output_and_of_the_sum(void **state)
{
    (void)state;
    const struct {
        cot_dtype out, mid;
        double value, magnitude, allowed;
    } cases[] = {
        {COT_F32, COT_F32, 1, 0, 0x1p-24},       {COT_F16, COT_F32, 1, 0, 0x1p-11},
        {COT_BF16, COT_F32, 1, 0, 0x1p-8},       {COT_F64, COT_F64, 1, 0, 0x1p-53},
        {COT_F32, COT_F32, 0, 1, 0x1p-22},       {COT_F32, COT_F32, 0, 1000, 1000 * 0x1p-22},
        {COT_F32, COT_BF16, 0, 1, 0x1p-6},       {COT_F64, COT_F64, 0, 1, 0x1p-51},
        {COT_F16, COT_F32, 0, 0, 0x1p-25}, /* half of the smallest subnormal number */
        {COT_F16, COT_F32, 0x1p-20, 0, 0x1p-25},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        double value = cases[i].value, magnitude = cases[i].magnitude;
        double near = value + 0.99 * cases[i].allowed, far = value - 1.01 * cases[i].allowed;
        if (cases[i].out == COT_F64 && value != 0) /* the spacing of f64 is too coarse for the factor 1.01 */
            near = value + 0, far = value - 2 * cases[i].allowed;
        comparison c = compare(&near, &value, &magnitude, NULL, 1, cases[i].out, cases[i].mid, 1);
        assert_passes(&c);
        c = compare(&far, &value, &magnitude, NULL, 1, cases[i].out, cases[i].mid, 1);
        assert_refused(&c, "1 of 1 elements beyond the tolerance");
    }
}

static void counts_errors_in_units(void **state)
{
    (void)state;
    double value[4] = {1, 1, 1, 1}, magnitude[4] = {0}, found[4] = {1, 1 + 0x1p-23, 1 + 0x1p-20, 1 - 0x1p-16};
    const comparison c = compare(found, value, magnitude, NULL, 4, COT_F32, COT_F32, 1);
    assert_int_equal(c.violations, 3);
    assert_int_equal(c.over[0], 3); /* beyond 0.51, 1, 2, 8, 64 units */
    assert_int_equal(c.over[1], 2);
    assert_int_equal(c.over[2], 2);
    assert_int_equal(c.over[3], 1);
    assert_int_equal(c.over[4], 1);
    assert_true(c.max_error == 0x1p-16 && c.max_ulp == 128 && c.worst_element == 3);
}

/* ---- NaN and infinities ---------------------------------------------------------------------------------- */

static void refuses_a_nan(void **state)
{
    (void)state;
    fill_exact(MAX_ELEMENTS);
    y[5] = NAN;
    comparison c = compare_f32(200); /* without the norm rule */
    assert_refused(&c, "1 of 200 elements beyond the tolerance");
    assert_int_equal(c.worst_element, 5);
    assert_true(c.worst_ratio == INFINITY && c.max_error == INFINITY && c.max_ulp == INFINITY);
    assert_int_equal(c.over[THRESHOLD_COUNT - 1], 1);
    c = compare_f32(MAX_ELEMENTS); /* the norm rule alone would refuse it, too */
    assert_true(c.failed && c.worst_norm_ratio == INFINITY);
}

static void compares_the_sign_of_infinities(void **state)
{
    (void)state;
    const double expected[] = {INFINITY, -INFINITY, INFINITY, INFINITY, 1, 1, -INFINITY};
    const double found[] = {INFINITY, -INFINITY, -INFINITY, 3e38, INFINITY, -INFINITY, NAN};
    for (size_t i = 0; i < COUNT(found); i++) {
        fill_exact(200);
        r[9] = expected[i];
        y[9] = s[9] = found[i];
        const comparison c = compare_f32(200);
        if (found[i] == expected[i]) {
            assert_passes(&c);
            assert_true(c.max_error == 0);
        } else {
            assert_refused(&c, "1 of 200 elements beyond the tolerance");
        }
    }
}

/* A correct infinity does not disable the other rules: they use the other elements. */
static void leaves_right_infinities_out_of_the_averages(void **state)
{
    (void)state;
    fill_exact(NORM_BLOCK);
    r[9] = y[9] = s[9] = INFINITY;
    comparison c = compare_f32(NORM_BLOCK);
    assert_passes(&c);
    add_errors(y, 10, NORM_BLOCK, 3);
    c = compare_f32(NORM_BLOCK);
    assert_refused(&c, "error norm");
    for (int i = 0; i < NORM_BLOCK; i++)
        y[i] = r[i] = i == 9 ? INFINITY : 1;
    c = compare(y, r, m, NULL, NORM_BLOCK, COT_BF16, COT_F32, 1);
    assert_passes(&c);
    assert_true(c.bias_bound > 0 && c.bias == 0);
}

/* ---- norm rule: 1.5*||s - r|| + 0.25*u_out*||r|| + 0.5*u_f32*||m|| --------------------------------------------- */

/* Errors of 3 units: the elementwise rule allows 5, the norm rule 0.75 if the scalar kernel has no errors. */
static void refuses_a_block_by_its_norm(void **state)
{
    (void)state;
    fill_exact(MAX_ELEMENTS);
    add_errors(y, 5 * NORM_BLOCK, 6 * NORM_BLOCK, 3); /* over all elements, sqrt(1/32) of that: 0.53 */
    const comparison c = compare_f32(MAX_ELEMENTS);
    assert_refused(&c, "error norm of a block 4 times the bound (first element 20480)");
    assert_int_equal(c.violations, 0);
    assert_int_equal(c.worst_block, 5 * NORM_BLOCK);
}

static void refuses_all_elements_by_their_norm(void **state)
{
    (void)state;
    fill_exact(2 * NORM_BLOCK);
    add_errors(y, 0, 2 * NORM_BLOCK, 3);
    for (int i = 0; i < 2 * NORM_BLOCK; i++)
        if (i % NORM_BLOCK >= NORM_MIN_ELEMENTS - 56) /* 200 nonzero elements in each block, 400 in total */
            y[i] = r[i] = s[i] = m[i] = 0;
    comparison c = compare_f32(2 * NORM_BLOCK);
    assert_refused(&c, "error norm of the whole 4 times the bound");
    assert_int_equal(c.violations, 0);
    c = compare_f32(NORM_BLOCK); /* 200 are too few */
    assert_passes(&c);
}

/* Each of the three terms of the bound allows an error just below it and refuses one just above it. */
static void bounds_the_norm(void **state)
{
    (void)state;
    const struct {
        cot_dtype out;
        double scalar_units, magnitude, allowed_units;
    } cases[] = {
        {COT_F32, 0, 1, 0.75},
        {COT_F32, 2, 1, 3.75},
        {COT_F32, 0, 10, 5.25},
        {COT_F16, 0, 1, 0.25 * 8192 + 0.5},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        fill_exact(NORM_BLOCK);
        add_errors(s, 0, NORM_BLOCK, cases[i].scalar_units);
        for (int e = 0; e < NORM_BLOCK; e++)
            m[e] = cases[i].magnitude * fabs(r[e]);
        add_errors(y, 0, NORM_BLOCK, 0.99 * cases[i].allowed_units);
        assert_true(compare(y, r, m, s, NORM_BLOCK, cases[i].out, COT_F32, 1).worst_norm_ratio < 1);
        add_errors(y, 0, NORM_BLOCK, 1.01 * cases[i].allowed_units);
        const comparison c = compare(y, r, m, s, NORM_BLOCK, cases[i].out, COT_F32, 1);
        assert_true(c.failed && c.worst_norm_ratio > 1);
        assert_int_equal(c.violations, 0);
    }
    fill_exact(NORM_BLOCK); /* f64: the term of f32 is absent */
    for (int e = 0; e < NORM_BLOCK; e++)
        y[e] = r[e] + (e % 2 ? 0x1p-52 : -0x1p-52) * (fabs(r[e]) >= 1 ? 1 : 0.5);
    const comparison c = compare(y, r, m, s, NORM_BLOCK, COT_F64, COT_F64, 1);
    assert_refused(&c, "error norm");
}

/* The norm rule does not apply without a scalar kernel, to elements with common errors, and to sums that lost most
 * of their bits. */
static void norm_rule_does_not_always_apply(void **state)
{
    (void)state;
    fill_exact(NORM_BLOCK);
    add_errors(y, 0, NORM_BLOCK, 3);
    comparison c = compare(y, r, m, NULL, NORM_BLOCK, COT_F32, COT_F32, 1);
    assert_passes(&c);
    c = compare(y, r, m, s, NORM_BLOCK, COT_F32, COT_F32, NORM_BLOCK / NORM_MIN_ELEMENTS);
    assert_refused(&c, "error norm");
    c = compare(y, r, m, s, NORM_BLOCK, COT_F32, COT_F32, NORM_BLOCK / NORM_MIN_ELEMENTS + 1);
    assert_passes(&c);
    for (int pass = 0; pass < 2; pass++) { /* either side of ||r|| = 2^-14 ||m|| */
        const double lost = pass ? 0x1p14 * 1.01 : 0x1p14 / 1.01;
        for (int e = 0; e < NORM_BLOCK; e++)
            m[e] = lost * fabs(r[e]);
        add_errors(y, 0, NORM_BLOCK, lost);
        c = compare_f32(NORM_BLOCK);
        if (pass)
            assert_passes(&c);
        else
            assert_refused(&c, "error norm");
    }
}

/* ---- rounding to 16 bits has no bias ---------------------------------------------------------------------- */

/* r is 0.6 units above a number of the dtype. y is the nearest number. In `count_per_100` of 100 elements, y is the
 * next number towards zero or below. The elementwise rule allows 0.95 units here. */
static void fill_rounded(cot_dtype dtype, int count_per_100, bool to_zero)
{
    const double unit = dtype == COT_BF16 ? 0x1p-7 : 0x1p-10;
    for (int i = 0; i < NORM_BLOCK; i++) {
        const int sign = i % 2 ? 1 : -1;
        const double below = 2 - 3 * unit;
        r[i] = sign * (below + 0.6 * unit);
        y[i] = sign * (below + unit);
        if (i / 2 % 100 < count_per_100)
            y[i] = to_zero || sign > 0 ? sign * below : sign * (below + unit);
        m[i] = 0;
    }
}

static void refuses_biased_rounding(void **state)
{
    (void)state;
    static const cot_dtype dtypes[] = {COT_BF16, COT_F16};
    for (int d = 0; d < 2; d++) {
        fill_rounded(dtypes[d], 0, true);
        comparison c = compare(y, r, m, NULL, NORM_BLOCK, dtypes[d], COT_F32, 1);
        assert_passes(&c);
        assert_true(c.bias == 0 && fabs(c.bias_bound - 6 / sqrt(12.0 * NORM_BLOCK)) < 1e-12);
        fill_rounded(dtypes[d], 2, true); /* bias -0.02 units, bound 0.027 */
        c = compare(y, r, m, NULL, NORM_BLOCK, dtypes[d], COT_F32, 1);
        assert_passes(&c);
        fill_rounded(dtypes[d], 10, true);
        c = compare(y, r, m, NULL, NORM_BLOCK, dtypes[d], COT_F32, 1);
        assert_refused(&c, "rounding is biased by -0.");
        assert_int_equal(c.violations, 0);
        fill_rounded(dtypes[d], 10, false); /* changes the positive elements only */
        c = compare(y, r, m, NULL, NORM_BLOCK, dtypes[d], COT_F32, 1);
        assert_refused(&c, "rounding is biased by -0.");
        for (int i = 0; i < NORM_BLOCK; i++) /* the error bound of the sum itself does not count as bias */
            m[i] = 0.2 * 2 * unit_roundoff(dtypes[d]) / (4 * u32);
        c = compare(y, r, m, NULL, NORM_BLOCK, dtypes[d], COT_F32, 1);
        assert_passes(&c);
        c = compare(y, r, m, NULL, NORM_MIN_ELEMENTS - 1, dtypes[d], COT_F32, 1); /* too few elements for an average */
        assert_true(c.bias_bound == 0);
    }
    fill_rounded(COT_BF16, 100, true);
    assert_true(compare(y, r, m, NULL, NORM_BLOCK, COT_F32, COT_F32, 1).bias_bound == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(passes_exact_results),
        cmocka_unit_test(refuses_one_element_beyond_its_tolerance),
        cmocka_unit_test(allows_the_rounding_of_the_output_and_of_the_sum),
        cmocka_unit_test(counts_errors_in_units),
        cmocka_unit_test(refuses_a_nan),
        cmocka_unit_test(compares_the_sign_of_infinities),
        cmocka_unit_test(leaves_right_infinities_out_of_the_averages),
        cmocka_unit_test(refuses_a_block_by_its_norm),
        cmocka_unit_test(refuses_all_elements_by_their_norm),
        cmocka_unit_test(bounds_the_norm),
        cmocka_unit_test(norm_rule_does_not_always_apply),
        cmocka_unit_test(refuses_biased_rounding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
