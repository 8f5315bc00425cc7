/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c: the synchronous memory instructions: loads, stores, atomics, ldmatrix and stmatrix.
 *
 * Every access is checked against the device's allocations, or the block's shared memory, and for alignment. A global
 * address is an address of the host. A shared address holds an offset in bits 0 to 23. Bits 24 and above hold 0 for the
 * executing block, or 1 + the rank of a block of the cluster. */
#include "emulator.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum emu_step step;

/* ---- allocations ------------------------------------------------------------------------------------------ */

typedef struct range {
    uint64_t begin, end;
    int device;
} range;

int emu_device;

static range *ranges;
static int range_count, range_capacity, last_range;

void emu_add_memory(uint64_t at, size_t bytes)
{
    if (range_count == range_capacity) {
        range_capacity = 2 * range_capacity + 64;
        ranges = realloc(ranges, (size_t)range_capacity * sizeof *ranges);
    }
    ranges[range_count++] = (range){at, at + bytes, emu_device};
}

bool emu_remove_memory(uint64_t at)
{
    for (int r = 0; r < range_count; r++)
        if (ranges[r].begin == at) {
            ranges[r] = ranges[--range_count];
            last_range = 0;
            return true;
        }
    return false;
}

bool emu_is_memory(uint64_t at, size_t bytes)
{
    for (int r = 0; r < range_count; r++)
        if (at >= ranges[r].begin && at + bytes <= ranges[r].end)
            return true;
    return false;
}

static bool holds(const range *r, uint64_t begin, uint64_t end)
{
    return begin >= r->begin && end <= r->end && r->device == emu_device;
}

uint8_t *emu_global(emu_warp *w, const emu_ins *i, uint32_t mask, uint64_t begin, uint64_t end, const char *what)
{
    if (last_range < range_count && holds(&ranges[last_range], begin, end))
        return (uint8_t *)begin;
    for (int r = 0; r < range_count; r++)
        if (holds(&ranges[r], begin, end)) {
            last_range = r;
            return (uint8_t *)begin;
        }
    int nearest = 0;
    for (int r = 1; r < range_count; r++) {
        const uint64_t a = begin - ranges[r].begin, b = begin - ranges[nearest].begin;
        nearest = (int64_t)a >= 0 && ((int64_t)b < 0 || a < b) ? r : nearest;
    }
    if (range_count == 0 || begin < ranges[nearest].begin)
        emu_fault(w, i, mask, "%s at %#llx, which is no memory of the device", what, (unsigned long long)begin);
    if (ranges[nearest].device != emu_device && end <= ranges[nearest].end)
        emu_fault(w, i, mask, "%s in memory of device %d by a kernel of device %d", what, ranges[nearest].device,
                  emu_device);
    emu_fault(w, i, mask, "%s of %llu bytes at %llu of an allocation of %llu", what, (unsigned long long)(end - begin),
              (unsigned long long)(begin - ranges[nearest].begin),
              (unsigned long long)(ranges[nearest].end - ranges[nearest].begin));
}

uint8_t *emu_shared(emu_warp *w, const emu_ins *i, uint32_t mask, uint64_t at, uint64_t bytes, unsigned align)
{
    const uint32_t rank = (uint32_t)at >> 24;
    const uint64_t offset = at & 0xffffff;
    const emu_block *b = rank == 0                                    ? w->block
                         : rank <= (uint32_t)w->block->cluster->count ? w->block->cluster->blocks[rank - 1]
                                                                      : NULL;
    if (b == NULL || at >> 32 != 0)
        emu_fault(w, i, mask, "%#llx is no address of shared memory", (unsigned long long)at);
    if (b->ended)
        emu_fault(w, i, mask, "the shared memory of block %u of the cluster, which has exited", rank - 1);
    if (offset < SHARED_BEGIN || offset + bytes > b->shared_bytes)
        emu_fault(w, i, mask, "%llu bytes at %llu of shared memory, which has %u to %u", (unsigned long long)bytes,
                  (unsigned long long)offset, SHARED_BEGIN, b->shared_bytes - 1);
    if (offset % align != 0)
        emu_fault(w, i, mask, "address %llu of shared memory is no multiple of %u", (unsigned long long)offset, align);
    return b->shared + offset;
}

/* ---- addresses of the lanes -------------------------------------------------------------------------------- */

void emu_addresses(emu_warp *w, const emu_ins *i, uint32_t m, int operand, int which, uint64_t *at)
{
    const void *row = emu_register(w, i->o[operand]);
    const uint64_t *wide = row;
    const uint32_t *narrow = row;
    EACH_LANE(l, m)
    at[l] = i->wide[which] ? wide[l] + (uint64_t)i->offset[which] : (uint32_t)(narrow[l] + (uint32_t)i->offset[which]);
}

/* Computes the host address of each lane's access and checks the access. */
static void resolve(emu_warp *w, const emu_ins *i, uint32_t m, int operand, unsigned bytes, const char *what,
                    uint8_t **at)
{
    uint64_t address[LANES] = {0}, low = ~0ull, high = 0, bits = 0;
    emu_addresses(w, i, m, operand, 0, address);
    enum emu_space space = i->space;
    if (space == GENERIC) {
        const uint64_t tag = address[__builtin_ctz(m)] >> 56;
        space = tag == SHARED_TAG >> 56 ? SHARED : tag == LOCAL_TAG >> 56 ? LOCAL : GLOBAL;
        EACH_LANE(k, m)
        if (address[k] >> 56 != tag)
            emu_fault(w, i, m, "generic addresses of several spaces, which the emulator does not support");
        for (int l = 0; l < LANES && space != GLOBAL; l++)
            address[l] &= 0xffffffff;
    }
    if (space == SHARED) {
        EACH_LANE(l, m) at[l] = emu_shared(w, i, 1u << l, address[l], bytes, bytes);
        return;
    }
    if (space == LOCAL) {
        EACH_LANE(l, m)
        {
            if (address[l] + bytes > (uint64_t)w->kernel->local_bytes || address[l] % bytes != 0)
                emu_fault(w, i, 1u << l, "%s at %llu of %d bytes of local memory", what, (unsigned long long)address[l],
                          w->kernel->local_bytes);
            at[l] = w->local + (size_t)l * (size_t)w->kernel->local_bytes + address[l];
        }
        return;
    }
    EACH_LANE(l, m)
    {
        low = address[l] < low ? address[l] : low;
        high = address[l] > high ? address[l] : high;
        bits |= address[l];
        at[l] = (uint8_t *)address[l];
    }
    for (int r = last_range, tried = 0; tried <= range_count && bits % bytes == 0; r = tried++)
        if (r < range_count && holds(&ranges[r], low, high + bytes)) {
            last_range = r;
            return;
        }
    EACH_LANE(l, m)
    {
        if (address[l] % bytes != 0)
            emu_fault(w, i, 1u << l, "address %#llx is no multiple of %u", (unsigned long long)address[l], bytes);
        emu_global(w, i, 1u << l, address[l], address[l] + bytes, what);
    }
}

/* ---- loads and stores ---------------------------------------------------------------------------------------- */

#define MOVE(type, register_type, get)                       \
    for (int v = 0; v < i->vector; v++) {                    \
        register_type *d = emu_register(w, i->o[first + v]); \
        EACH_LANE(l, m) get;                                 \
    }
#define LOAD(type, register_type) MOVE(type, register_type, d[l] = (register_type)((const type *)at[l])[v])
#define STORE(type, register_type) MOVE(type, register_type, ((type *)at[l])[v] = (type)d[l])
#define LOAD_INTO(register_type)                 \
    switch (i->is_signed ? -i->size : i->size) { \
    case 1: LOAD(uint8_t, register_type) break;  \
    case -1: LOAD(int8_t, register_type) break;  \
    case 2: LOAD(uint16_t, register_type) break; \
    case -2: LOAD(int16_t, register_type) break; \
    case 4: LOAD(uint32_t, register_type) break; \
    case -4: LOAD(int32_t, register_type) break; \
    default: LOAD(uint64_t, register_type)       \
    }

static step run_load(emu_warp *w, const emu_ins *i, uint32_t m)
{
    enum { first = 0 };
    uint8_t *at[LANES];
    resolve(w, i, m, i->vector, (unsigned)i->size * i->vector, "a load", at);
    if (i->wide_data)
        LOAD_INTO(uint64_t)
    else
        LOAD_INTO(uint32_t)
    return i->poll ? YIELD : NEXT;
}

static step run_store(emu_warp *w, const emu_ins *i, uint32_t m)
{
    enum { first = 1 };
    uint8_t *at[LANES];
    resolve(w, i, m, 0, (unsigned)i->size * i->vector, "a store", at);
    if (i->wide_data)
        switch (i->size) {
        case 1: STORE(uint8_t, uint64_t) break;
        case 2: STORE(uint16_t, uint64_t) break;
        case 4: STORE(uint32_t, uint64_t) break;
        default: STORE(uint64_t, uint64_t)
        }
    else
        switch (i->size) {
        case 1: STORE(uint8_t, uint32_t) break;
        case 2: STORE(uint16_t, uint32_t) break;
        default: STORE(uint32_t, uint32_t)
        }
    emu_progress++;
    return NEXT;
}

/* ---- atomics ------------------------------------------------------------------------------------------------- */

enum atomic {
    ADD,
    ADD_F32,
    ADD_F64,
    ADD_F16X2,
    ADD_BF16X2,
    MIN_S,
    MAX_S,
    MIN_U,
    MAX_U,
    AND,
    OR,
    XOR,
    EXCHANGE,
    CAS,
    INC
};

static float as_float(uint64_t bits)
{
    const uint32_t word = (uint32_t)bits;
    float x;
    memcpy(&x, &word, 4);
    return x;
}

static uint64_t combine(enum atomic op, unsigned size, uint64_t old, uint64_t x, uint64_t y)
{
    const int64_t s = size == 4 ? (int32_t)old : (int64_t)old, t = size == 4 ? (int32_t)x : (int64_t)x;
    float sum;
    uint32_t word;
    double a, b;
    switch (op) {
    case ADD: return old + x;
    case ADD_F32:
        sum = as_float(old) + as_float(x);
        memcpy(&word, &sum, 4);
        return word;
    case ADD_F64:
        memcpy(&a, &old, 8), memcpy(&b, &x, 8);
        a += b;
        memcpy(&old, &a, 8);
        return old;
    case ADD_F16X2:
        return emu_f16(emu_from_f16(old & 0xffff) + emu_from_f16(x & 0xffff)) |
               emu_f16(emu_from_f16(old >> 16 & 0xffff) + emu_from_f16(x >> 16 & 0xffff)) << 16;
    case ADD_BF16X2:
        return emu_bf16(emu_from_bf16(old & 0xffff) + emu_from_bf16(x & 0xffff)) |
               emu_bf16(emu_from_bf16(old >> 16 & 0xffff) + emu_from_bf16(x >> 16 & 0xffff)) << 16;
    case MIN_S: return s < t ? old : x;
    case MAX_S: return s > t ? old : x;
    case MIN_U: return old < x ? old : x;
    case MAX_U: return old > x ? old : x;
    case AND: return old & x;
    case OR: return old | x;
    case XOR: return old ^ x;
    case EXCHANGE: return x;
    case CAS: return old == x ? y : old;
    case INC: return old >= x ? 0 : old + 1;
    }
    abort();
}

/* red.v2 or red.v4 [a], {x, ...} of floats */
static step run_vector_red(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint8_t *at[LANES];
    resolve(w, i, m, 0, (unsigned)i->size * i->vector, "an atomic", at);
    for (int v = 0; v < i->vector; v++)
        EACH_LANE(l, m)
        {
            uint32_t *to = (uint32_t *)at[l] + v;
            *to = (uint32_t)combine(ADD_F32, 4, *to, emu_scalar(w, i->o[1 + v], false, l), 0);
        }
    emu_progress++;
    return NEXT;
}

/* atom d, [a], x {, y} or red [a], x */
static step run_atomic(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const int address = i->is_signed ? 0 : 1; /* is_signed: red */
    uint8_t *at[LANES];
    resolve(w, i, m, address, i->size, "an atomic", at);
    const bool wide = i->size == 8;
    EACH_LANE(l, m)
    {
        uint64_t old = 0;
        memcpy(&old, at[l], i->size);
        const uint64_t x = emu_scalar(w, i->o[address + 1], wide, l);
        const uint64_t y = i->variant == CAS ? emu_scalar(w, i->o[address + 2], wide, l) : 0;
        const uint64_t new = combine(i->variant, i->size, old, x, y);
        memcpy(at[l], &new, i->size);
        if (address == 0)
            continue;
        if (wide)
            ((uint64_t *)emu_register(w, i->o[0]))[l] = old;
        else
            ((uint32_t *)emu_register(w, i->o[0]))[l] = (uint32_t)old;
    }
    emu_progress++;
    return address == 1 ? YIELD : NEXT; /* the loop may spin on a lock that another warp holds */
}

/* ---- matrices of 8 x 8 16-bit elements ---------------------------------------------------------------------- */

/* Lane l holds elements 2 (l%4) and 2 (l%4) + 1 of row l/4, or of column l/4 if transposed. i->variant: transposed. */
static step run_matrix(emu_warp *w, const emu_ins *i, uint32_t m, bool store)
{
    const step s = emu_converge(w, i, m, ~0u);
    if (s != NEXT)
        return s;
    uint64_t address[LANES];
    uint8_t *row[LANES];
    emu_addresses(w, i, m, store ? 0 : i->vector, 0, address);
    for (int l = 0; l < 8 * i->vector; l++)
        row[l] = emu_shared(w, i, 1u << l, address[l] & 0xffffffff, 16, 16);
    for (int v = 0; v < i->vector; v++) {
        uint32_t *r = emu_register(w, i->o[store ? 1 + v : v]);
        for (int l = 0; l < LANES; l++)
            for (int h = 0; h < 2; h++) {
                const int across = 2 * (l % 4) + h, down = l / 4;
                uint16_t *element =
                    (uint16_t *)row[8 * v + (i->variant ? across : down)] + (i->variant ? down : across);
                if (store)
                    *element = (uint16_t)(r[l] >> 16 * h);
                else
                    r[l] = h == 0 ? *element : r[l] | (uint32_t)*element << 16;
            }
    }
    emu_progress += store;
    return NEXT;
}

static step run_ldmatrix(emu_warp *w, const emu_ins *i, uint32_t m)
{
    return run_matrix(w, i, m, false);
}

static step run_stmatrix(emu_warp *w, const emu_ins *i, uint32_t m)
{
    return run_matrix(w, i, m, true);
}

/* ---- the opcodes ----------------------------------------------------------------------------------------------- */

static enum emu_space space_of(const char *o)
{
    return strstr(o, ".global")   ? GLOBAL
           : strstr(o, ".shared") ? SHARED
           : strstr(o, ".local")  ? LOCAL
           : strstr(o, ".param")  ? PARAM
                                  : GENERIC;
}

static bool set_type(const char *opcode, emu_ins *i)
{
    const char *type = strrchr(opcode, '.') + 1;
    const int bits = atoi(type + strspn(type, "usbf"));
    i->is_signed = *type == 's';
    i->size = (uint8_t)(bits / 8);
    i->wide_data = i->size == 8;
    i->space = (uint8_t)space_of(opcode);
    i->vector = emu_has(opcode, ".v4") ? 4 : emu_has(opcode, ".v2") ? 2 : 1;
    return bits >= 8 && bits <= 64 && i->size * i->vector <= 16;
}

static const char *find_atomic(const char *o, emu_ins *i)
{
    static const struct {
        const char *name, *types;
        enum atomic op;
    } ops[] = {{".add", "f32", ADD_F32},       {".add", "f64", ADD_F64},         {".add", "bf16x2", ADD_BF16X2},
               {".add", "f16x2", ADD_F16X2},   {".add", "u32 s32 u64 s64", ADD}, {".min", "s32 s64", MIN_S},
               {".max", "s32 s64", MAX_S},     {".min", "u32 u64", MIN_U},       {".max", "u32 u64", MAX_U},
               {".and", "b32 b64", AND},       {".or", "b32 b64", OR},           {".xor", "b32 b64", XOR},
               {".exch", "b32 b64", EXCHANGE}, {".cas", "b32 b64", CAS},         {".inc", "u32", INC}};
    const char *type = strrchr(o, '.') + 1;
    const bool red = strncmp(o, "red.", 4) == 0;
    if (red && emu_has(o, ".add") && strcmp(type, "f32") == 0 && (emu_has(o, ".v2") || emu_has(o, ".v4"))) {
        i->run = run_vector_red;
        i->size = 4;
        i->vector = emu_has(o, ".v4") ? 4 : 2;
        i->space = (uint8_t)space_of(o);
        return "Ax";
    }
    for (size_t n = 0; n < sizeof ops / sizeof *ops; n++)
        if (emu_has(o, ops[n].name) && strstr(ops[n].types, type) != NULL && !emu_has(o, ".v2") && !emu_has(o, ".v4")) {
            i->run = run_atomic;
            i->variant = (uint8_t)ops[n].op;
            i->size = strstr(type, "64") ? 8 : 4;
            i->space = (uint8_t)space_of(o);
            i->is_signed = red;
            return i->size == 8 ? (red                 ? "Al"
                                   : i->variant == CAS ? "LAll"
                                                       : "LAl")
                                : (red                 ? "Aw"
                                   : i->variant == CAS ? "WAww"
                                                       : "WAw");
        }
    return NULL;
}

const char *emu_find_memory(const char *o, emu_ins *i)
{
    const bool matrix = strstr(o, "matrix.sync.aligned.m8n8.x") == o + 2 && emu_has(o, ".b16");
    if (matrix && (strncmp(o, "ld", 2) == 0 || strncmp(o, "st", 2) == 0)) {
        i->run = *o == 'l' ? run_ldmatrix : run_stmatrix;
        i->vector = emu_has(o, ".x4") ? 4 : emu_has(o, ".x2") ? 2 : 1;
        i->variant = emu_has(o, ".trans");
        return *o == 'l' ? "WA" : "Aw";
    }
    if (strncmp(o, "ld.", 3) == 0 && set_type(o, i)) {
        i->run = run_load;
        i->poll = emu_has(o, ".volatile") || emu_has(o, ".acquire") || emu_has(o, ".relaxed");
        return "XA";
    }
    if (strncmp(o, "st.", 3) == 0 && strstr(o, "async") == NULL && set_type(o, i)) {
        i->run = run_store;
        return "Ax";
    }
    if (strncmp(o, "atom.", 5) == 0 || strncmp(o, "red.", 4) == 0)
        return find_atomic(o, i);
    return NULL;
}
