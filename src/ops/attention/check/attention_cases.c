/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_cases.c: the shapes, layouts and options that check, bench and the gradient check run.
 *
 * A case is built from its parameters (attention_case_build.h). The families of cases are:
 * - the sizes of the tests of other libraries, and sizes around tile edges
 * - every feature alone and in random combinations, small enough for finite differences
 * - the primitives of blocks
 * - the benchmark's shapes */
#include "attention_case_build.h"
#include "attention_ref.h"

#include "cases/draw.h"

#include <math.h>
#include <stdlib.h>

/* ---- families ----------------------------------------------------------------------------------------- */

static void emit(cot_case_visitor *v, const attention_case_params *p)
{
    cot_case c;
    attention_case_build(p, &c);
    cot_visit_case(v, &c);
}

/* The sizes of the tests of other libraries, and sizes around tile edges of 16, 32, 64 and 128 rows. */
static void sweep_sizes(cot_case_visitor *v, int direction)
{
    static const int64_t lengths[][2] = {
        {1, 1},     {64, 128},  {128, 192}, {256, 256}, {239, 1},   {799, 3},   {113, 203}, {113, 128}, {128, 217},
        {113, 211}, {108, 256}, {256, 512}, {384, 256}, {640, 128}, {512, 256}, {7, 700},   {15, 17},   {16, 16},
        {17, 15},   {31, 33},   {32, 32},   {33, 31},   {63, 65},   {64, 64},   {65, 63},   {127, 129}, {129, 127},
        {128, 128}, {255, 64},  {64, 257},  {5, 0},     {0, 5},     {0, 0},     {97, 300},  {300, 97}};
    static const int64_t columns[][2] = {{64, 64},   {96, 96}, {128, 128}, {192, 128},
                                         {256, 256}, {8, 8},   {40, 72},   {33, 17}};
    uint64_t state = 1 + (uint64_t)direction;
    int64_t number = 0;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        for (int dtype = 0; dtype < 3; dtype++) {
            const bool small = lengths[i][0] * lengths[i][1] < 2500; /* others take seconds on scalar kernels */
            const int repeats = small ? 2 : 1;
            for (int repeat = 0; repeat < repeats; repeat++, number++) {
                attention_case_params p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
                const int64_t *size = columns[(i + (size_t)(3 * repeat + dtype)) % (sizeof columns / sizeof *columns)];
                p.Tq = lengths[i][0], p.Tk = lengths[i][1];
                p.d = size[0], p.d_v = size[1];
                p.B = 1 + small;
                p.H = p.Tq * p.Tk < 20000 ? 6 : 2;
                p.Hkv = p.H / (cot_draw_bool(&state) ? 1 : cot_draw_bool(&state) ? 2 : p.H);
                p.layout = (attention_layout)(number % 7 == 6 ? STRIDED : number % 3);
                p.dtype = attention_float_dtypes[dtype];
                const int mask = (int)((i + (size_t)(dtype + repeat)) % 3);
                p.causal = mask == 1;
                p.window = mask == 2;
                p.left = cot_draw_below(&state, 3) == 0 ? -1 : cot_draw_below(&state, 80);
                p.right = cot_draw_below(&state, 3) == 0 ? -1 : cot_draw_below(&state, 80);
                p.f32_out = number % 11 == 0;
                p.accumulate = direction == COT_ATTENTION_BACKWARD && number % 5 == 0;
                if (number % 9 == 0 && p.Tq * p.Tk < 10000)
                    p.uses |= COT_CASE_QUICK;
                emit(v, &p);
            }
        }
    }
}

/* 1024 and adjacent lengths. They take long, so there are few cases. */
static void sweep_long(cot_case_visitor *v, int direction)
{
    static const int64_t lengths[][2] = {{1024, 1024}, {1023, 1024}, {1024, 1023}, {2049, 700}};
    for (int i = 0; i < 8; i += 3) {
        const attention_case_params p = {.direction = direction,
                                         .uses = COT_CASE_CHECK,
                                         .B = 1,
                                         .H = 1,
                                         .Hkv = 1,
                                         .Tq = lengths[i / 2][0],
                                         .Tk = lengths[i / 2][1],
                                         .d = i < 4 ? 64 : 128,
                                         .d_v = i < 4 ? 64 : 128,
                                         .dtype = attention_float_dtypes[i % 2],
                                         .causal = i % 4 < 2,
                                         .seed = 101 + (uint64_t)i};
        emit(v, &p);
    }
}

/* One NaN in an input, with sequences long enough that most rows share no tile with it. */
static void sweep_nan(cot_case_visitor *v, int direction)
{
    static const int64_t columns[][2] = {{64, 64}, {128, 128}, {256, 256}, {192, 128}, {40, 72}};
    static const char *const fields[] = {"k", "v", "q", "dout"};
    const int field_count = direction == COT_ATTENTION_BACKWARD ? 4 : 2;
    int number = 0;
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        for (int field = 0; field < field_count; field++, number++) {
            attention_case_params p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = 301 + (uint64_t)number};
            p.B = p.H = p.Hkv = 1;
            p.Tq = p.Tk = 900;
            p.d = columns[i][0], p.d_v = columns[i][1];
            p.dtype = attention_float_dtypes[number % 3];
            p.causal = number % 2 == 0;
            p.window = number % 2 != 0;
            p.left = p.right = p.window ? 50 : 0;
            cot_case c;
            attention_case_build(&p, &c);
            c.special = (double)NAN;
            c.special_field = cot_field_index(&cot_attention_directions[direction], fields[field]);
            c.special_element = 450 * (field % 2 == 0 ? p.d : p.d_v) + 3;
            cot_visit_case(v, &c);
        }
}

/* Sets one feature, 0 .. FEATURES-1. */
enum { FEATURES = 16 };

static void add_feature(attention_case_params *p, int feature, uint64_t *state)
{
    switch (feature) {
    case 0: p->causal = true; break;
    case 1: p->window = true, p->left = cot_draw_below(state, 20), p->right = cot_draw_below(state, 6) - 1; break;
    case 2: p->softcap = cot_draw_bool(state) ? 1.5 : 20; break;
    case 3: p->scale = cot_draw_bool(state) ? 0.3 : -0.25; break;
    case 4: p->sink = true; break;
    case 5: p->alibi = true; break;
    case 6: p->bias = true, p->bias_axes = (unsigned)cot_draw_below(state, 16); break;
    case 7: p->packed = true; break;
    case 8: p->seqused_k = true; break;
    case 9: p->seqused_q = true; break;
    case 10: p->dropout = cot_draw_below(state, 6) == 0 ? 1 : 0.25, p->dropout_state = cot_draw_bool(state); break;
    case 11: p->dlse = true; break;
    case 12: p->d_v = 1 + cot_draw_below(state, 2 * p->d); break;
    case 13: p->Hkv = 1; break;
    case 14:
        if (!p->packed) {
            p->q_begin = cot_draw_below(state, 9), p->q_length = p->Tq + p->q_begin + cot_draw_below(state, 9);
            p->k_begin = cot_draw_below(state, 9), p->k_length = p->Tk + p->k_begin + cot_draw_below(state, 9);
            p->sink = false;
        }
        break;
    case 15: p->window = true, p->left = -1, p->right = cot_draw_below(state, 9); break;
    default: break;
    }
    if (p->q_length > 0 || p->k_length > 0)
        p->sink = false;
    if (p->packed)
        p->q_begin = p->q_length = p->k_begin = p->k_length = 0;
    if (p->causal && p->right > 0)
        p->right = 0;
}

static void sweep_features(cot_case_visitor *v, int direction)
{
    uint64_t state = 21 + (uint64_t)direction;
    const bool backward = direction == COT_ATTENTION_BACKWARD;
    for (int number = 0; number < 10 * FEATURES; number++) {
        attention_case_params p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
        const int round = number / FEATURES; /* 0 .. 3: one feature in each dtype; later: combinations */
        p.dtype = attention_float_dtypes[round < 4 ? round : number % 4];
        const bool gradient = backward && p.dtype == COT_F64;
        p.B = 1 + cot_draw_below(&state, 3);
        p.Hkv = 1 + cot_draw_below(&state, 2);
        p.H = p.Hkv * (1 + cot_draw_below(&state, 3));
        p.Tq = gradient ? 1 + cot_draw_below(&state, 5) : 1 + cot_draw_below(&state, 150);
        p.Tk = gradient ? 1 + cot_draw_below(&state, 7) : 1 + cot_draw_below(&state, 150);
        p.d = gradient ? 1 + cot_draw_below(&state, 3) : 8 * (1 + cot_draw_below(&state, 12));
        p.d_v = p.d;
        if (gradient)
            p.B = 1 + cot_draw_below(&state, 2), p.H = p.Hkv;
        if (cot_draw_bool(&state))
            p.Tk = p.Tq;
        p.layout = (attention_layout)cot_draw_below(&state, LAYOUT_COUNT);
        p.f32_out = cot_draw_below(&state, 8) == 0;
        add_feature(&p, number % FEATURES, &state);
        for (int more = 0; round >= 4 && more < 4; more++)
            add_feature(&p, (int)cot_draw_below(&state, FEATURES), &state);
        p.dlse = p.dlse && backward;
        p.delta = backward && !gradient && cot_draw_below(&state, 6) == 0;
        p.dlse = p.dlse && !p.delta;
        p.accumulate = backward && cot_draw_below(&state, 4) == 0;
        p.no_dq = backward && !gradient && cot_draw_below(&state, 10) == 0;
        p.no_dkv = backward && !gradient && !p.no_dq && cot_draw_below(&state, 10) == 0;
        p.no_lse = !backward && cot_draw_below(&state, 10) == 0;
        p.no_out = !backward && !p.no_lse && cot_draw_below(&state, 10) == 0;
        if (gradient)
            p.uses |= COT_CASE_GRADIENT | COT_CASE_QUICK;
        else if (number % 5 == 0)
            p.uses |= COT_CASE_QUICK;
        emit(v, &p);
    }
}

/* Packed, without a sequence: all rows follow the last one. Two rows, because seed % 3 is 2 (row_count). */
static void sweep_no_sequence(cot_case_visitor *v, int direction)
{
    for (int i = 0; i < 2; i++)
        emit(v, &(attention_case_params){.direction = direction,
                                         .uses = COT_CASE_CHECK | COT_CASE_QUICK,
                                         .seed = 5,
                                         .H = 2,
                                         .Hkv = 2,
                                         .Tq = 50,
                                         .Tk = 50,
                                         .d = 64,
                                         .d_v = 64,
                                         .dtype = i == 0 ? COT_F32 : COT_BF16,
                                         .packed = true,
                                         .sink = true});
}

/* Logits of +-1e4, also over several key blocks, and rows without a visible key. With a sink and without. */
static void sweep_extremes(cot_case_visitor *v, int direction)
{
    uint64_t state = 41 + (uint64_t)direction;
    for (int number = 0; number < 36; number++) {
        attention_case_params p = {.direction = direction,
                                   .uses = COT_CASE_CHECK | COT_CASE_QUICK,
                                   .B = 2,
                                   .H = 2,
                                   .Hkv = 1,
                                   .Tq = 70,
                                   .Tk = 45,
                                   .d = 64,
                                   .d_v = 64,
                                   .dtype = attention_float_dtypes[number % 3],
                                   .layout = BTHD,
                                   .seed = cot_draw(&state)};
        p.causal = number / 3 % 2;
        p.sink = number / 6 % 2;
        if (number < 12)
            p.scale = number % 2 ? 400 : -400; /* times q.k, which is of order 8, with tails up to 30 */
        else if (number >= 24)
            p.scale = number < 30 ? 400 : 1, p.Tq = 150, p.Tk = 420;
        else
            p.Tk = number < 18 ? 33 : 0, p.causal = true;
        emit(v, &p);
    }
}

static void sweep_rows(cot_case_visitor *v, int direction)
{
    uint64_t state = 51 + (uint64_t)direction;
    for (int number = 0; number < 40; number++) {
        attention_case_params p = {
            .direction = direction, .uses = COT_CASE_CHECK | COT_CASE_QUICK, .seed = cot_draw(&state)};
        p.B = cot_draw_below(&state, 4), p.H = p.Hkv = 1 + cot_draw_below(&state, 5);
        p.Tq = cot_draw_below(&state, 90), p.d_v = 1 + cot_draw_below(&state, 140);
        p.Tk = p.d = 1;
        p.dtype = attention_float_dtypes[number % 4];
        p.layout = (attention_layout)cot_draw_below(&state, LAYOUT_COUNT);
        p.packed = number % 5 == 4;
        p.B = p.packed ? 1 : p.B;
        p.f32_out = cot_draw_bool(&state), p.dlse = cot_draw_bool(&state), p.sink = cot_draw_bool(&state);
        p.no_lse = cot_draw_below(&state, 10) == 0, p.no_out = !p.no_lse && cot_draw_below(&state, 10) == 0;
        emit(v, &p);
    }
}

/* Cases for faults that other quick checks would miss:
 * - scores of 4 to 9 softcaps, where tanh is 1 except for its last bits
 * - a bias that all queries share, over several blocks of queries and keys
 * - merged blocks with an lse far below 0
 * - a query with more key tiles than a GPU kernel has stages */
static void sweep_rare_faults(cot_case_visitor *v, int direction)
{
    uint64_t state = 71 + (uint64_t)direction;
    for (int number = 0; number < 4; number++) {
        attention_case_params p = {
            .direction = direction, .uses = COT_CASE_CHECK | COT_CASE_QUICK, .seed = cot_draw(&state)};
        p.B = 1, p.H = p.Hkv = 2, p.Tq = 70, p.Tk = 90, p.d = p.d_v = 32;
        p.dtype = attention_float_dtypes[number];
        if (direction == COT_ATTENTION_MERGE) {
            p.Tk = p.d = 1, p.low_lse = true;
        } else if (number % 2 == 0) {
            p.softcap = 1.5, p.scale = 1.6;
            emit(v, &p);
            p.softcap = p.scale = 0, p.seed = cot_draw(&state);
            p.bias = true, p.bias_axes = 4, p.Tq = 150, p.Tk = 70;
        } else if (number == 1) {
            p.B = 2, p.H = p.Hkv = 6, p.Tq = 1, p.Tk = 900, p.d = p.d_v = 128;
            p.dlse = direction == COT_ATTENTION_BACKWARD;
        } else {
            continue;
        }
        emit(v, &p);
    }
}

/* The shapes that the tensor-core kernels admit, at the lengths of the tests of other libraries. */
static void sweep_cuda(cot_case_visitor *v, int direction)
{
    static const int64_t lengths[][2] = {{1, 1},     {64, 128},  {128, 192}, {256, 256},   {239, 1},     {799, 3},
                                         {113, 203}, {113, 128}, {128, 217}, {113, 211},   {108, 256},   {256, 512},
                                         {384, 256}, {640, 128}, {512, 256}, {1024, 1024}, {1023, 1024}, {1024, 1023},
                                         {5, 0},     {0, 5},     {65, 129},  {63, 127},    {300, 700},   {1, 300}};
    static const int64_t columns[] = {64, 128, 256};
    uint64_t state = 301 + (uint64_t)direction;
    int number = 0;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (size_t d = 0; d < sizeof columns / sizeof *columns; d++)
            for (int causal = 0; causal < 2; causal++, number++) {
                attention_case_params p = {
                    .direction = direction, .uses = COT_CASE_CHECK_CUDA, .seed = cot_draw(&state)};
                p.Tq = lengths[i][0], p.Tk = lengths[i][1];
                const bool large = p.Tq * p.Tk > 60000; /* the oracle is slow */
                if (large && (i + d + (size_t)causal) % 2 == 0)
                    continue;
                p.B = large ? 1 : 1 + number % 2, p.H = large ? 2 : 6;
                p.Hkv = number % 3 == 0 ? p.H : number % 3 == 1 ? p.H / 2 : 1;
                p.d = p.d_v = columns[d];
                p.dtype = number / 2 % 2 == 0 ? COT_BF16 : COT_F16;
                p.layout = p.Tq * p.Tk == 1
                               ? BTHD
                               : (attention_layout)(number % 3); /* a slice of one row would begin at any address */
                p.causal = causal;
                p.allow_nondeterminism = direction == COT_ATTENTION_BACKWARD && number % 4 == 3;
                p.accumulate = direction == COT_ATTENTION_BACKWARD && number % 5 == 4;
                p.f32_out = number % 7 == 6;
                p.dlse = direction == COT_ATTENTION_BACKWARD && number % 6 == 5;
                p.scale = number % 11 == 10 ? -0.1 : 0;
                if (number % 9 == 0 && p.Tq * p.Tk < 20000)
                    p.uses |= COT_CASE_QUICK;
                emit(v, &p);
            }
}

/* Shapes of the Hopper backward. left = right = 0: no window. */
typedef struct hopper_shape {
    int64_t d, H, Hkv, Tq, Tk;
    cot_dtype dtype;
    bool causal, allow_nondeterminism;
    int64_t left, right;
} hopper_shape;

/* p: the other parameters; B = 0: one batch element. */
static void emit_shapes(cot_case_visitor *v, const hopper_shape *shapes, size_t count, attention_case_params p)
{
    for (size_t i = 0; i < count; i++, p.seed++) {
        const hopper_shape *s = &shapes[i];
        p.B = p.B > 0 ? p.B : 1, p.H = s->H, p.Hkv = s->Hkv, p.Tq = s->Tq, p.Tk = s->Tk;
        p.d = p.d_v = s->d;
        p.dtype = s->dtype;
        p.causal = s->causal;
        p.allow_nondeterminism = s->allow_nondeterminism;
        p.window = s->left != 0 || s->right != 0;
        p.left = s->left, p.right = s->right;
        emit(v, &p);
    }
}

/* Several key blocks and several sections of heads: the orders in which the Hopper backward adds to dq. */
static void sweep_orders_cuda(cot_case_visitor *v)
{
    static const hopper_shape shapes[] = {
        {64, 4, 4, 300, 300, COT_BF16, true, false, 0, 0},   {64, 4, 4, 300, 300, COT_F16, false, false, 0, 0},
        {64, 4, 2, 300, 300, COT_BF16, true, false, 0, 0},   {128, 4, 4, 300, 300, COT_F16, true, false, 0, 0},
        {128, 4, 4, 300, 300, COT_BF16, false, false, 0, 0}, {256, 4, 4, 300, 300, COT_BF16, true, false, 0, 0},
    };
    emit_shapes(v, shapes, sizeof shapes / sizeof *shapes,
                (attention_case_params){
                    .direction = COT_ATTENTION_BACKWARD, .uses = COT_CASE_CHECK_CUDA | COT_CASE_QUICK, .seed = 351});
}

/* Windows and diagonals at which a consumer of the Hopper backward skips its first or its last tiles. A tile takes a
 * step for each query head of a group: with 5 heads, more steps in a row are skipped than there are stages of Q. */
static void sweep_skips_cuda(cot_case_visitor *v)
{
    static const hopper_shape shapes[] = {
        {128, 5, 1, 500, 500, COT_BF16, false, false, 64, -1}, {128, 5, 1, 500, 500, COT_F16, false, true, 64, 30},
        {128, 8, 1, 400, 400, COT_BF16, true, false, 70, 0},   {128, 5, 1, 500, 400, COT_BF16, true, true, 0, 0},
        {128, 10, 2, 300, 300, COT_BF16, false, false, 0, 20}, {64, 5, 1, 700, 700, COT_BF16, false, false, 40, 32},
        {64, 3, 3, 700, 700, COT_F16, false, false, -1, 32},   {64, 2, 2, 900, 900, COT_BF16, false, true, 128, 128},
        {64, 5, 1, 700, 500, COT_BF16, true, true, 0, 0},
    };
    emit_shapes(v, shapes, sizeof shapes / sizeof *shapes,
                (attention_case_params){.direction = COT_ATTENTION_BACKWARD, .uses = COT_CASE_CHECK_CUDA, .seed = 361});
}

/* Enough keys for the Hopper backward by pairs of key blocks (uses_pair_kernel), and numbers of key blocks that leave
 * half of a pair without keys. */
static void sweep_pairs_cuda(cot_case_visitor *v)
{
    static const hopper_shape shapes[] = {
        {128, 4, 2, 200, 512, COT_BF16, false, false, 0, 0},  {128, 3, 3, 1, 500, COT_F16, false, false, 0, 0},
        {128, 2, 2, 130, 4096, COT_BF16, false, true, 0, 0},  {128, 1, 1, 70, 8200, COT_BF16, false, false, 0, 0},
        {128, 2, 2, 300, 4096, COT_BF16, true, false, 0, 0},  {128, 1, 1, 100, 16384, COT_F16, true, true, 0, 0},
        {64, 3, 3, 300, 2048, COT_BF16, false, false, 0, 0},  {64, 4, 2, 129, 2000, COT_F16, false, false, 0, 0},
        {64, 1, 1, 140, 16384, COT_BF16, false, true, 0, 0},  {64, 2, 2, 300, 16384, COT_BF16, true, false, 0, 0},
        {128, 2, 2, 200, 1000, COT_BF16, false, false, 0, 0}, {128, 2, 2, 130, 600, COT_BF16, false, false, 0, 0},
        {128, 3, 3, 65, 512, COT_F16, false, false, 0, 0},    {64, 2, 2, 400, 8192, COT_BF16, true, false, 0, 0},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        emit_shapes(v, &shapes[i], 1,
                    (attention_case_params){.direction = COT_ATTENTION_BACKWARD,
                                            .uses = COT_CASE_CHECK_CUDA,
                                            .seed = 371 + i,
                                            .accumulate = i % 4 == 1,
                                            .f32_out = i % 4 == 3});
}

/* More than two sections of heads, with one batch element and with three, in calls that store dq. The main kernel computes
 * delta of the later heads (attention_bwd_delta_sm90.cuh). */
static void sweep_delta_cuda(cot_case_visitor *v)
{
    static const hopper_shape one[] = {{128, 70, 70, 60, 512, COT_BF16, false, false, 0, 0},
                                       {64, 20, 20, 130, 2048, COT_BF16, false, false, 0, 0},
                                       {128, 20, 20, 70, 2048, COT_BF16, true, false, 0, 0}},
                              three[] = {{128, 9, 9, 64, 512, COT_F16, false, false, 0, 0},
                                         {64, 9, 9, 140, 4096, COT_F16, true, false, 0, 0}};
    attention_case_params p = {.direction = COT_ATTENTION_BACKWARD, .uses = COT_CASE_CHECK_CUDA, .seed = 401};
    emit_shapes(v, one, sizeof one / sizeof *one, p);
    p.B = 3, p.seed = 411;
    emit_shapes(v, three, sizeof three / sizeof *three, p);
}

/* The Hopper backward that stores dq in a general call (general_version_stores_dq): packed sequences, windows, and
 * sequences whose last rows are not used. */
static void sweep_general_stores_dq_cuda(cot_case_visitor *v)
{
    for (int number = 0; number < 16; number++) {
        attention_case_params p = {
            .direction = COT_ATTENTION_BACKWARD, .uses = COT_CASE_CHECK_CUDA, .seed = 421 + number};
        p.B = 1 + number % 3, p.H = p.Hkv = 1 + number % 5;
        p.d = p.d_v = number % 2 == 0 ? 64 : 128;
        p.dtype = number % 8 == 7 ? COT_F16 : COT_BF16;
        p.Tq = 130 + 61 * number, p.Tk = number % 3 == 0 ? p.Tq : 1000 - 50 * number;
        p.causal = number % 5 < 3;
        p.packed = number / 2 % 4 < 2;
        p.window = number / 2 % 4 == 2;
        p.left = p.window ? 150 : 0;
        p.right = p.window ? (p.causal ? 0 : 70) : 0;
        p.seqused_q = number / 2 % 4 == 3, p.seqused_k = p.seqused_q && number % 3 == 0;
        emit(v, &p);
    }
}

/* GQA under a causal mask with many key blocks: on the pair kernel, or without a division of the heads
 * (head_split_of). */
static void sweep_gqa_cuda(cot_case_visitor *v)
{
    static const hopper_shape shapes[] = {
        {128, 16, 8, 200, 4096, COT_BF16, true, false, 0, 0}, {128, 8, 4, 150, 8200, COT_BF16, true, true, 0, 0},
        {64, 64, 32, 130, 1536, COT_BF16, true, false, 0, 0}, {96, 64, 32, 70, 1540, COT_BF16, true, false, 0, 0},
        {128, 48, 24, 70, 2048, COT_F16, true, false, 0, 0},
    };
    emit_shapes(v, shapes, sizeof shapes / sizeof *shapes,
                (attention_case_params){.direction = COT_ATTENTION_BACKWARD, .uses = COT_CASE_CHECK_CUDA, .seed = 391});
}

/* The same kernels over several tiles: each feature alone at every head size, then random sets of features. */
static void sweep_tiles_cuda(cot_case_visitor *v, int direction)
{
    enum { SIZES = 8, FEATURE_BITS = 9 };
    static const int64_t columns[][SIZES][2] = {
        {{64, 64}, {128, 128}, {256, 256}, {192, 128}, {96, 96}, {40, 72}, {192, 192}, {64, 200}},
        {{64, 64}, {128, 128}, {96, 96}, {40, 24}, {128, 64}, {64, 128}, {8, 72}, {120, 104}}};
    const bool backward = direction == COT_ATTENTION_BACKWARD;
    uint64_t state = 501 + (uint64_t)direction;
    for (int number = 0; number < (FEATURE_BITS + 3) * SIZES; number++) {
        attention_case_params p = {.direction = direction, .uses = COT_CASE_CHECK_CUDA, .seed = cot_draw(&state)};
        const int64_t *size = columns[backward][number % SIZES];
        unsigned features =
            number / SIZES < FEATURE_BITS ? 1u << number / SIZES : (unsigned)cot_draw_below(&state, 1 << FEATURE_BITS);
        p.B = 1 + cot_draw_below(&state, 3), p.Hkv = 1 + cot_draw_below(&state, 2);
        p.H = p.Hkv * (1 + cot_draw_below(&state, 2));
        p.Tq = 1 + cot_draw_below(&state, 420), p.Tk = 1 + cot_draw_below(&state, 420);
        if (cot_draw_bool(&state))
            p.Tk = p.Tq;
        p.d = size[0], p.d_v = size[1];
        p.dtype = cot_draw_bool(&state) ? COT_BF16 : COT_F16;
        p.layout = cot_draw_bool(&state) ? BTHD : BHTD;
        p.causal = features & 1 || cot_draw_below(&state, 4) == 0;
        if (features & 6) { /* left only, right only, or both */
            p.window = true;
            p.left = features & 2 ? cot_draw_below(&state, 200) : -1;
            p.right = p.causal ? 0 : features & 4 ? cot_draw_below(&state, 100) : -1;
        }
        /* Scores far beyond softcap, of its order, or far below. */
        p.softcap = features & 8 ? (const double[]){1.5, 8, 20}[cot_draw_below(&state, 3)] : 0;
        /* Smaller for f16: see the README. */
        p.scale = features & 16 ? (cot_draw_bool(&state) ? -0.1 : backward ? 0.3 : 0.2) : 0;
        p.sink = features & 32;
        p.packed = features & 64;
        p.seqused_q = features & 128 && cot_draw_bool(&state);
        p.seqused_k = features & 128 && !(p.seqused_q && cot_draw_bool(&state));
        if (features & 256 && !p.packed && !p.sink) {
            p.q_begin = cot_draw_below(&state, 300), p.q_length = p.Tq + p.q_begin + cot_draw_below(&state, 200);
            p.k_begin = cot_draw_below(&state, 300), p.k_length = p.Tk + p.k_begin + cot_draw_below(&state, 200);
        }
        if (backward) {
            p.allow_nondeterminism = cot_draw_bool(&state);
            p.accumulate = cot_draw_below(&state, 6) == 0;
            p.dlse = cot_draw_below(&state, 3) == 0;
        } else {
            p.no_lse = cot_draw_below(&state, 12) == 0;
            p.no_out = !p.no_lse && cot_draw_below(&state, 12) == 0;
        }
        emit(v, &p);
    }
}

/* Every feature and combinations, in 16-bit dtypes at the sizes that tensor cores take: aligned rows and unaligned
 * ones. */
static void sweep_features_cuda(cot_case_visitor *v, int direction)
{
    static const int64_t columns[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}, {96, 96}, {72, 200}};
    uint64_t state = 401 + (uint64_t)direction;
    const bool backward = direction == COT_ATTENTION_BACKWARD;
    for (int number = 0; number < 8 * FEATURES; number++) {
        attention_case_params p = {.direction = direction, .uses = COT_CASE_CHECK_CUDA, .seed = cot_draw(&state)};
        const int round = number / FEATURES; /* 0, 1: one feature; later: combinations */
        const int64_t *size = columns[(number + round) % (int)(sizeof columns / sizeof *columns)];
        p.dtype = number / 2 % 2 == round % 2 ? COT_BF16 : COT_F16;
        p.B = 1 + cot_draw_below(&state, 3);
        p.Hkv = 1 + cot_draw_below(&state, 2);
        p.H = p.Hkv * (1 + cot_draw_below(&state, 3));
        p.Tq = 1 + cot_draw_below(&state, 200);
        p.Tk = cot_draw_bool(&state) ? p.Tq : 1 + cot_draw_below(&state, 300);
        p.d = size[0], p.d_v = size[1];
        p.layout =
            (attention_layout)(number % 4 == 3 ? cot_draw_below(&state, LAYOUT_COUNT) : cot_draw_below(&state, 2));
        add_feature(&p, number % FEATURES, &state);
        for (int more = 0; round >= 2 && more < 3; more++)
            add_feature(&p, (int)cot_draw_below(&state, FEATURES), &state);
        if (p.d_v != size[1]) /* feature 12 draws any d_v */
            p.d_v = 8 * (1 + cot_draw_below(&state, 32));
        p.delta = backward && cot_draw_below(&state, 6) == 0;
        p.dlse = p.dlse && backward && !p.delta;
        p.accumulate = backward && cot_draw_below(&state, 4) == 0;
        p.no_dq = backward && cot_draw_below(&state, 10) == 0;
        p.no_dkv = backward && !p.no_dq && cot_draw_below(&state, 10) == 0;
        emit(v, &p);
    }
}

/* The setting of the FlashAttention-3 paper: 16k tokens, H d = 2048. */
static void bench_cuda(cot_case_visitor *v, int direction)
{
    for (int64_t d = 64; d <= 256; d *= 2)
        for (int causal = 0; causal < 2; causal++)
            for (int allow_nondeterminism = 0; allow_nondeterminism < 1 + (direction == COT_ATTENTION_BACKWARD);
                 allow_nondeterminism++)
                for (int64_t T = 512; T <= 16384; T *= 2) {
                    attention_case_params p = {.direction = direction, .uses = COT_CASE_BENCH_CUDA, .seed = 61};
                    p.B = 16384 / T, p.H = p.Hkv = 2048 / d, p.Tq = p.Tk = T;
                    p.d = p.d_v = d;
                    p.dtype = COT_BF16;
                    p.causal = causal;
                    p.allow_nondeterminism = allow_nondeterminism;
                    emit(v, &p);
                }
}

typedef struct bench_shape {
    int64_t B, H, Hkv, T, d, d_v;
    cot_dtype dtype;
    bool causal, sink, packed, mixed;
    int64_t left; /* 0: no window */
    double softcap, dropout;
    bool alibi, bias;
} bench_shape;

static void bench(cot_case_visitor *v, int direction, unsigned uses, bool allow_nondeterminism,
                  const bench_shape *shapes, size_t count)
{
    for (const bench_shape *s = shapes; s < shapes + count; s++) {
        const attention_case_params p = {.direction = direction,
                                         .uses = uses,
                                         .B = s->B,
                                         .H = s->H,
                                         .Hkv = s->Hkv,
                                         .Tq = s->T,
                                         .Tk = s->T,
                                         .d = s->d,
                                         .d_v = s->d_v,
                                         .dtype = s->dtype,
                                         .causal = s->causal,
                                         .window = s->left > 0,
                                         .left = s->left,
                                         .softcap = s->softcap,
                                         .dropout = s->dropout,
                                         .alibi = s->alibi,
                                         .bias = s->bias,
                                         .bias_axes = 1, /* one bias for all of the batch */
                                         .sink = s->sink,
                                         .packed = s->packed,
                                         .mixed = s->mixed,
                                         .allow_nondeterminism = allow_nondeterminism,
                                         .seed = s->mixed ? 61 : 60};
        emit(v, &p);
    }
}

/* The cost of features, to compare with the entries of bench_cuda without them; and head sizes in between. With
 * dropout, ALiBi or bias the kernels of the backward have one order of sums. */
static void bench_features_cuda(cot_case_visitor *v, int direction)
{
    static const bench_shape shapes[] = {
        {1, 16, 16, 16384, 128, 128, COT_F16, .causal = true},
        {1, 16, 16, 16384, 128, 128, COT_BF16, .causal = true, .left = 1024},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .softcap = 30},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .sink = true},
        {4, 16, 2, 4096, 128, 128, COT_BF16, .causal = true},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .packed = true},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .packed = true, .mixed = true},
        {8, 32, 8, 2048, 128, 128, COT_BF16, .causal = true, .packed = true},
        {2, 32, 8, 8192, 128, 128, COT_BF16, .causal = true, .packed = true},
        {32, 32, 32, 512, 64, 64, COT_BF16, .causal = true, .packed = true},
        {32, 32, 32, 512, 64, 64, COT_BF16, .causal = true, .packed = true, .mixed = true},
        {4, 16, 16, 4096, 192, 128, COT_BF16, .causal = true},
        {4, 16, 16, 4096, 192, 192, COT_BF16, .causal = true},
        {4, 16, 16, 4096, 96, 96, COT_BF16, .causal = true},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .dropout = 0.1},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .alibi = true},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .bias = true},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const bool one_order = shapes[i].dropout > 0 || shapes[i].alibi || shapes[i].bias;
        bench(v, direction, COT_CASE_BENCH_CUDA, false, shapes + i, 1);
        if (direction == COT_ATTENTION_BACKWARD && !one_order)
            bench(v, direction, COT_CASE_BENCH_CUDA, true, shapes + i, 1);
    }
}

static void bench_shapes(cot_case_visitor *v, int direction)
{
    static const bench_shape shapes[] = {
        {1, 8, 8, 2048, 128, 128, COT_BF16, .causal = true},
        {1, 8, 8, 2048, 128, 128, COT_F16, .causal = true},
        {1, 8, 8, 2048, 128, 128, COT_F32, .causal = true},
        {1, 8, 8, 2048, 128, 128, COT_BF16, .causal = false},
        {1, 8, 8, 2048, 128, 128, COT_F32, .causal = false},
        {1, 16, 16, 2048, 64, 64, COT_BF16, .causal = true},
        {1, 8, 2, 2048, 128, 128, COT_BF16, .causal = true},
        {1, 4, 4, 2048, 256, 256, COT_BF16, .causal = true},
        {1, 8, 8, 8192, 128, 128, COT_BF16, .causal = true},
        {1, 8, 8, 8192, 128, 128, COT_BF16, .causal = true, .left = 1024},
        {4, 8, 8, 512, 128, 128, COT_BF16, .causal = true},
        {4, 8, 8, 512, 128, 128, COT_BF16, .causal = true, .packed = true},
    };
    bench(v, direction, COT_CASE_BENCH, false, shapes, sizeof shapes / sizeof *shapes);
}

static void bench_rows(cot_case_visitor *v, int direction)
{
    for (int number = 0; number < 4; number++) {
        const attention_case_params p = {.direction = direction,
                                         .uses = COT_CASE_BENCH,
                                         .B = 1,
                                         .H = 8,
                                         .Hkv = 8,
                                         .Tq = number < 2 ? 2048 : 8192,
                                         .Tk = 1,
                                         .d = 1,
                                         .d_v = 128,
                                         .dtype = number % 2 == 0 ? COT_BF16 : COT_F32,
                                         .seed = 62};
        emit(v, &p);
    }
}

static void each(bool (*visit)(void *, const cot_case *), void *context)
{
    cot_case_visitor v = {visit, context, false};
    for (int direction = COT_ATTENTION_FORWARD; direction <= COT_ATTENTION_BACKWARD; direction++) {
        sweep_features(&v, direction);
        sweep_no_sequence(&v, direction);
        sweep_extremes(&v, direction);
        sweep_rare_faults(&v, direction);
        sweep_sizes(&v, direction);
        sweep_long(&v, direction);
        sweep_nan(&v, direction);
        bench_shapes(&v, direction);
        sweep_cuda(&v, direction);
        sweep_features_cuda(&v, direction);
        sweep_tiles_cuda(&v, direction);
        bench_cuda(&v, direction);
        bench_features_cuda(&v, direction);
    }
    for (int direction = COT_ATTENTION_DELTA; direction <= COT_ATTENTION_MERGE; direction++) {
        sweep_rows(&v, direction);
        bench_rows(&v, direction);
    }
    sweep_rare_faults(&v, COT_ATTENTION_MERGE);
    sweep_orders_cuda(&v);
    sweep_skips_cuda(&v);
    sweep_pairs_cuda(&v);
    sweep_delta_cuda(&v);
    sweep_general_stores_dq_cuda(&v);
    sweep_gqa_cuda(&v);
}

/* ---- inputs that are not only random ------------------------------------------------------------------- */

/* Ascending from 0. Some sequences are empty, none is longer than max_length, and the last one may end before
 * total_rows. */
static void fill_cu_seqlens(uint64_t state, int32_t *data, int64_t B, int64_t total_rows, int64_t max_length)
{
    data[0] = 0;
    for (int64_t b = 1; b <= B; b++) {
        const int64_t left = total_rows - data[b - 1], bound = left < max_length ? left : max_length;
        const int64_t length = cot_draw_below(&state, 4) == 0 ? 0 : b == B ? bound : cot_draw_below(&state, bound + 1);
        data[b] = data[b - 1] + (int32_t)length;
    }
}

/* In the benchmark all sequences have the same length, or alternately 1/2 and 3/2 of it if the case is mixed. */
static void fill_lengths(const cot_case *c, bool q, int32_t *data, int64_t elements, int64_t total_rows,
                         int64_t max_length)
{
    const int64_t length = max_length / 2, difference = c->seed % 2 ? length / 2 : 0;
    if (!(c->uses & CHECKED))
        for (int64_t b = 0; b < elements; b++)
            data[b] = (int32_t)(b * length - b % 2 * difference);
    else
        fill_cu_seqlens(c->seed + q, data, elements - 1, total_rows, max_length);
}

static void fill(const cot_case *c, const char *field, int32_t *data, int64_t elements)
{
    const cot_attention_forward_args *f = (const cot_attention_forward_args *)c->args;
    const cot_attention_backward_args *g = (const cot_attention_backward_args *)c->args;
    const bool forward = c->direction == COT_ATTENTION_FORWARD, q = field[strlen(field) - 1] == 'q';
    const cot_tensor *first = forward ? (q ? &f->q : &f->k) : q ? &g->q : &g->k;
    const int64_t max_length = forward ? (q ? f->max_seqlen_q : f->max_seqlen_k)
                               : q     ? g->max_seqlen_q
                                       : g->max_seqlen_k;
    const int64_t length = forward ? (q ? f->q_length : f->k_length) : q ? g->q_length : g->k_length;
    if (strncmp(field, "dropout", 7) == 0) {
        data[0] = (int32_t)(c->seed >> 3), data[1] = -(int32_t)(c->seed % 5);
        return;
    }
    if (strncmp(field, "cu_seqlens", 10) == 0) {
        fill_lengths(c, q, data, elements, first->shape[0], max_length);
        return;
    }
    uint64_t state = c->seed + 5;
    int32_t *cu = allocate((size_t)elements + 1, sizeof *cu);
    if (first->rank == 3)
        fill_lengths(c, q, cu, elements + 1, first->shape[0], max_length);
    for (int64_t b = 0; b < elements; b++) {
        const int64_t full_length = first->rank == 3 ? cu[b + 1] - cu[b] : length > 0 ? length : first->shape[1];
        data[b] =
            (int32_t)(cot_draw_below(&state, 5) == 0 ? 0 : full_length - cot_draw_below(&state, full_length / 2 + 1));
    }
    free(cu);
}

static int primal(int direction)
{
    return direction == COT_ATTENTION_BACKWARD ? COT_ATTENTION_FORWARD : -1;
}

static void primal_options(int direction, const void *args, void *primal_args)
{
    const cot_attention_backward_args *a = args;
    cot_attention_forward_args *f = primal_args;
    (void)direction;
    f->causal = a->causal, f->window = a->window;
    f->window_left = a->window_left, f->window_right = a->window_right;
    f->scale = a->scale, f->softcap = a->softcap;
    f->dropout_p = a->dropout_p, f->dropout_seed = a->dropout_seed, f->dropout_offset = a->dropout_offset;
    f->max_seqlen_q = a->max_seqlen_q, f->max_seqlen_k = a->max_seqlen_k;
    f->q_begin = a->q_begin, f->q_length = a->q_length, f->k_begin = a->k_begin, f->k_length = a->k_length;
}

/* The tensor of field `name` with these values, row-major in f64. Integers are filled again. */
static cot_tensor oracle_tensor(const cot_case *c, double *const values[COT_MAX_FIELDS], const char *name)
{
    const int field = cot_field_index(&cot_attention_directions[c->direction], name);
    const cot_tensor *t = cot_field_tensor(&cot_attention_directions[c->direction].fields[field], (void *)c->args);
    if (!cot_is_present(t))
        return (cot_tensor){0};
    const size_t count = (size_t)cot_elements(t);
    int32_t *integers = NULL;
    if (t->dtype == COT_I32)
        integers = allocate(count, sizeof *integers);
    if (integers != NULL && count > 0)
        fill(c, name, integers, (int64_t)count);
    return cot_tensor_contiguous(t->dtype == COT_I32 ? (void *)integers : values[field],
                                 t->dtype == COT_I32 ? COT_I32 : COT_F64, t->rank, t->shape);
}

static void lower_values(const cot_case *c, double *const values[COT_MAX_FIELDS], const char *name)
{
    const cot_direction *direction = &cot_attention_directions[c->direction];
    const int field = cot_field_index(direction, name);
    for (int64_t i = 0; i < cot_elements(cot_field_tensor(&direction->fields[field], (void *)c->args)); i++)
        values[field][i] -= 1000;
}

/* Computes the out and lse of the forward as inputs of a backward. The benchmark does not wait for the oracle. */
static void prepare(const cot_case *c, double *const values[COT_MAX_FIELDS])
{
    if (c->direction == COT_ATTENTION_MERGE && strstr(c->options, "+low") != NULL) {
        lower_values(c, values, "lse_a");
        lower_values(c, values, "lse_b");
    }
    if (c->direction != COT_ATTENTION_BACKWARD || !(c->uses & (COT_CASE_CHECK | COT_CASE_CHECK_CUDA)) ||
        c->flops > 1e10)
        return;
    cot_attention_forward_args f, m;
    COT_INIT(&f);
    primal_options(c->direction, c->args, &f);
    cot_tensor *const tensors[] = {&f.q,
                                   &f.k,
                                   &f.v,
                                   &f.cu_seqlens_q,
                                   &f.cu_seqlens_k,
                                   &f.seqused_q,
                                   &f.seqused_k,
                                   &f.sink,
                                   &f.alibi_slopes,
                                   &f.bias,
                                   &f.dropout_seed_tensor,
                                   &f.dropout_offset_tensor,
                                   &f.out,
                                   &f.lse};
    static const char *const names[] = {"q",
                                        "k",
                                        "v",
                                        "cu_seqlens_q",
                                        "cu_seqlens_k",
                                        "seqused_q",
                                        "seqused_k",
                                        "sink",
                                        "alibi_slopes",
                                        "bias",
                                        "dropout_seed_tensor",
                                        "dropout_offset_tensor",
                                        "out",
                                        "lse"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        *tensors[i] = oracle_tensor(c, values, names[i]);
    m = f;
    m.out.data = allocate(cot_is_present(&f.out) ? (size_t)cot_elements(&f.out) : 0, sizeof(double));
    m.lse.data = allocate((size_t)cot_elements(&f.lse), sizeof(double));
    cot_attention_oracles[COT_ATTENTION_FORWARD](&f, &m);
    free(m.out.data);
    free(m.lse.data);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (tensors[i]->dtype == COT_I32)
            free(tensors[i]->data);
}

/* lse of n keys is about log n. With a lower lse P would be large, and infinite in float16. */
static double typical(const cot_case *c, const char *field)
{
    const cot_tensor *k = cot_field_tensor(&cot_attention_directions[c->direction].fields[1], (void *)c->args);
    return strcmp(field, "lse") == 0 ? log((double)k->shape[k->rank - 3] + 1) : 0;
}

const cot_op_cases cot_attention_cases = {
    .op = &cot_attention_op,
    .each = each,
    .parse = attention_case_parse,
    .options_help = attention_case_help,
    .fill = fill,
    .prepare = prepare,
    .typical = typical,
    .oracles = cot_attention_oracles,
    .primal = primal,
    .primal_options = primal_options,
};
