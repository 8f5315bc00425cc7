/* SPDX-License-Identifier: Apache-2.0
 *
 * arithmetic.c: arithmetic of registers without communication between lanes.
 *
 * Each instruction is a C loop over the lanes, which the compiler vectorises. -ffp-contract=off keeps the compiler from
 * fusing products and sums. Approximate instructions return the nearest float. */
#include "emulator.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum emu_step step;
typedef _Float16 f16;

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* ---- 16-bit floats ---------------------------------------------------------------------------------------- */

uint32_t emu_bf16(float x)
{
    const uint32_t bits = bits_of(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

float emu_from_bf16(uint32_t half)
{
    return float_of(half << 16);
}

uint32_t emu_f16(float x)
{
    const f16 half = (f16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return x != x ? 0x7fff : bits;
}

static uint32_t emu_f16_of_f64(double x)
{
    const f16 half = (f16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return x != x ? 0x7fff : bits;
}

/* Clears the lower word, as the approximate reciprocal does. */
static double upper_half(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, 8);
    bits &= ~(uint64_t)0xffffffff;
    memcpy(&x, &bits, 8);
    return x;
}

float emu_from_f16(uint32_t half)
{
    const uint16_t bits = (uint16_t)half;
    f16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
}

/* ---- helpers ----------------------------------------------------------------------------------------------- */

static inline float flush(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x;
}

/* fma rounded towards minus infinity. The product is exact in double; `lost` is the rounding error of the sum. */
static inline float fma_down(float a, float b, float c)
{
    const double product = (double)a * b, sum = product + c, part = sum - product;
    const double lost = (product - (sum - part)) + (c - part);
    const float nearest = (float)sum;
    return nearest > sum || (nearest == sum && lost < 0) ? nextafterf(nearest, -INFINITY) : nearest;
}

static inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector)
{
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int n = 0; n < 4; n++) {
        const uint32_t s = selector >> 4 * n & 15;
        const uint32_t byte = bytes >> 8 * (s & 7) & 255;
        out |= (s & 8 ? (byte & 128 ? 255u : 0) : byte) << 8 * n;
    }
    return out;
}

static inline uint64_t insert(uint64_t from, uint64_t into, uint32_t offset, uint32_t length, int bits)
{
    offset &= 255, length &= 255;
    if (offset >= (uint32_t)bits || length == 0)
        return into;
    const uint64_t mask = (length >= 64 ? ~0ull : ((uint64_t)1 << length) - 1) << offset;
    return (into & ~mask) | (from << offset & mask);
}

static inline uint32_t extract(uint32_t from, uint32_t offset, uint32_t length, bool is_signed)
{
    offset &= 255, length &= 255;
    const uint32_t sign =
        is_signed && length > 0 ? from >> (offset + length - 1 < 31 ? offset + length - 1 : 31) & 1 : 0;
    uint32_t field = offset > 31 ? 0 : from >> offset;
    if (offset < 32 && length < 32 - offset)
        field = length == 0 ? 0 : (field & ((1u << length) - 1)) | (sign ? ~0u << length : 0);
    else if (sign && offset > 0)
        field |= offset > 31 ? ~0u : ~0u << (32 - offset);
    return field;
}

static inline uint32_t reverse(uint32_t x)
{
    uint32_t out = 0;
    for (int n = 0; n < 32; n++)
        out |= (x >> n & 1) << (31 - n);
    return out;
}

static inline float min_f32(float x, float y)
{
    return x != x ? y : y != y ? x : x < y || (x == y && signbit(x)) ? x : y;
}

static inline float max_f32(float x, float y)
{
    return x != x ? y : y != y ? x : x > y || (x == y && signbit(y)) ? x : y;
}

/* Evaluates the expression on both halves of packed 16-bit floats, in float. A product of two halves is exact in float.
 * A sum or an fma is rounded twice, which changes the result only in rare cases of double rounding. */
#define PAIR(to, from, expression)                                                                            \
    ({                                                                                                        \
        uint32_t out_ = 0;                                                                                    \
        for (int h_ = 0; h_ < 2; h_++) {                                                                      \
            const float p = from((uint32_t)x >> 16 * h_ & 0xffff), q = from((uint32_t)y >> 16 * h_ & 0xffff), \
                        r = from((uint32_t)z >> 16 * h_ & 0xffff);                                            \
            (void)p, (void)q, (void)r;                                                                        \
            out_ |= to(expression) << 16 * h_;                                                                \
        }                                                                                                     \
        out_;                                                                                                 \
    })
#define PAIR_F16(expression) PAIR(emu_f16, emu_from_f16, expression)
#define PAIR_BF16(expression) PAIR(emu_bf16, emu_from_bf16, expression)

/* ---- the instructions -------------------------------------------------------------------------------------
 * OP(opcode with _ instead of dots, letters of the operands, type of the result, types of x, y and z, expression).
 * If a type is narrower than its register, operands and result are truncated to it. */

#define W32 uint32_t
#define S32 int32_t
#define U64 uint64_t
#define S64 int64_t
#define INTEGER_OPS(OP)                                                                              \
    OP(add_s32, Www, W32, W32, W32, W32, x + y)                                                      \
    OP(add_u32, Www, W32, W32, W32, W32, x + y)                                                      \
    OP(sub_s32, Www, W32, W32, W32, W32, x - y)                                                      \
    OP(sub_u32, Www, W32, W32, W32, W32, x - y)                                                      \
    OP(mul_lo_s32, Www, W32, W32, W32, W32, x *y)                                                    \
    OP(mul_lo_u32, Www, W32, W32, W32, W32, x *y)                                                    \
    OP(mul_hi_u32, Www, W32, W32, W32, W32, (W32)((U64)x * y >> 32))                                 \
    OP(mul_hi_s32, Www, W32, S32, S32, W32, (W32)((S64)x * y >> 32))                                 \
    OP(mul_hi_u64, Lll, U64, U64, U64, U64, (U64)((unsigned __int128)x * y >> 64))                   \
    OP(mad_lo_s32, Wwww, W32, W32, W32, W32, x *y + z)                                               \
    OP(mad_lo_u32, Wwww, W32, W32, W32, W32, x *y + z)                                               \
    OP(mad_hi_u32, Wwww, W32, W32, W32, W32, (W32)((U64)x * y >> 32) + z)                            \
    OP(mul_wide_s32, Lww, U64, S32, S32, W32, (U64)((S64)x * y))                                     \
    OP(mul_wide_u32, Lww, U64, W32, W32, W32, (U64)x *y)                                             \
    OP(mad_wide_s32, Lwwl, U64, S32, S32, U64, (U64)((S64)x * y) + z)                                \
    OP(mad_wide_u32, Lwwl, U64, W32, W32, U64, (U64)x *y + z)                                        \
    OP(mul_wide_u16, Www, W32, uint16_t, uint16_t, W32, (W32)x *y)                                   \
    OP(mul_wide_s16, Www, W32, int16_t, int16_t, W32, (W32)((S32)x * y))                             \
    OP(div_s32, Www, W32, S32, S32, W32, (W32)(y == 0 ? -1 : y == -1 ? (S32)(0 - (W32)x) : x / y))   \
    OP(div_u32, Www, W32, W32, W32, W32, y == 0 ? ~0u : x / y)                                       \
    OP(rem_s32, Www, W32, S32, S32, W32, (W32)(y == 0 ? x : y == -1 ? 0 : x % y))                    \
    OP(rem_u32, Www, W32, W32, W32, W32, y == 0 ? x : x % y)                                         \
    OP(min_s32, Www, W32, S32, S32, W32, (W32)(x < y ? x : y))                                       \
    OP(max_s32, Www, W32, S32, S32, W32, (W32)(x > y ? x : y))                                       \
    OP(min_u32, Www, W32, W32, W32, W32, x < y ? x : y)                                              \
    OP(max_u32, Www, W32, W32, W32, W32, x > y ? x : y)                                              \
    OP(neg_s32, Ww, W32, W32, W32, W32, 0 - x)                                                       \
    OP(abs_s32, Ww, W32, S32, W32, W32, x < 0 ? 0 - (W32)x : (W32)x)                                 \
    OP(and_b32, Www, W32, W32, W32, W32, x &y)                                                       \
    OP(or_b32, Www, W32, W32, W32, W32, x | y)                                                       \
    OP(xor_b32, Www, W32, W32, W32, W32, x ^ y)                                                      \
    OP(not_b32, Ww, W32, W32, W32, W32, ~x)                                                          \
    OP(shl_b32, Www, W32, W32, W32, W32, y > 31 ? 0 : x << y)                                        \
    OP(shr_u32, Www, W32, W32, W32, W32, y > 31 ? 0 : x >> y)                                        \
    OP(shr_b32, Www, W32, W32, W32, W32, y > 31 ? 0 : x >> y)                                        \
    OP(shr_s32, Www, W32, S32, W32, W32, (W32)(x >> (y > 31 ? 31 : y)))                              \
    OP(shf_r_wrap_b32, Wwww, W32, W32, W32, W32, (W32)(((U64)y << 32 | x) >> (z & 31)))              \
    OP(shf_l_wrap_b32, Wwww, W32, W32, W32, W32, (W32)(((U64)y << 32 | x) << (z & 31) >> 32))        \
    OP(shf_r_clamp_b32, Wwww, W32, W32, W32, W32, (W32)(((U64)y << 32 | x) >> (z > 32 ? 32 : z)))    \
    OP(shf_l_clamp_b32, Wwww, W32, W32, W32, W32, z > 31 ? x : (W32)(((U64)y << 32 | x) << z >> 32)) \
    OP(popc_b32, Ww, W32, W32, W32, W32, (W32)__builtin_popcount(x))                                 \
    OP(clz_b32, Ww, W32, W32, W32, W32, x == 0 ? 32 : (W32)__builtin_clz(x))                         \
    OP(brev_b32, Ww, W32, W32, W32, W32, reverse(x))                                                 \
    OP(bfind_u32, Ww, W32, W32, W32, W32, x == 0 ? ~0u : 31 - (W32)__builtin_clz(x))                 \
    OP(bfe_u32, Wwww, W32, W32, W32, W32, extract(x, y, z, false))                                   \
    OP(bfe_s32, Wwww, W32, W32, W32, W32, extract(x, y, z, true))                                    \
    OP(prmt_b32, Wwww, W32, W32, W32, W32, permute(x, y, z))                                         \
    OP(mov_b32, Ww, W32, W32, W32, W32, x)                                                           \
    OP(mov_u32, Ww, W32, W32, W32, W32, x)                                                           \
    OP(mov_s32, Ww, W32, W32, W32, W32, x)                                                           \
    OP(mov_f32, Ww, W32, W32, W32, W32, x)                                                           \
    OP(mov_b16, Ww, W32, uint16_t, W32, W32, x)                                                      \
    OP(mov_u16, Ww, W32, uint16_t, W32, W32, x)                                                      \
    OP(mov_b64, Ll, U64, U64, U64, U64, x)                                                           \
    OP(mov_u64, Ll, U64, U64, U64, U64, x)                                                           \
    OP(mov_s64, Ll, U64, U64, U64, U64, x)                                                           \
    OP(mov_f64, Ll, U64, U64, U64, U64, x)                                                           \
    OP(add_s16, Www, W32, W32, W32, W32, (uint16_t)(x + y))                                          \
    OP(sub_s16, Www, W32, W32, W32, W32, (uint16_t)(x - y))                                          \
    OP(mul_lo_s16, Www, W32, W32, W32, W32, (uint16_t)(x * y))                                       \
    OP(and_b16, Www, W32, W32, W32, W32, (uint16_t)(x & y))                                          \
    OP(or_b16, Www, W32, W32, W32, W32, (uint16_t)(x | y))                                           \
    OP(xor_b16, Www, W32, W32, W32, W32, (uint16_t)(x ^ y))                                          \
    OP(not_b16, Ww, W32, W32, W32, W32, (uint16_t)~x)                                                \
    OP(shl_b16, Www, W32, W32, W32, W32, y > 15 ? 0 : (uint16_t)(x << y))                            \
    OP(shr_u16, Www, W32, uint16_t, W32, W32, y > 15 ? 0 : (W32)x >> y)                              \
    OP(shr_s16, Www, W32, int16_t, W32, W32, (uint16_t)(x >> (y > 15 ? 15 : y)))                     \
    OP(add_s64, Lll, U64, U64, U64, U64, x + y)                                                      \
    OP(add_u64, Lll, U64, U64, U64, U64, x + y)                                                      \
    OP(sub_s64, Lll, U64, U64, U64, U64, x - y)                                                      \
    OP(sub_u64, Lll, U64, U64, U64, U64, x - y)                                                      \
    OP(mul_lo_s64, Lll, U64, U64, U64, U64, x *y)                                                    \
    OP(mul_lo_u64, Lll, U64, U64, U64, U64, x *y)                                                    \
    OP(mad_lo_s64, Llll, U64, U64, U64, U64, x *y + z)                                               \
    OP(mad_lo_u64, Llll, U64, U64, U64, U64, x *y + z)                                               \
    OP(div_s64, Lll, U64, S64, S64, U64, (U64)(y == 0 ? -1 : y == -1 ? (S64)(0 - (U64)x) : x / y))   \
    OP(div_u64, Lll, U64, U64, U64, U64, y == 0 ? ~0ull : x / y)                                     \
    OP(rem_s64, Lll, U64, S64, S64, U64, (U64)(y == 0 ? x : y == -1 ? 0 : x % y))                    \
    OP(rem_u64, Lll, U64, U64, U64, U64, y == 0 ? x : x % y)                                         \
    OP(min_s64, Lll, U64, S64, S64, U64, (U64)(x < y ? x : y))                                       \
    OP(max_s64, Lll, U64, S64, S64, U64, (U64)(x > y ? x : y))                                       \
    OP(min_u64, Lll, U64, U64, U64, U64, x < y ? x : y)                                              \
    OP(max_u64, Lll, U64, U64, U64, U64, x > y ? x : y)                                              \
    OP(neg_s64, Ll, U64, U64, U64, U64, 0 - x)                                                       \
    OP(abs_s64, Ll, U64, S64, U64, U64, x < 0 ? 0 - (U64)x : (U64)x)                                 \
    OP(and_b64, Lll, U64, U64, U64, U64, x &y)                                                       \
    OP(or_b64, Lll, U64, U64, U64, U64, x | y)                                                       \
    OP(xor_b64, Lll, U64, U64, U64, U64, x ^ y)                                                      \
    OP(not_b64, Ll, U64, U64, U64, U64, ~x)                                                          \
    OP(shl_b64, Llw, U64, U64, W32, U64, y > 63 ? 0 : x << y)                                        \
    OP(shr_u64, Llw, U64, U64, W32, U64, y > 63 ? 0 : x >> y)                                        \
    OP(shr_b64, Llw, U64, U64, W32, U64, y > 63 ? 0 : x >> y)                                        \
    OP(shr_s64, Llw, U64, S64, W32, U64, (U64)(x >> (y > 63 ? 63 : y)))                              \
    OP(cvta_to_global_u64, Ll, U64, U64, U64, U64, x)                                                \
    OP(cvta_global_u64, Ll, U64, U64, U64, U64, x)                                                   \
    OP(cvta_param_u64, Ll, U64, U64, U64, U64, x)                                                    \
    OP(cvta_to_shared_u64, Ll, U64, U64, U64, U64, x & 0xffffffff)                                   \
    OP(cvta_shared_u64, Ll, U64, U64, U64, U64, x | SHARED_TAG)                                      \
    OP(cvta_to_local_u64, Ll, U64, U64, U64, U64, x & 0xffffffff)                                    \
    OP(cvta_local_u64, Ll, U64, U64, U64, U64, x | LOCAL_TAG)                                        \
    OP(createpolicy_fractional_L2_evict_first_b64, Lw, U64, W32, W32, W32, x)                        \
    OP(createpolicy_fractional_L2_evict_last_b64, Lw, U64, W32, W32, W32, x)

#define FLOAT_OPS(OP)                                                                               \
    OP(add_f32, Www, float, float, float, float, x + y)                                             \
    OP(add_rn_f32, Www, float, float, float, float, x + y)                                          \
    OP(add_ftz_f32, Www, float, float, float, float, flush(flush(x) + flush(y)))                    \
    OP(sub_f32, Www, float, float, float, float, x - y)                                             \
    OP(sub_rn_f32, Www, float, float, float, float, x - y)                                          \
    OP(mul_f32, Www, float, float, float, float, x *y)                                              \
    OP(mul_rn_f32, Www, float, float, float, float, x *y)                                           \
    OP(mul_ftz_f32, Www, float, float, float, float, flush(flush(x) * flush(y)))                    \
    OP(fma_rn_f32, Wwww, float, float, float, float, fmaf(x, y, z))                                 \
    OP(fma_rn_ftz_f32, Wwww, float, float, float, float, flush(fmaf(flush(x), flush(y), flush(z)))) \
    OP(fma_rm_f32, Wwww, float, float, float, float, fma_down(x, y, z))                             \
    OP(div_rn_f32, Www, float, float, float, float, x / y)                                          \
    OP(div_full_f32, Www, float, float, float, float, x / y)                                        \
    OP(div_approx_f32, Www, float, float, float, float, x / y)                                      \
    OP(div_approx_ftz_f32, Www, float, float, float, float, flush(flush(x) / flush(y)))             \
    OP(rcp_rn_f32, Ww, float, float, float, float, 1 / x)                                           \
    OP(rcp_approx_f32, Ww, float, float, float, float, 1 / x)                                       \
    OP(rcp_approx_ftz_f32, Ww, float, float, float, float, flush(1 / flush(x)))                     \
    OP(sqrt_rn_f32, Ww, float, float, float, float, sqrtf(x))                                       \
    OP(sqrt_approx_f32, Ww, float, float, float, float, sqrtf(x))                                   \
    OP(sqrt_approx_ftz_f32, Ww, float, float, float, float, sqrtf(flush(x)))                        \
    OP(rsqrt_approx_f32, Ww, float, float, float, float, (float)(1 / sqrt(x)))                      \
    OP(rsqrt_approx_ftz_f32, Ww, float, float, float, float, (float)(1 / sqrt(flush(x))))           \
    OP(ex2_approx_f32, Ww, float, float, float, float, exp2f(x))                                    \
    OP(ex2_approx_ftz_f32, Ww, float, float, float, float, flush(exp2f(flush(x))))                  \
    OP(lg2_approx_f32, Ww, float, float, float, float, log2f(x))                                    \
    OP(lg2_approx_ftz_f32, Ww, float, float, float, float, log2f(flush(x)))                         \
    OP(tanh_approx_f32, Ww, float, float, float, float, tanhf(x))                                   \
    OP(sin_approx_f32, Ww, float, float, float, float, sinf(x))                                     \
    OP(cos_approx_f32, Ww, float, float, float, float, cosf(x))                                     \
    OP(neg_f32, Ww, float, float, float, float, -x)                                                 \
    OP(neg_ftz_f32, Ww, float, float, float, float, -flush(x))                                      \
    OP(abs_f32, Ww, float, float, float, float, fabsf(x))                                           \
    OP(abs_ftz_f32, Ww, float, float, float, float, fabsf(flush(x)))                                \
    OP(min_f32, Www, float, float, float, float, min_f32(x, y))                                     \
    OP(max_f32, Www, float, float, float, float, max_f32(x, y))                                     \
    OP(min_ftz_f32, Www, float, float, float, float, min_f32(flush(x), flush(y)))                   \
    OP(max_ftz_f32, Www, float, float, float, float, max_f32(flush(x), flush(y)))                   \
    OP(min_NaN_f32, Www, float, float, float, float, x != x || y != y ? NAN : min_f32(x, y))        \
    OP(max_NaN_f32, Www, float, float, float, float, x != x || y != y ? NAN : max_f32(x, y))        \
    OP(copysign_f32, Www, float, float, float, float, copysignf(y, x))                              \
    OP(add_f64, Lll, double, double, double, double, x + y)                                         \
    OP(add_rn_f64, Lll, double, double, double, double, x + y)                                      \
    OP(sub_f64, Lll, double, double, double, double, x - y)                                         \
    OP(mul_f64, Lll, double, double, double, double, x *y)                                          \
    OP(mul_rn_f64, Lll, double, double, double, double, x *y)                                       \
    OP(fma_rn_f64, Llll, double, double, double, double, fma(x, y, z))                              \
    OP(div_rn_f64, Lll, double, double, double, double, x / y)                                      \
    OP(sqrt_rn_f64, Ll, double, double, double, double, sqrt(x))                                    \
    OP(neg_f64, Ll, double, double, double, double, -x)                                             \
    OP(abs_f64, Ll, double, double, double, double, fabs(x))                                        \
    OP(max_f64, Lll, double, double, double, double, fmax(x, y))                                    \
    OP(min_f64, Lll, double, double, double, double, fmin(x, y))                                    \
    OP(rcp_approx_ftz_f64, Ll, double, double, double, double, upper_half(1 / x))                   \
    OP(fma_rn_f16x2, Wwww, W32, W32, W32, W32, PAIR_F16(fmaf(p, q, r)))                             \
    OP(add_rn_f16x2, Www, W32, W32, W32, W32, PAIR_F16(p + q))                                      \
    OP(add_f16x2, Www, W32, W32, W32, W32, PAIR_F16(p + q))                                         \
    OP(sub_f16x2, Www, W32, W32, W32, W32, PAIR_F16(p - q))                                         \
    OP(mul_f16x2, Www, W32, W32, W32, W32, PAIR_F16(p *q))                                          \
    OP(max_f16x2, Www, W32, W32, W32, W32, PAIR_F16(max_f32(p, q)))                                 \
    OP(min_f16x2, Www, W32, W32, W32, W32, PAIR_F16(min_f32(p, q)))                                 \
    OP(neg_f16x2, Ww, W32, W32, W32, W32, x ^ 0x80008000u)                                          \
    OP(fma_rn_bf16x2, Wwww, W32, W32, W32, W32, PAIR_BF16(fmaf(p, q, r)))                           \
    OP(add_rn_bf16x2, Www, W32, W32, W32, W32, PAIR_BF16(p + q))                                    \
    OP(add_bf16x2, Www, W32, W32, W32, W32, PAIR_BF16(p + q))                                       \
    OP(sub_bf16x2, Www, W32, W32, W32, W32, PAIR_BF16(p - q))                                       \
    OP(mul_bf16x2, Www, W32, W32, W32, W32, PAIR_BF16(p *q))                                        \
    OP(max_bf16x2, Www, W32, W32, W32, W32, PAIR_BF16(max_f32(p, q)))                               \
    OP(min_bf16x2, Www, W32, W32, W32, W32, PAIR_BF16(min_f32(p, q)))                               \
    OP(neg_bf16x2, Ww, W32, W32, W32, W32, x ^ 0x80008000u)                                         \
    OP(ex2_approx_ftz_bf16x2, Ww, W32, W32, W32, W32, PAIR_BF16(exp2f(p)))

/* Rounds a float to an integer, clamped to the range of the type. NaN becomes 0. */
#define TO_INTEGER(round, low, high, type) \
    (x != x ? 0 : round(x) <= low ? (type)low : round(x) >= high ? (type)high : (type)round(x))
#define CONVERSIONS(OP)                                                                                 \
    OP(cvt_u32_u64, Wl, W32, U64, W32, W32, (W32)x)                                                     \
    OP(cvt_s32_s64, Wl, W32, U64, W32, W32, (W32)x)                                                     \
    OP(cvt_u16_u32, Ww, W32, uint16_t, W32, W32, x)                                                     \
    OP(cvt_u16_u64, Wl, W32, U64, W32, W32, (uint16_t)x)                                                \
    OP(cvt_u32_u16, Ww, W32, uint16_t, W32, W32, x)                                                     \
    OP(cvt_s32_s16, Ww, W32, int16_t, W32, W32, (W32)(S32)x)                                            \
    OP(cvt_s32_s8, Ww, W32, int8_t, W32, W32, (W32)(S32)x)                                              \
    OP(cvt_u32_u8, Ww, W32, uint8_t, W32, W32, x)                                                       \
    OP(cvt_u64_u16, Lw, U64, uint16_t, W32, W32, x)                                                     \
    OP(cvt_s64_s16, Lw, U64, int16_t, W32, W32, (U64)(S64)x)                                            \
    OP(cvt_f32_f16, Ww, float, W32, W32, W32, emu_from_f16(x))                                          \
    OP(cvt_f32_bf16, Ww, float, W32, W32, W32, emu_from_bf16(x))                                        \
    OP(cvt_rn_f16_f32, Ww, W32, float, W32, W32, emu_f16(x))                                            \
    OP(cvt_rn_f16_f64, Wl, W32, double, W32, W32, emu_f16_of_f64(x))                                    \
    OP(cvt_rn_bf16_f32, Ww, W32, float, W32, W32, emu_bf16(x))                                          \
    OP(cvt_rn_f16x2_f32, Www, W32, float, float, W32, emu_f16(x) << 16 | emu_f16(y))                    \
    OP(cvt_rn_bf16x2_f32, Www, W32, float, float, W32, emu_bf16(x) << 16 | emu_bf16(y))                 \
    OP(cvt_sat_f32_f32, Ww, float, float, W32, W32, x > 0 ? x < 1 ? x : 1 : 0)                          \
    OP(cvt_ftz_sat_f32_f32, Ww, float, float, W32, W32, x > 0 ? x < 1 ? flush(x) : 1 : 0)               \
    OP(cvt_rni_f32_f32, Ww, float, float, W32, W32, rintf(x))                                           \
    OP(cvt_rmi_f32_f32, Ww, float, float, W32, W32, floorf(x))                                          \
    OP(cvt_rpi_f32_f32, Ww, float, float, W32, W32, ceilf(x))                                           \
    OP(cvt_rzi_f32_f32, Ww, float, float, W32, W32, truncf(x))                                          \
    OP(cvt_rzi_s32_f32, Ww, W32, float, W32, W32, (W32)TO_INTEGER(truncf, -0x1p31f, 0x1p31f, S64))      \
    OP(cvt_rni_s32_f32, Ww, W32, float, W32, W32, (W32)TO_INTEGER(rintf, -0x1p31f, 0x7fffffffLL, S64))  \
    OP(cvt_rmi_s32_f32, Ww, W32, float, W32, W32, (W32)TO_INTEGER(floorf, -0x1p31f, 0x7fffffffLL, S64)) \
    OP(cvt_rpi_s32_f32, Ww, W32, float, W32, W32, (W32)TO_INTEGER(ceilf, -0x1p31f, 0x7fffffffLL, S64))  \
    OP(cvt_rzi_u32_f32, Ww, W32, float, W32, W32, (W32)TO_INTEGER(truncf, 0, 0xffffffffLL, S64))        \
    OP(cvt_rn_f32_s32, Ww, float, S32, W32, W32, (float)x)                                              \
    OP(cvt_rn_f32_u32, Ww, float, W32, W32, W32, (float)x)                                              \
    OP(cvt_rn_f32_s64, Wl, float, S64, W32, W32, (float)x)                                              \
    OP(cvt_rn_f32_u64, Wl, float, U64, W32, W32, (float)x)                                              \
    OP(cvt_rn_f32_u16, Ww, float, uint16_t, W32, W32, (float)x)                                         \
    OP(cvt_rn_f64_s32, Lw, double, S32, W32, W32, x)                                                    \
    OP(cvt_rn_f64_u32, Lw, double, W32, W32, W32, x)                                                    \
    OP(cvt_rn_f64_s64, Ll, double, S64, W32, W32, (double)x)                                            \
    OP(cvt_f64_f32, Lw, double, float, W32, W32, x)                                                     \
    OP(cvt_rn_f32_f64, Wl, float, double, W32, W32, (float)x)

/* Comparisons of x and y; each lane's result is one bit. */
#define COMPARE(OP, letters, suffix, type)      \
    OP(setp_eq_##suffix, letters, type, x == y) \
    OP(setp_ne_##suffix, letters, type, x != y) \
    OP(setp_lt_##suffix, letters, type, x < y)  \
    OP(setp_le_##suffix, letters, type, x <= y) \
    OP(setp_gt_##suffix, letters, type, x > y)  \
    OP(setp_ge_##suffix, letters, type, x >= y)
#define COMPARE_FLOATS(OP, letters, suffix, type)           \
    OP(setp_eq_##suffix, letters, type, x == y)             \
    OP(setp_ne_##suffix, letters, type, x<y || x> y)        \
    OP(setp_lt_##suffix, letters, type, x < y)              \
    OP(setp_le_##suffix, letters, type, x <= y)             \
    OP(setp_gt_##suffix, letters, type, x > y)              \
    OP(setp_ge_##suffix, letters, type, x >= y)             \
    OP(setp_equ_##suffix, letters, type, !(x < y || x > y)) \
    OP(setp_neu_##suffix, letters, type, x != y)            \
    OP(setp_ltu_##suffix, letters, type, !(x >= y))         \
    OP(setp_leu_##suffix, letters, type, !(x > y))          \
    OP(setp_gtu_##suffix, letters, type, !(x <= y))         \
    OP(setp_geu_##suffix, letters, type, !(x < y))          \
    OP(setp_num_##suffix, letters, type, x == x && y == y)  \
    OP(setp_nan_##suffix, letters, type, x != x || y != y)
#define COMPARISONS(OP)             \
    COMPARE(OP, Pww, s32, int32_t)  \
    COMPARE(OP, Pww, u32, uint32_t) \
    COMPARE(OP, Pww, b32, uint32_t) \
    COMPARE(OP, Pww, s16, int16_t)  \
    COMPARE(OP, Pww, u16, uint16_t) \
    COMPARE(OP, Pww, b16, uint16_t) \
    COMPARE(OP, Pll, s64, int64_t)  \
    COMPARE(OP, Pll, u64, uint64_t) \
    COMPARE(OP, Pll, b64, uint64_t) COMPARE_FLOATS(OP, Pww, f32, float) COMPARE_FLOATS(OP, Pll, f64, double)

/* clang-format off */
#define SELECTIONS(OP) \
    OP(selp_b16, Wwwp, uint32_t) OP(selp_u16, Wwwp, uint32_t) OP(selp_s16, Wwwp, uint32_t) \
    OP(selp_b32, Wwwp, uint32_t) OP(selp_u32, Wwwp, uint32_t) OP(selp_s32, Wwwp, uint32_t) \
    OP(selp_f32, Wwwp, uint32_t) OP(selp_b64, Lllp, uint64_t) OP(selp_u64, Lllp, uint64_t) \
    OP(selp_s64, Lllp, uint64_t) OP(selp_f64, Lllp, uint64_t)
/* clang-format on */

/* x and y are predicates: one word with one bit per lane. */
#define BIT_OPS(OP)          \
    OP(and_pred, Ppp, x &y)  \
    OP(or_pred, Ppp, x | y)  \
    OP(xor_pred, Ppp, x ^ y) \
    OP(not_pred, Pp, ~x)     \
    OP(mov_pred, Pp, x)

/* ---- the handlers ----------------------------------------------------------------------------------------- */

/* A missing operand is replaced by operand 0, which the expression does not read. The letters l and L are registers
 * of two words per lane. */
#define OPERAND_INDEX(letters, n) ((n) < (int)sizeof #letters - 1 ? (n) : 0)
#define REGISTER_WORDS(letters, n) ((#letters[OPERAND_INDEX(letters, n)] | 32) == 'l' ? 2 : 1)
#define OPERAND(letters, n) emu_register(w, i->o[OPERAND_INDEX(letters, n)])
#define READ(type, name, letters, n) const type name = *(const type *)(r##name + REGISTER_WORDS(letters, n) * l)

#define DEFINE_LANEWISE(name, letters, result, tx, ty, tz, expression)                                  \
    static step run_##name(emu_warp *w, const emu_ins *i, uint32_t m)                                   \
    {                                                                                                   \
        uint32_t *d = OPERAND(letters, 0);                                                              \
        const uint32_t *rx = OPERAND(letters, 1), *ry = OPERAND(letters, 2), *rz = OPERAND(letters, 3); \
        if (m == ~0u) {                                                                                 \
            _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++)                                        \
            {                                                                                           \
                READ(tx, x, letters, 1);                                                                \
                READ(ty, y, letters, 2);                                                                \
                READ(tz, z, letters, 3);                                                                \
                (void)y, (void)z;                                                                       \
                *(result *)(d + REGISTER_WORDS(letters, 0) * l) = expression;                           \
            }                                                                                           \
        } else                                                                                          \
            EACH_LANE(l, m)                                                                             \
            {                                                                                           \
                READ(tx, x, letters, 1);                                                                \
                READ(ty, y, letters, 2);                                                                \
                READ(tz, z, letters, 3);                                                                \
                (void)y, (void)z;                                                                       \
                *(result *)(d + REGISTER_WORDS(letters, 0) * l) = expression;                           \
            }                                                                                           \
        return NEXT;                                                                                    \
    }
#define DEFINE_COMPARISON(name, letters, type, expression)                   \
    static step run_##name(emu_warp *w, const emu_ins *i, uint32_t m)        \
    {                                                                        \
        uint32_t *d = OPERAND(letters, 0), bits = 0;                         \
        const uint32_t *rx = OPERAND(letters, 1), *ry = OPERAND(letters, 2); \
        for (int l = 0; l < LANES; l++) {                                    \
            READ(type, x, letters, 1);                                       \
            READ(type, y, letters, 2);                                       \
            bits |= (uint32_t)(expression) << l;                             \
        }                                                                    \
        *d = (*d & ~m) | (bits & m);                                         \
        return NEXT;                                                         \
    }
#define DEFINE_SELECTION(name, letters, type)                                                        \
    static step run_##name(emu_warp *w, const emu_ins *i, uint32_t m)                                \
    {                                                                                                \
        type *d = OPERAND(letters, 0);                                                               \
        const type *x = OPERAND(letters, 1), *y = OPERAND(letters, 2);                               \
        const uint32_t bits = *(const uint32_t *)OPERAND(letters, 3);                                \
        if (m == ~0u) {                                                                              \
            _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) d[l] = bits >> l & 1 ? x[l] : y[l]; \
        } else                                                                                       \
            EACH_LANE(l, m) d[l] = bits >> l & 1 ? x[l] : y[l];                                      \
        return NEXT;                                                                                 \
    }
#define DEFINE_BITWISE(name, letters, expression)                                                              \
    static step run_##name(emu_warp *w, const emu_ins *i, uint32_t m)                                          \
    {                                                                                                          \
        uint32_t *d = OPERAND(letters, 0);                                                                     \
        const uint32_t x = *(const uint32_t *)OPERAND(letters, 1), y = *(const uint32_t *)OPERAND(letters, 2); \
        (void)y;                                                                                               \
        *d = (*d & ~m) | ((expression)&m);                                                                     \
        return NEXT;                                                                                           \
    }
/* clang-format off */
INTEGER_OPS(DEFINE_LANEWISE)
FLOAT_OPS(DEFINE_LANEWISE)
CONVERSIONS(DEFINE_LANEWISE)
COMPARISONS(DEFINE_COMPARISON)
SELECTIONS(DEFINE_SELECTION)
BIT_OPS(DEFINE_BITWISE)
/* clang-format on */

static step run_bfi_b32(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint32_t *o[5];
    for (int n = 0; n < 5; n++)
        o[n] = emu_register(w, i->o[n]);
    EACH_LANE(l, m) o[0][l] = (uint32_t)insert(o[1][l], o[2][l], o[3][l], o[4][l], 32);
    return NEXT;
}

static step run_bfi_b64(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint64_t *d = emu_register(w, i->o[0]), *from = emu_register(w, i->o[1]), *into = emu_register(w, i->o[2]);
    const uint32_t *at = emu_register(w, i->o[3]), *length = emu_register(w, i->o[4]);
    EACH_LANE(l, m) d[l] = insert(from[l], into[l], at[l], length[l], 64);
    return NEXT;
}

static step run_lop3_b32(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint32_t *o[5];
    for (int n = 0; n < 5; n++)
        o[n] = emu_register(w, i->o[n]);
    EACH_LANE(l, m)
    {
        const uint32_t a = o[1][l], b = o[2][l], c = o[3][l];
        uint32_t out = 0;
        for (int t = 0; t < 8; t++)
            if (o[4][l] >> t & 1)
                out |= (t & 4 ? a : ~a) & (t & 2 ? b : ~b) & (t & 1 ? c : ~c);
        o[0][l] = out;
    }
    return NEXT;
}

/* add.cc and addc, for sums of more than 32 bits. i->variant: 1 reads the carry, 2 writes it. */
static step run_add_carry(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint32_t *d = emu_register(w, i->o[0]), *x = emu_register(w, i->o[1]), *y = emu_register(w, i->o[2]);
    EACH_LANE(l, m)
    {
        const uint64_t sum = (uint64_t)x[l] + y[l] + (i->variant & 1 ? w->carry >> l & 1 : 0);
        d[l] = (uint32_t)sum;
        if (i->variant & 2)
            w->carry = (w->carry & ~(1u << l)) | (uint32_t)(sum >> 32) << l;
    }
    return NEXT;
}

/* cvt.u64.u32 and cvt.s64.s32. The source may be the low half of a 64-bit register. */
static step run_widen(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint64_t *d = emu_register(w, i->o[0]);
    const uint32_t *x = emu_register(w, i->o[1]);
    EACH_LANE(l, m)
    {
        const uint32_t word = x[i->wide_data ? 2 * l : l];
        d[l] = i->variant ? (uint64_t)(int64_t)(int32_t)word : word;
    }
    return NEXT;
}

/* The first part is the lowest. */
static step run_pack(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const int parts = i->count - 1, bits = i->size * 8 / parts;
    EACH_LANE(l, m)
    {
        uint64_t whole = 0;
        for (int n = 0; n < parts; n++)
            whole |= ((uint64_t)((uint32_t *)emu_register(w, i->o[1 + n]))[l] & (((uint64_t)1 << bits) - 1))
                     << bits * n;
        if (i->size == 8)
            ((uint64_t *)emu_register(w, i->o[0]))[l] = whole;
        else
            ((uint32_t *)emu_register(w, i->o[0]))[l] = (uint32_t)whole;
    }
    return NEXT;
}

static step run_unpack(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const int parts = i->count - 1, bits = i->size * 8 / parts;
    EACH_LANE(l, m)
    {
        const uint64_t whole = emu_scalar(w, i->o[parts], i->size == 8, l);
        for (int n = 0; n < parts; n++)
            ((uint32_t *)emu_register(w, i->o[n]))[l] = (uint32_t)(whole >> bits * n & (((uint64_t)1 << bits) - 1));
    }
    return NEXT;
}

/* ---- the table -------------------------------------------------------------------------------------------- */

typedef struct entry {
    const char *name;
    emu_handler *run;
    const char *letters;
    uint8_t variant, size;
} entry;

#define ENTRY(name, letters, ...) {#name, run_##name, #letters, 0, 0},
static entry table[] = {
    /* clang-format off */
    INTEGER_OPS(ENTRY) FLOAT_OPS(ENTRY) CONVERSIONS(ENTRY) COMPARISONS(ENTRY) SELECTIONS(ENTRY) BIT_OPS(ENTRY)
    {"bfi_b32", run_bfi_b32, "Wwwww", 0, 0},
    {"bfi_b64", run_bfi_b64, "Lllww", 0, 0},
    {"lop3_b32", run_lop3_b32, "Wwwww", 0, 0},
    {"add_cc_u32", run_add_carry, "Www", 2, 0},
    {"addc_u32", run_add_carry, "Www", 1, 0},
    {"addc_cc_u32", run_add_carry, "Www", 3, 0},
    {"cvt_u64_u32", run_widen, "Lx", 0, 0},
    {"cvt_s64_s32", run_widen, "Lx", 1, 0},
    {"pack_b32", run_pack, "Ww", 0, 4},
    {"pack_b64", run_pack, "Lw", 0, 8},
    {"unpack_b32", run_unpack, "Ww", 0, 4},
    {"unpack_b64", run_unpack, "Wl", 0, 8},
    /* clang-format on */
};

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

const char *emu_find_arithmetic(const char *opcode, emu_ins *ins)
{
    static bool sorted;
    if (!sorted)
        qsort(table, sizeof table / sizeof *table, sizeof *table, by_name);
    sorted = true;
    char name[128];
    size_t length = 0;
    for (const char *c = opcode; *c != 0 && length < sizeof name - 1; c++)
        if (*c != '.' && *c != ':')
            name[length++] = *c;
        else if (length > 0 && name[length - 1] != '_')
            name[length++] = '_';
    name[length] = 0;
    const entry key = {.name = name},
                *found = bsearch(&key, table, sizeof table / sizeof *table, sizeof *table, by_name);
    if (found == NULL)
        return NULL;
    ins->run = found->run, ins->variant = found->variant, ins->size = found->size;
    return found->letters;
}
