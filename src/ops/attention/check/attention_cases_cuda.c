/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_cases_cuda.c: the cases that check runs on GPUs alone: sizes and features that the tensor-core kernels admit, and
 * for each kernel of the Hopper backward the sizes that choose it. */
#include "attention_case_build.h"

#include "cases/draw.h"

/* The shapes that the tensor-core kernels admit, at the lengths of the tests of other libraries. */
static void sweep_lengths(cot_case_visitor *v, int direction)
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
                attention_case_visit(v, &p);
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
        attention_case_visit(v, &p);
    }
}

/* Several key blocks and several sections of heads: the orders in which the Hopper backward adds to dq. */
static void sweep_orders(cot_case_visitor *v)
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
static void sweep_skips(cot_case_visitor *v)
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
static void sweep_pairs(cot_case_visitor *v)
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
static void sweep_delta(cot_case_visitor *v)
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
static void sweep_general_stores_dq(cot_case_visitor *v)
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
        attention_case_visit(v, &p);
    }
}

/* GQA under a causal mask with many key blocks: on the pair kernel, or without a division of the heads
 * (head_split_of). */
static void sweep_gqa(cot_case_visitor *v)
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
static void sweep_tiles(cot_case_visitor *v, int direction)
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
        attention_case_visit(v, &p);
    }
}

/* Every feature and combinations, in 16-bit dtypes at the sizes that tensor cores take: aligned rows and unaligned
 * ones. */
static void sweep_features(cot_case_visitor *v, int direction)
{
    static const int64_t columns[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}, {96, 96}, {72, 200}};
    uint64_t state = 401 + (uint64_t)direction;
    const bool backward = direction == COT_ATTENTION_BACKWARD;
    for (int number = 0; number < 8 * ATTENTION_CASE_FEATURES; number++) {
        attention_case_params p = {.direction = direction, .uses = COT_CASE_CHECK_CUDA, .seed = cot_draw(&state)};
        const int round = number / ATTENTION_CASE_FEATURES; /* 0, 1: one feature; later: combinations */
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
        attention_case_add_feature(&p, number % ATTENTION_CASE_FEATURES, &state);
        for (int more = 0; round >= 2 && more < 3; more++)
            attention_case_add_feature(&p, (int)cot_draw_below(&state, ATTENTION_CASE_FEATURES), &state);
        if (p.d_v != size[1]) /* feature 12 draws any d_v */
            p.d_v = 8 * (1 + cot_draw_below(&state, 32));
        p.delta = backward && cot_draw_below(&state, 6) == 0;
        p.dlse = p.dlse && backward && !p.delta;
        p.accumulate = backward && cot_draw_below(&state, 4) == 0;
        p.no_dq = backward && cot_draw_below(&state, 10) == 0;
        p.no_dkv = backward && !p.no_dq && cot_draw_below(&state, 10) == 0;
        attention_case_visit(v, &p);
    }
}

void attention_visit_cuda_cases(cot_case_visitor *v, int direction)
{
    sweep_lengths(v, direction);
    sweep_features(v, direction);
    sweep_tiles(v, direction);
}

void attention_visit_hopper_backward_cases(cot_case_visitor *v)
{
    sweep_orders(v);
    sweep_skips(v);
    sweep_pairs(v);
    sweep_delta(v);
    sweep_general_stores_dq(v);
    sweep_gqa(v);
}
