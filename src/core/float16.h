/* SPDX-License-Identifier: Apache-2.0
 * float16.h: converts single elements of every float dtype to and from f32 and f64. Rounding is to nearest, ties to
 * even. Subnormals are kept. NaN stays NaN. The vector operations of src/simd give the same results. */
#ifndef COT_CORE_FLOAT16_H
#define COT_CORE_FLOAT16_H

#include <cotangent/core.h>

static inline uint32_t cot_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float cot_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float cot_bf16_to_f32(uint16_t half)
{
    return cot_f32_from_bits((uint32_t)half << 16);
}

static inline uint16_t cot_f32_to_bf16(float value)
{
    const uint32_t bits = cot_f32_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u); /* a NaN with a payload only in the lower half must not become inf */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float cot_f16_to_f32(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24, exact in f32 */
        const float magnitude = (float)mantissa * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    if (exponent == 31)
        return cot_f32_from_bits(sign | 0x7f800000u | (mantissa << 13));
    return cot_f32_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

static inline uint16_t cot_f32_to_f16(float value)
{
    const uint32_t bits = cot_f32_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude <
        0x38800000u) { /* below 2^-14, subnormal: adding 0.5 rounds to a multiple of 2^-24, the unit of subnormals */
        const float shifted = cot_f32_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (cot_f32_bits(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

/* Element `index` of an array of a float dtype. NaN for another dtype, which the argument checks exclude. */
static inline double cot_load_f64(const void *data, cot_dtype dtype, int64_t index)
{
    switch (dtype) {
    case COT_F32: return ((const float *)data)[index];
    case COT_F16: return cot_f16_to_f32(((const uint16_t *)data)[index]);
    case COT_BF16: return cot_bf16_to_f32(((const uint16_t *)data)[index]);
    case COT_F64: return ((const double *)data)[index];
    default: return __builtin_nan("");
    }
}

/* Stores a value rounded to the dtype. For f16 and bf16, the value is first rounded to f32. */
static inline void cot_store_f64(void *data, cot_dtype dtype, int64_t index, double value)
{
    switch (dtype) {
    case COT_F32: ((float *)data)[index] = (float)value; break;
    case COT_F16: ((uint16_t *)data)[index] = cot_f32_to_f16((float)value); break;
    case COT_BF16: ((uint16_t *)data)[index] = cot_f32_to_bf16((float)value); break;
    case COT_F64: ((double *)data)[index] = value; break;
    default: break;
    }
}

#endif
