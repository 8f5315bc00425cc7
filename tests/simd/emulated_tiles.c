/* SPDX-License-Identifier: Apache-2.0
 *
 * emulated_tiles.c: a cot_cpu_features that reports AMX on every processor with AVX512_BF16. The program whose tiled
 * kernels use emulated_tiles.h links this file before the library, so that it replaces the library's function. */
#include "core/cpu_features.h"

uint32_t real_cpu_features(void);
#define cot_cpu_features real_cpu_features
#include "core/cpu_features.c"
#undef cot_cpu_features

uint32_t cot_cpu_features(void)
{
    const uint32_t real = real_cpu_features();
    return real & COT_ISA_AVX512BF16 ? real | COT_ISA_AMX : real;
}
