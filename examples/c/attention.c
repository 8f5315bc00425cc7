/* SPDX-License-Identifier: Apache-2.0 */
#include <cotangent/cotangent.h>
#include <stdio.h>

enum { B = 1, T = 3, H = 1, D = 2 }; /* batch, tokens, heads, head size */

static cot_tensor tensor(float *data)
{
    return cot_tensor_contiguous(data, COT_F32, 4, (int64_t[]){B, T, H, D});
}

int main(void)
{
    float q[T][D] = {{1, 0}, {0, 1}, {1, 1}}, k[T][D] = {{1, 0}, {0, 1}, {1, 1}}, v[T][D] = {{1, 2}, {3, 4}, {5, 6}};
    float dout[T][D] = {{1, 0}, {0, 1}, {1, 1}}, out[T][D], lse[B][H][T], dq[T][D], dk[T][D], dv[T][D];

    cot_queue *queue = NULL;
    cot_attention_forward_args forward;
    COT_INIT(&forward);
    forward.causal = 1;
    forward.q = tensor(q[0]), forward.k = tensor(k[0]), forward.v = tensor(v[0]);
    forward.out = tensor(out[0]);
    forward.lse = cot_tensor_contiguous(lse, COT_F32, 3, (int64_t[]){B, H, T}); /* the backward reads it */

    cot_attention_backward_args backward;
    COT_INIT(&backward);
    backward.causal = forward.causal; /* the same options as the forward */
    backward.q = forward.q, backward.k = forward.k, backward.v = forward.v;
    backward.out = forward.out, backward.lse = forward.lse;
    backward.dout = tensor(dout[0]);
    backward.dq = tensor(dq[0]), backward.dk = tensor(dk[0]), backward.dv = tensor(dv[0]);

    if (cot_queue_create(NULL, &queue) != COT_OK || cot_attention_forward(queue, &forward) != COT_OK ||
        cot_attention_backward(queue, &backward) != COT_OK) {
        fprintf(stderr, "%s\n", cot_error_message());
        return 1;
    }
    for (int t = 0; t < T; t++)
        printf("out %.4f %.4f   dq %.4f %.4f   dk %.4f %.4f   dv %.4f %.4f\n", out[t][0], out[t][1], dq[t][0], dq[t][1],
               dk[t][0], dk[t][1], dv[t][0], dv[t][1]);
    cot_queue_destroy(queue);
    return 0;
}
