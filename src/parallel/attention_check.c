/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_check.c: the checks of the arguments. The core checks them as those of the single call: the cut axes get
 * their whole sizes for that. Here are only the checks that the core cannot make. */
#include "attention_call.h"

#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

#include <inttypes.h>
#include <stdlib.h>

/* ---- the core's checks ---------------------------------------------------------------------------------------- */

static cot_status check_as_single_call(const attention_call *c, int64_t q_rows, int64_t k_rows)
{
    cot_attention_backward_args b = c->a;
    const int rows = c->packed ? 0 : 1;
    const struct {
        const char *name;
        cot_tensor *tensor;
        int axis;
        bool of_keys;
    } cut[] = {{"q", &b.q, rows, false},
               {"out", &b.out, rows, false},
               {"dout", &b.dout, rows, false},
               {"dq", &b.dq, rows, false},
               {"k", &b.k, rows, true},
               {"v", &b.v, rows, true},
               {"dk", &b.dk, rows, true},
               {"dv", &b.dv, rows, true},
               {"lse", &b.lse, rows + 1, false},
               {"dlse", &b.dlse, rows + 1, false},
               {"delta", &b.delta, rows + 1, false}};
    cot_tensor *const biases[] = {&b.bias, &b.dbias};
    size_t bytes;
    for (size_t n = 0; n < sizeof cut / sizeof *cut; n++)
        CHECK(cot_widen(c->base.name, cut[n].name, cut[n].tensor, cut[n].axis, cut[n].of_keys ? k_rows : q_rows,
                        cut[n].of_keys ? c->Tk : c->Tq));
    for (int n = 0; n < 2 && !c->packed; n++)
        if (cot_is_present(biases[n]) && biases[n]->rank == 4 && biases[n]->shape[2] != 1)
            CHECK(cot_widen(c->base.name, n == 0 ? "bias" : "dbias", biases[n], 2, q_rows, c->Tq));
    b.q_length = b.k_length = 0;
    if (c->backward)
        return cot_attention_backward_workspace(c->base.queue, &b, &bytes);
    cot_attention_forward_args f;
    COT_INIT(&f);
    f.causal = b.causal, f.window = b.window, f.window_left = b.window_left, f.window_right = b.window_right;
    f.scale = b.scale, f.softcap = b.softcap, f.dropout_p = b.dropout_p;
    f.max_seqlen_q = b.max_seqlen_q, f.max_seqlen_k = b.max_seqlen_k;
    f.q = b.q, f.k = b.k, f.v = b.v, f.cu_seqlens_q = b.cu_seqlens_q, f.cu_seqlens_k = b.cu_seqlens_k;
    f.seqused_q = b.seqused_q, f.seqused_k = b.seqused_k, f.sink = b.sink, f.alibi_slopes = b.alibi_slopes;
    f.bias = b.bias, f.out = b.out, f.lse = b.lse;
    f.dropout_seed_tensor = b.dropout_seed_tensor, f.dropout_offset_tensor = b.dropout_offset_tensor;
    return cot_attention_forward_workspace(c->base.queue, &f, &bytes);
}

static cot_status check_memory(const attention_call *c)
{
    const cot_attention_backward_args *a = &c->a;
    const bool forward = !c->backward;
    const cot_named_tensor tensors[] = {COT_IN(a, q),
                                        COT_IN(a, k),
                                        COT_IN(a, v),
                                        COT_IN(a, cu_seqlens_q),
                                        COT_IN(a, cu_seqlens_k),
                                        COT_IN(a, seqused_q),
                                        COT_IN(a, seqused_k),
                                        COT_IN(a, sink),
                                        COT_IN(a, alibi_slopes),
                                        COT_IN(a, bias),
                                        COT_IN(a, dropout_seed_tensor),
                                        COT_IN(a, dropout_offset_tensor),
                                        {"out", &a->out, forward, false},
                                        {"lse", &a->lse, forward, false},
                                        COT_IN(a, dout),
                                        COT_IN(a, dlse),
                                        COT_IN(a, delta),
                                        COT_OUT(a, dq),
                                        COT_OUT(a, dk),
                                        COT_OUT(a, dv),
                                        COT_OUT(a, dsink),
                                        COT_OUT(a, dbias)};
    return cot_check_memory(c->base.name, tensors, sizeof tensors / sizeof *tensors);
}

/* ---- index data ----------------------------------------------------------------------------------------------- */

static cot_status check_cu_seqlens(const attention_call *c, const char *axis, const cot_tensor *cu, int64_t rows,
                                   int64_t longest)
{
    for (int64_t b = 0; b <= c->B; b++) {
        const int64_t at = attention_index(cu, b), length = b > 0 ? at - attention_index(cu, b - 1) : 0;
        if (b == 0 && at != 0)
            return cot_fail(COT_INVALID_DATA, "%s: cu_seqlens_%s[0] is %" PRId64 ", expected 0", c->base.name, axis,
                            at);
        if (length < 0)
            return cot_fail(COT_INVALID_DATA,
                            "%s: cu_seqlens_%s[%" PRId64 "] is %" PRId64 ", less than %" PRId64 " before it",
                            c->base.name, axis, b, at, at - length);
        if (length > longest)
            return cot_fail(COT_INVALID_DATA,
                            "%s: cu_seqlens_%s gives sequence %" PRId64 " %" PRId64 " rows, max_seqlen_%s is %" PRId64,
                            c->base.name, axis, b - 1, length, axis, longest);
    }
    if (attention_index(cu, c->B) > rows)
        return cot_fail(COT_INVALID_DATA, "%s: cu_seqlens_%s ends at %" PRId64 ", the whole %s has %" PRId64 " rows",
                        c->base.name, axis, attention_index(cu, c->B), axis, rows);
    return COT_OK;
}

static cot_status check_seqused(const attention_call *c, const char *axis, const cot_tensor *used, const cot_tensor *cu,
                                int64_t length)
{
    for (int64_t b = 0; cot_is_present(used) && b < c->B; b++) {
        const int64_t value = attention_index(used, b);
        const int64_t longest = c->packed ? attention_index(cu, b + 1) - attention_index(cu, b) : length;
        if (value < 0 || value > longest)
            return cot_fail(COT_INVALID_DATA, "%s: seqused_%s[%" PRId64 "] is %" PRId64 ", expected 0 to %" PRId64,
                            c->base.name, axis, b, value, longest);
    }
    return COT_OK;
}

/* From here on, the host reads the index data of a. */
static cot_status read_index_data(attention_call *c)
{
    cot_attention_backward_args *a = &c->a;
    cot_tensor *const tensors[] = {&a->cu_seqlens_q, &a->cu_seqlens_k, &a->seqused_q, &a->seqused_k};
    c->seqused_q = a->seqused_q, c->seqused_k = a->seqused_k;
    for (int n = 0; n < 4; n++) {
        cot_tensor view;
        CHECK(cot_group_to_host(c->base.group, tensors[n], &view, &c->index[n]));
        *tensors[n] = view;
    }
    return COT_OK;
}

static cot_status check_index_data(const attention_call *c)
{
    const cot_attention_backward_args *a = &c->a;
    if (c->packed) {
        CHECK(check_cu_seqlens(c, "q", &a->cu_seqlens_q, c->Tq, a->max_seqlen_q));
        CHECK(check_cu_seqlens(c, "k", &a->cu_seqlens_k, c->Tk, a->max_seqlen_k));
    }
    CHECK(check_seqused(c, "q", &a->seqused_q, &a->cu_seqlens_q, c->Tq));
    return check_seqused(c, "k", &a->seqused_k, &a->cu_seqlens_k, c->Tk);
}

/* ---- the group ------------------------------------------------------------------------------------------------ */

/* Checks the rows that this rank holds of the whole. */
static cot_status check_rows(const attention_call *c, const char *axis, const cot_tensor *t, int64_t length)
{
    const cot_segments s = cot_segments_of(&c->options, length, c->base.group->size, c->base.group->rank, 1);
    if (s.list == NULL)
        return cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for the cut", c->base.name);
    free(s.list);
    const int64_t rows = t->shape[c->packed ? 0 : 1];
    if (rows != s.rows)
        return cot_fail(COT_INVALID_SHAPE,
                        "%s: %s has %" PRId64 " rows, expected %" PRId64 ", the part of rank %d of %s_length %" PRId64,
                        c->base.name, axis, rows, s.rows, c->base.group->rank, axis, length);
    return COT_OK;
}

static cot_status check_begin(const attention_call *c)
{
    const cot_attention_backward_args *a = &c->a;
    if (a->q_begin != 0 || a->k_begin != 0)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: %s_begin is %" PRId64 ", expected 0", c->base.name,
                        a->q_begin != 0 ? "q" : "k", a->q_begin != 0 ? a->q_begin : a->k_begin);
    if (c->options.length != 0)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: options.length is %" PRId64 ", expected 0", c->base.name,
                        c->options.length);
    return cot_group_no_workspace(c->base.name, a->workspace, a->workspace_bytes);
}

static cot_status check_columns(attention_call *c)
{
    const int32_t all_gather = c->options.all_gather;
    const int64_t size = c->base.group->size, columns = c->options.head_ranks == 0 ? 1 : c->options.head_ranks;
    if (columns < 1 || columns > size || size % columns != 0)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: head_ranks is %d, expected a divisor of the group's %d ranks",
                        c->base.name, (int)c->options.head_ranks, (int)size);
    c->C = columns;
    c->R = size / c->C;
    c->line = c->base.group->rank / c->C;
    c->column = c->base.group->rank % c->C;
    if (all_gather != 0 && all_gather != 1)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: all_gather is %d, expected 0 or 1", c->base.name, (int)all_gather);
    if (all_gather && c->R > COT_MAX_SOURCES)
        return cot_fail(COT_UNSUPPORTED,
                        "%s: all_gather is given with %" PRId64 " ranks divided by head_ranks %" PRId64
                        ", expected a quotient of %d or less",
                        c->base.name, size, c->C, COT_MAX_SOURCES);
    return COT_OK;
}

static cot_status check_heads(attention_call *c)
{
    if (c->H % c->C != 0)
        return cot_fail(COT_INVALID_SHAPE, "%s: q has H=%" PRId64 ", expected a multiple of head_ranks %" PRId64,
                        c->base.name, c->H, c->C);
    if (c->Hkv % c->C != 0 && c->C % c->Hkv != 0)
        return cot_fail(COT_INVALID_SHAPE,
                        "%s: k has Hkv=%" PRId64 ", expected a multiple or a divisor of head_ranks %" PRId64,
                        c->base.name, c->Hkv, c->C);
    c->heads = c->H / c->C;
    c->kv_heads = c->Hkv % c->C == 0 ? c->Hkv / c->C : 1;
    if (c->C == 1)
        return COT_OK;
    if (cot_is_present(&c->a.bias))
        return cot_fail(COT_UNSUPPORTED, "%s: bias is given with head_ranks %" PRId64 ", expected head_ranks 1",
                        c->base.name, c->C);
    c->single = c->a.dropout_p > 0;
    if (c->single && cot_mul(c->H, cot_mul(c->packed ? 1 : c->B, c->Tq)) > INT32_MAX)
        return cot_fail(COT_UNSUPPORTED,
                        "%s: dropout_p is given with head_ranks %" PRId64
                        ", expected H times the rows of all queries to be less than 2^31",
                        c->base.name, c->C);
    return COT_OK;
}

static void add_batch_axis(cot_tensor *t)
{
    if (!cot_is_present(t))
        return;
    memmove(t->shape + 1, t->shape, (size_t)t->rank * sizeof *t->shape);
    memmove(t->stride + 1, t->stride, (size_t)t->rank * sizeof *t->stride);
    t->shape[0] = 1, t->stride[0] = 0;
    t->rank++;
}

static void name_sizes(attention_call *c)
{
    cot_attention_backward_args *a = &c->a;
    cot_tensor *const views[] = {&a->q,    &a->k,     &a->v,  &a->lse, &a->out, &a->dout,
                                 &a->dlse, &a->delta, &a->dq, &a->dk,  &a->dv};
    for (size_t n = 0; c->packed && n < sizeof views / sizeof *views; n++)
        add_batch_axis(views[n]);
    c->batches = a->q.shape[0];
    c->B = c->packed ? a->cu_seqlens_q.shape[0] - 1 : c->batches;
    c->H = a->q.shape[2], c->d = a->q.shape[3], c->Hkv = a->k.shape[2], c->d_v = a->v.shape[3];
    c->dtype = a->q.dtype;
    c->sum = c->dtype == COT_F64 ? COT_F64 : COT_F32;
    c->left = !a->window || a->window_left < 0 ? ATTENTION_UNBOUNDED : cot_min(a->window_left, ATTENTION_UNBOUNDED);
    c->right = a->causal                           ? 0
               : !a->window || a->window_right < 0 ? ATTENTION_UNBOUNDED
                                                   : cot_min(a->window_right, ATTENTION_UNBOUNDED);
}

/* Copies the arguments of both directions to c->a. */
static cot_status copy_arguments(attention_call *c)
{
    cot_attention_backward_args *b = &c->a;
    cot_attention_forward_args f;
    if (c->args == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: args is null", c->base.name);
    CHECK(cot_copy_options(c->base.name, c->given, &c->options));
    if (c->backward)
        return cot_copy_args(c->base.name, "struct_size", c->args, sizeof *b, b);
    CHECK(cot_copy_args(c->base.name, "struct_size", c->args, sizeof f, &f));
    COT_INIT(b);
    b->causal = f.causal, b->window = f.window, b->window_left = f.window_left, b->window_right = f.window_right;
    b->scale = f.scale, b->softcap = f.softcap, b->dropout_p = f.dropout_p;
    b->dropout_seed = f.dropout_seed, b->dropout_offset = f.dropout_offset;
    b->max_seqlen_q = f.max_seqlen_q, b->max_seqlen_k = f.max_seqlen_k;
    b->q_begin = f.q_begin, b->q_length = f.q_length, b->k_begin = f.k_begin, b->k_length = f.k_length;
    b->q = f.q, b->k = f.k, b->v = f.v, b->cu_seqlens_q = f.cu_seqlens_q, b->cu_seqlens_k = f.cu_seqlens_k;
    b->seqused_q = f.seqused_q, b->seqused_k = f.seqused_k, b->sink = f.sink;
    b->alibi_slopes = f.alibi_slopes, b->bias = f.bias, b->out = f.out, b->lse = f.lse;
    b->dropout_seed_tensor = f.dropout_seed_tensor, b->dropout_offset_tensor = f.dropout_offset_tensor;
    b->workspace = f.workspace, b->workspace_bytes = f.workspace_bytes;
    return COT_OK;
}

cot_status attention_check(void *call)
{
    attention_call *c = call;
    cot_attention_backward_args *a = &c->a;
    CHECK(copy_arguments(c));
    c->packed = cot_is_present(&a->cu_seqlens_q);
    c->Tq = a->q_length, c->Tk = a->k_length;
    CHECK(cot_check_cut(c->base.name, &c->options, c->Tq));
    CHECK(cot_check_cut(c->base.name, &c->options, c->Tk));
    CHECK(check_columns(c));
    CHECK(check_begin(c));
    const int rank = c->packed ? 3 : 4;
    CHECK(cot_check_required(c->base.name, "q", &a->q));
    CHECK(cot_check_tensor(c->base.name, "q", &a->q, COT_FLOATS, rank, rank));
    CHECK(cot_check_required(c->base.name, "k", &a->k));
    CHECK(cot_check_tensor(c->base.name, "k", &a->k, COT_FLOATS, rank, rank));
    CHECK(check_rows(c, "q", &a->q, c->Tq));
    CHECK(check_rows(c, "k", &a->k, c->Tk));
    CHECK(check_as_single_call(c, a->q.shape[c->packed ? 0 : 1], a->k.shape[c->packed ? 0 : 1]));
    CHECK(check_memory(c));
    name_sizes(c);
    CHECK(check_heads(c));
    CHECK(read_index_data(c));
    CHECK(check_index_data(c));
    return attention_cut(c) ? COT_OK : cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for the cut", c->base.name);
}

/* ---- agreement ------------------------------------------------------------------------------------------------ */

static void word_of_presence(cot_group *group, const char *name, const cot_tensor *tensor)
{
    cot_group_word(group, name, tensor->dtype);
}

cot_status attention_words(const void *call)
{
    const attention_call *c = call;
    const cot_attention_backward_args *a = &c->a;
    cot_group *g = c->base.group;
    const struct {
        const char *name;
        int64_t value;
    } words[] = {{"cut", c->options.cut},
                 {"stripe", c->options.stripe},
                 {"head_ranks", c->C},
                 {"all_gather", c->options.all_gather},
                 {"causal", a->causal},
                 {"window", a->window},
                 {"window_left", a->window_left},
                 {"window_right", a->window_right},
                 {"dropout_seed", (int64_t)a->dropout_seed},
                 {"dropout_offset", (int64_t)a->dropout_offset},
                 {"max_seqlen_q", a->max_seqlen_q},
                 {"max_seqlen_k", a->max_seqlen_k},
                 {"q_length", a->q_length},
                 {"k_length", a->k_length},
                 {"accumulate", a->accumulate},
                 {"allow_nondeterminism", a->allow_nondeterminism},
                 {"B", c->B},
                 {"H", c->H},
                 {"Hkv", c->Hkv},
                 {"d", c->d},
                 {"d_v", c->d_v}};
    for (size_t n = 0; n < sizeof words / sizeof *words; n++)
        cot_group_word(g, words[n].name, words[n].value);
    cot_group_number(g, "scale", a->scale);
    cot_group_number(g, "softcap", a->softcap);
    cot_group_number(g, "dropout_p", a->dropout_p);
    cot_group_word(g, "cu_seqlens_q", cot_hash_tensor(&a->cu_seqlens_q));
    cot_group_word(g, "cu_seqlens_k", cot_hash_tensor(&a->cu_seqlens_k));
    cot_group_word(g, "seqused_q", cot_hash_tensor(&a->seqused_q));
    cot_group_word(g, "seqused_k", cot_hash_tensor(&a->seqused_k));
    cot_group_values(g, "sink", &a->sink);
    cot_group_values(g, "alibi_slopes", &a->alibi_slopes);
    cot_group_values(g, "dropout_seed_tensor", &a->dropout_seed_tensor);
    cot_group_values(g, "dropout_offset_tensor", &a->dropout_offset_tensor);
    word_of_presence(g, "q", &a->q);
    word_of_presence(g, "out", &a->out);
    word_of_presence(g, "lse", &a->lse);
    word_of_presence(g, "dlse", &a->dlse);
    word_of_presence(g, "delta", &a->delta);
    word_of_presence(g, "dq", &a->dq);
    word_of_presence(g, "dk", &a->dk);
    word_of_presence(g, "dv", &a->dv);
    word_of_presence(g, "dsink", &a->dsink);
    word_of_presence(g, "bias", &a->bias);
    word_of_presence(g, "dbias", &a->dbias);
    const int axes = cot_is_present(&a->bias) ? 4 : 0;
    cot_group_word(g, "bias's batches", axes > 0 ? a->bias.shape[0] : 0);
    cot_group_word(g, "bias's heads", axes > 0 ? a->bias.shape[1] : 0);
    cot_group_word(g, "bias's queries", axes > 0 && (c->packed || a->bias.shape[2] == 1) ? a->bias.shape[2] : 0);
    cot_group_word(g, "bias's keys", axes > 0 ? a->bias.shape[3] : 0);
    return COT_OK;
}

void attention_free(void *call)
{
    attention_call *c = call;
    for (int n = 0; n < 4; n++)
        free(c->index[n]);
    for (int64_t line = 0; line < c->R; line++) {
        if (c->q_lines != NULL)
            free(c->q_lines[line].list);
        if (c->k_lines != NULL)
            free(c->k_lines[line].list);
        if (c->q_ranges != NULL)
            free(c->q_ranges[line].list), free(c->q_ranges[line].first);
        if (c->k_ranges != NULL)
            free(c->k_ranges[line].list), free(c->k_ranges[line].first);
        if (c->seen != NULL)
            free(c->seen[line].list);
    }
    for (int64_t column = 0; column < c->C; column++) {
        if (c->q_ranks != NULL)
            free(c->q_ranks[column].list);
        if (c->k_ranks != NULL)
            free(c->k_ranks[column].list);
    }
    free(c->q_lines), free(c->k_lines), free(c->q_ranks), free(c->k_ranks);
    free(c->q_ranges), free(c->k_ranges), free(c->needed), free(c->seen);
    free(c->own.list), free(c->own.first);
}
