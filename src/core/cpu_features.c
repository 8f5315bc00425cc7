/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu_features.h"

#include <stdbool.h>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* The register files that the operating system saves at a context switch (XCR0); 0 if unknown. __builtin_cpu_supports
 * is not used, because clang 14's does not support F16C. */
static uint32_t saved_registers(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return a;
}

/* Requests permission to use the AMX tiles. Linux saves their 8 KiB at a context switch only for processes that have
 * requested it. The permission holds for all threads. */
static bool tiles_granted(void)
{
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

/* The levels that both the processor and the operating system support. */
static uint32_t x86_features(void)
{
    enum { YMM = 0x06, ZMM = 0xe6 }; /* XCR0 bits: xmm, ymm; ZMM also has the mask registers and both parts of zmm */
    const unsigned avx2_1 = bit_AVX | bit_FMA | bit_F16C;
    const unsigned avx512_7 = bit_BMI2 | bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    const uint32_t saved = saved_registers();
    unsigned a, b, c, c1, d;
    if ((saved & YMM) != YMM || !__get_cpuid(1, &a, &b, &c1, &d) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return COT_ISA_PORTABLE;
    if ((c1 & avx2_1) != avx2_1 || !(b & bit_AVX2))
        return COT_ISA_PORTABLE;
    if ((saved & ZMM) != ZMM || (b & avx512_7) != avx512_7)
        return COT_ISA_AVX2;
    const uint32_t avx512 = COT_ISA_AVX2 | COT_ISA_AVX512;             /* a is now the maximum sub-leaf of leaf 7 */
    enum { TILES = 0x60000, TILES_BF16 = 1 << 22, TILES_7 = 1 << 24 }; /* XCR0; leaf 7 edx: amx-bf16, amx-tile */
    const bool tiles = (saved & TILES) == TILES && (d & TILES_BF16) && (d & TILES_7);
    if (a < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & bit_AVX512BF16))
        return avx512;
    return avx512 | COT_ISA_AVX512BF16 | (tiles && tiles_granted() ? COT_ISA_AMX : 0);
}
#endif

uint32_t cot_cpu_features(void)
{
#if defined(__x86_64__)
    return x86_features();
#else
    return COT_ISA_PORTABLE;
#endif
}

const char *cot_isa_name(uint32_t isa)
{
    if (isa & COT_ISA_AMX)
        return "amx";
    if (isa & COT_ISA_AVX512BF16)
        return "avx512bf16";
    if (isa & COT_ISA_AVX512)
        return "avx512";
    return isa & COT_ISA_AVX2 ? "avx2" : "portable";
}
