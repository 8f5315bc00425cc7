/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_case_build.c: builds cases of the four ops from their sizes and choices, and parses the command line's words of a
 * case. */
#include "mhc_case_build.h"

#include "cases/case_words.h"

#include <stdio.h>

static const char *const layout_names[] = {"token-major", "stream-major", "slice", "strided"};

static const cot_direction *direction_of(const mhc_case_params *p)
{
    static const cot_direction *const directions[] = {cot_mhc_pre_directions, cot_mhc_sinkhorn_directions,
                                                      cot_mhc_post_directions, cot_mhc_post_pre_directions};
    return &directions[p->op][p->direction];
}

/* ---- tensors ------------------------------------------------------------------------------------------ */

/* Sets field `name` [B,T,rest...] in the case's layout. */
static void set_token_tensor(const mhc_case_params *p, cot_case *c, const char *name, cot_dtype dtype, int rest,
                             int64_t size2, int64_t size3)
{
    const int field = cot_field_index(direction_of(p), name), rank = 2 + rest, last = rank - 1;
    const int64_t shape[] = {p->B, p->T, size2, size3};
    cot_tensor t = cot_tensor_contiguous(NULL, dtype, rank, shape);
    int64_t pitch = shape[last];
    switch (p->layout) {
    case STREAM_MAJOR:
        if (rest == 2)
            t.stride[2] = p->T * size3, t.stride[1] = size3;
        break;
    case SLICE:
        pitch = 2 * shape[last] + 3;
        for (int axis = last - 1; axis >= 0; axis--) {
            t.stride[axis] = pitch;
            pitch *= shape[axis];
        }
        c->offset[field] = 1;
        break;
    case STRIDED:
        pitch = 1;
        for (int axis = 0; axis < last; axis++) {
            t.stride[axis] = pitch;
            pitch *= shape[axis] > 0 ? shape[axis] : 1;
        }
        t.stride[last] = 2 * pitch;
        break;
    default: break;
    }
    *cot_field_tensor(&direction_of(p)->fields[field], c->args) = t;
}

static cot_dtype coefficient_dtype(const mhc_case_params *p)
{
    return p->dtype == COT_F64 ? COT_F64 : COT_F32;
}

static void set_stream_tensor(const mhc_case_params *p, cot_case *c, const char *name) /* [B,T,n,D] */
{
    set_token_tensor(p, c, name, p->dtype, 2, p->n, p->D);
}

static void set_layer_tensor(const mhc_case_params *p, cot_case *c, const char *name) /* [B,T,D] */
{
    set_token_tensor(p, c, name, p->dtype, 1, p->D, 0);
}

static void set_coefficients(const mhc_case_params *p, cot_case *c, const char *name, int64_t count)
{
    set_token_tensor(p, c, name, coefficient_dtype(p), 1, count, 0);
}

static void set_matrix(const mhc_case_params *p, cot_case *c, const char *name)
{
    set_token_tensor(p, c, name, coefficient_dtype(p), 2, p->n, p->n);
}

/* Sets a parameter: row-major, or with other strides in the strided layout. */
static void set_parameter(const mhc_case_params *p, cot_case *c, const char *name, int64_t rows, int64_t columns)
{
    const bool strided = p->layout == STRIDED;
    const int64_t shape[] = {rows, columns};
    cot_tensor t = columns > 0 ? cot_tensor_contiguous(NULL, coefficient_dtype(p), 2, shape)
                               : cot_tensor_contiguous(NULL, coefficient_dtype(p), 1, shape);
    if (strided && columns > 0)
        t.stride[0] = 1, t.stride[1] = rows + 1;
    else if (strided)
        t.stride[0] = 3;
    *cot_field_tensor(&direction_of(p)->fields[cot_field_index(direction_of(p), name)], c->args) = t;
}

static void set_parameters(const mhc_case_params *p, cot_case *c, const char *prefix, bool bias, bool gamma)
{
    const int64_t M = p->n * (p->n + 2);
    char name[16];
    snprintf(name, sizeof name, "%sphi", prefix);
    set_parameter(p, c, name, M, p->n * p->D);
    snprintf(name, sizeof name, "%salpha", prefix);
    set_parameter(p, c, name, 3, 0);
    snprintf(name, sizeof name, "%sbias", prefix);
    if (bias)
        set_parameter(p, c, name, M, 0);
    snprintf(name, sizeof name, "%sgamma", prefix);
    if (gamma)
        set_parameter(p, c, name, p->n, p->D);
}

/* With a wide phi most sigmoids are 0 or 1, and few elements carry most of the error. */
static int64_t error_concentration(const mhc_case_params *p)
{
    return p->wide_phi ? 16 : 1;
}

static void pre_forward_case(const mhc_case_params *p, cot_case *c)
{
    cot_mhc_pre_forward_args *a = (cot_mhc_pre_forward_args *)c->args;
    COT_MHC_PRE_FORWARD_INIT(a);
    a->sinkhorn_iterations = (int32_t)p->iterations;
    if (p->large_eps)
        a->norm_eps = a->hc_eps = a->sinkhorn_eps = 0.25;
    set_stream_tensor(p, c, "x");
    set_parameters(p, c, "", true, p->gamma);
    set_coefficients(p, c, "h_pre", p->n);
    set_coefficients(p, c, "h_post", p->n);
    set_coefficients(p, c, "h_mix", p->n * (p->n + 2));
    set_token_tensor(p, c, "inv_rms", coefficient_dtype(p), 0, 0, 0);
    c->shared[cot_field_index(direction_of(p), "h_pre")] = c->shared[cot_field_index(direction_of(p), "h_post")] =
        error_concentration(p);
    if (p->fused)
        set_matrix(p, c, "h_res");
    c->shared[cot_field_index(direction_of(p), "h_res")] =
        p->n * p->n; /* all elements share the u and v of their token */
    if (!p->only_saved) {
        set_layer_tensor(p, c, "h_in");
        c->shared[cot_field_index(direction_of(p), "h_in")] =
            cot_ceil_div(p->D, p->n) * error_concentration(p); /* a token has n factors */
        set_matrix(p, c, "h_res_logits");
    }
}

static void pre_backward_case(const mhc_case_params *p, cot_case *c)
{
    cot_mhc_pre_backward_args *a = (cot_mhc_pre_backward_args *)c->args;
    COT_MHC_PRE_BACKWARD_INIT(a);
    a->sinkhorn_iterations = (int32_t)p->iterations;
    a->accumulate = p->accumulate;
    if (p->large_eps)
        a->hc_eps = a->sinkhorn_eps = 0.25;
    set_stream_tensor(p, c, "x");
    set_parameters(p, c, "", true, p->gamma);
    set_token_tensor(p, c, "inv_rms", coefficient_dtype(p), 0, 0, 0);
    set_coefficients(p, c, "h_mix", p->n * (p->n + 2));
    set_coefficients(p, c, "h_pre", p->n);
    set_coefficients(p, c, "h_post", p->n);
    set_layer_tensor(p, c, "dh_in");
    set_coefficients(p, c, "dh_post", p->n);
    if (p->dh_res_logits)
        set_matrix(p, c, "dh_res_logits");
    if (p->fused)
        set_matrix(p, c, "dh_res");
    if (p->dx_post)
        set_stream_tensor(p, c, "dx_post");
    if (!p->no_data_gradient)
        set_stream_tensor(p, c, "dx");
    /* A token has M factors. The elements of dx take most of their error from one sum. */
    const int64_t factors = p->B * p->T * p->n * (p->n + 2), K = p->n * p->D * error_concentration(p);
    c->shared[cot_field_index(direction_of(p), "dx")] = K;
    c->shared[cot_field_index(direction_of(p), "dphi")] =
        factors > 0 ? cot_ceil_div(p->n * (p->n + 2) * K, factors) : 1;
    c->shared[cot_field_index(direction_of(p), "dgamma")] = factors > 0 ? cot_ceil_div(K, factors) : 1;
    if (!p->no_parameter_gradient)
        set_parameters(p, c, "d", true, p->gamma || !(p->uses & COT_CASE_GRADIENT));
}

static void sinkhorn_forward_case(const mhc_case_params *p, cot_case *c)
{
    cot_mhc_sinkhorn_forward_args *a = (cot_mhc_sinkhorn_forward_args *)c->args;
    COT_MHC_SINKHORN_INIT(a);
    a->iterations = (int32_t)p->iterations;
    a->eps = p->no_eps ? 0 : p->large_eps ? 0.25 : a->eps;
    set_matrix(p, c, "h_res_logits");
    set_matrix(p, c, "h_res");
}

static void sinkhorn_backward_case(const mhc_case_params *p, cot_case *c)
{
    cot_mhc_sinkhorn_backward_args *a = (cot_mhc_sinkhorn_backward_args *)c->args;
    COT_MHC_SINKHORN_INIT(a);
    a->iterations = (int32_t)p->iterations;
    a->eps = p->no_eps ? 0 : p->large_eps ? 0.25 : a->eps;
    set_matrix(p, c, "h_res_logits");
    set_matrix(p, c, "dh_res");
    set_matrix(p, c, "dh_res_logits");
    /* All elements share the u and v of their token. */
    c->shared[cot_field_index(direction_of(p), "dh_res_logits")] = p->n * p->n;
}

/* Sets the inputs of post, alone or in post_pre. */
static void set_post_inputs(const mhc_case_params *p, cot_case *c)
{
    set_stream_tensor(p, c, "x");
    set_layer_tensor(p, c, "f");
    set_coefficients(p, c, "h_post", p->n);
    set_matrix(p, c, "h_res");
}

static void post_forward_case(const mhc_case_params *p, cot_case *c)
{
    cot_mhc_post_forward_args *a = (cot_mhc_post_forward_args *)c->args;
    COT_INIT(a);
    a->h_res_is_out_in = p->out_in;
    set_post_inputs(p, c);
    set_stream_tensor(p, c, "y");
}

static void post_backward_case(const mhc_case_params *p, cot_case *c)
{
    cot_mhc_post_backward_args *a = (cot_mhc_post_backward_args *)c->args;
    COT_INIT(a);
    a->h_res_is_out_in = p->out_in;
    set_post_inputs(p, c);
    set_stream_tensor(p, c, "dy");
    if (!p->no_data_gradient) {
        set_stream_tensor(p, c, "dx");
        set_layer_tensor(p, c, "df");
    }
    if (!p->no_parameter_gradient) {
        set_coefficients(p, c, "dh_post", p->n);
        set_matrix(p, c, "dh_res");
    }
}

static void post_pre_forward_case(const mhc_case_params *p, cot_case *c)
{
    const cot_direction *direction = direction_of(p);
    cot_mhc_post_pre_forward_args *a = (cot_mhc_post_pre_forward_args *)c->args;
    COT_MHC_POST_PRE_FORWARD_INIT(a);
    a->sinkhorn_iterations = (int32_t)p->iterations;
    a->h_res_is_out_in = p->out_in;
    if (p->large_eps)
        a->norm_eps = a->hc_eps = a->sinkhorn_eps = 0.25;
    set_post_inputs(p, c);
    set_parameters(p, c, "", true, p->gamma);
    set_stream_tensor(p, c, "y");
    if (p->only_y)
        return;
    set_coefficients(p, c, "h_pre", p->n);
    set_coefficients(p, c, "next_h_post", p->n);
    set_coefficients(p, c, "h_mix", p->n * (p->n + 2));
    set_token_tensor(p, c, "inv_rms", coefficient_dtype(p), 0, 0, 0);
    c->shared[cot_field_index(direction, "h_pre")] = c->shared[cot_field_index(direction, "next_h_post")] =
        error_concentration(p);
    if (p->fused)
        set_matrix(p, c, "next_h_res");
    c->shared[cot_field_index(direction, "next_h_res")] = p->n * p->n; /* as in pre */
    if (!p->only_saved) {
        set_layer_tensor(p, c, "h_in");
        c->shared[cot_field_index(direction, "h_in")] = cot_ceil_div(p->D, p->n) * error_concentration(p);
        set_matrix(p, c, "h_res_logits");
    }
}

static void post_pre_backward_case(const mhc_case_params *p, cot_case *c)
{
    const cot_direction *direction = direction_of(p);
    cot_mhc_post_pre_backward_args *a = (cot_mhc_post_pre_backward_args *)c->args;
    COT_MHC_POST_PRE_BACKWARD_INIT(a);
    a->sinkhorn_iterations = (int32_t)p->iterations;
    a->accumulate = p->accumulate;
    a->h_res_is_out_in = p->out_in;
    if (p->large_eps)
        a->hc_eps = a->sinkhorn_eps = 0.25;
    set_post_inputs(p, c);
    if (p->saved_y)
        set_stream_tensor(p, c, "y");
    set_parameters(p, c, "", true, p->gamma);
    set_token_tensor(p, c, "inv_rms", coefficient_dtype(p), 0, 0, 0);
    set_coefficients(p, c, "h_mix", p->n * (p->n + 2));
    set_coefficients(p, c, "h_pre", p->n);
    set_coefficients(p, c, "next_h_post", p->n);
    set_layer_tensor(p, c, "dh_in");
    set_coefficients(p, c, "dnext_h_post", p->n);
    if (p->dh_res_logits)
        set_matrix(p, c, "dh_res_logits");
    if (p->fused)
        set_matrix(p, c, "dnext_h_res");
    if (p->dx_post)
        set_stream_tensor(p, c, "dy");
    if (!p->no_data_gradient) {
        set_stream_tensor(p, c, "dx");
        set_layer_tensor(p, c, "df");
        set_coefficients(p, c, "dh_post", p->n);
        set_matrix(p, c, "dh_res");
    }
    /* The factors of pre's backward. The elements of g share them, and so do all sums of g of a token. */
    const int64_t factors = p->B * p->T * p->n * (p->n + 2), K = p->n * p->D * error_concentration(p);
    c->shared[cot_field_index(direction, "dx")] = c->shared[cot_field_index(direction, "df")] = K;
    c->shared[cot_field_index(direction, "dh_res")] = p->n * p->n * error_concentration(p);
    c->shared[cot_field_index(direction, "dh_post")] = p->n * error_concentration(p);
    c->shared[cot_field_index(direction, "dphi")] = factors > 0 ? cot_ceil_div(p->n * (p->n + 2) * K, factors) : 1;
    c->shared[cot_field_index(direction, "dgamma")] = factors > 0 ? cot_ceil_div(K, factors) : 1;
    if (!p->no_parameter_gradient)
        set_parameters(p, c, "d", true, p->gamma || !(p->uses & COT_CASE_GRADIENT));
}

/* Describes the options. The prepare functions of mhc_cases.c read some of these texts again. */
static void describe(const mhc_case_params *p, cot_case *c)
{
    const double x = (double)p->B * (double)p->T * (double)p->n * (double)p->D, n = (double)p->n;
    const bool backward = p->direction == COT_MHC_BACKWARD;
    c->layout = layout_names[p->layout];
    snprintf(c->shape, sizeof c->shape, "B%lld T%lld n%lld", (long long)p->B, (long long)p->T, (long long)p->n);
    if (p->op != SINKHORN)
        snprintf(c->shape + strlen(c->shape), sizeof c->shape - strlen(c->shape), " D%lld", (long long)p->D);
    if (p->op == PRE || p->op == POST_PRE) {
        const char *const dx_post = p->op == PRE ? "+dx_post" : "+dy";
        snprintf(c->options, sizeof c->options, "%s%s%s%s%s%s%s%s%s%s%s%s%s", p->wide_phi ? "phi~1" : "phi~1/nD",
                 p->gamma ? "+gamma" : "", p->fused ? "+sinkhorn" : "", p->large_eps ? "+eps" : "",
                 backward && p->dh_res_logits ? "+dh_res_logits" : "", backward && p->dx_post ? dx_post : "",
                 p->accumulate ? "+accumulate" : "", p->no_data_gradient ? "-dx" : "",
                 p->no_parameter_gradient ? "-dphi" : "", p->only_saved ? "-h_in" : "",
                 p->op == POST_PRE && p->out_in ? " h_res[out,in]" : "",
                 p->op == POST_PRE && backward && p->saved_y ? "+y" : "",
                 p->op == POST_PRE && p->only_y ? " only-y" : "");
        c->flops = (backward ? 4 : 2) * n * (n + 2) * x;
        c->flops += p->op == POST_PRE ? (backward ? (p->saved_y ? 4 : 6) : 2) * (n + 1) * x : 0;
    } else if (p->op == SINKHORN) {
        snprintf(c->options, sizeof c->options, "iterations=%lld%s%s%s", (long long)p->iterations,
                 p->wide_logits ? "+wide" : "", p->peaks ? "+peaks" : "",
                 p->no_eps      ? "-eps"
                 : p->large_eps ? "+eps"
                                : "");
        c->flops = (backward ? 12 : 4) * (double)p->iterations * n * n * (double)p->B * (double)p->T;
    } else {
        snprintf(c->options, sizeof c->options, "%s%s%s", p->out_in ? "h_res[out,in]" : "h_res[in,out]",
                 p->no_data_gradient ? "-dx" : "", p->no_parameter_gradient ? "-dh_res" : "");
        c->flops = (backward ? 4 : 2) * (n + 1) * x;
    }
}

/* ---- cases -------------------------------------------------------------------------------------------- */

void mhc_case_build(const mhc_case_params *p, cot_case *c)
{
    static void (*const builders[4][2])(const mhc_case_params *, cot_case *) = {
        {pre_forward_case, pre_backward_case},
        {sinkhorn_forward_case, sinkhorn_backward_case},
        {post_forward_case, post_backward_case},
        {post_pre_forward_case, post_pre_backward_case},
    };
    *c = (cot_case){.direction = p->direction, .uses = p->uses, .seed = p->seed};
    builders[p->op][p->direction](p, c);
    describe(p, c);
}

static bool set_option(mhc_case_params *p, const char *word)
{
    static const cot_text_option sizes[] = {{"B", offsetof(mhc_case_params, B)},
                                            {"T", offsetof(mhc_case_params, T)},
                                            {"n", offsetof(mhc_case_params, n)},
                                            {"D", offsetof(mhc_case_params, D)},
                                            {"iterations", offsetof(mhc_case_params, iterations)},
                                            {0}};
    static const cot_text_option pre[] = {{"gamma", offsetof(mhc_case_params, gamma)},
                                          {"phi~1", offsetof(mhc_case_params, wide_phi)},
                                          {"sinkhorn", offsetof(mhc_case_params, fused)},
                                          {"eps", offsetof(mhc_case_params, large_eps)},
                                          {"dh_res_logits", offsetof(mhc_case_params, dh_res_logits)},
                                          {"dx_post", offsetof(mhc_case_params, dx_post)},
                                          {"accumulate", offsetof(mhc_case_params, accumulate)},
                                          {0}};
    static const cot_text_option sinkhorn[] = {{"wide", offsetof(mhc_case_params, wide_logits)},
                                               {"peaks", offsetof(mhc_case_params, peaks)},
                                               {"eps", offsetof(mhc_case_params, large_eps)},
                                               {0}};
    static const cot_text_option post[] = {{"h_res[out,in]", offsetof(mhc_case_params, out_in)}, {0}};
    static const cot_text_option post_pre[] = {{"gamma", offsetof(mhc_case_params, gamma)},
                                               {"phi~1", offsetof(mhc_case_params, wide_phi)},
                                               {"sinkhorn", offsetof(mhc_case_params, fused)},
                                               {"eps", offsetof(mhc_case_params, large_eps)},
                                               {"dh_res_logits", offsetof(mhc_case_params, dh_res_logits)},
                                               {"dy", offsetof(mhc_case_params, dx_post)},
                                               {"accumulate", offsetof(mhc_case_params, accumulate)},
                                               {"h_res[out,in]", offsetof(mhc_case_params, out_in)},
                                               {"y", offsetof(mhc_case_params, saved_y)},
                                               {0}};
    static const cot_text_option *const all[] = {pre, sinkhorn, post, post_pre};
    const cot_text_option *switches = all[p->op];
    if (cot_parse_size(p, sizes, word) || cot_parse_flag(p, switches, word) || cot_parse_float_dtype(&p->dtype, word))
        return true;
    for (int layout = 0; layout < LAYOUT_COUNT; layout++)
        if (strcmp(word, layout_names[layout]) == 0)
            return p->layout = (mhc_case_layout)layout, true;
    return false;
}

const char *mhc_case_parse(int op, int direction, int count, char *const words[], cot_case *c)
{
    mhc_case_params p = {.op = op,
                         .direction = direction,
                         .uses = COT_CASE_CHECK | COT_CASE_BENCH | COT_CASE_BENCH_CUDA,
                         .B = 1,
                         .T = 2048,
                         .n = 4,
                         .D = 1024,
                         .iterations = 20,
                         .dtype = COT_F32,
                         .seed = 47};
    for (int i = 0; i < count; i++)
        if (!set_option(&p, words[i]))
            return words[i];
    mhc_case_build(&p, c);
    return NULL;
}
