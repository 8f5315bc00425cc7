/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_case_build.c: builds cases from their sizes and options, and parses the command line's words of a case. */
#include "attention_case_build.h"

#include "cases/case_words.h"
#include "cases/draw.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const layout_names[] = {"bthd", "bhtd", "slice", "strided"};

/* ---- tensors ------------------------------------------------------------------------------------------ */

/* A [B,T,H,d] tensor, or packed [T,H,d]. T is the rows of one sequence, or packed those of all. */
static cot_tensor make_tensor(const attention_case_params *p, cot_case *c, const char *name, cot_dtype dtype, int64_t T,
                              int64_t H, int64_t d)
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

/* Packed: the average length times the sequences, and up to two rows that belong to no sequence. */
static int64_t row_count(const attention_case_params *p, int64_t T)
{
    return p->packed ? p->B * T + (int64_t)(p->seed % 3) : T;
}

static cot_tensor query_tensor(const attention_case_params *p, cot_case *c, const char *name, cot_dtype dtype,
                               int64_t d)
{
    return make_tensor(p, c, name, dtype, row_count(p, p->Tq), p->H, d);
}

static cot_tensor key_tensor(const attention_case_params *p, cot_case *c, const char *name, cot_dtype dtype, int64_t d)
{
    return make_tensor(p, c, name, dtype, row_count(p, p->Tk), p->Hkv, d);
}

static cot_tensor statistic_tensor(const attention_case_params *p)
{
    const cot_dtype dtype = p->dtype == COT_F64 ? COT_F64 : COT_F32;
    const int64_t shape[3] = {p->B, p->H, row_count(p, p->Tq)};
    return cot_tensor_contiguous(NULL, dtype, 3 - p->packed, shape + p->packed);
}

static cot_tensor vector_tensor(cot_dtype dtype, int64_t size)
{
    return cot_tensor_contiguous(NULL, dtype, 1, &size);
}

static cot_dtype output_dtype(const attention_case_params *p)
{
    return p->f32_out && p->dtype != COT_F64 ? COT_F32 : p->dtype;
}

/* dtype of sink, slopes and bias: f32, or that of the inputs. */
static cot_dtype parameter_dtype(const attention_case_params *p)
{
    return p->dtype == COT_F64 || p->seed % 2 ? p->dtype : COT_F32;
}

/* The maximum length of a sequence: twice the average if packed. */
static int64_t max_length(const attention_case_params *p, int64_t T)
{
    return p->packed ? 2 * T : T;
}

static cot_tensor bias_tensor(const attention_case_params *p)
{
    int64_t shape[4] = {p->B, p->H, max_length(p, p->Tq), max_length(p, p->Tk)};
    for (int axis = 0; axis < 4; axis++)
        if (p->bias_axes >> axis & 1)
            shape[axis] = 1;
    return cot_tensor_contiguous(NULL, parameter_dtype(p), 4, shape);
}

/* Sets the members that forward and backward have in common. */
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
            (a)->dropout_seed_tensor = (a)->dropout_offset_tensor = vector_tensor(COT_I32, 2);               \
        (a)->max_seqlen_q = (p)->packed ? max_length(p, (p)->Tq) : 0;                                        \
        (a)->max_seqlen_k = (p)->packed ? max_length(p, (p)->Tk) : 0;                                        \
        (a)->q_begin = (p)->q_begin, (a)->q_length = (p)->q_length;                                          \
        (a)->k_begin = (p)->k_begin, (a)->k_length = (p)->k_length;                                          \
        (a)->q = query_tensor(p, c, "q", (p)->dtype, (p)->d);                                                \
        (a)->k = key_tensor(p, c, "k", (p)->dtype, (p)->d);                                                  \
        (a)->v = key_tensor(p, c, "v", (p)->dtype, (p)->d_v);                                                \
        if ((p)->packed)                                                                                     \
            (a)->cu_seqlens_q = (a)->cu_seqlens_k = vector_tensor(COT_I32, (p)->B + 1);                      \
        if ((p)->seqused_q)                                                                                  \
            (a)->seqused_q = vector_tensor(COT_I32, (p)->B);                                                 \
        if ((p)->seqused_k)                                                                                  \
            (a)->seqused_k = vector_tensor(COT_I32, (p)->B);                                                 \
        if ((p)->sink)                                                                                       \
            (a)->sink = vector_tensor(parameter_dtype(p), (p)->H);                                           \
        if ((p)->alibi)                                                                                      \
            (a)->alibi_slopes = cot_tensor_contiguous(NULL, parameter_dtype(p), 1 + ((p)->seed % 4 == 0),    \
                                                      (p)->seed % 4 == 0 ? (const int64_t[]){(p)->B, (p)->H} \
                                                                         : (const int64_t[]){(p)->H});       \
        if ((p)->bias)                                                                                       \
            (a)->bias = bias_tensor(p);                                                                      \
    } while (0)

/* The visible pairs of one head of a sequence with these lengths. */
static double visible_pairs_of_head(const attention_case_params *p, int64_t Tq, int64_t Tk)
{
    const attention_sizes sizes = {.left = p->window && p->left >= 0 ? p->left : ATTENTION_UNBOUNDED,
                                   .right = p->causal                    ? 0
                                            : p->window && p->right >= 0 ? p->right
                                                                         : ATTENTION_UNBOUNDED};
    const attention_sequence s = {.used_q = Tq, .used_k = Tk, .diagonal = Tk - Tq};
    double pairs = 0;
    for (int64_t i = 0; i < Tq; i++) {
        const attention_span span = attention_visible_keys(&sizes, &s, i);
        pairs += span.end > span.first ? (double)(span.end - span.first) : 0;
    }
    return pairs;
}

/* The visible pairs of the case. Packed sequences count with their average length. */
static double visible_pairs(const attention_case_params *p)
{
    const double per_head = p->mixed ? (visible_pairs_of_head(p, p->Tq / 2, p->Tk / 2) +
                                        visible_pairs_of_head(p, p->Tq * 3 / 2, p->Tk * 3 / 2)) /
                                           2
                                     : visible_pairs_of_head(p, p->Tq, p->Tk);
    return per_head * (double)p->B * (double)p->H;
}

static void forward_case(const attention_case_params *p, cot_case *c)
{
    cot_attention_forward_args *a = (cot_attention_forward_args *)c->args;
    SET_COMMON(p, a);
    if (!p->no_out)
        a->out = query_tensor(p, c, "out", output_dtype(p), p->d_v);
    if (!p->no_lse)
        a->lse = statistic_tensor(p);
    c->flops = 2 * (double)(p->d + p->d_v) * visible_pairs(p);
}

/* The number of elements in a row of a gradient that share one independent error, for the norm rule (compare.h). All
 * columns of a row share the errors of its P: in dk and dv those of the queries that attend to the key, in dq those of
 * the query's keys. P varies from pair to pair like exp of a unit normal. So n pairs count as (sum P^2)^2 / sum P^4 = n
 * e^-4 independent errors. These are fewer than the columns if few pairs belong to the row. (Measured over 100 seeds of
 * B1 H2/1 T384/256 d33/17 causal, f32: the error's norm over dv's last 15 keys was 0.4 to 1.9 times the scalar
 * kernel's, its mean below 1. Over whole blocks of 4096 elements it was 0.6 to 1.25 times.) */
static int64_t elements_per_error(const attention_case_params *p, int64_t rows, int64_t columns)
{
    const double row_count = (double)p->B * (double)rows;
    const double errors = row_count > 0 ? visible_pairs(p) / row_count / exp(4) : 0;
    return errors >= (double)columns ? 1 : errors <= 1 ? columns : (int64_t)ceil((double)columns / errors);
}

static void set_shared(const attention_case_params *p, cot_case *c, const char *field, int64_t rows, int64_t columns)
{
    c->shared[cot_field_index(&cot_attention_directions[p->direction], field)] = elements_per_error(p, rows, columns);
}

static void backward_case(const attention_case_params *p, cot_case *c)
{
    cot_attention_backward_args *a = (cot_attention_backward_args *)c->args;
    SET_COMMON(p, a);
    a->accumulate = p->accumulate;
    a->allow_nondeterminism = p->allow_nondeterminism;
    a->lse = statistic_tensor(p);
    if (p->delta) {
        a->delta = statistic_tensor(p);
    } else {
        a->out = query_tensor(p, c, "out", output_dtype(p), p->d_v);
        if (p->dlse)
            a->dlse = statistic_tensor(p);
    }
    a->dout = query_tensor(p, c, "dout", p->dtype, p->d_v);
    if (!p->no_dq) {
        a->dq = query_tensor(p, c, "dq", output_dtype(p), p->d);
        c->nondeterministic[cot_field_index(&cot_attention_directions[p->direction], "dq")] = p->allow_nondeterminism;
        set_shared(p, c, "dq", p->H * p->Tq, p->d);
    }
    if (!p->no_dkv) {
        a->dk = key_tensor(p, c, "dk", output_dtype(p), p->d);
        a->dv = key_tensor(p, c, "dv", output_dtype(p), p->d_v);
        set_shared(p, c, "dk", p->Hkv * p->Tk, p->d);
        set_shared(p, c, "dv", p->Hkv * p->Tk, p->d_v);
    }
    if (p->sink)
        a->dsink = a->sink;
    if (p->bias)
        a->dbias = a->bias;
    c->flops = 2 * (double)(3 * p->d + 2 * p->d_v) * visible_pairs(p);
}

static void delta_case(const attention_case_params *p, cot_case *c)
{
    cot_attention_delta_args *a = (cot_attention_delta_args *)c->args;
    COT_INIT(a);
    a->out = query_tensor(p, c, "out", output_dtype(p), p->d_v);
    a->dout = query_tensor(p, c, "dout", p->dtype, p->d_v);
    if (p->dlse)
        a->dlse = statistic_tensor(p);
    a->delta = statistic_tensor(p);
    c->flops = 2 * (double)p->d_v * (double)p->B * (double)p->H * (double)p->Tq;
}

static void merge_case(const attention_case_params *p, cot_case *c)
{
    cot_attention_merge_args *a = (cot_attention_merge_args *)c->args;
    COT_INIT(a);
    a->out_a = query_tensor(p, c, "out_a", p->dtype, p->d_v);
    a->out_b = query_tensor(p, c, "out_b", output_dtype(p), p->d_v);
    a->lse_a = a->lse_b = statistic_tensor(p);
    if (p->sink)
        a->sink = vector_tensor(parameter_dtype(p), p->H);
    if (!p->no_out)
        a->out = query_tensor(p, c, "out", output_dtype(p), p->d_v);
    if (!p->no_lse)
        a->lse = statistic_tensor(p);
    c->flops = 3 * (double)p->d_v * (double)p->B * (double)p->H * (double)p->Tq;
}

static void append(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void append(char *text, size_t size, const char *format, ...)
{
    va_list arguments;
    const size_t length = strlen(text);
    va_start(arguments, format);
    vsnprintf(text + length, size - length, format, arguments);
    va_end(arguments);
}

static void describe(const attention_case_params *p, cot_case *c)
{
    char *o = c->options;
    const size_t size = sizeof c->options;
    c->layout = layout_names[p->layout];
    snprintf(c->shape, sizeof c->shape, "B%lld H%lld/%lld T%lld/%lld d%lld/%lld", (long long)p->B, (long long)p->H,
             (long long)p->Hkv, (long long)p->Tq, (long long)p->Tk, (long long)p->d, (long long)p->d_v);
    snprintf(o, size, "%s", p->causal ? "causal" : "full");
    if (p->window)
        append(o, size, "+window%lld,%lld", (long long)p->left, (long long)p->right);
    if (p->softcap > 0)
        append(o, size, "+softcap%g", p->softcap);
    if (p->scale != 0)
        append(o, size, "+scale%g", p->scale);
    if (p->dropout > 0)
        append(o, size, "+dropout%g", p->dropout);
    if (p->bias)
        append(o, size, "+bias%x", p->bias_axes);
    if (p->q_length > 0 || p->k_length > 0)
        append(o, size, "+block");
    const struct {
        bool set;
        const char *name;
    } switches[] = {{p->sink, "+sink"},       {p->alibi, "+alibi"},
                    {p->packed, "+packed"},   {p->mixed, "+mixed"},
                    {p->seqused_q, "+usedq"}, {p->seqused_k, "+usedk"},
                    {p->f32_out, "+f32out"},  {p->dlse, "+dlse"},
                    {p->delta, "+delta"},     {p->accumulate, "+accumulate"},
                    {p->no_dq, "-dq"},        {p->no_dkv, "-dkv"},
                    {p->no_out, "-out"},      {p->no_lse, "-lse"},
                    {p->low_lse, "+low"},     {p->allow_nondeterminism, "+nondeterministic"}};
    for (size_t i = 0; i < sizeof switches / sizeof *switches; i++)
        if (switches[i].set)
            append(o, size, "%s", switches[i].name);
}

void attention_case_build(const attention_case_params *p, cot_case *c)
{
    static void (*const builders[])(const attention_case_params *, cot_case *) = {forward_case, backward_case,
                                                                                  delta_case, merge_case};
    /* In the benchmark the seed's lowest bit tells `fill` whether lengths are mixed. */
    const uint64_t seed = p->uses & CHECKED ? p->seed : (p->seed & ~(uint64_t)1) | p->mixed;
    *c = (cot_case){.direction = p->direction, .uses = p->uses, .seed = seed};
    builders[p->direction](p, c);
    describe(p, c);
}

void attention_case_visit(cot_case_visitor *v, const attention_case_params *p)
{
    cot_case c;
    attention_case_build(p, &c);
    cot_visit_case(v, &c);
}

void attention_case_add_feature(attention_case_params *p, int feature, uint64_t *state)
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

/* ---- parsing of the command line ----------------------------------------------------------------------- */

static bool set_word(attention_case_params *p, const char *word)
{
    static const cot_text_option sizes[] = {{"B", offsetof(attention_case_params, B)},
                                            {"H", offsetof(attention_case_params, H)},
                                            {"Hkv", offsetof(attention_case_params, Hkv)},
                                            {"T", offsetof(attention_case_params, Tq)},
                                            {"Tq", offsetof(attention_case_params, Tq)},
                                            {"Tk", offsetof(attention_case_params, Tk)},
                                            {"d", offsetof(attention_case_params, d)},
                                            {"d_v", offsetof(attention_case_params, d_v)},
                                            {"left", offsetof(attention_case_params, left)},
                                            {"right", offsetof(attention_case_params, right)},
                                            {0}};
    static const cot_text_option reals[] = {{"softcap", offsetof(attention_case_params, softcap)},
                                            {"scale", offsetof(attention_case_params, scale)},
                                            {"dropout", offsetof(attention_case_params, dropout)},
                                            {0}};
    static const cot_text_option switches[] = {
        {"causal", offsetof(attention_case_params, causal)},
        {"sink", offsetof(attention_case_params, sink)},
        {"alibi", offsetof(attention_case_params, alibi)},
        {"bias", offsetof(attention_case_params, bias)},
        {"packed", offsetof(attention_case_params, packed)},
        {"mixed", offsetof(attention_case_params, mixed)},
        {"usedq", offsetof(attention_case_params, seqused_q)},
        {"usedk", offsetof(attention_case_params, seqused_k)},
        {"dlse", offsetof(attention_case_params, dlse)},
        {"delta", offsetof(attention_case_params, delta)},
        {"accumulate", offsetof(attention_case_params, accumulate)},
        {"f32out", offsetof(attention_case_params, f32_out)},
        {"nondeterministic", offsetof(attention_case_params, allow_nondeterminism)},
        {0}};
    if (cot_parse_size(p, sizes, word) || cot_parse_real(p, reals, word) || cot_parse_flag(p, switches, word) ||
        cot_parse_float_dtype(&p->dtype, word))
        return true;
    for (int layout = 0; layout < LAYOUT_COUNT; layout++)
        if (strcmp(word, layout_names[layout]) == 0)
            return p->layout = (attention_layout)layout, true;
    return strcmp(word, "full") == 0;
}

const char attention_case_help[] =
    "B=1 H=8 Hkv=8 T=2048 (or Tq= Tk=) d=128 d_v=128 left=1024 right=0 softcap=30 scale=0.1 dropout=0.1, f32 f16 bf16 f64, "
    "bthd bhtd slice strided, causal sink alibi bias packed mixed usedq usedk dlse delta accumulate f32out "
    "nondeterministic";

const char *attention_case_parse(int direction, int count, char *const words[], cot_case *c)
{
    attention_case_params p = {.direction = direction,
                               .uses = COT_CASE_CHECK | COT_CASE_BENCH | COT_CASE_BENCH_CUDA,
                               .B = 1,
                               .H = 8,
                               .Hkv = -1,
                               .Tq = 2048,
                               .Tk = -1,
                               .d = 128,
                               .d_v = -1,
                               .left = -1,
                               .right = -1,
                               .dtype = COT_F32,
                               .seed = 63};
    for (int i = 0; i < count; i++)
        if (!set_word(&p, words[i]))
            return words[i];
    p.window = p.left >= 0 || p.right >= 0;
    p.Hkv = p.Hkv < 0 ? p.H : p.Hkv;
    p.Tk = p.Tk < 0 ? p.Tq : p.Tk;
    p.d_v = p.d_v < 0 ? p.d : p.d_v;
    attention_case_build(&p, c);
    return NULL;
}
