/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_sm90_launch.c: host code of the forward for Hopper: which kernels a call launches, with which grids. */
#include "attention_arrays.h"
#include "attention_maps.h"

#include "core/op_tables.h"

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "../attention_kernels.def"
#undef COT_KERNEL_ENTRY

extern const unsigned char cot_image_attention_fwd_sm90[], cot_image_attention_fwd_large_sm90[];

typedef struct forward_kernel {
    int d, d_v, keys, consumers; /* columns of the tiles; see ATTENTION_FWD_SMALL */
    cot_cuda_kernel kernel;
} forward_kernel;

/* From the smallest to the largest. */
#define KERNEL(element, name, image, d, d_v, keys, consumers, q_stages, stages) \
    {d,                                                                         \
     d_v,                                                                       \
     keys,                                                                      \
     consumers,                                                                 \
     {image, "attention_fwd_" #element "_sm90_" #name,                          \
      ATTENTION_FWD_SHARED_BYTES(d, d_v, keys, consumers, q_stages, stages)}},
#define BF16_SMALL(name, d, d_v, keys, consumers, q_stages, stages) \
    KERNEL(bf16, name, cot_image_attention_fwd_sm90, d, d_v, keys, consumers, q_stages, stages)
#define BF16_LARGE(name, d, d_v, keys, consumers, q_stages, stages) \
    KERNEL(bf16, name, cot_image_attention_fwd_large_sm90, d, d_v, keys, consumers, q_stages, stages)
#define F16_SMALL(name, d, d_v, keys, consumers, q_stages, stages) \
    KERNEL(f16, name, cot_image_attention_fwd_sm90, d, d_v, keys, consumers, q_stages, stages)
#define F16_LARGE(name, d, d_v, keys, consumers, q_stages, stages) \
    KERNEL(f16, name, cot_image_attention_fwd_large_sm90, d, d_v, keys, consumers, q_stages, stages)
static const forward_kernel bf16_kernels[] = {ATTENTION_FWD_SMALL(BF16_SMALL) ATTENTION_FWD_LARGE(BF16_LARGE)};
static const forward_kernel bf16_softcap_kernels[] = {ATTENTION_FWD_SMALL_SOFTCAP(BF16_SMALL)
                                                          ATTENTION_FWD_LARGE_SOFTCAP(BF16_LARGE)};
static const forward_kernel f16_kernels[] = {ATTENTION_FWD_SMALL(F16_SMALL) ATTENTION_FWD_LARGE(F16_LARGE)};
static const forward_kernel f16_softcap_kernels[] = {ATTENTION_FWD_SMALL_SOFTCAP(F16_SMALL)
                                                         ATTENTION_FWD_LARGE_SOFTCAP(F16_LARGE)};

/* Bytes of K and V of a head that a query tile may read. */
static int64_t head_bytes_of(const attention_sizes *sizes)
{
    const bool is_window = sizes->left < sizes->Tk && sizes->right < sizes->Tk - sizes->left;
    const int64_t keys = is_window ? sizes->left + sizes->right + 1 : sizes->Tk;
    return cot_max(keys * (sizes->d_qk + sizes->d_v) * (int64_t)cot_dtype_size(sizes->dtype), 1);
}

/* Many more keys than queries, as for one rank of a sequence on many GPUs. All tiles are then long, and few blocks share
 * the keys of a head. */
static bool has_many_keys(const attention_sizes *sizes)
{
    return 2 * sizes->Tq <= sizes->Tk && head_bytes_of(sizes) >= 8 << 20;
}

/* Query heads of a section: whole groups. Sections divide the heads of a call evenly. If sequences may differ in
 * length, they divide the heads of each sequence. K and V of a section take at most section_bytes. Without a causal
 * mask they should fit in the L2 cache. Under a causal mask, the long tiles of the last section start late, and the
 * call waits for them. Fewer and larger sections lose less. Heads with few keys are an exception: in a large section,
 * their K and V would be read from memory several times. So are calls with many more keys than queries: one head at a
 * time is faster. Measured on an H200: docs/experiments/attention.md. */
static int32_t heads_per_section(const attention_sizes *sizes, bool sequences_differ)
{
    const int64_t head_bytes = head_bytes_of(sizes);
    const bool is_causal = sizes->right < sizes->Tk, has_long_tiles = is_causal && has_many_keys(sizes);
    const bool has_large_sections = is_causal && !has_long_tiles && (head_bytes >= 2 << 20 || sizes->d_qk <= 64);
    const int64_t section_bytes = (has_long_tiles       ? 8
                                   : has_large_sections ? 96
                                                        : 32)
                                  << 20,
                  most_heads = sizes->d_qk <= 64 || has_large_sections ? INT64_MAX : 64,
                  section_heads = cot_clamp(section_bytes / head_bytes, 1, most_heads);
    const int64_t heads = sequences_differ ? sizes->Hkv : sizes->B * sizes->Hkv,
                  sections = cot_ceil_div(heads, section_heads);
    return (int32_t)(sizes->H / sizes->Hkv * cot_ceil_div(heads, sections));
}

/* Sets the factors that turn scores into exponents, and exponents into lse. */
static void set_scales(attention_fwd_call *c, const attention_sizes *sizes)
{
    const double factor = sizes->softcap > 0 ? sizes->softcap : fabs(sizes->scale);
    const float softmax_scale_log2 = (float)(factor * 1.4426950408889634);
    c->cap = attention_softcap_of(sizes, softmax_scale_log2);
    c->softmax_scale_log2 = sizes->softcap > 0 ? 1 : softmax_scale_log2;
    const double lse_scale = factor / (double)softmax_scale_log2;
    c->lse_scale = (float)lse_scale;
    c->lse_scale_low = (float)(lse_scale - (double)c->lse_scale);
}

static cot_status launch_forward_sm90(cot_queue *queue, const attention_problem *p, void *workspace,
                                      const forward_kernel *plain, const forward_kernel *with_softcap)
{
    const attention_sizes *sizes = &p->sizes;
    const attention_sm90_fwd_plan *plan = queue->plan;
    const forward_kernel *k = sizes->softcap > 0 || sizes->scale < 0 ? with_softcap : plain;
    while (sizes->d_qk > k->d || sizes->d_v > k->d_v)
        k++;
    const int64_t queries = 64 * k->consumers, tiles = cot_ceil_div(sizes->Tq, queries);
    const int64_t sequence_count = attention_sequence_count(p);
    const int64_t total_tiles =
        (sizes->packed ? sizes->rows_q / queries + sequence_count : tiles * sequence_count) * sizes->H;
    if (sizes->rows_q == 0 || total_tiles == 0 || (!cot_is_present(&p->out) && !cot_is_present(&p->lse)))
        return COT_OK;
    const int64_t blocks = total_tiles < queue->device->multiprocessors ? total_tiles : queue->device->multiprocessors;
    attention_fwd_mapped_call mapped = {
        .call = {
            .sequences = attention_sequences_of(queue, p),
            .left = sizes->left,
            .right = sizes->right,
            .diagonal = attention_diagonal(sizes),
            .H = (int32_t)sizes->H,
            .heads_per_kv_head = (int32_t)(sizes->H / sizes->Hkv),
            .d_qk = (int32_t)sizes->d_qk,
            .d_v = (int32_t)sizes->d_v,
            .tiles = (int32_t)tiles,
            .heads_per_section = heads_per_section(sizes, plan->varlen),
            .prefetch_distance = has_many_keys(sizes) ? 2 : 0,
            .stores_out_vectors = attention_has_vectors_16(&p->out) && sizes->d_v % 8 == 0,
            .out = attention_array_of(&p->out),
            .lse = attention_array_of(&p->lse),
            .sink = attention_array_of(&p->sink),
        }};
    attention_sequences *sequences = &mapped.call.sequences;
    sequences->tile_queries = (int32_t)queries;
    sequences->key_block_rows = 1; /* the forward has no key blocks */
    sequences->max_tiles = (int32_t)(total_tiles / sizes->H);
    sequences->grid_blocks = (int32_t)blocks;
    /* If each block has one tile, there is no counter and no kernel before this one. */
    const bool needs_prepare = plan->varlen || total_tiles > blocks;
    sequences->tile_counter = needs_prepare ? workspace : NULL;
    sequences->seqlens = plan->varlen ? (attention_seqlen_info *)((char *)workspace + plan->seqlens) : NULL;
    set_scales(&mapped.call, sizes);
    cot_status status = needs_prepare ? attention_launch_prepare(queue, sequences) : COT_OK;
    if (status == COT_OK)
        status = attention_encode_row_map(queue, &mapped.q, &p->q, (int)queries, p->q.data);
    if (status == COT_OK)
        status = attention_encode_row_map(queue, &mapped.k, &p->k, k->keys, p->q.data);
    if (status == COT_OK)
        status = attention_encode_row_map(queue, &mapped.v, &p->v, k->keys, p->q.data);
    if (status == COT_OK)
        status = attention_launch(queue, &k->kernel,
                                  (cot_cuda_grid){.blocks = {(unsigned)blocks, 1, 1},
                                                  .threads = (unsigned)(k->consumers + 1) * 128,
                                                  .dependent = needs_prepare},
                                  &mapped);
    return status;
}

cot_status attention_fwd_bf16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return launch_forward_sm90(queue, problem, workspace, bf16_kernels, bf16_softcap_kernels);
}

cot_status attention_fwd_f16_sm90(cot_queue *queue, const void *problem, void *workspace)
{
    return launch_forward_sm90(queue, problem, workspace, f16_kernels, f16_softcap_kernels);
}
