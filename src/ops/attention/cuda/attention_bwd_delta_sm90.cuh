/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_delta_sm90.cuh: scaled_delta of the query heads that `preprocess` leaves to the main kernel. preprocess
 * is limited by DRAM, and the main kernel is not. So preprocess computes only what the first units need. A few thread
 * blocks of the main kernel compute the rest, while the others work on units.
 *
 * The work is divided into c.delta_shares *shares*. Shares have the first numbers of the counter of units: a thread
 * block (in the pair kernel a cluster) that takes a number below delta_shares computes this share, and then takes another
 * number. The number of a unit is the number taken, less delta_shares. So a unit waits only for shares and units that were
 * taken earlier, and a share waits for nothing.
 *
 * The thread blocks of all shares take the query tiles in turn. When a warp has finished its rows of a section's tiles, it
 * adds 1 to delta_done of the section. The producer of a unit waits until all warps have done so (wait_for_delta). */
#ifndef COT_ATTENTION_BWD_DELTA_SM90_CUH
#define COT_ATTENTION_BWD_DELTA_SM90_CUH

#include "attention_bwd_consumer_sm90.cuh"

#include "../../../cuda/device/mma.cuh"

/* The producer waits until scaled_delta of a query head is in memory. batch_head: b H + h. */
static __device__ __forceinline__ void wait_for_delta(const attention_bwd_call &c, int batch_head)
{
    if (batch_head < c.preprocessed_heads)
        return;
    const uint32_t *done = c.delta_done + (unsigned)batch_head / (unsigned)c.heads_per_section;
    while (cot_load_acquire(done) != c.delta_warps)
        ;
    cot_fence_proxy_async_global();
}

/* Shared memory of compute_delta, in the memory that K, V and the other tiles take later. The barriers are in that of K,
 * which no thread reads or writes with its own instructions. racecheck reported a hazard where they were in that of a dQ
 * tile. */
template <int COLUMNS> struct delta_shared {
    enum {
        STAGES = 6,                                              /* of 32 KiB */
        PANEL_BYTES = ATTENTION_BWD_TILE_QUERIES(COLUMNS) * 128, /* 64 columns, TMA's swizzle of 128 bytes */
        PANELS = COLUMNS / 64,
    };
    uint64_t full[STAGES], empty[STAGES];
    alignas(1024) unsigned char out[STAGES][PANELS][PANEL_BYTES], dout[STAGES][PANELS][PANEL_BYTES];
};

/* delta of 8 rows, on tensor cores. out, dout: panels of 64 columns, where row 8i of a panel begins. A lane gets delta of
 * row lane / 4 if lane % 4 = lane / 8.
 *
 * Words 2i and 2i + 1 of out are rows g = lane / 4 and g + 8 of operand A of m16n8k8, and a word of dout is operand B. Both
 * words are of row g of out. So element (g, g) of `even` gets the products of words 0 and 2, and element (g + 8, g) of
 * `odd` those of words 1 and 3. The other elements are not used. No instruction moves an operand. */
template <typename E, int PANELS>
static __device__ __forceinline__ float delta_of_8_rows(uint32_t out, uint32_t dout, int panel_bytes, int lane)
{
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int i = 0; i < 2 * PANELS; i++) { /* 32 columns */
        const uint32_t offset = i / 2 * panel_bytes + lane % 8 * 128 + ((4 * (i % 2) + lane / 8) ^ (lane % 8)) * 16;
        uint32_t a[4], b[4];
        cot_ldmatrix_x4(a, out + offset);
        cot_ldmatrix_x4(b, dout + offset);
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            if (cot_is_f16<E>) {
                cot_mma_f16_k8(even, a[k], a[k + 1], b[k]);
                cot_mma_f16_k8(odd, a[k], a[k + 1], b[k + 1]);
            } else {
                cot_mma_bf16_k8(even, a[k], a[k + 1], b[k]);
                cot_mma_bf16_k8(odd, a[k], a[k + 1], b[k + 1]);
            }
        }
    }
    return lane / 4 % 2 == 0 ? even[0] + odd[2] : even[1] + odd[3];
}

/* Computes a share. Executed by all threads of a thread block, before they have roles. block: its number among the
 * thread blocks of all shares. BOX_ROWS: rows of a box of the maps. */
template <typename E, int COLUMNS, int BOX_ROWS>
static __device__ __forceinline__ void compute_delta(const attention_bwd_mapped_call &mapped, uint32_t block)
{
    constexpr int QUERIES = ATTENTION_BWD_TILE_QUERIES(COLUMNS), WARPS = ATTENTION_BWD_DELTA_WARPS;
    const attention_bwd_call &c = mapped.call;
    delta_shared<COLUMNS> &s = *(delta_shared<COLUMNS> *)dynamic_shared_memory;
    static_assert(sizeof s <= ATTENTION_BWD_KEY_BLOCKS_SHARED_BYTES(COLUMNS) - 4096 &&
                      sizeof s <= ATTENTION_BWD_PAIRS_SHARED_BYTES(COLUMNS) - 4096,
                  "overlaps the barriers and the numbers at the end of bwd_shared");
    /* Read here: ptxas would keep values in registers that the roles also compute from threadIdx. */
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int lane = thread % WARP, warp = thread / WARP;
    const unsigned tiles_per_head = (unsigned)c.tiles_per_head, tiles = (unsigned)(c.B * c.H) * tiles_per_head,
                   tiles_per_section = (unsigned)c.heads_per_section * tiles_per_head, blocks = c.delta_warps / WARPS,
                   first = (unsigned)c.preprocessed_heads * tiles_per_head;
    if (thread == 0) {
        for (int i = 0; i < s.STAGES; i++)
            cot_mbarrier_init(&s.full[i], 1), cot_mbarrier_init(&s.empty[i], WARPS);
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    int stage = 0;
    uint32_t parity = 0;
    const auto next_stage = [&] {
        if (++stage == s.STAGES)
            stage = 0, parity ^= 1;
    };
    if (thread == WARPS * WARP) {
#pragma unroll 1
        for (unsigned tile = first + block; tile < tiles; tile += blocks, next_stage()) {
            const unsigned batch_head = tile / tiles_per_head, b = batch_head / (unsigned)c.H;
            const int h = (int)(batch_head - b * (unsigned)c.H),
                      row = (int)(tile - batch_head * tiles_per_head) * QUERIES;
            cot_mbarrier_wait(&s.empty[stage], parity ^ 1);
            cot_mbarrier_arrive_expect(&s.full[stage], sizeof s.out[0] + sizeof s.dout[0]);
            for (int panel = 0; panel < s.PANELS; panel++)
                for (int box_row = 0; box_row < QUERIES; box_row += BOX_ROWS) {
                    cot_tma_load_4d(s.out[stage][panel] + box_row * 128, &mapped.out, panel * 64, row + box_row, h,
                                    (int)b, &s.full[stage]);
                    cot_tma_load_4d(s.dout[stage][panel] + box_row * 128, &mapped.dout, panel * 64, row + box_row, h,
                                    (int)b, &s.full[stage]);
                }
        }
    } else if (warp < WARPS) {
        unsigned section = first / tiles_per_section;
        const auto finish_sections_before = [&](unsigned end) {
            __syncwarp();
            if (lane == 0)
                for (unsigned i = section; i < end; i++)
                    cot_add_release(c.delta_done + i, 1);
            section = end;
        };
#pragma unroll 1
        for (unsigned tile = first + block; tile < tiles; tile += blocks, next_stage()) {
            if (tile / tiles_per_section > section)
                finish_sections_before(tile / tiles_per_section);
            cot_mbarrier_wait(&s.full[stage], parity);
            constexpr int GROUPS = QUERIES / 8 / WARPS; /* of 8 rows, for each warp */
            float delta[GROUPS];
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
                delta[i] = delta_of_8_rows<E, COLUMNS / 64>(
                    cot_shared_address(s.out[stage][0]) + (warp * GROUPS + i) * 1024,
                    cot_shared_address(s.dout[stage][0]) + (warp * GROUPS + i) * 1024, s.PANEL_BYTES, lane);
            __syncwarp();
            if (lane == 0)
                cot_mbarrier_arrive(&s.empty[stage]);
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
                if (lane % 4 == lane / 8)
                    c.scaled_delta[(int64_t)tile * QUERIES + (warp * GROUPS + i) * 8 + lane / 4] =
                        c.dp_scale * delta[i];
        }
        finish_sections_before((tiles + tiles_per_section - 1) / tiles_per_section);
    }
    __syncthreads();
    if (thread == 0)
        for (int i = 0; i < s.STAGES; i++)
            cot_mbarrier_invalidate(&s.full[i]), cot_mbarrier_invalidate(&s.empty[i]);
    cot_fence_proxy_async(); /* before TMA writes to the memory of the barriers */
    __syncthreads();
}

#endif
