/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_bwd_channel_last.c: the backward for tensors with contiguous channels, or with few tokens:
 *     g[t]  = dy[t] * act'(z[t])                      z[t]  = bias + sum_k w[k] * xe[t+k]
 *     dx[t] = sum_j w[K-1-j] * g[t+j]                 dw[k] = sum_t g[t] * xe[t+k]          db = sum_t g[t]
 *
 * xe = [initial_state, x]: K-1 inputs before the first token, then x.
 *
 * causal_conv1d_items.h defines items, causal_conv1d_tiles.h tiles. conv1d_close_tap_chunk and conv1d_tap_sum add taps
 * in chunks of 16: causal_conv1d_to_f32.h has the reason.
 *
 * One loop over the tokens of a tile, for VW channels at a time, computes everything. At step i it holds the last K
 * inputs and the last K values of g. It adds to the sums, and completes dx of token i-K+1. A piece of n tokens
 * therefore takes n+K-1 steps. The dx of the first K-1 steps are stored to dinitial_state at the start of a sequence.
 * Elsewhere they are discarded, because the previous piece computes them. The halo of a piece is the next tokens, at
 * most K-1. The dx of the piece needs their g.
 *
 * The sums of a tile are added to those of the item, in its column state. causal_conv1d_reduce.h reduces the sums of
 * the items, which are in the workspace.
 *
 * src/simd/simd.h defines V_NAME (one function per instruction set), the types vf, vi and vm (VW lanes of floats, of
 * integers, and a mask) and the v_ functions. `nontemporal` means non-temporal stores. */
#include "causal_conv1d_instances.h"
#include "causal_conv1d_reduce.h"
#include "causal_conv1d_state.h"
#include "causal_conv1d_tiles.h"
#include "simd/silu.h"

cot_status V_NAME(causal_conv1d_bwd_channel_last)(cot_queue *, const void *, void *);

typedef struct tile_args {
    int64_t n, K, channels;
    const char *x, *dy; /* NULL: these steps have no token, g = 0 */
    char *dx;           /* step i writes dx of token i-K+1 */
    int64_t x_stride, dy_stride, dx_stride;
    cot_dtype dtype, dx_dtype; /* dtype of x and dy; dtype of dx */
    float *column_state;       /* see column_vector_count */
    int64_t first_sum;         /* vector of the first sum that the tile adds to, see sums_vector */
    bool silu, nontemporal;
    const int32_t
        *seq_ids; /* at step i, seq_ids[i+K-1] is the sequence of its token, seq_ids[i] that of the dx; < 0: none */
} tile_args;

/* Vectors of the state of a column (conv1d_pack_vector): K weights and the bias; K-1 of x before step 0;
 * K-1 of g; K+1 sums over the item's tokens; K+1 sums over halo tokens, which are discarded. */
V_INLINE int64_t column_vector_count(int64_t K)
{
    return 5 * K + 1;
}

V_INLINE int64_t g_vector(int64_t K)
{
    return 2 * K;
}

/* The first vector of the sums. counted: those over the item's tokens; else those over halo tokens, which are
 * discarded. */
V_INLINE int64_t sums_vector(int64_t K, bool counted)
{
    return counted ? 3 * K - 1 : 4 * K;
}

/* Pointers to the vectors of a column. */
typedef struct column_vectors {
    const float *weight;
    float *inputs, *g, *saved_sums;
} column_vectors;

V_INLINE column_vectors column_vectors_at(const tile_args *tile, int64_t channel, int64_t K)
{
    float *first = tile->column_state + channel * column_vector_count(K);
    return (column_vectors){first, first + (K + 1) * VW, first + g_vector(K) * VW, first + tile->first_sum * VW};
}

V_INLINE conv1d_writer dx_writer(const tile_args *tile, char *run_buffers)
{
    return (conv1d_writer){.output = tile->dx,
                           .run_buffers = run_buffers,
                           .stride = tile->dx_stride,
                           .n = tile->n,
                           .channels = tile->channels,
                           .nontemporal = tile->nontemporal};
}

static void tile_gradients_general(const tile_args *tile, int64_t first_channel)
{
    const int64_t K = tile->K, size = conv1d_element_size(tile->dtype), dx_size = conv1d_element_size(tile->dx_dtype);
    for (int64_t channel = first_channel; channel < tile->channels; channel += VW) {
        const int lanes = (int)(tile->channels - channel < VW ? tile->channels - channel : VW);
        const column_vectors vectors = column_vectors_at(tile, channel, K);
        vf inputs[CONV1D_MAX_K], g[CONV1D_MAX_K], sums[CONV1D_MAX_K + 1];
        for (int64_t k = 0; k < K - 1; k++) {
            inputs[k] = v_load(vectors.inputs + k * VW);
            g[k] = v_load(vectors.g + k * VW);
        }
        for (int64_t k = 0; k <= K; k++)
            sums[k] = v_zero();
        for (int64_t i = 0; i < tile->n; i++) {
            const int32_t *seq_ids = tile->seq_ids != NULL ? tile->seq_ids + i : NULL;
            inputs[K - 1] = g[K - 1] = v_zero();
            if (tile->x != NULL) {
                inputs[K - 1] = v_load_n_as(tile->x + i * tile->x_stride + channel * size, tile->dtype, lanes);
                if (seq_ids == NULL || seq_ids[K - 1] >= 0)
                    g[K - 1] = v_load_n_as(tile->dy + i * tile->dy_stride + channel * size, tile->dtype, lanes);
                vf z = v_load(vectors.weight + K * VW), total = v_zero();
                for (int64_t k = 0; tile->silu && k < K; k++) {
                    conv1d_close_tap_chunk(k, &z, &total);
                    if (seq_ids == NULL || seq_ids[k] == seq_ids[K - 1])
                        z = v_fma(v_load(vectors.weight + k * VW), inputs[k], z);
                }
                z = conv1d_tap_sum(K, z, total);
                if (tile->silu && (seq_ids == NULL || seq_ids[K - 1] >= 0))
                    g[K - 1] = v_mul(g[K - 1], v_silu_slope(z));
                for (int64_t k = 0; k < K; k++)
                    if (seq_ids == NULL || (seq_ids[k] == seq_ids[K - 1] && seq_ids[k] >= 0))
                        sums[k] = v_fma(g[K - 1], inputs[k], sums[k]);
                sums[K] = v_add(sums[K], g[K - 1]);
            }
            vf dx = v_zero(), total = v_zero();
            for (int64_t j = 0; j < K; j++) {
                conv1d_close_tap_chunk(j, &dx, &total);
                if (seq_ids == NULL || (seq_ids[j] == seq_ids[0] && seq_ids[0] >= 0))
                    dx = v_fma(v_load(vectors.weight + (K - 1 - j) * VW), g[j], dx);
            }
            dx = conv1d_tap_sum(K, dx, total);
            v_store_n_as(tile->dx + i * tile->dx_stride + channel * dx_size, tile->dx_dtype, dx, lanes);
            for (int64_t k = 0; k < K - 1; k++) {
                inputs[k] = inputs[k + 1];
                g[k] = g[k + 1];
            }
        }
        for (int64_t k = 0; k < K - 1; k++) {
            v_store(vectors.inputs + k * VW, inputs[k]);
            v_store(vectors.g + k * VW, g[k]);
        }
        for (int64_t k = 0; k <= K; k++)
            v_store(vectors.saved_sums + k * VW, v_add(v_load(vectors.saved_sums + k * VW), sums[k]));
    }
}

/* ---- through buffers: AVX2 --------------------------------------------------------------------------------------- *
 * K weights, K+1 sums and two windows of K do not fit in 16 registers at once. So the columns of a tile pass through
 * buffers in the L1 cache. x and dy are loaded to buffers; g replaces dy there; then dx and the sums are
 * computed. Two columns are buffered together: they fill a cache line, which is then read once and can be stored
 * non-temporally. */

/* Multiplies dy of `count` tokens by the slope of SiLU, which gives g. The tokens' operations are interleaved, as in
 * v_silu_slopes. */
V_INLINE void apply_silu_slopes(float *g, const float *inputs, const vf *w, vf bias, int count, int64_t K)
{
    vf z[4], total[4];
    V_UNROLL
    for (int v = 0; v < count; v++) {
        z[v] = bias;
        total[v] = v_zero();
    }
    V_UNROLL
    for (int64_t k = 0; k < K; k++)
        for (int v = 0; v < count; v++) {
            conv1d_close_tap_chunk(k, &z[v], &total[v]);
            z[v] = v_fma(w[k], v_load(inputs + (v + k) * VW), z[v]);
        }
    V_UNROLL
    for (int v = 0; v < count; v++)
        z[v] = conv1d_tap_sum(K, z[v], total[v]);
    v_silu_slopes(z, count);
    V_UNROLL
    for (int v = 0; v < count; v++)
        v_store(g + v * VW, v_mul(z[v], v_load(g + v * VW)));
}

enum { BUFFER_TOKENS = CONV1D_MAX_K + CONV1D_TILE_TOKENS };

/* Loads `count` columns of a tile, 1 or 2, to the buffers, after the K-1 vectors of the previous tokens. */
V_INLINE void stage_columns(const tile_args *tile, int64_t channel, int count, int64_t K, cot_dtype dtype,
                            float inputs[2][BUFFER_TOKENS * VW], float g[2][BUFFER_TOKENS * VW])
{
    const int64_t size = conv1d_element_size(dtype), bytes = count * VW * size;
    const char *x = tile->x + channel * size, *dy = tile->dy + channel * size;
    for (int64_t i = K - 1; i < K - 1 + tile->n; i++, x += tile->x_stride, dy += tile->dy_stride) {
        conv1d_prefetch_tile(x, tile->x_stride, bytes);
        conv1d_prefetch_tile(dy, tile->dy_stride, bytes);
        for (int v = 0; v < count; v++) {
            v_store(inputs[v] + i * VW, v_load_as(x + v * VW * size, dtype));
            v_store(g[v] + i * VW, v_load_as(dy + v * VW * size, dtype));
        }
    }
}

V_INLINE void store_columns(conv1d_writer *writer, int64_t channel, int count, cot_dtype dtype,
                            float dx[2][CONV1D_TILE_TOKENS * VW])
{
    char *to = conv1d_writer_pointer(writer, channel, conv1d_element_size(dtype));
    for (int64_t i = 0; i < writer->n; i++, to += conv1d_writer_stride(writer)) {
        if (count == 2)
            v_store2_as(to, dtype, v_load(dx[0] + i * VW), v_load(dx[1] + i * VW));
        else
            v_store_as(to, dtype, v_load(dx[0] + i * VW));
        conv1d_writer_drain(writer, count * VW * conv1d_element_size(dtype));
    }
}

/* The gradients of one column of n <= CONV1D_TILE_TOKENS tokens. */
V_INLINE void column_gradients_buffered(const tile_args *tile, int64_t channel, int64_t K, bool silu, float *inputs,
                                        float *g, float *dx)
{
    const int64_t n = tile->n;
    const column_vectors vectors = column_vectors_at(tile, channel, K);
    vf w[CONV1D_MAX_K], sums[CONV1D_MAX_K + 1];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_load(vectors.weight + k * VW);
    for (int64_t k = 0; k < K - 1; k++) {
        v_store(inputs + k * VW, v_load(vectors.inputs + k * VW));
        v_store(g + k * VW, v_load(vectors.g + k * VW));
    }
    const vf bias = v_load(vectors.weight + K * VW);
    int64_t token = silu ? 0 : n;
    for (; token + 4 <= n; token += 4)
        apply_silu_slopes(g + (K - 1 + token) * VW, inputs + token * VW, w, bias, 4, K);
    for (; token < n; token++)
        apply_silu_slopes(g + (K - 1 + token) * VW, inputs + token * VW, w, bias, 1, K);
    for (int64_t k = 0; k <= K; k++)
        sums[k] = v_zero();
    for (int64_t i = 0; i < n; i++) {
        const vf g_i = v_load(g + (K - 1 + i) * VW);
        vf dx_i = v_zero(), total = v_zero();
        V_UNROLL
        for (int64_t k = 0; k < K; k++) {
            conv1d_close_tap_chunk(k, &dx_i, &total);
            sums[k] = v_fma(g_i, v_load(inputs + (i + k) * VW), sums[k]);
            dx_i = v_fma(w[K - 1 - k], v_load(g + (i + k) * VW), dx_i);
        }
        sums[K] = v_add(sums[K], g_i);
        v_store(dx + i * VW, conv1d_tap_sum(K, dx_i, total));
    }
    for (int64_t k = 0; k < K - 1; k++) {
        v_store(vectors.inputs + k * VW, v_load(inputs + (n + k) * VW));
        v_store(vectors.g + k * VW, v_load(g + (n + k) * VW));
    }
    for (int64_t k = 0; k <= K; k++)
        v_store(vectors.saved_sums + k * VW, v_add(v_load(vectors.saved_sums + k * VW), sums[k]));
}

V_INLINE int64_t tile_gradients_buffered(const tile_args *tile, int64_t K, cot_dtype dtype)
{
    float inputs[2][BUFFER_TOKENS * VW], g[2][BUFFER_TOKENS * VW], dx[2][CONV1D_TILE_TOKENS * VW];
    _Alignas(CONV1D_RUN_BYTES) char run_buffers[CONV1D_RUN_BUFFERS];
    conv1d_writer writer = dx_writer(tile, run_buffers);
    int64_t channel = 0;
    for (int count; channel + VW <= tile->channels; channel += count * VW) {
        count = channel + 2 * VW <= tile->channels ? 2 : 1;
        if (count == 2)
            stage_columns(tile, channel, 2, K, dtype, inputs, g);
        else
            stage_columns(tile, channel, 1, K, dtype, inputs, g);
        for (int v = 0; v < count; v++)
            if (tile->silu)
                column_gradients_buffered(tile, channel + v * VW, K, true, inputs[v], g[v], dx[v]);
            else
                column_gradients_buffered(tile, channel + v * VW, K, false, inputs[v], g[v], dx[v]);
        if (count == 2)
            store_columns(&writer, channel, 2, dtype, dx);
        else
            store_columns(&writer, channel, 1, dtype, dx);
        conv1d_writer_commit(&writer, channel + count * VW, conv1d_element_size(dtype));
    }
    return channel;
}

/* ---- in registers: AVX-512 and plain C ------------------------------------------------------------------------- *
 * AVX-512 has 32 registers. The copy in plain C (VW = 4) takes this path too, also where it has only the 16 registers
 * of SSE. */

/* Iteration i computes the slope of token i, adds token i - DELAY to the sums, and completes dx of token
 * i - DELAY - K + 1. The slope takes 70 cycles. Without the delay, the operations that wait for it fill the processor's
 * scheduler, and the slope of the next token cannot start. */
enum { DELAY = 1 };

/* Whole vectors of channels, for steps that have tokens; x, dy and dx have one dtype. Returns the first channel that is
 * not done. */
V_INLINE int64_t tile_gradients_in_registers(const tile_args *args, int64_t K, cot_dtype dtype)
{
    const tile_args local = *args,
                    *tile = &local; /* the compiler sees that no store changes the copy, and keeps it in registers */
    const int64_t size = conv1d_element_size(dtype), n = tile->n;
    _Alignas(CONV1D_RUN_BYTES) char run_buffers[CONV1D_RUN_BUFFERS];
    conv1d_writer writer = dx_writer(tile, run_buffers);
    const int64_t dx_stride = conv1d_writer_stride(&writer);
    int64_t channel = 0;
    for (; channel + VW <= tile->channels; channel += VW) {
        const column_vectors vectors = column_vectors_at(tile, channel, K);
        vf w[CONV1D_MAX_K], inputs[CONV1D_MAX_K + DELAY], g[CONV1D_MAX_K + DELAY], sums[CONV1D_MAX_K + 1];
        for (int64_t k = 0; k < K; k++) {
            w[k] = v_load(vectors.weight + k * VW);
            sums[k] = v_zero();
        }
        for (int64_t k = 0; k < K + DELAY; k++)
            inputs[k] = g[k] = v_zero();
        for (int64_t k = 0; k < K - 1; k++) {
            inputs[DELAY + k] = v_load(vectors.inputs + k * VW);
            g[DELAY + k] = v_load(vectors.g + k * VW);
        }
        const vf bias = v_load(vectors.weight + K * VW);
        sums[K] = v_zero();
        const char *x = tile->x + channel * size, *dy = tile->dy + channel * size;
        char *dx = conv1d_writer_pointer(&writer, channel, size);
        for (int64_t i = 0; i < n + DELAY; i++) {
            if (i < n) {
                conv1d_prefetch_tile(x, tile->x_stride, VW * size);
                conv1d_prefetch_tile(dy, tile->dy_stride, VW * size);
                inputs[DELAY + K - 1] = v_load_as(x, dtype);
                g[DELAY + K - 1] = v_load_as(dy, dtype);
                x += tile->x_stride;
                dy += tile->dy_stride;
                if (tile->silu) {
                    vf z = bias, total = v_zero();
                    V_UNROLL
                    for (int64_t k = 0; k < K; k++) {
                        conv1d_close_tap_chunk(k, &z, &total);
                        z = v_fma(w[k], inputs[DELAY + k], z);
                    }
                    g[DELAY + K - 1] = v_mul(g[DELAY + K - 1], v_silu_slope(conv1d_tap_sum(K, z, total)));
                }
            }
            if (i >= DELAY) {
                vf result = v_zero(), total = v_zero();
                V_UNROLL
                for (int64_t k = 0; k < K; k++) {
                    conv1d_close_tap_chunk(k, &result, &total);
                    sums[k] = v_fma(g[K - 1], inputs[k], sums[k]);
                    result = v_fma(w[K - 1 - k], g[k], result);
                }
                sums[K] = v_add(sums[K], g[K - 1]);
                v_store_as(dx, dtype, conv1d_tap_sum(K, result, total));
                dx += dx_stride;
                conv1d_writer_drain(&writer, VW * size);
            }
            V_UNROLL
            for (int64_t k = 0; k < K - 1 + DELAY; k++) {
                inputs[k] = inputs[k + 1];
                g[k] = g[k + 1];
            }
        }
        conv1d_writer_commit(&writer, channel + VW, size);
        for (int64_t k = 0; k < K - 1; k++) {
            v_store(vectors.inputs + k * VW, inputs[k]);
            v_store(vectors.g + k * VW, g[k]);
        }
        for (int64_t k = 0; k <= K; k++)
            v_store(vectors.saved_sums + k * VW, v_add(v_load(vectors.saved_sums + k * VW), sums[k]));
    }
    return channel;
}

#define DEFINE_TILE_GRADIENT(width, dtype)                                                   \
    static int64_t tile_gradients_##width##_##dtype(const tile_args *tile)                   \
    {                                                                                        \
        if (CONV1D_FEW_REGISTERS)                                                            \
            return tile_gradients_buffered(tile, width == 0 ? tile->K : width, COT_##dtype); \
        return tile_gradients_in_registers(tile, width == 0 ? tile->K : width, COT_##dtype); \
    }
#define DEFINE_TILE_GRADIENTS(width) CONV1D_EACH_DTYPE(DEFINE_TILE_GRADIENT, width)
CONV1D_EACH_WIDTH(DEFINE_TILE_GRADIENTS)

#define TILE_GRADIENT_ENTRY(width)                                                                \
    {                                                                                             \
        tile_gradients_##width##_F32, tile_gradients_##width##_F16, tile_gradients_##width##_BF16 \
    }
static int64_t (*const tile_gradients_table[CONV1D_INSTANCES][3])(const tile_args *) =
    CONV1D_TABLE(TILE_GRADIENT_ENTRY);

/* ---- pieces ------------------------------------------------------------------------------------------------- */

typedef struct backward_context {
    const conv1d_backward_problem *problem;
    conv1d_packing packing;
    conv1d_item_grid item_grid;
    int64_t gradient_items; /* those with tokens. More items follow, which look for sequences without tokens */
    bool reads_tensors,     /* x and dy are read from the tensors, without staging */
        writes_dx,          /* dx is written to the tensor, too */
        nontemporal;        /* dx is written by non-temporal stores */
    float *partials;
} backward_context;

/* The working state of an item, in the thread's scratch. */
typedef struct backward_work {
    const backward_context *context;
    int64_t d_begin, channels, pitch;
    _Alignas(64) float column_state[CONV1D_BWD_COLUMN_STATE_FLOATS];
    float x[CONV1D_BUFFERED_TILE_FLOATS], dy[CONV1D_BUFFERED_TILE_FLOATS], dx[CONV1D_BUFFERED_TILE_FLOATS];
} backward_work;

_Static_assert(sizeof(backward_work) <= CONV1D_BWD_CHANNEL_LAST_SCRATCH_BYTES,
               "backward_work must fit in the thread's scratch");

/* The steps at which the work of a step changes. Steps count from the beginning of the piece; step i loads token i. */
typedef struct backward_steps {
    int64_t n;            /* tokens of the piece; steps below n add to its sums */
    int64_t halo_end;     /* steps from here on have no token */
    int64_t dfinal_begin; /* from this step on, the completed dx needs a term from dfinal_state */
    int64_t count;        /* number of steps */
} backward_steps;

/* Whether the dx of the steps from i until next_change is discarded. */
static bool discards_dx(const backward_work *work, const conv1d_piece *piece, int64_t i)
{
    const cot_causal_conv1d_backward_args *a = &work->context->problem->args;
    if (i >= work->context->problem->sizes.K - 1)
        return !cot_is_present(&a->dx);
    return !cot_is_present(&a->dinitial_state) || piece->state < 0 || piece->begin != piece->valid_begin;
}

/* Adds the dfinal_state terms to the dx that steps [i, i+n) left in the buffer, and stores it to dx or to
 * dinitial_state. */
static void store_dx(backward_work *work, const conv1d_piece *piece, int64_t i, int64_t n)
{
    const cot_causal_conv1d_backward_args *a = &work->context->problem->args;
    const int64_t K = work->context->problem->sizes.K;
    for (int64_t offset = 0; offset < n; offset++) {
        const int64_t position = piece->begin + i + offset - (K - 1),
                      state_position = position - piece->valid_end + K - 1;
        const bool is_token = position >= piece->begin;
        float *values = work->dx + offset * work->pitch;
        if (cot_is_present(&a->dfinal_state) && piece->state >= 0 && state_position >= 0 &&
            conv1d_contributes_in_piece(piece, K, position, piece->valid_end - 1))
            for (int64_t channel = 0; channel < work->channels; channel++)
                values[channel] += conv1d_load(&a->dfinal_state, piece->state, work->d_begin + channel, state_position);
        if (is_token)
            conv1d_scatter_tile(values, work->pitch, &a->dx, piece->b, work->d_begin, work->channels, position, 1);
        else
            conv1d_scatter_tile(values, work->pitch, &a->dinitial_state, piece->state, work->d_begin, work->channels,
                                position - piece->valid_begin + K - 1, 1);
    }
}

/* Whether dx of the steps from i to the next change is stored to the tensor by the loop over the tokens. Else store_dx
 * stores it, or it is discarded. */
static bool stores_dx_directly(const backward_context *context, const backward_steps *steps, int64_t i)
{
    return context->writes_dx && i >= context->problem->sizes.K - 1 && i < steps->dfinal_begin;
}

/* Steps [i, i+n), which all do the same: next_change and `single_sequence` bound them. */
static void backward_tile(backward_work *work, const conv1d_piece *piece, const backward_steps *steps, int64_t i,
                          int64_t n, bool single_sequence)
{
    const backward_context *context = work->context;
    const cot_causal_conv1d_backward_args *a = &context->problem->args;
    const int64_t K = context->problem->sizes.K, token = piece->begin + i, size = conv1d_element_size(a->x.dtype);
    const bool direct_dx = stores_dx_directly(context, steps, i);
    const bool discarded = discards_dx(work, piece, i);
    tile_args tile = {.n = n,
                      .K = K,
                      .channels = work->channels,
                      .dtype = COT_F32,
                      .dx = (char *)work->dx,
                      .dx_stride = work->pitch * 4,
                      .dx_dtype = COT_F32,
                      .column_state = work->column_state,
                      .first_sum = sums_vector(K, i < steps->n),
                      .silu = a->activation == COT_ACTIVATION_SILU,
                      .nontemporal = direct_dx && context->nontemporal,
                      .seq_ids = single_sequence ? NULL : piece->seq_ids + i};
    if (i < steps->halo_end && context->reads_tensors) {
        tile.x = conv1d_element(&a->x, piece->b, work->d_begin, token);
        tile.dy = conv1d_element(&a->dy, piece->b, work->d_begin, token);
        tile.x_stride = a->x.stride[2] * size;
        tile.dy_stride = a->dy.stride[2] * size;
        tile.dtype = a->x.dtype;
    } else if (i < steps->halo_end) {
        conv1d_gather_tile(work->x, work->pitch, &a->x, piece->b, work->d_begin, work->channels, token, n);
        conv1d_gather_tile(work->dy, work->pitch, &a->dy, piece->b, work->d_begin, work->channels, token, n);
        tile.x = (const char *)work->x;
        tile.dy = (const char *)work->dy;
        tile.x_stride = tile.dy_stride = work->pitch * 4;
    }
    if (direct_dx) {
        tile.dx = conv1d_element(&a->dx, piece->b, work->d_begin, token - (K - 1));
        tile.dx_stride = a->dx.stride[2] * size;
        tile.dx_dtype = a->dx.dtype;
    } else if (discarded) {
        tile.dx_dtype = tile.dtype; /* dx is not copied from the buffer; the fast loop needs one dtype */
    }
    const bool fast = single_sequence && tile.x != NULL && tile.dx_dtype == tile.dtype;
    const int64_t done_channels =
        fast ? tile_gradients_table[conv1d_instance_index(K)][tile.dtype - COT_F32](&tile) : 0;
    if (done_channels < work->channels)
        tile_gradients_general(&tile, done_channels);
    if (!direct_dx && !discarded)
        store_dx(work, piece, i, n);
}

static void zero_gradients(backward_work *work, const conv1d_piece *piece)
{
    const cot_causal_conv1d_backward_args *a = &work->context->problem->args;
    memset(work->dx, 0, (size_t)work->pitch * sizeof *work->dx);
    for (int64_t t = piece->begin; cot_is_present(&a->dx) && t < piece->end; t++)
        conv1d_scatter_tile(work->dx, work->pitch, &a->dx, piece->b, work->d_begin, work->channels, t, 1);
    if (cot_is_present(&a->dinitial_state) && piece->state >= 0 && piece->begin == piece->valid_begin)
        for (int64_t i = 0; i < work->context->problem->sizes.K - 1; i++)
            conv1d_scatter_tile(work->dx, work->pitch, &a->dinitial_state, piece->state, work->d_begin, work->channels,
                                i, 1);
}

/* The first step after i where something changes, at most i + max_steps. */
static int64_t next_change(const backward_steps *steps, int64_t K, int64_t i, int64_t max_steps)
{
    const int64_t changes[] = {K - 1, steps->n, steps->halo_end, steps->dfinal_begin, steps->count};
    int64_t end = i + max_steps;
    for (size_t k = 0; k < sizeof changes / sizeof *changes; k++)
        if (changes[k] > i && changes[k] < end)
            end = changes[k];
    return end;
}

static void backward_piece(backward_work *work, const conv1d_piece *piece)
{
    const backward_context *context = work->context;
    const cot_causal_conv1d_backward_args *a = &context->problem->args;
    const int64_t K = context->problem->sizes.K;
    if (piece->padding) {
        zero_gradients(work, piece);
        return;
    }
    conv1d_pack_history(work->column_state, column_vector_count(K), &a->x, &a->initial_state, piece, K, work->d_begin,
                        work->channels);
    conv1d_pack_zeros(work->column_state, column_vector_count(K), g_vector(K), K - 1, work->channels);
    backward_steps steps = {.n = piece->end - piece->begin};
    const bool outputs = cot_is_present(&a->dx) || cot_is_present(&a->dinitial_state);
    steps.count = steps.n + (outputs ? K - 1 : 0);
    steps.halo_end = conv1d_halo_end(piece, K) - piece->begin;
    steps.dfinal_begin = steps.n + K - 1;
    if (cot_is_present(&a->dfinal_state) && piece->state >= 0)
        steps.dfinal_begin = cot_clamp(piece->valid_end - piece->begin, K - 1, steps.n + K - 1);
    for (int64_t i = 0; i < steps.count;) {
        bool single_sequence;
        const int64_t max_steps =
            stores_dx_directly(context, &steps, i) ? CONV1D_TILE_TOKENS : conv1d_buffered_tile_tokens(work->channels);
        const int64_t end = next_change(&steps, K, i, max_steps);
        const int64_t n = conv1d_single_sequence_run(piece->seq_ids, i, end, K, &single_sequence);
        backward_tile(work, piece, &steps, i, n, single_sequence);
        i += n;
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
    const conv1d_item item = conv1d_item_channel_last(&context->item_grid, sizes, index);
    backward_work *const work = scratch;
    work->context = context;
    work->d_begin = item.d_begin;
    work->channels = item.d_end - item.d_begin;
    work->pitch = conv1d_pitch(work->channels);
    conv1d_pack_weights(work->column_state, column_vector_count(K), &a->weight, &a->bias, K, work->d_begin,
                        work->channels);
    conv1d_pack_zeros(work->column_state, column_vector_count(K), sums_vector(K, true), 2 * (K + 1), work->channels);
    conv1d_piece_iterator pieces;
    conv1d_piece piece;
    for (int64_t b = item.b_begin; b < item.b_end; b++) {
        conv1d_begin_pieces(&pieces, &context->packing, b, item.t_begin, item.t_end, CONV1D_ROW_BUFFER_TOKENS);
        while (conv1d_next_piece(&pieces, &piece))
            backward_piece(work, &piece);
    }
    float *partials = context->partials + item.partial_index * (K + 1) * sizes->D + work->d_begin;
    for (int64_t channel = 0; channel < work->channels; channel += VW) {
        const float *sums = work->column_state + channel * column_vector_count(K) + sums_vector(K, true) * VW;
        for (int64_t k = 0; k <= K; k++)
            v_store_n(partials + k * sizes->D + channel, v_load(sums + k * VW),
                      (int)cot_clamp(work->channels - channel, 0, VW));
    }
    if (context->nontemporal)
        v_fence();
}

cot_status V_NAME(causal_conv1d_bwd_channel_last)(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_backward_problem *p = problem;
    const cot_causal_conv1d_backward_args *a = &p->args;
    const bool has_states =
        cot_is_present(&a->initial_state) || cot_is_present(&a->dfinal_state) || cot_is_present(&a->dinitial_state);
    backward_context context = {
        .problem = p,
        .packing = conv1d_packing_of(&p->sizes, &a->seq_idx, &a->cu_seqlens, has_states),
        .item_grid = ((const conv1d_items_plan *)queue->plan)->item_grid,
        .reads_tensors = conv1d_contiguous_channels(&a->x) && conv1d_contiguous_channels(&a->dy),
        .partials = workspace,
    };
    context.writes_dx = context.reads_tensors && cot_is_present(&a->dx) && conv1d_contiguous_channels(&a->dx);
    context.nontemporal =
        context.writes_dx && conv1d_nontemporal_tokens(&a->dx) && conv1d_uses_nontemporal_stores(&p->sizes, 3);
    context.gradient_items = conv1d_item_count(&context.item_grid);
    int64_t all_items = context.gradient_items;
    if (cot_is_present(&a->dinitial_state) && p->sizes.K > 1)
        all_items += p->sizes.sequence_count * conv1d_state_items_per_span(&p->sizes);
    cot_run_items_scratch(queue, all_items, backward_item, &context);
    conv1d_reduce(queue, p, workspace, context.item_grid.items_along_batch * context.item_grid.items_along_tokens);
    return COT_OK;
}
