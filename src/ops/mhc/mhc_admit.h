/* SPDX-License-Identifier: Apache-2.0
 * mhc_admit.h: which problems each CPU kernel admits, at what cost and with how much workspace. For mhc.c and the
 * kernels. Costs are rough core cycles; only their order matters. */
#ifndef COT_MHC_ADMIT_H
#define COT_MHC_ADMIT_H

#include "cpu/mhc_tiling.h"

#include "core/op_tables.h"

/* Number of elements of x. */
static inline double mhc_elements(const mhc_sizes *sizes)
{
    return (double)sizes->tokens * (double)sizes->n * (double)sizes->D;
}

/* ---- scalar kernels ----------------------------------------------------------------------------------- */

enum { MHC_SCALAR_PARTS = 64 };

static inline int64_t mhc_scalar_parts(const mhc_sizes *sizes)
{
    return cot_clamp(sizes->tokens, 1, MHC_SCALAR_PARTS);
}

COT_ADMIT_SCALAR(mhc_sizes)

static inline double cost_pre_scalar(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return 20 * (double)sizes->M * mhc_elements(sizes);
}

static inline double cost_sinkhorn_scalar(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return 100 * (double)sizes->n * mhc_elements(sizes);
}

static inline double cost_post_scalar(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return 20 * (double)(sizes->n + 1) * mhc_elements(sizes);
}

/* Elements of Sinkhorn's scratch. Forward: K, u and v. Backward: K, G, P, and u and v of every iteration. */
static inline int64_t mhc_scalar_sinkhorn_fwd_elements(int64_t n)
{
    return cot_mul(n, n + 2);
}

static inline int64_t mhc_scalar_sinkhorn_bwd_elements(int64_t n, int32_t iterations)
{
    return iterations == 0 ? 0 : cot_add(COT_PRODUCT(3, n, n), COT_PRODUCT(2, (int64_t)iterations + 1, n));
}

/* Elements of a part's scratch in pre's forward: Sinkhorn's, and h_pre. */
static inline int64_t mhc_scalar_pre_fwd_elements(int64_t n)
{
    return cot_add(mhc_scalar_sinkhorn_fwd_elements(n), n);
}

/* Iterations of the Sinkhorn fused into pre's backward; 0 = not fused. */
static inline int32_t mhc_pre_iterations(const cot_mhc_pre_backward_args *a)
{
    return cot_is_present(&a->dh_res) ? a->sinkhorn_iterations : 0;
}

static inline size_t workspace_sinkhorn_fwd_scalar(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return cot_bytes(cot_mul(mhc_scalar_parts(sizes), mhc_scalar_sinkhorn_fwd_elements(sizes->n)), sizeof(double));
}

static inline size_t workspace_sinkhorn_bwd_scalar(const void *problem)
{
    const mhc_sinkhorn_backward_problem *p = problem;
    const int64_t part_elements = mhc_scalar_sinkhorn_bwd_elements(p->sizes.n, p->args.iterations);
    return cot_bytes(cot_mul(mhc_scalar_parts(&p->sizes), part_elements), sizeof(double));
}

static inline size_t workspace_pre_fwd_scalar(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return cot_bytes(cot_mul(mhc_scalar_parts(sizes), mhc_scalar_pre_fwd_elements(sizes->n)), sizeof(double));
}

/* Sinkhorn's scratch, and dz and dh_mix of every token. */
static inline size_t workspace_pre_bwd_scalar(const void *problem)
{
    const mhc_pre_backward_problem *p = problem;
    const int64_t sinkhorn = mhc_scalar_sinkhorn_bwd_elements(p->sizes.n, mhc_pre_iterations(&p->args));
    const int64_t tokens = COT_PRODUCT(p->sizes.tokens, 2, p->sizes.M);
    return cot_bytes(cot_add(tokens, cot_mul(mhc_scalar_parts(&p->sizes), sinkhorn)), sizeof(double));
}

/* Layout of the workspace of post_pre's backward: that of pre's backward, then y if it is computed again, and g if it
 * is needed. */
typedef struct mhc_scalar_post_pre_layout {
    size_t y, g, bytes; /* byte offsets of y and g */
} mhc_scalar_post_pre_layout;

static inline mhc_scalar_post_pre_layout mhc_layout_scalar_post_pre(const mhc_post_pre_backward_problem *p)
{
    const mhc_pre_backward_problem pre = mhc_pre_half_backward(p);
    const int64_t elements = COT_PRODUCT(p->sizes.tokens, p->sizes.n, p->sizes.D);
    const bool recompute = !cot_is_present(&p->args.y), needs_g = mhc_post_pre_needs_g(&p->args);
    mhc_scalar_post_pre_layout l = {.bytes = cot_align_up(workspace_pre_bwd_scalar(&pre))};
    l.y = cot_workspace_reserve(&l.bytes, recompute ? elements : 0, cot_dtype_size(p->sizes.dtype));
    l.g = cot_workspace_reserve(&l.bytes, needs_g ? elements : 0,
                                p->sizes.dtype == COT_F64 ? sizeof(double) : sizeof(float));
    return l;
}

COT_PLAN(plan_post_pre_bwd_scalar, mhc_scalar_post_pre_layout, mhc_layout_scalar_post_pre(problem))

/* Above the sum of the costs of pre and post, because M is at least n + 2. */
static inline double cost_post_pre_scalar(const void *problem)
{
    return 2 * cost_pre_scalar(problem);
}

/* ---- vector kernels ----------------------------------------------------------------------------------- */

static inline const char *admit_simd(const void *problem)
{
    const mhc_sizes *sizes = problem;
    if (sizes->dtype == COT_F64)
        return "it computes in float32, the tensors are f64";
    return sizes->n > MHC_MAX_N ? "it supports n up to 8" : NULL;
}

/* NULL if d is contiguous in all tensors. */
static inline const char *admit_rows(const void *problem, const cot_tensor *const tensors[], int count)
{
    for (int i = 0; i < count; i++) {
        const int last = tensors[i]->rank - 1;
        if (cot_is_present(tensors[i]) && tensors[i]->stride[last] != 1 && tensors[i]->shape[last] != 1)
            return "the axis D must be contiguous";
    }
    return admit_simd(problem);
}

static inline const char *admit_pre_fwd_tiles(const void *problem)
{
    const cot_mhc_pre_forward_args *a = &((const mhc_pre_forward_problem *)problem)->args;
    return admit_rows(problem, (const cot_tensor *const[]){&a->x, &a->h_in}, 2);
}

static inline const char *admit_pre_bwd_tiles(const void *problem)
{
    const cot_mhc_pre_backward_args *a = &((const mhc_pre_backward_problem *)problem)->args;
    return admit_rows(problem, (const cot_tensor *const[]){&a->x, &a->dh_in, &a->dx_post, &a->dx}, 4);
}

static inline const char *admit_post_fwd_rows(const void *problem)
{
    const cot_mhc_post_forward_args *a = &((const mhc_post_forward_problem *)problem)->args;
    return admit_rows(problem, (const cot_tensor *const[]){&a->x, &a->f, &a->y}, 3);
}

static inline const char *admit_post_bwd_rows(const void *problem)
{
    const cot_mhc_post_backward_args *a = &((const mhc_post_backward_problem *)problem)->args;
    return admit_rows(problem, (const cot_tensor *const[]){&a->x, &a->f, &a->dy, &a->dx, &a->df}, 5);
}

COT_PLAN(plan_pre_fwd_tiles, mhc_pre_fwd_plan, mhc_pre_fwd_plan_of(problem))

static inline mhc_pre_bwd_layout mhc_plan_pre_bwd(const mhc_pre_backward_problem *p)
{
    return mhc_layout_pre_bwd(&p->sizes, mhc_pre_iterations(&p->args), MHC_BWD_CHUNK,
                              cot_mul(p->sizes.M, MHC_BWD_CHUNK), sizeof(float));
}

COT_PLAN(plan_pre_bwd_tiles, mhc_pre_bwd_layout, mhc_plan_pre_bwd(problem))

static inline size_t scratch_pre_fwd_tiles(const void *problem)
{
    (void)problem;
    return MHC_FWD_SCRATCH;
}

static inline size_t scratch_pre_bwd_tiles(const void *problem)
{
    (void)problem;
    return MHC_BWD_SCRATCH;
}

static inline const char *admit_post_pre_fwd_tiles(const void *problem)
{
    const cot_mhc_post_pre_forward_args *a = &((const mhc_post_pre_forward_problem *)problem)->args;
    return admit_rows(problem, (const cot_tensor *const[]){&a->x, &a->f, &a->y, &a->h_in}, 4);
}

static inline const char *admit_post_pre_bwd_tiles(const void *problem)
{
    const cot_mhc_post_pre_backward_args *a = &((const mhc_post_pre_backward_problem *)problem)->args;
    return admit_rows(problem, (const cot_tensor *const[]){&a->x, &a->f, &a->y, &a->dh_in, &a->dy, &a->dx, &a->df}, 7);
}

static inline mhc_pre_bwd_layout mhc_plan_post_pre_bwd(const mhc_post_pre_backward_problem *p)
{
    const mhc_pre_backward_problem pre = mhc_pre_half_backward(p);
    return mhc_plan_pre_bwd(&pre);
}

COT_PLAN(plan_post_pre_bwd_tiles, mhc_pre_bwd_layout, mhc_plan_post_pre_bwd(problem))

/* The state of a block, then the copy of its y. */
static inline size_t scratch_post_pre_fwd_tiles(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return MHC_FWD_SCRATCH + cot_bytes(COT_PRODUCT(MHC_TOKENS, sizes->n, sizes->D), cot_dtype_size(sizes->dtype));
}

/* The state of a block, the y that it computes again, and g. */
static inline size_t scratch_post_pre_bwd_tiles(const void *problem)
{
    const mhc_post_pre_backward_problem *p = problem;
    const size_t y = cot_is_present(&p->args.y) ? 0 : mhc_block_bytes(&p->sizes, MHC_BWD_TOKENS, p->sizes.dtype);
    return MHC_BWD_SCRATCH + y +
           (mhc_post_pre_needs_g(&p->args) ? mhc_block_bytes(&p->sizes, MHC_BWD_TOKENS, COT_F32) : 0);
}

COT_PLAN(plan_sinkhorn_bwd_lanes, mhc_sinkhorn_bwd_plan, mhc_sinkhorn_bwd_plan_of(problem))

/* Costs of the vector kernels by instruction set. */
#define COT_COSTS(isa, lanes)                                           \
    static inline double cost_pre_tiles_##isa(const void *problem)      \
    {                                                                   \
        return cost_pre_scalar(problem) / (2 * (lanes));                \
    }                                                                   \
    static inline double cost_sinkhorn_lanes_##isa(const void *problem) \
    {                                                                   \
        return cost_sinkhorn_scalar(problem) / (2 * (lanes));           \
    }                                                                   \
    static inline double cost_post_rows_##isa(const void *problem)      \
    {                                                                   \
        return cost_post_scalar(problem) / (2 * (lanes));               \
    }                                                                   \
    static inline double cost_post_pre_tiles_##isa(const void *problem) \
    {                                                                   \
        return cost_post_pre_scalar(problem) / (2 * (lanes));           \
    }
COT_COSTS(portable, 1)
COT_COSTS(avx2, 8)
COT_COSTS(avx512, 16)
#undef COT_COSTS

/* ---- AMX kernels -------------------------------------------------------------------------------------- */

#define MHC_ADMIT_BF16(name, vectors)                                                 \
    static inline const char *name(const void *problem)                               \
    {                                                                                 \
        const mhc_sizes *sizes = problem;                                             \
        return sizes->dtype != COT_BF16 ? "it supports bf16 only" : vectors(problem); \
    }
MHC_ADMIT_BF16(admit_pre_fwd_amx, admit_pre_fwd_tiles)
MHC_ADMIT_BF16(admit_pre_bwd_amx, admit_pre_bwd_tiles)
MHC_ADMIT_BF16(admit_post_pre_fwd_amx, admit_post_pre_fwd_tiles)
#undef MHC_ADMIT_BF16

static inline mhc_pre_bwd_layout mhc_plan_pre_bwd_amx(const mhc_pre_backward_problem *p)
{
    return mhc_layout_pre_bwd(&p->sizes, mhc_pre_iterations(&p->args), MHC_AMX_BWD_CHUNK,
                              mhc_amx_bwd_weight_elements(p->sizes.M), sizeof(uint16_t));
}

COT_PLAN(plan_pre_fwd_amx, mhc_pre_fwd_plan, mhc_pre_fwd_amx_plan_of(problem))
COT_PLAN(plan_pre_bwd_amx, mhc_pre_bwd_layout, mhc_plan_pre_bwd_amx(problem))

static inline size_t scratch_pre_fwd_amx(const void *problem)
{
    (void)problem;
    return MHC_FWD_AMX_SCRATCH;
}

static inline size_t scratch_pre_bwd_amx(const void *problem)
{
    (void)problem;
    return MHC_BWD_AMX_SCRATCH;
}

static inline size_t scratch_post_pre_fwd_amx(const void *problem)
{
    return MHC_FWD_AMX_SCRATCH + mhc_block_bytes(problem, MHC_AMX_TOKENS, COT_BF16);
}

/* An AMX kernel takes the time in which the AVX-512 kernel computes `fixed` tokens, for packing W, and `part` of the
 * tokens. It computes groups of 32 tokens. */
static inline double mhc_amx_cost(const mhc_sizes *sizes, double avx512_cost, double fixed, double part)
{
    const int64_t tokens = sizes->tokens;
    const double groups = (double)(tokens / 32) + (tokens % 32 > 0);
    return avx512_cost * (fixed + part * 32 * groups) / (double)cot_max(tokens, 1);
}

static inline double cost_pre_fwd_amx(const void *problem)
{
    return mhc_amx_cost(problem, cost_pre_tiles_avx512(problem), 16, 0.6);
}

/* With fewer than 4 streams the AVX-512 kernel is as fast or faster. */
static inline double cost_pre_bwd_amx(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return mhc_amx_cost(problem, cost_pre_tiles_avx512(problem), 12, sizes->n < 4 ? 1.1 : 0.75);
}

static inline double cost_post_pre_fwd_amx(const void *problem)
{
    const mhc_sizes *sizes = problem;
    return mhc_amx_cost(problem, cost_post_pre_tiles_avx512(problem), 16, sizes->n < 3 ? 1.1 : 0.7);
}

#endif
