/* SPDX-License-Identifier: Apache-2.0
 * test_ptx.c: tests the instruction wrappers under src/cuda/device, except those of tensor maps. Each test runs a small
 * kernel of ptx.cu. Numbers are small integers, so that products and sums are exact. Exit status 77, "skipped",
 * without a GPU of compute capability 9.0, which most of the instructions need. */
#include "device_queue.h"
#include "ptx.h"
#include "support.h"

#include "core/float16.h"
#include "cuda/device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_BYTES = 1 << 17 };

extern const unsigned char ptx_image[]; /* ptx.cu, compiled */

static cot_queue *queue;
static CUlibrary library;

/* A buffer on host and device. Inputs are copied to the device before a launch and outputs to the host after it. */
typedef struct mirrored {
    void *host, *device;
} mirrored;

static mirrored in, in2, out;

static mirrored mirrored_alloc(void)
{
    mirrored t = {.host = malloc(MAX_BYTES)};
    assert_non_null(t.host);
    assert_ok(cot_cuda_alloc(queue, MAX_BYTES, &t.device));
    return t;
}

static void mirrored_free(mirrored *t)
{
    free(t->host);
    cot_cuda_free(queue, t->device);
}

static ptx_call default_call(void)
{
    return (ptx_call){.in = in.device, .in2 = in2.device, .out = out.device};
}

static void assert_driver(CUresult result, const char *what)
{
    assert_ok(result == CUDA_SUCCESS ? COT_OK : cot_cuda_fail(&queue->device->driver, result, what));
}

static void launch(const char *name, unsigned blocks, unsigned threads, unsigned cluster, bool dependent,
                   const ptx_call *call)
{
    CUkernel kernel;
    assert_driver(queue->device->driver.cuLibraryGetKernel(&kernel, library, name), name);
    CUlaunchAttribute attributes[2];
    unsigned count = 0;
    if (cluster > 0)
        attributes[count++] =
            (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.clusterDim = {cluster, 1, 1}};
    if (dependent)
        attributes[count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                                  .value.programmaticStreamSerializationAllowed = 1};
    CUlaunchConfig config = {.gridDimX = blocks,
                             .gridDimY = 1,
                             .gridDimZ = 1,
                             .blockDimX = threads,
                             .blockDimY = 1,
                             .blockDimZ = 1,
                             .hStream = queue->device->stream,
                             .attrs = attributes,
                             .numAttrs = count};
    void *arguments[] = {(void *)(uintptr_t)call};
    assert_ok(cot_cuda_enter(queue->device));
    const CUresult result = queue->device->driver.cuLaunchKernelEx(&config, (CUfunction)kernel, arguments, NULL);
    cot_cuda_leave(queue->device);
    assert_driver(result, name);
}

static void copy_to_device(void)
{
    assert_ok(cot_cuda_copy_to_device(queue, in.device, in.host, MAX_BYTES));
    assert_ok(cot_cuda_copy_to_device(queue, in2.device, in2.host, MAX_BYTES));
    assert_ok(cot_cuda_copy_to_device(queue, out.device, out.host, MAX_BYTES));
}

static void copy_to_host(void)
{
    assert_ok(cot_cuda_copy_to_host(queue, out.host, out.device, MAX_BYTES));
}

/* A value that no kernel computes. */
static void fill_out_with_garbage(void)
{
    memset(out.host, 0xcd, MAX_BYTES);
}

/* Fills `in` with 0, 1, 2, ... A test may overwrite it. */
static int begin(void **state)
{
    (void)state;
    fill_out_with_garbage();
    for (int i = 0; i < MAX_BYTES / 4; i++)
        ((uint32_t *)in.host)[i] = (uint32_t)i;
    memset(in2.host, 0, MAX_BYTES);
    return 0;
}

static const uint32_t *run(const char *name, unsigned blocks, unsigned threads, const ptx_call *call)
{
    copy_to_device();
    launch(name, blocks, threads, 0, false, call);
    copy_to_host();
    return out.host;
}

static const uint32_t *run_default(const char *name, unsigned blocks, unsigned threads)
{
    const ptx_call call = default_call();
    return run(name, blocks, threads, &call);
}

static void assert_words(const uint32_t *words, int count, uint32_t first)
{
    for (int i = 0; i < count; i++)
        assert_int_equal(words[i], first + (uint32_t)i);
}

/* ---- barriers and copies ------------------------------------------------------------------------------ */

static void a_phase_completes_when_all_have_arrived(void **state)
{
    (void)state;
    const uint32_t *got = run_default("mbarrier", 1, 128);
    assert_int_equal(got[0], 0);
    for (int i = 0; i < 128; i++) {
        assert_int_equal(got[1 + i], 1 + 2 + 3 + 4);
        assert_int_equal(got[129 + i], 11 + 12 + 13 + 14);
    }
}

static void pieces_go_through_a_ring(void **state)
{
    (void)state;
    assert_words(run_default("ring", 1, 64), 64 * PTX_PIECES, 0);
}

static void runs_of_bytes_are_loaded(void **state)
{
    (void)state;
    assert_words(run_default("bulk_load", 1, 128), 128, 0);
}

static void runs_of_bytes_are_stored_in_groups(void **state)
{
    (void)state;
    const uint32_t *got = run_default("bulk_store", 1, 128);
    assert_words(got, 256, 0);
    assert_words(got + 256, 256, 0);
}

static void runs_of_floats_are_added(void **state)
{
    (void)state;
    for (int i = 0; i < 64; i++)
        ((float *)out.host)[i] = (float)i;
    const float *got = (const float *)run_default("bulk_add_f32", PTX_BLOCKS, 64);
    for (int i = 0; i < 64; i++)
        assert_true(got[i] == (float)(i + 101 * PTX_BLOCKS * (PTX_BLOCKS + 1) / 2));
}

static void the_copy_engine_sees_what_threads_stored(void **state)
{
    (void)state;
    assert_words(run_default("fence_async_global", 1, 128) + 128, 128, 1);
}

/* ---- synchronisation ------------------------------------------------------------------------------------- */

static void a_dependent_kernel_waits_for_what_it_reads(void **state)
{
    (void)state;
    ptx_call first = default_call(), second = default_call();
    first.out = in.device;
    copy_to_device();
    launch("launch_dependents", PTX_BLOCKS, 32, 0, false, &first);
    launch("griddepcontrol_wait", PTX_BLOCKS, 32, 0, true, &second);
    copy_to_host();
    assert_words(out.host, 32 * PTX_BLOCKS, 1001);
}

static void blocks_take_turns_by_a_counter(void **state)
{
    (void)state;
    const uint32_t *got = run_default("counters", PTX_BLOCKS, 32);
    uint32_t expected = 1;
    for (int i = 0; i < PTX_BLOCKS; i++, expected = 3 * expected + 1)
        assert_int_equal(got[i], expected);
}

static void named_barriers_are_apart(void **state)
{
    (void)state;
    const uint32_t *got = run_default("named_barrier", 1, 128);
    for (int i = 0; i < 128; i++) {
        const int pair = i / 64, rounds = pair == 0 ? 8 : 4;
        assert_int_equal(got[i], 64 * pair + (i % 64 + 33 * rounds) % 64 + rounds);
    }
}

static void one_lane_of_a_warp_is_elected(void **state)
{
    (void)state;
    const uint32_t *got = run_default("elect", 1, 128);
    for (int warp = 0; warp < 4; warp++) {
        uint32_t elected = 0;
        for (int lane = 0; lane < 32; lane++)
            elected += got[32 * warp + lane];
        assert_int_equal(elected, 1);
    }
}

static void registers_move_between_warpgroups(void **state)
{
    (void)state;
    for (int i = 0; i < 128; i++)
        ((float *)in.host)[i] = (float)(i % 11);
    const float *input = in.host, *got = (const float *)run_default("setmaxnreg", 1, 256);
    for (int thread = 0; thread < 128; thread++) {
        float sum = 0;
        for (int i = 0; i < 128; i++)
            sum += input[(thread + i) % 128] * input[(thread + 127 - i) % 128];
        assert_true(got[thread] == input[thread]);
        assert_true(got[128 + thread] == sum);
    }
}

static void blocks_of_a_cluster_write_to_each_other(void **state)
{
    (void)state;
    const ptx_call call = default_call();
    copy_to_device();
    launch("store_async", 2 * PTX_CLUSTER, 32, PTX_CLUSTER, false, &call);
    copy_to_host();
    for (int block = 0; block < 2 * PTX_CLUSTER; block++)
        assert_words((const uint32_t *)out.host + 4 * block, 4,
                     10 * (uint32_t)((block + PTX_CLUSTER - 1) % PTX_CLUSTER));
}

static void blocks_of_a_cluster_copy_to_each_other(void **state)
{
    (void)state;
    const ptx_call call = default_call();
    copy_to_device();
    launch("bulk_copy_to_block", 2 * PTX_CLUSTER, 64, PTX_CLUSTER, false, &call);
    copy_to_host();
    for (int block = 0; block < 2 * PTX_CLUSTER; block++)
        for (int round = 0; round < 2; round++)
            assert_words((const uint32_t *)out.host + 128 * block + 64 * round, 64,
                         (uint32_t)(1000 * round + 100 * ((block + PTX_CLUSTER - 1) % PTX_CLUSTER)));
}

/* ---- fragments and products --------------------------------------------------------------------------- */

static void fill(mirrored *matrix, cot_dtype dtype, int elements, uint64_t seed)
{
    for (int i = 0; i < elements; i++) {
        const float value = (float)random_int(&seed, -4, 4);
        ((uint16_t *)matrix->host)[i] = dtype == COT_F16 ? cot_f32_to_f16(value) : cot_f32_to_bf16(value);
    }
}

static float value_at(const mirrored *matrix, cot_dtype dtype, int i)
{
    const uint16_t bits = ((const uint16_t *)matrix->host)[i];
    return dtype == COT_F16 ? cot_f16_to_f32(bits) : cot_bf16_to_f32(bits);
}

static void check_mma(const char *kernel, cot_dtype dtype, int inner)
{
    fill_out_with_garbage();
    fill(&in, dtype, 16 * 16, 1);
    fill(&in2, dtype, 16 * 8, 2);
    const float *got = (const float *)run_default(kernel, 1, 32);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            float sum = 1;
            for (int k = 0; k < inner; k++)
                sum += value_at(&in, dtype, 16 * i + k) * value_at(&in2, dtype, 8 * k + j);
            assert_true(got[8 * i + j] == sum);
        }
}

static void a_warp_multiplies_matrices(void **state)
{
    (void)state;
    check_mma("mma_bf16", COT_BF16, 16);
    check_mma("mma_f16", COT_F16, 16);
    check_mma("mma_f16_k8", COT_F16, 8);
}

/* Element (row, column) of matrix i, 16 bits. */
static uint16_t element(const void *matrices, int i, int row, int column)
{
    return ((const uint16_t *)matrices)[64 * i + 8 * row + column];
}

static void matrices_are_loaded_into_fragments(void **state)
{
    (void)state;
    for (int transposed = 0; transposed < 2; transposed++) {
        fill_out_with_garbage();
        for (int i = 0; i < 4 * 64; i++)
            ((uint16_t *)in.host)[i] = (uint16_t)(i + 1);
        const uint32_t *got = run_default(transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4", 1, 32);
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int g = lane / 4, q = lane % 4;
                const uint32_t low = transposed ? element(in.host, i, 2 * q, g) : element(in.host, i, g, 2 * q);
                const uint32_t high =
                    transposed ? element(in.host, i, 2 * q + 1, g) : element(in.host, i, g, 2 * q + 1);
                assert_int_equal(got[4 * lane + i], low | high << 16);
            }
    }
}

static void fragments_are_stored_transposed(void **state)
{
    (void)state;
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            const uint32_t low = (uint32_t)(64 * i + 8 * (lane / 4) + 2 * (lane % 4));
            ((uint32_t *)in.host)[4 * lane + i] = low | (low + 1) << 16;
        }
    const uint32_t *got = run_default("stmatrix_x4_trans", 1, 32);
    for (int i = 0; i < 4; i++)
        for (int row = 0; row < 8; row++)
            for (int column = 0; column < 8; column++)
                assert_int_equal(element(got, i, column, row), 64 * i + 8 * row + column);
}

static void terms_add_up_to_what_was_split(void **state)
{
    (void)state;
    uint64_t seed = 5;
    for (int i = 0; i < 64; i++)
        ((float *)in.host)[i] = (float)random_real(&seed);
    const float *input = in.host;
    const uint32_t *got = run_default("split_bf16", 1, 32);
    for (int i = 0; i < 64; i++) {
        float sum = 0;
        for (int t = 0; t < PTX_TERMS; t++) {
            sum += cot_bf16_to_f32((uint16_t)(got[32 * t + i / 2] >> (16 * (i % 2))));
            assert_true(fabsf(input[i] - sum) <= ldexpf(fabsf(input[i]), -8 - 9 * t));
        }
    }
}

static void pairs_are_rounded_once(void **state)
{
    (void)state;
    for (int f16 = 0; f16 < 2; f16++) {
        uint64_t seed = 6;
        fill_out_with_garbage();
        for (int i = 0; i < 64; i++)
            ((float *)in.host)[i] = (float)random_real(&seed);
        const float *input = in.host,
                    *got = (const float *)run_default(f16 ? "pack_pair_f16" : "pack_pair_bf16", 1, 32);
        for (int i = 0; i < 64; i++)
            assert_true(got[i] ==
                        (f16 ? cot_f16_to_f32(cot_f32_to_f16(input[i])) : cot_bf16_to_f32(cot_f32_to_bf16(input[i]))));
    }
}

static void check_wgmma(const char *kernel, cot_dtype dtype, int N)
{
    fill_out_with_garbage();
    fill(&in, dtype, PTX_WGMMA_M * PTX_WGMMA_K, 3);
    fill(&in2, dtype, N * PTX_WGMMA_K, 4);
    const float *got = (const float *)run_default(kernel, 1, 128);
    for (int i = 0; i < PTX_WGMMA_M; i++)
        for (int j = 0; j < N; j++) {
            float sum = 0;
            for (int k = 0; k < PTX_WGMMA_K; k++)
                sum += value_at(&in, dtype, PTX_WGMMA_K * i + k) * value_at(&in2, dtype, PTX_WGMMA_K * j + k);
            if (got[2 * N * i + j] != sum || got[2 * N * i + N + j] != sum)
                fail_msg("%s [%d][%d]: %g, and from registers %g, expected %g", kernel, i, j,
                         (double)got[2 * N * i + j], (double)got[2 * N * i + N + j], (double)sum);
        }
}

static void a_warpgroup_multiplies_matrices(void **state)
{
    (void)state;
    check_wgmma("wgmma_bf16_64_kk", COT_BF16, 64);
    check_wgmma("wgmma_bf16_64_km", COT_BF16, 64);
    check_wgmma("wgmma_bf16_64_mk", COT_BF16, 64);
    check_wgmma("wgmma_bf16_64_mm", COT_BF16, 64);
    check_wgmma("wgmma_bf16_128_kk", COT_BF16, 128);
    check_wgmma("wgmma_bf16_128_mm", COT_BF16, 128);
    check_wgmma("wgmma_f16_64_km", COT_F16, 64);
    check_wgmma("wgmma_f16_128_mk", COT_F16, 128);
}

/* ---- the tests ---------------------------------------------------------------------------------------- */

#define TEST(name) cmocka_unit_test_setup(name, begin)

int main(void)
{
    const int none = open_device_queue(&queue);
    if (none != 0)
        return none;
    if (queue->device->capability != 90) {
        printf("skipped: the GPU is of compute capability %d.%d, these instructions are those of 9.0\n",
               queue->device->capability / 10, queue->device->capability % 10);
        cot_queue_destroy(queue);
        return SKIPPED;
    }
    const struct CMUnitTest tests[] = {
        TEST(a_phase_completes_when_all_have_arrived),
        TEST(pieces_go_through_a_ring),
        TEST(runs_of_bytes_are_loaded),
        TEST(runs_of_bytes_are_stored_in_groups),
        TEST(runs_of_floats_are_added),
        TEST(the_copy_engine_sees_what_threads_stored),
        TEST(a_dependent_kernel_waits_for_what_it_reads),
        TEST(blocks_take_turns_by_a_counter),
        TEST(named_barriers_are_apart),
        TEST(one_lane_of_a_warp_is_elected),
        TEST(registers_move_between_warpgroups),
        TEST(blocks_of_a_cluster_write_to_each_other),
        TEST(blocks_of_a_cluster_copy_to_each_other),
        TEST(a_warp_multiplies_matrices),
        TEST(matrices_are_loaded_into_fragments),
        TEST(fragments_are_stored_transposed),
        TEST(terms_add_up_to_what_was_split),
        TEST(pairs_are_rounded_once),
        TEST(a_warpgroup_multiplies_matrices),
    };
    assert_driver(queue->device->driver.cuLibraryLoadData(&library, ptx_image, NULL, NULL, 0, NULL, NULL, 0),
                  "loading ptx.cu");
    in = mirrored_alloc();
    in2 = mirrored_alloc();
    out = mirrored_alloc();
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    mirrored_free(&in), mirrored_free(&in2), mirrored_free(&out);
    queue->device->driver.cuLibraryUnload(library);
    cot_queue_destroy(queue);
    return failed;
}
