/* SPDX-License-Identifier: Apache-2.0
 * test_emulator_amd.c: tests that the emulator has every instruction of the library's code objects, and that it stops
 * at planted faults: a missing s_waitcnt, an access out of bounds, an unknown instruction. The code objects are patched
 * copies of dropout's. MFMA instructions are compared with a product of matrices in long double, under the register
 * layouts that AMD documents. tools/compare_mfma_layouts.py compares these with AMD's matrix instruction calculator. */
#include "emulator.h"
#include "mfma_probe.h"
#include "support.h"

#include "core/float16.h"

#include "hip/driver.h"
#include "ops/dropout/cuda/dropout_cuda.h"

#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define DECLARE(name, parameters) int name parameters;
COT_HIP_FUNCTIONS(DECLARE)
const char *hipGetErrorString(int error);

static const char *const targets[] = {"gfx90a", "gfx942"};

static char *read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(*size);
    assert_int_equal(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

static void knows_every_instruction(void **state)
{
    (void)state;
    glob_t files;
    assert_int_equal(glob(HIP_CODE "/*.hipfb", 0, NULL, &files), 0);
    for (size_t f = 0; f < files.gl_pathc; f++)
        for (size_t t = 0; t < sizeof targets / sizeof *targets; t++) {
            size_t size;
            bool missing;
            char why[200];
            char *bundle = read_file(files.gl_pathv[f], &size);
            emu_code *code = emu_load(bundle, targets[t], &missing, why, sizeof why);
            assert_non_null(code);
            assert_true(code->kernel_count > 0 && code->count > 100);
            for (int k = 0; k < code->kernel_count; k++)
                assert_true(code->kernels[k].entry >= 0);
            for (int k = 0; k < code->count; k++)
                if (code->instructions[k].run == NULL)
                    fail_msg("%s, %s: %s", files.gl_pathv[f], targets[t], code->instructions[k].text);
            emu_unload(code);
            free(bundle);
        }
    globfree(&files);
}

/* The forward of 4 x 8 float32 with an x of `bytes` bytes, with `from` replaced by `to` in the words of the code whose
 * bits `mask` are those of `from`; at most `count` words. Returns what the launch returns. */
static int run_patched(const char *target, size_t bytes, uint32_t from, uint32_t mask, uint32_t to, int count)
{
    enum { R = 4, D = 8 };
    size_t size;
    void *module, *function, *x, *y;
    char *bundle = read_file(HIP_CODE "/dropout_fwd_rows.hipfb", &size);
    for (size_t at = 0; at + 4 <= size && count > 0; at += 4) {
        uint32_t word;
        memcpy(&word, bundle + at, 4);
        if ((word & mask) == from) {
            memcpy(bundle + at, &to, 4);
            count--;
        }
    }
    setenv("EMU_TARGET", target, 1);
    assert_int_equal(hipModuleLoadData(&module, bundle), COT_HIP_SUCCESS);
    assert_int_equal(hipModuleGetFunction(&function, module, "dropout_fwd_rows_cdna_f32"), COT_HIP_SUCCESS);
    assert_int_equal(hipMalloc(&x, bytes), COT_HIP_SUCCESS);
    assert_int_equal(hipMalloc(&y, R * D * 4), COT_HIP_SUCCESS);
    for (size_t k = 0; k < bytes / 4; k++)
        ((float *)x)[k] = (float)k;
    dropout_call c = {.R = R, .D = D, .groups = 1, .axes = 1, .source = 0, .scale = 2.0f};
    c.x = (dropout_array){.data = x, .stride = {D}, .column_stride = 1, .dtype = COT_F32};
    c.y = (dropout_array){.data = y, .stride = {D}, .column_stride = 1, .dtype = COT_F32};
    const int error = hipModuleLaunchKernel(function, 1, 1, 1, DROPOUT_THREADS, 1, 1, 0, NULL, (void *[]){&c}, NULL);
    if (error == COT_HIP_SUCCESS)
        for (int k = 0; k < R * D; k++)
            assert_true(((const float *)y)[k] == 2.0f * (float)k);
    hipFree(x);
    hipFree(y);
    return error; /* the bundle stays: the emulator keeps it by its address */
}

enum { LAUNCH_FAILURE = 719, ANY = 1 << 30 };
static const uint32_t s_nop = 0xbf800000u;

static void assert_stopped(const char *kernel, const char *reason)
{
    const char *message = hipGetErrorString(LAUNCH_FAILURE);
    if (strstr(message, kernel) == NULL || strstr(message, reason) == NULL)
        fail_msg("%s", message);
}

static void runs_the_kernel(void **state)
{
    (void)state;
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++)
        assert_int_equal(run_patched(targets[t], 128, 0, 0, 0, 0), COT_HIP_SUCCESS);
}

static void stops_at_a_missing_wait(void **state)
{
    (void)state;
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++) {
        assert_int_equal(run_patched(targets[t], 128, 0xbf8c0000u, 0xffff0000u, s_nop, ANY), LAUNCH_FAILURE);
        assert_stopped("dropout_fwd_rows_cdna_f32 stopped at 0x",
                       "is used before its load is complete: s_waitcnt is missing");
    }
}

static void stops_outside_of_an_allocation(void **state)
{
    (void)state;
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++) {
        assert_int_equal(run_patched(targets[t], 124, 0, 0, 0, 0), LAUNCH_FAILURE);
        assert_stopped("dropout_fwd_rows_cdna_f32 stopped at 0x", "are outside of every allocation");
        assert_stopped("block 0,0,0, wave 1, lane 33: global_load_dwordx4", "16 bytes at 0x");
    }
}

/* s_sethalt instead of s_endpgm. */
static void stops_at_an_unknown_instruction(void **state)
{
    (void)state;
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++) {
        assert_int_equal(run_patched(targets[t], 128, 0xbf810000u, ~0u, 0xbf8d0001u, ANY), LAUNCH_FAILURE);
        assert_stopped("s_sethalt 1", "the emulator lacks this instruction");
    }
}

/* ---- MFMA --------------------------------------------------------------------------------------------------- */

/* Where an instruction has an element: lane and number in the lane. k is the inner axis. */
typedef struct place {
    int lane, number;
} place;

typedef struct layout {
    place (*input)(int side, int terms, int row, int k);
    place (*result)(int side, int row, int column);
} layout;

/* A[i][k] and B[k][j] of 16 bits: lane side * floor(k / 4) + i, and 16-bit part k % 4 of the registers. float32: lane
 * side * k + i. `terms` is 4 or 1. */
static place documented_input(int side, int terms, int row, int k)
{
    return (place){side * (k / terms) + row, k % terms};
}

/* C[i][j] and D[i][j]. 32 x 32: register 4 * floor(i / 8) + i % 4, lane (32 * floor(i / 4)) % 64 + j.
 * 16 x 16: register i % 4, lane 16 * floor(i / 4) + j. */
static place documented_result(int side, int row, int column)
{
    return side == 32 ? (place){32 * (row / 4) % 64 + column, 4 * (row / 8) + row % 4}
                      : (place){16 * (row / 4) + column, row % 4};
}

/* Planted: the terms of a lane are `side` rows apart, not adjacent. */
static place wrong_input(int side, int terms, int row, int k)
{
    return (place){side * (k % (EMU_LANES / side)) + row, k / (EMU_LANES / side) % terms};
}

/* Planted: the result is transposed. */
static place transposed_result(int side, int row, int column)
{
    return documented_result(side, column, row);
}

/* Planted: a lane has adjacent rows. */
static place wrong_result(int side, int row, int column)
{
    const int rows = side * side / EMU_LANES;
    return (place){row / rows * side + column, row % rows};
}

typedef struct mfma {
    const char *kernel;
    int side;
    cot_dtype dtype;
} mfma;

static const mfma instructions[] = {{"mfma_32_f16", 32, COT_F16},   {"mfma_32_bf16", 32, COT_BF16},
                                    {"mfma_32_f32", 32, COT_F32},   {"mfma_16_f16", 16, COT_F16},
                                    {"mfma_16_bf16", 16, COT_BF16}, {"mfma_16_f32", 16, COT_F32}};

enum { MAX_INPUTS = EMU_LANES * 4, MAX_RESULTS = EMU_LANES * 16 };

typedef struct mfma_data {
    float a[MAX_INPUTS], b[MAX_INPUTS], c[MAX_RESULTS], d[MAX_RESULTS]; /* element n of lane l at [l * count + n] */
} mfma_data;

static float random_float(void)
{
    static uint32_t state = 12345;
    state = state * 1664525u + 1013904223u;
    return ldexpf((float)(state >> 8) - 0x1p23f, -22);
}

/* Writes random elements of the dtype to device memory, and their values to `values`. */
static void fill(void *memory, float *values, int count, cot_dtype dtype, float scale)
{
    for (int n = 0; n < count; n++) {
        const float value = scale * random_float();
        const uint16_t f16 = cot_f32_to_f16(value), bf16 = cot_f32_to_bf16(value);
        values[n] = dtype == COT_F16 ? cot_f16_to_f32(f16) : dtype == COT_BF16 ? cot_bf16_to_f32(bf16) : value;
        if (dtype == COT_F32)
            ((float *)memory)[n] = value;
        else
            ((uint16_t *)memory)[n] = dtype == COT_F16 ? f16 : bf16;
    }
}

/* Runs an instruction on random registers. scale: of the elements of A. */
static void run_mfma(const char *target, const mfma *m, float scale, mfma_data *data)
{
    size_t size;
    void *module, *function, *memory[4];
    const int inputs = EMU_LANES * (m->dtype == COT_F32 ? 1 : 4), results = m->side * m->side;
    char *bundle = read_file(MFMA_PROBE, &size);
    setenv("EMU_TARGET", target, 1);
    assert_int_equal(hipModuleLoadData(&module, bundle), COT_HIP_SUCCESS);
    assert_int_equal(hipModuleGetFunction(&function, module, m->kernel), COT_HIP_SUCCESS);
    for (int n = 0; n < 4; n++)
        assert_int_equal(hipMalloc(&memory[n], sizeof data->d), COT_HIP_SUCCESS);
    fill(memory[0], data->a, inputs, m->dtype, scale);
    fill(memory[1], data->b, inputs, m->dtype, 1.0f);
    fill(memory[2], data->c, results, COT_F32, scale);
    mfma_call call = {memory[0], memory[1], memory[2], memory[3]};
    const int error = hipModuleLaunchKernel(function, 1, 1, 1, EMU_LANES, 1, 1, 0, NULL, (void *[]){&call}, NULL);
    if (error != COT_HIP_SUCCESS)
        fail_msg("%s", hipGetErrorString(error));
    memcpy(data->d, memory[3], (size_t)results * sizeof(float));
    for (int n = 0; n < 4; n++)
        hipFree(memory[n]);
}

/* Elements of D that are not A B + C under a layout. */
static int count_differences(const mfma *m, const layout *l, const mfma_data *data)
{
    const int terms = m->dtype == COT_F32 ? 1 : 4, count = terms * EMU_LANES / m->side;
    const int registers = m->side * m->side / EMU_LANES;
    int differences = 0;
    for (int row = 0; row < m->side; row++)
        for (int column = 0; column < m->side; column++) {
            const place at = l->result(m->side, row, column);
            long double sum = data->c[at.lane * registers + at.number], size = fabsl(sum);
            for (int k = 0; k < count; k++) {
                const place in_a = l->input(m->side, terms, row, k), in_b = l->input(m->side, terms, column, k);
                const long double product =
                    (long double)data->a[in_a.lane * terms + in_a.number] * data->b[in_b.lane * terms + in_b.number];
                sum += product;
                size += fabsl(product);
            }
            const long double error = fabsl(sum - data->d[at.lane * registers + at.number]);
            differences += !(error <= 0x1p-24L * (count + 1) * size);
        }
    return differences;
}

static void multiplies_under_the_documented_layout(void **state)
{
    (void)state;
    const layout documented = {documented_input, documented_result}, transposed = {documented_input, transposed_result},
                 adjacent = {documented_input, wrong_result};
    mfma_data data;
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++)
        for (size_t n = 0; n < sizeof instructions / sizeof *instructions; n++) {
            const mfma *m = &instructions[n];
            const int results = m->side * m->side;
            run_mfma(targets[t], m, 1.0f, &data);
            assert_int_equal(count_differences(m, &documented, &data), 0);
            assert_true(count_differences(m, &transposed, &data) > results / 2);
            if (m->dtype == COT_F32)
                continue; /* one term per lane */
            /* The sum is the same for any order of the terms that A and B share, but not if only A has it. */
            float a[MAX_INPUTS];
            memcpy(a, data.a, sizeof a);
            for (int row = 0; row < m->side; row++)
                for (int k = 0; k < 4 * EMU_LANES / m->side; k++) {
                    const place to = documented_input(m->side, 4, row, k), from = wrong_input(m->side, 4, row, k);
                    data.a[to.lane * 4 + to.number] = a[from.lane * 4 + from.number];
                }
            assert_true(count_differences(m, &documented, &data) > results / 2);
            memcpy(data.a, a, sizeof a);
            if (m->side == 32)
                assert_true(count_differences(m, &adjacent, &data) > results / 2);
        }
}

/* MI200 takes subnormal inputs of 16 bits as zeros. MI300 does not. Neither does with float32. */
static void flushes_subnormal_inputs(void **state)
{
    (void)state;
    const layout documented = {documented_input, documented_result};
    mfma_data data;
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++)
        for (size_t n = 0; n < sizeof instructions / sizeof *instructions; n++) {
            const mfma *m = &instructions[n];
            const bool flushes = t == 0 && m->dtype == COT_F16;
            run_mfma(targets[t], m, 0x1p-18f, &data);
            assert_int_equal(count_differences(m, &documented, &data) > 0, flushes);
            for (int k = 0; k < MAX_INPUTS && flushes; k++)
                data.a[k] = fabsf(data.a[k]) < 0x1p-14f ? 0.0f : data.a[k];
            assert_int_equal(count_differences(m, &documented, &data), 0);
        }
}

/* For tools/compare_mfma_layouts.py: a line "kernel, matrix, row, column, lane, element" for each place
 * of A, B and D. */
static void print_layouts(void)
{
    for (size_t n = 0; n < sizeof instructions / sizeof *instructions; n++) {
        const mfma *m = &instructions[n];
        const int terms = m->dtype == COT_F32 ? 1 : 4, count = terms * EMU_LANES / m->side;
        for (int row = 0; row < m->side; row++) {
            for (int k = 0; k < count; k++) {
                const place at = documented_input(m->side, terms, row, k);
                printf("%s A %d %d %d %d\n%s B %d %d %d %d\n", m->kernel, row, k, at.lane, at.number, m->kernel, k, row,
                       at.lane, at.number);
            }
            for (int column = 0; column < m->side; column++) {
                const place at = documented_result(m->side, row, column);
                printf("%s D %d %d %d %d\n", m->kernel, row, column, at.lane, at.number);
            }
        }
    }
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "layouts") == 0) {
        print_layouts();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(knows_every_instruction),         cmocka_unit_test(runs_the_kernel),
        cmocka_unit_test(stops_at_a_missing_wait),         cmocka_unit_test(stops_outside_of_an_allocation),
        cmocka_unit_test(stops_at_an_unknown_instruction), cmocka_unit_test(multiplies_under_the_documented_layout),
        cmocka_unit_test(flushes_subnormal_inputs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
