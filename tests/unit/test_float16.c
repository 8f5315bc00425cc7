/* SPDX-License-Identifier: Apache-2.0
 * test_float16.c: compares the conversions of single elements with arithmetic in double that rounds by nearbyint. */
#include "support.h"

#include "core/float16.h"

#include <math.h>

typedef struct format {
    int mantissa_bits, min_exponent, max_exponent; /* normal numbers: 2^min .. 2^max */
    uint16_t (*round)(float);
    float (*widen)(uint16_t);
    cot_dtype dtype;
} format;

static const format f16 = {10, -14, 15, cot_f32_to_f16, cot_f16_to_f32, COT_F16};
static const format bf16 = {7, -126, 127, cot_f32_to_bf16, cot_bf16_to_f32, COT_BF16};

/* The value of a bit pattern, from its sign, exponent and mantissa as the format defines them. */
static double value_of(const format *f, uint16_t pattern)
{
    const int mantissa = pattern & ((1 << f->mantissa_bits) - 1);
    const int exponent = (pattern & 0x7fff) >> f->mantissa_bits, bias = f->max_exponent;
    double magnitude = ldexp(mantissa, f->min_exponent - f->mantissa_bits);
    if (exponent == 2 * bias + 1)
        magnitude = mantissa == 0 ? (double)INFINITY : (double)NAN;
    else if (exponent > 0)
        magnitude = ldexp((1 << f->mantissa_bits) + mantissa, exponent - bias - f->mantissa_bits);
    return pattern & 0x8000 ? -magnitude : magnitude;
}

/* Rounds to nearest, ties to even. Scales the value so that one unit of the format is 1, rounds and scales back. */
static double nearest(const format *f, double value)
{
    if (value == 0 || !isfinite(value))
        return value;
    int exponent = ilogb(value);
    exponent = exponent > f->min_exponent ? exponent : f->min_exponent;
    const double rounded = ldexp(nearbyint(ldexp(value, f->mantissa_bits - exponent)), exponent - f->mantissa_bits);
    return fabs(rounded) >= ldexp(1, f->max_exponent + 1) ? copysign(INFINITY, value) : rounded;
}

static bool same(double a, double b)
{
    return isnan(a) || isnan(b) ? isnan(a) && isnan(b) : a == b && signbit(a) == signbit(b);
}

static void check_patterns(const format *f)
{
    for (uint32_t pattern = 0; pattern <= 0xffff; pattern++) {
        const float wide = f->widen((uint16_t)pattern);
        assert_true(same(wide, value_of(f, (uint16_t)pattern)));
        const uint16_t back = f->round(wide);
        if (isnan(wide)) { /* stays a NaN with the same sign */
            assert_true(isnan(f->widen(back)));
            assert_int_equal(back & 0x8000, pattern & 0x8000);
        } else {
            assert_int_equal(back, pattern);
        }
    }
}

static void every_pattern_survives(void **state)
{
    (void)state;
    check_patterns(&f16);
    check_patterns(&bf16);
}

static void check_rounding(const format *f, uint32_t bits)
{
    const float value = cot_f32_from_bits(bits);
    const float rounded = f->widen(f->round(value));
    if (!same(rounded, nearest(f, value))) {
        print_error("%s of %a (0x%08x) is %a, expected %a\n", cot_dtype_name(f->dtype), value, bits, rounded,
                    nearest(f, value));
        fail();
    }
}

/* All upper 16 bits of an f32, with lower bits around the ties of each format. */
static void rounds_to_nearest_even(void **state)
{
    (void)state;
    static const uint32_t lower[] = {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x2fff, 0x3000,
                                     0x3001, 0x7fff, 0x8000, 0x8001, 0x9000, 0xb000, 0xefff, 0xf000, 0xffff};
    for (uint32_t upper = 0; upper <= 0xffff; upper++) {
        for (size_t i = 0; i < COUNT(lower); i++) {
            check_rounding(&f16, upper << 16 | lower[i]);
            check_rounding(&bf16, upper << 16 | lower[i]);
        }
    }
    uint64_t seed = 1;
    for (int i = 0; i < 1000000; i++) {
        const uint32_t bits = (uint32_t)cot_draw(&seed);
        check_rounding(&f16, bits);
        check_rounding(&bf16, bits);
    }
}

static void nan_with_a_low_payload_stays_nan(void **state)
{
    (void)state;
    for (uint32_t sign = 0; sign <= 1; sign++) {
        const float value = cot_f32_from_bits(sign << 31 | 0x7f800001u);
        assert_true(isnan(cot_bf16_to_f32(cot_f32_to_bf16(value))));
        assert_true(isnan(cot_f16_to_f32(cot_f32_to_f16(value))));
    }
}

static void elements_of_every_dtype(void **state)
{
    (void)state;
    const double value = 1.0 + 0x1p-30; /* representable only in f64 */
    const struct {
        cot_dtype dtype;
        double expected;
    } cases[] = {{COT_F32, 1}, {COT_F16, 1}, {COT_BF16, 1}, {COT_F64, value}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        double data[4] = {0};
        cot_store_f64(data, cases[i].dtype, 2, value);
        assert_true(cot_load_f64(data, cases[i].dtype, 2) == cases[i].expected);
        assert_true(cot_load_f64(data, cases[i].dtype, 1) == 0);
        assert_true(cot_load_f64(data, cases[i].dtype, 3) == 0);
    }
    int32_t integers[1] = {5};
    cot_store_f64(integers, COT_I32, 0, 7.0);
    assert_int_equal(integers[0], 5);
    assert_true(isnan(cot_load_f64(integers, COT_I32, 0)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pattern_survives),
        cmocka_unit_test(rounds_to_nearest_even),
        cmocka_unit_test(nan_with_a_low_payload_stays_nan),
        cmocka_unit_test(elements_of_every_dtype),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
