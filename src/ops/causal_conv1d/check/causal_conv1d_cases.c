/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_cases.c: the shapes, layouts and options of the cases that check, bench and the gradient check run.
 *
 * A case starts as a `case_shape`: its sizes, dtypes and options by name. The families of shapes are: every combination
 * of features at small sizes; every width with every time around the edges of the kernels' tiles; many channels; the
 * tile sizes of the GPU kernels; tensors larger than the caches; and the benchmark. */
#include "../causal_conv1d_problem.h"
#include "causal_conv1d_ref.h"

#include "cases/cases.h"
#include "cases/draw.h"
#include "cases/layouts.h"
#include "cases/case_words.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- case shapes -------------------------------------------------------------------------------------- */

typedef enum packing_kind { DENSE, SEQ_IDX, CU_SEQLENS, PACKING_COUNT } packing_kind;

typedef struct case_shape {
    int direction;
    unsigned uses;
    int64_t B, D, T, K, S;
    cot_layout layout, dlayout; /* layout of x and y (dx), and of dy */
    cot_dtype dtype, weight_dtype, state_dtype;
    bool silu, bias, initial_state, final_state, accumulate;
    bool no_data_gradient, no_parameter_gradient; /* omit dx, or dweight and dbias */
    bool ring, indices, rank2;                    /* for update */
    packing_kind packing;
    int64_t N; /* sequences of cu_seqlens, or rows of conv_state */
    uint64_t seed;
} case_shape;

/* ---- tensors ------------------------------------------------------------------------------------------ */

/* States have the kind of layout that x has: [rows,D,columns] in this order, or with channels innermost. */
static cot_tensor state_tensor(const case_shape *s, int64_t rows, int64_t columns)
{
    int64_t ignored;
    const bool last = s->layout == COT_CHANNEL_LAST || s->layout == COT_LAST_SLICE;
    return cot_tensor_with_layout(s->state_dtype, last ? COT_CHANNEL_LAST : COT_CHANNEL_FIRST, rows, s->D, columns,
                                  &ignored);
}

static cot_tensor vector(cot_dtype dtype, int64_t size)
{
    return cot_tensor_contiguous(NULL, dtype, 1, &size);
}

static cot_tensor matrix(cot_dtype dtype, int64_t rows, int64_t columns)
{
    return cot_tensor_contiguous(NULL, dtype, 2, (const int64_t[]){rows, columns});
}

static cot_tensor like_x(const case_shape *s, const char *name, cot_layout layout, cot_case *c)
{
    return cot_tensor_with_layout(s->dtype, layout, s->B, s->D, s->T,
                                  &c->offset[cot_field_index(&cot_causal_conv1d_directions[s->direction], name)]);
}

static int64_t state_rows(const case_shape *s)
{
    return s->packing == CU_SEQLENS ? s->N : s->B;
}

/* Dtype of parameter gradients: f32, as trainers keep them, or the parameter's dtype, as autograd expects. */
static cot_dtype gradient_dtype(const case_shape *s)
{
    return s->dtype == COT_F64 || s->seed % 2 ? s->weight_dtype : COT_F32;
}

static void forward_case(const case_shape *s, cot_case *c)
{
    cot_causal_conv1d_forward_args *a = (cot_causal_conv1d_forward_args *)c->args;
    COT_INIT(a);
    a->activation = s->silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
    a->x = like_x(s, "x", s->layout, c);
    a->weight = matrix(s->weight_dtype, s->D, s->K);
    if (s->bias)
        a->bias = vector(s->weight_dtype, s->D);
    if (s->initial_state)
        a->initial_state = state_tensor(s, state_rows(s), s->K - 1);
    if (s->packing == SEQ_IDX)
        a->seq_idx = matrix(COT_I32, s->B, s->T);
    if (s->packing == CU_SEQLENS)
        a->cu_seqlens = vector(COT_I32, s->N + 1);
    a->y = like_x(s, "y", s->layout, c);
    if (s->final_state)
        a->final_state = state_tensor(s, state_rows(s), s->K - 1);
    c->flops = 2.0 * (double)s->K * (double)s->B * (double)s->D * (double)s->T;
}

static void backward_case(const case_shape *s, cot_case *c)
{
    cot_causal_conv1d_backward_args *a = (cot_causal_conv1d_backward_args *)c->args;
    COT_INIT(a);
    a->activation = s->silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
    a->accumulate = s->accumulate;
    a->x = like_x(s, "x", s->layout, c);
    a->weight = matrix(s->weight_dtype, s->D, s->K);
    if (s->bias)
        a->bias = vector(s->weight_dtype, s->D);
    if (s->packing == SEQ_IDX)
        a->seq_idx = matrix(COT_I32, s->B, s->T);
    if (s->packing == CU_SEQLENS)
        a->cu_seqlens = vector(COT_I32, s->N + 1);
    a->dy = like_x(s, "dy", s->dlayout, c);
    if (s->initial_state) {
        a->initial_state = state_tensor(s, state_rows(s), s->K - 1);
        a->dinitial_state = a->initial_state;
    }
    if (s->final_state)
        a->dfinal_state = state_tensor(s, state_rows(s), s->K - 1);
    if (!s->no_data_gradient)
        a->dx = like_x(s, "dx", s->layout, c);
    if (!s->no_parameter_gradient) {
        a->dweight = matrix(gradient_dtype(s), s->D, s->K);
        if (s->bias)
            a->dbias = vector(gradient_dtype(s), s->D);
    }
    c->flops = (s->silu ? 6.0 : 4.0) * (double)s->K * (double)s->B * (double)s->D * (double)s->T;
}

static void update_case(const case_shape *s, cot_case *c)
{
    cot_causal_conv1d_update_args *a = (cot_causal_conv1d_update_args *)c->args;
    COT_INIT(a);
    a->activation = s->silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
    a->x = like_x(s, "x", s->layout, c);
    a->y = like_x(s, "y", s->layout, c);
    if (s->rank2)
        a->x.rank = a->y.rank = 2;
    a->weight = matrix(s->weight_dtype, s->D, s->K);
    if (s->bias)
        a->bias = vector(s->weight_dtype, s->D);
    a->conv_state = state_tensor(s, s->N, s->S);
    if (s->ring)
        a->cache_seqlens = vector(COT_I32, s->B);
    if (s->indices)
        a->conv_state_indices = vector(COT_I32, s->B);
    c->flops = 2.0 * (double)s->K * (double)s->B * (double)s->D * (double)s->T;
}

static void describe(const case_shape *s, cot_case *c)
{
    static const char *const packings[] = {"", "+seq_idx", "+cu_seqlens"};
    c->layout = cot_layout_names[s->layout];
    snprintf(c->shape, sizeof c->shape, "B%lld D%lld T%lld K%lld", (long long)s->B, (long long)s->D, (long long)s->T,
             (long long)s->K);
    snprintf(c->options, sizeof c->options, "w=%s%s%s%s%s%s%s%s%s%s%s", cot_dtype_name(s->weight_dtype),
             s->silu ? "+silu" : "", s->bias ? "+bias" : "", s->initial_state ? "+initial" : "",
             s->final_state ? "+final" : "", packings[s->packing], s->accumulate ? "+accumulate" : "",
             s->no_data_gradient ? "-dx" : "", s->no_parameter_gradient ? "-dweight" : "", s->ring ? "+ring" : "",
             s->indices ? "+indices" : "");
}

/* ---- families ----------------------------------------------------------------------------------------- */

static void build(const case_shape *s, cot_case *c)
{
    static void (*const builders[])(const case_shape *, cot_case *) = {forward_case, backward_case, update_case};
    *c = (cot_case){.direction = s->direction, .uses = s->uses, .seed = s->seed};
    builders[s->direction](s, c);
    describe(s, c);
}

static void emit(cot_case_visitor *v, const case_shape *s)
{
    cot_case c;
    build(s, &c);
    cot_visit_case(v, &c);
}

static const cot_dtype float_dtypes[] = {COT_F32, COT_F16, COT_BF16, COT_F64};

/* Draws the dtypes of parameters and states: any of f32, f16 and bf16, but f64 if x is f64. */
static void draw_dtypes(case_shape *s, uint64_t *rng)
{
    s->weight_dtype = s->dtype == COT_F64 ? COT_F64 : float_dtypes[cot_draw_below(rng, 3)];
    s->state_dtype = s->dtype == COT_F64 ? COT_F64 : float_dtypes[cot_draw_below(rng, 3)];
}

static void draw_features(case_shape *s, uint64_t *rng)
{
    s->silu = cot_draw_bool(rng);
    s->bias = cot_draw_bool(rng);
    s->initial_state = cot_draw_bool(rng);
    s->final_state = cot_draw_bool(rng);
    s->accumulate = s->direction == COT_CAUSAL_CONV1D_BACKWARD && cot_draw_bool(rng);
    s->packing = (packing_kind)cot_draw_below(rng, PACKING_COUNT);
    s->N = 1 + cot_draw_below(rng, 5);
    if (s->packing == CU_SEQLENS)
        s->B = 1;
}

/* Every width at every time around a power of two: tiles of any size begin and end there. */
static void sweep_sizes(cot_case_visitor *v, int direction)
{
    static const int64_t widths[] = {1, 2, 3, 4, 5, 6, 7, 8, 17, 128, 150};
    static const int64_t channels[] = {1, 3, 8, 15, 16, 17, 31, 33, 64, 65, 130};
    uint64_t rng = 1 + (uint64_t)direction;
    int64_t number = 0;
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        for (int64_t power = 1; power <= 4096; power *= 2) {
            for (int64_t T = power - 1; T <= power + 1 + 3 * (power == 4096); T++, number++) {
                case_shape s = {
                    .direction = direction, .uses = COT_CASE_CHECK, .T = T, .K = widths[w], .seed = cot_draw(&rng)};
                s.B = 1 + cot_draw_below(&rng, 3);
                s.D = channels[cot_draw_below(&rng, sizeof channels / sizeof *channels)];
                if (T > 600) /* limits the time that the oracle takes */
                    s.B = 1, s.D = 1 + cot_draw_below(&rng, 24);
                s.layout = (cot_layout)(number % COT_LAYOUT_COUNT);
                s.dlayout =
                    cot_draw_below(&rng, 4) == 0 ? (cot_layout)cot_draw_below(&rng, COT_LAYOUT_COUNT) : s.layout;
                s.dtype = float_dtypes[cot_draw_below(&rng, 16) == 0 ? 3 : number % 3];
                draw_dtypes(&s, &rng);
                draw_features(&s, &rng);
                if (number % 9 == 0)
                    s.uses |= COT_CASE_QUICK;
                emit(v, &s);
            }
        }
    }
}

/* Many channels and few tokens: around the edges of the kernels' blocks of channels. */
static void sweep_channels(cot_case_visitor *v, int direction)
{
    static const int64_t channels[] = {255, 256, 257, 511, 512, 513, 1000, 1023, 1025, 2049};
    uint64_t rng = 11 + (uint64_t)direction;
    for (size_t i = 0; i < 3 * sizeof channels / sizeof *channels; i++) {
        case_shape s = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&rng)};
        s.D = channels[i / 3];
        s.T = 1 + cot_draw_below(&rng, 40);
        s.K = 1 + cot_draw_below(&rng, 8);
        s.B = 1 + cot_draw_below(&rng, 4);
        s.layout = s.dlayout = i % 3 == 0 ? COT_CHANNEL_FIRST : i % 3 == 1 ? COT_CHANNEL_LAST : COT_LAST_SLICE;
        s.dtype = float_dtypes[i % 3];
        draw_dtypes(&s, &rng);
        draw_features(&s, &rng);
        if (i % 4 == 0)
            s.uses |= COT_CASE_QUICK;
        emit(v, &s);
    }
}

/* Multiples of 8 around the edges of the tiles that the GPU kernels load by bulk copies: 1024, 2048 or 4096 tokens of a
 * channel; 32 tokens of 128 channels (forward); 64 or 128 tokens of 64 channels (backward). */
static void sweep_tiles(cot_case_visitor *v, int direction)
{
    static const struct {
        int64_t D, T;
    } sizes[] = {{8, 8},   {8, 24},    {16, 32},   {120, 40}, {128, 88}, {136, 96},  {256, 104}, {264, 200},
                 {8, 504}, {24, 1016}, {16, 1024}, {8, 1032}, {8, 2040}, {16, 2048}, {8, 2056},  {8, 4104},
                 {64, 56}, {56, 64},   {72, 72},   {64, 120}, {72, 128}, {56, 136},  {8, 4088},  {8, 4096}};
    uint64_t rng = 51 + (uint64_t)direction;
    for (size_t i = 0; i < 6 * sizeof sizes / sizeof *sizes; i++) {
        case_shape s = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&rng)};
        s.D = sizes[i / 6].D;
        s.T = sizes[i / 6].T;
        s.K = 1 + cot_draw_below(&rng, 4);
        s.B = 1 + cot_draw_below(&rng, 3);
        s.layout = s.dlayout = i % 2 == 0 ? COT_CHANNEL_FIRST : COT_CHANNEL_LAST;
        s.dtype = float_dtypes[i / 2 % 3];
        draw_dtypes(&s, &rng);
        draw_features(&s, &rng);
        s.packing = DENSE;
        s.final_state = s.final_state && direction == COT_CAUSAL_CONV1D_FORWARD;
        if (i % 5 == 0)
            s.uses |= COT_CASE_QUICK;
        emit(v, &s);
    }
}

/* The channel-last backward of Hopper has tiles of 128 tokens only from 4096 blocks on. */
static void many_tiles(cot_case_visitor *v)
{
    case_shape s = {.direction = COT_CAUSAL_CONV1D_BACKWARD,
                    .uses = COT_CASE_CHECK,
                    .B = 2048,
                    .D = 8,
                    .T = 136,
                    .K = 4,
                    .layout = COT_CHANNEL_LAST,
                    .dlayout = COT_CHANNEL_LAST,
                    .dtype = COT_BF16,
                    .weight_dtype = COT_F32,
                    .state_dtype = COT_F32,
                    .bias = true,
                    .silu = true,
                    .seed = 71};
    emit(v, &s);
}

/* Tensors so large that the CPU kernels use non-temporal stores (CONV1D_NONTEMPORAL_BYTES). */
static void beyond_caches(cot_case_visitor *v, int direction)
{
    for (int layout = COT_CHANNEL_FIRST; layout <= COT_CHANNEL_LAST; layout++) {
        case_shape s = {.direction = direction,
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
        emit(v, &s);
    }
}

/* Every combination of activation, bias, states and packing, in every dtype and layout, at sizes small enough for
 * finite differences. */
static void sweep_features(cot_case_visitor *v, int direction)
{
    uint64_t rng = 21 + (uint64_t)direction;
    for (int bits = 0; bits < 16; bits++) {
        for (int packing = 0; packing < PACKING_COUNT; packing++) {
            for (int number = 0; number < 4 * COT_LAYOUT_COUNT; number++) {
                case_shape s = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&rng)};
                s.silu = bits & 1, s.bias = bits >> 1 & 1, s.initial_state = bits >> 2 & 1, s.final_state = bits >> 3;
                s.packing = (packing_kind)packing;
                s.layout = s.dlayout = (cot_layout)(number % COT_LAYOUT_COUNT);
                s.dtype = float_dtypes[number / COT_LAYOUT_COUNT];
                draw_dtypes(&s, &rng);
                s.K = number == 0 ? 1 : 1 + cot_draw_below(&rng, 6);
                s.T = cot_draw_below(&rng, 40);
                s.B = packing == CU_SEQLENS ? 1 : 1 + cot_draw_below(&rng, 3);
                s.N = cot_draw_below(&rng, 6);
                s.D = 1 + cot_draw_below(&rng, 20);
                s.accumulate = direction == COT_CAUSAL_CONV1D_BACKWARD && cot_draw_bool(&rng);
                s.no_data_gradient = cot_draw_below(&rng, 8) == 0;
                s.no_parameter_gradient = cot_draw_below(&rng, 8) == 0;
                if (number % 5 == (bits + packing) % 5)
                    s.uses |= COT_CASE_QUICK;
                if (direction == COT_CAUSAL_CONV1D_BACKWARD && number == bits % 20) {
                    s.D = 1 + s.D % 3;
                    s.T = s.T % 13;
                    s.uses |= COT_CASE_GRADIENT | COT_CASE_QUICK;
                }
                emit(v, &s);
            }
        }
    }
}

static void sweep_update(cot_case_visitor *v)
{
    static const int64_t times[] = {0, 1, 1, 1, 2, 3, 5, 9, 20};
    uint64_t rng = 31;
    for (int number = 0; number < 600; number++) {
        case_shape s = {.direction = COT_CAUSAL_CONV1D_UPDATE, .uses = COT_CASE_CHECK, .seed = cot_draw(&rng)};
        s.T = times[cot_draw_below(&rng, sizeof times / sizeof *times)];
        s.rank2 = s.T == 1 && cot_draw_bool(&rng);
        s.K = number % 7 == 0 ? 17 : 1 + cot_draw_below(&rng, 8);
        s.S = s.K - 1 + (cot_draw_bool(&rng) ? cot_draw_below(&rng, 2 * s.K + 2) : 0);
        s.B = cot_draw_below(&rng, 6);
        s.indices = cot_draw_bool(&rng);
        s.N = s.B + cot_draw_below(&rng, 4);
        s.D = number % 5 == 0 ? 200 + cot_draw_below(&rng, 400) : 1 + cot_draw_below(&rng, 70);
        s.layout = (cot_layout)(number % COT_LAYOUT_COUNT);
        s.dtype = float_dtypes[number % 11 == 0 ? 3 : number % 3];
        draw_dtypes(&s, &rng);
        s.silu = cot_draw_bool(&rng);
        s.bias = cot_draw_bool(&rng);
        s.ring = cot_draw_bool(&rng);
        if (number % 4 == 0)
            s.uses |= COT_CASE_QUICK;
        emit(v, &s);
    }
}

static void bench_shapes(cot_case_visitor *v, int direction)
{
    static const struct {
        int64_t B, D, T;
        cot_dtype dtype;
        unsigned use;
        bool also_without_silu; /* bench without SiLU too */
    } shapes[] = {
        {8, 2048, 8192, COT_F32, COT_CASE_BENCH, true}, /* much larger than the caches: bound by memory */
        {2, 1024, 2048, COT_F32, COT_CASE_BENCH, false},
        {2, 1024, 2048, COT_BF16, COT_CASE_BENCH, false},
        {2, 1024, 2048, COT_F16, COT_CASE_BENCH, false},
        {1, 128, 1024, COT_F32, COT_CASE_BENCH, false}, /* fits in the L2 cache: bound by arithmetic */
        {1, 128, 1024, COT_BF16, COT_CASE_BENCH, false},
        {8, 4096, 4096, COT_BF16, COT_CASE_BENCH_CUDA, true},
        {8, 4096, 4096, COT_F16, COT_CASE_BENCH_CUDA, false},
        {8, 4096, 4096, COT_F32, COT_CASE_BENCH_CUDA, false},
        {2, 2048, 2048, COT_BF16, COT_CASE_BENCH_CUDA, false},
        {1, 1536, 16384, COT_BF16, COT_CASE_BENCH_CUDA, false}, /* one long row per channel */
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int layout = COT_CHANNEL_FIRST; layout <= COT_CHANNEL_LAST; layout++) {
            for (int silu = 1; silu >= !shapes[i].also_without_silu; silu--) {
                case_shape s = {.direction = direction,
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
                emit(v, &s);
            }
        }
    }
}

static void bench_update(cot_case_visitor *v)
{
    for (int dtype = 0; dtype < 3; dtype += 2) {
        case_shape s = {.direction = COT_CAUSAL_CONV1D_UPDATE,
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
        emit(v, &s);
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
        if (direction == COT_CAUSAL_CONV1D_BACKWARD)
            many_tiles(&v);
        bench_shapes(&v, direction);
    }
    sweep_update(&v);
    bench_update(&v);
}

/* ---- a case from command-line words -------------------------------------------------------------------- */

static bool set_word(case_shape *s, const char *word)
{
    static const cot_text_option sizes[] = {{"B", offsetof(case_shape, B)},
                                            {"D", offsetof(case_shape, D)},
                                            {"T", offsetof(case_shape, T)},
                                            {"K", offsetof(case_shape, K)},
                                            {"S", offsetof(case_shape, S)},
                                            {"N", offsetof(case_shape, N)},
                                            {0}};
    static const cot_text_option switches[] = {{"silu", offsetof(case_shape, silu)},
                                               {"bias", offsetof(case_shape, bias)},
                                               {"initial", offsetof(case_shape, initial_state)},
                                               {"final", offsetof(case_shape, final_state)},
                                               {"accumulate", offsetof(case_shape, accumulate)},
                                               {"ring", offsetof(case_shape, ring)},
                                               {"indices", offsetof(case_shape, indices)},
                                               {0}};
    if (cot_parse_size(s, sizes, word) || cot_parse_flag(s, switches, word) || cot_parse_float_dtype(&s->dtype, word))
        return true;
    if (cot_parse_layout(&s->layout, word))
        return s->dlayout = s->layout, true;
    if (strcmp(word, "seq_idx") == 0)
        return s->packing = SEQ_IDX, true;
    if (strcmp(word, "cu_seqlens") == 0)
        return s->packing = CU_SEQLENS, true;
    return false;
}

static const char *const options_help =
    "B=2 D=1024 T=2048 K=4 (N=sequences or state rows, S=state columns), f32 f16 bf16 f64, channel-first channel-last "
    "first-slice last-slice strided, silu bias initial final seq_idx cu_seqlens accumulate ring indices";

static const char *parse(int direction, int count, char *const words[], cot_case *c)
{
    case_shape s = {.direction = direction,
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
        if (!set_word(&s, words[i]))
            return words[i];
    s.weight_dtype = s.state_dtype = s.dtype == COT_F64 ? COT_F64 : COT_F32;
    s.S = s.S < 0 ? s.K - 1 : s.S;
    s.N = s.N < 0 ? s.B : s.N;
    s.B = s.packing == CU_SEQLENS ? 1 : s.B;
    build(&s, c);
    return NULL;
}

/* ---- index data --------------------------------------------------------------------------------------- */

/* Sequences of up to 9 tokens, with padding between some. In 25 % of the cases sequences have up to 200 tokens. In 50 %
 * ids repeat, so that taps reach across a gap to an earlier sequence of the same id. */
static void fill_seq_idx(uint64_t rng, int32_t *data, int64_t elements)
{
    const bool returning = cot_draw_bool(&rng);
    const int64_t longest = cot_draw_below(&rng, 4) == 0 ? 200 : 9;
    int32_t next = 0;
    for (int64_t i = 0; i < elements;) {
        const int64_t length = 1 + cot_draw_below(&rng, longest);
        int32_t id = cot_draw_below(&rng, 5) == 0 ? -1 - (int32_t)cot_draw_below(&rng, 2) : next++;
        if (returning && id >= 0)
            id = (int32_t)cot_draw_below(&rng, 3);
        for (int64_t end = i + length; i < end && i < elements; i++)
            data[i] = id;
    }
}

/* Ascending from 0, with some empty sequences. In 50 % of the cases the last sequence ends at a random token,
 * not at T. */
static void fill_cu_seqlens(uint64_t rng, int32_t *data, int64_t N, int64_t T)
{
    const int64_t total = cot_draw_bool(&rng) ? T : cot_draw_below(&rng, T + 1);
    data[0] = 0;
    for (int64_t n = 1; n <= N; n++) {
        const int64_t left = total - data[n - 1];
        const int64_t length = n == N ? left : cot_draw_below(&rng, 3) == 0 ? 0 : cot_draw_below(&rng, left + 1);
        data[n] = data[n - 1] + (int32_t)length;
    }
}

/* Different rows of conv_state. 25 % of them are -1 (skipped). */
static void fill_indices(uint64_t rng, int32_t *data, int64_t B, int64_t N)
{
    const int64_t first = cot_draw_below(&rng, N > 0 ? N : 1);
    for (int64_t b = 0; b < B; b++)
        data[b] = cot_draw_below(&rng, 4) == 0 ? -1 : (int32_t)((first + N - 1 - b) % N);
}

static void fill(const cot_case *c, const char *field, int32_t *data, int64_t elements)
{
    uint64_t rng = c->seed;
    if (strcmp(field, "seq_idx") == 0) {
        fill_seq_idx(rng, data, elements);
    } else if (strcmp(field, "cu_seqlens") == 0) {
        const bool forward = c->direction == COT_CAUSAL_CONV1D_FORWARD;
        const cot_tensor *x = forward ? &((const cot_causal_conv1d_forward_args *)c->args)->x
                                      : &((const cot_causal_conv1d_backward_args *)c->args)->x;
        fill_cu_seqlens(rng, data, elements - 1, x->shape[2]);
    } else if (strcmp(field, "cache_seqlens") == 0) {
        for (int64_t b = 0; b < elements; b++)
            data[b] = cot_draw_below(&rng, 8) == 0 ? INT32_MAX : (int32_t)cot_draw_below(&rng, 60);
    } else {
        fill_indices(rng, data, elements, ((const cot_causal_conv1d_update_args *)c->args)->conv_state.shape[0]);
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
    .options_help = options_help,
    .fill = fill,
    .oracles = cot_causal_conv1d_oracles,
    .primal = primal,
    .primal_options = primal_options,
};
