/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_cases.c: the shapes, layouts and options that check, bench and the gradient check run.
 *
 * A case begins as a `plan`: sizes and choices by name. Three families of plans: every width against every time
 * around the kernels' tile edges; every combination of features at small sizes; and the shapes of the benchmark. */
#include "causal_conv1d_problem.h"
#include "causal_conv1d_ref.h"

#include "core/cases.h"
#include "core/draw.h"
#include "core/layouts.h"
#include "core/words.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- plans -------------------------------------------------------------------------------------------- */

typedef enum packing_kind { DENSE, SEQ_IDX, CU_SEQLENS, PACKING_COUNT } packing_kind;

typedef struct plan {
    int direction;
    unsigned uses;
    int64_t B, D, T, K, S;
    cot_layout layout, dlayout; /* of x and y (dx), and of dy */
    cot_dtype dtype, weight_dtype, state_dtype;
    bool silu, bias, initial_state, final_state, accumulate;
    bool no_data_gradient, no_parameter_gradient; /* leave dx, or dweight and dbias, out */
    bool ring, indices, rank2;                    /* update */
    packing_kind packing;
    int64_t N; /* sequences of cu_seqlens, rows of conv_state */
    uint64_t seed;
} plan;

/* ---- tensors ------------------------------------------------------------------------------------------ */

/* States lie as their owner's layout suggests: [rows,D,columns], or channels innermost. */
static cot_tensor state_tensor(const plan *p, int64_t rows, int64_t columns)
{
    int64_t ignored;
    const bool last = p->layout == COT_CHANNEL_LAST || p->layout == COT_LAST_SLICE;
    return cot_laid_out(p->state_dtype, last ? COT_CHANNEL_LAST : COT_CHANNEL_FIRST, rows, p->D, columns, &ignored);
}

static cot_tensor vector(cot_dtype dtype, int64_t size)
{
    return cot_tensor_contiguous(NULL, dtype, 1, &size);
}

static cot_tensor matrix(cot_dtype dtype, int64_t rows, int64_t columns)
{
    return cot_tensor_contiguous(NULL, dtype, 2, (const int64_t[]){rows, columns});
}

static cot_tensor like_x(const plan *p, const char *name, cot_layout layout, cot_case *c)
{
    return cot_laid_out(p->dtype, layout, p->B, p->D, p->T,
                        &c->offset[cot_field_index(&cot_causal_conv1d_directions[p->direction], name)]);
}

static int64_t state_rows(const plan *p)
{
    return p->packing == CU_SEQLENS ? p->N : p->B;
}

/* Parameter gradients: f32 as a trainer keeps them, or the parameter's dtype as autograd wants them. */
static cot_dtype gradient_dtype(const plan *p)
{
    return p->dtype == COT_F64 || p->seed % 2 ? p->weight_dtype : COT_F32;
}

static void forward_case(const plan *p, cot_case *c)
{
    cot_causal_conv1d_forward_args *a = (cot_causal_conv1d_forward_args *)c->args;
    COT_INIT(a);
    a->activation = p->silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
    a->x = like_x(p, "x", p->layout, c);
    a->weight = matrix(p->weight_dtype, p->D, p->K);
    if (p->bias)
        a->bias = vector(p->weight_dtype, p->D);
    if (p->initial_state)
        a->initial_state = state_tensor(p, state_rows(p), p->K - 1);
    if (p->packing == SEQ_IDX)
        a->seq_idx = matrix(COT_I32, p->B, p->T);
    if (p->packing == CU_SEQLENS)
        a->cu_seqlens = vector(COT_I32, p->N + 1);
    a->y = like_x(p, "y", p->layout, c);
    if (p->final_state)
        a->final_state = state_tensor(p, state_rows(p), p->K - 1);
    c->flops = 2.0 * (double)p->K * (double)p->B * (double)p->D * (double)p->T;
}

static void backward_case(const plan *p, cot_case *c)
{
    cot_causal_conv1d_backward_args *a = (cot_causal_conv1d_backward_args *)c->args;
    COT_INIT(a);
    a->activation = p->silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
    a->accumulate = p->accumulate;
    a->x = like_x(p, "x", p->layout, c);
    a->weight = matrix(p->weight_dtype, p->D, p->K);
    if (p->bias)
        a->bias = vector(p->weight_dtype, p->D);
    if (p->packing == SEQ_IDX)
        a->seq_idx = matrix(COT_I32, p->B, p->T);
    if (p->packing == CU_SEQLENS)
        a->cu_seqlens = vector(COT_I32, p->N + 1);
    a->dy = like_x(p, "dy", p->dlayout, c);
    if (p->initial_state) {
        a->initial_state = state_tensor(p, state_rows(p), p->K - 1);
        a->dinitial_state = a->initial_state;
    }
    if (p->final_state)
        a->dfinal_state = state_tensor(p, state_rows(p), p->K - 1);
    if (!p->no_data_gradient)
        a->dx = like_x(p, "dx", p->layout, c);
    if (!p->no_parameter_gradient) {
        a->dweight = matrix(gradient_dtype(p), p->D, p->K);
        if (p->bias)
            a->dbias = vector(gradient_dtype(p), p->D);
    }
    c->flops = (p->silu ? 6.0 : 4.0) * (double)p->K * (double)p->B * (double)p->D * (double)p->T;
}

static void update_case(const plan *p, cot_case *c)
{
    cot_causal_conv1d_update_args *a = (cot_causal_conv1d_update_args *)c->args;
    COT_INIT(a);
    a->activation = p->silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
    a->x = like_x(p, "x", p->layout, c);
    a->y = like_x(p, "y", p->layout, c);
    if (p->rank2)
        a->x.rank = a->y.rank = 2;
    a->weight = matrix(p->weight_dtype, p->D, p->K);
    if (p->bias)
        a->bias = vector(p->weight_dtype, p->D);
    a->conv_state = state_tensor(p, p->N, p->S);
    if (p->ring)
        a->cache_seqlens = vector(COT_I32, p->B);
    if (p->indices)
        a->conv_state_indices = vector(COT_I32, p->B);
    c->flops = 2.0 * (double)p->K * (double)p->B * (double)p->D * (double)p->T;
}

static void describe(const plan *p, cot_case *c)
{
    static const char *const packings[] = {"", "+seq_idx", "+cu_seqlens"};
    c->layout = cot_layout_names[p->layout];
    snprintf(c->shape, sizeof c->shape, "B%lld D%lld T%lld K%lld", (long long)p->B, (long long)p->D, (long long)p->T,
             (long long)p->K);
    snprintf(c->options, sizeof c->options, "w=%s%s%s%s%s%s%s%s%s%s%s", cot_dtype_name(p->weight_dtype),
             p->silu ? "+silu" : "", p->bias ? "+bias" : "", p->initial_state ? "+initial" : "",
             p->final_state ? "+final" : "", packings[p->packing], p->accumulate ? "+accumulate" : "",
             p->no_data_gradient ? "-dx" : "", p->no_parameter_gradient ? "-dweight" : "", p->ring ? "+ring" : "",
             p->indices ? "+indices" : "");
}

/* ---- families ----------------------------------------------------------------------------------------- */

static void build(const plan *p, cot_case *c)
{
    static void (*const builders[])(const plan *, cot_case *) = {forward_case, backward_case, update_case};
    *c = (cot_case){.direction = p->direction, .uses = p->uses, .seed = p->seed};
    builders[p->direction](p, c);
    describe(p, c);
}

static void emit(cot_case_visitor *v, const plan *p)
{
    cot_case c;
    build(p, &c);
    cot_visit_case(v, &c);
}

static const cot_dtype float_dtypes[] = {COT_F32, COT_F16, COT_BF16, COT_F64};

/* Dtypes of parameters and states: any of the three, but all f64 with f64. */
static void draw_dtypes(plan *p, uint64_t *state)
{
    p->weight_dtype = p->dtype == COT_F64 ? COT_F64 : float_dtypes[cot_draw_below(state, 3)];
    p->state_dtype = p->dtype == COT_F64 ? COT_F64 : float_dtypes[cot_draw_below(state, 3)];
}

static void draw_features(plan *p, uint64_t *state)
{
    p->silu = cot_draw_bool(state);
    p->bias = cot_draw_bool(state);
    p->initial_state = cot_draw_bool(state);
    p->final_state = cot_draw_bool(state);
    p->accumulate = p->direction == COT_CAUSAL_CONV1D_BACKWARD && cot_draw_bool(state);
    p->packing = (packing_kind)cot_draw_below(state, PACKING_COUNT);
    p->N = 1 + cot_draw_below(state, 5);
    if (p->packing == CU_SEQLENS)
        p->B = 1;
}

/* Every width at every time around a power of two, where tiles of any size begin and end. */
static void sweep_sizes(cot_case_visitor *v, int direction)
{
    static const int64_t widths[] = {1, 2, 3, 4, 5, 6, 7, 8, 17, 128, 150};
    static const int64_t channels[] = {1, 3, 8, 15, 16, 17, 31, 33, 64, 65, 130};
    uint64_t state = 1 + (uint64_t)direction;
    int64_t number = 0;
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        for (int64_t power = 1; power <= 4096; power *= 2) {
            for (int64_t T = power - 1; T <= power + 1 + 3 * (power == 4096); T++, number++) {
                plan p = {
                    .direction = direction, .uses = COT_CASE_CHECK, .T = T, .K = widths[w], .seed = cot_draw(&state)};
                p.B = 1 + cot_draw_below(&state, 3);
                p.D = channels[cot_draw_below(&state, sizeof channels / sizeof *channels)];
                if (T > 600) /* the oracle's time */
                    p.B = 1, p.D = 1 + cot_draw_below(&state, 24);
                p.layout = (cot_layout)(number % COT_LAYOUT_COUNT);
                p.dlayout =
                    cot_draw_below(&state, 4) == 0 ? (cot_layout)cot_draw_below(&state, COT_LAYOUT_COUNT) : p.layout;
                p.dtype = float_dtypes[cot_draw_below(&state, 16) == 0 ? 3 : number % 3];
                draw_dtypes(&p, &state);
                draw_features(&p, &state);
                if (number % 9 == 0)
                    p.uses |= COT_CASE_QUICK;
                emit(v, &p);
            }
        }
    }
}

/* Wide and short, and many rows: where a kernel's blocks of channels begin and end. */
static void sweep_channels(cot_case_visitor *v, int direction)
{
    static const int64_t channels[] = {255, 256, 257, 511, 512, 513, 1000, 1023, 1025, 2049};
    uint64_t state = 11 + (uint64_t)direction;
    for (size_t i = 0; i < 3 * sizeof channels / sizeof *channels; i++) {
        plan p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
        p.D = channels[i / 3];
        p.T = 1 + cot_draw_below(&state, 40);
        p.K = 1 + cot_draw_below(&state, 8);
        p.B = 1 + cot_draw_below(&state, 4);
        p.layout = p.dlayout = i % 3 == 0 ? COT_CHANNEL_FIRST : i % 3 == 1 ? COT_CHANNEL_LAST : COT_LAST_SLICE;
        p.dtype = float_dtypes[i % 3];
        draw_dtypes(&p, &state);
        draw_features(&p, &state);
        if (i % 4 == 0)
            p.uses |= COT_CASE_QUICK;
        emit(v, &p);
    }
}

/* Sizes in multiples of 8, around the edges of the tiles that a GPU's copy engine brings: 1024 and 2048 tokens of a row,
 * or 32 and 96 tokens of 128 channels. */
static void sweep_tiles(cot_case_visitor *v, int direction)
{
    static const struct {
        int64_t D, T;
    } sizes[] = {{8, 8},   {8, 24},    {16, 32},   {120, 40}, {128, 88}, {136, 96},  {256, 104}, {264, 200},
                 {8, 504}, {24, 1016}, {16, 1024}, {8, 1032}, {8, 2040}, {16, 2048}, {8, 2056},  {8, 4104}};
    uint64_t state = 51 + (uint64_t)direction;
    for (size_t i = 0; i < 6 * sizeof sizes / sizeof *sizes; i++) {
        plan p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
        p.D = sizes[i / 6].D;
        p.T = sizes[i / 6].T;
        p.K = 1 + cot_draw_below(&state, 4);
        p.B = 1 + cot_draw_below(&state, 3);
        p.layout = p.dlayout = i % 2 == 0 ? COT_CHANNEL_FIRST : COT_CHANNEL_LAST;
        p.dtype = float_dtypes[i / 2 % 3];
        draw_dtypes(&p, &state);
        draw_features(&p, &state);
        p.packing = DENSE;
        p.final_state = p.final_state && direction == COT_CAUSAL_CONV1D_FORWARD;
        if (i % 5 == 0)
            p.uses |= COT_CASE_QUICK;
        emit(v, &p);
    }
}

/* So large that the CPU's kernels write past the caches (CONV1D_STREAM_BYTES). */
static void beyond_caches(cot_case_visitor *v, int direction)
{
    for (int layout = COT_CHANNEL_FIRST; layout <= COT_CHANNEL_LAST; layout++) {
        plan p = {.direction = direction,
                  .uses = COT_CASE_CHECK,
                  .B = 1,
                  .D = 528,
                  .T = 2000,
                  .K = 4,
                  .layout = (cot_layout)layout,
                  .dlayout = (cot_layout)layout,
                  .dtype = COT_F32,
                  .weight_dtype = COT_F32,
                  .state_dtype = COT_F32,
                  .bias = true,
                  .silu = true,
                  .seed = 61};
        emit(v, &p);
    }
}

/* Every combination of activation, bias, states and packing, in every dtype and layout, at sizes that finite
 * differences can afford. */
static void sweep_features(cot_case_visitor *v, int direction)
{
    uint64_t state = 21 + (uint64_t)direction;
    for (int bits = 0; bits < 16; bits++) {
        for (int packing = 0; packing < PACKING_COUNT; packing++) {
            for (int number = 0; number < 4 * COT_LAYOUT_COUNT; number++) {
                plan p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
                p.silu = bits & 1, p.bias = bits >> 1 & 1, p.initial_state = bits >> 2 & 1, p.final_state = bits >> 3;
                p.packing = (packing_kind)packing;
                p.layout = p.dlayout = (cot_layout)(number % COT_LAYOUT_COUNT);
                p.dtype = float_dtypes[number / COT_LAYOUT_COUNT];
                draw_dtypes(&p, &state);
                p.K = number == 0 ? 1 : 1 + cot_draw_below(&state, 6);
                p.T = cot_draw_below(&state, 40);
                p.B = packing == CU_SEQLENS ? 1 : 1 + cot_draw_below(&state, 3);
                p.N = cot_draw_below(&state, 6);
                p.D = 1 + cot_draw_below(&state, 20);
                p.accumulate = direction == COT_CAUSAL_CONV1D_BACKWARD && cot_draw_bool(&state);
                p.no_data_gradient = cot_draw_below(&state, 8) == 0;
                p.no_parameter_gradient = cot_draw_below(&state, 8) == 0;
                if (number % 5 == (bits + packing) % 5)
                    p.uses |= COT_CASE_QUICK;
                if (direction == COT_CAUSAL_CONV1D_BACKWARD && number == bits % 20) {
                    p.D = 1 + p.D % 3;
                    p.T = p.T % 13;
                    p.uses |= COT_CASE_GRADIENT | COT_CASE_QUICK;
                }
                emit(v, &p);
            }
        }
    }
}

static void sweep_update(cot_case_visitor *v)
{
    static const int64_t times[] = {0, 1, 1, 1, 2, 3, 5, 9, 20};
    uint64_t state = 31;
    for (int number = 0; number < 600; number++) {
        plan p = {.direction = COT_CAUSAL_CONV1D_UPDATE, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
        p.T = times[cot_draw_below(&state, sizeof times / sizeof *times)];
        p.rank2 = p.T == 1 && cot_draw_bool(&state);
        p.K = number % 7 == 0 ? 17 : 1 + cot_draw_below(&state, 8);
        p.S = p.K - 1 + (cot_draw_bool(&state) ? cot_draw_below(&state, 2 * p.K + 2) : 0);
        p.B = cot_draw_below(&state, 6);
        p.indices = cot_draw_bool(&state);
        p.N = p.B + cot_draw_below(&state, 4);
        p.D = number % 5 == 0 ? 200 + cot_draw_below(&state, 400) : 1 + cot_draw_below(&state, 70);
        p.layout = (cot_layout)(number % COT_LAYOUT_COUNT);
        p.dtype = float_dtypes[number % 11 == 0 ? 3 : number % 3];
        draw_dtypes(&p, &state);
        p.silu = cot_draw_bool(&state);
        p.bias = cot_draw_bool(&state);
        p.ring = cot_draw_bool(&state);
        if (number % 4 == 0)
            p.uses |= COT_CASE_QUICK;
        emit(v, &p);
    }
}

static void bench_shapes(cot_case_visitor *v, int direction)
{
    static const struct {
        int64_t B, D, T;
        cot_dtype dtype;
        unsigned use;
        bool without_silu; /* that too */
    } shapes[] = {
        {8, 2048, 8192, COT_F32, COT_CASE_BENCH, true}, /* far beyond the caches: memory decides */
        {2, 1024, 2048, COT_F32, COT_CASE_BENCH, false},
        {2, 1024, 2048, COT_BF16, COT_CASE_BENCH, false},
        {2, 1024, 2048, COT_F16, COT_CASE_BENCH, false},
        {1, 128, 1024, COT_F32, COT_CASE_BENCH, false}, /* in the second-level cache: arithmetic decides */
        {1, 128, 1024, COT_BF16, COT_CASE_BENCH, false},
        {8, 4096, 4096, COT_BF16, COT_CASE_BENCH_CUDA, true},
        {8, 4096, 4096, COT_F16, COT_CASE_BENCH_CUDA, false},
        {8, 4096, 4096, COT_F32, COT_CASE_BENCH_CUDA, false},
        {2, 2048, 2048, COT_BF16, COT_CASE_BENCH_CUDA, false},
        {1, 1536, 16384, COT_BF16, COT_CASE_BENCH_CUDA, false}, /* one long row a channel */
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int layout = COT_CHANNEL_FIRST; layout <= COT_CHANNEL_LAST; layout++) {
            for (int silu = 1; silu >= !shapes[i].without_silu; silu--) {
                plan p = {.direction = direction,
                          .uses = shapes[i].use,
                          .B = shapes[i].B,
                          .D = shapes[i].D,
                          .T = shapes[i].T,
                          .K = 4,
                          .layout = (cot_layout)layout,
                          .dlayout = (cot_layout)layout,
                          .dtype = shapes[i].dtype,
                          .weight_dtype = COT_F32,
                          .state_dtype = COT_F32,
                          .bias = true,
                          .silu = silu,
                          .seed = 41};
                emit(v, &p);
            }
        }
    }
}

static void bench_update(cot_case_visitor *v)
{
    for (int dtype = 0; dtype < 3; dtype += 2) {
        plan p = {.direction = COT_CAUSAL_CONV1D_UPDATE,
                  .uses = COT_CASE_BENCH | COT_CASE_BENCH_CUDA,
                  .B = 64,
                  .D = 2048,
                  .T = 1,
                  .K = 4,
                  .S = 3,
                  .N = 64,
                  .layout = COT_CHANNEL_FIRST,
                  .dtype = float_dtypes[dtype],
                  .weight_dtype = COT_F32,
                  .state_dtype = float_dtypes[dtype],
                  .bias = true,
                  .silu = true,
                  .rank2 = true,
                  .seed = 43};
        emit(v, &p);
    }
}

static void each(bool (*visit)(void *, const cot_case *), void *context)
{
    cot_case_visitor v = {visit, context, false};
    for (int direction = COT_CAUSAL_CONV1D_FORWARD; direction <= COT_CAUSAL_CONV1D_BACKWARD; direction++) {
        sweep_features(&v, direction);
        sweep_sizes(&v, direction);
        sweep_channels(&v, direction);
        sweep_tiles(&v, direction);
        beyond_caches(&v, direction);
        bench_shapes(&v, direction);
    }
    sweep_update(&v);
    bench_update(&v);
}

/* ---- a case from words -------------------------------------------------------------------------------- */

static bool set_word(plan *p, const char *word)
{
    static const cot_word sizes[] = {{"B", offsetof(plan, B)},
                                     {"D", offsetof(plan, D)},
                                     {"T", offsetof(plan, T)},
                                     {"K", offsetof(plan, K)},
                                     {"S", offsetof(plan, S)},
                                     {"N", offsetof(plan, N)},
                                     {0}};
    static const cot_word switches[] = {{"silu", offsetof(plan, silu)},
                                        {"bias", offsetof(plan, bias)},
                                        {"initial", offsetof(plan, initial_state)},
                                        {"final", offsetof(plan, final_state)},
                                        {"accumulate", offsetof(plan, accumulate)},
                                        {"ring", offsetof(plan, ring)},
                                        {"indices", offsetof(plan, indices)},
                                        {0}};
    if (cot_word_size(p, sizes, word) || cot_word_switch(p, switches, word) || cot_word_float_dtype(&p->dtype, word))
        return true;
    if (cot_word_layout(&p->layout, word))
        return p->dlayout = p->layout, true;
    if (strcmp(word, "seq_idx") == 0)
        return p->packing = SEQ_IDX, true;
    if (strcmp(word, "cu_seqlens") == 0)
        return p->packing = CU_SEQLENS, true;
    return false;
}

static const char *const words_help =
    "B=2 D=1024 T=2048 K=4 (N=sequences or state rows, S=state columns), f32 f16 bf16 f64, channel-first channel-last "
    "first-slice last-slice strided, silu bias initial final seq_idx cu_seqlens accumulate ring indices";

static const char *parse(int direction, int count, char *const words[], cot_case *c)
{
    plan p = {.direction = direction,
              .uses = COT_CASE_CHECK | COT_CASE_BENCH | COT_CASE_BENCH_CUDA,
              .B = 2,
              .D = 1024,
              .T = 2048,
              .K = 4,
              .S = -1,
              .N = -1,
              .dtype = COT_F32,
              .seed = 47};
    for (int i = 0; i < count; i++)
        if (!set_word(&p, words[i]))
            return words[i];
    p.weight_dtype = p.state_dtype = p.dtype == COT_F64 ? COT_F64 : COT_F32;
    p.S = p.S < 0 ? p.K - 1 : p.S;
    p.N = p.N < 0 ? p.B : p.N;
    p.B = p.packing == CU_SEQLENS ? 1 : p.B;
    build(&p, c);
    return NULL;
}

/* ---- index data --------------------------------------------------------------------------------------- */

/* Sequences of up to 9 tokens with padding between; every fourth case has longer ones, and every other one comes
 * back to an earlier number, so that taps reach across a gap. */
static void fill_seq_idx(uint64_t state, int32_t *data, int64_t elements)
{
    const bool returning = cot_draw_bool(&state);
    const int64_t longest = cot_draw_below(&state, 4) == 0 ? 200 : 9;
    int32_t next = 0;
    for (int64_t i = 0; i < elements;) {
        const int64_t length = 1 + cot_draw_below(&state, longest);
        int32_t id = cot_draw_below(&state, 5) == 0 ? -1 - (int32_t)cot_draw_below(&state, 2) : next++;
        if (returning && id >= 0)
            id = (int32_t)cot_draw_below(&state, 3);
        for (int64_t end = i + length; i < end && i < elements; i++)
            data[i] = id;
    }
}

/* Ascending from 0, some sequences empty, in every other case short of T. */
static void fill_cu_seqlens(uint64_t state, int32_t *data, int64_t N, int64_t T)
{
    const int64_t total = cot_draw_bool(&state) ? T : cot_draw_below(&state, T + 1);
    data[0] = 0;
    for (int64_t n = 1; n <= N; n++) {
        const int64_t left = total - data[n - 1];
        const int64_t length = n == N ? left : cot_draw_below(&state, 3) == 0 ? 0 : cot_draw_below(&state, left + 1);
        data[n] = data[n - 1] + (int32_t)length;
    }
}

/* Different rows of the state, some of them skipped. */
static void fill_indices(uint64_t state, int32_t *data, int64_t B, int64_t N)
{
    const int64_t first = cot_draw_below(&state, N > 0 ? N : 1);
    for (int64_t b = 0; b < B; b++)
        data[b] = cot_draw_below(&state, 4) == 0 ? -1 : (int32_t)((first + N - 1 - b) % N);
}

static void fill(const cot_case *c, const char *field, int32_t *data, int64_t elements)
{
    uint64_t state = c->seed;
    if (strcmp(field, "seq_idx") == 0) {
        fill_seq_idx(state, data, elements);
    } else if (strcmp(field, "cu_seqlens") == 0) {
        const bool forward = c->direction == COT_CAUSAL_CONV1D_FORWARD;
        const cot_tensor *x = forward ? &((const cot_causal_conv1d_forward_args *)c->args)->x
                                      : &((const cot_causal_conv1d_backward_args *)c->args)->x;
        fill_cu_seqlens(state, data, elements - 1, x->shape[2]);
    } else if (strcmp(field, "cache_seqlens") == 0) {
        for (int64_t b = 0; b < elements; b++)
            data[b] = cot_draw_below(&state, 8) == 0 ? INT32_MAX : (int32_t)cot_draw_below(&state, 60);
    } else {
        fill_indices(state, data, elements, ((const cot_causal_conv1d_update_args *)c->args)->conv_state.shape[0]);
    }
}

/* ---- gradients ---------------------------------------------------------------------------------------- */

static int primal(int direction)
{
    return direction == COT_CAUSAL_CONV1D_BACKWARD ? COT_CAUSAL_CONV1D_FORWARD : -1;
}

static void primal_options(int direction, const void *args, void *primal_args)
{
    (void)direction;
    ((cot_causal_conv1d_forward_args *)primal_args)->activation =
        ((const cot_causal_conv1d_backward_args *)args)->activation;
}

const cot_op_cases cot_causal_conv1d_cases = {
    .op = &cot_causal_conv1d_op,
    .each = each,
    .parse = parse,
    .words_help = words_help,
    .fill = fill,
    .oracles = cot_causal_conv1d_oracles,
    .primal = primal,
    .primal_options = primal_options,
};
