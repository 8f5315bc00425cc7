/* SPDX-License-Identifier: Apache-2.0 */
#include "train.h"

#include "cuda/backend_cuda.h"

#include "bigram.h"
#include "checkpoint.h"
#include "hash.h"
#include "op_times.h"
#include "optimizer.h"
#include "pretrained.h"
#include "progress.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    VALIDATIONS = 16,        /* per run, at equal distances */
    VALIDATION_WINDOWS = 64, /* at most, evenly distributed over the held-out text */
    WARMUP_DIVISOR = 20,     /* the warm-up takes 1/20 of the steps */
    WARM_STEPS = 2,          /* of a GPU: the first grows workspaces, the second is captured; they are not timed */
    LAST_DIVISOR = 20        /* the final training loss is a mean over the last 1/20 of the steps */
};

static volatile sig_atomic_t interrupted;

static void interrupt(int signal)
{
    (void)signal;
    interrupted = 1;
}

void train_catch_interrupt(void)
{
    const struct sigaction action = {.sa_handler = interrupt, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
}

/* The held-out windows, the same for every validation: inputs and targets [windows,context]. */
typedef struct held_out {
    int64_t windows;
    int32_t *inputs, *targets;
    int32_t *own_inputs, *own_targets; /* the rows of this rank */
} held_out;

/* The state of a run, apart from its result. */
typedef struct run_state {
    const options *o;
    backend *b;
    backend cpu; /* b points to it, unless the run is on a GPU */
    sampler sampler;
    held_out held_out;
    model_pass pass;
    int32_t *inputs, *targets;         /* [accumulate,batch,context] */
    int32_t *own_inputs, *own_targets; /* the rows of this rank */
    token_batch *batches;              /* [own_batches], the same for the backend */
    context_ranks context;
    progress progress;
    double training_seconds; /* of timed_steps steps */
    int64_t timed_steps;
    run_identity identity;
    FILE *log; /* NULL without --log */
    const ranks *ranks;
    int64_t own_batches; /* of the --accumulate batches of a step: those of this rank, from own_first on */
    int64_t own_first;
    double *gradient_sum; /* [elements of the parameters]; NULL if a step has one batch, or on a GPU */
    /* [accumulate + 1], added over the ranks: the loss of each batch of a step, then the number of ranks that have got
     * SIGINT. On a GPU the first batch of a rank has the loss of all its batches. The sum over the batches does not
     * depend on the number of ranks. */
    double *step_sums;
} run_state;

static bool held_out_create(held_out *h, const token_list *tokens, const context_ranks *share)
{
    const int64_t context = share->length;
    const int64_t available = token_list_windows(tokens, context, 1);
    h->windows = available < VALIDATION_WINDOWS ? available : VALIDATION_WINDOWS;
    h->inputs = calloc((size_t)(h->windows * context), sizeof *h->inputs);
    h->targets = calloc((size_t)(h->windows * context), sizeof *h->targets);
    h->own_inputs = calloc((size_t)(h->windows * share->rows), sizeof *h->own_inputs);
    h->own_targets = calloc((size_t)(h->windows * share->rows), sizeof *h->own_targets);
    if (h->inputs == NULL || h->targets == NULL || h->own_inputs == NULL || h->own_targets == NULL)
        return false;
    for (int64_t i = 0; i < h->windows; i++)
        token_list_window(tokens, context, 1, i * available / h->windows, 0, h->inputs + i * context,
                          h->targets + i * context);
    context_ranks_take(share, h->windows, h->inputs, h->own_inputs);
    context_ranks_take(share, h->windows, h->targets, h->own_targets);
    return true;
}

static bool writes_files(const run_state *run)
{
    return run->ranks->rank == 0;
}

static train_result bad_option(training *t, const char *name)
{
    t->option = name;
    return TRAIN_BAD_OPTION;
}

/* False, with a message, if a token is not in the vocabulary. */
static bool check_tokens(training *t, const options *o, const int32_t *tokens, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] >= o->vocabulary)
            return bad_option(t, "--tokens"),
                   io_fail(&t->error, "data", "token %d, expected less than --vocabulary %lld", tokens[i],
                           (long long)o->vocabulary);
    return true;
}

static bool is_cuda(const options *o)
{
    return strcmp(o->backend, "cuda") == 0;
}

/* Whether the ranks add the gradients of their GPUs. The sum is not a part of the step's CUDA graph. */
static bool sums_on_gpus(const run_state *run)
{
    return is_cuda(run->o) && run->ranks->size > 1;
}

static optimizer_shards shards_of(const run_state *run, cot_group *group)
{
    return run->o->shard_optimizer ? (optimizer_shards){group, run->ranks->rank, run->ranks->size}
                                   : (optimizer_shards){.size = 1};
}

static adamw_options adamw_of(const options *o)
{
    return (adamw_options){.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .weight_decay = o->weight_decay, .clip = o->clip};
}

/* ---- the backend -------------------------------------------------------------------------------------- */

static train_result create_cpu(training *t, run_state *run, cot_queue *queue)
{
    run->b = &run->cpu;
    backend_cpu_create(run->b, queue);
    run->b->context = run->context;
    run->b->adamw = adamw_of(run->o);
    run->b->recompute = run->o->recompute;
    run->b->shards = shards_of(run, run->ranks->group);
    return model_pass_create(&run->pass, &t->model, run->b, run->o->batch * run->context.rows, true)
               ? TRAIN_DONE
               : TRAIN_OUT_OF_MEMORY;
}

/* In f16, gradients are multiplied by the power of two that makes those of the logits at most 1. */
static double loss_scale(const options *o)
{
    double scale = 1;
    while (strcmp(o->dtype, "f16") == 0 && 2 * scale <= (double)(o->batch * o->accumulate * o->context))
        scale *= 2;
    return scale;
}

/* The floating-point operations of a token in a step: 6 for each weight of a product, and those of causal attention. */
static double flops_per_token(const model *m)
{
    double flops = 0;
    int64_t attention = 0;
    for (int i = 0; i < m->parameters.count; i++)
        flops += m->parameters.items[i].decays ? 6 * (double)m->parameters.items[i].count : 0;
    for (int64_t layer = 0; layer < m->config.layers; layer++)
        attention += m->config.attention > 0 && (layer + 1) % m->config.attention == 0;
    return flops + 6 * (double)(attention * m->config.inner * m->config.context);
}

/* The peak of Hopper's tensor cores without sparsity. 0 for other GPUs. */
static double peak_flops(const char *gpu, const char *dtype)
{
    return (strstr(gpu, "H100") == NULL && strstr(gpu, "H200") == NULL) || strcmp(dtype, "f32") == 0 ? 0 : 989e12;
}

/* Plans the memory, prints it, and allocates it. */
static train_result create_cuda(training *t, run_state *run)
{
    const options *o = run->o;
    const int64_t rows = o->batch * run->context.rows, heads = model_heads(&t->model);
    const cuda_options cuda = {.dtype = strcmp(o->dtype, "f32") == 0   ? COT_F32
                                        : strcmp(o->dtype, "f16") == 0 ? COT_F16
                                                                       : COT_BF16,
                               .device = run->ranks->device,
                               .rows = rows,
                               .micro_batches = run->own_batches,
                               .step_batches = o->accumulate,
                               .time = o->context,
                               .head_size = o->attention > 0 ? o->inner / heads : 0,
                               .vocabulary = o->vocabulary,
                               .width = o->width,
                               .block_count = t->model.block_count,
                               .loss_scale = loss_scale(o),
                               .adamw = adamw_of(o)};
    char name[128];
    size_t free_bytes, total_bytes;
    if (backend_cuda_create(&run->b, &cuda) != COT_OK)
        return TRAIN_LIBRARY_ERROR;
    run->b->context = run->context;
    run->b->recompute = o->recompute;
    run->b->shards = shards_of(run, run->ranks->gpu_group);
    backend_cuda_plan_begin(run->b);
    const bool planned = model_pass_create(&run->pass, &t->model, run->b, rows, true);
    model_pass_destroy(&run->pass);
    if (!planned)
        return TRAIN_OUT_OF_MEMORY;
    const double gigabytes = 1e-9 * (double)backend_cuda_bytes(run->b, &t->model.parameters) +
                             1e-9 * ranks_sum_bytes(run->ranks, t->model.parameters.elements);
    backend_cuda_describe(run->b, name, sizeof name, &free_bytes, &total_bytes);
    const double others = 1e-9 * (double)(total_bytes - free_bytes) - 1e-9 * (double)backend_cuda_bytes_now(run->b);
    if (writes_files(run)) {
        printf(run->ranks->size > 1 ? "%d GPUs, each: " : "GPU: ", run->ranks->size);
        printf("%s, %s; %.2f GB for the model, %.2f of its %.0f GB in use then, and the workspace of the ops\n", name,
               o->dtype, gigabytes, gigabytes + (others > 0 ? others : 0), 1e-9 * (double)total_bytes);
        fflush(stdout);
    }
    run->progress.gigabytes = gigabytes;
    run->progress.flops = flops_per_token(&t->model);
    run->progress.peak_flops = run->ranks->size * peak_flops(name, o->dtype);
    if (backend_cuda_plan_end(run->b) != COT_OK || backend_cuda_bind(run->b, &t->model.parameters) != COT_OK)
        return TRAIN_LIBRARY_ERROR;
    return model_pass_create(&run->pass, &t->model, run->b, rows, true) ? TRAIN_DONE : TRAIN_OUT_OF_MEMORY;
}

/* Checks that the options with files of transformers have a model that it has too. */
static bool check_pretrained(training *t, const options *o, const model_config *config)
{
    const char *const names[] = {"--export", "--import", "--gradients"}, *const files[] = {o->export, o->import,
                                                                                           o->gradients};
    for (int i = 0; i < 3; i++)
        if (files[i] != NULL && !pretrained_supports(config))
            return bad_option(t, names[i]),
                   io_fail(&t->error, files[i], "is of GPT-2 or Llama: --arch gpt2, or --attention 1 --mlp N");
    return true;
}

/* Checks that --context-ranks can divide the sequences of this model. */
static bool check_context_ranks(training *t, const options *o)
{
    const char *what = o->dropout > 0 ? "--dropout 0: a mask is drawn for whole sequences"
                       : o->dense > 0 ? "--dense 0: the dense convolution reads whole sequences"
                                      : NULL;
    char number[24];
    if (o->context_ranks == 1 || what == NULL)
        return true;
    bad_option(t, "--context-ranks");
    snprintf(number, sizeof number, "%lld", (long long)o->context_ranks);
    return io_fail(&t->error, number, "needs %s", what);
}

/* ---- the run ------------------------------------------------------------------------------------------ */

static train_result create_run(training *t, run_state *run, const corpus *text, cot_queue *queue)
{
    const options *o = run->o;
    const model_config config = {.vocabulary = o->vocabulary,
                                 .width = o->width,
                                 .inner = o->inner,
                                 .layers = o->layers,
                                 .kernel = o->kernel,
                                 .streams = o->streams,
                                 .attention = o->attention,
                                 .dense = o->dense,
                                 .context = o->context,
                                 .mlp = o->mlp,
                                 .gpt2 = o->gpt2 != 0,
                                 .heads = o->heads,
                                 .kv_heads = o->kv_heads};
    const int64_t sequences = o->batch * o->accumulate;
    const uint64_t seed = (uint64_t)o->seed;
    run->inputs = calloc((size_t)(sequences * o->context), sizeof *run->inputs);
    run->targets = calloc((size_t)(sequences * o->context), sizeof *run->targets);
    const size_t own_tokens = (size_t)(run->own_batches * o->batch * run->context.rows);
    run->own_inputs = calloc(own_tokens, sizeof *run->own_inputs);
    run->own_targets = calloc(own_tokens, sizeof *run->own_targets);
    run->batches = calloc((size_t)run->own_batches, sizeof *run->batches);
    run->step_sums = calloc((size_t)o->accumulate + 1, sizeof *run->step_sums);
    t->curve.points = calloc((size_t)o->steps, sizeof *t->curve.points);
    if (run->inputs == NULL || run->targets == NULL || run->own_inputs == NULL || run->own_targets == NULL ||
        run->batches == NULL || run->step_sums == NULL || t->curve.points == NULL ||
        !sampler_create(&run->sampler, &text->training_tokens, o->context, seed) ||
        !held_out_create(&run->held_out, &text->validation_tokens, &run->context))
        return TRAIN_OUT_OF_MEMORY;
    if (!check_context_ranks(t, o))
        return TRAIN_BAD_OPTION;
    const int64_t count = run->held_out.windows * o->context;
    if (!check_tokens(t, o, run->held_out.inputs, count) || !check_tokens(t, o, run->held_out.targets, count))
        return TRAIN_BAD_OPTION;
    if (!check_pretrained(t, o, &config))
        return TRAIN_BAD_OPTION;
    if (!model_create(&t->model, config, seed))
        return TRAIN_OUT_OF_MEMORY;
    if (o->import != NULL && !pretrained_read(&t->model, o->import, &t->error))
        return bad_option(t, "--import");
    if (is_cuda(o))
        return create_cuda(t, run);
    const bool sums = o->accumulate > 1 || run->ranks->size > 1;
    if (sums)
        run->gradient_sum = calloc((size_t)t->model.parameters.elements, sizeof *run->gradient_sum);
    return sums && run->gradient_sum == NULL ? TRAIN_OUT_OF_MEMORY : create_cpu(t, run, queue);
}

static void destroy_run(run_state *run)
{
    sampler_destroy(&run->sampler);
    free(run->held_out.inputs);
    free(run->held_out.targets);
    free(run->held_out.own_inputs);
    free(run->held_out.own_targets);
    model_pass_destroy(&run->pass);
    if (run->b == &run->cpu)
        backend_cpu_destroy(run->b);
    else
        backend_cuda_destroy(run->b);
    free(run->inputs);
    free(run->targets);
    free(run->own_inputs);
    free(run->own_targets);
    free(run->batches);
    free(run->step_sums);
    free(run->gradient_sum);
    if (run->log != NULL)
        fclose(run->log);
}

static void fit_bigram(training *t, const run_state *run, const corpus *text)
{
    static bigram_model bigram; /* 0.5 MB: too large for a stack */
    t->validation_bytes = run->held_out.windows * run->o->context;
    t->curve.bigram = NAN;
    if (text->token_files != NULL || !writes_files(run))
        return;
    bigram_fit(&bigram, text->training.bytes, text->training.count);
    t->curve.bigram = bigram_loss(&bigram, run->held_out.inputs, run->held_out.targets, t->validation_bytes);
}

/* The mean loss over the held-out windows. With context parallelism each rank has the loss of its own rows. Every group of
 * ranks validates on the same windows, so the mean over all ranks is the loss. */
static cot_status validate(const training *t, run_state *run, double *loss)
{
    backend *b = run->b;
    const int64_t time = run->context.rows;
    double sum = 0;
    run->pass.dropout = (model_dropout){0};
    for (int64_t done = 0; done < run->held_out.windows; done += run->o->batch) {
        const int64_t left = run->held_out.windows - done, batch = left < run->o->batch ? left : run->o->batch;
        token_batch tokens;
        double batch_loss = 0;
        b->op->load(b, batch * time, 1, run->held_out.own_inputs + done * time, run->held_out.own_targets + done * time,
                    &tokens);
        b->op->begin(b);
        cot_status status = model_forward(&t->model, &run->pass, batch, time, tokens.inputs);
        if (status == COT_OK)
            status = model_loss(&t->model, &run->pass, batch * time, tokens.targets);
        if (status == COT_OK)
            status = b->op->read_loss(b, &batch_loss);
        if (status != COT_OK)
            return status;
        sum += (double)batch * batch_loss;
    }
    const cot_status status = run->context.size > 1 ? ranks_sum(run->ranks, &sum, 1) : COT_OK;
    *loss = sum / (double)(run->held_out.windows * (run->context.size > 1 ? run->ranks->size : 1));
    return status;
}

typedef struct step_context {
    training *t;
    run_state *run;
} step_context;

/* Adds the gradients of batch number i of this rank to the sum: in f64, so that the result does not depend on the number of
 * ranks, unless the sum lies within 2^-53 of the middle between two floats. */
static void add_gradients(const parameter_table *table, double *sum, int64_t i)
{
#pragma omp parallel for schedule(static)
    for (int64_t j = 0; j < table->elements; j++)
        sum[j] = i == 0 ? (double)table->gradients[j] : sum[j] + (double)table->gradients[j];
}

/* The gradients become the sums over the batches of all ranks. */
static cot_status sum_over_ranks(const run_state *run, const parameter_table *table)
{
    const cot_status status = ranks_sum(run->ranks, run->gradient_sum, table->elements);
#pragma omp parallel for schedule(static)
    for (int64_t j = 0; j < table->elements; j++)
        table->gradients[j] = (real)run->gradient_sum[j];
    return status;
}

/* The work of a step: forward and backward of each micro-batch, then the update. On a GPU it is one CUDA graph, so that it
 * reads nothing of the host that changes from step to step: backend_operations.load has copied that. */
static cot_status enqueue_step(void *context)
{
    const step_context *c = context;
    run_state *run = c->run;
    backend *b = run->b;
    model *m = &c->t->model;
    const options *o = run->o;
    const bool offset_in_memory = b->step_offset.data != NULL; /* of dropout: load has counted the steps */
    const int64_t first = (offset_in_memory ? 0 : b->step * o->accumulate) + run->own_first;
    cot_status status = COT_OK;
    b->op->begin(b);
    for (int64_t i = 0; i < run->own_batches && status == COT_OK; i++) {
        const token_batch *tokens = &run->batches[i];
        b->accumulate = b->always_accumulates || (i > 0 && run->gradient_sum == NULL);
        run->pass.dropout = (model_dropout){.p = o->dropout, .seed = (uint64_t)o->seed, .step = (uint64_t)(first + i)};
        status = model_forward(m, &run->pass, o->batch, run->context.rows, tokens->inputs);
        if (status == COT_OK)
            status = model_backward(m, &run->pass, o->batch, run->context.rows, o->accumulate * o->batch * o->context,
                                    tokens->inputs, tokens->targets);
        if (status == COT_OK && run->gradient_sum != NULL)
            add_gradients(&m->parameters, run->gradient_sum, i);
        if (!is_cuda(o)) {
            run->step_sums[run->own_first + i] = b->loss;
            b->loss = 0;
        }
    }
    if (status == COT_OK && run->gradient_sum != NULL)
        status = sum_over_ranks(run, &m->parameters);
    if (status == COT_OK && !sums_on_gpus(run))
        b->op->update(b, &m->parameters);
    return status != COT_OK ? status : b->status;
}

/* Adds the gradients of all GPUs, and updates the parameters of each in the same way. */
static cot_status update_on_gpus(training *t, run_state *run)
{
    backend *b = run->b;
    const cot_tensor gradients = backend_cuda_gradients(b);
    const cot_status status = ranks_sum_tensor(run->ranks, b->queue, &gradients);
    if (status == COT_OK)
        b->op->update(b, &t->model.parameters);
    return status != COT_OK ? status : b->status;
}

/* Runs one step on the tokens of run->inputs. Steps count from 1. *stops: a rank has got SIGINT. */
static cot_status train_step(training *t, run_state *run, int64_t step, double *loss, bool *stops)
{
    const options *o = run->o;
    backend *b = run->b;
    step_context context = {t, run};
    const double start = progress_now();
    b->step = step;
    b->step_rate = learning_rate(o->rate, step, o->steps / WARMUP_DIVISOR, o->steps);
    const int64_t sequences = run->own_batches * o->batch, own = run->own_first * o->batch * o->context;
    double unread_loss = 0; /* on a CPU 0: enqueue_step has read the loss of each batch */
    memset(run->step_sums, 0, (size_t)o->accumulate * sizeof *run->step_sums);
    context_ranks_take(&run->context, sequences, run->inputs + own, run->own_inputs);
    context_ranks_take(&run->context, sequences, run->targets + own, run->own_targets);
    b->op->load(b, o->batch * run->context.rows, run->own_batches, run->own_inputs, run->own_targets, run->batches);
    cot_status status = b->op->run(b, enqueue_step, &context);
    if (status == COT_OK && sums_on_gpus(run))
        status = update_on_gpus(t, run);
    if (status == COT_OK)
        status = b->op->read_loss(b, &unread_loss);
    run->step_sums[run->own_first] += unread_loss;
    run->step_sums[o->accumulate] = interrupted;
    if (status == COT_OK)
        status = ranks_sum(run->ranks, run->step_sums, o->accumulate + 1);
    if (status != COT_OK)
        return status;
    *loss = 0;
    for (int64_t i = 0; i < o->accumulate; i++)
        *loss += run->step_sums[i];
    *stops = run->step_sums[o->accumulate] > 0;
    if (!is_cuda(o) || step > run->progress.resumed_at + WARM_STEPS) {
        run->training_seconds += progress_now() - start;
        run->timed_steps++;
    }
    return COT_OK;
}

/* The tokens of train_step. */
static bool check_batch(training *t, const run_state *run)
{
    const int64_t count = run->o->batch * run->o->accumulate * run->o->context;
    return check_tokens(t, run->o, run->inputs, count) && check_tokens(t, run->o, run->targets, count);
}

static bool is_validation_step(int64_t step, int64_t steps)
{
    return step == 1 || step * VALIDATIONS / steps != (step - 1) * VALIDATIONS / steps;
}

/* Resumes from the checkpoint if --resume is given and the file exists. */
static train_result resume(training *t, run_state *run)
{
    const options *o = run->o;
    if (o->checkpoint == NULL)
        return TRAIN_DONE;
    if (access(o->checkpoint, F_OK) != 0) /* one rank tries to write: of two at the same time, one fails */
        return !writes_files(run) || io_can_write(o->checkpoint, &t->error) ? TRAIN_DONE : TRAIN_BAD_CHECKPOINT;
    if (!o->resume) {
        io_fail(&t->error, o->checkpoint, "is there: --resume goes on from it; to begin anew, remove it");
        return TRAIN_BAD_CHECKPOINT;
    }
    if (!checkpoint_read(o->checkpoint, &run->identity, &t->model.parameters, o->steps, &t->curve, &t->error))
        return TRAIN_BAD_CHECKPOINT;
    for (int64_t i = 0; i < t->curve.count; i++) {
        const curve_point *point = &t->curve.points[i];
        progress_recall(&run->progress, point->step, point->train);
        if (!isnan(point->validation))
            t->validation = point->validation;
    }
    progress_resumed(&run->progress);
    run->b->op->upload(run->b, &t->model.parameters);
    return run->b->status == COT_OK ? TRAIN_DONE : TRAIN_LIBRARY_ERROR;
}

/* `last`: the last step, or the one that SIGINT made the last. */
static bool is_checkpoint_step(const options *o, int64_t step, bool last)
{
    return o->checkpoint != NULL && (step % o->every == 0 || last);
}

static bool open_log(training *t, run_state *run)
{
    const options *o = run->o;
    if (o->log == NULL || !writes_files(run))
        return true;
    run->log = fopen(o->log, o->resume ? "a" : "w");
    return run->log != NULL || io_fail(&t->error, o->log, "cannot be written: %s", strerror(errno));
}

/* One line per step. A log on a full disk is not worth the run: a failure to write is ignored. */
static void log_step(const run_state *run, const curve_point *point)
{
    const options *o = run->o;
    char validation[40] = "";
    if (run->log == NULL)
        return;
    if (!isnan(point->validation))
        snprintf(validation, sizeof validation, ", \"validation\": %.9g", point->validation);
    fprintf(run->log, "{\"step\": %lld, \"loss\": %.9g%s, \"rate\": %.6g, \"tokens\": %lld, \"seconds\": %.3f}\n",
            (long long)point->step, point->train, validation, run->b->step_rate,
            (long long)(point->step * o->batch * o->accumulate * o->context), progress_now() - run->progress.start);
    fflush(run->log);
}

/* The ranks that share the optimiser do it together. */
static void download(training *t, run_state *run)
{
    if (writes_files(run) || run->b->shards.size > 1)
        run->b->op->download(run->b, &t->model.parameters);
}

/* After the last step, before a validation, which sets the gradients of a GPU to 0. */
static train_result write_gradients(training *t, run_state *run)
{
    const options *o = run->o;
    download(t, run);
    if (run->b->status != COT_OK)
        return TRAIN_LIBRARY_ERROR;
    if (!writes_files(run))
        return TRAIN_DONE;
    return pretrained_write_gradients(&t->model, run->inputs, run->targets, o->accumulate * o->batch, o->context,
                                      o->gradients, &t->error)
               ? TRAIN_DONE
               : bad_option(t, "--gradients");
}

static train_result run_steps(training *t, run_state *run)
{
    const int64_t steps = run->o->steps;
    for (int64_t step = t->curve.count + 1; step <= steps && !t->stopped; step++) {
        curve_point *point = &t->curve.points[t->curve.count++];
        *point = (curve_point){.step = step, .validation = NAN};
        sampler_batch(&run->sampler, step - 1, run->o->batch * run->o->accumulate, run->inputs, run->targets);
        if (!check_batch(t, run))
            return TRAIN_BAD_OPTION;
        bool stops;
        if (train_step(t, run, step, &point->train, &stops) != COT_OK)
            return TRAIN_LIBRARY_ERROR;
        if (!isfinite(point->train))
            return TRAIN_DIVERGED;
        if (run->o->gradients != NULL && step == steps) {
            const train_result written = write_gradients(t, run);
            if (written != TRAIN_DONE)
                return written;
        }
        progress_step(&run->progress, step, point->train);
        if (is_validation_step(step, steps)) {
            const double start = progress_now();
            if (validate(t, run, &point->validation) != COT_OK)
                return TRAIN_LIBRARY_ERROR;
            run->progress.start += progress_now() - start; /* tokens/s are those of training */
            progress_validation(&run->progress, step, run->progress.loss, point->validation);
            t->validation = point->validation;
        }
        log_step(run, point);
        t->stopped = stops && step < steps;
        const bool saves = is_checkpoint_step(run->o, step, t->stopped || step == steps);
        if (saves)
            download(t, run);
        if (run->b->status != COT_OK)
            return TRAIN_LIBRARY_ERROR;
        if (saves && writes_files(run) &&
            !checkpoint_write(run->o->checkpoint, &run->identity, &t->model.parameters, &t->curve, &t->error))
            return TRAIN_NO_CHECKPOINT;
    }
    return isfinite(t->validation) ? TRAIN_DONE : TRAIN_DIVERGED;
}

static double final_training_loss(const loss_curve *curve)
{
    const int64_t count = curve->count / LAST_DIVISOR + 1;
    double sum = 0;
    for (int64_t i = curve->count - count; i < curve->count; i++)
        sum += curve->points[i].train;
    return sum / (double)count;
}

/* Whether all ranks have the same parameters. One rank computes no hash. */
static cot_status compare_parameters(const training *t, const ranks *r, const char *what)
{
    return r->size == 1 ? COT_OK : ranks_agree(r, parameter_table_hash(&t->model.parameters), what);
}

/* Before the first step, the ranks must have the same options, text, parameters and step. */
static cot_status compare_ranks(const training *t, const run_state *run)
{
    uint64_t hash = hash_bytes(HASH_START, &t->curve.count, sizeof t->curve.count);
    for (int i = 0; run->identity.pairs[i] != NULL; i++)
        hash = hash_bytes(hash, run->identity.pairs[i], strlen(run->identity.pairs[i]));
    const cot_status status = ranks_agree(run->ranks, hash, "options, another text or another checkpoint");
    return status != COT_OK ? status : compare_parameters(t, run->ranks, "initial parameters");
}

train_result train(training *t, const corpus *text, const options *o, const ranks *r, cot_queue *queue)
{
    run_state run = {.o = o,
                     .ranks = r,
                     .context = context_ranks_of(r->context_group, o->context),
                     .own_batches = o->accumulate * r->context_size / r->size};
    run.own_first = r->rank / r->context_size * run.own_batches;
    *t = (training){0};
    train_result result = create_run(t, &run, text, queue);
    if (result == TRAIN_DONE) {
        fit_bigram(t, &run, text);
        progress_start(&run.progress, o->steps, o->accumulate * o->batch * o->context, o->quiet || !writes_files(&run));
        run_identity_make(&run.identity, o, text);
        result = resume(t, &run);
        if (result == TRAIN_DONE && compare_ranks(t, &run) != COT_OK)
            result = TRAIN_LIBRARY_ERROR;
        if (result == TRAIN_DONE && !open_log(t, &run))
            result = bad_option(t, "--log");
        op_times_start();
        if (result == TRAIN_DONE)
            result = run_steps(t, &run);
        op_times_stop();
        progress_end(&run.progress);
    }
    if (result == TRAIN_DONE) {
        run.b->op->download(run.b, &t->model.parameters);
        result = run.b->status == COT_OK ? TRAIN_DONE : TRAIN_LIBRARY_ERROR;
    }
    if (result == TRAIN_DONE) {
        const int64_t tokens = run.timed_steps * o->accumulate * o->batch * o->context;
        parameter_table_use_host(&t->model.parameters); /* sampling is on the CPU */
        if (compare_parameters(t, r, "parameters after the last step") != COT_OK)
            result = TRAIN_LIBRARY_ERROR;
        t->train = final_training_loss(&t->curve);
        t->tokens_per_second = tokens > 0 ? (double)tokens / run.training_seconds : 0;
    }
    destroy_run(&run);
    return result;
}

void training_destroy(training *t)
{
    model_destroy(&t->model);
    free(t->curve.points);
    *t = (training){0};
}
