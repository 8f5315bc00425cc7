/* SPDX-License-Identifier: Apache-2.0 */
#include <cotangent/cotangent.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

enum { B = 1, T = 256, H = 4, HKV = 2, D = 64 }; /* batch, tokens, query heads, key-value heads, head size */
enum { Q_ELEMENTS = B * T * H * D, KV_ELEMENTS = B * T * HKV * D };

static void check_cuda(cudaError_t error)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "%s\n", cudaGetErrorString(error));
        exit(1);
    }
}

static void check(cot_status status)
{
    if (status != COT_OK) {
        fprintf(stderr, "%s: %s\n", cot_status_name(status), cot_error_message());
        exit(1);
    }
}

/* bf16 is the upper half of a float32. */
static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16); /* exact for the numbers of this program */
}

static float from_bf16(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A tensor in device memory, [B,T,heads,D] in bf16, filled from `host` unless that is NULL. */
static cot_tensor device_tensor(int heads, const uint16_t *host)
{
    const size_t bytes = sizeof(uint16_t) * B * T * heads * D;
    void *memory = NULL;
    check_cuda(cudaMalloc(&memory, bytes));
    if (host != NULL)
        check_cuda(cudaMemcpy(memory, host, bytes, cudaMemcpyHostToDevice));
    return cot_tensor_contiguous(memory, COT_BF16, 4, (int64_t[]){B, T, heads, D});
}

int main(void)
{
    static uint16_t q[Q_ELEMENTS], k[KV_ELEMENTS], v[KV_ELEMENTS], dout[Q_ELEMENTS], out[Q_ELEMENTS], dv[KV_ELEMENTS];
    for (int i = 0; i < Q_ELEMENTS; i++)
        q[i] = to_bf16((float)(i % 13 - 6) / 8), dout[i] = to_bf16(1);
    for (int i = 0; i < KV_ELEMENTS; i++)
        k[i] = to_bf16((float)(i % 11 - 5) / 8), v[i] = to_bf16((float)(i % 7 - 3) / 4);

    cudaStream_t stream = NULL;
    check_cuda(cudaStreamCreate(&stream));
    cot_queue *queue = NULL;
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    options.stream = stream;
    check(cot_queue_create(&options, &queue));

    void *lse = NULL;
    check_cuda(cudaMalloc(&lse, sizeof(float) * B * H * T));
    cot_attention_forward_args forward;
    COT_INIT(&forward);
    forward.causal = 1;
    forward.q = device_tensor(H, q), forward.k = device_tensor(HKV, k), forward.v = device_tensor(HKV, v);
    forward.out = device_tensor(H, NULL);
    forward.lse = cot_tensor_contiguous(lse, COT_F32, 3, (int64_t[]){B, H, T});
    check(cot_attention_forward(queue, &forward)); /* enqueues the work, and returns */

    cot_attention_backward_args backward;
    COT_INIT(&backward);
    backward.causal = forward.causal; /* the same options as the forward */
    backward.q = forward.q, backward.k = forward.k, backward.v = forward.v;
    backward.out = forward.out, backward.lse = forward.lse;
    backward.dout = device_tensor(H, dout);
    backward.dq = device_tensor(H, NULL), backward.dk = device_tensor(HKV, NULL),
    backward.dv = device_tensor(HKV, NULL);
    check(cot_attention_backward(queue, &backward));
    check(cot_queue_check(queue)); /* waits for the stream; an error of the GPU appears here */

    check_cuda(cudaMemcpy(out, forward.out.data, sizeof out, cudaMemcpyDeviceToHost));
    check_cuda(cudaMemcpy(dv, backward.dv.data, sizeof dv, cudaMemcpyDeviceToHost));
    int equal = 1; /* query 0 attends to key 0 only: out = v */
    for (int h = 0; h < H; h++)
        for (int c = 0; c < D; c++)
            equal &= out[h * D + c] == v[h / (H / HKV) * D + c];
    double sum = 0; /* the rows of P have the sum 1: the sums of dv and of dout are equal */
    for (int i = 0; i < KV_ELEMENTS; i++)
        sum += from_bf16(dv[i]);
    printf("out of query 0 is v of key 0: %s\nsum of dv / sum of dout: %.2f\n", equal ? "yes" : "no", sum / Q_ELEMENTS);

    cot_queue_destroy(queue); /* before the stream */
    const cot_tensor tensors[] = {forward.q,     forward.k,   forward.v,   forward.out, forward.lse,
                                  backward.dout, backward.dq, backward.dk, backward.dv};
    for (size_t n = 0; n < sizeof tensors / sizeof *tensors; n++)
        check_cuda(cudaFree(tensors[n].data));
    check_cuda(cudaStreamDestroy(stream));
    return 0;
}
