/* SPDX-License-Identifier: Apache-2.0
 * test_attention_errors.c: every reason for which attention refuses a call. Checks the status, the exact message, and
 * that no output was written. Also tests unusual calls that are valid. */
#include "argument_checks.h"

#include <cotangent/attention.h>
#include <math.h>
#include <stdio.h>

enum { B = 2, TQ = 3, TK = 5, H = 4, HKV = 2, DH = 8, DV = 6, ROOM = 512 };
enum { FORWARD, BACKWARD, DELTA, MERGE };

/* Valid arguments of all calls, f32, and their memory. */
typedef struct fixture {
    cot_queue *queue;
    cot_attention_forward_args f;
    cot_attention_backward_args b;
    cot_attention_delta_args d;
    cot_attention_merge_args m;
    float q[ROOM], k[ROOM], v[ROOM], o[ROOM], lse[ROOM], small[ROOM], bias[ROOM];
    int32_t cu_q[B + 1], cu_k[B + 1], used[B];
    struct {
        double o[ROOM], lse[ROOM], dq[ROOM], dk[ROOM], dv[ROOM], dsink[ROOM], dbias[ROOM];
    } out;
} fixture;

static fixture *fresh(fixture *f, const char *kernels)
{
    BEGIN(f, kernels);
    f->cu_q[1] = 1, f->cu_q[2] = 6;
    f->cu_k[1] = 5, f->cu_k[2] = 10;
    f->used[0] = 2, f->used[1] = 1;

    COT_INIT(&f->f);
    f->f.q = VIEW(f->q, COT_F32, B, TQ, H, DH);
    f->f.k = VIEW(f->k, COT_F32, B, TK, HKV, DH);
    f->f.v = VIEW(f->v, COT_F32, B, TK, HKV, DV);
    f->f.out = VIEW(f->out.o, COT_F32, B, TQ, H, DV);
    f->f.lse = VIEW(f->out.lse, COT_F32, B, H, TQ);

    COT_INIT(&f->b);
    f->b.q = f->f.q, f->b.k = f->f.k, f->b.v = f->f.v;
    f->b.sink = VIEW(f->small, COT_F32, H);
    f->b.bias = VIEW(f->bias, COT_F32, 1, H, TQ, TK);
    f->b.lse = VIEW(f->lse, COT_F32, B, H, TQ);
    f->b.out = VIEW(f->o, COT_F32, B, TQ, H, DV);
    f->b.dout = f->b.out;
    f->b.dq = VIEW(f->out.dq, COT_F32, B, TQ, H, DH);
    f->b.dk = VIEW(f->out.dk, COT_F32, B, TK, HKV, DH);
    f->b.dv = VIEW(f->out.dv, COT_F32, B, TK, HKV, DV);
    f->b.dsink = VIEW(f->out.dsink, COT_F32, H);
    f->b.dbias = VIEW(f->out.dbias, COT_F32, 1, H, TQ, TK);

    COT_INIT(&f->d);
    f->d.out = f->d.dout = f->b.out;
    f->d.delta = f->f.lse;

    COT_INIT(&f->m);
    f->m.out_a = f->m.out_b = f->b.out;
    f->m.lse_a = f->m.lse_b = f->b.lse;
    f->m.out = f->f.out;
    f->m.lse = f->f.lse;
    return f;
}

/* Packs the arguments: 6 of 7 rows of queries, 10 of 10 rows of keys. */
static void pack(fixture *f)
{
    f->f.q = VIEW(f->q, COT_F32, 7, H, DH);
    f->f.k = VIEW(f->k, COT_F32, 10, HKV, DH);
    f->f.v = VIEW(f->v, COT_F32, 10, HKV, DV);
    f->f.out = VIEW(f->out.o, COT_F32, 7, H, DV);
    f->f.lse = VIEW(f->out.lse, COT_F32, H, 7);
    f->f.cu_seqlens_q = VIEW(f->cu_q, COT_I32, B + 1);
    f->f.cu_seqlens_k = VIEW(f->cu_k, COT_I32, B + 1);
    f->f.max_seqlen_q = f->f.max_seqlen_k = 5;
}

static cot_status call(fixture *f, int direction)
{
    return direction == FORWARD    ? cot_attention_forward(f->queue, &f->f)
           : direction == BACKWARD ? cot_attention_backward(f->queue, &f->b)
           : direction == DELTA    ? cot_attention_delta(f->queue, &f->d)
                                   : cot_attention_merge(f->queue, &f->m);
}

static cot_status query_workspace(fixture *f, int direction, size_t *bytes)
{
    return direction == FORWARD    ? cot_attention_forward_workspace(f->queue, &f->f, bytes)
           : direction == BACKWARD ? cot_attention_backward_workspace(f->queue, &f->b, bytes)
           : direction == DELTA    ? cot_attention_delta_workspace(f->queue, &f->d, bytes)
                                   : cot_attention_merge_workspace(f->queue, &f->m, bytes);
}

static void options(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_forward: causal is 2, expected 0 or 1",
           f->f.causal = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_forward: window is -1, expected 0 or 1",
           f->f.window = -1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_forward: window_left is 3, expected 0 without window",
           f->f.window_left = 3);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_forward: window_right is -2, expected -1 (all) or more", f->f.window = 1, f->f.window_right = -2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_forward: window_right is 4, expected 0 or -1 with causal", f->f.causal = f->f.window = 1,
           f->f.window_right = 4);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_forward: scale is inf, expected 0 or a magnitude from 1e-30 to 1e30", f->f.scale = INFINITY);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_backward: softcap is -1, expected 0 (none) or 1e-30 to 1e30", f->b.softcap = -1);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_backward: scale is 1e-50, expected 0 or a magnitude from 1e-30 to 1e30", f->b.scale = 1e-50);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_forward: softcap is nan, expected 0 (none) or 1e-30 to 1e30", f->f.softcap = (double)NAN);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_forward: scale / softcap is 1e+40, expected a magnitude from 1e-30 to 1e30", f->f.scale = 1e20,
           f->f.softcap = 1e-20);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_forward: dropout_p is 1.5, expected 0 to 1",
           f->f.dropout_p = 1.5);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_forward: dropout_p is nan, expected 0 to 1",
           f->f.dropout_p = (double)NAN);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_backward: accumulate is 3, expected 0 or 1",
           f->b.accumulate = 3);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_backward: allow_nondeterminism is 2, expected 0 or 1", f->b.allow_nondeterminism = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_forward: max_seqlen_q is 3, expected 0 without cu_seqlens", f->f.max_seqlen_q = 3);
    ACCEPT(FORWARD, f->f.causal = f->f.window = 1, f->f.window_left = -1, f->f.window_right = -1);
    ACCEPT(FORWARD, f->f.window = 1, f->f.window_left = INT64_MAX, f->f.window_right = INT64_MAX);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "attention_forward: dropout_seed_tensor has 3 words, expected 2 (low, high)",
           f->f.dropout_seed_tensor = VIEW(f->cu_q, COT_I32, 3));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "attention_forward: dropout_offset_tensor has dtype f32, expected i32",
           f->f.dropout_offset_tensor = VIEW(f->small, COT_F32, 2));
    ACCEPT(FORWARD, f->f.dropout_p = 1);
    ACCEPT(FORWARD, f->f.dropout_p = 0.5, f->f.dropout_seed_tensor = VIEW(f->cu_q, COT_I32, 2));
}

static void blocks(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "attention_forward: k_begin is 4, and 5 rows from there do not lie in k_length 8", f->f.k_begin = 4,
           f->f.k_length = 8);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE,
           "attention_forward: q_begin is -1, and 3 rows from there do not lie in q_length 8", f->f.q_begin = -1,
           f->f.q_length = 8);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_forward: k_length is 20, expected 0 with cu_seqlens",
           pack(f), f->f.k_length = 20);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_forward: sink is given for a block, expected it in attention_merge", f->f.k_length = 20,
           f->f.sink = f->b.sink);
    ACCEPT(FORWARD, f->f.k_begin = 15, f->f.k_length = 20);
    ACCEPT(BACKWARD, f->b.k_begin = 15, f->b.k_length = 20);
}

static void shapes(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_forward: q is required", f->f.q = (cot_tensor){0});
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_forward: k is required", f->f.k = (cot_tensor){0});
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_forward: v is required", f->f.v = (cot_tensor){0});
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: q has 3 axes, expected 4",
           f->f.q = VIEW(f->q, COT_F32, TQ, H, DH));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: k has B=1, q has B=2", f->f.k.shape[0] = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: v has B=1, q has B=2", f->f.v.shape[0] = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: k has d=7, q has d=8", f->f.k.shape[3] = 7);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: v has Tk=4, k has Tk=5", f->f.v.shape[1] = 4);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: v has Hkv=1, k has Hkv=2", f->f.v.shape[2] = 1);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: q has H=4, expected a multiple of k's Hkv=3",
           f->f.k = VIEW(f->k, COT_F32, B, TK, 3, DH), f->f.v = VIEW(f->v, COT_F32, B, TK, 3, DV));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: q has H=4, expected a multiple of k's Hkv=0",
           f->f.k.shape[2] = f->f.v.shape[2] = 0);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: q has d=0, expected 1 or more",
           f->f.q.shape[3] = f->f.k.shape[3] = 0);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: v has d_v=0, expected 1 or more",
           f->f.v.shape[3] = 0);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: out has d_v=5, v has d_v=6",
           f->f.out.shape[3] = 5);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: lse has Tq=2, q has Tq=3",
           f->f.lse.shape[2] = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: sink has H=3, q has H=4",
           f->f.sink = VIEW(f->small, COT_F32, 3));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: alibi_slopes has B=3, q has B=2",
           f->f.alibi_slopes = VIEW(f->small, COT_F32, 3, H));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: alibi_slopes has H=5, q has H=4",
           f->f.alibi_slopes = VIEW(f->small, COT_F32, 5));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: bias has Tk=4, k has Tk=5",
           f->f.bias = VIEW(f->bias, COT_F32, 1, H, 1, 4));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: seqused_k has B=3, q has B=2",
           f->f.seqused_k = VIEW(f->cu_k, COT_I32, 3));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: seqused_q has B=3, q has B=2",
           f->f.seqused_q = VIEW(f->cu_k, COT_I32, 3));
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_backward: lse is required",
           f->b.lse = (cot_tensor){0});
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_backward: out is required",
           f->b.out = (cot_tensor){0});
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_backward: dout is required",
           f->b.dout = (cot_tensor){0});
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_backward: out is given together with delta, which stands for it", f->b.delta = f->b.lse);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_backward: dlse is given together with delta, which stands for it", f->b.delta = f->b.lse,
           f->b.dlse = f->b.lse, f->b.out = (cot_tensor){0});
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_backward: sink is required",
           f->b.sink = (cot_tensor){0});
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_backward: bias is required",
           f->b.bias = (cot_tensor){0});
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_backward: dbias has B=2, bias has B=1",
           f->b.dbias = VIEW(f->out.dbias, COT_F32, B, H, TQ, TK));
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_backward: dq has d=6, q has d=8", f->b.dq.shape[3] = 6);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_backward: dk has Hkv=4, k has Hkv=2",
           f->b.dk.shape[2] = 4);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_backward: dv has Tk=3, k has Tk=5",
           f->b.dv.shape[1] = 3);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_backward: dsink has H=5, q has H=4",
           f->b.dsink = VIEW(f->out.dsink, COT_F32, 5));
    REFUSE(DELTA, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_delta: delta is required",
           f->d.delta = (cot_tensor){0});
    REFUSE(DELTA, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_delta: dout is required", f->d.dout = (cot_tensor){0});
    REFUSE(DELTA, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_delta: dout has d_v=5, out has d_v=6",
           f->d.dout.shape[3] = 5);
    REFUSE(DELTA, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_delta: delta has H=2, out has H=4",
           f->d.delta.shape[1] = 2);
    REFUSE(MERGE, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_merge: out_b is required",
           f->m.out_b = (cot_tensor){0});
    REFUSE(MERGE, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_merge: lse_a is required",
           f->m.lse_a = (cot_tensor){0});
    REFUSE(MERGE, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_merge: lse_b is required",
           f->m.lse_b = (cot_tensor){0});
    REFUSE(MERGE, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_merge: out has Tq=2, out_a has Tq=3",
           f->m.out.shape[1] = 2);
    REFUSE(MERGE, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_merge: sink has H=1, out_a has H=4",
           f->m.sink = VIEW(f->small, COT_F32, 1));
}

static void dtypes_and_memory(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "attention_forward: k has dtype bf16, expected q's f32",
           f->f.k.dtype = COT_BF16);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "attention_forward: v has dtype f16, expected q's f32",
           f->f.v.dtype = COT_F16);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "attention_forward: out has dtype f16, expected q's f32",
           f->f.out.dtype = COT_F16);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "attention_forward: out has dtype f16, expected q's bf16 or f32",
           f->f.q.dtype = f->f.k.dtype = f->f.v.dtype = COT_BF16, f->f.out.dtype = COT_F16);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "attention_forward: lse has dtype bf16, expected f32",
           f->f.lse.dtype = COT_BF16);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_DTYPE,
           "attention_forward: sink has dtype f64, q has f32 (f64 goes with f64 only)",
           f->f.sink = VIEW(f->out.dq, COT_F64, H));
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "attention_backward: dout has dtype bf16, expected q's f32",
           f->b.dout.dtype = COT_BF16);
    REFUSE(BACKWARD, SHAPE_FAULT, COT_INVALID_DTYPE, "attention_backward: dq has dtype bf16, expected q's f32",
           f->b.dq.dtype = COT_BF16);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_LAYOUT, "attention_forward: out overlaps q", f->f.out.data = f->q);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_ARGUMENT, "attention_forward: v has null data", f->f.v.data = NULL);
    REFUSE(MERGE, DATA_FAULT, COT_INVALID_LAYOUT, "attention_merge: out overlaps out_a", f->m.out_a = f->m.out,
           f->m.out_a.data = (char *)f->m.out.data + 4);
    REFUSE(MERGE, DATA_FAULT, COT_INVALID_LAYOUT, "attention_merge: out overlaps out_b", f->m.out_b = f->m.out);
    ACCEPT(MERGE, f->m.out_a = f->m.out, f->m.lse_a = f->m.lse);
}

static void packing(void **state)
{
    (void)state;
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_forward: cu_seqlens_q is given without cu_seqlens_k, expected both or none", pack(f),
           f->f.cu_seqlens_k = (cot_tensor){0});
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT,
           "attention_forward: cu_seqlens_k is given without cu_seqlens_q, expected both or none", pack(f),
           f->f.cu_seqlens_q = (cot_tensor){0});
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: cu_seqlens_k has B+1=2, cu_seqlens_q has B+1=3",
           pack(f), f->f.cu_seqlens_k.shape[0] = 2);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: cu_seqlens_q has 0 entries, expected B+1",
           pack(f), f->f.cu_seqlens_q.shape[0] = f->f.cu_seqlens_k.shape[0] = 0);
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_SHAPE, "attention_forward: q has 4 axes, expected 3", pack(f),
           f->f.q = VIEW(f->q, COT_F32, B, TQ, H, DH));
    REFUSE(FORWARD, SHAPE_FAULT, COT_INVALID_ARGUMENT, "attention_forward: max_seqlen_k is -1, expected 0 or more",
           pack(f), f->f.max_seqlen_k = -1);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_DATA, "attention_forward: cu_seqlens_q[0] is 1, expected 0", pack(f),
           f->cu_q[0] = 1);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_DATA, "attention_forward: cu_seqlens_k[2] is 4, less than 5 before it",
           pack(f), f->cu_k[2] = 4);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_DATA, "attention_forward: cu_seqlens_q ends at 8, q has total_q=7", pack(f),
           f->cu_q[1] = 4, f->cu_q[2] = 8);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_DATA,
           "attention_forward: cu_seqlens_k gives sequence 1 5 rows, max_seqlen_k is 4", pack(f), f->cu_k[1] = 4,
           f->cu_k[2] = 9, f->f.max_seqlen_k = 4);
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_DATA, "attention_forward: seqused_q[0] is 2, expected 0 to 1", pack(f),
           f->f.seqused_q = VIEW(f->used, COT_I32, B));
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_DATA, "attention_forward: seqused_k[1] is 6, expected 0 to 5",
           f->used[1] = 6, f->f.seqused_k = VIEW(f->used, COT_I32, B));
    REFUSE(FORWARD, DATA_FAULT, COT_INVALID_DATA, "attention_forward: seqused_k[1] is -1, expected 0 to 5",
           f->used[1] = -1, f->f.seqused_k = VIEW(f->used, COT_I32, B));
    ACCEPT(FORWARD, pack(f));
    ACCEPT(FORWARD, pack(f), f->f.max_seqlen_k = INT64_MAX / 4); /* larger than the number of rows */
    ACCEPT(FORWARD, f->f.seqused_k = f->f.seqused_q = VIEW(f->used, COT_I32, B));
}

/* An empty call is valid. */
static void empty_calls(void **state)
{
    (void)state;
    ACCEPT(FORWARD, f->f.q.shape[0] = f->f.k.shape[0] = f->f.v.shape[0] = f->f.out.shape[0] = f->f.lse.shape[0] = 0);
    ACCEPT(FORWARD, f->f.q.shape[1] = f->f.out.shape[1] = f->f.lse.shape[2] = 0);
    ACCEPT(FORWARD, f->f.out = f->f.lse = (cot_tensor){0});
    ACCEPT(BACKWARD, f->b.dq = f->b.dk = f->b.dv = f->b.dsink = f->b.dbias = (cot_tensor){0});
    fixture space, *f = fresh(&space, NULL);
    f->f.k.shape[1] = f->f.v.shape[1] = 0; /* no keys: the output of every query is 0 */
    assert_ok(call(f, FORWARD));
    for (int i = 0; i < B * TQ * H * DV; i++)
        assert_true(((float *)f->out.o)[i] == 0);
    for (int i = 0; i < B * TQ * H; i++)
        assert_true(((float *)f->out.lse)[i] == -INFINITY);
    cot_queue_destroy(f->queue);
}

static void forced(void **state)
{
    (void)state;
    fixture space, *f = fresh(&space, "attention=attention_fwd_tiled_portable");
    f->f.q.stride[3] = 2, f->f.q.stride[2] = 2 * DH, f->f.q.stride[1] = 2 * DH * H, f->f.q.stride[0] = 0;
    assert_fails(
        call(f, FORWARD), COT_UNSUPPORTED,
        "attention_forward: the forced kernel attention_fwd_tiled_portable refuses: the last axis of a tensor is "
        "not contiguous");
    cot_queue_destroy(f->queue);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options), cmocka_unit_test(blocks),
        cmocka_unit_test(shapes),  cmocka_unit_test(dtypes_and_memory),
        cmocka_unit_test(packing), cmocka_unit_test(empty_calls),
        cmocka_unit_test(forced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
