/* SPDX-License-Identifier: Apache-2.0
 * decode.c: decodes several sequences. First the forward processes all prompts, packed without padding, and writes the
 * state of each sequence. Then the update adds one token per call to every sequence and updates the states. At the end
 * the forward processes each whole sequence at once. Its results must be equal apart from rounding: another kernel may
 * run. */
#include <cotangent/cotangent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 3, D = 4, K = 4, PROMPT = 8, STEPS = 5 }; /* sequences, channels, width; total prompt tokens; new tokens */

static const int32_t cu_seqlens[N + 1] = {0, 3, 3, PROMPT}; /* lengths 3, 0 and 5: empty prompts are allowed */
static float weight[D][K];

static void check_status(cot_status status)
{
    if (status == COT_OK)
        return;
    fprintf(stderr, "%s: %s\n", cot_status_name(status), cot_error_message());
    exit(1);
}

static cot_tensor view(const void *data, cot_dtype dtype, int rank, int64_t a, int64_t b, int64_t c)
{
    return cot_tensor_contiguous((void *)data, dtype, rank, (int64_t[]){a, b, c});
}

/* The input at position t of a sequence. */
static float model_input(int sequence, int channel, int t)
{
    return (float)((17 * sequence + 5 * channel + 11 * t) % 13 - 6) / 8;
}

int main(void)
{
    static float prompt[D][PROMPT], prompt_y[D][PROMPT], state[N][D][K - 1], token[N][D], token_y[N][D];
    static float decoded[N][D][PROMPT + STEPS], whole[D][PROMPT + STEPS], whole_y[D][PROMPT + STEPS];
    cot_queue *queue = NULL;
    cot_queue_options options;
    COT_INIT(&options);
    options.threads = 1; /* the work is too small for more threads; the bits do not depend on it */
    check_status(cot_queue_create(&options, &queue));
    for (int i = 0; i < D * K; i++)
        (&weight[0][0])[i] = (float)(i % 7 - 3) / 4;

    /* the prompts: one row of PROMPT tokens, divided by cu_seqlens */
    for (int n = 0; n < N; n++)
        for (int t = cu_seqlens[n]; t < cu_seqlens[n + 1]; t++)
            for (int d = 0; d < D; d++)
                prompt[d][t] = model_input(n, d, t - cu_seqlens[n]);
    cot_causal_conv1d_forward_args forward;
    COT_INIT(&forward);
    forward.activation = COT_ACTIVATION_SILU;
    forward.x = view(prompt, COT_F32, 3, 1, D, PROMPT);
    forward.weight = view(weight, COT_F32, 2, D, K, 0);
    forward.cu_seqlens = view(cu_seqlens, COT_I32, 1, N + 1, 0, 0);
    forward.y = view(prompt_y, COT_F32, 3, 1, D, PROMPT);
    forward.final_state = view(state, COT_F32, 3, N, D, K - 1);
    check_status(cot_causal_conv1d_forward(queue, &forward));

    /* the new tokens: one update for all sequences per step */
    cot_causal_conv1d_update_args update;
    COT_INIT(&update);
    update.activation = COT_ACTIVATION_SILU;
    update.x = view(token, COT_F32, 2, N, D, 0);
    update.weight = forward.weight;
    update.conv_state = forward.final_state;
    update.y = view(token_y, COT_F32, 2, N, D, 0);
    for (int step = 0; step < STEPS; step++) {
        for (int n = 0; n < N; n++)
            for (int d = 0; d < D; d++)
                token[n][d] = model_input(n, d, cu_seqlens[n + 1] - cu_seqlens[n] + step);
        check_status(cot_causal_conv1d_update(queue, &update));
        for (int n = 0; n < N; n++)
            for (int d = 0; d < D; d++)
                decoded[n][d][cu_seqlens[n + 1] - cu_seqlens[n] + step] = token_y[n][d];
    }

    /* the whole sequences at once */
    float largest = 0;
    for (int n = 0; n < N; n++) {
        const int length = cu_seqlens[n + 1] - cu_seqlens[n], T = length + STEPS;
        for (int d = 0; d < D; d++)
            for (int t = 0; t < T; t++)
                (&whole[0][0])[d * T + t] = model_input(n, d, t);
        COT_INIT(&forward);
        forward.activation = COT_ACTIVATION_SILU;
        forward.x = view(whole, COT_F32, 3, 1, D, T);
        forward.weight = view(weight, COT_F32, 2, D, K, 0);
        forward.y = view(whole_y, COT_F32, 3, 1, D, T);
        check_status(cot_causal_conv1d_forward(queue, &forward));
        for (int d = 0; d < D; d++)
            for (int t = 0; t < T; t++)
                largest = fmaxf(largest, fabsf((&whole_y[0][0])[d * T + t] -
                                               (t < length ? prompt_y[d][cu_seqlens[n] + t] : decoded[n][d][t])));
    }
    printf("%d sequences, %d prompt tokens, %d steps: decoding agrees with the forward over whole sequences: %s\n", N,
           PROMPT, STEPS, largest < 1e-6F ? "yes" : "NO");
    cot_queue_destroy(queue);
    return largest < 1e-6F ? 0 : 1;
}
