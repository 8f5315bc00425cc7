/* SPDX-License-Identifier: Apache-2.0
 *
 * emulated_tiles.c: the features of a processor with AVX512_BF16 as if it had AMX too, for the program that has the tiled
 * kernels on emulated_tiles.h. It stands before the library, whose own answer is not linked then. */
#include "core/cpu_features.h"

uint32_t own_cpu_features(void);
#define cot_cpu_features own_cpu_features
#include "core/cpu_features.c"
#undef cot_cpu_features

uint32_t cot_cpu_features(void)
{
    const uint32_t own = own_cpu_features();
    return own & COT_ISA_AVX512BF16 ? own | COT_ISA_AMX : own;
}
