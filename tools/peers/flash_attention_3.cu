// SPDX-License-Identifier: Apache-2.0
// FlashAttention-3's backward behind one C function, for tools/peers/attention.py. FlashAttention-3 has no wheel, and its
// PyTorch extension compiles for hours. This file compiles the kernels of one head dimension for bf16 without variable
// lengths, windows and softcap. build_flash_attention_3.sh builds it: one object for each value of HEAD_DIM.
#include "flash_bwd_launch_template.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

// Tensors are contiguous [B,T,H,HEAD_DIM] in bf16, lse [B,H,T] in f32. The workspace has the bytes that
// peer_flash_attention_3_workspace returns, from an address that is a multiple of 256. All errors end the process, as
// FlashAttention-3's own checks do.
extern "C" void PASTE(peer_flash_attention_3_backward_, HEAD_DIM)(int B, int H, int T, int causal, int deterministic,
                                                                  void *q, void *k, void *v, void *out, void *dout,
                                                                  void *lse, void *dq, void *dk, void *dv,
                                                                  void *workspace, void *stream)
{
    // Every tile height and width of the kernels (64, 80, 96 and 128 rows) divides this, so that one layout serves all.
    const int rounded = (T + 1919) / 1920 * 1920;
    Flash_bwd_params params = {};
    params.q_ptr = q, params.k_ptr = k, params.v_ptr = v, params.o_ptr = out, params.do_ptr = dout;
    params.dq_ptr = dq, params.dk_ptr = dk, params.dv_ptr = dv, params.softmax_lse_ptr = lse;
    params.b = B, params.h = params.h_k = H, params.seqlen_q = params.seqlen_k = T;
    params.total_q = params.total_k = B * T;
    params.d = params.dv = params.d_rounded = params.dv_rounded = HEAD_DIM;
    params.seqlen_q_rounded = params.seqlen_k_rounded = rounded;
    const int64_t row = (int64_t)H * HEAD_DIM, sequence = T * row;
    params.q_row_stride = params.k_row_stride = params.v_row_stride = params.o_row_stride = row;
    params.do_row_stride = params.dq_row_stride = params.dk_row_stride = params.dv_row_stride = row;
    params.q_head_stride = params.k_head_stride = params.v_head_stride = params.o_head_stride = HEAD_DIM;
    params.do_head_stride = params.dq_head_stride = params.dk_head_stride = params.dv_head_stride = HEAD_DIM;
    params.q_batch_stride = params.k_batch_stride = params.v_batch_stride = params.o_batch_stride = sequence;
    params.do_batch_stride = params.dq_batch_stride = params.dk_batch_stride = params.dv_batch_stride = sequence;
    params.scale_softmax = 1 / sqrtf(HEAD_DIM);
    params.window_size_left = params.window_size_right = -1;
    if (causal) {
        params.window_size_right = 0;
        params.window_size_left = T - 1;
    }
    params.is_causal = causal, params.is_bf16 = true, params.deterministic = deterministic;
    params.arch = 90;
    cudaDeviceGetAttribute(&params.num_sm, cudaDevAttrMultiProcessorCount, 0);
    const int64_t rows = (int64_t)B * H * rounded;
    float *next = (float *)workspace;
    params.dq_accum_ptr = next, next += rows * HEAD_DIM;
    params.dsoftmax_sum = next, next += rows;
    params.softmax_lse_log2_ptr = next, next += rows;
    params.dq_semaphore = (int *)next;
    PASTE(run_mha_bwd_hdim, HEAD_DIM)<90, cutlass::bfloat16_t, false>(params, (cudaStream_t)stream);
}

extern "C" int64_t PASTE(peer_flash_attention_3_workspace_, HEAD_DIM)(int B, int H, int T)
{
    return (int64_t)B * H * ((T + 1919) / 1920 * 1920) * 4 * (HEAD_DIM + 3);
}
