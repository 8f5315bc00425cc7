/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_sm90_launch.c: host code of the backward for Hopper. It chooses the kernels of a call and their
 * grids. */
#include "attention_sm90_admit.h"

#include "attention_arrays.h"
#include "attention_bwd_choice.h"
#include "attention_maps.h"

#include "core/op_tables.h"

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "../attention_kernels.def"
#undef COT_KERNEL_ENTRY

extern const unsigned char cot_image_attention_bwd_preprocess_sm90[], cot_image_attention_bwd_key_blocks_sm90[],
    cot_image_attention_bwd_pairs_sm90[], cot_image_attention_bwd_wide_sm90[];

enum {
    PREPROCESS_THREADS = 256, /* also of postprocess and of the sum over the sink's gradient */
    PREPROCESS_WARPS = PREPROCESS_THREADS / 32,
    DQ_TILE_WARPS = 4, /* of postprocess, for a dQ tile */
    /* Sections whose delta `preprocess` computes, and thread blocks of the main kernel that compute delta of the others.
     * Causal calls of T = 512 were slower with 1 section and with fewer blocks. From T = 1024 on, 6 blocks are enough.
     * docs/experiments/attention.md has the figures. */
    PREPROCESSED_SECTIONS = 2,
    DELTA_BLOCKS = 8
};

/* The kernels for one dtype and number of used columns, in the order of their launches. */
typedef struct backward_kernels {
    cot_cuda_kernel preprocess, main, postprocess;
} backward_kernels;

/* An index of a table of backward_kernels is the first index of a version plus a width. Example:
 * bf16_kernels[FIRST_GENERAL + WIDTH_64] has the kernels attention_bwd_preprocess_d64_general,
 * attention_bwd_bf16_sm90_d64_general and attention_bwd_postprocess_bf16_d64_general. */
enum { WIDTH_64, WIDTH_96, WIDTH_128, WIDTH_192_128, WIDTH_192, WIDTH_256, WIDTHS };
enum { FIRST_SPECIALISED, FIRST_GENERAL = WIDTHS, FIRST_SOFTCAP = 2 * WIDTHS };

/* aux_name and main_name: the ends of the names of preprocess and postprocess, and of the main kernel. */
#define KERNELS_OF_WIDTH(dtype, aux_name, main_name, image, shared_bytes)                                    \
    {                                                                                                        \
        {cot_image_attention_bwd_preprocess_sm90, "attention_bwd_preprocess_" #aux_name, 0},                 \
            {image, "attention_bwd_" #dtype "_sm90_" #main_name, shared_bytes},                              \
            {cot_image_attention_bwd_preprocess_sm90, "attention_bwd_postprocess_" #dtype "_" #aux_name, 0}, \
    }
#define KEY_BLOCK_KERNELS(dtype, aux_name, main_name, tile_columns)                       \
    KERNELS_OF_WIDTH(dtype, aux_name, main_name, cot_image_attention_bwd_key_blocks_sm90, \
                     ATTENTION_BWD_KEY_BLOCKS_SHARED_BYTES(tile_columns))
#define WIDE_KERNELS(dtype, aux_name, main_name, d, d_v)                            \
    KERNELS_OF_WIDTH(dtype, aux_name, main_name, cot_image_attention_bwd_wide_sm90, \
                     ATTENTION_BWD_WIDE_SHARED_BYTES(d, d_v))
#define KERNELS_OF_ALL_WIDTHS(dtype, first, aux_suffix, main_suffix, d96_name)                                  \
    [first + WIDTH_64] = KEY_BLOCK_KERNELS(dtype, d64##aux_suffix, d64##main_suffix, 64),                       \
             [first + WIDTH_96] = KEY_BLOCK_KERNELS(dtype, d128##aux_suffix, d96_name, 128),                    \
             [first + WIDTH_128] = KEY_BLOCK_KERNELS(dtype, d128##aux_suffix, d128##main_suffix, 128),          \
             [first + WIDTH_192_128] = WIDE_KERNELS(dtype, d192##aux_suffix, d192_v128##main_suffix, 192, 128), \
             [first + WIDTH_192] = WIDE_KERNELS(dtype, d192##aux_suffix, d192##main_suffix, 192, 192),          \
             [first + WIDTH_256] = WIDE_KERNELS(dtype, d256##aux_suffix, d256##main_suffix, 256, 256)
/* The _softcap versions use preprocess and postprocess of _general. These two kernels do not read scores, so softcap
 * changes nothing in them. */
#define KERNELS_OF_DTYPE(dtype)                                                            \
    {                                                                                      \
        KERNELS_OF_ALL_WIDTHS(dtype, FIRST_SPECIALISED, , , d96),                          \
            KERNELS_OF_ALL_WIDTHS(dtype, FIRST_GENERAL, _general, _general, d96_general),  \
            KERNELS_OF_ALL_WIDTHS(dtype, FIRST_SOFTCAP, _general, _softcap, d128_softcap), \
    }
static const backward_kernels bf16_kernels[] = KERNELS_OF_DTYPE(bf16), f16_kernels[] = KERNELS_OF_DTYPE(f16);

/* The main kernels that are not in backward_kernels. Index 0: 64 tile columns, 1: 128. Kernels that the choice never takes do
 * not exist: those that store dq in f16 at 64 tile columns, except stores_dq. */
typedef struct other_main_kernels {
    cot_cuda_kernel stores_dq[2], general_stores_dq[2], pairs[2], pairs_stores_dq[2];
} other_main_kernels;

#define OTHER_MAIN_KERNEL(dtype, tile_columns, image, suffix, shared_bytes)                            \
    {                                                                                                  \
        image, "attention_bwd_" #dtype "_sm90_d" #tile_columns "_" #suffix, shared_bytes(tile_columns) \
    }
#define BOTH_WIDTHS(dtype, image, suffix, shared_bytes)                \
    {                                                                  \
        OTHER_MAIN_KERNEL(dtype, 64, image, suffix, shared_bytes),     \
            OTHER_MAIN_KERNEL(dtype, 128, image, suffix, shared_bytes) \
    }
#define OTHER_MAIN_KERNELS_OF(dtype)                                                                                   \
    {                                                                                                                  \
        BOTH_WIDTHS(dtype, cot_image_attention_bwd_key_blocks_sm90, stores_dq, ATTENTION_BWD_KEY_BLOCKS_SHARED_BYTES), \
            BOTH_WIDTHS(dtype, cot_image_attention_bwd_key_blocks_sm90, general_stores_dq,                             \
                        ATTENTION_BWD_KEY_BLOCKS_SHARED_BYTES),                                                        \
            BOTH_WIDTHS(dtype, cot_image_attention_bwd_pairs_sm90, pairs, ATTENTION_BWD_PAIRS_SHARED_BYTES),           \
            BOTH_WIDTHS(dtype, cot_image_attention_bwd_pairs_sm90, pairs_stores_dq, ATTENTION_BWD_PAIRS_SHARED_BYTES), \
    }
static const other_main_kernels bf16_other_main_kernels = OTHER_MAIN_KERNELS_OF(bf16),
                                f16_other_main_kernels = OTHER_MAIN_KERNELS_OF(f16);
static const cot_cuda_kernel dsink = {cot_image_attention_bwd_preprocess_sm90, "attention_bwd_dsink", 0};

static int kernels_index(const attention_sizes *sizes, bool general)
{
    const int64_t used_columns = attention_bwd_used_columns(sizes);
    const int width_index = used_columns == 64    ? WIDTH_64
                            : used_columns == 96  ? WIDTH_96
                            : used_columns == 128 ? WIDTH_128
                            : used_columns == 256 ? WIDTH_256
                            : sizes->d_v <= 128   ? WIDTH_192_128
                                                  : WIDTH_192;
    return width_index + (sizes->softcap > 0 ? FIRST_SOFTCAP : general ? FIRST_GENERAL : FIRST_SPECIALISED);
}

/* Encodes the map of lse_log2 and delta, which follow each other. One query tile is one row. */
static cot_status map_statistics(cot_queue *queue, CUtensorMap *map, const attention_bwd_call *c, int64_t tiles)
{
    const int64_t rows = 2 * tiles, row = c->tile_queries * (int64_t)sizeof(float);
    return cot_cuda_tensor_map(queue, map, COT_F32, 4, c->lse_log2, (const int64_t[]){c->tile_queries, rows, 1, 1},
                               (const int64_t[]){row, rows * row, rows * row}, (const int[]){c->tile_queries, 1, 1, 1});
}

/* Encodes the map of dq_accum: a dQ tile is 64 rows of 64 floats. */
static cot_status map_dq_accum(cot_queue *queue, CUtensorMap *map, const attention_bwd_call *c, int64_t dq_tiles)
{
    const int64_t rows = dq_tiles * (ATTENTION_BWD_DQ_TILE_FLOATS / 64), row = 64 * (int64_t)sizeof(float);
    return cot_cuda_tensor_map(queue, map, COT_F32, 4, c->dq_accum, (const int64_t[]){64, rows, 1, 1},
                               (const int64_t[]){row, rows * row, rows * row}, (const int[]){64, 64, 1, 1});
}

/* Coefficients for attention_bwd_softcap: power series of tanh and of its derivative, economised with Chebyshev
 * polynomials. So all coefficients differ a little from those of Taylor. */
static attention_bwd_softcap backward_softcap(const attention_sizes *sizes)
{
    attention_bwd_softcap cap = {0};
    if (sizes->softcap > 0) {
        const double scale = sizes->scale / sizes->softcap, square = scale * scale, max_scale = 16384;
        const double factor = sizes->softcap * 1.4426950408889634, linear = scale * factor;
        const bool normal = fabs(scale) > 1 / max_scale && fabs(scale) < max_scale;
        /* tolerance: relative error that P and slope may have.
         *   tanh x = x - x^3 / 3 + 2/15 x^5 - 17/315 x^7 + 62/2835 x^9 - ...
         *   slope  = 1 - x^2 + 2/3 x^4 - 17/45 x^6 + 62/315 x^8 - ...
         * Lower powers replace the first omitted power x^n, except for 1 / 2^(n-1) of it (Chebyshev polynomials). The
         * long series also counts the second omitted power.
         *   short series    slope: 2/3 x^4 / 8 = x^4 / 12         tanh: 2/15 x^5 / 16 = x^5 / 120
         *   long series     slope: 17/45 x^6 / 32 = x^6 / 84      tanh: 17/315 x^7 / 64 = x^7 / 1185
         *   second power    slope: 62/315 x^8 = x^8 / 5           tanh: 62/2835 x^9 = x^9 / 45 */
        const double tolerance = sizes->dtype == COT_F16 ? 0x1p-16 : 0x1p-13,
                     tanh_tolerance = tolerance / sizes->softcap;
        const double short_max = fmin(pow(12 * tolerance, 1.0 / 4), pow(120 * tanh_tolerance, 1.0 / 5)),
                     short2 = short_max * short_max, short4 = short2 * short2;
        const double long_max = fmin(fmin(pow(84 * tolerance, 1.0 / 6), pow(1185 * tanh_tolerance, 1.0 / 7)),
                                     fmin(pow(5 * tolerance, 1.0 / 8), pow(45 * tanh_tolerance, 1.0 / 9)));
        const double long2 = long_max * long_max, long4 = long2 * long2, long6 = long4 * long2;
        cap.scale = (float)scale;
        cap.factor = (float)factor;
        cap.short_max_square = normal ? (float)(short2 / square) : -1;
        cap.long_max_square = normal ? (float)(long2 / square) : -1;
        cap.short_series[0] = (float)((1 - short4 / 24) * linear);
        cap.short_series[1] = (float)((-1.0 / 3 + short2 / 6) * linear * square);
        cap.short_slope[0] = (float)(1 - short4 / 12);
        cap.short_slope[1] = (float)((-1 + short2 * 2 / 3) * square);
        cap.long_series[0] = (float)((1 - long6 * 17 / 2880) * linear);
        cap.long_series[1] = (float)((-1.0 / 3 + long4 * 17 / 360) * linear * square);
        cap.long_series[2] = (float)((2.0 / 15 - long2 * 17 / 180) * linear * square * square);
        cap.long_slope[0] = (float)(1 - long6 * 17 / 1440);
        cap.long_slope[1] = (float)((-1 + long4 * 17 / 80) * square);
        cap.long_slope[2] = (float)((2.0 / 3 - long2 * 17 / 30) * square * square);
    }
    return cap;
}

/* What the launches of a call share. */
typedef struct backward_launch {
    cot_queue *queue;
    const attention_problem *p;
    const attention_sm90_bwd_plan *plan;
    backward_choice choice;
    unsigned key_split;    /* thread blocks that divide the keys of a key block */
    unsigned cluster_size; /* thread blocks of a cluster of the main kernel; 1: no clusters */
    int64_t unit_count;
    bool is_persistent; /* a thread block, or a cluster of the pair kernel, takes one unit after another */
} backward_launch;

static backward_launch make_launch(cot_queue *queue, const attention_problem *p)
{
    const attention_sm90_bwd_plan *plan = queue->plan;
    const backward_choice choice = choose_backward(p, plan->general, plan->tile_columns);
    const unsigned key_split = plan->tile_columns > 128 ? ATTENTION_BWD_WIDE_KEY_SPLIT : 1;
    return (backward_launch){
        .queue = queue,
        .p = p,
        .plan = plan,
        .choice = choice,
        .key_split = key_split,
        .cluster_size = choice.pairs ? 2 : key_split * (unsigned)choice.head_split,
        .unit_count = choice.pairs ? cot_ceil_div(p->sizes.Tk, 2 * ATTENTION_BWD_KEYS) * p->sizes.B * p->sizes.Hkv
                                   : attention_bwd_batch_key_blocks_per_head(p) * p->sizes.Hkv,
        .is_persistent = plan->tile_columns <= 128 && choice.head_split == 1 && plan->tiles > 0,
    };
}

/* Whether the main kernel can compute delta (attention_bwd_delta_sm90.cuh). It reads out by TMA. Every query attends to a
 * key, because only preprocess clears dq of the others. */
static bool can_compute_delta(const backward_launch *launch)
{
    const attention_problem *p = launch->p;
    const attention_sizes *sizes = &p->sizes;
    return launch->plan->tiles > 0 && launch->choice.stores_dq && !launch->plan->general && p->delta.data == NULL &&
           p->dlse.data == NULL && sizes->d_v == launch->plan->tile_columns && attention_has_vectors_16(&p->out) &&
           cot_mul(launch->plan->tiles, launch->plan->tile_queries) <= INT32_MAX && sizes->Tk > 0 &&
           (!is_causal(sizes) || attention_diagonal(sizes) >= 0);
}

/* The query heads, counted over all batch elements, whose delta `preprocess` computes: all, or some of the first batch
 * element, or whole batch elements. */
static int64_t preprocessed_heads_of(const backward_launch *launch)
{
    const attention_sizes *sizes = &launch->p->sizes;
    const int64_t all = sizes->B * sizes->H, heads = PREPROCESSED_SECTIONS * launch->choice.heads_per_section;
    if (heads >= all || !can_compute_delta(launch))
        return all;
    return heads <= sizes->H ? heads : cot_min(all, cot_ceil_div(heads, sizes->H) * sizes->H);
}

static attention_bwd_call make_call(const backward_launch *launch, void *workspace)
{
    const attention_problem *p = launch->p;
    const attention_sizes *sizes = &p->sizes;
    const attention_sm90_bwd_plan *plan = launch->plan;
    const backward_choice *choice = &launch->choice;
    const bool p_scaled = sizes->dtype == COT_F16 && plan->tile_columns <= 128;
    const int64_t gqa_group = sizes->H / cot_max(sizes->Hkv, 1);
    uint32_t *const counters = (uint32_t *)((char *)workspace + plan->counters);
    const int64_t preprocessed_heads = preprocessed_heads_of(launch);
    /* `preprocess` clears the counter, and is launched only if there are queries. In the nondeterministic mode units do
     * not wait, and clusters take them by the index of the cluster. */
    const bool has_unit_counter = launch->is_persistent || (choice->deterministic && plan->tiles > 0);
    attention_bwd_call call = {
        .sequences = attention_sequences_of(launch->queue, p),
        .B = sizes->B,
        .H = sizes->H,
        .Hkv = sizes->Hkv,
        .Tq = sizes->Tq,
        .Tk = sizes->Tk,
        .d_qk = sizes->d_qk,
        .d_v = sizes->d_v,
        .tiles_per_head = cot_ceil_div(sizes->Tq, plan->tile_queries),
        .head_split = (uint32_t)choice->head_split,
        .unit_count = (uint32_t)launch->unit_count,
        .inverse_query_heads = (uint32_t)cot_ceil_div(INT64_C(1) << 31, cot_max(gqa_group / choice->head_split, 1)),
        .tile_queries = (int32_t)plan->tile_queries,
        .diagonal = attention_diagonal(sizes),
        .left = sizes->left,
        .right = sizes->right,
        .causal = sizes->right == 0,
        .deterministic = choice->deterministic,
        .accumulate = p->accumulate,
        .heads_per_section = choice->heads_per_section,
        .first_ascending_section = choice->first_ascending_section,
        .descending_tiles = choice->descending_tiles,
        .stores_dq = choice->stores_dq,
        .loads_out_vectors =
            attention_has_vectors_16(&p->out) && attention_has_vectors_16(&p->dout) && sizes->d_v % 8 == 0,
        .dq_store_method = store_method_of(p, &p->dq),
        .dk_store_method = store_method_of(p, &p->dk),
        .dv_store_method = store_method_of(p, &p->dv),
        .scale = (float)sizes->scale,
        .softmax_scale_log2 = (float)(sizes->scale * 1.4426950408889634),
        .p_exponent = p_scaled ? ATTENTION_BWD_P_EXPONENT : 0,
        .dp_scale = p_scaled ? ATTENTION_BWD_DP_SCALE : 1,
        .cap = backward_softcap(sizes),
        .lse = attention_array_of(&p->lse),
        .out = attention_array_of(&p->out),
        .dout = attention_array_of(&p->dout),
        .dlse = attention_array_of(&p->dlse),
        .delta = attention_array_of(&p->delta),
        .sink = attention_array_of(&p->sink),
        .dq = attention_array_of(&p->dq),
        .dk = attention_array_of(&p->dk),
        .dv = attention_array_of(&p->dv),
        .dsink = attention_array_of(&p->dsink),
        .lse_log2 = (float *)((char *)workspace + plan->lse_log2),
        .scaled_delta = (float *)((char *)workspace + plan->scaled_delta),
        .dq_accum = (float *)((char *)workspace + plan->dq_accum),
        .dq_semaphore = counters,
        .unit_counter = has_unit_counter ? counters + plan->dq_tiles : NULL,
        .preprocessed_heads = (int32_t)preprocessed_heads,
        .delta_done = counters + plan->dq_tiles + 1,
        .counter_count = plan->counter_count,
    };
    if (preprocessed_heads < sizes->B * sizes->H) {
        call.delta_shares = DELTA_BLOCKS / launch->cluster_size;
        call.delta_warps = DELTA_BLOCKS * ATTENTION_BWD_DELTA_WARPS;
    }
    attention_sequences *sequences = &call.sequences;
    sequences->max_tiles = (int32_t)plan->batch_tiles_per_head;
    sequences->max_key_blocks = (int32_t)attention_bwd_batch_key_blocks_per_head(p);
    sequences->tile_queries = (int32_t)plan->tile_queries;
    sequences->key_block_rows = ATTENTION_BWD_KEYS;
    sequences->seqlens = plan->general ? (attention_seqlen_info *)((char *)workspace + plan->seqlens) : NULL;
    return call;
}

static cot_status launch_preprocess(const backward_launch *launch, const cot_cuda_kernel *kernel,
                                    const attention_bwd_call *c)
{
    const attention_sm90_bwd_plan *plan = launch->plan;
    const int64_t row_lanes = plan->tile_columns == 192 ? 32 : plan->tile_columns / 8; /* lanes that share a row */
    const int64_t tiles = c->delta_shares > 0 ? c->preprocessed_heads * c->tiles_per_head : plan->tiles;
    /* No remainder, because every tile takes whole thread blocks. */
    const int64_t blocks =
        tiles * plan->tile_queries * row_lanes / (PREPROCESS_THREADS * ATTENTION_BWD_PREPROCESS_ROWS);
    return attention_launch(launch->queue, kernel,
                            (cot_cuda_grid){.blocks = {(unsigned)blocks, 1, 1}, .threads = PREPROCESS_THREADS}, c);
}

/* Encodes the maps of the main kernel. A map needs an address even if its tensor is empty: k.data is the placeholder
 * address of an empty tensor. */
static cot_status encode_maps(const backward_launch *launch, attention_bwd_mapped_call *mapped)
{
    cot_queue *queue = launch->queue;
    const attention_problem *p = launch->p;
    const attention_bwd_call *c = &mapped->call;
    const int64_t tiles = launch->plan->tiles;
    void *placeholder = p->k.data;
    /* Rows of a TMA box. */
    const int query_rows = launch->choice.pairs ? 64 : (int)launch->plan->tile_queries,
              key_rows = (int)(ATTENTION_BWD_KEYS / launch->key_split);
    cot_status status = COT_OK;
    if (tiles > 0)
        status = map_statistics(queue, &mapped->statistics, c, tiles);
    if (status == COT_OK && c->delta_shares > 0)
        status = attention_encode_row_map(queue, &mapped->out, &p->out, query_rows, placeholder);
    if (status == COT_OK && c->stores_dq && tiles > 0)
        status = map_dq_accum(queue, &mapped->dq_accum, c, launch->plan->dq_tiles);
    if (status == COT_OK)
        status = attention_encode_row_map(queue, &mapped->q, &p->q, query_rows, placeholder);
    if (status == COT_OK)
        status = attention_encode_row_map(queue, &mapped->k, &p->k, key_rows, placeholder);
    if (status == COT_OK)
        status = attention_encode_row_map(queue, &mapped->v, &p->v, key_rows, placeholder);
    if (status == COT_OK)
        status = attention_encode_row_map(queue, &mapped->dout, &p->dout, query_rows, placeholder);
    return status;
}

static cot_status launch_main(const backward_launch *launch, const backward_kernels *kernels,
                              const other_main_kernels *other, const attention_bwd_mapped_call *mapped)
{
    const backward_choice *choice = &launch->choice;
    const unsigned cluster_size = launch->cluster_size;
    const int other_index = launch->plan->tile_columns == 128;
    const bool general = launch->plan->general;
    const cot_cuda_kernel *kernel = choice->pairs && choice->stores_dq ? &other->pairs_stores_dq[other_index]
                                    : choice->pairs                    ? &other->pairs[other_index]
                                    : choice->stores_dq && general     ? &other->general_stores_dq[other_index]
                                    : choice->stores_dq                ? &other->stores_dq[other_index]
                                                                       : &kernels->main;
    const int64_t cluster_count =
        launch->is_persistent ? cot_clamp(launch->queue->device->multiprocessors / cluster_size, 1, launch->unit_count)
                              : launch->unit_count;
    return attention_launch(launch->queue, kernel,
                            (cot_cuda_grid){.blocks = {(unsigned)cluster_count * cluster_size, 1, 1},
                                            .threads = ATTENTION_BWD_WARPGROUPS * 128,
                                            .cluster = cluster_size > 1 ? cluster_size : 0,
                                            .dependent = true},
                            mapped);
}

/* The main kernels do not call cot_griddepcontrol_launch_dependents, so postprocess starts when they end. */
static cot_status launch_postprocess(const backward_launch *launch, const cot_cuda_kernel *kernel,
                                     const attention_bwd_call *c)
{
    const int64_t blocks = cot_ceil_div(launch->plan->dq_tiles * DQ_TILE_WARPS, PREPROCESS_WARPS);
    return attention_launch(
        launch->queue, kernel,
        (cot_cuda_grid){.blocks = {(unsigned)blocks, 1, 1}, .threads = PREPROCESS_THREADS, .dependent = true}, c);
}

static cot_status launch_dsink(const backward_launch *launch, const attention_bwd_call *c)
{
    return attention_launch(
        launch->queue, &dsink,
        (cot_cuda_grid){.blocks = {(unsigned)launch->p->sizes.H, 1, 1}, .threads = PREPROCESS_THREADS}, c);
}

static cot_status launch_backward_sm90(cot_queue *queue, const attention_problem *p, void *workspace,
                                       const backward_kernels *kernel_table, const other_main_kernels *other)
{
    if (p->sizes.H == 0)
        return COT_OK;
    const backward_launch launch = make_launch(queue, p);
    const backward_kernels *kernels = &kernel_table[kernels_index(&p->sizes, launch.plan->general)];
    attention_bwd_mapped_call mapped = {.call = make_call(&launch, workspace)};
    const attention_bwd_call *c = &mapped.call;
    cot_status status = launch.plan->general ? attention_launch_prepare(queue, &c->sequences) : COT_OK;
    if (status == COT_OK && launch.plan->tiles > 0)
        status = launch_preprocess(&launch, &kernels->preprocess, c);
    if (status == COT_OK && p->sizes.rows_k > 0) {
        status = encode_maps(&launch, &mapped);
        if (status == COT_OK)
            status = launch_main(&launch, kernels, other, &mapped);
    }
    if (status == COT_OK && c->dq.data != NULL && !c->stores_dq && launch.plan->dq_tiles > 0)
        status = launch_postprocess(&launch, &kernels->postprocess, c);
    if (status == COT_OK && c->dsink.data != NULL)
        status = launch_dsink(&launch, c);
    return status;
}

cot_status attention_bwd_bf16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return launch_backward_sm90(queue, problem, workspace, bf16_kernels, &bf16_other_main_kernels);
}

cot_status attention_bwd_f16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return launch_backward_sm90(queue, problem, workspace, f16_kernels, &f16_other_main_kernels);
}
