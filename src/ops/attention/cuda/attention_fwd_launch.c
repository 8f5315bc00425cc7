/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_launch.c: the forward for Hopper on the host: which kernels a call enqueues, with what grids. */
#include "attention_arrays.h"
#include "attention_maps.h"

#define COT_KERNEL(direction, name, isa, intermediate, admit, cost, ...) \
    cot_status name(cot_queue *queue, const void *problem, void *workspace_);
#include "../attention_kernels.def"
#undef COT_KERNEL

extern const unsigned char cot_image_attention_fwd_sm90[], cot_image_attention_fwd_d256_sm90[];

enum { CACHE_BYTES = 32 << 20 /* of the second-level cache, for K and V of a section */ };

typedef struct forward_kernel {
    int d, dv, keys, groups; /* the most columns; see ATTENTION_FWD_SMALL */
    cot_cuda_kernel kernel;
} forward_kernel;

/* From the smallest to the largest. */
#define KERNEL(element, name, image, d, dv, keys, groups, queries, stages) \
    {d,                                                                    \
     dv,                                                                   \
     keys,                                                                 \
     groups,                                                               \
     {image, "attention_fwd_sm90_" #element "_" #name, ATTENTION_FWD_SHARED(d, dv, keys, groups, queries, stages)}},
#define BF16_SMALL(name, d, dv, keys, groups, queries, stages) \
    KERNEL(bf16, name, cot_image_attention_fwd_sm90, d, dv, keys, groups, queries, stages)
#define BF16_LARGE(name, d, dv, keys, groups, queries, stages) \
    KERNEL(bf16, name, cot_image_attention_fwd_d256_sm90, d, dv, keys, groups, queries, stages)
#define F16_SMALL(name, d, dv, keys, groups, queries, stages) \
    KERNEL(f16, name, cot_image_attention_fwd_sm90, d, dv, keys, groups, queries, stages)
#define F16_LARGE(name, d, dv, keys, groups, queries, stages) \
    KERNEL(f16, name, cot_image_attention_fwd_d256_sm90, d, dv, keys, groups, queries, stages)
static const forward_kernel bf16_kernels[] = {ATTENTION_FWD_SMALL(BF16_SMALL) ATTENTION_FWD_LARGE(BF16_LARGE)};
static const forward_kernel bf16_kernels_all[] = {ATTENTION_FWD_SMALL_ALL(BF16_SMALL)
                                                      ATTENTION_FWD_LARGE_ALL(BF16_LARGE)};
static const forward_kernel f16_kernels[] = {ATTENTION_FWD_SMALL(F16_SMALL) ATTENTION_FWD_LARGE(F16_LARGE)};
static const forward_kernel f16_kernels_all[] = {ATTENTION_FWD_SMALL_ALL(F16_SMALL) ATTENTION_FWD_LARGE_ALL(F16_LARGE)};

static int64_t at_least(int64_t a, int64_t b)
{
    return a < b ? b : a;
}

/* Heads whose K and V stay in the cache together, of a window what it sees of them; whole groups of query heads. */
static int32_t section_of(const attention_sizes *z)
{
    const int64_t keys = z->left < z->Tk && z->right < z->Tk - z->left ? z->left + z->right + 1 : z->Tk;
    const int64_t bytes = at_least(keys * (z->d + z->dv) * (int64_t)cot_dtype_size(z->dtype), 1);
    const int64_t heads = at_least(CACHE_BYTES / bytes, 1);
    return (int32_t)(z->H / z->Hkv * (heads < z->Hkv ? heads : z->Hkv));
}

/* How scores become exponents, and exponents lse. */
static void set_factors(attention_fwd_call *c, const attention_sizes *z)
{
    const double factor = z->softcap > 0 ? z->softcap : fabs(z->scale);
    const float scale_log2 = (float)(factor * 1.4426950408889634);
    c->cap = attention_softcap_of(z, scale_log2);
    c->scale_log2 = z->softcap > 0 ? 1 : scale_log2;
    const double natural = factor / (double)scale_log2;
    c->natural = (float)natural;
    c->natural_low = (float)(natural - (double)c->natural);
}

static cot_status forward(cot_queue *queue, const attention_problem *p, void *workspace, const forward_kernel *plain,
                          const forward_kernel *all_options)
{
    const attention_sizes *z = &p->sizes;
    const forward_kernel *k = z->softcap > 0 || z->scale < 0 ? all_options : plain;
    while (z->d > k->d || z->dv > k->dv)
        k++;
    const int64_t queries = 64 * k->groups, tiles = cot_ceil_div(z->Tq, queries);
    const int64_t sequences = attention_sequence_count(p);
    const int64_t all = (z->packed ? z->rows_q / queries + sequences : tiles * sequences) * z->H;
    if (z->rows_q == 0 || all == 0 || (!cot_present(&p->out) && !cot_present(&p->lse)))
        return COT_OK;
    const int64_t blocks = all < queue->device->multiprocessors ? all : queue->device->multiprocessors;
    attention_fwd_mapped mapped = {.call = {
                                       .place = attention_placing_of(queue, p),
                                       .left = z->left,
                                       .right = z->right,
                                       .diagonal = z->k_length - z->q_length + z->q_begin - z->k_begin,
                                       .H = (int32_t)z->H,
                                       .heads_of_kv = (int32_t)(z->H / z->Hkv),
                                       .d = (int32_t)z->d,
                                       .dv = (int32_t)z->dv,
                                       .tiles = (int32_t)tiles,
                                       .section = section_of(z),
                                       .out_in_vectors = attention_in_vectors(&p->out) && z->dv % 8 == 0,
                                       .out = attention_array_of(&p->out),
                                       .lse = attention_array_of(&p->lse),
                                       .sink = attention_array_of(&p->sink),
                                   }};
    attention_placing *place = &mapped.call.place;
    place->queries = (int32_t)queries;
    place->keys = 1; /* there are no blocks of keys here */
    place->blocks = (int32_t)blocks;
    /* Where each block has one tile, nobody counts, and no kernel comes before. */
    const bool varies = attention_varies(p), placed = varies || all > blocks;
    place->counter = placed ? workspace : NULL;
    place->table = varies ? (attention_placed *)((char *)workspace + COT_ALIGNMENT) : NULL;
    set_factors(&mapped.call, z);
    cot_status status = placed ? attention_launch_place(queue, place) : COT_OK;
    if (status == COT_OK)
        status = attention_map_rows(queue, &mapped.q, &p->q, (int)queries, p->q.data);
    if (status == COT_OK)
        status = attention_map_rows(queue, &mapped.k, &p->k, k->keys, p->q.data);
    if (status == COT_OK)
        status = attention_map_rows(queue, &mapped.v, &p->v, k->keys, p->q.data);
    if (status == COT_OK)
        status = attention_launch(queue, &k->kernel,
                                  (cot_cuda_grid){.blocks = {(unsigned)blocks, 1, 1},
                                                  .threads = (unsigned)(k->groups + 1) * 128,
                                                  .dependent = placed},
                                  &mapped);
    return status;
}

cot_status attention_fwd_bf16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return forward(queue, problem, workspace, bf16_kernels, bf16_kernels_all);
}

cot_status attention_fwd_f16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return forward(queue, problem, workspace, f16_kernels, f16_kernels_all);
}
