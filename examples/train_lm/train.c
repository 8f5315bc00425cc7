/* SPDX-License-Identifier: Apache-2.0 */
#include "train.h"

#include "bigram.h"
#include "checkpoint.h"
#include "op_times.h"
#include "optimizer.h"
#include "progress.h"

#include <stdlib.h>
#include <unistd.h>

enum {
    VALIDATIONS = 16,        /* per run, at equal distances */
    VALIDATION_WINDOWS = 64, /* at most, evenly distributed over the held-out text */
    WARMUP_DIVISOR = 20,     /* the warm-up takes 1/20 of the steps */
    LAST_DIVISOR = 20        /* the final training loss is a mean over the last 1/20 of the steps */
};

/* The held-out windows, the same for every validation: inputs and targets [windows,context]. */
typedef struct held_out {
    int64_t windows;
    uint8_t *inputs, *targets;
} held_out;

/* The state of a run, apart from its result. */
typedef struct run_state {
    const options *o;
    cot_queue *queue;
    sampler sampler;
    held_out held_out;
    model_pass pass;
    uint8_t *inputs, *targets; /* [batch,context] */
    double *partial;
    progress progress;
    double training_seconds;
    run_identity identity;
} run_state;

static bool held_out_create(held_out *h, const byte_string *text, int64_t context)
{
    const int64_t available = (text->count - 1) / context;
    h->windows = available < VALIDATION_WINDOWS ? available : VALIDATION_WINDOWS;
    h->inputs = malloc((size_t)(h->windows * context));
    h->targets = malloc((size_t)(h->windows * context));
    if (h->inputs == NULL || h->targets == NULL)
        return false;
    for (int64_t i = 0; i < h->windows; i++) {
        const uint8_t *window = text->bytes + i * available / h->windows * context;
        memcpy(h->inputs + i * context, window, (size_t)context);
        memcpy(h->targets + i * context, window + 1, (size_t)context);
    }
    return true;
}

static bool create_run(training *t, run_state *run, const corpus *text)
{
    const options *o = run->o;
    const model_config config = {.vocabulary = BYTE_VALUES,
                                 .width = o->width,
                                 .inner = o->inner,
                                 .layers = o->layers,
                                 .kernel = o->kernel,
                                 .streams = o->streams,
                                 .attention = o->attention,
                                 .dense = o->dense,
                                 .context = o->context};
    const uint64_t seed = (uint64_t)o->seed;
    run->inputs = malloc((size_t)(o->batch * o->context));
    run->targets = malloc((size_t)(o->batch * o->context));
    t->curve.points = calloc((size_t)o->steps, sizeof *t->curve.points);
    if (run->inputs == NULL || run->targets == NULL || t->curve.points == NULL ||
        !sampler_create(&run->sampler, &text->training, o->context, seed) ||
        !held_out_create(&run->held_out, &text->validation, o->context) || !model_create(&t->model, config, seed) ||
        !model_pass_create(&run->pass, &t->model, o->batch * o->context, true))
        return false;
    run->partial = calloc((size_t)gradient_norm_partials(&t->model.parameters), sizeof(double));
    return run->partial != NULL;
}

static void destroy_run(run_state *run)
{
    sampler_destroy(&run->sampler);
    free(run->held_out.inputs);
    free(run->held_out.targets);
    model_pass_destroy(&run->pass);
    free(run->inputs);
    free(run->targets);
    free(run->partial);
}

static void fit_bigram(training *t, const run_state *run, const corpus *text)
{
    static bigram_model bigram; /* 0.5 MB: too large for a stack */
    bigram_fit(&bigram, text->training.bytes, text->training.count);
    t->validation_bytes = run->held_out.windows * run->o->context;
    t->curve.bigram = bigram_loss(&bigram, run->held_out.inputs, run->held_out.targets, t->validation_bytes);
}

/* The mean loss over the held-out windows. */
static cot_status validate(const training *t, run_state *run, double *loss)
{
    const int64_t context = run->o->context;
    double sum = 0;
    run->pass.dropout = (model_dropout){0};
    for (int64_t done = 0; done < run->held_out.windows; done += run->o->batch) {
        const int64_t left = run->held_out.windows - done, batch = left < run->o->batch ? left : run->o->batch;
        const cot_status status =
            model_forward(&t->model, &run->pass, run->queue, batch, context, run->held_out.inputs + done * context);
        if (status != COT_OK)
            return status;
        sum +=
            (double)batch * model_loss(&t->model, &run->pass, batch * context, run->held_out.targets + done * context);
    }
    *loss = sum / (double)run->held_out.windows;
    return COT_OK;
}

/* Runs one step. Steps count from 1. */
static cot_status train_step(training *t, run_state *run, int64_t step, double *loss)
{
    const options *o = run->o;
    const adamw_options adamw = {
        .beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .weight_decay = o->weight_decay, .clip = o->clip};
    const double start = progress_now();
    sampler_batch(&run->sampler, step - 1, o->batch, run->inputs, run->targets);
    run->pass.dropout = (model_dropout){.p = o->dropout, .seed = (uint64_t)o->seed, .step = (uint64_t)step};
    cot_status status = model_forward(&t->model, &run->pass, run->queue, o->batch, o->context, run->inputs);
    if (status == COT_OK)
        status =
            model_backward(&t->model, &run->pass, run->queue, o->batch, o->context, run->inputs, run->targets, loss);
    if (status != COT_OK)
        return status;
    const double norm = gradient_norm(&t->model.parameters, run->partial);
    adamw_step(&t->model.parameters, &adamw, norm, learning_rate(o->rate, step, o->steps / WARMUP_DIVISOR, o->steps),
               step);
    run->training_seconds += progress_now() - start;
    return COT_OK;
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
    if (access(o->checkpoint, F_OK) != 0)
        return io_can_write(o->checkpoint, &t->error) ? TRAIN_DONE : TRAIN_BAD_CHECKPOINT;
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
    return TRAIN_DONE;
}

static bool is_checkpoint_step(const options *o, int64_t step)
{
    return o->checkpoint != NULL && (step % o->every == 0 || step == o->steps);
}

static train_result run_steps(training *t, run_state *run)
{
    const int64_t steps = run->o->steps;
    for (int64_t step = t->curve.count + 1; step <= steps; step++) {
        curve_point *point = &t->curve.points[t->curve.count++];
        *point = (curve_point){.step = step, .validation = NAN};
        if (train_step(t, run, step, &point->train) != COT_OK)
            return TRAIN_LIBRARY_ERROR;
        if (!isfinite(point->train))
            return TRAIN_DIVERGED;
        progress_step(&run->progress, step, point->train);
        if (is_validation_step(step, steps)) {
            if (validate(t, run, &point->validation) != COT_OK)
                return TRAIN_LIBRARY_ERROR;
            progress_validation(&run->progress, step, run->progress.loss, point->validation);
            t->validation = point->validation;
        }
        if (is_checkpoint_step(run->o, step) &&
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

train_result train(training *t, const corpus *text, const options *o, cot_queue *queue)
{
    run_state run = {.o = o, .queue = queue};
    *t = (training){0};
    train_result result = TRAIN_OUT_OF_MEMORY;
    if (create_run(t, &run, text)) {
        fit_bigram(t, &run, text);
        progress_start(&run.progress, o->steps, o->batch * o->context, o->quiet);
        run_identity_make(&run.identity, o, text);
        result = resume(t, &run);
        op_times_start();
        if (result == TRAIN_DONE)
            result = run_steps(t, &run);
        op_times_stop();
        progress_end(&run.progress);
    }
    if (result == TRAIN_DONE) {
        const int64_t tokens = (t->curve.count - run.progress.resumed_at) * o->batch * o->context;
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
