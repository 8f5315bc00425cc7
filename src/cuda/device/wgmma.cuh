/* SPDX-License-Identifier: Apache-2.0
 * wgmma.cuh: matrix products of a warpgroup on Hopper's tensor cores. An instruction computes
 * D[64,N] = A[64,16] B[16,N], or D += A B, with float32 sums. Needs sm_90a.
 *
 * Operands in shared memory are tiles [rows][64] of 16-bit elements with 128-byte swizzle, as a tensor map with that
 * swizzle writes them. A tile begins at a multiple of 1024 bytes. The 16-byte chunk c of row r is stored at chunk
 * c ^ (r % 8). A descriptor has the address of a tile. A product sums over its inner axis (k):
 *
 *   K-major     The columns of a tile are the inner axis, and its rows are the outer axis (m or n). The next 16 along the
 *               inner axis are at descriptor + COT_WGMMA_K_STEP. The next 64 are in another tile, with a descriptor of
 *               its own.
 *   MN-major    The rows of a tile are the inner axis, and its columns are the outer axis. The next 16 along the inner
 *               axis are at descriptor + COT_WGMMA_MN_STEP. The next 64 along the outer axis are in another tile,
 *               `stride_bytes` later, with the same descriptor.
 *
 * docs/kernels/gpu_basics.md has an example.
 *
 * A may also come from registers, in the accumulators' layout: register i of step k holds D[8k+2i] and D[8k+2i+1].
 * Element i of D, in lane l of warp w of the warpgroup, has row 16 w + l/4 + 8 (i/2 % 2) and
 * column 8 (i/4) + 2 (l%4) + i%2. */
#ifndef COT_CUDA_WGMMA_CUH
#define COT_CUDA_WGMMA_CUH

#include "element.cuh"
#include "ptx.cuh"

/* Fields of a descriptor:
 *   bits 0-13    address / 16
 *   bits 16-29   leading byte offset / 16. K-major: the hardware ignores it with a swizzle, and it is 1. MN-major: the
 *                distance from one tile to the next
 *   bits 32-45   stride byte offset / 16: 64, for the 1024 bytes of 8 rows of 128 bytes; 16, for 8 rows of 32 bytes
 *   bits 62-63   swizzle: 1 for 128 bytes, 3 for 32 bytes
 * Steps of 16 elements along the inner axis, also / 16. K_STEP: 16 columns, 32 bytes. MN_STEP: 16 rows, 2048 bytes. */
enum { COT_WGMMA_K_STEP = 2, COT_WGMMA_MN_STEP = 128 };

static __device__ __forceinline__ uint64_t cot_wgmma_k_major(uint32_t address)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

static __device__ __forceinline__ uint64_t cot_wgmma_mn_major(uint32_t address, uint32_t stride_bytes)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(stride_bytes >> 4) << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}

/* The same for tiles [rows][16] with 32-byte swizzle: rows of 32 bytes, the 16-byte chunk c of row r at chunk
 * c ^ (r / 4 % 2). The next 16 along the inner axis are in another tile (K-major), or at descriptor +
 * COT_WGMMA_MN_STEP_32 (MN-major). */
enum { COT_WGMMA_MN_STEP_32 = 32 };

static __device__ __forceinline__ uint64_t cot_wgmma_k_major_32(uint32_t address)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)16 << 32 | (uint64_t)3 << 62;
}

static __device__ __forceinline__ uint64_t cot_wgmma_mn_major_32(uint32_t address, uint32_t stride_bytes)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(stride_bytes >> 4) << 16 | (uint64_t)16 << 32 |
           (uint64_t)3 << 62;
}

/* Required before the first product that reads registers (A or accumulators) written by ordinary instructions. */
static __device__ __forceinline__ void cot_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* Commits the preceding products as one group. */
static __device__ __forceinline__ void cot_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most PENDING groups are incomplete. */
template <int PENDING> static __device__ __forceinline__ void cot_wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Waits until all groups are complete, but not before `value` has been computed. `value` is never -1.
 * ptxas would move the wait up, before the arithmetic that should overlap with the products. It does not move a wait
 * past a store. The store to `shared` here is predicated on value == -1, so that it never happens. */
static __device__ __forceinline__ void cot_wgmma_wait_after(float value, void *shared)
{
    asm volatile(
        "{\n    .reg .pred never;\n    setp.eq.f32 never, %0, 0fBF800000;\n    @never st.shared.f32 [%1], %0;\n}" ::"f"(
            value),
        "r"(cot_shared_address(shared))
        : "memory");
    cot_wgmma_wait<0>();
}

/* The accumulators of an instruction, as operand numbers (COT_WGMMA_NAMES_N) and as operands (COT_WGMMA_OPERANDS_N), in
 * steps of 16 columns. The numbers of the other operands follow those of the accumulators. */
/* clang-format off */
#define COT_WGMMA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define COT_WGMMA_NAMES_32 COT_WGMMA_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define COT_WGMMA_NAMES_48 COT_WGMMA_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define COT_WGMMA_NAMES_64 COT_WGMMA_NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define COT_WGMMA_NAMES_80 COT_WGMMA_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define COT_WGMMA_NAMES_96 COT_WGMMA_NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define COT_WGMMA_NAMES_112 COT_WGMMA_NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define COT_WGMMA_NAMES_128 COT_WGMMA_NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define COT_WGMMA_NAMES_144 COT_WGMMA_NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define COT_WGMMA_NAMES_160 COT_WGMMA_NAMES_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define COT_WGMMA_NAMES_176 COT_WGMMA_NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define COT_WGMMA_NAMES_192 COT_WGMMA_NAMES_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define COT_WGMMA_NAMES_208 COT_WGMMA_NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define COT_WGMMA_NAMES_224 COT_WGMMA_NAMES_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define COT_WGMMA_NAMES_240 COT_WGMMA_NAMES_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define COT_WGMMA_NAMES_256 COT_WGMMA_NAMES_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define COT_WGMMA_8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define COT_WGMMA_OPERANDS_16(d) COT_WGMMA_8(d, 0)
#define COT_WGMMA_OPERANDS_32(d) COT_WGMMA_OPERANDS_16(d), COT_WGMMA_8(d, 8)
#define COT_WGMMA_OPERANDS_48(d) COT_WGMMA_OPERANDS_32(d), COT_WGMMA_8(d, 16)
#define COT_WGMMA_OPERANDS_64(d) COT_WGMMA_OPERANDS_48(d), COT_WGMMA_8(d, 24)
#define COT_WGMMA_OPERANDS_80(d) COT_WGMMA_OPERANDS_64(d), COT_WGMMA_8(d, 32)
#define COT_WGMMA_OPERANDS_96(d) COT_WGMMA_OPERANDS_80(d), COT_WGMMA_8(d, 40)
#define COT_WGMMA_OPERANDS_112(d) COT_WGMMA_OPERANDS_96(d), COT_WGMMA_8(d, 48)
#define COT_WGMMA_OPERANDS_128(d) COT_WGMMA_OPERANDS_112(d), COT_WGMMA_8(d, 56)
#define COT_WGMMA_OPERANDS_144(d) COT_WGMMA_OPERANDS_128(d), COT_WGMMA_8(d, 64)
#define COT_WGMMA_OPERANDS_160(d) COT_WGMMA_OPERANDS_144(d), COT_WGMMA_8(d, 72)
#define COT_WGMMA_OPERANDS_176(d) COT_WGMMA_OPERANDS_160(d), COT_WGMMA_8(d, 80)
#define COT_WGMMA_OPERANDS_192(d) COT_WGMMA_OPERANDS_176(d), COT_WGMMA_8(d, 88)
#define COT_WGMMA_OPERANDS_208(d) COT_WGMMA_OPERANDS_192(d), COT_WGMMA_8(d, 96)
#define COT_WGMMA_OPERANDS_224(d) COT_WGMMA_OPERANDS_208(d), COT_WGMMA_8(d, 104)
#define COT_WGMMA_OPERANDS_240(d) COT_WGMMA_OPERANDS_224(d), COT_WGMMA_8(d, 112)
#define COT_WGMMA_OPERANDS_256(d) COT_WGMMA_OPERANDS_240(d), COT_WGMMA_8(d, 120)
#define COT_WGMMA_SHARED(N, type, na, nb, np, nta, ntb) \
    asm volatile("{\n    .reg .pred p;\n    setp.ne.b32 p, %" #np ", 0;\n" \
                 "    wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" COT_WGMMA_NAMES_##N "}, " \
                 "%" #na ", %" #nb ", p, 1, 1, %" #nta ", %" #ntb ";\n}" \
                 : COT_WGMMA_OPERANDS_##N(d) : "l"(a), "l"(b), "r"((int)accumulate), "n"((int)A_MN), "n"((int)B_MN))
#define COT_WGMMA_REGISTERS(N, type, n0, n1, n2, n3, nb, np, ntb) \
    asm volatile("{\n    .reg .pred p;\n    setp.ne.b32 p, %" #np ", 0;\n" \
                 "    wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" COT_WGMMA_NAMES_##N "}, " \
                 "{%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #nb ", p, 1, 1, %" #ntb ";\n}" \
                 : COT_WGMMA_OPERANDS_##N(d) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"((int)B_MN))

/* d = A B, or d += A B with `accumulate`, for N columns. The first overload reads A and B from shared memory, the
 * second reads A from the registers a[0] to a[3]. A_MN, B_MN: that operand is MN-major. */
#define COT_WGMMA_DEFINE(N, n0, n1, n2, n3, n4, n5, n6) \
    template <typename E, bool A_MN, bool B_MN> \
    static __device__ __forceinline__ void cot_wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) \
    { \
        if constexpr (cot_is_f16<E>) \
            COT_WGMMA_SHARED(N, "f16", n0, n1, n2, n3, n4); \
        else \
            COT_WGMMA_SHARED(N, "bf16", n0, n1, n2, n3, n4); \
    } \
    template <typename E, bool B_MN> \
    static __device__ __forceinline__ void cot_wgmma(float (&d)[N / 2], const uint32_t *a, uint64_t b, bool accumulate) \
    { \
        if constexpr (cot_is_f16<E>) \
            COT_WGMMA_REGISTERS(N, "f16", n0, n1, n2, n3, n4, n5, n6); \
        else \
            COT_WGMMA_REGISTERS(N, "bf16", n0, n1, n2, n3, n4, n5, n6); \
    }
COT_WGMMA_DEFINE(32, 16, 17, 18, 19, 20, 21, 22)
COT_WGMMA_DEFINE(64, 32, 33, 34, 35, 36, 37, 38)
COT_WGMMA_DEFINE(80, 40, 41, 42, 43, 44, 45, 46)
COT_WGMMA_DEFINE(96, 48, 49, 50, 51, 52, 53, 54)
COT_WGMMA_DEFINE(112, 56, 57, 58, 59, 60, 61, 62)
COT_WGMMA_DEFINE(128, 64, 65, 66, 67, 68, 69, 70)
COT_WGMMA_DEFINE(160, 80, 81, 82, 83, 84, 85, 86)
COT_WGMMA_DEFINE(176, 88, 89, 90, 91, 92, 93, 94)
COT_WGMMA_DEFINE(192, 96, 97, 98, 99, 100, 101, 102)
COT_WGMMA_DEFINE(256, 128, 129, 130, 131, 132, 133, 134)
/* clang-format on */

/* Stores four 8 x 8 matrices of 16-bit elements to shared memory, each transposed. The registers have the accumulators'
 * layout. Lane l passes the address for column l%8 of matrix l/8. */
static __device__ __forceinline__ void cot_stmatrix_x4_trans(uint32_t address, const uint32_t *r)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

#endif
