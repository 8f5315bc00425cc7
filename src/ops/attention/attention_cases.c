/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_cases.c: the shapes, layouts and options that check, bench and the gradient check run.
 *
 * A case begins as a `plan`: sizes and choices by name. Families: the sizes of the field's tests and around the tiles'
 * edges; every feature by itself and in random combinations, small enough for finite differences; the primitives of
 * blocks; and the shapes of the benchmark. */
#include "attention_problem.h"
#include "attention_ref.h"

#include "core/cases.h"
#include "core/draw.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- plans -------------------------------------------------------------------------------------------- */

typedef enum layout_kind {
    BTHD,    /* [B,T,H,d] */
    BHTD,    /* [B,H,T,d] */
    SLICE,   /* rows cut out of wider ones, from an odd element on: q, k and v of one projection */
    STRIDED, /* every second column */
    LAYOUT_COUNT
} layout_kind;

static const char *const layout_names[] = {"bthd", "bhtd", "slice", "strided"};

typedef struct plan {
    int direction;
    unsigned uses;
    int64_t B, H, Hkv, Tq, Tk, d, dv;
    layout_kind layout;
    cot_dtype dtype;
    bool f32_out; /* out, dq, dk, dv in f32 */
    bool causal, window;
    int64_t left, right;
    double softcap, scale, dropout;
    bool dropout_state; /* seed and offset from memory too */
    bool sink, alibi, bias;
    unsigned bias_axes; /* bit n: axis n is broadcast */
    bool packed, seqused_q, seqused_k;
    bool mixed; /* of the benchmark's packed sequences every other one is three times as long as the others */
    int64_t q_begin, q_length, k_begin, k_length;
    bool dlse, delta, accumulate, any_order;
    bool no_dq, no_dkv, no_out, no_lse;
    uint64_t seed;
} plan;

enum { CHECKED = COT_CASE_CHECK | COT_CASE_CHECK_CUDA };

/* ---- tensors ------------------------------------------------------------------------------------------ */

/* A [B,T,H,d] tensor, packed [T,H,d]; T counts the rows of one sequence, packed those of all. */
static cot_tensor laid_out(const plan *p, cot_case *c, const char *name, cot_dtype dtype, int64_t T, int64_t H,
                           int64_t d)
{
    cot_tensor t = cot_tensor_contiguous(NULL, dtype, 4, (const int64_t[]){p->B, T, H, d});
    const int64_t pitch = 3 * H * d + 5;
    switch (p->layout) {
    case BHTD: t.stride[0] = H * T * d, t.stride[1] = d, t.stride[2] = T * d; break;
    case SLICE:
        t.stride[0] = T * pitch, t.stride[1] = pitch;
        c->offset[cot_field_index(&cot_attention_directions[p->direction], name)] = 1;
        break;
    case STRIDED:
        for (int axis = 0; axis < 4; axis++)
            t.stride[axis] *= 2;
        break;
    default: break;
    }
    if (p->packed) {
        t.rank = 3;
        memmove(t.shape, t.shape + 1, 3 * sizeof *t.shape);
        memmove(t.stride, t.stride + 1, 3 * sizeof *t.stride);
        t.shape[3] = t.stride[3] = 0;
    }
    return t;
}

/* With packing, as many rows as a sequence has on average for each, and a few that belong to none. */
static int64_t rows(const plan *p, int64_t T)
{
    return p->packed ? p->B * T + (int64_t)(p->seed % 3) : T;
}

static cot_tensor queries(const plan *p, cot_case *c, const char *name, cot_dtype dtype, int64_t d)
{
    return laid_out(p, c, name, dtype, rows(p, p->Tq), p->H, d);
}

static cot_tensor keys(const plan *p, cot_case *c, const char *name, cot_dtype dtype, int64_t d)
{
    return laid_out(p, c, name, dtype, rows(p, p->Tk), p->Hkv, d);
}

static cot_tensor statistic(const plan *p)
{
    const cot_dtype dtype = p->dtype == COT_F64 ? COT_F64 : COT_F32;
    const int64_t shape[3] = {p->B, p->H, rows(p, p->Tq)};
    return cot_tensor_contiguous(NULL, dtype, 3 - p->packed, shape + p->packed);
}

static cot_tensor vector(cot_dtype dtype, int64_t size)
{
    return cot_tensor_contiguous(NULL, dtype, 1, &size);
}

static cot_dtype output_dtype(const plan *p)
{
    return p->f32_out && p->dtype != COT_F64 ? COT_F32 : p->dtype;
}

/* sink, slopes and bias: f32, or the inputs' dtype. */
static cot_dtype parameter_dtype(const plan *p)
{
    return p->dtype == COT_F64 || p->seed % 2 ? p->dtype : COT_F32;
}

/* The longest sequence that may occur: twice the average. */
static int64_t longest(const plan *p, int64_t T)
{
    return p->packed ? 2 * T : T;
}

static cot_tensor bias_of(const plan *p)
{
    int64_t shape[4] = {p->B, p->H, longest(p, p->Tq), longest(p, p->Tk)};
    for (int axis = 0; axis < 4; axis++)
        if (p->bias_axes >> axis & 1)
            shape[axis] = 1;
    return cot_tensor_contiguous(NULL, parameter_dtype(p), 4, shape);
}

/* The members that forward and backward have in common. */
#define SET_COMMON(p, a)                                                                                     \
    do {                                                                                                     \
        COT_INIT(a);                                                                                         \
        (a)->causal = (p)->causal;                                                                           \
        (a)->window = (p)->window;                                                                           \
        (a)->window_left = (p)->window ? (p)->left : 0;                                                      \
        (a)->window_right = (p)->window ? (p)->right : 0;                                                    \
        (a)->scale = (p)->scale;                                                                             \
        (a)->softcap = (p)->softcap;                                                                         \
        (a)->dropout_p = (p)->dropout;                                                                       \
        (a)->dropout_seed = (p)->seed;                                                                       \
        (a)->dropout_offset = (p)->seed >> 7;                                                                \
        if ((p)->dropout_state)                                                                              \
            (a)->dropout_seed_memory = (a)->dropout_offset_memory = vector(COT_I32, 2);                      \
        (a)->max_seqlen_q = (p)->packed ? longest(p, (p)->Tq) : 0;                                           \
        (a)->max_seqlen_k = (p)->packed ? longest(p, (p)->Tk) : 0;                                           \
        (a)->q_begin = (p)->q_begin, (a)->q_length = (p)->q_length;                                          \
        (a)->k_begin = (p)->k_begin, (a)->k_length = (p)->k_length;                                          \
        (a)->q = queries(p, c, "q", (p)->dtype, (p)->d);                                                     \
        (a)->k = keys(p, c, "k", (p)->dtype, (p)->d);                                                        \
        (a)->v = keys(p, c, "v", (p)->dtype, (p)->dv);                                                       \
        if ((p)->packed)                                                                                     \
            (a)->cu_seqlens_q = (a)->cu_seqlens_k = vector(COT_I32, (p)->B + 1);                             \
        if ((p)->seqused_q)                                                                                  \
            (a)->seqused_q = vector(COT_I32, (p)->B);                                                        \
        if ((p)->seqused_k)                                                                                  \
            (a)->seqused_k = vector(COT_I32, (p)->B);                                                        \
        if ((p)->sink)                                                                                       \
            (a)->sink = vector(parameter_dtype(p), (p)->H);                                                  \
        if ((p)->alibi)                                                                                      \
            (a)->alibi_slopes = cot_tensor_contiguous(NULL, parameter_dtype(p), 1 + ((p)->seed % 4 == 0),    \
                                                      (p)->seed % 4 == 0 ? (const int64_t[]){(p)->B, (p)->H} \
                                                                         : (const int64_t[]){(p)->H});       \
        if ((p)->bias)                                                                                       \
            (a)->bias = bias_of(p);                                                                          \
    } while (0)

/* Visible pairs of a query and a key of one head of a sequence of that length. */
static double pairs_of(const plan *p, int64_t Tq, int64_t Tk)
{
    const attention_sizes z = {.left = p->window && p->left >= 0 ? p->left : ATTENTION_UNBOUNDED,
                               .right = p->causal                    ? 0
                                        : p->window && p->right >= 0 ? p->right
                                                                     : ATTENTION_UNBOUNDED};
    const attention_sequence s = {.Tq = Tq, .Tk = Tk, .diagonal = Tk - Tq};
    double pairs = 0;
    for (int64_t i = 0; i < Tq; i++) {
        const attention_span span = attention_keys_of(&z, &s, i);
        pairs += span.end > span.first ? (double)(span.end - span.first) : 0;
    }
    return pairs;
}

/* Of all; packed sequences taken as of average length. */
static double visible_pairs(const plan *p)
{
    const double each = p->mixed ? (pairs_of(p, p->Tq / 2, p->Tk / 2) + pairs_of(p, p->Tq * 3 / 2, p->Tk * 3 / 2)) / 2
                                 : pairs_of(p, p->Tq, p->Tk);
    return each * (double)p->B * (double)p->H;
}

static void forward_case(const plan *p, cot_case *c)
{
    cot_attention_forward_args *a = (cot_attention_forward_args *)c->args;
    SET_COMMON(p, a);
    if (!p->no_out)
        a->out = queries(p, c, "out", output_dtype(p), p->dv);
    if (!p->no_lse)
        a->lse = statistic(p);
    c->flops = 2 * (double)(p->d + p->dv) * visible_pairs(p);
}

/* Of a row of dk or dv: the elements that stand for one in the norm rule. All columns of a row have the errors of its P
 * in common. P varies like exp of a unit normal from pair to pair, so that n of them count for (sum P^2)^2 / sum P^4 =
 * n e^-4 errors of their own; fewer than there are columns where a key is seen by few queries. (Over 100 seeds of B1 H2/1
 * T384/256 d33/17 causal, f32, the error's norm over dv's last 15 keys was 0.4 to 1.9 times the scalar kernel's, its
 * mean below 1, and over whole blocks of 4096 elements 0.6 to 1.25 times.) */
static int64_t elements_of_one_error(const plan *p, int64_t columns)
{
    const double rows = (double)p->B * (double)p->Hkv * (double)p->Tk;
    const double errors = rows > 0 ? visible_pairs(p) / rows / exp(4) : 0;
    return errors >= (double)columns ? 1 : errors <= 1 ? columns : (int64_t)ceil((double)columns / errors);
}

static void backward_case(const plan *p, cot_case *c)
{
    cot_attention_backward_args *a = (cot_attention_backward_args *)c->args;
    SET_COMMON(p, a);
    a->accumulate = p->accumulate;
    a->allow_nondeterminism = p->any_order;
    a->lse = statistic(p);
    if (p->delta) {
        a->delta = statistic(p);
    } else {
        a->out = queries(p, c, "out", output_dtype(p), p->dv);
        if (p->dlse)
            a->dlse = statistic(p);
    }
    a->dout = queries(p, c, "dout", p->dtype, p->dv);
    if (!p->no_dq) {
        a->dq = queries(p, c, "dq", output_dtype(p), p->d);
        c->any_order[cot_field_index(&cot_attention_directions[p->direction], "dq")] = p->any_order;
    }
    if (!p->no_dkv) {
        a->dk = keys(p, c, "dk", output_dtype(p), p->d);
        a->dv = keys(p, c, "dv", output_dtype(p), p->dv);
        c->shared[cot_field_index(&cot_attention_directions[p->direction], "dk")] = elements_of_one_error(p, p->d);
        c->shared[cot_field_index(&cot_attention_directions[p->direction], "dv")] = elements_of_one_error(p, p->dv);
    }
    if (p->sink)
        a->dsink = a->sink;
    if (p->bias)
        a->dbias = a->bias;
    c->flops = 2 * (double)(3 * p->d + 2 * p->dv) * visible_pairs(p);
}

static void delta_case(const plan *p, cot_case *c)
{
    cot_attention_delta_args *a = (cot_attention_delta_args *)c->args;
    COT_INIT(a);
    a->out = queries(p, c, "out", output_dtype(p), p->dv);
    a->dout = queries(p, c, "dout", p->dtype, p->dv);
    if (p->dlse)
        a->dlse = statistic(p);
    a->delta = statistic(p);
    c->flops = 2 * (double)p->dv * (double)p->B * (double)p->H * (double)p->Tq;
}

static void merge_case(const plan *p, cot_case *c)
{
    cot_attention_merge_args *a = (cot_attention_merge_args *)c->args;
    COT_INIT(a);
    a->out_a = queries(p, c, "out_a", p->dtype, p->dv);
    a->out_b = queries(p, c, "out_b", output_dtype(p), p->dv);
    a->lse_a = a->lse_b = statistic(p);
    if (p->sink)
        a->sink = vector(parameter_dtype(p), p->H);
    if (!p->no_out)
        a->out = queries(p, c, "out", output_dtype(p), p->dv);
    if (!p->no_lse)
        a->lse = statistic(p);
    c->flops = 3 * (double)p->dv * (double)p->B * (double)p->H * (double)p->Tq;
}

static void add_text(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void add_text(char *text, size_t size, const char *format, ...)
{
    va_list arguments;
    const size_t length = strlen(text);
    va_start(arguments, format);
    vsnprintf(text + length, size - length, format, arguments);
    va_end(arguments);
}

static void describe(const plan *p, cot_case *c)
{
    char *o = c->options;
    const size_t size = sizeof c->options;
    c->layout = layout_names[p->layout];
    snprintf(c->shape, sizeof c->shape, "B%lld H%lld/%lld T%lld/%lld d%lld/%lld", (long long)p->B, (long long)p->H,
             (long long)p->Hkv, (long long)p->Tq, (long long)p->Tk, (long long)p->d, (long long)p->dv);
    snprintf(o, size, "%s", p->causal ? "causal" : "full");
    if (p->window)
        add_text(o, size, "+window%lld,%lld", (long long)p->left, (long long)p->right);
    if (p->softcap > 0)
        add_text(o, size, "+softcap%g", p->softcap);
    if (p->scale != 0)
        add_text(o, size, "+scale%g", p->scale);
    if (p->dropout > 0)
        add_text(o, size, "+dropout%g", p->dropout);
    if (p->bias)
        add_text(o, size, "+bias%x", p->bias_axes);
    if (p->q_length > 0 || p->k_length > 0)
        add_text(o, size, "+block");
    const struct {
        bool set;
        const char *name;
    } switches[] = {{p->sink, "+sink"},          {p->alibi, "+alibi"},
                    {p->packed, "+packed"},      {p->mixed, "+mixed"},
                    {p->seqused_q, "+usedq"},    {p->seqused_k, "+usedk"},
                    {p->f32_out, "+f32out"},     {p->dlse, "+dlse"},
                    {p->delta, "+delta"},        {p->accumulate, "+accumulate"},
                    {p->no_dq, "-dq"},           {p->no_dkv, "-dkv"},
                    {p->no_out, "-out"},         {p->no_lse, "-lse"},
                    {p->any_order, "+any-order"}};
    for (size_t i = 0; i < sizeof switches / sizeof *switches; i++)
        if (switches[i].set)
            add_text(o, size, "%s", switches[i].name);
}

/* ---- families ----------------------------------------------------------------------------------------- */

typedef struct visitor {
    bool (*visit)(void *context, const cot_case *);
    void *context;
    bool stopped;
} visitor;

static void build(const plan *p, cot_case *c)
{
    static void (*const builders[])(const plan *, cot_case *) = {forward_case, backward_case, delta_case, merge_case};
    /* In the benchmark the seed's last bit says what `fill` cannot know: whether lengths are mixed. */
    const uint64_t seed = p->uses & CHECKED ? p->seed : (p->seed & ~(uint64_t)1) | p->mixed;
    *c = (cot_case){.direction = p->direction, .uses = p->uses, .seed = seed};
    builders[p->direction](p, c);
    describe(p, c);
}

static void emit(visitor *v, const plan *p)
{
    if (v->stopped)
        return;
    cot_case c;
    build(p, &c);
    v->stopped = !v->visit(v->context, &c);
}

static const cot_dtype float_dtypes[] = {COT_F32, COT_BF16, COT_F16, COT_F64};

/* The field's shapes, and those around the edges of tiles of 16, 32, 64 and 128 rows. */
static void sweep_sizes(visitor *v, int direction)
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
            const bool small =
                lengths[i][0] * lengths[i][1] < 2500; /* the others take seconds: scalar kernels are slow */
            const int turns = small ? 2 : 1;
            for (int turn = 0; turn < turns; turn++, number++) {
                plan p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
                const int64_t *size = columns[(i + (size_t)(3 * turn + dtype)) % (sizeof columns / sizeof *columns)];
                p.Tq = lengths[i][0], p.Tk = lengths[i][1];
                p.d = size[0], p.dv = size[1];
                p.B = 1 + small;
                p.H = p.Tq * p.Tk < 20000 ? 6 : 2;
                p.Hkv = p.H / (cot_draw_bool(&state) ? 1 : cot_draw_bool(&state) ? 2 : p.H);
                p.layout = (layout_kind)(number % 7 == 6 ? STRIDED : number % 3);
                p.dtype = float_dtypes[dtype];
                const int mask = (int)((i + (size_t)(dtype + turn)) % 3);
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

/* 1024 and its neighbours, too long for more than a few. */
static void sweep_long(visitor *v, int direction)
{
    static const int64_t lengths[][2] = {{1024, 1024}, {1023, 1024}, {1024, 1023}, {2049, 700}};
    for (int i = 0; i < 8; i += 3) {
        const plan p = {.direction = direction,
                        .uses = COT_CASE_CHECK,
                        .B = 1,
                        .H = 1,
                        .Hkv = 1,
                        .Tq = lengths[i / 2][0],
                        .Tk = lengths[i / 2][1],
                        .d = i < 4 ? 64 : 128,
                        .dv = i < 4 ? 64 : 128,
                        .dtype = float_dtypes[i % 2],
                        .causal = i % 4 < 2,
                        .seed = 101 + (uint64_t)i};
        emit(v, &p);
    }
}

/* One feature by itself (0 .. FEATURES-1), each on its own number. */
enum { FEATURES = 16 };

static void add_feature(plan *p, int feature, uint64_t *state)
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
    case 12: p->dv = 1 + cot_draw_below(state, 2 * p->d); break;
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

static void sweep_features(visitor *v, int direction)
{
    uint64_t state = 21 + (uint64_t)direction;
    const bool backward = direction == COT_ATTENTION_BACKWARD;
    for (int number = 0; number < 10 * FEATURES; number++) {
        plan p = {.direction = direction, .uses = COT_CASE_CHECK, .seed = cot_draw(&state)};
        const int round = number / FEATURES; /* 0 .. 3: one feature in each dtype; then combinations */
        p.dtype = float_dtypes[round < 4 ? round : number % 4];
        const bool gradient = backward && p.dtype == COT_F64;
        p.B = 1 + cot_draw_below(&state, 3);
        p.Hkv = 1 + cot_draw_below(&state, 2);
        p.H = p.Hkv * (1 + cot_draw_below(&state, 3));
        p.Tq = gradient ? 1 + cot_draw_below(&state, 5) : 1 + cot_draw_below(&state, 150);
        p.Tk = gradient ? 1 + cot_draw_below(&state, 7) : 1 + cot_draw_below(&state, 150);
        p.d = gradient ? 1 + cot_draw_below(&state, 3) : 8 * (1 + cot_draw_below(&state, 12));
        p.dv = p.d;
        if (gradient)
            p.B = 1 + cot_draw_below(&state, 2), p.H = p.Hkv;
        if (cot_draw_bool(&state))
            p.Tk = p.Tq;
        p.layout = (layout_kind)cot_draw_below(&state, LAYOUT_COUNT);
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

/* Logits of +-1e4 and rows that see nothing, with a sink and without. */
static void sweep_extremes(visitor *v, int direction)
{
    uint64_t state = 41 + (uint64_t)direction;
    for (int number = 0; number < 24; number++) {
        plan p = {.direction = direction,
                  .uses = COT_CASE_CHECK | COT_CASE_QUICK,
                  .B = 2,
                  .H = 2,
                  .Hkv = 1,
                  .Tq = 70,
                  .Tk = 45,
                  .d = 64,
                  .dv = 64,
                  .dtype = float_dtypes[number % 3],
                  .layout = BTHD,
                  .seed = cot_draw(&state)};
        p.causal = number / 3 % 2;
        p.sink = number / 6 % 2;
        if (number < 12)
            p.scale = number % 2 ? 400 : -400; /* times q.k, of order 8 with tails of 30 */
        else
            p.Tk = number < 18 ? 33 : 0, p.causal = true;
        emit(v, &p);
    }
}

static void sweep_rows(visitor *v, int direction)
{
    uint64_t state = 51 + (uint64_t)direction;
    for (int number = 0; number < 40; number++) {
        plan p = {.direction = direction, .uses = COT_CASE_CHECK | COT_CASE_QUICK, .seed = cot_draw(&state)};
        p.B = cot_draw_below(&state, 4), p.H = p.Hkv = 1 + cot_draw_below(&state, 5);
        p.Tq = cot_draw_below(&state, 90), p.dv = 1 + cot_draw_below(&state, 140);
        p.Tk = p.d = 1;
        p.dtype = float_dtypes[number % 4];
        p.layout = (layout_kind)cot_draw_below(&state, LAYOUT_COUNT);
        p.packed = number % 5 == 4;
        p.B = p.packed ? 1 : p.B;
        p.f32_out = cot_draw_bool(&state), p.dlse = cot_draw_bool(&state), p.sink = cot_draw_bool(&state);
        p.no_lse = cot_draw_below(&state, 10) == 0, p.no_out = !p.no_lse && cot_draw_below(&state, 10) == 0;
        emit(v, &p);
    }
}

/* What the kernels on tensor cores of a GPU serve, at the field's lengths. */
static void sweep_cuda(visitor *v, int direction)
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
                plan p = {.direction = direction, .uses = COT_CASE_CHECK_CUDA, .seed = cot_draw(&state)};
                p.Tq = lengths[i][0], p.Tk = lengths[i][1];
                const bool large = p.Tq * p.Tk > 60000; /* the reference takes its time */
                if (large && (i + d + (size_t)causal) % 2 == 0)
                    continue;
                p.B = large ? 1 : 1 + number % 2, p.H = large ? 2 : 6;
                p.Hkv = number % 3 == 0 ? p.H : number % 3 == 1 ? p.H / 2 : 1;
                p.d = p.dv = columns[d];
                p.dtype = number / 2 % 2 == 0 ? COT_BF16 : COT_F16;
                p.layout =
                    p.Tq * p.Tk == 1 ? BTHD : (layout_kind)(number % 3); /* a slice of a row would begin anywhere */
                p.causal = causal;
                p.any_order = direction == COT_ATTENTION_BACKWARD && number % 4 == 3;
                p.accumulate = direction == COT_ATTENTION_BACKWARD && number % 5 == 4;
                p.f32_out = number % 7 == 6;
                p.dlse = direction == COT_ATTENTION_BACKWARD && number % 6 == 5;
                p.scale = number % 11 == 10 ? -0.1 : 0;
                if (number % 9 == 0 && p.Tq * p.Tk < 20000)
                    p.uses |= COT_CASE_QUICK;
                emit(v, &p);
            }
}

/* The features over several tiles of those kernels: each by itself in every size of a head, then some at a time. */
static void sweep_tiles_cuda(visitor *v, int direction)
{
    enum { SIZES = 8, KINDS = 9 };
    static const int64_t columns[][SIZES][2] = {
        {{64, 64}, {128, 128}, {256, 256}, {192, 128}, {96, 96}, {40, 72}, {192, 192}, {64, 200}},
        {{64, 64}, {128, 128}, {96, 96}, {40, 24}, {128, 64}, {64, 128}, {8, 72}, {120, 104}}};
    const bool backward = direction == COT_ATTENTION_BACKWARD;
    uint64_t state = 501 + (uint64_t)direction;
    for (int number = 0; number < (KINDS + 3) * SIZES; number++) {
        plan p = {.direction = direction, .uses = COT_CASE_CHECK_CUDA, .seed = cot_draw(&state)};
        const int64_t *size = columns[backward][number % SIZES];
        unsigned kinds = number / SIZES < KINDS ? 1u << number / SIZES : (unsigned)cot_draw_below(&state, 1 << KINDS);
        p.B = 1 + cot_draw_below(&state, 3), p.Hkv = 1 + cot_draw_below(&state, 2);
        p.H = p.Hkv * (1 + cot_draw_below(&state, 2));
        p.Tq = 1 + cot_draw_below(&state, 420), p.Tk = 1 + cot_draw_below(&state, 420);
        if (cot_draw_bool(&state))
            p.Tk = p.Tq;
        p.d = size[0], p.dv = size[1];
        p.dtype = cot_draw_bool(&state) ? COT_BF16 : COT_F16;
        p.layout = cot_draw_bool(&state) ? BTHD : BHTD;
        p.causal = kinds & 1 || cot_draw_below(&state, 4) == 0;
        if (kinds & 6) { /* to the left, to the right, to both sides */
            p.window = true;
            p.left = kinds & 2 ? cot_draw_below(&state, 200) : -1;
            p.right = p.causal ? 0 : kinds & 4 ? cot_draw_below(&state, 100) : -1;
        }
        p.softcap =
            kinds & 8 ? (const double[]){1.5, 8, 20}[cot_draw_below(&state, 3)] : 0;      /* tanh far, either, near */
        p.scale = kinds & 16 ? (cot_draw_bool(&state) ? -0.1 : backward ? 0.3 : 0.2) : 0; /* f16: see the README */
        p.sink = kinds & 32;
        p.packed = kinds & 64;
        p.seqused_q = kinds & 128 && cot_draw_bool(&state);
        p.seqused_k = kinds & 128 && !(p.seqused_q && cot_draw_bool(&state));
        if (kinds & 256 && !p.packed && !p.sink) {
            p.q_begin = cot_draw_below(&state, 300), p.q_length = p.Tq + p.q_begin + cot_draw_below(&state, 200);
            p.k_begin = cot_draw_below(&state, 300), p.k_length = p.Tk + p.k_begin + cot_draw_below(&state, 200);
        }
        if (backward) {
            p.any_order = cot_draw_bool(&state);
            p.accumulate = cot_draw_below(&state, 6) == 0;
            p.dlse = cot_draw_below(&state, 3) == 0;
        } else {
            p.no_lse = cot_draw_below(&state, 12) == 0;
            p.no_out = !p.no_lse && cot_draw_below(&state, 12) == 0;
        }
        emit(v, &p);
    }
}

/* Every feature, and combinations, in 16 bits at the sizes that tensor cores serve: aligned rows and others. */
static void sweep_features_cuda(visitor *v, int direction)
{
    static const int64_t columns[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}, {96, 96}, {72, 200}};
    uint64_t state = 401 + (uint64_t)direction;
    const bool backward = direction == COT_ATTENTION_BACKWARD;
    for (int number = 0; number < 8 * FEATURES; number++) {
        plan p = {.direction = direction, .uses = COT_CASE_CHECK_CUDA, .seed = cot_draw(&state)};
        const int round = number / FEATURES; /* 0, 1: one feature; then combinations */
        const int64_t *size = columns[(number + round) % (int)(sizeof columns / sizeof *columns)];
        p.dtype = number / 2 % 2 == round % 2 ? COT_BF16 : COT_F16;
        p.B = 1 + cot_draw_below(&state, 3);
        p.Hkv = 1 + cot_draw_below(&state, 2);
        p.H = p.Hkv * (1 + cot_draw_below(&state, 3));
        p.Tq = 1 + cot_draw_below(&state, 200);
        p.Tk = cot_draw_bool(&state) ? p.Tq : 1 + cot_draw_below(&state, 300);
        p.d = size[0], p.dv = size[1];
        p.layout = (layout_kind)(number % 4 == 3 ? cot_draw_below(&state, LAYOUT_COUNT) : cot_draw_below(&state, 2));
        add_feature(&p, number % FEATURES, &state);
        for (int more = 0; round >= 2 && more < 3; more++)
            add_feature(&p, (int)cot_draw_below(&state, FEATURES), &state);
        if (p.dv != size[1]) /* feature 12 draws any */
            p.dv = 8 * (1 + cot_draw_below(&state, 32));
        p.delta = backward && cot_draw_below(&state, 6) == 0;
        p.dlse = p.dlse && backward && !p.delta;
        p.accumulate = backward && cot_draw_below(&state, 4) == 0;
        p.no_dq = backward && cot_draw_below(&state, 10) == 0;
        p.no_dkv = backward && !p.no_dq && cot_draw_below(&state, 10) == 0;
        emit(v, &p);
    }
}

/* The setting of FlashAttention-3's paper: 16k tokens, H d = 2048. */
static void bench_cuda(visitor *v, int direction)
{
    for (int64_t d = 64; d <= 256; d *= 2)
        for (int causal = 0; causal < 2; causal++)
            for (int any_order = 0; any_order < 1 + (direction == COT_ATTENTION_BACKWARD); any_order++)
                for (int64_t T = 512; T <= 16384; T *= 2) {
                    plan p = {.direction = direction, .uses = COT_CASE_BENCH_CUDA, .seed = 61};
                    p.B = 16384 / T, p.H = p.Hkv = 2048 / d, p.Tq = p.Tk = T;
                    p.d = p.dv = d;
                    p.dtype = COT_BF16;
                    p.causal = causal;
                    p.any_order = any_order;
                    emit(v, &p);
                }
}

/* What features cost, beside the entries of bench_cuda without them; head sizes between. */
static void bench_features_cuda(visitor *v, int direction)
{
    static const struct {
        int64_t B, H, Hkv, T, d, dv;
        cot_dtype dtype;
        bool causal, sink, packed, mixed;
        int64_t left; /* 0 = no window */
        double softcap;
    } shapes[] = {
        {1, 16, 16, 16384, 128, 128, COT_F16, true, false, false, false, 0, 0},
        {1, 16, 16, 16384, 128, 128, COT_BF16, true, false, false, false, 1024, 0},
        {4, 16, 16, 4096, 128, 128, COT_BF16, true, false, false, false, 0, 30},
        {4, 16, 16, 4096, 128, 128, COT_BF16, true, true, false, false, 0, 0},
        {4, 16, 2, 4096, 128, 128, COT_BF16, true, false, false, false, 0, 0},
        {4, 16, 16, 4096, 128, 128, COT_BF16, true, false, true, false, 0, 0},
        {4, 16, 16, 4096, 128, 128, COT_BF16, true, false, true, true, 0, 0},
        {32, 32, 32, 512, 64, 64, COT_BF16, true, false, true, false, 0, 0},
        {32, 32, 32, 512, 64, 64, COT_BF16, true, false, true, true, 0, 0},
        {4, 16, 16, 4096, 192, 128, COT_BF16, true, false, false, false, 0, 0},
        {4, 16, 16, 4096, 192, 192, COT_BF16, true, false, false, false, 0, 0},
        {4, 16, 16, 4096, 96, 96, COT_BF16, true, false, false, false, 0, 0},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const plan p = {.direction = direction,
                        .uses = COT_CASE_BENCH_CUDA,
                        .B = shapes[i].B,
                        .H = shapes[i].H,
                        .Hkv = shapes[i].Hkv,
                        .Tq = shapes[i].T,
                        .Tk = shapes[i].T,
                        .d = shapes[i].d,
                        .dv = shapes[i].dv,
                        .dtype = shapes[i].dtype,
                        .causal = shapes[i].causal,
                        .window = shapes[i].left > 0,
                        .left = shapes[i].left,
                        .softcap = shapes[i].softcap,
                        .sink = shapes[i].sink,
                        .packed = shapes[i].packed,
                        .mixed = shapes[i].mixed,
                        .any_order = direction == COT_ATTENTION_BACKWARD,
                        .seed = shapes[i].mixed ? 61 : 60};
        emit(v, &p);
    }
}

static void bench_shapes(visitor *v, int direction)
{
    static const struct {
        int64_t B, H, Hkv, T, d;
        cot_dtype dtype;
        bool causal;
        int64_t left; /* 0 = no window */
        bool packed;
    } shapes[] = {
        {1, 8, 8, 2048, 128, COT_BF16, true, 0, false}, {1, 8, 8, 2048, 128, COT_F16, true, 0, false},
        {1, 8, 8, 2048, 128, COT_F32, true, 0, false},  {1, 8, 8, 2048, 128, COT_BF16, false, 0, false},
        {1, 8, 8, 2048, 128, COT_F32, false, 0, false}, {1, 16, 16, 2048, 64, COT_BF16, true, 0, false},
        {1, 8, 2, 2048, 128, COT_BF16, true, 0, false}, {1, 4, 4, 2048, 256, COT_BF16, true, 0, false},
        {1, 8, 8, 8192, 128, COT_BF16, true, 0, false}, {1, 8, 8, 8192, 128, COT_BF16, true, 1024, false},
        {4, 8, 8, 512, 128, COT_BF16, true, 0, false},  {4, 8, 8, 512, 128, COT_BF16, true, 0, true},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const plan p = {.direction = direction,
                        .uses = COT_CASE_BENCH,
                        .B = shapes[i].B,
                        .H = shapes[i].H,
                        .Hkv = shapes[i].Hkv,
                        .Tq = shapes[i].T,
                        .Tk = shapes[i].T,
                        .d = shapes[i].d,
                        .dv = shapes[i].d,
                        .dtype = shapes[i].dtype,
                        .causal = shapes[i].causal,
                        .window = shapes[i].left > 0,
                        .left = shapes[i].left,
                        .packed = shapes[i].packed,
                        .seed = 60};
        emit(v, &p);
    }
}

static void bench_rows(visitor *v, int direction)
{
    for (int number = 0; number < 4; number++) {
        const plan p = {.direction = direction,
                        .uses = COT_CASE_BENCH,
                        .B = 1,
                        .H = 8,
                        .Hkv = 8,
                        .Tq = number < 2 ? 2048 : 8192,
                        .Tk = 1,
                        .d = 1,
                        .dv = 128,
                        .dtype = number % 2 == 0 ? COT_BF16 : COT_F32,
                        .seed = 62};
        emit(v, &p);
    }
}

static void each(bool (*visit)(void *, const cot_case *), void *context)
{
    visitor v = {visit, context, false};
    for (int direction = COT_ATTENTION_FORWARD; direction <= COT_ATTENTION_BACKWARD; direction++) {
        sweep_features(&v, direction);
        sweep_extremes(&v, direction);
        sweep_sizes(&v, direction);
        sweep_long(&v, direction);
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
}

/* ---- a case from words -------------------------------------------------------------------------------- */

static bool set_number(plan *p, const char *name, size_t length, const char *value)
{
    static const struct {
        const char *name;
        size_t offset;
        bool real;
    } numbers[] = {{"B", offsetof(plan, B), false},
                   {"H", offsetof(plan, H), false},
                   {"Hkv", offsetof(plan, Hkv), false},
                   {"T", offsetof(plan, Tq), false},
                   {"Tq", offsetof(plan, Tq), false},
                   {"Tk", offsetof(plan, Tk), false},
                   {"d", offsetof(plan, d), false},
                   {"dv", offsetof(plan, dv), false},
                   {"left", offsetof(plan, left), false},
                   {"right", offsetof(plan, right), false},
                   {"softcap", offsetof(plan, softcap), true},
                   {"scale", offsetof(plan, scale), true},
                   {"dropout", offsetof(plan, dropout), true}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (strlen(numbers[i].name) != length || strncmp(numbers[i].name, name, length) != 0)
            continue;
        char *end;
        if (numbers[i].real) {
            *(double *)((char *)p + numbers[i].offset) = strtod(value, &end);
            return end != value && *end == '\0';
        }
        const long long number = strtoll(value, &end, 10);
        if (end == value || *end != '\0' || number < 0 || number > INT32_MAX)
            return false;
        *(int64_t *)((char *)p + numbers[i].offset) = number;
        p->window = p->window || strcmp(numbers[i].name, "left") == 0 || strcmp(numbers[i].name, "right") == 0;
        return true;
    }
    return false;
}

static bool set_choice(plan *p, const char *word)
{
    static const struct {
        const char *word;
        size_t offset;
    } switches[] = {{"causal", offsetof(plan, causal)},
                    {"sink", offsetof(plan, sink)},
                    {"alibi", offsetof(plan, alibi)},
                    {"bias", offsetof(plan, bias)},
                    {"packed", offsetof(plan, packed)},
                    {"mixed", offsetof(plan, mixed)},
                    {"usedq", offsetof(plan, seqused_q)},
                    {"usedk", offsetof(plan, seqused_k)},
                    {"dlse", offsetof(plan, dlse)},
                    {"delta", offsetof(plan, delta)},
                    {"accumulate", offsetof(plan, accumulate)},
                    {"f32out", offsetof(plan, f32_out)},
                    {"any-order", offsetof(plan, any_order)}};
    for (size_t i = 0; i < sizeof switches / sizeof *switches; i++)
        if (strcmp(word, switches[i].word) == 0)
            return *(bool *)((char *)p + switches[i].offset) = true;
    for (int layout = 0; layout < LAYOUT_COUNT; layout++)
        if (strcmp(word, layout_names[layout]) == 0)
            return p->layout = (layout_kind)layout, true;
    for (int i = 0; i < 4; i++)
        if (strcmp(word, cot_dtype_name(float_dtypes[i])) == 0)
            return p->dtype = float_dtypes[i], true;
    return strcmp(word, "full") == 0;
}

static const char *const words_help =
    "B=1 H=8 Hkv=8 T=2048 (or Tq= Tk=) d=128 dv=128 left=1024 right=0 softcap=30 scale=0.1 dropout=0.1, f32 f16 bf16 f64, "
    "bthd bhtd slice strided, causal sink alibi bias packed mixed usedq usedk dlse delta accumulate f32out any-order";

static const char *parse(int direction, int count, char *const words[], cot_case *c)
{
    plan p = {.direction = direction,
              .uses = COT_CASE_CHECK | COT_CASE_BENCH | COT_CASE_BENCH_CUDA,
              .B = 1,
              .H = 8,
              .Hkv = -1,
              .Tq = 2048,
              .Tk = -1,
              .d = 128,
              .dv = -1,
              .left = -1,
              .right = -1,
              .dtype = COT_F32,
              .seed = 63};
    for (int i = 0; i < count; i++) {
        const char *equals = strchr(words[i], '=');
        if (equals != NULL ? !set_number(&p, words[i], (size_t)(equals - words[i]), equals + 1)
                           : !set_choice(&p, words[i]))
            return words[i];
    }
    p.Hkv = p.Hkv < 0 ? p.H : p.Hkv;
    p.Tk = p.Tk < 0 ? p.Tq : p.Tk;
    p.dv = p.dv < 0 ? p.d : p.dv;
    build(&p, c);
    return NULL;
}

/* ---- inputs that are not just random ------------------------------------------------------------------- */

/* Ascending from 0, some sequences empty, none longer than `most`, in every other case short of `rows_in_all`. */
static void fill_cu_seqlens(uint64_t state, int32_t *data, int64_t B, int64_t rows_in_all, int64_t most)
{
    data[0] = 0;
    for (int64_t b = 1; b <= B; b++) {
        const int64_t left = rows_in_all - data[b - 1], bound = left < most ? left : most;
        const int64_t length = cot_draw_below(&state, 4) == 0 ? 0 : b == B ? bound : cot_draw_below(&state, bound + 1);
        data[b] = data[b - 1] + (int32_t)length;
    }
}

/* In the benchmark: all of the same length, or, of a plan that is mixed, half of that and three times that. */
static void fill_lengths(const cot_case *c, bool q, int32_t *data, int64_t elements, int64_t rows_in_all, int64_t most)
{
    const int64_t length = most / 2, less = c->seed % 2 ? length / 2 : 0;
    if (!(c->uses & CHECKED))
        for (int64_t b = 0; b < elements; b++)
            data[b] = (int32_t)(b * length - b % 2 * less);
    else
        fill_cu_seqlens(c->seed + q, data, elements - 1, rows_in_all, most);
}

static void fill(const cot_case *c, const char *field, int32_t *data, int64_t elements)
{
    const cot_attention_forward_args *f = (const cot_attention_forward_args *)c->args;
    const cot_attention_backward_args *g = (const cot_attention_backward_args *)c->args;
    const bool forward = c->direction == COT_ATTENTION_FORWARD, q = field[strlen(field) - 1] == 'q';
    const cot_tensor *first = forward ? (q ? &f->q : &f->k) : q ? &g->q : &g->k;
    const int64_t most = forward ? (q ? f->max_seqlen_q : f->max_seqlen_k) : q ? g->max_seqlen_q : g->max_seqlen_k;
    const int64_t length = forward ? (q ? f->q_length : f->k_length) : q ? g->q_length : g->k_length;
    if (strncmp(field, "dropout", 7) == 0) {
        data[0] = (int32_t)(c->seed >> 3), data[1] = -(int32_t)(c->seed % 5);
        return;
    }
    if (strncmp(field, "cu_seqlens", 10) == 0) {
        fill_lengths(c, q, data, elements, first->shape[0], most);
        return;
    }
    uint64_t state = c->seed + 5;
    int32_t *cu = calloc((size_t)elements + 1, sizeof *cu);
    if (first->rank == 3 && cu != NULL)
        fill_lengths(c, q, cu, elements + 1, first->shape[0], most);
    for (int64_t b = 0; b < elements && cu != NULL; b++) {
        const int64_t whole = first->rank == 3 ? cu[b + 1] - cu[b] : length > 0 ? length : first->shape[1];
        data[b] = (int32_t)(cot_draw_below(&state, 5) == 0 ? 0 : whole - cot_draw_below(&state, whole / 2 + 1));
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

/* The tensor of field `name` with these values, row-major in f64; integers are filled in anew. */
static cot_tensor oracle_tensor(const cot_case *c, double *const values[COT_MAX_FIELDS], const char *name)
{
    const int field = cot_field_index(&cot_attention_directions[c->direction], name);
    const cot_tensor *t = cot_field_tensor(&cot_attention_directions[c->direction].fields[field], (void *)c->args);
    if (!cot_present(t))
        return (cot_tensor){0};
    const size_t count = (size_t)cot_elements(t);
    int32_t *integers = NULL;
    if (t->dtype == COT_I32 && (integers = calloc(count + 1, sizeof *integers)) != NULL && count > 0)
        fill(c, name, integers, (int64_t)count);
    return cot_tensor_contiguous(t->dtype == COT_I32 ? (void *)integers : values[field],
                                 t->dtype == COT_I32 ? COT_I32 : COT_F64, t->rank, t->shape);
}

/* A backward is given the out and the lse that its forward makes; the benchmark does not wait for the oracle. */
static void prepare(const cot_case *c, double *const values[COT_MAX_FIELDS])
{
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
                                   &f.dropout_seed_memory,
                                   &f.dropout_offset_memory,
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
                                        "dropout_seed_memory",
                                        "dropout_offset_memory",
                                        "out",
                                        "lse"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        *tensors[i] = oracle_tensor(c, values, names[i]);
    m = f;
    m.out.data = calloc(cot_present(&f.out) ? (size_t)cot_elements(&f.out) + 1 : 1, sizeof(double));
    m.lse.data = calloc((size_t)cot_elements(&f.lse) + 1, sizeof(double));
    if (m.out.data != NULL && m.lse.data != NULL)
        cot_attention_oracles[COT_ATTENTION_FORWARD](&f, &m);
    free(m.out.data);
    free(m.lse.data);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (tensors[i]->dtype == COT_I32)
            free(tensors[i]->data);
}

/* lse of n keys is about log n: with less P would be large, and in float16 infinite. */
static double typical(const cot_case *c, const char *field)
{
    const cot_tensor *k = cot_field_tensor(&cot_attention_directions[c->direction].fields[1], (void *)c->args);
    return strcmp(field, "lse") == 0 ? log((double)k->shape[k->rank - 3] + 1) : 0;
}

const cot_op_cases cot_attention_cases = {
    .op = &cot_attention_op,
    .each = each,
    .parse = parse,
    .words_help = words_help,
    .fill = fill,
    .prepare = prepare,
    .typical = typical,
    .oracles = cot_attention_oracles,
    .primal = primal,
    .primal_options = primal_options,
};
