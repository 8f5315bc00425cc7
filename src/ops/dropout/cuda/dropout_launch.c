/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_launch.c: the host side of the GPU kernels: which kernels a call enqueues, and with which grids. Compiled for
 * CUDA and for HIP. */
#include "dropout_admit.h"

#include "hip/launcher.h"

#include "core/op_tables.h"

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "../dropout_kernels.def"
#undef COT_KERNEL_ENTRY

_Static_assert(COT_MAX_RANK - 1 <= DROPOUT_MAX_AXES, "must hold all leading axes of a tensor");

/* ---- the kernels -------------------------------------------------------------------------------------- */

/* Kernels by access (dropout_access) and dtype. f32, f16 and bf16 are 1, 2 and 3 in cot_dtype. */
typedef cot_cuda_kernel instances[3][3];

/* clang-format off */
#define KERNELS(stem, suffix) \
    {{COT_IMAGE(stem), COT_KERNEL_NAME(stem) "_f32" suffix, 0}, {COT_IMAGE(stem), COT_KERNEL_NAME(stem) "_f16" suffix, 0}, \
     {COT_IMAGE(stem), COT_KERNEL_NAME(stem) "_bf16" suffix, 0}}
#define INSTANCES(stem, suffix) {KERNELS(stem, suffix), KERNELS(stem, "_shifted" suffix), KERNELS(stem, "_strided" suffix)}

extern const unsigned char COT_IMAGE(dropout_fwd_rows)[], COT_IMAGE(dropout_bwd_rows)[];
static const instances forward = INSTANCES(dropout_fwd_rows, "");
/* Without and with an activation. */
static const instances backward[2] = {INSTANCES(dropout_bwd_rows, ""), INSTANCES(dropout_bwd_rows, "_active")};
static const cot_cuda_kernel reduce = {COT_IMAGE(dropout_bwd_rows), "dropout_bwd_reduce", 0};
/* clang-format on */

/* ---- arguments ---------------------------------------------------------------------------------------- */

static dropout_array make_array(const cot_tensor *tensor)
{
    dropout_array a = {.data = cot_is_present(tensor) ? tensor->data : NULL, .dtype = tensor->dtype};
    for (int axis = 0; axis < tensor->rank - 1; axis++)
        a.stride[axis] = tensor->stride[axis];
    if (tensor->rank > 0)
        a.column_stride = tensor->shape[tensor->rank - 1] == 1 ? 1 : tensor->stride[tensor->rank - 1];
    return a;
}

/* For a tensor of rank 1: its only axis is both the first and the last one. */
static dropout_array make_vector(const cot_tensor *tensor)
{
    dropout_array a = make_array(tensor);
    a.stride[0] = a.column_stride;
    return a;
}

/* Whether the elements of a row are contiguous and all rows begin at multiples of `alignment` bytes. True if absent. */
static bool rows_aligned(const dropout_array *a, int64_t R, int64_t alignment)
{
    const int64_t size = (int64_t)cot_dtype_size((cot_dtype)a->dtype);
    return a->data == NULL || (a->column_stride == 1 && (uintptr_t)a->data % (uintptr_t)alignment == 0 &&
                               (R <= 1 || a->stride[0] * size % alignment == 0));
}

/* Whether all rows are contiguous and begin at the same distance from a multiple of 16 bytes in `a` and in `b`. */
static bool same_shift(const dropout_array *a, const dropout_array *b, int64_t R)
{
    const int64_t size = (int64_t)cot_dtype_size((cot_dtype)a->dtype);
    return b->data == NULL ||
           (a->column_stride == 1 && b->column_stride == 1 && ((uintptr_t)a->data - (uintptr_t)b->data) % 16 == 0 &&
            (R <= 1 || (a->stride[0] - b->stride[0]) * size % 16 == 0));
}

/* Whether the rows begin at least 16 bytes apart, in either direction. */
static bool pitch_at_least_16(const dropout_array *a)
{
    const int64_t bytes = a->stride[0] * (int64_t)cot_dtype_size((cot_dtype)a->dtype);
    return a->data == NULL || bytes >= 16 || bytes <= -16;
}

/* Whether in all rows the N mask bytes of an aligned chunk of N elements (16 bytes) begin at a multiple of N bytes. */
static bool mask_aligned(const dropout_array *a, const dropout_array *mask, int64_t R)
{
    const int64_t size = (int64_t)cot_dtype_size((cot_dtype)a->dtype), N = 16 / size;
    return mask->column_stride == 1 && ((intptr_t)a->data / size - (intptr_t)mask->data) % N == 0 &&
           (R <= 1 || ((a->stride[0] - mask->stride[0]) % N == 0 && (mask->stride[0] >= N || mask->stride[0] <= -N)));
}

/* The access mode for a call's tensors. tensors: those of x's dtype; the first one is present. */
static int find_access(dropout_call *c, const dropout_array *const tensors[3])
{
    bool plain = c->D % COT_DROPOUT_GROUP == 0 && rows_aligned(&c->bias, 1, 16) &&
                 rows_aligned(&c->mask_out, c->R, COT_DROPOUT_GROUP) && rows_aligned(&c->mask_bits_out, c->R, 1) &&
                 rows_aligned(&c->given_mask, c->R, c->source == DROPOUT_BYTES ? COT_DROPOUT_GROUP : 1);
    bool shifted = true;
    c->pitch_at_least_16 = 1;
    for (int i = 0; i < 3; i++) {
        plain = plain && rows_aligned(tensors[i], c->R, 16);
        shifted = shifted && same_shift(tensors[0], tensors[i], c->R);
        c->pitch_at_least_16 = c->pitch_at_least_16 && pitch_at_least_16(tensors[i]);
    }
    return c->axes != 1 ? STRIDED : plain ? PLAIN : shifted ? SHIFTED : STRIDED;
}

static dropout_call make_call(const dropout_sizes *sizes, const dropout_mask *mask, const cot_tensor *first,
                              const cot_tensor *bias, cot_activation activation)
{
    dropout_call c = {.R = sizes->R,
                      .D = sizes->D,
                      .groups = sizes->groups,
                      .axes = first->rank > 1 ? first->rank - 1 : 1,
                      .activation = (int32_t)activation,
                      .source = (int32_t)mask->source,
                      .threshold = mask->threshold,
                      .scale = (float)mask->scale,
                      .seed = mask->seed,
                      .offset = mask->offset,
                      .seed_tensor = make_vector(&mask->seed_tensor),
                      .offset_tensor = make_vector(&mask->offset_tensor),
                      .given_mask = make_array(&mask->given),
                      .bias = make_array(bias)};
    static const float denominator[COT_GELU_SLOPE_DENOMINATOR_TERMS] = COT_GELU_SLOPE_DENOMINATOR;
    for (int k = 0; k < COT_GELU_SLOPE_DENOMINATOR_TERMS; k++)
        c.slope_denominator[k] = denominator[k] / c.scale;
    for (int axis = 0; axis < first->rank - 1; axis++)
        c.shape[axis] = first->shape[axis];
    return c;
}

/* ---- launches ----------------------------------------------------------------------------------------- */

static cot_status launch_tiles(cot_queue *queue, const cot_cuda_kernel *kernel, const dropout_cuda_tiling *tiling,
                               const dropout_call *call)
{
    const int64_t y = tiling->row_tiles < UINT16_MAX ? tiling->row_tiles : UINT16_MAX;
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)tiling->column_tiles, (unsigned)y, (unsigned)cot_ceil_div(tiling->row_tiles, y)},
        .threads = DROPOUT_THREADS};
    return cot_cuda_launch(queue, kernel, &grid, call);
}

cot_status COT_LAUNCHER(dropout_fwd_rows)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const dropout_forward_problem *p = problem;
    const cot_dropout_forward_args *a = &p->args;
    dropout_call c = make_call(&p->sizes, &p->mask, &a->x, &a->bias, a->activation);
    c.x = make_array(&a->x);
    c.residual = make_array(&a->residual);
    c.y = make_array(&a->y);
    c.mask_out = make_array(&a->mask_out);
    c.mask_bits_out = make_array(&a->mask_bits_out);
    if (c.R * c.D == 0)
        return COT_OK;
    const int access = find_access(&c, (const dropout_array *const[]){&c.x, &c.residual, &c.y});
    const dropout_cuda_tiling tiling =
        dropout_cuda_tiling_of(&p->sizes, DROPOUT_FWD_THREADS_PER_ROW, DROPOUT_FWD_ROWS_PER_THREAD, access == SHIFTED);
    return launch_tiles(queue, &forward[access][p->sizes.dtype - COT_F32], &tiling, &c);
}

/* Launches the reduction to dbias. It also runs if there are no rows: dbias is 0 then. */
static cot_status launch_reduce(cot_queue *queue, const dropout_call *c)
{
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)cot_ceil_div(c->D, 32), 1, 1}, .threads = DROPOUT_THREADS, .dependent = true};
    return cot_cuda_launch(queue, &reduce, &grid, c);
}

cot_status COT_LAUNCHER(dropout_bwd_rows)(cot_queue *queue, const void *problem, void *workspace)
{
    const dropout_backward_problem *p = problem;
    const cot_dropout_backward_args *a = &p->args;
    dropout_call c = make_call(&p->sizes, &p->mask, &a->dy, &a->bias, a->activation);
    c.accumulate = a->accumulate;
    c.dy = make_array(&a->dy);
    c.x = make_array(&a->x);
    c.dx = make_array(&a->dx);
    c.dbias = make_array(&a->dbias);
    c.partial_sums = c.dbias.data != NULL ? workspace : NULL;
    if (c.scale == 0) { /* the mask has no effect then */
        c.source = DROPOUT_DROP_ALL;
        c.given_mask = (dropout_array){0};
    }
    int access = find_access(&c, (const dropout_array *const[]){&c.dy, &c.x, &c.dx});
    if (access == SHIFTED &&
        !c.pitch_at_least_16) /* a chunk at a row's end could hold elements of more than two rows */
        access = STRIDED;
    const dropout_cuda_bwd_plan *plan = queue->plan;
    const dropout_cuda_tiling tiling = access == SHIFTED ? plan->shifted : plan->plain;
    c.shifted = access == SHIFTED;
    c.column_tiles = tiling.column_tiles;
    c.row_tiles = tiling.row_tiles;
    const int64_t rows_per_pass = DROPOUT_THREADS / DROPOUT_BWD_SHIFTED_THREADS_PER_ROW,
                  size = (int64_t)cot_dtype_size(p->sizes.dtype);
    c.groups_per_pass = rows_per_pass * c.groups;
    c.dy_pass_bytes = rows_per_pass * c.dy.stride[0] * size;
    c.x_pass_bytes = rows_per_pass * c.x.stride[0] * size;
    c.dx_pass_bytes = rows_per_pass * c.dx.stride[0] * size;
    c.given_mask_pass_bytes = rows_per_pass * c.given_mask.stride[0];
    c.mask_bytes_aligned = c.source == DROPOUT_BYTES && mask_aligned(&c.dy, &c.given_mask, c.R);
    cot_status status = COT_OK;
    if (c.R * c.D > 0 && (c.dx.data != NULL || c.partial_sums != NULL))
        status = launch_tiles(queue, &backward[c.x.data != NULL][access][p->sizes.dtype - COT_F32], &tiling, &c);
    return status == COT_OK && c.D > 0 && c.dbias.data != NULL ? launch_reduce(queue, &c) : status;
}
