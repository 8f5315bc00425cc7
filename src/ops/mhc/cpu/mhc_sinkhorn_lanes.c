/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_sinkhorn_lanes.c: Sinkhorn and its gradient with one token a lane (mhc_sinkhorn.h). An item is one of at most
 * MHC_SINKHORN_PARTS token ranges. The backward stores the history of VW tokens in the workspace. */
#include "mhc_sinkhorn.h"

cot_status V_NAME(mhc_sinkhorn_fwd_lanes)(cot_queue *, const void *, void *);
cot_status V_NAME(mhc_sinkhorn_bwd_lanes)(cot_queue *, const void *, void *);

typedef struct lanes_context {
    const void *problem;
    mhc_parts parts;
    float *history; /* of all parts */
} lanes_context;

static void load_lanes(vf *out, const cot_tensor *source, int64_t token, int64_t count, int64_t elements)
{
    float coefficients[MHC_MAX_N * MHC_MAX_N * VW];
    mhc_load_coefficients(coefficients, VW, source, token, count, elements);
    for (int64_t e = 0; e < elements; e++)
        out[e] = v_load(coefficients + e * VW);
}

static void store_lanes(const vf *source, const cot_tensor *out, int64_t token, int64_t count, int64_t elements)
{
    float coefficients[MHC_MAX_N * MHC_MAX_N * VW];
    for (int64_t e = 0; e < elements; e++)
        v_store(coefficients + e * VW, source[e]);
    mhc_store_coefficients(coefficients, VW, out, token, count, elements);
}

static void forward_item(void *context, int64_t part)
{
    const lanes_context *c = context;
    const mhc_sinkhorn_forward_problem *p = c->problem;
    const int64_t n = p->sizes.n, end = cot_clamp((part + 1) * c->parts.part_tokens, 0, p->sizes.tokens);
    for (int64_t t = part * c->parts.part_tokens; t < end; t += VW) {
        vf h_res[MHC_MAX_N * MHC_MAX_N];
        const int64_t count = cot_clamp(end - t, 0, VW);
        load_lanes(h_res, &p->args.h_res_logits, t, count, n * n);
        mhc_sinkhorn(n, p->args.iterations, p->args.eps, h_res);
        store_lanes(h_res, &p->args.h_res, t, count, n * n);
    }
}

cot_status V_NAME(mhc_sinkhorn_fwd_lanes)(cot_queue *queue, const void *problem, void *workspace)
{
    (void)workspace;
    lanes_context c = {.problem = problem, .parts = mhc_sinkhorn_parts(((const mhc_sizes *)problem)->tokens)};
    cot_run_items(queue, c.parts.count, forward_item, &c);
    return COT_OK;
}

static void backward_item(void *context, int64_t part)
{
    const lanes_context *c = context;
    const mhc_sinkhorn_backward_problem *p = c->problem;
    const int64_t n = p->sizes.n, end = cot_clamp((part + 1) * c->parts.part_tokens, 0, p->sizes.tokens);
    float *history = c->history + part * mhc_history_floats(n, p->args.iterations);
    for (int64_t t = part * c->parts.part_tokens; t < end; t += VW) {
        vf logits[MHC_MAX_N * MHC_MAX_N], G[MHC_MAX_N * MHC_MAX_N];
        const int64_t count = cot_clamp(end - t, 0, VW);
        load_lanes(logits, &p->args.h_res_logits, t, count, n * n);
        load_lanes(G, &p->args.dh_res, t, count, n * n);
        mhc_sinkhorn_gradient(n, p->args.iterations, p->args.eps, logits, G, history);
        store_lanes(G, &p->args.dh_res_logits, t, count, n * n);
    }
}

cot_status V_NAME(mhc_sinkhorn_bwd_lanes)(cot_queue *queue, const void *problem, void *workspace)
{
    const mhc_sinkhorn_bwd_plan *plan = queue->plan;
    lanes_context c = {.problem = problem, .parts = plan->parts, .history = workspace};
    cot_run_items(queue, c.parts.count, backward_item, &c);
    return COT_OK;
}
