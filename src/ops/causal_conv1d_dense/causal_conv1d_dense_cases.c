/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv1d_dense_cases.c: the shapes, layouts and options that check, bench and the gradient check run.
 *
 * A case begins as a `plan`: sizes and choices by name. Three families of plans: every combination of features at small
 * sizes; sizes around the edges of parts, blocks and chunks, with empty ones among them; the shapes of the
 * benchmark. */
#include "causal_conv1d_dense_problem.h"
#include "causal_conv1d_dense_ref.h"

#include "core/cases.h"
#include "core/draw.h"
#include "core/layouts.h"
#include "core/words.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- plans ---------------------------------------------------------------------------------------------- */

typedef struct plan {
    int direction;
    unsigned uses;
    int64_t B, Din, Dout, T, K;
    cot_layout layout, dlayout; /* of x and dx, and of y and dy */
    cot_dtype dtype, weight_dtype, state_dtype;
    bool silu, bias, initial_state, final_state, accumulate;
    bool taps_first;                              /* weights as [K,Dout,Din] */
    bool no_data_gradient, no_parameter_gradient; /* leave dx, or dweight and dbias, out */
    uint64_t seed;
} plan;

/* ---- tensors -------------------------------------------------------------------------------------------- */

/* States lie as x's layout suggests: [B,Din,K-1], or channels innermost. */
static cot_tensor state_tensor(const plan *p)
{
    int64_t ignored;
    const bool last = p->layout == COT_CHANNEL_LAST || p->layout == COT_LAST_SLICE;
    return cot_tensor_with_layout(p->state_dtype, last ? COT_CHANNEL_LAST : COT_CHANNEL_FIRST, p->B, p->Din, p->K - 1,
                                  &ignored);
}

static cot_tensor tokens(const plan *p, const char *name, cot_layout layout, int64_t channels, cot_case *c)
{
    return cot_tensor_with_layout(p->dtype, layout, p->B, channels, p->T,
                                  &c->offset[cot_field_index(&cot_causal_conv1d_dense_directions[p->direction], name)]);
}

static cot_tensor weights(const plan *p, cot_dtype dtype)
{
    cot_tensor w = cot_tensor_contiguous(NULL, dtype, 3, (const int64_t[]){p->Dout, p->Din, p->K});
    if (p->taps_first)
        w.stride[0] = p->Din, w.stride[1] = 1, w.stride[2] = p->Dout * p->Din;
    return w;
}

/* Parameter gradients: f32 as a trainer keeps them, or the parameter's dtype as autograd wants them. */
static cot_dtype gradient_dtype(const plan *p)
{
    return p->dtype == COT_F64 || p->seed % 2 ? p->weight_dtype : COT_F32;
}

static double products(const plan *p)
{
    return 2.0 * (double)p->B * (double)p->T * (double)p->K * (double)p->Din * (double)p->Dout;
}

static void forward_case(const plan *p, cot_case *c)
{
    cot_causal_conv1d_dense_forward_args *a = (cot_causal_conv1d_dense_forward_args *)c->args;
    COT_INIT(a);
    a->activation = p->silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
    a->x = tokens(p, "x", p->layout, p->Din, c);
    a->weight = weights(p, p->weight_dtype);
    if (p->bias)
        a->bias = cot_tensor_contiguous(NULL, p->weight_dtype, 1, &p->Dout);
    if (p->initial_state)
        a->initial_state = state_tensor(p);
    a->y = tokens(p, "y", p->dlayout, p->Dout, c);
    if (p->final_state)
        a->final_state = state_tensor(p);
    c->flops = products(p);
}

/* A kernel that rounds g gives all that one value of it goes into the same error: of an output with `elements` of them,
 * summed over `values`. */
static int64_t in_common(double elements, double values)
{
    return values > 0 && elements > values ? (int64_t)(elements / values) : 0;
}

static void share_errors(const plan *p, cot_case *c)
{
    const cot_direction *direction = &cot_causal_conv1d_dense_directions[p->direction];
    const double taps = (double)(p->K < p->T ? p->K : p->T);
    const int64_t inputs = in_common((double)p->Din, (double)p->Dout * taps);
    c->shared[cot_field_index(direction, "dx")] = c->shared[cot_field_index(direction, "dinitial_state")] = inputs;
    c->shared[cot_field_index(direction, "dweight")] =
        in_common((double)p->Din * (double)p->K, (double)p->B * (double)p->T);
}

static void backward_case(const plan *p, cot_case *c)
{
    cot_causal_conv1d_dense_backward_args *a = (cot_causal_conv1d_dense_backward_args *)c->args;
    COT_INIT(a);
    a->activation = p->silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
    a->accumulate = p->accumulate;
    a->x = tokens(p, "x", p->layout, p->Din, c);
    a->weight = weights(p, p->weight_dtype);
    if (p->bias)
        a->bias = cot_tensor_contiguous(NULL, p->weight_dtype, 1, &p->Dout);
    a->dy = tokens(p, "dy", p->dlayout, p->Dout, c);
    if (p->initial_state) {
        a->initial_state = state_tensor(p);
        a->dinitial_state = a->initial_state;
    }
    if (p->final_state)
        a->dfinal_state = state_tensor(p);
    if (!p->no_data_gradient)
        a->dx = tokens(p, "dx", p->layout, p->Din, c);
    if (!p->no_parameter_gradient) {
        a->dweight = weights(p, gradient_dtype(p));
        if (p->bias)
            a->dbias = cot_tensor_contiguous(NULL, gradient_dtype(p), 1, &p->Dout);
    }
    if (p->silu)
        share_errors(p, c);
    c->flops = (p->silu + !p->no_data_gradient + !p->no_parameter_gradient) * products(p);
}

static void describe(const plan *p, cot_case *c)
{
    c->layout = cot_layout_names[p->layout];
    snprintf(c->shape, sizeof c->shape, "B%lld Din%lld Dout%lld T%lld K%lld", (long long)p->B, (long long)p->Din,
             (long long)p->Dout, (long long)p->T, (long long)p->K);
    snprintf(c->options, sizeof c->options, "w=%s%s%s%s%s%s%s%s%s", cot_dtype_name(p->weight_dtype),
             p->silu ? "+silu" : "", p->bias ? "+bias" : "", p->initial_state ? "+initial" : "",
             p->final_state ? "+final" : "", p->accumulate ? "+accumulate" : "", p->taps_first ? "+taps-first" : "",
             p->no_data_gradient ? "-dx" : "", p->no_parameter_gradient ? "-dweight" : "");
}

/* ---- families ------------------------------------------------------------------------------------------- */

static void build(const plan *p, cot_case *c)
{
    static void (*const builders[])(const plan *, cot_case *) = {forward_case, backward_case};
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

/* Dtypes of parameters and states: every other time x's own, which is what tensor cores multiply. */
static void draw_dtypes(plan *p, uint64_t *state)
{
    const bool own = p->dtype == COT_F64 || cot_draw_bool(state);
    p->weight_dtype = own ? p->dtype : float_dtypes[cot_draw_below(state, 3)];
    p->state_dtype = own ? p->dtype : float_dtypes[cot_draw_below(state, 3)];
}

/* Every combination of activation, bias and states, in every dtype and layout, at sizes that finite differences can
 * afford. */
static void sweep_features(cot_case_visitor *v, int direction)
{
    uint64_t state = 21 + (uint64_t)direction;
    for (int bits = 0; bits < 16; bits++) {
        for (int number = 0; number < 4 * COT_LAYOUT_COUNT; number++) {
            plan p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
            p.silu = bits & 1, p.bias = bits >> 1 & 1, p.initial_state = bits >> 2 & 1, p.final_state = bits >> 3;
            p.layout = (cot_layout)(number % COT_LAYOUT_COUNT);
            p.dlayout =
                cot_draw_below(&state, 3) == 0 ? (cot_layout)cot_draw_below(&state, COT_LAYOUT_COUNT) : p.layout;
            p.dtype = float_dtypes[number / COT_LAYOUT_COUNT];
            draw_dtypes(&p, &state);
            p.K = number == 0 ? 1 : 1 + cot_draw_below(&state, 6);
            p.T = cot_draw_below(&state, 40);
            p.B = 1 + cot_draw_below(&state, 3);
            p.Din = 1 + cot_draw_below(&state, 12);
            p.Dout = 1 + cot_draw_below(&state, 12);
            p.taps_first = cot_draw_below(&state, 3) == 0;
            p.accumulate = direction == COT_CAUSAL_CONV1D_DENSE_BACKWARD && cot_draw_bool(&state);
            p.no_data_gradient = cot_draw_below(&state, 8) == 0;
            p.no_parameter_gradient = cot_draw_below(&state, 8) == 0;
            if (number % 5 == bits % 5)
                p.uses |= COT_CASE_QUICK;
            if (direction == COT_CAUSAL_CONV1D_DENSE_BACKWARD && number == bits % 20) {
                p.Din = 1 + p.Din % 3;
                p.Dout = 1 + p.Dout % 3;
                p.T = p.T % 9;
                p.B = 1 + p.B % 2;
                p.uses |= COT_CASE_GRADIENT | COT_CASE_QUICK;
            }
            emit(v, &p);
        }
    }
}

/* Channels around whole parts and blocks of them, time around parts, blocks and chunks, every width, and nothing at
 * all. */
static void sweep_sizes(cot_case_visitor *v, int direction)
{
    static const int64_t channels[] = {1, 8, 31, 32, 33, 64, 65, 72, 127, 128, 129, 257};
    static const int64_t times[] = {1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 511, 513, 1025};
    static const int64_t widths[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 150};
    enum { TIMES = sizeof times / sizeof *times, WIDTHS = sizeof widths / sizeof *widths };
    uint64_t state = 41 + (uint64_t)direction;
    for (int number = 0; number < 5 * TIMES; number++) {
        plan p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
        p.T = times[number % TIMES];
        p.K = widths[number % WIDTHS];
        p.Din = channels[cot_draw_below(&state, sizeof channels / sizeof *channels)];
        p.Dout = channels[cot_draw_below(&state, sizeof channels / sizeof *channels)];
        p.B = 1 + cot_draw_below(&state, 3);
        while (products(&p) > 6e5) { /* the oracle's time */
            if (p.B > 1)
                p.B--;
            else if (p.Din > p.Dout)
                p.Din = p.Din / 2;
            else if (p.Dout > 8)
                p.Dout = p.Dout / 2;
            else
                p.K = 1 + p.K / 2;
        }
        p.layout = (cot_layout)(number % COT_LAYOUT_COUNT);
        p.dlayout = cot_draw_below(&state, 4) == 0 ? (cot_layout)cot_draw_below(&state, COT_LAYOUT_COUNT) : p.layout;
        p.dtype = float_dtypes[cot_draw_below(&state, 16) == 0 ? 3 : number % 3];
        draw_dtypes(&p, &state);
        p.silu = cot_draw_bool(&state);
        p.bias = cot_draw_bool(&state);
        p.initial_state = cot_draw_bool(&state);
        p.final_state = cot_draw_bool(&state);
        p.accumulate = direction == COT_CAUSAL_CONV1D_DENSE_BACKWARD && cot_draw_bool(&state);
        if (number % 12 < 4) /* nothing of one kind */
            *(int64_t *[]){&p.B, &p.Din, &p.Dout, &p.T}[number % 12] *= number >= 12;
        if (number % 5 == 0)
            p.uses |= COT_CASE_QUICK;
        emit(v, &p);
    }
}

/* Sizes that a GPU's tiles want, in multiples of 8 channels, in the 16-bit dtypes: for its kernels alone. */
static void sweep_device(cot_case_visitor *v, int direction)
{
    static const int64_t channels[] = {8, 64, 72, 128, 136, 192, 256, 264};
    static const int64_t times[] = {1, 63, 64, 127, 128, 129, 200, 257};
    uint64_t state = 61 + (uint64_t)direction;
    for (int number = 0; number < 48; number++) {
        plan p = {.direction = direction, .uses = COT_CASE_CHECK_CUDA, .seed = cot_draw(&state)};
        p.B = 1 + cot_draw_below(&state, 3);
        p.T = times[cot_draw_below(&state, sizeof times / sizeof *times)];
        p.K = 1 + number % 8;
        p.Din = channels[cot_draw_below(&state, sizeof channels / sizeof *channels)];
        p.Dout = channels[cot_draw_below(&state, sizeof channels / sizeof *channels)];
        p.layout = p.dlayout = COT_CHANNEL_LAST;
        p.dtype = p.weight_dtype = p.state_dtype = number % 2 == 0 ? COT_BF16 : COT_F16;
        p.silu = cot_draw_bool(&state);
        p.bias = cot_draw_bool(&state);
        p.accumulate = direction == COT_CAUSAL_CONV1D_DENSE_BACKWARD && cot_draw_bool(&state);
        p.seed |= 1; /* gradients of the parameters' own dtype */
        emit(v, &p);
    }
}

static void bench_shapes(cot_case_visitor *v, int direction)
{
    static const struct {
        int64_t B, D, T;
        cot_dtype dtype;
        unsigned use;
        int layout; /* the first of the two */
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
                plan p = {.direction = direction,
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
                emit(v, &p);
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

/* ---- a case from words ---------------------------------------------------------------------------------- */

static bool set_word(plan *p, const char *word)
{
    static const cot_text_option sizes[] = {{"B", offsetof(plan, B)},       {"Din", offsetof(plan, Din)},
                                            {"Dout", offsetof(plan, Dout)}, {"T", offsetof(plan, T)},
                                            {"K", offsetof(plan, K)},       {0}};
    static const cot_text_option switches[] = {{"silu", offsetof(plan, silu)},
                                               {"bias", offsetof(plan, bias)},
                                               {"initial", offsetof(plan, initial_state)},
                                               {"final", offsetof(plan, final_state)},
                                               {"taps-first", offsetof(plan, taps_first)},
                                               {"accumulate", offsetof(plan, accumulate)},
                                               {0}};
    if (cot_parse_size(p, sizes, word) || cot_parse_flag(p, switches, word) || cot_parse_float_dtype(&p->dtype, word))
        return true;
    if (cot_parse_layout(&p->layout, word))
        return p->dlayout = p->layout, true;
    return false;
}

static const char *const options_help =
    "B=1 Din=512 Dout=512 T=2048 K=4, f32 f16 bf16 f64 (weights and states too), channel-first channel-last first-slice "
    "last-slice strided, silu bias initial final taps-first accumulate";

static const char *parse(int direction, int count, char *const words[], cot_case *c)
{
    plan p = {.direction = direction,
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
        if (!set_word(&p, words[i]))
            return words[i];
    p.weight_dtype = p.state_dtype = p.dtype;
    build(&p, c);
    return NULL;
}

/* ---- data ------------------------------------------------------------------------------------------------ */

static void fill(const cot_case *c, const char *field, int32_t *data, int64_t elements)
{
    (void)c, (void)field, (void)data, (void)elements; /* the op has no index data */
}

/* Weights of variance 1/(K Din), as layers begin with: sums of a thousand terms would be far out on SiLU's straight
 * arms. */
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
    .fill = fill,
    .prepare = prepare,
    .oracles = cot_causal_conv1d_dense_oracles,
    .primal = primal,
    .primal_options = primal_options,
};
