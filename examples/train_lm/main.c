/* SPDX-License-Identifier: Apache-2.0
 *
 * train_lm: trains a byte-level language model on text files. It uses only the public interface of the library. */
#include "cuda/backend_cuda.h"

#include "matrix.h"
#include "op_times.h"
#include "options.h"
#include "pretrained.h"
#include "runs.h"
#include "sample.h"
#include "sample_text.h"
#include "train.h"

#include <errno.h>
#include <omp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { EXIT_INTERRUPTED = 130 };

static const double LN2 = 0.69314718055994530942;

/* Prints one line on stderr and returns the exit status. */
__attribute__((format(printf, 2, 3))) static int fail(int status, const char *format, ...)
{
    va_list arguments;
    fputs("train_lm: ", stderr);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    return status;
}

static const char *unit_of(const options *o)
{
    return o->tokens ? "token" : "byte";
}

static int load_text(corpus *text, const options *o)
{
    const char *option = o->tokens ? "--tokens" : "--text", *unit = unit_of(o);
    bool good = true;
    for (int i = 0; good && i < o->text_count; i++)
        good = o->tokens ? corpus_add_tokens(text, o->texts[i]) : corpus_add_file(text, o->texts[i]);
    if (o->text_count == 0)
        good = corpus_add_default(text, o->source_dir);
    if (good && o->validation != NULL)
        good = corpus_add_validation(text, o->validation);
    good = good && corpus_finish(text);
    if (!good)
        return fail(text->out_of_memory ? EXIT_FAILURE : EXIT_BAD_INPUT, "%s: %s", option, text->error);
    const int64_t sequences = o->batch * o->accumulate, needed = sampler_tokens_needed(sequences, o->context),
                  count = corpus_count(&text->training_tokens);
    if (count < needed || token_list_windows(&text->training_tokens, o->context, o->context) < sequences)
        return fail(EXIT_BAD_INPUT,
                    "%s: %lld %ss to train on, one batch of --batch %lld --context %lld needs %lld in one file", option,
                    (long long)count, unit, (long long)o->batch, (long long)o->context, (long long)needed);
    if (token_list_windows(&text->validation_tokens, o->context, 1) == 0)
        return fail(EXIT_BAD_INPUT, "%s: %lld %ss to validate on, --context %lld needs %lld in one file", option,
                    (long long)corpus_count(&text->validation_tokens), unit, (long long)o->context,
                    (long long)o->context + 1);
    return EXIT_SUCCESS;
}

static int make_folder(const char *option, const char *folder)
{
    struct stat information;
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return fail(EXIT_BAD_INPUT, "%s %s: %s", option, folder, strerror(errno));
    if (stat(folder, &information) != 0 || !S_ISDIR(information.st_mode))
        return fail(EXIT_BAD_INPUT, "%s %s: not a folder", option, folder);
    if (access(folder, W_OK | X_OK) != 0)
        return fail(EXIT_BAD_INPUT, "%s %s: %s", option, folder, strerror(errno));
    return EXIT_SUCCESS;
}

static void print_start(const corpus *text, const options *o, const cot_queue *queue)
{
    printf("%s: %lld files, %lld %ss to train on, %lld held out\n", o->tokens ? "tokens" : "text",
           (long long)text->files, (long long)corpus_count(&text->training_tokens), unit_of(o),
           (long long)corpus_count(&text->validation_tokens));
    printf(
        "model: width %lld, inner %lld, %lld blocks, %lld of them with attention, kernel %lld, %lld stream%s, dense kernel %lld; %lld steps of %lld x %lld %ss, %d threads\n",
        (long long)o->width, (long long)o->inner, (long long)o->layers,
        (long long)(o->attention > 0 ? o->layers / o->attention : 0), (long long)o->kernel,
        (long long)(o->streams > 0 ? o->streams : 1), o->streams > 1 ? "s" : "", (long long)o->dense,
        (long long)o->steps, (long long)(o->batch * o->accumulate), (long long)o->context, unit_of(o),
        (int)cot_queue_threads(queue));
    fflush(stdout);
}

static void print_loss(const char *name, double loss, const char *unit)
{
    printf("%-18s %.9g nats/%s = %.4f bits/%s\n", name, loss, unit, loss / LN2, unit);
}

static int64_t count_parameters(const training *t)
{
    int64_t count = 0;
    for (int i = 0; i < t->model.parameters.count; i++)
        count += t->model.parameters.items[i].count;
    return count;
}

static void print_results(const training *t, const options *o)
{
    const char *unit = unit_of(o);
    printf("\n%lld parameters, %.0f tokens/s in training\n", (long long)count_parameters(t), t->tokens_per_second);
    print_loss("training loss", t->train, unit);
    print_loss("validation loss", t->validation, unit);
    if (!o->tokens) {
        print_loss("byte-bigram model", t->curve.bigram, unit);
        printf("(the last two over the same %lld held-out bytes)\n", (long long)t->validation_bytes);
    }
    printf("hash of the parameters: %016llx\n", (unsigned long long)parameter_table_hash(&t->model.parameters));
}

static int print_sample(const training *t, const sample_text *text, const options *o, cot_queue *queue)
{
    const token_ids *prompt = &text->prompt;
    const int64_t count = (int64_t)prompt->count;
    if (o->sample == 0)
        return EXIT_SUCCESS;
    int32_t *all = calloc(prompt->count + (size_t)o->sample, sizeof *all);
    const sample_options sample = {.prompt = prompt->ids,
                                   .prompt_count = count,
                                   .count = o->sample,
                                   .classes = text->classes,
                                   .temperature = o->temperature,
                                   .seed = (uint64_t)o->seed};
    backend cpu;
    backend_cpu_create(&cpu, queue);
    cot_status status = all == NULL ? COT_OUT_OF_MEMORY : sample_generate(&t->model, &cpu, &sample, all + count);
    if (status == COT_OK) {
        if (count > 0)
            memcpy(all, prompt->ids, prompt->count * sizeof *all);
        printf("\nsample, temperature %g:\n", o->temperature);
        sample_text_print(text, o, all, count + o->sample);
        putchar('\n');
    }
    free(all);
    const char *reason = cot_error_message(); /* empty if the library did not fail */
    return status == COT_OK ? EXIT_SUCCESS
                            : fail(EXIT_FAILURE, "sampling: %s", reason[0] != '\0' ? reason : "out of memory");
}

static int write_curve(const training *t, const options *o)
{
    io_error error;
    if (!plot_write_csv(&t->curve, o->out, &error))
        return fail(EXIT_FAILURE, "%s", error.text);
    switch (plot_write_svg(&t->curve, o->out, &error)) {
    case PLOT_DONE: printf("\nloss curve: %s/loss.svg (numbers: %s/loss.csv)\n", o->out, o->out); return EXIT_SUCCESS;
    case PLOT_NO_GNUPLOT:
        printf("\nloss curve: %s/loss.csv (gnuplot is not installed: no loss.svg)\n", o->out);
        return EXIT_SUCCESS;
    default: return fail(EXIT_FAILURE, "%s", error.text);
    }
}

static int export_model(const training *t, const options *o)
{
    io_error error;
    if (!pretrained_write(&t->model, o->export, &error))
        return fail(EXIT_FAILURE, "--export %s", error.text);
    printf("model for transformers: %s/config.json, %s/model.safetensors\n", o->export, o->export);
    return EXIT_SUCCESS;
}

static int report(const training *t, const sample_text *text, const options *o, cot_queue *queue)
{
    print_results(t, o);
    int status = t->stopped ? EXIT_SUCCESS : print_sample(t, text, o, queue);
    if (status == EXIT_SUCCESS)
        status = write_curve(t, o);
    if (status == EXIT_SUCCESS && o->export != NULL)
        status = export_model(t, o);
    if (status == EXIT_SUCCESS && !o->quiet && strcmp(o->backend, "cpu") == 0) /* a GPU runs the calls later */
        op_times_print();
    if (status != EXIT_SUCCESS || !t->stopped)
        return status;
    return fail(EXIT_INTERRUPTED, "stopped by SIGINT after step %lld of %lld%s%s", (long long)t->curve.count,
                (long long)o->steps, o->checkpoint != NULL ? ": --resume goes on from " : "",
                o->checkpoint != NULL ? o->checkpoint : "");
}

/* Prints why a run ended early. Returns the exit status. */
static int report_failure(const training *t, train_result result)
{
    switch (result) {
    case TRAIN_DONE: break;
    case TRAIN_OUT_OF_MEMORY:
        return fail(EXIT_FAILURE, "out of memory: a smaller --batch, --context, --width or --layers needs less");
    case TRAIN_LIBRARY_ERROR: return fail(EXIT_FAILURE, "%s", cot_error_message());
    case TRAIN_BAD_CHECKPOINT:
        return fail(t->error.out_of_memory ? EXIT_FAILURE : EXIT_BAD_INPUT, "--checkpoint %s", t->error.text);
    case TRAIN_NO_CHECKPOINT: return fail(EXIT_FAILURE, "--checkpoint %s", t->error.text);
    case TRAIN_BAD_OPTION:
        return fail(t->error.out_of_memory ? EXIT_FAILURE : EXIT_BAD_INPUT, "%s %s", t->option, t->error.text);
    case TRAIN_DIVERGED:
        return fail(EXIT_FAILURE, "the loss is no longer finite after step %lld: try a smaller --lr",
                    (long long)t->curve.count);
    }
    return EXIT_SUCCESS;
}

/* The arguments and results of the ranks of --gpus. */
typedef struct gpu_ranks {
    training *t; /* of rank 0 */
    train_result result;
    const corpus *text;
    const options *o;
    cot_queue *queue;
    int threads; /* of OpenMP, of all ranks */
} gpu_ranks;

/* Why a run ended early, for the other ranks. */
static const char *reason_of(const training *t, train_result result)
{
    if (result == TRAIN_LIBRARY_ERROR)
        return cot_error_message();
    return t->error.text[0] != '\0'   ? t->error.text
           : result == TRAIN_DIVERGED ? "the loss is not finite"
                                      : "out of memory";
}

static void train_rank(const ranks *r, void *context)
{
    gpu_ranks *g = context;
    training own;
    omp_set_num_threads(g->threads > r->size ? g->threads / r->size : 1);
    training *t = r->rank == 0 ? g->t : &own;
    const train_result result = train(t, g->text, g->o, r, g->queue);
    if (result != TRAIN_DONE)
        ranks_break(r, reason_of(t, result));
    if (r->rank == 0)
        g->result = result;
    else
        training_destroy(t);
}

/* Trains on the ranks of mpirun, or of --gpus. */
static train_result train_on_ranks(training *t, const corpus *text, const options *o, const ranks *r, cot_queue *queue)
{
    gpu_ranks g = {t, TRAIN_OUT_OF_MEMORY, text, o, queue, omp_get_max_threads()};
    if (o->gpus == 1)
        return train(t, text, o, r, queue);
    *t = (training){0};
    ranks_run_threads((int)o->gpus, (int)o->context_ranks, train_rank, &g);
    omp_set_num_threads(g.threads);
    return g.result;
}

static int train_and_report(const corpus *text, const options *o, const ranks *r, cot_queue *queue)
{
    training t;
    sample_text sample;
    io_error error;
    if (!sample_text_open(&sample, o, text, &error)) {
        sample_text_close(&sample);
        return fail(error.out_of_memory ? EXIT_FAILURE : EXIT_BAD_INPUT, "%s", error.text);
    }
    print_start(text, o, queue);
    int status = report_failure(&t, train_on_ranks(&t, text, o, r, queue));
    if (status == EXIT_SUCCESS && r->rank == 0)
        status = report(&t, &sample, o, queue);
    training_destroy(&t);
    sample_text_close(&sample);
    return status;
}

/* Trains one of several runs, and writes its curve to its own folder. */
static int train_one(const corpus *text, const options *o, const ranks *r, cot_queue *queue, const char *folder,
                     finished_run *result)
{
    training t;
    options run_options = *o;
    run_options.out = folder;
    print_start(text, &run_options, queue);
    int status = report_failure(&t, train_on_ranks(&t, text, &run_options, r, queue));
    if (status == EXIT_SUCCESS && r->rank == 0)
        status = make_folder("--out", folder);
    if (status == EXIT_SUCCESS && r->rank == 0) {
        print_results(&t, o);
        status = write_curve(&t, &run_options);
        *result = (finished_run){.arch = result->arch,
                                 .seed = o->seed,
                                 .parameters = count_parameters(&t),
                                 .train = t.train,
                                 .validation = t.validation,
                                 .bigram = t.curve.bigram,
                                 .tokens_per_second = t.tokens_per_second,
                                 .validation_bytes = t.validation_bytes};
    }
    training_destroy(&t);
    return status;
}

static int train_several(const corpus *text, const options *o, const ranks *r, cot_queue *queue)
{
    const int count = options_run_count(o);
    io_error error;
    if (o->json != NULL && !io_can_write(o->json, &error))
        return fail(error.out_of_memory ? EXIT_FAILURE : EXIT_BAD_INPUT, "--json %s", error.text);
    finished_run *runs = calloc((size_t)count, sizeof *runs);
    int status = runs != NULL ? EXIT_SUCCESS : fail(EXIT_FAILURE, "out of memory");
    for (int i = 0; status == EXIT_SUCCESS && i < count; i++) {
        char folder[4096];
        options run;
        runs[i].arch = options_run(o, i, &run);
        printf("%s== %s, seed %lld (%d of %d)\n", i > 0 ? "\n" : "", runs[i].arch->name, (long long)run.seed, i + 1,
               count);
        if (snprintf(folder, sizeof folder, "%s/%s-%lld", o->out, runs[i].arch->name, (long long)run.seed) >=
            (int)sizeof folder)
            status = fail(EXIT_BAD_INPUT, "--out %s: the name is too long", o->out);
        else
            status = train_one(text, &run, r, queue, folder, &runs[i]);
    }
    if (status == EXIT_SUCCESS && r->rank == 0) {
        runs_print(runs, count, o);
        if (o->json != NULL && !runs_write_json(runs, count, o, (int)cot_queue_threads(queue), &error))
            status = fail(EXIT_FAILURE, "--json %s", error.text);
    }
    free(runs);
    return status;
}

/* Decides for --backend auto, and says which backend the run has. */
static void choose_backend(options *o)
{
    if (strcmp(o->backend, "auto") != 0) {
        options_use_backend(o, o->backend);
        return;
    }
    const cuda_options smallest = {.dtype = COT_F32, .rows = 1, .micro_batches = 1, .vocabulary = 1, .loss_scale = 1};
    backend *b;
    const cot_status status = backend_cuda_create(&b, &smallest);
    if (status == COT_OK)
        backend_cuda_destroy(b);
    options_use_backend(o, status == COT_OK ? "cuda" : "cpu");
    if (status != COT_OK)
        printf("backend: cpu (%s)\n", cot_error_message());
    else
        printf("backend: cuda\n");
}

/* The ranks of mpirun or of --gpus: groups of --context-ranks share the sequences, and the groups the batches of a step. */
static int check_ranks(options *o, const ranks *r)
{
    const int64_t size = r->size > 1 ? r->size : o->gpus, groups = size / o->context_ranks;
    const char *name = o->gpus > 1 ? "GPUs" : "ranks";
    if (r->size > 1 && o->gpus > 1)
        return fail(EXIT_BAD_INPUT, "--gpus: with mpirun each rank has one GPU");
    if (o->transfers != NULL && (r->size == 1 || strcmp(o->backend, "cuda") != 0))
        return fail(EXIT_BAD_INPUT, "--transfers needs several ranks of mpirun, and --backend cuda");
    if (size % o->context_ranks != 0)
        return fail(EXIT_BAD_INPUT, "--context-ranks is %lld, expected a divisor of the number of %s, %lld",
                    (long long)o->context_ranks, name, (long long)size);
    if (o->context_ranks > 1 && o->context % (2 * o->context_ranks) != 0)
        return fail(EXIT_BAD_INPUT, "--context is %lld, expected a multiple of 2 x --context-ranks, %lld",
                    (long long)o->context, (long long)(2 * o->context_ranks));
    if (groups > 1 && o->accumulate % groups != 0)
        return fail(EXIT_BAD_INPUT, "--accumulate is %lld, expected a multiple of the %lld %s%s",
                    (long long)o->accumulate, (long long)groups, o->context_ranks > 1 ? "groups of " : "", name);
    if (o->gpus > 1)
        o->backend = "cuda";
    else if (r->size > 1 && strcmp(o->backend, "cuda") != 0)
        o->backend = "cpu"; /* auto could differ between the ranks */
    return EXIT_SUCCESS;
}

/* Whether there are as many GPUs as --gpus says. */
static int check_gpus(const options *o)
{
    cot_queue_options last;
    cot_queue *queue;
    COT_INIT(&last);
    last.backend = COT_BACKEND_CUDA;
    last.device = (int32_t)o->gpus - 1;
    if (o->gpus == 1)
        return EXIT_SUCCESS;
    if (cot_queue_create(&last, &queue) != COT_OK)
        return fail(EXIT_BAD_INPUT, "--gpus is %lld: %s", (long long)o->gpus, cot_error_message());
    cot_queue_destroy(queue);
    return EXIT_SUCCESS;
}

static int run(options *o, corpus *text, ranks *r)
{
    io_error error;
    int status = check_ranks(o, r);
    if (status == EXIT_SUCCESS)
        status = check_gpus(o);
    const bool gpus = strcmp(o->backend, "cuda") == 0,
               through_mpi = o->transfers != NULL && strcmp(o->transfers, "mpi") == 0;
    if (status == EXIT_SUCCESS && !ranks_divide(r, (int)o->context_ranks, gpus, through_mpi, &error))
        status = fail(EXIT_FAILURE, "%s", error.text);
    if (status == EXIT_SUCCESS)
        status = load_text(text, o);
    if (status == EXIT_SUCCESS)
        status = make_folder("--out", o->out);
    if (status == EXIT_SUCCESS && o->export != NULL)
        status = make_folder("--export", o->export);
    if (status != EXIT_SUCCESS)
        return status;
    choose_backend(o);
    if (o->threads > 0)
        omp_set_num_threads((int)o->threads);
    matrix_use_one_thread_per_call();
    cot_queue *queue;
    if (cot_queue_create(NULL, &queue) != COT_OK)
        return fail(EXIT_FAILURE, "%s", cot_error_message());
    if (options_run_count(o) > 1) {
        status = train_several(text, o, r, queue);
    } else {
        options single;
        options_run(o, 0, &single);
        status = train_and_report(text, &single, r, queue);
    }
    cot_queue_destroy(queue);
    return status;
}

int main(int argc, char **argv)
{
    options o;
    corpus text = {0};
    ranks r;
    io_error error;
    options_parse(&o, argc, argv);
    train_catch_interrupt();
    signal(SIGXFSZ, SIG_IGN); /* a file size limit then is a write error, like a full disk */
    int status = ranks_open(&r, &error) ? EXIT_SUCCESS : fail(EXIT_FAILURE, "%s", error.text);
    if (status == EXIT_SUCCESS && r.rank > 0 && freopen("/dev/null", "w", stdout) == NULL) /* only rank 0 prints */
        status = fail(EXIT_FAILURE, "/dev/null: %s", strerror(errno));
    if (status == EXIT_SUCCESS)
        status = run(&o, &text, &r);
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == EXIT_SUCCESS)
        status = fail(EXIT_FAILURE, "standard output: %s", strerror(errno));
    corpus_destroy(&text);
    options_destroy(&o);
    if (status == EXIT_SUCCESS || status == EXIT_INTERRUPTED)
        ranks_close(&r);
    else
        ranks_abort(&r, status);
    return status;
}
