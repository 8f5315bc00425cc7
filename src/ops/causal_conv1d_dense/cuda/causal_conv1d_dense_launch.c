/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_launch.c: the CUDA rows on the host: which kernels a call enqueues, with what grids. */
#include "causal_conv1d_dense_launch.h"

#include "causal_conv1d_dense_maps.h"
#include "core/front.h"
#include "cuda/device.h"

#define COT_KERNEL(direction, name, isa, intermediate, admit, cost, ...) \
    cot_status name(cot_queue *queue, const void *problem, void *workspace_);
#include "../causal_conv1d_dense_kernels.def"
#undef COT_KERNEL

extern const unsigned char cot_image_causal_conv1d_dense_rows[], cot_image_causal_conv1d_dense_sm90[],
    cot_image_causal_conv1d_dense_generic[];

enum { THREADS = 256, BOX = 64 };

#define SHARED_BYTES (CONV1D_DENSE_STAGES * 6 * 8192 + CONV1D_DENSE_COLUMNS * 4 + 2 * CONV1D_DENSE_STAGES * 8)
#define PRODUCT(stem, name)                                                                           \
    {                                                                                                 \
        cot_image_causal_conv1d_dense_sm90, "causal_conv1d_dense_" #stem "_sm90_" #name, SHARED_BYTES \
    }

/* The kernels of a dtype. */
typedef struct dtype_kernels {
    cot_cuda_kernel forward, gradient, input, weight, sum;
} dtype_kernels;

#define KERNELS(name)                                                                    \
    {                                                                                    \
        PRODUCT(fwd, name), PRODUCT(g, name), PRODUCT(dx, name), PRODUCT(dweight, name), \
            {cot_image_causal_conv1d_dense_rows, "causal_conv1d_dense_sum_" #name, 0},   \
    }
static const dtype_kernels bf16_kernels = KERNELS(bf16), f16_kernels = KERNELS(f16);
static const cot_cuda_kernel pack = {cot_image_causal_conv1d_dense_rows, "causal_conv1d_dense_pack", 0};
static const cot_cuda_kernel gather = {cot_image_causal_conv1d_dense_rows, "causal_conv1d_dense_gather", 0};
static const cot_cuda_kernel finish = {cot_image_causal_conv1d_dense_rows, "causal_conv1d_dense_finish", 0};
static const cot_cuda_kernel dbias = {cot_image_causal_conv1d_dense_rows, "causal_conv1d_dense_dbias", 0};

static conv1d_dense_array array(const cot_tensor *tensor)
{
    conv1d_dense_array a = {.data = cot_is_present(tensor) ? tensor->data : NULL, .dtype = tensor->dtype};
    for (int axis = 0; axis < tensor->rank && axis < 3; axis++)
        a.stride[axis] = tensor->stride[axis];
    return a;
}

/* Boxes of 64 by 64 of [planes][rows][columns], strides in elements. The driver wants sizes and strides even where
 * nothing is read. */
static cot_status map(cot_queue *queue, CUtensorMap *to, cot_dtype dtype, void *data, int64_t columns, int64_t rows,
                      int64_t row, int64_t planes, int64_t plane)
{
    const int64_t sizes[3] = {columns, rows > 0 ? rows : 1, planes > 0 ? planes : 1};
    const int64_t strides[2] = {rows > 1 ? 2 * row : 16, planes > 1 ? 2 * plane : 16};
    return cot_cuda_swizzled_map(queue, to, dtype, 3, data, sizes, strides, (const int[]){BOX, BOX, 1});
}

/* Of a [B,channels,T] tensor with contiguous channels. */
static cot_status map_tokens(cot_queue *queue, CUtensorMap *to, cot_dtype dtype, const conv1d_dense_array *a,
                             int64_t channels, const conv1d_dense_call *c)
{
    return map(queue, to, dtype, c->B * c->T > 0 ? a->data : c->packed, channels, c->B * c->T > 0 ? c->T : 0,
               a->stride[2], c->B * c->T > 0 ? c->B : 0, a->stride[0]);
}

static cot_status map_weights(cot_queue *queue, CUtensorMap *to, cot_dtype dtype, const conv1d_dense_call *c)
{
    return map(queue, to, dtype, c->packed, c->Din, c->Dout, c->Din, c->K, c->Dout * c->Din);
}

static cot_status launch_rows(cot_queue *queue, const cot_cuda_kernel *kernel, int64_t x, int64_t y,
                              const conv1d_dense_call *c)
{
    const cot_cuda_grid grid = {.blocks = {(unsigned)x, (unsigned)y, 1}, .threads = THREADS};
    return cot_cuda_launch(queue, kernel, &grid, c);
}

/* A product of rows by columns, `times` of them; nothing where there is none. */
static cot_status launch_product(cot_queue *queue, const cot_cuda_kernel *kernel, int64_t rows, int64_t columns,
                                 int64_t times, const conv1d_dense_mapped *m)
{
    const int64_t blocks = cot_ceil_div(rows, CONV1D_DENSE_ROWS) * cot_ceil_div(columns, CONV1D_DENSE_COLUMNS) * times;
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)blocks, 1, 1}, .threads = CONV1D_DENSE_GROUPS * 128, .shared_bytes = SHARED_BYTES};
    return blocks > 0 ? cot_cuda_launch(queue, kernel, &grid, m) : COT_OK;
}

static bool in_vectors(const cot_tensor *t)
{
    return cot_is_present(t) && conv1d_dense_steps(t);
}

static conv1d_dense_call call_of(const conv1d_dense_sizes *z, const conv1d_dense_cuda_parts *parts, void *workspace,
                                 cot_activation activation, const cot_tensor *weight, const cot_tensor *bias)
{
    char *memory = workspace;
    return (conv1d_dense_call){.B = z->B,
                               .Din = z->Din,
                               .Dout = z->Dout,
                               .T = z->T,
                               .K = z->K,
                               .silu = activation == COT_ACTIVATION_SILU,
                               .parts = (int32_t)parts->parts,
                               .chunks = (int32_t)parts->chunks,
                               .weight = array(weight),
                               .bias = array(bias),
                               .pitch_in = conv1d_dense_pitch(z->Din),
                               .pitch_out = conv1d_dense_pitch(z->Dout),
                               .packed = memory + parts->packed,
                               .rows = memory + parts->x,
                               .g_rows = memory + parts->dy,
                               .gradients = memory + parts->gradients,
                               .dweight_parts = (float *)(memory + parts->dweight),
                               .dbias_parts = (float *)(memory + parts->dbias)};
}

static cot_status pack_weights(cot_queue *queue, const conv1d_dense_call *c)
{
    const int64_t blocks = cot_ceil_div(c->Dout * c->pitch_in, THREADS);
    return blocks > 0 ? launch_rows(queue, &pack, blocks, 1, c) : COT_OK;
}

/* `tokens` rows of a tensor's channels, for each b, at `room`; those of the next b begin `plane` rows later. */
static cot_status gather_rows(cot_queue *queue, const conv1d_dense_array *from, int64_t channels, int64_t tokens,
                              int64_t plane, void *room, conv1d_dense_call *c)
{
    c->from = *from;
    c->channels = channels;
    c->tokens = tokens;
    c->pitch = conv1d_dense_pitch(channels);
    c->plane = plane * c->pitch;
    c->gathered = room;
    const int64_t blocks = conv1d_dense_gather_blocks(tokens, c->pitch);
    return blocks * c->B > 0 ? launch_rows(queue, &gather, blocks, c->B, c) : COT_OK;
}

/* x or dy as the copy engine can step over it: itself, or gathered at `room`. */
static cot_status tokens_of(cot_queue *queue, const conv1d_dense_sizes *z, const cot_tensor *tensor, int64_t channels,
                            void *room, conv1d_dense_call *c, conv1d_dense_array *tokens)
{
    const conv1d_dense_array own = array(tensor);
    *tokens = own;
    if (conv1d_dense_strides_step(tensor))
        return COT_OK;
    *tokens = (conv1d_dense_array){room, {z->T * channels, 1, channels}, (int32_t)z->dtype};
    return gather_rows(queue, &own, channels, z->T, z->T, room, c);
}

cot_status causal_conv1d_dense_fwd_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_dense_forward_problem *p = problem;
    const cot_causal_conv1d_dense_forward_args *a = &p->args;
    const conv1d_dense_sizes *z = &p->sizes;
    const conv1d_dense_cuda_parts parts = conv1d_dense_cuda_parts_of(z, false, &a->x, NULL);
    if (!cot_is_present(&a->y) || cot_elements(&a->y) == 0)
        return COT_OK;
    conv1d_dense_mapped m = {.call = call_of(z, &parts, workspace, a->activation, &a->weight, &a->bias)};
    conv1d_dense_array x;
    CHECK(tokens_of(queue, z, &a->x, z->Din, (char *)workspace + parts.x, &m.call, &x));
    m.call.out = array(&a->y);
    m.call.out_in_vectors = in_vectors(&a->y);
    CHECK(pack_weights(queue, &m.call));
    CHECK(map_tokens(queue, &m.a, z->dtype, &x, z->Din, &m.call));
    CHECK(map_weights(queue, &m.b, z->dtype, &m.call));
    return launch_product(queue, z->dtype == COT_F16 ? &f16_kernels.forward : &bf16_kernels.forward, z->T, z->Dout,
                          z->B, &m);
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

static cot_status find_dbias(cot_queue *queue, const dtype_kernels *kernels, const conv1d_dense_call *c)
{
    const int64_t across = cot_ceil_div(c->Dout, THREADS);
    if (c->B * c->chunks > 0)
        CHECK(launch_rows(queue, &kernels->sum, c->B * c->chunks, across, c));
    return launch_rows(queue, &dbias, cot_ceil_div(4 * c->Dout, THREADS), 1, c);
}

static cot_status backward(cot_queue *queue, const void *problem, void *workspace, const dtype_kernels *kernels)
{
    const conv1d_dense_backward_problem *p = problem;
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    const conv1d_dense_sizes *z = &p->sizes;
    const bool silu = a->activation == COT_ACTIVATION_SILU;
    const conv1d_dense_cuda_parts parts = conv1d_dense_cuda_parts_of(z, silu, &a->x, &a->dy);
    conv1d_dense_mapped m = {.call = call_of(z, &parts, workspace, a->activation, &a->weight, &a->bias)};
    conv1d_dense_call *c = &m.call;
    conv1d_dense_array x = {0};
    c->accumulate = a->accumulate;
    if (silu || cot_is_present(&a->dweight))
        CHECK(tokens_of(queue, z, &a->x, z->Din, (char *)workspace + parts.x, c, &x));
    CHECK(tokens_of(queue, z, &a->dy, z->Dout, (char *)workspace + parts.dy, c, &c->dy));
    c->g = c->dy;
    c->dweight = array(&a->dweight);
    c->dbias = array(&a->dbias);
    if (silu || cot_is_present(&a->dx))
        CHECK(pack_weights(queue, c));
    if (silu) {
        c->g = (conv1d_dense_array){c->gradients, {z->T * z->Dout, 1, z->Dout}, (int32_t)z->dtype};
        CHECK(map_tokens(queue, &m.a, z->dtype, &x, z->Din, c));
        CHECK(map_weights(queue, &m.b, z->dtype, c));
        CHECK(launch_product(queue, &kernels->gradient, z->T, z->Dout, z->B, &m));
    }
    if (cot_is_present(&a->dx)) {
        c->out = array(&a->dx);
        c->out_in_vectors = in_vectors(&a->dx);
        CHECK(map_tokens(queue, &m.a, z->dtype, &c->g, z->Dout, c));
        CHECK(map_weights(queue, &m.b, z->dtype, c));
        CHECK(launch_product(queue, &kernels->input, z->T, z->Din, z->B, &m));
    }
    if (cot_is_present(&a->dweight)) {
        CHECK(map_tokens(queue, &m.a, z->dtype, &c->g, z->Dout, c));
        CHECK(map_tokens(queue, &m.b, z->dtype, &x, z->Din, c));
        CHECK(launch_product(queue, &kernels->weight, z->Dout, z->Din, z->K * c->parts, &m));
        CHECK(launch_rows(queue, &finish, cot_ceil_div(z->Dout * z->Din, THREADS), 1, c));
    }
    return cot_is_present(&a->dbias) ? find_dbias(queue, kernels, c) : COT_OK;
}

cot_status causal_conv1d_dense_bwd_bf16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return backward(queue, problem, workspace, &bf16_kernels);
}

cot_status causal_conv1d_dense_bwd_f16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return backward(queue, problem, workspace, &f16_kernels);
}

/* ---- any device -------------------------------------------------------------------------------------------------- */

/* The kernels that multiply in one way; g is of this dtype, a block's part of a product has this side. */
typedef struct generic_kernels {
    cot_cuda_kernel forward, input, weight;
    cot_dtype g;
    int side, threads;
} generic_kernels;

#define GENERIC(stem, name)                                                              \
    {                                                                                    \
        cot_image_causal_conv1d_dense_generic, "causal_conv1d_dense_" #stem "_" #name, 0 \
    }
#define GENERIC_KERNELS(name, dtype, side, threads)                                         \
    {                                                                                       \
        GENERIC(fwd, name), GENERIC(dx, name), GENERIC(dweight, name), dtype, side, threads \
    }
static const generic_kernels in_f32 = GENERIC_KERNELS(f32, COT_F32, CONV1D_DENSE_SIDE, 128),
                             in_bf16 = GENERIC_KERNELS(mma_bf16, COT_BF16, CONV1D_DENSE_TILE, 256),
                             in_f16 = GENERIC_KERNELS(mma_f16, COT_F16, CONV1D_DENSE_TILE, 256);
static const cot_cuda_kernel dbias_generic = GENERIC(dbias, generic), final_state = GENERIC(final, state);

static cot_status launch_generic(cot_queue *queue, const generic_kernels *kernels, const cot_cuda_kernel *kernel,
                                 int64_t rows, int64_t columns, int64_t times, const conv1d_dense_call *c)
{
    const int64_t blocks = cot_ceil_div(rows, kernels->side) * cot_ceil_div(columns, kernels->side) * times;
    const cot_cuda_grid grid = {.blocks = {(unsigned)blocks, 1, 1}, .threads = (unsigned)kernels->threads};
    return blocks > 0 ? cot_cuda_launch(queue, kernel, &grid, c) : COT_OK;
}

/* What the tensor cores' kernels read: xe, which begins with the state or zeros, and the weights tap by tap. */
static cot_status gather_inputs(cot_queue *queue, const generic_kernels *kernels, conv1d_dense_call *c)
{
    if (kernels->side != CONV1D_DENSE_TILE)
        return COT_OK;
    const int64_t before = c->K - 1, rows = before + c->T;
    CHECK(pack_weights(queue, c));
    CHECK(gather_rows(queue, &c->initial_state, c->Din, before, rows, c->rows, c));
    return gather_rows(queue, &c->x, c->Din, c->T, rows, (uint16_t *)c->rows + before * c->pitch_in, c);
}

static cot_status forward_generic(cot_queue *queue, const void *problem, void *workspace,
                                  const generic_kernels *kernels)
{
    const conv1d_dense_forward_problem *p = problem;
    const cot_causal_conv1d_dense_forward_args *a = &p->args;
    const conv1d_dense_sizes *z = &p->sizes;
    const bool tiles = kernels->side == CONV1D_DENSE_TILE;
    const conv1d_dense_cuda_parts parts =
        tiles ? conv1d_dense_mma_parts_of(z, false, false) : (conv1d_dense_cuda_parts){0};
    const int64_t states = z->B * z->Din * (z->K - 1);
    conv1d_dense_call c = call_of(z, &parts, workspace, a->activation, &a->weight, &a->bias);
    c.x = array(&a->x);
    c.initial_state = array(&a->initial_state);
    c.out = array(&a->y);
    c.final_state = array(&a->final_state);
    if (cot_is_present(&a->y)) {
        CHECK(gather_inputs(queue, kernels, &c));
        CHECK(launch_generic(queue, kernels, &kernels->forward, z->T, z->Dout, z->B, &c));
    }
    return cot_is_present(&a->final_state) && states > 0
               ? launch_rows(queue, &final_state, cot_ceil_div(states, THREADS), 1, &c)
               : COT_OK;
}

static cot_status backward_generic(cot_queue *queue, const void *problem, void *workspace,
                                   const generic_kernels *kernels)
{
    const conv1d_dense_backward_problem *p = problem;
    const cot_causal_conv1d_dense_backward_args *a = &p->args;
    const conv1d_dense_sizes *z = &p->sizes;
    const bool silu = a->activation == COT_ACTIVATION_SILU, tiles = kernels->side == CONV1D_DENSE_TILE;
    const conv1d_dense_cuda_parts parts =
        tiles ? conv1d_dense_mma_parts_of(z, silu, true)
              : conv1d_dense_generic_parts_of(z, silu, cot_dtype_size(kernels->g), kernels->side);
    conv1d_dense_call c = call_of(z, &parts, workspace, a->activation, &a->weight, &a->bias);
    c.accumulate = a->accumulate;
    c.x = array(&a->x);
    c.initial_state = array(&a->initial_state);
    c.dy = c.g = array(&a->dy);
    CHECK(gather_inputs(queue, kernels, &c));
    if (silu) {
        c.g = (conv1d_dense_array){c.gradients, {z->T * z->Dout, 1, z->Dout}, (int32_t)kernels->g};
        CHECK(launch_generic(queue, kernels, &kernels->forward, z->T, z->Dout, z->B, &c));
    }
    if (tiles)
        CHECK(gather_rows(queue, &c.g, z->Dout, z->T, z->T, c.g_rows, &c));
    c.out = array(&a->dx);
    c.dfinal_state = array(&a->dfinal_state);
    c.dinitial_state = array(&a->dinitial_state);
    c.dweight = array(&a->dweight);
    c.dbias = array(&a->dbias);
    if (cot_is_present(&a->dx) || cot_is_present(&a->dinitial_state))
        CHECK(launch_generic(queue, kernels, &kernels->input, z->K - 1 + z->T, z->Din, z->B, &c));
    if (cot_is_present(&a->dweight) && z->Dout * z->Din > 0) {
        CHECK(launch_generic(queue, kernels, &kernels->weight, z->Dout, z->Din, z->K * c.parts, &c));
        CHECK(launch_rows(queue, &finish, cot_ceil_div(z->Dout * z->Din, THREADS), 1, &c));
    }
    return cot_is_present(&a->dbias) && z->Dout > 0 ? launch_rows(queue, &dbias_generic, z->Dout, 1, &c) : COT_OK;
}

cot_status causal_conv1d_dense_fwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return forward_generic(queue, problem, workspace, &in_f32);
}

cot_status causal_conv1d_dense_fwd_mma_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const conv1d_dense_sizes *z = problem;
    return forward_generic(queue, problem, workspace, z->dtype == COT_F16 ? &in_f16 : &in_bf16);
}

cot_status causal_conv1d_dense_bwd_generic_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return backward_generic(queue, problem, workspace, &in_f32);
}

cot_status causal_conv1d_dense_bwd_mma_bf16_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return backward_generic(queue, problem, workspace, &in_bf16);
}

cot_status causal_conv1d_dense_bwd_mma_f16_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return backward_generic(queue, problem, workspace, &in_f16);
}
