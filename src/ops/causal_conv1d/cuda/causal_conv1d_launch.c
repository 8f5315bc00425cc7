/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_launch.c: host side of the GPU kernels: which kernels a call launches, and with what grids. Compiled
 * for CUDA and for HIP. */
#include "causal_conv1d_admit.h"

#include "hip/launcher.h"

#include "core/op_tables.h"

#if !defined(COT_FOR_HIP)
#include "causal_conv1d_maps.h"
#endif

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "../causal_conv1d_kernels.def"
#undef COT_KERNEL_ENTRY

enum { THREADS = CONV1D_LANES * CONV1D_WARPS, GENERIC_BLOCKS = 132 * 16 };

/* Returns from the caller on the first launch that fails. */
#define LAUNCH(queue, kernel, blocks_, call)                                                     \
    do {                                                                                         \
        const cot_cuda_grid grid_ = {.blocks = {(unsigned)(blocks_), 1, 1}, .threads = THREADS}; \
        const cot_status status_ = cot_cuda_launch(queue, kernel, &grid_, call);                 \
        if (status_ != COT_OK)                                                                   \
            return status_;                                                                      \
    } while (0)

/* ---- the kernels -------------------------------------------------------------------------------------- */

/* The kernel instances of a file, indexed by dtype: f32, f16 and bf16 are 1, 2 and 3 in cot_dtype. The sm80 kernels
 * have plain versions (whole aligned vectors, K up to 4, no packing) and general versions, of width 8. */
typedef struct kernel_instances {
    cot_cuda_kernel plain[3], general[3];
} kernel_instances;

/* clang-format off */
#define IMAGE(stem) extern const unsigned char COT_IMAGE(stem)[];
#define KERNELS(stem, suffix, shared16, shared32) \
    {{COT_IMAGE(stem), #stem "_f32" suffix, shared32}, {COT_IMAGE(stem), #stem "_f16" suffix, shared16}, \
     {COT_IMAGE(stem), #stem "_bf16" suffix, shared16}}
#define INSTANCES(name) \
    IMAGE(causal_conv1d_##name) \
    static const kernel_instances name = {KERNELS(causal_conv1d_##name, "", 0, 0), \
                                          KERNELS(causal_conv1d_##name, "_general", 0, 0)};
/* shared: bytes of a tile of 16-bit elements. With contiguous time, a tile of f32 has half of the tokens and equal
 * bytes. With contiguous channels, it has as many tokens and twice the bytes. */
#define SM90_CHANNEL_FIRST(name, shared) \
    IMAGE(causal_conv1d_##name) \
    static const cot_cuda_kernel name[3] = KERNELS(causal_conv1d_##name, "", shared, shared);
#define SM90_CHANNEL_LAST(name, shared) \
    IMAGE(causal_conv1d_##name) \
    static const cot_cuda_kernel name[3] = KERNELS(causal_conv1d_##name, "", shared, 2 * (shared));
#define CHANNEL_FIRST_TILE_BYTES(chunks) CONV1D_SM90_CHANNEL_FIRST_BYTES(CONV1D_SM90_WARPS, chunks)
#define CHANNEL_LAST_TILE_BYTES(warp_tokens, halos, channels) \
    ((CONV1D_SM90_WARPS * (warp_tokens) + (halos) * CONV1D_SM90_HALO) * (channels) * 2)

INSTANCES(fwd_channel_first)
INSTANCES(fwd_channel_last)
INSTANCES(bwd_channel_first)
INSTANCES(bwd_channel_last)
IMAGE(causal_conv1d_generic)
#if !defined(COT_FOR_HIP)
SM90_CHANNEL_FIRST(fwd_channel_first_sm90, CHANNEL_FIRST_TILE_BYTES(CONV1D_SM90_FWD_CHUNKS))
SM90_CHANNEL_FIRST(bwd_channel_first_sm90, 2 * CHANNEL_FIRST_TILE_BYTES(CONV1D_SM90_BWD_CHUNKS))
SM90_CHANNEL_LAST(fwd_channel_last_sm90,
                  CHANNEL_LAST_TILE_BYTES(CONV1D_SM90_FWD_WARP_TOKENS, 1, CONV1D_SM90_FWD_CHANNELS))
SM90_CHANNEL_LAST(bwd_channel_last_sm90,
                  2 * CHANNEL_LAST_TILE_BYTES(CONV1D_SM90_BWD_WARP_TOKENS, 2, CONV1D_SM90_BWD_CHANNELS))
#endif
/* clang-format on */

/* On tensor cores; on AMD GPUs with MFMA. */
#if defined(COT_FOR_HIP)
#define IM2COL_IMAGE COT_IMAGE(causal_conv1d_fwd_im2col_mfma)
#else
#define IM2COL_IMAGE COT_IMAGE(causal_conv1d_fwd_im2col)
#endif
extern const unsigned char IM2COL_IMAGE[];
#define IM2COL(suffix)                                     \
    {                                                      \
        IM2COL_IMAGE, "causal_conv1d_fwd_im2col" suffix, 0 \
    }
static const cot_cuda_kernel im2col[2][2] = {{IM2COL("_f16"), IM2COL("_bf16")},
                                             {IM2COL("_f16_k8"), IM2COL("_bf16_k8")}};

#define GENERIC(name) static const cot_cuda_kernel name = {COT_IMAGE(causal_conv1d_generic), "causal_conv1d_" #name, 0}
GENERIC(check_seqlens);
GENERIC(expand_seqlens);
GENERIC(fwd_generic);
GENERIC(final_state);
GENERIC(gradient_generic);
GENERIC(dx_generic);
GENERIC(dinitial_state);
GENERIC(dweight_generic);
GENERIC(reduce_k4);
GENERIC(reduce_k8);
GENERIC(update_generic);

/* ---- arguments ---------------------------------------------------------------------------------------- */

/* Converts a tensor of up to 3 axes. Elements along `contiguous_axis` are contiguous, so its stride does not decide the
 * alignment. */
static conv1d_array make_array(const cot_tensor *tensor, int contiguous_axis)
{
    conv1d_array a = {.data = cot_is_present(tensor) ? tensor->data : NULL, .dtype = tensor->dtype};
    const int64_t size = (int64_t)cot_dtype_size(tensor->dtype);
    a.aligned = (uintptr_t)tensor->data % 16 == 0;
    for (int axis = 0; axis < tensor->rank && axis < 3; axis++) {
        a.stride[axis] = tensor->stride[axis];
        if (axis != contiguous_axis && tensor->shape[axis] > 1 && tensor->stride[axis] * size % 16 != 0)
            a.aligned = 0;
    }
    return a;
}

/* K = 4, and one vector load can load the 4 taps of a channel. */
static bool taps_are_packed(const cot_tensor *weight)
{
    return weight->shape[1] == 4 && weight->stride[1] == 1 && (weight->stride[0] == 4 || weight->shape[0] == 1) &&
           (uintptr_t)weight->data % (4 * cot_dtype_size(weight->dtype)) == 0;
}

static conv1d_array make_index_array(const cot_tensor *tensor)
{
    return make_array(tensor, 0);
}

static conv1d_call init_call(const cot_queue *queue, const conv1d_sizes *s, cot_activation activation)
{
    return (conv1d_call){.B = s->B,
                         .D = s->D,
                         .T = s->T,
                         .K = s->K,
                         .N = s->sequence_count,
                         .silu = activation == COT_ACTIVATION_SILU,
                         .fault = cot_cuda_fault_word(queue),
                         .partial_count = 1};
}

static conv1d_call make_forward_call(const cot_queue *queue, const conv1d_forward_problem *p, int axis)
{
    const cot_causal_conv1d_forward_args *a = &p->args;
    conv1d_call c = init_call(queue, &p->sizes, a->activation);
    c.x = make_array(&a->x, axis);
    c.y = make_array(&a->y, axis);
    c.weight = make_array(&a->weight, 1);
    c.weight_packed = taps_are_packed(&a->weight);
    c.bias = make_array(&a->bias, 0);
    c.initial_state = make_array(&a->initial_state, 2);
    c.final_state = make_array(&a->final_state, 2);
    c.seq_idx = make_index_array(&a->seq_idx);
    c.cu_seqlens = make_index_array(&a->cu_seqlens);
    return c;
}

static conv1d_call make_backward_call(const cot_queue *queue, const conv1d_backward_problem *p, int axis)
{
    const cot_causal_conv1d_backward_args *a = &p->args;
    conv1d_call c = init_call(queue, &p->sizes, a->activation);
    c.accumulate = a->accumulate;
    c.x = make_array(&a->x, axis);
    c.dy = make_array(&a->dy, axis);
    c.dx = make_array(&a->dx, axis);
    c.weight = make_array(&a->weight, 1);
    c.weight_packed = taps_are_packed(&a->weight);
    c.bias = make_array(&a->bias, 0);
    c.dweight = make_array(&a->dweight, 1);
    c.dbias = make_array(&a->dbias, 0);
    c.initial_state = make_array(&a->initial_state, 2);
    c.dinitial_state = make_array(&a->dinitial_state, 2);
    c.dfinal_state = make_array(&a->dfinal_state, 2);
    c.seq_idx = make_index_array(&a->seq_idx);
    c.cu_seqlens = make_index_array(&a->cu_seqlens);
    return c;
}

static int64_t generic_blocks(int64_t elements)
{
    return cot_min(cot_ceil_div(elements, THREADS), GENERIC_BLOCKS);
}

static bool all_aligned(const conv1d_call *c)
{
    return c->x.aligned && (c->y.data == NULL || c->y.aligned) && (c->dy.data == NULL || c->dy.aligned) &&
           (c->dx.data == NULL || c->dx.aligned);
}

/* Selects the kernel instance for a call, and its width. extent: elements of the contiguous axis. */
static const cot_cuda_kernel *choose_instance(const kernel_instances *instances, const conv1d_call *c, cot_dtype dtype,
                                              int64_t extent, int64_t *W)
{
    const bool plain = all_aligned(c) && c->K <= 4 && extent % 8 == 0 && c->seq_idx.data == NULL;
    *W = plain ? 4 : CONV1D_CUDA_MAX_K;
    return plain ? &instances->plain[dtype - COT_F32] : &instances->general[dtype - COT_F32];
}

/* Computes seq_idx from cu_seqlens for the fast kernels, at the start of *workspace, and moves *workspace behind it. */
static cot_status expand_cu_seqlens(cot_queue *queue, conv1d_call *c, const cot_tensor *cu_seqlens, void **workspace)
{
    if (!cot_is_present(cu_seqlens))
        return COT_OK;
    c->seq_idx = (conv1d_array){.data = *workspace, .stride = {0, 1}, .dtype = COT_I32};
    *workspace = (char *)*workspace + conv1d_cuda_seq_idx_bytes(&(conv1d_sizes){.T = c->T}, cu_seqlens);
    const int64_t count = c->T > c->N ? c->T : c->N + 1;
    LAUNCH(queue, &expand_seqlens, generic_blocks(count), c);
    return COT_OK;
}

static cot_status launch_with_config(cot_queue *queue, const cot_cuda_kernel *kernel,
                                     const conv1d_launch_config *config, bool dependent, const void *call)
{
    if (config->x * config->y * config->z == 0)
        return COT_OK;
    const cot_cuda_grid grid = {.blocks = {(unsigned)config->x, (unsigned)config->y, (unsigned)config->z},
                                .threads = (unsigned)config->warps * CONV1D_LANES,
                                .shared_bytes =
                                    (unsigned)(config->shared_bytes > 0 ? config->shared_bytes : kernel->shared_bytes),
                                .dependent = dependent};
    return cot_cuda_launch(queue, kernel, &grid, call);
}

#if !defined(COT_FOR_HIP)

/* The tensor map of x, dy or dx, with contiguous channels. tile_tokens, channels: the box. */
static cot_status map_tile(cot_queue *queue, CUtensorMap *map, const conv1d_call *c, const conv1d_array *a,
                           int tile_tokens, int channels)
{
    const int64_t size = (int64_t)cot_dtype_size((cot_dtype)a->dtype);
    /* The driver requires valid strides even for an axis of one element. */
    const int64_t token = c->T > 1 ? a->stride[2] * size : 16, batch = c->B > 1 ? a->stride[0] * size : 16;
    return cot_cuda_tensor_map(queue, map, (cot_dtype)a->dtype, 3, a->data, (const int64_t[]){c->D, c->T, c->B},
                               (const int64_t[]){token, batch}, (const int[]){channels, tile_tokens, 1});
}

/* Launches the Hopper kernel of a direction and layout for a call that it admits. The launch is dependent on the
 * previous kernel, except for the backward with contiguous time. */
static cot_status launch_sm90(cot_queue *queue, const cot_cuda_kernel *kernel, const conv1d_launch_config *config,
                              int axis, int tile_tokens, int channels, const conv1d_call *c)
{
    if (axis == 2)
        return launch_with_config(queue, kernel, config, c->dy.data == NULL, c);
    conv1d_mapped_call mapped = {.call = *c};
    if (config->x * config->y * config->z == 0)
        return COT_OK;
    cot_status status = map_tile(queue, &mapped.x, c, &c->x, tile_tokens, channels);
    if (status == COT_OK && c->dy.data != NULL)
        status = map_tile(queue, &mapped.dy, c, &c->dy, tile_tokens, channels);
    if (status == COT_OK && c->dx.data != NULL)
        status = map_tile(queue, &mapped.dx, c, &c->dx, tile_tokens - 2 * CONV1D_SM90_HALO, channels);
    return status == COT_OK ? launch_with_config(queue, kernel, config, true, &mapped) : status;
}

#endif

/* ---- forward ------------------------------------------------------------------------------------------ */

/* It needs the inputs only, so every forward kernel can use it. */
static cot_status write_final_state(cot_queue *queue, const conv1d_forward_problem *p, conv1d_call *c)
{
    const int64_t elements = c->N * c->D * (c->K - 1);
    if (c->final_state.data == NULL || elements == 0)
        return COT_OK;
    c->seq_idx = make_index_array(&p->args.seq_idx);
    LAUNCH(queue, &final_state, generic_blocks(elements), c);
    return COT_OK;
}

cot_status COT_LAUNCHER(causal_conv1d_fwd_generic)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_forward_problem *p = problem;
    conv1d_call c = make_forward_call(queue, p, 2);
    if (c.cu_seqlens.data != NULL)
        LAUNCH(queue, &check_seqlens, generic_blocks(c.N + 1), &c);
    if (c.y.data != NULL && c.B * c.D * c.T > 0)
        LAUNCH(queue, &fwd_generic, generic_blocks(c.B * c.D * c.T), &c);
    return write_final_state(queue, p, &c);
}

static cot_status forward(cot_queue *queue, const conv1d_forward_problem *p, void *workspace,
                          const kernel_instances *instances, int axis)
{
    conv1d_call c = make_forward_call(queue, p, axis);
    const cot_status status = expand_cu_seqlens(queue, &c, &p->args.cu_seqlens, &workspace);
    if (status != COT_OK)
        return status;
    if (c.y.data != NULL && c.B * c.D * c.T > 0) {
        int64_t W;
        const cot_cuda_kernel *kernel = choose_instance(instances, &c, p->sizes.dtype, axis == 2 ? c.T : c.D, &W);
        const conv1d_launch_config config = axis == 2
                                                ? conv1d_sm80_channel_first_config(&p->sizes, W, CONV1D_FWD_CHUNKS)
                                                : conv1d_sm80_fwd_channel_last_config(&p->sizes, W);
        c.warp_tokens = config.warp_tokens;
        const cot_status launched = launch_with_config(queue, kernel, &config, false, &c);
        if (launched != COT_OK)
            return launched;
    }
    return write_final_state(queue, p, &c);
}

cot_status COT_LAUNCHER(causal_conv1d_fwd_channel_first)(cot_queue *queue, const void *problem, void *workspace)
{
    return forward(queue, problem, workspace, &fwd_channel_first, 2);
}

cot_status COT_LAUNCHER(causal_conv1d_fwd_channel_last)(cot_queue *queue, const void *problem, void *workspace)
{
    return forward(queue, problem, workspace, &fwd_channel_last, 1);
}

#if !defined(COT_FOR_HIP)

static cot_status forward_sm90(cot_queue *queue, const conv1d_forward_problem *p, const cot_cuda_kernel *kernels,
                               int axis)
{
    conv1d_call c = make_forward_call(queue, p, axis);
    const conv1d_launch_config config =
        axis == 2 ? conv1d_sm90_channel_first_config(&p->sizes, CONV1D_SM90_FWD_CHUNKS, 1)
                  : conv1d_sm90_channel_last_config(&p->sizes, CONV1D_SM90_FWD_WARP_TOKENS, CONV1D_SM90_FWD_CHANNELS);
    if (c.y.data != NULL) {
        const int tile_tokens = CONV1D_SM90_HALO + CONV1D_SM90_WARPS * CONV1D_SM90_FWD_WARP_TOKENS;
        const cot_status launched = launch_sm90(queue, &kernels[p->sizes.dtype - COT_F32], &config, axis, tile_tokens,
                                                CONV1D_SM90_FWD_CHANNELS, &c);
        if (launched != COT_OK)
            return launched;
    }
    return write_final_state(queue, p, &c);
}

cot_status causal_conv1d_fwd_channel_first_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_call c = make_forward_call(queue, problem, 2);
    return all_aligned(&c) ? forward_sm90(queue, problem, fwd_channel_first_sm90, 2)
                           : causal_conv1d_fwd_channel_first_sm80(queue, problem, workspace);
}

cot_status causal_conv1d_fwd_channel_last_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_call c = make_forward_call(queue, problem, 1);
    return all_aligned(&c) ? forward_sm90(queue, problem, fwd_channel_last_sm90, 1)
                           : causal_conv1d_fwd_channel_last_sm80(queue, problem, workspace);
}

#endif

cot_status COT_LAUNCHER(causal_conv1d_fwd_im2col)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_forward_problem *p = problem;
    conv1d_call c = make_forward_call(queue, p, 2);
    c.x = make_array(&p->args.x, c.x.stride[1] == 1 ? 1 : 2);
    c.y = make_array(&p->args.y, c.y.stride[1] == 1 ? 1 : 2);
    const double blocks = conv1d_cuda_im2col_blocks(&p->sizes);
    if (c.y.data != NULL && blocks > 0) {
        const cot_cuda_grid grid = {.blocks = {(unsigned)blocks, 1, 1}, .threads = CONV1D_IM2COL_THREADS};
        const cot_cuda_kernel *kernel = &im2col[c.K > 4][p->sizes.dtype - COT_F16];
        const cot_status launched = cot_cuda_launch(queue, kernel, &grid, &c);
        if (launched != COT_OK)
            return launched;
    }
    return write_final_state(queue, p, &c);
}

/* ---- backward ----------------------------------------------------------------------------------------- */

static cot_status write_dinitial_state(cot_queue *queue, const conv1d_backward_problem *p, conv1d_call *c)
{
    const int64_t elements = c->N * c->D * (c->K - 1);
    if (c->dinitial_state.data == NULL || elements == 0)
        return COT_OK;
    c->seq_idx = make_index_array(&p->args.seq_idx);
    LAUNCH(queue, &dinitial_state, generic_blocks(elements), c);
    return COT_OK;
}

cot_status COT_LAUNCHER(causal_conv1d_bwd_generic)(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_backward_problem *p = problem;
    conv1d_call c = make_backward_call(queue, p, 2);
    const int64_t elements = c.B * c.D * c.T;
    c.g = workspace;
    if (c.cu_seqlens.data != NULL)
        LAUNCH(queue, &check_seqlens, generic_blocks(c.N + 1), &c);
    if (elements > 0)
        LAUNCH(queue, &gradient_generic, generic_blocks(elements), &c);
    if (elements > 0 && c.dx.data != NULL)
        LAUNCH(queue, &dx_generic, generic_blocks(elements), &c);
    if (c.D > 0 && (c.dweight.data != NULL || c.dbias.data != NULL))
        LAUNCH(queue, &dweight_generic, c.D * (c.K + 1), &c);
    return write_dinitial_state(queue, p, &c);
}

static cot_status reduce_partials(cot_queue *queue, conv1d_call *c, int64_t W)
{
    if (c->partial_count == 1 || (c->dweight.data == NULL && c->dbias.data == NULL))
        return COT_OK;
    const cot_cuda_grid grid = {.blocks = {(unsigned)cot_ceil_div(c->D, CONV1D_LANES), (unsigned)W + 1, 1},
                                .threads = THREADS,
                                .dependent = true};
    return cot_cuda_launch(queue, W == 4 ? &reduce_k4 : &reduce_k8, &grid, c);
}

static cot_status backward(cot_queue *queue, const conv1d_backward_problem *p, void *workspace,
                           const kernel_instances *instances, int axis)
{
    conv1d_call c = make_backward_call(queue, p, axis);
    const cot_status status = expand_cu_seqlens(queue, &c, &p->args.cu_seqlens, &workspace);
    if (status != COT_OK)
        return status;
    if (c.D > 0) {
        int64_t W;
        const cot_cuda_kernel *kernel = choose_instance(instances, &c, p->sizes.dtype, axis == 2 ? c.T : c.D, &W);
        const conv1d_bwd_plan *plan = queue->plan;
        const conv1d_launch_config *config = W == 4 ? &plan->width4 : &plan->width8;
        c.partial = workspace;
        c.partial_count = config->partial_count;
        c.warp_tokens = config->warp_tokens;
        const cot_status launched = launch_with_config(queue, kernel, config, false, &c);
        if (launched != COT_OK)
            return launched;
        const cot_status summed = reduce_partials(queue, &c, W);
        if (summed != COT_OK)
            return summed;
    }
    return write_dinitial_state(queue, p, &c);
}

cot_status COT_LAUNCHER(causal_conv1d_bwd_channel_first)(cot_queue *queue, const void *problem, void *workspace)
{
#if defined(COT_FOR_HIP) /* without general versions */
    const conv1d_call c = make_backward_call(queue, problem, 2);
    if (!all_aligned(&c))
        return COT_LAUNCHER(causal_conv1d_bwd_generic)(queue, problem, workspace);
#endif
    return backward(queue, problem, workspace, &bwd_channel_first, 2);
}

cot_status COT_LAUNCHER(causal_conv1d_bwd_channel_last)(cot_queue *queue, const void *problem, void *workspace)
{
    return backward(queue, problem, workspace, &bwd_channel_last, 1);
}

#if !defined(COT_FOR_HIP)

static cot_status backward_sm90(cot_queue *queue, const conv1d_backward_problem *p, void *workspace,
                                const cot_cuda_kernel *kernels, int axis)
{
    conv1d_call c = make_backward_call(queue, p, axis);
    const conv1d_launch_config *config = &((const conv1d_bwd_plan *)queue->plan)->sm90;
    const int tile_tokens = 2 * CONV1D_SM90_HALO + CONV1D_SM90_WARPS * (int)config->warp_tokens;
    c.warp_tokens = config->warp_tokens;
    c.partial = workspace;
    c.partial_count = config->partial_count;
    cot_status status =
        launch_sm90(queue, &kernels[p->sizes.dtype - COT_F32], config, axis, tile_tokens, CONV1D_SM90_BWD_CHANNELS, &c);
    if (status == COT_OK && c.D > 0)
        status = reduce_partials(queue, &c, 4);
    return status == COT_OK ? write_dinitial_state(queue, p, &c) : status;
}

cot_status causal_conv1d_bwd_channel_first_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_call c = make_backward_call(queue, problem, 2);
    return all_aligned(&c) ? backward_sm90(queue, problem, workspace, bwd_channel_first_sm90, 2)
                           : causal_conv1d_bwd_channel_first_sm80(queue, problem, workspace);
}

cot_status causal_conv1d_bwd_channel_last_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_call c = make_backward_call(queue, problem, 1);
    return all_aligned(&c) ? backward_sm90(queue, problem, workspace, bwd_channel_last_sm90, 1)
                           : causal_conv1d_bwd_channel_last_sm80(queue, problem, workspace);
}

#endif

/* ---- update ------------------------------------------------------------------------------------------- */

cot_status COT_LAUNCHER(causal_conv1d_update_generic)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_update_problem *p = problem;
    const cot_causal_conv1d_update_args *a = &p->args;
    conv1d_call c = init_call(queue, &p->sizes, a->activation);
    c.N = p->state_count;
    c.S = p->S;
    c.x = make_array(&a->x, 2);
    c.y = make_array(&a->y, 2);
    c.weight = make_array(&a->weight, 1);
    c.weight_packed = taps_are_packed(&a->weight);
    c.bias = make_array(&a->bias, 0);
    c.conv_state = make_array(&a->conv_state, 2);
    c.cache_seqlens = make_index_array(&a->cache_seqlens);
    c.conv_state_indices = make_index_array(&a->conv_state_indices);
    if (c.B * c.D > 0)
        LAUNCH(queue, &update_generic, generic_blocks(c.B * c.D), &c);
    return COT_OK;
}
