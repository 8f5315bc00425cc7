/* SPDX-License-Identifier: Apache-2.0
 * test_simd.c: tests the functions of src/simd against core/float16.h and libm. Compiled once per instruction set. */
#include "core/cpu_features.h"
#include "cases/draw.h"
#include "simd/gelu.h"
#include "simd/silu.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define CTEST_SKIPPED 77

static uint32_t random_bits(void)
{
    static uint64_t state = 12345;
    return (uint32_t)cot_draw(&state);
}

static void *on_64_bytes(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(p);
    return p;
}

/* ---- 2-byte floats ----------------------------------------------------------------------------------------------- */

/* Any NaN equals any NaN, because the processor quiets signalling NaNs. */
static void assert_same_float(float expected, float actual)
{
    if (isnan(expected))
        assert_true(isnan(actual));
    else
        assert_int_equal(cot_f32_bits(expected), cot_f32_bits(actual));
}

static void loads_every_half(void **state)
{
    (void)state;
    uint16_t half[VW];
    float bf16[VW], f16[VW];
    for (uint32_t base = 0; base < 65536; base += VW) {
        for (uint32_t i = 0; i < VW; i++)
            half[i] = (uint16_t)(base + i);
        v_store(bf16, v_load_bf16(half));
        v_store(f16, v_load_f16(half));
        for (int i = 0; i < VW; i++) {
            assert_same_float(cot_bf16_to_f32(half[i]), bf16[i]);
            assert_same_float(cot_f16_to_f32(half[i]), f16[i]);
        }
    }
}

static void check_rounding(const float *values)
{
    uint16_t *bf16 = on_64_bytes(64), *f16 = on_64_bytes(64);
    for (int streamed = 0; streamed < 2; streamed++) {
        if (streamed) {
            v_stream_bf16(bf16, v_load(values));
            v_stream_f16(f16, v_load(values));
            v_fence();
        } else {
            v_store_bf16(bf16, v_load(values));
            v_store_f16(f16, v_load(values));
        }
        for (int i = 0; i < VW; i++) {
            assert_int_equal(bf16[i], cot_f32_to_bf16(values[i]));
            assert_int_equal(f16[i], cot_f32_to_f16(values[i]));
        }
    }
    free(bf16);
    free(f16);
}

/* Stores two vectors at once: the values, and after them the negated values. */
static void check_rounding_of_two(const float *values)
{
    uint16_t *bf16 = on_64_bytes(64), *f16 = on_64_bytes(64);
    float *f32 = on_64_bytes(128);
    const vf a = v_load(values), b = v_sub(v_zero(), a);
    float negated[VW];
    v_store(negated, b);
    for (int streamed = 0; streamed < 2; streamed++) {
        if (streamed) {
            v_stream2_as(bf16, COT_BF16, a, b);
            v_stream2_as(f16, COT_F16, a, b);
            v_stream2_as(f32, COT_F32, a, b);
            v_fence();
        } else {
            v_store2_as(bf16, COT_BF16, a, b);
            v_store2_as(f16, COT_F16, a, b);
            v_store2_as(f32, COT_F32, a, b);
        }
        for (int i = 0; i < 2 * VW; i++) {
            const float value = i < VW ? values[i] : negated[i - VW];
            assert_int_equal(bf16[i], cot_f32_to_bf16(value));
            assert_int_equal(f16[i], cot_f32_to_f16(value));
            assert_same_float(value, f32[i]);
        }
    }
    free(bf16);
    free(f16);
    free(f32);
}

static void rounds_as_float16_h_does(void **state)
{
    (void)state;
    float values[VW];
    for (int round = 0; round < 200000; round++) {
        for (int i = 0; i < VW; i++)
            values[i] = cot_f32_from_bits(random_bits());
        check_rounding(values);
        check_rounding_of_two(values);
    }
    /* Every tie and its neighbours: all upper 16 bits with lower 16 bits at and around 0x8000. */
    static const uint32_t low[] = {0,      1,      0x7fff, 0x8000, 0x8001, 0xffff,
                                   0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001};
    for (uint32_t high = 0; high < 65536; high += VW)
        for (size_t k = 0; k < sizeof low / sizeof *low; k++) {
            for (uint32_t i = 0; i < VW; i++)
                values[i] = cot_f32_from_bits((high + i) << 16 | low[k]);
            check_rounding(values);
            check_rounding_of_two(values);
        }
}

/* ---- partial vectors --------------------------------------------------------------------------------------------- */

static void parts_touch_their_lanes_only(void **state)
{
    (void)state;
    for (int n = 0; n <= VW; n++) {
        /* The loads end at the end of the allocation, so that a sanitizer detects a lane too many. */
        float *f32 = malloc((size_t)n * 4 + 1);
        uint16_t *half = malloc((size_t)n * 2 + 1);
        float loaded[VW], from_bf16[VW], from_f16[VW];
        for (int i = 0; i < n; i++) {
            f32[i] = (float)(i + 1);
            half[i] = (uint16_t)(0x3c00 + i);
        }
        v_store(loaded, v_load_n(f32, n));
        v_store(from_bf16, v_load_n_bf16(half, n));
        v_store(from_f16, v_load_n_f16(half, n));
        for (int i = 0; i < VW; i++) {
            assert_same_float(i < n ? f32[i] : 0, loaded[i]);
            assert_same_float(i < n ? cot_bf16_to_f32(half[i]) : 0, from_bf16[i]);
            assert_same_float(i < n ? cot_f16_to_f32(half[i]) : 0, from_f16[i]);
        }
        float out[VW];
        uint16_t bf16[VW], f16[VW];
        memset(out, 0xff, sizeof out);
        memset(bf16, 0xff, sizeof bf16);
        memset(f16, 0xff, sizeof f16);
        v_store_n(out, v_set1(3), n);
        v_store_n_bf16(bf16, v_set1(3), n);
        v_store_n_f16(f16, v_set1(3), n);
        for (int i = 0; i < VW; i++) {
            assert_int_equal(cot_f32_bits(out[i]), i < n ? cot_f32_bits(3) : 0xffffffffu);
            assert_int_equal(bf16[i], i < n ? cot_f32_to_bf16(3) : 0xffff);
            assert_int_equal(f16[i], i < n ? cot_f32_to_f16(3) : 0xffff);
        }
        v_store(out, v_maskz(vm_first(n), v_set1(3)));
        for (int i = 0; i < VW; i++)
            assert_same_float(i < n ? 3 : 0, out[i]);
        free(f32);
        free(half);
    }
}

/* ---- arithmetic -------------------------------------------------------------------------------------------------- */

static void lanes_add_up(void **state)
{
    (void)state;
    float a[VW], b[VW], out[VW], *strided = malloc(3 * VW * sizeof *strided);
    assert_non_null(strided);
    float sum = 0;
    for (int i = 0; i < VW; i++) {
        a[i] = (float)(i * i + 1);
        b[i] = (float)(7 - i);
        sum += a[i];
        strided[3 * i] = a[i];
    }
    assert_same_float(sum, v_sum(v_load(a)));
    v_store(out, v_repeat4(a));
    for (int k = 0; k < VW; k++)
        assert_same_float(a[k % 4], out[k]);
    v_store(out, v_sums4(v_load(a), v_load(b), v_set1(3), v_add(v_load(a), v_load(a))));
    for (int i = 0; i < VW; i += 4) {
        assert_same_float(a[i] + a[i + 1] + a[i + 2] + a[i + 3], out[i]);
        assert_same_float(b[i] + b[i + 1] + b[i + 2] + b[i + 3], out[i + 1]);
        assert_same_float(12, out[i + 2]);
        assert_same_float(2 * out[i], out[i + 3]);
    }
    v_store(out, v_fma(v_load(a), v_load(b), v_set1(2)));
    for (int i = 0; i < VW; i++)
        assert_same_float(a[i] * b[i] + 2, out[i]);
    v_store(out, v_fms(v_load(a), v_load(b), v_set1(2)));
    for (int i = 0; i < VW; i++)
        assert_same_float(a[i] * b[i] - 2, out[i]);
    v_store(out, v_fnma(v_load(a), v_load(b), v_set1(2)));
    for (int i = 0; i < VW; i++)
        assert_same_float(2 - a[i] * b[i], out[i]);
    v_store(out, v_sub(v_mul(v_load(a), v_load(b)), v_add(v_load(a), v_zero())));
    for (int i = 0; i < VW; i++)
        assert_same_float(a[i] * b[i] - a[i], out[i]);
    v_store(out, v_gather(strided, 3, VW));
    for (int i = 0; i < VW; i++)
        assert_same_float(a[i], out[i]);
    v_store(out, v_max(v_set1(1), v_set1(NAN)));
    assert_true(isnan(out[0]));
    v_store(out, v_min(v_set1(1), v_set1(NAN)));
    assert_true(isnan(out[0]));
    free(strided);
}

static void vectors_align(void **state)
{
    (void)state;
    float both[2 * VW], out[4][VW];
    for (int i = 0; i < 2 * VW; i++)
        both[i] = (float)i;
    const vf a = v_load(both), b = v_load(both + VW);
    v_store(out[0], v_align(a, b, 0));
    v_store(out[1], v_align(a, b, 1));
    v_store(out[2], v_align(a, b, 2));
    v_store(out[3], v_align(a, b, 3));
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < VW; i++)
            assert_same_float(both[i + k], out[k][i]);
}

static void masks_compare_lanes(void **state)
{
    (void)state;
    int32_t a[VW], b[VW];
    float out[VW];
    for (int i = 0; i < VW; i++) {
        a[i] = i - 2;
        b[i] = i % 3 == 0 ? a[i] : 1000;
    }
    v_store(out, v_maskz(vm_and(vm_equal(vi_load(a), vi_load(b)), vm_not_negative(vi_load(a))), v_set1(NAN)));
    for (int i = 0; i < VW; i++)
        assert_true(i % 3 == 0 && i >= 2 ? isnan(out[i]) : cot_f32_bits(out[i]) == 0);
    v_store(out, v_maskz(vm_equal(vi_load(a), vi_set1(1)), v_set1(5)));
    for (int i = 0; i < VW; i++)
        assert_same_float(a[i] == 1 ? 5 : 0, out[i]);
}

/* ---- exp, sigmoid and SiLU --------------------------------------------------------------------------------------- */

typedef struct curve {
    const char *name;
    vf (*vector)(vf);
    double (*exact)(double);
    float low, high;
    double max_ulp;
} curve;

static vf vector_exp(vf z)
{
    return v_exp(z);
}

static vf vector_sigmoid(vf z)
{
    return v_sigmoid(z);
}

static vf vector_silu(vf z)
{
    return v_silu(z);
}

/* Tolerance: 128 ulp of f32, which is 2^-16 of the power of two below. The error rule allows that beyond a bf16 tie. */
static vf vector_silu_for_bf16(vf z)
{
    return v_silu_as(COT_BF16, z);
}

static vf vector_silu_slope(vf z)
{
    return v_silu_slope(z);
}

static double exact_sigmoid(double z)
{
    return 1 / (1 + exp(-z));
}

static double exact_silu(double z)
{
    return z / (1 + exp(-z));
}

static double exact_silu_slope(double z)
{
    const double s = exact_sigmoid(z);
    return s * (1 + z * (1 - s));
}

static double ulp_of(double value)
{
    int exponent;
    frexp(value, &exponent);
    return ldexp(1, (exponent < -125 ? -125 : exponent) - 24);
}

/* The two terms of the slope cancel near z = -1.28. Therefore its error is relative to s, the larger term. */
static double error_scale(const curve *c, double z)
{
    return c->exact == exact_silu_slope ? fmax(exact_sigmoid(z), fabs(c->exact(z))) : c->exact(z);
}

static void sweep(const curve *c)
{
    enum { STEPS = 4000000 };
    double worst = 0, squares = 0;
    float worst_z = 0;
    for (int step = 0; step < STEPS; step += VW) {
        float z[VW], out[VW];
        for (int i = 0; i < VW; i++)
            z[i] = c->low + (c->high - c->low) * (float)(step + i) / STEPS;
        v_store(out, c->vector(v_load(z)));
        for (int i = 0; i < VW; i++) {
            const double error = fabs((double)out[i] - c->exact((double)z[i])) / ulp_of(error_scale(c, (double)z[i]));
            squares += error * error;
            if (!(error <= worst)) {
                worst = error;
                worst_z = z[i];
            }
        }
    }
    printf("%-12s on [%g, %g]: at most %.2f ulp (at %g), rms %.3f\n", c->name, (double)c->low, (double)c->high, worst,
           (double)worst_z, sqrt(squares / STEPS));
    assert_true(worst <= c->max_ulp);
}

static void curves_are_accurate(void **state)
{
    (void)state;
    const curve curves[] = {
        {"exp", vector_exp, exp, -87, 88, 1.5},
        {"exp", vector_exp, exp, -1, 1, 1.5},
        {"exp", vector_exp, exp, -104, -87, 1.5},
        {"sigmoid", vector_sigmoid, exact_sigmoid, -16, 20, 4},
        {"sigmoid", vector_sigmoid, exact_sigmoid, -87, -16, 8},
        {"silu", vector_silu, exact_silu, -16, 20, 4},
        {"silu", vector_silu, exact_silu, -87, -16, 8},
        {"silu, bf16", vector_silu_for_bf16, exact_silu, -87, 20, 128},
        {"silu_slope", vector_silu_slope, exact_silu_slope, -60, 20, 8},
        {"silu_slope", vector_silu_slope, exact_silu_slope, -4, 4, 8},
    };
    for (size_t i = 0; i < sizeof curves / sizeof *curves; i++)
        sweep(&curves[i]);
}

#if defined(COT_SIMD_AVX512)
static void powers_of_2_are_accurate(void **state)
{
    (void)state;
    double max_power = 0;
    for (float x = -126; x < 13; x += 1.0f / 512 + 1.0f / 8192) {
        float y[VW];
        v_store(y, v_exp2_flush(v_set1(x)));
        max_power = fmax(max_power, fabs(y[0] / exp2(x) - 1));
    }
    if (max_power > 6.2e-7)
        fail_msg("off by %g", max_power);
    const float exact[][2] = {{0, 1}, {-1, 0.5f}, {3, 8}, {-126.5f, 0}, {-1e30f, 0}, {-INFINITY, 0}};
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
        float y[VW];
        v_store(y, v_exp2_flush(v_set1(exact[i][0])));
        assert_same_float(exact[i][1], y[VW - 1]);
    }
}
#endif

/* The functions of several vectors return the same bits as the functions of one vector. */
static void several_vectors_equal_one(void **state)
{
    (void)state;
    enum { MAX_VECTORS = 4 };
    for (int step = 0; step < 20000; step++) {
        vf slopes[MAX_VECTORS], silus[MAX_VECTORS];
        float z[MAX_VECTORS][VW], out[VW], one[VW];
        for (int v = 0; v < MAX_VECTORS; v++) {
            for (int i = 0; i < VW; i++)
                z[v][i] = -100 + 0.0025f * (float)(step + 20000 * v + i);
            slopes[v] = silus[v] = v_load(z[v]);
        }
        v_silu_slopes(slopes, MAX_VECTORS);
        v_silus_as(COT_F32, silus, MAX_VECTORS);
        for (int v = 0; v < MAX_VECTORS; v++) {
            v_store(out, slopes[v]);
            v_store(one, v_silu_slope(v_load(z[v])));
            assert_memory_equal(out, one, sizeof out);
            v_store(out, silus[v]);
            v_store(one, v_silu(v_load(z[v])));
            assert_memory_equal(out, one, sizeof out);
        }
    }
}

static void curves_have_their_limits(void **state)
{
    (void)state;
    const float huge[] = {90, 105, 1000, 1e10f, 3e38f, INFINITY};
    float out[VW];
    for (size_t i = 0; i < sizeof huge / sizeof *huge; i++) {
        const vf up = v_set1(huge[i]), down = v_set1(-huge[i]);
        v_store(out, v_exp(up));
        assert_true(isinf(out[0]));
        v_store(out, v_exp(down));
        assert_true(out[0] >= 0 && out[0] <= 1e-38f);
        v_store(out, v_sigmoid(up));
        assert_true(out[0] == 1);
        v_store(out, v_sigmoid(down));
        assert_true(out[0] >= 0 && out[0] <= 0x1p-125f);
        v_store(out, v_silu(up));
        assert_true(out[0] == huge[i]);
        v_store(out, v_silu(down));
        assert_true(out[0] <= 0 && out[0] >= -1e-35f);
        v_store(out, v_silu_as(COT_BF16, up));
        assert_true(out[0] == huge[i]);
        v_store(out, v_silu_as(COT_BF16, down));
        assert_true(out[0] <= 0 && out[0] >= -1e-35f);
        v_store(out, v_silu_slope(up));
        assert_true(out[0] == 1);
        v_store(out, v_silu_slope(down));
        assert_true(out[0] <= 0 && out[0] >= -1e-35f);
    }
    v_store(out, v_exp(v_set1(-INFINITY)));
    assert_true(out[0] == 0);
    v_store(out, v_exp(v_zero()));
    assert_true(out[0] == 1);
    v_store(out, v_sigmoid(v_zero()));
    assert_true(out[0] == 0.5f);
    vf (*const all[])(vf) = {vector_exp, vector_sigmoid, vector_silu, vector_silu_for_bf16, vector_silu_slope};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        v_store(out, all[i](v_set1(NAN)));
        assert_true(isnan(out[0]) && isnan(out[VW - 1]));
    }
}

/* ---- signs, bits, Philox ----------------------------------------------------------------------------------------- */

static void signs_and_bits_choose_lanes(void **state)
{
    (void)state;
    const float special[] = {0, -0.0f, 1, -1, INFINITY, -INFINITY, NAN, 0x1p-149f, -0x1p-149f, 3};
    for (size_t k = 0; k < sizeof special / sizeof *special; k++) {
        const float a = special[k];
        float out[VW];
        v_store(out, v_abs(v_set1(a)));
        assert_same_float(fabsf(a), out[VW - 1]);
        v_store(out, v_select(vm_negative(v_set1(a)), v_set1(1), v_set1(2)));
        if (!isnan(a))
            assert_same_float(signbit(a) ? 1 : 2, out[VW - 1]);
        for (size_t j = 0; j < sizeof special / sizeof *special; j++) {
            v_store(out, v_maskz(vm_above(v_set1(a), v_set1(special[j])), v_set1(1)));
            assert_same_float(!(a <= special[j]) ? 1 : 0, out[0]);
        }
    }
    uint8_t bits[64];
    for (size_t i = 0; i < sizeof bits; i++)
        bits[i] = (uint8_t)random_bits();
    for (int first = 0; first + VW <= 8 * 62; first += VW) {
        float out[VW];
        v_store(out, v_maskz(vm_bits(bits, first), v_set1(1)));
        for (int i = 0; i < VW; i++)
            assert_same_float(bits[(first + i) / 8] >> ((first + i) % 8) & 1 ? 1 : 0, out[i]);
    }
}

static void philox_draws_as_philox_h_does(void **state)
{
    (void)state;
    for (int round = 0; round < 20000; round++) {
        const uint64_t seed = (uint64_t)random_bits() << 32 | random_bits();
        const uint64_t offset = (uint64_t)random_bits() << 32 | random_bits();
        uint64_t i = (uint64_t)random_bits() << 32 | random_bits();
        if (round % 4 == 0) /* the low or the high word of the counter overflows inside the vector */
            i = (round % 8 == 0 ? UINT64_C(0x1ffffffff) : UINT64_MAX) - (uint64_t)(round % V_PHILOX_GROUPS);
        const uint32_t threshold = round % 3 == 0 ? 1 : round % 3 == 1 ? 65535 : 1 + random_bits() % 65535;
        const v_philox p = v_philox_make(seed, offset, threshold);
        uint8_t bits[V_PHILOX_GROUPS + 1] = {0};
        v_philox_keep(bits, &p, i);
        for (uint64_t g = 0; g < V_PHILOX_GROUPS; g++)
            assert_int_equal(bits[g], cot_dropout_keep(seed, offset, i + g, threshold));
        assert_int_equal(bits[V_PHILOX_GROUPS], 0);
    }
}

/* ---- GELU -------------------------------------------------------------------------------------------------------- */

/* A value and the sum of the absolute terms of its derivative, which bounds the effect of an error of z. */
typedef struct conditioned {
    double value, terms;
} conditioned;

static conditioned exact_gelu_erf(double z, bool slope)
{
    const double below = erfc(-z / sqrt(2)) / 2, density = exp(-z * z / 2) / sqrt(2 * acos(-1));
    if (slope)
        return (conditioned){below + z * density, below + fabs(z) * density + fabs(z) * (2 + z * z) * density};
    return (conditioned){z * below, fabs(z) * (below + fabs(z) * density)};
}

static conditioned exact_gelu_tanh(double z, bool slope)
{
    const double k = 2 * sqrt(2 / acos(-1)), cubic = 0.044715, w = k * (z + cubic * z * z * z);
    const double dw = k * (1 + 3 * cubic * z * z), ddw = 6 * k * cubic * fabs(z);
    const double s = 1 / (1 + exp(-w)), t = 1 / (1 + exp(w));
    const double terms = s + fabs(z) * s * t * dw;
    if (slope)
        return (conditioned){s + z * s * t * dw, terms + fabs(z) * s * t * (2 * dw + fabs(z) * (ddw + dw * dw))};
    return (conditioned){z * s, fabs(z) * terms};
}

/* The elementwise error rule of `cotangent check` for these functions, with a margin of 25 %. */
static void sweep_gelu(const char *name, vf (*vector)(vf), conditioned (*exact)(double, bool), bool slope, float limit)
{
    enum { STEPS = 1000000 };
    double worst = 0;
    for (int step = 0; step < STEPS; step += VW) {
        float z[VW], out[VW];
        for (int i = 0; i < VW; i++)
            z[i] = limit * (2 * (float)(step + i) / STEPS - 1);
        v_store(out, vector(v_load(z)));
        for (int i = 0; i < VW; i++) {
            const conditioned c = exact((double)z[i], slope);
            const double tolerance = 0x1p-24 * fabs(c.value) + 4 * 0x1p-24 * c.terms + 0x1p-126;
            worst = fmax(worst, fabs((double)out[i] - c.value) / tolerance);
        }
    }
    printf("%-16s on [%g, %g]: at most %.2f of the tolerance\n", name, -(double)limit, (double)limit, worst);
    assert_true(worst <= 0.75);
}

static vf vector_gelu_erf(vf z)
{
    return v_gelu_erf(z);
}

static vf vector_gelu_erf_slope(vf z)
{
    return v_gelu_erf_slope(z);
}

static vf vector_gelu_tanh(vf z)
{
    return v_gelu_tanh(z);
}

static vf vector_gelu_tanh_slope(vf z)
{
    return v_gelu_tanh_slope(z);
}

static void gelu_is_accurate(void **state)
{
    (void)state;
    sweep_gelu("gelu_erf", vector_gelu_erf, exact_gelu_erf, false, 12);
    sweep_gelu("gelu_erf_slope", vector_gelu_erf_slope, exact_gelu_erf, true, 12);
    sweep_gelu("gelu_tanh", vector_gelu_tanh, exact_gelu_tanh, false, 9.9f);
    sweep_gelu("gelu_tanh_slope", vector_gelu_tanh_slope, exact_gelu_tanh, true, 9.9f);
    sweep_gelu("gelu_erf", vector_gelu_erf, exact_gelu_erf, false, 0.1f);
    sweep_gelu("gelu_erf_slope", vector_gelu_erf_slope, exact_gelu_erf, true, 0.1f);
}

static void gelu_has_its_limits(void **state)
{
    (void)state;
    vf (*const values[])(vf) = {vector_gelu_erf, vector_gelu_tanh};
    vf (*const slopes[])(vf) = {vector_gelu_erf_slope, vector_gelu_tanh_slope};
    const float huge[] = {11, 40, 1e10f, 3e38f, INFINITY};
    float out[VW];
    for (int form = 0; form < 2; form++) {
        for (size_t i = 0; i < sizeof huge / sizeof *huge; i++) {
            v_store(out, values[form](v_set1(huge[i])));
            assert_true(out[0] == huge[i]);
            v_store(out, values[form](v_set1(-huge[i])));
            assert_true(out[0] <= 0 && out[0] >= -1e-26f);
            v_store(out, slopes[form](v_set1(huge[i])));
            assert_true(out[0] == 1);
            v_store(out, slopes[form](v_set1(-huge[i])));
            assert_true(fabsf(out[0]) <= 1e-25f);
        }
        v_store(out, values[form](v_set1(NAN)));
        assert_true(isnan(out[0]));
        v_store(out, slopes[form](v_set1(NAN)));
        assert_true(isnan(out[0]));
        v_store(out, values[form](v_zero()));
        assert_true(out[0] == 0);
        v_store(out, slopes[form](v_zero()));
        assert_true(out[0] == 0.5f);
        v_store(out, slopes[form](v_set1(-0.0f)));
        assert_true(out[0] == 0.5f);
    }
}

int main(void)
{
#if defined(__AVX512BF16__)
    const uint32_t needed = COT_ISA_AVX512BF16;
#elif defined(COT_SIMD_AVX512)
    const uint32_t needed = COT_ISA_AVX512;
#elif defined(COT_SIMD_AVX2)
    const uint32_t needed = COT_ISA_AVX2;
#else
    const uint32_t needed = COT_ISA_PORTABLE;
#endif
    if ((cot_cpu_features() & needed) != needed)
        return CTEST_SKIPPED;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loads_every_half),
        cmocka_unit_test(rounds_as_float16_h_does),
        cmocka_unit_test(parts_touch_their_lanes_only),
        cmocka_unit_test(lanes_add_up),
        cmocka_unit_test(vectors_align),
        cmocka_unit_test(masks_compare_lanes),
        cmocka_unit_test(curves_are_accurate),
#if defined(COT_SIMD_AVX512)
        cmocka_unit_test(powers_of_2_are_accurate),
#endif
        cmocka_unit_test(several_vectors_equal_one),
        cmocka_unit_test(curves_have_their_limits),
        cmocka_unit_test(signs_and_bits_choose_lanes),
        cmocka_unit_test(philox_draws_as_philox_h_does),
        cmocka_unit_test(gelu_is_accurate),
        cmocka_unit_test(gelu_has_its_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
