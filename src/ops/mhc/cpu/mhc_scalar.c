/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_scalar.c: the formulas of cotangent/mhc.h as plain loops, for any n, D, strides and dtypes. The accuracy and
 * speed of the other kernels are compared with it.
 *
 * Compiled twice: with float sums (f32, f16, bf16), and with COT_SCALAR_F64 and double sums (f64). An item is one of at
 * most MHC_SCALAR_PARTS token ranges and has a separate piece of the workspace. The parameters' gradients are summed
 * over all tokens by items that handle columns of phi. */
#include "core/float16.h"
#include "ops/mhc/mhc_admit.h"
#include "ops/mhc/mhc_problem.h"

#include <math.h>

#ifdef COT_SCALAR_F64
typedef double real;
#define NAME(stem) stem##_f64
#define EXP exp
#define SQRT sqrt
#else
typedef float real;
#define NAME(stem) stem
#define EXP expf
#define SQRT sqrtf
#endif

cot_status NAME(mhc_pre_fwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(mhc_pre_bwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(mhc_sinkhorn_fwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(mhc_sinkhorn_bwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(mhc_post_fwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(mhc_post_bwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(mhc_post_pre_fwd_scalar)(cot_queue *, const void *, void *);
cot_status NAME(mhc_post_pre_bwd_scalar)(cot_queue *, const void *, void *);

/* ---- elements ----------------------------------------------------------------------------------------- */

static inline real load(const cot_tensor *t, int64_t offset)
{
    return (real)cot_load_f64(t->data, t->dtype, offset);
}

/* Loads elements [token], [token,i] and [token,i,j] of a tensor [B,T,...]. */
static inline real load0(const cot_tensor *t, int64_t token)
{
    return load(t, mhc_token_offset(t, token));
}

static inline real load1(const cot_tensor *t, int64_t token, int64_t i)
{
    return load(t, mhc_token_offset(t, token) + i * t->stride[2]);
}

static inline real load2(const cot_tensor *t, int64_t token, int64_t i, int64_t j)
{
    return load(t, mhc_token_offset(t, token) + i * t->stride[2] + j * t->stride[3]);
}

/* A store to an absent tensor does nothing. */
static inline void store0(const cot_tensor *t, int64_t token, real value)
{
    if (cot_is_present(t))
        cot_store_f64(t->data, t->dtype, mhc_token_offset(t, token), value);
}

static inline void store1(const cot_tensor *t, int64_t token, int64_t i, real value)
{
    if (cot_is_present(t))
        cot_store_f64(t->data, t->dtype, mhc_token_offset(t, token) + i * t->stride[2], value);
}

static inline void store2(const cot_tensor *t, int64_t token, int64_t i, int64_t j, real value)
{
    if (cot_is_present(t))
        cot_store_f64(t->data, t->dtype, mhc_token_offset(t, token) + i * t->stride[2] + j * t->stride[3], value);
}

static inline void store_gradient(const cot_tensor *t, int64_t offset, bool accumulate, real value)
{
    if (cot_is_present(t))
        cot_store_f64(t->data, t->dtype, offset, accumulate ? load(t, offset) + value : value);
}

/* Load phi[j, i*D+d] and gamma[i,d]. */
static inline real load_phi(const cot_tensor *phi, int64_t j, int64_t k)
{
    return load(phi, j * phi->stride[0] + k * phi->stride[1]);
}

static inline real load_gamma(const cot_tensor *gamma, int64_t i, int64_t d)
{
    return cot_is_present(gamma) ? load(gamma, i * gamma->stride[0] + d * gamma->stride[1]) : 1;
}

/* The argument of exp is never positive, so exp cannot overflow. */
static inline real sigmoid(real z)
{
    const real e = EXP(-(z < 0 ? -z : z)), larger = 1 / (1 + e);
    return z < 0 ? e * larger : larger;
}

/* A sum in levels: terms are summed in blocks, blocks in larger blocks, and so on. Rounding then hardly grows with the
 * number of terms. With 64 terms summed in one run, 1 in 131072 sums exceeded the error that check allows. */
enum { BLOCK = 8, LEVELS = 4 };

typedef struct blocked_sum {
    int64_t terms;
    real level[LEVELS];
} blocked_sum;

static inline void add(blocked_sum *sum, real term)
{
    sum->level[0] += term;
    int64_t block_terms = ++sum->terms;
    for (int l = 0; l + 1 < LEVELS && block_terms % BLOCK == 0; l++, block_terms /= BLOCK) {
        sum->level[l + 1] += sum->level[l];
        sum->level[l] = 0;
    }
}

static inline real finish(const blocked_sum *sum)
{
    real total = 0;
    for (int l = 0; l < LEVELS; l++)
        total += sum->level[l];
    return total;
}

/* ---- parts -------------------------------------------------------------------------------------------- */

/* The tokens of a part, and its scratch: `elements` reals of the workspace. */
typedef struct token_part {
    int64_t begin, end;
    real *scratch;
} token_part;

static token_part make_part(const mhc_sizes *sizes, int64_t index, real *workspace, int64_t elements)
{
    const int64_t parts = mhc_scalar_parts(sizes), part_tokens = cot_ceil_div(sizes->tokens, parts);
    return (token_part){cot_clamp(index * part_tokens, 0, sizes->tokens),
                        cot_clamp((index + 1) * part_tokens, 0, sizes->tokens), workspace + index * elements};
}

/* ---- Sinkhorn of one token --------------------------------------------------------------------------- *
 * h_res = K_ij u_i v_j with K = softmax + eps. The steps change only u or v. The backward uses G~ = G u v in place of
 * the gradient G of a step's output. The gradient of a step that divided row i, with S_i = sum_j G~_ij K_ij, is
 *     G~_ij -= S_i u_i v_j
 * with u and v after that step; columns likewise. */

/* Replaces the logits in `kernel` by K. Also stores P, unless P is NULL. */
static void softmax(int64_t n, real eps, real *kernel, real *P)
{
    for (int64_t i = 0; i < n; i++) {
        real *row = kernel + i * n, row_max = row[0], sum = 0;
        for (int64_t j = 1; j < n; j++)
            row_max = row[j] > row_max ? row[j] : row_max;
        for (int64_t j = 0; j < n; j++)
            sum += row[j] = EXP(row[j] - row_max);
        for (int64_t j = 0; j < n; j++) {
            row[j] /= sum;
            if (P != NULL)
                P[i * n + j] = row[j];
            row[j] += eps;
        }
    }
}

/* Computes u and v, [n] each. With keep_history u and v are [iterations+1][n]: before the first iteration and after
 * each. */
static void iterate(int64_t n, int32_t iterations, real eps, const real *kernel, real *u, real *v, bool keep_history)
{
    for (int64_t i = 0; i < n; i++)
        u[i] = v[i] = 1;
    for (int32_t r = 0; r < iterations; r++) {
        real *next_u = keep_history ? u + n : u, *next_v = keep_history ? v + n : v;
        for (int64_t i = 0; i < n; i++) {
            real sum = 0;
            for (int64_t j = 0; r > 0 && j < n; j++)
                sum += kernel[i * n + j] * v[j];
            next_u[i] = r > 0 ? u[i] / (sum * u[i] + eps) : 1; /* the first iteration has no row step */
        }
        for (int64_t j = 0; j < n; j++) {
            real sum = 0;
            for (int64_t i = 0; i < n; i++)
                sum += kernel[i * n + j] * next_u[i];
            next_v[j] = v[j] / (sum * v[j] + eps);
        }
        u = next_u;
        v = next_v;
    }
}

/* `kernel` holds the logits. scratch from `kernel` on: n*n + 2n. */
static void sinkhorn_forward(const cot_tensor *h_res, int64_t token, int64_t n, int32_t iterations, real eps,
                             real *kernel)
{
    real *u = kernel + n * n, *v = u + n;
    softmax(n, eps, kernel, NULL);
    iterate(n, iterations, eps, kernel, u, v, false);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            store2(h_res, token, i, j, kernel[i * n + j] * u[i] * v[j]);
}

/* Returns the gradient of the logits, [n][n] in scratch after the logits. scratch: 3*n*n + 2*(iterations+1)*n. */
static const real *sinkhorn_backward(const cot_tensor *dh_res, int64_t token, int64_t n, int32_t iterations, real eps,
                                     real *kernel)
{
    real *G = kernel + n * n, *P = G + n * n, *u = P + n * n, *v = u + (iterations + 1) * n;
    softmax(n, eps, kernel, P);
    iterate(n, iterations, eps, kernel, u, v, true);
    u += iterations * n;
    v += iterations * n;
    for (int64_t ij = 0; ij < n * n; ij++)
        G[ij] = load2(dh_res, token, ij / n, ij % n) * u[ij / n] * v[ij % n];
    for (int32_t r = iterations; r >= 1; r--, u -= n) {
        for (int64_t j = 0; j < n; j++) {
            real sum = 0;
            for (int64_t i = 0; i < n; i++)
                sum += G[i * n + j] * kernel[i * n + j];
            for (int64_t i = 0; i < n; i++)
                G[i * n + j] -= sum * v[j] * u[i];
        }
        v -= n;
        for (int64_t i = 0; r > 1 && i < n; i++) {
            real sum = 0;
            for (int64_t j = 0; j < n; j++)
                sum += G[i * n + j] * kernel[i * n + j];
            for (int64_t j = 0; j < n; j++)
                G[i * n + j] -= sum * u[i] * v[j];
        }
    }
    for (int64_t i = 0; i < n; i++) {
        real sum = 0;
        for (int64_t j = 0; j < n; j++)
            sum += G[i * n + j] * P[i * n + j];
        for (int64_t j = 0; j < n; j++)
            G[i * n + j] = P[i * n + j] * (G[i * n + j] - sum);
    }
    return G;
}

typedef struct context {
    const void *problem;
    real *workspace;
} context;

static void sinkhorn_forward_item(void *c, int64_t index)
{
    const mhc_sinkhorn_forward_problem *p = ((context *)c)->problem;
    const int64_t n = p->sizes.n;
    const token_part part = make_part(&p->sizes, index, ((context *)c)->workspace, mhc_scalar_sinkhorn_fwd_elements(n));
    for (int64_t t = part.begin; t < part.end; t++) {
        for (int64_t ij = 0; ij < n * n; ij++)
            part.scratch[ij] = load2(&p->args.h_res_logits, t, ij / n, ij % n);
        sinkhorn_forward(&p->args.h_res, t, n, p->args.iterations, (real)p->args.eps, part.scratch);
    }
}

cot_status NAME(mhc_sinkhorn_fwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {problem, workspace};
    cot_run_items(queue, mhc_scalar_parts(problem), sinkhorn_forward_item, &c);
    return COT_OK;
}

static void sinkhorn_backward_item(void *c, int64_t index)
{
    const mhc_sinkhorn_backward_problem *p = ((context *)c)->problem;
    const int64_t n = p->sizes.n;
    const int32_t iterations = p->args.iterations;
    const token_part part =
        make_part(&p->sizes, index, ((context *)c)->workspace, mhc_scalar_sinkhorn_bwd_elements(n, iterations));
    for (int64_t t = part.begin; t < part.end; t++) {
        for (int64_t ij = 0; ij < n * n; ij++)
            part.scratch[ij] = load2(&p->args.h_res_logits, t, ij / n, ij % n);
        const real *dL = sinkhorn_backward(&p->args.dh_res, t, n, iterations, (real)p->args.eps, part.scratch);
        for (int64_t ij = 0; ij < n * n; ij++)
            store2(&p->args.dh_res_logits, t, ij / n, ij % n, dL[ij]);
    }
}

cot_status NAME(mhc_sinkhorn_bwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {problem, workspace};
    cot_run_items(queue, mhc_scalar_parts(problem), sinkhorn_backward_item, &c);
    return COT_OK;
}

/* ---- pre, forward ------------------------------------------------------------------------------------- */

/* scratch: first the logits, as sinkhorn_forward expects them, then h_pre. */
static void pre_forward_token(const mhc_pre_forward_problem *p, int64_t t, real *logits, real *h_pre)
{
    const cot_mhc_pre_forward_args *a = &p->args;
    const int64_t n = p->sizes.n, D = p->sizes.D;
    blocked_sum squares = {0};
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < D; d++) {
            const real x = load2(&a->x, t, i, d);
            add(&squares, x * x);
        }
    const real inv_rms = 1 / SQRT(finish(&squares) / (real)(n * D) + (real)a->norm_eps);
    store0(&a->inv_rms, t, inv_rms);
    for (int64_t j = 0; j < p->sizes.M; j++) {
        blocked_sum sum = {0};
        for (int64_t i = 0; i < n; i++)
            for (int64_t d = 0; d < D; d++)
                add(&sum, load_phi(&a->phi, j, i * D + d) * load_gamma(&a->gamma, i, d) * load2(&a->x, t, i, d));
        const real h_mix = finish(&sum), alpha = load(&a->alpha, mhc_alpha_index(n, j) * a->alpha.stride[0]);
        const real z = alpha * (h_mix * inv_rms) + load(&a->bias, j * a->bias.stride[0]);
        store1(&a->h_mix, t, j, h_mix);
        if (j < n) {
            h_pre[j] = sigmoid(z) + (real)a->hc_eps;
            store1(&a->h_pre, t, j, h_pre[j]);
        } else if (j < 2 * n) {
            store1(&a->h_post, t, j - n, (real)a->post_scale * sigmoid(z));
        } else {
            logits[j - 2 * n] = z;
            store2(&a->h_res_logits, t, (j - 2 * n) / n, (j - 2 * n) % n, z);
        }
    }
}

/* All outputs of the part's tokens. */
static void pre_forward_part(const mhc_pre_forward_problem *p, const token_part *part)
{
    const cot_mhc_pre_forward_args *a = &p->args;
    const int64_t n = p->sizes.n, D = p->sizes.D;
    real *h_pre = part->scratch + mhc_scalar_sinkhorn_fwd_elements(n);
    for (int64_t t = part->begin; t < part->end; t++) {
        pre_forward_token(p, t, part->scratch, h_pre);
        for (int64_t d = 0; cot_is_present(&a->h_in) && d < D; d++) {
            blocked_sum sum = {0};
            for (int64_t i = 0; i < n; i++)
                add(&sum, h_pre[i] * load2(&a->x, t, i, d));
            store1(&a->h_in, t, d, finish(&sum));
        }
        if (cot_is_present(&a->h_res))
            sinkhorn_forward(&a->h_res, t, n, a->sinkhorn_iterations, (real)a->sinkhorn_eps, part->scratch);
    }
}

static token_part pre_forward_range(const mhc_sizes *sizes, int64_t index, real *workspace)
{
    return make_part(sizes, index, workspace, mhc_scalar_pre_fwd_elements(sizes->n));
}

static void pre_forward_item(void *c, int64_t index)
{
    const mhc_pre_forward_problem *p = ((context *)c)->problem;
    const token_part part = pre_forward_range(&p->sizes, index, ((context *)c)->workspace);
    pre_forward_part(p, &part);
}

cot_status NAME(mhc_pre_fwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {problem, workspace};
    cot_run_items(queue, mhc_scalar_parts(problem), pre_forward_item, &c);
    return COT_OK;
}

/* ---- pre, backward ------------------------------------------------------------------------------------ */

/* The per-token inputs of the parameters' gradients: dz [M] and dh_mix [M]. */
static real *token_terms(const mhc_pre_backward_problem *p, real *workspace, int64_t t)
{
    return workspace + t * 2 * p->sizes.M;
}

/* Computes dz of one token. `scratch` is for Sinkhorn. */
static void pre_dz(const mhc_pre_backward_problem *p, int64_t t, real *dz, real *scratch)
{
    const cot_mhc_pre_backward_args *a = &p->args;
    const int64_t n = p->sizes.n, D = p->sizes.D;
    for (int64_t i = 0; i < n; i++) {
        blocked_sum dh_pre = {0};
        for (int64_t d = 0; d < D; d++)
            add(&dh_pre, load1(&a->dh_in, t, d) * load2(&a->x, t, i, d));
        const real s = load1(&a->h_pre, t, i) - (real)a->hc_eps;
        dz[i] = finish(&dh_pre) * s * (1 - s);
        const real h_post = load1(&a->h_post, t, i);
        dz[n + i] = load1(&a->dh_post, t, i) * h_post * (1 - h_post / (real)a->post_scale);
    }
    real *dL = dz + 2 * n;
    for (int64_t ij = 0; ij < n * n; ij++)
        dL[ij] = cot_is_present(&a->dh_res_logits) ? load2(&a->dh_res_logits, t, ij / n, ij % n) : 0;
    if (!cot_is_present(&a->dh_res))
        return;
    const real alpha = load(&a->alpha, 2 * a->alpha.stride[0]), inv_rms = load0(&a->inv_rms, t);
    for (int64_t ij = 0; ij < n * n; ij++)
        scratch[ij] =
            alpha * (load1(&a->h_mix, t, 2 * n + ij) * inv_rms) + load(&a->bias, (2 * n + ij) * a->bias.stride[0]);
    const real *sinkhorn_dL =
        sinkhorn_backward(&a->dh_res, t, n, a->sinkhorn_iterations, (real)a->sinkhorn_eps, scratch);
    for (int64_t ij = 0; ij < n * n; ij++)
        dL[ij] += sinkhorn_dL[ij];
}

static void pre_backward_token(const mhc_pre_backward_problem *p, int64_t t, real *terms, real *scratch)
{
    const cot_mhc_pre_backward_args *a = &p->args;
    const int64_t n = p->sizes.n, D = p->sizes.D, M = p->sizes.M;
    real *dh_mix = terms + M;
    blocked_sum dinv = {0};
    const real inv_rms = load0(&a->inv_rms, t);
    pre_dz(p, t, terms, scratch);
    for (int64_t j = 0; j < M; j++) {
        const real du = load(&a->alpha, mhc_alpha_index(n, j) * a->alpha.stride[0]) * terms[j];
        add(&dinv, du * load1(&a->h_mix, t, j));
        dh_mix[j] = du * inv_rms;
    }
    const real c = -finish(&dinv) * inv_rms * inv_rms * inv_rms / (real)(n * D);
    for (int64_t i = 0; cot_is_present(&a->dx) && i < n; i++) {
        const real h_pre = load1(&a->h_pre, t, i);
        for (int64_t d = 0; d < D; d++) {
            blocked_sum sum = {0};
            for (int64_t j = 0; j < M; j++)
                add(&sum, dh_mix[j] * load_phi(&a->phi, j, i * D + d));
            real dx =
                load_gamma(&a->gamma, i, d) * finish(&sum) + c * load2(&a->x, t, i, d) + h_pre * load1(&a->dh_in, t, d);
            if (cot_is_present(&a->dx_post))
                dx += load2(&a->dx_post, t, i, d);
            store2(&a->dx, t, i, d, dx);
        }
    }
}

static token_part pre_backward_range(const mhc_pre_backward_problem *p, int64_t index, real *workspace)
{
    return make_part(&p->sizes, index, workspace + p->sizes.tokens * 2 * p->sizes.M,
                     mhc_scalar_sinkhorn_bwd_elements(p->sizes.n, mhc_pre_iterations(&p->args)));
}

static void pre_backward_item(void *c, int64_t index)
{
    const mhc_pre_backward_problem *p = ((context *)c)->problem;
    real *workspace = ((context *)c)->workspace;
    const token_part part = pre_backward_range(p, index, workspace);
    for (int64_t t = part.begin; t < part.end; t++)
        pre_backward_token(p, t, token_terms(p, workspace, t), part.scratch);
}

enum { COLUMNS = 64 };

/* Columns [d, d+count) of dphi and dgamma in stream i. */
static void reduce_phi_columns(const context *c, int64_t i, int64_t d, int64_t count)
{
    const mhc_pre_backward_problem *p = c->problem;
    const cot_mhc_pre_backward_args *a = &p->args;
    blocked_sum dgamma[COLUMNS] = {{0}};
    for (int64_t j = 0; j < p->sizes.M; j++) {
        blocked_sum dphi_sum[COLUMNS] = {{0}};
        for (int64_t t = 0; t < p->sizes.tokens; t++) {
            const real dh_mix = token_terms(p, c->workspace, t)[p->sizes.M + j];
            for (int64_t k = 0; k < count; k++)
                add(&dphi_sum[k], dh_mix * load2(&a->x, t, i, d + k));
        }
        for (int64_t k = 0; k < count; k++) {
            const int64_t column = i * p->sizes.D + d + k;
            store_gradient(&a->dphi, j * a->dphi.stride[0] + column * a->dphi.stride[1], a->accumulate,
                           finish(&dphi_sum[k]) * load_gamma(&a->gamma, i, d + k));
            add(&dgamma[k], load_phi(&a->phi, j, column) * finish(&dphi_sum[k]));
        }
    }
    for (int64_t k = 0; k < count; k++)
        store_gradient(&a->dgamma, i * a->dgamma.stride[0] + (d + k) * a->dgamma.stride[1], a->accumulate,
                       finish(&dgamma[k]));
}

/* dbias, and dalpha from the same terms. */
static void reduce_bias_and_alpha(const context *c)
{
    const mhc_pre_backward_problem *p = c->problem;
    const cot_mhc_pre_backward_args *a = &p->args;
    blocked_sum dalpha[3] = {{0}};
    for (int64_t j = 0; j < p->sizes.M; j++) {
        blocked_sum dbias = {0};
        for (int64_t t = 0; t < p->sizes.tokens; t++) {
            const real dz = token_terms(p, c->workspace, t)[j];
            add(&dbias, dz);
            add(&dalpha[mhc_alpha_index(p->sizes.n, j)], dz * (load1(&a->h_mix, t, j) * load0(&a->inv_rms, t)));
        }
        store_gradient(&a->dbias, j * a->dbias.stride[0], a->accumulate, finish(&dbias));
    }
    for (int64_t group = 0; group < 3; group++)
        store_gradient(&a->dalpha, group * a->dalpha.stride[0], a->accumulate, finish(&dalpha[group]));
}

static void parameter_item(void *context_, int64_t index)
{
    const context *c = context_;
    const mhc_pre_backward_problem *p = c->problem;
    const int64_t blocks = cot_ceil_div(p->sizes.D, COLUMNS);
    if (index == p->sizes.n * blocks) {
        reduce_bias_and_alpha(c);
        return;
    }
    const int64_t d = index % blocks * COLUMNS;
    reduce_phi_columns(c, index / blocks, d, d + COLUMNS < p->sizes.D ? COLUMNS : p->sizes.D - d);
}

static void reduce_parameters(cot_queue *queue, context *c)
{
    const mhc_pre_backward_problem *p = c->problem;
    const cot_mhc_pre_backward_args *a = &p->args;
    if (cot_is_present(&a->dphi) || cot_is_present(&a->dgamma) || cot_is_present(&a->dbias) ||
        cot_is_present(&a->dalpha))
        cot_run_items(queue, p->sizes.n * cot_ceil_div(p->sizes.D, COLUMNS) + 1, parameter_item, c);
}

cot_status NAME(mhc_pre_bwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {problem, workspace};
    cot_run_items(queue, mhc_scalar_parts(problem), pre_backward_item, &c);
    reduce_parameters(queue, &c);
    return COT_OK;
}

/* ---- post --------------------------------------------------------------------------------------------- */

static void post_forward_item(void *problem, int64_t t)
{
    const mhc_post_forward_problem *p = problem;
    const cot_mhc_post_forward_args *a = &p->args;
    for (int64_t o = 0; o < p->sizes.n; o++) {
        const real h_post = load1(&a->h_post, t, o);
        for (int64_t d = 0; d < p->sizes.D; d++) {
            blocked_sum y = {0};
            add(&y, h_post * load1(&a->f, t, d));
            for (int64_t i = 0; i < p->sizes.n; i++)
                add(&y, load2(&a->h_res, t, i, o) * load2(&a->x, t, i, d));
            store2(&a->y, t, o, d, finish(&y));
        }
    }
}

cot_status NAME(mhc_post_fwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    cot_run_items(queue, ((const mhc_sizes *)problem)->tokens, post_forward_item, (void *)problem);
    return COT_OK;
}

static void post_backward_item(void *problem, int64_t t)
{
    const mhc_post_backward_problem *p = problem;
    const cot_mhc_post_backward_args *a = &p->args;
    const int64_t n = p->sizes.n, D = p->sizes.D;
    for (int64_t o = 0; o < n; o++) {
        blocked_sum dh_post = {0};
        for (int64_t d = 0; d < D; d++)
            add(&dh_post, load1(&a->f, t, d) * load2(&a->dy, t, o, d));
        store1(&a->dh_post, t, o, finish(&dh_post));
        for (int64_t i = 0; i < n; i++) {
            blocked_sum dh_res = {0};
            for (int64_t d = 0; d < D; d++)
                add(&dh_res, load2(&a->x, t, i, d) * load2(&a->dy, t, o, d));
            store2(&a->dh_res, t, i, o, finish(&dh_res));
        }
    }
    for (int64_t d = 0; d < D; d++) {
        blocked_sum df = {0};
        for (int64_t o = 0; o < n; o++)
            add(&df, load1(&a->h_post, t, o) * load2(&a->dy, t, o, d));
        store1(&a->df, t, d, finish(&df));
        for (int64_t i = 0; i < n; i++) {
            blocked_sum dx = {0};
            for (int64_t o = 0; o < n; o++)
                add(&dx, load2(&a->h_res, t, i, o) * load2(&a->dy, t, o, d));
            store2(&a->dx, t, i, d, finish(&dx));
        }
    }
}

cot_status NAME(mhc_post_bwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    cot_run_items(queue, ((const mhc_sizes *)problem)->tokens, post_backward_item, (void *)problem);
    return COT_OK;
}

/* ---- post_pre: each part runs post and pre on its tokens ----------------------------------------------------- */

typedef struct post_pre_forward_context {
    mhc_post_forward_problem post;
    mhc_pre_forward_problem pre;
    real *workspace;
} post_pre_forward_context;

static void post_pre_forward_item(void *context_, int64_t index)
{
    post_pre_forward_context *c = context_;
    const token_part part = pre_forward_range(&c->pre.sizes, index, c->workspace);
    for (int64_t t = part.begin; t < part.end; t++)
        post_forward_item(&c->post, t);
    pre_forward_part(&c->pre, &part);
}

cot_status NAME(mhc_post_pre_fwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    post_pre_forward_context c = {mhc_post_half_forward(problem), mhc_pre_half_forward(problem), workspace};
    cot_run_items(queue, mhc_scalar_parts(problem), post_pre_forward_item, &c);
    return COT_OK;
}

typedef struct post_pre_backward_context {
    mhc_post_forward_problem recomputation;
    mhc_pre_backward_problem pre;
    mhc_post_backward_problem post;
    real *workspace;
    bool recompute;
} post_pre_backward_context;

static void post_pre_backward_item(void *context_, int64_t index)
{
    post_pre_backward_context *c = context_;
    const token_part part = pre_backward_range(&c->pre, index, c->workspace);
    for (int64_t t = part.begin; t < part.end; t++) {
        if (c->recompute)
            post_forward_item(&c->recomputation, t);
        pre_backward_token(&c->pre, t, token_terms(&c->pre, c->workspace, t), part.scratch);
        if (cot_is_present(&c->post.args.dy))
            post_backward_item(&c->post, t);
    }
}

cot_status NAME(mhc_post_pre_bwd_scalar)(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_post_pre_backward_problem *p = problem;
    const mhc_scalar_post_pre_layout *layout = queue->plan;
    const int64_t shape[] = {p->sizes.B, p->sizes.T, p->sizes.n, p->sizes.D};
    const cot_dtype g_dtype = sizeof(real) == sizeof(double) ? COT_F64 : COT_F32;
    post_pre_backward_context c = {mhc_post_pre_recomputation(p), mhc_pre_half_backward(p), mhc_post_half_backward(p),
                                   workspace, !cot_is_present(&p->args.y)};
    if (c.recompute)
        c.recomputation.args.y = c.pre.args.x =
            cot_tensor_contiguous((char *)workspace + layout->y, p->sizes.dtype, 4, shape);
    if (mhc_post_pre_needs_g(&p->args))
        c.pre.args.dx = c.post.args.dy = cot_tensor_contiguous((char *)workspace + layout->g, g_dtype, 4, shape);
    cot_run_items(queue, mhc_scalar_parts(&p->sizes), post_pre_backward_item, &c);
    context parameters = {&c.pre, workspace};
    reduce_parameters(queue, &parameters);
    return COT_OK;
}
