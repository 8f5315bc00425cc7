/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_cases_bench.c: the cases of the benchmark. */
#include "attention_case_build.h"

/* The setting of the FlashAttention-3 paper: 16k tokens, H d = 2048. */
static void bench_cuda(cot_case_visitor *v, int direction)
{
    for (int64_t d = 64; d <= 256; d *= 2)
        for (int causal = 0; causal < 2; causal++)
            for (int allow_nondeterminism = 0; allow_nondeterminism < 1 + (direction == COT_ATTENTION_BACKWARD);
                 allow_nondeterminism++)
                for (int64_t T = 512; T <= 16384; T *= 2) {
                    attention_case_params p = {.direction = direction, .uses = COT_CASE_BENCH_CUDA, .seed = 61};
                    p.B = 16384 / T, p.H = p.Hkv = 2048 / d, p.Tq = p.Tk = T;
                    p.d = p.d_v = d;
                    p.dtype = COT_BF16;
                    p.causal = causal;
                    p.allow_nondeterminism = allow_nondeterminism;
                    attention_case_visit(v, &p);
                }
}

typedef struct bench_shape {
    int64_t B, H, Hkv, T, d, d_v;
    cot_dtype dtype;
    bool causal, sink, packed, mixed;
    int64_t left; /* 0: no window */
    double softcap, dropout;
    bool alibi, bias;
} bench_shape;

static void bench(cot_case_visitor *v, int direction, unsigned uses, bool allow_nondeterminism,
                  const bench_shape *shapes, size_t count)
{
    for (const bench_shape *s = shapes; s < shapes + count; s++) {
        const attention_case_params p = {.direction = direction,
                                         .uses = uses,
                                         .B = s->B,
                                         .H = s->H,
                                         .Hkv = s->Hkv,
                                         .Tq = s->T,
                                         .Tk = s->T,
                                         .d = s->d,
                                         .d_v = s->d_v,
                                         .dtype = s->dtype,
                                         .causal = s->causal,
                                         .window = s->left > 0,
                                         .left = s->left,
                                         .softcap = s->softcap,
                                         .dropout = s->dropout,
                                         .alibi = s->alibi,
                                         .bias = s->bias,
                                         .bias_axes = 1, /* one bias for all of the batch */
                                         .sink = s->sink,
                                         .packed = s->packed,
                                         .mixed = s->mixed,
                                         .allow_nondeterminism = allow_nondeterminism,
                                         .seed = s->mixed ? 61 : 60};
        attention_case_visit(v, &p);
    }
}

/* The cost of features, to compare with the entries of bench_cuda without them; and head sizes in between. With
 * dropout, ALiBi or bias the kernels of the backward have one order of sums. */
static void bench_features_cuda(cot_case_visitor *v, int direction)
{
    static const bench_shape shapes[] = {
        {1, 16, 16, 16384, 128, 128, COT_F16, .causal = true},
        {1, 16, 16, 16384, 128, 128, COT_BF16, .causal = true, .left = 1024},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .softcap = 30},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .sink = true},
        {4, 16, 2, 4096, 128, 128, COT_BF16, .causal = true},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .packed = true},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .packed = true, .mixed = true},
        {8, 32, 8, 2048, 128, 128, COT_BF16, .causal = true, .packed = true},
        {2, 32, 8, 8192, 128, 128, COT_BF16, .causal = true, .packed = true},
        {32, 32, 32, 512, 64, 64, COT_BF16, .causal = true, .packed = true},
        {32, 32, 32, 512, 64, 64, COT_BF16, .causal = true, .packed = true, .mixed = true},
        {4, 16, 16, 4096, 192, 128, COT_BF16, .causal = true},
        {4, 16, 16, 4096, 192, 192, COT_BF16, .causal = true},
        {4, 16, 16, 4096, 96, 96, COT_BF16, .causal = true},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .dropout = 0.1},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .alibi = true},
        {4, 16, 16, 4096, 128, 128, COT_BF16, .causal = true, .bias = true},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const bool one_order = shapes[i].dropout > 0 || shapes[i].alibi || shapes[i].bias;
        bench(v, direction, COT_CASE_BENCH_CUDA, false, shapes + i, 1);
        if (direction == COT_ATTENTION_BACKWARD && !one_order)
            bench(v, direction, COT_CASE_BENCH_CUDA, true, shapes + i, 1);
    }
}

static void bench_shapes(cot_case_visitor *v, int direction)
{
    static const bench_shape shapes[] = {
        {1, 8, 8, 2048, 128, 128, COT_BF16, .causal = true},
        {1, 8, 8, 2048, 128, 128, COT_F16, .causal = true},
        {1, 8, 8, 2048, 128, 128, COT_F32, .causal = true},
        {1, 8, 8, 2048, 128, 128, COT_BF16, .causal = false},
        {1, 8, 8, 2048, 128, 128, COT_F32, .causal = false},
        {1, 16, 16, 2048, 64, 64, COT_BF16, .causal = true},
        {1, 8, 2, 2048, 128, 128, COT_BF16, .causal = true},
        {1, 4, 4, 2048, 256, 256, COT_BF16, .causal = true},
        {1, 8, 8, 8192, 128, 128, COT_BF16, .causal = true},
        {1, 8, 8, 8192, 128, 128, COT_BF16, .causal = true, .left = 1024},
        {4, 8, 8, 512, 128, 128, COT_BF16, .causal = true},
        {4, 8, 8, 512, 128, 128, COT_BF16, .causal = true, .packed = true},
    };
    bench(v, direction, COT_CASE_BENCH, false, shapes, sizeof shapes / sizeof *shapes);
}

static void bench_rows(cot_case_visitor *v, int direction)
{
    for (int number = 0; number < 4; number++) {
        const attention_case_params p = {.direction = direction,
                                         .uses = COT_CASE_BENCH,
                                         .B = 1,
                                         .H = 8,
                                         .Hkv = 8,
                                         .Tq = number < 2 ? 2048 : 8192,
                                         .Tk = 1,
                                         .d = 1,
                                         .d_v = 128,
                                         .dtype = number % 2 == 0 ? COT_BF16 : COT_F32,
                                         .seed = 62};
        attention_case_visit(v, &p);
    }
}

void attention_visit_bench_cases(cot_case_visitor *v, int direction)
{
    if (direction != COT_ATTENTION_FORWARD && direction != COT_ATTENTION_BACKWARD) {
        bench_rows(v, direction);
        return;
    }
    bench_shapes(v, direction);
    bench_cuda(v, direction);
    bench_features_cuda(v, direction);
}
