/* SPDX-License-Identifier: Apache-2.0
 * test_emulator_amd.c: tests that the emulator has every instruction of the library's code objects, and that it stops
 * at planted faults: a missing s_waitcnt, an access out of bounds, an unknown instruction. The code objects are patched
 * copies of dropout's. */
#include "emulator.h"
#include "support.h"

#include "hip/driver.h"
#include "ops/dropout/cuda/dropout_cuda.h"

#include <glob.h>
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
    assert_int_equal(hipModuleGetFunction(&function, module, "dropout_fwd_rows_f32"), COT_HIP_SUCCESS);
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
        assert_stopped("dropout_fwd_rows_f32 stopped at 0x",
                       "is used before its load is complete: s_waitcnt is missing");
    }
}

static void stops_outside_of_an_allocation(void **state)
{
    (void)state;
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++) {
        assert_int_equal(run_patched(targets[t], 124, 0, 0, 0, 0), LAUNCH_FAILURE);
        assert_stopped("dropout_fwd_rows_f32 stopped at 0x", "are outside of every allocation");
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(knows_every_instruction),         cmocka_unit_test(runs_the_kernel),
        cmocka_unit_test(stops_at_a_missing_wait),         cmocka_unit_test(stops_outside_of_an_allocation),
        cmocka_unit_test(stops_at_an_unknown_instruction),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
