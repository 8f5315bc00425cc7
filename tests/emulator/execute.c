/* SPDX-License-Identifier: Apache-2.0
 *
 * execute.c: the schedule of warps, blocks and clusters, and the instructions that exchange data or synchronise.
 *
 * Clusters start in the order of their numbers. The next cluster starts when all started clusters wait, so that a
 * block may wait for blocks with smaller numbers. A warp runs until it waits or polls memory that others write. With a
 * seed (EMU_SEED), several clusters run at once, and randomly chosen warps run for a small number of jumps. */
#include "emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum emu_step step;

char emu_message[1024];
long emu_progress;
uint64_t emu_seed;
static jmp_buf launch_end;
static long instruction_count;
static int trace_thread = -1;
static unsigned trace_block[3];
enum { MAX_RESIDENT = 528, MAX_IDLE_ROUNDS = 20000, MAX_JUMPS = 1 << 20 };

uint32_t emu_random(void)
{
    static uint64_t state;
    if (state == 0)
        state = emu_seed * 0x9e3779b97f4a7c15u + 1;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 24);
}

static int statement_length(const emu_ins *i)
{
    return (int)strcspn(i->text, ";\n");
}

void emu_fault(emu_warp *w, const emu_ins *i, uint32_t mask, const char *format, ...)
{
    char what[400];
    va_list list;
    va_start(list, format);
    vsnprintf(what, sizeof what, format, list);
    va_end(list);
    snprintf(emu_message, sizeof emu_message, "%s, block (%u, %u, %u), thread %d: %s; line %d of the PTX: %.*s",
             w->kernel->name, w->block->id[0], w->block->id[1], w->block->id[2],
             32 * w->number + (mask != 0 ? __builtin_ctz(mask) : 0), what, i->line, statement_length(i), i->text);
    longjmp(launch_end, 1);
}

step emu_converge(emu_warp *w, const emu_ins *i, uint32_t mask, uint32_t needed)
{
    needed &= w->alive;
    if ((needed & ~w->splits[w->current].mask) != 0)
        return PARK;
    if ((needed & ~mask) != 0)
        emu_fault(w, i, needed & ~mask, "the others of the warp are here, this thread's predicate says no");
    return NEXT;
}

/* ---- exchange between lanes ------------------------------------------------------------------------------------ */

enum { UP, DOWN, BUTTERFLY, INDEX };

/* Waits until the lanes of the member-mask operand have converged. Every lane that executes the instruction must be
 * in its own mask. */
static step converge_members(emu_warp *w, const emu_ins *i, uint32_t m, int operand)
{
    const uint32_t *mask = emu_register(w, i->o[operand]);
    uint32_t needed = 0;
    EACH_LANE(l, m)
    {
        needed |= mask[l];
        if (!(mask[l] >> l & 1))
            emu_fault(w, i, 1u << l, "the mask of lanes, %#x, lacks this one", mask[l]);
    }
    return emu_converge(w, i, m, needed);
}

static step run_shuffle(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = converge_members(w, i, m, 5);
    if (s != NEXT)
        return s;
    uint32_t *d = emu_register(w, i->o[0]), *p = emu_register(w, i->o[1]), in[LANES], ok = 0;
    const uint32_t *b = emu_register(w, i->o[3]), *c = emu_register(w, i->o[4]);
    memcpy(in, emu_register(w, i->o[2]), sizeof in);
    EACH_LANE(l, m)
    {
        const int by = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
        const int upper = (l & segment) | (clamp & ~segment), lower = l & segment;
        int from = i->variant == UP          ? l - by
                   : i->variant == DOWN      ? l + by
                   : i->variant == BUTTERFLY ? l ^ by
                                             : (lower | (by & ~segment));
        const bool inside = i->variant == UP ? from >= upper : from <= upper;
        from = inside ? from : l;
        ok |= (uint32_t)inside << l;
        d[l] = m >> from & 1 ? in[from] : 0xffffffff; /* undefined for an inactive source: a NaN */
    }
    *p = (*p & ~m) | (ok & m);
    return NEXT;
}

enum { ALL, ANY, UNIFORM, BALLOT };

static step run_vote(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = converge_members(w, i, m, 2);
    if (s != NEXT)
        return s;
    const uint32_t yes = *(uint32_t *)emu_register(w, i->o[1]) & m;
    const bool answer = i->variant == ALL ? yes == m : i->variant == ANY ? yes != 0 : yes == 0 || yes == m;
    uint32_t *d = emu_register(w, i->o[0]);
    if (i->variant != BALLOT)
        *d = (*d & ~m) | (answer ? m : 0);
    for (int l = 0; l < LANES && i->variant == BALLOT; l++)
        d[l] = m >> l & 1 ? yes : d[l];
    return NEXT;
}

static step run_match_any(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = converge_members(w, i, m, 2);
    if (s != NEXT)
        return s;
    uint32_t *d = emu_register(w, i->o[0]), in[LANES];
    memcpy(in, emu_register(w, i->o[1]), sizeof in);
    EACH_LANE(l, m)
    {
        d[l] = 0;
        EACH_LANE(k, m) d[l] |= (uint32_t)(in[k] == in[l]) << k;
    }
    return NEXT;
}

enum { SUM, MIN_U32, MAX_U32, MIN_S32, MAX_S32, AND, OR, XOR };

static step run_redux(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = converge_members(w, i, m, 2);
    if (s != NEXT)
        return s;
    uint32_t *d = emu_register(w, i->o[0]), *x = emu_register(w, i->o[1]), all = x[__builtin_ctz(m)];
    EACH_LANE(l, m & (m - 1)) switch (i->variant)
    {
    case SUM: all += x[l]; break;
    case MIN_U32: all = x[l] < all ? x[l] : all; break;
    case MAX_U32: all = x[l] > all ? x[l] : all; break;
    case MIN_S32: all = (int32_t)x[l] < (int32_t)all ? x[l] : all; break;
    case MAX_S32: all = (int32_t)x[l] > (int32_t)all ? x[l] : all; break;
    case AND: all &= x[l]; break;
    case OR: all |= x[l]; break;
    case XOR: all ^= x[l]; break;
    }
    EACH_LANE(l, m) d[l] = all;
    return NEXT;
}

static step run_elect(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = converge_members(w, i, m, 2);
    if (s != NEXT)
        return s;
    uint32_t *d = emu_register(w, i->o[0]), *p = emu_register(w, i->o[1]);
    EACH_LANE(l, m) d[l] = (uint32_t)__builtin_ctz(m);
    *p = (*p & ~m) | (m & -m);
    return NEXT;
}

static step run_activemask(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint32_t *d = emu_register(w, i->o[0]);
    EACH_LANE(l, m) d[l] = m;
    return NEXT;
}

static step run_warp_sync(emu_warp *w, const emu_ins *i, uint32_t m)
{
    return converge_members(w, i, m, 0);
}

/* ---- barriers of blocks and clusters -------------------------------------------------------------------------- */

static int warps_alive(const emu_block *b)
{
    int count = 0;
    for (int n = 0; n < b->warp_count; n++)
        count += b->warps[n].state != EXITED;
    return count;
}

/* Releases the warps at a barrier when all threads have arrived. A barrier without a count expects all warps that
 * have not exited. */
static bool release_barrier(emu_block *b, int number)
{
    const int expected = b->barrier[number].expected > 0 ? b->barrier[number].expected : warps_alive(b) * LANES;
    if (b->barrier[number].arrived < expected)
        return false;
    b->barrier[number].arrived = 0;
    for (int n = 0; n < b->warp_count; n++) {
        emu_warp *w = &b->warps[n];
        if (w->state == AT_BARRIER && w->barrier == number)
            w->state = READY, w->passed = true;
    }
    return true;
}

/* bar.sync a {, b} and bar.arrive a, b. i->variant: arrive */
static step run_barrier(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = emu_converge(w, i, m, ~0u);
    if (s != NEXT)
        return s;
    if (w->passed) {
        w->passed = false;
        return NEXT;
    }
    const int lane = __builtin_ctz(m);
    const uint32_t number = i->count > 0 ? (uint32_t)emu_scalar(w, i->o[0], false, lane) : 0;
    const int expected = i->count > 1 ? (int)emu_scalar(w, i->o[1], false, lane) : 0;
    if (number >= BARRIERS || expected % LANES != 0 || expected > w->block->warp_count * LANES)
        emu_fault(w, i, m, "barrier %u for %d threads of %d", number, expected, w->block->threads);
    if (w->block->barrier[number].arrived > 0 && w->block->barrier[number].expected != expected)
        emu_fault(w, i, m, "barrier %u is for %d threads here, and for %d where others wait", number, expected,
                  w->block->barrier[number].expected);
    w->block->barrier[number].expected = expected;
    w->block->barrier[number].arrived += LANES;
    emu_progress++;
    w->state = i->variant ? READY : AT_BARRIER;
    w->barrier = (int)number;
    if (!release_barrier(w->block, (int)number))
        return i->variant ? NEXT : RETRY;
    w->passed = false;
    return NEXT;
}

static void release_cluster(emu_cluster *c)
{
    int expected = 0;
    for (int n = 0; n < c->count; n++)
        expected += warps_alive(c->blocks[n]);
    if (c->arrived < expected)
        return;
    c->arrived = 0;
    c->phase++;
    for (int n = 0; n < c->count; n++)
        for (int v = 0; v < c->blocks[n]->warp_count; v++)
            if (c->blocks[n]->warps[v].state == AT_CLUSTER)
                c->blocks[n]->warps[v].state = READY;
}

static step run_cluster_arrive(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = emu_converge(w, i, m, ~0u);
    if (s != NEXT)
        return s;
    w->cluster_phase = w->block->cluster->phase;
    w->block->cluster->arrived++;
    emu_progress++;
    release_cluster(w->block->cluster);
    return NEXT;
}

static step run_cluster_wait(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = emu_converge(w, i, m, ~0u);
    if (s != NEXT)
        return s;
    if (w->block->cluster->phase != w->cluster_phase)
        return NEXT;
    w->state = AT_CLUSTER;
    return RETRY;
}

static step run_nothing(emu_warp *w, const emu_ins *i, uint32_t m)
{
    (void)w, (void)i, (void)m;
    return i->variant ? YIELD : NEXT;
}

static step run_trap(emu_warp *w, const emu_ins *i, uint32_t m)
{
    emu_fault(w, i, m, "the kernel gave up");
}

const char *emu_find_control(const char *o, emu_ins *i)
{
    static const struct {
        const char *name;
        emu_handler *run;
        const char *letters;
        uint8_t variant;
    } table[] = {
        {"shfl.sync.up.b32", run_shuffle, "Dwwww", UP},
        {"shfl.sync.down.b32", run_shuffle, "Dwwww", DOWN},
        {"shfl.sync.bfly.b32", run_shuffle, "Dwwww", BUTTERFLY},
        {"shfl.sync.idx.b32", run_shuffle, "Dwwww", INDEX},
        {"vote.sync.all.pred", run_vote, "Ppw", ALL},
        {"vote.sync.any.pred", run_vote, "Ppw", ANY},
        {"vote.sync.uni.pred", run_vote, "Ppw", UNIFORM},
        {"vote.sync.ballot.b32", run_vote, "Wpw", BALLOT},
        {"match.any.sync.b32", run_match_any, "Www", 0},
        {"redux.sync.add.s32", run_redux, "Www", SUM},
        {"redux.sync.add.u32", run_redux, "Www", SUM},
        {"redux.sync.min.u32", run_redux, "Www", MIN_U32},
        {"redux.sync.max.u32", run_redux, "Www", MAX_U32},
        {"redux.sync.min.s32", run_redux, "Www", MIN_S32},
        {"redux.sync.max.s32", run_redux, "Www", MAX_S32},
        {"redux.sync.and.b32", run_redux, "Www", AND},
        {"redux.sync.or.b32", run_redux, "Www", OR},
        {"redux.sync.xor.b32", run_redux, "Www", XOR},
        {"elect.sync", run_elect, "Dw", 0},
        {"activemask.b32", run_activemask, "W", 0},
        {"bar.warp.sync", run_warp_sync, "w", 0},
        {"bar.sync", run_barrier, "?ww", 0},
        {"bar.cta.sync", run_barrier, "?ww", 0},
        {"barrier.sync", run_barrier, "?ww", 0},
        {"barrier.sync.aligned", run_barrier, "?ww", 0},
        {"barrier.cta.sync", run_barrier, "?ww", 0},
        {"barrier.cta.sync.aligned", run_barrier, "?ww", 0},
        {"bar.arrive", run_barrier, "ww", 1},
        {"barrier.arrive", run_barrier, "ww", 1},
        {"barrier.arrive.aligned", run_barrier, "ww", 1},
        {"barrier.cta.arrive", run_barrier, "ww", 1},
        {"barrier.cta.arrive.aligned", run_barrier, "ww", 1},
        {"nanosleep.u32", run_nothing, "w", 1},
        {"griddepcontrol.wait", run_nothing, "", 0},
        {"griddepcontrol.launch_dependents", run_nothing, "", 0},
        {"trap", run_trap, "", 0},
    };
    for (size_t n = 0; n < sizeof table / sizeof *table; n++)
        if (strcmp(o, table[n].name) == 0) {
            i->run = table[n].run, i->variant = table[n].variant;
            return table[n].letters;
        }
    i->run = run_nothing;
    if (strncmp(o, "fence.", 6) == 0 || strncmp(o, "membar.", 7) == 0)
        return "";
    if (strncmp(o, "setmaxnreg.", 11) == 0)
        return "w";
    if (strncmp(o, "prefetch", 8) == 0)
        return "A";
    if (strncmp(o, "barrier.cluster.", 16) == 0) {
        i->run = o[16] == 'a' ? run_cluster_arrive : run_cluster_wait;
        return "";
    }
    i->run = NULL;
    return NULL;
}

/* ---- warps -------------------------------------------------------------------------------------------- */

static void warp_exits(emu_warp *w)
{
    emu_block *b = w->block;
    w->state = EXITED;
    emu_progress++;
    b->ended = warps_alive(b) == 0;
    for (int n = 0; n < BARRIERS; n++)
        if (b->barrier[n].arrived > 0)
            release_barrier(b, n);
    if (b->cluster->arrived > 0)
        release_cluster(b->cluster);
}

/* Merges splits at the same instruction. Selects the runnable split with the lowest order as the current one.
 * Returns false if no split can run now. */
static bool choose_split(emu_warp *w)
{
    bool moved = false;
    for (int a = 0; a < w->split_count; a++) {
        for (int b = a + 1; b < w->split_count; b++)
            if (w->splits[a].pc == w->splits[b].pc && w->splits[b].mask != 0) {
                w->splits[a].mask |= w->splits[b].mask;
                w->splits[a].yielded &= w->splits[b].yielded;
                w->splits[b].mask = 0;
                moved = true;
            }
        if (w->splits[a].mask == 0) {
            w->splits[a--] = w->splits[--w->split_count];
            moved = true;
        }
    }
    if (w->split_count == 0) {
        warp_exits(w);
        return false;
    }
    int best = -1, unparked = -1;
    for (int s = 0; s < w->split_count; s++) {
        emu_split *at = &w->splits[s];
        at->parked &= !moved;
        if (at->parked)
            continue;
        const int order = w->kernel->code[at->pc].order;
        if (!at->yielded && (best < 0 || order < w->kernel->code[w->splits[best].pc].order))
            best = s;
        unparked = s;
    }
    if (best >= 0) {
        w->current = best;
        return true;
    }
    if (unparked < 0) {
        w->current = 0;
        const emu_ins *i = &w->kernel->code[w->splits[0].pc], *j = &w->kernel->code[w->splits[w->split_count - 1].pc];
        emu_fault(w, i, w->splits[0].mask, "lanes %#x wait here for others, lanes %#x at line %d, %.*s",
                  w->splits[0].mask, w->splits[w->split_count - 1].mask, j->line, statement_length(j), j->text);
    }
    for (int s = 0; s < w->split_count; s++)
        w->splits[s].yielded = false;
    return false;
}

static void trace(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const int l = trace_thread % LANES;
    fprintf(stderr, "%6d %c %.*s ;", i->line, m >> l & 1 ? ' ' : '-', statement_length(i), i->text);
    for (int o = 0; o < i->count && o < 12; o++)
        fprintf(stderr, " %x", ((uint32_t *)emu_register(w, i->o[o]))[l]);
    fputc('\n', stderr);
}

static void run_warp(emu_warp *w, long jumps)
{
    if (!choose_split(w) && (w->state == EXITED || !choose_split(w)))
        return;
    const emu_ins *code = w->kernel->code;
    const bool traced = trace_thread / LANES == w->number && trace_thread >= 0 &&
                        memcmp(trace_block, w->block->id, sizeof trace_block) == 0;
    bool just_chosen = true;
    for (;;) {
        emu_split *s = &w->splits[w->current];
        const emu_ins *i = &code[s->pc];
        if (i->leader && w->split_count > 1 && !just_chosen) {
            if (!choose_split(w))
                return;
            just_chosen = true;
            continue;
        }
        just_chosen = false;
        uint32_t m = s->mask;
        if (i->guard >= 0)
            m &= i->negated ? ~w->regs[i->guard] : w->regs[i->guard];
        s->pc++;
        instruction_count++;
        if (m == 0)
            continue;
        const step next = i->run(w, i, m);
        if (traced)
            trace(w, i, m);
        if (next == NEXT)
            continue;
        s = &w->splits[w->current];
        if (next == PARK || next == RETRY)
            s->pc--;
        s->parked = next == PARK;
        s->yielded = next == RETRY || next == YIELD;
        if (w->state != READY)
            return;
        if (next == JUMP && w->split_count == 1 && s->mask != 0) {
            if (jumps-- <= 0) {
                emu_progress++; /* the warp was stopped but does not wait */
                return;
            }
            continue;
        }
        if (!choose_split(w))
            return;
        just_chosen = true;
        if (jumps-- <= 0) {
            emu_progress++;
            return;
        }
    }
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

static uint32_t special_value(const emu_grid *g, const emu_warp *w, int id, int lane)
{
    const uint32_t thread = (uint32_t)(LANES * w->number + lane), x = g->threads[0], y = g->threads[1];
    switch (id) {
    case TID_X: return thread % x;
    case TID_Y: return thread / x % y;
    case TID_Z: return thread / x / y;
    case NTID_X:
    case NTID_Y:
    case NTID_Z: return g->threads[id - NTID_X];
    case CTAID_X:
    case CTAID_Y:
    case CTAID_Z: return w->block->id[id - CTAID_X];
    case NCTAID_X:
    case NCTAID_Y:
    case NCTAID_Z: return g->blocks[id - NCTAID_X];
    case LANEID: return (uint32_t)lane;
    case WARPID: return (uint32_t)w->number;
    case LANEMASK_EQ: return 1u << lane;
    case LANEMASK_LT: return (1u << lane) - 1;
    case LANEMASK_LE: return (2u << lane) - 1;
    case LANEMASK_GT: return ~((2u << lane) - 1);
    case LANEMASK_GE: return ~((1u << lane) - 1);
    case CLUSTER_CTARANK: return w->block->rank;
    case CLUSTER_NCTARANK: return (uint32_t)w->block->cluster->count;
    case DYNAMIC_SMEM: return g->dynamic_shared;
    default: return 0;
    }
}

static void begin_warp(const emu_kernel *k, const emu_grid *g, emu_warp *w, const uint8_t *parameters)
{
    const int threads = w->block->threads - LANES * w->number;
    w->alive = threads >= LANES ? ~0u : (1u << threads) - 1;
    w->kernel = k;
    w->constants = k->constants;
    w->regs = aligned_alloc(256, (size_t)(k->register_words + 64) * 4);
    w->local = malloc((size_t)k->local_bytes * LANES + 1);
    memset(w->local, 0xff, (size_t)k->local_bytes * LANES);
    w->split_count = 1;
    w->splits[0] = (emu_split){.mask = w->alive};
    for (int s = 0; s < k->special_count; s++) {
        const struct emu_special *at = &k->specials[s];
        for (int l = 0; l < LANES; l++)
            if (at->id == PARAM_ADDRESS)
                ((uint64_t *)(w->regs + at->reg))[l] = (uint64_t)(parameters + at->offset);
            else
                w->regs[at->reg + l] = special_value(g, w, at->id, l);
    }
}

static emu_cluster *begin_cluster(const emu_kernel *k, const emu_grid *g, uint64_t number, const uint8_t *parameters)
{
    emu_cluster *c = calloc(1, sizeof *c);
    c->count = (int)g->cluster;
    for (int r = 0; r < c->count; r++) {
        emu_block *b = c->blocks[r] = calloc(1, sizeof *b);
        const uint64_t block = number * g->cluster + (uint64_t)r;
        b->cluster = c;
        b->rank = (uint32_t)r;
        b->id[0] = (uint32_t)(block % g->blocks[0]);
        b->id[1] = (uint32_t)(block / g->blocks[0] % g->blocks[1]);
        b->id[2] = (uint32_t)(block / g->blocks[0] / g->blocks[1]);
        b->shared_bytes = (uint32_t)k->shared_bytes + g->dynamic_shared;
        b->shared = aligned_alloc(1024, (b->shared_bytes + 1023) / 1024 * 1024);
        memset(b->shared, 0xff, b->shared_bytes);
        b->threads = (int)(g->threads[0] * g->threads[1] * g->threads[2]);
        b->warp_count = (b->threads + LANES - 1) / LANES;
        for (int n = 0; n < b->warp_count; n++) {
            b->warps[n].block = b;
            b->warps[n].number = n;
            begin_warp(k, g, &b->warps[n], parameters);
        }
    }
    return c;
}

static void end_cluster(emu_cluster *c)
{
    for (int r = 0; r < c->count; r++) {
        for (int n = 0; n < c->blocks[r]->warp_count; n++)
            free(c->blocks[r]->warps[n].regs), free(c->blocks[r]->warps[n].local);
        free(c->blocks[r]->shared), free(c->blocks[r]);
    }
    free(c);
}

static bool cluster_ended(const emu_cluster *c)
{
    for (int r = 0; r < c->count; r++)
        if (!c->blocks[r]->ended)
            return false;
    return true;
}

/* Ends the launch because every thread waits. Reports where each warp waits. */
static void report_deadlock(emu_cluster **clusters, int count)
{
    int shown = 0;
    size_t at = (size_t)snprintf(emu_message, sizeof emu_message,
                                 "%s: every thread waits:", clusters[0]->blocks[0]->warps[0].kernel->name);
    for (int c = 0; c < count; c++)
        for (int r = 0; r < clusters[c]->count; r++)
            for (int n = 0; n < clusters[c]->blocks[r]->warp_count; n++) {
                const emu_warp *w = &clusters[c]->blocks[r]->warps[n];
                if (w->state == EXITED || shown++ >= 64)
                    continue;
                const emu_ins *i = &w->kernel->code[w->splits[0].pc];
                i -= w->state == READY && i != w->kernel->code;
                fprintf(stderr, "emulator: block (%u, %u, %u) warp %d lanes %08x %s line %d: %.*s\n", w->block->id[0],
                        w->block->id[1], w->block->id[2], n, w->splits[0].mask,
                        w->state == AT_BARRIER   ? "at"
                        : w->state == AT_CLUSTER ? "at cluster's"
                                                 : "polls near",
                        i->line, statement_length(i), i->text);
                if (at < sizeof emu_message)
                    at += (size_t)snprintf(emu_message + at, sizeof emu_message - at, " block %u warp %d at line %d;",
                                           w->block->id[0], n, i->line);
            }
    longjmp(launch_end, 1);
}

static void run_round(emu_cluster *c)
{
    for (int r = 0; r < c->count; r++) {
        emu_block *b = c->blocks[r];
        const int first = emu_seed != 0 ? (int)(emu_random() % (uint32_t)b->warp_count) : 0;
        for (int n = 0; n < b->warp_count; n++) {
            emu_warp *w = &b->warps[(n + first) % b->warp_count];
            if (w->state == READY && (emu_seed == 0 || emu_random() % 4 != 0))
                run_warp(w, emu_seed != 0 ? 8 + emu_random() % 32 : MAX_JUMPS);
        }
    }
}

bool emu_launch(const emu_kernel *k, const emu_grid *g, const void *parameters)
{
    static emu_cluster *clusters[MAX_RESIDENT];
    static int count;
    const uint64_t cluster_count = (uint64_t)g->blocks[0] * g->blocks[1] * g->blocks[2] / g->cluster;
    uint64_t started = 0;
    const clock_t start = clock();
    const char *traced = getenv("EMU_TRACE"), *seed = getenv("EMU_SEED");
    trace_thread = -1;
    if (traced != NULL)
        sscanf(traced, "%u,%u,%u,%d", &trace_block[0], &trace_block[1], &trace_block[2], &trace_thread);
    emu_seed = seed != NULL ? strtoull(seed, NULL, 0) : 0;
    uint8_t *parameter_block = aligned_alloc(128, (size_t)(k->param_bytes + 127) / 128 * 128 + 128);
    memcpy(parameter_block, parameters, (size_t)k->param_bytes);
    emu_add_memory((uint64_t)parameter_block, (size_t)k->param_bytes);
    instruction_count = 0, count = 0, emu_message[0] = 0;
    emu_async_reset();
    const bool failed = setjmp(launch_end) != 0;
    if (!failed)
        for (int idle = 0;;) {
            const int resident = emu_seed != 0 ? 4 : 1;
            while (count < resident && started < cluster_count)
                clusters[count++] = begin_cluster(k, g, started++, parameter_block);
            if (count == 0)
                break;
            const long before = emu_progress;
            for (int c = 0; c < count; c++) {
                run_round(clusters[c]);
                if (cluster_ended(clusters[c])) {
                    emu_async_complete();
                    end_cluster(clusters[c]);
                    clusters[c] = clusters[--count];
                    clusters[count] = NULL;
                    c--;
                }
            }
            idle = emu_progress != before || emu_async_complete() ? 0 : idle + 1;
            if (idle > 3 && started < cluster_count && (uint64_t)count * g->cluster < MAX_RESIDENT / 4)
                clusters[count++] = begin_cluster(k, g, started++, parameter_block), idle = 0;
            if (idle > MAX_IDLE_ROUNDS)
                report_deadlock(clusters, count);
        }
    for (int c = 0; c < count; c++)
        end_cluster(clusters[c]);
    emu_remove_memory((uint64_t)parameter_block);
    free(parameter_block);
    if (getenv("EMU_VERBOSE") != NULL)
        fprintf(stderr, "emulator: %s, %ux%ux%u blocks of %u in clusters of %u: %ld instructions of warps in %.3f s\n",
                k->name, g->blocks[0], g->blocks[1], g->blocks[2], g->threads[0], g->cluster, instruction_count,
                (double)(clock() - start) / CLOCKS_PER_SEC);
    return !failed;
}
