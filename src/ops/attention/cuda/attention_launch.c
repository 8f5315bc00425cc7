/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_launch.c: the CUDA rows on the host: which kernels a call enqueues, with what grids. */
#include "attention_launch.h"

#include "attention_arrays.h"
#include "attention_maps.h"

#define COT_KERNEL(direction, name, isa, intermediate, admit, cost, workspace) \
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

/* The kernels of a dtype and a head size, in the order they run. */
typedef struct backward_kernels {
    cot_cuda_kernel prepare, main, finish;
} backward_kernels;

#define KERNELS(name, d, image, shared_bytes)                                         \
    {                                                                                 \
        {cot_image_attention_bwd_rows, "attention_bwd_prepare_d" #d, 0},              \
            {image, "attention_bwd_sm90_" #name "_d" #d, shared_bytes},               \
            {cot_image_attention_bwd_rows, "attention_bwd_finish_" #name "_d" #d, 0}, \
    }
#define KERNELS_OF(name)                                                              \
    {                                                                                 \
        KERNELS(name, 64, cot_image_attention_bwd_sm90, SHARED_BYTES(1)),             \
            KERNELS(name, 128, cot_image_attention_bwd_sm90, SHARED_BYTES(2)),        \
            KERNELS(name, 256, cot_image_attention_bwd_d256_sm90, SHARED_BYTES_D256), \
    }
static const backward_kernels bf16_kernels[] = KERNELS_OF(bf16), f16_kernels[] = KERNELS_OF(f16); /* d = 64, 128, 256 */

/* lse2 and D, which lie one after the other, a tile of queries a row. */
static cot_status map_statistics(cot_queue *queue, CUtensorMap *map, const attention_bwd_call *c)
{
    const int64_t rows = 2 * c->B * c->H * c->tiles, row = ATTENTION_QUERIES * (int64_t)sizeof(float);
    return cot_cuda_tensor_map(queue, map, COT_F32, 4, c->lse2, (const int64_t[]){ATTENTION_QUERIES, rows, 1, 1},
                               (const int64_t[]){row, rows * row, rows * row},
                               (const int[]){ATTENTION_QUERIES, 1, 1, 1});
}

static cot_status backward(cot_queue *queue, const attention_problem *p, void *workspace,
                           const backward_kernels *by_size)
{
    const attention_sizes *z = &p->sizes;
    const backward_kernels *kernels = by_size + (z->d == 128) + 2 * (z->d == 256);
    const unsigned pair = z->d == 256 ? 2 : 1; /* blocks that share ATTENTION_KEYS keys */
    const attention_bwd_parts parts = attention_bwd_parts_of(z);
    const attention_sequence sequence = attention_sequence_at(p, 0);
    if (z->B * z->H == 0)
        return COT_OK;
    attention_bwd_mapped mapped = {
        .call = {
            .B = z->B,
            .H = z->H,
            .Hkv = z->Hkv,
            .Tq = z->Tq,
            .Tk = z->Tk,
            .d = z->d,
            .tiles = parts.tiles,
            .diagonal = sequence.diagonal,
            .causal = z->right == 0,
            .ordered = !p->allow_nondeterminism,
            .accumulate = p->accumulate,
            .out_in_vectors = attention_in_vectors(&p->out) && attention_in_vectors(&p->dout),
            .dq_in_vectors = attention_in_vectors(&p->dq) && !p->accumulate,
            .dk_in_vectors = attention_in_vectors(&p->dk) && !p->accumulate,
            .dv_in_vectors = attention_in_vectors(&p->dv) && !p->accumulate,
            .scale = (float)z->scale,
            .scale_log2 = (float)(z->scale * 1.4426950408889634),
            .lse = attention_array_of(&p->lse),
            .out = attention_array_of(&p->out),
            .dout = attention_array_of(&p->dout),
            .dlse = attention_array_of(&p->dlse),
            .delta = attention_array_of(&p->delta),
            .dq = attention_array_of(&p->dq),
            .dk = attention_array_of(&p->dk),
            .dv = attention_array_of(&p->dv),
            .lse2 = (float *)((char *)workspace + parts.lse2),
            .row_delta = (float *)((char *)workspace + parts.row_delta),
            .dq_sums = (float *)((char *)workspace + parts.dq_sums),
            .counters = (uint32_t *)((char *)workspace + parts.counters),
        }};
    const attention_bwd_call *c = &mapped.call;
    const int64_t tiles = z->B * z->H * parts.tiles, slices = tiles * z->d / 64;
    cot_status status = COT_OK;
    if (tiles > 0)
        status = attention_launch(
            queue, &kernels->prepare,
            (cot_cuda_grid){.blocks = {(unsigned)(tiles * ATTENTION_QUERIES * z->d / 8 / ROWS_THREADS), 1, 1},
                            .threads = ROWS_THREADS},
            c);
    if (z->Tk > 0) {
        if (status == COT_OK && tiles > 0)
            status = map_statistics(queue, &mapped.statistics, c);
        if (status == COT_OK)
            status = attention_map_rows(queue, &mapped.q, &p->q, ATTENTION_QUERIES, p->k.data);
        if (status == COT_OK)
            status = attention_map_rows(queue, &mapped.k, &p->k, (int)(ATTENTION_KEYS / pair), p->k.data);
        if (status == COT_OK)
            status = attention_map_rows(queue, &mapped.v, &p->v, (int)(ATTENTION_KEYS / pair), p->k.data);
        if (status == COT_OK)
            status = attention_map_rows(queue, &mapped.dout, &p->dout, ATTENTION_QUERIES, p->k.data);
        if (status == COT_OK)
            status = attention_launch(
                queue, &kernels->main,
                (cot_cuda_grid){
                    .blocks = {(unsigned)((z->Tk + ATTENTION_KEYS - 1) / ATTENTION_KEYS * z->Hkv * z->B) * pair, 1, 1},
                    .threads = ATTENTION_GROUPS * 128,
                    .cluster = pair > 1 ? pair : 0,
                    .dependent = true},
                &mapped);
    }
    if (status == COT_OK && c->dq.data != NULL && slices > 0)
        status =
            attention_launch(queue, &kernels->finish,
                             (cot_cuda_grid){.blocks = {(unsigned)((slices * 4 + ROWS_WARPS - 1) / ROWS_WARPS), 1, 1},
                                             .threads = ROWS_THREADS,
                                             .dependent = true},
                             c);
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
