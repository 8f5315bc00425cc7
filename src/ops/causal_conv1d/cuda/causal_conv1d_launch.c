/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_launch.c: the CUDA rows on the host: which kernels a call enqueues, with what grids. */
#include "causal_conv1d_launch.h"

#include "causal_conv1d_maps.h"
#include "cuda/device.h"

#define COT_KERNEL(direction, name, isa, admit, cost, ...) \
    cot_status name(cot_queue *queue, const void *problem, void *workspace_);
#include "../causal_conv1d_kernels.def"
#undef COT_KERNEL

enum { THREADS = CONV1D_LANES * CONV1D_WARPS, GENERIC_BLOCKS = 132 * 16 };

/* `return` on the first launch that fails. */
#define LAUNCH(queue, kernel, blocks_, call)                                                     \
    do {                                                                                         \
        const cot_cuda_grid grid_ = {.blocks = {(unsigned)(blocks_), 1, 1}, .threads = THREADS}; \
        const cot_status status_ = cot_cuda_launch(queue, kernel, &grid_, call);                 \
        if (status_ != COT_OK)                                                                   \
            return status_;                                                                      \
    } while (0)

/* ---- the kernels -------------------------------------------------------------------------------------- */

/* The instances of a file by dtype, f32, f16 and bf16 being 1, 2 and 3 in cot_dtype. Those for any device: plain, for
 * whole aligned vectors, K up to 4 and no packing; general, of width 8. */
typedef struct instances {
    cot_cuda_kernel plain[3], general[3];
} instances;

/* clang-format off */
#define IMAGE(stem) extern const unsigned char cot_image_##stem[];
#define KERNELS(stem, suffix, shared16, shared32) \
    {{cot_image_##stem, #stem "_f32" suffix, shared32}, {cot_image_##stem, #stem "_f16" suffix, shared16}, \
     {cot_image_##stem, #stem "_bf16" suffix, shared16}}
#define INSTANCES(name) \
    IMAGE(causal_conv1d_##name) \
    static const instances name = {KERNELS(causal_conv1d_##name, "", 0, 0), KERNELS(causal_conv1d_##name, "_general", 0, 0)};
/* shared: bytes of a tile of 16-bit elements, which has twice the tokens of one of float32 if time is contiguous */
#define SM90_FIRST(name, shared) \
    IMAGE(causal_conv1d_##name) \
    static const cot_cuda_kernel name[3] = KERNELS(causal_conv1d_##name, "", shared, shared);
#define SM90_LAST(name, shared) \
    IMAGE(causal_conv1d_##name) \
    static const cot_cuda_kernel name[3] = KERNELS(causal_conv1d_##name, "", shared, 2 * (shared));
#define FIRST_TILE(chunks) CONV1D_SM90_FIRST_BYTES(CONV1D_SM90_WARPS, chunks)
#define LAST_TILE(rows, halos, channels) ((CONV1D_SM90_WARPS * (rows) + (halos) * CONV1D_SM90_HALO) * (channels) * 2)

INSTANCES(fwd_channel_first)
INSTANCES(fwd_channel_last)
INSTANCES(bwd_channel_first)
INSTANCES(bwd_channel_last)
SM90_FIRST(fwd_channel_first_sm90, FIRST_TILE(CONV1D_SM90_FWD_CHUNKS))
SM90_FIRST(bwd_channel_first_sm90, 2 * FIRST_TILE(CONV1D_SM90_BWD_CHUNKS))
SM90_LAST(fwd_channel_last_sm90, LAST_TILE(CONV1D_SM90_FWD_ROWS, 1, CONV1D_SM90_FWD_CHANNELS))
SM90_LAST(bwd_channel_last_sm90, 2 * LAST_TILE(CONV1D_SM90_BWD_ROWS, 2, CONV1D_SM90_BWD_CHANNELS))
IMAGE(causal_conv1d_generic)
IMAGE(causal_conv1d_fwd_im2col)
/* clang-format on */

#define IM2COL(suffix)                                                           \
    {                                                                            \
        cot_image_causal_conv1d_fwd_im2col, "causal_conv1d_fwd_im2col" suffix, 0 \
    }
static const cot_cuda_kernel im2col[2][2] = {{IM2COL("_f16"), IM2COL("_bf16")},
                                             {IM2COL("_f16_k8"), IM2COL("_bf16_k8")}};

#define GENERIC(name) static const cot_cuda_kernel name = {cot_image_causal_conv1d_generic, "causal_conv1d_" #name, 0}
GENERIC(check_seqlens);
GENERIC(expand_seqlens);
GENERIC(forward_generic);
GENERIC(final_state);
GENERIC(gradient_generic);
GENERIC(dx_generic);
GENERIC(dinitial_state);
GENERIC(dweight_generic);
GENERIC(reduce_k4);
GENERIC(reduce_k8);
GENERIC(update_generic);

/* ---- arguments ---------------------------------------------------------------------------------------- */

/* An array of up to three axes; `row_axes` of them lead to rows of contiguous elements, whose alignment counts. */
static conv1d_array array(const cot_tensor *tensor, int contiguous_axis)
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

/* K = 4, and each channel's taps can be loaded at once. */
static bool taps_lie_together(const cot_tensor *weight)
{
    return weight->shape[1] == 4 && weight->stride[1] == 1 && (weight->stride[0] == 4 || weight->shape[0] == 1) &&
           (uintptr_t)weight->data % (4 * cot_dtype_size(weight->dtype)) == 0;
}

static conv1d_array index_array(const cot_tensor *tensor)
{
    return array(tensor, 0);
}

static conv1d_call call_of_sizes(const cot_queue *queue, const conv1d_sizes *s, cot_activation activation)
{
    return (conv1d_call){.B = s->B,
                         .D = s->D,
                         .T = s->T,
                         .K = s->K,
                         .N = s->state_count,
                         .silu = activation == COT_ACTIVATION_SILU,
                         .fault = cot_cuda_fault_word(queue),
                         .partial_count = 1};
}

static conv1d_call forward_call(const cot_queue *queue, const conv1d_forward_problem *p, int axis)
{
    const cot_causal_conv1d_forward_args *a = &p->args;
    conv1d_call c = call_of_sizes(queue, &p->sizes, a->activation);
    c.x = array(&a->x, axis);
    c.y = array(&a->y, axis);
    c.weight = array(&a->weight, 1);
    c.weight_packed = taps_lie_together(&a->weight);
    c.bias = array(&a->bias, 0);
    c.initial_state = array(&a->initial_state, 2);
    c.final_state = array(&a->final_state, 2);
    c.seq_idx = index_array(&a->seq_idx);
    c.cu_seqlens = index_array(&a->cu_seqlens);
    return c;
}

static conv1d_call backward_call(const cot_queue *queue, const conv1d_backward_problem *p, int axis)
{
    const cot_causal_conv1d_backward_args *a = &p->args;
    conv1d_call c = call_of_sizes(queue, &p->sizes, a->activation);
    c.accumulate = a->accumulate;
    c.x = array(&a->x, axis);
    c.dy = array(&a->dy, axis);
    c.dx = array(&a->dx, axis);
    c.weight = array(&a->weight, 1);
    c.weight_packed = taps_lie_together(&a->weight);
    c.bias = array(&a->bias, 0);
    c.dweight = array(&a->dweight, 1);
    c.dbias = array(&a->dbias, 0);
    c.initial_state = array(&a->initial_state, 2);
    c.dinitial_state = array(&a->dinitial_state, 2);
    c.dfinal_state = array(&a->dfinal_state, 2);
    c.seq_idx = index_array(&a->seq_idx);
    c.cu_seqlens = index_array(&a->cu_seqlens);
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

/* The instance for a call, whose contiguous axis has `extent` elements, and its width. */
static const cot_cuda_kernel *choose_instance(const instances *all, const conv1d_call *c, cot_dtype dtype,
                                              int64_t extent, int64_t *W)
{
    const bool plain = all_aligned(c) && c->K <= 4 && extent % 8 == 0 && c->seq_idx.data == NULL;
    *W = plain ? 4 : CONV1D_CUDA_MAX_K;
    return plain ? &all->plain[dtype - COT_F32] : &all->general[dtype - COT_F32];
}

/* Gives the fast kernels seq_idx for cu_seqlens, in the workspace. Returns what is left of that. */
static cot_status expand_cu_seqlens(cot_queue *queue, conv1d_call *c, const cot_tensor *cu_seqlens, void **workspace)
{
    if (!cot_is_present(cu_seqlens))
        return COT_OK;
    c->seq_idx = (conv1d_array){.data = *workspace, .stride = {0, 1}, .dtype = COT_I32};
    *workspace = (char *)*workspace + conv1d_cuda_id_bytes(&(conv1d_sizes){.T = c->T}, cu_seqlens);
    const int64_t longer = c->T > c->N ? c->T : c->N + 1;
    LAUNCH(queue, &expand_seqlens, generic_blocks(longer), c);
    return COT_OK;
}

static cot_status launch_plan(cot_queue *queue, const cot_cuda_kernel *kernel, const conv1d_cuda_plan *plan,
                              bool dependent, const void *call)
{
    if (plan->x * plan->y * plan->z == 0)
        return COT_OK;
    const cot_cuda_grid grid = {.blocks = {(unsigned)plan->x, (unsigned)plan->y, (unsigned)plan->z},
                                .threads = (unsigned)plan->warps * CONV1D_LANES,
                                .shared_bytes =
                                    (unsigned)(plan->shared_bytes > 0 ? plan->shared_bytes : kernel->shared_bytes),
                                .dependent = dependent};
    return cot_cuda_launch(queue, kernel, &grid, call);
}

/* A tile of x, or of dy, for contiguous channels. */
static cot_status map_tile(cot_queue *queue, CUtensorMap *map, const conv1d_call *c, const conv1d_array *a, int rows,
                           int channels)
{
    const int64_t size = (int64_t)cot_dtype_size((cot_dtype)a->dtype);
    /* The driver wants strides, even where an axis of one element is never stepped along. */
    const int64_t row = c->T > 1 ? a->stride[2] * size : 16, batch = c->B > 1 ? a->stride[0] * size : 16;
    return cot_cuda_tensor_map(queue, map, (cot_dtype)a->dtype, 3, a->data, (const int64_t[]){c->D, c->T, c->B},
                               (const int64_t[]){row, batch}, (const int[]){channels, rows, 1});
}

/* The kernel for Hopper of a direction and layout, on a call that it admits. Launched as dependent on the kernel
 * before, but for the backward with contiguous time. */
static cot_status launch_sm90(cot_queue *queue, const cot_cuda_kernel *kernel, const conv1d_cuda_plan *plan, int axis,
                              int rows, int channels, const conv1d_call *c)
{
    if (axis == 2)
        return launch_plan(queue, kernel, plan, c->dy.data == NULL, c);
    conv1d_mapped_call mapped = {.call = *c};
    if (plan->x * plan->y * plan->z == 0)
        return COT_OK;
    cot_status status = map_tile(queue, &mapped.x, c, &c->x, rows, channels);
    if (status == COT_OK && c->dy.data != NULL)
        status = map_tile(queue, &mapped.dy, c, &c->dy, rows, channels);
    if (status == COT_OK && c->dx.data != NULL)
        status = map_tile(queue, &mapped.dx, c, &c->dx, rows - 2 * CONV1D_SM90_HALO, channels);
    return status == COT_OK ? launch_plan(queue, kernel, plan, true, &mapped) : status;
}

/* ---- forward ------------------------------------------------------------------------------------------ */

/* From raw inputs alone, so any forward can leave it to this. */
static cot_status write_final_state(cot_queue *queue, const conv1d_forward_problem *p, conv1d_call *c)
{
    const int64_t elements = c->N * c->D * (c->K - 1);
    if (c->final_state.data == NULL || elements == 0)
        return COT_OK;
    c->seq_idx = index_array(&p->args.seq_idx);
    LAUNCH(queue, &final_state, generic_blocks(elements), c);
    return COT_OK;
}

cot_status causal_conv1d_fwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_forward_problem *p = problem;
    conv1d_call c = forward_call(queue, p, 2);
    if (c.cu_seqlens.data != NULL)
        LAUNCH(queue, &check_seqlens, generic_blocks(c.N + 1), &c);
    if (c.y.data != NULL && c.B * c.D * c.T > 0)
        LAUNCH(queue, &forward_generic, generic_blocks(c.B * c.D * c.T), &c);
    return write_final_state(queue, p, &c);
}

static cot_status forward(cot_queue *queue, const conv1d_forward_problem *p, void *workspace, const instances *all,
                          int axis)
{
    conv1d_call c = forward_call(queue, p, axis);
    const cot_status status = expand_cu_seqlens(queue, &c, &p->args.cu_seqlens, &workspace);
    if (status != COT_OK)
        return status;
    if (c.y.data != NULL && c.B * c.D * c.T > 0) {
        int64_t W;
        const cot_cuda_kernel *kernel = choose_instance(all, &c, p->sizes.dtype, axis == 2 ? c.T : c.D, &W);
        const conv1d_cuda_plan plan =
            axis == 2 ? conv1d_cuda_first(&p->sizes, W, CONV1D_FWD_CHUNKS) : conv1d_cuda_fwd_last(&p->sizes, W);
        c.part_length = plan.part_length;
        const cot_status launched = launch_plan(queue, kernel, &plan, false, &c);
        if (launched != COT_OK)
            return launched;
    }
    return write_final_state(queue, p, &c);
}

cot_status causal_conv1d_fwd_channel_first_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return forward(queue, problem, workspace, &fwd_channel_first, 2);
}

cot_status causal_conv1d_fwd_channel_last_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return forward(queue, problem, workspace, &fwd_channel_last, 1);
}

static cot_status forward_sm90(cot_queue *queue, const conv1d_forward_problem *p, const cot_cuda_kernel *kernels,
                               int axis)
{
    conv1d_call c = forward_call(queue, p, axis);
    const conv1d_cuda_plan plan = axis == 2
                                      ? conv1d_sm90_first(&p->sizes, CONV1D_SM90_FWD_CHUNKS, 1)
                                      : conv1d_sm90_last(&p->sizes, CONV1D_SM90_FWD_ROWS, CONV1D_SM90_FWD_CHANNELS);
    if (c.y.data != NULL) {
        const int rows = CONV1D_SM90_HALO + CONV1D_SM90_WARPS * CONV1D_SM90_FWD_ROWS;
        const cot_status launched =
            launch_sm90(queue, &kernels[p->sizes.dtype - COT_F32], &plan, axis, rows, CONV1D_SM90_FWD_CHANNELS, &c);
        if (launched != COT_OK)
            return launched;
    }
    return write_final_state(queue, p, &c);
}

cot_status causal_conv1d_fwd_channel_first_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_call c = forward_call(queue, problem, 2);
    return all_aligned(&c) ? forward_sm90(queue, problem, fwd_channel_first_sm90, 2)
                           : causal_conv1d_fwd_channel_first_sm80(queue, problem, workspace);
}

cot_status causal_conv1d_fwd_channel_last_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_call c = forward_call(queue, problem, 1);
    return all_aligned(&c) ? forward_sm90(queue, problem, fwd_channel_last_sm90, 1)
                           : causal_conv1d_fwd_channel_last_sm80(queue, problem, workspace);
}

cot_status causal_conv1d_fwd_im2col_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_forward_problem *p = problem;
    conv1d_call c = forward_call(queue, p, 2);
    c.x = array(&p->args.x, c.x.stride[1] == 1 ? 1 : 2);
    c.y = array(&p->args.y, c.y.stride[1] == 1 ? 1 : 2);
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
    c->seq_idx = index_array(&p->args.seq_idx);
    LAUNCH(queue, &dinitial_state, generic_blocks(elements), c);
    return COT_OK;
}

cot_status causal_conv1d_bwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_backward_problem *p = problem;
    conv1d_call c = backward_call(queue, p, 2);
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

static cot_status sum_partials(cot_queue *queue, conv1d_call *c, int64_t W)
{
    if (c->partial_count == 1 || (c->dweight.data == NULL && c->dbias.data == NULL))
        return COT_OK;
    const cot_cuda_grid grid = {.blocks = {(unsigned)cot_ceil_div(c->D, CONV1D_LANES), (unsigned)W + 1, 1},
                                .threads = THREADS,
                                .dependent = true};
    return cot_cuda_launch(queue, W == 4 ? &reduce_k4 : &reduce_k8, &grid, c);
}

static cot_status backward(cot_queue *queue, const conv1d_backward_problem *p, void *workspace, const instances *all,
                           int axis)
{
    conv1d_call c = backward_call(queue, p, axis);
    const cot_status status = expand_cu_seqlens(queue, &c, &p->args.cu_seqlens, &workspace);
    if (status != COT_OK)
        return status;
    if (c.D > 0) {
        int64_t W;
        const cot_cuda_kernel *kernel = choose_instance(all, &c, p->sizes.dtype, axis == 2 ? c.T : c.D, &W);
        const conv1d_cuda_plan plan =
            axis == 2 ? conv1d_cuda_first(&p->sizes, W, CONV1D_BWD_CHUNKS) : conv1d_cuda_bwd_last(&p->sizes, W);
        c.partial = workspace;
        c.partial_count = plan.shares;
        c.part_length = plan.part_length;
        const cot_status launched = launch_plan(queue, kernel, &plan, false, &c);
        if (launched != COT_OK)
            return launched;
        const cot_status summed = sum_partials(queue, &c, W);
        if (summed != COT_OK)
            return summed;
    }
    return write_dinitial_state(queue, p, &c);
}

cot_status causal_conv1d_bwd_channel_first_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return backward(queue, problem, workspace, &bwd_channel_first, 2);
}

cot_status causal_conv1d_bwd_channel_last_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return backward(queue, problem, workspace, &bwd_channel_last, 1);
}

static cot_status backward_sm90(cot_queue *queue, const conv1d_backward_problem *p, void *workspace,
                                const cot_cuda_kernel *kernels, int axis)
{
    conv1d_call c = backward_call(queue, p, axis);
    const conv1d_cuda_plan plan =
        axis == 2 ? conv1d_sm90_first(&p->sizes, CONV1D_SM90_BWD_CHUNKS, 2) : conv1d_sm90_bwd_last(&p->sizes);
    const int rows = 2 * CONV1D_SM90_HALO + CONV1D_SM90_WARPS * (int)plan.part_length;
    c.part_length = plan.part_length;
    c.partial = workspace;
    c.partial_count = plan.shares;
    cot_status status =
        launch_sm90(queue, &kernels[p->sizes.dtype - COT_F32], &plan, axis, rows, CONV1D_SM90_BWD_CHANNELS, &c);
    if (status == COT_OK && c.D > 0)
        status = sum_partials(queue, &c, 4);
    return status == COT_OK ? write_dinitial_state(queue, p, &c) : status;
}

cot_status causal_conv1d_bwd_channel_first_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_call c = backward_call(queue, problem, 2);
    return all_aligned(&c) ? backward_sm90(queue, problem, workspace, bwd_channel_first_sm90, 2)
                           : causal_conv1d_bwd_channel_first_sm80(queue, problem, workspace);
}

cot_status causal_conv1d_bwd_channel_last_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_call c = backward_call(queue, problem, 1);
    return all_aligned(&c) ? backward_sm90(queue, problem, workspace, bwd_channel_last_sm90, 1)
                           : causal_conv1d_bwd_channel_last_sm80(queue, problem, workspace);
}

/* ---- update ------------------------------------------------------------------------------------------- */

cot_status causal_conv1d_update_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const conv1d_update_problem *p = problem;
    const cot_causal_conv1d_update_args *a = &p->args;
    conv1d_call c = call_of_sizes(queue, &p->sizes, a->activation);
    c.S = p->S;
    c.x = array(&a->x, 2);
    c.y = array(&a->y, 2);
    c.weight = array(&a->weight, 1);
    c.weight_packed = taps_lie_together(&a->weight);
    c.bias = array(&a->bias, 0);
    c.conv_state = array(&a->conv_state, 2);
    c.cache_seqlens = index_array(&a->cache_seqlens);
    c.conv_state_indices = index_array(&a->conv_state_indices);
    if (c.B * c.D > 0)
        LAUNCH(queue, &update_generic, generic_blocks(c.B * c.D), &c);
    return COT_OK;
}
