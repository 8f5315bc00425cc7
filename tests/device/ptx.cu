/* SPDX-License-Identifier: Apache-2.0
 *
 * ptx.cu: one small kernel for each wrapper of an instruction under src/cuda/device. test_ptx.c runs and checks them. A
 * kernel is named after the wrapper or the mechanism that it tests. */
#include "ptx.h"

#include "cuda/device/bulk.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/wgmma.cuh"

#define KERNEL(name, threads) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ ptx_call c)

static __device__ __forceinline__ void begin_barrier(uint64_t *barrier, uint32_t arrivals)
{
    if (threadIdx.x == 0) {
        cot_mbarrier_init(barrier, arrivals);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
}

/* ---- barriers of shared memory ------------------------------------------------------------------------ */

/* out[0]: whether the phase had completed before the first arrival. out[1 + thread]: the sum of the values that the
 * warps wrote before they arrived, as the thread reads them. out[129 + thread]: the same one phase later. */
KERNEL(mbarrier, 128)
{
    __shared__ uint64_t barrier;
    __shared__ volatile uint32_t written[2][4];
    uint32_t *out = (uint32_t *)c.out;
    const int warp = threadIdx.x / 32;
    begin_barrier(&barrier, 4);
    if (threadIdx.x == 0)
        out[0] = cot_mbarrier_try_wait(&barrier, 0);
    __syncthreads();
    for (int phase = 0; phase < 2; phase++) {
        if (threadIdx.x % 32 == 0) {
            for (int i = 0; i < 100 * warp; i++) /* warps with larger numbers arrive later */
                __nanosleep(20);
            written[phase][warp] = 10 * phase + warp + 1;
            cot_mbarrier_arrive(&barrier);
        }
        cot_mbarrier_wait(&barrier, phase);
        out[1 + 128 * phase + threadIdx.x] =
            written[phase][0] + written[phase][1] + written[phase][2] + written[phase][3];
    }
}

/* Pieces of memory pass through a pipeline of two stages. A stage is refilled when all threads have read it. */
KERNEL(ring, 64)
{
    __shared__ uint64_t full[2], empty[2];
    __shared__ __align__(128) uint32_t stages[2][64];
    begin_barrier(&full[0], 1);
    begin_barrier(&full[1], 1);
    begin_barrier(&empty[0], 64);
    begin_barrier(&empty[1], 64);
    cot_pipeline_state<2> producer, consumer;
    int loaded = 0;
    for (int piece = 0; piece < PTX_PIECES; piece++, consumer.next()) {
        for (; threadIdx.x == 0 && loaded < PTX_PIECES && loaded < piece + 2; loaded++, producer.next()) {
            if (loaded >= 2)
                cot_mbarrier_wait(&empty[producer.stage], producer.parity ^ 1);
            cot_mbarrier_arrive_expect(&full[producer.stage], sizeof stages[0]);
            cot_bulk_load(stages[producer.stage], (const uint32_t *)c.in + 64 * loaded, sizeof stages[0],
                          &full[producer.stage]);
        }
        cot_mbarrier_wait(&full[consumer.stage], consumer.parity);
        ((uint32_t *)c.out)[64 * piece + threadIdx.x] = stages[consumer.stage][threadIdx.x];
        cot_mbarrier_arrive(&empty[consumer.stage]);
    }
}

/* ---- bulk copies -------------------------------------------------------------------------------------- */

KERNEL(bulk_load, 128)
{
    __shared__ uint64_t full;
    __shared__ __align__(16) uint32_t tile[128];
    begin_barrier(&full, 1);
    if (threadIdx.x == 0) {
        cot_mbarrier_arrive_expect(&full, sizeof tile);
        cot_bulk_load(tile, c.in, sizeof tile / 2, &full);
        cot_bulk_load(tile + 64, (const uint32_t *)c.in + 64, sizeof tile / 2, &full);
    }
    cot_mbarrier_wait(&full, 0);
    ((uint32_t *)c.out)[threadIdx.x] = tile[threadIdx.x];
}

/* Stores two groups. Copies the data of the first group to out[256 + i] while the second group may still be pending. */
KERNEL(bulk_store, 128)
{
    __shared__ __align__(16) uint32_t tile[256];
    uint32_t *out = (uint32_t *)c.out;
    tile[threadIdx.x] = ((const uint32_t *)c.in)[threadIdx.x];
    tile[threadIdx.x + 128] = ((const uint32_t *)c.in)[threadIdx.x + 128];
    cot_fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        cot_bulk_store(out, tile, 512);
        cot_bulk_commit();
        cot_bulk_store(out + 128, tile + 128, 512);
        cot_bulk_commit();
        cot_bulk_wait_group<1>();
        for (int i = 0; i < 128; i++)
            out[256 + i] = ((volatile uint32_t *)out)[i];
        cot_bulk_wait();
        for (int i = 128; i < 256; i++)
            out[256 + i] = ((volatile uint32_t *)out)[i];
    }
}

/* Every block adds its number plus one, then 100 times as much. Shared memory is rewritten as soon as the copy has
 * read it. */
KERNEL(bulk_add_f32, 64)
{
    __shared__ __align__(16) float tile[64];
    for (int half = 0; half < 2; half++) {
        tile[threadIdx.x] = (float)(blockIdx.x + 1) * (half == 0 ? 1.0f : 100.0f);
        cot_fence_proxy_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            cot_bulk_add_f32((float *)c.out, tile, sizeof tile);
            cot_bulk_commit();
            cot_bulk_wait_read();
        }
        __syncthreads();
    }
}

/* Threads store to global memory, and a bulk copy reads it: out[128 + i] is in[i] + 1. */
KERNEL(fence_async_global, 128)
{
    __shared__ uint64_t full;
    __shared__ __align__(16) uint32_t tile[128];
    uint32_t *out = (uint32_t *)c.out;
    out[threadIdx.x] = ((const uint32_t *)c.in)[threadIdx.x] + 1;
    begin_barrier(&full, 1);
    if (threadIdx.x == 0) {
        cot_fence_proxy_async_global();
        cot_mbarrier_arrive_expect(&full, sizeof tile);
        cot_bulk_load(tile, out, sizeof tile, &full);
    }
    cot_mbarrier_wait(&full, 0);
    out[128 + threadIdx.x] = tile[threadIdx.x];
}

/* ---- synchronisation of kernels, blocks and warps ----------------------------------------------------- */

/* Allows the next kernel to start, waits, and then writes the data that the next kernel reads. */
KERNEL(launch_dependents, 32)
{
    cot_griddepcontrol_launch_dependents();
    for (int i = 0; i < 5000; i++)
        __nanosleep(20);
    ((uint32_t *)c.out)[blockIdx.x * 32 + threadIdx.x] = 1000 + blockIdx.x * 32 + threadIdx.x;
}

KERNEL(griddepcontrol_wait, 32)
{
    cot_griddepcontrol_wait();
    ((uint32_t *)c.out)[blockIdx.x * 32 + threadIdx.x] = ((const uint32_t *)c.in)[blockIdx.x * 32 + threadIdx.x] + 1;
}

/* Block i reads the value v of block i-1 and writes 3 v + 1. in2: the counter. */
KERNEL(counters, 32)
{
    uint32_t *counter = (uint32_t *)(uintptr_t)c.in2, *out = (uint32_t *)c.out;
    if (threadIdx.x == 0) {
        while (cot_load_acquire(counter) != blockIdx.x) {}
        out[blockIdx.x] = blockIdx.x == 0 ? 1 : 3 * ((volatile uint32_t *)out)[blockIdx.x - 1] + 1;
        cot_add_release(counter, 1);
    }
}

/* Warps 0 and 1 exchange numbers 8 times with barrier 1. Warps 2 and 3 do so 4 times with barrier 2. */
KERNEL(named_barrier, 128)
{
    __shared__ volatile uint32_t exchanged[2][64];
    const int pair = threadIdx.x / 64, thread = threadIdx.x % 64, rounds = pair == 0 ? 8 : 4;
    uint32_t value = threadIdx.x;
    for (int i = 0; i < rounds; i++) {
        exchanged[pair][thread] = value;
        if (pair == 0)
            cot_named_barrier<1>(64);
        else
            cot_named_barrier<2>(64);
        value = exchanged[pair][(thread + 33) % 64] + 1;
        if (pair == 0)
            cot_named_barrier<1>(64);
        else
            cot_named_barrier<2>(64);
    }
    ((uint32_t *)c.out)[threadIdx.x] = value;
}

KERNEL(elect, 128)
{
    ((uint32_t *)c.out)[threadIdx.x] = cot_elect_one();
}

/* The first warpgroup releases registers. The second warpgroup acquires and needs them: it loads 128 numbers before
 * it sums their products. */
KERNEL(setmaxnreg, 256)
{
    const float *in = (const float *)c.in;
    float *out = (float *)c.out;
    if (threadIdx.x < 128) {
        cot_setmaxnreg_dec<40>();
        out[threadIdx.x] = in[threadIdx.x];
    } else {
        cot_setmaxnreg_inc<232>();
        float loaded_values[128], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 128; i++)
            loaded_values[i] = ((const volatile float *)in)[(threadIdx.x + i) % 128];
#pragma unroll
        for (int i = 0; i < 128; i++)
            sum += loaded_values[i] * loaded_values[127 - i];
        out[threadIdx.x] = sum;
    }
}

/* ---- clusters ----------------------------------------------------------------------------------------- */

/* Each block writes 16 bytes to the next block, which waits for them at its own barrier. out: 4 words per block. */
KERNEL(store_async, 32)
{
    __shared__ uint64_t full;
    __shared__ __align__(16) uint32_t received[4];
    const uint32_t rank = cot_cluster_rank(), next = (rank + 1) % PTX_CLUSTER;
    begin_barrier(&full, 1);
    if (threadIdx.x == 0)
        cot_mbarrier_arrive_expect(&full, sizeof received);
    cot_cluster_arrive();
    cot_cluster_wait();
    if (threadIdx.x == 0)
        cot_store_async(cot_mapa(cot_shared_address(received), next), cot_mapa(cot_shared_address(&full), next),
                        10 * rank, 10 * rank + 1, 10 * rank + 2, 10 * rank + 3);
    cot_mbarrier_wait(&full, 0);
    if (threadIdx.x < 4)
        ((uint32_t *)c.out)[4 * blockIdx.x + threadIdx.x] = received[threadIdx.x];
    cot_cluster_arrive(); /* no block exits while another block may write to it */
    cot_cluster_wait();
}

/* Each block copies 64 words to the next block, twice. The second copy waits until that block has read the first. */
KERNEL(bulk_copy_to_block, 64)
{
    __shared__ uint64_t full, consumed;
    __shared__ __align__(16) uint32_t received[64], sent[64];
    const uint32_t rank = cot_cluster_rank(), next = (rank + 1) % PTX_CLUSTER,
                   previous = (rank + PTX_CLUSTER - 1) % PTX_CLUSTER;
    begin_barrier(&full, 1);
    begin_barrier(&consumed, 64);
    cot_cluster_arrive();
    cot_cluster_wait();
    for (uint32_t round = 0; round < 2; round++) {
        if (round > 0)
            cot_mbarrier_wait(&consumed, 0); /* also implies that the copy has read `sent` */
        sent[threadIdx.x] = 1000 * round + 100 * rank + threadIdx.x;
        cot_fence_proxy_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            cot_mbarrier_arrive_expect(&full, sizeof received);
            cot_bulk_copy_to_block(cot_mapa(cot_shared_address(received), next), cot_shared_address(sent), sizeof sent,
                                   cot_mapa(cot_shared_address(&full), next));
        }
        cot_mbarrier_wait(&full, round);
        ((uint32_t *)c.out)[128 * blockIdx.x + 64 * round + threadIdx.x] = received[threadIdx.x];
        cot_mbarrier_arrive_remote(cot_mapa(cot_shared_address(&consumed), previous));
    }
    cot_cluster_arrive();
    cot_cluster_wait();
}

/* ---- products and fragments of a warp ----------------------------------------------------------------- */

/* mma kernels: in: A [16][16], in2: B [16][8], both row-major, 16-bit; out: 1 + A B [16][8], f32. */
static __device__ __forceinline__ uint32_t pair_at(const void *matrix, int first, int second)
{
    const uint16_t *m = (const uint16_t *)matrix;
    return m[first] | (uint32_t)m[second] << 16;
}

static __device__ __forceinline__ void store_c(const ptx_call &c, const float (&sums)[4])
{
    const int g = threadIdx.x / 4, q = threadIdx.x % 4;
    float *out = (float *)c.out;
    out[8 * g + 2 * q] = sums[0];
    out[8 * g + 2 * q + 1] = sums[1];
    out[8 * (g + 8) + 2 * q] = sums[2];
    out[8 * (g + 8) + 2 * q + 1] = sums[3];
}

#define MMA_KERNEL(name)                                                                                           \
    KERNEL(name, 32)                                                                                               \
    {                                                                                                              \
        const int g = threadIdx.x / 4, q = threadIdx.x % 4, row = 16 * g + 2 * q, b = 16 * q + g;                  \
        float sums[4] = {1, 1, 1, 1};                                                                              \
        cot_##name(sums, pair_at(c.in, row, row + 1), pair_at(c.in, row + 128, row + 129),                         \
                   pair_at(c.in, row + 8, row + 9), pair_at(c.in, row + 136, row + 137), pair_at(c.in2, b, b + 8), \
                   pair_at(c.in2, b + 64, b + 72));                                                                \
        store_c(c, sums);                                                                                          \
    }
/* clang-format off */
MMA_KERNEL(mma_bf16)
MMA_KERNEL(mma_f16)
/* clang-format on */

/* Uses the first eight columns of A and the first eight rows of B. */
KERNEL(mma_f16_k8, 32)
{
    const int g = threadIdx.x / 4, q = threadIdx.x % 4, row = 16 * g + 2 * q, b = 16 * q + g;
    float sums[4] = {1, 1, 1, 1};
    cot_mma_f16_k8(sums, pair_at(c.in, row, row + 1), pair_at(c.in, row + 128, row + 129), pair_at(c.in2, b, b + 8));
    store_c(c, sums);
}

/* in: four matrices [8][8] of 16-bit elements; out[4 * lane + i]: a lane's register of matrix i. */
template <bool TRANSPOSED> static __device__ __forceinline__ void load_matrices(const ptx_call &c)
{
    __shared__ __align__(16) uint32_t matrices[4][32];
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        matrices[i][threadIdx.x] = ((const uint32_t *)c.in)[32 * i + threadIdx.x];
    __syncthreads();
    const uint32_t address = cot_shared_address(matrices) + 16 * threadIdx.x;
    if (TRANSPOSED)
        cot_ldmatrix_x4_trans(r, address);
    else
        cot_ldmatrix_x4(r, address);
#pragma unroll
    for (int i = 0; i < 4; i++)
        ((uint32_t *)c.out)[4 * threadIdx.x + i] = r[i];
}

KERNEL(ldmatrix_x4, 32)
{
    load_matrices<false>(c);
}

KERNEL(ldmatrix_x4_trans, 32)
{
    load_matrices<true>(c);
}

/* The inverse of ldmatrix_x4_trans. */
KERNEL(stmatrix_x4_trans, 32)
{
    __shared__ __align__(16) uint32_t matrices[4][32];
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        r[i] = ((const uint32_t *)c.in)[4 * threadIdx.x + i];
    cot_stmatrix_x4_trans(cot_shared_address(matrices) + 16 * threadIdx.x, r);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++)
        ((uint32_t *)c.out)[32 * i + threadIdx.x] = matrices[i][threadIdx.x];
}

/* in: 64 floats, two per thread; out: their terms as pairs. */
KERNEL(split_bf16, 32)
{
    uint32_t terms[PTX_TERMS];
    cot_split_bf16(((const float *)c.in)[2 * threadIdx.x], ((const float *)c.in)[2 * threadIdx.x + 1], terms);
#pragma unroll
    for (int t = 0; t < PTX_TERMS; t++)
        ((uint32_t *)c.out)[32 * t + threadIdx.x] = terms[t];
}

/* in: 64 floats; out: the same after conversion to pairs of E and back. */
template <typename E> static __device__ __forceinline__ void pack_and_unpack(const ptx_call &c)
{
    const float *in = (const float *)c.in + 2 * threadIdx.x;
    ((float2 *)c.out)[threadIdx.x] = cot_unpack_pair<E>(cot_pack_pair<E>(in[0], in[1]));
}

KERNEL(pack_pair_bf16, 32)
{
    pack_and_unpack<__nv_bfloat16>(c);
}

KERNEL(pack_pair_f16, 32)
{
    pack_and_unpack<__half>(c);
}

/* ---- products of a warpgroup -------------------------------------------------------------------------- */

/* The byte offset of element [r][column] in a tile [rows][64] of 16-bit elements with 128-byte swizzle. */
static __device__ __forceinline__ int swizzled(int r, int column)
{
    return r * 128 + (column / 8 ^ r % 8) * 16 + column % 8 * 2;
}

/* Copies a matrix [outer][PTX_WGMMA_K] of 16-bit elements to shared memory. K-major: one tile of `outer` rows.
 * MN-major: outer / 64 tiles of PTX_WGMMA_K rows. */
template <bool MN> static __device__ __forceinline__ void load_tile(unsigned char *to, const void *from, int outer)
{
    for (int i = threadIdx.x; i < outer * PTX_WGMMA_K; i += 128) {
        const int o = i / PTX_WGMMA_K, k = i % PTX_WGMMA_K;
        unsigned char *at = MN ? to + o / 64 * (PTX_WGMMA_K * 128) + swizzled(k, o % 64) : to + swizzled(o, k);
        *(uint16_t *)at = ((const uint16_t *)from)[i];
    }
}

template <bool MN> static __device__ __forceinline__ uint64_t descriptor(const unsigned char *tile, int step)
{
    const uint32_t address = cot_shared_address(tile);
    return MN ? cot_wgmma_mn_major(address, PTX_WGMMA_K * 128) + step * COT_WGMMA_MN_STEP
              : cot_wgmma_k_major(address) + step * COT_WGMMA_K_STEP;
}

/* in: A [64][K], in2: B [N][K]; out: [64][2 N], A B^T twice. The left half loads A from shared memory, the right
 * half holds A in registers. In both, the first wgmma overwrites the accumulators and the others accumulate. */
template <typename E, int N, bool A_MN, bool B_MN> static __device__ __forceinline__ void multiply(const ptx_call &c)
{
    __shared__ __align__(1024) unsigned char a[64 * PTX_WGMMA_K * 2], b[N * PTX_WGMMA_K * 2];
    float from_shared[N / 2], from_registers[N / 2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    load_tile<A_MN>(a, c.in, 64);
    load_tile<B_MN>(b, c.in2, N);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        from_shared[i] = from_registers[i] = 1e30f; /* the first wgmma must overwrite this */
    cot_fence_proxy_async();
    __syncthreads();
    uint32_t a_fragments[PTX_WGMMA_K / 16][4];
#pragma unroll
    for (int k = 0; k < PTX_WGMMA_K / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = 16 * warp + lane / 4 + 8 * (i % 2), column = 16 * k + 8 * (i / 2) + 2 * (lane % 4);
            a_fragments[k][i] = pair_at(c.in, row * PTX_WGMMA_K + column, row * PTX_WGMMA_K + column + 1);
        }
    cot_wgmma_fence();
#pragma unroll
    for (int k = 0; k < PTX_WGMMA_K / 16; k++)
        cot_wgmma<E, A_MN, B_MN>(from_shared, descriptor<A_MN>(a, k), descriptor<B_MN>(b, k), k > 0);
    cot_wgmma_commit();
#pragma unroll
    for (int k = 0; k < PTX_WGMMA_K / 16; k++)
        cot_wgmma<E, B_MN>(from_registers, a_fragments[k], descriptor<B_MN>(b, k), k > 0);
    cot_wgmma_commit();
    cot_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        ((float *)c.out)[row * 2 * N + column] = from_shared[i];
        ((float *)c.out)[row * 2 * N + N + column] = from_registers[i];
    }
}

#define WGMMA_KERNEL(name, E, N, A_MN, B_MN) \
    KERNEL(name, 128)                        \
    {                                        \
        multiply<E, N, A_MN, B_MN>(c);       \
    }
/* clang-format off */
WGMMA_KERNEL(wgmma_bf16_64_kk, __nv_bfloat16, 64, false, false)
WGMMA_KERNEL(wgmma_bf16_64_km, __nv_bfloat16, 64, false, true)
WGMMA_KERNEL(wgmma_bf16_64_mk, __nv_bfloat16, 64, true, false)
WGMMA_KERNEL(wgmma_bf16_64_mm, __nv_bfloat16, 64, true, true)
WGMMA_KERNEL(wgmma_bf16_128_kk, __nv_bfloat16, 128, false, false)
WGMMA_KERNEL(wgmma_bf16_128_mm, __nv_bfloat16, 128, true, true)
WGMMA_KERNEL(wgmma_f16_64_km, __half, 64, false, true)
WGMMA_KERNEL(wgmma_f16_128_mk, __half, 128, true, false)
/* clang-format on */
