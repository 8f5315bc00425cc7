/* SPDX-License-Identifier: Apache-2.0
 *
 * device_layers.c: host side of the trainer's kernels: checks of the sizes, and the grids. */
#include "device_layers.h"

#include "cuda/device.h"

#include "core/integers.h"
#include "core/status.h"

extern const unsigned char *const train_lm_images[]; /* ends with a null pointer */
extern const unsigned char cot_image_train_layers[], cot_image_train_optimizer[];

/* clang-format off */
/* Indexed by dtype - 1: f32, f16 and bf16 are 1, 2 and 3 in cot_dtype. */
#define BY_DTYPE(image, name, shared) \
    {{cot_image_##image, #name "_f32", shared}, {cot_image_##image, #name "_f16", shared}, \
     {cot_image_##image, #name "_bf16", shared}}
/* clang-format on */

static const cot_cuda_kernel embedding_forward[3] = BY_DTYPE(train_layers, embedding_forward, 0);
static const cot_cuda_kernel embedding_backward[3] = BY_DTYPE(train_layers, embedding_backward, 0);
static const cot_cuda_kernel embedding_add_partials = {cot_image_train_layers, "embedding_add_partials", 0};
static const cot_cuda_kernel positions_backward[3] = BY_DTYPE(train_layers, positions_backward, 0);
static const cot_cuda_kernel rmsnorm_forward[3] = BY_DTYPE(train_layers, rmsnorm_forward, 0);
static const cot_cuda_kernel rmsnorm_backward[3] = BY_DTYPE(train_layers, rmsnorm_backward, NORM_SHARED);
static const cot_cuda_kernel layernorm_forward[3] = BY_DTYPE(train_layers, layernorm_forward, 0);
static const cot_cuda_kernel layernorm_backward[3] = BY_DTYPE(train_layers, layernorm_backward, NORM_SHARED);
static const cot_cuda_kernel column_sums[3] = BY_DTYPE(train_layers, column_sums, 0);
static const cot_cuda_kernel add_partials = {cot_image_train_layers, "add_partials", 0};
static const cot_cuda_kernel rope[3] = BY_DTYPE(train_layers, rope, 0);
static const cot_cuda_kernel gate_forward[3] = BY_DTYPE(train_layers, gate_forward, 0);
static const cot_cuda_kernel gate_backward[3] = BY_DTYPE(train_layers, gate_backward, 0);
static const cot_cuda_kernel gelu_forward[3] = BY_DTYPE(train_layers, gelu_forward, 0);
static const cot_cuda_kernel gelu_backward[3] = BY_DTYPE(train_layers, gelu_backward, 0);
static const cot_cuda_kernel add[3] = BY_DTYPE(train_layers, add, 0);
static const cot_cuda_kernel spread[3] = BY_DTYPE(train_layers, spread, 0);
static const cot_cuda_kernel collect[3] = BY_DTYPE(train_layers, collect, 0);
static const cot_cuda_kernel cross_entropy[3] = BY_DTYPE(train_optimizer, cross_entropy, 0);
static const cot_cuda_kernel mean_loss = {cot_image_train_optimizer, "mean_loss", 0};
static const cot_cuda_kernel gradient_squares = {cot_image_train_optimizer, "gradient_squares", 0};
static const cot_cuda_kernel gradient_norm = {cot_image_train_optimizer, "gradient_norm", 0};
static const cot_cuda_kernel adamw[3] = BY_DTYPE(train_optimizer, adamw, 0);

cot_status device_layers_load(cot_queue *queue)
{
    cot_status status = COT_OK;
    for (int i = 0; status == COT_OK && train_lm_images[i] != NULL; i++)
        status = cot_cuda_add_image(queue, train_lm_images[i]);
    return status;
}

/* ---- checks and launches ------------------------------------------------------------------------------ */

static cot_status check_dtype(const char *name, cot_dtype dtype)
{
    if (dtype == COT_F32 || dtype == COT_F16 || dtype == COT_BF16)
        return COT_OK;
    return cot_fail(COT_INVALID_DTYPE, "%s: dtype is %s, expected f32, f16 or bf16", name, cot_dtype_name(dtype));
}

/* Checks the dtype, and that `size` consists of whole vectors. */
static cot_status check_vectors(const char *name, cot_dtype dtype, const char *what, int64_t size)
{
    const cot_status status = check_dtype(name, dtype);
    if (status != COT_OK)
        return status;
    const int64_t vector = 16 / (int64_t)cot_dtype_size(dtype);
    if (size > 0 && size % vector == 0)
        return COT_OK;
    return cot_fail(COT_INVALID_SHAPE, "%s: %s is %lld, expected a positive multiple of %lld", name, what,
                    (long long)size, (long long)vector);
}

static cot_status launch(cot_queue *queue, const cot_cuda_kernel *kernel, int64_t x, int64_t y, int threads,
                         int64_t shared_bytes, const void *call)
{
    if (x == 0 || y == 0)
        return COT_OK;
    if (x > INT32_MAX || y > UINT16_MAX)
        return cot_fail(COT_INVALID_SHAPE, "%s: a grid of %lld x %lld blocks is too large", kernel->name, (long long)x,
                        (long long)y);
    const cot_cuda_grid grid = {
        .blocks = {(unsigned)x, (unsigned)y, 1}, .threads = (unsigned)threads, .shared_bytes = (unsigned)shared_bytes};
    cot_status status = cot_cuda_enter(queue->device);
    if (status != COT_OK)
        return status;
    status = cot_cuda_launch(queue, kernel, &grid, call);
    cot_cuda_leave(queue->device);
    return status;
}

/* One thread per vector of `elements` elements. */
static cot_status launch_vectors(cot_queue *queue, const cot_cuda_kernel kernels[3], cot_dtype dtype, int64_t elements,
                                 const void *call)
{
    const int64_t vectors = elements / (16 / (int64_t)cot_dtype_size(dtype));
    return launch(queue, &kernels[dtype - 1], cot_ceil_div(vectors, LAYER_THREADS), 1, LAYER_THREADS, 0, call);
}

/* ---- embedding ---------------------------------------------------------------------------------------- */

cot_status device_embedding_forward(cot_queue *queue, cot_dtype dtype, const embedding_call *call)
{
    const cot_status status = check_vectors("embedding_forward", dtype, "width", call->width);
    return status != COT_OK ? status
                            : launch_vectors(queue, embedding_forward, dtype, cot_mul(call->rows, call->width), call);
}

/* Every token has one piece per EMBEDDING_PIECE rows and at most one more. */
int64_t embedding_max_pieces(int64_t rows, int64_t vocabulary)
{
    return rows / EMBEDDING_PIECE + cot_min(rows, vocabulary);
}

int64_t embedding_max_sums(int64_t rows)
{
    return rows / (EMBEDDING_PIECE + 1);
}

/* A token with n > EMBEDDING_PIECE rows has ceil(n / EMBEDDING_PIECE) < 2 n / EMBEDDING_PIECE pieces. */
int64_t embedding_max_partials(int64_t rows)
{
    return 2 * cot_ceil_div(rows, EMBEDDING_PIECE);
}

/* Appends the pieces of a token, whose rows are order[first .. end-1]. */
static void add_pieces(embedding_plan *plan, int32_t token, int32_t first, int32_t end, int32_t *partials)
{
    const bool several = end - first > EMBEDDING_PIECE;
    const int32_t first_partial = *partials;
    for (int32_t at = first; at < end; at += EMBEDDING_PIECE)
        plan->pieces[plan->counts[0]++] =
            (embedding_piece){.first = at,
                              .count = end - at < EMBEDDING_PIECE ? end - at : EMBEDDING_PIECE,
                              .token = token,
                              .partial = several ? (*partials)++ : -1};
    if (several)
        plan->sums[plan->counts[1]++] =
            (embedding_sum){.partial = first_partial, .count = *partials - first_partial, .token = token};
}

void embedding_make_plan(embedding_plan *plan, int64_t rows, int64_t vocabulary, const int32_t *tokens, int32_t *next)
{
    memset(next, 0, (size_t)(vocabulary + 1) * sizeof *next);
    for (int64_t r = 0; r < rows; r++)
        next[tokens[r] + 1]++;
    for (int64_t v = 0; v < vocabulary; v++)
        next[v + 1] += next[v];
    for (int64_t r = 0; r < rows; r++)
        plan->order[next[tokens[r]]++] = (int32_t)r;
    plan->counts[0] = plan->counts[1] = 0;
    int32_t partials = 0;
    for (int64_t v = 0; v < vocabulary; v++) /* next[v] is now the end of token v */
        add_pieces(plan, (int32_t)v, v > 0 ? next[v - 1] : 0, next[v], &partials);
}

cot_status device_embedding_backward(cot_queue *queue, cot_dtype dtype, const embedding_backward_call *call)
{
    cot_status status = check_vectors("embedding_backward", dtype, "width", call->width);
    const int64_t vector = 16 / (int64_t)(status == COT_OK ? cot_dtype_size(dtype) : 4);
    if (status == COT_OK)
        status = launch(queue, &embedding_backward[dtype - 1], embedding_max_pieces(call->rows, call->vocabulary),
                        cot_ceil_div(call->width, EMBEDDING_THREADS * vector), EMBEDDING_THREADS, 0, call);
    if (status == COT_OK)
        status = launch(queue, &embedding_add_partials, embedding_max_sums(call->rows),
                        cot_ceil_div(call->width, EMBEDDING_THREADS * 4), EMBEDDING_THREADS, 0, call);
    return status;
}

/* One block of threads per position and per EMBEDDING_THREADS vectors of columns. */
cot_status device_positions_backward(cot_queue *queue, cot_dtype dtype, const positions_backward_call *call)
{
    const cot_status status = check_vectors("positions_backward", dtype, "width", call->width);
    if (status != COT_OK)
        return status;
    const int64_t vector = 16 / (int64_t)cot_dtype_size(dtype);
    return launch(queue, &positions_backward[dtype - 1], call->time,
                  cot_ceil_div(call->width, EMBEDDING_THREADS * vector), EMBEDDING_THREADS, 0, call);
}

/* ---- sums over rows ----------------------------------------------------------------------------------- */

static cot_status launch_add_partials(cot_queue *queue, const float *partials, int64_t blocks, int64_t stride,
                                      int64_t width, float *sums)
{
    const add_partials_call call = {
        .partials = partials, .sums = sums, .width = width, .stride = stride, .blocks = (int32_t)blocks};
    return launch(queue, &add_partials, cot_ceil_div(width, 32), 1, LAYER_THREADS, 0, &call);
}

cot_status device_column_sums(cot_queue *queue, cot_dtype dtype, const column_sums_call *call)
{
    cot_status status = check_vectors("column_sums", dtype, "width", call->width);
    if (status != COT_OK || call->rows == 0)
        return status;
    const int64_t columns = 32 * (16 / (int64_t)cot_dtype_size(dtype)); /* of a warp, and of a block */
    column_sums_call split = *call;
    split.rows_a_block = (int32_t)cot_round_up(cot_ceil_div(call->rows, SUM_BLOCKS), LAYER_THREADS / 32);
    const int64_t blocks = cot_ceil_div(call->rows, split.rows_a_block);
    status =
        launch(queue, &column_sums[dtype - 1], blocks, cot_ceil_div(call->width, columns), LAYER_THREADS, 0, &split);
    return status != COT_OK ? status
                            : launch_add_partials(queue, call->partials, blocks, call->width, call->width, call->sums);
}

/* ---- RMSNorm and LayerNorm ---------------------------------------------------------------------------- */

/* The grid of a norm's backward, whose warps have sums_bytes bytes of sums each. */
typedef struct norm_split {
    int64_t rows_a_block, blocks;
    int warps;
} norm_split;

static norm_split split_norm(int64_t rows, int64_t sums_bytes)
{
    norm_split split = {.warps = NORM_WARPS};
    while (split.warps * sums_bytes > NORM_SHARED)
        split.warps /= 2;
    split.rows_a_block = cot_round_up(cot_ceil_div(rows, NORM_BLOCKS), split.warps);
    split.blocks = cot_ceil_div(rows, split.rows_a_block);
    return split;
}

/* Checks the widths of a norm's backward. */
static cot_status check_norm(const char *name, cot_dtype dtype, int64_t width, int64_t max_width)
{
    const cot_status status = check_vectors(name, dtype, "width", width);
    if (status == COT_OK && width > max_width)
        return cot_fail(COT_INVALID_SHAPE, "%s: width is %lld, expected at most %lld", name, (long long)width,
                        (long long)max_width);
    return status;
}

cot_status device_rmsnorm_forward(cot_queue *queue, cot_dtype dtype, const rmsnorm_call *call)
{
    const cot_status status = check_vectors("rmsnorm_forward", dtype, "width", call->width);
    return status != COT_OK ? status
                            : launch(queue, &rmsnorm_forward[dtype - 1], cot_ceil_div(call->rows, NORM_WARPS), 1,
                                     32 * NORM_WARPS, 0, call);
}

cot_status device_rmsnorm_backward(cot_queue *queue, cot_dtype dtype, const rmsnorm_backward_call *call)
{
    cot_status status = check_norm("rmsnorm_backward", dtype, call->width, NORM_MAX_WIDTH);
    if (status != COT_OK || call->rows == 0)
        return status;
    const int64_t sums_bytes = call->width * (int64_t)sizeof(float);
    const norm_split split = split_norm(call->rows, sums_bytes);
    rmsnorm_backward_call with_rows = *call;
    with_rows.rows_a_block = (int32_t)split.rows_a_block;
    status = launch(queue, &rmsnorm_backward[dtype - 1], split.blocks, 1, 32 * split.warps, split.warps * sums_bytes,
                    &with_rows);
    return status != COT_OK
               ? status
               : launch_add_partials(queue, call->partials, split.blocks, call->width, call->width, call->dgain);
}

cot_status device_layernorm_forward(cot_queue *queue, cot_dtype dtype, const layernorm_call *call)
{
    const cot_status status = check_vectors("layernorm_forward", dtype, "width", call->width);
    return status != COT_OK ? status
                            : launch(queue, &layernorm_forward[dtype - 1], cot_ceil_div(call->rows, NORM_WARPS), 1,
                                     32 * NORM_WARPS, 0, call);
}

cot_status device_layernorm_backward(cot_queue *queue, cot_dtype dtype, const layernorm_backward_call *call)
{
    cot_status status = check_norm("layernorm_backward", dtype, call->width, LAYERNORM_MAX_WIDTH);
    if (status != COT_OK || call->rows == 0)
        return status;
    const int64_t width = call->width, sums_bytes = 2 * width * (int64_t)sizeof(float);
    const norm_split split = split_norm(call->rows, sums_bytes);
    layernorm_backward_call with_rows = *call;
    with_rows.rows_a_block = (int32_t)split.rows_a_block;
    status = launch(queue, &layernorm_backward[dtype - 1], split.blocks, 1, 32 * split.warps, split.warps * sums_bytes,
                    &with_rows);
    if (status == COT_OK)
        status = launch_add_partials(queue, call->partials, split.blocks, 2 * width, width, call->dgain);
    if (status == COT_OK)
        status = launch_add_partials(queue, call->partials + width, split.blocks, 2 * width, width, call->dbias);
    return status;
}

/* ---- RoPE and gate ------------------------------------------------------------------------------------ */

cot_status device_rope(cot_queue *queue, cot_dtype dtype, const rope_call *call)
{
    cot_status status = check_vectors("rope", dtype, "size / 2", call->size / 2);
    if (status == COT_OK)
        status = check_vectors("rope", dtype, "row_length", call->row_length);
    return status != COT_OK
               ? status
               : launch_vectors(queue, rope, dtype, cot_mul(cot_mul(call->rows, call->heads), call->size / 2), call);
}

cot_status device_gate_forward(cot_queue *queue, cot_dtype dtype, const gate_call *call)
{
    cot_status status = check_vectors("gate_forward", dtype, "inner", call->inner);
    if (status == COT_OK)
        status = check_vectors("gate_forward", dtype, "a_stride", call->a_stride);
    if (status == COT_OK)
        status = check_vectors("gate_forward", dtype, "b_stride", call->b_stride);
    return status != COT_OK ? status
                            : launch_vectors(queue, gate_forward, dtype, cot_mul(call->rows, call->inner), call);
}

cot_status device_gate_backward(cot_queue *queue, cot_dtype dtype, const gate_backward_call *call)
{
    const int64_t strides[] = {call->a_stride, call->b_stride, call->da_stride, call->db_stride};
    static const char *const names[] = {"a_stride", "b_stride", "da_stride", "db_stride"};
    cot_status status = check_vectors("gate_backward", dtype, "inner", call->inner);
    for (int i = 0; status == COT_OK && i < 4; i++)
        status = check_vectors("gate_backward", dtype, names[i], strides[i]);
    return status != COT_OK ? status
                            : launch_vectors(queue, gate_backward, dtype, cot_mul(call->rows, call->inner), call);
}

/* ---- GELU --------------------------------------------------------------------------------------------- */

cot_status device_gelu_forward(cot_queue *queue, cot_dtype dtype, const gelu_call *call)
{
    const cot_status status = check_vectors("gelu_forward", dtype, "count", call->count);
    return status != COT_OK ? status : launch_vectors(queue, gelu_forward, dtype, call->count, call);
}

cot_status device_gelu_backward(cot_queue *queue, cot_dtype dtype, const gelu_call *call)
{
    const cot_status status = check_vectors("gelu_backward", dtype, "count", call->count);
    return status != COT_OK ? status : launch_vectors(queue, gelu_backward, dtype, call->count, call);
}

/* ---- sums --------------------------------------------------------------------------------------------- */

cot_status device_add(cot_queue *queue, cot_dtype dtype, const add_call *call)
{
    const cot_status status = check_vectors("add", dtype, "count", call->count);
    return status != COT_OK ? status : launch_vectors(queue, add, dtype, call->count, call);
}

cot_status device_spread(cot_queue *queue, cot_dtype dtype, const streams_call *call)
{
    const cot_status status = check_vectors("spread", dtype, "width", call->width);
    return status != COT_OK ? status : launch_vectors(queue, spread, dtype, cot_mul(call->rows, call->width), call);
}

cot_status device_collect(cot_queue *queue, cot_dtype dtype, const streams_call *call)
{
    const cot_status status = check_vectors("collect", dtype, "width", call->width);
    return status != COT_OK ? status : launch_vectors(queue, collect, dtype, cot_mul(call->rows, call->width), call);
}

/* ---- loss and optimiser ------------------------------------------------------------------------------- */

cot_status device_cross_entropy(cot_queue *queue, cot_dtype dtype, const cross_entropy_call *call)
{
    const cot_status status = check_vectors("cross_entropy", dtype, "row_length", call->row_length);
    if (status != COT_OK)
        return status;
    if (call->classes < 1 || call->classes > call->row_length)
        return cot_fail(COT_INVALID_SHAPE, "cross_entropy: classes is %lld, expected 1 to row_length = %lld",
                        (long long)call->classes, (long long)call->row_length);
    return launch(queue, &cross_entropy[dtype - 1], call->rows, 1, LAYER_THREADS, 0, call);
}

cot_status device_mean_loss(cot_queue *queue, const mean_loss_call *call)
{
    return launch(queue, &mean_loss, 1, 1, LAYER_THREADS, 0, call);
}

int64_t gradient_norm_partial_count(int64_t count)
{
    return cot_ceil_div(count, SQUARES_CHUNK);
}

cot_status device_gradient_norm(cot_queue *queue, const gradient_norm_call *call)
{
    cot_status status = check_vectors("gradient_norm", COT_F32, "count", call->count);
    if (status == COT_OK)
        status = launch(queue, &gradient_squares, gradient_norm_partial_count(call->count), 1, LAYER_THREADS, 0, call);
    if (status == COT_OK)
        status = launch(queue, &gradient_norm, 1, 1, LAYER_THREADS, 0, call);
    return status;
}

cot_status device_adamw(cot_queue *queue, cot_dtype dtype, const adamw_call *call)
{
    cot_status status = check_dtype("adamw", dtype);
    if (status == COT_OK)
        status = check_vectors("adamw", COT_F32, "count", call->count);
    if (status == COT_OK && call->decaying != 0)
        status = check_vectors("adamw", COT_F32, "decaying", call->decaying);
    return status != COT_OK ? status
                            : launch(queue, &adamw[dtype - 1], cot_ceil_div(call->count, 4 * LAYER_THREADS), 1,
                                     LAYER_THREADS, 0, call);
}
