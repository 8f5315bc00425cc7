/* SPDX-License-Identifier: Apache-2.0
 * test_compare.c: each rule of src/check/compare.h by itself: errors that this rule alone refuses, and errors as large
 * as it allows. */
#include "support.h"

#include "check/compare.h"
#include "core/float16.h"

#include <math.h>

enum { BLOCKS = 32, MOST = BLOCKS * NORM_BLOCK };

static const double u32 = 0x1p-24; /* unit roundoff of f32 */

/* One output: y, the oracle's r, its magnitudes m, the scalar kernel's s. */
static double y[MOST], r[MOST], m[MOST], s[MOST];

/* Elements of random sign, 1 to 2 in size, without any error, whose magnitudes are their absolute values. */
static void exact(int64_t count)
{
    uint64_t seed = 7;
    for (int64_t i = 0; i < count; i++) {
        r[i] = (float)(1.5 + 0.5 * random_real(&seed)) * (random_int(&seed, 0, 1) ? 1 : -1);
        y[i] = s[i] = r[i];
        m[i] = fabs(r[i]);
    }
}

static void err(double *values, int64_t first, int64_t end, double units)
{
    for (int64_t i = first; i < end; i++)
        values[i] = r[i] + (i % 2 ? units : -units) * u32 * fabs(r[i]);
}

/* In f32, all sums in f32. */
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

static void passes_what_is_exact(void **state)
{
    (void)state;
    exact(MOST);
    comparison c = compare_f32(MOST);
    assert_passes(&c);
    assert_int_equal(c.elements, MOST);
    assert_int_equal(c.violations, 0);
    c = compare(y, r, m, s, 0, COT_F32, COT_F32, 1);
    assert_passes(&c);
}

static void refuses_one_element_beyond_its_tolerance(void **state)
{
    (void)state;
    exact(200);
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

/* Each term of the tolerance, where the other is nothing. */
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
        {COT_F16, COT_F32, 0, 0, 0x1p-25}, /* half of the least subnormal number */
        {COT_F16, COT_F32, 0x1p-20, 0, 0x1p-25},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        double value = cases[i].value, magnitude = cases[i].magnitude;
        double near = value + 0.99 * cases[i].allowed, far = value - 1.01 * cases[i].allowed;
        if (cases[i].out == COT_F64 && value != 0) /* whose own spacing is too coarse for 1.01 */
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
    exact(MOST);
    y[5] = NAN;
    comparison c = compare_f32(200); /* without the norm rule */
    assert_refused(&c, "1 of 200 elements beyond the tolerance");
    assert_int_equal(c.worst_element, 5);
    assert_true(c.worst_ratio == INFINITY && c.max_error == INFINITY && c.max_ulp == INFINITY);
    assert_int_equal(c.over[THRESHOLD_COUNT - 1], 1);
    c = compare_f32(MOST); /* and the norm rule by itself would refuse it */
    assert_true(c.failed && c.worst_norm_ratio == INFINITY);
}

static void holds_infinities_to_their_sign(void **state)
{
    (void)state;
    const double expected[] = {INFINITY, -INFINITY, INFINITY, INFINITY, 1, 1, -INFINITY};
    const double found[] = {INFINITY, -INFINITY, -INFINITY, 3e38, INFINITY, -INFINITY, NAN};
    for (size_t i = 0; i < COUNT(found); i++) {
        exact(200);
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

/* An infinity that is right takes nothing from the other rules: they go on with the other elements. */
static void leaves_right_infinities_out_of_the_averages(void **state)
{
    (void)state;
    exact(NORM_BLOCK);
    r[9] = y[9] = s[9] = INFINITY;
    comparison c = compare_f32(NORM_BLOCK);
    assert_passes(&c);
    err(y, 10, NORM_BLOCK, 3);
    c = compare_f32(NORM_BLOCK);
    assert_refused(&c, "error norm");
    for (int i = 0; i < NORM_BLOCK; i++)
        y[i] = r[i] = i == 9 ? INFINITY : 1;
    c = compare(y, r, m, NULL, NORM_BLOCK, COT_BF16, COT_F32, 1);
    assert_passes(&c);
    assert_true(c.bias_bound > 0 && c.bias == 0);
}

/* ---- in norm: 1.5*||s - r|| + 0.25*u_out*||r|| + 0.5*u_f32*||m|| --------------------------------------------- */

/* Errors of 3 units each: the elementwise rule allows 5, the norm rule 0.75 beside a scalar kernel without errors. */
static void refuses_a_block_by_its_norm(void **state)
{
    (void)state;
    exact(MOST);
    err(y, 5 * NORM_BLOCK, 6 * NORM_BLOCK, 3); /* over the whole, sqrt(1/32) of that: 0.53 */
    const comparison c = compare_f32(MOST);
    assert_refused(&c, "error norm of a block 4 times the bound (first element 20480)");
    assert_int_equal(c.violations, 0);
    assert_int_equal(c.worst_block, 5 * NORM_BLOCK);
}

static void refuses_the_whole_by_its_norm(void **state)
{
    (void)state;
    exact(2 * NORM_BLOCK);
    err(y, 0, 2 * NORM_BLOCK, 3);
    for (int i = 0; i < 2 * NORM_BLOCK; i++)
        if (i % NORM_BLOCK >= NORM_MIN_ELEMENTS - 56) /* 200 numbers in each block, 400 in all */
            y[i] = r[i] = s[i] = m[i] = 0;
    comparison c = compare_f32(2 * NORM_BLOCK);
    assert_refused(&c, "error norm of the whole 4 times the bound");
    assert_int_equal(c.violations, 0);
    c = compare_f32(NORM_BLOCK); /* 200 are too few */
    assert_passes(&c);
}

/* The three terms of the bound, each enough for an error just below it and not for one just above. */
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
        exact(NORM_BLOCK);
        err(s, 0, NORM_BLOCK, cases[i].scalar_units);
        for (int e = 0; e < NORM_BLOCK; e++)
            m[e] = cases[i].magnitude * fabs(r[e]);
        err(y, 0, NORM_BLOCK, 0.99 * cases[i].allowed_units);
        assert_true(compare(y, r, m, s, NORM_BLOCK, cases[i].out, COT_F32, 1).worst_norm_ratio < 1);
        err(y, 0, NORM_BLOCK, 1.01 * cases[i].allowed_units);
        const comparison c = compare(y, r, m, s, NORM_BLOCK, cases[i].out, COT_F32, 1);
        assert_true(c.failed && c.worst_norm_ratio > 1);
        assert_int_equal(c.violations, 0);
    }
    exact(NORM_BLOCK); /* f64: no term of f32's */
    for (int e = 0; e < NORM_BLOCK; e++)
        y[e] = r[e] + (e % 2 ? 0x1p-52 : -0x1p-52) * (fabs(r[e]) >= 1 ? 1 : 0.5);
    const comparison c = compare(y, r, m, s, NORM_BLOCK, COT_F64, COT_F64, 1);
    assert_refused(&c, "error norm");
}

/* Without a scalar kernel, of elements that share their errors, and of sums that lost most of their bits, there is no
 * norm to speak of. */
static void knows_where_the_norm_says_nothing(void **state)
{
    (void)state;
    exact(NORM_BLOCK);
    err(y, 0, NORM_BLOCK, 3);
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
        err(y, 0, NORM_BLOCK, lost);
        c = compare_f32(NORM_BLOCK);
        if (pass)
            assert_passes(&c);
        else
            assert_refused(&c, "error norm");
    }
}

/* ---- rounding to 16 bits has no bias ---------------------------------------------------------------------- */

/* r lies 0.6 units beyond a number of the dtype; y is the nearest number, or in `share` of 100 elements the one nearer
 * to zero, or below. The elementwise rule allows 0.95 units here. */
static void round_some(cot_dtype dtype, int share, bool to_zero)
{
    const double unit = dtype == COT_BF16 ? 0x1p-7 : 0x1p-10;
    for (int i = 0; i < NORM_BLOCK; i++) {
        const int sign = i % 2 ? 1 : -1;
        const double below = 2 - 3 * unit;
        r[i] = sign * (below + 0.6 * unit);
        y[i] = sign * (below + unit);
        if (i / 2 % 100 < share)
            y[i] = to_zero || sign > 0 ? sign * below : sign * (below + unit);
        m[i] = 0;
    }
}

static void refuses_biased_rounding(void **state)
{
    (void)state;
    static const cot_dtype dtypes[] = {COT_BF16, COT_F16};
    for (int d = 0; d < 2; d++) {
        round_some(dtypes[d], 0, true);
        comparison c = compare(y, r, m, NULL, NORM_BLOCK, dtypes[d], COT_F32, 1);
        assert_passes(&c);
        assert_true(c.bias == 0 && fabs(c.bias_bound - 6 / sqrt(12.0 * NORM_BLOCK)) < 1e-12);
        round_some(dtypes[d], 2, true); /* -0.02 units, of 0.027 */
        c = compare(y, r, m, NULL, NORM_BLOCK, dtypes[d], COT_F32, 1);
        assert_passes(&c);
        round_some(dtypes[d], 10, true);
        c = compare(y, r, m, NULL, NORM_BLOCK, dtypes[d], COT_F32, 1);
        assert_refused(&c, "rounding is biased by -0.");
        assert_int_equal(c.violations, 0);
        round_some(dtypes[d], 10, false); /* of the positive half */
        c = compare(y, r, m, NULL, NORM_BLOCK, dtypes[d], COT_F32, 1);
        assert_refused(&c, "rounding is biased by -0.");
        for (int i = 0; i < NORM_BLOCK; i++) /* what the sum itself may be off by is no bias of its rounding */
            m[i] = 0.2 * 2 * unit_roundoff(dtypes[d]) / (4 * u32);
        c = compare(y, r, m, NULL, NORM_BLOCK, dtypes[d], COT_F32, 1);
        assert_passes(&c);
        c = compare(y, r, m, NULL, NORM_MIN_ELEMENTS - 1, dtypes[d], COT_F32, 1); /* too few to average over */
        assert_true(c.bias_bound == 0);
    }
    round_some(COT_BF16, 100, true);
    assert_true(compare(y, r, m, NULL, NORM_BLOCK, COT_F32, COT_F32, 1).bias_bound == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(passes_what_is_exact),
        cmocka_unit_test(refuses_one_element_beyond_its_tolerance),
        cmocka_unit_test(allows_the_rounding_of_the_output_and_of_the_sum),
        cmocka_unit_test(counts_errors_in_units),
        cmocka_unit_test(refuses_a_nan),
        cmocka_unit_test(holds_infinities_to_their_sign),
        cmocka_unit_test(leaves_right_infinities_out_of_the_averages),
        cmocka_unit_test(refuses_a_block_by_its_norm),
        cmocka_unit_test(refuses_the_whole_by_its_norm),
        cmocka_unit_test(bounds_the_norm),
        cmocka_unit_test(knows_where_the_norm_says_nothing),
        cmocka_unit_test(refuses_biased_rounding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
