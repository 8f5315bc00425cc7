/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_cases.c: the shapes, layouts and options that check and the gradient check run on every backend, and the inputs
 * of all cases. attention_cases_cuda.c has the cases for GPUs alone, attention_cases_bench.c those of the benchmark.
 *
 * A case is built from its parameters (attention_case_build.h). The families of cases are:
 * - the sizes of the tests of other libraries, and sizes around tile edges
 * - every feature alone and in random combinations, small enough for finite differences
 * - the primitives of blocks */
#include "attention_case_build.h"
#include "attention_ref.h"

#include "cases/draw.h"

#include <math.h>
#include <stdlib.h>

static const cot_dtype float_dtypes[] = {COT_F32, COT_BF16, COT_F16, COT_F64};

/* ---- families ----------------------------------------------------------------------------------------- */

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
                p.dtype = float_dtypes[dtype];
                const int mask = (int)((i + (size_t)(dtype + repeat)) % 3);
                p.causal = mask == 1;
                p.window = mask == 2;
                p.left = cot_draw_below(&state, 3) == 0 ? -1 : cot_draw_below(&state, 80);
                p.right = cot_draw_below(&state, 3) == 0 ? -1 : cot_draw_below(&state, 80);
                p.f32_out = number % 11 == 0;
                p.accumulate = direction == COT_ATTENTION_BACKWARD && number % 5 == 0;
                if (number % 9 == 0 && p.Tq * p.Tk < 10000)
                    p.uses |= COT_CASE_QUICK;
                attention_case_visit(v, &p);
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
                                         .dtype = float_dtypes[i % 2],
                                         .causal = i % 4 < 2,
                                         .seed = 101 + (uint64_t)i};
        attention_case_visit(v, &p);
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
            p.dtype = float_dtypes[number % 3];
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

static void sweep_features(cot_case_visitor *v, int direction)
{
    uint64_t state = 21 + (uint64_t)direction;
    const bool backward = direction == COT_ATTENTION_BACKWARD;
    for (int number = 0; number < 10 * ATTENTION_CASE_FEATURES; number++) {
        attention_case_params p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
        const int round = number / ATTENTION_CASE_FEATURES; /* 0 .. 3: one feature in each dtype; later: combinations */
        p.dtype = float_dtypes[round < 4 ? round : number % 4];
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
        attention_case_add_feature(&p, number % ATTENTION_CASE_FEATURES, &state);
        for (int more = 0; round >= 4 && more < 4; more++)
            attention_case_add_feature(&p, (int)cot_draw_below(&state, ATTENTION_CASE_FEATURES), &state);
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
        attention_case_visit(v, &p);
    }
}

/* Packed, without a sequence: all rows follow the last one. Two rows, because seed % 3 is 2 (row_count). */
static void sweep_no_sequence(cot_case_visitor *v, int direction)
{
    for (int i = 0; i < 2; i++)
        attention_case_visit(v, &(attention_case_params){.direction = direction,
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
                                   .dtype = float_dtypes[number % 3],
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
        attention_case_visit(v, &p);
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
        p.dtype = float_dtypes[number % 4];
        p.layout = (attention_layout)cot_draw_below(&state, LAYOUT_COUNT);
        p.packed = number % 5 == 4;
        p.B = p.packed ? 1 : p.B;
        p.f32_out = cot_draw_bool(&state), p.dlse = cot_draw_bool(&state), p.sink = cot_draw_bool(&state);
        p.no_lse = cot_draw_below(&state, 10) == 0, p.no_out = !p.no_lse && cot_draw_below(&state, 10) == 0;
        attention_case_visit(v, &p);
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
        p.dtype = float_dtypes[number];
        if (direction == COT_ATTENTION_MERGE) {
            p.Tk = p.d = 1, p.low_lse = true;
        } else if (number % 2 == 0) {
            p.softcap = 1.5, p.scale = 1.6;
            attention_case_visit(v, &p);
            p.softcap = p.scale = 0, p.seed = cot_draw(&state);
            p.bias = true, p.bias_axes = 4, p.Tq = 150, p.Tk = 70;
        } else if (number == 1) {
            p.B = 2, p.H = p.Hkv = 6, p.Tq = 1, p.Tk = 900, p.d = p.d_v = 128;
            p.dlse = direction == COT_ATTENTION_BACKWARD;
        } else {
            continue;
        }
        attention_case_visit(v, &p);
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
        attention_visit_cuda_cases(&v, direction);
        attention_visit_bench_cases(&v, direction);
    }
    for (int direction = COT_ATTENTION_DELTA; direction <= COT_ATTENTION_MERGE; direction++) {
        sweep_rows(&v, direction);
        attention_visit_bench_cases(&v, direction);
    }
    sweep_rare_faults(&v, COT_ATTENTION_MERGE);
    attention_visit_hopper_backward_cases(&v);
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
