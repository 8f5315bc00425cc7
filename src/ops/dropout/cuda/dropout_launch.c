/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_launch.c: the CUDA rows on the host: which kernels a call enqueues, with what grids. */
#include "dropout_launch.h"

#include "cuda/device.h"

#define COT_KERNEL(direction, name, isa, admit, cost, ...) \
    cot_status name(cot_queue *queue, const void *problem, void *workspace_);
#include "../dropout_kernels.def"
#undef COT_KERNEL

_Static_assert(COT_MAX_RANK - 1 <= DROPOUT_MAX_AXES, "all leading axes of a tensor have a place");

/* ---- the kernels -------------------------------------------------------------------------------------- */

/* Instances by access (dropout_tile.cuh) and dtype, f32, f16 and bf16 being 1, 2 and 3 in cot_dtype. */
enum { PLAIN, SHIFTED, STRIDED };
typedef cot_cuda_kernel instances[3][3];

/* The backward has others for calls with an activation. */

/* clang-format off */
#define KERNELS(stem, suffix) \
    {{cot_image_##stem, #stem "_f32" suffix, 0}, {cot_image_##stem, #stem "_f16" suffix, 0}, \
     {cot_image_##stem, #stem "_bf16" suffix, 0}}
#define INSTANCES(stem, suffix) {KERNELS(stem, suffix), KERNELS(stem, "_shifted" suffix), KERNELS(stem, "_strided" suffix)}

extern const unsigned char cot_image_dropout_fwd_rows[], cot_image_dropout_bwd_rows[];
static const instances forward = INSTANCES(dropout_fwd_rows, "");
static const instances backward[2] = {INSTANCES(dropout_bwd_rows, ""), INSTANCES(dropout_bwd_rows, "_active")};
static const cot_cuda_kernel reduce = {cot_image_dropout_bwd_rows, "dropout_bwd_reduce", 0};
/* clang-format on */

/* ---- arguments ---------------------------------------------------------------------------------------- */

static dropout_array array(const cot_tensor *tensor)
{
    dropout_array a = {.data = cot_is_present(tensor) ? tensor->data : NULL, .dtype = tensor->dtype};
    for (int axis = 0; axis < tensor->rank - 1; axis++)
        a.stride[axis] = tensor->stride[axis];
    if (tensor->rank > 0)
        a.step = tensor->shape[tensor->rank - 1] == 1 ? 1 : tensor->stride[tensor->rank - 1];
    return a;
}

/* A vector, whose one axis is the last. */
static dropout_array words(const cot_tensor *tensor)
{
    dropout_array a = array(tensor);
    a.stride[0] = a.step;
    return a;
}

/* Elements side by side, in rows that begin at multiples of `alignment` bytes? Or is it absent? */
static bool rows_aligned(const dropout_array *a, int64_t R, int64_t alignment)
{
    const int64_t size = (int64_t)cot_dtype_size((cot_dtype)a->dtype);
    return a->data == NULL || (a->step == 1 && (uintptr_t)a->data % (uintptr_t)alignment == 0 &&
                               (R <= 1 || a->stride[0] * size % alignment == 0));
}

/* Do the rows of both begin at the same distances from multiples of 16 bytes? */
static bool congruent(const dropout_array *a, const dropout_array *b, int64_t R)
{
    const int64_t size = (int64_t)cot_dtype_size((cot_dtype)a->dtype);
    return b->data == NULL || (a->step == 1 && b->step == 1 && ((uintptr_t)a->data - (uintptr_t)b->data) % 16 == 0 &&
                               (R <= 1 || (a->stride[0] - b->stride[0]) * size % 16 == 0));
}

/* Do the rows begin at least 16 bytes apart, in either direction? */
static bool rows_apart(const dropout_array *a)
{
    const int64_t bytes = a->stride[0] * (int64_t)cot_dtype_size((cot_dtype)a->dtype);
    return a->data == NULL || bytes >= 16 || bytes <= -16;
}

/* The same of a mask of bytes beside elements: do the bytes of aligned 16 begin at multiples of as many as they are? */
static bool in_step(const dropout_array *a, const dropout_array *mask, int64_t R)
{
    const int64_t size = (int64_t)cot_dtype_size((cot_dtype)a->dtype), N = 16 / size;
    return mask->step == 1 && ((intptr_t)a->data / size - (intptr_t)mask->data) % N == 0 &&
           (R <= 1 || ((a->stride[0] - mask->stride[0]) % N == 0 && (mask->stride[0] >= N || mask->stride[0] <= -N)));
}

/* How a call's tensors can be reached. floats: of the first's dtype, the first is there. */
static int find_access(dropout_call *c, const dropout_array *const floats[3])
{
    bool plain = c->D % COT_DROPOUT_GROUP == 0 && rows_aligned(&c->bias, 1, 16) &&
                 rows_aligned(&c->mask_out, c->R, COT_DROPOUT_GROUP) && rows_aligned(&c->mask_bits_out, c->R, 1) &&
                 rows_aligned(&c->given, c->R, c->source == DROPOUT_BYTES ? COT_DROPOUT_GROUP : 1);
    bool shifted = true;
    c->apart = 1;
    for (int i = 0; i < 3; i++) {
        plain = plain && rows_aligned(floats[i], c->R, 16);
        shifted = shifted && congruent(floats[0], floats[i], c->R);
        c->apart = c->apart && rows_apart(floats[i]);
    }
    return c->axes != 1 ? STRIDED : plain ? PLAIN : shifted ? SHIFTED : STRIDED;
}

static dropout_call call_of(const dropout_sizes *sizes, const dropout_mask *mask, const cot_tensor *first,
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
                      .seed_memory = words(&mask->seed_memory),
                      .offset_memory = words(&mask->offset_memory),
                      .given = array(&mask->given),
                      .bias = array(bias)};
    static const float divisor[COT_GELU_SLOPE_DENOMINATOR_TERMS] = COT_GELU_SLOPE_DENOMINATOR;
    for (int k = 0; k < COT_GELU_SLOPE_DENOMINATOR_TERMS; k++)
        c.slope_divisor[k] = divisor[k] / c.scale;
    for (int axis = 0; axis < first->rank - 1; axis++)
        c.shape[axis] = first->shape[axis];
    return c;
}

/* ---- launches ----------------------------------------------------------------------------------------- */

static cot_status launch_tiles(cot_queue *queue, const cot_cuda_kernel *kernel, const dropout_cuda_plan *plan,
                               const dropout_call *call)
{
    const int64_t y = plan->parts < UINT16_MAX ? plan->parts : UINT16_MAX;
    const cot_cuda_grid grid = {.blocks = {(unsigned)plan->tiles, (unsigned)y, (unsigned)cot_ceil_div(plan->parts, y)},
                                .threads = DROPOUT_THREADS};
    return cot_cuda_launch(queue, kernel, &grid, call);
}

cot_status dropout_fwd_rows_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const dropout_forward_problem *p = problem;
    const cot_dropout_forward_args *a = &p->args;
    dropout_call c = call_of(&p->sizes, &p->mask, &a->x, &a->bias, a->activation);
    c.x = array(&a->x);
    c.residual = array(&a->residual);
    c.y = array(&a->y);
    c.mask_out = array(&a->mask_out);
    c.mask_bits_out = array(&a->mask_bits_out);
    if (c.R * c.D == 0)
        return COT_OK;
    const int access = find_access(&c, (const dropout_array *const[]){&c.x, &c.residual, &c.y});
    const dropout_cuda_plan plan =
        dropout_cuda_divide(&p->sizes, DROPOUT_FWD_LANES, DROPOUT_FWD_ROWS, access == SHIFTED);
    return launch_tiles(queue, &forward[access][p->sizes.dtype - COT_F32], &plan, &c);
}

/* dbias has one thread a column, so its kernel runs even where there are no rows. */
static cot_status sum_parts(cot_queue *queue, const dropout_call *c)
{
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)cot_ceil_div(c->D, 32), 1, 1}, .threads = DROPOUT_THREADS, .dependent = true};
    return cot_cuda_launch(queue, &reduce, &grid, c);
}

cot_status dropout_bwd_rows_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    const dropout_backward_problem *p = problem;
    const cot_dropout_backward_args *a = &p->args;
    dropout_call c = call_of(&p->sizes, &p->mask, &a->dy, &a->bias, a->activation);
    c.accumulate = a->accumulate;
    c.dy = array(&a->dy);
    c.x = array(&a->x);
    c.dx = array(&a->dx);
    c.dbias = array(&a->dbias);
    c.partial = c.dbias.data != NULL ? workspace : NULL;
    if (c.scale == 0) { /* then the mask does not matter */
        c.source = DROPOUT_DROP_ALL;
        c.given = (dropout_array){0};
    }
    int access = find_access(&c, (const dropout_array *const[]){&c.dy, &c.x, &c.dx});
    if (access == SHIFTED && !c.apart) /* a row's chunk could have elements of several rows */
        access = STRIDED;
    const dropout_cuda_plan plan = dropout_cuda_backward(&p->sizes, access == SHIFTED);
    c.shifted = access == SHIFTED;
    c.tiles = plan.tiles;
    c.parts = plan.parts;
    const int64_t apart = DROPOUT_THREADS / DROPOUT_BWD_SHIFTED_LANES, size = (int64_t)cot_dtype_size(p->sizes.dtype);
    c.groups_apart = apart * c.groups;
    c.dy_apart = apart * c.dy.stride[0] * size;
    c.x_apart = apart * c.x.stride[0] * size;
    c.dx_apart = apart * c.dx.stride[0] * size;
    c.given_apart = apart * c.given.stride[0];
    c.given_in_step = c.source == DROPOUT_BYTES && in_step(&c.dy, &c.given, c.R);
    cot_status status = COT_OK;
    if (c.R * c.D > 0 && (c.dx.data != NULL || c.partial != NULL))
        status = launch_tiles(queue, &backward[c.x.data != NULL][access][p->sizes.dtype - COT_F32], &plan, &c);
    return status == COT_OK && c.D > 0 && c.dbias.data != NULL ? sum_parts(queue, &c) : status;
}
