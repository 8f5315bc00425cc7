/* SPDX-License-Identifier: Apache-2.0
 * test_cpu_features.c: compares the features from cpuid with those that the kernel lists in /proc/cpuinfo. */
#include "support.h"

#include "core/cpu_features.h"

#include <stdio.h>
#include <stdlib.h>

/* The words of the first "flags" line, each between spaces. NULL without such a line (not x86, no /proc). */
static char *kernel_flags(void)
{
    FILE *file = fopen("/proc/cpuinfo", "r");
    char *line = NULL;
    size_t size = 0;
    while (file != NULL && getline(&line, &size, file) > 0) {
        if (strncmp(line, "flags", 5) != 0)
            continue;
        line[strcspn(line, "\n")] = ' ';
        fclose(file);
        return line;
    }
    if (file != NULL)
        fclose(file);
    free(line);
    return NULL;
}

static bool all_in(const char *flags, const char *const *names)
{
    for (; *names != NULL; names++)
        if (strstr(flags, *names) == NULL)
            return false;
    return true;
}

static void agrees_with_the_kernel(void **state)
{
    (void)state;
    static const char *const avx2[] = {" avx2 ", " fma ", " f16c ", NULL};
    static const char *const avx512[] = {" avx512f ", " avx512bw ", " avx512dq ", " avx512vl ", NULL};
    char *flags = kernel_flags();
    if (flags == NULL)
        skip();
    const uint32_t isa = cot_cpu_features();
    assert_int_equal((isa & COT_ISA_AVX2) != 0, all_in(flags, avx2));
    assert_int_equal((isa & COT_ISA_AVX512) != 0, all_in(flags, avx2) && all_in(flags, avx512));
    /* The kernel lists AMX where it may grant it. Whether it grants it, cot_cpu_features asks the kernel. */
    static const char *const amx[] = {" amx_tile ", " amx_bf16 ", " avx512_bf16 ", NULL};
    assert_true(!(isa & COT_ISA_AMX) || ((isa & COT_ISA_AVX512) && all_in(flags, amx)));
    free(flags);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(agrees_with_the_kernel)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
