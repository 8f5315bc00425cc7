/* SPDX-License-Identifier: Apache-2.0
 * cpu_features.h: the instruction sets that this processor and its operating system support. */
#ifndef COT_CORE_CPU_FEATURES_H
#define COT_CORE_CPU_FEATURES_H

#include <stdint.h>

/* The instruction sets that a kernel may require. A level is the set of extensions with which src/simd is compiled. */
enum {
    COT_ISA_PORTABLE = 0,        /* C for any processor */
    COT_ISA_AVX2 = 1 << 0,       /* avx2, fma, f16c */
    COT_ISA_AVX512 = 1 << 1,     /* avx512 f, bw, dq, vl, bmi2, and the above */
    COT_ISA_AVX512BF16 = 1 << 2, /* avx512 bf16, and the above */
    COT_ISA_AMX = 1 << 3,        /* amx tile and bf16, and the above */
    /* For CUDA queues. */
    COT_ISA_SM80 = 1 << 16, /* portable PTX: compute capability 8.0 and later */
    COT_ISA_SM90 = 1 << 17, /* Hopper-only instructions (sm_90a) */
    /* For HIP queues. */
    COT_ISA_CDNA = 1 << 18 /* gfx90a (MI200) and gfx942 (MI300) */
};

/* The levels of this machine, combined with |. The function requests permission to use AMX tiles from Linux. If Linux
 * refuses, the result has no COT_ISA_AMX. */
uint32_t cot_cpu_features(void);

/* The name of the highest level in `isa`: "portable", "avx2", "avx512", "avx512bf16", "amx". */
const char *cot_isa_name(uint32_t isa);

#endif
