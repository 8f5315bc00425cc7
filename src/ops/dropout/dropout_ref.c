/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_ref.c: the oracle: the formulas of cotangent/dropout.h in double, element by element, with a Philox of its
 * own. All float tensors and u8 outputs come as f64, integer inputs as i32, all row-major.
 * Sums are long double where the compiler has one, so that f64 kernels can be judged by their own roundoff.
 *
 * Magnitudes: M(z) = |x| + |bias|. What a unit of error in z does to act(z) and to its derivative is bounded by the
 * absolute values of the terms of their derivatives:
 *     M(y)  = c * m * M(z) * |act'|(z) + |residual|
 *     M(dx) = c * m * |dy| * (|act'|(z) + M(z) * |act''|(z))
 * where |f| means: with every term of f replaced by its absolute value.
 *
 * NaN and infinities follow the formulas, with an activation's limits at infinity. A factor c of 0 gives 0. ReLU
 * selects: its dx is 0 where z <= 0, whatever dy holds, and dy where z is NaN. SiLU at infinity may be NaN, as z *
 * sigma(z) is: its magnitudes say so by their sign bit. */
#include "dropout_ref.h"

#include "dropout_problem.h"

#include <math.h>

typedef long double wide;

static double *values(const cot_tensor *tensor)
{
    return tensor->data;
}

/* ---- activations -------------------------------------------------------------------------------------- */

/* The value of an activation and of its derivative, and the absolute terms of the first two derivatives. */
typedef struct curve {
    wide value, slope, slope_terms, bend_terms;
} curve;

/* Kernels limit z, to -87 for SiLU and to -10 and -15 for GELU's two forms, where an activation and its derivative, at
 * most 230 * 2^-126, are this close to their limits. */
static const wide least_value = 0x1p-94L;

/* The error of z, in roundoffs, times what a unit of it does; 0 at a limit, whatever z. */
static wide passed_on(wide size, wide terms)
{
    return terms == 0 ? least_value : size * terms;
}

/* z * s(w(z)) with s the logistic function; dw, ddw the absolute derivatives of w. */
static curve logistic_product(wide z, wide w, wide dw, wide ddw)
{
    const wide s = 1 / (1 + expl(-w)), t = 1 / (1 + expl(w)); /* t = 1 - s, which would cancel */
    return (curve){
        .value = z * s,
        .slope = s + z * s * t * dw,
        .slope_terms = s + fabsl(z) * s * t * dw,
        .bend_terms = s * t * (2 * dw + fabsl(z) * (ddw + dw * dw)),
    };
}

static curve curve_at(cot_activation activation, wide z)
{
    const wide pi = 3.14159265358979323846264338327950288L, k = 2 * sqrtl(2 / pi), cubic = 0.044715L;
    if (isnan(z))
        return activation == COT_ACTIVATION_RELU ? (curve){z, 1, 1, 0} : (curve){z, z, z, z};
    if (isinf(z) && activation != COT_ACTIVATION_NONE)
        return z > 0 ? (curve){z, 1, 1, 0} : (curve){0, 0, 0, 0};
    switch (activation) {
    case COT_ACTIVATION_RELU: return (curve){z > 0 ? z : 0, z > 0, z > 0, 0};
    case COT_ACTIVATION_SILU: return logistic_product(z, z, 1, 0);
    case COT_ACTIVATION_GELU_TANH:
        return logistic_product(z, k * (z + cubic * z * z * z), k * (1 + 3 * cubic * z * z), 6 * k * cubic * fabsl(z));
    case COT_ACTIVATION_GELU_ERF: {
        const wide below = erfcl(-z / sqrtl(2)) / 2, density = expl(-z * z / 2) / sqrtl(2 * pi);
        return (curve){
            .value = z * below,
            .slope = below + z * density,
            .slope_terms = below + fabsl(z) * density,
            .bend_terms = (2 + z * z) * density,
        };
    }
    default: return (curve){z, 1, 1, 0};
    }
}

/* ---- the mask ----------------------------------------------------------------------------------------- */

/* One of the 16-bit draws of the header: Philox4x32-10 in 64-bit arithmetic. */
static uint64_t draw(uint64_t seed, uint64_t offset, int64_t r, int64_t d, int64_t D)
{
    const uint64_t low = 0xffffffff, i = (uint64_t)(r * ((D + 7) / 8) + d / 8);
    uint64_t w[4] = {offset & low, offset >> 32, i & low, i >> 32}, key[2] = {seed & low, seed >> 32};
    for (int round = 0; round < 10; round++) {
        const uint64_t first = w[0] * 0xD2511F53, second = w[2] * 0xCD9E8D57;
        const uint64_t next[4] = {second >> 32 ^ w[1] ^ key[0], second & low, first >> 32 ^ w[3] ^ key[1], first & low};
        memcpy(w, next, sizeof w);
        key[0] = (key[0] + 0x9E3779B9) & low;
        key[1] = (key[1] + 0xBB67AE85) & low;
    }
    return w[d % 8 / 2] >> (16 * (d % 2)) & 0xffff;
}

static uint64_t word64(const cot_tensor *words)
{
    const int32_t *word = words->data;
    return cot_is_present(words) ? (uint32_t)word[0] | (uint64_t)(uint32_t)word[1] << 32 : 0;
}

/* The arguments that say what m and c are, of either direction. */
typedef struct source {
    int64_t D;
    double p;
    wide scale;
    uint64_t seed, offset;
    const cot_tensor *mask, *mask_bits;
} source;

static source find_source(int64_t D, double p, double scale, const cot_tensor *mask, const cot_tensor *mask_bits)
{
    source s = {.D = D, .p = p, .scale = scale, .mask = mask, .mask_bits = mask_bits};
    const bool given = cot_is_present(mask) || cot_is_present(mask_bits);
    const wide dropped = given ? (wide)p : roundl(65536 * (wide)p) / 65536;
    if (scale == 0)
        s.scale = dropped < 1 ? 1 / (1 - dropped) : 0;
    return s;
}

static bool kept(const source *s, int64_t r, int64_t d)
{
    if (cot_is_present(s->mask))
        return ((int32_t *)s->mask->data)[r * s->D + d] & 1;
    if (cot_is_present(s->mask_bits))
        return ((int32_t *)s->mask_bits->data)[r * ((s->D + 7) / 8) + d / 8] >> d % 8 & 1;
    return (double)draw(s->seed, s->offset, r, d, s->D) >= round(65536 * s->p);
}

/* ---- directions --------------------------------------------------------------------------------------- */

static wide bias_at(const cot_tensor *bias, int64_t d)
{
    return cot_is_present(bias) ? values(bias)[d] : 0;
}

static void forward(const void *args, void *magnitudes)
{
    const cot_dropout_forward_args *a = args;
    const cot_dropout_forward_args *m = magnitudes;
    const int64_t D = a->x.shape[a->x.rank - 1], elements = cot_elements(&a->x), G = (D + 7) / 8;
    source s = find_source(D, a->p, a->scale, &a->mask, &a->mask_bits);
    s.seed = a->seed + word64(&a->seed_memory);
    s.offset = a->offset + word64(&a->offset_memory);
    for (int64_t i = 0; cot_is_present(&a->mask_bits_out) && i < cot_elements(&a->mask_bits_out); i++)
        values(&a->mask_bits_out)[i] = values(&m->mask_bits_out)[i] = 0;
    for (int64_t i = 0; i < elements; i++) {
        const int64_t r = i / D, d = i % D;
        const bool keep = kept(&s, r, d), counts = keep && s.scale != 0;
        const wide x = values(&a->x)[i], b = bias_at(&a->bias, d);
        const wide residual = cot_is_present(&a->residual) ? values(&a->residual)[i] : 0;
        const curve c = curve_at(a->activation, x + b);
        if (cot_is_present(&a->y)) {
            values(&a->y)[i] = (double)((counts ? s.scale * c.value : 0) + residual);
            values(&m->y)[i] =
                (double)((counts ? s.scale * passed_on(fabsl(x) + fabsl(b), c.slope_terms) : 0) + fabsl(residual));
            if (isinf(x + b) && a->activation == COT_ACTIVATION_SILU)
                values(&m->y)[i] = copysign(values(&m->y)[i], -1);
        }
        if (cot_is_present(&a->mask_out)) {
            values(&a->mask_out)[i] = keep;
            values(&m->mask_out)[i] = 0;
        }
        if (cot_is_present(&a->mask_bits_out))
            values(&a->mask_bits_out)[r * G + d / 8] += keep << d % 8;
    }
}

static void backward(const void *args, void *magnitudes)
{
    const cot_dropout_backward_args *a = args;
    const cot_dropout_backward_args *m = magnitudes;
    const int64_t D = a->dy.shape[a->dy.rank - 1], R = D > 0 ? cot_elements(&a->dy) / D : 0;
    source s = find_source(D, a->p, a->scale, &a->mask, &a->mask_bits);
    s.seed = a->seed + word64(&a->seed_memory);
    s.offset = a->offset + word64(&a->offset_memory);
    for (int64_t d = 0; d < D; d++) {
        wide sum = 0, sum_magnitude = 0;
        bool may_be_nan = false;
        for (int64_t r = 0; r < R; r++) {
            const int64_t i = r * D + d;
            bool counts = kept(&s, r, d) && s.scale != 0, infinite = false;
            wide factor = s.scale, terms = s.scale;
            if (a->activation != COT_ACTIVATION_NONE) {
                const wide x = values(&a->x)[i], b = bias_at(&a->bias, d);
                const curve c = curve_at(a->activation, x + b);
                terms *= c.slope_terms + passed_on(fabsl(x) + fabsl(b), c.bend_terms);
                factor *= c.slope;
                counts = counts && (a->activation != COT_ACTIVATION_RELU || c.slope != 0);
                infinite = isinf(x + b) && a->activation == COT_ACTIVATION_SILU;
            }
            const wide dx = counts ? factor * values(&a->dy)[i] : 0;
            const wide magnitude = counts ? terms * fabsl(values(&a->dy)[i]) : 0;
            if (cot_is_present(&a->dx)) {
                values(&a->dx)[i] = (double)dx;
                values(&m->dx)[i] = infinite ? copysign((double)magnitude, -1) : (double)magnitude;
            }
            may_be_nan = may_be_nan || infinite;
            sum += dx;
            sum_magnitude += magnitude;
        }
        if (!cot_is_present(&a->dbias))
            continue;
        const double before = a->accumulate ? values(&a->dbias)[d] : 0;
        values(&a->dbias)[d] = (double)(sum + before);
        values(&m->dbias)[d] = (double)(sum_magnitude + fabs(before));
        if (may_be_nan)
            values(&m->dbias)[d] = copysign(values(&m->dbias)[d], -1);
    }
}

void (*const cot_dropout_oracles[])(const void *, void *) = {forward, backward};
