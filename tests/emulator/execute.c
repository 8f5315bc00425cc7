/* SPDX-License-Identifier: Apache-2.0
 *
 * execute.c: warps, blocks and clusters taking turns, and the instructions by which they meet.
 *
 * Blocks begin in the order of their numbers: the next cluster when all that have begun wait, so that blocks may wait for
 * those before them. Warps run until they wait, or look at what others write. With a seed (EMU_SEED), the warps that may
 * run are chosen at random, for short turns, several clusters at once. */
#include "emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum emu_step step;

char emu_message[1024];
long emu_events;
uint64_t emu_seed;
static jmp_buf ended;
static long executed;
static int trace_thread = -1;
static unsigned trace_block[3];
enum { MAX_RESIDENT = 528, IDLE_PASSES = 20000, LONG_TURN = 1 << 20 };

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
    longjmp(ended, 1);
}

step emu_need(emu_warp *w, const emu_ins *i, uint32_t mask, uint32_t needed)
{
    needed &= w->alive;
    if ((needed & ~w->splits[w->current].mask) != 0)
        return PARK;
    if ((needed & ~mask) != 0)
        emu_fault(w, i, needed & ~mask, "the others of the warp are here, this thread's predicate says no");
    return NEXT;
}

/* ---- between lanes ----------------------------------------------------------------------------------------- */

enum { UP, DOWN, BUTTERFLY, INDEX };

/* The lanes named by the mask operand, which every lane that executes this must be among. */
static step members(emu_warp *w, const emu_ins *i, uint32_t m, int operand)
{
    const uint32_t *mask = emu_row(w, i->o[operand]);
    uint32_t needed = 0;
    EACH_LANE(l, m)
    {
        needed |= mask[l];
        if (!(mask[l] >> l & 1))
            emu_fault(w, i, 1u << l, "the mask of lanes, %#x, lacks this one", mask[l]);
    }
    return emu_need(w, i, m, needed);
}

static step run_shuffle(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = members(w, i, m, 5);
    if (s != NEXT)
        return s;
    uint32_t *d = emu_row(w, i->o[0]), *p = emu_row(w, i->o[1]), in[LANES], ok = 0;
    const uint32_t *b = emu_row(w, i->o[3]), *c = emu_row(w, i->o[4]);
    memcpy(in, emu_row(w, i->o[2]), sizeof in);
    EACH_LANE(l, m)
    {
        const int by = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
        const int most = (l & segment) | (clamp & ~segment), least = l & segment;
        int from = i->variant == UP          ? l - by
                   : i->variant == DOWN      ? l + by
                   : i->variant == BUTTERFLY ? l ^ by
                                             : (least | (by & ~segment));
        const bool inside = i->variant == UP ? from >= most : from <= most;
        from = inside ? from : l;
        ok |= (uint32_t)inside << l;
        d[l] = m >> from & 1 ? in[from] : 0xffffffff; /* of a lane that takes no part comes anything: a NaN */
    }
    *p = (*p & ~m) | (ok & m);
    return NEXT;
}

enum { ALL, ANY, UNIFORM, BALLOT };

static step run_vote(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = members(w, i, m, 2);
    if (s != NEXT)
        return s;
    const uint32_t yes = *(uint32_t *)emu_row(w, i->o[1]) & m;
    const bool answer = i->variant == ALL ? yes == m : i->variant == ANY ? yes != 0 : yes == 0 || yes == m;
    uint32_t *d = emu_row(w, i->o[0]);
    if (i->variant != BALLOT)
        *d = (*d & ~m) | (answer ? m : 0);
    for (int l = 0; l < LANES && i->variant == BALLOT; l++)
        d[l] = m >> l & 1 ? yes : d[l];
    return NEXT;
}

static step run_match_any(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = members(w, i, m, 2);
    if (s != NEXT)
        return s;
    uint32_t *d = emu_row(w, i->o[0]), in[LANES];
    memcpy(in, emu_row(w, i->o[1]), sizeof in);
    EACH_LANE(l, m)
    {
        d[l] = 0;
        EACH_LANE(k, m) d[l] |= (uint32_t)(in[k] == in[l]) << k;
    }
    return NEXT;
}

enum { SUM, LEAST, MOST, LEAST_SIGNED, MOST_SIGNED, CONJUNCTION, DISJUNCTION, PARITY };

static step run_redux(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = members(w, i, m, 2);
    if (s != NEXT)
        return s;
    uint32_t *d = emu_row(w, i->o[0]), *x = emu_row(w, i->o[1]), all = x[__builtin_ctz(m)];
    EACH_LANE(l, m & (m - 1)) switch (i->variant)
    {
    case SUM: all += x[l]; break;
    case LEAST: all = x[l] < all ? x[l] : all; break;
    case MOST: all = x[l] > all ? x[l] : all; break;
    case LEAST_SIGNED: all = (int32_t)x[l] < (int32_t)all ? x[l] : all; break;
    case MOST_SIGNED: all = (int32_t)x[l] > (int32_t)all ? x[l] : all; break;
    case CONJUNCTION: all &= x[l]; break;
    case DISJUNCTION: all |= x[l]; break;
    case PARITY: all ^= x[l]; break;
    }
    EACH_LANE(l, m) d[l] = all;
    return NEXT;
}

static step run_elect(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = members(w, i, m, 2);
    if (s != NEXT)
        return s;
    uint32_t *d = emu_row(w, i->o[0]), *p = emu_row(w, i->o[1]);
    EACH_LANE(l, m) d[l] = (uint32_t)__builtin_ctz(m);
    *p = (*p & ~m) | (m & -m);
    return NEXT;
}

static step run_active(emu_warp *w, const emu_ins *i, uint32_t m)
{
    uint32_t *d = emu_row(w, i->o[0]);
    EACH_LANE(l, m) d[l] = m;
    return NEXT;
}

static step run_warp_sync(emu_warp *w, const emu_ins *i, uint32_t m)
{
    return members(w, i, m, 0);
}

/* ---- between warps and blocks ------------------------------------------------------------------------------- */

static int warps_alive(const emu_block *b)
{
    int count = 0;
    for (int n = 0; n < b->warp_count; n++)
        count += b->warps[n].state != EXITED;
    return count;
}

/* Lets everyone at a barrier go on when all have come; those of a barrier without a count are the living. */
static bool release_barrier(emu_block *b, int number)
{
    const int wanted = b->barrier[number].wanted > 0 ? b->barrier[number].wanted : warps_alive(b) * LANES;
    if (b->barrier[number].arrived < wanted)
        return false;
    b->barrier[number].arrived = 0;
    for (int n = 0; n < b->warp_count; n++) {
        emu_warp *w = &b->warps[n];
        if (w->state == AT_BARRIER && w->barrier == number)
            w->state = READY, w->passed = true;
    }
    return true;
}

/* bar.sync a {, b} and bar.arrive a, b; variant: arrive */
static step run_barrier(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = emu_need(w, i, m, ~0u);
    if (s != NEXT)
        return s;
    if (w->passed) {
        w->passed = false;
        return NEXT;
    }
    const int lane = __builtin_ctz(m);
    const uint32_t number = i->count > 0 ? (uint32_t)emu_scalar(w, i->o[0], false, lane) : 0;
    const int wanted = i->count > 1 ? (int)emu_scalar(w, i->o[1], false, lane) : 0;
    if (number >= BARRIERS || wanted % LANES != 0 || wanted > w->block->warp_count * LANES)
        emu_fault(w, i, m, "barrier %u for %d threads of %d", number, wanted, w->block->threads);
    if (w->block->barrier[number].arrived > 0 && w->block->barrier[number].wanted != wanted)
        emu_fault(w, i, m, "barrier %u is for %d threads here, and for %d where others wait", number, wanted,
                  w->block->barrier[number].wanted);
    w->block->barrier[number].wanted = wanted;
    w->block->barrier[number].arrived += LANES;
    emu_events++;
    w->state = i->variant ? READY : AT_BARRIER;
    w->barrier = (int)number;
    if (!release_barrier(w->block, (int)number))
        return i->variant ? NEXT : RETRY;
    w->passed = false;
    return NEXT;
}

static void release_cluster(emu_cluster *c)
{
    int wanted = 0;
    for (int n = 0; n < c->count; n++)
        wanted += warps_alive(c->blocks[n]);
    if (c->arrived < wanted)
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
    const step s = emu_need(w, i, m, ~0u);
    if (s != NEXT)
        return s;
    w->cluster_phase = w->block->cluster->phase;
    w->block->cluster->arrived++;
    emu_events++;
    release_cluster(w->block->cluster);
    return NEXT;
}

static step run_cluster_wait(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = emu_need(w, i, m, ~0u);
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
        {"redux.sync.min.u32", run_redux, "Www", LEAST},
        {"redux.sync.max.u32", run_redux, "Www", MOST},
        {"redux.sync.min.s32", run_redux, "Www", LEAST_SIGNED},
        {"redux.sync.max.s32", run_redux, "Www", MOST_SIGNED},
        {"redux.sync.and.b32", run_redux, "Www", CONJUNCTION},
        {"redux.sync.or.b32", run_redux, "Www", DISJUNCTION},
        {"redux.sync.xor.b32", run_redux, "Www", PARITY},
        {"elect.sync", run_elect, "Dw", 0},
        {"activemask.b32", run_active, "W", 0},
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

/* ---- a warp's turn -------------------------------------------------------------------------------------------- */

static void warp_exits(emu_warp *w)
{
    emu_block *b = w->block;
    w->state = EXITED;
    emu_events++;
    b->ended = warps_alive(b) == 0;
    for (int n = 0; n < BARRIERS; n++)
        if (b->barrier[n].arrived > 0)
            release_barrier(b, n);
    if (b->cluster->arrived > 0)
        release_cluster(b->cluster);
}

/* Splits at the same place become one. The first in order that can go on is the current one; false: none can. */
static bool choose(emu_warp *w)
{
    bool moved = false;
    for (int a = 0; a < w->split_count; a++) {
        for (int b = a + 1; b < w->split_count; b++)
            if (w->splits[a].pc == w->splits[b].pc && w->splits[b].mask != 0) {
                w->splits[a].mask |= w->splits[b].mask;
                w->splits[a].tired &= w->splits[b].tired;
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
    int best = -1, least = -1;
    for (int s = 0; s < w->split_count; s++) {
        emu_split *at = &w->splits[s];
        at->parked &= !moved;
        if (at->parked)
            continue;
        const int order = w->kernel->code[at->pc].order;
        if (!at->tired && (best < 0 || order < w->kernel->code[w->splits[best].pc].order))
            best = s;
        least = s;
    }
    if (best >= 0) {
        w->current = best;
        return true;
    }
    if (least < 0) {
        w->current = 0;
        const emu_ins *i = &w->kernel->code[w->splits[0].pc], *j = &w->kernel->code[w->splits[w->split_count - 1].pc];
        emu_fault(w, i, w->splits[0].mask, "lanes %#x wait here for others, lanes %#x at line %d, %.*s",
                  w->splits[0].mask, w->splits[w->split_count - 1].mask, j->line, statement_length(j), j->text);
    }
    for (int s = 0; s < w->split_count; s++)
        w->splits[s].tired = false;
    return false;
}

static void trace(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const int l = trace_thread % LANES;
    fprintf(stderr, "%6d %c %.*s ;", i->line, m >> l & 1 ? ' ' : '-', statement_length(i), i->text);
    for (int o = 0; o < i->count && o < 12; o++)
        fprintf(stderr, " %x", ((uint32_t *)emu_row(w, i->o[o]))[l]);
    fputc('\n', stderr);
}

static void turn(emu_warp *w, long jumps)
{
    if (!choose(w) && (w->state == EXITED || !choose(w)))
        return;
    const emu_ins *code = w->kernel->code;
    const bool traced = trace_thread / LANES == w->number && trace_thread >= 0 &&
                        memcmp(trace_block, w->block->id, sizeof trace_block) == 0;
    bool fresh = true;
    for (;;) {
        emu_split *s = &w->splits[w->current];
        const emu_ins *i = &code[s->pc];
        if (i->leader && w->split_count > 1 && !fresh) {
            if (!choose(w))
                return;
            fresh = true;
            continue;
        }
        fresh = false;
        uint32_t m = s->mask;
        if (i->guard >= 0)
            m &= i->unless ? ~w->regs[i->guard] : w->regs[i->guard];
        s->pc++;
        executed++;
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
        s->tired = next == RETRY || next == YIELD;
        if (w->state != READY)
            return;
        if (next == JUMP && w->split_count == 1 && s->mask != 0) {
            if (jumps-- <= 0) {
                emu_events++; /* it does not wait: it was stopped */
                return;
            }
            continue;
        }
        if (!choose(w))
            return;
        fresh = true;
        if (jumps-- <= 0) {
            emu_events++;
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
    w->regs = aligned_alloc(256, (size_t)(k->words + 64) * 4);
    w->local = malloc((size_t)k->local_bytes * LANES + 1);
    memset(w->local, 0xff, (size_t)k->local_bytes * LANES);
    w->split_count = 1;
    w->splits[0] = (emu_split){.mask = w->alive};
    for (int s = 0; s < k->special_count; s++) {
        const struct emu_special *at = &k->specials[s];
        for (int l = 0; l < LANES; l++)
            if (at->id == PARAM_ADDRESS)
                ((uint64_t *)(w->regs + at->place))[l] = (uint64_t)(parameters + at->offset);
            else
                w->regs[at->place + l] = special_value(g, w, at->id, l);
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

/* Everyone waits, and nobody can let anybody go on: says where they stand. */
static void deadlock(emu_cluster **clusters, int count)
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
    longjmp(ended, 1);
}

static void pass(emu_cluster *c)
{
    for (int r = 0; r < c->count; r++) {
        emu_block *b = c->blocks[r];
        const int first = emu_seed != 0 ? (int)(emu_random() % (uint32_t)b->warp_count) : 0;
        for (int n = 0; n < b->warp_count; n++) {
            emu_warp *w = &b->warps[(n + first) % b->warp_count];
            if (w->state == READY && (emu_seed == 0 || emu_random() % 4 != 0))
                turn(w, emu_seed != 0 ? 8 + emu_random() % 32 : LONG_TURN);
        }
    }
}

bool emu_launch(const emu_kernel *k, const emu_grid *g, const void *parameters)
{
    static emu_cluster *clusters[MAX_RESIDENT];
    static int count;
    const uint64_t all = (uint64_t)g->blocks[0] * g->blocks[1] * g->blocks[2] / g->cluster;
    uint64_t begun = 0;
    const clock_t start = clock();
    const char *traced = getenv("EMU_TRACE"), *seed = getenv("EMU_SEED");
    trace_thread = -1;
    if (traced != NULL)
        sscanf(traced, "%u,%u,%u,%d", &trace_block[0], &trace_block[1], &trace_block[2], &trace_thread);
    emu_seed = seed != NULL ? strtoull(seed, NULL, 0) : 0;
    uint8_t *block = aligned_alloc(128, (size_t)(k->param_bytes + 127) / 128 * 128 + 128);
    memcpy(block, parameters, (size_t)k->param_bytes);
    emu_add_memory((uint64_t)block, (size_t)k->param_bytes);
    executed = 0, count = 0, emu_message[0] = 0;
    emu_async_begin();
    const bool failed = setjmp(ended) != 0;
    if (!failed)
        for (int idle = 0;;) {
            const int wanted = emu_seed != 0 ? 4 : 1;
            while (count < wanted && begun < all)
                clusters[count++] = begin_cluster(k, g, begun++, block);
            if (count == 0)
                break;
            const long before = emu_events;
            for (int c = 0; c < count; c++) {
                pass(clusters[c]);
                if (cluster_ended(clusters[c])) {
                    emu_async_land();
                    end_cluster(clusters[c]);
                    clusters[c] = clusters[--count];
                    clusters[count] = NULL;
                    c--;
                }
            }
            idle = emu_events != before || emu_async_land() ? 0 : idle + 1;
            if (idle > 3 && begun < all && (uint64_t)count * g->cluster < MAX_RESIDENT / 4)
                clusters[count++] = begin_cluster(k, g, begun++, block), idle = 0;
            if (idle > IDLE_PASSES)
                deadlock(clusters, count);
        }
    for (int c = 0; c < count; c++)
        end_cluster(clusters[c]);
    emu_remove_memory((uint64_t)block);
    free(block);
    if (getenv("EMU_VERBOSE") != NULL)
        fprintf(stderr, "emulator: %s, %ux%ux%u blocks of %u in clusters of %u: %ld instructions of warps in %.3f s\n",
                k->name, g->blocks[0], g->blocks[1], g->blocks[2], g->threads[0], g->cluster, executed,
                (double)(clock() - start) / CLOCKS_PER_SEC);
    return !failed;
}
