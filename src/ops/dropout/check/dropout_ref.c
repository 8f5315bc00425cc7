/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_ref.c: the oracle: the formulas of cotangent/dropout.h, element by element, with its own implementation of
 * Philox. Float tensors and u8 outputs are f64, integer inputs are i32, all are row-major. The arithmetic is long
 * double, so that the error of f64 kernels can be compared with their own roundoff.
 *
 * Magnitudes: M(z) = |x| + |bias|. The absolute values of the terms of the derivatives of act(z) and act'(z) bound the
 * change per unit of error in z:
 *     M(y)  = c * m * M(z) * |act'|(z) + |residual|
 *     M(dx) = c * m * |dy| * (|act'|(z) + M(z) * |act''|(z))
 * where |f| is f with every term replaced by its absolute value.
 *
 * NaN and infinities follow the formulas, with the limits of an activation at infinity. A factor c of 0 gives 0. For
 * ReLU, dx is 0 where z <= 0, for any dy, and c * m * dy where z is NaN. SiLU at infinity may be NaN, as z * sigma(z)
 * is: the sign bit of its magnitude allows it. */
#include "dropout_ref.h"

#include "../dropout_problem.h"

#include <math.h>

typedef long double wide;

static double *f64_data(const cot_tensor *tensor)
{
    return tensor->data;
}

/* ---- activations -------------------------------------------------------------------------------------- */

/* An activation's value and slope (first derivative), and the sums of absolute terms of its first two derivatives. */
typedef struct derivatives {
    wide value, slope, slope_terms, second_terms;
} derivatives;

/* Kernels clamp z to -87 for SiLU, and to -10 and -15 for GELU's two forms. There an activation and its derivative, at
 * most 230 * 2^-126, are this close to their limits. */
static const wide limit_error = 0x1p-94L;

/* The error of z, in roundoffs, times the change per unit of it. At a limit (terms is 0) it does not depend on z. */
static wide propagated_error(wide size, wide terms)
{
    return terms == 0 ? limit_error : size * terms;
}

/* z * s(w(z)), where s is the logistic function, and dw and ddw are the absolute derivatives of w. */
static derivatives logistic_product(wide z, wide w, wide dw, wide ddw)
{
    const wide s = 1 / (1 + expl(-w)), t = 1 / (1 + expl(w)); /* t = 1 - s without cancellation */
    return (derivatives){
        .value = z * s,
        .slope = s + z * s * t * dw,
        .slope_terms = s + fabsl(z) * s * t * dw,
        .second_terms = s * t * (2 * dw + fabsl(z) * (ddw + dw * dw)),
    };
}

static derivatives evaluate_activation(cot_activation activation, wide z)
{
    const wide pi = 3.14159265358979323846264338327950288L, k = 2 * sqrtl(2 / pi), cubic = 0.044715L;
    if (isnan(z))
        return activation == COT_ACTIVATION_RELU ? (derivatives){z, 1, 1, 0} : (derivatives){z, z, z, z};
    if (isinf(z) && activation != COT_ACTIVATION_NONE)
        return z > 0 ? (derivatives){z, 1, 1, 0} : (derivatives){0, 0, 0, 0};
    switch (activation) {
    case COT_ACTIVATION_RELU: return (derivatives){z > 0 ? z : 0, z > 0, z > 0, 0};
    case COT_ACTIVATION_SILU: return logistic_product(z, z, 1, 0);
    case COT_ACTIVATION_GELU_TANH:
        return logistic_product(z, k * (z + cubic * z * z * z), k * (1 + 3 * cubic * z * z), 6 * k * cubic * fabsl(z));
    case COT_ACTIVATION_GELU_ERF: {
        const wide cdf = erfcl(-z / sqrtl(2)) / 2, density = expl(-z * z / 2) / sqrtl(2 * pi);
        return (derivatives){
            .value = z * cdf,
            .slope = cdf + z * density,
            .slope_terms = cdf + fabsl(z) * density,
            .second_terms = (2 + z * z) * density,
        };
    }
    default: return (derivatives){z, 1, 1, 0};
    }
}

/* ---- the mask ----------------------------------------------------------------------------------------- */

/* The 16 random bits of an element as the header defines them: Philox4x32-10 in 64-bit arithmetic. */
static uint64_t random_bits(uint64_t seed, uint64_t offset, int64_t r, int64_t d, int64_t D)
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

/* The arguments of either direction that define m and c. */
typedef struct mask_args {
    int64_t D;
    double p;
    wide scale;
    uint64_t seed, offset;
    const cot_tensor *mask, *mask_bits;
} mask_args;

static mask_args make_mask_args(int64_t D, double p, double scale, const cot_tensor *mask, const cot_tensor *mask_bits)
{
    mask_args s = {.D = D, .p = p, .scale = scale, .mask = mask, .mask_bits = mask_bits};
    const bool given = cot_is_present(mask) || cot_is_present(mask_bits);
    const wide dropped = given ? (wide)p : roundl(65536 * (wide)p) / 65536;
    if (scale == 0)
        s.scale = dropped < 1 ? 1 / (1 - dropped) : 0;
    return s;
}

static bool is_kept(const mask_args *s, int64_t r, int64_t d)
{
    if (cot_is_present(s->mask))
        return ((int32_t *)s->mask->data)[r * s->D + d] & 1;
    if (cot_is_present(s->mask_bits))
        return ((int32_t *)s->mask_bits->data)[r * ((s->D + 7) / 8) + d / 8] >> d % 8 & 1;
    return (double)random_bits(s->seed, s->offset, r, d, s->D) >= round(65536 * s->p);
}

/* ---- directions --------------------------------------------------------------------------------------- */

static wide bias_at(const cot_tensor *bias, int64_t d)
{
    return cot_is_present(bias) ? f64_data(bias)[d] : 0;
}

static void forward(const void *args, void *magnitudes)
{
    const cot_dropout_forward_args *a = args;
    const cot_dropout_forward_args *m = magnitudes;
    const int64_t D = a->x.shape[a->x.rank - 1], elements = cot_elements(&a->x), G = (D + 7) / 8;
    mask_args s = make_mask_args(D, a->p, a->scale, &a->mask, &a->mask_bits);
    s.seed = a->seed + word64(&a->seed_tensor);
    s.offset = a->offset + word64(&a->offset_tensor);
    for (int64_t i = 0; cot_is_present(&a->mask_bits_out) && i < cot_elements(&a->mask_bits_out); i++)
        f64_data(&a->mask_bits_out)[i] = f64_data(&m->mask_bits_out)[i] = 0;
    for (int64_t i = 0; i < elements; i++) {
        const int64_t r = i / D, d = i % D;
        const bool keep = is_kept(&s, r, d), contributes = keep && s.scale != 0;
        const wide x = f64_data(&a->x)[i], b = bias_at(&a->bias, d);
        const wide residual = cot_is_present(&a->residual) ? f64_data(&a->residual)[i] : 0;
        const derivatives c = evaluate_activation(a->activation, x + b);
        if (cot_is_present(&a->y)) {
            f64_data(&a->y)[i] = (double)((contributes ? s.scale * c.value : 0) + residual);
            f64_data(&m->y)[i] =
                (double)((contributes ? s.scale * propagated_error(fabsl(x) + fabsl(b), c.slope_terms) : 0) +
                         fabsl(residual));
            if (isinf(x + b) && a->activation == COT_ACTIVATION_SILU)
                f64_data(&m->y)[i] = copysign(f64_data(&m->y)[i], -1);
        }
        if (cot_is_present(&a->mask_out)) {
            f64_data(&a->mask_out)[i] = keep;
            f64_data(&m->mask_out)[i] = 0;
        }
        if (cot_is_present(&a->mask_bits_out))
            f64_data(&a->mask_bits_out)[r * G + d / 8] += keep << d % 8;
    }
}

static void backward(const void *args, void *magnitudes)
{
    const cot_dropout_backward_args *a = args;
    const cot_dropout_backward_args *m = magnitudes;
    const int64_t D = a->dy.shape[a->dy.rank - 1], R = D > 0 ? cot_elements(&a->dy) / D : 0;
    mask_args s = make_mask_args(D, a->p, a->scale, &a->mask, &a->mask_bits);
    s.seed = a->seed + word64(&a->seed_tensor);
    s.offset = a->offset + word64(&a->offset_tensor);
    for (int64_t d = 0; d < D; d++) {
        wide sum = 0, sum_magnitude = 0;
        bool may_be_nan = false;
        for (int64_t r = 0; r < R; r++) {
            const int64_t i = r * D + d;
            bool contributes = is_kept(&s, r, d) && s.scale != 0, infinite = false;
            wide factor = s.scale, terms = s.scale;
            if (a->activation != COT_ACTIVATION_NONE) {
                const wide x = f64_data(&a->x)[i], b = bias_at(&a->bias, d);
                const derivatives c = evaluate_activation(a->activation, x + b);
                terms *= c.slope_terms + propagated_error(fabsl(x) + fabsl(b), c.second_terms);
                factor *= c.slope;
                contributes = contributes && (a->activation != COT_ACTIVATION_RELU || c.slope != 0);
                infinite = isinf(x + b) && a->activation == COT_ACTIVATION_SILU;
            }
            const wide dx = contributes ? factor * f64_data(&a->dy)[i] : 0;
            const wide magnitude = contributes ? terms * fabsl(f64_data(&a->dy)[i]) : 0;
            if (cot_is_present(&a->dx)) {
                f64_data(&a->dx)[i] = (double)dx;
                f64_data(&m->dx)[i] = infinite ? copysign((double)magnitude, -1) : (double)magnitude;
            }
            may_be_nan = may_be_nan || infinite;
            sum += dx;
            sum_magnitude += magnitude;
        }
        if (!cot_is_present(&a->dbias))
            continue;
        const double before = a->accumulate ? f64_data(&a->dbias)[d] : 0;
        f64_data(&a->dbias)[d] = (double)(sum + before);
        f64_data(&m->dbias)[d] = (double)(sum_magnitude + fabs(before));
        if (may_be_nan)
            f64_data(&m->dbias)[d] = copysign(f64_data(&m->dbias)[d], -1);
    }
}

void (*const cot_dropout_oracles[])(const void *, void *) = {forward, backward};
