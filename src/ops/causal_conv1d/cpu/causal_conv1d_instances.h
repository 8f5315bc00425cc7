/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_instances.h: the instances of a loop, and how they sum taps. A loop has an instance for each constant
 * K = 2..8 and one for a variable K (width 0), each in every dtype.
 *
 * Sanitizer builds have only K = 4 and the variable K, from the same source: the full set takes minutes to compile
 * there. */
#ifndef COT_CAUSAL_CONV1D_INSTANCES_H
#define COT_CAUSAL_CONV1D_INSTANCES_H

#include "simd/simd.h"

/* clang-format off */
#if defined(COT_FEW_INSTANCES)
#define CONV1D_TABLE(entry) { entry(0), entry(4) }
#define CONV1D_EACH_WIDTH(define) define(0) define(4)
enum { CONV1D_INSTANCES = 2 };
#else
#define CONV1D_TABLE(entry) { entry(0), entry(2), entry(3), entry(4), entry(5), entry(6), entry(7), entry(8) }
#define CONV1D_EACH_WIDTH(define) \
    define(0) define(2) define(3) define(4) define(5) define(6) define(7) define(8)
enum { CONV1D_INSTANCES = 8 };
#endif
#define CONV1D_EACH_DTYPE(define, width) define(width, F32) define(width, F16) define(width, BF16)
/* clang-format on */

/* First index of a table of instances. The second index is dtype - COT_F32. */
static inline int conv1d_instance_index(int64_t K)
{
    if (CONV1D_INSTANCES == 2)
        return K == 4;
    return K >= 2 && K <= 8 ? (int)K - 1 : 0;
}

/* Taps are summed in chunks of 16, as in the scalar kernel: the rounding error then grows with the number of chunks.
 * For a constant K <= 16 the two functions below compile to nothing. */
enum { CONV1D_TAP_CHUNK = 16 };

/* Call this before tap k is added to *chunk. At the start of a chunk it adds the finished chunk to *total. */
V_INLINE void conv1d_close_tap_chunk(int64_t k, vf *chunk, vf *total)
{
    if (k > 0 && k % CONV1D_TAP_CHUNK == 0) {
        *total = v_add(*total, *chunk);
        *chunk = v_zero();
    }
}

/* Sum of all K taps. */
V_INLINE vf conv1d_tap_sum(int64_t K, vf chunk, vf total)
{
    return K > CONV1D_TAP_CHUNK ? v_add(total, chunk) : chunk;
}

/* Whether the instruction set is AVX2, which has 16 vector registers. The backward then passes values through buffers
 * in the L1 cache, not in registers. */
enum { CONV1D_FEW_REGISTERS = VW == 8 };

#endif
