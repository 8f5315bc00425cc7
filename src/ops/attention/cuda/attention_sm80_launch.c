/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_sm80_launch.c: host code of the portable CUDA kernels: which kernels a call launches, with which grids. */
#include "attention_sm80_admit.h"

#include "cuda/device.h"

#include <math.h>

#include "core/op_tables.h"

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "../attention_kernels.def"
#undef COT_KERNEL_ENTRY

extern const unsigned char cot_image_attention_fwd_sm80[], cot_image_attention_bwd_sm80[],
    cot_image_attention_bwd_one_pass_sm80[], cot_image_attention_f32_sm80[], cot_image_attention_delta_merge[];

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

/* One kernel: the columns of its tiles of q and k and of v, the rows of a block, and its warps. */
typedef struct tiled_kernel {
    int64_t d_qk, d_v, rows;
    unsigned warps;
    cot_cuda_kernel kernel;
} tiled_kernel;

/* Bytes of shared memory: rows of a block, and stages of the tile that it loops over. */
#define ROWS_OF(slabs) (16 * (slabs)*ATTENTION_SM80_WARPS)
#define FWD_BYTES(d_qk, d_v, slabs, columns, stages) (2 * (ROWS_OF(slabs) * (d_qk) + (columns) * ((d_qk) + (d_v))))
#define DQ_BYTES(d_qk, d_v, slabs, columns, stages) (2 * (ROWS_OF(slabs) + (stages) * (columns)) * ((d_qk) + (d_v)))
#define DKV_BYTES(d_qk, d_v, slabs, columns, stages) \
    (DQ_BYTES(d_qk, d_v, slabs, columns, stages) + (stages) * (columns)*8)
#define ONE_PASS_BYTES(d, keys, queries, warps, stages)                                                          \
    (4 * (d) * ((keys) + (stages) * (queries)) + 128 * (keys) * (1 + (32 * (warps) > (keys))) + 16 * (queries) + \
     ATTENTION_WORK_BYTES)
#define DV_BYTES(d_qk, d_v, slabs, columns, stages) \
    (DKV_BYTES(d_qk, d_v, slabs, columns, stages) - 2 * ROWS_OF(slabs) * (d_v))

/* clang-format off */
#define TILED(direction, dtype, stem, bytes, name, d_qk, d_v, slabs, columns, stages) \
    {d_qk, d_v, ROWS_OF(slabs), ATTENTION_SM80_WARPS, \
     {cot_image_attention_##direction##_sm80, "attention_" #direction "_" #dtype "_sm80_" stem #name, \
      bytes(d_qk, d_v, slabs, columns, stages)}},
#define FWD(dtype, ...) TILED(fwd, dtype, "", FWD_BYTES, __VA_ARGS__)
#define DQ(dtype, ...) TILED(bwd, dtype, "dq_", DQ_BYTES, __VA_ARGS__)
#define DKV(dtype, ...) TILED(bwd, dtype, "dkv_", DKV_BYTES, __VA_ARGS__)
#define DK(dtype, ...) TILED(bwd, dtype, "dk_", DKV_BYTES, __VA_ARGS__)
#define DV(dtype, ...) TILED(bwd, dtype, "dv_", DV_BYTES, __VA_ARGS__)
#define FWD_BF16(...) FWD(bf16, __VA_ARGS__)
#define FWD_F16(...) FWD(f16, __VA_ARGS__)
#define DQ_BF16(...) DQ(bf16, __VA_ARGS__)
#define DQ_F16(...) DQ(f16, __VA_ARGS__)
#define DKV_BF16(...) DKV(bf16, __VA_ARGS__)
#define DKV_F16(...) DKV(f16, __VA_ARGS__)
#define DK_BF16(...) DK(bf16, __VA_ARGS__)
#define DK_F16(...) DK(f16, __VA_ARGS__)
#define DV_BF16(...) DV(bf16, __VA_ARGS__)
#define DV_F16(...) DV(f16, __VA_ARGS__)

#define ONE_PASS(dtype, stages, name, d, keys, queries, warps) \
    {d, d, keys, warps, {cot_image_attention_bwd_one_pass_sm80, "attention_bwd_" #dtype "_sm80_one_pass_" #name, \
                         ONE_PASS_BYTES(d, keys, queries, warps, stages)}},
#define ONE_PASS_BF16(...) ONE_PASS(bf16, 2, __VA_ARGS__)
#define ONE_PASS_F16(...) ONE_PASS(f16, 2, __VA_ARGS__)
#define ONE_PASS_1_STAGE_BF16(...) ONE_PASS(bf16, 1, __VA_ARGS__)
#define ONE_PASS_1_STAGE_F16(...) ONE_PASS(f16, 1, __VA_ARGS__)

/* By size, the smallest first. */
typedef struct kernel_family {
    tiled_kernel plain[5], score_mods[3];
} kernel_family;

/* dkv: dk and dv in one kernel, if its registers can hold both accumulators; else dk and dv. one_pass: dq, dk and dv,
 * with dq in any order. one_pass_1_stage: the same with less shared memory. */
typedef struct dtype_kernels {
    kernel_family fwd, dq, dkv, dk, dv, one_pass, one_pass_1_stage;
} dtype_kernels;

#define KERNELS(dtype) { \
    .fwd = {{ATTENTION_FWD_TILES(FWD_##dtype)}, {ATTENTION_FWD_TILES_SCORE_MODS(FWD_##dtype)}}, \
    .dq = {{ATTENTION_DQ_TILES(DQ_##dtype)}, {ATTENTION_DQ_TILES_SCORE_MODS(DQ_##dtype)}}, \
    .dkv = {{ATTENTION_DKV_TILES(DKV_##dtype)}, {{0}}}, \
    .dk = {{ATTENTION_DK_TILES(DK_##dtype)}, {ATTENTION_DK_TILES_SCORE_MODS(DK_##dtype)}}, \
    .dv = {{ATTENTION_DV_TILES(DV_##dtype)}, {ATTENTION_DV_TILES_SCORE_MODS(DV_##dtype)}}, \
    .one_pass = {{ATTENTION_ONE_PASS_TILES(ONE_PASS_##dtype)}, {{0}}}, \
    .one_pass_1_stage = {{ATTENTION_ONE_PASS_TILES(ONE_PASS_1_STAGE_##dtype)}, {{0}}}}
static const dtype_kernels kernels_bf16 = KERNELS(BF16), kernels_f16 = KERNELS(F16);

/* The largest shared memory of a float32 kernel. Shorter rows need less. */
#define F32_BYTES(rows, columns) ((ATTENTION_F32_MAX_D + 4) * 4 * ((rows) * ATTENTION_F32_ROWS + 2 * ATTENTION_F32_COLUMNS))
#define F32(stem, rows) \
    {ATTENTION_F32_MAX_D, ATTENTION_F32_MAX_D, ATTENTION_F32_ROWS, ATTENTION_F32_WARPS, \
     {cot_image_attention_f32_sm80, "attention_" stem "_d256", F32_BYTES(rows, 2) + 8 * ATTENTION_F32_COLUMNS}}
static const tiled_kernel fwd_f32 = F32("fwd_f32_sm80", 1), dq_f32 = F32("bwd_f32_sm80_dq", 2),
                   dk_f32 = F32("bwd_f32_sm80_dk", 2), dv_f32 = F32("bwd_f32_sm80_dv", 1),
                   dbias_f32 = F32("bwd_f32_sm80_dbias", 2);

static const cot_cuda_kernel preprocess_rows = {cot_image_attention_delta_merge, "attention_bwd_preprocess", 0},
                             dsink_rows = {cot_image_attention_delta_merge, "attention_dsink", 0},
                             dq_rows = {cot_image_attention_delta_merge, "attention_dq_rows", 0},
                             delta_rows = {cot_image_attention_delta_merge, "attention_delta_rows", 0},
                             merge_rows = {cot_image_attention_delta_merge, "attention_merge_rows", 0};
/* clang-format on */

/* The smallest kernel that supports the sizes, or NULL. */
static const tiled_kernel *smallest_kernel(const kernel_family *f, const attention_problem *p)
{
    const tiled_kernel *t = attention_has_score_mods(p) ? f->score_mods : f->plain;
    while (t->rows > 0 && (t->d_qk < p->sizes.d_qk || t->d_v < p->sizes.d_v))
        t++;
    return t->rows > 0 ? t : NULL;
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static bool is_vectorizable(const cot_tensor *t)
{
    if (t->rank != 4 || cot_dtype_size(t->dtype) != 2 || t->stride[3] != 1 || t->shape[3] % 8 != 0 ||
        (uintptr_t)t->data % 16 != 0)
        return false;
    for (int axis = 0; axis < 3; axis++)
        if (t->shape[axis] > 1 && t->stride[axis] % 8 != 0)
            return false;
    return true;
}

static attention_view view(const cot_tensor *t)
{
    attention_view v = {.dtype = (int32_t)t->dtype};
    if (!cot_is_present(t))
        return v;
    v.data = t->data;
    v.vectorized = is_vectorizable(t);
    for (int axis = 0; axis < t->rank; axis++)
        v.stride[axis] = t->stride[axis];
    return v;
}

static attention_view slopes_view(const cot_tensor *t)
{
    attention_view v = view(t);
    if (t->rank == 1)
        v.stride[1] = v.stride[0], v.stride[0] = 0;
    return v;
}

static attention_view bias_view(const cot_tensor *t)
{
    attention_view v = view(t);
    for (int axis = 0; axis < t->rank; axis++)
        if (t->shape[axis] == 1)
            v.stride[axis] = 0;
    return v;
}

static attention_sm80_call call_of(cot_queue *queue, const attention_problem *p, bool f32)
{
    const attention_sizes *sizes = &p->sizes;
    const double log2e = 1.4426950408889634;
    attention_sm80_call c = {
        .B = sizes->B,
        .H = sizes->H,
        .Hkv = sizes->Hkv,
        .Tq = sizes->Tq,
        .Tk = sizes->Tk,
        .d = sizes->d_qk,
        .d_v = sizes->d_v,
        .rows_q = sizes->rows_q,
        .rows_k = sizes->rows_k,
        .left = (int32_t)cot_clamp(sizes->left, 0, ATTENTION_UNBOUNDED_32),
        .right = (int32_t)cot_clamp(sizes->right, 0, ATTENTION_UNBOUNDED_32),
        .q_begin = sizes->q_begin,
        .q_length = sizes->q_length,
        .k_begin = sizes->k_begin,
        .k_length = sizes->k_length,
        .packed = sizes->packed,
        .accumulate = p->accumulate,
        .negative_scale = sizes->scale < 0,
        .scale = (float)sizes->scale,
        .score_scale = (float)(fabs(sizes->scale) * log2e),
        .softcap = (float)sizes->softcap,
        .lse_factor = f32 ? 1.0f : (float)log2e,
        .dropped = sizes->dropped,
        .keep_scale = sizes->dropped < 65536 ? (float)(65536.0 / (65536 - sizes->dropped)) : 0.0f,
        .seed = p->dropout_seed,
        .offset = p->dropout_offset,
        .groups = (uint64_t)cot_ceil_div(sizes->longest_k, 8),
        .cu_q = view(&p->cu_seqlens_q),
        .cu_k = view(&p->cu_seqlens_k),
        .seqused_q = view(&p->seqused_q),
        .seqused_k = view(&p->seqused_k),
        .seed_tensor = view(&p->dropout_seed_tensor),
        .offset_tensor = view(&p->dropout_offset_tensor),
        .sink = view(&p->sink),
        .alibi_slopes = slopes_view(&p->alibi_slopes),
        .bias = bias_view(&p->bias),
        .q = view(&p->q),
        .k = view(&p->k),
        .v = view(&p->v),
        .out = view(&p->out),
        .lse = view(&p->lse),
        .dout = view(&p->dout),
        .dlse = view(&p->dlse),
        .delta = view(&p->delta),
        .dq = view(&p->dq),
        .dk = view(&p->dk),
        .dv = view(&p->dv),
        .dsink = view(&p->dsink),
        .dbias = view(&p->dbias),
        .fault = cot_cuda_fault_word(queue),
    };
    const int64_t longest_row = sizes->d_qk > sizes->d_v ? sizes->d_qk : sizes->d_v;
    c.pitch = (int32_t)((longest_row + 31) / 32 * 32 + 4);
    for (int axis = 0; axis < 4; axis++)
        c.bias_shape[axis] = p->dbias.shape[axis];
    return c;
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* Launches a block for each tile of `rows` rows of each head and sequence, and for the rows after the last packed
 * sequence. */
static cot_status launch_tiles(cot_queue *queue, const cot_cuda_kernel *kernel, attention_sm80_call c, int64_t rows,
                               int64_t T, int64_t heads, unsigned threads, int shared_bytes)
{
    c.tiles = T > 0 ? cot_ceil_div(T, rows) : 1;
    const cot_cuda_grid grid = {.blocks = {(unsigned)(c.tiles * heads * (c.B + c.packed)), 1, 1},
                                .threads = threads,
                                .shared_bytes = (unsigned)shared_bytes};
    return grid.blocks[0] > 0 ? cot_cuda_launch(queue, kernel, &grid, &c) : COT_OK;
}

/* Launches blocks over queries or, for dk and dv, over keys. */
static cot_status launch(cot_queue *queue, const tiled_kernel *t, const attention_sm80_call *c, bool over_keys)
{
    const bool f32 = t->rows == ATTENTION_F32_ROWS;
    const int bytes = f32 ? t->kernel.shared_bytes / (ATTENTION_F32_MAX_D + 4) * c->pitch + 8 * ATTENTION_F32_COLUMNS
                          : t->kernel.shared_bytes;
    if ((over_keys ? c->rows_k : c->rows_q) == 0)
        return COT_OK;
    return launch_tiles(queue, &t->kernel, *c, t->rows, over_keys ? c->Tk : c->Tq, over_keys ? c->Hkv : c->H,
                        32 * t->warps, bytes);
}

static cot_status launch_forward_sm80(cot_queue *queue, const attention_problem *p, const tiled_kernel *t)
{
    const attention_sm80_call c = call_of(queue, p, t == &fwd_f32);
    return launch(queue, t, &c, false);
}

static cot_status launch_dsink(cot_queue *queue, const attention_sm80_call *c)
{
    const cot_cuda_grid grid = {.blocks = {(unsigned)c->H, 1, 1}, .threads = ATTENTION_ROW_THREADS};
    return cot_cuda_launch(queue, &dsink_rows, &grid, c);
}

static cot_status launch_dbias(cot_queue *queue, const attention_sm80_call *c)
{
    const int64_t *shape = c->bias_shape;
    const int64_t tiles = cot_ceil_div(shape[2], ATTENTION_F32_ROWS) * cot_ceil_div(shape[3], ATTENTION_F32_COLUMNS);
    const cot_cuda_grid grid = {.blocks = {(unsigned)(shape[0] * shape[1] * tiles), 1, 1},
                                .threads = 32 * ATTENTION_F32_WARPS,
                                .shared_bytes =
                                    (unsigned)(dbias_f32.kernel.shared_bytes / (ATTENTION_F32_MAX_D + 4) * c->pitch)};
    return grid.blocks[0] > 0 ? cot_cuda_launch(queue, &dbias_f32.kernel, &grid, c) : COT_OK;
}

/* Launches a kernel with eight lanes per row. */
static cot_status launch_row_kernel(cot_queue *queue, const cot_cuda_kernel *kernel, const attention_sm80_call *c)
{
    if (c->rows_q == 0)
        return COT_OK;
    return launch_tiles(queue, kernel, *c, ATTENTION_ROW_THREADS / ATTENTION_ROW_LANES, c->Tq, c->H,
                        ATTENTION_ROW_THREADS, 0);
}

/* Launches the kernels of a backward. stages > 0: dkv is a kernel of attention_bwd_one_pass_sm80.cu, which may compute
 * dq, too. dkv == NULL: dk and dv have a kernel each. */
static cot_status launch_backward_sm80(cot_queue *queue, const attention_problem *p, void *workspace,
                                       const tiled_kernel *dq, const tiled_kernel *dkv, const tiled_kernel *dk,
                                       const tiled_kernel *dv, int stages)
{
    const attention_sm80_bwd_plan *plan = queue->plan;
    attention_sm80_call c = call_of(queue, p, dq == &dq_f32);
    c.row_lse = workspace;
    c.row_delta = (float *)((char *)workspace + plan->row_delta);
    c.stages = stages;
    if (stages > 0 && plan->pass_computes_dq) {
        c.dq_accum = (float *)((char *)workspace + plan->dq_accum);
        c.accum_rows = plan->accum_rows;
        c.accum_columns = dkv->d_qk;
    }
    cot_status status = launch_row_kernel(queue, &preprocess_rows, &c);
    if (status == COT_OK && c.dq.data != NULL && c.dq_accum == NULL)
        status = launch(queue, dq, &c, false);
    if (dkv != NULL) {
        if (status == COT_OK && (c.dk.data != NULL || c.dv.data != NULL))
            status = launch(queue, dkv, &c, true);
    } else {
        if (status == COT_OK && c.dv.data != NULL)
            status = launch(queue, dv, &c, true);
        if (status == COT_OK && c.dk.data != NULL)
            status = launch(queue, dk, &c, true);
    }
    if (status == COT_OK && c.dq_accum != NULL)
        status = launch_row_kernel(queue, &dq_rows, &c);
    if (status == COT_OK && c.dsink.data != NULL)
        status = launch_dsink(queue, &c);
    return status == COT_OK && c.dbias.data != NULL ? launch_dbias(queue, &c) : status;
}

static cot_status backward_16(cot_queue *queue, const attention_problem *p, void *workspace, const dtype_kernels *k)
{
    const attention_sm80_bwd_plan *plan = queue->plan;
    const tiled_kernel *dkv = smallest_kernel(&k->dkv, p);
    int stages = 0;
    if (plan->supports_one_pass && (plan->pass_computes_dq || dkv == NULL || dkv->d_qk > 64)) {
        const tiled_kernel *one_pass = smallest_kernel(&k->one_pass, p),
                           *one_pass_1_stage = smallest_kernel(&k->one_pass_1_stage, p);
        if (one_pass->kernel.shared_bytes <= queue->device->max_shared_bytes)
            dkv = one_pass, stages = 2;
        else if (one_pass_1_stage->kernel.shared_bytes <= queue->device->max_shared_bytes)
            dkv = one_pass_1_stage, stages = 1;
    }
    return launch_backward_sm80(queue, p, workspace, smallest_kernel(&k->dq, p), dkv, smallest_kernel(&k->dk, p),
                                smallest_kernel(&k->dv, p), stages);
}

/* ---- entry points ------------------------------------------------------------------------------------------------ */

cot_status attention_fwd_bf16_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    return launch_forward_sm80(queue, problem, smallest_kernel(&kernels_bf16.fwd, problem));
}

cot_status attention_fwd_f16_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    return launch_forward_sm80(queue, problem, smallest_kernel(&kernels_f16.fwd, problem));
}

cot_status attention_fwd_f32_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    return launch_forward_sm80(queue, problem, &fwd_f32);
}

cot_status attention_bwd_bf16_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return backward_16(queue, problem, workspace, &kernels_bf16);
}

cot_status attention_bwd_f16_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return backward_16(queue, problem, workspace, &kernels_f16);
}

cot_status attention_bwd_f32_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    return launch_backward_sm80(queue, problem, workspace, &dq_f32, NULL, &dk_f32, &dv_f32, 0);
}

/* Launches delta or merge: eight lanes per row. */
static cot_status launch_delta_or_merge(cot_queue *queue, const cot_cuda_kernel *kernel, int64_t rows, const void *call)
{
    const int64_t rows_of_block = ATTENTION_ROW_THREADS / ATTENTION_ROW_LANES;
    const cot_cuda_grid grid = {.blocks = {(unsigned)cot_ceil_div(rows, rows_of_block), 1, 1},
                                .threads = ATTENTION_ROW_THREADS};
    return rows > 0 ? cot_cuda_launch(queue, kernel, &grid, call) : COT_OK;
}

cot_status attention_delta_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const attention_delta_problem *p = problem;
    const attention_sizes *sizes = &p->sizes;
    const attention_delta_call c = {.B = sizes->B,
                                    .H = sizes->H,
                                    .Tq = sizes->Tq,
                                    .d_v = sizes->d_v,
                                    .out = view(&p->args.out),
                                    .dout = view(&p->args.dout),
                                    .dlse = view(&p->args.dlse),
                                    .delta = view(&p->args.delta)};
    return launch_delta_or_merge(queue, &delta_rows, sizes->B * sizes->H * sizes->Tq, &c);
}

cot_status attention_merge_sm80(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    const attention_merge_problem *p = problem;
    const attention_sizes *sizes = &p->sizes;
    const attention_merge_call c = {.B = sizes->B,
                                    .H = sizes->H,
                                    .Tq = sizes->Tq,
                                    .d_v = sizes->d_v,
                                    .out_a = view(&p->args.out_a),
                                    .out_b = view(&p->args.out_b),
                                    .lse_a = view(&p->args.lse_a),
                                    .lse_b = view(&p->args.lse_b),
                                    .sink = view(&p->args.sink),
                                    .out = view(&p->args.out),
                                    .lse = view(&p->args.lse)};
    return launch_delta_or_merge(queue, &merge_rows, sizes->B * sizes->H * sizes->Tq, &c);
}
