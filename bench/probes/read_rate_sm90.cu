/* SPDX-License-Identifier: Apache-2.0
 *
 * read_rate_sm90.cu: the rate at which one multiprocessor of a Hopper GPU reads device memory, while few or all others do
 * the same. A program of its own, for docs/experiments:
 *
 *     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Isrc -o read_rate bench/probes/read_rate_sm90.cu
 *     ./read_rate
 *
 * The tensor is that of mhc's backward: x[token][4 streams][7168 columns], bf16, 8192 tokens. Each thread block has 225
 * of the 227 KiB of shared memory of a multiprocessor. Three ways to read:
 *
 *   TMA       one thread loads boxes of 8 tokens, 4 streams and 1 to 8 chunks of 64 columns into a ring. Eight warps read
 *             them with ldmatrix. Small boxes are bound by the time that a box takes in this loop, not by memory.
 *   cp.async  each of 384 threads has a ring of entries of 16 bytes, and reads x from begin to end.
 *   loads     each of 384 threads loads up to 30 words of 16 bytes to registers (ld.global.nc.L1::no_allocate) before it
 *             uses the first, and reads x from begin to end.
 *
 * With all multiprocessors a launch is short, and its begin and end make the rate up to 5 % too low. */
#include "cuda/device/mma.cuh"
#include "cuda/device/ptx.cuh"

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    TOKENS = 8192,
    STREAMS = 4,
    COLUMNS = 7168,
    BOX_TOKENS = 8,
    CHUNK_COLUMNS = 64,
    THREADS = 384,
    READERS = 8, /* warps */
    SHARED_BYTES = 225 * 1024,
    REPEATS = 4
};
#define TENSOR_BYTES ((size_t)TOKENS * STREAMS * COLUMNS * 2)

extern __shared__ __align__(1024) unsigned char memory[];

/* Boxes of 4 KB times CHUNKS. Like the other kernels, adds all words that it reads to *total, which the host checks. */
template <int CHUNKS>
__global__ void __launch_bounds__(THREADS, 1) read_by_tma(const __grid_constant__ CUtensorMap map, uint32_t *total)
{
    constexpr int BYTES = BOX_TOKENS * STREAMS * CHUNKS * CHUNK_COLUMNS * 2, STAGES = SHARED_BYTES / BYTES;
    __shared__ uint64_t full[STAGES], empty[STAGES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++)
            cot_mbarrier_init(&full[i], 1), cot_mbarrier_init(&empty[i], READERS);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    cot_pipeline_state<STAGES> ring;
    uint32_t sum = 0;
    for (int token = (int)blockIdx.x * BOX_TOKENS; token < TOKENS; token += (int)gridDim.x * BOX_TOKENS)
        for (int chunk = 0; chunk < COLUMNS / CHUNK_COLUMNS; chunk += CHUNKS, ring.next()) {
            if (threadIdx.x == 32 * READERS) {
                cot_mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
                cot_mbarrier_arrive_expect(&full[ring.stage], BYTES);
                cot_tma_load_4d(memory + ring.stage * BYTES, &map, 0, token, chunk, 0, &full[ring.stage]);
            } else if (warp < READERS) {
                cot_mbarrier_wait(&full[ring.stage], ring.parity);
                const uint32_t from =
                    cot_shared_address(memory) + (uint32_t)(ring.stage * BYTES + warp * (BYTES / READERS) + lane * 16);
#pragma unroll
                for (int offset = 0; offset < BYTES / READERS; offset += 512) {
                    uint32_t words[4];
                    cot_ldmatrix_x4(words, from + (uint32_t)offset);
                    sum += words[0] + words[1] + words[2] + words[3];
                }
                __syncwarp();
                if (lane == 0)
                    cot_mbarrier_arrive(&empty[ring.stage]);
            }
        }
    atomicAdd(total, sum);
}

template <int ENTRIES> __global__ void __launch_bounds__(THREADS, 1) read_by_cp_async(const uint4 *x, uint32_t *total)
{
    const int64_t count = (int64_t)(TENSOR_BYTES / 16), step = (int64_t)gridDim.x * THREADS;
    uint4 *const ring = (uint4 *)memory + threadIdx.x;
    uint32_t sum = 0;
    int entry = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x - ENTRIES * step; i < count; i += step) {
        if (i >= 0) {
            cot_cp_async_wait_group<ENTRIES - 1>();
            const uint4 words = ring[entry * THREADS];
            sum += words.x + words.y + words.z + words.w;
        }
        if (i + ENTRIES * step < count)
            cot_cp_async_zfill<>(true, cot_shared_address(&ring[entry * THREADS]), x + i + ENTRIES * step);
        cot_cp_async_commit_group();
        entry = entry + 1 < ENTRIES ? entry + 1 : 0;
    }
    atomicAdd(total, sum);
}

template <int WORDS> __global__ void __launch_bounds__(THREADS, 1) read_to_registers(const uint4 *x, uint32_t *total)
{
    const int64_t count = (int64_t)(TENSOR_BYTES / 16), step = (int64_t)gridDim.x * THREADS * WORDS;
    uint32_t sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS * WORDS + threadIdx.x; i < count; i += step) {
        uint4 words[WORDS];
#pragma unroll
        for (int j = 0; j < WORDS; j++)
            if (i + j * THREADS < count)
                asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(words[j].x), "=r"(words[j].y), "=r"(words[j].z), "=r"(words[j].w)
                             : "l"(x + i + j * THREADS));
#pragma unroll
        for (int j = 0; j < WORDS; j++)
            sum += words[j].x + words[j].y + words[j].z + words[j].w;
    }
    atomicAdd(total, sum);
}

static void check(int error, const char *what)
{
    if (error != 0) {
        fprintf(stderr, "read_rate: %s: error %d\n", what, error);
        exit(1);
    }
}

/* Prints the rate of the fastest of several launches. source: the address of a kernel's first argument. */
static void measure(const char *name, const void *kernel, int blocks, void *source, uint32_t *total)
{
    void *arguments[] = {source, &total};
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES), name);
    cudaEvent_t begin, end;
    float best = 0;
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    for (int i = 0; i < REPEATS; i++) {
        float ms;
        check(cudaMemset(total, 0, sizeof *total), "cudaMemset");
        check(cudaEventRecord(begin), "cudaEventRecord");
        check(cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3(THREADS), arguments, SHARED_BYTES, NULL), name);
        check(cudaEventRecord(end), "cudaEventRecord");
        check(cudaEventSynchronize(end), name);
        check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
        uint32_t sum;
        check(cudaMemcpy(&sum, total, sizeof sum, cudaMemcpyDeviceToHost), "cudaMemcpy");
        check(sum != (uint32_t)(TENSOR_BYTES / 4 * 0x01010101), "not every byte was read once");
        best = i == 0 || ms < best ? ms : best;
    }
    printf("%-24s %6d %8.3f %8.1f\n", name, blocks, best, (double)TENSOR_BYTES / best / 1e6 / blocks);
}

/* The map of x for boxes of `chunks` chunks. */
static CUtensorMap map_of(decltype(&cuTensorMapEncodeTiled) encode, void *x, int chunks)
{
    CUtensorMap map;
    const cuuint64_t sizes[] = {CHUNK_COLUMNS, TOKENS, COLUMNS / CHUNK_COLUMNS, STREAMS},
                     strides[] = {STREAMS * COLUMNS * 2, CHUNK_COLUMNS * 2, COLUMNS * 2};
    const cuuint32_t box[] = {CHUNK_COLUMNS, BOX_TOKENS, (cuuint32_t)chunks, STREAMS}, steps[] = {1, 1, 1, 1};
    check(encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x, sizes, strides, box, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
          "cuTensorMapEncodeTiled");
    return map;
}

int main(void)
{
    void *x, *encode;
    uint32_t *total;
    cudaDriverEntryPointQueryResult found;
    int multiprocessors;
    check(cudaMalloc(&x, TENSOR_BYTES), "cudaMalloc");
    check(cudaMalloc(&total, sizeof(uint32_t)), "cudaMalloc");
    check(cudaMemset(x, 1, TENSOR_BYTES), "cudaMemset");
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    const decltype(&cuTensorMapEncodeTiled) encode_tiled = (decltype(&cuTensorMapEncodeTiled))encode;
    CUtensorMap maps[] = {map_of(encode_tiled, x, 8), map_of(encode_tiled, x, 4), map_of(encode_tiled, x, 2),
                          map_of(encode_tiled, x, 1)};
    const int blocks[] = {4, 20, multiprocessors};
    printf("%-24s %6s %8s %8s\n", "", "blocks", "ms", "GB/s of a block");
    for (int i = 0; i < 3; i++) {
        measure("TMA, boxes of 32 KB", (void *)read_by_tma<8>, blocks[i], &maps[0], total);
        measure("TMA, boxes of 16 KB", (void *)read_by_tma<4>, blocks[i], &maps[1], total);
        measure("TMA, boxes of 8 KB", (void *)read_by_tma<2>, blocks[i], &maps[2], total);
        measure("TMA, boxes of 4 KB", (void *)read_by_tma<1>, blocks[i], &maps[3], total);
        measure("cp.async, 16 entries", (void *)read_by_cp_async<16>, blocks[i], &x, total);
        measure("cp.async, 36 entries", (void *)read_by_cp_async<36>, blocks[i], &x, total);
        measure("loads, 8 words", (void *)read_to_registers<8>, blocks[i], &x, total);
        measure("loads, 30 words", (void *)read_to_registers<30>, blocks[i], &x, total);
    }
    return 0;
}
