/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_launch.c: the CUDA rows on the host: which kernels a call enqueues, with what grids. */
#include "attention_launch.h"

#include "attention_arrays.h"
#include "attention_maps.h"

#define COT_KERNEL(direction, name, isa, intermediate, admit, cost, ...) \
    cot_status name(cot_queue *queue, const void *problem, void *workspace_);
#include "../attention_kernels.def"
#undef COT_KERNEL

extern const unsigned char cot_image_attention_bwd_rows[], cot_image_attention_bwd_sm90[],
    cot_image_attention_bwd_d256_sm90[];

enum { ROWS_THREADS = 256, ROWS_WARPS = ROWS_THREADS / 32 };

/* Shared memory: K and V, stages of Q and dO and dS, for each 64 columns; of dQ; and what goes with them. */
#define SHARED_BYTES(slices)                                                                         \
    (8192 * ((slices) * (4 + ATTENTION_Q_STAGES + ATTENTION_DOUT_STAGES) + 2 * ATTENTION_DS_STAGES + \
             2 * ATTENTION_DQ_STAGES) +                                                              \
     256 * (ATTENTION_Q_STAGES + ATTENTION_DOUT_STAGES) + 512)

#define SHARED_BYTES_D256 (8192 * (4 + 4 + 2 + 2 * 4 + 2 * ATTENTION_DOUT_CHUNKS + 2 + 2) + 256 * 4 + 512 + 512)

/* The kernels of a dtype and of tiles of that many columns, in the order they run. */
typedef struct backward_kernels {
    cot_cuda_kernel prepare, main, finish;
} backward_kernels;

#define KERNELS(dtype, size, main_size, image, shared_bytes)                             \
    {                                                                                    \
        {cot_image_attention_bwd_rows, "attention_bwd_prepare_" #size, 0},               \
            {image, "attention_bwd_sm90_" #dtype "_" #main_size, shared_bytes},          \
            {cot_image_attention_bwd_rows, "attention_bwd_finish_" #dtype "_" #size, 0}, \
    }
#define KERNELS_OF(dtype)                                                                          \
    {                                                                                              \
        KERNELS(dtype, d64, d64, cot_image_attention_bwd_sm90, SHARED_BYTES(1)),                   \
            KERNELS(dtype, d128, d128, cot_image_attention_bwd_sm90, SHARED_BYTES(2)),             \
            KERNELS(dtype, d256, d256, cot_image_attention_bwd_d256_sm90, SHARED_BYTES_D256),      \
            KERNELS(dtype, d64_all, d64_all, cot_image_attention_bwd_sm90, SHARED_BYTES(1)),       \
            KERNELS(dtype, d128_all, d128_all, cot_image_attention_bwd_sm90, SHARED_BYTES(2)),     \
            KERNELS(dtype, d64_all, d64_softcap, cot_image_attention_bwd_sm90, SHARED_BYTES(1)),   \
            KERNELS(dtype, d128_all, d128_softcap, cot_image_attention_bwd_sm90, SHARED_BYTES(2)), \
    }
static const backward_kernels bf16_kernels[] = KERNELS_OF(bf16), f16_kernels[] = KERNELS_OF(f16);
static const cot_cuda_kernel dsink = {cot_image_attention_bwd_rows, "attention_bwd_dsink", 0};

/* lse2 and D, which lie one after the other, a tile of queries a row. */
static cot_status map_statistics(cot_queue *queue, CUtensorMap *map, const attention_bwd_call *c, int64_t tiles)
{
    const int64_t rows = 2 * tiles, row = ATTENTION_QUERIES * (int64_t)sizeof(float);
    return cot_cuda_tensor_map(queue, map, COT_F32, 4, c->lse2, (const int64_t[]){ATTENTION_QUERIES, rows, 1, 1},
                               (const int64_t[]){row, rows * row, rows * row},
                               (const int[]){ATTENTION_QUERIES, 1, 1, 1});
}

/* See there. */
static attention_bwd_softcap backward_softcap(const attention_sizes *z, bool raised)
{
    attention_bwd_softcap cap = {0};
    if (z->softcap > 0) {
        const double scale = z->scale / z->softcap, square = scale * scale, most = 16384;
        const double factor = z->softcap * 1.4426950408889634, all = scale * factor, slopes = raised ? 2 : 1;
        const bool normal = fabs(scale) > 1 / most && fabs(scale) < most;
        /* What a probability and a slope may be off by, of themselves. The first of the powers that are left out counts,
         * but for what the others can take over of it (as Chebyshev's polynomials say), and in the longer series the second. */
        const double off = z->dtype == COT_F16 ? 0x1p-16 : 0x1p-13, apart = off / z->softcap;
        const double near = fmin(pow(12 * off, 1.0 / 4), pow(120 * apart, 1.0 / 5)), n2 = near * near, n4 = n2 * n2;
        const double far = fmin(fmin(pow(84 * off, 1.0 / 6), pow(1185 * apart, 1.0 / 7)),
                                fmin(pow(5 * off, 1.0 / 8), pow(45 * apart, 1.0 / 9)));
        const double f2 = far * far, f4 = f2 * f2, f6 = f4 * f2;
        cap.scale = (float)scale;
        cap.factor = (float)factor;
        cap.slopes = (float)slopes;
        cap.near[0] = normal ? (float)(n2 / square) : -1;
        cap.near[1] = normal ? (float)(f2 / square) : -1;
        cap.brief[0] = (float)((1 - n4 / 24) * all);
        cap.brief[1] = (float)((-1.0 / 3 + n2 / 6) * all * square);
        cap.brief_slope[0] = (float)((1 - n4 / 12) * slopes);
        cap.brief_slope[1] = (float)((-1 + n2 * 2 / 3) * slopes * square);
        cap.series[0] = (float)((1 - f6 * 17 / 2880) * all);
        cap.series[1] = (float)((-1.0 / 3 + f4 * 17 / 360) * all * square);
        cap.series[2] = (float)((2.0 / 15 - f2 * 17 / 180) * all * square * square);
        cap.slope[0] = (float)((1 - f6 * 17 / 1440) * slopes);
        cap.slope[1] = (float)((-1 + f4 * 17 / 80) * slopes * square);
        cap.slope[2] = (float)((2.0 / 3 - f2 * 17 / 30) * slopes * square * square);
    }
    return cap;
}

static cot_status backward(cot_queue *queue, const attention_problem *p, void *workspace,
                           const backward_kernels *by_size)
{
    const attention_sizes *z = &p->sizes;
    const bool all = attention_bwd_wants_all(p);
    const int64_t columns = attention_bwd_columns(z);
    const backward_kernels *kernels =
        by_size + (columns == 128) + 2 * (columns == 256) + 3 * all + 2 * (z->softcap > 0);
    const unsigned pair = columns == 256 ? 2 : 1; /* blocks that share ATTENTION_KEYS keys */
    const attention_bwd_parts parts = attention_bwd_parts_of(p);
    const bool raised = z->dtype == COT_F16 && columns <= 128;
    if (z->H == 0)
        return COT_OK;
    attention_bwd_mapped mapped = {
        .call = {
            .place = attention_placing_of(queue, p),
            .B = z->B,
            .H = z->H,
            .Hkv = z->Hkv,
            .Tq = z->Tq,
            .Tk = z->Tk,
            .d = z->d,
            .dv = z->dv,
            .tiles = cot_ceil_div(z->Tq, ATTENTION_QUERIES),
            .diagonal = z->k_length - z->q_length + z->q_begin - z->k_begin,
            .left = z->left,
            .right = z->right,
            .causal = z->right == 0,
            .ordered = !p->allow_nondeterminism,
            .accumulate = p->accumulate,
            .out_in_vectors = attention_in_vectors(&p->out) && attention_in_vectors(&p->dout) && z->dv % 8 == 0,
            .dq_in_vectors = attention_in_vectors(&p->dq) && !p->accumulate && z->d % 8 == 0,
            .dk_in_vectors = attention_in_vectors(&p->dk) && !p->accumulate && z->d % 8 == 0,
            .dv_in_vectors = attention_in_vectors(&p->dv) && !p->accumulate && z->dv % 8 == 0,
            .scale = (float)z->scale,
            .scale_log2 = (float)((z->softcap > 0 ? z->softcap : z->scale) * 1.4426950408889634),
            .raise = raised ? ATTENTION_RAISE : 0,
            .lower = raised ? ATTENTION_LOWER : 1,
            .cap = backward_softcap(z, raised),
            .lse = attention_array_of(&p->lse),
            .out = attention_array_of(&p->out),
            .dout = attention_array_of(&p->dout),
            .dlse = attention_array_of(&p->dlse),
            .delta = attention_array_of(&p->delta),
            .sink = attention_array_of(&p->sink),
            .grad_q = attention_array_of(&p->dq),
            .grad_k = attention_array_of(&p->dk),
            .grad_v = attention_array_of(&p->dv),
            .dsink = attention_array_of(&p->dsink),
            .lse2 = (float *)((char *)workspace + parts.lse2),
            .row_delta = (float *)((char *)workspace + parts.row_delta),
            .dq_sums = (float *)((char *)workspace + parts.dq_sums),
            .counters = (uint32_t *)((char *)workspace + parts.counters),
        }};
    attention_placing *place = &mapped.call.place;
    place->most_tiles = (int32_t)attention_bwd_tiles(p);
    place->queries = ATTENTION_QUERIES;
    place->keys = ATTENTION_KEYS;
    place->table = all ? (attention_placed *)((char *)workspace + parts.table) : NULL;
    const attention_bwd_call *c = &mapped.call;
    const int64_t tiles = z->H * attention_bwd_tiles(p), slices = tiles * columns / 64;
    cot_status status = all ? attention_launch_place(queue, place) : COT_OK;
    if (status == COT_OK && tiles > 0)
        status = attention_launch(
            queue, &kernels->prepare,
            (cot_cuda_grid){.blocks = {(unsigned)(tiles * ATTENTION_QUERIES * columns / 8 / ROWS_THREADS), 1, 1},
                            .threads = ROWS_THREADS},
            c);
    if (z->rows_k > 0) {
        if (status == COT_OK && tiles > 0)
            status = map_statistics(queue, &mapped.statistics, c, tiles);
        if (status == COT_OK)
            status = attention_map_rows(queue, &mapped.q, &p->q, ATTENTION_QUERIES, p->k.data);
        if (status == COT_OK)
            status = attention_map_rows(queue, &mapped.k, &p->k, (int)(ATTENTION_KEYS / pair), p->k.data);
        if (status == COT_OK)
            status = attention_map_rows(queue, &mapped.v, &p->v, (int)(ATTENTION_KEYS / pair), p->k.data);
        if (status == COT_OK)
            status = attention_map_rows(queue, &mapped.dout, &p->dout, ATTENTION_QUERIES, p->k.data);
        if (status == COT_OK)
            status =
                attention_launch(queue, &kernels->main,
                                 (cot_cuda_grid){.blocks = {(unsigned)(attention_bwd_blocks(p) * z->Hkv) * pair, 1, 1},
                                                 .threads = ATTENTION_GROUPS * 128,
                                                 .cluster = pair > 1 ? pair : 0,
                                                 .dependent = true},
                                 &mapped);
    }
    if (status == COT_OK && c->grad_q.data != NULL && slices > 0)
        status = attention_launch(queue, &kernels->finish,
                                  (cot_cuda_grid){.blocks = {(unsigned)cot_ceil_div(slices * 4, ROWS_WARPS), 1, 1},
                                                  .threads = ROWS_THREADS,
                                                  .dependent = true},
                                  c);
    if (status == COT_OK && c->dsink.data != NULL)
        status = attention_launch(queue, &dsink,
                                  (cot_cuda_grid){.blocks = {(unsigned)z->H, 1, 1}, .threads = ROWS_THREADS}, c);
    return status;
}

cot_status attention_bwd_bf16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return backward(queue, problem, workspace, bf16_kernels);
}

cot_status attention_bwd_f16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return backward(queue, problem, workspace, f16_kernels);
}
