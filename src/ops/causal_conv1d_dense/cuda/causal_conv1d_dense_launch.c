/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_launch.c: host side of the GPU kernels: which kernels a call launches, and with what grids.
 * Compiled for CUDA and for HIP. */
#include "causal_conv1d_dense_admit.h"

#include "core/argument_checks.h"
#include "core/op_tables.h"
#include "hip/launcher.h"

#if !defined(COT_FOR_HIP)
#include "causal_conv1d_dense_maps.h"
#endif

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "../causal_conv1d_dense_kernels.def"
#undef COT_KERNEL_ENTRY

/* The products: tensor cores and float32. On AMD GPUs both are MFMA. */
#if defined(COT_FOR_HIP)
#define PRODUCTS_IMAGE COT_IMAGE(causal_conv1d_dense_mfma)
#else
#define PRODUCTS_IMAGE COT_IMAGE(causal_conv1d_dense_generic)
#endif
extern const unsigned char COT_IMAGE(causal_conv1d_dense_rows)[], PRODUCTS_IMAGE[];

enum { THREADS = 256 };

#define ROWS(name)                                                           \
    {                                                                        \
        COT_IMAGE(causal_conv1d_dense_rows), "causal_conv1d_dense_" #name, 0 \
    }
static const cot_cuda_kernel pack = ROWS(pack), gather = ROWS(gather), reduce = ROWS(reduce),
                             dbias_generic = ROWS(dbias_generic), final_state = ROWS(final_state);

static conv1d_dense_array make_array(const cot_tensor *tensor)
{
    conv1d_dense_array a = {.data = cot_is_present(tensor) ? tensor->data : NULL, .dtype = tensor->dtype};
    for (int axis = 0; axis < tensor->rank && axis < 3; axis++)
        a.stride[axis] = tensor->stride[axis];
    return a;
}

static cot_status launch_helper(cot_queue *queue, const cot_cuda_kernel *kernel, int64_t x, int64_t y,
                                const conv1d_dense_call *c)
{
    const cot_cuda_grid grid = {.blocks = {(unsigned)x, (unsigned)y, 1}, .threads = THREADS};
    return cot_cuda_launch(queue, kernel, &grid, c);
}

static conv1d_dense_call make_call(const conv1d_dense_sizes *sizes, const conv1d_dense_cuda_layout *layout,
                                   void *workspace, cot_activation activation, const cot_tensor *weight,
                                   const cot_tensor *bias)
{
    char *memory = workspace;
    return (conv1d_dense_call){.B = sizes->B,
                               .Din = sizes->Din,
                               .Dout = sizes->Dout,
                               .T = sizes->T,
                               .K = sizes->K,
                               .silu = activation == COT_ACTIVATION_SILU,
                               .splits = (int32_t)layout->splits,
                               .dbias_chunks = (int32_t)layout->chunks,
                               .weight = make_array(weight),
                               .bias = make_array(bias),
                               .pitch_in = conv1d_dense_pitch(sizes->Din),
                               .pitch_out = conv1d_dense_pitch(sizes->Dout),
                               .packed_weight = memory + layout->packed_weight,
                               .xe = memory + layout->x,
                               .g_tokens = memory + layout->dy,
                               .g_workspace = memory + layout->g,
                               .dweight_partials = (float *)(memory + layout->dweight),
                               .dbias_partials = (float *)(memory + layout->dbias)};
}

static cot_status pack_weights(cot_queue *queue, const conv1d_dense_call *c)
{
    const int64_t blocks = cot_ceil_div(c->Dout * c->pitch_in, THREADS);
    return blocks > 0 ? launch_helper(queue, &pack, blocks, 1, c) : COT_OK;
}

/* Gathers `tokens` rows of a tensor for each b to `target`. The rows of consecutive b are plane_stride rows apart. */
static cot_status gather_rows(cot_queue *queue, const conv1d_dense_array *source, int64_t channels, int64_t tokens,
                              int64_t plane_stride, void *target, conv1d_dense_call *c)
{
    c->gather_source = *source;
    c->channels = channels;
    c->tokens = tokens;
    c->pitch = conv1d_dense_pitch(channels);
    c->plane = plane_stride * c->pitch;
    c->gather_target = target;
    const int64_t blocks = conv1d_dense_gather_blocks(tokens, c->pitch);
    return blocks * c->B > 0 ? launch_helper(queue, &gather, blocks, c->B, c) : COT_OK;
}

/* ---- portable kernels
 * -------------------------------------------------------------------------------------------------- */

/* The kernels of one kind of products. g_dtype: of g in the workspace. block: side of the square of a product
 * that a thread block computes. */
typedef struct portable_kernels {
    cot_cuda_kernel forward, dx, dweight;
    cot_dtype g_dtype;
    int block, threads;
} portable_kernels;

#define GENERIC(stem, name)                                       \
    {                                                             \
        PRODUCTS_IMAGE, "causal_conv1d_dense_" #stem "_" #name, 0 \
    }
#define GENERIC_KERNELS(name, dtype, side, threads)                                         \
    {                                                                                       \
        GENERIC(fwd, name), GENERIC(dx, name), GENERIC(dweight, name), dtype, side, threads \
    }
static const portable_kernels kernels_f32 = GENERIC_KERNELS(f32, COT_F32, CONV1D_DENSE_F32_BLOCK, 128),
                              kernels_bf16 = GENERIC_KERNELS(mma_bf16, COT_BF16, CONV1D_DENSE_MMA_BLOCK, 256),
                              kernels_f16 = GENERIC_KERNELS(mma_f16, COT_F16, CONV1D_DENSE_MMA_BLOCK, 256);

static cot_status launch_generic(cot_queue *queue, const portable_kernels *kernels, const cot_cuda_kernel *kernel,
                                 int64_t rows, int64_t columns, int64_t batch, const conv1d_dense_call *c)
{
    const int64_t blocks = cot_ceil_div(rows, kernels->block) * cot_ceil_div(columns, kernels->block) * batch;
    const cot_cuda_grid grid = {.blocks = {(unsigned)blocks, 1, 1}, .threads = (unsigned)kernels->threads};
    return blocks > 0 ? cot_cuda_launch(queue, kernel, &grid, c) : COT_OK;
}

/* For the tensor-core kernels: gathers xe, which begins with the state or zeros, and packs the weights by tap. */
static cot_status gather_inputs(cot_queue *queue, const portable_kernels *kernels, conv1d_dense_call *c)
{
    if (kernels->block != CONV1D_DENSE_MMA_BLOCK)
        return COT_OK;
    const int64_t state_rows = c->K - 1, rows = state_rows + c->T;
    CHECK(pack_weights(queue, c));
    CHECK(gather_rows(queue, &c->initial_state, c->Din, state_rows, rows, c->xe, c));
    return gather_rows(queue, &c->x, c->Din, c->T, rows, (uint16_t *)c->xe + state_rows * c->pitch_in, c);
}

static cot_status forward_generic(cot_queue *queue, const void *problem, void *workspace,
                                  const portable_kernels *kernels)
{
    const conv1d_dense_forward_problem *p = problem;
    const cot_causal_conv1d_dense_forward_args *a = &p->args;
    const conv1d_dense_sizes *sizes = &p->sizes;
    const conv1d_dense_cuda_layout none = {0};
    const bool tiles = kernels->block == CONV1D_DENSE_MMA_BLOCK;
    const conv1d_dense_cuda_layout *layout = tiles ? queue->plan : &none;
    const int64_t state_elements = sizes->B * sizes->Din * (sizes->K - 1);
    conv1d_dense_call c = make_call(sizes, layout, workspace, a->activation, &a->weight, &a->bias);
    c.x = make_array(&a->x);
    c.initial_state = make_array(&a->initial_state);
    c.out = make_array(&a->y);
    c.final_state = make_array(&a->final_state);
    if (cot_is_present(&a->y)) {
        CHECK(gather_inputs(queue, kernels, &c));
        CHECK(launch_generic(queue, kernels, &kernels->forward, sizes->T, sizes->Dout, sizes->B, &c));
    }
    return cot_is_present(&a->final_state) && state_elements > 0
               ? launch_helper(queue, &final_state, cot_ceil_div(state_elements, THREADS), 1, &c)
               : COT_OK;
}

static cot_status backward_generic(cot_queue *queue, const void *problem, void *workspace,
                                   const portable_kernels *kernels)
{
    const conv1d_dense_backward_problem *p = problem;
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    const conv1d_dense_sizes *sizes = &p->sizes;
    const bool silu = a->activation == COT_ACTIVATION_SILU, tiles = kernels->block == CONV1D_DENSE_MMA_BLOCK;
    const conv1d_dense_cuda_layout *layout = queue->plan;
    conv1d_dense_call c = make_call(sizes, layout, workspace, a->activation, &a->weight, &a->bias);
    c.accumulate = a->accumulate;
    c.x = make_array(&a->x);
    c.initial_state = make_array(&a->initial_state);
    c.dy = c.g = make_array(&a->dy);
    CHECK(gather_inputs(queue, kernels, &c));
    if (silu) {
        c.g = (conv1d_dense_array){c.g_workspace, {sizes->T * sizes->Dout, 1, sizes->Dout}, (int32_t)kernels->g_dtype};
        CHECK(launch_generic(queue, kernels, &kernels->forward, sizes->T, sizes->Dout, sizes->B, &c));
    }
    if (tiles)
        CHECK(gather_rows(queue, &c.g, sizes->Dout, sizes->T, sizes->T, c.g_tokens, &c));
    c.out = make_array(&a->dx);
    c.dfinal_state = make_array(&a->dfinal_state);
    c.dinitial_state = make_array(&a->dinitial_state);
    c.dweight = make_array(&a->dweight);
    c.dbias = make_array(&a->dbias);
    if (cot_is_present(&a->dx) || cot_is_present(&a->dinitial_state))
        CHECK(launch_generic(queue, kernels, &kernels->dx, sizes->K - 1 + sizes->T, sizes->Din, sizes->B, &c));
    if (cot_is_present(&a->dweight) && sizes->Dout * sizes->Din > 0) {
        CHECK(launch_generic(queue, kernels, &kernels->dweight, sizes->Dout, sizes->Din, sizes->K * c.splits, &c));
        CHECK(launch_helper(queue, &reduce, cot_ceil_div(sizes->Dout * sizes->Din, THREADS), 1, &c));
    }
    return cot_is_present(&a->dbias) && sizes->Dout > 0 ? launch_helper(queue, &dbias_generic, sizes->Dout, 1, &c)
                                                        : COT_OK;
}

cot_status COT_LAUNCHER(causal_conv1d_dense_fwd_generic)(cot_queue *queue, const void *problem, void *workspace)
{
    return forward_generic(queue, problem, workspace, &kernels_f32);
}

cot_status COT_LAUNCHER(causal_conv1d_dense_fwd_mma)(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_dense_sizes *sizes = problem;
    return forward_generic(queue, problem, workspace, sizes->dtype == COT_F16 ? &kernels_f16 : &kernels_bf16);
}

cot_status COT_LAUNCHER(causal_conv1d_dense_bwd_generic)(cot_queue *queue, const void *problem, void *workspace)
{
    return backward_generic(queue, problem, workspace, &kernels_f32);
}

cot_status COT_LAUNCHER(causal_conv1d_dense_bwd_mma_bf16)(cot_queue *queue, const void *problem, void *workspace)
{
    return backward_generic(queue, problem, workspace, &kernels_bf16);
}

cot_status COT_LAUNCHER(causal_conv1d_dense_bwd_mma_f16)(cot_queue *queue, const void *problem, void *workspace)
{
    return backward_generic(queue, problem, workspace, &kernels_f16);
}

#if !defined(COT_FOR_HIP)

/* ---- Hopper --------------------------------------------------------------------------------------------- */

extern const unsigned char cot_image_causal_conv1d_dense_sm90[];

enum { BOX = 64 };

#define SHARED_BYTES (CONV1D_DENSE_STAGES * 6 * 8192 + CONV1D_DENSE_BLOCK_N * 4 + 2 * CONV1D_DENSE_STAGES * 8)
#define PRODUCT(stem, name)                                                                           \
    {                                                                                                 \
        cot_image_causal_conv1d_dense_sm90, "causal_conv1d_dense_" #stem "_sm90_" #name, SHARED_BYTES \
    }

/* The Hopper kernels of a dtype. */
typedef struct dtype_kernels {
    cot_cuda_kernel forward, g, dx, dweight, dbias_sum;
} dtype_kernels;

#define KERNELS(name)                                                                    \
    {                                                                                    \
        PRODUCT(fwd, name), PRODUCT(g, name), PRODUCT(dx, name), PRODUCT(dweight, name), \
            {cot_image_causal_conv1d_dense_rows, "causal_conv1d_dense_sum_" #name, 0},   \
    }
static const dtype_kernels bf16_kernels = KERNELS(bf16), f16_kernels = KERNELS(f16);
static const cot_cuda_kernel dbias = ROWS(dbias);

/* Makes a tensor map with boxes of 64 x 64 of [planes][rows][columns]. Strides are in elements. The driver requires
 * valid sizes and strides even if nothing is loaded. */
static cot_status make_tensor_map(cot_queue *queue, CUtensorMap *to, cot_dtype dtype, void *data, int64_t columns,
                                  int64_t rows, int64_t row_stride, int64_t planes, int64_t plane_stride)
{
    const int64_t sizes[3] = {columns, rows > 0 ? rows : 1, planes > 0 ? planes : 1};
    const int64_t strides[2] = {rows > 1 ? 2 * row_stride : 16, planes > 1 ? 2 * plane_stride : 16};
    return cot_cuda_swizzled_map(queue, to, dtype, 3, data, sizes, strides, (const int[]){BOX, BOX, 1});
}

/* The tensor map of a [B,channels,T] tensor with contiguous channels. */
static cot_status map_tokens(cot_queue *queue, CUtensorMap *to, cot_dtype dtype, const conv1d_dense_array *a,
                             int64_t channels, const conv1d_dense_call *c)
{
    return make_tensor_map(queue, to, dtype, c->B * c->T > 0 ? a->data : c->packed_weight, channels,
                           c->B * c->T > 0 ? c->T : 0, a->stride[2], c->B * c->T > 0 ? c->B : 0, a->stride[0]);
}

static cot_status map_weights(cot_queue *queue, CUtensorMap *to, cot_dtype dtype, const conv1d_dense_call *c)
{
    return make_tensor_map(queue, to, dtype, c->packed_weight, c->Din, c->Dout, c->Din, c->K, c->Dout * c->Din);
}

/* Launches `batch` products of rows by columns. An empty grid is skipped. */
static cot_status launch_product(cot_queue *queue, const cot_cuda_kernel *kernel, int64_t rows, int64_t columns,
                                 int64_t batch, const conv1d_dense_mapped_call *m)
{
    const int64_t blocks =
        cot_ceil_div(rows, CONV1D_DENSE_BLOCK_M) * cot_ceil_div(columns, CONV1D_DENSE_BLOCK_N) * batch;
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)blocks, 1, 1}, .threads = CONV1D_DENSE_WARPGROUPS * 128, .shared_bytes = SHARED_BYTES};
    return blocks > 0 ? cot_cuda_launch(queue, kernel, &grid, m) : COT_OK;
}

static bool is_vectorized(const cot_tensor *t)
{
    return cot_is_present(t) && conv1d_dense_has_tma_layout(t);
}

/* Sets *tokens to x or dy in a layout that TMA can load: the tensor itself, or a copy gathered to `target`. */
static cot_status make_tma_tokens(cot_queue *queue, const conv1d_dense_sizes *sizes, const cot_tensor *tensor,
                                  int64_t channels, void *target, conv1d_dense_call *c, conv1d_dense_array *tokens)
{
    const conv1d_dense_array original = make_array(tensor);
    *tokens = original;
    if (conv1d_dense_has_tma_strides(tensor))
        return COT_OK;
    *tokens = (conv1d_dense_array){target, {sizes->T * channels, 1, channels}, (int32_t)sizes->dtype};
    return gather_rows(queue, &original, channels, sizes->T, sizes->T, target, c);
}

cot_status causal_conv1d_dense_fwd_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_dense_forward_problem *p = problem;
    const cot_causal_conv1d_dense_forward_args *a = &p->args;
    const conv1d_dense_sizes *sizes = &p->sizes;
    const conv1d_dense_cuda_layout *layout = queue->plan;
    if (!cot_is_present(&a->y) || cot_elements(&a->y) == 0)
        return COT_OK;
    conv1d_dense_mapped_call m = {.call = make_call(sizes, layout, workspace, a->activation, &a->weight, &a->bias)};
    conv1d_dense_array x;
    CHECK(make_tma_tokens(queue, sizes, &a->x, sizes->Din, (char *)workspace + layout->x, &m.call, &x));
    m.call.out = make_array(&a->y);
    m.call.out_vectorized = is_vectorized(&a->y);
    CHECK(pack_weights(queue, &m.call));
    CHECK(map_tokens(queue, &m.a, sizes->dtype, &x, sizes->Din, &m.call));
    CHECK(map_weights(queue, &m.b, sizes->dtype, &m.call));
    return launch_product(queue, sizes->dtype == COT_F16 ? &f16_kernels.forward : &bf16_kernels.forward, sizes->T,
                          sizes->Dout, sizes->B, &m);
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

static cot_status compute_dbias(cot_queue *queue, const dtype_kernels *kernels, const conv1d_dense_call *c)
{
    const int64_t channel_blocks = cot_ceil_div(c->Dout, THREADS);
    if (c->B * c->dbias_chunks > 0)
        CHECK(launch_helper(queue, &kernels->dbias_sum, c->B * c->dbias_chunks, channel_blocks, c));
    return launch_helper(queue, &dbias, cot_ceil_div(4 * c->Dout, THREADS), 1, c);
}

static cot_status backward(cot_queue *queue, const void *problem, void *workspace, const dtype_kernels *kernels)
{
    const conv1d_dense_backward_problem *p = problem;
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    const conv1d_dense_sizes *sizes = &p->sizes;
    const bool silu = a->activation == COT_ACTIVATION_SILU;
    const conv1d_dense_cuda_layout *layout = queue->plan;
    conv1d_dense_mapped_call m = {.call = make_call(sizes, layout, workspace, a->activation, &a->weight, &a->bias)};
    conv1d_dense_call *c = &m.call;
    conv1d_dense_array x = {0};
    c->accumulate = a->accumulate;
    if (silu || cot_is_present(&a->dweight))
        CHECK(make_tma_tokens(queue, sizes, &a->x, sizes->Din, (char *)workspace + layout->x, c, &x));
    CHECK(make_tma_tokens(queue, sizes, &a->dy, sizes->Dout, (char *)workspace + layout->dy, c, &c->dy));
    c->g = c->dy;
    c->dweight = make_array(&a->dweight);
    c->dbias = make_array(&a->dbias);
    if (silu || cot_is_present(&a->dx))
        CHECK(pack_weights(queue, c));
    if (silu) {
        c->g = (conv1d_dense_array){c->g_workspace, {sizes->T * sizes->Dout, 1, sizes->Dout}, (int32_t)sizes->dtype};
        CHECK(map_tokens(queue, &m.a, sizes->dtype, &x, sizes->Din, c));
        CHECK(map_weights(queue, &m.b, sizes->dtype, c));
        CHECK(launch_product(queue, &kernels->g, sizes->T, sizes->Dout, sizes->B, &m));
    }
    if (cot_is_present(&a->dx)) {
        c->out = make_array(&a->dx);
        c->out_vectorized = is_vectorized(&a->dx);
        CHECK(map_tokens(queue, &m.a, sizes->dtype, &c->g, sizes->Dout, c));
        CHECK(map_weights(queue, &m.b, sizes->dtype, c));
        CHECK(launch_product(queue, &kernels->dx, sizes->T, sizes->Din, sizes->B, &m));
    }
    if (cot_is_present(&a->dweight)) {
        CHECK(map_tokens(queue, &m.a, sizes->dtype, &c->g, sizes->Dout, c));
        CHECK(map_tokens(queue, &m.b, sizes->dtype, &x, sizes->Din, c));
        CHECK(launch_product(queue, &kernels->dweight, sizes->Dout, sizes->Din, sizes->K * c->splits, &m));
        CHECK(launch_helper(queue, &reduce, cot_ceil_div(sizes->Dout * sizes->Din, THREADS), 1, c));
    }
    return cot_is_present(&a->dbias) ? compute_dbias(queue, kernels, c) : COT_OK;
}

cot_status causal_conv1d_dense_bwd_bf16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return backward(queue, problem, workspace, &bf16_kernels);
}

cot_status causal_conv1d_dense_bwd_f16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return backward(queue, problem, workspace, &f16_kernels);
}

#endif
