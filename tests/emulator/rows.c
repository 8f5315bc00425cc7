/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.c: register allocation and the order of the basic blocks.
 *
 * A PTX kernel names thousands of virtual registers. Registers whose lifetimes do not overlap share a slot of the
 * warp's register file. The order of the blocks decides where the splits of a warp reconverge. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

typedef struct flow {
    int count, *first, *last, (*next)[2], *depth, *postorder, order_count, *visited;
    uint64_t *live_in, *use, *def; /* register sets of a block: live at its begin, read before written, written */
    size_t set_words;
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
    f->postorder = calloc(count, sizeof *f->postorder), f->visited = calloc(count, sizeof *f->visited);
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

/* Increments the loop depth of the blocks of one loop: those that reach `tail` without passing `head`. */
static void mark_loop(flow *f, const int *from, const int *predecessors, int head, int tail)
{
    int *stack = malloc((size_t)f->count * sizeof *stack), count = 0;
    char *reached = calloc((size_t)f->count, 1);
    reached[head] = 1;
    f->depth[head]++;
    if (!reached[tail])
        stack[count++] = tail, reached[tail] = 1;
    while (count > 0) {
        const int b = stack[--count];
        f->depth[b]++;
        for (int e = from[b]; e < from[b + 1]; e++)
            if (!reached[predecessors[e]])
                stack[count++] = predecessors[e], reached[predecessors[e]] = 1;
    }
    free(stack), free(reached);
}

static void find_loops(flow *f, const int *from, const int *predecessors, int b)
{
    f->visited[b] = 1;
    for (int e = 0; e < 2; e++) {
        const int next = f->next[b][e];
        if (next < 0)
            continue;
        if (f->visited[next] == 1)
            mark_loop(f, from, predecessors, next, b);
        else if (f->visited[next] == 0)
            find_loops(f, from, predecessors, next);
    }
    f->visited[b] = 2;
}

/* Visits the blocks in postorder; the reverse is the order of execution. The successor with the smaller loop depth
 * is visited first, so that the exit of a loop comes after the loop and the splits of a warp reconverge there. */
static void visit_postorder(flow *f, int b)
{
    f->visited[b] = 3;
    const int *n = f->next[b];
    const bool swap = n[0] >= 0 && n[1] >= 0 && f->depth[n[1]] < f->depth[n[0]];
    for (int e = 0; e < 2; e++) {
        const int next = n[swap ? 1 - e : e];
        if (next >= 0 && f->visited[next] != 3)
            visit_postorder(f, next);
    }
    f->postorder[f->order_count++] = b;
}

static void order_blocks(emu_kernel *k, flow *f)
{
    int *from = calloc((size_t)f->count + 2, sizeof *from),
        *predecessors = calloc(2 * (size_t)f->count, sizeof *predecessors);
    for (int b = 0; b < f->count; b++)
        for (int e = 0; e < 2; e++)
            if (f->next[b][e] >= 0)
                from[f->next[b][e] + 2]++;
    for (int b = 0; b < f->count; b++)
        from[b + 2] += from[b + 1];
    for (int b = 0; b < f->count; b++)
        for (int e = 0; e < 2; e++)
            if (f->next[b][e] >= 0)
                predecessors[from[f->next[b][e] + 1]++] = b;
    find_loops(f, from, predecessors, 0);
    visit_postorder(f, 0);
    int order = 0;
    for (int r = f->order_count - 1; r >= 0; r--)
        for (int n = f->first[f->postorder[r]]; n <= f->last[f->postorder[r]]; n++)
            k->code[n].order = order++;
    free(from), free(predecessors);
}

#define BIT(set, r) ((set)[(r) / 64] >> ((r) % 64) & 1)
#define SET(set, r) ((set)[(r) / 64] |= (uint64_t)1 << ((r) % 64))
#define DROP(set, r) ((set)[(r) / 64] &= ~((uint64_t)1 << ((r) % 64)))

/* The range of an instruction's operands in the pool, including its guard. */
static void operand_range(const emu_kernel *k, int n, int *begin, int *end)
{
    const emu_ins *i = &k->code[n];
    *begin = (int)(intptr_t)i->o - (i->guard >= 0);
    *end = (int)(intptr_t)i->o + i->count;
}

static void find_liveness(const emu_kernel *k, const emu_operands *all, flow *f)
{
    f->set_words = (size_t)all->registers / 64 + 1;
    const size_t bits = f->set_words * (size_t)f->count;
    f->live_in = calloc(bits, 8), f->use = calloc(bits, 8), f->def = calloc(bits, 8);
    for (int b = 0; b < f->count; b++) {
        uint64_t *use = f->use + (size_t)b * f->set_words, *def = f->def + (size_t)b * f->set_words;
        for (int n = f->first[b]; n <= f->last[b]; n++) {
            int begin, end;
            operand_range(k, n, &begin, &end);
            for (int o = begin; o < end; o++)
                if (all->pool[o] >= 0 && all->roles[o] & USED && !BIT(def, all->pool[o]))
                    SET(use, all->pool[o]);
            for (int o = begin; o < end; o++)
                if (all->pool[o] >= 0 && all->roles[o] & WRITTEN && k->code[n].guard < 0)
                    SET(def, all->pool[o]);
                else if (all->pool[o] >= 0 && !BIT(def, all->pool[o]))
                    SET(use, all->pool[o]); /* lanes whose guard is false keep the old value */
        }
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (int r = 0; r < f->order_count; r++) {
            const int b = f->postorder[r];
            for (size_t v = 0; v < f->set_words; v++) {
                uint64_t out = 0;
                for (int e = 0; e < 2; e++)
                    if (f->next[b][e] >= 0)
                        out |= f->live_in[(size_t)f->next[b][e] * f->set_words + v];
                const size_t at = (size_t)b * f->set_words + v;
                const uint64_t updated = f->use[at] | (out & ~f->def[at]);
                changed |= updated != f->live_in[at];
                f->live_in[at] = updated;
            }
        }
    }
}

typedef struct lifetime {
    int begin, end, reg;
} lifetime;

static int by_begin(const void *a, const void *b)
{
    return ((const lifetime *)a)->begin - ((const lifetime *)b)->begin;
}

static int by_end(const void *a, const void *b)
{
    return ((const lifetime *)a)->end - ((const lifetime *)b)->end;
}

/* Gives each register a slot of the register file. The lifetime of a register is one range of the text. A slot is
 * reused after the lifetime of its register has ended. */
static void assign_slots(emu_kernel *k, emu_operands *all, const flow *f)
{
    static const int sizes[] = {LANES, 2 * LANES, 2};
    const int count = all->registers;
    lifetime *lifetimes = malloc((size_t)count * sizeof *lifetimes), *ends = malloc((size_t)count * sizeof *ends);
    for (int r = 0; r < count; r++)
        lifetimes[r] = (lifetime){k->count, -1, r};
#define EXTEND(r, n)                                   \
    do {                                               \
        lifetime *s_ = &lifetimes[r];                  \
        s_->begin = (n) < s_->begin ? (n) : s_->begin; \
        s_->end = (n) > s_->end ? (n) : s_->end;       \
    } while (0)
    for (int n = 0; n < k->count; n++) {
        int begin, end;
        operand_range(k, n, &begin, &end);
        for (int o = begin; o < end; o++)
            if (all->pool[o] >= 0)
                EXTEND(all->pool[o], n);
    }
    for (int b = 0; b < f->count; b++)
        for (size_t v = 0; v < f->set_words; v++)
            for (uint64_t bits = f->live_in[(size_t)b * f->set_words + v]; bits != 0; bits &= bits - 1)
                EXTEND((int)v * 64 + __builtin_ctzll(bits), f->first[b]);
    /* A register that is live at the begin of a successor is live at the end of the block. */
    for (int b = 0; b < f->count; b++)
        for (int e = 0; e < 2; e++)
            if (f->next[b][e] >= 0)
                for (size_t v = 0; v < f->set_words; v++)
                    for (uint64_t bits = f->live_in[(size_t)f->next[b][e] * f->set_words + v]; bits != 0;
                         bits &= bits - 1)
                        EXTEND((int)v * 64 + __builtin_ctzll(bits), f->last[b]);
    for (int s = 0; s < k->special_count; s++)
        lifetimes[k->specials[s].reg] = (lifetime){-1, k->count, k->specials[s].reg};
    memcpy(ends, lifetimes, (size_t)count * sizeof *ends);
    qsort(lifetimes, (size_t)count, sizeof *lifetimes, by_begin);
    qsort(ends, (size_t)count, sizeof *ends, by_end);
    int *slots = malloc((size_t)count * sizeof *slots), *free_slots[3], free_count[3] = {0}, done = 0;
    for (int c = 0; c < 3; c++)
        free_slots[c] = malloc((size_t)count * sizeof *free_slots[c]);
    for (int s = 0; s < count; s++) {
        if (lifetimes[s].end < lifetimes[s].begin)
            continue;
        for (; done < count && ends[done].end < lifetimes[s].begin; done++)
            if (ends[done].end >= ends[done].begin) {
                const int class = all->classes[ends[done].reg];
                free_slots[class][free_count[class]++] = slots[ends[done].reg];
            }
        const int r = lifetimes[s].reg, class = all->classes[r];
        if (free_count[class] > 0)
            slots[r] = free_slots[class][--free_count[class]];
        else {
            slots[r] = k->register_words;
            k->register_words += sizes[class];
        }
    }
    k->register_words = (k->register_words + 63) / 64 * 64;
    for (int o = 0; o < all->count; o++)
        if (all->pool[o] >= 0)
            all->pool[o] = slots[all->pool[o]];
    for (int n = 0; n < k->count; n++)
        if (k->code[n].guard >= 0)
            k->code[n].guard = slots[k->code[n].guard];
    for (int s = 0; s < k->special_count; s++)
        k->specials[s].reg = slots[k->specials[s].reg];
    for (int c = 0; c < 3; c++)
        free(free_slots[c]);
    free(slots), free(lifetimes), free(ends);
}

void emu_allocate_registers(emu_kernel *k, emu_operands *all)
{
    flow f = {0};
    find_blocks(k, &f);
    order_blocks(k, &f);
    find_liveness(k, all, &f);
    assign_slots(k, all, &f);
    free(f.first), free(f.last), free(f.next), free(f.depth), free(f.postorder), free(f.visited);
    free(f.live_in), free(f.use), free(f.def);
}
