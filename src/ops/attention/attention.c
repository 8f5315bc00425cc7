/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.c: the op's front: checks of the arguments, the table of kernels, the public calls. */
#include "attention_problem.h"

#include "core/cpu_features.h"
#include "core/argument_checks.h"
#include "core/op_tables.h"
#include "core/status.h"

#include <inttypes.h>
#include <math.h>

/* ---- options ------------------------------------------------------------------------------------------ */

static cot_status check_flag(const char *call, const char *name, int32_t flag)
{
    if (flag == 0 || flag == 1)
        return COT_OK;
    return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is %d, expected 0 or 1", call, name, (int)flag);
}

/* Members of both the forward's and the backward's argument struct. */
typedef struct options {
    int32_t causal, window;
    int64_t window_left, window_right;
    double scale, softcap, dropout_p;
    int64_t max_seqlen_q, max_seqlen_k;
    int64_t q_begin, q_length, k_begin, k_length;
} options;

static cot_status check_mask(const char *call, const options *o, attention_sizes *sizes)
{
    CHECK(check_flag(call, "causal", o->causal));
    CHECK(check_flag(call, "window", o->window));
    const struct {
        const char *name;
        int64_t size;
    } sides[] = {{"window_left", o->window_left}, {"window_right", o->window_right}};
    for (int i = 0; i < COUNT(sides); i++) {
        if (!o->window && sides[i].size != 0)
            return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is %" PRId64 ", expected 0 without window", call,
                            sides[i].name, sides[i].size);
        if (sides[i].size < -1)
            return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is %" PRId64 ", expected -1 (all) or more", call,
                            sides[i].name, sides[i].size);
    }
    if (o->causal && o->window_right > 0)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: window_right is %" PRId64 ", expected 0 or -1 with causal", call,
                        o->window_right);
    sizes->left = !o->window || o->window_left < 0 ? ATTENTION_UNBOUNDED : o->window_left;
    sizes->right = !o->window || o->window_right < 0 ? ATTENTION_UNBOUNDED : o->window_right;
    sizes->left = sizes->left < ATTENTION_UNBOUNDED ? sizes->left : ATTENTION_UNBOUNDED;
    sizes->right = o->causal ? 0 : sizes->right < ATTENTION_UNBOUNDED ? sizes->right : ATTENTION_UNBOUNDED;
    return COT_OK;
}

/* Whether float32 products with the factor neither overflow nor lose bits. */
static bool is_normal_factor(double factor)
{
    return fabs(factor) >= 1e-30 && fabs(factor) <= 1e30;
}

static cot_status check_numbers(const char *call, const options *o, attention_sizes *sizes)
{
    if (o->scale != 0 && !is_normal_factor(o->scale))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: scale is %g, expected 0 or a magnitude from 1e-30 to 1e30", call,
                        o->scale);
    if (o->softcap != 0 && !(o->softcap > 0 && is_normal_factor(o->softcap)))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: softcap is %g, expected 0 (none) or 1e-30 to 1e30", call,
                        o->softcap);
    if (!(o->dropout_p >= 0 && o->dropout_p <= 1))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: dropout_p is %g, expected 0 to 1", call, o->dropout_p);
    sizes->scale = o->scale != 0 ? o->scale : 1 / sqrt((double)sizes->d_qk);
    sizes->softcap = o->softcap;
    if (sizes->softcap > 0 && !is_normal_factor(sizes->scale / sizes->softcap))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: scale / softcap is %g, expected a magnitude from 1e-30 to 1e30",
                        call, sizes->scale / sizes->softcap);
    sizes->dropped = (uint32_t)lrint(65536 * o->dropout_p);
    return COT_OK;
}

/* Checks one axis of a block. If the call is not a block, begin is 0 and length becomes the row count. */
static cot_status check_block(const char *call, const char *axis, bool packed, int64_t rows, int64_t *begin,
                              int64_t *length)
{
    if (*length == 0 && *begin == 0) {
        *length = rows;
        return COT_OK;
    }
    if (packed)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: %s_length is %" PRId64 ", expected 0 with cu_seqlens", call, axis,
                        *length);
    if (*begin < 0 || *length < rows || *length >= ATTENTION_UNBOUNDED || *begin > *length - rows)
        return cot_fail(COT_INVALID_SHAPE,
                        "%s: %s_begin is %" PRId64 ", and %" PRId64 " rows from there do not lie in %s_length %" PRId64,
                        call, axis, *begin, rows, axis, *length);
    return COT_OK;
}

/* ---- shapes ------------------------------------------------------------------------------------------- */

/* An axis of a tensor: its symbol, the tensor that defines its size, and the size. */
typedef struct tensor_axis {
    const char *symbol, *source;
    int64_t size;
} tensor_axis;

static cot_status check_axes(const char *call, const char *name, const cot_tensor *t, const tensor_axis *axes, int rank)
{
    CHECK(cot_check_tensor(call, name, t, COT_FLOATS, rank, rank));
    for (int i = 0; cot_is_present(t) && i < rank; i++)
        CHECK(cot_check_size(call, name, t, i, axes[i].symbol, axes[i].source, axes[i].size));
    return COT_OK;
}

static cot_status check_dtype_of(const char *call, const char *name, const cot_tensor *t, cot_dtype q, bool or_f32)
{
    if (!cot_is_present(t) || t->dtype == q || (or_f32 && t->dtype == COT_F32 && q != COT_F64))
        return COT_OK;
    return cot_fail(COT_INVALID_DTYPE, "%s: %s has dtype %s, expected q's %s%s", call, name, cot_dtype_name(t->dtype),
                    cot_dtype_name(q), or_f32 && q != COT_F32 && q != COT_F64 ? " or f32" : "");
}

/* lse, dlse and delta are f32, or f64 if q is f64. */
static cot_status check_statistic(const char *call, const char *name, const cot_tensor *t, cot_dtype q)
{
    const cot_dtype expected = q == COT_F64 ? COT_F64 : COT_F32;
    if (!cot_is_present(t) || t->dtype == expected)
        return COT_OK;
    return cot_fail(COT_INVALID_DTYPE, "%s: %s has dtype %s, expected %s", call, name, cot_dtype_name(t->dtype),
                    cot_dtype_name(expected));
}

static cot_status check_heads(const char *call, attention_sizes *sizes)
{
    if (sizes->H < 1 || sizes->Hkv < 1 || sizes->H % sizes->Hkv != 0)
        return cot_fail(COT_INVALID_SHAPE, "%s: q has H=%" PRId64 ", expected a multiple of k's Hkv=%" PRId64, call,
                        sizes->H, sizes->Hkv);
    if (sizes->d_qk < 1 || sizes->d_v < 1)
        return cot_fail(COT_INVALID_SHAPE, "%s: %s, expected 1 or more", call,
                        sizes->d_qk < 1 ? "q has d=0" : "v has d_v=0");
    return COT_OK;
}

/* B, Tq, H and d come from q; Tk and Hkv from k; d_v from v. */
static cot_status check_qkv(const char *call, attention_problem *p)
{
    attention_sizes *sizes = &p->sizes;
    CHECK(cot_check_tensor(call, "cu_seqlens_q", &p->cu_seqlens_q, COT_DTYPE_BIT(COT_I32), 1, 1));
    CHECK(cot_check_tensor(call, "cu_seqlens_k", &p->cu_seqlens_k, COT_DTYPE_BIT(COT_I32), 1, 1));
    sizes->packed = cot_is_present(&p->cu_seqlens_q);
    if (sizes->packed != cot_is_present(&p->cu_seqlens_k))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: cu_seqlens_%s is given without cu_seqlens_%s, expected both or none",
                        call, sizes->packed ? "q" : "k", sizes->packed ? "k" : "q");
    const int rank = sizes->packed ? 3 : 4, rows = rank - 3;
    CHECK(cot_check_required(call, "q", &p->q));
    CHECK(cot_check_tensor(call, "q", &p->q, COT_FLOATS, rank, rank));
    CHECK(cot_check_required(call, "k", &p->k));
    CHECK(cot_check_tensor(call, "k", &p->k, COT_FLOATS, rank, rank));
    CHECK(cot_check_required(call, "v", &p->v));
    CHECK(cot_check_tensor(call, "v", &p->v, COT_FLOATS, rank, rank));
    sizes->dtype = p->q.dtype;
    CHECK(check_dtype_of(call, "k", &p->k, sizes->dtype, false));
    CHECK(check_dtype_of(call, "v", &p->v, sizes->dtype, false));
    sizes->B = sizes->packed ? p->cu_seqlens_q.shape[0] - 1 : p->q.shape[0];
    sizes->Tq = p->q.shape[rows];
    sizes->Tk = p->k.shape[rows];
    sizes->H = p->q.shape[rows + 1];
    sizes->d_qk = p->q.shape[rows + 2];
    sizes->Hkv = p->k.shape[rows + 1];
    sizes->d_v = p->v.shape[rows + 2];
    if (!sizes->packed) {
        CHECK(cot_check_size(call, "k", &p->k, 0, "B", "q", sizes->B));
        CHECK(cot_check_size(call, "v", &p->v, 0, "B", "q", sizes->B));
    }
    CHECK(cot_check_size(call, "k", &p->k, rows + 2, "d", "q", sizes->d_qk));
    CHECK(cot_check_size(call, "v", &p->v, rows, sizes->packed ? "total_k" : "Tk", "k", sizes->Tk));
    CHECK(cot_check_size(call, "v", &p->v, rows + 1, "Hkv", "k", sizes->Hkv));
    return check_heads(call, sizes);
}

/* Packed: max_seqlen replaces Tq and Tk, which until here are the rows of all sequences. */
static cot_status check_packing(const char *call, const options *o, attention_problem *p)
{
    attention_sizes *sizes = &p->sizes;
    const tensor_axis batch[] = {{"B", sizes->packed ? "cu_seqlens_q" : "q", sizes->B}};
    const struct {
        const char *name;
        int64_t given;
        int64_t *T, *rows;
    } lengths[] = {{"max_seqlen_q", o->max_seqlen_q, &sizes->Tq, &sizes->rows_q},
                   {"max_seqlen_k", o->max_seqlen_k, &sizes->Tk, &sizes->rows_k}};
    if (sizes->packed) {
        if (sizes->B < 0)
            return cot_fail(COT_INVALID_SHAPE, "%s: cu_seqlens_q has 0 entries, expected B+1", call);
        CHECK(cot_check_size(call, "cu_seqlens_k", &p->cu_seqlens_k, 0, "B+1", "cu_seqlens_q", sizes->B + 1));
    }
    for (int i = 0; i < COUNT(lengths); i++) {
        *lengths[i].rows = *lengths[i].T * (sizes->packed ? 1 : sizes->B);
        if (lengths[i].given < 0 || (!sizes->packed && lengths[i].given != 0))
            return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is %" PRId64 ", expected 0%s", call, lengths[i].name,
                            lengths[i].given, sizes->packed ? " or more" : " without cu_seqlens");
        if (sizes->packed) /* at most the row count, because a sequence is not longer than all sequences */
            *lengths[i].T = lengths[i].given < *lengths[i].rows ? lengths[i].given : *lengths[i].rows;
    }
    CHECK(cot_check_tensor(call, "seqused_q", &p->seqused_q, COT_DTYPE_BIT(COT_I32), 1, 1));
    if (cot_is_present(&p->seqused_q))
        CHECK(cot_check_size(call, "seqused_q", &p->seqused_q, 0, "B", batch->source, sizes->B));
    CHECK(cot_check_tensor(call, "seqused_k", &p->seqused_k, COT_DTYPE_BIT(COT_I32), 1, 1));
    if (cot_is_present(&p->seqused_k))
        CHECK(cot_check_size(call, "seqused_k", &p->seqused_k, 0, "B", batch->source, sizes->B));
    sizes->q_begin = o->q_begin, sizes->q_length = o->q_length;
    sizes->k_begin = o->k_begin, sizes->k_length = o->k_length;
    CHECK(check_block(call, "q", sizes->packed, sizes->Tq, &sizes->q_begin, &sizes->q_length));
    CHECK(check_block(call, "k", sizes->packed, sizes->Tk, &sizes->k_begin, &sizes->k_length));
    sizes->longest_k = sizes->packed ? o->max_seqlen_k : sizes->k_length;
    return COT_OK;
}

static cot_status check_bias(const char *call, const char *name, const cot_tensor *t, const options *o,
                             const attention_sizes *sizes)
{
    const tensor_axis axes[] = {{"B", "q", sizes->B},
                                {"H", "q", sizes->H},
                                {sizes->packed ? "max_seqlen_q" : "Tq", sizes->packed ? "the call" : "q",
                                 sizes->packed ? o->max_seqlen_q : sizes->Tq},
                                {sizes->packed ? "max_seqlen_k" : "Tk", sizes->packed ? "the call" : "k",
                                 sizes->packed ? o->max_seqlen_k : sizes->Tk}};
    CHECK(cot_check_tensor(call, name, t, COT_FLOATS, 4, 4));
    for (int i = 0; cot_is_present(t) && i < 4; i++)
        if (t->shape[i] != 1)
            CHECK(cot_check_size(call, name, t, i, axes[i].symbol, axes[i].source, axes[i].size));
    return COT_OK;
}

static cot_status check_memory_words(const char *call, const char *name, const cot_tensor *t)
{
    CHECK(cot_check_tensor(call, name, t, COT_DTYPE_BIT(COT_I32), 1, 1));
    if (cot_is_present(t) && t->shape[0] != 2)
        return cot_fail(COT_INVALID_SHAPE, "%s: %s has %" PRId64 " words, expected 2 (low, high)", call, name,
                        t->shape[0]);
    return COT_OK;
}

static cot_status check_optional_inputs(const char *call, const options *o, attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    CHECK(check_memory_words(call, "dropout_seed_tensor", &p->dropout_seed_tensor));
    CHECK(check_memory_words(call, "dropout_offset_tensor", &p->dropout_offset_tensor));
    const tensor_axis heads[] = {{"H", "q", sizes->H}};
    CHECK(check_axes(call, "sink", &p->sink, heads, 1));
    CHECK(cot_check_tensor(call, "alibi_slopes", &p->alibi_slopes, COT_FLOATS, 1, 2));
    if (cot_is_present(&p->alibi_slopes)) {
        const int rank = p->alibi_slopes.rank;
        if (rank == 2)
            CHECK(cot_check_size(call, "alibi_slopes", &p->alibi_slopes, 0, "B", "q", sizes->B));
        CHECK(cot_check_size(call, "alibi_slopes", &p->alibi_slopes, rank - 1, "H", "q", sizes->H));
    }
    return check_bias(call, "bias", &p->bias, o, sizes);
}

/* A tensor of q's shape, with `size` columns. */
static cot_status check_like_q(const char *call, const char *name, const cot_tensor *t, const attention_problem *p,
                               int64_t size, const char *symbol, const char *source)
{
    const attention_sizes *sizes = &p->sizes;
    const tensor_axis axes[] = {{"B", "q", sizes->B},
                                {sizes->packed ? "total_q" : "Tq", "q", p->q.shape[sizes->packed ? 0 : 1]},
                                {"H", "q", sizes->H},
                                {symbol, source, size}};
    return check_axes(call, name, t, axes + sizes->packed, 4 - sizes->packed);
}

static cot_status check_like_k(const char *call, const char *name, const cot_tensor *t, const attention_problem *p,
                               int64_t size, const char *symbol, const char *source)
{
    const attention_sizes *sizes = &p->sizes;
    const tensor_axis axes[] = {{"B", "q", sizes->B},
                                {sizes->packed ? "total_k" : "Tk", "k", p->k.shape[sizes->packed ? 0 : 1]},
                                {"Hkv", "k", sizes->Hkv},
                                {symbol, source, size}};
    return check_axes(call, name, t, axes + sizes->packed, 4 - sizes->packed);
}

static cot_status check_like_lse(const char *call, const char *name, const cot_tensor *t, const attention_problem *p)
{
    const attention_sizes *sizes = &p->sizes;
    const tensor_axis axes[] = {{"B", "q", sizes->B},
                                {"H", "q", sizes->H},
                                {sizes->packed ? "total_q" : "Tq", "q", p->q.shape[sizes->packed ? 0 : 1]}};
    CHECK(check_axes(call, name, t, axes + sizes->packed, 3 - sizes->packed));
    return check_statistic(call, name, t, sizes->dtype);
}

/* ---- checks of all calls ------------------------------------------------------------------------------- */

/* Either all float tensors are f64 or none is. */
static cot_status check_f64(const cot_direction *direction, const void *args, cot_dtype q)
{
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *t = (const cot_tensor *)((const char *)args + direction->fields[f].offset);
        if (cot_is_present(t) && t->dtype != COT_I32 && (t->dtype == COT_F64) != (q == COT_F64))
            return cot_fail(COT_INVALID_DTYPE, "%s: %s has dtype %s, %s has %s (f64 goes with f64 only)",
                            direction->call, direction->fields[f].name, cot_dtype_name(t->dtype),
                            direction->fields[0].name, cot_dtype_name(q));
    }
    return COT_OK;
}

/* Checks data pointers and overlaps of outputs. in_place: merge's out and lse may be the views out_a and lse_a. */
static cot_status check_memory(const cot_direction *direction, const void *args, bool in_place)
{
    cot_named_tensor memory[COT_MAX_TENSORS];
    for (int f = 0; f < direction->field_count; f++) {
        const cot_field *field = &direction->fields[f];
        const size_t length = strlen(field->name);
        const bool output = field->role == COT_OUTPUT;
        const bool is_a = length > 2 && strcmp(field->name + length - 2, "_a") == 0;
        memory[f] = (cot_named_tensor){field->name, (const cot_tensor *)((const char *)args + field->offset), output,
                                       in_place && (output || is_a)};
    }
    return cot_check_memory(direction->call, memory, direction->field_count);
}

static cot_status check_cu_seqlens(const char *call, const char *name, const cot_tensor *cu, int64_t rows,
                                   int64_t longest)
{
    const int64_t B = cu->shape[0] - 1;
    if (attention_load_i32(cu, 0) != 0)
        return cot_fail(COT_INVALID_DATA, "%s: cu_seqlens_%s[0] is %" PRId64 ", expected 0", call, name,
                        attention_load_i32(cu, 0));
    for (int64_t b = 1; b <= B; b++) {
        const int64_t length = attention_load_i32(cu, b) - attention_load_i32(cu, b - 1);
        if (length < 0)
            return cot_fail(COT_INVALID_DATA,
                            "%s: cu_seqlens_%s[%" PRId64 "] is %" PRId64 ", less than %" PRId64 " before it", call,
                            name, b, attention_load_i32(cu, b), attention_load_i32(cu, b - 1));
        if (length > longest)
            return cot_fail(COT_INVALID_DATA,
                            "%s: cu_seqlens_%s gives sequence %" PRId64 " %" PRId64 " rows, max_seqlen_%s is %" PRId64,
                            call, name, b - 1, length, name, longest);
    }
    if (attention_load_i32(cu, B) > rows)
        return cot_fail(COT_INVALID_DATA, "%s: cu_seqlens_%s ends at %" PRId64 ", %s has total_%s=%" PRId64, call, name,
                        attention_load_i32(cu, B), name, name, rows);
    return COT_OK;
}

static cot_status check_seqused(const char *call, const char *name, const cot_tensor *used, const cot_tensor *cu,
                                int64_t B, int64_t length)
{
    for (int64_t b = 0; cot_is_present(used) && b < B; b++) {
        const int64_t max_length =
            cot_is_present(cu) ? attention_load_i32(cu, b + 1) - attention_load_i32(cu, b) : length;
        const int64_t value = attention_load_i32(used, b);
        if (value < 0 || value > max_length)
            return cot_fail(COT_INVALID_DATA, "%s: seqused_%s[%" PRId64 "] is %" PRId64 ", expected 0 to %" PRId64,
                            call, name, b, value, max_length);
    }
    return COT_OK;
}

static cot_status check_lengths(const char *call, const void *problem)
{
    const attention_problem *p = problem;
    const attention_sizes *sizes = &p->sizes;
    if (sizes->packed) {
        CHECK(check_cu_seqlens(call, "q", &p->cu_seqlens_q, sizes->rows_q, sizes->Tq));
        CHECK(check_cu_seqlens(call, "k", &p->cu_seqlens_k, sizes->rows_k, sizes->Tk));
    }
    CHECK(check_seqused(call, "q", &p->seqused_q, &p->cu_seqlens_q, sizes->B, sizes->q_length));
    return check_seqused(call, "k", &p->seqused_k, &p->cu_seqlens_k, sizes->B, sizes->k_length);
}

/* [T,H,*] becomes [1,T,H,*] and [H,T] becomes [1,H,T], with a batch stride of 0. So kernels see one form. */
static void add_batch_axis(cot_tensor *t)
{
    if (!cot_is_present(t))
        return;
    memmove(t->shape + 1, t->shape, (size_t)t->rank * sizeof *t->shape);
    memmove(t->stride + 1, t->stride, (size_t)t->rank * sizeof *t->stride);
    t->shape[0] = 1;
    t->stride[0] = 0;
    t->rank++;
}

static void add_batch_axes(attention_problem *p)
{
    cot_tensor *const views[] = {&p->q,    &p->k,     &p->v,  &p->lse, &p->out, &p->dout,
                                 &p->dlse, &p->delta, &p->dq, &p->dk,  &p->dv};
    for (int i = 0; p->sizes.packed && i < COUNT(views); i++)
        add_batch_axis(views[i]);
}

/* ---- the calls ---------------------------------------------------------------------------------------- */

#define COPY_OPTIONS(a)                                                                                          \
    {                                                                                                            \
        (a)->causal, (a)->window, (a)->window_left, (a)->window_right, (a)->scale, (a)->softcap, (a)->dropout_p, \
            (a)->max_seqlen_q, (a)->max_seqlen_k, (a)->q_begin, (a)->q_length, (a)->k_begin, (a)->k_length       \
    }

#define COPY_INPUTS(p, a)                                                                                            \
    ((p)->dropout_seed_tensor = (a)->dropout_seed_tensor, (p)->dropout_offset_tensor = (a)->dropout_offset_tensor,   \
     (p)->dropout_seed = (a)->dropout_seed, (p)->dropout_offset = (a)->dropout_offset, (p)->q = (a)->q,              \
     (p)->k = (a)->k, (p)->v = (a)->v, (p)->cu_seqlens_q = (a)->cu_seqlens_q, (p)->cu_seqlens_k = (a)->cu_seqlens_k, \
     (p)->seqused_q = (a)->seqused_q, (p)->seqused_k = (a)->seqused_k, (p)->sink = (a)->sink,                        \
     (p)->alibi_slopes = (a)->alibi_slopes, (p)->bias = (a)->bias, (p)->lse = (a)->lse, (p)->out = (a)->out)

static cot_status check_inputs(const char *call, const options *o, attention_problem *p)
{
    CHECK(check_mask(call, o, &p->sizes));
    CHECK(check_qkv(call, p));
    CHECK(check_numbers(call, o, &p->sizes));
    CHECK(check_packing(call, o, p));
    CHECK(check_optional_inputs(call, o, p));
    CHECK(check_like_q(call, "out", &p->out, p, p->sizes.d_v, "d_v", "v"));
    CHECK(check_dtype_of(call, "out", &p->out, p->sizes.dtype, true));
    return check_like_lse(call, "lse", &p->lse, p);
}

static cot_status validate_forward(const char *call, const void *args, bool with_data, void *problem)
{
    const cot_attention_forward_args *a = args;
    const cot_direction *direction = &cot_attention_directions[COT_ATTENTION_FORWARD];
    attention_problem *p = problem;
    const options o = COPY_OPTIONS(a);
    memset(p, 0, sizeof *p);
    COPY_INPUTS(p, a);
    CHECK(check_inputs(call, &o, p));
    if (cot_is_present(&p->sink) && (p->sizes.q_length != p->sizes.Tq || p->sizes.k_length != p->sizes.Tk))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: sink is given for a block, expected it in attention_merge", call);
    CHECK(check_f64(direction, args, p->sizes.dtype));
    if (with_data)
        CHECK(check_memory(direction, args, false));
    add_batch_axes(p);
    return COT_OK;
}

static cot_status check_delta(const char *call, const attention_problem *p)
{
    if (cot_is_present(&p->delta) && (cot_is_present(&p->out) || cot_is_present(&p->dlse)))
        return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is given together with delta, which stands for it", call,
                        cot_is_present(&p->out) ? "out" : "dlse");
    return cot_is_present(&p->delta) ? COT_OK : cot_check_required(call, "out", &p->out);
}

static cot_status validate_backward(const char *call, const void *args, bool with_data, void *problem)
{
    const cot_attention_backward_args *a = args;
    const cot_direction *direction = &cot_attention_directions[COT_ATTENTION_BACKWARD];
    attention_problem *p = problem;
    const options o = COPY_OPTIONS(a);
    memset(p, 0, sizeof *p);
    COPY_INPUTS(p, a);
    const attention_sizes *sizes = &p->sizes;
    p->accumulate = a->accumulate;
    p->allow_nondeterminism = a->allow_nondeterminism;
    p->dout = a->dout, p->dlse = a->dlse, p->delta = a->delta;
    p->dq = a->dq, p->dk = a->dk, p->dv = a->dv, p->dsink = a->dsink, p->dbias = a->dbias;
    CHECK(check_flag(call, "accumulate", a->accumulate));
    CHECK(check_flag(call, "allow_nondeterminism", a->allow_nondeterminism));
    CHECK(check_inputs(call, &o, p));
    CHECK(cot_check_required(call, "lse", &p->lse));
    CHECK(check_delta(call, p));
    CHECK(cot_check_required(call, "dout", &p->dout));
    CHECK(check_like_q(call, "dout", &p->dout, p, sizes->d_v, "d_v", "v"));
    CHECK(check_dtype_of(call, "dout", &p->dout, sizes->dtype, false));
    CHECK(check_like_lse(call, "dlse", &p->dlse, p));
    CHECK(check_like_lse(call, "delta", &p->delta, p));
    CHECK(check_like_q(call, "dq", &p->dq, p, sizes->d_qk, "d", "q"));
    CHECK(check_dtype_of(call, "dq", &p->dq, sizes->dtype, true));
    CHECK(check_like_k(call, "dk", &p->dk, p, sizes->d_qk, "d", "k"));
    CHECK(check_dtype_of(call, "dk", &p->dk, sizes->dtype, true));
    CHECK(check_like_k(call, "dv", &p->dv, p, sizes->d_v, "d_v", "v"));
    CHECK(check_dtype_of(call, "dv", &p->dv, sizes->dtype, true));
    const tensor_axis heads[] = {{"H", "q", sizes->H}};
    CHECK(check_axes(call, "dsink", &p->dsink, heads, 1));
    if (cot_is_present(&p->dsink))
        CHECK(cot_check_required(call, "sink", &p->sink));
    CHECK(cot_check_tensor(call, "dbias", &p->dbias, COT_FLOATS, 4, 4));
    if (cot_is_present(&p->dbias)) {
        static const char *const symbols[] = {"B", "H", "Tq", "Tk"};
        CHECK(cot_check_required(call, "bias", &p->bias));
        for (int i = 0; i < 4; i++)
            CHECK(cot_check_size(call, "dbias", &p->dbias, i, symbols[i], "bias", p->bias.shape[i]));
    }
    CHECK(check_f64(direction, args, sizes->dtype));
    if (with_data)
        CHECK(check_memory(direction, args, false));
    add_batch_axes(p);
    return COT_OK;
}

/* The first tensor of delta and merge: [B,Tq,H,d_v] or packed [total_q,H,d_v]. */
static cot_status check_first(const char *call, const char *name, const cot_tensor *t, attention_sizes *sizes)
{
    CHECK(cot_check_required(call, name, t));
    CHECK(cot_check_tensor(call, name, t, COT_FLOATS, 3, 4));
    sizes->packed = t->rank == 3;
    sizes->B = sizes->packed ? 1 : t->shape[0];
    sizes->Tq = t->shape[t->rank - 3];
    sizes->H = t->shape[t->rank - 2];
    sizes->d_v = t->shape[t->rank - 1];
    sizes->dtype = t->dtype;
    return COT_OK;
}

static cot_status check_like_first(const char *call, const char *name, const cot_tensor *t, const char *first,
                                   const attention_sizes *sizes)
{
    const tensor_axis axes[] = {{"B", first, sizes->B},
                                {sizes->packed ? "total_q" : "Tq", first, sizes->Tq},
                                {"H", first, sizes->H},
                                {"d_v", first, sizes->d_v}};
    return check_axes(call, name, t, axes + sizes->packed, 4 - sizes->packed);
}

static cot_status check_statistic_of(const char *call, const char *name, const cot_tensor *t, const char *first,
                                     const attention_sizes *sizes)
{
    const tensor_axis axes[] = {
        {"B", first, sizes->B}, {"H", first, sizes->H}, {sizes->packed ? "total_q" : "Tq", first, sizes->Tq}};
    CHECK(check_axes(call, name, t, axes + sizes->packed, 3 - sizes->packed));
    return check_statistic(call, name, t, sizes->dtype);
}

static cot_status validate_delta(const char *call, const void *args, bool with_data, void *problem)
{
    const cot_direction *direction = &cot_attention_directions[COT_ATTENTION_DELTA];
    attention_delta_problem *p = problem;
    memset(p, 0, sizeof *p);
    p->args = *(const cot_attention_delta_args *)args;
    cot_attention_delta_args *a = &p->args;
    CHECK(check_first(call, "out", &a->out, &p->sizes));
    CHECK(cot_check_required(call, "dout", &a->dout));
    CHECK(check_like_first(call, "dout", &a->dout, "out", &p->sizes));
    CHECK(check_statistic_of(call, "dlse", &a->dlse, "out", &p->sizes));
    CHECK(cot_check_required(call, "delta", &a->delta));
    CHECK(check_statistic_of(call, "delta", &a->delta, "out", &p->sizes));
    CHECK(check_f64(direction, args, p->sizes.dtype));
    if (with_data)
        CHECK(check_memory(direction, args, false));
    cot_tensor *const views[] = {&a->out, &a->dout, &a->dlse, &a->delta};
    for (int i = 0; p->sizes.packed && i < COUNT(views); i++)
        add_batch_axis(views[i]);
    return COT_OK;
}

static cot_status validate_merge(const char *call, const void *args, bool with_data, void *problem)
{
    const cot_direction *direction = &cot_attention_directions[COT_ATTENTION_MERGE];
    attention_merge_problem *p = problem;
    memset(p, 0, sizeof *p);
    p->args = *(const cot_attention_merge_args *)args;
    cot_attention_merge_args *a = &p->args;
    CHECK(check_first(call, "out_a", &a->out_a, &p->sizes));
    CHECK(cot_check_required(call, "out_b", &a->out_b));
    CHECK(check_like_first(call, "out_b", &a->out_b, "out_a", &p->sizes));
    CHECK(cot_check_required(call, "lse_a", &a->lse_a));
    CHECK(check_statistic_of(call, "lse_a", &a->lse_a, "out_a", &p->sizes));
    CHECK(cot_check_required(call, "lse_b", &a->lse_b));
    CHECK(check_statistic_of(call, "lse_b", &a->lse_b, "out_a", &p->sizes));
    const tensor_axis heads[] = {{"H", "out_a", p->sizes.H}};
    CHECK(check_axes(call, "sink", &a->sink, heads, 1));
    CHECK(check_like_first(call, "out", &a->out, "out_a", &p->sizes));
    CHECK(check_statistic_of(call, "lse", &a->lse, "out_a", &p->sizes));
    CHECK(check_f64(direction, args, p->sizes.dtype));
    if (with_data)
        CHECK(check_memory(direction, args, true));
    cot_tensor *const views[] = {&a->out_a, &a->out_b, &a->lse_a, &a->lse_b, &a->out, &a->lse};
    for (int i = 0; p->sizes.packed && i < COUNT(views); i++)
        add_batch_axis(views[i]);
    return COT_OK;
}

/* ---- tables ------------------------------------------------------------------------------------------- */

#define COT_KERNEL_ENTRY COT_DECLARE_KERNEL
#include "attention_kernels.def"
#undef COT_KERNEL_ENTRY

#include "attention_admit.h"
#include "cuda/attention_sm90_admit.h"
#include "cuda/attention_sm80_admit.h"

static const cot_kernel kernels[] = {
#define COT_KERNEL_ENTRY(direction, ...) COT_KERNEL_INITIALIZER(COT_ATTENTION_##direction, __VA_ARGS__),
#include "attention_kernels.def"
#undef COT_KERNEL_ENTRY
};

/* Tables, one entry per line. */
/* clang-format off */

static const cot_field forward_fields[] = {
    COT_FIELD(attention_forward, q, COT_INPUT),
    COT_FIELD(attention_forward, k, COT_INPUT),
    COT_FIELD(attention_forward, v, COT_INPUT),
    COT_FIELD(attention_forward, cu_seqlens_q, COT_INPUT),
    COT_FIELD(attention_forward, cu_seqlens_k, COT_INPUT),
    COT_FIELD(attention_forward, seqused_q, COT_INPUT),
    COT_FIELD(attention_forward, seqused_k, COT_INPUT),
    COT_FIELD(attention_forward, sink, COT_INPUT),
    COT_FIELD(attention_forward, alibi_slopes, COT_INPUT),
    COT_FIELD(attention_forward, bias, COT_INPUT),
    COT_FIELD(attention_forward, dropout_seed_tensor, COT_INPUT),
    COT_FIELD(attention_forward, dropout_offset_tensor, COT_INPUT),
    COT_FIELD(attention_forward, out, COT_OUTPUT),
    COT_FIELD(attention_forward, lse, COT_OUTPUT),
};

static const cot_field backward_fields[] = {
    COT_FIELD(attention_backward, q, COT_INPUT),
    COT_FIELD(attention_backward, k, COT_INPUT),
    COT_FIELD(attention_backward, v, COT_INPUT),
    COT_FIELD(attention_backward, cu_seqlens_q, COT_INPUT),
    COT_FIELD(attention_backward, cu_seqlens_k, COT_INPUT),
    COT_FIELD(attention_backward, seqused_q, COT_INPUT),
    COT_FIELD(attention_backward, seqused_k, COT_INPUT),
    COT_FIELD(attention_backward, sink, COT_INPUT),
    COT_FIELD(attention_backward, alibi_slopes, COT_INPUT),
    COT_FIELD(attention_backward, bias, COT_INPUT),
    COT_FIELD(attention_backward, dropout_seed_tensor, COT_INPUT),
    COT_FIELD(attention_backward, dropout_offset_tensor, COT_INPUT),
    COT_FIELD(attention_backward, lse, COT_INPUT),
    COT_FIELD(attention_backward, out, COT_INPUT),
    COT_FIELD(attention_backward, dout, COT_INPUT),
    COT_FIELD(attention_backward, dlse, COT_INPUT),
    COT_FIELD(attention_backward, delta, COT_INPUT),
    COT_GRADIENT(attention_backward, dq),
    COT_GRADIENT(attention_backward, dk),
    COT_GRADIENT(attention_backward, dv),
    COT_GRADIENT(attention_backward, dsink),
    COT_GRADIENT(attention_backward, dbias),
};

static const cot_field delta_fields[] = {
    COT_FIELD(attention_delta, out, COT_INPUT),
    COT_FIELD(attention_delta, dout, COT_INPUT),
    COT_FIELD(attention_delta, dlse, COT_INPUT),
    COT_FIELD(attention_delta, delta, COT_OUTPUT),
};

static const cot_field merge_fields[] = {
    COT_FIELD(attention_merge, out_a, COT_INPUT),
    COT_FIELD(attention_merge, out_b, COT_INPUT),
    COT_FIELD(attention_merge, lse_a, COT_INPUT),
    COT_FIELD(attention_merge, lse_b, COT_INPUT),
    COT_FIELD(attention_merge, sink, COT_INPUT),
    COT_FIELD(attention_merge, out, COT_OUTPUT),
    COT_FIELD(attention_merge, lse, COT_OUTPUT),
};

#define SHARED_OPTIONS(call) \
    COT_CALL_OPTION(call, causal, I32, NULL, "1: no key after the query"), \
    COT_CALL_OPTION(call, window, I32, NULL, "1: window_left and window_right count"), \
    COT_CALL_OPTION(call, window_left, I64, NULL, "keys before the query; -1: all"), \
    COT_CALL_OPTION(call, window_right, I64, NULL, "keys after the query; -1: all"), \
    COT_CALL_OPTION(call, scale, F64, NULL, "default 1/sqrt(d)"), \
    COT_CALL_OPTION(call, softcap, F64, NULL, "default none"), \
    COT_CALL_OPTION(call, dropout_p, F64, NULL, "probability of dropping"), \
    COT_CALL_OPTION(call, dropout_seed, U64, NULL, NULL), \
    COT_CALL_OPTION(call, dropout_offset, U64, NULL, NULL), \
    COT_CALL_OPTION(call, max_seqlen_q, I64, NULL, "the longest sequence of cu_seqlens_q, which requires it"), \
    COT_CALL_OPTION(call, max_seqlen_k, I64, NULL, "the longest sequence of cu_seqlens_k, which requires it"), \
    COT_CALL_OPTION(call, q_begin, I64, NULL, "of a block of queries: its first row in the sequence"), \
    COT_CALL_OPTION(call, q_length, I64, NULL, "of a block of queries: rows of the sequence; by default q is no block"), \
    COT_CALL_OPTION(call, k_begin, I64, NULL, "of a block of keys: its first row in the sequence"), \
    COT_CALL_OPTION(call, k_length, I64, NULL, "of a block of keys: rows of the sequence; by default k is no block")

static const cot_option forward_options[] = {SHARED_OPTIONS(attention_forward)};
static const cot_option backward_options[] = {
    SHARED_OPTIONS(attention_backward),
    COT_CALL_OPTION(attention_backward, accumulate, I32, NULL, "1: gradients are added to old values"),
    COT_CALL_OPTION(attention_backward, allow_nondeterminism, I32, NULL, "1: a faster order of sums, other last bits every run"),
};

/* Packed tensors have no batch axis. */
#define SHARED_SIGNATURE \
    "q[...,Tq,H,d] k[...,Tk,Hkv,d] v[...,Tk,Hkv,d_v] cu_seqlens_q[B+1] cu_seqlens_k[B+1] seqused_q[B] seqused_k[B] " \
    "sink[H] alibi_slopes[...,H] bias[B,H,Tq,Tk] dropout_seed_tensor[2] dropout_offset_tensor[2] "
static const char forward_signature[] = SHARED_SIGNATURE "out[...,Tq,H,d_v] lse:f32[...,H,Tq]";
static const char backward_signature[] = SHARED_SIGNATURE
    "lse[...,H,Tq] out[...,Tq,H,d_v] dout[...,Tq,H,d_v] dlse[...,H,Tq] delta[...,H,Tq] dq=q dk=k dv=v dsink=sink dbias=bias";
static const char delta_signature[] = "out[...,Tq,H,d_v] dout[...,Tq,H,d_v] dlse[...,H,Tq] delta:f32[...,H,Tq]";
static const char merge_signature[] =
    "out_a[...,Tq,H,d_v] out_b[...,Tq,H,d_v] lse_a[...,H,Tq] lse_b[...,H,Tq] sink[H] out=out_a lse=lse_a";

/* clang-format on */

const cot_direction cot_attention_directions[] = {
    COT_DIRECTION(attention, forward, forward, .problem_size = sizeof(attention_problem), COT_OPTIONS(forward_options),
                  .check_index_data = check_lengths),
    COT_DIRECTION(attention, backward, backward, .problem_size = sizeof(attention_problem),
                  COT_OPTIONS(backward_options), COT_ACCUMULATE(attention_backward), .check_index_data = check_lengths),
    COT_DIRECTION(attention, delta, delta, .problem_size = sizeof(attention_delta_problem)),
    COT_DIRECTION(attention, merge, merge, .problem_size = sizeof(attention_merge_problem)),
};

const cot_op cot_attention_op = COT_OP(attention, kernels);

_Static_assert(sizeof(cot_attention_backward_args) <= COT_MAX_ARGS, "dispatch copies the arguments");
_Static_assert(sizeof(attention_problem) <= COT_MAX_PROBLEM, "dispatch holds the problem");

/* ---- the public calls --------------------------------------------------------------------------------- */

COT_PUBLIC_CALL(cot_attention_forward, cot_attention_directions[COT_ATTENTION_FORWARD])
COT_PUBLIC_CALL(cot_attention_backward, cot_attention_directions[COT_ATTENTION_BACKWARD])
COT_PUBLIC_CALL(cot_attention_delta, cot_attention_directions[COT_ATTENTION_DELTA])
COT_PUBLIC_CALL(cot_attention_merge, cot_attention_directions[COT_ATTENTION_MERGE])
