/* SPDX-License-Identifier: Apache-2.0 */
#include <cotangent/parallel.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>

enum { RANKS = 4, T = 64, H = 2, D = 16, ROWS = T / RANKS }; /* ROWS: of each rank */

static float q[T][H][D], k[T][H][D], v[T][H][D], out[T][H][D]; /* the whole sequence, to compare */
static cot_group *groups[RANKS];

static void check(cot_status status)
{
    if (status != COT_OK)
        fprintf(stderr, "%s\n", cot_error_message());
}

/* One rank. It reads and writes only its own rows. With MPI, this is the program of each process. */
static void *run_rank(void *memory)
{
    cot_group *group = memory;
    const int rank = cot_group_rank(group);
    float part[4][ROWS][H][D];
    float(*const whole[4])[H][D] = {q, k, v, out};
    cot_tensor tensors[4], wholes[4];
    cot_parallel_options options;
    COT_INIT(&options);
    options.cut = COT_CUT_ZIGZAG; /* equal work for all ranks under a causal mask */
    for (int n = 0; n < 4; n++) {
        tensors[n] = cot_tensor_contiguous(part[n], COT_F32, 4, (int64_t[]){1, ROWS, H, D});
        wholes[n] = cot_tensor_contiguous(whole[n], COT_F32, 4, (int64_t[]){1, T, H, D});
        if (n < 3)
            check(cot_shard(&options, RANKS, rank, 1, &wholes[n], &tensors[n]));
    }
    cot_queue *queue = NULL;
    check(cot_queue_create(NULL, &queue));
    cot_attention_forward_args args;
    COT_INIT(&args);
    args.causal = 1;
    args.q_length = args.k_length = T; /* of the whole sequence */
    args.q = tensors[0], args.k = tensors[1], args.v = tensors[2], args.out = tensors[3];
    check(cot_parallel_attention_forward(group, queue, &options, &args));
    check(cot_unshard(&options, RANKS, rank, 1, &tensors[3], &wholes[3]));
    cot_queue_destroy(queue);
    return NULL;
}

int main(void)
{
    static float single[T][H][D];
    pthread_t threads[RANKS];
    for (int i = 0; i < T * H * D; i++)
        (&q[0][0][0])[i] = (float)(i % 13) / 6 - 1, (&k[0][0][0])[i] = (float)(i % 11) / 5 - 1,
        (&v[0][0][0])[i] = (float)(i % 7) / 3 - 1;
    check(cot_group_create_local(RANKS, NULL, groups));
    for (int rank = 0; rank < RANKS; rank++)
        pthread_create(&threads[rank], NULL, run_rank, groups[rank]);
    for (int rank = 0; rank < RANKS; rank++)
        pthread_join(threads[rank], NULL);
    for (int rank = 0; rank < RANKS; rank++)
        cot_group_destroy(groups[rank]);

    cot_queue *queue = NULL; /* the same attention in one call */
    cot_attention_forward_args args;
    float largest = 0;
    COT_INIT(&args);
    args.causal = 1;
    args.q = cot_tensor_contiguous(q, COT_F32, 4, (int64_t[]){1, T, H, D});
    args.k = cot_tensor_contiguous(k, COT_F32, 4, (int64_t[]){1, T, H, D});
    args.v = cot_tensor_contiguous(v, COT_F32, 4, (int64_t[]){1, T, H, D});
    args.out = cot_tensor_contiguous(single, COT_F32, 4, (int64_t[]){1, T, H, D});
    check(cot_queue_create(NULL, &queue));
    check(cot_attention_forward(queue, &args));
    cot_queue_destroy(queue);
    for (int i = 0; i < T * H * D; i++)
        largest = fmaxf(largest, fabsf((&out[0][0][0])[i] - (&single[0][0][0])[i]));
    printf("%d ranks and one call differ by less than 1e-6: %s\n", RANKS, largest < 1e-6f ? "yes" : "no");
    return largest < 1e-6f ? 0 : 1;
}
