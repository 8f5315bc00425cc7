/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.c: registers are given rows by their lifetimes, as a compiler would, because a kernel names thousands of them; and
 * blocks their order, by which the splits of a warp meet again. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

typedef struct flow {
    int count, *first, *last, (*next)[2], *depth, *rank, ranked, *visited;
    uint64_t *in, *need, *kill; /* bits of registers: live at the beginning, used before written, written */
    size_t words;
} flow;

static void find_blocks(emu_kernel *k, flow *f)
{
    k->code[0].leader = true;
    for (int n = 0; n < k->count; n++)
        if (k->code[n].target >= 0 || k->code[n].run == emu_exit) {
            if (k->code[n].target >= 0)
                k->code[k->code[n].target].leader = true;
            if (n + 1 < k->count)
                k->code[n + 1].leader = true;
        }
    int *block_of = calloc((size_t)k->count + 1, sizeof *block_of);
    for (int n = 0; n < k->count; n++) {
        f->count += k->code[n].leader;
        block_of[n] = f->count - 1;
    }
    const size_t count = (size_t)f->count;
    f->first = calloc(count, sizeof *f->first), f->last = calloc(count, sizeof *f->last);
    f->next = calloc(count, sizeof *f->next), f->depth = calloc(count, sizeof *f->depth);
    f->rank = calloc(count, sizeof *f->rank), f->visited = calloc(count, sizeof *f->visited);
    for (int n = k->count - 1; n >= 0; n--)
        f->first[block_of[n]] = n;
    for (int n = 0; n < k->count; n++)
        f->last[block_of[n]] = n;
    for (int b = 0; b < f->count; b++) {
        const emu_ins *i = &k->code[f->last[b]];
        const bool goes_on = i->guard >= 0 || (i->target < 0 && i->run != emu_exit);
        f->next[b][0] = goes_on && b + 1 < f->count ? b + 1 : -1;
        f->next[b][1] = i->target >= 0 ? block_of[i->target] : -1;
    }
    free(block_of);
}

/* Marks the blocks from which `tail` is reached without passing `head`: a loop's. */
static void mark_loop(flow *f, const int *from, const int *before, int head, int tail)
{
    int *stack = malloc((size_t)f->count * sizeof *stack), count = 0;
    char *seen = calloc((size_t)f->count, 1);
    seen[head] = 1;
    f->depth[head]++;
    if (!seen[tail])
        stack[count++] = tail, seen[tail] = 1;
    while (count > 0) {
        const int b = stack[--count];
        f->depth[b]++;
        for (int e = from[b]; e < from[b + 1]; e++)
            if (!seen[before[e]])
                stack[count++] = before[e], seen[before[e]] = 1;
    }
    free(stack), free(seen);
}

static void find_loops(flow *f, const int *from, const int *before, int b)
{
    f->visited[b] = 1;
    for (int e = 0; e < 2; e++) {
        const int next = f->next[b][e];
        if (next < 0)
            continue;
        if (f->visited[next] == 1)
            mark_loop(f, from, before, next, b);
        else if (f->visited[next] == 0)
            find_loops(f, from, before, next);
    }
    f->visited[b] = 2;
}

/* Blocks in reverse postorder, what leaves a loop after the loop: so the splits of a warp meet again. */
static void rank(flow *f, int b)
{
    f->visited[b] = 3;
    const int *n = f->next[b];
    const bool swap = n[0] >= 0 && n[1] >= 0 && f->depth[n[1]] < f->depth[n[0]];
    for (int e = 0; e < 2; e++) {
        const int next = n[swap ? 1 - e : e];
        if (next >= 0 && f->visited[next] != 3)
            rank(f, next);
    }
    f->rank[f->ranked++] = b;
}

static void order_blocks(emu_kernel *k, flow *f)
{
    int *from = calloc((size_t)f->count + 2, sizeof *from), *before = calloc(2 * (size_t)f->count, sizeof *before);
    for (int b = 0; b < f->count; b++)
        for (int e = 0; e < 2; e++)
            if (f->next[b][e] >= 0)
                from[f->next[b][e] + 2]++;
    for (int b = 0; b < f->count; b++)
        from[b + 2] += from[b + 1];
    for (int b = 0; b < f->count; b++)
        for (int e = 0; e < 2; e++)
            if (f->next[b][e] >= 0)
                before[from[f->next[b][e] + 1]++] = b;
    find_loops(f, from, before, 0);
    rank(f, 0);
    int order = 0;
    for (int r = f->ranked - 1; r >= 0; r--)
        for (int n = f->first[f->rank[r]]; n <= f->last[f->rank[r]]; n++)
            k->code[n].order = order++;
    free(from), free(before);
}

#define BIT(set, r) ((set)[(r) / 64] >> ((r) % 64) & 1)
#define SET(set, r) ((set)[(r) / 64] |= (uint64_t)1 << ((r) % 64))
#define DROP(set, r) ((set)[(r) / 64] &= ~((uint64_t)1 << ((r) % 64)))

/* The operands of an instruction in the pool, its guard included. */
static void operand_range(const emu_kernel *k, int n, int *begin, int *end)
{
    const emu_ins *i = &k->code[n];
    *begin = (int)(intptr_t)i->o - (i->guard >= 0);
    *end = (int)(intptr_t)i->o + i->count;
}

static void find_live(const emu_kernel *k, const emu_operands *all, flow *f)
{
    f->words = (size_t)all->registers / 64 + 1;
    const size_t bits = f->words * (size_t)f->count;
    f->in = calloc(bits, 8), f->need = calloc(bits, 8), f->kill = calloc(bits, 8);
    for (int b = 0; b < f->count; b++) {
        uint64_t *need = f->need + (size_t)b * f->words, *kill = f->kill + (size_t)b * f->words;
        for (int n = f->first[b]; n <= f->last[b]; n++) {
            int begin, end;
            operand_range(k, n, &begin, &end);
            for (int o = begin; o < end; o++)
                if (all->pool[o] >= 0 && all->roles[o] & USED && !BIT(kill, all->pool[o]))
                    SET(need, all->pool[o]);
            for (int o = begin; o < end; o++)
                if (all->pool[o] >= 0 && all->roles[o] & WRITTEN && k->code[n].guard < 0)
                    SET(kill, all->pool[o]);
                else if (all->pool[o] >= 0 && !BIT(kill, all->pool[o]))
                    SET(need, all->pool[o]); /* where the guard says no, the old value stays */
        }
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (int r = 0; r < f->ranked; r++) {
            const int b = f->rank[r];
            for (size_t v = 0; v < f->words; v++) {
                uint64_t out = 0;
                for (int e = 0; e < 2; e++)
                    if (f->next[b][e] >= 0)
                        out |= f->in[(size_t)f->next[b][e] * f->words + v];
                const size_t at = (size_t)b * f->words + v;
                const uint64_t in = f->need[at] | (out & ~f->kill[at]);
                changed |= in != f->in[at];
                f->in[at] = in;
            }
        }
    }
}

typedef struct span {
    int begin, end, reg;
} span;

static int by_begin(const void *a, const void *b)
{
    return ((const span *)a)->begin - ((const span *)b)->begin;
}

static int by_end(const void *a, const void *b)
{
    return ((const span *)a)->end - ((const span *)b)->end;
}

/* Each register a row from its first to its last place in the text; rows are used again. */
static void give_rows(emu_kernel *k, emu_operands *all, const flow *f)
{
    static const int sizes[] = {LANES, 2 * LANES, 2};
    const int count = all->registers;
    span *spans = malloc((size_t)count * sizeof *spans), *ends = malloc((size_t)count * sizeof *ends);
    for (int r = 0; r < count; r++)
        spans[r] = (span){k->count, -1, r};
#define REACH(r, n)                                    \
    do {                                               \
        span *s_ = &spans[r];                          \
        s_->begin = (n) < s_->begin ? (n) : s_->begin; \
        s_->end = (n) > s_->end ? (n) : s_->end;       \
    } while (0)
    for (int n = 0; n < k->count; n++) {
        int begin, end;
        operand_range(k, n, &begin, &end);
        for (int o = begin; o < end; o++)
            if (all->pool[o] >= 0)
                REACH(all->pool[o], n);
    }
    for (int b = 0; b < f->count; b++)
        for (size_t v = 0; v < f->words; v++)
            for (uint64_t bits = f->in [(size_t)b * f->words + v]; bits != 0; bits &= bits - 1)
                REACH((int)v * 64 + __builtin_ctzll(bits), f->first[b]);
    /* Live at the beginning of what follows a block is live to the block's end. */
    for (int b = 0; b < f->count; b++)
        for (int e = 0; e < 2; e++)
            if (f->next[b][e] >= 0)
                for (size_t v = 0; v < f->words; v++)
                    for (uint64_t bits = f->in [(size_t)f->next[b][e] * f->words + v]; bits != 0; bits &= bits - 1)
                        REACH((int)v * 64 + __builtin_ctzll(bits), f->last[b]);
    for (int s = 0; s < k->special_count; s++)
        spans[k->specials[s].place] = (span){-1, k->count, k->specials[s].place};
    memcpy(ends, spans, (size_t)count * sizeof *ends);
    qsort(spans, (size_t)count, sizeof *spans, by_begin);
    qsort(ends, (size_t)count, sizeof *ends, by_end);
    int *rows = malloc((size_t)count * sizeof *rows), *spare[3], spares[3] = {0}, done = 0;
    for (int c = 0; c < 3; c++)
        spare[c] = malloc((size_t)count * sizeof *spare[c]);
    for (int s = 0; s < count; s++) {
        if (spans[s].end < spans[s].begin)
            continue;
        for (; done < count && ends[done].end < spans[s].begin; done++)
            if (ends[done].end >= ends[done].begin) {
                const int class = all->classes[ends[done].reg];
                spare[class][spares[class]++] = rows[ends[done].reg];
            }
        const int r = spans[s].reg, class = all->classes[r];
        if (spares[class] > 0)
            rows[r] = spare[class][--spares[class]];
        else {
            rows[r] = k->words;
            k->words += sizes[class];
        }
    }
    k->words = (k->words + 63) / 64 * 64;
    for (int o = 0; o < all->count; o++)
        if (all->pool[o] >= 0)
            all->pool[o] = rows[all->pool[o]];
    for (int n = 0; n < k->count; n++)
        if (k->code[n].guard >= 0)
            k->code[n].guard = rows[k->code[n].guard];
    for (int s = 0; s < k->special_count; s++)
        k->specials[s].place = rows[k->specials[s].place];
    for (int c = 0; c < 3; c++)
        free(spare[c]);
    free(rows), free(spans), free(ends);
}

void emu_give_rows(emu_kernel *k, emu_operands *all)
{
    flow f = {0};
    find_blocks(k, &f);
    order_blocks(k, &f);
    find_live(k, all, &f);
    give_rows(k, all, &f);
    free(f.first), free(f.last), free(f.next), free(f.depth), free(f.rank), free(f.visited);
    free(f.in), free(f.need), free(f.kill);
}
