/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout_cases.c: the shapes, layouts and options of the cases that check, bench and the gradient check run.
 *
 * A case is built from a `case_shape`: its sizes and options by name. There are four families: numbers of columns
 * around the edges of the kernels' tiles, numbers of rows around them, every combination of features at small sizes,
 * and the shapes of the benchmark. */
#include "../dropout_problem.h"
#include "dropout_ref.h"

#include "cases/cases.h"
#include "cases/draw.h"
#include "cases/case_words.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- shapes ------------------------------------------------------------------------------------------- */

typedef enum layout_kind {
    CONTIGUOUS,
    SLICE,      /* parts of longer rows, from an odd element on */
    SWAPPED,    /* rank 3 with swapped leading axes: rows at irregular distances */
    TRANSPOSED, /* the elements of a row are R apart */
    STRIDED,    /* every second column of every third row */
    BROADCAST,  /* all rows are the same memory, for inputs other than the first */
    LAYOUT_COUNT
} layout_kind;

static const char *const layout_names[] = {"contiguous", "slice", "swapped", "transposed", "strided", "broadcast"};

typedef enum mask_kind { GENERATED, FROM_MEMORY, BYTES, BITS, MASK_COUNT } mask_kind;

static const char *const mask_names[] = {"generated", "memory", "mask", "mask_bits"};

static const char *const activation_names[] = {"none", "silu", "relu", "gelu_tanh", "gelu_erf"};

enum { ACTIVATION_COUNT = 5 };

typedef struct case_shape {
    int direction;
    unsigned uses;
    int64_t R, D;
    layout_kind layout, other_layout; /* of x or dy; of residual, y, mask and dx */
    cot_dtype dtype, bias_dtype;
    cot_activation activation;
    mask_kind mask;
    double p, scale;
    bool bias, residual, mask_out, mask_bits_out, accumulate;
    bool no_output, no_dbias; /* leave out y or dx; leave out dbias */
    bool always_pass_x;       /* backward: pass x and bias without an activation too */
    uint64_t seed;
} case_shape;

/* ---- tensors ------------------------------------------------------------------------------------------ */

/* The size of the leading axis of a rank-3 tensor with R rows. */
static int64_t outer_rows(int64_t R)
{
    return R % 3 == 0 ? 3 : R % 2 == 0 ? 2 : 1;
}

/* A tensor [R,columns], or with rank3 [outer,R/outer,columns]. All tensors of a call have the same rank. */
static cot_tensor make_tensor(cot_dtype dtype, layout_kind layout, bool rank3, int64_t R, int64_t columns,
                              int64_t *offset)
{
    const int64_t outer = outer_rows(R), inner = outer > 0 ? R / outer : 0;
    cot_tensor t = cot_tensor_contiguous(NULL, dtype, 2, (const int64_t[]){R, columns});
    if (layout == SLICE) {
        t.stride[0] = columns + 3;
        *offset = 1;
    } else if (layout == TRANSPOSED) {
        t.stride[0] = 1, t.stride[1] = R;
    } else if (layout == STRIDED) {
        t.stride[0] = 3 * (2 * columns + 1), t.stride[1] = 2;
    } else if (layout == BROADCAST) {
        t.stride[0] = 0;
    }
    if (!rank3)
        return t;
    t.rank = 3;
    t.shape[0] = outer, t.shape[1] = inner, t.shape[2] = columns;
    t.stride[2] = t.stride[1];
    t.stride[1] = layout == SWAPPED ? outer * columns : t.stride[0];
    t.stride[0] = layout == SWAPPED ? columns : inner * t.stride[0];
    return t;
}

static cot_tensor case_tensor(const case_shape *p, const char *name, cot_dtype dtype, int64_t columns,
                              layout_kind layout, cot_case *c)
{
    const bool rank3 = p->layout == SWAPPED || p->other_layout == SWAPPED;
    return make_tensor(dtype, layout, rank3, p->R, columns,
                       &c->offset[cot_field_index(&cot_dropout_directions[p->direction], name)]);
}

/* Replaces BROADCAST for tensors that may not have repeated elements. These are the outputs, and the first input:
 * repeated rounding errors do not average out, as the error rule of check assumes. */
static layout_kind no_broadcast(layout_kind layout)
{
    return layout == BROADCAST ? CONTIGUOUS : layout;
}

static cot_tensor vector(cot_dtype dtype, int64_t size)
{
    return cot_tensor_contiguous(NULL, dtype, 1, &size);
}

static void forward_case(const case_shape *p, cot_case *c)
{
    cot_dropout_forward_args *a = (cot_dropout_forward_args *)c->args;
    const int64_t groups = (p->D + 7) / 8;
    COT_INIT(a);
    a->activation = p->activation;
    a->p = p->p;
    a->scale = p->scale;
    a->seed = p->seed * 0x9e3779b97f4a7c15u;
    a->offset = p->seed;
    a->x = case_tensor(p, "x", p->dtype, p->D, no_broadcast(p->layout), c);
    if (p->bias)
        a->bias = vector(p->bias_dtype, p->D);
    if (p->residual)
        a->residual = case_tensor(p, "residual", p->dtype, p->D, p->other_layout, c);
    if (p->mask == BYTES)
        a->mask = case_tensor(p, "mask", COT_U8, p->D, p->other_layout, c);
    if (p->mask == BITS)
        a->mask_bits = case_tensor(p, "mask_bits", COT_U8, groups, p->other_layout, c);
    if (p->mask == FROM_MEMORY)
        a->seed_tensor = a->offset_tensor = vector(COT_I32, 2);
    if (!p->no_output)
        a->y = case_tensor(p, "y", p->dtype, p->D, no_broadcast(p->other_layout), c);
    if (p->mask_out)
        a->mask_out = case_tensor(p, "mask_out", COT_U8, p->D, no_broadcast(p->layout), c);
    if (p->mask_bits_out)
        a->mask_bits_out = case_tensor(p, "mask_bits_out", COT_U8, groups, no_broadcast(p->layout), c);
    c->flops = 4.0 * (double)p->R * (double)p->D;
}

static void backward_case(const case_shape *p, cot_case *c)
{
    cot_dropout_backward_args *a = (cot_dropout_backward_args *)c->args;
    const bool with_x = p->activation != COT_ACTIVATION_NONE || p->always_pass_x;
    COT_INIT(a);
    a->activation = p->activation;
    a->accumulate = p->accumulate;
    a->p = p->p;
    a->scale = p->scale;
    a->seed = p->seed * 0x9e3779b97f4a7c15u;
    a->offset = p->seed;
    a->dy = case_tensor(p, "dy", p->dtype, p->D, no_broadcast(p->layout), c);
    if (with_x)
        a->x = case_tensor(p, "x", p->dtype, p->D, p->other_layout, c);
    if (with_x && p->bias)
        a->bias = vector(p->bias_dtype, p->D);
    if (p->mask == BYTES)
        a->mask = case_tensor(p, "mask", COT_U8, p->D, p->other_layout, c);
    if (p->mask == BITS)
        a->mask_bits = case_tensor(p, "mask_bits", COT_U8, (p->D + 7) / 8, p->other_layout, c);
    if (p->mask == FROM_MEMORY)
        a->seed_tensor = a->offset_tensor = vector(COT_I32, 2);
    if (!p->no_output)
        a->dx = case_tensor(p, "dx", p->dtype, p->D, no_broadcast(p->other_layout), c);
    if (p->bias && !p->no_dbias) /* f32 as in a trainer, or the parameter's dtype as in autograd */
        a->dbias = vector(p->dtype == COT_F64 || p->seed % 2 ? p->bias_dtype : COT_F32, p->D);
    c->flops = 3.0 * (double)p->R * (double)p->D;
}

static void describe(const case_shape *p, cot_case *c)
{
    c->layout = layout_names[p->layout];
    snprintf(c->shape, sizeof c->shape, "R%lld D%lld", (long long)p->R, (long long)p->D);
    const bool backward = p->direction == COT_DROPOUT_BACKWARD;
    snprintf(c->options, sizeof c->options, "%s%s%s p=%g %s%s%s%s%s%s", activation_names[p->activation],
             p->bias ? "+bias" : "", p->residual && !backward ? "+residual" : "", p->p, mask_names[p->mask],
             p->scale > 0 ? "+scale" : "", p->mask_out && !backward ? "+mask_out" : "",
             p->mask_bits_out && !backward ? "+bits_out" : "", p->accumulate && backward ? "+accumulate" : "",
             p->no_output ? (backward ? "-dx" : "-y") : "");
}

/* ---- families ----------------------------------------------------------------------------------------- */

static void build(const case_shape *p, cot_case *c)
{
    static void (*const builders[])(const case_shape *, cot_case *) = {forward_case, backward_case};
    *c = (cot_case){.direction = p->direction, .uses = p->uses, .seed = p->seed};
    builders[p->direction](p, c);
    describe(p, c);
}

static void emit(cot_case_visitor *v, const case_shape *p)
{
    cot_case c;
    build(p, &c);
    cot_visit_case(v, &c);
}

static const cot_dtype float_dtypes[] = {COT_F32, COT_F16, COT_BF16, COT_F64};

static const double probabilities[] = {0.1, 0.5, 0.25, 0.9, 0.01, 0, 1, 1e-6, 0.99};

static void draw_features(case_shape *p, uint64_t *state)
{
    p->bias_dtype = p->dtype == COT_F64 ? COT_F64 : float_dtypes[cot_draw_below(state, 3)];
    p->activation = (cot_activation)cot_draw_below(state, ACTIVATION_COUNT);
    p->mask = (mask_kind)cot_draw_below(state, MASK_COUNT);
    p->p = probabilities[cot_draw_below(state, sizeof probabilities / sizeof *probabilities)];
    if (p->p == 1e-6 && (p->mask == BYTES || p->mask == BITS))
        p->p = 0.2; /* c = 1.000001 would move every tie of a 16-bit sum in the same direction */
    p->scale = cot_draw_below(state, 5) == 0 ? 1.25 : 0;
    p->bias = cot_draw_bool(state);
    p->residual = cot_draw_bool(state);
    p->mask_out = cot_draw_below(state, 3) == 0;
    p->mask_bits_out = cot_draw_below(state, 3) == 0;
    p->accumulate = cot_draw_bool(state);
    p->no_output = cot_draw_below(state, 12) == 0;
    p->no_dbias = cot_draw_below(state, 8) == 0;
    p->always_pass_x = cot_draw_below(state, 4) == 0;
}

/* Numbers of columns around every power of two, and some others. */
static void sweep_columns(cot_case_visitor *v, int direction)
{
    static const int64_t extra_columns[] = {3, 5, 6, 7, 9, 10, 13, 24, 100, 136, 700, 1000, 1100, 3000, 5000};
    uint64_t state = 1 + (uint64_t)direction;
    int64_t columns[80];
    int count = 0;
    for (int64_t power = 1; power <= 4096; power *= 2)
        for (int64_t D = power - 1; D <= power + 1; D++)
            columns[count++] = D;
    for (size_t i = 0; i < sizeof extra_columns / sizeof *extra_columns; i++)
        columns[count++] = extra_columns[i];
    for (int number = 0; number < 9 * count; number++) {
        case_shape p = {
            .direction = direction, .uses = COT_CASE_CHECK, .D = columns[number / 9], .seed = cot_draw(&state)};
        p.R = 1 + cot_draw_below(&state, p.D > 600 ? 12 : 70);
        p.layout = (layout_kind)(number % LAYOUT_COUNT);
        p.other_layout = cot_draw_below(&state, 3) == 0 ? (layout_kind)cot_draw_below(&state, LAYOUT_COUNT) : p.layout;
        p.dtype = float_dtypes[cot_draw_below(&state, 16) == 0 ? 3 : number % 3];
        draw_features(&p, &state);
        if (number % 9 == number / 9 % 9)
            p.uses |= COT_CASE_QUICK;
        emit(v, &p);
    }
}

/* Many rows, for the edges of tiles and for long sums of dbias. */
static void sweep_rows(cot_case_visitor *v, int direction)
{
    static const int64_t rows[] = {0, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 500, 1023, 2049, 5000};
    uint64_t state = 11 + (uint64_t)direction;
    for (size_t i = 0; i < 6 * sizeof rows / sizeof *rows; i++) {
        case_shape p = {.direction = direction, .uses = COT_CASE_CHECK, .R = rows[i / 6], .seed = cot_draw(&state)};
        p.D = 1 + cot_draw_below(&state, p.R > 600 ? 80 : 300);
        p.layout = p.other_layout = (layout_kind)(i % LAYOUT_COUNT);
        p.dtype = float_dtypes[i % 3];
        draw_features(&p, &state);
        if (i % 6 == i / 6 % 6)
            p.uses |= COT_CASE_QUICK;
        emit(v, &p);
    }
}

/* Every combination of activation, mask source, bias and residual in every dtype, at sizes small enough for finite
 * differences. A ReLU with |z| < 0.002 would have no valid difference quotient: with this seed there is none. */
static void sweep_features(cot_case_visitor *v, int direction)
{
    uint64_t state = 21 + (uint64_t)direction;
    int number = 0;
    for (int flags = 0; flags < 4; flags++)
        for (int activation = 0; activation < ACTIVATION_COUNT; activation++)
            for (int mask = 0; mask < MASK_COUNT; mask++)
                for (int dtype = 0; dtype < 4; dtype++, number++) {
                    case_shape p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
                    p.dtype = float_dtypes[dtype];
                    p.layout = p.other_layout = (layout_kind)(number % LAYOUT_COUNT);
                    draw_features(&p, &state);
                    p.bias = flags & 1, p.residual = flags >> 1;
                    p.activation = (cot_activation)activation;
                    p.mask = (mask_kind)mask;
                    p.R = 1 + cot_draw_below(&state, 20);
                    p.D = 1 + cot_draw_below(&state, 40);
                    if (dtype == number / 4 % 4)
                        p.uses |= COT_CASE_QUICK;
                    if (direction == COT_DROPOUT_BACKWARD && dtype == number / 4 % 4) {
                        p.R = 1 + p.R % 5;
                        p.D = 1 + p.D % 11;
                        p.p = probabilities[number % 4];
                        p.always_pass_x = p.bias = true;
                        p.no_output = p.no_dbias = false;
                        p.uses |= COT_CASE_GRADIENT;
                    }
                    emit(v, &p);
                }
}

/* clang-format off */
static void bench_shapes(cot_case_visitor *v, int direction)
{
    enum { CPU = COT_CASE_BENCH, GPU = COT_CASE_BENCH_CUDA };
    static const struct {
        unsigned uses;
        int64_t R, D;
        cot_dtype dtype;
        cot_activation activation;
        mask_kind mask;
    } shapes[] = {
        /* much larger than the caches: memory-bound */
        {CPU | GPU, 32768, 4096, COT_F32, COT_ACTIVATION_NONE, GENERATED},
        {CPU | GPU, 32768, 4096, COT_BF16, COT_ACTIVATION_NONE, GENERATED},
        {GPU, 32768, 4096, COT_F16, COT_ACTIVATION_NONE, GENERATED},
        {GPU, 32768, 4096, COT_BF16, COT_ACTIVATION_NONE, BYTES},
        {GPU, 32768, 4096, COT_BF16, COT_ACTIVATION_NONE, BITS},
        {GPU, 32768, 4096, COT_BF16, COT_ACTIVATION_SILU, GENERATED},
        {GPU, 32768, 4096, COT_BF16, COT_ACTIVATION_GELU_TANH, GENERATED},
        {GPU, 32768, 4096, COT_BF16, COT_ACTIVATION_GELU_ERF, GENERATED},
        {GPU, 32768, 4097, COT_BF16, COT_ACTIVATION_NONE, GENERATED},
        {GPU, 32768, 4097, COT_BF16, COT_ACTIVATION_NONE, BYTES},
        {GPU, 32768, 1024, COT_BF16, COT_ACTIVATION_NONE, GENERATED},
        {CPU, 8192, 1024, COT_F32, COT_ACTIVATION_NONE, GENERATED},
        {CPU, 8192, 1024, COT_F32, COT_ACTIVATION_NONE, BYTES},
        {CPU, 8192, 1024, COT_F32, COT_ACTIVATION_GELU_TANH, GENERATED},
        {CPU, 8192, 1024, COT_F32, COT_ACTIVATION_GELU_ERF, GENERATED},
        {CPU | GPU, 8192, 1024, COT_BF16, COT_ACTIVATION_NONE, GENERATED},
        {CPU, 8192, 1024, COT_BF16, COT_ACTIVATION_NONE, BYTES},
        {CPU, 8192, 1024, COT_BF16, COT_ACTIVATION_NONE, BITS},
        {CPU, 8192, 1024, COT_BF16, COT_ACTIVATION_GELU_TANH, GENERATED},
        {CPU, 8192, 1024, COT_F16, COT_ACTIVATION_NONE, GENERATED},
        /* in the L2 cache of a CPU: compute-bound */
        {CPU, 256, 1024, COT_F32, COT_ACTIVATION_NONE, GENERATED},
        {CPU, 256, 1024, COT_BF16, COT_ACTIVATION_NONE, GENERATED},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        case_shape p = {.direction = direction,
                  .uses = shapes[i].uses,
                  .R = shapes[i].R,
                  .D = shapes[i].D,
                  .dtype = shapes[i].dtype,
                  .bias_dtype = COT_F32,
                  .activation = shapes[i].activation,
                  .mask = shapes[i].mask,
                  .p = 0.1,
                  .bias = true,
                  .residual = true,
                  .seed = 41};
        emit(v, &p);
    }
}
/* clang-format on */

static void visit_cases(bool (*visit)(void *, const cot_case *), void *context)
{
    cot_case_visitor v = {visit, context, false};
    for (int direction = COT_DROPOUT_FORWARD; direction <= COT_DROPOUT_BACKWARD; direction++) {
        sweep_features(&v, direction);
        sweep_columns(&v, direction);
        sweep_rows(&v, direction);
        bench_shapes(&v, direction);
    }
}

/* ---- a case from the command line --------------------------------------------------------------------- */

static bool set_option(case_shape *p, const char *text)
{
    static const cot_text_option sizes[] = {{"R", offsetof(case_shape, R)}, {"D", offsetof(case_shape, D)}, {0}};
    static const cot_text_option reals[] = {{"p", offsetof(case_shape, p)}, {0}};
    static const cot_text_option switches[] = {{"bias", offsetof(case_shape, bias)},
                                               {"residual", offsetof(case_shape, residual)},
                                               {"mask_out", offsetof(case_shape, mask_out)},
                                               {"mask_bits_out", offsetof(case_shape, mask_bits_out)},
                                               {"accumulate", offsetof(case_shape, accumulate)},
                                               {0}};
    const char *value;
    int64_t *size = cot_text_option_member(p, sizes, text, &value);
    if (size != NULL) { /* accepts R=1e6 too */
        char *end;
        const double number = strtod(value, &end);
        if (end == value || *end != '\0' || !(number >= 0 && number <= INT32_MAX && number == (double)(int64_t)number))
            return false;
        return *size = (int64_t)number, true;
    }
    if (cot_parse_real(p, reals, text) || cot_parse_flag(p, switches, text) || cot_parse_float_dtype(&p->dtype, text))
        return true;
    for (int layout = 0; layout < LAYOUT_COUNT; layout++)
        if (strcmp(text, layout_names[layout]) == 0)
            return p->layout = p->other_layout = (layout_kind)layout, true;
    for (int mask = 0; mask < MASK_COUNT; mask++)
        if (strcmp(text, mask_names[mask]) == 0)
            return p->mask = (mask_kind)mask, true;
    for (int activation = 0; activation < ACTIVATION_COUNT; activation++)
        if (strcmp(text, activation_names[activation]) == 0)
            return p->activation = (cot_activation)activation, true;
    return false;
}

static const char *const options_help =
    "R=8192 D=1024 p=0.1, f32 f16 bf16 f64, contiguous slice swapped transposed strided broadcast, none silu relu "
    "gelu_tanh gelu_erf, generated memory mask mask_bits, bias residual mask_out mask_bits_out accumulate";

static const char *parse(int direction, int count, char *const options[], cot_case *c)
{
    case_shape p = {.direction = direction,
                    .uses = COT_CASE_CHECK | COT_CASE_BENCH | COT_CASE_BENCH_CUDA,
                    .R = 8192,
                    .D = 1024,
                    .p = 0.1,
                    .dtype = COT_F32,
                    .seed = 48};
    for (int i = 0; i < count; i++)
        if (!set_option(&p, options[i]))
            return options[i];
    p.bias_dtype = p.dtype == COT_F64 ? COT_F64 : COT_F32;
    build(&p, c);
    return NULL;
}

/* ---- integer data --------------------------------------------------------------------------------------- */

/* Masks: all 8 bits of a byte are random, including those that have no effect. Seeds and offsets: random words, whose
 * sums carry from the low to the high word. */
static void fill(const cot_case *c, const char *field, int32_t *data, int64_t elements)
{
    uint64_t state = c->seed;
    const bool mask = strcmp(field, "mask") == 0 || strcmp(field, "mask_bits") == 0;
    for (int64_t i = 0; i < elements; i++)
        data[i] = mask ? (int32_t)(cot_draw(&state) >> 56) : (int32_t)(uint32_t)cot_draw(&state);
}

/* ---- gradients ---------------------------------------------------------------------------------------- */

static int primal(int direction)
{
    return direction == COT_DROPOUT_BACKWARD ? COT_DROPOUT_FORWARD : -1;
}

static void primal_options(int direction, const void *args, void *primal_args)
{
    const cot_dropout_backward_args *from = args;
    cot_dropout_forward_args *to = primal_args;
    (void)direction;
    to->activation = from->activation;
    to->p = from->p;
    to->scale = from->scale;
    to->seed = from->seed;
    to->offset = from->offset;
}

const cot_op_cases cot_dropout_cases = {
    .op = &cot_dropout_op,
    .each = visit_cases,
    .parse = parse,
    .options_help = options_help,
    .fill = fill,
    .oracles = cot_dropout_oracles,
    .primal = primal,
    .primal_options = primal_options,
};
