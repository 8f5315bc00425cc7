/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_cases.c: the shapes, layouts and options of the cases that check, bench and the gradient check
 * run.
 *
 * A case starts as a `case_shape`: its sizes, dtypes and options by name. The families of shapes are: every
 * combination of features at small sizes; sizes around the edges of tiles, blocks and chunks, some of them 0; the
 * tile sizes of the GPU kernels; and the benchmark. */
#include "../causal_conv1d_dense_problem.h"
#include "causal_conv1d_dense_ref.h"

#include "cases/cases.h"
#include "cases/draw.h"
#include "cases/layouts.h"
#include "cases/case_words.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- case shapes ---------------------------------------------------------------------------------------- */

typedef struct case_shape {
    int direction;
    unsigned uses;
    int64_t B, Din, Dout, T, K;
    cot_layout layout, dlayout; /* of x and dx, and of y and dy */
    cot_dtype dtype, weight_dtype, state_dtype;
    bool silu, bias, initial_state, final_state, accumulate;
    bool taps_first;                              /* weights as [K,Dout,Din] */
    bool no_data_gradient, no_parameter_gradient; /* omit dx, or dweight and dbias */
    uint64_t seed;
} case_shape;

/* ---- tensors -------------------------------------------------------------------------------------------- */

/* States have the kind of layout that x has: [B,Din,K-1] in this order, or with channels innermost. */
static cot_tensor state_tensor(const case_shape *s)
{
    int64_t ignored;
    const bool last = s->layout == COT_CHANNEL_LAST || s->layout == COT_LAST_SLICE;
    return cot_tensor_with_layout(s->state_dtype, last ? COT_CHANNEL_LAST : COT_CHANNEL_FIRST, s->B, s->Din, s->K - 1,
                                  &ignored);
}

static cot_tensor token_tensor(const case_shape *s, const char *name, cot_layout layout, int64_t channels, cot_case *c)
{
    return cot_tensor_with_layout(s->dtype, layout, s->B, channels, s->T,
                                  &c->offset[cot_field_index(&cot_causal_conv1d_dense_directions[s->direction], name)]);
}

static cot_tensor weight_tensor(const case_shape *s, cot_dtype dtype)
{
    cot_tensor w = cot_tensor_contiguous(NULL, dtype, 3, (const int64_t[]){s->Dout, s->Din, s->K});
    if (s->taps_first)
        w.stride[0] = s->Din, w.stride[1] = 1, w.stride[2] = s->Dout * s->Din;
    return w;
}

/* Dtype of parameter gradients: f32, as trainers keep them, or the parameter's dtype, as autograd expects. */
static cot_dtype gradient_dtype(const case_shape *s)
{
    return s->dtype == COT_F64 || s->seed % 2 ? s->weight_dtype : COT_F32;
}

static double operations(const case_shape *s)
{
    return 2.0 * (double)s->B * (double)s->T * (double)s->K * (double)s->Din * (double)s->Dout;
}

static void forward_case(const case_shape *s, cot_case *c)
{
    cot_causal_conv1d_dense_forward_args *a = (cot_causal_conv1d_dense_forward_args *)c->args;
    COT_INIT(a);
    a->activation = s->silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
    a->x = token_tensor(s, "x", s->layout, s->Din, c);
    a->weight = weight_tensor(s, s->weight_dtype);
    if (s->bias)
        a->bias = cot_tensor_contiguous(NULL, s->weight_dtype, 1, &s->Dout);
    if (s->initial_state)
        a->initial_state = state_tensor(s);
    a->y = token_tensor(s, "y", s->dlayout, s->Dout, c);
    if (s->final_state)
        a->final_state = state_tensor(s);
    c->flops = operations(s);
}

/* A kernel that rounds g puts the same error into every output element that one value of g contributes to. Returns
 * the number of elements of an output that may share errors: it has `elements` elements, each summed over `values`
 * values of g. */
static int64_t common_errors(double elements, double values)
{
    return values > 0 && elements > values ? (int64_t)(elements / values) : 0;
}

static void set_shared_errors(const case_shape *s, cot_case *c)
{
    const cot_direction *direction = &cot_causal_conv1d_dense_directions[s->direction];
    const double taps = (double)(s->K < s->T ? s->K : s->T);
    const int64_t data_errors = common_errors((double)s->Din, (double)s->Dout * taps);
    c->shared[cot_field_index(direction, "dx")] = c->shared[cot_field_index(direction, "dinitial_state")] = data_errors;
    c->shared[cot_field_index(direction, "dweight")] =
        common_errors((double)s->Din * (double)s->K, (double)s->B * (double)s->T);
}

static void backward_case(const case_shape *s, cot_case *c)
{
    cot_causal_conv1d_dense_backward_args *a = (cot_causal_conv1d_dense_backward_args *)c->args;
    COT_INIT(a);
    a->activation = s->silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
    a->accumulate = s->accumulate;
    a->x = token_tensor(s, "x", s->layout, s->Din, c);
    a->weight = weight_tensor(s, s->weight_dtype);
    if (s->bias)
        a->bias = cot_tensor_contiguous(NULL, s->weight_dtype, 1, &s->Dout);
    a->dy = token_tensor(s, "dy", s->dlayout, s->Dout, c);
    if (s->initial_state) {
        a->initial_state = state_tensor(s);
        a->dinitial_state = a->initial_state;
    }
    if (s->final_state)
        a->dfinal_state = state_tensor(s);
    if (!s->no_data_gradient)
        a->dx = token_tensor(s, "dx", s->layout, s->Din, c);
    if (!s->no_parameter_gradient) {
        a->dweight = weight_tensor(s, gradient_dtype(s));
        if (s->bias)
            a->dbias = cot_tensor_contiguous(NULL, gradient_dtype(s), 1, &s->Dout);
    }
    if (s->silu)
        set_shared_errors(s, c);
    c->flops = (s->silu + !s->no_data_gradient + !s->no_parameter_gradient) * operations(s);
}

static void describe(const case_shape *s, cot_case *c)
{
    c->layout = cot_layout_names[s->layout];
    snprintf(c->shape, sizeof c->shape, "B%lld Din%lld Dout%lld T%lld K%lld", (long long)s->B, (long long)s->Din,
             (long long)s->Dout, (long long)s->T, (long long)s->K);
    snprintf(c->options, sizeof c->options, "w=%s%s%s%s%s%s%s%s%s", cot_dtype_name(s->weight_dtype),
             s->silu ? "+silu" : "", s->bias ? "+bias" : "", s->initial_state ? "+initial" : "",
             s->final_state ? "+final" : "", s->accumulate ? "+accumulate" : "", s->taps_first ? "+taps-first" : "",
             s->no_data_gradient ? "-dx" : "", s->no_parameter_gradient ? "-dweight" : "");
}

/* ---- families ------------------------------------------------------------------------------------------- */

static void build(const case_shape *s, cot_case *c)
{
    static void (*const builders[])(const case_shape *, cot_case *) = {forward_case, backward_case};
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

/* Draws the dtypes of parameters and states. In 50 % of the cases it is x's dtype, which tensor cores need. */
static void draw_dtypes(case_shape *s, uint64_t *state)
{
    const bool same_dtype = s->dtype == COT_F64 || cot_draw_bool(state);
    s->weight_dtype = same_dtype ? s->dtype : float_dtypes[cot_draw_below(state, 3)];
    s->state_dtype = same_dtype ? s->dtype : float_dtypes[cot_draw_below(state, 3)];
}

/* Every combination of activation, bias and states, in every dtype and layout, at sizes small enough for finite
 * differences. */
static void sweep_features(cot_case_visitor *v, int direction)
{
    uint64_t state = 21 + (uint64_t)direction;
    for (int bits = 0; bits < 16; bits++) {
        for (int number = 0; number < 4 * COT_LAYOUT_COUNT; number++) {
            case_shape s = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
            s.silu = bits & 1, s.bias = bits >> 1 & 1, s.initial_state = bits >> 2 & 1, s.final_state = bits >> 3;
            s.layout = (cot_layout)(number % COT_LAYOUT_COUNT);
            s.dlayout =
                cot_draw_below(&state, 3) == 0 ? (cot_layout)cot_draw_below(&state, COT_LAYOUT_COUNT) : s.layout;
            s.dtype = float_dtypes[number / COT_LAYOUT_COUNT];
            draw_dtypes(&s, &state);
            s.K = number == 0 ? 1 : 1 + cot_draw_below(&state, 6);
            s.T = cot_draw_below(&state, 40);
            s.B = 1 + cot_draw_below(&state, 3);
            s.Din = 1 + cot_draw_below(&state, 12);
            s.Dout = 1 + cot_draw_below(&state, 12);
            s.taps_first = cot_draw_below(&state, 3) == 0;
            s.accumulate = direction == COT_CAUSAL_CONV1D_DENSE_BACKWARD && cot_draw_bool(&state);
            s.no_data_gradient = cot_draw_below(&state, 8) == 0;
            s.no_parameter_gradient = cot_draw_below(&state, 8) == 0;
            if (number % 5 == bits % 5)
                s.uses |= COT_CASE_QUICK;
            if (direction == COT_CAUSAL_CONV1D_DENSE_BACKWARD && number == bits % 20) {
                s.Din = 1 + s.Din % 3;
                s.Dout = 1 + s.Dout % 3;
                s.T = s.T % 9;
                s.B = 1 + s.B % 2;
                s.uses |= COT_CASE_GRADIENT | COT_CASE_QUICK;
            }
            emit(v, &s);
        }
    }
}

/* Channels around multiples of tiles and blocks, times around tiles, blocks and chunks, every width, and sizes of 0. */
static void sweep_sizes(cot_case_visitor *v, int direction)
{
    static const int64_t channels[] = {1, 8, 31, 32, 33, 64, 65, 72, 127, 128, 129, 257};
    static const int64_t times[] = {1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 511, 513, 1025};
    static const int64_t widths[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 150};
    enum { TIMES = sizeof times / sizeof *times, WIDTHS = sizeof widths / sizeof *widths };
    uint64_t state = 41 + (uint64_t)direction;
    for (int number = 0; number < 5 * TIMES; number++) {
        case_shape s = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
        s.T = times[number % TIMES];
        s.K = widths[number % WIDTHS];
        s.Din = channels[cot_draw_below(&state, sizeof channels / sizeof *channels)];
        s.Dout = channels[cot_draw_below(&state, sizeof channels / sizeof *channels)];
        s.B = 1 + cot_draw_below(&state, 3);
        while (operations(&s) > 6e5) { /* limits the time that the oracle takes */
            if (s.B > 1)
                s.B--;
            else if (s.Din > s.Dout)
                s.Din = s.Din / 2;
            else if (s.Dout > 8)
                s.Dout = s.Dout / 2;
            else
                s.K = 1 + s.K / 2;
        }
        s.layout = (cot_layout)(number % COT_LAYOUT_COUNT);
        s.dlayout = cot_draw_below(&state, 4) == 0 ? (cot_layout)cot_draw_below(&state, COT_LAYOUT_COUNT) : s.layout;
        s.dtype = float_dtypes[cot_draw_below(&state, 16) == 0 ? 3 : number % 3];
        draw_dtypes(&s, &state);
        s.silu = cot_draw_bool(&state);
        s.bias = cot_draw_bool(&state);
        s.initial_state = cot_draw_bool(&state);
        s.final_state = cot_draw_bool(&state);
        s.accumulate = direction == COT_CAUSAL_CONV1D_DENSE_BACKWARD && cot_draw_bool(&state);
        if (number % 12 < 4) /* one size is 0 */
            *(int64_t *[]){&s.B, &s.Din, &s.Dout, &s.T}[number % 12] *= number >= 12;
        if (number % 5 == 0)
            s.uses |= COT_CASE_QUICK;
        emit(v, &s);
    }
}

/* For the GPU kernels only: multiples of 8 channels around the edges of their tiles, in the 16-bit dtypes. */
static void sweep_device(cot_case_visitor *v, int direction)
{
    static const int64_t channels[] = {8, 64, 72, 128, 136, 192, 256, 264};
    static const int64_t times[] = {1, 63, 64, 127, 128, 129, 200, 257};
    uint64_t state = 61 + (uint64_t)direction;
    for (int number = 0; number < 48; number++) {
        case_shape s = {.direction = direction, .uses = COT_CASE_CHECK_CUDA, .seed = cot_draw(&state)};
        s.B = 1 + cot_draw_below(&state, 3);
        s.T = times[cot_draw_below(&state, sizeof times / sizeof *times)];
        s.K = 1 + number % 8;
        s.Din = channels[cot_draw_below(&state, sizeof channels / sizeof *channels)];
        s.Dout = channels[cot_draw_below(&state, sizeof channels / sizeof *channels)];
        s.layout = s.dlayout = COT_CHANNEL_LAST;
        s.dtype = s.weight_dtype = s.state_dtype = number % 2 == 0 ? COT_BF16 : COT_F16;
        s.silu = cot_draw_bool(&state);
        s.bias = cot_draw_bool(&state);
        s.accumulate = direction == COT_CAUSAL_CONV1D_DENSE_BACKWARD && cot_draw_bool(&state);
        s.seed |= 1; /* parameter gradients have the parameter's dtype */
        emit(v, &s);
    }
}

static void bench_shapes(cot_case_visitor *v, int direction)
{
    static const struct {
        int64_t B, D, T;
        cot_dtype dtype;
        unsigned use;
        int layout; /* the first layout; the second is channel-last */
    } shapes[] = {
        {2, 512, 2048, COT_F32, COT_CASE_BENCH, COT_CHANNEL_FIRST},
        {2, 512, 2048, COT_BF16, COT_CASE_BENCH, COT_CHANNEL_FIRST},
        {1, 64, 1024, COT_BF16, COT_CASE_BENCH, COT_CHANNEL_LAST},
        {4, 2048, 4096, COT_BF16, COT_CASE_BENCH_CUDA, COT_CHANNEL_FIRST},
        {4, 2048, 4096, COT_F16, COT_CASE_BENCH_CUDA, COT_CHANNEL_LAST},
        {4, 1024, 2048, COT_BF16, COT_CASE_BENCH_CUDA, COT_CHANNEL_LAST},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int layout = shapes[i].layout; layout <= COT_CHANNEL_LAST; layout++) {
            for (int silu = 1; silu >= 0; silu--) {
                case_shape s = {.direction = direction,
                                .uses = shapes[i].use,
                                .B = shapes[i].B,
                                .Din = shapes[i].D,
                                .Dout = shapes[i].D,
                                .T = shapes[i].T,
                                .K = 4,
                                .layout = (cot_layout)layout,
                                .dlayout = (cot_layout)layout,
                                .dtype = shapes[i].dtype,
                                .weight_dtype = shapes[i].dtype,
                                .state_dtype = shapes[i].dtype,
                                .bias = true,
                                .silu = silu,
                                .seed = 41};
                emit(v, &s);
            }
        }
    }
}

static void each(bool (*visit)(void *, const cot_case *), void *context)
{
    cot_case_visitor v = {visit, context, false};
    for (int direction = COT_CAUSAL_CONV1D_DENSE_FORWARD; direction <= COT_CAUSAL_CONV1D_DENSE_BACKWARD; direction++) {
        sweep_features(&v, direction);
        sweep_sizes(&v, direction);
        sweep_device(&v, direction);
        bench_shapes(&v, direction);
    }
}

/* ---- a case from command-line words ---------------------------------------------------------------------- */

static bool set_word(case_shape *s, const char *word)
{
    static const cot_text_option sizes[] = {{"B", offsetof(case_shape, B)},       {"Din", offsetof(case_shape, Din)},
                                            {"Dout", offsetof(case_shape, Dout)}, {"T", offsetof(case_shape, T)},
                                            {"K", offsetof(case_shape, K)},       {0}};
    static const cot_text_option switches[] = {{"silu", offsetof(case_shape, silu)},
                                               {"bias", offsetof(case_shape, bias)},
                                               {"initial", offsetof(case_shape, initial_state)},
                                               {"final", offsetof(case_shape, final_state)},
                                               {"taps-first", offsetof(case_shape, taps_first)},
                                               {"accumulate", offsetof(case_shape, accumulate)},
                                               {0}};
    if (cot_parse_size(s, sizes, word) || cot_parse_flag(s, switches, word) || cot_parse_float_dtype(&s->dtype, word))
        return true;
    if (cot_parse_layout(&s->layout, word))
        return s->dlayout = s->layout, true;
    return false;
}

static const char *const options_help =
    "B=1 Din=512 Dout=512 T=2048 K=4, f32 f16 bf16 f64 (weights and states too), channel-first channel-last first-slice "
    "last-slice strided, silu bias initial final taps-first accumulate";

static const char *parse(int direction, int count, char *const words[], cot_case *c)
{
    case_shape s = {.direction = direction,
                    .uses = COT_CASE_CHECK | COT_CASE_BENCH | COT_CASE_BENCH_CUDA,
                    .B = 1,
                    .Din = 512,
                    .Dout = 512,
                    .T = 2048,
                    .K = 4,
                    .layout = COT_CHANNEL_LAST,
                    .dlayout = COT_CHANNEL_LAST,
                    .dtype = COT_F32,
                    .seed = 47};
    for (int i = 0; i < count; i++)
        if (!set_word(&s, words[i]))
            return words[i];
    s.weight_dtype = s.state_dtype = s.dtype;
    build(&s, c);
    return NULL;
}

/* ---- data ------------------------------------------------------------------------------------------------ */

/* Scales weights to variance 1/(K Din), as layers are initialised. Else sums of 1000 terms would be so large that
 * SiLU is nearly linear. */
static void prepare(const cot_case *c, double *const values[COT_MAX_FIELDS])
{
    const cot_direction *direction = &cot_causal_conv1d_dense_directions[c->direction];
    const int field = cot_field_index(direction, "weight");
    const cot_tensor *weight = cot_field_tensor(&direction->fields[field], (void *)c->args);
    const double terms = (double)(weight->shape[1] * weight->shape[2]);
    for (int64_t i = 0; values[field] != NULL && i < cot_elements(weight); i++)
        values[field][i] /= sqrt(terms > 1 ? terms : 1);
}

/* ---- gradients -------------------------------------------------------------------------------------------- */

static int primal(int direction)
{
    return direction == COT_CAUSAL_CONV1D_DENSE_BACKWARD ? COT_CAUSAL_CONV1D_DENSE_FORWARD : -1;
}

static void primal_options(int direction, const void *args, void *primal_args)
{
    (void)direction;
    ((cot_causal_conv1d_dense_forward_args *)primal_args)->activation =
        ((const cot_causal_conv1d_dense_backward_args *)args)->activation;
}

const cot_op_cases cot_causal_conv1d_dense_cases = {
    .op = &cot_causal_conv1d_dense_op,
    .each = each,
    .parse = parse,
    .options_help = options_help,
    .prepare = prepare,
    .oracles = cot_causal_conv1d_dense_oracles,
    .primal = primal,
    .primal_options = primal_options,
};
