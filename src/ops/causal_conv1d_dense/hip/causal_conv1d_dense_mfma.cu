/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_mfma.cu: the products of dense causal convolution on the matrix cores of AMD GPUs, for any strides,
 * and states (../cuda/causal_conv1d_dense_products.cuh). The step, the splits and the gathered operands are those of
 * ../cuda/causal_conv1d_dense_generic.cu.
 *
 * The 16-bit kernels compute 128 x 128 per block, with 32x32x8 instructions. Each of the 4 waves computes 64 x 64. A
 * step's operands are loaded into registers during the product of the step before, and written to the other of two
 * stages in LDS: one barrier per step. Both operands are K-major in LDS. Operands that are MN-major in memory are
 * transposed in registers on the way. The f16 instructions of MI200 take subnormal inputs as zeros, so there f16 is
 * multiplied by four float32 instructions, at a quarter of the rate.
 *
 * The float32 kernels compute 64 x 64 per block, with 32x32x2 instructions. They load their operands element by element.
 * The 32 terms of a step are summed separately and then added. */
#include "../cuda/causal_conv1d_dense_products.cuh"

enum {
    WAVE = 64,
    SIDE = 32, /* of an instruction's result */
    STORE_PITCH = SIDE + 1,
    MMA_BLOCK = CONV1D_DENSE_MMA_BLOCK,
    WAVE_BLOCK = MMA_BLOCK / 2, /* side of a wave's part of the result */
    TILES = WAVE_BLOCK / SIDE,
    ROW_UNITS = BLOCK_K / 8 /* units of 16 bytes in a row of a stage */
};

typedef float accumulators __attribute__((ext_vector_type(16)));
typedef _Float16 half4 __attribute__((ext_vector_type(4)));
typedef short short4 __attribute__((ext_vector_type(4)));

/* ---- the result --------------------------------------------------------------------------------------------- */

/* Stores a 32 x 32 result whose first row and column are given. It passes through LDS of the wave, so that adjacent
 * lanes store adjacent elements. A lane has column lane % 32, and rows 8 (r / 4) + 4 (lane / 32) + r % 4. */
template <product P>
static __device__ __forceinline__ void store_block(const conv1d_dense_call &c, const work_tile &p, float *shared,
                                                   int64_t row, int64_t column, const accumulators &sums)
{
    const int lane = (int)threadIdx.x % WAVE, x = lane % SIDE, y = lane / SIDE;
    const bool by_columns = P == DWEIGHT || (c.out.data != nullptr ? c.out : c.g).stride[2] != 1;
#pragma unroll
    for (int r = 0; r < 16; r++)
        shared[(r / 4 * 8 + 4 * y + r % 4) * STORE_PITCH + x] = sums[r];
    __syncwarp();
#pragma unroll 1
    for (int i = y; i < SIDE; i += 2) {
        const int in_row = by_columns ? i : x, in_column = by_columns ? x : i;
        store_result<P>(c, p, row + in_row, column + in_column, shared[in_row * STORE_PITCH + in_column]);
    }
    __syncwarp();
}

/* ---- 16 bits ------------------------------------------------------------------------------------------------ */

/* An operand of a block's product. A step has 32 of the inner axis in one group: a tap, or for DWEIGHT a sequence.
 * K-major: a row of memory has the inner axis. MN-major: it has the rows of the product. */
struct operand {
    const uint16_t *origin; /* row 0, group 0 */
    int64_t pitch, group_stride;
    int64_t row, rows, row_shift; /* row r of group n is valid if row + r - row_shift n is in [0, rows) */
    int64_t columns;              /* of a row that are in the tensor */
};

template <product P> constexpr bool a_mn_major = P == DWEIGHT;
template <product P> constexpr bool b_mn_major = P != FORWARD;

template <product P> static __device__ __forceinline__ operand make_a(const conv1d_dense_call &c, const work_tile &p)
{
    const uint16_t *const xe = (const uint16_t *)c.xe, *const g = (const uint16_t *)c.g_tokens;
    if (P == FORWARD)
        return {xe + (p.b * (c.K - 1 + c.T) + p.row) * c.pitch_in, c.pitch_in, c.pitch_in, p.row, c.T, 0, c.pitch_in};
    if (P == DX)
        return {g + (p.b * c.T + p.row) * c.pitch_out, c.pitch_out, -c.pitch_out, p.row, c.T, 1, c.pitch_out};
    return {g + p.row, c.pitch_out, c.T * c.pitch_out, 0, c.T, 0, c.pitch_out - p.row};
}

template <product P> static __device__ __forceinline__ operand make_b(const conv1d_dense_call &c, const work_tile &p)
{
    const uint16_t *const weight = (const uint16_t *)c.packed_weight;
    if (P == FORWARD)
        return {weight + p.column * c.pitch_in, c.pitch_in, c.Dout * c.pitch_in, p.column, c.Dout, 0, c.pitch_in};
    if (P == DX)
        return {weight + p.column, c.pitch_in, c.Dout * c.pitch_in, 0, c.Dout, 0, c.pitch_in - p.column};
    return {(const uint16_t *)c.xe + p.k * c.pitch_in + p.column,
            c.pitch_in,
            (c.K - 1 + c.T) * c.pitch_in,
            0,
            c.T,
            0,
            c.pitch_in - p.column};
}

/* 16 elements per thread. K-major: two units of 8 of the inner axis, of rows that are 64 apart. MN-major: 2 adjacent
 * rows of the product in each word, for 8 of the inner axis. */
struct thread_elements {
    uint32_t word[8];
};

/* Blocks share the operands, so the load may stay in the caches. */
template <int W> static __device__ __forceinline__ cot_words<W> load_cached(const uint16_t *from)
{
    typedef typename cot_hip_vector<W>::type vector;
    return __builtin_bit_cast(cot_words<W>, *(const COT_HIP_GLOBAL vector *)(const vector *)from);
}

/* Loads the thread's elements of the step at `n` of a group. Others than the tensor's are zeros. */
template <bool MN_MAJOR>
static __device__ __forceinline__ thread_elements load_elements(const operand &o, int64_t group, int64_t n)
{
    const int thread = (int)threadIdx.x;
    thread_elements to = {};
    if constexpr (MN_MAJOR) {
        const int pair = thread % WAVE * 2, first = thread / WAVE * 8;
        const uint16_t *const source = o.origin + group * o.group_stride + (n + first) * o.pitch + pair;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (n + first + i < o.rows && pair < o.columns)
                to.word[i] = load_cached<1>(source + i * o.pitch).word[0];
    } else {
        const int unit = thread % ROW_UNITS * 8, first = thread / ROW_UNITS;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = first + i * MMA_BLOCK / 2;
            const int64_t row = o.row + r - o.row_shift * group;
            if (row >= 0 && row < o.rows && n + unit < o.columns) {
                const cot_words<4> v = load_cached<4>(o.origin + group * o.group_stride + r * o.pitch + n + unit);
#pragma unroll
                for (int k = 0; k < 4; k++)
                    to.word[4 * i + k] = v.word[k];
            }
        }
    }
    return to;
}

/* The unit of 8 terms of a row, swizzled so that 8 adjacent rows are in different banks. */
static __device__ __forceinline__ int swizzled_unit(int row, int unit)
{
    return row * ROW_UNITS + (unit ^ (row >> 1 & 3));
}

template <bool MN_MAJOR>
static __device__ __forceinline__ void write_elements(const thread_elements &from, cot_words<4> *stage)
{
    const int thread = (int)threadIdx.x;
    cot_words<4> units[2];
#pragma unroll
    for (int k = 0; k < 4; k++)
        if constexpr (MN_MAJOR) {
            units[0].word[k] = __byte_perm(from.word[2 * k], from.word[2 * k + 1], 0x5410);
            units[1].word[k] = __byte_perm(from.word[2 * k], from.word[2 * k + 1], 0x7632);
        } else {
            units[0].word[k] = from.word[k];
            units[1].word[k] = from.word[4 + k];
        }
#pragma unroll
    for (int i = 0; i < 2; i++)
        stage[MN_MAJOR ? swizzled_unit(thread % WAVE * 2 + i, thread / WAVE)
                       : swizzled_unit(thread / ROW_UNITS + i * MMA_BLOCK / 2, thread % ROW_UNITS)] = units[i];
}

template <typename E> static __device__ __forceinline__ accumulators multiply(uint64_t a, uint64_t b, accumulators sums)
{
    if constexpr (!cot_is_f16<E>)
        return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(short4, a), __builtin_bit_cast(short4, b),
                                                        sums, 0, 0, 0);
    const half4 left = __builtin_bit_cast(half4, a), right = __builtin_bit_cast(half4, b);
#if defined(__gfx90a__)
#pragma unroll
    for (int n = 0; n < 4; n++)
        sums = __builtin_amdgcn_mfma_f32_32x32x2f32((float)left[n], (float)right[n], sums, 0, 0, 0);
    return sums;
#else
    return __builtin_amdgcn_mfma_f32_32x32x8f16(left, right, sums, 0, 0, 0);
#endif
}

/* Adds the products of a step. A lane loads 8 terms of a row at once, of which an instruction takes the first or the
 * last 4. A and B have the same terms in a lane, so the order of the terms is no matter of correctness. */
template <typename E>
static __device__ __forceinline__ void multiply_step(const cot_words<4> *a, const cot_words<4> *b, int y, int x,
                                                     accumulators (&sums)[TILES][TILES])
{
    const int lane = (int)threadIdx.x % WAVE;
#pragma unroll
    for (int k = 0; k < BLOCK_K; k += 16) {
        struct halves {
            uint64_t of[2];
        } a_units[TILES], b_units[TILES];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            const int unit = k / 8 + lane / SIDE, row = m * SIDE + lane % SIDE;
            a_units[m] = __builtin_bit_cast(halves, a[swizzled_unit(y + row, unit)]);
            b_units[m] = __builtin_bit_cast(halves, b[swizzled_unit(x + row, unit)]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int j = 0; j < TILES; j++)
                    sums[m][j] = multiply<E>(a_units[m].of[half], b_units[j].of[half], sums[m][j]);
    }
}

template <typename E, product P> static __device__ __forceinline__ void multiply_16(const conv1d_dense_call &c)
{
    enum { STAGE = MMA_BLOCK * ROW_UNITS };
    __shared__ cot_words<4> stages[2][2][STAGE]; /* A and B of two steps; later the waves' results */
    static_assert(sizeof(stages) >= MMA_THREADS / WAVE * SIDE * STORE_PITCH * sizeof(float), "results fit");
    const work_tile p = get_work_tile<P, MMA_BLOCK>(c);
    const operand operand_a = make_a<P>(c, p), operand_b = make_b<P>(c, p);
    const int wave = (int)threadIdx.x / WAVE, y = wave % 2 * WAVE_BLOCK, x = wave / 2 * WAVE_BLOCK;
    const int64_t group_steps = k_block_count(P == FORWARD ? c.Din : P == DX ? c.Dout : c.T);
    accumulators sums[TILES][TILES] = {};
    if (p.first < p.end) {
        int64_t group = p.first / group_steps, n = p.first % group_steps * BLOCK_K;
        write_elements<a_mn_major<P>>(load_elements<a_mn_major<P>>(operand_a, group, n), stages[0][0]);
        write_elements<b_mn_major<P>>(load_elements<b_mn_major<P>>(operand_b, group, n), stages[0][1]);
        int stage = 0;
        for (int64_t step = p.first; step < p.end; step++) {
            thread_elements a = {}, b = {};
            n += BLOCK_K;
            if (n >= group_steps * BLOCK_K) {
                n = 0;
                group++;
            }
            __syncthreads(); /* this step's stage is written, and all waves have read the other one */
            if (step + 1 < p.end) {
                a = load_elements<a_mn_major<P>>(operand_a, group, n);
                b = load_elements<b_mn_major<P>>(operand_b, group, n);
            }
            multiply_step<E>(stages[stage][0], stages[stage][1], y, x, sums);
            __builtin_amdgcn_sched_barrier(0); /* the wait for the loads stays behind all products of the step */
            stage ^= 1;
            write_elements<a_mn_major<P>>(a, stages[stage][0]);
            write_elements<b_mn_major<P>>(b, stages[stage][1]);
        }
    }
    __syncthreads();
    float *const shared = (float *)stages + wave * SIDE * STORE_PITCH;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int j = 0; j < TILES; j++)
            store_block<P>(c, p, shared, p.row + y + m * SIDE, p.column + x + j * SIDE, sums[m][j]);
}

/* ---- float32 ------------------------------------------------------------------------------------------------ */

template <product P> static __device__ __forceinline__ void multiply_f32(const conv1d_dense_call &c)
{
    enum { BLOCK = CONV1D_DENSE_F32_BLOCK, PITCH = BLOCK_K + 1, F32_TILES = BLOCK / SIDE };
    __shared__ float shared[2][BLOCK * PITCH];
    float *const a = shared[0], *const b = shared[1];
    static_assert(STORE_PITCH <= PITCH && F32_THREADS / WAVE * SIDE <= BLOCK, "the waves' results fit");
    const work_tile p = get_work_tile<P, BLOCK>(c);
    const int thread = (int)threadIdx.x, lane = thread % WAVE, wave = thread / WAVE, x = wave * SIDE;
    accumulators sums[F32_TILES] = {};
    for (int64_t n = p.first; n < p.end; n += BLOCK_K) {
        /* Adjacent lanes load adjacent channels for DWEIGHT, else adjacent terms: a lane has one term. */
        inner_term at = get_term<P>(c, n + thread % BLOCK_K);
#pragma unroll 1
        for (int e = thread; e < BLOCK * BLOCK_K; e += F32_THREADS) {
            const int row = P == DWEIGHT ? e % BLOCK : e / BLOCK_K, term = P == DWEIGHT ? e / BLOCK : e % BLOCK_K;
            const bool in_range = n + term < p.end;
            if (P == DWEIGHT)
                at = get_term<P>(c, n + term);
            a[row * PITCH + term] = in_range ? load_a<P>(c, p, p.row + row, at) : 0.0f;
            b[row * PITCH + term] = in_range ? load_b<P>(c, p, p.column + row, at) : 0.0f;
        }
        __syncthreads();
        accumulators partial[F32_TILES] = {};
#pragma unroll 4
        for (int term = 0; term < BLOCK_K; term += 2) {
            const int at_term = lane % SIDE * PITCH + term + lane / SIDE;
            const float b_value = b[x * PITCH + at_term];
#pragma unroll
            for (int m = 0; m < F32_TILES; m++)
                partial[m] =
                    __builtin_amdgcn_mfma_f32_32x32x2f32(a[m * SIDE * PITCH + at_term], b_value, partial[m], 0, 0, 0);
        }
#pragma unroll
        for (int m = 0; m < F32_TILES; m++)
            sums[m] += partial[m];
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < F32_TILES; m++)
        store_block<P>(c, p, a + wave * SIDE * STORE_PITCH, p.row + m * SIDE, p.column + x, sums[m]);
}

#define F32(stem, product)                                                          \
    extern "C" __global__ void __launch_bounds__(F32_THREADS)                       \
        causal_conv1d_dense_##stem##_f32(const __grid_constant__ conv1d_dense_call) \
    {                                                                               \
        multiply_f32<product>(COT_HIP_ARGUMENT(conv1d_dense_call));                 \
    }
#define MMA(stem, product, name, element)                                                  \
    extern "C" __global__ void __launch_bounds__(MMA_THREADS)                              \
        causal_conv1d_dense_##stem##_mma_##name(const __grid_constant__ conv1d_dense_call) \
    {                                                                                      \
        multiply_16<element, product>(COT_HIP_ARGUMENT(conv1d_dense_call));                \
    }
CONV1D_DENSE_INSTANCES
