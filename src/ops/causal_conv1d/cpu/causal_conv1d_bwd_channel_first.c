/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_first.c: the backward for tensors with contiguous time. xe = [initial state, x] along time,
 * with zeros if there is no state:
 *     z[t]  = b + sum_k w[k] * xe[t+k]                g[t]  = dy[t] * act'(z[t])
 *     dx[t] = sum_j w[K-1-j] * g[t+j]                 dw[k] = sum_t g[t] * xe[t+k]          db = sum_t g[t]
 *
 * As in the forward, an item is a range of batch elements, tokens and channels (causal_conv1d_items.h). Its
 * tokens are divided into pieces (causal_conv1d_pieces.h). A row is one channel of a piece. It passes through the
 * L1 cache in three forms:
 *     1. x, converted to f32 where it is not
 *     2. g, of the piece and of its halo. The halo is the next K-1 tokens (fewer at the end): dx of the piece needs
 *     their g 3. dx, the forward convolution of g with the reversed weights
 * For K = 2..4 and a row of one sequence, one pass over the row computes g, dx and the sums, except at the row's ends.
 * It keeps g in registers (one_pass_registers). AVX2 has too few: there it computes g of 256 tokens into a buffer in
 * the L1 cache, then their dx and sums (one_pass_buffered). For tensors larger than the caches, short runs of reads and
 * writes are faster. A loop that only reads and writes in runs of 64 bytes is as fast as a copy. With runs of 8 KiB it
 * has 75 % of that speed.
 *
 * dw and db are summed in three levels: `sums` per lane over a row, `totals` per channel over the pieces of an item,
 * `partials` (the totals of all items) in the workspace. causal_conv1d_reduce.h adds the partials.
 *
 * src/simd/simd.h defines V_NAME (one function per instruction set), the types vf, vi and vm (VW lanes of floats, of
 * integers, and a mask) and the v_ functions. v_stream is a non-temporal store. */
#include "causal_conv1d_reduce.h"
#include "causal_conv1d_rows.h"
#include "causal_conv1d_state.h"

cot_status V_NAME(causal_conv1d_bwd_channel_first)(cot_queue *, const void *, void *);

/* ---- g, dw, db of one row ----------------------------------------------------------------------------------- */

typedef struct row_args {
    int64_t K;
    const float *x, *weight; /* as in conv1d_row */
    const char *dy;
    cot_dtype dtype; /* dtype of dy */
    bool silu;
    float *g;
    vf *sums; /* K sums of dw and one of db */
    conv1d_prefetch_base prefetch_x, prefetch_dy;
    const int32_t *seq_ids;
    /* the members below are for the one-pass loops only */
    char *dx;              /* has the dtype of dy */
    float *g_last_vectors; /* output: g of the last two vectors */
    bool nontemporal;
} row_args;

/* In the functions of a row_args, token 0 is the first token of the row: of row->dy and row->g. Computes g of tokens
 * [begin, end). Adds the tokens before halo_begin to the sums. Later tokens are halo: the next piece adds them to its
 * sums. */
static void compute_g_general(const row_args *row, int64_t begin, int64_t end, int64_t halo_begin)
{
    const int64_t K = row->K, size = conv1d_element_size(row->dtype);
    for (int64_t i = begin; i < end; i += VW) {
        const int n = (int)(end - i < VW ? end - i : VW);
        const int counted = (int)cot_clamp(halo_begin - i, 0, VW);
        vf x[CONV1D_MAX_K], z = v_set1(row->weight[K]), total = v_zero();
        for (int64_t k = 0; k < K; k++) {
            conv1d_close_tap_chunk(k, &z, &total);
            x[k] = v_load_n(row->x + i + k, n);
            if (row->seq_ids != NULL)
                x[k] = v_maskz(conv1d_valid_lanes(row->seq_ids, i, k, K - 1), x[k]);
            z = v_fma(v_set1(row->weight[k]), x[k], z);
        }
        z = conv1d_tap_sum(K, z, total);
        vf g = v_load_n_as(row->dy + i * size, row->dtype, n);
        if (row->silu)
            g = v_mul(g, v_silu_slope(z));
        vm valid = vm_first(n);
        if (row->seq_ids != NULL)
            valid = vm_and(valid, vm_not_negative(vi_load(row->seq_ids + i + K - 1)));
        g = v_maskz(valid, g);
        v_store(row->g + i, g);
        if (counted == 0)
            continue;
        g = v_maskz(vm_first(counted), g);
        for (int64_t k = 0; k < K; k++)
            row->sums[k] = v_fma(g, v_maskz(vm_first(counted), x[k]), row->sums[k]);
        row->sums[K] = v_add(row->sums[K], g);
    }
}

/* A lane adds this many terms of dw and db to a chunk sum, and then adds the chunk sum to its sum of the row. So a term
 * takes part in at most SUM_TERMS + (number of chunks) additions, each of which rounds. In one long sum it would take
 * part in one addition for each later term of the row. */
enum { SUM_TERMS = 32 };

/* Requires (end - begin) % VW == 0. */
V_INLINE void compute_g_vectors(const row_args *row, int64_t begin, int64_t end, int64_t K, cot_dtype dtype)
{
    const int64_t size = conv1d_element_size(dtype);
    const float *x = row->x;
    const char *dy = row->dy;
    const bool silu = row->silu;
    vf w[CONV1D_MAX_K], sums[CONV1D_MAX_K + 1];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_set1(row->weight[k]);
    const vf bias = v_set1(row->weight[K]);
    const conv1d_prefetch_base prefetch_x = row->prefetch_x, prefetch_dy = row->prefetch_dy;
    for (int64_t i = begin; i < end;) {
        const int64_t chunk_end = end - i < SUM_TERMS * VW ? end : i + SUM_TERMS * VW;
        for (int64_t k = 0; k <= K; k++)
            sums[k] = v_zero();
        for (; i < chunk_end; i += VW) {
            conv1d_prefetch(&prefetch_x, i * size);
            conv1d_prefetch(&prefetch_dy, i * size);
            vf g = v_load_as(dy + i * size, dtype);
            if (silu) {
                vf z = bias, total = v_zero();
                V_UNROLL
                for (int64_t k = 0; k < K; k++) {
                    conv1d_close_tap_chunk(k, &z, &total);
                    z = v_fma(w[k], v_load(x + i + k), z);
                }
                z = conv1d_tap_sum(K, z, total);
                g = v_mul(g, v_silu_slope(z));
            }
            v_store(row->g + i, g);
            V_UNROLL
            for (int64_t k = 0; k < K; k++)
                sums[k] = v_fma(g, v_load(x + i + k), sums[k]);
            sums[K] = v_add(sums[K], g);
        }
        for (int64_t k = 0; k <= K; k++)
            row->sums[k] = v_add(row->sums[k], sums[k]);
    }
}

#define DEFINE_G(width, dtype)                                                        \
    static void g_##width##_##dtype(const row_args *row, int64_t begin, int64_t end)  \
    {                                                                                 \
        compute_g_vectors(row, begin, end, width == 0 ? row->K : width, COT_##dtype); \
    }
#define DEFINE_GS(width) CONV1D_EACH_DTYPE(DEFINE_G, width)
CONV1D_EACH_WIDTH(DEFINE_GS)

#define G_ENTRY(width)                                     \
    {                                                      \
        g_##width##_F32, g_##width##_F16, g_##width##_BF16 \
    }
static void (*const g_functions[CONV1D_INSTANCES][3])(const row_args *, int64_t, int64_t) = CONV1D_TABLE(G_ENTRY);

/* ---- g, dw, db and dx of one row ---------------------------------------------------------------------------- *
 * Step j of the loop computes z of vector j+1, then dx of vector j-2 and the sum terms of its inputs, then g of vector
 * j. dx[t] and dw[k] both need g[t+i], i < K, with dw computed as sum_t x[t] * g[t+K-1-k]. Each step uses results of
 * earlier steps only; else the dependency chain would exceed the processor's out-of-order window. Holding g[t+i] in
 * registers takes fewer of them than holding the taps of x.
 *
 * The registers when step j begins. Tap k of a vector is xe[t+k] for its tokens t; tap K-1 is x[t].
 *     tap0            tap 0 of vector j+1. The step loads tap0_next, tap 0 of vector j+2
 *     z               z of vector j
 *     x0, x1, x2      x of vectors j, j-1, j-2
 *     g, g_prev       g of vectors j-1, j-2 */

/* Prefetch distances in bytes into the L1 cache, in addition to CONV1D_L1_DISTANCE for rows that are read in place.
 * Together with it, x is prefetched 2 KiB ahead and dy 3 KiB. Totals of 1 to 4 KiB were tried. With these the kernel
 * was fastest: 0.85 of a copy's speed. The same distance for both was slower. A prefetch into the L2 cache in addition
 * was slower too. */
enum { ONE_PASS_DISTANCE_X = 1024, ONE_PASS_DISTANCE_DY = 2048 };

/* Returns dx of the tokens of vector g, and adds to the sums. g_next is the next vector of g. */
V_INLINE vf one_pass_dx_and_sums(const vf *w, vf *sums, vf x, vf g, vf g_next, int64_t K)
{
    vf dx = v_mul(w[K - 1], g);
    sums[K] = v_add(sums[K], g);
    sums[K - 1] = v_fma(x, g, sums[K - 1]);
    const vf g1 = v_align(g, g_next, 1);
    dx = v_fma(w[K - 2], g1, dx);
    sums[K - 2] = v_fma(x, g1, sums[K - 2]);
    if (K > 2) {
        const vf g2 = v_align(g, g_next, 2);
        dx = v_fma(w[K - 3], g2, dx);
        sums[K - 3] = v_fma(x, g2, sums[K - 3]);
    }
    if (K > 3) {
        const vf g3 = v_align(g, g_next, 3);
        dx = v_fma(w[K - 4], g3, dx);
        sums[K - 4] = v_fma(x, g3, sums[K - 4]);
    }
    return dx;
}

/* Returns z of a vector of tokens. tap0 and tap0_next are tap 0 of this vector and of the next one. Sets *x to tap K-1,
 * which is x of these tokens. */
V_INLINE vf one_pass_convolve(const vf *w, vf bias, vf tap0, vf tap0_next, int64_t K, vf *x)
{
    vf z = v_fma(w[0], tap0, bias);
    *x = v_align(tap0, tap0_next, 1);
    z = v_fma(w[1], *x, z);
    if (K > 2) {
        *x = v_align(tap0, tap0_next, 2);
        z = v_fma(w[2], *x, z);
    }
    if (K > 3) {
        *x = v_align(tap0, tap0_next, 3);
        z = v_fma(w[3], *x, z);
    }
    return z;
}

/* Tokens [begin, end). Requires a positive multiple of 2 * VW tokens. Computes all of their sums, and dx of all but the
 * last two vectors. Stores g of the first vector to row->g and g of the last two vectors to row->g_last_vectors:
 * compute_dx needs them for dx at the ends of the row. */
V_INLINE void one_pass_registers(const row_args *row, int64_t begin, int64_t end, int64_t K, cot_dtype dtype, bool silu)
{
    const int64_t size = conv1d_element_size(dtype);
    const float *x = row->x;
    const char *dy = row->dy;
    char *dx = row->dx;
    const bool nontemporal = row->nontemporal;
    const uintptr_t prefetch_x = row->prefetch_x.l1 + ONE_PASS_DISTANCE_X,
                    prefetch_dy = row->prefetch_dy.l1 + ONE_PASS_DISTANCE_DY;
    /* The last iteration loads 2 vectors from x + i + 2 VW, of which only K-1 elements exist. x_tail has them at the
     * same offset, then zeros. */
    float x_tail[4 * VW] = {0};
    memcpy(x_tail + 2 * VW, x + end, (size_t)(K - 1) * sizeof *x_tail);
    vf w[4], sums[5], dx_out[2];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_set1(row->weight[k]);
    const vf bias = v_set1(row->weight[K]);
    vf g = v_zero(), g_prev = v_zero();
    const vf x_before = v_load_n(x + begin, (int)(K - 1));
    vf x2 = v_zero(), x1, x0; /* x1 of the first step: the K-1 inputs before `begin`, in the last lanes */
    x1 = K == 2   ? v_align(v_zero(), x_before, 1)
         : K == 3 ? v_align(v_zero(), x_before, 2)
                  : v_align(v_zero(), x_before, 3);
    vf tap0 = v_load(x + begin + VW);
    vf z = one_pass_convolve(w, bias, v_load(x + begin), tap0, K, &x0);
    for (int64_t i = begin; i < end;) {
        const int64_t chunk_end = end - i < SUM_TERMS * VW ? end : i + SUM_TERMS * VW;
        for (int64_t k = 0; k <= K; k++)
            sums[k] = v_zero();
        for (; i < chunk_end; i += 2 * VW) {
            const float *from = i + 2 * VW < end ? x + i : x_tail;
            for (int64_t line = 0; line < 2 * VW * size; line += 64) {
                v_prefetch((const void *)(prefetch_x + (uintptr_t)(i * size + line)));
                v_prefetch((const void *)(prefetch_dy + (uintptr_t)(i * size + line)));
            }
            V_UNROLL
            for (int v = 0; v < 2; v++) {
                const vf tap0_next = v_load(from + (v + 2) * VW);
                vf x_next;
                const vf z_next = one_pass_convolve(w, bias, tap0, tap0_next, K, &x_next);
                dx_out[v] = one_pass_dx_and_sums(w, sums, x2, g_prev, g, K);
                g_prev = g;
                g = v_load_as(dy + (i + v * VW) * size, dtype);
                if (silu)
                    g = v_mul(g, v_silu_slope(z));
                z = z_next;
                tap0 = tap0_next;
                x2 = x1;
                x1 = x0;
                x0 = x_next;
            }
            char *to = dx + (i - 2 * VW) * size;
            if (i == begin) /* there is no dx of tokens before `begin` */
                v_store(row->g + begin, g_prev);
            else if (nontemporal)
                v_stream2_as(to, dtype, dx_out[0], dx_out[1]);
            else
                v_store2_as(to, dtype, dx_out[0], dx_out[1]);
        }
        for (int64_t k = 0; k <= K; k++)
            row->sums[k] = v_add(row->sums[k], sums[k]);
    }
    one_pass_dx_and_sums(w, row->sums, x2, g_prev, g, K);
    one_pass_dx_and_sums(w, row->sums, x1, g, v_zero(), K);
    v_store(row->g_last_vectors, g_prev);
    v_store(row->g_last_vectors + VW, g);
}

/* one_pass_buffered computes the same with few registers (CONV1D_FEW_REGISTERS). On AVX2, one_pass_registers had 124
 * instructions for two vectors, with spills, and the out-of-order window held only four vectors. one_pass_buffered
 * processes SUM_TERMS vectors (256 tokens) at a time. First it stores their g to a buffer in the L1 cache. Then it
 * computes dx and the sums from unaligned loads of g[t+i]. Reads and writes therefore alternate every 256 elements. */
V_INLINE void buffered_g(float *g, const float *x, const char *dy, const vf *w, vf bias, int64_t K, cot_dtype dtype,
                         bool silu)
{
    enum { COUNT = 2 };
    const int64_t size = conv1d_element_size(dtype);
    vf z[COUNT];
    V_UNROLL
    for (int v = 0; v < COUNT; v++)
        z[v] = bias;
    V_UNROLL
    for (int64_t k = 0; silu && k < K; k++)
        for (int v = 0; v < COUNT; v++)
            z[v] = v_fma(w[k], v_load(x + v * VW + k), z[v]);
    if (silu)
        v_silu_slopes(z, COUNT);
    V_UNROLL
    for (int v = 0; v < COUNT; v++) {
        const vf dy_v = v_load_as(dy + v * VW * size, dtype);
        v_store(g + v * VW, silu ? v_mul(z[v], dy_v) : dy_v);
    }
}

V_INLINE void one_pass_buffered(const row_args *row, int64_t begin, int64_t end, int64_t K, cot_dtype dtype, bool silu)
{
    enum { STEP_TOKENS = SUM_TERMS * VW, TAIL = 2 * VW };
    const int64_t size = conv1d_element_size(dtype);
    const float *x = row->x;
    const char *dy = row->dy;
    const bool nontemporal = row->nontemporal;
    const uintptr_t prefetch_x = row->prefetch_x.l1 + ONE_PASS_DISTANCE_X,
                    prefetch_dy = row->prefetch_dy.l1 + ONE_PASS_DISTANCE_DY;
    float g[TAIL + STEP_TOKENS + VW] = {0}; /* of tokens i-TAIL .. i+STEP_TOKENS-1, then elements that are never used */
    vf w[4], sums[5];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_set1(row->weight[k]);
    const vf bias = v_set1(row->weight[K]);
    for (int64_t i = begin; i < end; i += STEP_TOKENS) {
        const int64_t n = end - i < STEP_TOKENS ? end - i : STEP_TOKENS;
        for (int64_t j = 0; j < n; j += 2 * VW) {
            for (int64_t line = 0; line < 2 * VW * size; line += 64) {
                v_prefetch((const void *)(prefetch_x + (uintptr_t)((i + j) * size + line)));
                v_prefetch((const void *)(prefetch_dy + (uintptr_t)((i + j) * size + line)));
            }
            buffered_g(g + TAIL + j, x + i + j, dy + (i + j) * size, w, bias, K, dtype, silu);
        }
        if (i == begin)
            v_store(row->g + begin, v_load(g + TAIL));
        for (int64_t k = 0; k <= K; k++)
            sums[k] = v_zero();
        /* The sum terms of inputs before `begin` with g from `begin` on. These inputs get no dx here. */
        const bool is_first = i == begin;
        if (is_first)
            for (int64_t k = 0; k < K - 1; k++)
                sums[k] = v_mul(v_load_n(x + begin + k, (int)(K - 1 - k)), v_load_n(g + TAIL, (int)(K - 1 - k)));
        for (int64_t j = is_first ? TAIL : 0; j < n; j += 2 * VW) {
            vf dx[2];
            V_UNROLL
            for (int v = 0; v < 2; v++) {
                const vf x_i = v_load(x + i - TAIL + j + v * VW + K - 1);
                dx[v] = v_zero();
                V_UNROLL
                for (int64_t k = 0; k < K; k++) {
                    const vf g_later = v_load(g + j + v * VW + K - 1 - k);
                    dx[v] = k == 0 ? v_mul(w[0], g_later) : v_fma(w[k], g_later, dx[v]);
                    sums[k] = v_fma(x_i, g_later, sums[k]);
                    if (k == K - 1)
                        sums[K] = v_add(sums[K], g_later);
                }
            }
            char *to = row->dx + (i - TAIL + j) * size;
            if (nontemporal)
                v_stream2_as(to, dtype, dx[0], dx[1]);
            else
                v_store2_as(to, dtype, dx[0], dx[1]);
        }
        for (int64_t k = 0; k <= K; k++)
            row->sums[k] = v_add(row->sums[k], sums[k]);
        memmove(g, g + n, TAIL * sizeof *g);
    }
    /* The sums of the last two vectors. g is zero after them. */
    memset(g + TAIL, 0, VW * sizeof *g);
    for (int64_t j = 0; j < TAIL; j += VW) {
        const vf x_i = v_load(x + end - TAIL + j + K - 1);
        for (int64_t k = 0; k < K; k++)
            row->sums[k] = v_fma(x_i, v_load(g + j + K - 1 - k), row->sums[k]);
        row->sums[K] = v_add(row->sums[K], v_load(g + j));
    }
    memcpy(row->g_last_vectors, g, TAIL * sizeof *g);
}

/* clang-format off */
#define DEFINE_ONE_PASS(width, dtype)                                                           \
    static void one_pass_##width##_##dtype(const row_args *row, int64_t begin, int64_t end) \
    {                                                                                        \
        if (CONV1D_FEW_REGISTERS && row->silu)                                               \
            one_pass_buffered(row, begin, end, width, COT_##dtype, true);                        \
        else if (CONV1D_FEW_REGISTERS)                                                       \
            one_pass_buffered(row, begin, end, width, COT_##dtype, false);                       \
        else if (row->silu)                                                                  \
            one_pass_registers(row, begin, end, width, COT_##dtype, true);                           \
        else                                                                                 \
            one_pass_registers(row, begin, end, width, COT_##dtype, false);                          \
    }
CONV1D_EACH_DTYPE(DEFINE_ONE_PASS, 2)
CONV1D_EACH_DTYPE(DEFINE_ONE_PASS, 3)
CONV1D_EACH_DTYPE(DEFINE_ONE_PASS, 4)

enum { ONE_PASS_MIN_K = 2, ONE_PASS_MAX_K = 4 };
static void (*const one_pass_table[ONE_PASS_MAX_K + 1][3])(const row_args *, int64_t, int64_t) = {
    [2] = {one_pass_2_F32, one_pass_2_F16, one_pass_2_BF16},
    [3] = {one_pass_3_F32, one_pass_3_F16, one_pass_3_BF16},
    [4] = {one_pass_4_F32, one_pass_4_F16, one_pass_4_BF16},
};
/* clang-format on */

/* Computes g and the sums, but not dx. The groups that `mixed` marks (conv1d_row) run compute_g_general, which supports
 * any mask. */
static void compute_g_only(const row_args *row, const uint8_t *mixed, int64_t halo_begin, int64_t halo_end)
{
    for (int64_t i = 0; i < halo_begin;) {
        const int64_t end = i + conv1d_uniform_length(mixed, i, halo_begin);
        const int64_t last = mixed != NULL && mixed[i / CONV1D_GROUP_TOKENS] ? i : i + (end - i) / VW * VW;
        if (last > i)
            g_functions[conv1d_instance_index(row->K)][row->dtype - COT_F32](row, i, last);
        if (end > last)
            compute_g_general(row, last, end, halo_begin);
        i = end;
    }
    if (halo_end > halo_begin)
        compute_g_general(row, halo_begin, halo_end, halo_begin);
}

/* ---- pieces ------------------------------------------------------------------------------------------------- */

typedef struct backward_context {
    const conv1d_backward_problem *problem;
    conv1d_packing packing;
    conv1d_item_grid item_grid;
    int64_t gradient_items; /* those with tokens. More items follow, which look for sequences without tokens */
    int64_t max_piece_tokens;
    bool x_in_place, one_pass, nontemporal;
    float *partials;
} backward_context;

enum { MAX_TOKENS_WITH_HALO = CONV1D_ROW_BUFFER_TOKENS + CONV1D_MAX_K };

/* The state that the rows of a piece share, and their buffers. Token 0 is the first token of the piece. */
typedef struct piece_work {
    const backward_context *context;
    const conv1d_piece *piece;
    int64_t halo_end;     /* end of the tokens whose g the rows need */
    int64_t dfinal_begin; /* dx of tokens from here on has a term of dfinal_state */
    bool one_pass;
    int64_t one_pass_begin, one_pass_end; /* the one-pass loop has written dx of these tokens */
    float *g_after_one_pass;              /* g from token one_pass_end on; `g` holds tokens below one_pass_begin + VW */
    float g_tail_buffer[6 * VW + 2 * CONV1D_MAX_K];
    uint8_t mixed[CONV1D_ROW_BUFFER_TOKENS / CONV1D_GROUP_TOKENS + 1],
        mixed_dx[CONV1D_ROW_BUFFER_TOKENS / CONV1D_GROUP_TOKENS + 1];
    float inputs[MAX_TOKENS_WITH_HALO + CONV1D_MAX_K + VW];
    float dy_f32[MAX_TOKENS_WITH_HALO], g[MAX_TOKENS_WITH_HALO + CONV1D_MAX_K + 2 * VW],
        outputs[CONV1D_ROW_BUFFER_TOKENS];
} piece_work;

/* The buffers of an item, in the scratch memory of its thread. */
typedef struct backward_buffers {
    piece_work work;
    float weights[CONV1D_COPIED_WEIGHT_FLOATS], totals[CONV1D_COPIED_WEIGHT_FLOATS];
} backward_buffers;

_Static_assert(sizeof(backward_buffers) <= CONV1D_BWD_CHANNEL_FIRST_SCRATCH_BYTES,
               "backward_buffers exceed the scratch of an item");

/* The dfinal_state term of dx at `position`, 0 if it has none. A position before piece->valid_begin is in the initial
 * state. The term then belongs to dinitial_state. */
static float dfinal_term(const piece_work *work, int64_t d, int64_t position)
{
    const cot_tensor *dfinal_state = &work->context->problem->args.dfinal_state;
    const int64_t K = work->context->problem->sizes.K, state_position = position - work->piece->valid_end + K - 1;
    if (!cot_is_present(dfinal_state) || work->piece->state < 0 || state_position < 0 ||
        !conv1d_contributes_in_piece(work->piece, K, position, work->piece->valid_end - 1))
        return 0;
    return conv1d_load(dfinal_state, work->piece->state, d, state_position);
}

/* Computes dx of tokens [begin, end) from their g, and stores it directly to the tensor. */
static void convolve_direct(const conv1d_row *piece_row, const float *g, int64_t begin, int64_t end)
{
    if (begin >= end)
        return;
    conv1d_row row = *piece_row;
    row.n = end - begin;
    row.x = g;
    row.y = conv1d_y_element(piece_row, begin);
    conv1d_convolve(&row);
}

static void compute_dx(piece_work *work, int64_t d, const float *weight)
{
    const cot_tensor *dx = &work->context->problem->args.dx;
    const conv1d_piece *piece = work->piece;
    const int64_t K = work->context->problem->sizes.K, n = piece->end - piece->begin;
    float reversed_weight[CONV1D_MAX_K + 1];
    for (int64_t k = 0; k < K; k++)
        reversed_weight[k] = weight[K - 1 - k];
    reversed_weight[K] = 0;
    const bool dx_in_place = conv1d_contiguous_time(dx);
    conv1d_row row = {.n = n,
                      .K = K,
                      .x = work->g,
                      .weight = reversed_weight,
                      .y = dx_in_place ? (void *)conv1d_element(dx, piece->b, d, piece->begin) : work->outputs,
                      .dtype = dx_in_place ? dx->dtype : COT_F32,
                      .nontemporal = dx_in_place && work->context->nontemporal,
                      .prefetch = conv1d_prefetch_next_row(work->g, NULL)};
    if (piece->seq_ids != NULL) {
        row.seq_ids = piece->seq_ids + K - 1;
        row.mixed = work->mixed_dx;
    }
    if (dx_in_place) { /* rows with `mixed` do not run the one-pass loop: one_pass_end is 0 */
        convolve_direct(&row, work->g, 0, work->one_pass_begin);
        convolve_direct(&row, work->g_after_one_pass, work->one_pass_end, work->dfinal_begin);
    } else if (n > 0) {
        conv1d_convolve(&row);
    }
    const int64_t stored = dx_in_place ? work->dfinal_begin : 0;
    if (dx_in_place && work->dfinal_begin < n) {
        row.n = n - work->dfinal_begin;
        row.x = work->g_after_one_pass + (work->dfinal_begin - work->one_pass_end);
        row.seq_ids += row.seq_ids != NULL ? work->dfinal_begin : 0;
        row.y = work->outputs;
        row.dtype = COT_F32;
        row.nontemporal = false;
        row.mixed = NULL;
        conv1d_convolve_general(&row, 0, row.n);
    }
    for (int64_t i = work->dfinal_begin; i < n; i++)
        work->outputs[i - stored] += dfinal_term(work, d, piece->begin + i);
    if (stored < n)
        conv1d_scatter(conv1d_element(dx, piece->b, d, piece->begin + stored), dx->dtype, dx->stride[2], work->outputs,
                       n - stored);
}

static void compute_dinitial_state(const piece_work *work, int64_t d, const float *weight)
{
    const conv1d_piece *piece = work->piece;
    const int64_t K = work->context->problem->sizes.K;
    for (int64_t i = 0; i < K - 1; i++) {
        const int64_t position = piece->valid_begin - (K - 1) + i;
        float gradient = 0;
        for (int64_t k = 0; k <= i; k++) {
            const int64_t token = i - k;
            if (token < work->halo_end && conv1d_contributes_in_piece(piece, K, position, piece->begin + token))
                gradient += weight[k] * work->g[token];
        }
        gradient += dfinal_term(work, d, position);
        conv1d_store(&work->context->problem->args.dinitial_state, piece->state, d, i, gradient);
    }
}

/* Computes g of the tokens [range_begin, range_begin + halo_end) of the piece, and adds those before the halo to the
 * sums. halo_begin and halo_end are relative to range_begin. Tokens from halo_begin on are the halo: the next piece
 * adds them. The one-pass loop also computes dx of all but its last two vectors, which it leaves to compute_dx. The
 * loop runs only if the range reaches the end of the piece and has four vectors or more. */
static void compute_range(piece_work *work, int64_t d, row_args *row, int64_t range_begin, int64_t halo_begin,
                          int64_t halo_end)
{
    const cot_tensor *dx = &work->context->problem->args.dx;
    const int64_t one_pass_tokens = halo_begin / (2 * VW) * (2 * VW);
    const bool reaches_end = range_begin + halo_begin == work->piece->end - work->piece->begin;
    if (!work->one_pass || !reaches_end || one_pass_tokens < 4 * VW) {
        compute_g_only(row, work->piece->seq_ids != NULL ? work->mixed + range_begin / CONV1D_GROUP_TOKENS : NULL,
                       halo_begin, halo_end);
        return;
    }
    row->dx = conv1d_element(dx, work->piece->b, d, work->piece->begin + range_begin);
    row->nontemporal = work->context->nontemporal && (uintptr_t)row->dx % 64 == 0;
    row->g_last_vectors = work->g_after_one_pass = work->g_tail_buffer;
    one_pass_table[row->K][row->dtype - COT_F32](row, 0, one_pass_tokens);
    row_args rest = *row;
    rest.x += one_pass_tokens;
    rest.dy += one_pass_tokens * conv1d_element_size(row->dtype);
    rest.g = work->g_tail_buffer + 2 * VW;
    if (one_pass_tokens < halo_end)
        compute_g_general(&rest, 0, halo_end - one_pass_tokens, halo_begin - one_pass_tokens);
    work->one_pass_begin = range_begin;
    work->one_pass_end = range_begin + one_pass_tokens - 2 * VW;
}

/* Computes g of the tokens of a piece, and of the halo tokens that its dx needs, and adds to the sums. */
static void compute_g_and_sums(piece_work *work, int64_t d, bool last_channel, const float *weight, vf *sums)
{
    const cot_causal_conv1d_backward_args *a = &work->context->problem->args;
    const conv1d_piece *piece = work->piece;
    const int64_t K = work->context->problem->sizes.K, n = piece->end - piece->begin;
    const char *next_x = last_channel ? NULL : conv1d_element(&a->x, piece->b, d + 1, piece->begin);
    const char *next_dy = last_channel ? NULL : conv1d_element(&a->dy, piece->b, d + 1, piece->begin);
    const char *dy = conv1d_element(&a->dy, piece->b, d, piece->begin);
    row_args row = {.K = K,
                    .weight = weight,
                    .dy = dy,
                    .dtype = a->dy.dtype,
                    .silu = a->activation == COT_ACTIVATION_SILU,
                    .prefetch_dy = conv1d_prefetch_same_row(dy),
                    .sums = sums};
    if (!conv1d_contiguous_time(&a->dy)) {
        conv1d_gather(work->dy_f32, dy, a->dy.dtype, a->dy.stride[2], work->halo_end);
        row.dy = (const char *)work->dy_f32;
        row.dtype = COT_F32;
        row.prefetch_dy = conv1d_prefetch_next_row(row.dy, next_dy);
    }
    const int64_t copied = work->context->x_in_place ? conv1d_outputs_from_copy(piece, K) : n;
    const int64_t copied_end = copied < n ? copied : work->halo_end; /* if all tokens are copied, so is the halo */
    const int64_t size = conv1d_element_size(row.dtype);
    if (copied > 0) {
        conv1d_copy_inputs(piece, &a->x, &a->initial_state, K, d, piece->begin + copied_end, work->inputs);
        row.x = work->inputs;
        row.g = work->g;
        row.seq_ids = piece->seq_ids;
        row.prefetch_x = conv1d_prefetch_next_row(work->inputs, next_x);
        compute_range(work, d, &row, 0, copied, copied_end);
    }
    if (copied < n) {
        row.x = (const float *)(const void *)conv1d_element(&a->x, piece->b, d, piece->begin) + copied - (K - 1);
        row.dy += copied * size;
        row.prefetch_dy.l1 += (uintptr_t)(copied * size);
        row.prefetch_dy.l2 += (uintptr_t)(copied * size);
        row.g = work->g + copied;
        row.seq_ids = piece->seq_ids != NULL ? piece->seq_ids + copied : NULL;
        row.prefetch_x = conv1d_prefetch_same_row(row.x);
        compute_range(work, d, &row, copied, n - copied, work->halo_end - copied);
    }
    /* g is 0 after the last token. The convolution reads K-1 + VW of these zeros. */
    memset(work->g_after_one_pass + (work->halo_end - work->one_pass_end), 0, (size_t)(K - 1 + VW) * sizeof *work->g);
}

static void backward_row(piece_work *work, int64_t d, bool last_channel, const float *weight, float *totals)
{
    const cot_causal_conv1d_backward_args *a = &work->context->problem->args;
    const int64_t K = work->context->problem->sizes.K;
    vf sums[CONV1D_MAX_K + 1];
    for (int64_t k = 0; k <= K; k++)
        sums[k] = v_zero();
    work->one_pass_begin = work->one_pass_end = 0;
    work->g_after_one_pass = work->g;
    compute_g_and_sums(work, d, last_channel, weight, sums);
    for (int64_t k = 0; k <= K; k++)
        totals[k] += v_sum(sums[k]);
    if (cot_is_present(&a->dx))
        compute_dx(work, d, weight);
    if (cot_is_present(&a->dinitial_state) && work->piece->state >= 0 && work->piece->begin == work->piece->valid_begin)
        compute_dinitial_state(work, d, weight);
}

static void zero_gradients(const backward_context *context, const conv1d_piece *piece, int64_t d_begin, int64_t d_end)
{
    static const float zeros[CONV1D_ROW_BUFFER_TOKENS];
    const cot_causal_conv1d_backward_args *a = &context->problem->args;
    for (int64_t d = d_begin; d < d_end; d++) {
        for (int64_t t = piece->begin; cot_is_present(&a->dx) && t < piece->end; t += CONV1D_ROW_BUFFER_TOKENS)
            conv1d_scatter(conv1d_element(&a->dx, piece->b, d, t), a->dx.dtype, a->dx.stride[2], zeros,
                           cot_clamp(piece->end - t, 0, CONV1D_ROW_BUFFER_TOKENS));
        if (cot_is_present(&a->dinitial_state) && piece->state >= 0 && piece->begin == piece->valid_begin)
            for (int64_t i = 0; i < context->problem->sizes.K - 1; i++)
                conv1d_store(&a->dinitial_state, piece->state, d, i, 0);
    }
}

/* Channels [d_begin, d_end) of a piece. */
static void backward_rows(const backward_context *context, const conv1d_piece *piece, int64_t d_begin, int64_t d_end,
                          const float *weights, float *totals, piece_work *work)
{
    const int64_t K = context->problem->sizes.K, n = piece->end - piece->begin;
    work->context = context;
    work->piece = piece;
    work->halo_end = conv1d_halo_end(piece, K) - piece->begin;
    work->dfinal_begin = n;
    work->one_pass = context->one_pass && piece->seq_ids == NULL;
    if (cot_is_present(&context->problem->args.dfinal_state) && piece->state >= 0)
        work->dfinal_begin = cot_clamp(piece->valid_end - (K - 1) - piece->begin, 0, n);
    if (piece->seq_ids != NULL) {
        conv1d_mark_mixed(work->mixed, piece->seq_ids, n, K);
        conv1d_mark_mixed(work->mixed_dx, piece->seq_ids + K - 1, n, K);
    }
    for (int64_t d = d_begin; d < d_end; d++)
        backward_row(work, d, d + 1 == d_end, weights + (d - d_begin) * (K + 1), totals + (d - d_begin) * (K + 1));
}

/* Long pieces are processed channel by channel, so that the memory is read in order. They are cut into shorter pieces,
 * which fit in the buffers of a row. With the one-pass loop and x in place this is not needed: the buffers then hold
 * only the ends of a row. */
static void backward_split_piece(const backward_context *context, const conv1d_piece *piece, int64_t d_begin,
                                 int64_t d_end, backward_buffers *buffers)
{
    const int64_t K = context->problem->sizes.K;
    if (piece->padding) {
        zero_gradients(context, piece, d_begin, d_end);
        return;
    }
    if (piece->end - piece->begin <= CONV1D_ROW_BUFFER_TOKENS ||
        (context->one_pass && context->x_in_place && piece->seq_ids == NULL)) {
        backward_rows(context, piece, d_begin, d_end, buffers->weights, buffers->totals, &buffers->work);
        return;
    }
    for (int64_t d = d_begin; d < d_end; d++)
        for (int64_t t = piece->begin; t < piece->end; t += CONV1D_ROW_BUFFER_TOKENS) {
            conv1d_piece shorter = *piece;
            shorter.begin = t;
            shorter.end = cot_clamp(t + CONV1D_ROW_BUFFER_TOKENS, 0, piece->end);
            backward_rows(context, &shorter, d, d + 1, buffers->weights + (d - d_begin) * (K + 1),
                          buffers->totals + (d - d_begin) * (K + 1), &buffers->work);
        }
}

static void backward_item(void *argument, int64_t index, void *scratch)
{
    const backward_context *context = argument;
    const cot_causal_conv1d_backward_args *a = &context->problem->args;
    const conv1d_sizes *sizes = &context->problem->sizes;
    const int64_t K = sizes->K;
    if (index >= context->gradient_items) {
        const int64_t items_per_span = conv1d_state_items_per_span(sizes);
        conv1d_store_empty_dinitial_state(context->problem, (index - context->gradient_items) / items_per_span,
                                          (index - context->gradient_items) % items_per_span);
        return;
    }
    const conv1d_item item = conv1d_item_channel_first(&context->item_grid, sizes, index);
    const int64_t d_begin = item.d_begin, d_end = item.d_end;
    backward_buffers *const buffers = scratch;
    conv1d_copy_weights(buffers->weights, &a->weight, &a->bias, K, d_begin, d_end);
    memset(buffers->totals, 0, (size_t)((d_end - d_begin) * (K + 1)) * sizeof *buffers->totals);
    conv1d_piece_iterator pieces;
    conv1d_piece piece;
    for (int64_t b = item.b_begin; b < item.b_end; b++) {
        conv1d_begin_pieces(&pieces, &context->packing, b, item.t_begin, item.t_end, context->max_piece_tokens);
        while (conv1d_next_piece(&pieces, &piece))
            backward_split_piece(context, &piece, d_begin, d_end, buffers);
    }
    float *partials = context->partials + item.partial_index * (K + 1) * sizes->D;
    for (int64_t d = d_begin; d < d_end; d++)
        for (int64_t k = 0; k <= K; k++)
            partials[k * sizes->D + d] = buffers->totals[(d - d_begin) * (K + 1) + k];
    if (context->nontemporal)
        v_fence();
}

cot_status V_NAME(causal_conv1d_bwd_channel_first)(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_backward_problem *p = problem;
    const cot_causal_conv1d_backward_args *a = &p->args;
    const bool has_states =
        cot_is_present(&a->initial_state) || cot_is_present(&a->dfinal_state) || cot_is_present(&a->dinitial_state);
    const bool packed = cot_is_present(&a->seq_idx) || cot_is_present(&a->cu_seqlens);
    backward_context context = {
        .problem = p,
        .packing = conv1d_packing_of(&p->sizes, &a->seq_idx, &a->cu_seqlens, has_states),
        .item_grid = ((const conv1d_items_plan *)queue->plan)->item_grid,
        .x_in_place = a->x.dtype == COT_F32 && conv1d_contiguous_time(&a->x),
        .one_pass = p->sizes.K >= ONE_PASS_MIN_K && p->sizes.K <= ONE_PASS_MAX_K && cot_is_present(&a->dx) &&
                    conv1d_contiguous_time(&a->dx) && conv1d_contiguous_time(&a->dy),
        .nontemporal = conv1d_uses_nontemporal_stores(&p->sizes, 3),
        .partials = workspace,
    };
    context.max_piece_tokens =
        context.packing.split_at_sequences || !packed ? CONV1D_MAX_ITEM_TOKENS : CONV1D_ROW_BUFFER_TOKENS;
    context.gradient_items = conv1d_item_count(&context.item_grid);
    int64_t all_items = context.gradient_items;
    if (cot_is_present(&a->dinitial_state) && p->sizes.K > 1)
        all_items += p->sizes.sequence_count * conv1d_state_items_per_span(&p->sizes);
    cot_run_items_scratch(queue, all_items, backward_item, &context);
    conv1d_reduce(queue, p, workspace, context.item_grid.items_along_batch * context.item_grid.items_along_tokens);
    return COT_OK;
}
