/* SPDX-License-Identifier: Apache-2.0
 * philox.h: Philox4x32-10 and the random bits of dropout, for host and device code. Philox4x32-10 is a function from a
 * 128-bit counter and a 64-bit key to 128 random bits (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as
 * 1, 2, 3; SC 2011). The vectors of src/simd compute the same bits. */
#ifndef COT_CORE_PHILOX_H
#define COT_CORE_PHILOX_H

#include <stdint.h>

#if defined(__CUDACC__)
#define COT_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define COT_HOST_DEVICE static inline
#endif

/* clang-format off */
#define COT_PHILOX_ROUNDS 10
#define COT_PHILOX_M0 0xd2511f53u /* multipliers of words 0 and 2 */
#define COT_PHILOX_M1 0xcd9e8d57u
#define COT_PHILOX_W0 0x9e3779b9u /* increments of the key per round */
#define COT_PHILOX_W1 0xbb67ae85u
/* clang-format on */

/* The upper 32 bits of a product. On a device it uses __umulhi: nvcc then computes both halves with one instruction.
 * For a 64-bit product nvcc emits one more instruction. */
COT_HOST_DEVICE uint32_t cot_mulhi_u32(uint32_t a, uint32_t b)
{
#if defined(__CUDA_ARCH__)
    return __umulhi(a, b);
#else
    return (uint32_t)((uint64_t)a * b >> 32);
#endif
}

COT_HOST_DEVICE void cot_philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t a = counter[0], b = counter[1], c = counter[2], d = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < COT_PHILOX_ROUNDS; round++) {
        const uint32_t high0 = cot_mulhi_u32(COT_PHILOX_M0, a), low0 = COT_PHILOX_M0 * a;
        const uint32_t high1 = cot_mulhi_u32(COT_PHILOX_M1, c), low1 = COT_PHILOX_M1 * c;
        a = high1 ^ b ^ k0;
        b = low1;
        c = high0 ^ d ^ k1;
        d = low0;
        k0 += COT_PHILOX_W0;
        k1 += COT_PHILOX_W1;
    }
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
}

/* ---- dropout masks, as cotangent/dropout.h defines them -------------------------------------------------------- *
 * An element takes 16 random bits. A group is 8 neighbouring columns. In attention, the keys are the columns. */

enum { COT_DROPOUT_GROUP = 8 };

/* P = round(65536 p) for p in [0,1]. An element is dropped if its random number is less than P. */
static inline uint32_t cot_dropout_threshold(double p)
{
    return (uint32_t)(65536 * p + 0.5);
}

/* The random numbers of group i. Those of columns 2k and 2k+1 are the low and the high half of words[k]. */
COT_HOST_DEVICE void cot_dropout_group(uint64_t seed, uint64_t offset, uint64_t i, uint32_t words[4])
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)offset, (uint32_t)(offset >> 32), (uint32_t)i, (uint32_t)(i >> 32)};
    cot_philox4x32_10(counter, key, words);
}

/* The keep bits of group i. Bit j belongs to column j of the group. */
COT_HOST_DEVICE uint32_t cot_dropout_keep(uint64_t seed, uint64_t offset, uint64_t i, uint32_t threshold)
{
    uint32_t words[4], keep = 0;
    cot_dropout_group(seed, offset, i, words);
    for (int j = 0; j < COT_DROPOUT_GROUP; j++)
        keep |= (uint32_t)((words[j / 2] >> (16 * (j % 2)) & 0xffffu) >= threshold) << j;
    return keep;
}

#endif
