/* SPDX-License-Identifier: Apache-2.0
 * mma.cuh: tensor core instructions of one warp, under the names of the PTX manual. Needs sm_80.
 *
 * Fragments of m16n8k16, with g = lane / 4 and q = lane % 4. A register holds two elements, the lower index in its
 * lower half:
 *   A [16][16]   a[0]: row g, columns 2q, 2q+1;  a[1]: row g+8;  a[2], a[3]: the same, columns 2q+8, 2q+9
 *   B [16][8]    b[0]: column g, rows 2q, 2q+1;  b[1]: rows 2q+8, 2q+9
 *   C [16][8]    c[0], c[1]: row g, columns 2q, 2q+1;  c[2], c[3]: row g+8 */
#ifndef COT_CUDA_MMA_CUH
#define COT_CUDA_MMA_CUH

#include <cuda_bf16.h>
#include <stdint.h>

static __device__ __forceinline__ void cot_mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                    uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void cot_mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                   uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* m16n8k8: takes only a[0] and a[1] of A, and b[0] of B. */
static __device__ __forceinline__ void cot_mma_f16_k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(b0));
}

static __device__ __forceinline__ void cot_mma_bf16_k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0)
{
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

/* Loads four 8x8 matrices of 16-bit elements. Lane l passes the address of row l%8 of matrix l/8. A lane receives
 * elements 2q and 2q+1 of row g of each matrix; with _trans, of column g. */
static __device__ __forceinline__ void cot_ldmatrix_x4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void cot_ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* Stores four matrices; the register layout is that of cot_ldmatrix_x4. Needs sm_90. */
static __device__ __forceinline__ void cot_stmatrix_x4(uint32_t address, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* Loads or stores one matrix, one register per lane. The first 8 lanes pass the addresses of its rows of 16 bytes. */
static __device__ __forceinline__ uint32_t cot_ldmatrix_x1(uint32_t address)
{
    uint32_t r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(address) : "memory");
    return r;
}

static __device__ __forceinline__ void cot_stmatrix_x1(uint32_t address, uint32_t r)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(r) : "memory");
}

/* Splits two floats into TERMS pairs of bf16 terms. The sum of the terms has a relative error of at most 2^-8, 2^-17 or
 * 2^-26 for 1, 2 or 3 terms. */
template <int TERMS>
static __device__ __forceinline__ void cot_split_bf16(float low, float high, uint32_t (&terms)[TERMS])
{
#pragma unroll
    for (int t = 0; t < TERMS; t++) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        terms[t] = *(const uint32_t *)&pair;
        low -= __uint_as_float(terms[t] << 16);
        high -= __uint_as_float(terms[t] & 0xffff0000u);
    }
}

#endif
