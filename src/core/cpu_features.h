/* SPDX-License-Identifier: Apache-2.0
 * cpu_features.h: which instruction sets this processor and its operating system offer. */
#ifndef COT_CORE_CPU_FEATURES_H
#define COT_CORE_CPU_FEATURES_H

#include <stdint.h>

/* What a kernel row may ask for. A level stands for the set of extensions that src/simd compiles it with. */
enum {
    COT_ISA_SCALAR = 0,
    COT_ISA_AVX2 = 1 << 0,       /* avx2, fma, f16c */
    COT_ISA_AVX512 = 1 << 1,     /* avx512 f, bw, dq, vl, bmi2, and the above */
    COT_ISA_AVX512BF16 = 1 << 2, /* avx512 bf16, and the above */
    COT_ISA_AMX = 1 << 3,        /* amx tile and bf16, and the above */
    /* Of a CUDA queue's device. */
    COT_ISA_SM80 = 1 << 16, /* portable PTX: compute capability 8.0 and later */
    COT_ISA_SM90 = 1 << 17  /* Hopper's own instructions (sm_90a) */
};

/* The levels of this machine, or-ed together. Linux lends AMX's tiles to a process that asks for them, which this
 * does; where it says no, COT_ISA_AMX is left out. */
uint32_t cot_cpu_features(void);

/* The name of the highest level in `isa`: "scalar", "avx2", "avx512", "avx512bf16", "amx". */
const char *cot_isa_name(uint32_t isa);

#endif
