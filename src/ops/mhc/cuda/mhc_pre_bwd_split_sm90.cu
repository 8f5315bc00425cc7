/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_pre_bwd_split_sm90.cu: pre backward's dx and Q, n = 4, f16 and bf16, for any D. Block (x, y) has columns
 * [256 x, 256 x + 256) of all four streams, and every so many tiles of 16 tokens; no block knows of another, since
 * mhc_pre_tokens.cu has read x and dh_in before for the records of all tokens. A ring slot a tile:
 *
 *   producer     x, dh_in and the records of the tile to shared memory; later dx from where x was
 *   8 products   warps, 32 columns of all streams each: mhc_pre_bwd_sm90.cuh
 *   post         brings dx_post, if given, a stream at a time; its tile takes the place of a slot
 *
 *   barrier            arrivals                phase ends when
 *   full[slot]         producer's one          the tile has its bytes
 *   done[slot]         a warp of products      dx lies where x was
 *   post_full[stream]  post's one              dx_post of the stream has come
 *   post_empty[stream] a warp of products      it is read */
#include "mhc_pre_bwd_sm90.cuh"

/* Groups whose second terms of phi gamma stay in registers. */
template <bool POST> constexpr int held_of = POST ? 5 : 7;

/* With dx_post, whose tile takes the place of a slot. */
template <bool POST> struct shared_memory {
    enum { STAGES = POST ? 3 : 4 };
    unsigned char stages[STAGES][STAGE_BYTES]; /* x [stream][chunk][token][128 bytes, swizzled], then dh_in alike */
    unsigned char dx_post[POST ? N : 1][POST ? STREAM_BYTES : 1024];
    phi_fragments<GROUPS> phi;
    phi_fragments<GROUPS - held_of<POST>> second;
    token_record records[STAGES][TILE];
    uint64_t full[STAGES], done[STAGES], post_full[N], post_empty[N];
};
static_assert(sizeof(shared_memory<false>) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
static_assert(sizeof(shared_memory<true>) <= MHC_SM90_SHARED_BYTES, "a block's shared memory");
extern __shared__ __align__(1024) unsigned char memory[];

#define FOR_EACH_TILE(tile, ring, count) \
    cot_ring<s.STAGES> ring;             \
    for (int tile = (int)blockIdx.y; tile < (count); tile += (int)gridDim.y, ring.next())

static __device__ __forceinline__ int64_t first_column(void)
{
    return blockIdx.x * MHC_SM90_COLUMNS + threadIdx.x / 32 * COLUMNS;
}

template <typename E, bool POST>
static __device__ __forceinline__ void products(const mhc_call &c, shared_memory<POST> &s, int tiles)
{
    const int warp = threadIdx.x / 32;
    uint32_t second[held_of<POST>][6];
    load_phi<0, GROUPS / 2>(c, s, first_column(), warp, second);
    load_phi<GROUPS / 2, GROUPS>(c, s, first_column(), warp, second);
    float Q[GROUPS][OCTETS][4] = {0};
    const lane_units at = find_units(s, warp);
    uint32_t turn = 0;
    FOR_EACH_TILE(tile, ring, tiles)
    {
        cot_mbarrier_wait(&s.full[ring.slot], ring.parity);
        multiply_tile<E, POST>(c, s, at, ring, warp, turn, second, Q);
        turn ^= 1;
    }
    const int64_t d = first_column();
    if (d < c.D && (given(c.dphi) || given(c.dgamma)))
        store_Q(c, Q, blockIdx.y, d);
}

template <bool POST>
static __device__ __forceinline__ void load_tile(const mhc_mapped_call &p, shared_memory<POST> &s, int slot, int tile)
{
    const int chunk = (int)blockIdx.x * MHC_SM90_CHUNKS;
    cot_mbarrier_arrive_expect(&s.full[slot], STAGE_BYTES + sizeof s.records[0]);
    cot_tensor_load_4d(s.stages[slot], &p.x, 0, tile * TILE, chunk, 0, &s.full[slot]);
    cot_tensor_load_4d(s.stages[slot] + X_BYTES, &p.dh_in, 0, tile * TILE, chunk, 0, &s.full[slot]);
    cot_bulk_load(s.records[slot], p.call.records + (int64_t)tile * TILE, sizeof s.records[0], &s.full[slot]);
}

template <bool POST>
static __device__ __forceinline__ void produce(const mhc_mapped_call &p, shared_memory<POST> &s, int tiles)
{
    const int first = (int)blockIdx.y, step = (int)gridDim.y;
    if (threadIdx.x % 32 == 0) {
        cot_wait_for_kernels_before(); /* those of the records; what is done before needs the inputs alone */
        for (int slot = 0; slot < s.STAGES && first + slot * step < tiles; slot++)
            load_tile(p, s, slot, first + slot * step);
        FOR_EACH_TILE(tile, ring, tiles)
        {
            cot_mbarrier_wait(&s.done[ring.slot], ring.parity);
            if (given(p.call.dx)) {
                cot_tensor_store_4d(&p.dx, 0, tile * TILE, (int)blockIdx.x * MHC_SM90_CHUNKS, 0, s.stages[ring.slot]);
                cot_bulk_commit();
                cot_bulk_wait_read();
            }
            if (tile + s.STAGES * step < tiles)
                load_tile(p, s, ring.slot, tile + s.STAGES * step);
        }
        cot_bulk_wait();
    }
    __syncwarp();
}

/* dx_post, a stream at a time as soon as that of the tile before is read. */
static __device__ __forceinline__ void produce_dx_post(const mhc_mapped_call &p, shared_memory<true> &s, int tiles)
{
    if (threadIdx.x % 32 == 0) {
        uint32_t parity = 1;
        FOR_EACH_TILE(tile, ring, tiles)
        {
            for (int i = 0; i < N; i++) {
                cot_mbarrier_wait(&s.post_empty[i], parity);
                cot_mbarrier_arrive_expect(&s.post_full[i], STREAM_BYTES);
                cot_tensor_load_4d(s.dx_post[i], &p.dx_post, 0, tile * TILE, (int)blockIdx.x * MHC_SM90_CHUNKS, i,
                                   &s.post_full[i]);
            }
            parity ^= 1;
        }
    }
    __syncwarp();
}

template <typename E, bool POST> static __device__ __forceinline__ void backward(const mhc_mapped_call &p)
{
    shared_memory<POST> &s = *(shared_memory<POST> *)memory;
    const mhc_call &c = p.call;
    const int warp = threadIdx.x / 32, tiles = (int)((c.tokens + TILE - 1) / TILE);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < s.STAGES; slot++) {
            cot_mbarrier_init(&s.full[slot], 1);
            cot_mbarrier_init(&s.done[slot], PRODUCTS);
        }
        for (int i = 0; i < N; i++) {
            cot_mbarrier_init(&s.post_full[i], 1);
            cot_mbarrier_init(&s.post_empty[i], PRODUCTS);
        }
        cot_mbarrier_init_fence();
    }
    __syncthreads();
    if (warp < PRODUCTS) {
        cot_more_registers<216>();
        products<E, POST>(c, s, tiles);
    } else {
        cot_fewer_registers<72>();
        if (warp == PRODUCTS)
            produce(p, s, tiles);
        if constexpr (POST)
            if (warp == PRODUCTS + 1)
                produce_dx_post(p, s, tiles);
    }
}

#define INSTANCE(name, element, post)                                     \
    extern "C" __global__ void __launch_bounds__(MHC_SM90_BWD_THREADS, 1) \
        mhc_pre_bwd_##name(const __grid_constant__ mhc_mapped_call p)     \
    {                                                                     \
        backward<element, post>(p);                                       \
    }
INSTANCE(split_sm90_f16, __half, false)
INSTANCE(split_sm90_bf16, __nv_bfloat16, false)
INSTANCE(split_post_sm90_f16, __half, true)
INSTANCE(split_post_sm90_bf16, __nv_bfloat16, true)
