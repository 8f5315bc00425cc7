/* SPDX-License-Identifier: Apache-2.0
 *
 * async.c: mbarriers and asynchronous copies: cp.async, bulk copies and tensor maps.
 *
 * Without a seed, a copy completes when it is issued. With a seed, a copy completes as late as its waiter allows, so
 * that a missing wait becomes visible. */
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum emu_step step;

/* ---- barriers ------------------------------------------------------------------------------------------------ */

/* The eight bytes of an mbarrier in shared memory. The initial contents of shared memory are no valid mbarrier. */
typedef struct mbarrier {
    uint64_t expected : 20, pending : 20;
    int64_t bytes : 21; /* expected and not yet complete */
    uint64_t phase : 1, valid : 2;
} mbarrier;
enum { VALID = 2, MAX_COUNT = (1 << 20) - 1 };

static mbarrier *barrier_at(emu_warp *w, const emu_ins *i, int lane, uint64_t address)
{
    mbarrier *b = (mbarrier *)emu_shared(w, i, 1u << lane, address, 8, 8);
    if (b->valid != VALID)
        emu_fault(w, i, 1u << lane, "no barrier was initialised at %#llx of shared memory",
                  (unsigned long long)address);
    return b;
}

/* Subtracts `arrivals` from the pending count and adds `bytes` to the pending bytes. The phase ends when both are
 * zero. */
static void update_barrier(emu_warp *w, const emu_ins *i, int lane, mbarrier *b, int64_t arrivals, int64_t bytes)
{
    const int64_t left = (int64_t)b->bytes + bytes;
    if (arrivals > (int64_t)b->pending)
        emu_fault(w, i, 1u << lane, "more arrivals than the %d the barrier was initialised for", (int)b->expected);
    if (left > MAX_COUNT || left < -MAX_COUNT)
        emu_fault(w, i, 1u << lane, "the barrier is to expect %lld bytes", (long long)left);
    b->pending -= (uint64_t)arrivals & MAX_COUNT;
    b->bytes = left;
    if (b->pending == 0 && b->bytes == 0) {
        b->pending = b->expected;
        b->phase ^= 1;
    }
    emu_progress++;
}

static step run_init(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint64_t at[LANES];
    emu_addresses(w, i, m, 0, 0, at);
    EACH_LANE(l, m)
    {
        const uint64_t arrivals = emu_scalar(w, i->o[1], false, l);
        if (arrivals < 1 || arrivals > MAX_COUNT)
            emu_fault(w, i, 1u << l, "a barrier for %llu arrivals", (unsigned long long)arrivals);
        mbarrier *b = (mbarrier *)emu_shared(w, i, 1u << l, at[l], 8, 8);
        *b = (mbarrier){.expected = arrivals & MAX_COUNT, .pending = arrivals & MAX_COUNT, .valid = VALID};
    }
    emu_progress++;
    return NEXT;
}

static step run_invalidate(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint64_t at[LANES];
    emu_addresses(w, i, m, 0, 0, at);
    EACH_LANE(l, m) barrier_at(w, i, l, at[l])->valid = 0;
    return NEXT;
}

enum { ARRIVE, ARRIVE_EXPECT, EXPECT, COMPLETE };

/* arrive state, [a] {, count or bytes};  expect_tx and complete_tx [a], bytes */
static step run_arrive(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const int address = i->variant >= EXPECT ? 0 : 1;
    uint64_t at[LANES];
    emu_addresses(w, i, m, address, 0, at);
    EACH_LANE(l, m)
    {
        mbarrier *b = barrier_at(w, i, l, at[l]);
        const int64_t number = i->count > address + 1 ? (int64_t)emu_scalar(w, i->o[address + 1], false, l) : 1;
        if (address == 1 && i->wide_data) /* the state token is the parity of the current phase */
            ((uint64_t *)emu_register(w, i->o[0]))[l] = b->phase;
        if (i->variant == ARRIVE)
            update_barrier(w, i, l, b, number, 0);
        else {
            if (i->variant != COMPLETE) /* bytes first: the phase must not end before them */
                b->bytes = b->bytes + number;
            update_barrier(w, i, l, b, i->variant == ARRIVE_EXPECT, i->variant == COMPLETE ? -number : 0);
        }
    }
    return NEXT;
}

/* ---- copies --------------------------------------------------------------------------------------------------- */

enum { COPY, ADD_F32, ADD_F16, ADD_BF16, TENSOR_LOAD, TENSOR_STORE, TENSOR_ADD, ARRIVAL };
enum { CP_ASYNC, BULK, MBARRIER };

typedef struct copy {
    emu_warp *w;
    const emu_ins *i;
    int lane, kind, mechanism;
    uint32_t group; /* the thread's commit group; unused for MBARRIER */
    uint8_t *to, *from;
    uint32_t bytes, zero_bytes;
    mbarrier *barrier;
    const emu_map *map;
    int32_t at[5];
} copy;

static copy *copies;
static int copy_count, copy_capacity;

static void add_elements(const copy *c, int kind, uint8_t *to, const uint8_t *from, uint32_t bytes)
{
    (void)c;
    for (uint32_t n = 0; kind == ADD_F32 && n < bytes / 4; n++)
        ((float *)to)[n] += ((const float *)from)[n];
    for (uint32_t n = 0; kind != ADD_F32 && n < bytes / 2; n++) {
        uint16_t *a = (uint16_t *)to + n;
        const uint32_t b = ((const uint16_t *)from)[n];
        *a = (uint16_t)(kind == ADD_F16 ? emu_f16(emu_from_f16(*a) + emu_from_f16(b))
                                        : emu_bf16(emu_from_bf16(*a) + emu_from_bf16(b)));
    }
}

static uint64_t swizzled(uint64_t at, uint32_t swizzle)
{
    return swizzle == 0 ? at : at ^ (at >> 7 & (swizzle / 16 - 1)) << 4;
}

/* Copies a box in units of 16 bytes. The box is dense in shared memory, apart from the swizzle. A load fills
 * elements outside of the tensor with zeros. */
static void move_box(const copy *c)
{
    const emu_map *map = c->map;
    const bool load = c->kind == TENSOR_LOAD;
    uint8_t *shared = load ? c->to : c->from;
    uint32_t rows = 1;
    for (uint32_t a = 1; a < map->rank; a++)
        rows *= map->box[a];
    const uint32_t row_bytes = map->box[0] * map->element;
    for (uint32_t r = 0; r < rows; r++) {
        int64_t offset = (int64_t)c->at[0] * map->element;
        bool inside = true;
        for (uint32_t a = 1, left = r; a < map->rank; left /= map->box[a], a++) {
            const int64_t x = (int64_t)c->at[a] + left % map->box[a];
            inside &= x >= 0 && x < (int64_t)map->size[a];
            offset += x * (int64_t)map->stride[a];
        }
        const int64_t first = c->at[0] < 0 ? -(int64_t)c->at[0] : 0, rest = (int64_t)map->size[0] - c->at[0];
        const int64_t begin = inside ? first * map->element : 0;
        const int64_t end = inside ? (rest < map->box[0] ? rest : map->box[0]) * map->element : 0;
        if (begin < end)
            emu_global(c->w, c->i, 1u << c->lane, map->base + (uint64_t)(offset + begin),
                       map->base + (uint64_t)(offset + end), "a row of a tensor map's box");
        for (int64_t unit = 0; unit < row_bytes; unit += 16) {
            uint8_t *smem = (uint8_t *)swizzled((uint64_t)(shared + (uint64_t)r * row_bytes + unit), map->swizzle);
            uint8_t *gmem = (uint8_t *)(map->base + (uint64_t)(offset + unit));
            const int64_t bytes = row_bytes - unit < 16 ? row_bytes - unit : 16;
            const int64_t from = begin > unit ? begin - unit : 0, to = (end < unit + bytes ? end - unit : bytes);
            if (load && (from > 0 || to < bytes))
                memset(smem, 0, (size_t)bytes);
            if (from >= to)
                continue;
            if (load)
                memcpy(smem + from, gmem + from, (size_t)(to - from));
            else if (c->kind == TENSOR_STORE)
                memcpy(gmem + from, smem + from, (size_t)(to - from));
            else
                add_elements(c, map->element == 4 ? ADD_F32 : ADD_BF16, gmem + from, smem + from,
                             (uint32_t)(to - from));
        }
    }
}

static void complete_copy(const copy *c)
{
    switch (c->kind) {
    case ARRIVAL: update_barrier(c->w, c->i, c->lane, c->barrier, 1, 0); return;
    case COPY:
        memcpy(c->to, c->from, c->bytes);
        memset(c->to + c->bytes, 0, c->zero_bytes);
        break;
    case TENSOR_LOAD:
    case TENSOR_STORE:
    case TENSOR_ADD: move_box(c); break;
    default: add_elements(c, c->kind, c->to, c->from, c->bytes);
    }
    emu_progress++;
    if (c->barrier != NULL)
        update_barrier(c->w, c->i, c->lane, c->barrier, 0, -(int64_t)c->bytes);
}

static void issue(copy c)
{
    if (c.mechanism != MBARRIER)
        c.group = c.w->groups[c.mechanism][c.lane];
    if (emu_seed == 0) {
        complete_copy(&c);
        return;
    }
    if (copy_count == copy_capacity) {
        copy_capacity = 2 * copy_capacity + 64;
        copies = realloc(copies, (size_t)copy_capacity * sizeof *copies);
    }
    copies[copy_count++] = c;
    emu_progress++;
}

static void complete_number(int n)
{
    const copy c = copies[n];
    memmove(copies + n, copies + n + 1, (size_t)(--copy_count - n) * sizeof *copies);
    complete_copy(&c);
}

/* Completes one pending copy of the barrier that a thread polls, if there is one. An ARRIVAL first completes the
 * thread's earlier cp.async copies. */
static void complete_one_for(const mbarrier *b)
{
    for (int n = 0; n < copy_count; n++)
        if (copies[n].barrier == b) {
            if (copies[n].kind == ARRIVAL)
                for (int k = 0; k < n; k++)
                    if (copies[k].mechanism == CP_ASYNC && copies[k].w == copies[n].w &&
                        copies[k].lane == copies[n].lane)
                        complete_number(k--), n--;
            complete_number(n);
            return;
        }
}

/* Completes the thread's commit groups in order, except the last `allowed`. */
static void complete_groups(emu_warp *w, int lane, int mechanism, uint32_t allowed, bool all)
{
    const uint32_t end = w->groups[mechanism][lane] - allowed;
    for (int n = 0; n < copy_count; n++)
        if (copies[n].w == w && copies[n].lane == lane && copies[n].mechanism == mechanism &&
            copies[n].kind != ARRIVAL && (all || (int32_t)(copies[n].group - end) < 0))
            complete_number(n--);
}

bool emu_async_complete(void)
{
    const bool any_pending = copy_count > 0;
    while (copy_count > 0)
        complete_number(0);
    return any_pending;
}

void emu_async_reset(void)
{
    copy_count = 0;
}

/* try_wait p, [a], parity or state: p says whether the phase of that parity has ended. */
static step run_wait(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint64_t at[LANES];
    uint32_t done = 0, *p = emu_register(w, i->o[0]);
    emu_addresses(w, i, m, 1, 0, at);
    EACH_LANE(l, m)
    {
        const mbarrier *b = barrier_at(w, i, l, at[l]);
        const uint64_t parity = emu_scalar(w, i->o[2], i->variant, l) & 1;
        if (b->phase == parity && copy_count > 0)
            complete_one_for(b);
        done |= (uint32_t)(b->phase != parity) << l;
    }
    *p = (*p & ~m) | done;
    return done == m ? NEXT : YIELD;
}

static step run_commit(emu_warp *w, const emu_ins *i, uint32_t m)
{
    EACH_LANE(l, m) w->groups[i->variant][l]++;
    return NEXT;
}

/* wait_group n, or wait_all */
static step run_wait_group(emu_warp *w, const emu_ins *i, uint32_t m)
{
    if (copy_count > 0)
        EACH_LANE(l, m)
    complete_groups(w, l, i->variant, i->count > 0 ? (uint32_t)emu_scalar(w, i->o[0], false, l) : 0, i->count == 0);
    return NEXT;
}

/* cp.async [to], [from], size {, bytes to read} */
static step run_cp_async(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint64_t to[LANES], from[LANES];
    emu_addresses(w, i, m, 0, 0, to);
    emu_addresses(w, i, m, 1, 1, from);
    EACH_LANE(l, m)
    {
        const uint32_t size = (uint32_t)emu_scalar(w, i->o[2], false, l);
        const uint32_t bytes = i->count > 3 ? (uint32_t)emu_scalar(w, i->o[3], false, l) : size;
        if (bytes > size || from[l] % size != 0)
            emu_fault(w, i, 1u << l, "%u of %u bytes from %#llx", bytes, size, (unsigned long long)from[l]);
        copy c = {
            .w = w, .i = i, .lane = l, .kind = COPY, .mechanism = CP_ASYNC, .bytes = bytes, .zero_bytes = size - bytes};
        c.to = emu_shared(w, i, 1u << l, to[l] & 0xffffffff, size, size);
        c.from = bytes > 0 ? emu_global(w, i, 1u << l, from[l], from[l] + bytes, "cp.async") : c.to;
        issue(c);
    }
    return NEXT;
}

static step run_cp_arrive(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint64_t at[LANES];
    emu_addresses(w, i, m, 0, 0, at);
    EACH_LANE(l, m)
    {
        mbarrier *b = barrier_at(w, i, l, at[l]);
        if (!i->variant)
            b->pending++;
        issue((copy){.w = w, .i = i, .lane = l, .kind = ARRIVAL, .mechanism = CP_ASYNC, .barrier = b});
    }
    return NEXT;
}

/* Maps the shared address `at` of this block to the same offset in block `rank` of the cluster. */
static uint64_t in_block(uint64_t at, int rank)
{
    return (at & 0xffffff) | (uint64_t)(rank + 1) << 24;
}

/* Issues one copy per block of the mask `blocks`, or one copy to the addressed block if the mask is 0. */
static void issue_to(copy c, uint64_t to, uint64_t barrier, uint32_t bytes, uint32_t blocks, unsigned align)
{
    emu_warp *w = c.w;
    for (int rank = -1; rank < w->block->cluster->count; rank++) {
        if (rank < 0 ? blocks != 0 : !(blocks >> rank & 1))
            continue;
        c.to = emu_shared(w, c.i, 1u << c.lane, rank < 0 ? to : in_block(to, rank), bytes, align);
        c.barrier = barrier_at(w, c.i, c.lane, rank < 0 ? barrier : in_block(barrier, rank));
        c.bytes = bytes;
        issue(c);
    }
}

enum { TO_SHARED, SHARED_TO_SHARED, TO_GLOBAL };

/* cp.async.bulk [to], [from], bytes {, [barrier]} {, blocks}. i->vector: kind of the copy. i->size: multicast */
static step run_bulk(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint64_t to[LANES], from[LANES], barrier[LANES];
    emu_addresses(w, i, m, 0, 0, to);
    emu_addresses(w, i, m, 1, 1, from);
    if (i->variant != TO_GLOBAL)
        emu_addresses(w, i, m, 3, 2, barrier);
    EACH_LANE(l, m)
    {
        const uint32_t bytes = (uint32_t)emu_scalar(w, i->o[2], false, l);
        if (bytes % 16 != 0 || from[l] % 16 != 0 || to[l] % 16 != 0)
            emu_fault(w, i, 1u << l, "%u bytes from %#llx to %#llx, expected multiples of 16", bytes,
                      (unsigned long long)from[l], (unsigned long long)to[l]);
        copy c = {.w = w,
                  .i = i,
                  .lane = l,
                  .kind = i->vector,
                  .mechanism = i->variant == TO_GLOBAL ? BULK : MBARRIER,
                  .bytes = bytes};
        c.from = i->variant == TO_SHARED ? emu_global(w, i, 1u << l, from[l], from[l] + bytes, "a bulk copy")
                                         : emu_shared(w, i, 1u << l, from[l], bytes, 16);
        if (i->variant == TO_GLOBAL) {
            c.to = emu_global(w, i, 1u << l, to[l], to[l] + bytes, "a bulk copy");
            issue(c);
        } else
            issue_to(c, to[l], barrier[l], bytes, i->size ? (uint32_t)emu_scalar(w, i->o[4], false, l) & 0xffff : 0,
                     16);
    }
    return NEXT;
}

/* To shared memory: [to], [map, {x, ...}], [barrier] {, blocks}. To global memory: [map, {x, ...}], [from]. */
static step run_tensor(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const bool load = i->vector == TENSOR_LOAD;
    const int rank = i->variant, map_at = load ? 1 : 0;
    uint64_t map[LANES], shared[LANES], barrier[LANES];
    emu_addresses(w, i, m, map_at, map_at, map);
    emu_addresses(w, i, m, load ? 0 : 1 + rank, load ? 0 : 1, shared);
    if (load)
        emu_addresses(w, i, m, 2 + rank, 2, barrier);
    EACH_LANE(l, m)
    {
        const emu_map *t = (const emu_map *)emu_global(w, i, 1u << l, map[l], map[l] + 128, "a tensor map");
        if (t->magic != MAP_MAGIC || (int)t->rank != rank || map[l] % 64 != 0)
            emu_fault(w, i, 1u << l, "no tensor map of %d axes lies at %#llx", rank, (unsigned long long)map[l]);
        uint32_t bytes = t->element;
        copy c = {.w = w, .i = i, .lane = l, .kind = i->vector, .mechanism = load ? MBARRIER : BULK, .map = t};
        for (int a = 0; a < rank; a++) {
            c.at[a] = (int32_t)emu_scalar(w, i->o[map_at + 1 + a], false, l);
            bytes *= t->box[a];
        }
        if (load)
            issue_to(c, shared[l], barrier[l], bytes,
                     i->size ? (uint32_t)emu_scalar(w, i->o[3 + rank], false, l) & 0xffff : 0, 128);
        else {
            c.from = emu_shared(w, i, 1u << l, shared[l], bytes, 128);
            issue(c);
        }
    }
    return NEXT;
}

/* st.async [to], {words}, [barrier] */
static step run_store_async(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint64_t to[LANES], barrier[LANES];
    const unsigned bytes = (unsigned)i->size * i->vector;
    emu_addresses(w, i, m, 0, 0, to);
    emu_addresses(w, i, m, 1 + i->vector, 1, barrier);
    EACH_LANE(l, m)
    {
        uint8_t *at = emu_shared(w, i, 1u << l, to[l], bytes, bytes);
        for (int v = 0; v < i->vector; v++) {
            const uint64_t value = emu_scalar(w, i->o[1 + v], i->size == 8, l);
            memcpy(at + v * i->size, &value, i->size);
        }
        update_barrier(w, i, l, barrier_at(w, i, l, barrier[l]), 0, -(int64_t)bytes);
    }
    return NEXT;
}

static step run_mapa(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint32_t *d = emu_register(w, i->o[0]), *at = emu_register(w, i->o[1]), *rank = emu_register(w, i->o[2]);
    EACH_LANE(l, m)
    {
        if (rank[l] >= (uint32_t)w->block->cluster->count)
            emu_fault(w, i, 1u << l, "block %u of a cluster of %d", rank[l], w->block->cluster->count);
        d[l] = (uint32_t)in_block(at[l], (int)rank[l]);
    }
    return NEXT;
}

static step run_nothing(emu_warp *w, const emu_ins *i, uint32_t m)
{
    (void)w, (void)i, (void)m;
    return NEXT;
}

/* ---- the opcodes ------------------------------------------------------------------------------------------------- */

static const char *set_handler(emu_ins *i, emu_handler *run, int variant, const char *letters)
{
    i->run = run, i->variant = (uint8_t)variant;
    return letters;
}

static const char *find_barrier(const char *o, emu_ins *i)
{
    const char *op = o + 9;
    if (strncmp(op, "init.", 5) == 0)
        return set_handler(i, run_init, 0, "Aw");
    if (strncmp(op, "inval.", 6) == 0)
        return set_handler(i, run_invalidate, 0, "A");
    if (strncmp(op, "arrive.", 7) == 0 && !emu_has(o, ".noComplete"))
        return set_handler(i, run_arrive, emu_has(o, ".expect_tx") ? ARRIVE_EXPECT : ARRIVE, "XA?w");
    if (strncmp(op, "expect_tx.", 10) == 0)
        return set_handler(i, run_arrive, EXPECT, "Aw");
    if (strncmp(op, "complete_tx.", 12) == 0)
        return set_handler(i, run_arrive, COMPLETE, "Aw");
    if (strncmp(op, "try_wait.", 9) == 0 || strncmp(op, "test_wait.", 10) == 0)
        return emu_has(o, ".parity") ? set_handler(i, run_wait, 0, "PAw?w") : set_handler(i, run_wait, 1, "PAl?w");
    return NULL;
}

static const char *find_bulk(const char *o, emu_ins *i, bool reduce)
{
    const bool multicast = emu_has(o, ".multicast::cluster"), hint = emu_has(o, ".L2::cache_hint");
    const char *tensor = strstr(o, ".tensor.");
    const bool to_global = strstr(o, ".global.shared::cta") != NULL;
    int kind = COPY;
    if (reduce)
        kind = !emu_has(o, ".add")   ? -1
               : emu_has(o, ".f32")  ? ADD_F32
               : emu_has(o, ".bf16") ? ADD_BF16
               : emu_has(o, ".f16")  ? ADD_F16
               : tensor              ? TENSOR_ADD
                                     : -1;
    if (kind < 0)
        return NULL;
    i->size = multicast;
    if (strstr(o, ".prefetch") != NULL)
        return set_handler(i, run_nothing, 0, tensor ? (hint ? "Tl" : "T") : hint ? "Awl" : "Aw");
    if (tensor != NULL) {
        if (strstr(o, ".im2col") || strstr(o, ".tile::"))
            return NULL;
        i->vector = (uint8_t)(to_global ? (reduce ? TENSOR_ADD : TENSOR_STORE) : TENSOR_LOAD);
        return set_handler(i, run_tensor, tensor[8] - '0',
                           to_global   ? (hint ? "TAl" : "TA")
                           : multicast ? (hint ? "ATAwl" : "ATAw")
                           : hint      ? "ATAl"
                                       : "ATA");
    }
    i->vector = (uint8_t)kind;
    if (to_global)
        return set_handler(i, run_bulk, TO_GLOBAL, hint ? "AAwl" : "AAw");
    return set_handler(i, run_bulk, strstr(o, ".shared::cluster.shared::cta") ? SHARED_TO_SHARED : TO_SHARED,
                       multicast ? (hint ? "AAwAwl" : "AAwAw")
                       : hint    ? "AAwAl"
                                 : "AAwA");
}

const char *emu_find_async(const char *o, emu_ins *i)
{
    if (strncmp(o, "mbarrier.", 9) == 0)
        return find_barrier(o, i);
    if (strncmp(o, "mapa.shared::cluster.u32", 24) == 0)
        return set_handler(i, run_mapa, 0, "Www");
    if (strncmp(o, "st.async.", 9) == 0) {
        i->size = emu_has(o, ".b64") ? 8 : 4;
        i->vector = emu_has(o, ".v4") ? 4 : emu_has(o, ".v2") ? 2 : 1;
        return set_handler(i, run_store_async, 0, "AxA");
    }
    if (strncmp(o, "cp.reduce.async.bulk.", 21) == 0)
        return find_bulk(o, i, true);
    if (strncmp(o, "cp.async.", 9) != 0)
        return emu_find_matrix(o, i);
    const bool bulk = strncmp(o + 9, "bulk.", 5) == 0;
    const char *op = o + (bulk ? 14 : 9);
    if (strcmp(op, "commit_group") == 0)
        return set_handler(i, run_commit, bulk ? BULK : CP_ASYNC, "");
    if (strcmp(op, "wait_group") == 0 || strcmp(op, "wait_group.read") == 0)
        return set_handler(i, run_wait_group, bulk ? BULK : CP_ASYNC, "w");
    if (strcmp(op, "wait_all") == 0)
        return set_handler(i, run_wait_group, CP_ASYNC, "");
    if (bulk)
        return find_bulk(o, i, false);
    if (strncmp(op, "mbarrier.arrive.", 16) == 0)
        return set_handler(i, run_cp_arrive, emu_has(o, ".noinc"), "A");
    if (strncmp(op, "ca.shared", 9) == 0 || strncmp(op, "cg.shared", 9) == 0)
        return set_handler(i, run_cp_async, 0, emu_has(o, ".L2::cache_hint") ? NULL : "AAw?w");
    return NULL;
}
