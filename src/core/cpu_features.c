/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu_features.h"

uint32_t cot_cpu_features(void)
{
    uint32_t isa = COT_ISA_SCALAR;
#if defined(__x86_64__)
    /* The builtin also asks the operating system (xgetbv) whether it saves the wide registers. */
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        isa |= COT_ISA_AVX2;
    if ((isa & COT_ISA_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        isa |= COT_ISA_AVX512;
#endif
    return isa;
}

const char *cot_isa_name(uint32_t isa)
{
    if (isa & COT_ISA_AVX512)
        return "avx512";
    return isa & COT_ISA_AVX2 ? "avx2" : "scalar";
}
